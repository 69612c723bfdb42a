//! Attributes that a mount answers itself (`weir.*`): the state, layout and locks of a file, and the
//! mount's own.
use crate::commands::file::tiering;
use crate::commands::volume::restore;
use serde_json::{Value, json};
use std::path::PathBuf;
use std::sync::Arc;
use weir_admin::attribute;
use weir_client::Client;
use weir_coord::Cluster;
use weir_proto::lock::{LOCK_END, LockKind, LockSpace};
use weir_proto::meta::Attr;
use weir_proto::{Error, InodeId};

/// The number of locks that fit an attribute's value.
const LOCKS_SHOWN_MAX: usize = 150;
/// More stripes than fit an attribute's value are not listed.
const STRIPES_LISTED_MAX: u64 = 200;

/// Answers `weir.…` attributes: JSON about a file, from the client's attributes and the cluster map.
pub(super) fn own_attributes(cluster: Cluster, socket: Option<PathBuf>) -> weir_fuse::OwnAttributes {
    Arc::new(move |client: &Client, ino: InodeId, name: &str| {
        let (client, cluster, name) = (client.clone(), cluster.clone(), name.to_string());
        let socket = socket.clone();
        Box::pin(async move {
            let value = match name.as_str() {
                attribute::STAT => stat_json(&client, ino).await?,
                attribute::LAYOUT => layout_json(&cluster, &client.getattr(ino).await?.attr),
                attribute::CLIENT => client_json(&client, &cluster),
                attribute::SOCKET => json!({ "socket": socket }),
                attribute::LOCKS => locks_json(&client, ino).await?,
                attribute::STATE => tiering::state_json(&client, ino).await?,
                attribute::SNAPSHOT => restore::snapshot_json(&client, ino).await?,
                _ => {
                    return Err(Error::name(
                        weir_proto::NameRule::NoAttribute,
                        format!("no attribute {name:?}"),
                    ));
                }
            };
            Ok(value.to_string())
        })
    })
}

/// Evicts, recalls or pins a file when a program sets the attribute for it.
pub(super) fn own_acts() -> weir_fuse::OwnActs {
    Arc::new(|client, cred, ino, name, value| {
        let client = client.clone();
        Box::pin(async move { tiering::act(&client, &cred, ino, &name, &value).await })
    })
}

async fn stat_json(client: &Client, ino: InodeId) -> weir_proto::Result<Value> {
    let attr = client.getattr(ino).await?.attr;
    let mut value = json!({
        "inode": attr.ino.0, "kind": format!("{:?}", attr.kind).to_lowercase(), "mode": format!("{:04o}", attr.mode),
        "uid": attr.uid, "gid": attr.gid, "links": attr.nlink, "size": attr.size, "allocated": attr.allocated,
        "data_version": attr.data_version, "mtime_ns": attr.mtime.nanos, "ctime_ns": attr.ctime.nanos,
        "birth_ns": attr.btime.nanos,
    });
    if attr.kind == weir_proto::meta::FileKind::Directory {
        let usage = client.usage(ino).await?;
        value["recursive"] = json!({
            "bytes": usage.bytes, "evicted": usage.evicted, "files": usage.files, "directories": usage.directories,
        });
    }
    Ok(value)
}

fn layout_json(cluster: &Cluster, attr: &Attr) -> Value {
    let Some(layout) = attr.layout else {
        return json!({ "inode": attr.ino.0, "size": attr.size, "data": "none on targets" });
    };
    let map = cluster.map();
    let count = layout.stripe_count(attr.size);
    let stripes: Vec<Value> = (0..count.min(STRIPES_LISTED_MAX))
        .map(|stripe| {
            let group = layout.pg_of_stripe(stripe);
            let members: Vec<String> = map.group(group).map_or(Vec::new(), |g| {
                g.members
                    .iter()
                    .map(|m| match m.state {
                        weir_proto::map::MemberState::Current => m.target.to_string(),
                        weir_proto::map::MemberState::Down => format!("{}(down)", m.target),
                        weir_proto::map::MemberState::Behind => format!("{}(behind)", m.target),
                    })
                    .collect()
            });
            let (data, parity) = members.split_at(usize::from(layout.scheme.data).min(members.len()));
            json!({ "stripe": stripe, "group": group.to_string(), "data": data, "parity": parity })
        })
        .collect();
    let is_small = attr.size <= weir_proto::meta::INLINE_MAX as u64;
    json!({
        "data": is_small.then_some("in the inode, unless the file was larger or had several writers"),
        "inode": attr.ino.0, "size": attr.size, "scheme": layout.scheme.to_string(),
        "cell_bytes": layout.cell_bytes(), "stripe_bytes": layout.stripe_bytes(),
        "stripe_count": count, "groups": layout.pg_count, "first_group": layout.first_pg.to_string(),
        "seed": layout.seed, "stripes": stripes,
    })
}

async fn locks_json(client: &Client, ino: InodeId) -> weir_proto::Result<Value> {
    let (entries, more) = client.list_locks(ino).await?;
    let beyond = entries.len().saturating_sub(LOCKS_SHOWN_MAX) as u64 + u64::from(more);
    let shown: Vec<Value> = entries
        .iter()
        .take(LOCKS_SHOWN_MAX)
        .map(|e| {
            let to_the_end = e.range.end == LOCK_END;
            let end = if to_the_end { "end".to_string() } else { e.range.end.to_string() };
            json!({
                "state": if e.waits { "waits" } else { "holds" },
                "lock": match e.owner.space { LockSpace::Fcntl => "fcntl", LockSpace::Flock => "flock" },
                "kind": match e.kind { LockKind::Shared => "shared", LockKind::Exclusive => "exclusive" },
                "range": format!("{}-{end}", e.range.start),
                "start": e.range.start, "end": (!to_the_end).then_some(e.range.end),
                "client": e.client, "pid": e.pid, "age_ms": e.age_ms,
                "age": format!("{:.1} s", e.age_ms as f64 / 1000.0),
            })
        })
        .collect();
    Ok(json!({ "inode": ino.0, "locks": shown, "more": beyond }))
}

fn client_json(client: &Client, cluster: &Cluster) -> Value {
    let s = client.status();
    let (losses, last) = client.losses();
    let last: Vec<Value> =
        last.iter().map(|l| json!({ "inode": l.ino.0, "at_ns": l.at.nanos, "what": l.what })).collect();
    let now = client.now();
    let waits: Vec<Value> = client
        .waits()
        .iter()
        .map(|w| json!({ "for": w.what, "ms": now.since(w.since).as_millis() as u64, "calls": w.calls }))
        .collect();
    json!({
        "cluster": cluster.id().to_string(), "losses": losses, "last_losses": last, "waits": waits,
        "unsaved_bytes": client.unsaved_bytes(),
        "written_bytes": s.written_bytes, "read_bytes": s.read_bytes,
        "wire_sent_bytes": s.wire_sent_bytes, "wire_received_bytes": s.wire_received_bytes,
        "degraded_reads": s.degraded_reads, "degraded_writes": s.degraded_writes, "crc_failures": s.crc_failures,
        "memory_used_bytes": s.memory_used_bytes, "memory_peak_bytes": s.memory_peak_bytes, "revokes": s.revokes,
        "requests": weir_fuse::request_counts(), "asked": s.asked,
    })
}
