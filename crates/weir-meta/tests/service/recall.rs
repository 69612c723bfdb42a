//! Evicted bytes between clients that want them and movers that bring them, across losses and restarts.
use crate::common::*;
use std::time::Duration;
use weir_env::sim::World;
use weir_proto::meta::*;
use weir_proto::recall::*;
use weir_proto::relation::{Direction, HomeIds, RelationAdd};
use weir_proto::snapshot::{LayersOf, SnapshotDelete};
use weir_proto::volume::{Policy, Quota, Volume, VolumeCreate};
use weir_proto::{ErrorKind, InodeId, NameRule, Result, VolumeId};

/// Of the layout that files get here.
const STRIPE: u64 = 4 << 20;
const MIB: u64 = 1 << 20;

/// A file of `size` bytes, closed, that home has all of.
async fn file_at_home(node: &Node, client: &Client, name: &str, size: u64) -> InodeId {
    let made = client.create(ROOT, name).await.unwrap().entry;
    let ino = made.attr.ino;
    client.commit(ino, made.lease.token_epoch, size, true).await.unwrap();
    client.close(ino, true).await.unwrap();
    node.at_home.lock().unwrap().insert(ino);
    ino
}

impl Client {
    async fn evict(&self, ino: InodeId, from: u64, to: u64) -> Result<Evicted> {
        self.call(&Evict { op: self.op(), cred: root(), ino, from, to, under: 0 }).await
    }
    async fn take(&self, max: u32, busy: &[RecallId]) -> Vec<RecallWork> {
        let busy = busy.to_vec();
        let take = TakeRecalls { session: self.session, max, wait_ms: 20_000, busy };
        self.call(&take).await.unwrap().recalls
    }
    async fn filled(&self, work: &RecallWork) -> Result<()> {
        let RecallWork { ino, from, to, token_epoch, .. } = *work;
        self.call(&Filled { op: self.op(), ino, from, to, token_epoch, learned: None }).await
    }
    async fn failed(&self, work: &RecallWork, error: &str, retry: bool) {
        let RecallWork { ino, from, to, token_epoch, .. } = *work;
        let (session, error) = (self.session, error.to_owned());
        self.call(&RecallFailed { session, ino, from, to, token_epoch, error, retry }).await.unwrap();
    }
    /// Waits in a task of its own.
    fn awaits(&self, ino: InodeId, from: u64, to: u64, wait_ms: u32) -> Waited {
        let (tx, rx) = tokio::sync::oneshot::channel();
        let (connection, session) = (self.connection.clone(), self.session);
        let task = self.env.tasks.spawn("await recall", async move {
            let ask = AwaitRecall { session, ino, from, to, wait_ms };
            let _ = tx.send(connection.call(&ask, vec![], PATIENCE).await.map(|(reply, _)| reply));
        });
        Waited { rx, _task: task }
    }
    async fn remove_snapshot(&self, volume: VolumeId, name: &str) {
        let delete = SnapshotDelete { op: self.op(), cred: root(), volume, name: name.into() };
        self.call(&delete).await.unwrap();
    }
    async fn tier_state(&self, ino: InodeId) -> TierState {
        self.call(&GetTierState { session: self.session, ino }).await.unwrap()
    }
}

struct Waited {
    rx: tokio::sync::oneshot::Receiver<Result<RecallWaited>>,
    _task: weir_env::TaskHandle,
}
impl Waited {
    async fn done(self) -> RecallWaited {
        self.rx.await.unwrap().unwrap()
    }
}

fn id(work: &RecallWork) -> RecallId {
    RecallId { ino: work.ino, from: work.from, token_epoch: work.token_epoch }
}

