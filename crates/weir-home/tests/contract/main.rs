//! Every home keeps the same promises: each case runs on every back end. And backups keep theirs, whose place
//! is a home.
//!
//! The stranger who changes home behind our back is a second opening of the same home.
#![allow(
    clippy::disallowed_methods,
    clippy::disallowed_types,
    reason = "tests are users of the operating system"
)]
mod backup;
mod cases;
mod directory;
mod mover;
mod service;

use std::{path::Path, sync::Arc, time::Duration};
use weir_env::Env;
use weir_home::{
    FileHome, FileHomeConfig, Home, HomePath, IdMap, LaneLimits, S3Home, WeirHome, WeirHomeConfig,
};

/// One home, opened twice.
pub struct Bench {
    pub home: Arc<dyn Home>,
    pub stranger: Arc<dyn Home>,
}

pub fn env() -> Env {
    weir_env::real::env()
}

pub fn file_config(path: &Path, is_new: bool) -> FileHomeConfig {
    let limits = LaneLimits { threads_max: 4, waiting_max: 64, deadline: Duration::from_secs(60) };
    FileHomeConfig {
        only_of: None,
        below: None,
        run_as: None,
        path: path.into(),
        relation: "test".into(),
        is_new,
        only_reads: false,
        ids: IdMap::default(),
        limits,
    }
}

pub async fn open_file(path: &Path, is_new: bool) -> FileHome {
    FileHome::open(&env(), file_config(path, is_new)).await.unwrap()
}

async fn on_file<F: Future<Output = ()>>(case: impl FnOnce(Bench) -> F) {
    let dir = tempfile::tempdir().unwrap();
    let home = Arc::new(open_file(dir.path(), true).await);
    let stranger = Arc::new(open_file(dir.path(), false).await);
    case(Bench { home, stranger }).await;
}

async fn on_s3<F: Future<Output = ()>>(case: impl FnOnce(Bench) -> F) {
    let Some(service) = service::Service::start() else { return };
    let home = Arc::new(S3Home::open(&env(), service.config("some/place", true)).await.unwrap());
    let stranger = Arc::new(S3Home::open(&env(), service.config("some/place", false)).await.unwrap());
    case(Bench { home, stranger }).await;
}

/// A whole cluster in the simulated world; home and stranger are two of its clients.
fn on_weir<F: Future<Output = ()>>(case: impl FnOnce(Bench) -> F) {
    weir_lab::Lab::new(1).run(6, |lab| async move {
        let mut opened: Vec<Arc<dyn Home>> = Vec::new();
        for name in ["home", "stranger"] {
            let client = lab.client(name).await;
            let config = WeirHomeConfig {
                url: "weir://lab/".into(),
                client,
                base: HomePath::root(),
                relation: "test".into(),
                is_new: opened.is_empty(),
                only_reads: false,
                ids: IdMap::default(),
                limits: LaneLimits::default(),
            };
            let env = lab.world().node(name);
            opened.push(Arc::new(WeirHome::open(&env, config).await.unwrap()));
        }
        let [home, stranger] = <[_; 2]>::try_from(opened).ok().unwrap();
        case(Bench { home, stranger }).await;
    });
}

macro_rules! cases {
    ($($case:ident),* $(,)?) => {
        mod file {
            $(#[tokio::test]
            async fn $case() {
                super::on_file(super::cases::$case).await;
            })*
        }
        mod s3 {
            $(#[tokio::test]
            async fn $case() {
                super::on_s3(super::cases::$case).await;
            })*
        }
        mod weir {
            $(#[test]
            fn $case() {
                super::on_weir(super::cases::$case);
            })*
        }
    };
}
cases!(
    things_are_made_as_asked_and_made_again,
    a_make_leaves_existing_entries_unchanged,
    links_lead_to_the_file_they_were_made_for,
    removing_again_is_done_and_a_changed_file_stays,
    a_directory_with_something_strange_in_it_stays,
    renames_are_found_done_and_replace_only_what_is_expected,
    directories_are_renamed_with_what_is_in_them,
    names_are_exchanged_once,
    attributes_are_set_exactly_and_a_changed_file_keeps_its_own,
    files_are_truncated_once_and_a_changed_one_is_not,
    a_growing_file_shows_a_prefix_and_is_completed,
    a_stray_write_is_found_before_the_next_one,
    an_interrupted_writer_is_followed_by_another,
    holes_stay_holes,
    a_read_of_a_changed_file_is_refused,
    names_of_all_kinds_are_kept,
    deep_paths_are_kept,
    listings_are_in_order_and_complete,
    a_directory_is_read_once_to_its_end,
    a_large_file_is_read_back_in_parts,
    an_empty_file_is_complete,
    space_is_reported,
    a_change_in_the_middle_leaves_the_times_it_should,
    the_root_gets_attributes_again_and_again,
);
