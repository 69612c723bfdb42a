//! Limits of the owner of a volume at its homes: the rules of `weir home` and the rights of movers.
use super::*;
use std::net::TcpListener;

fn mode_and_owner(path: &Path) -> (u32, u32, u32) {
    let meta = fs::symlink_metadata(path).unwrap();
    (meta.mode() & 0o7777, meta.uid(), meta.gid())
}

fn make_device(path: &Path) {
    let (kind, mode) = (rustix::fs::FileType::CharacterDevice, rustix::fs::Mode::from_raw_mode(0o666));
    rustix::fs::mknodat(rustix::fs::CWD, path, kind, mode, rustix::fs::makedev(1, 3)).unwrap();
}

fn is_device(path: &Path) -> bool {
    fs::symlink_metadata(path).is_ok_and(|m| m.rdev() == rustix::fs::makedev(1, 3))
}

/// A program of Ada's with the bits that make it run as her, one of root's, and a device.
fn make_dangerous(dir: &Path) {
    fs::write(dir.join("program"), "#!/bin/sh\n").unwrap();
    chown(dir.join("program"), Some(ADA), Some(ADA)).unwrap();
    fs::set_permissions(dir.join("program"), fs::Permissions::from_mode(0o6755)).unwrap();
    fs::write(dir.join("roots"), "root's").unwrap();
    fs::set_permissions(dir.join("roots"), fs::Permissions::from_mode(0o4711)).unwrap();
    make_device(&dir.join("device"));
}

impl Users {
    fn make_hers(&self) -> PathBuf {
        let hers = self.allowed.path().join("ada");
        fs::create_dir(&hers).unwrap();
        fs::set_permissions(&hers, fs::Permissions::from_mode(0o750)).unwrap();
        chown(&hers, Some(ADA), Some(ADA)).unwrap();
        hers
    }
    fn place(&self) -> String {
        format!("file://{}", self.allowed.path().display())
    }
}

fn url_of(path: &Path) -> String {
    format!("file://{}", path.display())
}

#[test]
fn a_home_stops_when_its_place_is_forbidden_and_goes_on() {
    if !can_mount() || !is_root() {
        return;
    }
    let users = Users::start();
    let (bench, place) = (&users.bench, users.place());
    let as_ada = |args: &[&str]| weir_as(ADA, &bench.cluster, args);
    assert!(succeeds(&as_ada(&["home", "list"])).contains(&place));
    denied(&as_ada(&["home", "allow", "file:///"]), "user 1000 may not do that here");
    denied(&as_ada(&["home", "forbid", &place]), "user 1000 may not do that here");
    for bad in ["/a", "file:///a/../b", "s3://b?credentials=/k"] {
        assert_eq!(bench.try_run_weir(&["home", "allow", bad]).status.code(), Some(2), "{bad}");
    }
    assert_eq!(bench.try_run_weir(&["home", "forbid", "file:///nowhere"]).status.code(), Some(3));
    let hers = users.make_hers();
    for elsewhere in [
        "file:///",
        "file:///etc",
        &format!("{place}x"),
        &format!("{place}/../x"),
        &format!("{place}/%2e%2e/x"),
    ] {
        let refused = users.add(elsewhere, &[]);
        assert!(!refused.status.success(), "{elsewhere}");
    }
    denied(
        &users.add("file:///etc", &[]),
        "hint: an administrator may allow the place by `weir home allow URL`",
    );
    succeeds(&users.add(&url_of(&hers), &[]));
    fs::write(bench.data.join("frame"), pattern(1, 1 << 20)).unwrap();
    bench.wait_state("synced");
    bench.run_weir(&["home", "forbid", &place]);
    users.is_held_back("homes of users are allowed nowhere");
    let status = text(&bench.try_run_weir(&["status"]).stdout);
    assert!(status.contains("cannot be used"), "{status}");
    assert!(fs::read(hers.join("frame")).unwrap() == pattern(1, 1 << 20), "what is there stays");
    assert!(!hers.join("note").exists());
    bench.run_weir(&["home", "allow", &place]);
    wait_until("what was held back to be at home", PATIENCE, || {
        fs::read(hers.join("note")).is_ok_and(|bytes| bytes == b"note")
    });
    let wanted = ["HomeForbid", &place, "console", "ok"];
    wait_until("the record of it", PATIENCE, || has(&bench.cluster, wanted, None));
    let shown: Value = serde_json::from_str(&bench.run_weir(&["home", "list", "--json"])).unwrap();
    assert_eq!(shown[0]["place"], place, "{shown}");
}

