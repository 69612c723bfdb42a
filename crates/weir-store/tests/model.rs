//! The store against a model: writes in any order read back, also after reopening, and the rebuilt free space
//! is exactly what the index leaves.
use bytes::Bytes;
use proptest::prelude::*;
use std::path::Path;
use std::sync::Arc;
use weir_env::Env;
use weir_kv::SharedKv;
use weir_kv::memory::MemoryKv;
use weir_proto::checksum::{block_crcs, crc32c};
use weir_proto::data::*;
use weir_proto::map::Scheme;
use weir_proto::*;
use weir_store::alloc::Geometry;
use weir_store::cells::{Appended, Numbering, Scope};
use weir_store::format;
use weir_store::store::{FragmentWrite, Install, OverlayWrite, Store};

const CELL_BYTES: u32 = 128 << 10;
const SCOPE: Scope = Scope {
    group: PgId(3),
    epoch: Epoch(5),
    scheme: Scheme { data: 2, parity: 1 },
    current: 0,
    lost_at: Epoch(0),
};

fn cell(file: u64, stripe: u64) -> CellId {
    CellId { file: FileId { namespace: NamespaceId(1), inode: InodeId(file) }, stripe, index: 1 }
}
fn place() -> Place {
    Place { target: TargetId(7), group: SCOPE.group, epoch: SCOPE.epoch }
}
fn open(env: &Env, dir: &Path, kv: &SharedKv) -> Store {
    let geometry = Geometry { slab_bytes: 16 << 20, step_bytes: 8 << 20 };
    Store::open(env.clone(), TargetId(7), dir, kv.clone(), geometry).unwrap()
}
fn bytes_of(seed: u8, len: usize) -> Vec<u8> {
    (0..len).map(|i| (i as u32).wrapping_mul(31).wrapping_add(u32::from(seed) * 7) as u8).collect()
}
fn write(
    store: &Store,
    cell: CellId,
    version: u32,
    mode: WriteMode,
    folded_seqs: &[Seq],
    data: &[u8],
) -> Result<()> {
    write_as(store, cell, Version::new(1, version), mode, folded_seqs, data)
}
fn write_as(
    store: &Store,
    cell: CellId,
    version: Version,
    mode: WriteMode,
    folded_seqs: &[Seq],
    data: &[u8],
) -> Result<()> {
    let crcs = block_crcs(data, CHECKSUM_BLOCK as usize);
    store
        .write_fragment(
            &SCOPE,
            &FragmentWrite { cell, version, mode, missing: 0, folded_seqs, block_crcs: &crcs, data },
        )
        .map(|_| ())
}
fn overlay(store: &Store, cell: CellId, offset: u32, data: &[u8]) -> Result<Seq> {
    overlay_as(store, cell, 1, offset, data)
}
fn overlay_as(store: &Store, cell: CellId, token_epoch: u32, offset: u32, data: &[u8]) -> Result<Seq> {
    let write = OverlayWrite {
        cell,
        token_epoch,
        offset,
        len: data.len() as u32,
        kind: OverlayKind::Data,
        crc: crc32c(data),
        missing: 0,
        data,
    };
    match store.append(&SCOPE, Numbering::Next, &write)?.1 {
        Appended::At(seq) => Ok(seq),
        other => panic!("a sequencer appends: {other:?}"),
    }
}
fn read(store: &Store, cell: CellId, offset: u32, len: u32) -> (CellRead, Vec<u8>) {
    let request = ReadCell { place: place(), cell, view: ReadView::Merged, version: Version(0), offset, len };
    let plan = store.plan_read(&SCOPE, &request).unwrap();
    let (answer, payload) = store.read(&plan).unwrap();
    let bytes: Vec<u8> = payload.iter().flat_map(|p: &Bytes| p.to_vec()).collect();
    assert_eq!(block_crcs(&bytes, CHECKSUM_BLOCK as usize), answer.block_crcs);
    (answer, bytes)
}

/// What open must find again by itself.
fn stock(store: &Store) -> [u64; 5] {
    let stat = store.stat();
    [
        stat.cells,
        stat.overlay_extents,
        stat.overlay_bytes,
        stat.report.used,
        stat.report.under_replicated_cells,
    ]
}

