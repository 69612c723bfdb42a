//! The directory of another Weir that is a home: entries by their paths there, with their attributes.
use super::{WeirHomeConfig, fault, is_kept, root};
use crate::{Attrs, Expect, Fault, FaultKind, Fingerprint, Found, HomePath, IdMap, Outcome, RESERVED, Xattr};
use bytes::Bytes;
use weir_client::{Client, NewMode, OpenMode, Stat};
use weir_env::Env;
use weir_proto::meta::{Attr, FileKind, Time};
use weir_proto::{Error, InodeId, Result};

const MARK_BYTES_MAX: usize = 4096;

pub(super) struct Tree {
    pub(super) url: String,
    pub(super) client: Client,
    base: InodeId,
    pub(super) ids: IdMap,
    pub(super) env: Env,
}

pub(super) fn fingerprint_of(attr: &Attr) -> Fingerprint {
    let (size, mtime) = match attr.kind {
        FileKind::Regular | FileKind::Symlink => (attr.size, attr.mtime),
        _ => (0, Time { nanos: 0 }),
    };
    let id = Bytes::copy_from_slice(&attr.ino.0.to_le_bytes()); // never reused
    Fingerprint { kind: attr.kind, id, version: Bytes::new(), size, mtime }
}

/// The entry from its attributes alone.
pub(super) fn bare(attr: &Attr) -> Found {
    let (mode, uid, gid, atime, mtime) = (attr.mode, attr.uid, attr.gid, attr.atime, attr.mtime);
    let attrs = Attrs { mode, uid, gid, atime, mtime, xattrs: Vec::new() };
    let (nlink, rdev, allocated) = (attr.nlink, attr.rdev, attr.allocated);
    Found { fingerprint: fingerprint_of(attr), attrs, nlink, target: Bytes::new(), rdev, allocated }
}

/// The place of a path, whether or not it exists, and the entry there.
pub(super) struct Place {
    pub(super) dir: InodeId,
    pub(super) name: Bytes,
    pub(super) found: Option<Stat>,
}

impl Place {
    pub(super) fn fingerprint(&self) -> Option<Fingerprint> {
        self.found.as_ref().map(|stat| fingerprint_of(&stat.attr))
    }
}

impl Tree {
    /// Finds the directory and checks (or writes) its mark.
    pub(super) async fn open(env: &Env, config: WeirHomeConfig) -> Outcome<Tree> {
        let base = find_base(&config).await?;
        let tree = Tree { url: config.url, client: config.client, base, ids: config.ids, env: env.clone() };
        if !config.only_reads {
            tree.check_mark(&config.relation, config.is_new).await?;
        }
        Ok(tree)
    }

    pub(super) fn to_here(&self, found: Found) -> Found {
        let attrs = self.ids.to_here(found.fingerprint.kind, &found.attrs);
        Found { attrs, ..found }
    }

    /// None: there is no directory for it.
    pub(super) async fn place(&self, path: &HomePath) -> Result<Option<Place>> {
        let Some((name, above)) = path.names().split_last() else {
            let found = Some(self.client.getattr(self.base).await?);
            return Ok(Some(Place { dir: self.base, name: Bytes::new(), found }));
        };
        let mut dir = self.base;
        for name in above {
            match self.client.lookup(&root(), dir, name).await? {
                Some(stat) if stat.attr.kind == FileKind::Directory => dir = stat.attr.ino,
                _ => return Ok(None),
            }
        }
        let found = self.client.lookup(&root(), dir, name).await?;
        Ok(Some(Place { dir, name: name.clone(), found }))
    }

    /// The place for a new entry; the directory above it must exist.
    pub(super) async fn new_place(&self, doing: &str, path: &HomePath) -> Outcome<Place> {
        let place = self.place(path).await.map_err(|e| fault(doing, path, e))?;
        place.ok_or_else(|| Fault::diverged(&path.parent().unwrap_or_default(), None, None))
    }

