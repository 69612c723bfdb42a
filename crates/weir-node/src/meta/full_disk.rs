//! When a leader whose disk is full gives up the lead, so that a copy with room can have it.
//!
//! Once, at first: the other one may have no room either, and then the lead must not go to and fro. The pause
//! before the next time doubles.
use super::*;
use weir_kv::Kv;

/// A journal that is folded meanwhile has room again.
const FULL_FOR: Duration = Duration::from_secs(3);
const PAUSE_FIRST: Duration = Duration::from_secs(5);
const PAUSE_MAX: Duration = Duration::from_secs(600);

/// The times at which this node gave up the lead for want of space.
#[derive(Default, Debug)]
pub struct HandingOver {
    next: Option<Instant>,
    times: u32,
}

impl HandingOver {
    /// Whether the lead may be given up, or claimed again after that.
    pub fn may(&self, now: Instant) -> bool {
        self.next.is_none_or(|next| now >= next)
    }

    /// The lead is given up now.
    pub fn note(&mut self, now: Instant) {
        // The last time was long ago.
        if self.next.is_some_and(|next| now.since(next) >= PAUSE_MAX) {
            self.times = 0;
        }
        let pause = PAUSE_FIRST.saturating_mul(1 << self.times.min(16)).min(PAUSE_MAX);
        self.next = Some(now + pause);
        self.times += 1;
    }

    /// Whether a leader that has refused changes since then gives up the lead, if there is a copy that can
    /// have it.
    pub fn is_due(&self, refuses_since: Option<Instant>, now: Instant) -> bool {
        refuses_since.is_some_and(|since| now.since(since) >= FULL_FOR) && self.may(now)
    }
}

/// How the disk of a metadata node is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MetaSpace {
    Enough,
    /// Names cannot be created; other changes can be made.
    Short,
    /// Every change waits.
    Full,
}

impl MetaNode {
    /// For reports: how its disk is now.
    pub fn space(&self) -> Arc<dyn Fn() -> MetaSpace + Send + Sync> {
        let follower = self.service.follower.clone();
        Arc::new(move || match follower.engine() {
            Some(engine) if engine.refuses_since().is_some() => MetaSpace::Full,
            Some(engine) if engine.is_space_short() => MetaSpace::Short,
            Some(_) | None => MetaSpace::Enough,
        })
    }

    fn handing_over(&self) -> MutexGuard<'_, HandingOver> {
        self.handing_over.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends early if the disk has space again.
    pub(super) async fn pause_until_next_lead(&self) {
        let space = self.space();
        while !self.handing_over().may(self.env.clock.now()) {
            self.env.clock.sleep(ANNOUNCE_AGAIN).await;
            if space() == MetaSpace::Enough {
                break;
            }
        }
        self.handing_over().note(self.env.clock.now());
    }

    /// A leader that refuses changes because its disk is full gives up the lead if another copy holds every
    /// record: that one had space for them.
    pub(super) fn hand_over_if_full(&self) {
        let map = self.cluster.map();
        let (me, engine) = (self.cluster.node(), self.service.follower.engine());
        let Some((_, group)) = journal_group_of(&map, &self.own) else { return };
        let is_up = |id: NodeId| map.node(id).is_some_and(|node| node.up);
        let has_other = group.current().any(|id| Some(id) != me && is_up(id));
        let leads = self.leads().is_some() && group.leader == me;
        let now = self.env.clock.now();
        let since = engine.and_then(|engine| engine.refuses_since());
        if leads && has_other && self.handing_over().is_due(since, now) {
            self.handing_over().note(now);
            let what = format!("another copy of namespace {:?} is to lead", self.own.name);
            let full = Error::no_space(what).hint("free space there");
            tracing::warn!("the disk of this node is full: {full}");
            self.leave_lead();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lead_is_given_up_once_and_then_after_growing_pauses() {
        let s = |s: u64| Instant(s * 1_000_000_000);
        let mut over = HandingOver::default();
        assert!(!over.is_due(None, s(9)) && !over.is_due(Some(s(7)), s(9)), "it may have room in a moment");
        let mut now = s(10);
        let mut given_up = Vec::new();
        while now < s(2000) {
            if over.is_due(Some(s(1)), now) {
                over.note(now);
                given_up.push(now.0 / 1_000_000_000);
            }
            now = now + Duration::from_secs(1);
        }
        assert_eq!(given_up, [10, 15, 25, 45, 85, 165, 325, 645, 1245, 1845]);
        // After a long time with space it begins again.
        over.note(s(9000));
        assert!(!over.may(s(9004)) && over.may(s(9005)));
    }
}
