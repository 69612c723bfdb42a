//! Volumes as clients see them: one by its name, that of an inode, all page by page.
use super::super::usage::volume_usage;
use super::super::*;
use super::{find_name, load, volume_of};
use crate::record::{NEVER_NAMED, VolumeRecord};
use weir_kv::Scan;
use weir_proto::volume::{VOLUMES_MAX, Volume, VolumeList, VolumePage, WriteFloor, WriteFloors};

/// Half of what a message body may have.
const PAGE_BYTES_MAX: usize = 512 * 1024;

/// A volume as shown, without the fields of its record.
const SHOWN_BYTES: usize = 32;

pub(super) fn shown(read: &dyn Read, id: VolumeId, record: VolumeRecord) -> Result<Volume> {
    let (usage, in_trash) = (volume_usage(read, id)?, trash::usage(read, id)?);
    Ok(record.show(id, usage, in_trash))
}

pub fn get(view: &mut View<'_>, name: &str) -> Result<Volume> {
    let id = find_name(view.read, name)?
        .ok_or_else(|| Error::not_found(format!("there is no volume {name:?}")))?;
    shown(view.read, id, load(view.read, id)?)
}

pub fn at(view: &mut View<'_>, ino: InodeId) -> Result<Volume> {
    let dir = match find_inode(view.read, ino)? {
        // It is not charged yet.
        Some(inode) if inode.parent == NEVER_NAMED => InodeId::ROOT,
        Some(inode) => inode.parent,
        None => ino,
    };
    let id = volume_of(view.read, dir)?;
    shown(view.read, id, load(view.read, id)?)
}

pub fn write_floors(view: &mut View<'_>) -> Result<WriteFloors> {
    let all = view.rules.quotas.write_floors().iter();
    Ok(WriteFloors {
        floors: all.map(|(volume, members)| WriteFloor { volume: *volume, members: *members }).collect(),
    })
}

pub fn list(view: &mut View<'_>, r: &VolumeList) -> Result<VolumePage> {
    let limit = (r.limit as usize).clamp(1, VOLUMES_MAX);
    let Some(first) = r.after.0.checked_add(1) else {
        return Ok(VolumePage { volumes: Vec::new(), end: true });
    };
    let (mut records, mut end) = (Vec::new(), true);
    let mut bytes = 0;
    tables::VOLUMES.from(All, VolumeId(first)).scan(view.read, &mut |id, record| {
        if records.len() == limit || bytes > PAGE_BYTES_MAX {
            end = false;
            return Scan::Stop;
        }
        bytes += SHOWN_BYTES + record.to_value().len();
        records.push((id, record));
        Scan::More
    })?;
    let volumes = records.into_iter().map(|(id, record)| shown(view.read, id, record));
    Ok(VolumePage { volumes: volumes.collect::<Result<_>>()?, end })
}
