//! The cluster's authority and its tokens: which machines may become nodes, and which are removed.
//!
//! One record of the store holds all of it. Invariants: no certificate is sent before the record that names
//! it is durable; a token is used at most its permitted number of times; a name has one holder at a time; a
//! new authority signs nothing before every node trusts it, and the old one stays trusted until every node
//! has a certificate of the new one (unless an administrator continues without some nodes).
use crate::records::{decode_enrolment, encode_enrolment};
use crate::store::{Revision, Store, Swap};
use std::net::IpAddr;
use std::sync::{Arc, Weak};
use std::time::Duration;
use weir_env::{BoxFuture, Env, watch};
use weir_proto::enrol::{
    CertificateKept, Enrol, Enrolled, Enrolment, Holder, IssueCertificate, TOKENS_MAX, TokenCreate,
    TokenMade, TokenShown,
};
use weir_proto::glob::fits;
use weir_proto::map::{ClusterMap, RemovedNode, Role};
use weir_proto::network::Network;
use weir_proto::version::LEVEL_OF_STEPS;
use weir_proto::{ClusterId, Error, ErrorKind, Result, message, wire_enum};
use weir_rpc::Trust;
use weir_trust::certificate::{Authority, Certificate, Credentials, Grant, LIFE_S, NewKey, Pin, check_name};
use weir_trust::handshake::Tls;
use weir_trust::token::Secret;

const RENEW_OWN_EVERY: Duration = Duration::from_secs(LIFE_S / 3);
/// Retry interval when the map could not be changed.
const RETRY_PAUSE: Duration = Duration::from_secs(1);
/// Retry interval while the cluster's level does not allow the change.
const POLL: Duration = Duration::from_secs(60);
/// The key of the record in the store.
pub const ENROLMENT_KEY: &str = "enrolment";
/// Longest validity of a token.
const TTL_S_MAX: u64 = 366 * 86_400;
/// Nodes that ever had a certificate; beyond that the oldest removed ones are forgotten.
const HOLDERS_MAX: usize = 100_000;

message!(
    /// The stored record.
    #[derive(Default)]
    Record {
        /// All trusted authorities; the first one signs.
        authorities: Vec<KeptAuthority>,
        /// Incremented with each step of a rotation.
        round: u32,
        rotation: Rotation,
        last_serial: u64,
        tokens: Vec<Token>,
        holders: Vec<Holder>,
    }
);
message!(KeptAuthority {
    /// PKCS #8.
    key: Vec<u8>,
    certificate: Vec<u8>,
});
wire_enum!(
    /// Progress of replacing the authority. In each step nodes fetch the new state and confirm it.
    #[derive(Default)]
    Rotation {
        #[default]
        None = 0,
        /// Nodes start to trust the new one, the second of the two.
        Announced = 1,
        /// Nodes get certificates of the new one, the first of the two.
        Signing = 2,
    }
);
message!(Token {
    checksum: [u8; 32],
    roles: Vec<Role>,
    uses_left: u32,
    until: u64,
    name: String,
    from: Vec<Network>,
});

impl Token {
    fn id(&self) -> String {
        self.checksum[..4].iter().map(|byte| format!("{byte:02x}")).collect()
    }
}

/// The authorities of a record, ready for use.
pub struct Authorities {
    signs: Authority,
    certificates: Vec<Vec<u8>>,
    round: u32,
}

impl Authorities {
    fn of(cluster: ClusterId, record: &Record) -> Result<Authorities> {
        let Some(first) = record.authorities.first() else {
            return Err(Error::damaged("the cluster's record of certificates names no authority"));
        };
        let signs = Authority::read(cluster, &first.key, first.certificate.clone())
            .map_err(|e| e.doing("read the cluster's authority"))?;
        let certificates = record.authorities.iter().map(|kept| kept.certificate.clone()).collect();
        Ok(Authorities { signs, certificates, round: record.round })
    }
    fn pins(&self) -> Vec<[u8; 16]> {
        self.certificates.iter().map(|certificate| Pin::of(certificate).0).collect()
    }
}

/// The cluster's authority, which makes machines nodes.
pub struct NodeRegistry {
    env: Env,
    cluster: ClusterId,
    store: Arc<dyn Store>,
    authorities: watch::Sender<Arc<Authorities>>,
    /// One change at a time, each durable before the next begins.
    kept: tokio::sync::Mutex<(Record, Revision)>,
}

