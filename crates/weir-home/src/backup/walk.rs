//! The walk over a snapshot, directory by directory, that makes a tree at home; unchanged files are linked.
//!
//! Changes are found by comparing the two snapshots: both list a directory in the order of its cookies, and a
//! name has the same cookie in both.
use super::{Job, TreeName, Trouble, at, moved, private, remove, root};
use crate::mover::join_all;
use crate::{Attrs, Expect, HomePath, Make, Outcome, RESERVED, Xattr};
use bytes::Bytes;
use std::collections::{BTreeMap, VecDeque};
use std::sync::Mutex;
use std::sync::PoisonError;
use std::sync::atomic::Ordering::Relaxed;
use tokio::sync::Semaphore;
use weir_proto::meta::{Attr, FileKind};
use weir_proto::snapshot::{Snapshot, SnapshotEntry};
use weir_proto::{ErrorKind, InodeId, Result};

/// Entries of a directory that are processed at a time.
const PAGE: u32 = 256;
/// Files that are made in parallel.
const FILES_AT_ONCE: usize = 12;

pub struct Walk<'a> {
    pub job: &'a Job,
    pub snapshot: u32,
    top: (InodeId, HomePath),
    base: Option<Base>,
    /// The path of a file with several names in the new tree, and how many of its names are still to come.
    several: Mutex<BTreeMap<InodeId, (HomePath, u32)>>,
}

/// The last backup.
struct Base {
    snapshot: Snapshot,
    top: HomePath,
    /// Paths of its directories, once one of them was not at its old path.
    places: tokio::sync::OnceCell<BTreeMap<InodeId, HomePath>>,
}

/// A directory that the walk has entered.
struct Frame {
    attr: Attr,
    path: HomePath,
    /// Where the last backup has this directory.
    old: Option<HomePath>,
    after: u64,
    end: bool,
    /// Directories in the present page that are still to be walked.
    below: VecDeque<(HomePath, Attr, Option<HomePath>)>,
}

/// A name, and the path of the same file in the last backup.
struct Item {
    name: Bytes,
    attr: Attr,
    old: Option<HomePath>,
}

/// Whether it is one file with equal attributes: then a link to the old one is equal to a new copy.
fn is_unchanged(old: &Attr, new: &Attr) -> bool {
    let facts = |a: &Attr| (a.ino, a.kind, a.data_version, a.ctime, a.size, a.mtime);
    let more = |a: &Attr| (a.mode, a.uid, a.gid, a.nlink);
    facts(old) == facts(new) && more(old) == more(new)
}

