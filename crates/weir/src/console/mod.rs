//! `weir console`: a page, an API and `/metrics` for a whole cluster, on this machine's loopback addresses.
//!
//! Invariants: it shows, and changes nothing; it listens on loopback only, because it has no certificate for
//! browsers; everything except `/metrics` needs the login link that it printed. Requests from a page of
//! another site are refused by their `Host`.
pub mod api;
mod login;
mod metrics;
mod page;
mod processes;
mod snapshot;
mod stream;

use crate::commands::watch::events::as_json;
use axum::Router;
use axum::extract::{Query, Request, State};
use axum::http::{HeaderMap, StatusCode, header};
use axum::middleware::{Next, from_fn_with_state};
use axum::response::{Html, IntoResponse, Redirect, Response};
use axum::routing::get;
use clap::{Args, ValueHint};
use login::{LinkFile, Login};
use serde::Deserialize;
use snapshot::Source;
use std::net::{IpAddr, SocketAddr};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::Duration;
use weir_admin::cluster_args::Status;
use weir_admin::collect::Asker;
use weir_admin::failure::{Doing, Failure, Outcome};
use weir_admin::local::process::PidFile;
use weir_admin::which::coordinators;
use weir_diagnose::troubles::Trouble;
use weir_proto::Error;
use weir_proto::event::{GetEvents, ReportEvents};

#[derive(Args)]
pub struct ConsoleArgs {
    /// Address of this machine to listen at; port 0: any
    #[arg(long, value_name = "IP:PORT", default_value = "127.0.0.1:7070")]
    pub listen: SocketAddr,
    /// Keep a link that logs in once in this file, readable by its owner only; each use makes a new one
    #[arg(long, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub link_file: Option<PathBuf>,
    #[arg(long, hide = true)]
    pub pid_file: Option<PathBuf>,
    #[command(flatten)]
    pub cluster: Status,
}

/// The scripts of the page, by name.
const SCRIPTS: [(&str, &str); 3] = [
    ("/console.js", include_str!("console.js")),
    ("/dom.js", include_str!("dom.js")),
    ("/graph.js", include_str!("graph.js")),
];
const STYLE: &str = include_str!("console.css");
const OPENAPI: &str = include_str!("openapi.json");
/// The cookie's name begins so; consoles of several clusters behind tunnels are one site for a browser.
const COOKIE: &str = "weir_console_";
/// The interval of reports of troubles as events.
const NOTE_EVERY: Duration = Duration::from_secs(5);

struct Console {
    source: Source,
    login: Login,
    listens: SocketAddr,
    links: Option<LinkFile>,
    /// The name of its cookie.
    cookie: String,
    /// Open streams of states.
    streams: AtomicUsize,
}

type Shared = State<Arc<Console>>;

pub fn console(args: &ConsoleArgs) -> Outcome<()> {
    if !args.listen.ip().is_loopback() {
        let error = Error::denied(format!("{} is not an address of this machine alone", args.listen));
        let hint = "listen at 127.0.0.1:PORT; from elsewhere: `ssh -L 8080:127.0.0.1:8080 HOST`, or a proxy with TLS";
        return Err(Failure::new(error, hint));
    }
    let (local, coordinators) = (args.cluster.local()?, coordinators(&args.cluster)?);
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
    runtime.doing("start the runtime")?.block_on(async {
        let asker = Asker::connect(&coordinators, "weir console").await?;
        let listener = tokio::net::TcpListener::bind(args.listen).await;
        let listener = listener.doing(format_args!("listen at {}", args.listen))?;
        let listens = listener.local_addr().doing("find the port")?;
        let login = Login::new(&asker.env);
        let links = args.link_file.clone().map(LinkFile);
        let source = Source::new(asker, local);
        let cookie = format!("{COOKIE}{:08x}", source.asker.env.rng.next_u64() as u32);
        let console =
            Arc::new(Console { source, login, listens, links, cookie, streams: AtomicUsize::new(0) });
        println!("metrics: http://{listens}/metrics");
        let link = console.next_link()?;
        match &console.links {
            Some(LinkFile(path)) => {
                println!("console: http://{listens}/, the link that logs in is in {}", path.display())
            }
            None => println!("console: {link} (works once)"),
        }
        if let Some(path) = &args.pid_file {
            PidFile::own(true)?.write(path)?;
        }
        tokio::spawn(note_events(console.clone()));
        axum::serve(listener, routes(console)).await.doing("serve the console")
    })
}

