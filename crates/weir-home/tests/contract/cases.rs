//! The cases, each on any home.
use crate::Bench;
use bytes::Bytes;
use std::sync::Arc;
use weir_home::{Attrs, Expect, Fault, Fingerprint, Home, HomePath, HomeReader, Make, Outcome, Xattr};
use weir_proto::meta::{FileKind, Time};

pub fn path(text: impl AsRef<[u8]>) -> HomePath {
    HomePath::parse(text).unwrap()
}

pub fn attrs(mode: u32) -> Attrs {
    let time = |nanos| Time { nanos };
    let (atime, mtime) = (time(1_600_000_000_000_000_001), time(1_500_000_000_123_456_789));
    Attrs { mode, uid: 1234, gid: 2345, atime, mtime, xattrs: vec![] }
}

pub fn unchanged(fingerprint: &Fingerprint) -> Expect {
    Expect::Unchanged(fingerprint.clone())
}
pub fn ours(fingerprint: &Fingerprint) -> Expect {
    Expect::Ours(fingerprint.clone())
}

#[track_caller]
pub fn assert_diverged<T: std::fmt::Debug>(outcome: Outcome<T>, at: &HomePath) {
    match outcome {
        Err(Fault::Diverged(divergence)) => {
            assert_eq!(&divergence.path, at, "{}", divergence.error);
            assert!(
                divergence.error.context.contains(&at.to_string()),
                "it names the place: {}",
                divergence.error
            );
        }
        other => panic!("expected a divergence at {at}, got {other:?}"),
    }
}

/// A mover's calls for a whole small file.
pub async fn put(home: &Arc<dyn Home>, at: &HomePath, bytes: &[u8], attrs: &Attrs) -> Fingerprint {
    let made = home.make(at, &Make::File, attrs).await.unwrap();
    let writer = home.open_write(at, &unchanged(&made)).await.unwrap();
    writer.write_at(0, vec![Bytes::copy_from_slice(bytes)]).await.unwrap();
    writer.finish(bytes.len() as u64, attrs).await.unwrap()
}

/// A stranger's change of a file, for any kind of it.
async fn scribble(bench: &Bench, at: &HomePath, bytes: &[u8]) -> Fingerprint {
    let found = bench.stranger.stat(at).await.unwrap().unwrap();
    let writer = bench.stranger.open_write(at, &ours(&found.fingerprint)).await.unwrap();
    writer.write_at(0, vec![Bytes::copy_from_slice(bytes)]).await.unwrap();
    let size = found.fingerprint.size.max(bytes.len() as u64);
    let now = Attrs { mtime: Time { nanos: found.fingerprint.mtime.nanos + 1_000_000_000 }, ..found.attrs };
    writer.finish(size, &now).await.unwrap()
}

pub async fn read_all(home: &Arc<dyn Home>, at: &HomePath) -> Vec<u8> {
    let found = home.stat(at).await.unwrap().unwrap();
    let reader = home.open_read(at, &unchanged(&found.fingerprint)).await.unwrap();
    read(&*reader, 0, found.fingerprint.size as usize + 100).await
}

async fn read(reader: &dyn HomeReader, offset: u64, len: usize) -> Vec<u8> {
    reader.read_at(offset, len).await.unwrap().concat()
}

async fn dir(home: &Arc<dyn Home>, at: &str) -> Fingerprint {
    home.make(&path(at), &Make::Directory, &attrs(0o755)).await.unwrap()
}

fn pattern(seed: u64, len: usize) -> Vec<u8> {
    let mut x = seed | 1;
    let mut step = || {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        x as u8
    };
    (0..len).map(|_| step()).collect()
}

pub async fn things_are_made_as_asked_and_made_again(bench: Bench) {
    let (home, can) = (&bench.home, bench.home.traits());
    let mut kinds = vec![
        ("d", Make::Directory, FileKind::Directory),
        ("f", Make::File, FileKind::Regular),
        ("l", Make::Symlink { target: Bytes::from_static(b"some/\xffwhere") }, FileKind::Symlink),
    ];
    if can.special_files {
        let special = |kind, rdev| Make::Special { kind, rdev };
        kinds.push(("p", special(FileKind::Fifo, 0), FileKind::Fifo));
        kinds.push(("s", special(FileKind::Socket, 0), FileKind::Socket));
        kinds.push(("c", special(FileKind::CharDevice, 0x103), FileKind::CharDevice));
        kinds.push(("b", special(FileKind::BlockDevice, 0x10_0801), FileKind::BlockDevice));
    }
    for (name, what, kind) in &kinds {
        let at = path(name);
        let made = home.make(&at, what, &attrs(0o4751)).await.unwrap();
        assert_eq!(made.kind, *kind);
        let found = home.stat(&at).await.unwrap().unwrap();
        assert_eq!(found.fingerprint, made);
        if *kind != FileKind::Symlink {
            assert_eq!(found.attrs.mode, 0o4751, "{name}");
        }
        if can.owners {
            assert_eq!((found.attrs.uid, found.attrs.gid), (1234, 2345), "{name}");
        }
        if can.exact_times {
            assert_eq!((found.attrs.atime, found.attrs.mtime), (attrs(0).atime, attrs(0).mtime), "{name}");
        }
        match what {
            Make::Symlink { target } => assert_eq!(&found.target, target),
            Make::Special { rdev, .. } => assert_eq!(found.rdev, *rdev),
            _ => assert_eq!(found.target, Bytes::new()),
        }
        // An earlier try succeeded, and its answer was lost.
        assert_eq!(home.make(&at, what, &attrs(0o4751)).await.unwrap(), made, "{name}");
        // An earlier try was cut off before the attributes.
        let again = home.make(&at, what, &attrs(0o640)).await.unwrap();
        assert_eq!((again.kind, &again.id), (*kind, &made.id), "{name}");
    }
    // Entries made in a directory do not make the directory a stranger's.
    let made = dir(home, "e").await;
    put(home, &path("e/f"), b"x", &attrs(0o644)).await;
    assert_eq!(dir(home, "e").await, made);
    home.settle().await.unwrap();
}

