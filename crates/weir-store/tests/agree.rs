//! Overlays that some member lacks: after a full target or a crash, all keepers of a log hold the same again.
mod lab;

use lab::*;
use std::sync::Arc;
use weir_proto::data::{MirrorOverlays, StatCell};
use weir_proto::map::MemberState;
use weir_proto::*;

/// A client's present view of a cell.
async fn seen(world: &Arc<World>, index: usize) -> Vec<u8> {
    use weir_proto::data::ReadView;
    world.read(index, cell(0, index), ReadView::Merged, Version(0)).await.unwrap().1
}

#[tokio::test]
async fn an_overlay_that_one_keeper_has_no_space_for_is_nowhere() {
    for full in [1, 4, 5] {
        let world = World::new(EC).await;
        let mut model = Model::new();
        model.overlay(&world, 0, 1, 100, &bytes_of(1, 5000)).await;
        world.full.lock().unwrap().insert(TargetId(full));
        // The second one finds the number before it void or in flight.
        let (long, short) = (bytes_of(2, 20_000), bytes_of(3, 200));
        let (one, other) =
            tokio::join!(world.overlay(cell(0, 1), 3000, &long), world.overlay(cell(0, 1), 40_000, &short),);
        for refused in [one, other] {
            assert_eq!(refused.unwrap_err().kind, ErrorKind::NoSpace, "{full} is full");
        }
        world.check(0, &model.0, "while a target is full").await;
        // Holes need no space.
        world.zeros(cell(0, 1), 200, 300).await.unwrap();
        model.0[1][200..500].fill(0);
        world.check(0, &model.0, "with a hole").await;
        world.full.lock().unwrap().clear();
        model.overlay(&world, 0, 1, 2000, &bytes_of(4, 20_000)).await;
        world.check(0, &model.0, "with space again").await;
        world.seal(cell(0, 0).file).await.unwrap();
        world.check(0, &model.0, "sealed").await;
    }
}

/// A hundred extents, every third hundred bytes of a cell.
fn extents(bytes: &[u8]) -> Vec<(usize, &[u8])> {
    bytes.chunks(100).enumerate().map(|(n, data)| (n * 300, data)).collect()
}

#[tokio::test]
async fn extents_of_one_message_are_at_all_keepers_or_at_none() {
    for full in [1, 4, 5] {
        let world = World::new(EC).await;
        let mut model = Model::new();
        model.overlay(&world, 0, 1, 100, &bytes_of(1, 5000)).await;
        world.full.lock().unwrap().insert(TargetId(full));
        let bytes = bytes_of(2, 10_000);
        let refused = world.overlays(cell(0, 1), &extents(&bytes)).await.unwrap_err();
        assert_eq!(refused.kind, ErrorKind::NoSpace, "{full} is full");
        world.check(0, &model.0, "while a target is full").await;
        world.full.lock().unwrap().clear();
        let first = world.overlays(cell(0, 1), &extents(&bytes)).await.unwrap();
        for (at, data) in extents(&bytes) {
            model.0[1][at..at + data.len()].copy_from_slice(data);
        }
        world.check(0, &model.0, "with space again").await;
        let next = world.overlay(cell(0, 1), 31_000, b"next").await.unwrap();
        model.0[1][31_000..31_004].copy_from_slice(b"next");
        assert_eq!(next.0, first.0 + 100, "one number each, in a row");
        world.seal(cell(0, 0).file).await.unwrap();
        world.check(0, &model.0, "sealed").await;
        world.restart().await;
        world.check(0, &model.0, "started again").await;
    }
}

/// Copies of several extents follow the numbers before them, come twice without harm, and are refused whole.
#[tokio::test]
async fn copies_of_several_extents_keep_the_order_of_numbers() {
    let world = World::new(EC).await;
    let bytes = bytes_of(2, 10_000);
    let mirror = |at: usize, first: u64| MirrorOverlays {
        place: world.place(at),
        cell: cell(0, 1),
        token_epoch: 1,
        first: Seq(first),
        parts: extents(&bytes).iter().map(|(at, data)| part_of(*at, data)).collect(),
        missing: 0,
        layout_scheme: EC,
    };
    let too_early = world.call(4, mirror(4, 3), &bytes).await.unwrap_err();
    assert_eq!(too_early.kind, ErrorKind::Stale, "{too_early}");
    world.call(4, mirror(4, 1), &bytes).await.unwrap();
    world.call(4, mirror(4, 1), &bytes).await.unwrap();
    let stat = StatCell { place: world.place(4), cell: cell(0, 1) };
    assert_eq!(world.call(4, stat, &[]).await.unwrap().0.overlay_seqs, [Seq(100)]);
    let short = world.call(5, mirror(5, 1), &bytes[..9_999]).await.unwrap_err();
    let long = world.call(5, mirror(5, 1), &bytes_of(2, 10_001)).await.unwrap_err();
    let none = MirrorOverlays { parts: vec![], ..mirror(5, 1) };
    let none = world.call(5, none, &[]).await.unwrap_err();
    for refused in [short, long, none] {
        assert_eq!(refused.kind, ErrorKind::Invalid, "{refused}");
    }
    let stat = StatCell { place: world.place(5), cell: cell(0, 1) };
    assert!(!world.call(5, stat, &[]).await.unwrap().0.known, "nothing of them was logged");
}

