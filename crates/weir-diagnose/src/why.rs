//! The reasons of a delay, from the evidence: a pure function. The cause comes first, then its way to the
//! program.
//!
//! Causes that `weir status` knows are its troubles, ranked by their closeness to the cause in the table of
//! kinds; a new one is a trouble first. Here waits, silent processes, locks and hogs are added. Each sentence
//! has its number; each cause has a remedy.
use crate::evidence::{Evidence, Silent};
use crate::quantity::{self, time};
use crate::troubles::{Trouble, kind, owners};
use crate::waits::{Seen, object};
use crate::work::{By, Names, TopLine, lines_of};
use std::collections::BTreeMap;
use weir_coord::Collected;
use weir_proto::condition::Severity;
use weir_proto::map::{Group, Role};
use weir_proto::quota::{ALL_VOLUMES, Holder, OwnerKind, OwnerUsage};
use weir_proto::watch::Top;

/// Troubles that nodes of a newer release report may cause delays.
const DELAYS_UNKNOWN: u8 = 30;
/// Troubles below it are named, and explain no delay.
const DELAYS_AT_ALL: u8 = 10;
/// For a file, causes that are farther from it are omitted.
const DELAYS_A_FILE: u8 = 30;
/// A limit delays only the files of its user or group, and these as much as the volume's.
const DELAYS_OWN_FILES: u8 = 75;
/// A user with this share of all work, and this average number of requests in flight, disturbs others.
const HOG_SHARE: f64 = 0.6;
const HOG_WAITING: f64 = 0.5;
/// A mount that makes or removes this number of names in a second, with this share of all requests, does,
/// too.
const HOG_CHANGES_PER_S: f64 = 100.0;
const CHANGES: [&str; 7] = ["UNLINK", "RMDIR", "CREATE", "MKDIR", "MKNOD", "RENAME", "SYMLINK"];
/// An ended wait is of interest if it lasted this long.
const LONG_WAIT_US: u64 = 1_000_000;
const ENDED_MAX: usize = 5;

/// One link of the chain.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Finding {
    /// How close it is to the cause: the closest first, among those of one severity.
    pub depth: u8,
    /// That of the trouble; a note for waits, which only show the way to the program.
    pub severity: Severity,
    pub text: String,
    /// Empty: another one has the remedy.
    pub action: String,
}

fn finding(depth: u8, text: String, action: impl Into<String>) -> Finding {
    Finding { depth, severity: Severity::Note, text, action: action.into() }
}

/// The chain from the cause to the program. `threads`: of the process in question; none: any.
pub fn findings(evidence: &Evidence, threads: &[u32]) -> Vec<Finding> {
    let mut found: Vec<Finding> =
        evidence.troubles.iter().filter_map(|trouble| of_trouble(evidence, trouble)).collect();
    found.extend(evidence.silent.iter().filter(|silent| matters(evidence, silent)).map(of_silent));
    waits(evidence, threads, &mut found);
    waits_of_mount(evidence, &mut found);
    locks(evidence, &mut found);
    hog(evidence, &mut found);
    // What delays nothing comes last, however bad it is.
    found.sort_by_key(|f| std::cmp::Reverse((f.depth >= DELAYS_AT_ALL, f.severity, f.depth)));
    found
}

/// Waits of the last hour, for a question about the past.
pub fn ended_waits(evidence: &Evidence) -> Vec<String> {
    let about = |seen: &&Seen| {
        let wait = &seen.wait;
        let is_of_file =
            evidence.file.as_ref().is_none_or(|f| wait.object == "inode" && wait.object_id == f.inode);
        wait.ended_ms > 0 && wait.lasted_us >= LONG_WAIT_US && is_of_file
    };
    let mut longest: Vec<&Seen> = evidence.waits.iter().filter(about).collect();
    longest.sort_by_key(|seen| std::cmp::Reverse(seen.wait.lasted_us));
    let text = |seen: &&Seen| {
        let ago = time(seen.wait.ended_ms * 1000);
        format!("{} ago: {}", ago, sentence(evidence, seen, 1))
    };
    longest.iter().take(ENDED_MAX).map(text).collect()
}

