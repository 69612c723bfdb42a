//! `weir relation verify`: reads a home and compares it with what was shipped there.
//!
//! Files that are found wrong are in conflict, so that no part of them is evicted before a user has decided.
use super::rules::rules_of;
use clap::Args;
use serde_json::json;
use weir_admin::failure::{Failure, Outcome};
use weir_admin::homes::Homes;
use weir_admin::namespace_client::{Cluster, connect, find_relation, named, own_cred};
use weir_admin::progress::Progress;
use weir_admin::which::coordinators;
use weir_admin::{observe, table};
use weir_client::Client;
use weir_home::mover::{HomeOf, HomeUse};
use weir_home::{KeySource, Verified, Verify};
use weir_proto::patterns::Patterns;
use weir_proto::relation::Direction;
use weir_proto::relation::RelationInfo;
use weir_proto::{Error, ErrorKind};

/// Wrong entries that are printed for people; `--json` has all recorded ones.
const SHOWN_MAX: usize = 100;

#[derive(Args)]
pub struct Options {
    /// The relation as `weir relation list` shows it, like r1
    pub relation: String,
    /// Compare names, kinds, owners, modes, sizes and times of files; read no data
    #[arg(long)]
    pub names_only: bool,
    /// Only report differences; mark no conflicts
    #[arg(long)]
    pub dry_run: bool,
    #[command(flatten)]
    pub at: Cluster,
}

pub fn run(options: &Options, keys: Option<KeySource>) -> Outcome<()> {
    let found: Vec<weir_env::Addr> = coordinators(&options.at.cluster)?;
    observe::block_on(async {
        let env = weir_env::real::env();
        let cluster = observe::observe(&env, &found, "weir").await?;
        let client = connect(found, &options.at.namespace).await?;
        let homes = Homes::new(env, cluster.id(), keys, cluster.map().homes.clone());
        let done = verify(&client, &homes, options).await;
        homes.close().await;
        client.shutdown().await?;
        done
    })
}

async fn verify(client: &Client, homes: &Homes, options: &Options) -> Outcome<()> {
    let relation = find_relation(client, &options.relation).await?;
    let volume = named(client, &relation.volume_name).await?;
    let ids = client.where_at_home(volume.root, Some(relation.id)).await?.ids;
    let only_reads = relation.direction == Direction::Mirror;
    let which = HomeOf {
        holds: HomeUse::Relation(relation.id),
        url: relation.url.clone(),
        ids,
        by: own_cred().uid, // the caller's own choice: nothing is changed there
        is_new: false,
        only_reads,
    };
    let home = weir_home::mover::OpenHome::open(homes, &which).await.map_err(|fault| {
        let error = Error::from(fault).doing(format_args!("open the home {}", relation.url));
        Failure::new(error, "run this on a node that reaches it, as a mover does")
    })?;
    let (env, client) = (weir_env::real::env(), client.clone());
    let rules = rules_of(&client, relation.id).await?;
    let work = Verify {
        env,
        client: client.clone(),
        home,
        relation: relation.id,
        patterns: Patterns::of(&rules),
        root: volume.root,
        data: !options.names_only,
    };
    let progress = Progress::default();
    let verified = work.run(|so_far| progress.show(line(so_far))).await;
    drop(progress);
    let verified = verified?;
    let conflicts = if options.dry_run { 0 } else { conflicts(&client, &relation, &verified).await? };
    show(&relation, &verified, conflicts, options.at.cluster.json);
    let wrong = verified.wrong.len() as u64 + verified.more_wrong;
    if wrong == 0 {
        return Ok(());
    }
    let error = Error::damaged(format!("{wrong} items at {} do not match the volume", relation.url));
    Err(Failure::new(
        error,
        format!(
            "`weir relation show {0}` lists the conflicts; `weir relation resolve {0} INODE --keep volume` writes a file there \
             again",
            relation.id
        ),
    ))
}

/// The number of files in conflict.
async fn conflicts(client: &Client, relation: &RelationInfo, verified: &Verified) -> Outcome<u64> {
    let mut count = 0;
    for wrong in verified.wrong.iter().filter(|wrong| wrong.is_file) {
        let Some(ino) = wrong.ino else { continue };
        match client.suspect(&own_cred(), relation.id, ino, &wrong.why).await {
            Ok(()) => count += 1,
            Err(e) if e.kind == ErrorKind::NotFound => {} // home never had it: no part of it can be evicted
            Err(e) => return Err(e.doing(format_args!("mark {} as a conflict", wrong.path)).into()),
        }
    }
    Ok(count)
}

fn line(so_far: &Verified) -> String {
    let wrong = so_far.wrong.len() as u64 + so_far.more_wrong;
    let (things, bytes) = (so_far.files + so_far.directories + so_far.others, table::bytes(so_far.bytes));
    format!("{things} compared, {bytes} read, {wrong} wrong")
}

fn show(relation: &RelationInfo, verified: &Verified, conflicts: u64, as_json: bool) {
    let Verified {
        files,
        directories,
        others,
        bytes,
        unproved_bytes,
        under_way,
        excluded,
        wrong,
        more_wrong,
    } = verified;
    if as_json {
        let wrong: Vec<_> = wrong
            .iter()
            .map(|w| {
                let inode = w.ino.map(|ino| ino.to_string());
                json!({ "path": String::from_utf8_lossy(&w.path.to_slashed()), "inode": inode, "why": w.why })
            })
            .collect();
        println!(
            "{:#}",
            json!({
                "relation": relation.id.to_string(), "volume": relation.volume_name, "url": relation.url, "files": files,
                "directories": directories, "others": others, "bytes": bytes, "unproved_bytes": unproved_bytes,
                "under_way": under_way, "excluded": excluded, "wrong": wrong, "more_wrong": more_wrong, "conflicts": conflicts,
            })
        );
        return;
    }
    println!("{}: {} at {}", relation.id, relation.volume_name, relation.url);
    println!(
        "  matching        {}, {}, {}",
        table::count(*files, ["file", "files"]),
        table::count(*directories, ["directory", "directories"]),
        table::count(*others, ["other", "others"])
    );
    println!("  bytes read      {}", table::bytes(*bytes));
    if *unproved_bytes > 0 {
        println!(
            "  no checksum     {} (older than the volume, never read since)",
            table::bytes(*unproved_bytes)
        );
    }
    if *excluded > 0 {
        println!("  excluded        {excluded}: by the relation's patterns");
    }
    if *under_way > 0 {
        println!("  not compared    {under_way}: changes are in flight");
    }
    for w in wrong.iter().take(SHOWN_MAX) {
        match w.ino {
            Some(ino) => println!("  wrong           {ino}: {}", w.why),
            None => println!("  wrong           {}", w.why),
        }
    }
    let more = wrong.len().saturating_sub(SHOWN_MAX) as u64 + more_wrong;
    if more > 0 {
        println!("  wrong           {more} more (--json names {})", wrong.len());
    }
    if conflicts > 0 {
        println!(
            "  conflicts       {}: not evicted before they are resolved",
            table::count(conflicts, ["file", "files"])
        );
    }
}
