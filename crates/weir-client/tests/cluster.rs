//! Claims about a client, on a whole simulated cluster: what is written is read, whoever reads it and whatever is lost.
mod lab;

use bytes::Bytes;
use lab::*;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use weir_client::{Allocate, Client, Forget, Handle, KernelCache, OpenMode, SetAttrs};
use weir_proto::meta::RenameMode;
use weir_proto::{ErrorKind, InodeId};

const ROOT: InodeId = InodeId::ROOT;

async fn create(c: &Client, name: &str) -> Handle {
    c.create(&root(), ROOT, name.as_bytes(), 0o644, true, OpenMode::BOTH).await.unwrap().handle
}
async fn open(c: &Client, name: &str, mode: OpenMode) -> Handle {
    let found = c.lookup(&root(), ROOT, name.as_bytes()).await.unwrap().expect("the name exists");
    c.open(&root(), found.attr.ino, mode).await.unwrap().handle
}
async fn write(c: &Client, h: Handle, offset: usize, data: &[u8]) {
    if let Some(done) = c.try_write(h, offset as u64, data) {
        assert_eq!(done.unwrap(), data.len());
        return;
    }
    assert_eq!(c.write(h, offset as u64, Bytes::copy_from_slice(data)).await.unwrap(), data.len());
}
async fn read(c: &Client, h: Handle, offset: usize, len: usize) -> Vec<u8> {
    if let Some(parts) = c.try_read(h, offset as u64, len) {
        return parts.unwrap().concat();
    }
    c.read(h, offset as u64, len).await.unwrap().concat()
}
async fn close(c: &Client, h: Handle) {
    c.flush(h).await.unwrap();
    c.release(h).await.unwrap();
}
/// The whole file as a client that knows nothing of it sees it.
async fn content(c: &Client, name: &str) -> Vec<u8> {
    let h = open(c, name, OpenMode::READ).await;
    let bytes = c.read(h, 0, 1 << 30).await.unwrap().concat();
    c.release(h).await.unwrap();
    bytes
}
#[track_caller]
fn same(got: &[u8], expected: &[u8]) {
    if got == expected {
        return;
    }
    let at = got.iter().zip(expected).position(|(a, b)| a != b).unwrap_or(got.len().min(expected.len()));
    panic!("{} bytes, expected {}; the first difference is at {at}", got.len(), expected.len());
}

#[test]
fn files_of_all_sizes_are_read_back_by_another_client() {
    Lab::new(1).run(6, |lab| async move {
        let (a, b) = (lab.client("a").await, lab.client("b").await);
        for (i, size) in
            [0, 1, 4096, 4097, 50_000, CELL, CELL + 1, STRIPE - 1, STRIPE, STRIPE + 1, 3 * STRIPE + 77_777]
                .into_iter()
                .enumerate()
        {
            let name = format!("f{size}");
            let data = pattern(i as u64, 0, size);
            let h = create(&a, &name).await;
            for (n, chunk) in data.chunks(100_000).enumerate() {
                write(&a, h, n * 100_000, chunk).await;
            }
            same(&read(&a, h, 0, size + 10).await, &data);
            close(&a, h).await;
            same(&content(&b, &name).await, &data);
            let stat = b.lookup(&root(), ROOT, name.as_bytes()).await.unwrap().unwrap();
            assert_eq!(stat.attr.size, size as u64);
        }
        assert_eq!(a.status().degraded_writes + b.status().degraded_reads, 0);
    });
}

#[test]
fn whole_stripes_cost_exactly_their_redundancy_on_the_wire() {
    Lab::new(2).run(6, |lab| async move {
        let a = lab.client("a").await;
        let h = create(&a, "f").await;
        let data = pattern(0, 0, 8 * STRIPE);
        for (n, chunk) in data.chunks(CELL).enumerate() {
            write(&a, h, n * CELL, chunk).await;
        }
        close(&a, h).await;
        let status = a.status();
        assert_eq!(status.written_bytes, 8 * STRIPE as u64);
        assert_eq!(status.wire_sent_bytes * 2, status.written_bytes * 3, "4+2: 1.5 wire bytes per byte");
    });
}

#[test]
fn overwrites_and_holes_read_as_an_array_would() {
    Lab::new(3).run(6, |lab| async move {
        let (a, b) = (lab.client("a").await, lab.client("b").await);
        let rng = lab.world().rng("test");
        let mut model = Vec::new();
        for round in 0..6 {
            let h = if round == 0 { create(&a, "f").await } else { open(&a, "f", OpenMode::BOTH).await };
            for step in 0..12 {
                let at = rng.below(4 * STRIPE as u64) as usize;
                let len = 1 + rng.below([100, 50_000, 400_000][rng.below(3) as usize]) as usize;
                let data = pattern(round * 100 + step, at, len);
                write(&a, h, at, &data).await;
                if model.len() < at + len {
                    model.resize(at + len, 0);
                }
                model[at..at + len].copy_from_slice(&data);
                match rng.below(6) {
                    0 => a.fsync(h).await.unwrap(),
                    1 => {
                        let (at, len) = (rng.below(model.len() as u64) as usize, 200_000);
                        same(&read(&a, h, at, len).await, &model[at..model.len().min(at + len)]);
                    }
                    2 => {
                        let size = rng.below(model.len() as u64 + 100_000) as usize;
                        let file = a.lookup(&root(), ROOT, b"f").await.unwrap().unwrap().attr.ino;
                        let set = SetAttrs { size: Some(size as u64), ..Default::default() };
                        let stat = a.setattr(&root(), file, Some(h), set).await.unwrap();
                        assert_eq!(stat.attr.size, size as u64);
                        model.resize(size, 0);
                    }
                    3 => {
                        let at = rng.below(model.len() as u64) as usize;
                        let end = model.len().min(at + 150_000);
                        a.fallocate(h, Allocate::PunchHole, at as u64, (end - at).max(1) as u64)
                            .await
                            .unwrap();
                        model[at..end].fill(0);
                    }
                    _ => {}
                }
            }
            same(&read(&a, h, 0, model.len() + 1).await, &model);
            close(&a, h).await;
            same(&content(&b, "f").await, &model);
        }
    });
}

