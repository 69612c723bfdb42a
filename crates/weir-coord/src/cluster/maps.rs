//! How a node learns maps: the first one, the newer ones as they are published, and those in replies.
use super::{
    ANSWER_SLACK, CHANGE_PATIENCE, FIRST_ANSWER, LOG_WAITS_AFTER, LOG_WAITS_EVERY, MAP_WAIT, RETRY_PAUSE,
    Shared, is_temporary,
};
use std::sync::Arc;
use std::time::Duration;
use weir_env::{Backoff, Env};
use weir_proto::coord::{GetMap, MapReply};
use weir_proto::map::ClusterMap;
use weir_proto::news::{CarriesMap, MapNews};
use weir_proto::{ErrorKind, Result, Wire};
use weir_rpc::Channel;

/// How often the coordinator is asked for a sign of life, and how long it may take.
const WATCH_EVERY: Duration = Duration::from_secs(2);
const ANSWERS_WITHIN: Duration = Duration::from_secs(1);
/// While it gives none: another one leads after its lease of three seconds.
const WATCH_AGAIN: Backoff = Backoff { first: Duration::from_millis(500), max: Duration::from_secs(1) };

impl Shared {
    /// Applies a map if it is newer. False: it is not.
    pub fn take_if_newer(&self, map: Arc<ClusterMap>) -> bool {
        let new_map = map.clone();
        let is_new = self.map.send_if_modified(|known| {
            let newer = map.cluster == known.cluster && map.version > known.version;
            if newer {
                *known = map;
            }
            newer
        });
        if let (true, Some(trust)) = (is_new, &self.who.trust) {
            trust.follow(&new_map.removed, &new_map.authorities);
        }
        is_new
    }

    /// Applies the map in a reply, and puts the newest known one into the reply. Returns the version that the
    /// reply carried, if any.
    pub async fn learn_from(&self, reply: &mut impl CarriesMap, payload: &[u8]) -> Result<Option<u64>> {
        let (carried, mut version) = (reply.take_map(), None);
        if !payload.is_empty() || carried.is_some() {
            let known = self.map.borrow().clone();
            let map = match map_of_reply(carried, payload, &known) {
                Ok(news) => news,
                Err(e) => {
                    tracing::warn!("the whole cluster map is asked for: {e}");
                    Some(first_map(&self.env, &self.coordinator, CHANGE_PATIENCE).await?)
                }
            };
            version = map.map(|map| (map.version, self.take_if_newer(map)).0);
        }
        reply.put_map(self.map.borrow().clone());
        Ok(version)
    }
}

/// The map that a reply carries: in its body, or as changes in its payload. `None`: it is already known.
fn map_of_reply(
    carried: Option<Arc<ClusterMap>>,
    payload: &[u8],
    known: &Arc<ClusterMap>,
) -> Result<Option<Arc<ClusterMap>>> {
    if payload.is_empty() {
        return Ok(carried);
    }
    let news = MapNews::from_bytes(payload).and_then(|news| news.apply(known));
    news.map_err(|e| e.doing("read the news of the cluster map"))
}

pub(super) async fn first_map(
    env: &Env,
    coordinator: &Channel,
    patience: Duration,
) -> Result<Arc<ClusterMap>> {
    let deadline = env.clock.now() + patience;
    let mut log_at = env.clock.now() + LOG_WAITS_AFTER;
    loop {
        let now = env.clock.now();
        let left = deadline.since(now).clamp(RETRY_PAUSE, FIRST_ANSWER);
        let asked = coordinator.call(&GetMap { newer_than: 0, wait_ms: 0 }, Vec::new(), left).await;
        if let Err(e) = asked.as_ref().map_err(|e| e.clone().doing("wait for a coordinator"))
            && is_temporary(&e)
            && now >= log_at
        {
            tracing::warn!("{e}");
            log_at = now + LOG_WAITS_EVERY;
        }
        match asked {
            Ok((MapReply { map }, payload)) => {
                let nothing = Arc::new(ClusterMap::absent());
                if let Some(map) = map_of_reply(map, &payload, &nothing)? {
                    return Ok(map);
                }
            }
            Err(e) if is_temporary(&e) && env.clock.now() < deadline => {}
            Err(e) => return Err(e.doing("get the cluster map from the coordinator")),
        }
        env.clock.sleep(RETRY_PAUSE).await;
    }
}

/// Leaves a coordinator that is stopped, or whose machine has died, for the one that answers in its place: a
/// question that waits for the next map would notice only after its long patience.
pub(super) async fn watch_coordinator(shared: Arc<Shared>) {
    let (clock, mut silent) = (shared.env.clock.clone(), 0);
    loop {
        let pause = match silent {
            0 => WATCH_EVERY,
            n => WATCH_AGAIN.pause(n - 1, shared.env.rng.below(1 << 16)),
        };
        clock.sleep(pause).await;
        let Some(connection) = shared.coordinator.current() else { continue };
        if connection.answers(ANSWERS_WITHIN).await {
            silent = 0;
            continue;
        }
        silent = silent.saturating_add(1);
        if !connection.is_closed() {
            shared.find_another();
        }
    }
}

pub(super) async fn follow_map(shared: Arc<Shared>) {
    let (mut reported, mut ask_for_all) = (false, false);
    loop {
        let known = shared.map.borrow().clone();
        let newer_than = if std::mem::take(&mut ask_for_all) { 0 } else { known.version };
        let request = GetMap { newer_than, wait_ms: MAP_WAIT.as_millis() as u32 };
        let asked = shared.coordinator.call(&request, Vec::new(), MAP_WAIT + ANSWER_SLACK).await;
        match asked.map(|(reply, payload)| {
            // The known map may be newer by now: a change that this node requested.
            let known = shared.map.borrow().clone();
            map_of_reply(reply.map, &payload, &known)
        }) {
            Ok(Err(e)) => {
                tracing::warn!("the whole cluster map is asked for: {e}");
                ask_for_all = true;
                shared.env.clock.sleep(RETRY_PAUSE).await;
            }
            Ok(Ok(None)) => reported = false,
            Ok(Ok(Some(map))) => {
                reported = false;
                let (cluster, version) = (map.cluster, map.version);
                let old = !shared.take_if_newer(map) && version <= shared.map.borrow().version;
                if old && version < known.version {
                    tracing::error!(
                        "the coordinator's map of cluster {cluster} has version {version}, {} is known here: its \
                         state was lost or replaced",
                        known.version
                    );
                    shared.env.clock.sleep(MAP_WAIT).await;
                }
            }
            Err(e) => {
                if !reported {
                    tracing::warn!("cannot follow the cluster map: {e}");
                }
                reported = true;
                if e.kind == ErrorKind::Deadline {
                    shared.find_another();
                }
                shared.env.clock.sleep(RETRY_PAUSE).await;
            }
        }
    }
}
