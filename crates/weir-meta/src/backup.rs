//! Places that backups of volumes go to: when the next one is due, and which mover makes it.
//!
//! Invariant: while a session that has taken a backup lives, no other makes one of that volume, even after a
//! restart of the leader: two writers of one tree would corrupt it. Knows nothing of a backup's content or of
//! how it is made.
use crate::keys::Letter;
use crate::namespace::{Cx, View, volume};
use crate::record::Record;
use crate::relation::home_url::check_url;
use crate::table::Table;
use weir_kv::Read;
use weir_proto::backup::{
    BACKUP_EVERY_S_MIN, BACKUPS_MAX, Backup, BackupDone, BackupEnd, BackupList, BackupOutcome,
    BackupRetention, BackupRun, BackupSet, BackupTake, BackupTaken, Backups,
};
use weir_proto::checksum::crc32c;
use weir_proto::meta::Time;
use weir_proto::{Error, NameRule, Result, SessionId, VolumeId, message};

/// A failed one is retried after this time, if it is not due sooner.
const RETRY_S: u32 = 600;
/// A scheduled one that is missing for less than this is not reported as late: an hour, for any shorter
/// interval.
const LATE_S: i64 = 3600;

message!(
    /// `b/`: see `weir_proto::backup::Backup`.
    BackupRecord {
        url: String,
        by: u32,
        every_s: u32,
        keep: BackupRetention,
        since: Time,
        running: Option<BackupRun>,
        last: Option<BackupEnd>,
        good: Option<Time>,
    }
);
impl Record for BackupRecord {}

/// By a checksum of the place's URL.
const BACKUPS: Table<(VolumeId, u32), BackupRecord> = Table::new(Letter::Backup, "a backup of volume");

// ---- when: pure

fn after(t: Time, seconds: u32) -> Time {
    Time { nanos: t.nanos.saturating_add(i64::from(seconds) * 1_000_000_000) }
}

impl BackupRecord {
    /// When the next one is to begin; `None`: no schedule.
    fn due(&self) -> Option<Time> {
        let next = match &self.last {
            _ if self.every_s == 0 => return None,
            None => self.since,
            Some(BackupEnd { ended, outcome: BackupOutcome::Failed { .. }, .. }) => {
                after(*ended, RETRY_S.min(self.every_s))
            }
            Some(BackupEnd { began, .. }) => after(*began, self.every_s),
        };
        // A schedule that was set later than that begins when it was set.
        Some(if next.nanos < self.since.nanos { self.since } else { next })
    }
    fn is_late(&self, now: Time) -> bool {
        let slack = (i64::from(self.every_s) / 2).max(LATE_S) * 1_000_000_000;
        let last = self.good.filter(|good| good.nanos > self.since.nanos).unwrap_or(self.since);
        let expected = after(last, self.every_s);
        self.every_s > 0 && now.nanos > expected.nanos.saturating_add(slack)
    }
}

// ---- operations on the store

fn place(url: &str) -> u32 {
    crc32c(url.as_bytes())
}

fn records(read: &dyn Read, of: Option<VolumeId>) -> Result<Vec<(VolumeId, BackupRecord)>> {
    let span = of.map_or_else(|| BACKUPS.all(), |volume| BACKUPS.under(volume));
    span.collect(read, usize::MAX, |(volume, _), record| (volume, record))
}

fn find(read: &dyn Read, volume: VolumeId, url: &str) -> Result<Option<BackupRecord>> {
    let Some(record) = BACKUPS.get(read, (volume, place(url)))? else { return Ok(None) };
    if record.url == url {
        return Ok(Some(record));
    }
    let why = format!("{url} has the same hash as {} by chance: write it in another way", record.url);
    Err(Error::invalid(why))
}

fn shown(
    read: &dyn Read,
    live: &dyn Fn(SessionId) -> bool,
    now: Time,
    id: VolumeId,
    record: BackupRecord,
) -> Result<Backup> {
    let (due, late) = (record.due(), record.is_late(now));
    let BackupRecord { url, by, every_s, keep, since, running, last, good } = record;
    let running = running.filter(|run| live(run.session));
    let volume_name = volume::load(read, id)?.name;
    Ok(Backup { volume: id, volume_name, url, by, every_s, keep, since, running, last, good, due, late })
}

