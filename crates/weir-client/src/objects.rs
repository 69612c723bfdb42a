//! Bytes of a file in older objects, because a snapshot holds these: read there, copied before they are
//! written.
//!
//! Invariants: a file without such bytes costs nothing. The layers are believed under a lease only: while one
//! is held they can only become fewer. Nothing is sent to a stripe of a file that is not in its own object; a
//! copy is written under the token epoch that the leader granted for it, so a late one changes nothing. An
//! object that may still have a writer is truncated before it is copied from.
use crate::assembly::{Fetched, zeros};
use crate::base::Base;
use crate::data::{CellRange, Part};
use crate::data::{Data, STRIPE_PARTS};
use crate::inode::{Inode, State};
use crate::inodes::Inodes;
use crate::join::join_all;
use crate::leader::{Change, Leader};
use crate::leases::Leases;
use bytes::Bytes;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use weir_env::{BoxFuture, Env, Instant};
use weir_proto::data::{CHECKSUM_BLOCK, FILL_COUNTER, WriteMode};
use weir_proto::map::Layout;
use weir_proto::snapshot::{Layer, LayerCopied, LayersOf, TakeLayers};
use weir_proto::{Error, ErrorKind, InodeId, Result, Version};

/// Bytes that are copied at a time.
const STEP_BYTES: u64 = 64 << 20;
/// Another client copies the same, or the file changed: the longest pause before a retry.
const AGAIN_MS: u64 = 20;
/// Fenced objects that are remembered.
const FENCED_MAX: usize = 4096;
/// No file has this stripe: a truncation there only fences.
const NO_STRIPE: u64 = u64::MAX - 1;

impl State {
    /// The object with the file's own bytes.
    pub fn object(&self, ino: InodeId) -> InodeId {
        self.attr.as_ref().and_then(|a| a.layers).map_or(ino, |layers| layers.object)
    }
    /// Whether a part of `from..to`, or of its stripes, is in older objects, or may be as far as is known.
    pub fn is_layered(&self, from: u64, to: u64) -> bool {
        let Some(attr) = self.attr.as_ref().filter(|a| a.layers.is_some_and(|l| l.bytes > 0)) else {
            return false;
        };
        let stripe = attr.layout.map_or(1, |l| l.stripe_bytes());
        self.tier.layers().is_none_or(|layers| touches(layers, stripe, from, to))
    }
}

/// Whether a stripe of `from..to` has bytes in a layer.
fn touches(layers: &[Layer], stripe: u64, from: u64, to: u64) -> bool {
    let up = |at: u64| at.checked_next_multiple_of(stripe).unwrap_or(u64::MAX);
    let (from, to) = (from / stripe * stripe, up(to.max(from.saturating_add(1))));
    layers.iter().any(|l| l.from < to && up(l.to) > from)
}

/// `ranges` cut where the object changes, each with its object. A layer begins with a stripe; one that ends
/// within a stripe covers all of it, even if the file's own object has leftovers of a copy from before a
/// truncation there. Adjacent layers in one object are as one: a client's copy of a part has split it.
pub fn by_object(
    layers: &[Layer],
    own: InodeId,
    stripe: u64,
    ranges: &[(u64, u64)],
) -> Vec<(Option<InodeId>, u64, u64)> {
    let up = |at: u64| at.checked_next_multiple_of(stripe).unwrap_or(u64::MAX);
    let mut parts: Vec<(Option<InodeId>, u64, u64)> = Vec::new();
    let mut add = |object, from, to| match parts.last_mut() {
        Some((last, _, end)) if *last == object && *end == from => *end = to,
        _ => parts.push((object, from, to)),
    };
    for (from, to) in ranges {
        let mut at = *from;
        for layer in layers.iter().filter(|l| l.from < *to && up(l.to) > *from) {
            let whole = up(layer.to);
            for (object, end) in [(Some(own), layer.from), (Some(layer.object), layer.to), (None, whole)] {
                if at < end.min(*to) {
                    add(object, at, end.min(*to));
                    at = end.min(*to);
                }
            }
        }
        if at < *to {
            add(Some(own), at, *to);
        }
    }
    parts
}

