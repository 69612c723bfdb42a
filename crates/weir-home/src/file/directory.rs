//! The directory of a home: its root, opened on first use, and the changes there that are not durable yet.
//!
//! Invariant: after a successful [`Directory::settle`] all changes that were noted before it are durable.
use super::{FileHomeConfig, fault, root::Root};
use crate::{Found, HomePath, HomeSpace, IdMap, Outcome};
use rustix::fs::OFlags;
use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
};
use weir_env::BufferPool;

/// If more places than this changed, the whole file system is synced once instead of each one.
const TOUCHED_MAX: usize = 256;

pub(super) struct Directory {
    config: FileHomeConfig,
    buffers: BufferPool,
    /// Opened on first use, and again after home was unreachable: it may have been mounted again.
    root: Mutex<Option<Arc<Root>>>,
    /// Changes that are not known to be durable.
    touched: Mutex<BTreeSet<HomePath>>,
    /// Held while settling: a second caller waits for the first one's changes, too.
    settling: Mutex<()>,
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Directory {
    pub(super) fn new(config: FileHomeConfig, buffers: BufferPool) -> Directory {
        let (root, touched, settling) = (Mutex::default(), Mutex::default(), Mutex::default());
        Directory { config, buffers, root, touched, settling }
    }

    pub(super) fn ids(&self) -> &IdMap {
        &self.config.ids
    }
    pub(super) fn buffers(&self) -> &BufferPool {
        &self.buffers
    }
    /// The entry with the owner that it has here.
    pub(super) fn to_here(&self, found: Found) -> Found {
        let attrs = self.ids().to_here(found.fingerprint.kind, &found.attrs);
        Found { attrs, ..found }
    }

    pub(super) fn root(&self) -> Outcome<Arc<Root>> {
        if let Some(root) = &*lock(&self.root) {
            return Ok(root.clone());
        }
        // Not under the lock: it may hang.
        let root = Arc::new(Root::open(&self.config)?);
        *lock(&self.root) = Some(root.clone());
        Ok(root)
    }

    /// The next call reopens it, and checks its mark.
    pub(super) fn forget_root(&self) {
        *lock(&self.root) = None;
    }

    pub(super) fn touch(&self, path: &HomePath) {
        let mut touched = lock(&self.touched);
        if touched.len() <= TOUCHED_MAX {
            touched.insert(path.clone());
        }
    }
    pub(super) fn touch_parent(&self, path: &HomePath) {
        self.touch(&path.parent().unwrap_or_default());
    }

    pub(super) fn settle(&self) -> Outcome<()> {
        let _one_at_a_time = lock(&self.settling);
        let touched = std::mem::take(&mut *lock(&self.touched));
        let settled = self.root().and_then(|root| {
            if touched.len() > TOUCHED_MAX || !touched.iter().all(|path| sync_place(&root, path).is_ok()) {
                rustix::fs::syncfs(root.fd()).map_err(|e| fault("sync", &HomePath::root(), e))?;
            }
            Ok(())
        });
        if settled.is_err() {
            lock(&self.touched).extend(touched);
        }
        settled
    }

    pub(super) fn space(&self) -> Outcome<HomeSpace> {
        let root = self.root()?;
        let fs = rustix::fs::fstatvfs(root.fd())
            .map_err(|e| fault("ask for the space of", &HomePath::root(), e))?;
        let bytes = |blocks: u64| blocks.saturating_mul(fs.f_frsize);
        Ok(HomeSpace { total: bytes(fs.f_blocks), free: bytes(fs.f_bavail) })
    }
}

/// Fails for entries that cannot be opened (links, devices) or were moved: then the whole file system is
/// synced.
fn sync_place(root: &Root, path: &HomePath) -> rustix::io::Result<()> {
    rustix::fs::fsync(root.place(path)?.open(OFlags::RDONLY)?)
}
