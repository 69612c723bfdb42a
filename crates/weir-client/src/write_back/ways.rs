//! The ways of a stripe to targets: as fresh fragments, as a prepared version, or as overlays.
//!
//! Invariant: leftovers of a failed send at some targets are noted as unresolved before the send ends.
use super::WriteBack;
use super::send::Send;
use crate::data::{Done, Fragment, Overlay, StripeRef, encode};
use crate::inode::Unresolved;
use crate::kernel::UnprotectedPages;
use crate::plan::{self, SendAs};
use bytes::Bytes;
use weir_proto::data::{SEAL_VERSIONS, WriteMode};
use weir_proto::{Epoch, Error, ErrorKind, Result, Seq, Version};

/// A version that meets a running seal is sent again with a counter this much higher: seals count up by two
/// from the base, or from one in doubt.
const ABOVE_SEAL: u64 = 256;

const ABOVE_SEAL_TRIES: u32 = 3;

/// A version that all live members have next to their base, as of an epoch of the group.
struct PreparedStripe {
    version: Version,
    folded_seqs: Vec<Seq>,
    fragments: Vec<Fragment>,
    held: Epoch,
}

/// What replaces the base of a stripe.
enum Content {
    Fragments(Vec<Fragment>),
    /// The changed bytes over the present ones.
    Merged,
}

impl WriteBack {
    /// Sends it as planned, once.
    pub(super) async fn carry(&self, send: &Send, s: StripeRef) -> Result<()> {
        match send.how {
            SendAs::Empty => {
                let empty = Fragment { payload: Bytes::new(), block_crcs: Vec::new() };
                let nothing = vec![empty; send.layout.scheme.width()];
                self.replace_stripe(send, s, Content::Fragments(nothing)).await
            }
            _ if send.parts.is_empty() => Ok(()),
            SendAs::Fresh { len } => {
                let fragments = self.fragments(send, len)?;
                let written = self.write_fresh(s, send.token_epoch, &fragments).await;
                if let Err(e) = &written {
                    self.abandon_fresh(send, e).await;
                }
                written
            }
            SendAs::Prepared => {
                let fragments = self.fragments(send, send.layout.stripe_bytes() as u32)?;
                self.replace_stripe(send, s, Content::Fragments(fragments)).await
            }
            SendAs::Merged => self.replace_stripe(send, s, Content::Merged).await,
            SendAs::Overlays => {
                let overlays = overlays_of(&send.parts, send.layout.cell_bytes());
                self.data.write_overlays(s, send.token_epoch, &overlays).await
            }
        }
    }

    /// Replaces the present base by a whole stripe.
    async fn replace_stripe(&self, send: &Send, s: StripeRef, content: Content) -> Result<()> {
        let prepared = self.prepare_stripe(send, s, &content).await?;
        let version = prepared.version;
        let committed = Box::pin(self.commit_prepared(send, s, prepared)).await;
        let is_fenced = |e: &Error| e.kind == ErrorKind::Stale && !self.has_newer_token(send);
        if committed.as_ref().is_err_and(|e| !is_fenced(e)) {
            self.note_unresolved(send, Unresolved::InDoubt(version));
        }
        committed
    }

    /// Returns when all live members have it next to their base. A version that meets a seal must be higher
    /// than it.
    async fn prepare_stripe(&self, send: &Send, s: StripeRef, content: &Content) -> Result<PreparedStripe> {
        let (mut lowest, mut seals) = (Version(0), 0);
        loop {
            // Before the read of a merge: overlays that arrive after it stay above the new base.
            let (folded_seqs, base) = self.data.stripe_state(&s).await?;
            let fragments = match content {
                Content::Fragments(fragments) => fragments.clone(),
                Content::Merged => self.merged_fragments(send, s).await?,
            };
            lowest = lowest.max(Version((base.0 + u64::from(SEAL_VERSIONS) + 2) & !1));
            let version = self.data.flight.next_version_from(send.token_epoch, lowest);
            let written =
                self.data.write_stripe(s, version, WriteMode::Prepare, &folded_seqs, &fragments, false).await;
            let e = match written {
                Ok(held) => return Ok(PreparedStripe { version, folded_seqs, fragments, held }),
                Err(e) => e,
            };
            self.abandon_prepared(send, version, &e).await;
            if e.kind != ErrorKind::Exists || seals >= ABOVE_SEAL_TRIES {
                return Err(e);
            }
            (lowest, seals) = (Version(version.0 + ABOVE_SEAL), seals + 1);
        }
    }