#[test]
fn bytes_are_evicted_recalled_and_present() {
    simulate(1, async |world| {
        let meta = start(&world).await;
        let (user, mover) = (Client::start(&world, "user").await, Client::start(&world, "mover").await);
        let ino = file_at_home(&meta, &user, "f", 40 * STRIPE + 3).await;
        assert_eq!(user.acquire(ino, LeaseKind::Write).await.unwrap().lease.kind, LeaseKind::Write);
        let evicted = mover.evict(ino, 0, u64::MAX).await.unwrap();
        assert_eq!(evicted.ranges, [ByteRange { from: 0, to: 40 * STRIPE + 3 }]);
        assert_eq!(
            user.revoked().last(),
            Some(&(ino, LeaseKind::None)),
            "clients that cache it are notified"
        );
        // The targets are notified once it is certain, again if they do not answer.
        until(&world, || !meta.targets.evicted.lock().unwrap().is_empty()).await;
        let dropped = meta.targets.evicted.lock().unwrap().clone();
        assert_eq!((dropped[0].0, dropped[0].1.from_stripe, dropped[0].1.to_stripe), (ino, 0, 41));
        assert_eq!(dropped[0].1.token_epoch, evicted.token_epoch);
        let list = EvictedRanges { session: user.session, ino, from: 0 };
        assert_eq!(user.call(&list).await.unwrap().ranges, evicted.ranges);
        assert_eq!(user.getattr(ino).await.unwrap().attr.evicted, 40 * STRIPE + 3);

        let waits = user.awaits(ino, 5 * STRIPE + 1, 6 * STRIPE + 1, 20_000);
        let work = mover.take(1, &[]).await;
        let first = &work[0];
        assert_eq!(
            (first.from, first.to, first.awaited),
            (5 * STRIPE, 7 * STRIPE, true),
            "what is touched first"
        );
        assert!(first.token_epoch >= evicted.token_epoch);
        let ahead = mover.take(2, &[id(first)]).await;
        assert_eq!((ahead[0].from, ahead[0].to, ahead[0].awaited), (7 * STRIPE, 23 * STRIPE, false));
        assert_eq!(ahead[1].to, 39 * STRIPE);
        mover.filled(first).await.unwrap();
        assert!(waits.done().await.done);
        for work in &ahead {
            mover.filled(work).await.unwrap();
        }
        let left = user.tier_state(ino).await;
        assert_eq!((left.evicted, left.ranges), (6 * STRIPE + 3, 2));
        assert!(left.recalls.iter().all(|r| r.from >= 39 * STRIPE));
        // Online data is not waited for, and neither is data that was never evicted.
        assert!(user.awaits(ino, 5 * STRIPE, 39 * STRIPE, 20_000).done().await.done);
    });
}

#[test]
fn a_lost_mover_does_no_harm() {
    lose_mover(false);
}

/// Its session is spared for a while, as it may have unsaved bytes; its work is not.
#[test]
fn work_of_a_silent_mover_with_files_of_its_own_goes_to_others() {
    lose_mover(true);
}

fn lose_mover(writes: bool) {
    simulate(2, async move |world| {
        let meta = start(&world).await;
        let (user, a) = (Client::start(&world, "user").await, Client::start(&world, "a").await);
        let ino = file_at_home(&meta, &user, "f", 2 * STRIPE).await;
        user.evict(ino, 0, u64::MAX).await.unwrap();
        let waits = user.awaits(ino, 0, 2 * STRIPE, 60_000);
        let first = a.take(8, &[]).await.remove(0);
        if writes {
            a.create(ROOT, "own").await.unwrap();
        }
        // It is away for longer than a lease term, as one that was stopped.
        world.kill("a");
        let b = Client::start(&world, "b").await;
        let second = b.take(8, &[]).await.remove(0);
        assert_eq!((second.from, second.to, second.awaited), (0, 2 * STRIPE, true));
        assert!(
            second.token_epoch > first.token_epoch,
            "what the first one still sends is refused by targets"
        );
        let late = Filled {
            op: b.op(),
            ino,
            from: 0,
            to: 2 * STRIPE,
            token_epoch: first.token_epoch,
            learned: None,
        };
        assert_eq!(b.call(&late).await.unwrap_err().kind, ErrorKind::Stale);
        b.filled(&second).await.unwrap();
        assert!(waits.done().await.done);
    });
}

