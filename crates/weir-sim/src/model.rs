//! The expected content of a file: its bytes in an ideal file system, and which operation wrote each.
//!
//! Every written byte is a function of (operation, offset), so wrong bytes identify their operation. Knows
//! nothing of clients, stripes or time.

use std::collections::BTreeMap;

/// Bytes shown with a mismatch.
const SHOWN_BYTES: usize = 12;
/// Bytes that are compared at a time.
const AT_ONCE: usize = 4096;

/// The byte that operation `op` writes at `offset`; never 0, so that holes differ from data.
pub fn pattern(op: u64, offset: u64) -> u8 {
    patterns(op, offset / 8)[(offset % 8) as usize]
}

/// The bytes of the eight offsets from `word * 8` on.
fn patterns(op: u64, word: u64) -> [u8; 8] {
    let mut mixed = (op.wrapping_mul(0x9E37_79B9_7F4A_7C15) ^ word).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    mixed ^= mixed >> 31;
    // Bytes that are 0 become 1, all eight in one step.
    const LOW: u64 = 0x7F7F_7F7F_7F7F_7F7F;
    let is_zero = !(((mixed & LOW) + LOW) | mixed | LOW);
    (mixed | is_zero >> 7).to_le_bytes()
}

pub fn bytes_of(op: u64, offset: u64, len: usize) -> Vec<u8> {
    let words = offset / 8..(offset + len as u64).div_ceil(8);
    let mut bytes = Vec::with_capacity((words.end - words.start) as usize * 8);
    words.for_each(|word| bytes.extend_from_slice(&patterns(op, word)));
    let skipped = (offset % 8) as usize;
    if skipped > 0 {
        bytes.drain(..skipped);
    }
    bytes.truncate(len);
    bytes
}

/// The offsets at which two files differ; one of them may be longer.
fn differing<'a>(one: &'a [u8], other: &'a [u8]) -> impl Iterator<Item = usize> + use<'a> {
    let len = one.len().max(other.len());
    let part = |bytes: &'a [u8], at: usize| {
        let from = at.min(bytes.len());
        &bytes[from..(from + AT_ONCE).min(bytes.len())]
    };
    // Most of a file is equal.
    let unlike = (0..len).step_by(AT_ONCE).filter(move |at| part(one, *at) != part(other, *at));
    let offsets = unlike.flat_map(move |at| at..len.min(at + AT_ONCE));
    offsets.filter(move |at| one.get(*at) != other.get(*at))
}

/// A kind of change.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum What {
    Write { offset: u64, len: u64 },
    Zero { offset: u64, len: u64 },
    Size { len: u64 },
}

/// The author of a change: a client in one of its processes, and how often it had been cut off when it began.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Who {
    pub client: usize,
    pub life: u64,
    pub cuts: u64,
}

/// A change that may be lost if its client is cut off, dies or gets an error: no other client has seen it,
/// and no `fsync` or `close` has succeeded after it.
#[derive(Clone, Debug)]
struct Pending {
    who: Who,
    op: u64,
    what: What,
    /// The known size of the file when it began.
    len_before: u64,
    /// Its operation succeeded.
    done: bool,
    /// Its client has got an error since.
    doubted: bool,
}

impl Pending {
    /// Whether it may be lost, as far as its client is concerned.
    fn is_doubtful(&self, cuts: &impl Fn(usize) -> u64) -> bool {
        !self.done || self.doubted || cuts(self.who.client) != self.who.cuts
    }
    /// Whether it changed the byte at `offset`, or the file's size beyond it.
    fn touches(&self, offset: u64) -> bool {
        match self.what {
            What::Write { offset: from, len } => (from.min(self.len_before)..from + len).contains(&offset),
            What::Zero { offset: from, len } => (from..from + len).contains(&offset),
            What::Size { len } => offset >= len.min(self.len_before),
        }
    }
}

#[derive(Clone, Debug, Default)]
pub struct FileModel {
    bytes: Vec<u8>,
    history: Vec<Change>,
    pending: Vec<Pending>,
    /// The bytes before the first of `pending`, if any, including changes that have become durable since.
    durable: Vec<u8>,
    /// Settled changes older than some of `pending`: their bytes appear if those are lost.
    below: Vec<Pending>,
    /// The durable bytes before these.
    below_bytes: Vec<Vec<u8>>,
    /// Sizes at which the file was read since: the changes of others are then durable, even if all of
    /// `pending` is lost.
    lens_seen: Vec<u64>,
}

