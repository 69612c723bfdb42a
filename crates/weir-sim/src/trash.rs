//! Files that are removed from a volume with a trash: each is in the trash unchanged, is restored, or is
//! purged when its time is over.
//!
//! Oracle: a turn file that was removed is in the trash with all its bytes, if the trash keeps it to the end
//! of the run; otherwise it has all of the file or nothing. A restored file is unchanged. Files in the trash
//! count in the usage and are at home like any others, and in the end, when it is emptied, all space
//! must be returned.
use crate::FaultKind;
use crate::calls::{is_gone, names_in, read_whole, root_cred, trash_top};
use crate::client_states::ClientStates;
use crate::context::Context;
use crate::model::FileModel;
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use weir_client::{Client, VolumeEdit};
use weir_env::{Rng, sim::World};
use weir_proto::meta::{FileKind, Usage};
use weir_proto::volume::Retention;
use weir_proto::{Error, InodeId, VolumeId};

/// Shorter than a run.
const SHORT_S: u32 = 15;
/// Longer than a run, with any clock jumps.
const LONG_S: u32 = 30 * 24 * 3600;
const POLL_EVERY: Duration = Duration::from_secs(1);
const PATIENCE: Duration = Duration::from_secs(120);

/// A file that was removed.
struct Removed {
    name: String,
    ino: InodeId,
    model: FileModel,
}

pub struct Trash {
    world: World,
    /// It is not purged before the end.
    keeps_all: bool,
    removed: Mutex<Vec<Removed>>,
}

impl Trash {
    /// Gives the volume a trash, with a short or a long retention.
    pub async fn begin(world: &World, founder: &Client, options: &crate::Options) -> Result<Trash, Error> {
        let rng: Rng = world.rng("trash");
        let is_long = rng.below(2) == 0;
        set(founder, if is_long { LONG_S } else { SHORT_S }).await?;
        // The trash is purged early for lack of space, and for a limit.
        let keeps_all = is_long && !options.home && !options.faults.contains(&FaultKind::DiskFull);
        Ok(Trash { world: world.clone(), keeps_all, removed: Mutex::default() })
    }

    /// A turn file has lost its name.
    pub fn threw(&self, name: &str, ino: InodeId, model: FileModel) {
        self.removed().push(Removed { name: name.to_owned(), ino, model });
    }
    fn removed(&self) -> MutexGuard<'_, Vec<Removed>> {
        self.removed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The place in the trash of a file that was removed a moment ago; none: it is purged already.
    pub async fn find(&self, client: &Client, ino: InodeId) -> Result<Option<(InodeId, String)>, Error> {
        let place = files(client).await?.remove(&ino);
        assert!(place.is_some() || !self.keeps_all, "{ino:?} was removed, and is not in the trash");
        Ok(place)
    }

    /// Whether a client that moves a file out of it may get this error: it was purged first.
    pub fn may_lose(&self, e: &Error) -> bool {
        !self.keeps_all && is_gone(e)
    }

    /// From now on nothing is purged for its age.
    pub async fn stays(&self, client: &Client) -> Result<(), Error> {
        set(client, LONG_S).await
    }

    pub async fn verify(&self, context: &Context, client: &Client, when: &str) -> Result<(), Error> {
        let mut removed = std::mem::take(&mut *self.removed());
        let there = files(client).await?;
        for file in &mut removed {
            let what = format!("{when}: {} ({:?}) in the trash", file.name, file.ino);
            if !there.contains_key(&file.ino) {
                assert!(!self.keeps_all, "{what}: it is gone");
                continue;
            }
            let got = match read_whole(client, file.ino).await {
                Err(e) if is_gone(&e) && !self.keeps_all => continue,
                got => got.map_err(|e| e.doing(&what))?,
            };
            if context.is_doubtful(&file.model) {
                file.model
                    .settle(ClientStates::no_client(), &got, None)
                    .unwrap_or_else(|e| panic!("{what}: {e}"));
            }
            file.model.check(0, got.len() + 1, &got).unwrap_or_else(|e| panic!("{what}: {e}"));
        }
        *self.removed() = removed;
        Ok(())
    }

    /// Ends the trash.
    pub async fn end(&self, client: &Client) -> Result<(), Error> {
        set(client, 0).await?;
        self.removed().clear();
        let deadline = self.world.now() + PATIENCE;
        loop {
            let left = usage(client).await?;
            if (left.files, left.directories) == (0, 1) {
                return Ok(());
            }
            assert!(self.world.now() < deadline, "the trash is not emptied: {left:?}");
            self.world.sleep(POLL_EVERY).await;
        }
    }
}

async fn set(client: &Client, trash_s: u32) -> Result<(), Error> {
    let retention = Some(Retention { trash_s, ..Retention::NOTHING });
    let edit = VolumeEdit { retention, ..VolumeEdit::default() };
    client.change_volume(&root_cred(), VolumeId::ROOT, &edit).await.map(drop)
}

/// The usage of its content, with its root directory.
pub async fn usage(client: &Client) -> Result<Usage, Error> {
    let mut used = Usage::default();
    if let Some(top) = trash_top(client).await? {
        used = client.usage(top).await?;
        used.directories += 1;
    }
    Ok(used)
}

/// Its content, each file with its directory and name. It may be emptied meanwhile.
async fn files(client: &Client) -> Result<BTreeMap<InodeId, (InodeId, String)>, Error> {
    let mut files = BTreeMap::new();
    let mut dirs: Vec<InodeId> = trash_top(client).await?.into_iter().collect();
    while let Some(dir) = dirs.pop() {
        let names = match names_in(client, dir).await {
            Err(e) if is_gone(&e) => continue,
            names => names?,
        };
        for name in names {
            match client.lookup(&root_cred(), dir, name.as_bytes()).await {
                Ok(None) => {}
                Err(e) if is_gone(&e) => {}
                Ok(Some(stat)) if stat.attr.kind == FileKind::Directory => dirs.push(stat.attr.ino),
                Ok(Some(stat)) => drop(files.insert(stat.attr.ino, (dir, name))),
                Err(e) => return Err(e),
            }
        }
    }
    Ok(files)
}
