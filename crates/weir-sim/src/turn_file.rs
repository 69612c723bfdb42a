//! A file that clients use in turn, with the model of its content.

use crate::model::{FileModel, Who};
use std::collections::BTreeMap;
use weir_client::Handle;
use weir_proto::InodeId;

/// A place for one turn file.
#[derive(Default)]
pub struct Slot {
    pub file: Option<TurnFile>,
}

pub struct TurnFile {
    pub dir: usize,
    pub name: String,
    pub ino: InodeId,
    pub model: FileModel,
    /// Per client: its handle, and the process that opened it.
    pub handles: BTreeMap<usize, (Handle, Who)>,
    /// Its name is being changed, or a change never ended.
    pub moving: bool,
    /// The offset of the last write.
    pub written: u64,
    /// Clients that must get an error before they have closed the file: acknowledged bytes of theirs are
    /// lost.
    pub owed: BTreeMap<usize, Who>,
}

impl TurnFile {
    /// `me` got an error.
    pub fn reported(&mut self, me: usize) {
        self.owed.remove(&me);
        self.model.doubt(me);
    }
    /// `who` closed the file without an error.
    pub fn closed(&mut self, who: Who) {
        let owed = self.owed.get(&who.client) == Some(&who);
        assert!(
            !owed,
            "{}: acknowledged bytes of c{} are lost, and close returned no error",
            self.name, who.client
        );
        self.model.synced(who.client);
    }
}
