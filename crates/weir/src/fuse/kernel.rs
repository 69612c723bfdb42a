//! Lease recalls on their way down: what the client must forget, the kernel must forget before.
use super::translate::to_kernel_ino;
use fuser::Notifier;
use std::sync::OnceLock;
use weir_client::{Forget, KernelCache};
use weir_proto::InodeId;

/// The kernel's caches of one mount. Empty until the mount is there, so nothing has to be forgotten before.
#[derive(Default)]
pub struct Notices {
    notifier: OnceLock<Notifier>,
}

impl Notices {
    pub(super) fn mounted(&self, notifier: Notifier) {
        let _ = self.notifier.set(notifier); // one mount per client
    }
}

impl KernelCache for Notices {
    fn invalidate_inode(&self, ino: InodeId, what: Forget) {
        let Some(notifier) = self.notifier.get() else { return };
        // A negative offset means: attributes only. Length 0 means: to the end.
        let (offset, len) = match what {
            Forget::Attributes => (-1, 0),
            Forget::All => (0, 0),
            Forget::Part(offset, len) => (offset as i64, len as i64), // no file is longer
        };
        if let Err(e) = notifier.inval_inode(to_kernel_ino(ino), offset, len) {
            // The mount went away: there is no cache left.
            tracing::debug!("forget {ino} in the kernel: {e}");
        }
    }
    // Names are given to the kernel with a time-out of zero: it asks for each, so it has none to forget. Telling it
    // would wait for the directory's lock, which an operation may hold that waits for this very recall.
    fn invalidate_entry(&self, _: InodeId, _: &[u8]) {}
}
