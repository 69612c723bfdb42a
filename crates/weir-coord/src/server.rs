//! The coordinator as a service: takes messages in, lets the owner decide, sends answers out.
//!
//! A member's connection is its membership: when it ends, its targets are down at once.
//! Knows nothing of files.
use crate::addresses::{announced, is_for_others};
use crate::decide::{Connected, add_rule, allow_home, forbid_home, remove_rule};
use crate::enrol::{Office, follow_removals, renew_own};
use crate::members::Members;
use crate::owner::{Answer, EVENTS_MAX, Event, Kept, MAP_KEY, Owner, POSITIONS_KEY, PROGRESS_KEY, Seat};
use crate::records::{decode_map, decode_positions, decode_progress, encode_map};
use crate::standby::Term;
use crate::store::{Revision, Store, Swap};
use crate::waits::ReportedWaits;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;
use tokio::sync::{mpsc, oneshot};
use weir_env::{Addr, BoxFuture, Env, watch};
use weir_proto::coord::{
    AccessAdd, AccessRemove, CaughtUp, ClearTarget, Coordinators, FinishUpgrade, GetCoordinators, GetMap,
    GetStatus, GetWaits, Heartbeat, HomeAllow, HomeForbid, Join, LeadNamespace, Leave, MakeGroups, MapReply,
    RecordProgress, ReportLink, ReportTarget, ReportWaits,
};
use weir_proto::enrol::{
    Enrol, GetEnrolment, IssueCertificate, NodeRemove, RenewCertificate, TokenCreate, TokenRevoke,
};
use weir_proto::map::{ClusterMap, Role, Settings};
use weir_proto::sender::Sender;
use weir_proto::version::{Program, check_level};
use weir_proto::{ClusterId, Error, NamespaceId, Request, Result, Wire};
use weir_rpc::{Call, Connection, Handled, Policy, Proved, Reply, Service, Trust};
use weir_trust::handshake::Tls;

/// The longest that a `GetMap` is kept waiting.
const MAP_WAIT_MS_MAX: u32 = 60_000;

#[derive(Clone, Debug)]
pub struct CoordConfig {
    /// The cluster that the directory must hold, or that a new one becomes. `None`: whatever is there, or a new id.
    pub cluster: Option<ClusterId>,
    /// For a new cluster; an existing one has them in its map.
    pub settings: Settings,
    /// Placement groups are made once so many targets are up (and as many as the scheme is wide).
    pub expected_targets: usize,
    /// Found a cluster. Otherwise it must be there.
    pub new: bool,
    /// What this program can; another one in tests.
    pub program: Program,
    /// The name in its certificate.
    pub name: String,
    /// Found the cluster's authority if there is none. Where there is one, nodes need certificates over
    /// networks.
    pub certified: bool,
    /// What connections over networks have to be like then.
    pub policy: Policy,
    /// Given instead of an authority, in the simulator.
    pub trust: Option<Arc<Trust>>,
    /// For how long it leads, where several coordinators share a store.
    pub term: Option<Term>,
}

impl CoordConfig {
    /// 1 MiB cells, 10 s leases, 5 s of silence; an existing cluster.
    pub fn new(scheme: weir_proto::map::Scheme, expected_targets: usize) -> CoordConfig {
        let settings = Settings { scheme, cell_shift: 20, lease_ms: 10_000, target_silence_ms: 5_000 };
        CoordConfig {
            cluster: None,
            settings,
            expected_targets,
            new: false,
            program: Program::this(),
            name: "coordinator".to_owned(),
            certified: false,
            policy: Policy::default(),
            trust: None,
            term: None,
        }
    }
}

/// The service that owns the cluster map.
pub struct Coordinator {
    env: Env,
    events: mpsc::Sender<Event>,
    map: watch::Receiver<Arc<ClusterMap>>,
    /// Where it serves.
    announced: OnceLock<Vec<Addr>>,
    waits: Mutex<ReportedWaits>,
    /// By connection: who follows the map, and the level that it knows.
    clients: Mutex<BTreeMap<u64, Connected>>,
    /// Of a cluster with certificates.
    certified: Option<Certified>,
    /// Why this coordinator leads no more.
    lost: Arc<OnceLock<Error>>,
}

