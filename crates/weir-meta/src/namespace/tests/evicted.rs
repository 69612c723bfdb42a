//! Evicted bytes compared with a model: the evicted ranges, their charge, and the movers that may fill them.
use super::*;
use crate::record::StripeTruncation;
use weir_proto::recall::{Evict, Evicted, Filled, SetPinned};

const EBUSY: i32 = 16;
/// The stripe size of files in these tests.
const STRIPE: u64 = 4 << 20;
const MIB: u64 = 1 << 20;

impl World {
    /// Declares that home has all of a file.
    fn recall_all(&mut self, ino: InodeId) {
        self.at_home.0.lock().unwrap().insert(ino);
    }
    fn evict_as(&mut self, cred: &Cred, ino: InodeId, from: u64, to: u64) -> Result<Evicted> {
        let r = Evict { op: op(), cred: cred.clone(), ino, from, to, under: 0 };
        self.change(|cx| evict::evict(cx, &r))
    }
    fn filled(&mut self, ino: InodeId, from: u64, to: u64, token_epoch: u32) -> Result<()> {
        let r = Filled { op: op(), ino, from, to, token_epoch, learned: None };
        self.change(|cx| evict::filled(cx, &r))
    }
    fn ranges(&self, ino: InodeId) -> Vec<(u64, u64)> {
        let found =
            self.view(|view| crate::namespace::evicted::ranges(view.read, ino, 0, usize::MAX)).unwrap();
        found.iter().map(|f| (f.from, f.range.to)).collect()
    }
    fn garbage(&self) -> Vec<StripeTruncation> {
        let truncations = |w: &World, key: &[u8]| {
            let mut value = None;
            w.kv.read(&mut |r| {
                value = r.get(key)?;
                Ok(())
            })
            .unwrap();
            Garbage::from_value(&value.unwrap(), String::new).unwrap().truncation
        };
        self.keys(b'G').iter().map(|key| truncations(self, key)).collect()
    }
    fn file_of(&mut self, name: &str, size: u64) -> InodeId {
        let ino = self.create(&root(), InodeId::ROOT, name, 0o644).unwrap().entry.attr.ino;
        self.commit(ino, size, true).unwrap();
        ino
    }
}

#[test]
fn evicted_data_frees_space_and_is_recalled() {
    let mut w = World::new();
    let ino = w.file_of("f", 3 * STRIPE + 5);
    let of = |w: &World| w.view(|view| usage_of(view.read, InodeId::ROOT)).unwrap();
    let used = |w: &World| {
        assert_eq!(of(w).evicted, w.attr(ino).map_or(0, |attr| attr.evicted));
        of(w).bytes
    };
    assert_eq!(errno(w.evict_as(&root(), ino, 0, u64::MAX)), EACCES, "home does not have it");
    w.recall_all(ino);
    assert_eq!(errno(w.evict_as(&user(9), ino, 0, u64::MAX)), EPERM);
    let before = w.attr(ino).unwrap();
    let evicted = w.evict_as(&root(), ino, 1, 2 * STRIPE + 1).unwrap();
    assert_eq!(w.ranges(ino), [(STRIPE, 2 * STRIPE)], "whole stripes only");
    let truncation = StripeTruncation { from_stripe: 1, to_stripe: 2, token_epoch: evicted.token_epoch };
    assert_eq!(w.garbage(), [truncation]);
    assert_eq!((w.attr(ino).unwrap().evicted, used(&w)), (STRIPE, 2 * STRIPE + 5));
    let again = w.evict_as(&root(), ino, 0, u64::MAX).unwrap();
    assert!(again.token_epoch >> 8 > evicted.token_epoch >> 8);
    assert_eq!(w.ranges(ino), [(0, 3 * STRIPE + 5)], "one range, and the tail as it is");
    assert_eq!(used(&w), 0);
    let nothing = w.evict_as(&root(), ino, 0, u64::MAX).unwrap();
    assert_eq!((nothing.ranges.len(), nothing.token_epoch), (0, again.token_epoch));
    let attr = w.attr(ino).unwrap();
    assert_eq!((attr.size, attr.mtime, attr.ctime), (before.size, before.mtime, before.ctime));

    let first = w.change(|cx| cx.hand_out(ino, 0, STRIPE)).unwrap().unwrap();
    assert_eq!((first.token_epoch, first.parts.len()), (again.token_epoch, 1));
    // Its mover is lost: the next one gets a higher token epoch, and the first one's result counts no more.
    let second = w.change(|cx| cx.hand_out(ino, 0, 2 * STRIPE)).unwrap().unwrap();
    assert!(second.token_epoch > first.token_epoch);
    assert_eq!(errno(w.filled(ino, 0, STRIPE, first.token_epoch)), ESTALE);
    for part in &second.parts {
        w.filled(ino, part.from, part.to, second.token_epoch).unwrap();
        assert_eq!(errno(w.filled(ino, part.from, part.to, second.token_epoch)), ESTALE, "twice");
    }
    assert_eq!((w.ranges(ino), used(&w)), (vec![(2 * STRIPE, 3 * STRIPE + 5)], 2 * STRIPE));
    let layout = w.attr(ino).unwrap().layout.unwrap();
    assert_eq!(layout.stripe_bytes(), STRIPE);

    w.unlink(&root(), InodeId::ROOT, "f").unwrap();
    assert_eq!((w.keys(b'W').len(), used(&w)), (0, 0));
    assert_eq!(w.change(|cx| cx.hand_out(ino, 0, STRIPE)).unwrap(), None);
}

