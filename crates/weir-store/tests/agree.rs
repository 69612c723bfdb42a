//! Overlays that not everybody has: after a target was full, or a crash, all keepers of a log hold the same
//! again.
mod lab;

use lab::*;
use std::sync::Arc;
use weir_proto::map::MemberState;
use weir_proto::*;

/// What a client reads of a cell now.
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
        // The second one finds the number before it void or on its way.
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

/// Which mirrors do not get an overlay before everything stops.
const SILENT: [&[u32]; 4] = [&[], &[4], &[5], &[4, 5]];

/// Logs an overlay at its sequencer and all mirrors but the silent ones; then its process ends.
async fn half_mirrored(world: &Arc<World>, silent: &[u32], seq: u64) {
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
        // Something else of the stripe is known to everybody.
        model.overlay(&world, 0, before, 100, &bytes_of(1, 5000)).await;
        half_mirrored(&world, silent, 2 - u64::from(is_first)).await;
        world.restart().await;
        // All of them missed nothing, says the coordinator.
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
        // Something else of the stripe is known to everybody.
        model.overlay(&world, 0, before, 100, &bytes_of(1, 5000)).await;
        half_mirrored(&world, silent, 2 - u64::from(is_first)).await;
        world.lose(TargetId(1)).await;
        world.rounds(0..6).await;
        model.0[1] = world.decode(0, 1, &[1]).await;
        let without_first = world.decode(0, 1, &[1, 4]).await;
        assert!(without_first == model.0[1], "without {silent:?}: two keepers differ");
        world.bring_back(TargetId(1)).await;
        world.rounds(0..6).await;
        world.check(0, &model.0, "after its return").await;
        model.overlay(&world, 0, 1, 9000, &bytes_of(3, 700)).await;
        world.check(0, &model.0, "and later").await;
    }
}

/// Who returns is told of every cut that others remember, old ones too: what was written and sealed since is
/// no part of them.
#[tokio::test]
async fn a_repeated_truncation_leaves_what_was_sealed_since() {
    let world = World::new(EC).await;
    let mut model = Model::new();
    model.overlay(&world, 0, 1, 100, &bytes_of(1, 5000)).await;
    world.seal(cell(0, 0).file).await.unwrap();
    world.cut(0).await;
    let mut model = Model::new();
    model.overlay(&world, 0, 1, 100, &bytes_of(2, 5000)).await;
    world.seal(cell(0, 0).file).await.unwrap();
    for parity in [4, 5] {
        world.lose(TargetId(parity)).await;
        world.bring_back(TargetId(parity)).await;
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
