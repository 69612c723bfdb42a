//! The options of `weir audit`.
use clap::{Args, Subcommand, ValueHint};
use std::path::PathBuf;
use weir_admin::cluster_args::{DIR_VARIABLE, Status};

#[derive(Subcommand)]
pub enum AuditCommand {
    /// Show the records: administration and refusals, oldest first
    Show(ShowAudit),
    /// Verify that no record was changed, removed, moved or cut
    ///
    /// Prints the last record's number and checksum. Keep both for --expect, which finds a removed end.
    Verify(VerifyAudit),
    /// List or set for which volumes opens and changes of files are recorded
    Volumes(AuditedVolumes),
}

#[derive(Args)]
pub struct ShowAudit {
    /// The directory that `weir up` was given, or that of a coordinator or metadata role
    #[arg(long, env = DIR_VARIABLE, hide_env_values = true, value_hint = ValueHint::DirPath)]
    pub dir: PathBuf,
    /// Only records since then: a date in UTC (2026-11-22, 2026-11-22T03:00), yesterday, or an age (12h, 7d)
    #[arg(long, value_name = "TIME")]
    pub since: Option<String>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}

#[derive(Args)]
pub struct AuditedVolumes {
    /// Glob of volumes' names, or of their paths if it begins with `/`; without it the rules are listed
    pub volumes: Option<String>,
    /// Record who opens files
    #[arg(long, requires = "volumes")]
    pub opens: bool,
    /// Record who changes names, attributes and contents
    #[arg(long, requires = "volumes")]
    pub changes: bool,
    /// Stop recording
    #[arg(long, requires = "volumes", conflicts_with_all = ["opens", "changes"])]
    pub off: bool,
    #[command(flatten)]
    pub cluster: Status,
}

#[derive(Args)]
pub struct VerifyAudit {
    /// The directory that `weir up` was given, or that of a coordinator or metadata role
    #[arg(long, env = DIR_VARIABLE, hide_env_values = true, value_hint = ValueHint::DirPath)]
    pub dir: PathBuf,
    /// A record that a log must hold, as an earlier run printed it; may be given several times
    #[arg(long, value_name = "NUMBER:CHECKSUM")]
    pub expect: Vec<String>,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}