struct Certified {
    office: Option<Arc<Office>>,
    trust: Arc<Trust>,
}

impl Coordinator {
    pub async fn open_store(
        env: Env,
        store: Arc<dyn Store>,
        config: CoordConfig,
    ) -> Result<Arc<Coordinator>> {
        check_settings(&config.settings)?;
        let (map, revision) = match store.get(MAP_KEY).await? {
            Some(kept) => (decode_map(&kept.value)?, kept.revision),
            None if config.new => found(&env, &*store, &config).await?,
            None => {
                return Err(Error::damaged(
                    "the coordinator's state is not there; hint: restore its directory from a copy"
                        .to_owned(),
                ));
            }
        };
        let progress = kept(&*store, PROGRESS_KEY, decode_progress).await?;
        let positions = kept(&*store, POSITIONS_KEY, decode_positions).await?;
        if let Some(expected) = config.cluster.filter(|c| *c != map.cluster) {
            return Err(Error::denied(format!(
                "the coordinator's directory holds cluster {}, not {expected}; hint: correct the path or the cluster id",
                map.cluster
            )));
        }
        check_level("this coordinator", config.program.level, map.level)?;
        let started = env.clock.now();
        let members = Members::awaiting(&map, &positions.value, started);
        let (publish, published) = watch::channel(Arc::new(map));
        let (events, inbox) = mpsc::channel(EVENTS_MAX);
        let cluster = published.borrow().cluster;
        let office = Office::open(&env, store.clone(), cluster, config.certified).await?;
        let certified = match (office, &config.trust) {
            (Some(office), _) => Some(Certified::start(&env, office, &config, &published)?),
            (None, Some(trust)) => Some(Certified { office: None, trust: trust.clone() }),
            (None, None) => None,
        };
        let lost = Arc::<OnceLock<Error>>::default();
        let owner = Owner {
            env: env.clone(),
            store,
            revision,
            progress,
            positions,
            positions_kept: started,
            map: publish,
            members,
            expected_targets: config.expected_targets,
            events: inbox,
            self_events: events.downgrade(),
            started,
            probing: Default::default(),
            suspects_asked: started,
            cut_links: Default::default(),
            program: config.program,
            ends: false,
            seat: Seat {
                name: config.name,
                trust: certified.as_ref().map(|certified| certified.trust.clone()),
                term: config.term,
                lost: lost.clone(),
            },
        };
        env.tasks.spawn("coordinator", owner.run());
        let (announced, waits, clients) = Default::default();
        Ok(Arc::new(Coordinator { env, events, map: published, announced, waits, clients, certified, lost }))
    }

    /// Waits until another coordinator leads, or may lead; says why. This one has to end then: it answers
    /// nothing any more.
    pub async fn lost(&self) -> Error {
        self.events.closed().await;
        self.lost.get().cloned().unwrap_or_else(|| Error::stale("this coordinator has stopped"))
    }

    /// How it proves itself over networks; absent in a cluster without certificates.
    pub fn trust(&self) -> Option<Arc<Trust>> {
        self.certified.as_ref().map(|certified| certified.trust.clone())
    }

    /// For the administrator, when the cluster is founded: a certificate for the commands on other machines.
    pub async fn issue_admin(&self, name: &str, public_key: Vec<u8>) -> Result<weir_proto::enrol::Enrolled> {
        let wanted = IssueCertificate { name: name.to_owned(), roles: vec![Role::Console], public_key };
        self.office()?.issue_unasked(wanted, "the coordinator's machine", Vec::new()).await
    }

    fn office(&self) -> Result<Arc<Office>> {
        let office = self.certified.as_ref().and_then(|certified| certified.office.clone());
        office.ok_or_else(|| {
            Error::unsupported(
                "this cluster has no certificates; hint: its coordinator gets an authority when it listens beyond this machine \
                 (`weir init`, or `weir coord --listen tcp:ADDRESS:PORT`)",
            )
        })
    }

