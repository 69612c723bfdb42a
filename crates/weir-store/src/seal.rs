//! Seal: overlays of a stripe become a parity-covered base.
//!
//! Led by the first parity target, while all members are current: each data target folds its overlays into a version
//! beside its base, the leader encodes parity from those, all parity targets prepare it, and only then everybody
//! commits, the leader last. So as long as anything is in doubt the leader holds the prepared version and resolves it:
//! committed anywhere, or prepared everywhere → commit; else drop. Until the commit nothing old is touched.
//!
//! Whether and when to seal is [`judge`], a pure decision.
use crate::cells::Scope;
use crate::peers::join_all;
use crate::service::{Acting, RecentStripe, StorageNode, Target};
use bytes::Bytes;
use std::sync::{Arc, PoisonError};
use std::time::Duration;
use weir_proto::checksum::block_crcs;
use weir_proto::data::*;
use weir_proto::ec::Coder;
use weir_proto::map::{Group, MemberState, Scheme};
use weir_proto::{CellId, Error, ErrorKind, FileId, PgId, Result, Seq, Version};

/// When a stripe's overlays are sealed.
#[derive(Clone, Copy, Debug)]
pub struct SealLimits {
    /// Up to here overlays may stay for ever: sealing a small file costs more than it saves.
    pub small_bytes: u64,
    /// From here a stripe is sealed even while it is written: the default stripe's 4 MiB is then covered.
    pub full_bytes: u64,
    /// From so many extents a stripe is sealed even while it is written: reads apply them one by one.
    pub count_max: u64,
    pub idle: Duration,
}
impl SealLimits {
    pub const DEFAULT: SealLimits = SealLimits {
        small_bytes: 128 << 10,
        full_bytes: 4 << 20,
        count_max: 2048,
        idle: Duration::from_secs(2),
    };
}

/// What is known of a stripe with overlays.
#[derive(Clone, Copy, Debug)]
pub struct SealFacts {
    pub overlay_bytes: u64,
    pub overlay_count: u64,
    pub idle: Duration,
    pub all_current: bool,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum SealVerdict {
    Seal,
    /// Look again later.
    Wait,
    /// Nothing to do until it is written again.
    Leave,
}

pub fn judge(facts: &SealFacts, limits: &SealLimits) -> SealVerdict {
    let worth = facts.overlay_bytes > limits.small_bytes || facts.overlay_count > limits.count_max / 16;
    let urgent = facts.overlay_bytes >= limits.full_bytes || facts.overlay_count >= limits.count_max;
    let idle = facts.idle >= limits.idle;
    match (worth, urgent || idle, facts.all_current) {
        (false, _, _) if idle => SealVerdict::Leave,
        (true, true, true) => SealVerdict::Seal,
        _ => SealVerdict::Wait,
    }
}

/// What becomes of a version that a seal left in doubt.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Doubt {
    Commit,
    Drop,
    /// Not everybody who must be asked has answered.
    Ask,
}

/// `answers`: what each member of the group holds, `None` where it cannot be asked.
pub fn resolve(version: Version, answers: &[Option<CellStat>]) -> Doubt {
    let known = || answers.iter().flatten();
    if known().any(|s| s.base == version) {
        return Doubt::Commit;
    }
    if known().any(|s| s.base > version) {
        return Doubt::Drop;
    }
    match answers.iter().all(|a| a.as_ref().is_some_and(|s| s.prepared.contains(&version))) {
        true => Doubt::Commit,
        // Commits begin only when everybody has prepared: somebody who has not is proof that nobody committed.
        false if known().any(|s| !s.prepared.contains(&version)) => Doubt::Drop,
        false => Doubt::Ask,
    }
}

/// The member that leads seals: the first parity target; without parity the only data target.
pub(crate) fn seal_position(scheme: Scheme) -> usize {
    if scheme.parity == 0 { 0 } else { usize::from(scheme.data) }
}