#[derive(Clone, Debug)]
enum Op {
    Fresh { cell: u8, len: u32 },
    Rewrite { cell: u8, len: u32, commit: bool },
    Overlay { cell: u8, offset: u32, len: u32 },
    Zero { cell: u8, offset: u32, len: u32 },
    Seal { cell: u8, commit: bool },
    DropFile { cell: u8, to_stripe: u64 },
    Read { cell: u8, block: u32, blocks: u32 },
    Reopen,
    Spill,
}

fn ops() -> impl Strategy<Value = Vec<Op>> {
    let cell = 0u8..3;
    let len = prop_oneof![1..100_000u32, 1..20_000u32];
    let extent = (0..CELL_BYTES - 1, len).prop_map(|(o, l)| (o, l.min(CELL_BYTES - o)));
    let op = prop_oneof![
        2 => (cell.clone(), 0..=CELL_BYTES).prop_map(|(cell, len)| Op::Fresh { cell, len }),
        2 => (cell.clone(), 0..=CELL_BYTES, any::<bool>()).prop_map(|(cell, len, commit)| Op::Rewrite { cell, len, commit }),
        6 => (cell.clone(), extent.clone()).prop_map(|(cell, (offset, len))| Op::Overlay { cell, offset, len }),
        1 => (cell.clone(), extent).prop_map(|(cell, (offset, len))| Op::Zero { cell, offset, len }),
        3 => (cell.clone(), any::<bool>()).prop_map(|(cell, commit)| Op::Seal { cell, commit }),
        1 => (cell.clone(), 1u64..9).prop_map(|(cell, to_stripe)| Op::DropFile { cell, to_stripe }),
        6 => (cell, 0u32..8, 1u32..9).prop_map(|(cell, block, blocks)| Op::Read { cell, block, blocks }),
        2 => Just(Op::Reopen),
        2 => Just(Op::Spill),
    ];
    prop::collection::vec(op, 1..60)
}

/// A seal keeps no zeros at the end of a cell that was overlaid, in whole blocks of a checksum.
const BLOCK: usize = CHECKSUM_BLOCK as usize;

