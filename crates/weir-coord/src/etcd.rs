//! The coordinator's store in etcd (3.4 or newer), through its JSON gateway: for several coordinators.
//!
//! ```text
//! PREFIX key/NAME                   a value: see `value.rs`
//! PREFIX part/NAME/WRITE/0000 …     parts of one that is larger than etcd takes in a request
//! ```
//!
//! Invariants: a write whose answer was lost is retried until its outcome is known; its random id identifies
//! it, so it is carried out once; after a claim each write checks, in its own transaction, that the claim
//! still holds. Knows nothing of maps: values are bytes.
mod gateway;
pub mod sim;
mod value;

use crate::store::{LeaseId, Revision, Store, Swap, Versioned, claim_ended, no_lease};
use base64::{Engine, engine::general_purpose::STANDARD as BASE64};
pub use gateway::{Answer, Failure, Transport};
use gateway::{Gateway, Http, left, number};
use serde_json::{Value, json};
use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use ureq::http::Uri;
use value::{Body, PART_BYTES, Stored, VALUE_BYTES_MAX, WriteId, hex, part_name};
use weir_env::{BoxFuture, Env};
use weir_proto::checksum::crc32c;
use weir_proto::{Error, ErrorKind, Result};

/// Longer than the lease of a coordinator: after this it does not lead any more.
const PATIENCE: Duration = Duration::from_secs(5);
/// For a question whose answer is only shown.
const ALARM_PATIENCE: Duration = Duration::from_secs(1);
/// Poll interval of a watched key. A stream would occupy a thread, and end silently with its etcd member.
const WATCH_PAUSE: Duration = Duration::from_millis(100);
/// How often a value in parts is read again when another writer replaces it meanwhile.
const REREADS: usize = 5;

/// Access to etcd.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct EtcdConfig {
    /// Like `http://10.1.0.2:2379`, without a path.
    pub endpoints: Vec<String>,
    /// Prefix of every key, for an etcd that other programs use, too.
    pub prefix: String,
    /// CA certificates of etcd's servers; empty: the public authorities that browsers trust.
    pub ca: PathBuf,
    /// Client certificate; empty: none.
    pub certificate: PathBuf,
    pub key: PathBuf,
}

/// The coordinator's store: `directory`, or `etcd:URL,URL,…`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum StorePlace {
    #[default]
    Directory,
    /// Endpoints.
    Etcd(Vec<String>),
}

impl FromStr for StorePlace {
    type Err = String;
    fn from_str(text: &str) -> std::result::Result<StorePlace, String> {
        if text == "directory" {
            return Ok(StorePlace::Directory);
        }
        let expected = || format!("{text:?}: expected \"directory\" or \"etcd:http://HOST:PORT,…\"");
        let urls = text.strip_prefix("etcd:").ok_or_else(expected)?;
        let endpoints = urls.split(',').map(endpoint).collect::<Option<Vec<String>>>();
        endpoints.map(StorePlace::Etcd).ok_or_else(expected)
    }
}
impl fmt::Display for StorePlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StorePlace::Directory => f.write_str("directory"),
            StorePlace::Etcd(endpoints) => write!(f, "etcd:{}", endpoints.join(",")),
        }
    }
}

/// Scheme, host and port of a URL without further parts.
fn endpoint(url: &str) -> Option<String> {
    let uri: Uri = url.parse().ok()?;
    let (scheme, authority) = (uri.scheme_str()?, uri.authority()?);
    let is_bare = matches!(uri.path(), "" | "/") && uri.query().is_none() && authority.port().is_some();
    let is_known = matches!(scheme, "http" | "https") && !authority.as_str().contains('@');
    (is_bare && is_known).then(|| format!("{scheme}://{authority}"))
}

/// A handle on etcd for one coordinator.
pub struct Etcd {
    env: Env,
    gateway: Gateway,
    prefix: String,
    claimed: Mutex<Option<Claim>>,
}

