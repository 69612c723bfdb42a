//! `weir join`, `weir token` and `weir node`: machines become nodes of a cluster, and leave it.
//!
//! A node's directory: `ROLE.toml` for each of its roles, `node.pem` with its certificate, and the roles' own
//! data.
use super::args::{self, NodeCommand, TokenCommand};
use crate::unit;
use serde_json::{Value, json};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use weir_admin::certificate::{self, CERTIFICATE};
use weir_admin::cluster_args::Status;
use weir_admin::config::{self, Config, Text};
use weir_admin::failure::{Doing, Failure, Outcome};
use weir_admin::local::local_cluster;
use weir_admin::which::coordinators;
use weir_admin::{observe, table};
use weir_coord::{Cluster, Observer};
use weir_env::{Addr, Env};
use weir_proto::Error;
use weir_proto::checksum::crc32c;
use weir_proto::date::Date;
use weir_proto::enrol::{
    Enrol, Enrolled, GetEnrolment, Holder, NodeRemove, TokenCreate, TokenMade, TokenRevoke, TokenShown,
};
use weir_proto::map::Role;
use weir_proto::meta::Time;
use weir_proto::network::Network;
use weir_rpc::{Identity, NoService, Policy, Trust, connect};
use weir_trust::certificate::{NAME_BYTES_MAX, NewKey, check_name, role_of, role_word};
use weir_trust::handshake::Tls;
use weir_trust::token::{Secret, Token};

pub(super) const PATIENCE: Duration = Duration::from_secs(10);
/// Where mounts listen for this machine's users.
const SOCKETS: &str = "/run/weir";

/// `weir join`.
pub fn join(args: &args::Join) -> Outcome<()> {
    let token: Token = args.token.parse().map_err(|e: String| Failure::from(Error::invalid(e)))?;
    let dir = new_dir(&args.dir)?;
    let name = name_of_machine(args.name.as_deref(), "")?;
    let env = weir_env::real::env();
    let key = NewKey::make()?;
    let enrolled = observe::block_on(enrol(&env, &token, &name, key.public()))?;
    certificate::write(
        &dir.join(CERTIFICATE),
        &key.with(enrolled.certificate.clone(), enrolled.authorities.clone())?,
    )?;
    let (mut starts, mut units) = (Vec::new(), Vec::new());
    let is_further_copy = enrolled.roles.contains(&Role::Meta) && is_founded(&env, &dir, &enrolled, args);
    for role in &enrolled.roles {
        let config = config_of(args, &dir, &enrolled, *role)?;
        let file = dir.join(format!("{}.toml", role_word(*role)));
        write_config(&env, &file, &config)?;
        if is_person(*role) {
            continue;
        }
        units.push(unit::write(&env, &file, &name, role_word(*role))?);
        let founds = if *role == Role::Meta && !is_further_copy { " --new" } else { "" };
        starts.push(format!("weir {} --config {}{founds}", role_word(*role), file.display()));
    }
    if args.json {
        let roles: Vec<&str> = enrolled.roles.iter().map(|role| role_word(*role)).collect();
        let cluster = enrolled.cluster.to_string();
        table::json(&json!({
            "cluster": cluster, "node": name, "roles": roles, "dir": dir, "start": starts, "units": units,
        }));
        return Ok(());
    }
    println!("{name} is a node of cluster {} now; its directory is {}", enrolled.cluster, dir.display());
    if enrolled.roles.iter().all(|role| is_person(*role)) {
        println!("commands show who you are by --dir {0}, or --certificate {0}/{CERTIFICATE}", dir.display());
    }
    starts.iter().for_each(|start| println!("start it:  {start}"));
    units.iter().for_each(|unit| println!("or let systemd run it:  {}", unit::enable(unit)));
    if is_further_copy {
        println!(
            "its namespace exists: `weir namespace copies NAMESPACE COUNT` makes this node keep a copy of it"
        );
    }
    Ok(())
}

