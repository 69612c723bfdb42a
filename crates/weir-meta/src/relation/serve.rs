//! Messages about relations: administration, consumers of a changelog, movers.
use super::record::{ConflictRecord, DirtyRange, FINISH, ReceiptRecord, RelationRecord, RemoteEntry};
use super::ship_queue::{self, Batch, ExtentOut, ShipQueue, WorkRequest};
use super::{MOVER_SILENT, ShipQueues, dirty, ingest, listing, store, tree};
use crate::executor::Leader;
use crate::keys::{self, Sequence};
use crate::namespace::create::next_number;
use crate::namespace::path::Paths;
use crate::namespace::{Cx, View, find_inode, import, log, volume};
use crate::record::{ChangeRecord, Inode, Record};
use bytes::Bytes;
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;
use weir_env::Instant;
use weir_kv::CommitSeq;
use weir_proto::home_rule::HomeUrlParts;
use weir_proto::meta::{FileKind, Time};
use weir_proto::part::HomeRules;
use weir_proto::relation::*;
use weir_proto::{Error, InodeId, NameRule, Result, SessionId, VolumeId};

/// Relations of one volume.
const RELATIONS_MAX: usize = 8;
/// Longest name of a consumer, in bytes.
const CURSOR_NAME_MAX: usize = 64;
/// Dirty ranges and queued changes that are counted for a report.
const COUNTED_MAX: usize = 200_000;
/// Conflicts that a report names.
const CONFLICTS_SHOWN: usize = 100;
/// The text of the reason for a conflict, in bytes.
const WHY_MAX: usize = 4096;
/// Longest wait of a mover or a consumer.
const WAIT_MAX: Duration = Duration::from_secs(20);

// ---- administration: operations on the store

pub fn add(cx: &mut Cx<'_>, r: &RelationAdd) -> Result<RelationInfo> {
    let of = volume::load_as_admin(&*cx.txn, &r.cred, r.volume)?;
    check_url(&r.url)?;
    if r.cred.uid != 0 && r.ids != HomeIds::default() {
        return Err(Error::denied("only the superuser has a home where users have other numbers"));
    }
    crate::namespace::clone::require_whole(&*cx.txn, r.volume)?;
    let all = store::relations(&*cx.txn)?;
    if all.iter().any(|(_, other)| other.volume == r.volume && other.url == r.url) {
        return Err(Error::exists(format!("volume {:?} has a relation with {} already", of.name, r.url)));
    }
    if let Some((id, other)) = all.iter().find(|(_, other)| overlap(&other.url, &r.url)) {
        let why = format!("{} and {}, the home of relation {id}, lie in one another", r.url, other.url);
        return Err(Error::exists(why));
    }
    if all.iter().filter(|(_, other)| other.volume == r.volume).count() >= RELATIONS_MAX {
        return Err(Error::invalid(format!("volume {:?} has {RELATIONS_MAX} relations already", of.name)));
    }
    let mirrors = r.direction == Direction::Mirror;
    let is_related = all.iter().any(|(_, other)| other.volume == r.volume);
    if mirrors && r.evict {
        return Err(Error::invalid(
            "all data of a mirror is at home: it may always be evicted, so leave that out",
        ));
    }
    if mirrors && is_related {
        return Err(Error::invalid(format!(
            "volume {:?} has a home already: it cannot mirror another one",
            of.name
        )));
    }
    if all.iter().any(|(_, other)| other.volume == r.volume && other.mirrors()) {
        return Err(Error::invalid(format!(
            "volume {:?} mirrors a home: it cannot be copied to another one",
            of.name
        )));
    }
    if mirrors && crate::namespace::snapshot::has_any(&*cx.txn, r.volume, false)? {
        return Err(Error::invalid(format!(
            "volume {:?} has snapshots: a volume that mirrors a home has none",
            of.name
        )));
    }
    let id = RelationId(next_number(cx.txn, Sequence::Relation)? as u32);
    let record = RelationRecord {
        volume: r.volume,
        url: r.url.clone(),
        direction: r.direction,
        evict: r.evict || mirrors,
        paused: None,
        created: cx.rules.now,
        ingested: log::last_number(&*cx.txn, r.volume)?,
        shipped_bytes: 0,
        shipped_names: 0,
        imports: r.import || mirrors,
        removing: false,
        ids: r.ids.clone(),
        by: r.cred.uid,
    };
    if r.import && is_related {
        return Err(Error::invalid(format!(
            "volume {:?} has a home already: what is there stays there",
            of.name
        )));
    }
    cx.txn.put(&keys::relation(id), &record.to_value());
    // Home's root is the volume's.
    let (kind, places, fingerprint) = (FileKind::Directory, Vec::new(), Bytes::new());
    let remote = RemoteEntry { kind, places, fingerprint, complete: None, writing: false };
    cx.txn.put(&keys::remote(id, of.root), &remote.to_value());
    match r.import || mirrors {
        true => import::begin(cx, id, of.root)?,
        false => cx.txn.put(&keys::unseen(id, of.root), &0u64.to_le_bytes()),
    }
    cx.events.relations = true;
    Ok(RelationInfo {
        id,
        volume: r.volume,
        volume_name: of.name,
        url: record.url,
        direction: record.direction,
        evict: record.evict,
        state: RelationState::Copying {},
        lag_ms: 0,
        backlog_bytes: 0,
        backlog_names: 0,
        unseen_directories: 1,
        rate: 0,
        shipped_bytes: 0,
        shipped_names: 0,
        movers: 0,
        limited_by: String::new(),
        home_failure: String::new(),
        conflicts: Vec::new(),
        scan_age_ms: 0,
    })
}

/// Whether one home is the other or lies in it, by their URLs.
fn overlap(one: &str, other: &str) -> bool {
    let (one, other) = (names_of(one), names_of(other));
    one.starts_with(&other) || other.starts_with(&one)
}

