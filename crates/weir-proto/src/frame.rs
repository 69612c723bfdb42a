//! The frame: the unit of transfer on a connection between two nodes. `docs/protocol.md` draws it.
//!
//! A fixed header of 64 bytes, an encoded body, a payload. The header's checksum covers the header and the
//! body, the payload has its own, so that a damaged payload fails one call and a damaged header ends the
//! connection. Lengths are checked against their limits before memory is allocated for them. Knows no method
//! and no connection.
use crate::checksum::{crc32c, crc32c_append};
use crate::data::PAYLOAD_MAX;
use crate::version::VERSION_MAX;
use crate::{ClusterId, Error, ErrorKind, Reader, Result, Wire, map::Role, message};

/// "WEIR" as bytes.
pub const MAGIC: [u8; 4] = *b"WEIR";
/// The version in frames before one is agreed on. The layout of the header, and of a `Hello` of this version,
/// never changes: otherwise two ends could not negotiate a version.
pub const VERSION_OF_HELLO: u16 = 1;
pub const HEADER_BYTES: usize = 64;
/// The largest encoded body: a cluster map or a page of a directory, with room to grow.
pub const BODY_MAX: u32 = 1 << 20;
/// The largest body of a frame before the handshake is complete.
pub const HELLO_BODY_MAX: u32 = 4096;

crate::wire_enum!(
    /// The kind of a frame.
    FrameKind {
        /// The caller's first frame; body [`Hello`].
        Hello = 1,
        /// The listener's answer; body [`Hello`]. A refusal is an `ErrorResponse`.
        HelloAck = 2,
        Request = 3,
        Response = 4,
        /// Body: an [`Error`].
        ErrorResponse = 5,
        /// The caller no longer waits for the call.
        Cancel = 6,
        /// A keep-alive. Flag `FLAG_ECHO` requests one in return, with the same call and body.
        Ping = 7,
        /// The sender closes after this; body: an [`Error`] with the reason.
        Goodbye = 8,
        /// The first frame of a caller that means another node; body [`Through`]. The listener answers with
        /// one without body when it is connected to that node; from then on it passes bytes on, which begin
        /// with a handshake and hellos of the two ends.
        Through = 9,
    }
);

/// On a `Ping`: answer with a ping.
pub const FLAG_ECHO: u8 = 1;

message!(
    /// Introduces the sender. The first body in each direction.
    Hello {
        version_min: u16,
        version_max: u16,
        /// The highest level that the sender supports.
        level: u16,
        /// `None`: the sender is not a member yet.
        cluster: Option<ClusterId>,
        /// The node's name, for messages.
        name: String,
        role: Role,
        /// Differs after each start of the process.
        instance: u64,
    }
);

message!(
    /// Names the caller, and the node that it means.
    Through { hello: Hello, node: String }
);

impl Hello {
    /// Decodes a received one: a program with newer versions may append fields that are unknown here.
    pub fn read(body: &[u8]) -> Result<Hello> {
        let mut r = Reader::new(body);
        let hello = Hello::decode(&mut r)?;
        match hello.version_max > VERSION_MAX {
            true => Ok(hello),
            false => r.finish().map(|()| hello),
        }
    }
}

/// The header's fields, without those that follow from others.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Header {
    pub version: u16,
    pub kind: FrameKind,
    pub flags: u8,
    pub method: u16,
    pub body_len: u32,
    pub payload_len: u32,
    /// CRC32C of the payload; 0 without one.
    pub payload_crc: u32,
    /// Chosen by the caller, never reused on the same connection; the reply carries it.
    pub call: u64,
    /// On a `Request`: how long the caller still waits, in milliseconds. On an `ErrorResponse`: how long it
    /// should pause ([`ErrorKind::Busy`]), 0 for other errors.
    pub patience_ms: u32,
}

impl Header {
    pub fn new(kind: FrameKind, call: u64) -> Header {
        Header {
            version: VERSION_OF_HELLO,
            kind,
            flags: 0,
            method: 0,
            body_len: 0,
            payload_len: 0,
            payload_crc: 0,
            call,
            patience_ms: 0,
        }
    }

