//! The handshake: two ends authenticate each other and agree on secret keys.
//!
//! It is that of TLS 1.3 (rustls), with certificates of the cluster at both ends; a machine that joins has
//! none yet. The suite is negotiated as an application protocol, so that an attacker between the two cannot
//! change it. After it TLS is not used any more: the exported keys protect the frames. No session is resumed.
//! Pure: whole TLS records come in and go out.
//!
//! Invariant: a listener accepts any certificate whose owner has its key, and then decides itself, so that it
//! can send an error message with its refusal.
use crate::certificate::{Certificate, Credentials, Pin};
use crate::frames::{FrameKey, KEY_BYTES, Keys, Suite};
use rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use rustls::crypto::{CryptoProvider, ring::default_provider, verify_tls13_signature};
use rustls::pki_types::{CertificateDer, PrivateKeyDer, PrivatePkcs8KeyDer, ServerName, UnixTime};
use rustls::server::danger::{ClientCertVerified, ClientCertVerifier};
use rustls::time_provider::TimeProvider;
use rustls::version::TLS13;
use rustls::{
    ClientConfig, ClientConnection, DigitallySignedStruct, DistinguishedName, ServerConfig, ServerConnection,
    SignatureScheme,
};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use weir_proto::{Error, ErrorKind, Result};

/// Bytes of a record's header; its last two are the length of the rest.
pub const RECORD_HEADER_BYTES: usize = 5;
/// The longest record: 16 KiB, and the overhead of encryption.
pub const RECORD_BYTES_MAX: usize = (16 << 10) + 256;
/// The first byte of a handshake's first record.
pub const FIRST_BYTE: u8 = 22;
/// Separates keys of frames from any other keys that TLS may export.
const EXPORT_LABEL: &[u8] = b"EXPORTER-weir-frames";

/// Bytes that follow a record's header.
pub fn record_len(header: &[u8; RECORD_HEADER_BYTES]) -> Result<usize> {
    let len = usize::from(u16::from_be_bytes([header[3], header[4]]));
    let is_record = (20..=23).contains(&header[0]) && header[1] == 3 && len <= RECORD_BYTES_MAX;
    match is_record {
        true => Ok(len),
        false => Err(Error::invalid(format!("no handshake: it continues with {header:02x?}"))),
    }
}

/// Seconds since 1970, by this node's clock.
pub type Now = Arc<dyn Fn() -> u64 + Send + Sync>;

/// The suites that an end accepts for a connection, best first.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Wanted(pub Vec<Suite>);

/// Result of a handshake.
pub struct Agreed {
    /// The other end's certificate; none: it presented none. An error: it is refused, and may be sent the
    /// error.
    pub peer: Result<Option<Certificate>>,
    pub keys: Keys,
}

/// One end of a handshake.
pub trait Exchange: Send {
    /// Bytes to send now; may be empty.
    fn outgoing(&mut self) -> Result<Vec<u8>>;
    /// A whole record of the other end.
    fn incoming(&mut self, record: &[u8]) -> Result<()>;
    /// Whether it expects no further input.
    fn is_done(&self) -> bool;
    fn agreed(self: Box<Self>) -> Result<Agreed>;
}

/// Starts a node's handshakes.
pub trait Handshakes: Send + Sync {
    fn dial(&self, wanted: &Wanted) -> Result<Box<dyn Exchange>>;
    fn accept(&self, wanted: &Wanted) -> Result<Box<dyn Exchange>>;
}

/// Handshakes with TLS.
pub struct Tls {
    now: Now,
    provider: Arc<CryptoProvider>,
    whom: Whom,
    /// Replaced when the certificate is renewed.
    credentials: Mutex<Option<Arc<Credentials>>>,
}

/// The peers that the node accepts.
#[derive(Clone)]
enum Whom {
    /// Nodes whose certificate is signed by an authority in its own credentials.
    Cluster,
    /// While it joins: the coordinator of the cluster with this authority.
    Pinned(Pin),
}

