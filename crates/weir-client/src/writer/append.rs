//! Work on a file that several clients write, under its append token: appends, truncations, and the bytes
//! that these leave past the end.
//!
//! Invariants: an append is written at the size that its token came with, and committed before the token is
//! released, so no two take the same place and no reader sees a size without its bytes; old bytes past the
//! end are cleaned only under the token, so they are not mistaken for an append in progress. A token that
//! cannot be released ends with the session. A small file's inline bytes go to targets under the token, too,
//! before anything else is written there: a second copy that is late would overwrite it. Lock order:
//! `growing`, then the append token, then `flushing`.
use super::Writer;
use crate::commit::CommitExtra;
use crate::handles::OpenFile;
use crate::inode::{Inline, Inode, Wish};
use crate::plan::Occasion;
use crate::writer::{TRIES_MAX, Way, end_of};
use bytes::Bytes;
use std::sync::Arc;
use weir_proto::meta::{ReleaseAppendToken, TakeAppendToken};
use weir_proto::{Error, ErrorKind, Result};

/// The range in the file that an append got.
struct Place {
    offset: u64,
    len: usize,
    /// False: the bytes were sent to the file's former object; write them as usual.
    is_filled: bool,
}

impl Writer {
    /// One step of an append, at the end of the file at that moment. Returns the number of bytes, as a write
    /// does.
    pub(super) async fn append_step(&self, file: &OpenFile, data: &Bytes) -> Result<usize> {
        let inode = &file.inode;
        let growing = inode.growing.lock().await;
        let deadline = self.leader.deadline();
        let mut last = None;
        for _ in 0..TRIES_MAX {
            if self.prepare_write(inode, None, data.len()).await? == Way::Direct {
                match self.append_with_token(file, data).await {
                    // The token was lost with a connection: none of these bytes became part of the file.
                    Err(e) if e.kind == ErrorKind::Stale && !self.leader.left(deadline).is_zero() => {
                        last = Some(e)
                    }
                    Err(e) => return Err(e),
                    Ok(place) => {
                        drop(growing);
                        return self.fill_place(file, place, data).await;
                    }
                }
                continue;
            }
            let fits = self.quota.fit(inode, None, data).await?;
            if self.buffer_all(file, None, &fits, deadline).await? {
                return Ok(fits.len());
            }
        }
        let why = last.map_or_else(String::new, |e| format!(": {e}"));
        Err(Error::unavailable(format!(
            "append to file {}: its lease came and went {TRIES_MAX} times{why}",
            inode.ino
        )))
    }

    /// Returns the number of bytes.
    async fn fill_place(&self, file: &OpenFile, place: Place, data: &Bytes) -> Result<usize> {
        let mut done = if place.is_filled { place.len } else { 0 };
        while done < place.len {
            done += self.write_step(file, place.offset + done as u64, &data.slice(done..place.len)).await?;
        }
        Ok(place.len)
    }

    async fn append_with_token(&self, file: &OpenFile, data: &Bytes) -> Result<Place> {
        let held = self.take_append_token(&file.inode).await?;
        let done = self.append_now(file, held, data).await;
        self.end_token(&file.inode, done).await
    }

    /// `held`: the inline bytes.
    async fn append_now(&self, file: &OpenFile, held: Option<Bytes>, data: &Bytes) -> Result<Place> {
        let inode = &file.inode;
        if inode.lock().lease.is_write() {
            // The lease came before the token; bytes written under it meanwhile may not be committed yet.
            return Err(Error::stale(format!("file {}: no other client has it open any more", inode.ino)));
        }
        self.recovery.clean_old_tail(inode).await?;
        self.leave_inode_now(inode, held).await?;
        let offset = inode.lock().committed_size();
        let (data, reservation) = self.fit_direct(inode, offset, data).await?;
        let end = end_of(offset, data.len())?;
        let own = self.objects.copy_up(inode, offset, end).await?;
        let sends = self.leases.may_send(inode).await?;
        file.works()?;
        let under = self.send_direct(inode, sends, own, offset, &data, true).await?;
        // This commits the place and releases the token.
        let extra = (CommitExtra::Appended, Some(reservation));
        let is_elsewhere = self.commits.sent(inode, (offset, end), under, extra).await?;
        Ok(Place { offset, len: data.len(), is_filled: !is_elsewhere })
    }

    /// Charges the space of a range; the file grows to its end, if the mode allows it.
    pub async fn reserve_with_token(&self, inode: &Arc<Inode>, wish: Wish) -> Result<()> {
        let held = self.take_append_token(inode).await?;
        let done = self.reserve_now(inode, held, &wish).await;
        self.end_token(inode, done).await
    }

