//! Completion scripts and man pages, from the command line's declaration.
use crate::cli::Cli;
use crate::failure::{Doing, Outcome};
use clap::CommandFactory;
use std::io::Write;
use std::path::Path;

pub fn completion(shell: clap_complete::Shell) -> Outcome<()> {
    let mut script = Vec::new();
    clap_complete::generate(shell, &mut Cli::command(), "weir", &mut script);
    match std::io::stdout().write_all(&script) {
        Err(e) if e.kind() == std::io::ErrorKind::BrokenPipe => Ok(()), // nobody reads the rest
        done => done.doing("print the completion script"),
    }
}

/// One page per command: `weir.1`, `weir-up.1`, …
pub fn write_pages(dir: &Path) -> Outcome<()> {
    std::fs::create_dir_all(dir).doing(format_args!("make {}", dir.display()))?;
    clap_mangen::generate_to(Cli::command(), dir).doing(format_args!("write man pages to {}", dir.display()))
}
