//! `mount -o remount,…` of a live mount. mount(8) leaves file systems of the kind `fuse.weir`, and of the kind `fuse` with
//! the source `weir`, to the program `weir`. It calls it as `weir SOURCE DIRECTORY -o OPTIONS`, and as `weir DIRECTORY -o
//! OPTIONS`: the words of fstab, not of this command line.
use crate::failure::{Doing, Failure, Outcome};
use rustix::mount::MountFlags;
use std::ffi::OsString;
use std::path::PathBuf;
use std::time::Duration;
use weir_proto::Error;

const BUSY_TRIES_MAX: u32 = 100;
const BUSY_PAUSE: Duration = Duration::from_millis(30);

/// A call of mount(8).
#[derive(Debug, PartialEq, Eq)]
pub struct HelperCall {
    directory: PathBuf,
    options: String,
}

impl HelperCall {
    /// `None`: these are not its words. `arguments` without the program's name.
    pub fn parse(arguments: &[OsString]) -> Option<HelperCall> {
        let ([directory, flag, options] | [_, directory, flag, options]) = arguments else { return None };
        let ours = flag == "-o"
            && !arguments[0].to_string_lossy().starts_with('-')
            && PathBuf::from(directory).is_absolute();
        ours.then(|| HelperCall {
            directory: directory.into(),
            options: options.to_string_lossy().into_owned(),
        })
    }

    pub fn run(&self) -> Outcome<()> {
        let Some(flags) = remount_flags(&self.options) else {
            return Err(Failure::new(
                Error::unsupported("mount(8) can change a mount of Weir, not make one"),
                "`weir mount DIRECTORY --coord ADDRESS` mounts",
            ));
        };
        let doing = format!("remount {}", self.directory.display());
        let mut tries = 0;
        loop {
            match rustix::mount::mount_remount(&self.directory, flags, c"") {
                // Files that were closed a moment ago are being released.
                Err(rustix::io::Errno::BUSY) if tries < BUSY_TRIES_MAX => tries += 1,
                done => return done.doing(doing),
            }
            std::thread::sleep(BUSY_PAUSE);
        }
    }
}

/// The kernel's flags; `None` without the word "remount". What is not named is as mounts are by default.
fn remount_flags(options: &str) -> Option<MountFlags> {
    let mut flags = MountFlags::empty();
    let mut remount = false;
    for option in options.split(',') {
        let (flag, on) = match option {
            "remount" => {
                remount = true;
                continue;
            }
            "ro" => (MountFlags::RDONLY, true),
            "rw" => (MountFlags::RDONLY, false),
            "nosuid" => (MountFlags::NOSUID, true),
            "suid" => (MountFlags::NOSUID, false),
            "nodev" => (MountFlags::NODEV, true),
            "dev" => (MountFlags::NODEV, false),
            "noexec" => (MountFlags::NOEXEC, true),
            "exec" => (MountFlags::NOEXEC, false),
            "noatime" => (MountFlags::NOATIME, true),
            "relatime" => (MountFlags::RELATIME, true),
            _ => continue, // of mount(8) itself
        };
        flags.set(flag, on);
    }
    remount.then_some(flags)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_words_of_mount_are_told_from_those_of_this_program() {
        let call = |words: &[&str]| HelperCall::parse(&words.iter().map(OsString::from).collect::<Vec<_>>());
        assert!(call(&["weir", "/mnt", "-o", "rw,remount"]).is_some());
        assert!(call(&["/mnt", "-o", "rw,remount"]).is_some());
        assert_eq!(call(&["up", "-o", "rw"]), None);
        assert_eq!(call(&["mount", "/mnt", "--coord", "x"]), None);
        assert_eq!(call(&["status"]), None);
    }

    #[test]
    fn the_last_word_counts_and_only_a_remount_is_done() {
        assert_eq!(remount_flags("rw,nosuid"), None);
        assert_eq!(remount_flags("rw,nodev,remount,ro"), Some(MountFlags::NODEV | MountFlags::RDONLY));
        assert_eq!(remount_flags("remount,ro,rw,suid"), Some(MountFlags::empty()));
    }
}
