//! A client's knowledge of the names in one directory, while it holds a lease on it.
//!
//! Invariants: an answer about a name is the same as the leader's. A name that an operation of this client is
//! changing has no answer before the outcome is known, and never has one if it stays unknown. A name is
//! absent because the leader replied so, or because all existing names are known: in a directory that was
//! made under this lease, or was listed from its start to its end. Pure state: leases and messages are the
//! caller's.
use bytes::Bytes;
use std::collections::BTreeMap;
use weir_proto::InodeId;
use weir_proto::volume::TRASH;

/// Names kept per directory: more are asked for again.
const NAMES_MAX: usize = 200_000;

#[derive(Default)]
pub struct Names {
    known: BTreeMap<Bytes, Option<InodeId>>,
    /// Every existing name is known.
    complete: bool,
    /// Being changed by this client's operations, which also end when the lease is gone.
    changing: BTreeMap<Bytes, Changing>,
    /// A listing from the start without a gap: the cookie at which it continues.
    listed_to: Option<u64>,
    change: u64,
    /// The number of times that other clients got the right to change names here.
    revokes: u64,
}

struct Changing {
    operations: u32,
    /// There were several changes at once, or other clients may have changed the name since: the last change
    /// is not known.
    crossed: bool,
    revokes: u64,
}

/// The outcome of this client's change of a name.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Outcome {
    /// The name has this target now, or none.
    Leads(Option<InodeId>),
    /// Refused: nothing changed.
    Same,
    Unknown,
}

impl Names {
    /// `None`: ask.
    pub fn get(&self, name: &[u8]) -> Option<Option<InodeId>> {
        if self.changing.contains_key(name) {
            return None;
        }
        // A volume's trash is in no listing.
        self.known.get(name).copied().or((self.complete && name != TRASH).then_some(None))
    }

    /// How many are known.
    pub fn count(&self) -> usize {
        self.known.len()
    }

    /// Shows whether this client's changes, or the loss of the lease, crossed a request: then its answer is
    /// not kept.
    pub fn change(&self) -> u64 {
        self.change
    }

    pub fn keep(&mut self, name: &[u8], ino: Option<InodeId>) {
        if self.known.len() >= NAMES_MAX {
            self.forget_all();
        }
        self.known.insert(Bytes::copy_from_slice(name), ino);
    }

    /// Whether every existing name is known.
    pub fn are_complete(&self) -> bool {
        self.complete
    }
    /// A file was created here locally.
    pub fn note_created(&mut self, name: &[u8], ino: InodeId) {
        self.change += 1;
        self.keep(name, Some(ino));
    }

    /// A file was removed here locally.
    pub fn note_removed(&mut self, name: &[u8]) {
        self.change += 1;
        self.keep(name, None);
    }

    /// The directory was made just now, under the held lease: it is empty except for names learned since.
    pub fn begin_empty(&mut self) {
        self.complete = self.change == 0;
    }

    /// A part of a listing is kept: the entries after the cookie `after` up to `to`, the last part if `end`.
    pub fn listed(&mut self, after: u64, to: u64, end: bool) {
        let whole = after == 0 || self.listed_to == Some(after);
        self.listed_to = (whole && !end).then_some(to);
        self.complete |= whole && end;
    }

    /// A part of a listing that is not kept.
    pub fn listing_broken(&mut self) {
        self.listed_to = None;
    }

    /// An operation of this client that changes `name` begins.
    pub fn begin_change(&mut self, name: &Bytes) {
        self.change += 1;
        let revokes = self.revokes;
        let changing =
            self.changing.entry(name.clone()).or_insert(Changing { operations: 0, crossed: false, revokes });
        changing.operations += 1;
        changing.crossed |= changing.operations > 1;
    }

    /// The operation ended. `leased`: the lease is held (again).
    pub fn end_change(&mut self, name: &Bytes, outcome: Outcome, leased: bool) {
        self.change += 1;
        let mut outcome = outcome;
        if let Some(changing) = self.changing.get_mut(name) {
            assert!(changing.operations > 0, "a change that ends has begun");
            changing.operations -= 1;
            if changing.crossed || changing.revokes != self.revokes {
                outcome = Outcome::Unknown;
            }
            if changing.operations == 0 {
                self.changing.remove(name);
            }
        }
        match outcome {
            Outcome::Leads(ino) if leased => self.keep(name, ino),
            Outcome::Same if leased => {}
            _ => self.forget(name),
        }
    }

    /// A revoke came, or a release begins: answers to earlier requests are outdated.
    pub fn revoked(&mut self) {
        self.revokes += 1;
    }

    /// The lease is gone.
    pub fn forget_all(&mut self) {
        self.change += 1;
        self.known.clear();
        self.complete = false;
        self.listed_to = None;
    }

