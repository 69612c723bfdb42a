//! Administration of relations, and of the cursors that consumers have in a changelog.
use super::home_url::{check_url, overlap};
use super::record::{ConflictRecord, RelationRecord, RemoteEntry, RulesRecord};
use super::{apply, proof, rules, store, tree};
use crate::keys::{self, Sequence};
use crate::namespace::{Cx, clone, find_inode, import, log, snapshot, volume};
use crate::obstacle::Attempt;
use crate::tables;
use crate::tables::next_number;
use bytes::Bytes;
use std::collections::BTreeSet;
use weir_kv::Read;
use weir_proto::meta::FileKind;
use weir_proto::relation::*;
use weir_proto::{Error, InodeId, NameRule, Result};

/// Relations of one volume.
const RELATIONS_MAX: usize = 8;
/// Longest name of a consumer, in bytes.
const CURSOR_NAME_MAX: usize = 64;

/// The text of the reason for a conflict, in bytes.
const WHY_MAX: usize = 4096;

pub fn add(cx: &mut Cx<'_>, r: &RelationAdd) -> Attempt<RelationInfo> {
    let of = volume::load_as_admin(&*cx.txn, &r.cred, r.volume)?;
    check_url(&r.url)?;
    if r.cred.uid != 0 && r.ids != HomeIds::default() {
        return Err(Error::denied("only the superuser has a home where users have other numbers").into());
    }
    clone::require_whole(&*cx.txn, r.volume)?;
    let all = store::relations(&*cx.txn)?;
    require_fits(r, &of.name, &all)?;
    let mirrors = r.direction == Direction::Mirror;
    if mirrors && snapshot::has_any(&*cx.txn, r.volume, false)? {
        return Err(Error::invalid(format!(
            "volume {:?} has snapshots: a volume that mirrors a home has none",
            of.name
        ))
        .into());
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
    if r.import && all.iter().any(|(_, other)| other.volume == r.volume) {
        return Err(Error::invalid(format!(
            "volume {:?} has a home already: only a first home is imported",
            of.name
        ))
        .into());
    }
    tables::RELATIONS.put(cx.txn, id, &record);
    // Home's root is the volume's.
    let (kind, places, fingerprint) = (FileKind::Directory, Vec::new(), Bytes::new());
    let remote = RemoteEntry { kind, places, fingerprint, complete: None, writing: false };
    tables::REMOTE.put(cx.txn, (id, of.root), &remote);
    match r.import || mirrors {
        true => import::begin(cx, id, of.root)?,
        false => tables::UNSEEN.put(cx.txn, (id, of.root), &0),
    }
    cx.events.relations = true;
    Ok(new_info(id, of.name, record))
}

/// Adds a relation that has rules from the start.
pub fn add_with(cx: &mut Cx<'_>, r: &RelationAddWith) -> Attempt<RelationInfo> {
    rules::check(&r.rules)?;
    let new = RelationAdd { op: r.op.clone(), cred: r.cred.clone(), ..r.new.clone() };
    refuse_patterns(&r.rules, new.import || new.direction == Direction::Mirror)?;
    let info = add(cx, &new)?;
    let record = RulesRecord { scans_again: has_patterns(&r.rules), rules: r.rules.clone() };
    tables::RULES.put(cx.txn, info.id, &record);
    Ok(info)
}

fn has_patterns(rules: &RelationRules) -> bool {
    !(rules.include.is_empty() && rules.exclude.is_empty())
}

fn refuse_patterns(rules: &RelationRules, imports: bool) -> Result<()> {
    match imports && has_patterns(rules) {
        true => Err(Error::invalid(
            "a relation that mirrors or imports its home shows all of it: patterns are for relations that only copy to a home",
        )),
        false => Ok(()),
    }
}

/// Changes the rules of a relation.
pub fn set(cx: &mut Cx<'_>, r: &RelationSet) -> Result<RelationRules> {
    let record = store::load_relation(&*cx.txn, r.relation)?;
    let of = volume::load_as_admin(&*cx.txn, &r.cred, record.volume)?;
    let before = rules::record(&*cx.txn, r.relation)?;
    let old = before.rules;
    let new = RelationRules {
        include: r.include.clone().unwrap_or_else(|| old.include.clone()),
        exclude: r.exclude.clone().unwrap_or_else(|| old.exclude.clone()),
        bytes_per_s: r.bytes_per_s.or(old.bytes_per_s).filter(|limit| *limit > 0),
    };
    rules::check(&new)?;
    refuse_patterns(&new, record.imports)?;
    let changed = (&new.include, &new.exclude) != (&old.include, &old.exclude);
    if changed {
        // A scan finds files that were excluded until now.
        tables::UNSEEN.put(cx.txn, (r.relation, of.root), &0);
    }
    let record = RulesRecord { rules: new.clone(), scans_again: before.scans_again || changed };
    tables::RULES.put(cx.txn, r.relation, &record);
    cx.events.relations = true;
    Ok(new)
}

/// Fails if a new relation does not go with the present ones.
fn require_fits(r: &RelationAdd, name: &str, all: &[(RelationId, RelationRecord)]) -> Result<()> {
    let mut own = all.iter().filter(|(_, other)| other.volume == r.volume);
    if own.clone().any(|(_, other)| other.url == r.url) {
        return Err(Error::exists(format!("volume {name:?} has a relation with {} already", r.url)));
    }
    if let Some((id, other)) = all.iter().find(|(_, other)| overlap(&other.url, &r.url)) {
        let why = format!("{} and {}, the home of relation {id}, lie in one another", r.url, other.url);
        return Err(Error::exists(why));
    }
    if own.clone().count() >= RELATIONS_MAX {
        return Err(Error::invalid(format!("volume {name:?} has {RELATIONS_MAX} relations already")));
    }
    let mirrors = r.direction == Direction::Mirror;
    if mirrors && r.evict {
        return Err(Error::invalid(
            "all data of a mirror is at home: it may always be evicted; omit --evict",
        ));
    }
    if mirrors && own.clone().next().is_some() {
        return Err(Error::invalid(format!(
            "volume {name:?} has a home already: it cannot mirror another one"
        )));
    }
    match own.any(|(_, other)| other.mirrors()) {
        true => {
            Err(Error::invalid(format!("volume {name:?} mirrors a home: it cannot be copied to another one")))
        }
        false => Ok(()),
    }
}

fn new_info(id: RelationId, volume_name: String, record: RelationRecord) -> RelationInfo {
    RelationInfo {
        id,
        volume: record.volume,
        volume_name,
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
    }
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
    tables::RELATIONS.put(cx.txn, r.relation, &record);
    cx.events.logged = true;
    Ok(())
}

/// Evicted bytes are found at home only through their relation.
fn refuse_if_needed(read: &dyn Read, id: RelationId, record: &RelationRecord) -> Result<()> {
    if tables::NOT_ENUMERATED.under(id).has_any(read)? {
        let why = "not all names of the volume have been read at this home yet: `weir relation show` has the number";
        return Err(Error::name(NameRule::Busy, why));
    }
    let others: Vec<_> = store::relations(read)?
        .into_iter()
        .filter(|(other, r)| *other != id && r.volume == record.volume)
        .collect();
    let files = tables::EVICTED.between((InodeId(0), 0), (keys::NO_INODE, 0));
    let files: BTreeSet<InodeId> = files.collect(read, usize::MAX, |(ino, _), _| ino)?.into_iter().collect();
    let mut away = 0u64;
    for ino in files {
        let Some(inode) = find_inode(read, ino)? else { continue };
        if volume::volume_of(read, inode.parent)? != record.volume {
            continue;
        }
        let mut is_elsewhere = false;
        for (other, of_it) in &others {
            is_elsewhere |= proof::has_evicted(read, (*other, of_it), ino, &inode)?
                && !tables::CONFLICTS.has(read, (*other, ino))?;
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
        return Err(Error::invalid("a mirror changes nothing at home: only `--keep home` is possible"));
    }
    if !tables::CONFLICTS.has(&*cx.txn, (r.relation, r.ino))? {
        return Err(Error::not_found(format!("inode {} is not in conflict", r.ino)));
    }
    tables::CONFLICTS.delete(cx.txn, (r.relation, r.ino));
    cx.events.relations = true;
    if r.how == Resolution::Retry {
        return Ok(());
    }
    // The file at home under this name is taken for ours, and all online bytes are shipped again. Evicted
    // bytes exist only at home: recalled ones must still match what was shipped.
    if let Some(remote) = tree::find_remote(&*cx.txn, r.relation, r.ino)? {
        let remote = RemoteEntry { fingerprint: Bytes::new(), ..remote };
        tables::REMOTE.put(cx.txn, (r.relation, r.ino), &remote);
        let evicted = store::evicted_of(&*cx.txn, r.ino)?;
        for (from, to) in store::outside(&evicted, u64::MAX) {
            store::remove_receipts(cx.txn, r.relation, r.ino, from, to)?;
        }
        let number = log::last_number(&*cx.txn, record.volume)?;
        apply::ship_whole(cx.txn, r.relation, number, cx.rules.now, r.ino, &evicted)?;
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
    tables::CONFLICTS.put(cx.txn, (r.relation, r.ino), &record);
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
    let cursor = (r.volume, r.cursor.as_bytes());
    let newest = log::last_number(&*cx.txn, r.volume)?;
    let at = match tables::CURSORS.get(&*cx.txn, cursor)? {
        Some(at) => at.max(r.upto.min(newest)),
        None => {
            cx.events.relations = true;
            newest
        }
    };
    tables::CURSORS.put(cx.txn, cursor, &at);
    cx.events.logged = true;
    Ok(())
}

pub fn drop_cursor(cx: &mut Cx<'_>, r: &DropCursor) -> Result<()> {
    volume::load_as_admin(&*cx.txn, &r.cred, r.volume)?;
    let cursor = (r.volume, r.cursor.as_bytes());
    if !tables::CURSORS.has(&*cx.txn, cursor)? {
        return Err(Error::not_found(format!("volume {} has no cursor {:?}", r.volume, r.cursor)));
    }
    tables::CURSORS.delete(cx.txn, cursor);
    cx.events.relations = true;
    cx.events.logged = true;
    Ok(())
}
