//! A cluster for one measurement, with a mount and a home, in a directory that is as it was before when the
//! measurement ends, also when it fails.
use rustix::process::Signal;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use weir_admin::failure::{Doing, Failure, Outcome};
use weir_admin::local::args::Up;
use weir_admin::local::local_cluster::{self, LocalCluster, RoleName};
use weir_admin::local::process::PidFile;
use weir_admin::local::up;
use weir_admin::observe;
use weir_proto::Error;

/// The cluster of the demo; removed with it in every outcome.
pub struct Stage {
    root: PathBuf,
    made_root: bool,
    pub mount: PathBuf,
    ended: AtomicBool,
}

impl Stage {
    /// `dir`, or a new one called after `name`; with a mount point, and otherwise empty.
    pub fn prepare(dir: Option<&Path>, name: &str) -> Outcome<Stage> {
        let root = match dir {
            Some(dir) => local_cluster::absolute(dir)?,
            None => std::env::temp_dir().join(format!("{name}-{}", std::process::id())),
        };
        let made_root = !root.exists();
        let mount = root.join("mnt");
        fs::create_dir_all(&mount).doing(format_args!("make {}", mount.display()))?;
        let stage = Stage { root, made_root, mount, ended: AtomicBool::new(false) };
        if let Some(there) = [stage.cluster_dir(), stage.home()].into_iter().find(|dir| dir.exists()) {
            stage.ended.store(true, Ordering::Release); // not this demo's to remove
            let error = Error::exists(format!("{} exists already", there.display()));
            return Err(Failure::new(
                error,
                "name another --dir, or stop that cluster with `weir down` and remove it",
            ));
        }
        weir_fuse::preflight(&stage.mount)?;
        Ok(stage)
    }

    pub fn cluster_dir(&self) -> PathBuf {
        self.root.join("cluster")
    }
    pub fn home(&self) -> PathBuf {
        self.root.join("home")
    }
    /// Directory and mount point of a second cluster, for callers that need one.
    pub fn second_cluster(&self) -> (PathBuf, PathBuf) {
        (self.root.join("beside"), self.root.join("beside-mnt"))
    }
    /// A cluster on this stage: one process for each of six targets, its mount, no mover.
    pub fn cluster(&self, memory: bool) -> Up {
        Up {
            tcp: false,
            allow_home: Vec::new(),
            dir: self.cluster_dir(),
            targets: Some(6),
            scheme: Some(local_cluster::SCHEME_DEFAULT),
            mount: vec![self.mount.clone()],
            mount_over_files: false,
            patience: None,
            transport: None,
            movers: Some(0),
            etcd: None,
            copies: None,
            console: false,
            memory,
            json: false,
        }
    }
    pub fn end(&self) -> Outcome<()> {
        if self.ended.swap(true, Ordering::AcqRel) {
            return Ok(());
        }
        let (second_cluster, second_mount) = self.second_cluster();
        for cluster in [second_cluster, self.cluster_dir()] {
            if let Ok(local) = LocalCluster::open(&cluster) {
                wake(&local);
                up::take_down(&local)?;
            }
            if cluster.exists() {
                fs::remove_dir_all(&cluster).doing("remove the demo's cluster")?;
            }
        }
        if self.home().exists() {
            fs::remove_dir_all(self.home()).doing("remove the demo's home directory")?;
        }
        for mount in [&self.mount, &second_mount] {
            fs::remove_dir(mount)
                .or_else(|e| if mount.exists() { Err(e) } else { Ok(()) })
                .doing("remove the demo's mount point")?;
        }
        if self.made_root {
            fs::remove_dir(&self.root).doing("remove the demo's directory")?;
        }
        Ok(())
    }
}
/// A stopped process cannot end.
fn wake(local: &LocalCluster) {
    for mount in local.of_role(RoleName::Mount) {
        if let Some(pid) = PidFile::read(&local.pid_file(mount)) {
            let _ = pid.signal(Signal::CONT); // it has ended already
        }
    }
}

impl Drop for Stage {
    fn drop(&mut self) {
        if let Err(e) = self.end() {
            eprintln!("{}", e.doing("clean up after the demo"));
        }
    }
}

/// SIGINT and SIGTERM end the demo, with a clean-up.
pub fn end_on_signal(stage: Stage) -> Arc<Stage> {
    let stage = Arc::new(stage);
    let of_thread = stage.clone();
    std::thread::spawn(move || {
        let waited = observe::block_on(async {
            use tokio::signal::unix::{SignalKind, signal};
            let mut int = signal(SignalKind::interrupt()).doing("listen for SIGINT")?;
            let mut term = signal(SignalKind::terminate()).doing("listen for SIGTERM")?;
            tokio::select! {
                biased;
                _ = int.recv() => {}
                _ = term.recv() => {}
            }
            Ok(())
        });
        if waited.is_ok() {
            eprintln!("\nstopped; cleaning up");
            let _ = of_thread.end(); // the main thread reports it if it still exists
            std::process::exit(130);
        }
    });
    stage
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stage_removes_what_it_made_and_only_that() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path().join("demo");
        fs::create_dir_all(root.join("mnt")).unwrap();
        let stage = Stage {
            root: root.clone(),
            made_root: true,
            mount: root.join("mnt"),
            ended: AtomicBool::new(false),
        };
        drop(stage);
        assert!(!root.exists() && dir.path().exists());
    }
}
