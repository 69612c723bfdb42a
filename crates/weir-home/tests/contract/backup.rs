//! Claims about backups, in the simulated world with another Weir as the place: the next backup completes an
//! interrupted one, and older ones do not change; expired backups are removed; one mover at a time makes
//! backups.
use bytes::Bytes;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;
use weir_client::{BackupEdit, Client, OpenMode};
use weir_home::backup::{Job, Made, Progress, TreeName, list};
use weir_home::{Attrs, Expect, Home, HomePath, IdMap, LaneLimits, Make, WeirHome, WeirHomeConfig};
use weir_lab::{CELL, Lab, STRIPE, new_volume, pattern, quota, root};
use weir_proto::backup::{Backup, BackupOutcome, BackupRetention};
use weir_proto::meta::{FileKind, Time};
use weir_proto::volume::Volume;
use weir_proto::{ErrorKind, InodeId, NameRule, Result, VolumeId};

const URL: &str = "weir://lab:7000/backups";

/// The contents of a directory; `None`: a directory.
type Tree = BTreeMap<String, Option<Vec<u8>>>;

struct Desk {
    lab: Lab,
    client: Client,
    volume: Volume,
    home: Arc<dyn Home>,
    now: Tree,
    inodes: BTreeMap<String, InodeId>,
}

async fn make_volume(client: &Client) -> Volume {
    client.create_volume(&root(), &new_volume("data", quota(0, 0))).await.unwrap()
}

impl Desk {
    async fn open(lab: Lab) -> Desk {
        let client = lab.client("a").await;
        let volume = make_volume(&client).await;
        client.mkdir(&root(), InodeId::ROOT, b"backups", 0o755).await.unwrap();
        let config = WeirHomeConfig {
            url: URL.into(),
            client: lab.client("home").await,
            base: HomePath::parse("backups").unwrap(),
            relation: "test".into(),
            is_new: true,
            only_reads: false,
            ids: IdMap::default(),
            limits: LaneLimits::default(),
        };
        let home = Arc::new(WeirHome::open(&lab.env("home"), config).await.unwrap());
        client.set_backup(&root(), volume.id, URL, BackupEdit::default()).await.unwrap();
        let inodes = BTreeMap::from([(String::new(), volume.root)]);
        Desk { lab, client, volume, home, now: Tree::new(), inodes }
    }
    async fn backup(&self) -> Backup {
        self.client.backups(Some(self.volume.id)).await.unwrap().remove(0)
    }
    async fn job(&self) -> Job {
        let (client, home, backup) = (self.client.clone(), self.home.clone(), self.backup().await);
        Job { env: self.lab.env("a"), client, home, backup, progress: Arc::new(Progress::default()) }
    }
    /// Makes one: returns its missing entries, its files, and how many of them are linked.
    async fn make(&self) -> (Made, u64, u64) {
        let job = self.job().await;
        let made = job.run().await.unwrap();
        assert_eq!(job.progress.gaps(), (vec![], 0));
        (made, job.progress.files.load(Relaxed), job.progress.linked.load(Relaxed))
    }

    fn split<'a>(&self, path: &'a str) -> (InodeId, &'a str) {
        let (above, name) = path.rsplit_once('/').unwrap_or(("", path));
        (self.inodes[above], name)
    }
    async fn mkdir(&mut self, path: &str) {
        let (dir, name) = self.split(path);
        let made = self.client.mkdir(&root(), dir, name.as_bytes(), 0o755).await.unwrap();
        self.inodes.insert(path.into(), made.attr.ino);
        self.now.insert(path.into(), None);
    }
    async fn write(&mut self, path: &str, bytes: &[u8]) {
        let (dir, name) = self.split(path);
        let (client, mode) = (&self.client, OpenMode { truncate: true, ..OpenMode::WRITE });
        let opened = client.create(&root(), dir, name.as_bytes(), 0o644, false, mode).await.unwrap();
        let mut done = 0;
        while done < bytes.len() {
            let rest = Bytes::copy_from_slice(&bytes[done..]);
            done += client.write(opened.handle, done as u64, rest).await.unwrap();
        }
        client.release(opened.handle).await.unwrap();
        self.inodes.insert(path.into(), opened.stat.attr.ino);
        self.now.insert(path.into(), Some(bytes.to_vec()));
    }
    async fn there(&self, top: TreeName) -> Tree {
        read_tree(&*self.home, &HomePath::parse(top.text()).unwrap()).await
    }
}

