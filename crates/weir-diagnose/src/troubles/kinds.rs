//! The kinds of troubles: each code's meaning, severity, cause, end and remedy. `weir status`, `weir why`,
//! `weir events`, the console and `docs/events.md` use this one table.
//!
//! Invariant: a code never changes and never gets another meaning; `troubles` raises no code that is not
//! here. Nodes of a newer release may report others.
use super::word;
use std::cmp::Reverse;
use weir_proto::condition::Severity::{self, Critical, Degraded, Note, Warning};

pub struct Kind {
    pub code: &'static str,
    /// Its usual severity; offline data makes some of them critical.
    pub severity: Severity,
    /// The part of Weir that is affected.
    pub part: &'static str,
    /// How close it is to the cause of a delay, up to 100; 0: it delays nothing, and `weir why` names it
    /// last.
    pub delays: u8,
    pub sentence: &'static str,
    pub raised: &'static str,
    pub cleared: &'static str,
    pub action: &'static str,
}

macro_rules! kinds {
    ($($code:literal $severity:ident $part:literal delays $delays:literal: $sentence:literal
        raised $raised:literal cleared $cleared:literal act $action:literal;)*) => {
        pub const KINDS: &[Kind] = &[$(Kind {
            code: $code, severity: $severity, part: $part, delays: $delays, sentence: $sentence,
            raised: $raised, cleared: $cleared, action: $action,
        }),*];
    };
}

pub fn kind(code: &str) -> Option<&'static Kind> {
    KINDS.iter().find(|kind| kind.code == code)
}

/// The table as a page, the worst of each part first.
pub fn page() -> String {
    let mut page = PAGE_HEAD.to_owned();
    let mut parts: Vec<&str> = Vec::new();
    for kind in KINDS {
        if !parts.contains(&kind.part) {
            parts.push(kind.part);
        }
    }
    for part in parts {
        page += &format!(
            "\n## {part}\n\n| code | severity | what | raised when | cleared when | what to do |\n|---|---|---|---|---|---|\n"
        );
        let mut kinds: Vec<&Kind> = KINDS.iter().filter(|kind| kind.part == part).collect();
        kinds.sort_by_key(|kind| Reverse(kind.severity));
        for Kind { code, severity, sentence, raised, cleared, action, .. } in kinds {
            let severity = word(*severity);
            page += &format!("| `{code}` | {severity} | {sentence} | {raised} | {cleared} | {action} |\n");
        }
    }
    page
}

const PAGE_HEAD: &str = "\
# Events

What `weir status` and `weir events` report. `weir events kinds` prints this page; it is made from the table in the code.
`weir status` exits with 2 if anything is critical, with 1 for what is degraded or a warning, and with 0 for notes.
Troubles of homes and movers are critical where a volume has evicted data.
";

