//! The leader's work for volumes with a retention, while clients work and through restarts.
use crate::common::*;
use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;
use weir_kv::Kv;
use weir_kv::engine::{Engine, EngineConfig};
use weir_meta::Level;
use weir_proto::meta::{FileKind, LeaseKind, ReadDir};
use weir_proto::snapshot::{Snapshot, SnapshotDelete, SnapshotList, SnapshotTake};
use weir_proto::volume::{
    Policy, Quota, ReserveQuota, Retention, SnapshotRetention, Volume, VolumeChange, VolumeClone,
    VolumeCreate, VolumeGet,
};
use weir_proto::{InodeId, VolumeId};

impl Client {
    async fn snapshots(&self) -> Vec<Snapshot> {
        let ask = SnapshotList { session: self.session, volume: VolumeId::ROOT };
        self.call(&ask).await.unwrap().snapshots
    }
    /// When a condition holds; it has this time, in the world's clock.
    async fn until(&self, patience: Duration, mut holds: impl AsyncFnMut(&Client) -> bool) -> bool {
        let deadline = self.env.clock.now() + patience;
        while !holds(self).await {
            if self.env.clock.now() > deadline {
                return false;
            }
            self.env.clock.sleep(Duration::from_millis(500)).await;
        }
        true
    }
}

const MINUTE: Duration = Duration::from_secs(60);

#[test]
fn scheduled_snapshots_have_unflushed_writes_through_restarts() {
    simulate(91, async |world| {
        let meta = start(&world).await;
        let a = Client::start(&world, "a").await;
        let keep = SnapshotRetention { hours: 2, days: 0, weeks: 0, months: 0 };
        let made = a.keep(Retention { snapshots_every_s: 60, keep, ..Retention::NOTHING }).await;
        assert_eq!((made.retention.snapshots_every_s, made.retention.keep), (60, keep));
        assert!(a.until(MINUTE, async |a| a.snapshots().await.len() == 1).await, "the first one at once");
        // Nothing has changed: none. Then a writer is asked to save.
        a.env.clock.sleep(2 * MINUTE).await;
        assert_eq!(a.snapshots().await.len(), 1);
        let ino = a.create(ROOT, "f").await.unwrap().entry.attr.ino;
        assert!(a.until(2 * MINUTE, async |a| a.snapshots().await.len() == 2).await);
        assert!(a.revoked().contains(&(ino, LeaseKind::Read)), "{:?}", a.revoked());
        let last = a.snapshots().await.pop().unwrap();
        assert!(last.scheduled && last.name.starts_with("auto-"), "{last:?}");
        let second = last.created.nanos / 1_000_000_000;
        assert!(second % 60 < 5, "at a full minute: {second}");
        // A snapshot that is due while the leader is down is taken when it is up again.
        a.create(ROOT, "g").await.unwrap();
        drop(meta);
        world.kill("meta");
        world.node("client").clock.sleep(5 * MINUTE).await;
        let _meta = start(&world).await;
        let c = Client::start(&world, "c").await;
        assert!(c.until(MINUTE, async |c| c.snapshots().await.len() == 3).await);
        c.keep(Retention::NOTHING).await;
        c.create(ROOT, "h").await.unwrap();
        c.env.clock.sleep(3 * MINUTE).await;
        assert_eq!(c.snapshots().await.len(), 3, "no more, and what is there stays");
    });
}