pub async fn a_make_leaves_existing_entries_unchanged(bench: Bench) {
    let home = &bench.home;
    put(&bench.stranger, &path("f"), b"theirs", &attrs(0o600)).await;
    dir(&bench.stranger, "d").await;
    put(&bench.stranger, &path("d/x"), b"theirs", &attrs(0o600)).await;
    let link = Make::Symlink { target: Bytes::from_static(b"elsewhere") };
    bench.stranger.make(&path("l"), &link, &attrs(0o777)).await.unwrap();
    let ours = Make::Symlink { target: Bytes::from_static(b"here") };
    for (name, what) in [
        ("f", Make::File),
        ("f", Make::Directory),
        ("f", ours.clone()),
        ("d", Make::File),
        ("d", Make::Directory),
        ("d", ours.clone()),
        ("l", Make::File),
        ("l", Make::Directory),
        ("l", ours),
    ] {
        assert_diverged(home.make(&path(name), &what, &attrs(0o640)).await, &path(name));
    }
    assert_eq!(read_all(home, &path("f")).await, b"theirs");
    assert_eq!(read_all(home, &path("d/x")).await, b"theirs");
    assert_eq!(home.stat(&path("l")).await.unwrap().unwrap().target, "elsewhere");
    let found = home.stat(&path("d")).await.unwrap().unwrap();
    assert_eq!(found.attrs.mode, 0o755, "not even its mode");
    // No directory above, or something else in its place.
    for at in ["gone/f", "f/x", "l/x"] {
        let refused = home.make(&path(at), &Make::File, &attrs(0o640)).await;
        assert!(matches!(refused, Err(Fault::Diverged(_))), "{at}: {refused:?}");
    }
}

pub async fn links_lead_to_the_file_they_were_made_for(bench: Bench) {
    let home = &bench.home;
    let (a, b) = (path("a"), path("b"));
    let fingerprint = put(home, &a, b"one", &attrs(0o644)).await;
    if !home.traits().hard_links {
        let refused = home.link(&a, &unchanged(&fingerprint), &b).await;
        assert!(matches!(refused, Err(Fault::Broken(_))), "{refused:?}");
        return;
    }
    for _ in 0..2 {
        assert_eq!(home.link(&a, &unchanged(&fingerprint), &b).await.unwrap(), fingerprint);
    }
    assert_eq!(home.stat(&b).await.unwrap().unwrap().nlink, 2);
    put(&bench.stranger, &path("c"), b"two", &attrs(0o644)).await;
    assert_diverged(home.link(&a, &unchanged(&fingerprint), &path("c")).await, &path("c"));
    assert_eq!(read_all(home, &path("c")).await, b"two");
    scribble(&bench, &a, b"three").await;
    assert_diverged(home.link(&a, &unchanged(&fingerprint), &path("d")).await, &a);
    assert_diverged(home.link(&path("gone"), &unchanged(&fingerprint), &path("d")).await, &path("gone"));
    assert_eq!(home.stat(&path("d")).await.unwrap(), None);
}

pub async fn removing_again_is_done_and_a_changed_file_stays(bench: Bench) {
    let home = &bench.home;
    let d = dir(home, "d").await;
    let f = put(home, &path("d/f"), b"one", &attrs(0o644)).await;
    for _ in 0..2 {
        home.remove(&path("d/f"), &unchanged(&f)).await.unwrap();
        assert_eq!(home.stat(&path("d/f")).await.unwrap(), None);
    }
    for _ in 0..2 {
        home.remove(&path("d"), &unchanged(&d)).await.unwrap();
    }
    home.remove(&path("d/f"), &unchanged(&f)).await.unwrap(); // with the directory above
    let f = put(home, &path("f"), b"one", &attrs(0o644)).await;
    scribble(&bench, &path("f"), b"two").await;
    assert_diverged(home.remove(&path("f"), &unchanged(&f)).await, &path("f"));
    assert_eq!(read_all(home, &path("f")).await, b"two");
    // Another file of that name: even if ours may have been written meanwhile.
    let theirs = home.stat(&path("f")).await.unwrap().unwrap().fingerprint;
    bench.stranger.remove(&path("f"), &ours(&theirs)).await.unwrap();
    put(&bench.stranger, &path("f"), b"one", &attrs(0o644)).await;
    assert_diverged(home.remove(&path("f"), &unchanged(&f)).await, &path("f"));
    // A file where a directory was.
    put(&bench.stranger, &path("d"), b"a file", &attrs(0o644)).await;
    assert_diverged(home.remove(&path("d"), &unchanged(&d)).await, &path("d"));
}