impl Tls {
    /// For a node of a cluster.
    pub fn of_node(credentials: Credentials, now: Now) -> Tls {
        let credentials = Mutex::new(Some(Arc::new(credentials)));
        Tls { now, provider: Arc::new(default_provider()), whom: Whom::Cluster, credentials }
    }
    /// For a machine that joins; it can only dial.
    pub fn joining(pin: Pin, now: Now) -> Tls {
        let provider = Arc::new(default_provider());
        Tls { now, provider, whom: Whom::Pinned(pin), credentials: Mutex::default() }
    }
    pub fn renew(&self, credentials: Credentials) {
        *self.credentials.lock().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(credentials));
    }
    pub fn credentials(&self) -> Option<Arc<Credentials>> {
        self.credentials.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
    fn check(&self) -> Check {
        let authorities = self.credentials().map(|c| c.authorities.clone()).unwrap_or_default();
        Check { now: self.now.clone(), whom: self.whom.clone(), authorities }
    }
    fn verifier(&self) -> Arc<Verifier> {
        Arc::new(Verifier { check: self.check(), provider: self.provider.clone() })
    }
    fn time(&self) -> Arc<dyn TimeProvider> {
        Arc::new(Time(self.now.clone()))
    }
}

/// A node's certificate, with the authorities: a joining machine knows only the pin of these.
fn chain(credentials: &Credentials) -> Vec<CertificateDer<'static>> {
    let all = std::iter::once(&credentials.certificate).chain(&credentials.authorities);
    all.map(|der| CertificateDer::from(der.clone())).collect()
}

fn private_key(credentials: &Credentials) -> PrivateKeyDer<'static> {
    PrivatePkcs8KeyDer::from(credentials.key.clone()).into()
}

fn protocols(wanted: &Wanted) -> Vec<Vec<u8>> {
    wanted.0.iter().map(|suite| suite.protocol().as_bytes().to_vec()).collect()
}

impl Handshakes for Tls {
    fn dial(&self, wanted: &Wanted) -> Result<Box<dyn Exchange>> {
        let builder = ClientConfig::builder_with_details(self.provider.clone(), self.time());
        let builder = builder
            .with_protocol_versions(&[&TLS13])
            .map_err(|e| failed(&e))?
            .dangerous()
            .with_custom_certificate_verifier(self.verifier());
        let mut config = match self.credentials() {
            None => builder.with_no_client_auth(),
            Some(own) => {
                builder.with_client_auth_cert(chain(&own), private_key(&own)).map_err(|e| failed(&e))?
            }
        };
        config.alpn_protocols = protocols(wanted);
        config.enable_sni = false;
        config.resumption = rustls::client::Resumption::disabled();
        let name = ServerName::try_from("weir").map_err(|e| Error::invalid(e.to_string()))?; // not used
        let connection = ClientConnection::new(Arc::new(config), name).map_err(|e| failed(&e))?;
        Ok(Box::new(TlsExchange { tls: connection.into(), check: self.check() }))
    }
    fn accept(&self, wanted: &Wanted) -> Result<Box<dyn Exchange>> {
        let Some(own) = self.credentials() else {
            return Err(Error::unsupported("a node without a certificate cannot be dialed"));
        };
        let builder = ServerConfig::builder_with_details(self.provider.clone(), self.time());
        let mut config = builder
            .with_protocol_versions(&[&TLS13])
            .map_err(|e| failed(&e))?
            .with_client_cert_verifier(self.verifier())
            .with_single_cert(chain(&own), private_key(&own))
            .map_err(|e| failed(&e))?;
        config.alpn_protocols = protocols(wanted);
        // A ticket that the peer does not read before the connection ends would make the kernel reset it.
        config.send_tls13_tickets = 0;
        config.session_storage = Arc::new(rustls::server::NoServerSessionStorage {});
        let connection = ServerConnection::new(Arc::new(config)).map_err(|e| failed(&e))?;
        Ok(Box::new(TlsExchange { tls: connection.into(), check: self.check() }))
    }
}