#[test]
fn any_two_of_six_targets_may_be_gone_and_a_third_is_an_error_that_names_the_stripe() {
    for (first, second) in [(0, 1), (2, 5), (4, 3)] {
        Lab::new(4 + u64::from(first)).run(6, |lab| async move {
            let (a, b) = (lab.client("a").await, lab.client("b").await);
            let data = pattern(1, 0, 5 * STRIPE + 70_000);
            let h = create(&a, "before").await;
            write(&a, h, 0, &data).await;
            close(&a, h).await;
            let h = create(&a, "small").await;
            write(&a, h, 0, &data[..20_000]).await;
            close(&a, h).await;
            let during = create(&a, "during").await;
            write(&a, during, 0, &data[..2 * STRIPE]).await;
            lab.kill_storage(first);
            write(&a, during, 2 * STRIPE, &data[2 * STRIPE..3 * STRIPE + 100]).await;
            same(&content(&b, "before").await, &data);
            lab.kill_storage(second);
            write(&a, during, 3 * STRIPE + 100, &data[3 * STRIPE + 100..]).await;
            close(&a, during).await;
            let c = lab.client("c").await;
            for (name, expected) in [("before", &data[..]), ("small", &data[..20_000]), ("during", &data[..])]
            {
                same(&content(&c, name).await, expected);
            }
            assert!(c.status().degraded_reads > 0 && a.status().degraded_writes > 0);

            let third = (0..6).find(|n| *n != first && *n != second).unwrap();
            lab.kill_storage(third);
            let d = lab.client("d").await;
            let clock = lab.env("d").clock;
            let begun = clock.now();
            let h = open(&d, "before", OpenMode::READ).await;
            let error = d.read(h, 0, data.len()).await.unwrap_err();
            assert!(error.context.contains("stripe"), "{error:?}");
            assert_eq!(
                error.kind,
                ErrorKind::Unavailable,
                "who is down may come back with what it has: {error}"
            );
            assert_eq!(error.kind.errno(), 5);
            assert!(clock.now().since(begun) < Duration::from_secs(15), "{:?}", clock.now().since(begun));
            let h = create(&d, "refused").await;
            let data = data.clone();
            let wrote = d.write(h, 0, Bytes::from(data)).await;
            let flushed = d.flush(h).await;
            let error = wrote.map(|_| ()).and(flushed).unwrap_err();
            assert_eq!(error.kind, ErrorKind::Unavailable, "{error:?}");
            assert!(error.context.contains("stripe"), "{error:?}");
        });
    }
}

#[test]
fn a_returned_target_is_used_again() {
    Lab::new(11).run(6, |lab| async move {
        let a = lab.client("a").await;
        let data = pattern(1, 0, 3 * STRIPE);
        lab.kill_storage(2);
        let h = create(&a, "f").await;
        write(&a, h, 0, &data).await;
        close(&a, h).await;
        lab.storage(2).await;
        let h = create(&a, "g").await;
        write(&a, h, 0, &data).await;
        close(&a, h).await;
        let b = lab.client("b").await;
        same(&content(&b, "f").await, &data);
        same(&content(&b, "g").await, &data);
    });
}

#[derive(Default)]
struct Kernel(Mutex<Vec<(InodeId, Forget)>>);
impl KernelCache for Kernel {
    fn invalidate_inode(&self, ino: InodeId, what: Forget) {
        self.0.lock().unwrap().push((ino, what));
    }
    fn invalidate_entry(&self, _: InodeId, _: &[u8]) {}
}

/// A kernel that keeps one page, and drops one that is being read when the read has ended.
#[derive(Default)]
struct Page(Mutex<(Option<Vec<u8>>, u64)>);
impl KernelCache for Page {
    fn invalidate_inode(&self, _: InodeId, what: Forget) {
        if what != Forget::Attributes {
            let mut page = self.0.lock().unwrap();
            *page = (None, page.1 + 1);
        }
    }
    fn invalidate_entry(&self, _: InodeId, _: &[u8]) {}
}
impl Page {
    async fn read(&self, c: &Client, h: Handle) -> u64 {
        let (kept, dropped) = self.0.lock().unwrap().clone();
        let bytes = match kept {
            Some(bytes) => bytes,
            None => read(c, h, 0, 8).await,
        };
        let mut page = self.0.lock().unwrap();
        if page.1 == dropped {
            page.0 = Some(bytes.clone());
        }
        u64::from_le_bytes(bytes.try_into().unwrap())
    }
}

#[test]
fn a_read_through_pages_is_not_older_than_what_was_written_before_it() {
    const WRITES: u64 = 60;
    for seed in 70..76 {
        Lab::new(seed).run(6, |lab| async move {
            let page = Arc::new(Page::default());
            let (a, c) = (lab.client("a").await, lab.client("c").await);
            let b = lab.client_with("b", 64 << 20, page.clone()).await;
            let h = create(&a, "f").await;
            write(&a, h, 0, &0u64.to_le_bytes()).await;
            close(&a, h).await;
            let reader = open(&b, "f", OpenMode::READ).await;
            assert_eq!(page.read(&b, reader).await, 0, "read under a lease");
            let (ha, hc) = (open(&a, "f", OpenMode::WRITE).await, open(&c, "f", OpenMode::WRITE).await);
            let written = Mutex::new(0);
            let clock = lab.world().clock();
            let writes = async {
                for n in 1..=WRITES {
                    // By turns, and sometimes the same one twice.
                    let (writer, handle) = if n % 3 == 0 { (&c, hc) } else { (&a, ha) };
                    write(writer, handle, 0, &n.to_le_bytes()).await;
                    *written.lock().unwrap() = n;
                    clock.sleep(Duration::from_micros(n * seed % 7 * 300)).await;
                }
            };
            let reads = async {
                loop {
                    let before = *written.lock().unwrap();
                    let seen = page.read(&b, reader).await;
                    assert!(seen >= before, "seed {seed}: {seen} is read after {before} was written");
                    if before == WRITES {
                        return;
                    }
                    clock.sleep(Duration::from_micros(20)).await;
                }
            };
            tokio::join!(writes, reads);
        });
    }
}

/// A kernel fills the rest of a page with zeros, and shows them when it hears that the file is longer.
#[test]
fn no_read_for_pages_brings_less_than_the_kernel_has_heard_of_before() {
    const START: usize = 5000;
    const END: usize = START + 60;
    for seed in 80..84 {
        Lab::new(seed).run(6, |lab| async move {
            let (a, b) = (lab.client("a").await, lab.client("b").await);
            let h = create(&a, "f").await;
            write(&a, h, 0, &[1; START]).await;
            close(&a, h).await;
            let (writer, reader) =
                (open(&b, "f", OpenMode::WRITE).await, open(&b, "f", OpenMode::READ).await);
            b.keeps_pages(reader);
            let h = open(&a, "f", OpenMode::WRITE).await;
            let ino = b.lookup(&root(), ROOT, b"f").await.unwrap().unwrap().attr.ino;
            let heard = Mutex::new(START);
            let clock = lab.world().clock();
            let writes = async {
                for at in START..END {
                    write(&a, h, at, &[1]).await;
                    clock.sleep(Duration::from_micros(at as u64 * seed % 7 * 100)).await;
                }
            };
            let reads = async {
                loop {
                    let got = read(&b, reader, 0, END).await;
                    let heard = *heard.lock().unwrap();
                    assert!(got.len() >= heard, "seed {seed}: {} bytes, {heard} are known of", got.len());
                    if got.len() == END {
                        return assert!(got.iter().all(|b| *b == 1));
                    }
                }
            };
            let looks = async {
                while *heard.lock().unwrap() < END {
                    let size = b.getattr(ino).await.unwrap().attr.size as usize;
                    *heard.lock().unwrap() = size;
                }
            };
            tokio::join!(writes, reads, looks);
            close(&b, writer).await;
        });
    }
}