pub async fn a_directory_with_something_strange_in_it_stays(bench: Bench) {
    let home = &bench.home;
    let d = dir(home, "d").await;
    put(&bench.stranger, &path("d/theirs"), b"x", &attrs(0o644)).await;
    assert_diverged(home.remove(&path("d"), &unchanged(&d)).await, &path("d/theirs"));
    let e = dir(home, "e").await;
    let over = home.rename(&path("e"), &unchanged(&e), &path("d"), Some(&unchanged(&d))).await;
    assert_diverged(over, &path("d/theirs"));
    assert_eq!(read_all(home, &path("d/theirs")).await, b"x");
    assert!(home.stat(&path("e")).await.unwrap().is_some());
}

pub async fn renames_are_found_done_and_replace_only_what_is_expected(bench: Bench) {
    let home = &bench.home;
    let (a, b) = (path("a"), path("b"));
    let mut fingerprint = put(home, &a, b"one", &attrs(0o644)).await;
    for _ in 0..2 {
        fingerprint = home.rename(&a, &unchanged(&fingerprint), &b, None).await.unwrap();
        assert_eq!(home.stat(&a).await.unwrap(), None);
        assert_eq!(read_all(home, &b).await, b"one");
        assert_eq!(
            home.stat(&b).await.unwrap().unwrap().fingerprint,
            fingerprint,
            "the answer is the state at home"
        );
    }
    let other = put(home, &a, b"other", &attrs(0o644)).await;
    assert_diverged(home.rename(&a, &unchanged(&other), &b, None).await, &b);
    assert_eq!(read_all(home, &b).await, b"one");
    for _ in 0..2 {
        home.rename(&a, &unchanged(&other), &b, Some(&unchanged(&fingerprint))).await.unwrap();
        assert_eq!(read_all(home, &b).await, b"other");
        assert_eq!(home.stat(&a).await.unwrap(), None);
    }
    // A stranger wrote to the file that would be replaced, or to the one that would be moved.
    let other = home.stat(&b).await.unwrap().unwrap().fingerprint;
    let third = put(home, &a, b"third", &attrs(0o644)).await;
    scribble(&bench, &b, b"theirs").await;
    assert_diverged(home.rename(&a, &unchanged(&third), &b, Some(&unchanged(&other))).await, &b);
    assert_eq!(read_all(home, &b).await, b"theirs");
    scribble(&bench, &a, b"theirs too").await;
    assert_diverged(home.rename(&a, &unchanged(&third), &path("c"), None).await, &a);
    // It is nowhere.
    assert_diverged(home.rename(&path("x"), &unchanged(&third), &path("y"), None).await, &path("x"));
    assert_diverged(home.rename(&path("no/x"), &unchanged(&third), &path("y"), None).await, &path("no/x"));
}

pub async fn directories_are_renamed_with_what_is_in_them(bench: Bench) {
    let home = &bench.home;
    let d = dir(home, "d").await;
    dir(home, "d/e").await;
    put(home, &path("d/e/f"), b"deep", &attrs(0o644)).await;
    put(home, &path("d/g"), b"flat", &attrs(0o600)).await;
    dir(home, "n").await;
    for _ in 0..2 {
        home.rename(&path("d"), &unchanged(&d), &path("n/d2"), None).await.unwrap();
        assert_eq!(read_all(home, &path("n/d2/e/f")).await, b"deep");
        assert_eq!(read_all(home, &path("n/d2/g")).await, b"flat");
        assert_eq!(home.stat(&path("n/d2/g")).await.unwrap().unwrap().attrs.mode, 0o600);
        assert_eq!(home.stat(&path("d")).await.unwrap(), None);
        assert_eq!(home.stat(&path("d/g")).await.unwrap(), None);
    }
    let (e, empty) = (dir(home, "e").await, dir(home, "empty").await);
    home.rename(&path("e"), &unchanged(&e), &path("empty"), Some(&unchanged(&empty))).await.unwrap();
}

