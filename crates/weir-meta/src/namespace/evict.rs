//! Bytes that are at home only: evicted, assigned to movers, and recalled.
//!
//! Invariants: ranges of a file do not overlap, each begins with a stripe and ends with one or at the file's
//! end when it was evicted (or has been truncated since); `Inode.evicted` is their sum. Earlier writes to
//! them have a lower token epoch than the eviction's, and there are no new ones until they are filled:
//! clients request a recall first. A range is assigned under a higher token epoch than ever before, so late
//! writes of a mover that lost it change nothing.
//!
//! A file that is open for writing is evicted by its writer, if that is one client under a Write lease: only
//! that client knows its uncommitted bytes, and it begins no work in the range meanwhile. It keeps the lease
//! and learns the new token epoch with the answer. The token epoch in its request proves that it still had
//! the Write lease.
//!
//! Data in an older object (see `layers`) is evicted like the rest: the file drops its reference to that
//! object, and the cells are dropped with the last reference. A file that a snapshot holds leaves it first.
//!
//! Knows nothing of which client asks for which range when: `recalls` does.
use super::evicted::{Found, evictable, layout_to_fill, ranges};
use super::gate::{Changed, OwnInode};
use super::keeper::is_held;
use super::writer::next_truncation;
use super::*;
use crate::quotas::NO_POLICY;
use crate::record::{EvictedRange, StripeTruncation};
use weir_proto::map::Layout;
use weir_proto::meta::LeaseKind;
use weir_proto::recall::{
    ByteRange, Evict, Evicted, EvictedList, EvictedRanges, Filled, RANGES_MAX, SetPinned,
};
use weir_proto::relation::What;

pub fn list(view: &mut View<'_>, r: &EvictedRanges) -> Result<EvictedList> {
    let found = ranges(view.read, r.ino, r.from, RANGES_MAX + 1)?;
    let ranges = found.iter().take(RANGES_MAX).map(|f| ByteRange { from: f.from, to: f.range.to }).collect();
    Ok(EvictedList { ranges, more: found.len() > RANGES_MAX })
}

pub fn evict(cx: &mut Cx<'_>, r: &Evict) -> Attempt<Evicted> {
    let inode = load_file(cx.read(), r.ino)?;
    // The leader asks the file's only writer for that.
    if r.under == 0 || cx.rules.leases.held(cx.rules.session, r.ino) != LeaseKind::Write {
        require_owner(&r.cred, &inode, "evict", r.ino)?;
    }
    let how = if r.under > 0 { How::Own { token_epoch: r.under } } else { How::All };
    let (inode, ranges) = cx.evict_range(r.ino, inode, (r.from, r.to), how)?;
    let token_epoch = inode.writing.token_epoch;
    Ok(Evicted { entry: cx.rules.entry(r.ino, &inode), ranges, token_epoch })
}

fn require_owner(cred: &Cred, inode: &Inode, doing: &str, ino: InodeId) -> Result<()> {
    if cred.uid == 0 || cred.uid == inode.uid {
        return Ok(());
    }
    let why = format!("user {} may not {doing} inode {ino}: it belongs to {}", cred.uid, inode.uid);
    Err(Error::name(NameRule::NotOwner, why))
}
fn busy(ino: InodeId, why: &str) -> Error {
    Error::name(NameRule::Busy, format!("inode {ino} is not evicted: {why}"))
}

/// Whether anything forbids to evict a file, regardless of home.
fn check_evictable(cx: &Cx<'_>, ino: InodeId, inode: &Inode) -> Result<Layout> {
    if inode.kind != FileKind::Regular {
        return Err(Error::invalid(format!("inode {ino} is not a regular file: it has no data to evict")));
    }
    if inode.pinned {
        return Err(busy(ino, "it is pinned"));
    }
    if inode.nlink == 0 {
        return Err(busy(ino, "it is removed, and its changes are not shipped any more"));
    }
    if cx.rules.must_recover(ino, inode) {
        return Err(busy(ino, "its last writer died, and it has not been recovered since"));
    }
    inode.layout.ok_or_else(|| busy(ino, "it has no data on targets"))
}

