//! A real S3 service for the tests: `versitygw` (`make setup` installs it), over a temporary directory.
use crate::{
    Bench,
    cases::{assert_diverged, attrs, ours, path, put, read_all, unchanged},
    env,
};
use bytes::Bytes;
use std::{
    net::{TcpListener, TcpStream},
    path::PathBuf,
    process::{Child, Command, Stdio},
    sync::Arc,
    time::{Duration, Instant},
};
use weir_home::{Credentials, Fault, Home, IdMap, KeySource, LaneLimits, Make, S3Home, S3HomeConfig};

const SECRET: &str = "not-to-be-shown";

/// Ends with the value.
pub struct Service {
    server: Child,
    port: u16,
    root: tempfile::TempDir,
}

fn program() -> Option<PathBuf> {
    let tools = std::env::var_os("WEIR_TOOLS").map(PathBuf::from);
    let tools = tools.or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache/weir-tools")))?;
    let program = tools.join("bin/versitygw");
    if program.exists() {
        return Some(program);
    }
    assert!(std::env::var_os("WEIR_TEST_ALL").is_none(), "versitygw is missing: run make setup");
    eprintln!("left out: versitygw is missing, make setup installs it");
    None
}

impl Service {
    /// None: the program is not installed, and the test may be skipped.
    pub fn start() -> Option<Service> {
        let program = program()?;
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir(root.path().join("bucket")).unwrap();
        // Another process may take the port between our check and the server's start: then another one.
        for _ in 0..10 {
            let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
            let mut server = Command::new(&program)
                .args([
                    "--port",
                    &format!("127.0.0.1:{port}"),
                    "--access",
                    "tester",
                    "--secret",
                    SECRET,
                    "--quiet",
                ])
                .arg("posix")
                .arg(root.path())
                .stdout(Stdio::null())
                .stderr(Stdio::null())
                .spawn()
                .unwrap();
            let patience = Instant::now() + Duration::from_secs(60);
            while Instant::now() < patience && server.try_wait().unwrap().is_none() {
                if TcpStream::connect(("127.0.0.1", port)).is_ok() {
                    return Some(Service { server, port, root });
                }
                std::thread::sleep(Duration::from_millis(20));
            }
            let _ = server.kill();
            let _ = server.wait();
        }
        panic!("versitygw does not start");
    }

    pub fn config(&self, prefix: &str, is_new: bool) -> S3HomeConfig {
        let keys = Credentials { access_key: "tester".into(), secret_key: SECRET.into(), token: None };
        S3HomeConfig {
            bucket: "bucket".into(),
            prefix: prefix.into(),
            endpoint: format!("http://127.0.0.1:{}", self.port),
            region: "us-east-1".into(),
            path_style: true,
            keys: KeySource::Fixed(keys),
            relation: "test".into(),
            is_new,
            only_reads: false,
            ids: IdMap::default(),
            limits: LaneLimits { threads_max: 4, waiting_max: 64, deadline: Duration::from_secs(60) },
            copy_bytes_max: S3HomeConfig::COPY_BYTES_MAX,
        }
    }

    async fn home(&self, config: S3HomeConfig) -> Arc<dyn Home> {
        let home = S3Home::open(&env(), config).await;
        Arc::new(home.unwrap_or_else(|fault| panic!("{fault} ({})", self.root.path().display())))
    }
}

impl Service {
    /// Files that the service keeps for uploads that have not ended.
    fn parts(&self) -> usize {
        let (mut count, mut dirs) = (0, vec![self.root.path().join("bucket/.sgwtmp/multipart")]);
        while let Some(dir) = dirs.pop() {
            for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
                match entry.file_type().unwrap().is_dir() {
                    true => dirs.push(entry.path()),
                    false => count += 1,
                }
            }
        }
        count
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}

#[tokio::test]
async fn another_relations_bucket_and_wrong_keys_are_refused() {
    let Some(service) = Service::start() else { return };
    let home = service.home(service.config("", true)).await;
    assert_eq!(home.url(), "s3://bucket/");
    let refused = |config| async { S3Home::open(&env(), config).await.map(drop).unwrap_err() };
    let other = S3HomeConfig { relation: "other".into(), ..service.config("", true) };
    assert!(matches!(refused(other).await, Fault::Diverged(_)));
    assert!(matches!(refused(service.config("elsewhere", false)).await, Fault::Unreachable(_)));
    let keys = Credentials { access_key: "tester".into(), secret_key: "wrong-secret".into(), token: None };
    let wrong = S3HomeConfig { keys: KeySource::Fixed(keys), ..service.config("", false) };
    let fault = refused(wrong.clone()).await;
    assert!(matches!(fault, Fault::Denied(_)), "{fault}");
    let gone = S3HomeConfig { bucket: "no-such".into(), ..service.config("", false) };
    assert!(matches!(refused(gone).await, Fault::Unreachable(_)));
    let nobody = S3HomeConfig { endpoint: "http://127.0.0.1:9".into(), ..service.config("", false) };
    assert!(matches!(refused(nobody).await, Fault::Unreachable(_)));
    for text in [format!("{fault:?}"), format!("{wrong:?}")] {
        assert!(!text.contains("wrong-secret") && !text.contains("Signature="), "{text}");
    }
}