    async fn reserve_now(&self, inode: &Arc<Inode>, held: Option<Bytes>, wish: &Wish) -> Result<()> {
        self.recovery.clean_old_tail(inode).await?;
        self.leave_inode_now(inode, held).await?;
        let reservation = loop {
            self.quota.reserve_for(inode, wish).await?;
            if let Some(reservation) = self.quota.spend_direct(inode, |st| st.reservation(wish)) {
                break reservation;
            }
        };
        {
            let mut st = inode.lock();
            let size = st.committed_size();
            if wish.grows && wish.end > size {
                st.changed.add(size, wish.end);
            }
        }
        let size = if wish.grows { wish.end } else { 0 };
        self.commits.reserved(inode, size, reservation).await
    }

    /// Moves the inline bytes to targets, before anything is written there.
    pub async fn leave_inode_with_token(&self, inode: &Arc<Inode>) -> Result<()> {
        let _grows = inode.growing.lock().await;
        if inode.lock().lease.is_write() {
            return self.write_back.flush(inode, Occasion::Growing, true).await;
        }
        let held = self.take_append_token(inode).await?;
        let done = self.leave_inode_now(inode, held).await;
        self.end_token(inode, done).await
    }

    /// `held`: the inline bytes, as they came with the token. This client's later knowledge of them may be
    /// older.
    async fn leave_inode_now(&self, inode: &Arc<Inode>, held: Option<Bytes>) -> Result<()> {
        let Some(bytes) = held else { return Ok(()) };
        let end = bytes.len() as u64;
        let own = self.objects.copy_up(inode, 0, end).await?;
        let sent = {
            let sends = self.leases.may_send(inode).await?;
            if inode.lock().lease.is_write() {
                return Err(Error::stale(format!(
                    "file {}: no other client has it open any more",
                    inode.ino
                )));
            }
            self.send_direct(inode, sends, own, 0, &bytes, true).await
        };
        let done = match sent {
            Ok(under) => {
                self.commits.sent(inode, (0, 0), under, (CommitExtra::LeftInode, None)).await.map(drop)
            }
            Err(e) => Err(e),
        };
        if done.is_err() {
            self.commits.left_behind(inode, end).await;
        }
        done
    }

    /// Drops and zeroes the bytes that an earlier, longer file left past the end.
    pub(super) async fn clean_with_token(&self, inode: &Arc<Inode>) -> Result<()> {
        let _grows = inode.growing.lock().await;
        self.take_append_token(inode).await?;
        let done = self.clean_and_report(inode).await;
        self.end_token(inode, done).await
    }

    /// Releases the token, and reports to the leader that no old bytes are left.
    pub async fn clean_and_report(&self, inode: &Arc<Inode>) -> Result<()> {
        if !inode.lock().has_old_tail() {
            return Ok(());
        }
        self.recovery.clean_old_tail(inode).await?;
        self.commits.time(inode, 0, CommitExtra::ReleasesToken).await
    }

    /// Waits for the append token; the file's attributes and inline bytes are then up to date.
    pub async fn take_append_token(&self, inode: &Inode) -> Result<Option<Bytes>> {
        let ino = inode.ino;
        loop {
            let revoke_clock = self.inodes.revoke_clock();
            let taken = self.leader.ask(|session| TakeAppendToken { session, ino }).await;
            {
                // Only now: a resume that named the token before it was held could hold it together with
                // another client's.
                let mut st = inode.lock();
                if taken.is_ok() && st.lease.is_named_since(revoke_clock) {
                    continue; // the resume did not name it: another client may have the token since
                }
                st.lease.note_append_token();
            }
            let taken = match taken {
                Ok(taken) => taken,
                Err(e) => return self.end_token(inode, Err(e)).await,
            };
            let mut st = inode.lock();
            self.inodes.apply_to(&mut st, &taken.entry, revoke_clock);
            if !st.is_dirty() || st.inline == Inline::Unknown {
                st.inline = taken.data.clone().map_or(Inline::No, Inline::Yes);
            }
            return Ok(taken.data);
        }
    }

    /// Ends the use of a token; one that no commit has released is returned.
    pub async fn end_token<T>(&self, inode: &Inode, done: Result<T>) -> Result<T> {
        let ino = inode.ino;
        if inode.lock().lease.take_append_token()
            && let Err(e) = self.leader.ask(|session| ReleaseAppendToken { session, ino }).await
        {
            tracing::debug!("the append token of file {ino} was not returned: {e}");
        }
        done
    }
}
