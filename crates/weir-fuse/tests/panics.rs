//! Claim: a request whose work panics is answered with EIO, and the mount serves the next one. Without the
//! answer a program waits for ever, and no signal ends it.
#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "tests are users of the operating system"
)]
use fuser::{
    Config, Errno, FileAttr, FileHandle, FileType, Filesystem, INodeNo, ReplyAttr, ReplyEntry, Request,
};
use rustix::mount::UnmountFlags;
use std::ffi::OsStr;
use std::fs;
use std::path::Path;
use std::sync::mpsc;
use std::time::{Duration, UNIX_EPOCH};

const STATFS: u32 = 17;
/// For all requests together; a missing answer would take for ever.
const PATIENCE: Duration = Duration::from_secs(60);

struct Panics;

impl Filesystem for Panics {
    fn begun(&self, request: &Request) {
        assert_ne!(request.opcode(), STATFS, "expected by the test");
    }
    fn getattr(&self, _: &Request, ino: INodeNo, _: Option<FileHandle>, reply: ReplyAttr) {
        let attr = FileAttr {
            ino,
            size: 0,
            blocks: 0,
            atime: UNIX_EPOCH,
            mtime: UNIX_EPOCH,
            ctime: UNIX_EPOCH,
            crtime: UNIX_EPOCH,
            kind: FileType::Directory,
            perm: 0o755,
            nlink: 2,
            uid: 0,
            gid: 0,
            rdev: 0,
            blksize: 4096,
            flags: 0,
        };
        reply.attr(&Duration::ZERO, &attr);
    }
    fn lookup(&self, _: &Request, _: INodeNo, name: &OsStr, reply: ReplyEntry) {
        assert_ne!(name, "panics", "expected by the test");
        reply.error(Errno::ENOENT);
    }
}

#[test]
fn a_request_that_panics_is_an_error_of_its_program() {
    let dir = tempfile::tempdir().unwrap();
    let can_mount = rustix::process::geteuid().is_root() && fs::exists("/dev/fuse").unwrap_or(false);
    if !can_mount {
        eprintln!("left out: only root mounts here");
        return;
    }
    let mounted = fuser::spawn_mount(Panics, dir.path(), &Config::default()).unwrap();
    let (done, answered) = mpsc::channel();
    let at = dir.path().to_owned();
    let program = std::thread::spawn(move || {
        requests(&at);
        let _ = done.send(()); // the test may have given up
    });
    let waited = answered.recv_timeout(PATIENCE);
    if waited == Err(mpsc::RecvTimeoutError::Timeout) {
        // The kernel ends all requests of this mount with an error, so that the thread and the test end.
        rustix::mount::unmount(dir.path(), UnmountFlags::FORCE | UnmountFlags::DETACH).unwrap();
    }
    let all = program.join();
    assert!(waited != Err(mpsc::RecvTimeoutError::Timeout), "a request had no answer for {PATIENCE:?}");
    all.unwrap();
    mounted.umount_and_join().unwrap();
}

fn requests(at: &Path) {
    let errno = |e: std::io::Error| e.raw_os_error();
    for _ in 0..10 {
        // With a reply made before the panic, and without one.
        assert_eq!(fs::metadata(at.join("panics")).map_err(errno).unwrap_err(), Some(libc::EIO));
        assert_eq!(rustix::fs::statfs(at).unwrap_err(), rustix::io::Errno::IO);
        assert_eq!(fs::metadata(at.join("absent")).map_err(errno).unwrap_err(), Some(libc::ENOENT));
        assert!(fs::metadata(at).unwrap().is_dir());
    }
}