impl NodeRegistry {
    /// The authority of a cluster that has one; `found`: makes one if there is none.
    pub async fn open(
        env: &Env,
        store: Arc<dyn Store>,
        cluster: ClusterId,
        found: bool,
    ) -> Result<Option<Arc<NodeRegistry>>> {
        let (record, revision) = match store.get(ENROLMENT_KEY).await? {
            Some(kept) => (decode_enrolment(&kept.value)?, kept.revision),
            None if found => {
                let authority = Authority::found(cluster, now(env))?;
                let record = Record { authorities: vec![kept(&authority)], ..Record::default() };
                let revision = write(&*store, Revision(0), &record).await?;
                tracing::info!(
                    "cluster {cluster} has an authority: its nodes need certificates over networks"
                );
                (record, revision)
            }
            None => return Ok(None),
        };
        let authorities = watch::Sender::new(Arc::new(Authorities::of(cluster, &record)?));
        let (env, kept) = (env.clone(), tokio::sync::Mutex::new((record, revision)));
        Ok(Some(Arc::new(NodeRegistry { env, cluster, store, authorities, kept })))
    }

    /// The coordinator's own credentials. They are not among the holders, and above all serial numbers: the
    /// removal of a node that had the same name does not affect them. As an auditor it asks other servers for
    /// the troubles that it notes.
    pub fn own_credentials(&self, name: &str) -> Result<Credentials> {
        let roles = vec![Role::Coordinator, Role::Auditor];
        let name = name.chars().map(|c| if c.is_ascii_alphanumeric() || "._-".contains(c) { c } else { '-' });
        let (key, authorities) = (NewKey::make()?, self.authorities.borrow().clone());
        let grant = Grant { name: name.collect(), roles, serial: u64::MAX };
        let certificate = authorities.signs.issue(&grant, key.public(), now(&self.env))?;
        key.with(certificate, authorities.certificates.clone())
    }

    pub async fn create_token(&self, wanted: TokenCreate, addrs: Vec<String>) -> Result<TokenMade> {
        let TokenCreate { roles, uses, ttl_s, name, from } = wanted;
        if roles.is_empty() || roles.contains(&Role::Coordinator) {
            return Err(Error::invalid(
                "a token is for one or more of storage, meta, mount, mover, admin, operator and auditor",
            ));
        }
        if uses == 0 || ttl_s == 0 || ttl_s > TTL_S_MAX {
            return Err(Error::invalid(format!(
                "a token for {uses} uses within {ttl_s} s: expected at least one, and 1 s to {} days",
                TTL_S_MAX / 86_400
            )));
        }
        let secret = Secret(self.env.rng.id_128());
        let until = now(&self.env) + ttl_s;
        let token = Token { checksum: secret.checksum(), roles, uses_left: uses, until, name, from };
        self.change(|record, now| {
            record.tokens.retain(|token| token.until > now);
            if record.tokens.len() >= TOKENS_MAX {
                return Err(Error::invalid(format!("there are {TOKENS_MAX} tokens")).hint("revoke some"));
            }
            record.tokens.push(token);
            Ok(())
        })
        .await?;
        let pin = self.authorities.borrow().signs.pin().0;
        Ok(TokenMade { secret: secret.0, pin, addrs, until })
    }

    /// `check` refuses a token for roles that the caller may not admit.
    pub async fn revoke_token(&self, id: &str, check: impl FnOnce(&[Role]) -> Result<()>) -> Result<()> {
        self.change(|record, _| {
            let at = record.tokens.iter().position(|token| token.id() == id);
            let at = at.ok_or_else(|| {
                Error::not_found(format!("there is no token {id:?}")).hint("`weir token list` shows all")
            })?;
            check(&record.tokens[at].roles)?;
            record.tokens.remove(at);
            Ok(())
        })
        .await
    }

    /// Enrols a machine that presents a token, at `ip` if it connects over a network. `is_free`: refuses a
    /// name for nodes of these roles.
    pub async fn enrol(
        &self,
        wanted: Enrol,
        ip: Option<IpAddr>,
        from: &str,
        addrs: Vec<String>,
        is_free: impl FnOnce(&str, &[Role]) -> Result<()>,
    ) -> Result<Enrolled> {
        check_name(&wanted.name)?;
        let checksum = Secret(wanted.secret).checksum();
        let name = wanted.name.clone();
        let grant = self
            .change(|record, now| {
                let roles = use_token(record, checksum, &name, ip, now)?;
                is_free(&name, &roles)?;
                hold(record, &name, roles, from, now)
            })
            .await?;
        self.issue(&grant, &wanted.public_key, addrs)
    }

