//! Claim: wrong input gets a clear error with a hint, and never harms a running cluster.
#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "tests are users of the operating system"
)]
mod common;

use common::{Cluster, can_mount, pattern, text, weir};
use std::fs;
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::time::Duration;

/// Runs, expects failure, and returns the exit code and the message.
fn refused(args: &[&str]) -> (i32, String) {
    let output = weir(args);
    assert!(!output.status.success(), "{args:?} should fail\n{}", text(&output.stdout));
    (output.status.code().unwrap(), text(&output.stderr))
}

#[test]
fn wrong_flags_are_named() {
    let (code, printed) = refused(&["up", "--dri", "/x"]);
    assert_eq!(code, 2);
    assert!(printed.contains("--dri") && printed.contains("--dir"), "{printed}");
    let (code, printed) = refused(&["up", "--dir", "/x", "--scheme", "ec:4"]);
    assert_eq!(code, 2);
    assert!(printed.contains("ec:K+M"), "{printed}");
    let (code, printed) = refused(&["upp"]);
    assert_eq!(code, 2);
    assert!(printed.contains("up"), "{printed}");
}

#[test]
fn a_wrong_configuration_line_is_named_with_a_hint() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("weir.toml");
    fs::write(&file, "[node]\nname = \"n1\"\n\n[mount]\nmemroy_mib = 4\n").unwrap();
    for command in [vec!["config", "check"], vec!["storage", "--config"], vec!["coord", "--config"]] {
        let mut args = command.clone();
        args.push(file.to_str().unwrap());
        let (code, printed) = refused(&args);
        assert_eq!(code, 2);
        assert!(
            printed.contains("weir.toml:5: memroy_mib")
                && printed.contains("hint: did you mean \"memory_mib\"?"),
            "{printed}"
        );
    }
    fs::write(&file, "[coord]\ncell_kib = 100\n").unwrap();
    let (_, printed) = refused(&["config", "check", file.to_str().unwrap()]);
    assert!(printed.contains("coord.cell_kib") && printed.contains("hint:"), "{printed}");
}

#[test]
fn a_port_taken_by_another_process_is_replaced() {
    let cluster = Cluster::with(0, &["--tcp"]);
    let (dir, port) = (cluster.dir(), cluster.port("storage-1"));
    assert!(weir(&["down", "--dir", dir.to_str().unwrap()]).status.success());
    let _squatter = TcpListener::bind(("127.0.0.1", port)).unwrap();
    cluster.up();
    assert_ne!(cluster.port("storage-1"), port);
    assert_eq!(cluster.status()["serving"], true);
}

/// Two clusters that start at the same moment may choose the same port.
#[test]
fn a_port_taken_while_the_cluster_starts_is_replaced() {
    // The last target starts when the others have joined, so there is time; but not for a thread that stalls.
    for _ in 0..5 {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("cluster");
        let manifest = dir.join("cluster.toml");
        let squatter = std::thread::spawn(move || {
            loop {
                let written = fs::read_to_string(&manifest).unwrap_or_default();
                match port_in(&written, "storage-6") {
                    Some(port) => return (port, TcpListener::bind(("127.0.0.1", port))),
                    None => std::thread::sleep(Duration::from_millis(1)),
                }
            }
        });
        let cluster = Cluster::at(Some(dir), 0, &["--tcp"]);
        let (port, Ok(_listener)) = squatter.join().unwrap() else { continue };
        assert_ne!(cluster.port("storage-6"), port);
        assert_eq!(cluster.status()["serving"], true);
        return;
    }
    panic!("the port was never taken in time");
}

fn port_in(manifest: &str, process: &str) -> Option<u16> {
    let manifest: toml::Table = manifest.parse().ok()?;
    let mut processes = manifest.get("processes")?.as_array()?.iter();
    let process = processes.find(|p| p.get("name").and_then(|n| n.as_str()) == Some(process))?;
    u16::try_from(process.get("port")?.as_integer()?).ok()
}

