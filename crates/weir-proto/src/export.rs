//! Messages about exports of a namespace (methods 44–47): its whole state in one file, for the day on which
//! its directory is lost.
//!
//! An export is one state: whoever fetches it gets what was there when it began, whatever changes meanwhile.
use crate::meta::Time;
use crate::{ClusterId, NamespaceId, NamespaceUuid, message};
use bytes::Bytes;

/// Exports that a schedule keeps at most.
pub const EXPORTS_KEPT_MAX: u32 = 1000;
/// Shortest time between two scheduled exports, in seconds.
pub const EXPORT_EVERY_S_MIN: u32 = 60;

message!(
    /// Of which namespace, and of when.
    ExportHead {
        cluster: ClusterId,
        namespace: NamespaceId,
        name: String,
        uuid: NamespaceUuid,
        /// How many changes the state holds.
        changes: u64,
        taken: Time,
        /// Of the program that made it.
        release: String,
    }
);
message!(
    /// Begins an export. The leader keeps the state for a few minutes after each part that is fetched.
    ExportBegin = 44 by [Console] -> ExportBegun {}
);
message!(ExportBegun { export: u64, head: ExportHead });
message!(
    /// The next entries in the order of their keys, behind `after`, as the payload (as in `StateFetch`).
    /// None: that was all.
    ExportFetch = 45 by [Console] -> () { export: u64, after: Option<Bytes> }
);
message!(
    /// The leader writes an export into a directory of its machine again and again. `every_s` 0: no more.
    ExportSet = 46 by [Console] -> ExportState { dir: String, every_s: u32, keep: u32 }
);
message!(
    GetExports = 47 by [Console, Operator, Auditor] -> ExportState {}
);
message!(
    /// The schedule of exports, and what came of it.
    #[derive(Default)]
    ExportState {
        dir: String,
        every_s: u32,
        keep: u32,
        last: Option<ExportMade>,
        /// Why the last one was not made; empty: it was.
        failure: String,
    }
);
message!(ExportMade { file: String, began: Time, entries: u64, bytes: u64 });
