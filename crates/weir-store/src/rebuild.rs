//! Rebuilding a fragment from other members: which version enough of them hold, and decoding it.
//!
//! Owns no state: it reads from peers, and installs in the store of the place that it is given.
use crate::calls::Calls;
use crate::crash_points;
use crate::group::current_peers;
use crate::membership::Acting;
use crate::peers::join_all;
use crate::read::CELL_BYTES_MAX;
use crate::store::{FragmentWrite, Install};
use bytes::Bytes;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use weir_env::{BoxFuture, Env};
use weir_proto::checksum::block_crcs;
use weir_proto::data::*;
use weir_proto::ec::Coder;
use weir_proto::{CellId, Error, Result, Seq, Version};

/// A fragment rebuilt from other members.
pub(crate) struct Rebuilt {
    pub bytes: Bytes,
    pub version: Version,
    folded_seqs: Vec<Seq>,
    /// For a data cell: overlays up to here are in the bytes.
    pub folded_seq: Seq,
    /// Other members that lack their fragment.
    missing: MissingMask,
}

/// The fragments of a stripe that were read so far.
#[derive(Default)]
struct Fragments {
    fragments: Vec<(usize, Bytes)>,
    /// As one of the parity fragments has them.
    folded_seqs: Vec<Seq>,
    data_folded: BTreeMap<usize, Seq>,
    parity_bytes: Option<usize>,
    problem: Option<Error>,
}

impl Fragments {
    fn add(&mut self, position: usize, data: usize, read: Result<(CellRead, Bytes)>) {
        match read {
            Ok((read, bytes)) => {
                if position >= data {
                    self.folded_seqs = read.folded_seqs;
                    self.parity_bytes = Some(bytes.len());
                } else {
                    self.data_folded.insert(position, read.seq);
                }
                self.fragments.push((position, bytes));
            }
            Err(e) => self.problem = Some(e),
        }
    }
    /// `nothing_folded`: each parity member reports that.
    fn is_enough(&self, data: usize, nothing_folded: bool) -> bool {
        let all_data = || self.fragments.iter().all(|(position, _)| *position < data);
        self.fragments.len() == data && (nothing_folded || !self.folded_seqs.is_empty() || all_data())
    }
}

pub(crate) struct Rebuilder {
    env: Env,
    calls: Arc<Calls>,
}

impl Rebuilder {
    pub fn new(env: &Env, calls: &Arc<Calls>) -> Arc<Rebuilder> {
        Arc::new(Rebuilder { env: env.clone(), calls: calls.clone() })
    }

    /// Rebuilds this target's fragment from the newest version that k current peers hold. `replace`: also one
    /// of the version that is here.
    pub async fn rebuild(&self, acting: &Acting, own: CellId, replace: bool) -> Result<()> {
        let Some(rebuilt) = self.decode_from_peers(acting, own).await? else { return Ok(()) };
        let place = if replace { Install::Damaged } else { Install::Missed };
        self.install(acting, own, rebuilt, place, 0).await
    }

    /// Copies a version that will be committed from the peers, beside the base.
    pub async fn take_version(&self, acting: &Acting, r: &HoldStripe) -> Result<()> {
        let HoldStripe { cell, version, missing, token_epoch, .. } = *r;
        match self.decode_version(acting, cell, Some(version)).await? {
            Some(rebuilt) => {
                self.install(acting, cell, rebuilt, Install::Prepared { token_epoch }, missing).await
            }
            None => Err(Error::not_found(format!("cell {cell}: fewer members than needed have {version}"))),
        }
    }

    /// The fragment of the member at `acting.position`, decoded from the current members' last committed
    /// version.
    pub async fn decode_from_peers(&self, acting: &Acting, own: CellId) -> Result<Option<Rebuilt>> {
        self.decode_version(acting, own, None).await
    }

    async fn install(
        &self,
        acting: &Acting,
        own: CellId,
        rebuilt: Rebuilt,
        place: Install,
        missing: MissingMask,
    ) -> Result<()> {
        let (store, scope) = (acting.store.clone(), acting.scope);
        let (committed, _) = self
            .env
            .tasks
            .blocking(move || {
                let write = FragmentWrite {
                    cell: own,
                    version: rebuilt.version,
                    mode: WriteMode::Fresh,
                    missing: rebuilt.missing | missing,
                    folded_seqs: &rebuilt.folded_seqs,
                    block_crcs: &block_crcs(&rebuilt.bytes, CHECKSUM_BLOCK as usize),
                    data: &rebuilt.bytes,
                };
                store.install(&scope, &write, rebuilt.folded_seq, place)
            })
            .await?;
        self.env.tasks.crash_point(crash_points::REBUILT);
        acting.store.durable(committed).await
    }

    /// The own fragment, `bytes` long, decoded from k others.
    async fn reconstruct(
        &self,
        acting: &Acting,
        fragments: Vec<(usize, Bytes)>,
        len: usize,
    ) -> Result<Bytes> {
        let (scheme, wanted) = (acting.group().scheme, acting.position);
        let mut buf = self.env.buffers.get(len);
        let decode = move || {
            let present: Vec<(usize, &[u8])> = fragments.iter().map(|(p, b)| (*p, &b[..])).collect();
            Coder::new(scheme)?.reconstruct(&present, &[wanted], &mut [&mut buf[..]])?;
            Ok(buf.freeze())
        };
        self.env.tasks.blocking(decode).await
    }

