//! Answers of a leader whose disk is full, or nearly so.
//!
//! A change that adds to the namespace is refused; any other one waits, at its client: nothing that programs
//! have written is lost for want of space here.
use crate::ops::Operation;
use weir_proto::{Error, ErrorKind};

/// How long a client waits before it repeats a change for which the leader's disk has no space.
const FULL_WAIT_MS: u32 = 500;

pub(super) fn space_is_short() -> Error {
    Error::no_space(
        "the disk of the namespace's directory is nearly full: the rest is kept for removals and for files \
         that are written",
    )
    .hint("remove files, or free space on that disk")
}

/// The store could not take a change. One that adds nothing is repeated by its client until there is space:
/// data that programs have written waits, and is not lost.
pub(super) fn without_space<R: Operation>(e: Error) -> Error {
    if R::GROWS {
        return e;
    }
    until_space(R::NAME, e)
}

/// The caller repeats its request until there is space.
pub(super) fn until_space(what: &str, e: Error) -> Error {
    if e.kind != ErrorKind::NoSpace {
        return e;
    }
    e.of_kind(ErrorKind::Busy { wait_ms: FULL_WAIT_MS })
        .doing(format_args!("the disk of the namespace's directory is full, and {what} waits"))
}