/// A record that the leader cannot decode when it tidies up is tried again, and reported; no client is
/// refused service for it.
#[test]
fn a_leader_that_cannot_tidy_up_serves_its_clients() {
    simulate(98, async |world| {
        let env = world.node("meta");
        let config = EngineConfig { cache_bytes: 1 << 20, journal_bytes_max: 4 << 20, journal_keep_bytes: 0 };
        let kv = Engine::open(&env, Path::new("/meta"), config).await.unwrap();
        // A directory that is gone at a home, and a file that is deleted.
        let (doomed, garbage) = ([&b"e"[..], &0u64.to_be_bytes()].concat(), [&b"G"[..], &[1; 16]].concat());
        let written = kv.transact(&mut |txn| {
            txn.put(&doomed, b"damaged");
            txn.put(&garbage, b"damaged");
            Ok(())
        });
        kv.wait_durable(written.unwrap()).await.unwrap();
        drop(kv);
        world.kill("meta");
        let _meta = start(&world).await;
        let a = Client::start(&world, "a").await;
        for n in 0..10 {
            a.create(ROOT, &format!("f{n}")).await.unwrap();
            a.env.clock.sleep(Duration::from_secs(5)).await; // of the world: it has tried again
        }
    });
}

#[test]
fn a_clock_that_is_set_back_does_not_stop_the_schedule() {
    simulate(97, async |world| {
        let _meta = start(&world).await;
        let a = Client::start(&world, "a").await;
        a.keep(Retention { snapshots_every_s: 60, ..Retention::NOTHING }).await;
        assert!(a.until(MINUTE, async |a| a.snapshots().await.len() == 1).await);
        world.set_wall_offset("meta", -3600 * 1_000_000_000);
        a.create(ROOT, "f").await.unwrap();
        assert!(a.until(2 * MINUTE, async |a| a.snapshots().await.len() == 2).await);
    });
}

#[test]
fn a_retention_that_cannot_be_kept_is_refused() {
    simulate(92, async |world| {
        let _meta = start(&world).await;
        let a = Client::start(&world, "a").await;
        let keep = SnapshotRetention::default();
        let none = SnapshotRetention { hours: 0, days: 0, weeks: 0, months: 0 };
        let many = SnapshotRetention { months: 300, ..keep };
        for (snapshots_every_s, keep, why) in
            [(59, keep, "at most one"), (60, none, "nothing"), (3600, many, "most")]
        {
            let (op, cred, volume) = (a.op(), root(), VolumeId::ROOT);
            let (name, owner, admins, quota, policy) = (None, None, None, None, None);
            let retention = Some(Retention { snapshots_every_s, keep, ..Retention::NOTHING });
            let change = VolumeChange { op, cred, volume, name, owner, admins, quota, policy, retention };
            let refused = a.call(&change).await.unwrap_err();
            assert!(refused.context.contains(why), "{refused}");
        }
    });
}

impl Client {
    async fn limit(&self, quota: Quota) {
        let (op, cred, volume, quota) = (self.op(), root(), VolumeId::ROOT, Some(quota));
        let (name, owner, admins, policy, retention) = (None, None, None, None, None);
        self.call(&VolumeChange { op, cred, volume, name, owner, admins, quota, policy, retention })
            .await
            .unwrap();
    }
    async fn root_volume(&self) -> Volume {
        self.call(&VolumeGet { session: self.session, name: "root".into() }).await.unwrap()
    }
    /// A closed file of this number of bytes, removed again.
    async fn make_and_remove(&self, name: &str, bytes: u64) {
        let made = self.create(ROOT, name).await.unwrap().entry;
        self.commit(made.attr.ino, made.lease.token_epoch, bytes, true).await.unwrap();
        self.close(made.attr.ino, true).await.unwrap();
        self.unlink(ROOT, name).await.unwrap();
    }
}

#[test]
fn the_trash_is_emptied_when_it_is_over_and_through_restarts() {
    simulate(93, async |world| {
        let meta = start(&world).await;
        let a = Client::start(&world, "a").await;
        a.keep(Retention { trash_s: 700, ..Retention::NOTHING }).await;
        for n in 0..400 {
            a.make_and_remove(&format!("{n}"), 1000).await;
        }
        let there = a.root_volume().await;
        assert_eq!((there.in_trash.files, there.usage.files, there.in_trash.bytes), (400, 400, 400_000));
        a.env.clock.sleep(Duration::from_secs(600)).await;
        assert_eq!(a.root_volume().await.in_trash.files, 400, "not yet");
        drop(meta);
        world.kill("meta");
        let meta = start(&world).await;
        let c = Client::start(&world, "c").await;
        assert!(c.until(10 * MINUTE, async |c| c.root_volume().await.in_trash.files < 400).await);
        // In the midst of it.
        drop(meta);
        world.kill("meta");
        let _meta = start(&world).await;
        let d = Client::start(&world, "d").await;
        assert!(d.until(MINUTE, async |d| d.root_volume().await.in_trash.directories == 0).await);
        let after = d.root_volume().await;
        assert_eq!((after.in_trash.files, after.usage.files, after.usage.bytes), (0, 0, 0));
    });
}

