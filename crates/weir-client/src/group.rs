//! A stripe of a file. Plain data.
use weir_env::Instant;
use weir_proto::map::{Layout, Scheme};
use weir_proto::{CellId, FileId};

/// A stripe of a file, and the deadline of the work on it.
#[derive(Clone, Copy, Debug)]
pub struct StripeRef {
    pub file: FileId,
    pub layout: Layout,
    pub stripe: u64,
    pub deadline: Instant,
    /// The write floor of its volume; 0: none.
    pub floor: u8,
}

impl StripeRef {
    pub fn cell(&self, index: usize) -> CellId {
        CellId { file: self.file, stripe: self.stripe, index: index as u8 }
    }
    pub fn scheme(&self) -> Scheme {
        self.layout.scheme
    }
    pub fn k(&self) -> usize {
        usize::from(self.scheme().data)
    }
    /// Fewest current members of its group for a change.
    pub fn needed(&self) -> usize {
        usize::from(self.floor).min(self.scheme().width()).max(self.k())
    }
}
impl std::fmt::Display for StripeRef {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let first = self.layout.stripe_start(self.stripe);
        write!(
            f,
            "stripe {} of file {} (bytes {first} to {}) on {}",
            self.stripe,
            self.file,
            first.saturating_add(self.layout.stripe_bytes()),
            self.layout.pg_of_stripe(self.stripe)
        )
    }
}
