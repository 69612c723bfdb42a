//! Clones of the volume, made, changed and deleted at random times while the volume is used and faults come.
//!
//! Oracle: a clone shows each turn file exactly as the model was when its snapshot was taken; each small file
//! as a read during the taking of the snapshot could have shown it; every other file in some state that then
//! stays. After that its files are changed here, each with a model of its own, and neither side shows the
//! other's bytes: those of the volume are compared by the workloads. In the end, when all is removed, all
//! space must be returned.
use crate::calls::{close, names_in, new_volume, read_all, read_whole, root_cred};
use crate::client_states::ClientStates;
use crate::cluster::Cluster;
use crate::model::{FileModel, What, Who, bytes_of};
use crate::small_files::SnapshotSmallFile;
use crate::tree::SnapshotTree;
use crate::workload::Workload;
use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};
use weir_client::{Allocate, Client, OpenMode, SetAttrs};
use weir_env::{Rng, sim::World};
use weir_proto::meta::{FileKind, RenameMode};
use weir_proto::{Error, ErrorKind, InodeId, VolumeId};

/// Clones at a time.
const HELD_MAX: usize = 2;
/// Longest pause between two operations on clones.
const PAUSE_MAX: Duration = Duration::from_millis(1500);
/// Largest change to a file of a clone, in bytes: more than a stripe of 4 × 64 KiB.
const CHANGE_BYTES_MAX: u64 = 300_000;
/// A clone is deleted in the background: polls until it is gone.
const GONE_POLLS: u32 = 60;

/// Operation names in the table of marks.
pub const TAKE: &str = "clone";
pub const COMPARE: &str = "clone comparison";
pub const CHANGE: &str = "clone change";
pub const REMOVE: &str = "clone removal";
pub const OPERATIONS: [&str; 4] = [TAKE, COMPARE, CHANGE, REMOVE];

/// The client that changes files of clones: it is never cut off.
const ME: Who = Who { client: usize::MAX - 1, life: 0, cuts: 0 };
const CLIENTS: [&str; 2] = ["changes clones", "changes clones, too"];

/// Expected content of a file of a clone.
enum Expected {
    Model {
        model: FileModel,
        in_doubt: bool,
    },
    Small(SnapshotSmallFile),
    /// Clients write it concurrently.
    WhatItIs,
}

struct Entry {
    dir: InodeId,
    name: String,
    ino: InodeId,
    expected: Expected,
}

/// Directories of the root with an expectation of their own; that of bursts is not kept for a clone.
fn is_a_tree(name: &str) -> bool {
    [crate::tree::NAME, crate::burst::NAME].contains(&name)
}

struct Cloned {
    volume: VolumeId,
    root: InodeId,
    name: String,
    /// The expected files when it is listed, by the number of the directory and the name.
    then: BTreeMap<(usize, String), Expected>,
    /// Names that were uncertain.
    uncertain: BTreeSet<(usize, String)>,
    tree: Option<SnapshotTree>,
    /// None: not listed yet.
    files: Option<Vec<Entry>>,
}

/// All existing clones.
pub struct Clones {
    world: World,
    cluster: Arc<Cluster>,
    work: Arc<Workload>,
    held: Mutex<Vec<Cloned>>,
}

impl Clones {
    pub fn new(world: &World, cluster: &Arc<Cluster>, work: &Arc<Workload>) -> Clones {
        Clones { world: world.clone(), cluster: cluster.clone(), work: work.clone(), held: Mutex::default() }
    }

