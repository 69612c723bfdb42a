//! Histories that random ones found, most of them at a home that knows one name of each file and shows it
//! when it is complete.
use super::*;

/// A home that has files `names`, and under the first name of each what follows after a `=` is known here,
/// too.
async fn at_home(world: &World, names: &[&str], in_parts: bool) -> (Bench, Client) {
    let (mut bench, mut mover) = Bench::start(world, in_parts).await;
    bench.add_relation().await;
    for name in names {
        let (name, other) = name.split_once('=').map_or((*name, None), |(name, other)| (name, Some(other)));
        bench.make(name).await;
        if let Some(other) = other {
            bench.link(name, other).await;
        }
    }
    bench.settle(world).await;
    bench.ship_to_the_end(&mut mover, world).await;
    (bench, mover)
}

impl Bench {
    /// The leader has taken over all that was done.
    pub(super) async fn settle(&self, world: &World) {
        world.node("dice").clock.sleep(std::time::Duration::from_millis(50)).await;
    }
    pub(super) async fn find(&self, path: &str) -> InodeId {
        let (parent, name) = self.place(path).await;
        self.client.lookup(parent, name).await.unwrap().entry.unwrap().attr.ino
    }
    async fn place<'p>(&self, path: &'p str) -> (InodeId, &'p str) {
        let (mut dir, mut rest) = (ROOT, path);
        while let Some((name, below)) = rest.split_once('/') {
            dir = self.client.lookup(dir, name).await.unwrap().entry.unwrap().attr.ino;
            rest = below;
        }
        (dir, rest)
    }
    pub(super) async fn make(&mut self, path: &str) {
        let (parent, name) = self.place(path).await;
        let made = self.client.create(parent, name).await.unwrap();
        let ino = made.entry.attr.ino;
        self.volume.files.insert(ino, Vec::new());
        self.write(&made.entry, 1).await;
        self.client.close(ino, true).await.unwrap();
    }
    pub(super) async fn link(&self, path: &str, other: &str) {
        let (op, ino, (parent, name)) = (self.client.op(), self.find(path).await, self.place(other).await);
        self.client.call(&Link { op, cred: root(), ino, parent, name: b(name) }).await.unwrap();
    }
    pub(super) async fn unlink(&self, path: &str) {
        let (parent, name) = self.place(path).await;
        self.client.unlink(parent, name).await.unwrap();
    }
    pub(super) async fn mkdir(&self, path: &str) {
        let (parent, name) = self.place(path).await;
        self.client.mkdir(parent, name).await.unwrap();
    }
    async fn rmdir(&self, path: &str) {
        let (parent, name) = self.place(path).await;
        let r = Rmdir { op: self.client.op(), cred: root(), parent, name: b(name) };
        self.client.call(&r).await.unwrap();
    }
    pub(super) async fn rename(&self, from: &str, to: &str) {
        self.rename_as(from, to, RenameMode::Replace).await;
    }
    pub(super) async fn rename_as(&self, from: &str, to: &str, mode: RenameMode) {
        let ((parent, name), (new_parent, new_name)) = (self.place(from).await, self.place(to).await);
        let (op, cred, name, new_name) = (self.client.op(), root(), b(name), b(new_name));
        let r = Rename { op, cred, parent, name, new_parent, new_name, mode };
        self.client.call(&r).await.unwrap();
    }
    async fn chmod(&self, name: &str, mode: u32) {
        let (op, ino) = (self.client.op(), self.find(name).await);
        self.client.call(&SetAttr { mode: Some(mode), ..set_attr(op, ino) }).await.unwrap();
    }
    /// As `rewrite` does it; it stays open.
    async fn change(&mut self, name: &str, how: usize) -> InodeId {
        let ino = self.find(name).await;
        self.rewrite(ino, how).await;
        ino
    }
    pub(super) async fn change_and_close(&mut self, name: &str, how: usize) {
        let ino = self.change(name, how).await;
        self.client.close(ino, true).await.unwrap();
    }
    /// A mover changes all names that it is given, sends the pieces of files without their ends, and dies.
    async fn half_way(&mut self, mover: &mut Client, world: &World) {
        self.settle(world).await;
        let does = |extent: Option<&ExtentWork>| extent.is_none_or(|work| work.finish.is_none());
        assert!(self.ship_some(mover, world, || true, does).await, "there was nothing to do");
    }
    /// A mover changes all names that it is given, sends no pieces of files, and dies.
    async fn names_half_way(&mut self, mover: &mut Client, world: &World) {
        self.settle(world).await;
        let does = |extent: Option<&ExtentWork>| extent.is_none();
        assert!(self.ship_some(mover, world, || true, does).await, "there was nothing to do");
    }
    async fn ends_right(&mut self, mover: &mut Client, world: &World) {
        self.settle(world).await;
        self.ship_to_the_end(mover, world).await;
        self.assert_same().await;
    }
}

