//! Restores a namespace from an export: its directory is filled, and is compared with the targets' data
//! before it is served.
//!
//! Invariants: only an empty directory is filled, for a namespace that the coordinator knows and that has no
//! leader; an interrupted filling is not used; no client is served before the comparison has ended. Knows
//! nothing of the entries' meaning: `weir_meta::restore` does.
use crate::site::Site;
use std::io::Read;
use std::path::Path;
use std::time::Duration;
use weir_coord::Cluster;
use weir_coord::identity::{NamespaceIdentity, check_vacant, write_namespace};
use weir_env::Env;
use weir_kv::{EngineConfig, Import, Pairs, is_unfinished};
use weir_meta::export::{Reader, Totals};
use weir_meta::namespace::lost::Holdings;
use weir_meta::record::Record;
use weir_meta::restore::{ImportRecord, changes_after, restored};
use weir_meta::{Meta, keys};
use weir_proto::data::ListCells;
use weir_proto::export::ExportHead;
use weir_proto::map::{ClusterMap, Group, MemberState};
use weir_proto::meta::Time;
use weir_proto::{Epoch, Error, NamespaceId, Result, TargetId};

/// Cells in one reply.
const CELLS_AT_ONCE: u32 = 4096;
const LIST_PATIENCE: Duration = Duration::from_secs(30);
/// Pause between two attempts to reach a target.
const RETRY_PAUSE: Duration = Duration::from_secs(1);
/// Number of attempts between two log messages about waiting.
const LOG_EVERY: u32 = 10;

/// Fills the empty directory of a lost namespace from an export. `progress`: the bytes read so far.
pub async fn import_namespace(
    env: &Env,
    site: &Site,
    dir: &Path,
    engine: EngineConfig,
    export: impl Read + Send + 'static,
    mut progress: impl FnMut(Totals),
) -> Result<(ExportHead, Totals)> {
    let cluster = site.observe(env).await?;
    let (mut reader, head) = env.tasks.blocking(move || Reader::open(export)).await?;
    check_lost(&cluster.map(), &head)?;
    let kv = dir.join("kv");
    check_vacant(&*env.disk, dir)?;
    if env.disk.exists(&kv) && !is_unfinished(env, &kv)? {
        return Err(Error::exists(format!("{} holds a namespace's state", kv.display()))
            .hint("name an empty directory"));
    }
    let now = Time { nanos: env.clock.wall().0 };
    let record =
        ImportRecord { taken: head.taken, imported: now, compared: false, lost_files: 0, lost_bytes: 0 };
    let mut own = Some((keys::import().to_vec(), record.to_value()));
    let mut import = Import::begin_alone(env, &kv, engine, changes_after(head.changes)?).await?;
    loop {
        let (back, part) = env
            .tasks
            .blocking(move || {
                let part = reader.part();
                (reader, part)
            })
            .await;
        reader = back;
        let Some(part) = part? else { break };
        import.put(all_restored(part, &mut own)?).await?;
        progress(reader.totals());
    }
    if let Some(record) = own {
        import.put(vec![record]).await?;
    }
    import.finish_alone().await?;
    let identity = NamespaceIdentity {
        cluster: head.cluster,
        name: head.name.clone(),
        uuid: head.uuid,
        instead_of: None,
    };
    write_namespace(&*env.disk, dir, &identity)?;
    Ok((head, reader.totals()))
}

/// `own`: the record of the import, until it is inserted in its place.
fn all_restored(part: Pairs, own: &mut Option<(Vec<u8>, Vec<u8>)>) -> Result<Pairs> {
    let mut pairs = Pairs::with_capacity(part.len() + 1);
    for (key, value) in part {
        let Some((key, value)) = restored(key, value)? else { continue };
        if own.as_ref().is_some_and(|(own, _)| *own < key) {
            pairs.extend(own.take());
        }
        pairs.push((key, value));
    }
    Ok(pairs)
}

