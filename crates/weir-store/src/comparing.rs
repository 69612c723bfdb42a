//! Compares what a target knows of its stripes with what the other members know, and repairs what differs.
//!
//! A scrub finds bytes that do not fit their checksum. It does not find a cell whose index entry is gone or
//! old: that is what this is for. A stripe that is being written differs, too, so only a difference counts
//! that is the same a moment later. Only the member that all others contradict changes anything, by the usual
//! repair; and what a writer has prepared is left to the settling of writes.
//!
//! Of one stripe in a thousand, and of the first of each group, the first parity member encodes the parity
//! again and compares it with its own.
use crate::cells::Scope;
use crate::repair::{StripePlan, StripeView, current_peers, plan};
use crate::service::{Acting, StorageNode, Target};
use std::collections::BTreeMap;
use std::sync::{Arc, Weak};
use std::time::Duration;
use weir_env::Clock;
use weir_proto::data::CompareTarget;
use weir_proto::map::{Group, MemberState};
use weir_proto::{CellId, Epoch, FileId, PgId, Result, Seq, Version};
use weir_rpc::{Handled, Reply};

/// How often the loop checks whether a pass is due.
const CHECK_EVERY: Duration = Duration::from_secs(60);
/// A write is at all members, or at none, after this time.
const RECHECK_AFTER: Duration = Duration::from_secs(2);
/// The pause after a listing, in times of how long it took: a pass takes less than 3 % of a processor.
const PAUSE_TIMES: u32 = 40;

/// A stripe as it differs: the others' view, the own base, and the own logs.
#[derive(Clone, PartialEq, Eq, Debug)]
struct Differing {
    view: StripeView,
    own: Version,
    own_logs: BTreeMap<u8, (Seq, u64)>,
    todo: StripePlan,
}

/// Compares until the node ends.
pub(crate) async fn compare(clock: Clock, node: Weak<StorageNode>, target: Weak<Target>) {
    loop {
        let Some((node, target)) = node.upgrade().zip(target.upgrade()) else { return };
        if target.comparer.is_due(clock.now()) {
            node.compare_pass(&target).await;
        }
        drop(node);
        let _ = clock.timeout(CHECK_EVERY, target.comparer.wanted.notified()).await; // or on request
    }
}

impl StorageNode {
    pub(crate) fn compare_target(&self, r: &CompareTarget) -> Handled {
        let asked = self.target(r.target).map(|target| {
            if r.start {
                target.comparer.ask();
            }
            Reply::new(&target.comparer.report())
        });
        Handled::Now(asked)
    }

    async fn compare_pass(&self, target: &Arc<Target>) {
        let (clock, comparer) = (&self.env.clock, &target.comparer);
        let map = self.peers.map();
        let mine = |g: &&Group| g.members.iter().any(|m| m.target == target.store.target);
        let redundant = |g: &&Group| g.scheme.parity > 0;
        let groups: Vec<PgId> = map.groups.iter().filter(mine).filter(redundant).map(|g| g.id).collect();
        comparer.begin(clock.now(), clock.wall(), groups.len());
        for group in groups {
            match self.compare_group(target, group).await {
                Ok(true) => comparer.note(|pass| pass.groups_done += 1),
                Ok(false) => {} // members are away, or being repaired
                Err(e) => tracing::debug!(on = %target.store.target, %group, "compare versions: {e}"),
            }
        }
        if let Some(pass) = comparer.end(clock.wall()) {
            tracing::info!(on = %target.store.target, ?pass, "compared with the other members");
        }
    }

    /// This target's place in a group whose members are all current and stay.
    fn whole_group(&self, target: &Arc<Target>, group: PgId) -> Option<Acting> {
        let map = self.peers.map();
        let entry = map.group(group)?;
        let position = entry.members.iter().position(|m| m.target == target.store.target)?;
        let is_whole = entry.members.iter().all(|m| m.state == MemberState::Current);
        let scope = Scope::at(entry, position);
        let acting = || Acting { target: target.clone(), scope, map: map.clone(), position };
        (is_whole && map.move_of(group).is_none()).then(acting)
    }

