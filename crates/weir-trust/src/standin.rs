//! A handshake without secrets, for the simulator: records, rules, suites and frames are those of the real
//! one, and the same seed gives the same run. Certificates are presented and accepted unverified; keys are
//! derived from the bytes that both ends have sent. Pure.
use crate::certificate::{Certificate, Pin};
use crate::frames::{FrameKey, KEY_BYTES, Keys, Suite};
use crate::handshake::{Agreed, Exchange, FIRST_BYTE, Handshakes, Now, RECORD_HEADER_BYTES, Wanted};
use sha2::{Digest, Sha256};
use weir_proto::map::Role;
use weir_proto::{ClusterId, Error, Result, Wire, message};

message!(
    /// The message of each end.
    Shown {
        cluster: ClusterId,
        name: String,
        roles: Vec<Role>,
        serial: u64,
        until: u64,
        /// The suites that it accepts; the listener's answer has the chosen one.
        suites: Vec<String>,
    }
);

/// Handshakes of a node with this certificate.
pub struct StandIn {
    certificate: Certificate,
    now: Now,
}

impl StandIn {
    pub fn new(certificate: Certificate, now: Now) -> StandIn {
        StandIn { certificate, now }
    }
    fn exchange(&self, wanted: &Wanted, listens: bool) -> Box<dyn Exchange> {
        Box::new(StandInExchange {
            own: self.certificate.clone(),
            now: (self.now)(),
            wanted: wanted.clone(),
            listens,
            sent: None,
            received: None,
            chosen: None,
        })
    }
}

impl Handshakes for StandIn {
    fn dial(&self, wanted: &Wanted) -> Result<Box<dyn Exchange>> {
        Ok(self.exchange(wanted, false))
    }
    fn accept(&self, wanted: &Wanted) -> Result<Box<dyn Exchange>> {
        Ok(self.exchange(wanted, true))
    }
}

struct StandInExchange {
    own: Certificate,
    now: u64,
    wanted: Wanted,
    listens: bool,
    sent: Option<Vec<u8>>,
    received: Option<Shown>,
    chosen: Option<Suite>,
}

impl Exchange for StandInExchange {
    fn outgoing(&mut self) -> Result<Vec<u8>> {
        if self.sent.is_some() || self.listens && self.received.is_none() {
            return Ok(Vec::new());
        }
        let suites = match self.chosen {
            Some(chosen) => vec![chosen],
            None => self.wanted.0.clone(),
        };
        let Certificate { cluster, name, roles, serial, until, .. } = self.own.clone();
        let suites = suites.into_iter().map(|suite| suite.protocol().to_owned()).collect();
        let body = Shown { cluster, name, roles, serial, until, suites }.to_bytes();
        let mut record = vec![FIRST_BYTE, 3, 3];
        record.extend_from_slice(&(body.len() as u16).to_be_bytes());
        record.extend_from_slice(&body);
        self.sent = Some(body);
        Ok(record)
    }
    fn incoming(&mut self, record: &[u8]) -> Result<()> {
        let shown = Shown::from_bytes(record.get(RECORD_HEADER_BYTES..).unwrap_or_default())?;
        let theirs: Vec<Suite> =
            shown.suites.iter().filter_map(|suite| Suite::find(suite.as_bytes())).collect();
        // The listener chooses: at the dialer its choice is the only suite in the other end's message.
        let common = self.wanted.0.iter().copied().find(|suite| theirs.contains(suite));
        self.chosen = Some(common.ok_or_else(|| Error::denied("the two ends have no suite in common"))?);
        self.received = Some(shown);
        Ok(())
    }
    fn is_done(&self) -> bool {
        self.sent.is_some() && self.received.is_some()
    }
    fn agreed(self: Box<Self>) -> Result<Agreed> {
        let (Some(sent), Some(received), Some(suite)) = (self.sent, self.received, self.chosen) else {
            return Err(Error::invalid("the handshake is not done"));
        };
        let theirs = received.to_bytes();
        let (dialer, listener) = if self.listens { (&theirs, &sent) } else { (&sent, &theirs) };
        let key = |which: &[u8]| {
            let digest = Sha256::new().chain_update(which).chain_update(dialer).chain_update(listener);
            let mut key = [0; KEY_BYTES];
            key.copy_from_slice(&digest.finalize()[..KEY_BYTES]);
            FrameKey::new(suite, &key)
        };
        let (of_dialer, of_listener) = (key(b"dialed"), key(b"listen"));
        let keys = match self.listens {
            true => Keys { suite, send: of_listener, receive: of_dialer },
            false => Keys { suite, send: of_dialer, receive: of_listener },
        };
        let Shown { cluster, name, roles, serial, until, .. } = received;
        let peer = match () {
            () if cluster != self.own.cluster => {
                Err(Error::denied(format!("{name} belongs to cluster {cluster}")))
            }
            () if until < self.now => Err(Error::denied(format!("the certificate of {name} has expired"))),
            () => Ok(Some(Certificate { cluster, name, roles, serial, until, by: Pin::default() })),
        };
        Ok(Agreed { peer, keys })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::Arc;

    fn node(name: &str, cluster: u8, until: u64) -> StandIn {
        let (cluster, name) = (ClusterId([cluster; 16]), name.to_owned());
        StandIn::new(
            Certificate { cluster, name, roles: vec![Role::Mount], serial: 1, until, by: Pin::default() },
            Arc::new(|| 1000),
        )
    }

    fn meet(a: &StandIn, b: &StandIn) -> (Agreed, Agreed) {
        let wanted = Wanted(vec![Suite::Encryption, Suite::Integrity]);
        let (mut dialed, mut accepted) = (a.dial(&wanted).unwrap(), b.accept(&wanted).unwrap());
        accepted.incoming(&dialed.outgoing().unwrap()).unwrap();
        dialed.incoming(&accepted.outgoing().unwrap()).unwrap();
        assert!(dialed.is_done() && accepted.is_done());
        (dialed.agreed().unwrap(), accepted.agreed().unwrap())
    }

    #[test]
    fn both_ends_have_the_same_keys_and_know_each_other() {
        let (mut dialed, mut accepted) = meet(&node("a", 1, 2000), &node("b", 1, 2000));
        assert_eq!(dialed.keys.suite, Suite::Encryption);
        assert_eq!(
            (dialed.peer.unwrap().unwrap().name, accepted.peer.unwrap().unwrap().name),
            ("b".into(), "a".into())
        );
        let mut frame = vec![1; 70];
        let tag = dialed.keys.send.seal(&mut frame);
        accepted.keys.receive.open(&mut frame, &tag).unwrap();
        let tag = accepted.keys.send.seal(&mut frame);
        dialed.keys.receive.open(&mut frame, &tag).unwrap();
        assert_eq!(frame, vec![1; 70]);
    }

    #[test]
    fn the_rules_hold_here_too() {
        assert!(meet(&node("a", 1, 2000), &node("b", 2, 2000)).0.peer.is_err());
        assert!(
            meet(&node("a", 1, 900), &node("b", 1, 2000)).1.peer.unwrap_err().context.contains("expired")
        );
    }
}
