//! The receiving side of a connection: bytes become frames.
//!
//! One buffered read fetches many small frames; a payload is read directly into a pooled aligned buffer, and
//! its checksum is computed while the bytes are still in the cache. The peer's bytes are hostile until they
//! are checked.
use bytes::Bytes;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use weir_env::{BoxReader, Env};
use weir_proto::checksum::crc32c_append;
use weir_proto::frame::{self, HEADER_BYTES, Header};
use weir_proto::{Error, Result};
use weir_trust::frames::{FrameKey, PayloadKey, TAG_BYTES, Tag, Whose};
use weir_trust::handshake::{FIRST_BYTE, RECORD_HEADER_BYTES, record_len};

/// Enough for hundreds of small frames; of a large payload only this much is copied.
const BUFFER_BYTES: usize = 32 << 10;
/// The initial buffer of a connection: most are idle, and an unknown peer must cost little.
const BUFFER_BYTES_MIN: usize = 2 << 10;
/// Bytes of frames that do not fit into a buffer and have not arrived completely, of all connections of one
/// server: eight of the largest payloads. Arriving takes milliseconds; peers that begin frames and do not
/// complete them get no more memory.
const ARRIVING_BYTES_MAX: usize = 64 << 20;
/// They are counted in units of this.
const ARRIVING_UNIT: usize = 4 << 10;
/// How long such a frame may take: 8 MiB at 1 Mb/s; no caller waits longer.
const FRAME_PATIENCE: Duration = Duration::from_secs(60);

/// Memory for large incoming frames, shared by the connections of a server.
#[derive(Clone)]
pub(crate) struct Arriving(Arc<Semaphore>);

impl Arriving {
    pub fn new() -> Arriving {
        Arriving(Arc::new(Semaphore::new(ARRIVING_BYTES_MAX / ARRIVING_UNIT)))
    }
    async fn reserve(&self, len: usize) -> Option<OwnedSemaphorePermit> {
        let units = len.div_ceil(ARRIVING_UNIT).min(ARRIVING_BYTES_MAX / ARRIVING_UNIT) as u32;
        self.0.clone().acquire_many_owned(units).await.ok() // never closed
    }
}

pub(crate) struct Incoming {
    reader: BoxReader,
    env: Env,
    arriving: Arriving,
    /// Protocol version, once agreed on: all frames carry it from then on.
    version: Option<u16>,
    /// For a connection over a network between nodes that have certificates.
    key: Option<ReceiveKey>,
    buffer: Box<[u8]>,
    /// The last read filled the buffer.
    full: bool,
    /// Received and unread bytes: `buffer[start..end]`.
    start: usize,
    end: usize,
    /// Reads that returned bytes, for the watch task.
    reads: std::sync::Arc<AtomicU64>,
}

struct ReceiveKey {
    frames: FrameKey,
    payloads: PayloadKey,
}

/// The next item before keys are agreed on.
pub(crate) enum Begin {
    /// A record of a handshake.
    Handshake(Vec<u8>),
    /// An unprotected frame, which is not consumed yet.
    Frame,
}

pub(crate) struct Frame {
    pub header: Header,
    pub body: Bytes,
    /// `Damaged` if it fails its checksum; the stream continues after it.
    pub payload: Result<Bytes>,
}

impl Incoming {
    pub fn new(env: &Env, reader: BoxReader, arriving: Arriving) -> Incoming {
        let buffer = vec![0; BUFFER_BYTES_MIN].into_boxed_slice();
        let reads = Default::default();
        let env = env.clone();
        Incoming {
            reader,
            env,
            arriving,
            version: None,
            key: None,
            buffer,
            full: false,
            start: 0,
            end: 0,
            reads,
        }
    }
    /// Protects frames from the next one on.
    pub fn protect(&mut self, frames: FrameKey) {
        self.key = Some(ReceiveKey { payloads: frames.payloads(), frames });
    }
    pub fn agree(&mut self, version: u16) {
        self.version = Some(version);
    }
    pub fn reads(&self) -> std::sync::Arc<AtomicU64> {
        self.reads.clone()
    }
    /// The stream, for other users. An error: bytes that it had sent before it was asked for anything.
    pub fn into_reader(self) -> Result<BoxReader> {
        match self.end - self.start {
            0 => Ok(self.reader),
            n => Err(Error::invalid(format!("{n} bytes came before their time"))),
        }
    }
    /// A complete header is buffered: the next one can be read without waiting.
    pub fn has_header(&self) -> bool {
        self.end - self.start >= HEADER_BYTES
    }

