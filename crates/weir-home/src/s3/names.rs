//! Changes of names and attributes in a bucket, as blocking calls: look up, decide (`decide.rs`), act.
//!
//! The service has no directories and cannot rename: a directory is an object whose key ends with a slash; a
//! rename is copies and deletions, the entry itself (of a directory: its own object) last, so that an
//! interrupted rename looks like one that was not done and can be resumed. New objects are created
//! conditionally (`If-None-Match`).
use super::{
    Inner,
    client::{Ask, Failure, implied_dir},
    key::{KEY_BYTES_MAX, decode, dir_key, encode, file_key},
    meta::{Meta, Object, split_upload},
};
use crate::{
    Attrs, Expect, Fault, Fingerprint, Found, HomePath, Make, Outcome, RESERVED,
    decide::{self, RenameStep, Step},
};
use bytes::Bytes;
use weir_proto::{
    Error,
    meta::{FileKind, SYMLINK_MAX, Time},
};

/// Sorts after every key below a directory.
const LAST: &str = "\u{10ffff}";

/// The expectation for the object itself, without an upload.
pub(super) fn plain(expect: &Expect) -> Expect {
    let (fingerprint, _) = split_upload(expect.fingerprint());
    match expect {
        Expect::Unchanged(_) => Expect::Unchanged(fingerprint),
        Expect::Ours(_) => Expect::Ours(fingerprint),
    }
}

fn refused(path: &HomePath, expected: Option<&Expect>, found: Option<&Object>) -> Fault {
    Fault::diverged(path, expected.map(Expect::fingerprint), found.map(Object::fingerprint).as_ref())
}

