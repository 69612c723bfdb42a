//! Bursts: for a moment the applications of all clients issue a hundred times their usual requests.
//!
//! Many writers per client write small pieces at random places of large files: half of them in a file of
//! their client, under its Write lease, the others in a file that all clients write at once, without one.
//! Others create, look up, rename and remove names in one directory. Then each syncs its file. The number of
//! requests is bounded, their time is not: a cluster may be slow, but may fail none of them and lose none of
//! their bytes.
//!
//! A writer has slots of its own, so a block has one writer at a time. Its content is that of the last write,
//! or of one since the last sync if the client was cut off.

use crate::calls::{names_in, read_whole, root_cred};
use crate::client_states::{ClientStates, client_name};
use crate::model::{Who, bytes_of};
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use weir_client::{Client, OpenMode};
use weir_env::{Rng, sim::World};
use weir_proto::meta::RenameMode;
use weir_proto::{Error, InodeId};

/// The directory of the files and names, in the root directory.
pub const NAME: &str = "bursts";
/// Tasks of each client that write, as the processes of one job on a node.
const WRITERS: u64 = 16;
/// Tasks of each client that change names.
const NAMERS: u64 = 4;
/// Usually a client issues some 20 operations in a second; a burst is 2,000 of them and more.
const WRITES_EACH: u64 = 128;
const NAMES_EACH: u64 = 24;
/// The least write, as of a program that knows sectors only.
const BLOCK_BYTES: u64 = 512;
/// Blocks of the largest write: 4 KiB.
const WRITE_BLOCKS_MAX: u64 = 8;
/// Written by one task at a time.
const SLOT_BYTES: u64 = BLOCK_BYTES * WRITE_BLOCKS_MAX;
/// 16 stripes of 4+2: each gets more than a hundred pieces.
const FILE_BYTES: u64 = 4 << 20;
/// Numbers of operations begin here: other operations have lower ones.
const FIRST_OP: u64 = 1 << 40;

pub struct Bursts {
    world: World,
    client_states: Arc<ClientStates>,
    dir: InodeId,
    /// One for each client, then the one that all write.
    files: Vec<BurstFile>,
    names: Mutex<BTreeMap<String, Name>>,
    begun: AtomicU64,
    done: AtomicU64,
    under_way: AtomicU64,
}

struct BurstFile {
    ino: InodeId,
    name: String,
    /// Operations whose bytes each block may show; 0: zeros.
    blocks: Mutex<Vec<Vec<u64>>>,
}

impl BurstFile {
    fn blocks(&self) -> MutexGuard<'_, Vec<Vec<u64>>> {
        self.blocks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn check(&self, got: &[u8]) -> Result<(), String> {
        for (block, possible) in self.blocks().iter().enumerate() {
            let (at, len) = (block as u64 * BLOCK_BYTES, BLOCK_BYTES as usize);
            let shown: Vec<u8> =
                got.iter().skip(at as usize).chain(std::iter::repeat(&0)).take(len).copied().collect();
            let is_of = |op: &u64| {
                if *op == 0 { shown.iter().all(|b| *b == 0) } else { shown == bytes_of(*op, at, len) }
            };
            if !possible.iter().any(is_of) {
                return Err(format!("{} at {at}: {:?} is of none of {possible:?}", self.name, &shown[..12]));
            }
        }
        Ok(())
    }
}

/// Whether a name exists, if that is known, and its last client: one that is cut off may lose the change.
#[derive(Clone, Copy)]
struct Name {
    is_there: Option<bool>,
    who: Who,
}

/// Handles an error of a client: the client, whether it was excused from the start, and the place.
pub type Complain = Arc<dyn Fn(usize, bool, String, &Error) + Send + Sync>;

/// A task of a burst; ends with its process, too.
struct UnderWay(Arc<Bursts>);

impl Drop for UnderWay {
    fn drop(&mut self) {
        self.0.under_way.fetch_sub(1, Relaxed);
    }
}

