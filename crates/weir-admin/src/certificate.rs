//! This process's certificate: read from its file, presented on network connections, renewed in time and when
//! the cluster's authority is replaced.
use crate::config::Node;
use crate::failure::{Doing, Failure, Outcome};
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use weir_coord::{Cluster, Observer};
use weir_env::{BoxFuture, Env};
use weir_proto::enrol::{CertificateKept, IssueCertificate, RenewCertificate};
use weir_proto::map::Role;
use weir_proto::{Error, ErrorKind, Result};
use weir_rpc::{Policy, Trust};
use weir_trust::certificate::{Certificate, Credentials, NewKey, Pin};
use weir_trust::handshake::{Now, Tls};

/// The interval of checks whether the certificate has to be renewed.
const CHECK_EVERY: Duration = Duration::from_secs(3600);
/// The pause after a failed renewal.
const TRY_AGAIN: Duration = Duration::from_secs(60);
/// The file's name in a node's directory.
pub const CERTIFICATE: &str = "node.pem";
pub const ADMIN_CERTIFICATE: &str = "admin.pem";
const PATIENCE: Duration = Duration::from_secs(30);

/// A certificate in use.
#[derive(Clone)]
pub struct Own {
    file: PathBuf,
    tls: Arc<Tls>,
    /// The roles that its certificate is for.
    roles: Vec<Role>,
    pub trust: Arc<Trust>,
}

/// Seconds since 1970.
pub fn now() -> Now {
    let clock = weir_env::real::env().clock;
    Arc::new(move || u64::try_from(clock.wall().0 / 1_000_000_000).unwrap_or(0))
}

/// The settings of `weir.toml` for network connections.
pub fn policy(node: &Node) -> Policy {
    let trusted = node.trusted_networks.iter().map(|network| network.0).collect();
    Policy { trusted, only_aes: node.only_aes }
}

/// Reads the file; it is refused if others can read it, as it holds the private key.
pub fn load(file: &Path, policy: Policy) -> Outcome<Own> {
    let credentials =
        read(file).map_err(|f| f.doing(format_args!("read the certificate {}", file.display())))?;
    let now = now();
    let certificate = credentials
        .own(now())
        .map_err(|e| e.doing(format_args!("read the certificate {}", file.display())))?;
    let tls = Arc::new(Tls::of_node(credentials, now));
    let trust = Arc::new(Trust::new(tls.clone(), policy));
    Ok(Own { file: file.to_owned(), tls, roles: certificate.roles, trust })
}

fn read(file: &Path) -> Outcome<Credentials> {
    let mut opened = std::fs::File::open(file).doing("open it")?;
    let metadata = opened.metadata().doing("stat it")?;
    if metadata.mode() & 0o077 != 0 {
        let error = Error::denied(format!(
            "it has mode {:04o}: others can read the private key",
            metadata.mode() & 0o7777
        ));
        return Err(Failure::new(
            error,
            format!("`chmod 600 {}`, and join again if another user has read it", file.display()),
        ));
    }
    let mut text = String::new();
    opened.read_to_string(&mut text).doing("read it")?;
    Ok(Credentials::from_pem(&text)?)
}

/// Writes it whole or not at all. Files of nodes are created so that no other user can read them.
pub fn write(file: &Path, credentials: &Credentials) -> Result<()> {
    let written = weir_env::real::env().disk.write_atomic(file, credentials.to_pem().as_bytes());
    written.map_err(|e| Error::from_io(format_args!("write {}", file.display()), &e))
}

impl Own {
    /// Whether it has to be renewed: a third of its life is left, or the cluster has other authorities, as
    /// far as they are known here, or another one that signs.
    fn is_due(&self, authorities: &[Pin]) -> bool {
        let Some(credentials) = self.tls.credentials() else { return false };
        let keeps = |certificate: &Certificate| match authorities {
            [] => true,
            [signs, ..] => {
                let kept = credentials.authorities.iter().map(|authority| Pin::of(authority));
                certificate.by == *signs && kept.eq(authorities.iter().copied())
            }
        };
        let now = now()();
        !credentials.own(now).is_ok_and(|certificate| now < certificate.renew_at() && keeps(&certificate))
    }
}