/// Whether the namespace of a new metadata node has been founded: this node then becomes a further copy, and
/// must not found it. No, if the coordinator does not answer: `weir meta --new` refuses what exists.
fn is_founded(env: &Env, dir: &Path, enrolled: &Enrolled, args: &args::Join) -> bool {
    let founded = || -> Outcome<bool> {
        let config = config_of(args, dir, enrolled, Role::Meta)?;
        let own = certificate::load(&config.node.certificate, Policy::default())?;
        let namespace = config.meta.namespace.clone();
        let who = Observer {
            coordinators: config.cluster.coordinators.into_iter().map(|addr| addr.0).collect(),
            cluster: Some(enrolled.cluster),
            name: config.node.name,
            role: Role::Meta,
            host: observe::host_id(),
            trust: Some(own.trust),
        };
        observe::block_on(async {
            let cluster = Cluster::observe(env, who, PATIENCE).await?;
            Ok(cluster.map().namespace_named(&namespace).is_some())
        })
    };
    founded().unwrap_or(false)
}

/// Presents the token at the first address that answers.
async fn enrol(env: &Env, token: &Token, name: &str, public_key: &[u8]) -> Outcome<Enrolled> {
    let tls = Tls::joining(token.pin, certificate::now());
    let trust = Arc::new(Trust::new(Arc::new(tls), Policy::default()));
    let who = Identity::new(env, name, Role::Console, None).trusting(Some(trust));
    let request = Enrol { secret: token.secret.0, name: name.to_owned(), public_key: public_key.to_vec() };
    let mut failed = Vec::new();
    for addr in &token.addrs {
        for addr in resolve(addr)? {
            match connect(env, &addr, &who, Arc::new(NoService)).await {
                // Another node of the cluster would learn the secret.
                Ok(connection) if connection.proved().role() != Some(Role::Coordinator) => {
                    failed.push(format!("{addr} is not the coordinator's address"));
                }
                Ok(connection) => return Ok(connection.call(&request, vec![], PATIENCE).await?.0),
                Err(e) => failed.push(e.to_string()),
            }
        }
    }
    Err(Failure::new(
        Error::unavailable(format!("no coordinator answers: {}", failed.join("; "))),
        "check that this machine reaches the address in the token, and that the coordinator runs",
    ))
}

fn resolve(addr: &str) -> Outcome<Vec<Addr>> {
    use std::net::ToSocketAddrs;
    let found = addr.to_socket_addrs().doing(format_args!("look up the address {addr} in the token"))?;
    Ok(found.map(|at: SocketAddr| Addr::Tcp(at)).collect())
}

fn config_of(args: &args::Join, dir: &Path, enrolled: &Enrolled, role: Role) -> Outcome<Config> {
    let mut config = Config::default();
    config.cluster.id = Some(Text(enrolled.cluster));
    let parsed = enrolled.coordinators.iter().map(|addr| addr.parse().map(Text));
    config.cluster.coordinators = parsed.collect::<Result<_, String>>().map_err(Error::invalid)?;
    config.node.name = match enrolled.roles.len() {
        1 => enrolled.name.clone(),
        _ => format!("{}.{}", enrolled.name, role_word(role)),
    };
    config.node.certificate = dir.join(CERTIFICATE);
    config.node.rack = args.rack.clone().unwrap_or_default();
    if matches!(role, Role::Meta | Role::Storage) {
        config.node.listen = args.listen.iter().cloned().map(Text).collect();
    }
    match role {
        Role::Meta => config.meta.dir = dir.join("meta"),
        Role::Storage if args.target.is_empty() => config.storage.targets = vec![dir.join("target")],
        Role::Storage => {
            config.storage.targets =
                args.target.iter().map(|dir| local_cluster::absolute(dir)).collect::<Outcome<_>>()?;
        }
        Role::Mount => {
            let path = args.mount.clone().unwrap_or_else(|| PathBuf::from("/weir"));
            config.mount.path = local_cluster::absolute(&path)?;
            let socket = args.socket.clone();
            config.node.door =
                Some(socket.unwrap_or_else(|| Path::new(SOCKETS).join(format!("{}.sock", config.node.name))));
        }
        _ => {}
    }
    Ok(config)
}