    /// Another open of this client may have acquired the Write lease again since the send began.
    pub(super) fn token_epoch_of(&self, send: &Send) -> u32 {
        let st = send.inode.lock();
        if st.write.generation() == send.write_generation { st.lease.token_epoch() } else { send.token_epoch }
    }

    fn has_newer_token(&self, send: &Send) -> bool {
        self.token_epoch_of(send) > send.token_epoch
    }

    async fn commit_prepared(&self, send: &Send, s: StripeRef, prepared: PreparedStripe) -> Result<()> {
        let PreparedStripe { version, folded_seqs, fragments, mut held } = prepared;
        let mut done = Done::new();
        while !self.data.commit_stripe(s, version, self.token_epoch_of(send), held, &mut done).await? {
            let written =
                self.data.write_stripe(s, version, WriteMode::Prepare, &folded_seqs, &fragments, true);
            held = written.await?;
        }
        Ok(())
    }

    async fn write_fresh(&self, s: StripeRef, token_epoch: u32, fragments: &[Fragment]) -> Result<()> {
        let version = Version::new(token_epoch, self.data.flight.next_version());
        self.data.write_stripe(s, version, WriteMode::Fresh, &[], fragments, false).await.map(drop)
    }
}

/// A write that failed, at some targets.
impl WriteBack {
    /// Some members accepted their fragment, others did not: they are full, or died. Until the old state is
    /// restored everywhere, the stripe cannot be read: that is retried before the next send to it, and before
    /// the size covers it.
    async fn abandon_fresh(&self, send: &Send, why: &Error) {
        if why.kind == ErrorKind::Stale {
            return; // fenced: the client that truncated the file has dropped it
        }
        self.note_unresolved(send, Unresolved::Fresh);
        if let Err(e) = self.take_back_fresh(send).await {
            tracing::warn!("a write that failed is at some targets for now: {e}");
        }
    }

    fn note_unresolved(&self, send: &Send, unresolved: Unresolved) {
        send.inode.lock().write.note_unresolved(send.write_generation, send.stripe, unresolved);
    }

    /// Bytes read from it before may be outdated now.
    pub(super) fn note_whole(&self, send: &Send) {
        let Send { inode, layout, stripe, .. } = send;
        let unprotected = {
            let mut st = inode.lock();
            st.write.note_resolved(send.write_generation, *stripe);
            let (start, end) = (layout.stripe_start(*stripe), layout.stripe_start(stripe + 1));
            st.pages.note_change();
            st.changed.add(start, end);
            self.memory.cache().remove(inode.ino, start, end);
            UnprotectedPages::of(inode, &mut st)
        };
        self.kernel.drop_pages(unprotected);
    }

    /// Nothing was at this place, and so it must be again, at all members: fragments without bytes take no
    /// space, and a rebuild uses the higher version.
    pub(super) async fn take_back_fresh(&self, send: &Send) -> Result<()> {
        let s = self.data.stripe(send.object, send.layout, send.stripe, self.leader.deadline());
        let empty = Fragment { payload: Bytes::new(), block_crcs: Vec::new() };
        let fragments = vec![empty; send.layout.scheme.width()];
        self.write_fresh(s, send.token_epoch, &fragments).await?;
        self.note_whole(send);
        Ok(())
    }

