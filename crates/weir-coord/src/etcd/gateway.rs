//! Requests to etcd's JSON gateway: knows etcd's protocol, not the purpose of the requests.
//!
//! Each request goes to one endpoint after the other until one answers. So it may be carried out more than
//! once: callers send only requests for which that is harmless. All answers must be of one etcd cluster.
use super::EtcdConfig;
use serde_json::Value;
use std::borrow::Cow;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tokio::sync::oneshot;
use ureq::Agent;
use ureq::tls::{Certificate, ClientCert, PemItem, PrivateKey, RootCerts, TlsConfig, parse_pem};
use weir_env::{BoxFuture, Env, Instant, Lane};
use weir_proto::{Error, ErrorKind, Result};

/// An endpoint that does not answer within this time is skipped. A healthy member answers within
/// milliseconds. One without a leader answers late: an election, of which there may be two in a row, must
/// leave time for more attempts within a coordinator's lease.
const ATTEMPT: Duration = Duration::from_millis(500);
/// How long one member may take to answer a health check.
const SILENT_AFTER: Duration = Duration::from_secs(3);
/// Pause after a round in which no endpoint answered.
const ROUND_PAUSE: Duration = Duration::from_millis(100);
/// A part of a value in Base64, with some margin.
const ANSWER_BYTES_MAX: u64 = 4 << 20;
/// Requests in parallel: one that hangs does not delay the others.
const THREADS: usize = 4;

/// Sends one request to one endpoint: over HTTP, or in a simulated world.
pub trait Transport: Send + Sync + 'static {
    fn post<'a>(
        &'a self,
        endpoint: &'a str,
        path: &'static str,
        body: Arc<str>,
        patience: Duration,
    ) -> BoxFuture<'a, Answer>;
}

/// etcd's JSON.
pub type Answer = std::result::Result<Value, Failure>;

pub(super) struct Gateway {
    env: Env,
    endpoints: Vec<Arc<str>>,
    /// The endpoint that answered last.
    next: AtomicUsize,
    transport: Arc<dyn Transport>,
    /// The etcd cluster of the first answer.
    etcd_cluster: OnceLock<String>,
}

/// Why an attempt failed.
#[derive(Debug)]
pub enum Failure {
    /// Another endpoint may answer. Whether the request was carried out is unknown.
    Silent(String),
    /// Every endpoint would give this answer.
    Refused(Error),
}

impl Gateway {
    pub fn new(env: &Env, endpoints: &[String], transport: Arc<dyn Transport>) -> Gateway {
        Gateway {
            env: env.clone(),
            endpoints: endpoints.iter().map(|url| url.as_str().into()).collect(),
            next: AtomicUsize::new(0),
            transport,
            etcd_cluster: OnceLock::new(),
        }
    }

    /// Sends until an endpoint answers, for at most `patience`. `Unavailable`: none did, and whether the
    /// request was carried out is unknown.
    pub async fn ask(&self, path: &'static str, body: &Value, patience: Duration) -> Result<Value> {
        let deadline = self.env.clock.now() + patience;
        let body: Arc<str> = body.to_string().into();
        let mut reasons = Vec::new();
        loop {
            for _ in 0..self.endpoints.len() {
                let at = self.next.load(Ordering::Relaxed);
                let left = deadline.since(self.env.clock.now());
                if left.is_zero() {
                    return Err(unanswered(path, patience, &reasons));
                }
                let posted = self.transport.post(&self.endpoints[at], path, body.clone(), left.min(ATTEMPT));
                match posted.await.and_then(|answer| self.of_one_cluster(answer)) {
                    Ok(answer) => return Ok(answer),
                    Err(Failure::Refused(e)) => return Err(e.doing(format_args!("ask etcd for {path}"))),
                    Err(Failure::Silent(why)) => {
                        note(&mut reasons, &self.endpoints[at], why);
                        // Unless another request has moved on from it already.
                        let (from, to) = (at, (at + 1) % self.endpoints.len());
                        let _ = self.next.compare_exchange(from, to, Ordering::Relaxed, Ordering::Relaxed);
                    }
                }
            }
            let left = deadline.since(self.env.clock.now());
            self.env.clock.sleep(left.min(ROUND_PAUSE)).await;
        }
    }

    /// The endpoints that do not answer, with reasons. All are asked in parallel.
    pub async fn silent(&self, path: &'static str) -> Vec<(String, String)> {
        let body: Arc<str> = "{}".into();
        let asked = self.endpoints.iter().map(|endpoint| {
            let (env, transport) = (self.env.clone(), self.transport.clone());
            let (endpoint, body) = (endpoint.clone(), body.clone());
            let (report, answered) = oneshot::channel();
            env.tasks.spawn("ask a member of etcd", async move {
                let silent = match transport.post(&endpoint, path, body, SILENT_AFTER).await {
                    Err(Failure::Silent(why)) => Some((endpoint.to_string(), why)),
                    Ok(_) | Err(Failure::Refused(_)) => None,
                };
                let _ = report.send(silent); // the caller may have given up
            });
            answered
        });
        let mut silent = Vec::new();
        for answered in asked.collect::<Vec<_>>() {
            silent.extend(answered.await.ok().flatten());
        }
        silent
    }