#[test]
fn the_path_of_a_home_is_checked_at_each_open() {
    if !can_mount() || !is_root() {
        return;
    }
    let users = Users::start();
    let hers = users.make_hers();
    // It is a link from the beginning, or becomes one later; where it leads to is hers, and no place of
    // homes.
    chown(&users.bench.home, Some(ADA), Some(ADA)).unwrap();
    succeeds(&users.add(&url_of(&hers), &[]));
    fs::write(users.bench.data.join("frame"), b"frame").unwrap();
    users.bench.wait_state("synced");
    users.bench.cluster.kill("mover-1");
    fs::rename(&hers, users.allowed.path().join("aside")).unwrap();
    symlink(&users.bench.home, &hers).unwrap();
    users.bench.cluster.up();
    users.is_held_back("leads out of");
    assert_eq!(fs::read_dir(&users.bench.home).unwrap().count(), 0);
    // One that stays inside is none of it.
    fs::remove_file(&hers).unwrap();
    symlink("aside", &hers).unwrap();
    wait_until("the home to be used again", PATIENCE, || users.allowed.path().join("aside/note").exists());
    // Nor does a directory of another user become hers.
    let roots = users.allowed.path().join("roots");
    fs::create_dir(&roots).unwrap();
    users.bench.run_weir(&["relation", "remove", "r1"]);
    succeeds(&users.add(&url_of(&roots), &[]));
    users.is_held_back("belongs to user 0, and user 1000 named it");
}

#[test]
fn attributes_that_grant_rights_are_not_shipped() {
    if !can_mount() || !is_root() {
        return;
    }
    let users = Users::start();
    let (bench, hers) = (&users.bench, users.make_hers());
    make_dangerous(&bench.data);
    succeeds(&users.add(&url_of(&hers), &[]));
    let conflicts = || bench.relation()["conflicts"].as_array().unwrap().clone();
    wait_until("the device to be in conflict", PATIENCE, || !conflicts().is_empty());
    let why = conflicts()[0]["why"].as_str().unwrap().to_owned();
    assert!(why.contains("/device is a device"), "{why}");
    let settled = |name: &str, wanted: (u32, u32, u32)| {
        wait_until(&format!("{name} at home with {wanted:?}"), PATIENCE, || {
            hers.join(name).exists() && mode_and_owner(&hers.join(name)) == wanted
        });
    };
    settled("program", (0o755, ADA, ADA));
    settled("roots", (0o711, NOBODY, NOBODY));
    // Nor by a later change; whose the home itself is was decided there.
    fs::set_permissions(bench.data.join("program"), fs::Permissions::from_mode(0o4700)).unwrap();
    fs::set_permissions(&bench.data, fs::Permissions::from_mode(0o777)).unwrap();
    settled("program", (0o700, ADA, ADA));
    assert_eq!(mode_and_owner(&hers), (0o750, ADA, ADA));
    assert!(!hers.join("device").exists());

    // The rule may let it through: from then on.
    bench.run_weir(&["home", "allow", &users.place(), "--keep-setuid", "--allow-root"]);
    fs::set_permissions(bench.data.join("program"), fs::Permissions::from_mode(0o4711)).unwrap();
    fs::set_permissions(bench.data.join("roots"), fs::Permissions::from_mode(0o4711)).unwrap();
    fs::set_permissions(bench.data.join("roots"), fs::Permissions::from_mode(0o4755)).unwrap();
    settled("program", (0o4711, ADA, ADA));
    settled("roots", (0o4755, 0, 0));
    let inode = conflicts()[0]["inode"].as_str().unwrap().to_owned();
    bench.run_weir(&["relation", "resolve", "r1", &inode, "--keep", "retry"]);
    wait_until("the device to be at home", PATIENCE, || is_device(&hers.join("device")));
}

