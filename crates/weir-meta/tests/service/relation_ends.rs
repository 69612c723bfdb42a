//! When a file is complete at home: closes that get lost, ranges that home does not take, truncations that
//! come meanwhile.
use crate::common::*;
use bytes::Bytes;
use std::time::Duration;
use weir_proto::meta::*;
use weir_proto::recall::*;
use weir_proto::relation::*;
use weir_proto::{InodeId, VolumeId};

/// Of the root volume; data that is at home may be evicted.
pub fn relation_to(op: Op, url: &str) -> RelationAdd {
    let (url, direction, ids) = (url.to_owned(), Direction::Push, HomeIds::default());
    let (cred, volume, evict, import) = (root(), VolumeId::ROOT, true, false);
    RelationAdd { op, cred, volume, url, direction, evict, import, ids }
}

/// This number of bytes from the beginning on, written at time 7.
pub fn written(op: Op, made: &Entry, size: u64) -> Commit {
    Commit {
        op,
        ino: made.attr.ino,
        token_epoch: made.lease.token_epoch,
        size,
        mtime: Time { nanos: 7 },
        allocated: size,
        inline: None,
        drop_inline: false,
        clean: true,
        close_writes: 0,
        data_end: size,
        append_token: false,
        changed: vec![Range { offset: 0, len: size }],
    }
}

/// A new file of this number of bytes, still open.
async fn write_new(user: &Client, name: &str, size: u64) -> InodeId {
    let made = user.create(ROOT, name).await.unwrap().entry;
    user.call(&written(user.op(), &made, size)).await.unwrap();
    made.attr.ino
}

/// The writer of a file has closed it, and the leader does not know: the client died before its report, or
/// the leader after it. Home gets the file's end all the same.
#[test]
fn a_file_is_complete_also_if_its_close_was_lost() {
    for with_leader in [false, true] {
        simulate(13, async |world| {
            let meta = start(&world).await;
            let (mut user, mover) =
                (Client::start(&world, "user").await, Client::start(&world, "mover").await);
            let relation = user.call(&relation_to(user.op(), "file:///home")).await.unwrap().id;
            let ino = write_new(&user, "f", 10).await;
            if with_leader {
                user.close(ino, true).await.unwrap();
                drop(meta);
                world.power_cut("meta");
                let started = start(&world).await;
                user.reconnect("user").await;
                user.resume(vec![]).await.unwrap();
                std::mem::forget(started);
            } else {
                user.call(&SessionClose { session: user.session }).await.unwrap();
                std::mem::forget(meta);
            }
            drop(mover);
            let mover = Client::start(&world, "another mover").await;
            let deadline = mover.env.clock.now() + PATIENCE;
            let (mut leader, mut finish) = (0, None);
            while finish.is_none() {
                assert!(mover.env.clock.now() < deadline, "with the leader: {with_leader}");
                for work in take(&mover, &mut leader).await {
                    assert_eq!(work.orphans, [], "nothing of it was lost");
                    finish = work.extents.iter().find_map(|e| e.finish.clone());
                    let wrote = work.extents.iter().map(|e| wrote(e, done())).collect();
                    complete(&mover, relation, &work.names, wrote).await;
                }
            }
            let finish = finish.unwrap();
            assert_eq!((finish.size, finish.attrs.mtime), (10, Time { nanos: 7 }));
        });
    }
}

/// The places of the parts of an upload are known when the leader got their report. A mover that got more of
/// the file before that would begin another upload, and abort the first one with its contents.
#[test]
fn a_file_sent_in_parts_continues_after_each_report() {
    simulate(17, async |world| {
        let _meta = start(&world).await;
        let (user, mover) = (Client::start(&world, "user").await, Client::start(&world, "mover").await);
        let relation = user.call(&relation_to(user.op(), "s3://home")).await.unwrap().id;
        let made = user.create(ROOT, "f").await.unwrap().entry;
        let part = weir_proto::part::FIRST_PART_BYTES;
        let grow = async |parts: u64| {
            let changed = vec![Range { offset: (parts - 1) * part, len: part }];
            let commit = Commit { changed, ..written(user.op(), &made, parts * part) };
            user.call(&commit).await.unwrap();
        };
        let mut leader = 0;
        let mut assigned = async || {
            let mut extents = Vec::new();
            for _ in 0..4 {
                for work in take(&mover, &mut leader).await {
                    complete(&mover, relation, &work.names, vec![]).await;
                    extents.extend(work.extents);
                }
            }
            extents
        };
        grow(1).await;
        let first = assigned().await;
        assert_eq!(first.iter().map(|e| (e.offset, e.len)).collect::<Vec<_>>(), [(0, part)]);
        grow(2).await;
        user.close(made.attr.ino, true).await.unwrap();
        assert_eq!(assigned().await, [], "neither more nor the end of it");
        complete(&mover, relation, &[], vec![wrote(&first[0], done())]).await;
        let second = assigned().await;
        assert_eq!((second[0].offset, second[0].len), (part, part));
        assert_eq!(second[0].expect.fingerprint, b("s"), "the reported fingerprint");
    });
}

