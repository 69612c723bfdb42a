//! Claim: `fallocate` has the same results, sizes and contents as on a local file system, in each mode, for
//! each layout of data and holes, with and without a limit; ranges that are cut out of a file or pushed into
//! it are refused.
use super::common::{Cluster, can_mount, volume};
use super::tree::fnv;
use rustix::fs::{FallocateFlags as How, fallocate};
use std::fs::{File, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;

const MIB: u64 = 1 << 20;

/// A file: its ranges with data, and its size.
struct Layout {
    what: &'static str,
    data: &'static [(u64, u64)],
    size: u64,
}

const LAYOUTS: &[Layout] = &[
    Layout { what: "an empty file", data: &[], size: 0 },
    Layout { what: "a small file", data: &[(0, 300)], size: 300 },
    Layout { what: "a small file with a hole", data: &[(0, 10), (2000, 5)], size: 3000 },
    Layout { what: "no hole", data: &[(0, 3 * MIB + 77)], size: 3 * MIB + 77 },
    Layout { what: "a hole alone", data: &[], size: 3 * MIB },
    Layout { what: "a hole at the end", data: &[(0, 100_000)], size: 3 * MIB + 5 },
    Layout { what: "a hole at the beginning", data: &[(2 * MIB, 200_000)], size: 2 * MIB + 200_000 },
    Layout {
        what: "holes and data by turns",
        data: &[(0, 5000), (MIB, 5000), (2 * MIB + 5, 70_000)],
        size: 3 * MIB,
    },
];

/// In the hole, in the data, over both, at the end, past it with a gap: offset and length.
const RANGES: [(u64, u64); 7] = [
    (0, 1),
    (100, 3000),
    (MIB / 2, 4096),
    (MIB - 100, MIB + 200),
    (0, 3 * MIB),
    (2 * MIB, 2 * MIB),
    (4 * MIB, 1000),
];

const MODES: [How; 8] = [
    How::empty(),
    How::KEEP_SIZE,
    How::PUNCH_HOLE.union(How::KEEP_SIZE),
    How::ZERO_RANGE,
    How::ZERO_RANGE.union(How::KEEP_SIZE),
    How::PUNCH_HOLE,
    How::COLLAPSE_RANGE,
    How::INSERT_RANGE,
];

fn make(path: &Path, layout: &Layout) -> File {
    let file = OpenOptions::new().read(true).write(true).create_new(true).open(path).unwrap();
    for (n, (offset, len)) in layout.data.iter().enumerate() {
        let bytes: Vec<u8> = (0..*len).map(|at| (at * 7 + n as u64 + 1) as u8 | 1).collect();
        file.write_all_at(&bytes, *offset).unwrap();
    }
    file.set_len(layout.size).unwrap();
    file
}

/// The answer, the file's size and its content, and both again after a write at the end of the range.
fn outcome(file: &File, other: &Path, how: How, (offset, len): (u64, u64)) -> String {
    let done = fallocate(file, how, offset, len);
    let seen = content(file);
    let there = content(&File::open(other).unwrap());
    file.write_all_at(b"more", offset + len - 1).unwrap();
    format!("{done:?}, {seen}; another mount: {there}; written: {}", content(file))
}

fn content(file: &File) -> String {
    let mut bytes = vec![1; file.metadata().unwrap().len() as usize];
    file.read_exact_at(&mut bytes, 0).unwrap();
    format!("{} bytes {:x}", bytes.len(), fnv(&bytes))
}

#[test]
fn fallocate_answers_as_on_a_local_file_system() {
    if !can_mount() {
        return;
    }
    let cluster = Cluster::start(2);
    volume(&cluster, &["create", "limited", "--bytes", "1GiB"]);
    let local = tempfile::tempdir().unwrap();
    let mut differing = Vec::new();
    for (l, layout) in LAYOUTS.iter().enumerate() {
        for (m, how) in MODES.into_iter().enumerate() {
            for (r, range) in RANGES.into_iter().enumerate() {
                let name = format!("f{l}-{m}-{r}");
                let path = local.path().join(&name);
                let cuts = [How::COLLAPSE_RANGE, How::INSERT_RANGE].contains(&how);
                // There it may succeed, in whole blocks: here it never does.
                let theirs = if cuts { How::PUNCH_HOLE } else { how };
                let expected = outcome(&make(&path, layout), &path, theirs, range);
                std::fs::remove_file(path).unwrap();
                for dir in ["", "limited"] {
                    let [here, there] =
                        [&cluster.mounts[0], &cluster.mounts[1]].map(|mount| mount.join(dir).join(&name));
                    let file = make(&here, layout);
                    let got = outcome(&file, &there, how, range);
                    std::fs::remove_file(here).unwrap();
                    if got != expected {
                        let what = format!("{} in {dir:?}, {how:?} of {range:?}", layout.what);
                        differing.push(format!("{what}\n  mount: {got}\n  local: {expected}"));
                    }
                }
            }
        }
    }
    assert!(differing.is_empty(), "{}", differing.join("\n"));
}
