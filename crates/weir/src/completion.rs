//! Shell completion. The shell runs this program with the words typed so far, so names of volumes, relations,
//! snapshots and targets are offered, too, if the cluster selected by the words answers at once. Otherwise
//! only static words are offered.
use crate::cli::Cli;
use clap::{Command, CommandFactory};
use clap_complete::engine::{ArgValueCompleter, CompletionCandidate};
use clap_complete::env::{CompleteEnv, Shells};
use std::ffi::{OsStr, OsString};
use std::io::Write;
use std::path::PathBuf;
use std::sync::mpsc::channel;
use std::time::Duration;
use weir_admin::cluster_args::{DIR_VARIABLE, Status};
use weir_admin::failure::{Doing, Failure, Outcome};
use weir_admin::which::coordinators;
use weir_admin::{namespace_client, observe};
use weir_proto::Error;

/// The variable by which a shell asks.
const VARIABLE: &str = "COMPLETE";
/// A user waits while the cluster is queried.
const ANSWER_PATIENCE: Duration = Duration::from_millis(300);

/// Answers a shell that asks. `false`: this is an ordinary call. The offered names come from outside of this
/// machine, so an error has no reader: nothing is offered.
pub fn answer(words: &[OsString]) -> Outcome<bool> {
    let typed: Vec<String> = words.iter().map(|word| word.to_string_lossy().into_owned()).collect();
    let here = std::env::current_dir().ok();
    let complete = CompleteEnv::with_factory(|| with_names(Cli::command(), &typed)).var(VARIABLE);
    complete.try_complete(words, here.as_deref()).map_err(|e| {
        let hint = format!("{VARIABLE} is for shells; unset it to run a command");
        Failure::new(Error::invalid(e.to_string().trim_start_matches("error: ").trim().to_owned()), hint)
    })
}

/// Prints the script with which a shell asks this program.
pub fn print_script(shell: clap_complete::Shell) -> Outcome<()> {
    match std::io::stdout().write_all(script(shell)?.as_bytes()) {
        Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => Ok(()), // the reader has closed the pipe
        done => done.doing("print the completion script"),
    }
}

pub fn script(shell: clap_complete::Shell) -> Outcome<String> {
    let shells = Shells::builtins();
    let name = shell.to_string();
    let Some(completer) = shells.completer(&name) else {
        return Err(Error::unsupported(format!("no completion for {name}")).into());
    };
    let mut script = Vec::new();
    completer
        .write_registration(VARIABLE, "weir", "weir", "weir", &mut script)
        .doing("make the completion script")?;
    Ok(String::from_utf8_lossy(&script).into_owned())
}

/// The kind of object that a name on the command line identifies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Kind {
    Volume,
    Relation,
    /// A snapshot of the volume that was typed before.
    Snapshot,
    Target,
}

/// The kind, by the commands above an argument, and its id.
fn kind_of(path: &[&str], id: &str) -> Option<Kind> {
    match (path, id) {
        (["volume", "create" | "clone"], "name") => None,
        (["volume", "snapshot"], "name") => Some(Kind::Snapshot),
        (["volume", "restore"], "from") => Some(Kind::Snapshot),
        (["volume", _], "name") | (_, "volume") => Some(Kind::Volume),
        (["relation", _], "relation") => Some(Kind::Relation),
        (["target", _], "target") => Some(Kind::Target),
        _ => None,
    }
}

/// The command line with completers for names.
fn with_names(root: Command, typed: &[String]) -> Command {
    fn walk(command: Command, path: &[&str], typed: &[String]) -> Command {
        let names: Vec<String> = command.get_subcommands().map(|sub| sub.get_name().to_owned()).collect();
        let command = command.mut_args(|arg| match kind_of(path, arg.get_id().as_str()) {
            None => arg,
            Some(kind) => {
                let typed = typed.to_vec();
                arg.add(ArgValueCompleter::new(move |current: &OsStr| candidates(kind, &typed, current)))
            }
        });
        names.iter().fold(command, |command, name| {
            let below: Vec<&str> = path.iter().copied().chain([name.as_str()]).collect();
            command.mut_subcommand(name, |sub| walk(sub, &below, typed))
        })
    }
    walk(root, &[], typed)
}

fn candidates(kind: Kind, typed: &[String], current: &OsStr) -> Vec<CompletionCandidate> {
    let begins = current.to_string_lossy().into_owned();
    let (sender, received) = channel();
    let typed = typed.to_vec();
    // A thread, because looking up a mount or a host may hang: the process ends without it.
    std::thread::spawn(move || {
        let names = names(kind, &typed).unwrap_or_default();
        let _ = sender.send(names); // the caller may have given up
    });
    let names = received.recv_timeout(ANSWER_PATIENCE).unwrap_or_default();
    let fitting = names.into_iter().filter(|(name, _)| name.starts_with(&begins));
    fitting.map(|(name, about)| CompletionCandidate::new(name).help(Some(about.into()))).collect()
}