/// The part of a range to evict, and the file's writers.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum How {
    /// All of it or nothing; the file has no writer.
    All,
    /// The front of it that home has; the file has no writer.
    Front,
    /// The front of it that home has; the file's only writer is the caller, under this token epoch.
    Own { token_epoch: u32 },
}

/// Bytes of a file that are checked with home at a time.
const FRONT_STEP: u64 = 64 << 20;

impl Cx<'_> {
    /// Evicts what it can of a range. All leases are revoked first, including the caller's own: so all
    /// changes are saved, and the next client learns which bytes are evicted. Except for the only writer's,
    /// which is responsible for that itself.
    pub fn evict_range(
        &mut self,
        ino: InodeId,
        mut inode: Inode,
        (from, mut to): (u64, u64),
        how: How,
    ) -> Attempt<(Inode, Vec<ByteRange>)> {
        let layout = check_evictable(self, ino, &inode)?;
        if let How::Own { token_epoch } = how {
            self.require_only_writer(ino, &inode, token_epoch)?;
            to = to.min(inode.size / layout.stripe_bytes() * layout.stripe_bytes());
        }
        let mut known = ranges(self.read(), ino, 0, usize::MAX)?;
        let mut gaps = evictable(&layout, inode.size, (from, to), &known);
        if tables::DATA.has(self.txn, ino)? {
            gaps.clear(); // it takes no space on targets
        }
        if how != How::All {
            gaps = self.front_at_home(ino, &inode, &layout, gaps)?;
        }
        let Some((first, last)) = gaps.first().zip(gaps.last()) else { return Ok((inode, gaps)) };
        (self.rules.at_home)(self.read(), ino, &inode, first.from, last.to)?;
        let own = match how {
            // Its only writer keeps its lease.
            How::Own { .. } => self.own_inode(ino, &[])?,
            _ => self.take_from_all(ino)?,
        };
        if matches!(how, How::Own { .. }) {
            if is_held(self.read(), self.rules.snapshots, ino, &inode)? {
                return Err(busy(ino, "a snapshot holds what is being written").into());
            }
        } else {
            let data_version = inode.data_version;
            if self.leave_snapshots(ino, &mut inode)? {
                inode.data_version = data_version; // no byte changes: a backup finds the file unchanged
                known = ranges(self.read(), ino, 0, usize::MAX)?; // none of it is recalled to the old object
            }
        }
        self.drop_layers(ino, &mut inode, &gaps)?;
        let token_epoch = next_truncation(inode.writing.token_epoch);
        if token_epoch <= inode.writing.token_epoch {
            return Err(Error::unsupported(format!("inode {ino}: its token epochs are used up")).into());
        }
        assert!(first.from < last.to, "inode {ino}: an eviction of no bytes at {}", first.from);
        inode.writing.token_epoch = token_epoch;
        let truncation = StripeTruncation {
            from_stripe: layout.stripe_of(first.from),
            to_stripe: layout.stripe_count(last.to),
            token_epoch,
        };
        self.note_garbage(inode.object(ino), &layout, truncation)?;
        let evicted = gaps.iter().fold(inode.evicted, |sum, gap| sum + (gap.to - gap.from));
        self.put_evicted(ino, &known, &gaps);
        let allocated = inode.allocated;
        own.set_space(self, &mut inode, allocated, evicted)?;
        own.put_file(self, &inode, Changed::Nothing)?;
        Ok((inode, gaps))
    }

    /// Revokes all leases; the file must not be open for writing.
    fn take_from_all(&mut self, ino: InodeId) -> Attempt<OwnInode> {
        let (leases, session) = (self.rules.leases, self.rules.session);
        if leases.is_open_for_writing(ino) {
            return Err(busy(ino, "it is open for writing").into());
        }
        leases.own_conflict(session, ino, self.obstacles);
        self.own_inode(ino, &[Need::Change, Need::AppendToken])
    }

    /// The caller has the Write lease, and has had it since it looked.
    fn require_only_writer(&self, ino: InodeId, inode: &Inode, token_epoch: u32) -> Result<()> {
        let (leases, session) = (self.rules.leases, self.rules.session);
        let alone = leases.held(session, ino) == LeaseKind::Write && !leases.written_by_others(session, ino);
        if alone && inode.writing.writer == session && inode.writing.token_epoch == token_epoch {
            return Ok(());
        }
        Err(Error::stale(format!(
            "inode {ino}: session {session} does not write it alone under token epoch {token_epoch} any more"
        )))
    }

    /// The front of these ranges that home has. None: the reason.
    fn front_at_home(
        &self,
        ino: InodeId,
        inode: &Inode,
        layout: &Layout,
        gaps: Vec<ByteRange>,
    ) -> Result<Vec<ByteRange>> {
        let step = (FRONT_STEP / layout.stripe_bytes()).max(1) * layout.stripe_bytes();
        let mut front: Vec<ByteRange> = Vec::new();
        for gap in gaps {
            let mut at = gap.from;
            while at < gap.to {
                let end = gap.to.min(at.saturating_add(step));
                match (self.rules.at_home)(self.read(), ino, inode, at, end) {
                    Ok(()) => {}
                    Err(e) if front.is_empty() => return Err(e),
                    Err(_) => return Ok(front),
                }
                match front.last_mut().filter(|last| last.to == at) {
                    Some(last) => last.to = end,
                    None => front.push(ByteRange { from: at, to: end }),
                }
                at = end;
            }
        }
        Ok(front)
    }

    /// Writes new ranges, merged with their neighbours if neither was ever assigned.
    pub(super) fn put_evicted(&mut self, ino: InodeId, known: &[Found], new: &[ByteRange]) {
        let new = new.iter().map(|n| Found { from: n.from, range: EvictedRange { to: n.to, handed: 0 } });
        let mut all: Vec<Found> = known.iter().copied().chain(new).collect();
        assert!(
            all.iter().all(|f| f.from < f.range.to),
            "inode {ino}: an evicted range of no bytes: {all:?}"
        );
        all.sort_by_key(|f| f.from);
        all.dedup_by(|next, last| {
            let joins = last.range.to == next.from && (last.range.handed, next.range.handed) == (0, 0);
            if joins {
                last.range.to = next.range.to;
            }
            joins
        });
        for gone in known.iter().filter(|k| !all.iter().any(|f| f.from == k.from)) {
            tables::EVICTED.delete(self.txn, (ino, gone.from));
        }
        for f in all.iter().filter(|f| !known.contains(f)) {
            tables::EVICTED.put(self.txn, (ino, f.from), &f.range);
        }
    }

    /// The file is truncated to `size`: the evicted rest is void. Returns the remaining evicted bytes.
    pub(super) fn truncate_evicted(&mut self, ino: InodeId, inode: &Inode, size: u64) -> Result<u64> {
        if inode.evicted == 0 {
            return Ok(0);
        }
        let mut left = inode.evicted;
        for f in ranges(self.read(), ino, size, usize::MAX)? {
            if f.from < size {
                tables::EVICTED.put(self.txn, (ino, f.from), &EvictedRange { to: size, ..f.range });
            } else {
                tables::EVICTED.delete(self.txn, (ino, f.from));
            }
            left = left.saturating_sub(f.range.to - f.from.max(size));
        }
        self.events.truncated.push((ino, size));
        Ok(left)
    }

    /// Assigns the evicted parts of `from..to` (whole stripes), each under a token epoch above all earlier
    /// ones.
    pub fn hand_out(&mut self, ino: InodeId, from: u64, to: u64) -> Result<Option<Handed>> {
        let Some(mut inode) = find_inode(self.read(), ino)?.filter(|i| i.evicted > 0) else {
            return Ok(None);
        };
        let mut found = ranges(self.read(), ino, from, usize::MAX)?;
        found.retain(|f| f.from < to);
        let Some(last) = found.last() else { return Ok(None) };
        let highest = found.iter().map(|f| f.range.handed).max().unwrap_or(0);
        if inode.writing.token_epoch <= highest {
            // Above the fences of all readers of the file in a snapshot, too.
            inode.writing.token_epoch = Some(next_truncation(highest))
                .filter(|e| *e > highest)
                .ok_or_else(|| Error::unsupported(format!("inode {ino}: its token epochs are used up")))?;
        }
        inode.layout = layout_to_fill(ino, &inode, &|| (self.rules.layout)(&NO_POLICY));
        let Some(layout) = inode.layout else { return Ok(None) };
        // Cells are created: they are dropped with the file.
        inode.writing.data_end = inode.writing.data_end.max(last.range.to.min(to));
        let token_epoch = inode.writing.token_epoch.max(1);
        inode.writing.token_epoch = token_epoch;
        let mut parts = Vec::new();
        for f in &found {
            let (a, b) = (f.from.max(from), f.range.to.min(to));
            assert!(a < b, "inode {ino}: a recall of no bytes at {a}");
            if f.from < a {
                tables::EVICTED.put(self.txn, (ino, f.from), &EvictedRange { to: a, ..f.range });
            }
            if b < f.range.to {
                tables::EVICTED.put(self.txn, (ino, b), &f.range);
            }
            let handed = EvictedRange { to: b, handed: token_epoch };
            tables::EVICTED.put(self.txn, (ino, a), &handed);
            parts.push(ByteRange { from: a, to: b });
        }
        self.put_inode(ino, &inode);
        Ok(Some(Handed { layout, object: inode.object(ino), size: inode.size, token_epoch, parts }))
    }
}

