//! Files that a client creates without asking: others see them, syncs make them durable, and what is lost is
//! an error.
use super::*;
use std::sync::Arc;
use weir_client::{ClientConfig, NoKernel, SetAttrs, SetTime};
use weir_proto::meta::{Attr, Cred, RenameMode, Time};
use weir_proto::quota::{Holder, OwnerKind};
use weir_proto::volume::Quota;
use weir_proto::{ErrorKind, NameRule, Result};

/// Has the names of a directory after `after` creates in it.
pub async fn client_after(lab: &Lab, name: &str, after: Option<u32>) -> Client {
    let config = ClientConfig { local_creates_after: after, ..lab.config(name) };
    Client::connect(lab.world().node(name), config, Arc::new(NoKernel)).await.unwrap()
}
pub async fn dir(c: &Client, name: &str) -> InodeId {
    c.mkdir(&root(), ROOT, name.as_bytes(), 0o755).await.unwrap().attr.ino
}
async fn create_in(c: &Client, dir: InodeId, name: &str) -> Handle {
    c.create(&root(), dir, name.as_bytes(), 0o644, true, OpenMode::WRITE).await.unwrap().handle
}
pub async fn small(c: &Client, dir: InodeId, name: &str, bytes: &[u8]) {
    let h = create_in(c, dir, name).await;
    write(c, h, 0, bytes).await;
    close(c, h).await;
}
/// With the names of `d` at hand: the next create is not a message.
async fn ready(lab: &Lab, c: &Client, d: InodeId) {
    for n in 0..50 {
        let before = c.status().asked;
        small(c, d, &format!("first{n}"), b"").await;
        if c.status().asked == before {
            return c.sync_names(d).await.unwrap();
        }
        lab.world().sleep(Duration::from_millis(2)).await;
    }
    panic!("the client does not get the names");
}
pub async fn read_in(c: &Client, d: InodeId, name: &str) -> Result<Vec<u8>> {
    let found = c.lookup(&root(), d, name.as_bytes()).await?;
    let found = found.ok_or_else(|| weir_proto::Error::not_found(name.to_owned()))?;
    let h = c.open(&root(), found.attr.ino, OpenMode::READ).await?.handle;
    let bytes = c.read(h, 0, 1 << 30).await.map(|parts| parts.concat());
    c.release(h).await?;
    bytes
}

#[test]
fn files_created_alone_in_a_directory_cost_few_messages() {
    Lab::new(1).run(6, |lab| async move {
        let mut asked = Vec::new();
        for (name, after) in [("a", Some(8)), ("b", None)] {
            let (c, reader) = (client_after(&lab, name, after).await, lab.client(&format!("r{name}")).await);
            let (d, before) = (dir(&c, name).await, c.status().asked);
            for n in 0..500 {
                small(&c, d, &format!("f{n}"), format!("content {n}").as_bytes()).await;
                lab.world().sleep(Duration::from_micros(100)).await;
            }
            c.sync_names(d).await.unwrap();
            asked.push(c.status().asked - before);
            for n in [0, 7, 8, 9, 100, 499] {
                let got = read_in(&reader, d, &format!("f{n}")).await.unwrap();
                same(&got, format!("content {n}").as_bytes());
            }
            let all = reader.readdir(&root(), d, 0, 1000, true).await.unwrap();
            assert_eq!(all.entries.len(), 500);
            c.check();
        }
        assert!(asked[0] * 10 < asked[1], "messages with and without: {asked:?}");
    });
}

