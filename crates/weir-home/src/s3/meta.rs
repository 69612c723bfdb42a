//! Metadata of an object: kind, identity and attributes, in two headers.
//!
//! `x-amz-meta-weir`: `1 KIND MODE UID GID MTIME ATIME RDEV ID [WRITTEN]`, numbers decimal but the mode
//! octal, times in nanoseconds, the identity 32 hexadecimal digits: assigned when the entry is made and kept
//! through all later versions of the object, so that a foreign object under our key is detected. WRITTEN: the
//! ETag from before a directory above was renamed, which copies the object, and may change its ETag though
//! its bytes are the same. `x-amz-meta-weir-xattrs`: base64 of the wire layout.
use crate::{Attrs, Fault, Fingerprint, Outcome, Xattr};
use base64::{Engine, engine::general_purpose::STANDARD as BASE64};
use bytes::Bytes;
use std::fmt::Write;
use weir_proto::{
    Error, Wire,
    meta::{FileKind, Time},
};

pub(super) const META: &str = "x-amz-meta-weir";
pub(super) const META_XATTRS: &str = "x-amz-meta-weir-xattrs";
/// The service keeps 2 KiB of headers; base64 adds a third.
pub(super) const XATTR_BYTES_MAX: usize = 1200;

#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Meta {
    pub(super) kind: FileKind,
    pub(super) rdev: u32,
    pub(super) id: [u8; 16],
    pub(super) attrs: Attrs,
    /// The ETag with which its bytes were written, if it differs from the present one.
    pub(super) written: Option<String>,
}

impl Meta {
    pub(super) fn to_headers(&self) -> Outcome<Vec<(&'static str, String)>> {
        let a = &self.attrs;
        let mut text = format!(
            "1 {} {:o} {} {} {} {} {} ",
            self.kind as u8, a.mode, a.uid, a.gid, a.mtime.nanos, a.atime.nanos, self.rdev
        );
        self.id.iter().for_each(|b| write!(text, "{b:02x}").expect("a string takes everything"));
        if let Some(written) = &self.written {
            write!(text, " {written}").expect("a string takes everything");
        }
        let mut headers = vec![(META, text)];
        if !a.xattrs.is_empty() {
            let bytes = a.xattrs.to_bytes();
            if bytes.len() > XATTR_BYTES_MAX {
                return Err(Fault::Broken(Error::unsupported(format!(
                    "its extended attributes take {} bytes, and S3 keeps {XATTR_BYTES_MAX}: shorten them, or keep it \
                     in another home",
                    bytes.len()
                ))));
            }
            headers.push((META_XATTRS, BASE64.encode(bytes)));
        }
        Ok(headers)
    }

    /// None: not in our format, or damaged.
    pub(super) fn parse(text: &str, xattrs: Option<&str>) -> Option<Meta> {
        let mut words = text.split(' ');
        let mut word = || words.next();
        if word()? != "1" {
            return None;
        }
        let kind = word()?.parse::<u8>().ok()?;
        let kind = *FileKind::ALL.iter().find(|k| **k as u8 == kind)?;
        let mode = u32::from_str_radix(word()?, 8).ok()?;
        let (uid, gid) = (word()?.parse().ok()?, word()?.parse().ok()?);
        let (mtime, atime) = (Time { nanos: word()?.parse().ok()? }, Time { nanos: word()?.parse().ok()? });
        let rdev = word()?.parse().ok()?;
        let hex = word()?;
        if hex.len() != 32 || !hex.is_ascii() {
            return None;
        }
        let mut id = [0; 16];
        for (i, b) in id.iter_mut().enumerate() {
            *b = u8::from_str_radix(&hex[2 * i..2 * i + 2], 16).ok()?;
        }
        let written = word().map(str::to_owned);
        let xattrs = match xattrs {
            Some(text) => Vec::<Xattr>::from_bytes(&BASE64.decode(text).ok()?).ok()?,
            None => Vec::new(),
        };
        Some(Meta { kind, rdev, id, attrs: Attrs { mode, uid, gid, atime, mtime, xattrs }, written })
    }
}

/// An object at home.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Object {
    /// For a foreign object: synthetic, without an identity.
    pub(super) meta: Meta,
    pub(super) is_ours: bool,
    pub(super) etag: String,
    pub(super) size: u64,
}

