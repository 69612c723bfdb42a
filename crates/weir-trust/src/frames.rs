//! Protection of frames on a connection whose ends share a secret: authentication tags, and encryption.
//!
//! A frame is a header, a body and a payload. One tag covers header and body, under a number that both ends
//! count; so a frame that is forged, dropped, repeated or out of order ends the connection. The payload has a
//! separate tag, under its call's number. When the suite encrypts, the first bytes of the header stay
//! readable: they have the length of the frame. Only this file knows which library does the arithmetic. Pure.
use aegis::aegis128x2::{Aegis128X2, Aegis128X2Mac};
use ring::aead::{AES_128_GCM, Aad, LessSafeKey, Nonce, UnboundKey};
use std::sync::Arc;
use weir_proto::{Error, Result};

pub const TAG_BYTES: usize = 16;
/// The readable part of a header: the kind and the lengths of the frame.
pub const CLEAR_BYTES: usize = 20;
pub const KEY_BYTES: usize = 16;

pub type Tag = [u8; TAG_BYTES];

/// The protection of a connection.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Suite {
    /// Tags, nothing is encrypted: AEGIS-128X2.
    Integrity,
    /// Encryption and tags: AEGIS-128X2.
    Encryption,
    /// Encryption and tags: AES-128-GCM, for sites that may use nothing else.
    Aes,
}

impl Suite {
    pub const ALL: [Suite; 3] = [Suite::Integrity, Suite::Encryption, Suite::Aes];
    /// Its name in the negotiation, with the version of the scheme.
    pub fn protocol(self) -> &'static str {
        match self {
            Suite::Integrity => "weir/1 mac-aegis128x2",
            Suite::Encryption => "weir/1 aegis128x2",
            Suite::Aes => "weir/1 aes128gcm",
        }
    }
    pub fn find(protocol: &[u8]) -> Option<Suite> {
        Suite::ALL.into_iter().find(|suite| suite.protocol().as_bytes() == protocol)
    }
    pub fn encrypts(self) -> bool {
        self != Suite::Integrity
    }
}

/// The nonce of a protected item; never reused with one key.
#[derive(Clone, Copy)]
struct Number {
    kind: u8,
    number: u64,
}

impl Number {
    fn bytes<const N: usize>(self) -> [u8; N] {
        let mut bytes = [0; N];
        bytes[0] = self.kind;
        bytes[N - 8..].copy_from_slice(&self.number.to_le_bytes());
        bytes
    }
}

enum Cipher {
    Integrity([u8; KEY_BYTES]),
    Encryption([u8; KEY_BYTES]),
    Aes(Box<LessSafeKey>),
}

impl Cipher {
    fn new(suite: Suite, key: &[u8; KEY_BYTES]) -> Cipher {
        match suite {
            Suite::Integrity => Cipher::Integrity(*key),
            Suite::Encryption => Cipher::Encryption(*key),
            Suite::Aes => {
                let key = UnboundKey::new(&AES_128_GCM, key).expect("the key is as long as AES-128 takes it");
                Cipher::Aes(Box::new(LessSafeKey::new(key)))
            }
        }
    }
    fn seal(&self, number: Number, clear: &[u8], rest: &mut [u8]) -> Tag {
        match self {
            Cipher::Integrity(key) => mac(key, number, [clear, rest].into_iter()).finalize(),
            Cipher::Encryption(key) => {
                Aegis128X2::<TAG_BYTES>::new(key, &number.bytes()).encrypt_in_place(rest, clear)
            }
            Cipher::Aes(key) => {
                let nonce = Nonce::assume_unique_for_key(number.bytes());
                let tag = key.seal_in_place_separate_tag(nonce, Aad::from(clear), rest);
                let tag = tag.expect("a frame is shorter than what AES-GCM takes");
                tag.as_ref().try_into().expect("a tag of AES-GCM has 16 bytes")
            }
        }
    }
    #[must_use]
    fn open(&self, number: Number, clear: &[u8], rest: &mut [u8], tag: &Tag) -> bool {
        match self {
            Cipher::Integrity(key) => mac(key, number, [clear, &*rest].into_iter()).verify(tag).is_ok(),
            Cipher::Encryption(key) => {
                Aegis128X2::<TAG_BYTES>::new(key, &number.bytes()).decrypt_in_place(rest, tag, clear).is_ok()
            }
            Cipher::Aes(key) => {
                let nonce = Nonce::assume_unique_for_key(number.bytes());
                key.open_in_place_separate_tag(nonce, Aad::from(clear), (*tag).into(), rest, 0..).is_ok()
            }
        }
    }
}

