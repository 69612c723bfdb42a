//! Claim: a home that does not answer delays only its own lane, within its deadlines, and is used again when
//! it answers. The home is a file system of this test, mounted by FUSE, that hangs on request.
#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "tests are users of the operating system"
)]
use bytes::Bytes;
use fuser::{
    BackgroundSession, Config, Errno, FileAttr, FileHandle, FileType, Filesystem, FopenFlags, Generation,
    INodeNo, LockOwner, OpenFlags, ReplyAttr, ReplyData, ReplyEmpty, ReplyEntry, ReplyOpen, ReplyStatfs,
    ReplyWrite, Request, WriteFlags,
};
use std::{
    ffi::OsStr,
    path::Path,
    sync::{Arc, Condvar, Mutex},
    time::{Duration, Instant, UNIX_EPOCH},
};
use weir_home::{Expect, Fault, FileHome, FileHomeConfig, Home, HomePath, IdMap, LaneLimits, Make, Outcome};
use weir_proto::meta::Time;

const MARK: &[u8] = b"weir home 1\nrelation test\nroot 1\n";
const THREADS: usize = 4;
const WAITING: usize = 8;
const DEADLINE: Duration = Duration::from_millis(500);

/// Open: calls pass. Shut: every call waits.
#[derive(Default)]
struct Gate(Mutex<bool>, Condvar);
impl Gate {
    fn pass(&self) {
        let shut = self.0.lock().unwrap();
        drop(self.1.wait_while(shut, |shut| *shut).unwrap());
    }
    fn set(&self, shut: bool) {
        *self.0.lock().unwrap() = shut;
        self.1.notify_all();
    }
}

/// A root with the mark and one file `f`.
struct Hanging {
    gate: Arc<Gate>,
    bytes: Arc<Mutex<Vec<u8>>>,
}

impl Hanging {
    fn attr(&self, ino: u64) -> Option<FileAttr> {
        self.gate.pass();
        let (kind, size) = match ino {
            1 => (FileType::Directory, 0),
            2 => (FileType::RegularFile, MARK.len()),
            3 => (FileType::RegularFile, self.bytes.lock().unwrap().len()),
            _ => return None,
        };
        let at = UNIX_EPOCH + Duration::from_secs(size as u64);
        Some(FileAttr {
            ino: INodeNo(ino),
            size: size as u64,
            blocks: 1,
            atime: at,
            mtime: at,
            ctime: at,
            crtime: at,
            kind,
            perm: 0o755,
            nlink: 1,
            uid: 0,
            gid: 0,
            rdev: 0,
            blksize: 4096,
            flags: 0,
        })
    }
}

impl Filesystem for Hanging {
    fn lookup(&self, _: &Request, _: INodeNo, name: &OsStr, reply: ReplyEntry) {
        self.gate.pass();
        let ino = match name.to_str() {
            Some(".weir-home") => 2,
            Some("f") => 3,
            _ => 0,
        };
        match self.attr(ino) {
            Some(attr) => reply.entry(&Duration::ZERO, &attr, Generation(0)),
            None => reply.error(Errno::ENOENT),
        }
    }
    fn getattr(&self, _: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        self.gate.pass();
        match self.attr(ino.0) {
            Some(attr) => reply.attr(&Duration::ZERO, &attr),
            None => reply.error(Errno::ENOENT),
        }
    }
    fn read(
        &self,
        _: &Request,
        ino: INodeNo,
        _: FileHandle,
        offset: u64,
        size: u32,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyData,
    ) {
        self.gate.pass();
        let bytes = self.bytes.lock().unwrap();
        let all = if ino.0 == 2 { MARK } else { &bytes[..] };
        let from = all.len().min(offset as usize);
        reply.data(&all[from..all.len().min(from + size as usize)]);
    }
    fn write(
        &self,
        _: &Request,
        _: INodeNo,
        _: FileHandle,
        offset: u64,
        data: &[u8],
        _: WriteFlags,
        _: OpenFlags,
        _: Option<LockOwner>,
        reply: ReplyWrite,
    ) {
        self.gate.pass();
        let mut bytes = self.bytes.lock().unwrap();
        let end = offset as usize + data.len();
        let len = bytes.len().max(end);
        bytes.resize(len, 0);
        bytes[offset as usize..end].copy_from_slice(data);
        reply.written(data.len() as u32);
    }
    fn opendir(&self, _: &Request, _: INodeNo, _: OpenFlags, reply: ReplyOpen) {
        self.gate.pass();
        reply.opened(FileHandle(0), FopenFlags::empty());
    }
    fn statfs(&self, _: &Request, _: INodeNo, reply: ReplyStatfs) {
        self.gate.pass();
        reply.statfs(1, 1, 1, 1, 1, 512, 255, 512);
    }
    fn fsync(&self, _: &Request, _: INodeNo, _: FileHandle, _: bool, reply: ReplyEmpty) {
        self.gate.pass();
        reply.ok();
    }
}

