//! Several targets wired in one process: mirrors, losses, seals killed at each step, repair.
mod lab;

use lab::*;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;
use weir_env::BoxFuture;
use weir_proto::checksum::{block_crcs, crc32c};
use weir_proto::data::*;
use weir_proto::map::*;
use weir_proto::*;

#[tokio::test]
async fn overlays_are_on_every_log_keeper() {
    let world = World::new(EC).await;
    let mut model = Model::new();
    model.overlay(&world, 0, 1, 100, &bytes_of(1, 5000)).await;
    model.overlay(&world, 0, 1, 3000, &bytes_of(2, 60_000)).await;
    model.overlay(&world, 0, 3, 0, &bytes_of(3, CELL)).await;
    world.check(0, &model.0, "overlays").await;
    let mut model = Model::new();
    model.fresh(&world, 1, 40).await;
    world.check(1, &model.0, "fresh").await;
    for n in 0..20 {
        model.overlay(&world, 1, n % 4, n * 500, &bytes_of(n, 700 + n)).await;
    }
    world.check(1, &model.0, "overlays on a base").await;
}

#[tokio::test]
async fn many_writers_of_one_cell_at_once() {
    let world = World::new(EC).await;
    let writes = (0..50usize).map(|n| {
        let world = world.clone();
        Box::pin(async move { world.overlay(cell(0, 2), n * 1000, &bytes_of(n, 1000)).await })
            as BoxFuture<'_, Result<Seq>>
    });
    let seqs: BTreeSet<Seq> =
        weir_store::peers::join_all(writes.collect()).await.into_iter().map(|r| r.unwrap()).collect();
    assert_eq!(seqs.len(), 50);
    let mut model = Model::new();
    for n in 0..50 {
        model.0[2][n * 1000..][..1000].copy_from_slice(&bytes_of(n, 1000));
    }
    world.check(0, &model.0, "many writers").await;
}

#[tokio::test]
async fn a_seal_keeps_every_byte_and_drops_the_overlays() {
    let world = World::new(EC).await;
    let mut whole = Model::new();
    whole.fresh(&world, 0, 9).await;
    let mut loose = Model::new();
    for n in 0..30 {
        whole.overlay(&world, 0, n % 3, n * 900, &bytes_of(n, 1500)).await;
        loose.overlay(&world, 7, n % 4, n * 1700, &bytes_of(n, 2500)).await;
    }
    for _ in 0..2 {
        let request = SealFile { target: world.place(4).target, file: cell(0, 0).file };
        world.call(4, request, &[]).await.unwrap();
        world.check(0, &whole.0, "sealed").await;
        world.check(7, &loose.0, "sealed").await;
    }
    for position in 0..6 {
        let (stat, _) =
            world.call(position, StatTarget { target: world.place(position).target }, &[]).await.unwrap();
        assert_eq!(stat.overlay_extents, 0, "position {position}");
    }
    // And continues after it.
    whole.overlay(&world, 0, 0, 5, b"after the seal").await;
    world.check(0, &whole.0, "after the seal").await;
}

#[tokio::test]
async fn copies_and_single_cells_are_sealed_too() {
    for (scheme, leader) in [(Scheme { data: 1, parity: 0 }, 0), (Scheme { data: 1, parity: 2 }, 1)] {
        let world = World::new(scheme).await;
        let mut model = Model::new();
        for n in 0..10 {
            model.overlay(&world, 0, 0, n * 5000, &bytes_of(n, 6000)).await;
        }
        let request = SealFile { target: world.place(leader).target, file: cell(0, 0).file };
        world.call(leader, request, &[]).await.unwrap();
        world.check(0, &model.0, "sealed").await;
        for position in 0..scheme.width() {
            let request = StatTarget { target: world.place(position).target };
            assert_eq!(world.call(position, request, &[]).await.unwrap().0.overlay_extents, 0);
        }
    }
}

