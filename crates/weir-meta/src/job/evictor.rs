//! Evicts: watches the fill levels of pools and volumes, finds the files to evict next, and evicts them.
//!
//! The leader does it itself, not a mover: it knows the users of a file and its state at home, it needs no
//! bytes for it, and space is freed even while all movers are busy or gone. The namespace is scanned in
//! batches, so no operation waits for it. `evict` decides.
use crate::evict::{self, Candidate, Level, Oldest, Percent};
use crate::keys;
use crate::keys::Letter;
use crate::leader::{Leader, NO_SESSION};
use crate::namespace::evict::How;
use crate::namespace::keeper::is_held;
use crate::namespace::{self, find_inode};
use crate::obstacle::{Halt, Obstacles};
use crate::record::{Inode, Record};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use weir_kv::{Read, Scan};
use weir_proto::meta::FileKind;
use weir_proto::recall::EvictOwn;
use weir_proto::{Error, ErrorKind, InodeId, Result, VolumeId};
use weir_rpc::Connection;

/// Between scans, unless an operation waits for space.
const POLL: Duration = Duration::from_secs(1);
/// A scan takes at most this part of the time, and pauses at least this long, even with waiting operations.
const SCAN_SHARE: u32 = 4;
const POLL_PAUSE: Duration = Duration::from_millis(100);
/// The most files that one scan of the namespace finds.
const CANDIDATES_MAX: usize = 4096;
/// Inodes scanned in one batch.
const BATCH: usize = 2000;
/// Between two batches other operations run.
const BATCH_PAUSE: Duration = Duration::from_millis(1);
/// A file whose leases are not returned is left for another time.
const LEASE_TRIES: u32 = 50;
const LEASE_PAUSE: Duration = Duration::from_millis(20);
/// A file's writer is asked this number of times to evict a part of it, with this time for each.
const WRITER_TRIES: u32 = 5;
const WRITER_PATIENCE: Duration = Duration::from_secs(10);

/// The code of the trouble that too little can be evicted, and how long it is valid.
const FREE_SPACE: &str = "eviction-short";
const FAILING_FOR: Duration = Duration::from_secs(20);

/// Watches for ever; returns only the error after which the node must stop.
pub(crate) async fn run(leader: Arc<Leader>) -> Error {
    let short = leader.base.lock().quotas.short.clone();
    loop {
        let over = leader.base.env.clock.sleep(POLL);
        tokio::select! {
            biased;
            () = short.notified() => {}
            () = over => {}
        }
        let begun = leader.base.now();
        match check_volumes(&leader).await {
            Err(e) if e.kind == ErrorKind::Io => return e.doing("evict"),
            Err(e) => tracing::debug!("evict: {e}"),
            Ok(()) => {}
        }
        let took = leader.base.now().since(begun);
        leader.base.env.clock.sleep((took * (SCAN_SHARE - 1)).max(POLL_PAUSE)).await;
    }
}

async fn check_volumes(leader: &Arc<Leader>) -> Result<()> {
    if leader.base.lock().grace.until.is_some() {
        return Ok(()); // this leader may not know all writers of files yet
    }
    let mut levels: Vec<(Option<VolumeId>, Level, Option<Percent>)> = Vec::new();
    let mut any = false;
    leader.base.read(&mut |read| {
        levels.clear();
        let volumes = crate::relation::proof::evicting(read)?;
        any = !volumes.is_empty();
        for volume in volumes {
            let quota = namespace::volume::load(read, volume)?.quota;
            let limit = quota.bytes_soft.into_iter().chain(quota.bytes_hard).min();
            if let Some(capacity) = limit {
                let used = namespace::volume_usage(read, volume)?.bytes;
                levels.push((Some(volume), Level { capacity, used }, set_marks(read, volume)?));
            }
        }
        Ok(())
    })?;
    if !any {
        return Ok(());
    }
    if let Some(level) = (leader.base.config.space)().await {
        levels.push((None, level, None));
    }
    for (of, level, set) in levels {
        let want = leader.eviction.levels.weigh(leader.base.now(), of, level, set);
        match want {
            0 => leader.base.failing.succeeded(FREE_SPACE, &leader.eviction.watched_name(of)),
            _ => free_space(leader, of, want).await?,
        }
    }
    Ok(())
}

