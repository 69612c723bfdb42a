//! Data of files on its way home: the ranges of a file in order, each read ahead part by part, synced and
//! reported.
//!
//! Invariants: later parts of a file do not reach home before earlier ones; a range is reported as done
//! when it is durable at home.
use super::assigned::{Done, reported};
use super::names::{attrs_of, expect, make_again};
use super::relations::Relation;
use crate::{Fingerprint, HomePath, HomeWriter};
use bytes::Bytes;
use std::collections::VecDeque;
use weir_client::Client;
use weir_proto::checksum::crc32c_append;
use weir_proto::relation::{ExtentDone, ExtentWork, Outcome as Reported, RECEIPT_BLOCK};
use weir_proto::{Error, ErrorKind, InodeId, Result, Wire};

/// Parts of one stream that are read ahead of the write.
const PARTS_AHEAD: usize = 4;

impl Relation {
    /// Opens a file whose writer died, which makes the client recover it.
    pub(super) async fn recover(&self, ino: InodeId) {
        if let Err(e) = self.session.client.mover().recover_file(ino).await {
            tracing::debug!("recover inode {ino}, whose writer died: {e}");
            self.session.pause().await;
        }
        self.report(Done::Orphan(ino));
    }

    /// Writes the assigned ranges of a file, in order, until none is left.
    pub(super) async fn ship(&self, ino: InodeId) {
        let _stream = self.tuning.stream(self.files.bytes(ino)).await;
        let begun = self.session.env.clock.now();
        self.tuning.meter.file_began();
        let mut open: Option<Box<dyn HomeWriter>> = None;
        let mut failed: Option<Reported> = None;
        let mut unsynced: Vec<ExtentDone> = Vec::new();
        let mut written = 0;
        while let Some((item, more)) = self.files.next(ino) {
            if let Some(reported) = &failed {
                // Later parts of the file must not reach home first.
                unsynced.push(extent_done(&item, reported.clone()));
                continue;
            }
            match self.extent(&mut open, &item).await {
                Ok(mut done) => {
                    written += item.len;
                    let enough = written >= self.tuning.extent_bytes();
                    // Small ranges are synced together with the following ones.
                    if is_unsynced(&done)
                        && (!more || enough)
                        && let Some(writer) = &open
                    {
                        written = 0;
                        done.outcome = match writer.sync().await {
                            Ok(fingerprint) => done_with(&fingerprint),
                            Err(fault) => {
                                failed = Some(reported(&fault));
                                reported(&fault)
                            }
                        };
                    }
                    let durable = matches!(done.outcome, Reported::Done { .. }) && !is_unsynced(&done);
                    unsynced.push(done);
                    if durable {
                        self.report_all(&mut unsynced);
                    }
                }
                Err(outcome) => {
                    failed = Some(outcome.clone());
                    unsynced.push(extent_done(&item, outcome));
                }
            }
        }
        // Ranges that were never synced are not done.
        if let Some(reported) = &failed {
            unsynced
                .iter_mut()
                .filter(|d| matches!(d.outcome, Reported::Done { .. }))
                .for_each(|d| d.outcome = reported.clone());
        }
        self.report_all(&mut unsynced);
        self.tuning.meter.file_ended(self.session.env.clock.now().since(begun));
    }

    fn report_all(&self, done: &mut Vec<ExtentDone>) {
        done.drain(..).for_each(|done| self.report(Done::Extent(done)));
    }

    /// One range, or the end of the file. The fingerprint is empty while the written data is not synced yet.
    async fn extent(
        &self,
        open: &mut Option<Box<dyn HomeWriter>>,
        item: &ExtentWork,
    ) -> std::result::Result<ExtentDone, Reported> {
        if open.is_none() {
            let path = HomePath::parse(&item.path).map_err(|e| Reported::Refused { why: e.to_string() })?;
            if item.expect.fingerprint.is_empty() {
                make_again(&*self.home, &path).await.map_err(|f| reported(&f))?;
            }
            let expect = expect(&*self.home, &path, &item.expect).await.map_err(|f| reported(&f))?;
            *open = Some(self.home.open_write(&path, &expect).await.map_err(|f| reported(&f))?);
        }
        let writer = open.as_ref().expect("opened above");
        let mut done = extent_done(item, Reported::Done { fingerprint: Bytes::new() });
        if let Some(finish) = &item.finish {
            let attrs = attrs_of(&finish.attrs);
            let fingerprint = writer.finish(finish.size, &attrs).await.map_err(|f| reported(&f))?;
            done.outcome = done_with(&fingerprint);
            return Ok(done);
        }
        done.sums = self.copy(&**writer, item).await?;
        self.tuning.meter.shipped(item.len);
        Ok(done)
    }

