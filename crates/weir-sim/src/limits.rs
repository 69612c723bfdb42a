//! Volumes with limits: all clients write in them until they are refused, limits are raised and lowered,
//! snapshots are taken and removed, and volumes are deleted with their content.
//!
//! Oracle: a volume never has more bytes, or names, than its limits allowed at some time. Synced data
//! stays; an `fsync` or a `close` never reports a reached limit, because the space was reserved before the
//! write. In the end a writer reaches a volume's limit exactly: reservations of dead clients are released,
//! and data that only snapshots hold does not count.

use crate::calls::{close, is_gone, names_in, new_volume, read_whole, root_cred};
use crate::cluster::{Cluster, other_schemes};
use crate::context::Context;
use crate::model::Who;
use crate::owners::{self, Owners};
use bytes::Bytes;
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use weir_client::{Client, Handle, OpenMode, SetAttrs, VolumeEdit};
use weir_env::{Rng, sim::World};
use weir_proto::map::Scheme;
use weir_proto::volume::{Policy, Quota};
use weir_proto::{ErrorKind, InodeId, Result, VolumeId};

/// Volumes at a time.
const VOLUMES_MAX: usize = 3;
/// Snapshots of each volume at a time.
const SNAPSHOTS_MAX: usize = 2;
/// Files of each volume at a time.
const FILES_MAX: usize = 5;
const LIMIT_BYTES_MAX: u64 = 1_500_000;
const WRITE_BYTES_MAX: u64 = 400_000;
/// Pause between two operations on volumes.
const PAUSE: Duration = Duration::from_millis(100);
/// Clients that die one after the other while a limit waits for what they hold.
const CUTS_IN_A_ROW: u64 = 2;
const POLL_EVERY: Duration = Duration::from_secs(1);
/// By then sessions of dead clients are over and their reservations released, and a deleted volume is gone.
const PATIENCE: Duration = Duration::from_secs(120);

/// Operation names in the table of marks.
pub const WRITE: &str = "limited write";
pub const READ: &str = "limited read";
pub const EDIT: &str = "limit change";
pub const REMOVE: &str = "limited end";
pub const OPERATIONS: [&str; 4] = [WRITE, READ, EDIT, REMOVE];

pub struct Limits {
    world: World,
    /// Whether snapshots are taken.
    snapshots: bool,
    /// The cluster's scheme; half of the volumes have another one.
    scheme: Scheme,
    volumes: Mutex<Vec<Arc<Limited>>>,
}

/// A volume with limits.
struct Limited {
    id: VolumeId,
    root: InodeId,
    name: String,
    /// The largest limits that it has had.
    bytes_max: AtomicU64,
    inodes_max: u64,
    is_deleted: AtomicBool,
    files: Mutex<Vec<Arc<File>>>,
    owners: Owners,
}

struct File {
    name: String,
    ino: InodeId,
    /// The holder may use the file.
    turn: tokio::sync::Mutex<Known>,
}

#[derive(Default)]
struct Known {
    /// Its name is removed, or may be.
    is_gone: bool,
    handles: BTreeMap<usize, (Handle, Who)>,
    /// Ranges that were written and not synced, and their writers.
    pending: Vec<(Who, (u64, u64))>,
    /// Ranges that must not be lost.
    synced: Vec<(u64, u64)>,
}