    fn held(&self) -> MutexGuard<'_, Vec<Cloned>> {
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs until all other work is done.
    pub async fn disturb(&self) {
        let rng = self.world.rng("clones");
        let mut clients: [Option<Client>; CLIENTS.len()] = Default::default();
        while !self.work.is_done() {
            self.world.sleep(Duration::from_nanos(rng.below(PAUSE_MAX.as_nanos() as u64))).await;
            let (held, what) = (self.held().len(), rng.below(12));
            let which = rng.below(held.max(1) as u64) as usize;
            let operation = match what {
                0 | 1 if held < HELD_MAX => TAKE,
                0 if held > 0 => REMOVE,
                1..4 if held > 0 => COMPARE,
                _ if held > 0 => CHANGE,
                _ => TAKE,
            };
            let under_way = self.work.context.begin(0, operation);
            let client_state = rng.below(CLIENTS.len() as u64) as usize;
            let done = async {
                let client = match &mut clients[client_state] {
                    Some(client) => client,
                    none => none.insert(self.cluster.admin(CLIENTS[client_state]).await?),
                };
                match operation {
                    TAKE => self.take(client, under_way.op).await,
                    REMOVE => self.remove(client, which).await,
                    _ => {
                        let mut cloned = self.held().remove(which);
                        let done = match operation {
                            COMPARE => self.compare(client, &mut cloned, "meanwhile").await,
                            _ => self.change(client, &mut cloned, under_way.op, &rng).await,
                        };
                        self.held().insert(which, cloned);
                        done
                    }
                }
            };
            if let Err(e) = done.await
                && !(e.kind == ErrorKind::NoSpace && self.work.context.client_states.is_full())
            {
                self.work.context.complain_of_none(format!("operation {}: {operation}", under_way.op), &e);
            }
        }
        for (client, name) in clients.into_iter().zip(CLIENTS).filter_map(|(c, name)| Some((c?, name))) {
            if let Err(e) = client.shutdown().await {
                self.work.context.complain_of_none(format!("{name:?} leaves"), &e);
            }
        }
    }

    async fn take(&self, client: &Client, op: u64) -> Result<(), Error> {
        // While no client uses turn files, their content is known.
        let slots = self.work.all_slots().await;
        let tree = match &self.work.tree {
            Some(tree) => Some(tree.before_snapshot().await),
            None => None,
        };
        let (nobody_changes_it, tree) = tree.unzip();
        let small_files = self.work.small_files.before_snapshot();
        let name = format!("clone{op}");
        self.work.context.log(op, format_args!("clone {name}"));
        client.take_snapshot(&root_cred(), VolumeId::ROOT, &name).await?;
        let small_files = self.work.small_files.after_snapshot(small_files).into_iter();
        let mut then: BTreeMap<_, _> =
            small_files.map(|old| (old.name().clone(), Expected::Small(old))).collect();
        let files = slots.iter().filter_map(|slot| slot.file.as_ref()).filter(|file| !file.moving);
        for file in files {
            let in_doubt = self.work.context.is_doubtful(&file.model);
            let model = if in_doubt { file.model.clone() } else { file.model.settled() };
            then.insert((file.dir, file.name.clone()), Expected::Model { model, in_doubt });
        }
        let uncertain = self.work.context.found().uncertain.clone();
        drop((slots, nobody_changes_it));
        let new = new_volume(&name);
        let made = match client.clone_volume(&root_cred(), VolumeId::ROOT, &name, true, &new).await {
            // Some of its data may be only at home.
            Err(e) if self.work.context.home.is_some() && e.kind == ErrorKind::Unsupported => {
                return client.delete_snapshot(&root_cred(), VolumeId::ROOT, &name).await.map(drop);
            }
            made => made?,
        };
        self.work.context.volumes().insert(name.clone(), made.root);
        let (volume, root) = (made.id, made.root);
        let tree = tree.flatten();
        self.held().push(Cloned { volume, root, name, then, uncertain, tree, files: None });
        Ok(())
    }

    async fn remove(&self, client: &Client, which: usize) -> Result<(), Error> {
        let cloned = self.held().remove(which);
        client.delete_volume(&root_cred(), cloned.volume, true).await?;
        self.work.context.volumes().remove(&cloned.name);
        Ok(())
    }

