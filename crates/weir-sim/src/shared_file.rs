//! A file that all clients write concurrently, each in records of its own.
use crate::calls::read_all;
use crate::client_states::ClientStates;
use crate::model::{FileModel, Who};
use std::sync::atomic::AtomicBool;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Mutex, MutexGuard, PoisonError};
use weir_client::{Client, Handle};
use weir_proto::{Error, InodeId};

pub const RECORDS: u64 = 12;

/// Records of one size; record `r` belongs to client `r % clients`.
pub struct SharedFile {
    pub name: String,
    pub ino: InodeId,
    pub record_bytes: usize,
    pub models: Vec<Mutex<FileModel>>,
    /// Bytes were lost with a client: the size of the file is unknown.
    pub lossy: AtomicBool,
}

impl SharedFile {
    pub fn model(&self, me: usize) -> MutexGuard<'_, FileModel> {
        self.models[me].lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn owner(&self, offset: u64) -> usize {
        (offset / self.record_bytes as u64 % self.models.len() as u64) as usize
    }

    pub async fn settle(&self, client: &Client, handle: Handle, me: usize, who: Who) -> Result<(), Error> {
        let got = read_all(client, handle, 0, self.record_bytes * RECORDS as usize).await?;
        self.import(me, who, &got).unwrap_or_else(|e| panic!("c{me} {}: {e}", self.name));
        Ok(())
    }

    fn import(&self, me: usize, who: Who, got: &[u8]) -> Result<(), String> {
        self.lossy.store(true, Relaxed);
        let is_own = |offset| self.owner(offset) == me;
        self.model(me).settle(who, got, Some(&is_own)).map(|_| ())
    }

    pub fn verify(&self, got: &[u8], is_doubtful: impl Fn(&FileModel) -> bool) -> Result<(), String> {
        let mut whole = FileModel::default();
        for record in 0..RECORDS {
            let me = self.owner(record * self.record_bytes as u64);
            let in_doubt = is_doubtful(&self.model(me));
            if in_doubt {
                self.import(me, ClientStates::no_client(), got)?;
            }
            whole.take(&self.model(me), record * self.record_bytes as u64, self.record_bytes);
        }
        let known = whole.len() as usize;
        let longer = self.lossy.load(Relaxed) && got.len() > known && got[known..].iter().all(|b| *b == 0);
        whole.check(0, got.len() + 1, if longer { &got[..known] } else { got })
    }
}

/// Other clients write beyond: a record that this client wrote in part may be followed by zeros up to the
/// size that they reached.
pub fn check_own_record(model: &FileModel, offset: u64, len: usize, got: &[u8]) -> Result<(), String> {
    let known = model.read(offset, len).len();
    if got.len() >= known && got[known..].iter().all(|b| *b == 0) {
        model.check(offset, len, &got[..known])
    } else {
        model.check(offset, len, got)
    }
}
