//! The sending side of a connection: frames wait in one queue and leave in as few system calls as possible.
//!
//! A sender that finds the socket free writes in place: for a single small frame that is faster than waking a
//! task. When many calls are in flight, or a payload is sent, the writer task does it, and all frames that
//! were queued meanwhile are sent in the same call. Payloads are never copied (except tiny ones).
//!
//! Invariants: the socket has one user at a time (the one that took it out of the queue); bytes are sent in
//! the order in which they were queued. Knows frames, not calls.
use crate::Payload;
use bytes::{Buf, Bytes};
use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};
use tokio::io::AsyncWrite;
use tokio::sync::Notify;
use weir_env::{BoxWriter, Env};
use weir_proto::frame::{HEADER_BYTES, Header};
use weir_proto::{Result, Writer};
use weir_trust::frames::{FrameKey, PayloadKey, TAG_BYTES, Tag, Whose};

/// Limit of a write in place: more could keep a caller busy for long while other cores are idle.
const INLINE_BYTES_MAX: usize = 16 << 10;
/// A payload this small is copied behind its header: cheaper than a part of its own in the system call.
const COPY_BYTES_MAX: usize = 2 << 10;
/// Small frames are joined in buffers of this size.
const SMALL_FRAMES_BYTES: usize = 64 << 10;
/// Parts of one system call: Linux accepts up to 1,024, but gains level off long before.
const PARTS_MAX: usize = 64;
/// The reader of a connection stops at this many unsent bytes, so that a peer that does not read its replies
/// cannot exhaust our memory: eight of the largest payloads.
const UNSENT_BYTES_MAX: usize = 64 << 20;

pub(crate) struct Outgoing {
    /// Protocol version of all frames.
    version: u16,
    /// For a connection over a network between nodes that have certificates.
    payloads: Option<SendKey>,
    queue: Mutex<Queue>,
    /// Notifies the writer task that frames wait.
    wake: Notify,
    /// Notifies the reader that there is space again.
    drained: Notify,
    unsent: AtomicUsize,
    /// Bytes sent, for the watch task.
    sent: AtomicU64,
}

struct SendKey {
    key: PayloadKey,
    /// For buffers: encrypted payloads are copies.
    env: Env,
}

struct Queue {
    /// Frames are protected in the order in which they are queued.
    key: Option<FrameKey>,
    segments: VecDeque<Segment>,
    /// Absent during a write, and after the end.
    writer: Option<BoxWriter>,
    ended: bool,
    /// A spare buffer for small frames.
    spare: Vec<u8>,
}

enum Segment {
    Frames(Vec<u8>),
    Payload(Bytes),
}

impl Outgoing {
    pub fn new(env: &Env, writer: BoxWriter, version: u16, key: Option<FrameKey>) -> Outgoing {
        Outgoing {
            version,
            payloads: key.as_ref().map(|key| SendKey { key: key.payloads(), env: env.clone() }),
            queue: Mutex::new(Queue {
                key,
                segments: VecDeque::new(),
                writer: Some(writer),
                ended: false,
                spare: Vec::new(),
            }),
            wake: Notify::new(),
            drained: Notify::new(),
            unsent: AtomicUsize::new(0),
            sent: AtomicU64::new(0),
        }
    }

    /// Queues a frame; it is sent with the next `flush`. After the end frames are dropped.
    pub fn push(&self, mut header: Header, body: &dyn Fn(&mut Writer), payload: Payload) -> Result<()> {
        header.payload_len = u32::try_from(payload.len()).unwrap_or(u32::MAX);
        header.payload_crc = payload.crc();
        header.version = self.version;
        // Before taking the lock: it takes longer than anything else here.
        let (payload, tag) = match &self.payloads {
            Some(protect) if header.payload_len > 0 => protect.seal(&header, payload),
            _ => (payload, None),
        };
        let mut queue = self.lock();
        if queue.ended {
            return Ok(());
        }
        let length = match queue.append(header, body) {
            Ok(length) => length + header.payload_len as usize + tag.map_or(0, |tag| tag.len()),
            Err(e) => {
                if queue.small_frames().is_empty() {
                    queue.segments.pop_back();
                }
                return Err(e);
            }
        };
        queue.add_payload(payload);
        if let Some(tag) = tag {
            queue.small_frames().extend_from_slice(&tag);
        }
        self.unsent.fetch_add(length, Relaxed);
        Ok(())
    }

