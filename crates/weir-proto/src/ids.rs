//! Identities. Each is a type of its own, so that they cannot be confused.
use crate::Result;
use crate::wire::{Reader, Wire, Writer};
use std::fmt;

macro_rules! id {
    ($(#[$doc:meta])* $name:ident($inner:ty)) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
        pub struct $name(pub $inner);
        impl Wire for $name {
            fn encode(&self, w: &mut Writer) {
                self.0.encode(w);
            }
            fn decode(r: &mut Reader<'_>) -> Result<Self> {
                Ok($name(Wire::decode(r)?))
            }
        }
    };
}
macro_rules! show {
    ($name:ident, $($format:tt)*) => {
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, $($format)*, self.0)
            }
        }
        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{self}")
            }
        }
    };
}

id!(/** The cluster: two clusters never mix. */ ClusterId([u8; 16]));
id!(/** The directory of a target, written into it once: a wrong, swapped or empty directory has another. */ DiskUuid([u8; 16]));
id!(/** A machine's process set, numbered by the coordinator. */ NodeId(u32));
id!(/** A target, numbered by the coordinator, never reused. */ TargetId(u32));
id!(/** A placement group. */ PgId(u32));
id!(/** Grows by one with each change of the map entry it belongs to. */ Epoch(u64));
id!(/** A namespace, numbered by the coordinator, never reused: what is stored of an earlier one of the same name has another. */ NamespaceId(u32));
id!(/** The founding of a namespace, kept in its directory: another directory, or one founded anew, has another. */ NamespaceUuid([u8; 16]));
id!(/** One run of the process that serves a target: random, chosen at its start. */ RunId(u64));
id!(/** `(directory serial << 24) | n`: from the range of the directory where it was created, never reused. */ InodeId(u64));
id!(/** A named subtree of a namespace, numbered by its leader, never reused. */ VolumeId(u32));
id!(/** A client's registration at a metadata server. */ SessionId(u64));
id!(/** Overlay sequence number, contiguous per cell from 1; 0 is "none yet". */ Seq(u64));
id!(/** Version of a stripe's base: token epoch in the upper 32 bits, a counter in the lower; 0 is "never written" (zeros). */ Version(u64));

show!(NodeId, "n{}");
show!(TargetId, "t{}");
show!(PgId, "pg{}");
show!(Epoch, "e{}");
show!(RunId, "r{:x}");
show!(NamespaceId, "ns{:x}");
show!(InodeId, "i{:x}");
show!(SessionId, "s{:x}");
show!(VolumeId, "v{}");
show!(Seq, "q{}");

macro_rules! show_hex {
    ($name:ident) => {
        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                self.0.iter().try_for_each(|b| write!(f, "{b:02x}"))
            }
        }
        impl fmt::Debug for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                write!(f, "{self}")
            }
        }
        impl std::str::FromStr for $name {
            type Err = String;
            fn from_str(s: &str) -> std::result::Result<Self, String> {
                let bad = || format!("{s:?} is not 32 hexadecimal digits");
                if s.len() != 32 || !s.is_ascii() {
                    return Err(bad());
                }
                let mut id = [0u8; 16];
                for (i, byte) in id.iter_mut().enumerate() {
                    *byte = u8::from_str_radix(&s[2 * i..2 * i + 2], 16).map_err(|_| bad())?;
                }
                Ok($name(id))
            }
        }
    };
}
show_hex!(ClusterId);
show_hex!(DiskUuid);
show_hex!(NamespaceUuid);

impl InodeId {
    /// The root directory of every namespace. Directory serial 1, n 1.
    pub const ROOT: InodeId = InodeId((1 << 24) | 1);
}

impl VolumeId {
    /// The volume of everything that is in no other volume of the namespace.
    pub const ROOT: VolumeId = VolumeId(1);
}

impl Version {
    pub fn new(token_epoch: u32, counter: u32) -> Version {
        Version((u64::from(token_epoch) << 32) | u64::from(counter))
    }
    pub fn token_epoch(self) -> u32 {
        (self.0 >> 32) as u32
    }
    pub fn counter(self) -> u32 {
        self.0 as u32
    }
}
impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.token_epoch(), self.counter())
    }
}
impl fmt::Debug for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

/// A file's data, cluster-wide.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct FileId {
    pub namespace: NamespaceId,
    pub inode: InodeId,
}
impl fmt::Display for FileId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.inode)
    }
}
impl fmt::Debug for FileId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

/// One fragment place of one stripe: index 0..k are data cells, k..k+m parity.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct CellId {
    pub file: FileId,
    pub stripe: u64,
    pub index: u8,
}
impl fmt::Display for CellId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}.{}", self.file, self.stripe, self.index)
    }
}
impl fmt::Debug for CellId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}
crate::wire_struct!(FileId { namespace: NamespaceId, inode: InodeId });
crate::wire_struct!(CellId { file: FileId, stripe: u64, index: u8 });
