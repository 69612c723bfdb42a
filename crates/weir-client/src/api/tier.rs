//! Bytes that are at home only.
use crate::Client;
use crate::api::Handle;
use crate::recall::Recall;
use bytes::Bytes;
use std::time::Duration;
use weir_env::BoxFuture;
use weir_proto::meta::Cred;
use weir_proto::recall::{Evicted, EvictionLevel, Learned, SetMarks, TierState};
use weir_proto::{InodeId, Result};

impl Client {
    /// Frees the space of whole stripes in `from..to`, and of the tail: home has these bytes.
    pub fn evict<'a>(
        &'a self,
        cred: &'a Cred,
        ino: InodeId,
        from: u64,
        to: u64,
    ) -> BoxFuture<'a, Result<Evicted>> {
        Box::pin(self.inner.evict(cred, ino, from, to))
    }
    /// Queues a recall with low priority; waits for nothing.
    pub fn want_recall(&self, ino: InodeId, from: u64, to: u64) -> BoxFuture<'_, Result<()>> {
        Box::pin(self.inner.want_recall(ino, from, to))
    }
    /// Waits until all of a file is online. May be dropped at any time.
    pub fn recall_file(&self, ino: InodeId) -> BoxFuture<'_, Result<()>> {
        Box::pin(self.inner.recall_file(ino))
    }
    /// A pinned file is never evicted.
    pub fn pin<'a>(&'a self, cred: &'a Cred, ino: InodeId, pinned: bool) -> BoxFuture<'a, Result<()>> {
        Box::pin(self.inner.pin(cred, ino, pinned))
    }
    /// Which of a file's bytes are online.
    pub fn tier_state(&self, ino: InodeId) -> BoxFuture<'_, Result<TierState>> {
        Box::pin(self.inner.tier_state(ino))
    }
    /// Whether a read or a write through the handle may have to wait for a recall.
    pub fn may_wait_for_home(&self, handle: Handle) -> bool {
        self.inner.may_wait_for_home(handle)
    }
    /// Waits until `len` bytes from `offset` (`None`: the end of the file) on are online. Reads and writes do
    /// so themselves, but this may be dropped at any time.
    pub fn recall(&self, handle: Handle, offset: Option<u64>, len: usize) -> BoxFuture<'_, Result<()>> {
        Box::pin(self.inner.recall_for(handle, offset, len))
    }

    /// How full pools and volumes are, and the eviction watermarks; `set` changes a volume's marks first.
    pub fn eviction<'a>(
        &'a self,
        cred: &'a Cred,
        set: Option<SetMarks>,
    ) -> BoxFuture<'a, Result<Vec<EvictionLevel>>> {
        Box::pin(self.inner.eviction(cred, set))
    }

    // ---- movers

    /// Takes recalls to carry out, and waits for some, at most for `wait`.
    pub fn take_recalls(&self, max: u32, wait: Duration) -> BoxFuture<'_, Result<Vec<Recall>>> {
        Box::pin(self.inner.take_recalls(max, wait))
    }
    /// Whole stripes of a recall from `offset` on, or up to its end. Durable on all live targets.
    pub fn fill<'a>(&'a self, recall: &'a Recall, offset: u64, data: Bytes) -> BoxFuture<'a, Result<()>> {
        Box::pin(self.inner.fill(recall, offset, data))
    }
    /// All of a recall is filled: it may be read.
    pub fn filled(&self, recall: Recall) -> BoxFuture<'_, Result<()>> {
        Box::pin(self.inner.filled(recall, None))
    }
    /// The same, with checksums of the bytes read, if none were known to verify them before.
    pub fn filled_with(&self, recall: Recall, learned: Option<Learned>) -> BoxFuture<'_, Result<()>> {
        Box::pin(self.inner.filled(recall, learned))
    }
    /// `retry`: later, by any mover that has time; otherwise callers that wait for it fail with `error`.
    pub fn recall_failed<'a>(
        &'a self,
        recall: Recall,
        error: &'a str,
        retry: bool,
    ) -> BoxFuture<'a, Result<()>> {
        Box::pin(self.inner.recall_failed(recall, error, retry))
    }
}