impl<'a> Walk<'a> {
    pub fn new(
        job: &'a Job,
        snapshot: &Snapshot,
        path: HomePath,
        base: Option<(TreeName, Snapshot)>,
    ) -> Result<Walk<'a>> {
        let base = match base {
            Some((name, snapshot)) => {
                let places = tokio::sync::OnceCell::new();
                Some(Base { snapshot, top: at(name)?, places })
            }
            None => None,
        };
        let (snapshot, top) = (snapshot.number, (snapshot.root, path));
        Ok(Walk { job, snapshot, top, base, several: Mutex::default() })
    }

    pub async fn run(&self) -> Result<()> {
        let attr = self.job.client.snapshot_attr(self.snapshot, self.top.0).await?;
        let old = self.base.as_ref().map(|base| base.top.clone());
        let mut frames = Vec::new();
        // Without the top directory there is no backup.
        match self.enter(self.top.1.clone(), attr, old).await {
            Ok(frame) => frames.push(frame),
            Err(Trouble::Gap(why)) => return Err(weir_proto::Error::io(why)),
            Err(Trouble::End(e)) => return Err(e),
        }
        while let Some(frame) = frames.last_mut() {
            if let Some((path, attr, old)) = frame.below.pop_front() {
                let shown = self.shown(&path);
                match self.enter(path, attr, old).await {
                    Ok(below) => frames.push(below),
                    Err(trouble) => self.note(shown, trouble)?,
                }
            } else if !frame.end {
                self.page(frame).await?;
            } else if let Some(done) = frames.pop() {
                let shown = self.shown(&done.path);
                if let Err(trouble) = self.leave(&done).await {
                    self.note(shown, trouble)?;
                }
            }
        }
        Ok(())
    }

    /// The path in the volume, for messages.
    fn shown(&self, path: &HomePath) -> String {
        let below = HomePath::new(path.names().iter().skip(self.top.1.names().len()).cloned());
        below.map_or_else(|e| e.to_string(), |below| below.to_string())
    }
    fn note(&self, shown: String, trouble: Trouble) -> Result<()> {
        match trouble {
            Trouble::Gap(why) => {
                self.job.progress.miss(shown, why);
                Ok(())
            }
            Trouble::End(e) => Err(e.doing(format_args!("back up {shown}"))),
        }
    }

    /// Only the mover can access a directory until it is complete.
    async fn enter(
        &self,
        path: HomePath,
        attr: Attr,
        old: Option<HomePath>,
    ) -> std::result::Result<Frame, Trouble> {
        let home = &self.job.home;
        match home.stat(&path).await? {
            Some(found) if found.fingerprint.kind == FileKind::Directory => {
                home.set_attrs(&path, &Expect::Ours(found.fingerprint), &private()).await?
            }
            _ => home.make(&path, &Make::Directory, &private()).await?,
        };
        Ok(Frame { attr, path, old, after: 0, end: false, below: VecDeque::new() })
    }
    async fn leave(&self, frame: &Frame) -> std::result::Result<(), Trouble> {
        let attrs = self.attrs(&frame.attr).await?;
        let home = &self.job.home;
        if let Some(found) = home.stat(&frame.path).await? {
            home.set_attrs(&frame.path, &Expect::Ours(found.fingerprint), &attrs).await?;
        }
        self.job.progress.directories.fetch_add(1, Relaxed);
        Ok(())
    }

    async fn page(&self, frame: &mut Frame) -> Result<()> {
        let (client, dir) = (&self.job.client, frame.attr.ino);
        let part = client.snapshot_list(&root(), self.snapshot, dir, frame.after, PAGE).await?;
        let last = part.entries.last().map_or(frame.after, |entry| entry.cookie);
        let items = self.items(frame, part.entries, last).await?;
        frame.end = part.end || last == frame.after;
        frame.after = last;
        let at_once = Semaphore::new(FILES_AT_ONCE);
        let mut files = Vec::new();
        let is_top = frame.path == self.top.1;
        for Item { name, attr, old } in items {
            if is_top && name == RESERVED {
                continue; // another Weir's mark: this volume is its home
            }
            let path = match frame.path.join(&name) {
                Ok(path) => path,
                Err(e) => {
                    let shown = format!("{}/{}", self.shown(&frame.path), name.escape_ascii());
                    self.job.progress.miss(shown, e.to_string());
                    continue;
                }
            };
            if attr.kind == FileKind::Directory {
                let old = match old {
                    None => self.moved(attr.ino).await?,
                    old => old,
                };
                frame.below.push_back((path, attr, old));
            } else if attr.nlink > 1 {
                // In sequence: the second name of a file is linked to the first.
                let made = self.one_of_several(&path, &attr, old).await;
                self.made(&path, made)?;
            } else {
                files.push((path, attr, old));
            }
        }
        let calls: Vec<_> = files
            .iter()
            .map(|file| async {
                let (path, attr, old) = file;
                let _one = at_once.acquire().await;
                (path, self.file(path, attr, old.as_ref()).await)
            })
            .collect();
        for (path, made) in join_all(calls).await {
            self.made(path, made)?;
        }
        Ok(())
    }

    fn made(&self, path: &HomePath, made: std::result::Result<(), Trouble>) -> Result<()> {
        match made {
            Ok(()) => {
                self.job.progress.files.fetch_add(1, Relaxed);
                Ok(())
            }
            Err(trouble) => self.note(self.shown(path), trouble),
        }
    }

    /// Finds the entries of a page in the last backup, under the same name.
    async fn items(&self, frame: &Frame, entries: Vec<SnapshotEntry>, last: u64) -> Result<Vec<Item>> {
        let mut known = BTreeMap::new();
        if let (Some(base), Some(old)) = (&self.base, &frame.old) {
            let mut after = frame.after;
            loop {
                let (number, dir) = (base.snapshot.number, frame.attr.ino);
                let part = self.job.client.snapshot_list(&root(), number, dir, after, PAGE).await?;
                after = part.entries.last().map_or(u64::MAX, |entry| entry.cookie);
                let of_page = part.entries.into_iter().filter(|entry| entry.cookie <= last);
                known.extend(of_page.map(|entry| (entry.cookie, entry)));
                if part.end || after >= last {
                    break;
                }
            }
            return Ok(entries.into_iter().map(|entry| compare(entry, &mut known, old)).collect());
        }
        Ok(entries.into_iter().map(|e| Item { name: e.name, attr: e.attr, old: None }).collect())
    }

    /// The path in the last backup of a directory that has been moved since.
    async fn moved(&self, dir: InodeId) -> Result<Option<HomePath>> {
        let Some(base) = &self.base else { return Ok(None) };
        let client = &self.job.client;
        match client.snapshot_attr(base.snapshot.number, dir).await {
            Err(e) if e.kind == ErrorKind::NotFound || e.kind == ErrorKind::Stale => return Ok(None), // it is new
            known => known?,
        };
        let places = base.places.get_or_try_init(|| moved::places(client, &base.snapshot, &base.top)).await?;
        Ok(places.get(&dir).cloned())
    }

    async fn one_of_several(
        &self,
        path: &HomePath,
        attr: &Attr,
        old: Option<HomePath>,
    ) -> std::result::Result<(), Trouble> {
        let lock = || self.several.lock().unwrap_or_else(PoisonError::into_inner);
        let first = lock().get(&attr.ino).map(|(first, _)| first.clone());
        let Some(first) = first else {
            self.file(path, attr, old.as_ref()).await?;
            lock().insert(attr.ino, (path.clone(), attr.nlink - 1));
            return Ok(());
        };
        let home = &self.job.home;
        remove::remove_name(&**home, path).await?;
        let found = home.stat(&first).await?;
        let found = found.ok_or_else(|| Trouble::Gap(format!("{first}, its other name, is gone at home")))?;
        home.link(&first, &Expect::Ours(found.fingerprint), path).await?;
        let mut several = lock();
        if let Some((_, left)) = several.get_mut(&attr.ino) {
            *left -= 1;
            if *left == 0 {
                several.remove(&attr.ino);
            }
        }
        Ok(())
    }

    /// Links or makes a file or another entry that is not a directory.
    async fn file(
        &self,
        path: &HomePath,
        attr: &Attr,
        old: Option<&HomePath>,
    ) -> std::result::Result<(), Trouble> {
        let home = &self.job.home;
        if let Some(found) = home.stat(path).await? {
            // From an interrupted backup. The time is set when all bytes are written and durable.
            if attr.kind == FileKind::Regular && is_as_reported(&found.fingerprint, attr) {
                return Ok(());
            }
            home.remove(path, &Expect::Ours(found.fingerprint)).await?;
        }
        if attr.kind == FileKind::Regular
            && let Some(old) = old
            && self.link(old, path, attr).await?
        {
            self.job.progress.linked.fetch_add(1, Relaxed);
            return Ok(());
        }
        let attrs = self.attrs(attr).await?;
        let what = match attr.kind {
            FileKind::Regular => return self.copy_file(path, attr, &attrs).await,
            FileKind::Symlink => {
                let target = self.job.client.snapshot_readlink(&root(), self.snapshot, attr.ino).await?;
                Make::Symlink { target }
            }
            kind if home.traits().special_files => Make::Special { kind, rdev: attr.rdev },
            _ => return Err(Trouble::Gap("pipes, sockets and devices cannot be kept there".into())),
        };
        home.make(path, &what, &attrs).await?;
        Ok(())
    }

    /// Returns whether it could be linked: another client may have changed or removed the old one.
    async fn link(&self, old: &HomePath, path: &HomePath, attr: &Attr) -> Outcome<bool> {
        let home = &self.job.home;
        let Some(found) = home.stat(old).await?.filter(|found| is_as_reported(&found.fingerprint, attr))
        else {
            return Ok(false);
        };
        match home.link(old, &Expect::Unchanged(found.fingerprint), path).await {
            Ok(_) => Ok(true),
            // Too many links (a file has 65,000 on ext4), or gone a moment ago: a copy is also correct.
            Err(crate::Fault::Broken(_) | crate::Fault::Diverged(_)) => Ok(false),
            Err(fault) => Err(fault),
        }
    }

    async fn attrs(&self, attr: &Attr) -> std::result::Result<Attrs, Trouble> {
        let (client, snapshot) = (&self.job.client, self.snapshot);
        let mut xattrs = Vec::new();
        for name in client.snapshot_list_xattr(snapshot, attr.ino).await? {
            if crate::weir::is_kept(&name) {
                let value = client.snapshot_get_xattr(snapshot, attr.ino, &name).await?;
                xattrs.push(Xattr { name, value });
            }
        }
        xattrs.sort_by(|a, b| a.name.cmp(&b.name));
        let Attr { mode, uid, gid, atime, mtime, .. } = *attr;
        Ok(Attrs { mode, uid, gid, atime, mtime, xattrs })
    }
}

/// Compares the attributes with the ones reported when it was written.
fn is_as_reported(found: &crate::Fingerprint, attr: &Attr) -> bool {
    found.kind == attr.kind && found.size == attr.size && found.mtime == attr.mtime
}

fn compare(entry: SnapshotEntry, known: &mut BTreeMap<u64, SnapshotEntry>, old: &HomePath) -> Item {
    let same = known.remove(&entry.cookie).filter(|known| {
        let is_directory = entry.attr.kind == FileKind::Directory;
        known.name == entry.name
            && known.attr.ino == entry.attr.ino
            && (is_directory || is_unchanged(&known.attr, &entry.attr))
    });
    let old = same.and_then(|same| old.join(&same.name).ok());
    Item { name: entry.name, attr: entry.attr, old }
}
