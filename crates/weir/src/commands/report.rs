//! `weir report`: the contents of a subtree or a volume, from the metadata leader's records and without a
//! walk.
//!
//! Invariant: entries are files, directories, symbolic links and special files, and each is online or
//! offline: all sums are sums of the same entries. The leader is queried in batches, so the report does not
//! show a single moment.
use clap::{Args, ValueHint};
use serde::Serialize;
use serde_json::{Value, json};
use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use weir_admin::cluster_args::Status;
use weir_admin::failure::{Doing, Failure, Outcome};
use weir_admin::namespace_client::{connect, named, own_cred};
use weir_admin::sizes::parse_size;
use weir_admin::which::coordinators;
use weir_admin::{observe, table, users};
use weir_client::Client;
use weir_proto::meta::{Cred, FileKind};
use weir_proto::volume::{DirectoryFacts, FileFacts, Scanned};
use weir_proto::{Error, ErrorKind, InodeId, VolumeId};

/// Directories and users that are named.
const TOP: usize = 10;
/// The unit in which targets allocate space, in bytes: less is rounded up.
const BLOCK_BYTES: u64 = 4096;
/// Upper ends of the histogram's classes: powers of 16, from 256 B to 16 TiB.
const CLASSES: usize = 10;

#[derive(Args)]
pub struct Report {
    /// A volume's name, or a path from the root of the file system, which begins with / [default: everything]
    #[arg(value_hint = ValueHint::Other)]
    pub what: Option<String>,
    /// Show sizes in this unit, like 1, 1K, 1MiB or 1GB; auto: the unit that is easiest to read
    #[arg(long, default_value = "auto", value_name = "SIZE", value_parser = parse_block_size)]
    pub block_size: BlockSize,
    /// Count only files with data, and only bytes that are stored here
    #[arg(short = '0', long)]
    pub online_only: bool,
    /// Write the report to this file
    #[arg(long, value_hint = ValueHint::FilePath)]
    pub output: Option<PathBuf>,
    #[command(flatten)]
    pub cluster: Status,
    /// The namespace
    #[arg(long, default_value = "root")]
    pub namespace: String,
}

/// The unit of sizes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum BlockSize {
    Auto,
    Bytes(u64),
}

fn parse_block_size(text: &str) -> Result<BlockSize, String> {
    if text == "auto" {
        return Ok(BlockSize::Auto);
    }
    match parse_size(text)? {
        0 => Err("a block has at least one byte".into()),
        bytes => Ok(BlockSize::Bytes(bytes)),
    }
}

impl BlockSize {
    fn show(self, bytes: u64) -> String {
        match self {
            BlockSize::Auto => table::bytes(bytes),
            BlockSize::Bytes(block) => bytes.div_ceil(block).to_string(),
        }
    }
}

/// The counts of some entries.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug, Serialize)]
pub struct Count {
    pub entries: u64,
    pub bytes: u64,
    pub allocated_bytes: u64,
}

impl Count {
    fn add(&mut self, size: u64, allocated: u64) {
        self.entries += 1;
        self.bytes += size;
        self.allocated_bytes += allocated;
    }
}

/// All counts.
#[derive(Default, Debug)]
pub struct Tally {
    pub online: u64,
    pub offline: u64,
    pub directories: u64,
    pub files: Count,
    pub symlinks: Count,
    pub special: Count,
    pub inline: Count,
    pub offline_bytes: u64,
    pub wasted_bytes: u64,
    pub biggest: Option<FileFacts>,
    /// Files by size: class n ends at 16^(n + 2) bytes; the first is of empty ones.
    pub histogram: [Count; CLASSES + 1],
    pub by_user: BTreeMap<u32, Count>,
    /// The entries directly in a directory.
    by_directory: HashMap<InodeId, Count>,
}

impl Tally {
    pub fn entries(&self) -> u64 {
        self.files.entries + self.directories + self.symlinks.entries + self.special.entries
    }
    fn size(&self) -> u64 {
        self.files.bytes + self.symlinks.bytes
    }

    fn add_directory(&mut self, directory: &DirectoryFacts) {
        self.directories += 1;
        self.online += 1;
        self.by_user.entry(directory.uid).or_default().entries += 1;
    }

