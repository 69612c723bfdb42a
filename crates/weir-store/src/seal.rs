//! Seal: overlays of a stripe become a parity-covered base.
//!
//! Led by the first current parity target, among the members that are current; while one is behind seals
//! wait, as it is soon repaired. They continue while one is filled from nothing, which may take hours. Each
//! data target folds its overlays into a version beside its base; for a lost data target the leader decodes
//! the base and merges the overlays of its own log. The leader encodes parity from those, all parity targets
//! prepare it, and only then all participants commit, the leader last. So while a version is in doubt the
//! leader holds it prepared and resolves it: committed at any member, or prepared at every participant →
//! commit; else drop. No old data is changed before the commit. Members that took no part are in the mask of
//! the version, and rebuild their fragment when they return.
//!
//! Whether and when to seal is [`evaluate`], a pure decision; `rounds.rs` carries it out. `settle.rs`
//! resolves versions in doubt.
use crate::calls::Calls;
use crate::crash_points;
use crate::group::seal_leader;
use crate::membership::{Acting, Membership};
use crate::peers::join_all;
use crate::rebuild::Rebuilder;
use crate::recent::Recent;
use crate::store::Store;
use bytes::Bytes;
use std::sync::Arc;
use weir_env::{BoxFuture, Env};
use weir_proto::checksum::{block_crcs, crc32c};
use weir_proto::data::*;
use weir_proto::ec::Coder;
use weir_proto::map::{Group, MemberState};
use weir_proto::{CellId, Error, ErrorKind, FileId, PgId, Result, Seq, Version};

mod decide;
mod rounds;
mod settle;

pub use decide::{InDoubt, SealFacts, SealLimits, SealVerdict, evaluate, resolve, version_of};

/// Whether a stripe of the group can be sealed now.
pub fn can_seal(group: &Group, level: u16) -> bool {
    seal_leader(group).is_some() && group.is_writable() && !group.pauses_seals(level)
}
/// The places of the members that take part.
fn participants(group: &Group) -> Vec<usize> {
    let current = |p: &usize| group.members[*p].state == MemberState::Current;
    (0..group.members.len()).filter(current).collect()
}

/// Whether every holder of a version in doubt follows the verdict by itself. No seal begins while one waits,
/// and answers do not change under this map. It is necessary: the member that is behind waits for it, and
/// there may be no leader, or one without a record of that seal.
pub(crate) fn is_settled_by_all(group: &Group, level: u16) -> bool {
    group.pauses_seals(level)
}

pub(crate) struct Seals {
    env: Env,
    members: Arc<Membership>,
    calls: Arc<Calls>,
    rebuilder: Arc<Rebuilder>,
    recent: Arc<Recent>,
}

impl Seals {
    pub fn new(
        env: &Env,
        members: &Arc<Membership>,
        calls: &Arc<Calls>,
        rebuilder: &Arc<Rebuilder>,
        recent: &Arc<Recent>,
    ) -> Arc<Seals> {
        Arc::new(Seals {
            env: env.clone(),
            members: members.clone(),
            calls: calls.clone(),
            rebuilder: rebuilder.clone(),
            recent: recent.clone(),
        })
    }

    /// This target as the leader of a group's seals.
    fn as_leader(&self, group: PgId) -> Option<Acting> {
        let acting = self.members.current_in(group)?;
        (seal_leader(acting.group()) == Some(acting.position)).then_some(acting)
    }