/// At a service with another address, a bucket of the same name is another one.
fn names_of(url: &str) -> Vec<Vec<u8>> {
    let (place, query) = url.split_once('?').unwrap_or((url, ""));
    let at = query.split('&').find(|pair| pair.starts_with("endpoint=")).unwrap_or_default();
    let names = place.split('/').map(unescaped).flat_map(|part| {
        let names = part.split(|b| *b == b'/').map(<[u8]>::to_vec);
        names.filter(|name| !name.is_empty() && name != b".").collect::<Vec<_>>()
    });
    std::iter::once(at.as_bytes().to_vec()).chain(names).collect()
}

/// `%20` is a space.
fn unescaped(text: &str) -> Vec<u8> {
    let (mut bytes, mut rest) = (Vec::new(), text.as_bytes());
    while let [first, left @ ..] = rest {
        let hex = left.get(..2).filter(|_| *first == b'%').and_then(|hex| std::str::from_utf8(hex).ok());
        let escaped = hex.and_then(|hex| u8::from_str_radix(hex, 16).ok());
        bytes.push(escaped.unwrap_or(*first));
        rest = if escaped.is_some() { &left[2..] } else { left };
    }
    bytes
}

pub fn check_url(url: &str) -> Result<()> {
    if url.len() > URL_MAX {
        return Err(Error::invalid(format!("the URL of a home has {} bytes: at most {URL_MAX}", url.len())));
    }
    HomeRules::of(url)?;
    HomeUrlParts::parse(url).map(drop)
}

pub fn change(cx: &mut Cx<'_>, r: &RelationDo) -> Result<()> {
    let mut record = store::load_relation(&*cx.txn, r.relation)?;
    volume::load_as_admin(&*cx.txn, &r.cred, record.volume)?;
    match r.verb {
        RelationVerb::Pause => record.paused = Some("by an administrator".to_owned()),
        RelationVerb::Resume => record.paused = None,
        RelationVerb::AllowEviction => record.evict = true,
        RelationVerb::ForbidEviction if record.mirrors() => {
            return Err(Error::invalid("all data of a mirror is at home: it may always be evicted"));
        }
        RelationVerb::ForbidEviction => record.evict = false,
        RelationVerb::Remove => {
            refuse_if_needed(&*cx.txn, r.relation, &record)?;
            record.removing = true;
            cx.events.relations = true;
        }
    }
    cx.txn.put(&keys::relation(r.relation), &record.to_value());
    cx.events.logged = true;
    Ok(())
}

/// Evicted bytes are found at home only through their relation.
fn refuse_if_needed(read: &dyn weir_kv::Read, id: RelationId, record: &RelationRecord) -> Result<()> {
    let (start, end) = keys::range_of_short(b'l', id.0);
    if !store::collect(read, &start, &end, 1, |_, _| Ok(()))?.is_empty() {
        let why = "not all names of the volume have been read at this home yet: `weir relation show` tells how many";
        return Err(Error::name(NameRule::Busy, why));
    }
    let others: Vec<_> = store::relations(read)?
        .into_iter()
        .filter(|(other, r)| *other != id && r.volume == record.volume)
        .collect();
    let (start, end) = keys::range_of_letter(b'W');
    let files = store::collect(read, &start, &end, usize::MAX, |key, _| {
        let ino = key.get(1..9).and_then(|b| b.try_into().ok()).map(u64::from_be_bytes);
        ino.map(InodeId).ok_or_else(|| Error::damaged("the key of an evicted range is damaged"))
    })?;
    let files: std::collections::BTreeSet<InodeId> = files.into_iter().collect();
    let mut away = 0u64;
    for ino in files {
        let Some(inode) = find_inode(read, ino)? else { continue };
        if volume::volume_of(read, inode.parent)? != record.volume {
            continue;
        }
        let mut is_elsewhere = false;
        for (other, of_it) in &others {
            is_elsewhere |= super::has_evicted(read, (*other, of_it), ino, &inode)?
                && read.get(&keys::conflict(*other, ino))?.is_none();
        }
        away += u64::from(!is_elsewhere);
    }
    if away > 0 {
        return Err(Error::name(
            NameRule::Busy,
            format!(
                "{away} files of the volume have bytes that are at this home only: recall them first (`weir file recall`)"
            ),
        ));
    }
    Ok(())
}

pub fn resolve(cx: &mut Cx<'_>, r: &RelationResolve) -> Result<()> {
    let record = store::load_relation(&*cx.txn, r.relation)?;
    volume::load_as_admin(&*cx.txn, &r.cred, record.volume)?;
    if record.mirrors() && r.how == Resolution::KeepVolume {
        return Err(Error::invalid("a mirror changes nothing at home: only what is there counts"));
    }
    let key = keys::conflict(r.relation, r.ino);
    if cx.txn.get(&key)?.is_none() {
        return Err(Error::not_found(format!("inode {} is not in conflict", r.ino)));
    }
    cx.txn.delete(&key);
    cx.events.relations = true;
    if r.how == Resolution::Retry {
        return Ok(());
    }
    // The file at home under this name is taken for ours, and all online bytes are shipped again. Evicted
    // bytes exist only at home: recalled ones must still match what was shipped.
    if let Some(remote) = tree::find_remote(&*cx.txn, r.relation, r.ino)? {
        let remote = RemoteEntry { fingerprint: Bytes::new(), ..remote };
        cx.txn.put(&keys::remote(r.relation, r.ino), &remote.to_value());
        let evicted = store::evicted_of(&*cx.txn, r.ino)?;
        for (from, to) in store::outside(&evicted, u64::MAX) {
            store::remove_receipts(cx.txn, r.relation, r.ino, from, to)?;
        }
        let number = log::last_number(&*cx.txn, record.volume)?;
        tree::ship_whole(cx.txn, r.relation, number, cx.rules.now, r.ino, &evicted)?;
    }
    Ok(())
}