impl Known {
    /// `who` got a reply about the durability of its writes.
    fn reported<T>(&mut self, who: Who, safe: &Result<T>) {
        let (own, others): (Vec<_>, _) =
            std::mem::take(&mut self.pending).into_iter().partition(|p| p.0 == who);
        self.pending = others;
        if safe.is_ok() {
            self.synced.extend(own.into_iter().map(|(_, range)| range));
        }
    }
    fn note_truncated(&mut self, size: u64) {
        let kept = |(from, to): (u64, u64)| (from < size).then_some((from, to.min(size)));
        self.synced = std::mem::take(&mut self.synced).into_iter().filter_map(kept).collect();
        let pending = std::mem::take(&mut self.pending).into_iter();
        self.pending = pending.filter_map(|(who, range)| Some((who, kept(range)?))).collect();
    }
    /// All writes to an offset of a file write the same byte: a byte that differs belongs to another file or
    /// offset.
    fn check(&self, what: &str, ino: InodeId, got: &[u8]) {
        let wrong = (0..got.len() as u64).find(|at| ![0, byte(ino, *at)].contains(&got[*at as usize]));
        assert!(wrong.is_none(), "{what}: wrong byte at {wrong:?}");
        for (from, to) in &self.synced {
            let lost = (*from..*to).find(|at| got.get(*at as usize) != Some(&byte(ino, *at)));
            assert!(
                lost.is_none(),
                "{what}: {from}..{to} was synced, and is lost at {lost:?} of {}",
                got.len()
            );
        }
    }
}