/// No client ever writes to a file: it was made without being opened, or its maker died before the first
/// byte. It is complete at home, and settled, all the same; the second one after a mover has inspected it.
#[test]
fn a_file_that_was_never_written_is_complete() {
    for is_opened in [false, true] {
        simulate(16, async |world| {
            let _meta = start(&world).await;
            let (user, mover) = (Client::start(&world, "user").await, Client::start(&world, "mover").await);
            let relation = user.call(&relation_to(user.op(), "file:///home")).await.unwrap().id;
            let ino = match is_opened {
                true => user.create(ROOT, "f").await.unwrap().entry.attr.ino,
                false => {
                    let (op, cred, name, kind) = (user.op(), root(), b("f"), FileKind::Regular);
                    let (mode, umask, rdev) = (0o644, 0, 0);
                    let made = Mknod { op, cred, parent: ROOT, name, kind, mode, umask, rdev };
                    user.call(&made).await.unwrap().entry.attr.ino
                }
            };
            user.call(&SessionClose { session: user.session }).await.unwrap();
            let (mut leader, mut recovered, mut another) = (0, Vec::new(), None);
            let deadline = mover.env.clock.now() + PATIENCE;
            let is_settled = async |relation| {
                let find = WhereAtHome { session: mover.session, ino, relation: Some(relation) };
                mover.call(&find).await.is_ok_and(|place| !place.unsettled)
            };
            loop {
                assert!(mover.env.clock.now() < deadline, "opened: {is_opened}");
                match another {
                    // What home has is seen again for another one, and not shipped again.
                    None if is_settled(relation).await => {
                        let add = relation_to(mover.op(), "file:///another");
                        another = Some(mover.call(&add).await.unwrap().id);
                    }
                    Some(another) if is_settled(another).await => break,
                    _ => {}
                }
                for work in take(&mover, &mut leader).await {
                    let is_again = another.is_some() && work.relation == relation;
                    assert!(!is_again || work.extents.is_empty(), "{:?}", work.extents);
                    for ino in &work.orphans {
                        let entry = mover.open(*ino, false, true).await.unwrap().entry;
                        assert!(entry.lease.recover);
                        let (op, token_epoch) = (mover.op(), entry.lease.token_epoch);
                        mover.call(&Recovered { op, ino: *ino, token_epoch }).await.unwrap();
                        mover.close(*ino, true).await.unwrap();
                        recovered.push(*ino);
                    }
                    let wrote = work.extents.iter().map(|e| wrote(e, done())).collect();
                    complete(&mover, work.relation, &work.names, wrote).await;
                }
            }
            assert_eq!(recovered, if is_opened { vec![ino] } else { vec![] });
        });
    }
}

/// Bytes that a dead writer sent and did not commit become part of the file when it is recovered. Home must
/// get them without an open of the file.
#[test]
fn a_complete_file_is_recovered_if_its_next_writer_dies() {
    simulate(18, async |world| {
        let _meta = start(&world).await;
        let (user, mover) = (Client::start(&world, "user").await, Client::start(&world, "mover").await);
        let relation = user.call(&relation_to(user.op(), "file:///home")).await.unwrap().id;
        let ino = write_new(&user, "f", 10).await;
        user.close(ino, true).await.unwrap();
        let mut leader = 0;
        let is_settled = async || {
            let find = WhereAtHome { session: mover.session, ino, relation: Some(relation) };
            mover.call(&find).await.is_ok_and(|place| !place.unsettled)
        };
        let deadline = mover.env.clock.now() + PATIENCE;
        while !is_settled().await {
            assert!(mover.env.clock.now() < deadline, "home has all of it");
            for work in take(&mover, &mut leader).await {
                assert_eq!(work.orphans, []);
                let wrote = work.extents.iter().map(|e| wrote(e, done())).collect();
                complete(&mover, relation, &work.names, wrote).await;
            }
        }
        let next = Client::start(&world, "next").await;
        next.open(ino, false, true).await.unwrap();
        next.acquire(ino, LeaseKind::Write).await.unwrap();
        assert!(!is_settled().await, "a client writes it");
        next.call(&SessionClose { session: next.session }).await.unwrap();
        let mut orphans = Vec::new();
        while orphans.is_empty() {
            assert!(mover.env.clock.now() < deadline, "no mover is asked to recover it");
            for work in take(&mover, &mut leader).await {
                orphans.extend(work.orphans);
            }
        }
        assert_eq!(orphans, [ino]);
    });
}

