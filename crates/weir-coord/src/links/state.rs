//! The state of the links of one node: which are cut, since when, and through which node calls go meanwhile.
use crate::decide::Strikes;
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use weir_env::{Instant, watch};
use weir_proto::{Error, NodeId};

/// Deadline of a reply through another node; then the next one is tried.
pub(super) const AROUND_PATIENCE: Duration = Duration::from_millis(500);
/// Other nodes that one probe tries.
pub(super) const AROUND_MAX: usize = 3;
/// Deadline of the direct probe when no reply arrives through another node either.
pub(super) const DIRECT_PATIENCE: Duration = Duration::from_secs(2);
/// Between two probes of one link.
pub(super) const PROBE_PAUSE: Duration = Duration::from_secs(1);

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
    pub(super) fn end_probe(&self, node: NodeId, now: Instant, found: Option<(NodeId, &Error)>) {
        {
            let mut links = self.lock();
            let link = links.entry(node).or_default();
            link.not_before = now + PROBE_PAUSE;
            let Some((via, why)) = found else { return };
            link.strikes = Some(Strikes::one_more(link.strikes, now));
            link.cut = Some(Cut { since: now, via, why: why.context.clone() });
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