pub fn suspect(cx: &mut Cx<'_>, r: &RelationSuspect) -> Result<()> {
    let record = store::load_relation(&*cx.txn, r.relation)?;
    volume::load_as_admin(&*cx.txn, &r.cred, record.volume)?;
    if r.why.is_empty() || r.why.len() > WHY_MAX {
        return Err(Error::invalid(format!("why inode {} is suspect: 1 to {WHY_MAX} bytes", r.ino)));
    }
    if tree::find_remote(&*cx.txn, r.relation, r.ino)?.is_none() {
        return Err(Error::not_found(format!("inode {} is not at home of {}", r.ino, r.relation)));
    }
    let record = ConflictRecord { diverged: true, why: r.why.clone(), at: cx.rules.now };
    cx.txn.put(&keys::conflict(r.relation, r.ino), &record.to_value());
    Ok(())
}

pub fn ack(cx: &mut Cx<'_>, r: &AckChanges) -> Result<()> {
    volume::load_as_admin(&*cx.txn, &r.cred, r.volume)?;
    if r.cursor.is_empty() || r.cursor.len() > CURSOR_NAME_MAX {
        return Err(Error::invalid(format!(
            "cursor {:?}: expected a name of 1 to {CURSOR_NAME_MAX} bytes",
            r.cursor
        )));
    }
    let key = keys::cursor(r.volume, &r.cursor);
    let newest = log::last_number(&*cx.txn, r.volume)?;
    let at = match cx.txn.get(&key)?.and_then(|v| <[u8; 8]>::try_from(v).ok()) {
        Some(at) => u64::from_le_bytes(at).max(r.upto.min(newest)),
        None => {
            cx.events.relations = true;
            newest
        }
    };
    cx.txn.put(&key, &at.to_le_bytes());
    cx.events.logged = true;
    Ok(())
}

pub fn drop_cursor(cx: &mut Cx<'_>, r: &DropCursor) -> Result<()> {
    volume::load_as_admin(&*cx.txn, &r.cred, r.volume)?;
    let key = keys::cursor(r.volume, &r.cursor);
    if cx.txn.get(&key)?.is_none() {
        return Err(Error::not_found(format!("volume {} has no cursor {:?}", r.volume, r.cursor)));
    }
    cx.txn.delete(&key);
    cx.events.relations = true;
    cx.events.logged = true;
    Ok(())
}

/// The homes of a file in the order in which they are asked for evicted bytes: first those with the latest
/// state, then the one that it was evicted for, because another one may evict from now on.
fn best_first(
    read: &dyn weir_kv::Read,
    ino: InodeId,
    inode: &Inode,
    homes: Vec<(RelationId, RelationRecord)>,
) -> Result<Vec<(RelationId, RelationRecord)>> {
    let mut all = Vec::new();
    for (id, record) in homes {
        let conflicts = read.get(&keys::conflict(id, ino))?.is_some();
        let has_it = super::has_evicted(read, (id, &record), ino, inode)?;
        all.push(((conflicts, !has_it, !record.evict), (id, record)));
    }
    all.sort_by_key(|(order, _)| *order);
    Ok(all.into_iter().map(|(_, relation)| relation).collect())
}

pub fn where_at_home(view: &mut View<'_>, r: &WhereAtHome) -> Result<HomePlace> {
    let ino = r.ino;
    let relations = match r.relation {
        Some(id) => {
            let record = store::load_relation(view.read, id)?;
            require_of(view.read, record.volume, ino)?;
            vec![(id, record)]
        }
        None => {
            let mut known = Vec::new();
            for (id, record) in store::relations(view.read)? {
                if tree::find_remote(view.read, id, ino)?.is_some() {
                    known.push((id, record));
                }
            }
            match find_inode(view.read, ino)? {
                Some(inode) if known.len() > 1 => best_first(view.read, ino, &inode, known)?,
                _ => known,
            }
        }
    };
    for (id, record) in relations {
        let Some(path) = tree::path(view.read, id, ino)? else { continue };
        let Some(remote) = tree::find_remote(view.read, id, ino)? else { continue };
        let receipts = store::receipts_of(view.read, id, ino)?;
        let receipts =
            receipts.into_iter().map(|(offset, r)| Receipt { offset, len: r.len, sums: r.sums }).collect();
        let (path, expect) = (Bytes::from(path), tree::expected(&remote));
        let way = tree::way(view.read, id, ino, &remote)?;
        let changing = ship_queue::may_change(view.read, id, &way)?;
        let (mut unsettled, mut conflict) = (false, false);
        if r.relation.is_some() {
            unsettled = is_unsettled(view.read, id, &record, ino, &remote)?;
            conflict = view.read.get(&keys::conflict(id, ino))?.is_some();
        }
        let (url, direction, ids, by) = (record.url, record.direction, record.ids, record.by);
        return Ok(HomePlace {
            relation: id,
            url,
            direction,
            ids,
            by,
            path,
            expect,
            changing,
            receipts,
            unsettled,
            conflict,
        });
    }
    Err(Error::not_found(format!("inode {ino} is not at any home")))
}

fn require_of(read: &dyn weir_kv::Read, volume: VolumeId, ino: InodeId) -> Result<()> {
    let dir = find_inode(read, ino)?.map_or(ino, |inode| inode.parent);
    match volume::volume_of(read, dir)? == volume {
        true => Ok(()),
        false => Err(Error::invalid(format!("inode {ino} is of another volume"))),
    }
}

