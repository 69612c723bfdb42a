//! Overlays: numbered by one member, mirrored to all that keep the cell's log, acknowledged when they have it
//! durably at every live member of the group's epoch.
//!
//! Invariant: numbers of a cell follow the order of arrival of writes that are quick enough to be logged in
//! place. A write that failed after it was numbered is void at all keepers before its writer learns of it.
use super::agree::Agreement;
use super::mirrors::Mirrors;
use super::parts::{as_parts, is_quick, writes_of};
use super::under_way::UnderWay;
use crate::cells::{Appended, Numbering};
use crate::crash_points;
use crate::disk_threads::DiskThreads;
use crate::group::{down_mask, log_keepers, seal_leader, sequencer};
use crate::membership::{Acting, Admit, Membership};
use crate::recent::Recent;
use bytes::Bytes;
use std::sync::Arc;
use std::time::Duration;
use weir_env::{Env, Instant};
use weir_kv::CommitSeq;
use weir_proto::data::*;
use weir_proto::map::MemberState;
use weir_proto::{CellId, Error, ErrorKind, FileId, Result, Seq};
use weir_rpc::{Handled, Reply};

/// How long a mirrored overlay waits for the numbers before it.
const GAP_PATIENCE: Duration = Duration::from_secs(1);

pub(crate) struct Overlays {
    env: Env,
    members: Arc<Membership>,
    disk: Arc<DiskThreads>,
    mirrors: Arc<Mirrors>,
    agreement: Arc<Agreement>,
    /// Stripes with overlays, for seals.
    recent: Arc<Recent>,
    /// Overlays that were numbered here, or are about to be, and are not yet known to be on all keepers or on
    /// none.
    under_way: UnderWay,
}

impl Overlays {
    pub fn new(
        env: &Env,
        members: &Arc<Membership>,
        disk: &Arc<DiskThreads>,
        mirrors: &Arc<Mirrors>,
        agreement: &Arc<Agreement>,
        recent: &Arc<Recent>,
    ) -> Arc<Overlays> {
        Arc::new(Overlays {
            env: env.clone(),
            members: members.clone(),
            disk: disk.clone(),
            mirrors: mirrors.clone(),
            agreement: agreement.clone(),
            recent: recent.clone(),
            under_way: UnderWay::default(),
        })
    }

    /// Returns when no write of a file below this token epoch is in flight.
    pub async fn ended(&self, file: FileId, fence: u32) {
        self.under_way.ended(file, fence).await;
    }

    pub fn write_overlay(self: &Arc<Self>, r: WriteOverlay, payload: Bytes, deadline: Instant) -> Handled {
        self.write_overlays(as_parts(r), payload, deadline)
    }
    pub fn write_overlays(self: &Arc<Self>, r: WriteOverlays, payload: Bytes, deadline: Instant) -> Handled {
        // Before it is numbered: an earlier fence refuses it, a later one finds it here.
        let under_way = match self.under_way.begin(&r) {
            Err(e) => return Handled::Now(Err(e)),
            Ok(under_way) => under_way,
        };
        // Numbered in place if that is fast, so that numbers follow the order of arrival.
        let in_place = r.attempt == 0
            && is_quick(&r.parts, &payload)
            && self.agreement.is_compared(r.place.group, r.cell);
        let begun = match self.members.admit(r.place) {
            Err(e) => return Handled::Now(Err(e)),
            Ok(Admit::Ready(acting)) if in_place => {
                match self.number_overlays(&acting, &r, &payload, deadline) {
                    Err(e) => return Handled::Now(Err(e)),
                    Ok(numbered) => Some((acting, numbered)),
                }
            }
            Ok(_) => None,
        };
        let overlays = self.clone();
        Handled::Later(Box::pin(async move {
            under_way.earlier_ended(&overlays.env.clock, deadline).await?;
            let mut begun = begun;
            loop {
                let (acting, (seq, committed)) = match begun.take() {
                    Some(begun) => begun,
                    None => overlays.number_blocking(&r, &payload, deadline).await?,
                };
                let store = acting.store.clone();
                // The mirrors first: they write in parallel with this thread.
                let mirrors =
                    overlays.mirrors.mirror_to_keepers(acting.clone(), &r, seq, payload.clone(), deadline);
                let (mirrored, local) = tokio::join!(mirrors, store.durable_here(committed));
                store.crash_point(crash_points::OVERLAY_DURABLE);
                let e = match local.and(mirrored) {
                    Ok(map_version) => return Ok(Reply::new(&OverlayWritten { seq, map_version })),
                    Err(e) => e,
                };
                overlays.agreement.abort(&acting, &r, seq).await;
                // `Exists`: the number is void at a keeper. Another number is not.
                if e.kind != ErrorKind::Exists || overlays.env.clock.now() >= deadline {
                    return Err(e);
                }
            }
        }))
    }

