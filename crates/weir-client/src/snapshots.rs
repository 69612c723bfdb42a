//! Snapshots: taken and removed at the leader, and read. A snapshot never changes, so it needs no leases.
//!
//! Invariant: a snapshot's content comes from the leader or from objects without a writer; bytes that were at
//! home only are read from the file itself, as long as that has the snapshot's bytes, which the leader
//! confirms before and after; content that cannot be read is an error with its reason, never zeros.
use crate::base::Base;
use crate::data::Data;
use crate::files::Files;
use crate::handles::Handles;
use crate::leader::Leader;
use crate::objects::Objects;
use crate::reader::Reader;
use crate::recovery::Recovery;
use crate::rights::Rights;
use crate::types::{Handle, OpenMode};
use bytes::Bytes;
use std::fmt;
use std::sync::Arc;
use weir_env::Env;
use weir_proto::meta::{Attr, Cred, FileKind};
use weir_proto::snapshot::{Layer, SnapshotGetAttr, SnapshotOpen, SnapshotOpened};
use weir_proto::{Error, ErrorKind, InodeId, Result};

/// Recoveries of a file that one open of it in a snapshot waits for.
const RECOVERIES_MAX: usize = 4;
/// Bytes fetched for one read at a time.
const FETCH_BYTES_MAX: u64 = 16 << 20;

/// A file or a symbolic link of a snapshot, to be read.
#[derive(Debug)]
pub struct SnapshotFile {
    pub snapshot: u32,
    pub attr: Attr,
    /// The bytes of a small file, or the target of a symbolic link.
    inline: Option<Bytes>,
    layers: Vec<Layer>,
    /// The file itself, for bytes that were at home only, if it is unchanged.
    itself: Option<Itself>,
}

/// A file that is open because a snapshot of it is.
struct Itself {
    env: Env,
    files: Arc<Files>,
    handle: Handle,
    opened_by: Cred,
}
impl fmt::Debug for Itself {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.handle)
    }
}
impl Drop for Itself {
    fn drop(&mut self) {
        let (files, handle) = (self.files.clone(), self.handle);
        let close = async move {
            if let Err(e) = files.release(handle).await {
                tracing::debug!("close a file that a snapshot was read from: {e}");
            }
        };
        self.env.tasks.spawn("close what a snapshot was read from", close);
    }
}

pub struct Snapshots {
    env: Env,
    leader: Arc<Leader>,
    data: Arc<Data>,
    handles: Arc<Handles>,
    objects: Arc<Objects>,
    recovery: Arc<Recovery>,
    reader: Arc<Reader>,
    files: Arc<Files>,
}

impl Snapshots {
    pub fn new(base: &Base, rights: &Rights, reader: Arc<Reader>, files: Arc<Files>) -> Snapshots {
        let Base { env, leader, data, handles, .. } = base.clone();
        let Rights { objects, recovery, .. } = rights.clone();
        Snapshots { env, leader, data, handles, objects, recovery, reader, files }
    }

    pub async fn open(
        &self,
        cred: &Cred,
        snapshot: u32,
        ino: InodeId,
        execute: bool,
    ) -> Result<SnapshotFile> {
        let ask = |session| SnapshotOpen { session, cred: cred.clone(), snapshot, ino, execute };
        for _ in 0..RECOVERIES_MAX {
            let opened: SnapshotOpened = self.leader.ask(ask).await?;
            let SnapshotOpened { attr, inline, fence, recover, unchanged, map_version } = opened;
            self.data.need_map(map_version);
            if recover {
                self.recovery.settle_left(ino).await?;
                continue;
            }
            if attr.evicted > 0 {
                let itself = match unchanged {
                    true => match self.open_itself(cred, ino).await {
                        // It was removed meanwhile: the next try finds that.
                        Err(e) if e.kind == ErrorKind::Stale => continue,
                        opened => Some(opened?),
                    },
                    false => None,
                };
                return Ok(SnapshotFile { snapshot, attr, inline, layers: Vec::new(), itself });
            }
            let layers = match attr.layers {
                Some(layers) if layers.bytes > 0 => self.objects.list_layers(snapshot, ino, 0, true).await?.1,
                _ => Vec::new(),
            };
            if let Some(layout) = &attr.layout {
                layout.check()?;
                self.objects.fence(attr.layers.map_or(ino, |l| l.object), layout, fence).await?;
                let mut fences: Vec<_> = layers.iter().map(|l| (l.object, l.fence)).collect();
                fences.sort_unstable();
                fences.dedup();
                for (object, fence) in fences {
                    self.objects.fence(object, layout, fence).await?;
                }
            }
            return Ok(SnapshotFile { snapshot, attr, inline, layers, itself: None });
        }
        Err(Error::unavailable(format!("file {ino}: its last writer died, and its recovery does not end")))
    }

