//! How much of what programs have written is nowhere but here, for people.
use crate::Client;

impl Client {
    /// Bytes that programs have written and that were not sent to targets yet.
    pub fn unsaved_bytes(&self) -> u64 {
        let all = self.inner.dirty_inodes().into_iter().filter_map(|ino| self.inner.known_inode(ino));
        all.map(|inode| inode.lock().dirty.values().map(|buf| u64::from(buf.covered_bytes())).sum::<u64>())
            .sum()
    }
}
