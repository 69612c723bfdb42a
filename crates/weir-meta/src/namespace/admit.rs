//! Whether the rules for mounts let a request reach its inode, and as which user it acts there.
//!
//! Invariants: of a refused volume only its topmost directory is shown, and the directories on the way to a
//! volume that is not refused. Nothing in a read-only volume changes, except for the recovery after a dead
//! writer. A mount that no rule names pays one look-up.
use super::usage::is_within;
use super::*;
use crate::access::Mount;
use crate::reach::{Place, Reach, Reaches};
use crate::witness::Found;
use std::sync::Arc;
use weir_proto::access::Grant;
use weir_trust::rules::Decision;

/// The request as the user that the rules map its user to; `None`: unchanged.
pub fn admit<R: Reaches>(read: &dyn Read, rules: &Rules<'_>, request: &R) -> Result<Option<R>> {
    let Some(mount) = rules.mount else { return Ok(None) };
    let mut mapped = request.clone();
    let uid = mapped.cred_mut().map(|cred| cred.uid);
    let (mut decision, gate) = (None, Gate { read, rules, mount, what: R::NAME, uid });
    for reach in request.reach().iter().flatten() {
        let of_place = gate.pass(reach)?;
        decision = decision.or(of_place);
    }
    let Some(cred) = mapped.cred_mut() else { return Ok(None) };
    *cred = match decision {
        Some(decision) => decision.acts_as(cred),
        None => mount.outside_of_volumes().acts_as(cred),
    };
    Ok(Some(mapped))
}

struct Gate<'a> {
    read: &'a dyn Read,
    rules: &'a Rules<'a>,
    mount: &'a Mount,
    what: &'static str,
    uid: Option<u32>,
}

impl Gate<'_> {
    /// The decision for the volume of a place; `None`: it is in none. An error: it is out of reach.
    fn pass(&self, reach: &Reach<'_>) -> Result<Option<Arc<Decision>>> {
        let Some(id) = self.volume_of(reach.place)? else { return Ok(None) };
        let decision = self.decision(id)?;
        let is_open = match decision.grant {
            Grant::ReadWrite => true,
            Grant::ReadOnly => !reach.changes,
            Grant::Refused => self.leads_on(id, reach.place)?,
        };
        if is_open { Ok(Some(decision)) } else { Err(self.refuse(id, &decision)) }
    }

    fn volume_of(&self, place: Place<'_>) -> Result<Option<VolumeId>> {
        match place {
            Place::Inode(ino) | Place::Shown(ino) => volume_of_any(self.read, ino),
            Place::Name(dir, _) => volume::find_volume_of(self.read, dir),
            Place::Volume(id) => Ok(volume::find(self.read, id)?.map(|_| id)),
            Place::Snapshot(number) => {
                let holds = |all: &Vec<keeper::Snap>| all.iter().any(|s| s.number == number);
                Ok(self.rules.snapshots.iter().find(|(_, all)| holds(all)).map(|(id, _)| *id))
            }
        }
    }

    fn decision(&self, id: VolumeId) -> Result<Arc<Decision>> {
        self.mount.decision(id, || volume::load(self.read, id))
    }

    /// In a refused volume: its topmost directory, and the way to a volume that is not refused.
    fn leads_on(&self, id: VolumeId, place: Place<'_>) -> Result<bool> {
        let ino = match place {
            Place::Shown(ino) => ino,
            Place::Name(dir, name) => match find_link(self.read, dir, name)? {
                Some(link) if link.kind == FileKind::Directory => link.ino,
                _ => return Ok(false),
            },
            _ => return Ok(false),
        };
        if volume::load(self.read, id)?.root == ino {
            return Ok(true);
        }
        let all = tables::VOLUMES.all().collect(self.read, usize::MAX, |id, record| (id, record))?;
        for (other, root) in all.into_iter().filter(|(_, v)| !v.deleting).map(|(id, v)| (id, v.root)) {
            if self.decision(other)?.grant != Grant::Refused && is_within(self.read, root, ino)? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn refuse(&self, id: VolumeId, decision: &Decision) -> Error {
        let name = volume::load(self.read, id).map_or_else(|_| id.to_string(), |record| record.name);
        let (kind, how) = match decision.grant {
            Grant::Refused => (weir_proto::ErrorKind::Denied, "refused"),
            _ => (weir_proto::ErrorKind::Name(NameRule::ReadOnly), "read only"),
        };
        let why = format!("volume {name:?} is {how} for node {:?}: {}", self.mount.origin.name, decision.why);
        self.mount.report(self.rules.session, id, (&name, &why), self.what, self.uid);
        Error::new(kind, why).hint("`weir access list` shows the rules")
    }
}

/// The volume of an inode of any kind; `None`: it is gone, or has had no name yet.
pub fn volume_of_any(read: &dyn Read, ino: InodeId) -> Result<Option<VolumeId>> {
    match find_inode(read, ino)? {
        Some(inode) if inode.parent == crate::record::NEVER_NAMED => Ok(None),
        Some(inode) => volume::find_volume_of(read, inode.parent),
        None => volume::find_volume_of(read, ino),
    }
}

impl Rules<'_> {
    /// Fails unless the rules for mounts allow this mount to change an inode.
    pub fn require_changeable(&self, read: &dyn Read, ino: InodeId, what: &'static str) -> Result<()> {
        let Some(mount) = self.mount else { return Ok(()) };
        let gate = Gate { read, rules: self, mount, what, uid: None };
        gate.pass(&Reach { place: Place::Inode(ino), changes: true }).map(drop)
    }
}

/// The target of a request, for the audit log; `name`: in that directory. `None`: in no volume, or a
/// snapshot.
pub(crate) fn find_place(read: &dyn Read, reach: &Reach<'_>, name: Option<&[u8]>) -> Result<Option<Found>> {
    let found = match reach.place {
        Place::Inode(ino) | Place::Shown(ino) => volume_of_any(read, ino)?.map(|id| (id, ino)),
        Place::Name(dir, _) => volume::find_volume_of(read, dir)?.map(|id| (id, dir)),
        Place::Volume(id) => volume::find(read, id)?.map(|record| (id, record.root)),
        Place::Snapshot(_) => None,
    };
    let Some((id, ino)) = found else { return Ok(None) };
    let Some(volume) = volume::find(read, id)? else { return Ok(None) };
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let below = path::Paths::new(read, volume.root).of(ino)?;
    let below = below.map_or_else(|| format!("inode {ino}"), |path| text(&path));
    let name = name.map(|name| format!("/{}", text(name))).unwrap_or_default();
    let path = format!("{below}{name}").trim_start_matches('/').to_owned();
    Ok(Some(Found { volume: volume.name, made_at: text(&volume.path), path }))
}
