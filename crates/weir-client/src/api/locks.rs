//! Locks on files, cluster-wide.
use crate::Client;
use crate::api::Handle;
use crate::locks::{InTheWay, LockWish, Locked};
use tokio::sync::Notify;
use weir_env::BoxFuture;
use weir_proto::lock::{LockEntry, LockOwner};
use weir_proto::{InodeId, Result};

impl Client {
    /// Locks, converts or unlocks a range without waiting for other holders.
    pub fn try_lock(&self, handle: Handle, wish: LockWish) -> BoxFuture<'_, Result<Locked>> {
        Box::pin(self.inner.locks.try_lock(handle, wish))
    }
    /// Waits until the lock is granted; a notified `interrupt` ends the wait.
    pub fn wait_lock<'a>(
        &'a self,
        handle: Handle,
        wish: LockWish,
        interrupt: &'a Notify,
    ) -> BoxFuture<'a, Result<Locked>> {
        Box::pin(self.inner.locks.wait_lock(handle, wish, interrupt))
    }
    /// The first conflicting lock.
    pub fn test_lock(&self, handle: Handle, wish: LockWish) -> BoxFuture<'_, Result<Option<InTheWay>>> {
        Box::pin(self.inner.locks.test_lock(handle, wish))
    }
    /// At `close(2)`: the owner's locks of the file end.
    pub fn unlock_owner(&self, handle: Handle, owner: LockOwner) -> BoxFuture<'_, Result<()>> {
        Box::pin(self.inner.locks.unlock_owner(handle, owner))
    }
    /// Holders and waiters, and the number of those that the list omits.
    pub fn list_locks(&self, ino: InodeId) -> BoxFuture<'_, Result<(Vec<LockEntry>, u32)>> {
        Box::pin(self.inner.locks.list_locks(ino))
    }
}
