//! A volume with a home under load: frames and one growing file are written at their rate, and their arrival
//! at home is observed from outside, as any program with access to the directory can. For `weir-bench
//! demo` and `weir-bench home`.
//!
//! Every block contains its identity and place, so data read back, here or at home, can be verified. Knows
//! nothing of how Weir ships data home; it only queries levels and states.
use bytes::Bytes;
use rustix::process::Signal;
use std::collections::VecDeque;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};
use weir_admin::failure::{Doing, Failure, Outcome};
use weir_admin::local::args::Up;
use weir_admin::local::local_cluster::{LocalCluster, RoleName};
use weir_admin::local::process::{PidFile, wait_until};
use weir_admin::local::up;
use weir_admin::namespace_client::own_cred;
use weir_client::{Client, NewRelation, NewVolume};
use weir_proto::volume::{Policy, Quota, Volume};
use weir_proto::{Error, VolumeId};

/// The interval of reading home.
const POLL: Duration = Duration::from_millis(20);
/// The time for a mover to die and another one to continue.
const RESUME_PATIENCE: Duration = Duration::from_secs(60);
/// Rates are measured over this time.
const WINDOW: Duration = Duration::from_secs(1);
/// Frames in flight that one check searches for.
const ASKED_MAX: usize = 64;
/// A file is written in parts of this size.
pub const PART: usize = 1 << 20;
/// Each block of a part carries its place.
const BLOCK: usize = 4096;
/// The growing file.
pub const FILE: &str = "scan.h5";

/// The data to write.
#[derive(Clone, Debug)]
pub struct Plan {
    pub frame_bytes: u64,
    /// 0: no frames.
    pub frames_per_s: f64,
    /// 0: no growing file.
    pub file_bytes_per_s: u64,
    /// The growing file ends here at the latest.
    pub file_bytes_max: u64,
    pub seconds: f64,
}

/// Where it is written, and where it arrives.
#[derive(Clone, Debug)]
pub struct Site {
    pub dir: PathBuf,
    pub home: PathBuf,
}

/// The measurements.
#[derive(Default, Debug)]
pub struct Seen {
    pub frames: u64,
    pub file_bytes: u64,
    /// The time from the write to the arrival at home, ms, sorted; of a frame from its close.
    pub lag_ms: Vec<f64>,
    /// Bytes that arrived, and that were written, in each second.
    pub arrived: Vec<u64>,
    pub written: Vec<u64>,
    /// The duration of each `write` or frame, ms, sorted.
    pub write_ms: Vec<f64>,
    /// All was at home within the patience.
    pub complete: bool,
}

impl Seen {
    pub fn bytes(&self, plan: &Plan) -> u64 {
        self.frames * plan.frame_bytes + self.file_bytes
    }
    pub fn lag(&self, quantile: f64) -> f64 {
        at_quantile(&self.lag_ms, quantile)
    }
    pub fn longest_write_ms(&self) -> f64 {
        at_quantile(&self.write_ms, 1.0)
    }
    /// Deviation of the rate at home from second to second, relative to its mean, while data was written at
    /// the full rate.
    pub fn jitter(&self) -> f64 {
        let steady = self.arrived.len().min(self.written.len()).saturating_sub(1);
        let rates: Vec<f64> = self.arrived.iter().take(steady).skip(2).map(|bytes| *bytes as f64).collect();
        let mean = rates.iter().sum::<f64>() / rates.len().max(1) as f64;
        let variance = rates.iter().map(|r| (r - mean).powi(2)).sum::<f64>() / rates.len().max(1) as f64;
        if mean > 0.0 { variance.sqrt() / mean } else { 0.0 }
    }
    /// The lowest ratio of arrived to written bytes over ten seconds; `None`: the run was shorter.
    pub fn home_rate_min(&self) -> Option<f64> {
        let sum = |all: &[u64], at: usize| all[at..at + 10].iter().sum::<u64>() as f64;
        let windows = self.arrived.len().min(self.written.len()).saturating_sub(9);
        let shares = (1..windows).map(|at| sum(&self.arrived, at) / sum(&self.written, at).max(1.0));
        shares.reduce(f64::min)
    }
}