/// A mover with a part of it up to its former end drops that part when the file is longer and evicted again.
#[test]
fn bytes_truncated_and_evicted_again_return_in_whole_stripes() {
    simulate(12, async |world| {
        let meta = start(&world).await;
        let (user, mover) = (Client::start(&world, "user").await, Client::start(&world, "mover").await);
        let ino = file_at_home(&meta, &user, "f", 2 * STRIPE + 3).await;
        user.evict(ino, 0, u64::MAX).await.unwrap();
        let want = WantRecall { session: user.session, ino, from: 0, to: u64::MAX };
        user.call(&want).await.unwrap();
        let lost = mover.take(8, &[]).await.remove(0);
        assert_eq!((lost.from, lost.to), (0, 2 * STRIPE + 3));
        for size in [STRIPE + 5, 4 * STRIPE] {
            let (op, size) = (user.op(), Some(size));
            let (cred, mode, uid, gid, atime, mtime) = (root(), None, None, None, None, None);
            user.call(&SetAttr { op, cred, ino, mode, uid, gid, size, atime, mtime }).await.unwrap();
        }
        user.evict(ino, 0, u64::MAX).await.unwrap();
        user.call(&want).await.unwrap();
        mover.failed(&lost, "another token epoch is there", true).await;
        while user.tier_state(ino).await.evicted > 0 {
            for work in mover.take(8, &[]).await {
                let ends = [STRIPE + 5, 4 * STRIPE].contains(&work.to) || work.to % STRIPE == 0;
                assert!(work.from % STRIPE == 0 && ends, "no whole stripes: {work:?}");
                mover.filled(&work).await.unwrap();
            }
        }
    });
}

#[test]
fn a_recall_that_cannot_be_served_says_why() {
    simulate(3, async |world| {
        let meta = start(&world).await;
        let (user, mover) = (Client::start(&world, "user").await, Client::start(&world, "mover").await);
        let ino = file_at_home(&meta, &user, "f", STRIPE).await;
        user.evict(ino, 0, u64::MAX).await.unwrap();
        let nobody = user.awaits(ino, 0, 1, 100).done().await;
        assert!(
            !nobody.done && !nobody.failed && nobody.why.contains("no mover is running"),
            "{}",
            nobody.why
        );
        let waits = user.awaits(ino, 0, 1, 30_000);
        let work = mover.take(8, &[]).await.remove(0);
        mover.failed(&work, "home does not answer", true).await;
        let again = mover.take(8, &[]).await.remove(0);
        assert!(again.token_epoch > work.token_epoch);
        let slow = user.awaits(ino, 0, 1, 100).done().await;
        assert!(slow.why.contains("1 tries failed, the last one: home does not answer"), "{}", slow.why);
        mover.failed(&again, "home has another file there", false).await;
        let failed = waits.done().await;
        assert_eq!((failed.failed, failed.why.as_str()), (true, "home has another file there"));
        // A later request may succeed.
        let waits = user.awaits(ino, 0, 1, 30_000);
        let work = mover.take(8, &[]).await.remove(0);
        mover.filled(&work).await.unwrap();
        assert!(waits.done().await.done);
    });
}

#[test]
fn a_restart_forgets_waits_but_not_evictions() {
    simulate(4, async |world| {
        let meta = start(&world).await;
        let (user, mut mover) = (Client::start(&world, "user").await, Client::start(&world, "mover").await);
        let ino = file_at_home(&meta, &user, "f", 3 * STRIPE).await;
        *meta.targets.away.lock().unwrap() = true;
        user.evict(ino, 0, 2 * STRIPE).await.unwrap();
        let want = WantRecall { session: user.session, ino, from: 0, to: STRIPE };
        user.call(&want).await.unwrap();
        let work = mover.take(8, &[]).await.remove(0);
        assert_eq!((work.from, work.to, work.awaited), (0, STRIPE, false));
        drop(meta);
        world.kill("meta");
        let meta = start(&world).await;
        mover.reconnect("mover").await;
        mover.resume(vec![]).await.unwrap();
        // The targets had not answered before: they are notified now.
        until(&world, || !meta.targets.evicted.lock().unwrap().is_empty()).await;
        // The bytes that it had recalled by then count.
        mover.filled(&work).await.unwrap();
        let left = mover.tier_state(ino).await;
        assert_eq!((left.evicted, left.size, left.at_home), (STRIPE, 3 * STRIPE, true));
        let waits = mover.awaits(ino, STRIPE, STRIPE + 1, 30_000);
        let next = mover.take(8, &[]).await.remove(0);
        assert!(next.token_epoch > 0 && next.from == STRIPE);
        mover.filled(&next).await.unwrap();
        assert!(waits.done().await.done);
    });
}