/// Renews it when that is due, and retries after a while if that fails.
pub fn keep(env: Env, own: Own, who: Observer) -> BoxFuture<'static, ()> {
    Box::pin(async move {
        let mut authorities = own.trust.authorities();
        loop {
            let known = authorities.borrow().clone();
            let mut wait = CHECK_EVERY;
            if own.is_due(&known) {
                match renew(&env, &own, who.clone()).await {
                    Ok(()) => tracing::info!("the certificate {} is renewed", own.file.display()),
                    Err(e) => {
                        wait = TRY_AGAIN;
                        tracing::error!(
                            "the certificate {} was not renewed: {e}; it is tried again in {wait:?}",
                            own.file.display()
                        );
                    }
                }
            }
            let changed = authorities.wait_for(|authorities| *authorities != known);
            if let Ok(Err(_)) = env.clock.timeout(wait, changed).await {
                return; // the process ends
            }
        }
    })
}

async fn renew(env: &Env, own: &Own, who: Observer) -> Result<()> {
    renew_at(&Cluster::observe(env, who, PATIENCE).await?, own).await
}

async fn renew_at(cluster: &Cluster, own: &Own) -> Result<()> {
    let (key, credentials) = (NewKey::make()?, own.tls.credentials());
    let public_key = key.public().to_vec();
    let asked = cluster.administer(&RenewCertificate { public_key: public_key.clone() }).await;
    let asked = match (asked, credentials.map(|credentials| credentials.own(now()()))) {
        // On a Unix socket no certificate is presented, and administrators are identified without one.
        (Err(e), Some(Ok(Certificate { name, roles, .. }))) if e.kind == ErrorKind::Invalid => {
            cluster.administer(&IssueCertificate { name, roles, public_key }).await?
        }
        (asked, _) => asked?,
    };
    let credentials = key.with(asked.certificate, asked.authorities)?;
    write(&own.file, &credentials)?;
    own.tls.renew(credentials);
    cluster.administer(&CertificateKept { name: asked.name, round: asked.round }).await
}

/// That of the commands of this process: `--certificate`, or the one in the directory that `--dir` names.
static OF_COMMANDS: OnceLock<Option<Own>> = OnceLock::new();

/// Names the file once, before anything connects. The first one counts: the command line is read before
/// directories are.
pub fn use_file(file: &Path) -> Outcome<()> {
    if OF_COMMANDS.get().is_none() {
        let own = load(file, Policy::default())?;
        let _ = OF_COMMANDS.set(Some(own)); // one thread reads the command line
    }
    Ok(())
}

/// The role of commands: an administrator's, unless their certificate is for another one.
pub fn role_of_commands() -> Role {
    let roles =
        OF_COMMANDS.get().and_then(|own| own.as_ref()).map(|own| own.roles.clone()).unwrap_or_default();
    let people = [Role::Console, Role::Operator, Role::Auditor].into_iter().find(|role| roles.contains(role));
    people.or(roles.first().copied()).unwrap_or(Role::Console)
}

/// No process renews a person's certificate: the commands that present it do.
pub(crate) async fn renew_that_of_commands(cluster: &Cluster) {
    let Some(own) = OF_COMMANDS.get().and_then(|own| own.as_ref()) else { return };
    let authorities: Vec<Pin> = cluster.map().authorities.iter().copied().map(Pin).collect();
    if own.is_due(&authorities)
        && let Err(e) = renew_at(cluster, own).await
    {
        tracing::debug!("{} was not renewed: {e}", own.file.display()); // none is presented on a Unix socket
    }
}

/// How commands authenticate over networks.
pub fn of_commands() -> Option<Arc<Trust>> {
    OF_COMMANDS.get()?.as_ref().map(|own| own.trust.clone())
}

/// The sender of questions to a cluster: a command with its user's certificate, or the coordinator with its
/// own.
#[derive(Clone)]
pub struct Caller {
    pub role: Role,
    pub trust: Option<Arc<Trust>>,
}

impl Caller {
    pub fn of_commands() -> Caller {
        Caller { role: role_of_commands(), trust: of_commands() }
    }
}

/// A refusal because of a missing certificate, with a remedy for the command's caller.
pub fn explain(e: Error) -> Failure {
    match e.kind {
        ErrorKind::Denied if of_commands().is_none() => {
            // The node's hint is for servers: to join.
            e.hint(
                "commands on other machines need a certificate: `--certificate FILE`, or the directory of \
                 a node (`--dir`)",
            )
            .into()
        }
        _ => e.into(),
    }
}
