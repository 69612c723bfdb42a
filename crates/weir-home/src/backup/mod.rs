//! Backups: a volume's state in a fresh snapshot, in a dated directory at a home, beside the older ones.
//! Files that have not changed are shared with them (hard links).
//!
//! Invariants: changes are found by comparing two snapshots, never bytes or times at home. A tree is renamed
//! to its date when it is complete, and is marked incomplete if anything is missing in it. Older backups are
//! only linked to, or removed as a whole. After an interruption the next backup can resume or remove
//! everything that was left. Memory is some pages of directories and some parts of files, regardless of the
//! volume's size; in addition the place of each file that has several names, and of each directory of the
//! last backup once one was moved.
//!
//! Refuses to know: when a backup is made, and by which mover (the metadata leader decides).
mod copy;
mod due;
mod moved;
mod plan;
mod remove;
mod walk;

pub use due::{Due, home_of};
pub use plan::{Plan, TreeName, plan, snapshot_date, snapshot_name};

use crate::{Attrs, Expect, Fault, Home, HomePath, Make, Outcome};
use bytes::Bytes;
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, PoisonError};
use weir_client::Client;
use weir_env::{BoxFuture, Env};
use weir_proto::backup::{Backup, BackupOutcome, BackupRetention};
use weir_proto::date::Date;
use weir_proto::meta::{Cred, Time};
use weir_proto::retention::expired;
use weir_proto::snapshot::Snapshot;
use weir_proto::{Error, ErrorKind, Result};

/// Missing entries of a backup that are recorded by name; further ones are counted.
const MISSING_NAMED_MAX: usize = 10_000;
/// Missing entries of a backup that are named in the log.
const MISSING_LOGGED_MAX: u64 = 100;
/// Entries of a listing at home.
const LISTED_AT_ONCE: usize = 256;
/// How far the newest backup's date may be ahead of the clock, in seconds.
const AHEAD_S: i64 = 3600;

/// One backup, made by the mover that has taken it.
pub struct Job {
    pub env: Env,
    pub client: Client,
    pub home: Arc<dyn Home>,
    pub backup: Backup,
    pub progress: Arc<Progress>,
}

/// Progress; counts while it runs.
#[derive(Default)]
pub struct Progress {
    /// Files and other entries, without directories.
    pub files: AtomicU64,
    /// Of these: hard links into the last backup.
    pub linked: AtomicU64,
    /// Bytes that were read and written.
    pub bytes: AtomicU64,
    pub directories: AtomicU64,
    missing: Mutex<Missing>,
}

#[derive(Default)]
struct Missing {
    named: Vec<Gap>,
    count: u64,
}

/// An entry of the volume that is not in the backup.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Gap {
    pub path: String,
    pub why: String,
}

impl Progress {
    fn missing(&self) -> std::sync::MutexGuard<'_, Missing> {
        self.missing.lock().unwrap_or_else(PoisonError::into_inner)
    }
    fn miss(&self, path: String, why: String) {
        let mut missing = self.missing();
        missing.count += 1;
        if missing.count <= MISSING_LOGGED_MAX {
            tracing::warn!("backup: {path} is not in it: {why}");
        }
        if missing.named.len() < MISSING_NAMED_MAX {
            missing.named.push(Gap { path, why });
        }
    }
    /// The entries missing so far, the first ones by name, and their total number.
    pub fn gaps(&self) -> (Vec<Gap>, u64) {
        let missing = self.missing();
        (missing.named.clone(), missing.count)
    }
}

/// Result of a backup.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Made {
    pub tree: TreeName,
    pub went_on: bool,
    /// The backup that it shares files with.
    pub base: Option<TreeName>,
    /// Old backups that were removed.
    pub removed: Vec<Date>,
}

impl Made {
    pub fn outcome(&self, progress: &Progress) -> BackupOutcome {
        BackupOutcome::Made {
            date: self.tree.made().map(|date| date.to_string()).unwrap_or_default(),
            missing: progress.gaps().1,
            files: progress.files.load(Relaxed),
            linked: progress.linked.load(Relaxed),
            bytes: progress.bytes.load(Relaxed),
        }
    }
}

/// The backups at home, oldest first.
pub async fn list(home: &dyn Home) -> Result<Vec<TreeName>> {
    let mut made: Vec<TreeName> =
        names(home).await?.into_iter().filter(|name| name.made().is_some()).collect();
    made.sort_by_key(TreeName::made);
    Ok(made)
}

async fn names(home: &dyn Home) -> Outcome<BTreeSet<TreeName>> {
    let (mut names, mut lister) = (BTreeSet::new(), home.read_dir(&HomePath::root()).await?);
    loop {
        let part = lister.next(LISTED_AT_ONCE).await?;
        names.extend(part.entries.iter().filter_map(|entry| TreeName::parse(&entry.name)));
        if part.end {
            return Ok(names);
        }
    }
}

fn root() -> Cred {
    Cred { uid: 0, gid: 0, groups: vec![0] }
}
fn at(name: TreeName) -> Result<HomePath> {
    HomePath::parse(name.text())
}
/// Attributes of an unfinished tree: accessible to no user.
fn private() -> Attrs {
    let time = Time { nanos: 0 };
    Attrs { mode: 0o700, uid: 0, gid: 0, atime: time, mtime: time, xattrs: Vec::new() }
}

