//! The amount of written data that only this client has, for administrators.
use crate::Client;

impl Client {
    /// Bytes that programs have written and that no target has acknowledged yet.
    pub fn unsaved_bytes(&self) -> u64 {
        let all = self.inner.inodes.dirty().into_iter();
        all.map(|inode| inode.lock().write.unsaved_bytes()).sum()
    }
}