/// The next holder of a dead writer's file fences it; the written bytes stay, and are sealed all the same.
#[tokio::test]
async fn a_fenced_file_is_sealed() {
    let world = World::new(EC).await;
    let mut model = Model::new();
    model.overlay(&world, 0, 1, 100, &bytes_of(1, 5000)).await;
    for position in 0..6 {
        let target = world.place(position).target;
        let request = DropFile {
            target,
            file: cell(0, 0).file,
            from_stripe: 1,
            to_stripe: u64::MAX,
            fence: 9,
            epochs: vec![],
        };
        world.call(position, request, &[]).await.unwrap();
    }
    assert_eq!(world.overlay(cell(0, 1), 0, b"late").await.unwrap_err().kind, ErrorKind::Stale);
    let request = SealFile { target: world.place(4).target, file: cell(0, 0).file };
    world.call(4, request, &[]).await.unwrap();
    world.check(0, &model.0, "fenced and sealed").await;
    let request = StatCell { place: world.place(5), cell: cell(0, 5) };
    assert_eq!(world.call(5, request, &[]).await.unwrap().0.base, Version::new(9, 3));
}

/// The first overlay of a cell, as its sequencer sends it to another keeper.
fn mirror_of(place: Place, cell: CellId, bytes: &[u8]) -> MirrorOverlay {
    MirrorOverlay {
        place,
        cell,
        token_epoch: 1,
        seq: Seq(1),
        offset: 0,
        len: bytes.len() as u32,
        kind: OverlayKind::Data,
        missing: 0,
        crc: crc32c(bytes),
        layout_scheme: EC,
        again: false,
    }
}

/// An overlay that a keeper got by agreement may have been read: a late sender, after a fence, learns that it
/// exists.
#[tokio::test]
async fn an_existing_overlay_is_not_refused_for_a_later_fence() {
    let world = World::new(EC).await;
    let bytes = bytes_of(3, 3000);
    let mirror = |at: usize| mirror_of(world.place(at), cell(0, 0), &bytes);
    let (has, lacks) = (4, 5); // parity
    world.call(has, mirror(has), &bytes).await.unwrap();
    for position in [has, lacks] {
        let (target, file) = (world.place(position).target, cell(0, 0).file);
        let no_stripe = (u64::MAX - 1, u64::MAX);
        let (from_stripe, to_stripe) = no_stripe;
        let request = DropFile { target, file, from_stripe, to_stripe, fence: 9, epochs: vec![] };
        world.call(position, request, &[]).await.unwrap();
    }
    world.call(has, mirror(has), &bytes).await.unwrap();
    assert_eq!(world.call(lacks, mirror(lacks), &bytes).await.unwrap_err().kind, ErrorKind::Stale);
}

/// A write that came here before the fence, and to the others after it, is taken back. No reader behind the
/// fence sees it.
#[tokio::test]
async fn a_fence_has_come_when_what_it_took_back_is_gone() {
    let world = World::new(EC).await;
    let mut model = Model::new();
    model.overlay(&world, 0, 0, 100, &bytes_of(1, 5000)).await;
    let fence = |position: usize| {
        let (target, file) = (world.place(position).target, cell(0, 0).file);
        let (from_stripe, to_stripe) = (u64::MAX - 1, u64::MAX);
        let request = DropFile { target, file, from_stripe, to_stripe, fence: 9, epochs: vec![] };
        world.dispatch(target, request, vec![])
    };
    for keeper in [4, 5] {
        fence(keeper).await.unwrap();
    }
    let bytes = bytes_of(2, 5000);
    let (late, ()) = tokio::join!(world.overlay(cell(0, 0), 3000, &bytes), async {
        world.until_logged(0, cell(0, 0), 2).await;
        fence(0).await.unwrap();
        world.check(0, &model.0, "behind the fence").await;
    });
    assert_eq!(late.unwrap_err().kind, ErrorKind::Stale);
    world.check(0, &model.0, "later").await;
}

