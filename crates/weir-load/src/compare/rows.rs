//! The rows of a comparison, with their names.

use super::Options;
use super::scene::{DETECTOR_BYTES, RDWR_IO_BYTES, RECORD_BYTES, SMALL_BYTES};
use clap::ValueEnum;
use serde::Serialize;

/// In the order in which they are measured: later rows use what earlier ones wrote.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Serialize, ValueEnum)]
#[serde(rename_all = "kebab-case")]
pub enum RowName {
    /// One file, 1 MiB writes, fsync at the end
    StreamWrite,
    /// Small random reads of it, cold
    RandomCold,
    /// That file in order, 1 MiB reads, cold
    ColdRead,
    /// Repeated small random reads of it, warm
    RandomWarm,
    /// Repeated small random reads through a file that is opened for reading and writing
    RandomRdwr,
    /// Interleaved records of several writers in one file that each opens for reading and writing
    SharedWrite,
    /// Each reads what its neighbour wrote there, cold
    SharedRead,
    /// One file in order, opened for reading and writing
    RdwrWrite,
    /// A small write in place and fdatasync
    SyncWrite,
    /// Several write files as a detector does, each with fsync
    Detector,
    /// Empty files by absolute path, five directories deep
    Create,
    /// Small files: create, write, close
    SmallWrite,
    /// stat of these by path
    SmallStat,
    /// open, read and close of these, cold
    SmallRead,
    /// `ls -l` of the empty files
    LsFirst,
    /// `ls -l` again
    LsAgain,
    /// Walk of all files with stat
    Find,
    /// `rm -rf` of all files
    Remove,
}

impl RowName {
    pub fn name(self) -> &'static str {
        match self {
            RowName::StreamWrite => "stream-write",
            RowName::ColdRead => "cold-read",
            RowName::RandomCold => "random-cold",
            RowName::RandomWarm => "random-warm",
            RowName::RandomRdwr => "random-rdwr",
            RowName::SharedWrite => "shared-write",
            RowName::SharedRead => "shared-read",
            RowName::RdwrWrite => "rdwr-write",
            RowName::SyncWrite => "sync-write",
            RowName::Detector => "detector",
            RowName::Create => "create",
            RowName::SmallWrite => "small-write",
            RowName::SmallStat => "small-stat",
            RowName::SmallRead => "small-read",
            RowName::LsFirst => "ls-first",
            RowName::LsAgain => "ls-again",
            RowName::Find => "find",
            RowName::Remove => "remove",
        }
    }

    pub fn unit(self) -> &'static str {
        match self {
            RowName::StreamWrite
            | RowName::ColdRead
            | RowName::SharedWrite
            | RowName::SharedRead
            | RowName::RdwrWrite
            | RowName::Detector => "MiB/s",
            _ => "1/s",
        }
    }

    pub fn is_cold(self) -> bool {
        matches!(self, RowName::ColdRead | RowName::RandomCold | RowName::SharedRead | RowName::SmallRead)
    }

    /// A description for the table.
    pub fn what(self, o: &Options) -> String {
        let (mib, jobs) = (o.size >> 20, o.jobs);
        match self {
            RowName::StreamWrite => format!("{mib} MiB in writes of 1 MiB, with the fsync at the end"),
            RowName::ColdRead => "the same file in reads of 1 MiB, compared".into(),
            RowName::RandomCold => format!("{} reads of 4 KiB at random places of it", o.ops),
            RowName::RandomWarm => "the same places again and again".into(),
            RowName::RandomRdwr => "the same places again and again, through a file opened O_RDWR".into(),
            RowName::SharedWrite => format!(
                "{jobs} writers, records of {RECORD_BYTES} bytes in turns, one file opened O_RDWR by each, with fsync (IOR-hard)"
            ),
            RowName::SharedRead => "each reads its neighbour's records, compared".into(),
            RowName::RdwrWrite => format!(
                "{mib} MiB in writes of {} KiB, opened O_RDWR as by fio, with the fsync at the end",
                RDWR_IO_BYTES >> 10
            ),
            RowName::SyncWrite => format!("{} times 4 KiB in place and fdatasync", o.ops),
            RowName::Detector => format!("{jobs} writers, files of {DETECTOR_BYTES} bytes, each with fsync"),
            RowName::Create => {
                format!("create and close of {} empty files by path, five directories deep", o.files)
            }
            RowName::SmallWrite => format!("create, write, close of {} files of {SMALL_BYTES} bytes", o.ops),
            RowName::SmallStat => "stat of these by path, again and again".into(),
            RowName::SmallRead => "open, read, close of these, compared".into(),
            RowName::LsFirst => format!(
                "entries of {} listed with lstat and the two getxattr of `ls -l`, for the first time",
                o.files
            ),
            RowName::LsAgain => "the same again".into(),
            RowName::Find => "entries found by a walk with stat, as of `find -size`".into(),
            RowName::Remove => "entries removed by `rm -rf`".into(),
        }
    }

    fn needs_stream(self) -> bool {
        matches!(
            self,
            RowName::StreamWrite
                | RowName::ColdRead
                | RowName::RandomCold
                | RowName::RandomWarm
                | RowName::RandomRdwr
        )
    }
}

/// Bytes of a block that even an empty file may use.
const FILE_BYTES: u64 = 8 << 10;

/// The space that one directory must have free, in bytes. The rows' files do not all exist at once; this
/// counts as if they did.
pub(super) fn space(o: &Options, rows: &[RowName]) -> u64 {
    let any = |of: &[RowName]| rows.iter().any(|row| of.contains(row));
    let one = |wanted: bool, bytes: u64| if wanted { bytes } else { 0 };
    let names = any(&[RowName::Create, RowName::LsFirst, RowName::LsAgain, RowName::Find, RowName::Remove]);
    let small = any(&[RowName::SmallWrite, RowName::SmallStat, RowName::SmallRead]);
    let detector = (o.size / 2).max(u64::from(o.jobs) * DETECTOR_BYTES);
    one(rows.iter().any(|row| row.needs_stream()), o.size)
        + one(any(&[RowName::SharedWrite, RowName::SharedRead]), o.size / 2)
        + one(any(&[RowName::RdwrWrite]), o.size)
        + one(any(&[RowName::Detector]), detector)
        + one(any(&[RowName::SyncWrite]), super::scene::SYNC_FILE_BYTES)
        + one(names, o.files.saturating_mul(FILE_BYTES))
        + one(small, o.ops.saturating_mul(FILE_BYTES))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_the_command_line() {
        for row in RowName::value_variants() {
            assert_eq!(row.to_possible_value().unwrap().get_name(), row.name());
            assert_eq!(serde_json::to_value(row).unwrap(), row.name());
        }
    }

    #[test]
    fn space_is_counted_for_what_is_measured() {
        let o = Options { size: 1 << 20, files: 10, ops: 10, ..Options::of(vec![]) };
        assert_eq!(space(&o, &[RowName::ColdRead, RowName::StreamWrite]), 1 << 20);
        assert_eq!(space(&o, &[RowName::Find]), 10 * FILE_BYTES);
        assert_eq!(space(&o, &[]), 0);
    }
}