/// Never 0.
fn byte(ino: InodeId, at: u64) -> u8 {
    (ino.0.wrapping_mul(37).wrapping_add(at).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as u8 | 1
}

fn some_limit(rng: &Rng) -> u64 {
    1 + rng.below(1 + rng.below(LIMIT_BYTES_MAX))
}
fn quota(bytes: u64, inodes: Option<u64>) -> Quota {
    Quota { bytes_hard: Some(bytes), inodes_hard: inodes, ..Quota::NONE }
}

impl Limits {
    pub fn new(world: &World, snapshots: bool, scheme: Scheme) -> Limits {
        Limits { world: world.clone(), snapshots, scheme, volumes: Mutex::default() }
    }

    fn volumes(&self) -> MutexGuard<'_, Vec<Arc<Limited>>> {
        self.volumes.lock().unwrap_or_else(PoisonError::into_inner)
    }
    fn all(&self) -> Vec<Arc<Limited>> {
        self.volumes().clone()
    }
    fn some(&self, rng: &Rng) -> Option<Arc<Limited>> {
        let volumes = self.volumes();
        volumes.get(rng.below(volumes.len().max(1) as u64) as usize).cloned()
    }

    // ---- operations on volumes

    /// Runs while the volumes are written: reservations of dead clients are checked at the end.
    pub async fn disturb(&self, context: &Context, cluster: &Cluster, is_used: impl Fn() -> bool) {
        let rng = self.world.rng("limits");
        let mut client: Option<Client> = None;
        while is_used() {
            let volume = self.some(&rng);
            let what = match volume {
                Some(volume) if rng.below(3) > 0 => Some((volume, rng.below(12) == 0)),
                _ if self.volumes().len() < VOLUMES_MAX => None,
                _ => continue,
            };
            let operation = if matches!(what, Some((_, true))) { REMOVE } else { EDIT };
            let under_way = context.begin(0, operation);
            let cuts = context.client_states.all_cuts();
            let done = async {
                let client = match &mut client {
                    Some(client) => client,
                    none => none.insert(cluster.admin("changes limits").await?),
                };
                match what {
                    None => self.make(context, client, under_way.op, &rng).await,
                    Some((volume, true)) => self.delete(context, client, &volume).await,
                    Some((volume, false)) if self.snapshots && rng.below(2) == 0 => {
                        self.change_snapshots(&volume, client, under_way.op).await
                    }
                    Some((volume, false)) if rng.below(2) == 0 => {
                        volume.owners.change(client, volume.id, some_limit(&rng), &rng).await
                    }
                    Some((volume, false)) => change_limit(&volume, client, &rng).await,
                }
            };
            if let Err(e) = done.await {
                // It waits for the lease of a writer; each that dies keeps it for a lease term.
                let waits = e.kind == ErrorKind::Deadline;
                let what = format!("operation {}: {operation}", under_way.op);
                match waits && context.client_states.all_cuts() >= cuts + CUTS_IN_A_ROW {
                    true => context.complain(0, true, what, &e),
                    false => context.complain_of_none(what, &e),
                }
            }
            drop(under_way);
            self.world.sleep(PAUSE).await;
            context.rest(&rng).await;
        }
        if let Some(client) = client
            && let Err(e) = client.shutdown().await
        {
            context.complain_of_none("the client that changes limits leaves".into(), &e);
        }
    }

    async fn make(&self, context: &Context, client: &Client, op: u64, rng: &Rng) -> Result<()> {
        let name = format!("limited{op}");
        let bytes = some_limit(rng);
        let inodes = (rng.below(3) == 0).then(|| 2 + rng.below(FILES_MAX as u64));
        context.log(op, format_args!("volume {name}: {bytes} bytes, {inodes:?} inodes"));
        let scheme = other_schemes(self.scheme).nth(rng.below(4) as usize);
        let policy = Policy { scheme, pool: None };
        let quota = quota(bytes, inodes);
        let new = weir_client::NewVolume { quota, policy, mode: 0o777, ..new_volume(&name) };
        let made = client.create_volume(&root_cred(), &new).await?;
        context.volumes().insert(name.clone(), made.root);
        let volume = Limited {
            id: made.id,
            root: made.root,
            name,
            bytes_max: AtomicU64::new(bytes),
            inodes_max: inodes.unwrap_or(u64::MAX),
            is_deleted: AtomicBool::new(false),
            files: Mutex::default(),
            owners: Owners::default(),
        };
        let begun = volume.owners.begin(client, volume.id, bytes, rng).await;
        self.volumes().push(Arc::new(volume));
        begun
    }

    async fn delete(&self, context: &Context, client: &Client, volume: &Limited) -> Result<()> {
        self.world.trace(&format!("volume {} is deleted", volume.name));
        volume.is_deleted.store(true, Relaxed);
        self.volumes().retain(|other| other.id != volume.id);
        for snapshot in client.snapshots(volume.id).await? {
            client.delete_snapshot(&root_cred(), volume.id, &snapshot.name).await?;
        }
        client.delete_volume(&root_cred(), volume.id, true).await?;
        context.volumes().remove(&volume.name);
        Ok(())
    }

    /// Takes a snapshot, or removes the oldest one.
    async fn change_snapshots(&self, volume: &Limited, client: &Client, op: u64) -> Result<()> {
        let all = client.snapshots(volume.id).await?;
        let changed = match all.first() {
            Some(oldest) if all.len() >= SNAPSHOTS_MAX => {
                client.delete_snapshot(&root_cred(), volume.id, &oldest.name).await?
            }
            _ => client.take_snapshot(&root_cred(), volume.id, &format!("s{op}")).await?,
        };
        self.world.trace(&format!("snapshot {} of {}, of {} before", changed.name, volume.name, all.len()));
        Ok(())
    }

    // ---- what clients do in them

    /// One operation of a process of client `me`.
    pub async fn step(&self, context: &Context, client: &Client, me: usize, rng: &Rng) {
        let volume = loop {
            match self.some(rng) {
                Some(volume) => break volume,
                None => self.world.sleep(PAUSE).await,
            }
        };
        let operation = if rng.below(6) == 0 { READ } else { WRITE };
        let under_way = context.begin(me, operation);
        let (who, excused) = (context.client_states.who(me), context.client_states.excuses_all(me));
        let visit = Visit { context, client, volume: &volume, who, rng, op: under_way.op };
        let done = match operation {
            READ => visit.read_any().await,
            _ => visit.write().await,
        };
        under_way.check_time(operation);
        match done {
            Err(e) if is_gone(&e) && volume.is_deleted.load(Relaxed) => {}
            Err(e) => {
                let excused = excused || who.cuts != context.client_states.cuts(me);
                let what = format!("operation {}, c{me}: {operation} in {}", under_way.op, volume.name);
                context.complain(me, excused, what, &e);
            }
            Ok(()) => {}
        }
    }

    // ---- the end

    /// Closes all open files.
    pub async fn close_all(&self, context: &Context) {
        for volume in self.all() {
            for file in volume.files() {
                let mut known = file.turn.lock().await;
                for (me, (handle, who)) in std::mem::take(&mut known.handles) {
                    let Some(client) =
                        context.client_states.client(me).filter(|_| context.client_states.is_alive(who))
                    else {
                        continue;
                    };
                    let closed = close(&client, handle).await;
                    known.reported(who, &closed);
                    if let Err(e) = closed {
                        let excused = who.cuts != context.client_states.cuts(me);
                        let what = format!("c{me}: close {} of {}", file.name, volume.name);
                        context.complain(me, excused, what, &e);
                    }
                }
            }
        }
    }

    pub async fn verify(&self, client: &Client, when: &str) -> Result<()> {
        for volume in self.all() {
            let name = &volume.name;
            volume.check_usage(client, when).await?;
            let mut there = BTreeMap::new();
            let mut taken = 0;
            for entry in names_in(client, volume.root).await? {
                let found = client.lookup(&root_cred(), volume.root, entry.as_bytes()).await?;
                let attr = found.unwrap_or_else(|| panic!("{when}: {name}: {entry} was just listed")).attr;
                taken += attr.allocated;
                there.insert(attr.ino, entry);
            }
            for file in volume.files() {
                let known = file.turn.lock().await;
                if known.is_gone {
                    continue;
                }
                let what = format!("{when}: {} of {name} ({:?})", file.name, file.ino);
                assert_eq!(there.get(&file.ino), Some(&file.name), "{what}: its name");
                known.check(
                    &what,
                    file.ino,
                    &read_whole(client, file.ino).await.map_err(|e| e.doing(&what))?,
                );
            }
            let used = client.volume(name).await?.usage;
            let expected = (taken, there.len() as u64, 0);
            assert_eq!((used.bytes, used.files, used.directories), expected, "{when}: usage of {name}");
            volume.owners.check(client, volume.id, when).await?;
            volume.owners.verify(client, &client.volume(name).await?, when).await?;
            self.fill(client, &volume, when).await?;
        }
        Ok(())
    }

    /// Checks that all of the limit can be used.
    async fn fill(&self, client: &Client, volume: &Limited, when: &str) -> Result<()> {
        let now = client.volume(&volume.name).await?;
        let limit = now.quota.bytes_hard.unwrap_or_default();
        let goal = now.usage.bytes.max(limit);
        // The limit on names is not tested here.
        let edit = VolumeEdit { quota: Some(quota(limit, None)), ..VolumeEdit::default() };
        client.change_volume(&root_cred(), volume.id, &edit).await?;
        let name = b"fills it";
        let made = client.create(&root_cred(), volume.root, name, 0o644, true, OpenMode::BOTH).await?;
        let (handle, deadline, mut at) = (made.handle, self.world.now() + PATIENCE, 0);
        loop {
            match client.write(handle, at, content(made.stat.attr.ino, at, WRITE_BYTES_MAX)).await {
                Ok(written) => at += written as u64,
                Err(e) if e.kind == ErrorKind::OverQuota => {
                    client.fsync(handle).await?;
                    let used = client.volume(&volume.name).await?.usage.bytes;
                    if used == goal {
                        break;
                    }
                    let what =
                        format!("{when}: {} has {used} bytes of {goal} and takes no more", volume.name);
                    assert!(used < goal && self.world.now() < deadline, "{what}: {e}");
                    self.world.sleep(POLL_EVERY).await;
                }
                Err(e) => return Err(e.doing(format_args!("{when}: fill {}", volume.name))),
            }
        }
        close(client, handle).await?;
        client.unlink(&root_cred(), volume.root, name).await?;
        let unlimited = VolumeEdit { quota: Some(Quota::NONE), ..VolumeEdit::default() };
        client.change_volume(&root_cred(), volume.id, &unlimited).await?;
        volume.owners.fill(&self.world, client, &now, deadline).await?;
        client.change_volume(&root_cred(), volume.id, &VolumeEdit { quota: Some(now.quota), ..edit }).await?;
        let used = client.volume(&volume.name).await?.usage.bytes;
        assert_eq!(used, now.usage.bytes, "{when}: {} when what filled it is gone", volume.name);
        Ok(())
    }

    pub async fn remove_all(&self, context: &Context, client: &Client) -> Result<()> {
        for volume in self.all() {
            self.delete(context, client, &volume).await?;
        }
        let deadline = self.world.now() + PATIENCE;
        while client.volumes(VolumeId(0)).await?.0.iter().any(|volume| volume.name.starts_with("limited")) {
            assert!(self.world.now() < deadline, "the volumes with limits are not removed completely");
            self.world.sleep(POLL_EVERY).await;
        }
        Ok(())
    }
}