#[test]
fn too_few_targets_and_foreign_directories_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("c");
    let (_, printed) =
        refused(&["up", "--dir", path.to_str().unwrap(), "--targets", "3", "--scheme", "ec:4+2"]);
    assert!(printed.contains("needs 6 targets") && printed.contains("hint:"), "{printed}");
    assert!(!path.exists(), "nothing was made");
    fs::write(dir.path().join("thesis.tex"), "x").unwrap();
    let (_, printed) = refused(&["up", "--dir", dir.path().to_str().unwrap()]);
    assert!(printed.contains("holds files") && printed.contains("hint:"), "{printed}");
    let (code, printed) = refused(&["status", "--dir", dir.path().to_str().unwrap()]);
    assert_eq!(code, 3);
    assert!(printed.contains("hint: name the directory that `weir up --dir` was given"), "{printed}");
    let (_, printed) = refused(&["file", "layout", "/tmp"]);
    assert!(printed.contains("not on a Weir") && printed.contains("hint:"), "{printed}");
    let (_, printed) = refused(&["unmount", dir.path().to_str().unwrap()]);
    assert!(printed.contains("nothing is mounted") && printed.contains("hint:"), "{printed}");
    let (_, printed) = refused(&["status", "--coordinator", "tcp:127.0.0.1:1"]);
    assert!(printed.contains("does not answer") && printed.contains("hint:"), "{printed}");
}

