//! The cluster of a command: by a directory, addresses, the mount of the working directory, or the machine's
//! own cluster.
use crate::attribute;
use crate::certificate::{self, ADMIN_CERTIFICATE, CERTIFICATE};
use crate::cluster_args::Status;
use crate::config;
use crate::failure::{Doing, Failure, Outcome};
use crate::local::local_cluster::LocalCluster;
use crate::observe;
use std::path::{Path, PathBuf};
use weir_env::Addr;
use weir_proto::Error;
use weir_proto::map::Role;
use weir_trust::certificate::role_word;

impl Status {
    /// The directory of the cluster, if it was named by that.
    pub fn local(&self) -> Outcome<Option<LocalCluster>> {
        match &self.dir {
            Some(dir) if self.coordinator.is_empty() && config_of_node(dir).is_none() => {
                LocalCluster::open(dir).map(Some)
            }
            _ => Ok(None),
        }
    }
}

/// Where a machine has the configuration of its own node, for commands that name no cluster.
const MACHINE_DIR: &str = "/etc/weir";

/// A node's directory that `weir init` or `weir join` made: one of its configuration files.
fn config_of_node(dir: &Path) -> Option<PathBuf> {
    let roles = Role::ALL.iter().map(|role| dir.join(format!("{}.toml", role_word(*role))));
    roles.into_iter().find(|file| file.exists())
}

/// The coordinators that a node knows. Commands then present its certificate, or the administrator's, if
/// there is one.
fn coordinators_of_node(dir: &Path, file: &Path) -> Outcome<Vec<Addr>> {
    let certificates = [ADMIN_CERTIFICATE, CERTIFICATE].map(|name| dir.join(name));
    if let Some(found) = certificates.iter().find(|file| file.exists()) {
        // On the coordinator's machine it is not needed, so commands work with an expired one.
        if let Err(failure) = certificate::use_file(found) {
            let (error, hint) = failure.parts();
            eprintln!("warning: {error}");
            hint.iter().for_each(|hint| eprintln!("hint: {hint}"));
        }
    }
    let text = std::fs::read_to_string(file).doing(format_args!("read {}", file.display()))?;
    let config = config::parse(&file.display().to_string(), &text)?;
    let all: Vec<Addr> = config.cluster.coordinators.into_iter().map(|addr| addr.0).collect();
    let is_coordinator = file.file_name().is_some_and(|name| name == "coord.toml");
    if is_coordinator && !certificates.iter().any(|file| file.exists()) {
        require_lead(dir, &all)?;
    }
    Ok(all)
}

/// A coordinator that stands by does not listen, and the leading one on another machine takes commands only
/// with a certificate.
fn require_lead(dir: &Path, all: &[Addr]) -> Outcome<()> {
    let (here, others): (Vec<&Addr>, Vec<&Addr>) = all.iter().partition(|addr| matches!(addr, Addr::Unix(_)));
    if here.is_empty() || others.len() < 2 || here.iter().any(|addr| observe::listens(addr)) {
        return Ok(());
    }
    let error = Error::unavailable(format!(
        "the coordinator of {} does not lead now: it stands by, or does not run; another one takes commands from here only \
         with a certificate",
        dir.display()
    ));
    let hint = "run this on the machine of the leading coordinator, or with --certificate admin.pem of the directory where \
                the cluster was founded (`weir token create --role admin` there lets you join as another administrator)";
    Err(Failure::new(error, hint))
}

/// The socket on which the mount that contains a path serves this machine's users.
fn socket_of_mount(path: &Path) -> Outcome<Addr> {
    let hint = "name the cluster: --dir DIR (or the variable WEIR_DIR), --coordinator ADDR, or --at PATH with a path in a \
                mounted file system";
    let answer = attribute::ask(path, attribute::SOCKET).map_err(|_| {
        let path = std::path::absolute(path).unwrap_or_else(|_| path.to_owned());
        let error = format!("no cluster is named, and {} is not on a Weir file system", path.display());
        Failure::new(Error::invalid(error), hint)
    })?;
    match answer["socket"].as_str() {
        Some(socket) => Ok(Addr::Unix(socket.into())),
        None => Err(Failure::new(
            Error::unsupported(format!(
                "the mount of {} has no socket for users (node.door)",
                path.display()
            )),
            hint,
        )),
    }
}

/// That of the mount that contains a path, or the working directory; otherwise the machine's own.
fn of_machine(at: Option<&Path>) -> Outcome<Vec<Addr>> {
    let here = socket_of_mount(at.unwrap_or(Path::new(".")));
    let dir = Path::new(MACHINE_DIR);
    match (here, config_of_node(dir)) {
        (Err(_), Some(file)) if at.is_none() => coordinators_of_node(dir, &file),
        (here, _) => Ok(vec![here?]),
    }
}

pub fn coordinators(args: &Status) -> Outcome<Vec<Addr>> {
    let of_node = args.dir.as_deref().filter(|_| args.coordinator.is_empty());
    let of_node = of_node.and_then(|dir| Some((dir, config_of_node(dir)?)));
    let found = match of_node {
        Some((dir, file)) => coordinators_of_node(dir, &file)?,
        None if args.dir.is_none() && args.coordinator.is_empty() => of_machine(args.at.as_deref())?,
        None => args.local()?.map_or_else(|| args.coordinator.clone(), |local| local.coordinators()),
    };
    observe::require_listener(&found)?;
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_standby_coordinator_sends_to_the_leading_one() {
        let dir = tempfile::tempdir().unwrap();
        let socket = dir.path().join("coord.sock");
        let at = |text: &str| text.parse::<Addr>().unwrap();
        let all = [Addr::Unix(socket.clone()), at("tcp:10.0.0.1:7000"), at("tcp:10.0.0.2:7000")];
        let refused = require_lead(dir.path(), &all).unwrap_err();
        assert!(refused.error.context.contains("it stands by"), "{refused}");
        assert!(refused.error.hint.as_deref().unwrap().contains("--certificate admin.pem"), "{refused}");
        assert!(require_lead(dir.path(), &all[..2]).is_ok(), "there is no other one");
        let _listens = std::os::unix::net::UnixListener::bind(&socket).unwrap();
        assert!(require_lead(dir.path(), &all).is_ok(), "it leads");
    }
}
