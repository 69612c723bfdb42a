//! How machines become nodes of a cluster, and stop being some: join tokens and certificates.
use crate::map::Role;
use crate::network::Network;
use crate::{ClusterId, message};

/// Tokens that a coordinator keeps; more are refused.
pub const TOKENS_MAX: usize = 1000;

message!(
    /// Makes a join token. Its secret is in the answer and nowhere else.
    TokenCreate = 50 by [Console, Operator] -> TokenMade {
        /// What machines that join with it may be.
        roles: Vec<Role>,
        /// How many may.
        uses: u32,
        /// For so many seconds from now on.
        ttl_s: u64,
        /// A glob that their names have to fit.
        name: String,
        /// From where they may come; empty: from everywhere.
        from: Vec<Network>,
    }
);
message!(TokenMade {
    secret: [u8; 16],
    /// Of the cluster's authority.
    pin: [u8; 16],
    /// Where the coordinator listens, as a machine beside the caller reaches it: `tcp:HOST:PORT`.
    addrs: Vec<String>,
    /// Seconds since 1970.
    until: u64,
});
message!(
    /// A machine becomes a node, or a node gets new credentials under the same name after its removal.
    /// `Denied`: the token is not known, used up, out of its time, or not for this name or network.
    /// `Exists`: a node of this name has a certificate.
    Enrol = 51 by [Stranger] -> Enrolled {
        secret: [u8; 16],
        name: String,
        /// An uncompressed point of P-256.
        public_key: Vec<u8>,
    }
);
message!(
    /// X.509 certificates (DER). Those of authorities are all that nodes are to believe.
    Enrolled {
        cluster: ClusterId,
        name: String,
        roles: Vec<Role>,
        certificate: Vec<u8>,
        authorities: Vec<Vec<u8>>,
        /// As `TokenMade::addrs`.
        coordinators: Vec<String>,
        /// Of the authorities: see `Enrolment::round`.
        round: u32,
    }
);
message!(
    /// The sender's certificate again, with a new end and for a new key.
    RenewCertificate = 52 by [Meta, Storage, Mount, Mover, Console, Operator, Auditor] -> Enrolled { public_key: Vec<u8> }
);
message!(
    /// A certificate without a token, for an administrator at the coordinator's machine: of a new node, or of
    /// one that has these roles, instead of its present one. `Exists`: a node of this name has other roles.
    IssueCertificate = 53 by [Console] -> Enrolled { name: String, roles: Vec<Role>, public_key: Vec<u8> }
);
message!(
    /// Who has a certificate, and which tokens there are.
    GetEnrolment = 54 by [Console, Operator, Auditor] -> Enrolment {}
);
message!(Enrolment {
    holders: Vec<Holder>,
    tokens: Vec<TokenShown>,
    /// The pins of the authorities whose certificates hold; the first one signs.
    authorities: Vec<[u8; 16]>,
    /// Grows whenever the authorities or the one that signs change.
    round: u32,
});
message!(
    /// A name that has, or had, a certificate.
    Holder {
        name: String,
        roles: Vec<Role>,
        /// Of its last certificate.
        serial: u64,
        /// When it joined, and until when its certificate holds, in seconds since 1970.
        joined: u64,
        until: u64,
        /// Where it joined from.
        from: String,
        removed: bool,
        /// Of the authorities that its node keeps, as far as it has said so.
        round: u32,
    }
);
message!(
    /// A token, without its secret.
    TokenShown {
        /// The first bytes of the secret's checksum: the name by which it is revoked.
        id: String,
        roles: Vec<Role>,
        uses_left: u32,
        until: u64,
        name: String,
        from: Vec<Network>,
    }
);
message!(
    /// Takes a token back. `NotFound`: there is none.
    TokenRevoke = 55 by [Console, Operator] -> () { id: String }
);
message!(
    /// Cuts a node off: no certificate that it has is taken any more, and its connections end. `NotFound`:
    /// there is no such node.
    NodeRemove = 56 by [Console, Operator] -> () { name: String }
);
message!(
    /// Replaces the cluster's authority in steps: nodes believe a new one, it signs, the old one is dropped.
    /// Each begins when all nodes have taken the one before; with `skip`, the next one begins without them.
    RotateAuthority = 60 by [Console] -> Enrolment { skip: bool }
);
message!(
    /// The node of this name, which is the sender's, keeps the certificate and the authorities of this round
    /// from now on, also when it restarts.
    CertificateKept = 61 by [Meta, Storage, Mount, Mover, Console, Operator, Auditor] -> () {
        name: String,
        round: u32,
    }
);