#[test]
fn what_one_client_changes_the_other_sees_at_once() {
    Lab::new(12).run(6, |lab| async move {
        let kernel = Arc::new(Kernel::default());
        let a = lab.client("a").await;
        let b = lab.client_with("b", 64 << 20, kernel.clone()).await;
        let cred = root();
        // Absent, then there.
        assert_eq!(b.lookup(&cred, ROOT, b"new").await.unwrap(), None);
        assert_eq!(b.try_lookup(ROOT, b"new"), Some(None), "remembered under the directory's lease");
        let h = create(&a, "new").await;
        assert!(b.lookup(&cred, ROOT, b"new").await.unwrap().is_some());
        // Written and not synced: a look from outside shows it.
        write(&a, h, 0, b"hello world").await;
        let stat = b.lookup(&cred, ROOT, b"new").await.unwrap().unwrap();
        assert_eq!(stat.attr.size, 11);
        // Both have it open: each write shows in the next read.
        let g = open(&b, "new", OpenMode::READ).await;
        for i in 0..5 {
            let line = format!("round {i:5}");
            write(&a, h, 0, line.as_bytes()).await;
            same(&read(&b, g, 0, 100).await, line.as_bytes());
        }
        close(&a, h).await;
        // Cached under a lease, changed by the other, read again.
        same(&read(&b, g, 0, 100).await, b"round     4");
        let h = open(&a, "new", OpenMode::WRITE).await;
        write(&a, h, 6, b"9").await;
        a.fsync(h).await.unwrap();
        same(&read(&b, g, 0, 100).await, b"round 9   4");
        close(&a, h).await;
        b.release(g).await.unwrap();
        // Names.
        a.rename(&cred, ROOT, b"new", ROOT, b"old", RenameMode::Replace).await.unwrap();
        assert_eq!(b.lookup(&cred, ROOT, b"new").await.unwrap(), None);
        assert!(b.lookup(&cred, ROOT, b"old").await.unwrap().is_some());
        a.unlink(&cred, ROOT, b"old").await.unwrap();
        assert_eq!(b.lookup(&cred, ROOT, b"old").await.unwrap(), None);
        assert!(!kernel.0.lock().unwrap().is_empty(), "the kernel was told");
    });
}

#[test]
fn a_close_that_is_put_off_is_told_before_the_lease_goes_back() {
    Lab::new(31).run(6, |lab| async move {
        let (a, b) = (lab.client("a").await, lab.client("b").await);
        for n in 0..3 {
            let name = format!("f{n}");
            let h = create(&a, &name).await;
            write(&a, h, 0, b"by a").await;
            close(&a, h).await;
            // At once: the leader still counts a's opens. Were they there, b would share the file and cache nothing.
            let ino = b.lookup(&root(), ROOT, name.as_bytes()).await.unwrap().unwrap().attr.ino;
            let opened = b.open(&root(), ino, OpenMode::BOTH).await.unwrap();
            assert!(opened.kernel_cache, "b has the file for itself");
            write(&b, opened.handle, 3, b"b").await;
            close(&b, opened.handle).await;
            assert_eq!(content(&a, &name).await, b"by b");
        }
    });
}

#[test]
fn an_access_time_is_told_before_the_lease_goes_back() {
    Lab::new(33).run(6, |lab| async move {
        let (a, b) = (lab.client("a").await, lab.client("b").await);
        let h = create(&a, "f").await;
        write(&a, h, 0, b"bytes").await;
        a.fsync(h).await.unwrap();
        let clock = lab.env("a").clock;
        clock.sleep(Duration::from_millis(100)).await;
        let before = a.lookup(&root(), ROOT, b"f").await.unwrap().unwrap();
        let (ino, read_at) = (before.attr.ino, clock.wall().0);
        assert!(before.attr.atime.nanos <= before.attr.mtime.nanos);
        same(&read(&a, h, 0, 5).await, b"bytes");
        let shown = a.try_getattr(ino).unwrap().attr;
        assert_eq!((shown.atime.nanos, shown.ctime), (read_at, before.attr.ctime), "shown at once");
        // At once, before it is told by itself.
        assert_eq!(b.getattr(ino).await.unwrap().attr.atime.nanos, read_at);
        clock.sleep(Duration::from_millis(100)).await;
        same(&read(&a, h, 0, 5).await, b"bytes");
        assert_eq!(a.getattr(ino).await.unwrap().attr.atime.nanos, read_at, "newer than the last change");
        write(&a, h, 0, b"B").await;
        clock.sleep(Duration::from_millis(1)).await;
        same(&read(&a, h, 0, 5).await, b"Bytes");
        let again = clock.wall().0;
        // A time that is set is not overtaken by a read of before.
        let set = weir_client::SetAttrs {
            atime: Some(weir_client::SetTime::At(weir_proto::meta::Time { nanos: 77 })),
            ..Default::default()
        };
        assert_eq!(a.getattr(ino).await.unwrap().attr.atime.nanos, again);
        assert_eq!(a.setattr(&root(), ino, None, set).await.unwrap().attr.atime.nanos, 77);
        clock.sleep(Duration::from_secs(3)).await;
        assert_eq!(b.getattr(ino).await.unwrap().attr.atime.nanos, 77);
        // Told by itself within two seconds; and not at all where nobody wants it.
        same(&read(&a, h, 0, 5).await, b"Bytes");
        let third = clock.wall().0;
        clock.sleep(Duration::from_secs(2)).await;
        close(&a, h).await;
        assert_eq!(content(&b, "f").await, b"Bytes");
        assert_eq!(b.getattr(ino).await.unwrap().attr.atime.nanos, third);
        b.setattr(&root(), ino, None, set).await.unwrap();
        b.keep_access_times(false);
        assert_eq!(content(&b, "f").await, b"Bytes");
        assert_eq!(b.getattr(ino).await.unwrap().attr.atime.nanos, 77);
        a.shutdown().await.unwrap();
    });
}

#[test]
fn a_file_without_a_name_is_linked_or_gone() {
    Lab::new(34).run(6, |lab| async move {
        let (a, b) = (lab.client("a").await, lab.client("b").await);
        let bytes = pattern(5, 0, 300_000);
        let opened = a.create_nameless(&root(), ROOT, 0o640, OpenMode::BOTH).await.unwrap();
        let (h, ino) = (opened.handle, opened.stat.attr.ino);
        write(&a, h, 0, &bytes).await;
        same(&read(&a, h, 0, 300_000).await, &bytes);
        assert!(b.readdir(ROOT, 0, 10, false).await.unwrap().entries.is_empty());
        assert_eq!(a.link(&root(), ino, ROOT, b"named").await.unwrap().attr.nlink, 1);
        same(&content(&b, "named").await, &bytes);
        write(&a, h, 0, b"later").await;
        close(&a, h).await;
        same(&content(&b, "named").await[..5], b"later");
        // While the leader restarts: made once, or once more.
        let (begun, made) = (lab.env("a").clock.now(), async {
            for _ in 0..20 {
                let opened = a.create_nameless(&root(), ROOT, 0o640, OpenMode::BOTH).await.unwrap();
                write(&a, opened.handle, 0, b"x").await;
                same(&read(&a, opened.handle, 0, 9).await, b"x");
                close(&a, opened.handle).await;
            }
        });
        let restarts = async {
            for _ in 0..3 {
                lab.env("b").clock.sleep(Duration::from_millis(20)).await;
                lab.kill_meta();
                lab.meta().await;
            }
        };
        tokio::join!(made, restarts);
        assert!(lab.env("a").clock.now().since(begun) < Duration::from_secs(60));
        assert_eq!(b.readdir(ROOT, 0, 10, false).await.unwrap().entries.len(), 1);
    });
}

