//! The files that the package installs with the program: man pages, completion scripts, and files for
//! systemd.
use crate::completion;
use crate::helper::HELPERS;
use crate::manual;
use crate::unit;
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use weir_admin::failure::{Doing, Outcome};

/// A system user for sites that do not run servers as root: `runuser -u weir -- weir init …` creates a
/// configuration whose unit runs as this user.
const SYSUSERS: &str = "# Runs servers whose configuration was made by it: see machines.md.
u weir - \"Weir file system\" /var/lib/weir
";
const TMPFILES: &str = "# Sockets of mounts, and mounts made by mount(8): pid files and logs.
d /run/weir 0755 root root -
d /var/log/weir 0755 root root -
d /var/lib/weir 0755 root root -
";
const ENVIRONMENT: &str = "# Variables of all Weir units: see systemd.exec(5), EnvironmentFile.
#
# How much is logged: error, warn, info, debug or trace, also for each module (info,weir_store=debug).
#WEIR_LOG=info
";

/// A link to the program, from the directory where mount(8) looks for its helpers.
const PROGRAM: &str = "../bin/weir";

fn put_link(link: &Path) -> Outcome<()> {
    let parent = link.parent().unwrap_or(link);
    fs::create_dir_all(parent).doing(format_args!("make {}", parent.display()))?;
    match fs::remove_file(link) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => Err(e),
        _ => symlink(PROGRAM, link),
    }
    .doing(format_args!("make {}", link.display()))
}

/// Writes all of it below a directory, in the layout of the package.
pub fn write_files(dir: &Path) -> Outcome<()> {
    let put = |name: &str, bytes: &[u8]| {
        let path = dir.join(name);
        let parent = path.parent().unwrap_or(dir);
        fs::create_dir_all(parent).doing(format_args!("make {}", parent.display()))?;
        fs::write(&path, bytes).doing(format_args!("write {}", path.display()))
    };
    for (name, text) in manual::pages()? {
        put(&format!("man/{name}"), &text)?;
    }
    for (name, text) in unit::templates() {
        put(&format!("systemd/{name}"), text.as_bytes())?;
    }
    use clap_complete::Shell::{Bash, Fish, Zsh};
    for (name, shell) in [("weir.bash", Bash), ("_weir", Zsh), ("weir.fish", Fish)] {
        put(&format!("completion/{name}"), completion::script(shell)?.as_bytes())?;
    }
    for helper in HELPERS {
        put_link(&dir.join("sbin").join(helper))?;
    }
    put("sysusers.conf", SYSUSERS.as_bytes())?;
    put("tmpfiles.conf", TMPFILES.as_bytes())?;
    put("environment", ENVIRONMENT.as_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_package_has_every_kind_of_file() {
        let dir = tempfile::tempdir().unwrap();
        write_files(dir.path()).unwrap();
        write_files(dir.path()).unwrap(); // once more, over the existing files
        for name in
            ["man/weir.1", "systemd/weir-mover@.service", "completion/_weir", "sysusers.conf", "environment"]
        {
            assert!(fs::metadata(dir.path().join(name)).unwrap().len() > 0, "{name}");
        }
        assert_eq!(fs::read_link(dir.path().join("sbin/mount.weir")).unwrap(), Path::new(PROGRAM));
        let bash = fs::read_to_string(dir.path().join("completion/weir.bash")).unwrap();
        assert!(bash.contains("COMPLETE"), "the script asks this program: {bash}");
    }
}