#[derive(Clone)]
struct Claim {
    key: String,
    /// The revision at which the key was created.
    made: u64,
}

/// A write, with everything that a retry needs.
struct Write<'a> {
    key: &'a str,
    /// `None`: any revision.
    expected: Option<Revision>,
    value: Vec<u8>,
    lease: Option<LeaseId>,
}

/// The entry under a key.
struct Present {
    stored: Stored,
    /// Revision of its last write.
    revision: Revision,
    /// Revision at which the key was created.
    made: u64,
}

impl Etcd {
    /// Reads the files of the configuration; sends no request yet.
    pub fn open(env: &Env, config: &EtcdConfig) -> Result<Arc<Etcd>> {
        if config.endpoints.is_empty() {
            return Err(Error::invalid("no endpoint of etcd is named")
                .hint("coord.store = \"etcd:http://HOST:2379\""));
        }
        let http = Http::new(env, config)?;
        Ok(Etcd::through(env, config, Arc::new(http)))
    }

    /// With another transport to etcd.
    pub fn through(env: &Env, config: &EtcdConfig, transport: Arc<dyn Transport>) -> Arc<Etcd> {
        let gateway = Gateway::new(env, &config.endpoints, transport);
        let (env, prefix) = (env.clone(), config.prefix.clone());
        Arc::new(Etcd { env, gateway, prefix, claimed: Mutex::default() })
    }

    /// The endpoints that do not answer, with reasons.
    pub async fn silent_members(&self) -> Vec<(String, String)> {
        self.gateway.silent("/v3/maintenance/status").await
    }

    /// The members, by their numbers, whose store is full: etcd then takes no writes. Empty also if it cannot
    /// be asked.
    pub async fn members_without_space(&self) -> Vec<String> {
        let asked =
            self.gateway.ask("/v3/maintenance/alarm", &json!({ "action": "GET" }), ALARM_PATIENCE).await;
        asked.map(|answer| without_space(&answer)).unwrap_or_default()
    }