#[test]
fn the_trash_delays_no_write_for_more_than_a_moment() {
    simulate(94, async |world| {
        let _meta = start(&world).await;
        let (a, b) = (Client::start(&world, "a").await, Client::start(&world, "b").await);
        a.keep(Retention { trash_s: 7 * 86_400, ..Retention::NOTHING }).await;
        a.limit(Quota { inodes_hard: Some(100), ..Quota::NONE }).await;
        for n in 0..300 {
            a.make_and_remove(&format!("{n}"), 1000).await;
        }
        let there = a.root_volume().await;
        assert!(there.usage.files + there.usage.directories <= 100 && there.in_trash.files > 0, "{there:?}");
        // Existing files are in the way as ever.
        for n in 0..98 {
            a.create(ROOT, &format!("f{n}")).await.unwrap();
        }
        let refused = b.create(ROOT, "more").await;
        let refused = match refused {
            Ok(_) => b.create(ROOT, "still more").await.unwrap_err(),
            Err(e) => e,
        };
        assert_eq!(refused.kind, weir_proto::ErrorKind::OverQuota, "{refused}");
        assert_eq!(a.root_volume().await.in_trash.files, 0);
    });
}

#[test]
fn the_trash_frees_the_oldest_first_and_no_more_than_needed() {
    simulate(95, async |world| {
        let _meta = start(&world).await;
        let a = Client::start(&world, "a").await;
        a.keep(Retention { trash_s: 70_000, ..Retention::NOTHING }).await;
        a.limit(Quota { bytes_hard: Some(10_000_000), ..Quota::NONE }).await;
        for hour in 0..6 {
            a.make_and_remove(&format!("{hour}"), 1_500_000).await;
            a.env.clock.sleep(180 * MINUTE).await;
        }
        assert_eq!(a.root_volume().await.in_trash.bytes, 9_000_000);
        let (session, volume) = (a.session, VolumeId::ROOT);
        let ask = ReserveQuota { session, volume, spent: 0, must: 3_000_000, want: 3_000_000 };
        let reserved = a.call(&ask).await.unwrap();
        assert!(reserved.evicting && reserved.held < 3_000_000, "{reserved:?}");
        assert!(a.until(MINUTE, async |a| a.call(&ask).await.unwrap().held == 3_000_000).await);
        assert_eq!(a.root_volume().await.in_trash.bytes, 6_000_000, "the two oldest have gone");
    });
}

#[test]
fn full_targets_lose_their_oldest_trash_as_far_as_needed() {
    simulate(96, async |world| {
        let _meta = start(&world).await;
        let a = Client::start(&world, "a").await;
        a.keep(Retention { trash_s: 70_000, ..Retention::NOTHING }).await;
        for hour in 0..6 {
            a.make_and_remove(&format!("{hour}"), 1_000_000).await;
            a.env.clock.sleep(180 * MINUTE).await;
        }
        SPACE.set(Some(Level { capacity: 100_000_000, used: 90_000_000 }));
        a.env.clock.sleep(MINUTE).await;
        assert_eq!(a.root_volume().await.in_trash.bytes, 6_000_000, "there is room");
        // Removed data is in the targets' reports for a while.
        SPACE.set(Some(Level { capacity: 100_000_000, used: 91_500_000 }));
        a.env.clock.sleep(MINUTE / 2).await;
        assert_eq!(a.root_volume().await.in_trash.bytes, 4_000_000);
        SPACE.set(None);
    });
}

