//! Certificates: the node and cluster that a peer belongs to, and its roles.
//!
//! A cluster has an authority of its own, a key that signs certificates (X.509, ECDSA on P-256). The content
//! of a certificate is in its alternative names: `weir://CLUSTER/node/NAME`, and `weir://CLUSTER/role/ROLE`
//! for each role. Pure: the time is an argument.
use rcgen::{
    BasicConstraints, CertificateParams, DistinguishedName, DnType, ExtendedKeyUsagePurpose, IsCa, Issuer,
    KeyPair, KeyUsagePurpose, PKCS_ECDSA_P256_SHA256, PublicKeyData, SanType, SerialNumber,
    SignatureAlgorithm,
};
use rustls::crypto::ring::default_provider;
use rustls::pki_types::{CertificateDer, PrivatePkcs8KeyDer, TrustAnchor, UnixTime};
use sha2::{Digest, Sha256};
use std::fmt;
use std::time::Duration;
use time::OffsetDateTime;
use webpki::{EndEntityCert, KeyUsage};
use weir_proto::map::Role;
use weir_proto::{ClusterId, Error, Result};

/// Validity of a node's certificate. It is renewed when a third of this is left.
pub const LIFE_S: u64 = 30 * 86_400;
const AUTHORITY_LIFE_S: u64 = 30 * 365 * 86_400;
/// A certificate's validity begins this long before its creation: the clock of a new node may be wrong.
const CLOCKS_DIFFER_S: u64 = 86_400;
/// Bytes of a public key: an uncompressed point of the curve.
pub const PUBLIC_KEY_BYTES: usize = 65;
/// Longest name of a node that a certificate may have.
pub const NAME_BYTES_MAX: usize = 64;
/// A time after the end of every certificate.
const FAR_AWAY_S: u64 = 1 << 40;

/// The content of a certificate.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Certificate {
    pub cluster: ClusterId,
    pub name: String,
    pub roles: Vec<Role>,
    /// Incremented with each certificate of the cluster.
    pub serial: u64,
    /// Seconds since 1970: the last second of its validity.
    pub until: u64,
    /// The authority that signed it.
    pub by: Pin,
}

/// The first 128 bits of the SHA-256 of an authority's certificate: enough to identify it.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Pin(pub [u8; 16]);

impl Pin {
    pub fn of(authority: &[u8]) -> Pin {
        let mut pin = [0; 16];
        pin.copy_from_slice(&Sha256::digest(authority)[..16]);
        Pin(pin)
    }
}

impl Certificate {
    /// The content of the certificate, if one of `authorities` signed it and it is valid at `now`.
    ///
    /// Errors: `Denied`, with a message for its holder.
    pub fn verify(certificate: &[u8], authorities: &[Vec<u8>], now: u64) -> Result<Certificate> {
        let der = CertificateDer::from(certificate);
        let parsed =
            EndEntityCert::try_from(&der).map_err(|e| refused(format_args!("it is malformed: {e}")))?;
        let content = content_of(&parsed)?;
        let ders: Vec<CertificateDer<'_>> =
            authorities.iter().map(|a| CertificateDer::from(&a[..])).collect();
        let anchors = ders.iter().filter_map(|a| webpki::anchor_from_trusted_cert(a).ok());
        let anchors: Vec<TrustAnchor<'_>> = anchors.collect();
        check_chain(&parsed, &anchors, now).map_err(|e| match e {
            webpki::Error::CertExpired { not_after, .. } => {
                refused(format_args!("that of {} has expired on {}", content.name, date(not_after.as_secs())))
                    .hint("join the cluster again (`weir join`), and check this machine's clock")
            }
            webpki::Error::CertNotValidYet { not_before, .. } => refused(format_args!(
                "that of {} holds from {} on only",
                content.name,
                date(not_before.as_secs())
            ))
            .hint("check the clocks of both machines"),
            webpki::Error::UnknownIssuer | webpki::Error::InvalidSignatureForPublicKey => {
                refused(format_args!(
                    "the authority of cluster {} is not the one that is trusted here",
                    content.cluster
                ))
                .hint("it belongs to another cluster")
            }
            e => refused(format_args!("{e}")),
        })?;
        // The end of its validity is in the error for a later time.
        let until = match check_chain(&parsed, &anchors, FAR_AWAY_S) {
            Err(webpki::Error::CertExpired { not_after, .. }) => not_after.as_secs(),
            _ => return Err(refused(format_args!("it has no end"))),
        };
        let signed = authorities.iter().find(|authority| is_signed_by(&parsed, authority, now));
        Ok(Certificate {
            until,
            by: signed.map_or(Pin::default(), |authority| Pin::of(authority)),
            ..content
        })
    }

