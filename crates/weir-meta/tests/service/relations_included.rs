//! All ways by which the names of a file become included or excluded: each included name is at home when the
//! relation is synced, as `weir relation verify` would find it.
use super::patterns::rules;
use super::*;
use weir_proto::patterns::Patterns;

impl Bench {
    /// As `verify` finds it: home has what the patterns include, the present bytes of it, and no other names
    /// than the volume has.
    pub(super) async fn assert_included_at_home(&self, rules: &RelationRules) {
        let (tree, patterns) = (self.tree().await, Patterns::of(rules));
        let included =
            |path: &str, kind| patterns.excludes(path.as_bytes(), kind == FileKind::Directory).is_none();
        for (path, thing) in &self.home.things {
            let (kind, bytes, ..) = tree.get(path).unwrap_or_else(|| panic!("{path:?} at home only"));
            assert_eq!((thing.kind, &thing.bytes), (*kind, bytes), "{path}");
        }
        let there = |ino: &InodeId| tree.iter().any(|(p, t)| t.3 == *ino && self.home.things.contains_key(p));
        for (path, (kind, _, _, ino)) in tree.iter().filter(|(path, t)| included(path, t.0)) {
            let one_name = self.home.in_parts && *kind == FileKind::Regular;
            let is_there = self.home.things.contains_key(path) || one_name && there(ino);
            assert!(is_there, "{path} is included and not at home, which has {:?}", self.at_home());
        }
    }

    /// Acts of users, and of an administrator who replaces the patterns: `set *.tmp` excludes these names.
    async fn act(&mut self, act: &str) -> Option<RelationRules> {
        let words: Vec<&str> = act.split(' ').collect();
        match words[..] {
            ["make", path] => self.make(path).await,
            ["mkdir", path] => self.mkdir(path).await,
            ["link", path, other] => self.link(path, other).await,
            ["unlink", path] => self.unlink(path).await,
            ["rename", from, to] => self.rename(from, to).await,
            ["exchange", one, other] => self.rename_as(one, other, RenameMode::Exchange).await,
            ["write", path] => self.change_and_close(path, 1).await,
            ["set", ..] => {
                let rules = rules(&[], &words[1..]);
                self.set(rules.clone()).await;
                return Some(rules);
            }
            _ => panic!("{act:?}"),
        }
        None
    }
}

/// A history of names, and home after it, if it was synced after each act.
struct Case {
    acts: &'static str,
    home: &'static [&'static str],
    /// Where home has one name of each file; the same if there are none.
    one_name: &'static [&'static str],
}

const fn case(acts: &'static str, home: &'static [&'static str]) -> Case {
    Case { acts, home, one_name: home }
}
const fn case_of_links(
    acts: &'static str,
    home: &'static [&'static str],
    one_name: &'static [&'static str],
) -> Case {
    Case { acts, home, one_name }
}

