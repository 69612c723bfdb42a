//! The options of `weir relation` and `weir volume changes`.
use super::prefetch::Prefetch;
use super::rules::{Change, Rules};
use super::verify;
use clap::{Args, Subcommand, ValueEnum};
use weir_admin::failure::Outcome;
use weir_admin::namespace_client::Cluster;
use weir_client::NewRelation;
use weir_home::HomeUrl;
use weir_proto::relation::{HomeIds, IdMapping};

const ADD: &str = "Add a home: the volume's present and future files are copied there\n\n\
The home is a directory that movers reach, local or mounted (file:///gpfs/home/beamline), a part of an S3 bucket \
(s3://bucket/prefix?endpoint=https://host&credentials=FILE) or a directory of another Weir \
(weir://coordinator:port/path). It must be empty. Data arrives there while it is being written (in S3 a file appears \
when it is complete); names, sizes and deletions follow in their order. A URL holds no secret: movers read the keys \
of S3 from the credentials file that it names (as Amazon's tools write it; profile=NAME if not default), or from \
AWS_ACCESS_KEY_ID and others of Amazon's variables in their environment (docs/security.md).\n\n\
With --direction mirror the empty volume shows the files at the home and their changes. The volume is read-only, and \
nothing is changed at the home, not even a mark.";
const VERIFY: &str = "Verify a home against the shipped data; files that differ become conflicts\n\n\
Reads all of it: names, kinds, owners, modes, sizes and times of files, and each byte, which must have the checksum \
that it was shipped with; extended attributes are not compared. Run it on a node that reaches the home. Files that \
are being shipped are not compared. A file that differs is a conflict: it is not evicted until `weir relation \
resolve` has decided.";

#[derive(Subcommand)]
pub enum RelationCommand {
    /// Add a home: the volume's present and future files are copied there
    #[command(long_about = ADD)]
    Add(Add),
    /// Change which files it copies, and its bandwidth limit
    ///
    /// A given list replaces the present one. Files at home stay there, and are kept up to date.
    Set(Set),
    /// Show all relations
    List(List),
    /// Show one relation: state, lag, backlog, what limits it, conflicts
    Show(One),
    /// Pause copying until `weir relation resume`
    Pause(One),
    /// Resume copying
    Resume(One),
    /// Remove the relation; files at home stay
    Remove(One),
    /// Resolve a conflict
    Resolve(Resolve),
    /// Verify a home against the shipped data; files that differ become conflicts
    #[command(long_about = VERIFY)]
    Verify(verify::Options),
    /// Recall evicted data of many files and directories
    Prefetch(Prefetch),
}

#[derive(Args)]
pub struct Add {
    /// The volume
    pub volume: String,
    /// URL of the home, like file:///path, s3://bucket/prefix or weir://coordinator:port/path
    pub url: String,
    /// Allow eviction of data that is at home: names stay, data returns on access
    #[arg(long)]
    pub evict: bool,
    /// Direction of changes
    #[arg(long, value_enum, default_value = "push")]
    pub direction: Way,
    #[command(flatten)]
    pub new: Ids,
    #[command(flatten)]
    pub rules: Rules,
    #[command(flatten)]
    pub at: Cluster,
}

#[derive(Args)]
pub struct Set {
    /// The relation as `weir relation list` shows it, like r1, or the volume that has only this one
    pub relation: String,
    #[command(flatten)]
    pub change: Change,
    #[command(flatten)]
    pub at: Cluster,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Way {
    /// Changes of the volume are copied to the home
    Push,
    /// Changes of the home appear in the volume, which is read-only; its data may always be evicted
    Mirror,
}

#[derive(Args)]
pub struct Ids {
    /// Map local user HERE to user THERE at home; +COUNT maps a range; may be given several times
    #[arg(long, alias = "uid-map", value_name = "HERE=THERE[+COUNT]", value_parser = parse_mapping)]
    pub map_uid: Vec<IdMapping>,
    /// Map groups, in the same way
    #[arg(long, alias = "gid-map", value_name = "HERE=THERE[+COUNT]", value_parser = parse_mapping)]
    pub map_gid: Vec<IdMapping>,
}

impl Ids {
    pub fn of_home(&self) -> HomeIds {
        HomeIds { users: self.map_uid.clone(), groups: self.map_gid.clone() }
    }
    /// Checks the URL as far as possible without the cluster.
    pub fn relation(&self, url: String, evict: bool, import: bool) -> Outcome<NewRelation> {
        HomeUrl::parse(&url)?;
        let ids = self.of_home();
        ids.check(false)?; // only a rule's map leads to root
        Ok(NewRelation { url, evict, import, ids, ..NewRelation::default() })
    }
}

fn parse_mapping(text: &str) -> std::result::Result<IdMapping, String> {
    let parsed = || {
        let (here, there) = text.split_once('=')?;
        let (there, count) = there.split_once('+').unwrap_or((there, "1"));
        Some(IdMapping { here: here.parse().ok()?, there: there.parse().ok()?, count: count.parse().ok()? })
    };
    parsed().ok_or_else(|| format!("{text:?}: expected numbers like 1000=2000 or 1000=2000+50"))
}

#[derive(Args)]
pub struct List {
    /// Only those of this volume
    pub volume: Option<String>,
    #[command(flatten)]
    pub at: Cluster,
}

#[derive(Args)]
pub struct One {
    /// The relation as `weir relation list` shows it, like r1, or the volume that has only this one
    pub relation: String,
    #[command(flatten)]
    pub at: Cluster,
}

#[derive(Args)]
pub struct Resolve {
    /// The relation, like r1
    pub relation: String,
    /// The file's inode as `weir relation show` shows it, like i2000003
    pub inode: String,
    /// Which side wins
    #[arg(long, value_enum)]
    pub keep: Keep,
    #[command(flatten)]
    pub at: Cluster,
}

#[derive(Clone, Copy, ValueEnum)]
pub enum Keep {
    /// The volume: the file at home is overwritten
    Volume,
    /// Neither: the home was repaired, try again
    Retry,
}

#[derive(Args)]
pub struct Follow {
    /// The volume
    pub name: String,
    /// Wait for more changes
    #[arg(long)]
    pub follow: bool,
    /// Remember the position under this name: the next call continues there, and unread changes are kept
    #[arg(long, value_name = "NAME")]
    pub cursor: Option<String>,
    /// Forget the cursor
    #[arg(long, requires = "cursor", conflicts_with = "follow")]
    pub drop: bool,
    #[command(flatten)]
    pub at: Cluster,
}
