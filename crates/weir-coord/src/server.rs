//! The coordinator as a service: receives messages, passes them to the owner for a decision, sends answers.
//!
//! A member's connection is its membership: when it ends, its targets are down at once.
//! Knows nothing of files.
use crate::addresses::{announced, is_for_others};
use crate::certified::{Certified, no_certificates};
use crate::clocks::ReportedClocks;
use crate::conditions::Reported;
use crate::copies::change_of_copies;
use crate::decide::{add_rule, allow_home, audit_volumes, forbid_home, remove_rule, set_copies};
use crate::door::{CROWD_MAX, Door};
use crate::enrol::Office;
use crate::events::Events;
use crate::followers::Followers;
use crate::kept_map::KeptMap;
use crate::lives::SignsOfLife;
use crate::members::Members;
use crate::news::News;
use crate::owner::{
    Answer, EVENTS_MAX, Event, Kept, Owner, POSITIONS_KEY, PROGRESS_KEY, REBUILD_KEY, ThisCoordinator,
};
use crate::placing::Placing;
use crate::records::{decode_positions, decode_progress, decode_wishes};
use crate::replacing::Replacing;
use crate::standby::Term;
use crate::store::{Revision, Store};
use crate::waits::ReportedWaits;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use tokio::sync::{mpsc, oneshot};
use weir_env::{Addr, BoxFuture, Env, Instant, watch};
use weir_proto::condition::{GetConditions, ReportCondition};
use weir_proto::coord::{
    AccessAdd, AccessRemove, ActFor, AuditVolumes, CaughtUp, ClearTarget, CompareClock, CoordinatorTime,
    Coordinators, FinishUpgrade, GetClocks, GetCoordinators, GetMap, GetStatus, GetWaits, Heartbeat,
    HomeAllow, HomeForbid, Join, LeadNamespace, Leave, MakeGroups, RecordProgress, ReportLink, ReportTarget,
    ReportWaits,
};
use weir_proto::copies::{KeepCopy, SetCopies};
use weir_proto::enrol::{CertificateKept, Enrolled, TokenCreate};
use weir_proto::event::{GetEvents, MarkEvents, ReportEvents};
use weir_proto::map::{ClusterMap, Settings};
use weir_proto::news::CarriesMap;
use weir_proto::sender::Sender;
use weir_proto::version::{Program, check_level};
use weir_proto::watch::Collect;
use weir_proto::{ClusterId, Error, NamespaceId, Request, Result};
use weir_rpc::{Call, Connection, Handled, Policy, Proved, Reply, Service, Trust};

mod targets;

#[derive(Clone, Debug)]
pub struct CoordConfig {
    /// The cluster that the directory must hold, or that a new one becomes. `None`: any cluster, or a new id.
    pub cluster: Option<ClusterId>,
    /// For a new cluster; an existing one has its settings in the map.
    pub settings: Settings,
    /// Placement groups are made once this number of targets is up (and as many as the scheme is wide).
    pub expected_targets: usize,
    /// Found a cluster. Otherwise it must exist.
    pub new: bool,
    /// This program's versions; different ones in tests.
    pub program: Program,
    /// The name in its certificate.
    pub name: String,
    /// Found the cluster's authority if there is none. If there is one, nodes need certificates over
    /// networks.
    pub certified: bool,
    /// Requirements on network connections in that case.
    pub policy: Policy,
    /// Supplied instead of an authority, in the simulator.
    pub trust: Option<Arc<Trust>>,
    /// The term for which it leads, if several coordinators share a store.
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
    name: String,
    events: mpsc::Sender<Event>,
    map: watch::Receiver<Arc<ClusterMap>>,
    /// The addresses at which it serves.
    announced: OnceLock<Vec<Addr>>,
    waits: Mutex<ReportedWaits>,
    clocks: Mutex<ReportedClocks>,
    /// Conditions of nodes, and of this coordinator.
    pub conditions: Reported,
    followers: Followers,
    /// Also read by the owner.
    signs: Arc<SignsOfLife>,
    /// Events that find the owner's queue full.
    crowd: Door,
    /// The log of events.
    pub log: Arc<Events>,
    /// For a cluster with certificates.
    certified: Option<Certified>,
    /// Why this coordinator does not lead any more.
    lost: Arc<OnceLock<Error>>,
}

