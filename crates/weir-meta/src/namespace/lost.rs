//! Bytes of a restored namespace that targets no longer hold: deleted, truncated or evicted after the export.
//!
//! They are marked as evicted. So a reader gets them recalled from home, or an error if home does not have
//! them, and never zeros or another file's bytes.
//!
//! A stripe that no target has may also be a hole. A file whose stripes on targets have room for all written
//! bytes has holes there; otherwise it has lost some, and the holes among the absent stripes cannot be
//! identified.
use super::*;
use crate::record::Record;
use std::collections::BTreeMap;
use weir_kv::Scan;
use weir_proto::recall::ByteRange;

/// The stripes of objects that targets hold.
#[derive(Default, Debug)]
pub struct Holdings {
    /// A bit for each stripe.
    of: BTreeMap<InodeId, Vec<u64>>,
}

/// Far more stripes than a file can have: a larger number comes from a damaged target.
const STRIPES_MAX: u64 = 1 << 32;

impl Holdings {
    pub fn note(&mut self, object: InodeId, stripe: u64) -> Result<()> {
        if stripe >= STRIPES_MAX {
            return Err(Error::damaged(format!("a target has stripe {stripe} of inode {object}")));
        }
        let bits = self.of.entry(object).or_default();
        let (word, bit) = ((stripe / 64) as usize, stripe % 64);
        if bits.len() <= word {
            bits.resize(word + 1, 0);
        }
        bits[word] |= 1 << bit;
        Ok(())
    }

    fn has(&self, object: InodeId, stripe: u64) -> bool {
        let bits = self.of.get(&object);
        bits.and_then(|bits| bits.get((stripe / 64) as usize))
            .is_some_and(|word| word >> (stripe % 64) & 1 == 1)
    }

    /// The objects, in order.
    pub fn objects(&self) -> impl Iterator<Item = InodeId> {
        self.of.keys().copied()
    }
}

/// The missing parts of a file, in whole stripes and up to its end. `is_evicted`, `elsewhere`: its stripes
/// that are at home only, and those that are in an older object.
fn absent(inode: &Inode, has: impl Fn(u64) -> bool, is_evicted: impl Fn(u64) -> bool) -> Vec<ByteRange> {
    let Some(layout) = inode.layout.filter(|_| inode.kind == FileKind::Regular) else { return Vec::new() };
    let (mut held, mut gaps): (u64, Vec<ByteRange>) = (inode.evicted, Vec::new());
    for stripe in 0..layout.stripe_count(inode.size) {
        let (from, to) = (layout.stripe_start(stripe), layout.stripe_start(stripe + 1).min(inode.size));
        if is_evicted(from) {
            continue;
        }
        if has(stripe) {
            held = held.saturating_add(layout.stripe_bytes());
            continue;
        }
        match gaps.last_mut().filter(|last| last.to == from) {
            Some(last) => last.to = to,
            None => gaps.push(ByteRange { from, to }),
        }
    }
    if held >= inode.allocated { Vec::new() } else { gaps }
}

/// The lost parts of a file.
pub fn lost(read: &dyn Read, ino: InodeId, inode: &Inode, held: &Holdings) -> Result<Vec<ByteRange>> {
    if inode.layout.is_none() || inode.allocated == 0 || tables::DATA.has(read, ino)? {
        return Ok(Vec::new()); // its bytes are inline, or it has none
    }
    let evicted = evicted::ranges(read, ino, 0, usize::MAX)?;
    let layers = layers::ranges(read, ino, 0, usize::MAX)?;
    let stripe_bytes = inode.layout.map_or(1, |layout| layout.stripe_bytes());
    let object = inode.object(ino);
    let older = |stripe: u64| {
        let at = stripe * stripe_bytes;
        layers.iter().any(|(from, layer)| *from <= at && at < layer.to && held.has(layer.object, stripe))
    };
    let has = |stripe| held.has(object, stripe) || older(stripe);
    Ok(absent(inode, has, |at| evicted.iter().any(|f| f.from <= at && at < f.range.to)))
}

