//! Requests to one bucket, blocking: signed by `rusty-s3`, sent by `ureq`. Knows S3's protocol, not the
//! purpose of the requests.
//!
//! Invariants: request bodies carry their MD5, so the service refuses a damaged one; no message contains keys
//! or secrets; bytes are sent without a copy.
use super::{
    S3HomeConfig,
    key::{url_decode, url_encode},
    keys::Keys,
    meta::{META, META_XATTRS, Meta, Object},
    xml::Element,
};
use crate::{Attrs, Fault, FaultKind, HomePath, Outcome};
use base64::{Engine, engine::general_purpose::STANDARD as BASE64};
use bytes::Bytes;
use md5::{Digest, Md5};
use rusty_s3::{Bucket, Method, UrlStyle};
use std::{
    collections::BTreeMap,
    io::{self, Read},
    ops::Range,
    time::Duration,
};
use ureq::{
    Agent, Body, SendBody,
    http::{Request, Response},
};
use weir_env::{BufferPool, Clock};
use weir_proto::{
    Error, ErrorKind,
    meta::{FileKind, Time},
};

/// One buffer of an answer: the largest class that the pool keeps.
const READ_BYTES_MAX: usize = 8 << 20;
/// A listing of 1,000 keys of 1 KiB, with some margin.
const XML_BYTES_MAX: u64 = 8 << 20;

/// Before each repetition of a request that a busy service refused; together short beside a call's deadline.
const BUSY_PAUSES_MS: [u64; 5] = [20, 50, 100, 250, 500];
/// S3 refuses requests of clocks that differ by 15 minutes; a little less, as the answer took some time.
const SKEW_REFUSED_S: u64 = 890;

pub(super) struct Client {
    bucket: Bucket,
    keys: Keys,
    agent: Agent,
    clock: Clock,
    buffers: BufferPool,
    /// Validity of a signature: as long as a call may take.
    expires_s: u64,
}

/// Why a request failed.
#[derive(Debug)]
pub(super) enum Failure {
    /// An error of the service: status, code and message.
    Said(u16, String, String),
    /// No answer, or an incomplete one.
    Silent(String),
}

impl Failure {
    pub(super) fn is_missing(&self) -> bool {
        matches!(self, Failure::Said(404, code, _) if code != "NoSuchBucket")
    }
    pub(super) fn is_condition(&self) -> bool {
        matches!(self, Failure::Said(412, ..))
    }
    /// The service had too much to do, and did nothing.
    fn is_busy(&self) -> bool {
        matches!(self, Failure::Said(429 | 503, ..))
    }
    pub(super) fn fault(self, doing: &str, path: &HomePath) -> Fault {
        let (kind, error, remedy, what) = match &self {
            Failure::Said(status, code, message) => {
                let (kind, error, remedy) = map_status(*status, code);
                (kind, error, remedy, format!("{status} {code} ({message})"))
            }
            Failure::Silent(why) => {
                (FaultKind::Unreachable, ErrorKind::Unavailable, "it is tried again", why.clone())
            }
        };
        Fault::new(kind, path, Error::new(error, format!("{doing} {path} at home: {what}: {remedy}")))
    }
}

/// The meaning of a refusal that has no document, as those of HEAD: a wrong clock is known by the time of the
/// answer. `ahead_s`: of the service's clock.
fn refused_without_words(ahead_s: i64) -> Failure {
    let (code, message) = match ahead_s.unsigned_abs() {
        0..SKEW_REFUSED_S => (String::new(), String::new()),
        s => {
            let which = if ahead_s > 0 { "ahead of" } else { "behind" };
            (
                "RequestTimeTooSkewed".to_owned(),
                format!("the service's clock is {s} s {which} this machine's"),
            )
        }
    };
    Failure::Said(403, code, message)
}

/// On a thread of the home.
#[allow(clippy::disallowed_methods, reason = "the calling thread exists for blocking requests only")]
fn pause(time: Duration) {
    std::thread::sleep(time);
}

/// Codes of keys that were valid and are not any more.
fn has_ended(code: &str) -> bool {
    matches!(code, "ExpiredToken" | "TokenRefreshRequired" | "InvalidToken" | "InvalidAccessKeyId")
}

