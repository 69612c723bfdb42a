//! Runs work as another user, on one thread: with the user and groups that file systems check.
//!
//! Invariant: when the work is over, even by a panic, the thread's identity is restored; otherwise the
//! process ends. Root's privileges over modes and owners are dropped meanwhile (`capabilities(7)`).
use rustix::io::{Errno, Result};
use rustix::process::{Gid, getegid, geteuid, getgroups};

/// A user of this machine.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Actor {
    pub uid: u32,
    pub gid: u32,
    pub groups: Vec<u32>,
}

impl Actor {
    /// Runs `work` as this user. An error: this process is not permitted to, and nothing was run.
    pub fn act<T>(&self, work: impl FnOnce() -> T) -> std::io::Result<T> {
        let groups: Vec<Gid> = self.groups.iter().map(|gid| Gid::from_raw(*gid)).collect();
        let _back = Back { groups: getgroups()? };
        rustix::thread::set_thread_groups(&groups)?;
        set_group(self.gid)?;
        set_user(self.uid)?; // last: it drops root's privileges
        Ok(work())
    }
}

/// Restores the thread's identity.
struct Back {
    groups: Vec<Gid>,
}

impl Drop for Back {
    fn drop(&mut self) {
        let back = || {
            set_user(geteuid().as_raw())?;
            set_group(getegid().as_raw())?;
            if getgroups()? == self.groups { Ok(()) } else { rustix::thread::set_thread_groups(&self.groups) }
        };
        let done: Result<()> = back();
        if let Err(e) = done {
            // Later work on this thread would run as the wrong user.
            eprintln!("a thread that acted as another user cannot become itself again: {e}");
            std::process::abort();
        }
    }
}

/// The system call returns the previous number, even if it refuses: so the present one is queried.
fn set_user(uid: u32) -> Result<()> {
    // SAFETY: two numbers, no memory; it changes the calling thread alone.
    let now = unsafe {
        libc::setfsuid(uid);
        libc::setfsuid(u32::MAX)
    };
    if now as u32 == uid { Ok(()) } else { Err(Errno::PERM) }
}

fn set_group(gid: u32) -> Result<()> {
    // SAFETY: as above.
    let now = unsafe {
        libc::setfsgid(gid);
        libc::setfsgid(u32::MAX)
    };
    if now as u32 == gid { Ok(()) } else { Err(Errno::PERM) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs;
    use std::os::unix::fs::{MetadataExt, PermissionsExt};

    /// The calling thread's identity in the kernel: users, groups, capabilities.
    fn self_now() -> Vec<String> {
        let status = fs::read_to_string("/proc/thread-self/status").unwrap();
        let lines = status.lines().filter(|line| {
            ["Uid:", "Gid:", "Groups:", "CapEff:"].iter().any(|start| line.starts_with(start))
        });
        lines.map(str::to_owned).collect()
    }

    #[test]
    fn a_thread_acts_as_a_user_and_is_itself_again() {
        if !geteuid().is_root() {
            return; // only root may act as other users
        }
        let dir = tempfile::tempdir().unwrap();
        fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o777)).unwrap();
        let (secret, made) = (dir.path().join("secret"), dir.path().join("made"));
        fs::write(&secret, "root's").unwrap();
        fs::set_permissions(&secret, fs::Permissions::from_mode(0o600)).unwrap();
        let before = self_now();
        let ada = Actor { uid: 1000, gid: 1001, groups: vec![1001, 1002] };
        let seen = ada.act(|| {
            fs::write(&made, "hers").unwrap();
            let other = std::thread::spawn(|| fs::metadata("/proc/self").is_ok());
            assert!(other.join().unwrap());
            (fs::read(&secret).map_err(|e| e.kind()), self_now())
        });
        let (read, within) = seen.unwrap();
        assert_eq!(read.unwrap_err(), std::io::ErrorKind::PermissionDenied);
        assert_ne!(within, before);
        assert_eq!((fs::metadata(&made).unwrap().uid(), fs::metadata(&made).unwrap().gid()), (1000, 1001));
        assert_eq!(self_now(), before);
        assert!(fs::read(&secret).is_ok());
        let panics = std::panic::catch_unwind(|| ada.act(|| panic!("expected by the test")));
        assert!(panics.is_err());
        assert_eq!(self_now(), before, "also after a panic");
    }
}