#[tokio::test]
async fn large_objects_are_copied_in_parts() {
    let Some(service) = Service::start() else { return };
    let home = service.home(S3HomeConfig { copy_bytes_max: 6 << 20, ..service.config("x", true) }).await;
    let bytes: Vec<u8> = (0..20_000_000u32).map(|n| (n / 3) as u8).collect();
    let fingerprint = put(&home, &path("a"), &bytes, &attrs(0o644)).await;
    home.rename(&path("a"), &unchanged(&fingerprint), &path("b"), None).await.unwrap();
    assert!(read_all(&home, &path("b")).await == bytes);
    let found = home.stat(&path("b")).await.unwrap().unwrap();
    home.set_attrs(&path("b"), &unchanged(&found.fingerprint), &attrs(0o600)).await.unwrap();
    assert_eq!(home.stat(&path("b")).await.unwrap().unwrap().attrs.mode, 0o600);
    assert!(read_all(&home, &path("b")).await == bytes);
}

/// Such a copy has another ETag.
#[tokio::test]
async fn a_multipart_file_is_recognized_in_a_renamed_directory() {
    let Some(service) = Service::start() else { return };
    let home = service.home(service.config("x", true)).await;
    let d = home.make(&path("d"), &Make::Directory, &attrs(0o755)).await.unwrap();
    let bytes: Vec<u8> = (0..20_000_000u32).map(|n| (n / 3) as u8).collect();
    let fingerprint = put(&home, &path("d/a"), &bytes, &attrs(0o644)).await;
    let e = home.rename(&path("d"), &unchanged(&d), &path("e"), None).await.unwrap();
    home.rename(&path("e"), &unchanged(&e), &path("f"), None).await.unwrap();
    assert!(read_all(&home, &path("f/a")).await == bytes);
    home.remove(&path("f/a"), &unchanged(&fingerprint)).await.unwrap();
}

#[tokio::test]
async fn a_rename_of_a_directory_that_was_cut_off_goes_on() {
    let Some(service) = Service::start() else { return };
    let home = service.home(service.config("x", true)).await;
    let d = home.make(&path("d"), &Make::Directory, &attrs(0o755)).await.unwrap();
    for n in 0..5 {
        put(&home, &path(format!("d/{n}")), b"bytes", &attrs(0o644)).await;
    }
    // Two of its files exist already, the directory itself does not.
    let moved = home.stat(&path("d/0")).await.unwrap().unwrap().fingerprint;
    home.make(&path("e"), &Make::Directory, &attrs(0o755)).await.unwrap();
    home.rename(&path("d/0"), &unchanged(&moved), &path("e/0"), None).await.unwrap();
    let e = home.stat(&path("e")).await.unwrap().unwrap().fingerprint;
    assert_diverged(home.rename(&path("d"), &unchanged(&d), &path("e"), None).await, &path("e"));
    std::fs::remove_dir_all(service.root.path().join("bucket/x/e")).unwrap();
    home.rename(&path("d"), &unchanged(&d), &path("e"), None).await.unwrap();
    assert_ne!(home.stat(&path("e")).await.unwrap().unwrap().fingerprint, e);
    assert_eq!(home.list(&path("e"), None, 10).await.unwrap().entries.len(), 4);
    assert_eq!(home.stat(&path("d")).await.unwrap(), None);
}

#[tokio::test]
async fn small_and_short_writes_make_the_right_file() {
    let Some(service) = Service::start() else { return };
    let home = service.home(service.config("x", true)).await;
    let bench = Bench { stranger: home.clone(), home };
    let (home, at) = (&bench.home, path("f"));
    let mut wished: Vec<u8> = (0..19_000_000u32).map(|n| (n / 7) as u8).collect();
    let mut fingerprint = put(home, &at, &wished, &attrs(0o644)).await;
    for (n, (offset, len)) in
        [(5, 10), (9_000_000, 100), (16_777_210, 12), (18_999_990, 1000)].into_iter().enumerate()
    {
        let bytes = vec![n as u8 + 1; len];
        let writer = home.open_write(&at, &unchanged(&fingerprint)).await.unwrap();
        writer.write_at(offset as u64, vec![Bytes::from(bytes.clone())]).await.unwrap();
        // Acknowledged and not finished, and then more of the same part.
        let reported = writer.sync().await.unwrap();
        drop(writer);
        let writer = home.open_write(&at, &unchanged(&reported)).await.unwrap();
        let end = offset + len;
        writer.write_at(end as u64, vec![Bytes::from_static(b"more")]).await.unwrap();
        wished.resize(wished.len().max(end + 4), 0);
        wished[offset..end].copy_from_slice(&bytes);
        wished[end..end + 4].copy_from_slice(b"more");
        fingerprint = writer.finish(wished.len() as u64, &attrs(0o644)).await.unwrap();
        assert!(read_all(home, &at).await == wished, "after change {n}");
    }
}

/// Uploads cost money until they are aborted.
#[tokio::test]
async fn unreported_parts_of_a_removed_file_do_not_stay() {
    let Some(service) = Service::start() else { return };
    let home = service.home(service.config("x", true)).await;
    let (at, longer) = (path("f"), path("f2"));
    let bytes = Bytes::from(vec![7; home.part(0, 1 << 20).end as usize]);
    let begin = async |at| {
        let made = home.make(at, &Make::File, &attrs(0o644)).await.unwrap();
        let writer = home.open_write(at, &unchanged(&made)).await.unwrap();
        writer.write_at(0, vec![bytes.clone()]).await.unwrap();
        (made, writer.sync().await.unwrap())
    };
    let (made, _) = begin(&at).await;
    let (_, reported) = begin(&longer).await;
    let (count, all) = (|| service.parts(), service.parts());
    assert!(all > 0);
    home.remove(&at, &ours(&made)).await.unwrap();
    let left = count();
    assert!(0 < left && left < all, "{left} of {all}: those of the other file");
    home.remove(&longer, &unchanged(&reported)).await.unwrap();
    assert_eq!(count(), 0);
    assert!(home.stat(&at).await.unwrap().is_none() && home.stat(&longer).await.unwrap().is_none());
}
