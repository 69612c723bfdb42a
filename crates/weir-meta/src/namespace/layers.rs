//! Bytes of a file that are in older objects, and the switch to a new object when a snapshot holds the
//! present one.
//!
//! Invariants: ranges do not overlap each other or evicted ones; each begins with a stripe, and ends with one
//! or at the file's end when it got its object (or has been truncated since); the sum of them is in the
//! inode's record. Objects that snapshots hold have no writers: a session that gets the Write lease of a
//! file, or truncates it, gives it a new object first. A layer is assigned to one writer for copying at a
//! time, under a token epoch above all earlier ones: late writes of another change nothing.
//!
//! Knows nothing of which client copies when: clients that write decide that.
use super::keeper::is_held;
use super::objects::OBJECT_BIT;
use super::writer::next_truncation;
use super::*;
use crate::keys::Sequence;
use crate::record::LayerRecord;
use weir_kv::Scan;
use weir_proto::map::Layout;
use weir_proto::meta::Layers;
use weir_proto::recall::ByteRange;
use weir_proto::snapshot::{LayerCopied, LayersTaken, TakeLayers};

/// Layers that are assigned to one writer at once.
const TAKEN_MAX: usize = 64;

type Range = (u64, LayerRecord);

/// Layers that end after `from`, in order, `limit` at most.
pub fn ranges(read: &dyn Read, ino: InodeId, from: u64, limit: usize) -> Result<Vec<Range>> {
    let (mut found, mut bad) = (Vec::new(), None);
    tables::LAYERS.under(ino).scan(read, &mut |(_, at), layer| {
        if at >= layer.to {
            bad = Some(Error::damaged(format!("a layer of inode {ino} is damaged")));
        } else if layer.to > from {
            found.push((at, layer));
        }
        if found.len() < limit && bad.is_none() { Scan::More } else { Scan::Stop }
    })?;
    bad.map_or(Ok(found), Err)
}

