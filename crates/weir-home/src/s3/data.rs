//! Bytes of objects: a multipart upload while a file grows, a single put if it is small.
//!
//! Objects cannot be changed, so a file that is written becomes a new object: the service copies unwritten
//! parts from the old one. Until the upload completes, readers see the old object. Invariants: a writer holds
//! at most one part in memory; an upload that the expected fingerprint does not name is aborted, because its
//! contents are unknown.
use super::{
    bucket::Bucket,
    client::{Ask, CopySource, Failure},
    key::{FIRST_PART_BYTES, part_at, part_start},
    meta::{Meta, Object, split_upload, with_upload},
    names::plain,
};
use crate::{
    Attrs, Expect, Fault, FaultKind, Fingerprint, HomeLane, HomePath, HomeReader, HomeWriter, IdMap, Outcome,
};
use bytes::Bytes;
use std::{
    collections::BTreeMap,
    ops::Range,
    sync::{Arc, Mutex, PoisonError},
};
use weir_env::BoxFuture;
use weir_proto::{Error, MIB, meta::FileKind};

/// The service accepts no smaller part, except the last one.
const PART_BYTES_MIN: u64 = 5 * MIB;
static ZEROS: [u8; 1 << 20] = [0; 1 << 20];

fn zeros(len: u64) -> impl Iterator<Item = Bytes> {
    let step = ZEROS.len() as u64;
    (0..len.div_ceil(step)).map(move |n| Bytes::from_static(&ZEROS[..(len - n * step).min(step) as usize]))
}

pub(super) struct S3Writer {
    lane: HomeLane,
    ids: IdMap,
    open: Arc<Open>,
}

struct Open {
    bucket: Arc<Bucket>,
    path: HomePath,
    key: String,
    /// Held while the file is written: its calls are serialized.
    state: Mutex<State>,
}

struct State {
    /// The object that readers see.
    base: Object,
    /// Metadata for the next version of the object.
    meta: Meta,
    upload: Option<String>,
    /// The upload's parts: ETag and size of each.
    parts: BTreeMap<u16, (String, u64)>,
    /// Data within one part that is not sent yet.
    pending: Option<Pending>,
}

struct Pending {
    range: Range<u64>,
    bytes: Vec<Bytes>,
}

impl S3Writer {
    pub(super) fn open(
        bucket: &Arc<Bucket>,
        lane: &HomeLane,
        path: &HomePath,
        expect: &Expect,
        ids: IdMap,
    ) -> Outcome<S3Writer> {
        let expected = plain(expect);
        let base = expected_file(bucket, path, &expected)?;
        let key = bucket.key(path, FileKind::Regular)?;
        let failed = |failure: Failure| failure.fault("open", path);
        let named = split_upload(expect.fingerprint()).1;
        for upload in bucket.client.uploads(&key).map_err(failed)? {
            if Some(&upload) != named.as_ref() {
                bucket.client.abort_upload(&key, &upload).map_err(failed)?;
            }
        }
        let parts = match &named {
            Some(upload) => bucket.client.parts(&key, upload).map_err(failed)?,
            None => None,
        };
        if named.is_some() && parts.is_none() && base.fingerprint().version == expected.fingerprint().version
        {
            // Not completed, which would have made another object: the service aborted it, with its contents.
            let error = Error::stale(format!(
                "{path} at home: its upload in progress is gone, with the parts that were sent: perhaps the \
                 bucket gives uploads up after some days; `weir relation resolve … --keep volume` sends all of it again"
            ));
            return Err(Fault::new(FaultKind::Diverged, path, error));
        }
        let meta = Meta { written: None, ..base.meta.clone() };
        let state = State {
            base,
            meta,
            upload: named.filter(|_| parts.is_some()),
            parts: parts.unwrap_or_default(),
            pending: None,
        };
        let open = Open { bucket: bucket.clone(), path: path.clone(), key, state: Mutex::new(state) };
        Ok(S3Writer { lane: lane.clone(), ids, open: Arc::new(open) })
    }
}

pub(super) fn resize(
    bucket: &Arc<Bucket>,
    lane: &HomeLane,
    path: &HomePath,
    expect: &Expect,
    size: u64,
) -> Outcome<Fingerprint> {
    let expected = plain(expect);
    let found = bucket.stat_entry(path)?.map(|object| object.fingerprint());
    match crate::decide::resize(found.as_ref(), &expected, size) {
        crate::decide::Step::Act => {
            let writer = S3Writer::open(bucket, lane, path, &expected, IdMap::default())?;
            let attrs = writer.open.with_state(|state| Ok(state.base.meta.attrs.clone()))?;
            writer.open.finish(size, &attrs)
        }
        crate::decide::Step::Done => Ok(found.unwrap_or_else(|| expected.fingerprint().clone())),
        crate::decide::Step::Refuse => {
            Err(Fault::diverged(path, Some(expected.fingerprint()), found.as_ref()))
        }
    }
}

