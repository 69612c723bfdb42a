//! Claims: a clone's files have all writes before the snapshot and no later one, for any client that has the
//! originals open; several clients write clones and originals at once, without effect on each other.
use std::collections::BTreeMap;
use std::time::Duration;
use weir_client::{Client, Handle, OpenMode, SetAttrs};
use weir_lab::files::{create, differs, read, write};
use weir_lab::{CELL, Lab, STRIPE, new_volume, pattern, quota, root};
use weir_proto::volume::Volume;
use weir_proto::{InodeId, VolumeId};

async fn open(c: &Client, dir: InodeId, name: &str) -> Handle {
    let ino = c.lookup(&root(), dir, name.as_bytes()).await.unwrap().unwrap().attr.ino;
    c.open(&root(), ino, OpenMode::BOTH).await.unwrap().handle
}
async fn clone(c: &Client, source: VolumeId, name: &str) -> Volume {
    let taken = c.take_snapshot(&root(), source, &format!("of-{name}")).await.unwrap();
    let new = new_volume(name, quota(0, 0));
    c.clone_volume(&root(), source, &taken.name, true, &new).await.unwrap()
}

#[test]
fn a_clone_has_all_earlier_writes_and_no_later_one() {
    let lab = Lab::new(171);
    lab.run(6, |lab| async move {
        let (a, b, c) = (lab.client("a").await, lab.client("b").await, lab.client("c").await);
        let (_, large) = create(&a, "large").await;
        let old = pattern(3, 0, STRIPE + 77);
        write(&a, large, 0, &old).await;
        // Written by two at once, straight through.
        let (_, by_a) = create(&a, "shared").await;
        let by_b = open(&b, InodeId::ROOT, "shared").await;
        write(&a, by_a, 0, &old[..2 * CELL]).await;
        write(&b, by_b, 2 * CELL, &old[2 * CELL..]).await;
        let made = clone(&c, VolumeId::ROOT, "clone").await;
        write(&a, large, 0, &pattern(4, 0, 100)).await;
        write(&a, by_a, 5, b"AAAA").await;
        write(&b, by_b, CELL, b"BBBB").await;
        let mut now = old.clone();
        now[5..9].copy_from_slice(b"AAAA");
        now[CELL..CELL + 4].copy_from_slice(b"BBBB");
        for name in ["large", "shared"] {
            let h = open(&c, made.root, name).await;
            assert_eq!(differs(&read(&c, h, old.len() + 1).await, &old), None, "{name}");
        }
        assert_eq!(differs(&read(&b, by_b, now.len() + 1).await, &now), None);
        // The clone is shared by writers, too.
        let (in_a, in_c) = (open(&a, made.root, "shared").await, open(&c, made.root, "shared").await);
        write(&a, in_a, STRIPE - 2, b"aaaa").await;
        write(&c, in_c, 7, b"cc").await;
        let mut clone = old.clone();
        clone[STRIPE - 2..STRIPE + 2].copy_from_slice(b"aaaa");
        clone[7..9].copy_from_slice(b"cc");
        for (client, h) in [(&a, in_a), (&c, in_c)] {
            assert_eq!(differs(&read(client, h, clone.len() + 1).await, &clone), None);
        }
        assert_eq!(differs(&read(&a, by_a, now.len() + 1).await, &now), None);
    });
}

#[test]
fn files_of_a_dead_writer_are_cloned_without_an_open() {
    let lab = Lab::with(172, "ec:4+2", 1000);
    lab.run(6, |lab| async move {
        let (a, b) = (lab.client("a").await, lab.client("b").await);
        let old = pattern(5, 0, STRIPE + 1234);
        for name in ["f", "nameless"] {
            let (_, h) = create(&a, name).await;
            write(&a, h, 0, &old).await;
        }
        let nameless = open(&b, InodeId::ROOT, "nameless").await;
        let made = clone(&b, VolumeId::ROOT, "clone").await;
        lab.world().kill("a");
        lab.env("b").clock.sleep(Duration::from_secs(5)).await; // of the world: its session ends
        b.unlink(&root(), InodeId::ROOT, b"nameless").await.unwrap();
        for name in ["f", "nameless"] {
            let h = open(&b, made.root, name).await;
            assert_eq!(differs(&read(&b, h, old.len() + 1).await, &old), None);
            write(&b, h, 10, b"new").await;
        }
        for original in [nameless, open(&b, InodeId::ROOT, "f").await] {
            assert_eq!(differs(&read(&b, original, old.len() + 1).await, &old), None);
        }
    });
}

