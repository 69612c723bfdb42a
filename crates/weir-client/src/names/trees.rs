//! Directories of a tree that this client builds: the leader gives it the names in each one when that is
//! made, so that the first file there needs no message.
//!
//! Invariant: such a directory is made after all earlier changes of its parent are reported. It does not
//! wait for those of other directories: nothing there depends on it.
use super::{Named, Names};
use crate::leader::Change;
use crate::types::{NewMode, Stat};
use crate::wall_time;
use bytes::Bytes;
use std::sync::atomic::AtomicU32;
use weir_proto::local_creates::{MadeWithNames, MkdirWithNames};
use weir_proto::meta::{Cred, Made};
use weir_proto::{InodeId, Result};

/// Numbers for a new directory: most directories of source trees have fewer files.
const NUMBERS: u32 = 64;

impl Names {
    pub(super) async fn mkdir_with_names(
        &self,
        cred: &Cred,
        parent: InodeId,
        name: &[u8],
        mode: NewMode,
    ) -> Result<Stat> {
        // From now on no file of this name is created locally.
        let mut change = self.begin_change(parent, name);
        let settled = self.local_names.settle(Some(parent), self.leader.deadline()).await;
        let revoke_clock = self.inodes.revoke_clock();
        let (n, now) = (Bytes::copy_from_slice(name), wall_time(&self.env));
        let make = |op| MkdirWithNames {
            op,
            cred: cred.clone(),
            parent,
            name: n.clone(),
            mode: mode.bits,
            umask: mode.umask,
            numbers: NUMBERS,
            now,
        };
        let tries = AtomicU32::new(0);
        let answer = match settled {
            Ok(()) => self.leader.change(Change::once().counting(&tries), make).await,
            Err(e) => Err(e),
        };
        let made = change.reported(self.lent_names.doubt(&[parent], answer).await)?;
        let MadeWithNames { names, parent_attr, parent_lease } = made;
        let made = Made { entry: names.entry.clone(), parent_attr, parent_lease };
        let stat = self.made(Named { change, reply: made, revoke_clock });
        let dir = self.inodes.get(stat.attr.ino);
        // As after a plain `mkdir`.
        if stat.leased && tries.into_inner() == 1 {
            dir.lock().names.begin_empty();
        }
        self.local_names.take_loan(&dir, Some(&names), revoke_clock);
        Ok(stat)
    }
}