async fn change_limit(volume: &Limited, client: &Client, rng: &Rng) -> Result<()> {
    let bytes = some_limit(rng);
    volume.bytes_max.fetch_max(bytes, Relaxed);
    let inodes = (volume.inodes_max < u64::MAX).then_some(volume.inodes_max);
    let edit = VolumeEdit { quota: Some(quota(bytes, inodes)), ..VolumeEdit::default() };
    client.change_volume(&root_cred(), volume.id, &edit).await.map(drop)
}

fn content(ino: InodeId, at: u64, len: u64) -> Bytes {
    (at..at + len).map(|at| byte(ino, at)).collect()
}

impl Limited {
    fn files(&self) -> Vec<Arc<File>> {
        self.files.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    async fn check_usage(&self, client: &Client, when: &str) -> Result<()> {
        let used = client.volume(&self.name).await?.usage;
        let (bytes, inodes) = (self.bytes_max.load(Relaxed), used.files + used.directories);
        let is_more = used.bytes > bytes || inodes > self.inodes_max;
        assert!(!is_more, "{when}: {} has {used:?}, its limits never were more than {bytes}", self.name);
        Ok(())
    }
}

/// A process of a client in a volume.
struct Visit<'a> {
    context: &'a Context,
    client: &'a Client,
    volume: &'a Limited,
    who: Who,
    rng: &'a Rng,
    op: u64,
}

