//! Changes of names that the leader answers before they are durable, through its crashes.
use super::local_creates::{dir, read_in};
use super::*;
use weir_client::SetAttrs;
use weir_env::sim::DiskFaults;
use weir_proto::ErrorKind;
use weir_proto::meta::RenameMode;

/// The leader's disk takes nothing, or works again.
fn set_silent(lab: &Lab, hangs: bool) {
    lab.world().set_disk_faults("meta", DiskFaults { hangs, ..DiskFaults::default() });
}
async fn restart(lab: &Lab) {
    lab.kill_meta();
    set_silent(lab, false);
    lab.meta().await;
}

async fn mkdir(c: &Client, parent: InodeId, name: &str) -> InodeId {
    c.mkdir(&root(), parent, name.as_bytes(), 0o755).await.unwrap().attr.ino
}
async fn rename(c: &Client, from: InodeId, name: &str, to: InodeId, new: &str) {
    c.rename(&root(), from, name.as_bytes(), to, new.as_bytes(), RenameMode::Replace).await.unwrap();
}
async fn set_mode(c: &Client, ino: InodeId, mode: u32) {
    let set = SetAttrs { mode: Some(mode), ..SetAttrs::default() };
    c.setattr(&root(), ino, None, set).await.unwrap();
}
async fn file(c: &Client, dir: InodeId, name: &str, bytes: &[u8]) -> InodeId {
    let made = c.create(&root(), dir, name.as_bytes(), 0o644, true, OpenMode::WRITE).await.unwrap();
    write(c, made.handle, 0, bytes).await;
    close(c, made.handle).await;
    made.stat.attr.ino
}
async fn found(c: &Client, dir: InodeId, name: &str) -> Option<InodeId> {
    c.lookup(&root(), dir, name.as_bytes()).await.unwrap().map(|stat| stat.attr.ino)
}
/// The first early answer in a volume waits until its use is recorded.
async fn used_dir(c: &Client) -> InodeId {
    let d = dir(c, "d").await;
    set_mode(c, d, 0o755).await;
    c.sync_names(d).await.unwrap();
    d
}

/// Changes like those of `git` and `make`: each depends on earlier ones. Returns the names that are left.
async fn work(lab: &Lab, c: &Client, top: InodeId) -> Vec<(InodeId, String, InodeId)> {
    let (rng, mut left) = (lab.world().rng("work"), Vec::new());
    for n in 0..12 {
        let d = mkdir(c, top, &format!("d{n}")).await;
        let below = mkdir(c, d, "below").await;
        file(c, below, "new", format!("bytes {n}").as_bytes()).await;
        rename(c, below, "new", d, "done").await;
        let link = c.symlink(&root(), d, b"link", b"done").await.unwrap().attr.ino;
        c.rmdir(&root(), d, b"below").await.unwrap();
        let gone = file(c, d, "gone", b"x").await;
        c.link(&root(), gone, d, b"twice").await.unwrap();
        c.unlink(&root(), d, b"gone").await.unwrap();
        set_mode(c, d, 0o700 + n).await;
        rename(c, top, &format!("d{n}"), top, &format!("e{n}")).await;
        left.extend([(top, format!("e{n}"), d), (d, "link".into(), link), (d, "twice".into(), gone)]);
        lab.world().sleep(Duration::from_micros(rng.below(400))).await;
    }
    left
}

#[test]
fn a_crash_of_the_leader_takes_nothing_back() {
    for seed in 60..84 {
        Lab::new(seed).run(6, |lab| async move {
            let (a, b) = (lab.client("a").await, lab.client("b").await);
            let (top, rng) = (used_dir(&a).await, lab.world().rng("deaths"));
            let crashes = async {
                for _ in 0..2 {
                    lab.world().sleep(Duration::from_micros(rng.below(8_000))).await;
                    // Changes that are answered from now on are lost.
                    set_silent(&lab, true);
                    lab.world().sleep(Duration::from_micros(rng.below(3_000))).await;
                    restart(&lab).await;
                }
            };
            let ((), left) = tokio::join!(crashes, work(&lab, &a, top));
            assert_eq!(a.losses(), (0, vec![]));
            for (dir, name, ino) in left {
                assert_eq!(found(&b, dir, &name).await, Some(ino), "{name}");
            }
            for n in 0..12 {
                let d = found(&b, top, &format!("e{n}")).await.unwrap();
                same(&read_in(&b, d, "done").await.unwrap(), format!("bytes {n}").as_bytes());
                assert_eq!(b.getattr(d).await.unwrap().attr.mode & 0o777, 0o700 + n);
                let names = b.readdir(&root(), d, 0, 100, false).await.unwrap();
                assert_eq!(names.entries.len(), 3, "done, link, twice");
            }
            a.check();
        });
    }
}

