//! The cluster map in the store: the whole map every 256 versions, and between them the changes of each
//! version.
//!
//! Invariants: a version is durable once its step is. The step of version v replaces that of v − 512, only if
//! no other coordinator has written there: of two coordinators that make a version v, one is refused. The
//! whole map is written later, and is never so old that a step after it is overwritten. Knows nothing of the
//! contents of a map.
use crate::records::{decode_map, decode_step, encode_map, encode_step};
use crate::store::{Revision, Store, Swap};
use std::collections::BTreeMap;
use std::sync::Arc;
use weir_proto::map::ClusterMap;
use weir_proto::news::{MapNews, changes};
use weir_proto::version::LEVEL_OF_STEPS;
use weir_proto::{Error, Result};

/// The key of the whole map in the store.
pub const MAP_KEY: &str = "map";
/// Versions from one whole map to the next.
const WHOLE_EVERY: u64 = 256;
/// Keys of steps. Twice as many, so that a failed write of the whole map does not stop changes.
const PLACES: u64 = 2 * WHOLE_EVERY;

/// The key of a version's step.
pub fn step_key(version: u64) -> String {
    format!("map/step/{:03}", version % PLACES)
}

pub struct KeptMap {
    store: Arc<dyn Store>,
    /// Revision of the whole map.
    revision: Revision,
    version: u64,
    /// Whether steps may follow the whole map.
    has_steps: bool,
    /// Revisions of the steps that were read or written here, by their place.
    places: BTreeMap<u64, Revision>,
}

impl KeptMap {
    /// The stored map; `None`: there is none.
    pub async fn open(store: Arc<dyn Store>) -> Result<Option<(KeptMap, ClusterMap)>> {
        let Some(whole) = store.get(MAP_KEY).await? else { return Ok(None) };
        let mut map = Arc::new(decode_map(&whole.value)?);
        let has_steps = map.level >= LEVEL_OF_STEPS;
        let (revision, version) = (whole.revision, map.version);
        let mut kept = KeptMap { store, revision, version, has_steps, places: BTreeMap::new() };
        if has_steps {
            kept.apply_steps(&mut map).await?;
        }
        Ok(Some((kept, Arc::unwrap_or_clone(map))))
    }

    /// Applies the steps that follow without a gap.
    async fn apply_steps(&mut self, map: &mut Arc<ClusterMap>) -> Result<()> {
        loop {
            let version = map.version + 1;
            let Some(step) = self.step_in_place_of(version).await? else { return Ok(()) };
            match step.apply(map).map_err(|e| e.doing(format!("apply {}", step_key(version))))? {
                Some(next) if next.version == version => *map = next,
                _ => return Ok(()), // it is of an older version
            }
        }
    }

    /// Stores the first map. `None`: there is one already.
    pub async fn found(store: Arc<dyn Store>, map: &ClusterMap) -> Result<Option<KeptMap>> {
        let swap = store.compare_and_swap(MAP_KEY, Revision(0), encode_map(map)).await?;
        let Swap::Done(revision) = swap else { return Ok(None) };
        let has_steps = map.level >= LEVEL_OF_STEPS;
        Ok(Some(KeptMap { store, revision, version: map.version, has_steps, places: BTreeMap::new() }))
    }

    /// Makes the version after `old` durable. `Stale`: another coordinator has written.
    pub async fn write(&mut self, old: &ClusterMap, new: &ClusterMap) -> Result<()> {
        if !self.has_steps || new.level < LEVEL_OF_STEPS {
            return self.write_whole(new).await;
        }
        if new.version >= self.version + PLACES {
            self.write_whole(old).await?; // otherwise its step would be overwritten
        }
        self.write_step(old, new).await?;
        if new.version >= self.version + WHOLE_EVERY
            && let Err(e) = self.write_whole(new).await
        {
            if e.kind == weir_proto::ErrorKind::Stale {
                return Err(e);
            }
            tracing::warn!("the whole cluster map is written later, its changes are durable: {e}");
        }
        Ok(())
    }

    async fn write_whole(&mut self, map: &ClusterMap) -> Result<()> {
        match self.store.compare_and_swap(MAP_KEY, self.revision, encode_map(map)).await? {
            Swap::Done(revision) => (self.revision, self.version) = (revision, map.version),
            Swap::Conflict(_) => return Err(another_writes()),
        }
        self.has_steps = map.level >= LEVEL_OF_STEPS;
        Ok(())
    }

    async fn write_step(&mut self, old: &ClusterMap, new: &ClusterMap) -> Result<()> {
        let place = new.version % PLACES;
        if !self.places.contains_key(&place) {
            let there = self.step_in_place_of(new.version).await?;
            if there.is_some_and(|step| leads_to(&step) >= new.version) {
                return Err(another_writes());
            }
        }
        let step = match changes(old, new) {
            Some(changes) => MapNews::Steps { cluster: new.cluster, from: old.version, steps: vec![changes] },
            None => MapNews::Whole { map: Arc::new(new.clone()) },
        };
        let expected = self.places.get(&place).copied().unwrap_or_default();
        match self.store.compare_and_swap(&step_key(new.version), expected, encode_step(&step)).await? {
            Swap::Done(revision) => self.places.insert(place, revision),
            Swap::Conflict(_) => return Err(another_writes()),
        };
        Ok(())
    }