    fn add(&mut self, file: &FileFacts, online_only: bool) {
        let offline = file.kind == FileKind::Regular && file.size > 0 && file.evicted >= file.size;
        if online_only && file.kind == FileKind::Regular && (offline || file.allocated == 0) {
            return;
        }
        *(if offline { &mut self.offline } else { &mut self.online }) += 1;
        self.by_user.entry(file.uid).or_default().add(file.size, file.allocated);
        self.by_directory.entry(file.parent).or_default().add(file.size, file.allocated);
        match file.kind {
            FileKind::Regular => self.add_regular(file),
            FileKind::Symlink => self.symlinks.add(file.size, file.allocated),
            _ => self.special.add(0, 0),
        }
    }

    fn add_regular(&mut self, file: &FileFacts) {
        self.files.add(file.size, file.allocated);
        self.histogram[class_of(file.size)].add(file.size, file.allocated);
        self.offline_bytes += file.evicted.min(file.size);
        if file.inline {
            self.inline.add(file.size, file.allocated);
        } else {
            self.wasted_bytes += file.allocated.next_multiple_of(BLOCK_BYTES) - file.allocated;
        }
        if self.biggest.as_ref().is_none_or(|b| b.size < file.size) {
            self.biggest = Some(file.clone());
        }
    }

    /// The fullest directories, the fullest first.
    fn top_directories(&self) -> Vec<(InodeId, Count)> {
        let mut all: Vec<(InodeId, Count)> = self.by_directory.iter().map(|(d, c)| (*d, *c)).collect();
        all.sort_unstable_by_key(|(dir, count)| (std::cmp::Reverse(count.bytes), *dir));
        all.truncate(TOP);
        all
    }
    fn top_users(&self) -> Vec<(u32, Count)> {
        let mut all: Vec<(u32, Count)> = self.by_user.iter().map(|(u, c)| (*u, *c)).collect();
        all.sort_by_key(|(_, count)| std::cmp::Reverse(count.bytes));
        all
    }
}

fn class_of(size: u64) -> usize {
    let ends = (0..CLASSES).map(|n| 16u64.pow(n as u32 + 2));
    if size == 0 { 0 } else { (1 + ends.take_while(|end| size > *end).count()).min(CLASSES) }
}
fn class_name(class: usize) -> String {
    match class {
        0 => "empty".into(),
        CLASSES => format!("more than {}", table::bytes(16u64.pow(CLASSES as u32))),
        n => format!("up to {}", table::bytes(16u64.pow(n as u32 + 1))),
    }
}
fn average(sum: u64, count: u64) -> u64 {
    sum.checked_div(count).unwrap_or(0)
}

/// A tally with the data for later questions.
struct Whole {
    of: String,
    tally: Tally,
    file_system_bytes: u64,
    biggest_path: Option<String>,
    directories: Vec<(String, Count)>,
    online_only: bool,
    /// Backups that need an administrator.
    complaints: Vec<String>,
}

pub fn report(args: &Report) -> Outcome<()> {
    let coordinators = coordinators(&args.cluster)?;
    let whole = observe::block_on(async {
        let client = connect(coordinators, &args.namespace).await?;
        let whole = collect(&client, args).await;
        client.shutdown().await?;
        whole
    })?;
    let text = match args.cluster.json {
        true => format!("{:#}\n", whole.as_json()),
        false => whole.as_text(args.block_size),
    };
    match &args.output {
        Some(file) => std::fs::write(file, text).doing(format_args!("write {}", file.display())),
        None => {
            print!("{text}");
            Ok(())
        }
    }
}

async fn collect(client: &Client, args: &Report) -> Outcome<Whole> {
    let cred = own_cred();
    let (volume, top) = match args.what.as_deref() {
        None => (VolumeId(0), InodeId::ROOT),
        Some(path) if path.starts_with('/') => {
            let found = client.find_path(&cred, path.as_bytes()).await?.attr;
            if found.kind != FileKind::Directory {
                return Err(Error::name(
                    weir_proto::NameRule::NotDirectory,
                    format!("{path} is not a directory"),
                )
                .into());
            }
            (VolumeId(0), found.ino)
        }
        Some(name) => {
            let volume = named(client, name).await?;
            (volume.id, volume.root)
        }
    };
    let (tally, parents) = count(client, &cred, volume, top, args.online_only).await?;
    let mut names = Names { client, parents: &parents, known: HashMap::new() };
    let mut directories = Vec::new();
    for (dir, count) in tally.top_directories() {
        let name = names.path(dir).await.or_else(|failure| unnamed(dir, failure))?;
        directories.push((name, count));
    }
    let biggest_path = match &tally.biggest {
        Some(file) => {
            let found = names.entry(file.parent, file.ino).await;
            Some(found.or_else(|failure| unnamed(file.ino, failure))?)
        }
        None => None,
    };
    let of = args.what.clone().unwrap_or_else(|| "everything".into());
    let file_system_bytes = client.statfs_at(top).await?.capacity_bytes;
    let online_only = args.online_only;
    let places = client.backups((volume != VolumeId(0)).then_some(volume)).await?;
    let complaints = places.iter().filter_map(weir_diagnose::backups::complaint).collect();
    Ok(Whole { of, tally, file_system_bytes, biggest_path, directories, online_only, complaints })
}

