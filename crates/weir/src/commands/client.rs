//! `weir client`: the clients of the cluster, and the holdings of each.
//!
//! A metadata server knows sessions with their leases and locks; the coordinator knows the nodes' own
//! reports, for instance of bytes that no target has yet. A row joins both.
use clap::Subcommand;
use serde_json::{Value, json};
use std::sync::Arc;
use std::time::Duration;
use weir_admin::cluster_args::Status;
use weir_admin::failure::Outcome;
use weir_admin::which::coordinators;
use weir_admin::{observe, table};
use weir_diagnose::health::is_led;
use weir_proto::condition::NodeCondition;
use weir_proto::map::Role;
use weir_proto::meta::{SessionList, SessionShown};
use weir_proto::{Error, ErrorKind};
use weir_rpc::NoService;

const CLIENT_LIST: &str = "\
OPEN: files that its programs have open, TO WRITE of them for writing. LEASES: files and directories that it caches; others wait for AWAITED \
of them. UNWRITTEN: bytes that programs have written and that no target has yet, as reported up to five seconds ago.";

#[derive(Subcommand)]
pub enum ClientCommand {
    /// Show all clients: where each is, when the metadata server received something from it last, and what it
    /// holds
    #[command(after_help = CLIENT_LIST)]
    List(Status),
}

const PATIENCE: Duration = Duration::from_secs(5);
/// Commands are short-lived: they are not listed as clients.
const COMMANDS: &str = "weir command on ";

pub fn run(command: &ClientCommand) -> Outcome<()> {
    match command {
        ClientCommand::List(at) => list(at),
    }
}

/// One client, by a namespace's record.
struct Row {
    namespace: String,
    session: SessionShown,
    /// Its node's own report, if it sends any.
    report: Option<NodeCondition>,
}

fn list(at: &Status) -> Outcome<()> {
    let rows = observe::block_on(ask(at))?;
    if at.json {
        table::json(&Value::Array(rows.iter().map(Row::as_json).collect()));
        return Ok(());
    }
    if rows.is_empty() {
        println!("no clients");
        return Ok(());
    }
    let header = [
        "CLIENT",
        "ROLE",
        "HOST",
        "RELEASE",
        "LAST HEARD",
        "OPEN",
        "TO WRITE",
        "LEASES",
        "AWAITED",
        "LOCKS",
        "UNWRITTEN",
    ];
    print!("{}", table::render(&header, &rows.iter().map(Row::cells).collect::<Vec<_>>()));
    Ok(())
}

async fn ask(at: &Status) -> Outcome<Vec<Row>> {
    let env = weir_env::real::env();
    let cluster = observe::observe(&env, &coordinators(at)?, "weir client").await?;
    let mut reports = match cluster.conditions().await {
        Ok(all) => all.nodes,
        Err(e) if e.kind == ErrorKind::Unavailable => return Err(e.into()),
        Err(_) => Vec::new(), // an older coordinator has none
    };
    let (map, mut rows) = (cluster.map(), Vec::new());
    for namespace in map.namespaces.iter().filter(|n| is_led(&map, n)) {
        let leader = cluster.meta_leader(&namespace.name, Arc::new(NoService))?;
        let doing = |e: Error| e.doing(format_args!("list the clients of namespace {}", namespace.name));
        let (all, _) = leader.call(&SessionList {}, Vec::new(), PATIENCE).await.map_err(doing)?;
        for session in all.sessions.into_iter().filter(|s| !s.client.starts_with(COMMANDS)) {
            let its = reports
                .iter()
                .position(|n| !n.condition.client.is_empty() && n.condition.client == session.client);
            let report = its.map(|at| reports.swap_remove(at));
            rows.push(Row { namespace: namespace.name.clone(), session, report });
        }
    }
    rows.sort_by(|a, b| a.session.client.cmp(&b.session.client));
    Ok(rows)
}

impl Row {
    /// Without the host, if that is known.
    fn name(&self) -> &str {
        let full = self.session.client.as_str();
        let host = self.host().and_then(|host| full.strip_suffix(host)?.strip_suffix(" on "));
        host.unwrap_or(full)
    }
    fn role(&self) -> &'static str {
        match self.session.role.or(self.report.as_ref().map(|n| n.role)) {
            Some(Role::Mount) => "mount",
            Some(Role::Mover) => "mover",
            Some(_) => "command",
            None => "?",
        }
    }
    fn host(&self) -> Option<&str> {
        self.report.as_ref().map(|n| n.condition.host.as_str()).filter(|host| !host.is_empty())
    }
    fn release(&self) -> Option<&str> {
        self.report.as_ref().map(|n| n.condition.release.as_str()).filter(|release| !release.is_empty())
    }
    fn unwritten(&self) -> Option<u64> {
        self.report.as_ref().map(|n| n.condition.unwritten_bytes)
    }

    fn cells(&self) -> Vec<String> {
        let s = &self.session;
        // A host's identity for programs is longer than its usual name.
        let host = self.host().map(|host| host.split('-').next().unwrap_or(host));
        let away = if s.role.is_some() { "" } else { ", not connected" };
        vec![
            self.name().into(),
            self.role().into(),
            host.unwrap_or(if s.addr.is_empty() { "?" } else { &s.addr }).into(),
            self.release().unwrap_or("?").into(),
            format!("{:.1} s ago{away}", s.last_contact_ms as f64 / 1e3),
            s.open.to_string(),
            s.open_to_write.to_string(),
            s.leases.to_string(),
            s.awaited.to_string(),
            match s.lock_waits {
                0 => s.locks.to_string(),
                waits => format!("{} and waits for {waits}", s.locks),
            },
            self.unwritten().map_or("?".into(), table::bytes),
        ]
    }

    fn as_json(&self) -> Value {
        let s = &self.session;
        json!({
            "client": self.name(), "namespace": self.namespace, "session": s.session.0, "role": self.role(),
            "host": self.host(), "address": s.addr, "release": self.release(), "connected": s.role.is_some(),
            "last_contact_ms": s.last_contact_ms, "open_files": s.open, "open_to_write": s.open_to_write,
            "leases": s.leases, "write_leases": s.write_leases, "awaited_by_others": s.awaited, "locks": s.locks,
            "lock_waits": s.lock_waits, "unwritten_bytes": self.unwritten(),
        })
    }
}