impl Coordinator {
    pub fn open_store(
        env: Env,
        store: Arc<dyn Store>,
        config: CoordConfig,
    ) -> BoxFuture<'static, Result<Arc<Coordinator>>> {
        Box::pin(async move {
            check_settings(&config.settings)?;
            Self::open_store_unboxed(env, store, config).await
        })
    }
    async fn open_store_unboxed(
        env: Env,
        store: Arc<dyn Store>,
        config: CoordConfig,
    ) -> Result<Arc<Coordinator>> {
        let started = env.clock.now();
        let (kept_map, map) = match KeptMap::open(store.clone()).await? {
            Some(kept) => kept,
            None if config.new => found(&env, &store, &config).await?,
            None => return Err(no_state()),
        };
        let progress = kept(&*store, PROGRESS_KEY, decode_progress, started).await?;
        let positions = kept(&*store, POSITIONS_KEY, decode_positions, started).await?;
        let rebuild = kept(&*store, REBUILD_KEY, decode_wishes, started).await?;
        check_is_meant(&map, &config)?;
        let members = Members::awaiting(&map, &positions.value, started);
        let (publish, published) = watch::channel(Arc::new(map));
        let news = Arc::new(News::new(published.borrow().clone()));
        let (events, inbox) = mpsc::channel(EVENTS_MAX);
        let cluster = published.borrow().cluster;
        let office = Office::open(&env, store.clone(), cluster, config.certified).await?;
        let certified = certified(&env, office, &config, &published, &events)?;
        let (lost, name) = (Arc::<OnceLock<Error>>::default(), config.name.clone());
        let (log, signs) = (Events::new(env.clone(), store.clone()), members.signs.clone());
        let owner = Owner {
            env: env.clone(),
            store,
            kept: kept_map,
            progress,
            positions,
            rebuild,
            map: publish,
            news: news.clone(),
            members,
            events: inbox,
            self_events: events.downgrade(),
            started,
            probing: Default::default(),
            suspects_asked: started,
            placing: Placing::new(config.expected_targets),
            replacing: Replacing::default(),
            cut_links: Default::default(),
            program: config.program,
            ends: false,
            this: ThisCoordinator {
                name: config.name,
                trust: certified.as_ref().map(|certified| certified.trust.clone()),
                term: config.term,
                lost: lost.clone(),
            },
        };
        env.tasks.spawn("coordinator", owner.run());
        let (announced, waits, clocks, conditions) = Default::default();
        Ok(Arc::new(Coordinator {
            env,
            name,
            events,
            followers: Followers::new(published.clone(), news),
            map: published,
            signs,
            crowd: Door::new(CROWD_MAX, "requests wait for a place in the queue"),
            log,
            announced,
            waits,
            clocks,
            conditions,
            certified,
            lost,
        }))
    }

    /// Waits until another coordinator leads, or may lead; returns why. This one must end then: it answers no
    /// more requests.
    pub async fn lost(&self) -> Error {
        self.events.closed().await;
        self.lost.get().cloned().unwrap_or_else(|| Error::stale("this coordinator has stopped"))
    }

    /// Its certificate and trust for networks; absent in a cluster without certificates.
    pub fn trust(&self) -> Option<Arc<Trust>> {
        self.certified.as_ref().map(|certified| certified.trust.clone())
    }

    /// See [`Certified::issue_admin`].
    pub async fn issue_admin(&self, name: &str, public_key: Vec<u8>) -> Result<Enrolled> {
        self.certified.as_ref().ok_or_else(no_certificates)?.issue_admin(name, public_key).await
    }

    pub fn map(&self) -> Arc<ClusterMap> {
        self.map.borrow().clone()
    }

    pub fn cluster(&self) -> ClusterId {
        self.map.borrow().cluster
    }

    /// Sets the addresses at which it serves: members that know some of these try all of them.
    pub fn announce(&self, addrs: &[Addr]) {
        let _ = self.announced.set(addrs.to_vec()); // a coordinator serves once
    }

    /// Before an orderly end: answers those that wait for news of the map, and makes the position of each
    /// target durable. Positions in heartbeats become durable only a second later, so the next coordinator
    /// would accept a copy of a target from that second as the target itself.
    pub async fn record_positions(&self) {
        self.followers.end();
        let (answer, answered) = oneshot::channel();
        if self.events.send(Event::Ends { answer }).await.is_ok() {
            let _ = answered.await; // otherwise the positions are slightly older
        }
    }

    /// The addresses that the caller can use.
    fn addresses(&self, connection: &Connection) -> Coordinators {
        let addrs = self.announced.get().map_or(&[][..], |all| all);
        let here = connection.local_ip();
        let is_near = here.is_none_or(|ip| ip.is_loopback());
        let own = self.env.net.own_ips();
        let concrete = addrs.iter().filter_map(|addr| announced(addr, here, &own).ok()).flatten();
        let usable = concrete.filter(|addr| is_near || is_for_others(addr));
        Coordinators { addrs: usable.map(|addr| addr.to_string()).collect() }
    }

    fn clocks(&self) -> MutexGuard<'_, ReportedClocks> {
        self.clocks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn waits(&self) -> MutexGuard<'_, ReportedWaits> {
        self.waits.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends an event to the owner and waits for its answer.
    fn ask<R: Request>(&self, event: impl FnOnce(Answer<R::Reply>) -> Event) -> Handled
    where
        R::Reply: Send + 'static,
    {
        let answered = self.ask_owner(R::NAME, event);
        Handled::Later(Box::pin(async move { answered.await.map(|reply| Reply::new(&reply)) }))
    }

    fn ask_owner<T: Send + 'static>(
        &self,
        name: &'static str,
        event: impl FnOnce(Answer<T>) -> Event,
    ) -> BoxFuture<'static, Result<T>> {
        let (answer, answered) = oneshot::channel();
        let events = self.events.clone();
        let stopped = move || Error::unavailable(format!("{name}: the coordinator has stopped"));
        // At once: a heartbeat counts when it arrives, even if its sender no longer waits for the answer.
        let full = self.events.try_send(event(answer)).err();
        let shows_life = [Join::NAME, Heartbeat::NAME, Leave::NAME].contains(&name);
        let place = (full.is_some() && !shows_life).then(|| self.crowd.take());
        Box::pin(async move {
            let _place = place.transpose()?;
            if let Some(event) = full {
                events.send(event.into_inner()).await.map_err(|_| stopped())?;
            }
            answered.await.map_err(|_| stopped())?
        })
    }

    /// Like `ask`, for an answer with the newest map: only the changes that the caller lacks, if possible.
    fn ask_map<R: Request>(&self, call: &Call, event: impl FnOnce(Answer<R::Reply>) -> Event) -> Handled
    where
        R::Reply: CarriesMap + 'static,
    {
        let answered = self.ask_owner(R::NAME, event);
        let known = self.followers.known(&call.connection);
        Handled::Later(Box::pin(async move { known.answer(answered.await?) }))
    }

    fn decode_and_ask(&self, call: &Call) -> Result<Handled> {
        let connection = call.connection.id();
        Ok(match call.method {
            Join::METHOD => {
                let join = call.decode::<Join>()?;
                check_joins_as(&join, call.connection.proved())?;
                self.signs.note(&call.connection, self.env.clock.now());
                self.ask_map::<Join>(call, |answer| Event::Join { join, connection, answer })
            }
            Heartbeat::METHOD => {
                let heartbeat = call.decode::<Heartbeat>()?;
                self.signs.note(&call.connection, self.env.clock.now());
                self.ask::<Heartbeat>(|answer| Event::Heartbeat { heartbeat, connection, answer })
            }
            GetMap::METHOD => Handled::Later(self.followers.get_map(&self.env.clock, call)?),
            ReportTarget::METHOD => {
                let report = call.decode::<ReportTarget>()?;
                self.ask_map::<ReportTarget>(call, |answer| Event::Report { report, answer })
            }
            ReportLink::METHOD => {
                let (report, from) = (call.decode::<ReportLink>()?, call.connection.peer().clone());
                self.ask::<ReportLink>(|answer| Event::Link { from, report, answer })
            }
            CaughtUp::METHOD => {
                let said = call.decode::<CaughtUp>()?;
                self.ask_map::<CaughtUp>(call, |answer| Event::CaughtUp { said, answer })
            }
            ClearTarget::METHOD => {
                let ClearTarget { target } = call.decode::<ClearTarget>()?;
                self.ask_map::<ClearTarget>(call, |answer| Event::Clear { target, answer })
            }
            MakeGroups::METHOD => {
                let wanted = call.decode::<MakeGroups>()?;
                self.ask_map::<MakeGroups>(call, |answer| Event::MakeGroups { wanted, answer })
            }
            FinishUpgrade::METHOD => {
                call.decode::<FinishUpgrade>()?;
                let connected = self.followers.connected();
                self.ask_map::<FinishUpgrade>(call, |answer| Event::FinishUpgrade { connected, answer })
            }
            AccessAdd::METHOD => {
                let add = call.decode::<AccessAdd>()?;
                let change = Box::new(move |map: &mut ClusterMap| add_rule(map, &add));
                self.ask_map::<AccessAdd>(call, |answer| Event::Rules { change, answer })
            }
            AccessRemove::METHOD => {
                let remove = call.decode::<AccessRemove>()?;
                let change = Box::new(move |map: &mut ClusterMap| remove_rule(map, &remove));
                self.ask_map::<AccessRemove>(call, |answer| Event::Rules { change, answer })
            }
            Leave::METHOD => {
                let leave = call.decode::<Leave>()?;
                self.ask::<Leave>(|answer| Event::Leave { leave, connection, answer })
            }
            LeadNamespace::METHOD => {
                let lead = call.decode::<LeadNamespace>()?;
                self.ask_map::<LeadNamespace>(call, |answer| Event::Lead { lead, connection, answer })
            }
            RecordProgress::METHOD => {
                let said = call.decode::<RecordProgress>()?;
                self.ask::<RecordProgress>(|answer| Event::Progress { said, connection, answer })
            }
            GetStatus::METHOD => {
                call.decode::<GetStatus>()?;
                self.ask_map::<GetStatus>(call, |answer| Event::Status { answer })
            }
            _ => return self.change_copies(call),
        })
    }

    fn change_copies(&self, call: &Call) -> Result<Handled> {
        let Some((by, change)) = change_of_copies(call)? else { return self.change_rules(call) };
        let connection = call.connection.id();
        Ok(self.ask_map::<KeepCopy>(call, |answer| Event::Copies { by, change, connection, answer }))
    }

    fn change_rules(&self, call: &Call) -> Result<Handled> {
        Ok(match call.method {
            HomeAllow::METHOD => {
                let HomeAllow { rule } = call.decode::<HomeAllow>()?;
                let change = Box::new(move |map: &mut ClusterMap| {
                    let said = format!("homes are allowed in {}", rule.place);
                    allow_home(&mut map.homes, rule).map(|_| said)
                });
                self.ask_map::<HomeAllow>(call, |answer| Event::Rules { change, answer })
            }
            SetCopies::METHOD => {
                let asked = call.decode::<SetCopies>()?;
                let change = Box::new(move |map: &mut ClusterMap| set_copies(map, &asked));
                self.ask_map::<SetCopies>(call, |answer| Event::Rules { change, answer })
            }
            AuditVolumes::METHOD => {
                let AuditVolumes { rule } = call.decode::<AuditVolumes>()?;
                let change = Box::new(move |map: &mut ClusterMap| audit_volumes(map, rule));
                self.ask_map::<AuditVolumes>(call, |answer| Event::Rules { change, answer })
            }
            HomeForbid::METHOD => {
                let HomeForbid { place } = call.decode::<HomeForbid>()?;
                let change = Box::new(move |map: &mut ClusterMap| {
                    forbid_home(&mut map.homes, &place)
                        .map(|()| format!("homes are not allowed in {place} any more"))
                });
                self.ask_map::<HomeForbid>(call, |answer| Event::Rules { change, answer })
            }
            _ => return self.change_targets(call),
        })
    }

    /// Requests that change no map.
    fn answer_at_once(&self, call: &Call) -> Result<Handled> {
        Ok(match call.method {
            ActFor::METHOD => {
                call.connection.act_for(call.decode::<ActFor>()?.uid);
                Handled::Now(Ok(Reply::new(&())))
            }
            GetCoordinators::METHOD => {
                call.decode::<GetCoordinators>()?;
                Handled::Now(Ok(Reply::new(&self.addresses(&call.connection))))
            }
            CompareClock::METHOD => {
                let CompareClock { ahead_ms } = call.decode()?;
                let peer = call.connection.peer();
                let now = self.env.clock.now();
                self.clocks().note(&peer.name, peer.role, ahead_ms, now);
                let wall_ns = self.env.clock.wall().0;
                Handled::Now(Ok(Reply::new(&CoordinatorTime { wall_ns })))
            }
            GetClocks::METHOD => {
                call.decode::<GetClocks>()?;
                Handled::Now(Ok(Reply::new(&self.clocks().list(self.env.clock.now()))))
            }
            ReportCondition::METHOD | GetConditions::METHOD => {
                Handled::Now(Ok(self.conditions.answer(call, self.env.clock.now())?))
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
            Collect::METHOD => {
                Handled::Later(self.followers.collect(&self.env, &self.name, call.decode()?)?)
            }
            ReportEvents::METHOD | GetEvents::METHOD | MarkEvents::METHOD => self.log.answer(call)?,
            TokenCreate::METHOD..=CertificateKept::METHOD => {
                let certified = self.certified.as_ref().ok_or_else(no_certificates)?;
                certified.answer(call, self.addresses(&call.connection).addrs)?
            }
            _ => return Err(call.unknown()),
        })
    }
}