/// The position that leads the seals of a group, if everybody is current.
fn leader(group: &Group) -> Option<usize> {
    let all = group.members.iter().all(|m| m.state == MemberState::Current);
    all.then_some(seal_position(group.scheme))
}

impl StorageNode {
    /// One round over the stripes with recent overlays; returns how many were sealed.
    pub(crate) async fn seal_round(&self, target: &Arc<Target>, limits: &SealLimits) -> Result<usize> {
        self.find_overlaid(target, limits)?;
        let now = self.env.clock.now();
        let due: Vec<_> = {
            let recent = target.recent.lock().unwrap_or_else(PoisonError::into_inner);
            let due = |s: &RecentStripe| {
                s.bytes >= limits.full_bytes || s.count >= limits.count_max || now.since(s.at) >= limits.idle
            };
            recent
                .stripes
                .iter()
                .filter(|(_, s)| due(s))
                .map(|(stripe, s)| (*stripe, s.group, s.at))
                .collect()
        };
        let mut sealed = 0;
        for ((file, stripe), group, at) in due {
            let verdict = match self.as_leader(target, group) {
                None => SealVerdict::Leave,
                Some(acting) if leader(acting.group()).is_none() => SealVerdict::Wait,
                Some(acting) => {
                    let (overlay_bytes, overlay_count) = overlays_of(target, &acting.scope, file, stripe)?;
                    judge(
                        &SealFacts { overlay_bytes, overlay_count, idle: now.since(at), all_current: true },
                        limits,
                    )
                }
            };
            if verdict == SealVerdict::Wait {
                continue;
            }
            if verdict == SealVerdict::Seal {
                match self.seal_stripe(target, group, file, stripe).await {
                    Ok(()) => sealed += 1,
                    Err(e) => {
                        tracing::debug!(%file, stripe, "seal: {e}");
                        // It may have ended in doubt; and it is not tried again at once.
                        self.settle(target).await?;
                        let mut recent = target.recent.lock().unwrap_or_else(PoisonError::into_inner);
                        if let Some(s) = recent.stripes.get_mut(&(file, stripe)) {
                            (s.at, s.bytes, s.count) = (self.env.clock.now(), 0, 0);
                        }
                        continue;
                    }
                }
            }
            let mut recent = target.recent.lock().unwrap_or_else(PoisonError::into_inner);
            if recent.stripes.get(&(file, stripe)).is_some_and(|s| s.at == at) {
                recent.stripes.remove(&(file, stripe));
            }
        }
        Ok(sealed)
    }

    /// After a start, or when too many stripes were written to remember them: the index knows.
    fn find_overlaid(&self, target: &Target, limits: &SealLimits) -> Result<()> {
        let mut recent = target.recent.lock().unwrap_or_else(PoisonError::into_inner);
        if !recent.incomplete || recent.stripes.len() > crate::service::RECENT_MAX / 2 {
            return Ok(());
        }
        recent.incomplete = false;
        drop(recent);
        let found = target.store.overlaid(limits.small_bytes / 32)?;
        let now = self.env.clock.now();
        let mut recent = target.recent.lock().unwrap_or_else(PoisonError::into_inner);
        for (cell, header) in found {
            if recent.stripes.len() >= crate::service::RECENT_MAX {
                recent.incomplete = true;
                break;
            }
            recent.stripes.entry((cell.file, cell.stripe)).or_insert(RecentStripe {
                group: header.group,
                at: now,
                bytes: 0,
                count: 0,
            });
        }
        Ok(())
    }

    /// Seals every stripe of a file whose seals this target leads.
    pub(crate) async fn seal_file_now(&self, target: &Arc<Target>, file: FileId) -> Result<()> {
        let mut stripes: Vec<(u64, PgId)> =
            target.store.overlaid_cells(file)?.into_iter().map(|(cell, h)| (cell.stripe, h.group)).collect();
        stripes.dedup();
        for (stripe, group) in stripes {
            if self.as_leader(target, group).is_some_and(|a| leader(a.group()) == Some(a.position)) {
                self.seal_stripe(target, group, file, stripe).await?;
            }
        }
        Ok(())
    }

