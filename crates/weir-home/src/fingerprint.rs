//! Fingerprints, which identify an entry at home: kind, identity, size, time. And its attributes.
//!
//! Plain data; the leader stores fingerprints, so they have a wire layout. The only decision made here is the
//! comparison.
use bytes::Bytes;
use std::fmt;
use weir_proto::{
    Error, Reader, Result, Wire, Writer, message,
    meta::{FileKind, Time},
    wire_struct,
};

/// Longest identity and version that a home gives, in bytes: S3's state of an unfinished upload, far below in
/// practice.
pub const FINGERPRINT_ID_BYTES_MAX: usize = 1024;

/// Our last state at home. Equal fingerprints: the same entry, not written since.
#[derive(Clone, PartialEq, Eq)]
pub struct Fingerprint {
    pub kind: FileKind,
    /// Its identity in that home's own terms (inode number and birth time, ETag): only for comparison.
    pub id: Bytes,
    /// Its version, if home has more than size and time (an ETag, a number); otherwise empty.
    pub version: Bytes,
    /// Size of a file or link; 0 of everything else.
    pub size: u64,
    /// Modification time of a file or link; 0 of everything else: a directory's time changes with its
    /// entries.
    pub mtime: Time,
}

impl Wire for Fingerprint {
    fn encode(&self, w: &mut Writer) {
        self.kind.encode(w);
        self.id.encode(w);
        self.version.encode(w);
        self.size.encode(w);
        self.mtime.encode(w);
    }
    fn decode(r: &mut Reader<'_>) -> Result<Fingerprint> {
        let fingerprint = Fingerprint {
            kind: Wire::decode(r)?,
            id: Wire::decode(r)?,
            version: Wire::decode(r)?,
            size: Wire::decode(r)?,
            mtime: Wire::decode(r)?,
        };
        match fingerprint.id.len() + fingerprint.version.len() {
            0..=FINGERPRINT_ID_BYTES_MAX => Ok(fingerprint),
            n => Err(Error::invalid(format!(
                "malformed message: a fingerprint names its thing with {n} bytes"
            ))),
        }
    }
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let what = match self.kind {
            FileKind::Regular => "a file",
            FileKind::Directory => "a directory",
            FileKind::Symlink => "a symbolic link",
            FileKind::Fifo => "a pipe",
            FileKind::Socket => "a socket",
            FileKind::CharDevice | FileKind::BlockDevice => "a device",
        };
        write!(f, "{what}")?;
        if self.kind == FileKind::Regular {
            let (s, ns) =
                (self.mtime.nanos.div_euclid(1_000_000_000), self.mtime.nanos.rem_euclid(1_000_000_000));
            write!(f, " of {} bytes written at {s}.{ns:09}", self.size)?;
        }
        f.write_str(" (")?;
        self.id.iter().take(24).try_for_each(|b| write!(f, "{b:02x}"))?;
        if !self.version.is_empty() {
            write!(f, ", {}", self.version.escape_ascii())?;
        }
        f.write_str(")")
    }
}
impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

/// The state that a call requires.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Expect {
    /// This entry, not written since.
    Unchanged(Fingerprint),
    /// This entry; we may have written to it since the fingerprint was taken.
    Ours(Fingerprint),
}

impl Expect {
    pub fn fingerprint(&self) -> &Fingerprint {
        match self {
            Expect::Unchanged(fingerprint) | Expect::Ours(fingerprint) => fingerprint,
        }
    }
    /// Whether the found state is the expected one.
    pub fn admits(&self, found: &Fingerprint) -> bool {
        let expected = self.fingerprint();
        let same = expected.kind == found.kind && expected.id == found.id;
        match self {
            Expect::Unchanged(_) => same && expected == found,
            Expect::Ours(_) => same,
        }
    }
}
wire_struct!(ExpectOnWire { unchanged: bool, fingerprint: Fingerprint });
struct ExpectOnWire {
    unchanged: bool,
    fingerprint: Fingerprint,
}
impl Wire for Expect {
    fn encode(&self, w: &mut Writer) {
        matches!(self, Expect::Unchanged(_)).encode(w);
        self.fingerprint().encode(w);
    }
    fn decode(r: &mut Reader<'_>) -> Result<Expect> {
        let ExpectOnWire { unchanged, fingerprint } = Wire::decode(r)?;
        Ok(if unchanged { Expect::Unchanged(fingerprint) } else { Expect::Ours(fingerprint) })
    }
}

message!(
    /// An extended attribute.
    Xattr { name: Bytes, value: Bytes }
);
message!(
    /// Attributes as home should show them. A link has owners and times only.
    Attrs {
        /// Permission bits with set-uid, set-gid and sticky (07777).
        mode: u32,
        uid: u32,
        gid: u32,
        atime: Time,
        mtime: Time,
        /// Sorted by name, with the access control lists as `system.posix_acl_access` and `…_default`.
        xattrs: Vec<Xattr>,
    }
);

/// The entry to make.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Make {
    Directory,
    /// An empty one.
    File,
    Symlink {
        target: Bytes,
    },
    /// A pipe, socket or device; the number is `stat`'s.
    Special {
        kind: FileKind,
        rdev: u32,
    },
}

impl Make {
    pub fn kind(&self) -> FileKind {
        match self {
            Make::Directory => FileKind::Directory,
            Make::File => FileKind::Regular,
            Make::Symlink { .. } => FileKind::Symlink,
            Make::Special { kind, .. } => *kind,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fingerprint() -> Fingerprint {
        Fingerprint {
            kind: FileKind::Regular,
            id: Bytes::from_static(b"7"),
            version: Bytes::new(),
            size: 10,
            mtime: Time { nanos: 5 },
        }
    }

    #[test]
    fn expectations_by_table() {
        let found = fingerprint();
        for (changed, unchanged, ours) in [
            (fingerprint(), true, true),
            (Fingerprint { size: 11, ..fingerprint() }, false, true),
            (Fingerprint { mtime: Time { nanos: 6 }, ..fingerprint() }, false, true),
            (Fingerprint { version: Bytes::from_static(b"2"), ..fingerprint() }, false, true),
            (Fingerprint { id: Bytes::from_static(b"8"), ..fingerprint() }, false, false),
            (Fingerprint { kind: FileKind::Directory, ..fingerprint() }, false, false),
        ] {
            assert_eq!(Expect::Unchanged(changed.clone()).admits(&found), unchanged, "{changed}");
            assert_eq!(Expect::Ours(changed.clone()).admits(&found), ours, "{changed}");
        }
    }

    #[test]
    fn fingerprints_survive_the_wire_and_long_ones_are_refused() {
        for expect in [Expect::Ours(fingerprint()), Expect::Unchanged(fingerprint())] {
            assert_eq!(Expect::from_bytes(&expect.to_bytes()).unwrap(), expect);
        }
        let long = Fingerprint { id: Bytes::from(vec![0; FINGERPRINT_ID_BYTES_MAX + 1]), ..fingerprint() };
        assert!(Fingerprint::from_bytes(&long.to_bytes()).is_err());
    }
}
