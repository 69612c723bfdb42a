//! What clients and their kernels keep is what others see: data, sizes, names and times.
use super::*;
use std::sync::{Arc, Mutex};
use std::time::Duration;
use weir_client::{Client, Forget, Handle, KernelCache, NAME_LOAN, OpenMode};
use weir_proto::meta::RenameMode;
use weir_proto::{InodeId, VolumeId};

#[derive(Default)]
struct Kernel(Mutex<Vec<(InodeId, Forget)>>);
impl KernelCache for Kernel {
    fn invalidate_inode(&self, ino: InodeId, what: Forget) {
        self.0.lock().unwrap().push((ino, what));
    }
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
fn a_page_read_is_not_older_than_an_earlier_write() {
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

/// A kernel fills the rest of a page with zeros, and shows them when it learns that the file is longer.
#[test]
fn no_page_read_is_shorter_than_the_kernels_known_size() {
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
            let known_size = Mutex::new(START);
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
                    let known_size = *known_size.lock().unwrap();
                    assert!(
                        got.len() >= known_size,
                        "seed {seed}: {} bytes, less than the known size {known_size}",
                        got.len()
                    );
                    if got.len() == END {
                        return assert!(got.iter().all(|b| *b == 1));
                    }
                }
            };
            let polls = async {
                while *known_size.lock().unwrap() < END {
                    let size = b.getattr(ino).await.unwrap().attr.size as usize;
                    *known_size.lock().unwrap() = size;
                }
            };
            tokio::join!(writes, reads, polls);
            close(&b, writer).await;
        });
    }
}

#[test]
fn changes_of_one_client_are_visible_to_the_other_at_once() {
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
        assert!(!kernel.0.lock().unwrap().is_empty(), "the kernel was notified");
    });
}

