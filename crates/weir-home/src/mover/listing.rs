//! Listings of home: a directory is read there, and its entries are reported to the leader.
use super::assigned::{Done, reported};
use super::relations::Relation;
use crate::{Fault, HomePath, ListEntry};
use bytes::Bytes;
use weir_proto::meta::FileKind;
use weir_proto::relation::{HOME_ENTRIES_MAX, HomeAttrs, HomeEntry, ListDone, ListWork, Outcome as Reported};
use weir_proto::{Error, ErrorKind, Wire};

/// Entries per page when a directory is read again: a home that is a directory reads all names for each page.
const PAGE: usize = 4096;

/// Bytes of a message about a directory, and of an entry without its variable parts.
const LISTING_BYTES_MAX: usize = 256 << 10;
const ENTRY_BYTES: usize = 128;

impl Relation {
    pub(super) async fn list(&self, work: ListWork) {
        let read = match work.again {
            true => self.read_again(&work).await,
            false => self.read_to_end(&work).await,
        };
        let outcome = match read {
            Ok(()) => Reported::Done { fingerprint: Bytes::new() },
            Err(reported) => reported,
        };
        self.report(Done::List(ListDone { dir: work.dir, outcome }));
    }

    async fn read_to_end(&self, work: &ListWork) -> std::result::Result<(), Reported> {
        let path = HomePath::parse(&work.path).map_err(|e| Reported::Refused { why: e.to_string() })?;
        let mut lister = self.home.read_dir(&path).await.map_err(|f| reported_of_directory(&f))?;
        let mut left = Vec::new();
        loop {
            let listing = lister.next(HOME_ENTRIES_MAX).await.map_err(|f| reported_of_directory(&f))?;
            left.extend(self.shown(&path, listing.entries));
            while !left.is_empty() || listing.end {
                let rest = left.split_off(fits_a_message(&left));
                let part = std::mem::replace(&mut left, rest);
                let end = listing.end && left.is_empty();
                let reported = self.session.client.mover().report_listing(self.id, work.dir, part, end).await;
                reported.map_err(|e| refused(&e))?;
                if end {
                    return Ok(());
                }
            }
        }
    }

    /// Page by page in the order of the names, so that names missing between two entries are known to be
    /// gone.
    async fn read_again(&self, work: &ListWork) -> std::result::Result<(), Reported> {
        let path = HomePath::parse(&work.path).map_err(|e| Reported::Refused { why: e.to_string() })?;
        let mut after: Option<Bytes> = None;
        loop {
            let page = self.home.list(&path, after.as_deref(), PAGE).await;
            let page = page.map_err(|f| reported_of_directory(&f))?;
            let last = page.entries.last().map(|entry| entry.name.clone());
            let mut left = self.shown(&path, page.entries);
            // A home that stores names in another form has its own order: then one page is the whole
            // directory, or in order.
            let behind = |entry: &HomeEntry| after.as_ref().is_none_or(|after| entry.name > *after);
            let is_ordered = left.is_sorted_by(|a, b| a.name < b.name) && left.first().is_none_or(behind);
            let is_all = after.is_none() && page.end;
            if !is_ordered && !is_all {
                let why = format!(
                    "more than {PAGE} entries, which this home does not list in the order of their names"
                );
                return Err(Reported::Refused { why });
            }
            left.sort_by(|a, b| a.name.cmp(&b.name));
            loop {
                let rest = left.split_off(fits_a_message(&left));
                let part = std::mem::replace(&mut left, rest);
                let end = page.end && left.is_empty();
                let is_rest = left.is_empty();
                let named = part.last().map(|entry| entry.name.clone());
                // Entries that are not shown were read, too.
                let upto = if is_rest { last.clone().max(named) } else { named }.filter(|_| !end);
                let from = after.clone().unwrap_or_default();
                if upto.is_none() && !end {
                    break;
                }
                after = upto.clone().or(after);
                let again =
                    self.session.client.mover().report_relisting(self.id, work.dir, from, part, upto).await;
                again.map_err(|e| refused(&e))?;
                if end {
                    return Ok(());
                }
                if is_rest {
                    break;
                }
            }
        }
    }

    /// The entries of a listing that pass the map.
    fn shown(&self, dir: &HomePath, entries: Vec<ListEntry>) -> Vec<HomeEntry> {
        let passes = |entry: &ListEntry| {
            let passes = self.home.lets_through(entry.found.fingerprint.kind);
            if !passes {
                let (home, name) = (self.home.url(), entry.name.escape_ascii());
                let device = format_args!("{home}: {name} in {dir} is a device and is skipped");
                if let Some(more) = self.session.env.watch.line("a device is skipped") {
                    tracing::warn!("{device}: no rule allows devices{more}");
                }
            }
            passes
        };
        entries.into_iter().filter(passes).map(home_entry).collect()
    }
}

/// How many of the first entries fit into one message; at least one, if there is one.
fn fits_a_message(entries: &[HomeEntry]) -> usize {
    let mut bytes = 0;
    let fits = entries.iter().take(HOME_ENTRIES_MAX).take_while(|entry| {
        let xattrs: usize = entry.attrs.xattrs.iter().map(|(name, value)| name.len() + value.len() + 8).sum();
        let first = bytes == 0;
        bytes += ENTRY_BYTES + entry.name.len() + entry.target.len() + entry.fingerprint.len() + xattrs;
        first || bytes <= LISTING_BYTES_MAX
    });
    fits.count()
}

/// The leader refused the report about a directory.
fn refused(e: &Error) -> Reported {
    match e.kind {
        ErrorKind::Invalid | ErrorKind::Name(_) => Reported::Refused { why: e.to_string() },
        _ => Reported::Later { why: e.to_string() },
    }
}

fn home_entry(entry: ListEntry) -> HomeEntry {
    let ListEntry { name, found } = entry;
    let a = &found.attrs;
    let xattrs = a.xattrs.iter().map(|x| (x.name.clone(), x.value.clone())).collect();
    let attrs = HomeAttrs { mode: a.mode, uid: a.uid, gid: a.gid, atime: a.atime, mtime: a.mtime, xattrs };
    let kind = found.fingerprint.kind;
    let has_more_names = kind != FileKind::Directory && found.nlink > 1;
    HomeEntry {
        name,
        kind,
        fingerprint: Bytes::from(found.fingerprint.to_bytes()),
        id: if has_more_names { found.fingerprint.id.clone() } else { Bytes::new() },
        attrs,
        size: found.fingerprint.size,
        target: found.target,
        rdev: found.rdev,
    }
}

/// The report for a directory that could not be read. An entry that is gone at home needs no resolution.
fn reported_of_directory(fault: &Fault) -> Reported {
    match fault {
        Fault::Diverged(_) => {
            Reported::Diverged { why: "it is gone there, or something else has its name".to_owned() }
        }
        // Only this directory, and waiting does not change the permission.
        Fault::Denied(e) => Reported::Refused { why: e.to_string() },
        fault => reported(fault),
    }
}