impl Object {
    /// Metadata for a copy under another key whose new fingerprint is not reported: WRITTEN keeps the old
    /// ETag.
    pub(super) fn meta_of_copy(&self) -> Meta {
        let is_known = self.is_ours && self.meta.kind != FileKind::Directory;
        let written = is_known.then(|| self.meta.written.as_ref().unwrap_or(&self.etag).clone());
        Meta { written, ..self.meta.clone() }
    }
    pub(super) fn fingerprint(&self) -> Fingerprint {
        let kind = self.meta.kind;
        let id =
            if self.is_ours { Bytes::copy_from_slice(&self.meta.id) } else { Bytes::from(self.etag.clone()) };
        match kind {
            FileKind::Regular | FileKind::Symlink => {
                let version = Bytes::from(self.meta.written.as_ref().unwrap_or(&self.etag).clone());
                Fingerprint { kind, id, version, size: self.size, mtime: self.meta.attrs.mtime }
            }
            _ => Fingerprint { kind, id, version: Bytes::new(), size: 0, mtime: Time { nanos: 0 } },
        }
    }
}

/// While an upload is in progress, a fingerprint's version also names the upload.
pub(super) fn with_upload(fingerprint: Fingerprint, upload: Option<&str>) -> Fingerprint {
    let Some(upload) = upload else { return fingerprint };
    let version = [&fingerprint.version[..], b"\n", upload.as_bytes()].concat();
    Fingerprint { version: version.into(), ..fingerprint }
}

/// The fingerprint of the object itself, and the upload if there is one.
pub(super) fn split_upload(fingerprint: &Fingerprint) -> (Fingerprint, Option<String>) {
    match fingerprint.version.iter().position(|b| *b == b'\n') {
        Some(at) => {
            let upload = String::from_utf8_lossy(&fingerprint.version[at + 1..]).into_owned();
            (Fingerprint { version: fingerprint.version.slice(..at), ..fingerprint.clone() }, Some(upload))
        }
        None => (fingerprint.clone(), None),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn meta() -> Meta {
        let time = |nanos| Time { nanos };
        let xattrs = vec![Xattr { name: "user.x".into(), value: Bytes::from_static(b"\0\xff") }];
        let attrs =
            Attrs { mode: 0o4751, uid: 1, gid: u32::MAX, atime: time(-5), mtime: time(i64::MAX), xattrs };
        Meta { kind: FileKind::BlockDevice, rdev: 77, id: [0xab; 16], attrs, written: None }
    }

    #[test]
    fn headers_are_read_back() {
        let headers = meta().to_headers().unwrap();
        assert!(headers.iter().all(|(_, value)| value.bytes().all(|b| (b' '..0x7f).contains(&b))));
        assert_eq!(Meta::parse(&headers[0].1, Some(&headers[1].1)), Some(meta()));
        let damaged = headers[0].1.replace("ab", "ü");
        for text in ["", "2", "1 1 644", &headers[0].1[..30], &damaged] {
            assert_eq!(Meta::parse(text, None), None, "{text:?}");
        }
        assert_eq!(Meta::parse(&headers[0].1, Some("***")), None);
        let copied = Meta { written: Some("e-2".into()), ..meta() };
        let headers = copied.to_headers().unwrap();
        assert_eq!(Meta::parse(&headers[0].1, Some(&headers[1].1)), Some(copied));
    }

    #[test]
    fn attributes_that_do_not_fit_are_refused() {
        let mut meta = meta();
        meta.attrs.xattrs[0].value = vec![1; 1300].into();
        assert!(matches!(meta.to_headers(), Err(Fault::Broken(_))));
    }

    #[test]
    fn a_fingerprint_carries_its_upload() {
        let object = Object {
            meta: Meta { kind: FileKind::Regular, ..meta() },
            is_ours: true,
            etag: "e-1".into(),
            size: 9,
        };
        let fingerprint = object.fingerprint();
        assert_eq!(split_upload(&fingerprint), (fingerprint.clone(), None));
        let with = with_upload(fingerprint.clone(), Some("up/load"));
        assert_eq!(split_upload(&with), (fingerprint, Some("up/load".into())));
    }
}
