//! Claims about many small writes in any order: they cost messages by the stripe, not by the write, and every
//! byte is right afterwards, with any targets lost that the scheme allows.
use super::*;
use std::collections::BTreeMap;

const BLOCK: usize = 512;

/// Calls of a process by method, so far.
pub fn calls(lab: &Lab, node: &str) -> BTreeMap<String, u64> {
    let read = lab.env(node).watch.meters.read();
    let calls = read.into_iter().filter(|meter| meter.name == "weir_call_seconds");
    calls.map(|meter| (meter.label.1, meter.count)).collect()
}
fn since(before: &BTreeMap<String, u64>, now: &BTreeMap<String, u64>, methods: &[&str]) -> u64 {
    let count = |of: &BTreeMap<String, u64>, method: &str| of.get(method).copied().unwrap_or_default();
    methods.iter().map(|method| count(now, method) - count(before, method)).sum()
}

/// The numbers below `n` in an order of their own for each seed.
fn shuffled(lab: &Lab, seed: &str, n: usize) -> Vec<usize> {
    let rng = lab.world().rng(seed);
    let mut order: Vec<usize> = (0..n).collect();
    for at in (1..n).rev() {
        order.swap(at, rng.below(at as u64 + 1) as usize);
    }
    order
}

async fn write_blocks(c: &Client, h: Handle, blocks: &[usize], seed: u64, model: &mut Vec<u8>) {
    for block in blocks {
        let at = block * BLOCK;
        let data = pattern(seed, at, BLOCK);
        write(c, h, at, &data).await;
        model.resize(model.len().max(at + BLOCK), 0);
        model[at..at + BLOCK].copy_from_slice(&data);
    }
}

#[test]
fn small_writes_in_random_order_cost_messages_by_the_stripe() {
    Lab::new(1).run(6, |lab| async move {
        let a = lab.client("a").await;
        let (h, mut model) = (create(&a, "f").await, Vec::new());
        let order = shuffled(&lab, "order", 4 * STRIPE / BLOCK);
        let before = calls(&lab, "a");
        write_blocks(&a, h, &order, 1, &mut model).await;
        a.fsync(h).await.unwrap();
        let now = calls(&lab, "a");
        let (fragments, overlays) = (["WriteFragment"], ["WriteOverlay", "WriteOverlays"]);
        assert_eq!(since(&before, &now, &overlays), 0, "{now:?}");
        assert_eq!(since(&before, &now, &fragments), 4 * 6, "whole stripes");
        // A third of the blocks again: they are merged with the others.
        write_blocks(&a, h, &order[..order.len() / 3], 2, &mut model).await;
        a.fsync(h).await.unwrap();
        let later = calls(&lab, "a");
        assert_eq!(since(&now, &later, &overlays), 0, "{later:?}");
        assert_eq!(since(&now, &later, &fragments), 4 * 6, "whole stripes");
        // A few: they go alone, in one message for each cell that has some.
        write_blocks(&a, h, &order[..12], 3, &mut model).await;
        a.fsync(h).await.unwrap();
        let last = calls(&lab, "a");
        assert_eq!(since(&later, &last, &fragments), 0, "{last:?}");
        assert!((1..=12).contains(&since(&later, &last, &overlays)), "{last:?}");
        close(&a, h).await;
        let b = lab.client("b").await;
        same(&content(&b, "f").await, &model);
        lab.kill_storage(1);
        lab.kill_storage(4);
        same(&content(&lab.client("c").await, "f").await, &model);
    });
}

#[test]
fn extents_of_a_cell_share_one_message_if_others_write_too() {
    Lab::new(2).run(6, |lab| async move {
        let (a, b) = (lab.client("a").await, lab.client("b").await);
        let mut model = pattern(0, 0, STRIPE);
        let h = create(&a, "f").await;
        write(&a, h, 0, &model).await;
        a.fsync(h).await.unwrap();
        let blocks: Vec<usize> = (0..15).map(|n| 1 + 4 * n).collect();
        let before = calls(&lab, "a");
        write_blocks(&a, h, &blocks, 1, &mut model).await;
        // The other client's open takes the lease: the few dirty extents go to targets.
        let other = open(&b, "f", OpenMode::BOTH).await;
        same(&read(&b, other, 0, STRIPE).await, &model);
        let now = calls(&lab, "a");
        assert_eq!(since(&before, &now, &["WriteOverlays"]), 1, "{now:?}");
        assert_eq!(since(&before, &now, &["WriteOverlay", "WriteFragment"]), 0, "{now:?}");
        close(&a, h).await;
        close(&b, other).await;
        lab.kill_storage(0);
        lab.kill_storage(5);
        same(&content(&lab.client("c").await, "f").await, &model);
    });
}

/// A merge reads and replaces a stripe while a target is away, returns, and another one goes.
#[test]
fn merges_go_on_while_targets_come_and_go() {
    Lab::new(3).run(6, |lab| async move {
        let a = lab.client("a").await;
        let (h, mut model) = (create(&a, "f").await, Vec::new());
        let order = shuffled(&lab, "order", 3 * STRIPE / BLOCK);
        for (round, lost) in [None, Some(2), Some(5), Some(0)].into_iter().enumerate() {
            if let Some(n) = lost {
                lab.kill_storage(n);
            }
            let from = round * order.len() / 5;
            write_blocks(&a, h, &order[from..from + order.len() / 3], round as u64, &mut model).await;
            a.fsync(h).await.unwrap();
            same(&content(&lab.client(&format!("r{round}")).await, "f").await, &model);
            if let Some(n) = lost {
                lab.storage(n).await;
                lab.wait_whole(&lab.observe().await).await;
            }
        }
        close(&a, h).await;
        lab.kill_storage(3);
        lab.kill_storage(4);
        same(&content(&lab.client("last").await, "f").await, &model);
    });
}