/// Which mirrors do not get an overlay before everything stops.
const SILENT: [&[u32]; 4] = [&[], &[4], &[5], &[4, 5]];

/// Logs an overlay at its sequencer and all mirrors but the silent ones; then its process ends.
async fn half_mirrored(world: &Arc<World>, silent: &[u32], seq: u64) {
    // Its log is compared before that, as after each start.
    world.rounds(1..2).await;
    world.silent.lock().unwrap().extend(silent.iter().map(|t| TargetId(*t)));
    let bytes = bytes_of(2, 20_000);
    let logged = async {
        for keeper in [1, 4, 5].into_iter().filter(|keeper| !silent.contains(keeper)) {
            world.until_logged(keeper as usize, cell(0, 1), seq).await;
        }
    };
    tokio::select! {
        biased;
        done = world.overlay(cell(0, 1), 3000, &bytes) => {
            assert!(silent.is_empty(), "acknowledged before all had it: {done:?}");
        }
        () = logged => {}
    }
    world.silent.lock().unwrap().clear();
}

#[tokio::test]
async fn after_a_power_cut_an_overlay_is_everywhere_or_nowhere() {
    for (silent, is_first) in SILENT.into_iter().flat_map(|s| [(s, true), (s, false)]) {
        let world = World::new(EC).await;
        let mut model = Model::new();
        let before = if is_first { 0 } else { 1 };
        // Another part of the stripe is known to all members.
        model.overlay(&world, 0, before, 100, &bytes_of(1, 5000)).await;
        half_mirrored(&world, silent, 2 - u64::from(is_first)).await;
        world.restart().await;
        // All of them missed nothing, according to the coordinator.
        world.set_state(TargetId(0), MemberState::Current);
        world.rounds(0..6).await;
        model.0[1] = seen(&world, 1).await;
        world.check(0, &model.0, &format!("without {silent:?}")).await;
        model.overlay(&world, 0, 1, 9000, &bytes_of(3, 700)).await;
        world.check(0, &model.0, "and later").await;
    }
}

#[tokio::test]
async fn a_dead_sequencers_overlay_is_everywhere_or_nowhere() {
    for (silent, is_first) in SILENT.into_iter().flat_map(|s| [(s, true), (s, false)]) {
        let world = World::new(EC).await;
        let mut model = Model::new();
        let before = if is_first { 0 } else { 1 };
        // Another part of the stripe is known to all members.
        model.overlay(&world, 0, before, 100, &bytes_of(1, 5000)).await;
        half_mirrored(&world, silent, 2 - u64::from(is_first)).await;
        world.lose(TargetId(1)).await;
        world.rounds(0..6).await;
        model.0[1] = world.decode(0, 1, &[1]).await;
        let without_first = world.decode(0, 1, &[1, 4]).await;
        assert!(without_first == model.0[1], "without {silent:?}: two keepers differ");
        world.restart_target(TargetId(1)).await;
        world.rounds(0..6).await;
        world.check(0, &model.0, "after its return").await;
        model.overlay(&world, 0, 1, 9000, &bytes_of(3, 700)).await;
        world.check(0, &model.0, "and later").await;
    }
}

/// A member that returns gets every truncation that others remember, old ones too: they do not cover bytes
/// written and sealed since.
#[tokio::test]
async fn a_repeated_truncation_leaves_what_was_sealed_since() {
    let world = World::new(EC).await;
    let mut model = Model::new();
    model.overlay(&world, 0, 1, 100, &bytes_of(1, 5000)).await;
    world.seal(cell(0, 0).file).await.unwrap();
    world.truncate(0).await;
    let mut model = Model::new();
    model.overlay(&world, 0, 1, 100, &bytes_of(2, 5000)).await;
    world.seal(cell(0, 0).file).await.unwrap();
    for parity in [4, 5] {
        world.lose(TargetId(parity)).await;
        world.restart_target(TargetId(parity)).await;
        world.rounds(0..6).await;
        let bytes = bytes_of(3, 700);
        let write = world.overlay(cell(0, 1), 3000, &bytes);
        let written = world.env.clock.timeout(std::time::Duration::from_secs(20), write).await;
        written.expect("the mirrors take the next number").unwrap();
        model.0[1][3000..3700].copy_from_slice(&bytes);
        world.check(0, &model.0, "after its return").await;
    }
}