/// A mover writes the end of a file though home did not take a range before it: the range goes once more, and
/// the end after it.
#[test]
fn the_end_of_a_file_goes_home_after_all_that_comes_before_it() {
    simulate(14, async |world| {
        let _meta = start(&world).await;
        let (user, mover) = (Client::start(&world, "user").await, Client::start(&world, "mover").await);
        let relation = user.call(&relation_to(user.op(), "file:///data")).await.unwrap().id;
        let ino = write_new(&user, "f", 30).await;
        user.close(ino, true).await.unwrap();
        // Requests and their outcomes: the first range never arrives the first time.
        let (mut failed, mut written, mut order) = (false, false, Vec::new());
        let (mut leader, deadline) = (0, user.env.clock.now() + PATIENCE);
        while !(written && order.last() == Some(&"end")) {
            assert!(user.env.clock.now() < deadline, "{order:?}");
            for work in take(&mover, &mut leader).await {
                let mut extents = Vec::new();
                for e in &work.extents {
                    let fails = e.finish.is_none() && !failed;
                    failed |= fails;
                    written |= e.finish.is_none() && !fails;
                    order.push(if e.finish.is_some() { "end" } else { "range" });
                    let outcome = match fails {
                        true => Outcome::Later { why: "home hangs".into() },
                        false => done(),
                    };
                    extents.push(wrote(e, outcome));
                }
                complete(&mover, relation, &work.names, extents).await;
            }
        }
        assert_eq!(order, ["range", "end", "range", "end"]);
    });
}

/// A file is truncated while a mover writes its end: no mover waits for the truncated bytes.
#[test]
fn truncated_bytes_are_not_waited_for_at_the_end() {
    simulate(15, async |world| {
        let _meta = start(&world).await;
        let (user, mover) = (Client::start(&world, "user").await, Client::start(&world, "mover").await);
        let relation = user.call(&relation_to(user.op(), "file:///home")).await.unwrap().id;
        let ino = write_new(&user, "f", 30).await;
        let info = || async {
            let list = RelationList { session: user.session, volume: None };
            user.call(&list).await.unwrap().relations.remove(0)
        };
        let (mut leader, deadline) = (0, user.env.clock.now() + PATIENCE);
        let (mut closed, mut cut) = (false, false);
        while !cut || info().await.state != (RelationState::Synced {}) {
            assert!(user.env.clock.now() < deadline, "{:?}", info().await);
            for work in take(&mover, &mut leader).await {
                if !cut && work.extents.iter().any(|e| e.finish.is_some()) {
                    let (op, size) = (user.op(), Some(4));
                    let shorter = SetAttr {
                        op,
                        cred: root(),
                        ino,
                        mode: None,
                        uid: None,
                        gid: None,
                        size,
                        atime: None,
                        mtime: None,
                    };
                    user.call(&shorter).await.unwrap();
                    while info().await.backlog_names == 0 {
                        assert!(user.env.clock.now() < deadline, "{:?}", info().await);
                        user.env.clock.sleep(Duration::from_millis(10)).await;
                    }
                    cut = true;
                }
                let wrote = work.extents.iter().map(|e| wrote(e, done())).collect();
                complete(&mover, relation, &work.names, wrote).await;
            }
            if !closed && info().await.shipped_bytes == 30 {
                user.close(ino, true).await.unwrap();
                closed = true;
            }
        }
    });
}

