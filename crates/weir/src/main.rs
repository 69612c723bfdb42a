//! The binary: roles, the mount and the command line. The outermost shell: only this crate reads the
//! environment, and uses the operating system past `weir-env` where an environment has no abstraction
//! (processes, mounts).
#![forbid(unsafe_code)]
#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "the outermost shell starts processes, reads pid files and mounts; nothing of it runs in the simulator"
)]

mod cli;
mod commands;
mod completion;
mod console;
mod help;
mod helper;
mod log;
mod machine;
mod manual;
mod notify;
mod package;
mod reporting;
mod rights;
mod roles;
mod subtree;
mod support;
mod unit;

use cli::{Cli, Command, ConfigCommand};
use commands::{
    access, audit, client, file, home, namespace, node, relation, report, target, upgrade, volume, watch,
};
use roles::args::RoleArgs;
use std::process::ExitCode;
use weir_admin::failure::Outcome;
use weir_admin::local::{forget, unsaved, up};
use weir_admin::{config, program, rotation, s3_keys};
use weir_proto::Error;

#[global_allocator]
static ALLOCATOR: weir_env::real::Allocator = weir_env::real::Allocator;

fn main() -> ExitCode {
    program::end_quietly_on_a_closed_pipe();
    let words: Vec<_> = std::env::args_os().collect();
    match completion::answer(&words) {
        Ok(false) => {}
        answered => return ended(answered.map(|_| ExitCode::SUCCESS), Form::Text(None)),
    }
    let is_json = words.iter().any(|word| word == "--json");
    let (program, words) = words.split_first().map_or((Default::default(), &[][..]), |(p, w)| (p.clone(), w));
    if let Some(call) = helper::Call::parse(&program, words) {
        return ended(call.run(&cli::mount_options()).map(|()| ExitCode::SUCCESS), Form::Text(None));
    }
    let cli = match Cli::read() {
        Ok(cli) => cli,
        Err(e) => return program::wrong_usage(e, is_json),
    };
    if let Err(failure) = wrong_clock_of_a_test() {
        return ended(Err(failure), Form::Text(None));
    }
    // The environment is read here and nowhere else.
    let environment = roles::Environment {
        log: std::env::var("WEIR_LOG").ok(),
        log_file: log_file(),
        kill_at: std::env::var("WEIR_KILL_AT").ok(),
        s3_keys: s3_keys::of_environment(|name| std::env::var(name).ok()),
        journal: std::env::var("JOURNAL_STREAM").ok(),
        notify: notify::Variables {
            socket: std::env::var_os("NOTIFY_SOCKET"),
            watchdog_usec: std::env::var("WATCHDOG_USEC").ok(),
            watchdog_pid: std::env::var("WATCHDOG_PID").ok(),
        },
    };
    let form = if is_json { Form::Json } else { Form::Text(environment.journal.as_deref()) };
    if let Err(failure) = cli.presented.present() {
        return ended(Err(failure), form);
    }
    ended(run(cli.command, &environment), form)
}

/// `WEIR_CLOCK_AHEAD_S`, in builds for tests only: the seconds by which this process's clock is wrong.
fn wrong_clock_of_a_test() -> Outcome<()> {
    let ahead = std::env::var("WEIR_CLOCK_AHEAD_S").ok().filter(|_| cfg!(debug_assertions));
    let Some(ahead) = ahead else { return Ok(()) };
    let bad = |_| Error::invalid(format!("WEIR_CLOCK_AHEAD_S={ahead}: expected seconds"));
    weir_env::real::set_wall_ahead(ahead.parse().map_err(bad)?);
    Ok(())
}

/// The log that `weir up` gave to this process.
fn log_file() -> Option<log::LogFile> {
    let path = std::env::var_os("WEIR_LOG_FILE")?.into();
    let limit = std::env::var("WEIR_LOG_BYTES").ok().and_then(|bytes| bytes.parse().ok());
    Some(log::LogFile { path, bytes_max: limit.unwrap_or(rotation::FILE_BYTES_MAX) })
}

/// How a failure is printed.
#[derive(Clone, Copy)]
enum Form<'a> {
    /// The journal's stream, if standard error goes there.
    Text(Option<&'a str>),
    /// For a program that requested JSON.
    Json,
}

fn ended(done: Outcome<ExitCode>, form: Form<'_>) -> ExitCode {
    match (done, form) {
        (Ok(code), _) => code,
        (Err(failure), Form::Json) => program::failed(&failure, true),
        (Err(failure), Form::Text(journal)) => {
            eprintln!("{}", log::last_words(&failure.to_string(), journal));
            ExitCode::from(failure.kind().exit_code())
        }
    }
}

fn run(command: Command, environment: &roles::Environment) -> Outcome<ExitCode> {
    let done = match command {
        Command::Up(args) => up::up(&args),
        Command::Down(args) => unsaved::wait(&args).and_then(|()| up::down(&args)),
        Command::Init(args) => node::init(&args),
        Command::Join(args) => node::join(&args),
        Command::Token(command) => node::token(&command),
        Command::Node(command) => node::node(&command),
        Command::Ca(command) => node::ca(&command),
        Command::Status(args) => return watch::status::status(&args),
        Command::Client(command) => client::run(&command),
        Command::Top(args) => watch::top(&args),
        Command::Waits(args) => watch::waits(&args),
        Command::Why(args) => watch::why(&args),
        Command::Iohist(args) => watch::iohist(&args),
        Command::Events(args) => watch::events::events(&args),
        Command::Support(args) => support::support(&args),
        Command::Console(args) => console::console(&args),
        Command::File(command) => file::run(&command),
        Command::Target(command) => target::run(&command),
        Command::Rebuild(args) => target::rebuild(&args),
        Command::Inspect(args) => return target::inspect(&args),
        Command::Upgrade(command) => upgrade::run(&command),
        Command::Namespace(command) => namespace::run(&command, &|config, export, progress| {
            let role = RoleArgs { config: Some(config), ..RoleArgs::default() };
            roles::import(&role, environment, export, progress)
        }),
        Command::Volume(command) => volume::run(&command),
        Command::Quota(args) => volume::show_quota(&args),
        Command::Report(args) => report::report(&args),
        Command::Relation(command) => relation::run(&command, environment.s3_keys.clone()),
        Command::Home(command) => home::run(&command),
        Command::Access(command) => access::run(&command),
        Command::Audit(command) => return audit::run(&command),
        Command::Mount(args) => roles::mount(&args, environment),
        Command::Unmount(args) => forget::unmount(&args),
        Command::Coord(args) => roles::coord(&args, environment),
        Command::Meta(args) => roles::meta(&args, environment),
        Command::Storage(args) => roles::storage(&args, environment),
        Command::Mover(args) => roles::mover(&args, environment),
        Command::Config(ConfigCommand::Reference) => {
            print!("{}", config::reference());
            Ok(())
        }
        Command::Config(ConfigCommand::Check { file }) => roles::check_file(&file),
        Command::Completion { shell } => completion::print_script(shell),
        Command::Man { dir } => manual::write_pages(&dir),
        Command::PackageFiles { dir } => package::write_files(&dir),
    };
    done.map(|()| ExitCode::SUCCESS)
}
