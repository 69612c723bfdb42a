//! The options of `weir target`, `weir rebuild` and `weir inspect`.
use clap::{Args, Subcommand, ValueHint};
use std::path::PathBuf;
use weir_admin::cluster_args::Status;
use weir_admin::sizes::parse_size;
use weir_admin::times::parse_seconds;

const CLEAR: &str = "Return a failed target to service\n\n\
A target whose disk failed stays out of service, also after a restart, because its data may be wrong. Stop its \
process, repair or check the disk, start the process, then clear the target: its data is repaired from the other \
targets before it is read again.";
const REPLACE: &str = "Give a target whose disk is lost a new, empty directory\n\n\
The directory becomes the target's: start the storage role with it in place of the old one. The target is then \
refilled from the other targets. It must be down or failed; a directory that is not empty is refused.";

#[derive(Subcommand)]
pub enum TargetCommand {
    /// Return a failed target to service
    #[command(long_about = CLEAR)]
    Clear(ClearTarget),
    /// Give a target whose disk is lost a new, empty directory
    #[command(long_about = REPLACE)]
    Replace(ReplaceTarget),
    /// Show how far targets have verified their data, or verify it now
    ///
    /// Each target does so every 14 days. Damage is rebuilt from other targets and counted in `weir status`.
    Scrub(ScrubTargets),
    /// Declare a target lost that will not return
    ///
    /// Others take its places at once, not after ten minutes. Refused while they need its data.
    Gone(Gone),
    /// Move all data of a target to others while it serves it
    ///
    /// No redundancy is lost meanwhile. The target stays in the cluster, without data, until it is removed.
    Drain(Drain),
    /// End the drain of a target: it keeps its remaining data
    Undrain(OneTarget),
    /// Remove a target without data from the cluster
    ///
    /// Drain it first, then stop its process. `weir up` does not start that again; its directory stays.
    Remove(OneTarget),
    /// List targets: state, pool, how full they are, in how many placement groups they have a place
    List(Status),
}

#[derive(Args)]
pub struct Drain {
    /// The target as `weir status` shows it, like t3
    pub target: String,
    /// Only show what would be done
    #[arg(long)]
    pub dry_run: bool,
    #[command(flatten)]
    pub cluster: Status,
}

#[derive(Args)]
pub struct OneTarget {
    /// The target as `weir status` shows it, like t3
    pub target: String,
    #[command(flatten)]
    pub cluster: Status,
}

#[derive(Args)]
pub struct ScrubTargets {
    /// Targets as `weir status` shows them, like t3 [default: all]
    #[arg(value_name = "TARGET")]
    pub targets: Vec<String>,
    /// Read everything, and compare versions with the other members', now
    #[arg(long)]
    pub start: bool,
    /// Read at most this much per second and target [default: half of the time]
    #[arg(long, value_name = "SIZE", value_parser = parse_size, requires = "start")]
    pub rate: Option<u64>,
    /// Show it again every second, until no target is reading
    #[arg(long)]
    pub watch: bool,
    #[command(flatten)]
    pub cluster: Status,
}

#[derive(Args)]
pub struct Gone {
    /// The target as `weir status` shows it, like t3
    pub target: String,
    /// Only show what would be done
    #[arg(long)]
    pub dry_run: bool,
    /// Do it
    #[arg(long)]
    pub yes: bool,
    #[command(flatten)]
    pub cluster: Status,
}

#[derive(Args)]
pub struct Rebuild {
    /// Show it again every second, until all is rebuilt
    #[arg(long)]
    pub watch: bool,
    /// Let a target that is down count as lost after this time, like 10m or 1h; 0: only with `weir target
    /// gone` [default: 10m]
    #[arg(long, value_name = "TIME", value_parser = parse_seconds)]
    pub lost_after: Option<u32>,
    /// Let no place of a drained target begin to move until --resume
    #[arg(long, conflicts_with = "resume")]
    pub pause: bool,
    /// Let places of drained targets move again
    #[arg(long)]
    pub resume: bool,
    #[command(flatten)]
    pub cluster: Status,
}

#[derive(Args)]
pub struct ReplaceTarget {
    /// The target as `weir status` shows it, like t3
    pub target: String,
    /// Its new directory: empty or not yet existing
    #[arg(value_name = "NEW_DIR", value_hint = ValueHint::DirPath)]
    pub new_dir: PathBuf,
    #[command(flatten)]
    pub cluster: Status,
}

#[derive(Args)]
pub struct ClearTarget {
    /// The target as `weir status` shows it, like t3
    pub target: String,
    #[command(flatten)]
    pub cluster: Status,
}

#[derive(Args)]
pub struct Inspect {
    /// The target's directory; its process must not run
    #[arg(value_hint = ValueHint::DirPath)]
    pub dir: PathBuf,
    /// Read every byte and verify every checksum
    #[arg(long)]
    pub check: bool,
    /// Print problems and totals only, not each cell
    #[arg(long, conflicts_with = "json")]
    pub summary: bool,
    /// Print JSON
    #[arg(long)]
    pub json: bool,
}