impl Bursts {
    pub async fn prepare(
        world: &World,
        client: &Client,
        client_states: &Arc<ClientStates>,
        clients: usize,
    ) -> Result<Arc<Bursts>, Error> {
        let dir = client.mkdir(&root_cred(), InodeId::ROOT, NAME.as_bytes(), 0o755).await?.attr.ino;
        let mut files = Vec::new();
        for name in (0..clients).map(|me| format!("of-c{me}")).chain(["of-all".to_owned()]) {
            let opened =
                client.create(&root_cred(), dir, name.as_bytes(), 0o644, true, OpenMode::WRITE).await?;
            client.release(opened.handle).await?;
            let blocks = Mutex::new(vec![vec![0]; (FILE_BYTES / BLOCK_BYTES) as usize]);
            files.push(BurstFile { ino: opened.stat.attr.ino, name, blocks });
        }
        Ok(Arc::new(Bursts {
            world: world.clone(),
            client_states: client_states.clone(),
            dir,
            files,
            names: Mutex::default(),
            begun: AtomicU64::new(0),
            done: AtomicU64::new(0),
            under_way: AtomicU64::new(0),
        }))
    }

    /// Requests that have ended well.
    pub fn done(&self) -> u64 {
        self.done.load(Relaxed)
    }
    /// Requests that have begun.
    pub fn begun(&self) -> u64 {
        self.begun.load(Relaxed)
    }
    /// Whether tasks of a burst still run.
    pub fn is_under_way(&self) -> bool {
        self.under_way.load(Relaxed) > 0
    }
    fn next_op(&self) -> u64 {
        FIRST_OP + self.begun.fetch_add(1, Relaxed)
    }
    fn names(&self) -> MutexGuard<'_, BTreeMap<String, Name>> {
        self.names.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Writes pieces in slots of its own, then syncs.
    async fn write(&self, client: &Client, me: usize, writer: u64, rng: &Rng) -> Result<(), Error> {
        let all = self.files.len() - 1;
        let (file, mine, of) = match writer % 2 {
            0 => (&self.files[me], writer / 2, WRITERS / 2),
            _ => (&self.files[all], me as u64 * WRITERS / 2 + writer / 2, all as u64 * WRITERS / 2),
        };
        let (who, excused) = (self.client_states.who(me), self.client_states.excuses_all(me));
        let handle = client.open(&root_cred(), file.ino, OpenMode::BOTH).await?.handle;
        let (mut written, mut done) = (Vec::new(), Ok(()));
        for _ in 0..WRITES_EACH {
            let op = self.next_op();
            let slot = rng.below(FILE_BYTES / SLOT_BYTES / of) * of + mine;
            let first = rng.below(WRITE_BLOCKS_MAX);
            let blocks = 1 + rng.below(WRITE_BLOCKS_MAX - first);
            let first = slot * WRITE_BLOCKS_MAX + first;
            for block in first..first + blocks {
                file.blocks()[block as usize].push(op);
                written.push(block);
            }
            let (at, len) = (first * BLOCK_BYTES, (blocks * BLOCK_BYTES) as usize);
            done = client.write(handle, at, bytes_of(op, at, len).into()).await.map(drop);
            if done.is_err() {
                break;
            }
            self.done.fetch_add(1, Relaxed);
        }
        let synced = match &done {
            Ok(()) => client.fsync(handle).await,
            Err(_) => Ok(()),
        };
        let is_safe = done.is_ok() && synced.is_ok() && !excused && self.client_states.who(me) == who;
        if is_safe && !self.client_states.is_cut(me) {
            let mut possible = file.blocks();
            for block in written {
                let ops = &mut possible[block as usize];
                ops.drain(..ops.len() - 1);
            }
        }
        let released = client.release(handle).await;
        done.and(synced).and(released)
    }