    /// This target as the (possible) leader of a group's seals: its first parity member.
    fn as_leader(&self, target: &Arc<Target>, group: PgId) -> Option<Acting> {
        let map = self.peers.map();
        let entry = map.group(group)?;
        let position = seal_position(entry.scheme);
        if entry.members.get(position)?.target != target.store.target {
            return None;
        }
        let scope = Scope::of(entry);
        Some(Acting { target: target.clone(), scope, map: map.clone(), position })
    }

    /// Seals one stripe now. An error leaves everything as it was, or in doubt until [`StorageNode::settle`].
    pub(crate) async fn seal_stripe(
        &self,
        target: &Arc<Target>,
        group: PgId,
        file: FileId,
        stripe: u64,
    ) -> Result<()> {
        let acting = self
            .as_leader(target, group)
            .filter(|a| leader(a.group()) == Some(a.position))
            .ok_or_else(|| Error::unavailable(format!("seal in {group}: not all members are current")))?;
        let scope = acting.scope;
        let first = CellId { file, stripe, index: 0 };
        let stats = self.stat_all(&acting, file, stripe).await;
        let mut newest = Version::new(token_epoch(target, &scope, file, stripe)?, 0);
        for stat in stats {
            let stat = stat?;
            newest = stat.prepared.into_iter().fold(newest.max(stat.base), Version::max);
        }
        // Odd: a writer's are even (see `WriteMode::Prepare`).
        let version = Version((newest.0 + 1) | 1);
        let data = usize::from(scope.scheme.data);
        let sealed = self.fold(&acting, data, version, first).await;
        let prepared = match sealed {
            Ok(cells) => self.prepare_parity(&acting, version, first, cells).await,
            Err(e) => Err(e),
        };
        if let Err(e) = prepared {
            self.drop_everywhere(&acting, version, first).await;
            return Err(e);
        }
        self.commit_everywhere(&acting, version, file, stripe).await
    }

    /// Each data target's new base, with its bytes.
    async fn fold(
        &self,
        acting: &Acting,
        data: usize,
        version: Version,
        first: CellId,
    ) -> Result<Vec<(SealedCell, Bytes)>> {
        let calls = (0..data)
            .map(|i| {
                let place = place(acting, i);
                self.ask(place.target, SealCell { place, cell: nth(first, i), version }, Vec::new())
            })
            .collect();
        join_all(calls).await.into_iter().collect()
    }

    async fn prepare_parity(
        &self,
        acting: &Acting,
        version: Version,
        first: CellId,
        cells: Vec<(SealedCell, Bytes)>,
    ) -> Result<()> {
        let cuts: Vec<Seq> = cells.iter().map(|(c, _)| c.cut).collect();
        for (sealed, bytes) in &cells {
            if bytes.len() != sealed.fragment_bytes as usize
                || block_crcs(bytes, CHECKSUM_BLOCK as usize) != sealed.block_crcs
            {
                return Err(Error::damaged(format!("seal of stripe {}: bytes fail their checksum", first)));
            }
        }
        let scheme = acting.scope.scheme;
        let buffers = self.env.buffers.clone();
        let parity = self
            .env
            .tasks
            .blocking(move || -> Result<Vec<(Bytes, Vec<u32>)>> {
                let len = cells.iter().map(|(_, b)| b.len()).max().unwrap_or(0);
                let mut parity: Vec<_> = (0..scheme.parity).map(|_| buffers.get(len)).collect();
                let inputs: Vec<&[u8]> = cells.iter().map(|(_, b)| &b[..]).collect();
                let mut outputs: Vec<&mut [u8]> = parity.iter_mut().map(|p| &mut p[..]).collect();
                Coder::new(scheme)?.encode(&inputs, &mut outputs)?;
                let with_crcs = |p: weir_env::Buf| {
                    let crcs = block_crcs(&p, CHECKSUM_BLOCK as usize);
                    (p.freeze(), crcs)
                };
                Ok(parity.into_iter().map(with_crcs).collect())
            })
            .await?;
        let data = usize::from(scheme.data);
        let calls = parity
            .into_iter()
            .enumerate()
            .map(|(i, (bytes, block_crcs))| {
                let place = place(acting, data + i);
                let request = WriteFragment {
                    place,
                    cell: nth(first, data + i),
                    version,
                    mode: WriteMode::PrepareSeal,
                    missing: 0,
                    cuts: cuts.clone(),
                    block_crcs,
                };
                self.ask(place.target, request, if bytes.is_empty() { Vec::new() } else { vec![bytes] })
            })
            .collect();
        join_all(calls).await.into_iter().try_for_each(|r| r.map(|_| ()))
    }