    /// False: not all members are current.
    async fn compare_group(&self, target: &Arc<Target>, group: PgId) -> Result<bool> {
        let (clock, comparer) = (&self.env.clock, &target.comparer);
        let Some(acting) = self.whole_group(target, group) else { return Ok(false) };
        let peers = current_peers(acting.group(), acting.position);
        let mut after = None;
        loop {
            let begun = clock.now();
            let (stripes, next) = self.list_stripes(&acting, &peers, after, Epoch(0)).await?;
            comparer.note(|pass| pass.stripes += stripes.len() as u64);
            let mut differing = BTreeMap::new();
            for ((file, stripe), view) in &stripes {
                if let Some(found) = differs(&acting, *file, *stripe, view)? {
                    differing.insert((*file, *stripe), found);
                }
            }
            if !differing.is_empty() {
                clock.sleep(RECHECK_AFTER).await;
                let (again, _) = self.list_stripes(&acting, &peers, after, Epoch(0)).await?;
                self.repair_differing(&acting, differing, &again).await?;
            }
            if acting.position == usize::from(acting.scope.scheme.data) {
                let is_first = |at: usize| at == 0 && after.is_none();
                for (at, (file, stripe)) in stripes.keys().enumerate() {
                    if is_first(at) || comparer.is_sampled(*file, *stripe) {
                        self.encode_again(&acting, *file, *stripe).await?;
                    }
                }
            }
            let took = clock.now().since(begun);
            clock.sleep(if comparer.is_asked() { took } else { took * PAUSE_TIMES }).await;
            after = next;
            if after.is_none() {
                return Ok(true);
            }
        }
    }

    /// Repairs stripes that still differ in the same way.
    async fn repair_differing(
        &self,
        acting: &Acting,
        differing: BTreeMap<(FileId, u64), Differing>,
        again: &BTreeMap<(FileId, u64), StripeView>,
    ) -> Result<()> {
        for ((file, stripe), before) in differing {
            let now = match again.get(&(file, stripe)) {
                Some(view) => differs(acting, file, stripe, view)?,
                None => None, // truncated
            };
            let Some(found) = now.filter(|now| *now == before) else { continue };
            let on = acting.target.store.target;
            tracing::warn!(%on, %file, stripe, own = %found.own, newest = %found.view.newest, "not what the other members have");
            acting.target.comparer.note(|pass| pass.differing += 1);
            let own = CellId { file, stripe, index: acting.position as u8 };
            if found.todo.rebuild.is_some() {
                self.rebuild(acting, own, false).await?;
            }
            for index in &found.todo.copy {
                self.copy_overlays(acting, CellId { index: *index, ..own }).await?;
            }
            if differs(acting, file, stripe, &found.view)?.is_none() {
                acting.target.comparer.note(|pass| pass.repaired += 1);
            }
        }
        Ok(())
    }

    /// Encodes this member's parity from the other members' fragments and compares it with its own, which is
    /// replaced if it differs: readers see the data cells.
    async fn encode_again(&self, acting: &Acting, file: FileId, stripe: u64) -> Result<()> {
        let own = CellId { file, stripe, index: acting.position as u8 };
        let base = || acting.target.store.stat_cell(&acting.scope, own).map(|stat| stat.base);
        let version = base()?;
        let Some(encoded) = self.decode_from_peers(acting, own).await? else { return Ok(()) };
        if version == Version(0) || encoded.version != version {
            return Ok(()); // it is being written
        }
        // Damage to its bytes is the scrub's to find.
        let Ok((_, kept)) = self.read_fragment(acting, acting.position, own, version).await else {
            return Ok(());
        };
        let shorter = kept.len().min(encoded.bytes.len());
        let is_zero = |rest: &[u8]| rest.iter().all(|byte| *byte == 0);
        let same = kept[..shorter] == encoded.bytes[..shorter]
            && is_zero(&kept[shorter..])
            && is_zero(&encoded.bytes[shorter..]);
        if base()? != version {
            return Ok(());
        }
        acting.target.comparer.note(|pass| pass.encoded += 1);
        if !same {
            let on = acting.target.store.target;
            tracing::warn!(%on, %file, stripe, "the parity is not that of the data: it is replaced");
            acting.target.comparer.note(|pass| pass.mismatched += 1);
            self.rebuild(acting, own, true).await?;
        }
        Ok(())
    }
}

/// How the target's own part of a stripe differs from what all other members agree on.
fn differs(acting: &Acting, file: FileId, stripe: u64, view: &StripeView) -> Result<Option<Differing>> {
    let store = &acting.target.store;
    let own = CellId { file, stripe, index: acting.position as u8 };
    let stat = store.stat_cell(&acting.scope, own)?;
    let data = usize::from(acting.scope.scheme.data);
    let mut own_logs = BTreeMap::new();
    for index in view.logs.keys() {
        if let Some(h) = store.header(CellId { index: *index, ..own })? {
            own_logs.insert(*index, (h.last_seq, h.log_sum));
        }
    }
    let mut todo = plan(view, stat.base, &own_logs, acting.position, data);
    if stat.prepared.contains(&view.newest) {
        todo.rebuild = None;
    }
    // The own log may be the right one if the others differ among themselves, or have less.
    let own_seq = |index: &u8| own_logs.get(index).map_or(Seq(0), |(seq, _)| *seq);
    todo.copy.retain(|index| {
        let logs = &view.logs[index];
        logs.len() == 1 && logs.iter().all(|(seq, _)| *seq >= own_seq(index))
    });
    let differs = todo != StripePlan::default();
    Ok(differs.then(|| Differing { view: view.clone(), own: stat.base, own_logs, todo }))
}
