//! Inputs for every decoder of bytes that come from the wire, from a disk or from a user: for tests and
//! fuzzers, never shipped.
//!
//! A target takes any bytes and must return: no panic, no memory beyond the input's; accepted bytes mean the
//! same when they are encoded again. Where a checksum guards a decoder, the target tries the bytes as they
//! are, and with a valid checksum. Knows nothing of a running cluster.
mod dice;
mod handshake;
mod index;
mod journal;
mod list;
mod namespace;
mod small_files;
mod text;
mod wire;

pub use dice::Dice;

/// A decoder, or a few of one kind.
pub struct Target {
    pub name: &'static str,
    pub run: fn(&[u8]),
    /// Valid inputs to begin with.
    pub seeds: fn() -> Vec<Vec<u8>>,
}

pub const TARGETS: &[Target] = &[
    Target { name: "message", run: wire::message, seeds: wire::message_seeds },
    Target { name: "frame", run: wire::frame, seeds: wire::frame_seeds },
    Target { name: "handshake", run: handshake::handshake, seeds: handshake::seeds },
    Target { name: "index", run: index::value, seeds: index::value_seeds },
    Target { name: "index_key", run: index::key, seeds: index::key_seeds },
    Target { name: "journal", run: journal::journal, seeds: journal::seeds },
    Target { name: "namespace", run: namespace::namespace, seeds: namespace::seeds },
    Target { name: "coordinator", run: small_files::coordinator, seeds: small_files::coordinator_seeds },
    Target { name: "identity", run: small_files::identity, seeds: small_files::identity_seeds },
    Target { name: "config", run: text::configuration, seeds: text::configuration_seeds },
    Target { name: "text", run: text::words, seeds: text::word_seeds },
];

/// Feeds one input to the target of that name.
pub fn run(name: &str, bytes: &[u8]) {
    let target = TARGETS.iter().find(|target| target.name == name);
    (target.expect("each program is one of the targets").run)(bytes);
}

/// A check of one type.
type Check = fn(&[u8]);