    /// Commits on all others, then here: while anything is in doubt the leader keeps its prepared version.
    async fn commit_everywhere(
        &self,
        acting: &Acting,
        version: Version,
        file: FileId,
        stripe: u64,
    ) -> Result<()> {
        let commit = |i: usize| {
            let place = place(acting, i);
            let cell = CellId { file, stripe, index: i as u8 };
            self.ask(place.target, CommitStripe { place, cell, version }, Vec::new())
        };
        let others = (0..acting.group().members.len()).filter(|i| *i != acting.position);
        let (mut committed, mut first_problem) = (false, None);
        for outcome in join_all(others.map(commit).collect()).await {
            match outcome {
                Ok(_) => committed = true,
                // Overtaken by a later version, or dropped with its file: nothing is in doubt there.
                Err(e) if matches!(e.kind, ErrorKind::NotFound) => tracing::debug!("seal: {e}"),
                Err(e) => drop(first_problem.get_or_insert(e)),
            }
        }
        match first_problem {
            // One commit decides: who missed it holds it prepared and settles, or comes back behind and is repaired.
            Some(e) if !committed => Err(e),
            _ => commit(acting.position).await.map(|_| ()),
        }
    }

    async fn drop_everywhere(&self, acting: &Acting, version: Version, first: CellId) {
        let calls = (0..acting.group().members.len())
            .map(|i| {
                let place = place(acting, i);
                self.ask(place.target, DropPrepared { place, cell: nth(first, i), version }, Vec::new())
            })
            .collect();
        for e in join_all(calls).await.into_iter().filter_map(|r| r.err()) {
            tracing::debug!("drop a version that is not needed: {e}");
        }
    }

    async fn stat_all(&self, acting: &Acting, file: FileId, stripe: u64) -> Vec<Result<CellStat>> {
        let calls = (0..acting.group().members.len())
            .map(|i| {
                let place = place(acting, i);
                self.ask(
                    place.target,
                    StatCell { place, cell: CellId { file, stripe, index: i as u8 } },
                    Vec::new(),
                )
            })
            .collect();
        join_all(calls).await.into_iter().map(|r| r.map(|(stat, _)| stat)).collect()
    }

    /// Settles what seals left in doubt on this target: after a start, and now and then.
    pub(crate) async fn settle(&self, target: &Arc<Target>) -> Result<()> {
        let seals = target.store.in_doubt()?.into_iter().filter(|(_, _, seal)| *seal);
        for (cell, version, _) in seals {
            if let Err(e) = self.settle_one(target, cell, version).await {
                tracing::debug!(%cell, "settle a version in doubt: {e}");
            }
        }
        Ok(())
    }
    async fn settle_one(&self, target: &Arc<Target>, cell: CellId, version: Version) -> Result<()> {
        let Some(header) = target.store.header(cell)? else { return Ok(()) };
        let map = self.peers.map();
        let Some(group) = map.group(header.group) else { return Ok(()) };
        let Some(position) = group.members.iter().position(|m| m.target == target.store.target) else {
            return Ok(());
        };
        let scope = Scope::of(group);
        let acting = Acting { target: target.clone(), scope, map: map.clone(), position };
        let answers: Vec<_> =
            self.stat_all(&acting, cell.file, cell.stripe).await.into_iter().map(Result::ok).collect();
        match (resolve(version, &answers), leader(group) == Some(position)) {
            (Doubt::Commit, true) => self.commit_everywhere(&acting, version, cell.file, cell.stripe).await,
            // Not the leader: only what is certain is followed.
            (Doubt::Commit, false) if answers.iter().flatten().any(|s| s.base == version) => {
                let seq = target.store.commit_stripe(&scope, cell, version)?;
                target.store.durable(seq).await
            }
            (Doubt::Drop, true) => {
                self.drop_everywhere(&acting, version, cell).await;
                Ok(())
            }
            _ => Ok(()),
        }
    }
}