/// Whether home may differ from the volume just now.
fn is_unsettled(
    read: &dyn weir_kv::Read,
    id: RelationId,
    record: &RelationRecord,
    ino: InodeId,
    remote: &RemoteEntry,
) -> Result<bool> {
    let to_come = log::last_number(read, record.volume)? > record.ingested
        || ship_queue::is_queued(read, id, &tree::way(read, id, ino, remote)?)?
        || !store::dirty_of(read, id, ino)?.is_empty()
        || store::dirty_finish(read, id, ino)?.is_some();
    let is_file = remote.kind == FileKind::Regular;
    let is_written = remote.complete.is_none() || remote.writing || store::is_growing(read, id, ino)?;
    let open = is_file && (is_written || store::is_unfinished(read, id, ino)?);
    Ok(to_come || open)
}

// ---- state, lag and backlog

impl Leader {
    pub(crate) fn relation_list(&self, r: &RelationList) -> Result<Relations> {
        let now = self.env.clock.now();
        let mut relations = Vec::new();
        let mut found = Vec::new();
        self.kv.read(&mut |read| {
            found = store::relations(read)?;
            Ok(())
        })?;
        for (id, record) in found.into_iter().filter(|(_, rec)| r.volume.is_none_or(|v| v == rec.volume)) {
            relations.push(self.relation_info(id, record, now)?);
        }
        Ok(Relations { relations })
    }

    fn relation_info(&self, id: RelationId, record: RelationRecord, now: Instant) -> Result<RelationInfo> {
        let wall = self.env.clock.wall().0;
        let (mut bytes, mut names, mut unseen, mut oldest) = (0, 0, 0, i64::MAX);
        let (mut conflicts, mut volume_name, mut log_lag) = (Vec::new(), String::new(), 0);
        let mut looked = wall;
        self.kv.read(&mut |read| {
            (bytes, names, oldest) = (0, 0, i64::MAX);
            volume_name = volume::load(read, record.volume)?.name;
            if !record.mirrors() {
                log_lag = log::last_number(read, record.volume)?.saturating_sub(record.ingested);
            }
            looked = listing::oldest_scan(read, id)?.map_or(wall, |at| at.nanos);
            let (start, end) = keys::range_of_short(b'P', id.0);
            store::collect(read, &start, &end, COUNTED_MAX, |_, value| {
                let dirty = DirtyRange::from_value(value, || format!("dirty bytes of {id}"))?;
                bytes += dirty.len;
                oldest = oldest.min(dirty.since.nanos);
                Ok(())
            })?;
            let (start, end) = keys::range_of_short(b'O', id.0);
            store::collect(read, &start, &end, COUNTED_MAX, |_, value| {
                names += 1;
                oldest = oldest.min(tree::load_change(value, 0)?.at.nanos);
                Ok(())
            })?;
            let (start, end) = keys::range_of_short(b'B', id.0);
            unseen = store::collect(read, &start, &end, COUNTED_MAX, |_, _| Ok(()))?.len() as u64;
            let (start, end) = keys::range_of_short(b'l', id.0);
            unseen += store::collect(read, &start, &end, COUNTED_MAX, |_, _| Ok(()))?.len() as u64;
            let (start, end) = keys::range_of_short(b'a', id.0);
            conflicts = store::collect(read, &start, &end, CONFLICTS_SHOWN, |key, value| {
                let ino = InodeId(store::number_of(key)?);
                Ok((ino, ConflictRecord::from_value(value, || format!("conflicts of {id}"))?))
            })?;
            Ok(())
        })?;
        let conflicts = self.show_conflicts(id, conflicts)?;
        let mut queues = self.relations.lock();
        let movers = queues.heard_movers(now);
        let mut limited_by = queues.limited_by(id, now);
        let home_failure = queues.home_failure(id, now);
        let rate = queues.meters.entry(id).or_default().rate(now);
        drop(queues);
        let diverged = conflicts.iter().filter(|a| a.diverged).count() as u64;
        let done = bytes == 0 && names == 0 && unseen == 0 && log_lag == 0 && oldest == i64::MAX;
        let state = match (&record.paused, diverged, done) {
            (Some(why), ..) => RelationState::Paused { why: why.clone() },
            (None, 1.., _) => RelationState::Diverged { items: diverged },
            (None, 0, true) => RelationState::Synced {},
            (None, 0, false) => RelationState::Copying {},
        };
        if movers == 0 && (record.mirrors() || !done) {
            limited_by = "no mover is running: start `weir mover`".to_owned();
        }
        if done && !record.mirrors() {
            limited_by = String::new();
        }
        let lag_ms = if oldest == i64::MAX { 0 } else { ((wall - oldest) / 1_000_000).max(0) as u64 };
        Ok(RelationInfo {
            id,
            volume: record.volume,
            volume_name,
            url: record.url,
            direction: record.direction,
            evict: record.evict,
            state,
            lag_ms,
            backlog_bytes: bytes,
            backlog_names: names,
            unseen_directories: unseen,
            rate,
            shipped_bytes: record.shipped_bytes,
            shipped_names: record.shipped_names,
            movers,
            limited_by,
            home_failure,
            conflicts,
            scan_age_ms: ((wall - looked) / 1_000_000).max(0) as u64,
        })
    }

    fn show_conflicts(&self, id: RelationId, found: Vec<(InodeId, ConflictRecord)>) -> Result<Vec<Conflict>> {
        let mut shown = Vec::new();
        self.kv.read(&mut |read| {
            shown.clear();
            for (ino, record) in &found {
                let path = Bytes::from(tree::path(read, id, *ino)?.unwrap_or_default());
                let (diverged, why, at) = (record.diverged, record.why.clone(), record.at);
                shown.push(Conflict { ino: *ino, path, diverged, why, at });
            }
            Ok(())
        })?;
        Ok(shown)
    }
}