    fn key(&self, name: &str) -> String {
        BASE64.encode(format!("{}key/{name}", self.prefix))
    }
    /// `name`: of the value, then the rest of a part's name, or a prefix of it.
    fn part(&self, name: &str) -> String {
        BASE64.encode(format!("{}part/{name}", self.prefix))
    }
    fn claimed(&self) -> Option<Claim> {
        self.claimed.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    async fn present(&self, key: &str) -> Result<Option<Present>> {
        let asked = self.gateway.ask("/v3/kv/range", &json!({ "key": self.key(key) }), PATIENCE).await?;
        self.first_of(&asked, key)
    }

    /// The first key of the answer to a range.
    fn first_of(&self, range: &Value, key: &str) -> Result<Option<Present>> {
        let Some(kv) = range.get("kvs").and_then(|kvs| kvs.get(0)) else { return Ok(None) };
        let stored = bytes_of(kv).and_then(|bytes| Stored::decode(&bytes));
        let stored = stored.map_err(|e| e.doing(format_args!("read {}key/{key} in etcd", self.prefix)))?;
        let revision = Revision(number(kv, "mod_revision"));
        Ok(Some(Present { stored, revision, made: number(kv, "create_revision") }))
    }

    /// The value with its parts. `None`: another writer has replaced them meanwhile.
    async fn whole(&self, key: &str, present: Present) -> Result<Option<Versioned>> {
        let Present { stored: Stored { write, body }, revision, .. } = present;
        let (bytes, crc) = match body {
            Body::Whole(value) => return Ok(Some(Versioned { value, revision })),
            Body::InParts { bytes, crc } => (bytes as usize, crc),
        };
        let mut value = Vec::with_capacity(bytes.min(VALUE_BYTES_MAX));
        for n in 0..bytes.div_ceil(PART_BYTES) {
            let name = self.part(&format!("{key}/{}", part_name(&write, n)));
            let asked = self.gateway.ask("/v3/kv/range", &json!({ "key": name }), PATIENCE).await?;
            let Some(kv) = asked.get("kvs").and_then(|kvs| kvs.get(0)) else { return Ok(None) };
            value.extend(bytes_of(kv)?);
        }
        if value.len() != bytes || crc32c(&value) != crc {
            return Err(Error::damaged(format!("{}key/{key} in etcd fails its checksum", self.prefix)));
        }
        Ok(Some(Versioned { value, revision }))
    }

    /// Writes the parts of a large value, then the key in one transaction.
    async fn write(&self, write: Write<'_>) -> Result<Swap> {
        let until = self.env.clock.now() + PATIENCE;
        let id = self.env.rng.id_128();
        let stored = Stored::of(id, &write.value)?;
        if let Body::InParts { .. } = stored.body {
            for (n, part) in write.value.chunks(PART_BYTES).enumerate() {
                let name = self.part(&format!("{}/{}", write.key, part_name(&id, n)));
                let put = json!([{ "request_put": { "key": name, "value": BASE64.encode(part) } }]);
                let outcome = self.transact(Vec::new(), put, &write, left(&self.env, until)).await?;
                self.check_claim(&outcome)?;
            }
        }
        let expected = write.expected.map(|revision| {
            json!({ "key": self.key(write.key), "target": "MOD", "mod_revision": revision.0.to_string() })
        });
        let mut success = vec![json!({ "request_put": {
            "key": self.key(write.key), "value": BASE64.encode(stored.encode()),
            "lease": write.lease.map_or(0, |lease| lease.0 as i64).to_string(),
        } })];
        success.extend(self.other_parts(&write, &stored));
        let conditions = expected.into_iter().collect();
        let answer = self.transact(conditions, json!(success), &write, left(&self.env, until)).await?;
        self.outcome(&answer, &write, id).await
    }

    /// Deletes all parts of the key except those of this write, also leftovers of interrupted writes.
    fn other_parts(&self, write: &Write<'_>, stored: &Stored) -> Vec<Value> {
        let delete = |from: String, to: String| json!({ "request_delete_range": { "key": self.part(&from), "range_end": self.part(&to) } });
        let (all, end) = (format!("{}/", write.key), format!("{}0", write.key)); // '0' follows '/'
        match stored.body {
            Body::Whole(_) => vec![delete(all, end)],
            Body::InParts { .. } => {
                let own = format!("{all}{}", hex(&stored.write));
                vec![delete(all, format!("{own}/")), delete(format!("{own}0"), end)]
            }
        }
    }

    /// One transaction, if the conditions hold and the claim lasts. Otherwise its answer has the present
    /// entries of the key and of the claimed key.
    async fn transact(
        &self,
        mut conditions: Vec<Value>,
        success: Value,
        write: &Write<'_>,
        patience: Duration,
    ) -> Result<Value> {
        let mut failure = vec![json!({ "request_range": { "key": self.key(write.key) } })];
        if let Some(claim) = self.claimed() {
            let key = self.key(&claim.key);
            failure.push(json!({ "request_range": { "key": key } }));
            let made = claim.made.to_string();
            conditions.push(json!({ "key": key, "target": "CREATE", "create_revision": made }));
        }
        let request = json!({ "compare": conditions, "success": success, "failure": failure });
        self.gateway.ask("/v3/kv/txn", &request, patience).await
    }

    /// The outcome of a write. A retry of a write that succeeded fails, and is recognized by its id.
    async fn outcome(&self, answer: &Value, write: &Write<'_>, id: WriteId) -> Result<Swap> {
        if succeeded(answer) {
            return Ok(Swap::Done(Revision(answer.get("header").map_or(0, |h| number(h, "revision")))));
        }
        let present = self.first_of(range_of(answer, 0), write.key)?;
        if let Some(own) = present.as_ref().filter(|present| present.stored.write == id) {
            return Ok(Swap::Done(own.revision));
        }
        self.check_claim(answer)?;
        Ok(Swap::Conflict(match present {
            None => None,
            Some(present) => match self.whole(write.key, present).await? {
                Some(found) => Some(found),
                None => self.read(write.key).await?,
            },
        }))
    }

    /// `Stale` if a transaction has failed because the claim has ended.
    fn check_claim(&self, answer: &Value) -> Result<()> {
        let Some(claim) = self.claimed().filter(|_| !succeeded(answer)) else { return Ok(()) };
        match self.first_of(range_of(answer, 1), &claim.key)? {
            Some(present) if present.made == claim.made => Ok(()),
            _ => Err(claim_ended(&claim.key)),
        }
    }

    async fn read(&self, key: &str) -> Result<Option<Versioned>> {
        for _ in 0..REREADS {
            let Some(present) = self.present(key).await? else { return Ok(None) };
            if let Some(whole) = self.whole(key, present).await? {
                return Ok(Some(whole));
            }
        }
        Err(Error::damaged(format!("parts of {}key/{key} are missing in etcd", self.prefix))
            .hint("restore etcd from a snapshot"))
    }
}

/// The gateway writes alarms by name, and numbers as texts.
fn without_space(answer: &Value) -> Vec<String> {
    let alarms = answer.get("alarms").and_then(Value::as_array);
    let is_full = |alarm: &&Value| {
        let kind = alarm.get("alarm");
        kind.and_then(Value::as_str) == Some("NOSPACE") || kind.and_then(Value::as_u64) == Some(1)
    };
    let name = |alarm: &Value| format!("{:x}", number(alarm, "memberID"));
    alarms.into_iter().flatten().filter(is_full).map(name).collect()
}

fn succeeded(answer: &Value) -> bool {
    answer.get("succeeded").and_then(Value::as_bool).unwrap_or(false)
}

/// The answer to the range that is operation `n` of a transaction.
fn range_of(answer: &Value, n: usize) -> &Value {
    let response = answer.get("responses").and_then(|all| all.get(n));
    response.and_then(|one| one.get("response_range")).unwrap_or(&Value::Null)
}

fn bytes_of(kv: &Value) -> Result<Vec<u8>> {
    let text = kv.get("value").and_then(Value::as_str).unwrap_or_default(); // the gateway omits an empty one
    BASE64.decode(text).map_err(|e| Error::damaged(format!("a value of etcd is not in Base64: {e}")))
}

impl Store for Etcd {
    fn get<'a>(&'a self, key: &'a str) -> BoxFuture<'a, Result<Option<Versioned>>> {
        Box::pin(self.read(key))
    }

