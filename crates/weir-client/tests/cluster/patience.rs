//! Claim: bytes and calls wait for servers that are busy or down until they return, at the same address or
//! at another one.
use super::*;
use bytes::Bytes;
use std::sync::Arc;
use std::time::Duration;
use weir_client::{ClientConfig, NoKernel, OpenMode};
use weir_proto::ErrorKind;

/// Longer than the patience of a command.
const LONG: Duration = Duration::from_secs(60);

async fn patient_client(lab: &Lab, name: &str) -> Client {
    let config = ClientConfig { patience: ClientConfig::MOUNT_PATIENCE, ..lab.config(name) };
    Client::connect(lab.env(name), config, Arc::new(NoKernel)).await.unwrap()
}
async fn mkdir(c: &Client, name: &str) -> weir_proto::Result<()> {
    c.mkdir(&root(), ROOT, name.as_bytes(), 0o755).await.map(drop)
}

#[test]
fn a_client_follows_every_server_to_another_address() {
    let lab = Lab::new(951);
    lab.move_to("coord", &[100, 200]);
    lab.run(6, |lab| async move {
        // It is configured with one address of the coordinator, and learns the other.
        let given = vec!["tcp:10.0.0.100:7000".parse().unwrap()];
        let config = ClientConfig { coordinators: given, ..lab.config("a") };
        let a = Client::connect(lab.env("a"), config, Arc::new(NoKernel)).await.unwrap();
        let expected = pattern(1, 0, 2 * STRIPE);
        let h = create(&a, "f").await;
        write(&a, h, 0, &expected[..STRIPE]).await;
        a.fsync(h).await.unwrap();
        write(&a, h, STRIPE, &expected[STRIPE..]).await;
        lab.kill_meta();
        lab.move_to("meta", &[111]);
        lab.meta().await;
        mkdir(&a, "d").await.unwrap();
        a.fsync(h).await.unwrap();
        lab.kill_coordinator();
        lab.move_to("coord", &[200]);
        lab.coordinator(6).await;
        (0..4).for_each(|n| lab.kill_storage(n));
        lab.move_to("s0", &[2]);
        lab.move_to("s1", &[1]); // two change places
        lab.move_to("s2", &[33]);
        lab.move_to("s3", &[34]);
        for n in 0..4 {
            lab.storage(n).await;
        }
        lab.all_current().await.unwrap();
        write(&a, h, 100, &expected[100..STRIPE + 100]).await;
        a.fsync(h).await.unwrap();
        same(&content(&lab.client("b").await, "f").await, &expected);
        assert_eq!(a.losses().0, 0);
    });
}

/// No message shows that the leader's machine lost power: it is only silent.
#[test]
fn a_client_leaves_a_silent_leader_for_the_one_that_took_over() {
    Lab::new(952).run(6, |lab| async move {
        let a = lab.client("a").await;
        let expected = pattern(1, 0, STRIPE + 500);
        let h = create(&a, "f").await;
        write(&a, h, 0, &expected).await;
        lab.world().power_cut("meta");
        lab.move_to("meta-b", &[111]);
        // It is known to be down after its silence.
        lab.world().sleep(Duration::from_secs(2)).await;
        lab.meta_named("meta-b").await;
        let begun = lab.world().now();
        mkdir(&a, "d").await.unwrap();
        assert!(lab.world().now().since(begun) < Duration::from_secs(5), "as after a restart");
        a.fsync(h).await.unwrap();
        same(&content(&lab.client("b").await, "f").await, &expected);
        assert_eq!(a.losses().0, 0);
    });
}