/// A mover has the times of a directory to set when that is renamed: the rename is assigned when these are
/// reported. Else home would be asked to move a directory in another state, or the times go to another one's
/// path.
#[test]
fn a_directory_whose_times_are_being_set_is_renamed_after_that() {
    simulate(15, async |world| {
        let _meta = start(&world).await;
        let (user, mover) = (Client::start(&world, "user").await, Client::start(&world, "mover").await);
        let relation = user.call(&relation_to(user.op(), "file:///data")).await.unwrap().id;
        let dir = user.mkdir(ROOT, "d").await.unwrap().entry.attr.ino;
        user.mkdir(dir, "below").await.unwrap();
        let mut leader = 0;
        let (mut times, mut renames) = (Vec::new(), 0);
        let deadline = user.env.clock.now() + PATIENCE;
        while renames == 0 {
            assert!(user.env.clock.now() < deadline, "it is never renamed");
            let work = take(&mover, &mut leader).await;
            let assigned: Vec<NameWork> = work.into_iter().flat_map(|w| w.names).collect();
            let is_nothing_new = assigned.is_empty();
            let (new_times, others): (Vec<_>, Vec<_>) = assigned
                .into_iter()
                .partition(|n| n.ino == dir && matches!(n.action, NameAction::Attributes { .. }));
            if !new_times.is_empty() {
                // They stay untold while the directory is renamed.
                times = new_times;
                let (op, cred, mode) = (user.op(), root(), RenameMode::Replace);
                let (name, new_name) = (Bytes::from_static(b"d"), Bytes::from_static(b"e"));
                let rename = Rename { op, cred, parent: ROOT, name, new_parent: ROOT, new_name, mode };
                user.call(&rename).await.unwrap();
            } else if is_nothing_new && !times.is_empty() {
                complete(&mover, relation, &std::mem::take(&mut times), vec![]).await;
            }
            renames += others.iter().filter(|n| matches!(n.action, NameAction::Rename { .. })).count();
            assert!(renames == 0 || times.is_empty(), "renamed while its times are being set");
            complete(&mover, relation, &others, vec![]).await;
        }
    });
}

/// All files of a volume are inspected for a new home, and a file has two names: the second one is assigned
/// when the write under the first one is reported. Else its maker may report later how the file was before,
/// and the state at home would pass for a stranger's.
#[test]
fn a_second_name_that_is_found_waits_for_what_is_being_written() {
    simulate(16, async |world| {
        let _meta = start(&world).await;
        let (user, mover) = (Client::start(&world, "user").await, Client::start(&world, "mover").await);
        let ino = write_new(&user, "f", 10).await;
        user.close(ino, true).await.unwrap();
        let mut parent = ROOT; // so deep that it is found last
        for _ in 0..3 {
            parent = user.mkdir(parent, "d").await.unwrap().entry.attr.ino;
        }
        user.call(&Link { op: user.op(), cred: root(), ino, parent, name: b("second") }).await.unwrap();
        let relation = user.call(&relation_to(user.op(), "file:///data")).await.unwrap().id;
        let (mut leader, mut held, mut is_linked) = (0, Vec::new(), false);
        let deadline = user.env.clock.now() + PATIENCE;
        while !is_linked {
            assert!(user.env.clock.now() < deadline, "the second name is never given out");
            let work = take(&mover, &mut leader).await;
            let is_nothing_new = work.iter().all(|w| w.names.is_empty() && w.extents.is_empty());
            for work in work {
                held.extend(work.extents.iter().map(|e| wrote(e, done())));
                is_linked |= work.names.iter().any(|n| matches!(n.action, NameAction::Link { .. }));
                assert!(!is_linked || held.is_empty(), "linked while it is being written");
                complete(&mover, relation, &work.names, vec![]).await;
            }
            if is_nothing_new && !held.is_empty() {
                complete(&mover, relation, &[], std::mem::take(&mut held)).await;
            }
        }
    });
}