    /// When it should be renewed, in seconds since 1970.
    pub fn renew_at(&self) -> u64 {
        self.until.saturating_sub(LIFE_S / 3)
    }

    /// Refuses a node that claims another identity. A process may append its own name to that of its node:
    /// `node.process`.
    pub fn check_claims(&self, cluster: Option<ClusterId>, name: &str, role: Role) -> Result<()> {
        if cluster.is_some_and(|claimed| claimed != self.cluster) {
            return Err(Error::denied(format!(
                "the certificate of {} is of cluster {}",
                self.name, self.cluster
            )));
        }
        if !self.roles.contains(&role) {
            let roles: Vec<&str> = self.roles.iter().map(|role| role_word(*role)).collect();
            return Err(Error::denied(format!(
                "the certificate of {} is for {}, not for {}",
                self.name,
                roles.join(", "),
                role_word(role)
            )));
        }
        let is_member = matches!(role, Role::Meta | Role::Storage);
        let below =
            name.strip_prefix(&self.name).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'));
        if is_member && !below {
            return Err(Error::denied(format!("the certificate is of {}, not of {name}", self.name)));
        }
        Ok(())
    }
}

fn refused(why: fmt::Arguments<'_>) -> Error {
    Error::denied(format!("the certificate is refused: {why}"))
}

fn date(unix_s: u64) -> String {
    let at = jiff::Timestamp::from_second(i64::try_from(unix_s).unwrap_or(i64::MAX));
    at.map_or_else(|_| unix_s.to_string(), |at| at.to_string())
}

fn check_chain(
    certificate: &EndEntityCert<'_>,
    anchors: &[TrustAnchor<'_>],
    now: u64,
) -> std::result::Result<(), webpki::Error> {
    let algorithms = default_provider().signature_verification_algorithms.all;
    let now = UnixTime::since_unix_epoch(Duration::from_secs(now));
    certificate.verify_for_usage(algorithms, anchors, &[], now, KeyUsage::client_auth(), None, None).map(drop)
}

fn is_signed_by(certificate: &EndEntityCert<'_>, authority: &[u8], now: u64) -> bool {
    let der = CertificateDer::from(authority);
    webpki::anchor_from_trusted_cert(&der)
        .is_ok_and(|anchor| check_chain(certificate, &[anchor], now).is_ok())
}

/// Its content, unverified. Its validity and its signer are not known.
fn content_of(certificate: &EndEntityCert<'_>) -> Result<Certificate> {
    let malformed = || refused(format_args!("it names no node of a Weir cluster"));
    let (mut cluster, mut name, mut roles) = (None, None, Vec::new());
    for uri in certificate.valid_uri_names() {
        let mut parts = uri.strip_prefix("weir://").ok_or_else(malformed)?.split('/');
        let of: ClusterId = parts.next().and_then(|id| id.parse().ok()).ok_or_else(malformed)?;
        if *cluster.get_or_insert(of) != of {
            return Err(malformed());
        }
        match (parts.next(), parts.next(), parts.next()) {
            (Some("node"), Some(node), None) if name.is_none() => name = Some(node.to_owned()),
            (Some("role"), Some(role), None) => roles.extend(role_of(role)), // later versions' roles are ignored
            _ => return Err(malformed()),
        }
    }
    let serial = certificate.serial();
    let digits = serial.iter().skip_while(|byte| **byte == 0);
    let serial = (serial.len() <= 9).then(|| digits.fold(0, |n: u64, byte| n << 8 | u64::from(*byte)));
    match (cluster, name, serial) {
        (Some(cluster), Some(name), Some(serial)) if check_name(&name).is_ok() => {
            Ok(Certificate { cluster, name, roles, serial, until: 0, by: Pin::default() })
        }
        _ => Err(malformed()),
    }
}

/// Checks that a certificate may have this name.
pub fn check_name(name: &str) -> Result<()> {
    let is_plain = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    if name.is_empty() || name.len() > NAME_BYTES_MAX || !name.chars().all(is_plain) {
        return Err(Error::invalid(format!(
            "the name {name:?}: expected 1 to {NAME_BYTES_MAX} letters, digits, dots, dashes and underscores"
        )));
    }
    Ok(())
}

/// The name of a role in certificates and tokens.
pub fn role_word(role: Role) -> &'static str {
    match role {
        Role::Coordinator => "coord",
        Role::Meta => "meta",
        Role::Storage => "storage",
        Role::Mount => "mount",
        Role::Mover => "mover",
        Role::Console => "admin",
        Role::Operator => "operator",
        Role::Auditor => "auditor",
    }
}

