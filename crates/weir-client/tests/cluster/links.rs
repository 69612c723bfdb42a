//! A link that is cut between two nodes, while both are well: on a whole simulated cluster.
use super::*;
use weir_env::Instant;
use weir_proto::coord::CutLink;
use weir_proto::map::MemberState;

/// The delay that a cut link may add to one operation, once.
const STALL_MAX: Duration = Duration::from_secs(2);
/// A link that works again is used within this time: 5 s after it was cut for the first time.
const HEALED_AFTER: Duration = Duration::from_secs(12);

#[derive(Clone, Copy, Debug)]
enum Way {
    There,
    Back,
    Both,
}

fn cut(lab: &Lab, a: &str, b: &str, way: Way) {
    match way {
        Way::There => lab.world().partition_one_way(a, b),
        Way::Back => lab.world().partition_one_way(b, a),
        Way::Both => lab.world().partition(a, b),
    }
}

/// Pairs of nodes without a link, by name.
async fn cut_links(lab: &Lab) -> Vec<(String, String)> {
    let status = lab.status().await;
    let name = |link: &CutLink| status.map.node(link.to).map(|n| n.name.clone()).unwrap_or_default();
    status.links.iter().map(|link| (link.from.clone(), name(link))).collect()
}

async fn none_is_cut(lab: &Lab) {
    let until = lab.world().now() + HEALED_AFTER;
    while !cut_links(lab).await.is_empty() {
        assert!(lab.world().now() < until, "{:?}", cut_links(lab).await);
        lab.world().sleep(Duration::from_millis(500)).await;
    }
}

/// Overwrites a part of each cell, each made durable; the longest of them.
async fn overwrite(lab: &Lab, c: &Client, h: Handle, seed: u64, expected: &mut [u8]) -> Duration {
    let mut longest = Duration::ZERO;
    for cell in 0..expected.len() / CELL {
        let at = cell * CELL + 300 * seed as usize;
        let new = pattern(seed, at, 4096);
        expected[at..at + new.len()].copy_from_slice(&new);
        let begun: Instant = lab.world().now();
        write(c, h, at, &new).await;
        c.fsync(h).await.unwrap();
        longest = longest.max(lab.world().now().since(begun));
    }
    longest
}

async fn three_stripes(a: &Client) -> (Handle, Vec<u8>) {
    let expected = pattern(1, 0, 3 * STRIPE);
    let h = create(a, "f").await;
    write(a, h, 0, &expected).await;
    a.fsync(h).await.unwrap();
    (h, expected)
}

#[test]
fn a_client_goes_around_a_cut_link_and_both_ends_are_named() {
    for (seed, way) in [(70, Way::There), (71, Way::Back), (72, Way::Both)] {
        for victim in [0, 3, 5] {
            Lab::new(seed + 10 * victim).run(6, |lab| async move {
                let a = lab.client("a").await;
                let (h, mut expected) = three_stripes(&a).await;
                let epochs = |lab: Lab| async move {
                    lab.status().await.map.groups.iter().map(|g| g.epoch).collect::<Vec<_>>()
                };
                let before = epochs(lab.clone()).await;
                let s = format!("s{victim}");
                cut(&lab, "a", &s, way);
                let longest = overwrite(&lab, &a, h, 2, &mut expected).await;
                assert!(longest < STALL_MAX, "{way:?} {s}: an overwrite took {longest:?}");
                let again = overwrite(&lab, &a, h, 3, &mut expected).await;
                assert!(again < STALL_MAX / 10, "{way:?} {s}: later an overwrite took {again:?}");
                assert_eq!(cut_links(&lab).await, [("a".to_owned(), s.clone())], "{way:?}");
                assert_eq!(epochs(lab.clone()).await, before, "no group does without a member for it");
                assert_eq!(read(&a, h, 0, expected.len()).await, expected);

                lab.world().heal("a", &s);
                none_is_cut(&lab).await;
                overwrite(&lab, &a, h, 4, &mut expected).await;
                close(&a, h).await;
                assert_eq!(a.status().degraded_writes, 0);
                lab.kill_storage((victim as u8 + 1) % 6);
                lab.kill_storage((victim as u8 + 2) % 6);
                same(&content(&lab.client("b").await, "f").await, &expected);
            });
        }
    }
}