fn mac<'a>(
    key: &[u8; KEY_BYTES],
    number: Number,
    parts: impl Iterator<Item = &'a [u8]>,
) -> Aegis128X2Mac<TAG_BYTES> {
    let mut mac = Aegis128X2Mac::new_with_nonce(key, &number.bytes());
    parts.for_each(|part| mac.update(part));
    mac
}

/// Protects the frames of one direction, one after the other.
pub struct FrameKey {
    cipher: Arc<Cipher>,
    count: u64,
}

impl FrameKey {
    pub fn new(suite: Suite, key: &[u8; KEY_BYTES]) -> FrameKey {
        FrameKey { cipher: Arc::new(Cipher::new(suite, key)), count: 0 }
    }
    /// For payloads, which are not protected in the order in which they are sent.
    pub fn payloads(&self) -> PayloadKey {
        PayloadKey(self.cipher.clone())
    }
    fn next(&mut self) -> Number {
        self.count += 1;
        Number { kind: 0, number: self.count }
    }
    /// Protects the next frame, header and body; the tag is sent after it.
    pub fn seal(&mut self, frame: &mut [u8]) -> Tag {
        let number = self.next();
        let (clear, rest) = frame.split_at_mut(CLEAR_BYTES);
        self.cipher.seal(number, clear, rest)
    }
    /// Verifies the next received frame. `Damaged` if it is not the one that the other end sent next.
    pub fn open(&mut self, frame: &mut [u8], tag: &Tag) -> Result<()> {
        let number = self.next();
        let (clear, rest) = frame.split_at_mut(CLEAR_BYTES);
        match self.cipher.open(number, clear, rest, tag) {
            true => Ok(()),
            false => Err(Error::damaged(format!(
                "frame {} of the connection is not what the peer sent",
                self.count
            ))),
        }
    }
}

/// Protects the payloads of one direction. Clones share the key.
#[derive(Clone)]
pub struct PayloadKey(Arc<Cipher>);

/// Identifies a payload. Each is used once in a connection.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Whose {
    /// The frame's kind, as in its header; not 0.
    pub kind: u8,
    pub call: u64,
}

impl Whose {
    fn number(self) -> Number {
        Number { kind: self.kind, number: self.call }
    }
}

impl PayloadKey {
    pub fn encrypts(&self) -> bool {
        !matches!(*self.0, Cipher::Integrity(_))
    }
    /// The tag of a payload, which is encrypted in place if the suite encrypts.
    pub fn seal(&self, whose: Whose, payload: &mut [u8]) -> Tag {
        self.0.seal(whose.number(), &[], payload)
    }
    /// The tag of a payload that is sent without a copy, in parts; none: the suite encrypts.
    pub fn tag<'a>(&self, whose: Whose, parts: impl Iterator<Item = &'a [u8]>) -> Option<Tag> {
        match &*self.0 {
            Cipher::Integrity(key) => Some(mac(key, whose.number(), parts).finalize()),
            Cipher::Encryption(_) | Cipher::Aes(_) => None,
        }
    }
    /// For a payload that arrives in parts.
    pub fn check(&self, whose: Whose) -> PayloadCheck {
        let mac = match &*self.0 {
            Cipher::Integrity(key) => Some(mac(key, whose.number(), std::iter::empty())),
            Cipher::Encryption(_) | Cipher::Aes(_) => None,
        };
        PayloadCheck { key: self.clone(), whose, mac }
    }
}

/// A payload that is being received.
pub struct PayloadCheck {
    key: PayloadKey,
    whose: Whose,
    mac: Option<Aegis128X2Mac<TAG_BYTES>>,
}

impl PayloadCheck {
    /// Adds the next bytes, while they are in the processor's cache.
    pub fn arrived(&mut self, bytes: &[u8]) {
        if let Some(mac) = &mut self.mac {
            mac.update(bytes);
        }
    }
    /// Verifies the whole payload, and decrypts it in place. `Damaged` if it is not what the other end sent.
    pub fn finish(self, payload: &mut [u8], tag: &Tag) -> Result<()> {
        let is_right = match self.mac {
            Some(mac) => mac.verify(tag).is_ok(),
            None => self.key.0.open(self.whose.number(), &[], payload, tag),
        };
        match is_right {
            true => Ok(()),
            false => Err(Error::damaged(format!(
                "the payload of call {} is not what the peer sent",
                self.whose.call
            ))),
        }
    }
}