/// A quantile of sorted values; 0 without values.
pub fn at_quantile(sorted: &[f64], quantile: f64) -> f64 {
    let last = sorted.len().saturating_sub(1);
    sorted.get((last as f64 * quantile).round() as usize).copied().unwrap_or(0.0)
}

/// Counters during the run.
#[derive(Default)]
pub struct Live {
    pub written: AtomicU64,
    pub arrived: AtomicU64,
    /// Bytes of the growing file at home.
    pub file_at_home: AtomicU64,
    /// The lag of the last arrival, ms.
    pub lag_ms: AtomicU64,
    writing: AtomicBool,
    /// No more data is to be written.
    enough: AtomicBool,
    /// Threads that have not finished writing.
    writers: AtomicU64,
    log: Mutex<Log>,
}

/// Data that is not at home yet.
#[derive(Default)]
struct Log {
    frames: VecDeque<(u64, Instant)>,
    file: VecDeque<(u64, Instant)>,
    frames_closed: u64,
    file_bytes: u64,
    write_ms: Vec<f64>,
}

impl Live {
    fn log(&self) -> MutexGuard<'_, Log> {
        self.log.lock().unwrap_or_else(PoisonError::into_inner)
    }
    /// Whether planned data is not written yet.
    pub fn is_writing(&self) -> bool {
        self.writers.load(Relaxed) > 0
    }
    /// Stops writing.
    pub fn stop(&self) {
        self.enough.store(true, Relaxed);
    }
    fn note_write(&self, bytes: u64, begun: Instant) {
        self.written.fetch_add(bytes, Relaxed);
        let took_ms = begun.elapsed().as_secs_f64() * 1e3;
        self.log().write_ms.push(took_ms);
    }
}

/// A volume with or without a limit.
pub async fn make_volume(client: &Client, name: &str, limit: Option<u64>) -> Outcome<Volume> {
    let quota = Quota { bytes_hard: limit, ..Quota::NONE };
    let cred = own_cred();
    let new = NewVolume {
        name: name.to_owned(),
        path: Bytes::from(format!("/{name}")),
        owner: cred.uid,
        group: cred.gid,
        mode: 0o755,
        admins: Vec::new(),
        quota,
        policy: Policy { scheme: None, pool: None },
    };
    Ok(client.create_volume(&cred, &new).await?)
}

/// Gives a volume a home; data there may be evicted.
pub async fn add_home(client: &Client, volume: &Volume, home: &Path) -> Outcome<()> {
    fs::create_dir_all(home).doing(format_args!("make {}", home.display()))?;
    let url = format!("file://{}", home.display());
    let new = NewRelation { url, evict: true, ..NewRelation::default() };
    client.add_relation(&own_cred(), volume.id, &new).await?;
    Ok(())
}

/// Bytes of a volume that were evicted since the leader started.
pub async fn evicted(client: &Client, volume: VolumeId) -> Outcome<u64> {
    let levels = client.eviction(&own_cred(), None).await?;
    Ok(levels.iter().find(|level| level.volume == Some(volume)).map_or(0, |level| level.evicted))
}

/// Writes as planned, and observes home until all has arrived, `patience` after the last write at most.
/// `meanwhile` runs in this thread.
pub fn stream<T>(
    site: &Site,
    plan: &Plan,
    patience: Duration,
    meanwhile: impl FnOnce(&Live) -> Outcome<T>,
) -> Outcome<(Seen, T)> {
    let live = Live { writing: AtomicBool::new(true), writers: AtomicU64::new(2), ..Live::default() };
    let start = Instant::now();
    let ended = |wrote| {
        live.writers.fetch_sub(1, Relaxed);
        wrote
    };
    std::thread::scope(|scope| {
        let frames = scope.spawn(|| ended(write_frames(site, plan, &live, start)));
        let file = scope.spawn(|| ended(write_file(site, plan, &live, start)));
        let watch = scope.spawn(|| watch(site, plan, &live, patience));
        let did = meanwhile(&live);
        if did.is_err() {
            live.stop();
        }
        let panicked = |_| Error::io("a thread of the load panicked");
        let wrote = [frames.join().map_err(panicked)?, file.join().map_err(panicked)?];
        live.writing.store(false, Relaxed);
        let seen = watch.join().map_err(panicked)?;
        let did = did?;
        wrote.into_iter().collect::<Outcome<()>>()?;
        Ok((seen, did))
    })
}