pub(super) fn write_config(env: &Env, file: &Path, config: &Config) -> Outcome<()> {
    let text = config::write(config)?;
    env.disk.write_atomic(file, text.as_bytes()).doing(format_args!("write {}", file.display()))
}

/// A new, empty directory that only this user can read.
pub(super) fn new_dir(dir: &Path) -> Outcome<PathBuf> {
    let env = weir_env::real::env();
    let dir = local_cluster::absolute(dir)?;
    let is_used = std::fs::read_dir(&dir).is_ok_and(|mut entries| entries.next().is_some());
    if is_used {
        return Err(Failure::new(
            Error::exists(format!("{} is not empty", dir.display())),
            "name an empty or new directory: a node's certificate and its state are kept there",
        ));
    }
    private_dir(&env, &dir)?;
    Ok(dir)
}

pub(super) fn private_dir(env: &Env, dir: &Path) -> Outcome<()> {
    use std::os::unix::fs::PermissionsExt;
    env.disk.create_dir_durable(dir).doing(format_args!("make {}", dir.display()))?;
    let only_owner = std::fs::Permissions::from_mode(0o700);
    std::fs::set_permissions(dir, only_owner).doing(format_args!("set the mode of {}", dir.display()))
}

pub(super) fn name_of_machine(given: Option<&str>, otherwise: &str) -> Outcome<String> {
    let machine = rustix::system::uname().nodename().to_string_lossy().into_owned();
    let name = match (given, otherwise) {
        (Some(given), _) => given.to_owned(),
        (None, "") => fitting(&machine),
        (None, name) => fitting(name),
    };
    check_name(&name).map_err(|e| Failure::new(e, "choose one with --name"))?;
    Ok(name)
}

/// A name made of that of a machine, which may be as long as a whole name: cut, and distinct from others by
/// its checksum.
fn fitting(name: &str) -> String {
    if name.len() <= NAME_BYTES_MAX {
        return name.to_owned();
    }
    let sum = format!("-{:08x}", crc32c(name.as_bytes()));
    let kept: String = name.chars().filter(char::is_ascii).take(NAME_BYTES_MAX - sum.len()).collect();
    kept + &sum
}

/// `weir token`.
pub fn token(command: &TokenCommand) -> Outcome<()> {
    match command {
        TokenCommand::Create(args) => create_token(args),
        TokenCommand::List(at) => list_tokens(at),
        TokenCommand::Revoke(args) => {
            ask(&args.cluster, &TokenRevoke { id: args.id.clone() })?;
            match args.cluster.json {
                true => table::json(&json!({ "revoked": args.id })),
                false => println!("token {} is revoked", args.id),
            }
            Ok(())
        }
    }
}

fn create_token(args: &args::CreateToken) -> Outcome<()> {
    let roles = args.role.iter().map(|word| {
        role_of(word).filter(|role| *role != Role::Coordinator).ok_or_else(|| {
            let error = Error::invalid(format!("{word:?} is not a role to join in"));
            Failure::new(
                error,
                "roles are storage, meta, mount and mover, and for people admin, operator and auditor",
            )
        })
    });
    let request = TokenCreate {
        roles: roles.collect::<Outcome<_>>()?,
        uses: args.uses,
        ttl_s: weir_admin::times::parse_seconds(&args.ttl).map_err(Error::invalid)?.into(),
        name: args.name.clone(),
        from: args.from.clone(),
    };
    let TokenMade { secret, pin, addrs, until } = ask(&args.cluster, &request)?;
    let addrs: Vec<String> = match args.address.is_empty() {
        true => addrs.iter().filter_map(|addr| addr.strip_prefix("tcp:")).map(str::to_owned).collect(),
        false => args.address.clone(),
    };
    if addrs.is_empty() {
        return Err(Failure::new(
            Error::unavailable("the coordinator listens on no address that other machines reach"),
            "give its address: --address HOST:PORT, or start it with --listen tcp:ADDRESS:PORT",
        ));
    }
    let token = Token { addrs, pin: weir_trust::certificate::Pin(pin), secret: Secret(secret) };
    match args.cluster.json {
        true => table::json(&json!({ "token": token.to_string(), "until": date(until) })),
        false => println!("{token}"),
    }
    Ok(())
}

