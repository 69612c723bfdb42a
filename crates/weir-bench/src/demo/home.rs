//! The demo's second act: a volume with a home and a limit. Frames and one growing file stream home while
//! they are written; the mover is killed in the middle of the file and restarted; the volume fills past its
//! limit, so data at home is evicted; everything is read back, with recalls of offline data, and compared, as
//! is home itself.
use crate::relation_load::{self, Live, PART, Plan, Seen, Site, evicted};
use indicatif::ProgressBar;
use serde_json::{Value, json};
use std::path::Path;
use std::sync::atomic::Ordering::Relaxed;
use std::time::{Duration, Instant};
use weir_admin::failure::Outcome;
use weir_admin::local::args::Up;
use weir_admin::local::local_cluster::LocalCluster;
use weir_admin::namespace_client::{connect, own_cred};
use weir_admin::{observe, table};
use weir_proto::volume::Volume;

const VOLUME: &str = "beamline";
const NAMESPACE: &str = "root";
const SECONDS: f64 = 12.0;
const FRAME_BYTES: u64 = 6_250_000;
/// The upper limit of the load on a machine: two streams of 50 MB/s each.
const STREAM_BYTES_PER_S: f64 = 50e6;
/// A byte that is not at home this long after the last write is lost, even on a slow machine.
const PATIENCE: Duration = Duration::from_secs(300);
/// The promises on a machine that keeps up: lag, and the time until another mover continues.
const LAG_MS_MAX: f64 = 20_000.0;
const RESUME_S_MAX: f64 = 10.0;

/// Two streams that together are a quarter of what the machine writes: each byte is also read again, and
/// written once more at home.
pub fn plan(bytes_per_s: f64) -> Plan {
    let stream = (bytes_per_s / 8.0).clamp(1e6, STREAM_BYTES_PER_S);
    Plan {
        frame_bytes: FRAME_BYTES,
        frames_per_s: stream / FRAME_BYTES as f64,
        file_bytes_per_s: stream as u64,
        file_bytes_max: u64::MAX,
        seconds: SECONDS,
    }
}

/// Less than half of the written data, so that it has to be evicted.
fn limit_bytes(plan: &Plan) -> u64 {
    let per_s = plan.frames_per_s * plan.frame_bytes as f64 + plan.file_bytes_per_s as f64;
    (per_s * plan.seconds * 0.45) as u64
}

pub struct Shown {
    plan: Plan,
    seen: Seen,
    killed_at_s: f64,
    resumed_s: Option<f64>,
    evicted: u64,
    /// Bytes that were at home only when everything was read.
    recalled: u64,
    read_mb_per_s: f64,
    /// Missing or wrong, at the mount or at home.
    wrong: Vec<String>,
}

/// `wish`: restarts killed processes.
pub fn play(
    local: &LocalCluster,
    mount: &Path,
    home: &Path,
    wish: &Up,
    plan: &Plan,
    bar: &ProgressBar,
) -> Outcome<Shown> {
    let site = Site { dir: mount.join(VOLUME), home: home.to_path_buf() };
    let volume = observe::block_on(async {
        let client = connect(local.coordinators(), NAMESPACE).await?;
        let volume = relation_load::make_volume(&client, VOLUME, Some(limit_bytes(plan))).await?;
        relation_load::add_home(&client, &volume, home).await?;
        client.shutdown().await?;
        Ok(volume)
    })?;
    let begun = Instant::now();
    let (seen, (killed_at_s, resumed_s)) = relation_load::stream(&site, plan, PATIENCE, |live| {
        show_until(begun + Duration::from_secs_f64(SECONDS / 2.0), live, bar);
        let killed_at_s = begun.elapsed().as_secs_f64();
        let resumed_s = relation_load::kill_mover(local, wish, live)?;
        show_until(begun + Duration::from_secs_f64(SECONDS), live, bar);
        Ok((killed_at_s, resumed_s))
    })?;
    bar.set_message("reading everything back");
    let (evicted, recalled) = levels(local, &volume, &seen)?;
    let reading = Instant::now();
    let mut wrong = relation_load::verify(&site.dir, plan, &seen);
    let read_mb_per_s = seen.bytes(plan) as f64 / 1e6 / reading.elapsed().as_secs_f64();
    wrong.extend(relation_load::verify(&site.home, plan, &seen));
    let plan = plan.clone();
    Ok(Shown { plan, seen, killed_at_s, resumed_s, evicted, recalled, read_mb_per_s, wrong })
}

fn show_until(until: Instant, live: &Live, bar: &ProgressBar) {
    let begun = (Instant::now(), live.arrived.load(Relaxed));
    while Instant::now() < until {
        let seconds = begun.0.elapsed().as_secs_f64().max(0.1);
        let rate = (live.arrived.load(Relaxed) - begun.1) as f64 / seconds / 1e6;
        let lag_s = live.lag_ms.load(Relaxed) as f64 / 1e3;
        bar.set_message(format!("home: {rate:.0} MB/s, {lag_s:.1} s behind"));
        std::thread::sleep(Duration::from_millis(50));
    }
}