/// There are no keys for a request. A service of keys that does not answer is tried again.
fn no_keys(e: Error) -> Failure {
    match e.kind {
        ErrorKind::Unavailable | ErrorKind::Deadline => Failure::Silent(e.to_string()),
        _ => Failure::Said(401, "NoKeys".into(), e.to_string()),
    }
}

/// The meaning of an error answer for the mover, and a hint for the user.
pub fn map_status(status: u16, code: &str) -> (FaultKind, ErrorKind, &'static str) {
    use FaultKind::*;
    match (status, code) {
        (_, "QuotaExceeded" | "XMinioStorageFull" | "InsufficientStorage") | (507, _) => {
            (Full, ErrorKind::NoSpace, "free space at home, or raise the quota there")
        }
        (_, "RequestTimeTooSkewed") => {
            (Denied, ErrorKind::Denied, "set the clock of this machine, or of the service")
        }
        (404, "NoSuchBucket") => {
            (Unreachable, ErrorKind::Unavailable, "make the bucket, or correct the relation's URL")
        }
        (_, code) if has_ended(code) => (Denied, ErrorKind::Denied, "renew the keys of the mover"),
        (401 | 403, _) => {
            (Denied, ErrorKind::Denied, "check the access key and what it may do with the bucket")
        }
        (404 | 412, _) => (
            Diverged,
            ErrorKind::Stale,
            "the home was changed by others: weir relation resolve decides which side wins",
        ),
        // Among them: SlowDown, RequestTimeout, a conflict of two requests, BadDigest (bytes damaged in
        // transit).
        (408 | 409 | 425 | 429 | 500..=599, _) | (400, "RequestTimeout" | "BadDigest" | "IncompleteBody") => {
            (Unreachable, ErrorKind::Unavailable, "it is tried again; check the service if it stays so")
        }
        _ => (Broken, ErrorKind::Unsupported, "the home cannot store this; rename the file or exclude it"),
    }
}

/// One request: its signed and unsigned parts.
#[derive(Default)]
pub(super) struct Ask<'a> {
    query: BTreeMap<&'static str, String>,
    headers: BTreeMap<&'static str, String>,
    /// Not part of the signature.
    plain: Vec<(&'static str, String)>,
    body: &'a [Bytes],
}

impl<'a> Ask<'a> {
    pub(super) fn query(mut self, name: &'static str, value: impl ToString) -> Self {
        self.query.insert(name, value.to_string());
        self
    }
    pub(super) fn plain(mut self, name: &'static str, value: impl ToString) -> Self {
        self.plain.push((name, value.to_string()));
        self
    }
    pub(super) fn header(mut self, name: &'static str, value: impl ToString) -> Self {
        self.headers.insert(name, value.to_string());
        self
    }
    pub(super) fn meta(mut self, meta: &Meta) -> Outcome<Self> {
        self.headers.extend(meta.to_headers()?);
        Ok(self)
    }
    pub(super) fn body(mut self, body: &'a [Bytes]) -> Self {
        self.body = body;
        self
    }
}

/// A range of an object's version with this ETag.
pub(super) struct CopySource<'a> {
    pub(super) key: &'a str,
    pub(super) etag: &'a str,
    pub(super) range: Range<u64>,
}

struct Parts<'a> {
    left: &'a [Bytes],
    at: usize,
}
impl Read for Parts<'_> {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        while let Some((first, rest)) = self.left.split_first() {
            let bytes = &first[self.at..];
            if bytes.is_empty() {
                (self.left, self.at) = (rest, 0);
                continue;
            }
            let n = bytes.len().min(buf.len());
            buf[..n].copy_from_slice(&bytes[..n]);
            self.at += n;
            return Ok(n);
        }
        Ok(0)
    }
}

type Answer<T> = std::result::Result<T, Failure>;

