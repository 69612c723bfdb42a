//! Sizes of a store's files, which follow its disk, and what is known of the space that is left there.
//!
//! A journal of usual size would fill a small disk, and then nothing could be folded. So segments are smaller
//! there. Pure; [`crate::space`] has the files that give way.

use crate::config::EngineConfig;
use crate::format::COPIED_BYTES_MAX;
use std::path::Path;
use std::time::Duration;
use weir_env::{Disk, Instant};

/// Largest number of segments: one being written, its prepared successor, two being folded.
pub(crate) const SEGMENTS_MAX: u64 = 4;
/// The journal takes at most this part of the disk, and the kept segments and the ballast these.
const JOURNAL_SHARE: u64 = 16;
const KEPT_SHARE: u64 = 8;
const BALLAST_SHARE: u64 = 24;
/// The longest record for other copies fits into any segment, as their disks may be of another size.
const SEGMENT_BYTES_MIN: u64 = COPIED_BYTES_MAX as u64 + (64 << 10);
/// The ballast as part of a journal of full size.
const BALLAST_OF_JOURNAL: u64 = 8;
/// How long the answer whether space is short stays valid.
pub(crate) const CHECK_EVERY: Duration = Duration::from_secs(1);
/// After this time without an attempt it is not known whether changes are still refused.
pub(crate) const REFUSED_LATELY: Duration = Duration::from_secs(5);
/// The pauses between folds that are tried although the space for them seems to be missing.
pub(crate) const PAUSE_MIN: Duration = Duration::from_secs(1);
pub(crate) const PAUSE_MAX: Duration = Duration::from_secs(60);

/// Sizes of a store's files.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Sizes {
    pub(crate) segment_bytes: u64,
    /// Folded segments up to this total size are kept for copies that are behind.
    pub(crate) keep_bytes: u64,
    pub(crate) ballast_bytes: u64,
    /// With less than this free, on the disk or in the tree's file, space is short.
    pub(crate) low_bytes: u64,
}

/// The part of the low limit that must be free on the disk itself, not in the tree's file: for journals.
pub(crate) const DISK_SHARE: u64 = 4;

/// The bytes of the tree's file without content. Pages are half full at worst, as large ones are rounded up.
pub(crate) fn tree_free(file_bytes: u64, content_bytes: u64) -> u64 {
    file_bytes.saturating_sub(2 * content_bytes)
}

impl Sizes {
    /// `total`: the size of the file system; 0: it is not known.
    pub(crate) fn on_disk(config: &EngineConfig, total: u64) -> Sizes {
        let total = if total == 0 { u64::MAX } else { total };
        let journal_bytes =
            config.journal_bytes_max.min((total / JOURNAL_SHARE).max(SEGMENTS_MAX * SEGMENT_BYTES_MIN));
        let ballast_bytes = (config.journal_bytes_max / BALLAST_OF_JOURNAL).min(total / BALLAST_SHARE);
        Sizes {
            segment_bytes: journal_bytes / SEGMENTS_MAX / 4096 * 4096,
            keep_bytes: config.journal_keep_bytes.min(total / KEPT_SHARE),
            ballast_bytes,
            low_bytes: 3 * ballast_bytes,
        }
    }

    pub(crate) fn of(config: &EngineConfig, disk: &dyn Disk, dir: &Path) -> Sizes {
        Sizes::on_disk(config, disk.space(dir).unwrap_or_default().total)
    }
}

/// The ballast, and the attempts on a full disk.
pub(crate) struct Means {
    pub(crate) sizes: Sizes,
    /// Bytes of the tree's file without content, which the next folds fill first.
    pub(crate) tree_free: u64,
    /// The ballast is on the disk.
    pub(crate) has_ballast: bool,
    pub(crate) checked: Option<(Instant, bool)>,
    pub(crate) pause: Duration,
    /// No fold is tried before, unless there is space for it.
    pub(crate) not_before: Instant,
    /// When changes were refused for want of space: the first and the last time in succession.
    pub(crate) refused: Option<(Instant, Instant)>,
}

impl Means {
    pub(crate) fn new(sizes: Sizes) -> Means {
        Means {
            sizes,
            tree_free: 0,
            has_ballast: false,
            checked: None,
            pause: PAUSE_MIN,
            not_before: Instant::default(),
            refused: None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_follow_the_disk() {
        let config = EngineConfig { journal_keep_bytes: 512 << 20, ..EngineConfig::default() };
        let at = |total: u64| Sizes::on_disk(&config, total);
        let (mib, gib) = (1u64 << 20, 1u64 << 30);
        let small = at(145 * mib);
        assert!((4 * mib..5 * mib).contains(&small.segment_bytes), "{small:?}");
        assert_eq!((small.keep_bytes, small.ballast_bytes), (145 * mib / 8, 145 * mib / 24));
        assert!(small.segment_bytes * 3 + small.ballast_bytes + small.low_bytes < 145 * mib / 3, "{small:?}");
        let large = at(100 * gib);
        assert_eq!((large.segment_bytes, large.keep_bytes), (32 * mib, 512 * mib));
        assert_eq!((large.ballast_bytes, large.low_bytes), (16 * mib, 48 * mib));
        assert_eq!(at(0), at(u64::MAX), "a size that is not known is no reason for a small journal");
        // A journal that is small by its settings stays as it is.
        let config = EngineConfig { journal_bytes_max: 1 << 20, ..config };
        assert_eq!(Sizes::on_disk(&config, 10 * mib).segment_bytes, 256 << 10);
    }
}