/// Changes a file as an ideal file system does.
fn apply(bytes: &mut Vec<u8>, op: u64, what: What) {
    match what {
        What::Write { offset, len } => {
            let end = (offset + len) as usize;
            if bytes.len() < end {
                bytes.resize(end, 0);
            }
            bytes[offset as usize..end].copy_from_slice(&bytes_of(op, offset, len as usize));
        }
        What::Zero { offset, len } => {
            let end = (offset + len).min(bytes.len() as u64);
            if offset < end {
                bytes[offset as usize..end as usize].fill(0);
            }
        }
        What::Size { len } => bytes.resize(len as usize, 0),
    }
}

/// A record of a change, to identify wrong bytes.
#[derive(Clone, Debug)]
struct Change {
    op: u64,
    what: String,
    offset: u64,
    len: u64,
}

/// Changes and their outcomes.
impl FileModel {
    /// A file with these bytes, which are durable.
    pub fn of(bytes: Vec<u8>) -> FileModel {
        FileModel { bytes, ..FileModel::default() }
    }
    /// The present bytes as durable ones, regardless of their writers.
    pub fn settled(&self) -> FileModel {
        FileModel {
            pending: Vec::new(),
            durable: Vec::new(),
            below: Vec::new(),
            below_bytes: Vec::new(),
            ..self.clone()
        }
    }
    pub fn len(&self) -> u64 {
        self.bytes.len() as u64
    }
    pub fn is_empty(&self) -> bool {
        self.bytes.is_empty()
    }

    /// A change begins. From now on it may be visible.
    pub fn begin(&mut self, who: Who, op: u64, what: What) {
        if self.pending.is_empty() {
            self.durable = self.bytes.clone();
            self.below.clear();
            self.below_bytes.clear();
            self.lens_seen.clear();
        }
        let len_before = self.len();
        self.pending.push(Pending { who, op, what, len_before, done: false, doubted: false });
        let (did, offset, len) = match what {
            What::Write { offset, len } => ("wrote", offset, len),
            What::Zero { offset, len } => ("punched", offset, len),
            What::Size { len } => ("set the size to", len, 0),
        };
        // Before its outcome is known: bytes of a failed change are identified by their operation, too.
        self.note(op, format!("c{} {did}", who.client), offset, len);
    }

    /// The change that began as `op` succeeded: from now on it must be visible.
    pub fn done(&mut self, op: u64) {
        let pending = self.pending.iter_mut().rfind(|p| p.op == op).expect("it began");
        pending.done = true;
        let what = pending.what;
        apply(&mut self.bytes, op, what);
    }

    /// An `fsync` or a `close` of `client` succeeded. It does not cover changes whose loss was reported
    /// earlier.
    pub fn synced(&mut self, client: usize) {
        if self.pending.iter().all(|p| p.done && !p.doubted && p.who.client == client) {
            self.pending.clear();
        }
    }

    /// `client` has seen the others' changes (it read, or got the write lease): they must stay. Except for a
    /// client that was cut off meanwhile: the cut may have been earlier, and its changes were lost before any
    /// client saw them.
    pub fn seen_by(&mut self, client: usize, cuts: impl Fn(usize) -> u64) {
        let is_others = |p: &&Pending| p.who.client != client;
        let mut others = self.pending.iter().filter(is_others).peekable();
        if others.peek().is_some() && others.all(|p| !p.is_doubtful(&cuts)) {
            self.keep_all_but(|who| who.client == client);
        }
    }

    /// The present content becomes durable, except for changes by `is_mine`, which may still be lost. Beneath
    /// those, any of the others' changes may appear.
    fn keep_all_but(&mut self, is_mine: impl Fn(Who) -> bool) {
        let (mine, others): (Vec<Pending>, Vec<Pending>) =
            std::mem::take(&mut self.pending).into_iter().partition(|p| is_mine(p.who));
        if !others.is_empty() {
            self.below_bytes.push(self.durable.clone());
            others.iter().for_each(|p| apply(&mut self.durable, p.op, p.what));
            let is_kept = |at: usize| !mine.iter().any(|p| p.touches(at as u64));
            for at in 0..self.bytes.len().max(self.durable.len()) {
                match self.bytes.get(at) {
                    Some(byte) if is_kept(at) => {
                        self.durable.resize(self.durable.len().max(at + 1), 0);
                        self.durable[at] = *byte;
                    }
                    None if is_kept(at) => {
                        self.durable.truncate(at);
                        break;
                    }
                    _ => {}
                }
            }
        }
        self.pending = mine;
        self.below.extend(others);
    }

