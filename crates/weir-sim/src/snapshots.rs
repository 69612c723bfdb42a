//! Snapshots, taken and removed at random times while files are used and faults come.
//!
//! Oracle: a snapshot shows each turn file exactly as the model was when it was taken; bytes that were in
//! doubt then are settled by the first read, and stay. Shared files, which clients write all the time, show
//! the same content at every read; small ones show what a read during the taking could have shown, and the
//! same from then on. Later changes of names have no effect. In the end, when all is removed, all space must
//! be returned.
use crate::calls::root_cred;
use crate::client_states::ClientStates;
use crate::cluster::Cluster;
use crate::model::FileModel;
use crate::small_files::SnapshotSmallFile;
use crate::tree::SnapshotTree;
use crate::workload::Workload;
use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};
use weir_client::Client;
use weir_env::{Rng, sim::World};
use weir_proto::{Error, ErrorKind, InodeId, VolumeId};

/// Snapshots at a time.
const HELD_MAX: usize = 3;
/// Longest pause between two operations on snapshots.
const PAUSE_MAX: Duration = Duration::from_secs(4);
/// Longest time between the beginning of work on a small file and the snapshot.
const AMID_MAX: Duration = Duration::from_millis(8);
const READ_BYTES: usize = 2 << 20;

/// The operation on snapshots in the table of marks.
pub const TAKE: &str = "snapshot";
pub const COMPARE: &str = "snapshot comparison";
pub const REMOVE: &str = "snapshot removal";
pub const OPERATIONS: [&str; 3] = [TAKE, COMPARE, REMOVE];

/// A file in a snapshot.
struct SnapshotFile {
    dir: InodeId,
    name: String,
    ino: InodeId,
    model: FileModel,
    /// Its content was uncertain.
    in_doubt: bool,
}

struct Taken {
    number: u32,
    name: String,
    turn_files: Vec<SnapshotFile>,
    /// The content at the first read, by name.
    shared: BTreeMap<String, Vec<u8>>,
    small_files: Vec<SnapshotSmallFile>,
    tree: Option<SnapshotTree>,
}

/// All existing snapshots.
pub struct Snapshots {
    world: World,
    cluster: Arc<Cluster>,
    work: Arc<Workload>,
    held: Mutex<Vec<Taken>>,
}

impl Snapshots {
    pub fn new(world: &World, cluster: &Arc<Cluster>, work: &Arc<Workload>) -> Snapshots {
        Snapshots {
            world: world.clone(),
            cluster: cluster.clone(),
            work: work.clone(),
            held: Mutex::default(),
        }
    }

    fn held(&self) -> MutexGuard<'_, Vec<Taken>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs until all other work is done.
    pub async fn disturb(&self) {
        let rng = self.world.rng("snapshots");
        let mut client = None;
        while !self.work.is_done() {
            let is_amid = self.rest(&rng).await;
            let (held, what) = (self.held().len(), rng.below(3));
            let which = rng.below(held.max(1) as u64) as usize;
            let operation = match what {
                _ if is_amid && held < HELD_MAX => TAKE,
                0 if held > 0 => REMOVE,
                1 if held > 0 => COMPARE,
                _ if held < HELD_MAX => TAKE,
                _ => COMPARE,
            };
            let under_way = self.work.context.begin(0, operation);
            let done = async {
                let client = match &mut client {
                    Some(client) => client,
                    none => none.insert(self.cluster.admin("keeps snapshots").await?),
                };
                match operation {
                    TAKE => self.take(client, under_way.op, is_amid).await,
                    COMPARE => self.compare_one(client, which).await,
                    _ => self.remove(client, which).await,
                }
            };
            if let Err(e) = done.await {
                self.work.context.complain_of_none(format!("operation {}: {operation}", under_way.op), &e);
            }
        }
        if let Some(client) = client
            && let Err(e) = client.shutdown().await
        {
            self.work.context.complain_of_none("the client that keeps snapshots leaves".to_owned(), &e);
        }
    }

    /// Whether work on a small file has begun meanwhile.
    async fn rest(&self, rng: &Rng) -> bool {
        let pause = self.world.sleep(Duration::from_nanos(rng.below(PAUSE_MAX.as_nanos() as u64)));
        if rng.below(2) == 0 {
            pause.await;
            return false;
        }
        tokio::select! {
            biased;
            () = self.work.small_files.bout() => {}
            () = pause => return false,
        }
        self.world.sleep(Duration::from_nanos(rng.below(AMID_MAX.as_nanos() as u64))).await;
        true
    }