/// Its former end may be reported after later writes have been shipped.
#[test]
fn a_file_that_is_written_on_is_not_settled() {
    simulate(29, async |world| {
        let _meta = start(&world).await;
        let (user, mover) = (Client::start(&world, "user").await, Client::start(&world, "mover").await);
        let relation = user.call(&relation_to(user.op(), "file:///home")).await.unwrap().id;
        let ino = write_new(&user, "f", 10).await;
        user.close(ino, true).await.unwrap();
        let settled = async || {
            let ask = WhereAtHome { session: user.session, ino, relation: Some(relation) };
            !user.call(&ask).await.unwrap().unsettled
        };
        let (mut leader, mut ends) = (0, Vec::new());
        let deadline = mover.env.clock.now() + 2 * PATIENCE;
        while ends.is_empty() {
            assert!(mover.env.clock.now() < deadline, "its end is never sent");
            for work in take(&mover, &mut leader).await {
                let (end, rest) = work.extents.iter().partition::<Vec<_>, _>(|e| e.finish.is_some());
                ends.extend(end.into_iter().cloned());
                let rest = rest.into_iter().map(|e| wrote(e, done())).collect();
                complete(&mover, relation, &work.names, rest).await;
            }
        }
        assert!(!settled().await);
        let opened = user.open(ino, false, true).await.unwrap().entry;
        user.call(&written(user.op(), &opened, 20)).await.unwrap();
        let mut rest = Vec::new();
        while rest.is_empty() {
            assert!(mover.env.clock.now() < deadline, "what was written since is never sent");
            for work in take(&mover, &mut leader).await {
                rest.extend(work.extents);
            }
        }
        complete(&mover, relation, &[], ends.iter().map(|e| wrote(e, done())).collect()).await;
        complete(&mover, relation, &[], rest.iter().map(|e| wrote(e, done())).collect()).await;
        assert!(!settled().await);
        user.close(ino, true).await.unwrap();
        while !settled().await {
            assert!(mover.env.clock.now() < deadline);
            for work in take(&mover, &mut leader).await {
                let all = work.extents.iter().map(|e| wrote(e, done())).collect();
                complete(&mover, relation, &work.names, all).await;
            }
        }
    });
}

/// A mover may have recalled bytes that a truncation overtook: they are on targets, and no part of the file.
#[test]
fn growth_behind_evicted_bytes_is_shipped_after_the_recall() {
    simulate(23, async |world| {
        let meta = start(&world).await;
        let (user, mover) = (Client::start(&world, "user").await, Client::start(&world, "mover").await);
        let relation = user.call(&relation_to(user.op(), "file:///home")).await.unwrap().id;
        let ino = write_new(&user, "f", 10).await;
        user.close(ino, true).await.unwrap();
        let mut leader = 0;
        let mut work = async |recalls: bool| {
            let mut extents = Vec::new();
            for _ in 0..4 {
                for work in take(&mover, &mut leader).await {
                    complete(
                        &mover,
                        relation,
                        &work.names,
                        work.extents.iter().map(|e| wrote(e, done())).collect(),
                    )
                    .await;
                    extents.extend(work.extents.iter().map(|e| (e.offset, e.len)));
                }
                if recalls {
                    let (session, busy) = (mover.session, vec![]);
                    let wanted =
                        mover.call(&TakeRecalls { session, max: 8, wait_ms: 200, busy }).await.unwrap();
                    for RecallWork { ino, from, to, token_epoch, .. } in wanted.recalls {
                        let op = mover.op();
                        mover.call(&Filled { op, ino, from, to, token_epoch, learned: None }).await.unwrap();
                    }
                }
            }
            extents
        };
        assert_eq!(work(false).await.first(), Some(&(0, 10)));
        meta.at_home.lock().unwrap().insert(ino);
        user.call(&Evict { op: user.op(), cred: root(), ino, from: 0, to: 10, under: 0 }).await.unwrap();
        for size in [5, 8] {
            let (op, cred, size) = (user.op(), root(), Some(size));
            let (mode, uid, gid, atime, mtime) = (None, None, None, None, None);
            user.call(&SetAttr { op, cred, ino, mode, uid, gid, size, atime, mtime }).await.unwrap();
        }
        let covers = |(offset, len): &(u64, u64)| *offset <= 5 && offset.saturating_add(*len) >= 8;
        let sent = work(false).await;
        assert!(!sent.iter().any(covers), "{sent:?}");
        assert_eq!(user.getattr(ino).await.unwrap().attr.evicted, 5);
        let sent = work(true).await;
        assert!(sent.iter().any(covers), "{sent:?}");
        assert_eq!(user.getattr(ino).await.unwrap().attr.evicted, 0);
    });
}

