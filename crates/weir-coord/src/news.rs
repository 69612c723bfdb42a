//! News of the map for each caller: the smallest message that leads from the caller's version to the newest
//! one.
//!
//! Invariants: each version is encoded once for all callers; a caller that is too far behind gets the whole
//! map. Knows nothing of the callers.
use bytes::Bytes;
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use weir_proto::data::PAYLOAD_MAX;
use weir_proto::map::ClusterMap;
use weir_proto::news::{MapNews, changes};
use weir_proto::{Error, Result, Wire};
use weir_rpc::Payload;

/// Versions whose changes are kept: an hour of a map that changes every three seconds.
pub const STEPS_MAX: usize = 1024;
/// Memory for these changes. The founding of a large cluster takes a few MiB, then a version takes some KiB.
const STEPS_BYTES_MAX: usize = 16 << 20;

pub struct News(Mutex<State>);

struct State {
    newest: Arc<ClusterMap>,
    /// Encoded on the first request.
    whole: Option<Bytes>,
    /// The changes of each version, encoded; the last ones lead to the newest.
    steps: VecDeque<Bytes>,
    bytes: usize,
}

impl News {
    pub fn new(map: Arc<ClusterMap>) -> News {
        News(Mutex::new(State { newest: map, whole: None, steps: VecDeque::new(), bytes: 0 }))
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Publishes a durable map as the newest.
    pub fn publish(&self, map: Arc<ClusterMap>) {
        let before = self.state().newest.clone(); // only the owner of the map publishes
        let step = changes(&before, &map).filter(|_| map.version == before.version + 1);
        let step = step.map(|step| Bytes::from(step.to_bytes()));
        let mut state = self.state();
        (state.newest, state.whole) = (map, None);
        match step {
            Some(step) => {
                state.bytes += step.len();
                state.steps.push_back(step);
            }
            None => {
                state.steps.clear();
                state.bytes = 0;
            }
        }
        while state.steps.len() > STEPS_MAX || state.bytes > STEPS_BYTES_MAX {
            let oldest = state.steps.pop_front().map_or(0, |step| step.len());
            state.bytes -= oldest;
        }
    }

    /// The news for a caller with version `known`; 0: none. Empty: there is nothing newer.
    pub fn since(&self, known: u64) -> Result<Payload> {
        let mut state = self.state();
        if known == state.newest.version {
            return Ok(Payload::default());
        }
        let missing =
            state.newest.version.checked_sub(known).map(|n| usize::try_from(n).unwrap_or(usize::MAX));
        if let Some(missing) = missing.filter(|n| *n <= state.steps.len() && known > 0) {
            let steps = state.steps.range(state.steps.len() - missing..);
            let head = MapNews::steps_head(state.newest.cluster, known, missing);
            let parts: Vec<Bytes> = std::iter::once(Bytes::from(head)).chain(steps.cloned()).collect();
            if parts.iter().map(Bytes::len).sum::<usize>() < state.whole().len() {
                return Ok(parts.into());
            }
        }
        let whole = state.whole();
        if whole.len() > PAYLOAD_MAX as usize {
            return Err(Error::unsupported(format!(
                "the cluster map takes {} bytes, at most {PAYLOAD_MAX} can be sent",
                whole.len()
            ))
            .hint("this version is not made for that many targets and schemes"));
        }
        Ok(whole.into())
    }
}

impl State {
    fn whole(&mut self) -> Bytes {
        let map = &self.newest;
        let encode = || Bytes::from(MapNews::Whole { map: map.clone() }.to_bytes());
        self.whole.get_or_insert_with(encode).clone()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decide::group_tests::{cluster, create_groups};
    use crate::decide::{target_back, target_down};
    use weir_proto::{NodeId, TargetId};

    fn read(payload: &Payload) -> MapNews {
        MapNews::from_bytes(&payload.parts.concat()).unwrap()
    }

    #[test]
    fn each_known_version_gets_what_leads_to_the_newest() {
        let mut map = cluster(6, "ec:4+2");
        let news = News::new(Arc::new(map.clone()));
        let mut all = vec![Arc::new(map.clone())];
        for n in 0..20 {
            map.version += 1;
            map.nodes[n % 6].up = n % 4 < 2;
            news.publish(Arc::new(map.clone()));
            all.push(Arc::new(map.clone()));
        }
        assert!(news.since(21).unwrap().is_empty());
        for known in &all[..20] {
            let payload = news.since(known.version).unwrap();
            assert_eq!(read(&payload).apply(known).unwrap().unwrap(), all[20]);
        }
        let steps = read(&news.since(20).unwrap());
        assert!(matches!(&steps, MapNews::Steps { from: 20, steps, .. } if steps.len() == 1));
        // No known version, and one from the future: the whole map.
        for known in [0, 99] {
            assert!(matches!(read(&news.since(known).unwrap()), MapNews::Whole { map } if map == all[20]));
        }
    }

    #[test]
    fn a_node_too_far_behind_gets_the_whole_map() {
        let mut map = cluster(6, "ec:4+2");
        let news = News::new(Arc::new(map.clone()));
        for n in 0..STEPS_MAX + 1 {
            map.version += 1;
            map.level = n as u16;
            news.publish(Arc::new(map.clone()));
        }
        assert!(matches!(read(&news.since(1).unwrap()), MapNews::Whole { .. }));
        let oldest = news.since(1000).unwrap();
        assert!(matches!(read(&oldest), MapNews::Steps { from: 1000, .. }));
        // A change that cannot be expressed as a step.
        map.version += 1;
        map.targets.swap(0, 1);
        news.publish(Arc::new(map.clone()));
        assert!(matches!(read(&news.since(map.version - 1).unwrap()), MapNews::Whole { .. }));
    }

    /// 50 servers of 96 disks. The message to each client for a target that goes down, and one that returns.
    #[test]
    fn a_flap_on_a_large_map_takes_less_than_4_kib() {
        let mut map = cluster(4800, "ec:10+2");
        for (n, target) in map.targets.iter_mut().enumerate() {
            target.node = NodeId(1 + n as u32 / 96);
        }
        map.nodes.truncate(50);
        map.nodes.iter_mut().for_each(|node| node.host = node.name.clone());
        assert!(create_groups(&mut map, 4800));
        assert_eq!(map.groups.len(), 4096);
        let news = News::new(Arc::new(map.clone()));
        let bytes_of = |t: u32| {
            let mut down = map.clone();
            assert!(target_down(&mut down, TargetId(t)));
            changes(&map, &down).unwrap().to_bytes().len()
        };
        assert!((1..=4800).step_by(96).map(bytes_of).max() < Some(4096));
        for change in [target_down, target_back] {
            let before = Arc::new(map.clone());
            assert!(change(&mut map, TargetId(17)));
            map.version += 1;
            news.publish(Arc::new(map.clone()));
            let encoded = news.since(before.version).unwrap();
            assert!(encoded.len() < 4096, "{} bytes", encoded.len());
            assert_eq!(*read(&encoded).apply(&before).unwrap().unwrap(), map);
        }
    }

    /// Many small steps can be larger than the map.
    #[test]
    fn the_shorter_way_is_taken() {
        let mut map = cluster(2, "single");
        let news = News::new(Arc::new(map.clone()));
        for n in 0..200 {
            map.version += 1;
            map.nodes[0].up = n % 2 == 0;
            news.publish(Arc::new(map.clone()));
        }
        assert!(matches!(read(&news.since(1).unwrap()), MapNews::Whole { .. }));
        assert!(matches!(read(&news.since(200).unwrap()), MapNews::Steps { .. }));
    }
}