#[test]
fn files_open_for_writing_are_not_evicted() {
    simulate(5, async |world| {
        let meta = start(&world).await;
        let (user, other) = (Client::start(&world, "user").await, Client::start(&world, "other").await);
        let ino = file_at_home(&meta, &user, "f", 3 * STRIPE).await;
        user.open(ino, true, true).await.unwrap();
        let busy = other.evict(ino, 0, u64::MAX).await.unwrap_err();
        assert_eq!(busy.kind, ErrorKind::Name(NameRule::Busy));
        assert!(busy.context.contains("open for writing"), "{busy}");
        user.close(ino, true).await.unwrap();
        other.evict(ino, 0, u64::MAX).await.unwrap();
        // A truncation of a file waits for no mover.
        let waits = other.awaits(ino, 0, MIB, 30_000);
        let size = Some(0);
        let (mode, uid, gid, atime, mtime) = (None, None, None, None, None);
        let truncate = SetAttr { op: user.op(), cred: root(), ino, mode, uid, gid, size, atime, mtime };
        user.call(&truncate).await.unwrap();
        assert!(waits.done().await.done);
        assert_eq!(user.tier_state(ino).await.recalls, []);
    });
}

/// Waits until something is so.
async fn until(world: &World, is_so: impl Fn() -> bool) {
    let env = world.node("watch");
    let deadline = env.clock.now() + PATIENCE;
    while !is_so() {
        assert!(env.clock.now() < deadline, "it never is");
        env.clock.sleep(Duration::from_millis(10)).await;
    }
}

/// A volume with a limit, and a relation that lets its files be evicted.
async fn evicting_volume(user: &Client, bytes_hard: Option<u64>) -> Volume {
    let quota = Quota { bytes_hard, ..Quota::NONE };
    let make = VolumeCreate {
        op: user.op(),
        cred: root(),
        name: "beamline".into(),
        parent: ROOT,
        entry: b("beamline"),
        path: b("/beamline"),
        owner: 7,
        group: 7,
        mode: 0o755,
        admins: vec![],
        quota,
        policy: Policy { scheme: None, pool: None },
    };
    let volume = user.call(&make).await.unwrap();
    let (url, direction) = ("file:///home".to_owned(), Direction::Push);
    let add = RelationAdd {
        op: user.op(),
        cred: root(),
        volume: volume.id,
        url,
        direction,
        evict: true,
        import: false,
        ids: HomeIds::default(),
    };
    user.call(&add).await.unwrap();
    volume
}

/// A volume with a limit whose files are at home never fills: data that was used longest ago is evicted, but
/// nothing that is pinned, open or not at home.
#[test]
fn a_volume_evicts_by_itself() {
    simulate(6, async |world| {
        let meta = start(&world).await;
        let user = Client::start(&world, "user").await;
        let volume = evicting_volume(&user, Some(20 * STRIPE)).await;
        let id = volume.id;
        let mut files = Vec::new();
        for n in 0..19 {
            let made = user.create(volume.root, &format!("f{n:02}")).await.unwrap().entry;
            let ino = made.attr.ino;
            user.commit(ino, made.lease.token_epoch, STRIPE, true).await.unwrap();
            if n != 3 {
                user.close(ino, true).await.unwrap();
            }
            if n != 1 {
                meta.at_home.lock().unwrap().insert(ino);
            }
            files.push(ino);
        }
        // The oldest is pinned, the second is not at home, the fourth is open for writing; the third was read
        // just now.
        let pin = SetPinned { op: user.op(), cred: root(), ino: files[0], pinned: true };
        user.call(&pin).await.unwrap();
        let at = user.getattr(files[18]).await.unwrap().attr.atime;
        let read = AccessTime { ino: files[2], at: Time { nanos: at.nanos + 1 } };
        user.call(&NoteAccess { session: user.session, accesses: vec![read] }).await.unwrap();
        let away = || async {
            let mut away = Vec::new();
            for (n, ino) in files.iter().enumerate() {
                if user.tier_state(*ino).await.evicted > 0 {
                    away.push(n);
                }
            }
            away
        };
        let env = world.node("watch");
        let deadline = env.clock.now() + PATIENCE;
        while away().await.len() < 2 {
            assert!(env.clock.now() < deadline, "no room was made");
            env.clock.sleep(Duration::from_millis(500)).await;
        }
        env.clock.sleep(Duration::from_secs(20)).await;
        // 19 of 20 stripes were used: above 90 %, so room is made until 85 % is reached.
        assert_eq!(away().await, [4, 5]);
        let set = Some(SetMarks { volume: id, high: 50, low: 40 });
        let ask = |cred, set| GetEviction { session: user.session, cred, set };
        let levels = user.call(&ask(root(), None)).await.unwrap().levels;
        assert_eq!((levels[0].volume, levels[0].used, levels[0].high), (Some(id), 17 * STRIPE, 18 * STRIPE));
        let stranger = Cred { uid: 9, gid: 9, groups: vec![] };
        assert_eq!(
            user.call(&ask(stranger, set.clone())).await.unwrap_err().kind,
            ErrorKind::Name(NameRule::NotOwner)
        );
        user.call(&ask(root(), set)).await.unwrap();
        until_used(&env, &user, &ask(root(), None), 8 * STRIPE).await;
        let gone = away().await;
        assert!(!gone.contains(&0) && !gone.contains(&1) && !gone.contains(&3), "{gone:?}");
    });
}