    /// An operation of `client` ended with an error.
    pub fn doubt(&mut self, client: usize) {
        self.pending.iter_mut().filter(|p| p.who.client == client).for_each(|p| p.doubted = true);
    }

    /// Whether the file must be read before its bytes are known. `cuts`: how often each client was cut off so
    /// far.
    pub fn is_doubtful(&self, cuts: impl Fn(usize) -> u64) -> bool {
        self.pending.iter().any(|p| p.is_doubtful(&cuts))
    }

    /// Whether a change that one of `who` began may still take effect.
    pub fn is_on_its_way(&self, who: impl Fn(Who) -> bool) -> bool {
        self.pending.iter().any(|p| !p.done && who(p.who))
    }

    pub fn is_pending(&self) -> bool {
        !self.pending.is_empty()
    }

    /// `me` has read `got`; only bytes for which `owns` holds are checked. Each byte must be a possible one;
    /// it is durable from now on, except for changes of `me` that may still be lost. Returns the clients
    /// whose changes are lost.
    pub fn settle(
        &mut self,
        me: Who,
        got: &[u8],
        is_own: Option<&dyn Fn(u64) -> bool>,
    ) -> Result<Vec<Who>, String> {
        if is_own.is_none() {
            self.check_size(got.len() as u64)?;
        }
        let mut settled = self.bytes.clone();
        settled.resize(got.len(), 0);
        for at in differing(&self.bytes, got).take_while(|at| *at < got.len()) {
            let (offset, byte) = (at as u64, &got[at]);
            if is_own.is_some_and(|is_own| !is_own(offset)) {
                continue;
            }
            if self.bytes.get(at).copied().unwrap_or(0) != *byte && !self.may_hold(offset, *byte) {
                let from = &got[at..got.len().min(at + SHOWN_BYTES)];
                return Err(format!(
                    "in doubt, and still wrong: {from:?} ({}) at {offset}\n{}",
                    self.origin(offset, from),
                    self.tail(offset, 1)
                ));
            }
            settled[at] = *byte;
        }
        let lost = self.losers(&settled);
        if is_own.is_some() {
            let used = settled.iter().rposition(|b| *b != 0).map_or(0, |last| last + 1);
            settled.truncate(used);
        }
        self.bytes = settled;
        self.lens_seen.push(self.len());
        self.note(0, format!("c{} settled the bytes of", me.client), 0, 0);
        self.keep_all_but(|who| who.client == me.client && who.life == me.life);
        self.pending.iter_mut().for_each(|p| p.done = true);
        Ok(lost)
    }

    /// Checks that the size is possible with some of the changes in doubt.
    fn check_size(&self, len: u64) -> Result<(), String> {
        let mut sizes = vec![self.durable.len() as u64, self.len()];
        for p in &self.pending {
            match p.what {
                What::Write { offset, len } => sizes.push(offset + len),
                What::Size { len } => sizes.push(len),
                What::Zero { .. } => {}
            }
        }
        let least = self.pending.iter().filter_map(|p| match p.what {
            What::Size { len } => Some(len),
            _ => None,
        });
        let least = least.chain(self.lens_seen.iter().copied());
        let least = least.chain(self.below.iter().map(|p| p.len_before));
        let least = least.chain([self.durable.len() as u64, self.len()]).min().unwrap_or(0);
        let most = sizes.into_iter().max().unwrap_or(0);
        if (least..=most).contains(&len) {
            return Ok(());
        }
        Err(format!("in doubt, but a size of {len} cannot be: {least} to {most}\n{}", self.tail(0, u64::MAX)))
    }

    fn may_hold(&self, offset: u64, byte: u8) -> bool {
        let leaves = |p: &Pending| match p.what {
            What::Write { offset: from, len } => {
                (from..from + len).contains(&offset) && pattern(p.op, offset) == byte
            }
            What::Zero { offset: from, len } => (from..from + len).contains(&offset) && byte == 0,
            What::Size { len } => offset >= len && byte == 0,
        };
        let is_in = |bytes: &Vec<u8>| bytes.get(offset as usize).copied().unwrap_or(0) == byte;
        is_in(&self.durable)
            || self.pending.iter().any(leaves)
            || (self.pending.iter().any(|p| p.touches(offset))
                && (self.below.iter().any(leaves) || self.below_bytes.iter().any(is_in)))
    }

