//! Claims about comparing versions: a member whose index silently lost entries, or went back to an older
//! state, is found and repaired; the data of the other members is not touched.
mod lab;

use lab::*;
use std::sync::Arc;
use std::time::Duration;
use weir_proto::data::{ComparePass, CompareTarget};
use weir_proto::map::Scheme;
use weir_proto::{TargetId, Version};

const EC: Scheme = Scheme { data: 4, parity: 2 };

fn run(world: &Arc<World>, targets: &[u32]) -> Vec<weir_env::TaskHandle> {
    let node = |id: &u32| world.nodes.lock().unwrap()[&TargetId(*id)].clone();
    targets.iter().map(|id| world.env.tasks.spawn("run a node", node(id).run())).collect()
}

/// A pass of each target, begun now.
async fn compared(world: &Arc<World>, targets: &[u32]) -> Vec<ComparePass> {
    for id in targets {
        let ask = CompareTarget { target: TargetId(*id), start: true };
        assert!(world.dispatch(TargetId(*id), ask, vec![]).await.unwrap().0.asked);
    }
    let mut passes = Vec::new();
    for id in targets {
        let ended = loop {
            let ask = CompareTarget { target: TargetId(*id), start: false };
            let report = world.dispatch(TargetId(*id), ask, vec![]).await.unwrap().0;
            if let Some(last) = report.last.filter(|_| !report.asked) {
                break last;
            }
            world.env.clock.sleep(Duration::from_millis(10)).await;
        };
        passes.push(ended);
    }
    passes
}

#[tokio::test]
async fn members_that_went_back_unseen_are_found_and_repaired() {
    let world = World::new(EC).await;
    let mut models: Vec<Model> = Vec::new();
    for stripe in 0..7 {
        let mut model = Model::new();
        model.fresh(&world, stripe, 3 + stripe as usize).await;
        models.push(model);
    }
    // A data member and a parity member: as many as may be lost. The latter keeps all logs.
    let old = [1, 4].map(|id| (TargetId(id), world.copy_of(TargetId(id))));
    models[1].overlay(&world, 1, 2, 500, &[7; 300]).await;
    models[2].0 = (0..4).map(|i| bytes_of(90 + i, CELL)).collect();
    world.stripe(2, Version::new(1, 4), &models[2].0).await.unwrap();
    let mut new = Model::new();
    new.fresh(&world, 7, 50).await;
    models.push(new);
    for (id, copy) in &old {
        world.put_back(*id, copy).await;
    }
    let running = run(&world, &[0, 1, 4, 5]);
    let passes = compared(&world, &[1, 4]).await;
    for (pass, lacks) in passes.into_iter().zip([2, 3]) {
        assert_eq!((pass.groups, pass.groups_done, pass.stripes), (1, 1, 8));
        assert_eq!((pass.differing, pass.repaired, pass.mismatched), (lacks, lacks, 0), "{pass:?}");
    }
    for (stripe, model) in models.iter().enumerate() {
        world.check(stripe as u64, &model.0, "repaired").await;
    }
    for pass in compared(&world, &[0, 1, 4, 5]).await {
        assert_eq!((pass.differing, pass.mismatched), (0, 0), "{pass:?}");
    }
    running.iter().for_each(weir_env::TaskHandle::abort);
}

/// Its bytes fit their checksum, and its version is the present one.
#[tokio::test]
async fn parity_of_other_data_is_found_and_replaced() {
    let (world, other) = (World::new(EC).await, World::new(EC).await);
    let (mut model, mut others) = (Model::new(), Model::new());
    model.fresh(&world, 0, 3).await;
    others.fresh(&other, 0, 60).await;
    world.put_back(TargetId(4), &other.copy_of(TargetId(4))).await;
    let running = run(&world, &[4]);
    let pass = compared(&world, &[4]).await[0];
    assert_eq!((pass.differing, pass.encoded, pass.mismatched), (0, 1, 1), "{pass:?}");
    world.check(0, &model.0, "replaced").await;
    let pass = compared(&world, &[4]).await[0];
    assert_eq!((pass.encoded, pass.mismatched), (1, 0));
    running.iter().for_each(weir_env::TaskHandle::abort);
}