    /// The peer's first or next message before the two have agreed on keys.
    pub async fn begin(&mut self) -> Result<Begin> {
        while self.start == self.end {
            if self.fill().await? == 0 {
                return Err(Error::unavailable("the peer closed the connection before its hello"));
            }
        }
        match self.buffer[self.start] == frame::MAGIC[0] {
            true => Ok(Begin::Frame),
            false => self.record().await.map(Begin::Handshake),
        }
    }

    /// The next record of a handshake, with its header.
    pub async fn record(&mut self) -> Result<Vec<u8>> {
        let mut record = self.exactly(RECORD_HEADER_BYTES).await?;
        let header: &[u8; RECORD_HEADER_BYTES] = record.first_chunk().expect("as long as asked");
        let len = record_len(header)?;
        record.extend(self.exactly(len).await?);
        Ok(record)
    }

    /// The next header; its body and payload are not read yet. `None`: the peer closed the stream between
    /// frames.
    pub async fn header(&mut self) -> Result<Option<(Header, [u8; HEADER_BYTES])>> {
        while !self.has_header() {
            if self.fill().await? == 0 {
                return match self.end - self.start {
                    0 => Ok(None),
                    n => Err(truncated(format_args!("{n} bytes into a header"))),
                };
            }
            // Garbage is refused by its first bytes, before a whole header has arrived.
            let n = (self.end - self.start).min(frame::MAGIC.len());
            if self.buffer[self.start..self.start + n] != frame::MAGIC[..n] {
                return Err(not_a_frame(&self.buffer[self.start..self.start + n]));
            }
        }
        let bytes = &self.buffer[self.start..self.start + HEADER_BYTES];
        let bytes: [u8; HEADER_BYTES] = bytes.try_into().expect("as long as asked");
        self.start += HEADER_BYTES;
        let header = Header::decode(&bytes)?;
        self.version.map_or(Ok(()), |agreed| header.check_version(agreed))?;
        Ok(Some((header, bytes)))
    }

    /// Body and payload of the frame with this header.
    pub async fn rest(&mut self, header: Header, bytes: &[u8; HEADER_BYTES]) -> Result<Frame> {
        let (body_len, payload_len) = (header.body_len as usize, header.payload_len as usize);
        if body_len.max(payload_len) <= BUFFER_BYTES {
            return self.receive(header, bytes).await;
        }
        let _reserved = self.arriving.reserve(body_len + payload_len).await;
        let clock = self.env.clock.clone();
        let received = clock.timeout(FRAME_PATIENCE, self.receive(header, bytes)).await;
        received.unwrap_or_else(|_| {
            let (n, s) = (body_len + payload_len, FRAME_PATIENCE.as_secs());
            Err(Error::unavailable(format!("a frame of {n} bytes did not arrive within {s} s")))
        })
    }

    async fn receive(&mut self, header: Header, bytes: &[u8; HEADER_BYTES]) -> Result<Frame> {
        let (header, body) = match self.key {
            None => {
                let body = self.exactly(header.body_len as usize).await?;
                frame::verify(bytes, &body)?;
                (header, Bytes::from(body))
            }
            Some(_) => self.protected(header, bytes).await?,
        };
        let payload = match header.payload_len {
            0 => Ok(Bytes::new()),
            _ => self.payload(&header).await?,
        };
        Ok(Frame { header, body, payload })
    }

    /// Header and body in clear text: the received ones may be encrypted, except for the fields with the
    /// lengths.
    async fn protected(&mut self, header: Header, bytes: &[u8; HEADER_BYTES]) -> Result<(Header, Bytes)> {
        let mut frame = vec![0; HEADER_BYTES + header.body_len as usize];
        frame[..HEADER_BYTES].copy_from_slice(bytes);
        self.read_exactly(&mut frame[HEADER_BYTES..]).await?;
        let tag = self.tag().await?;
        if let Some(key) = &mut self.key {
            key.frames.open(&mut frame, &tag)?;
        }
        let header = Header::decode(frame.first_chunk().expect("it begins with its header"))?;
        Ok((header, Bytes::from(frame).slice(HEADER_BYTES..)))
    }

    async fn tag(&mut self) -> Result<Tag> {
        let mut tag = [0; TAG_BYTES];
        self.read_exactly(&mut tag).await?;
        Ok(tag)
    }

    /// Reads this number of bytes. Small reads go through the buffer: more bytes may follow.
    async fn exactly(&mut self, len: usize) -> Result<Vec<u8>> {
        let mut bytes = vec![0; len];
        self.read_exactly(&mut bytes).await?;
        Ok(bytes)
    }