    /// Two etcd clusters in one list of endpoints would be two sources of truth.
    fn of_one_cluster(&self, answer: Value) -> Answer {
        let header = answer.get("result").unwrap_or(&answer).get("header");
        let Some(found) = header.and_then(|h| h.get("cluster_id")).and_then(Value::as_str) else {
            return Ok(answer);
        };
        let known = self.etcd_cluster.get_or_init(|| found.to_owned());
        if known == found {
            return Ok(answer);
        }
        Err(Failure::Refused(
            Error::denied(format!("the endpoints are of different etcd clusters ({known} and {found})"))
                .hint("correct coord.store"),
        ))
    }
}

/// One reason for each endpoint: the last one.
fn note(reasons: &mut Vec<(Arc<str>, String)>, endpoint: &Arc<str>, why: String) {
    reasons.retain(|(of, _)| of != endpoint);
    reasons.push((endpoint.clone(), why));
}

fn unanswered(path: &str, patience: Duration, reasons: &[(Arc<str>, String)]) -> Error {
    let each: Vec<String> = reasons.iter().map(|(endpoint, why)| format!("{endpoint}: {why}")).collect();
    let patience = patience.as_secs_f64();
    Error::unavailable(format!("etcd has not answered {path} within {patience:.1} s ({})", each.join("; ")))
}

/// HTTP by blocking calls, on threads of its own.
pub(super) struct Http {
    env: Env,
    agent: Agent,
    lane: Lane,
}

impl Http {
    pub fn new(env: &Env, config: &EtcdConfig) -> Result<Http> {
        let agent = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .proxy(None) // only main reads the environment
            .max_idle_connections_per_host(THREADS)
            .tls_config(tls(env, config)?)
            .build()
            .new_agent();
        Ok(Http { env: env.clone(), agent, lane: env.tasks.lane(THREADS) })
    }
}

impl Transport for Http {
    fn post<'a>(
        &'a self,
        endpoint: &'a str,
        path: &'static str,
        body: Arc<str>,
        patience: Duration,
    ) -> BoxFuture<'a, Answer> {
        let (agent, clock) = (self.agent.clone(), self.env.clock.clone());
        let (url, until) = (format!("{endpoint}{path}"), clock.now() + patience);
        Box::pin(async move {
            let (report, reported) = oneshot::channel();
            let work = self.lane.run(move || {
                let left = until.since(clock.now());
                // After a wait for a thread the caller may have given up.
                if !left.is_zero() {
                    let _ = report.send(post(&agent, &url, &body, left)); // the patience may have ended
                }
            });
            let answer = self.env.clock.timeout(patience, async {
                work.await;
                reported.await
            });
            match answer.await {
                Ok(Ok(answer)) => answer,
                _ => Err(Failure::Silent(format!("no answer within {} ms", patience.as_millis()))),
            }
        })
    }
}

/// One request to one endpoint, blocking.
fn post(agent: &Agent, url: &str, body: &str, patience: Duration) -> Answer {
    let silent = |e: &dyn std::fmt::Display| Failure::Silent(e.to_string());
    let request = agent.post(url).config().timeout_global(Some(patience)).build();
    let mut answer = request.content_type("application/json").send(body).map_err(|e| silent(&e))?;
    let status = answer.status().as_u16();
    let limited = answer.body_mut().with_config().limit(ANSWER_BYTES_MAX);
    let text = limited.read_to_string().map_err(|e| silent(&e))?;
    let read: Option<Value> = serde_json::from_str(text.trim()).ok();
    match read {
        Some(value) if status == 200 && value.get("error").is_none() => Ok(value),
        Some(value) if value.get("error").is_some() => Err(refused(&value)),
        _ if status >= 500 => Err(Failure::Silent(format!("HTTP status {status}"))),
        _ => Err(Failure::Refused(
            Error::unsupported(format!(
                "{url} does not answer like etcd's JSON gateway (HTTP status {status})"
            ))
            .hint("etcd 3.4 or newer, without --enable-grpc-gateway=false"),
        )),
    }
}

