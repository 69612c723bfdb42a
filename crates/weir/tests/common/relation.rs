//! A volume with a home, for tests of relations.
use super::{Cluster, pattern, text, wait_until, weir};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fs;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::{Path, PathBuf};
use std::time::Duration;

pub const PATIENCE: Duration = Duration::from_secs(120);

/// A cluster with a volume `data` whose home is a directory.
pub struct Bench {
    pub cluster: Cluster,
    _home: tempfile::TempDir,
    /// A directory of the test's own: the home, if it is one.
    pub home: PathBuf,
    pub data: PathBuf,
}

impl Bench {
    pub fn start() -> Bench {
        let bench = Bench::without_volume();
        bench.run_weir(&["volume", "create", "data"]);
        bench
    }
    pub fn without_volume() -> Bench {
        Bench::with(&["--movers", "1"])
    }
    /// With these options of `weir up`.
    pub fn with(options: &[&str]) -> Bench {
        let cluster = Cluster::with(1, options);
        let at = tempfile::tempdir().unwrap();
        let home = at.path().join("home");
        fs::create_dir(&home).unwrap();
        let data = cluster.mount().join("data");
        Bench { cluster, _home: at, home, data }
    }
    /// Of the home, where that is a directory.
    pub fn url(&self) -> String {
        format!("file://{}", self.home.display())
    }
    /// A home with older files: a file of many parts, one with two names, a link.
    pub fn fill_home(&self) {
        let home = &self.home;
        fs::create_dir_all(home.join("a/b/c")).unwrap();
        fs::write(home.join("a/frames"), pattern(1, 9 << 20)).unwrap();
        fs::write(home.join("a/b/small"), b"small").unwrap();
        fs::hard_link(home.join("a/b/small"), home.join("second name")).unwrap();
        symlink("b/small", home.join("a/link")).unwrap();
    }
    pub fn relate(&self) {
        self.relate_to(&self.url());
    }
    pub fn relate_to(&self, url: &str) {
        self.run_weir(&["relation", "add", "data", url, "--evict"]);
    }
    /// Evicts all of a file, as soon as home has proved that it has it.
    pub fn evict(&self, path: &Path) {
        wait_until("home to have proved all of it", PATIENCE, || {
            weir(&["file", "evict", path.to_str().unwrap()]).status.success()
        });
        assert_eq!(self.offline(path), fs::metadata(path).unwrap().len());
    }
    /// Bytes of a file that are at home only.
    pub fn offline(&self, path: &Path) -> u64 {
        let shown = weir(&["file", "state", path.to_str().unwrap(), "--json"]);
        assert!(shown.status.success(), "{}", text(&shown.stderr));
        let value: Value = serde_json::from_slice(&shown.stdout).unwrap();
        value[0]["offline"].as_u64().unwrap()
    }
    pub fn try_run_weir(&self, args: &[&str]) -> std::process::Output {
        self.cluster.try_run_weir(args)
    }
    pub fn run_weir(&self, args: &[&str]) -> String {
        self.cluster.run_weir(args)
    }
    pub fn relation(&self) -> Value {
        let shown = self.run_weir(&["relation", "show", "r1", "--json"]);
        serde_json::from_str(&shown).unwrap()
    }
    pub fn wait_state(&self, state: &str) {
        let (mut last, started) = (Value::Null, std::time::Instant::now());
        while started.elapsed() < PATIENCE {
            last = self.relation();
            if last["state"] == state {
                return;
            }
            std::thread::sleep(Duration::from_millis(100));
        }
        panic!("the relation is not {state}: {last:#}\n{}", self.cluster.logs());
    }
    /// All entries below a directory with what homes keep of them. Tries again if one is removed meanwhile.
    pub fn tree(root: &Path) -> BTreeMap<PathBuf, String> {
        let mut tries = (0..100).map(|_| Bench::try_tree(root));
        let gone =
            |tree: &std::io::Result<_>| matches!(tree, Err(e) if e.kind() == std::io::ErrorKind::NotFound);
        tries.find(|tree| !gone(tree)).expect("entries are removed all the time").unwrap()
    }
    pub fn try_tree(root: &Path) -> std::io::Result<BTreeMap<PathBuf, String>> {
        let (mut tree, mut queue) = (BTreeMap::new(), vec![root.to_path_buf()]);
        while let Some(dir) = queue.pop() {
            for entry in fs::read_dir(&dir)? {
                let path = entry?.path();
                if path.ends_with(".weir-home") {
                    continue;
                }
                let m = fs::symlink_metadata(&path)?;
                let content = if m.is_dir() {
                    queue.push(path.clone());
                    String::new()
                } else if m.is_symlink() {
                    fs::read_link(&path)?.display().to_string()
                } else {
                    let bytes = fs::read(&path)?;
                    let crc = weir_proto::checksum::crc32c(&bytes);
                    format!("{} bytes, crc {crc:08x}, {} links", bytes.len(), m.nlink())
                };
                let shown = format!(
                    "{:o} {}:{} {}.{:09} {content}",
                    m.mode(),
                    m.uid(),
                    m.gid(),
                    m.mtime(),
                    m.mtime_nsec()
                );
                tree.insert(path.strip_prefix(root).unwrap().to_path_buf(), shown);
            }
        }
        Ok(tree)
    }
    pub fn assert_same(&self) {
        self.assert_same_as(&self.home);
    }
    pub fn assert_same_as(&self, home: &Path) {
        // Closes are reported late: the final times follow them.
        let (started, mut same) = (std::time::Instant::now(), false);
        while !same && started.elapsed() < PATIENCE {
            std::thread::sleep(Duration::from_millis(100));
            same = Bench::tree(&self.data) == Bench::tree(home);
        }
        assert_eq!(Bench::tree(&self.data), Bench::tree(home));
    }
}