    /// Seals one stripe now. An error leaves everything as it was, or in doubt until [`Seals::settle`].
    async fn seal_stripe(&self, group: PgId, file: FileId, stripe: u64) -> Result<()> {
        let acting = self.as_leader(group).filter(|a| can_seal(a.group(), a.map.level)).ok_or_else(|| {
            Error::unavailable(format!("seal in {group}: not led here, or a member is behind"))
        })?;
        let scope = acting.scope;
        let first = CellId { file, stripe, index: 0 };
        let stats = self.stat_all(&acting, file, stripe).await;
        let stats: Vec<CellStat> = stats.into_iter().collect::<Result<_>>()?;
        let base = stats.iter().map(|stat| stat.base).max().unwrap_or_default();
        // It may have lost the end of its index: its older bytes would become those of the stripe.
        if stats.iter().any(|stat| stat.base != base && !stat.prepared.contains(&base)) {
            return Err(Error::unavailable(format!(
                "seal of stripe {first}: a member lacks version {base}, seal later"
            )));
        }
        let version = version_of(&stats, token_epoch(&acting, file, stripe)?).ok_or_else(|| {
            Error::unavailable(format!("seal of stripe {first}: a version is in doubt, seal later"))
        })?;
        assert!(version > base, "a seal's version is above the one that it replaces");
        assert!(!version.counter().is_multiple_of(2), "even versions are those of writers");
        let data = usize::from(scope.scheme.data);
        let sealed = self.fold(&acting, data, version, base, first).await;
        self.env.tasks.crash_point(crash_points::SEAL_FOLDED);
        let prepared = match sealed {
            Ok(cells) => self.prepare_parity(&acting, version, first, cells).await,
            Err(e) => Err(e),
        };
        if let Err(e) = prepared {
            self.drop_everywhere(&acting, version, first).await;
            return Err(e);
        }
        self.env.tasks.crash_point(crash_points::SEAL_PREPARED);
        self.commit_everywhere(&acting, version, file, stripe).await
    }

    /// Each data target's new base, with its bytes. `base`: the stripe's present version.
    async fn fold(
        &self,
        acting: &Acting,
        data: usize,
        version: Version,
        base: Version,
        first: CellId,
    ) -> Result<Vec<(SealedCell, Bytes)>> {
        let fold = |i: usize| -> BoxFuture<'_, Result<(SealedCell, Bytes)>> {
            if acting.group().members[i].state != MemberState::Current {
                return Box::pin(self.fold_lost(acting, base, nth(first, i)));
            }
            let place = acting.place_of(i);
            self.calls.ask(place.target, SealCell { place, cell: nth(first, i), version }, Vec::new())
        };
        join_all((0..data).map(fold).collect()).await.into_iter().collect()
    }

    /// The new base that a missing data target would fold: its base decoded, its overlays from the own log.
    async fn fold_lost(&self, acting: &Acting, base: Version, cell: CellId) -> Result<(SealedCell, Bytes)> {
        let absent = Acting { position: usize::from(cell.index), ..acting.clone() };
        let decoded = self.rebuilder.decode_from_peers(&absent, cell).await?;
        let found = decoded.as_ref().map_or(Version(0), |d| d.version);
        if found != base {
            return Err(Error::unavailable(format!("cell {cell}: version {base} is in doubt, seal later")));
        }
        let (bytes, after) = decoded.map_or((Bytes::new(), Seq(0)), |d| (d.bytes, d.folded_seq));
        let store = acting.store.clone();
        let (bytes, folded_seq) =
            self.env.tasks.blocking(move || merge_log(&store, cell, bytes, after)).await?;
        let block_crcs = block_crcs(&bytes, CHECKSUM_BLOCK as usize);
        Ok((SealedCell { folded_seq, fragment_bytes: bytes.len() as u32, block_crcs }, bytes))
    }

    async fn prepare_parity(
        &self,
        acting: &Acting,
        version: Version,
        first: CellId,
        cells: Vec<(SealedCell, Bytes)>,
    ) -> Result<()> {
        let folded_seqs: Vec<Seq> = cells.iter().map(|(c, _)| c.folded_seq).collect();
        for (sealed, bytes) in &cells {
            if bytes.len() != sealed.fragment_bytes as usize
                || block_crcs(bytes, CHECKSUM_BLOCK as usize) != sealed.block_crcs
            {
                return Err(Error::damaged(format!("seal of stripe {}: bytes fail their checksum", first)));
            }
        }
        let scheme = acting.scope.scheme;
        assert_eq!(cells.len(), usize::from(scheme.data), "parity covers every data cell of the stripe");
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
        let missing = acting.scope.lacking();
        let calls = parity
            .into_iter()
            .enumerate()
            .filter(|(i, _)| missing & (1 << (data + i)) == 0)
            .map(|(i, (bytes, block_crcs))| {
                let place = acting.place_of(data + i);
                let request = WriteFragment {
                    place,
                    cell: nth(first, data + i),
                    version,
                    mode: WriteMode::PrepareSeal,
                    missing,
                    folded_seqs: folded_seqs.clone(),
                    block_crcs,
                };
                self.calls.ask(place.target, request, if bytes.is_empty() { Vec::new() } else { vec![bytes] })
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
            let place = acting.place_of(i);
            let cell = CellId { file, stripe, index: i as u8 };
            self.calls.ask(
                place.target,
                CommitStripe { place, cell, version, token_epoch: UNFENCED },
                Vec::new(),
            )
        };
        let leads = acting.state() == MemberState::Current;
        assert!(leads, "the leader of a seal takes part in it: it commits last");
        let others = participants(acting.group()).into_iter().filter(|i| *i != acting.position);
        let (mut committed, mut first_problem) = (false, None);
        for outcome in join_all(others.map(commit).collect()).await {
            match outcome {
                Ok(_) => committed = true,
                // Replaced by a later version, or dropped with its file: nothing is in doubt there.
                Err(e) if matches!(e.kind, ErrorKind::NotFound) => tracing::debug!("seal: {e}"),
                Err(e) => drop(first_problem.get_or_insert(e)),
            }
        }
        self.env.tasks.crash_point(crash_points::SEAL_HALF);
        match first_problem {
            // One commit decides: a member that missed it holds it prepared and settles, or returns as behind
            // and is repaired.
            Some(e) if !committed => Err(e),
            _ => commit(acting.position).await.map(|_| ()),
        }
    }

    async fn drop_everywhere(&self, acting: &Acting, version: Version, first: CellId) {
        let calls = participants(acting.group())
            .into_iter()
            .map(|i| {
                let place = acting.place_of(i);
                self.calls.ask(
                    place.target,
                    DropPrepared { place, cell: nth(first, i), version, token_epoch: UNFENCED },
                    Vec::new(),
                )
            })
            .collect();
        for e in join_all(calls).await.into_iter().filter_map(|r| r.err()) {
            tracing::debug!("drop a version that is not needed: {e}");
        }
    }

    /// The state at each current member, in order.
    async fn stat_all(&self, acting: &Acting, file: FileId, stripe: u64) -> Vec<Result<CellStat>> {
        let calls = participants(acting.group())
            .into_iter()
            .map(|i| {
                let place = acting.place_of(i);
                self.calls.ask(
                    place.target,
                    StatCell { place, cell: CellId { file, stripe, index: i as u8 } },
                    Vec::new(),
                )
            })
            .collect();
        join_all(calls).await.into_iter().map(|r| r.map(|(stat, _)| stat)).collect()
    }
}

