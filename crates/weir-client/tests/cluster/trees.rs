//! Trees that a client builds alone: directories come with their names, so that files in them need few
//! messages, and others see all of it at once.
use super::local_creates::{client_after, dir, read_in, small};
use super::*;
use weir_proto::ErrorKind;

const DIRS: u64 = 30;
const FILES: u64 = 6;

async fn below(c: &Client, parent: InodeId, name: &str) -> InodeId {
    c.mkdir(&root(), parent, name.as_bytes(), 0o755).await.unwrap().attr.ino
}

/// As `tar` does; returns the directories.
async fn build(lab: &Lab, c: &Client, top: InodeId) -> Vec<InodeId> {
    let mut dirs = vec![top];
    for n in 0..DIRS {
        let parent = dirs[dirs.len() / 2];
        dirs.push(below(c, parent, &format!("d{n}")).await);
        for file in 0..FILES {
            small(c, dirs[dirs.len() - 1], &format!("f{file}"), format!("{n} {file}").as_bytes()).await;
            lab.world().sleep(Duration::from_micros(50)).await;
        }
    }
    dirs
}

#[test]
fn a_tree_costs_a_few_messages_for_each_directory() {
    Lab::new(30).run(6, |lab| async move {
        let mut asked = Vec::new();
        for (name, after) in [("a", Some(8)), ("b", None)] {
            let c = client_after(&lab, name, after).await;
            let (top, before) = (dir(&c, name).await, c.status().asked);
            let dirs = build(&lab, &c, top).await;
            c.sync_names(*dirs.last().unwrap()).await.unwrap();
            asked.push(c.status().asked - before);
            let reader = lab.client(&format!("r{name}")).await;
            for (n, d) in (0..DIRS).zip(&dirs[1..]) {
                for file in 0..FILES {
                    let got = read_in(&reader, *d, &format!("f{file}")).await.unwrap();
                    same(&got, format!("{n} {file}").as_bytes());
                }
            }
            c.check();
        }
        // The first directories are made before the client knows that it builds a tree.
        let few = 3 * DIRS + 8 * FILES;
        assert!(asked[0] < few && asked[1] > DIRS * FILES, "messages with and without: {asked:?}");
    });
}

/// Names are free again after removals, taken after renames, and others see the same names.
#[test]
fn directories_are_made_after_changes_of_their_parent() {
    for seed in 31..35 {
        Lab::new(seed).run(6, |lab| async move {
            let (a, b) = (client_after(&lab, "a", Some(1)).await, client_after(&lab, "b", Some(1)).await);
            let (top, rng) = (dir(&a, "top").await, lab.world().rng("pauses"));
            for n in 0..40 {
                let (name, by, other) = (format!("n{n}"), [&a, &b][n % 2], [&b, &a][n % 2]);
                let d = below(by, top, &format!("in{n}")).await;
                small(by, d, "file", b"bytes").await;
                small(by, top, &name, b"first a file").await;
                let refused = by.mkdir(&root(), top, name.as_bytes(), 0o755).await.unwrap_err();
                assert_eq!(refused.kind, ErrorKind::Exists);
                by.unlink(&root(), top, name.as_bytes()).await.unwrap();
                let inner = below(by, top, &name).await;
                small(by, inner, "file", name.as_bytes()).await;
                if rng.below(2) == 0 {
                    lab.world().sleep(Duration::from_micros(rng.below(3000))).await;
                }
                same(&read_in(other, inner, "file").await.unwrap(), name.as_bytes());
                let refused = other.rmdir(&root(), top, format!("in{n}").as_bytes()).await.unwrap_err();
                assert_eq!(refused.kind, ErrorKind::Name(weir_proto::NameRule::NotEmpty));
                other.unlink(&root(), d, b"file").await.unwrap();
                other.rmdir(&root(), top, format!("in{n}").as_bytes()).await.unwrap();
                assert_eq!(
                    by.lookup(&root(), top, format!("in{n}").as_bytes()).await.unwrap().map(|s| s.attr.ino),
                    None
                );
            }
            a.check();
            b.check();
        });
    }
}

/// The answer is lost with the leader, which is asked again after its restart.
#[test]
fn a_restarted_leader_makes_each_directory_once() {
    for seed in 40..46 {
        Lab::new(seed).run(6, |lab| async move {
            let (a, b) = (client_after(&lab, "a", Some(1)).await, lab.client("b").await);
            let (top, rng) = (dir(&a, "top").await, lab.world().rng("deaths"));
            let restart = async {
                lab.world().sleep(Duration::from_micros(rng.below(20_000))).await;
                lab.kill_meta();
                lab.meta().await;
            };
            let ((), dirs) = tokio::join!(restart, build(&lab, &a, top));
            a.sync_names(*dirs.last().unwrap()).await.unwrap();
            for (n, d) in (0..DIRS).zip(&dirs[1..]) {
                let got = read_in(&b, *d, "f3").await.unwrap();
                same(&got, format!("{n} 3").as_bytes());
            }
            assert_eq!(a.losses().0, 0);
            a.check();
        });
    }
}