/// A trouble of the whole cluster, or of the file in question.
fn of_trouble(evidence: &Evidence, trouble: &Trouble) -> Option<Finding> {
    let depth = match (trouble.code.as_str(), &evidence.file) {
        (owners::CODE, Some(_)) => DELAYS_OWN_FILES,
        (code, _) => kind(code).map_or(DELAYS_UNKNOWN, |kind| kind.delays),
    };
    let concerns = match &evidence.file {
        None => true,
        Some(_) => depth >= DELAYS_A_FILE && concerns_file(evidence, trouble),
    };
    // The waits themselves are listed, with their programs.
    let is_wait = trouble.code == "client-waits";
    let more = recall_of(evidence, trouble);
    let found = || finding(depth, format!("{}{more}", trouble.text), trouble.action.clone());
    (concerns && !is_wait).then(|| Finding { severity: trouble.severity, ..found() })
}

/// Whether a file depends on the object of the trouble.
fn concerns_file(evidence: &Evidence, trouble: &Trouble) -> bool {
    let (Some(file), map) = (&evidence.file, &evidence.facts.status.map) else { return true };
    let on = |target: u32| file.targets.is_empty() || file.targets.contains(&target);
    let is_of_volume = |volume: &str| evidence.volumes_of_file.iter().any(|name| name == volume);
    let relations = || {
        let known = evidence.facts.namespaces.iter().filter_map(|n| n.known.as_ref().ok());
        known.flat_map(|k| &k.relations)
    };
    match kind(&trouble.code).map_or("", |kind| kind.part) {
        "storage" if trouble.code.starts_with("groups-") => {
            let bad =
                |g: &&Group| !g.is_writable() && (file.groups.is_empty() || file.groups.contains(&g.id.0));
            map.groups.iter().any(|g| bad(&g))
        }
        "storage" => {
            let is_it = |t: &&weir_proto::map::Target| {
                t.id.to_string() == trouble.about || map.node(t.node).is_some_and(|n| n.name == trouble.about)
            };
            map.targets.iter().filter(is_it).any(|t| on(t.id.0))
        }
        "volumes" if trouble.code == owners::CODE => {
            let is_of_file = |row: &&OwnerUsage| {
                let Holder { volume, kind, id } = row.holder;
                let is_there = volume == ALL_VOLUMES || is_of_volume(&row.volume_name);
                let of = file.owner.map(|(uid, gid)| if kind == OwnerKind::User { uid } else { gid });
                is_there && of == Some(id) && owners::about(row, &evidence.facts.names) == trouble.about
            };
            evidence.facts.owners_near().any(|row| is_of_file(&row))
        }
        "volumes" => is_of_volume(&trouble.about),
        "homes" if trouble.code.starts_with("mover-") => relations().any(|r| is_of_volume(&r.volume_name)),
        "homes" => relations().any(|r| r.id.to_string() == trouble.about && is_of_volume(&r.volume_name)),
        "clients" => evidence.waits.iter().any(|seen| seen.wait.holder.contains(&trouble.about)),
        _ => true,
    }
}

/// The part of the file that cannot be read without the object of the trouble.
fn recall_of(evidence: &Evidence, trouble: &Trouble) -> String {
    let offline = evidence.file.as_ref().map_or(0, |file| file.offline);
    match kind(&trouble.code).is_some_and(|kind| kind.part == "homes") && offline > 0 {
        true => format!("; {} of this file exist only there", quantity::bytes(offline)),
        false => String::new(),
    }
}

/// Mounts matter to others only by their holdings. A cause in the troubles is not repeated.
fn matters(evidence: &Evidence, silent: &Silent) -> bool {
    let is_server = matches!(silent.role, Role::Storage | Role::Meta | Role::Mover);
    let holds = |seen: &Seen| seen.wait.holder.contains(&silent.name);
    let is_known = evidence.troubles.iter().any(|trouble| trouble.about == silent.name);
    !is_known && (is_server || evidence.file.is_none() || evidence.waits.iter().any(holds))
}