#[test]
fn a_name_is_absent_without_asking_where_every_name_is_known_until_another_client_makes_it() {
    Lab::new(32).run(6, |lab| async move {
        let (a, b) = (lab.client("a").await, lab.client("b").await);
        let dir = a.mkdir(&root(), ROOT, b"d", 0o755).await.unwrap().attr.ino;
        assert_eq!(a.try_lookup(dir, b"x"), Some(None), "a new directory is empty");
        let made =
            a.mknod(&root(), dir, b"own", 0o644, weir_proto::meta::FileKind::Regular, 0).await.unwrap();
        let known = |name: &[u8]| a.try_lookup(dir, name).map(|found| found.map(|stat| stat.attr.ino));
        assert_eq!(known(b"own"), Some(Some(made.attr.ino)));
        assert_eq!(known(b"x"), Some(None));
        assert!(a.mkdir(&root(), dir, b"own", 0o755).await.is_err(), "it exists");
        assert_eq!(a.lookup(&root(), dir, b"own").await.unwrap().unwrap().attr.ino, made.attr.ino);

        let theirs = b.mkdir(&root(), dir, b"x", 0o755).await.unwrap();
        assert_eq!(known(b"x"), None, "the lease went back: ask");
        assert_eq!(a.lookup(&root(), dir, b"x").await.unwrap().unwrap().attr.ino, theirs.attr.ino);

        // Known again by a listing, once the directory is not changed by turns any more.
        lab.env("a").clock.sleep(Duration::from_millis(200)).await;
        let listing = a.readdir(dir, 0, 100, true).await.unwrap();
        assert_eq!((listing.entries.len(), listing.end), (2, true));
        assert_eq!(known(b"y"), Some(None));
        a.rename(&root(), dir, b"x", dir, b"y", RenameMode::Replace).await.unwrap();
        assert_eq!(known(b"x"), Some(None));
        assert_eq!(a.lookup(&root(), dir, b"y").await.unwrap().unwrap().attr.ino, theirs.attr.ino);
        b.rmdir(&root(), dir, b"y").await.unwrap();
        assert!(a.lookup(&root(), dir, b"y").await.unwrap().is_none());
    });
}

#[test]
fn many_writers_of_one_file_lose_nothing() {
    Lab::new(13).run(6, |lab| async move {
        let record = 47_008;
        let (a, b) = (lab.client("a").await, lab.client("b").await);
        let h = create(&a, "shared").await;
        let g = open(&b, "shared", OpenMode::BOTH).await;
        let count = 20;
        for i in 0..count {
            let (client, handle) = if i % 2 == 0 { (&a, h) } else { (&b, g) };
            write(client, handle, i * record, &pattern(7, i * record, record)).await;
        }
        close(&a, h).await;
        close(&b, g).await;
        same(&content(&lab.client("c").await, "shared").await, &pattern(7, 0, count * record));
    });
}

#[test]
fn memory_stays_within_the_budget() {
    Lab::new(14).run(6, |lab| async move {
        let budget = 4 << 20;
        let a = lab.client_with("a", budget, Arc::new(weir_client::NoKernel)).await;
        let h = create(&a, "big").await;
        let total = 40 << 20;
        let chunk = 1 << 20;
        for at in (0..total).step_by(chunk) {
            write(&a, h, at, &pattern(3, at, chunk)).await;
        }
        close(&a, h).await;
        let status = a.status();
        assert!(status.memory_peak_bytes <= budget, "{status:?}");
        let b = lab.client_with("b", budget, Arc::new(weir_client::NoKernel)).await;
        let h = open(&b, "big", OpenMode::READ).await;
        for at in (0..total).step_by(chunk) {
            same(&read(&b, h, at, chunk).await, &pattern(3, at, chunk));
        }
        assert!(b.status().memory_peak_bytes <= budget, "{:?}", b.status());
    });
}

/// The right to write goes to another client at every moment of it.
#[test]
fn a_range_that_is_zeroed_while_the_right_to_write_goes_is_zero_and_the_file_grows_after_it() {
    Lab::new(15).run(6, |lab| async move {
        let (a, b, env) = (lab.client("a").await, lab.client("b").await, lab.env("a"));
        for target in 0..6 {
            lab.world().slow_link("a", &format!("s{target}"), Duration::from_millis(20));
        }
        for round in 0..60u32 {
            let name = format!("f{round}");
            let h = create(&a, &name).await;
            write(&a, h, 0, &pattern(1, 0, STRIPE)).await;
            let other = b.clone();
            let (env_b, reads) = (lab.env("b"), name.clone());
            let (tx, rx) = tokio::sync::oneshot::channel();
            lab.env("b").tasks.spawn("other", async move {
                env_b.clock.sleep(Duration::from_millis(2) * round).await;
                let h = open(&other, &reads, OpenMode::BOTH).await;
                // What it keeps under its lease must not outlive the zeros.
                read(&other, h, CELL, CELL).await;
                let _ = tx.send(h);
            });
            env.clock.sleep(Duration::from_millis(30)).await;
            a.fallocate(h, Allocate::PunchHole, CELL as u64, CELL as u64).await.unwrap();
            let at_b = rx.await.unwrap();
            same(&read(&b, at_b, CELL, CELL).await, &[0; CELL]);
            write(&b, at_b, 0, b"shared").await;
            write(&a, h, STRIPE, b"more").await;
            same(&read(&a, h, STRIPE, 10).await, b"more");
            same(&read(&b, at_b, STRIPE, 10).await, b"more");
        }
    });
}

#[test]
fn a_dead_writers_file_that_two_have_open_is_recovered_by_one_of_them() {
    Lab::new(31).run(6, |lab| async move {
        let (a, b, c) = (lab.client("a").await, lab.client("b").await, lab.client("c").await);
        let data = pattern(1, 0, 2 * STRIPE);
        let h = create(&a, "f").await;
        write(&a, h, 0, &data[..STRIPE]).await;
        a.fsync(h).await.unwrap();
        write(&a, h, STRIPE, &data[STRIPE..]).await;
        lab.world().kill("a");
        let (hb, hc) = (open(&b, "f", OpenMode::BOTH).await, open(&c, "f", OpenMode::BOTH).await);
        let at = |n: usize| &data[n..n + 1000];
        tokio::join!(write(&b, hb, 0, at(7)), write(&c, hc, STRIPE / 2, at(77)));
        for (client, h) in [(&b, hb), (&c, hc)] {
            let got = client.read(h, 0, STRIPE).await.unwrap().concat();
            same(&got[..1000], at(7));
            same(&got[STRIPE / 2..STRIPE / 2 + 1000], at(77));
            same(&got[1000..2000], &data[1000..2000]);
        }
        close(&b, hb).await;
        close(&c, hc).await;
    });
}