impl ShipQueues {
    pub(super) fn heard_movers(&mut self, now: Instant) -> u32 {
        self.movers.retain(|_, (at, _)| now.since(*at) <= MOVER_SILENT);
        self.movers.len() as u32
    }
    fn home_failure(&self, id: RelationId, now: Instant) -> String {
        let Some(queue) = self.queues.get(&id) else { return String::new() };
        let away = queue.back_off.as_ref().map(|b| b.why.clone());
        away.or_else(|| queue.listings.failure(now)).unwrap_or_default()
    }
    fn limited_by(&self, id: RelationId, now: Instant) -> String {
        if let Some(back_off) = self.queues.get(&id).and_then(|queue| queue.back_off.as_ref()) {
            let (why, left) = (&back_off.why, back_off.until.since(now).as_secs_f64());
            return match back_off.denied {
                true => format!("the mover may not use this home ({why}); tried again in {left:.1} s"),
                false => format!("home does not answer ({why}); asked again in {left:.1} s"),
            };
        }
        if self.queues.get(&id).is_some_and(|queue| queue.brings_back) {
            return "bytes that are at another home only are brought back first".to_owned();
        }
        if let Some(why) = self.queues.get(&id).and_then(|queue| queue.listings.failure(now)) {
            return why;
        }
        self.movers.values().map(|(_, why)| why).find(|why| !why.is_empty()).cloned().unwrap_or_default()
    }
}

// ---- movers

impl Leader {
    /// Work for a mover; waits for some.
    pub(crate) async fn lease_work(self: Arc<Self>, r: LeaseWork) -> Result<WorkLeased> {
        let deadline = self.env.clock.now() + Duration::from_millis(r.wait_ms.into()).min(WAIT_MAX);
        loop {
            let waiting = self.relations.work.notified();
            let (leased, noted, wanted) = self.batch_work(&r)?;
            for ino in wanted {
                self.want_back(ino)?;
            }
            if !leased.relations.is_empty() {
                // The possible effects of a mover's work must be known after a crash of this leader.
                self.durable(noted).await?;
                return Ok(leased);
            }
            let now = self.env.clock.now();
            let wake = self.relations.lock().next_try(now).map_or(deadline, |at| at.min(deadline));
            let scans = self.relations.lock().queues.values().any(|queue| queue.mirrors);
            let wake = if scans { wake.min(now + listing::BETWEEN_SCANS) } else { wake };
            let over = self.env.clock.timeout(wake.since(now), waiting).await.is_err();
            if over && self.env.clock.now() >= deadline {
                return Ok(leased);
            }
        }
    }

    /// Work, if it may be assigned, and files to recall completely.
    fn batch_work(&self, r: &LeaseWork) -> Result<(WorkLeased, CommitSeq, BTreeSet<InodeId>)> {
        let now = self.env.clock.now();
        let map_version = {
            let mut state = self.lock();
            state.session(r.session)?.heard = now;
            state.leases.written_under
        };
        let mut queues = self.relations.lock();
        queues.movers.insert(r.session, (now, r.limited_by.clone()));
        let leader = queues.leader;
        match r.leader {
            0 => drop(queues.former.remove(&r.session)),
            known if known == leader => {}
            _ => {
                return Err(Error::stale(
                    "work of a former metadata leader is with this mover: it must give it up, and open a new session",
                ));
            }
        }
        let mut leased = WorkLeased { leader, relations: Vec::new(), map_version };
        if !queues.former.is_empty() {
            return Ok((leased, CommitSeq(0), BTreeSet::new()));
        }
        let mut ids: Vec<RelationId> = queues.queues.keys().copied().collect();
        let first = ids.iter().position(|id| *id > queues.last).unwrap_or(0);
        ids.rotate_left(first);
        let (mut noted, mut wanted) = (CommitSeq(0), BTreeSet::new());
        let mut away = Vec::new();
        for id in ids {
            let Some(queue) = queues.queues.get_mut(&id) else { continue };
            if queue.back_off.as_ref().is_some_and(|b| now < b.until) {
                continue;
            }
            // After an outage home gets one request.
            let items = if queue.back_off.is_some() { 1 } else { r.items as usize };
            let offered = self.batch_of(id, queue, r, items, &mut away)?;
            wanted.append(&mut queue.wanted);
            if let Some((work, seq)) = offered {
                leased.relations.push(work);
                noted = seq;
                queues.last = id;
                break;
            }
        }
        drop(queues);
        if let Err(e) = self.bring_back(&away) {
            tracing::debug!("bring bytes back to be shipped: {e}"); // they are requested again
        }
        Ok((leased, noted, wanted))
    }

    fn batch_of(
        &self,
        id: RelationId,
        queue: &mut ShipQueue,
        r: &LeaseWork,
        items: usize,
        away: &mut Vec<(InodeId, u64, u64)>,
    ) -> Result<Option<(RelationWork, CommitSeq)>> {
        loop {
            let (mut batch, mut url, mut is_new) = (Batch::default(), String::new(), false);
            let (mut parts, mut ids, mut by) = (false, None, 0);
            let (now, wall) = (self.env.clock.now(), self.wall());
            let mut direction = Direction::Push;
            self.kv.read(&mut |read| {
                let Some(record) = store::find_relation(read, id)? else { return Ok(()) };
                if record.paused.is_some() {
                    return Ok(());
                }
                url.clone_from(&record.url);
                parts = record.rules().parts;
                (ids, by) = (Some(record.ids.clone()), record.by);
                is_new = record.shipped_names == 0 && record.shipped_bytes == 0;
                let request = WorkRequest {
                    read,
                    relation: id,
                    record: &record,
                    session: r.session,
                    bytes: r.bytes,
                    items,
                };
                (direction, queue.mirrors) = (record.direction, record.mirrors());
                if record.mirrors() {
                    return queue.lists(&request, now, wall, &mut batch); // nothing is ever changed there
                }
                queue.names(&request, &mut batch)?;
                queue.lists(&request, now, wall, &mut batch)?;
                let request = WorkRequest { items: items.saturating_sub(batch.names.len()), ..request };
                queue.extents(&request, &mut batch)
            })?;
            let void = batch.has_void();
            queue.brings_back = !batch.away.is_empty();
            away.append(&mut batch.away);
            let noted = self.settle_batch(id, queue, &batch, parts, r.session)?;
            let Some(ids) = ids else { return Ok(None) }; // removed, or paused
            let orphans = queue.orphans.assign(r.session);
            if !batch.is_empty() || !orphans.is_empty() {
                let (names, extents, listings) = (batch.names, batch.extents, batch.listings);
                #[rustfmt::skip]
                let work = RelationWork {
                    relation: id, url, direction, ids, by, is_new, names, extents, orphans, listings,
                };
                return Ok(Some((work, noted)));
            }
            if !void {
                return Ok(None);
            }
        }
    }