fn apply(model: &mut Vec<u8>, offset: u32, data: &[u8]) {
    let end = offset as usize + data.len();
    if model.len() < end {
        model.resize(end, 0);
    }
    model[offset as usize..end].copy_from_slice(data);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, ..ProptestConfig::default() })]
    #[test]
    fn written_bytes_read_back(ops in ops()) {
        let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
        let _in = runtime.enter();
        let env = weir_env::real::env();
        let dir = tempfile::tempdir().unwrap();
        let kv: SharedKv = Arc::new(MemoryKv::new());
        let mut store = open(&env, dir.path(), &kv);
        let mut model: Vec<Vec<u8>> = vec![Vec::new(); 3];
        let mut last = [Seq(0); 3];
        let mut overlaid = [false; 3];
        let mut version = 0;
        let mut token = 1;
        for (n, op) in ops.into_iter().enumerate() {
            version += 1;
            let id = |c: u8| cell(u64::from(c) + 1, 5);
            match op {
                Op::Fresh { cell: c, len } => {
                    let data = bytes_of(n as u8, len as usize);
                    write_as(&store, id(c), Version::new(token, version), WriteMode::Fresh, &[], &data).unwrap();
                    model[c as usize] = data;
                    last[c as usize] = Seq(0);
                    overlaid[c as usize] = false;
                }
                Op::Rewrite { cell: c, len, commit } => {
                    let data = bytes_of(n as u8, len as usize);
                    let folded_seqs = [Seq(0), last[c as usize]];
                    write_as(&store, id(c), Version::new(token, version), WriteMode::Prepare, &folded_seqs, &data).unwrap();
                    if commit {
                        store.commit_stripe(&SCOPE, id(c), Version::new(token, version), UNFENCED).unwrap();
                        store.commit_stripe(&SCOPE, id(c), Version::new(token, version), UNFENCED).unwrap();
                        model[c as usize] = data;
                        overlaid[c as usize] = false;
                    } else {
                        store.drop_prepared(&SCOPE, id(c), Version::new(token, version), UNFENCED).unwrap();
                    }
                }
                Op::Overlay { cell: c, offset, len } => {
                    let data = bytes_of(n as u8, len as usize);
                    last[c as usize] = overlay_as(&store, id(c), token, offset, &data).unwrap();
                    apply(&mut model[c as usize], offset, &data);
                    overlaid[c as usize] = true;
                }
                Op::Zero { cell: c, offset, len } => {
                    let write = OverlayWrite { cell: id(c), token_epoch: token, offset, len, kind: OverlayKind::Zero, crc: 0, missing: 0, data: &[] };
                    let (_, appended) = store.append(&SCOPE, Numbering::Next, &write).unwrap();
                    let Appended::At(seq) = appended else { panic!("{appended:?}") };
                    last[c as usize] = seq;
                    apply(&mut model[c as usize], offset, &vec![0; len as usize]);
                    overlaid[c as usize] = true;
                }
                Op::Seal { cell: c, commit } => {
                    let (_, sealed, payload) = store.seal_cell(&SCOPE, id(c), Version::new(token, version)).unwrap();
                    let mut folded = model[c as usize].clone();
                    if overlaid[c as usize] {
                        let kept = folded.iter().rposition(|byte| *byte != 0).map_or(0, |byte| byte / BLOCK + 1);
                        folded.truncate(kept * BLOCK);
                    }
                    prop_assert_eq!(sealed.fragment_bytes as usize, folded.len());
                    prop_assert!(payload.concat() == folded);
                    if commit {
                        model[c as usize] = folded;
                        overlaid[c as usize] = false;
                        store.commit_stripe(&SCOPE, id(c), Version::new(token, version), UNFENCED).unwrap();
                        prop_assert_eq!(store.index().header(id(c)).unwrap().unwrap().overlay_count, 0);
                    }
                }
                Op::DropFile { cell: c, to_stripe } => {
                    token += 1;
                    let to_stripe = if to_stripe == 8 { u64::MAX } else { to_stripe };
                    let truncation = format::Truncation { from_stripe: 0, to_stripe, token_epoch: token };
                    store.drop_file(id(c).file, truncation, &[]).unwrap();
                    if to_stripe > id(c).stripe {
                        model[c as usize].clear();
                        last[c as usize] = Seq(0);
                        overlaid[c as usize] = false;
                    }
                }
                Op::Read { cell: c, block, blocks } => {
                    let (answer, bytes) = read(&store, id(c), block * CHECKSUM_BLOCK, blocks * CHECKSUM_BLOCK);
                    let whole = &model[c as usize];
                    let from = ((block * CHECKSUM_BLOCK) as usize).min(whole.len());
                    let to = (((block + blocks) * CHECKSUM_BLOCK) as usize).min(whole.len());
                    prop_assert!(bytes == whole[from..to.max(from)], "op {}", n);
                    prop_assert_eq!(answer.fragment_bytes as usize, whole.len());
                }
                Op::Spill => {
                    store.spill_some(1).unwrap();
                }
                Op::Reopen => {
                    store.reclaim().unwrap();
                    let before = stock(&store);
                    drop(store);
                    store = open(&env, dir.path(), &kv);
                    prop_assert_eq!(stock(&store), before);
                }
            }
        }
        for c in 0..3u64 {
            let (_, bytes) = read(&store, cell(c + 1, 5), 0, CELL_BYTES);
            prop_assert!(bytes == model[c as usize]);
            store.drop_file(cell(c + 1, 5).file, format::Truncation::to_end(0, token + 1), &[]).unwrap();
        }
        store.reclaim().unwrap();
        let stat = store.stat();
        prop_assert_eq!((stat.cells, stat.overlay_extents, stat.overlay_bytes, stat.report.used), (0, 0, 0, 0));
    }
}

fn with_store(test: impl FnOnce(&Env, &Path, Store)) {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    let _in = runtime.enter();
    let env = weir_env::real::env();
    let dir = tempfile::tempdir().unwrap();
    let kv: SharedKv = Arc::new(MemoryKv::new());
    let store = open(&env, dir.path(), &kv);
    test(&env, dir.path(), store);
}

