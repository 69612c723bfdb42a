//! The right to write a file: its holder, and the token epoch that separates it from earlier ones.
//!
//! Invariant: a token epoch never falls. Its upper bits grow with each truncation and each new object.
use super::*;
use weir_proto::meta::{TRUNCATION_SHIFT, truncations};
use weir_proto::relation::What;

impl Cx<'_> {
    /// Acquires the right to write an existing file, and notifies relations by an empty range. The writer may
    /// die before it commits anything: bytes that it sent may become part of the file when it is recovered.
    pub(super) fn begin_writing(&mut self, ino: InodeId, inode: &mut Inode) -> Result<bool> {
        let was_clean = !inode.writing.dirty;
        let changed = self.take_writer(ino, inode);
        if was_clean && inode.nlink > 0 {
            self.log(inode.parent, || What::Data { ino, offset: 0, len: 0 })?;
        }
        Ok(changed)
    }

    /// Acquires the right to write for this session: a new token epoch if the last writer was another
    /// session. If that one died, recovery truncates the file: bytes that others wrote past the size until
    /// then are lost with it.
    pub(super) fn take_writer(&mut self, ino: InodeId, inode: &mut Inode) -> bool {
        let before = inode.clone();
        let recover = self.rules.must_recover(ino, inode);
        // Another session that still has it open may have writes in flight.
        let concurrent_writer = inode.writing.writer != self.rules.session
            && self.rules.leases.opens_of(inode.writing.writer, ino).write > 0;
        if concurrent_writer && inode.writing.dirty && !recover {
            inode.writing.shared_at = inode.writing.shared_at.or(Some(self.rules.deaths));
        }
        if recover {
            inode.writing.token_epoch = next_truncation(inode.writing.token_epoch);
            inode.writing.writer = self.rules.session;
        } else if inode.writing.writer != self.rules.session {
            inode.writing.token_epoch = inode.writing.token_epoch.saturating_add(1);
            inode.writing.writer = self.rules.session;
        }
        assert_eq!(inode.writing.writer, self.rules.session, "inode {ino}: its writer is another session");
        inode.writing.recover = recover;
        inode.writing.dirty = true;
        if inode.layout.is_none() {
            let volume = self.volume_of(inode.parent).unwrap_or(VolumeId::ROOT);
            inode.layout = self.rules.layout_in(volume).map(|p| place(p, ino));
        }
        *inode != before
    }
}

/// The layout of a new file.
pub(super) fn place(policy: LayoutPolicy, ino: InodeId) -> weir_proto::map::Layout {
    policy.layout(weir_proto::map::Layout::seed_of(ino))
}

pub(super) fn next_truncation(token_epoch: u32) -> u32 {
    truncations(token_epoch).saturating_add(1).min(truncations(u32::MAX)) << TRUNCATION_SHIFT
}
