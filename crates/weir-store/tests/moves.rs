//! A place moves to another target while it is written: no byte is lost, and the former member's cells are
//! dropped.
#![allow(clippy::disallowed_methods, reason = "a slab is damaged behind its target's back")]
mod lab;

use lab::*;
use std::sync::Arc;
use std::time::Duration;
use weir_kv::Scan;
use weir_proto::map::Move;
use weir_proto::*;

const SPARE: TargetId = TargetId(6);

fn begin(world: &World, place: u8) {
    let mut map = world.map.lock().unwrap();
    let mut next = (**map).clone();
    next.version += 1;
    next.moves.push(Move { group: PgId(0), place, to: SPARE, closed_in: Epoch(0) });
    *map = Arc::new(next);
}

fn is_moving(world: &World) -> bool {
    !world.map().moves.is_empty()
}

/// As a client does it: it waits while the place is closed, and asks under the newest map.
async fn write(world: &Arc<World>, model: &mut Model, stripe: u64, index: usize, at: usize, data: &[u8]) {
    let until = world.env.clock.now() + PATIENCE;
    while let Err(e) = world.overlay(cell(stripe, index), at, data).await {
        assert!(matches!(e.kind, ErrorKind::Unavailable | ErrorKind::Stale), "{e}");
        assert!(world.env.clock.now() < until, "{e}");
        world.env.clock.sleep(Duration::from_millis(1)).await;
    }
    model.0[index][at..at + data.len()].copy_from_slice(data);
}

async fn check_all(world: &Arc<World>, models: &[Model], when: &str) {
    for (stripe, model) in models.iter().enumerate() {
        world.check(stripe as u64, &model.0, when).await;
    }
}

fn cells_of(world: &World, target: TargetId) -> usize {
    let mut cells = 0;
    let (start, end) = weir_store::format::letter_range(weir_store::format::HEADER);
    let mut count = |r: &dyn weir_kv::Read| {
        cells = 0;
        r.scan(&start, &end, &mut |_, _| {
            cells += 1;
            Scan::More
        })
    };
    world.disks[target.0 as usize].1.read(&mut count).unwrap();
    cells
}

/// Sealed stripes, overlays of all sizes, and a stripe that was truncated.
async fn filled(world: &Arc<World>) -> Vec<Model> {
    let mut models: Vec<Model> = (0..6).map(|_| Model::new()).collect();
    for (stripe, model) in (0..).zip(&mut models[..5]) {
        model.fresh(world, stripe, stripe as usize).await;
        for n in 0..6 {
            model.overlay(world, stripe, n % 4, 500 * n, &bytes_of(n, 900)).await;
        }
    }
    world.seal(cell(0, 0).file).await.unwrap();
    for (stripe, model) in (0..).zip(&mut models[..4]) {
        model.overlay(world, stripe, 1, 40, b"small").await;
        model.overlay(world, stripe, 2, 80, &bytes_of(3, 30_000)).await;
    }
    world.truncate(4).await;
    models[4] = Model::new();
    models
}

#[tokio::test]
async fn a_place_moves_while_it_is_written() {
    for place in [0u8, 2, 4, 5] {
        let world = World::new(EC).await;
        world.start(SPARE).await;
        let mut models = filled(&world).await;
        let from = TargetId(u32::from(place));
        begin(&world, place);
        let until = world.env.clock.now() + PATIENCE;
        for n in 0_usize.. {
            world.rounds(0..7).await;
            let (stripe, index) = (n % 6, n % 4);
            let data = bytes_of(n, 100 + n % 3 * 9000);
            write(&world, &mut models[stripe], stripe as u64, index, n % 50 * 700, &data).await;
            if n % 7 == 0 {
                let _ = world.seal(cell(0, 0).file).await; // refused while the place is closed
            }
            if !is_moving(&world) {
                break;
            }
            assert!(world.env.clock.now() < until, "place {place} does not move");
        }
        let group = world.map().groups[0].clone();
        assert_eq!((group.members[usize::from(place)].target, group.current_count()), (SPARE, 6));
        check_all(&world, &models, &format!("place {place} has moved")).await;
        for (stripe, model) in (0..).zip(&mut models[..]) {
            write(&world, model, stripe, 3, 1000, b"and is written on").await;
        }
        world.seal(cell(0, 0).file).await.unwrap();
        check_all(&world, &models, &format!("place {place} is sealed where it is now")).await;
        while cells_of(&world, from) > 0 {
            world.rounds(0..7).await;
            assert!(world.env.clock.now() < until, "{from} keeps what is not its any more");
        }
        check_all(&world, &models, &format!("{from} has dropped its cells")).await;
    }
}

#[tokio::test]
async fn a_cancelled_move_leaves_nothing_behind() {
    let world = World::new(EC).await;
    world.start(SPARE).await;
    let models = filled(&world).await;
    begin(&world, 1);
    let until = world.env.clock.now() + PATIENCE;
    while cells_of(&world, SPARE) == 0 {
        world.rounds(6..7).await;
        world.env.clock.sleep(Duration::from_millis(1)).await;
        assert!(world.env.clock.now() < until, "nothing is copied");
    }
    {
        let mut map = world.map.lock().unwrap();
        let mut next = (**map).clone();
        weir_coord::decide::cancel_move(&mut next, PgId(0));
        next.version += 1;
        *map = Arc::new(next);
    }
    let is_there = world.map().groups[0].members.iter().any(|m| m.target == SPARE);
    let leaver = if is_there { TargetId(1) } else { SPARE };
    while cells_of(&world, leaver) > 0 {
        world.rounds(0..7).await;
        world.env.clock.sleep(Duration::from_millis(1)).await;
        assert!(world.env.clock.now() < until, "{leaver} keeps what is not its");
    }
    check_all(&world, &models, "cancelled").await;
}

#[tokio::test]
async fn a_damaged_cell_is_repaired_before_it_is_copied() {
    let world = World::new(EC).await;
    world.start(SPARE).await;
    let models = filled(&world).await;
    // A bit of each slab of the member flips.
    let slabs = std::fs::read_dir(&world.disks[0].0).unwrap().map(|entry| entry.unwrap().path());
    let mut flipped = 0;
    for path in slabs.filter(|path| path.file_name().unwrap().to_string_lossy().starts_with("slab")) {
        let mut bytes = std::fs::read(&path).unwrap();
        if let Some(at) = bytes.iter().position(|byte| *byte == bytes_of(0, 10)[9]) {
            bytes[at] ^= 1;
            std::fs::write(&path, bytes).unwrap();
            flipped += 1;
        }
    }
    assert!(flipped > 0, "no slab was found");
    begin(&world, 0);
    let until = world.env.clock.now() + PATIENCE;
    while is_moving(&world) {
        world.rounds(0..7).await;
        world.env.clock.sleep(Duration::from_millis(1)).await;
        assert!(world.env.clock.now() < until, "it does not move");
    }
    check_all(&world, &models, "mended and moved").await;
}
