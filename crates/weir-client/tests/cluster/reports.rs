//! When writes that went to targets directly are reported to the leader. Only reported bytes are shipped.
use bytes::Bytes;
use std::time::Duration;
use weir_client::{Allocate, Client, Handle, OpenMode};
use weir_lab::*;
use weir_proto::relation::What;
use weir_proto::{InodeId, VolumeId};

/// A reader of changes exists, so they are kept.
const CURSOR: &str = "test";
/// Write-back reports after a second.
const SOON: Duration = Duration::from_secs(4);

async fn create(client: &Client, name: &str) -> (InodeId, Handle) {
    let made = client.create(&root(), InodeId::ROOT, name.as_bytes(), 0o644, true, OpenMode::BOTH).await;
    let made = made.unwrap();
    (made.stat.attr.ino, made.handle)
}
async fn open(client: &Client, ino: InodeId) -> Handle {
    client.open(&root(), ino, OpenMode::BOTH).await.unwrap().handle
}
async fn write(client: &Client, handle: Handle, at: usize, len: usize) {
    client.write(handle, at as u64, Bytes::from(pattern(1, at, len))).await.unwrap();
}
/// Whether the leader knows that a byte was written after the change with this number.
async fn is_reported(client: &Client, ino: InodeId, byte: usize, after: u64) -> bool {
    let changes = client.changes(&root(), VolumeId::ROOT, None, after, Duration::ZERO).await.unwrap().changes;
    let byte = byte as u64;
    let names = |what: &What| matches!(what, What::Data { ino: of, offset, len } if *of == ino && (*offset..offset + len).contains(&byte));
    changes.iter().any(|named| names(&named.change.what))
}
async fn last_change(client: &Client) -> u64 {
    let changes = client.changes(&root(), VolumeId::ROOT, None, 0, Duration::ZERO).await.unwrap().changes;
    changes.last().map_or(0, |named| named.change.number)
}

#[test]
fn zeros_written_directly_are_reported_soon() {
    Lab::new(1).run(6, |lab| async move {
        let (a, b, env) = (lab.client("a").await, lab.client("b").await, lab.env("a"));
        a.acknowledge(&root(), VolumeId::ROOT, CURSOR, 0).await.unwrap();
        let (ino, h) = create(&a, "f").await;
        let _shared = open(&b, ino).await;
        write(&a, h, 0, 2 * STRIPE).await;
        let before = last_change(&b).await;
        a.fallocate(h, Allocate::PunchHole, CELL as u64, CELL as u64).await.unwrap();
        env.clock.sleep(SOON).await;
        assert!(is_reported(&b, ino, CELL, before).await);
    });
}

/// A stripe of which a part was sent for a sync is never dirty as a whole again.
#[test]
fn writes_after_a_sync_are_reported_soon() {
    Lab::new(4).run(6, |lab| async move {
        let (a, b, env) = (lab.client("a").await, lab.client("b").await, lab.env("a"));
        a.acknowledge(&root(), VolumeId::ROOT, CURSOR, 0).await.unwrap();
        let (ino, h) = create(&a, "f").await;
        write(&a, h, 0, 2 * STRIPE + CELL).await;
        a.fsync(h).await.unwrap();
        let before = last_change(&b).await;
        write(&a, h, 2 * STRIPE + CELL, STRIPE - CELL + STRIPE).await;
        env.clock.sleep(SOON).await;
        assert!(is_reported(&b, ino, 4 * STRIPE - 1, before).await);
    });
}

/// So home grows evenly, not by a second's worth at a time.
#[test]
fn a_fast_stream_is_reported_as_it_goes() {
    Lab::new(5).run(6, |lab| async move {
        let (a, b, env) = (lab.client("a").await, lab.client("b").await, lab.env("a"));
        a.acknowledge(&root(), VolumeId::ROOT, CURSOR, 0).await.unwrap();
        let (ino, h) = create(&a, "f").await;
        for stripe in 0..60 {
            write(&a, h, stripe * STRIPE, STRIPE).await;
            env.clock.sleep(Duration::from_millis(50)).await;
            if let Some(earlier) = stripe.checked_sub(8) {
                assert!(is_reported(&b, ino, earlier * STRIPE, 0).await, "{earlier} of {stripe}");
            }
        }
    });
}

/// A closed file must not be written any more, so no client could report it afterwards.
#[test]
fn a_close_waits_for_reports_of_write_back() {
    Lab::new(3).run(6, |lab| async move {
        let (a, b, env) = (lab.client("a").await, lab.client("b").await, lab.env("a"));
        a.acknowledge(&root(), VolumeId::ROOT, CURSOR, 0).await.unwrap();
        let (ino, h) = create(&a, "f").await;
        write(&a, h, 0, 2 * STRIPE).await;
        a.release(h).await.unwrap();
        let _shared = open(&b, ino).await;
        lab.world().slow_link("a", "meta", Duration::from_millis(200));
        for round in 0..12 {
            let h = open(&a, ino).await;
            write(&a, h, 0, CELL).await;
            let before = last_change(&b).await;
            write(&a, h, CELL, CELL).await;
            env.clock.sleep(Duration::from_millis(100 * round)).await;
            a.release(h).await.unwrap();
            assert!(is_reported(&b, ino, CELL, before).await, "round {round}");
        }
    });
}
