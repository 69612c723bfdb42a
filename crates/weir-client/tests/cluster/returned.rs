//! Targets that return without what they had.
use super::*;
use weir_proto::ErrorKind;
use weir_proto::map::{ClusterMap, Group, MemberState};

const FILES: usize = 6;

/// Whole stripes, a short one, overlays on a base and overlays alone, a hole.
async fn write_all(c: &Client) -> Vec<Vec<u8>> {
    let mut all = Vec::new();
    for n in 0..FILES {
        let mut data = pattern(n as u64, 0, (1 + n % 2) * STRIPE + 40_000 * n);
        let h = create(c, &format!("f{n}")).await;
        write(c, h, 0, &data).await;
        c.fsync(h).await.unwrap();
        for (k, at) in [70_000, 200_000].into_iter().enumerate() {
            let part = pattern(100 + k as u64, n, 4096);
            write(c, h, at, &part).await;
            data[at..at + 4096].copy_from_slice(&part);
            c.fsync(h).await.unwrap();
        }
        if n % 3 == 2 {
            let end = data.len() + 2 * STRIPE;
            write(c, h, end, b"behind a hole").await;
            data.resize(end, 0);
            data.extend_from_slice(b"behind a hole");
        }
        close(c, h).await;
        all.push(data);
    }
    all
}

#[test]
fn targets_without_their_index_are_refilled_before_reads() {
    for lost in [&[1u8][..], &[0, 4], &[5], &[2, 3]] {
        Lab::new(70 + u64::from(lost[0])).run(6, |lab| async move {
            let a = lab.client("a").await;
            let all = write_all(&a).await;
            a.shutdown().await.unwrap();
            lab.stop_servers(6);
            lost.iter().for_each(|n| lab.lose_index(*n));
            lab.start_servers(6).await;
            let b = lab.client("b").await;
            for (n, data) in all.iter().enumerate() {
                same(&content(&b, &format!("f{n}")).await, data);
            }
            let seen = lab.observe().await;
            lab.wait_whole(&seen).await;
            // Their present data is all that the others lack.
            let others: Vec<u8> = (0..6).filter(|n| !lost.contains(n)).take(2).collect();
            others.iter().for_each(|n| lab.kill_storage(*n));
            let c = lab.client("c").await;
            for (n, data) in all.iter().enumerate() {
                same(&content(&c, &format!("f{n}")).await, data);
            }
        });
    }
}

#[test]
fn more_losses_than_parity_are_an_error_at_once_never_zeros() {
    Lab::new(80).run(6, |lab| async move {
        let a = lab.client("a").await;
        let all = write_all(&a).await;
        a.shutdown().await.unwrap();
        lab.stop_servers(6);
        [0, 2, 5].into_iter().for_each(|n| lab.lose_index(n));
        lab.start_servers(6).await;
        let b = lab.client("b").await;
        let clock = lab.env("b").clock;
        let begun = clock.now();
        for (n, data) in all.iter().enumerate() {
            let found = b.lookup(&root(), ROOT, format!("f{n}").as_bytes()).await.unwrap().unwrap();
            let h = b.open(&root(), found.attr.ino, OpenMode::READ).await.unwrap().handle;
            let mut errors = 0;
            for (at, expected) in (0..).step_by(CELL).zip(data.chunks(CELL)) {
                match b.read(h, at, expected.len()).await {
                    Ok(parts) => same(&parts.concat(), expected),
                    Err(e) => {
                        assert_eq!((e.kind, e.kind.errno()), (ErrorKind::Damaged, 5), "{e:?}");
                        assert!(
                            e.context.contains("stripe") && e.context.contains("without what they had"),
                            "{e:?}"
                        );
                        errors += 1;
                    }
                }
            }
            assert!(errors > 0, "f{n}");
        }
        assert!(clock.now().since(begun) < Duration::from_secs(5), "no call waits for a target that is away");
        let h = create(&b, "refused").await;
        let wrote = b.write(h, 0, Bytes::from(pattern(1, 0, 2 * STRIPE))).await;
        let error = wrote.map(|_| ()).and(b.flush(h).await).unwrap_err();
        assert_eq!(error.kind, ErrorKind::Damaged, "{error:?}");
    });
}

/// Each time a target goes down the others may be written to until fewer than k are left. Those that went
/// first are behind, and the last one has lost its data: too few are current to rebuild anything, but nothing
/// was written meanwhile.
#[test]
fn a_site_that_loses_power_and_one_disk_gets_all_back() {
    Lab::new(81).run(6, |lab| async move {
        let a = lab.client("a").await;
        let all = write_all(&a).await;
        a.shutdown().await.unwrap();
        for n in 0..6 {
            lab.kill_storage(n);
            lab.world().sleep(Duration::from_millis(50)).await;
        }
        lab.lose_index(5);
        for n in 0..6 {
            lab.storage(n).await;
        }
        // The parity of a group is on one of the last ones, by its number. Without one of them no member
        // knows the written bytes.
        let knows = |g: &Group| g.members.iter().skip(4).any(|m| (3..6).contains(&m.target.0));
        let seen = lab.observe().await;
        let whole = |g: &Group| g.members.iter().all(|m| m.state == MemberState::Current);
        let of_scheme = |map: &ClusterMap| -> Vec<Group> {
            map.groups.iter().filter(|g| g.scheme.data == 4).cloned().collect()
        };
        let mended = |map: &ClusterMap| of_scheme(map).iter().all(|g| whole(g) == knows(g));
        seen.wait_for(Duration::from_secs(60), mended).await.unwrap();
        let groups = of_scheme(&seen.map());
        assert!(groups.iter().any(knows) && !groups.iter().all(knows), "both kinds are there");
        let b = lab.client("b").await;
        let (mut read, mut lost) = (0, 0);
        for (n, data) in all.iter().enumerate() {
            let h = open(&b, &format!("f{n}"), OpenMode::READ).await;
            for (at, expected) in (0..).step_by(STRIPE).zip(data.chunks(STRIPE)) {
                match b.read(h, at, expected.len()).await {
                    Ok(parts) => {
                        same(&parts.concat(), expected);
                        read += 1;
                    }
                    Err(e) => {
                        assert_eq!(e.kind, ErrorKind::Damaged, "{e:?}");
                        lost += 1;
                    }
                }
            }
        }
        assert!(read > lost, "{read} stripes are readable, {lost} are not");
    });
}