/// Users who ask through a mount's socket list no directories there: `find -inum` finds the name.
fn unnamed(ino: InodeId, failure: Failure) -> Outcome<String> {
    match failure.kind() {
        ErrorKind::Denied => Ok(format!("inode {}", ino.0)),
        _ => Err(failure),
    }
}

/// Counts all in `volume` (0: in all) that lies below `top`, itself not counted; returns the parent of each
/// directory.
async fn count(
    client: &Client,
    cred: &Cred,
    volume: VolumeId,
    top: InodeId,
    online_only: bool,
) -> Outcome<(Tally, HashMap<InodeId, InodeId>)> {
    let (mut tally, mut all) = (Tally::default(), Vec::new());
    let mut after = InodeId(0);
    loop {
        let Scanned { directories, last, end, .. } = client.scan_inodes(cred, volume, true, after).await?;
        all.extend(directories);
        after = last;
        if end {
            break;
        }
    }
    let parents: HashMap<InodeId, InodeId> = all.iter().map(|d| (d.ino, d.parent)).collect();
    let mut inside = Inside { parents: &parents, top, known: HashMap::new() };
    all.iter().filter(|d| d.ino != top && inside.has(d.ino)).for_each(|d| tally.add_directory(d));
    let mut after = InodeId(0);
    loop {
        let Scanned { files, last, end, .. } = client.scan_inodes(cred, volume, false, after).await?;
        files.iter().filter(|f| inside.has(f.parent)).for_each(|f| tally.add(f, online_only));
        after = last;
        if end {
            break;
        }
    }
    Ok((tally, parents))
}

/// Directories that lie below a given one.
struct Inside<'a> {
    parents: &'a HashMap<InodeId, InodeId>,
    top: InodeId,
    known: HashMap<InodeId, bool>,
}

impl Inside<'_> {
    fn has(&mut self, dir: InodeId) -> bool {
        let (mut at, mut way) = (dir, Vec::new());
        let inside = loop {
            if at == self.top {
                break true;
            }
            if let Some(known) = self.known.get(&at) {
                break *known;
            }
            way.push(at);
            match self.parents.get(&at) {
                // A loop is impossible; a directory that moves while it is read may look like one.
                Some(parent) if *parent != at && way.len() <= self.parents.len() => at = *parent,
                _ => break false,
            }
        };
        self.known.extend(way.into_iter().map(|dir| (dir, inside)));
        inside
    }
}

/// Paths of a few directories, found by listing their parents.
struct Names<'a> {
    client: &'a Client,
    parents: &'a HashMap<InodeId, InodeId>,
    known: HashMap<InodeId, String>,
}

/// Entries per request.
const LISTED: u32 = 4096;

impl Names<'_> {
    async fn path(&mut self, dir: InodeId) -> Outcome<String> {
        let (mut at, mut names) = (dir, Vec::new());
        while at != InodeId::ROOT {
            if let Some(known) = self.known.get(&at) {
                names.push(known.clone());
                break;
            }
            let parent = match self.parents.get(&at) {
                Some(parent) => *parent,
                // The directories above a volume were not requested.
                None => return Ok(format!("…/{}", joined(names).trim_start_matches('/'))),
            };
            names.push(self.name_in(parent, at).await?);
            at = parent;
        }
        let path = joined(names);
        self.known.insert(dir, path.clone());
        Ok(if path.is_empty() { "/".into() } else { path })
    }
    async fn entry(&mut self, dir: InodeId, ino: InodeId) -> Outcome<String> {
        let above = self.path(dir).await?;
        Ok(format!("{}/{}", above.trim_end_matches('/'), self.name_in(dir, ino).await?))
    }
    async fn name_in(&self, dir: InodeId, ino: InodeId) -> Outcome<String> {
        // The right to a report was checked with the scan.
        let root = Cred { uid: 0, gid: 0, groups: vec![0] };
        let mut after = 0;
        loop {
            let listing = self.client.readdir(&root, dir, after, LISTED, false).await?;
            if let Some(found) = listing.entries.iter().find(|e| e.ino == ino) {
                return Ok(String::from_utf8_lossy(&found.name).into_owned());
            }
            match listing.entries.last() {
                Some(last) if !listing.end => after = last.cookie,
                _ => return Ok(format!("inode {ino}")), // moved since it was counted
            }
        }
    }
}