    /// Copies a range part by part, reading ahead; returns the checksum of each part.
    async fn copy(
        &self,
        writer: &dyn HomeWriter,
        item: &ExtentWork,
    ) -> std::result::Result<Vec<u32>, Reported> {
        let end = item.offset + item.len;
        let (mut next, mut ahead, mut sums) = (item.offset, VecDeque::new(), Vec::new());
        loop {
            while next < end {
                let (at, len) = (next, (end - next).min(RECEIPT_BLOCK));
                // Only a task without a part waits, so there is no deadlock.
                let permit = match ahead.is_empty() {
                    true => self.tuning.window.pass(len).await,
                    false if ahead.len() >= PARTS_AHEAD => break,
                    false => match self.tuning.window.try_pass(len) {
                        Some(permit) => permit,
                        None => break,
                    },
                };
                let (tx, rx) = tokio::sync::oneshot::channel();
                let (client, item) = (self.session.client.clone(), item.clone());
                self.session.spawn("read piece", async move {
                    let _ = tx.send(read(&client, &item, at, len).await); // dropped after an error
                });
                ahead.push_back((at, len, permit, rx, self.session.env.clock.now()));
                next += len;
            }
            let Some((at, len, _permit, rx, asked)) = ahead.pop_front() else {
                let blocks = item.len.div_ceil(RECEIPT_BLOCK);
                assert_eq!(
                    sums.len() as u64,
                    blocks,
                    "a receipt has a checksum for each block that was shipped"
                );
                return Ok(sums);
            };
            let begun = self.session.env.clock.now();
            let parts = match rx.await {
                Ok(Ok(parts)) => parts,
                Ok(Err(e)) => return Err(self.unread(&e).await),
                Err(_) => return Err(Reported::Moved {}),
            };
            let read = self.session.env.clock.now();
            self.tuning.meter.read_for(read.since(begun));
            sums.push(parts.iter().fold(0, |sum, part| crc32c_append(sum, part)));
            let zeros = parts.iter().all(|part| part.iter().all(|b| *b == 0));
            let is_hole = zeros && self.home.traits().holes;
            if !is_hole {
                self.pace.pass(len, &self.session.env.clock).await;
            }
            let writes = self.session.env.clock.now();
            self.tuning.meter.paced_for(writes.since(read));
            let written = match is_hole {
                true => writer.zero(at..at + len).await,
                false => writer.write_at(at, parts).await,
            };
            let now = self.session.env.clock.now();
            self.tuning.meter.part_written(now.since(writes), now.since(asked));
            written.map_err(|f| reported(&f))?;
        }
    }

    /// The report for a volume that cannot be read.
    async fn unread(&self, e: &Error) -> Reported {
        match e.kind {
            ErrorKind::Damaged => Reported::Refused { why: format!("its data here cannot be read: {e}") },
            ErrorKind::NotFound | ErrorKind::Stale => Reported::Moved {},
            _ => {
                if let Some(more) = self.session.env.watch.line("read what is to be shipped") {
                    tracing::warn!("read what is to be shipped: {e}{more}");
                }
                self.session.pause().await;
                Reported::Moved {}
            }
        }
    }
}

async fn read(client: &Client, item: &ExtentWork, at: u64, len: u64) -> Result<Vec<Bytes>> {
    if let Some(bytes) = &item.inline {
        let from = (at - item.offset) as usize;
        return Ok(vec![bytes.slice(from..from + len as usize)]);
    }
    client.mover().read_committed(item, at, len).await
}

/// The data was written, and is not synced yet.
fn is_unsynced(done: &ExtentDone) -> bool {
    matches!(&done.outcome, Reported::Done { fingerprint } if fingerprint.is_empty())
}

fn done_with(fingerprint: &Fingerprint) -> Reported {
    Reported::Done { fingerprint: Bytes::from(fingerprint.to_bytes()) }
}

pub(super) fn extent_done(item: &ExtentWork, outcome: Reported) -> ExtentDone {
    let (ino, offset, len) = (item.ino, item.offset, item.len);
    ExtentDone { ino, offset, len, finished: item.finish.is_some(), sums: Vec::new(), outcome }
}
