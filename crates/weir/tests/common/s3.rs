//! An S3 service for tests of homes.
use super::tool;
use std::fs;
use std::net::{TcpListener, TcpStream};
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

pub const SECRET: &str = "not-to-be-shown";

/// A real S3 service whose objects are files of a directory. Ends with the value.
pub struct S3 {
    server: Child,
    root: tempfile::TempDir,
    pub url: String,
    pub endpoint: String,
    /// A credentials file with the profile `mine`.
    pub keys: PathBuf,
}

impl S3 {
    /// None: the program is not installed, and the test may be skipped.
    pub fn start() -> Option<S3> {
        let program = tool("versitygw")?;
        let root = tempfile::tempdir().unwrap();
        fs::create_dir(root.path().join("bucket")).unwrap();
        let keys = root.path().join("keys");
        let text = format!("[mine]\naws_access_key_id = tester\naws_secret_access_key = {SECRET}\n");
        fs::write(&keys, text).unwrap();
        // Another process may take the port between our check and the server's start: then another one.
        for _ in 0..10 {
            let port = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().port();
            let at = format!("127.0.0.1:{port}");
            let mut server = Command::new(&program);
            server.args(["--port", &at, "--access", "tester", "--secret", SECRET, "--quiet", "posix"]);
            server.arg(root.path()).stdout(Stdio::null()).stderr(Stdio::null());
            let mut server = server.spawn().unwrap();
            let patience = Instant::now() + Duration::from_secs(60);
            while Instant::now() < patience && server.try_wait().unwrap().is_none() {
                if TcpStream::connect(&at).is_ok() {
                    let endpoint = format!("http://{at}");
                    let place = "s3://bucket/some/place";
                    let (at, profile) = (format!("endpoint={endpoint}&path-style=yes"), "profile=mine");
                    let url = format!("{place}?{at}&credentials={}&{profile}", keys.display());
                    return Some(S3 { server, root, url, endpoint, keys });
                }
                std::thread::sleep(Duration::from_millis(20));
            }
            let _ = server.kill();
            let _ = server.wait();
        }
        panic!("versitygw does not start");
    }
    pub fn path(&self, key: &str) -> PathBuf {
        self.root.path().join("bucket/some/place").join(key)
    }
    pub fn object(&self, key: &str) -> Option<Vec<u8>> {
        fs::read(self.path(key)).ok()
    }
}

impl Drop for S3 {
    fn drop(&mut self) {
        let _ = self.server.kill();
        let _ = self.server.wait();
    }
}
