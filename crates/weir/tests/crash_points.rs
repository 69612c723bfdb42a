//! Claim: a process may die between any two steps. At each named point of the code (see
//! `weir_env::Tasks::crash_point`) one process kills itself while others write; it starts again, and all
//! acknowledged data is present, seen from another mount.
#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "tests are users of the operating system"
)]
mod common;

use common::{Cluster, OnPanic, Shell, can_mount, pattern, text, wait_until, weir};
use std::collections::BTreeMap;
use std::fs::{self, OpenOptions};
use std::io::{ErrorKind, Result, Write};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

const PATIENCE: Duration = Duration::from_secs(120);
/// Targets that may be gone, of 4+2.
const LOST_MAX: usize = 2;
/// Several stripes, and a tail.
const BIG_BYTES: usize = 9_300_001;
/// One stripe, whose overlays are sealed.
const SHARED_BYTES: usize = 4 << 20;
/// A piece of a burst: rides in the journal.
const PART_BYTES: usize = 8 << 10;

/// The processes that are killed.
#[derive(Clone, Copy, Debug)]
enum Victims {
    Storage,
    /// The one that leads the seals of the first stripe that bursts go to.
    SealLeader,
    AllStorage,
    Meta,
    Mount,
}

impl Victims {
    fn names(self, work: &Work) -> Vec<String> {
        match self {
            Victims::Storage => vec!["storage-2".into()],
            Victims::SealLeader => {
                let shared = work.dir.join("shared");
                let layout = weir(&["file", "layout", shared.to_str().unwrap(), "--json"]);
                let layout: serde_json::Value = serde_json::from_slice(&layout.stdout).unwrap();
                let leader = layout["stripes"][0]["parity"][0].as_str().unwrap();
                vec![leader.replace('t', "storage-")]
            }
            Victims::AllStorage => (1..=6).map(|n| format!("storage-{n}")).collect(),
            Victims::Meta => vec!["meta".into()],
            Victims::Mount => vec!["mount-1".into()],
        }
    }
}

/// A file's bytes, and those that an interrupted operation may have put there, or not.
#[derive(Default)]
struct Expected {
    bytes: Vec<u8>,
    maybe: Option<Vec<u8>>,
}

/// The acts on one directory through one mount, and the files that must exist.
struct Work {
    dir: PathBuf,
    /// What another mount writes, seen through this one: to read it takes that one's lease.
    other: PathBuf,
    files: BTreeMap<String, Expected>,
    /// Names that may or may not exist: an operation on them was interrupted.
    in_doubt: Vec<String>,
    step: u64,
    /// More targets die than may: data that is not back within an operation's deadline is an error.
    may_fail: bool,
}

/// Ended by the death of the mount, or of too many targets: done in part, or not.
struct Interrupted;

impl Work {
    fn new(dir: PathBuf, other: PathBuf) -> Work {
        fs::create_dir(&dir).unwrap();
        Work { dir, other, files: BTreeMap::new(), in_doubt: Vec::new(), step: 0, may_fail: false }
    }

    /// Each kind of operation once, acknowledged one after the other.
    fn round(&mut self) -> std::result::Result<(), Interrupted> {
        self.step += 1;
        let step = self.step;
        self.write(&format!("big-{}", step % 3), &pattern(step, BIG_BYTES))?;
        self.burst(step)?;
        for n in 0..8 {
            self.write(&format!("small-{step}-{n}"), &pattern(step + n, 300 * (n as usize + 1)))?;
        }
        self.append("log", format!("{step:06}\n").as_bytes())?;
        let read = fs::read(self.other.join("log"));
        self.done("read the other's log", read.map(|_| ()))?;
        self.rename(&format!("small-{step}-0"), &format!("renamed-{step}"))?;
        self.truncate(&format!("big-{}", step % 3), 1_234_567)?;
        let gone = format!("gone-{step}");
        self.write(&gone, &pattern(step, 1_000_000))?;
        self.remove(&gone)?;
        for n in 1..8 {
            self.remove(&format!("small-{step}-{n}"))?;
        }
        Ok(())
    }

    /// Ok: it was acknowledged. Any unexpected error fails the test.
    fn done(&mut self, what: &str, result: Result<()>) -> std::result::Result<(), Interrupted> {
        match result {
            Ok(()) => Ok(()),
            Err(e) if e.raw_os_error() == Some(107) || e.kind() == ErrorKind::ConnectionAborted => {
                Err(Interrupted)
            }
            Err(e) if self.may_fail && matches!(e.raw_os_error(), Some(5 | 110)) => Err(Interrupted),
            Err(e) => panic!("{what}: {e}"),
        }
    }