/// Others that had the file open when it was recovered die, too, after it was closed to them.
#[test]
fn what_is_written_alone_stays_when_others_die_that_had_the_file_open_before() {
    Lab::new(33).run(6, |lab| async move {
        let (a, b, c) = (lab.client("a").await, lab.client("b").await, lab.client("c").await);
        let data = pattern(1, 0, 8 * STRIPE);
        let h = create(&a, "f").await;
        write(&a, h, 0, &data[..1000]).await;
        let _open = open(&b, "f", OpenMode::BOTH).await;
        write(&a, h, 0, &data[..1000]).await;
        lab.world().kill("a");
        lab.env("c").clock.sleep(Duration::from_secs(5)).await; // of the world: the session of a ends
        let hc = open(&c, "f", OpenMode::BOTH).await; // recovered, and written by who has recovered it
        write(&c, hc, 0, &data[..4 * STRIPE]).await;
        lab.world().kill("b");
        lab.env("c").clock.sleep(Duration::from_secs(5)).await; // of the world: the session of b ends
        write(&c, hc, 4 * STRIPE, &data[4 * STRIPE..6 * STRIPE]).await;
        let in_between = c.fsync(hc);
        let more = write(&c, hc, 6 * STRIPE, &data[6 * STRIPE..7 * STRIPE]);
        tokio::join!(async { in_between.await.unwrap() }, more);
        write(&c, hc, 7 * STRIPE, &data[7 * STRIPE..]).await;
        c.fsync(hc).await.unwrap();
        close(&c, hc).await;
        same(&content(&lab.client("d").await, "f").await, &data);
    });
}

#[test]
fn a_session_that_many_find_gone_is_replaced_once() {
    for seed in 40..52 {
        Lab::new(seed).run(6, |lab| async move {
            let (a, b) = (lab.client("a").await, lab.client("b").await);
            let names = ["f0", "f1", "f2", "f3", "f4", "f5"];
            let mut handles = Vec::new();
            for name in names {
                let h = create(&a, name).await;
                write(&a, h, 0, b"before").await;
                a.fsync(h).await.unwrap();
                handles.push(h);
            }
            lab.world().pause("a");
            lab.world().clock().sleep(Duration::from_secs(6)).await;
            lab.world().resume("a");
            // All of them find the session gone, at slightly different times, and take what they need under the next.
            let change = async |n: u64| {
                lab.world().clock().sleep(Duration::from_micros((seed - 40) * 30 * n)).await;
                let h = handles[n as usize];
                same(&a.read(h, 0, 100).await.unwrap().concat(), b"before");
                write(&a, h, 6, b", after").await;
            };
            tokio::join!(change(0), change(1), change(2), change(3), change(4), change(5));
            for name in names {
                same(&content(&b, name).await, b"before, after");
            }
        });
    }
}

#[test]
fn a_removed_file_outlives_who_else_has_it_open_also_under_a_new_session() {
    Lab::new(53).run(6, |lab| async move {
        let (a, b) = (lab.client("a").await, lab.client("b").await);
        let bytes = pattern(6, 0, STRIPE + 77);
        let of_a = create(&a, "f").await;
        write(&a, of_a, 0, &bytes).await;
        a.fsync(of_a).await.unwrap();
        lab.world().partition("a", "meta");
        lab.world().sleep(Duration::from_secs(6)).await; // more than a lease term
        let of_b = open(&b, "f", OpenMode::READ).await;
        b.unlink(&root(), ROOT, b"f").await.unwrap();
        lab.world().heal("a", "meta");
        lab.world().sleep(Duration::from_secs(2)).await;
        close(&b, of_b).await;
        lab.world().sleep(Duration::from_secs(4)).await; // it would be swept
        same(&read(&a, of_a, 0, bytes.len()).await, &bytes);
    });
}

#[test]
fn what_a_dead_writer_left_past_the_end_of_a_shared_file_stays_away() {
    Lab::new(34).run(6, |lab| async move {
        let (b, far) = (lab.client("b").await, 300_000);
        let mut cut_off_in_time = 0;
        for (n, microseconds) in (100..2500).step_by(100).enumerate() {
            let (file, dies) = (format!("f{n}"), format!("a{n}"));
            let hb = create(&b, &file).await;
            write(&b, hb, 0, b"first").await;
            let a = lab.client(&dies).await;
            let ha = open(&a, &file, OpenMode::BOTH).await;
            let writer = a.clone();
            let left = async move { writer.write(ha, 100_000, Bytes::from_static(b"left behind")).await };
            lab.env(&dies).tasks.spawn("a write that never ends", async move { drop(left.await) });
            lab.world().clock().sleep(Duration::from_micros(microseconds)).await;
            // Its bytes may get to the targets, but the leader does not hear of it; and it is not the last writer.
            lab.world().partition(&dies, "meta");
            write(&b, hb, 0, b"FIRST").await;
            lab.world().kill(&dies);
            lab.world().clock().sleep(Duration::from_secs(5)).await;
            let before = b.read(hb, 0, far).await.unwrap().concat();
            cut_off_in_time += usize::from(before.len() == 5);
            write(&b, hb, far, b"far").await;
            let mut expected = before;
            expected.resize(far, 0);
            same(&b.read(hb, 0, far).await.unwrap().concat(), &expected);
            close(&b, hb).await;
        }
        assert!(cut_off_in_time > 5, "{cut_off_in_time}");
    });
}

/// The leader has heard from a close that nothing is on its way, and hears nothing any more when more is sent, of several stripes
/// at once; or after a sync that had nothing to send.
#[test]
fn what_is_sent_after_a_close_is_looked_for_when_its_writer_dies() {
    Lab::new(37).run(6, |lab| async move {
        let (b, far) = (lab.client("b").await, 4 * STRIPE);
        for (n, grows) in [false, true].into_iter().enumerate() {
            let (file, dies) = (format!("f{n}"), format!("a{n}"));
            let a = lab.client(&dies).await;
            let h = create(&a, &file).await;
            let mut expected = pattern(1, 0, STRIPE - 5000);
            write(&a, h, 0, &expected).await;
            a.flush(h).await.unwrap(); // of a copy of the descriptor: it is open still
            if grows {
                a.fallocate(h, Allocate::Extend, 0, expected.len() as u64 + 100).await.unwrap();
                a.fsync(h).await.unwrap();
                expected.resize(expected.len() + 100, 0);
            }
            lab.world().partition(&dies, "meta");
            write(&a, h, expected.len(), &pattern(2, 0, STRIPE)).await;
            lab.env(&dies).tasks.spawn("a sync that never ends", async move { drop(a.fsync(h).await) });
            lab.world().sleep(Duration::from_millis(500)).await;
            lab.world().kill(&dies);
            lab.world().sleep(Duration::from_secs(5)).await;
            same(&content(&b, &file).await, &expected);
            let h = open(&b, &file, OpenMode::BOTH).await;
            write(&b, h, far, b"far").await;
            close(&b, h).await;
            expected.resize(far, 0);
            expected.extend(b"far");
            same(&content(&lab.client(&format!("c{n}")).await, &file).await, &expected);
        }
    });
}

