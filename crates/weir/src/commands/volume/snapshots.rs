//! `weir volume snapshot` and `snapshots`: takes and lists snapshots of a volume.
use clap::Args;
use serde_json::{Value, json};
use weir_admin::failure::{Failure, Outcome};
use weir_admin::namespace_client::{Cluster, explain, named, own_cred};
use weir_admin::table;
use weir_client::Client;
use weir_diagnose::quantity::when;
use weir_proto::ErrorKind;
use weir_proto::snapshot::Snapshot;

#[derive(Args)]
pub struct Take {
    /// The volume
    pub volume: String,
    /// The snapshot's name
    pub name: String,
    /// Delete it; space that only it uses is freed in the background
    #[arg(long)]
    pub delete: bool,
    #[command(flatten)]
    pub at: Cluster,
}

#[derive(Args)]
pub struct List {
    /// The volume
    pub volume: String,
    #[command(flatten)]
    pub at: Cluster,
}

pub async fn take(client: &Client, args: &Take) -> Outcome<Snapshot> {
    let (cred, volume) = (own_cred(), named(client, &args.volume).await?);
    let done = match args.delete {
        true => client.delete_snapshot(&cred, volume.id, &args.name).await,
        false => client.take_snapshot(&cred, volume.id, &args.name).await,
    };
    done.map_err(|e| match e.kind {
        ErrorKind::NotFound => Failure::new(e, format!("`weir volume snapshots {}` shows all", args.volume)),
        ErrorKind::Exists => Failure::new(
            e,
            format!(
                "choose another name; `weir volume snapshots {}` shows those that are taken",
                args.volume
            ),
        ),
        ErrorKind::Deadline => {
            Failure::new(e, "a client is still saving, or hangs: `weir status` shows it; try again")
        }
        ErrorKind::Denied => {
            Failure::new(e, "only a volume's owner and administrators take and delete its snapshots")
        }
        _ => explain(e),
    })
}

pub async fn list(client: &Client, args: &List) -> Outcome<Vec<Snapshot>> {
    let volume = named(client, &args.volume).await?;
    Ok(client.snapshots(volume.id).await?)
}

pub fn as_json(s: &Snapshot) -> Value {
    json!({
        "name": s.name, "number": s.number, "volume": s.volume.0, "created_ns": s.created.nanos,
        "scheduled": s.scheduled,
    })
}
pub fn as_table(all: &[Snapshot]) -> String {
    let by = |s: &Snapshot| if s.scheduled { "schedule" } else { "command" }.to_owned();
    let rows: Vec<Vec<String>> = all.iter().map(|s| vec![s.name.clone(), when(s.created), by(s)]).collect();
    table::render(&["SNAPSHOT", "TAKEN", "BY"], &rows)
}