    fn change(
        &mut self,
        name: &str,
        after: Vec<u8>,
        act: impl FnOnce(&Path) -> Result<()>,
    ) -> std::result::Result<(), Interrupted> {
        let result = act(&self.dir.join(name));
        let done = self.done(name, result);
        let expected = self.files.entry(name.into()).or_default();
        match done {
            Ok(()) => expected.bytes = after,
            Err(_) => expected.maybe = Some(after),
        }
        done
    }

    /// A whole file, new or over the old one, and synced.
    fn write(&mut self, name: &str, bytes: &[u8]) -> std::result::Result<(), Interrupted> {
        if !self.files.contains_key(name) {
            self.in_doubt.push(name.into());
        }
        self.change(name, bytes.to_vec(), |path| {
            let mut file = OpenOptions::new().create(true).write(true).truncate(false).open(path)?;
            file.write_all(bytes)?;
            file.set_len(bytes.len() as u64)?;
            file.sync_all()
        })?;
        self.in_doubt.retain(|n| n != name);
        Ok(())
    }

    /// Many small overlays in one stripe: enough to be moved to a slab, sealed, and folded from the journal
    /// in the end.
    fn burst(&mut self, step: u64) -> std::result::Result<(), Interrupted> {
        if !self.files.contains_key("shared") {
            self.write("shared", &pattern(0, SHARED_BYTES))?;
        }
        let mut after = self.files["shared"].bytes.clone();
        let new = pattern(step, SHARED_BYTES);
        let parts: Vec<usize> =
            (0..SHARED_BYTES).step_by(2 * PART_BYTES).map(|at| at + PART_BYTES / 2).collect();
        for at in &parts {
            after[*at..at + PART_BYTES].copy_from_slice(&new[*at..at + PART_BYTES]);
        }
        self.change("shared", after.clone(), |path| {
            let file = OpenOptions::new().write(true).open(path)?;
            // Few enough at a time that they go as overlays, and the stripe is not replaced.
            for parts in parts.chunks(16) {
                for at in parts {
                    file.write_all_at(&after[*at..at + PART_BYTES], *at as u64)?;
                }
                file.sync_data()?;
            }
            Ok(())
        })
    }

    fn append(&mut self, name: &str, line: &[u8]) -> std::result::Result<(), Interrupted> {
        let mut after = self.files.get(name).map(|f| f.bytes.clone()).unwrap_or_default();
        after.extend_from_slice(line);
        if !self.files.contains_key(name) {
            return self.write(name, &after);
        }
        self.change(name, after, |path| {
            let mut file = OpenOptions::new().append(true).open(path)?;
            file.write_all(line)?;
            file.sync_all()
        })
    }

    fn truncate(&mut self, name: &str, len: usize) -> std::result::Result<(), Interrupted> {
        let after = self.files[name].bytes[..len].to_vec();
        self.change(name, after, |path| {
            let file = OpenOptions::new().write(true).open(path)?;
            file.set_len(len as u64)?;
            file.sync_all()
        })
    }

    fn rename(&mut self, from: &str, to: &str) -> std::result::Result<(), Interrupted> {
        self.in_doubt.extend([from.to_string(), to.to_string()]);
        let moved = self.files[from].bytes.clone();
        self.files.insert(to.into(), Expected { bytes: moved, maybe: None });
        let result = fs::rename(self.dir.join(from), self.dir.join(to));
        self.done("rename", result)?;
        self.files.remove(from);
        self.in_doubt.clear();
        Ok(())
    }

    fn remove(&mut self, name: &str) -> std::result::Result<(), Interrupted> {
        self.in_doubt.push(name.into());
        let result = fs::remove_file(self.dir.join(name));
        self.done("remove", result)?;
        self.in_doubt.clear();
        self.files.remove(name);
        Ok(())
    }

