//! Answers with inodes and names: the parts that the kernel may keep, and for how long.
//!
//! Invariant: the kernel's reference to an inode is noted before the attributes of the answer are read. An
//! earlier revoke sent no notice to a kernel that did not know the inode.
use crate::kernel::Notices;
use crate::replies::refused;
use crate::translate as tr;
use crate::tree::{Name, from_kernel_ino, to_kernel_ino};
use fuser::{Errno, Generation, INodeNo, ReplyDirectoryPlus, ReplyEntry};
use std::os::unix::ffi::OsStrExt;
use std::sync::Arc;
use std::time::Duration;
use weir_client::{Client, NAME_LOAN, Stat};
use weir_proto::meta::ListEntry;
use weir_proto::{InodeId, Result};

pub const SNAPSHOTS_NAME: &[u8] = b".snapshots";
/// The kernel asks for the name again each time.
pub const NAME_TTL: Duration = Duration::ZERO;
pub const GENERATION: Generation = Generation(0); // inode numbers are never reused

pub struct Entries {
    client: Client,
    kernel: Arc<Notices>,
}

impl Entries {
    pub fn new(client: Client, kernel: Arc<Notices>) -> Arc<Entries> {
        Arc::new(Entries { client, kernel })
    }

    pub fn named(self: &Arc<Self>, name: Name) -> Named {
        Named { entries: self.clone(), name }
    }

    /// The kernel is about to get an inode: its newest attributes.
    pub fn reported(&self, stat: Stat) -> Stat {
        self.kernel.note_answer(to_kernel_ino(stat.attr.ino));
        self.client.try_getattr(stat.attr.ino).unwrap_or(Stat { leased: false, ..stat })
    }

    /// The kernel returned references to an inode of the live tree.
    pub fn forget(&self, ino: INodeNo, answers: u64) {
        if self.kernel.forgotten(ino, answers) {
            self.client.forget(from_kernel_ino(ino));
        }
    }

    /// How long the kernel may keep a name, or its absence.
    fn name_ttl(&self, dir: InodeId, name: &[u8], leads_to: Option<InodeId>) -> Duration {
        // The entry that a volume shows in its topmost directory depends on the volume.
        let lent = name != SNAPSHOTS_NAME && self.client.lend_name(dir, name, leads_to);
        if lent { NAME_LOAN } else { NAME_TTL }
    }

    /// Adds an entry of a listing by its name alone. True: it did not fit.
    pub fn add_bare(&self, reply: &mut ReplyDirectoryPlus, cookie: u64, entry: &ListEntry) -> bool {
        let (ino, kind) = (to_kernel_ino(entry.ino), tr::file_type(entry.kind));
        reply.add_name(ino, cookie, std::ffi::OsStr::from_bytes(&entry.name), kind)
    }

    /// Adds an entry of a listing with all that the kernel may cache of it. True: it did not fit.
    pub fn add(&self, dir: InodeId, reply: &mut ReplyDirectoryPlus, cookie: u64, entry: &ListEntry) -> bool {
        let (ino, kind) = (to_kernel_ino(entry.ino), tr::file_type(entry.kind));
        let name = std::ffi::OsStr::from_bytes(&entry.name);
        // A repeated answer about a cached inode would make the kernel ask for the access control list again.
        if self.kernel.is_fresh(ino, NAME_LOAN / 2) {
            return reply.add_name(ino, cookie, name, kind);
        }
        self.kernel.note_answer(ino);
        let lent = || {
            let stat = self.client.try_getattr(entry.ino)?;
            (self.name_ttl(dir, &entry.name, Some(entry.ino)) == NAME_LOAN).then_some(stat)
        };
        let (full, taken) = match lent() {
            Some(stat) => {
                let (attr_ttl, attr) = (tr::attr_ttl(&stat), tr::attr(&stat.attr));
                let full = reply.add_with_ttls(ino, cookie, name, &attr_ttl, &NAME_LOAN, &attr, GENERATION);
                (full, !full)
            }
            None => (reply.add_name(ino, cookie, name, kind), false),
        };
        if !taken {
            self.kernel.forgotten(ino, 1);
        }
        full
    }
}

/// A name in an answer to the kernel.
pub struct Named {
    entries: Arc<Entries>,
    name: Name,
}

impl Named {
    pub fn ttl(&self, leads_to: Option<InodeId>) -> Duration {
        self.entries.name_ttl(self.name.dir, &self.name.name, leads_to)
    }

    pub fn reply_entry(&self, reply: ReplyEntry, found: Result<Stat>) {
        match found {
            Ok(stat) => {
                let stat = self.entries.reported(stat);
                let ttl = self.ttl(Some(stat.attr.ino));
                reply.entry_with_ttls(&tr::attr_ttl(&stat), &ttl, &tr::attr(&stat.attr), GENERATION)
            }
            Err(e) => reply.error(refused(&e)),
        }
    }
    /// `None`: the name is absent.
    pub fn reply_lookup(&self, reply: ReplyEntry, found: Result<Option<Stat>>) {
        match found {
            Ok(Some(stat)) => self.reply_entry(reply, Ok(stat)),
            Ok(None) => match self.ttl(None) {
                Duration::ZERO => reply.error(Errno::ENOENT),
                ttl => reply.absent(&ttl),
            },
            Err(e) => reply.error(refused(&e)),
        }
    }
}
