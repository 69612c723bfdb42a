//! News of the cluster map: the whole map, or the changes since a version of it.
//!
//! It is sent in the payload of replies: a large map does not fit into a body, and a change of one target
//! takes some hundred bytes.
//!
//! Invariant: a receiver that applies the steps from its version to another one has exactly the map of that
//! version.
use crate::access::{AccessRules, AuditRule};
use crate::coord::{ClusterStatus, Joined, LeadReply, MapReply};
use crate::home_rule::HomeRule;
use crate::map::{
    ClusterMap, Group, Member, MemberState, Move, NamespaceCopies, NamespaceEntry, Node, RemovedNode, Scheme,
    Settings, Target,
};
use crate::version::VERSION_OF_NEWS;
use crate::{ClusterId, Epoch, Error, NamespaceId, PgId, Result, TargetId, Wire, Writer};
use crate::{message, wire_union};
use std::collections::BTreeSet;
use std::sync::Arc;

wire_union!(
    /// The content of the news.
    MapNews {
        /// The whole map.
        Whole = 1 { map: Arc<ClusterMap> },
        /// The first step leads from version `from` to the next one, and so on.
        Steps = 2 { cluster: ClusterId, from: u64, steps: Vec<Vec<MapChange>> },
    }
);

wire_union!(
    /// One change. An entry replaces the one of the same id, or is the new last one.
    MapChange {
        Level = 1 { level: u16 },
        Settings = 2 { settings: Settings },
        Node = 3 { node: Node },
        Target = 4 { target: Target },
        Group = 5 { group: Group },
        /// The group has this epoch. Members that are not listed are current since then.
        Members = 6 { group: PgId, epoch: Epoch, away: Vec<MemberAway> },
        Namespace = 7 { entry: NamespaceEntry },
        NamespaceGone = 8 { id: NamespaceId },
        Homes = 9 { homes: Vec<HomeRule> },
        LastNamespace = 10 { id: NamespaceId },
        Removed = 11 { removed: Vec<RemovedNode> },
        Access = 12 { access: AccessRules },
        Authorities = 13 { pins: Vec<[u8; 16]> },
        Audits = 14 { audits: Vec<AuditRule> },
        Copies = 15 { copies: Vec<NamespaceCopies> },
        Moves = 16 { moves: Vec<Move> },
        Generations = 17 { generations: Vec<PgId> },
        LastTarget = 18 { id: TargetId },
        Full = 19 { full: Vec<TargetId> },
    }
);

message!(
    /// A member of a group that is not current, by its place.
    MemberAway { place: u8, state: MemberState, since: Epoch, lost_at: Epoch }
);

/// The changes from one version of a map to the next; `None`: they cannot be expressed as changes, only by
/// the whole map.
pub fn changes(old: &ClusterMap, new: &ClusterMap) -> Option<Vec<MapChange>> {
    // All fields by name: a new field must be handled here.
    let ClusterMap {
        cluster,
        version: _,
        level,
        settings,
        nodes,
        targets,
        groups,
        namespaces,
        homes,
        last_namespace,
        removed,
        access,
        authorities,
        audits,
        copies,
        moves,
        generations,
        last_target,
        full,
    } = new;
    if *cluster != old.cluster {
        return None;
    }
    let mut found = Vec::new();
    let mut note = |is_so: bool, change: &dyn Fn() -> MapChange| found.extend(is_so.then(change));
    note(*level != old.level, &|| MapChange::Level { level: *level });
    note(*settings != old.settings, &|| MapChange::Settings { settings: settings.clone() });
    note(*homes != old.homes, &|| MapChange::Homes { homes: homes.clone() });
    note(*last_namespace != old.last_namespace, &|| MapChange::LastNamespace { id: *last_namespace });
    note(*removed != old.removed, &|| MapChange::Removed { removed: removed.clone() });
    note(*access != old.access, &|| MapChange::Access { access: access.clone() });
    note(*authorities != old.authorities, &|| MapChange::Authorities { pins: authorities.clone() });
    note(*audits != old.audits, &|| MapChange::Audits { audits: audits.clone() });
    note(*copies != old.copies, &|| MapChange::Copies { copies: copies.clone() });
    note(*moves != old.moves, &|| MapChange::Moves { moves: moves.clone() });
    let is_new = *generations != old.generations;
    note(is_new, &|| MapChange::Generations { generations: generations.clone() });
    note(*full != old.full, &|| MapChange::Full { full: full.clone() });
    note(*last_target != old.last_target, &|| MapChange::LastTarget { id: *last_target });
    let still: BTreeSet<NamespaceId> = namespaces.iter().map(|entry| entry.id).collect();
    let (stay, gone): (Vec<_>, Vec<_>) = old.namespaces.iter().partition(|entry| still.contains(&entry.id));
    found.extend(gone.into_iter().map(|entry| MapChange::NamespaceGone { id: entry.id }));
    let namespace = |entry: &NamespaceEntry| MapChange::Namespace { entry: entry.clone() };
    found.extend(entries(stay.into_iter(), namespaces, |entry| entry.id, |_, new| namespace(new))?);
    let node = |_: Option<&Node>, node: &Node| MapChange::Node { node: node.clone() };
    found.extend(entries(old.nodes.iter(), nodes, |node| node.id, node)?);
    let target = |_: Option<&Target>, target: &Target| MapChange::Target { target: target.clone() };
    found.extend(entries(old.targets.iter(), targets, |target| target.id, target)?);
    found.extend(entries(old.groups.iter(), groups, |group| group.id, change_of_group)?);
    Some(found)
}