/// The user, or else the mount, with most of the work, if that is much, and others wait. One user may disturb
/// itself from another mount.
fn hog(evidence: &Evidence, found: &mut Vec<Finding>) {
    let names = Names { volumes: BTreeMap::new(), users: evidence.users.clone() };
    let lines = |by| lines_of(by, &evidence.tops, &names);
    let (users, mounts) = (lines(By::User), lines(By::Client));
    let action = "`weir top --by job` shows which program; ask that user, or limit it";
    if let Some((first, share)) = most_waiting(&users) {
        let text = format!(
            "user {} has {:.0} % of the work of the last seconds at {}: {:.0} requests/s, {}/s, mostly {}",
            first.name,
            100.0 * share,
            first.client,
            first.requests_per_s,
            quantity::bytes(first.bytes_per_s as u64),
            first.kind
        );
        found.push(finding(25, text, action));
    } else if let Some((first, share)) = most_waiting(&mounts).or_else(|| most_changes(&mounts)) {
        let of_mount: Vec<Collected<Top>> =
            evidence.tops.iter().filter(|top| top.name == first.name).cloned().collect();
        let most = |by| lines_of(by, &of_mount, &names).into_iter().next().map(|line| line.name);
        let program = most(By::Job).filter(|job| job != "-");
        let program = program.map_or_else(String::new, |job| format!("program {job} of "));
        let user = most(By::User).unwrap_or_default();
        let does = match first.kind.as_str() {
            "UNLINK" | "RMDIR" => ", so it removes files",
            "CREATE" | "MKDIR" | "MKNOD" => ", so it makes files",
            _ => "",
        };
        let text = format!(
            "{} has {:.0} % of the work of the last seconds: {:.0} requests/s, {}/s, mostly {}{does}, by {program}user \
             {user}",
            first.name,
            100.0 * share,
            first.requests_per_s,
            quantity::bytes(first.bytes_per_s as u64),
            first.kind
        );
        found.push(finding(25, text, action));
    }
}

/// The line with most of the requests in flight, and its part of them.
fn most_waiting(lines: &[TopLine]) -> Option<(&TopLine, f64)> {
    let all: f64 = lines.iter().map(|line| line.waiting).sum();
    let first = lines.iter().max_by(|a, b| a.waiting.total_cmp(&b.waiting))?;
    let is_much = first.waiting >= HOG_WAITING && first.waiting >= all * HOG_SHARE;
    (lines.len() > 1 && is_much).then(|| (first, first.waiting / all))
}

/// The line with most of the requests, if it changes names: these are short, and load the metadata server.
fn most_changes(lines: &[TopLine]) -> Option<(&TopLine, f64)> {
    let all: f64 = lines.iter().map(|line| line.requests_per_s).sum();
    let first = lines.iter().max_by(|a, b| a.requests_per_s.total_cmp(&b.requests_per_s))?;
    let is_much = first.requests_per_s >= HOG_CHANGES_PER_S && first.requests_per_s >= all * HOG_SHARE;
    let changes = CHANGES.contains(&first.kind.as_str());
    (lines.len() > 1 && is_much && changes).then(|| (first, first.requests_per_s / all))
}

fn of_silent(Silent { name, role, why }: &Silent) -> Finding {
    let (role, depth) = match role {
        Role::Storage => ("storage", 88),
        Role::Meta => ("metadata", 92),
        Role::Mover => ("mover", 70),
        _ => ("mount", 66),
    };
    let text = format!("{name} ({role}) does not answer: {why}");
    let action = format!(
        "check the process of {name}: is it stopped, is its machine overloaded? start it again if need be"
    );
    Finding { severity: Severity::Warning, ..finding(depth, text, action) }
}

/// Waits that last, merged if they wait for the same.
fn waits(evidence: &Evidence, threads: &[u32], found: &mut Vec<Finding>) {
    let mut together: BTreeMap<(String, String, String, String), (Seen, u32)> = BTreeMap::new();
    for seen in
        evidence.waits.iter().filter(|seen| seen.wait.ended_ms == 0 && concerns(evidence, threads, seen))
    {
        let wait = &seen.wait;
        let whom = if wait.holder.is_empty() { &wait.peer } else { &wait.holder };
        let key = (seen.process.clone(), wait.reason.clone(), object(wait), whom.clone());
        together.entry(key).or_insert_with(|| (seen.clone(), 0)).1 += 1;
    }
    for (seen, calls) in together.values() {
        found.push(finding(
            depth_of(&seen.wait.reason),
            sentence(evidence, seen, *calls),
            action(evidence, seen),
        ));
    }
}