/// Why an entry is not in a backup, or why the backup cannot continue.
enum Trouble {
    /// Only this entry is missing.
    Gap(String),
    /// The backup ends: a retry may help.
    End(Error),
}
impl From<Fault> for Trouble {
    fn from(fault: Fault) -> Trouble {
        match fault {
            Fault::Unreachable(e) | Fault::Full(e) => Trouble::End(e),
            Fault::Diverged(_) | Fault::Denied(_) | Fault::Broken(_) => Trouble::Gap(fault.to_string()),
        }
    }
}
impl From<Error> for Trouble {
    /// An error of the volume.
    fn from(e: Error) -> Trouble {
        match e.kind {
            ErrorKind::Io | ErrorKind::Damaged | ErrorKind::Invalid | ErrorKind::Name(_) => {
                Trouble::Gap(e.to_string())
            }
            _ => Trouble::End(e),
        }
    }
}

impl Job {
    /// Makes the backup, and removes those that retention no longer keeps.
    pub fn run(&self) -> BoxFuture<'_, Result<Made>> {
        Box::pin(self.run_unboxed())
    }
    async fn run_unboxed(&self) -> Result<Made> {
        if !self.home.traits().hard_links {
            return Err(Error::unsupported(format!(
                "{} knows no hard links: each backup would be a whole copy; take file:///path or weir://host:port/path",
                self.home.url()
            )));
        }
        let url = &self.backup.url;
        let snapshots = self.client.snapshots(self.backup.volume).await?;
        let dates = snapshots.iter().filter_map(|s| snapshot_date(&s.name, url)).collect();
        let now = Date::of(Time { nanos: self.env.clock.wall().0 });
        let plan = plan(&names(&*self.home).await?, &dates, now);
        if plan.date.0 > now.0.saturating_add(AHEAD_S) {
            return Err(Error::invalid(format!(
                "the last backup at {url} is of {}, and it is {now}: the clock is wrong, or was",
                Date(plan.date.0 - 1)
            )));
        }
        for name in &plan.remove {
            remove::remove(&*self.home, *name).await?;
        }
        for date in &plan.drop_snapshots {
            self.drop_snapshot(*date).await?;
        }
        let of = |date: Date| snapshots.iter().find(|s| snapshot_date(&s.name, url) == Some(date)).cloned();
        let snapshot = match of(plan.date) {
            Some(snapshot) => snapshot,
            None => self.take_snapshot(plan.date).await?,
        };
        let base = plan.base.and_then(|name| Some((name, of(name.made()?)?)));
        let tree = self.make(&plan, &snapshot, base).await?;
        if let Some(old) = plan.base.and_then(|base| base.made()) {
            self.drop_snapshot(old).await?;
        }
        let removed = self.expire(now).await?;
        Ok(Made { tree, went_on: plan.goes_on, base: plan.base, removed })
    }

    async fn take_snapshot(&self, date: Date) -> Result<Snapshot> {
        let name = snapshot_name(date, &self.backup.url);
        self.client.take_snapshot(&root(), self.backup.volume, &name).await
    }
    async fn drop_snapshot(&self, date: Date) -> Result<()> {
        let name = snapshot_name(date, &self.backup.url);
        match self.client.delete_snapshot(&root(), self.backup.volume, &name).await {
            Err(e) if e.kind == ErrorKind::NotFound => Ok(()), // removed by another client
            done => done.map(drop),
        }
    }

    /// Makes the tree under its temporary name, then renames it to its date.
    async fn make(
        &self,
        plan: &Plan,
        snapshot: &Snapshot,
        base: Option<(TreeName, Snapshot)>,
    ) -> Result<TreeName> {
        let partial = at(TreeName::Partial(plan.date))?;
        let walk = walk::Walk::new(self, snapshot, partial.clone(), base)?;
        walk.run().await?;
        self.home.settle().await?;
        let (gaps, count) = self.progress.gaps();
        let tree = match count {
            0 => TreeName::Whole(plan.date),
            _ => TreeName::Incomplete(plan.date),
        };
        if count > 0 {
            self.write_gaps(plan.date, &gaps, count).await?;
        }
        let found = self.home.stat(&partial).await?;
        let found =
            found.ok_or_else(|| Error::io(format!("{partial}, which this backup writes to, is gone")))?;
        self.home.rename(&partial, &Expect::Ours(found.fingerprint), &at(tree)?, None).await?;
        self.home.settle().await?;
        Ok(tree)
    }

    /// Writes the list of missing entries, for users.
    async fn write_gaps(&self, date: Date, gaps: &[Gap], count: u64) -> Result<()> {
        let path = at(TreeName::Missing(date))?;
        let mut text: String = gaps.iter().map(|gap| format!("{}: {}\n", gap.path, gap.why)).collect();
        if count > gaps.len() as u64 {
            text += &format!("and {} more\n", count - gaps.len() as u64);
        }
        remove::remove_name(&*self.home, &path).await?;
        let now = Time { nanos: self.env.clock.wall().0 };
        let attrs = Attrs { mode: 0o600, atime: now, mtime: now, ..private() };
        let fingerprint = self.home.make(&path, &Make::File, &attrs).await?;
        let writer = self.home.open_write(&path, &Expect::Ours(fingerprint)).await?;
        let len = text.len() as u64;
        writer.write_at(0, vec![Bytes::from(text)]).await?;
        writer.finish(len, &attrs).await?;
        Ok(())
    }

    async fn expire(&self, now: Date) -> Result<Vec<Date>> {
        let names = names(&*self.home).await?;
        let dates: BTreeSet<Date> = names.iter().filter_map(TreeName::made).collect();
        let gone = expired(&dates, now, &(&self.keep()).into());
        for name in names {
            let date = match name {
                TreeName::Whole(date) | TreeName::Incomplete(date) | TreeName::Missing(date) => date,
                TreeName::Partial(_) | TreeName::Removing(_) => continue,
            };
            if gone.contains(&date) {
                remove::remove(&*self.home, name).await?;
            }
        }
        Ok(gone)
    }
    fn keep(&self) -> BackupRetention {
        self.backup.keep
    }
}
