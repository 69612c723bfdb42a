//! The objects of one home in a bucket: looked up by path, listed and copied.
//!
//! Invariant: all keys begin with the home's prefix.
use super::{
    S3HomeConfig,
    client::{Ask, Client, CopySource, Failure, implied_dir},
    key::{KEY_BYTES_MAX, decode, dir_key, encode, file_key},
    meta::{Meta, Object},
};
use crate::{Attrs, Expect, Fault, FaultKind, Fingerprint, Found, HomePath, Outcome, RESERVED};
use bytes::Bytes;
use weir_proto::{
    Error, GIB,
    meta::{FileKind, SYMLINK_MAX, Time},
};

/// Sorts after every key below a directory.
const LAST: &str = "\u{10ffff}";

pub(super) struct Bucket {
    pub(super) client: Client,
    /// Empty, or with a slash at its end.
    prefix: String,
    copy_bytes_max: u64,
    copy_part_bytes: u64,
}

pub(super) fn refused(path: &HomePath, expected: Option<&Expect>, found: Option<&Object>) -> Fault {
    Fault::diverged(path, expected.map(Expect::fingerprint), found.map(Object::fingerprint).as_ref())
}

impl Bucket {
    pub(super) fn new(client: Client, prefix: String, copy_bytes_max: u64) -> Bucket {
        let copy_bytes_max = copy_bytes_max.clamp(5 << 20, S3HomeConfig::COPY_BYTES_MAX);
        Bucket { client, prefix, copy_bytes_max, copy_part_bytes: copy_bytes_max.min(GIB) }
    }

    pub(super) fn prefix(&self) -> &str {
        &self.prefix
    }

    /// Whether the bucket answers, and may be listed.
    pub(super) fn reach(&self) -> Outcome<()> {
        let listed = self.client.list(&self.prefix, None, false, 1);
        listed.map(drop).map_err(|f| f.fault("list", &HomePath::root()))
    }
    pub(super) fn check_mark(&self, relation: &str, is_new: bool) -> Outcome<()> {
        let root = HomePath::root();
        let key = format!("{}{}", self.prefix, RESERVED.escape_ascii());
        let wished = format!("weir home 1\nrelation {relation}\n");
        let found = self.client.head(&key).map_err(|f| f.fault("read the mark in", &root))?;
        let Some(mark) = found else {
            if !is_new {
                return Err(Fault::Unreachable(Error::unavailable(format!(
                    "there is no mark {key} in the bucket: it is not this relation's home; give the right bucket"
                ))));
            }
            let body = [Bytes::from(wished)];
            let put = self.client.put(&key, Ask::default().plain("if-none-match", "*").body(&body));
            return put.map_err(|f| f.fault("leave the mark in", &root));
        };
        let text = self.client.get(&key, &mark.etag, 0..mark.size.min(4096));
        let text = text.map_err(|f| f.fault("read the mark in", &root))?.concat();
        if text == wished.as_bytes() {
            return Ok(());
        }
        let error = Error::stale(format!(
            "the bucket is marked as another home ({key} has {:?}, expected {:?}): give the right bucket or prefix, or \
             remove that object if it is to be ours",
            String::from_utf8_lossy(&text).trim_end(),
            wished.trim_end()
        ));
        Err(Fault::new(FaultKind::Diverged, &root, error))
    }

    pub(super) fn key(&self, path: &HomePath, kind: FileKind) -> Outcome<String> {
        let key = match kind {
            FileKind::Directory => dir_key(&self.prefix, path),
            _ => file_key(&self.prefix, path),
        };
        if key.len() <= KEY_BYTES_MAX {
            return Ok(key);
        }
        Err(Fault::Broken(Error::unsupported(format!(
            "{path}: its key in S3 would have {} bytes, and {KEY_BYTES_MAX} are possible: shorten the path",
            key.len()
        ))))
    }