    /// Changes that need no work at home are done; work that a mover begins is recorded before it starts,
    /// with the fact that a mover has it.
    fn settle_batch(
        &self,
        id: RelationId,
        queue: &mut ShipQueue,
        batch: &Batch,
        parts: bool,
        mover: SessionId,
    ) -> Result<CommitSeq> {
        for name in &batch.names {
            tracing::trace!(relation = %id, number = name.number, action = %ship_queue::describe(&name.action), "given");
        }
        for extent in &batch.extents {
            let ExtentWork { ino, offset, len, .. } = extent;
            tracing::trace!(relation = %id, %ino, offset, len, finish = extent.finish.is_some(), expect = ?extent.expect, "given");
        }
        let noted = self.kv.transact(&mut |txn| {
            let key = keys::mover(mover);
            if !batch.is_empty() && txn.get(&key)?.is_none() {
                txn.put(&key, &[]);
            }
            batch.void_names.iter().for_each(|number| txn.delete(&keys::name_change(id, *number)));
            batch.void_directories.iter().for_each(|dir| txn.delete(&keys::old_attributes(id, *dir)));
            for ino in &batch.gone {
                store::drop_dirty(txn, id, *ino)?;
                if tree::find_remote(txn, id, *ino)?.is_none() {
                    txn.delete(&keys::conflict(id, *ino));
                }
            }
            for (ino, record) in &batch.relocations {
                txn.put(&keys::relocations(id, *ino), &record.to_value());
            }
            batch.void_relocations.iter().for_each(|ino| txn.delete(&keys::relocations(id, *ino)));
            for name in &batch.names {
                let key = keys::name_change(id, name.number);
                if let Some(value) = txn.get(&key)? {
                    let change = tree::load_change(&value, name.number)?;
                    if !change.tried {
                        txn.put(&key, &ChangeRecord { tried: true, ..change }.to_value());
                    }
                }
            }
            for name in batch.names.iter().filter(|name| tree::changes_fingerprint(&name.action)) {
                tree::note_writing(txn, id, name.ino, true)?;
            }
            for ino in &batch.begun {
                if let Some(remote) = tree::find_remote(txn, id, *ino)? {
                    if parts {
                        txn.put(&keys::unfinished(id, *ino), &[]);
                    }
                    let remote = RemoteEntry { writing: true, complete: None, ..remote };
                    txn.put(&keys::remote(id, *ino), &remote.to_value());
                }
            }
            Ok(())
        })?;
        for (ino, number) in &batch.void_truncations {
            queue.forget_truncation(*ino, *number);
        }
        Ok(noted)
    }

    /// The results of work.
    pub(crate) fn complete_work(&self, r: &CompleteWork) -> Result<CommitSeq> {
        tracing::trace!(relation = %r.relation, session = %r.session, names = ?r.names, extents = ?r.extents, "told");
        let now = self.env.clock.now();
        let wall = Time { nanos: self.env.clock.wall().0 };
        self.lock().session(r.session)?.heard = now;
        let mut queues_held = self.relations.lock();
        let ShipQueues { queues, meters, .. } = &mut *queues_held;
        let Some(queue) = queues.get_mut(&r.relation) else { return Ok(CommitSeq(0)) };
        let (mut shipped, mut whole) = (0, false);
        let committed = self.kv.transact(&mut |txn| {
            shipped = 0;
            let Some(mut record) = store::find_relation(txn, r.relation)? else { return Ok(()) };
            for done in &r.names {
                let Some(out) = queue.names_out.get(&done.number).filter(|out| out.session == r.session)
                else {
                    continue;
                };
                match &done.outcome {
                    Outcome::Done { fingerprint } => {
                        let (number, step) = (done.number, &out.step);
                        whole |= matches!(&step.effect, tree::Effect::Make { whole: true, .. });
                        tree::apply(txn, r.relation, number, wall, &step.effect, fingerprint)?;
                        if step.last && ship_queue::directory_of_work(number).is_none() {
                            txn.delete(&keys::name_change(r.relation, number));
                            record.shipped_names += 1;
                        }
                    }
                    other => {
                        // A mover that finds an external change makes none: it is to be found again.
                        if let (Outcome::Diverged { .. }, NameAction::Attributes { expect, .. }) =
                            (other, &out.step.action)
                        {
                            tree::note_writing(txn, r.relation, out.step.ino, expect.writing)?;
                        }
                        if let (Outcome::Refused { .. }, NameAction::Make { kind, .. }) =
                            (other, &out.step.action)
                            && matches!(kind, FileKind::CharDevice | FileKind::BlockDevice)
                        {
                            tree::note_not_made(txn, r.relation, done.number)?;
                        }
                        note_conflict(txn, r.relation, out.step.ino, wall, other);
                    }
                }
            }
            for done in &r.extents {
                let key = (done.ino, done.offset);
                let Some(out) = queue.extents_out.get(&key).filter(|out| out.session == r.session) else {
                    continue;
                };
                match &done.outcome {
                    Outcome::Done { fingerprint } => {
                        shipped += done.len;
                        receive(txn, r.relation, queue, wall, done, *out, fingerprint)?;
                    }
                    other => note_conflict(txn, r.relation, done.ino, wall, other),
                }
            }
            for ino in queue.at_rest_after(r) {
                if r.extents.iter().any(|done| done.ino == ino && done.offset == FINISH) {
                    store::note_finished(txn, r.relation, ino)?;
                }
                if let Some(remote) = tree::find_remote(txn, r.relation, ino)? {
                    txn.put(
                        &keys::remote(r.relation, ino),
                        &RemoteEntry { writing: false, ..remote }.to_value(),
                    );
                }
            }
            record.shipped_bytes += shipped;
            txn.put(&keys::relation(r.relation), &record.to_value());
            Ok(())
        })?;
        let mut answered = false;
        for done in &r.names {
            let own = queue.names_out.get(&done.number).is_some_and(|out| out.session == r.session);
            if own && let Some(out) = queue.names_out.remove(&done.number) {
                queue.touch_named(&out.step.effect);
                answered |= note(queue, now, &done.outcome, || ship_queue::describe(&out.step.action));
                if matches!(done.outcome, Outcome::Done { .. })
                    && let tree::Effect::Truncate { ino, .. } = out.step.effect
                {
                    queue.forget_truncation(ino, done.number);
                }
            }
        }
        for done in &r.extents {
            let key = (done.ino, done.offset);
            if queue.extents_out.get(&key).is_some_and(|out| out.session == r.session) {
                queue.extents_out.remove(&key);
                queue.touch(done.ino);
                answered |= note(queue, now, &done.outcome, || format!("write inode {}", done.ino));
            }
        }
        for done in &r.listings {
            answered |= note(queue, now, &done.outcome, || format!("read directory {}", done.dir));
        }
        let mut unreadable = queue.listings.done(r.session, &r.listings, now);
        if queue.denial(now).is_some() {
            unreadable.append(&mut queue.listings.give_up());
        }
        let mirrors = queue.mirrors;
        if answered {
            queue.back_off = None;
        }
        if whole {
            queue.orphans.rescan();
        }
        if queue.orphans.dealt_with(r.session, &r.orphans) {
            self.relations.changed.notify_one();
        }
        meters.entry(r.relation).or_default().note(now, shipped);
        self.relations.work.notify_waiters();
        drop(queues_held);
        let mut state = self.lock();
        unreadable.iter().for_each(|dir| state.wake(*dir)); // waiting operations get the reason
        drop(state);
        if mirrors {
            // It may be gone: then the parent directory has no such entry any more.
            unreadable.iter().try_for_each(|dir| self.look_above(*dir))?;
        }
        Ok(committed)
    }
}

