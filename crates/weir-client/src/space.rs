//! Free space, as `statfs` shows it: of the pool for new files, within the limits of a volume.
use crate::data::Data;
use crate::leader::Leader;
use crate::types::Space;
use weir_coord::decide::file_space;
use weir_proto::meta::StatFs;
use weir_proto::volume::{Policy, Volume, VolumeAt};
use weir_proto::{ErrorKind, InodeId, Result};

/// The space for new files of a volume: its scheme and pool count.
pub async fn space_for(leader: &Leader, data: &Data, policy: Option<&Policy>) -> Result<Space> {
    let stat = leader.ask(|session| StatFs { session }).await?;
    let status = data.cluster.known_status().await?;
    let (scheme, pool) = policy.map_or((None, None), |p| (p.scheme, p.pool.as_deref()));
    let space = file_space(&status.map, &status.targets, scheme, pool);
    Ok(Space {
        capacity_bytes: space.capacity(),
        used_bytes: space.used,
        free_bytes: space.free,
        files: stat.files,
        directories: stat.directories,
        inodes_max: None,
    })
}

/// As seen from within a volume with limits.
pub async fn space_at(leader: &Leader, data: &Data, ino: InodeId) -> Result<Space> {
    let volume = match leader.ask(|session| VolumeAt { session, ino }).await {
        Ok(volume) => volume,
        // The inode is gone: the space of the whole is right, too.
        Err(e) if matches!(e.kind, ErrorKind::Stale | ErrorKind::NotFound) => {
            return space_for(leader, data, None).await;
        }
        Err(e) => return Err(e),
    };
    Ok(within(&volume, space_for(leader, data, Some(&volume.policy)).await?))
}

/// The part of the space that a volume's limits leave.
fn within(volume: &Volume, space: Space) -> Space {
    let quota = &volume.quota;
    let mut seen = space;
    if let Some(max) = quota.bytes_hard.or(quota.bytes_soft) {
        seen.capacity_bytes = max;
        seen.used_bytes = volume.usage.bytes;
        // At a cluster's start no target has reported its space yet.
        let all = if space.capacity_bytes > 0 { space.free_bytes } else { u64::MAX };
        seen.free_bytes = max.saturating_sub(volume.usage.bytes).min(all);
    }
    if let Some(max) = quota.inodes_hard.or(quota.inodes_soft) {
        (seen.files, seen.directories) = (volume.usage.files, volume.usage.directories);
        seen.inodes_max = Some(max);
    }
    seen
}
