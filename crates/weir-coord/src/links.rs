//! Links to the nodes that serve targets: which of them are cut, and through which nodes calls go meanwhile.
//!
//! A link is cut when its node does not answer here, but quickly answers another node, which this node
//! reaches by a new connection in the same time. An overloaded machine is late on both ways: no calls are
//! relayed to it through others. So no redundancy is given up for a broken link, and a node whose own network
//! is broken harms only itself. A node that answers neither this one nor others is reported to the
//! coordinator, which may still reach it.
//!
//! Invariants: a call that was sent is not sent again here (its caller knows whether that is safe); it is
//! forwarded once; one probe of a node at a time; a link that was cut is not used again before it has carried
//! large packets in both directions.
use crate::cluster::{Cluster, Shared, is_temporary};
use bytes::Bytes;
use state::{AROUND_MAX, AROUND_PATIENCE, Cut, DIRECT_PATIENCE, PROBE_PAUSE};
use std::sync::{Arc, PoisonError, Weak};
use std::time::Duration;
use weir_env::Instant;
use weir_proto::coord::{LINK_REPORT_MS, ReportLink, ReportTarget, Suspicion};
use weir_proto::data::{PassOn, StatTarget};
use weir_proto::map::{ClusterMap, Member, MemberState, Node, Role};
use weir_proto::{Error, ErrorKind, NodeId, Request, Result, TargetId, Wire};
use weir_rpc::{Answered, Channel, NoService, Payload};

pub(crate) mod state;

/// A call that takes longer makes this node probe the link: a disk that flushes its cache usually takes less.
const PROBE_AFTER: Duration = Duration::from_millis(250);
/// After a reply through another node, the direct probe gets this multiple of its time, as it takes a new
/// connection and two round trips,
const DIRECT_TIMES: u32 = 4;
/// and this at least.
const DIRECT_MIN: Duration = Duration::from_millis(300);
/// A node that takes longer to answer another one is slow, not cut off from here.
const AROUND_QUICK: Duration = Duration::from_millis(250);
/// More than the largest packet that any network takes (jumbo frames: 9,000).
const PROBE_BYTES: usize = 16 << 10;
/// Deadline for reporting a cut to the coordinator.
const REPORT_PATIENCE: Duration = Duration::from_secs(1);

impl Cluster {
    /// One call to a target, without a retry: over the link to its node, or through another node while that
    /// link is cut. `Unavailable` as soon as the link is known to be cut, so that the next call goes around
    /// it.
    pub async fn call_target<R: Request>(
        &self,
        target: TargetId,
        request: &R,
        payload: Payload,
        patience: Duration,
    ) -> Result<Answered<R::Reply>> {
        let shared = self.shared();
        let map = self.map();
        let node = node_of(&map, target)?;
        if let Some(cut) = shared.links.cut(node.id) {
            let via = map.node(cut.via).ok_or_else(|| unreachable(target, &cut));
            let answer = match via {
                Ok(via) => shared.call_through(&map, via, target, request, payload, patience).await,
                Err(e) => Err(e),
            };
            // A busy target is as busy for any other node.
            if answer.as_ref().is_err_and(|e| is_temporary(e) && !matches!(e.kind, ErrorKind::Busy { .. })) {
                shared.go_another_way(&map, node.id, cut.via);
            }
            return answer;
        }
        let channel = shared.channel_to(node)?;
        let call = channel.call_now(request, payload, patience);
        shared.over_link(node.id, target, &channel, call).await
    }

    /// Calls a target for another node that cannot reach it: over this node's own link only.
    pub async fn pass_on(
        &self,
        request: &PassOn,
        payload: Payload,
        patience: Duration,
    ) -> Result<Answered<Bytes>> {
        if request.method == PassOn::METHOD {
            return Err(Error::invalid("a forwarded call is not forwarded again"));
        }
        let shared = self.shared();
        let map = self.map();
        let node = node_of(&map, request.target)?;
        let channel = shared.channel_to(node)?;
        let call = channel.call_encoded_now(request.method, &request.body, payload, patience);
        shared.over_link(node.id, request.target, &channel, call).await
    }