/// The result of a command with wrong arguments: exit status, texts in its message, texts that are not.
type Wrong<'a> = (&'a [&'a str], i32, &'a [&'a str], &'a [&'a str]);

fn refused_as(table: &[Wrong<'_>], more: &[&str]) {
    for (args, code, is, is_not) in table {
        let (got, printed) = refused(&[args, more].concat());
        assert_eq!(got, *code, "{args:?}: {printed}");
        for text in *is {
            assert!(printed.contains(text), "{args:?}: {text:?} is not in: {printed}");
        }
        for text in *is_not {
            assert!(!printed.contains(text), "{args:?}: {text:?} is in: {printed}");
        }
    }
}

#[test]
fn wrong_input_gets_a_message_that_helps() {
    let dir = tempfile::tempdir().unwrap();
    let at = |name: &str| dir.path().join(name).display().to_string();
    fs::write(at("thesis.tex"), "x").unwrap();
    fs::create_dir(at("empty")).unwrap();
    let (here, empty, new) = (dir.path().display().to_string(), at("empty"), at("new"));
    let makes_new = format!("hint: `weir up --dir {new}` makes");
    let table: &[Wrong<'_>] = &[
        (&["status"], 2, &["no cluster is named", "--dir DIR", "--coordinator ADDR", "--at PATH"], &[]),
        (&["statu"], 2, &["'status', 'target'"], &[]),
        // A cluster is never made among other files.
        (&["status", "--dir", &here], 3, &["hint: name the directory"], &["makes"]),
        (&["status", "--dir", &empty], 3, &["` makes a cluster there"], &[]),
        (&["status", "--dir", &new], 3, &[&makes_new], &[]),
        (
            &["status", "--coordinator", "tcp:127.0.0.1:1"],
            8,
            &["does not answer at tcp:127.0.0.1:1: nothing listens there", "hint:"],
            &["GetMap", "os error", "failed"],
        ),
        (&["file", "state", &new], 3, &[&format!("stat {new}: No such file")], &["ask about"]),
        (&["volume", "create", "v", "--bytes", "10XB"], 2, &["is not a size", "or none"], &[]),
        (&["volume", "admin", "v", "--owner", "nobody-is-called-so"], 2, &["knows no user"], &["digit"]),
        (&["volume", "admin", "v", "--owner", "99999999999"], 2, &["99999999999 is not a user"], &[".."]),
    ];
    refused_as(table, &[]);
    if can_mount() {
        let args = ["mount", &new, "--coordinator", "tcp:127.0.0.1:1"];
        refused_as(&[(&args, 3, &["does not exist", &format!("hint: create it: mkdir -p {new}")], &[])], &[]);
    }
    // The shell of a completion script may stop reading at any time.
    let script = format!("{} completion bash | true; exit ${{PIPESTATUS[0]}}", env!("CARGO_BIN_EXE_weir"));
    let output = std::process::Command::new("bash").args(["-c", &script]).output().unwrap();
    assert!(output.status.success() && output.stderr.is_empty(), "{}", text(&output.stderr));
}

#[test]
fn a_cluster_says_what_is_wrong_with_a_request() {
    if !can_mount() {
        return;
    }
    let cluster = Cluster::with_volume().0;
    let dir = cluster.dir().display().to_string();
    let at: &[&str] = &["--dir", &dir];
    for args in [["snapshot", "data", "monday"], ["create", "full", "--bytes=1MB"]] {
        cluster.run_weir(&[&["volume"], &args[..]].concat());
    }
    fs::write(cluster.mount().join("full/f"), "x").unwrap();
    let nowhere = format!("file://{}/nowhere", dir);
    let table: &[Wrong<'_>] = &[
        (&["volume", "create", "data"], 4, &["there is a volume \"data\" already"], &["VolumeCreate", "v2"]),
        (&["volume", "show", "nope"], 3, &["there is no volume \"nope\"", "volume list"], &["VolumeGet"]),
        (&["volume", "delete", "full"], 4, &["hint: --force"], &["VolumeDelete"]),
        (
            &["volume", "delete", "data", "--force"],
            4,
            &["has snapshots", "hint: `weir volume snapshot data monday --delete` deletes one"],
            &["VolumeDelete"],
        ),
        (&["volume", "policy", "data"], 2, &["no policy is given"], &[]),
        (
            &["volume", "policy", "data", "--pool", "nvme"],
            3,
            &["hint: there are the pools"],
            &["the root of"],
        ),
        (
            &["volume", "snapshot", "data", "monday"],
            4,
            &["`weir volume snapshots data` shows"],
            &["volume list"],
        ),
        (&["volume", "snapshot", "data", "a/b"], 2, &["the name of a volume or a snapshot"], &[]),
        (
            &["volume", "list", "--namespace", "nope"],
            3,
            &["there is no namespace", "namespace list"],
            &["yet"],
        ),
        (&["volume", "backup", "data"], 2, &["have no destination", "hint: give it: --to"], &["0 dest"]),
        (&["target", "clear", "t1"], 4, &["t1 is in service"], &["ClearTarget"]),
        (&["relation", "add", "data", &nowhere], 3, &["does not exist on this machine", "mkdir -p"], &[]),
        (&["relation", "show", "r1"], 3, &["there is no relation"], &[]),
    ];
    refused_as(table, at);
    let top = cluster.mount().join("data").display().to_string();
    refused_as(&[(&["file", "state", &top], 2, &["is a directory", "hint: name files"], &["Invalid"])], &[]);
    let old = format!("{top}/.snapshots/monday");
    refused_as(&[(&["file", "stat", &old], 11, &["is in a snapshot"], &["not on a Weir"])], &[]);
    // A variable stands for --dir; an address counts before it.
    let with = |dir: &str, args: &[&str]| {
        let mut weir = std::process::Command::new(env!("CARGO_BIN_EXE_weir"));
        weir.args(args).env("WEIR_DIR", dir).output().unwrap()
    };
    let listed = with(&dir, &["volume", "list"]);
    assert!(text(&listed.stdout).contains("/data"), "{}", text(&listed.stderr));
    let coordinator = format!("unix:{dir}/socket/coord.sock");
    let listed = with("/nowhere", &["volume", "list", "--coordinator", &coordinator]);
    assert!(text(&listed.stdout).contains("/data"), "{}", text(&listed.stderr));
    // Each answer can be read by a program.
    let home = tempfile::tempdir().unwrap();
    let url = format!("file://{}", home.path().display());
    cluster.run_weir(&["relation", "add", "data", &url]);
    assert!(cluster.run_weir(&["relation", "show", "data"]).starts_with("r1: data"));
    let printed = cluster.run_weir(&["relation", "pause", "r1", "--json"]);
    let printed: serde_json::Value = serde_json::from_str(&printed).unwrap();
    assert_eq!((&printed["relation"], &printed["done"]), (&"r1".into(), &"paused".into()));
    // No command waits for a coordinator that has ended.
    cluster.kill("coord");
    refused_as(&[(&["volume", "list"], 8, &["nothing listens there", "hint:"], &["GetMap"])], at);
}

#[test]
fn an_occupied_port_is_named() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let addr = format!("tcp:{}", listener.local_addr().unwrap());
    let dir = tempfile::tempdir().unwrap();
    let (code, printed) =
        refused(&["coord", "--new", "--dir", dir.path().to_str().unwrap(), "--listen", &addr]);
    assert!(code > 2, "{code}");
    assert!(printed.contains(&addr) && printed.contains("in use") && printed.contains("hint:"), "{printed}");
}

/// One cluster for all that needs a running one: it must keep working after each.
#[test]
fn a_running_cluster_survives_garbage_and_strangers() {
    if !can_mount() {
        return;
    }
    let cluster = Cluster::with(1, &["--tcp"]);
    let file = cluster.mount().join("f");
    let bytes = pattern(5, 5_000_000);
    fs::write(&file, &bytes).unwrap();

    // Garbage, half a frame and silence on every port.
    let status = cluster.status();
    let nodes = status["nodes"].as_array().unwrap();
    let tcp: Vec<String> = nodes
        .iter()
        .flat_map(|n| n["addresses"].as_array().unwrap())
        .filter_map(|a| a.as_str()?.strip_prefix("tcp:").map(str::to_string))
        .collect();
    assert!(tcp.len() >= 7, "{status:#}");
    let mut silent = Vec::new();
    for (n, addr) in tcp.iter().enumerate() {
        for garbage in
            [pattern(n as u64, 4096), vec![0; 64], b"GET / HTTP/1.1\r\n\r\n".to_vec(), vec![0xff; 1 << 20]]
        {
            let mut stream = TcpStream::connect(addr).unwrap();
            stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
            let _ = stream.write_all(&garbage); // it may be closed before all is sent
            let _ = stream.shutdown(Shutdown::Write);
            let mut answer = Vec::new();
            let _ = stream.read_to_end(&mut answer); // closed, with or without a reason
        }
        silent.push(TcpStream::connect(addr).unwrap());
    }
    assert!(fs::read(&file).unwrap() == bytes);
    assert_eq!(cluster.status()["healthy"], true, "{:#}", cluster.status()["troubles"]);

    // Another `up` with other wishes.
    let dir = cluster.dir();
    let (_, printed) = refused(&["up", "--dir", dir.to_str().unwrap(), "--targets", "5"]);
    assert!(printed.contains("has 6 targets") && printed.contains("hint:"), "{printed}");

    // A second coordinator on the same directory.
    let (_, printed) =
        refused(&["coord", "--dir", dir.join("coord").to_str().unwrap(), "--listen", "tcp:127.0.0.1:0"]);
    assert!(printed.contains("another coordinator runs") && printed.contains("hint:"), "{printed}");

    // A target of another cluster, offered to this one.
    let other = Cluster::with(0, &["--targets", "1"]);
    let stolen = other.dir().join("t1");
    assert!(weir(&["down", "--dir", other.dir().to_str().unwrap()]).status.success());
    let coordinator = format!("unix:{}", dir.join("socket/coord.sock").display());
    let (_, printed) = refused(&[
        "storage",
        "--name",
        "thief",
        "--coordinator",
        &coordinator,
        "--dir",
        stolen.to_str().unwrap(),
        "--listen",
        "tcp:127.0.0.1:0",
    ]);
    assert!(printed.contains("belongs to cluster") && printed.contains("hint:"), "{printed}");

    // A name that another node has.
    let second = tempfile::tempdir().unwrap();
    let (_, printed) = refused(&[
        "storage",
        "--name",
        "storage-1",
        "--coordinator",
        &coordinator,
        "--dir",
        second.path().to_str().unwrap(),
        "--listen",
        "tcp:127.0.0.1:0",
    ]);
    assert!(printed.contains("storage-1") && printed.contains("hint:"), "{printed}");

    assert!(fs::read(&file).unwrap() == bytes);
    drop(silent);
}

#[test]
fn a_full_disk_is_an_error_and_deleting_helps() {
    let is_root = rustix::process::geteuid().is_root();
    if !can_mount() || !(is_root || common::left_out("only root may mount a small disk")) {
        return;
    }
    // Six targets on a memory file system: their journals take a quarter of it.
    let root = tempfile::tempdir().unwrap();
    let small = root.path().join("small");
    fs::create_dir(&small).unwrap();
    common::shell(&format!("mount -t tmpfs -o size=900m small {}", small.display()));
    let result = std::panic::catch_unwind(|| {
        let mount = root.path().join("mnt");
        let dir = small.join("c");
        let up = weir(&["up", "--dir", dir.to_str().unwrap(), "--mount", mount.to_str().unwrap()]);
        assert!(up.status.success(), "{}", text(&up.stderr));
        let block = pattern(1, 4 << 20);
        let mut failed = None;
        for n in 0..400 {
            let written = fs::File::create(mount.join(format!("f{n}"))).and_then(|mut f| {
                f.write_all(&block)?;
                f.sync_all()
            });
            if let Err(e) = written {
                failed = Some((n, e));
                break;
            }
        }
        let (n, e) = failed.expect("the disk is full at some point");
        assert_eq!(e.raw_os_error(), Some(28), "after {n} files: {e}");
        assert!(n > 0, "the first file fits");
        assert!(fs::read(mount.join("f0")).unwrap() == block, "what was written is still read");
        for n in 0..n {
            fs::remove_file(mount.join(format!("f{n}"))).unwrap();
        }
        common::wait_until("space comes back", Duration::from_secs(120), || {
            fs::write(mount.join("again"), &block).is_ok()
        });
        assert!(weir(&["down", "--dir", dir.to_str().unwrap()]).status.success());
    });
    let _ = weir(&["down", "--dir", small.join("c").to_str().unwrap()]);
    common::shell(&format!("umount -l {}", small.display()));
    result.unwrap();
}
