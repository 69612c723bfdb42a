//! The state of the links of one node: which are cut, since when, and through which node calls go meanwhile.
use crate::decide::Strikes;
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use weir_env::{Backoff, Instant, watch};
use weir_proto::{Error, NodeId};

/// Deadline of a reply through another node; then the next one is tried.
pub(super) const AROUND_PATIENCE: Duration = Duration::from_millis(500);
/// Other nodes that one probe tries.
pub(super) const AROUND_MAX: usize = 3;
/// Deadline of the direct probe when no reply arrives through another node either.
pub(super) const DIRECT_PATIENCE: Duration = Duration::from_secs(2);
/// Between two probes of one link.
pub(super) const PROBE_PAUSE: Duration = Duration::from_secs(1);
/// Between two probes of one link, if they are late themselves: the machines are busy, and each probe is
/// several new connections.
const LATE_PROBES: Backoff = Backoff { first: PROBE_PAUSE, max: Duration::from_secs(30) };

/// State of the links to nodes. At most one entry per node of the map.
pub(crate) struct Links {
    of: Mutex<BTreeMap<NodeId, Link>>,
    /// Number of cuts found.
    pub(super) changed: watch::Sender<u64>,
}

impl Default for Links {
    fn default() -> Links {
        Links { of: Mutex::default(), changed: watch::Sender::new(0) }
    }
}

#[derive(Default)]
struct Link {
    /// No probe before this: one is running, or has just ended.
    not_before: Instant,
    /// Late probes since the last one that was answered quickly, or found a cut.
    late: u32,
    cut: Option<Cut>,
    /// Cuts so far: each further one keeps the link unused for longer.
    strikes: Option<Strikes>,
}

#[derive(Clone)]
pub(super) struct Cut {
    pub(super) since: Instant,
    /// The node that forwards calls.
    pub(super) via: NodeId,
    pub(super) why: String,
}

impl Links {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<NodeId, Link>> {
        self.of.lock().unwrap_or_else(PoisonError::into_inner)
    }
    pub(super) fn cut(&self, node: NodeId) -> Option<Cut> {
        self.lock().get(&node)?.cut.clone()
    }
    pub fn is_cut(&self, node: NodeId) -> bool {
        self.lock().get(&node).is_some_and(|link| link.cut.is_some())
    }
    /// True: no probe is running; the caller starts one.
    pub(super) fn begin_probe(&self, node: NodeId, now: Instant) -> bool {
        let mut links = self.lock();
        let link = links.entry(node).or_default();
        let free = link.cut.is_none() && now >= link.not_before;
        if free {
            // Longer than a probe may take; its end sets an earlier time.
            let longest = DIRECT_PATIENCE + AROUND_PATIENCE * AROUND_MAX as u32 + PROBE_PAUSE;
            link.not_before = now + longest;
        }
        free
    }
    /// No cut was found; `dice` of 2^16.
    pub(super) fn end_probe(&self, node: NodeId, now: Instant, was_late: bool, dice: u64) {
        let mut links = self.lock();
        let link = links.entry(node).or_default();
        let pause = if was_late { LATE_PROBES.pause(link.late, dice) } else { PROBE_PAUSE };
        link.late = if was_late { link.late.saturating_add(1) } else { 0 };
        link.not_before = now + pause;
    }
    pub(super) fn note_cut(&self, node: NodeId, now: Instant, via: NodeId, why: &Error) {
        {
            let mut links = self.lock();
            let link = links.entry(node).or_default();
            (link.not_before, link.late) = (now + PROBE_PAUSE, 0);
            link.strikes = Some(Strikes::one_more(link.strikes, now));
            link.cut = Some(Cut { since: now, via, why: why.to_string() });
        }
        self.changed.send_modify(|n| *n += 1);
    }
    /// Another node forwards calls from now on, if `failed` is the one that did.
    pub(super) fn change_via(&self, node: NodeId, failed: NodeId, next: NodeId) {
        if let Some(cut) = self.lock().get_mut(&node).and_then(|link| link.cut.as_mut())
            && cut.via == failed
        {
            cut.via = next;
        }
    }
    pub(super) fn may_be_tried(&self, node: NodeId, now: Instant) -> bool {
        self.lock().get(&node).and_then(|link| link.strikes).is_none_or(|s| !s.is_demoted(now))
    }
    pub(super) fn clear(&self, node: NodeId) {
        if let Some(link) = self.lock().get_mut(&node) {
            link.cut = None;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn late_probes_of_a_link_become_rare() {
        let (links, node) = (Links::default(), NodeId(1));
        let mut now = Instant(0);
        let mut pauses = Vec::new();
        for was_late in [true, true, true, true, true, true, true, false, true, true] {
            assert!(links.begin_probe(node, now), "after the pause");
            assert!(!links.begin_probe(node, now), "one at a time");
            links.end_probe(node, now, was_late, 0);
            let ended = now;
            while !links.begin_probe(node, now) {
                now = now + Duration::from_millis(100);
            }
            pauses.push(now.since(ended));
            links.end_probe(node, ended, was_late, 0);
            now = now + Duration::from_secs(60);
        }
        let quick = pauses[7];
        assert_eq!(quick, PROBE_PAUSE);
        assert!(pauses[..7].is_sorted() && pauses[6] >= LATE_PROBES.max / 2, "{pauses:?}");
        assert!(pauses[8] <= PROBE_PAUSE, "a quick answer makes up for all: {pauses:?}");
    }
}