    /// The header of an `ErrorResponse` with this error.
    pub fn of_error(call: u64, error: &Error) -> Header {
        let patience_ms = match error.kind {
            ErrorKind::Busy { wait_ms } => wait_ms,
            _ => 0,
        };
        Header { patience_ms, ..Header::new(FrameKind::ErrorResponse, call) }
    }
    /// The error of an `ErrorResponse` whose body has `error`.
    pub fn error(&self, error: Error) -> Error {
        match (error.kind, self.patience_ms) {
            (ErrorKind::Unavailable, 1..) => error.of_kind(ErrorKind::Busy { wait_ms: self.patience_ms }),
            _ => error,
        }
    }

    /// The header for its body. `body_len` must be the length of `body`.
    pub fn encode(&self, body: &[u8]) -> [u8; HEADER_BYTES] {
        assert_eq!(body.len(), self.body_len as usize);
        let mut b = [0; HEADER_BYTES];
        b[0..4].copy_from_slice(&MAGIC);
        b[4..6].copy_from_slice(&self.version.to_le_bytes());
        b[6] = self.kind as u8;
        b[7] = self.flags;
        b[8..10].copy_from_slice(&self.method.to_le_bytes());
        b[12..16].copy_from_slice(&self.body_len.to_le_bytes());
        b[16..20].copy_from_slice(&self.payload_len.to_le_bytes());
        b[20..24].copy_from_slice(&self.payload_crc.to_le_bytes());
        b[24..32].copy_from_slice(&self.call.to_le_bytes());
        b[32..36].copy_from_slice(&self.patience_ms.to_le_bytes());
        let crc = checksum(&b, body);
        b[CRC_AT..].copy_from_slice(&crc.to_le_bytes());
        b
    }

    /// The fields, with their ranges checked except for the version: [`Header::check_version`]. [`verify`]
    /// checks the checksum when the body has arrived.
    pub fn decode(b: &[u8; HEADER_BYTES]) -> Result<Header> {
        if b[0..4] != MAGIC {
            return Err(Error::invalid(format!("not a Weir peer: a frame begins with {:02x?}", &b[0..4])));
        }
        let mut kind = crate::Reader::new(&b[6..7]);
        let header = Header {
            version: u16::from_le_bytes([b[4], b[5]]),
            kind: crate::Wire::decode(&mut kind)?,
            flags: b[7],
            method: u16::from_le_bytes([b[8], b[9]]),
            body_len: u32_at(b, 12),
            payload_len: u32_at(b, 16),
            payload_crc: u32_at(b, 20),
            call: u64::from_le_bytes([b[24], b[25], b[26], b[27], b[28], b[29], b[30], b[31]]),
            patience_ms: u32_at(b, 32),
        };
        header.check_sizes()?;
        Ok(header)
    }

    /// Refuses a frame whose version is not the agreed one.
    pub fn check_version(&self, agreed: u16) -> Result<()> {
        match self.version == agreed {
            true => Ok(()),
            false => Err(Error::unsupported(format!(
                "a frame of protocol version {}, and version {agreed} was agreed on",
                self.version
            ))),
        }
    }

    /// Refuses a body or payload that is too long for the kind of frame.
    pub fn check_sizes(&self) -> Result<()> {
        let body_max = match self.kind {
            FrameKind::Request | FrameKind::Response => BODY_MAX,
            _ => HELLO_BODY_MAX,
        };
        let payload_max = match self.kind {
            FrameKind::Request | FrameKind::Response => PAYLOAD_MAX,
            _ => 0,
        };
        if self.body_len > body_max {
            return Err(Error::invalid(format!(
                "oversize {:?} frame: a body of {} bytes, at most {body_max} are allowed",
                self.kind, self.body_len
            )));
        }
        if self.payload_len > payload_max {
            return Err(Error::invalid(format!(
                "oversize {:?} frame: a payload of {} bytes, at most {payload_max} are allowed",
                self.kind, self.payload_len
            )));
        }
        Ok(())
    }
}

/// Checks the checksum over header and body.
pub fn verify(header: &[u8; HEADER_BYTES], body: &[u8]) -> Result<()> {
    match (u32_at(header, CRC_AT), checksum(header, body)) {
        (sent, found) if sent == found => Ok(()),
        (sent, found) => Err(Error::damaged(format!(
            "frame header fails its checksum: {sent:08x} was sent, {found:08x} arrived"
        ))),
    }
}