    pub fn map(&self) -> Arc<ClusterMap> {
        self.map.borrow().clone()
    }

    pub fn cluster(&self) -> ClusterId {
        self.map.borrow().cluster
    }

    /// Where it serves from now on: members that were given some of these addresses try all.
    pub fn announce(&self, addrs: &[Addr]) {
        let _ = self.announced.set(addrs.to_vec()); // a coordinator serves once
    }

    /// Before an orderly end: makes durable how far each target is. What heartbeats tell becomes durable a second later only, so the
    /// next coordinator would take a copy of a target from that second for the target.
    pub async fn record_positions(&self) {
        let (answer, answered) = oneshot::channel();
        if self.events.send(Event::Ends { answer }).await.is_ok() {
            let _ = answered.await; // it is known a little less exactly then
        }
    }

    /// As the caller can use them.
    fn addresses(&self, connection: &Connection) -> Coordinators {
        let addrs = self.announced.get().map_or(&[][..], |all| all);
        let here = connection.local_ip();
        let is_near = here.is_none_or(|ip| ip.is_loopback());
        let concrete = addrs.iter().filter_map(|addr| announced(addr, here).ok());
        let usable = concrete.filter(|addr| is_near || is_for_others(addr));
        Coordinators { addrs: usable.map(|addr| addr.to_string()).collect() }
    }

    fn clients(&self) -> MutexGuard<'_, BTreeMap<u64, Connected>> {
        self.clients.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whoever uses the cluster follows its map: only those that know its level do.
    fn follows(&self, connection: &Connection) -> Result<()> {
        let hello = connection.peer();
        check_level(&connection.peer_name(), hello.level, self.map.borrow().level)?;
        let client = Connected { name: hello.name.clone(), level: hello.level };
        self.clients().insert(connection.id(), client);
        if connection.is_closed() {
            self.clients().remove(&connection.id()); // its end may have been told already
        }
        Ok(())
    }

    fn waits(&self) -> MutexGuard<'_, ReportedWaits> {
        self.waits.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Hands an event to the owner and waits for its answer.
    fn ask<R: Request>(&self, event: impl FnOnce(Answer<R::Reply>) -> Event) -> Handled
    where
        R::Reply: Send + 'static,
    {
        let (answer, answered) = oneshot::channel();
        let events = self.events.clone();
        let stopped = || Error::unavailable(format!("{}: the coordinator has stopped", R::NAME));
        // At once: a heartbeat counts when it came, also if its sender does not wait for the answer any more.
        let full = self.events.try_send(event(answer)).err();
        Handled::Later(Box::pin(async move {
            if let Some(event) = full {
                events.send(event.into_inner()).await.map_err(|_| stopped())?;
            }
            answered.await.map_err(|_| stopped())?.map(|reply| Reply::new(&reply))
        }))
    }