    /// Its files, listed once.
    async fn list(&self, client: &Client, cloned: &mut Cloned) -> Result<(), Error> {
        if cloned.files.is_some() {
            return Ok(());
        }
        let mut files = Vec::new();
        let mut dirs = vec![(0, cloned.root)];
        while let Some((number, dir)) = dirs.pop() {
            for name in names_in(client, dir).await? {
                if is_a_tree(&name) {
                    continue;
                }
                let found = client.lookup(&root_cred(), dir, name.as_bytes()).await?;
                let attr = found.unwrap_or_else(|| panic!("{}: {name} was just listed", cloned.name)).attr;
                if attr.kind == FileKind::Directory {
                    let below = (1..self.work.context.dirs.len()).find(|n| format!("d{n}") == name);
                    dirs.push((
                        below.unwrap_or_else(|| panic!("{}: directory {name}", cloned.name)),
                        attr.ino,
                    ));
                    continue;
                }
                let key = (number, name.clone());
                let expected = cloned.then.remove(&key).unwrap_or(Expected::WhatItIs);
                files.push(Entry { dir, name, ino: attr.ino, expected });
            }
        }
        if let Some((dir, name)) = cloned.then.keys().find(|key| !cloned.uncertain.contains(*key)) {
            panic!("{}: {name} of directory {dir} is not in it", cloned.name);
        }
        cloned.files = Some(files);
        Ok(())
    }

    async fn compare(&self, client: &Client, cloned: &mut Cloned, when: &str) -> Result<(), Error> {
        self.list(client, cloned).await?;
        for entry in cloned.files.iter_mut().flatten() {
            self.check_one(client, entry, &format!("{when}: {} of {}", entry.name, cloned.name)).await?;
        }
        if let Some(tree) = &cloned.tree {
            tree.verify_clone(client, cloned.root, &format!("{when}: the tree of {}", cloned.name)).await?;
        }
        Ok(())
    }

    async fn check_one(&self, client: &Client, entry: &mut Entry, what: &str) -> Result<(), Error> {
        let what = format!("{what} ({:?})", entry.ino);
        let got = read_whole(client, entry.ino).await.map_err(|e| e.doing(&what))?;
        let stat = client.getattr(entry.ino).await?;
        assert_eq!(stat.attr.size, got.len() as u64, "{what}: size");
        match &mut entry.expected {
            Expected::Model { model, in_doubt } => {
                if !std::mem::take(in_doubt) {
                    model.check(0, got.len() + 1, &got).unwrap_or_else(|e| panic!("{what}: {e}"));
                }
                model.settle(ClientStates::no_client(), &got, None).unwrap_or_else(|e| panic!("{what}: {e}"));
            }
            expected => {
                if let Expected::Small(old) = expected {
                    self.work.small_files.check_snapshot(old, got.clone(), &what);
                }
                *expected = Expected::Model { model: FileModel::of(got), in_doubt: false };
            }
        }
        Ok(())
    }