/// Names from the last to the first.
fn joined(names: Vec<String>) -> String {
    names.into_iter().rev().map(|n| if n.starts_with('/') { n } else { format!("/{n}") }).collect()
}

impl Whole {
    fn as_text(&self, block: BlockSize) -> String {
        let (t, show) = (&self.tally, |n| block.show(n));
        let biggest = t.biggest.as_ref().map_or(0, |b| b.size);
        let mut rows = vec![
            ("entries", t.entries().to_string()),
            ("  online", t.online.to_string()),
            ("  offline", t.offline.to_string()),
            ("files", t.files.entries.to_string()),
            ("  held inline", t.inline.entries.to_string()),
            ("directories", t.directories.to_string()),
            ("symbolic links", t.symlinks.entries.to_string()),
        ];
        if t.special.entries > 0 {
            rows.push(("special files", t.special.entries.to_string()));
        }
        rows.extend([
            ("total size", show(t.size())),
            ("  inline", show(t.inline.bytes)),
            ("  offline", show(t.offline_bytes)),
            ("biggest file", show(biggest)),
            ("  path", self.biggest_path.clone().unwrap_or_else(|| "-".into())),
            ("allocated size", show(t.files.allocated_bytes)),
            ("average size per file", show(average(t.files.bytes, t.files.entries))),
            ("average allocated size per file", show(average(t.files.allocated_bytes, t.files.entries))),
            ("average size per entry (as other reports)", show(average(t.size(), t.entries()))),
            (
                "average allocated size per entry (as other reports)",
                show(average(t.files.allocated_bytes, t.entries())),
            ),
            ("file system size", show(self.file_system_bytes)),
        ]);
        if self.online_only {
            rows.push(("wasted space", show(t.wasted_bytes)));
        }
        let rows: Vec<Vec<String>> =
            rows.into_iter().map(|(key, value)| vec![key.to_owned(), value]).collect();
        let mut out = format!("{}\n", self.of);
        out += table::render(&["", ""], &rows).trim_start_matches('\n');
        let line = |name: String, c: &Count| {
            vec![name, c.entries.to_string(), show(c.bytes), show(c.allocated_bytes)]
        };
        let used = t.histogram.iter().rposition(|c| c.entries > 0).map_or(0, |last| last + 1);
        let classes: Vec<_> =
            t.histogram[..used].iter().enumerate().map(|(n, c)| line(class_name(n), c)).collect();
        out += "\n";
        out += &table::render(&["FILES BY SIZE", "FILES", "SIZE", "ALLOCATED"], &classes);
        let directories: Vec<_> = self.directories.iter().map(|(path, c)| line(path.clone(), c)).collect();
        out += "\n";
        out += &table::render(&["FULLEST DIRECTORIES", "ENTRIES", "SIZE", "ALLOCATED"], &directories);
        let top = t.top_users();
        let names = users::of(top.iter().map(|(user, _)| *user));
        let users: Vec<_> = top.iter().map(|(user, c)| line(names.name(*user), c)).collect();
        out += "\n";
        out += &table::render(&["USER", "ENTRIES", "SIZE", "ALLOCATED"], &users);
        self.complaints.iter().for_each(|complaint| out += &format!("\n{complaint}\n"));
        out
    }

