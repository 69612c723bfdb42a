//! Data of programs that mounts have not saved yet, before `weir down` stops them.
//!
//! Invariant: nothing is stopped while a mount holds data that it cannot save now, unless the caller gave it
//! up. A mount whose programs continue to write is stopped: it saves all that it has when it ends.
use crate::failure::{Failure, Outcome};
use crate::local::args::Down;
use crate::local::local_cluster::{Kept, LocalCluster, RoleName};
use crate::local::up::STOP_PATIENCE;
use crate::mounts::ask;
use crate::{attribute, table};
use std::collections::BTreeMap;
use std::time::{Duration, Instant};
use weir_proto::Error;

const POLL: Duration = Duration::from_millis(200);

/// Before `weir down`. A cluster in memory loses all data in any case.
pub fn wait(args: &Down) -> Outcome<()> {
    let local = LocalCluster::open_own(&args.dir)?;
    match args.lose_unsaved || local.manifest.kept != Kept::Disk {
        true => Ok(()),
        false => wait_saved(&local),
    }
}

/// Waits until each mount has saved its data, or shows that it gets rid of it. An error names those that do
/// not.
fn wait_saved(local: &LocalCluster) -> Outcome<()> {
    let began = Instant::now();
    let mut held = unsaved(local);
    while !held.is_empty() {
        if began.elapsed() >= STOP_PATIENCE {
            let each = held.iter().map(|(name, bytes)| format!("{name} holds {}", table::bytes(*bytes)));
            let each = each.collect::<Vec<_>>().join(", ");
            let error = Error::unavailable(format!(
                "{each} that programs have written and that cannot be saved now; nothing was stopped"
            ));
            let dir = local.dir.display();
            return Err(Failure::new(
                error,
                format!(
                    "`weir status --dir {dir}` names the cause; `weir down --dir {dir} --lose-unsaved` gives the data up"
                ),
            ));
        }
        std::thread::sleep(POLL);
        let now = unsaved(local);
        held.retain(|name, bytes| now.get(name).is_some_and(|left| left >= bytes));
    }
    Ok(())
}

/// By mount. One that does not answer is not asked twice: its process is stopped or hangs.
fn unsaved(local: &LocalCluster) -> BTreeMap<String, u64> {
    let mounts = local.of_role(RoleName::Mount).filter(|mount| weir_fuse::is_mounted(&mount.path));
    let asked: Vec<_> = mounts
        .map(|m| (m.name.clone(), ask(&m.path, |path| attribute::ask(path, attribute::CLIENT))))
        .collect();
    let bytes = |asked: Option<Outcome<serde_json::Value>>| asked?.ok()?["unsaved_bytes"].as_u64();
    let all = asked.into_iter().filter_map(|(name, asked)| Some((name, bytes(asked.answer())?)));
    all.filter(|(_, bytes)| *bytes > 0).collect()
}