/// For users who may not see the waits of all processes: those of the file's mount.
fn waits_of_mount(evidence: &Evidence, found: &mut Vec<Finding>) {
    let Some(file) = evidence.file.as_ref().filter(|_| evidence.is_partial) else { return };
    for (what, ms, calls) in &file.mount_waits {
        let calls = quantity::count(*calls, ["call waits", "calls wait"]);
        let text = format!("at the mount of this file {calls} for {what}, no answer for {}", time(ms * 1000));
        found.push(finding(depth_of("servers"), text, "wait, or ask an administrator to see to it"));
    }
}

fn concerns(evidence: &Evidence, threads: &[u32], seen: &Seen) -> bool {
    let wait = &seen.wait;
    let of_process = threads.is_empty() || wait.pid == 0 || threads.contains(&wait.pid);
    let of_file = evidence.file.as_ref().is_none_or(|file| match wait.object.as_str() {
        "inode" => wait.object_id == file.inode,
        "target" => file.targets.is_empty() || file.targets.contains(&(wait.object_id as u32)),
        "group" => file.groups.is_empty() || file.groups.contains(&(wait.object_id as u32)),
        _ => true,
    });
    of_process && of_file
}

fn depth_of(reason: &str) -> u8 {
    match reason {
        "disk" | "journal" => 88,
        "home" => 76,
        "group" => 74,
        "quota" => 73,
        "lease-recall" | "lock" => 65,
        "parked" | "recall" | "map" | "budget" | "queue" => 55,
        "servers" => 45,
        "answer" | "call-slot" => 35,
        _ => 10,
    }
}

/// `mount-1 has waited 4.2 s for t3's disk (5 calls)`
fn sentence(evidence: &Evidence, seen: &Seen, calls: u32) -> String {
    let wait = &seen.wait;
    let whom = if wait.holder.is_empty() { &wait.peer } else { &wait.holder };
    let (process, lasted, doing) = (&seen.process, time(wait.lasted_us), &wait.action);
    let calls = if calls > 1 { format!(" ({calls} calls)") } else { String::new() };
    let on = match object(wait).as_str() {
        "" => String::new(),
        object => format!(" on {object}"),
    };
    let what = match wait.reason.as_str() {
        "program" => {
            let (pid, user) = (wait.pid, evidence.users.name(wait.uid));
            return format!(
                "{doing}{on} of process {pid} (user {user}) at {process} has waited {lasted}{calls}"
            );
        }
        "answer" => format!("the answer of {whom} to {doing}"),
        "call-slot" => format!("a free slot among its calls to {whom}, for {doing}"),
        "lease-recall" => format!("{whom} to return its lease{on}, for {doing}"),
        "lock" => format!("a lock{on} that another program holds"),
        "parked" => format!("{}{on}, for {doing}", if whom.is_empty() { "another operation" } else { whom }),
        "quota" => format!("space: {whom}"),
        "recall" if whom.is_empty() => format!("bytes{on} that are at home only"),
        "recall" => format!("bytes{on} that are at home only: {whom}"),
        "disk" => format!("the disk of {}", object(wait)),
        "journal" => "its journal's disk".to_owned(),
        "map" => "a newer cluster map".to_owned(),
        "budget" => "memory within its budget".to_owned(),
        "home" if whom.is_empty() => format!("home, to {doing}"),
        "home" => format!("home, to {doing}: {whom}"),
        "servers" => whom.clone(),
        other => format!("{other}{on}"),
    };
    format!("{process} has waited {lasted} for {what}{calls}")
}

fn action(evidence: &Evidence, seen: &Seen) -> String {
    let wait = &seen.wait;
    match wait.reason.as_str() {
        "lease-recall" => format!(
            "check the mount {}: is its process stopped? its lease ends after {} of silence",
            wait.holder,
            time(u64::from(evidence.facts.status.map.settings.lease_ms) * 1000)
        ),
        "disk" => "check that disk (`dmesg`, `smartctl`); `weir iohist` shows how slow it is".to_owned(),
        "journal" => format!("check the disk that {} has its directory on", seen.process),
        "home" => "check that file server or its mount on the mover's machine".to_owned(),
        "lock" => "`weir file locks PATH` names the program that holds it".to_owned(),
        "recall" => "`weir file state PATH` and `weir relation list` show how far it is".to_owned(),
        "budget" => {
            "give the mount more memory (`--memory-mib`), or find out why its targets are slow".to_owned()
        }
        _ => String::new(),
    }
}

