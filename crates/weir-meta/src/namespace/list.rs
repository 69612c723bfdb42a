//! Directory listings, in the order in which names were created: stable while others are created and removed.
//! A volume's trash is not listed: tools that remove or copy a tree do not enter it.
use super::*;
use crate::record::Listed;
use weir_kv::Scan;
use weir_proto::meta::{ListEntry, Listing, ReadDir};

/// Entries of one reply, for any request.
const ENTRIES_MAX: usize = 4096;
/// Bytes of names and attributes of one reply: half of what a message body may have.
const LISTING_BYTES_MAX: usize = 512 * 1024;
/// Bytes of an entry with attributes, without its name.
const ENTRY_BYTES: usize = 192;

pub fn readdir(view: &mut View<'_>, r: &ReadDir) -> Attempt<Listing> {
    let access = load_access(view.read, r.dir)?;
    require(view.read, &r.cred, &access, r.dir, READ)?;
    require_listed(view.obstacles, r.dir, &access)?;
    let (found, end) = scan_names(view.read, r)?;
    let mut entries = Vec::with_capacity(found.len());
    for (cookie, listed) in found {
        if trash::is_hidden(view.read, access.volume, &listed.name, listed.ino)? {
            continue;
        }
        let entry = if r.with_attrs { show_unless_written(view, &listed)? } else { None };
        entries.push(ListEntry { name: listed.name, ino: listed.ino, kind: listed.kind, cookie, entry });
    }
    let newest = load_tally(view.read, r.dir)?.next_cookie - 1;
    Ok(Listing { entries, end, dir_lease: nothing(), newest })
}

fn scan_names(read: &dyn Read, r: &ReadDir) -> Result<(Vec<(u64, Listed)>, bool)> {
    let limit = (r.limit as usize).clamp(1, ENTRIES_MAX);
    let (mut found, mut bytes, mut end) = (Vec::with_capacity(limit.min(256)), 0, true);
    if r.after == u64::MAX {
        return Ok((found, true));
    }
    tables::LISTED.from(r.dir, (r.dir, r.after + 1)).scan(read, &mut |(_, cookie), listed| {
        if found.len() == limit || bytes > LISTING_BYTES_MAX {
            end = false;
            return Scan::Stop;
        }
        bytes += ENTRY_BYTES + listed.name.len();
        found.push((cookie, listed));
        Scan::More
    })?;
    Ok((found, end))
}

/// A file that another session is writing is omitted: a client that wants its attributes asks for them, and
/// waits.
fn show_unless_written(view: &View<'_>, listed: &Listed) -> Result<Option<Entry>> {
    let mut conflicts = Vec::<Conflict>::new();
    view.rules.leases.conflicts(view.rules.session, listed.ino, Need::GetAttr, &mut conflicts);
    if !conflicts.is_empty() {
        return Ok(None);
    }
    entry_of(view.read, view.rules, listed.ino, listed.kind).map(Some)
}