pub struct Objects {
    env: Env,
    leader: Arc<Leader>,
    data: Arc<Data>,
    inodes: Arc<Inodes>,
    leases: Arc<Leases>,
    /// Older objects that no other client writes any more, with the token epoch that fenced them.
    fenced: Mutex<BTreeMap<InodeId, u32>>,
}

impl Objects {
    pub fn new(base: &Base, leases: Arc<Leases>) -> Objects {
        let Base { env, leader, data, inodes, .. } = base.clone();
        Objects { env, leader, data, inodes, leases, fenced: Mutex::default() }
    }

    /// The layers that end in the stripe of `from` or after it.
    pub async fn layers(&self, inode: &Inode, from: u64) -> Result<Vec<Layer>> {
        let (stripe, leased, leases_lost, known) = {
            let st = inode.lock();
            let Some(attr) = st.attr.as_ref().filter(|a| a.layers.is_some_and(|l| l.bytes > 0)) else {
                return Ok(Vec::new());
            };
            let leased = st.lease.is_held();
            if let Some(known) = st.tier.layers().filter(|_| leased) {
                return Ok(known.clone());
            }
            (attr.layout.map_or(1, |l| l.stripe_bytes()), leased, st.pages.leases_lost(), attr.layers)
        };
        let from = if leased { 0 } else { from / stripe * stripe };
        let (_, layers) = self.list_layers(0, inode.ino, from, leased).await?;
        let mut st = inode.lock();
        // Ranges that this client itself has copied or evicted meanwhile are not layers any more.
        let same =
            st.pages.leases_lost() == leases_lost && st.attr.as_ref().is_some_and(|a| a.layers == known);
        if leased && st.lease.is_held() && same {
            st.tier.note_layers(layers.clone());
        }
        Ok(layers)
    }

    /// The file's own object, and its layers that end after `from`; `all`: not only the first ones.
    pub async fn list_layers(
        &self,
        snapshot: u32,
        ino: InodeId,
        mut from: u64,
        all: bool,
    ) -> Result<(InodeId, Vec<Layer>)> {
        let mut layers: Vec<Layer> = Vec::new();
        loop {
            let ask = |session| LayersOf { session, snapshot, ino, from };
            let list = self.leader.ask(ask).await?;
            layers.extend(&list.layers);
            match list.layers.last() {
                Some(last) if list.more && all => from = last.to,
                _ => return Ok((list.object, layers)),
            }
        }
    }

    /// Whether a stripe of `from..to` has bytes in an older object.
    pub async fn has_layers(&self, inode: &Inode, from: u64, to: u64) -> Result<bool> {
        if !inode.lock().is_layered(from, to) {
            return Ok(false);
        }
        let layers = self.layers(inode, from).await?;
        let stripe = inode.lock().attr.as_ref().and_then(|a| a.layout).map_or(1, |l| l.stripe_bytes());
        Ok(touches(&layers, stripe, from, to))
    }

    /// Returns when all stripes of `from..to` are in the file's own object, with its number: they stay there,
    /// but the file may get another one.
    pub async fn copy_up(&self, inode: &Inode, from: u64, to: u64) -> Result<InodeId> {
        let to = to.max(from.saturating_add(1));
        let own = inode.lock().object(inode.ino);
        let mut at = from;
        while at < to && inode.lock().is_layered(at, to) {
            let end = to.min(at.saturating_add(STEP_BYTES));
            let deadline = self.leader.deadline();
            let mut refused = 0;
            while self.has_layers(inode, at, end).await? {
                match self.copy_some(inode, at, end).await {
                    Err(e) if e.kind == ErrorKind::Stale && !self.leader.left(deadline).is_zero() => {
                        inode.lock().tier.forget_layers();
                        let pause = 1 + self.env.rng.below(AGAIN_MS);
                        self.env.clock.sleep(Duration::from_millis(pause)).await;
                        self.leases.refresh(inode).await?;
                        // Retried once more under a newer one, which is the next only.
                        let under = inode.lock().lease.token_epoch();
                        if refused > 0 {
                            self.leases.pass_fence(inode, under).await?;
                        }
                        refused = under;
                    }
                    done => {
                        done.map_err(|e| e.doing(format!("copy bytes of file {} to write them", inode.ino)))?
                    }
                }
            }
            at = end;
        }
        Ok(own)
    }