    fn put<'a>(
        &'a self,
        key: &'a str,
        value: Vec<u8>,
        lease: Option<LeaseId>,
    ) -> BoxFuture<'a, Result<Revision>> {
        Box::pin(async move {
            match self.write(Write { key, expected: None, value, lease }).await {
                Ok(Swap::Done(revision)) => Ok(revision),
                Ok(Swap::Conflict(_)) => Err(Error::stale(format!("{key:?} could not be written in etcd"))),
                Err(e) => Err(lease_of(e, lease)),
            }
        })
    }

    fn compare_and_swap<'a>(
        &'a self,
        key: &'a str,
        expected: Revision,
        value: Vec<u8>,
    ) -> BoxFuture<'a, Result<Swap>> {
        Box::pin(async move {
            let write = Write { key, expected: Some(expected), value, lease: None };
            self.write(write).await.map_err(|e| lease_of(e, None))
        })
    }

    fn claim<'a>(&'a self, key: &'a str, value: Vec<u8>, lease: LeaseId) -> BoxFuture<'a, Result<Swap>> {
        Box::pin(async move {
            *self.claimed.lock().unwrap_or_else(PoisonError::into_inner) = None;
            let write = Write { key, expected: Some(Revision(0)), value, lease: Some(lease) };
            let outcome = self.write(write).await.map_err(|e| lease_of(e, Some(lease)))?;
            if let Swap::Done(Revision(made)) = outcome {
                let claim = Claim { key: key.to_owned(), made };
                *self.claimed.lock().unwrap_or_else(PoisonError::into_inner) = Some(claim);
            }
            Ok(outcome)
        })
    }

    fn watch<'a>(&'a self, key: &'a str, known: Revision) -> BoxFuture<'a, Result<Option<Versioned>>> {
        Box::pin(async move {
            loop {
                let present = self.read(key).await?;
                if present.as_ref().map_or(Revision(0), |v| v.revision) != known {
                    return Ok(present);
                }
                self.env.clock.sleep(WATCH_PAUSE).await;
            }
        })
    }

    /// etcd counts whole seconds, and at least two by its defaults.
    fn grant_lease(&self, ttl: Duration) -> BoxFuture<'_, Result<LeaseId>> {
        Box::pin(async move {
            let seconds = ttl.as_millis().div_ceil(1000).max(1).to_string();
            let granted = self.gateway.ask("/v3/lease/grant", &json!({ "TTL": seconds }), PATIENCE).await?;
            match number(&granted, "ID") {
                0 => Err(Error::damaged("etcd has granted a lease without an id")),
                id => Ok(LeaseId(id)),
            }
        })
    }

    fn keep_lease(&self, lease: LeaseId) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move {
            let asked = json!({ "ID": (lease.0 as i64).to_string() });
            let kept = self.gateway.ask("/v3/lease/keepalive", &asked, PATIENCE).await?;
            let left = number(kept.get("result").unwrap_or(&Value::Null), "TTL") as i64;
            if left > 0 { Ok(()) } else { Err(no_lease(lease)) }
        })
    }

    fn end_lease(&self, lease: LeaseId) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move {
            let asked = json!({ "ID": (lease.0 as i64).to_string() });
            let ended = self.gateway.ask("/v3/lease/revoke", &asked, PATIENCE).await;
            ended.map(drop).map_err(|e| lease_of(e, Some(lease)))
        })
    }
}