impl Cx<'_> {
    /// Called before data of a file changes: if a snapshot holds its object, it gets a new one, with all its
    /// bytes in the old one. True: the record has changed. A file that is to be recovered keeps its object
    /// until it is.
    pub(super) fn leave_snapshots(&mut self, ino: InodeId, inode: &mut Inode) -> Result<bool> {
        if self.rules.must_recover(ino, inode) || !is_held(&*self.txn, self.rules.snapshots, ino, inode)? {
            return Ok(false);
        }
        let Some(layout) = inode.layout else { return Ok(false) };
        let token_epoch = next_truncation(inode.writing.token_epoch);
        if token_epoch <= inode.writing.token_epoch {
            return Err(Error::unsupported(format!("inode {ino}: its token epochs are used up")));
        }
        // Its record is kept before the layers: they are reached through it.
        self.put_inode(ino, inode);
        let old = inode.object(ino);
        let object = InodeId(OBJECT_BIT | tables::next_number(self.txn, Sequence::Object)?);
        let fence = if inode.writing.dirty { token_epoch } else { 0 };
        let bytes = self.put_layers(ino, inode, &layout, old, fence)?;
        inode.writing.token_epoch = token_epoch;
        inode.layers = Some(Layers { object, bytes });
        inode.writing.data_end = inode.size;
        inode.data_version += 1;
        self.put_inode(ino, inode);
        Ok(true)
    }

    /// All that is neither evicted nor in an older object yet is in `old`. Returns the sum of all layers.
    fn put_layers(
        &mut self,
        ino: InodeId,
        inode: &Inode,
        layout: &Layout,
        old: InodeId,
        fence: u32,
    ) -> Result<u64> {
        let known = ranges(self.read(), ino, 0, usize::MAX)?;
        for (from, layer) in known.iter().filter(|(_, layer)| layer.handed > 0) {
            // A client with a copy in progress copies to an object that is a snapshot's now.
            tables::LAYERS.put(self.txn, (ino, *from), &LayerRecord { handed: 0, ..*layer });
        }
        if tables::DATA.has(self.txn, ino)? {
            return Ok(0); // all of it is inline
        }
        let as_evicted = |(from, layer): &Range| evicted::Found {
            from: *from,
            range: crate::record::EvictedRange { to: layer.to, handed: 0 },
        };
        let mut elsewhere = evicted::ranges(self.read(), ino, 0, usize::MAX)?;
        for f in elsewhere.iter().filter(|f| f.range.handed > 0) {
            let range = crate::record::EvictedRange { handed: 0, ..f.range };
            tables::EVICTED.put(self.txn, (ino, f.from), &range);
        }
        elsewhere.extend(known.iter().map(as_evicted));
        elsewhere.sort_by_key(|f| f.from);
        let mut bytes: u64 = known.iter().map(|(from, layer)| layer.to - from).sum();
        let (first_pg, pg_count) = (layout.first_pg, layout.pg_count);
        for gap in evicted::evictable(layout, inode.size, (0, inode.size), &elsewhere) {
            assert!(gap.from < gap.to, "inode {ino}: a layer of no bytes at {}", gap.from);
            let layer = LayerRecord { to: gap.to, object: old, handed: 0, fence, first_pg, pg_count };
            tables::LAYERS.put(self.txn, (ino, gap.from), &layer);
            bytes += gap.to - gap.from;
        }
        Ok(bytes)
    }

    /// The file is truncated to `size`.
    pub(super) fn truncate_layers(&mut self, ino: InodeId, inode: &mut Inode, size: u64) -> Result<()> {
        let Some(layers) = inode.layers.filter(|l| l.bytes > 0) else { return Ok(()) };
        let mut bytes = layers.bytes;
        for (from, layer) in ranges(self.read(), ino, size, usize::MAX)? {
            assert!(layer.to > size, "inode {ino}: a layer below {size} is truncated");
            let cut = LayerRecord { to: size, handed: 0, ..layer };
            match from < size {
                true => tables::LAYERS.put(self.txn, (ino, from), &cut),
                false => tables::LAYERS.delete(self.txn, (ino, from)),
            }
            bytes = bytes.saturating_sub(layer.to - from.max(size));
        }
        inode.layers = Some(Layers { bytes, ..layers });
        Ok(())
    }

    /// Ranges of whole stripes, or up to the end, are at home only now.
    pub(super) fn drop_layers(&mut self, ino: InodeId, inode: &mut Inode, gone: &[ByteRange]) -> Result<()> {
        let Some(layers) = inode.layers.filter(|l| l.bytes > 0) else { return Ok(()) };
        let mut bytes = layers.bytes;
        for (from, layer) in ranges(self.read(), ino, 0, usize::MAX)? {
            let left = without((from, layer.to), gone);
            if left == [(from, layer.to)] {
                continue;
            }
            tables::LAYERS.delete(self.txn, (ino, from));
            for (a, b) in &left {
                // A client with a copy of it in progress asks again.
                tables::LAYERS.put(self.txn, (ino, *a), &LayerRecord { to: *b, handed: 0, ..layer });
            }
            bytes = bytes.saturating_sub(layer.to - from - left.iter().map(|(a, b)| b - a).sum::<u64>());
        }
        inode.layers = Some(Layers { bytes, ..layers });
        Ok(())
    }

    /// A reader of a shared part of a file's object fences it; when the file is written again, it may be
    /// shared no more. So it is written under a token epoch that the fence lets pass.
    pub(super) fn outlive_fence(&mut self, ino: InodeId, object: InodeId, fence: u32) -> Attempt<()> {
        let Some(mut now) = find_inode(self.read(), ino)?.filter(|now| now.object(ino) == object) else {
            return Ok(());
        };
        if now.writing.token_epoch >= fence {
            return Ok(());
        }
        if self.rules.leases.is_open_for_writing(ino) {
            // A writer would learn that token epoch, and write under it to an object that is a snapshot's. So
            // the file gets another object, which every lease holder must learn.
            self.need(ino, Need::Change);
            self.rules.leases.own_conflict(self.rules.session, ino, self.obstacles);
            self.clear()?;
            if self.leave_snapshots(ino, &mut now)? {
                return Ok(());
            }
        }
        now.writing.token_epoch = fence;
        self.put_inode(ino, &now);
        Ok(())
    }
}