/// At first `*.tmp` and the directory `scratch` are excluded.
const CASES: &[Case] = &[
    // Published by link, as by git, and by mail servers.
    case("make a.tmp, link a.tmp a.dat, unlink a.tmp", &["a.dat"]),
    case("make a.tmp, link a.tmp a.dat", &["a.dat"]),
    case("make a.tmp, link a.tmp a.dat, write a.tmp, unlink a.tmp, write a.dat", &["a.dat"]),
    case("make a.tmp, link a.tmp b.tmp, link b.tmp a.dat, unlink a.tmp, unlink b.tmp", &["a.dat"]),
    case("make a.tmp, link a.tmp a.dat, unlink a.dat, link a.tmp b.dat, unlink a.tmp", &["b.dat"]),
    case("mkdir scratch, make scratch/a, link scratch/a a, unlink scratch/a", &["a"]),
    // A further name that is excluded stays away, and returns no file.
    case("make a.dat, link a.dat a.tmp", &["a.dat"]),
    case("make a.dat, link a.dat a.tmp, unlink a.tmp, write a.dat", &["a.dat"]),
    case("make a.dat, link a.dat a.tmp, rename a.tmp b.tmp", &["a.dat"]),
    case("mkdir scratch, make a.dat, link a.dat a.tmp, rename a.tmp scratch/a", &["a.dat"]),
    case_of_links("make a.dat, link a.dat a.tmp, rename a.tmp b.dat", &["a.dat", "b.dat"], &["a.dat"]),
    // The last included name goes: home keeps the file, under the name that is left.
    case("make a.dat, link a.dat a.tmp, unlink a.dat, write a.tmp", &["a.tmp"]),
    case("make a.dat, link a.dat b.tmp, make c.dat, rename c.dat a.dat", &["a.dat", "b.tmp"]),
    case("mkdir scratch, make a.dat, link a.dat scratch/a, unlink a.dat", &["scratch", "scratch/a"]),
    case("make a.dat, link a.dat a.tmp, unlink a.dat, rename a.tmp b.dat", &["b.dat"]),
    case("make a.dat, link a.dat a.tmp, unlink a.dat, unlink a.tmp", &[]),
    case_of_links(
        "make a.dat, link a.dat a.tmp, unlink a.dat, link a.tmp b.dat",
        &["a.tmp", "b.dat"],
        &["b.dat"],
    ),
    // Rename.
    case("make a.tmp, rename a.tmp a.dat, write a.dat", &["a.dat"]),
    case("make a.dat, rename a.dat a.tmp, write a.tmp", &["a.tmp"]),
    case("make a.tmp, make a.dat, rename a.tmp a.dat", &["a.dat"]),
    case("make a.tmp, link a.tmp b.tmp, rename b.tmp b.dat", &["b.dat"]),
    case("make a.tmp, link a.tmp a.dat, make b.tmp, rename b.tmp a.tmp", &["a.dat"]),
    // Exchange.
    case("make a.tmp, make b.dat, exchange a.tmp b.dat", &["a.tmp", "b.dat"]),
    case("make a.tmp, make b.tmp, link b.tmp b.dat, exchange a.tmp b.dat", &["a.tmp", "b.dat"]),
    case_of_links(
        "make a.tmp, link a.tmp a.dat, make b.dat, exchange a.tmp b.dat",
        &["a.dat", "a.tmp", "b.dat"],
        &["a.dat", "a.tmp"],
    ),
    case("make a.dat, link a.dat a.tmp, make b.tmp, exchange a.dat b.tmp", &["a.dat", "b.tmp"]),
    // Directories above get another name.
    case("mkdir scratch, make scratch/a, rename scratch data", &["data", "data/a"]),
    case("mkdir scratch, make scratch/a, link scratch/a a.tmp, rename scratch data", &["data", "data/a"]),
    case("mkdir data, make data/a, rename data scratch, make scratch/b", &["scratch", "scratch/a"]),
    case(
        "mkdir data, make data/a, link data/a a.tmp, rename data scratch, unlink scratch/a",
        &["a.tmp", "scratch"],
    ),
    case(
        "mkdir scratch, mkdir scratch/in, make scratch/in/a, mkdir data, rename scratch/in data/in",
        &["data", "data/in", "data/in/a"],
    ),
    case(
        "mkdir scratch, make scratch/a, mkdir data, make data/b, exchange scratch data",
        &["data", "data/a", "scratch", "scratch/b"],
    ),
    case(
        "set /one/x*, mkdir one, make one/x1, mkdir two, make two/x2, exchange one two",
        &["one", "one/x2", "two", "two/x1"],
    ),
    case_of_links(
        "set /one/x*, mkdir one, make one/x1, make one/y, link one/y one/x2, rename one two",
        &["two", "two/x1", "two/x2", "two/y"],
        &["two", "two/x1", "two/y"],
    ),
    // The rule is changed later.
    case("make a.tmp, make b.bak, set *.bak", &["a.tmp", "b.bak"]),
    case_of_links("make a.tmp, link a.tmp a.bak, set *.bak", &["a.bak", "a.tmp"], &["a.tmp"]),
    case("set *.tmp *.bak, make a.tmp, link a.tmp a.bak, set *.bak, unlink a.tmp", &["a.bak"]),
    case_of_links("make a.tmp, link a.tmp a.dat, set *.dat, write a.dat", &["a.dat", "a.tmp"], &["a.tmp"]),
    case("make a.dat, link a.dat a.tmp, set *.tmp *.dat, unlink a.dat", &["a.tmp"]),
    case("mkdir scratch, make scratch/a, link scratch/a a.tmp, set *.tmp", &["scratch", "scratch/a"]),
];

/// `each`: home is synced after each act, otherwise after all.
fn play_case(case: &Case, in_parts: bool, each: bool) {
    println!("{} (in parts: {in_parts}, synced after each: {each})", case.acts);
    simulate(11, async |world| {
        let _meta = start(&world).await;
        let (mut bench, mut mover) = Bench::start(&world, in_parts).await;
        let mut last = rules(&[], &["*.tmp", "scratch/"]);
        bench.add_with(last.clone()).await;
        for act in case.acts.split(", ") {
            last = bench.act(act).await.unwrap_or(last);
            if each {
                bench.settle(&world).await;
                bench.ship_to_the_end(&mut mover, &world).await;
                bench.assert_included_at_home(&last).await;
            }
        }
        bench.settle(&world).await;
        bench.ship_to_the_end(&mut mover, &world).await;
        bench.assert_included_at_home(&last).await;
        if each {
            assert_eq!(bench.at_home(), if in_parts { case.one_name } else { case.home });
        }
        bench.set(RelationRules::default()).await;
        bench.ship_to_the_end(&mut mover, &world).await;
        bench.assert_same().await;
    });
}

#[test]
fn every_way_to_an_included_name_leads_home() {
    for case in CASES {
        for (in_parts, each) in [(false, true), (false, false), (true, true), (true, false)] {
            play_case(case, in_parts, each);
        }
    }
}

/// Patterns that include: the name without them was the first one.
#[test]
fn a_second_name_that_is_included_is_enough() {
    simulate(12, async |world| {
        let _meta = start(&world).await;
        let (mut bench, mut mover) = Bench::start(&world, false).await;
        for act in ["make old", "link old old.h5"] {
            bench.act(act).await;
        }
        let only = rules(&["*.h5"], &[]);
        bench.add_with(only.clone()).await;
        for act in ["make new", "link new new.h5", "unlink new"] {
            bench.act(act).await;
        }
        bench.settle(&world).await;
        bench.ship_to_the_end(&mut mover, &world).await;
        bench.assert_included_at_home(&only).await;
        assert_eq!(bench.at_home(), ["new.h5", "old.h5"]);
    });
}