/// As `rsync` does: each file is written under a temporary name.
#[test]
fn new_files_are_renamed_before_their_report() {
    Lab::new(11).run(6, |lab| async move {
        let (c, reader) = (client_after(&lab, "a", Some(1)).await, lab.client("b").await);
        let d = dir(&c, "d").await;
        ready(&lab, &c, d).await;
        let before = c.status().asked;
        for n in 0..200 {
            let (temporary, name) = (format!(".tmp{n}"), format!("f{n}"));
            small(&c, d, &temporary, format!("content {n}").as_bytes()).await;
            let mode = if n % 2 == 0 { RenameMode::Replace } else { RenameMode::NoReplace };
            c.rename(&root(), d, temporary.as_bytes(), d, name.as_bytes(), mode).await.unwrap();
            assert_eq!(c.lookup(&root(), d, temporary.as_bytes()).await.unwrap().map(|s| s.attr.ino), None);
            lab.world().sleep(Duration::from_micros(100)).await;
        }
        // Onto a name that exists, or is about to go: the leader decides, in the order of the calls.
        for (name, removed) in [("f0", false), ("f1", true)] {
            small(&c, d, "new", b"replaced").await;
            if removed {
                c.unlink(&root(), d, name.as_bytes()).await.unwrap();
            }
            c.rename(&root(), d, b"new", d, name.as_bytes(), RenameMode::Replace).await.unwrap();
        }
        small(&c, d, "new", b"").await;
        let refused = c.rename(&root(), d, b"new", d, b"f2", RenameMode::NoReplace).await;
        assert_eq!(refused.unwrap_err().kind, ErrorKind::Exists);
        c.unlink(&root(), d, b"new").await.unwrap();
        c.sync_names(d).await.unwrap();
        let asked = c.status().asked - before;
        assert!(asked < 60, "{asked} messages");
        for (n, want) in [(0, "replaced"), (1, "replaced"), (2, "content 2"), (199, "content 199")] {
            same(&read_in(&reader, d, &format!("f{n}")).await.unwrap(), want.as_bytes());
        }
        let all = reader.readdir(&root(), d, 0, 1000, true).await.unwrap();
        let first = all.entries.iter().filter(|e| e.name.starts_with(b"first")).count();
        assert_eq!(all.entries.len() - first, 200);
        c.check();
    });
}

/// Limits of a volume and of its users: files are created locally, and the limits hold to the byte and to the
/// file.
#[test]
fn limits_hold_for_files_created_locally() {
    const FILES: u64 = 400;
    const BYTES: u64 = 1000;
    Lab::new(9).run(6, |lab| async move {
        let (c, other) = (client_after(&lab, "a", Some(8)).await, lab.client("b").await);
        let v = c.create_volume(&root(), &new_volume("v", quota(0, FILES))).await.unwrap();
        let open_to_all = SetAttrs { mode: Some(0o777), ..SetAttrs::default() };
        let u = c.mkdir(&root(), v.root, b"u", 0o777).await.unwrap().attr.ino;
        c.setattr(&root(), u, None, open_to_all).await.unwrap();
        let user = Cred { uid: 7, gid: 50, groups: vec![50] };
        let holder = Holder { volume: v.id, kind: OwnerKind::User, id: 7 };
        let bytes = Quota { bytes_hard: Some(200 * BYTES + 1), ..Quota::NONE };
        c.set_owner_limit(&root(), holder, Some(bytes)).await.unwrap();
        let (mut written, mut asked) = (0, 0);
        for n in 0.. {
            let before = c.status().asked;
            let name = format!("f{n}");
            let made = c.create(&user, u, name.as_bytes(), 0o644, true, OpenMode::WRITE).await;
            let h = made.unwrap().handle;
            let wrote = c.write(h, 0, vec![3; BYTES as usize].into()).await;
            c.release(h).await.unwrap();
            asked += c.status().asked - before;
            lab.world().sleep(Duration::from_micros(100)).await;
            match wrote {
                Ok(n) => written += n as u64,
                Err(e) => {
                    assert_eq!(e.kind, ErrorKind::OverQuota, "{e}");
                    break;
                }
            }
        }
        assert_eq!(written, 200 * BYTES + 1);
        assert!(asked < 200, "{asked} messages for 201 files");
        c.sync_names(u).await.unwrap();
        c.check();
        let usage = other.volume("v").await.unwrap().usage;
        assert_eq!((usage.files, usage.bytes), (202, written));
        // Another user has the limit of files only: two clients fill it, one of them locally.
        let (mut mine, mut its) = (usage.files, 0);
        let full = |e: weir_proto::Error| assert_eq!(e.kind, ErrorKind::OverQuota, "{e}");
        let d = c.mkdir(&root(), v.root, b"d", 0o755).await.unwrap().attr.ino;
        let e = other.mkdir(&root(), v.root, b"e", 0o755).await.unwrap().attr.ino;
        let mut refused = [false; 2];
        for n in 0.. {
            for (i, (client, dir, count)) in
                [(&c, d, &mut mine), (&other, e, &mut its)].into_iter().enumerate()
            {
                let name = format!("g{n}");
                match client.create(&root(), dir, name.as_bytes(), 0o644, true, OpenMode::WRITE).await {
                    Ok(opened) => {
                        client.release(opened.handle).await.unwrap();
                        *count += 1;
                    }
                    Err(error) => {
                        full(error);
                        refused[i] = true;
                    }
                }
            }
            if refused == [true; 2] {
                break;
            }
            lab.world().sleep(Duration::from_millis(3)).await;
        }
        c.sync_names(d).await.unwrap();
        let usage = other.volume("v").await.unwrap().usage;
        assert_eq!((usage.files, usage.files + usage.directories), (mine + its, FILES));
        c.check();
    });
}