/// Bytes evicted since the start, and those that are offline now.
fn levels(local: &LocalCluster, volume: &Volume, seen: &Seen) -> Outcome<(u64, u64)> {
    observe::block_on(async {
        let client = connect(local.coordinators(), NAMESPACE).await?;
        let evicted = evicted(&client, volume.id).await?;
        let file = (seen.file_bytes > 0).then(|| relation_load::FILE.to_owned());
        let mut away = 0;
        for name in (0..seen.frames).map(relation_load::frame_name).chain(file) {
            if let Some(found) = client.lookup(&own_cred(), volume.root, name.as_bytes()).await? {
                away += client.tier_state(found.attr.ino).await?.evicted;
            }
        }
        client.shutdown().await?;
        Ok((evicted, away))
    })
}

impl Shown {
    /// Bytes that are wrong or missing, as text.
    pub fn missing(&self) -> Vec<String> {
        let mut missing = self.wrong.clone();
        if !self.seen.complete {
            missing.push(format!("home does not have everything {PATIENCE:?} after the last write"));
        }
        missing
    }

    /// Steps that took too long, or did not happen for that reason, as text.
    pub fn lateness(&self) -> Vec<String> {
        let mut late = Vec::new();
        let mut expect = |is_so: bool, what: &str| {
            if !is_so {
                late.push(what.to_owned());
            }
        };
        expect(self.seen.lag(0.99) <= LAG_MS_MAX, "home is more than 20 s behind");
        expect(
            self.resumed_s.is_some_and(|s| s <= RESUME_S_MAX),
            "copying did not resume within 10 s of the mover's death",
        );
        expect(self.evicted > 0, "nothing was evicted although the volume is smaller than what it holds");
        expect(self.recalled > 0, "nothing had to be recalled");
        late
    }

    pub fn rows(&self) -> Vec<Vec<String>> {
        let row = |name: &str, value: String| vec![name.to_owned(), value];
        let seen = &self.seen;
        let frames = table::bytes(seen.frames * self.plan.frame_bytes);
        let file = table::bytes(seen.file_bytes / PART as u64 * PART as u64);
        let resumed = self.resumed_s.map_or("not resumed".to_owned(), |s| format!("resumed after {s:.1} s"));
        let wrong = match self.wrong.first() {
            None => "nothing".to_owned(),
            Some(first) => format!("{} (first: {first})", self.wrong.len()),
        };
        vec![
            row("streamed home", format!("{} frames ({frames}) and one file ({file})", seen.frames)),
            row("limit of the volume", table::bytes(limit_bytes(&self.plan))),
            row("lag p50, p99", format!("{:.1} s, {:.1} s", seen.lag(0.5) / 1e3, seen.lag(0.99) / 1e3)),
            row(
                "jitter of the rate at home",
                format!("{:.0} % of its mean, the kill included", seen.jitter() * 100.0),
            ),
            row("mover killed in mid-file", format!("at {:.1} s, {resumed}", self.killed_at_s)),
            row("longest write", format!("{:.0} ms", seen.longest_write_ms())),
            row("evicted", table::bytes(self.evicted)),
            row(
                "recalled",
                format!("{} ({:.0} MB/s read, all of it)", table::bytes(self.recalled), self.read_mb_per_s),
            ),
            row("wrong or missing, here or at home", wrong),
        ]
    }

    pub fn json(&self) -> Value {
        json!({
            "frames": self.seen.frames, "file_bytes": self.seen.file_bytes, "limit_bytes": limit_bytes(&self.plan),
            "lag_p50_ms": self.seen.lag(0.5), "lag_p99_ms": self.seen.lag(0.99), "jitter": self.seen.jitter(),
            "home_rate_min": self.seen.home_rate_min(),
            "mover_killed_at_s": self.killed_at_s, "resumed_s": self.resumed_s, "evicted_bytes": self.evicted,
            "recalled_bytes": self.recalled, "write_ms_max": self.seen.longest_write_ms(), "wrong": self.wrong,
            "missing": self.missing(), "late": self.lateness(),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_machine_holds_the_streams_and_the_limit_is_below_half() {
        for (measured, stream) in [(2e9, 50e6), (400e6, 50e6), (80e6, 10e6), (0.0, 1e6)] {
            let plan = plan(measured);
            assert!(
                (plan.frames_per_s * plan.frame_bytes as f64 - stream).abs() < 1.0,
                "{measured}: {plan:?}"
            );
            assert_eq!(plan.file_bytes_per_s, stream as u64);
            assert!((limit_bytes(&plan) as f64) < 2.0 * stream * SECONDS / 2.0);
        }
    }
}