    /// Like [`Self::decode_from_peers`], at a given version, committed or not. `None`: fewer than k have it.
    async fn decode_version(
        &self,
        acting: &Acting,
        own: CellId,
        version: Option<Version>,
    ) -> Result<Option<Rebuilt>> {
        let group = acting.group();
        let data = usize::from(group.scheme.data);
        let peers = current_peers(group, acting.position);
        let mut stats = BTreeMap::new();
        let asked = peers.iter().map(|p| self.stat_peer(acting, *p, own)).collect();
        for (p, stat) in peers.iter().zip(join_all(asked).await) {
            stats.insert(*p, stat?);
        }
        if stats.len() < data {
            return Err(Error::unavailable(format!(
                "cell {own}: {} members are current, {data} needed",
                stats.len()
            )));
        }
        // Fewer than k fragments of the newest version: a writer died before it was acknowledged.
        let found = match version {
            Some(version) => holders_of(&stats, version, data).map(|holders| (version, holders)),
            None => newest_whole(&stats, data),
        };
        let Some((version, holders)) = found else { return Ok(None) };
        let has_none = |p: &usize| stats[p].base == version && stats[p].folded_seqs.is_empty();
        let nothing_folded = holders.iter().filter(|p| **p >= data).all(has_none);
        let mut found = Fragments::default();
        let (first, rest) = holders.split_at(data);
        let reads =
            first.iter().map(|p| Box::pin(self.read_fragment(acting, *p, own, version)) as BoxFuture<_>);
        for (p, read) in first.iter().zip(join_all(reads.collect()).await) {
            found.add(*p, data, read);
        }
        for p in rest {
            if found.is_enough(data, nothing_folded) {
                break;
            }
            found.add(*p, data, self.read_fragment(acting, *p, own, version).await);
        }
        let Fragments { fragments, mut folded_seqs, data_folded, parity_bytes, problem } = found;
        if fragments.len() < data {
            return Err(problem.unwrap_or_else(|| Error::damaged(format!("cell {own}: too few fragments"))));
        }
        let of_others = fragments.iter().all(|(position, _)| *position != acting.position);
        assert!(of_others, "a fragment that is to be rebuilt was read from its own member");
        let longest = fragments.iter().map(|(_, b)| b.len()).max().unwrap_or(0);
        let parity_bytes = parity_bytes.unwrap_or(longest);
        let len = parity_bytes.max(longest);
        if len > CELL_BYTES_MAX as usize {
            return Err(Error::damaged(format!("cell {own}: fragments of {len} bytes")));
        }
        let bytes = self.reconstruct(acting, fragments, len).await?;
        if folded_seqs.is_empty() && acting.position >= data && data_folded.values().any(|c| *c > Seq(0)) {
            folded_seqs = (0..data).map(|i| data_folded.get(&i).copied().unwrap_or_default()).collect();
        }
        let folded_seq = if acting.position < data {
            folded_seqs.get(acting.position).copied().unwrap_or_default()
        } else {
            Seq(0)
        };
        let missing = stats.values().fold(0, |mask, s| mask | s.missing) & !(1 << acting.position);
        Ok(Some(Rebuilt { bytes, version, folded_seqs, folded_seq, missing }))
    }

    pub fn stat_peer(
        &self,
        acting: &Acting,
        position: usize,
        own: CellId,
    ) -> BoxFuture<'static, Result<CellStat>> {
        let place = acting.place_of(position);
        let cell = CellId { index: position as u8, ..own };
        let answer = self.calls.ask(place.target, StatCell { place, cell }, Vec::new());
        Box::pin(async move { Ok(answer.await?.0) })
    }

    /// The whole fragment of a peer at one version, verified.
    pub async fn read_fragment(
        &self,
        acting: &Acting,
        position: usize,
        own: CellId,
        version: Version,
    ) -> Result<(CellRead, Bytes)> {
        let place = acting.place_of(position);
        let cell = CellId { index: position as u8, ..own };
        let request = ReadCell { place, cell, view: ReadView::Base, version, offset: 0, len: CELL_BYTES_MAX };
        let (read, bytes) = self.calls.ask(place.target, request, Vec::new()).await?;
        if read.version != version
            || bytes.len() != read.fragment_bytes as usize
            || block_crcs(&bytes, CHECKSUM_BLOCK as usize) != read.block_crcs
        {
            return Err(Error::damaged(format!("cell {cell} from {}: not what was asked for", place.target)));
        }
        Ok((read, bytes))
    }
}

/// The newest version that any member has committed and that k or more hold (some still as prepared), and its
/// holders.
pub fn newest_whole(stats: &BTreeMap<usize, CellStat>, data: usize) -> Option<(Version, Vec<usize>)> {
    let committed: BTreeSet<Version> = stats.values().map(|s| s.base).filter(|v| *v > Version(0)).collect();
    committed.into_iter().rev().find_map(|version| Some((version, holders_of(stats, version, data)?)))
}
/// The holders of a version, committed or not, if there are k or more.
pub fn holders_of(stats: &BTreeMap<usize, CellStat>, version: Version, data: usize) -> Option<Vec<usize>> {
    let holds = |s: &CellStat| s.base == version || s.prepared.contains(&version);
    let holders: Vec<usize> = stats.iter().filter(|(_, s)| holds(s)).map(|(p, _)| *p).collect();
    (holders.len() >= data).then_some(holders)
}