impl Client {
    pub(super) fn new(
        config: &S3HomeConfig,
        clock: Clock,
        buffers: BufferPool,
    ) -> weir_proto::Result<Client> {
        let bad = |why: String| Error::invalid(format!("the S3 endpoint {}: {why}", config.endpoint));
        let endpoint = config.endpoint.parse().map_err(|e| bad(format!("{e}")))?;
        let style = if config.path_style { UrlStyle::Path } else { UrlStyle::VirtualHost };
        let bucket = Bucket::new(endpoint, style, config.bucket.clone(), config.region.clone())
            .map_err(|e| bad(e.to_string()))?;
        if !matches!(bucket.base_url().scheme(), "http" | "https") {
            return Err(bad("it is neither http nor https".into()));
        }
        let keys = Keys::new(config.keys.clone(), clock.clone());
        let agent = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .proxy(None) // only main reads the environment
            .timeout_global(Some(config.limits.deadline))
            .max_idle_connections_per_host(config.limits.threads_max)
            .build()
            .new_agent();
        let expires_s = config.limits.deadline.as_secs().clamp(1, 7 * 24 * 3600) + 60;
        Ok(Client { bucket, keys, agent, clock, buffers, expires_s })
    }

    /// A service that refuses a request because it has too much to do has done nothing: it is asked again a
    /// few times, or a home that refuses a part of the requests would make no progress with work that needs
    /// several.
    fn send(&self, method: Method, key: Option<&str>, ask: Ask<'_>) -> Answer<Response<Body>> {
        let mut pauses = BUSY_PAUSES_MS.iter();
        loop {
            let answer = self.send_once(method, key, &ask);
            match (&answer, pauses.next()) {
                (Err(failure), Some(ms)) if failure.is_busy() => pause(Duration::from_millis(*ms)),
                _ => return answer,
            }
        }
    }

    fn send_once(&self, method: Method, key: Option<&str>, ask: &Ask<'_>) -> Answer<Response<Body>> {
        let url = key.map_or_else(|| self.bucket.base_url().clone(), |key| self.bucket.object_url(key));
        let silent = |e: &dyn std::fmt::Display| Failure::Silent(e.to_string());
        let now = jiff::Timestamp::from_nanosecond(self.clock.wall().0.into()).map_err(|e| silent(&e))?;
        let keys = self.keys.current().map_err(no_keys)?;
        let signed = rusty_s3::signing::sign(
            &now,
            method,
            url,
            &keys.access_key,
            &keys.secret_key,
            keys.token.as_deref(),
            self.bucket.region(),
            self.expires_s,
            ask.query.iter().map(|(k, v)| (*k, v.as_str())),
            ask.headers.iter().map(|(k, v)| (*k, v.as_str())),
        );
        let len: usize = ask.body.iter().map(Bytes::len).sum();
        let mut request = Request::builder().method(method.to_str()).uri(signed.as_str());
        for (name, value) in
            ask.headers.iter().map(|(k, v)| (*k, v)).chain(ask.plain.iter().map(|(k, v)| (*k, v)))
        {
            request = request.header(name, value);
        }
        let answer = if matches!(method, Method::Put | Method::Post) {
            request = request.header("content-length", len);
            if len > 0 {
                let mut md5 = Md5::new();
                ask.body.iter().for_each(|part| md5.update(part));
                request = request.header("content-md5", BASE64.encode(md5.finalize()));
            }
            let mut parts = Parts { left: ask.body, at: 0 };
            let request = request.body(SendBody::from_reader(&mut parts)).map_err(|e| silent(&e))?;
            self.agent.run(request)
        } else {
            self.agent.run(request.body(()).map_err(|e| silent(&e))?)
        };
        let answer = answer.map_err(|e| silent(&e))?;
        if answer.status().is_success() {
            return Ok(answer);
        }
        let at_service = header(&answer, "date").and_then(|text| jiff::fmt::rfc2822::parse(text).ok());
        let failure = match (said(answer), at_service) {
            (Failure::Said(403, code, _), Some(there)) if code.is_empty() => {
                refused_without_words(there.timestamp().as_second() - now.as_second())
            }
            (failure, _) => failure,
        };
        if matches!(&failure, Failure::Said(_, code, _) if has_ended(code)) {
            self.keys.are_refused();
        }
        Err(failure)
    }