/// A refusal is permanent until an administrator changes something.
fn failed(e: &rustls::Error) -> Error {
    match e {
        rustls::Error::General(words) => Error::of_text(ErrorKind::Denied, words),
        rustls::Error::NoApplicationProtocol => Error::denied("the two ends have no suite in common")
            .hint("compare node.suites and node.trusted_networks of both"),
        rustls::Error::AlertReceived(alert) => {
            Error::denied(format!("the peer ended the handshake ({alert:?})")).hint("its log has the reason")
        }
        e => Error::denied(format!("handshake: {e}")),
    }
}

struct Time(Now);

impl std::fmt::Debug for Time {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Time")
    }
}

impl TimeProvider for Time {
    fn current_time(&self) -> Option<UnixTime> {
        Some(UnixTime::since_unix_epoch(Duration::from_secs((self.0)())))
    }
}

/// Decides whether a certificate is accepted.
#[derive(Clone)]
struct Check {
    now: Now,
    whom: Whom,
    authorities: Vec<Vec<u8>>,
}

impl Check {
    fn certificate(&self, chain: &[CertificateDer<'_>]) -> Result<Certificate> {
        let Some((certificate, above)) = chain.split_first() else {
            return Err(
                Error::denied("the peer has no certificate").hint("it has to join the cluster (`weir join`)")
            );
        };
        match self.whom {
            Whom::Cluster => Certificate::verify(certificate, &self.authorities, (self.now)()),
            Whom::Pinned(pin) => {
                let Some(authority) = above.iter().find(|above| Pin::of(above) == pin) else {
                    return Err(Error::denied(
                        "the cluster at this address is not the one that the token is for",
                    )
                    .hint("make a new token there"));
                };
                Certificate::verify(certificate, &[authority.to_vec()], (self.now)())
            }
        }
    }
}

struct Verifier {
    check: Check,
    provider: Arc<CryptoProvider>,
}

impl std::fmt::Debug for Verifier {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Verifier")
    }
}

