//! The homes of a volume's data: directories, S3 and other Weirs behind one trait, and the mover that copies
//! there.
//!
//! A [`Home`] changes no entry that was changed there since our last write, ends each call by a deadline, and
//! allows retries. The calls and their order are decided elsewhere.
//!
//! Knows nothing of cells and stripes, nor of how a namespace is stored.
#![forbid(unsafe_code)]

pub mod backup;
pub mod decide;
mod fault;
mod file;
mod fingerprint;
mod gate;
mod home;
mod idmap;
mod lane;
pub mod mover;
mod pace;
mod path;
mod recall;
mod s3;
pub mod tuner;
mod url;
mod verify;
mod weir;

pub use fault::{Divergence, Fault, FaultKind, Outcome, map_errno};
pub use file::{FileHome, FileHomeConfig};
pub use fingerprint::{Attrs, Expect, FINGERPRINT_ID_BYTES_MAX, Fingerprint, Make, Xattr};
pub use home::{Found, Home, HomeLister, HomeReader, HomeSpace, HomeWriter, ListEntry, Listing, Traits};
pub use idmap::{IdMap, NOBODY};
pub use lane::{HomeLane, LaneLimits, LongCall, long_calls};
pub use path::{HomePath, RESERVED};
pub use s3::{KeySource, Lender, S3Home, S3HomeConfig, Token, map_status};
pub use url::{Credentials, HomeUrl, parse_credentials};
pub use verify::{Verified, Verify, Wrong};
pub use weir::{WeirHome, WeirHomeConfig, map_kind};