    /// The document of an answer. A service that began its answer before it knew the result reports an error
    /// after a success status.
    fn document(&self, method: Method, key: Option<&str>, ask: Ask<'_>) -> Answer<Element> {
        let mut answer = self.send(method, key, ask)?;
        let text = read_text(&mut answer)?;
        let root = Element::parse(&text)
            .map_err(|e| Failure::Silent(format!("the answer is not a document of S3: {e}")))?;
        match root.name.as_str() {
            "Error" => Err(said_in(500, &root)),
            _ => Ok(root),
        }
    }

    pub(super) fn head(&self, key: &str) -> Answer<Option<Object>> {
        match self.send(Method::Head, Some(key), Ask::default()) {
            Ok(answer) => Ok(Some(object_of(key, &answer))),
            Err(failure) if failure.is_missing() => Ok(None),
            Err(failure) => Err(failure),
        }
    }

    /// Reads a range of the object's version with this ETag.
    pub(super) fn get(&self, key: &str, etag: &str, range: Range<u64>) -> Answer<Vec<Bytes>> {
        if range.is_empty() {
            return Ok(Vec::new());
        }
        let ask = Ask::default()
            .plain("range", format!("bytes={}-{}", range.start, range.end - 1))
            .plain("if-match", quoted(etag));
        let answer = self.send(Method::Get, Some(key), ask)?;
        let mut body = answer.into_body().into_with_config().limit(u64::MAX).reader();
        let mut left =
            usize::try_from(range.end - range.start).map_err(|e| Failure::Silent(e.to_string()))?;
        let mut parts = Vec::with_capacity(left.div_ceil(READ_BYTES_MAX));
        while left > 0 {
            let mut buf = self.buffers.get(left.min(READ_BYTES_MAX));
            body.read_exact(&mut buf).map_err(|e| Failure::Silent(format!("the answer ended early: {e}")))?;
            left -= buf.len();
            parts.push(buf.freeze());
        }
        Ok(parts)
    }

    pub(super) fn put(&self, key: &str, ask: Ask<'_>) -> Answer<()> {
        self.send(Method::Put, Some(key), ask).map(drop)
    }

    pub(super) fn delete(&self, key: &str) -> Answer<()> {
        match self.send(Method::Delete, Some(key), Ask::default()) {
            Err(failure) if !failure.is_missing() => Err(failure),
            _ => Ok(()),
        }
    }

    /// Copies within the bucket, with new metadata. At most 5 GiB.
    pub(super) fn copy(&self, from: &str, etag: &str, to: &str, ask: Ask<'_>) -> Answer<()> {
        let ask = self.source(ask, from, etag).header("x-amz-metadata-directive", "REPLACE");
        self.document(Method::Put, Some(to), ask).map(drop)
    }

