//! The live tree of one mount: a room for each kind of requests, made from the ground up.
//!
//! Rooms get inodes and open files of the client; numbers of the kernel end at [`crate::filesystem`].
mod attributes;
mod data;
mod directories;
mod locks;
mod names;
mod opens;
mod privileges;
mod streams;
mod xattrs;

pub use data::{Allocation, CopyRange, Read, Write};
pub use directories::Next;
pub use locks::{Asked, owner};
pub use names::NewNode;
pub use xattrs::{NewValue, OwnActs, OwnAttributes, is_foreign};

use crate::entries::Entries;
use crate::kernel::Notices;
use crate::snapshots::Snapshots;
use attributes::Attributes;
use data::Data;
use directories::Directories;
use locks::Locks;
use names::Names;
use opens::Opens;
use std::sync::Arc;
use streams::Streams;
use weir_client::Client;
use weir_env::BufferPool;
use xattrs::Xattrs;

/// The ground that rooms are made from.
pub struct Base {
    pub client: Client,
    /// The kernel's caches.
    pub kernel: Arc<Notices>,
    pub buffers: BufferPool,
    pub own_attributes: OwnAttributes,
    pub own_acts: OwnActs,
}

pub struct Live {
    pub entries: Arc<Entries>,
    pub names: Names,
    pub directories: Directories,
    pub attributes: Attributes,
    pub xattrs: Xattrs,
    pub opens: Opens,
    pub data: Data,
    pub locks: Locks,
}

impl Live {
    pub fn new(base: &Base, snapshots: Arc<Snapshots>, by_ring: bool) -> Live {
        let client = || base.client.clone();
        let entries = Entries::new(client(), base.kernel.clone());
        let streams: Arc<Streams> = Arc::default();
        Live {
            names: Names::new(client(), entries.clone(), snapshots, streams.clone()),
            directories: Directories::new(client(), entries.clone(), streams),
            attributes: Attributes::new(client()),
            xattrs: Xattrs::new(client(), base.own_attributes.clone(), base.own_acts.clone()),
            opens: Opens::new(client(), entries.clone()),
            data: Data::new(client(), base.buffers.clone(), by_ring),
            locks: Locks::new(client()),
            entries,
        }
    }
}
