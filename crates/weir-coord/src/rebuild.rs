//! What nodes and administrators ask about lost targets and their rebuild.
use crate::cluster::Cluster;
use weir_proto::coord::{
    GetRebuild, GonePlan, RebuildStatus, RefillReport, ReportRefill, SetRebuild, TargetGone,
};
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

    /// Tells how far targets of this node are filled.
    pub async fn report_refill(&self, reports: Vec<RefillReport>) -> Result<()> {
        self.ask(&ReportRefill { reports }).await
    }
}
