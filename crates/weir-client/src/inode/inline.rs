//! Bytes of a small file that are in its inode, and their way out of it.
use bytes::Bytes;

/// Whether a file's bytes are in its inode.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Inline {
    Unknown,
    /// Data is on targets, or there is none.
    No,
    /// These bytes, then zeros up to the size.
    Yes(Bytes),
}

/// Inline bytes that were turned into dirty ones: the next commit drops them from the inode.
#[derive(Debug, Default)]
pub struct Leaving {
    begun: bool,
    /// Those bytes, until then: if they do not get to targets they must not be lost.
    bytes: Bytes,
    /// The send that had them failed, and none has ended well since.
    unsent: bool,
}

impl Leaving {
    pub fn begin(&mut self, bytes: Bytes) {
        self.begun = true;
        self.bytes = bytes;
    }
    /// Whether the inode still holds bytes for the leader that are not the file's any more.
    pub fn has_begun(&self) -> bool {
        self.begun
    }
    /// Whether a commit now may have the leader drop them.
    pub fn may_drop(&self) -> bool {
        self.begun && !self.unsent
    }
    /// A send of the first stripe failed: what has to be sent once more.
    pub fn note_failed(&mut self, size: u64) -> Bytes {
        self.unsent = true;
        self.bytes.slice(..self.bytes.len().min(size as usize))
    }
    /// A send of the first stripe ended well.
    pub fn note_sent(&mut self) {
        self.unsent = false;
    }
    /// The leader has dropped them.
    pub fn end(&mut self) {
        self.begun = false;
        self.bytes = Bytes::new();
    }
    /// The inode was committed with other bytes. `again`: what was sent to targets since is newer.
    pub fn note_inline(&mut self, again: bool) {
        self.begun = again;
    }
    /// The right to write is gone. True: the leader was not told, so it still has them.
    pub fn give_up(&mut self) -> bool {
        std::mem::take(self).begun
    }
}