    async fn number_blocking(
        self: &Arc<Self>,
        r: &WriteOverlays,
        payload: &Bytes,
        deadline: Instant,
    ) -> Result<(Acting, (Seq, CommitSeq))> {
        let acting = self.members.acting(r.place).await?;
        let acting = self.agreement.check_tail(acting, r.cell, deadline).await?;
        let (overlays, on, request, data) = (self.clone(), acting.clone(), r.clone(), payload.clone());
        let numbering = move || overlays.number_overlays(&on, &request, &data, deadline);
        Ok((acting, self.disk.run(numbering).await?))
    }

    /// Returns the first number. Not after the deadline: its writer has reported a failure, and may have
    /// written there since.
    fn number_overlays(
        &self,
        acting: &Acting,
        r: &WriteOverlays,
        data: &Bytes,
        deadline: Instant,
    ) -> Result<(Seq, CommitSeq)> {
        let group = acting.group();
        if r.layout_scheme != group.scheme {
            return Err(Error::invalid(format!(
                "cell {}: {} is {}, not {}",
                r.cell, group.id, group.scheme, r.layout_scheme
            )));
        }
        if r.parts.iter().any(|part| part.kind == OverlayKind::Void) {
            return Err(Error::invalid(format!("overlay of cell {}: it changes nothing", r.cell)));
        }
        let sequencer = sequencer(group, r.cell);
        if sequencer != Some(acting.position) {
            return Err(Error::stale(format!(
                "overlay of cell {}: its sequencer is {}, not {}",
                r.cell,
                sequencer.map_or("nobody".into(), |p| group.members[p].target.to_string()),
                acting.target()
            )));
        }
        let writes = writes_of(r.cell, r.token_epoch, down_mask(group), &r.parts, data)?;
        match acting.store.append_all(&acting.scope, Numbering::Next, &writes, deadline)? {
            (committed, Appended::At(first)) => {
                assert!(first > Seq(0), "numbers of overlays begin at 1: 0 means that there is none");
                acting.store.crash_point(crash_points::NUMBERED);
                self.note_logged(acting, r.cell, &r.parts);
                Ok((first, committed))
            }
            (_, other) => Err(Error::io(format!("overlay of cell {}: numbered as {other:?}", r.cell))),
        }
    }

