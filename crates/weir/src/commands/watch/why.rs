//! `weir why`: the reasons why a file, a process or the whole cluster waits, from the cause to the program,
//! with the remedy.
use super::args::WhyArgs;
use serde_json::json;
use std::path::Path;
use weir_admin::collect::Asker;
use weir_admin::evidence::{about, collect, of_path, threads_of};
use weir_admin::failure::{Failure, Outcome};
use weir_admin::which::coordinators;
use weir_admin::{observe, table};
use weir_diagnose::troubles::word;
use weir_diagnose::{Evidence, FileFacts, Finding, ended_waits, findings};
use weir_proto::Error;

/// The object of the question.
enum Question {
    Cluster,
    Path(Option<FileFacts>),
    /// The threads of a process.
    Process(Vec<u32>),
}

impl Question {
    fn parse(what: &str) -> Outcome<Question> {
        if what == "slow" {
            return Ok(Question::Cluster);
        }
        if let Ok(pid) = what.parse::<u32>() {
            let threads = threads_of(pid);
            if threads.is_empty() {
                let error = Error::not_found(format!("there is no process {pid} on this machine"));
                return Err(Failure::new(error, "run this on the machine where the program runs"));
            }
            return Ok(Question::Process(threads));
        }
        of_path(Path::new(what)).map(Question::Path)
    }
}

pub fn why(args: &WhyArgs) -> Outcome<()> {
    let question = Question::parse(&args.what)?;
    let (local, coordinators) = (args.cluster.local()?, coordinators(&args.cluster)?);
    let (evidence, threads) = observe::block_on(async {
        let asker = Asker::connect(&coordinators, "weir why").await?;
        let (file, threads) = match question {
            Question::Cluster => (None, Vec::new()),
            Question::Path(file) => (file, Vec::new()),
            Question::Process(threads) => (None, threads),
        };
        let mut evidence = collect(&asker, local, file).await?;
        if !threads.is_empty() {
            let file = file_of(&evidence, &threads);
            about(&mut evidence, &asker, file).await;
        }
        asker.end().await;
        Outcome::Ok((evidence, threads))
    })?;
    let found = findings(&evidence, &threads);
    let before = if found.is_empty() { ended_waits(&evidence) } else { Vec::new() };
    match args.cluster.json {
        true => table::json(&as_json(&evidence, &found, &before)),
        false => print!("{}", as_text(&args.what, &evidence, &found, &before)),
    }
    Ok(())
}

/// The file that one of the threads waits for.
fn file_of(evidence: &Evidence, threads: &[u32]) -> Option<FileFacts> {
    let is_theirs = |wait: &weir_proto::watch::WaitSeen| {
        wait.ended_ms == 0 && wait.object == "inode" && threads.contains(&wait.pid)
    };
    let seen = evidence.waits.iter().find(|seen| is_theirs(&seen.wait))?;
    Some(FileFacts { inode: seen.wait.object_id, ..FileFacts::default() })
}

fn as_text(what: &str, evidence: &Evidence, found: &[Finding], ended_waits: &[String]) -> String {
    let inode = evidence.file.as_ref().map(|file| format!(" (inode {})", file.inode)).unwrap_or_default();
    let mut out = match (found, ended_waits) {
        ([], []) => {
            format!("{what}{inode}: nothing waits, and nothing has waited for a second in the last hour\n")
        }
        ([], _) => format!("{what}{inode}: nothing waits now; the longest waits of the last hour:\n"),
        _ => format!("{what}{inode}:\n"),
    };
    ended_waits.iter().for_each(|line| out += &format!("  {line}\n"));
    // Each cause has its remedy below it; one that serves several is not repeated.
    let mut shown = Vec::new();
    for Finding { text, action, .. } in found {
        out += &format!("  {text}\n");
        if !action.is_empty() && !shown.contains(&action) {
            out += &format!("    to do: {action}\n");
            shown.push(action);
        }
    }
    if evidence.is_partial {
        out += "(waits of other mounts and the work of other users are shown to administrators only)\n";
    }
    out
}

fn as_json(evidence: &Evidence, found: &[Finding], ended_waits: &[String]) -> serde_json::Value {
    let chain: Vec<_> = found
        .iter()
        .map(|f| json!({ "severity": word(f.severity), "text": f.text, "action": f.action }))
        .collect();
    let inode = evidence.file.as_ref().map(|file| file.inode);
    let action = found.iter().map(|f| f.action.as_str()).find(|action| !action.is_empty());
    json!({
        "inode": inode, "chain": chain, "to_do": action, "past": ended_waits, "partial": evidence.is_partial,
    })
}