#[test]
fn a_flipped_bit_is_found_counted_once_and_never_returned() {
    with_store(|env, dir, store| {
        let data = bytes_of(1, 100_000);
        write(&store, cell(1, 0), 1, WriteMode::Fresh, &[], &data).unwrap();
        let slab = env.disk.open(&dir.join("slab-0000"), weir_env::OpenMode::WRITE).unwrap();
        let mut byte = [0];
        slab.read_exact_at(&mut byte, 20_000).unwrap();
        slab.write_all_at(&[byte[0] ^ 4], 20_000).unwrap();
        for _ in 0..2 {
            let request = ReadCell {
                place: place(),
                cell: cell(1, 0),
                view: ReadView::Merged,
                version: Version(0),
                offset: 0,
                len: CELL_BYTES,
            };
            let plan = store.plan_read(&SCOPE, &request).unwrap();
            assert_eq!(store.read(&plan).unwrap_err().kind, ErrorKind::Damaged);
        }
        assert_eq!(store.report().damaged_blocks, 1);
        assert_eq!(store.damaged_cells(), [cell(1, 0)]);
        // The other blocks are as good as before.
        let (_, bytes) = read(&store, cell(1, 0), 2 * CHECKSUM_BLOCK, CHECKSUM_BLOCK);
        assert_eq!(bytes, data[2 * 16384..3 * 16384]);
        let crcs = block_crcs(&data, CHECKSUM_BLOCK as usize);
        let write = FragmentWrite {
            cell: cell(1, 0),
            version: Version::new(1, 1),
            mode: WriteMode::Fresh,
            missing: 0,
            folded_seqs: &[],
            block_crcs: &crcs,
            data: &data,
        };
        assert!(store.install(&SCOPE, &write, Seq(0), Install::Damaged).unwrap().1);
        assert_eq!(read(&store, cell(1, 0), 0, CELL_BYTES).1, data);
        assert_eq!((store.report().repaired_blocks, store.damaged_cells().len()), (1, 0));
    });
}

#[test]
fn only_a_small_read_is_made_where_it_is_asked_for() {
    with_store(|_, _, store| {
        write(&store, cell(1, 0), 1, WriteMode::Fresh, &[], &bytes_of(1, 100_000)).unwrap();
        // One in the index, and one that the disk is read for, too.
        overlay(&store, cell(1, 0), CHECKSUM_BLOCK, b"inline").unwrap();
        overlay(&store, cell(1, 0), 4 * CHECKSUM_BLOCK, &bytes_of(2, 70_000)).unwrap();
        let here = |block: u32, blocks: u32| {
            let (offset, len) = (block * CHECKSUM_BLOCK, blocks * CHECKSUM_BLOCK);
            let request = ReadCell {
                place: place(),
                cell: cell(1, 0),
                view: ReadView::Merged,
                version: Version(0),
                offset,
                len,
            };
            store.reads_here(&store.plan_read(&SCOPE, &request).unwrap())
        };
        assert!(here(0, 1) && here(0, 2) && here(1, 1) && here(3, 1));
        assert!(!here(0, 3), "as long as a stream's");
        assert!(!here(4, 1) && !here(3, 2), "an overlay is read besides");
    });
}

#[test]
fn lower_epochs_tokens_and_versions_are_stale() {
    with_store(|_, _, store| {
        let id = cell(1, 0);
        write(&store, id, 5, WriteMode::Fresh, &[], b"x").unwrap();
        write(&store, id, 5, WriteMode::Fresh, &[], b"x").unwrap();
        assert_eq!(write(&store, id, 4, WriteMode::Fresh, &[], b"y").unwrap_err().kind, ErrorKind::Stale);
        assert_eq!(write(&store, id, 5, WriteMode::Prepare, &[], b"y").unwrap_err().kind, ErrorKind::Stale);
        let old = Scope { epoch: Epoch(4), ..SCOPE };
        assert_eq!(
            store.commit_stripe(&old, id, Version::new(1, 5), UNFENCED).unwrap_err().kind,
            ErrorKind::Stale
        );
        store.drop_file(id.file, format::Truncation::to_end(1, 2), &[]).unwrap();
        assert_eq!(write(&store, id, 6, WriteMode::Fresh, &[], b"y").unwrap_err().kind, ErrorKind::Stale);
        assert_eq!(overlay(&store, id, 0, b"y").unwrap_err().kind, ErrorKind::Stale);
        assert_eq!(read(&store, id, 0, CELL_BYTES).1, b"x");
    });
}