/// A full target took no fragment of a fresh stripe, the others did: fragments without bytes put an end to
/// it.
#[tokio::test]
async fn empty_fragments_take_a_fresh_stripe_back() {
    let world = World::new(EC).await;
    for full in [1, 4] {
        let stripe = full as u64;
        world.full.lock().unwrap().insert(TargetId(full));
        let cells: Vec<Vec<u8>> = (0..4).map(|i| bytes_of(i, CELL)).collect();
        let others: Vec<usize> = (0..6).filter(|p| *p != full as usize).collect();
        world.some_of_stripe(stripe, Version::new(1, 2), &cells, &others).await;
        world.stripe(stripe, Version::new(1, 4), &[const { Vec::new() }; 4]).await.unwrap();
        world.check(stripe, &Model::new().0, "taken back").await;
        world.full.lock().unwrap().clear();
    }
}

/// Every process ends; these targets start with an older state of theirs, and the coordinator sees nothing of
/// it: all members are current.
async fn restarted_with(world: &Arc<World>, old: &[(TargetId, Copy)]) {
    world.restart().await;
    for (id, copy) in old {
        world.put_back(*id, copy).await;
    }
    world.restart().await;
    world.set_state(TargetId(0), MemberState::Current);
}

/// The cell's sequencer and parity targets: at most as many as may be lost.
const ROLLED_BACK: [&[u32]; 4] = [&[1], &[4], &[1, 4], &[1, 5]];

#[tokio::test]
async fn a_sequencer_that_went_back_adopts_what_others_have() {
    for (rolled_back, writes_first) in ROLLED_BACK.into_iter().flat_map(|r| [(r, true), (r, false)]) {
        let world = World::new(EC).await;
        let mut model = Model::new();
        model.overlay(&world, 0, 1, 100, &bytes_of(1, 5000)).await;
        let old: Vec<_> =
            rolled_back.iter().map(|id| (TargetId(*id), world.copy_of(TargetId(*id)))).collect();
        // Acknowledged, in the index and on slabs.
        model.overlay(&world, 0, 1, 3000, &bytes_of(2, 700)).await;
        model.overlay(&world, 0, 1, 20_000, &bytes_of(3, 30_000)).await;
        restarted_with(&world, &old).await;
        if writes_first {
            model.overlay(&world, 0, 1, 40_000, &bytes_of(4, 400)).await;
        }
        world.rounds(0..6).await;
        world.check(0, &model.0, &format!("{rolled_back:?} went back, a write first: {writes_first}")).await;
        model.overlay(&world, 0, 1, 3500, &bytes_of(5, 900)).await;
        world.seal(cell(0, 0).file).await.unwrap();
        world.check(0, &model.0, "sealed").await;
    }
}

#[tokio::test]
async fn a_parity_that_went_back_numbers_after_the_other_one() {
    let world = World::new(EC).await;
    let mut model = Model::new();
    model.overlay(&world, 0, 1, 100, &bytes_of(1, 5000)).await;
    let old = [(TargetId(4), world.copy_of(TargetId(4)))];
    model.overlay(&world, 0, 1, 3000, &bytes_of(2, 700)).await;
    world.lose(TargetId(1)).await;
    restarted_with(&world, &old).await;
    // The data target does not return, so the parity is the sequencer.
    world.dead.lock().unwrap().insert(TargetId(1));
    model.overlay(&world, 0, 1, 9000, &bytes_of(3, 700)).await;
    world.rounds(0..6).await;
    let decoded = world.decode(0, 1, &[1, 4]).await;
    assert!(decoded == model.0[1] && world.decode(0, 1, &[1, 5]).await == decoded);
    world.restart_target(TargetId(1)).await;
    world.rounds(0..6).await;
    world.check(0, &model.0, "after its return").await;
}

#[tokio::test]
async fn a_seal_that_a_member_lost_is_made_good_before_the_next() {
    for rolled_back in ROLLED_BACK {
        let world = World::new(EC).await;
        let mut model = Model::new();
        model.fresh(&world, 0, 7).await;
        model.overlay(&world, 0, 1, 100, &bytes_of(1, 5000)).await;
        let old: Vec<_> =
            rolled_back.iter().map(|id| (TargetId(*id), world.copy_of(TargetId(*id)))).collect();
        model.overlay(&world, 0, 1, 3000, &bytes_of(2, 700)).await;
        world.seal(cell(0, 0).file).await.unwrap();
        restarted_with(&world, &old).await;
        // Older bytes are not sealed.
        model.overlay(&world, 0, 0, 500, &bytes_of(6, 300)).await;
        world.seal(cell(0, 0).file).await.unwrap_err();
        if rolled_back == [1] {
            model.overlay(&world, 0, 1, 40_000, &bytes_of(4, 400)).await;
            world.rounds(0..6).await;
            world.seal(cell(0, 0).file).await.unwrap();
            world.check(0, &model.0, "sealed again").await;
        }
        let lost: Vec<usize> = rolled_back.iter().map(|id| *id as usize).collect();
        let decoded = world.decode(0, 1, &lost).await;
        assert!(decoded == model.0[1], "{rolled_back:?} went back");
    }
}
