//! The cluster's authority and its tokens: who may become a node, and who is none any more.
//!
//! One record of the store holds all of it. Invariants: no certificate leaves before the record that names
//! it is durable; a token is used no more often than it may be; a name has one holder at a time.
use crate::records::{decode_enrolment, encode_enrolment};
use crate::store::{Revision, Store, Swap};
use std::net::IpAddr;
use std::sync::{Arc, Weak};
use std::time::Duration;
use weir_env::{Env, watch};
use weir_proto::enrol::{
    Enrol, Enrolled, Enrolment, Holder, IssueCertificate, TOKENS_MAX, TokenCreate, TokenMade, TokenShown,
};
use weir_proto::glob::fits;
use weir_proto::map::{ClusterMap, RemovedNode, Role};
use weir_proto::network::Network;
use weir_proto::{ClusterId, Error, Result, message};
use weir_rpc::Trust;
use weir_trust::certificate::{Authority, Certificate, Credentials, Grant, LIFE_S, check_name};
use weir_trust::handshake::Tls;
use weir_trust::token::Secret;

const RENEW_OWN_EVERY: Duration = Duration::from_secs(LIFE_S / 3);
/// The key of the record in the store.
pub const ENROLMENT_KEY: &str = "enrolment";
/// What a token may be good for at most.
const TTL_S_MAX: u64 = 366 * 86_400;
/// Nodes that ever had a certificate; the oldest of those that were removed are forgotten.
const HOLDERS_MAX: usize = 100_000;