/// Changes of a list whose entries stay in their order; new ones come last.
fn entries<'a, T: PartialEq + 'a, Id: PartialEq>(
    mut old: impl Iterator<Item = &'a T>,
    new: &'a [T],
    id: impl Fn(&T) -> Id,
    change: impl Fn(Option<&T>, &T) -> MapChange,
) -> Option<Vec<MapChange>> {
    let mut found = Vec::new();
    for entry in new {
        let before = old.next();
        if before.is_some_and(|before| id(before) != id(entry)) {
            return None;
        }
        if before != Some(entry) {
            found.push(change(before, entry));
        }
    }
    old.next().is_none().then_some(found)
}

fn change_of_group(old: Option<&Group>, new: &Group) -> MapChange {
    let is_current = |m: &Member| m.state == MemberState::Current;
    let follows = |m: &Member| m.since == new.epoch && m.lost_at == Epoch(0);
    let is_same = |old: &Group| {
        let targets = |group: &Group| group.members.iter().map(|m| m.target).collect::<Vec<_>>();
        old.pool == new.pool && old.scheme == new.scheme && targets(old) == targets(new)
    };
    let current_follow = new.members.iter().filter(|m| is_current(m)).all(follows);
    if !old.is_some_and(is_same) || !current_follow || new.members.len() > usize::from(u8::MAX) {
        return MapChange::Group { group: new.clone() };
    }
    let away = new.members.iter().enumerate().filter(|(_, m)| !is_current(m));
    let away = away.map(|(place, m)| MemberAway {
        place: place as u8,
        state: m.state,
        since: m.since,
        lost_at: m.lost_at,
    });
    MapChange::Members { group: new.id, epoch: new.epoch, away: away.collect() }
}

impl MapNews {
    /// The map after the news; `None`: they are not newer than the known one. `Stale`: they begin after the
    /// known version, so the whole map is needed.
    pub fn apply(&self, known: &Arc<ClusterMap>) -> Result<Option<Arc<ClusterMap>>> {
        let (cluster, from, steps) = match self {
            MapNews::Whole { map } => return Ok((map.version != known.version).then(|| map.clone())),
            MapNews::Steps { cluster, from, steps } => (cluster, *from, steps),
        };
        if *cluster != known.cluster {
            return Err(Error::denied(format!("news of cluster {cluster}, this is {}", known.cluster)));
        }
        let Some(skipped) = known.version.checked_sub(from) else {
            return Err(Error::stale(format!("news since version {from}, {} is known here", known.version)));
        };
        let newer = steps.get(usize::try_from(skipped).unwrap_or(usize::MAX)..).unwrap_or_default();
        if newer.is_empty() {
            return Ok(None);
        }
        let mut map = ClusterMap::clone(known);
        for step in newer {
            step.iter().try_for_each(|change| change.apply(&mut map))?;
            map.version += 1;
        }
        Ok(Some(Arc::new(map)))
    }

    /// The bytes of `Steps`, from those of each step ([`Wire::to_bytes`] of its changes).
    pub fn steps_head(cluster: ClusterId, from: u64, steps: usize) -> Vec<u8> {
        let mut w = Writer::default();
        MapNews::Steps { cluster, from, steps: Vec::new() }.encode(&mut w);
        let count = w.bytes.len() - size_of::<u32>();
        w.bytes[count..].copy_from_slice(&(steps as u32).to_le_bytes());
        w.bytes
    }
}

