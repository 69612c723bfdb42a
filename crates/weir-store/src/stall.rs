//! Whether a target's disk still answers. A disk that hangs accepts requests and completes none, while the
//! process is up and answers health checks; its groups should continue without it.
//!
//! A busy disk completes some request all the time, however long each one waits: only a disk that completes
//! none hangs.
//!
//! It is read by the thread that reports signs of life, which waits for no lock: all state is in atomics.
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering::SeqCst};
use std::time::Duration;
use weir_env::{Clock, Env, Instant};
use weir_proto::TargetId;
use weir_watch::{Histogram, Object, Reason, WaitGuard, WaitRecord, Watch};

/// Requests whose age is known, out of those in flight. A queue is served in order, so those that find no
/// place here are not older for long.
const PLACES: usize = 64;
/// Places that a request tries.
const TRIES: usize = 4;

/// Requests in flight at one disk.
pub struct DiskWatch {
    clock: Clock,
    under_way: AtomicUsize,
    /// When a request last ended, or the first one began, ns.
    last: AtomicU64,
    /// When the requests in these places began, ns; 0: free.
    begun: [AtomicU64; PLACES],
    next_place: AtomicUsize,
    watch: Watch,
    target: Object,
    seconds: Histogram,
}

/// A request in flight. [`UnderWay::end`] ends it; if it is dropped before, its caller no longer waits.
pub struct UnderWay {
    disk: Arc<DiskWatch>,
    begun: Instant,
    place: Option<usize>,
    _wait: WaitGuard,
}

impl DiskWatch {
    pub fn new(env: &Env, target: TargetId) -> Arc<DiskWatch> {
        let (clock, watch) = (env.clock.clone(), env.watch.clone());
        let seconds = watch.histogram("weir_store_disk_seconds", ("target", &target.to_string()));
        let target = Object::new("target", target.0.into());
        Arc::new(DiskWatch {
            clock,
            under_way: AtomicUsize::new(0),
            last: AtomicU64::new(0),
            begun: [const { AtomicU64::new(0) }; PLACES],
            next_place: AtomicUsize::new(0),
            watch,
            target,
            seconds,
        })
    }
    pub fn begin(self: &Arc<Self>) -> UnderWay {
        let now = self.clock.now();
        // First, so that no reader sees a request in flight beside the end of one long ago.
        if self.under_way.load(SeqCst) == 0 {
            self.last.fetch_max(now.0, SeqCst);
        }
        self.under_way.fetch_add(1, SeqCst);
        let wait = self.watch.wait_since(now.0, WaitRecord::new(Reason::Disk, self.target));
        UnderWay { disk: self.clone(), begun: now, place: self.take_place(now), _wait: wait }
    }
    fn take_place(&self, now: Instant) -> Option<usize> {
        let first = self.next_place.fetch_add(1, SeqCst);
        let free =
            |place: &usize| self.begun[*place].compare_exchange(0, now.0.max(1), SeqCst, SeqCst).is_ok();
        (first..first + TRIES).map(|place| place % PLACES).find(free)
    }
    /// How long no request has ended.
    pub fn stalled_for(&self) -> Duration {
        match self.under_way.load(SeqCst) {
            0 => Duration::ZERO,
            _ => self.clock.now().since(Instant(self.last.load(SeqCst))),
        }
    }
    /// The age of the oldest request in flight.
    pub fn oldest(&self) -> Duration {
        let begun = self.begun.iter().map(|place| place.load(SeqCst)).filter(|begun| *begun > 0).min();
        begun.map_or(Duration::ZERO, |begun| self.clock.now().since(Instant(begun)))
    }
}

impl UnderWay {
    pub fn end(self) {
        let now = self.disk.clock.now();
        self.disk.last.fetch_max(now.0, SeqCst);
        self.disk.seconds.add(now.since(self.begun).as_nanos() as u64);
    }
}
impl Drop for UnderWay {
    fn drop(&mut self) {
        if let Some(place) = self.place {
            self.disk.begun[place].store(0, SeqCst);
        }
        let before = self.disk.under_way.fetch_sub(1, SeqCst);
        assert!(before > 0, "disk work ended that had not begun: a disk that hangs would not show");
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
            assert!(watch.oldest() >= 7 * second, "{:?}", watch.oldest());
            let many: Vec<UnderWay> = (0..2 * PLACES).map(|_| watch.begin()).collect();
            slow.end();
            clock.sleep(second).await;
            assert_eq!(watch.oldest(), second);
            drop(many);
            assert_eq!(watch.stalled_for(), Duration::ZERO, "it has nothing to do");
            assert_eq!(watch.oldest(), Duration::ZERO);
        });
    }
}
