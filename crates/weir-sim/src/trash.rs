//! What is removed from a volume that has a trash: it is there as it was, is put back, or goes when its time
//! is over.
//!
//! Oracle: a turn file that was removed is in the trash with all its bytes, if the trash keeps it to the end
//! of the run; if not, it is there whole or not at all. One that is put back is the file that it was. What is
//! in the trash counts as any other file does, home has it, too, and in the end, when it is emptied, all
//! space must be given back.
use crate::FaultKind;
use crate::calls::{is_gone, names_in, read_whole, root_cred};
use crate::client_states::ClientStates;
use crate::context::Context;
use crate::model::FileModel;
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use weir_client::{Client, VolumeEdit};
use weir_env::{Rng, sim::World};
use weir_proto::meta::{FileKind, Usage};
use weir_proto::volume::{Retention, TRASH};
use weir_proto::{Error, InodeId, VolumeId};

/// Less than a run takes.
const SHORT_S: u32 = 15;
/// More than a run takes, whatever clocks say.
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
    /// Nothing is taken out of it before the end.
    keeps_all: bool,
    removed: Mutex<Vec<Removed>>,
}

impl Trash {
    /// The volume gets a trash, for a short or a long time.
    pub async fn begin(world: &World, founder: &Client, options: &crate::Options) -> Result<Trash, Error> {
        let rng: Rng = world.rng("trash");
        let is_long = rng.below(2) == 0;
        set(founder, if is_long { LONG_S } else { SHORT_S }).await?;
        // It gives way to what has no room, and to a limit.
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

    /// Where a file is that was removed a moment ago; none: it is gone already.
    pub async fn find(&self, client: &Client, ino: InodeId) -> Result<Option<(InodeId, String)>, Error> {
        let place = files(client).await?.remove(&ino);
        assert!(place.is_some() || !self.keeps_all, "{ino:?} was removed, and is not in the trash");
        Ok(place)
    }

    /// Whether who moves a file out of it may be told this: it went first.
    pub fn may_lose(&self, e: &Error) -> bool {
        !self.keeps_all && is_gone(e)
    }

    /// From now on nothing is taken out of it because it was there for so long.
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
                    .settle(ClientStates::nobody(), &got, None)
                    .unwrap_or_else(|e| panic!("{what}: {e}"));
            }
            file.model.check(0, got.len() + 1, &got).unwrap_or_else(|e| panic!("{what}: {e}"));
        }
        *self.removed() = removed;
        Ok(())
    }

    /// Nothing is kept any more.
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

/// The topmost directory of the trash.
pub async fn top(client: &Client) -> Result<Option<InodeId>, Error> {
    let found = client.lookup(&root_cred(), InodeId::ROOT, TRASH).await?;
    Ok(found.map(|stat| stat.attr.ino))
}

/// Of all that is in it, with its topmost directory.
pub async fn usage(client: &Client) -> Result<Usage, Error> {
    let mut used = Usage::default();
    if let Some(top) = top(client).await? {
        used = client.usage(top).await?;
        used.directories += 1;
    }
    Ok(used)
}

/// What is in it, each file with its directory and name. It may be emptied meanwhile.
async fn files(client: &Client) -> Result<BTreeMap<InodeId, (InodeId, String)>, Error> {
    let mut files = BTreeMap::new();
    let mut dirs: Vec<InodeId> = top(client).await?.into_iter().collect();
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