pub fn list(view: &mut View<'_>, r: &BackupList) -> Result<Backups> {
    let show = |(id, record)| shown(view.read, view.rules.live, view.rules.now, id, record);
    let backups = records(view.read, r.volume)?.into_iter().map(show).collect::<Result<_>>()?;
    Ok(Backups { backups })
}

pub fn set(cx: &mut Cx<'_>, r: &BackupSet) -> Result<Backup> {
    let of = volume::load_as_admin(&*cx.txn, &r.cred, r.volume)?;
    check_url(&r.url)?;
    let found = find(&*cx.txn, r.volume, &r.url)?;
    if r.forget {
        let record = found.ok_or_else(|| unknown(&of.name, &r.url))?;
        let backup = shown(&*cx.txn, cx.rules.live, cx.rules.now, r.volume, record)?;
        if backup.running.is_some() {
            return Err(busy(&of.name));
        }
        BACKUPS.delete(cx.txn, (r.volume, place(&r.url)));
        return Ok(backup);
    }
    if found.is_none() && records(&*cx.txn, Some(r.volume))?.len() >= BACKUPS_MAX {
        let why = format!("volume {:?} has {BACKUPS_MAX} places for backups already", of.name);
        return Err(Error::no_space(why));
    }
    let mut record = found.unwrap_or_else(|| new_record(&r.url, r.cred.uid, cx.rules.now));
    if r.cred.uid == 0 {
        record.by = 0;
    }
    if let Some(every_s) = r.every_s {
        if every_s != 0 && every_s < BACKUP_EVERY_S_MIN {
            let why = format!("backups every {every_s} s: at most one every {BACKUP_EVERY_S_MIN} s");
            return Err(Error::invalid(why));
        }
        if record.every_s != every_s {
            (record.every_s, record.since) = (every_s, cx.rules.now);
        }
    }
    if let Some(keep) = r.keep {
        keep.check()?;
        record.keep = keep;
    }
    BACKUPS.put(cx.txn, (r.volume, place(&r.url)), &record);
    shown(&*cx.txn, cx.rules.live, cx.rules.now, r.volume, record)
}

fn new_record(url: &str, by: u32, now: Time) -> BackupRecord {
    let (url, keep) = (url.to_owned(), BackupRetention::default());
    BackupRecord { url, by, every_s: 0, keep, since: now, running: None, last: None, good: None }
}
fn unknown(volume: &str, url: &str) -> Error {
    Error::not_found(format!("no backups of volume {volume:?} go to {url}"))
}
fn busy(volume: &str) -> Error {
    Error::name(NameRule::Busy, format!("a backup of volume {volume:?} is already in progress"))
}

pub fn take(cx: &mut Cx<'_>, r: &BackupTake) -> Result<BackupTaken> {
    if r.volume == VolumeId(0) {
        return take_due(cx);
    }
    let of = volume::load_as_admin(&*cx.txn, &r.cred, r.volume)?;
    let record = find(&*cx.txn, r.volume, &r.url)?.ok_or_else(|| unknown(&of.name, &r.url))?;
    if is_running(cx, &records(&*cx.txn, Some(r.volume))?, r.volume) {
        return Err(busy(&of.name));
    }
    begin(cx, r.volume, record)
}

/// The one that has waited longest.
fn take_due(cx: &mut Cx<'_>) -> Result<BackupTaken> {
    let (all, now) = (records(&*cx.txn, None)?, cx.rules.now);
    let mut due: Vec<_> = all
        .iter()
        .filter(|(id, _)| !is_running(cx, &all, *id))
        .filter_map(|(id, record)| Some((record.due()?.nanos, *id, record.clone())))
        .filter(|(due, ..)| *due <= now.nanos)
        .collect();
    due.sort_by(|a, b| (a.0, a.1, &a.2.url).cmp(&(b.0, b.1, &b.2.url)));
    for (_, id, record) in due {
        if volume::load(&*cx.txn, id).is_ok_and(|volume| !volume.deleting) {
            return begin(cx, id, record);
        }
    }
    Ok(BackupTaken { backup: None })
}

