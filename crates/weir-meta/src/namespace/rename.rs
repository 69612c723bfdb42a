//! Rename: one name moves, replaces another, or two are exchanged. Atomic; no directory ever comes below
//! itself.
use super::charge::Charge;
use super::dir_names::DirNames;
use super::gate::{OwnDir, revoke_both};
use super::remove::{is_last, require_empty};
use super::usage::{is_within, usage_of};
use super::*;
use weir_proto::meta::{self, RenameMode, Renamed};
use weir_proto::relation::What;

/// One end of a rename.
#[derive(Clone, Copy)]
pub(super) struct End<'a> {
    pub dir: InodeId,
    pub name: &'a [u8],
}

pub fn rename(cx: &mut Cx<'_>, r: &meta::Rename) -> Attempt<Renamed> {
    check_name(&r.name)?;
    check_name(&r.new_name)?;
    let (from, to) = (cx.dir_to_search(&r.cred, r.parent)?, cx.dir_to_search(&r.cred, r.new_parent)?);
    from.require_listed(cx)?;
    to.require_listed(cx)?;
    let moved = from.load(cx, &r.name)?;
    let target = to.find(cx, &r.new_name)?;
    check_mode(r, target.as_ref())?;
    let (from, to) = (from.for_change(cx)?, to.for_change(cx)?);
    volume::require_same(from.access().volume, to.access().volume)?;
    let replaced = target.filter(|t| t.ino != moved.ino);
    if target.is_none() || replaced.is_some() {
        check_move(cx.read(), r, from.access(), &moved)?;
        if let Some(other) = &replaced {
            if other.kind == FileKind::Directory && r.mode != RenameMode::Exchange {
                let victim = load_access(cx.read(), other.ino)?;
                require_listed(cx.obstacles, other.ino, &victim)?;
            }
            check_target(cx.read(), r, to.access(), &moved, other)?;
        }
        let others: Vec<InodeId> = [moved.ino].into_iter().chain(replaced.map(|other| other.ino)).collect();
        let dirs = revoke_both(cx, (from, to), &others)?;
        carry_out(cx, r, &dirs, (&moved, replaced.as_ref()))?;
    }
    // Two links of one file. POSIX: no change.
    Ok(Renamed {
        moved: moved.ino,
        replaced: replaced.map(|t| t.ino),
        parent_attr: directory(cx.read(), r.parent)?,
        new_parent_attr: directory(cx.read(), r.new_parent)?,
    })
}

fn check_mode(r: &meta::Rename, target: Option<&Link>) -> Result<()> {
    match (r.mode, target) {
        (RenameMode::NoReplace, Some(_)) => {
            Err(Error::exists(format!("{:?} is in directory {} already", show(&r.new_name), r.new_parent)))
        }
        (RenameMode::Exchange, None) => {
            Err(Error::not_found(format!("{:?} is not in directory {}", show(&r.new_name), r.new_parent)))
        }
        _ => Ok(()),
    }
}

/// Whether `link` may leave its directory for another.
fn check_leaves(read: &dyn Read, cred: &Cred, dir: &Access, link: &Link, across: bool) -> Result<()> {
    let moves_directory = across && link.kind == FileKind::Directory;
    if !dir.owned().is_sticky() && !moves_directory {
        return Ok(());
    }
    let owned = owner_of(read, link.ino, link.kind)?;
    require_sticky(cred, dir, owned.uid)?;
    // Its ".." changes: that is a write to the directory itself.
    if moves_directory && !allows(read, cred, link.ino, owned, WRITE)? {
        return Err(Error::denied(format!("user {} may not change directory {}", cred.uid, link.ino)));
    }
    Ok(())
}

fn check_move(read: &dyn Read, r: &meta::Rename, from_dir: &Access, moved: &Link) -> Result<()> {
    let across = r.parent != r.new_parent;
    check_leaves(read, &r.cred, from_dir, moved, across)?;
    if across && moved.kind == FileKind::Directory && is_within(read, r.new_parent, moved.ino)? {
        return Err(Error::invalid(format!("directory {} cannot move below itself", moved.ino)));
    }
    if across && moved.kind == FileKind::Directory && trash::is_in_trash(read, r.new_parent)? {
        volume::require_no_root(read, from_dir.volume, moved.ino)?;
    }
    Ok(())
}

fn check_target(
    read: &dyn Read,
    r: &meta::Rename,
    to_dir: &Access,
    moved: &Link,
    other: &Link,
) -> Result<()> {
    let across = r.parent != r.new_parent;
    let exchange = r.mode == RenameMode::Exchange;
    check_leaves(read, &r.cred, to_dir, other, across && exchange)?;
    if exchange {
        if across && other.kind == FileKind::Directory && is_within(read, r.parent, other.ino)? {
            return Err(Error::invalid(format!("directory {} cannot move below itself", other.ino)));
        }
        return Ok(());
    }
    match (moved.kind == FileKind::Directory, other.kind == FileKind::Directory) {
        (true, true) => {
            volume::require_no_root(read, to_dir.volume, other.ino)?;
            require_empty(read, other.ino)
        }
        (true, false) => {
            Err(Error::name(NameRule::NotDirectory, format!("{:?} is not a directory", show(&r.new_name))))
        }
        (false, true) => {
            Err(Error::name(NameRule::IsDirectory, format!("{:?} is a directory", show(&r.new_name))))
        }
        (false, false) => Ok(()),
    }
}

