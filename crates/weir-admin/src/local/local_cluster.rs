//! The directory of a cluster that runs on one machine: its files, and the choices at its creation.
//!
//! ```text
//! DIR/cluster.toml        the decisions below; its presence makes DIR a cluster's directory
//! DIR/etc/NAME.toml       configuration of each process
//! DIR/run/NAME.pid        pid files
//! DIR/socket/NAME.sock    Unix sockets, for this user and root
//! DIR/door/NAME.sock      those of coordinator and metadata role for all users, to manage their volumes
//! DIR/log/NAME.log        the log of each process
//! DIR/coord DIR/meta      cluster map, namespace
//! DIR/coord-1 …           with `--etcd`: audit logs of the coordinators
//! DIR/etcd-1 …            with `--etcd`: members of etcd, with the cluster map
//! DIR/t1 … DIR/tN         targets
//! ```
use crate::config::{Config, Patience, Text};
use crate::failure::{Doing, Failure, Outcome};
use crate::local::owned;
use serde::{Deserialize, Serialize};
use std::fs;
use std::net::{Ipv4Addr, SocketAddr};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use weir_coord::etcd::StorePlace;
pub use weir_diagnose::RoleName;
use weir_env::Addr;
use weir_fuse::Transport;
use weir_proto::{ClusterId, Error, map::Scheme};

const MANIFEST: &str = "cluster.toml";
pub const TARGETS_DEFAULT: u32 = 6;
pub const SCHEME_DEFAULT: Scheme = Scheme { data: 4, parity: 2 };

/// The storage of a cluster's bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Kept {
    Disk,
    /// DIR is a memory file system that `weir up` mounted.
    Tmpfs,
    /// DIR is a symbolic link into the machine's shared memory (without root).
    SharedMemory,
}

/// One process of the cluster.
#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Process {
    pub name: String,
    pub role: RoleName,
    /// TCP port on the loopback address; 0: none.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub port: u16,
    /// The port for the other members of etcd.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub peer_port: u16,
    /// The directory of its data, or its mount point.
    pub path: PathBuf,
    /// Its directory was founded once: from then on it is never founded automatically.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub founded: bool,
}
impl Process {
    fn new(name: String, role: RoleName, path: PathBuf) -> Process {
        Process { name, role, port: 0, peer_port: 0, path, founded: false }
    }
    /// The address of a member of etcd.
    pub fn client_url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }
}
fn is_zero(n: &u16) -> bool {
    *n == 0
}

#[derive(Clone, PartialEq, Eq, Debug, Serialize, Deserialize)]
pub struct Manifest {
    pub cluster: Text<ClusterId>,
    pub kept: Kept,
    /// DIR did not exist before.
    pub made_dir: bool,
    pub targets: u32,
    pub scheme: Text<Scheme>,
    /// The patience of mounts; their default if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub patience: Option<Text<Patience>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub transport: Option<Text<Transport>>,
    /// Servers listen on TCP ports of the loopback address, too.
    #[serde(default)]
    pub tcp: bool,
    pub processes: Vec<Process>,
}

/// A cluster's directory.
#[derive(Clone, Debug)]
pub struct LocalCluster {
    pub dir: PathBuf,
    pub manifest: Manifest,
}

impl LocalCluster {
    /// The cluster of a directory, to send requests to it. The owner of the directory does not matter for
    /// that.
    pub fn open(dir: &Path) -> Outcome<LocalCluster> {
        let dir = absolute(dir)?;
        let path = dir.join(MANIFEST);
        let text = fs::read_to_string(&path).map_err(|e| {
            let shown = dir.display();
            if e.kind() != std::io::ErrorKind::NotFound {
                let error = Error::from_io(format_args!("read {}", path.display()), &e);
                return Failure::new(
                    error,
                    "the user who ran `weir up` may read it; others reach the cluster by --coordinator ADDR",
                );
            }
            let error = Error::not_found(format!("{shown} is not the directory of a cluster"));
            // Not where `weir up` would refuse: an existing file belongs to something else.
            let is_free = fs::read_dir(&dir).map_or(!dir.exists(), |mut entries| entries.next().is_none());
            Failure::new(
                error,
                match is_free {
                    true => format!("`weir up --dir {shown}` makes a cluster there"),
                    false => "name the directory that `weir up --dir` was given".into(),
                },
            )
        })?;
        LocalCluster::parse(dir, &path, &text)
    }

