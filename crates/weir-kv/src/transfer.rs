//! The whole state of a store as sorted keys and values, for a copy that lacks more than the journal keeps.
//!
//! The folded tree is transferred: every copy held its records when it was folded, so it is never rolled
//! back. Later records follow from the journal. A copy that is being filled records that on its disk, and
//! cannot be opened before it is complete.

use crate::CommitSeq;
use crate::base::{Base, Folded, Tree};
use crate::config::EngineConfig;
use crate::engine::{Engine, lock_directory};
use crate::format::{PLAIN, WITH_EPOCHS};
use crate::journal::{Shelf, lock};
use crate::mark::{self, Begun, Mark};
use crate::means::Sizes;
use crate::state::KEY_BYTES_MAX;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use weir_env::{Disk, Env, File, OpenMode};
use weir_proto::{Epoch, Error, Result};

/// Sorts after every key.
const END: [u8; KEY_BYTES_MAX + 1] = [0xff; KEY_BYTES_MAX + 1];
/// The first segment number in a store that was filled.
const FIRST_SEGMENT: u64 = 1;

/// Keys and values, in the order of the keys.
pub type Pairs = Vec<(Vec<u8>, Vec<u8>)>;

/// One state of a store, which stays readable while the store continues.
pub struct Export {
    base: Option<Base>,
    /// The newest record included, and its epoch.
    pub seq: CommitSeq,
    pub epoch: Epoch,
}

impl Engine {
    /// The folded tree. Later records are in the journal, as long as they are kept.
    pub async fn export(&self) -> Result<Export> {
        let core = self.core.clone();
        let taken = move || {
            let tree = lock(&core.tree);
            let Some(tree) = tree.as_ref() else {
                return Err(Error::unavailable("the state tree is being opened again: its disk failed"));
            };
            let Folded { seq, epoch, .. } = tree.folded()?;
            Ok(Export { base: tree.snapshot()?, seq, epoch })
        };
        self.core.env.tasks.blocking(taken).await
    }
}

impl Export {
    /// The entries after the key `after`, at least one if there is one, of about `bytes_max` bytes. Empty:
    /// there are no more.
    pub fn entries(&self, after: Option<&[u8]>, bytes_max: usize) -> Result<Pairs> {
        let Some(base) = &self.base else { return Ok(Vec::new()) };
        let start = after.map_or_else(Vec::new, |key| [key, &[0]].concat());
        let (mut entries, mut total) = (Pairs::new(), 0);
        for entry in base.range(&start, &END)? {
            let entry = entry?;
            total += entry.key().len() + entry.value().len();
            entries.push((entry.key().to_vec(), entry.value().to_vec()));
            if total >= bytes_max {
                break;
            }
        }
        Ok(entries)
    }
}

/// A directory that is being filled with the state of another copy. Its previous content is gone.
pub struct Import {
    env: Env,
    shelf: Shelf,
    tree: Arc<Tree>,
    folded: Folded,
    known: Epoch,
    newest_key: Vec<u8>,
    _lock: Arc<dyn File>,
}

/// Whether a directory was being filled when its process ended: it must be filled again.
pub fn is_unfinished(env: &Env, dir: &Path) -> Result<bool> {
    Ok(mark::read(&*env.disk, dir)?.is_some_and(|mark| mark.begun == Begun::Import))
}

impl Import {
    /// Empties the directory of a store that is not open, for the state `seq`, whose newest record has
    /// `epoch`. It continues to refuse epochs before `known`.
    pub async fn begin(
        env: &Env,
        dir: &Path,
        config: EngineConfig,
        known: Epoch,
        (seq, epoch): (CommitSeq, Epoch),
    ) -> Result<Import> {
        config.check()?;
        let held = lock_directory(env, dir).await?;
        let (env_, dir) = (env.clone(), dir.to_path_buf());
        let folded = Folded { seq, segment: FIRST_SEGMENT - 1, epoch };
        env.tasks.blocking(move || Import::empty(env_, dir, config, known, folded, held)).await
    }

    /// Like [`Import::begin`], for a store without other copies: for a restored state. `seq` is the number of
    /// its last change.
    pub async fn begin_alone(env: &Env, dir: &Path, config: EngineConfig, seq: CommitSeq) -> Result<Import> {
        Import::begin(env, dir, config, Epoch(0), (seq, Epoch(0))).await
    }

    fn empty(
        env: Env,
        dir: PathBuf,
        config: EngineConfig,
        known: Epoch,
        folded: Folded,
        held: Arc<dyn File>,
    ) -> Result<Import> {
        let before = mark::read(&*env.disk, &dir)?.map_or(Epoch(0), |mark| mark.epoch);
        if known < before || folded.epoch > known {
            let of = folded.epoch;
            return Err(Error::stale(format!("a state of {of} was sent under {known}; {before} has begun")));
        }
        mark::write(&*env.disk, &dir, Mark { epoch: known, begun: Begun::Import })?;
        let doing = format!("empty the state directory {}", dir.display());
        let io = |e: std::io::Error| Error::from_io(&doing, &e);
        for entry in env.disk.read_dir(&dir).map_err(io)? {
            if entry.name.starts_with("journal-") || ["state.redb", "ballast"].contains(&entry.name.as_str())
            {
                env.disk.remove_file(&dir.join(&entry.name)).map_err(io)?;
            }
        }
        env.disk.sync_dir(&dir).map_err(io)?;
        let file = env.disk.open(&dir.join("state.redb"), OpenMode::WRITE).map_err(io)?;
        let tree = Arc::new(Tree::open(file, config.cache_bytes)?);
        let segment_bytes = Sizes::of(&config, &*env.disk, &dir).segment_bytes;
        let shelf = Shelf { disk: env.disk.clone(), dir, segment_bytes, tasks: env.tasks.clone() };
        Ok(Import { env, shelf, tree, folded, known, newest_key: Vec::new(), _lock: held })
    }

    /// Adds the next entries, in the order of their keys.
    pub async fn put(&mut self, entries: Pairs) -> Result<()> {
        for (key, _) in &entries {
            if *key <= self.newest_key || key.len() > KEY_BYTES_MAX {
                return Err(Error::invalid("the keys of a transferred state are out of order, or too long"));
            }
            self.newest_key.clone_from(key);
        }
        let tree = self.tree.clone();
        self.env.tasks.blocking(move || tree.fill(&entries)).await
    }

    /// Completes the import: the directory can be opened.
    pub async fn finish(self) -> Result<()> {
        self.end(WITH_EPOCHS, |disk, dir, known| {
            mark::write(disk, dir, Mark { epoch: known, begun: Begun::Nothing })
        })
        .await
    }

    /// Like [`Import::finish`], for a store without other copies.
    pub async fn finish_alone(self) -> Result<()> {
        self.end(PLAIN, |disk, dir, _| mark::remove(disk, dir)).await
    }

    async fn end(
        self,
        segments: u32,
        mark: impl FnOnce(&dyn Disk, &Path, Epoch) -> Result<()> + Send + 'static,
    ) -> Result<()> {
        let Import { env, shelf, tree, folded, known, .. } = self;
        let held = self._lock;
        let finished = move || {
            tree.fold(&[], folded)?;
            drop(tree);
            shelf.make(FIRST_SEGMENT, segments, None)?;
            mark(&*shelf.disk, &shelf.dir, known)?;
            drop(held);
            Ok(())
        };
        env.tasks.blocking(finished).await
    }
}