    async fn read_exactly(&mut self, to: &mut [u8]) -> Result<()> {
        let len = to.len();
        if len <= self.buffer.len() {
            while self.end - self.start < len {
                if self.fill().await? == 0 {
                    return Err(truncated(format_args!("in a body of {len} bytes")));
                }
            }
        }
        let mut filled = self.take_buffered(to);
        while filled < len {
            filled += self.read_into(&mut to[filled..]).await?;
        }
        Ok(())
    }

    async fn payload(&mut self, header: &Header) -> Result<Result<Bytes>> {
        let (len, crc_sent) = (header.payload_len as usize, header.payload_crc);
        let whose = Whose { kind: header.kind as u8, call: header.call };
        let mut check = self.key.as_ref().map(|key| key.payloads.check(whose));
        let is_encrypted = self.key.as_ref().is_some_and(|key| key.payloads.encrypts());
        let mut payload = self.env.buffers.get(len);
        let (mut filled, mut crc) = (0, 0);
        while filled < len {
            let n = match self.end - self.start {
                0 => self.read_into(&mut payload[filled..]).await?,
                _ => self.take_buffered(&mut payload[filled..]),
            };
            let arrived = &payload[filled..filled + n];
            if !is_encrypted {
                crc = crc32c_append(crc, arrived);
            }
            if let Some(check) = &mut check {
                check.arrived(arrived);
            }
            filled += n;
        }
        assert_eq!(filled, len, "bytes of the next frame were taken for the payload");
        if let Some(check) = check {
            let tag = self.tag().await?;
            check.finish(&mut payload, &tag)?;
        }
        // Even if the tag is valid: a target sends the bytes on its disk with the checksum from when they
        // were written, and only the receiver detects a bit that has flipped there.
        if is_encrypted {
            crc = crc32c_append(0, &payload);
        }
        if crc == crc_sent {
            return Ok(Ok(payload.freeze()));
        }
        Ok(Err(Error::damaged(format!(
            "payload of {len} bytes fails its checksum: {crc_sent:08x} was sent, {crc:08x} arrived"
        ))))
    }

    fn take_buffered(&mut self, to: &mut [u8]) -> usize {
        assert!(
            self.start <= self.end && self.end <= self.buffer.len(),
            "unread bytes are outside of the buffer"
        );
        let n = to.len().min(self.end - self.start);
        to[..n].copy_from_slice(&self.buffer[self.start..self.start + n]);
        self.start += n;
        n
    }

    /// Reads past the buffer, which is empty.
    async fn read_into(&mut self, to: &mut [u8]) -> Result<usize> {
        assert_eq!(self.start, self.end, "buffered bytes come before those that are in the socket");
        let wanted = to.len();
        match read(&mut self.reader, to, &self.reads).await? {
            0 => Err(truncated(format_args!("{wanted} bytes before the end of a frame"))),
            n => Ok(n),
        }
    }

    /// Appends to the bytes in the buffer; 0 at the end of the stream.
    async fn fill(&mut self) -> Result<usize> {
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
            if self.full && self.buffer.len() < BUFFER_BYTES {
                self.buffer = vec![0; BUFFER_BYTES].into_boxed_slice();
            }
        } else if self.start > 0 && self.end == self.buffer.len() {
            self.buffer.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        assert!(
            self.end < self.buffer.len(),
            "a read into a full buffer would look like the end of the stream"
        );
        let n = read(&mut self.reader, &mut self.buffer[self.end..], &self.reads).await?;
        self.end += n;
        self.full = self.end == self.buffer.len();
        Ok(n)
    }
}

async fn read(
    reader: &mut (impl AsyncRead + Unpin + ?Sized),
    to: &mut [u8],
    reads: &AtomicU64,
) -> Result<usize> {
    let n = reader.read(to).await.map_err(|e| lost(&e))?;
    reads.fetch_add(1, Relaxed);
    Ok(n)
}

/// For a caller any error of the machine means that the peer cannot be reached.
pub(crate) fn lost(e: &std::io::Error) -> Error {
    Error::unavailable(format!("connection lost: {e}"))
}

fn not_a_frame(seen: &[u8]) -> Error {
    match seen.first() {
        Some(&FIRST_BYTE) => Error::unsupported("the peer shows a certificate, and this node has none")
            .hint("join this node to the cluster, too (`weir join`)"),
        _ => Error::invalid(format!("not a Weir peer: a frame begins with {seen:02x?}")),
    }
}

fn truncated(at: std::fmt::Arguments<'_>) -> Error {
    Error::unavailable(format!("connection lost: the stream ended {at}"))
}