impl Visit<'_> {
    fn log(&self, file: &File, what: &str) {
        let volume = &self.volume.name;
        self.context.log(self.op, format_args!("c{}: {what} {} of {volume}", self.who.client, file.name));
    }

    async fn read_any(&self) -> Result<()> {
        self.volume.check_usage(self.client, "meanwhile").await?;
        let files = self.volume.files();
        let Some(file) = files.get(self.rng.below(files.len().max(1) as u64) as usize) else { return Ok(()) };
        let known = file.turn.lock().await;
        if !known.is_gone {
            self.log(file, "read");
            let what = format!("operation {}: {} of {}", self.op, file.name, self.volume.name);
            known.check(&what, file.ino, &read_whole(self.client, file.ino).await?);
        }
        Ok(())
    }

    async fn write(&self) -> Result<()> {
        let files = self.volume.files();
        let file = files.get(self.rng.below(FILES_MAX as u64) as usize);
        let Some(file) = file else { return self.create().await };
        let mut known = file.turn.lock().await;
        if known.is_gone {
            return Ok(());
        }
        match self.rng.below(16) {
            0 => {
                self.log(file, "unlink");
                known.is_gone = true; // whether or not it succeeds
                self.volume
                    .files
                    .lock()
                    .unwrap_or_else(PoisonError::into_inner)
                    .retain(|f| f.ino != file.ino);
                self.client.unlink(&root_cred(), self.volume.root, file.name.as_bytes()).await?;
                match known.handles.remove(&self.who.client) {
                    Some((handle, who)) if who == self.who => close(self.client, handle).await,
                    _ => Ok(()),
                }
            }
            1..4 => self.truncate(file, &mut known).await,
            4 => self.change_owner(file).await,
            _ => self.append(file, &mut known).await,
        }
    }

    async fn create(&self) -> Result<()> {
        let name = format!("f{}", self.op);
        let (cred, root) = (owners::some_cred(self.rng), self.volume.root);
        let made = self.client.create(&cred, root, name.as_bytes(), 0o644, true, OpenMode::BOTH).await;
        let made = match made {
            // The limit on names may be reached.
            Err(e) if e.kind == ErrorKind::OverQuota && self.volume.inodes_max < u64::MAX => return Ok(()),
            made => made?,
        };
        let known =
            Known { handles: [(self.who.client, (made.handle, self.who))].into(), ..Known::default() };
        let file = File { name, ino: made.stat.attr.ino, turn: tokio::sync::Mutex::new(known) };
        self.log(&file, "create");
        self.volume.files.lock().unwrap_or_else(PoisonError::into_inner).push(Arc::new(file));
        Ok(())
    }

    async fn handle(&self, file: &File, known: &mut Known) -> Result<Handle> {
        match known.handles.get(&self.who.client) {
            Some((handle, who)) if *who == self.who => return Ok(*handle),
            _ => {} // from an earlier process
        }
        let handle = self.client.open(&root_cred(), file.ino, OpenMode::BOTH).await?.handle;
        known.handles.insert(self.who.client, (handle, self.who));
        Ok(handle)
    }

    async fn truncate(&self, file: &File, known: &mut Known) -> Result<()> {
        let size = self.client.getattr(file.ino).await?.attr.size;
        let size = self.rng.below(size + 1);
        self.log(file, &format!("cut to {size} bytes"));
        known.note_truncated(size); // whether or not it succeeds
        let handle = self.handle(file, known).await?;
        let set = SetAttrs { size: Some(size), ..SetAttrs::default() };
        self.client.setattr(&root_cred(), file.ino, Some(handle), set).await.map(drop)
    }

    /// The superuser gives the file to another user: that user may be above its limit then.
    async fn change_owner(&self, file: &File) -> Result<()> {
        let to = owners::some_cred(self.rng);
        self.log(file, &format!("give user {}", to.uid));
        self.volume.owners.will_own(&to);
        let set = SetAttrs { uid: Some(to.uid), gid: Some(to.gid), ..SetAttrs::default() };
        self.client.setattr(&root_cred(), file.ino, None, set).await.map(drop)
    }

    /// Appends, or overwrites, and sometimes syncs.
    async fn append(&self, file: &File, known: &mut Known) -> Result<()> {
        let handle = self.handle(file, known).await?;
        let size = self.client.getattr(file.ino).await?.attr.size;
        let at = if self.rng.below(5) == 0 { self.rng.below(size + 1) } else { size };
        let len = 1 + self.rng.below(self.rng.below(WRITE_BYTES_MAX) + 1);
        self.log(file, &format!("write {len} bytes at {at} of {size} to"));
        let written = self.client.write(handle, at, content(file.ino, at, len)).await;
        match written {
            Ok(written) => known.pending.push((self.who, (at, at + written as u64))),
            Err(e) if e.kind == ErrorKind::OverQuota => self.log(file, "no more goes to"),
            Err(e) => {
                // A failed write is reported once; the handle is not used again.
                known.handles.remove(&self.who.client);
                let _ = self.client.release(handle).await;
                let reported = Err(e);
                known.reported(self.who, &reported);
                return reported;
            }
        }
        let synced = match self.rng.below(6) {
            0 | 1 => self.client.fsync(handle).await,
            2 => {
                known.handles.remove(&self.who.client);
                close(self.client, handle).await
            }
            _ => return Ok(()),
        };
        self.log(file, &format!("synced ({synced:?})"));
        known.reported(self.who, &synced);
        synced
    }
}