#[test]
fn targets_that_cannot_reach_each_other_hold_up_no_overwrite() {
    for (seed, way) in [(110, Way::There), (111, Way::Back), (112, Way::Both)] {
        Lab::new(seed).run(6, |lab| async move {
            let a = lab.client("a").await;
            let (h, mut expected) = three_stripes(&a).await;
            for (one, other) in [("s0", "s1"), ("s2", "s5"), ("s3", "s4")] {
                cut(&lab, one, other, way);
            }
            let mut longest = Duration::ZERO;
            for round in 2..5 {
                longest = longest.max(overwrite(&lab, &a, h, round, &mut expected).await);
            }
            assert!(longest < STALL_MAX, "{way:?}: an overwrite took {longest:?}");
            let named = cut_links(&lab).await;
            assert!(!named.is_empty() && named.iter().all(|(from, _)| from.starts_with('s')), "{named:?}");
            let map = lab.status().await.map;
            let all_current = |m: &weir_proto::map::Member| m.state == MemberState::Current;
            assert!(map.groups.iter().all(|g| g.members.iter().all(all_current)), "{map:?}");
            lab.world().heal_all();
            none_is_cut(&lab).await;
            overwrite(&lab, &a, h, 5, &mut expected).await;
            close(&a, h).await;
            lab.kill_storage(1);
            lab.kill_storage(4);
            same(&content(&lab.client("b").await, "f").await, &expected);
        });
    }
}

/// Whole stripes go to all members at once, so they are the first to notice.
#[test]
fn a_stream_over_a_cut_link_keeps_its_redundancy() {
    Lab::new(120).run(6, |lab| async move {
        let a = lab.client("a").await;
        let (h, _) = three_stripes(&a).await;
        close(&a, h).await;
        cut(&lab, "a", "s2", Way::Both);
        for n in 0..4 {
            let h = create(&a, &format!("g{n}")).await;
            let begun = lab.world().now();
            write(&a, h, 0, &pattern(n, 0, 3 * STRIPE)).await;
            close(&a, h).await;
            let took = lab.world().now().since(begun);
            assert!(took < STALL_MAX, "file {n} took {took:?}");
        }
        assert_eq!(a.status().degraded_writes, 0);
        lab.kill_storage(0);
        lab.kill_storage(1);
        let b = lab.client("b").await;
        for n in 0..4 {
            same(&content(&b, &format!("g{n}")).await, &pattern(n, 0, 3 * STRIPE));
        }
    });
}

/// A client without a link to any target harms no other client.
#[test]
fn a_client_that_reaches_no_target_costs_no_redundancy() {
    Lab::new(121).run(6, |lab| async move {
        let (a, b) = (lab.client("a").await, lab.client("b").await);
        let (h, _) = three_stripes(&a).await;
        let hb = create(&b, "g").await;
        (0..6).for_each(|n| lab.world().partition("a", &format!("s{n}")));
        let writing = lab.env("a").tasks.spawn("write", async move {
            for at in (0..3 * STRIPE).step_by(CELL) {
                write(&a, h, at, b"changed").await;
                let _ = a.fsync(h).await; // nothing of it can get there
            }
        });
        lab.world().sleep(Duration::from_secs(3)).await;
        let begun = lab.world().now();
        write(&b, hb, 0, &pattern(3, 0, 3 * STRIPE)).await;
        b.fsync(hb).await.unwrap();
        assert!(lab.world().now().since(begun) < STALL_MAX);
        assert_eq!(b.status().degraded_writes, 0);
        writing.abort();
    });
}

/// It keeps its session alive, but can save nothing: it is waited for once, for any number of its files.
#[test]
fn a_client_that_returns_no_lease_is_waited_for_once() {
    const FILES: u64 = 8;
    Lab::with(122, "ec:4+2", 10_000).run(6, |lab| async move {
        let (a, b) = (lab.client("a").await, lab.client("b").await);
        let mut handles = Vec::new();
        for n in 0..FILES {
            let h = create(&a, &format!("f{n}")).await;
            write(&a, h, 0, &pattern(n, 0, 2 * CELL)).await;
            a.fsync(h).await.unwrap();
            handles.push(h);
        }
        (0..6).for_each(|n| lab.world().partition("a", &format!("s{n}")));
        for h in &handles {
            write(&a, *h, CELL, b"never saved").await;
        }
        let begun = lab.world().now();
        let mut waits = Vec::new();
        for n in 0..FILES {
            let asked = lab.world().now();
            same(&content(&b, &format!("f{n}")).await, &pattern(n, 0, 2 * CELL));
            waits.push(lab.world().now().since(asked));
            // Its writes keep failing meanwhile, under leases if it got some.
            for h in &handles {
                let _ = a.try_write(*h, CELL as u64, b"never saved");
            }
        }
        let all = lab.world().now().since(begun);
        assert!(all < Duration::from_secs(20), "{all:?} for all files: {waits:?}");
        // The client learns that it lost something, and continues when it can save again.
        lab.world().heal_all();
        lab.world().sleep(Duration::from_secs(40)).await;
        let synced = a.fsync(handles[0]).await;
        assert!(synced.is_err(), "lost writes are an error of fsync");
        let h = create(&a, "after").await;
        write(&a, h, 0, b"as ever").await;
        close(&a, h).await;
        assert_eq!(content(&b, "after").await, b"as ever");
    });
}

