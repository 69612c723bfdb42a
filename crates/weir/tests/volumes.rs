//! Claim: a volume is a world of its own: nothing moves across its border, its limits hold whoever writes through whichever
//! mount, and its owner does without the superuser.
#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "tests are users of the operating system"
)]
mod common;

use common::{Cluster, can_mount, text, weir};
use serde_json::Value;
use std::fs;

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
