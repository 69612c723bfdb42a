//! The amount of written data that only this client has, for administrators.
use crate::Client;
use crate::dirty::StripeBuf;

impl Client {
    /// Bytes that programs have written and that are not sent to targets yet.
    pub fn unsaved_bytes(&self) -> u64 {
        let all = self.inner.dirty_inodes().into_iter().filter_map(|ino| self.inner.known_inode(ino));
        let unsaved = |(_, buf): (&u64, &StripeBuf)| u64::from(buf.covered_bytes());
        all.map(|inode| inode.lock().write.dirty_within(0..=u64::MAX).map(unsaved).sum::<u64>()).sum()
    }
}
