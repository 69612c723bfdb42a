//! Work on a file that several clients write, done by turns: appends, and cuts with what they leave behind.
//!
//! Invariants: an append is written at the size that its turn found, and committed before the turn ends, so no two take
//! the same place and no reader sees a size without its bytes; old bytes past the end are cleaned only in a turn, so they
//! are not mistaken for what somebody is appending. A turn that cannot be ended ends with the session. What the
//! inode of a small file holds goes to targets in a turn, too, before anything else is written there: a second copy that is late
//! would lie over it.
//! Lock order: `growing`, then the turn, then `flushing`.
use crate::api::{SetAttrs, Stat};
use crate::inner::{Inner, OpenFile};
use crate::node::{Inline, Node};
use crate::plan::Occasion;
use crate::write::{Besides, TRIES_MAX, Way, end_of};
use bytes::Bytes;
use std::sync::Arc;
use weir_proto::meta::{Cred, EndTurn, LeaseKind, TakeTurn};
use weir_proto::{Error, ErrorKind, Result};

/// The place in a file that an append got.
struct Place {
    offset: u64,
    len: usize,
    /// False: the bytes were sent to where the file was before; write them like others.
    is_filled: bool,
}

impl Inner {
    /// One step of an append: at the end of the file as it is when the bytes are taken. How many bytes, as in a write.
    pub async fn append_step(&self, file: &OpenFile, data: &Bytes) -> Result<usize> {
        let node = &file.node;
        let growing = node.growing.lock().await;
        let deadline = self.deadline();
        let mut last = None;
        for _ in 0..TRIES_MAX {
            if self.prepare_write(node, None, data.len()).await? == Way::Through {
                match self.append_in_turn(file, data).await {
                    // The turn was lost with a connection: nothing of this became part of the file.
                    Err(e) if e.kind == ErrorKind::Stale && !self.data.left(deadline).is_zero() => {
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
            let fits = self.fit(node, None, data).await?;
            if self.buffer_all(file, None, &fits, deadline).await? {
                return Ok(fits.len());
            }
        }
        let why = last.map_or_else(String::new, |e| format!(": {e}"));
        Err(Error::unavailable(format!(
            "append to file {}: its lease came and went {TRIES_MAX} times{why}",
            node.ino
        )))
    }

    /// How many bytes.
    async fn fill_place(&self, file: &OpenFile, place: Place, data: &Bytes) -> Result<usize> {
        let mut done = if place.is_filled { place.len } else { 0 };
        while done < place.len {
            done += self.write_step(file, place.offset + done as u64, &data.slice(done..place.len)).await?;
        }
        Ok(place.len)
    }

    async fn append_in_turn(&self, file: &OpenFile, data: &Bytes) -> Result<Place> {
        let held = self.take_turn(&file.node).await?;
        let done = self.append_now(file, held, data).await;
        self.turn_over(&file.node, done).await
    }

    /// `held`: the bytes in the inode.
    async fn append_now(&self, file: &OpenFile, held: Option<Bytes>, data: &Bytes) -> Result<Place> {
        let node = &file.node;
        if node.lock().lease == LeaseKind::Write {
            // It came before the turn; what was written under it meanwhile may not be committed yet.
            return Err(Error::stale(format!("file {}: nobody else has it open any more", node.ino)));
        }
        self.clean_old_tail(node).await?;
        self.leave_inode_now(node, held).await?;
        let offset = node.lock().committed_size();
        let (data, _room) = self.fit_through(node, offset, data).await?;
        let end = end_of(offset, data.len())?;
        let own = self.copy_up(node, offset, end).await?;
        let sends = self.may_send_through(node).await?;
        file.works()?;
        let under = self.send_through(node, sends, own, offset, &data, true).await?;
        // The place is taken with this, and the turn over.
        let is_elsewhere = self.commit_sent(node, (offset, end), under, Besides::Appended).await?;
        Ok(Place { offset, len: data.len(), is_filled: !is_elsewhere })
    }

    /// Has the space of a range counted; the file gets at least as long as that, where it may.
    pub async fn reserve_in_turn(&self, node: &Arc<Node>, offset: u64, end: u64, grows: bool) -> Result<()> {
        let held = self.take_turn(node).await?;
        let done = self.reserve_now(node, held, (offset, end), grows).await;
        self.turn_over(node, done).await
    }

    async fn reserve_now(
        &self,
        node: &Arc<Node>,
        held: Option<Bytes>,
        (offset, end): (u64, u64),
        grows: bool,
    ) -> Result<()> {
        self.clean_old_tail(node).await?;
        self.leave_inode_now(node, held).await?;
        let growth = node.lock().reservation(offset, end, grows)?;
        let _room = loop {
            self.room_for(node, growth).await?;
            if let Some(room) = self.spend_through(node, offset, end) {
                break room;
            }
        };
        let is_longer = {
            let mut st = node.lock();
            let size = st.committed_size();
            st.changed.add(size.min(end), end);
            end > size
        };
        if growth > 0 || is_longer {
            self.commit_reserved(node, (offset, end)).await?;
        }
        Ok(())
    }

    /// Takes what the inode holds to targets, before something is written there.
    pub async fn leave_inode_in_turn(&self, node: &Arc<Node>) -> Result<()> {
        let _grows = node.growing.lock().await;
        if node.lock().lease == LeaseKind::Write {
            return self.flush(node, Occasion::Growing, true).await;
        }
        let held = self.take_turn(node).await?;
        let done = self.leave_inode_now(node, held).await;
        self.turn_over(node, done).await
    }

    /// `held`: the bytes in the inode, as they were told with the turn. What is known of them since may be older.
    async fn leave_inode_now(&self, node: &Arc<Node>, held: Option<Bytes>) -> Result<()> {
        let Some(bytes) = held else { return Ok(()) };
        let end = bytes.len() as u64;
        let own = self.copy_up(node, 0, end).await?;
        let sent = {
            let sends = self.may_send_through(node).await?;
            if node.lock().lease == LeaseKind::Write {
                return Err(Error::stale(format!("file {}: nobody else has it open any more", node.ino)));
            }
            self.send_through(node, sends, own, 0, &bytes, true).await
        };
        let done = match sent {
            Ok(under) => self.commit_sent(node, (0, 0), under, Besides::LeftInode).await.map(drop),
            Err(e) => Err(e),
        };
        if done.is_err() {
            self.tell_left_behind(node, end).await;
        }
        done
    }

    /// Drops and zeroes what an earlier, longer file left past the end.
    pub async fn clean_in_turn(&self, node: &Arc<Node>) -> Result<()> {
        let _grows = node.growing.lock().await;
        self.take_turn(node).await?;
        let done = self.clean_and_tell(node).await;
        self.turn_over(node, done).await
    }

    /// Ends the turn, telling the leader that nothing old is left.
    async fn clean_and_tell(&self, node: &Arc<Node>) -> Result<()> {
        if !node.lock().has_old_tail() {
            return Ok(());
        }
        self.clean_old_tail(node).await?;
        self.commit_time(node, 0, Besides::EndOfTurn).await
    }

    /// Cuts or extends a file that others write, too.
    pub async fn set_size_in_turn(
        &self,
        cred: &Cred,
        node: &Arc<Node>,
        set: &SetAttrs,
        size: u64,
    ) -> Result<Stat> {
        self.take_turn(node).await?;
        let done = async {
            let stat = self.set_size_now(cred, node, set, size, false).await?;
            match self.clean_and_tell(node).await {
                // The turn was lost with a connection. The cut is done, and the leader knows that old bytes may be past it.
                Err(e) if e.kind == ErrorKind::Stale => {
                    let mut st = node.lock();
                    st.through_pending &= st.open_write > 0;
                    Ok(stat)
                }
                told => told.map(|()| stat),
            }
        };
        let done = done.await;
        self.turn_over(node, done).await
    }

    /// Waits for the turn; the file is then known as it is, with the bytes that its inode holds.
    async fn take_turn(&self, node: &Node) -> Result<Option<Bytes>> {
        let ino = node.ino;
        loop {
            let stamp = self.stamp();
            let taken = self.session.ask(self.deadline(), |session| TakeTurn { session, ino }).await;
            {
                // Only now: who named it in a resume without having it could have it beside another.
                let mut st = node.lock();
                if taken.is_ok() && st.is_named_since(stamp) {
                    continue; // it was not named: it may be another's turn since
                }
                st.turn = true;
            }
            let taken = match taken {
                Ok(taken) => taken,
                Err(e) => return self.turn_over(node, Err(e)).await,
            };
            let mut st = node.lock();
            self.apply_to(&mut st, &taken.entry, stamp);
            if !st.is_dirty() || st.inline == Inline::Unknown {
                st.inline = taken.data.clone().map_or(Inline::No, Inline::Yes);
            }
            return Ok(taken.data);
        }
    }

    /// The end of a turn; one that no commit has ended is given back.
    async fn turn_over<T>(&self, node: &Node, done: Result<T>) -> Result<T> {
        let ino = node.ino;
        if std::mem::take(&mut node.lock().turn)
            && let Err(e) = self.session.ask(self.deadline(), |session| EndTurn { session, ino }).await
        {
            tracing::debug!("the turn at file {ino} was not given back: {e}");
        }
        done
    }
}