/// SIGKILL for the mover; returns the seconds until the growing file grows at home again, by a mover that is
/// started at once.
pub fn kill_mover(local: &LocalCluster, wish: &Up, live: &Live) -> Outcome<Option<f64>> {
    let missing = || Error::not_found("no mover runs");
    let mover = local.of_role(RoleName::Mover).next().ok_or_else(missing)?;
    let pid = PidFile::read(&local.pid_file(mover)).ok_or_else(missing)?;
    pid.signal(Signal::KILL)?;
    let killed = Instant::now();
    if !pid.gone_within(RESUME_PATIENCE) {
        return Err(Failure::new(Error::deadline("the killed mover is still there"), "`ps` shows why"));
    }
    // Its last writes are observed before they are counted.
    std::thread::sleep(5 * POLL);
    let before = live.file_at_home.load(Relaxed);
    up::bring_up(wish)?;
    let resumed = wait_until(RESUME_PATIENCE, || live.file_at_home.load(Relaxed) > before);
    Ok(resumed.then(|| killed.elapsed().as_secs_f64()))
}

/// Written bytes that are in the home directory, by its files' sizes.
pub fn at_home(site: &Site, plan: &Plan, seen: &Seen) -> u64 {
    let size = |name: &str| fs::metadata(site.home.join(name)).map_or(0, |m| m.len());
    (0..seen.frames).map(|n| size(&frame_name(n)).min(plan.frame_bytes)).sum::<u64>() + size(FILE)
}

/// Removes the written files.
pub fn remove(dir: &Path, seen: &Seen) -> Outcome<()> {
    let file = (seen.file_bytes > 0).then(|| FILE.to_owned());
    for name in (0..seen.frames).map(frame_name).chain(file) {
        let path = dir.join(name);
        fs::remove_file(&path).doing(format_args!("remove {}", path.display()))?;
    }
    Ok(())
}

fn sleep_until(due: Instant) {
    std::thread::sleep(due.saturating_duration_since(Instant::now()));
}

fn write_frames(site: &Site, plan: &Plan, live: &Live, start: Instant) -> Outcome<()> {
    let count = (plan.frames_per_s * plan.seconds) as u64;
    for n in 0..count {
        sleep_until(start + Duration::from_secs_f64(n as f64 / plan.frames_per_s));
        if live.enough.load(Relaxed) {
            return Ok(());
        }
        let (path, begun) = (site.dir.join(frame_name(n)), Instant::now());
        write_whole(&path, frame_seed(n), plan.frame_bytes)
            .doing(format_args!("write {}", path.display()))?;
        live.note_write(plan.frame_bytes, begun);
        let mut log = live.log();
        log.frames_closed += 1;
        log.frames.push_back((n, Instant::now()));
    }
    Ok(())
}

fn write_whole(path: &Path, seed: u64, bytes: u64) -> std::io::Result<()> {
    let mut file = File::create(path)?;
    let (mut part, mut at) = (Part::new(seed), 0);
    while at < bytes {
        let n = (bytes - at).min(PART as u64) as usize;
        file.write_all(&part.at(at / PART as u64)[..n])?;
        at += n as u64;
    }
    Ok(())
}

