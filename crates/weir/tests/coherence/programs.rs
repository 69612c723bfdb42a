//! Programs that share files between mounts as they are: h5py with SWMR, git.
use crate::common::{Cluster, can_mount, ends, h5py, has, shell};
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

const PATIENCE: Duration = Duration::from_secs(120);
const ROUNDS: usize = 4;

/// Appends frames for some seconds. Each frame is made of its number; `at` is the time when it was complete.
/// Prints their number, and the time of the slowest of them, with its flushes.
const SWMR_WRITER: &str = r#"
import h5py, numpy as np, sys, time
with h5py.File(sys.argv[1], "w", libver="latest") as f:
    frames = f.create_dataset("frames", shape=(0, 64, 64), maxshape=(None, 64, 64), chunks=(1, 64, 64), dtype="i4")
    at = f.create_dataset("at", shape=(0,), maxshape=(None,), chunks=(128,), dtype="f8")
    f.swmr_mode = True
    print("open", flush=True)
    begun, n, slowest = time.monotonic(), 0, 0.0
    while time.monotonic() < begun + float(sys.argv[2]):
        before = time.monotonic()
        frames.resize(n + 1, axis=0); frames[n] = n + 1; frames.flush()
        at.resize(n + 1, axis=0); at[n] = time.monotonic(); at.flush()
        slowest = max(slowest, time.monotonic() - before)
        n += 1
        time.sleep(0.01)
    frames.resize(n + 1, axis=0); frames[n] = -1; frames.flush()
    at.resize(n + 1, axis=0); at[n] = -1; at.flush()
    print(n, round(slowest, 3), flush=True)
"#;

/// Follows the writer until its last frame. Every frame is complete and unchanged. A frame's lag is the time
/// from its completion, or from when this reader had the file open, until it has been read. Prints the number
/// of frames and of polls; the median, the 99th percentile and the greatest lag; the number of lags above one
/// second; and the slowest poll and the slowest read of a frame. Seconds.
const SWMR_READER: &str = r#"
import h5py, sys, time
with h5py.File(sys.argv[1], "r", libver="latest", swmr=True) as f:
    frames, at = f["frames"], f["at"]
    begun = time.monotonic()
    seen, looks, lags, look, read, end = 0, 0, [], 0.0, 0.0, begun + float(sys.argv[2])
    while True:
        before = time.monotonic()
        assert before < end, f"the last frame does not come, {seen} seen"
        at.refresh(); frames.refresh()
        times, count = at[seen:], frames.shape[0]
        looks, look = looks + 1, max(look, time.monotonic() - before)
        # A frame is written before its time.
        assert count >= seen + len(times), (count, seen, len(times))
        for n, t in enumerate(times, seen):
            value, before = -1 if t == -1 else n + 1, time.monotonic()
            assert t != 0 and (frames[n] == value).all(), (n, t, frames[n])
            now = time.monotonic()
            read = max(read, now - before)
            if t == -1:
                lags.sort()
                told = [lags[len(lags) // 2], lags[len(lags) * 99 // 100], lags[-1]]
                print(seen, looks, *(round(s, 3) for s in told), sum(s > 1 for s in lags), round(look, 3), round(read, 3))
                sys.exit()
            lags.append(now - max(t, begun))
            seen = n + 1
        time.sleep(0.005)
"#;

fn python(python: &Path, code: &str, args: &[&str]) -> Child {
    let mut command = Command::new(python);
    command.args(["-u", "-c", code]).args(args).env_remove("HDF5_USE_FILE_LOCKING");
    command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap()
}

fn output_of(what: &str, mut child: Child, patience: Duration) -> String {
    let status = ends(what, &mut child, patience);
    let (mut out, mut err) = (String::new(), String::new());
    child.stdout.take().unwrap().read_to_string(&mut out).unwrap();
    child.stderr.take().unwrap().read_to_string(&mut err).unwrap();
    assert!(status.success(), "{what}: {status}\n{out}\n{err}");
    out
}

fn swmr(seconds: u64) {
    let Some(interpreter) = h5py() else { return };
    if !can_mount() {
        return;
    }
    let cluster = Cluster::start(3);
    let file = |n: usize| cluster.mounts[n].join("frames.h5").display().to_string();
    let patience = Duration::from_secs(seconds) + PATIENCE;
    let mut writer = python(&interpreter, SWMR_WRITER, &[&file(0), &seconds.to_string()]);
    let mut output = BufReader::new(writer.stdout.take().unwrap());
    let mut line = String::new();
    output.read_line(&mut line).unwrap();
    if line != "open\n" {
        let mut err = String::new();
        writer.stderr.take().unwrap().read_to_string(&mut err).unwrap();
        panic!("the writer: {line}{err}");
    }
    let limit = patience.as_secs().to_string();
    let readers = [1, 2].map(|n| python(&interpreter, SWMR_READER, &[&file(n), &limit]));
    let mut written = String::new();
    output.read_line(&mut written).unwrap();
    let status = ends("the writer", &mut writer, patience);
    let mut err = String::new();
    writer.stderr.take().unwrap().read_to_string(&mut err).unwrap();
    assert!(status.success(), "the writer: {status}\n{err}");
    let (written, slowest) = written.trim().split_once(' ').unwrap();
    let written: u64 = written.parse().unwrap();
    eprintln!("{written} frames written, the slowest in {slowest} s");
    assert!(written >= seconds, "only {written} frames in {seconds} s");
    for reader in readers {
        let output = output_of("a reader", reader, patience);
        let output: Vec<&str> = output.split_whitespace().collect();
        let [seen, polls, median, most, lag, late, poll, read] = output[..] else { panic!("{output:?}") };
        eprintln!(
            "{seen} seen in {polls} polls; lag {median} s (median), {most} s (99 %), at most {lag} s; {late} above 1 s; \
             slowest poll {poll} s, slowest read of a frame {read} s"
        );
        assert_eq!(seen.parse(), Ok(written));
    }
}

#[test]
fn an_hdf5_file_is_followed_from_two_mounts_while_it_is_written() {
    swmr(10);
}

#[test]
#[ignore = "takes long: `make test-long`"]
fn an_hdf5_file_is_followed_from_two_mounts_for_ten_minutes() {
    swmr(600);
}

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