    /// Everything acknowledged is in `dir`, another mount's view of the same directory. Files in doubt are
    /// settled as found.
    fn verify(&mut self, dir: &Path) {
        let mut there: Vec<String> =
            fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        there.sort();
        for name in &there {
            assert!(self.files.contains_key(name), "{name} has been removed, and is there");
        }
        let in_doubt = std::mem::take(&mut self.in_doubt);
        self.files.retain(|name, expected| {
            let found = match fs::read(dir.join(name)) {
                Ok(found) => found,
                Err(e) if e.kind() == ErrorKind::NotFound && in_doubt.contains(name) => return false,
                Err(e) => panic!("{name}: {e}"),
            };
            let new = in_doubt.contains(name);
            check(name, &found, expected, new);
            (expected.bytes, expected.maybe) = (found, None);
            true
        });
        if let [from, to] = &in_doubt[..] {
            assert!(
                self.files.contains_key(from) || self.files.contains_key(to),
                "{from} is lost on its way to {to}"
            );
        }
    }
}

/// Each byte is as acknowledged, or as an interrupted operation would have it.
fn check(name: &str, found: &[u8], expected: &Expected, new: bool) {
    let Some(maybe) = &expected.maybe else {
        let parted = found.iter().zip(&expected.bytes).position(|(a, b)| a != b);
        assert!(
            found == expected.bytes,
            "{name}: {} bytes instead of {}, the first other one at {parted:?}",
            found.len(),
            expected.bytes.len()
        );
        return;
    };
    let (short, long) = (expected.bytes.len().min(maybe.len()), expected.bytes.len().max(maybe.len()));
    assert!(
        new || (short..=long).contains(&found.len()),
        "{name}: {} bytes, not {short} to {long}",
        found.len()
    );
    for (at, byte) in found.iter().enumerate() {
        let allowed = [expected.bytes.get(at), maybe.get(at)];
        // A new size may show before its bytes.
        let gap = expected.bytes.get(at).is_none() && *byte == 0;
        assert!(gap || allowed.contains(&Some(byte)), "{name}: a byte at {at} that no write has");
    }
}

/// Starts the victims with a crash point, lets the work run until enough have died, and starts all of them
/// again.
fn die_and_recover(
    cluster: &mut Cluster,
    shell: &mut Shell,
    victims: Victims,
    point: &str,
    nth: u32,
    works: &mut [Work; 2],
) {
    let names = victims.names(&works[0]);
    let too_many = names.len() > LOST_MAX;
    works.iter_mut().for_each(|work| work.may_fail = too_many);
    names.iter().for_each(|name| cluster.kill(name));
    let fetches = point == weir_store::crash_points::REBUILT || point == weir_store::crash_points::COPIED;
    if fetches && !too_many {
        // While it is away much is written that it has to fetch.
        for _ in 0..nth {
            let _ = works[1].round();
        }
    }
    cluster.launcher = vec!["env".into(), format!("WEIR_KILL_AT={point}:{nth}")];
    cluster.try_up(); // it may die before `weir up` has seen it serve
    cluster.launcher.clear();
    let up = cluster.words_of_up().join(" ");
    // With more gone than parity tolerates nothing is written, so the others would never reach the point.
    let enough = names.len().min(LOST_MAX + 1);
    let dead = |cluster: &Cluster| names.iter().filter(|name| cluster.pid(name).is_none()).count();
    let died = |cluster: &Cluster| dead(cluster) >= enough;
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _stop = OnPanic(|| stop.store(true, Ordering::Release));
        let workers: Vec<_> = works
            .iter_mut()
            .map(|work| {
                let stop = &stop;
                scope.spawn(move || {
                    let _stop = OnPanic(|| stop.store(true, Ordering::Release));
                    while !stop.load(Ordering::Acquire) && work.round().is_ok() {}
                })
            })
            .collect();
        let what = format!("{victims:?} come to {point} for the {nth}. time");
        wait_until(&what, PATIENCE, || died(cluster) || workers.iter().any(|w| w.is_finished()));
        // Fewer may be too many while others are still behind from the death of all. Then all who write give
        // up.
        let have_stopped = || too_many && workers.iter().all(|w| w.is_finished());
        wait_until(&what, PATIENCE, || died(cluster) || (dead(cluster) > 0 && have_stopped()));
        if matches!(victims, Victims::Mount) {
            // Programs there have to notice: between the dead mount and its successor there is a plain, empty
            // directory.
            wait_until("the dead mount to be seen", PATIENCE, || workers[0].is_finished());
        }
        kill_those_left(cluster, shell, &names);
        assert!(shell.run(&up), "{}", cluster.logs());
        stop.store(true, Ordering::Release);
    });
}

