//! Where a volume's data goes home to: directories, S3 and other Weirs behind one trait, and what moves it there.
//!
//! A [`Home`] changes nothing that is not as we left it, ends each call by a deadline, and can be told the same thing
//! twice. What it is told, by whom and in which order is decided elsewhere.
//!
//! Knows nothing of cells and stripes, nor of how a namespace is stored.
#![forbid(unsafe_code)]

pub mod backup;
pub mod decide;
mod fault;
mod file;
mod gate;
mod home;
mod idmap;
mod lane;
pub mod mover;
pub mod pace;
mod path;
mod recall;
mod s3;
mod stamp;
mod url;
mod verify;
mod weir;

pub use fault::{Divergence, Fault, FaultKind, Outcome, judge_errno};
pub use file::{FileHome, FileHomeConfig};
pub use home::{Found, Home, HomeLister, HomeReader, HomeSpace, HomeWriter, ListEntry, Listing, Traits};
pub use idmap::{IdMap, IdRange};
pub use lane::{HomeLane, LaneLimits};
pub use path::{HomePath, RESERVED};
pub use s3::{S3Home, S3HomeConfig, judge_status};
pub use stamp::{Attrs, Expect, Make, STAMP_ID_BYTES_MAX, Stamp, Xattr};
pub use url::{Credentials, HomeUrl, parse_credentials};
pub use verify::{Verified, Verify, Wrong};
pub use weir::{WeirHome, WeirHomeConfig, judge_kind};