    async fn copy_some(&self, inode: &Inode, from: u64, to: u64) -> Result<()> {
        let (ino, revoke_clock) = (inode.ino, self.inodes.revoke_clock());
        let taken = self.leader.ask(|session| TakeLayers { session, ino, from, to }).await?;
        self.inodes.apply(&taken.entry, revoke_clock);
        let Some(layout) = taken.layout.filter(|_| !taken.layers.is_empty()) else {
            inode.lock().tier.forget_layers(); // the known layers are outdated
            return Ok(());
        };
        layout.check()?;
        let object = taken.entry.attr.layers.map_or(ino, |layers| layers.object);
        let token_epoch = taken.token_epoch;
        for layer in &taken.layers {
            let version = Version::new(token_epoch, FILL_COUNTER);
            self.copy_layer(&layout, layer, object, version).await?;
            let (from, to, revoke_clock) = (layer.from, layer.to, self.inodes.revoke_clock());
            let copied = |op| LayerCopied { op, ino, from, to, token_epoch };
            let entry = self.leader.change(Change::repeatable(), copied).await?;
            let mut st = inode.lock();
            let known = st.tier.take_layers();
            self.inodes.apply_to(&mut st, &entry, revoke_clock);
            if st.lease.is_held() {
                known.into_iter().for_each(|known| st.tier.note_layers(without(known, from, to)));
            }
        }
        Ok(())
    }

    async fn copy_layer(&self, layout: &Layout, layer: &Layer, to: InodeId, version: Version) -> Result<()> {
        self.fence(layer.object, layout, layer.fence).await?;
        let mut at = layer.from;
        while at < layer.to {
            let stripe = layout.stripe_of(at);
            let end = layer.to.min(layout.stripe_start(stripe) + layout.stripe_bytes());
            let data = self.fetch_whole(layer.object, *layout, at, end).await?;
            let _permit = self.data.flight.enter(STRIPE_PARTS).await;
            let s = self.data.stripe(to, *layout, stripe, self.leader.deadline());
            let fragments = self.data.fragments_of(layout, data)?;
            self.data.write_stripe(s, version, WriteMode::Fill, &[], &fragments, false).await?;
            at = end;
        }
        Ok(())
    }

    /// Bytes from targets.
    pub async fn fetch(
        &self,
        inode: &Inode,
        layout: Layout,
        ranges: &[(u64, u64)],
        deadline: Instant,
    ) -> Result<Fetched> {
        let from = ranges.first().map_or(0, |(from, _)| *from);
        loop {
            let (own, layered) = {
                let st = inode.lock();
                (st.object(inode.ino), st.is_layered(from, u64::MAX))
            };
            if !layered {
                return self.fetch_from(own, layout, ranges, deadline).await;
            }
            let layers = self.layers(inode, from).await?;
            let fetched = self.fetch_layered(&layers, own, layout, ranges, deadline).await?;
            if !fetched.holes {
                return Ok(fetched);
            }
            // An older object is deleted when all layers in it are copied: a hole in it may come from that.
            let start = layout.stripe_start(layout.stripe_of(from));
            let (own_now, layers_now) = self.list_layers(0, inode.ino, start, false).await?;
            let parts = |layers: &[Layer], own| by_object(layers, own, layout.stripe_bytes(), ranges);
            if parts(&layers, own) == parts(&layers_now, own_now) {
                return Ok(fetched);
            }
            if self.leader.left(deadline).is_zero() {
                return Err(Error::deadline(format!("read file {}: its bytes move without end", inode.ino)));
            }
            self.leases.refresh(inode).await?;
        }
    }

