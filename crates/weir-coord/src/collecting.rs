//! Collecting: the coordinator collects reports of all processes that are connected to it, on request of a
//! command.
//!
//! Mounts and movers need no address. Invariants: a process that is silent delays a collection by its
//! deadline only; a process with several connections is counted once; few collections run
//! at a time, for any number of consoles. Knows nothing of the reports' contents.
use crate::Cluster;
use crate::door::Door;
use crate::shows::shown;
use bytes::Bytes;
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tokio::sync::{Semaphore, mpsc, oneshot};
use weir_env::{BoxFuture, Env};
use weir_proto::map::Role;
use weir_proto::watch::{ANSWER_BYTES_MAX, Answers, COLLECTED_MAX, Collect, NodeAnswer, NodeReply};
use weir_proto::{Error, ErrorKind, Request, Result, Wire};
use weir_rpc::{Connection, Payload, Reply};

/// The longest time that a collection waits for a process.
const PATIENCE_MAX: Duration = Duration::from_secs(10);
/// How much longer than its deadline a collection may take to answer.
const SLACK: Duration = Duration::from_secs(3);

/// Collections that run at the same time, each with a call to up to [`COLLECTED_MAX`] processes. Others wait
/// in order.
const AT_ONCE: usize = 8;
/// Commands and consoles that wait for a collection; further ones are refused. They ask every second at most.
const CALLERS_MAX: usize = 512;

/// The subject of a collection: of two callers with the same question at the same time both get one answer.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
struct Question {
    method: u16,
    body: Vec<u8>,
    after: u64,
    patience_ms: u32,
}

/// A part of a collection: the number to continue after, and the answers.
type Part = (u64, Bytes);

/// The collections that are wanted or run, and their callers.
pub struct Collections {
    wanted: Mutex<BTreeMap<Question, Vec<oneshot::Sender<Part>>>>,
    at_once: Semaphore,
    callers: Door,
}

impl Default for Collections {
    fn default() -> Collections {
        Collections {
            wanted: Mutex::default(),
            at_once: Semaphore::new(AT_ONCE),
            callers: Door::new(CALLERS_MAX, "collections are waited for"),
        }
    }
}

impl Collections {
    fn wanted(&self) -> MutexGuard<'_, BTreeMap<Question, Vec<oneshot::Sender<Part>>>> {
        self.wanted.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Asks the processes, or waits for another caller's answer to the same question. `peers`: in the order
    /// of their numbers, from `asked.after` on.
    pub fn collect(
        self: &Arc<Self>,
        env: &Env,
        name: &str,
        asked: Collect,
        peers: impl FnOnce() -> Vec<Connection>,
    ) -> Result<BoxFuture<'static, Result<Reply>>> {
        let taken = self.callers.take()?;
        let Collect { method, after, patience_ms, .. } = asked;
        let question = Question { method, body: asked.body.to_vec(), after, patience_ms };
        let (report, reported) = oneshot::channel();
        let is_first = {
            let mut wanted = self.wanted();
            let callers = wanted.entry(question.clone()).or_default();
            callers.push(report);
            callers.len() == 1
        };
        if is_first {
            let (me, name, peers) = (self.clone(), name.to_owned(), peers());
            env.tasks.spawn("collection", me.run(env.clone(), name, asked, peers, question));
        }
        Ok(Box::pin(async move {
            let _taken = taken;
            let (next, answers) =
                reported.await.map_err(|_| Error::unavailable("the coordinator has stopped"))?;
            Ok(Reply::with_payload(&weir_proto::watch::Collected { next }, answers))
        }))
    }

    async fn run(
        self: Arc<Self>,
        env: Env,
        name: String,
        asked: Collect,
        peers: Vec<Connection>,
        question: Question,
    ) {
        let _turn = self.at_once.acquire().await;
        let part = collect(env, name, asked, peers).await;
        for caller in self.wanted().remove(&question).unwrap_or_default() {
            let _ = caller.send(part.clone()); // it has given up
        }
    }
}

