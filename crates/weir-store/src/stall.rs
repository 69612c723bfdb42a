//! Whether a target's disk still answers. A disk that hangs accepts requests and completes none, while the
//! process is up and answers health checks; its groups should continue without it.
//!
//! A busy disk completes some request all the time, however long each one waits: only a disk that completes
//! none hangs.
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use weir_env::{Clock, Env, Instant};
use weir_proto::TargetId;
use weir_watch::{Histogram, Object, Reason, WaitGuard, WaitRecord, Watch};

/// Requests in flight at one disk.
pub struct DiskWatch {
    clock: Clock,
    seen: Mutex<Seen>,
    watch: Watch,
    target: Object,
    seconds: Histogram,
}

#[derive(Default)]
struct Seen {
    under_way: usize,
    /// When a request last ended, or the first one began.
    last: Instant,
}

/// A request in flight. [`UnderWay::end`] ends it; if it is dropped before, its caller no longer waits.
pub struct UnderWay {
    disk: Arc<DiskWatch>,
    begun: Instant,
    _wait: WaitGuard,
}

impl DiskWatch {
    pub fn new(env: &Env, target: TargetId) -> Arc<DiskWatch> {
        let (clock, watch) = (env.clock.clone(), env.watch.clone());
        let seconds = watch.histogram("weir_store_disk_seconds", ("target", &target.to_string()));
        let target = Object::new("target", target.0.into());
        Arc::new(DiskWatch { clock, seen: Mutex::default(), watch, target, seconds })
    }
    fn seen(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }
    pub fn begin(self: &Arc<Self>) -> UnderWay {
        let now = self.clock.now();
        let mut seen = self.seen();
        if seen.under_way == 0 {
            seen.last = now;
        }
        seen.under_way += 1;
        drop(seen);
        let wait = self.watch.wait_since(now.0, WaitRecord::new(Reason::Disk, self.target));
        UnderWay { disk: self.clone(), begun: now, _wait: wait }
    }
    /// How long no request has ended.
    pub fn stalled_for(&self) -> Duration {
        let now = self.clock.now();
        let seen = self.seen();
        if seen.under_way > 0 { now.since(seen.last) } else { Duration::ZERO }
    }
}

impl UnderWay {
    pub fn end(self) {
        let now = self.disk.clock.now();
        self.disk.seen().last = now;
        self.disk.seconds.add(now.since(self.begun).as_nanos() as u64);
    }
}
impl Drop for UnderWay {
    fn drop(&mut self) {
        self.disk.seen().under_way -= 1;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use weir_env::sim::{SimConfig, World};

    #[test]
    fn a_disk_hangs_when_nothing_of_what_it_has_to_do_ends() {
        let world = World::new(1, SimConfig::default());
        world.run(async {
            let env = world.node("a");
            let (clock, watch) = (env.clock.clone(), DiskWatch::new(&env, TargetId(1)));
            let second = Duration::from_secs(1);
            clock.sleep(2 * second).await;
            let slow = watch.begin();
            assert_eq!(watch.stalled_for(), Duration::ZERO, "it was idle until now");
            for _ in 0..4 {
                clock.sleep(second).await;
                watch.begin().end();
                assert_eq!(watch.stalled_for(), Duration::ZERO, "it is busy");
            }
            clock.sleep(3 * second).await;
            drop(watch.begin());
            assert!(watch.stalled_for() >= 3 * second, "what was given up has not ended");
            slow.end();
            clock.sleep(second).await;
            assert_eq!(watch.stalled_for(), Duration::ZERO, "it has nothing to do");
        });
    }
}