/// Another fragment of a cell's stripe.
fn nth(of: CellId, index: usize) -> CellId {
    CellId { index: index as u8, ..of }
}

fn place(acting: &Acting, position: usize) -> Place {
    let group = acting.group();
    Place { target: group.members[position].target, group: group.id, epoch: group.epoch }
}

/// Bytes and number of a stripe's overlays that are mirrored here.
fn overlays_of(target: &Target, scope: &Scope, file: FileId, stripe: u64) -> Result<(u64, u64)> {
    let mut sum = (0, 0);
    for index in 0..scope.scheme.data {
        if let Some(h) = target.store.header(CellId { file, stripe, index })? {
            sum = (sum.0 + h.overlay_bytes, sum.1 + h.overlay_count);
        }
    }
    Ok(sum)
}

/// The newest token epoch of the stripe's overlays: a seal acts under it, so that a fence stops it too.
fn token_epoch(target: &Target, scope: &Scope, file: FileId, stripe: u64) -> Result<u32> {
    let mut newest = 0;
    for index in 0..scope.scheme.data {
        newest = newest.max(target.store.newest_token_epoch(CellId { file, stripe, index })?);
    }
    Ok(newest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn when_to_seal() {
        let limits = SealLimits::DEFAULT;
        let facts = |overlay_bytes, overlay_count, idle_ms, all_current| SealFacts {
            overlay_bytes,
            overlay_count,
            idle: Duration::from_millis(idle_ms),
            all_current,
        };
        for (facts, verdict) in [
            (facts(4096, 1, 0, true), SealVerdict::Wait),
            (facts(4096, 1, 5000, true), SealVerdict::Leave),
            (facts(4096, 1, 5000, false), SealVerdict::Leave),
            (facts(1 << 20, 16, 100, true), SealVerdict::Wait),
            (facts(1 << 20, 16, 5000, true), SealVerdict::Seal),
            (facts(1 << 20, 16, 5000, false), SealVerdict::Wait),
            (facts(4 << 20, 90, 0, true), SealVerdict::Seal),
            (facts(100_000, 5000, 0, true), SealVerdict::Seal),
        ] {
            assert_eq!(judge(&facts, &limits), verdict, "{facts:?}");
        }
    }

    #[test]
    fn what_becomes_of_a_version_in_doubt() {
        let v = Version::new(1, 9);
        let stat = |base: Version, prepared: &[Version]| {
            Some(CellStat {
                known: true,
                base,
                prepared: prepared.to_vec(),
                overlay_seqs: vec![],
                cuts: vec![],
                missing: 0,
                fragment_bytes: 0,
            })
        };
        let (old, has, done) = (stat(Version(1), &[]), stat(Version(1), &[v]), stat(v, &[]));
        let later = stat(Version::new(1, 10), &[]);
        for (answers, doubt) in [
            (vec![has.clone(), has.clone(), has.clone()], Doubt::Commit),
            (vec![has.clone(), old.clone(), has.clone()], Doubt::Drop),
            (vec![has.clone(), old.clone(), done.clone()], Doubt::Commit),
            (vec![has.clone(), None, done], Doubt::Commit),
            (vec![has.clone(), None, has.clone()], Doubt::Ask),
            (vec![has.clone(), None, old], Doubt::Drop),
            (vec![has, later], Doubt::Drop),
        ] {
            assert_eq!(resolve(v, &answers), doubt, "{answers:?}");
        }
    }
}
