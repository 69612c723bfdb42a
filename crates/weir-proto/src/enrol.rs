//! Enrolment and removal of machines as nodes of a cluster: join tokens and certificates.
use crate::map::Role;
use crate::network::Network;
use crate::{ClusterId, message};

/// Tokens that a coordinator stores; more are refused.
pub const TOKENS_MAX: usize = 1000;

message!(
    /// Makes a join token. Its secret is only in the reply.
    TokenCreate = 50 by [Console, Operator] -> TokenMade {
        /// Roles that machines with this token may have.
        roles: Vec<Role>,
        /// The number of machines that may use it.
        uses: u32,
        /// Its validity in seconds from now.
        ttl_s: u64,
        /// A glob that their names must match.
        name: String,
        /// Networks that they may connect from; empty: any.
        from: Vec<Network>,
    }
);
message!(TokenMade {
    secret: [u8; 16],
    /// Pin of the cluster's authority.
    pin: [u8; 16],
    /// The coordinator's addresses as seen from the caller's network: `tcp:HOST:PORT`.
    addrs: Vec<String>,
    /// Seconds since 1970.
    until: u64,
});
message!(
    /// A machine becomes a node, or a node gets new credentials under the same name after its removal.
    /// `Denied`: the token is unknown, used up, expired, or not for this name or network. `Exists`: a node of
    /// this name has a certificate.
    Enrol = 51 by [Stranger] -> Enrolled {
        secret: [u8; 16],
        name: String,
        /// An uncompressed point of P-256.
        public_key: Vec<u8>,
    }
);
message!(
    /// X.509 certificates (DER). Nodes trust only the given authorities.
    Enrolled {
        cluster: ClusterId,
        name: String,
        roles: Vec<Role>,
        certificate: Vec<u8>,
        authorities: Vec<Vec<u8>>,
        /// As `TokenMade::addrs`.
        coordinators: Vec<String>,
        /// Round of the authorities: see `Enrolment::round`.
        round: u32,
    }
);
message!(
    /// Renews the sender's certificate, for a new key.
    RenewCertificate = 52 by [Meta, Storage, Mount, Mover, Console, Operator, Auditor] -> Enrolled { public_key: Vec<u8> }
);
message!(
    /// A certificate without a token, for an administrator on the coordinator's machine: for a new node, or
    /// as replacement for a node with the same roles. `Exists`: a node of this name has other roles.
    IssueCertificate = 53 by [Console] -> Enrolled { name: String, roles: Vec<Role>, public_key: Vec<u8> }
);
message!(
    /// The certificate holders and the tokens.
    GetEnrolment = 54 by [Console, Operator, Auditor] -> Enrolment {}
);
message!(Enrolment {
    holders: Vec<Holder>,
    tokens: Vec<TokenShown>,
    /// The pins of the trusted authorities; the first one signs.
    authorities: Vec<[u8; 16]>,
    /// Incremented whenever the authorities or the signing one change.
    round: u32,
});
message!(
    /// A name that has, or had, a certificate.
    Holder {
        name: String,
        roles: Vec<Role>,
        /// Serial number of its last certificate.
        serial: u64,
        /// When it joined, and when its certificate expires, in seconds since 1970.
        joined: u64,
        until: u64,
        /// The address it joined from.
        from: String,
        removed: bool,
        /// Round of the authorities that its node has confirmed.
        round: u32,
    }
);
message!(
    /// A token, without its secret.
    TokenShown {
        /// The first bytes of the secret's checksum: the id to revoke it by.
        id: String,
        roles: Vec<Role>,
        uses_left: u32,
        until: u64,
        name: String,
        from: Vec<Network>,
    }
);
message!(
    /// Revokes a token. `NotFound`: there is none.
    TokenRevoke = 55 by [Console, Operator] -> () { id: String }
);
message!(
    /// Removes a node: its certificates are no longer accepted, and its connections end. `NotFound`: there is
    /// no such node.
    NodeRemove = 56 by [Console, Operator] -> () { name: String }
);
message!(
    /// Replaces the cluster's authority in steps: nodes trust a new one, it signs, the old one is dropped.
    /// Each step begins when all nodes have completed the previous one; with `skip`, the next one begins
    /// without them.
    RotateAuthority = 60 by [Console] -> Enrolment { skip: bool }
);
message!(
    /// The node of this name, which is the sender's, has stored the certificate and the authorities of this
    /// round durably.
    CertificateKept = 61 by [Meta, Storage, Mount, Mover, Console, Operator, Auditor] -> () {
        name: String,
        round: u32,
    }
);