    pub fn mirror_overlay(self: &Arc<Self>, r: MirrorOverlay, payload: Bytes) -> Handled {
        let MirrorOverlay { place, cell, token_epoch, missing, layout_scheme, again, .. } = r;
        let parts = vec![OverlayPart { offset: r.offset, len: r.len, kind: r.kind, crc: r.crc }];
        let first = r.seq;
        let r = MirrorOverlays { place, cell, token_epoch, first, parts, missing, layout_scheme };
        self.mirror(r, again, payload)
    }
    pub fn mirror_overlays(self: &Arc<Self>, r: MirrorOverlays, payload: Bytes) -> Handled {
        self.mirror(r, false, payload)
    }
    fn mirror(self: &Arc<Self>, r: MirrorOverlays, again: bool, payload: Bytes) -> Handled {
        let early = match self.members.admit(r.place) {
            Err(e) => return Handled::Now(Err(e)),
            Ok(Admit::Ready(acting)) if is_quick(&r.parts, &payload) => {
                match self.log_mirrored(&acting, &r, again, &payload) {
                    Err(e) => return Handled::Now(Err(e)),
                    Ok(logged) => Some((acting, logged)),
                }
            }
            Ok(_) => None,
        };
        let overlays = self.clone();
        Handled::Later(Box::pin(async move {
            let (acting, mut logged) = match early {
                Some(early) => early,
                None => {
                    let acting = overlays.members.acting(r.place).await?;
                    let logged = overlays.log_blocking(&acting, &r, again, &payload).await?;
                    (acting, logged)
                }
            };
            let deadline = overlays.env.clock.now() + GAP_PATIENCE;
            while let (_, Appended::Gap { have }) = logged {
                let more = overlays.agreement.logged().notified();
                tokio::pin!(more);
                more.as_mut().enable();
                logged = overlays.log_blocking(&acting, &r, again, &payload).await?;
                if !matches!(logged.1, Appended::Gap { .. }) {
                    break;
                }
                let left = deadline.since(overlays.env.clock.now());
                if left.is_zero() || overlays.env.clock.timeout(left, more).await.is_err() {
                    return Err(Error::stale(format!(
                        "overlay {} of cell {}: the numbers after {have} have not come",
                        r.first, r.cell
                    )));
                }
            }
            acting.store.durable_here(logged.0).await?;
            acting.store.crash_point(crash_points::MIRRORED);
            Ok(Reply::new(&()))
        }))
    }
    async fn log_blocking(
        self: &Arc<Self>,
        acting: &Acting,
        r: &MirrorOverlays,
        again: bool,
        data: &Bytes,
    ) -> Result<(CommitSeq, Appended)> {
        if is_quick(&r.parts, data) {
            return self.log_mirrored(acting, r, again, data);
        }
        let (overlays, acting, r, data) = (self.clone(), acting.clone(), r.clone(), data.clone());
        self.disk.run(move || overlays.log_mirrored(&acting, &r, again, &data)).await
    }
    fn log_mirrored(
        &self,
        acting: &Acting,
        r: &MirrorOverlays,
        again: bool,
        data: &Bytes,
    ) -> Result<(CommitSeq, Appended)> {
        let group = acting.group();
        if !log_keepers(group, r.cell).contains(&acting.position) {
            return Err(acting.misplaced(r.cell));
        }
        let numbering = match acting.state() {
            MemberState::Current if again => Numbering::Again(r.first),
            MemberState::Current => Numbering::Mirror(r.first),
            MemberState::Behind => Numbering::Behind(r.first),
            MemberState::Down => {
                return Err(Error::stale(format!(
                    "{} is down in {} under {}",
                    r.place.target, group.id, group.epoch
                )));
            }
        };
        let writes = writes_of(r.cell, r.token_epoch, r.missing, &r.parts, data)?;
        let store = &acting.store;
        let logged = store.append_all(&acting.scope, numbering, &writes, Instant(u64::MAX))?;
        match logged.1 {
            Appended::At(_) => self.note_logged(acting, r.cell, &r.parts),
            Appended::Void(seq) => {
                return Err(Error::exists(format!("overlay {seq} of cell {}: the number is void", r.cell)));
            }
            Appended::Duplicate(_) | Appended::Gap { .. } => {}
        }
        Ok(logged)
    }
    /// Mirrors that wait for a number check again, and a seal leader remembers the stripe.
    fn note_logged(&self, acting: &Acting, cell: CellId, parts: &[OverlayPart]) {
        self.agreement.logged().notify_waiters();
        if seal_leader(acting.group()) == Some(acting.position) {
            self.recent.note(acting.scope.group, cell, parts, self.env.clock.now());
        }
    }
}