    /// The object at a path, file or directory.
    pub(super) fn stat_entry(&self, path: &HomePath) -> Outcome<Option<Object>> {
        let failed = |failure: Failure| failure.fault("stat", path);
        if path.is_root() {
            return self.stat_root();
        }
        let file = self.client.head(&self.key(path, FileKind::Regular)?).map_err(failed)?;
        // Some services return a directory's object under its name without the slash.
        if file.as_ref().is_some_and(|object| object.meta.kind != FileKind::Directory) {
            return Ok(file);
        }
        self.client.head(&self.key(path, FileKind::Directory)?).map_err(failed)
    }

    /// Like `stat_entry`, if a directory is expected: foreign directories have no objects of their own.
    pub(super) fn find_expected(&self, path: &HomePath, expect: &Expect) -> Outcome<Option<Object>> {
        let found = self.stat_entry(path)?;
        let is_dir = expect.fingerprint().kind == FileKind::Directory;
        if found.is_some() || !is_dir || self.below(path, 1)?.is_empty() {
            return Ok(found);
        }
        Ok(Some(implied_dir()))
    }

    /// The root exists even without an object of its own; the root of a whole bucket cannot have one.
    fn stat_root(&self) -> Outcome<Option<Object>> {
        let root = HomePath::root();
        let found = match self.prefix.is_empty() {
            true => None,
            false => {
                let key = self.key(&root, FileKind::Directory)?;
                self.client.head(&key).map_err(|f| f.fault("stat", &root))?
            }
        };
        Ok(Some(found.unwrap_or_else(implied_dir)))
    }

    pub(super) fn has_dir(&self, path: &HomePath) -> Outcome<bool> {
        if path.is_root() {
            return Ok(true);
        }
        let key = self.key(path, FileKind::Directory)?;
        let found = self.client.head(&key).map_err(|f| f.fault("stat", path))?;
        Ok(found.is_some() || !self.below(path, 1)?.is_empty())
    }

    pub(super) fn check_dir_above(&self, path: &HomePath) -> Outcome<()> {
        let dir = path.parent().unwrap_or_default();
        if self.has_dir(&dir)? { Ok(()) } else { Err(refused(&dir, None, self.stat_entry(&dir)?.as_ref())) }
    }

    /// Keys below a directory at any depth, without its own; at most `limit`.
    pub(super) fn below(&self, dir: &HomePath, limit: usize) -> Outcome<Vec<String>> {
        let prefix = self.key(dir, FileKind::Directory)?;
        let listed = self.client.list(&prefix, None, false, limit + 1).map_err(|f| f.fault("list", dir))?;
        Ok(listed.0.into_iter().filter(|key| *key != prefix).take(limit).collect())
    }

    pub(super) fn first_below(&self, dir: &HomePath) -> Outcome<Option<HomePath>> {
        let keys = self.below(dir, 1)?;
        Ok(keys.first().and_then(|key| {
            let name = key[self.key(dir, FileKind::Directory).ok()?.len()..].split('/').next()?;
            dir.join(&decode(name)?).ok()
        }))
    }

    /// Replaces the metadata of an object: the service copies it onto itself.
    pub(super) fn set_meta(
        &self,
        path: &HomePath,
        key: &str,
        object: &Object,
        meta: Meta,
    ) -> Outcome<Fingerprint> {
        let timeless = |meta: &Meta| {
            let time = Time { nanos: 0 };
            Meta { attrs: Attrs { atime: time, mtime: time, ..meta.attrs.clone() }, ..meta.clone() }
        };
        // A large object would be copied in parts: not for its times alone.
        let is_large = object.size > self.copy_bytes_max;
        let is_same = object.is_ours && object.meta == meta;
        if is_same || is_large && object.is_ours && timeless(&object.meta) == timeless(&meta) {
            return Ok(object.fingerprint());
        }
        self.copy(path, key, object, key, &meta)?;
        self.fingerprint_now(path, key)
    }