/// A member that went down since a stripe was committed asks for writes since a later epoch than that of the
/// first commit.
#[test]
fn a_commit_that_comes_again_counts_under_its_epoch() {
    with_store(|_, _, store| {
        let (id, later) = (cell(1, 0), Scope { epoch: Epoch(SCOPE.epoch.0 + 2), ..SCOPE });
        write(&store, id, 4, WriteMode::Fresh, &[], b"old").unwrap();
        write(&store, id, 6, WriteMode::Prepare, &[], b"new").unwrap();
        store.commit_stripe(&SCOPE, id, Version::new(1, 6), UNFENCED).unwrap();
        let since_then =
            || store.list_cells(SCOPE.group, None, later.epoch, later.epoch, 10).unwrap().cells.len();
        assert_eq!(since_then(), 0);
        store.commit_stripe(&later, id, Version::new(1, 6), UNFENCED).unwrap();
        assert_eq!(since_then(), 1);
    });
}

/// Repair may rebuild a fragment while the write that made it is sent once more. It cannot know how short the
/// fragment was: its result ends with zeros (simulator seed 1102).
#[test]
fn a_write_is_known_again_where_repair_has_rebuilt_it() {
    with_store(|_, _, store| {
        let (mut rebuilt, data) = (bytes_of(1, 30_000), bytes_of(1, 30_000));
        rebuilt.resize(70_000, 0);
        write(&store, cell(0, 0), 4, WriteMode::Fresh, &[], &rebuilt).unwrap();
        for mode in [WriteMode::Fresh, WriteMode::Prepare] {
            write(&store, cell(0, 0), 4, mode, &[], &data).unwrap();
        }
        assert_eq!(read(&store, cell(0, 0), 0, CELL_BYTES).1, rebuilt);
        for other in [bytes_of(2, 30_000), bytes_of(1, 29_999), bytes_of(1, 80_000)] {
            let refused = write(&store, cell(0, 0), 4, WriteMode::Prepare, &[], &other).unwrap_err();
            assert_eq!(refused.kind, ErrorKind::Stale);
        }
    });
}

#[test]
fn mirrors_take_numbers_in_order_and_repeated_ones_in_any() {
    with_store(|_, _, store| {
        let mirror = |seq: u64, data: &[u8]| {
            let write = OverlayWrite {
                cell: cell(1, 0),
                token_epoch: 1,
                offset: 0,
                len: data.len() as u32,
                kind: OverlayKind::Data,
                crc: crc32c(data),
                missing: 0,
                data,
            };
            store.append(&SCOPE, Numbering::Mirror(Seq(seq)), &write).unwrap().1
        };
        assert_eq!(mirror(1, b"one"), Appended::At(Seq(1)));
        assert_eq!(mirror(1, b"one"), Appended::Duplicate(Seq(1)));
        assert_eq!(mirror(3, b"three"), Appended::Gap { have: Seq(1) });
        assert_eq!(mirror(2, b"two"), Appended::At(Seq(2)));
        assert_eq!(mirror(3, b"three"), Appended::At(Seq(3)));
        // The sequencer lost its unacknowledged tail, or another one numbers now: 2 and 3 are given again,
        // and come in any order.
        assert_eq!(mirror(3, b"THREE"), Appended::At(Seq(3)));
        assert_eq!(mirror(2, b"TWO"), Appended::At(Seq(2)));
        assert_eq!(mirror(5, b"five"), Appended::Gap { have: Seq(3) });
        let (overlays, payload) = store.read_overlays(cell(1, 0), Seq(0)).unwrap();
        assert_eq!(overlays.extents.iter().map(|e| e.seq.0).collect::<Vec<_>>(), [1, 2, 3]);
        assert_eq!(payload.concat(), b"oneTWOTHREE");
    });
}

#[test]
fn a_second_process_is_refused() {
    with_store(|env, dir, _store| {
        let kv: SharedKv = Arc::new(MemoryKv::new());
        let Err(e) = Store::open(env.clone(), TargetId(7), dir, kv, Geometry::DEFAULT) else {
            panic!("opened twice")
        };
        assert_eq!(e.kind, ErrorKind::Exists);
    });
}

