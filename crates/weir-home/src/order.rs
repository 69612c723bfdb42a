//! Which changes of names may run side by side, and which must wait: pure.
//!
//! A window is a run of changes in the order of the changelog, with paths as they are at home when their turn comes. Always
//! holds: whatever order a window is run in, the result is that of one after the other; and if all of it that was not *told*
//! is run again from its beginning after a crash (in any state it can be in then), each change finds its own result, and
//! the result is the same. So a change that would hide the result of an earlier one waits until that one is told: until its
//! receipt is durable with whoever gives out the windows. For most pairs it is enough that the earlier one is done.
//!
//! Refuses to know: what the changes do beyond their paths; homes.
use crate::HomePath;
use std::collections::{BTreeMap, BTreeSet};
use weir_proto::InodeId;

/// A change, as far as order goes.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NameOp {
    pub what: NameChange,
    /// What it is about, also under other names (hard links): the inode made, moved, replaced, removed or changed;
    /// both of an exchange.
    pub inodes: Vec<InodeId>,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub enum NameChange {
    MakeDir(HomePath),
    /// Anything but a directory.
    Make(HomePath),
    Link {
        existing: HomePath,
        path: HomePath,
    },
    Remove(HomePath),
    Rename {
        from: HomePath,
        to: HomePath,
    },
    Exchange {
        a: HomePath,
        b: HomePath,
    },
    SetAttrs(HomePath),
    Resize(HomePath),
}

impl NameChange {
    fn paths(&self) -> impl Iterator<Item = &HomePath> {
        let (one, other) = match self {
            NameChange::MakeDir(p) | NameChange::Make(p) | NameChange::Remove(p) => (p, None),
            NameChange::SetAttrs(p) | NameChange::Resize(p) => (p, None),
            NameChange::Link { existing, path } => (existing, Some(path)),
            NameChange::Rename { from, to } => (from, Some(to)),
            NameChange::Exchange { a, b } => (a, Some(b)),
        };
        std::iter::once(one).chain(other)
    }
}

/// What a later change waits for an earlier one to be.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Wait {
    /// Nothing: they may run side by side.
    No,
    UntilDone,
    UntilTold,
}