/// A leader that has started answers when all are back that were there before; who has nothing to ask comes by itself.
#[test]
fn who_is_idle_comes_back_soon_after_the_leader() {
    for down_ms in [500, 2000, 3500, 5000, 6500] {
        Lab::with(38, "ec:4+2", 9000).run(6, |lab| async move {
            let (_idle, b) = (lab.client("a").await, lab.client("b").await);
            create(&b, "f").await;
            lab.kill_meta();
            lab.world().sleep(Duration::from_millis(down_ms)).await;
            lab.meta().await;
            let begun = lab.world().now();
            create(&b, "g").await;
            let took = lab.world().now().since(begun);
            assert!(took < Duration::from_millis(1200), "{took:?} after {down_ms} ms without a leader");
        });
    }
}

#[test]
fn who_is_idle_and_far_away_comes_back_in_time_for_what_it_has_not_written() {
    for way_ms in [100, 300, 500, 650] {
        Lab::with(43, "ec:4+2", 5000).run(6, |lab| async move {
            let (idle, b) = (lab.client("a").await, lab.client("b").await);
            let h = create(&idle, "f").await;
            idle.fsync(h).await.unwrap();
            let way = Duration::from_millis(way_ms);
            lab.world().slow_link("a", "meta", way);
            lab.world().slow_link("meta", "a", way);
            write(&idle, h, 0, b"not written yet").await;
            lab.kill_meta();
            lab.world().sleep(Duration::from_millis(500)).await;
            lab.meta().await;
            same(&content(&b, "f").await, b"not written yet");
            assert_eq!(idle.losses(), (0, vec![]));
        });
    }
}

#[test]
fn a_client_that_cannot_ask_for_the_map_waits_for_it() {
    Lab::new(35).run(6, |lab| async move {
        let a = lab.client("a").await;
        let mut data = pattern(1, 0, 3 * STRIPE);
        let h = create(&a, "f").await;
        write(&a, h, 0, &data).await;
        a.fsync(h).await.unwrap();
        let (reader, hr) = (lab.client("r").await, open(&a, "f", OpenMode::READ).await);
        let hr2 = open(&reader, "f", OpenMode::READ).await;
        a.release(hr).await.unwrap();
        for name in ["a", "r"] {
            lab.world().partition(name, "coord");
        }
        lab.kill_storage(2);
        lab.world().clock().sleep(Duration::from_secs(2)).await; // the others know, and go by a new epoch
        let healing = lab.clone();
        lab.env("observer").tasks.spawn("heal", async move {
            healing.world().clock().sleep(Duration::from_secs(6)).await;
            ["a", "r"].iter().for_each(|name| healing.world().heal(name, "coord"));
        });
        same(&reader.read(hr2, 0, 3 * STRIPE).await.unwrap().concat(), &data);
        reader.release(hr2).await.unwrap();
        lab.world().partition("a", "coord");
        lab.kill_storage(4);
        lab.world().clock().sleep(Duration::from_secs(2)).await;
        let healing = lab.clone();
        lab.env("observer").tasks.spawn("heal", async move {
            healing.world().clock().sleep(Duration::from_secs(6)).await;
            healing.world().heal("a", "coord");
        });
        for (at, len) in [(1000, 3 * CELL), (STRIPE, STRIPE), (2 * STRIPE + 5, 17)] {
            let patch = pattern(9, at, len);
            write(&a, h, at, &patch).await;
            data[at..at + len].copy_from_slice(&patch);
        }
        a.fsync(h).await.unwrap();
        same(&content(&reader, "f").await, &data);
    });
}

#[test]
fn a_clock_that_is_set_back_hides_no_change() {
    Lab::new(33).run(6, |lab| async move {
        let (a, b) = (lab.client("a").await, lab.client("b").await);
        let h = create(&a, "f").await;
        write(&a, h, 0, b"one").await;
        close(&a, h).await;
        same(&content(&b, "f").await, b"one");
        let hour_ns = 3600 * 1_000_000_000;
        lab.world().set_wall_offset("meta", -hour_ns);
        let h = open(&a, "f", OpenMode::WRITE).await;
        write(&a, h, 3, b", two").await;
        close(&a, h).await;
        same(&content(&b, "f").await, b"one, two");
    });
}

#[test]
fn a_client_that_leaves_in_good_order_leaves_nothing_to_recover() {
    Lab::new(32).run(6, |lab| async move {
        let (a, b) = (lab.client("a").await, lab.client("b").await);
        let h = create(&a, "f").await;
        write(&a, h, 0, b"all there").await;
        close(&a, h).await;
        a.shutdown().await.unwrap();
        let ino = b.lookup(&root(), ROOT, b"f").await.unwrap().unwrap().attr.ino;
        let opened = b.open(&root(), ino, OpenMode::READ).await.unwrap();
        assert!(opened.kernel_cache, "a file to be recovered is cached by nobody");
    });
}

#[test]
fn a_dead_writers_file_is_recovered_by_the_next_reader() {
    Lab::new(15).run(6, |lab| async move {
        let b = lab.client("b").await;
        let data = pattern(1, 0, 3 * STRIPE);
        {
            let a = lab.client("a").await;
            let h = create(&a, "f").await;
            write(&a, h, 0, &data[..STRIPE + 1000]).await;
            a.fsync(h).await.unwrap();
            write(&a, h, STRIPE + 1000, &data[STRIPE + 1000..]).await;
            lab.env("a").clock.sleep(Duration::from_millis(500)).await;
            lab.world().kill("a");
        }
        let got = content(&b, "f").await;
        same(&got, &data[..STRIPE + 1000]);
        let h = open(&b, "f", OpenMode::BOTH).await;
        write(&b, h, 2 * STRIPE, b"x").await;
        close(&b, h).await;
        let mut expected = data[..STRIPE + 1000].to_vec();
        expected.resize(2 * STRIPE, 0);
        expected.push(b'x');
        same(&content(&b, "f").await, &expected);
    });
}

/// It is cut off from everybody with changes on their way; another client takes over and writes at the same place. When it is
/// back it has the right to write once more, but not to write what was lost.
#[test]
fn what_was_lost_with_a_lease_is_not_sent_under_the_next_one() {
    Lab::new(34).run(6, |lab| async move {
        let (a, b) = (lab.client("a").await, lab.client("b").await);
        let old = pattern(1, 0, STRIPE);
        let h = create(&a, "f").await;
        write(&a, h, 0, &old).await;
        a.fsync(h).await.unwrap();
        let (lost, kept, last) = (pattern(2, 0, 5000), pattern(3, 0, 5000), pattern(4, 0, 700));
        write(&a, h, 3000, &lost).await;
        for n in 0..6 {
            lab.world().partition("a", &format!("s{n}"));
        }
        let (cut_off, syncing) = (a.clone(), lab.env("a").tasks);
        syncing.spawn("fsync", async move { drop(cut_off.fsync(h).await) });
        lab.world().sleep(Duration::from_millis(100)).await;
        lab.world().partition("a", "meta");
        lab.world().sleep(Duration::from_secs(4)).await;
        let of_b = open(&b, "f", OpenMode::BOTH).await;
        write(&b, of_b, 3000, &kept).await;
        close(&b, of_b).await;
        lab.world().heal("a", "meta");
        while a.losses().0 == 0 {
            lab.world().sleep(Duration::from_millis(10)).await;
        }
        let again = open(&a, "f", OpenMode::BOTH).await;
        write(&a, again, 20_000, &last).await;
        for n in 0..6 {
            lab.world().heal("a", &format!("s{n}"));
        }
        close(&a, again).await;
        lab.world().sleep(Duration::from_secs(10)).await;
        let mut expected = old;
        expected[3000..8000].copy_from_slice(&kept);
        expected[20_000..20_700].copy_from_slice(&last);
        same(&content(&lab.client("c").await, "f").await, &expected);
    });
}