#[test]
fn attributes_that_grant_rights_are_not_imported() {
    if !can_mount() || !is_root() {
        return;
    }
    let users = Users::start();
    let (data, hers) = (&users.bench.data, users.make_hers());
    make_dangerous(&hers);
    fs::write(hers.join("plain"), "hers").unwrap();
    chown(hers.join("plain"), Some(ADA), Some(ADA)).unwrap();
    succeeds(&users.add(&url_of(&hers), &["--direction", "mirror"]));
    wait_until("the names to be there", PATIENCE, || data.join("plain").exists());
    assert_eq!(mode_and_owner(&data.join("program")), (0o755, ADA, ADA));
    assert_eq!(mode_and_owner(&data.join("roots")), (0o711, NOBODY, NOBODY));
    assert!(fs::symlink_metadata(data.join("device")).is_err());
    assert_eq!(fs::read_to_string(data.join("roots")).unwrap(), "root's");
    assert_eq!(mode_and_owner(&hers.join("program")), (0o6755, ADA, ADA), "nothing was changed at home");
}

#[test]
fn a_rule_maps_numbers_both_ways() {
    if !can_mount() || !is_root() {
        return;
    }
    let users = Users::start();
    let (bench, place) = (&users.bench, users.place());
    let to_root = bench.try_run_weir(&["home", "allow", &place, "--map-uid", "1000=0"]);
    assert!(text(&to_root.stderr).contains("maps a user to root at home"), "{}", text(&to_root.stderr));
    bench.run_weir(&["home", "allow", &place, "--map-uid", "1000=2000", "--map-gid", "1000=2001"]);
    let hers = users.make_hers();
    succeeds(&users.add(&url_of(&hers), &[]));
    fs::write(bench.data.join("file"), b"bytes").unwrap();
    chown(bench.data.join("file"), Some(ADA), Some(ADA)).unwrap();
    wait_until("the owner at home", PATIENCE, || {
        hers.join("file").exists() && mode_and_owner(&hers.join("file")) == (0o644, 2000, 2001)
    });
    bench.wait_state("synced");
    bench.run_weir(&["relation", "verify", "r1"]);
}

#[test]
fn movers_act_as_the_user_of_the_rule() {
    if !can_mount() || !is_root() {
        return;
    }
    let users = Users::start();
    let (bench, daemon) = (&users.bench, 1);
    let archive = tempfile::tempdir().unwrap();
    fs::set_permissions(archive.path(), fs::Permissions::from_mode(0o711)).unwrap();
    let make = |name: &str, owner: u32, mode: u32| {
        let dir = archive.path().join(name);
        fs::create_dir(&dir).unwrap();
        chown(&dir, Some(owner), Some(owner)).unwrap();
        fs::set_permissions(&dir, fs::Permissions::from_mode(mode)).unwrap();
        dir
    };
    let (theirs, closed) = (make("theirs", daemon, 0o700), make("closed", 0, 0o700));
    bench.run_weir(&["home", "allow", &url_of(archive.path()), "--run-as", "daemon"]);
    bench.run_weir(&["volume", "create", "other"]);
    bench.run_weir(&["volume", "create", "third"]);
    let other = bench.cluster.mount().join("other");
    bench.run_weir(&["relation", "add", "data", &url_of(&theirs)]);
    bench.run_weir(&["relation", "add", "other", &bench.url()]);
    bench.run_weir(&["relation", "add", "third", &url_of(&closed)]);
    let programs = [bench.data.join("program"), other.join("program")];
    for program in &programs {
        fs::write(program, "#!/bin/sh\n").unwrap();
        chown(program, Some(ADA), Some(ADA)).unwrap();
        fs::set_permissions(program, fs::Permissions::from_mode(0o6755)).unwrap();
    }
    fs::write(bench.cluster.mount().join("third/file"), b"bytes").unwrap();
    // At the same time: work at one home has no rights of another one's.
    let owned = |path: PathBuf, wanted| {
        wait_until(&format!("{} with {wanted:?}", path.display()), PATIENCE, || {
            path.exists() && mode_and_owner(&path) == wanted
        });
    };
    owned(theirs.join("program"), (0o755, daemon, daemon));
    owned(bench.home.join("program"), (0o6755, ADA, ADA));
    wait_until("the closed directory to be refused", PATIENCE, || {
        let shown = bench.run_weir(&["relation", "show", "r3", "--json"]);
        let shown: Value = serde_json::from_str(&shown).unwrap();
        shown["limited_by"].as_str().unwrap().contains("may not open the home directory")
    });
    assert_eq!(fs::read_dir(&closed).unwrap().count(), 0);
    bench.run_weir(&["home", "allow", &url_of(archive.path()), "--run-as", "no.such.user"]);
    fs::write(bench.data.join("more"), b"more").unwrap();
    wait_until("the unknown user to be named", PATIENCE, || {
        bench.relation()["limited_by"].as_str().unwrap().contains("whom this machine does not know")
    });
}

