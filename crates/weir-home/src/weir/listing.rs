//! Listings of a directory in another Weir, and its entries with their attributes.
use super::tree::Tree;
use super::{Calls, fault, root};
use crate::{Fault, Found, HomeLister, HomePath, ListEntry, Listing, Outcome, RESERVED};
use std::collections::BTreeMap;
use std::sync::Arc;
use weir_env::BoxFuture;
use weir_proto::meta::FileKind;
use weir_proto::{ErrorKind, InodeId, Result};

/// Entries per request.
const LIST_MAX: u32 = 1024;

impl Tree {
    pub(super) async fn stat(&self, path: &HomePath) -> Outcome<Option<Found>> {
        let failed = |e| fault("stat", path, e);
        let place = self.place(path).await.map_err(failed)?;
        match place.and_then(|place| place.found) {
            Some(stat) => Ok(Some(self.to_here(self.stat_entry(&stat.attr).await.map_err(failed)?))),
            None => Ok(None),
        }
    }

    /// A directory of any size is read once per page, and only the page is kept in memory.
    pub(super) async fn list(&self, dir: &HomePath, after: Option<&[u8]>, limit: usize) -> Outcome<Listing> {
        let failed = |e| fault("list", dir, e);
        let ino = self.dir_at(dir).await?;
        let (mut page, mut cookie, mut end) = (BTreeMap::new(), 0, true);
        loop {
            let listed = self.client.readdir(&root(), ino, cookie, LIST_MAX, false).await.map_err(failed)?;
            for entry in listed.entries {
                cookie = entry.cookie;
                let is_ours =
                    !entry.name.starts_with(RESERVED) && after.is_none_or(|after| &entry.name[..] > after);
                if is_ours {
                    page.insert(entry.name, entry.ino);
                }
                if page.len() > limit.max(1) {
                    page.pop_last();
                    end = false;
                }
            }
            if listed.end {
                break;
            }
        }
        let mut entries = Vec::with_capacity(page.len());
        for (name, ino) in page {
            if let Some(found) = self.found(ino).await.map_err(failed)? {
                entries.push(ListEntry { name, found });
            }
        }
        Ok(Listing { entries, end })
    }

    pub(super) async fn dir_at(&self, dir: &HomePath) -> Outcome<InodeId> {
        let found = self.place(dir).await.map_err(|e| fault("list", dir, e))?.and_then(|place| place.found);
        match found.filter(|stat| stat.attr.kind == FileKind::Directory) {
            Some(stat) => Ok(stat.attr.ino),
            None => Err(Fault::diverged(dir, None, None)),
        }
    }

    /// Some entries after a cookie, and the next cookie.
    async fn next_of(
        &self,
        dir: &HomePath,
        ino: InodeId,
        cookie: u64,
        limit: usize,
    ) -> Outcome<(Listing, u64)> {
        let failed = |e| fault("list", dir, e);
        let limit = u32::try_from(limit).unwrap_or(LIST_MAX).clamp(1, LIST_MAX);
        let listed = self.client.readdir(&root(), ino, cookie, limit, false).await.map_err(failed)?;
        let (mut entries, mut cookie) = (Vec::with_capacity(listed.entries.len()), cookie);
        for entry in listed.entries {
            cookie = entry.cookie;
            if entry.name.starts_with(RESERVED) {
                continue;
            }
            if let Some(found) = self.found(entry.ino).await.map_err(failed)? {
                entries.push(ListEntry { name: entry.name, found });
            }
        }
        Ok((Listing { entries, end: listed.end }, cookie))
    }

    /// None: gone since its name was read; treated as absent.
    pub(super) async fn found(&self, ino: InodeId) -> Result<Option<Found>> {
        let found = match self.client.getattr(ino).await {
            Ok(stat) => self.stat_entry(&stat.attr).await,
            Err(e) => Err(e),
        };
        match found {
            Ok(found) => Ok(Some(self.to_here(found))),
            Err(e) if e.kind == ErrorKind::NotFound || e.kind == ErrorKind::Stale => Ok(None),
            Err(e) => Err(e),
        }
    }
}

/// A directory there that is being read.
pub(super) struct WeirLister {
    pub(super) calls: Calls,
    pub(super) tree: Arc<Tree>,
    pub(super) dir: HomePath,
    pub(super) ino: InodeId,
    pub(super) cookie: u64,
}

impl HomeLister for WeirLister {
    fn next(&mut self, limit: usize) -> BoxFuture<'_, Outcome<Listing>> {
        let (tree, dir, ino, cookie) = (self.tree.clone(), self.dir.clone(), self.ino, self.cookie);
        Box::pin(async move {
            let next = async move { tree.next_of(&dir, ino, cookie, limit).await };
            let (listing, cookie) = self.calls.run(&self.tree.url, next).await?;
            self.cookie = cookie;
            Ok(listing)
        })
    }
}