/// The object of a file of ours, unless it was changed at home.
fn expected_file(bucket: &Bucket, path: &HomePath, expect: &Expect) -> Outcome<Object> {
    let found = bucket.stat_entry(path)?;
    match found {
        Some(object) if object.meta.kind == FileKind::Regular && expect.admits(&object.fingerprint()) => {
            Ok(object)
        }
        found => {
            Err(Fault::diverged(path, Some(expect.fingerprint()), found.map(|o| o.fingerprint()).as_ref()))
        }
    }
}

impl Open {
    fn with_state<T>(&self, work: impl FnOnce(&mut State) -> Outcome<T>) -> Outcome<T> {
        work(&mut self.state.lock().unwrap_or_else(PoisonError::into_inner))
    }

    fn failed(&self) -> impl Fn(Failure) -> Fault {
        |failure| failure.fault("write", &self.path)
    }

    fn write(&self, offset: u64, parts: Vec<Bytes>) -> Outcome<()> {
        self.with_state(|state| {
            let mut at = offset;
            for mut bytes in parts {
                while !bytes.is_empty() {
                    let part = self.part(at)?.1;
                    let n = bytes.len().min((part.end - at) as usize);
                    self.take(state, at, bytes.split_to(n))?;
                    at += n as u64;
                    if at == part.end {
                        self.send_pending(state)?;
                    }
                }
            }
            Ok(())
        })
    }

    fn part(&self, offset: u64) -> Outcome<(u16, Range<u64>)> {
        part_at(offset).ok_or_else(|| {
            Fault::Broken(Error::unsupported(format!(
                "{}: an upload to S3 has 10,000 parts, which end before byte {offset}: keep it in another home",
                self.path
            )))
        })
    }

    fn take(&self, state: &mut State, at: u64, bytes: Bytes) -> Outcome<()> {
        let follows = |p: &Pending| {
            p.range.end == at && part_at(p.range.start).map(|p| p.0) == part_at(at).map(|p| p.0)
        };
        if !state.pending.as_ref().is_some_and(follows) {
            self.send_pending(state)?;
        }
        let pending = state.pending.get_or_insert_with(|| Pending { range: at..at, bytes: Vec::new() });
        assert_eq!(pending.range.end, at, "the bytes of a part are sent in their order");
        pending.range.end += bytes.len() as u64;
        pending.bytes.push(bytes);
        Ok(())
    }

    /// Sends the pending data as a part; the rest of the part is filled with its old data.
    fn send_pending(&self, state: &mut State) -> Outcome<()> {
        let Some(pending) = &state.pending else { return Ok(()) };
        let (number, part) = self.part(pending.range.start)?;
        let range = pending.range.clone();
        assert!(!range.is_empty() && range.end <= part.end, "pending bytes are in one part of the upload");
        let sent = state.parts.get(&number).map_or(0, |(_, size)| *size);
        if sent > 0 && (range.start > part.start || range.end < part.start + sent) {
            // A part that was sent cannot be read back before the upload completes.
            let pending = state.pending.take();
            let end = parts_end(state).max(state.base.size);
            self.end(state, end)?;
            state.pending = pending;
        }
        let body = self.bytes(state, part.start..part.end.min(range.end.max(state.base.size)))?;
        self.begin(state)?;
        self.put_part(state, number, &body)?;
        state.pending = None;
        Ok(())
    }

    fn put_part(&self, state: &mut State, number: u16, body: &[Bytes]) -> Outcome<()> {
        assert!(state.upload.is_some(), "a part is sent, and no upload has begun");
        let upload = state.upload.as_deref().unwrap_or_default();
        let etag = self.bucket.client.put_part(&self.key, upload, number, body).map_err(self.failed())?;
        state.parts.insert(number, (etag, body.iter().map(|b| b.len() as u64).sum()));
        Ok(())
    }

    fn begin(&self, state: &mut State) -> Outcome<()> {
        if state.upload.is_none() {
            let ask = Ask::default().meta(&state.meta)?;
            state.upload = Some(self.bucket.client.begin_upload(&self.key, ask).map_err(self.failed())?);
            state.parts.clear();
        }
        Ok(())
    }