    /// Bytes of one object.
    async fn fetch_from(
        &self,
        object: InodeId,
        layout: Layout,
        ranges: &[(u64, u64)],
        deadline: Instant,
    ) -> Result<Fetched> {
        let cell_bytes = layout.cell_bytes();
        let mut wanted: BTreeMap<u64, Vec<CellRange>> = BTreeMap::new();
        for segment in ranges.iter().flat_map(|(a, b)| layout.segments(*a, b - a)) {
            let start = segment.offset / CHECKSUM_BLOCK * CHECKSUM_BLOCK;
            let end = (segment.offset + segment.len).next_multiple_of(CHECKSUM_BLOCK).min(cell_bytes);
            let cells = wanted.entry(segment.stripe).or_default();
            match cells.last_mut() {
                Some(last) if last.index == usize::from(segment.cell) && last.start + last.len >= start => {
                    last.len = end.max(last.start + last.len) - last.start;
                }
                _ => cells.push(CellRange { index: usize::from(segment.cell), start, len: end - start }),
            }
        }
        let calls: Vec<BoxFuture<'_, Result<Vec<Part>>>> = wanted
            .iter()
            .map(|(stripe, cells)| {
                let s = self.data.stripe(object, layout, *stripe, deadline);
                Box::pin(self.data.read_cells(s, cells)) as BoxFuture<'_, _>
            })
            .collect();
        let answers = join_all(calls).await.into_iter().collect::<Result<Vec<_>>>()?;
        let (mut parts, mut holes) = (Vec::new(), false);
        for ((stripe, cells), bytes) in wanted.iter().zip(answers) {
            for (cell, Part { bytes, hole }) in cells.iter().zip(bytes) {
                holes |= hole;
                let at = layout.stripe_start(*stripe)
                    + cell.index as u64 * u64::from(cell_bytes)
                    + u64::from(cell.start);
                let lacking = zeros(at + bytes.len() as u64, at + u64::from(cell.len));
                parts.push((at, bytes));
                parts.extend(lacking);
            }
        }
        Ok(Fetched { parts, holes })
    }

    async fn fetch_whole(&self, object: InodeId, layout: Layout, from: u64, to: u64) -> Result<Bytes> {
        let fetched = self.fetch_from(object, layout, &[(from, to)], self.leader.deadline()).await?;
        let mut data = vec![0; (to - from) as usize];
        for (at, bytes) in trimmed(fetched.parts, from, to) {
            let start = (at - from) as usize;
            data[start..start + bytes.len()].copy_from_slice(&bytes);
        }
        Ok(Bytes::from(data))
    }

    /// From now on no earlier writer can write to an object; 0: it has none.
    pub async fn fence(&self, object: InodeId, layout: &Layout, fence: u32) -> Result<()> {
        if fence == 0 {
            return Ok(());
        }
        self.data
            .drop_file(self.data.file_id(object), layout, NO_STRIPE, fence, self.leader.deadline())
            .await
            .map(drop)
    }

    /// Fences an object, unless this client has done it already.
    async fn fence_once(&self, object: InodeId, layout: &Layout, fence: u32) -> Result<()> {
        let is_known =
            |fenced: &BTreeMap<InodeId, u32>| fenced.get(&object).is_some_and(|known| *known >= fence);
        if fence == 0 || is_known(&self.fenced.lock().unwrap_or_else(PoisonError::into_inner)) {
            return Ok(());
        }
        self.fence(object, layout, fence).await?;
        let mut fenced = self.fenced.lock().unwrap_or_else(PoisonError::into_inner);
        if fenced.len() >= FENCED_MAX {
            fenced.clear();
        }
        fenced.insert(object, fence);
        Ok(())
    }