/// Whether two nodes may connect, and in which version; the error is for both of them.
pub fn check_hello(ours: &Hello, theirs: &Hello) -> Result<u16> {
    let version = agree(ours, theirs)?;
    match (theirs.cluster, ours.cluster) {
        (Some(a), Some(b)) if a != b => {
            Err(Error::denied(format!("{} belongs to cluster {a}, this node to cluster {b}", theirs.name)))
        }
        _ => Ok(version),
    }
}

/// The version for two nodes; the error is for both of them.
fn agree(ours: &Hello, theirs: &Hello) -> Result<u16> {
    let version = ours.version_max.min(theirs.version_max);
    if version >= ours.version_min.max(theirs.version_min) {
        return Ok(version);
    }
    let older = if ours.version_max < theirs.version_max { ours } else { theirs };
    Err(Error::unsupported(format!(
        "no protocol version in common: {} speaks {}, {} speaks {}",
        theirs.name,
        range(theirs.version_min, theirs.version_max),
        ours.name,
        range(ours.version_min, ours.version_max)
    ))
    .hint(format!("upgrade the program of {}", older.name)))
}

fn range(min: u16, max: u16) -> String {
    match min == max {
        true => format!("version {min}"),
        false => format!("versions {min} to {max}"),
    }
}

/// Offset of the header's own checksum: its last field.
const CRC_AT: usize = 60;

fn checksum(header: &[u8; HEADER_BYTES], body: &[u8]) -> u32 {
    match body {
        [] => crc32c(&header[..CRC_AT]),
        body => crc32c_append(crc32c(&header[..CRC_AT]), body),
    }
}

