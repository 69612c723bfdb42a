//! The begin and the end of a program: a command line that is not understood, a failure, a closed pipe.
use crate::failure::{Failure, nearest_first};
use std::process::ExitCode;
use weir_proto::{Error, ErrorKind};

/// Prints a failure; the exit status follows from its kind.
pub fn failed(failure: &Failure, is_json: bool) -> ExitCode {
    match is_json {
        true => eprintln!("{}", failure.as_json()),
        false => eprintln!("{failure}"),
    }
    ExitCode::from(failure.kind().exit_code())
}

/// Prints what is wrong with a command line, or the help that it asked for.
pub fn wrong_usage(e: clap::Error, is_json: bool) -> ExitCode {
    let is_failure = e.use_stderr();
    let e = likeliest_first(e);
    if is_json && is_failure { usage_as_json(&e) } else { e.exit() }
}

/// Of several words that may have been meant the likeliest comes first.
fn likeliest_first(mut e: clap::Error) -> clap::Error {
    use clap::error::{ContextKind, ContextValue};
    let Some(ContextValue::String(word)) = e.get(ContextKind::InvalidSubcommand) else { return e };
    let word = word.clone();
    let Some(ContextValue::Strings(words)) = e.get(ContextKind::SuggestedSubcommand) else { return e };
    let mut words = words.clone();
    nearest_first(&word, &mut words);
    e.insert(ContextKind::SuggestedSubcommand, ContextValue::Strings(words));
    e
}

/// A command that was not understood, for a program: the first line, and the rest as the hint.
fn usage_as_json(e: &clap::Error) -> ExitCode {
    let text = e.to_string();
    let (error, hint) = text.split_once('\n').unwrap_or((&text, ""));
    let lines: Vec<&str> = hint.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    let error = Error::of_text(ErrorKind::Invalid, error.trim_start_matches("error: ").trim());
    let failure = match lines.is_empty() {
        true => error.into(),
        false => Failure::new(error, lines.join("; ")),
    };
    failed(&failure, true)
}

/// `weir status | head -1`: a closed pipe is not a failure.
pub fn end_quietly_on_a_closed_pipe() {
    let usual = std::panic::take_hook();
    std::panic::set_hook(Box::new(move |panic| {
        let text = panic.payload().downcast_ref::<String>().map_or("", String::as_str);
        if text.starts_with("failed printing to stdout") && text.contains("Broken pipe") {
            std::process::exit(0);
        }
        usual(panic);
    }));
}