/// The leader's process ends after each number of calls; all targets that are not lost start again and
/// settle.
async fn seal_killed_at_any_step(lost: &[u32], leader: usize) {
    for calls in 0..60 {
        let world = World::new(EC).await;
        let mut model = Model::new();
        model.fresh(&world, 0, calls).await;
        for id in lost {
            world.lose(TargetId(*id)).await;
        }
        for n in 0..12 {
            model.overlay(&world, 0, n % 3, n * 4000, &bytes_of(n, 5000)).await;
        }
        *world.calls_left.lock().unwrap() = Some(calls);
        let request = || SealFile { target: world.place(leader).target, file: cell(0, 0).file };
        let sealing = world.call(leader, request(), &[]);
        let ended = world.env.clock.timeout(Duration::from_millis(100), sealing).await.is_ok();
        world.restart().await;
        let context = |what: &str| format!("without {lost:?}, killed after {calls} calls, {what}");
        world.check(0, &model.0, &context("before settling")).await;
        model.overlay(&world, 0, 1, 77, b"written while in doubt").await;
        world.rounds(0..6).await;
        world.rounds(0..6).await;
        world.check(0, &model.0, &context("settled")).await;
        world.call(leader, request(), &[]).await.unwrap();
        world.check(0, &model.0, &context("sealed again")).await;
        for position in (0..6).filter(|p| !lost.contains(&(*p as u32))) {
            let request = StatCell { place: world.place(position), cell: cell(0, position) };
            let stat = world.call(position, request, &[]).await.unwrap().0;
            assert_eq!(
                (stat.prepared, stat.overlay_seqs == stat.folded_seqs),
                (vec![], true),
                "position {position}"
            );
        }
        for id in lost {
            world.restart_target(TargetId(*id)).await;
        }
        model.overlay(&world, 0, 2, 99, b"while they are behind").await;
        world.rounds(0..6).await;
        world.rounds(0..6).await;
        world.check(0, &model.0, &context("they are back")).await;
        assert_eq!(world.under_replicated().await, [0; 6], "{}", context("they are back"));
        world.call(4, SealFile { target: world.place(4).target, file: cell(0, 0).file }, &[]).await.unwrap();
        world.check(0, &model.0, &context("they are back and it is sealed")).await;
        if ended {
            return;
        }
    }
    panic!("the seal never ended");
}

#[tokio::test]
async fn a_seal_killed_at_any_step_loses_nothing() {
    seal_killed_at_any_step(&[], 4).await;
}

/// Overlays do not pile up while targets are away: the others seal without them.
#[tokio::test]
async fn a_seal_without_lost_members_loses_nothing() {
    for (lost, leader) in [(&[1][..], 4), (&[5], 4), (&[4], 5), (&[0, 2], 4), (&[2, 4], 5)] {
        seal_killed_at_any_step(lost, leader).await;
    }
}

#[tokio::test]
async fn writes_go_on_without_members_and_are_repaired() {
    for (victim, rank) in [(0usize, "data"), (4, "first parity"), (5, "parity"), (2, "data")] {
        let world = World::new(EC).await;
        let id = TargetId(victim as u32);
        let mut models: Vec<Model> = (0..5).map(|_| Model::new()).collect();
        models[0].fresh(&world, 0, 3).await;
        models[1].fresh(&world, 1, 30).await;
        models[2].overlay(&world, 2, victim % 4, 10, b"before").await;
        world.dead.lock().unwrap().insert(id);
        if victim < 4 {
            // Its own overlays find out only through the coordinator.
            world.set_state(id, MemberState::Down);
        }
        for n in 0..12 {
            models[0].overlay(&world, 0, n % 4, n * 3000, &bytes_of(n, 4000)).await;
            models[2].overlay(&world, 2, n % 4, n * 3000, &bytes_of(n, 4000)).await;
        }
        models[3].fresh(&world, 3, 77).await;
        assert_eq!(world.map().groups[0].members[victim].state, MemberState::Down, "{rank}");
        for (stripe, model) in models.iter().enumerate() {
            world.check(stripe as u64, &model.0, &format!("without its {rank} target")).await;
        }
        world.dead.lock().unwrap().remove(&id);
        world.start(id).await;
        world.set_state(id, MemberState::Behind);
        models[1].overlay(&world, 1, victim % 4, 600, b"while behind").await;
        models[2].overlay(&world, 2, victim % 4, 50, b"while behind, too").await;
        models[4].fresh(&world, 4, 99).await;
        let node = world.nodes.lock().unwrap()[&id].clone();
        node.round_of(id, true).await;
        assert_eq!(world.map().groups[0].members[victim].state, MemberState::Current, "{rank}");
        for (stripe, model) in models.iter().enumerate() {
            world.check(stripe as u64, &model.0, &format!("{rank} target repaired")).await;
        }
        world.rounds(0..6).await;
        assert_eq!(world.under_replicated().await, [0; 6], "after the {rank} target's repair");
        let request = SealFile { target: world.place(4).target, file: cell(0, 0).file };
        world.call(4, request, &[]).await.unwrap();
        for (stripe, model) in models.iter().enumerate() {
            world.check(stripe as u64, &model.0, &format!("{rank} target repaired, then sealed")).await;
        }
    }
}

