//! Configuration of one process's store.

use weir_proto::{Error, Result};

const JOURNAL_BYTES_MIN: u64 = 1 << 20;
const JOURNAL_BYTES_MAX: u64 = 4 << 30;
/// 1 TiB: a larger journal makes no sense.
const KEEP_BYTES_MAX: u64 = 1 << 40;

#[derive(Clone, Copy, Debug)]
pub struct EngineConfig {
    /// Memory for pages of the tree.
    pub cache_bytes: usize,
    /// Disk space of the journal. The changes it holds are in memory too, at two to three times their size.
    pub journal_bytes_max: u64,
    /// Disk space for the part of the journal that is already folded into the tree: a copy of the store that
    /// lacks no more than that gets records instead of the whole state.
    pub journal_keep_bytes: u64,
}

impl Default for EngineConfig {
    fn default() -> EngineConfig {
        EngineConfig { cache_bytes: 64 << 20, journal_bytes_max: 128 << 20, journal_keep_bytes: 0 }
    }
}

impl EngineConfig {
    pub(crate) fn check(&self) -> Result<()> {
        let journal_bytes = self.journal_bytes_max;
        if !(JOURNAL_BYTES_MIN..=JOURNAL_BYTES_MAX).contains(&journal_bytes) {
            return Err(Error::invalid(format!(
                "a journal of {journal_bytes} bytes was asked for; {JOURNAL_BYTES_MIN} to {JOURNAL_BYTES_MAX} are possible"
            )));
        }
        if self.journal_keep_bytes > KEEP_BYTES_MAX {
            let keep = self.journal_keep_bytes;
            return Err(Error::invalid(format!(
                "{keep} bytes of the journal are to be kept; at most {KEEP_BYTES_MAX} are possible"
            )));
        }
        Ok(())
    }
}