#[test]
fn the_space_is_reported_without_the_coordinator() {
    Lab::new(123).run(6, |lab| async move {
        let a = lab.client("a").await;
        lab.world().sleep(Duration::from_secs(3)).await; // the targets have reported their usage
        let seen = lab.client("b").await;
        lab.world().sleep(Duration::from_secs(1)).await;
        let known = a.statfs().await.unwrap();
        assert!(known.capacity_bytes > 0);
        lab.world().kill("coord");
        for client in [&a, &seen] {
            let begun = lab.world().now();
            let shown = client.statfs().await.unwrap();
            assert_eq!(shown.capacity_bytes, known.capacity_bytes);
            assert!(lab.world().now().since(begun) < STALL_MAX);
        }
    });
}

/// The coordinator sees it, and no other node does.
#[test]
fn a_target_that_only_the_coordinator_reaches_is_done_without() {
    for (seed, victim) in [(130, "s1"), (131, "s5")] {
        Lab::new(seed).run(6, |lab| async move {
            let a = lab.client("a").await;
            let (h, mut expected) = three_stripes(&a).await;
            let others = (0..6).map(|n| format!("s{n}")).filter(|s| s != victim);
            others.chain(["a".into()]).for_each(|other| lab.world().partition(victim, &other));
            let longest = overwrite(&lab, &a, h, 2, &mut expected).await;
            assert!(longest < 3 * STALL_MAX, "{victim}: an overwrite took {longest:?}");
            lab.world().heal_all();
            lab.world().sleep(Duration::from_secs(70)).await; // demoted for a minute at most
            lab.all_current().await.unwrap();
            close(&a, h).await;
            lab.kill_storage(0);
            lab.kill_storage(2);
            same(&content(&lab.client("b").await, "f").await, &expected);
        });
    }
}

/// It answers others late, too: it has more to do than it can, and relays would add to that.
#[test]
fn calls_to_a_slow_node_are_not_relayed() {
    Lab::new(130).run(6, |lab| async move {
        let a = lab.client("a").await;
        let (h, mut expected) = three_stripes(&a).await;
        // All storage nodes are connected.
        overwrite(&lab, &a, h, 2, &mut expected).await;
        for n in [0, 1, 2, 4, 5] {
            lab.world().slow_link("s3", &format!("s{n}"), Duration::from_millis(280));
        }
        lab.world().slow_link("s3", "a", Duration::from_secs(2));
        overwrite(&lab, &a, h, 3, &mut expected).await;
        assert_eq!(cut_links(&lab).await, []);
        lab.world().slow_link("s3", "a", Duration::ZERO);
        assert_eq!(read(&a, h, 0, expected.len()).await, expected);
    });
}

/// Both ends are well, and so is every other link.
#[test]
fn a_leader_behind_a_cut_link_is_reached_through_another_node() {
    for way in [Way::There, Way::Back, Way::Both] {
        Lab::new(140).run(6, |lab| async move {
            let a = lab.client("a").await;
            let (h, mut expected) = three_stripes(&a).await;
            cut(&lab, "a", "meta", way);
            let began = lab.world().now();
            create(&a, "while it is cut").await;
            let took = lab.world().now().since(began);
            assert!(took <= Duration::from_secs(3), "{way:?}: {took:?}");
            // The next ones do not wait, and no lease was lost.
            for n in 0..50 {
                let began = lab.world().now();
                create(&a, &format!("n{n}")).await;
                overwrite(&lab, &a, h, 2 + n % 7, &mut expected).await;
                let took = lab.world().now().since(began);
                assert!(took <= Duration::from_secs(1), "{way:?}: {took:?}");
                lab.world().sleep(Duration::from_millis(400)).await;
            }
            lab.world().heal_all();
            lab.world().sleep(Duration::from_secs(60)).await;
            // The direct link is used again: the others are not needed any more.
            (0..6).for_each(|n| cut(&lab, "a", &format!("s{n}"), Way::Both));
            for n in 0..20 {
                let began = lab.world().now();
                create(&a, &format!("m{n}")).await;
                let took = lab.world().now().since(began);
                assert!(took <= Duration::from_millis(500), "{way:?}: {took:?}");
                lab.world().sleep(Duration::from_secs(1)).await;
            }
            lab.world().heal_all();
            assert_eq!(read(&a, h, 0, expected.len()).await, expected);
        });
    }
}