fn is_running(cx: &Cx<'_>, all: &[(VolumeId, BackupRecord)], of: VolumeId) -> bool {
    let runs =
        |record: &BackupRecord| record.running.as_ref().is_some_and(|run| (cx.rules.live)(run.session));
    all.iter().any(|(id, record)| *id == of && runs(record))
}

fn begin(cx: &mut Cx<'_>, id: VolumeId, mut record: BackupRecord) -> Result<BackupTaken> {
    record.running = Some(BackupRun { session: cx.rules.session, began: cx.rules.now });
    BACKUPS.put(cx.txn, (id, place(&record.url)), &record);
    Ok(BackupTaken { backup: Some(shown(&*cx.txn, cx.rules.live, cx.rules.now, id, record)?) })
}

pub fn done(cx: &mut Cx<'_>, r: &BackupDone) -> Result<Backup> {
    let record = find(&*cx.txn, r.volume, &r.url)?;
    let mine = |run: &BackupRun| run.session == cx.rules.session;
    let Some((mut record, run)) =
        record.and_then(|record| record.running.clone().filter(mine).map(|run| (record, run)))
    else {
        let why = format!("the backup of volume {} to {} is not made by this client", r.volume, r.url);
        return Err(Error::stale(why));
    };
    record.running = None;
    if matches!(r.outcome, BackupOutcome::Made { .. }) {
        record.good = Some(run.began);
    }
    let (began, ended, outcome) = (run.began, cx.rules.now, r.outcome.clone());
    record.last = Some(BackupEnd { began, ended, outcome });
    BACKUPS.put(cx.txn, (r.volume, place(&r.url)), &record);
    shown(&*cx.txn, cx.rules.live, cx.rules.now, r.volume, record)
}

/// The places are forgotten together with their volume.
pub fn forget_volume(txn: &mut dyn weir_kv::Txn, id: VolumeId) -> Result<()> {
    for (_, record) in records(&*txn, Some(id))? {
        BACKUPS.delete(txn, (id, place(&record.url)));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: i64 = 1_000_000_000;
    fn at(seconds: i64) -> Time {
        Time { nanos: seconds * SECOND }
    }
    fn record(every_s: u32, last: Option<BackupEnd>, good: Option<i64>) -> BackupRecord {
        BackupRecord { every_s, last, good: good.map(at), ..new_record("file:///b", 0, at(1000)) }
    }
    fn ended(began: i64, ended: i64, fine: bool) -> Option<BackupEnd> {
        let outcome = match fine {
            true => BackupOutcome::Made { date: String::new(), missing: 0, files: 0, linked: 0, bytes: 0 },
            false => BackupOutcome::Failed { why: String::new() },
        };
        Some(BackupEnd { began: at(began), ended: at(ended), outcome })
    }

    #[test]
    fn the_next_one_is_due_by_table() {
        for (every_s, last, due) in [
            (0, ended(2000, 2100, true), None),
            (86400, None, Some(1000)),
            (86400, ended(2000, 9000, true), Some(88400)),
            (86400, ended(2000, 9000, false), Some(9600)),
            (60, ended(2000, 9000, false), Some(9060)),
            (100, ended(200, 300, true), Some(1000)),
        ] {
            assert_eq!(record(every_s, last.clone(), None).due(), due.map(at), "{every_s} {last:?}");
        }
    }

    #[test]
    fn one_that_fails_again_and_again_is_late_in_time() {
        let failing = record(86400, ended(90_000, 90_001, false), Some(2000));
        assert!(!failing.is_late(at(2000 + 86400 + 43200)));
        assert!(failing.is_late(at(2001 + 86400 + 43200)));
        let never = record(60, None, None);
        assert!(!never.is_late(at(1060 + 3600)) && never.is_late(at(1061 + 3600)));
        assert!(!record(0, None, None).is_late(at(i64::MAX / SECOND)));
    }
}
