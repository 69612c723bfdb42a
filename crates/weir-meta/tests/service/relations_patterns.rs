//! Patterns of a relation: excluded files are never shipped, files that home has are kept up to date, and
//! when the patterns are removed, home becomes equal to the volume.
use super::*;

pub(super) fn rules(include: &[&str], exclude: &[&str]) -> RelationRules {
    let list = |list: &[&str]| list.iter().map(|text| (*text).to_owned()).collect();
    RelationRules { include: list(include), exclude: list(exclude), bytes_per_s: None }
}

impl Bench {
    pub(super) async fn add_with(&mut self, rules: RelationRules) {
        let url = if self.home.in_parts { "s3://home" } else { "file:///home" };
        let (op, new) = (self.client.op(), relation_to(self.client.op(), url));
        let r = RelationAddWith { op, cred: root(), new, rules };
        self.relation = Some(self.client.call(&r).await.unwrap().id);
    }
    pub(super) async fn set(&self, rules: RelationRules) {
        let (op, relation) = (self.client.op(), self.relation.unwrap());
        let RelationRules { include, exclude, bytes_per_s } = rules;
        let (include, exclude) = (Some(include), Some(exclude));
        let r = RelationSet { op, cred: root(), relation, include, exclude, bytes_per_s };
        self.client.call(&r).await.unwrap();
    }
    pub(super) fn at_home(&self) -> Vec<&str> {
        self.home.things.keys().map(String::as_str).collect()
    }
    /// A file with some bytes, closed.
    async fn file(&mut self, dir: InodeId, name: &str) -> InodeId {
        let made = self.client.create(dir, name).await.unwrap().entry;
        self.volume.files.insert(made.attr.ino, Vec::new());
        self.write(&made, 1).await;
        self.client.close(made.attr.ino, true).await.unwrap();
        made.attr.ino
    }
    async fn move_to(&self, (parent, name): (InodeId, &str), (new_parent, new_name): (InodeId, &str)) {
        let (op, mode) = (self.client.op(), RenameMode::Replace);
        let (name, new_name) = (b(name), b(new_name));
        let r = Rename { op, cred: root(), parent, name, new_parent, new_name, mode };
        self.client.call(&r).await.unwrap();
    }
}

/// After any acts while patterns change, home has what they include, and is equal to the volume when there are
/// no patterns any more.
fn play_with_patterns(seed: u64, in_parts: bool, before: usize) {
    println!("seed {seed}");
    simulate(seed, async |world| {
        let _meta = start(&world).await;
        let (mut bench, mut mover) = Bench::start(&world, in_parts).await;
        bench.exchanges = seed.is_multiple_of(3);
        for _ in 0..before {
            bench.use_volume(&world).await;
        }
        let choices = [
            rules(&[], &["n0"]),
            rules(&[], &["n1/", "/n2/n3"]),
            rules(&["n4", "n5/"], &[]),
            rules(&["n?"], &["n2/**"]),
        ];
        let dice = world.node("dice");
        let any = || choices[dice.rng.below(choices.len() as u64) as usize].clone();
        let mut last = any();
        bench.add_with(last.clone()).await;
        for _ in 0..60 {
            bench.use_volume(&world).await;
            while dice.rng.below(3) == 0 {
                bench.ship(&mut mover, &world, false).await;
            }
            if dice.rng.below(12) == 0 {
                last = any();
                bench.set(last.clone()).await;
            }
        }
        bench.close_all().await;
        bench.ship_to_the_end(&mut mover, &world).await;
        bench.assert_included_at_home(&last).await;
        bench.set(RelationRules::default()).await;
        bench.ship_to_the_end(&mut mover, &world).await;
        bench.assert_same().await;
    });
}

#[test]
fn home_becomes_as_the_volume_without_patterns() {
    for seed in 0..60 {
        play_with_patterns(30_000 + seed, seed % 4 == 3, if seed < 40 { 0 } else { 80 });
    }
}

/// Lists all histories that fail, not the first one only.
#[test]
#[ignore = "minutes: 6,000 seeds"]
fn home_becomes_as_the_volume_without_patterns_long() {
    let mut failed = Vec::new();
    for seed in 0..6000 {
        let before = if seed % 3 == 0 { 80 } else { 0 };
        let play = || play_with_patterns(40_000 + seed, seed % 4 == 3, before);
        if std::panic::catch_unwind(play).is_err() {
            failed.push(40_000 + seed);
        }
    }
    assert!(failed.is_empty(), "{failed:?}");
}