pub async fn names_are_exchanged_once(bench: Bench) {
    let home = &bench.home;
    let (a, b) = (path("a"), path("b"));
    let one = put(home, &a, b"one", &attrs(0o644)).await;
    let two = put(home, &b, b"two", &attrs(0o644)).await;
    let (one, two) = (unchanged(&one), unchanged(&two));
    for _ in 0..2 {
        home.exchange(&a, &one, &b, &two).await.unwrap();
        assert_eq!((read_all(home, &a).await, read_all(home, &b).await), (b"two".to_vec(), b"one".to_vec()));
    }
    let (at_a, at_b) = (
        home.stat(&a).await.unwrap().unwrap().fingerprint,
        home.stat(&b).await.unwrap().unwrap().fingerprint,
    );
    scribble(&bench, &b, b"theirs").await;
    assert_diverged(home.exchange(&a, &unchanged(&at_a), &b, &unchanged(&at_b)).await, &b);
    assert_eq!((read_all(home, &a).await, read_all(home, &b).await), (b"two".to_vec(), b"theirs".to_vec()));
}

pub async fn attributes_are_set_exactly_and_a_changed_file_keeps_its_own(bench: Bench) {
    let (home, can) = (&bench.home, bench.home.traits());
    let at = path("f");
    let mut fingerprint = put(home, &at, b"one", &attrs(0o644)).await;
    let xattr = |name: &str, value: &[u8]| Xattr {
        name: Bytes::copy_from_slice(name.as_bytes()),
        value: Bytes::copy_from_slice(value),
    };
    // user::rw-, user:1000:r--, group::r--, mask::r--, other::---
    let entries: [(u16, u16, u32); 5] =
        [(1, 6, u32::MAX), (2, 4, 1000), (4, 4, u32::MAX), (16, 4, u32::MAX), (32, 0, u32::MAX)];
    let mut acl = 2u32.to_le_bytes().to_vec();
    for (tag, rights, id) in entries {
        acl.extend([tag.to_le_bytes(), rights.to_le_bytes()].concat());
        acl.extend(id.to_le_bytes());
    }
    let big = pattern(5, can.xattr_bytes_max.min(3700) - 700);
    let mut wished = attrs(0o640);
    if can.acls {
        wished.xattrs.push(xattr("system.posix_acl_access", &acl));
    }
    if can.xattrs {
        wished.xattrs.extend([xattr("user.big", &big), xattr("user.empty", b""), xattr("user.x", b"\0\xff")]);
    }
    wished.mtime.nanos += 7;
    (wished.uid, wished.gid) = (77, 88);
    let mut fewer = Attrs { mode: 0o600, ..wished.clone() };
    fewer.xattrs.retain(|x| x.name == "user.x");
    for wished in [&wished, &wished, &fewer] {
        let before = fingerprint.clone();
        for _ in 0..2 {
            fingerprint = home.set_attrs(&at, &unchanged(&before), wished).await.unwrap(); // and again, as if unheard
        }
        let found = home.stat(&at).await.unwrap().unwrap();
        assert_eq!(found.fingerprint, fingerprint);
        assert_eq!((found.attrs.mode, &found.attrs.xattrs), (wished.mode, &wished.xattrs));
        if can.owners {
            assert_eq!((found.attrs.uid, found.attrs.gid), (77, 88));
        }
        if can.exact_times {
            assert_eq!((found.attrs.atime, found.attrs.mtime), (wished.atime, wished.mtime));
        }
    }
    assert_eq!(read_all(home, &at).await, b"one");
    scribble(&bench, &at, b"two").await;
    assert_diverged(home.set_attrs(&at, &unchanged(&fingerprint), &wished).await, &at);
    assert_eq!(home.stat(&at).await.unwrap().unwrap().attrs.mode, 0o600);
    let d = dir(home, "d").await;
    home.set_attrs(&path("d"), &unchanged(&d), &attrs(0o1777)).await.unwrap();
    assert_eq!(home.stat(&path("d")).await.unwrap().unwrap().attrs.mode, 0o1777);
    assert_diverged(home.set_attrs(&path("no"), &ours(&d), &attrs(0o1777)).await, &path("no"));
}

pub async fn files_are_truncated_once_and_a_changed_one_is_not(bench: Bench) {
    let home = &bench.home;
    let at = path("f");
    let fingerprint = put(home, &at, b"0123456789", &attrs(0o644)).await;
    for _ in 0..2 {
        assert_eq!(home.resize(&at, &unchanged(&fingerprint), 4).await.unwrap().size, 4);
        assert_eq!(read_all(home, &at).await, b"0123");
    }
    let fingerprint = home.stat(&at).await.unwrap().unwrap().fingerprint;
    for _ in 0..2 {
        home.resize(&at, &unchanged(&fingerprint), 6).await.unwrap();
        assert_eq!(read_all(home, &at).await, b"0123\0\0");
    }
    let fingerprint = home.stat(&at).await.unwrap().unwrap().fingerprint;
    scribble(&bench, &at, b"theirs!").await;
    assert_diverged(home.resize(&at, &unchanged(&fingerprint), 1).await, &at);
    assert_eq!(read_all(home, &at).await, b"theirs!");
    assert_diverged(home.resize(&path("gone"), &unchanged(&fingerprint), 1).await, &path("gone"));
}