impl Client {
    pub async fn snapshot(&self, volume: VolumeId, name: &str) -> bool {
        let take = SnapshotTake { op: self.op(), cred: root(), volume, name: name.into() };
        self.call(&take).await.is_ok()
    }
    async fn clone_root(&self, name: &str) -> weir_proto::Result<Volume> {
        let new = VolumeCreate {
            op: self.op(),
            cred: root(),
            name: name.into(),
            parent: ROOT,
            entry: b(name),
            path: b(&format!("/{name}")),
            owner: 0,
            group: 0,
            mode: 0o755,
            admins: Vec::new(),
            quota: Quota::NONE,
            policy: Policy { scheme: None, pool: None },
        };
        let (op, snapshot) = (new.op.clone(), "s".to_owned());
        self.call(&VolumeClone { op, source: VolumeId::ROOT, snapshot, own: false, new }).await
    }
    /// Sizes of all files below a directory, by path; directories have none.
    async fn sizes(&self, top: InodeId) -> BTreeMap<String, Option<u64>> {
        let (mut found, mut todo) = (BTreeMap::new(), vec![(String::new(), top)]);
        while let Some((path, dir)) = todo.pop() {
            let list = ReadDir {
                session: self.session,
                cred: root(),
                dir,
                after: 0,
                limit: 1000,
                with_attrs: false,
            };
            for entry in self.call(&list).await.unwrap().entries {
                let path = format!("{path}/{}", String::from_utf8_lossy(&entry.name));
                if entry.kind == FileKind::Directory {
                    todo.push((path.clone(), entry.ino));
                    found.insert(path, None);
                } else {
                    found.insert(path, Some(self.getattr(entry.ino).await.unwrap().attr.size));
                }
            }
        }
        found
    }
}

#[test]
fn a_clone_is_listed_to_its_end_wherever_the_leader_is_killed() {
    for (seed, nth) in (1..=12).map(|n| (96 + u64::from(n), n)) {
        simulate(seed, async |world| {
            let mut meta = start(&world).await;
            let a = Client::start(&world, "a").await;
            for d in 0..4 {
                let dir = a.mkdir(ROOT, &format!("d{d}")).await.unwrap().entry.attr.ino;
                for n in 0..(d * 60) {
                    let made = a.create(dir, &n.to_string()).await.unwrap().entry;
                    a.commit(made.attr.ino, made.lease.token_epoch, 1000 + n, true).await.unwrap();
                    a.close(made.attr.ino, true).await.unwrap();
                }
            }
            assert!(a.snapshot(VolumeId::ROOT, "s").await);
            let there = a.sizes(ROOT).await;
            world.kill_at("meta", "meta-housekept", nth);
            // The answer is lost if the leader dies first.
            let answered = a.clone_root("clone").await.is_ok();
            for life in 0..3 {
                world.node("watch").clock.sleep(Duration::from_secs(1)).await;
                drop(meta);
                world.power_cut("meta");
                meta = start(&world).await;
                world.kill_at("meta", "meta-housekept", nth + life);
            }
            world.node("watch").clock.sleep(Duration::from_secs(1)).await;
            drop(meta);
            world.kill("meta");
            let _meta = start(&world).await;
            let c = Client::start(&world, "c").await;
            let get = VolumeGet { session: c.session, name: "clone".into() };
            let clone = match c.call(&get).await {
                Ok(clone) => clone,
                Err(e) if answered => panic!("killed at {nth}: {e}"),
                Err(_) => c.clone_root("clone").await.unwrap(),
            };
            // A lookup waits for the entry only.
            assert_eq!(c.sizes(clone.root).await, there, "killed at {nth}");
            assert!(c.until(MINUTE, async |c| c.snapshot(clone.id, "probe").await).await, "killed at {nth}");
            let delete =
                SnapshotDelete { op: c.op(), cred: root(), volume: VolumeId::ROOT, name: "s".into() };
            c.call(&delete).await.unwrap();
        });
    }
}