    /// Whether calls to a target go around its link: then failures seen by this node do not count against
    /// it.
    pub(crate) fn goes_around(&self, target: TargetId) -> bool {
        let map = self.map();
        map.target_node(target).is_some_and(|node| self.shared().links.is_cut(node.id))
    }
}

fn node_of(map: &ClusterMap, target: TargetId) -> Result<&Node> {
    map.target_node(target)
        .ok_or_else(|| Error::not_found(format!("the cluster map (version {}) has no {target}", map.version)))
}

/// A target on the given node.
fn own_target(map: &ClusterMap, node: NodeId) -> Option<TargetId> {
    map.targets.iter().find(|t| t.node == node).map(|t| t.id)
}
fn unreachable(target: TargetId, cut: &Cut) -> Error {
    Error::unavailable(format!("{target} cannot be reached from here: {}", cut.why))
}

impl Shared {
    /// Waits for a call over the link to a node; probes the link when it takes long, and abandons the call if
    /// the link is cut.
    async fn over_link<T>(
        self: &Arc<Shared>,
        node: NodeId,
        target: TargetId,
        channel: &Channel,
        call: impl Future<Output = Result<T>>,
    ) -> Result<T> {
        tokio::pin!(call);
        let mut changed = self.links.changed.subscribe();
        if let Some(cut) = self.links.cut(node) {
            return Err(unreachable(target, &cut));
        }
        let mut probe_link = self.env.clock.now() + PROBE_AFTER;
        loop {
            tokio::select! {
                biased;
                answer = &mut call => {
                    if let Err(e) = &answer && is_temporary(e) && channel.current().is_none() {
                        self.start_probe(node, target);
                    }
                    return answer;
                }
                Ok(()) = changed.changed() => {
                    if let Some(cut) = self.links.cut(node) {
                        return Err(unreachable(target, &cut));
                    }
                }
                () = self.env.clock.sleep_until(probe_link) => {
                    probe_link = probe_link + PROBE_PAUSE;
                    self.start_probe(node, target);
                }
            }
        }
    }

    fn go_another_way(&self, map: &ClusterMap, node: NodeId, failed: NodeId) {
        let others = self.ways_around(map, node);
        let at = others.iter().position(|n| n.id == failed).map_or(0, |at| at + 1);
        if let Some(next) = others.get(at).or(others.first()) {
            self.links.change_via(node, failed, next.id);
        }
    }

    async fn call_through<R: Request>(
        self: &Arc<Shared>,
        map: &ClusterMap,
        via: &Node,
        target: TargetId,
        request: &R,
        payload: Payload,
        patience: Duration,
    ) -> Result<Answered<R::Reply>> {
        let pass_on = PassOn { target, method: R::METHOD, body: Bytes::from(request.to_bytes()) };
        let channel = self.channel_to(via)?;
        let call = channel.call_now(&pass_on, payload, patience);
        // That link may be cut, too.
        let answer = match own_target(map, via.id) {
            Some(own) => self.over_link(via.id, own, &channel, call).await,
            None => call.await,
        };
        let Answered { reply, payload, payload_crc } =
            answer.map_err(|e| e.doing(format_args!("{} through {}", R::NAME, via.name)))?;
        let reply = R::Reply::from_bytes(&reply.body)
            .map_err(|e| e.doing(format_args!("decode the answer of {target} to {}", R::NAME)))?;
        Ok(Answered { reply, payload, payload_crc })
    }