pub fn role_of(word: &str) -> Option<Role> {
    Role::ALL.iter().copied().find(|role| role_word(*role) == word)
}

/// The key of a cluster that signs certificates, with its own certificate.
pub struct Authority {
    cluster: ClusterId,
    key: KeyPair,
    certificate: Vec<u8>,
}

/// The content of a new certificate.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Grant {
    pub name: String,
    pub roles: Vec<Role>,
    pub serial: u64,
}

impl Authority {
    /// Makes a new authority.
    pub fn found(cluster: ClusterId, now: u64) -> Result<Authority> {
        let key = new_key()?;
        let mut params = authority_params(cluster);
        (params.not_before, params.not_after) = period(now, AUTHORITY_LIFE_S)?;
        let certificate = params.self_signed(&key).map_err(|e| failed("make the cluster's authority", &e))?;
        Ok(Authority { cluster, key, certificate: certificate.der().to_vec() })
    }
    /// From its stored form.
    pub fn read(cluster: ClusterId, key: &[u8], certificate: Vec<u8>) -> Result<Authority> {
        let key = read_key(key)?;
        Ok(Authority { cluster, key, certificate })
    }
    /// The private key (PKCS #8).
    pub fn key(&self) -> &[u8] {
        self.key.serialized_der()
    }
    pub fn certificate(&self) -> &[u8] {
        &self.certificate
    }
    pub fn pin(&self) -> Pin {
        Pin::of(&self.certificate)
    }
    /// Signs a certificate for the owner of `public_key`, valid from `now` for [`LIFE_S`].
    pub fn issue(&self, grant: &Grant, public_key: &[u8], now: u64) -> Result<Vec<u8>> {
        check_name(&grant.name)?;
        if public_key.len() != PUBLIC_KEY_BYTES || public_key[0] != 4 {
            return Err(Error::invalid(format!(
                "a public key of {} bytes: expected an uncompressed point of P-256, {PUBLIC_KEY_BYTES} bytes",
                public_key.len()
            )));
        }
        let uri = |what: &str, value: &str| {
            let text = format!("weir://{}/{what}/{value}", self.cluster);
            text.try_into().map(SanType::URI).map_err(|e: rcgen::Error| failed("name a node", &e))
        };
        let mut params = CertificateParams::default();
        params.subject_alt_names.push(uri("node", &grant.name)?);
        for role in &grant.roles {
            params.subject_alt_names.push(uri("role", role_word(*role))?);
        }
        (params.not_before, params.not_after) = period(now, LIFE_S)?;
        params.serial_number = Some(SerialNumber::from_slice(&grant.serial.to_be_bytes()));
        params.distinguished_name = DistinguishedName::new();
        params.distinguished_name.push(DnType::CommonName, grant.name.as_str());
        params.key_usages = vec![KeyUsagePurpose::DigitalSignature];
        params.extended_key_usages =
            vec![ExtendedKeyUsagePurpose::ClientAuth, ExtendedKeyUsagePurpose::ServerAuth];
        let issuer = Issuer::new(authority_params(self.cluster), &self.key);
        let made = params.signed_by(&PublicKey(public_key), &issuer);
        Ok(made.map_err(|e| failed("sign a certificate", &e))?.der().to_vec())
    }
    /// A certificate with a new key, for the process that holds the authority itself.
    pub fn issue_own(&self, grant: &Grant, now: u64) -> Result<Credentials> {
        let key = NewKey::make()?;
        let certificate = self.issue(grant, key.public(), now)?;
        key.with(certificate, vec![self.certificate.clone()])
    }
}

fn authority_params(cluster: ClusterId) -> CertificateParams {
    let mut params = CertificateParams::default();
    params.distinguished_name = DistinguishedName::new();
    params.distinguished_name.push(DnType::CommonName, format!("Weir cluster {cluster}"));
    params.is_ca = IsCa::Ca(BasicConstraints::Constrained(0));
    params.key_usages = vec![KeyUsagePurpose::KeyCertSign];
    params
}