    fn source<'a>(&self, ask: Ask<'a>, from: &str, etag: &str) -> Ask<'a> {
        let source = format!("/{}/{}", self.bucket.name(), from);
        ask.header("x-amz-copy-source", url_encode(&source))
            .header("x-amz-copy-source-if-match", quoted(etag))
    }

    /// Keys below `prefix` after `after`, keys with a further slash grouped as one; at most `limit` (1,000),
    /// and whether there are more.
    pub(super) fn list(
        &self,
        prefix: &str,
        after: Option<&str>,
        delimited: bool,
        limit: usize,
    ) -> Answer<(Vec<String>, bool)> {
        let mut ask = Ask::default()
            .query("list-type", 2)
            .query("encoding-type", "url")
            .query("prefix", prefix)
            .query("max-keys", limit.clamp(1, 1000));
        if delimited {
            ask = ask.query("delimiter", "/");
        }
        if let Some(after) = after {
            ask = ask.query("start-after", after);
        }
        listed(&self.document(Method::Get, None, ask)?)
    }

    pub(super) fn begin_upload(&self, key: &str, ask: Ask<'_>) -> Answer<String> {
        let begun = self.document(Method::Post, Some(key), ask.query("uploads", ""))?;
        let id = begun.text_of("UploadId").filter(|id| !id.is_empty()).map(str::to_owned);
        id.ok_or_else(|| Failure::Silent("an upload was begun without an id".into()))
    }

    /// Unfinished uploads of this key.
    pub(super) fn uploads(&self, key: &str) -> Answer<Vec<String>> {
        let ask = Ask::default().query("uploads", "").query("prefix", key);
        let listed = self.document(Method::Get, None, ask)?;
        let of_key = listed.all("Upload").filter(|upload| upload.exact_text_of("Key") == Some(key));
        Ok(of_key.filter_map(|upload| upload.text_of("UploadId")).map(str::to_owned).collect())
    }

    pub(super) fn put_part(&self, key: &str, upload: &str, number: u16, body: &[Bytes]) -> Answer<String> {
        let ask = Ask::default().query("partNumber", number).query("uploadId", upload).body(body);
        let answer = self.send(Method::Put, Some(key), ask)?;
        header(&answer, "etag")
            .map(unquoted)
            .ok_or_else(|| Failure::Silent("a part was taken without an ETag".into()))
    }

    pub(super) fn copy_part(
        &self,
        key: &str,
        upload: &str,
        number: u16,
        source: CopySource<'_>,
    ) -> Answer<String> {
        let ask = Ask::default().query("partNumber", number).query("uploadId", upload);
        let CopySource { key: from, etag, range } = source;
        let ask = self
            .source(ask, from, etag)
            .header("x-amz-copy-source-range", format!("bytes={}-{}", range.start, range.end - 1));
        let copied = self.document(Method::Put, Some(key), ask)?;
        let etag = copied.text_of("ETag").map(unquoted).filter(|etag| !etag.is_empty());
        etag.ok_or_else(|| Failure::Silent("a part was copied without an ETag".into()))
    }

    /// Number, ETag and size of the uploaded parts; none: there is no such upload (any more).
    pub(super) fn parts(&self, key: &str, upload: &str) -> Answer<Option<BTreeMap<u16, (String, u64)>>> {
        let (mut parts, mut after) = (BTreeMap::new(), None);
        loop {
            let mut ask = Ask::default().query("uploadId", upload);
            if let Some(after) = after {
                ask = ask.query("part-number-marker", after);
            }
            let listed = match self.document(Method::Get, Some(key), ask) {
                Err(failure) if failure.is_missing() => return Ok(None),
                listed => listed?,
            };
            for part in listed.all("Part") {
                let known =
                    part_of(part).ok_or_else(|| Failure::Silent("a listed part lacks a value".into()))?;
                parts.extend([known]);
            }
            match next_marker(&listed) {
                Some(next) if Some(next) > after => after = Some(next),
                _ => return Ok(Some(parts)),
            }
        }
    }

    /// Completes an upload whose parts are 1, 2, 3 and so on.
    pub(super) fn end_upload(&self, key: &str, upload: &str, etags: &[String]) -> Answer<()> {
        let mut xml = String::from("<CompleteMultipartUpload>");
        for (n, etag) in etags.iter().enumerate() {
            let number = n + 1;
            xml.push_str(&format!("<Part><ETag>\"{etag}\"</ETag><PartNumber>{number}</PartNumber></Part>"));
        }
        xml.push_str("</CompleteMultipartUpload>");
        let body = [Bytes::from(xml)];
        let ask = Ask::default().query("uploadId", upload).body(&body);
        self.document(Method::Post, Some(key), ask).map(drop)
    }

    pub(super) fn abort_upload(&self, key: &str, upload: &str) -> Answer<()> {
        match self.send(Method::Delete, Some(key), Ask::default().query("uploadId", upload)) {
            Err(failure) if !failure.is_missing() => Err(failure),
            _ => Ok(()),
        }
    }
}

/// The error of an answer; a proxy does not answer with a document.
fn said(mut answer: Response<Body>) -> Failure {
    let status = answer.status().as_u16();
    let text = read_text(&mut answer).unwrap_or_default();
    match Element::parse(&text) {
        Ok(root) => said_in(status, &root),
        Err(_) => Failure::Said(status, String::new(), String::new()),
    }
}

/// Some services put the error into an element around it.
fn said_in(status: u16, root: &Element) -> Failure {
    let error = root.all("Error").next().unwrap_or(root);
    let word = |name: &str| error.text_of(name).unwrap_or_default().to_owned();
    Failure::Said(status, word("Code"), word("Message"))
}