    /// Issues a certificate without a token.
    pub async fn issue_unasked(
        &self,
        wanted: IssueCertificate,
        from: &str,
        addrs: Vec<String>,
    ) -> Result<Enrolled> {
        let IssueCertificate { name, roles, public_key } = wanted;
        check_name(&name)?;
        let grant = self
            .change(|record, now| match record.holders.iter().any(|held| holds(held, &name, &roles, now)) {
                true => renewed(record, &name, now),
                false => hold(record, &name, roles, from, now),
            })
            .await?;
        self.issue(&grant, &public_key, addrs)
    }

    pub async fn renew(
        &self,
        holder: &Certificate,
        public_key: &[u8],
        addrs: Vec<String>,
    ) -> Result<Enrolled> {
        let grant = self.change(|record, now| renewed(record, &holder.name, now)).await?;
        self.issue(&grant, public_key, addrs)
    }

    /// Refuses the node from now on; returns the entry for the map. `check` as in `revoke_token`.
    pub async fn remove(&self, name: &str, check: impl FnOnce(&[Role]) -> Result<()>) -> Result<RemovedNode> {
        self.change(|record, _| {
            let held = record.holders.iter_mut().find(|held| held.name == name && !held.removed);
            let held = held.ok_or_else(|| {
                Error::not_found(format!("there is no node {name:?}")).hint("`weir node list` shows all")
            })?;
            check(&held.roles)?;
            held.removed = true;
            Ok(RemovedNode { name: held.name.clone(), serial: held.serial, until: held.until })
        })
        .await
    }

    pub async fn list(&self) -> Enrolment {
        let now = now(&self.env);
        let kept = self.kept.lock().await;
        let shown = |token: &Token| TokenShown {
            id: token.id(),
            roles: token.roles.clone(),
            uses_left: token.uses_left,
            until: token.until,
            name: token.name.clone(),
            from: token.from.clone(),
        };
        let tokens = kept.0.tokens.iter().filter(|token| token.until > now && token.uses_left > 0);
        Enrolment {
            holders: kept.0.holders.clone(),
            tokens: tokens.map(shown).collect(),
            authorities: kept.0.authorities.iter().map(|kept| Pin::of(&kept.certificate).0).collect(),
            round: kept.0.round,
        }
    }

    /// Begins to replace the authority; with `skip`, continues a rotation without the missing nodes.
    pub async fn rotate(&self, skip: bool) -> Result<Enrolment> {
        let new = kept(&Authority::found(self.cluster, now(&self.env))?);
        self.change(|record, now| rotate(record, new, skip, now)).await?;
        Ok(self.list().await)
    }

    /// The node confirms that it stored the certificate and authorities of this round.
    pub async fn certificate_kept(&self, kept: &CertificateKept) -> Result<()> {
        self.change(|record, now| {
            let round = kept.round.min(record.round);
            holder_of(record, &kept.name)?.round = round;
            go_on(record, now);
            Ok(())
        })
        .await
    }

    fn issue(&self, grant: &Grant, public_key: &[u8], coordinators: Vec<String>) -> Result<Enrolled> {
        let issuing = self.authorities.borrow().clone();
        let certificate = issuing.signs.issue(grant, public_key, now(&self.env))?;
        let Grant { name, roles, .. } = grant.clone();
        let (authorities, round) = (issuing.certificates.clone(), issuing.round);
        Ok(Enrolled { cluster: self.cluster, name, roles, certificate, authorities, coordinators, round })
    }

    /// Decides on a copy, makes it durable, and only then answers.
    async fn change<T>(&self, decide: impl FnOnce(&mut Record, u64) -> Result<T>) -> Result<T> {
        let mut kept = self.kept.lock().await;
        let mut draft = kept.0.clone();
        let decided = decide(&mut draft, now(&self.env))?;
        let authorities = Authorities::of(self.cluster, &draft)?;
        let revision = write(&*self.store, kept.1, &draft).await?;
        if draft.round != kept.0.round {
            self.authorities.send_replace(Arc::new(authorities));
        }
        *kept = (draft, revision);
        Ok(decided)
    }
}

fn kept(authority: &Authority) -> KeptAuthority {
    KeptAuthority { key: authority.key().to_vec(), certificate: authority.certificate().to_vec() }
}

