//! A coordinator of a cluster with certificates: it serves enrolment, and trusts certificates by its
//! records.
use crate::enrol::{NameAuthorities, NodeRegistry, follow_authorities, follow_map, name_authorities};
use crate::owner::Event;
use std::sync::Arc;
use tokio::sync::{mpsc, oneshot};
use weir_env::{Env, watch};
use weir_proto::enrol::{
    CertificateKept, Enrol, Enrolled, GetEnrolment, IssueCertificate, NodeRemove, RenewCertificate,
    RotateAuthority, TokenCreate, TokenRevoke,
};
use weir_proto::map::{ClusterMap, Role};
use weir_proto::sender::Sender;
use weir_proto::version::LEVEL_OF_STEPS;
use weir_proto::{Error, Request, Result, Wire};
use weir_rpc::{Call, Handled, Policy, Proved, Reply, Trust};
use weir_trust::certificate::Certificate;
use weir_trust::handshake::Tls;

/// State of a coordinator with certificates in addition to the map.
pub(crate) struct Certified {
    /// None: its trust was supplied from outside (simulator).
    registry: Option<Arc<NodeRegistry>>,
    pub trust: Arc<Trust>,
    env: Env,
    events: mpsc::WeakSender<Event>,
    maps: watch::Receiver<Arc<ClusterMap>>,
}

impl Certified {
    /// With a given trust, without an authority of its own.
    pub fn with_trust(
        env: &Env,
        trust: Arc<Trust>,
        maps: &watch::Receiver<Arc<ClusterMap>>,
        events: &mpsc::Sender<Event>,
    ) -> Certified {
        Certified { registry: None, trust, env: env.clone(), events: events.downgrade(), maps: maps.clone() }
    }

    pub fn start(
        env: &Env,
        registry: Arc<NodeRegistry>,
        name: &str,
        policy: &Policy,
        maps: &watch::Receiver<Arc<ClusterMap>>,
        events: &mpsc::Sender<Event>,
    ) -> Result<Certified> {
        let clock = env.clone();
        let tls = Tls::of_node(registry.own_credentials(name)?, Arc::new(move || crate::enrol::now(&clock)));
        let tls = Arc::new(tls);
        let trust = Arc::new(Trust::new(tls.clone(), policy.clone()));
        let events = events.downgrade();
        let name_them = named_by(events.clone(), maps.clone());
        env.tasks.spawn("end connections of invalid certificates", follow_map(maps.clone(), trust.clone()));
        let following =
            follow_authorities(env.clone(), Arc::downgrade(&registry), tls, name.to_owned(), name_them);
        env.tasks.spawn("follow the cluster's authorities", following);
        Ok(Certified { registry: Some(registry), trust, env: env.clone(), events, maps: maps.clone() })
    }

    /// For the administrator, when the cluster is founded: a certificate for the commands on other machines.
    pub async fn issue_admin(&self, name: &str, public_key: Vec<u8>) -> Result<Enrolled> {
        let wanted = IssueCertificate { name: name.to_owned(), roles: vec![Role::Console], public_key };
        self.registry()?.issue_unasked(wanted, "the coordinator's machine", Vec::new()).await
    }

    /// Nodes learn of authorities from the map.
    fn check_level(&self) -> Result<()> {
        match self.maps.borrow().level {
            LEVEL_OF_STEPS.. => Ok(()),
            level => Err(Error::unsupported(format!(
                "the authority of a cluster of level {level} cannot be replaced"
            ))
            .hint("`weir upgrade finish` raises the level")),
        }
    }

    fn registry(&self) -> Result<Arc<NodeRegistry>> {
        self.registry.clone().ok_or_else(no_certificates)
    }