fn locks(evidence: &Evidence, found: &mut Vec<Finding>) {
    let Some(file) = &evidence.file else { return };
    let waits = found.iter().any(|f| f.text.contains("a lock"));
    let held = file.locks.iter().filter(|_| waits);
    found.extend(held.map(|lock| finding(68, lock.clone(), "end that program, or wait for it")));
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::evidence::FileFacts;
    use crate::machine::Reach;
    use crate::names::Users;
    use crate::troubles::troubles;
    use crate::troubles::world::{HOME, World, owners as world_owners, world};
    use weir_proto::TargetId;
    use weir_proto::map::{MemberState, TargetState};
    use weir_proto::watch::{TopRow, WaitSeen};

    /// File 7 of volume work, on targets 1 and 2 in group 0, and further evidence.
    #[derive(Default)]
    struct Further {
        waits: Vec<Seen>,
        silent: Vec<Silent>,
        tops: Vec<Collected<Top>>,
    }

    fn file() -> FileFacts {
        FileFacts {
            inode: 7,
            owner: Some((4_294_967_290, 100)),
            groups: vec![0],
            targets: vec![1, 2],
            offline: 0,
            locks: vec![],
            mount_waits: vec![],
        }
    }

    fn evidence(world: World, further: Further, file: Option<FileFacts>) -> Evidence {
        let Further { waits, silent, tops } = further;
        let volumes_of_file = file.iter().map(|_| "work".to_owned()).collect();
        let troubles = troubles(&world);
        Evidence {
            facts: world.0,
            troubles,
            waits,
            silent,
            tops,
            users: Users::default(),
            file,
            volumes_of_file,
            is_partial: false,
        }
    }

    fn wait(process: &str, reason: &str, holder: &str, (object, object_id): (&str, u64)) -> Seen {
        let wait = WaitSeen {
            reason: reason.into(),
            object: object.into(),
            object_id,
            action: "Open".into(),
            holder: holder.into(),
            peer: String::new(),
            uid: 0,
            pid: 0,
            lasted_us: 4_200_000,
            ended_ms: 0,
        };
        Seen { process: process.into(), wait }
    }

    fn silent(name: &str, role: Role) -> Silent {
        Silent { name: name.into(), role, why: "no answer within 1s".into() }
    }

    #[test]
    fn nothing_is_found_where_all_is_well() {
        let well = evidence(world(), Further::default(), Some(file()));
        assert_eq!(findings(&well, &[]), []);
        assert_eq!(ended_waits(&well), Vec::<String>::new());
    }

    /// The fault, and the beginnings of the first sentence and the advice.
    type Case = (fn(&mut World, &mut Further), &'static str, &'static str);

    #[test]
    fn a_limit_of_a_user_concerns_that_users_files() {
        let of = |owner, file: Option<FileFacts>| {
            let mut world = world();
            world.known().owners = world_owners(1000, 1);
            let evidence = evidence(world, Further::default(), file.map(|f| FileFacts { owner, ..f }));
            findings(&evidence, &[]).into_iter().map(|f| (f.depth, f.text)).collect::<Vec<_>>()
        };
        let own = of(Some((4_294_967_290, 100)), Some(file()));
        assert!(own.len() == 1 && own[0].0 == 75 && own[0].1.contains("can add nothing in work"), "{own:?}");
        assert_eq!(of(Some((5, 100)), Some(file())), [], "the file of another user");
        assert_eq!(of(None, None).len(), 1, "named last for the whole cluster");
    }

    #[test]
    fn each_cause_is_named_first_with_what_to_do() {
        let cases: [Case; 15] = [
            (|w, _| w.map().nodes[2].up = false, "namespace \"root\" has no active", "`weir up"),
            (|w, _| w.set_known(Err("no answer".into())), "the metadata server of", "see its log"),
            (
                |_, b| b.silent.push(silent("storage-1", Role::Storage)),
                "storage-1 (storage) does not answer",
                "check the process",
            ),
            (|w, _| w.lose(2), "storage-2 is down: t2 is missing", "`weir up"),
            (
                |w, _| w.map().targets[0].state = TargetState::Failed,
                "t1 (storage-1) failed",
                "repair its disk",
            ),
            (
                |w, _| w.status.targets[0].stalled_ms = 3000,
                "the disk of t1 (storage-1) has completed nothing for 3.0 s",
                "see to the disk",
            ),
            (
                |w, _| {
                    for member in &mut w.map().groups[0].members {
                        member.state = MemberState::Behind;
                    }
                },
                "too few members of 1 placement group",
                "bring targets back",
            ),
            (|w, _| w.volume().usage.bytes = 960, "volume work is 96 % full", "delete files"),
            (
                |w, _| w.relation().home_failure = "gone".into(),
                "r1: the home file:///home of volume work cannot be used: gone",
                "see to the home",
            ),
            (|w, _| w.relation().movers = 0, "no mover is running", "`weir up --movers 1`"),
            (|w, _| w.homes.silent.extend([HOME.into()]), "r1: the home of volume work does not", "see to"),
            (
                |_, b| b.waits.push(wait("meta", "lease-recall", "n1:/b", ("inode", 7))),
                "meta has waited 4.2 s for n1:/b to return its lease",
                "check the mount n1:/b",
            ),
            (
                |_, b| b.waits.push(wait("storage-1", "disk", "", ("target", 1))),
                "storage-1 has waited 4.2 s for the disk of target 1",
                "check that disk",
            ),
            (
                |_, b| b.waits.push(wait("n1:/a", "recall", "no mover", ("inode", 7))),
                "n1:/a has waited 4.2 s for bytes",
                "`weir file state PATH`",
            ),
            (
                |_, b| b.waits.push(wait("mover", "home", "", ("", 0))),
                "mover has waited 4.2 s for home, to Open",
                "check that file server",
            ),
        ];
        for (change, text, action) in cases {
            let (mut world, mut further) = (world(), Further::default());
            // How it reaches the program.
            further.waits.push(wait("n1:/a", "program", "", ("inode", 7)));
            change(&mut world, &mut further);
            let found = findings(&evidence(world, further, Some(file())), &[]);
            assert!(found[0].text.starts_with(text), "{text}: {found:#?}");
            assert!(found[0].action.starts_with(action), "{action}: {found:#?}");
            let last = &found.last().unwrap().text;
            assert!(last.starts_with("Open on inode 7 of process 0"), "{text}: {last}");
        }
    }

    #[test]
    fn evidence_about_another_file_is_omitted() {
        let other = || {
            let (mut world, mut further) = (world(), Further::default());
            further.waits.push(wait("meta", "lease-recall", "n1:/b", ("inode", 8)));
            further.waits.push(wait("storage-9", "disk", "", ("target", 9)));
            further.silent.push(silent("n5:/c", Role::Mount));
            world.volume().usage.bytes = 1000;
            world.mounts[0].state = Reach::Dead;
            world.map().targets[1].id = TargetId(9);
            world.map().targets[1].state = TargetState::Failed;
            (world, further)
        };
        let (world, further) = other();
        let mut of_another_volume = evidence(world, further, Some(file()));
        of_another_volume.volumes_of_file = vec!["other".into()];
        assert_eq!(findings(&of_another_volume, &[]), []);
        let (world, further) = other();
        assert_eq!(
            findings(&evidence(world, further, None), &[]).len(),
            6,
            "of the whole cluster it is reported"
        );
    }

    #[test]
    fn a_silent_mount_matters_where_it_holds_a_lease() {
        let mut further = Further::default();
        further.silent.push(silent("n1:/b", Role::Mount));
        further.waits.push(wait("meta", "lease-recall", "n1:/b", ("inode", 7)));
        let found = findings(&evidence(world(), further, Some(file())), &[]);
        assert_eq!(found[0].text, "n1:/b (mount) does not answer: no answer within 1s");
        assert_eq!(found.len(), 2);
    }

    #[test]
    fn a_user_sees_what_the_mount_of_the_file_waits_for() {
        let waits = FileFacts { mount_waits: vec![("t1".into(), 5000, 2)], ..file() };
        let mut asked = evidence(world(), Further::default(), Some(waits));
        assert_eq!(findings(&asked, &[]), [], "an administrator has the waits themselves");
        asked.is_partial = true;
        let found = findings(&asked, &[]);
        assert_eq!(found.len(), 1, "{found:#?}");
        assert_eq!(found[0].text, "at the mount of this file 2 calls wait for t1, no answer for 5.0 s");
    }

    #[test]
    fn calls_that_wait_for_the_same_are_one_sentence() {
        let mut further = Further::default();
        (0..3).for_each(|_| further.waits.push(wait("n1:/a", "servers", "storage-2", ("", 0))));
        let found = findings(&evidence(world(), further, Some(file())), &[]);
        assert_eq!(found.len(), 1);
        assert_eq!(found[0].text, "n1:/a has waited 4.2 s for storage-2 (3 calls)");
    }

    #[test]
    fn a_process_has_its_own_waits_only() {
        let of = |pid| {
            let mut seen = wait("n1:/a", "program", "", ("inode", 7));
            seen.wait.pid = pid;
            seen
        };
        let further = Further { waits: vec![of(5), of(6)], ..Further::default() };
        let found = findings(&evidence(world(), further, None), &[6]);
        assert_eq!(found.len(), 1);
        assert!(found[0].text.contains("process 6 (user 0)"));
    }

    #[test]
    fn a_wait_that_ended_is_reported_afterwards() {
        let mut seen = wait("meta", "lease-recall", "n1:/b", ("inode", 7));
        seen.wait.ended_ms = 90_000;
        let evidence = evidence(world(), Further { waits: vec![seen], ..Further::default() }, Some(file()));
        assert_eq!(findings(&evidence, &[]), []);
        assert_eq!(
            ended_waits(&evidence),
            ["90.0 s ago: meta has waited 4.2 s for n1:/b to return its lease on inode 7, for Open"]
        );
    }

    #[test]
    fn a_user_with_most_of_the_work_is_named_where_others_work() {
        let row = |uid, us| TopRow {
            volume: 2,
            uid,
            job: String::new(),
            kind: "WRITE".into(),
            requests: 100,
            bytes: 1 << 20,
            us,
        };
        let found = |rows| {
            let reply = Ok(Top { covered_ms: 1000, rows });
            let tops = vec![Collected { name: "n1:/a".into(), role: Role::Mount, reply }];
            findings(&evidence(world(), Further { tops, ..Further::default() }, None), &[])
        };
        let hog = found(vec![row(4711, 2_000_000), row(5, 100_000)]);
        assert!(hog[0].text.starts_with("user 4711 has 95 % of the work"), "{hog:#?}");
        assert!(found(vec![row(4711, 2_000_000)]).is_empty(), "no other user works");
        assert!(found(vec![row(4711, 100_000), row(5, 90_000)]).is_empty(), "it is little");
    }

    /// Two mounts of one user: one removes a tree, the other one lists a directory.
    #[test]
    fn a_mount_that_removes_files_is_named_by_its_share() {
        let row = |kind: &str, job: &str, requests, us| TopRow {
            volume: 2,
            uid: 0,
            job: job.into(),
            kind: kind.into(),
            requests,
            bytes: 0,
            us,
        };
        let found = |removed, us| {
            let top = |name: &str, row| Collected {
                name: name.into(),
                role: Role::Mount,
                reply: Ok(Top { covered_ms: 1000, rows: vec![row] }),
            };
            let tops = vec![
                top("n1:/a", row("READDIRPLUS", "ls", 5, 2000)),
                top("n2:/b", row("UNLINK", "rm", removed, us)),
            ];
            findings(&evidence(world(), Further { tops, ..Further::default() }, None), &[])
        };
        for named in [found(900, 900_000), found(900, 100_000)] {
            let text = &named[0].text;
            assert!(
                text.starts_with("n2:/b has ")
                    && text.contains("so it removes files, by program rm of user "),
                "{text}"
            );
        }
        assert!(found(20, 1000).is_empty(), "it is little");
    }

    #[test]
    fn the_worst_comes_first_and_what_delays_nothing_last() {
        let mut world = world();
        world.lose(2); // degraded
        world.set_known(Err("no answer".into())); // critical
        world.map().level -= 1; // a note
        let found = findings(&evidence(world, Further::default(), None), &[]);
        let severities: Vec<Severity> = found.iter().map(|f| f.severity).collect();
        assert_eq!(severities, [Severity::Critical, Severity::Degraded, Severity::Note], "{found:#?}");
    }
}