    /// The bytes of a range within one part: pending data, around it the object's bytes, and zeros beyond its
    /// end.
    fn bytes(&self, state: &State, range: Range<u64>) -> Outcome<Vec<Bytes>> {
        let overlapping =
            state.pending.as_ref().filter(|p| p.range.start < range.end && range.start < p.range.end);
        let Some(pending) = overlapping else { return self.base_bytes(state, range) };
        let mut bytes = self.base_bytes(state, range.start..pending.range.start.max(range.start))?;
        let mut at = pending.range.start;
        for part in &pending.bytes {
            let end = at + part.len() as u64;
            let (from, to) = (at.max(range.start), end.min(range.end));
            if from < to {
                bytes.push(part.slice((from - at) as usize..(to - at) as usize));
            }
            at = end;
        }
        bytes.extend(self.base_bytes(state, at.min(range.end)..range.end)?);
        Ok(bytes)
    }

    fn base_bytes(&self, state: &State, range: Range<u64>) -> Outcome<Vec<Bytes>> {
        let end = range.end.min(state.base.size).max(range.start);
        let got = self.bucket.client.get(&self.key, &state.base.etag, range.start..end);
        let mut bytes = got.map_err(self.failed())?;
        bytes.extend(zeros(range.end - end));
        Ok(bytes)
    }

    /// Completes the object of `size` bytes from the sent parts, pending data and the old object.
    fn end(&self, state: &mut State, size: u64) -> Outcome<()> {
        let sent = parts_end(state);
        let is_short = part_at(sent.saturating_sub(1)).is_some_and(|(_, part)| part.end > sent);
        if sent > size || sent > 0 && sent < size && is_short {
            // The last part that was sent ends elsewhere: repeat, from the object that results.
            let pending = state.pending.take();
            self.end(state, sent.max(state.base.size))?;
            state.pending = pending;
        }
        if state.upload.is_none() && size <= FIRST_PART_BYTES {
            return self.put_whole(state, size);
        }
        self.begin(state)?;
        let mut at = 0;
        while at < size {
            let (number, part) = self.part(at)?;
            let range = part.start..part.end.min(size);
            if !state.parts.contains_key(&number) {
                self.fill_part(state, number, range)?;
            }
            at = part.end;
        }
        let etags: Vec<String> = state.parts.values().map(|(etag, _)| etag.clone()).collect();
        let upload = state.upload.as_deref().unwrap_or_default();
        self.check_base(state)?;
        self.bucket.client.end_upload(&self.key, upload, &etags).map_err(self.failed())?;
        (state.upload, state.pending) = (None, None);
        state.parts.clear();
        self.check_again(state)
    }

    /// Fills a part without new data: copied by the service if it can.
    fn fill_part(&self, state: &mut State, number: u16, range: Range<u64>) -> Outcome<()> {
        assert!(!state.parts.contains_key(&number), "old bytes would replace a part that was sent");
        let touched =
            state.pending.as_ref().is_some_and(|p| p.range.start < range.end && range.start < p.range.end);
        let is_copied = !touched && range.end <= state.base.size && range.end - range.start >= PART_BYTES_MIN;
        if !is_copied {
            let body = self.bytes(state, range)?;
            return self.put_part(state, number, &body);
        }
        let upload = state.upload.as_deref().unwrap_or_default();
        let source = CopySource { key: &self.key, etag: &state.base.etag, range: range.clone() };
        let etag = self.bucket.client.copy_part(&self.key, upload, number, source).map_err(self.failed())?;
        state.parts.insert(number, (etag, range.end - range.start));
        Ok(())
    }

    fn put_whole(&self, state: &mut State, size: u64) -> Outcome<()> {
        let is_alone = state.upload.is_none() && state.parts.is_empty();
        assert!(is_alone, "a file is stored in one request while parts of it are sent");
        let body = self.bytes(state, 0..size)?;
        let ask = Ask::default()
            .meta(&state.meta)?
            .plain("if-match", format!("\"{}\"", state.base.etag))
            .body(&body);
        self.check_base(state)?;
        self.bucket.client.put(&self.key, ask).map_err(self.failed())?;
        state.pending = None;
        self.check_again(state)
    }

    /// Checks that no other object was stored there since we opened it.
    fn check_base(&self, state: &State) -> Outcome<()> {
        let found = self.bucket.stat_entry(&self.path)?;
        if found.as_ref().is_some_and(|found| found.fingerprint() == state.base.fingerprint()) {
            return Ok(());
        }
        let fingerprint = state.base.fingerprint();
        Err(Fault::diverged(&self.path, Some(&fingerprint), found.map(|found| found.fingerprint()).as_ref()))
    }

    fn check_again(&self, state: &mut State) -> Outcome<()> {
        let found = self.bucket.stat_entry(&self.path)?;
        state.base =
            found.ok_or_else(|| Fault::diverged(&self.path, Some(&state.base.fingerprint()), None))?;
        Ok(())
    }