    /// Requests about certificates and tokens. `addrs`: the coordinator's addresses as seen from the caller's
    /// network.
    pub fn answer(&self, call: &Call, addrs: Vec<String>) -> Result<Handled> {
        let (from, ip) = (call.connection.peer_addr().to_owned(), call.connection.peer_ip());
        Ok(match call.method {
            TokenCreate::METHOD => {
                let (registry, wanted) = (self.registry()?, call.decode::<TokenCreate>()?);
                may_admit(call.connection.proved(), &wanted.roles)?;
                later(async move { registry.create_token(wanted, addrs).await })
            }
            TokenRevoke::METHOD => {
                let (registry, TokenRevoke { id }) = (self.registry()?, call.decode()?);
                let by = call.connection.proved();
                later(async move { registry.revoke_token(&id, |roles| may_admit(by, roles)).await })
            }
            Enrol::METHOD => {
                let (registry, wanted) = (self.registry()?, call.decode::<Enrol>()?);
                let map = self.maps.borrow().clone();
                let is_free = move |name: &str, roles: &[Role]| check_kind(&map, name, roles);
                later(async move { registry.enrol(wanted, ip, &from, addrs, is_free).await })
            }
            IssueCertificate::METHOD => {
                let (registry, wanted) = (self.registry()?, call.decode::<IssueCertificate>()?);
                later(async move { registry.issue_unasked(wanted, &from, addrs).await })
            }
            RenewCertificate::METHOD => {
                let (registry, wanted) = (self.registry()?, call.decode::<RenewCertificate>()?);
                let holder = certificate_of(call)?;
                later(async move { registry.renew(&holder, &wanted.public_key, addrs).await })
            }
            GetEnrolment::METHOD => {
                call.decode::<GetEnrolment>()?;
                let registry = self.registry()?;
                later(async move { Ok(registry.list().await) })
            }
            CertificateKept::METHOD => {
                let (registry, kept) = (self.registry()?, call.decode::<CertificateKept>()?);
                match call.connection.certificate() {
                    Some(certificate) if certificate.name != kept.name => {
                        return Err(Error::denied(format!("{} is not {}", certificate.name, kept.name)));
                    }
                    _ => later(async move { registry.certificate_kept(&kept).await }),
                }
            }
            RotateAuthority::METHOD => {
                let (registry, RotateAuthority { skip }) = (self.registry()?, call.decode()?);
                self.check_level()?;
                later(async move { registry.rotate(skip).await })
            }
            NodeRemove::METHOD => {
                let (registry, NodeRemove { name }) = (self.registry()?, call.decode()?);
                let (events, (answer, answered)) = (self.events.clone(), oneshot::channel());
                let (now, by) = (crate::enrol::now(&self.env), call.connection.proved());
                later(async move {
                    let removed = registry.remove(&name, |roles| may_admit(by, roles)).await?;
                    let stopped = || Error::unavailable("the coordinator has stopped");
                    let event = Event::RemoveNode { removed, now, answer };
                    let events = events.upgrade().ok_or_else(stopped)?;
                    events.send(event).await.map_err(|_| stopped())?;
                    answered.await.map_err(|_| stopped())?
                })
            }
            _ => return Err(call.unknown()),
        })
    }
}

/// Changes the map so that it names these authorities, if it does not yet.
fn named_by(events: mpsc::WeakSender<Event>, maps: watch::Receiver<Arc<ClusterMap>>) -> NameAuthorities {
    Box::new(move |pins| {
        let (events, is_named) = (events.clone(), maps.borrow().authorities == pins);
        Box::pin(async move {
            if is_named {
                return Ok(());
            }
            let stopped = || Error::unavailable("the coordinator has stopped");
            let (answer, answered) = oneshot::channel();
            let change = Box::new(move |map: &mut ClusterMap| name_authorities(map, pins));
            let events = events.upgrade().ok_or_else(stopped)?;
            events.send(Event::Rules { change, answer }).await.map_err(|_| stopped())?;
            answered.await.map_err(|_| stopped())?.map(drop)
        })
    })
}

fn certificate_of(call: &Call) -> Result<Certificate> {
    let certificate = call.connection.certificate().cloned();
    certificate.ok_or_else(|| Error::invalid("a connection without a certificate renews none"))
}

/// A name of a node of the cluster stays that of a node of its kind: one of another kind would be refused
/// when it starts, after its token was used up.
fn check_kind(map: &ClusterMap, name: &str, roles: &[Role]) -> Result<()> {
    let known = map.nodes.iter().find(|node| node.name == name);
    let Some(known) = known.filter(|node| roles != [node.role]) else { return Ok(()) };
    Err(Error::exists(format!("the name {name:?} belongs to a {} of this cluster", Sender::from(known.role)))
        .hint("choose another name (--name)"))
}

/// An operator admits and removes mounts; only administrators admit other nodes.
fn may_admit(by: Proved, roles: &[Role]) -> Result<()> {
    if by.role() != Some(Role::Operator) || roles.iter().all(|role| *role == Role::Mount) {
        return Ok(());
    }
    Err(Error::denied("an operator admits and removes mounts only").hint("ask an administrator"))
}

fn later<T: Wire>(answer: impl Future<Output = Result<T>> + Send + 'static) -> Handled {
    Handled::Later(Box::pin(async move { answer.await.map(|reply| Reply::new(&reply)) }))
}

/// The answer of a cluster without an authority.
pub(crate) fn no_certificates() -> Error {
    Error::unsupported("this cluster has no certificates").hint(
        "its coordinator gets an authority when it listens beyond this machine (`weir init`, or `weir \
         coord --listen tcp:ADDRESS:PORT`)",
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use weir_proto::NodeId;
    use weir_proto::map::Node;
    use weir_proto::version::Program;

    #[test]
    fn a_nodes_name_is_not_given_to_one_of_another_kind() {
        let (name, host) = ("s1".to_owned(), "h".to_owned());
        let (id, role, program) = (NodeId(1), Role::Storage, Program::this());
        let known = Node { id, name, role, host, addrs: vec![], up: false, program };
        let map = ClusterMap { nodes: vec![known], ..ClusterMap::absent() };
        let refused = |roles: &[Role]| check_kind(&map, "s1", roles).err().map(|e| e.to_string());
        assert_eq!(refused(&[Role::Storage]), None, "it joins again");
        assert_eq!(check_kind(&map, "s2", &[Role::Meta]), Ok(()));
        for roles in [&[Role::Meta][..], &[Role::Mover], &[Role::Storage, Role::Meta]] {
            let why = refused(roles).expect("it is refused");
            assert!(why.contains("belongs to a storage") && why.contains("--name"), "{why}");
        }
    }
}
