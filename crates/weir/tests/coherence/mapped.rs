//! Files mapped into memory, by programs of their own: on one mount, and on two.
use crate::common::{Cluster, can_mount, ends, has};
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

const PATIENCE: Duration = Duration::from_secs(60);
const FILE_BYTES: usize = 64 << 10;

/// One command a line, one answer a line.
const MAPPER: &str = r#"
import mmap, os, sys
fd = os.open(sys.argv[1], os.O_RDWR)
kind = mmap.MAP_PRIVATE if sys.argv[2] == 'private' else mmap.MAP_SHARED
m = mmap.mmap(fd, os.fstat(fd).st_size, kind)
print('ready', flush=True)
for line in sys.stdin:
    word = line.split()
    at = int(word[1]) if len(word) > 1 else 0
    answer = 'ok'
    if word[0] == 'store': m[at:at + len(word[2])] = word[2].encode()
    elif word[0] == 'sync': m.flush()
    elif word[0] == 'load': answer = m[at:at + int(word[2])].decode().replace(chr(0), '.')
    elif word[0] == 'read': answer = os.pread(fd, int(word[2]), at).decode().replace(chr(0), '.')
    elif word[0] == 'write': os.pwrite(fd, word[2].encode(), at)
    elif word[0] == 'cut': os.ftruncate(fd, at)
    elif word[0] == 'data': answer = os.lseek(fd, at, os.SEEK_DATA)
    print(answer, flush=True)
"#;

/// A process with the file open and mapped.
struct Mapper {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl Mapper {
    fn new(file: &Path, kind: &str) -> Mapper {
        let mut command = Command::new("python3");
        command.args(["-u", "-c", MAPPER]).arg(file).arg(kind);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let input = child.stdin.take().unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        let mut mapper = Mapper { child, input, output };
        assert_eq!(mapper.answer(), "ready");
        mapper
    }
    fn shared(file: &Path) -> Mapper {
        Mapper::new(file, "shared")
    }
    fn answer(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        line.trim_end().to_string()
    }
    fn ask(&mut self, command: &str) -> String {
        writeln!(self.input, "{command}").unwrap();
        self.answer()
    }
    fn store(&mut self, at: usize, text: &str) {
        assert_eq!(self.ask(&format!("store {at} {text}")), "ok");
    }
    fn store_and_sync(&mut self, at: usize, text: &str) {
        self.store(at, text);
        assert_eq!(self.ask("sync"), "ok");
    }
    fn write(&mut self, at: usize, text: &str) {
        assert_eq!(self.ask(&format!("write {at} {text}")), "ok");
    }
    fn load(&mut self, at: usize, len: usize) -> String {
        self.ask(&format!("load {at} {len}"))
    }
    fn read(&mut self, at: usize, len: usize) -> String {
        self.ask(&format!("read {at} {len}"))
    }
    fn close(mut self) {
        drop(self.input);
        assert!(ends("a mapper", &mut self.child, PATIENCE).success());
    }
}

fn make(path: &Path) {
    std::fs::write(path, "a".repeat(FILE_BYTES)).unwrap();
}

#[test]
fn a_mapping_reads_and_writes_are_one_on_a_mount() {
    if !can_mount() || !has("python3") {
        return;
    }
    let cluster = Cluster::start(1);
    let path = cluster.mount().join("f");
    make(&path);
    let (mut one, mut other) = (Mapper::shared(&path), Mapper::shared(&path));
    let mut private = Mapper::new(&path, "private");
    for round in 0..50 {
        let (at, text) = (round * 1000, format!("round{round:03}"));
        one.store(at, &text);
        assert_eq!((other.load(at, 8), other.read(at, 8)), (text.clone(), text.clone()));
        assert_eq!(&std::fs::read(&path).unwrap()[at..at + 8], text.as_bytes());
        assert_eq!(private.load(at, 8), text, "not changed by itself yet");
        other.write(at + 8, &text);
        assert_eq!((one.load(at + 8, 8), private.load(at + 8, 8)), (text.clone(), text.clone()));
        // Written by one that only writes.
        let writer = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&writer, b"directly", at as u64 + 16).unwrap();
        assert_eq!((one.load(at + 16, 8), other.read(at + 16, 8)), ("directly".into(), "directly".into()));
    }
    private.store(0, "mine");
    assert_eq!(
        (private.load(0, 4), one.load(0, 4), one.read(0, 4)),
        ("mine".into(), "roun".into(), "roun".into())
    );
    // Truncated and grown again: no former byte is left, in the page of the truncation neither.
    one.store(5_000, "gone");
    assert_eq!(other.ask("cut 4100"), "ok");
    assert_eq!(other.ask(&format!("cut {FILE_BYTES}")), "ok");
    assert_eq!((one.load(5_000, 4), other.read(5_000, 4)), ("....".into(), "....".into()));
    assert_eq!(one.load(8_192, 4), "....");
    [one, other, private].into_iter().for_each(Mapper::close);
}

