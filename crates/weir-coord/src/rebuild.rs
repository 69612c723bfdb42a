//! Requests of nodes and administrators about lost targets and their rebuild.
use crate::cluster::Cluster;
use std::sync::Arc;
use weir_proto::coord::{
    DrainTarget, FullPlace, GetRebuild, GonePlan, PauseMoves, PlaceCopied, RebuildStatus, RefillReport,
    RemoveTarget, ReportFull, ReportRefill, SetRebuild, TargetGone,
};
use weir_proto::map::ClusterMap;
use weir_proto::{PgId, Result, TargetId};

impl Cluster {
    /// Gives up a target that will not return: others take its places.
    pub async fn target_gone(&self, target: TargetId, dry_run: bool) -> Result<GonePlan> {
        self.ask(&TargetGone { target, dry_run }).await
    }

    /// Progress of the rebuild of lost targets.
    pub async fn rebuild(&self) -> Result<RebuildStatus> {
        self.ask(&GetRebuild {}).await
    }

    /// Sets after which time a target that is down counts as lost; 0: never by itself.
    pub async fn set_rebuild(&self, after_s: u32) -> Result<()> {
        self.ask(&SetRebuild { after_s }).await
    }

    /// Drains a target: all its places move to others while it serves them. `stay`: stops that.
    pub async fn drain_target(&self, target: TargetId, stay: bool, dry_run: bool) -> Result<GonePlan> {
        self.ask(&DrainTarget { target, stay, dry_run }).await
    }

    /// Removes a target without places from the cluster.
    pub async fn remove_target(&self, target: TargetId) -> Result<Arc<ClusterMap>> {
        self.change(&RemoveTarget { target }).await
    }

    /// Pauses or resumes the start of moves.
    pub async fn pause_moves(&self, paused: bool) -> Result<()> {
        self.ask(&PauseMoves { paused }).await
    }

    /// Reports how far the copy of a place is that moves to a target of this node.
    pub async fn place_copied(&self, report: PlaceCopied) -> Result<Arc<ClusterMap>> {
        self.change(&report).await
    }

    /// Reports that a target is too full for new data of a group; returns whether its place moves.
    pub async fn report_full(&self, target: TargetId, group: PgId) -> Result<FullPlace> {
        self.ask(&ReportFull { target, group }).await
    }

    /// Reports the refill progress of this node's targets.
    pub async fn report_refill(&self, reports: Vec<RefillReport>) -> Result<()> {
        self.ask(&ReportRefill { reports }).await
    }
}
