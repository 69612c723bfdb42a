//! Every workload on a plain directory: figures come out, everything is right, and wrong bytes are noticed.
#![allow(clippy::disallowed_methods)] // as the crate: an outside user of a file system

use std::path::Path;
use weir_load::{Common, Report, detector, fsync, mdtest, shared, smallfile, stream};

fn common(dir: &Path) -> Common {
    Common { runs: 2, baseline: Some(dir.to_path_buf()), ..Common::at(dir) }
}

fn assert_good(report: &Report, row: &str) {
    assert!(report.is_good(), "{:?}", report.first_bad);
    let found = report.row(row).unwrap_or_else(|| panic!("no row {row} in\n{}", report.table()));
    assert!(found.value.median > 0.0 && found.ratio.is_some(), "{}", report.table());
    let json: serde_json::Value = serde_json::from_str(&report.json()).unwrap();
    assert_eq!(json["bad"], 0);
}

fn assert_empty(dir: &Path) {
    assert_eq!(std::fs::read_dir(dir).unwrap().count(), 0, "a workload tidies up");
}

fn small_detector(dir: &Path) -> detector::Options {
    detector::Options {
        common: common(dir),
        hz: 100.0,
        duration: 0.2,
        frame_bytes: 123_457,
        ..detector::Options::at(dir)
    }
}

#[test]
fn workloads_run_and_tidy_up() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    let report =
        stream::run(&stream::Options { file_bytes: 12 << 20, ..stream::Options::new(common(dir)) }).unwrap();
    assert_good(&report, "write");
    assert_good(&report, "cold read");
    let report = shared::run(&shared::Options { records: 51, ..shared::Options::new(common(dir)) }).unwrap();
    assert_good(&report, "write");
    for hard in [false, true] {
        let report =
            mdtest::run(&mdtest::Options { files: 50, hard, ..mdtest::Options::new(common(dir)) }).unwrap();
        assert_good(&report, "create");
        assert_good(&report, "list with attributes");
    }
    let report =
        smallfile::run(&smallfile::Options { files: 50, ..smallfile::Options::new(common(dir)) }).unwrap();
    assert_good(&report, "read");
    for grow in [false, true] {
        let report =
            fsync::run(&fsync::Options { writes: 20, grow, ..fsync::Options::new(common(dir)) }).unwrap();
        assert_good(&report, "write and sync p50");
    }
    assert_empty(dir);
}

#[test]
fn detectors_keep_their_rate() {
    let dir = tempfile::tempdir().unwrap();
    let dir = dir.path();
    for append in [false, true] {
        let watch = std::sync::Arc::default();
        let options = detector::Options { append, fsync: append, ..small_detector(dir) };
        let report = detector::run_watched(&options, &watch).unwrap();
        assert_good(&report, "payload");
        let (frames, progress) = (2 * 2 * 20, watch.progress());
        assert_eq!((progress.frames_done, progress.frames_total), (frames, frames));
        assert_eq!(progress.bytes_done, frames * 123_457);
        // 100 Hz each: 20 frames are due over 190 ms.
        assert!(report.row("frames").unwrap().value.max < 215.0, "{}", report.table());
    }
    assert_empty(dir);
}

#[test]
fn real_frames_are_replayed() {
    let dir = tempfile::tempdir().unwrap();
    let frames = tempfile::tempdir().unwrap();
    for n in 0..3u8 {
        std::fs::write(frames.path().join(format!("f{n}.cbf")), vec![n; 5000 + usize::from(n)]).unwrap();
    }
    std::fs::write(frames.path().join("readme.txt"), "not a frame").unwrap();
    let packed = std::process::Command::new("bzip2").arg(frames.path().join("f1.cbf")).status();
    assert!(packed.is_ok_and(|s| s.success()), "bzip2 is needed");
    let options = detector::Options { frames: Some(frames.path().into()), ..small_detector(dir.path()) };
    assert_good(&detector::run(&options).unwrap(), "payload");
    let none = detector::Options { frames: Some(dir.path().into()), ..small_detector(dir.path()) };
    assert!(detector::run(&none).unwrap_err().context.contains("no frame"));
}

#[test]
fn several_paths_are_one_directory() {
    let dir = tempfile::tempdir().unwrap();
    let link = tempfile::tempdir().unwrap();
    let second = link.path().join("second");
    std::os::unix::fs::symlink(dir.path(), &second).unwrap();
    let both = Common { dirs: vec![dir.path().into(), second], ..common(dir.path()) };
    assert_good(
        &shared::run(&shared::Options { records: 20, ..shared::Options::new(both.clone()) }).unwrap(),
        "read",
    );
    let other = Common { dirs: vec![dir.path().into(), link.path().into()], ..both };
    let refused = shared::run(&shared::Options { records: 20, ..shared::Options::new(other) });
    assert!(refused.unwrap_err().context.contains("mounts of the same"));
}

#[test]
fn processes_need_a_command() {
    let dir = tempfile::tempdir().unwrap();
    let options = shared::Options::new(Common { processes: true, ..common(dir.path()) });
    assert!(shared::run(&options).is_err());
}
