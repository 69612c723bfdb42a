//! Attributes of an inode that this client sets, and extended ones.
use super::Names;
use crate::handles::OpenFile;
use crate::inode::Inode;
use crate::leader::Change;
use crate::plan::Occasion;
use crate::types::{Forget, SetAttrs, Stat};
use bytes::Bytes;
use weir_proto::meta::{Cred, GetXattr, ListXattr, RemoveXattr, SetXattr};
use weir_proto::{Error, InodeId, NameRule, Result};

/// Attributes that are access control lists: the mode shows whether there is one.
const ACL_PREFIX: &[u8] = b"system.posix_acl_";

impl Names {
    pub async fn setattr(
        &self,
        cred: &Cred,
        ino: InodeId,
        through: Option<&OpenFile>,
        set: SetAttrs,
    ) -> Result<Stat> {
        let inode = self.inodes.get(ino);
        if let Some(size) = set.size {
            // Through an open file the access was checked at open.
            let only_size = set.mode.is_none() && set.uid.is_none() && set.gid.is_none();
            let root = Cred { uid: 0, gid: 0, groups: vec![0] };
            let writable = through.is_some_and(|file| file.mode.write);
            let cred = if writable && only_size { &root } else { cred };
            return self.resize.set_size(cred, &inode, through, &set, size).await;
        }
        if let Some(stat) = self.local_names.try_set(cred, &inode, &set) {
            return Ok(stat);
        }
        if set.atime.is_some() {
            self.accesses.report_of(&inode).await; // an earlier read must not overtake it
        }
        // A commit of earlier writes must not overwrite a time set now,
        if set.mtime.is_some() {
            self.take_stored_pages(&inode).await;
        }
        let (dirty, direct) = {
            let st = inode.lock();
            (st.is_dirty(), st.direct.are_pending())
        };
        if dirty {
            self.write_back.flush(&inode, Occasion::Closing, false).await?;
        }
        if direct {
            self.commits.settle_direct(&inode).await?;
        }
        self.resize.send_set_attr(cred, &inode, &set, None, false).await
    }

    /// nor may stores through a mapping: the kernel does not report a store before it writes the page back,
    /// up to the end of the mapping. It does so now, and the next store faults the page in again.
    async fn take_stored_pages(&self, inode: &Inode) {
        let may_be_mapped = {
            let st = inode.lock();
            st.opens.for_reading() > 0 && st.opens.is_for_writing()
        };
        if may_be_mapped {
            self.kernel.invalidate(inode.ino, Forget::All).await;
        }
    }

    pub async fn get_xattr(&self, cred: &Cred, ino: InodeId, name: &[u8]) -> Result<Bytes> {
        if name.starts_with(ACL_PREFIX) && self.try_getattr(ino).is_some_and(|stat| !stat.attr.acl) {
            return Err(Error::name(
                NameRule::NoAttribute,
                format!("inode {ino} has no access control list"),
            ));
        }
        let name = Bytes::copy_from_slice(name);
        let ask = |session| GetXattr { session, cred: cred.clone(), ino, name: name.clone() };
        Ok(self.leader.ask(ask).await?.value)
    }
    pub async fn list_xattr(&self, cred: &Cred, ino: InodeId) -> Result<Vec<Bytes>> {
        let ask = |session| ListXattr { session, cred: cred.clone(), ino };
        Ok(self.leader.ask(ask).await?.names)
    }
    pub async fn set_xattr(
        &self,
        cred: &Cred,
        ino: InodeId,
        name: &[u8],
        value: &[u8],
        create: bool,
        replace: bool,
    ) -> Result<()> {
        let (name, value) = (Bytes::copy_from_slice(name), Bytes::copy_from_slice(value));
        let revoke_clock = self.inodes.revoke_clock();
        let make = |op| SetXattr {
            op,
            cred: cred.clone(),
            ino,
            name: name.clone(),
            value: value.clone(),
            create,
            replace,
        };
        let entry = self.leader.change(Change::once(), make).await?;
        self.inodes.apply(&entry, revoke_clock);
        Ok(())
    }
    pub async fn remove_xattr(&self, cred: &Cred, ino: InodeId, name: &[u8]) -> Result<()> {
        let name = Bytes::copy_from_slice(name);
        let revoke_clock = self.inodes.revoke_clock();
        let make = |op| RemoveXattr { op, cred: cred.clone(), ino, name: name.clone() };
        let entry = self.leader.change(Change::once(), make).await?;
        self.inodes.apply(&entry, revoke_clock);
        Ok(())
    }
}