/// Plays a history from a volume that is at home.
fn history(names: &[&str], then: impl AsyncFnOnce(Bench, Client, World)) {
    history_at(true, names, then);
}
fn history_at(in_parts: bool, names: &[&str], then: impl AsyncFnOnce(Bench, Client, World)) {
    simulate(17, async |world| {
        let _meta = start(&world).await;
        let (bench, mover) = at_home(&world, names, in_parts).await;
        then(bench, mover, world.clone()).await;
    });
}

/// It is replaced under the name that home knows, and goes to another one; this is not reported, and that
/// name is changed again.
#[test]
fn a_file_that_went_out_of_the_way_is_at_its_new_name() {
    history(&["a=b", "c"], async |mut bench, mut mover, world| {
        bench.rename("c", "a").await;
        bench.names_half_way(&mut mover, &world).await;
        bench.rename("b", "d").await;
        bench.ends_right(&mut mover, &world).await;
    });
}

/// The change that it made way for waits for something else; its own bytes do not go to where it was.
#[test]
fn nothing_is_written_where_a_file_may_have_gone_away() {
    history(&["a=b", "c"], async |mut bench, mut mover, world| {
        bench.rename("c", "a").await;
        bench.change_and_close("a", 1).await;
        bench.half_way(&mut mover, &world).await;
        bench.change_and_close("b", 1).await;
        bench.ends_right(&mut mover, &world).await;
    });
}

/// It goes to a name which a change in flight, or an earlier one, gives to another file for now.
#[test]
fn a_relocation_takes_no_name_that_another_file_is_getting() {
    history(&["a=b", "c", "e"], async |mut bench, mut mover, world| {
        bench.rename("e", "k").await;
        bench.rename("c", "a").await;
        bench.client.unlink(ROOT, "k").await.unwrap();
        bench.rename("b", "k").await;
        bench.ends_right(&mut mover, &world).await;
    });
}

/// All names that it has are others' at home, for now.
#[test]
fn a_file_without_a_free_name_waits_under_a_temporary_one() {
    history(&["a=b", "c", "e"], async |mut bench, mut mover, world| {
        bench.rename("c", "a").await;
        bench.rename("b", "e").await;
        bench.client.mkdir(ROOT, "c").await.unwrap();
        bench.ends_right(&mut mover, &world).await;
    });
}

/// It is at home under a name already that it got later, and another one had in between.
#[test]
fn an_intermediate_name_also_exists_at_home_for_a_while() {
    history(&["a=b", "c"], async |mut bench, mut mover, world| {
        bench.rename("c", "a").await;
        bench.make("k").await;
        bench.rename("k", "l").await;
        bench.rename("b", "k").await;
        bench.ends_right(&mut mover, &world).await;
    });
}

/// Parts of it are at home, and are seen before it is called otherwise.
#[test]
fn a_file_that_goes_out_of_the_way_is_not_half_way() {
    history(&["a=b", "c"], async |mut bench, mut mover, world| {
        bench.change_and_close("a", 1).await;
        bench.half_way(&mut mover, &world).await;
        bench.rename("c", "a").await;
        bench.ends_right(&mut mover, &world).await;
    });
}

/// Its parts would stay under the name that it had.
#[test]
fn a_file_that_is_no_more_is_not_renamed_half_way() {
    history(&["a"], async |mut bench, mut mover, world| {
        bench.change_and_close("a", 1).await;
        bench.half_way(&mut mover, &world).await;
        bench.rename("a", "b").await;
        bench.client.unlink(ROOT, "b").await.unwrap();
        bench.ends_right(&mut mover, &world).await;
    });
}
#[test]
fn a_removed_file_is_not_truncated_half_way() {
    history(&["a"], async |mut bench, mut mover, world| {
        bench.change_and_close("a", 1).await;
        bench.half_way(&mut mover, &world).await;
        bench.change_and_close("a", 0).await;
        bench.client.unlink(ROOT, "a").await.unwrap();
        bench.ends_right(&mut mover, &world).await;
    });
}

/// The rest of its first bytes is shipped before the rename, the truncation and later writes after it: for as
/// long as it is open.
#[test]
fn a_renamed_truncated_and_rewritten_file_is_sent_once() {
    history(&[], async |mut bench, mut mover, world| {
        bench.make("a").await;
        bench.rename("a", "b").await;
        bench.change("b", 0).await;
        let open = bench.change("b", 2).await;
        bench.settle(&world).await;
        bench.ship_all(&mut mover, &world).await;
        for _ in 0..2 {
            bench.client.close(open, true).await.unwrap();
        }
        bench.ends_right(&mut mover, &world).await;
    });
}