/// For etcd only leases can be "not found". (To callers of the coordinator "not found" would have another
/// meaning.)
fn lease_of(e: Error, lease: Option<LeaseId>) -> Error {
    match lease {
        Some(lease) if e.kind == ErrorKind::NotFound => no_lease(lease),
        None if e.kind == ErrorKind::NotFound => e.of_kind(ErrorKind::Unavailable),
        _ => e,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn members_without_space_are_those_with_the_alarm() {
        let answer = json!({ "header": {}, "alarms": [
            { "memberID": "255", "alarm": "NOSPACE" }, { "memberID": "7", "alarm": "CORRUPT" },
        ] });
        assert_eq!(without_space(&answer), ["ff"]);
        assert_eq!(without_space(&json!({ "header": {} })), Vec::<String>::new());
    }

    #[test]
    fn a_place_is_written_as_it_is_read() {
        for text in ["directory", "etcd:http://a:2379", "etcd:https://[fd00::1]:2379,http://10.0.0.2:1"] {
            assert_eq!(text.parse::<StorePlace>().unwrap().to_string(), text);
        }
        let two = "etcd:http://a:1/,http://b:2".parse::<StorePlace>().unwrap();
        assert_eq!(two, StorePlace::Etcd(vec!["http://a:1".into(), "http://b:2".into()]));
        for wrong in [
            "",
            "etcd",
            "etcd:",
            "etcd:a:2379",
            "etcd:http://a",
            "etcd:ftp://a:1",
            "etcd:http://a:1,",
            "etcd:http://u:p@a:1",
            "etcd:http://a:1/x",
            "etcd:http://a:1?x",
            "dir",
            "etcd:http://a:1, http://b:1",
        ] {
            assert!(wrong.parse::<StorePlace>().is_err(), "{wrong:?}");
        }
    }
}