#[test]
fn the_metadata_leader_may_restart_under_open_files() {
    Lab::new(16).run(6, |lab| async move {
        let a = lab.client("a").await;
        let data = pattern(1, 0, 2 * STRIPE);
        let h = create(&a, "f").await;
        write(&a, h, 0, &data[..STRIPE]).await;
        lab.world().kill("meta");
        write(&a, h, STRIPE, &data[STRIPE..]).await;
        lab.meta().await;
        close(&a, h).await;
        a.mkdir(&root(), ROOT, b"d", 0o755).await.unwrap();
        same(&content(&lab.client("b").await, "f").await, &data);
    });
}

#[test]
fn truncation_leaves_nothing_behind() {
    Lab::new(17).run(6, |lab| async move {
        let a = lab.client("a").await;
        let data = pattern(1, 0, 3 * STRIPE);
        let h = create(&a, "f").await;
        write(&a, h, 0, &data).await;
        close(&a, h).await;
        let found = a.lookup(&root(), ROOT, b"f").await.unwrap().unwrap();
        let truncating = OpenMode { truncate: true, ..OpenMode::BOTH };
        let h = a.open(&root(), found.attr.ino, truncating).await.unwrap().handle;
        write(&a, h, 100_000, b"end").await;
        close(&a, h).await;
        let mut expected = vec![0; 100_000];
        expected.extend_from_slice(b"end");
        same(&content(&a, "f").await, &expected);
        same(&content(&lab.client("b").await, "f").await, &expected);
        // Grown again over what was cut.
        let h = open(&a, "f", OpenMode::BOTH).await;
        write(&a, h, 2 * STRIPE + 5, b"z").await;
        close(&a, h).await;
        expected.resize(2 * STRIPE + 5, 0);
        expected.push(b'z');
        same(&content(&lab.client("c").await, "f").await, &expected);
    });
}

#[test]
fn the_same_seed_gives_the_same_trace() {
    let run = || {
        let lab = Lab::new(18);
        lab.run(6, |lab| async move {
            let (a, b) = (lab.client("a").await, lab.client("b").await);
            let data = pattern(1, 0, 2 * STRIPE + 1234);
            let h = create(&a, "f").await;
            write(&a, h, 0, &data).await;
            lab.kill_storage(1);
            close(&a, h).await;
            same(&content(&b, "f").await, &data);
        });
        lab.world().trace_hash()
    };
    assert_eq!(run(), run());
}

/// Appends numbered records; each is one write.
async fn append_records(lab: Lab, name: &'static str, seed: u64, count: usize) {
    let c = lab.client(name).await;
    let h = open(&c, "log", OpenMode::BOTH).await;
    for n in 0..count {
        let record = record(seed, n);
        match c.try_append(h, &record) {
            Some(done) => assert_eq!(done.unwrap(), record.len()),
            None => assert_eq!(c.append(h, Bytes::from(record.clone())).await.unwrap(), record.len()),
        }
        if n % 7 == 3 {
            // What was appended is there, whole, for whoever appended it.
            let size =
                c.getattr(c.lookup(&root(), ROOT, b"log").await.unwrap().unwrap().attr.ino).await.unwrap();
            assert!(size.attr.size >= record.len() as u64);
        }
        lab.env(name).clock.sleep(Duration::from_micros(lab.world().rng(name).below(900))).await;
    }
    close(&c, h).await;
}
/// Length first, then bytes that tell whose it is.
fn record(seed: u64, n: usize) -> Vec<u8> {
    let len = 10 + (seed as usize * 131 + n * 977) % [40, 3000, 90_000][n % 3];
    let mut bytes = (len as u32).to_le_bytes().to_vec();
    bytes.push(seed as u8);
    bytes.extend((n as u32).to_le_bytes());
    bytes.extend(pattern(seed * 1000 + n as u64, 0, len));
    bytes
}
/// Reads records back: every one whole, in the order in which each client appended them.
fn check_records(bytes: &[u8], counts: &[usize]) {
    let (mut next, mut at) = (vec![0; counts.len()], 0);
    while at < bytes.len() {
        let len = u32::from_le_bytes(bytes[at..at + 4].try_into().unwrap()) as usize;
        let seed = bytes[at + 4] as usize;
        let n = u32::from_le_bytes(bytes[at + 5..at + 9].try_into().unwrap()) as usize;
        assert!(seed < counts.len() && n == next[seed], "at {at}: record {n} of {seed}, expected {next:?}");
        same(&bytes[at..at + 9 + len], &record(seed as u64, n));
        next[seed] += 1;
        at += 9 + len;
    }
    assert_eq!(next, counts);
}

#[test]
fn appends_of_several_clients_never_meet() {
    Lab::new(41).run(6, |lab| async move {
        let a = lab.client("a").await;
        let h = create(&a, "log").await;
        close(&a, h).await;
        let counts = [40, 55, 25];
        let mut tasks = Vec::new();
        for (seed, name) in ["p", "q", "r"].into_iter().enumerate() {
            let (tx, rx) = tokio::sync::oneshot::channel();
            let work = append_records(lab.clone(), name, seed as u64, counts[seed]);
            lab.env(name).tasks.spawn("append", async move {
                work.await;
                tx.send(()).unwrap();
            });
            tasks.push(rx);
        }
        for task in tasks {
            task.await.unwrap();
        }
        check_records(&content(&a, "log").await, &counts);
    });
}

#[test]
fn a_restart_of_the_leader_takes_no_append_away() {
    Lab::new(42).run(6, |lab| async move {
        let a = lab.client("a").await;
        let h = create(&a, "log").await;
        close(&a, h).await;
        let counts = [30, 30];
        let mut tasks = Vec::new();
        for (seed, name) in ["p", "q"].into_iter().enumerate() {
            let (tx, rx) = tokio::sync::oneshot::channel();
            let work = append_records(lab.clone(), name, seed as u64, counts[seed]);
            lab.env(name).tasks.spawn("append", async move {
                work.await;
                tx.send(()).unwrap();
            });
            tasks.push(rx);
        }
        for _ in 0..3 {
            lab.env("a").clock.sleep(Duration::from_millis(25)).await;
            lab.world().kill("meta");
            lab.meta().await;
        }
        for task in tasks {
            task.await.unwrap();
        }
        check_records(&content(&a, "log").await, &counts);
    });
}