message!(
    /// What is kept.
    #[derive(Default)]
    Record {
        /// The authority's private key (PKCS #8) and certificate.
        key: Vec<u8>,
        certificate: Vec<u8>,
        last_serial: u64,
        tokens: Vec<Token>,
        holders: Vec<Holder>,
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

/// The office where machines become nodes.
pub struct Office {
    env: Env,
    cluster: ClusterId,
    store: Arc<dyn Store>,
    authority: Authority,
    /// One change at a time, each durable before the next begins.
    kept: tokio::sync::Mutex<(Record, Revision)>,
}

impl Office {
    /// The authority of a cluster that has one; `found`: makes one where there is none.
    pub async fn open(
        env: &Env,
        store: Arc<dyn Store>,
        cluster: ClusterId,
        found: bool,
    ) -> Result<Option<Arc<Office>>> {
        let (record, revision) = match store.get(ENROLMENT_KEY).await? {
            Some(kept) => (decode_enrolment(&kept.value)?, kept.revision),
            None if found => {
                let authority = Authority::found(cluster, now(env))?;
                let (key, certificate) = (authority.key().to_vec(), authority.certificate().to_vec());
                let record = Record { key, certificate, ..Record::default() };
                let revision = write(&*store, Revision(0), &record).await?;
                tracing::info!(
                    "cluster {cluster} has an authority: its nodes need certificates over networks"
                );
                (record, revision)
            }
            None => return Ok(None),
        };
        let authority = Authority::read(cluster, &record.key, record.certificate.clone())
            .map_err(|e| e.doing("read the cluster's authority"))?;
        let (env, kept) = (env.clone(), tokio::sync::Mutex::new((record, revision)));
        Ok(Some(Arc::new(Office { env, cluster, store, authority, kept })))
    }

    /// What the coordinator proves itself with. Not among the holders, and above all serial numbers: the
    /// removal of a node that had the same name does not concern it.
    pub fn own_credentials(&self, name: &str) -> Result<Credentials> {
        let roles = vec![Role::Coordinator];
        let name = name.chars().map(|c| if c.is_ascii_alphanumeric() || "._-".contains(c) { c } else { '-' });
        self.authority.issue_own(&Grant { name: name.collect(), roles, serial: u64::MAX }, now(&self.env))
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
                return Err(Error::invalid(format!("there are {TOKENS_MAX} tokens; hint: revoke some")));
            }
            record.tokens.push(token);
            Ok(())
        })
        .await?;
        Ok(TokenMade { secret: secret.0, pin: self.authority.pin().0, addrs, until })
    }

    /// `check` refuses a token for roles that are not the caller's to admit.
    pub async fn revoke_token(&self, id: &str, check: impl FnOnce(&[Role]) -> Result<()>) -> Result<()> {
        self.change(|record, _| {
            let at = record.tokens.iter().position(|token| token.id() == id);
            let at = at.ok_or_else(|| {
                Error::not_found(format!("there is no token {id:?}; hint: `weir token list`"))
            })?;
            check(&record.tokens[at].roles)?;
            record.tokens.remove(at);
            Ok(())
        })
        .await
    }

    /// A machine that shows a token, at `ip` if it came over a network.
    pub async fn enrol(
        &self,
        wanted: Enrol,
        ip: Option<IpAddr>,
        from: &str,
        addrs: Vec<String>,
    ) -> Result<Enrolled> {
        check_name(&wanted.name)?;
        let checksum = Secret(wanted.secret).checksum();
        let name = wanted.name.clone();
        let grant = self
            .change(|record, now| {
                let roles = use_token(record, checksum, &name, ip, now)?;
                hold(record, &name, roles, from, now)
            })
            .await?;
        self.issue(&grant, &wanted.public_key, addrs)
    }

    /// A certificate that needs no token.
    pub async fn issue_unasked(
        &self,
        wanted: IssueCertificate,
        from: &str,
        addrs: Vec<String>,
    ) -> Result<Enrolled> {
        let IssueCertificate { name, roles, public_key } = wanted;
        check_name(&name)?;
        let grant = self.change(|record, now| hold(record, &name, roles, from, now)).await?;
        self.issue(&grant, &public_key, addrs)
    }

    pub async fn renew(
        &self,
        holder: &Certificate,
        public_key: &[u8],
        addrs: Vec<String>,
    ) -> Result<Enrolled> {
        let name = holder.name.clone();
        let grant = self
            .change(|record, now| {
                let serial = record.last_serial + 1;
                let held = record.holders.iter_mut().find(|held| held.name == name && !held.removed);
                let held =
                    held.ok_or_else(|| Error::denied(format!("{name} was removed from the cluster")))?;
                (held.serial, held.until) = (serial, now + LIFE_S);
                let grant = Grant { name: held.name.clone(), roles: held.roles.clone(), serial };
                record.last_serial = serial;
                Ok(grant)
            })
            .await?;
        self.issue(&grant, public_key, addrs)
    }

    /// Refuses the node from now on; what the map is to say of it. `check` as in `revoke_token`.
    pub async fn remove(&self, name: &str, check: impl FnOnce(&[Role]) -> Result<()>) -> Result<RemovedNode> {
        self.change(|record, _| {
            let held = record.holders.iter_mut().find(|held| held.name == name && !held.removed);
            let held = held.ok_or_else(|| {
                Error::not_found(format!("there is no node {name:?}; hint: `weir node list`"))
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
        Enrolment { holders: kept.0.holders.clone(), tokens: tokens.map(shown).collect() }
    }

    fn issue(&self, grant: &Grant, public_key: &[u8], coordinators: Vec<String>) -> Result<Enrolled> {
        let certificate = self.authority.issue(grant, public_key, now(&self.env))?;
        let Grant { name, roles, .. } = grant.clone();
        let authorities = vec![self.authority.certificate().to_vec()];
        Ok(Enrolled { cluster: self.cluster, name, roles, certificate, authorities, coordinators })
    }

    /// Decides on a copy, makes it durable, and only then answers.
    async fn change<T>(&self, decide: impl FnOnce(&mut Record, u64) -> Result<T>) -> Result<T> {
        let mut kept = self.kept.lock().await;
        let mut draft = kept.0.clone();
        let decided = decide(&mut draft, now(&self.env))?;
        let revision = write(&*self.store, kept.1, &draft).await?;
        *kept = (draft, revision);
        Ok(decided)
    }
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

/// Peers of the coordinator that are removed lose their connections.
pub async fn follow_removals(mut maps: watch::Receiver<Arc<ClusterMap>>, trust: Arc<Trust>) {
    loop {
        let known = maps.borrow().version;
        trust.remove(&maps.borrow().removed);
        if maps.wait_for(|map| map.version != known).await.is_err() {
            return;
        }
    }
}

/// The coordinator's own certificate is made anew long before it ends.
pub async fn renew_own(env: Env, office: Weak<Office>, tls: Arc<Tls>, name: String) {
    loop {
        env.clock.sleep(RENEW_OWN_EVERY).await;
        let Some(office) = office.upgrade() else { return };
        match office.own_credentials(&name) {
            Ok(credentials) => tls.renew(credentials),
            Err(e) => tracing::error!("the coordinator's certificate was not renewed: {e}"),
        }
    }
}

fn use_token(
    record: &mut Record,
    checksum: [u8; 32],
    name: &str,
    ip: Option<IpAddr>,
    now: u64,
) -> Result<Vec<Role>> {
    let refused = |why: &str| {
        Error::denied(format!("the token is refused: {why}; hint: `weir token create` makes a new one"))
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

/// Gives the name to a new holder.
fn hold(record: &mut Record, name: &str, roles: Vec<Role>, from: &str, now: u64) -> Result<Grant> {
    if record.holders.iter().any(|held| held.name == name && !held.removed && held.until > now) {
        return Err(Error::exists(format!(
            "a node {name:?} has a certificate already; hint: choose another name, or `weir node remove {name}` first"
        )));
    }
    record.last_serial += 1;
    record.holders.retain(|held| held.name != name);
    if record.holders.len() >= HOLDERS_MAX {
        let gone = record.holders.iter().position(|held| held.removed || held.until <= now);
        let gone = gone.ok_or_else(|| Error::invalid(format!("the cluster has {HOLDERS_MAX} nodes")))?;
        record.holders.remove(gone);
    }
    let serial = record.last_serial;
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
    });
    Ok(Grant { name, roles, serial })
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: u64 = 1_800_000_000;

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
        assert!(hold("n1", NOW + 1).unwrap_err().context.contains("weir node remove n1"));
        assert_eq!(hold("n2", NOW).unwrap().serial, 2);
        assert_eq!(hold("n1", NOW + LIFE_S).unwrap().serial, 3, "the first certificate is over");
        record.holders[1].removed = true;
        assert_eq!(super::hold(&mut record, "n1", vec![], "there", NOW + LIFE_S).unwrap().serial, 4);
        assert_eq!(record.holders.iter().filter(|held| held.name == "n1").count(), 1);
    }
}