/// Watermarks of a volume that an administrator has set.
fn set_marks(read: &dyn Read, volume: VolumeId) -> Result<Option<Percent>> {
    let value = read.get(&keys::eviction_marks(volume))?;
    Ok(value.and_then(|v| <[u8; 2]>::try_from(v).ok()).map(|[high, low]| Percent { high, low }))
}

/// Evicts `want` bytes, those with the oldest use first. Files that a snapshot holds come last: a volume
/// shrinks at once, but targets free the space only when that snapshot is deleted, too.
async fn free_space(leader: &Arc<Leader>, of: Option<VolumeId>, want: u64) -> Result<()> {
    let (mut freed, mut files, mut held) = (0, 0u32, Vec::new());
    for candidate in oldest(leader, of).await?.into_order() {
        if freed >= want {
            break;
        }
        let end = evict::end_of(&candidate, want - freed);
        match evict_one(leader, candidate.ino, end, Held::Stays).await? {
            Some(evicted) => {
                freed += evicted;
                files += u32::from(evicted > 0);
                leader.eviction.levels.note_evicted(leader.base.now(), of, evicted);
            }
            None => held.push(candidate),
        }
    }
    let mut left = leader.eviction.levels.left_to_snapshots(leader.base.now(), of);
    for candidate in held {
        if freed + left >= want {
            break;
        }
        let evicted = evict_one(leader, candidate.ino, u64::MAX, Held::Goes).await?.unwrap_or(0);
        files += u32::from(evicted > 0);
        if of.is_some() {
            freed += evicted;
            leader.eviction.levels.note_evicted(leader.base.now(), of, evicted);
        } else {
            left += evicted;
            leader.eviction.levels.note_left(leader.base.now(), of, evicted);
        }
    }
    let what = leader.eviction.watched_name(of);
    if freed + left < want {
        let text = format!(
            "{what}: {want} bytes should be evicted, {freed} could be: the rest is not at home yet, in use or pinned"
        );
        tracing::warn!("{text}");
        let action = "see whether home keeps up (`weir relation list`), or raise the limit".to_owned();
        leader.base.failing.failed(leader.base.now(), FAILING_FOR, (FREE_SPACE, &what), text, action);
        return Ok(());
    }
    leader.base.failing.succeeded(FREE_SPACE, &what);
    if left > 0 {
        tracing::info!(
            "{what}: {freed} bytes of {files} files evicted; {left} go with snapshots that hold them"
        );
    } else {
        tracing::info!("{what}: {freed} bytes of {files} files evicted");
    }
    Ok(())
}

/// The files of a volume, or of all whose relations evict, with the oldest use.
async fn oldest(leader: &Leader, of: Option<VolumeId>) -> Result<Oldest> {
    let mut found = Oldest::new(CANDIDATES_MAX);
    let (first, end) = keys::range_of_letter(Letter::Inode);
    let mut start = first.to_vec();
    let mut volumes: BTreeMap<InodeId, Option<VolumeId>> = BTreeMap::new();
    loop {
        let (mut batch, mut last) = (Vec::new(), None);
        leader.base.read(&mut |read| {
            (batch, last) = (Vec::new(), None);
            let mut scanned = 0;
            read.scan(&start, &end, &mut |key, value| {
                scanned += 1;
                let number = key.get(1..9).and_then(|b| b.try_into().ok()).map(u64::from_be_bytes);
                // The next user of a damaged record finds the damage.
                let inode = Inode::from_value(value, || "an inode".to_owned()).ok();
                batch.extend(number.map(InodeId).zip(inode.filter(may_go)));
                last = Some(key.to_vec());
                if scanned < BATCH { Scan::More } else { Scan::Stop }
            })?;
            let evicting = crate::relation::proof::evicting(read)?;
            for (_, inode) in &batch {
                volumes.entry(inode.parent).or_insert_with(|| {
                    let volume = namespace::volume::volume_of(read, inode.parent).ok();
                    volume.filter(|v| evicting.contains(v))
                });
            }
            Ok(())
        })?;
        for (ino, inode) in batch {
            let volume = volumes.get(&inode.parent).copied().flatten();
            if volume.is_some() && (of.is_none() || volume == of) {
                let (online, evicted) = (inode.online(), inode.evicted);
                found.add(Candidate { atime_nanos: inode.atime.nanos, ino, online, evicted });
            }
        }
        let Some(mut last) = last else { return Ok(found) };
        last.push(0);
        start = last;
        leader.base.env.clock.sleep(BATCH_PAUSE).await;
    }
}