/// Asks all processes in parallel, this one first.
async fn collect(env: Env, name: String, asked: Collect, peers: Vec<Connection>) -> Part {
    let patience = Duration::from_millis(u64::from(asked.patience_ms)).min(PATIENCE_MAX);
    let next = if peers.len() > COLLECTED_MAX { peers[COLLECTED_MAX - 1].id() } else { 0 };
    let peers = &peers[..peers.len().min(COLLECTED_MAX)];
    let mut answers = Vec::new();
    if asked.after == 0 {
        let reply = shown(&env.watch, asked.method, &asked.body);
        answers.push(answer(&name, Role::Coordinator, reply));
    }
    let (report, mut reported) = mpsc::channel(COLLECTED_MAX);
    for peer in peers {
        let (report, peer, asked) = (report.clone(), peer.clone(), asked.clone());
        env.tasks.spawn("collect", async move {
            let reply = peer.call_encoded(asked.method, &asked.body, Payload::default(), patience).await;
            let reply = reply.and_then(|answered| NodeReply::from_bytes(&answered.reply));
            let reply = reply.map_err(|e| match e.kind {
                ErrorKind::Deadline => Error::deadline(format!("no answer within {patience:?}")),
                _ => e,
            });
            let answer = answer(&peer.peer().name, peer.peer().role, reply);
            let _ = report.send(answer).await; // the command has given up
        });
    }
    drop(report);
    while let Some(answer) = reported.recv().await {
        answers.push(answer);
    }
    answers.sort_by(|a, b| (a.role, &a.name, a.process).cmp(&(b.role, &b.name, b.process)));
    (next, Bytes::from(Answers { answers }.to_bytes()))
}

fn answer(name: &str, role: Role, reply: Result<NodeReply>) -> NodeAnswer {
    let fits = |reply: NodeReply| match reply.body.len() <= ANSWER_BYTES_MAX {
        true => Ok(reply),
        false => Err(Error::invalid(format!("an answer of {} bytes is too long", reply.body.len()))),
    };
    match reply.and_then(fits) {
        Ok(NodeReply { process, name: own, body }) => {
            let name = if own.is_empty() { name.to_owned() } else { own };
            NodeAnswer { name, role, process, failure: String::new(), body }
        }
        Err(e) => NodeAnswer {
            name: name.to_owned(),
            role,
            process: 0,
            failure: e.to_string(),
            body: Default::default(),
        },
    }
}

/// A process's answer, or why there is none.
#[derive(Clone, PartialEq, Debug)]
pub struct Collected<T> {
    pub name: String,
    pub role: Role,
    pub reply: std::result::Result<T, String>,
}

impl Cluster {
    /// Asks all processes that are connected to the coordinator, each for at most `patience`.
    pub async fn collect<R: Request<Reply = NodeReply>, T: Wire>(
        &self,
        request: &R,
        patience: Duration,
    ) -> Result<Vec<Collected<T>>> {
        let mut after = 0;
        let mut by_process: BTreeMap<u64, Collected<T>> = BTreeMap::new();
        let mut silent = Vec::new();
        loop {
            let asked = Collect {
                method: R::METHOD,
                body: request.to_bytes().into(),
                after,
                patience_ms: patience.as_millis() as u32,
            };
            let call = self.shared().coordinator.call(&asked, Vec::new(), patience + SLACK);
            let (page, payload) = call.await.map_err(|e| e.doing("ask the coordinator"))?;
            for NodeAnswer { name, role, process, failure, body } in Answers::from_bytes(&payload)?.answers {
                let reply = match failure.is_empty() {
                    true => T::from_bytes(&body).map_err(|e| e.to_string()),
                    false => Err(failure),
                };
                match reply.is_ok() {
                    true => drop(by_process.insert(process, Collected { name, role, reply })),
                    false => silent.push(Collected { name, role, reply }),
                }
            }
            after = page.next;
            if after == 0 {
                break;
            }
        }
        let mut all: Vec<Collected<T>> = by_process.into_values().chain(silent).collect();
        all.sort_by(|a, b| (a.role, &a.name).cmp(&(b.role, &b.name)));
        Ok(all)
    }
}