/// Its attributes were set there, without a report: the state there is not a stranger's.
#[test]
fn a_file_removed_after_unreported_attributes_is_ours() {
    history(&["a"], async |mut bench, mut mover, world| {
        bench.chmod("a", 0o601).await;
        bench.names_half_way(&mut mover, &world).await;
        bench.client.unlink(ROOT, "a").await.unwrap();
        bench.ends_right(&mut mover, &world).await;
    });
}
#[test]
fn a_file_whose_attributes_change_before_a_report_is_ours() {
    history(&["a=b"], async |mut bench, mut mover, world| {
        bench.chmod("a", 0o601).await;
        bench.names_half_way(&mut mover, &world).await;
        bench.chmod("a", 0o602).await;
        bench.client.unlink(ROOT, "a").await.unwrap();
        bench.ends_right(&mut mover, &world).await;
    });
}

/// Home knows one of the two by another name, which it keeps.
#[test]
fn an_exchange_with_a_file_under_another_name_ends_right() {
    for (one, two) in [("b", "c"), ("c", "b")] {
        history(&["a=b", "c"], async |mut bench, mut mover, world| {
            bench.rename_as(one, two, RenameMode::Exchange).await;
            bench.names_half_way(&mut mover, &world).await;
            bench.ends_right(&mut mover, &world).await;
        });
    }
}

/// The change is shipped when that directory does not exist any more.
#[test]
fn files_of_a_removed_directory_are_where_they_moved_to() {
    for in_parts in [false, true] {
        history_at(in_parts, &["a", "b=c"], async |mut bench, mut mover, world| {
            bench.mkdir("d").await;
            bench.mkdir("e").await;
            bench.make("e/f").await;
            bench.ship_all(&mut mover, &world).await;
            bench.rmdir("d").await;
            bench.mkdir("d").await;
            for name in ["a", "b", "e"] {
                bench.rename(name, &format!("d/{name}")).await;
            }
            bench.rename("d/a", "g").await;
            bench.unlink("d/b").await;
            bench.rename("d/e", "a").await;
            bench.rmdir("d").await;
            bench.ends_right(&mut mover, &world).await;
        });
    }
}
/// If it was evicted, home has its only bytes.
#[test]
fn home_keeps_a_file_whose_only_directory_is_gone() {
    for in_parts in [false, true] {
        history_at(in_parts, &["a"], async |mut bench, mut mover, world| {
            bench.mkdir("d").await;
            bench.link("a", "d/a").await;
            bench.unlink("a").await;
            bench.rename("d/a", "b").await;
            bench.rmdir("d").await;
            bench.ends_right(&mut mover, &world).await;
        });
    }
}
/// As programs do that replace a file by one that they make elsewhere.
#[test]
fn a_replacement_from_a_removed_directory_is_at_home() {
    for (in_parts, one, two) in [(false, "d/x", "a"), (false, "a", "d/x"), (true, "d/x", "a")] {
        history_at(in_parts, &["a"], async |mut bench, mut mover, world| {
            bench.mkdir("d").await;
            bench.make("d/x").await;
            bench.rename_as(one, two, RenameMode::Exchange).await;
            bench.unlink("d/x").await;
            bench.rmdir("d").await;
            bench.ends_right(&mut mover, &world).await;
        });
    }
}
/// A directory went into one that is no more, and is no more itself: what takes its name meanwhile is not in
/// its way.
#[test]
fn a_replacement_of_a_lost_directorys_name_is_at_home() {
    for in_parts in [false, true] {
        history_at(in_parts, &["a", "b"], async |mut bench, mut mover, world| {
            bench.mkdir("e").await;
            bench.make("e/f").await;
            bench.ship_all(&mut mover, &world).await;
            bench.mkdir("d").await;
            bench.rename("e", "d/e").await;
            bench.rename("a", "d/a").await;
            for name in ["e", "a"] {
                bench.make(name).await;
            }
            for name in ["d/e/f", "d/a"] {
                bench.unlink(name).await;
            }
            bench.rmdir("d/e").await;
            bench.rmdir("d").await;
            bench.ends_right(&mut mover, &world).await;
        });
    }
}
/// It is made aside only because something went through it, and is replaced where it was here.
#[test]
fn a_replaced_directory_does_not_keep_its_temporary_name() {
    for in_parts in [false, true] {
        history_at(in_parts, &["a"], async |mut bench, mut mover, world| {
            bench.mkdir("e").await;
            bench.ship_all(&mut mover, &world).await;
            bench.mkdir("d").await;
            bench.rename("a", "d/a").await;
            bench.rename("d/a", "a").await;
            bench.rename("e", "d").await;
            bench.ends_right(&mut mover, &world).await;
        });
    }
}