/// The keys of a listing, and whether there are more.
fn listed(root: &Element) -> Answer<(Vec<String>, bool)> {
    let is_encoded = root.text_of("EncodingType") == Some("url");
    let decoded = |text: &str| if is_encoded { url_decode(text) } else { Some(text.to_owned()) };
    let objects = root.all("Contents").map(|object| object.exact_text_of("Key"));
    let common = root.all("CommonPrefixes").map(|common| common.exact_text_of("Prefix"));
    let keys: Option<Vec<String>> = objects.chain(common).map(|key| decoded(key?)).collect();
    let mut keys = keys.ok_or_else(|| Failure::Silent("a listed key is missing, or is not UTF-8".into()))?;
    keys.sort_unstable();
    Ok((keys, root.text_of("IsTruncated") == Some("true")))
}

/// Number, ETag and size.
fn part_of(part: &Element) -> Option<(u16, (String, u64))> {
    let number = part.text_of("PartNumber")?.parse().ok()?;
    let size = part.text_of("Size")?.parse().ok()?;
    Some((number, (unquoted(part.text_of("ETag")?), size)))
}

/// Where a list of parts continues.
fn next_marker(listed: &Element) -> Option<u16> {
    let is_truncated = listed.text_of("IsTruncated") == Some("true");
    listed.text_of("NextPartNumberMarker").filter(|_| is_truncated)?.parse().ok()
}

fn read_text(answer: &mut Response<Body>) -> Answer<String> {
    let body = answer.body_mut().with_config().limit(XML_BYTES_MAX);
    body.read_to_string().map_err(|e| Failure::Silent(e.to_string()))
}

fn header<'a>(answer: &'a Response<Body>, name: &str) -> Option<&'a str> {
    answer.headers().get(name)?.to_str().ok()
}

fn object_of(key: &str, answer: &Response<Body>) -> Object {
    let meta = header(answer, META).and_then(|text| Meta::parse(text, header(answer, META_XATTRS)));
    let size = header(answer, "content-length").and_then(|text| text.parse().ok()).unwrap_or(0);
    let etag = header(answer, "etag").map(unquoted).unwrap_or_default();
    let modified = header(answer, "last-modified").and_then(|text| jiff::fmt::rfc2822::parse(text).ok());
    let is_ours = meta.is_some();
    let meta = meta.unwrap_or_else(|| {
        let nanos = modified.map_or(0, |at| i64::try_from(at.timestamp().as_nanosecond()).unwrap_or(0));
        stranger(key, Time { nanos })
    });
    Object { meta, is_ours, etag, size }
}

/// Metadata assumed for a foreign object.
fn stranger(key: &str, at: Time) -> Meta {
    let is_dir = key.ends_with('/');
    let (kind, mode) = if is_dir { (FileKind::Directory, 0o755) } else { (FileKind::Regular, 0o644) };
    let attrs = Attrs { mode, uid: 0, gid: 0, atime: at, mtime: at, xattrs: Vec::new() };
    Meta { kind, rdev: 0, id: [0; 16], attrs, written: None }
}

/// A directory without an object of its own, only with keys below it.
pub(super) fn implied_dir() -> Object {
    let etag = "implied".to_owned();
    Object { meta: stranger("/", Time { nanos: 0 }), is_ours: false, etag, size: 0 }
}

fn unquoted(etag: &str) -> String {
    etag.trim_matches('"').to_owned()
}
fn quoted(etag: &str) -> String {
    format!("\"{etag}\"")
}

#[cfg(test)]
#[allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "a test is a user of the operating system"
)]
mod tests {
    use super::*;
    use crate::{Credentials, KeySource};
    use FaultKind::*;

    #[test]
    fn each_answer_has_its_kind_of_fault() {
        for (status, code, kind) in [
            (403, "AccessDenied", Denied),
            (403, "RequestTimeTooSkewed", Denied),
            (401, "", Denied),
            (400, "ExpiredToken", Denied),
            (404, "NoSuchBucket", Unreachable),
            (404, "NoSuchKey", Diverged),
            (412, "PreconditionFailed", Diverged),
            (400, "KeyTooLongError", Broken),
            (400, "MetadataTooLarge", Broken),
            (400, "BadDigest", Unreachable),
            (409, "OperationAborted", Unreachable),
            (429, "", Unreachable),
            (500, "InternalError", Unreachable),
            (503, "SlowDown", Unreachable),
            (507, "", Full),
            (403, "QuotaExceeded", Full),
        ] {
            assert_eq!(map_status(status, code).0, kind, "{status} {code}");
        }
    }

