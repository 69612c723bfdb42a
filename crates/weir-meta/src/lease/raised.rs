//! Sessions that hold more of an inode than before, so that this is recorded before they learn of it.
use super::{Holding, LeaseTable};
use std::collections::BTreeMap;
use weir_proto::meta::LeaseKind;
use weir_proto::{InodeId, SessionId};

/// The use of an inode that a session may make by its holdings.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Usage {
    /// Read and cache it, or have it open.
    Reads,
    /// Have changes of it that the leader does not know.
    Writes,
}

/// A session holds more of an inode than before.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Raised {
    pub session: SessionId,
    pub ino: InodeId,
    pub usage: Usage,
}

impl Holding {
    pub(super) fn usage(&self) -> Option<Usage> {
        let writes = self.kind == LeaseKind::Write
            || self.opens.write > 0
            || self.append_token.is_held()
            || self.direct;
        match (writes, self.kind > LeaseKind::None || self.is_open()) {
            (true, _) => Some(Usage::Writes),
            (false, true) => Some(Usage::Reads),
            (false, false) => None,
        }
    }
}

impl LeaseTable {
    /// Moves the sessions that hold more since the last call to `into`.
    pub fn take_raised(&mut self, into: &mut Vec<Raised>) {
        into.clear();
        into.append(&mut self.raised);
    }
    pub fn is_raised(&self) -> bool {
        !self.raised.is_empty()
    }
    pub fn inode_count_of(&self, session: SessionId) -> usize {
        self.of_session.get(&session).map_or(0, std::collections::BTreeSet::len)
    }
    /// All inodes of a session, with their usage.
    pub fn usage_of(&self, session: SessionId) -> BTreeMap<InodeId, Usage> {
        let all = self.of_session.get(&session).into_iter().flatten();
        all.filter_map(|ino| Some((*ino, self.states.get(ino)?.get(session)?.usage()?))).collect()
    }
}