/// A volume changes its home: the new one may evict from now on, the old one may not. That has the only copy
/// of the evicted bytes: they are recalled from it, and it is not removed, until the new one has them.
#[test]
fn a_home_with_the_only_bytes_is_not_removed() {
    simulate(24, async |world| {
        let meta = start(&world).await;
        let (user, mover) = (Client::start(&world, "user").await, Client::start(&world, "mover").await);
        let old = user.call(&relation_to(user.op(), "file:///old")).await.unwrap().id;
        let ino = write_new(&user, "f", 10).await;
        user.close(ino, true).await.unwrap();
        let mut leader = 0;
        let mut work = async |recalls: bool| {
            for _ in 0..6 {
                for work in take(&mover, &mut leader).await {
                    let wrote = work.extents.iter().map(|e| wrote(e, done())).collect();
                    complete(&mover, work.relation, &work.names, wrote).await;
                }
                if !recalls {
                    continue;
                }
                let ask = TakeRecalls { session: mover.session, max: 8, wait_ms: 10, busy: vec![] };
                for RecallWork { ino, from, to, token_epoch, .. } in mover.call(&ask).await.unwrap().recalls {
                    let op = mover.op();
                    mover.call(&Filled { op, ino, from, to, token_epoch, learned: None }).await.unwrap();
                }
            }
        };
        let evict = async || {
            meta.at_home.lock().unwrap().insert(ino);
            let evict = Evict { op: user.op(), cred: root(), ino, from: 0, to: 10, under: 0 };
            user.call(&evict).await.unwrap();
        };
        let change = async |relation, verb| {
            user.call(&RelationDo { op: user.op(), cred: root(), relation, verb }).await
        };
        let comes_from = async || {
            let ask = WhereAtHome { session: user.session, ino, relation: None };
            user.call(&ask).await.unwrap().relation
        };
        work(false).await;
        evict().await;
        let new = RelationAdd { evict: false, ..relation_to(user.op(), "file:///new") };
        let new = user.call(&new).await.unwrap().id;
        work(false).await;
        change(new, RelationVerb::AllowEviction).await.unwrap();
        change(old, RelationVerb::ForbidEviction).await.unwrap();
        assert_eq!(comes_from().await, old);
        let refused = change(old, RelationVerb::Remove).await.unwrap_err();
        assert!(refused.context.contains("recall them first"), "{refused}");
        work(true).await;
        assert_eq!(user.getattr(ino).await.unwrap().attr.evicted, 0);
        work(false).await;
        evict().await;
        assert_eq!(comes_from().await, new);
        // Found damaged there, it comes from where it is as it was left.
        let (cred, why, how) = (root(), "its bytes are others".to_owned(), Resolution::Retry);
        let suspect = RelationSuspect { op: user.op(), cred: cred.clone(), relation: new, ino, why };
        user.call(&suspect).await.unwrap();
        assert_eq!(comes_from().await, old);
        let resolve = RelationResolve { op: user.op(), cred, relation: new, ino, how };
        user.call(&resolve).await.unwrap();
        change(old, RelationVerb::Remove).await.unwrap();
        assert_eq!(comes_from().await, new);
    });
}

/// Evicted data loses its proof at all homes when the file is truncated within it. The home from which it is
/// recalled has one by that; the others get the bytes once more, also those for which nothing may be evicted
/// now.
#[test]
fn data_recalled_from_one_home_is_shipped_to_the_others_again() {
    simulate(25, async |world| {
        let meta = start(&world).await;
        let (user, mover) = (Client::start(&world, "user").await, Client::start(&world, "mover").await);
        let first = RelationAdd { evict: false, ..relation_to(user.op(), "file:///first") };
        let first = user.call(&first).await.unwrap().id;
        let other = user.call(&relation_to(user.op(), "file:///other")).await.unwrap().id;
        let ino = write_new(&user, "f", 10).await;
        user.close(ino, true).await.unwrap();
        let mut leader = 0;
        let mut sent_to_first = async || {
            let mut sent = Vec::new();
            for _ in 0..6 {
                for work in take(&mover, &mut leader).await {
                    let done = work.extents.iter().map(|e| wrote(e, done())).collect();
                    complete(&mover, work.relation, &work.names, done).await;
                    if work.relation == first {
                        sent.extend(
                            work.extents.iter().filter(|e| e.finish.is_none()).map(|e| (e.offset, e.len)),
                        );
                    }
                }
            }
            sent
        };
        assert_eq!(sent_to_first().await, [(0, 10)]);
        meta.at_home.lock().unwrap().insert(ino);
        user.call(&Evict { op: user.op(), cred: root(), ino, from: 0, to: 10, under: 0 }).await.unwrap();
        let (op, cred, size) = (user.op(), root(), Some(5));
        let (mode, uid, gid, atime, mtime) = (None, None, None, None, None);
        user.call(&SetAttr { op, cred, ino, mode, uid, gid, size, atime, mtime }).await.unwrap();
        assert_eq!(sent_to_first().await, []);
        user.call(&WantRecall { session: user.session, ino, from: 0, to: 5 }).await.unwrap();
        let ask = TakeRecalls { session: mover.session, max: 8, wait_ms: 200, busy: vec![] };
        for RecallWork { ino, from, to, token_epoch, .. } in mover.call(&ask).await.unwrap().recalls {
            let learned = Some(Learned { relation: other, sums: vec![1] });
            mover.call(&Filled { op: mover.op(), ino, from, to, token_epoch, learned }).await.unwrap();
        }
        assert_eq!(sent_to_first().await, [(0, 5)]);
    });
}

