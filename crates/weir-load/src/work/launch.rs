//! Starting work: in threads of this process or in processes of their own, all at the same moment.
use super::{Outcome, Work};
use crate::failure::failed;
use crate::options::Common;
use serde::{Deserialize, Serialize};
use std::io::{self, BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Condvar, Mutex, PoisonError, mpsc};
use std::time::Instant;
use weir_proto::{Error, Result};

/// How workers are started.
#[derive(Clone)]
pub(crate) enum Launch {
    Threads,
    Processes(Vec<String>),
}

enum Message {
    Ready,
    Done(Result<Outcome>),
}

impl Launch {
    pub(crate) fn new(common: &Common) -> Result<Launch> {
        match (common.processes, common.worker_command.is_empty()) {
            (false, _) => Ok(Launch::Threads),
            (true, false) => Ok(Launch::Processes(common.worker_command.clone())),
            (true, true) => {
                Err(Error::unsupported("processes were asked for, but this program can only use threads"))
            }
        }
    }

    /// Runs all in parallel; the first error ends the run.
    pub(crate) fn run(&self, works: &[Work]) -> Result<Outcome> {
        match self {
            Launch::Threads => run_threads(works),
            Launch::Processes(command) => run_processes(works, command),
        }
    }
}

/// Waits until each worker is ready or has ended, opens the gate, and collects the results.
fn conduct(count: usize, messages: &mpsc::Receiver<Message>, open_gate: impl FnOnce()) -> Result<Outcome> {
    let mut total = Outcome::default();
    let mut error = None;
    let (mut ready, mut done) = (0, 0);
    let mut open_gate = Some(open_gate);
    while done < count {
        match messages.recv() {
            Ok(Message::Ready) => ready += 1,
            Ok(Message::Done(result)) => {
                done += 1;
                match result {
                    Ok(outcome) => total.merge(outcome),
                    Err(e) => drop(error.get_or_insert(e)),
                }
            }
            Err(mpsc::RecvError) => {
                error.get_or_insert_with(|| Error::io("a worker ended without a result"));
                break;
            }
        }
        // Workers that failed before the gate never reach it.
        if ready + if error.is_some() { done } else { 0 } >= count
            && let Some(open) = open_gate.take()
        {
            open();
        }
    }
    error.map_or(Ok(total), Err)
}

fn run_threads(works: &[Work]) -> Result<Outcome> {
    let gate = Arc::new((Mutex::new(false), Condvar::new()));
    let (tx, rx) = mpsc::channel();
    std::thread::scope(|scope| {
        for work in works {
            let (tx, gate) = (tx.clone(), gate.clone());
            scope.spawn(move || {
                let mut wait = || {
                    let _ = tx.send(Message::Ready);
                    let mut open = gate.0.lock().unwrap_or_else(PoisonError::into_inner);
                    while !*open {
                        open = gate.1.wait(open).unwrap_or_else(PoisonError::into_inner);
                    }
                    Ok(Instant::now())
                };
                let result = work.run(&mut wait);
                let _ = tx.send(Message::Done(result));
            });
        }
        drop(tx);
        conduct(works.len(), &rx, || {
            *gate.0.lock().unwrap_or_else(PoisonError::into_inner) = true;
            gate.1.notify_all();
        })
    })
}

/// The message of a worker process when it is ready, and the reply.
const READY: &str = "ready";
const GO: &str = "go";

fn run_processes(works: &[Work], command: &[String]) -> Result<Outcome> {
    let mut children = Vec::new();
    let (tx, rx) = mpsc::channel();
    let result = std::thread::scope(|scope| {
        for work in works {
            let mut child = start_process(work, command)?;
            let stdout = child.stdout.take().expect("the worker's output is a pipe");
            children.push(child);
            let tx = tx.clone();
            scope.spawn(move || listen(BufReader::new(stdout), &tx));
        }
        drop(tx);
        conduct(works.len(), &rx, || {
            for child in &mut children {
                let stdin = child.stdin.as_mut().expect("the worker's input is a pipe");
                let _ = writeln!(stdin, "{GO}"); // a worker that has ended has reported that
            }
        })
    });
    for child in &mut children {
        drop(child.stdin.take()); // a worker at the gate ends when its input does
        let _ = child.wait();
    }
    result
}

fn start_process(work: &Work, command: &[String]) -> Result<Child> {
    let doing = "start a worker process";
    let (program, args) =
        command.split_first().ok_or_else(|| Error::invalid("the worker's command is empty"))?;
    let child = Command::new(program).args(args).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn();
    let mut child = child.map_err(|e| failed(doing, Path::new(program), &e))?;
    let line = serde_json::to_string(work).map_err(|e| Error::invalid(format!("{doing}: {e}")))?;
    let sent = writeln!(child.stdin.as_mut().expect("the worker's input is a pipe"), "{line}");
    sent.map_err(|e| failed(doing, Path::new(program), &e))?;
    Ok(child)
}

fn listen(output: impl BufRead, tx: &mpsc::Sender<Message>) {
    for line in output.lines() {
        let message = match line {
            Ok(line) if line == READY => Message::Ready,
            Ok(line) => Message::Done(answer(&line)),
            Err(_) => break,
        };
        let done = matches!(message, Message::Done(_));
        let _ = tx.send(message);
        if done {
            return;
        }
    }
    let _ = tx.send(Message::Done(Err(Error::io("a worker process ended before it answered"))));
}

fn answer(line: &str) -> Result<Outcome> {
    let parsed: std::result::Result<Answer, _> = serde_json::from_str(line);
    match parsed {
        Ok(Answer::Outcome(outcome)) => Ok(outcome),
        Ok(Answer::Failed(context)) => Err(Error::io(context)),
        Err(e) => Err(Error::io(format!("a worker process answered {line:?}: {e}"))),
    }
}

#[derive(Serialize, Deserialize)]
enum Answer {
    Outcome(Outcome),
    Failed(String),
}

/// The main function of a worker process: reads its work from standard input and answers on standard output.
pub fn worker_main() -> Result<()> {
    let io = |e: io::Error| Error::from_io("exchange messages with the process that started this worker", &e);
    let mut input = io::stdin().lines();
    let mut line = || match input.next() {
        Some(line) => line.map_err(io),
        None => Err(Error::invalid("the process that started this worker has ended")),
    };
    let work: Work = serde_json::from_str(&line()?).map_err(|e| {
        Error::invalid(format!(
            "this is not a job of `weir-bench`: {e} (`worker` is started by `weir-bench`, not by hand)"
        ))
    })?;
    let result = work.run(&mut || {
        println!("{READY}");
        line()?;
        Ok(Instant::now())
    });
    let answer = match result {
        Ok(outcome) => Answer::Outcome(outcome),
        Err(e) => Answer::Failed(e.to_string()),
    };
    println!("{}", serde_json::to_string(&answer).expect("an answer is plain data"));
    Ok(())
}
