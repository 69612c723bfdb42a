//! A file of another Weir that the mover has open: writes and reads through a handle of our client there.
//!
//! Invariant: a file that another process changed meanwhile is reported as diverged.
use super::tree::{Tree, bare, fingerprint_of};
use super::{Calls, WeirHome, fault, root};
use crate::{Attrs, Expect, Fault, Fingerprint, HomePath, HomeReader, HomeWriter, Outcome};
use bytes::Bytes;
use std::ops::Range;
use std::sync::{Arc, Mutex, PoisonError};
use weir_client::{Allocate, Handle, OpenMode, SetAttrs};
use weir_env::BoxFuture;
use weir_proto::meta::FileKind;
use weir_proto::{Error, InodeId};

impl Tree {
    async fn open_expected(
        &self,
        path: &HomePath,
        expect: &Expect,
        mode: OpenMode,
    ) -> Outcome<(Handle, Fingerprint)> {
        let place = self.old_place(path, expect).await?;
        let found = place.fingerprint();
        let is_file = expect.fingerprint().kind == FileKind::Regular;
        let ino = match &place.found {
            Some(stat) if is_file && found.as_ref().is_some_and(|found| expect.admits(found)) => {
                stat.attr.ino
            }
            _ => return Err(Fault::diverged(path, Some(expect.fingerprint()), found.as_ref())),
        };
        let opened = self.client.open(&root(), ino, mode).await.map_err(|e| fault("open", path, e))?;
        Ok((opened.handle, fingerprint_of(&opened.stat.attr)))
    }
}

/// An open file there; closed when the value is dropped.
pub(super) struct OpenFile {
    tree: Arc<Tree>,
    path: HomePath,
    ino: InodeId,
    pub(super) handle: Handle,
    expect: Expect,
    opened: Fingerprint,
    /// The state at the last sync, if no other mover writes the file: it must be unchanged when we continue.
    known: Mutex<Option<Fingerprint>>,
}

impl Drop for OpenFile {
    fn drop(&mut self) {
        let (client, handle) = (self.tree.client.clone(), self.handle);
        self.tree.env.tasks.spawn("close at home", async move {
            let _ = client.release(handle).await; // all data that counts was synced, with its errors reported
        });
    }
}

impl OpenFile {
    fn ino_of(expect: &Expect) -> InodeId {
        let id: [u8; 8] = expect.fingerprint().id[..].try_into().unwrap_or_default();
        InodeId(u64::from_le_bytes(id))
    }
    fn known(&self) -> std::sync::MutexGuard<'_, Option<Fingerprint>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
    pub(super) async fn fingerprint_now(&self) -> Outcome<Fingerprint> {
        self.tree.fingerprint_now(&self.path, self.ino).await
    }
    async fn check_known(&self) -> Outcome<()> {
        let known = self.known().clone();
        let Some(known) = known else { return Ok(()) };
        let found = self.fingerprint_now().await?;
        if found != known {
            return Err(Fault::diverged(&self.path, Some(&known), Some(&found)));
        }
        *self.known() = None;
        Ok(())
    }

    pub(super) async fn write(&self, offset: u64, parts: Vec<Bytes>) -> Outcome<()> {
        self.check_known().await?;
        let mut at = offset;
        for mut part in parts {
            while !part.is_empty() {
                let written = self.tree.client.write(self.handle, at, part.clone()).await;
                let n = written.map_err(|e| fault("write", &self.path, e))?.min(part.len());
                if n == 0 {
                    return Err(fault("write", &self.path, Error::io("no byte was taken")));
                }
                at += n as u64;
                drop(part.split_to(n));
            }
        }
        Ok(())
    }

    async fn zero(&self, range: Range<u64>) -> Outcome<()> {
        self.check_known().await?;
        let failed = |e| fault("make a hole in", &self.path, e);
        let (client, size) = (&self.tree.client, self.fingerprint_now().await?.size);
        let within = range.start..range.end.min(size);
        if !within.is_empty() {
            let len = within.end - within.start;
            client.fallocate(self.handle, Allocate::PunchHole, within.start, len).await.map_err(failed)?;
        }
        if size < range.end {
            let set = SetAttrs { size: Some(range.end), ..SetAttrs::default() };
            client.setattr(&root(), self.ino, Some(self.handle), set).await.map_err(failed)?;
        }
        Ok(())
    }

    async fn sync(&self) -> Outcome<Fingerprint> {
        self.tree.client.fsync(self.handle).await.map_err(|e| fault("sync", &self.path, e))?;
        self.remember().await
    }

    async fn remember(&self) -> Outcome<Fingerprint> {
        let fingerprint = self.fingerprint_now().await?;
        if matches!(self.expect, Expect::Unchanged(_)) {
            *self.known() = Some(fingerprint.clone());
        }
        Ok(fingerprint)
    }