fn may_go(inode: &Inode) -> bool {
    inode.kind == FileKind::Regular
        && !inode.pinned
        && inode.nlink > 0
        && inode.online() > 0
        && inode.writing.data_end > 0
}

/// How to treat a file that a snapshot holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Held {
    Stays,
    Goes,
}

/// The result of one try to evict a file.
enum Tried {
    /// Bytes; none: it stays because a snapshot holds it.
    Done(Result<Option<u64>>),
    /// Conflicting leases.
    InTheWay(Obstacles),
    /// This client alone writes it.
    Writer(Connection),
}

/// Evicts a file up to `end`, if home has it; returns the bytes freed. None: it stays because a snapshot
/// holds it.
async fn evict_one(leader: &Arc<Leader>, ino: InodeId, end: u64, held: Held) -> Result<Option<u64>> {
    for _ in 0..LEASE_TRIES {
        let obstacles = match try_to_evict(leader, ino, end, held) {
            Tried::InTheWay(obstacles) => obstacles,
            Tried::Writer(connection) => {
                return ask_writer(leader, connection, ino, end).await.map(Some);
            }
            Tried::Done(Ok(freed)) => return Ok(freed),
            // The file is in use, or home does not have all of it.
            Tried::Done(Err(e)) if e.kind != ErrorKind::Io => return Ok(Some(0)),
            Tried::Done(Err(e)) => return Err(e),
        };
        leader.revoker.revoke(obstacles);
        leader.base.env.clock.sleep(LEASE_PAUSE).await;
    }
    Ok(Some(0))
}

fn try_to_evict(leader: &Leader, ino: InodeId, end: u64, held: Held) -> Tried {
    let mut state = leader.base.lock();
    if state.recalls.concern(ino) {
        return Tried::Done(Ok(Some(0)));
    }
    if state.leases.is_open_for_writing(ino) {
        let writer = state.leases.only_writer(ino);
        let connection = writer.and_then(|s| state.session(s).ok()?.connection.clone());
        return connection.map_or(Tried::Done(Ok(Some(0))), Tried::Writer);
    }
    let (mut freed, mut obstacles) = (Some(0), Obstacles::default());
    let done = leader.tx.housekeep_asking(&mut state, NO_SESSION, &mut obstacles, &mut |cx| {
        freed = Some(0);
        let Some(inode) = find_inode(&*cx.txn, ino)? else { return Ok(()) };
        if held == Held::Stays && is_held(&*cx.txn, cx.rules.snapshots, ino, &inode)? {
            freed = None;
            return Ok(());
        }
        let before = inode.online();
        // The cells of an older object are dropped together.
        let end = if inode.layered() > 0 { u64::MAX } else { end };
        let (inode, _) = cx.evict_range(ino, inode, (0, end), How::Front)?;
        freed = Some(before.saturating_sub(inode.online()));
        Ok(())
    });
    match done {
        Ok(()) => Tried::Done(Ok(freed)),
        Err(Halt::Blocked) => Tried::InTheWay(obstacles),
        Err(Halt::Failed(e)) => Tried::Done(Err(e)),
    }
}

/// The only writer of a file evicts what it can of it up to `end`; returns the bytes freed.
async fn ask_writer(leader: &Leader, connection: Connection, ino: InodeId, end: u64) -> Result<u64> {
    let evicted = || -> Result<u64> {
        let mut evicted = 0;
        leader.base.read(&mut |read| {
            evicted = find_inode(read, ino)?.map_or(0, |inode| inode.evicted);
            Ok(())
        })?;
        Ok(evicted)
    };
    let before = evicted()?;
    // It may be in the middle of a write, or not have reported its latest one yet.
    for _ in 0..WRITER_TRIES {
        match connection.call(&EvictOwn { ino, from: 0, to: end }, Vec::new(), WRITER_PATIENCE).await {
            Ok(_) => break,
            Err(e) if e.kind == ErrorKind::Deadline => break,
            Err(e) => tracing::debug!("inode {ino} is written: {e}"),
        }
        leader.base.env.clock.sleep(LEASE_PAUSE).await;
    }
    Ok(evicted()?.saturating_sub(before))
}

// ---- for people