kinds! {
    "namespace-missing" Critical "metadata" delays 100: "There is no namespace yet"
        raised "no metadata server has ever led" cleared "one leads"
        act "start a metadata server";
    "namespace-without-leader" Critical "metadata" delays 100: "A namespace has no active metadata server"
        raised "its leader is down and no other copy can lead" cleared "a server leads it"
        act "start its metadata servers again";
    "namespace-silent" Critical "metadata" delays 95: "The metadata server of a namespace does not answer"
        raised "its leader gave no answer within 1.8 s" cleared "it answers"
        act "see whether its process is stopped or its disk hangs, and its log";
    "namespace-late" Warning "metadata" delays 90: "The metadata server of a namespace answers late"
        raised "its leader gave no answer within 1.8 s, its process lives, and its machine has too much to do" cleared "it answers in time"
        act "wait: calls take longer; `weir top --by job` shows whose work it is";
    "namespace-starting" Warning "metadata" delays 96: "A metadata server has just started, and files of earlier clients wait for these"
        raised "a client of its predecessor has not returned" cleared "all have returned, or one lease term has passed"
        act "wait; it continues by itself";
    "copies-missing" Degraded "metadata" delays 0: "A namespace has fewer copies than it should"
        raised "a copy of its journal is down or behind" cleared "all copies are current"
        act "start the metadata server of that copy again";
    "server-down" Warning "metadata" delays 0: "A server is down and another one does its work"
        raised "it sends no heartbeats" cleared "it returns" act "start it again";
    "metadata-full" Warning "metadata" delays 88: "The disk of a metadata server is nearly full, or full"
        raised "its reserve is used, or little more than that is free; critical if changes wait" cleared "more is free"
        act "remove files, free space there, or move the directory to a larger disk";
    "job-failed" Warning "metadata" delays 0: "A background job of a metadata server fails"
        raised "its last try failed" cleared "a try succeeds" act "follow its message; see the server's log";
    "snapshot-late" Warning "metadata" delays 0: "A scheduled snapshot was not taken"
        raised "it is late, or failed" cleared "one is taken" act "see the log of the metadata server";
    "audit-log-fails" Warning "security" delays 0: "The audit log cannot be written"
        raised "a write of it failed" cleared "records are written again" act "check the disk of its directory";
    "audit-records-lost" Note "security" delays 0: "Records of the audit log were lost"
        raised "more waited than are kept" cleared "the server starts again" act "export audit logs elsewhere in time";
    "groups-lost" Critical "storage" delays 98: "Data is lost"
        raised "more targets than parity tolerates returned without their data" cleared "their disks are put back as they were"
        act "stop these targets and put their disks back; restore the named files from home or a backup";
    "groups-unwritable" Critical "storage" delays 94: "Too few targets of placement groups are usable"
        raised "fewer than K members of a group are current" cleared "enough members are current"
        act "start the storage nodes of these targets again";
    "storage-down" Degraded "storage" delays 90: "A storage node is down"
        raised "it sends no heartbeats, or does not answer" cleared "it returns; its targets are then repaired"
        act "start it again; if its disk is lost, `weir target replace`";
    "target-failed" Degraded "storage" delays 91: "A target failed with a disk error"
        raised "a read, write or sync of its disk failed" cleared "`weir target clear` or `weir target replace`"
        act "repair the disk, restart the process, then clear the target; or give it a new disk";
    "target-down" Degraded "storage" delays 89: "A target is down although its process is up"
        raised "its node does not report it" cleared "it is reported" act "see to its disk and the log of its process";
    "target-missing" Degraded "storage" delays 0: "A target is up and still missing from placement groups"
        raised "it returned, and groups have not taken it back" cleared "repair begins" act "wait; it continues by itself";
    "target-behind" Degraded "storage" delays 0: "A target is being repaired"
        raised "it missed writes, or has a new disk" cleared "it has all its data" act "wait; `weir rebuild --watch`";
    "target-stalled" Warning "storage" delays 92: "The disk of a target completes nothing"
        raised "requests wait and none has completed for a while" cleared "a request completes"
        act "check that disk (`dmesg`, `smartctl`)";
    "target-slow" Warning "storage" delays 84: "A target answers much later than usual"
        raised "answers take half a second and ten times as long as usual, or three seconds, and its disk or machine has too much to do"
        cleared "they take less for ten seconds" act "see to its disk and the load of its machine";
    "disk-slow" Warning "storage" delays 85: "The disk of a target is slow"
        raised "its oldest request is late while its machine has processors and memory, or it answers ten times later than the others"
        cleared "it answers as the others do" act "check that disk (`dmesg`, `smartctl`), or drain the target";
    "target-full" Warning "storage" delays 79: "A target is nearly full"
        raised "95 % of it are used" cleared "less is used" act "delete or evict files, or add targets";
    "target-refuses" Warning "storage" delays 80: "A target refuses new data"
        raised "it has no room for a cell: its file system is nearly full, or gives it no more" cleared "it has room"
        act "delete or evict files, free space on its file system, or add targets";
    "space-full" Warning "storage" delays 81: "Files take no more data"
        raised "in each placement group of a scheme in use a target is full" cleared "some group has room in all its targets"
        act "delete or evict files, or add targets; `weir target list` shows which are full";
    "cells-lack-redundancy" Degraded "storage" delays 0: "Cells lack redundancy"
        raised "a write went without a member" cleared "they are repaired" act "wait; it continues by itself";
    "blocks-repaired" Note "storage" delays 0: "Blocks failed their checksum and were repaired"
        raised "a read or the scrub found damage" cleared "the process starts again" act "watch that disk";
    "blocks-damaged" Degraded "storage" delays 0: "Blocks failed their checksum"
        raised "a read or the scrub found damage" cleared "they are repaired" act "replace the disk if it continues";
    "rebuild-waits" Degraded "storage" delays 0: "A lost target is not replaced"
        raised "no other target can take its place" cleared "one can" act "add a target, or `weir target replace`";
    "drain-waits" Warning "storage" delays 0: "A target that is drained still serves its data, and cannot hand it over"
        raised "no other target can take its places" cleared "one can, or the drain ends"
        act "leave its disk as it is; add a target, or `weir target undrain`";
    "target-unneeded" Note "storage" delays 0: "Other targets have all data of one that was given up"
        raised "its last place was filled elsewhere" cleared "it is removed or used again" act "`weir target remove`";
    "link-cut" Warning "network" delays 86: "A node does not reach another one"
        raised "its calls there have failed for a while" cleared "one gets through" act "see to the network between them";
    "clock-off" Warning "network" delays 5: "The clock of a node is wrong"
        raised "it differs from the coordinator's by more than a second" cleared "it agrees" act "see to its time service";
    "disk-full" Warning "servers" delays 60: "The disk of a server's directory is nearly full"
        raised "95 % are used, and less than 2 GiB are free" cleared "more is free"
        act "free space there, or move the directory to a larger disk";
    "etcd-member-silent" Warning "servers" delays 0: "A member of etcd does not answer"
        raised "the coordinator asked it in vain" cleared "it answers" act "start it again";
    "etcd-full" Degraded "servers" delays 35: "The store etcd has no space: the cluster map cannot change"
        raised "a member of etcd has the alarm NOSPACE" cleared "the alarm is disarmed"
        act "`etcdctl compact`, `etcdctl defrag`, then `etcdctl alarm disarm`";
    "standby-missing" Warning "servers" delays 0: "A standby coordinator is away"
        raised "it has not reported to the store for 20 s" cleared "it reports again, or seven days have passed"
        act "start it again on its machine";
    "standby-down" Warning "servers" delays 0: "A standby coordinator or member of etcd does not run"
        raised "its process has ended" cleared "it runs" act "start it again";
    "console-down" Warning "servers" delays 0: "The console does not run"
        raised "its process has ended" cleared "it runs" act "start it again";
    "unanswered" Warning "servers" delays 50: "The coordinator left a question unanswered"
        raised "no answer within 1.8 s" cleared "it answers" act "ask again; if it stays so, see its log";
    "overloaded" Warning "cluster" delays 94: "There is more work than the machines can do: calls take longer, and nothing is lost"
        raised "half of the targets or more have answered much later than usual for three seconds"
        cleared "they answer as usual for ten seconds" act "wait; `weir top --by job` shows whose work it is";
    "versions-mixed" Note "cluster" delays 2: "Programs of several releases run"
        raised "nodes report different releases" cleared "all report the same" act "upgrade the others, then `weir upgrade finish`";
    "upgrade-unfinished" Note "cluster" delays 0: "The cluster does not use what its programs know"
        raised "its level is below that of the programs" cleared "`weir upgrade finish`"
        act "run `weir upgrade finish` if all nodes are upgraded";
    "certificate-ends" Warning "security" delays 5: "A certificate ends soon and was not renewed"
        raised "seven days are left; renewal begins at ten" cleared "it is renewed" act "start the node, or see its log";
    "certificate-ended" Warning "security" delays 30: "A certificate has ended"
        raised "its end has passed" cleared "the node joins again, or is removed" act "remove the node, or let it join again";
    "volume-full" Warning "volumes" delays 75: "A volume is at or near its limit"
        raised "95 % of the limit are used, or the soft limit is exceeded" cleared "less is used, or the limit is raised"
        act "delete files, or `weir volume quota`";
    "volume-below-floor" Critical "volumes" delays 95: "A volume takes no writes in some placement groups"
        raised "a group has fewer current members than the volume's write floor" cleared "enough are current, or the floor is lowered"
        act "bring the missing targets back, or `weir volume policy --write-floor`";
    "owner-full" Note "volumes" delays 4: "A user or a group is at or near its limit"
        raised "95 % of a limit of it are used, or the grace of its soft limit has ended"
        cleared "less is used, or the limit is raised" act "delete files of it, or `weir volume quota`";
    "backup-bad" Warning "volumes" delays 0: "A backup is late, failed, or incomplete"
        raised "the last one failed or is overdue" cleared "one succeeds" act "`weir volume show` has its backups";
    "backup-place-missing" Warning "volumes" delays 0: "The directory for backups is missing"
        raised "it does not exist" cleared "it exists" act "make or mount it";
    "export-failed" Warning "volumes" delays 0: "The metadata was not exported"
        raised "the last export failed" cleared "one succeeds" act "see to its directory on the metadata machine";
    "export-late" Warning "volumes" delays 0: "An export of the metadata is overdue"
        raised "twice the interval has passed" cleared "one is made" act "`weir namespace exports` shows the schedule";
    "home-missing" Warning "homes" delays 78: "The home of a volume is missing"
        raised "its directory does not exist" cleared "it exists" act "make or mount it";
    "home-silent" Warning "homes" delays 78: "The home of a volume does not answer"
        raised "its file system gave no answer within 1.8 s, or a mover's call there for 30 s" cleared "it answers"
        act "see to its server, or to the file system that it is on";
    "home-refused" Warning "homes" delays 78: "The home of a volume cannot be used"
        raised "a mover's last call there failed" cleared "a call succeeds" act "see to the home; the mover tries again by itself";
    "home-conflicts" Warning "homes" delays 0: "Files are in conflict with their home"
        raised "home was changed by others" cleared "each is decided" act "`weir relation show` lists them";
    "home-lags" Warning "homes" delays 20: "A home is far behind"
        raised "the oldest change is 15 minutes old" cleared "it catches up" act "`weir relation show` has the reason";
    "relation-paused" Warning "homes" delays 40: "Copying is paused"
        raised "an administrator or a limit paused it" cleared "`weir relation resume`" act "`weir relation resume`";
    "mover-down" Warning "homes" delays 77: "A mover does not run"
        raised "its process has ended" cleared "it runs" act "start it again";
    "mover-missing" Warning "homes" delays 76: "No mover runs"
        raised "a volume has a home and no mover works for it" cleared "one works" act "start one: `weir mover`";
    "mover-silent" Warning "homes" delays 77: "A mover reports nothing"
        raised "20 s without a report" cleared "it reports" act "see whether its process is stopped";
    "mover-unconnected" Warning "homes" delays 70: "A mover does not reach the metadata server"
        raised "it has tried for 30 s" cleared "it gets through" act "see whether the metadata server runs";
    "client-waits" Degraded "clients" delays 45: "Calls of a client wait for servers"
        raised "they have had no answer for a while" cleared "they are answered" act "see to the servers that are named";
    "client-silent" Warning "clients" delays 30: "A client with unsaved changes is silent"
        raised "30 s without a word" cleared "it returns, or its files are taken over" act "see whether its machine is up";
    "mount-dead" Warning "clients" delays 85: "A mount is dead"
        raised "its process has ended" cleared "it is mounted again, or cleaned up" act "`weir unmount` cleans it up";
    "mount-silent" Warning "clients" delays 66: "A mount does not answer"
        raised "no answer within 1.8 s, or no report for 20 s" cleared "it answers" act "see whether its process is stopped, and its log";
    "mount-missing" Warning "clients" delays 85: "A mount is missing"
        raised "`weir up` made it and it is not mounted" cleared "it is mounted" act "mount it again";
    "data-lost" Critical "clients" delays 10: "A mount lost changes or locks"
        raised "it could not save what programs had written" cleared "it is mounted again"
        act "inform the users of these files, then mount it again";
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_of_events_is_that_of_the_table() {
        let kept = include_str!("../../../../docs/events.md");
        assert!(kept == page(), "write it anew: `weir events kinds > docs/events.md`");
    }

    #[test]
    fn codes_are_unique_words_and_texts_are_whole() {
        for (at, kind) in KINDS.iter().enumerate() {
            assert!(kind.code.chars().all(|c| c == '-' || c.is_ascii_lowercase()), "{}", kind.code);
            assert!(KINDS[..at].iter().all(|other| other.code != kind.code), "{} is there twice", kind.code);
            assert!(kind.delays <= 100 && kind.sentence.starts_with(char::is_uppercase), "{}", kind.code);
            let texts = [kind.part, kind.raised, kind.cleared, kind.action];
            assert!(texts.iter().all(|text| !text.is_empty() && !text.ends_with('.')), "{}", kind.code);
        }
    }
}