    /// Opens a cluster's directory to act on it: start, signal and stop processes, mount, write. Refused if
    /// another user can change it.
    pub fn open_own(dir: &Path) -> Outcome<LocalCluster> {
        let local = LocalCluster::open(dir)?;
        // In memory, DIR is a link that this program made: its target counts.
        let real = fs::canonicalize(&local.dir).doing(format_args!("find {}", local.dir.display()))?;
        owned::check_dir(&real)?;
        for sub in ["etc", "run", "log", "socket", "door"] {
            owned::check_dir(&real.join(sub))?;
        }
        let path = real.join(MANIFEST);
        LocalCluster::parse(local.dir, &path, &owned::read(&path)?)
    }

    fn parse(dir: PathBuf, path: &Path, text: &str) -> Outcome<LocalCluster> {
        let manifest = toml::from_str(text).map_err(|e| {
            let error = Error::damaged(format!("{}: {}", path.display(), e.message()));
            Failure::new(error, "the file is written by `weir up` and not meant to be edited")
        })?;
        Ok(LocalCluster { dir, manifest })
    }

    /// `None`: the directory is free for a new cluster.
    pub fn find(dir: &Path) -> Outcome<Option<LocalCluster>> {
        if dir.join(MANIFEST).exists() {
            return LocalCluster::open_own(dir).map(Some);
        }
        let mut entries = match fs::read_dir(dir) {
            Ok(entries) => entries,
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(e) => return Err(e).doing(format_args!("read {}", dir.display())),
        };
        match entries.next() {
            None => owned::check_dir(&fs::canonicalize(dir).doing("find it")?).map(|()| None),
            Some(_) => Err(Failure::new(
                Error::exists(format!("{} holds files that are not of a cluster", dir.display())),
                "name an empty or new directory",
            )),
        }
    }

    pub fn save(&self) -> Outcome<()> {
        let text =
            toml::to_string(&self.manifest).map_err(|e| Error::io(format!("write {MANIFEST}: {e}")))?;
        let path = self.dir.join(MANIFEST);
        let disk = weir_env::real::env().disk;
        disk.write_atomic(&path, text.as_bytes()).doing(format_args!("write {}", path.display()))?;
        // It contains no secret, and other users find the socket by it.
        let readable = fs::Permissions::from_mode(0o644);
        fs::set_permissions(&path, readable).doing(format_args!("set the mode of {}", path.display()))
    }

    pub fn pid_file(&self, process: &Process) -> PathBuf {
        self.dir.join("run").join(format!("{}.pid", process.name))
    }
    pub fn log(&self, process: &Process) -> PathBuf {
        self.dir.join("log").join(format!("{}.log", process.name))
    }
    pub fn config_file(&self, process: &Process) -> PathBuf {
        self.dir.join("etc").join(format!("{}.toml", process.name))
    }
    /// The link to the console's page: see `console/login.rs`.
    pub fn console_link(&self) -> PathBuf {
        self.dir.join("run/console.link")
    }
    pub fn of_role(&self, role: RoleName) -> impl Iterator<Item = &Process> {
        self.manifest.processes.iter().filter(move |p| p.role == role)
    }
    /// The addresses of a process, best first.
    pub fn addresses(&self, process: &Process) -> Vec<Addr> {
        let socket = self.dir.join("socket").join(format!("{}.sock", process.name));
        let tcp =
            (process.port != 0).then(|| Addr::Tcp(SocketAddr::from((Ipv4Addr::LOCALHOST, process.port))));
        std::iter::once(Addr::Unix(socket)).chain(tcp).collect()
    }
    /// The socket for all users.
    fn door(&self, process: &Process) -> Option<PathBuf> {
        let has_one = matches!(process.role, RoleName::Coord | RoleName::Meta | RoleName::Mount);
        has_one.then(|| self.dir.join("door").join(format!("{}.sock", process.name)))
    }
    pub fn coordinators(&self) -> Vec<Addr> {
        let all = |p| self.addresses(p).into_iter().chain(self.door(p).map(Addr::Unix));
        self.of_role(RoleName::Coord).flat_map(all).collect()
    }

