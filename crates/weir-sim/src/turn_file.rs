//! A file that clients use in turn, with the model of what is in it.

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
    /// Per client: in which life it was opened.
    pub handles: BTreeMap<usize, (Handle, Who)>,
    /// A change of its name is under way, or never ended.
    pub moving: bool,
    /// Where it was written last.
    pub written: u64,
    /// Clients that must be told of an error before they have closed the file: acknowledged bytes of theirs
    /// are lost.
    pub owed: BTreeMap<usize, Who>,
}

impl TurnFile {
    /// `me` was told of an error.
    pub fn reported(&mut self, me: usize) {
        self.owed.remove(&me);
        self.model.doubt(me);
    }
    /// `who` closed the file and was told that all is well.
    pub fn closed(&mut self, who: Who) {
        let owed = self.owed.get(&who.client) == Some(&who);
        assert!(
            !owed,
            "{}: acknowledged bytes of c{} are lost, and close said nothing",
            self.name, who.client
        );
        self.model.synced(who.client);
    }
}