/// What `later` waits for.
pub fn wait(earlier: &NameOp, later: &NameOp) -> Wait {
    use NameChange::*;
    let overlap = earlier.what.paths().any(|a| later.what.paths().any(|b| a.overlaps(b)));
    let same_inode = earlier.inodes.iter().any(|inode| later.inodes.contains(inode));
    if !overlap && !same_inode {
        return Wait::No;
    }
    let below = |path: &HomePath, dir: &HomePath| path != dir && path.is_within(dir);
    match (&earlier.what, &later.what) {
        // A new empty file gets its first attributes again, and then the later ones.
        (Make(a), SetAttrs(b)) if a == b => Wait::UntilDone,
        _ if same_inode => Wait::UntilTold,
        // What is done below a directory does not care for its attributes.
        (SetAttrs(dir), _) if later.what.paths().all(|path| below(path, dir) || !path.overlaps(dir)) => {
            Wait::No
        }
        // A directory that is there already is found again, whatever is in it.
        (MakeDir(dir), _) if later.what.paths().all(|path| below(path, dir) || !path.overlaps(dir)) => {
            Wait::UntilDone
        }
        // Its attributes come last, because each change below it sets its time.
        (_, SetAttrs(dir)) if earlier.what.paths().all(|path| below(path, dir) || !path.overlaps(dir)) => {
            Wait::UntilDone
        }
        // What is gone with the directory it was in is gone.
        (Remove(path), Remove(dir)) if below(path, dir) => Wait::UntilDone,
        _ => Wait::UntilTold,
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Progress {
    Waiting,
    Given,
    Done,
    Told,
}

/// A window under way.
#[derive(Debug)]
pub struct Window {
    progress: Vec<Progress>,
    /// Changes that each one still waits for.
    waits_for: Vec<usize>,
    /// Who waits for each one, and for what.
    waiters: Vec<Vec<(usize, Wait)>>,
    ready: BTreeSet<usize>,
}

impl Window {
    pub fn new(ops: &[NameOp]) -> Window {
        let mut window = Window {
            progress: vec![Progress::Waiting; ops.len()],
            waits_for: vec![0; ops.len()],
            waiters: vec![Vec::new(); ops.len()],
            ready: BTreeSet::new(),
        };
        let mut seen = Seen::default();
        for (later, op) in ops.iter().enumerate() {
            for earlier in seen.related(op) {
                match wait(&ops[earlier], op) {
                    Wait::No => {}
                    wait => {
                        window.waiters[earlier].push((later, wait));
                        window.waits_for[later] += 1;
                    }
                }
            }
            if window.waits_for[later] == 0 {
                window.ready.insert(later);
            }
            seen.add(later, op);
        }
        window
    }

    /// Gives out, in their order, at most `limit` changes that may run now.
    pub fn take_ready(&mut self, limit: usize) -> Vec<usize> {
        let taken: Vec<usize> = self.ready.iter().copied().take(limit).collect();
        for n in &taken {
            self.ready.remove(n);
            self.progress[*n] = Progress::Given;
        }
        taken
    }

    /// It is at home.
    pub fn done(&mut self, n: usize) {
        if matches!(self.progress[n], Progress::Waiting | Progress::Given) {
            self.progress[n] = Progress::Done;
            self.release(n, Wait::UntilDone);
        }
    }

    /// Its receipt is durable: it will not be run again.
    pub fn told(&mut self, n: usize) {
        self.done(n);
        if self.progress[n] != Progress::Told {
            self.progress[n] = Progress::Told;
            self.release(n, Wait::UntilTold);
        }
    }

    /// It could not be done and is to be given out once more.
    pub fn again(&mut self, n: usize) {
        if self.progress[n] == Progress::Given {
            self.progress[n] = Progress::Waiting;
            self.ready.insert(n);
        }
    }

    pub fn is_told(&self) -> bool {
        self.progress.iter().all(|p| *p == Progress::Told)
    }

    /// So many from the beginning are done: what can be told if the receipts go in order.
    pub fn done_prefix(&self) -> usize {
        self.progress.iter().take_while(|p| matches!(p, Progress::Done | Progress::Told)).count()
    }

    fn release(&mut self, n: usize, reached: Wait) {
        let mut left = Vec::new();
        for (waiter, wait) in std::mem::take(&mut self.waiters[n]) {
            if wait > reached {
                left.push((waiter, wait));
                continue;
            }
            self.waits_for[waiter] -= 1;
            if self.waits_for[waiter] == 0 && self.progress[waiter] == Progress::Waiting {
                self.ready.insert(waiter);
            }
        }
        self.waiters[n] = left;
    }
}

/// Earlier changes by what they touch, so that a window of thousands is not compared pair by pair.
#[derive(Default)]
struct Seen {
    paths: BTreeMap<HomePath, Vec<usize>>,
    inodes: BTreeMap<InodeId, Vec<usize>>,
}

impl Seen {
    fn related(&self, op: &NameOp) -> BTreeSet<usize> {
        let mut related = BTreeSet::new();
        for path in op.what.paths() {
            let mut above = Some(path.clone());
            while let Some(at) = above {
                related.extend(self.paths.get(&at).into_iter().flatten());
                above = at.parent();
            }
            let from_here = self.paths.range(path.clone()..);
            let below = from_here.take_while(|(at, _)| at.is_within(path));
            related.extend(below.flat_map(|(_, ops)| ops));
        }
        related.extend(op.inodes.iter().filter_map(|inode| self.inodes.get(inode)).flatten());
        related
    }
    fn add(&mut self, n: usize, op: &NameOp) {
        for path in op.what.paths() {
            self.paths.entry(path.clone()).or_default().push(n);
        }
        for inode in &op.inodes {
            self.inodes.entry(*inode).or_default().push(n);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(text: &str) -> HomePath {
        HomePath::parse(text).unwrap()
    }
    fn op(what: NameChange, inode: u64) -> NameOp {
        NameOp { what, inodes: vec![InodeId(inode)] }
    }
    fn rename(from: &str, to: &str) -> NameChange {
        NameChange::Rename { from: path(from), to: path(to) }
    }

    #[test]
    fn pairs_by_table() {
        use NameChange::*;
        let p = path;
        for (earlier, later, same_inode, wished) in [
            (Make(p("a")), Make(p("b")), false, Wait::No),
            (Make(p("a/b")), Make(p("a/c")), false, Wait::No),
            (Make(p("ab")), rename("a", "c"), false, Wait::No),
            (MakeDir(p("a")), Make(p("a/b")), false, Wait::UntilDone),
            (MakeDir(p("a")), Make(p("a/b/c")), false, Wait::UntilDone),
            (MakeDir(p("a")), SetAttrs(p("a")), true, Wait::UntilTold),
            (Make(p("a")), SetAttrs(p("a")), true, Wait::UntilDone),
            (Make(p("a")), Remove(p("a")), true, Wait::UntilTold),
            (Remove(p("a")), Make(p("a")), false, Wait::UntilTold),
            (Remove(p("a/b")), Remove(p("a")), false, Wait::UntilDone),
            (Remove(p("a")), Remove(p("b")), false, Wait::No),
            (SetAttrs(p("a")), Make(p("a/b")), false, Wait::No),
            (Make(p("a/b")), SetAttrs(p("a")), false, Wait::UntilDone),
            (SetAttrs(p("a")), SetAttrs(p("a")), true, Wait::UntilTold),
            (SetAttrs(p("a")), SetAttrs(p("b")), true, Wait::UntilTold),
            (Make(p("a/b")), rename("a", "c"), false, Wait::UntilTold),
            (rename("a", "c"), Make(p("c/b")), false, Wait::UntilTold),
            (rename("a", "c"), Make(p("a/b")), false, Wait::UntilTold),
            (rename("a/x", "c"), Make(p("a/y")), false, Wait::No),
            (rename("a", "b"), rename("c", "d"), false, Wait::No),
            (MakeDir(p("a")), rename("x", "a/x"), false, Wait::UntilDone),
        ] {
            let (a, b) = (op(earlier, 1), op(later, if same_inode { 1 } else { 2 }));
            assert_eq!(wait(&a, &b), wished, "{a:?}, then {b:?}");
        }
    }

    #[test]
    fn a_window_gives_out_what_may_run() {
        use NameChange::*;
        let ops = [
            op(MakeDir(path("d")), 1),
            op(Make(path("d/f")), 2),
            op(Make(path("g")), 3),
            op(rename("d", "e"), 1),
            op(Remove(path("e/f")), 2),
        ];
        let mut window = Window::new(&ops);
        assert_eq!(window.take_ready(1), [0]);
        assert_eq!(window.take_ready(9), [2]);
        window.done(0);
        assert_eq!(window.take_ready(9), [1]);
        window.again(1);
        assert_eq!(window.take_ready(9), [1]);
        window.done(1);
        assert_eq!((window.take_ready(9), window.done_prefix()), (vec![], 2));
        window.told(0);
        window.told(1);
        assert_eq!(window.take_ready(9), [3]);
        window.told(3);
        assert_eq!(window.take_ready(9), [4]);
        window.told(2);
        window.told(4);
        assert!(window.is_told());
    }

    #[test]
    fn a_large_window_is_ordered_quickly() {
        let mut ops = vec![op(NameChange::MakeDir(path("d")), 1)];
        ops.extend((0..10_000).map(|n| op(NameChange::Make(path(&format!("d/{n}"))), n + 2)));
        let mut window = Window::new(&ops);
        assert_eq!(window.take_ready(usize::MAX), [0]);
        window.done(0);
        assert_eq!(window.take_ready(usize::MAX).len(), 10_000);
    }
}
