//! The arguments of commands that show the present activity of a cluster.
use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, Subcommand, ValueHint};
use weir_admin::cluster_args::Status;
use weir_diagnose::work::By;

/// Exit statuses, for monitoring.
pub const STATUS_EXITS: &str = "\
Exit status:
  0  healthy
  1  degraded (reduced redundancy, or calls that wait), or a warning (a dead mover or mount, a missing home, a full volume, …)
  2  critical: data is unavailable or lost
  3 and more: the cluster was not asked (8: the coordinator does not answer)";

#[derive(Args)]
pub struct ShowStatus {
    /// Print one sentence, and one line for each trouble
    #[arg(long)]
    pub brief: bool,
    /// Show it again every two seconds, until interrupted
    #[arg(long)]
    pub watch: bool,
    #[command(flatten)]
    pub cluster: Status,
}

#[derive(Args)]
pub struct TopArgs {
    /// What each row stands for
    #[arg(long, default_value = "user", value_parser = by())]
    pub by: By,
    /// Print once instead of every two seconds
    #[arg(long)]
    pub once: bool,
    /// Rows at most
    #[arg(long, default_value_t = 20)]
    pub rows: usize,
    #[command(flatten)]
    pub cluster: Status,
}

#[derive(Args)]
pub struct WaitsArgs {
    /// Show waits that have lasted this long, like 10ms or 2s
    #[arg(long, default_value = "10ms", value_parser = parse_duration_ms)]
    pub min: u32,
    /// Also show waits over 100 ms that ended within this time, like 10min or 1h
    #[arg(long, value_parser = parse_duration_ms)]
    pub since: Option<u32>,
    #[command(flatten)]
    pub cluster: Status,
}

#[derive(Args)]
pub struct WhyArgs {
    /// A path in a mounted file system, the number of a process, or the word slow for the whole cluster
    #[arg(value_name = "PATH|PID|slow", value_hint = ValueHint::AnyPath)]
    pub what: String,
    #[command(flatten)]
    pub cluster: Status,
}

#[derive(Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct EventsArgs {
    #[command(subcommand)]
    pub command: Option<EventsCommand>,
    /// Only those that lasted within this time, like 2h or 7d
    #[arg(long, value_name = "TIME", value_parser = weir_admin::times::parse_seconds)]
    pub since: Option<u32>,
    /// Then print events as they begin and end, until interrupted
    #[arg(long)]
    pub follow: bool,
    #[command(flatten)]
    pub cluster: Status,
}

#[derive(Subcommand)]
pub enum EventsCommand {
    /// Print all kinds of troubles: why each is raised, when it clears, what to do
    Kinds,
    /// Note that a trouble that lasts is known
    Ack(EventNamed),
    /// Let `weir status` list troubles of a code in one line, without effect on its exit status
    Mute {
        /// For how long, like 2h or 7d
        #[arg(long, value_name = "TIME", value_parser = weir_admin::times::parse_seconds)]
        until: u32,
        #[command(flatten)]
        event: EventNamed,
    },
    /// End a mute
    Unmute(EventNamed),
}

#[derive(Args)]
pub struct EventNamed {
    /// The code, as `weir events` shows it
    pub code: String,
    /// Only events about this node, target, volume, …
    #[arg(value_hint = ValueHint::Other)]
    pub about: Option<String>,
    #[command(flatten)]
    pub cluster: Status,
}

#[derive(Args)]
pub struct IohistArgs {
    /// Only of the process with this name, like storage-1
    #[arg(value_hint = ValueHint::Other)]
    pub process: Option<String>,
    /// Measure for this many seconds; 0: since each process started
    #[arg(long, default_value_t = 0)]
    pub seconds: u32,
    /// Show at most this many rows, those with the largest total time; --json has all
    #[arg(long, value_name = "N", default_value_t = 40)]
    pub rows: usize,
    #[command(flatten)]
    pub cluster: Status,
}

fn by() -> impl TypedValueParser<Value = By> {
    PossibleValuesParser::new(By::ALL.map(By::word)).try_map(|word| word.parse::<By>())
}

/// `10ms`, `2s`, `10min` or `1h`, in milliseconds.
fn parse_duration_ms(text: &str) -> Result<u32, String> {
    let end = text.find(|c: char| !c.is_ascii_digit()).unwrap_or(text.len());
    let factor = match &text[end..] {
        "ms" => 1,
        "s" => 1000,
        "m" | "min" => 60_000,
        "h" => 3_600_000,
        _ => return Err(format!("{text:?} is not a time like 10ms, 2s, 10min or 1h")),
    };
    let number: u32 = text[..end].parse().map_err(|_| format!("{text:?} has no number, or a large one"))?;
    number.checked_mul(factor).ok_or_else(|| format!("{text} is too long"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_units() {
        let parsed = ["10ms", "2s", "10min", "3m", "1h"].map(|text| parse_duration_ms(text).unwrap());
        assert_eq!(parsed, [10, 2000, 600_000, 180_000, 3_600_000]);
        for bad in ["", "s", "5", "5 s", "99999h", "-1s"] {
            assert!(parse_duration_ms(bad).is_err(), "{bad}");
        }
    }
}
