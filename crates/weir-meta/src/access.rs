//! Rules for mounts, as the leader caches them: for each connection of a mount its identity, and the rules'
//! decision for each volume.
//!
//! Invariants: the connection of a request counts, not the session that it names. A decision is made again
//! when the rules or a volume's name have changed. A refusal is reported once for each session and volume. If
//! no rule names a mount, and it has no certificate, nothing is looked up for it.
//!
//! Knows nothing of how the volume of an inode is found: `namespace::admit` does.
use crate::record::VolumeRecord;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, Mutex, PoisonError};
use weir_env::Addr;
use weir_proto::access::{AccessRules, AuditRule};
use weir_proto::map::Role;
use weir_proto::{SessionId, VolumeId};
use weir_rpc::Connection;
use weir_trust::rules::{Called, Decision, From, Origin, concern, decide, outside_of_volumes};

/// Sessions and volumes with a reported refusal; beyond this number, some are reported again.
const REPORTED_MAX: usize = 16 * 1024;

/// The rules refused a request of a mount.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Refusal {
    pub node: String,
    /// The mount's address.
    pub from: String,
    /// The user that it named.
    pub uid: Option<u32>,
    /// The request.
    pub what: &'static str,
    pub volume: String,
    pub why: String,
}

/// The sink of refusals.
pub type Refused = dyn Fn(Refusal) + Send + Sync;

/// Refusals that were reported.
pub struct Refusals {
    known: Mutex<BTreeSet<(SessionId, VolumeId)>>,
    sink: Arc<Refused>,
}

impl Refusals {
    pub fn new(sink: Arc<Refused>) -> Refusals {
        Refusals { known: Mutex::default(), sink }
    }
    fn report(&self, session: SessionId, volume: VolumeId, refusal: impl FnOnce() -> Refusal) {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if known.len() >= REPORTED_MAX {
            known.clear();
        }
        let is_news = known.insert((session, volume));
        drop(known);
        if is_news {
            (self.sink)(refusal());
        }
    }
    pub fn forget_session(&self, session: SessionId) {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        known.retain(|(of, _)| *of != session);
    }
}

/// A mount that the rules name.
pub struct Mount {
    pub origin: Origin,
    from: String,
    rules: Arc<AccessRules>,
    /// Cached decisions.
    known: Mutex<BTreeMap<VolumeId, Arc<Decision>>>,
    refusals: Arc<Refusals>,
}

impl Mount {
    pub fn decision(
        &self,
        id: VolumeId,
        volume: impl FnOnce() -> weir_proto::Result<VolumeRecord>,
    ) -> weir_proto::Result<Arc<Decision>> {
        let mut known = self.known.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(decision) = known.get(&id) {
            return Ok(decision.clone());
        }
        let record = volume()?;
        let path = String::from_utf8_lossy(&record.path);
        let decision =
            Arc::new(decide(&self.rules.0, &self.origin, Called { name: &record.name, path: &path }));
        known.insert(id, decision.clone());
        Ok(decision)
    }
    /// The decision for requests that concern no volume yet.
    pub fn outside_of_volumes(&self) -> Decision {
        outside_of_volumes(&self.rules.0, &self.origin)
    }
    pub fn report(
        &self,
        session: SessionId,
        id: VolumeId,
        (volume, why): (&str, &str),
        what: &'static str,
        uid: Option<u32>,
    ) {
        self.refusals.report(session, id, || Refusal {
            node: self.origin.name.clone(),
            from: self.from.clone(),
            uid,
            what,
            volume: volume.to_owned(),
            why: why.to_owned(),
        });
    }
}

/// All mounts, by connection.
pub struct Mounts {
    /// The version of the map that the rules are from.
    map_version: Option<u64>,
    rules: Arc<AccessRules>,
    by_connection: BTreeMap<u64, Option<Arc<Mount>>>,
    pub refusals: Arc<Refusals>,
    /// The audit rules of volumes.
    audits: Arc<Vec<AuditRule>>,
}

impl Mounts {
    pub fn new(refusals: Refusals) -> Mounts {
        Mounts {
            map_version: None,
            rules: Arc::default(),
            by_connection: BTreeMap::new(),
            refusals: Arc::new(refusals),
            audits: Arc::default(),
        }
    }
    /// Reads the rules again if the cluster map has changed.
    pub fn follow(
        &mut self,
        map_version: u64,
        rules: impl FnOnce() -> AccessRules,
        audits: impl FnOnce() -> Vec<AuditRule>,
    ) {
        if self.map_version == Some(map_version) {
            return;
        }
        let rules = rules();
        if *self.rules != rules {
            self.rules = Arc::new(rules);
            self.by_connection.clear();
        }
        self.audits = Arc::new(audits());
        self.map_version = Some(map_version);
    }
    /// The audit rules of volumes, if there are any.
    pub fn audits(&self) -> Option<Arc<Vec<AuditRule>>> {
        (!self.audits.is_empty()).then(|| self.audits.clone())
    }
    /// Volumes were renamed, created or deleted.
    pub fn forget_decisions(&mut self) {
        self.by_connection.clear();
    }
    pub fn disconnected(&mut self, connection: u64) {
        self.by_connection.remove(&connection);
    }
    /// The mount at the other end, if the rules concern it.
    pub fn at(&mut self, connection: &Connection) -> Option<Arc<Mount>> {
        let is_mount = connection.proved().role() == Some(Role::Mount) || connection.is_for_user();
        if !is_mount || (self.rules.is_empty() && !is_certified(connection)) {
            return None;
        }
        if let Some(known) = self.by_connection.get(&connection.id()) {
            return known.clone();
        }
        let origin = origin_of(connection);
        let mount = concern(&self.rules.0, &origin).then(|| {
            let (from, known) = (connection.peer_addr().to_owned(), Mutex::default());
            Arc::new(Mount {
                origin,
                from,
                rules: self.rules.clone(),
                known,
                refusals: self.refusals.clone(),
            })
        });
        if !connection.is_closed() {
            self.by_connection.insert(connection.id(), mount.clone());
        }
        mount
    }
}

fn origin_of(connection: &Connection) -> Origin {
    let from = match (connection.peer_ip(), connection.peer_addr().parse()) {
        (Some(ip), _) => From::Network(ip),
        (None, Ok(Addr::Unix(_))) => From::Local,
        (None, _) => From::Unknown,
    };
    let proved = connection.certificate().map(|certificate| certificate.name.as_str());
    let name = proved.unwrap_or_else(|| node_of(&connection.peer().name)).to_owned();
    Origin { name, from, certified: is_certified(connection) }
}

/// The node of a mount, whose name is `NODE:/MOUNT/POINT`.
fn node_of(name: &str) -> &str {
    name.split_once(":/").map_or(name, |(node, _)| node)
}

/// Whether a certificate proves the name of the other end.
fn is_certified(connection: &Connection) -> bool {
    connection.certificate().is_some()
}
