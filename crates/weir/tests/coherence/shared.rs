//! One file that two mounts have open for writing, each from a time of its own.
use crate::common::{Cluster, can_mount};
use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;

const ROUNDS: u64 = 60;

fn open(path: &Path) -> File {
    OpenOptions::new().read(true).write(true).create(true).truncate(false).open(path).unwrap()
}

/// Bytes that one mount has synced past the end that another mount knew are read there, for either order of
/// the opens and also if the reader writes.
#[test]
fn synced_growth_is_read_through_earlier_handles() {
    if !can_mount() {
        return;
    }
    let cluster = Cluster::start(2);
    for (n, block) in [100, 4096, 47_008].into_iter().enumerate() {
        for (writes, reader_first) in [(true, true), (false, true), (true, false), (false, false)] {
            let name = format!("f{n}{writes}{reader_first}");
            let [reader, writer] = [0, 1].map(|mount: usize| cluster.mounts[mount].join(&name));
            let (a, b) = match reader_first {
                true => {
                    let a = open(&reader);
                    (a, open(&writer))
                }
                false => {
                    let b = open(&writer);
                    (open(&reader), b)
                }
            };
            for round in 0..ROUNDS {
                let at = (2 * round + 1) * block as u64;
                let bytes = vec![round as u8 + 1; block];
                b.write_all_at(&bytes, at).unwrap();
                b.sync_all().unwrap();
                if writes {
                    a.write_all_at(&vec![0xff; block], at - block as u64).unwrap();
                }
                let mut got = vec![0; block];
                let len = a.read_at(&mut got, at).unwrap();
                let title = format!("round {round}, blocks of {block}, {name}");
                assert!(len == block && got == bytes, "{title}: {len} bytes");
            }
        }
    }
}
