//! The configuration of a leader, and its seams to the node around it.
use crate::access::Refused;
use crate::copies::Right;
use crate::evict::Space;
use crate::namespace::{AtHome, LayoutPolicy};
use crate::purge::Purge;
use crate::witness::Witness;
use std::sync::Arc;
use weir_env::Instant;
use weir_proto::NamespaceId;
use weir_proto::access::{AccessRules, AuditRule};
use weir_proto::volume::Policy;

/// Where new files of a volume with a policy go; `None`: no placement group exists for it yet.
pub type ChooseLayout = dyn Fn(&Policy) -> Option<LayoutPolicy> + Send + Sync;

/// The configuration of a starting leader.
#[derive(Clone)]
pub struct MetaConfig {
    pub namespace: NamespaceId,
    /// A client that is silent this long loses its leases, ms.
    pub lease_ms: u32,
    /// Where new files of a volume with this policy go now, by the cluster map.
    pub layout: Arc<ChooseLayout>,
    /// Whether home has bytes of a file: only then they may be evicted.
    pub at_home: Arc<AtHome>,
    /// The fill level of the targets.
    pub space: Arc<Space>,
    /// Drops the cells of deleted files.
    pub purge: Arc<dyn Purge>,
    /// Whether the process that a client named has definitely ended, as only a leader on the same machine can
    /// see. Its session ends at once instead of after a lease term.
    pub gone: Arc<dyn Fn(&str) -> bool + Send + Sync>,
    /// The version of this node's cluster map; at start, not older than its leadership.
    pub map_version: Arc<dyn Fn() -> u64 + Send + Sync>,
    /// Whether all targets' groups accept data: as long as one does not, clients that cannot save are not to
    /// blame.
    pub takes_data: Arc<dyn Fn() -> bool + Send + Sync>,
    /// The rules for mounts, from the same map.
    pub access: Arc<dyn Fn() -> AccessRules + Send + Sync>,
    /// Gets the refusals by these rules.
    pub refused: Arc<Refused>,
    /// The audit rules of volumes, from the same map.
    pub audits: Arc<dyn Fn() -> Vec<AuditRule> + Send + Sync>,
    /// Gets the records that these rules ask for.
    pub witness: Arc<Witness>,
    /// Whether every other node of the namespace, which may lead next, reads records of held volumes.
    pub records_holds: Arc<dyn Fn() -> bool + Send + Sync>,
    /// Whether every other node of the namespace, which may lead next, makes changes again that were answered
    /// early.
    pub answers_early: Arc<dyn Fn() -> bool + Send + Sync>,
    /// Whether it may answer.
    pub right: Arc<Right>,
    /// The latest time at which the former leader of a namespace with copies may have answered.
    pub led_until: Option<Instant>,
}
