//! A path at home: names from its root down, checked, so that no path leads outside.
//!
//! Names are bytes, as on a file system: they need not be UTF-8. The root is the empty path.
use bytes::Bytes;
use std::fmt;
use weir_proto::{Error, Reader, Result, Wire, Writer, meta::NAME_MAX};

/// Prefix of names that home reserves for itself in every directory: no entry of a volume may have such a
/// name.
pub const RESERVED: &[u8] = b".weir-home";

/// A path below the root of a home. Ordered by component: a directory comes before its entries.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct HomePath(Vec<Bytes>);

impl HomePath {
    pub fn root() -> HomePath {
        HomePath::default()
    }
    /// From names; each is checked.
    pub fn new(names: impl IntoIterator<Item = Bytes>) -> Result<HomePath> {
        let names: Vec<Bytes> = names.into_iter().collect();
        names.iter().try_for_each(|name| check(name))?;
        Ok(HomePath(names))
    }
    /// From `a/b/c`; slashes at both ends are ignored, empty names between are not.
    pub fn parse(text: impl AsRef<[u8]>) -> Result<HomePath> {
        let mut text = text.as_ref();
        while let Some(rest) = text.strip_prefix(b"/") {
            text = rest;
        }
        while let Some(rest) = text.strip_suffix(b"/") {
            text = rest;
        }
        if text.is_empty() {
            return Ok(HomePath::root());
        }
        HomePath::new(text.split(|b| *b == b'/').map(Bytes::copy_from_slice))
    }
    /// The path of `name` in this directory.
    pub fn join(&self, name: &[u8]) -> Result<HomePath> {
        check(name)?;
        let mut names = self.0.clone();
        names.push(Bytes::copy_from_slice(name));
        Ok(HomePath(names))
    }
    /// Joins a reserved name.
    pub(crate) fn join_reserved(&self, name: &[u8]) -> HomePath {
        assert!(name.starts_with(RESERVED), "an entry of a volume may have this name, too");
        let mut names = self.0.clone();
        names.push(Bytes::copy_from_slice(name));
        HomePath(names)
    }
    pub fn is_root(&self) -> bool {
        self.0.is_empty()
    }
    pub fn names(&self) -> &[Bytes] {
        &self.0
    }
    /// The last name; the root has none.
    pub fn name(&self) -> Option<&Bytes> {
        self.0.last()
    }
    /// The directory it is in; the root is in none.
    pub fn parent(&self) -> Option<HomePath> {
        let (_, above) = self.0.split_last()?;
        Some(HomePath(above.to_vec()))
    }
    /// Whether it is `other` or below it.
    pub fn is_within(&self, other: &HomePath) -> bool {
        self.0.starts_with(&other.0)
    }
    /// Whether one of the two is the other or below it.
    pub fn overlaps(&self, other: &HomePath) -> bool {
        self.is_within(other) || other.is_within(self)
    }
    /// The names with slashes between.
    pub fn to_slashed(&self) -> Vec<u8> {
        self.0.join(&b'/')
    }
}

fn check(name: &[u8]) -> Result<()> {
    let fault = match name {
        [] => "is empty",
        b"." | b".." => "leads elsewhere",
        _ if name.len() > NAME_MAX => "is longer than 255 bytes",
        _ if name.contains(&b'/') || name.contains(&0) => "contains a slash or a zero byte",
        _ if name.starts_with(RESERVED) => "is kept for the marks that weir leaves at home",
        _ => return Ok(()),
    };
    Err(Error::invalid(format!("the name \"{}\" {fault}: it cannot be used at home", name.escape_ascii())))
}

impl fmt::Display for HomePath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str("/");
        }
        self.0.iter().try_for_each(|name| match std::str::from_utf8(name) {
            Ok(text) if !text.chars().any(char::is_control) => write!(f, "/{text}"),
            _ => write!(f, "/{}", name.escape_ascii()),
        })
    }
}
impl fmt::Debug for HomePath {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self}")
    }
}

impl Wire for HomePath {
    fn encode(&self, w: &mut Writer) {
        self.0.encode(w);
    }
    fn decode(r: &mut Reader<'_>) -> Result<HomePath> {
        HomePath::new(Vec::<Bytes>::decode(r)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_that_could_lead_outside_are_refused() {
        for text in ["a/../b", "..", ".", "a//b", "a/./b", "a\0b", ".weir-home", "x/.weir-home-1"] {
            assert!(HomePath::parse(text).is_err(), "{text:?}");
        }
        assert!(HomePath::parse("x".repeat(256)).is_err());
        assert!(HomePath::root().join(b"a/b").is_err());
        assert!(HomePath::from_bytes(&vec![Bytes::from_static(b"..")].to_bytes()).is_err(), "nor by wire");
    }

    #[test]
    fn names_are_bytes_and_survive_the_wire() {
        let path = HomePath::parse(b"/d\xff/..x/ \n/").unwrap();
        assert_eq!(path.names().len(), 3);
        assert_eq!(HomePath::from_bytes(&path.to_bytes()).unwrap(), path);
        assert_eq!(path.to_string(), "/d\\xff/..x/ \\n");
        assert_eq!(HomePath::parse("/").unwrap(), HomePath::root());
    }

    #[test]
    fn within_goes_by_names_not_by_bytes() {
        let [a, ab, a_b] = ["a", "ab", "a/b"].map(|t| HomePath::parse(t).unwrap());
        assert!(a_b.is_within(&a) && a.overlaps(&a_b) && a.is_within(&a));
        assert!(!ab.is_within(&a) && !a.is_within(&a_b));
        assert!(a.is_within(&HomePath::root()));
        assert_eq!(a_b.parent(), Some(a));
        assert_eq!(HomePath::root().parent(), None);
    }
}