    fn wait_for_map(&self, request: GetMap) -> BoxFuture<'static, Result<Reply>> {
        let (clock, mut map) = (self.env.clock.clone(), self.map.clone());
        let patience = Duration::from_millis(u64::from(request.wait_ms.min(MAP_WAIT_MS_MAX)));
        Box::pin(async move {
            // Also what is older than asked for: somebody who knows more than the coordinator must learn that.
            let other = |m: &Arc<ClusterMap>| m.version != request.newer_than;
            let newer = clock.timeout(patience, map.wait_for(other)).await;
            let map = newer.ok().and_then(|found| found.ok().map(|m| m.clone()));
            Ok(Reply::new(&MapReply { map }))
        })
    }

    fn decode_and_ask(&self, call: &Call) -> Result<Handled> {
        let connection = call.connection.id();
        Ok(match call.method {
            Join::METHOD => {
                let join = call.decode::<Join>()?;
                check_joins_as(&join, call.connection.proved())?;
                self.ask::<Join>(|answer| Event::Join { join, connection, answer })
            }
            Heartbeat::METHOD => {
                let heartbeat = call.decode::<Heartbeat>()?;
                self.ask::<Heartbeat>(|answer| Event::Heartbeat { heartbeat, connection, answer })
            }
            GetMap::METHOD => {
                self.follows(&call.connection)?;
                Handled::Later(self.wait_for_map(call.decode::<GetMap>()?))
            }
            ReportTarget::METHOD => {
                let report = call.decode::<ReportTarget>()?;
                self.ask::<ReportTarget>(|answer| Event::Report { report, answer })
            }
            ReportLink::METHOD => {
                let (report, from) = (call.decode::<ReportLink>()?, call.connection.peer().clone());
                self.ask::<ReportLink>(|answer| Event::Link { from, report, answer })
            }
            CaughtUp::METHOD => {
                let said = call.decode::<CaughtUp>()?;
                self.ask::<CaughtUp>(|answer| Event::CaughtUp { said, answer })
            }
            ClearTarget::METHOD => {
                let ClearTarget { target } = call.decode::<ClearTarget>()?;
                self.ask::<ClearTarget>(|answer| Event::Clear { target, answer })
            }
            MakeGroups::METHOD => {
                let wanted = call.decode::<MakeGroups>()?;
                self.ask::<MakeGroups>(|answer| Event::MakeGroups { wanted, answer })
            }
            FinishUpgrade::METHOD => {
                call.decode::<FinishUpgrade>()?;
                let connected = self.clients().values().cloned().collect();
                self.ask::<FinishUpgrade>(|answer| Event::FinishUpgrade { connected, answer })
            }
            AccessAdd::METHOD => {
                let add = call.decode::<AccessAdd>()?;
                let change = Box::new(move |map: &mut ClusterMap| add_rule(map, &add));
                self.ask::<AccessAdd>(|answer| Event::Rules { change, answer })
            }
            AccessRemove::METHOD => {
                let remove = call.decode::<AccessRemove>()?;
                let change = Box::new(move |map: &mut ClusterMap| remove_rule(map, &remove));
                self.ask::<AccessRemove>(|answer| Event::Rules { change, answer })
            }
            Leave::METHOD => {
                let leave = call.decode::<Leave>()?;
                self.ask::<Leave>(|answer| Event::Leave { leave, connection, answer })
            }
            LeadNamespace::METHOD => {
                let lead = call.decode::<LeadNamespace>()?;
                self.ask::<LeadNamespace>(|answer| Event::Lead { lead, connection, answer })
            }
            RecordProgress::METHOD => {
                let said = call.decode::<RecordProgress>()?;
                self.ask::<RecordProgress>(|answer| Event::Progress { said, connection, answer })
            }
            GetStatus::METHOD => {
                call.decode::<GetStatus>()?;
                self.ask::<GetStatus>(|answer| Event::Status { answer })
            }
            _ => return self.change_homes(call),
        })
    }

    fn change_homes(&self, call: &Call) -> Result<Handled> {
        Ok(match call.method {
            HomeAllow::METHOD => {
                let HomeAllow { rule } = call.decode::<HomeAllow>()?;
                let change = Box::new(move |map: &mut ClusterMap| {
                    let said = format!("homes are allowed in {}", rule.place);
                    allow_home(&mut map.homes, rule).map(|_| said)
                });
                self.ask::<HomeAllow>(|answer| Event::Rules { change, answer })
            }
            HomeForbid::METHOD => {
                let HomeForbid { place } = call.decode::<HomeForbid>()?;
                let change = Box::new(move |map: &mut ClusterMap| {
                    forbid_home(&mut map.homes, &place)
                        .map(|()| format!("homes are not allowed in {place} any more"))
                });
                self.ask::<HomeForbid>(|answer| Event::Rules { change, answer })
            }
            _ => return self.enrolment(call),
        })
    }

    /// Certificates and tokens.
    fn enrolment(&self, call: &Call) -> Result<Handled> {
        let addrs = self.addresses(&call.connection).addrs;
        let (from, ip) = (call.connection.peer_addr().to_owned(), call.connection.peer_ip());
        Ok(match call.method {
            TokenCreate::METHOD => {
                let (office, wanted) = (self.office()?, call.decode::<TokenCreate>()?);
                may_admit(call.connection.proved(), &wanted.roles)?;
                later(async move { office.create_token(wanted, addrs).await })
            }
            TokenRevoke::METHOD => {
                let (office, TokenRevoke { id }) = (self.office()?, call.decode()?);
                let by = call.connection.proved();
                later(async move { office.revoke_token(&id, |roles| may_admit(by, roles)).await })
            }
            Enrol::METHOD => {
                let (office, wanted) = (self.office()?, call.decode::<Enrol>()?);
                later(async move { office.enrol(wanted, ip, &from, addrs).await })
            }
            IssueCertificate::METHOD => {
                let (office, wanted) = (self.office()?, call.decode::<IssueCertificate>()?);
                later(async move { office.issue_unasked(wanted, &from, addrs).await })
            }
            RenewCertificate::METHOD => {
                let (office, wanted) = (self.office()?, call.decode::<RenewCertificate>()?);
                let holder = call.connection.certificate().cloned();
                let holder =
                    holder.ok_or_else(|| Error::invalid("a connection without a certificate renews none"))?;
                later(async move { office.renew(&holder, &wanted.public_key, addrs).await })
            }
            GetEnrolment::METHOD => {
                call.decode::<GetEnrolment>()?;
                let office = self.office()?;
                later(async move { Ok(office.list().await) })
            }
            NodeRemove::METHOD => {
                let (office, NodeRemove { name }) = (self.office()?, call.decode()?);
                let (events, (answer, answered)) = (self.events.clone(), oneshot::channel());
                let (now, by) = (crate::enrol::now(&self.env), call.connection.proved());
                later(async move {
                    let removed = office.remove(&name, |roles| may_admit(by, roles)).await?;
                    let stopped = || Error::unavailable("the coordinator has stopped");
                    let event = Event::RemoveNode { removed, now, answer };
                    events.send(event).await.map_err(|_| stopped())?;
                    answered.await.map_err(|_| stopped())?
                })
            }
            _ => return self.answer_at_once(call),
        })
    }

    /// What changes no map.
    fn answer_at_once(&self, call: &Call) -> Result<Handled> {
        Ok(match call.method {
            GetCoordinators::METHOD => {
                call.decode::<GetCoordinators>()?;
                Handled::Now(Ok(Reply::new(&self.addresses(&call.connection))))
            }
            ReportWaits::METHOD => {
                let reported = call.decode::<ReportWaits>()?;
                self.waits().note(reported, self.env.clock.now());
                Handled::Now(Ok(Reply::new(&())))
            }
            GetWaits::METHOD => {
                call.decode::<GetWaits>()?;
                Handled::Now(Ok(Reply::new(&self.waits().list(self.env.clock.now()))))
            }
            _ => return Err(call.unknown()),
        })
    }
}

