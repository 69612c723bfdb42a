//! Programs that share files between mounts as they are: git.
use crate::common::{Cluster, can_mount, has, shell};

const ROUNDS: usize = 4;

#[test]
fn a_git_repository_is_used_from_two_mounts_in_turn() {
    if !can_mount() || !has("git") {
        return;
    }
    let cluster = Cluster::start(2);
    let outside = tempfile::tempdir().unwrap();
    let config = outside.path().join("gitconfig");
    let settings = "[user]\nname = t\nemail = t@example.org\n[init]\ndefaultBranch = main\n[gc]\nauto = 0\n[safe]\ndirectory = *\n";
    std::fs::write(&config, settings).unwrap();
    let git = |script: &str| {
        let mounts = cluster.mounts.iter().zip(["A", "B"]);
        let names: String = mounts.map(|(m, name)| format!("{name}={}\n", m.display())).collect();
        shell(&format!(
            "export GIT_CONFIG_GLOBAL={} GIT_CONFIG_NOSYSTEM=1\n{names}{script}",
            config.display()
        ))
    };
    git("git init -q --bare $A/origin && git clone -q $A/origin $A/one 2>/dev/null
         cd $A/one && mkdir d && seq 1000 > d/numbers && git add -A && git commit -qm 0 && git push -q origin main
         git clone -q $B/origin $B/two && cd $B/two && git fsck --strict");
    for round in 1..=ROUNDS {
        // One works and pushes, the other pulls, looks and checks; then the other way round.
        for (here, mine, there, theirs) in [("A", "one", "B", "two"), ("B", "two", "A", "one")] {
            let count = git(&format!(
                "cd ${here}/{mine} && git pull -q --ff-only && echo {here}{round} >> d/numbers && seq {round}000 > d/{here}{round}
                 git add -A && git commit -qm '{here} {round}' && git push -q
                 cd ${there}/{theirs} && git pull -q --ff-only && git fsck --strict && git -C ${there}/origin fsck --strict
                 [ -z \"$(git status --porcelain)\" ] && [ $(tail -1 d/numbers) = {here}{round} ] && cmp d/numbers ${there}/{mine}/d/numbers
                 git log --oneline | wc -l"
            ));
            let commits = 2 * round + usize::from(here == "B");
            assert_eq!(count.trim(), commits.to_string());
        }
        // One working tree, used through both mounts in turn; packed by one while the other has read it.
        git(&format!(
            "cd $A/one && echo a{round} > shared && git add shared && git commit -qm a{round}
             cd $B/one && [ -z \"$(git status --porcelain)\" ] && [ $(git show HEAD:shared) = a{round} ] && git fsck --strict
             echo b{round} > shared && git commit -qam b{round} && git gc -q
             cd $A/one && [ -z \"$(git status --porcelain)\" ] && [ $(git log -1 --format=%s) = b{round} ] && git fsck --strict
             git reset -q --hard HEAD~2 && cd $B/one && [ -z \"$(git status --porcelain)\" ]"
        ));
    }
    let log = git("git -C $A/origin log --format=%s");
    assert_eq!(log.lines().count(), 1 + 2 * ROUNDS, "{log}");
}
