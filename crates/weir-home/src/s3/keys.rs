//! Keys for an S3 service: given once, read from a file again and again, or lent by a service for some hours
//! and renewed before they end. Knows nothing of buckets.
//!
//! Invariants: keys that have ended are not used; one thread renews them while others wait; no message
//! contains a key or a token.
use super::xml::Element;
use crate::Credentials;
use serde_json::Value;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use std::{fmt, net::IpAddr};
use ureq::Agent;
use ureq::http::{Request, Uri};
use weir_env::{Clock, Instant};
use weir_proto::{Error, Result};

/// Reads a text that changes: the token that a service gives to this process.
pub type Token = Arc<dyn Fn() -> Result<String> + Send + Sync>;

/// Where keys come from.
#[derive(Clone)]
pub enum KeySource {
    Fixed(Credentials),
    /// Reads a file, with the checks of its owner and mode.
    Read(Arc<dyn Fn() -> Result<Credentials> + Send + Sync>),
    Lent(Lender),
}

/// A service that lends keys to programs that run in a certain place.
#[derive(Clone)]
pub enum Lender {
    /// The service of a container, at a URL; the text of the header `Authorization`, if it wants one.
    Container { url: String, token: Option<Token> },
    /// The metadata service of a virtual machine, version 2.
    Instance { endpoint: String },
    /// A security token service, for an identity that a token proves.
    WebIdentity { endpoint: String, role: String, session: String, token: Token },
}

/// Omits secrets.
impl fmt::Debug for KeySource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            KeySource::Fixed(_) => "given keys",
            KeySource::Read(_) => "keys of a file",
            KeySource::Lent(Lender::Container { .. }) => "keys of the container",
            KeySource::Lent(Lender::Instance { .. }) => "keys of the virtual machine",
            KeySource::Lent(Lender::WebIdentity { .. }) => "keys for a web identity",
        })
    }
}

/// A file is read again after this time: its keys may have been renewed.
const READ_EVERY: Duration = Duration::from_secs(60);
/// Lent keys are renewed at this time before they end, or after half of a shorter life.
const RENEW_BEFORE: Duration = Duration::from_secs(300);
/// The pause after a failed renewal of keys that are still valid.
const TRY_AGAIN: Duration = Duration::from_secs(30);
/// Such a service is near.
const PATIENCE: Duration = Duration::from_secs(5);
const ANSWER_BYTES_MAX: u64 = 1 << 20;
/// Seconds of the session at the metadata service: each renewal begins another one.
const SESSION_S: u32 = 300;

struct Kept {
    keys: Credentials,
    /// In seconds since 1970. Absent: they do not end.
    until_s: Option<i64>,
    renew_at: Option<Instant>,
}

pub(super) struct Keys {
    source: KeySource,
    clock: Clock,
    agent: Agent,
    kept: Mutex<Option<Kept>>,
}

impl Keys {
    pub(super) fn new(source: KeySource, clock: Clock) -> Keys {
        let agent = Agent::config_builder()
            .http_status_as_error(false)
            .max_redirects(0)
            .proxy(None) // only main reads the environment
            .timeout_global(Some(PATIENCE))
            .build()
            .new_agent();
        Keys { source, clock, agent, kept: Mutex::default() }
    }

    /// Keys that are valid now.
    pub(super) fn current(&self) -> Result<Credentials> {
        let mut kept = self.kept.lock().unwrap_or_else(PoisonError::into_inner);
        let (now, now_s) = (self.clock.now(), self.clock.wall().0 / 1_000_000_000);
        if let Some(kept) = &*kept
            && kept.renew_at.is_none_or(|at| now < at)
        {
            return Ok(kept.keys.clone());
        }
        match (self.ask(now, now_s), &mut *kept) {
            (Ok(new), kept) => Ok(kept.insert(new).keys.clone()),
            (Err(e), Some(old)) if old.until_s.is_none_or(|until| now_s < until) => {
                tracing::warn!("{:?} are not renewed, the old ones are still used: {e}", self.source);
                old.renew_at = Some(now + TRY_AGAIN);
                Ok(old.keys.clone())
            }
            (Err(e), _) => Err(e.doing(format_args!("get {:?}", self.source))),
        }
    }

