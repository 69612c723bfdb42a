//! One file's bytes, from a snapshot to a backup.
use super::walk::Walk;
use super::{Trouble, private, remove, root};
use crate::{Attrs, Expect, HomePath, HomeWriter, Make};
use bytes::Bytes;
use std::sync::atomic::Ordering::Relaxed;
use weir_client::SnapshotFile;
use weir_proto::meta::Attr;
use weir_proto::{Error, MIB, Result};

/// Bytes read and written at once.
const PART: u64 = 4 * MIB;

impl Walk<'_> {
    pub(super) async fn copy_file(
        &self,
        path: &HomePath,
        attr: &Attr,
        attrs: &Attrs,
    ) -> std::result::Result<(), Trouble> {
        let source = self.job.client.snapshot_open(&root(), self.snapshot, attr.ino).await?;
        self.fill(&source, path, attr, attrs).await
    }

    /// Fills the new file. An incomplete one is removed, unless the backup as a whole is resumed later.
    async fn fill(
        &self,
        source: &SnapshotFile,
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

    async fn write_all(
        &self,
        source: &SnapshotFile,
        path: &HomePath,
        attr: &Attr,
        attrs: &Attrs,
    ) -> std::result::Result<(), Trouble> {
        let home = &self.job.home;
        let made = home.make(path, &Make::File, &Attrs { mode: 0o600, ..private() }).await?;
        let writer = home.open_write(path, &Expect::Ours(made)).await?;
        // The next part is read while the previous one is written.
        let mut read = self.read(source, 0, attr.size).await?;
        let mut at = 0;
        while at < attr.size {
            let len = PART.min(attr.size - at);
            let (written, next) =
                tokio::join!(self.write(&*writer, at, len, read), self.read(source, at + len, attr.size));
            written?;
            (at, read) = (at + len, next?);
            self.job.progress.bytes.fetch_add(len, Relaxed);
        }
        writer.finish(attr.size, attrs).await?;
        Ok(())
    }

    async fn read(&self, source: &SnapshotFile, at: u64, size: u64) -> Result<Vec<Bytes>> {
        let len = PART.min(size.saturating_sub(at));
        let (mut parts, mut got) = (Vec::new(), 0);
        while got < len {
            let (from, rest) = (at + got, (len - got) as usize);
            let more = self.job.client.snapshot_read(source, from, rest).await?;
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
        let read: u64 = parts.iter().map(|part| part.len() as u64).sum();
        assert_eq!(read, len, "a part of a backup is as long as its range");
        let zeros = parts.iter().all(|part| part.iter().all(|b| *b == 0));
        match zeros && self.job.home.traits().holes {
            true => writer.zero(at..at + len).await?,
            false => writer.write_at(at, parts).await?,
        }
        Ok(())
    }
}