/// Opens its gate and unmounts, however the test ends.
struct Mounted {
    gate: Arc<Gate>,
    session: Option<BackgroundSession>,
    dir: tempfile::TempDir,
}
impl Mounted {
    fn new() -> Option<Mounted> {
        if !Path::new("/dev/fuse").exists() {
            assert!(
                std::env::var_os("WEIR_TEST_ALL").is_none(),
                "/dev/fuse is missing: load the module fuse"
            );
            eprintln!("left out: /dev/fuse is missing");
            return None;
        }
        let (gate, dir) = (Arc::<Gate>::default(), tempfile::tempdir().unwrap());
        let files = Hanging { gate: gate.clone(), bytes: Arc::default() };
        let session = fuser::spawn_mount(files, dir.path(), &Config::default()).unwrap();
        Some(Mounted { gate, session: Some(session), dir })
    }
}
impl Drop for Mounted {
    fn drop(&mut self) {
        self.gate.set(false);
        // Detached first, also with open files there, as of a test that fails. The directory is removed next.
        let detached = rustix::mount::unmount(self.dir.path(), rustix::mount::UnmountFlags::DETACH);
        let session = self.session.take();
        if detached.is_err() || !std::thread::panicking() {
            drop(session);
        } else {
            // Its thread ends with the last open file, which this test's own tasks may hold.
            std::mem::forget(session);
        }
    }
}

fn config(path: &Path, is_new: bool) -> FileHomeConfig {
    let limits = LaneLimits { threads_max: THREADS, waiting_max: WAITING, deadline: DEADLINE };
    FileHomeConfig {
        only_of: None,
        below: None,
        run_as: None,
        path: path.into(),
        relation: "test".into(),
        is_new,
        only_reads: false,
        ids: IdMap::default(),
        limits,
    }
}

fn is_unreachable<T>(outcome: &Outcome<T>) -> bool {
    matches!(outcome, Err(Fault::Unreachable(_)))
}

fn threads() -> usize {
    std::fs::read_dir("/proc/self/task").unwrap().count()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hung_home_holds_up_nothing_but_itself() {
    let Some(mounted) = Mounted::new() else { return };
    let env = weir_env::real::env();
    let home = Arc::new(FileHome::open(&env, config(mounted.dir.path(), false)).await.unwrap());
    let elsewhere = tempfile::tempdir().unwrap();
    let other = FileHome::open(
        &env,
        FileHomeConfig { limits: LaneLimits::default(), ..config(elsewhere.path(), true) },
    );
    let other = other.await.unwrap();

    let f = HomePath::parse("f").unwrap();
    let found = home.stat(&f).await.unwrap().unwrap();
    let expect = Expect::Ours(found.fingerprint);
    let writer: Arc<dyn weir_home::HomeWriter> = home.open_write(&f, &expect).await.unwrap().into();
    writer.write_at(0, vec![Bytes::from_static(b"before")]).await.unwrap();
    writer.sync().await.unwrap();

    let threads_before = threads();
    mounted.gate.set(true);
    // Many calls of all kinds, more than there is room for.
    let begun = Instant::now();
    let mut calls = Vec::new();
    for n in 0..60u64 {
        let (home, writer, f) = (home.clone(), writer.clone(), f.clone());
        calls.push(tokio::spawn(async move {
            match n % 4 {
                0 => is_unreachable(&home.stat(&f).await),
                1 => is_unreachable(&home.list(&HomePath::root(), None, 10).await),
                2 => is_unreachable(&writer.write_at(n, vec![Bytes::from_static(b"late")]).await),
                _ => is_unreachable(&home.space().await),
            }
        }));
    }
    // Meanwhile another home works, and so do the node's own disks, for as long as this one hangs.
    let attrs = weir_home::Attrs {
        mode: 0o644,
        uid: 0,
        gid: 0,
        atime: Time { nanos: 0 },
        mtime: Time { nanos: 0 },
        xattrs: vec![],
    };
    let mut done = 0;
    while done < 50 || calls.iter().any(|call| !call.is_finished()) {
        let at = HomePath::parse(format!("{}", done % 50)).unwrap();
        other.make(&at, &Make::File, &attrs).await.unwrap();
        assert_eq!(env.tasks.blocking(move || done).await, done);
        done += 1;
    }
    for call in calls {
        assert!(call.await.unwrap(), "every call ends with the home being out of reach");
    }
    assert!(begun.elapsed() < Duration::from_secs(30), "all by one deadline, not one after the other");
    assert!((1..=THREADS).contains(&home.hung()), "{} hang", home.hung());
    // The other home has up to 16 threads of its own.
    assert!(threads() <= threads_before + THREADS + 16 + 8, "{} threads, {threads_before} before", threads());
    // Again and again: no more threads, the same answer.
    for _ in 0..200 {
        assert!(is_unreachable(&home.stat(&f).await));
    }
    assert!(home.hung() <= THREADS);

    mounted.gate.set(false);
    let patience = Instant::now() + Duration::from_secs(60);
    while home.hung() > 0 {
        assert!(Instant::now() < patience, "{} calls still hang", home.hung());
        tokio::task::yield_now().await;
    }
    let found = loop {
        match home.stat(&f).await {
            Ok(found) => break found.unwrap(),
            Err(fault) => assert!(Instant::now() < patience, "{fault}"),
        }
    };
    let writer = home.open_write(&f, &Expect::Ours(found.fingerprint.clone())).await.unwrap();
    writer.write_at(0, vec![Bytes::from_static(b"after!")]).await.unwrap();
    let fingerprint = writer.sync().await.unwrap();
    let reader = home.open_read(&f, &Expect::Unchanged(fingerprint)).await.unwrap();
    assert_eq!(reader.read_at(0, 6).await.unwrap().concat(), b"after!");
}