impl Console {
    /// A link that works from now on, instead of the previous one.
    fn next_link(&self) -> Outcome<String> {
        let url = format!("http://{}/login?key={}", self.listens, self.login.renew());
        self.links.as_ref().map_or(Ok(()), |file| file.put(&url))?;
        Ok(url)
    }
}

/// Reports the present troubles to the coordinator, for the log of events.
async fn note_events(console: Arc<Console>) {
    let asker = console.source.asker.clone();
    let mut failed = false;
    loop {
        let snapshot = console.source.snapshot().await;
        if snapshot.facts.is_some() {
            let troubles = snapshot.troubles.iter().map(Trouble::as_event).collect();
            let reply = asker.cluster.administer(&ReportEvents { troubles }).await;
            if let (Err(e), false) = (&reply, failed) {
                tracing::warn!("events are not noted: {e}");
            }
            failed = reply.is_err();
        }
        asker.env.clock.sleep(NOTE_EVERY).await;
    }
}

fn routes(console: Arc<Console>) -> Router {
    let private = Router::new()
        .route("/", get(page))
        .route("/console.css", get(async || ([(header::CONTENT_TYPE, "text/css")], STYLE)))
        .route("/api/v1/openapi.json", get(async || ([(header::CONTENT_TYPE, "application/json")], OPENAPI)))
        .route("/api/v1/status", get(status))
        .route("/api/v1/troubles", get(troubles))
        .route("/api/v1/top", get(top))
        .route("/api/v1/waits", get(waits))
        .route("/api/v1/volumes", get(volumes))
        .route("/api/v1/homes", get(homes))
        .route("/api/v1/history", get(history))
        .route("/api/v1/events", get(events))
        .route("/api/v1/events/stream", get(stream::states))
        .route("/api/v1/proof", get(proof))
        .route("/api/v1/space", get(space));
    let with_script = |routes: Router<Arc<Console>>, (path, text): (&'static str, &'static str)| {
        routes.route(path, get(async move || ([(header::CONTENT_TYPE, "text/javascript")], text)))
    };
    let private = SCRIPTS.into_iter().fold(private, with_script);
    let private = private.layer(from_fn_with_state(console.clone(), logged_in));
    Router::new()
        .merge(private)
        .route("/metrics", get(metrics_page))
        .route("/login", get(log_in))
        .layer(from_fn_with_state(console.clone(), of_this_machine))
        .with_state(console)
}

/// A request for a name that another site's DNS resolves to this machine is refused. The port may differ: a
/// tunnel of `ssh -L` has its own.
async fn of_this_machine(State(console): Shared, request: Request, next: Next) -> Response {
    let host = request.headers().get(header::HOST).and_then(|host| host.to_str().ok()).unwrap_or_default();
    match is_own(host, console.listens.ip()) {
        true => next.run(request).await,
        false => {
            let why = "the console is for this machine only: open it as http://localhost:PORT/, also through a tunnel of ssh\n";
            (StatusCode::FORBIDDEN, why).into_response()
        }
    }
}

/// Whether a `Host` is a name of this machine that no other site can have, with or without a port.
fn is_own(host: &str, listens: IpAddr) -> bool {
    let (name, port) = match host.rsplit_once(':') {
        Some((name, port)) if !port.ends_with(']') => (name, Some(port)),
        _ => (host, None),
    };
    let is_port = port.is_none_or(|port| port.parse::<u16>().is_ok());
    let address = name.strip_prefix('[').and_then(|name| name.strip_suffix(']')).unwrap_or(name);
    let is_address = address.parse().is_ok_and(|address: IpAddr| address.is_loopback() || address == listens);
    is_port && (name.eq_ignore_ascii_case("localhost") || is_address)
}

async fn logged_in(State(console): Shared, request: Request, next: Next) -> Response {
    match cookie(request.headers(), &console.cookie).is_some_and(|session| console.login.knows(session)) {
        true => next.run(request).await,
        false => {
            let whence = match &console.links {
                Some(LinkFile(path)) => format!("that is in {}", path.display()),
                None => "that `weir console` printed; start it again for a new one".to_owned(),
            };
            (StatusCode::UNAUTHORIZED, format!("log in with the link {whence}\n")).into_response()
        }
    }
}

fn cookie<'h>(headers: &'h HeaderMap, name: &str) -> Option<&'h str> {
    let all = headers.get(header::COOKIE)?.to_str().ok()?;
    all.split(';').find_map(|one| one.trim().strip_prefix(name)?.strip_prefix('='))
}

