//! Data of files on its way home: the ranges of a file in order, each read ahead part by part, synced and
//! reported.
//!
//! Invariants: later parts of a file do not reach home before earlier ones; a range is reported as done
//! when it is durable at home.
use super::names::{attrs_of, expect, make_again};
use super::{Done, Relation, Shared, lock, reported};
use crate::tuner;
use crate::{Fingerprint, HomePath, HomeWriter};
use bytes::Bytes;
use std::collections::VecDeque;
use std::sync::atomic::Ordering::Relaxed;
use weir_client::Client;
use weir_proto::checksum::crc32c_append;
use weir_proto::relation::{ExtentDone, ExtentWork, Outcome as Reported, RECEIPT_BLOCK};
use weir_proto::{Error, ErrorKind, InodeId, Result, Wire};

/// Parts of one stream that are read ahead of the write.
const PARTS_AHEAD: usize = 4;

impl Shared {
    /// Opens a file whose writer died, which makes the client recover it.
    pub(super) async fn recover(&self, relation: &Relation, ino: InodeId) {
        if let Err(e) = self.client.mover().recover_file(ino).await {
            tracing::debug!("recover inode {ino}, whose writer died: {e}");
            self.pause().await;
        }
        let _ = relation.done.send(Done::Orphan(ino)); // ends with this mover
    }

    /// Writes the assigned ranges of a file, in order, until none is left.
    pub(super) async fn file(&self, relation: &Relation, ino: InodeId) {
        let first =
            lock(&relation.files).get(&ino).map_or(0, |queue| queue.iter().map(|item| item.len).sum());
        let _stream = relation.streams.pass(tuner::share(first, relation.packed)).await;
        let begun = self.env.clock.now();
        relation.meter.busy.fetch_add(1, Relaxed);
        let mut open: Option<Box<dyn HomeWriter>> = None;
        let mut failed: Option<Reported> = None;
        let mut unsynced: Vec<ExtentDone> = Vec::new();
        let mut written = 0;
        loop {
            let next = lock(&relation.files).get_mut(&ino).and_then(VecDeque::pop_front);
            let more = lock(&relation.files).get(&ino).is_some_and(|queue| !queue.is_empty());
            let Some(item) = next else {
                let mut files = lock(&relation.files);
                // More ranges may have arrived meanwhile.
                if files.get(&ino).is_none_or(VecDeque::is_empty) {
                    files.remove(&ino);
                    break;
                }
                continue;
            };
            if let Some(reported) = &failed {
                // Later parts of the file must not reach home first.
                unsynced.push(extent_done(&item, reported.clone()));
                continue;
            }
            match self.extent(relation, &mut open, &item).await {
                Ok(mut done) => {
                    written += item.len;
                    let enough = written >= lock(&relation.tuner).choice().extent_bytes;
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
                        self.report_all(relation, &mut unsynced);
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
        self.report_all(relation, &mut unsynced);
        relation.meter.file_ended(self.env.clock.now().since(begun));
    }

    fn report_all(&self, relation: &Relation, done: &mut Vec<ExtentDone>) {
        for done in done.drain(..) {
            let _ = relation.done.send(Done::Extent(done)); // ends with this mover
        }
    }

    /// One range, or the end of the file. The fingerprint is empty while the written data is not synced yet.
    async fn extent(
        &self,
        relation: &Relation,
        open: &mut Option<Box<dyn HomeWriter>>,
        item: &ExtentWork,
    ) -> std::result::Result<ExtentDone, Reported> {
        if open.is_none() {
            let path = HomePath::parse(&item.path).map_err(|e| Reported::Refused { why: e.to_string() })?;
            if item.expect.fingerprint.is_empty() {
                make_again(&*relation.home, &path).await.map_err(|f| reported(&f))?;
            }
            let expect = expect(&*relation.home, &path, &item.expect).await.map_err(|f| reported(&f))?;
            *open = Some(relation.home.open_write(&path, &expect).await.map_err(|f| reported(&f))?);
        }
        let writer = open.as_ref().expect("opened above");
        let mut done = extent_done(item, Reported::Done { fingerprint: Bytes::new() });
        if let Some(finish) = &item.finish {
            let attrs = attrs_of(&finish.attrs);
            let fingerprint = writer.finish(finish.size, &attrs).await.map_err(|f| reported(&f))?;
            done.outcome = done_with(&fingerprint);
            return Ok(done);
        }
        done.sums = self.copy(relation, &**writer, item).await?;
        relation.meter.bytes.fetch_add(item.len, Relaxed);
        Ok(done)
    }

    /// Copies a range part by part, reading ahead; returns the checksum of each part.
    async fn copy(
        &self,
        relation: &Relation,
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
                    true => relation.window.pass(len).await,
                    false if ahead.len() >= PARTS_AHEAD => break,
                    false => match relation.window.try_pass(len) {
                        Some(permit) => permit,
                        None => break,
                    },
                };
                let (tx, rx) = tokio::sync::oneshot::channel();
                let (client, item) = (self.client.clone(), item.clone());
                self.spawn("read piece", async move {
                    let _ = tx.send(read(&client, &item, at, len).await); // dropped after an error
                });
                ahead.push_back((at, len, permit, rx, self.env.clock.now()));
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
            let begun = self.env.clock.now();
            let parts = match rx.await {
                Ok(Ok(parts)) => parts,
                Ok(Err(e)) => return Err(self.unread(&e).await),
                Err(_) => return Err(Reported::Moved {}),
            };
            let read = self.env.clock.now();
            relation.meter.reading_us.fetch_add(read.since(begun).as_micros() as u64, Relaxed);
            sums.push(parts.iter().fold(0, |sum, part| crc32c_append(sum, part)));
            let zeros = parts.iter().all(|part| part.iter().all(|b| *b == 0));
            let is_hole = zeros && relation.home.traits().holes;
            if !is_hole {
                relation.pace.pass(len, &self.env.clock).await;
            }
            let writes = self.env.clock.now();
            relation.meter.paced_us.fetch_add(writes.since(read).as_micros() as u64, Relaxed);
            let written = match is_hole {
                true => writer.zero(at..at + len).await,
                false => writer.write_at(at, parts).await,
            };
            let now = self.env.clock.now();
            relation.meter.writing_us.fetch_add(now.since(writes).as_micros() as u64, Relaxed);
            relation.meter.part_us.fetch_add(now.since(asked).as_micros() as u64, Relaxed);
            relation.meter.parts.fetch_add(1, Relaxed);
            written.map_err(|f| reported(&f))?;
        }
    }

    /// The report for a volume that cannot be read.
    async fn unread(&self, e: &Error) -> Reported {
        match e.kind {
            ErrorKind::Damaged => Reported::Refused { why: format!("its data here cannot be read: {e}") },
            ErrorKind::NotFound | ErrorKind::Stale => Reported::Moved {},
            _ => {
                if let Some(more) = self.env.watch.line("read what is to be shipped") {
                    tracing::warn!("read what is to be shipped: {e}{more}");
                }
                self.pause().await;
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