impl MapChange {
    /// Refuses a change that does not fit this map.
    pub fn apply(&self, map: &mut ClusterMap) -> Result<()> {
        match self {
            MapChange::Level { level } => map.level = *level,
            MapChange::Settings { settings } => map.settings = settings.clone(),
            MapChange::Node { node } => put(&mut map.nodes, node, |n| n.id),
            MapChange::Target { target } => put(&mut map.targets, target, |t| t.id),
            MapChange::Group { group } => put_group(&mut map.groups, group)?,
            MapChange::Members { group, epoch, away } => set_members(map, *group, *epoch, away)?,
            MapChange::Namespace { entry } => put(&mut map.namespaces, entry, |n| n.id),
            MapChange::NamespaceGone { id } => map.namespaces.retain(|entry| entry.id != *id),
            MapChange::Homes { homes } => map.homes = homes.clone(),
            MapChange::LastNamespace { id } => map.last_namespace = *id,
            MapChange::Removed { removed } => map.removed = removed.clone(),
            MapChange::Access { access } => map.access = access.clone(),
            MapChange::Authorities { pins } => map.authorities = pins.clone(),
            MapChange::Audits { audits } => map.audits = audits.clone(),
            MapChange::Copies { copies } => map.copies = copies.clone(),
            MapChange::Moves { moves } => map.moves = moves.clone(),
            MapChange::Generations { generations } => map.generations = generations.clone(),
            MapChange::LastTarget { id } => map.last_target = *id,
            MapChange::Full { full } => map.full = full.clone(),
        }
        Ok(())
    }
}

fn put<T: Clone, Id: PartialEq>(list: &mut Vec<T>, entry: &T, id: impl Fn(&T) -> Id) {
    match list.iter_mut().find(|known| id(known) == id(entry)) {
        Some(known) => *known = entry.clone(),
        None => list.push(entry.clone()),
    }
}

/// Groups are found by their number, so there are no gaps.
fn put_group(groups: &mut Vec<Group>, group: &Group) -> Result<()> {
    let (place, known) = (group.id.0 as usize, groups.len());
    match groups.get_mut(place) {
        Some(known) => *known = group.clone(),
        None if place == known => groups.push(group.clone()),
        None => return Err(Error::invalid(format!("news of {}, {known} groups are known", group.id))),
    }
    Ok(())
}

fn set_members(map: &mut ClusterMap, id: PgId, epoch: Epoch, away: &[MemberAway]) -> Result<()> {
    let groups = map.groups.len();
    let group = map.groups.get_mut(id.0 as usize).filter(|group| group.id == id);
    let group = group.ok_or_else(|| Error::invalid(format!("news of {id}, {groups} groups are known")))?;
    group.epoch = epoch;
    for member in &mut group.members {
        (member.state, member.since, member.lost_at) = (MemberState::Current, epoch, Epoch(0));
    }
    for MemberAway { place, state, since, lost_at } in away {
        let member = group.members.get_mut(usize::from(*place));
        let member = member.ok_or_else(|| Error::invalid(format!("news of place {place} of {id}")))?;
        (member.state, member.since, member.lost_at) = (*state, *since, *lost_at);
    }
    Ok(())
}

impl ClusterMap {
    /// Placeholder in a reply whose payload has the news. No map has version 0.
    pub fn absent() -> ClusterMap {
        let scheme = Scheme { data: 1, parity: 0 };
        ClusterMap {
            cluster: ClusterId([0; 16]),
            version: 0,
            level: 0,
            settings: Settings { scheme, cell_shift: 0, lease_ms: 0, target_silence_ms: 0 },
            nodes: Vec::new(),
            targets: Vec::new(),
            groups: Vec::new(),
            namespaces: Vec::new(),
            homes: Vec::new(),
            last_namespace: NamespaceId(0),
            removed: Vec::new(),
            access: AccessRules::default(),
            authorities: Vec::new(),
            audits: Vec::new(),
            copies: Vec::new(),
            moves: Vec::new(),
            generations: Vec::new(),
            last_target: TargetId::default(),
            full: Vec::new(),
        }
    }
}

/// A reply that carries the newest map: in its body for a peer of an older protocol version, otherwise as
/// news in its payload.
pub trait CarriesMap: Wire + Send {
    /// Takes the map out of the body; `None`: there is none.
    fn take_map(&mut self) -> Option<Arc<ClusterMap>>;
    /// For the caller: the map after the news.
    fn put_map(&mut self, map: Arc<ClusterMap>);
}

/// Whether the payload has the news in replies of this protocol version.
pub fn is_in_payload(version: u16) -> bool {
    version >= VERSION_OF_NEWS
}

impl CarriesMap for MapReply {
    fn take_map(&mut self) -> Option<Arc<ClusterMap>> {
        self.map.take()
    }
    fn put_map(&mut self, map: Arc<ClusterMap>) {
        self.map = Some(map);
    }
}

macro_rules! carries_map {
    ($($name:ident),*) => {$(
        impl CarriesMap for $name {
            fn take_map(&mut self) -> Option<Arc<ClusterMap>> {
                let map = std::mem::replace(&mut self.map, Arc::new(ClusterMap::absent()));
                (map.version > 0).then_some(map)
            }
            fn put_map(&mut self, map: Arc<ClusterMap>) {
                self.map = map;
            }
        }
    )*};
}
carries_map!(Joined, LeadReply, ClusterStatus);

#[cfg(test)]
#[path = "news_tests.rs"]
mod tests;