async fn until_used(env: &weir_env::Env, user: &Client, ask: &GetEviction, used: u64) {
    let deadline = env.clock.now() + PATIENCE;
    loop {
        let levels = user.call(ask).await.unwrap().levels;
        if let Some(level) = levels.first().filter(|level| level.used <= used) {
            assert!(level.is_set);
            return;
        }
        assert!(env.clock.now() < deadline, "{levels:?}");
        env.clock.sleep(Duration::from_millis(500)).await;
    }
}

/// A writer of a file may have sent bytes without a report to the leader: it reports them when it returns.
#[test]
fn after_a_restart_nothing_is_evicted_before_opens_are_known() {
    simulate(7, async |world| {
        let meta = start(&world).await;
        let mut user = Client::start(&world, "user").await;
        let volume = evicting_volume(&user, Some(4 * STRIPE)).await;
        let made = user.create(volume.root, "f").await.unwrap().entry;
        let ino = made.attr.ino;
        user.commit(ino, made.lease.token_epoch, 4 * STRIPE, true).await.unwrap();
        meta.at_home.lock().unwrap().insert(ino);
        world.kill("meta");
        drop(meta);
        let _meta = start(&world).await;
        // The evictor checks each second.
        user.env.clock.sleep(Duration::from_millis(u64::from(LEASE_MS) * 3 / 4)).await;
        user.reconnect("user").await;
        user.resume(vec![held(&made, LeaseKind::Write, 0, 1)]).await.unwrap();
        user.env.clock.sleep(Duration::from_secs(10)).await;
        assert_eq!(user.tier_state(ino).await.evicted, 0, "it is open for writing");
        user.close(ino, true).await.unwrap();
        user.env.clock.sleep(Duration::from_secs(10)).await;
        assert!(user.tier_state(ino).await.evicted > 0, "no client writes it any more");
    });
}

/// Data in older objects is evicted as the rest is, and those objects with it, also if the leader was
/// restarted meanwhile.
#[test]
fn a_file_in_two_objects_is_evicted_and_both_are_freed() {
    simulate(7, async |world| {
        let meta = start(&world).await;
        let user = Client::start(&world, "user").await;
        let volume = evicting_volume(&user, None).await;
        let made = user.create(volume.root, "f").await.unwrap().entry;
        let ino = made.attr.ino;
        user.commit(ino, made.lease.token_epoch, 3 * STRIPE, true).await.unwrap();
        user.close(ino, true).await.unwrap();
        assert!(user.snapshot(volume.id, "s").await);
        user.open(ino, false, true).await.unwrap();
        let own = user.acquire(ino, LeaseKind::Write).await.unwrap();
        let object = own.attr.layers.unwrap().object;
        user.commit(ino, own.lease.token_epoch, 4 * STRIPE, true).await.unwrap();
        user.close(ino, true).await.unwrap();
        meta.at_home.lock().unwrap().insert(ino);
        user.remove_snapshot(volume.id, "s").await;
        *meta.targets.away.lock().unwrap() = true;
        let evicted = user.evict(ino, 0, u64::MAX).await.unwrap();
        assert_eq!(evicted.ranges, [ByteRange { from: 0, to: 4 * STRIPE }]);
        assert_eq!(evicted.entry.attr.layers.unwrap().bytes, 0);
        // Its readers must wait; they do not get the former place.
        let list = LayersOf { session: user.session, snapshot: 0, ino, from: 0 };
        assert_eq!(user.call(&list).await.unwrap().layers, []);
        drop(meta);
        world.kill("meta");
        let meta = start(&world).await;
        until(&world, || meta.targets.dropped.lock().unwrap().iter().any(|f| f.inode == ino)).await;
        until(&world, || !meta.targets.evicted.lock().unwrap().is_empty()).await;
        let dropped = meta.targets.evicted.lock().unwrap().clone();
        assert_eq!((dropped[0].0, dropped[0].1.token_epoch), (object, evicted.token_epoch));
    });
}

