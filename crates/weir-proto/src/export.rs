//! Messages about exports of a namespace (methods 44–47): its whole state in one file, for the case that its
//! directory is lost.
//!
//! An export is one consistent state: the state when it began, regardless of later changes.
use crate::meta::Time;
use crate::{ClusterId, NamespaceId, NamespaceUuid, message};
use bytes::Bytes;

/// Exports that a schedule keeps at most.
pub const EXPORTS_KEPT_MAX: u32 = 1000;
/// Shortest time between two scheduled exports, in seconds.
pub const EXPORT_EVERY_S_MIN: u32 = 60;

message!(
    /// Identifies the namespace and the time.
    ExportHead {
        cluster: ClusterId,
        namespace: NamespaceId,
        name: String,
        uuid: NamespaceUuid,
        /// The number of changes in the state.
        changes: u64,
        taken: Time,
        /// Release of the program that made it.
        release: String,
    }
);
message!(
    /// Begins an export. The leader keeps the state for a few minutes after each part that is fetched.
    ExportBegin = 44 by [Console] -> ExportBegun {}
);
message!(ExportBegun { export: u64, head: ExportHead });
message!(
    /// The next entries in the order of their keys, after `after`, as the payload (as in `StateFetch`). None:
    /// the export is complete.
    ExportFetch = 45 by [Console] -> () { export: u64, after: Option<Bytes> }
);
message!(
    /// The leader writes an export into a directory of its machine at this interval. `every_s` 0: stop.
    ExportSet = 46 by [Console] -> ExportState { dir: String, every_s: u32, keep: u32 }
);
message!(
    GetExports = 47 by [Console, Operator, Auditor] -> ExportState {}
);
message!(
    /// The schedule of exports, and the last result.
    #[derive(Default)]
    ExportState {
        dir: String,
        every_s: u32,
        keep: u32,
        last: Option<ExportMade>,
        /// Error of the last export; empty: it succeeded.
        failure: String,
    }
);
message!(ExportMade { file: String, began: Time, entries: u64, bytes: u64 });