/// Names and their meaning.
fn names(kind: Kind, typed: &[String]) -> Outcome<Vec<(String, String)>> {
    let at = cluster_of(typed);
    let coordinators = coordinators(&at)?;
    observe::block_on(async {
        if kind == Kind::Target {
            let cluster = observe::observe(&weir_env::real::env(), &coordinators, "weir").await?;
            let map = cluster.map();
            let state = |t: &weir_proto::map::Target| format!("{:?}", t.state).to_lowercase();
            return Ok(map.targets.iter().map(|t| (t.id.to_string(), state(t))).collect());
        }
        let namespace = option(typed, "--namespace").unwrap_or("root").to_owned();
        let client = namespace_client::connect(coordinators, &namespace).await?;
        let found = match kind {
            Kind::Relation => {
                let all = client.relations(None).await?;
                all.into_iter().map(|r| (r.id.to_string(), format!("{} {}", r.volume_name, r.url))).collect()
            }
            Kind::Snapshot => {
                let all = namespace_client::all(&client).await?;
                let Some(volume) = all.iter().find(|v| typed.contains(&v.name)) else {
                    return Ok(Vec::new());
                };
                let shown = client.snapshots(volume.id).await?;
                shown.into_iter().map(|s| (s.name, format!("of {}", volume.name))).collect()
            }
            _ => namespace_client::all(&client)
                .await?
                .into_iter()
                .map(|v| (v.name, "volume".to_owned()))
                .collect(),
        };
        client.shutdown().await?;
        Ok(found)
    })
}

/// The cluster selected by the words.
fn cluster_of(typed: &[String]) -> Status {
    let dir = option(typed, "--dir").map(PathBuf::from);
    let coordinator = option(typed, "--coordinator").and_then(|addr| addr.parse().ok());
    let at = option(typed, "--at").map(PathBuf::from);
    let is_given = dir.is_some() || coordinator.is_some() || at.is_some();
    // The environment replaces an option, as in an ordinary call.
    let from_variable = || std::env::var_os(DIR_VARIABLE).map(PathBuf::from).filter(|_| !is_given);
    Status {
        dir: dir.or_else(from_variable),
        coordinator: coordinator.into_iter().collect(),
        at,
        json: false,
    }
}

/// The value of an option, as `--name VALUE` or `--name=VALUE`.
fn option<'a>(typed: &'a [String], name: &str) -> Option<&'a str> {
    let mut words = typed.iter();
    while let Some(word) = words.next() {
        match word.strip_prefix(name) {
            Some("") => return words.next().map(String::as_str),
            Some(rest) if rest.starts_with('=') => return Some(&rest[1..]),
            _ => {}
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_are_found_in_both_forms() {
        let typed = ["weir", "volume", "show", "--dir", "/a", "--at=/b", "--dirx"].map(String::from);
        assert_eq!((option(&typed, "--dir"), option(&typed, "--at")), (Some("/a"), Some("/b")));
        assert_eq!(option(&typed, "--coordinator"), None);
        let at = cluster_of(&typed);
        assert_eq!((at.dir, at.at), (Some("/a".into()), Some("/b".into())));
    }

    #[test]
    fn arguments_that_name_things_are_known() {
        assert_eq!(kind_of(&["volume", "show"], "name"), Some(Kind::Volume));
        assert_eq!(kind_of(&["volume", "create"], "name"), None, "a new name");
        assert_eq!(kind_of(&["volume", "snapshot"], "volume"), Some(Kind::Volume));
        assert_eq!(kind_of(&["volume", "snapshot"], "name"), Some(Kind::Snapshot));
        assert_eq!(kind_of(&["relation", "show"], "relation"), Some(Kind::Relation));
        assert_eq!(kind_of(&["target", "clear"], "target"), Some(Kind::Target));
        assert_eq!(kind_of(&["access", "remove"], "name"), None);
    }

    /// A completer whose argument was renamed would silently do nothing.
    #[test]
    fn the_command_line_has_these_arguments() {
        let command = Cli::command();
        let has = |path: &[&str], id: &str| {
            let found = path.iter().try_fold(&command, |at, name| at.find_subcommand(name));
            found.is_some_and(|at| at.get_arguments().any(|arg| arg.get_id().as_str() == id))
        };
        for (path, id) in [
            (["volume", "show"], "name"),
            (["volume", "snapshot"], "name"),
            (["volume", "snapshot"], "volume"),
            (["volume", "restore"], "from"),
            (["relation", "show"], "relation"),
            (["target", "clear"], "target"),
        ] {
            assert!(has(&path, id), "{path:?} {id}");
        }
    }

    #[test]
    fn without_a_cluster_completion_is_empty_and_fast() {
        let nowhere = tempfile::tempdir().unwrap();
        let typed = ["--dir", nowhere.path().to_str().unwrap()].map(String::from);
        assert!(candidates(Kind::Volume, &typed, OsStr::new("")).is_empty());
    }
}