/// Kills those of `names` that still run.
fn kill_those_left(cluster: &Cluster, shell: &mut Shell, names: &[String]) {
    for pid in names.iter().filter_map(|name| cluster.pid(name)) {
        shell.run(&format!("kill -KILL {pid}")); // it may come to the point first
    }
    wait_until("all are gone", PATIENCE, || names.iter().all(|name| cluster.pid(name).is_none()));
}

/// The points of each role, and the processes that die there.
fn cases(all: bool) -> Vec<(Victims, &'static str)> {
    let store = weir_store::crash_points::ALL.into_iter().chain(weir_kv::crash_points::ALL);
    let storage = |point: &'static str| {
        (if point.starts_with("store-seal") { Victims::SealLeader } else { Victims::Storage }, point)
    };
    let mut cases: Vec<_> = store.clone().map(storage).collect();
    if all {
        // When all die at once no member is behind, and nothing is fetched.
        let fetched = [weir_store::crash_points::REBUILT, weir_store::crash_points::COPIED];
        let points = store.filter(|point| !fetched.contains(point));
        cases.extend(points.map(|point| (Victims::AllStorage, point)));
    }
    let journal =
        [weir_kv::crash_points::COMMITTED, weir_kv::crash_points::WRITTEN, weir_kv::crash_points::SYNCED];
    cases.extend(weir_meta::crash_points::ALL.into_iter().chain(journal).map(|point| (Victims::Meta, point)));
    cases.extend(weir_client::crash_points::ALL.into_iter().map(|point| (Victims::Mount, point)));
    cases
}

/// Each case at the passes of its point in `nths`; `WEIR_CRASH_POINTS=first..end` at run time chooses some of
/// all deaths.
fn survives(cases: &[(Victims, &'static str)], nths: &[u32]) {
    if !can_mount() {
        return;
    }
    // A program that waits for more targets than may fail gives up within the test's own patience.
    let mut cluster = Cluster::with(2, &["--patience", "15s"]);
    let mut shell = Shell::start();
    let at = |mount: usize, name: &str| cluster.mounts[mount].join(name);
    let mut works = [Work::new(at(0, "first"), at(0, "second")), Work::new(at(1, "second"), at(1, "first"))];
    let elsewhere = [at(1, "first"), at(0, "second")];
    works.iter_mut().for_each(|work| assert!(work.append("log", b"").is_ok()));
    works.iter_mut().for_each(|work| assert!(work.round().is_ok()));
    // A leader that has started changes little by itself, and a target that was away for a moment has missed
    // little.
    let comes = |(nth, (_, point)): &(u32, (Victims, &str))| match *point {
        weir_meta::crash_points::HOUSEKEPT => *nth <= 5,
        weir_store::crash_points::REBUILT | weir_store::crash_points::COPIED => *nth <= 8,
        _ => true,
    };
    let all = nths.iter().flat_map(|n| cases.iter().map(move |case| (*n, *case)));
    let deaths: Vec<_> = all.filter(comes).collect();
    let part = common::part("WEIR_CRASH_POINTS", 0..deaths.len() as u64);
    assert!(part.end <= deaths.len() as u64, "WEIR_CRASH_POINTS={part:?}: there are {} deaths", deaths.len());
    for number in part {
        let (nth, (victims, point)) = deaths[number as usize];
        let begun = std::time::Instant::now();
        die_and_recover(&mut cluster, &mut shell, victims, point, nth, &mut works);
        works.iter_mut().zip(&elsewhere).for_each(|(work, dir)| work.verify(dir));
        wait_until("everything is redundant again", PATIENCE, || cluster.status()["redundant"] == true);
        eprintln!(
            "{number}: {victims:?} at {point}, pass {nth}: survived, {:.1} s",
            begun.elapsed().as_secs_f64()
        );
    }
    let dir = cluster.dir();
    assert!(weir(&["down", "--dir", dir.to_str().unwrap()]).status.success());
    for target in 1..=6 {
        let check = weir(&["inspect", "--check", dir.join(format!("t{target}")).to_str().unwrap()]);
        assert!(check.status.success(), "{}{}", text(&check.stdout), text(&check.stderr));
    }
}

#[test]
fn a_process_may_die_at_any_point() {
    survives(&cases(false), &[2]);
}

#[test]
#[ignore = "many minutes: make test-long"]
fn a_process_may_die_at_any_point_at_any_time() {
    survives(&cases(true), &[1, 2, 3, 5, 8, 13]);
}
