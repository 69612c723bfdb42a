//! Claim: a volume is a world of its own: nothing moves across its border, its limits hold whoever writes through whichever
//! mount, and its owner does without the superuser.
#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "tests are users of the operating system"
)]
mod common;

use common::{Cluster, can_mount, pattern, shell, text, wait_until, weir};
use serde_json::Value;
use std::fs;
use std::io::{Read, Write};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

const PATIENCE: Duration = Duration::from_secs(60);

fn errno<T: std::fmt::Debug>(result: std::io::Result<T>) -> i32 {
    result.unwrap_err().raw_os_error().unwrap()
}

/// `weir volume …` that must succeed, as JSON.
fn volume(cluster: &Cluster, args: &[&str]) -> Value {
    let dir = cluster.dir();
    let output = weir(&[&["volume"], args, &["--dir", dir.to_str().unwrap(), "--json"]].concat());
    assert!(output.status.success(), "{args:?}: {}", text(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

/// One that must fail: exit code and what was said.
fn refused(cluster: &Cluster, args: &[&str]) -> (i32, String) {
    let dir = cluster.dir();
    let output = weir(&[&["volume"], args, &["--dir", dir.to_str().unwrap()]].concat());
    assert!(!output.status.success(), "{args:?}: {}", text(&output.stdout));
    (output.status.code().unwrap(), text(&output.stderr))
}

#[test]
fn nothing_moves_from_one_volume_into_another() {
    if !can_mount() {
        return;
    }
    let cluster = Cluster::start(1);
    let mount = cluster.mount();
    let made = volume(&cluster, &["create", "beamline", "--owner", "1000", "--mode", "2770"]);
    assert_eq!((made["path"].as_str(), made["owner"].as_u64()), (Some("/beamline"), Some(1000)));
    volume(&cluster, &["create", "home", "/beamline/home"]);
    let inside = mount.join("beamline");
    fs::write(inside.join("f"), b"bytes").unwrap();
    assert_eq!(errno(fs::rename(inside.join("f"), mount.join("f"))), libc::EXDEV);
    assert_eq!(errno(fs::hard_link(inside.join("f"), inside.join("home/f"))), libc::EXDEV);
    assert_eq!(errno(fs::remove_dir(inside.join("home"))), libc::EBUSY);
    fs::rename(inside.join("home"), inside.join("moved")).unwrap();
    fs::rename(inside.join("f"), inside.join("g")).unwrap();

    let listed = volume(&cluster, &["list"]);
    let names: Vec<_> = listed.as_array().unwrap().iter().map(|v| v["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["root", "beamline", "home"]);
    let shown = volume(&cluster, &["show", "beamline"]);
    assert_eq!(
        (&shown["files"], &shown["directories"], &shown["used_bytes"]),
        (&1.into(), &1.into(), &5.into())
    );
    assert_eq!(volume(&cluster, &["show", "home"])["path"], "/beamline/moved");

    let (code, said) = refused(&cluster, &["delete", "beamline", "--force"]);
    assert!(code == 2 && said.contains("\"home\" lies in"), "{said}");
    let (_, said) = refused(&cluster, &["show", "bemline"]);
    assert!(said.contains("hint: `weir volume list`"), "{said}");
    let (code, said) = refused(&cluster, &["create", "a/b"]);
    assert!(code == 2 && said.contains("letters, digits"), "{said}");
    let (code, said) = refused(&cluster, &["create", "x", "/not/there"]);
    assert!(code == 3 && said.contains("there is no \"not\""), "{said}");
    let (code, said) = refused(&cluster, &["quota", "beamline", "--bytes", "10XB"]);
    assert!(code == 2 && said.contains("10XB"), "{said}");
    volume(&cluster, &["rename", "home", "homes"]);
    volume(&cluster, &["delete", "homes"]);
    assert!(!inside.join("moved").exists());
}

fn df(path: &Path) -> (u64, u64, u64, u64) {
    let fs = rustix::fs::statvfs(path).unwrap();
    (fs.f_blocks * fs.f_frsize, fs.f_bavail * fs.f_frsize, fs.f_files, fs.f_ffree)
}

/// Writes until it is refused; how many bytes.
fn fill(path: &Path) -> u64 {
    let mut file = fs::File::options().create(true).append(true).open(path).unwrap();
    let mut written = 0;
    loop {
        match file.write(&pattern(written, 300_000)) {
            Ok(n) => written += n as u64,
            Err(e) => {
                assert_eq!(e.raw_os_error(), Some(libc::EDQUOT), "{e}");
                file.sync_all().unwrap();
                return written;
            }
        }
    }
}

#[test]
fn a_limit_holds_over_two_mounts_and_df_shows_it() {
    if !can_mount() {
        return;
    }
    let cluster = Cluster::start(2);
    let limit = 10 << 20;
    let made = volume(
        &cluster,
        &["create", "v", "--mode", "777", "--bytes", "10MiB", "--inodes", "20", "--admin", "1000"],
    );
    assert_eq!((&made["bytes_hard"], &made["inodes_hard"]), (&limit.into(), &20.into()));
    let [a, b] = [0, 1].map(|n| cluster.mounts[n].join("v"));
    assert_eq!(df(&a), (limit, limit, 20, 20));
    wait_until("targets tell what they have", PATIENCE, || df(&cluster.mounts[0]).0 > limit);
    let (in_a, in_b) = std::thread::scope(|scope| {
        let in_a = scope.spawn(|| fill(&a.join("a")));
        let in_b = fill(&b.join("b"));
        (in_a.join().unwrap(), in_b)
    });
    // Both met it while the other still held a little, which comes back.
    assert!(in_a + in_b <= limit, "{in_a} + {in_b}");
    let rest = fill(&a.join("a"));
    assert_eq!(in_a + in_b + rest, limit);
    assert_eq!(volume(&cluster, &["show", "v"])["used_bytes"], limit);
    assert_eq!(volume(&cluster, &["show", "v"])["state"], "full");
    assert_eq!(df(&b), (limit, 0, 20, 18));
    // Attributes, names and what is there can still be changed.
    fs::rename(a.join("a"), a.join("c")).unwrap();
    fs::remove_file(b.join("c")).unwrap();
    assert_eq!(fill(&b.join("b")), limit - in_b);
    fs::remove_file(b.join("b")).unwrap();
    for n in 0..20 {
        fs::write(a.join(n.to_string()), b"x").unwrap();
    }
    assert_eq!(errno(fs::write(b.join("one more"), b"x")), libc::EDQUOT);
    assert_eq!(errno(fs::create_dir(b.join("one more"))), libc::EDQUOT);

    // Who administers it does without the superuser, but for hard limits.
    let as_user = |args: &[&str]| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_weir"));
        command.arg("volume").args(args).arg("--dir").arg(cluster.dir()).uid(1000).gid(1000).output().unwrap()
    };
    if rustix::process::geteuid().is_root() {
        shell(&format!("chmod -R a+rX {0} && chmod a+rwx {0}/run/*.sock", cluster.dir().display()));
        let output = as_user(&["quota", "v", "--soft-bytes", "5MiB", "--grace", "1h"]);
        assert!(output.status.success(), "{}", text(&output.stderr));
        let output = as_user(&["quota", "v", "--bytes", "1TiB"]);
        assert!(
            !output.status.success() && text(&output.stderr).contains("hint: the superuser"),
            "{output:?}"
        );
        let output = as_user(&["delete", "v", "--force"]);
        assert_eq!(output.status.code(), Some(5), "{output:?}");
    }
    volume(&cluster, &["quota", "v", "--inodes", "none"]);
    fs::write(b.join("one more"), b"x").unwrap();
}

#[test]
fn a_deleted_volume_goes_to_its_end_also_after_a_restart() {
    if !can_mount() {
        return;
    }
    let cluster = Cluster::start(1);
    volume(&cluster, &["create", "v"]);
    let inside = cluster.mount().join("v");
    for dir in 0..10 {
        fs::create_dir(inside.join(format!("d{dir}"))).unwrap();
        for file in 0..300 {
            fs::write(inside.join(format!("d{dir}/f{file}")), b"bytes").unwrap();
        }
    }
    let mut held = fs::File::open(inside.join("d9/f299")).unwrap();
    let (code, said) = refused(&cluster, &["delete", "v"]);
    assert!(code == 2 && said.contains("hint: --force"), "{said}");
    assert_eq!(volume(&cluster, &["delete", "v", "--force"])["deleting"], true);
    cluster.kill("meta");
    cluster.up();
    assert_eq!(errno(fs::metadata(&inside)), libc::ENOENT);
    let only_root = || volume(&cluster, &["list"]).as_array().unwrap().len() == 1;
    wait_until("nothing of it is left", PATIENCE, only_root);
    let root = volume(&cluster, &["show", "root"]);
    assert_eq!(
        (&root["files"], &root["directories"], &root["used_bytes"]),
        (&0.into(), &0.into(), &0.into())
    );
    // Who has a file open reads on.
    let mut bytes = String::new();
    held.read_to_string(&mut bytes).unwrap();
    assert_eq!(bytes, "bytes");
    volume(&cluster, &["create", "v"]);
    assert!(fs::read_dir(&inside).unwrap().next().is_none());
}