/// Another fragment of a cell's stripe.
fn nth(of: CellId, index: usize) -> CellId {
    CellId { index: index as u8, ..of }
}

/// A cell's base with the overlays above `after` that the log here holds, and the number of the last one.
fn merge_log(store: &Store, cell: CellId, base: Bytes, after: Seq) -> Result<(Bytes, Seq)> {
    let (mut bytes, mut last) = (base.to_vec(), after);
    loop {
        let (log, parts) = store.read_overlays(cell, last)?;
        let mut parts = parts.into_iter();
        for o in &log.extents {
            let (from, to) = (o.offset as usize, o.offset as usize + o.len as usize);
            bytes.resize(bytes.len().max(to), 0);
            match o.kind {
                OverlayKind::Zero => bytes[from..to].fill(0),
                OverlayKind::Void => {}
                OverlayKind::Data => {
                    let data = parts.next().unwrap_or_default();
                    if data.len() != o.len as usize || crc32c(&data) != o.crc {
                        return Err(Error::damaged(format!(
                            "overlay {} of cell {cell} fails its checksum",
                            o.seq
                        )));
                    }
                    bytes[from..to].copy_from_slice(&data);
                }
            }
            last = o.seq;
        }
        if !log.more {
            return Ok((Bytes::from(bytes), last));
        }
    }
}

/// The newest token epoch of the stripe's overlays: the seal uses it, so that a fence stops the seal too.
fn token_epoch(acting: &Acting, file: FileId, stripe: u64) -> Result<u32> {
    let mut newest = 0;
    for index in 0..acting.scope.scheme.data {
        newest = newest.max(acting.store.index().newest_token_epoch(CellId { file, stripe, index })?);
    }
    Ok(newest)
}