/// Writes `bytes` part by part as this home likes them; `check` sees what home shows after each sync.
async fn write_growing(bench: &Bench, at: &HomePath, bytes: &Bytes, mut expect: Expect) -> Expect {
    let home = &bench.home;
    let mut offset = 0;
    while offset < bytes.len() as u64 {
        let part = home.part(offset, 300_000);
        assert!(part.start == offset && part.end > offset, "{part:?} at {offset}");
        let end = part.end.min(bytes.len() as u64);
        // Each by another opening, as if another mover had come.
        let writer = home.open_write(at, &expect).await.unwrap();
        let middle = offset + (end - offset) / 2;
        let parts = [offset..middle, middle..end].map(|r| bytes.slice(r.start as usize..r.end as usize));
        writer.write_at(offset, parts.to_vec()).await.unwrap();
        expect = unchanged(&writer.sync().await.unwrap());
        offset = end;
        if home.traits().growing_prefix {
            let shown = read_all(&bench.stranger, at).await;
            assert!(shown == bytes[..offset as usize], "{} bytes shown of {offset}", shown.len());
        }
    }
    expect
}

pub async fn a_growing_file_shows_a_prefix_and_is_completed(bench: Bench) {
    let home = &bench.home;
    let at = path("f");
    let bytes = Bytes::from(pattern(1, 12_345_678));
    let made = home.make(&at, &Make::File, &attrs(0o644)).await.unwrap();
    let expect = write_growing(&bench, &at, &bytes, unchanged(&made)).await;
    let writer = home.open_write(&at, &expect).await.unwrap();
    let done = writer.finish(bytes.len() as u64, &attrs(0o640)).await.unwrap();
    let found = bench.stranger.stat(&at).await.unwrap().unwrap();
    assert_eq!(found.fingerprint, done);
    assert_eq!((found.fingerprint.size, found.attrs.mode), (bytes.len() as u64, 0o640));
    assert_eq!(found.attrs.mtime, attrs(0).mtime);
    assert!(read_all(&bench.stranger, &at).await == bytes);
    // Written over in the middle, and cut by its end.
    let writer = home.open_write(&at, &unchanged(&done)).await.unwrap();
    let part = home.part(0, 100_000);
    let over = Bytes::from(pattern(2, part.end as usize));
    writer.write_at(0, vec![over.clone()]).await.unwrap();
    let done = writer.finish(12_000_000, &attrs(0o640)).await.unwrap();
    assert_eq!(done.size, 12_000_000);
    let shown = read_all(&bench.stranger, &at).await;
    assert!(shown[..over.len()] == over && shown[over.len()..] == bytes[over.len()..12_000_000]);
}

pub async fn a_stray_write_is_found_before_the_next_one(bench: Bench) {
    let home = &bench.home;
    let at = path("f");
    let done = put(home, &at, b"0123456789", &attrs(0o644)).await;
    scribble(&bench, &at, b"theirs").await;
    assert_diverged(home.open_write(&at, &unchanged(&done)).await.map(drop), &at);
    assert_eq!(read_all(home, &at).await, b"theirs6789");
    assert_diverged(home.open_write(&path("gone"), &unchanged(&done)).await.map(drop), &path("gone"));
    assert_diverged(home.open_write(&path("no/f"), &ours(&done)).await.map(drop), &path("no/f"));
    if home.traits().in_place {
        // Also between two of our own writes.
        let now = home.stat(&at).await.unwrap().unwrap().fingerprint;
        let writer = home.open_write(&at, &unchanged(&now)).await.unwrap();
        writer.write_at(0, vec![Bytes::from_static(b"ours")]).await.unwrap();
        writer.sync().await.unwrap();
        scribble(&bench, &at, b"theirs again").await;
        for _ in 0..2 {
            assert_diverged(writer.write_at(4, vec![Bytes::from_static(b"x")]).await, &at);
        }
        assert_diverged(writer.finish(3, &attrs(0o644)).await, &at);
        assert_eq!(read_all(home, &at).await, b"theirs again");
    }
    // Another file in its place.
    let found = home.stat(&at).await.unwrap().unwrap().fingerprint;
    bench.stranger.remove(&at, &ours(&found)).await.unwrap();
    put(&bench.stranger, &at, b"0123456789", &attrs(0o644)).await;
    assert_diverged(home.open_write(&at, &ours(&done)).await.map(drop), &at);
}