    async fn take(&self, client: &Client, op: u64, is_amid: bool) -> Result<(), Error> {
        // While no client uses turn files, their content is known; waiting for that takes time.
        let slots = if is_amid { Vec::new() } else { self.work.all_slots().await };
        let tree = match self.work.tree.as_ref().filter(|_| !is_amid) {
            Some(tree) => Some(tree.before_snapshot().await),
            None => None,
        };
        let (_nobody_changes_it, tree) = tree.unzip();
        let small_files = self.work.small_files.before_snapshot();
        let name = format!("s{op}");
        self.work.context.log(op, format_args!("snapshot {name}"));
        let taken = client.take_snapshot(&root_cred(), VolumeId::ROOT, &name).await?;
        let files = slots.iter().filter_map(|slot| slot.file.as_ref()).filter(|file| !file.moving);
        let turn_files = files
            .map(|file| SnapshotFile {
                dir: self.work.context.dirs[file.dir],
                name: file.name.clone(),
                ino: file.ino,
                in_doubt: self.work.context.is_doubtful(&file.model),
                model: file.model.clone(),
            })
            .collect();
        let small_files = self.work.small_files.after_snapshot(small_files);
        let (shared, tree) = (BTreeMap::new(), tree.flatten());
        self.held().push(Taken { number: taken.number, name, turn_files, shared, small_files, tree });
        Ok(())
    }

    async fn compare_one(&self, client: &Client, which: usize) -> Result<(), Error> {
        let mut taken = self.held().remove(which);
        let compared = self.compare(client, &mut taken, "meanwhile").await;
        self.held().insert(which, taken);
        compared
    }

    async fn remove(&self, client: &Client, which: usize) -> Result<(), Error> {
        let name = self.held().remove(which).name;
        client.delete_snapshot(&root_cred(), VolumeId::ROOT, &name).await.map(drop)
    }

    async fn compare(&self, client: &Client, taken: &mut Taken, when: &str) -> Result<(), Error> {
        for file in &mut taken.turn_files {
            let what = format!("{when}: {} ({:?}) in snapshot {}", file.name, file.ino, taken.name);
            let found =
                client.snapshot_lookup(&root_cred(), taken.number, file.dir, file.name.as_bytes()).await?;
            let attr = found.unwrap_or_else(|| panic!("{what}: the name is gone"));
            assert_eq!(attr.ino, file.ino, "{what}: another file");
            let Some(got) = self.read(client, taken.number, file.ino).await? else { continue };
            if std::mem::take(&mut file.in_doubt) {
                file.model
                    .settle(ClientStates::no_client(), &got, None)
                    .unwrap_or_else(|e| panic!("{what}: {e}"));
            }
            file.model.check(0, got.len() + 1, &got).unwrap_or_else(|e| panic!("{what}: {e}"));
        }
        for file in &mut taken.small_files {
            let Some(got) = self.read(client, taken.number, file.ino()).await? else { continue };
            self.work.small_files.check_snapshot(
                file,
                got,
                format_args!("in snapshot {}, {when}", taken.name),
            );
        }
        if let Some(tree) = &taken.tree {
            let what = format!("{when}: the tree in snapshot {}", taken.name);
            tree.verify(client, taken.number, &what).await?;
            for (ino, bytes) in tree.contents() {
                let got = self.read(client, taken.number, ino).await?;
                assert!(got.is_none_or(|got| got == bytes), "{what}: bytes of inode {ino}");
            }
        }
        for (name, ino) in self.work.shared_files() {
            let what = format!("{when}: {name} ({ino:?}) in snapshot {}", taken.name);
            let Some(got) = self.read(client, taken.number, ino).await? else { continue };
            match taken.shared.get(&name) {
                Some(first) => {
                    let differs = first.iter().zip(&got).position(|(a, b)| a != b);
                    let lengths = (first.len(), got.len());
                    assert!(
                        *first == got,
                        "{what}: not as at the first comparison: {lengths:?} bytes, {differs:?}"
                    );
                }
                None => drop(taken.shared.insert(name, got)),
            }
        }
        Ok(())
    }

    /// All bytes of a file in the snapshot; none: some were only at home when the snapshot was taken.
    async fn read(&self, client: &Client, snapshot: u32, ino: InodeId) -> Result<Option<Vec<u8>>, Error> {
        let file = client.snapshot_open(&root_cred(), snapshot, ino).await?;
        let mut got = Vec::new();
        loop {
            let parts = match client.snapshot_read(&file, got.len() as u64, READ_BYTES).await {
                Err(e) if self.work.context.home.is_some() && e.kind == ErrorKind::Io => return Ok(None),
                parts => parts?,
            };
            if parts.iter().all(|part| part.is_empty()) {
                break;
            }
            parts.iter().for_each(|part| got.extend_from_slice(part));
        }
        assert_eq!(got.len() as u64, file.attr.size, "inode {ino} in snapshot {snapshot}: size");
        Ok(Some(got))
    }

    /// Checks that every snapshot is unchanged.
    pub async fn verify(&self, client: &Client, when: &str) -> Result<(), Error> {
        let mut held = std::mem::take(&mut *self.held());
        for taken in &mut held {
            self.compare(client, taken, when)
                .await
                .map_err(|e| e.doing(format_args!("{when}: {}", taken.name)))?;
        }
        *self.held() = held;
        Ok(())
    }

    pub async fn remove_all(&self, client: &Client) -> Result<(), Error> {
        self.held().clear();
        for snapshot in client.snapshots(VolumeId::ROOT).await? {
            client.delete_snapshot(&root_cred(), VolumeId::ROOT, &snapshot.name).await?;
        }
        Ok(())
    }
}
