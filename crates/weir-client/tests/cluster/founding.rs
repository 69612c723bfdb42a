//! Claims about a namespace that is founded again after its directory was lost: it assigns the same inode
//! numbers again, and neither shows nor changes what the former one left on targets; clients of the former
//! one are refused.
use std::collections::BTreeMap;
use std::time::Duration;
use weir_client::{Client, OpenMode, SetAttrs};
use weir_coord::Cluster;
use weir_lab::files;
use weir_lab::*;
use weir_proto::data::{Place, ReadCell, ReadView};
use weir_proto::{CellId, FileId, InodeId, NamespaceId, Version};

const FILES: u64 = 4;
const STRIPES: u64 = 2;
const BYTES: usize = STRIPES as usize * STRIPE;

/// The data cells of a namespace's files, read from the targets.
async fn cells(
    cluster: &Cluster,
    namespace: NamespaceId,
    inodes: &[InodeId],
) -> BTreeMap<CellId, (Version, Vec<u8>)> {
    let map = cluster.map();
    let mut found = BTreeMap::new();
    for inode in inodes {
        let file = FileId { namespace, inode: *inode };
        // The layout is the metadata's secret: every group is asked.
        for group in &map.groups {
            for (index, member) in group.members.iter().take(usize::from(group.scheme.data)).enumerate() {
                let place = Place { target: member.target, group: group.id, epoch: group.epoch };
                for stripe in 0..STRIPES {
                    let cell = CellId { file, stripe, index: index as u8 };
                    let read = ReadCell {
                        place,
                        cell,
                        view: ReadView::Merged,
                        version: Version(0),
                        offset: 0,
                        len: CELL as u32,
                    };
                    let asked = cluster.call_target(member.target, &read, vec![].into(), PATIENCE).await;
                    let (read, bytes) = asked.unwrap().into_parts();
                    if read.known {
                        found.insert(cell, (read.version, bytes.to_vec()));
                    }
                }
            }
        }
    }
    found
}

async fn set_size(c: &Client, ino: InodeId, bytes: usize) {
    let size = SetAttrs { size: Some(bytes as u64), ..SetAttrs::default() };
    c.setattr(&root(), ino, None, size).await.unwrap();
}

#[test]
fn a_refounded_namespace_reads_zeros_and_harms_no_old_cells() {
    Lab::new(71).run(6, |lab| async move {
        let (old, cluster) = (lab.client("a").await, lab.observe().await);
        let mut inodes = Vec::new();
        for n in 0..FILES {
            let (ino, h) = files::create(&old, &format!("f{n}")).await;
            files::write(&old, h, 0, &pattern(n, 0, BYTES)).await;
            old.fsync(h).await.unwrap();
            old.release(h).await.unwrap();
            inodes.push(ino);
        }
        let id = |map: &weir_proto::map::ClusterMap| map.namespaces[0].id;
        let before = id(&cluster.map());
        let kept = cells(&cluster, before, &inodes).await;
        assert_eq!(kept.len() as u64, FILES * STRIPES * 4, "the cells of all files were found");

        lab.lose_meta();
        lab.meta().await;
        cluster.wait_for(PATIENCE, |map| id(map) != before).await.unwrap();
        let new = lab.client("b").await;
        for n in 0..FILES {
            let (ino, h) = files::create(&new, &format!("f{n}")).await;
            assert_eq!(ino, inodes[n as usize], "the number is given again");
            set_size(&new, ino, BYTES).await;
            assert!(
                files::read(&new, h, BYTES).await.iter().all(|byte| *byte == 0),
                "a sparse file shows old bytes"
            );
            let written = pattern(100 + n, 0, CELL);
            files::write(&new, h, CELL / 2, &written).await;
            new.fsync(h).await.unwrap();
            let expected = [vec![0; CELL / 2], written, vec![0; BYTES - CELL / 2 - CELL]].concat();
            assert_eq!(files::differs(&files::read(&new, h, BYTES).await, &expected), None);
            new.release(h).await.unwrap();
        }
        assert!(cells(&cluster, before, &inodes).await == kept, "cells of the namespace before were changed");

        // A client of the former namespace has no session here, with any number.
        let create =
            async { old.create(&root(), InodeId::ROOT, b"stranger", 0o644, true, OpenMode::BOTH).await };
        let served = lab.world().clock().timeout(Duration::from_secs(60), create).await;
        let e = served.expect("it is answered").expect_err("a client of another namespace is served");
        assert_eq!(e.kind.errno(), 5, "neither served nor told that something does not exist: {e:?}");
        assert!(new.lookup(&root(), InodeId::ROOT, b"stranger").await.unwrap().is_none());
    });
}
