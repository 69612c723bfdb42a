//! Files with work that may be assigned to a mover: so that an answer costs as much as it assigns, not as the
//! whole queue.
//!
//! Always holds: a file with assignable work is touched, or is still ahead of the sweep. A change of a file's
//! work, or of an obstacle to it, touches the file. Memory is bounded: beyond the bound only the next sweep
//! finds files.
use std::collections::BTreeSet;
use weir_proto::InodeId;

/// Files that are remembered individually.
const TOUCHED_MAX: usize = 1 << 16;

#[derive(Debug)]
pub struct Ready {
    /// A mover has a part of these already: a growing file continues before others begin.
    soon: BTreeSet<InodeId>,
    touched: BTreeSet<InodeId>,
    /// The last of `touched` that was checked.
    turn: InodeId,
    /// Where the sweep over the whole queue continues.
    sweep: InodeId,
    /// The number of times that it still has to reach the end.
    rounds: u8,
}

impl Default for Ready {
    fn default() -> Ready {
        let (soon, touched) = (BTreeSet::new(), BTreeSet::new());
        Ready { soon, touched, turn: InodeId(0), sweep: InodeId(0), rounds: 1 }
    }
}

impl Ready {
    /// A file has changed. `is_out`: a mover has a part of it.
    pub fn touch(&mut self, ino: InodeId, is_out: bool) {
        if is_out {
            self.soon.insert(ino);
        } else if !self.soon.contains(&ino) {
            self.touched.insert(ino);
            if self.touched.len() > TOUCHED_MAX {
                self.touch_all();
            }
        }
    }

    /// A change that may concern every file. The sweep continues where it is, and then over all of them.
    pub fn touch_all(&mut self) {
        self.touched.clear();
        self.rounds = 2;
    }

    /// Whether a file is touched, or still ahead of the sweep.
    pub fn has(&self, ino: InodeId) -> bool {
        let is_ahead = self.rounds > 1 || self.rounds == 1 && ino >= self.sweep;
        is_ahead || self.touched.contains(&ino) || self.soon.contains(&ino)
    }

    /// Takes the files to check first.
    pub fn take_soon(&mut self) -> BTreeSet<InodeId> {
        std::mem::take(&mut self.soon)
    }
    pub fn put_back(&mut self, ino: InodeId) {
        self.soon.insert(ino);
    }

    /// Touched files, in turns.
    pub fn touched(&self, max: usize) -> Vec<InodeId> {
        let behind = self.touched.range(InodeId(self.turn.0.saturating_add(1))..);
        behind.chain(self.touched.range(..=self.turn)).take(max).copied().collect()
    }
    /// One of them was checked. `settled`: there is nothing more to assign until it is touched.
    pub fn note_collected(&mut self, ino: InodeId, settled: bool) {
        self.turn = ino;
        if settled {
            self.touched.remove(&ino);
        }
    }

    /// Where the sweep continues; none: it is over.
    pub fn sweep_from(&self) -> Option<InodeId> {
        (self.rounds > 0).then_some(self.sweep)
    }
    /// The sweep passed a file.
    pub fn swept(&mut self, ino: InodeId, settled: bool) {
        self.sweep = InodeId(ino.0.saturating_add(1));
        if !settled {
            self.touched.insert(ino);
        }
    }
    /// The sweep reached the end.
    pub fn sweep_ended(&mut self) {
        self.sweep = InodeId(0);
        self.rounds = self.rounds.saturating_sub(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn inodes(numbers: impl IntoIterator<Item = u64>) -> Vec<InodeId> {
        numbers.into_iter().map(InodeId).collect()
    }

    #[test]
    fn touched_files_have_their_turns() {
        let mut ready = Ready::default();
        inodes([5, 3, 9]).into_iter().for_each(|ino| ready.touch(ino, false));
        assert_eq!(ready.touched(2), inodes([3, 5]));
        ready.note_collected(InodeId(3), false);
        assert_eq!(ready.touched(9), inodes([5, 9, 3]));
        ready.note_collected(InodeId(5), true);
        assert_eq!(ready.touched(9), inodes([9, 3]));
    }

    #[test]
    fn files_of_a_mover_go_first_and_are_listed_once() {
        let mut ready = Ready::default();
        ready.touch(InodeId(1), true);
        ready.touch(InodeId(1), false);
        ready.touch(InodeId(2), false);
        assert_eq!(ready.touched(9), inodes([2]));
        assert_eq!(ready.take_soon().into_iter().collect::<Vec<_>>(), inodes([1]));
        assert!(ready.take_soon().is_empty());
    }

    #[test]
    fn a_restarted_sweep_passes_all_again() {
        let mut ready = Ready::default();
        ready.swept(InodeId(7), true);
        ready.touch_all();
        assert_eq!(ready.sweep_from(), Some(InodeId(8)));
        ready.sweep_ended();
        assert_eq!(ready.sweep_from(), Some(InodeId(0)));
        ready.sweep_ended();
        assert_eq!(ready.sweep_from(), None);
    }

    #[test]
    fn too_many_are_left_to_the_sweep() {
        let mut ready = Ready::default();
        ready.sweep_ended();
        for ino in 1..=TOUCHED_MAX as u64 + 1 {
            ready.touch(InodeId(ino), false);
        }
        assert!(ready.touched(1).is_empty());
        assert!(ready.sweep_from().is_some());
    }
}