#[test]
fn its_only_writer_evicts_what_is_before_the_end() {
    let mut w = World::new();
    let ino = w.create(&root(), InodeId::ROOT, "f", 0o644).unwrap().entry.attr.ino;
    w.commit(ino, 2 * STRIPE + 7, false).unwrap();
    w.recall_all(ino);
    let own = |w: &mut World, under: u32| {
        let r = Evict { op: op(), cred: root(), ino, from: 0, to: u64::MAX, under };
        w.change(|cx| evict::evict(cx, &r))
    };
    assert_eq!(errno(own(&mut w, 1)), ESTALE, "without the lease");
    w.leases.open(ME, ino, false, true);
    assert_eq!(w.leases.grant_write(ME, ino), LeaseKind::Write);
    assert_eq!(errno(own(&mut w, 0)), EBUSY, "as anybody else");
    assert_eq!(errno(own(&mut w, 7)), ESTALE, "a token epoch that is not");
    let evicted = own(&mut w, 1).unwrap();
    assert_eq!(w.ranges(ino), [(0, 2 * STRIPE)], "the end is being written");
    assert_eq!(
        w.garbage(),
        [StripeTruncation { from_stripe: 0, to_stripe: 2, token_epoch: evicted.token_epoch }]
    );
    assert_eq!(errno(own(&mut w, 1)), ESTALE, "a request that comes twice, or late");
    assert_eq!(own(&mut w, evicted.token_epoch).unwrap().ranges, [], "nothing is left to go");
    w.leases.open(SessionId(2), ino, false, true);
    assert_eq!(errno(own(&mut w, evicted.token_epoch)), ESTALE, "others may be writing it, too");
}

#[test]
fn a_pinned_a_small_and_a_truncated_file() {
    let mut w = World::new();
    let ino = w.file_of("pinned", 2 * STRIPE);
    w.recall_all(ino);
    let pin = |pinned, cred| SetPinned { op: op(), cred, ino, pinned };
    assert_eq!(errno(w.change(|cx| evict::set_pinned(cx, &pin(true, user(9))))), EPERM);
    w.change(|cx| evict::set_pinned(cx, &pin(true, root()))).unwrap();
    assert_eq!(errno(w.evict_as(&root(), ino, 0, u64::MAX)), EBUSY);
    w.change(|cx| evict::set_pinned(cx, &pin(false, root()))).unwrap();
    w.evict_as(&root(), ino, 0, u64::MAX).unwrap();
    let handed = w.change(|cx| cx.hand_out(ino, 0, 2 * STRIPE)).unwrap().unwrap();

    // Truncated within a recall in flight: the mover's bytes are too many.
    w.set(&root(), ino, |r| r.size = Some(STRIPE + 7)).unwrap();
    assert_eq!(w.ranges(ino), [(0, STRIPE + 7)]);
    assert_eq!(errno(w.filled(ino, 0, 2 * STRIPE, handed.token_epoch)), ESTALE);
    let again = w.change(|cx| cx.hand_out(ino, 0, 2 * STRIPE)).unwrap().unwrap();
    assert!(again.token_epoch > handed.token_epoch);
    // It grows again: the range after the old end is zeros, not at home.
    w.set(&root(), ino, |r| r.size = Some(3 * STRIPE)).unwrap();
    assert_eq!(w.ranges(ino), [(0, STRIPE + 7)]);
    w.filled(ino, 0, STRIPE + 7, again.token_epoch).unwrap();
    assert_eq!((w.ranges(ino).len(), w.attr(ino).unwrap().evicted), (0, 0));

    let r = meta::Open {
        session: ME,
        cred: root(),
        ino,
        read: false,
        write: true,
        truncate: true,
        execute: false,
    };
    w.evict_as(&root(), ino, 0, STRIPE).unwrap();
    w.change(|cx| open::open(cx, &r)).unwrap();
    assert_eq!((w.ranges(ino).len(), w.attr(ino).unwrap().evicted), (0, 0));

    let small = w.create(&root(), InodeId::ROOT, "small", 0o644).unwrap().entry.attr.ino;
    w.recall_all(small);
    let data = Some(Bytes::from_static(b"in the inode"));
    let commit = Commit {
        op: op(),
        ino: small,
        token_epoch: 1,
        size: 12,
        mtime: Time { nanos: 5 },
        allocated: 12,
        inline: data,
        drop_inline: false,
        clean: true,
        close_writes: 0,
        data_end: 0,
        append_token: false,
        changed: vec![],
    };
    w.change(|cx| data::commit(cx, &commit)).unwrap();
    assert_eq!(w.evict_as(&root(), small, 0, u64::MAX).unwrap().ranges, []);
}