/// Checks that a node joins in the role of its certificate.
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

    fn payload_max(&self, _from: Sender) -> u32 {
        0
    }

    fn disconnected(&self, connection: &Connection) {
        self.followers.forget(connection.id());
        self.signs.forget(connection.id());
        let event = Event::Disconnected { connection: connection.id() };
        if let Err(mpsc::error::TrySendError::Full(event)) = self.events.try_send(event) {
            let events = self.events.clone();
            self.env.tasks.spawn("report a broken connection", async move {
                let _ = events.send(event).await; // the coordinator has stopped
            });
        }
    }
}

/// Checks that the cluster is the expected one, and that this program supports its level.
fn check_is_meant(map: &ClusterMap, config: &CoordConfig) -> Result<()> {
    if let Some(expected) = config.cluster.filter(|c| *c != map.cluster) {
        let what = format!("the coordinator's directory holds cluster {}, not {expected}", map.cluster);
        return Err(Error::denied(what).hint("correct the path or the cluster id"));
    }
    check_level("this coordinator", config.program.level, map.level)
}

fn no_state() -> Error {
    Error::damaged("the coordinator's state is missing").hint("restore its directory from a copy")
}

fn certified(
    env: &Env,
    office: Option<Arc<Office>>,
    config: &CoordConfig,
    maps: &watch::Receiver<Arc<ClusterMap>>,
    events: &mpsc::Sender<Event>,
) -> Result<Option<Certified>> {
    Ok(match (office, &config.trust) {
        (Some(office), _) => {
            Some(Certified::start(env, office, (&config.name, &config.policy), maps, events)?)
        }
        (None, Some(trust)) => Some(Certified::with_trust(env, trust.clone(), maps, events)),
        (None, None) => None,
    })
}