    fn sync(&self) -> Outcome<Fingerprint> {
        self.with_state(|state| {
            self.send_pending(state)?;
            Ok(with_upload(state.base.fingerprint(), state.upload.as_deref()))
        })
    }

    fn finish(&self, size: u64, attrs: &Attrs) -> Outcome<Fingerprint> {
        self.with_state(|state| {
            state.meta.attrs = attrs.clone();
            if state.upload.is_some() {
                self.send_pending(state)?;
            }
            if state.pending.is_some() || state.upload.is_some() || size != state.base.size {
                self.end(state, size)?;
            } else {
                self.check_base(state)?;
            }
            // An upload keeps the attributes from its creation.
            let fingerprint = self.bucket.set_meta(&self.path, &self.key, &state.base, state.meta.clone())?;
            self.check_again(state)?;
            Ok(fingerprint)
        })
    }
}

/// The end of the last part that was sent.
fn parts_end(state: &State) -> u64 {
    state.parts.last_key_value().map_or(0, |(number, (_, size))| part_start(*number) + size)
}

impl HomeWriter for S3Writer {
    fn write_at(&self, offset: u64, parts: Vec<Bytes>) -> BoxFuture<'_, Outcome<()>> {
        let open = self.open.clone();
        Box::pin(async move {
            self.lane.run("write", &[&self.open.path], move || open.write(offset, parts)).await
        })
    }
    fn zero(&self, range: Range<u64>) -> BoxFuture<'_, Outcome<()>> {
        let open = self.open.clone();
        let write = move || open.write(range.start, zeros(range.end - range.start).collect());
        Box::pin(async move { self.lane.run("write zeros", &[&self.open.path], write).await })
    }
    fn sync(&self) -> BoxFuture<'_, Outcome<Fingerprint>> {
        let open = self.open.clone();
        Box::pin(async move { self.lane.run("sync", &[&self.open.path], move || open.sync()).await })
    }
    fn finish<'a>(&'a self, size: u64, attrs: &'a Attrs) -> BoxFuture<'a, Outcome<Fingerprint>> {
        let (open, attrs) = (self.open.clone(), self.ids.to_home(FileKind::Regular, attrs));
        Box::pin(async move {
            self.lane.run("finish", &[&self.open.path], move || open.finish(size, &attrs)).await
        })
    }
}

pub(super) struct S3Reader {
    lane: HomeLane,
    open: Arc<OpenToRead>,
}

struct OpenToRead {
    bucket: Arc<Bucket>,
    path: HomePath,
    key: String,
    object: Object,
    fingerprint: Fingerprint,
}

impl S3Reader {
    pub(super) fn open(
        bucket: &Arc<Bucket>,
        lane: &HomeLane,
        path: &HomePath,
        expect: &Expect,
    ) -> Outcome<S3Reader> {
        let object = expected_file(bucket, path, &plain(expect))?;
        let key = bucket.key(path, FileKind::Regular)?;
        let fingerprint = object.fingerprint();
        let open = OpenToRead { bucket: bucket.clone(), path: path.clone(), key, object, fingerprint };
        Ok(S3Reader { lane: lane.clone(), open: Arc::new(open) })
    }
}

impl OpenToRead {
    fn read(&self, offset: u64, len: usize) -> Outcome<Vec<Bytes>> {
        let size = self.object.size;
        let range = offset.min(size)..offset.saturating_add(len as u64).min(size);
        match self.bucket.client.get(&self.key, &self.object.etag, range) {
            // The object was replaced meanwhile.
            Err(failure) if failure.is_condition() || failure.is_missing() => {
                let found = self.bucket.stat_entry(&self.path)?.map(|found| found.fingerprint());
                Err(Fault::diverged(&self.path, Some(&self.fingerprint), found.as_ref()))
            }
            got => got.map_err(|f| f.fault("read", &self.path)),
        }
    }
}

impl HomeReader for S3Reader {
    fn read_at(&self, offset: u64, len: usize) -> BoxFuture<'_, Outcome<Vec<Bytes>>> {
        let open = self.open.clone();
        Box::pin(
            async move { self.lane.run("read", &[&self.open.path], move || open.read(offset, len)).await },
        )
    }
    fn data_from(&self, offset: u64) -> BoxFuture<'_, Outcome<Option<Range<u64>>>> {
        let size = self.open.object.size;
        Box::pin(std::future::ready(Ok((offset < size).then_some(offset..size))))
    }
    fn fingerprint(&self) -> &Fingerprint {
        &self.open.fingerprint
    }
}