    fn forget(&mut self, name: &Bytes) {
        self.known.remove(name);
        self.complete = false;
        self.listed_to = None;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    const F: InodeId = InodeId(5);

    fn name(text: &'static str) -> Bytes {
        Bytes::from_static(text.as_bytes())
    }

    #[test]
    fn in_a_new_directory_only_what_was_made_is_there() {
        let mut names = Names::default();
        assert_eq!(names.get(b"a"), None, "nothing is known before");
        names.begin_empty();
        assert_eq!(names.get(b"a"), Some(None));
        names.begin_change(&name("a"));
        assert_eq!(names.get(b"a"), None, "it is being made");
        assert_eq!(names.get(b"b"), Some(None));
        names.end_change(&name("a"), Outcome::Leads(Some(F)), true);
        assert_eq!(names.get(b"a"), Some(Some(F)));
        names.forget_all();
        assert_eq!((names.get(b"a"), names.get(b"b")), (None, None));
    }

    #[test]
    fn a_directory_with_changes_is_not_taken_for_empty() {
        let mut names = Names::default();
        names.begin_change(&name("a"));
        names.begin_empty();
        assert_eq!(names.get(b"b"), None);
    }

    #[test]
    fn a_listing_without_a_gap_knows_all() {
        let mut names = Names::default();
        names.keep(b"a", Some(F));
        names.listed(0, 3, false);
        names.listed(3, 9, false);
        assert_eq!(names.get(b"z"), None, "its end is not known yet");
        names.listed(9, 12, true);
        assert_eq!(names.get(b"z"), Some(None));

        let mut names = Names::default();
        names.listed(0, 3, false);
        names.listed(4, 9, true);
        assert_eq!(names.get(b"z"), None, "a part is missing");
        names.listed(0, 3, false);
        names.listing_broken();
        names.listed(3, 9, true);
        assert_eq!(names.get(b"z"), None, "a part was not kept");
    }

    #[test]
    fn a_refused_change_keeps_names_an_unknown_outcome_drops_them() {
        let mut names = Names::default();
        names.begin_empty();
        for outcome in [Outcome::Leads(Some(F)), Outcome::Same] {
            names.begin_change(&name("a"));
            names.end_change(&name("a"), outcome, true);
            assert_eq!(names.get(b"a"), Some(Some(F)));
        }
        names.begin_change(&name("a"));
        names.end_change(&name("a"), Outcome::Unknown, true);
        assert_eq!((names.get(b"a"), names.get(b"b")), (None, None));
    }

    #[test]
    fn an_answer_crossed_by_a_revoke_is_dropped() {
        let mut names = Names::default();
        names.begin_change(&name("a"));
        names.revoked();
        names.end_change(&name("a"), Outcome::Leads(Some(F)), true);
        assert_eq!(names.get(b"a"), None);
    }

    #[derive(Clone, Debug)]
    enum Event {
        Begin(u8),
        /// Of the operation with this index among those in flight; whether it was carried out, whether that
        /// is known.
        End(usize, bool, bool),
        Ask(u8),
        List,
        LoseLease,
    }

    fn event() -> impl Strategy<Value = Event> {
        prop_oneof![
            (0..4_u8).prop_map(Event::Begin),
            (any::<usize>(), any::<bool>(), any::<bool>()).prop_map(|(n, d, k)| Event::End(n, d, k)),
            (0..4_u8).prop_map(Event::Ask),
            Just(Event::List),
            Just(Event::LoseLease),
        ]
    }

    proptest! {
        /// Compared with a directory in which only this client's operations happen, each at its end.
        #[test]
        fn known_names_match_the_directory(events in proptest::collection::vec(event(), 0..60)) {
            let mut truth: BTreeMap<Bytes, InodeId> = BTreeMap::new();
            let mut names = Names::default();
            names.begin_empty();
            let mut under_way: Vec<Bytes> = Vec::new();
            let mut next = 1;
            for event in events {
                match event {
                    Event::Begin(n) => {
                        let name = Bytes::from(vec![b'a' + n]);
                        names.begin_change(&name);
                        under_way.push(name);
                    }
                    Event::End(n, done, reported) if !under_way.is_empty() => {
                        let name = under_way.remove(n % under_way.len());
                        let mut now = truth.get(&name).copied();
                        if done {
                            next += 1;
                            now = (next % 3 > 0).then_some(InodeId(next));
                            match now {
                                Some(ino) => drop(truth.insert(name.clone(), ino)),
                                None => drop(truth.remove(&name)),
                            }
                        }
                        let outcome = match (done, reported) {
                            (_, false) => Outcome::Unknown,
                            (true, true) => Outcome::Leads(now),
                            (false, true) => Outcome::Same,
                        };
                        names.end_change(&name, outcome, true);
                    }
                    Event::End(..) => {}
                    Event::Ask(n) => {
                        let name = [b'a' + n];
                        names.keep(&name, truth.get(&name[..]).copied());
                    }
                    Event::List => {
                        truth.iter().for_each(|(name, ino)| names.keep(name, Some(*ino)));
                        names.listed(0, 9, true);
                    }
                    Event::LoseLease => names.forget_all(),
                }
                for n in 0..4 {
                    let name = [b'a' + n];
                    if let Some(known) = names.get(&name) {
                        prop_assert_eq!(known, truth.get(&name[..]).copied());
                    }
                }
            }
        }
    }
}