fn carry_out(
    cx: &mut Cx<'_>,
    r: &meta::Rename,
    (from, to): &(OwnDir, OwnDir),
    (moved, other): (&Link, Option<&Link>),
) -> Result<()> {
    assert_ne!(Some(moved.ino), other.map(|o| o.ino), "two links of one file are not renamed");
    log_renamed(cx, r, moved, other)?;
    let from = End { dir: from.ino(), name: &r.name };
    let to = End { dir: to.ino(), name: &r.new_name };
    take_away(cx, from, moved)?;
    if let Some(other) = other {
        take_away(cx, to, other)?;
    }
    // A replaced name stays in its place: a concurrent reader of the directory does not miss it.
    let place = put_there(cx, to, moved, other.map(|o| o.cookie))?;
    relocate(cx, moved, from, (to, place))?;
    match other {
        Some(other) if r.mode == RenameMode::Exchange => {
            let place = put_there(cx, from, other, Some(moved.cookie))?;
            relocate(cx, other, to, (from, place))
        }
        Some(other) if other.kind == FileKind::Directory => cx.destroy_directory(to.dir, other.ino),
        Some(other) => cx.drop_link(to.dir, to.name, other.ino),
        None => Ok(()),
    }
}

fn log_renamed(cx: &mut Cx<'_>, r: &meta::Rename, moved: &Link, other: Option<&Link>) -> Result<()> {
    if cx.rules.logged.is_empty() {
        return Ok(());
    }
    let (ino, kind, parent, name) = (moved.ino, moved.kind, r.parent, r.name.clone());
    let what = match other {
        Some(other) if r.mode == RenameMode::Exchange => What::Exchanged {
            ino,
            other: other.ino,
            parent,
            name,
            other_parent: r.new_parent,
            other_name: r.new_name.clone(),
        },
        _ => {
            let replaced = match other {
                Some(other) => Some((other.ino, is_last(cx.read(), other.ino)?)),
                None => None,
            };
            let (new_parent, new_name) = (r.new_parent, r.new_name.clone());
            What::Renamed { ino, kind, parent, name, new_parent, new_name, replaced }
        }
    };
    cx.log(parent, || what)
}

fn take_away(cx: &mut Cx<'_>, end: End<'_>, link: &Link) -> Result<()> {
    let mut names = DirNames::load(cx.read(), end.dir)?;
    names.remove(cx, end.name, link);
    names.store(cx);
    Ok(())
}
/// `place`: that of the replaced name, which was removed just now; otherwise after all others. Returns the
/// place.
fn put_there(cx: &mut Cx<'_>, end: End<'_>, link: &Link, place: Option<u64>) -> Result<u64> {
    let mut names = DirNames::load(cx.read(), end.dir)?;
    let place = match place {
        Some(place) => {
            names.insert_at(cx, place, end.name, (link.ino, link.kind));
            place
        }
        None => names.insert(cx, end.name, link.ino, link.kind),
    };
    names.store(cx);
    Ok(place)
}

/// The moved inode remembers its place, and its charge moves with it.
fn relocate(cx: &mut Cx<'_>, link: &Link, from: End<'_>, to: (End<'_>, u64)) -> Result<()> {
    if link.kind == FileKind::Directory {
        relocate_directory(cx, link.ino, from, to)
    } else {
        relocate_file(cx, link.ino, from, to)
    }
}

fn relocate_directory(
    cx: &mut Cx<'_>,
    dir: InodeId,
    from: End<'_>,
    (to, place): (End<'_>, u64),
) -> Result<()> {
    let mut tally = load_tally(cx.read(), dir)?;
    tally.ctime = cx.rules.after(tally.ctime);
    cx.put_tally(dir, &tally);
    cx.note_root_moved(dir, (to.dir, to.name), from.dir == to.dir)?;
    let mut access = load_access(cx.read(), dir)?;
    (access.parent, access.cookie) = (to.dir, place);
    if from.dir != to.dir {
        let charge = Charge::directory(&usage_of(cx.read(), dir)?);
        cx.charge(from.dir, charge.back())?;
        cx.charge(to.dir, charge)?;
    }
    cx.put_access(dir, &access);
    Ok(())
}

/// A file gets another, unused name.
pub(super) fn move_file(cx: &mut Cx<'_>, link: &Link, from: End<'_>, to: End<'_>) -> Result<()> {
    take_away(cx, from, link)?;
    let place = put_there(cx, to, link, None)?;
    relocate_file(cx, link.ino, from, (to, place))
}

fn relocate_file(cx: &mut Cx<'_>, ino: InodeId, from: End<'_>, (to, place): (End<'_>, u64)) -> Result<()> {
    let mut inode = load_file(cx.read(), ino)?;
    inode.ctime = cx.rules.after(inode.ctime);
    if inode.nlink > 1 && tables::LINKS.has(cx.read(), (ino, from.dir, from.name))? {
        tables::LINKS.delete(cx.txn, (ino, from.dir, from.name));
        tables::LINKS.put(cx.txn, (ino, to.dir, to.name), &Present);
    } else {
        if from.dir != to.dir {
            cx.charge(from.dir, Charge::file(&inode).back())?;
            cx.charge(to.dir, Charge::file(&inode))?;
        }
        (inode.parent, inode.cookie) = (to.dir, place);
    }
    cx.put_inode(ino, &inode);
    Ok(())
}
