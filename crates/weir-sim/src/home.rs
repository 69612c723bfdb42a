//! A home for files of the simulation, in the harness's memory, and movers that bring bytes back from it.
//!
//! Home has a copy of a file as it was under one data version; the metadata leader is told that it is at home as long as
//! that is the file's version. Movers are clients like others; they die, give up in the middle, and come late.
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use weir_client::{Client, Recall};
use weir_env::{Rng, sim::World};
use weir_proto::{Error, InodeId, Result};

pub const MOVERS: usize = 2;
/// A mover lives so long, at most, while faults come.
const LIFE_MAX: Duration = Duration::from_secs(8);
const WORK_WAIT: Duration = Duration::from_secs(2);

pub fn mover_name(n: usize) -> String {
    format!("mover{n}")
}

struct Kept {
    data_version: u64,
    bytes: Vec<u8>,
}

#[derive(Clone, Default)]
pub struct Home(Arc<Mutex<BTreeMap<InodeId, Kept>>>);

impl Home {
    fn kept(&self) -> MutexGuard<'_, BTreeMap<InodeId, Kept>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
    /// Takes a copy of a file.
    pub fn keep(&self, ino: InodeId, data_version: u64, bytes: Vec<u8>) {
        self.kept().insert(ino, Kept { data_version, bytes });
    }
    pub fn has(&self, ino: InodeId, data_version: u64) -> Result<()> {
        match self.kept().get(&ino) {
            Some(kept) if kept.data_version == data_version => Ok(()),
            _ => Err(Error::denied(format!("inode {ino} stays: home does not have it as it is"))),
        }
    }
    fn bytes(&self, ino: InodeId, from: u64, to: u64) -> Option<Vec<u8>> {
        self.kept().get(&ino)?.bytes.get(from as usize..to as usize).map(<[u8]>::to_vec)
    }

    /// The life of a mover's process.
    pub async fn work(&self, client: &Client, rng: &Rng) {
        loop {
            // An error passes: with the leader, or with this life.
            let Ok(recalls) = client.take_recalls(3, WORK_WAIT).await else { continue };
            for recall in recalls {
                let _ = self.bring(client, recall, rng).await; // given back, or somebody else's by now
            }
        }
    }

    async fn bring(&self, client: &Client, recall: Recall, rng: &Rng) -> Result<()> {
        let (ino, from, to) = (recall.work.ino, recall.work.from, recall.work.to);
        let gives_up = rng.below(8) == 0;
        let stripe_bytes = recall.work.layout.stripe_bytes();
        let mut at = from;
        while at < to {
            let end = to.min(at + stripe_bytes * (1 + rng.below(3)));
            let Some(bytes) = self.bytes(ino, at, end) else {
                return client.recall_failed(recall, "home has no such bytes", false).await;
            };
            client.fill(&recall, at, bytes.into()).await?;
            if gives_up {
                return match rng.below(2) {
                    0 => client.recall_failed(recall, "home was out of reach for a moment", true).await,
                    _ => Ok(()), // without a word
                };
            }
            at = end;
        }
        client.filled(recall).await
    }
}

/// Kills movers and starts them again, until told that it is enough.
pub async fn disturb(world: World, start: impl Fn(usize), is_enough: impl Fn() -> bool) {
    let rng = world.rng("movers' lives");
    while !is_enough() {
        world.sleep(Duration::from_nanos(rng.below(LIFE_MAX.as_nanos() as u64))).await;
        let n = rng.below(MOVERS as u64) as usize;
        world.kill(&mover_name(n));
        world.sleep(Duration::from_millis(rng.below(2_000))).await;
        start(n);
    }
}