async fn read_tree(home: &dyn Home, top: &HomePath) -> Tree {
    let (mut tree, mut left) = (Tree::new(), vec![(top.clone(), String::new())]);
    while let Some((dir, shown)) = left.pop() {
        let mut lister = home.read_dir(&dir).await.unwrap();
        loop {
            let part = lister.next(100).await.unwrap();
            for entry in part.entries {
                let (path, fingerprint) = (dir.join(&entry.name).unwrap(), entry.found.fingerprint);
                let shown = format!("{shown}/{}", String::from_utf8_lossy(&entry.name));
                let shown = shown.trim_start_matches('/').to_owned();
                if fingerprint.kind == FileKind::Directory {
                    left.push((path, shown.clone()));
                    tree.insert(shown, None);
                    continue;
                }
                let size = fingerprint.size as usize;
                let reader = home.open_read(&path, &Expect::Unchanged(fingerprint)).await.unwrap();
                tree.insert(shown, Some(reader.read_at(0, size + 1).await.unwrap().concat()));
            }
            if part.end {
                break;
            }
        }
    }
    tree
}

#[test]
fn an_interrupted_backup_is_completed_by_the_next_one() {
    Lab::new(81).run(6, |lab| async move {
        let mut desk = Desk::open(lab).await;
        desk.mkdir("d").await;
        desk.mkdir("d/e").await;
        for n in 0..12usize {
            let path = ["", "d/", "d/e/"][n % 3].to_owned() + &n.to_string();
            desk.write(&path, &pattern(n as u64, 0, n * CELL + n)).await;
        }
        desk.write("large", &pattern(77, 0, 3 * STRIPE)).await;
        let (first, files, linked) = desk.make().await;
        assert_eq!((first.base, first.went_on, files, linked), (None, false, 13, 0));
        let then = desk.now.clone();
        assert_eq!(desk.there(first.tree).await, then);
        // Cut off later and later, until it is not.
        let (mut cuts, mut cut) = (0, Duration::from_millis(1));
        loop {
            let round = cuts as u64;
            desk.write("d/changes", &pattern(100 + round, 0, 2 * STRIPE + 17)).await;
            desk.write(&format!("d/e/new{round}"), &pattern(200 + round, 0, CELL)).await;
            let job = desk.job().await;
            let ended = desk.lab.env("a").clock.timeout(cut, job.run()).await;
            if let Ok(made) = ended {
                assert_eq!(desk.there(made.unwrap().tree).await, desk.now);
                break;
            }
            // Calls in flight at home when it was cut off come to an end.
            desk.lab.env("a").clock.sleep(Duration::from_secs(2)).await;
            let whole: Vec<TreeName> = list(&*desk.home).await.unwrap();
            assert!(whole.iter().all(|name| matches!(name, TreeName::Whole(_))), "{whole:?}");
            assert_eq!(desk.there(first.tree).await, then, "after a cut at {cut:?}");
            let (made, _, linked) = desk.make().await;
            assert_eq!(desk.there(made.tree).await, desk.now, "after a cut at {cut:?}: {made:?}");
            assert!(linked > 0 || made.went_on, "after a cut at {cut:?}: {made:?}");
            (cuts, cut) = (cuts + 1, cut * 3 / 2);
            assert!(cuts < 60, "it never ends");
        }
        assert!(cuts > 5, "{cuts}");
        assert_eq!(desk.client.snapshots(desk.volume.id).await.unwrap().len(), 1);
    });
}