/// Checks that it is a namespace of this cluster without a leader.
fn check_lost(map: &ClusterMap, head: &ExportHead) -> Result<()> {
    let ExportHead { name, uuid, namespace, .. } = head;
    if head.cluster != map.cluster {
        return Err(Error::denied(format!(
            "the export is of cluster {}, this is cluster {}",
            head.cluster, map.cluster
        ))
        .hint("name another export, or another cluster"));
    }
    let entry = map.namespaces.iter().find(|entry| entry.name == *name);
    let Some(entry) = entry.filter(|entry| entry.uuid == *uuid && entry.id == *namespace) else {
        return Err(Error::denied(format!(
            "the export is of namespace {name:?} {uuid}, which the coordinator does not know"
        ))
        .hint(
            "it may have been given up (`weir meta --new --instead-of`), then its files' data cannot be \
             found any more",
        ));
    };
    if map.copies_of(entry.id).is_some() {
        return Err(Error::exists(format!("namespace {name:?} is kept by several nodes")).hint(format!(
            "start those whose directories are left; if all are lost, `weir namespace copies {name} \
             --lost` gives them up"
        )));
    }
    match entry.leader.and_then(|leader| map.node(leader)).filter(|node| node.up) {
        None => Ok(()),
        Some(node) => {
            Err(Error::exists(format!("namespace {name:?} is led by node {:?}, which is up", node.name))
                .hint("stop it first, if its directory is really lost"))
        }
    }
}

/// Compares an imported namespace with its targets, unless that was done. Waits until all of them answer.
pub(crate) async fn compare(env: &Env, cluster: &Cluster, meta: &Meta, namespace: NamespaceId) -> Result<()> {
    if meta.import()?.is_none_or(|import| import.compared) {
        return Ok(());
    }
    tracing::info!("the namespace was imported: it is compared with what targets hold before it serves");
    let held = holdings(env, cluster, namespace).await?;
    let done = meta.compare(&held).await?;
    match done.lost_files {
        0 => tracing::info!("no file of the imported namespace lacks bytes"),
        files => tracing::error!(
            "{files} files of the imported namespace lack {} bytes, which targets do not hold any more: they are \
             read from home, or with an error",
            done.lost_bytes
        ),
    }
    Ok(())
}

async fn holdings(env: &Env, cluster: &Cluster, namespace: NamespaceId) -> Result<Holdings> {
    let mut held = Holdings::default();
    let mut listed = 0;
    let mut tries = 0;
    loop {
        let map = cluster.map();
        let Some(group) = map.groups.get(listed) else { return Ok(held) };
        match list_group(cluster, group, namespace, &mut held).await {
            Ok(()) => (listed, tries) = (listed + 1, 0),
            Err(e) => {
                if tries % LOG_EVERY == 0 {
                    tracing::warn!("waits to list what {} holds: {e}", group.id);
                }
                tries += 1;
                env.clock.sleep(RETRY_PAUSE).await;
            }
        }
    }
}

/// Every current member: one of them may lack a fragment that the others have.
async fn list_group(
    cluster: &Cluster,
    group: &Group,
    namespace: NamespaceId,
    held: &mut Holdings,
) -> Result<()> {
    if !group.is_writable() {
        return Err(Error::unavailable(format!(
            "{} of its targets are usable, {} are needed",
            group.current_count(),
            group.scheme.data
        )));
    }
    for member in group.members.iter().filter(|m| m.state == MemberState::Current) {
        list_member(cluster, group, member.target, namespace, held).await?;
    }
    Ok(())
}

async fn list_member(
    cluster: &Cluster,
    group: &Group,
    target: TargetId,
    namespace: NamespaceId,
    held: &mut Holdings,
) -> Result<()> {
    let mut after = None;
    loop {
        let ask = ListCells {
            target,
            group: group.id,
            after,
            since: Epoch(0),
            epoch: group.epoch,
            limit: CELLS_AT_ONCE,
        };
        let asked = cluster.call_target(target, &ask, Vec::new().into(), LIST_PATIENCE).await?;
        let list = asked.into_parts().0;
        for cell in list.cells.iter().filter(|cell| cell.cell.file.namespace == namespace) {
            if cell.base.0 > 0 || cell.seq.0 > 0 {
                held.note(cell.cell.file.inode, cell.cell.stripe)?;
            }
        }
        match list.cells.last() {
            Some(last) if list.more => after = Some(last.cell),
            _ => return Ok(()),
        }
    }
}