    /// Sends the queued frames: in place if they are small and the socket is free, otherwise by the writer
    /// task. `busy`: more frames are likely soon, so let the task coalesce them.
    pub fn flush(&self, busy: bool) -> io::Result<()> {
        let taken = {
            let mut queue = self.lock();
            if queue.segments.is_empty() {
                return Ok(());
            }
            if busy || self.unsent.load(Relaxed) > INLINE_BYTES_MAX { None } else { queue.take() }
        };
        let Some((mut writer, mut batch)) = taken else {
            self.wake.notify_one();
            return Ok(());
        };
        // This poll registers no waker: bytes that cannot be sent now go to the writer task, which polls
        // again.
        let result = self.poll_write(&mut Context::from_waker(Waker::noop()), &mut writer, &mut batch);
        if self.return_writer(writer, batch) {
            self.wake.notify_one();
        }
        match result {
            Poll::Ready(done) => done,
            Poll::Pending => Ok(()),
        }
    }

    /// The writer task. Ends only with an error; aborted at the end of the connection.
    pub async fn run(&self) -> io::Error {
        loop {
            self.wake.notified().await;
            // Callers that became ready together run first: their frames are sent in one system call.
            if self.unsent.load(Relaxed) <= INLINE_BYTES_MAX {
                tokio::task::yield_now().await;
            }
            while let Some((mut writer, mut batch)) = self.take() {
                let result = std::future::poll_fn(|cx| self.poll_write(cx, &mut writer, &mut batch)).await;
                self.return_writer(writer, batch);
                if let Err(e) = result {
                    return e;
                }
            }
        }
    }

    /// Waits until the peer has read enough.
    pub async fn wait_until_writable(&self) {
        while self.unsent.load(Relaxed) > UNSENT_BYTES_MAX {
            self.drained.notified().await;
        }
    }

    /// Whether bytes wait, and how many were sent in total.
    pub fn progress(&self) -> (bool, u64) {
        (self.unsent.load(Relaxed) > 0, self.sent.load(Relaxed))
    }

    /// Drops the socket, and all frames queued later. Frames queued now are still sent, as far as the socket
    /// accepts them at once, if a write is in progress: they may contain the reason of the end.
    pub fn end(&self) {
        let mut queue = self.lock();
        queue.ended = true;
        if queue.writer.take().is_some() {
            queue.segments.clear();
        }
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn take(&self) -> Option<(BoxWriter, VecDeque<Segment>)> {
        self.lock().take()
    }

    /// Returns the socket and the unwritten bytes. True if frames wait.
    fn return_writer(&self, mut writer: BoxWriter, mut rest: VecDeque<Segment>) -> bool {
        let mut queue = self.lock();
        if queue.ended {
            rest.append(&mut queue.segments);
            drop(queue);
            // The peer gets the reason if it can be sent at once; there is no wait for it.
            let _ = self.poll_write(&mut Context::from_waker(Waker::noop()), &mut writer, &mut rest);
            return false;
        }
        assert!(queue.writer.is_none(), "two writers of one socket would mix their frames");
        queue.writer = Some(writer);
        while let Some(segment) = rest.pop_back() {
            queue.segments.push_front(segment);
        }
        !queue.segments.is_empty()
    }

    fn poll_write(
        &self,
        cx: &mut Context<'_>,
        writer: &mut BoxWriter,
        batch: &mut VecDeque<Segment>,
    ) -> Poll<io::Result<()>> {
        while !batch.is_empty() {
            let mut parts = [IoSlice::new(&[]); PARTS_MAX];
            let count = batch.iter().zip(&mut parts).map(|(s, p)| *p = IoSlice::new(s.bytes())).count();
            let n = match Pin::new(&mut *writer).poll_write_vectored(cx, &parts[..count]) {
                Poll::Ready(Ok(0)) => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                Poll::Ready(Ok(n)) => n,
                Poll::Ready(Err(e)) => return Poll::Ready(Err(e)),
                Poll::Pending => return Poll::Pending,
            };
            self.advance(batch, n);
        }
        Poll::Ready(Ok(()))
    }

    fn advance(&self, batch: &mut VecDeque<Segment>, mut n: usize) {
        self.sent.fetch_add(n as u64, Relaxed);
        let unsent = self.unsent.fetch_sub(n, Relaxed);
        assert!(unsent >= n, "more bytes were sent than were queued: the reader would wait for ever");
        if unsent > UNSENT_BYTES_MAX && unsent - n <= UNSENT_BYTES_MAX {
            self.drained.notify_one();
        }
        while n > 0 {
            let Some(first) = batch.front_mut() else { return };
            let len = first.bytes().len();
            if n < len {
                return first.advance(n);
            }
            n -= len;
            if let Some(Segment::Frames(buffer)) = batch.pop_front() {
                self.keep(buffer);
            }
        }
    }

    /// Keeps a buffer for small frames, to save the next allocation.
    fn keep(&self, mut buffer: Vec<u8>) {
        if buffer.capacity() > 2 * SMALL_FRAMES_BYTES {
            return;
        }
        buffer.clear();
        let mut queue = self.lock();
        if queue.spare.capacity() < buffer.capacity() {
            queue.spare = buffer;
        }
    }
}

impl SendKey {
    /// The payload in its form on the wire, and its tag.
    fn seal(&self, header: &Header, payload: Payload) -> (Payload, Option<Tag>) {
        let whose = Whose { kind: header.kind as u8, call: header.call };
        if let Some(tag) = self.key.tag(whose, payload.parts.iter().map(|part| &part[..])) {
            return (payload, Some(tag));
        }
        let mut copy = self.env.buffers.get(payload.len());
        let mut filled = 0;
        for part in &payload.parts {
            copy[filled..filled + part.len()].copy_from_slice(part);
            filled += part.len();
        }
        assert_eq!(filled, copy.len(), "a payload is as long as its parts");
        let tag = self.key.seal(whose, &mut copy);
        (Payload { parts: vec![copy.freeze()], crc: payload.crc }, Some(tag))
    }
}

impl Queue {
    /// Appends header and body, or nothing. Returns the number of bytes.
    fn append(&mut self, header: Header, body: &dyn Fn(&mut Writer)) -> Result<usize> {
        let buffer = self.small_frames();
        let start = buffer.len();
        let length = append(buffer, header, body)?;
        assert_eq!(buffer.len(), start + length, "a frame is as long as its header declares");
        let Some(key) = &mut self.key else { return Ok(length) };
        let Some(Segment::Frames(buffer)) = self.segments.back_mut() else {
            unreachable!("the frame was put there")
        };
        let tag = key.seal(&mut buffer[start..]);
        buffer.extend_from_slice(&tag);
        Ok(length + TAG_BYTES)
    }