    #[test]
    fn parts_are_read_as_one() {
        let parts = [Bytes::from_static(b"ab"), Bytes::new(), Bytes::from_static(b"cde")];
        let mut text = String::new();
        Parts { left: &parts, at: 0 }.read_to_string(&mut text).unwrap();
        assert_eq!(text, "abcde");
    }

    #[test]
    fn answers_of_odd_services_are_understood() {
        let root = |document: &str| Element::parse(document).unwrap();
        let document = "<x:ListBucketResult xmlns:x='u'><x:EncodingType>url</x:EncodingType><x:IsTruncated> true </x:IsTruncated>\
                        <x:Contents><x:Key>b%2Fa+%C3%A4%2B</x:Key></x:Contents><x:CommonPrefixes><x:Prefix>a/</x:Prefix>\
                        </x:CommonPrefixes></x:ListBucketResult>";
        let expected = (vec!["a/".to_owned(), "b/a ä+".to_owned()], true);
        assert_eq!(listed(&root(document)).unwrap(), expected);
        let plain = "<ListBucketResult><Contents><Key> a+%41&#10;</Key></Contents></ListBucketResult>";
        assert_eq!(listed(&root(plain)).unwrap(), (vec![" a+%41\n".to_owned()], false));
        assert!(
            listed(&root("<L><EncodingType>url</EncodingType><Contents><Key>%FF</Key></Contents></L>"))
                .is_err()
        );
        assert!(listed(&root("<L><Contents/></L>")).is_err());

        let parts = "<R><NextPartNumberMarker>2</NextPartNumberMarker><IsTruncated>false</IsTruncated><Part a='1'>\
                     <PartNumber>2</PartNumber><ETag>&#34;e&quot;</ETag><Size>5</Size></Part></R>";
        let parts = root(parts);
        assert_eq!(part_of(parts.all("Part").next().unwrap()), Some((2, ("e".to_owned(), 5))));
        assert_eq!(next_marker(&parts), None, "some services name one at the end, too");
        for error in ["<Error a='b'><Code>C</Code></Error>", "<R xmlns='u'><Error><Code>C</Code></Error></R>"]
        {
            let Failure::Said(403, code, _) = said_in(403, &root(error)) else { panic!("{error}") };
            assert_eq!(code, "C");
        }
    }

    /// A client of a service of the test.
    fn client() -> (std::net::TcpListener, Client) {
        let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let endpoint = format!("http://{}", listener.local_addr().unwrap());
        let keys = Credentials { access_key: "k".into(), secret_key: "s".into(), token: None };
        let config = S3HomeConfig {
            bucket: "b".into(),
            prefix: String::new(),
            endpoint,
            region: "r".into(),
            path_style: true,
            keys: KeySource::Fixed(keys),
            relation: "r".into(),
            is_new: false,
            only_reads: false,
            ids: Default::default(),
            limits: Default::default(),
            copy_bytes_max: S3HomeConfig::COPY_BYTES_MAX,
        };
        let env = weir_env::real::env();
        (listener, Client::new(&config, env.clock.clone(), env.buffers.clone()).unwrap())
    }