fn period(now: u64, life: u64) -> Result<(OffsetDateTime, OffsetDateTime)> {
    let at = |unix_s: u64| {
        let time = i64::try_from(unix_s).ok().and_then(|s| OffsetDateTime::from_unix_timestamp(s).ok());
        time.ok_or_else(|| Error::invalid(format!("the clock of this machine shows {unix_s} s since 1970")))
    };
    Ok((at(now.saturating_sub(CLOCKS_DIFFER_S))?, at(now.saturating_add(life))?))
}

fn new_key() -> Result<KeyPair> {
    KeyPair::generate_for(&PKCS_ECDSA_P256_SHA256).map_err(|e| failed("make a key", &e))
}

fn read_key(pkcs8: &[u8]) -> Result<KeyPair> {
    let der = PrivatePkcs8KeyDer::from(pkcs8);
    KeyPair::from_pkcs8_der_and_sign_algo(&der, &PKCS_ECDSA_P256_SHA256)
        .map_err(|e| Error::invalid(format!("the private key is none of P-256 in PKCS #8: {e}")))
}

fn failed(what: &str, e: &rcgen::Error) -> Error {
    Error::invalid(format!("{what}: {e}"))
}

/// A public key by itself.
struct PublicKey<'a>(&'a [u8]);

impl PublicKeyData for PublicKey<'_> {
    fn der_bytes(&self) -> &[u8] {
        self.0
    }
    fn algorithm(&self) -> &'static SignatureAlgorithm {
        &PKCS_ECDSA_P256_SHA256
    }
}

/// A key without a certificate yet.
pub struct NewKey(KeyPair);

impl NewKey {
    pub fn make() -> Result<NewKey> {
        Ok(NewKey(new_key()?))
    }
    /// The public key, to be signed by the authority.
    pub fn public(&self) -> &[u8] {
        self.0.public_key_raw()
    }
    /// Refused if the certificate is not for this key.
    pub fn with(&self, certificate: Vec<u8>, authorities: Vec<Vec<u8>>) -> Result<Credentials> {
        let credentials = Credentials { certificate, key: self.0.serialized_der().to_vec(), authorities };
        credentials.check()?;
        Ok(credentials)
    }
}

/// A node's certificate and key, and its trusted authorities. In a file: PEM blocks, the node's certificate,
/// its private key, then the authorities' certificates.
#[derive(Clone, PartialEq, Eq)]
pub struct Credentials {
    pub certificate: Vec<u8>,
    /// PKCS #8.
    pub key: Vec<u8>,
    pub authorities: Vec<Vec<u8>>,
}

impl Credentials {
    pub fn to_pem(&self) -> String {
        let mut blocks = vec![
            pem::Pem::new("CERTIFICATE", self.certificate.clone()),
            pem::Pem::new("PRIVATE KEY", self.key.clone()),
        ];
        blocks.extend(self.authorities.iter().map(|a| pem::Pem::new("CERTIFICATE", a.clone())));
        pem::encode_many(&blocks)
    }
    pub fn from_pem(text: &str) -> Result<Credentials> {
        let blocks =
            pem::parse_many(text).map_err(|e| Error::invalid(format!("the file is not a PEM file: {e}")))?;
        let (mut certificates, mut key) = (Vec::new(), None);
        for block in blocks {
            match block.tag() {
                "CERTIFICATE" => certificates.push(block.into_contents()),
                "PRIVATE KEY" => key = Some(block.into_contents()),
                other => return Err(Error::invalid(format!("a block {other:?} is not expected here"))),
            }
        }
        let (Some(key), true) = (key, certificates.len() >= 2) else {
            return Err(Error::invalid(
                "expected the node's certificate, its private key and the authority's certificate",
            ));
        };
        let certificate = certificates.remove(0);
        let credentials = Credentials { certificate, key, authorities: certificates };
        credentials.check()?;
        Ok(credentials)
    }
    /// The content of its own certificate at `now`; refused as a peer would refuse it.
    pub fn own(&self, now: u64) -> Result<Certificate> {
        Certificate::verify(&self.certificate, &self.authorities, now)
    }
    fn check(&self) -> Result<()> {
        let key = read_key(&self.key)?;
        let der = CertificateDer::from(&self.certificate[..]);
        let parsed =
            EndEntityCert::try_from(&der).map_err(|e| refused(format_args!("it is malformed: {e}")))?;
        match parsed.subject_public_key_info().as_ref().ends_with(key.public_key_raw()) {
            true => Ok(()),
            false => Err(Error::invalid("the certificate is not for the private key beside it")),
        }
    }
}

impl fmt::Debug for Credentials {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Credentials").finish_non_exhaustive() // never the key
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: u64 = 1_800_000_000;
    const CLUSTER: ClusterId = ClusterId([7; 16]);