fn list_tokens(at: &Status) -> Outcome<()> {
    let tokens = ask(at, &GetEnrolment {})?.tokens;
    let from = |token: &TokenShown| token.from.iter().map(Network::to_string).collect::<Vec<_>>();
    if at.json {
        let shown = |token: &TokenShown| {
            json!({
                "id": token.id, "roles": words(&token.roles), "uses_left": token.uses_left,
                "until": date(token.until), "name": token.name, "from": from(token),
            })
        };
        table::json(&Value::from(tokens.iter().map(shown).collect::<Vec<_>>()));
        return Ok(());
    }
    let row = |token: &TokenShown| {
        vec![
            token.id.clone(),
            words(&token.roles).join(","),
            token.uses_left.to_string(),
            date(token.until),
            token.name.clone(),
            from(token).join(","),
        ]
    };
    let rows: Vec<Vec<String>> = tokens.iter().map(row).collect();
    print!("{}", table::render(&["ID", "ROLES", "USES LEFT", "UNTIL", "NAMES", "FROM"], &rows));
    Ok(())
}

/// `weir node`.
pub fn node(command: &NodeCommand) -> Outcome<()> {
    match command {
        NodeCommand::List(at) => list_nodes(at),
        NodeCommand::Remove(args) => {
            ask(&args.cluster, &NodeRemove { name: args.name.clone() })?;
            match args.cluster.json {
                true => table::json(&json!({ "removed": args.name })),
                false => println!("{} is cut off: it needs a new token to join again", args.name),
            }
            Ok(())
        }
    }
}

fn list_nodes(at: &Status) -> Outcome<()> {
    let holders = ask(at, &GetEnrolment {})?.holders;
    if at.json {
        let shown = |holder: &Holder| {
            json!({
                "name": holder.name, "roles": words(&holder.roles), "joined": date(holder.joined),
                "from": holder.from, "until": date(holder.until), "removed": holder.removed,
            })
        };
        table::json(&Value::from(holders.iter().map(shown).collect::<Vec<_>>()));
        return Ok(());
    }
    let row = |holder: &Holder| {
        let until = if holder.removed { "removed".to_owned() } else { date(holder.until) };
        vec![
            holder.name.clone(),
            words(&holder.roles).join(","),
            date(holder.joined),
            holder.from.clone(),
            until,
        ]
    };
    let rows: Vec<Vec<String>> = holders.iter().map(row).collect();
    print!("{}", table::render(&["NAME", "ROLES", "JOINED", "FROM", "CERTIFICATE UNTIL"], &rows));
    Ok(())
}

/// Its certificate is for commands: no process runs in this role.
fn is_person(role: Role) -> bool {
    matches!(role, Role::Console | Role::Operator | Role::Auditor)
}

fn words(roles: &[Role]) -> Vec<&'static str> {
    roles.iter().map(|role| role_word(*role)).collect()
}

fn date(unix_s: u64) -> String {
    Date::of(Time { nanos: i64::try_from(unix_s.saturating_mul(1_000_000_000)).unwrap_or(i64::MAX) })
        .to_string()
}

/// Asks the coordinator.
pub fn ask<R: weir_proto::Request>(at: &Status, request: &R) -> Outcome<R::Reply> {
    let coordinators = coordinators(at)?;
    observe::block_on(async {
        let env = weir_env::real::env();
        let cluster = observe::observe(&env, &coordinators, "weir").await?;
        Ok(cluster.administer(request).await?)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_machines_with_long_names_fit_and_differ() {
        let long = "a".repeat(63);
        let names = [&long, &format!("coord-{long}"), &format!("coord-{long}b")].map(|name| fitting(name));
        assert_eq!(names[0], long, "it fits");
        for name in &names {
            check_name(name).unwrap();
        }
        assert_eq!(names[1].len(), NAME_BYTES_MAX);
        assert_ne!(names[1], names[2]);
    }
}