#[tokio::test]
async fn a_group_whose_repair_is_not_believed_keeps_no_other_behind() {
    let world = World::new(EC).await;
    world.add_groups(40);
    world.disbelieved.lock().unwrap().extend([PgId(0), PgId(7), PgId(40)]);
    let target = TargetId(2);
    world.set_state(target, MemberState::Down);
    world.set_state(target, MemberState::Behind);
    world.rounds(2..3).await;
    let behind = |world: &World| -> Vec<u32> {
        let is_behind = |g: &&Group| g.members[2].state == MemberState::Behind;
        world.map().groups.iter().filter(is_behind).map(|g| g.id.0).collect()
    };
    assert_eq!(behind(&world), [0, 7, 40]);
    world.disbelieved.lock().unwrap().clear();
    world.rounds(2..3).await;
    assert_eq!(behind(&world), [0u32; 0]);
}

/// Each group has a stripe of which the returning target alone holds an overlay, on a base from before it was
/// last current: its peers do not list that as new.
#[tokio::test]
async fn stripes_of_many_groups_are_repaired_in_turns() {
    let world = World::new(EC).await;
    world.add_groups(15);
    let (groups, target) = (0..16u32, TargetId(4));
    let cells: Vec<Vec<u8>> = (0..4).map(|i| bytes_of(i, CELL)).collect();
    for (group, (position, bytes)) in
        groups.clone().flat_map(|g| world.encode(&cells).into_iter().enumerate().map(move |p| (g, p)))
    {
        let request = WriteFragment {
            place: Place { group: PgId(group), ..world.place(position) },
            cell: cell(u64::from(group), position),
            version: Version::new(1, 2),
            mode: WriteMode::Fresh,
            missing: 0,
            folded_seqs: vec![],
            block_crcs: block_crcs(&bytes, CHECKSUM_BLOCK as usize),
        };
        world.dispatch(request.place.target, request, vec![bytes.into()]).await.unwrap();
    }
    world.set_state(target, MemberState::Current); // since a later epoch
    for group in groups {
        let bytes = bytes_of(7, 3000);
        let place = Place { group: PgId(group), ..world.place(4) };
        let request = mirror_of(place, cell(u64::from(group), 0), &bytes);
        world.dispatch(target, request, vec![bytes.into()]).await.unwrap();
    }
    world.set_state(target, MemberState::Down);
    world.set_state(target, MemberState::Behind);
    world.rounds(4..5).await;
    assert!(world.map().groups.iter().all(|g| g.members[4].state == MemberState::Current));
    let (_, most) = *world.log_reads.lock().unwrap();
    assert!((1..=4).contains(&most), "{most} stripes at a time");
}

