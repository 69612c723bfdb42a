//! Authentication over networks: handshakes, the cipher suites of a connection, and removed nodes.
//!
//! Invariant: a connection of a removed node is closed when this node learns of the removal, and no new one
//! is made.
use crate::incoming::{Begin, Incoming, lost};
use std::collections::BTreeMap;
use std::net::IpAddr;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use tokio::io::AsyncWriteExt;
use weir_env::{BoxWriter, watch};
use weir_proto::map::RemovedNode;
use weir_proto::network::Network;
use weir_proto::{Error, Result};
use weir_trust::certificate::{Certificate, Pin};
use weir_trust::frames::Suite;
use weir_trust::handshake::{Agreed, Exchange, Handshakes, Wanted};

/// Default trusted networks: frames within them are protected, but not encrypted. The machine itself, and
/// networks that Internet routers do not forward.
pub const TRUSTED_NETWORKS: [&str; 7] =
    ["127.0.0.0/8", "::1", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7", "fe80::/10"];

/// A node's requirements on connections over networks.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Policy {
    /// Networks in which frames need not be encrypted.
    pub trusted: Vec<Network>,
    /// AES-128-GCM everywhere, no other suite.
    pub only_aes: bool,
}

impl Default for Policy {
    fn default() -> Policy {
        let trusted = TRUSTED_NETWORKS.iter().filter_map(|network| network.parse().ok()).collect();
        Policy { trusted, only_aes: false }
    }
}

impl Policy {
    fn wanted(&self, peer: IpAddr) -> Wanted {
        let is_trusted = self.trusted.iter().any(|network| network.contains(peer));
        Wanted(match (self.only_aes, is_trusted) {
            (true, _) => vec![Suite::Aes],
            (false, true) => vec![Suite::Integrity, Suite::Encryption, Suite::Aes],
            (false, false) => vec![Suite::Encryption, Suite::Aes],
        })
    }
}

/// A node's credentials for networks, and its rules for accepting peers.
pub struct Trust {
    handshakes: Arc<dyn Handshakes>,
    policy: Policy,
    state: Mutex<State>,
    /// The pins of the trusted authorities in the map, the signing one first; none: unknown.
    authorities: watch::Sender<Vec<Pin>>,
}

impl std::fmt::Debug for Trust {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Trust").field("policy", &self.policy).finish_non_exhaustive() // never a key
    }
}

#[derive(Default)]
struct State {
    /// Refused certificates: by name, up to this serial number.
    removed: BTreeMap<String, u64>,
    /// Connections whose peer presented a certificate.
    live: Vec<Live>,
    /// Above this size ended connections are removed from the list.
    tidy_at: usize,
}

/// The handle for ending a connection.
pub(crate) struct Live {
    pub certificate: Certificate,
    /// Whether it has not ended yet.
    pub lives: Box<dyn Fn() -> bool + Send>,
    /// Ends it for this reason.
    pub close: Box<dyn Fn(&str) + Send>,
}

