//! A directory at home, read once from its beginning to its end: the kernel keeps the position, memory is one
//! part.
use super::{
    directory::{Directory, lock},
    fault,
    place::Place,
};
use crate::{HomeLane, HomeLister, HomePath, ListEntry, Listing, Outcome, RESERVED};
use rustix::{
    fd::OwnedFd,
    fs::{Dir, OFlags},
};
use std::sync::{Arc, Mutex};
use weir_env::BoxFuture;

pub(super) struct FileLister {
    lane: HomeLane,
    open: Arc<Open>,
}

struct Open {
    home: Arc<Directory>,
    path: HomePath,
    /// For looking up its entries.
    fd: OwnedFd,
    dir: Mutex<Dir>,
}

impl FileLister {
    pub(super) fn open(home: &Arc<Directory>, lane: &HomeLane, path: &HomePath) -> Outcome<FileLister> {
        let root = home.root()?;
        let failed = |e| fault("list", path, e);
        let fd = root.dir(path.names()).map_err(failed)?;
        let itself = rustix::io::fcntl_dupfd_cloexec(&fd, 0).map_err(failed)?;
        let itself = Place { dir: itself, name: b".".to_vec() };
        let opened = itself.open(OFlags::RDONLY | OFlags::DIRECTORY).map_err(failed)?;
        let dir = Mutex::new(Dir::new(opened).map_err(failed)?);
        let open = Arc::new(Open { home: home.clone(), path: path.clone(), fd, dir });
        Ok(FileLister { lane: lane.clone(), open })
    }
}

impl Open {
    fn next(&self, limit: usize) -> Outcome<Listing> {
        let failed = |e| fault("list", &self.path, e);
        let root = self.home.root()?;
        let mut dir = lock(&self.dir);
        let mut entries = Vec::with_capacity(limit.min(1024));
        while entries.len() < limit.max(1) {
            let Some(entry) = dir.read() else { return Ok(Listing { entries, end: true }) };
            let name = entry.map_err(failed)?.file_name().to_bytes().to_vec();
            if name == b"." || name == b".." || name.starts_with(RESERVED) {
                continue;
            }
            let place = Place { dir: rustix::io::fcntl_dupfd_cloexec(&self.fd, 0).map_err(failed)?, name };
            // Gone since it was read: treated as absent.
            if let Some(found) = place.stat_entry(&root.keeps).map_err(failed)? {
                entries.push(ListEntry { name: place.name.into(), found: self.home.to_here(found) });
            }
        }
        Ok(Listing { entries, end: false })
    }
}

impl HomeLister for FileLister {
    fn next(&mut self, limit: usize) -> BoxFuture<'_, Outcome<Listing>> {
        let open = self.open.clone();
        Box::pin(async move { self.lane.run("list", &[], move || open.next(limit)).await })
    }
}