impl Inner {
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
    fn find_expected(&self, path: &HomePath, expect: &Expect) -> Outcome<Option<Object>> {
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

    fn has_dir(&self, path: &HomePath) -> Outcome<bool> {
        if path.is_root() {
            return Ok(true);
        }
        let key = self.key(path, FileKind::Directory)?;
        let found = self.client.head(&key).map_err(|f| f.fault("stat", path))?;
        Ok(found.is_some() || !self.below(path, 1)?.is_empty())
    }

    fn check_dir_above(&self, path: &HomePath) -> Outcome<()> {
        let dir = path.parent().unwrap_or_default();
        if self.has_dir(&dir)? { Ok(()) } else { Err(refused(&dir, None, self.stat_entry(&dir)?.as_ref())) }
    }

    /// Keys below a directory at any depth, without its own; at most `limit`.
    fn below(&self, dir: &HomePath, limit: usize) -> Outcome<Vec<String>> {
        let prefix = self.key(dir, FileKind::Directory)?;
        let listed = self.client.list(&prefix, None, false, limit + 1).map_err(|f| f.fault("list", dir))?;
        Ok(listed.0.into_iter().filter(|key| *key != prefix).take(limit).collect())
    }

    fn first_below(&self, dir: &HomePath) -> Outcome<Option<HomePath>> {
        let keys = self.below(dir, 1)?;
        Ok(keys.first().and_then(|key| {
            let name = key[self.key(dir, FileKind::Directory).ok()?.len()..].split('/').next()?;
            dir.join(&decode(name)?).ok()
        }))
    }

    pub(super) fn make(
        &self,
        path: &HomePath,
        what: &Make,
        attrs: &Attrs,
        id: [u8; 16],
    ) -> Outcome<Fingerprint> {
        let failed = |failure: Failure| failure.fault("make", path);
        if path.is_root() {
            return Err(refused(path, None, Some(&implied_dir())));
        }
        let (kind, rdev, body) = match what {
            Make::Directory => (FileKind::Directory, 0, Bytes::new()),
            Make::File => (FileKind::Regular, 0, Bytes::new()),
            Make::Symlink { target } => (FileKind::Symlink, 0, target.clone()),
            Make::Special { kind, rdev } => (*kind, *rdev, Bytes::new()),
        };
        let key = self.key(path, kind)?;
        let mut found = self.stat_entry(path)?;
        if found.is_none() {
            self.check_dir_above(path)?;
            let meta = Meta { kind, rdev, id, attrs: attrs.clone(), written: None };
            let body = [body];
            let ask = Ask::default().meta(&meta)?.plain("if-none-match", "*").body(&body);
            match self.client.put(&key, ask) {
                Ok(()) => return self.fingerprint_now(path, &key),
                Err(failure) if failure.is_condition() => found = self.stat_entry(path)?,
                Err(failure) => return Err(failed(failure)),
            }
        }
        let Some(object) = found else { return Err(refused(path, None, None)) };
        let is_empty_dir = object.meta.kind == FileKind::Directory && self.below(path, 1)?.is_empty();
        match decide::make(what, attrs, Some(&self.found_of(path, &object)?), is_empty_dir) {
            Step::Done => {
                self.set_meta(path, &key, &object, Meta { attrs: attrs.clone(), ..object.meta.clone() })
            }
            _ => Err(refused(path, None, Some(&object))),
        }
    }

    pub(super) fn remove(&self, path: &HomePath, expect: &Expect) -> Outcome<()> {
        self.abort_uploads(path, expect)?;
        let expect = plain(expect);
        let found = self.stat_entry(path)?;
        match decide::remove(found.as_ref().map(Object::fingerprint).as_ref(), &expect) {
            Step::Done => return Ok(()),
            Step::Refuse => return Err(refused(path, Some(&expect), found.as_ref())),
            Step::Act => {}
        }
        let kind = expect.fingerprint().kind;
        if kind == FileKind::Directory {
            self.check_empty(path)?;
        }
        let key = self.key(path, kind)?;
        self.client.delete(&key).map_err(|f| f.fault("remove", path))
    }

    /// Aborts uploads of a file that is removed, also those of a mover that died before its report: they
    /// would stay forever.
    fn abort_uploads(&self, path: &HomePath, expect: &Expect) -> Outcome<()> {
        let failed = |failure: Failure| failure.fault("end the upload of", path);
        let (fingerprint, named) = split_upload(expect.fingerprint());
        let key = self.key(path, fingerprint.kind)?;
        let mut uploads: Vec<String> = named.into_iter().collect();
        if matches!(expect, Expect::Ours(_)) && fingerprint.kind == FileKind::Regular {
            uploads.extend(self.client.uploads(&key).map_err(failed)?);
        }
        uploads.iter().try_for_each(|upload| self.client.abort_upload(&key, upload).map_err(failed))
    }

    fn check_empty(&self, dir: &HomePath) -> Outcome<()> {
        match self.first_below(dir)? {
            None => Ok(()),
            Some(inside) => Err(refused(&inside, None, self.stat_entry(&inside)?.as_ref())),
        }
    }

    pub(super) fn rename(
        &self,
        from: &HomePath,
        expect: &Expect,
        to: &HomePath,
        replaces: Option<&Expect>,
    ) -> Outcome<Fingerprint> {
        let (expect, replaces) = (plain(expect), replaces.map(plain));
        let (old, new) = (self.find_expected(from, &expect)?, self.stat_entry(to)?);
        let fingerprints = (old.as_ref().map(Object::fingerprint), new.as_ref().map(Object::fingerprint));
        let step =
            decide::rename(fingerprints.0.as_ref(), &expect, fingerprints.1.as_ref(), replaces.as_ref());
        match (step, &old) {
            (RenameStep::Move | RenameStep::Replace | RenameStep::DropOld, Some(old)) => {
                if step != RenameStep::DropOld {
                    self.check_dir_above(to)?;
                }
                if step == RenameStep::Replace
                    && fingerprints.1.is_some_and(|new| new.kind == FileKind::Directory)
                {
                    self.check_empty(to)?;
                }
                self.move_all(from, old, to)?;
            }
            (RenameStep::Done, _) => {}
            (RenameStep::RefuseTo, _) => return Err(refused(to, replaces.as_ref(), new.as_ref())),
            _ => return Err(refused(from, Some(&expect), old.as_ref())),
        }
        self.fingerprint_now(to, &self.key(to, expect.fingerprint().kind)?)
    }

    /// Renames an entry, everything below it first. Resumes an interrupted rename.
    fn move_all(&self, from: &HomePath, object: &Object, to: &HomePath) -> Outcome<()> {
        let kind = object.meta.kind;
        let (from_key, to_key) = (self.key(from, kind)?, self.key(to, kind)?);
        let failed = |failure: Failure| failure.fault("rename", from);
        let (mut after, mut more) = (from_key.clone(), kind == FileKind::Directory);
        while more {
            let keys;
            (keys, more) = self.client.list(&from_key, Some(&after), false, 1000).map_err(failed)?;
            for key in keys {
                let below = format!("{to_key}{}", &key[from_key.len()..]);
                if below.len() > KEY_BYTES_MAX {
                    return Err(Fault::Broken(Error::unsupported(format!(
                        "{from} cannot be called {to}: the key {below} would be too long for S3"
                    ))));
                }
                if let Some(object) = self.client.head(&key).map_err(failed)? {
                    self.copy(from, &key, &object, &below, &object.meta_of_copy())?;
                    self.client.delete(&key).map_err(failed)?;
                }
                after = key;
            }
        }
        self.copy(from, &from_key, object, &to_key, &object.meta)?;
        self.client.delete(&from_key).map_err(failed)
    }

    pub(super) fn exchange(
        &self,
        a: &HomePath,
        expect_a: &Expect,
        b: &HomePath,
        expect_b: &Expect,
    ) -> Outcome<(Fingerprint, Fingerprint)> {
        let (expect_a, expect_b) = (plain(expect_a), plain(expect_b));
        let temporary = self.temporary(a, &expect_a);
        let (at_a, at_b) = (self.stat_entry(a)?, self.stat_entry(b)?);
        let waiting = self.find_temporary(&temporary, expect_a.fingerprint().kind)?;
        let (a_fingerprint, b_fingerprint) =
            (at_a.as_ref().map(Object::fingerprint), at_b.as_ref().map(Object::fingerprint));
        let step = decide::exchange(a_fingerprint.as_ref(), &expect_a, b_fingerprint.as_ref(), &expect_b);
        let is_between = waiting.as_ref().is_some_and(|w| ours(&expect_a).admits(&w.fingerprint()));
        match step {
            Step::Done if !is_between => {}
            Step::Refuse if !is_between => {
                let a_is_ours = a_fingerprint.is_some_and(|fingerprint| expect_a.admits(&fingerprint));
                let refuse = if a_is_ours { (b, &expect_b, &at_b) } else { (a, &expect_a, &at_a) };
                return Err(refused(refuse.0, Some(refuse.1), refuse.2.as_ref()));
            }
            _ => self.in_three_steps((a, &expect_a), (b, &expect_b), &temporary)?,
        }
        let keys = (self.key(a, expect_b.fingerprint().kind)?, self.key(b, expect_a.fingerprint().kind)?);
        Ok((self.fingerprint_now(a, &keys.0)?, self.fingerprint_now(b, &keys.1)?))
    }

    /// Makes each step that is not done yet.
    fn in_three_steps(
        &self,
        a: (&HomePath, &Expect),
        b: (&HomePath, &Expect),
        temporary: &HomePath,
    ) -> Outcome<()> {
        if let Some(object) = self.stat_entry(a.0)?.filter(|object| a.1.admits(&object.fingerprint())) {
            self.move_all(a.0, &object, temporary)?;
        }
        if let Some(object) = self.stat_entry(b.0)?.filter(|object| ours(b.1).admits(&object.fingerprint())) {
            self.move_all(b.0, &object, a.0)?;
        }
        match self.find_temporary(temporary, a.1.fingerprint().kind)? {
            Some(object) => self.move_all(temporary, &object, b.0),
            None => Ok(()),
        }
    }

    /// The temporary name of `a` while `b` is renamed to `a`.
    fn temporary(&self, a: &HomePath, expect_a: &Expect) -> HomePath {
        let id: String = expect_a.fingerprint().id.iter().map(|b| format!("{b:02x}")).collect();
        let name = format!("{}-exchange-{id}", RESERVED.escape_ascii());
        a.parent().unwrap_or_default().join_reserved(name.as_bytes())
    }
    fn find_temporary(&self, temporary: &HomePath, kind: FileKind) -> Outcome<Option<Object>> {
        self.client.head(&self.key(temporary, kind)?).map_err(|f| f.fault("stat", temporary))
    }

    pub(super) fn set_attrs(&self, path: &HomePath, expect: &Expect, attrs: &Attrs) -> Outcome<Fingerprint> {
        if path.is_root() && self.prefix.is_empty() {
            return Ok(implied_dir().fingerprint());
        }
        let expect = plain(expect);
        let found = self.find_expected(path, &expect)?;
        let fingerprint = found.as_ref().map(Object::fingerprint);
        match (decide::set_attrs(fingerprint.as_ref(), &expect, attrs), found) {
            (Step::Act | Step::Done, Some(object)) => {
                let key = self.key(path, object.meta.kind)?;
                self.set_meta(path, &key, &object, Meta { attrs: attrs.clone(), ..object.meta.clone() })
            }
            (_, found) => Err(refused(path, Some(&expect), found.as_ref())),
        }
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
                let source = (from, object.etag.as_str(), at..end);
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

    fn found_of(&self, path: &HomePath, object: &Object) -> Outcome<Found> {
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

pub(super) fn ours(expect: &Expect) -> Expect {
    Expect::Ours(expect.fingerprint().clone())
}