/// A truncation drops all older bytes, with any later ones present; it is listed by number until it is
/// forgotten.
#[test]
fn a_truncation_drops_older_bytes_and_is_remembered() {
    with_store(|_, _, store| {
        let (old, new) = (cell(1, 4), cell(1, 5));
        for id in [old, new] {
            write(&store, id, 1, WriteMode::Fresh, &[], &bytes_of(1, 50_000)).unwrap();
            overlay(&store, id, 0, b"before").unwrap();
        }
        overlay_as(&store, new, 3, 60_000, b"after").unwrap();
        store.drop_file(old.file, format::Truncation::to_end(5, 3), &[]).unwrap();
        assert_eq!(&read(&store, old, 0, CELL_BYTES).1[..6], b"before");
        let mut after = vec![0; 60_000];
        after.extend_from_slice(b"after");
        assert!(read(&store, new, 0, CELL_BYTES).1 == after);
        assert_eq!(overlay_as(&store, old, 2, 0, b"late").unwrap_err().kind, ErrorKind::Stale);

        // Fragments from a peer that does not know it are refused.
        let data = bytes_of(1, 50_000);
        let crcs = block_crcs(&data, CHECKSUM_BLOCK as usize);
        let version = Version::new(2, 9);
        let (mode, folded_seqs) = (WriteMode::Fresh, &[][..]);
        let write = FragmentWrite {
            cell: new,
            version,
            mode,
            missing: 0,
            folded_seqs,
            block_crcs: &crcs,
            data: &data,
        };
        assert!(!store.install(&SCOPE, &write, Seq(0), Install::Missed).unwrap().1);

        let reported = |after| store.list_truncations(after, &[], 10).unwrap().1.truncations;
        let of = |truncations: Vec<Truncation>| {
            truncations.iter().map(|c| (c.from_stripe, c.token_epoch)).collect::<Vec<_>>()
        };
        store.drop_file(old.file, format::Truncation::to_end(9, 3), &[]).unwrap();
        assert_eq!(of(reported(0)), [(5, 3)], "an earlier one says as much");
        store.drop_file(old.file, format::Truncation::to_end(9, 4), &[]).unwrap();
        assert_eq!(of(reported(0)), [(5, 3), (9, 4)]);
        store.drop_file(old.file, format::Truncation::to_end(0, FENCE_GONE), &[]).unwrap();
        assert_eq!(of(reported(0)), [(0, FENCE_GONE)], "one that covers others takes their place");
        assert_eq!(reported(store.index().newest_truncation().unwrap()), []);
        let higher = GroupAt { group: SCOPE.group, epoch: Epoch(6) };
        store.list_truncations(0, &[higher], 10).unwrap();
        let lower = GroupAt { group: SCOPE.group, epoch: Epoch(5) };
        assert_eq!(
            store.drop_file(old.file, format::Truncation::to_end(0, FENCE_GONE), &[lower]).unwrap_err().kind,
            ErrorKind::Stale
        );
        store.forget_truncations(store.index().newest_truncation().unwrap()).unwrap();
        assert_eq!(reported(0), []);
        assert_eq!(store.index().newest_truncation().unwrap(), 3, "numbers only grow");
    });
}

