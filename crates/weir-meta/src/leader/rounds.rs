//! Rounds of retries: operations that wait for the same are woken together, and again only when all of them
//! have tried.
//!
//! An event may end the wait of any of them. Without bounds a thousand operations that wait for the leases of
//! 64 clients would try 64 times each, and the leader would do nothing else. So they wait in groups whose
//! wait ends together, and an event wakes those that it may concern; events that come while a round runs are
//! followed by one more round, after it.
//!
//! Invariants: after an event each operation that waited then, in a group that it concerns, tries. A round
//! begins only after the former one has ended. Knows nothing of the operations.
use std::collections::BTreeMap;
use std::sync::Arc;
use tokio::sync::Notify;
use tokio::sync::futures::OwnedNotified;

#[derive(Default)]
pub struct Rounds {
    bell: Arc<Notify>,
    /// Rounds that have begun.
    begun: u64,
    /// Operations of the last round that have not tried yet.
    trying: usize,
    /// Operations that began to wait since it began.
    waiting: usize,
    /// An event came while it ran.
    again: bool,
}

/// A waiting operation; ended by [`Rounds::leave`].
#[derive(Debug)]
pub struct Place {
    /// The rounds that had begun before it.
    after: u64,
}

impl Rounds {
    /// An operation begins to wait.
    pub fn wait(&mut self) -> (Place, OwnedNotified) {
        self.waiting += 1;
        (Place { after: self.begun }, self.bell.clone().notified_owned())
    }

    /// It tries now, or does not wait any more.
    pub fn leave(&mut self, place: Place) {
        if place.after == self.begun {
            self.waiting -= 1;
            return;
        }
        self.trying -= 1;
        if self.trying == 0 && std::mem::take(&mut self.again) {
            self.begin();
        }
    }

    /// An event that may end waits.
    pub fn wake(&mut self) {
        if self.trying > 0 {
            self.again = true;
        } else {
            self.begin();
        }
    }

    pub fn is_empty(&self) -> bool {
        self.trying + self.waiting == 0
    }

    fn begin(&mut self) {
        self.begun += 1;
        self.trying = std::mem::take(&mut self.waiting);
        self.bell.notify_waiters();
    }
}

/// Operations that wait in groups.
pub struct Groups<K>(BTreeMap<K, Rounds>);

impl<K> Default for Groups<K> {
    fn default() -> Groups<K> {
        Groups(BTreeMap::new())
    }
}

impl<K: Ord> Groups<K> {
    pub fn wait(&mut self, group: K) -> (Place, OwnedNotified) {
        self.0.entry(group).or_default().wait()
    }
    pub fn leave(&mut self, group: &K, place: Place) {
        let Some(rounds) = self.0.get_mut(group) else { return };
        rounds.leave(place);
        if rounds.is_empty() {
            self.0.remove(group);
        }
    }
    /// An event that may end the waits of some groups.
    pub fn wake(&mut self, concerns: impl Fn(&K) -> bool) {
        self.0.iter_mut().filter(|(group, _)| concerns(group)).for_each(|(_, rounds)| rounds.wake());
    }
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::pin::Pin;
    use std::task::{Context, Waker};

    /// Operations that wait, and the number of their tries.
    struct Herd {
        rounds: Rounds,
        waiting: Vec<(Place, Pin<Box<OwnedNotified>>)>,
        tries: usize,
    }

    impl Herd {
        fn of(count: usize) -> Herd {
            let mut herd = Herd { rounds: Rounds::default(), waiting: Vec::new(), tries: 0 };
            (0..count).for_each(|_| herd.wait());
            herd
        }
        fn wait(&mut self) {
            let (place, bell) = self.rounds.wait();
            self.waiting.push((place, Box::pin(bell)));
        }
        /// One of those that were woken tries, and waits again. False: none was.
        fn try_one(&mut self) -> bool {
            let mut cx = Context::from_waker(Waker::noop());
            let woken = self.waiting.iter_mut().position(|(_, bell)| bell.as_mut().poll(&mut cx).is_ready());
            let Some(at) = woken else { return false };
            let (place, _) = self.waiting.remove(at);
            self.rounds.leave(place);
            self.tries += 1;
            self.wait();
            true
        }
    }

    #[test]
    fn events_during_a_round_are_followed_by_one_more() {
        let mut herd = Herd::of(100);
        for _ in 0..64 {
            herd.rounds.wake();
            herd.try_one(); // the leases of 64 clients return while it runs
        }
        while herd.try_one() {}
        // The last one of the first round has tried after all of these events.
        assert_eq!(herd.tries, 199, "one round for the first event, one for all others");
        herd.rounds.wake();
        while herd.try_one() {}
        assert_eq!(herd.tries, 299);
    }

    #[test]
    fn operations_that_wait_at_an_event_try_after_it() {
        let mut herd = Herd::of(3);
        herd.rounds.wake();
        assert!(herd.try_one());
        // One has tried before this event, two are still to try.
        herd.rounds.wake();
        assert!(herd.try_one() && herd.try_one());
        assert!(herd.try_one() && herd.try_one() && !herd.try_one(), "the last of these tried after it");
    }

    #[test]
    fn an_operation_that_is_given_up_holds_no_round_up() {
        let mut herd = Herd::of(3);
        herd.rounds.wake();
        herd.rounds.wake();
        let given_up: Vec<_> = herd.waiting.drain(..2).collect();
        given_up.into_iter().for_each(|(place, _)| herd.rounds.leave(place));
        assert!(herd.try_one(), "the last of the first round");
        assert!(!herd.try_one(), "it tried after the second event");
        let (place, _) = herd.waiting.remove(0);
        herd.rounds.leave(place);
        assert!(herd.rounds.is_empty());
        herd.rounds.wake();
        herd.wait();
        assert!(!herd.try_one(), "no event since it waits");
    }
}