/// The assigned parts.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Handed {
    pub layout: Layout,
    pub object: InodeId,
    pub size: u64,
    pub token_epoch: u32,
    pub parts: Vec<ByteRange>,
}

/// A mover has recalled all of a part.
pub fn filled(cx: &mut Cx<'_>, r: &Filled) -> Result<()> {
    let found = evicted::at(cx.read(), r.ino, r.from)?;
    let inode = find_inode(cx.read(), r.ino)?;
    let recalled = EvictedRange { to: r.to, handed: r.token_epoch };
    let (Some(_), Some(mut inode)) = (found.filter(|f| f.range == recalled && recalled.handed > 0), inode)
    else {
        return Err(Error::stale(format!(
            "inode {}: bytes {} to {} were recalled under token epoch {}, which is not so any more",
            r.ino, r.from, r.to, r.token_epoch
        )));
    };
    tables::EVICTED.delete(cx.txn, (r.ino, r.from));
    let (allocated, evicted) = (inode.allocated, inode.evicted.saturating_sub(r.to - r.from));
    cx.set_space(&mut inode, allocated, evicted)?;
    cx.put_inode(r.ino, &inode);
    cx.events.filled.push((r.ino, r.from, r.token_epoch));
    if let Some(learned) = &r.learned {
        crate::relation::proof::learn(cx.txn, r.ino, r.from, r.to, learned)?;
    }
    // A write next to an evicted range removed the checksums of that, too: now that it is online it can be
    // verified again.
    if !cx.rules.logged.is_empty() && crate::relation::proof::lacks_proof(cx.read(), r.ino, &inode)? {
        cx.log(inode.parent, || What::Complete { ino: r.ino, size: inode.size })?;
    }
    Ok(())
}

pub fn set_pinned(cx: &mut Cx<'_>, r: &SetPinned) -> Result<Entry> {
    let mut inode = load_file(cx.read(), r.ino)?;
    require_owner(&r.cred, &inode, "pin", r.ino)?;
    if inode.kind != FileKind::Regular {
        return Err(Error::invalid(format!("inode {} is not a regular file: only these are pinned", r.ino)));
    }
    if inode.pinned != r.pinned {
        inode.pinned = r.pinned;
        cx.put_inode(r.ino, &inode);
    }
    Ok(cx.rules.entry(r.ino, &inode))
}
