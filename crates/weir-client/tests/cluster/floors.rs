//! Claims about write floors: a volume takes no write with fewer current members than it asks for, keeps what
//! it took, and serves it.
use bytes::Bytes;
use std::time::Duration;
use weir_client::{Client, Handle, OpenMode};
use weir_lab::*;
use weir_proto::volume::{Quota, Volume};
use weir_proto::{ErrorKind, InodeId, Result};

async fn create(c: &Client, dir: InodeId, name: &str) -> Handle {
    c.create(&root(), dir, name.as_bytes(), 0o644, true, OpenMode::BOTH).await.unwrap().handle
}
/// Written and synced.
async fn save(c: &Client, h: Handle, offset: usize, data: &[u8]) -> Result<()> {
    match c.try_write(h, offset as u64, data) {
        Some(done) => done?,
        None => c.write(h, offset as u64, Bytes::copy_from_slice(data)).await?,
    };
    c.fsync(h).await
}
async fn floored(c: &Client, members: u8) -> Volume {
    let made = c.create_volume(&root(), &new_volume("v", Quota::NONE)).await.unwrap();
    c.set_write_floor(&root(), &made, members).await.unwrap()
}
async fn read(c: &Client, dir: InodeId, name: &str) -> Vec<u8> {
    let found = c.lookup(&root(), dir, name.as_bytes()).await.unwrap().expect("the name exists");
    let h = c.open(&root(), found.attr.ino, OpenMode::READ).await.unwrap().handle;
    let bytes = c.read(h, 0, 1 << 30).await.unwrap().concat();
    c.release(h).await.unwrap();
    bytes
}
async fn all_but(lab: &Lab, current: usize) {
    let cluster = lab.observe().await;
    while !cluster.map().groups.iter().filter(|g| g.scheme.data == 4).all(|g| g.current_count() == current) {
        let version = cluster.map().version;
        cluster.wait_newer(version, PATIENCE).await.unwrap();
    }
}

#[test]
fn below_its_floor_a_volume_is_read_and_not_written() {
    Lab::new(91).run(6, |lab| async move {
        let a = lab.client("a").await;
        let v = floored(&a, 6).await;
        let data = pattern(1, 0, 2 * STRIPE + 5000);
        let h = create(&a, v.root, "kept").await;
        save(&a, h, 0, &data).await.unwrap();
        lab.kill_storage(2);
        all_but(&lab, 5).await;
        let whole = create(&a, v.root, "refused").await;
        for (h, offset, len) in [(whole, 0, STRIPE), (h, 100, 10)] {
            let refused = save(&a, h, offset, &pattern(2, offset, len)).await.unwrap_err();
            assert_eq!(refused.kind, ErrorKind::Unavailable, "{refused}");
            for word in ["5 of its targets are current", "its volume's write floor is 6", "t3"] {
                assert!(refused.context.contains(word), "{refused}");
            }
        }
        let b = lab.client("b").await;
        assert!(read(&b, v.root, "kept").await == data, "what was synced");
        let outside = create(&a, InodeId::ROOT, "outside").await;
        save(&a, outside, 0, &data).await.unwrap();
        // With a lower floor it takes them, as soon as the client has asked again.
        a.set_write_floor(&root(), &v, 5).await.unwrap();
        lab.world().sleep(Duration::from_secs(6)).await;
        let again = create(&a, v.root, "again").await;
        save(&a, again, 0, &data).await.unwrap();
        assert!(read(&b, v.root, "again").await == data);
    });
}

#[test]
fn a_write_below_the_floor_waits_for_the_member() {
    Lab::new(92).run(6, |lab| async move {
        let a = lab.client("a").await;
        let v = floored(&a, 6).await;
        let h = create(&a, v.root, "f").await;
        let data = pattern(1, 0, STRIPE + 7000);
        lab.kill_storage(4);
        all_but(&lab, 5).await;
        let mut saving = Box::pin(save(&a, h, 0, &data));
        let waited = lab.env("a").clock.timeout(Duration::from_secs(8), &mut saving).await;
        assert!(waited.is_err(), "it was not stored with 5 members");
        let waits = lab.waits().await;
        assert!(waits.iter().any(|w| w.contains("write floor is 6")), "{waits:?}");
        lab.storage(4).await;
        saving.await.unwrap();
        lab.all_current().await.unwrap();
        assert_eq!(a.status().degraded_writes, 0);
        assert!(read(&lab.client("b").await, v.root, "f").await == data);
    });
}

#[test]
fn a_floor_holds_for_files_that_are_open_already() {
    Lab::new(93).run(6, |lab| async move {
        let (a, b) = (lab.client("a").await, lab.client("b").await);
        let v = a.create_volume(&root(), &new_volume("v", Quota::NONE)).await.unwrap();
        let h = create(&a, v.root, "f").await;
        save(&a, h, 0, &pattern(1, 0, 1000)).await.unwrap();
        let refused = b.set_write_floor(&root(), &v, 7).await.unwrap_err();
        assert!(refused.context.contains("with ec:4+2 it is 4 to 6"), "{refused}");
        b.set_write_floor(&root(), &v, 6).await.unwrap();
        assert_eq!(
            b.write_floors().await.unwrap().iter().map(|f| (f.volume, f.members)).collect::<Vec<_>>(),
            [(v.id, 6)]
        );
        lab.kill_storage(1);
        all_but(&lab, 5).await;
        let refused = save(&a, h, 0, &pattern(2, 0, STRIPE)).await.unwrap_err();
        assert!(refused.context.contains("write floor"), "{refused}");
        b.set_write_floor(&root(), &v, 0).await.unwrap();
        lab.world().sleep(Duration::from_secs(6)).await;
        save(&a, h, 0, &pattern(3, 0, STRIPE)).await.unwrap();
    });
}