/// What there is: a volume and its topmost directory, and what each of its files should have.
struct Side {
    volume: VolumeId,
    top: InodeId,
    files: BTreeMap<&'static str, Vec<u8>>,
}
const FILES: [&str; 2] = ["f", "g"];
const CLIENTS: [&str; 3] = ["a", "b", "c"];

#[test]
fn writes_to_a_clone_and_its_origin_stay_apart() {
    for seed in 173..181 {
        let lab = Lab::new(seed);
        lab.run(6, |lab| async move {
            let rng = lab.world().rng("clones");
            let below = |n: usize| rng.below(n as u64) as usize;
            let mut clients = Vec::new();
            for name in CLIENTS {
                clients.push(lab.client(name).await);
            }
            let mut sides = vec![Side { volume: VolumeId::ROOT, top: InodeId::ROOT, files: BTreeMap::new() }];
            for name in FILES {
                let (_, h) = create(&clients[0], name).await;
                clients[0].release(h).await.unwrap();
                sides[0].files.insert(name, Vec::new());
            }
            let mut handles: BTreeMap<(usize, VolumeId, &str), Handle> = BTreeMap::new();
            for step in 0..120 {
                let (who, name, side) = (below(CLIENTS.len()), FILES[below(FILES.len())], below(sides.len()));
                let (client, volume) = (&clients[who], sides[side].volume);
                let h = match handles.get(&(who, volume, name)) {
                    Some(h) => *h,
                    None => open(client, sides[side].top, name).await,
                };
                handles.insert((who, volume, name), h);
                let (what, count) = (below(20), sides.len());
                let file = sides[side].files.get_mut(name).unwrap();
                match what {
                    0..=8 => {
                        let (at, len) = (below(2 * STRIPE), [10, 5000, CELL, STRIPE][below(4)]);
                        let data = pattern(step, at, len);
                        write(client, h, at, &data).await;
                        file.resize(file.len().max(at + len), 0);
                        file[at..at + len].copy_from_slice(&data);
                    }
                    9 | 10 => {
                        let size = below(2 * STRIPE);
                        let set = SetAttrs { size: Some(size as u64), ..SetAttrs::default() };
                        let ino = client
                            .lookup(&root(), sides[side].top, name.as_bytes())
                            .await
                            .unwrap()
                            .unwrap()
                            .attr
                            .ino;
                        client.setattr(&root(), ino, Some(h), set).await.unwrap();
                        sides[side].files.get_mut(name).unwrap().resize(size, 0);
                    }
                    11 => client.fsync(h).await.unwrap(),
                    12 | 13 => {
                        client.release(h).await.unwrap();
                        handles.remove(&(who, volume, name));
                    }
                    14 if count < 5 => {
                        // One that is not listed yet is not kept.
                        let made = format!("c{step}");
                        if client.take_snapshot(&root(), volume, "probe").await.is_ok() {
                            client.delete_snapshot(&root(), volume, "probe").await.unwrap();
                            let made = clone(client, volume, &made).await;
                            let files = sides[side].files.clone();
                            sides.push(Side { volume: made.id, top: made.root, files });
                        }
                    }
                    _ => {
                        let got = read(client, h, file.len() + 1).await;
                        assert_eq!(
                            differs(&got, file),
                            None,
                            "seed {seed} step {step} volume {volume} {name}"
                        );
                    }
                }
            }
            for side in &sides {
                for (name, expected) in &side.files {
                    let h = open(&clients[1], side.top, name).await;
                    let got = read(&clients[1], h, expected.len() + 1).await;
                    assert_eq!(differs(&got, expected), None, "seed {seed} volume {} {name}", side.volume);
                }
            }
            assert!(sides.len() > 1, "something was cloned");
        });
    }
}