    /// Nodes that may reach the other one, in an order that differs between senders.
    fn ways_around<'a>(&self, map: &'a ClusterMap, node: NodeId) -> Vec<&'a Node> {
        let me = *self.node.lock().unwrap_or_else(PoisonError::into_inner);
        let is_other = |id: NodeId| id != node && Some(id) != me && !self.links.is_cut(id);
        let fits = |n: &&Node| n.role == Role::Storage && n.up && is_other(n.id);
        let mut nodes: Vec<&Node> = map.nodes.iter().filter(fits).collect();
        if !nodes.is_empty() {
            let first =
                (self.identity.instance.wrapping_add(u64::from(node.0)) % nodes.len() as u64) as usize;
            nodes.rotate_left(first);
        }
        nodes
    }

    fn start_probe(self: &Arc<Shared>, node: NodeId, target: TargetId) {
        if self.links.begin_probe(node, self.env.clock.now()) {
            self.env.tasks.spawn("probe a link", probe_link(self.clone(), node, target));
        }
    }

    /// Probes a node directly and through other nodes.
    async fn compare(self: &Arc<Shared>, map: &ClusterMap, node: NodeId, target: TargetId) -> Seen {
        if map.node(node).is_none_or(|n| !n.up) {
            return Seen::Answers;
        }
        let begun = self.env.clock.now();
        let link = self.channel_of_its_own(node, Arc::new(NoService));
        let (direct, around) = (ping(&link, target, DIRECT_PATIENCE), self.answers_around(map, node, target));
        tokio::pin!(direct, around);
        let mut failed = None;
        let via = loop {
            tokio::select! {
                biased;
                answer = &mut direct, if failed.is_none() => match answer {
                    Ok(()) => return self.answers(begun),
                    Err(e) => failed = Some(e),
                },
                via = &mut around => break via,
            }
        };
        let patience = (self.env.clock.now().since(begun) * DIRECT_TIMES).max(DIRECT_MIN);
        let last = async {
            match failed {
                // A process that has just started may have refused it a moment ago.
                Some(_) => ping(&self.channel_of_its_own(node, Arc::new(NoService)), target, patience).await,
                None => match self.env.clock.timeout(patience, direct).await {
                    Ok(answer) => answer,
                    Err(_) => Err(Error::deadline("it does not answer, but answers others")),
                },
            }
        };
        let is_quick_here = async {
            match via {
                Around::Through(via) => self.connects_to(map, via, patience).await,
                Around::Slow | Around::NotEither | Around::Alone => true,
            }
        };
        let (last, is_quick_here) = tokio::join!(last, is_quick_here);
        match (last, via) {
            (Ok(()), _) => self.answers(begun),
            // This machine is late itself, or so is the node: no other way is quicker.
            (Err(_), Around::Slow) => Seen::Late,
            (Err(_), Around::Through(_)) if !is_quick_here => Seen::Late,
            (Err(why), Around::Through(via)) => Seen::Cut { via, why },
            (Err(why), Around::NotEither) => Seen::Silent(why),
            (Err(_), Around::Alone) => Seen::Answers, // a node that reaches no other node proves nothing about the target
        }
    }

    /// It answers a probe that has begun then.
    fn answers(&self, begun: Instant) -> Seen {
        if self.env.clock.now().since(begun) <= DIRECT_MIN { Seen::Answers } else { Seen::Late }
    }

    async fn answers_around(self: &Arc<Shared>, map: &ClusterMap, node: NodeId, target: TargetId) -> Around {
        let mut found = Around::Alone;
        for via in self.ways_around(map, node).into_iter().take(AROUND_MAX) {
            let (asked, begun) = (StatTarget { target }, self.env.clock.now());
            let answer = self.call_through(map, via, target, &asked, Payload::default(), AROUND_PATIENCE);
            if let Ok(Ok(_)) = self.env.clock.timeout(AROUND_PATIENCE, answer).await {
                let is_quick = self.env.clock.now().since(begun) <= AROUND_QUICK;
                return if is_quick { Around::Through(via.id) } else { Around::Slow };
            }
            if let Some(own) = own_target(map, via.id)
                && ping(&self.channel_of_its_own(via.id, Arc::new(NoService)), own, DIRECT_MIN).await.is_ok()
            {
                found = Around::NotEither;
            }
        }
        found
    }

    /// Whether a new connection to that node carries packets within the time that another one had.
    async fn connects_to(self: &Arc<Shared>, map: &ClusterMap, node: NodeId, patience: Duration) -> bool {
        let Some(own) = own_target(map, node) else { return true };
        ping(&self.channel_of_its_own(node, Arc::new(NoService)), own, patience).await.is_ok()
    }

    /// Reports a target that only the coordinator may still reach: its groups continue without it for a
    /// while.
    async fn report_silent(&self, map: &ClusterMap, target: TargetId, why: &Error) {
        let is_current = |m: &Member| m.target == target && m.state == MemberState::Current;
        let Some(group) = map.groups.iter().find(|g| g.members.iter().any(is_current)) else { return };
        let why = format!("neither this node nor another one that it asked can reach it: {why}");
        let report =
            ReportTarget { target, group: group.id, epoch: group.epoch, suspicion: Suspicion::Slow, why };
        let reported = self.coordinator.call_now(&report, Payload::default(), REPORT_PATIENCE).await;
        if let Err(e) = reported {
            tracing::debug!(target_id = %target, "not reported to the coordinator as silent: {e}");
        }
    }

    async fn report_link(&self, report: &ReportLink) {
        let reported = self.coordinator.call_now(report, Payload::default(), REPORT_PATIENCE).await;
        if let Err(e) = reported {
            tracing::debug!("a link was not reported to the coordinator: {e}");
        }
    }
}