    /// The step in the place of a version: of this version, or of an older one.
    async fn step_in_place_of(&mut self, version: u64) -> Result<Option<MapNews>> {
        let key = step_key(version);
        let Some(there) = self.store.get(&key).await? else { return Ok(None) };
        self.places.insert(version % PLACES, there.revision);
        decode_step(&there.value).map(Some).map_err(|e| e.doing(format!("read {key}")))
    }
}

/// The version that results from a step.
fn leads_to(step: &MapNews) -> u64 {
    match step {
        MapNews::Whole { map } => map.version,
        MapNews::Steps { from, steps, .. } => from.saturating_add(steps.len() as u64),
    }
}

pub fn another_writes() -> Error {
    Error::stale("another coordinator has changed the cluster's state")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::decide::group_tests::cluster;
    use crate::store::Embedded;
    use std::path::Path;
    use weir_env::sim::{SimConfig, World};
    use weir_proto::ErrorKind;

    fn in_a_world(work: impl AsyncFnOnce(Arc<dyn Store>)) {
        let world = World::new(5, SimConfig::default());
        world.run(async {
            let store = Embedded::open(world.node("c"), Path::new("/coord")).unwrap();
            work(store).await;
        });
    }

    fn next(map: &ClusterMap) -> ClusterMap {
        let mut new = map.clone();
        new.version += 1;
        let node = new.version as usize % new.nodes.len();
        new.nodes[node].up = !new.nodes[node].up;
        new
    }

    async fn kept(store: &Arc<dyn Store>) -> (KeptMap, ClusterMap) {
        KeptMap::open(store.clone()).await.unwrap().unwrap()
    }

    #[test]
    fn a_map_is_read_as_it_was_written_last() {
        in_a_world(async |store| {
            assert!(KeptMap::open(store.clone()).await.unwrap().is_none());
            let mut map = cluster(6, "ec:4+2");
            let mut writer = KeptMap::found(store.clone(), &map).await.unwrap().unwrap();
            assert!(KeptMap::found(store.clone(), &map).await.unwrap().is_none(), "there is one");
            for n in 1..1200 {
                // At times a change that cannot be expressed as a step.
                let mut new = next(&map);
                if n % 100 == 0 {
                    new.nodes.swap(0, 1);
                }
                writer.write(&map, &new).await.unwrap();
                map = new;
                if n % 37 == 0 || n > 1190 {
                    let read = kept(&store).await;
                    assert_eq!(read.1, map);
                    writer = read.0;
                }
            }
            let whole = decode_map(&store.get(MAP_KEY).await.unwrap().unwrap().value).unwrap();
            assert!(whole.version + WHOLE_EVERY >= map.version && whole.version < map.version);
        });
    }

    #[test]
    fn of_two_coordinators_one_is_refused() {
        for more in [0, 1, 255, 256, 511, 512, 600] {
            in_a_world(async |store| {
                let first = cluster(6, "ec:4+2");
                KeptMap::found(store.clone(), &first).await.unwrap().unwrap();
                let mut map = first.clone();
                let (mut deposed, mut leads) = (kept(&store).await.0, kept(&store).await.0);
                for _ in 0..=more {
                    let new = next(&map);
                    leads.write(&map, &new).await.unwrap();
                    map = new;
                }
                let refused = deposed.write(&first, &next(&first)).await.unwrap_err();
                assert_eq!(refused.kind, ErrorKind::Stale, "{more} versions later");
                assert_eq!(kept(&store).await.1, map, "{more} versions later");
            });
        }
    }

    /// The form that older programs wrote, and can still read.
    #[test]
    fn a_map_of_level_1_is_kept_whole_until_it_is_raised() {
        in_a_world(async |store| {
            let mut map = ClusterMap { level: 1, ..cluster(6, "ec:4+2") };
            let mut writer = KeptMap::found(store.clone(), &map).await.unwrap().unwrap();
            for _ in 0..3 {
                let new = next(&map);
                writer.write(&map, &new).await.unwrap();
                map = new;
            }
            let value = store.get(MAP_KEY).await.unwrap().unwrap().value;
            assert_eq!((&value[..2], decode_map(&value)), (&[1, 0][..], Ok(map.clone())));
            assert_eq!(store.get(&step_key(map.version)).await.unwrap(), None);
            let (mut deposed, _) = kept(&store).await;
            let raised = ClusterMap { level: 2, ..next(&map) };
            writer.write(&map, &raised).await.unwrap();
            assert_eq!(
                store.get(MAP_KEY).await.unwrap().unwrap().value[..2],
                [2, 0],
                "refused by older programs"
            );
            let new = next(&raised);
            writer.write(&raised, &new).await.unwrap();
            assert_eq!(kept(&store).await.1, new);
            assert_eq!(deposed.write(&map, &next(&map)).await.unwrap_err().kind, ErrorKind::Stale);
        });
    }
}