impl Trust {
    pub fn new(handshakes: Arc<dyn Handshakes>, policy: Policy) -> Trust {
        Trust { handshakes, policy, state: Mutex::default(), authorities: watch::Sender::new(Vec::new()) }
    }
    /// Applies the map's data about certificates. Certificates that are no longer valid are refused from now
    /// on, and their connections end: of these names up to these serial numbers, and of other authorities.
    pub fn follow(&self, removed: &[RemovedNode], authorities: &[[u8; 16]]) {
        let removed = removed.iter().map(|node| (node.name.clone(), node.serial)).collect();
        let is_removal = self.state().removed != removed;
        self.state().removed = removed;
        let authorities: Vec<Pin> = authorities.iter().copied().map(Pin).collect();
        let is_rotation = *self.authorities.borrow() != authorities;
        if is_rotation {
            self.authorities.send_replace(authorities);
        }
        if is_removal || is_rotation {
            self.close_removed();
        }
    }
    pub fn authorities(&self) -> watch::Receiver<Vec<Pin>> {
        self.authorities.subscribe()
    }
    /// Ends the connections whose certificates are no longer valid.
    fn close_removed(&self) {
        let live = std::mem::take(&mut self.state().live);
        let (ended, stays): (Vec<Live>, Vec<Live>) =
            live.into_iter().partition(|live| self.check(&live.certificate).is_err());
        self.state().live.extend(stays);
        for Live { certificate, close, .. } in ended {
            if let Err(e) = self.check(&certificate) {
                close(&e.to_string());
            }
        }
    }
    fn check(&self, certificate: &Certificate) -> Result<()> {
        let authorities = self.authorities.borrow();
        if !authorities.is_empty() && !authorities.contains(&certificate.by) {
            return Err(Error::denied(format!(
                "the certificate of {} is of an authority that the cluster has replaced",
                certificate.name
            ))
            .hint("join the cluster again (`weir join`)"));
        }
        drop(authorities);
        match self.state().removed.get(&certificate.name) {
            Some(serial) if certificate.serial <= *serial => {
                Err(Error::denied(format!("{} was removed from the cluster", certificate.name))
                    .hint("a new token lets it join again (`weir token create`)"))
            }
            _ => Ok(()),
        }
    }
    /// Ends the connection when its peer is removed; at once, if it was removed meanwhile.
    pub(crate) fn watch(&self, live: Live) {
        let certificate = live.certificate.clone();
        let mut state = self.state();
        if state.live.len() >= state.tidy_at {
            state.live.retain(|live| (live.lives)());
            state.tidy_at = 2 * state.live.len() + 16;
        }
        state.live.push(live);
        drop(state);
        if self.check(&certificate).is_err() {
            self.close_removed();
        }
    }
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The dialer's side of a handshake.
    pub(crate) async fn dial(
        &self,
        peer: IpAddr,
        incoming: &mut Incoming,
        writer: &mut BoxWriter,
    ) -> Result<Agreed> {
        let mut exchange = self.handshakes.dial(&self.policy.wanted(peer))?;
        send(&mut exchange, writer).await?;
        while !exchange.is_done() {
            let record = match incoming.begin().await? {
                Begin::Handshake(record) => record,
                // A peer that does not support the handshake sends the reason, if it can.
                Begin::Frame => {
                    return Err(Error::unsupported("the node there takes no certificates")
                        .hint("join it to the cluster, too (`weir join`)"));
                }
            };
            let taken = exchange.incoming(&record);
            send(&mut exchange, writer).await?; // an alert, too
            taken?;
        }
        let mut agreed = exchange.agreed()?;
        agreed.peer = agreed.peer.and_then(|peer| self.admit(peer));
        Ok(agreed)
    }

    /// The listener's side, whose first record has arrived.
    pub(crate) async fn accept(
        &self,
        peer: IpAddr,
        first: &[u8],
        incoming: &mut Incoming,
        writer: &mut BoxWriter,
    ) -> Result<Agreed> {
        let mut exchange = self.handshakes.accept(&self.policy.wanted(peer))?;
        let taken = exchange.incoming(first);
        send(&mut exchange, writer).await?;
        taken?;
        while !exchange.is_done() {
            let taken = exchange.incoming(&incoming.record().await?);
            send(&mut exchange, writer).await?;
            taken?;
        }
        let mut agreed = exchange.agreed()?;
        agreed.peer = agreed.peer.and_then(|peer| self.admit(peer));
        Ok(agreed)
    }

    fn admit(&self, peer: Option<Certificate>) -> Result<Option<Certificate>> {
        if let Some(certificate) = &peer {
            self.check(certificate)?;
        }
        Ok(peer)
    }
}

async fn send(exchange: &mut Box<dyn Exchange>, writer: &mut BoxWriter) -> Result<()> {
    let bytes = exchange.outgoing()?;
    if bytes.is_empty() {
        return Ok(());
    }
    writer.write_all(&bytes).await.map_err(|e| lost(&e))?;
    writer.flush().await.map_err(|e| lost(&e))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_are_encrypted_outside_of_trusted_networks() {
        let policy = Policy::default();
        let wanted = |ip: &str| policy.wanted(ip.parse().unwrap()).0;
        for inside in
            ["127.0.0.1", "::1", "10.9.8.7", "172.31.0.1", "192.168.1.1", "fe80::1", "::ffff:10.0.0.1"]
        {
            assert_eq!(wanted(inside)[0], Suite::Integrity, "{inside}");
        }
        for outside in ["8.8.8.8", "172.32.0.1", "2001:db8::1", "::ffff:8.8.8.8"] {
            assert!(wanted(outside).iter().all(|suite| suite.encrypts()), "{outside}");
        }
        let aes = Policy { only_aes: true, ..policy };
        assert_eq!(aes.wanted("127.0.0.1".parse().unwrap()).0, [Suite::Aes]);
    }
}
