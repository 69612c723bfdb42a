//! Requests of the kernel, counted by the names that the kernel's own tools show.
use std::collections::BTreeMap;

/// `enum fuse_opcode`. Requests without an answer (`FORGET`) are not among them.
const NAMES: [(u32, &str); 41] = [
    (1, "LOOKUP"),
    (3, "GETATTR"),
    (4, "SETATTR"),
    (5, "READLINK"),
    (6, "SYMLINK"),
    (8, "MKNOD"),
    (9, "MKDIR"),
    (10, "UNLINK"),
    (11, "RMDIR"),
    (12, "RENAME"),
    (13, "LINK"),
    (14, "OPEN"),
    (15, "READ"),
    (16, "WRITE"),
    (17, "STATFS"),
    (18, "RELEASE"),
    (20, "FSYNC"),
    (21, "SETXATTR"),
    (22, "GETXATTR"),
    (23, "LISTXATTR"),
    (24, "REMOVEXATTR"),
    (25, "FLUSH"),
    (27, "OPENDIR"),
    (28, "READDIR"),
    (29, "RELEASEDIR"),
    (30, "FSYNCDIR"),
    (31, "GETLK"),
    (32, "SETLK"),
    (33, "SETLKW"),
    (34, "ACCESS"),
    (35, "CREATE"),
    (36, "INTERRUPT"),
    (37, "BMAP"),
    (39, "IOCTL"),
    (40, "POLL"),
    (43, "FALLOCATE"),
    (44, "READDIRPLUS"),
    (45, "RENAME2"),
    (46, "LSEEK"),
    (51, "TMPFILE"),
    (52, "STATX"),
];

/// The name of a kind.
pub fn name(opcode: u32) -> Option<&'static str> {
    NAMES.binary_search_by_key(&opcode, |(number, _)| *number).ok().map(|at| NAMES[at].1)
}

/// Requests that came since this process began, by kind.
pub fn request_counts() -> BTreeMap<&'static str, u64> {
    let counts: BTreeMap<u32, u64> = fuser::request_counts().into_iter().collect();
    NAMES.iter().filter_map(|(number, name)| Some((*name, *counts.get(number)?))).collect()
}
