//! Reports of local creates and removals to the leader: in batches, in the order of each directory.
use super::LocalNames;
use super::create::no_lease;
use super::queue::{Change, Unreported};
use super::remove::removed_at;
use crate::commit::inline_content;
use crate::inode::NO_LIMIT;
use crate::leader;
use bytes::Bytes;
use std::sync::Arc;
use std::time::Duration;
use weir_proto::local_creates::{BATCH_BYTES_MAX, CreateMany, CreatedMany, LocalCreate, Removal, RemoveMany};
use weir_proto::meta::{Cred, Entry};
use weir_proto::{Error, InodeId};

/// The delay of a report: a program that writes small files has closed them by then.
const DELAY: Duration = Duration::from_millis(2);
/// Bytes of a create without its name and content.
const CREATE_BYTES: usize = 96;

impl LocalNames {
    /// A name was changed in the directory; `begins`: no task reports these.
    pub(super) fn report_soon(self: &Arc<Self>, dir: InodeId, begins: bool) {
        if begins {
            let me = self.clone();
            self.env.tasks.spawn("report names", async move { me.report(dir).await });
        } else if self.queue().is_urgent(dir) {
            self.hurry.notify_waiters();
        }
    }

    async fn report(self: &Arc<Self>, dir: InodeId) {
        loop {
            let hurried = self.hurry.notified();
            if !self.queue().is_urgent(dir) {
                let _ = self.env.clock.timeout(DELAY, hurried).await; // continues either way
            }
            let mut batch = self.queue().next_batch(dir);
            let Some(first) = batch.first() else { return };
            let (cred, change) = (first.cred.clone(), first.change);
            match change {
                Change::Created => {
                    let messages = self.make_messages(dir, &mut batch);
                    self.report_creates(dir, &cred, &batch, messages).await;
                }
                Change::Removed(_) => self.report_removals(dir, &cred, &batch).await,
            }
            self.queue().end_batch(dir);
            for unreported in &batch {
                unreported.inode.changed.notify_waiters();
            }
            self.settled.notify_waiters();
        }
    }

    fn note_failed(&self, dir: InodeId, batch: &[Unreported], what: &'static str, e: &Error) {
        if let Some(more) = self.env.watch.line(what) {
            tracing::error!("directory {dir}: {} {what}: {e}{more}", batch.len());
        }
        self.doubt(dir);
        batch.iter().for_each(|unreported| self.lose_one(dir, unreported, e));
    }

    /// The messages of these creates; those that do not fit into one report leave the batch, and wait.
    fn make_messages(&self, dir: InodeId, batch: &mut Vec<Unreported>) -> Vec<LocalCreate> {
        let (mut messages, mut bytes) = (Vec::with_capacity(batch.len()), 0);
        for created in batch.iter() {
            let mut st = created.inode.lock();
            let content = st.write.local().map_or(0, |local| local.size as usize);
            let content = if st.goes_with_create() { content } else { 0 };
            bytes += created.name.len() + content + CREATE_BYTES;
            if bytes > BATCH_BYTES_MAX && !messages.is_empty() {
                break;
            }
            let report = st.begin_report(|st, size| inline_content(st, &Bytes::new(), size));
            messages.push(st.create_message(created.inode.ino, &created.name, report));
        }
        let rest = batch.split_off(messages.len());
        self.queue().put_back(dir, rest);
        messages
    }

    async fn report_creates(
        self: &Arc<Self>,
        dir: InodeId,
        cred: &Cred,
        batch: &[Unreported],
        messages: Vec<LocalCreate>,
    ) {
        let revoke_clock = self.inodes.revoke_clock();
        let make = |op| {
            let mut creates = messages.clone();
            for (created, message) in batch.iter().zip(&mut creates) {
                created.inode.lock().report_again(Some(message));
            }
            CreateMany { op, cred: cred.clone(), dir, creates }
        };
        // All of a batch count under the same limits.
        let limited = batch.iter().map(|created| created.inode.lock().quota.limited());
        let limited = limited.max().unwrap_or(NO_LIMIT);
        let _committing = self.quota.committing(limited).await;
        match self.leader.change(leader::Change::once(), make).await {
            Ok(created) => self.end_reports(batch, &created, revoke_clock),
            Err(e) => self.note_failed(dir, batch, "files could not be created", &e),
        }
    }

    fn end_reports(self: &Arc<Self>, batch: &[Unreported], created: &CreatedMany, revoke_clock: u64) {
        self.closes.note_several(|closes| {
            for unreported in batch {
                let ino = unreported.inode.ino;
                let mut st = unreported.inode.lock();
                let (report, attr) = st.end_report(self.inodes.tick_revoke_clock());
                let content = report.content.as_ref().map(|(content, _)| content.len() as u64);
                let added = content.map_or(0, |content| st.quota.note_charged(content));
                self.inodes.apply_to(&mut st, &Entry { attr, lease: no_lease() }, revoke_clock);
                let reads = report.open_read.saturating_sub(st.opens.for_reading());
                let writes = report.open_write.saturating_sub(st.opens.for_writing());
                if reads + writes > 0 {
                    closes.add(ino, reads, writes);
                }
                self.quota.end_commit(&mut st, None, added); // that of the batch ends after its last file
                self.inodes.forget_if_saved(ino, &st);
            }
        });
        self.inodes.apply_attr(&created.parent_attr, revoke_clock);
    }

    async fn report_removals(&self, dir: InodeId, cred: &Cred, batch: &[Unreported]) {
        let revoke_clock = self.inodes.revoke_clock();
        let removal = |unreported: &Unreported| Removal {
            name: unreported.name.clone(),
            ino: unreported.inode.ino,
            at: removed_at(unreported.change),
        };
        let removals: Vec<Removal> = batch.iter().map(removal).collect();
        let make = |op| RemoveMany { op, cred: cred.clone(), dir, removals: removals.clone() };
        match self.leader.change(leader::Change::once(), make).await {
            Ok(removed) => {
                batch.iter().for_each(|unreported| unreported.inode.lock().end_removal());
                self.inodes.apply_attr(&removed.parent_attr, revoke_clock);
            }
            Err(e) => self.note_failed(dir, batch, "files could not be removed", &e),
        }
    }
}