/// The rest of a range without others, which are in order.
fn without((from, to): (u64, u64), gone: &[ByteRange]) -> Vec<(u64, u64)> {
    let (mut left, mut at) = (Vec::new(), from);
    for gap in gone.iter().filter(|gap| gap.from < to && from < gap.to) {
        if at < gap.from {
            left.push((at, gap.from));
        }
        at = gap.to;
    }
    if at < to {
        left.push((at, to));
    }
    left
}

/// Assigns layers to a writer for copying, each under a token epoch above all earlier ones.
pub fn take(cx: &mut Cx<'_>, r: &TakeLayers) -> Result<LayersTaken> {
    let mut inode = load_file(cx.read(), r.ino)?;
    if !cx.rules.leases.may_write(r.session, r.ino) {
        return Err(Error::stale(format!("inode {}: ask for the right to write it first", r.ino)));
    }
    let Some(layout) = inode.layout.filter(|_| inode.layered() > 0) else {
        let (entry, layout) = (cx.rules.entry(r.ino, &inode), inode.layout);
        return Ok(LayersTaken { entry, layout, layers: Vec::new(), token_epoch: 0 });
    };
    let stripe = layout.stripe_bytes();
    let from = r.from / stripe * stripe;
    let to = r.to.checked_next_multiple_of(stripe).unwrap_or(u64::MAX);
    let mut found = ranges(cx.read(), r.ino, 0, usize::MAX)?;
    // One that ends within a stripe covers all of the stripe.
    found.retain(|(at, l)| *at < to && l.to.checked_next_multiple_of(stripe).unwrap_or(u64::MAX) > from);
    found.truncate(TAKEN_MAX);
    let token_epoch = inode
        .writing
        .token_epoch
        .checked_add(1)
        .filter(|e| *e < u32::MAX)
        .ok_or_else(|| Error::unsupported(format!("inode {}: its token epochs are used up", r.ino)))?;
    let mut layers = Vec::new();
    for (at, layer) in found {
        let (a, b) = (at.max(from), layer.to.min(to));
        assert!(a < b, "inode {}: a layer at {at} is taken for copying, outside of {from} to {to}", r.ino);
        if at < a {
            tables::LAYERS.put(cx.txn, (r.ino, at), &LayerRecord { to: a, ..layer });
        }
        if b < layer.to {
            tables::LAYERS.put(cx.txn, (r.ino, b), &layer);
        }
        let taken = LayerRecord { to: b, handed: token_epoch, ..layer };
        tables::LAYERS.put(cx.txn, (r.ino, a), &taken);
        let (object, fence) = (layer.object, layer.fence);
        layers.push(weir_proto::snapshot::Layer { from: a, to: b, object, fence });
    }
    inode.writing.token_epoch = token_epoch;
    cx.put_inode(r.ino, &inode);
    Ok(LayersTaken { entry: cx.rules.entry(r.ino, &inode), layout: inode.layout, layers, token_epoch })
}

/// All of a layer is in the file's own object now.
pub fn copied(cx: &mut Cx<'_>, r: &LayerCopied) -> Result<Entry> {
    let mut inode = load_file(cx.read(), r.ino)?;
    let found = tables::LAYERS.get(cx.read(), (r.ino, r.from))?;
    let layer = found.filter(|l| l.to == r.to && l.handed == r.token_epoch && l.handed > 0);
    let (Some(_), Some(layers)) = (layer, inode.layers) else {
        return Err(Error::stale(format!(
            "inode {}: bytes {} to {} were copied under token epoch {}, which is not so any more",
            r.ino, r.from, r.to, r.token_epoch
        )));
    };
    tables::LAYERS.delete(cx.txn, (r.ino, r.from));
    inode.layers = Some(Layers { bytes: layers.bytes.saturating_sub(r.to - r.from), ..layers });
    cx.put_inode(r.ino, &inode);
    Ok(cx.rules.entry(r.ino, &inode))
}