    /// The configuration of a process of this cluster.
    pub fn config(&self, process: &Process) -> Config {
        let mut config = Config::default();
        config.cluster.id = Some(self.manifest.cluster.clone());
        config.cluster.coordinators = self.coordinators().into_iter().map(Text).collect();
        config.node.name.clone_from(&process.name);
        config.node.door = self.door(process);
        if process.role.listens() {
            config.node.listen = self.addresses(process).into_iter().map(Text).collect();
        }
        match process.role {
            RoleName::Etcd => {}
            RoleName::Coord => {
                let etcd: Vec<String> = self.of_role(RoleName::Etcd).map(Process::client_url).collect();
                if !etcd.is_empty() {
                    config.coord.store = Text(StorePlace::Etcd(etcd));
                }
                config.coord.dir.clone_from(&process.path);
                config.coord.targets = self.manifest.targets;
                config.coord.scheme = self.manifest.scheme.clone();
            }
            RoleName::Meta => config.meta.dir.clone_from(&process.path),
            RoleName::Storage => {
                config.storage.targets = vec![process.path.clone()];
                let others = self.of_role(RoleName::Storage).filter(|other| other.path != process.path);
                config.storage.others = others.map(|other| other.path.clone()).collect();
            }
            RoleName::Mount => {
                config.mount.path.clone_from(&process.path);
                if let Some(patience) = &self.manifest.patience {
                    config.mount.patience = patience.clone();
                }
                if let Some(transport) = &self.manifest.transport {
                    config.mount.transport = transport.clone();
                }
            }
            RoleName::Mover | RoleName::Console => {}
        }
        config
    }
}

/// The processes of a new cluster, without ports and mounts. `members`: of etcd, 0 for none; `copies`: of the
/// metadata.
pub fn processes(dir: &Path, targets: u32, members: u32, copies: u32) -> Vec<Process> {
    let process = |name: String, role, path: &str| Process::new(name, role, dir.join(path));
    let numbered = |word: &str, count: u32, role| {
        let each = |n| process(format!("{word}-{n}"), role, &format!("{word}-{n}"));
        (1..=count).map(each).collect::<Vec<_>>()
    };
    let mut all = numbered("etcd", members, RoleName::Etcd);
    match members {
        0 => all.push(process("coord".into(), RoleName::Coord, "coord")),
        _ => all.extend(numbered("coord", members, RoleName::Coord)),
    }
    match copies {
        0 | 1 => all.push(process("meta".into(), RoleName::Meta, "meta")),
        _ => all.extend(numbered("meta", copies, RoleName::Meta)),
    }
    all.extend((1..=targets).map(|n| process(format!("storage-{n}"), RoleName::Storage, &format!("t{n}"))));
    all
}

/// One more target, under a number that none of these has.
pub fn target_process(dir: &Path, existing: &[Process]) -> Process {
    let number = |p: &Process| p.name.strip_prefix("storage-")?.parse::<u32>().ok();
    let mut n = 1 + existing.iter().filter_map(number).max().unwrap_or(0);
    // The directory of one that was removed may still exist.
    while dir.join(format!("t{n}")).exists() {
        n += 1;
    }
    Process::new(format!("storage-{n}"), RoleName::Storage, dir.join(format!("t{n}")))
}

/// The console, of which there is one.
pub fn console_process() -> Process {
    Process::new("console".into(), RoleName::Console, PathBuf::new())
}

/// One more mover.
pub fn mover_process(existing: &[Process]) -> Process {
    let n = 1 + existing.iter().filter(|p| p.role == RoleName::Mover).count();
    Process::new(format!("mover-{n}"), RoleName::Mover, PathBuf::new())
}