/// Targets fail one after the other, a write is refused because too few are left, and they return in any
/// order: the notes of a member against others, from before its own failure too, are dropped once all hold
/// everything.
#[tokio::test]
async fn under_replication_ends_when_every_member_is_current() {
    for order in [[0, 1, 4], [4, 1, 0], [1, 0, 4]] {
        let world = World::new(EC).await;
        let mut models: Vec<Model> = (0..4).map(|_| Model::new()).collect();
        for (stripe, victim) in [1, 4].into_iter().enumerate() {
            world.lose(TargetId(victim)).await;
            models[stripe].fresh(&world, stripe as u64, 10 * stripe).await;
            models[3].overlay(&world, 3, 2, 100 * stripe, b"one of several overlays").await;
        }
        // It has its fragments and logs of them, and the masks: then it goes, too.
        let (refused, cells) =
            (Version::new(1, 9), (0..4).map(|i| bytes_of(70 + i, CELL)).collect::<Vec<_>>());
        world.some_of_stripe(2, refused, &cells, &[2, 3, 5]).await;
        world.lose(TargetId(0)).await;
        assert!(world.under_replicated().await.iter().sum::<u64>() > 0);
        for victim in order {
            world.restart_target(TargetId(victim)).await;
            if victim == 0 {
                // It missed nothing: fewer than k were current since.
                world.set_state(TargetId(victim), MemberState::Current);
            }
            world.rounds(0..6).await;
        }
        world.rounds(0..6).await;
        assert!(world.map().groups[0].members.iter().all(|m| m.state == MemberState::Current));
        assert_eq!(world.under_replicated().await, [0; 6], "they came back as {order:?}");
        for stripe in [0, 1, 3] {
            world.check(stripe, &models[stripe as usize].0, "all came back").await;
        }
    }
}

/// A file is truncated and grows again while a member is away: the member returns without the old bytes, for
/// any contents of the stripe (base, overlays, both, with numbers above the new ones), and for any later
/// writes.
#[tokio::test]
async fn a_returned_target_has_no_truncated_bytes() {
    for victim in [0u32, 2, 4, 5] {
        let world = World::new(EC).await;
        let file = cell(0, 0).file;
        let mut models: Vec<Model> = (0..6).map(|_| Model::new()).collect();
        for (stripe, model) in models.iter_mut().enumerate() {
            model.fresh(&world, stripe as u64, stripe).await;
            for n in 0..6 {
                model.overlay(&world, stripe as u64, n % 4, 500 * n, &bytes_of(n, 900)).await;
            }
        }
        let seal = SealFile { target: world.place(4).target, file };
        world.call(4, seal, &[]).await.unwrap();
        for (stripe, model) in (1..).zip(&mut models[1..3]) {
            model.overlay(&world, stripe, 1, 40, b"not sealed").await;
        }
        world.lose(TargetId(victim)).await;
        world.truncate(1).await;
        models[1..].iter_mut().for_each(|m| *m = Model::new());
        // Few numbers where there were many; a whole stripe; nothing; a part of it while the member is
        // behind.
        models[1].overlay(&world, 1, victim as usize % 4, 70, b"grown again").await;
        models[2].fresh(&world, 2, 90).await;
        models[4].overlay(&world, 4, 1, 0, &bytes_of(4, 2000)).await;
        world.restart_target(TargetId(victim)).await;
        for index in 0..4 {
            models[4].overlay(&world, 4, index, 3000, b"while behind").await;
            models[5].overlay(&world, 5, index, 10, b"while behind, too").await;
        }
        world.rounds(0..6).await;
        assert!(world.map().groups[0].members.iter().all(|m| m.state == MemberState::Current));
        for (stripe, model) in models.iter().enumerate() {
            world.check(stripe as u64, &model.0, &format!("{victim} is back")).await;
        }
        for index in 0..4 {
            models[1].overlay(&world, 1, index, 900, b"and goes on").await;
            models[5].overlay(&world, 5, index, 900, b"and goes on").await;
        }
        let seal = SealFile { target: world.place(4).target, file };
        world.call(4, seal, &[]).await.unwrap();
        for (stripe, model) in models.iter().enumerate() {
            world.check(stripe as u64, &model.0, &format!("{victim} is back, sealed")).await;
        }
    }
}