/// Result of probing a node directly and through others.
enum Seen {
    /// It answers directly; or it is down in the map, or there is no other node to compare with.
    Answers,
    /// It does, but late; or all ways are late.
    Late,
    Cut {
        via: NodeId,
        why: Error,
    },
    /// Other nodes that answer here do not reach it either.
    Silent(Error),
}

/// Whether a target answers another node.
#[derive(Clone, Copy)]
enum Around {
    Through(NodeId),
    /// It does, but late.
    Slow,
    NotEither,
    /// No other node answers here.
    Alone,
}

/// Sends a target more bytes than the largest packet holds, over a new connection, and gets them back.
async fn ping(channel: &Channel, target: TargetId, patience: Duration) -> Result<()> {
    channel.disconnect("probed again");
    let payload = Payload::from(Bytes::from(vec![0; PROBE_BYTES]));
    match channel.call_now(&StatTarget { target }, payload, patience).await {
        // The node is starting, for example: the link works.
        Err(e) if e.kind != ErrorKind::Deadline && channel.current().is_some() => Ok(()),
        answer => answer.map(|_| ()),
    }
}

async fn probe_link(shared: Arc<Shared>, node: NodeId, target: TargetId) {
    let map = shared.map.borrow().clone();
    let seen = shared.compare(&map, node, target).await;
    let now = shared.env.clock.now();
    let is_over = |was_late| shared.links.end_probe(node, now, was_late, shared.env.rng.below(1 << 16));
    let (via, why) = match seen {
        Seen::Cut { via, why } => (via, why),
        Seen::Silent(why) => {
            is_over(true);
            return shared.report_silent(&map, target, &why).await;
        }
        Seen::Answers => return is_over(false),
        Seen::Late => return is_over(true),
    };
    shared.links.note_cut(node, now, via, &why);
    let name = |id: NodeId| map.node(id).map_or_else(|| id.to_string(), |n| n.name.clone());
    tracing::warn!(
        "{} ({target}) cannot be reached from here, calls go through {}: {why}",
        name(node),
        name(via)
    );
    if let Some(Ok(channel)) = map.node(node).map(|n| shared.channel_to(n)) {
        channel.disconnect("the link is cut"); // calls that wait on it take another route
    }
    follow(Arc::downgrade(&shared), node, target).await;
}

/// Reports a cut link to the coordinator, and tests it, until it works again or its node is gone.
async fn follow(of: Weak<Shared>, node: NodeId, target: TargetId) {
    let Some(link) = of.upgrade().map(|shared| shared.channel_of_its_own(node, Arc::new(NoService))) else {
        return;
    };
    loop {
        let Some(shared) = of.upgrade() else { return };
        let clock = shared.env.clock.clone();
        let Some(cut) = shared.links.cut(node) else { return };
        let map = shared.map.borrow().clone();
        let is_gone = map.node(node).is_none_or(|n| !n.up); // and its calls are not made
        let is_over = is_gone
            || shared.links.may_be_tried(node, clock.now())
                && ping(&link, target, REPORT_PATIENCE).await.is_ok();
        let cut_ms = if is_over { 0 } else { (clock.now().since(cut.since).as_millis() as u64).max(1) };
        if is_over {
            shared.links.clear(node);
            tracing::info!("{target} is reached directly again");
        }
        shared.report_link(&ReportLink { node, cut_ms, why: cut.why }).await;
        if is_over {
            return;
        }
        drop(shared);
        clock.sleep(Duration::from_millis(LINK_REPORT_MS)).await;
    }
}
