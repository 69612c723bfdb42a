//! Inline bytes of a small file, and their move to targets.
use bytes::Bytes;

/// Whether a file's bytes are inline.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Inline {
    Unknown,
    /// Data is on targets, or there is none.
    No,
    /// These bytes, then zeros up to the size.
    Yes(Bytes),
}

/// Inline bytes that became dirty ones: the next commit drops them from the inode.
#[derive(Debug, Default)]
pub struct Leaving {
    begun: bool,
    /// A copy of those bytes, until then: if they do not reach targets they must not be lost.
    bytes: Bytes,
    /// The send that carried them failed, and none has succeeded since.
    unsent: bool,
}

impl Leaving {
    pub fn begin(&mut self, bytes: Bytes) {
        self.begun = true;
        self.bytes = bytes;
    }
    /// Whether the leader still has inline bytes that are outdated.
    pub fn has_begun(&self) -> bool {
        self.begun
    }
    /// Whether a commit now may make the leader drop them.
    pub fn may_drop(&self) -> bool {
        self.begun && !self.unsent
    }
    /// A send of the first stripe failed: returns the bytes to send again.
    pub fn note_failed(&mut self, size: u64) -> Bytes {
        self.unsent = true;
        self.bytes.slice(..self.bytes.len().min(size as usize))
    }
    /// A send of the first stripe succeeded.
    pub fn note_sent(&mut self) {
        self.unsent = false;
    }
    /// The leader has dropped them.
    pub fn end(&mut self) {
        self.begun = false;
        self.bytes = Bytes::new();
    }
    /// The inode was committed with other bytes. `again`: newer bytes were sent to targets since.
    pub fn note_inline(&mut self, again: bool) {
        self.begun = again;
    }
    /// The Write lease is gone. True: the leader has no commit of this, so it still has the bytes.
    pub fn give_up(&mut self) -> bool {
        std::mem::take(self).begun
    }
}