    /// A service that gives this answer to each request.
    fn answering(answer: &'static str) -> (Client, std::thread::JoinHandle<()>) {
        let (listener, client) = client();
        let service = std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut request = Vec::new();
            let mut buf = [0; 4096];
            // Headers, and the small body in the same packet or the next one.
            while !request.ends_with(b"</CompleteMultipartUpload>") {
                let n = stream.read(&mut buf).unwrap();
                assert!(n > 0, "the request is incomplete");
                request.extend_from_slice(&buf[..n]);
            }
            let head =
                format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\nconnection: close\r\n\r\n", answer.len());
            io::Write::write_all(&mut stream, (head + answer).as_bytes()).unwrap();
        });
        (client, service)
    }

    #[test]
    fn a_success_with_an_error_in_it_is_an_error() {
        let end = |answer| {
            let (client, service) = answering(answer);
            let ended = client.end_upload("k", "u", &["e".to_owned()]);
            service.join().unwrap();
            ended
        };
        let said = end(
            "\n\n<s:Error xmlns:s='x'><s:Code>InternalError</s:Code><s:Message>a &#60; b</s:Message></s:Error>",
        );
        let Err(Failure::Said(500, code, message)) = said else { panic!("{said:?}") };
        assert_eq!((code.as_str(), message.as_str()), ("InternalError", "a < b"));
        for cut in ["", "  ", "<CompleteMultipartUploadResult><Key>k</Key>", "<html>"] {
            assert!(matches!(end(cut), Err(Failure::Silent(_))), "{cut:?}");
        }
        let key = "<CompleteMultipartUploadResult><Key>&lt;Error>&lt;Code>x&lt;/Code></Key></CompleteMultipartUploadResult>";
        end(key).unwrap();
    }

    /// A service that gives these answers, one to each connection; and the requests that it got.
    fn answering_each(answers: Vec<String>) -> (Client, std::thread::JoinHandle<usize>) {
        let (listener, client) = client();
        let service = std::thread::spawn(move || {
            let mut count = 0;
            for answer in answers {
                let (mut stream, _) = listener.accept().unwrap();
                let (mut request, mut buf) = (Vec::new(), [0; 4096]);
                while !request.windows(4).any(|end| end == b"\r\n\r\n") {
                    let n = stream.read(&mut buf).unwrap();
                    assert!(n > 0, "the request is incomplete");
                    request.extend_from_slice(&buf[..n]);
                }
                io::Write::write_all(&mut stream, answer.as_bytes()).unwrap();
                count += 1;
            }
            count
        });
        (client, service)
    }

    #[test]
    fn a_service_that_refuses_every_second_request_makes_progress() {
        let busy = "HTTP/1.1 503 Slow Down\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";
        let missing = "HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\nconnection: close\r\n\r\n";
        let answers = [busy, missing].iter().cycle().take(8).map(|text| (*text).to_owned()).collect();
        let (client, service) = answering_each(answers);
        for _ in 0..4 {
            assert!(client.head("k").unwrap().is_none());
        }
        assert_eq!(service.join().unwrap(), 8);
        // One that is always busy is an error after a few tries.
        let (client, service) = answering_each(vec![busy.to_owned(); BUSY_PAUSES_MS.len() + 1]);
        assert!(matches!(client.head("k"), Err(Failure::Said(503, ..))));
        assert_eq!(service.join().unwrap(), BUSY_PAUSES_MS.len() + 1);
    }

    #[test]
    fn a_wrong_clock_is_named_also_where_the_answer_has_no_words() {
        let refused = |date: &str| {
            let answer = format!(
                "HTTP/1.1 403 Forbidden\r\ndate: {date}\r\ncontent-length: 0\r\nconnection: close\r\n\r\n"
            );
            let (client, service) = answering_each(vec![answer]);
            let failure = client.head("k").err().unwrap();
            service.join().unwrap();
            failure.fault("read", &HomePath::root()).to_string()
        };
        let old = refused("Mon, 01 Jan 2001 00:00:00 GMT");
        assert!(
            old.contains("s behind this machine's") && old.contains("set the clock of this machine"),
            "{old}"
        );
        let now = weir_env::real::env().clock.wall().0;
        let now = jiff::Timestamp::from_nanosecond(now.into()).unwrap();
        let right =
            refused(&jiff::fmt::rfc2822::DateTimePrinter::new().timestamp_to_rfc9110_string(&now).unwrap());
        assert!(right.contains("check the access key"), "{right}");
        let Failure::Said(_, code, message) = refused_without_words(1000) else { panic!("it is an answer") };
        assert_eq!(code, "RequestTimeTooSkewed");
        assert_eq!(message, "the service's clock is 1000 s ahead of this machine's");
    }

    #[test]
    fn quotes_of_etags_are_removed() {
        assert_eq!(unquoted("\"e\""), "e");
    }
}