/// As `tar` and `cp -p` do: after the bytes they set times, owner and mode.
#[test]
fn attributes_set_after_a_create_go_with_its_report() {
    let set = SetAttrs {
        mode: Some(0o640),
        uid: Some(7),
        gid: Some(8),
        atime: Some(SetTime::At(Time { nanos: 11 })),
        mtime: Some(SetTime::At(Time { nanos: 12 })),
        size: None,
    };
    Lab::new(7).run(6, |lab| async move {
        let (c, reader) = (client_after(&lab, "a", Some(1)).await, lab.client("b").await);
        let d = dir(&c, "d").await;
        ready(&lab, &c, d).await;
        let before = c.status().asked;
        let mut shown = Vec::new();
        for (n, bytes) in [&b""[..], b"bytes", &[1; 3 * 1024]].into_iter().enumerate() {
            let opened = c.create(&root(), d, format!("f{n}").as_bytes(), 0o600, true, OpenMode::WRITE).await;
            let (h, ino) = opened.map(|o| (o.handle, o.stat.attr.ino)).unwrap();
            write(&c, h, 0, bytes).await;
            shown.push(c.setattr(&root(), ino, Some(h), set).await.unwrap().attr);
            close(&c, h).await;
        }
        let h = create_in(&c, d, "written").await;
        let ino = c.lookup(&root(), d, b"written").await.unwrap().unwrap().attr.ino;
        c.setattr(&root(), ino, Some(h), set).await.unwrap();
        write(&c, h, 0, b"later").await;
        close(&c, h).await;
        assert_eq!(c.status().asked, before, "nothing is reported yet");
        c.sync_names(d).await.unwrap();
        for (n, shown) in shown.iter().enumerate() {
            let seen = seen_by(&reader, d, &format!("f{n}")).await;
            assert_eq!((seen.mode, seen.uid, seen.gid), (0o640, 7, 8));
            assert_eq!((seen.atime, seen.mtime), (Time { nanos: 11 }, Time { nanos: 12 }));
            assert_eq!((seen.size, seen.ctime), (shown.size, shown.ctime), "file {n}");
        }
        assert!(seen_by(&reader, d, "written").await.mtime.nanos > 12);
        c.check();
    });
}
async fn seen_by(reader: &Client, d: InodeId, name: &str) -> Attr {
    reader.lookup(&root(), d, name.as_bytes()).await.unwrap().expect("the file is there").attr
}

/// Before the report and after it, a user may give a file only to a group of which it is a member.
#[test]
fn a_file_keeps_its_owner_before_its_report() {
    Lab::new(8).run(6, |lab| async move {
        let c = client_after(&lab, "a", Some(1)).await;
        let user = Cred { uid: 500, gid: 50, groups: vec![60] };
        let d = c.mkdir(&root(), ROOT, b"d", 0o777).await.unwrap().attr.ino;
        ready(&lab, &c, d).await;
        let opened = c.create(&user, d, b"f", 0o600, true, OpenMode::WRITE).await.unwrap();
        let ino = opened.stat.attr.ino;
        let owned_by = |uid, gid| SetAttrs { uid, gid, ..SetAttrs::default() };
        let before = c.status().asked;
        let attr = c.setattr(&user, ino, None, owned_by(Some(500), Some(60))).await.unwrap().attr;
        assert_eq!((attr.uid, attr.gid, c.status().asked), (500, 60, before));
        for refused in [owned_by(Some(501), None), owned_by(None, Some(70))] {
            let e = c.setattr(&user, ino, None, refused).await.unwrap_err();
            assert_eq!(e.kind, ErrorKind::Name(NameRule::NotOwner), "{e}");
        }
        let stranger = Cred { uid: 501, gid: 50, groups: vec![60] };
        let chmod = SetAttrs { mode: Some(0o666), ..SetAttrs::default() };
        assert!(c.setattr(&stranger, ino, None, chmod).await.is_err());
        close(&c, opened.handle).await;
        c.check();
    });
}

