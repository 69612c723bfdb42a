//! Senders of requests, as far as methods distinguish them, and sets of these.
use std::fmt;

/// A kind of node, or of caller.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Sender {
    Coordinator,
    Meta,
    Storage,
    Mount,
    Mover,
    Console,
    Operator,
    Auditor,
    /// A user of a server's machine who does not run the cluster, by a Unix socket.
    User,
    /// A machine without a certificate, over a network that requires one: it may join the cluster.
    Stranger,
}

impl Sender {
    pub const ALL: [Sender; 10] = [
        Sender::Coordinator,
        Sender::Meta,
        Sender::Storage,
        Sender::Mount,
        Sender::Mover,
        Sender::Console,
        Sender::Operator,
        Sender::Auditor,
        Sender::User,
        Sender::Stranger,
    ];
}

impl fmt::Display for Sender {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Sender::Coordinator => "coordinator",
            Sender::Meta => "metadata server",
            Sender::Storage => "storage node",
            Sender::Mount => "mount",
            Sender::Mover => "mover",
            Sender::Console => "console",
            Sender::Operator => "operator",
            Sender::Auditor => "auditor",
            Sender::User => "user",
            Sender::Stranger => "stranger",
        })
    }
}

/// A set of senders.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Senders(u16);

impl Senders {
    pub const fn of(all: &[Sender]) -> Senders {
        let (mut bits, mut i) = (0, 0);
        while i < all.len() {
            bits |= 1 << all[i] as u8;
            i += 1;
        }
        Senders(bits)
    }
    pub fn has(self, sender: Sender) -> bool {
        self.0 & 1 << sender as u8 != 0
    }
    pub fn is_empty(self) -> bool {
        self.0 == 0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sender_is_in_the_sets_that_name_it() {
        for sender in Sender::ALL {
            assert!(Senders::of(&[sender]).has(sender) && !Senders::of(&[]).has(sender));
            for other in Sender::ALL.into_iter().filter(|other| *other != sender) {
                assert!(!Senders::of(&[sender]).has(other), "{sender} {other}");
            }
        }
    }
}
