//! The types of this crate's interface: configuration, open modes, results of opens and look-ups.
//!
//! Plain data and one outward seam ([`KernelCache`]); nothing here decides anything.
use std::sync::Arc;
use std::time::Duration;
use weir_env::Addr;
use weir_proto::InodeId;
use weir_proto::map::Role;
use weir_proto::meta::{Attr, Time};
use weir_rpc::Trust;

/// The settings of one client process.
#[derive(Clone, Debug)]
pub struct ClientConfig {
    pub coordinators: Vec<Addr>,
    pub namespace: String,
    /// A mount, a mover, or a command of an administrator.
    pub role: Role,
    /// Shown to administrators: unique among the clients of a host, for instance the mount point.
    pub name: String,
    /// Host identity: with targets of the same host, Unix sockets are used.
    pub host: String,
    /// Lets a metadata leader on the same machine detect that this process has ended; empty: its leases
    /// expire after their term.
    pub process: String,
    /// Budget of dirty data and read cache together, in bytes.
    pub memory_bytes: u64,
    /// Every operation ends after this time, with an error that names the cause. Until then it waits for
    /// servers that do not answer, and keeps accepted bytes for them.
    pub patience: Duration,
    /// Evicted bytes are recalled within this time, or reading and writing them fails: home may be far, or on
    /// tape.
    pub recall_patience: Duration,
    /// After this number of creates within a second in a directory that only this client uses, files are
    /// created there locally and reported a moment later. `None`: never.
    pub local_creates_after: Option<u32>,
    /// Changes of names may be answered before they are durable: programs that need that call `fsync`.
    pub early_answers: bool,
    /// The certificate on networks; `None`: none.
    pub trust: Option<Arc<Trust>>,
}

impl ClientConfig {
    pub const MEMORY_BYTES: u64 = 512 << 20;
    /// The patience of a command: an administrator waits for it.
    pub const PATIENCE: Duration = Duration::from_secs(30);
    /// The patience of a mount, whose programs run unattended: a server that is restarted or moved has
    /// returned by then.
    pub const MOUNT_PATIENCE: Duration = Duration::from_secs(600);
    /// Longer than any process runs.
    pub const FOREVER: Duration = Duration::from_secs(10 * 365 * 24 * 3600);
    /// The default of a mount.
    pub const LOCAL_CREATES_AFTER: Option<u32> = Some(8);
    pub const RECALL_PATIENCE: Duration = Duration::from_secs(300);

    /// The client, for administrators.
    pub(crate) fn title(&self) -> String {
        format!("{} on {}", self.name, self.host)
    }
    /// The root namespace with default limits.
    pub fn new(coordinators: Vec<Addr>, name: &str, host: &str) -> ClientConfig {
        ClientConfig {
            coordinators,
            namespace: "root".into(),
            role: Role::Mount,
            name: name.into(),
            host: host.into(),
            process: String::new(),
            memory_bytes: Self::MEMORY_BYTES,
            patience: Self::PATIENCE,
            recall_patience: Self::RECALL_PATIENCE,
            local_creates_after: None,
            early_answers: false,
            trust: None,
        }
    }
}

/// The part of an inode's cache that a kernel must drop.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Forget {
    Attributes,
    /// Attributes and data (pages, directory contents).
    All,
    /// Attributes, and the pages of a range: offset, bytes.
    Part(u64, u64),
}

/// A cache above this client that is valid only under its leases.
pub trait KernelCache: Send + Sync + 'static {
    /// May block: it is called only where that is allowed, before the answer to a revoke.
    fn invalidate_inode(&self, ino: InodeId, what: Forget);
    /// Whether names may be lent to it ([`crate::Client::lend_name`]).
    fn keeps_names(&self) -> bool {
        false
    }
}

/// The cache of libraries, which have none above the client.
#[derive(Clone, Copy, Debug, Default)]
pub struct NoKernel;
impl KernelCache for NoKernel {
    fn invalidate_inode(&self, _: InodeId, _: Forget) {}
}