    /// One change of one file, on targets when it ends. Files that were not read since are changed, too, if
    /// their content is known.
    async fn change(&self, client: &Client, cloned: &mut Cloned, op: u64, rng: &Rng) -> Result<(), Error> {
        let context = &self.work.context;
        self.list(client, cloned).await?;
        let files = cloned.files.as_mut().expect("just listed");
        if files.is_empty() {
            return Ok(());
        }
        let which = rng.below(files.len() as u64) as usize;
        let entry = &mut files[which];
        if !matches!(&entry.expected, Expected::Model { in_doubt: false, .. }) {
            self.check_one(client, entry, &format!("to change: {} of {}", entry.name, cloned.name)).await?;
        }
        let Expected::Model { model, in_doubt } = &mut entry.expected else { unreachable!("just seen") };
        let len = 1 + rng.below(rng.below(CHANGE_BYTES_MAX) + 1);
        let offset = rng.below(model.len() + 1);
        let what = match rng.below(20) {
            0 => {
                context.log(op, format_args!("{} of {}: unlink", entry.name, cloned.name));
                client.unlink(&root_cred(), entry.dir, entry.name.as_bytes()).await?;
                files.swap_remove(which);
                return Ok(());
            }
            1 => {
                let name = format!("c{op}");
                let (old, new) = (entry.name.as_bytes(), name.as_bytes());
                context.log(op, format_args!("{} of {}: rename to {name}", entry.name, cloned.name));
                client.rename(&root_cred(), entry.dir, old, cloned.root, new, RenameMode::Replace).await?;
                (entry.dir, entry.name) = (cloned.root, name);
                return Ok(());
            }
            2..6 => What::Size { len: offset },
            6..8 => What::Zero { offset, len },
            8..12 => What::Write { offset: model.len(), len },
            _ => What::Write { offset, len },
        };
        context.log(op, format_args!("{} of {} ({:?}): {what:?}", entry.name, cloned.name, entry.ino));
        model.begin(ME, op, what);
        // Until it has succeeded the file may exist or not.
        *in_doubt = true;
        let mode = OpenMode { append: what == What::Write { offset: model.len(), len }, ..OpenMode::BOTH };
        let handle = client.open(&root_cred(), entry.ino, mode).await?.handle;
        let changed = match what {
            What::Write { offset, len } => {
                client.write(handle, offset, bytes_of(op, offset, len as usize).into()).await.map(drop)
            }
            What::Zero { offset, len } => client.fallocate(handle, Allocate::PunchHole, offset, len).await,
            What::Size { len } => {
                let set = SetAttrs { size: Some(len), ..SetAttrs::default() };
                client.setattr(&root_cred(), entry.ino, Some(handle), set).await.map(drop)
            }
        };
        let synced = match changed {
            Ok(()) => client.fsync(handle).await,
            failed => failed,
        };
        let seen = match synced {
            Ok(()) => read_all(client, handle, 0, usize::MAX).await,
            Err(e) => Err(e),
        };
        let closed = close(client, handle).await;
        let got = seen?;
        closed?;
        model.done(op);
        model.synced(ME.client);
        *in_doubt = false;
        model
            .check(0, got.len() + 1, &got)
            .unwrap_or_else(|e| panic!("operation {op}: {} of {}: {e}", entry.name, cloned.name));
        Ok(())
    }

    /// Checks that every file of every clone is unchanged.
    pub async fn verify(&self, client: &Client, when: &str) -> Result<(), Error> {
        let mut held = std::mem::take(&mut *self.held());
        for cloned in &mut held {
            let compared = self.compare(client, cloned, when).await;
            compared.map_err(|e| e.doing(format_args!("{when}: {}", cloned.name)))?;
            let mut expected: BTreeSet<&str> =
                cloned.files.iter().flatten().map(|entry| entry.name.as_str()).collect();
            for dir in self.dirs_of(client, cloned).await? {
                for name in names_in(client, dir).await? {
                    let is_dir = is_a_tree(&name)
                        || (1..self.work.context.dirs.len()).any(|n| format!("d{n}") == name);
                    assert!(
                        is_dir || expected.remove(name.as_str()),
                        "{when}: {}: {name} is in it",
                        cloned.name
                    );
                }
            }
            assert!(expected.is_empty(), "{when}: {}: {expected:?} are gone", cloned.name);
        }
        *self.held() = held;
        Ok(())
    }

    async fn dirs_of(&self, client: &Client, cloned: &Cloned) -> Result<Vec<InodeId>, Error> {
        let mut dirs = vec![cloned.root];
        for n in 1..self.work.context.dirs.len() {
            let name = format!("d{n}");
            let found = client.lookup(&root_cred(), cloned.root, name.as_bytes()).await?;
            dirs.push(found.unwrap_or_else(|| panic!("{}: {name} is gone", cloned.name)).attr.ino);
        }
        Ok(dirs)
    }

    pub async fn remove_all(&self, client: &Client) -> Result<(), Error> {
        while !self.held().is_empty() {
            self.remove(client, 0).await?;
        }
        for _ in 0..GONE_POLLS {
            if client.usage(InodeId::ROOT).await?.bytes == 0 {
                break;
            }
            self.world.sleep(Duration::from_secs(1)).await;
        }
        let left = client.usage(InodeId::ROOT).await?;
        assert_eq!((left.bytes, left.files), (0, 0), "all clones were removed");
        Ok(())
    }
}
