//! Authentication and authorization of a cluster: the identity of nodes, protection of frames, permissions of
//! mounts, and the audit log.
//!
//! Certificates and join tokens, the handshake of a connection and the protection of its frames, the chain
//! of the audit log. Pure: bytes and times come in, bytes and decisions go out. Knows nothing of sockets,
//! files or paths.
#![forbid(unsafe_code)]

pub mod audit;
pub mod certificate;
pub mod frames;
pub mod handshake;
pub mod rules;
pub mod standin;
pub mod token;
