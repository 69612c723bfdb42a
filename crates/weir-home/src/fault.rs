//! Failures at home, by the mover's reaction. The decision per errno is a table.
use crate::{Fingerprint, HomePath};
use std::fmt;
use weir_proto::{Error, ErrorKind};

pub type Outcome<T> = Result<T, Fault>;

/// Why an operation at home failed. Each carries a message with the operation, the path and a hint.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Fault {
    /// Home has changed since our last write. Nothing was changed; `weir relation resolve` decides.
    Diverged(Box<Divergence>),
    /// Home does not answer, hangs or is not the expected one (not mounted): retry everything later.
    Unreachable(Error),
    /// No space or over quota at home: retry later, if space is needed.
    Full(Error),
    /// Home denies permission: an administrator has to act, then retry.
    Denied(Error),
    /// This item cannot be kept at home as it is: it is in conflict, continue with the others.
    Broken(Error),
}

/// The entry found in place of one of ours, or none.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Divergence {
    pub path: HomePath,
    /// Our last state; absent: there should be no entry.
    pub expected: Option<Fingerprint>,
    /// The present state; absent: there is no entry.
    pub found: Option<Fingerprint>,
    pub error: Error,
}

/// The kinds of [`Fault`], for decisions.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum FaultKind {
    Diverged,
    Unreachable,
    Full,
    Denied,
    Broken,
}

impl Fault {
    pub fn diverged(path: &HomePath, expected: Option<&Fingerprint>, found: Option<&Fingerprint>) -> Fault {
        let show = |fingerprint: Option<&Fingerprint>| {
            fingerprint.map_or("nothing".to_owned(), Fingerprint::to_string)
        };
        let error = Error::stale(format!(
            "{path} at home is not as it was left: expected {}, found {}; nothing was changed there: \
             weir relation resolve decides which is right",
            show(expected),
            show(found)
        ));
        Fault::Diverged(Box::new(Divergence {
            path: path.clone(),
            expected: expected.cloned(),
            found: found.cloned(),
            error,
        }))
    }
    pub fn new(kind: FaultKind, path: &HomePath, error: Error) -> Fault {
        match kind {
            FaultKind::Diverged => Fault::Diverged(Box::new(Divergence {
                path: path.clone(),
                expected: None,
                found: None,
                error,
            })),
            FaultKind::Unreachable => Fault::Unreachable(error),
            FaultKind::Full => Fault::Full(error),
            FaultKind::Denied => Fault::Denied(error),
            FaultKind::Broken => Fault::Broken(error),
        }
    }
    pub fn kind(&self) -> FaultKind {
        match self {
            Fault::Diverged(_) => FaultKind::Diverged,
            Fault::Unreachable(_) => FaultKind::Unreachable,
            Fault::Full(_) => FaultKind::Full,
            Fault::Denied(_) => FaultKind::Denied,
            Fault::Broken(_) => FaultKind::Broken,
        }
    }
    pub fn error(&self) -> &Error {
        match self {
            Fault::Diverged(divergence) => &divergence.error,
            Fault::Unreachable(e) | Fault::Full(e) | Fault::Denied(e) | Fault::Broken(e) => e,
        }
    }
}
impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.error())
    }
}
impl std::error::Error for Fault {}
impl From<Fault> for Error {
    fn from(fault: Fault) -> Error {
        fault.error().clone()
    }
}

/// The meaning of an errno (Linux numbers) from home for the mover, and a hint for the user.
pub fn map_errno(errno: i32) -> (FaultKind, ErrorKind, &'static str) {
    use FaultKind::*;
    match errno {
        // ENOSPC, EDQUOT
        28 | 122 => (Full, ErrorKind::NoSpace, "free space at home, or raise the quota there"),
        // EPERM, EACCES
        1 | 13 => (
            Denied,
            ErrorKind::Denied,
            "the mover must be root at home (over NFS: export with no_root_squash), or own the files there",
        ),
        // EROFS
        30 => (Denied, ErrorKind::Denied, "home is mounted read-only: remount it writable"),
        // ENOENT, EEXIST, ENOTDIR, EISDIR, ENOTEMPTY, ELOOP, ETXTBSY
        2 | 17 | 20 | 21 | 39 | 40 | 26 => (
            Diverged,
            ErrorKind::Stale,
            "the home was changed by others: weir relation resolve decides which side wins",
        ),
        // ENAMETOOLONG, EINVAL, EFBIG, EILSEQ, ENOSYS, EOPNOTSUPP, E2BIG, ERANGE, EMLINK, EOVERFLOW
        36 | 22 | 27 | 84 | 38 | 95 | 7 | 34 | 31 | 75 => {
            (Broken, ErrorKind::Unsupported, "the home cannot store this; rename the file or exclude it")
        }
        // EXDEV
        18 => (
            Broken,
            ErrorKind::Unsupported,
            "another file system is mounted inside of home: give that one a relation of its own",
        ),
        // Among them: EIO, ESTALE, ETIMEDOUT, EHOSTDOWN, ENOTCONN, ENODEV, EBUSY, EMFILE, ENOMEM. Unknown
        // ones are retried: a conflict needs a reason.
        _ => (
            Unreachable,
            ErrorKind::Unavailable,
            "it is tried again; check the server of home if it stays so",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use FaultKind::*;

    #[test]
    fn each_errno_has_its_kind_of_fault() {
        let table: &[(FaultKind, &[i32])] = &[
            (Full, &[28, 122]),
            (Denied, &[1, 13, 30]),
            (Diverged, &[2, 17, 20, 21, 26, 39, 40]),
            (Broken, &[7, 18, 22, 27, 31, 34, 36, 38, 75, 84, 95]),
            (
                Unreachable,
                &[
                    4, 5, 6, 11, 12, 16, 19, 23, 24, 37, 103, 104, 107, 108, 110, 111, 112, 113, 116, 121,
                    9999,
                ],
            ),
        ];
        for (kind, errnos) in table {
            for errno in *errnos {
                assert_eq!(map_errno(*errno).0, *kind, "errno {errno}");
            }
        }
    }

    #[test]
    fn a_divergence_says_where_and_what() {
        let path = HomePath::parse("a/b").unwrap();
        let fault = Fault::diverged(&path, None, None);
        let text = fault.to_string();
        assert!(text.contains("/a/b") && text.contains("nothing") && text.contains("resolve"), "{text}");
        assert_eq!(fault.kind(), Diverged);
    }
}