/// The name for one more mount.
pub fn mount_process(existing: &[Process], path: PathBuf) -> Process {
    let taken = |name: &String| existing.iter().any(|p| p.name == *name);
    let name = (1..).map(|n| format!("mount-{n}")).find(|name| !taken(name)).unwrap_or_default();
    Process::new(name, RoleName::Mount, path)
}

/// A path that means the same in every process; its last part need not exist.
pub fn absolute(path: &Path) -> Outcome<PathBuf> {
    let path = std::path::absolute(path).doing(format_args!("find {}", path.display()))?;
    Ok(match (path.parent().map(fs::canonicalize), path.file_name()) {
        (Some(Ok(parent)), Some(name)) => parent.join(name),
        _ => path,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn local(dir: &Path) -> LocalCluster {
        let manifest = Manifest {
            cluster: Text(ClusterId([7; 16])),
            kept: Kept::Disk,
            made_dir: false,
            targets: 2,
            scheme: Text(Scheme { data: 1, parity: 1 }),
            patience: None,
            transport: None,
            tcp: false,
            processes: processes(dir, 2, 0, 1),
        };
        LocalCluster { dir: dir.to_path_buf(), manifest }
    }

    #[test]
    fn a_saved_cluster_is_found_again() {
        let dir = tempfile::tempdir().unwrap();
        assert!(LocalCluster::find(dir.path()).unwrap().is_none());
        let saved = local(dir.path());
        ["etc", "run", "log", "socket", "door"]
            .iter()
            .for_each(|sub| fs::create_dir(dir.path().join(sub)).unwrap());
        saved.save().unwrap();
        assert_eq!(LocalCluster::find(dir.path()).unwrap().unwrap().manifest, saved.manifest);
    }

    #[test]
    fn a_directory_with_other_files_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("thesis.tex"), "x").unwrap();
        assert!(LocalCluster::find(dir.path()).unwrap_err().to_string().contains("hint: name an empty"));
        assert!(LocalCluster::open(dir.path()).is_err());
    }

    #[test]
    fn servers_listen_on_unix_sockets_and_only_on_given_ports() {
        let mut local = local(Path::new("/tmp/w"));
        let shown = |local: &LocalCluster, n: usize| -> Vec<String> {
            local.addresses(&local.manifest.processes[n]).iter().map(ToString::to_string).collect()
        };
        assert_eq!(shown(&local, 0), ["unix:/tmp/w/socket/coord.sock"]);
        local.manifest.processes[0].port = 7;
        assert_eq!(shown(&local, 0), ["unix:/tmp/w/socket/coord.sock", "tcp:127.0.0.1:7"]);
        let doors: Vec<bool> =
            local.manifest.processes.iter().map(|p| local.config(p).node.door.is_some()).collect();
        assert_eq!(doors, [true, true, false, false], "coordinator and metadata, no storage");
    }

    #[test]
    fn coordinators_share_the_etcd_that_is_there() {
        let mut local = local(Path::new("/tmp/w"));
        let store = |local: &LocalCluster| {
            local
                .of_role(RoleName::Coord)
                .map(|p| local.config(p).coord.store.0.to_string())
                .collect::<Vec<_>>()
        };
        assert_eq!(store(&local), ["directory"]);
        local.manifest.processes = processes(&local.dir, 1, 3, 1);
        (0..3).for_each(|n| local.manifest.processes[n].port = n as u16 + 1);
        let all = "etcd:http://127.0.0.1:1,http://127.0.0.1:2,http://127.0.0.1:3";
        assert_eq!(store(&local), [all; 3]);
    }

    #[test]
    fn mounts_get_names_of_their_own() {
        let mut all = processes(Path::new("/w"), 1, 0, 1);
        for expected in ["mount-1", "mount-2"] {
            let mount = mount_process(&all, "/mnt".into());
            assert_eq!(mount.name, expected);
            all.push(mount);
        }
    }
}