fn write_file(site: &Site, plan: &Plan, live: &Live, start: Instant) -> Outcome<()> {
    if plan.file_bytes_per_s == 0 {
        return Ok(());
    }
    let path = site.dir.join(FILE);
    let mut file = File::create(&path).doing(format_args!("make {}", path.display()))?;
    let (mut part, mut at) = (Part::new(FILE_SEED), 0);
    while at < plan.file_bytes_max
        && start.elapsed().as_secs_f64() < plan.seconds
        && !live.enough.load(Relaxed)
    {
        sleep_until(start + Duration::from_secs_f64(at as f64 / plan.file_bytes_per_s as f64));
        let begun = Instant::now();
        file.write_all(part.at(at / PART as u64)).doing(format_args!("write {}", path.display()))?;
        at += PART as u64;
        live.note_write(PART as u64, begun);
        let mut log = live.log();
        log.file_bytes = at;
        log.file.push_back((at, Instant::now()));
    }
    Ok(())
}

/// Reads home until all written data has arrived.
fn watch(site: &Site, plan: &Plan, live: &Live, patience: Duration) -> Seen {
    let mut seen = Seen::default();
    let (mut frames_at_home, mut window, mut before, mut written_before) = (0, Instant::now(), 0, 0);
    let mut ended_at = None;
    loop {
        std::thread::sleep(POLL);
        let now = Instant::now();
        let size = fs::metadata(site.home.join(FILE)).map_or(0, |m| m.len());
        let asked: Vec<u64> = live.log().frames.iter().take(ASKED_MAX).map(|(n, _)| *n).collect();
        let is_there =
            |n: &u64| fs::metadata(site.home.join(frame_name(*n))).is_ok_and(|m| m.len() == plan.frame_bytes);
        let there: Vec<u64> = asked.into_iter().filter(is_there).collect();
        let mut lags = Vec::new();
        let nothing_left = {
            let mut log = live.log();
            while log.file.front().is_some_and(|(end, _)| *end <= size) {
                lags.extend(log.file.pop_front().map(|(_, at)| at));
            }
            let arrived = |(n, _): &(u64, Instant)| there.contains(n);
            lags.extend(log.frames.iter().filter(|f| arrived(f)).map(|(_, at)| *at));
            log.frames.retain(|f| !arrived(f));
            (seen.frames, seen.file_bytes) = (log.frames_closed, log.file_bytes);
            log.frames.is_empty() && log.file.is_empty()
        };
        frames_at_home += there.len() as u64;
        seen.lag_ms.extend(lags.iter().map(|at| now.saturating_duration_since(*at).as_secs_f64() * 1e3));
        if let Some(last) = lags.last() {
            live.lag_ms.store(now.saturating_duration_since(*last).as_millis() as u64, Relaxed);
        }
        let arrived = size + frames_at_home * plan.frame_bytes;
        live.file_at_home.store(size, Relaxed);
        live.arrived.store(arrived, Relaxed);
        if now.duration_since(window) >= WINDOW {
            window += WINDOW;
            seen.arrived.push(arrived.saturating_sub(before));
            before = arrived;
            if live.writing.load(Relaxed) {
                let written = live.written.load(Relaxed);
                seen.written.push(written - written_before);
                written_before = written;
            }
        }
        if live.writing.load(Relaxed) {
            continue;
        }
        let over = now.duration_since(*ended_at.get_or_insert(now)) > patience;
        if nothing_left || over {
            seen.complete = nothing_left;
            seen.lag_ms.sort_by(f64::total_cmp);
            seen.write_ms = std::mem::take(&mut live.log().write_ms);
            seen.write_ms.sort_by(f64::total_cmp);
            return seen;
        }
    }
}

// ---- what is in it

const FILE_SEED: u64 = u64::MAX;

pub fn frame_name(n: u64) -> String {
    format!("frame-{n:06}.cbf")
}
fn frame_seed(n: u64) -> u64 {
    n
}

/// The parts of one file, one at a time.
struct Part {
    seed: u64,
    bytes: Vec<u8>,
}

impl Part {
    fn new(seed: u64) -> Part {
        // Not compressible on the way: a plain linear generator suffices.
        let mut state = seed ^ 0x9E37_79B9_7F4A_7C15;
        let mut bytes = Vec::with_capacity(PART);
        while bytes.len() < PART {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            bytes.extend_from_slice(&state.to_le_bytes());
        }
        Part { seed, bytes }
    }
    fn at(&mut self, number: u64) -> &[u8] {
        for (block, bytes) in self.bytes.chunks_exact_mut(BLOCK).enumerate() {
            bytes[..8].copy_from_slice(&self.seed.to_le_bytes());
            bytes[8..16].copy_from_slice(&(number * (PART / BLOCK) as u64 + block as u64).to_le_bytes());
        }
        &self.bytes
    }
}