/// An older copy has cells that were cut since, numbers that others were given again, and versions of seals
/// that went otherwise.
#[tokio::test]
async fn a_target_that_returns_empty_or_old_is_refilled_from_others() {
    for (victim, is_copy) in [(0u32, true), (2, false), (4, true), (4, false), (5, true), (3, true)] {
        let world = World::new(EC).await;
        let (id, file) = (TargetId(victim), cell(0, 0).file);
        let mut models: Vec<Model> = (0..7).map(|_| Model::new()).collect();
        for (stripe, model) in models.iter_mut().enumerate().take(5) {
            model.fresh(&world, stripe as u64, stripe).await;
            for n in 0..6 {
                model.overlay(&world, stripe as u64, n % 4, 500 * n, &bytes_of(n, 900)).await;
            }
        }
        world.seal(file).await.unwrap();
        for (stripe, model) in (0..).zip(&mut models[..4]) {
            for index in 0..4 {
                model.overlay(&world, stripe, index, 40, b"not sealed, number 1").await;
                model.overlay(&world, stripe, index, 80, &bytes_of(index, 30_000)).await;
            }
        }
        let copy = if is_copy { world.copy_of(id) } else { Copy::default() };
        world.truncate(2).await;
        models[2..].iter_mut().for_each(|m| *m = Model::new());
        // Few numbers where there were many; a whole stripe; parts of an empty one; and later writes of
        // existing ones.
        models[2].overlay(&world, 2, victim as usize % 4, 70, b"grown again").await;
        models[3].fresh(&world, 3, 90).await;
        models[5].overlay(&world, 5, 1, 0, &bytes_of(4, 2000)).await;
        models[0].overlay(&world, 0, victim as usize % 4, 60, b"since the copy").await;
        world.seal(file).await.unwrap();
        models[0].overlay(&world, 0, victim as usize % 4, 65, b"since the seal").await;
        world.lose(id).await;
        world.return_lost(id, &copy).await;
        for (stripe, model) in models.iter().enumerate() {
            world.check(stripe as u64, &model.0, &format!("{victim} is back, {is_copy}")).await;
        }
        for index in 0..4 {
            models[1].overlay(&world, 1, index, 3000, b"while it is refilled").await;
            models[2].overlay(&world, 2, index, 3000, b"while it is refilled").await;
            models[4].overlay(&world, 4, index, 3000, b"where it had much").await;
        }
        models[6].fresh(&world, 6, 17).await;
        // It is filled, then behind, when seals wait: it repairs the rest at once.
        world.rounds(0..6).await;
        assert!(world.map().groups[0].members.iter().all(|m| !m.is_lost()));
        world.rounds(0..6).await;
        assert!(world.map().groups[0].members.iter().all(|m| m.state == MemberState::Current));
        for (stripe, model) in models.iter().enumerate() {
            world.check(stripe as u64, &model.0, &format!("{victim} is refilled, {is_copy}")).await;
        }
        for (stripe, model) in (0..).zip(&mut models[..]) {
            model.overlay(&world, stripe, (stripe % 4) as usize, 900, b"and goes on").await;
        }
        world.seal(file).await.unwrap();
        for (stripe, model) in models.iter().enumerate() {
            world
                .check(stripe as u64, &model.0, &format!("{victim} is refilled and sealed, {is_copy}"))
                .await;
        }
    }
}

/// Stripes are evicted while a target is away that was current when they were written. No member gets them
/// back from it, and it rebuilds nothing of them; later fills it gets.
#[tokio::test]
async fn a_returned_target_has_no_evicted_bytes() {
    for victim in [0, 2, 4, 5].map(TargetId) {
        let world = World::new(EC).await;
        let mut models: Vec<Model> = (0..5).map(|_| Model::new()).collect();
        for (stripe, model) in models.iter_mut().enumerate() {
            model.fresh(&world, stripe as u64, 1 + stripe).await;
            model.overlay(&world, stripe as u64, 1, 300, b"and changed since").await;
        }
        world.lose(victim).await;
        world.truncate_range(1, 4).await;
        let home = [bytes_of(2, CELL), bytes_of(3, CELL), bytes_of(4, CELL), bytes_of(5, 777)];
        fill(&world, 2, victim, &home).await;
        models[2].0 = home.to_vec();
        models[2].0.iter_mut().for_each(|cell| cell.resize(CELL, 0));
        for evicted in [1, 3] {
            models[evicted] = Model::new();
        }
        world.restart_target(victim).await;
        world.rounds(0..6).await;
        world.rounds(0..6).await;
        assert!(world.map().groups[0].members.iter().all(|m| m.state == MemberState::Current));
        for (stripe, model) in models.iter().enumerate() {
            world.check(stripe as u64, &model.0, &format!("{victim} is back, stripe {stripe}")).await;
        }
        for position in 0..6 {
            for stripe in [1, 3] {
                let request = StatCell { place: world.place(position), cell: cell(stripe, position) };
                let stat = world.call(position, request, &[]).await.unwrap().0;
                assert!(!stat.known, "stripe {stripe} at {position}: {stat:?}");
            }
        }
    }
}