    /// The service does not know them (any more): they are asked for again.
    pub(super) fn are_refused(&self) {
        *self.kept.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    fn ask(&self, now: Instant, now_s: i64) -> Result<Kept> {
        let (keys, until_s) = match &self.source {
            KeySource::Fixed(keys) => {
                return Ok(Kept { keys: keys.clone(), until_s: None, renew_at: None });
            }
            KeySource::Read(read) => {
                return Ok(Kept { keys: read()?, until_s: None, renew_at: Some(now + READ_EVERY) });
            }
            KeySource::Lent(Lender::Container { url, token }) => self.of_container(url, token.as_ref())?,
            KeySource::Lent(Lender::Instance { endpoint }) => self.of_instance(endpoint)?,
            KeySource::Lent(Lender::WebIdentity { endpoint, role, session, token }) => {
                self.of_identity(endpoint, role, session, token)?
            }
        };
        let left = Duration::from_secs(u64::try_from(until_s.saturating_sub(now_s)).unwrap_or(0));
        if left.is_zero() {
            return Err(Error::denied(
                "the service gives keys that have ended; is this machine's clock right?".to_owned(),
            ));
        }
        let renew_at = now + left.saturating_sub(RENEW_BEFORE).max(left / 2);
        Ok(Kept { keys, until_s: Some(until_s), renew_at: Some(renew_at) })
    }

    /// The text of a successful answer.
    fn text(&self, method: &str, url: &str, headers: &[(&str, &str)], body: &str) -> Result<String> {
        let silent = |e: &dyn fmt::Display| Error::unavailable(format!("{}: {e}", host_of(url)));
        let mut request = Request::builder().method(method).uri(url);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let answer = match method {
            "GET" => self.agent.run(request.body(()).map_err(|e| silent(&e))?),
            _ => self.agent.run(request.body(body.to_owned()).map_err(|e| silent(&e))?),
        };
        let mut answer = answer.map_err(|e| silent(&e))?;
        let text = answer.body_mut().with_config().limit(ANSWER_BYTES_MAX).read_to_string();
        let text = text.map_err(|e| silent(&e))?;
        match answer.status() {
            status if status.is_success() => Ok(text),
            status => Err(Error::denied(format!("{} answers {status}{}", host_of(url), code_of(&text)))),
        }
    }

    fn of_container(&self, url: &str, token: Option<&Token>) -> Result<(Credentials, i64)> {
        let uri: Uri = url.parse().map_err(|e| Error::invalid(format!("{url:?}: {e}")))?;
        if !is_near(&uri) {
            return Err(Error::denied(format!(
                "{} would get this process's token over a network without TLS; use https, or an address of this machine",
                host_of(url)
            )));
        }
        let token = token.map(|token| token()).transpose()?;
        let headers: Vec<(&str, &str)> = token.iter().map(|token| ("authorization", token.trim())).collect();
        lent(&self.text("GET", url, &headers, "")?)
    }

    fn of_instance(&self, endpoint: &str) -> Result<(Credentials, i64)> {
        let at = |path: &str| format!("{}/latest/{path}", endpoint.trim_end_matches('/'));
        let life = SESSION_S.to_string();
        let life = [("x-aws-ec2-metadata-token-ttl-seconds", life.as_str())];
        let session = self.text("PUT", &at("api/token"), &life, "")?;
        let session = [("x-aws-ec2-metadata-token", session.trim())];
        let roles = self.text("GET", &at("meta-data/iam/security-credentials/"), &session, "")?;
        let role = roles.lines().next().map(str::trim).filter(|role| !role.is_empty());
        let role = role.ok_or_else(|| Error::denied("this virtual machine has no role".to_owned()))?;
        lent(&self.text("GET", &at(&format!("meta-data/iam/security-credentials/{role}")), &session, "")?)
    }

    fn of_identity(
        &self,
        endpoint: &str,
        role: &str,
        session: &str,
        token: &Token,
    ) -> Result<(Credentials, i64)> {
        let token = token()?;
        let fields = [
            ("Action", "AssumeRoleWithWebIdentity"),
            ("Version", "2011-06-15"),
            ("RoleArn", role),
            ("RoleSessionName", session),
            ("WebIdentityToken", token.trim()),
        ];
        let encoded = fields.map(|(name, value)| format!("{name}={}", super::key::form_encode(value)));
        let form = [("content-type", "application/x-www-form-urlencoded")];
        let text = self.text("POST", endpoint, &form, &encoded.join("&"))?;
        let root =
            Element::parse(&text).map_err(|e| Error::unavailable(format!("{}: {e}", host_of(endpoint))))?;
        let result = root.all("AssumeRoleWithWebIdentityResult").next();
        let keys = result.and_then(|result| result.all("Credentials").next());
        let value = |name: &str| keys?.text_of(name).map(str::to_owned);
        complete(value("AccessKeyId"), value("SecretAccessKey"), value("SessionToken"), value("Expiration"))
    }
}

/// Without the path and the query, which may hold secrets.
fn host_of(url: &str) -> String {
    let uri: Option<Uri> = url.parse().ok();
    uri.and_then(|uri| Some(uri.authority()?.to_string())).unwrap_or_else(|| "the service".to_owned())
}

/// Whether a token may be sent there: by TLS, or to an address that does not leave the machine's link.
fn is_near(uri: &Uri) -> bool {
    let host = uri.host().unwrap_or_default().trim_matches(['[', ']']);
    let is_local = match host.parse() {
        Ok(IpAddr::V4(ip)) => ip.is_loopback() || ip.is_link_local(),
        Ok(IpAddr::V6(ip)) => ip.is_loopback() || ip.to_string() == "fd00:ec2::23",
        Err(_) => host == "localhost",
    };
    match uri.scheme_str() {
        Some("https") => true,
        Some("http") => is_local,
        _ => false,
    }
}

/// The service's word for an error, if it has one.
fn code_of(text: &str) -> String {
    let in_json = serde_json::from_str::<Value>(text).ok();
    let in_json =
        in_json.and_then(|value| value["code"].as_str().or(value["Code"].as_str()).map(str::to_owned));
    let in_xml = || Some(Element::parse(text).ok()?.all("Error").next()?.text_of("Code")?.to_owned());
    in_json.or_else(in_xml).map(|code| format!(" ({code})")).unwrap_or_default()
}

/// The keys of a JSON answer, and when they end.
fn lent(text: &str) -> Result<(Credentials, i64)> {
    let answer: Value = serde_json::from_str(text)
        .map_err(|e| Error::unavailable(format!("the answer with keys is not JSON: line {}", e.line())))?;
    let value = |name: &str| answer[name].as_str().map(str::to_owned);
    complete(value("AccessKeyId"), value("SecretAccessKey"), value("Token"), value("Expiration"))
}

fn complete(
    access_key: Option<String>,
    secret_key: Option<String>,
    token: Option<String>,
    until: Option<String>,
) -> Result<(Credentials, i64)> {
    let until = until.and_then(|until| until.parse::<jiff::Timestamp>().ok());
    match (access_key, secret_key, until) {
        (Some(access_key), Some(secret_key), Some(until)) => {
            Ok((Credentials { access_key, secret_key, token }, until.as_second()))
        }
        _ => Err(Error::unavailable("the answer lacks a key, or the time when it ends".to_owned())),
    }
}

#[cfg(test)]
#[allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "a test is a user of the operating system"
)]
mod tests {
    use super::*;
    use std::io::{BufRead, BufReader, Read, Write};
    use std::net::TcpListener;
    use std::sync::atomic::{AtomicU64, Ordering};
    use weir_env::{BoxFuture, ClockSource, WallTime};

