//! Workers that are processes: this test is its own worker program, so it has no harness.
#![allow(clippy::disallowed_methods)] // as the crate: an outside user of a file system

use weir_load::{Common, detector, shared, worker_main};

fn main() {
    if std::env::args().nth(1).as_deref() == Some("worker") {
        worker_main().unwrap();
        return;
    }
    workers_are_processes();
    a_worker_that_fails_ends_the_run();
    println!("processes: ok");
}

fn common(dir: &std::path::Path) -> Common {
    let own = std::env::current_exe().unwrap().to_string_lossy().into_owned();
    let worker_command = vec![own, "worker".to_string()];
    Common { runs: 1, jobs: 3, processes: true, worker_command, ..Common::at(dir) }
}

fn workers_are_processes() {
    let dir = tempfile::tempdir().unwrap();
    let report =
        shared::run(&shared::Options { records: 60, ..shared::Options::new(common(dir.path())) }).unwrap();
    assert!(report.is_good(), "{}", report.table());
    let options = detector::Options {
        common: common(dir.path()),
        hz: 100.0,
        duration: 0.1,
        frame_bytes: 50_000,
        ..detector::Options::at(dir.path())
    };
    let report = detector::run(&options).unwrap();
    assert!(report.is_good(), "{}", report.table());
    assert!(report.row("frames").unwrap().value.median > 0.0);
}

fn a_worker_that_fails_ends_the_run() {
    let dir = tempfile::tempdir().unwrap();
    let missing = Some(dir.path().join("missing"));
    let failing = detector::Options {
        common: common(dir.path()),
        frames: missing,
        ..detector::Options::at(dir.path())
    };
    let error = detector::run(&failing).unwrap_err();
    assert!(error.context.contains("missing"), "{error}");
    let silent = Common { worker_command: vec!["true".to_string()], ..common(dir.path()) };
    let error = shared::run(&shared::Options { records: 60, ..shared::Options::new(silent) }).unwrap_err();
    assert!(error.context.contains("worker"), "{error}");
}
