//! What only a home in a directory promises, seen with the system's own eyes.
use crate::{
    cases::{assert_diverged, attrs, ours, path, put, unchanged},
    env, file_config, open_file,
};
use std::{
    os::unix::fs::{MetadataExt, symlink},
    path::Path,
    sync::Arc,
};
use weir_home::{Fault, FileHome, Home, IdMap, Make};
use weir_proto::home_rule::{HomeIds, IdMapping};

async fn fresh() -> (tempfile::TempDir, Arc<dyn Home>) {
    let dir = tempfile::tempdir().unwrap();
    let home = open_file(dir.path(), true).await;
    (dir, Arc::new(home))
}

#[tokio::test]
async fn a_link_at_home_never_leads_outside() {
    let (dir, home) = fresh().await;
    let outside = tempfile::tempdir().unwrap();
    std::fs::write(outside.path().join("secret"), "not ours").unwrap();
    let d = home.make(&path("d"), &Make::Directory, &attrs(0o755)).await.unwrap();
    let f = put(&home, &path("d/secret"), b"ours", &attrs(0o644)).await;
    // A stranger puts links where our directory and file were.
    std::fs::remove_dir_all(dir.path().join("d")).unwrap();
    symlink(outside.path(), dir.path().join("d")).unwrap();
    symlink(outside.path().join("secret"), dir.path().join("l")).unwrap();
    let (inside, x) = (path("d/secret"), ours(&f));
    assert_diverged(home.open_write(&inside, &x).await.map(drop), &inside);
    assert_diverged(home.open_read(&inside, &x).await.map(drop), &inside);
    assert_diverged(home.resize(&inside, &x, 0).await, &inside);
    assert_diverged(home.set_attrs(&inside, &x, &attrs(0o777)).await, &inside);
    assert_diverged(home.open_write(&path("l"), &x).await.map(drop), &path("l"));
    assert_diverged(home.set_attrs(&path("l"), &x, &attrs(0o777)).await, &path("l"));
    assert_diverged(home.remove(&path("d"), &ours(&d)).await, &path("d"));
    for refused in [
        home.make(&path("d/new"), &Make::File, &attrs(0o644)).await.map(drop),
        home.make(&path("d/new"), &Make::Directory, &attrs(0o644)).await.map(drop),
        home.rename(&path("l"), &x, &path("d/new"), None).await.map(drop),
        home.remove(&inside, &x).await,
        home.list(&path("d"), None, 10).await.map(drop),
    ] {
        assert!(matches!(refused, Err(Fault::Diverged(_))), "{refused:?}");
    }
    assert_eq!(home.stat(&inside).await.unwrap(), None);
    let left: Vec<_> = std::fs::read_dir(outside.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
    assert_eq!(left, ["secret"]);
    assert_eq!(std::fs::read(outside.path().join("secret")).unwrap(), b"not ours");
    assert_eq!(std::fs::metadata(outside.path().join("secret")).unwrap().mode() & 0o777, 0o644);
}

#[tokio::test]
async fn a_mount_point_without_its_mount_is_not_filled() {
    let (dir, home) = fresh().await;
    drop(home);
    let mark = dir.path().join(".weir-home");
    assert!(std::fs::read_to_string(&mark).unwrap().contains("relation test"));
    let refused = |config| async { FileHome::open(&env(), config).await.map(drop).unwrap_err() };
    // Another relation's home, also where it is new to this one.
    for is_new in [false, true] {
        let mut config = file_config(dir.path(), is_new);
        config.relation = "other".into();
        assert!(matches!(refused(config).await, Fault::Diverged(_)));
    }
    // A copy of it.
    let copy = tempfile::tempdir().unwrap();
    std::fs::copy(&mark, copy.path().join(".weir-home")).unwrap();
    assert!(matches!(refused(file_config(copy.path(), false)).await, Fault::Diverged(_)));
    // Nothing mounted: an empty directory, or none.
    let empty = tempfile::tempdir().unwrap();
    let fault = refused(file_config(empty.path(), false)).await;
    assert!(matches!(&fault, Fault::Unreachable(e) if e.context.contains("mount")), "{fault}");
    assert_eq!(std::fs::read_dir(empty.path()).unwrap().count(), 0);
    assert!(matches!(refused(file_config(&empty.path().join("no"), true)).await, Fault::Unreachable(_)));
    open_file(dir.path(), true).await;
}

#[tokio::test]
async fn owners_have_other_numbers_at_home() {
    if !rustix::process::geteuid().is_root() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let range = |here, there| vec![IdMapping { here, there, count: 10 }];
    let ids = IdMap::of(&HomeIds { users: range(1230, 55_000), groups: range(2340, 66_000) }).unwrap();
    let config = weir_home::FileHomeConfig { ids, ..file_config(dir.path(), true) };
    let home: Arc<dyn Home> = Arc::new(FileHome::open(&env(), config).await.unwrap());
    let fingerprint = put(&home, &path("f"), b"x", &attrs(0o644)).await;
    let meta = |name: &str| std::fs::symlink_metadata(dir.path().join(name)).unwrap();
    assert_eq!((meta("f").uid(), meta("f").gid()), (55_004, 66_005));
    let found = home.stat(&path("f")).await.unwrap().unwrap();
    assert_eq!(found.attrs, attrs(0o644), "as they are here");
    home.set_attrs(&path("f"), &unchanged(&fingerprint), &attrs(0o600)).await.unwrap();
    assert_eq!((meta("f").uid(), meta("f").mode() & 0o7777), (55_004, 0o600));
    home.make(&path("d"), &Make::Directory, &attrs(0o755)).await.unwrap();
    assert_eq!(meta("d").uid(), 55_004);
}

#[tokio::test]
async fn the_directory_has_the_requested_attributes() {
    if !rustix::process::geteuid().is_root() {
        return;
    }
    let (dir, home) = fresh().await;
    home.make(&path("d"), &Make::Directory, &attrs(0o2750)).await.unwrap();
    put(&home, &path("d/f"), b"bytes", &attrs(0o4751)).await;
    let shown = |at: &Path| {
        let m = std::fs::symlink_metadata(at).unwrap();
        (m.mode() & 0o7777, m.uid(), m.gid(), m.mtime(), m.mtime_nsec())
    };
    let f = dir.path().join("d/f");
    assert_eq!(shown(&f), (0o4751, 1234, 2345, 1_500_000_000, 123_456_789));
    assert_eq!(
        (std::fs::metadata(&f).unwrap().atime(), std::fs::read(&f).unwrap()),
        (1_600_000_000, b"bytes".to_vec())
    );
    assert_eq!(shown(&dir.path().join("d")).0, 0o2750);
}

#[tokio::test]
async fn a_hole_made_where_data_was_takes_no_space() {
    let (dir, home) = fresh().await;
    let fingerprint = put(&home, &path("f"), &vec![1; 3 << 20], &attrs(0o644)).await;
    let blocks = || std::fs::metadata(dir.path().join("f")).unwrap().blocks() * 512;
    assert!(blocks() >= 3 << 20);
    let writer = home.open_write(&path("f"), &unchanged(&fingerprint)).await.unwrap();
    writer.zero(0..2 << 20).await.unwrap();
    writer.finish(3 << 20, &attrs(0o644)).await.unwrap();
    assert!((1 << 20..2 << 20).contains(&blocks()), "{} bytes taken", blocks());
}

#[tokio::test]
async fn a_name_kept_for_marks_is_not_touched_and_not_shown() {
    let (dir, home) = fresh().await;
    std::fs::write(dir.path().join(".weir-home-x"), "a mark").unwrap();
    assert!(home.list(&path("/"), None, 10).await.unwrap().entries.is_empty());
    assert!(weir_home::HomePath::parse(".weir-home").is_err());
    let d = home.make(&path("d"), &Make::Directory, &attrs(0o755)).await.unwrap();
    std::fs::write(dir.path().join("d/.weir-home-x"), "a mark").unwrap();
    assert!(home.remove(&path("d"), &unchanged(&d)).await.is_err());
}

/// A small file system in a file, mounted; gone with the value.
struct SmallDisk(tempfile::TempDir);

impl SmallDisk {
    /// None: this is not allowed here, and the test may be skipped.
    fn new() -> Option<SmallDisk> {
        let disk = SmallDisk(tempfile::tempdir().unwrap());
        let (image, at) = (disk.0.path().join("image"), disk.path());
        std::fs::File::create(&image).unwrap().set_len(24 << 20).unwrap();
        std::fs::create_dir(&at).unwrap();
        let run = |program: &str, args: &[&std::ffi::OsStr]| {
            std::process::Command::new(program)
                .args(args)
                .output()
                .is_ok_and(|output| output.status.success())
        };
        let made = run("mkfs.ext4", &["-q".as_ref(), "-N64".as_ref(), "-m0".as_ref(), image.as_ref()])
            && run("mount", &["-o".as_ref(), "loop".as_ref(), image.as_ref(), at.as_ref()]);
        if !made {
            assert!(std::env::var_os("WEIR_TEST_ALL").is_none(), "a file system in a file cannot be mounted");
            eprintln!("left out: a file system in a file cannot be mounted here");
        }
        made.then_some(disk)
    }
    fn path(&self) -> std::path::PathBuf {
        self.0.path().join("disk")
    }
}
impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = std::process::Command::new("umount").arg("-l").arg(self.path()).output();
    }
}