#[test]
fn a_closed_file_survives_a_crash_of_the_leader() {
    for (seed, len) in [(90, 900), (91, 9_000), (92, 300_000)] {
        Lab::new(seed).run(6, |lab| async move {
            let (a, b) = (lab.client("a").await, lab.client("b").await);
            let d = used_dir(&a).await;
            let f = a.create(&root(), d, b"f", 0o644, true, OpenMode::WRITE).await.unwrap();
            let bytes = pattern(seed, 0, len);
            write(&a, f.handle, 0, &bytes[..len / 3 * 2]).await;
            a.fsync(f.handle).await.unwrap();
            write(&a, f.handle, 0, &bytes).await;
            set_silent(&lab, true);
            a.flush(f.handle).await.unwrap();
            let sync = a.fsync(f.handle);
            assert!(
                lab.env("a").clock.timeout(Duration::from_secs(1), sync).await.is_err(),
                "the leader's disk has nothing"
            );
            restart(&lab).await;
            assert_eq!(a.losses(), (0, vec![]));
            let closed = a.release(f.handle).await;
            same(&read_in(&b, d, "f").await.unwrap(), &bytes);
            closed.unwrap();
            a.check();
        });
    }
}

#[test]
fn a_synced_name_survives_the_death_of_its_author() {
    Lab::new(84).run(6, |lab| async move {
        let (a, b) = (lab.client("a").await, lab.client("b").await);
        let d = used_dir(&a).await;
        let f = a.create(&root(), d, b"f", 0o644, true, OpenMode::WRITE).await.unwrap();
        let synced = mkdir(&a, d, "by-dir").await;
        a.sync_names(d).await.unwrap();
        rename(&a, d, "f", d, "by-file").await;
        a.fsync(f.handle).await.unwrap();
        set_silent(&lab, true);
        mkdir(&a, d, "unsynced").await;
        assert!(found(&a, d, "unsynced").await.is_some());
        lab.world().kill("a");
        restart(&lab).await;
        assert_eq!(found(&b, d, "by-dir").await, Some(synced));
        assert_eq!(found(&b, d, "by-file").await, Some(f.stat.attr.ino));
        assert_eq!(found(&b, d, "unsynced").await, None, "no client has seen it, and its author is dead");
    });
}

#[test]
fn sync_waits_for_the_disk() {
    Lab::new(85).run(6, |lab| async move {
        let a = lab.client("a").await;
        let d = used_dir(&a).await;
        set_silent(&lab, true);
        mkdir(&a, d, "x").await;
        let clock = lab.world().clock();
        assert!(clock.timeout(Duration::from_secs(1), a.sync_names(d)).await.is_err());
        assert!(clock.timeout(Duration::from_secs(1), a.shutdown()).await.is_err(), "so does the end");
        set_silent(&lab, false);
    });
}

#[test]
fn the_number_of_kept_changes_is_bounded() {
    Lab::new(86).run(6, |lab| async move {
        let a = lab.client("a").await;
        let d = used_dir(&a).await;
        set_silent(&lab, true);
        let changes = async {
            for n in 0..4096 {
                set_mode(&a, d, 0o700 + n % 64).await;
            }
        };
        changes.await;
        let one_more = set_mode(&a, d, 0o755);
        let waited = lab.world().clock().timeout(Duration::from_secs(1), one_more).await;
        assert!(waited.is_err(), "it waits until others are durable");
        set_silent(&lab, false);
        set_mode(&a, d, 0o711).await;
        a.sync_names(d).await.unwrap();
        let b = lab.client("b").await;
        assert_eq!(b.getattr(d).await.unwrap().attr.mode & 0o777, 0o711);
    });
}

#[test]
fn changes_that_are_lost_with_the_session_are_named() {
    Lab::new(87).run(6, |lab| async move {
        let (a, b) = (lab.client("a").await, lab.client("b").await);
        let d = used_dir(&a).await;
        set_silent(&lab, true);
        mkdir(&a, d, "x").await;
        lab.cut_off("a");
        restart(&lab).await;
        // The leader gives up waiting for it.
        assert_eq!(found(&b, d, "x").await, None);
        lab.let_back("a");
        assert_eq!(a.sync_names(d).await.unwrap_err().kind, ErrorKind::Io);
        let (count, named) = a.losses();
        assert!(count == 1 && named[0].what.contains("was answered, and is lost"), "{named:?}");
        assert_eq!(found(&a, d, "x").await, None);
        a.sync_names(d).await.unwrap();
        mkdir(&a, d, "x").await;
        a.sync_names(d).await.unwrap();
        assert!(found(&b, d, "x").await.is_some());
    });
}

/// The leader lives: a client that it gave up has lost nothing that was answered.
#[test]
fn a_session_that_expires_at_the_same_leader_loses_no_change() {
    Lab::new(88).run(6, |lab| async move {
        let (a, b) = (lab.client("a").await, lab.client("b").await);
        let d = used_dir(&a).await;
        set_silent(&lab, true);
        let x = mkdir(&a, d, "x").await;
        lab.cut_off("a");
        set_silent(&lab, false);
        lab.world().sleep(Duration::from_secs(10)).await;
        assert_eq!(found(&b, d, "x").await, Some(x));
        // Its lease is asked for, and it does not answer: now its session is over.
        b.unlink(&root(), d, b"none").await.unwrap_err();
        file(&b, d, "other", b"").await;
        lab.let_back("a");
        a.sync_names(d).await.unwrap();
        assert_eq!(found(&a, d, "x").await, Some(x));
        assert!(a.losses().1.iter().all(|loss| !loss.what.contains("Mkdir")), "{:?}", a.losses());
    });
}
