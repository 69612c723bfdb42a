//! Requests of nodes and administrators about the copies of a namespace, on both sides of the connection.
//!
//! [`crate::decide`] has the decisions.
use crate::cluster::Cluster;
use crate::decide::{Progress, copy_caught_up, copy_lost, keep_copy, leader_silent};
use std::sync::Arc;
use std::time::Duration;
use weir_proto::copies::{CopyCaughtUp, CopyLost, KeepCopy, LeaderSilent, SetCopies};
use weir_proto::map::ClusterMap;
use weir_proto::{Epoch, NamespaceId, NamespaceUuid, NodeId, Request, Result};
use weir_rpc::{Call, Channel, Service};

/// Whether a node gives signs of life now.
pub type Lives<'a> = &'a dyn Fn(NodeId) -> bool;

/// A member's report about a copy, as a change of the coordinator's draft of the map.
pub type CopyChange = Box<dyn FnOnce(&mut ClusterMap, &Progress, Lives<'_>) -> Result<()> + Send>;

/// The member that reports, and the change. `None`: it is another request.
pub fn change_of_copies(call: &Call) -> Result<Option<(NodeId, CopyChange)>> {
    Ok(Some(match call.method {
        KeepCopy::METHOD => {
            let said = call.decode::<KeepCopy>()?;
            (said.node, Box::new(move |map, progress, _| keep_copy(map, progress, &said)))
        }
        CopyCaughtUp::METHOD => {
            let said = call.decode::<CopyCaughtUp>()?;
            (said.leader, Box::new(move |map, _, _| copy_caught_up(map, &said).map(drop)))
        }
        CopyLost::METHOD => {
            let said = call.decode::<CopyLost>()?;
            (said.leader, Box::new(move |map, _, _| copy_lost(map, &said).map(drop)))
        }
        LeaderSilent::METHOD => {
            let said = call.decode::<LeaderSilent>()?;
            (
                said.node,
                Box::new(move |map, _, lives| leader_silent(map, &said, lives(said.leader)).map(drop)),
            )
        }
        _ => return Ok(None),
    }))
}

impl Cluster {
    /// Announces this node's directory for a copy of a namespace. `Unavailable`: all copies that are wanted
    /// have a node. `Denied`: it is not the namespace's directory, or an old copy that no member can fill.
    pub async fn keep_copy(
        &self,
        namespace: NamespaceId,
        uuid: NamespaceUuid,
        changes: u64,
    ) -> Result<Arc<ClusterMap>> {
        let node = self.joined()?;
        self.change_as_member(&KeepCopy { node, namespace, uuid, changes }).await
    }

    /// Reports as the leader of the namespace that `node` holds every record.
    pub async fn copy_caught_up(&self, namespace: NamespaceId, node: NodeId, epoch: Epoch) -> Result<()> {
        let leader = self.joined()?;
        self.change_as_member(&CopyCaughtUp { leader, namespace, node, epoch }).await.map(drop)
    }

    /// Reports as the leader of the namespace that `node` has not answered for this time.
    pub async fn copy_lost(
        &self,
        namespace: NamespaceId,
        node: NodeId,
        epoch: Epoch,
        silent: Duration,
    ) -> Result<()> {
        let (leader, silent_ms) = (self.joined()?, u32::try_from(silent.as_millis()).unwrap_or(u32::MAX));
        self.change_as_member(&CopyLost { leader, namespace, node, epoch, silent_ms }).await.map(drop)
    }

    /// Reports as a copy that nothing was received from the leader of this epoch for this time.
    pub async fn leader_silent(
        &self,
        namespace: NamespaceId,
        leader: NodeId,
        epoch: Epoch,
        silent: Duration,
    ) -> Result<()> {
        let (node, silent_ms) = (self.joined()?, u32::try_from(silent.as_millis()).unwrap_or(u32::MAX));
        self.change_as_member(&LeaderSilent { node, namespace, leader, epoch, silent_ms }).await.map(drop)
    }

    pub async fn set_copies(&self, asked: &SetCopies) -> Result<Arc<ClusterMap>> {
        self.change(asked).await
    }

    /// A separate channel to a node; calls back go to `callbacks`.
    pub fn node_of_its_own(&self, id: NodeId, callbacks: Arc<dyn Service>) -> Channel {
        self.shared().channel_of_its_own(id, callbacks)
    }
}