/// Returns whether home answered.
fn note(queue: &mut ShipQueue, now: Instant, outcome: &Outcome, what: impl FnOnce() -> String) -> bool {
    match outcome {
        Outcome::Done { .. } | Outcome::Moved {} => true,
        Outcome::Later { why } => {
            tracing::debug!("home did not {}: {why}", what());
            queue.hold_off(now, why, false);
            false
        }
        Outcome::Denied { why } => {
            if queue.back_off.as_ref().is_some_and(|b| b.denied && b.why == *why) {
                tracing::debug!("still no right to {}: {why}", what());
            } else {
                tracing::warn!("a home is not used: {why}");
            }
            queue.hold_off(now, why, true);
            false
        }
        Outcome::Diverged { why } | Outcome::Refused { why } => {
            tracing::warn!("in conflict: {}: {why}", what());
            true
        }
    }
}

fn note_conflict(
    txn: &mut dyn weir_kv::Txn,
    relation: RelationId,
    ino: InodeId,
    at: Time,
    outcome: &Outcome,
) {
    let (diverged, why) = match outcome {
        Outcome::Diverged { why } => (true, why),
        Outcome::Refused { why } => (false, why),
        Outcome::Done { .. } | Outcome::Later { .. } | Outcome::Denied { .. } | Outcome::Moved {} => return,
    };
    let record = ConflictRecord { diverged, why: why.clone(), at };
    txn.put(&keys::conflict(relation, ino), &record.to_value());
}

/// Home has a range.
fn receive(
    txn: &mut dyn weir_kv::Txn,
    relation: RelationId,
    queue: &ShipQueue,
    now: Time,
    done: &ExtentDone,
    out: ExtentOut,
    fingerprint: &FingerprintBytes,
) -> Result<()> {
    let ExtentOut { mark, finish, .. } = out;
    let Some(mut remote) = tree::find_remote(txn, relation, done.ino)? else { return Ok(()) };
    if !fingerprint.is_empty() {
        remote.fingerprint = fingerprint.clone();
    }
    if done.offset == FINISH {
        let newer = store::dirty_finish(txn, relation, done.ino)?.is_some_and(|p| p.newest > mark);
        // A truncation may have come meanwhile: bytes past it no longer belong to the file.
        let present = find_inode(txn, done.ino)?.map_or(0, |inode| inode.size);
        // Bytes written since are followed by another end, which includes all unverified ranges of this one:
        // before that, they would be shipped again and again next to bytes that wait for a truncation.
        let waiting = store::dirty_of(txn, relation, done.ino)?;
        let is_written_on = waiting.iter().any(|(_, p)| p.newest > mark);
        let unproved = match finish.filter(|_| !newer && !is_written_on) {
            Some(size) => ingest::unproved(txn, relation, done.ino, size.min(present))?,
            None => Vec::new(),
        };
        // A range before the end that home did not accept is shipped once more, and the end after it.
        let lacking = waiting.iter().any(|(_, p)| p.oldest <= mark);
        // Bytes next to ones that changed in flight are not verified: they are shipped once more, and the end
        // after them.
        for (from, to) in &unproved {
            let again = DirtyRange { len: to - from, since: now, oldest: mark, newest: mark };
            ingest::add_dirty(txn, relation, queue, done.ino, *from, again)?;
        }
        if !newer && !lacking && unproved.is_empty() {
            txn.delete(&keys::dirty(relation, done.ino, FINISH));
            remote.complete = finish;
        }
    } else {
        let end = done.offset.saturating_add(done.len);
        let before = store::dirty_of(txn, relation, done.ino)?;
        store::change_dirty(txn, relation, done.ino, |ranges| {
            dirty::settle(ranges, done.offset, end, mark);
        })?;
        if !done.sums.is_empty() {
            let receipt = ReceiptRecord { len: done.len, sums: done.sums.clone() };
            store::add_receipt(txn, relation, done.ino, done.offset, receipt)?;
        }
        // Checksums of bytes that have changed since are void.
        for (at, later) in before.iter().filter(|(_, p)| p.newest > mark) {
            store::remove_receipts(txn, relation, done.ino, *at, at + later.len)?;
        }
    }
    txn.put(&keys::remote(relation, done.ino), &remote.to_value());
    Ok(())
}