/// A stripe is recalled from home, without its former bytes, on all targets but `victim`, which is away.
async fn fill(world: &Arc<World>, stripe: u64, victim: TargetId, home: &[Vec<u8>]) {
    let token_epoch = *world.token_epoch.lock().unwrap();
    for (position, bytes) in world.encode(home).iter().enumerate() {
        if world.place(position).target == victim {
            continue;
        }
        let request = WriteFragment {
            place: world.place(position),
            cell: cell(stripe, position),
            version: Version::new(token_epoch, FILL_COUNTER),
            mode: WriteMode::Fill,
            missing: weir_store::group::down_mask(&world.map().groups[0]),
            folded_seqs: vec![],
            block_crcs: block_crcs(bytes, CHECKSUM_BLOCK as usize),
        };
        world.call(position, request, bytes).await.unwrap();
    }
}

/// A stripe is evicted and recalled while a target is away, before the truncation was reported: numbers of
/// overlays began from the start, and the former ones that the target knows are not taken for the new.
#[tokio::test]
async fn restarted_numbers_are_not_mistaken_for_earlier_ones() {
    for victim in [0, 2, 4, 5].map(TargetId) {
        for is_sealed in [true, false] {
            let world = World::new(EC).await;
            let mut model = Model::new();
            model.fresh(&world, 0, 1).await;
            for n in 0..8 {
                model.overlay(&world, 0, n % 4, 500 * n, &bytes_of(n, 900)).await;
            }
            if is_sealed {
                world.seal(cell(0, 0).file).await.unwrap();
                model.overlay(&world, 0, 1, 40, b"not sealed").await;
            }
            world.lose(victim).await;
            *world.token_epoch.lock().unwrap() += 1;
            let home = [bytes_of(2, CELL), bytes_of(3, CELL), bytes_of(4, CELL), bytes_of(5, CELL)];
            fill(&world, 0, victim, &home).await;
            model.0 = home.to_vec();
            for index in 0..4 {
                model.overlay(&world, 0, index, 100, b"written since").await;
            }
            world.restart_target(victim).await;
            for index in [0, 2] {
                model.overlay(&world, 0, index, 7000, b"while it is behind").await;
            }
            world.rounds(0..6).await;
            assert!(world.map().groups[0].members.iter().all(|m| m.state == MemberState::Current));
            world.check(0, &model.0, &format!("{victim} is back, {is_sealed}")).await;
            for index in 0..4 {
                model.overlay(&world, 0, index, 9000, b"and goes on").await;
            }
            world.check(0, &model.0, &format!("{victim} is back and goes on, {is_sealed}")).await;
            world.seal(cell(0, 0).file).await.unwrap();
            world.check(0, &model.0, &format!("{victim} is back, sealed, {is_sealed}")).await;
        }
    }
}

/// A client that acts under a map in which a member is away learns that it has returned: else that member
/// would not get the truncation.
#[tokio::test]
async fn a_truncation_under_an_old_map_is_refused() {
    let world = World::new(EC).await;
    Model::new().fresh(&world, 0, 1).await;
    world.lose(TargetId(3)).await;
    let old = world.map();
    assert!(!old.members_to_truncate(|_| true).unwrap().contains_key(&TargetId(3)));
    world.restart_target(TargetId(3)).await;
    world.rounds(3..4).await;
    for (target, epochs) in old.members_to_truncate(|_| true).unwrap() {
        let request =
            DropFile { target, file: cell(0, 0).file, from_stripe: 0, to_stripe: u64::MAX, fence: 2, epochs };
        assert_eq!(world.dispatch(target, request, vec![]).await.unwrap_err().kind, ErrorKind::Stale);
    }
    for lost in [0, 1, 2] {
        world.lose(TargetId(lost)).await;
    }
    assert_eq!(world.map().members_to_truncate(|_| true).unwrap_err().kind, ErrorKind::Unavailable);
}