fn rotate(record: &mut Record, new: KeptAuthority, skip: bool, now: u64) -> Result<()> {
    match (record.rotation, skip) {
        (Rotation::None, true) => {
            return Err(Error::invalid(
                "the authority is not being replaced, so no step of that can be skipped",
            )
            .hint("`weir ca rotate` begins it"));
        }
        (Rotation::None, false) => {
            record.authorities.push(new);
            (record.rotation, record.round) = (Rotation::Announced, record.round + 1);
        }
        (_, true) => next_step(record),
        (_, false) => {}
    }
    go_on(record, now);
    Ok(())
}

/// Takes all steps for which every node has completed the previous one.
fn go_on(record: &mut Record, now: u64) {
    let is_missing = |held: &Holder, round| !held.removed && held.until > now && held.round < round;
    while record.rotation != Rotation::None
        && !record.holders.iter().any(|held| is_missing(held, record.round))
    {
        next_step(record);
    }
}

fn next_step(record: &mut Record) {
    record.rotation = match record.rotation {
        Rotation::None => return,
        Rotation::Announced => {
            record.authorities.reverse();
            Rotation::Signing
        }
        Rotation::Signing => {
            record.authorities.truncate(1);
            Rotation::None
        }
    };
    record.round += 1;
}

/// Seconds since 1970.
pub fn now(env: &Env) -> u64 {
    u64::try_from(env.clock.wall().0 / 1_000_000_000).unwrap_or(0)
}

async fn write(store: &dyn Store, before: Revision, record: &Record) -> Result<Revision> {
    match store.compare_and_swap(ENROLMENT_KEY, before, encode_enrolment(record)).await? {
        Swap::Done(revision) => Ok(revision),
        Swap::Conflict(_) => Err(Error::stale("another coordinator has changed the cluster's certificates")),
    }
}

/// Disconnects the coordinator's peers whose certificates are no longer valid.
pub async fn follow_map(mut maps: watch::Receiver<Arc<ClusterMap>>, trust: Arc<Trust>) {
    loop {
        let map = maps.borrow().clone();
        let known = map.version;
        trust.follow(&map.removed, &map.authorities);
        if maps.wait_for(|map| map.version != known).await.is_err() {
            return;
        }
    }
}

/// A function that writes these authorities into the cluster map.
pub type NameAuthorities = Box<dyn Fn(Vec<[u8; 16]>) -> BoxFuture<'static, Result<()>> + Send + Sync>;

/// Renews the coordinator's own certificate long before it expires, and when another authority signs. The
/// authorities go into the map (through `name_them`) after the coordinator trusts them itself.
pub async fn follow_authorities(
    env: Env,
    registry: Weak<NodeRegistry>,
    tls: Arc<Tls>,
    name: String,
    name_them: NameAuthorities,
) {
    let Some(mut authorities) = registry.upgrade().map(|registry| registry.authorities.subscribe()) else {
        return;
    };
    loop {
        let pins = {
            let Some(registry) = registry.upgrade() else { return };
            match registry.own_credentials(&name) {
                Ok(credentials) => tls.renew(credentials),
                Err(e) => tracing::error!("the coordinator's certificate was not renewed: {e}"),
            }
            registry.authorities.borrow().pins()
        };
        let wait = match name_them(pins.clone()).await {
            Ok(()) => RENEW_OWN_EVERY,
            // Until the upgrade is finished.
            Err(e) if e.kind == ErrorKind::Unsupported => POLL,
            Err(e) => {
                tracing::error!("the cluster map does not name the authorities yet: {e}");
                RETRY_PAUSE
            }
        };
        let changed = authorities.wait_for(|authorities| authorities.pins() != pins);
        if let Ok(Err(_)) = env.clock.timeout(wait, changed).await {
            return; // the coordinator ends
        }
    }
}

/// The change of the map that names the authorities.
///
/// `Unsupported`: the cluster's level is too low for that.
pub fn name_authorities(map: &mut ClusterMap, pins: Vec<[u8; 16]>) -> Result<String> {
    if map.level < LEVEL_OF_STEPS {
        return Err(Error::unsupported(format!(
            "a cluster of level {} does not name its authorities",
            map.level
        )));
    }
    let done = match (map.authorities.len(), pins.len()) {
        (1, 2) => "a new authority is announced to all nodes",
        (2, 2) => "nodes get certificates of the new authority",
        (2, 1) => "the old authority is dropped: its certificates are invalid",
        _ => "the cluster's authority is in the map",
    };
    map.authorities = pins;
    Ok(done.to_owned())
}