pub async fn an_interrupted_writer_is_followed_by_another(bench: Bench) {
    let home = &bench.home;
    let at = path("f");
    let bytes = Bytes::from(pattern(3, 11_000_000));
    let made = home.make(&at, &Make::File, &attrs(0o644)).await.unwrap();
    let first = home.part(0, 1_000_000).end as usize;
    let writer = home.open_write(&at, &unchanged(&made)).await.unwrap();
    writer.write_at(0, vec![bytes.slice(..first)]).await.unwrap();
    let reported = writer.sync().await.unwrap();
    let next = (home.part(first as u64, 1_000_000).end as usize).min(bytes.len());
    writer.write_at(first as u64, vec![bytes.slice(first..next)]).await.unwrap();
    let _ = writer.sync().await.unwrap(); // and dies before its report
    drop(writer);
    let writer = home.open_write(&at, &ours(&reported)).await.unwrap();
    let mut offset = first;
    while offset < bytes.len() {
        let end = (home.part(offset as u64, 1_000_000).end as usize).min(bytes.len());
        writer.write_at(offset as u64, vec![bytes.slice(offset..end)]).await.unwrap();
        offset = end;
    }
    // It dies after the end was reached, before its report: the next one finishes again.
    writer.finish(bytes.len() as u64, &attrs(0o600)).await.unwrap();
    drop(writer);
    let reported =
        if home.traits().in_place { reported } else { home.stat(&at).await.unwrap().unwrap().fingerprint };
    let writer = home.open_write(&at, &ours(&reported)).await.unwrap();
    let done = writer.finish(bytes.len() as u64, &attrs(0o600)).await.unwrap();
    assert_eq!(home.stat(&at).await.unwrap().unwrap().fingerprint, done);
    assert!(read_all(home, &at).await == bytes);
}

pub async fn holes_stay_holes(bench: Bench) {
    let home = &bench.home;
    let at = path("f");
    let made = home.make(&at, &Make::File, &attrs(0o644)).await.unwrap();
    let writer = home.open_write(&at, &unchanged(&made)).await.unwrap();
    let (grain, tail) = (home.part(0, 1 << 20).end, pattern(4, 70_000));
    writer.write_at(0, vec![Bytes::from(pattern(4, grain as usize))]).await.unwrap();
    let hole_end = home.part(home.part(grain, 1 << 20).end, 1 << 20).end;
    writer.zero(grain..hole_end).await.unwrap();
    writer.write_at(hole_end, vec![Bytes::from(tail.clone())]).await.unwrap();
    let size = hole_end + tail.len() as u64 + 5;
    let done = writer.finish(size, &attrs(0o644)).await.unwrap();
    let shown = read_all(home, &at).await;
    assert_eq!(shown.len() as u64, size);
    let mut wished = pattern(4, grain as usize);
    wished.resize(hole_end as usize, 0);
    wished.extend(&tail);
    wished.resize(size as usize, 0);
    assert!(shown == wished);
    let reader = home.open_read(&at, &unchanged(&done)).await.unwrap();
    let first = reader.data_from(0).await.unwrap().unwrap();
    assert_eq!(first.start, 0);
    assert_eq!(reader.data_from(size).await.unwrap(), None);
    if home.traits().holes {
        assert_eq!(first.end, grain);
        let second = reader.data_from(grain).await.unwrap().unwrap();
        assert!(second.start > grain && second.start <= hole_end, "{second:?}");
        assert!(home.stat(&at).await.unwrap().unwrap().allocated < grain + (1 << 20));
        // And one made where data was.
        let writer = home.open_write(&at, &unchanged(&done)).await.unwrap();
        writer.zero(0..grain).await.unwrap();
        writer.finish(size, &attrs(0o644)).await.unwrap();
        assert!(read_all(home, &at).await[..hole_end as usize].iter().all(|b| *b == 0));
    }
}

pub async fn a_read_of_a_changed_file_is_refused(bench: Bench) {
    let home = &bench.home;
    let at = path("f");
    let done = put(home, &at, b"0123456789", &attrs(0o644)).await;
    let reader = home.open_read(&at, &unchanged(&done)).await.unwrap();
    assert_eq!(reader.fingerprint(), &done);
    assert_eq!(read(&*reader, 2, 3).await, b"234");
    assert_eq!(read(&*reader, 8, 100).await, b"89", "short only at the end");
    assert_eq!(read(&*reader, 10, 1).await, b"");
    assert_eq!(read(&*reader, 1000, 1).await, b"");
    scribble(&bench, &at, b"x").await;
    assert_diverged(reader.read_at(0, 10).await, &at);
    assert_diverged(home.open_read(&at, &unchanged(&done)).await.map(drop), &at);
    assert_diverged(home.open_read(&path("gone"), &unchanged(&done)).await.map(drop), &path("gone"));
    dir(home, "d").await;
    assert_diverged(home.open_read(&path("d"), &unchanged(&done)).await.map(drop), &path("d"));
}