    pub(super) fn copy(
        &self,
        path: &HomePath,
        from: &str,
        object: &Object,
        to: &str,
        meta: &Meta,
    ) -> Outcome<()> {
        let failed = |failure: Failure| failure.fault("copy", path);
        if object.size == 0 || meta.kind == FileKind::Directory {
            return self.client.put(to, Ask::default().meta(meta)?).map_err(failed);
        }
        if object.size <= self.copy_bytes_max {
            let ask = Ask::default().meta(meta)?;
            return self.client.copy(from, &object.etag, to, ask).map_err(failed);
        }
        let upload = self.client.begin_upload(to, Ask::default().meta(meta)?).map_err(failed)?;
        let copied = (|| {
            let (mut etags, mut at) = (Vec::new(), 0);
            while at < object.size {
                let end = object.size.min(at + self.copy_part_bytes);
                let source = CopySource { key: from, etag: &object.etag, range: at..end };
                etags.push(self.client.copy_part(to, &upload, etags.len() as u16 + 1, source)?);
                at = end;
            }
            self.client.end_upload(to, &upload, &etags)
        })();
        if copied.is_err() {
            let _ = self.client.abort_upload(to, &upload); // the next writer aborts leftovers
        }
        copied.map_err(failed)
    }

    pub(super) fn fingerprint_now(&self, path: &HomePath, key: &str) -> Outcome<Fingerprint> {
        let found = self.client.head(key).map_err(|f| f.fault("stat", path))?;
        found.map(|object| object.fingerprint()).ok_or_else(|| refused(path, None, None))
    }

    pub(super) fn found_of(&self, path: &HomePath, object: &Object) -> Outcome<Found> {
        let meta = &object.meta;
        let target = match meta.kind {
            FileKind::Symlink if object.size <= SYMLINK_MAX as u64 => {
                let key = self.key(path, meta.kind)?;
                let got = self.client.get(&key, &object.etag, 0..object.size);
                got.map_err(|f| f.fault("read", path))?.concat().into()
            }
            _ => Bytes::new(),
        };
        Ok(Found {
            fingerprint: object.fingerprint(),
            attrs: meta.attrs.clone(),
            nlink: 1,
            target,
            rdev: meta.rdev,
            allocated: object.size,
        })
    }

    pub(super) fn stat(&self, path: &HomePath) -> Outcome<Option<Found>> {
        match self.stat_entry(path)? {
            Some(object) => self.found_of(path, &object).map(Some),
            None if !self.below(path, 1)?.is_empty() => self.found_of(path, &implied_dir()).map(Some),
            None => Ok(None),
        }
    }

    /// The names of one page; the kind of each is looked up one by one.
    pub(super) fn names(
        &self,
        dir: &HomePath,
        after: Option<&[u8]>,
        limit: usize,
    ) -> Outcome<(Vec<Vec<u8>>, bool)> {
        let prefix = self.key(dir, FileKind::Directory)?;
        let failed = |failure: Failure| failure.fault("list", dir);
        let mut after = match after {
            Some(name) => {
                let key = format!("{prefix}{}", encode(name));
                let is_dir = self.client.head(&format!("{key}/")).map_err(failed)?.is_some();
                Some(if is_dir { format!("{key}/{LAST}") } else { key })
            }
            None => None,
        };
        let (mut names, mut is_there) = (Vec::new(), after.is_some() || dir.is_root());
        loop {
            let (keys, more) =
                self.client.list(&prefix, after.as_deref(), true, limit - names.len() + 1).map_err(failed)?;
            is_there |= !keys.is_empty();
            for key in keys {
                let name = key[prefix.len()..].trim_end_matches('/');
                after = Some(if key.ends_with('/') && !name.is_empty() {
                    format!("{key}{LAST}")
                } else {
                    key.clone()
                });
                // Keys that no name maps to cannot be represented.
                if let Some(name) = decode(name).filter(|name| dir.join(name).is_ok()) {
                    if names.len() == limit {
                        return Ok((names, false));
                    }
                    names.push(name);
                }
            }
            if !more {
                break;
            }
        }
        if is_there { Ok((names, true)) } else { Err(refused(dir, None, None)) }
    }
}