    fn grant(name: &str, roles: &[Role]) -> Grant {
        Grant { name: name.to_owned(), roles: roles.to_vec(), serial: 0x8000_0000_0000_0001 }
    }

    #[test]
    fn a_certificate_says_what_it_was_made_for() {
        let authority = Authority::found(CLUSTER, NOW).unwrap();
        let made = authority.issue_own(&grant("s3", &[Role::Storage, Role::Meta]), NOW).unwrap();
        let read = Credentials::from_pem(&made.to_pem()).unwrap();
        assert_eq!(read, made);
        let (cluster, name, serial) = (CLUSTER, "s3".to_owned(), 0x8000_0000_0000_0001);
        let roles = vec![Role::Storage, Role::Meta];
        let by = authority.pin();
        let expected = Certificate { cluster, name, roles, serial, until: NOW + LIFE_S, by };
        assert_eq!(read.own(NOW), Ok(expected.clone()));
        let kept = Authority::read(CLUSTER, authority.key(), authority.certificate().to_vec()).unwrap();
        let later = kept.issue_own(&grant("s3", &[Role::Storage, Role::Meta]), NOW + 9).unwrap();
        assert!(Certificate::verify(&later.certificate, &made.authorities, NOW).is_ok());
        assert_eq!(expected.renew_at(), NOW + 20 * 86_400);
    }

    #[test]
    fn an_invalid_certificate_is_refused_with_a_reason() {
        let (authority, other) =
            (Authority::found(CLUSTER, NOW).unwrap(), Authority::found(CLUSTER, NOW).unwrap());
        let made = authority.issue_own(&grant("s3", &[Role::Storage]), NOW).unwrap();
        let verify = |certificate: &[u8], by: &Authority, now| {
            Certificate::verify(certificate, &[by.certificate().to_vec()], now).unwrap_err().context
        };
        assert!(
            verify(&made.certificate, &authority, NOW + LIFE_S + 1).contains("s3 has expired on 2027-02-14")
        );
        assert!(verify(&made.certificate, &authority, NOW - 2 * 86_400).contains("holds from 2027-01-14"));
        assert!(verify(&made.certificate, &other, NOW).contains("is not the one that is trusted here"));
        assert!(
            verify(authority.certificate(), &authority, NOW).contains("names no node"),
            "the authority is no node"
        );
        for at in 0..made.certificate.len() {
            let mut forged = made.certificate.clone();
            forged[at] ^= 1;
            assert!(Certificate::verify(&forged, &made.authorities, NOW).is_err(), "byte {at}");
        }
        let mixed = Credentials { key: other.key().to_vec(), ..made };
        assert!(
            Credentials::from_pem(&mixed.to_pem()).unwrap_err().context.contains("not for the private key")
        );
    }

    #[test]
    fn no_node_takes_the_name_or_the_role_of_another() {
        let certificate = Certificate {
            cluster: CLUSTER,
            name: "s3".to_owned(),
            roles: vec![Role::Storage, Role::Mount],
            serial: 1,
            until: NOW,
            by: Pin::default(),
        };
        let check =
            |cluster, name, role| certificate.check_claims(cluster, name, role).map_err(|e| e.context);
        assert_eq!(check(None, "s3", Role::Storage), Ok(()));
        assert_eq!(check(Some(CLUSTER), "s3.disk4", Role::Storage), Ok(()));
        assert_eq!(check(Some(CLUSTER), "/weir", Role::Mount), Ok(()), "a name for people");
        for (cluster, name, role, why) in [
            (Some(ClusterId([8; 16])), "s3", Role::Storage, "is of cluster"),
            (None, "s33", Role::Storage, "of s3, not of s33"),
            (None, "s4", Role::Storage, "of s3, not of s4"),
            (None, "s3", Role::Meta, "is for storage, mount, not for meta"),
        ] {
            assert!(check(cluster, name, role).unwrap_err().contains(why), "{name} {role:?}");
        }
    }

    #[test]
    fn only_plain_names_get_certificates() {
        let authority = Authority::found(CLUSTER, NOW).unwrap();
        for bad in ["", "a/b", "a b", "weir://x", &"n".repeat(65)] {
            assert!(authority.issue_own(&grant(bad, &[Role::Mount]), NOW).is_err(), "{bad:?}");
        }
        assert!(authority.issue(&grant("n", &[Role::Mount]), &[4; 64], NOW).is_err());
    }
}