    fn as_json(&self) -> Value {
        let t = &self.tally;
        let classes: Vec<Value> = t
            .histogram
            .iter()
            .enumerate()
            .map(|(n, c)| json!({ "class": class_name(n), "files": c.entries, "bytes": c.bytes, "allocated_bytes": c.allocated_bytes }))
            .collect();
        let directories: Vec<Value> = self
            .directories
            .iter()
            .map(|(path, c)| json!({ "path": path, "entries": c.entries, "bytes": c.bytes, "allocated_bytes": c.allocated_bytes }))
            .collect();
        let users: Vec<Value> = t
            .top_users()
            .iter()
            .map(|(user, c)| json!({ "user": user, "entries": c.entries, "bytes": c.bytes, "allocated_bytes": c.allocated_bytes }))
            .collect();
        json!({
            "of": self.of, "entries": t.entries(), "online": t.online, "offline": t.offline,
            "files": t.files.entries, "files_inline": t.inline.entries, "directories": t.directories,
            "symlinks": t.symlinks.entries, "special_files": t.special.entries,
            "bytes": t.size(), "inline_bytes": t.inline.bytes, "offline_bytes": t.offline_bytes,
            "biggest_file": t.biggest.as_ref().map(|b| json!({ "path": self.biggest_path, "bytes": b.size })),
            "allocated_bytes": t.files.allocated_bytes,
            "average_bytes_per_file": average(t.files.bytes, t.files.entries),
            "average_allocated_bytes_per_file": average(t.files.allocated_bytes, t.files.entries),
            "average_bytes_per_entry": average(t.size(), t.entries()),
            "average_allocated_bytes_per_entry": average(t.files.allocated_bytes, t.entries()),
            "file_system_bytes": self.file_system_bytes,
            "online_only": self.online_only, "backup_complaints": self.complaints, "wasted_bytes": t.wasted_bytes,
            "histogram": classes, "fullest_directories": directories, "users": users,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(kind: FileKind, size: u64, evicted: u64) -> FileFacts {
        let allocated = size - evicted;
        let (ino, parent) = (InodeId(1000 + size), InodeId(1));
        FileFacts { ino, kind, parent, uid: 7, size, allocated, evicted, inline: size == 10 }
    }

    #[test]
    fn sums_agree() {
        let mut t = Tally::default();
        t.add_directory(&DirectoryFacts { ino: InodeId(9), parent: InodeId(1), volume: VolumeId(1), uid: 0 });
        for (kind, size, evicted) in [
            (FileKind::Regular, 0, 0),
            (FileKind::Regular, 10, 0),
            (FileKind::Regular, 10_000, 10_000),
            (FileKind::Regular, 9000, 4096),
            (FileKind::Symlink, 5, 0),
            (FileKind::Fifo, 0, 0),
        ] {
            t.add(&file(kind, size, evicted), false);
        }
        assert_eq!((t.entries(), t.online, t.offline), (7, 6, 1));
        assert_eq!((t.files.entries, t.inline.entries, t.symlinks.entries, t.special.entries), (4, 1, 1, 1));
        assert_eq!((t.size(), t.files.allocated_bytes, t.offline_bytes), (19_015, 10 + 4904, 14_096));
        assert_eq!(t.histogram.iter().map(|c| c.entries).sum::<u64>(), t.files.entries);
        assert_eq!(t.histogram.iter().map(|c| c.bytes).sum::<u64>(), t.files.bytes);
        assert_eq!(t.by_user.values().map(|c| c.entries).sum::<u64>(), t.entries());
        assert_eq!(t.biggest.as_ref().unwrap().size, 10_000);
        // Only those with bytes here: one inline, one in part.
        let mut t = Tally::default();
        for (size, evicted) in [(0, 0), (10, 0), (10_000, 10_000), (9000, 4096)] {
            t.add(&file(FileKind::Regular, size, evicted), true);
        }
        assert_eq!((t.files.entries, t.offline, t.wasted_bytes), (2, 0, 8192 - 4904));
    }

    #[test]
    fn sizes_fall_into_classes() {
        for (size, class) in [(0, 0), (1, 1), (256, 1), (257, 2), (4096, 2), (4097, 3), (u64::MAX, CLASSES)] {
            assert_eq!(class_of(size), class, "{size}");
        }
        assert_eq!((class_name(2).as_str(), class_name(0).as_str()), ("up to 4.00 KiB", "empty"));
        assert_eq!(BlockSize::Bytes(1024).show(1025), "2");
        assert_eq!(parse_block_size("auto"), Ok(BlockSize::Auto));
        assert!(parse_block_size("0").is_err());
    }
}