/// The keys of both directions of a connection, at one end.
pub struct Keys {
    pub suite: Suite,
    pub send: FrameKey,
    pub receive: FrameKey,
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: [u8; KEY_BYTES] = *b"sixteen bytes k.";

    fn frame() -> Vec<u8> {
        (0..100).collect()
    }

    #[test]
    fn frames_arrive_as_they_were_sent_and_in_order() {
        for suite in Suite::ALL {
            let (mut sender, mut receiver) = (FrameKey::new(suite, &KEY), FrameKey::new(suite, &KEY));
            for _ in 0..3 {
                let mut sent = frame();
                let tag = sender.seal(&mut sent);
                assert_eq!(sent[..CLEAR_BYTES], frame()[..CLEAR_BYTES], "{suite:?}");
                assert_eq!(sent == frame(), !suite.encrypts(), "{suite:?}");
                receiver.open(&mut sent, &tag).unwrap();
                assert_eq!(sent, frame(), "{suite:?}");
            }
        }
    }

    #[test]
    fn a_frame_that_is_changed_repeated_or_left_out_is_refused() {
        for suite in Suite::ALL {
            let mut sender = FrameKey::new(suite, &KEY);
            let mut sent: Vec<(Vec<u8>, Tag)> = Vec::new();
            for _ in 0..2 {
                let mut frame = frame();
                let tag = sender.seal(&mut frame);
                sent.push((frame, tag));
            }
            let (first, second) = (sent[0].clone(), sent[1].clone());
            for bit in 0..8 * first.0.len() {
                let mut forged = first.0.clone();
                forged[bit / 8] ^= 1 << (bit % 8);
                assert!(
                    FrameKey::new(suite, &KEY).open(&mut forged, &first.1).is_err(),
                    "{suite:?} bit {bit}"
                );
            }
            for bit in 0..8 * TAG_BYTES {
                let (mut frame, mut tag) = first.clone();
                tag[bit / 8] ^= 1 << (bit % 8);
                assert!(
                    FrameKey::new(suite, &KEY).open(&mut frame, &tag).is_err(),
                    "{suite:?} tag bit {bit}"
                );
            }
            let mut receiver = FrameKey::new(suite, &KEY);
            receiver.open(&mut first.0.clone(), &first.1).unwrap();
            assert!(receiver.open(&mut first.0.clone(), &first.1).is_err(), "{suite:?} repeated");
            assert!(
                FrameKey::new(suite, &KEY).open(&mut second.0.clone(), &second.1).is_err(),
                "{suite:?} left out"
            );
            let other = FrameKey::new(suite, b"another sixteen!").open(&mut first.0.clone(), &first.1);
            assert!(other.is_err(), "{suite:?}: another key");
        }
    }

    #[test]
    fn a_payload_belongs_to_its_call() {
        let data: Vec<u8> = (0..=255).cycle().take(10_000).collect();
        for suite in Suite::ALL {
            let key = FrameKey::new(suite, &KEY).payloads();
            let whose = Whose { kind: 3, call: 7 };
            let mut sent = data.clone();
            let tag = key.seal(whose, &mut sent);
            assert_eq!(sent == data, !suite.encrypts());
            if let Some(of_parts) = key.tag(whose, data.chunks(999)) {
                assert_eq!(of_parts, tag);
            }
            let receive = |whose, bytes: &[u8]| {
                let (mut check, mut payload) = (key.check(whose), bytes.to_vec());
                bytes.chunks(333).for_each(|part| check.arrived(part));
                check.finish(&mut payload, &tag).map(|()| payload)
            };
            assert_eq!(receive(whose, &sent), Ok(data.clone()), "{suite:?}");
            assert!(receive(Whose { kind: 4, call: 7 }, &sent).is_err(), "{suite:?}");
            assert!(receive(Whose { kind: 3, call: 8 }, &sent).is_err(), "{suite:?}");
            assert!(receive(whose, &sent[1..]).is_err(), "{suite:?}");
            sent[5000] ^= 1;
            assert!(receive(whose, &sent).is_err(), "{suite:?}");
        }
    }

    #[test]
    fn suites_are_found_by_their_protocol() {
        for suite in Suite::ALL {
            assert_eq!(Suite::find(suite.protocol().as_bytes()), Some(suite));
        }
        assert_eq!(Suite::find(b"h2"), None);
    }
}