#[test]
fn a_mover_keeps_few_of_roots_rights() {
    if !is_root() {
        return;
    }
    let cluster = Cluster::with(0, &["--targets", "1", "--movers", "1"]);
    let status = fs::read_to_string(format!("/proc/{}/status", cluster.pid("mover-1").unwrap())).unwrap();
    let field = |name: &str| {
        let line = status.lines().find(|line| line.starts_with(name)).unwrap();
        line.split_whitespace().nth(1).unwrap().to_owned()
    };
    assert_eq!(field("NoNewPrivs:"), "1");
    // chown, dac_override, dac_read_search, fowner, fsetid, setgid, setuid, mknod, setfcap
    let kept = [0u64, 1, 2, 3, 4, 6, 7, 27, 31].iter().fold(0, |all, n| all | 1u64 << n);
    for set in ["CapEff:", "CapPrm:", "CapBnd:"] {
        let found = u64::from_str_radix(&field(set), 16).unwrap();
        assert_eq!(found & !kept, 0, "{set} {found:x}");
    }
    assert_eq!(u64::from_str_radix(&field("CapInh:"), 16).unwrap(), 0);
}

#[test]
fn keys_are_those_of_the_rule() {
    if !can_mount() || !is_root() {
        return;
    }
    let users = Users::start();
    let bench = &users.bench;
    let keys = users.bench.home.join("keys");
    fs::write(&keys, "[default]\naws_access_key_id = ROOT\naws_secret_access_key = SECRET\n").unwrap();
    let service = TcpListener::bind("127.0.0.1:0").unwrap();
    service.set_nonblocking(true).unwrap();
    let was_called = || service.accept().is_ok();
    let query = format!("endpoint=http://{}&path-style=yes", service.local_addr().unwrap());
    let (place, url) = (format!("s3://bucket/p?{query}"), format!("s3://bucket/p/ada?{query}"));
    let keys = keys.to_str().unwrap();
    denied(&users.add(&url, &[]), "user 1000 may not have the home");
    bench.run_weir(&["home", "allow", &place]);
    denied(&users.add(&format!("{url}&credentials={keys}"), &[]), "may not choose the keys");
    denied(&users.add(&url.replace("bucket/p/", "bucket/pq/"), &[]), "user 1000 may not have the home");
    succeeds(&users.add(&url, &[]));
    users.is_held_back("the rule for this place names no keys");
    // Others could have put other keys there, or read these.
    bench.run_weir(&["home", "allow", &place, "--credentials", keys]);
    users.is_held_back("that others cannot read");
    assert!(!was_called());
    fs::set_permissions(keys, fs::Permissions::from_mode(0o600)).unwrap();
    wait_until("the service to be called", PATIENCE, was_called);
    assert!(!bench.cluster.logs().contains("SECRET"));
}