fn use_token(
    record: &mut Record,
    checksum: [u8; 32],
    name: &str,
    ip: Option<IpAddr>,
    now: u64,
) -> Result<Vec<Role>> {
    let refused = |why: &str| {
        Error::denied(format!("the token is refused: {why}")).hint("`weir token create` makes a new one")
    };
    let token = record.tokens.iter_mut().find(|token| token.checksum == checksum);
    let token = token.ok_or_else(|| refused("this cluster does not know it, or has revoked it"))?;
    if token.until <= now {
        return Err(refused("its time is over"));
    }
    if token.uses_left == 0 {
        return Err(refused("it was used as often as it may be"));
    }
    if !fits(&token.name, name) {
        return Err(refused(&format!("it is for nodes called {:?}, not for {name:?}", token.name)));
    }
    let is_from_there = |network: &Network| ip.is_some_and(|ip| network.contains(ip));
    if !token.from.is_empty() && !token.from.iter().any(is_from_there) {
        return Err(refused("it is for another network"));
    }
    token.uses_left -= 1;
    Ok(token.roles.clone())
}

fn holds(held: &Holder, name: &str, roles: &[Role], now: u64) -> bool {
    held.name == name && held.roles == roles && !held.removed && held.until > now
}

fn holder_of<'a>(record: &'a mut Record, name: &str) -> Result<&'a mut Holder> {
    let held = record.holders.iter_mut().find(|held| held.name == name && !held.removed);
    held.ok_or_else(|| Error::denied(format!("{name} was removed from the cluster")))
}

/// Renews the holder's certificate.
fn renewed(record: &mut Record, name: &str, now: u64) -> Result<Grant> {
    let serial = record.last_serial + 1;
    let held = holder_of(record, name)?;
    (held.serial, held.until) = (serial, now + LIFE_S);
    let grant = Grant { name: held.name.clone(), roles: held.roles.clone(), serial };
    record.last_serial = serial;
    Ok(grant)
}