    async fn finish(&self, size: u64, attrs: &Attrs) -> Outcome<Fingerprint> {
        self.check_known().await?;
        let failed = |e| fault("finish", &self.path, e);
        let client = &self.tree.client;
        if self.fingerprint_now().await?.size != size {
            let set = SetAttrs { size: Some(size), ..SetAttrs::default() };
            client.setattr(&root(), self.ino, Some(self.handle), set).await.map_err(failed)?;
        }
        let (synced, xattrs) = tokio::join!(client.fsync(self.handle), self.tree.xattrs(self.ino));
        synced.map_err(failed)?;
        let stat = client.getattr(self.ino).await.map_err(failed)?;
        let mut found = bare(&stat.attr);
        found.attrs.xattrs = xattrs.map_err(failed)?;
        self.tree.set(self.ino, &found, attrs).await.map_err(failed)?;
        client.fsync(self.handle).await.map_err(failed)?;
        self.remember().await
    }

    pub(super) async fn read(&self, offset: u64, len: usize) -> Outcome<Vec<Bytes>> {
        let failed = |e| fault("read", &self.path, e);
        let (mut parts, mut done) = (Vec::new(), 0);
        while done < len {
            let got =
                self.tree.client.read(self.handle, offset + done as u64, len - done).await.map_err(failed)?;
            let n: usize = got.iter().map(Bytes::len).sum();
            if n == 0 {
                break;
            }
            parts.extend(got);
            done += n;
        }
        let found = self.fingerprint_now().await?;
        if !self.expect.admits(&found) {
            return Err(Fault::diverged(&self.path, Some(self.expect.fingerprint()), Some(&found)));
        }
        Ok(parts)
    }

    async fn data_from(&self, offset: u64) -> Outcome<Option<Range<u64>>> {
        let failed = |e| fault("find holes in", &self.path, e);
        let client = &self.tree.client;
        let Some(start) = client.seek_data(self.handle, offset).await.map_err(failed)? else {
            return Ok(None);
        };
        let end = client.seek_hole(self.handle, start).await.map_err(failed)?;
        Ok(Some(start..end.unwrap_or(self.opened.size)))
    }
}

/// An open file, and the permit for its calls.
pub(super) struct Open {
    calls: Calls,
    pub(super) file: Arc<OpenFile>,
}

impl Open {
    pub(super) fn call<T, F>(&self, work: impl FnOnce(Arc<OpenFile>) -> F) -> BoxFuture<'_, Outcome<T>>
    where
        T: Send + 'static,
        F: Future<Output = Outcome<T>> + Send + 'static,
    {
        self.calls.run(&self.file.tree.url, work(self.file.clone()))
    }
}

impl HomeWriter for Open {
    fn write_at(&self, offset: u64, parts: Vec<Bytes>) -> BoxFuture<'_, Outcome<()>> {
        self.call(move |file| async move { file.write(offset, parts).await })
    }
    fn zero(&self, range: Range<u64>) -> BoxFuture<'_, Outcome<()>> {
        self.call(move |file| async move { file.zero(range).await })
    }
    fn sync(&self) -> BoxFuture<'_, Outcome<Fingerprint>> {
        self.call(|file| async move { file.sync().await })
    }
    fn finish<'a>(&'a self, size: u64, attrs: &'a Attrs) -> BoxFuture<'a, Outcome<Fingerprint>> {
        let attrs = self.file.tree.ids.to_home(FileKind::Regular, attrs);
        self.call(move |file| async move { file.finish(size, &attrs).await })
    }
}

impl HomeReader for Open {
    fn read_at(&self, offset: u64, len: usize) -> BoxFuture<'_, Outcome<Vec<Bytes>>> {
        self.call(move |file| async move { file.read(offset, len).await })
    }
    fn data_from(&self, offset: u64) -> BoxFuture<'_, Outcome<Option<Range<u64>>>> {
        self.call(move |file| async move { file.data_from(offset).await })
    }
    fn fingerprint(&self) -> &Fingerprint {
        &self.file.opened
    }
}

impl WeirHome {
    pub(super) async fn open_file(&self, path: &HomePath, expect: &Expect, mode: OpenMode) -> Outcome<Open> {
        let (path, expect, calls) = (path.clone(), expect.clone(), self.calls.clone());
        let file = self.call(move |tree| async move {
            let (handle, opened) = tree.open_expected(&path, &expect, mode).await?;
            let ino = OpenFile::ino_of(&Expect::Ours(opened.clone()));
            let is_alone = mode.write && matches!(expect, Expect::Unchanged(_));
            let known = Mutex::new(is_alone.then(|| opened.clone()));
            Ok(OpenFile { tree, path, ino, handle, expect, opened, known })
        });
        Ok(Open { calls, file: Arc::new(file.await?) })
    }
}