    fn take(&mut self) -> Option<(BoxWriter, VecDeque<Segment>)> {
        if self.segments.is_empty() {
            return None;
        }
        let writer = self.writer.take()?;
        Some((writer, std::mem::take(&mut self.segments)))
    }

    /// The buffer for the next small frame.
    fn small_frames(&mut self) -> &mut Vec<u8> {
        let has_space =
            matches!(self.segments.back(), Some(Segment::Frames(b)) if b.len() < SMALL_FRAMES_BYTES);
        if !has_space {
            let buffer = std::mem::take(&mut self.spare);
            self.segments.push_back(Segment::Frames(buffer));
        }
        match self.segments.back_mut() {
            Some(Segment::Frames(buffer)) => buffer,
            _ => unreachable!("a buffer was put there"),
        }
    }

    fn add_payload(&mut self, payload: Payload) {
        // No segment is ever empty: a write of zero bytes looks like a closed socket.
        if payload.is_empty() {
            return;
        }
        if payload.len() <= COPY_BYTES_MAX {
            let buffer = self.small_frames();
            payload.parts.iter().for_each(|part| buffer.extend_from_slice(part));
        } else {
            let parts = payload.parts.into_iter().filter(|part| !part.is_empty());
            self.segments.extend(parts.map(Segment::Payload));
        }
    }
}

impl Segment {
    fn bytes(&self) -> &[u8] {
        match self {
            Segment::Frames(bytes) => bytes,
            Segment::Payload(bytes) => bytes,
        }
    }
    fn advance(&mut self, n: usize) {
        match self {
            Segment::Frames(bytes) => drop(bytes.drain(..n)),
            Segment::Payload(bytes) => bytes.advance(n),
        }
    }
}

/// Appends header and body, or nothing. Returns the number of bytes.
fn append(buffer: &mut Vec<u8>, mut header: Header, body: &dyn Fn(&mut Writer)) -> Result<usize> {
    let start = buffer.len();
    let mut writer = Writer { bytes: std::mem::take(buffer) };
    writer.bytes.resize(start + HEADER_BYTES, 0);
    body(&mut writer);
    *buffer = writer.bytes;
    assert!(buffer.len() >= start + HEADER_BYTES, "the encoder of a body removed bytes of earlier frames");
    let body_len = buffer.len() - start - HEADER_BYTES;
    header.body_len = u32::try_from(body_len).unwrap_or(u32::MAX);
    if let Err(e) = header.check_sizes() {
        buffer.truncate(start);
        return Err(e);
    }
    let (head, body) = buffer[start..].split_at_mut(HEADER_BYTES);
    head.copy_from_slice(&header.encode(body));
    Ok(HEADER_BYTES + body_len)
}
