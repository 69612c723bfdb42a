//! The key of a path: pure. The parts of an upload match the leader's parts.
//!
//! A name is its own key component; bytes that are not UTF-8, control characters and `%` are encoded as
//! `%XX`, so every name has exactly one key and every key of ours one name. A directory's key ends with a
//! slash.
use crate::HomePath;
pub(super) use weir_proto::part::{FIRST_PART_BYTES, part_at, part_start};

/// Longest key, in bytes (the service's limit).
pub(super) const KEY_BYTES_MAX: usize = 1024;

pub(super) fn file_key(prefix: &str, path: &HomePath) -> String {
    let mut key = prefix.to_owned();
    for name in path.names() {
        if !key.is_empty() && !key.ends_with('/') {
            key.push('/');
        }
        key.push_str(&encode(name));
    }
    key
}

/// The root's key is its prefix, possibly empty.
pub(super) fn dir_key(prefix: &str, path: &HomePath) -> String {
    let mut key = file_key(prefix, path);
    if !key.is_empty() && !key.ends_with('/') {
        key.push('/');
    }
    key
}

pub(super) fn encode(name: &[u8]) -> String {
    let mut text = String::with_capacity(name.len());
    for chunk in name.utf8_chunks() {
        for c in chunk.valid().chars() {
            if c.is_control() || c == '%' || matches!(c, '\u{fffe}' | '\u{ffff}') {
                let mut bytes = [0; 4];
                c.encode_utf8(&mut bytes).bytes().for_each(|b| text.push_str(&format!("%{b:02X}")));
            } else {
                text.push(c);
            }
        }
        chunk.invalid().iter().for_each(|b| text.push_str(&format!("%{b:02X}")));
    }
    text
}

/// None: no name has this key.
pub(super) fn decode(text: &str) -> Option<Vec<u8>> {
    let mut name = Vec::with_capacity(text.len());
    let mut bytes = text.bytes();
    while let Some(b) = bytes.next() {
        if b != b'%' {
            name.push(b);
            continue;
        }
        let hex = [bytes.next()?, bytes.next()?];
        name.push(u8::from_str_radix(std::str::from_utf8(&hex).ok()?, 16).ok()?);
    }
    (encode(&name) == text).then_some(name)
}

/// For the header with the source of a copy.
pub(super) fn url_encode(text: &str) -> String {
    let mut encoded = String::with_capacity(text.len());
    for b in text.bytes() {
        match b {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' | b'/' => {
                encoded.push(b as char)
            }
            _ => encoded.push_str(&format!("%{b:02X}")),
        }
    }
    encoded
}

/// A value of a form.
pub(super) fn form_encode(text: &str) -> String {
    url_encode(text).replace('/', "%2F")
}

/// A key of a listing with `encoding-type=url`, where a plus is a space. None: it is not UTF-8.
pub(super) fn url_decode(text: &str) -> Option<String> {
    let (mut decoded, mut rest) = (Vec::with_capacity(text.len()), text.as_bytes());
    while let [first, after @ ..] = rest {
        rest = after;
        let byte = match (first, after) {
            (b'%', [high, low, after @ ..]) if high.is_ascii_hexdigit() && low.is_ascii_hexdigit() => {
                rest = after;
                let digit = |b: u8| char::from(b).to_digit(16).map_or(0, |digit| digit as u8);
                digit(*high) << 4 | digit(*low)
            }
            (b'+', _) => b' ',
            _ => *first,
        };
        decoded.push(byte);
    }
    String::from_utf8(decoded).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_of_listings_are_decoded() {
        for (text, key) in
            [("a+b%2B", "a b+"), ("%c3%A4", "ä"), ("100%", "100%"), ("%4", "%4"), ("%zz", "%zz"), ("", "")]
        {
            assert_eq!(url_decode(text).as_deref(), Some(key), "{text}");
        }
        assert_eq!(url_decode("%FF"), None);
        let all: String = ('\u{1}'..'\u{400}').collect();
        assert_eq!(url_decode(&url_encode(&all)), Some(all));
    }
    use proptest::prelude::*;

    #[test]
    fn keys_by_table() {
        for (path, file, dir) in [
            ("", "p/", "p/"),
            ("a", "p/a", "p/a/"),
            ("a b/ü%", "p/a b/ü%25", "p/a b/ü%25/"),
            ("new\nline", "p/new%0Aline", "p/new%0Aline/"),
        ] {
            let path = HomePath::parse(path).unwrap();
            assert_eq!((&*file_key("p/", &path), &*dir_key("p/", &path)), (file, dir));
        }
        assert_eq!(file_key("", &HomePath::parse("a/b").unwrap()), "a/b");
        assert_eq!(dir_key("", &HomePath::root()), "");
        assert_eq!(encode(b"\xff\xc3"), "%FF%C3");
        assert_eq!(decode("a%41"), None, "not as we write an A");
        assert_eq!(decode("100%"), None);
    }

    proptest! {
        #[test]
        fn every_name_has_one_key(name in prop::collection::vec(any::<u8>(), 1..60)) {
            let key = encode(&name);
            prop_assert!(!key.chars().any(char::is_control));
            prop_assert_eq!(decode(&key), Some(name));
        }
    }
}
