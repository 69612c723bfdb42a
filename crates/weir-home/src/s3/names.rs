//! Changes of names and attributes in a bucket, as blocking calls: look up, decide (`decide.rs`), act.
//!
//! The service has no directories and cannot rename: a directory is an object whose key ends with a slash; a
//! rename is copies and deletions, the entry itself (of a directory: its own object) last, so that an
//! interrupted rename looks like one that was not done and can be resumed. New objects are created
//! conditionally (`If-None-Match`).
use super::{
    bucket::{Bucket, refused},
    client::{Ask, Failure, implied_dir},
    key::KEY_BYTES_MAX,
    meta::{Meta, Object, split_upload},
};
use crate::{
    Attrs, Expect, Fault, Fingerprint, HomePath, Make, Outcome, RESERVED,
    decide::{self, RenameStep, Step},
};
use bytes::Bytes;
use weir_proto::{Error, meta::FileKind};

/// The expectation for the object itself, without an upload.
pub(super) fn plain(expect: &Expect) -> Expect {
    let (fingerprint, _) = split_upload(expect.fingerprint());
    match expect {
        Expect::Unchanged(_) => Expect::Unchanged(fingerprint),
        Expect::Ours(_) => Expect::Ours(fingerprint),
    }
}

impl Bucket {
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
            _ => self.in_three_steps(a, &expect_a, b, &expect_b, &temporary)?,
        }
        let keys = (self.key(a, expect_b.fingerprint().kind)?, self.key(b, expect_a.fingerprint().kind)?);
        Ok((self.fingerprint_now(a, &keys.0)?, self.fingerprint_now(b, &keys.1)?))
    }

    /// Makes each step that is not done yet.
    fn in_three_steps(
        &self,
        a: &HomePath,
        expect_a: &Expect,
        b: &HomePath,
        expect_b: &Expect,
        temporary: &HomePath,
    ) -> Outcome<()> {
        if let Some(object) = self.stat_entry(a)?.filter(|object| expect_a.admits(&object.fingerprint())) {
            self.move_all(a, &object, temporary)?;
        }
        if let Some(object) =
            self.stat_entry(b)?.filter(|object| ours(expect_b).admits(&object.fingerprint()))
        {
            self.move_all(b, &object, a)?;
        }
        match self.find_temporary(temporary, expect_a.fingerprint().kind)? {
            Some(object) => self.move_all(temporary, &object, b),
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
        if path.is_root() && self.prefix().is_empty() {
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
}

pub(super) fn ours(expect: &Expect) -> Expect {
    Expect::Ours(expect.fingerprint().clone())
}
