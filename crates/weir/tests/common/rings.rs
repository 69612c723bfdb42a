//! FUSE over io_uring is off in kernels, so a test switches it on. It is off again, if it was, when the last
//! test of this machine that needs it has ended.
use rustix::fs::{FlockOperation, flock};
use std::fs::{self, File, OpenOptions};
use std::path::Path;

const SWITCH: &str = "/sys/module/fuse/parameters/enable_uring";
/// Holds what the switch was before the first test; those that need it share a lock of it.
const BEFORE: &str = "/tmp/weir-test-uring-before";

/// As long as it lives, mounts can have rings.
pub struct Rings(File);

impl Rings {
    /// `None`, with the reason printed: this kernel has none, or this user may not switch them on.
    pub fn allow() -> Option<Rings> {
        let left_out = |why: &str| eprintln!("left out: {why}");
        if !Path::new(SWITCH).exists() {
            left_out(&format!("{SWITCH} is missing: the kernel has no FUSE over io_uring"));
            return None;
        }
        let file =
            OpenOptions::new().create(true).truncate(false).read(true).write(true).open(BEFORE).ok()?;
        flock(&file, FlockOperation::LockExclusive).unwrap();
        if fs::read_to_string(BEFORE).unwrap().is_empty() {
            // Not read earlier: another test may just have ended.
            fs::write(BEFORE, fs::read_to_string(SWITCH).unwrap()).unwrap();
        }
        if let Err(e) = fs::write(SWITCH, "Y") {
            left_out(&format!("{SWITCH} cannot be written: {e}"));
            return None;
        }
        flock(&file, FlockOperation::LockShared).unwrap();
        Some(Rings(file))
    }

    /// While the kernel offers none; one test at a time.
    pub fn forbid() -> Option<Rings> {
        let allowed = Rings::allow()?;
        flock(&allowed.0, FlockOperation::LockExclusive).unwrap();
        fs::write(SWITCH, "N").unwrap();
        Some(allowed)
    }
}

impl Drop for Rings {
    fn drop(&mut self) {
        // The process that holds the exclusive lock is the last user.
        let last = flock(&self.0, FlockOperation::NonBlockingLockExclusive).is_ok();
        if last && Path::new(BEFORE).exists() {
            let before = fs::read_to_string(BEFORE).unwrap_or_default();
            let _ = fs::write(SWITCH, before.trim());
            let _ = self.0.set_len(0);
        }
    }
}