/// A volume that always has a snapshot of everything, as one with a schedule, can be evicted all the same:
/// first data that no snapshot holds. Data of a snapshot is the snapshot's then, and freed when that is
/// removed.
#[test]
fn files_that_a_snapshot_holds_are_evicted() {
    simulate(8, async |world| {
        let meta = start(&world).await;
        let user = Client::start(&world, "user").await;
        let volume = evicting_volume(&user, Some(20 * STRIPE)).await;
        let mut files = Vec::new();
        for n in 0..17 {
            if n == 16 {
                assert!(user.snapshot(volume.id, "s").await);
            }
            files.push(file_in(&meta, &user, volume.root, &format!("f{n:02}")).await);
        }
        let ask = GetEviction { session: user.session, cred: root(), set: None };
        let marks = |high, low| Some(SetMarks { volume: volume.id, high, low });
        let env = world.node("watch");
        user.call(&GetEviction { set: marks(85, 81), ..ask.clone() }).await.unwrap();
        until_used(&env, &user, &ask, 16 * STRIPE).await;
        assert_eq!(user.tier_state(files[16]).await.evicted, STRIPE, "no snapshot holds it");
        assert_eq!(user.tier_state(files[0]).await.evicted, 0);
        user.call(&GetEviction { set: marks(75, 71), ..ask.clone() }).await.unwrap();
        until_used(&env, &user, &ask, 14 * STRIPE).await;
        for (n, ino) in files[..16].iter().enumerate() {
            assert_eq!(user.tier_state(*ino).await.evicted > 0, n < 2, "file {n}");
        }
        let is_dropped = |n: usize| meta.targets.dropped.lock().unwrap().iter().any(|f| f.inode == files[n]);
        env.clock.sleep(Duration::from_secs(5)).await;
        assert!(!is_dropped(0) && !is_dropped(1), "the snapshot shows them");
        user.remove_snapshot(volume.id, "s").await;
        until(&world, || is_dropped(0) && is_dropped(1)).await;
        assert!(!is_dropped(2));
    });
}

/// Targets have no more room when what a snapshot holds is evicted: so not all is evicted at once that it
/// holds.
#[test]
fn targets_that_are_full_of_snapshots_do_not_empty_a_volume() {
    simulate(9, async |world| {
        let meta = start(&world).await;
        let user = Client::start(&world, "user").await;
        let volume = evicting_volume(&user, None).await;
        let mut files = Vec::new();
        for n in 0..16 {
            files.push(file_in(&meta, &user, volume.root, &format!("f{n:02}")).await);
        }
        assert!(user.snapshot(volume.id, "s").await);
        // Of 40 stripes 36 may be used until room is made, down to 34.
        SPACE.set(Some(weir_meta::Level { capacity: 40 * STRIPE, used: 37 * STRIPE }));
        let env = world.node("watch");
        env.clock.sleep(Duration::from_secs(600)).await;
        SPACE.set(None);
        let mut away = Vec::new();
        for (n, ino) in files.iter().enumerate() {
            if user.tier_state(*ino).await.evicted > 0 {
                away.push(n);
            }
        }
        assert_eq!(away, [0, 1, 2]);
    });
}

/// A file of one stripe, closed, that home has.
async fn file_in(node: &Node, client: &Client, parent: InodeId, name: &str) -> InodeId {
    let made = client.create(parent, name).await.unwrap().entry;
    let ino = made.attr.ino;
    client.commit(ino, made.lease.token_epoch, STRIPE, true).await.unwrap();
    client.close(ino, true).await.unwrap();
    node.at_home.lock().unwrap().insert(ino);
    ino
}