#[test]
fn expired_backups_are_removed_and_foreign_names_stay() {
    Lab::new(82).run(6, |lab| async move {
        let mut desk = Desk::open(lab).await;
        desk.write("f", b"f").await;
        let time = Time { nanos: 0 };
        let attrs = Attrs { mode: 0o755, uid: 0, gid: 0, atime: time, mtime: time, xattrs: vec![] };
        for name in ["2001-01-01T00:00:00Z", "2002-01-01T00:00:00Z", "notes", ".partial-2003-01-01T00:00:00Z"]
        {
            let top = HomePath::parse(name).unwrap();
            desk.home.make(&top, &Make::Directory, &attrs).await.unwrap();
            desk.home.make(&top.join(b"in it").unwrap(), &Make::File, &attrs).await.unwrap();
        }
        let keep = Some(BackupRetention { days: 0, weeks: 0, months: 2 });
        let edit = BackupEdit { keep, ..BackupEdit::default() };
        desk.client.set_backup(&root(), desk.volume.id, URL, edit).await.unwrap();
        let (made, ..) = desk.make().await;
        assert_eq!(
            made.removed.iter().map(ToString::to_string).collect::<Vec<_>>(),
            ["2001-01-01T00:00:00Z"]
        );
        let left: Vec<String> = read_tree(&*desk.home, &HomePath::root())
            .await
            .into_keys()
            .filter(|k| !k.contains('/'))
            .collect();
        assert_eq!(left, ["2002-01-01T00:00:00Z".to_owned(), made.tree.text(), "notes".into()]);
    });
}

fn is_busy<T: std::fmt::Debug>(answer: Result<T>) -> bool {
    matches!(answer, Err(e) if e.kind == ErrorKind::Name(NameRule::Busy))
}

#[test]
fn backups_run_one_at_a_time_through_leader_restarts() {
    Lab::new(83).run(6, |lab| async move {
        let (a, b) = (lab.client("one").await, lab.client("other").await);
        let volume = make_volume(&a).await.id;
        let edit = BackupEdit { every_s: Some(3600), ..BackupEdit::default() };
        let set = a.set_backup(&root(), volume, URL, edit).await.unwrap();
        assert!(set.due == Some(set.since) && set.good.is_none() && !set.late);
        let taken = a.take_backup(&root(), VolumeId(0), "").await.unwrap().expect("it is due at once");
        assert!((taken.volume, &*taken.url) == (volume, URL) && taken.running.is_some());
        assert!(is_busy(b.take_backup(&root(), volume, URL).await));
        assert_eq!(b.take_backup(&root(), VolumeId(0), "").await.unwrap(), None);
        lab.kill_meta();
        lab.meta().await;
        assert!(is_busy(b.take_backup(&root(), volume, URL).await), "the leader has forgotten who makes it");
        let made = BackupOutcome::Made { date: "D".into(), missing: 0, files: 1, linked: 0, bytes: 1 };
        let refused = b.backup_done(volume, URL, &made).await.unwrap_err();
        assert_eq!(refused.kind, ErrorKind::Stale, "{refused}");
        let done = a.backup_done(volume, URL, &made).await.unwrap();
        assert!(done.running.is_none() && done.good.is_some());
        assert_eq!(done.due.unwrap().nanos - done.good.unwrap().nanos, 3_600_000_000_000);
        assert_eq!(b.take_backup(&root(), VolumeId(0), "").await.unwrap(), None, "not before its time");
        // If a mover dies over one, it is assigned to the next one that asks, not before.
        a.take_backup(&root(), volume, URL).await.unwrap();
        lab.world().kill("one");
        assert!(is_busy(b.take_backup(&root(), volume, URL).await));
        let clock = lab.env("other").clock;
        while is_busy(b.take_backup(&root(), volume, URL).await) {
            clock.sleep(Duration::from_secs(1)).await;
        }
        let failed = BackupOutcome::Failed { why: "no space".into() };
        let done = b.backup_done(volume, URL, &failed).await.unwrap();
        let last = done.last.unwrap();
        assert_eq!(done.due.unwrap().nanos - last.ended.nanos, 600_000_000_000, "again in ten minutes");
        let edit = BackupEdit { forget: true, ..BackupEdit::default() };
        b.set_backup(&root(), volume, URL, edit).await.unwrap();
        assert_eq!(b.backups(None).await.unwrap(), []);
    });
}