#[tokio::test]
async fn a_full_home_says_so_keeps_what_it_has_and_goes_on_with_space() {
    let Some(disk) = SmallDisk::new() else { return };
    let home: Arc<dyn Home> = Arc::new(open_file(&disk.path(), true).await);
    let kept = put(&home, &path("kept"), b"kept", &attrs(0o644)).await;
    let f = home.make(&path("f"), &Make::File, &attrs(0o644)).await.unwrap();
    let writer = home.open_write(&path("f"), &unchanged(&f)).await.unwrap();
    let part = bytes::Bytes::from(vec![7; 1 << 20]);
    let (mut offset, mut synced) = (0, 0);
    let fault = loop {
        match writer.write_at(offset, vec![part.clone()]).await {
            Ok(()) => offset += 1 << 20,
            Err(fault) => break fault,
        }
        match writer.sync().await {
            Ok(fingerprint) => synced = fingerprint.size,
            Err(fault) => break fault,
        }
        assert!(offset < 100 << 20, "a small disk takes no end of bytes");
    };
    assert!(matches!(&fault, Fault::Full(e) if e.context.contains("free space")), "{fault}");
    assert!(synced > 10 << 20 && home.space().await.unwrap().free < 2 << 20);
    let found = home.stat(&path("f")).await.unwrap().unwrap().fingerprint;
    let reader = home.open_read(&path("f"), &ours(&f)).await.unwrap();
    let read = reader.read_at(0, synced as usize).await.unwrap().concat();
    assert!(read.len() as u64 == synced && read.iter().all(|b| *b == 7));
    // A full home has no space for names either, after a number of them.
    let mut n = 0;
    let fault = loop {
        match home.make(&path(format!("n{n}")), &Make::File, &attrs(0o644)).await {
            Ok(_) => n += 1,
            Err(fault) => break fault,
        }
        assert!(n < 100);
    };
    assert!(matches!(fault, Fault::Full(_)), "{fault}");
    drop((reader, writer));
    home.remove(&path("f"), &ours(&found)).await.unwrap();
    home.settle().await.unwrap();
    put(&home, &path("f"), &part, &attrs(0o644)).await;
    assert_eq!(home.stat(&path("kept")).await.unwrap().unwrap().fingerprint, kept);
}