    /// Bytes of parts of a file, each from the object that contains it.
    pub async fn fetch_layered(
        &self,
        layers: &[Layer],
        own: InodeId,
        layout: Layout,
        ranges: &[(u64, u64)],
        deadline: Instant,
    ) -> Result<Fetched> {
        // A former writer of an object that is shared now may have a write in flight.
        for layer in layers.iter().filter(|l| ranges.iter().any(|(a, b)| l.from < *b && l.to > *a)) {
            self.fence_once(layer.object, &layout, layer.fence).await?;
        }
        let mut all = Fetched { parts: Vec::new(), holes: false };
        for (object, from, to) in by_object(layers, own, layout.stripe_bytes(), ranges) {
            let Some(object) = object else {
                all.holes = true;
                all.parts.extend(zeros(from, to));
                continue;
            };
            let fetched = self.fetch_from(object, layout, &[(from, to)], deadline).await?;
            all.holes |= fetched.holes;
            // The neighbouring bytes are in another object.
            all.parts.extend(trimmed(fetched.parts, from, to));
        }
        Ok(all)
    }
}

fn trimmed(parts: Vec<(u64, Bytes)>, from: u64, to: u64) -> impl Iterator<Item = (u64, Bytes)> {
    parts.into_iter().filter_map(move |(at, bytes)| {
        let (a, b) = (at.max(from), (at + bytes.len() as u64).min(to));
        (a < b).then(|| (a, bytes.slice((a - at) as usize..(b - at) as usize)))
    })
}

/// The rest of the layers when `from..to` is copied.
fn without(layers: Vec<Layer>, from: u64, to: u64) -> Vec<Layer> {
    let mut left = Vec::with_capacity(layers.len() + 1);
    for layer in layers {
        if layer.from < from.min(layer.to) {
            left.push(Layer { to: layer.to.min(from), ..layer });
        }
        if layer.to > to.max(layer.from) {
            left.push(Layer { from: layer.from.max(to), ..layer });
        }
    }
    left
}

#[cfg(test)]
mod tests {
    use super::*;

    const OWN: InodeId = InodeId(9);

    fn layer(from: u64, to: u64, object: u64) -> Layer {
        Layer { from, to, object: InodeId(object), fence: 0 }
    }

    #[test]
    fn each_part_comes_from_where_it_is() {
        let layers = [layer(0, 100, 1), layer(200, 250, 2)];
        let parts = |ranges| by_object(&layers, OWN, 100, ranges);
        let (own, one, two) = (Some(OWN), Some(InodeId(1)), Some(InodeId(2)));
        let expected = [(one, 50, 100), (own, 100, 200), (two, 200, 250), (None, 250, 300), (own, 300, 310)];
        assert_eq!(parts(&[(50, 310)]), expected);
        assert_eq!(parts(&[(120, 130), (210, 220)]), [(own, 120, 130), (two, 210, 220)]);
        assert_eq!(parts(&[(260, 270), (290, 301)]), [(None, 260, 270), (None, 290, 300), (own, 300, 301)]);
    }

    /// A client that compares its layers with the leader's would never find them equal.
    #[test]
    fn a_layer_that_is_split_is_the_same() {
        let parts = |layers: &[Layer]| by_object(layers, OWN, 100, &[(0, 350)]);
        let split = parts(&[layer(0, 100, 1), layer(100, 200, 1), layer(200, 250, 1)]);
        assert_eq!(split, parts(&[layer(0, 250, 1)]));
        assert_eq!(split, [(Some(InodeId(1)), 0, 250), (None, 250, 300), (Some(OWN), 300, 350)]);
    }

    #[test]
    fn a_stripe_is_touched_wherever_its_bytes_are() {
        let layers = [layer(100, 150, 1)];
        assert!(touches(&layers, 100, 180, 190), "the rest of the stripe");
        assert!(touches(&layers, 100, 150, 150));
        assert!(!touches(&layers, 100, 0, 100) && !touches(&layers, 100, 200, 300));
    }

    #[test]
    fn a_copied_range_leaves_its_layer() {
        let left = without(vec![layer(0, 100, 1), layer(100, 300, 2)], 150, 200);
        assert_eq!(left, [layer(0, 100, 1), layer(100, 150, 2), layer(200, 300, 2)]);
        assert_eq!(without(vec![layer(0, 100, 1)], 0, 100), []);
    }
}