/// The leader has the append, its answer is lost, and with the session nobody can ask for it again.
#[test]
fn an_append_whose_answer_is_lost_with_the_session_is_not_done_twice() {
    Lab::new(48).run(6, |lab| async move {
        let (a, b) = (lab.client("a").await, lab.client("b").await);
        let clock = lab.world().clock();
        let mut unknown = 0;
        for round in 25..50 {
            let name = format!("f{round}");
            let others = create(&b, &name).await;
            let append = OpenMode { append: true, ..OpenMode::BOTH };
            let h = open(&a, &name, append).await;
            let appends = a.append(h, vec![b'a'; 900].into());
            let cut_off = async {
                clock.sleep(Duration::from_micros(round * 40)).await;
                lab.world().partition("meta", "a");
                lab.kill_meta();
                lab.meta().await;
                clock.sleep(Duration::from_secs(10)).await;
                lab.world().heal("meta", "a");
            };
            let (appended, ()) = tokio::join!(appends, cut_off);
            let len = content(&b, &name).await.len();
            match appended {
                Ok(_) => assert_eq!(len, 900, "round {round}"),
                Err(e) => {
                    assert_eq!(e.kind, ErrorKind::Io, "round {round}: {e}");
                    assert!([0, 900].contains(&len), "round {round}: {len}");
                    unknown += u32::from(len == 900);
                }
            }
            drop(a.release(h).await);
            close(&b, others).await;
        }
        assert!(unknown > 0, "no answer was lost");
    });
}

#[test]
fn a_file_is_as_long_as_it_was_made_beside_a_write_of_the_same_client() {
    for seed in 60..72 {
        Lab::new(seed).run(6, |lab| async move {
            let a = lab.client("a").await;
            let h = create(&a, "f").await;
            let ino = a.lookup(&root(), ROOT, b"f").await.unwrap().unwrap().attr.ino;
            let clock = lab.world().clock();
            for round in 1..20 {
                let size = round * 1000;
                let set = SetAttrs { size: Some(size), ..SetAttrs::default() };
                let longer = async { a.setattr(&root(), ino, Some(h), set).await.map(drop) };
                let writes = async {
                    for _ in 0..4 {
                        clock.sleep(Duration::from_micros(seed * 13 + round * 7)).await;
                        write(&a, h, 0, b"0123456789").await;
                    }
                };
                tokio::join!(longer, writes).0.unwrap();
                let stat = a.getattr(ino).await.unwrap();
                assert_eq!(stat.attr.size, size, "seed {seed}, round {round}");
            }
        });
    }
}

#[test]
fn who_cleans_behind_a_cut_while_another_opens_the_file_and_appends_leaves_what_is_new() {
    for seed in 120..132 {
        Lab::new(seed).run(6, |lab| async move {
            let (a, b) = (lab.client("a").await, lab.client("b").await);
            let clock = lab.world().clock();
            for round in 0..40 {
                let name = format!("f{round}");
                let h = create(&a, &name).await;
                write(&a, h, 0, &[7; 5000]).await;
                a.fsync(h).await.unwrap();
                let ino = a.lookup(&root(), ROOT, name.as_bytes()).await.unwrap().unwrap().attr.ino;
                let cut = SetAttrs { size: Some(100), ..SetAttrs::default() };
                a.setattr(&root(), ino, Some(h), cut).await.unwrap();
                let grows = async {
                    clock.sleep(Duration::from_micros(round * 40)).await;
                    write(&a, h, 3000, b"grown").await;
                };
                let appends = async {
                    let append = OpenMode { append: true, ..OpenMode::BOTH };
                    let hb = open(&b, &name, append).await;
                    clock.sleep(Duration::from_micros((seed - 120) * 9)).await;
                    b.append(hb, vec![b'b'; 900].into()).await.unwrap();
                    close(&b, hb).await;
                };
                tokio::join!(grows, appends);
                let found = read(&a, h, 0, 5000).await;
                let appended = found.iter().filter(|byte| **byte == b'b').count();
                assert_eq!(appended, 900, "seed {seed}, round {round}");
                assert_eq!(
                    found.iter().filter(|byte| **byte == 7).count(),
                    100,
                    "seed {seed}, round {round}"
                );
            }
        });
    }
}

#[test]
fn a_file_is_as_long_as_was_written_straight_through_though_the_right_to_write_alone_came_meanwhile() {
    for seed in 80..92 {
        Lab::new(seed).run(6, |lab| async move {
            let (a, b) = (lab.client("a").await, lab.client("b").await);
            let h = create(&a, "f").await;
            write(&a, h, 0, &[7; 100]).await;
            let clock = lab.world().clock();
            for round in 1..20 {
                let hb = open(&b, "f", OpenMode::BOTH).await;
                write(&b, hb, 50, b"b").await;
                let size = 1 + round as usize * 5000;
                let grows = write(&a, h, size - 1, b"x");
                let others_end = async {
                    clock.sleep(Duration::from_micros(round * 50)).await;
                    close(&b, hb).await;
                };
                let writes = async {
                    for _ in 0..6 {
                        clock.sleep(Duration::from_micros(seed * 3 + round * 7)).await;
                        write(&a, h, 0, b"0123456789").await;
                    }
                };
                tokio::join!(grows, others_end, writes);
                let found = read(&a, h, 0, 200_000).await;
                assert_eq!(found.len(), size, "seed {seed}, round {round}");
                assert_eq!(found[size - 1], b'x', "seed {seed}, round {round}");
            }
        });
    }
}

/// A file that was cut has old bytes past its end. Two clients that let it grow again must not take each other's new
/// bytes for old ones.
#[test]
fn two_clients_grow_a_file_that_was_cut() {
    Lab::new(43).run(6, |lab| async move {
        let (a, b) = (lab.client("a").await, lab.client("b").await);
        let ha = create(&a, "f").await;
        let mut model = pattern(1, 0, 5 * STRIPE);
        write(&a, ha, 0, &model).await;
        a.fsync(ha).await.unwrap();
        let ino = a.lookup(&root(), ROOT, b"f").await.unwrap().unwrap().attr.ino;
        let cut = |size: u64| SetAttrs { size: Some(size), ..SetAttrs::default() };
        a.setattr(&root(), ino, Some(ha), cut(1000)).await.unwrap();
        model.truncate(1000);
        let hb = open(&b, "f", OpenMode::BOTH).await;
        for round in 0..3 {
            for n in 0..12 {
                let (c, h) = if n % 2 == 0 { (&a, ha) } else { (&b, hb) };
                let at = 1500 + n * 70_000;
                let data = pattern(round * 100 + n as u64, at, 50_000);
                write(c, h, at, &data).await;
                if model.len() < at + data.len() {
                    model.resize(at + data.len(), 0);
                }
                model[at..at + data.len()].copy_from_slice(&data);
                same(
                    &read(if n % 2 == 0 { &b } else { &a }, if n % 2 == 0 { hb } else { ha }, 0, 6 * STRIPE)
                        .await,
                    &model,
                );
            }
            // Cut again, now while both have it open.
            let size = 777 + round as usize * 100_000;
            b.setattr(&root(), ino, Some(hb), cut(size as u64)).await.unwrap();
            model.truncate(size);
            same(&read(&a, ha, 0, 6 * STRIPE).await, &model);
        }
        close(&a, ha).await;
        close(&b, hb).await;
    });
}
