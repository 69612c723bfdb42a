//! One file's bytes, from a snapshot to a backup.
//!
//! What was evicted when the snapshot was taken is read from the file itself if its bytes are still those of the snapshot, which
//! its data version tells before and after.
use super::walk::Walk;
use super::{Trouble, private, remove, root};
use crate::{Attrs, Expect, HomePath, HomeWriter, Make};
use bytes::Bytes;
use std::sync::atomic::Ordering::Relaxed;
use weir_client::{Handle, OpenMode, PastFile};
use weir_proto::meta::Attr;
use weir_proto::{Error, InodeId, MIB, Result};

/// Bytes read and written at once.
const PIECE: u64 = 4 * MIB;

enum Source {
    Past(PastFile),
    Live(Handle),
}

impl Walk<'_> {
    pub(super) async fn copy_file(
        &self,
        path: &HomePath,
        attr: &Attr,
        attrs: &Attrs,
    ) -> std::result::Result<(), Trouble> {
        let source = self.source(attr).await?;
        let copied = self.fill(&source, path, attr, attrs).await;
        if let Source::Live(handle) = source {
            let closed = self.job.client.release(handle).await;
            copied?;
            closed?;
            let still = self.still_live(attr).await;
            if still.is_err() {
                remove::remove_name(&*self.job.home, path).await?;
            }
            return Ok(still?);
        }
        copied
    }

    /// What is not all there does not stay, unless the whole backup goes on later.
    async fn fill(
        &self,
        source: &Source,
        path: &HomePath,
        attr: &Attr,
        attrs: &Attrs,
    ) -> std::result::Result<(), Trouble> {
        let filled = self.write_all(source, path, attr, attrs).await;
        if let Err(Trouble::Gap(_)) = filled {
            remove::remove_name(&*self.job.home, path).await?;
        }
        filled
    }

    async fn source(&self, attr: &Attr) -> Result<Source> {
        let (client, ino) = (&self.job.client, attr.ino);
        if attr.evicted == 0 {
            return client.past_open(&root(), self.snapshot, ino).await.map(Source::Past);
        }
        self.still_live(attr).await?;
        let opened =
            client.open(&root(), ino, OpenMode::READ).await.map_err(|e| lost(ino, &e.to_string()))?;
        client.leaves_access_time(opened.handle);
        Ok(Source::Live(opened.handle))
    }

    /// Whether the file still has the bytes of then.
    async fn still_live(&self, attr: &Attr) -> Result<()> {
        let now = self.job.client.getattr(attr.ino).await;
        let now = now.map_err(|e| lost(attr.ino, &e.to_string()))?.attr;
        match (now.data_version, now.size) == (attr.data_version, attr.size) {
            true => Ok(()),
            false => Err(lost(attr.ino, "and was changed before they came back")),
        }
    }

    async fn write_all(
        &self,
        source: &Source,
        path: &HomePath,
        attr: &Attr,
        attrs: &Attrs,
    ) -> std::result::Result<(), Trouble> {
        let home = &self.job.home;
        let made = home.make(path, &Make::File, &Attrs { mode: 0o600, ..private() }).await?;
        let writer = home.open_write(path, &Expect::Ours(made)).await?;
        // What is read of one piece is written while the next one is read.
        let mut read = self.read(source, 0, attr.size).await?;
        let mut at = 0;
        while at < attr.size {
            let len = PIECE.min(attr.size - at);
            let (written, next) =
                tokio::join!(self.write(&*writer, at, len, read), self.read(source, at + len, attr.size));
            written?;
            (at, read) = (at + len, next?);
            self.job.progress.bytes.fetch_add(len, Relaxed);
        }
        writer.finish(attr.size, attrs).await?;
        Ok(())
    }

    async fn read(&self, source: &Source, at: u64, size: u64) -> Result<Vec<Bytes>> {
        let len = PIECE.min(size.saturating_sub(at));
        let (mut parts, mut got) = (Vec::new(), 0);
        while got < len {
            let (from, rest) = (at + got, (len - got) as usize);
            let more = match source {
                Source::Past(file) => self.job.client.past_read(file, from, rest).await?,
                Source::Live(handle) => self.job.client.read(*handle, from, rest).await?,
            };
            let bytes: usize = more.iter().map(Bytes::len).sum();
            if bytes == 0 {
                return Err(Error::io(format!("it ends at byte {from} of {size}")));
            }
            got += bytes as u64;
            parts.extend(more);
        }
        Ok(parts)
    }

    async fn write(
        &self,
        writer: &dyn HomeWriter,
        at: u64,
        len: u64,
        parts: Vec<Bytes>,
    ) -> std::result::Result<(), Trouble> {
        let zeros = parts.iter().all(|part| part.iter().all(|b| *b == 0));
        match zeros && self.job.home.traits().holes {
            true => writer.zero(at..at + len).await?,
            false => writer.write_at(at, parts).await?,
        }
        Ok(())
    }
}

fn lost(ino: InodeId, why: &str) -> Error {
    Error::io(format!("its bytes (inode {ino}) were at home only when the snapshot was taken: {why}"))
}