/// Reads everything in a directory; returns missing or wrong data, as text.
pub fn verify(dir: &Path, plan: &Plan, seen: &Seen) -> Vec<String> {
    let mut bad = Vec::new();
    let frames = (0..seen.frames).map(|n| (frame_name(n), frame_seed(n), plan.frame_bytes));
    let file = (seen.file_bytes > 0).then(|| (FILE.to_owned(), FILE_SEED, seen.file_bytes));
    for (name, seed, bytes) in frames.chain(file) {
        let path = dir.join(name);
        if let Err(why) = verify_one(&path, seed, bytes) {
            bad.push(format!("{}: {why}", path.display()));
        }
    }
    bad
}

fn verify_one(path: &Path, seed: u64, bytes: u64) -> Result<(), String> {
    let mut file = File::open(path).map_err(|e| e.to_string())?;
    let (mut part, mut got, mut at) = (Part::new(seed), vec![0; PART], 0);
    while at < bytes {
        let n = (bytes - at).min(PART as u64) as usize;
        file.read_exact(&mut got[..n]).map_err(|e| format!("bytes from {at} on: {e}"))?;
        let expected = part.at(at / PART as u64);
        if let Some(first) = got[..n].iter().zip(expected).position(|(a, b)| a != b) {
            return Err(format!("byte {} differs", at + first as u64));
        }
        at += n as u64;
    }
    match file.read(&mut got[..1]) {
        Ok(0) => Ok(()),
        Ok(_) => Err(format!("it is longer than {bytes} bytes")),
        Err(e) => Err(e.to_string()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn differences_are_found_and_equal_trees_pass() {
        let dir = tempfile::tempdir().unwrap();
        let plan = Plan {
            frame_bytes: 1_500_000,
            frames_per_s: 1.0,
            file_bytes_per_s: 0,
            file_bytes_max: 0,
            seconds: 1.0,
        };
        let seen = Seen { frames: 2, ..Seen::default() };
        for n in 0..2 {
            write_whole(&dir.path().join(frame_name(n)), frame_seed(n), plan.frame_bytes).unwrap();
        }
        assert_eq!(verify(dir.path(), &plan, &seen), Vec::<String>::new());
        let path = dir.path().join(frame_name(1));
        let mut bytes = fs::read(&path).unwrap();
        bytes[1_200_000] ^= 1;
        fs::write(&path, &bytes).unwrap();
        assert!(verify(dir.path(), &plan, &seen)[0].contains("byte 1200000 differs"));
        fs::write(&path, &bytes[..9]).unwrap();
        fs::remove_file(dir.path().join(frame_name(0))).unwrap();
        assert_eq!(verify(dir.path(), &plan, &seen).len(), 2);
    }

    #[test]
    fn steady_seconds_have_no_jitter_and_a_gap_shows() {
        let of = |arrived: &[u64]| {
            let written = vec![100; arrived.len()];
            Seen { arrived: arrived.to_vec(), written, ..Seen::default() }
        };
        assert_eq!(of(&[100; 12]).jitter(), 0.0);
        let gap = of(&[100, 100, 100, 100, 0, 200, 100, 100, 100, 100, 100, 100]);
        assert!(gap.jitter() > 0.4 && gap.home_rate_min() == Some(1.0), "{gap:?}");
        assert_eq!(of(&[50; 12]).home_rate_min(), Some(0.5));
        assert_eq!(of(&[50; 10]).home_rate_min(), None);
        let lags = Seen { lag_ms: (1..=100).map(f64::from).collect(), ..Seen::default() };
        assert_eq!((lags.lag(0.5), lags.lag(1.0)), (51.0, 100.0));
    }
}