    /// Clients that lost acknowledged changes if the content is `settled`. None if an unfinished change may
    /// explain the difference.
    fn losers(&self, settled: &[u8]) -> Vec<Who> {
        if self.pending.iter().any(|p| !p.done) {
            return Vec::new();
        }
        let mut losers: BTreeMap<usize, Who> = BTreeMap::new();
        for at in differing(settled, &self.bytes) {
            let newest = self.pending.iter().rfind(|p| p.touches(at as u64));
            // A client that got an error since is not notified again.
            losers.extend(newest.filter(|p| !p.doubted).map(|p| (p.who.client, p.who)));
        }
        losers.into_values().collect()
    }

    pub fn note(&mut self, op: u64, what: String, offset: u64, len: u64) {
        self.history.push(Change { op, what, offset, len });
    }

    /// The bytes of `offset..offset + len` within the file.
    pub fn read(&self, offset: u64, len: usize) -> &[u8] {
        let from = offset.min(self.len()) as usize;
        &self.bytes[from..(from + len).min(self.bytes.len())]
    }

    /// Copies `other`'s bytes of a range (for files whose ranges have owners).
    pub fn take(&mut self, other: &FileModel, offset: u64, len: usize) {
        let bytes = other.read(offset, len).to_vec();
        if bytes.is_empty() {
            return;
        }
        if self.bytes.len() < offset as usize + bytes.len() {
            self.bytes.resize(offset as usize + bytes.len(), 0);
        }
        self.bytes[offset as usize..offset as usize + bytes.len()].copy_from_slice(&bytes);
        self.history.extend(other.history.iter().filter(|c| c.touches(offset, len as u64)).cloned());
    }

    /// Whether a read of `len` bytes at `offset` may return `got`; the error names the mismatch and the
    /// operation of the bytes found.
    pub fn check(&self, offset: u64, len: usize, got: &[u8]) -> Result<(), String> {
        let expected = self.read(offset, len);
        if expected == got {
            return Ok(());
        }
        if expected.len() != got.len() {
            let (wanted, got) = (expected.len(), got.len());
            return Err(format!(
                "read {len} at {offset}: {got} bytes instead of {wanted}\n{}",
                self.tail(offset, len as u64)
            ));
        }
        let first = expected.iter().zip(got).position(|(e, g)| e != g).expect("they differ");
        let wrong = expected.iter().zip(got).filter(|(e, g)| e != g).count();
        let last = expected.len()
            - 1
            - expected.iter().rev().zip(got.iter().rev()).position(|(e, g)| e != g).expect("they differ");
        let at = offset + first as u64;
        let show = |bytes: &[u8]| format!("{:?}", &bytes[first..bytes.len().min(first + SHOWN_BYTES)]);
        Err(format!(
            "{wrong} wrong bytes within {at}..={}, read {len} at {offset}, size {}: expected {} ({}), got {} ({})\n{}",
            offset + last as u64,
            self.len(),
            show(expected),
            self.origin(at, &expected[first..]),
            show(got),
            self.origin(at, &got[first..]),
            self.tail(at, (last - first + 1) as u64),
        ))
    }

    /// The operation that wrote these bytes at `offset`.
    fn origin(&self, offset: u64, bytes: &[u8]) -> String {
        let sample = &bytes[..bytes.len().min(SHOWN_BYTES)];
        if sample.iter().all(|b| *b == 0) {
            return "zeros".into();
        }
        let wrote = |c: &&Change| {
            let hits =
                sample.iter().enumerate().filter(|(i, b)| pattern(c.op, offset + *i as u64) == **b).count();
            hits * 4 >= sample.len() * 3
        };
        self.history
            .iter()
            .rev()
            .find(wrote)
            .map_or("of no operation".into(), |c| format!("of operation {}", c.op))
    }

    /// The last changes that touch a range.
    fn tail(&self, offset: u64, len: u64) -> String {
        let lines: Vec<String> = self
            .history
            .iter()
            .filter(|c| c.touches(offset, len))
            .map(|c| format!("  operation {}: {} {} at {}", c.op, c.what, c.len, c.offset))
            .collect();
        lines[lines.len().saturating_sub(14)..].join("\n")
    }
}