/// A record of the store; the default one if it has not been written yet.
async fn kept<T: Default>(
    store: &dyn Store,
    key: &str,
    decode: fn(&[u8]) -> Result<T>,
    at: Instant,
) -> Result<Kept<T>> {
    Ok(match store.get(key).await? {
        Some(kept) => Kept { value: decode(&kept.value)?, revision: kept.revision, at },
        None => Kept { value: T::default(), revision: Revision(0), at },
    })
}

async fn found(env: &Env, store: &Arc<dyn Store>, config: &CoordConfig) -> Result<(KeptMap, ClusterMap)> {
    let map = ClusterMap {
        cluster: config.cluster.unwrap_or_else(|| ClusterId(env.rng.id_128())),
        version: 1,
        level: config.program.level,
        settings: config.settings.clone(),
        last_namespace: NamespaceId(env.rng.next_u64() as u32 >> 1),
        ..ClusterMap::absent()
    };
    let kept = KeptMap::found(store.clone(), &map).await?;
    let kept =
        kept.ok_or_else(|| Error::stale("another coordinator founds this cluster now; start again"))?;
    Ok((kept, map))
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
    fn another_user_may_read_and_change_nothing() {
        let of_coordinator = methods::all().filter(|method| method.number < 100);
        let open: Vec<&str> = of_coordinator.filter(|m| m.by.has(Sender::User)).map(|m| m.name).collect();
        let expected = [
            "GetMap",
            "GetStatus",
            "GetCoordinators",
            "GetWaits",
            "GetAudit",
            "GetConditions",
            "GetClocks",
            "GetRebuild",
            "GetEvents",
            "GetLives",
        ];
        assert_eq!(open, expected);
    }
}