// ---- a mover

async fn take(mover: &Client, leader: &mut u64) -> Vec<RelationWork> {
    let (session, limited_by) = (mover.session, String::new());
    let take = LeaseWork { session, leader: *leader, bytes: 64, items: 8, wait_ms: 200, limited_by };
    let taken = mover.call(&take).await.unwrap();
    *leader = taken.leader;
    taken.relations
}

fn done() -> Outcome {
    Outcome::Done { fingerprint: Bytes::from_static(b"s") }
}

fn wrote(e: &ExtentWork, outcome: Outcome) -> ExtentDone {
    let (ino, offset, len, finished) = (e.ino, e.offset, e.len, e.finish.is_some());
    ExtentDone { ino, offset, len, finished, sums: if finished { vec![] } else { vec![0] }, outcome }
}

/// Names are done.
async fn complete(mover: &Client, relation: RelationId, names: &[NameWork], extents: Vec<ExtentDone>) {
    let names: Vec<NameDone> = names.iter().map(|n| NameDone { number: n.number, outcome: done() }).collect();
    if names.is_empty() && extents.is_empty() {
        return;
    }
    let (session, orphans, listings) = (mover.session, vec![], vec![]);
    mover.call(&CompleteWork { session, relation, names, extents, orphans, listings }).await.unwrap();
}

/// A device that home refuses is offered again only after a decision, and is forgotten when it is removed.
#[test]
fn a_refused_device_waits_for_a_decision_or_its_removal() {
    simulate(31, async |world| {
        let _meta = start(&world).await;
        let (user, mover) = (Client::start(&world, "user").await, Client::start(&world, "mover").await);
        let relation = user.call(&relation_to(user.op(), "file:///home")).await.unwrap().id;
        let (cred, name) = (root(), b("device"));
        let (kind, mode, umask, rdev) = (FileKind::CharDevice, 0o600, 0, 259);
        let made = Mknod { op: user.op(), cred, parent: ROOT, name, kind, mode, umask, rdev };
        let ino = user.call(&made).await.unwrap().entry.attr.ino;
        let mut leader = 0;
        let mut refuses = async || {
            let (session, limited_by) = (mover.session, String::new());
            let lease = LeaseWork { session, leader, bytes: 64, items: 8, wait_ms: 0, limited_by };
            let leased = mover.call(&lease).await.unwrap();
            leader = leased.leader;
            let Some(work) = leased.relations.into_iter().next() else { return 0 };
            let refused = |why: &str| Outcome::Refused { why: why.to_owned() };
            let names: Vec<NameDone> = work
                .names
                .iter()
                .map(|work| NameDone { number: work.number, outcome: refused("a device") })
                .collect();
            let (assigned, none) = (names.len(), Vec::new());
            let (orphans, listings) = (Vec::new(), Vec::new());
            let done = CompleteWork { session, relation, names, extents: none, orphans, listings };
            mover.call(&done).await.unwrap();
            assigned
        };
        let conflicts = async || {
            let all = RelationList { session: user.session, volume: None };
            user.call(&all).await.unwrap().relations[0].conflicts.len()
        };
        let mut assigned = 0;
        for _ in 0..4 {
            assigned += refuses().await;
        }
        assert_eq!((assigned, conflicts().await), (1, 1));
        let (cred, how) = (root(), Resolution::Retry);
        let retry = RelationResolve { op: user.op(), cred, relation, ino, how };
        user.call(&retry).await.unwrap();
        assert_eq!((refuses().await, refuses().await, conflicts().await), (1, 0, 1));
        user.unlink(ROOT, "device").await.unwrap();
        assert_eq!((refuses().await, conflicts().await), (0, 0));
    });
}