impl Verifier {
    fn signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> std::result::Result<HandshakeSignatureValid, rustls::Error> {
        verify_tls13_signature(message, certificate, signed, &self.provider.signature_verification_algorithms)
    }
    fn no_tls12() -> rustls::Error {
        rustls::Error::General("TLS 1.2 is not spoken here".to_owned())
    }
    fn schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

impl ServerCertVerifier for Verifier {
    fn verify_server_cert(
        &self,
        certificate: &CertificateDer<'_>,
        above: &[CertificateDer<'_>],
        _: &ServerName<'_>,
        _: &[u8],
        _: UnixTime,
    ) -> std::result::Result<ServerCertVerified, rustls::Error> {
        let mut chain = vec![certificate.clone()];
        chain.extend(above.iter().cloned());
        match self.check.certificate(&chain) {
            Ok(_) => Ok(ServerCertVerified::assertion()),
            Err(e) => Err(rustls::Error::General(e.to_string())),
        }
    }
    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> std::result::Result<HandshakeSignatureValid, rustls::Error> {
        Err(Verifier::no_tls12())
    }
    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> std::result::Result<HandshakeSignatureValid, rustls::Error> {
        self.signature(message, certificate, signed)
    }
    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.schemes()
    }
}

impl ClientCertVerifier for Verifier {
    fn client_auth_mandatory(&self) -> bool {
        false
    }
    fn root_hint_subjects(&self) -> &[DistinguishedName] {
        &[]
    }
    fn verify_client_cert(
        &self,
        _: &CertificateDer<'_>,
        _: &[CertificateDer<'_>],
        _: UnixTime,
    ) -> std::result::Result<ClientCertVerified, rustls::Error> {
        Ok(ClientCertVerified::assertion()) // `agreed` decides
    }
    fn verify_tls12_signature(
        &self,
        _: &[u8],
        _: &CertificateDer<'_>,
        _: &DigitallySignedStruct,
    ) -> std::result::Result<HandshakeSignatureValid, rustls::Error> {
        Err(Verifier::no_tls12())
    }
    fn verify_tls13_signature(
        &self,
        message: &[u8],
        certificate: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> std::result::Result<HandshakeSignatureValid, rustls::Error> {
        self.signature(message, certificate, signed)
    }
    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.schemes()
    }
}

struct TlsExchange {
    tls: rustls::Connection,
    check: Check,
}

impl Exchange for TlsExchange {
    fn outgoing(&mut self) -> Result<Vec<u8>> {
        let mut bytes = Vec::new();
        while self.tls.wants_write() {
            self.tls.write_tls(&mut bytes).map_err(|e| Error::invalid(format!("handshake: {e}")))?;
        }
        Ok(bytes)
    }
    fn incoming(&mut self, record: &[u8]) -> Result<()> {
        let mut rest = record;
        while !rest.is_empty() {
            self.tls.read_tls(&mut rest).map_err(|e| Error::invalid(format!("handshake: {e}")))?;
            self.tls.process_new_packets().map_err(|e| failed(&e))?;
        }
        Ok(())
    }
    fn is_done(&self) -> bool {
        !self.tls.is_handshaking()
    }
    fn agreed(self: Box<Self>) -> Result<Agreed> {
        let suite = self.tls.alpn_protocol().and_then(Suite::find);
        let suite = suite.ok_or_else(|| failed(&rustls::Error::NoApplicationProtocol))?;
        let mut keys = [[0; KEY_BYTES]; 2];
        for (which, key) in [b"dialed", b"listen"].into_iter().zip(&mut keys) {
            let exported = self.tls.export_keying_material(&mut key[..], EXPORT_LABEL, Some(which));
            exported.map_err(|e| failed(&e))?;
        }
        let [dialer, listener] = keys.map(|key| FrameKey::new(suite, &key));
        let keys = match self.tls {
            rustls::Connection::Client(_) => Keys { suite, send: dialer, receive: listener },
            rustls::Connection::Server(_) => Keys { suite, send: listener, receive: dialer },
        };
        let peer = match self.tls.peer_certificates() {
            None | Some([]) => Ok(None),
            Some(chain) => self.check.certificate(chain).map(Some),
        };
        Ok(Agreed { peer, keys })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::certificate::{Authority, Grant, LIFE_S};
    use weir_proto::ClusterId;
    use weir_proto::map::Role;

    const NOW: u64 = 1_800_000_000;

    fn at(now: u64) -> Now {
        Arc::new(move || now)
    }
    fn authority() -> Authority {
        Authority::found(ClusterId([7; 16]), NOW).unwrap()
    }
    fn node(authority: &Authority, name: &str, role: Role) -> Tls {
        let grant = Grant { name: name.to_owned(), roles: vec![role], serial: 1 };
        Tls::of_node(authority.issue_own(&grant, NOW).unwrap(), at(NOW))
    }
    fn all() -> Wanted {
        Wanted(Suite::ALL.to_vec())
    }

    fn records(mut bytes: &[u8]) -> Vec<Vec<u8>> {
        let mut records = Vec::new();
        while let Some((header, _)) = bytes.split_first_chunk() {
            let (record, rest) = bytes.split_at(RECORD_HEADER_BYTES + record_len(header).unwrap());
            records.push(record.to_vec());
            bytes = rest;
        }
        records
    }

    fn pass(from: &mut Box<dyn Exchange>, to: &mut Box<dyn Exchange>) -> Result<()> {
        records(&from.outgoing()?).iter().try_for_each(|record| to.incoming(record))
    }

    /// Dialer and listener exchange a handshake.
    fn meet(dialer: &Tls, d: &Wanted, listener: &Tls, l: &Wanted) -> Result<(Agreed, Agreed)> {
        let (mut dialed, mut accepted) = (dialer.dial(d)?, listener.accept(l)?);
        while !(dialed.is_done() && accepted.is_done()) {
            pass(&mut dialed, &mut accepted)?;
            pass(&mut accepted, &mut dialed)?;
        }
        Ok((dialed.agreed()?, accepted.agreed()?))
    }

    #[test]
    fn two_nodes_of_a_cluster_know_each_other_and_share_keys() {
        let authority = authority();
        let (mount, storage) = (node(&authority, "n1", Role::Mount), node(&authority, "s1", Role::Storage));
        let (mut dialed, mut accepted) = meet(&mount, &all(), &storage, &all()).unwrap();
        assert_eq!(dialed.peer.unwrap().unwrap().name, "s1");
        assert_eq!(accepted.peer.unwrap().unwrap().roles, [Role::Mount]);
        for (from, to) in [
            (&mut dialed.keys.send, &mut accepted.keys.receive),
            (&mut accepted.keys.send, &mut dialed.keys.receive),
        ] {
            let mut frame = vec![5; 64];
            let tag = from.seal(&mut frame);
            to.open(&mut frame, &tag).unwrap();
        }
        let mut echoed = vec![5; 64];
        let tag = dialed.keys.send.seal(&mut echoed);
        assert!(
            dialed.keys.receive.open(&mut echoed, &tag).is_err(),
            "the two directions have keys of their own"
        );
    }

    #[test]
    fn the_listener_chooses_among_the_suites_of_both() {
        let authority = authority();
        let (a, b) = (node(&authority, "a", Role::Mount), node(&authority, "b", Role::Storage));
        let suite = |d: &[Suite], l: &[Suite]| {
            meet(&a, &Wanted(d.to_vec()), &b, &Wanted(l.to_vec())).map(|(d, _)| d.keys.suite)
        };
        use Suite::{Aes, Encryption, Integrity};
        assert_eq!(suite(&[Encryption, Integrity], &[Integrity, Encryption]), Ok(Integrity));
        assert_eq!(suite(&[Encryption], &[Integrity, Encryption]), Ok(Encryption));
        assert_eq!(suite(&[Integrity, Encryption], &[Aes, Encryption]), Ok(Encryption));
        assert!(suite(&[Encryption], &[Aes]).unwrap_err().context.contains("no suite in common"));
    }

    #[test]
    fn strangers_are_distinguished() {
        let (authority, other) = (authority(), authority());
        let storage = node(&authority, "s1", Role::Storage);
        let joining = Tls::joining(authority.pin(), at(NOW));
        let (dialed, accepted) = meet(&joining, &all(), &storage, &all()).unwrap();
        assert_eq!((dialed.peer.unwrap().unwrap().name.as_str(), accepted.peer), ("s1", Ok(None)));

        let misled = Tls::joining(other.pin(), at(NOW));
        let refused = meet(&misled, &all(), &storage, &all()).map(drop).unwrap_err();
        assert!(refused.context.contains("not the one that the token is for"), "{refused:?}");

        let foreign = node(&other, "s1", Role::Storage);
        let refused = meet(&storage, &all(), &foreign, &all()).map(drop).unwrap_err();
        assert!(refused.context.contains("not the one that is trusted here"), "{refused:?}");
    }

    #[test]
    fn a_listener_says_itself_why_it_refuses_a_certificate() {
        let authority = authority();
        let storage = node(&authority, "s1", Role::Storage);
        let late = node(&authority, "old", Role::Mount);
        let later = Tls { now: at(NOW + LIFE_S + 5), ..storage };
        // The dialer's clock is behind: for the dialer both certificates are valid.
        let (_, accepted) = meet(&late, &all(), &later, &all()).unwrap();
        assert!(accepted.peer.unwrap_err().context.contains("old has expired"));
    }

    #[test]
    fn a_changed_record_ends_the_handshake() {
        let authority = authority();
        let (mount, storage) = (node(&authority, "n1", Role::Mount), node(&authority, "s1", Role::Storage));
        let (mut dialed, mut accepted) = (mount.dial(&all()).unwrap(), storage.accept(&all()).unwrap());
        pass(&mut dialed, &mut accepted).unwrap();
        let mut answer = records(&accepted.outgoing().unwrap());
        let last = answer.last_mut().unwrap();
        let end = last.len() - 1;
        last[end] ^= 1;
        assert!(answer.iter().try_for_each(|record| dialed.incoming(record)).is_err());
    }

    #[test]
    fn a_malformed_record_is_refused_by_its_header() {
        assert_eq!(record_len(&[22, 3, 1, 1, 0]), Ok(256));
        for bad in [*b"WEIR\x01", *b"GET /", [22, 3, 1, 255, 255], [24, 3, 3, 0, 1]] {
            assert!(record_len(&bad).is_err());
        }
    }
}