    /// 2026-11-28T12:00:00Z
    const NOON_S: i64 = 1_795_867_200;

    /// A clock that a test moves: seconds after noon.
    struct Hand(AtomicU64);
    impl ClockSource for Hand {
        fn now(&self) -> Instant {
            Instant(self.0.load(Ordering::Relaxed) * 1_000_000_000)
        }
        fn wall(&self) -> WallTime {
            WallTime((NOON_S + self.0.load(Ordering::Relaxed) as i64) * 1_000_000_000)
        }
        fn sleep_until(&self, _: Instant) -> BoxFuture<'static, ()> {
            Box::pin(std::future::ready(()))
        }
    }

    fn keys_of(source: KeySource) -> (Keys, Arc<Hand>) {
        let hand = Arc::new(Hand(AtomicU64::new(0)));
        (Keys::new(source, Clock(hand.clone())), hand)
    }

    /// Serves requests, one after the other: what each one's head and body have to contain, and its answer.
    fn service(script: Vec<(&'static [&'static str], u16, String)>) -> (String, std::thread::JoinHandle<()>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let serving = std::thread::spawn(move || {
            for (expected, status, answer) in script {
                let (stream, _) = listener.accept().unwrap();
                let mut reader = BufReader::new(stream);
                let (mut request, mut length) = (String::new(), 0);
                while !request.ends_with("\r\n\r\n") {
                    let begun = request.len();
                    assert!(reader.read_line(&mut request).unwrap() > 0, "the request ended early");
                    if let Some(value) = request[begun..].to_ascii_lowercase().strip_prefix("content-length:")
                    {
                        length = value.trim().parse().unwrap();
                    }
                }
                let mut body = vec![0; length];
                reader.read_exact(&mut body).unwrap();
                request.push_str(&String::from_utf8(body).unwrap());
                for text in expected {
                    assert!(request.contains(text), "{text} is not in {request}");
                }
                let head = format!(
                    "HTTP/1.1 {status} X\r\ncontent-length: {}\r\nconnection: close\r\n\r\n",
                    answer.len()
                );
                reader.get_mut().write_all((head + &answer).as_bytes()).unwrap();
            }
        });
        (url, serving)
    }

    fn json(key: &str, until: &str) -> String {
        format!(
            r#"{{"Code":"Success","AccessKeyId":"{key}","SecretAccessKey":"s","Token":"t","Expiration":"{until}"}}"#
        )
    }

    #[test]
    fn keys_of_a_container_are_renewed_before_they_end() {
        let (url, service) = service(vec![
            (&["GET /v1/keys ", "authorization: Bearer 7\r\n"], 200, json("one", "2026-11-28T13:00:00Z")),
            (&["GET /v1/keys ", "authorization: Bearer 7\r\n"], 500, "busy".into()),
            (&["GET /v1/keys "], 200, json("two", "2026-11-28T14:00:00Z")),
        ]);
        let token: Token = Arc::new(|| Ok("Bearer 7\n".into()));
        let lender = Lender::Container { url: format!("{url}/v1/keys"), token: Some(token) };
        let (keys, hand) = keys_of(KeySource::Lent(lender));
        let at = |s: u64| {
            hand.0.store(s, Ordering::Relaxed);
            keys.current().unwrap()
        };
        let first = at(0);
        assert_eq!((first.access_key.as_str(), first.token.as_deref()), ("one", Some("t")));
        assert_eq!(at(3299).access_key, "one");
        assert_eq!(at(3300).access_key, "one", "a failed renewal changes nothing while they are valid");
        assert_eq!(at(3329).access_key, "one", "nor does it repeat at once");
        assert_eq!(at(3330).access_key, "two");
        assert_eq!(at(6899).access_key, "two");
        service.join().unwrap();
        hand.0.store(7200, Ordering::Relaxed);
        let error = keys.current().unwrap_err().to_string();
        assert!(error.contains("keys of the container"), "no keys are used that have ended: {error}");
    }

    #[test]
    fn a_virtual_machine_gives_the_keys_of_its_role() {
        let (endpoint, service) = service(vec![
            (&["PUT /latest/api/token ", "x-aws-ec2-metadata-token-ttl-seconds: 300"], 200, "session".into()),
            (
                &[
                    "GET /latest/meta-data/iam/security-credentials/ ",
                    "x-aws-ec2-metadata-token: session\r\n",
                ],
                200,
                "mover\n".into(),
            ),
            (
                &[
                    "GET /latest/meta-data/iam/security-credentials/mover ",
                    "x-aws-ec2-metadata-token: session\r\n",
                ],
                200,
                json("vm", "2026-11-28T18:00:00Z"),
            ),
            (&["PUT "], 403, String::new()),
        ]);
        let (keys, _) = keys_of(KeySource::Lent(Lender::Instance { endpoint }));
        assert_eq!(keys.current().unwrap().access_key, "vm");
        keys.are_refused();
        let error = keys.current().unwrap_err();
        assert!(error.context.contains("answers 403"), "{error}");
        service.join().unwrap();
    }

    #[test]
    fn a_token_service_gives_keys_for_an_identity() {
        let answer = "<AssumeRoleWithWebIdentityResponse xmlns='https://sts.amazonaws.com/doc/2011-06-15/'>\
                      <AssumeRoleWithWebIdentityResult><Credentials><AccessKeyId>pod</AccessKeyId><SecretAccessKey>a&#47;b</SecretAccessKey>\
                      <SessionToken>t+/=</SessionToken><Expiration>2026-11-28T12:01:00Z</Expiration></Credentials>\
                      </AssumeRoleWithWebIdentityResult></AssumeRoleWithWebIdentityResponse>";
        let denied = "<ErrorResponse><Error><Code>InvalidIdentityToken</Code><Message>eyJ</Message></Error></ErrorResponse>";
        let (endpoint, service) = service(vec![
            (
                &[
                    "POST / ",
                    "Action=AssumeRoleWithWebIdentity&",
                    "&RoleArn=arn%3Aaws%3Aiam%3A%3A1%3Arole%2Fm&",
                    "Token=ey.J%2B%3D",
                ],
                200,
                answer.into(),
            ),
            (&["POST / "], 400, denied.into()),
        ]);
        let lender = Lender::WebIdentity {
            endpoint,
            role: "arn:aws:iam::1:role/m".into(),
            session: "weir".into(),
            token: Arc::new(|| Ok("ey.J+=\n".into())),
        };
        let (keys, hand) = keys_of(KeySource::Lent(lender));
        let pod = keys.current().unwrap();
        assert_eq!(
            (pod.access_key.as_str(), pod.secret_key.as_str(), pod.token.as_deref()),
            ("pod", "a/b", Some("t+/="))
        );
        hand.0.store(60, Ordering::Relaxed);
        let error = keys.current().unwrap_err().to_string();
        assert!(
            error.contains("400") && error.contains("InvalidIdentityToken") && !error.contains("eyJ"),
            "{error}"
        );
        service.join().unwrap();
    }

    #[test]
    fn a_file_is_read_again_and_fixed_keys_stay() {
        let count = Arc::new(AtomicU64::new(0));
        let counted = count.clone();
        let read = move || match counted.fetch_add(1, Ordering::Relaxed) {
            1 => Err(Error::denied("it is being written".to_owned())),
            n => Ok(Credentials { access_key: format!("k{n}"), secret_key: "s".into(), token: None }),
        };
        let (keys, hand) = keys_of(KeySource::Read(Arc::new(read)));
        let seen: Vec<String> = [0, 59, 60, 89, 90, 149, 150]
            .map(|s| {
                hand.0.store(s, Ordering::Relaxed);
                keys.current().unwrap().access_key
            })
            .to_vec();
        assert_eq!(seen, ["k0", "k0", "k0", "k0", "k2", "k2", "k3"]);
        let given = Credentials { access_key: "given".into(), secret_key: "s".into(), token: None };
        let (keys, hand) = keys_of(KeySource::Fixed(given));
        keys.current().unwrap();
        hand.0.store(1 << 30, Ordering::Relaxed);
        assert_eq!(keys.current().unwrap().access_key, "given");
    }

    #[test]
    fn tokens_are_sent_by_tls_or_to_this_machine() {
        for (url, near) in [
            ("https://keys.example.org/x", true),
            ("http://keys.example.org/x", false),
            ("http://127.0.0.1:8080/x", true),
            ("http://169.254.170.2/x", true),
            ("http://[::1]:80/x", true),
            ("http://[fd00:ec2::23]/x", true),
            ("http://10.0.0.1/x", false),
            ("ftp://127.0.0.1/x", false),
        ] {
            assert_eq!(is_near(&url.parse().unwrap()), near, "{url}");
        }
        let far = Lender::Container { url: "http://10.0.0.1/x".into(), token: None };
        let (keys, _) = keys_of(KeySource::Lent(far));
        assert!(keys.current().unwrap_err().context.contains("without TLS"));
    }

    #[test]
    fn answers_without_keys_are_errors() {
        for bad in ["", "{}", "[]", r#"{"AccessKeyId":"a","SecretAccessKey":"s"}"#, &json("k", "tomorrow")] {
            let error = lent(bad).unwrap_err().to_string();
            assert!(!error.contains("SecretAccessKey"), "{error}");
        }
    }
}