#[test]
fn others_see_every_file_as_soon_as_it_is_created() {
    for seed in 10..16 {
        Lab::new(seed).run(6, |lab| async move {
            let (a, b) = (client_after(&lab, "a", Some(1)).await, client_after(&lab, "b", Some(1)).await);
            let (d, rng) = (dir(&a, "d").await, lab.world().rng("pauses"));
            ready(&lab, &a, d).await;
            for n in 0..60 {
                let name = format!("f{n}");
                let (by, seen_by) = if n % 20 == 19 { (&b, &a) } else { (&a, &b) };
                let big = n % 7 == 3;
                let bytes = pattern(n, 0, if big { STRIPE + 100 } else { 50 + n as usize });
                small(by, d, &name, &bytes).await;
                if rng.below(3) == 0 {
                    same(&read_in(seen_by, d, &name).await.unwrap(), &bytes);
                }
                if rng.below(5) == 0 {
                    seen_by.unlink(&root(), d, name.as_bytes()).await.unwrap();
                    assert_eq!(read_in(by, d, &name).await.unwrap_err().kind, ErrorKind::NotFound);
                }
                lab.world().sleep(Duration::from_micros(rng.below(3000))).await;
            }
            a.check();
            b.check();
        });
    }
}

#[test]
fn files_that_only_this_client_used_are_removed_by_few_messages() {
    Lab::new(9).run(6, |lab| async move {
        let (c, reader) = (client_after(&lab, "a", Some(1)).await, lab.client("b").await);
        let d = dir(&c, "d").await;
        ready(&lab, &c, d).await;
        for n in 0..300 {
            let bytes = pattern(n, 0, if n % 10 == 0 { STRIPE + 7 } else { 20 });
            small(&c, d, &format!("f{n}"), &bytes).await;
        }
        c.sync_names(d).await.unwrap();
        lab.world().sleep(Duration::from_millis(100)).await; // all closes are reported
        let before = c.status().asked;
        for n in 0..300 {
            c.unlink(&root(), d, format!("f{n}").as_bytes()).await.unwrap();
        }
        assert_eq!(c.lookup(&root(), d, b"f7").await.unwrap(), None);
        // One that is created and removed between two reports is never a message.
        small(&c, d, "short", b"bytes").await;
        c.unlink(&root(), d, b"short").await.unwrap();
        c.sync_names(d).await.unwrap();
        let asked = c.status().asked - before;
        assert!(asked < 20, "{asked} messages");
        assert!(names_of(&reader, d).await.iter().all(|name| name.starts_with("first")));
        assert_eq!(c.losses().0, 0);
        lab.world().sleep(Duration::from_secs(3)).await;
        c.check();
    });
}
/// As `rm -rf` does: list, then remove. Returns the number of messages.
async fn remove_all(c: &Client, d: InodeId) -> u64 {
    let (mut after, mut names) = (0, Vec::new());
    loop {
        let part = c.readdir(&root(), d, after, 256, true).await.unwrap().entries;
        let Some(last) = part.last() else { break };
        after = last.cookie;
        names.extend(part.into_iter().map(|entry| entry.name));
    }
    let before = c.status().asked;
    for name in &names {
        c.unlink(&root(), d, name).await.unwrap();
    }
    c.sync_names(d).await.unwrap();
    c.status().asked - before
}