#[derive(Clone, Debug)]
enum Step {
    Evict(u64, u64),
    HandOut(u64, u64),
    Fill(usize),
    Truncate(u64),
    Grow(u64),
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 200, ..ProptestConfig::default() })]
    /// Stripe by stripe, a range is offline if it was evicted and neither recalled nor truncated; each stripe
    /// is assigned under a higher token epoch each time, and only the mover with the highest one fills it.
    #[test]
    fn evicted_ranges_match_the_model(steps in prop::collection::vec(prop_oneof![
        3 => (0u64..40, 0u64..50).prop_map(|(a, b)| Step::Evict(a * MIB, b * MIB)),
        3 => (0u64..9, 1u64..4).prop_map(|(a, n)| Step::HandOut(a * STRIPE, (a + n) * STRIPE)),
        3 => (0usize..9).prop_map(Step::Fill),
        1 => (0u64..40).prop_map(|s| Step::Truncate(s * MIB)),
        1 => (0u64..40).prop_map(|s| Step::Grow(s * MIB)),
    ], 1..40)) {
        let mut w = World::new();
        let mut size = 17 * MIB;
        let ino = w.file_of("f", size);
        w.recall_all(ino);
        // By stripe: the end of its evicted bytes; the highest token epoch that it was assigned under, ever
        // and since then.
        let mut away: BTreeMap<u64, u64> = BTreeMap::new();
        let (mut highest, mut valid): (BTreeMap<u64, u32>, BTreeMap<u64, u32>) = Default::default();
        let mut handed: Vec<(u64, u64, u32)> = Vec::new();
        for step in steps {
            match step {
                Step::Evict(from, to) => {
                    w.evict_as(&root(), ino, from, to).unwrap();
                    for stripe in 0..size.div_ceil(STRIPE) {
                        let (a, b) = (stripe * STRIPE, ((stripe + 1) * STRIPE).min(size));
                        if a >= from && b <= to && !away.contains_key(&stripe) {
                            away.insert(stripe, b);
                            valid.remove(&stripe);
                        }
                    }
                }
                Step::HandOut(from, to) => {
                    if let Some(out) = w.change(|cx| cx.hand_out(ino, from, to)).unwrap() {
                        for part in out.parts {
                            for stripe in part.from / STRIPE..part.to.div_ceil(STRIPE) {
                                prop_assert!(away.contains_key(&stripe));
                                let before = highest.insert(stripe, out.token_epoch);
                                prop_assert!(before.is_none_or(|t| t < out.token_epoch));
                                valid.insert(stripe, out.token_epoch);
                            }
                            handed.push((part.from, part.to, out.token_epoch));
                        }
                    }
                }
                Step::Fill(n) if n < handed.len() => {
                    let (from, to, token) = handed.remove(n);
                    let stripes: Vec<u64> = (from / STRIPE..to.div_ceil(STRIPE)).collect();
                    let mine = |s: &u64| valid.get(s) == Some(&token) && away.get(s) == Some(&to.min((s + 1) * STRIPE));
                    let right = stripes.iter().all(mine);
                    let done = w.filled(ino, from, to, token);
                    prop_assert_eq!(done.is_ok(), right, "{:?}", done);
                    if right {
                        away.retain(|s, _| !stripes.contains(s));
                    }
                }
                Step::Fill(_) => {}
                Step::Truncate(to) | Step::Grow(to) => {
                    size = if matches!(step, Step::Truncate(_)) { to.min(size) } else { to.max(size) };
                    w.set(&root(), ino, |r| r.size = Some(size)).unwrap();
                    away.retain(|stripe, _| stripe * STRIPE < size);
                    valid.retain(|stripe, _| stripe * STRIPE < size);
                    away.values_mut().for_each(|end| *end = (*end).min(size));
                }
            }
            let ranges = w.ranges(ino);
            prop_assert!(ranges.windows(2).all(|r| r[0].1 <= r[1].0));
            let found: BTreeMap<u64, u64> = ranges
                .iter()
                .flat_map(|(a, b)| (a / STRIPE..b.div_ceil(STRIPE)).map(|s| (s, (*b).min((s + 1) * STRIPE))))
                .collect();
            prop_assert_eq!(&found, &away);
            let attr = w.attr(ino).unwrap();
            prop_assert_eq!(attr.evicted, away.iter().map(|(s, end)| end - s * STRIPE).sum::<u64>());
            let used = w.view(|view| usage_of(view.read, InodeId::ROOT)).unwrap().bytes;
            prop_assert_eq!(used, attr.allocated.saturating_sub(attr.evicted));
        }
    }
}