pub async fn names_of_all_kinds_are_kept(bench: Bench) {
    let home = &bench.home;
    let mut names: Vec<Vec<u8>> = vec![
        vec![b'x'; 255],
        "ü".repeat(127).into_bytes(),
        b" leading and trailing ".to_vec(),
        b"a%2Fb%".to_vec(),
        b"back\\slash".to_vec(),
        b"new\nline\x01\x7f".to_vec(),
        b"q?x=1&y#z+~*'\"<>|:;".to_vec(),
        "\u{1f600}\u{fffd}".as_bytes().to_vec(),
        b".hidden".to_vec(),
        b"...".to_vec(),
        b"\xff\xfe\x80not utf-8".to_vec(),
        vec![0xe9; 255],
    ];
    if home.traits().path_bytes_max < 4096 {
        names.pop(); // twice as a path, each byte escaped
        // The tests' S3 service replaces no object whose name comes near the longest of the file system below
        // it.
        names.iter_mut().for_each(|name| name.truncate(200));
    }
    for name in &names {
        let at = HomePath::root().join(name).unwrap();
        let made = home.make(&at, &Make::Directory, &attrs(0o755)).await.unwrap();
        let inside = at.join(name).unwrap();
        put(home, &inside, name, &attrs(0o644)).await;
        assert_eq!(&read_all(home, &inside).await, name);
        assert_eq!(home.stat(&at).await.unwrap().unwrap().fingerprint, made);
    }
    let listing = home.list(&HomePath::root(), None, 100).await.unwrap();
    names.sort();
    let mut listed: Vec<Vec<u8>> = listing.entries.iter().map(|e| e.name.to_vec()).collect();
    listed.sort(); // escaped names are elsewhere in a bucket's order
    assert_eq!(listed, names);
    assert!(listing.end);
}

pub async fn deep_paths_are_kept(bench: Bench) {
    let home = &bench.home;
    // A directory's paths may be longer than what a system call takes.
    let longest = home.traits().path_bytes_max.min(12_000);
    let (depth, name) = (60, "n".repeat(longest / 60 - 2));
    let mut at = HomePath::root();
    for _ in 0..depth {
        at = at.join(name.as_bytes()).unwrap();
        home.make(&at, &Make::Directory, &attrs(0o755)).await.unwrap();
    }
    let file = at.join(b"f").unwrap();
    let fingerprint = put(home, &file, b"deep", &attrs(0o644)).await;
    home.settle().await.unwrap();
    assert_eq!(read_all(&bench.stranger, &file).await, b"deep");
    home.remove(&file, &unchanged(&fingerprint)).await.unwrap();
    home.settle().await.unwrap();
}

pub async fn listings_are_in_order_and_complete(bench: Bench) {
    let home = &bench.home;
    dir(home, "d").await;
    let mut names: Vec<String> = (0..57).map(|n| format!("{}", n * 7919 % 1000)).collect();
    for (n, name) in names.iter().enumerate() {
        let at = path(format!("d/{name}"));
        match n % 3 {
            0 => drop(put(home, &at, name.as_bytes(), &attrs(0o604)).await),
            1 => drop(home.make(&at, &Make::Directory, &attrs(0o705)).await.unwrap()),
            _ => {
                let link = Make::Symlink { target: name.clone().into() };
                home.make(&at, &link, &attrs(0o777)).await.unwrap();
            }
        }
        if n % 3 == 1 {
            put(home, &path(format!("d/{name}/inside")), b"x", &attrs(0o600)).await;
        }
    }
    names.sort();
    for limit in [1, 2, 10, 57, 58, 1000] {
        let (mut after, mut seen): (Option<Bytes>, Vec<_>) = (None, Vec::new());
        loop {
            let page = home.list(&path("d"), after.as_deref(), limit).await.unwrap();
            assert!(page.entries.len() == limit || page.end, "a short page only at the end");
            after = page.entries.last().map(|e| e.name.clone()).or(after);
            seen.extend(page.entries);
            if page.end {
                break;
            }
        }
        assert_eq!(
            seen.iter().map(|e| &e.name[..]).collect::<Vec<_>>(),
            names.iter().map(String::as_bytes).collect::<Vec<_>>()
        );
        for entry in &seen {
            let at = path("d").join(&entry.name).unwrap();
            let mut found = home.stat(&at).await.unwrap().unwrap();
            found.attrs.atime = entry.found.attrs.atime; // to look where a link leads is an access
            assert_eq!(found, entry.found, "{at}");
            if entry.found.fingerprint.kind == FileKind::Symlink {
                assert_eq!(entry.found.target, entry.name);
            }
        }
    }
    let root = home.list(&HomePath::root(), None, 10).await.unwrap();
    assert_eq!(root.entries.len(), 1, "no mark of ours is shown");
    let missing = home.list(&path("no"), None, 10).await;
    assert!(matches!(missing, Err(Fault::Diverged(_))), "{missing:?}");
}

pub async fn a_large_file_is_read_back_in_parts(bench: Bench) {
    let home = &bench.home;
    let at = path("f");
    let bytes = Bytes::from(pattern(6, 40 << 20));
    let made = home.make(&at, &Make::File, &attrs(0o644)).await.unwrap();
    let writer = home.open_write(&at, &unchanged(&made)).await.unwrap();
    let mut offset = 0;
    while offset < bytes.len() {
        let end = (home.part(offset as u64, 10_000_000).end as usize).min(bytes.len());
        writer.write_at(offset as u64, vec![bytes.slice(offset..end)]).await.unwrap();
        offset = end;
    }
    let done = writer.finish(bytes.len() as u64, &attrs(0o644)).await.unwrap();
    let reader = home.open_read(&at, &unchanged(&done)).await.unwrap();
    for (from, len) in [(0, 10), (1, 9_000_001), ((40 << 20) - 7, 7), (12_345_678, 20 << 20)] {
        assert!(read(&*reader, from as u64, len).await == bytes[from..from + len], "{len} at {from}");
    }
    assert!(read(&*reader, 0, 50 << 20).await == bytes);
}