#[test]
fn files_that_another_client_made_are_removed_by_few_messages() {
    const FILES: u64 = 3000;
    // No client gets the names of a directory for some 50 ms after they were revoked: until then files are
    // removed one by one.
    for (is_left, most) in [(true, 40), (false, FILES / 5)] {
        Lab::new(10).run(6, |lab| async move {
            let maker = client_after(&lab, "a", Some(8)).await;
            let d = dir(&maker, "d").await;
            for n in 0..FILES {
                let bytes = pattern(n, 0, if n % 100 == 0 { STRIPE + 7 } else { 20 });
                small(&maker, d, &format!("f{n:05}"), &bytes).await;
            }
            maker.sync_names(d).await.unwrap();
            if is_left {
                maker.shutdown().await.unwrap();
            }
            let (c, other) = (client_after(&lab, "c", Some(8)).await, lab.client("b").await);
            let held = c.lookup(&root(), d, b"f02000").await.unwrap().unwrap().attr.ino;
            let held = other.open(&root(), held, OpenMode::READ).await.unwrap().handle;
            let asked = remove_all(&c, d).await;
            assert!(asked < most, "{asked} messages for {FILES} files; their maker has left: {is_left}");
            assert!(names_of(&other, d).await.is_empty());
            same(&other.read(held, 0, 100).await.unwrap().concat(), &pattern(2000, 0, STRIPE + 7)[..100]);
            close(&other, held).await;
            assert_eq!((c.losses().0, other.losses().0, maker.losses().0), (0, 0, 0));
            c.rmdir(&root(), ROOT, b"d").await.unwrap();
            c.check();
            other.check();
        });
    }
}

/// A client that has files lent and is asked for one by its number answers after its removal is reported.
#[test]
fn a_lent_file_is_gone_for_others_when_it_is_removed() {
    for seed in 60..70 {
        Lab::new(seed).run(6, |lab| async move {
            let maker = client_after(&lab, "a", None).await;
            let d = dir(&maker, "d").await;
            let mut files = Vec::new();
            for n in 0..40 {
                small(&maker, d, &format!("f{n:02}"), b"bytes").await;
                files.push(
                    maker.lookup(&root(), d, format!("f{n:02}").as_bytes()).await.unwrap().unwrap().attr.ino,
                );
            }
            maker.shutdown().await.unwrap();
            let (c, other) = (client_after(&lab, "c", Some(8)).await, lab.client("b").await);
            c.readdir(&root(), d, 0, 100, true).await.unwrap();
            let mut local = 0;
            for (n, ino) in files.iter().enumerate() {
                let (name, before) = (format!("f{n:02}"), c.status().asked);
                if n % 3 == 0 {
                    assert_eq!(other.getattr(*ino).await.unwrap().attr.nlink, 1);
                }
                c.unlink(&root(), d, name.as_bytes()).await.unwrap();
                local += u64::from(c.status().asked == before);
                match n % 2 {
                    0 => assert!(other.getattr(*ino).await.is_err(), "{name} is gone"),
                    _ if n > 30 => assert_eq!(other.lookup(&root(), d, name.as_bytes()).await.unwrap(), None),
                    _ => {}
                }
            }
            assert!(local > 10, "{local} were removed locally");
            c.sync_names(d).await.unwrap();
            assert!(names_of(&other, d).await.is_empty());
            c.check();
            other.check();
        });
    }
}

async fn names_of(c: &Client, d: InodeId) -> Vec<String> {
    let all = c.readdir(&root(), d, 0, 1000, false).await.unwrap();
    all.entries.iter().map(|e| String::from_utf8_lossy(&e.name).into_owned()).collect()
}

/// By the name, and by a handle of an open file.
#[test]
fn others_see_a_removal_at_once() {
    for seed in 90..96 {
        Lab::new(seed).run(6, |lab| async move {
            let (a, b) = (client_after(&lab, "a", Some(1)).await, lab.client("b").await);
            for n in 0..12 {
                let name = format!("f{n}");
                let d = dir(&a, &format!("d{n}")).await;
                ready(&lab, &a, d).await;
                small(&a, d, &name, b"bytes").await;
                let by = if n % 3 == 0 { &b } else { &a };
                let ino = by.lookup(&root(), d, name.as_bytes()).await.unwrap().unwrap().attr.ino;
                let held = match n % 3 {
                    0 => Some(b.open(&root(), ino, OpenMode::READ).await.unwrap().handle),
                    _ => None,
                };
                if n % 3 == 1 {
                    // Its removal is reported, not cancelled, and no close is to be reported before.
                    a.sync_names(d).await.unwrap();
                    lab.world().sleep(Duration::from_millis(100)).await;
                }
                let before = a.status().asked;
                a.unlink(&root(), d, name.as_bytes()).await.unwrap();
                assert!(held.is_some() || a.status().asked == before, "it is removed locally");
                match (held, n % 2) {
                    (Some(h), _) => {
                        assert_eq!(b.getattr(ino).await.unwrap().attr.nlink, 0);
                        same(&b.read(h, 0, 100).await.unwrap().concat(), b"bytes");
                        close(&b, h).await;
                    }
                    (None, 0) => assert_eq!(b.lookup(&root(), d, name.as_bytes()).await.unwrap(), None),
                    (None, _) => assert!(b.getattr(ino).await.is_err()),
                }
                // The name is free again.
                small(&a, d, &name, b"other").await;
                same(&read_in(&b, d, &name).await.unwrap(), b"other");
            }
            a.check();
            b.check();
        });
    }
}