impl ShipQueue {
    /// Files of which no mover has work any more, and whose state at home the last fingerprint shows.
    fn at_rest_after(&self, r: &CompleteWork) -> Vec<InodeId> {
        let is_reported = |ino: InodeId, offset: u64| {
            r.extents
                .iter()
                .any(|d| (d.ino, d.offset) == (ino, offset) && matches!(&d.outcome, Outcome::Done { .. }))
        };
        let mut files: Vec<InodeId> = r.extents.iter().map(|done| done.ino).collect();
        files.dedup();
        files.retain(|ino| {
            let mut out = self.extents_out.range((*ino, 0)..=(*ino, u64::MAX)).peekable();
            out.peek().is_some()
                && out.all(|((_, offset), out)| out.session == r.session && is_reported(*ino, *offset))
        });
        files
    }
    pub(super) fn forget_truncation(&mut self, ino: InodeId, number: u64) {
        if let Some(numbers) = self.truncations.get_mut(&ino) {
            numbers.remove(&number);
            if numbers.is_empty() {
                self.truncations.remove(&ino);
            }
        }
    }
}

impl ShipQueues {
    /// When a home that did not answer is retried.
    fn next_try(&self, now: Instant) -> Option<Instant> {
        let next = |queue: &ShipQueue| queue.back_off.as_ref().map(|b| b.until).filter(|until| *until > now);
        self.queues.values().filter_map(next).min()
    }
    /// Relations were added or removed.
    fn follow(&mut self, ids: &[RelationId]) {
        self.queues.retain(|id, _| ids.contains(id));
        for id in ids {
            self.queues.entry(*id).or_default().touch_all(); // an administrator may have decided a conflict
        }
    }
}

impl Leader {
    /// Relations or cursors were added or removed.
    pub(crate) fn relations_changed(&self) -> Result<(BTreeSet<VolumeId>, BTreeSet<VolumeId>)> {
        let (mut ids, mut logged, mut mirrored) = (Vec::new(), BTreeSet::new(), BTreeSet::new());
        self.kv.read(&mut |read| {
            ids = store::all_relations(read)?.iter().map(|(id, _)| *id).collect();
            logged = ingest::logged(read)?;
            mirrored = ingest::mirrored(read)?;
            Ok(())
        })?;
        self.relations.lock().follow(&ids);
        self.relations.changed.notify_one();
        Ok((logged, mirrored))
    }
}

// ---- followers

impl Leader {
    pub(crate) async fn read_changes(self: Arc<Self>, r: ReadChanges) -> Result<Changes> {
        let deadline = self.env.clock.now() + Duration::from_millis(r.wait_ms.into()).min(WAIT_MAX);
        loop {
            let waiting = self.relations.work.notified();
            let newest = self.lock().newest;
            let changes = self.changes_now(&r)?;
            if !changes.changes.is_empty() {
                self.durable(newest).await?; // a crash must not undo reported changes
            }
            let left = deadline.since(self.env.clock.now());
            if !changes.changes.is_empty() || left.is_zero() {
                return Ok(changes);
            }
            let _ = self.env.clock.timeout(left, waiting).await; // checks again either way
        }
    }

    fn changes_now(&self, r: &ReadChanges) -> Result<Changes> {
        self.lock().session(r.session)?.heard = self.env.clock.now();
        let mut changes = Changes { changes: Vec::new(), first: 0 };
        self.kv.read(&mut |read| {
            changes.changes.clear();
            let mut paths = Paths::new(read, volume::load_as_admin(read, &r.cred, r.volume)?.root);
            let after = match &r.cursor {
                None => r.after,
                Some(name) => ingest::cursors(read, r.volume)?
                    .into_iter()
                    .find(|(found, _)| found == name)
                    .map(|(_, at)| at)
                    .ok_or_else(|| {
                        Error::not_found(format!(
                            "volume {} has no cursor {name:?}: acknowledge 0 to make it",
                            r.volume
                        ))
                    })?,
            };
            let (first, end) = keys::range_of_short(b'C', r.volume.0);
            changes.first = store::collect(read, &first, &end, 1, |key, _| store::number_of(key))?
                .first()
                .copied()
                .unwrap_or(log::last_number(read, r.volume)? + 1);
            let limit = r.limit.clamp(1, CHANGES_MAX) as usize;
            let start = keys::change(r.volume, after.saturating_add(1));
            let found = store::collect(read, &start, &end, limit, |key, value| {
                let number = store::number_of(key)?;
                let record = tree::load_change(value, number)?;
                Ok(Change { number, at: record.at, what: record.what, by: record.by })
            })?;
            for change in found {
                let path = paths.of_change(&change.what)?;
                changes.changes.push(NamedChange { change, path });
                if paths.is_spent() {
                    break; // the rest comes with the next request
                }
            }
            Ok(())
        })?;
        if changes.first > 1 && r.cursor.is_none() && r.after + 1 < changes.first {
            return Err(Error::not_found(format!(
                "changes before {} are forgotten: only a cursor keeps them",
                changes.first
            )));
        }
        Ok(changes)
    }
}