/// Assigns the name to a new holder.
fn hold(record: &mut Record, name: &str, roles: Vec<Role>, from: &str, now: u64) -> Result<Grant> {
    if record.holders.iter().any(|held| held.name == name && !held.removed && held.until > now) {
        return Err(Error::exists(format!("a node {name:?} has a certificate already"))
            .hint(format!("choose another name (--name), or `weir node remove {name}` first")));
    }
    record.last_serial += 1;
    record.holders.retain(|held| held.name != name);
    if record.holders.len() >= HOLDERS_MAX {
        let gone = record.holders.iter().position(|held| held.removed || held.until <= now);
        let gone = gone.ok_or_else(|| Error::invalid(format!("the cluster has {HOLDERS_MAX} nodes")))?;
        record.holders.remove(gone);
    }
    let (serial, round) = (record.last_serial, record.round);
    let (joined, until, removed) = (now, now + LIFE_S, false);
    let (name, from) = (name.to_owned(), from.to_owned());
    record.holders.push(Holder {
        name: name.clone(),
        roles: roles.clone(),
        serial,
        joined,
        until,
        from,
        removed,
        round,
    });
    Ok(Grant { name, roles, serial })
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: u64 = 1_800_000_000;

    /// A cluster with two nodes, `a` and `b`.
    fn with_nodes() -> Record {
        let authorities = vec![kept(&Authority::found(ClusterId([7; 16]), NOW).unwrap())];
        let mut record = Record { authorities, ..Record::default() };
        for name in ["a", "b"] {
            hold(&mut record, name, vec![Role::Mount], "here", NOW).unwrap();
        }
        record
    }
    fn keeps(record: &mut Record, name: &str, round: u32) {
        record.holders.iter_mut().find(|held| held.name == name).unwrap().round = round;
        go_on(record, NOW);
    }

    #[test]
    fn a_new_authority_signs_when_all_nodes_believe_it() {
        let mut record = with_nodes();
        let (old, new) =
            (record.authorities[0].clone(), kept(&Authority::found(ClusterId([7; 16]), NOW).unwrap()));
        rotate(&mut record, new.clone(), false, NOW).unwrap();
        assert_eq!(
            (record.rotation, &record.authorities),
            (Rotation::Announced, &vec![old.clone(), new.clone()])
        );
        keeps(&mut record, "a", 1);
        assert_eq!(record.rotation, Rotation::Announced, "b does not trust it yet");
        rotate(&mut record, old.clone(), false, NOW).unwrap();
        assert_eq!(
            record.authorities.len(),
            2,
            "a second rotation does not begin before the first has ended"
        );
        keeps(&mut record, "b", 1);
        assert_eq!((record.rotation, &record.authorities), (Rotation::Signing, &vec![new.clone(), old]));
        keeps(&mut record, "a", 2);
        keeps(&mut record, "b", 1);
        assert_eq!(record.rotation, Rotation::Signing, "b shows a certificate of the old one");
        keeps(&mut record, "b", 2);
        assert_eq!((record.rotation, record.round, &record.authorities), (Rotation::None, 3, &vec![new]));
    }

    #[test]
    fn a_rotation_goes_on_without_nodes_that_are_skipped() {
        let mut record = with_nodes();
        let new = kept(&Authority::found(ClusterId([7; 16]), NOW).unwrap());
        assert!(
            rotate(&mut record, new.clone(), true, NOW).unwrap_err().to_string().contains("weir ca rotate")
        );
        rotate(&mut record, new.clone(), false, NOW).unwrap();
        rotate(&mut record, new.clone(), true, NOW).unwrap();
        assert_eq!(record.rotation, Rotation::Signing);
        rotate(&mut record, new.clone(), true, NOW).unwrap();
        assert_eq!((record.rotation, &record.authorities), (Rotation::None, &vec![new.clone()]));
        // A removed node, or one whose certificate has expired, delays no rotation.
        let mut record = with_nodes();
        record.holders[0].removed = true;
        record.holders[1].until = NOW;
        rotate(&mut record, new.clone(), false, NOW).unwrap();
        assert_eq!((record.rotation, record.authorities), (Rotation::None, vec![new]));
    }

    fn with_token(uses: u32) -> (Record, [u8; 32]) {
        let checksum = Secret([9; 16]).checksum();
        let from = vec!["10.1.0.0/16".parse().unwrap()];
        let (roles, name) = (vec![Role::Storage], "s*".to_owned());
        let token = Token { checksum, roles, uses_left: uses, until: NOW + 60, name, from };
        (Record { tokens: vec![token], ..Record::default() }, checksum)
    }
    fn ip(text: &str) -> Option<IpAddr> {
        Some(text.parse().unwrap())
    }

    #[test]
    fn a_token_is_good_for_what_it_was_made_for() {
        let (mut record, checksum) = with_token(1);
        for (checksum, name, from, now, why) in [
            ([0; 32], "s1", ip("10.1.0.1"), NOW, "does not know it"),
            (checksum, "m1", ip("10.1.0.1"), NOW, "for nodes called \"s*\""),
            (checksum, "s1", ip("10.2.0.1"), NOW, "another network"),
            (checksum, "s1", None, NOW, "another network"),
            (checksum, "s1", ip("10.1.0.1"), NOW + 60, "its time is over"),
        ] {
            let refused = use_token(&mut record, checksum, name, from, now).unwrap_err();
            assert!(refused.context.contains(why), "{refused:?}");
        }
        assert_eq!(use_token(&mut record, checksum, "s1", ip("10.1.0.1"), NOW), Ok(vec![Role::Storage]));
        let again = use_token(&mut record, checksum, "s2", ip("10.1.0.1"), NOW).unwrap_err();
        assert!(again.context.contains("used as often"), "{again:?}");
    }

    #[test]
    fn a_name_has_one_holder_at_a_time() {
        let mut record = Record::default();
        let mut hold = |name: &str, now| hold(&mut record, name, vec![Role::Mount], "here", now);
        assert_eq!(hold("n1", NOW).unwrap().serial, 1);
        assert!(hold("n1", NOW + 1).unwrap_err().to_string().contains("weir node remove n1"));
        assert_eq!(hold("n2", NOW).unwrap().serial, 2);
        assert_eq!(hold("n1", NOW + LIFE_S).unwrap().serial, 3, "the first certificate has ended");
        record.holders[1].removed = true;
        assert_eq!(super::hold(&mut record, "n1", vec![], "there", NOW + LIFE_S).unwrap().serial, 4);
        assert_eq!(record.holders.iter().filter(|held| held.name == "n1").count(), 1);
    }
}