#[test]
fn a_removal_lost_with_the_session_is_an_error() {
    Lab::new(97).run(6, |lab| async move {
        let (a, b) = (client_after(&lab, "a", Some(1)).await, lab.client("b").await);
        let d = dir(&a, "d").await;
        ready(&lab, &a, d).await;
        small(&a, d, "f", b"bytes").await;
        a.sync_names(d).await.unwrap();
        lab.world().sleep(Duration::from_millis(100)).await;
        lab.cut_off("a");
        let before = a.status().asked;
        a.unlink(&root(), d, b"f").await.unwrap();
        assert_eq!(a.status().asked, before, "it was removed locally");
        lab.world().sleep(Duration::from_secs(6)).await; // more than a lease term
        same(&read_in(&b, d, "f").await.unwrap(), b"bytes");
        lab.let_back("a");
        assert_eq!(a.sync_names(d).await.unwrap_err().kind, ErrorKind::Io);
        let (count, named) = a.losses();
        assert!(count == 1 && named[0].what.contains("the removal of file"), "{named:?}");
        same(&read_in(&b, d, "f").await.unwrap(), b"bytes");
        same(&read_in(&a, d, "f").await.unwrap(), b"bytes");
        a.check();
    });
}

#[test]
fn a_synced_file_survives_the_death_of_its_creator() {
    Lab::new(20).run(6, |lab| async move {
        let (a, b) = (client_after(&lab, "a", Some(1)).await, lab.client("b").await);
        let d = dir(&a, "d").await;
        ready(&lab, &a, d).await;
        let (synced, by_dir) = (create_in(&a, d, "synced").await, create_in(&a, d, "by-dir").await);
        write(&a, synced, 0, b"kept").await;
        a.fsync(synced).await.unwrap();
        close(&a, by_dir).await;
        a.sync_names(d).await.unwrap();
        let before = a.status().asked;
        small(&a, d, "unsynced", b"may go").await;
        assert_eq!(a.status().asked, before, "it was not reported yet");
        lab.world().kill("a");
        lab.kill_meta();
        lab.meta().await;
        same(&read_in(&b, d, "synced").await.unwrap(), b"kept");
        same(&read_in(&b, d, "by-dir").await.unwrap(), b"");
        let unsynced = read_in(&b, d, "unsynced").await;
        assert_eq!(unsynced.unwrap_err().kind, ErrorKind::NotFound);
    });
}

#[test]
fn a_file_lost_with_the_session_is_an_error_and_named() {
    Lab::new(21).run(6, |lab| async move {
        let (a, b) = (client_after(&lab, "a", Some(1)).await, lab.client("b").await);
        let d = dir(&a, "d").await;
        ready(&lab, &a, d).await;
        lab.cut_off("a");
        let (h, second) = (create_in(&a, d, "lost").await, create_in(&a, d, "lost too").await);
        write(&a, h, 0, b"bytes").await;
        lab.world().sleep(Duration::from_secs(6)).await; // more than a lease term
        let all = b.readdir(&root(), d, 0, 1000, false).await.unwrap();
        assert!(all.entries.iter().all(|e| e.name.starts_with(b"first")));
        lab.let_back("a");
        assert_eq!(a.fsync(h).await.unwrap_err().kind, ErrorKind::Io);
        assert_eq!(a.write(second, 0, Bytes::from_static(b"x")).await.unwrap_err().kind, ErrorKind::Io);
        assert_eq!(a.flush(second).await.unwrap_err().kind, ErrorKind::Io);
        assert_eq!(a.sync_names(d).await.unwrap_err().kind, ErrorKind::Io);
        a.sync_names(d).await.unwrap();
        let (count, named) = a.losses();
        assert!(count >= 2 && named.iter().any(|loss| loss.what.contains("lost too")), "{named:?}");
        assert_eq!(a.lookup(&root(), d, b"lost").await.unwrap(), None);
        small(&a, d, "lost", b"again").await;
        same(&read_in(&b, d, "lost").await.unwrap(), b"again");
        a.check();
    });
}