#[tokio::test]
async fn a_damaged_fragment_is_repaired() {
    let world = World::new(EC).await;
    let mut model = Model::new();
    model.fresh(&world, 0, 3).await;
    let slab = world.disks[2].0.join("slab-0000");
    let file = world.env.disk.open(&slab, weir_env::OpenMode::WRITE).unwrap();
    file.write_all_at(b"rot", 40_000).unwrap();
    let request = ReadCell {
        place: world.place(2),
        cell: cell(0, 2),
        view: ReadView::Merged,
        version: Version(0),
        offset: 0,
        len: CELL as u32,
    };
    // A reader gets the writer's checksums, sees that the bytes do not fit them, and notifies the holder,
    // which verifies.
    let (read, bytes) = world.call(2, request.clone(), &[]).await.unwrap();
    assert_ne!(block_crcs(&bytes, CHECKSUM_BLOCK as usize), read.block_crcs);
    let bad = MarkMissing { place: world.place(2), cell: cell(0, 2), version: Version(0), missing: 1 << 2 };
    world.call(2, bad, &[]).await.unwrap();
    // The inputs of a decode are verified first.
    let decoding = ReadCell { view: ReadView::Base, ..request };
    assert_eq!(world.call(2, decoding, &[]).await.map(drop).unwrap_err().kind, ErrorKind::Damaged);
    let node = world.nodes.lock().unwrap()[&TargetId(2)].clone();
    node.round_of(TargetId(2), false).await;
    world.check(0, &model.0, "mended").await;
    let report = &node.reports()[0];
    assert_eq!((report.damaged_blocks, report.repaired_blocks), (1, 1));
}

/// No client reads the rotten bytes; the scrub does, and continues where it was when the process ends.
#[tokio::test]
async fn a_scrub_finds_and_repairs_bit_rot() {
    let world = World::new(EC).await;
    let mut model = Model::new();
    for stripe in 0..40 {
        model.fresh(&world, stripe, 3).await; // all alike
    }
    let rotten = [(2, 40_000), (2, 700_000), (5, 130_000)];
    for (member, at) in rotten {
        let slab = world.disks[member].0.join("slab-0000");
        let file = world.env.disk.open(&slab, weir_env::OpenMode::WRITE).unwrap();
        file.write_all_at(b"rot", at).unwrap();
    }
    let nodes: Vec<_> = [2, 5].map(|n| world.nodes.lock().unwrap()[&TargetId(n)].clone()).into();
    let running: Vec<_> =
        nodes.iter().map(|node| world.env.tasks.spawn("run a node", node.clone().run())).collect();
    for (node, id, rot) in [(&nodes[0], 2, 2), (&nodes[1], 5, 1)] {
        let ask = |start| ScrubTarget { target: TargetId(id), start, bytes_per_s: u64::MAX };
        let begun = world.dispatch(TargetId(id), ask(true), vec![]).await.unwrap().0;
        assert_eq!(begun.pass.unwrap().ended_ns, None);
        let is_done = async || {
            let report = world.dispatch(TargetId(id), ask(false), vec![]).await.unwrap().0;
            let repaired = node.reports()[0].repaired_blocks;
            report.last.filter(|last| last.ended_ns.is_some() && repaired == rot)
        };
        let pass = loop {
            if let Some(pass) = is_done().await {
                break pass;
            }
            world.env.clock.sleep(Duration::from_millis(10)).await;
        };
        assert_eq!((pass.cells, pass.damaged_cells), (40, rot));
        assert!(pass.bytes >= 38 * CELL as u64);
    }
    running.iter().for_each(weir_env::TaskHandle::abort);
    for stripe in 0..40 {
        world.check(stripe, &model.0, "mended").await;
    }
}
