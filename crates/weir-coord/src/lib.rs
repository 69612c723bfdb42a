//! The cluster map: members, health, placement, epochs.
//!
//! [`Coordinator`] is the service that owns the map; [`Cluster`] is the handle of every other role and every
//! client: the newest map, membership, and channels to the nodes in it; [`identity`] ties a directory to a
//! target, a namespace or a coordinator.
//!
//! Knows nothing of files, cells' contents, or metadata.
#![forbid(unsafe_code)]

mod addresses;
mod admission;
mod certified;
pub mod clocks;
mod cluster;
mod collecting;
mod conditions;
mod copies;
mod cut_links;
pub mod decide;
mod enrol;
mod estimate;
pub mod etcd;
mod events;
mod followers;
pub mod identity;
mod kept_map;
mod life;
mod links;
mod lives;
mod member;
mod members;
mod moving;
mod news;
mod open;
mod owner;
mod placing;
mod probe;
mod rebuild;
pub mod records;
mod repaired;
mod replacing;
mod server;
mod shows;
mod standby;
pub mod standbys;
pub mod store;
mod waits;

pub use cluster::{Cluster, Observer};
pub use collecting::Collected;
pub use decide::{layout_for_new_file, layout_in};
pub use estimate::{PlaceSizes, left_of_place};
pub use life::TargetLives;
pub use member::{Membership, Reports, no_reports};
pub use open::cluster_in;
pub use replacing::groups_by_spare;
pub use server::{CoordConfig, Coordinator};
pub use standby::{CoordinatorLead, LEADER_KEY, LEASE, Term, lead};