    pub async fn read_link(&self, cred: &Cred, snapshot: u32, ino: InodeId) -> Result<Bytes> {
        let file = self.open(cred, snapshot, ino, false).await?;
        match file.inline.filter(|_| file.attr.kind == FileKind::Symlink) {
            Some(target) => Ok(target),
            None => Err(Error::invalid(format!("inode {ino} was not a symbolic link"))),
        }
    }

    /// A user who may read a file in a snapshot may read its present version, too, if that is unchanged.
    async fn open_itself(&self, cred: &Cred, ino: InodeId) -> Result<Itself> {
        let (opened, opened_by) = match self.files.open(&superuser(), ino, OpenMode::READ).await {
            // The rules for mounts map the superuser to another user here.
            Err(e) if e.kind == ErrorKind::Denied => {
                (self.files.open(cred, ino, OpenMode::READ).await?, cred.clone())
            }
            opened => (opened?, superuser()),
        };
        self.handles.leave_access_time(opened.handle);
        Ok(Itself { env: self.env.clone(), files: self.files.clone(), handle: opened.handle, opened_by })
    }

    /// Bytes that were at home only, recalled for the file itself.
    async fn read_itself(&self, file: &SnapshotFile, from: u64, to: u64) -> Result<Bytes> {
        let (snapshot, ino) = (file.snapshot, file.attr.ino);
        if let Some(itself) = &file.itself {
            let parts = self.reader.read(itself.handle, from, (to - from) as usize).await?;
            let cred = &itself.opened_by;
            let ask = |session| SnapshotOpen { session, cred: cred.clone(), snapshot, ino, execute: false };
            if self.leader.ask(ask).await?.unchanged {
                return Ok(Bytes::from(parts.concat()));
            }
        }
        Err(Error::io(format!(
            "file {ino}: bytes of it were at home only when the snapshot was taken, and it was written, opened for that, or removed since: \
             they can be had at home, if at all"
        )))
    }

    pub async fn read(&self, file: &SnapshotFile, offset: u64, len: usize) -> Result<Vec<Bytes>> {
        let end = offset.saturating_add(len as u64).min(file.attr.size);
        let mut parts = Vec::new();
        let mut at = offset;
        while at < end {
            let to = end.min(at.saturating_add(FETCH_BYTES_MAX));
            parts.push(self.part(file, at, to).await?);
            at = to;
        }
        Ok(parts)
    }

    async fn part(&self, file: &SnapshotFile, from: u64, to: u64) -> Result<Bytes> {
        let (ino, attr) = (file.attr.ino, &file.attr);
        let mut data = vec![0; (to - from) as usize];
        let mut put = |at: u64, bytes: &[u8]| {
            let (a, b) = (at.max(from), (at + bytes.len() as u64).min(to));
            if a < b {
                data[(a - from) as usize..(b - from) as usize]
                    .copy_from_slice(&bytes[(a - at) as usize..(b - at) as usize]);
            }
        };
        if let Some(inline) = &file.inline {
            put(0, inline);
            return Ok(Bytes::from(data));
        }
        if attr.evicted > 0 {
            return self.read_itself(file, from, to).await;
        }
        let Some(layout) = attr.layout else { return Ok(Bytes::from(data)) };
        let own = attr.layers.map_or(ino, |l| l.object);
        let fetched = self
            .objects
            .fetch_layered(&file.layers, own, layout, &[(from, to)], self.leader.deadline())
            .await?;
        if fetched.holes {
            // Bytes of a removed snapshot look like a hole.
            let snapshot = file.snapshot;
            self.leader.ask(|session| SnapshotGetAttr { session, snapshot, ino }).await?;
        }
        fetched.parts.iter().for_each(|(at, bytes)| put(*at, bytes));
        Ok(Bytes::from(data))
    }
}

fn superuser() -> Cred {
    Cred { uid: 0, gid: 0, groups: vec![0] }
}