#[test]
fn a_deferred_close_is_reported_before_the_lease_is_returned() {
    Lab::new(31).run(6, |lab| async move {
        let (a, b) = (lab.client("a").await, lab.client("b").await);
        for n in 0..3 {
            let name = format!("f{n}");
            let h = create(&a, &name).await;
            write(&a, h, 0, b"by a").await;
            close(&a, h).await;
            // At once: the leader still counts a's opens. Were they there, b would share the file and cache
            // nothing.
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
fn an_access_time_is_reported_before_the_lease_is_returned() {
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
        // At once, before it is reported by itself.
        assert_eq!(b.getattr(ino).await.unwrap().attr.atime.nanos, read_at);
        clock.sleep(Duration::from_millis(100)).await;
        same(&read(&a, h, 0, 5).await, b"bytes");
        assert_eq!(a.getattr(ino).await.unwrap().attr.atime.nanos, read_at, "newer than the last change");
        write(&a, h, 0, b"B").await;
        clock.sleep(Duration::from_millis(1)).await;
        same(&read(&a, h, 0, 5).await, b"Bytes");
        let again = clock.wall().0;
        // A time that is set is not overtaken by an earlier read.
        let set = weir_client::SetAttrs {
            atime: Some(weir_client::SetTime::At(weir_proto::meta::Time { nanos: 77 })),
            ..Default::default()
        };
        assert_eq!(a.getattr(ino).await.unwrap().attr.atime.nanos, again);
        assert_eq!(a.setattr(&root(), ino, None, set).await.unwrap().attr.atime.nanos, 77);
        clock.sleep(Duration::from_secs(3)).await;
        assert_eq!(b.getattr(ino).await.unwrap().attr.atime.nanos, 77);
        // Reported by itself within two seconds; and not at all where no client needs it.
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
fn a_name_is_absent_without_asking_until_another_makes_it() {
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
        let listing = a.readdir(&root(), dir, 0, 100, true).await.unwrap();
        assert_eq!((listing.entries.len(), listing.end), (2, true));
        assert_eq!(known(b"y"), Some(None));
        a.rename(&root(), dir, b"x", dir, b"y", RenameMode::Replace).await.unwrap();
        assert_eq!(known(b"x"), Some(None));
        assert_eq!(a.lookup(&root(), dir, b"y").await.unwrap().unwrap().attr.ino, theirs.attr.ino);
        b.rmdir(&root(), dir, b"y").await.unwrap();
        assert!(a.lookup(&root(), dir, b"y").await.unwrap().is_none());
    });
}

/// Its group keeps serving without a target that is cut off from the coordinator, as is the reader of the
/// file or of a snapshot: neither knows.
#[test]
fn a_client_with_an_old_map_reads_nothing_old_there() {
    for (victim, how) in (0..6).flat_map(|victim| ["alone", "shared", "snapshot"].map(|how| (victim, how))) {
        let shared = how == "shared";
        Lab::new(870 + victim).run(6, |lab| async move {
            let (a, b, world) = (lab.client("a").await, lab.client("b").await, lab.world());
            let mut data = pattern(1, 0, STRIPE);
            let ha = create(&a, "f").await;
            write(&a, ha, 0, &data).await;
            a.fsync(ha).await.unwrap();
            let hb = open(&b, "f", if shared { OpenMode::BOTH } else { OpenMode::READ }).await;
            if shared {
                write(&b, hb, 0, &data[..1]).await;
                write(&a, ha, 0, &data[..1]).await;
            }
            same(&read(&b, hb, 0, STRIPE).await, &data);
            let out = format!("s{victim}");
            [out.as_str(), "b"].iter().for_each(|who| world.partition(who, "coord"));
            world.sleep(Duration::from_secs(3)).await; // its silence is noticed
            for cell in 0..4 {
                let at = cell * CELL + 100;
                data[at..at + 5].copy_from_slice(b"newer");
                write(&a, ha, at, b"newer").await;
            }
            a.fsync(ha).await.unwrap();
            let heals = async {
                world.sleep(Duration::from_secs(5)).await;
                world.heal_all();
            };
            let reads_once = async {
                if how != "snapshot" {
                    return read(&b, hb, 0, STRIPE).await;
                }
                let ino = a.lookup(&root(), ROOT, b"f").await.unwrap().unwrap().attr.ino;
                let snapshot = a.take_snapshot(&root(), VolumeId::ROOT, "s").await.unwrap().number;
                let file = b.snapshot_open(&root(), snapshot, ino).await.unwrap();
                b.snapshot_read(&file, 0, STRIPE).await.unwrap().concat()
            };
            same(&tokio::join!(reads_once, heals).0, &data);
        });
    }
}

/// A kernel that keeps names that are lent to it.
struct Names;
impl KernelCache for Names {
    fn invalidate_inode(&self, _: InodeId, _: Forget) {}
    fn keeps_names(&self) -> bool {
        true
    }
}

/// Looks a name up, and returns whether a kernel may keep the answer, now or after the directory was left
/// alone for a moment.
async fn lends(lab: &Lab, c: &Client, dir: InodeId, name: &str) -> bool {
    for _ in 0..3 {
        let found = c.lookup(&root(), dir, name.as_bytes()).await.unwrap().map(|found| found.attr.ino);
        if c.lend_name(dir, name.as_bytes(), found) {
            return true;
        }
        lab.world().sleep(Duration::from_millis(150)).await;
    }
    false
}

async fn mkdir(c: &Client, dir: InodeId, name: &str) -> InodeId {
    c.mkdir(&root(), dir, name.as_bytes(), 0o755).await.unwrap().attr.ino
}

#[test]
fn no_change_is_done_while_another_kernel_caches_the_old_state() {
    Lab::new(931).run(6, |lab| async move {
        let a = lab.client("a").await;
        let b = lab.client_with("b", 64 << 20, Arc::new(Names)).await;
        let (clock, world) = (lab.world().clock(), lab.world());
        let (dir, other) = (mkdir(&a, ROOT, "dir").await, mkdir(&a, ROOT, "other").await);
        mkdir(&a, dir, "there").await;
        assert!(lends(&lab, &b, dir, "there").await && lends(&lab, &b, dir, "absent").await);
        let ino = b.lookup(&root(), dir, b"there").await.unwrap().unwrap().attr.ino;
        assert!(!b.lend_name(dir, b"there", None) && !b.lend_name(dir, b"absent", Some(ino)), "it is not so");
        assert!(!b.lend_name(dir, b"never asked for", None));
        let kept_until = clock.now() + NAME_LOAN;
        mkdir(&a, other, "x").await;
        assert!(clock.now() < kept_until, "nothing of that directory is in the kernel");
        mkdir(&a, dir, "absent").await;
        assert!(clock.now() >= kept_until, "the kernel may keep its absence until then");
        assert!(!b.lend_name(dir, b"there", Some(ino)), "the lease is gone");
        // Names of a directory that other clients keep changing are looked up each time, and no change waits.
        assert!(!lends(&lab, &b, dir, "absent").await);
        let begun = clock.now();
        a.rmdir(&root(), dir, b"absent").await.unwrap();
        assert!(clock.now() < begun + NAME_LOAN);
        world.sleep(Duration::from_secs(6)).await;
        assert!(lends(&lab, &b, dir, "absent").await && lends(&lab, &b, dir, "there").await);
        let kept_until = clock.now() + NAME_LOAN;
        a.rmdir(&root(), dir, b"there").await.unwrap();
        assert!(clock.now() >= kept_until);
        assert!(b.lookup(&root(), dir, b"there").await.unwrap().is_none());
        // No client waits for a loan that has expired.
        world.sleep(Duration::from_secs(20)).await;
        assert!(lends(&lab, &b, dir, "there").await);
        world.sleep(Duration::from_secs(1)).await;
        let begun = clock.now();
        mkdir(&a, dir, "there").await;
        assert!(clock.now() < begun + NAME_LOAN);
        assert!(lends(&lab, &b, dir, "there").await, "and others are made");
    });
}

#[test]
fn a_moved_name_takes_its_loan_along_or_waits_for_its_end() {
    Lab::new(934).run(6, |lab| async move {
        let a = lab.client("a").await;
        let b = lab.client_with("b", 64 << 20, Arc::new(Names)).await;
        let (clock, world) = (lab.world().clock(), lab.world());
        let (from, to) = (mkdir(&b, ROOT, "from").await, mkdir(&b, ROOT, "to").await);
        let moves = async |name: &str| {
            mkdir(&b, from, name).await;
            assert!(lends(&lab, &b, from, name).await, "{name}");
            let kept_until = clock.now() + NAME_LOAN;
            let name = name.as_bytes();
            b.rename(&root(), from, name, to, name, RenameMode::Replace).await.unwrap();
            kept_until
        };
        // No lease on the other directory: another may change it, and b is not asked.
        mkdir(&a, to, "x").await;
        let kept_until = moves("unleased").await;
        assert!(clock.now() >= kept_until);
        world.sleep(Duration::from_secs(30)).await;
        b.lookup(&root(), to, b"y").await.unwrap();
        let kept_until = moves("leased").await;
        assert!(clock.now() < kept_until, "the loan is one of the other directory now");
        a.rmdir(&root(), to, b"leased").await.unwrap();
        assert!(clock.now() >= kept_until, "whose lease waits for its end");
    });
}

#[test]
fn a_kernel_keeps_no_name_past_the_term_of_its_lease() {
    Lab::with(932, "ec:4+2", 1000).run(6, |lab| async move {
        let (a, world) = (lab.client("a").await, lab.world());
        let b = lab.client_with("b", 64 << 20, Arc::new(Names)).await;
        let dir = mkdir(&a, ROOT, "dir").await;
        assert!(lends(&lab, &b, dir, "absent").await);
        lab.cut_off("b");
        // b is not asked, and not waited for for longer than its term.
        let kept = async {
            let mut until = world.now();
            while b.lend_name(dir, b"absent", None) {
                until = world.now() + NAME_LOAN;
                world.sleep(Duration::from_millis(10)).await;
            }
            until
        };
        let made = async {
            mkdir(&a, dir, "absent").await;
            world.now()
        };
        let (kept_until, made) = tokio::join!(kept, made);
        assert!(
            made >= kept_until,
            "the leader gave the name to another while the kernel kept that it is absent"
        );
        lab.let_back("b");
        world.sleep(Duration::from_secs(7)).await;
        assert!(b.lookup(&root(), dir, b"absent").await.unwrap().is_some());
        assert!(lends(&lab, &b, dir, "absent").await);
    });
}

#[test]
fn an_unchanged_file_is_reopened_without_a_message() {
    Lab::new(933).run(6, |lab| async move {
        let (a, b) = (lab.client("a").await, lab.client("b").await);
        let h = create(&a, "f").await;
        write(&a, h, 0, b"bytes").await;
        close(&a, h).await;
        let ino = a.lookup(&root(), ROOT, b"f").await.unwrap().unwrap().attr.ino;
        assert!(b.try_open(ino, OpenMode::READ).is_none(), "it was never open here");
        let h = open(&b, "f", OpenMode::READ).await;
        close(&b, h).await;
        for _ in 0..5 {
            let asked = b.status().asked;
            let first = b.try_open(ino, OpenMode::READ).expect("kept from before").handle;
            assert!(b.try_open(ino, OpenMode::BOTH).is_none());
            assert!(b.try_open(ino, OpenMode::READ).is_none(), "one was kept");
            same(&read(&b, first, 0, 5).await, b"bytes");
            close(&b, first).await;
            assert_eq!(b.status().asked, asked);
        }
        // Its changer learns of no open, and has the file for itself.
        let h = open(&a, "f", OpenMode::BOTH).await;
        write(&a, h, 0, b"BYTES").await;
        assert!(b.try_open(ino, OpenMode::READ).is_none());
        close(&a, h).await;
        same(&content(&b, "f").await, b"BYTES");
        b.unlink(&root(), ROOT, b"f").await.unwrap();
        assert!(b.try_open(ino, OpenMode::READ).is_none(), "it has no name");
        lab.world().sleep(Duration::from_secs(2)).await;
        let gone = b.open(&root(), ino, OpenMode::READ).await.unwrap_err();
        assert_eq!(gone.kind, weir_proto::ErrorKind::Stale, "it went with its last open: {gone}");
    });
}

/// Far more files than a mount's memory holds are looked up. The kernel forgets none by itself.
#[test]
fn inodes_stay_within_the_memory_of_the_mount() {
    const FILES: usize = 3000;
    const MEMORY: u64 = 4 << 20;
    Lab::new(78).run(6, |lab| async move {
        let kernel = Arc::new(Kernel::default());
        let (a, b) = (lab.client("a").await, lab.client_with("b", MEMORY, kernel.clone()).await);
        for n in 0..FILES {
            close(&a, create(&a, &format!("f{n}")).await).await;
        }
        let kept = open(&b, "f7", OpenMode::BOTH).await;
        write(&b, kept, 0, b"unsaved").await;
        for n in 0..FILES {
            b.lookup(&root(), InodeId::ROOT, format!("f{n}").as_bytes()).await.unwrap().unwrap();
        }
        let within = async {
            while b.status().inodes > FILES as u64 / 2 {
                lab.world().sleep(Duration::from_secs(1)).await;
            }
        };
        lab.world().clock().timeout(Duration::from_secs(30), within).await.unwrap();
        assert!(b.status().memory_used_bytes <= MEMORY, "{}", b.status().memory_used_bytes);
        assert!(kernel.0.lock().unwrap().len() > FILES / 2, "its kernel drops them");
        // It does not believe bytes under a lease that it has released; it has its own change still.
        let h = open(&a, "f8", OpenMode::BOTH).await;
        write(&a, h, 0, b"another").await;
        close(&a, h).await;
        assert_eq!(content(&b, "f8").await, b"another");
        assert_eq!(read(&b, kept, 0, 7).await, b"unsaved");
        close(&b, kept).await;
        assert_eq!(content(&a, "f7").await, b"unsaved");
    });
}