pub async fn an_empty_file_is_complete(bench: Bench) {
    let home = &bench.home;
    let at = path("f");
    let made = home.make(&at, &Make::File, &attrs(0o644)).await.unwrap();
    let writer = home.open_write(&at, &unchanged(&made)).await.unwrap();
    let done = writer.finish(0, &attrs(0o400)).await.unwrap();
    assert_eq!(done.size, 0);
    assert_eq!(home.stat(&at).await.unwrap().unwrap().attrs.mode, 0o400);
    assert_eq!(read_all(home, &at).await, b"");
    home.remove(&at, &unchanged(&done)).await.unwrap();
}

pub async fn space_is_reported(bench: Bench) {
    let mut space = bench.home.space().await.unwrap();
    // A cluster that has just begun learns of its targets' space from their first reports.
    for _ in 0..10_000 {
        if space.free > 0 {
            break;
        }
        bench.home.stat(&path("nothing")).await.unwrap();
        space = bench.home.space().await.unwrap();
    }
    assert!(space.total >= space.free && space.free > 0);
    assert!(bench.home.url().contains("://"));
}

pub async fn a_directory_is_read_once_to_its_end(bench: Bench) {
    let home = &bench.home;
    dir(home, "d").await;
    dir(home, "d/sub").await;
    let fingerprint = put(home, &path("d/f"), b"bytes", &attrs(0o640)).await;
    for n in 0..23 {
        put(home, &path(format!("d/{n:02}")), b"", &attrs(0o644)).await;
    }
    let (mut lister, mut names, mut found) = (home.read_dir(&path("d")).await.unwrap(), Vec::new(), None);
    loop {
        let listing = lister.next(10).await.unwrap();
        assert!(listing.entries.len() <= 10);
        for entry in listing.entries {
            names.push(String::from_utf8(entry.name.to_vec()).unwrap());
            if &entry.name[..] == b"f" {
                found = Some(entry.found);
            }
        }
        if listing.end {
            break;
        }
    }
    names.sort();
    let mut wished: Vec<String> = (0..23).map(|n| format!("{n:02}")).collect();
    wished.extend(["f".to_owned(), "sub".to_owned()]);
    assert_eq!(names, wished);
    let found = found.unwrap();
    assert_eq!((&found.fingerprint, found.attrs.mode), (&fingerprint, 0o640));
    let mut root = home.read_dir(&HomePath::root()).await.unwrap();
    assert_eq!(root.next(10).await.unwrap().entries.len(), 1, "the mark is not listed");
    let nowhere = match home.read_dir(&path("nowhere")).await {
        Ok(mut lister) => lister.next(10).await.map(drop),
        Err(fault) => Err(fault),
    };
    assert!(matches!(nowhere, Err(Fault::Diverged(_))), "{nowhere:?}");
}

pub async fn the_root_gets_attributes_again_and_again(bench: Bench) {
    let (home, root) = (&bench.home, HomePath::root());
    let found = home.stat(&root).await.unwrap().unwrap();
    let first = home.set_attrs(&root, &ours(&found.fingerprint), &attrs(0o750)).await.unwrap();
    let second = home.set_attrs(&root, &unchanged(&first), &attrs(0o755)).await.unwrap();
    let found = home.stat(&root).await.unwrap().unwrap();
    assert_eq!((&found.fingerprint, found.attrs.mode), (&second, 0o755));
}

pub async fn a_change_in_the_middle_leaves_the_times_it_should(bench: Bench) {
    let (home, at) = (&bench.home, path("f"));
    let bytes = pattern(9, 5 << 20);
    let made = home.make(&at, &Make::File, &attrs(0o644)).await.unwrap();
    let writer = home.open_write(&at, &unchanged(&made)).await.unwrap();
    writer.write_at(0, vec![Bytes::from(bytes.clone())]).await.unwrap();
    let synced = writer.sync().await.unwrap();
    drop(writer);
    let writer = home.open_write(&at, &unchanged(&synced)).await.unwrap();
    writer.write_at(1 << 20, vec![Bytes::from_static(b"in the middle")]).await.unwrap();
    let fingerprint = writer.finish(bytes.len() as u64, &attrs(0o644)).await.unwrap();
    drop(writer);
    // A file that is closed late.
    for _ in 0..100 {
        tokio::task::yield_now().await;
        let found = home.stat(&at).await.unwrap().unwrap();
        assert_eq!((&found.fingerprint, found.attrs.mtime), (&fingerprint, attrs(0o644).mtime));
    }
    assert!(&read_all(home, &at).await[1 << 20..(1 << 20) + 13] == b"in the middle");
}