    /// No member has committed it, so none may: otherwise it would reappear in a later recovery of the file.
    /// If too many targets are dead for that, it is decided later.
    async fn abandon_prepared(&self, send: &Send, version: Version, why: &Error) {
        if why.kind == ErrorKind::Stale {
            return; // fenced: the client that recovers the file decides
        }
        let s = self.data.stripe(send.object, send.layout, send.stripe, self.leader.deadline());
        self.note_unresolved(send, Unresolved::InDoubt(version));
        match self.data.drop_prepared(s, version, self.token_epoch_of(send)).await {
            Ok(()) => self.note_whole(send),
            Err(e) => tracing::warn!("{s}: a write that failed is at some targets for now: {e}"),
        }
    }
}

/// The bytes of each member.
impl WriteBack {
    /// The fragments of a stripe that is sent whole.
    fn fragments(&self, send: &Send, len: u32) -> Result<Vec<Fragment>> {
        let coder = self.data.coder(send.layout.scheme)?;
        let cells = (0..send.layout.scheme.data)
            .map(|i| {
                let start = u32::from(i) * send.layout.cell_bytes();
                let cell_len = send.layout.fragment_bytes(u64::from(len), i);
                self.cell_of(&send.parts, start, cell_len)
            })
            .collect();
        encode(&coder, &self.env, cells)
    }

    /// The stripe as it will be: bytes that the changed ones do not cover are read from the targets.
    async fn merged_fragments(&self, send: &Send, s: StripeRef) -> Result<Vec<Fragment>> {
        let cell_bytes = send.layout.cell_bytes();
        let ranges = plan::ranges_to_read(&send.parts, cell_bytes, send.layout.scheme.data);
        let present = self.data.read_cells(s, &ranges).await.map_err(|e| e.doing(format!("merge {s}")))?;
        let below = ranges.iter().zip(&present).map(|(range, part)| {
            let start = range.index as u32 * cell_bytes;
            (start + range.start, part.bytes.clone())
        });
        let parts: Vec<(u32, Bytes)> = below.chain(send.parts.iter().cloned()).collect();
        let cells = (0..u32::from(send.layout.scheme.data)).map(|index| {
            let (start, next) = (index * cell_bytes, (index + 1) * cell_bytes);
            let in_cell = parts.iter().filter(|(at, _)| (start..next).contains(at));
            let end = in_cell.map(|(at, bytes)| at + bytes.len() as u32).max().unwrap_or(start);
            self.cell_of(&parts, start, end - start)
        });
        encode(&*self.data.coder(send.layout.scheme)?, &self.env, cells.collect())
    }

    /// `start..start + len` of the stripe in one piece: shared if one part holds it, otherwise copied, later
    /// parts over earlier ones, gaps zero.
    fn cell_of(&self, parts: &[(u32, Bytes)], start: u32, len: u32) -> Bytes {
        let end = start + len;
        let mut within = parts.iter().filter(|(at, b)| *at < end && at + b.len() as u32 > start);
        if let (Some((at, bytes)), None) = (within.next(), within.next())
            && *at == start
            && bytes.len() >= len as usize
        {
            return bytes.slice(..len as usize);
        }
        let mut cell = self.env.buffers.zeroed(len as usize);
        for (at, bytes) in parts {
            let (a, b) = (start.max(*at), end.min(at + bytes.len() as u32));
            if a < b {
                cell[(a - start) as usize..(b - start) as usize]
                    .copy_from_slice(&bytes[(a - at) as usize..(b - at) as usize]);
            }
        }
        cell.freeze()
    }
}

/// Dirty parts of a stripe as overlays of its data cells. Parts never cross a cell's border.
fn overlays_of(parts: &[(u32, Bytes)], cell_bytes: u32) -> Vec<Overlay> {
    parts
        .iter()
        .map(|(at, bytes)| Overlay {
            index: (at / cell_bytes) as u8,
            offset: at % cell_bytes,
            len: bytes.len() as u32,
            payload: Some(bytes.clone()),
        })
        .collect()
}