/// The meaning of an etcd error: by its gRPC code.
fn refused(answer: &Value) -> Failure {
    // In a stream the error is an object.
    let error = answer.get("error").filter(|e| e.is_object()).unwrap_or(answer);
    let text = |name: &str| error.get(name).and_then(Value::as_str);
    let message = text("message").or(text("error")).unwrap_or("an error without a message").to_owned();
    let code = error.get("code").or(error.get("grpc_code")).and_then(Value::as_u64).unwrap_or(0);
    let (kind, hint) = match code {
        3 => (ErrorKind::Invalid, None),
        5 => (ErrorKind::NotFound, None),
        7 | 16 => {
            (ErrorKind::Denied, Some("check etcd.certificate and etcd.key, and what etcd lets them do"))
        }
        8 if message.contains("space") => (
            ErrorKind::NoSpace,
            Some(
                "`etcdctl compact`, `etcdctl defrag` and `etcdctl alarm disarm` free its space; start etcd \
                 with --auto-compaction-retention",
            ),
        ),
        12 => (ErrorKind::Unsupported, Some("etcd 3.4 or newer")),
        // Without a leader, stopping, overloaded, cut off: try another member, or this one later.
        _ => return Failure::Silent(message),
    };
    Failure::Refused(Error { kind, context: message, hint: hint.map(Cow::Borrowed) })
}

fn tls(env: &Env, config: &EtcdConfig) -> Result<TlsConfig> {
    let mut tls = TlsConfig::builder();
    if !config.ca.as_os_str().is_empty() {
        let roots: Vec<Certificate<'static>> = certificates(env, &config.ca, "etcd.ca")?;
        tls = tls.root_certs(RootCerts::Specific(Arc::new(roots)));
    }
    let of_client = (config.certificate.as_os_str().is_empty(), config.key.as_os_str().is_empty());
    match of_client {
        (true, true) => {}
        (false, false) => {
            let chain = certificates(env, &config.certificate, "etcd.certificate")?;
            let key = PrivateKey::from_pem(&read(env, &config.key, "etcd.key")?).map_err(|e| {
                Error::invalid(format!("etcd.key: {} holds no private key in PEM: {e}", config.key.display()))
            })?;
            tls = tls.client_cert(Some(ClientCert::new_with_certs(&chain, key)));
        }
        _ => {
            return Err(
                Error::invalid("etcd.certificate and etcd.key belong together").hint("give both, or neither")
            );
        }
    }
    Ok(tls.build())
}

fn certificates(env: &Env, file: &Path, key: &str) -> Result<Vec<Certificate<'static>>> {
    let bytes = read(env, file, key)?;
    let found: Vec<_> = parse_pem(&bytes)
        .filter_map(|item| match item {
            Ok(PemItem::Certificate(certificate)) => Some(certificate),
            _ => None,
        })
        .collect();
    if found.is_empty() {
        return Err(Error::invalid(format!("{key}: {} holds no certificate in PEM", file.display())));
    }
    Ok(found)
}

fn read(env: &Env, file: &Path, key: &str) -> Result<Vec<u8>> {
    env.disk.read(file).map_err(|e| Error::from_io(format_args!("{key}: read {}", file.display()), &e))
}

/// The number in a field of an answer: the gateway writes 64-bit numbers as strings and omits zeros.
pub(super) fn number(answer: &Value, field: &str) -> u64 {
    let signed = |n: i64| n as u64; // ids of leases are signed in JSON
    let field = answer.get(field);
    let text = field.and_then(Value::as_str).and_then(|text| text.parse::<i64>().ok()).map(signed);
    text.or_else(|| field.and_then(Value::as_u64)).unwrap_or(0)
}

/// Time left, for callers that split their patience.
pub(super) fn left(env: &Env, until: Instant) -> Duration {
    until.since(env.clock.now())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn an_error_of_etcd_says_what_to_do() {
        let kind = |code: u64, message: &str| match refused(&json!({ "error": message, "code": code })) {
            Failure::Silent(_) => None,
            Failure::Refused(e) => Some(e.kind),
        };
        assert_eq!(kind(5, "etcdserver: requested lease not found"), Some(ErrorKind::NotFound));
        assert_eq!(kind(8, "etcdserver: mvcc: database space exceeded"), Some(ErrorKind::NoSpace));
        assert_eq!(kind(8, "etcdserver: too many requests"), None);
        assert_eq!(kind(14, "etcdserver: no leader"), None);
        assert_eq!(kind(7, "etcdserver: permission denied"), Some(ErrorKind::Denied));
        let streamed = json!({ "error": { "grpc_code": 16, "message": "x" } });
        assert!(matches!(refused(&streamed), Failure::Refused(e) if e.kind == ErrorKind::Denied));
    }

    #[test]
    fn numbers_are_texts_and_zeros_are_absent() {
        let answer = json!({ "a": "7", "b": 8, "c": "-2", "d": "x" });
        let read = ["a", "b", "c", "d", "e"].map(|field| number(&answer, field));
        assert_eq!(read, [7, 8, u64::MAX - 1, 0, 0]);
    }
}