/// A sparse file has data where something was stored, also before the kernel has parted with it.
#[test]
fn a_store_into_a_mapped_hole_is_data() {
    if !can_mount() || !has("python3") {
        return;
    }
    let cluster = Cluster::start(1);
    let path = cluster.mount().join("f");
    std::fs::File::create(&path).unwrap().set_len(64 << 20).unwrap();
    let (mut one, mut other) = (Mapper::shared(&path), Mapper::shared(&path));
    for at in [50 << 20, 30 << 20, 10 << 20] {
        one.store(at, "stored");
        let found: usize = other.ask("data 0").parse().unwrap();
        assert!(found <= at && at - found < 8 << 20, "data at {found}, not at {at}");
        assert_eq!(other.load(at, 6), "stored");
    }
    [one, other].into_iter().for_each(Mapper::close);
}

/// Bytes stored and synced on one mount are read and loaded on the other, for either order of the opens.
#[test]
fn a_synced_mapping_is_visible_on_another_mount() {
    if !can_mount() || !has("python3") {
        return;
    }
    let cluster = Cluster::start(2);
    let mut stale = Vec::new();
    for (first, second) in [(0, 1), (1, 0)] {
        let name = format!("f{first}");
        let (a, b) = (cluster.mounts[first].join(&name), cluster.mounts[second].join(&name));
        make(&a);
        let mut one = Mapper::shared(&a);
        one.store(9_000, "unsynced");
        // An open on the other mount makes it shared: stored bytes are written out before.
        let mut other = Mapper::shared(&b);
        assert_eq!((other.read(9_000, 8), other.load(9_000, 8)), ("unsynced".into(), "unsynced".into()));
        for round in 0..100 {
            let (at, text) = (round % 4 * 100, format!("round{round:03}"));
            let (writer, reader) =
                if round % 2 == 0 { (&mut one, &mut other) } else { (&mut other, &mut one) };
            match round % 3 {
                0 => writer.write(at, &text),
                _ => writer.store_and_sync(at, &text),
            }
            let (read, loaded) = (reader.read(at, 8), reader.load(at, 8));
            if read != text || loaded != text {
                stale.push((first, round, read, loaded));
            }
        }
        // Truncated by the other under a mapping: the former bytes are not seen again.
        one.store_and_sync(20_000, "secret");
        assert_eq!(other.load(20_000, 6), "secret");
        assert_eq!(one.ask("cut 10000"), "ok");
        assert_eq!(one.ask(&format!("cut {FILE_BYTES}")), "ok");
        let seen = (other.read(20_000, 6), other.load(20_000, 6));
        if seen != ("......".into(), "......".into()) {
            stale.push((first, 999, seen.0, seen.1));
        }
        one.close();
        other.close();
    }
    assert!(stale.is_empty(), "{} of 200 old: {stale:?}", stale.len());
}
