//! Compares what a target knows of its stripes with what the other members know, and repairs what differs.
//!
//! A scrub finds bytes that do not fit their checksum. It does not find a cell whose index entry is gone or
//! old: that is what this is for. A stripe that is being written differs, too, so only a difference counts
//! that is the same a moment later. Only the member that all others contradict changes anything, by the usual
//! repair; and what a writer has prepared is left to the settling of writes.
//!
//! Of one stripe in a thousand, and of the first of each group, the first parity member encodes the parity
//! again and compares it with its own.
use crate::compare::Comparer;
use crate::group::current_peers;
use crate::membership::{Acting, Membership};
use crate::rebuild::Rebuilder;
use crate::stripes::{StripePlan, StripeView, Stripes, logs_here, plan};
use std::collections::BTreeMap;
use std::sync::{Arc, Weak};
use std::time::Duration;
use weir_env::{Clock, Env};
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

/// Compares until the target ends.
pub(crate) async fn compare(clock: Clock, target: Weak<Comparing>) {
    while let Some(comparing) = target.upgrade() {
        if comparing.comparer.is_due(clock.now()) {
            comparing.compare_pass().await;
        }
        let _ = clock.timeout(CHECK_EVERY, comparing.comparer.wanted.notified()).await; // or on request
    }
}

pub(crate) struct Comparing {
    env: Env,
    members: Arc<Membership>,
    rebuilder: Arc<Rebuilder>,
    stripes: Arc<Stripes>,
    comparer: Comparer,
}

impl Comparing {
    pub fn new(
        env: &Env,
        members: &Arc<Membership>,
        rebuilder: &Arc<Rebuilder>,
        stripes: &Arc<Stripes>,
    ) -> Arc<Comparing> {
        Arc::new(Comparing {
            env: env.clone(),
            members: members.clone(),
            rebuilder: rebuilder.clone(),
            stripes: stripes.clone(),
            comparer: Comparer::default(),
        })
    }

    pub fn compare_target(&self, r: &CompareTarget) -> Handled {
        if r.start {
            self.comparer.ask();
        }
        Handled::Now(Ok(Reply::new(&self.comparer.report())))
    }

    async fn compare_pass(&self) {
        let (clock, comparer, on) = (&self.env.clock, &self.comparer, self.members.target());
        let map = self.members.map();
        let mine = |g: &&Group| self.members.is_member(g);
        let redundant = |g: &&Group| g.scheme.parity > 0;
        let groups: Vec<PgId> = map.groups.iter().filter(mine).filter(redundant).map(|g| g.id).collect();
        comparer.begin(clock.now(), clock.wall(), groups.len());
        for group in groups {
            match self.compare_group(group).await {
                Ok(true) => comparer.note(|pass| pass.groups_done += 1),
                Ok(false) => {} // members are away, or being repaired
                Err(e) => tracing::debug!(%on, %group, "compare versions: {e}"),
            }
        }
        if let Some(pass) = comparer.end(clock.wall()) {
            tracing::info!(%on, ?pass, "compared with the other members");
        }
    }

    /// This target's place in a group whose members are all current and stay.
    fn whole_group(&self, group: PgId) -> Option<Acting> {
        let is_whole = |acting: &Acting| {
            let all_current = acting.group().members.iter().all(|m| m.state == MemberState::Current);
            all_current && acting.map.move_of(group).is_none()
        };
        self.members.place_in(group).filter(is_whole)
    }

    /// False: not all members are current.
    async fn compare_group(&self, group: PgId) -> Result<bool> {
        let (clock, comparer) = (&self.env.clock, &self.comparer);
        let Some(acting) = self.whole_group(group) else { return Ok(false) };
        let peers = current_peers(acting.group(), acting.position);
        let mut after = None;
        loop {
            let begun = clock.now();
            let (stripes, next) = self.stripes.list_stripes(&acting, &peers, after, Epoch(0)).await?;
            comparer.note(|pass| pass.stripes += stripes.len() as u64);
            let mut differing = BTreeMap::new();
            for ((file, stripe), view) in &stripes {
                if let Some(found) = differs(&acting, *file, *stripe, view)? {
                    differing.insert((*file, *stripe), found);
                }
            }
            if !differing.is_empty() {
                clock.sleep(RECHECK_AFTER).await;
                let (again, _) = self.stripes.list_stripes(&acting, &peers, after, Epoch(0)).await?;
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
            let on = acting.target();
            tracing::warn!(%on, %file, stripe, own = %found.own, newest = %found.view.newest, "not what the other members have");
            self.comparer.note(|pass| pass.differing += 1);
            let own = acting.own_cell(file, stripe);
            if found.todo.rebuild.is_some() {
                self.rebuilder.rebuild(acting, own, false).await?;
            }
            for index in &found.todo.copy {
                self.stripes.copy_overlays(acting, CellId { index: *index, ..own }).await?;
            }
            if differs(acting, file, stripe, &found.view)?.is_none() {
                self.comparer.note(|pass| pass.repaired += 1);
            }
        }
        Ok(())
    }

    /// Encodes this member's parity from the other members' fragments and compares it with its own, which is
    /// replaced if it differs: readers see the data cells.
    async fn encode_again(&self, acting: &Acting, file: FileId, stripe: u64) -> Result<()> {
        let own = acting.own_cell(file, stripe);
        let base = || acting.store.stat_cell(&acting.scope, own).map(|stat| stat.base);
        let version = base()?;
        let Some(encoded) = self.rebuilder.decode_from_peers(acting, own).await? else { return Ok(()) };
        if version == Version(0) || encoded.version != version {
            return Ok(()); // it is being written
        }
        // Damage to its bytes is the scrub's to find.
        let Ok((_, kept)) = self.rebuilder.read_fragment(acting, acting.position, own, version).await else {
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
        self.comparer.note(|pass| pass.encoded += 1);
        if !same {
            let on = acting.target();
            tracing::warn!(%on, %file, stripe, "the parity is not that of the data: it is replaced");
            self.comparer.note(|pass| pass.mismatched += 1);
            self.rebuilder.rebuild(acting, own, true).await?;
        }
        Ok(())
    }
}

/// How the target's own part of a stripe differs from what all other members agree on.
fn differs(acting: &Acting, file: FileId, stripe: u64, view: &StripeView) -> Result<Option<Differing>> {
    let own = acting.own_cell(file, stripe);
    let stat = acting.store.stat_cell(&acting.scope, own)?;
    let data = usize::from(acting.scope.scheme.data);
    let own_logs = logs_here(acting, own, view)?;
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