#[test]
fn excluded_files_never_reach_home_and_do_not_count() {
    simulate(5, async |world| {
        let _meta = start(&world).await;
        let (mut bench, mut mover) = Bench::start(&world, false).await;
        let old = bench.client.mkdir(ROOT, "old").await.unwrap().entry.attr.ino;
        bench.file(old, "a.tmp").await;
        bench.file(old, "a.h5").await;
        bench.add_with(rules(&[], &["*.tmp", "scratch/"])).await;
        let scratch = bench.client.mkdir(ROOT, "scratch").await.unwrap().entry.attr.ino;
        let hidden = bench.file(scratch, "x.h5").await;
        bench.file(ROOT, "b.tmp").await;
        bench.ship_to_the_end(&mut mover, &world).await;
        assert_eq!(bench.at_home(), ["old", "old/a.h5"]);
        let r = RelationList { session: bench.client.session, volume: None };
        let info = bench.client.call(&r).await.unwrap().relations.remove(0);
        let nothing = (info.state, info.backlog_bytes, info.backlog_names, info.lag_ms);
        assert_eq!(nothing, (RelationState::Synced {}, 0, 0, 0));
        let r = WhereAtHome { session: bench.client.session, ino: hidden, relation: bench.relation };
        assert!(bench.client.call(&r).await.is_err());
    });
}

#[test]
fn renames_between_included_and_excluded_names() {
    simulate(6, async |world| {
        let _meta = start(&world).await;
        let (mut bench, mut mover) = Bench::start(&world, false).await;
        bench.add_with(rules(&[], &["*.tmp", "scratch/"])).await;
        let scratch = bench.client.mkdir(ROOT, "scratch").await.unwrap().entry.attr.ino;
        let inner = bench.client.mkdir(scratch, "inner").await.unwrap().entry.attr.ino;
        bench.file(inner, "deep").await;
        let file = bench.file(ROOT, "f.tmp").await;
        bench.ship_to_the_end(&mut mover, &world).await;
        assert_eq!(bench.at_home(), [""; 0]);
        // It gets its final name: all of it is copied.
        bench.move_to((ROOT, "f.tmp"), (ROOT, "f")).await;
        bench.ship_to_the_end(&mut mover, &world).await;
        assert_eq!(bench.home.things["f"].bytes, bench.volume.files[&file]);
        // Home has it from now on, and follows: also into an excluded directory, whose other files stay away.
        bench.move_to((ROOT, "f"), (inner, "g.tmp")).await;
        bench.rewrite(file, 1).await;
        bench.client.close(file, true).await.unwrap();
        bench.ship_to_the_end(&mut mover, &world).await;
        assert_eq!(bench.at_home(), ["scratch", "scratch/inner", "scratch/inner/g.tmp"]);
        assert_eq!(bench.home.things["scratch/inner/g.tmp"].bytes, bench.volume.files[&file]);
        // A directory that is included from now on comes with all that is in it.
        bench.move_to((ROOT, "scratch"), (ROOT, "data")).await;
        bench.ship_to_the_end(&mut mover, &world).await;
        bench.assert_same().await;
        // A pattern that is added later removes nothing at home.
        bench.set(rules(&[], &["data/"])).await;
        bench.file(inner, "new").await;
        bench.ship_to_the_end(&mut mover, &world).await;
        let there = ["data", "data/inner", "data/inner/deep", "data/inner/g.tmp"];
        assert_eq!(bench.at_home(), there);
        bench.set(RelationRules::default()).await;
        bench.ship_to_the_end(&mut mover, &world).await;
        bench.assert_same().await;
    });
}

#[test]
fn patterns_are_refused_where_home_is_the_source() {
    simulate(7, async |world| {
        let _meta = start(&world).await;
        let (bench, _mover) = Bench::start(&world, false).await;
        let client = &bench.client;
        let with = |new: RelationAdd, rules| RelationAddWith { op: client.op(), cred: root(), new, rules };
        let new = || relation_to(client.op(), "file:///data");
        let import = RelationAdd { import: true, ..new() };
        let refused = client.call(&with(import, rules(&[], &["*.tmp"]))).await.unwrap_err();
        assert!(refused.context.contains("imports its home"), "{refused}");
        let refused = client.call(&with(new(), rules(&[], &["a[0-9]"]))).await.unwrap_err();
        assert!(refused.context.contains("only *, ** and ? stand for something"), "{refused}");
        let limit = RelationRules { bytes_per_s: Some(50_000_000), ..RelationRules::default() };
        let relation = client.call(&with(new(), limit.clone())).await.unwrap().id;
        let r = RelationRulesList { session: client.session };
        let listed = client.call(&r).await.unwrap().relations;
        assert_eq!(listed, [RulesOfRelation { relation, rules: limit, share: Some(50_000_000) }]);
        let user = Cred { uid: 7, gid: 7, groups: vec![7] };
        let (op, include, exclude) = (client.op(), None, None);
        let r = RelationSet { op, cred: user, relation, include, exclude, bytes_per_s: Some(0) };
        assert_eq!(client.call(&r).await.unwrap_err().kind, weir_proto::ErrorKind::Denied);
    });
}
