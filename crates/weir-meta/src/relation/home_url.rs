//! URLs of homes: whether one is valid, and whether two homes lie in one another.
use weir_proto::home_rule::HomeUrlParts;
use weir_proto::part::HomeRules;
use weir_proto::relation::URL_MAX;
use weir_proto::{Error, Result};

pub fn check_url(url: &str) -> Result<()> {
    if url.len() > URL_MAX {
        return Err(Error::invalid(format!("the URL of a home has {} bytes: at most {URL_MAX}", url.len())));
    }
    HomeRules::of(url)?;
    HomeUrlParts::parse(url).map(drop)
}

/// Whether one home is the other or lies in it, by their URLs.
pub(super) fn overlap(one: &str, other: &str) -> bool {
    let (one, other) = (names_of(one), names_of(other));
    one.starts_with(&other) || other.starts_with(&one)
}

/// At a service with another address, a bucket of the same name is another one.
fn names_of(url: &str) -> Vec<Vec<u8>> {
    let (place, query) = url.split_once('?').unwrap_or((url, ""));
    let at = query.split('&').find(|pair| pair.starts_with("endpoint=")).unwrap_or_default();
    let names = place.split('/').map(unescaped).flat_map(|part| {
        let names = part.split(|b| *b == b'/').map(<[u8]>::to_vec);
        names.filter(|name| !name.is_empty() && name != b".").collect::<Vec<_>>()
    });
    std::iter::once(at.as_bytes().to_vec()).chain(names).collect()
}

/// `%20` is a space.
fn unescaped(text: &str) -> Vec<u8> {
    let (mut bytes, mut rest) = (Vec::new(), text.as_bytes());
    while let [first, left @ ..] = rest {
        let hex = left.get(..2).filter(|_| *first == b'%').and_then(|hex| std::str::from_utf8(hex).ok());
        let escaped = hex.and_then(|hex| u8::from_str_radix(hex, 16).ok());
        bytes.push(escaped.unwrap_or(*first));
        rest = if escaped.is_some() { &left[2..] } else { left };
    }
    bytes
}