impl Certified {
    fn start(
        env: &Env,
        office: Arc<Office>,
        config: &CoordConfig,
        maps: &watch::Receiver<Arc<ClusterMap>>,
    ) -> Result<Certified> {
        let clock = env.clone();
        let tls =
            Tls::of_node(office.own_credentials(&config.name)?, Arc::new(move || crate::enrol::now(&clock)));
        let tls = Arc::new(tls);
        let trust = Arc::new(Trust::new(tls.clone(), config.policy.clone()));
        trust.remove(&maps.borrow().removed);
        env.tasks.spawn("cut removed nodes off", follow_removals(maps.clone(), trust.clone()));
        let renewing = renew_own(env.clone(), Arc::downgrade(&office), tls, config.name.clone());
        env.tasks.spawn("renew the coordinator's certificate", renewing);
        Ok(Certified { office: Some(office), trust })
    }
}

/// An operator admits and removes mounts; other nodes are for administrators.
fn may_admit(by: Proved, roles: &[Role]) -> Result<()> {
    if by.role() != Some(Role::Operator) || roles.iter().all(|role| *role == Role::Mount) {
        return Ok(());
    }
    Err(Error::denied("an operator admits and removes mounts only; hint: ask an administrator"))
}

fn later<T: Wire>(answer: impl Future<Output = Result<T>> + Send + 'static) -> Handled {
    Handled::Later(Box::pin(async move { answer.await.map(|reply| Reply::new(&reply)) }))
}