/// How a file is opened.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct OpenMode {
    pub read: bool,
    pub write: bool,
    /// Every write goes to the end of the file.
    pub append: bool,
    /// Truncated at open.
    pub truncate: bool,
    /// Opened to be executed: permission to execute the file suffices, even without permission to read it.
    pub execute: bool,
}
impl OpenMode {
    pub const READ: OpenMode =
        OpenMode { read: true, write: false, append: false, truncate: false, execute: false };
    pub const WRITE: OpenMode = OpenMode { read: false, write: true, ..OpenMode::READ };
    pub const BOTH: OpenMode = OpenMode { write: true, ..OpenMode::READ };
}

/// Permissions of a new file or directory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct NewMode {
    pub bits: u32,
    /// Removed from the mode unless the directory has a default access control list.
    pub umask: u32,
}
impl From<u32> for NewMode {
    fn from(bits: u32) -> NewMode {
        NewMode { bits, umask: 0 }
    }
}

/// An open file of this client; ends with [`crate::Client::release`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Handle(pub u64);

/// Attributes, and whether a lease lets the caller keep them until `KernelCache` invalidates them.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Stat {
    pub attr: Attr,
    pub leased: bool,
}

/// The result of an open.
#[derive(Clone, Debug)]
pub struct Opened {
    pub handle: Handle,
    pub stat: Stat,
    /// True: pages may be kept (a lease protects them). False: every read and write must come here.
    pub kernel_cache: bool,
    /// Pages in the kernel may be of an earlier lease: they must be dropped before the first read.
    pub old_pages: bool,
}

/// A time to set.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SetTime {
    Now,
    At(Time),
}

/// Attributes to change; absent fields keep their value.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct SetAttrs {
    pub mode: Option<u32>,
    pub uid: Option<u32>,
    pub gid: Option<u32>,
    pub size: Option<u64>,
    pub atime: Option<SetTime>,
    pub mtime: Option<SetTime>,
}

/// Space and files, as `statfs` shows them. Bytes are payload, without redundancy.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Space {
    pub capacity_bytes: u64,
    pub used_bytes: u64,
    pub free_bytes: u64,
    pub files: u64,
    pub directories: u64,
    /// Most files and directories; `None`: no limit.
    pub inodes_max: Option<u64>,
}

/// The kind of a `fallocate`.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Allocate {
    /// The range's space is charged from now on, so that no limit refuses a later write there; the file grows
    /// if it is shorter.
    Extend,
    /// The range's space is charged; the size stays, and later writes past the end need no more.
    Reserve,
    /// The range reads as zeros and takes no space; the size stays.
    PunchHole,
    /// The range reads as zeros and is charged; the size stays.
    ZeroRange,
    /// The range reads as zeros and is charged; the file grows if it is shorter.
    ExtendByZeros,
}

/// Changes or locks that were lost because this client could not keep its lease or lock.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Loss {
    pub ino: InodeId,
    pub at: Time,
    pub what: String,
}

/// Counters since the start of the client.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct ClientStatus {
    /// Payload accepted from and returned to callers, in bytes.
    pub written_bytes: u64,
    pub read_bytes: u64,
    /// Payload of data messages sent to and received from targets, in bytes.
    pub wire_sent_bytes: u64,
    pub wire_received_bytes: u64,
    /// Reads that had to be decoded from parity.
    pub degraded_reads: u64,
    /// Those of them that began because an answer was late; it may still have arrived first.
    pub hedged_reads: u64,
    /// Stripes written with fewer than k + m fragments.
    pub degraded_writes: u64,
    /// Blocks that failed their checksum.
    pub crc_failures: u64,
    /// The used part of the memory budget: dirty and cached data, and what inodes and names need, in bytes.
    pub memory_used_bytes: u64,
    /// The most that data has used, in bytes.
    pub memory_peak_bytes: u64,
    /// Messages to the metadata leader.
    pub asked: u64,
    pub revokes: u64,
    /// Evictions of a part of a file that this client was writing.
    pub own_evictions: u64,
    /// Inodes whose state is kept.
    pub inodes: u64,
}