#[derive(Deserialize)]
struct Key {
    key: String,
}

async fn log_in(State(console): Shared, Query(Key { key }): Query<Key>) -> Response {
    match console.login.use_link(&key) {
        Some(session) => {
            if console.links.is_some()
                && let Err(e) = console.next_link()
            {
                tracing::warn!("there is no further link: {e}");
            }
            let cookie = format!("{}={session}; Path=/; HttpOnly; SameSite=Strict", console.cookie);
            ([(header::SET_COOKIE, cookie)], Redirect::to("/")).into_response()
        }
        None => {
            (StatusCode::UNAUTHORIZED, "this link was used, or is not one of this console\n").into_response()
        }
    }
}

async fn page(State(console): Shared) -> Html<String> {
    // The last snapshot, if any: a page that waited for a silent node would be blank for as long.
    Html(page::page(&console.source.last().map(|snapshot| api::status(&snapshot)).unwrap_or_default()))
}

async fn metrics_page(State(console): Shared) -> Response {
    let text = metrics::metrics(&*console.source.snapshot().await);
    ([(header::CONTENT_TYPE, "text/plain; version=0.0.4")], text).into_response()
}

fn json(value: &serde_json::Value) -> Response {
    ([(header::CONTENT_TYPE, "application/json")], value.to_string()).into_response()
}

async fn status(State(console): Shared) -> Response {
    json(&api::status(&*console.source.snapshot().await))
}

async fn troubles(State(console): Shared) -> Response {
    let snapshot = console.source.snapshot().await;
    if snapshot.facts.is_none() {
        return (StatusCode::SERVICE_UNAVAILABLE, "the coordinator does not answer\n").into_response();
    }
    let all: Vec<_> = snapshot.troubles.iter().map(Trouble::as_json).collect();
    json(&serde_json::json!({ "troubles": all }))
}

#[derive(Deserialize)]
struct TopBy {
    by: Option<String>,
}

async fn top(State(console): Shared, Query(asked): Query<TopBy>) -> Response {
    match api::top(&*console.source.snapshot().await, asked.by.as_deref().unwrap_or("user")) {
        Some(value) => json(&value),
        None => (StatusCode::BAD_REQUEST, "by: user, volume, client, job or kind\n").into_response(),
    }
}

async fn waits(State(console): Shared) -> Response {
    json(&api::waits(&*console.source.snapshot().await))
}

async fn volumes(State(console): Shared) -> Response {
    json(&api::volumes(&*console.source.snapshot().await))
}

async fn homes(State(console): Shared) -> Response {
    json(&api::homes(&*console.source.snapshot().await))
}

async fn events(State(console): Shared) -> Response {
    match console.source.asker.cluster.administer(&GetEvents {}).await {
        Ok(log) => json(&as_json(&log)),
        Err(e) => (StatusCode::SERVICE_UNAVAILABLE, format!("{e}\n")).into_response(),
    }
}

async fn space(State(console): Shared) -> Response {
    match api::space(&console.source.asker.cluster, &*console.source.snapshot().await).await {
        Ok(value) => json(&value),
        Err(e) => (StatusCode::SERVICE_UNAVAILABLE, format!("{e}\n")).into_response(),
    }
}

async fn proof(State(console): Shared) -> Response {
    json(&api::proof(&*console.source.snapshot().await))
}

#[derive(Deserialize)]
struct Series {
    series: String,
    minutes: Option<u32>,
}

async fn history(State(console): Shared, Query(asked): Query<Series>) -> Response {
    match api::history(&console.source.asker.cluster, &asked.series, asked.minutes.unwrap_or(5)).await {
        Ok(value) => json(&value),
        Err(e) => (StatusCode::SERVICE_UNAVAILABLE, format!("{e}\n")).into_response(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_this_machine_pass_with_any_port_and_no_others() {
        let listens = "127.0.0.1".parse().unwrap();
        for host in [
            "localhost",
            "localhost:7070",
            "LOCALHOST:18080",
            "127.0.0.1:9",
            "127.0.0.2:80",
            "[::1]:7070",
            "[::1]",
        ] {
            assert!(is_own(host, listens), "{host}");
        }
        let others =
            ["", "evil.example", "evil.example:7070", "localhost.evil.example:7070", "10.0.0.1:7070"];
        let wrong = ["localhost:", "localhost:x", "[::1", "[::2]:7070", "127.0.0.1.evil.example", ":7070"];
        for host in others.into_iter().chain(wrong) {
            assert!(!is_own(host, listens), "{host}");
        }
    }
}