fn u32_at(b: &[u8; HEADER_BYTES], at: usize) -> u32 {
    u32::from_le_bytes([b[at], b[at + 1], b[at + 2], b[at + 3]])
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn request() -> Header {
        Header {
            method: 220,
            body_len: 3,
            payload_len: 5,
            payload_crc: crc32c(b"bytes"),
            patience_ms: 30_000,
            ..Header::new(FrameKind::Request, 0x0102_0304_0506_0708)
        }
    }

    /// The layout never changes: this test fails when a byte of it moves.
    #[test]
    fn golden_frame() {
        let bytes = request().encode(b"abc");
        let hex: String = bytes.iter().map(|b| format!("{b:02x}")).collect();
        assert_eq!(
            hex,
            concat!(
                "57454952",
                "0100",
                "03",
                "00",
                "dc00",
                "0000",
                "03000000",
                "05000000",
                "929c6ed0",
                "0807060504030201",
                "30750000",
                "000000000000000000000000000000000000000000000000",
                "6d00d405"
            )
        );
        assert_eq!(Header::decode(&bytes).unwrap(), request());
        verify(&bytes, b"abc").unwrap();
    }

    /// An older peer reads `Unavailable`, and no pause in the header.
    #[test]
    fn golden_frame_of_a_busy_peer() {
        let busy = Error::new(ErrorKind::Busy { wait_ms: 500 }, "later");
        let body = busy.to_bytes();
        assert_eq!(Error::from_bytes(&body).unwrap(), Error::unavailable("later"));
        let header = Header { body_len: body.len() as u32, ..Header::of_error(7, &busy) };
        let bytes = header.encode(&body);
        let hex: String = bytes.iter().chain(&body).map(|b| format!("{b:02x}")).collect();
        assert_eq!(
            hex,
            concat!(
                "57454952",
                "0100",
                "05",
                "00",
                "0000",
                "0000",
                "0a000000",
                "00000000",
                "00000000",
                "0700000000000000",
                "f4010000",
                "000000000000000000000000000000000000000000000000",
                "dbd7bf9b",
                "07",
                "05000000",
                "6c61746572"
            )
        );
        let received = Header::decode(&bytes).unwrap();
        assert_eq!(received.error(Error::from_bytes(&body).unwrap()), busy);
        assert_eq!(received.error(Error::stale("later")), Error::stale("later"), "only of one kind");
        assert_eq!(Header::of_error(7, &Error::unavailable("away")).patience_ms, 0);
    }

    #[test]
    fn every_flipped_bit_is_noticed() {
        let good = request().encode(b"abc");
        for bit in 0..8 * HEADER_BYTES {
            let mut bad = good;
            bad[bit / 8] ^= 1 << (bit % 8);
            assert!(verify(&bad, b"abc").is_err(), "bit {bit}");
        }
        assert!(verify(&good, b"abd").is_err());
    }

    #[test]
    fn sizes_are_limited() {
        for bad in [
            Header { body_len: BODY_MAX + 1, ..request() },
            Header { payload_len: PAYLOAD_MAX + 1, ..request() },
            Header { body_len: HELLO_BODY_MAX + 1, ..Header::new(FrameKind::Hello, 0) },
            Header { payload_len: 1, ..Header::new(FrameKind::Ping, 0) },
        ] {
            let bytes = bad.encode(&vec![0; bad.body_len as usize]);
            let refused = Header::decode(&bytes).unwrap_err();
            assert!(refused.context.contains("oversize"), "{refused:?}");
        }
    }

    fn hello(cluster: Option<ClusterId>) -> Hello {
        let (name, role) = ("a".to_owned(), Role::Storage);
        Hello { version_min: 1, version_max: 1, level: 1, cluster, name, role, instance: 7 }
    }

    #[test]
    fn clusters_and_versions_do_not_mix() {
        let of = |n| hello(Some(ClusterId([n; 16])));
        assert_eq!(check_hello(&of(1), &of(1)), Ok(1));
        assert_eq!(check_hello(&hello(None), &of(1)), Ok(1));
        assert_eq!(check_hello(&of(1), &hello(None)), Ok(1));
        assert!(check_hello(&of(1), &of(2)).is_err());
        assert!(check_hello(&of(1), &Hello { version_min: 9, version_max: 12, ..of(1) }).is_err());
        let frame = Header { version: 2, ..request() };
        assert!(frame.check_version(2).is_ok() && frame.check_version(1).is_err());
    }

    #[test]
    fn the_highest_version_that_both_speak_is_agreed_on() {
        let speaks = |name: &str, (version_min, version_max)| {
            let name = name.to_owned();
            Hello { version_min, version_max, name, ..hello(None) }
        };
        for (ours, theirs, agreed) in [
            ((1, 1), (1, 1), Some(1)),
            ((1, 3), (2, 5), Some(3)),
            ((2, 5), (1, 3), Some(3)),
            ((1, 2), (1, 9), Some(2)),
            ((1, 2), (3, 4), None),
            ((3, 4), (1, 2), None),
        ] {
            assert_eq!(agree(&speaks("a", ours), &speaks("b", theirs)).ok(), agreed, "{ours:?} {theirs:?}");
        }
        let (old, new) = (speaks("old", (1, 1)), speaks("new", (3, 4)));
        assert_eq!(
            agree(&new, &old).unwrap_err().to_string(),
            "no protocol version in common: old speaks version 1, new speaks versions 3 to 4; hint: upgrade the \
             program of old"
        );
        assert!(agree(&old, &new).unwrap_err().to_string().ends_with("of old"));
    }

    /// Its layout never changes, either; and a newer program may append fields.
    #[test]
    fn golden_hello() {
        let hello = hello(Some(ClusterId([3; 16])));
        let bytes = hello.to_bytes();
        let expected: &[u8] = &[1, 0, 1, 0, 1, 0, 1, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3, 3];
        assert_eq!(bytes, [expected, &[1, 0, 0, 0, b'a', 3, 7, 0, 0, 0, 0, 0, 0, 0]].concat());
        assert_eq!(Hello::read(&bytes), Ok(hello.clone()));
        assert!(Hello::read(&[&bytes[..], &[1]].concat()).is_err());
        let newer = Hello { version_max: VERSION_MAX + 1, ..hello };
        assert_eq!(Hello::read(&[newer.to_bytes(), vec![1, 2, 3]].concat()), Ok(newer));
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(10_000))]
        #[test]
        fn any_header_is_decoded_or_refused(bytes: [u8; HEADER_BYTES], version in 0..3u16) {
            let mut b = bytes;
            let _ = Header::decode(&b);
            b[0..4].copy_from_slice(&MAGIC);
            b[4..6].copy_from_slice(&version.to_le_bytes());
            let _ = Header::decode(&b);
            let _ = verify(&b, &[]);
        }
    }
}