#[test]
fn a_restarted_leader_learns_of_every_file() {
    for seed in 30..42 {
        Lab::new(seed).run(6, |lab| async move {
            let (a, b) = (client_after(&lab, "a", Some(1)).await, lab.client("b").await);
            let d = dir(&a, "d").await;
            ready(&lab, &a, d).await;
            let restart = async {
                lab.world().sleep(Duration::from_micros(300 + (seed - 30) * 250)).await;
                lab.kill_meta();
                lab.meta().await;
            };
            let fill = async {
                let mut open = Vec::new();
                for n in 0..40 {
                    let h = create_in(&a, d, &format!("f{n}")).await;
                    write(&a, h, 0, format!("content {n}").as_bytes()).await;
                    match n % 4 {
                        0 => open.push(h),
                        _ => close(&a, h).await,
                    }
                    lab.world().sleep(Duration::from_micros(100)).await;
                }
                for h in open {
                    close(&a, h).await;
                }
                a.sync_names(d).await.unwrap();
            };
            tokio::join!(restart, fill);
            for n in 0..40 {
                same(&read_in(&b, d, &format!("f{n}")).await.unwrap(), format!("content {n}").as_bytes());
            }
            assert_eq!(a.losses().0, 0);
            // None of them counts as open any more: a removed file is gone at once.
            lab.world().sleep(Duration::from_millis(100)).await;
            for n in 0..40 {
                b.unlink(&root(), d, format!("f{n}").as_bytes()).await.unwrap();
            }
            a.check();
        });
    }
}

/// Wherever it dies between the answer to a program, the report, its execution and the reply.
#[test]
fn a_dead_creator_leaves_the_first_files_it_created() {
    let (mut some, mut unreported) = (0, 0);
    for seed in 50..74 {
        let counts = Arc::new(std::sync::Mutex::new((0, 0)));
        let counted = counts.clone();
        Lab::new(seed).run(6, |lab| async move {
            let (a, b) = (client_after(&lab, "a", Some(1)).await, lab.client("b").await);
            let d = dir(&a, "d").await;
            ready(&lab, &a, d).await;
            let (clock, created) = (lab.env("a").clock.clone(), counted.clone());
            lab.env("a").tasks.spawn("fill the directory", async move {
                for n in 0.. {
                    small(&a, d, &format!("f{n}"), format!("content {n}").as_bytes()).await;
                    created.lock().unwrap().0 += 1;
                    clock.sleep(Duration::from_micros(150)).await;
                }
            });
            lab.world().sleep(Duration::from_micros(2500 + (seed - 50) * 130)).await;
            lab.world().kill("a");
            if seed % 3 == 0 {
                lab.kill_meta();
                lab.meta().await;
            }
            let mut there = 0;
            while let Ok(got) = read_in(&b, d, &format!("f{there}")).await {
                // One that was reported while it was open has no bytes yet.
                let expected = format!("content {there}");
                assert!(got.is_empty() || got == expected.as_bytes(), "f{there}: {got:?}");
                there += 1;
            }
            let all = b.readdir(&root(), d, 0, 1000, false).await.unwrap().entries;
            assert_eq!(all.iter().filter(|e| !e.name.starts_with(b"first")).count(), there);
            let usage = b.usage(d).await.unwrap();
            assert_eq!(usage.files as usize, all.len());
            counted.lock().unwrap().1 = there;
        });
        let (created, there) = *counts.lock().unwrap();
        some += usize::from(there > 0);
        unreported += usize::from(there < created);
    }
    assert!(some > 5 && unreported > 5, "{some} had reported some, {unreported} not all");
}
