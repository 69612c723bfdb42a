//! What nodes and administrators ask about lost targets and their rebuild.
use crate::cluster::Cluster;
use std::sync::Arc;
use weir_proto::coord::{
    DrainTarget, GetRebuild, GonePlan, PauseMoves, PlaceCopied, RebuildStatus, RefillReport, RemoveTarget,
    ReportRefill, SetRebuild, TargetGone,
};
use weir_proto::map::ClusterMap;
use weir_proto::{Result, TargetId};

impl Cluster {
    /// Gives a target up that does not come back: others take its places.
    pub async fn target_gone(&self, target: TargetId, dry_run: bool) -> Result<GonePlan> {
        self.ask(&TargetGone { target, dry_run }).await
    }

    /// How the rebuild of lost targets goes on.
    pub async fn rebuild(&self) -> Result<RebuildStatus> {
        self.ask(&GetRebuild {}).await
    }

    /// From when on a target that is down counts as lost; 0: none does by itself.
    pub async fn set_rebuild(&self, after_s: u32) -> Result<()> {
        self.ask(&SetRebuild { after_s }).await
    }

    /// Has all places of a target go to others while it serves them, or has those stay that it still has.
    pub async fn drain_target(&self, target: TargetId, stay: bool, dry_run: bool) -> Result<GonePlan> {
        self.ask(&DrainTarget { target, stay, dry_run }).await
    }

    /// Takes a target without places out of the cluster.
    pub async fn remove_target(&self, target: TargetId) -> Result<Arc<ClusterMap>> {
        self.change(&RemoveTarget { target }).await
    }

    /// Whether no place begins to move.
    pub async fn pause_moves(&self, paused: bool) -> Result<()> {
        self.ask(&PauseMoves { paused }).await
    }

    /// Says how far the copy of a place is that comes to a target of this node.
    pub async fn place_copied(&self, said: PlaceCopied) -> Result<Arc<ClusterMap>> {
        self.change(&said).await
    }

    /// Tells how far targets of this node are filled.
    pub async fn report_refill(&self, reports: Vec<RefillReport>) -> Result<()> {
        self.ask(&ReportRefill { reports }).await
    }
}
