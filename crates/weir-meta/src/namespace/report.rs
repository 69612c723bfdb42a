//! The data of a usage report on inodes, in batches that take the leader a moment each.
use super::*;
use crate::keys::Letter;
use weir_kv::Scan;
use weir_proto::volume::{DirectoryFacts, FileFacts, SCANNED_MAX, ScanInodes, Scanned};

pub fn scan(view: &mut View<'_>, r: &ScanInodes) -> Result<Scanned> {
    if r.volume != VolumeId(0) {
        volume::load_as_admin(view.read, &r.cred, r.volume)?;
    } else if r.cred.uid != 0 {
        return Err(Error::denied(format!(
            "user {} may not read all volumes: name one that this user owns or administers",
            r.cred.uid
        )));
    }
    let mut scanned =
        Scanned { directories: Vec::new(), files: Vec::new(), last: InodeId(u64::MAX), end: true };
    let Some(first) = r.after.0.checked_add(1).map(InodeId) else { return Ok(scanned) };
    let (letter, start) = if r.directories {
        (Letter::Access, tables::ACCESS.key(first))
    } else {
        (Letter::Inode, tables::INODES.key(first))
    };
    let (mut seen, mut bad) = (0, None);
    view.read.scan(&start, &keys::range_of_letter(letter).1, &mut |key, value| {
        if seen == SCANNED_MAX {
            scanned.end = false;
            return Scan::Stop;
        }
        seen += 1;
        scanned.last = keys::numbered(key);
        match note(&mut scanned, value, r.directories) {
            Ok(()) => Scan::More,
            Err(e) => {
                bad = Some(e);
                Scan::Stop
            }
        }
    })?;
    if let Some(e) = bad {
        return Err(e);
    }
    only_of(view.read, r.volume, &mut scanned)?;
    Ok(scanned)
}

fn note(scanned: &mut Scanned, value: &[u8], directories: bool) -> Result<()> {
    let ino = scanned.last;
    if directories {
        let Access { parent, volume, uid, .. } = Access::from_value(value, || format!("directory {ino}"))?;
        scanned.directories.push(DirectoryFacts { ino, parent, volume, uid });
        return Ok(());
    }
    let inode = Inode::from_value(value, || format!("inode {ino}"))?;
    if inode.nlink > 0 {
        scanned.files.push(FileFacts {
            ino,
            kind: inode.kind,
            parent: inode.parent,
            uid: inode.uid,
            size: inode.size,
            allocated: inode.online(),
            evicted: inode.evicted,
            inline: is_inline(&inode),
        });
    }
    Ok(())
}

/// It takes bytes, and nothing is on targets.
fn is_inline(inode: &Inode) -> bool {
    let FileKind::Regular = inode.kind else { return false };
    inode.allocated > 0 && inode.writing.data_end == 0 && inode.evicted == 0
}

fn only_of(read: &dyn Read, volume: VolumeId, scanned: &mut Scanned) -> Result<()> {
    if volume == VolumeId(0) {
        return Ok(());
    }
    scanned.directories.retain(|d| d.volume == volume);
    let mut kept = Vec::new();
    for file in std::mem::take(&mut scanned.files) {
        if volume::volume_of(read, file.parent)? == volume {
            kept.push(file);
        }
    }
    scanned.files = kept;
    Ok(())
}