    /// The place of an entry of ours.
    pub(super) async fn old_place(&self, path: &HomePath, expect: &Expect) -> Outcome<Place> {
        let place = self.place(path).await.map_err(|e| fault("find", path, e))?;
        place.ok_or_else(|| Fault::diverged(path, Some(expect.fingerprint()), None))
    }

    pub(super) async fn fingerprint_now(&self, path: &HomePath, ino: InodeId) -> Outcome<Fingerprint> {
        let stat = self.client.getattr(ino).await.map_err(|e| fault("stat", path, e))?;
        Ok(fingerprint_of(&stat.attr))
    }

    pub(super) async fn stat_entry(&self, attr: &Attr) -> Result<Found> {
        let xattrs = self.xattrs(attr.ino).await?;
        let target = match attr.kind {
            FileKind::Symlink => self.client.readlink(attr.ino).await?,
            _ => Bytes::new(),
        };
        let bare = bare(attr);
        let attrs = Attrs { xattrs, ..bare.attrs };
        Ok(Found { attrs, target, ..bare })
    }

    pub(super) async fn xattrs(&self, ino: InodeId) -> Result<Vec<Xattr>> {
        let mut xattrs = Vec::new();
        for name in self.client.list_xattr(&root(), ino).await? {
            if is_kept(&name) {
                let value = self.client.get_xattr(&root(), ino, &name).await?;
                xattrs.push(Xattr { name, value });
            }
        }
        xattrs.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(xattrs)
    }

    async fn check_mark(&self, relation: &str, is_new: bool) -> Outcome<()> {
        let path = HomePath::root();
        let wished = format!("weir home 1\nrelation {relation}\n");
        let failed = |doing: &'static str| move |e| fault(doing, &HomePath::root(), e);
        if let Some(stat) = self.client.lookup(&root(), self.base, RESERVED).await.map_err(failed("open"))? {
            let opened =
                self.client.open(&root(), stat.attr.ino, OpenMode::READ).await.map_err(failed("open"))?;
            let text = self.client.read(opened.handle, 0, MARK_BYTES_MAX).await;
            let _ = self.client.release(opened.handle).await; // it was only read
            let text = text.map_err(failed("read the mark in"))?.concat();
            if text == wished.as_bytes() {
                return Ok(());
            }
            let error = Error::stale(format!(
                "{} is marked as another home (its .weir-home has {:?}, expected {:?}): give the right directory, or \
                 remove .weir-home there if it is to be ours",
                self.url,
                String::from_utf8_lossy(&text).trim_end(),
                wished.trim_end()
            ));
            return Err(Fault::new(FaultKind::Diverged, &path, error));
        }
        if !is_new {
            return Err(Fault::Unreachable(Error::unavailable(format!(
                "{} has no mark .weir-home: it is not this relation's home; give the right directory",
                self.url
            ))));
        }
        let leave = async {
            let (cred, mode) = (root(), OpenMode::WRITE);
            let opened =
                self.client.create(&cred, self.base, RESERVED, NewMode::from(0o644), true, mode).await?;
            let written = self.client.write(opened.handle, 0, Bytes::from(wished.clone())).await;
            let synced = self.client.fsync(opened.handle).await;
            self.client.release(opened.handle).await?;
            written.and(synced)
        };
        leave.await.map_err(failed("leave the mark in"))
    }
}

async fn find_base(config: &WeirHomeConfig) -> Outcome<InodeId> {
    let mut at = InodeId::ROOT;
    for name in config.base.names() {
        let failed = |e| fault("find", &config.base, e);
        let found = config.client.lookup(&root(), at, name).await.map_err(failed)?;
        let found = found.filter(|stat| stat.attr.kind == FileKind::Directory).ok_or_else(|| {
            Fault::Unreachable(Error::unavailable(format!(
                "{} is not a directory at home ({}): make it there, or correct the relation's URL",
                config.base, config.url
            )))
        })?;
        at = found.attr.ino;
    }
    Ok(at)
}