/// The number of bytes that a file lacks, as a snapshot has it.
fn lost_of_kept(ino: InodeId, inode: &Inode, is_inline: bool, held: &Holdings) -> u64 {
    // Bytes in older objects count as present: those are checked with their own file.
    let counted = inode.layered().saturating_add(inode.evicted);
    if is_inline || inode.evicted > 0 || inode.allocated <= counted {
        return 0;
    }
    let object = inode.object(ino);
    let own = Inode { allocated: inode.allocated - counted, ..inode.clone() };
    absent(&own, |stripe| held.has(object, stripe), |_| false).iter().map(|gap| gap.to - gap.from).sum()
}

/// Marks it.
pub fn lose(cx: &mut Cx<'_>, ino: InodeId, gaps: &[ByteRange]) -> Result<()> {
    let mut inode = load_file(cx.read(), ino)?;
    let known = evicted::ranges(cx.read(), ino, 0, usize::MAX)?;
    cx.drop_layers(ino, &mut inode, gaps)?;
    let evicted = gaps.iter().fold(inode.evicted, |sum, gap| sum + (gap.to - gap.from));
    cx.put_evicted(ino, &known, gaps);
    let allocated = inode.allocated.max(evicted);
    cx.set_space(&mut inode, allocated, evicted)?;
    // Nothing is left to truncate, and a target may know the file as a deleted one.
    inode.writing.recover &= evicted < inode.size;
    cx.put_inode(ino, &inode);
    Ok(())
}

/// Files after `after`, `limit` at most.
pub fn files(read: &dyn Read, after: Option<InodeId>, limit: usize) -> Result<Vec<(InodeId, Inode)>> {
    let start = after.map_or(vec![b'I'], |ino| keys::after(&tables::INODES.key(ino)));
    let (mut found, mut bad) = (Vec::new(), None);
    read.scan(&start, &[b'I' + 1], &mut |key, value| {
        let ino = keys::numbered(key);
        match Inode::from_value(value, || format!("inode {ino}")) {
            Ok(inode) => found.push((ino, inode)),
            Err(e) => bad = Some(e),
        }
        if found.len() < limit && bad.is_none() { Scan::More } else { Scan::Stop }
    })?;
    bad.map_or(Ok(found), Err)
}

/// Marks files as snapshots have them, after the key `after`; returns the numbers of files and lost bytes,
/// and where to continue.
pub fn lose_of_snapshots(
    txn: &mut dyn Txn,
    held: &Holdings,
    after: &[u8],
    limit: usize,
) -> Result<(u64, u64, Option<Vec<u8>>)> {
    let start = if after.is_empty() { vec![b'h'] } else { keys::after(after) };
    let (mut entries, mut last) = (Vec::new(), None);
    let mut scanned = 0;
    txn.scan(&start, &[b'h' + 1], &mut |key, value| {
        scanned += 1;
        if let (Some(b'I'), Some((1, inode))) = (keys::kept_key(key).first(), value.split_first()) {
            entries.push((key.to_vec(), inode.to_vec()));
        }
        if scanned < limit {
            return Scan::More;
        }
        last = Some(key.to_vec());
        Scan::Stop
    })?;
    let (mut files, mut bytes) = (0, 0);
    for (key, value) in entries {
        let ino = keys::numbered(keys::kept_key(&key));
        let mut inode = Inode::from_value(&value, || format!("inode {ino} in a snapshot"))?;
        let kept_data = [&key[..5], &tables::DATA.key(ino)].concat();
        let is_inline = txn.get(&kept_data)?.is_some_and(|value| value.first() == Some(&1))
            || tables::DATA.has(txn, ino)?;
        let lost = lost_of_kept(ino, &inode, is_inline, held);
        if lost > 0 {
            (files, bytes, inode.evicted) = (files + 1, bytes + lost, lost);
            txn.put(&key, &[&[1], &inode.to_value()[..]].concat());
        }
    }
    Ok((files, bytes, last))
}