    /// Makes names, looks them up, renames all and removes every second one.
    async fn change_names(&self, client: &Client, me: usize) -> Result<(), Error> {
        let cred = root_cred();
        for n in 0..NAMES_EACH {
            let op = self.next_op() - FIRST_OP;
            let (name, next) = (format!("n{op}"), format!("r{op}"));
            self.note(me, &name, None);
            let opened =
                client.create(&cred, self.dir, name.as_bytes(), 0o644, true, OpenMode::WRITE).await?;
            client.release(opened.handle).await?;
            self.note(me, &name, Some(true));
            let found = client.lookup(&cred, self.dir, name.as_bytes()).await?;
            let ino = found.map(|stat| stat.attr.ino);
            assert!(
                ino == Some(opened.stat.attr.ino),
                "c{me}: {name} was made as {}, and is {ino:?}",
                opened.stat.attr.ino
            );
            self.note(me, &name, None);
            self.note(me, &next, None);
            client
                .rename(&cred, self.dir, name.as_bytes(), self.dir, next.as_bytes(), RenameMode::Replace)
                .await?;
            self.note(me, &name, Some(false));
            self.note(me, &next, Some(true));
            self.done.fetch_add(3, Relaxed);
            if n % 2 == 0 {
                self.note(me, &next, None);
                client.unlink(&cred, self.dir, next.as_bytes()).await?;
                self.note(me, &next, Some(false));
                self.done.fetch_add(1, Relaxed);
            }
        }
        Ok(())
    }
    fn note(&self, me: usize, name: &str, is_there: Option<bool>) {
        self.names().insert(name.to_owned(), Name { is_there, who: self.client_states.who(me) });
    }

    /// Checks every byte and every name.
    pub async fn verify(&self, client: &Client, when: &str) -> Result<(), Error> {
        for file in &self.files {
            let got = read_whole(client, file.ino).await.map_err(|e| e.doing(&file.name))?;
            file.check(&got).unwrap_or_else(|e| panic!("{when}: {e}"));
        }
        let listed = names_in(client, self.dir).await?;
        let is_sure = |name: &Name| name.who.cuts == self.client_states.cuts(name.who.client);
        let known = self.names().clone();
        for name in &listed {
            let is_file = self.files.iter().any(|file| file.name == *name);
            let may_be =
                known.get(name).is_some_and(|known| known.is_there != Some(false) || !is_sure(known));
            assert!(is_file || may_be, "{when}: {name} is there");
        }
        for (name, known) in &known {
            let must_be = known.is_there == Some(true) && is_sure(known);
            assert!(!must_be || listed.contains(name), "{when}: {name} is gone");
        }
        Ok(())
    }

    pub async fn remove_all(&self, client: &Client) -> Result<(), Error> {
        for name in names_in(client, self.dir).await? {
            client.unlink(&root_cred(), self.dir, name.as_bytes()).await?;
        }
        client.rmdir(&root_cred(), InodeId::ROOT, NAME.as_bytes()).await
    }

    /// Begins a burst at a client, whose process runs.
    pub fn begin(self: &Arc<Bursts>, client: &Client, me: usize, complain: &Complain) {
        let tasks = self.world.node(&client_name(me)).tasks;
        let number = self.begun();
        for task in 0..WRITERS + NAMERS {
            self.under_way.fetch_add(1, Relaxed);
            let (under_way, client, complain) = (UnderWay(self.clone()), client.clone(), complain.clone());
            let rng = self.world.rng(&format!("burst {number} of c{me}, task {task}"));
            tasks.spawn("burst", async move {
                let bursts = &under_way.0;
                let excused = bursts.client_states.excuses_all(me);
                let done = match task < WRITERS {
                    true => bursts.write(&client, me, task, &rng).await,
                    false => bursts.change_names(&client, me).await,
                };
                if let Err(e) = done {
                    complain(me, excused, format!("c{me}, task {task} of a burst"), &e);
                }
            });
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_block_is_of_the_last_synced_write_or_a_later_one() {
        let file = BurstFile {
            ino: InodeId::ROOT,
            name: "f".to_owned(),
            blocks: Mutex::new(vec![vec![0, 7], vec![8], vec![8, 9]]),
        };
        let len = BLOCK_BYTES as usize;
        let block = |op: u64, n: u64| if op == 0 { vec![0; len] } else { bytes_of(op, n * BLOCK_BYTES, len) };
        for (ops, is_right) in [([0, 8, 9], true), ([7, 8, 8], true), ([0, 0, 9], false), ([7, 9, 9], false)]
        {
            let got: Vec<u8> = (0..).zip(ops).flat_map(|(n, op)| block(op, n)).collect();
            assert_eq!(file.check(&got).is_ok(), is_right, "{ops:?}");
        }
        assert!(file.check(&block(7, 0)).is_err(), "the file ends before bytes that were synced");
    }
}
