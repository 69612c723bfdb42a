//! A claim about drains: no group has fewer current members at any moment, while clients write and read.
use bytes::Bytes;
use std::time::Duration;
use weir_client::{Client, Handle, OpenMode};
use weir_coord::Cluster;
use weir_lab::*;
use weir_proto::map::{ClusterMap, MemberState};
use weir_proto::{InodeId, TargetId};

const DRAINED: TargetId = TargetId(3);
const FILES: usize = 6;

fn places(map: &ClusterMap) -> usize {
    map.groups.iter().flat_map(|g| &g.members).filter(|m| m.target == DRAINED).count()
}

/// Checks each version of the map that arrives until the target has no place any more; returns how many there
/// were, and fails at a member that is not current.
async fn watch(cluster: Cluster) -> usize {
    let mut seen = 0;
    loop {
        let map = cluster.map();
        seen += 1;
        for group in &map.groups {
            let lacking: Vec<_> =
                group.members.iter().filter(|m| m.state != MemberState::Current).map(|m| m.target).collect();
            assert_eq!(lacking, [], "{} in map {}", group.id, map.version);
        }
        if places(&map) == 0 {
            return seen;
        }
        cluster.wait_newer(map.version, PATIENCE).await.unwrap();
    }
}

async fn open(c: &Client, n: usize) -> Handle {
    let name = format!("f{n}");
    c.create(&root(), InodeId::ROOT, name.as_bytes(), 0o644, true, OpenMode::BOTH).await.unwrap().handle
}

async fn save(c: &Client, h: Handle, offset: usize, data: &[u8]) {
    match c.try_write(h, offset as u64, data) {
        Some(done) => assert_eq!(done.unwrap(), data.len()),
        None => {
            assert_eq!(c.write(h, offset as u64, Bytes::copy_from_slice(data)).await.unwrap(), data.len())
        }
    }
    c.fsync(h).await.unwrap();
}

/// Whole stripes over old ones, small changes within stripes, and appends, until all places have moved.
async fn change(a: &Client, cluster: &Cluster, files: &mut [(Handle, Vec<u8>)]) -> usize {
    let mut rounds = 0;
    while places(&cluster.map()) > 0 || rounds < 3 {
        for (n, (h, data)) in files.iter_mut().enumerate() {
            let seed = (1000 * (rounds + 1) + n) as u64;
            for (offset, len) in [(STRIPE, STRIPE), (100 + 7000 * n, 3000), (data.len(), 20_000)] {
                let some = pattern(seed, offset, len);
                save(a, *h, offset, &some).await;
                data.resize(data.len().max(offset + len), 0);
                data[offset..offset + len].copy_from_slice(&some);
            }
        }
        rounds += 1;
        assert!(rounds < 500, "{} places are left", places(&cluster.map()));
    }
    rounds
}

#[test]
fn a_drain_costs_no_redundancy_at_any_moment() {
    Lab::new(94).run(8, |lab| async move {
        let (a, cluster) = (lab.client("a").await, lab.observe().await);
        let mut files = Vec::new();
        for n in 0..FILES {
            let (h, data) = (open(&a, n).await, pattern(n as u64, 0, 3 * STRIPE + 70_000));
            save(&a, h, 0, &data).await;
            files.push((h, data));
        }
        let before = places(&cluster.map());
        assert!(before > 0);
        cluster.drain_target(DRAINED, false, false).await.unwrap();
        let (maps, rounds) = tokio::join!(watch(cluster.clone()), change(&a, &cluster, &mut files));
        // Two places move at a time.
        assert!(maps > before / 2 && rounds >= 3, "{maps} maps, {before} places, {rounds} rounds of writes");
        assert_eq!(a.status().degraded_writes, 0);
        let b = lab.client("b").await;
        for (n, (_, data)) in files.iter().enumerate() {
            let found = b.lookup(&root(), InodeId::ROOT, format!("f{n}").as_bytes()).await.unwrap();
            let h = b
                .open(&root(), found.expect("the name exists").attr.ino, OpenMode::READ)
                .await
                .unwrap()
                .handle;
            assert!(b.read(h, 0, 1 << 30).await.unwrap().concat() == *data, "f{n}");
        }
        let mut used = u64::MAX;
        for _ in 0..120 {
            used = lab.status().await.targets.iter().find(|t| t.target == DRAINED).unwrap().used;
            if used == 0 {
                break;
            }
            lab.world().sleep(Duration::from_secs(1)).await;
        }
        assert_eq!(used, 0, "its cells are dropped");
    });
}