#[test]
fn writes_wait_for_the_leader_and_for_targets_beyond_parity() {
    for (seed, killed) in [(953, false), (954, true)] {
        Lab::new(seed).run(6, |lab| async move {
            let (a, world) = (patient_client(&lab, "a").await, lab.world());
            let (old, expected) = (pattern(1, 0, 2 * STRIPE), pattern(2, 0, 3 * STRIPE + 500));
            let (h, whole) = (create(&a, "f").await, create(&a, "whole").await);
            write(&a, whole, 0, &old).await;
            write(&a, h, 0, &old).await;
            a.fsync(h).await.unwrap();
            close(&a, whole).await;
            let c = patient_client(&lab, "c").await;
            let reading = open(&c, "whole", OpenMode::READ).await;
            write(&a, h, 0, &expected).await;
            for n in 0..3 {
                if killed { lab.kill_storage(n) } else { world.pause(&format!("s{n}")) }
            }
            world.pause("meta");
            let back = async {
                world.sleep(LONG).await;
                let waits = lab.waits().await.join("\n");
                assert!(waits.contains("a on host-a: the metadata leader meta"), "{waits}");
                assert!(waits.contains("t1 (s0), t2 (s1), t3 (s2)"), "{waits}");
                world.resume("meta");
                for n in 0..3 {
                    if killed { lab.storage(n).await } else { world.resume(&format!("s{n}")) }
                }
            };
            let calls = async { tokio::join!(a.fsync(h), mkdir(&a, "d"), c.read(reading, 0, 2 * STRIPE)) };
            let ((), (synced, made, got)) = tokio::join!(back, calls);
            synced.unwrap();
            made.unwrap();
            same(&got.unwrap().concat(), &old);
            same(&content(&lab.client("b").await, "f").await, &expected);
            assert_eq!(a.losses().0, 0);
            world.sleep(Duration::from_secs(10)).await;
            assert!(a.waits().is_empty() && lab.waits().await.is_empty());
        });
    }
}

/// No other client opens the files of a client from which the leader had no message for a lease term.
#[test]
fn a_disconnected_client_keeps_files_that_no_other_took() {
    Lab::new(955).run(6, |lab| async move {
        let (a, b) = (patient_client(&lab, "a").await, lab.client("b").await);
        let expected = pattern(1, 0, STRIPE + 500);
        let (kept, taken) = (create(&a, "kept").await, create(&a, "taken").await);
        write(&a, kept, 0, &expected).await;
        lab.cut_off("a");
        lab.world().sleep(LONG).await;
        lab.let_back("a");
        a.fsync(kept).await.unwrap();
        assert_eq!(a.losses().0, 0);
        same(&content(&b, "kept").await, &expected);
        // A file that another client opened meanwhile is lost, and named: the others' view counts.
        write(&a, taken, 0, &expected).await;
        lab.cut_off("a");
        lab.world().sleep(LONG).await;
        let hb = open(&b, "taken", OpenMode::BOTH).await;
        write(&b, hb, 0, &expected[..100]).await;
        close(&b, hb).await;
        lab.let_back("a");
        let e = a.fsync(taken).await.unwrap_err();
        assert_eq!(e.kind, ErrorKind::Io, "{e}");
        same(&content(&b, "taken").await[..100], &expected[..100]);
        assert!(a.losses().0 > 0);
    });
}

#[test]
fn a_client_without_patience_names_the_silent_server() {
    Lab::new(956).run(6, |lab| async move {
        let config = ClientConfig { patience: Duration::from_secs(3), ..lab.config("a") };
        let a = Client::connect(lab.env("a"), config, Arc::new(NoKernel)).await.unwrap();
        let h = create(&a, "f").await;
        lab.world().pause("meta");
        let e = mkdir(&a, "d").await.unwrap_err();
        assert_eq!(e.kind, ErrorKind::Deadline);
        assert!(e.context.contains("meta at tcp:10.0.0.101:7000"), "{e}");
        assert!(e.context.contains("it may happen or have happened"), "{e}");
        lab.world().resume("meta");
        mkdir(&a, "e").await.unwrap();
        (0..3).for_each(|n| lab.kill_storage(n));
        lab.world().sleep(Duration::from_secs(2)).await;
        a.write(h, 0, Bytes::from(pattern(1, 0, STRIPE))).await.unwrap();
        let e = a.fsync(h).await.unwrap_err();
        assert!(e.context.contains("t1 (s0), t2 (s1), t3 (s2)"), "{e}");
    });
}