impl Change {
    fn touches(&self, offset: u64, len: u64) -> bool {
        self.len == 0 || (self.offset < offset + len && offset < self.offset + self.len)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn who(client: usize) -> Who {
        Who { client, life: 1, cuts: 0 }
    }
    fn change(file: &mut FileModel, client: usize, op: u64, what: What) {
        file.begin(who(client), op, what);
        file.done(op);
    }

    #[test]
    fn pattern_bytes_depend_on_their_place_only_and_are_not_zero() {
        let mut seen = std::collections::BTreeSet::new();
        for (op, offset, len) in
            [(1, 0, 4000), (1, 3, 100), (7, 8, 8), (7, 13, 1), (9, 15, 0), (9, 65_530, 700)]
        {
            let bytes = bytes_of(op, offset, len);
            assert_eq!(bytes.len(), len);
            for (at, byte) in (offset..).zip(&bytes) {
                assert_eq!(*byte, pattern(op, at));
            }
            seen.extend(bytes);
        }
        assert_eq!(seen.len(), 255, "all bytes but 0");
        assert!(!seen.contains(&0));
    }

    #[test]
    fn differences_are_found_wherever_they_are() {
        let one = bytes_of(1, 0, 3 * AT_ONCE + 5);
        for at in [0, 1, AT_ONCE - 1, AT_ONCE, 3 * AT_ONCE + 4] {
            let mut other = one.clone();
            other[at] ^= 1;
            assert_eq!(differing(&one, &other).collect::<Vec<_>>(), [at]);
            assert!(differing(&one, &one[..at]).eq(at..one.len()));
            assert!(differing(&one[..at], &one).eq(at..one.len()));
        }
        assert_eq!(differing(&one, &one).next(), None);
    }

    #[test]
    fn unseen_changes_may_be_lost_with_their_client() {
        let mut file = FileModel::default();
        change(&mut file, 0, 1, What::Write { offset: 0, len: 100 });
        file.synced(0);
        change(&mut file, 0, 2, What::Write { offset: 50, len: 100 });
        assert!(!file.is_doubtful(|_| 0) && file.is_doubtful(|_| 1));
        let with = |ops: [u64; 2], len: usize| [bytes_of(ops[0], 0, 50), bytes_of(ops[1], 50, len)].concat();
        for (got, fits) in [
            (with([1, 1], 50), true),   // lost
            (with([1, 2], 100), true),  // not lost
            (with([1, 2], 70), true),   // in part
            (with([1, 2], 20), false),  // truncated below durable bytes
            (with([1, 3], 50), false),  // bytes of no operation
            (with([2, 2], 100), false), // durable bytes changed
            (vec![0; 100], false),      // durable bytes lost
        ] {
            let settled = file.clone().settle(who(1), &got, None);
            assert_eq!(settled.is_ok(), fits, "{settled:?}");
        }
        let mut reported = file.clone();
        assert_eq!(
            reported.settle(who(1), &with([1, 1], 50), None).unwrap(),
            [who(0)],
            "the loss must be reported"
        );
        reported.check(0, 200, &with([1, 1], 50)).unwrap();
        file.seen_by(1, |_| 0);
        assert!(!file.is_doubtful(|_| 1), "what another has seen must stay");
    }

    /// Seed 51001: one client waits to open the file, meanwhile the other one dies with its changes, and then
    /// the first one writes.
    #[test]
    fn changes_lost_before_another_write_were_unseen() {
        let cuts = |client: usize| u64::from(client == 0);
        let mut file = FileModel::default();
        change(&mut file, 0, 1, What::Write { offset: 0, len: 100 });
        file.synced(0);
        change(&mut file, 0, 2, What::Write { offset: 100, len: 50 });
        change(&mut file, 1, 3, What::Write { offset: 150, len: 30 });
        file.seen_by(1, cuts);
        assert!(file.is_doubtful(cuts), "it was cut off before the other one was done");
        let with = |middle: Vec<u8>, end: Vec<u8>| [bytes_of(1, 0, 100), middle, end].concat();
        for (got, losers) in [
            (with(bytes_of(2, 100, 50), bytes_of(3, 150, 30)), vec![]),
            (with(vec![0; 50], bytes_of(3, 150, 30)), vec![who(0)]),
            (with(bytes_of(2, 100, 50), vec![]), vec![who(1)]),
            (with(vec![], vec![]), vec![who(0), who(1)]),
        ] {
            assert_eq!(file.clone().settle(who(1), &got, None).unwrap(), losers);
        }
        assert!(file.settle(who(1), &bytes_of(1, 0, 90), None).is_err(), "what was safe must stay");
    }

    /// Seed 900391: a client settles the file with changes of its own that are not durable yet, and dies with
    /// these.
    #[test]
    fn settled_bytes_show_when_the_changes_above_are_lost() {
        let mut file = FileModel::default();
        change(&mut file, 0, 1, What::Write { offset: 0, len: 100 });
        file.synced(0);
        change(&mut file, 1, 2, What::Write { offset: 0, len: 80 });
        change(&mut file, 0, 3, What::Write { offset: 20, len: 20 });
        let with = |ops: [u64; 4]| {
            [(0, 20), (20, 20), (40, 40), (80, 20)]
                .iter()
                .zip(ops)
                .flat_map(|((at, len), op)| bytes_of(op, *at, *len))
                .collect::<Vec<u8>>()
        };
        file.settle(who(0), &with([2, 3, 2, 1]), None).unwrap();
        for (ops, fits) in [
            ([2, 3, 2, 1], true),  // nothing is lost
            ([2, 2, 2, 1], true),  // its own change is, above the other's
            ([2, 1, 2, 1], true),  // the other's change had been lost before its write
            ([1, 3, 2, 1], false), // bytes that it saw are lost
            ([2, 3, 2, 2], false), // bytes of no operation
        ] {
            let settled = file.clone().settle(who(1), &with(ops), None);
            assert_eq!(settled.is_ok(), fits, "{ops:?}: {settled:?}");
        }
        file.seen_by(1, |_| 0);
        assert!(!file.is_doubtful(|_| 1));
    }

    /// Seed 900342: one client truncates the file, another sees that, appends, and dies with its append.
    #[test]
    fn the_size_below_a_lost_append_is_as_truncated() {
        let mut file = FileModel::default();
        change(&mut file, 0, 1, What::Write { offset: 0, len: 100 });
        file.synced(0);
        change(&mut file, 0, 2, What::Size { len: 60 });
        change(&mut file, 1, 3, What::Write { offset: 60, len: 10 });
        file.seen_by(1, |_| 0);
        let with = |len: usize| [bytes_of(1, 0, 60), bytes_of(3, 60, len)].concat();
        for (got, fits) in [(with(0), true), (with(10), true), (bytes_of(1, 0, 100), false)] {
            let settled = file.clone().settle(who(0), &got, None);
            assert_eq!(settled.is_ok(), fits, "{} bytes: {settled:?}", got.len());
        }
    }

    #[test]
    fn an_operation_without_end_leaves_doubt() {
        let mut file = FileModel::default();
        file.begin(who(0), 1, What::Write { offset: 0, len: 10 });
        assert!(file.is_doubtful(|_| 0));
        for got in [vec![], bytes_of(1, 0, 10), [bytes_of(1, 0, 5), vec![0; 5]].concat()] {
            let mut file = file.clone();
            assert!(file.settle(who(1), &got, None).unwrap().is_empty());
            file.check(0, 20, &got).unwrap();
            assert!(!file.is_doubtful(|_| 0));
        }
    }

    #[test]
    fn shows_whose_bytes_are_wrong() {
        let mut file = FileModel::default();
        change(&mut file, 0, 1, What::Write { offset: 0, len: 1000 });
        let old = file.read(0, 1000).to_vec();
        change(&mut file, 1, 2, What::Write { offset: 100, len: 50 });
        change(&mut file, 0, 3, What::Size { len: 2000 });
        change(&mut file, 0, 4, What::Zero { offset: 1990, len: 100 });
        assert_eq!(file.len(), 2000);
        file.check(900, 200, &[bytes_of(1, 900, 100), vec![0; 100]].concat()).unwrap();
        let reported = file.check(0, 1000, &old).unwrap_err();
        assert!(
            reported.contains("within 100..=149")
                && reported.contains("of operation 2")
                && reported.contains("of operation 1"),
            "{reported}"
        );
        assert!(file.check(1999, 50, &[0, 0]).unwrap_err().contains("2 bytes instead of 1"));
    }
}
