//! Connections between nodes that have certificates.
use weir_proto::ClusterId;
use weir_proto::map::Role;
use weir_trust::certificate::{Authority, Certificate, Credentials, Grant};
use weir_trust::frames::{CLEAR_BYTES, FrameKey, Suite, TAG_BYTES, Tag, Whose};
use weir_trust::handshake::{Handshakes, RECORD_HEADER_BYTES, Tls, Wanted, record_len};
use weir_trust::token::Token;

const NOW: u64 = 1_800_000_000;

struct Node {
    authority: Authority,
    credentials: Credentials,
    tls: Tls,
}
thread_local!(static NODE: Node = {
    let authority = Authority::found(ClusterId([7; 16]), NOW).expect("a new authority");
    let grant = Grant { name: "s1".into(), roles: vec![Role::Storage], serial: 1 };
    let credentials = authority.issue_own(&grant, NOW).expect("a new certificate");
    let tls = Tls::of_node(credentials.clone(), std::sync::Arc::new(|| NOW));
    Node { authority, credentials, tls }
});

/// The first byte chooses: records to one end of a handshake, a certificate, a file with one, a token,
/// protected frames.
pub fn handshake(bytes: &[u8]) {
    let Some((which, bytes)) = bytes.split_first() else { return };
    NODE.with(|node| match which % 6 {
        0 => records(node, true, bytes),
        1 => records(node, false, bytes),
        2 => {
            let authorities = [node.authority.certificate().to_vec()];
            if let Ok(certificate) = Certificate::verify(bytes, &authorities, NOW) {
                assert_eq!(certificate.name, "s1", "nothing else was signed");
            }
        }
        3 => drop(std::str::from_utf8(bytes).map(Credentials::from_pem)),
        4 => {
            let Ok(token) = std::str::from_utf8(bytes).unwrap_or_default().parse::<Token>() else { return };
            assert_eq!(token.to_string().parse(), Ok(token));
        }
        _ => protected(bytes),
    });
}

/// Whole records, as a connection cuts them off the stream.
fn records(node: &Node, listens: bool, mut bytes: &[u8]) {
    let wanted = Wanted(Suite::ALL.to_vec());
    let exchange = if listens { node.tls.accept(&wanted) } else { node.tls.dial(&wanted) };
    let mut exchange = exchange.expect("a node has a certificate");
    let _ = exchange.outgoing();
    while let Some(header) = bytes.first_chunk::<RECORD_HEADER_BYTES>() {
        let Ok(len) = record_len(header) else { return };
        let Some((record, rest)) = bytes.split_at_checked(RECORD_HEADER_BYTES + len) else { return };
        if exchange.incoming(record).is_err() || exchange.is_done() {
            break;
        }
        bytes = rest;
    }
    let _ = exchange.outgoing();
    assert!(!exchange.is_done(), "the key of the other end is unknown here");
}

/// A frame and a payload without protection.
fn protected(bytes: &[u8]) {
    let Some((tag, frame)) = bytes.split_first_chunk::<TAG_BYTES>() else { return };
    let tag: &Tag = tag;
    for suite in Suite::ALL {
        let mut key = FrameKey::new(suite, b"sixteen bytes k.");
        let mut payload = frame.to_vec();
        let mut check = key.payloads().check(Whose { kind: 3, call: 7 });
        check.arrived(frame);
        assert!(check.finish(&mut payload, tag).is_err(), "{suite:?}");
        if frame.len() >= CLEAR_BYTES {
            assert!(key.open(&mut frame.to_vec(), tag).is_err(), "{suite:?}");
        }
    }
}

pub fn seeds() -> Vec<Vec<u8>> {
    NODE.with(|node| {
        let wanted = Wanted(Suite::ALL.to_vec());
        let hello = node.tls.dial(&wanted).and_then(|mut dialed| dialed.outgoing()).unwrap_or_default();
        let token = format!("weir1.10.1.0.1:7000.{}.{}", "01".repeat(16), "02".repeat(16));
        let with = |which: u8, bytes: &[u8]| [&[which], bytes].concat();
        vec![
            with(0, &hello),
            with(1, &hello),
            with(2, &node.credentials.certificate),
            with(3, node.credentials.to_pem().as_bytes()),
            with(4, token.as_bytes()),
            with(5, &[7; 200]),
        ]
    })
}