/// A node joins as what it is.
fn check_joins_as(join: &Join, who: Proved) -> Result<()> {
    if who.role() == Some(join.role) {
        return Ok(());
    }
    Err(Error::denied(format!(
        "{:?} joins as a {}, and is a {}",
        join.name,
        Sender::from(join.role),
        who.sender()
    )))
}

impl Service for Coordinator {
    fn handle(&self, call: Call) -> Handled {
        if self.events.is_closed() {
            return Handled::Now(Err(Error::unavailable("this coordinator leads no more")));
        }
        self.decode_and_ask(&call).unwrap_or_else(|e| Handled::Now(Err(e)))
    }

    fn admits_guests(&self) -> bool {
        true
    }

    fn admits_strangers(&self) -> bool {
        self.certified.is_some()
    }

    fn payload_max(&self) -> u32 {
        0
    }

    fn disconnected(&self, connection: &Connection) {
        self.clients().remove(&connection.id());
        let event = Event::Disconnected { connection: connection.id() };
        if let Err(mpsc::error::TrySendError::Full(event)) = self.events.try_send(event) {
            let events = self.events.clone();
            self.env.tasks.spawn("tell of a broken connection", async move {
                let _ = events.send(event).await; // the coordinator has stopped
            });
        }
    }
}

/// A record of the store; an empty one if it has not been written yet.
async fn kept<T: Default>(
    store: &dyn Store,
    key: &str,
    decode: impl FnOnce(&[u8]) -> Result<T>,
) -> Result<Kept<T>> {
    Ok(match store.get(key).await? {
        Some(kept) => Kept { value: decode(&kept.value)?, revision: kept.revision },
        None => Kept { value: T::default(), revision: Revision(0) },
    })
}

async fn found(env: &Env, store: &dyn Store, config: &CoordConfig) -> Result<(ClusterMap, Revision)> {
    let map = ClusterMap {
        cluster: config.cluster.unwrap_or_else(|| ClusterId(env.rng.id_128())),
        version: 1,
        level: config.program.level,
        settings: config.settings.clone(),
        nodes: vec![],
        targets: vec![],
        groups: vec![],
        namespaces: vec![],
        homes: vec![],
        last_namespace: NamespaceId(env.rng.next_u64() as u32 >> 1),
        removed: vec![],
        access: Default::default(),
    };
    match store.compare_and_swap(MAP_KEY, Revision(0), encode_map(&map)).await? {
        Swap::Done(revision) => Ok((map, revision)),
        Swap::Conflict(_) => {
            Err(Error::stale("another coordinator founds this cluster now; start again".to_owned()))
        }
    }
}

fn check_settings(settings: &Settings) -> Result<()> {
    if !(16..=22).contains(&settings.cell_shift) {
        return Err(Error::invalid(format!(
            "cell size 2^{}: expected 64 KiB (2^16) to 4 MiB (2^22)",
            settings.cell_shift
        )));
    }
    if settings.target_silence_ms < 200 || settings.lease_ms < 200 {
        return Err(Error::invalid("lease_ms and target_silence_ms: at least 200 ms".to_owned()));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use weir_proto::methods;

    #[test]
    fn another_user_may_look_and_change_nothing() {
        let of_coordinator = methods::all().filter(|method| method.number < 100);
        let open: Vec<&str> = of_coordinator.filter(|m| m.by.has(Sender::User)).map(|m| m.name).collect();
        assert_eq!(open, ["GetMap", "GetStatus", "GetCoordinators", "GetWaits", "GetAudit"]);
    }
}