/// A truncation with an end leaves bytes before and behind it, and lists its own stripes only.
#[test]
fn a_truncation_with_an_end_leaves_later_bytes() {
    with_store(|_, _, store| {
        let file = cell(1, 0).file;
        for stripe in 0..4 {
            write(&store, cell(1, stripe), 1, WriteMode::Fresh, &[], &bytes_of(stripe as u8, 50_000))
                .unwrap();
            overlay(&store, cell(1, stripe), 0, b"over").unwrap();
        }
        let truncation =
            |from_stripe, to_stripe, token_epoch| format::Truncation { from_stripe, to_stripe, token_epoch };
        assert_eq!(store.drop_file(file, truncation(2, 2, 3), &[]).unwrap_err().kind, ErrorKind::Invalid);
        store.drop_file(file, truncation(1, 3, 3), &[]).unwrap();
        let lengths = |store: &Store| [0, 1, 2, 3].map(|s| read(store, cell(1, s), 0, CELL_BYTES).1.len());
        assert_eq!(lengths(&store), [50_000, 0, 0, 50_000]);
        // The fence is the file's.
        assert_eq!(overlay_as(&store, cell(1, 3), 2, 0, b"late").unwrap_err().kind, ErrorKind::Stale);
        // Fragments from such a peer are accepted where nothing was truncated.
        let (data, version) = (bytes_of(7, 60_000), Version::new(2, 9));
        let crcs = block_crcs(&data, CHECKSUM_BLOCK as usize);
        let taken = [0, 1, 2, 3].map(|stripe| {
            let (mode, folded_seqs, block_crcs) = (WriteMode::Fresh, &[][..], &crcs[..]);
            let cell = cell(1, stripe);
            let write =
                FragmentWrite { cell, version, mode, missing: 0, folded_seqs, block_crcs, data: &data };
            store.install(&SCOPE, &write, Seq(0), Install::Missed).unwrap().1
        });
        assert_eq!(taken, [true, false, false, true]);

        let reported = |store: &Store| {
            let truncations = store.list_truncations(0, &[], 10).unwrap().1.truncations;
            truncations.iter().map(|c| (c.from_stripe, c.to_stripe, c.token_epoch)).collect::<Vec<_>>()
        };
        store.drop_file(file, truncation(2, 3, 3), &[]).unwrap();
        store.drop_file(file, truncation(3, 4, 3), &[]).unwrap();
        assert_eq!(reported(&store), [(1, 3, 3), (3, 4, 3)], "neither says what the other does");
    });
}

/// Recalled bytes are filled in only below all newer ones, from any of several late movers.
#[test]
fn a_fill_replaces_what_is_older_and_nothing_else() {
    with_store(|_, _, store| {
        let id = cell(1, 5);
        let fill = |token: u32, seed: u8| {
            write_as(
                &store,
                id,
                Version::new(token, FILL_COUNTER),
                WriteMode::Fill,
                &[],
                &bytes_of(seed, 9_000),
            )
        };
        let stale = |done: Result<()>| assert_eq!(done.unwrap_err().kind, ErrorKind::Stale);
        write(&store, id, 7, WriteMode::Fresh, &[], &bytes_of(1, 50_000)).unwrap();
        overlay_as(&store, id, 2, 0, b"before the eviction").unwrap();
        // The drop at the targets may come after the first fill.
        fill(3, 1).unwrap();
        store
            .drop_file(id.file, format::Truncation { from_stripe: 5, to_stripe: 6, token_epoch: 3 }, &[])
            .unwrap();
        assert_eq!(read(&store, id, 0, CELL_BYTES).1, bytes_of(1, 9_000));
        fill(3, 1).unwrap();
        stale(fill(3, 2));
        stale(fill(2, 2));
        // Handed to another mover under a higher token epoch: the first one is late.
        fill(4, 3).unwrap();
        stale(fill(3, 1));
        assert_eq!(read(&store, id, 0, CELL_BYTES).1, bytes_of(3, 9_000));
        // Now a client writes.
        overlay_as(&store, id, 4, 0, b"new").unwrap();
        fill(4, 3).unwrap();
        assert_eq!(&read(&store, id, 0, CELL_BYTES).1[..3], b"new", "a repeated fill changes no newer byte");
        overlay_as(&store, id, 6, 3, b"er").unwrap();
        stale(fill(5, 4));
        stale(fill(6, 4));
        assert_eq!(&read(&store, id, 0, CELL_BYTES).1[..5], b"newer");
        let writers = write_as(&store, id, Version::new(9, 2), WriteMode::Fill, &[], b"x");
        assert_eq!(writers.unwrap_err().kind, ErrorKind::Invalid);
        let other = cell(1, 6);
        write_as(&store, other, Version::new(6, 2), WriteMode::Prepare, &[], b"a writer's").unwrap();
        let late = write_as(&store, other, Version::new(5, FILL_COUNTER), WriteMode::Fill, &[], b"late");
        assert_eq!(late.unwrap_err().kind, ErrorKind::Stale);
    });
}
