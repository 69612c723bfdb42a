//! Retention: which backups or snapshots may be removed, as a pure function of dates.
//!
//! Invariant: the newest and all young ones are kept; dates ahead of the clock are kept.
use crate::backup::BackupRetention;
use crate::date::{Date, Span};
use crate::volume::SnapshotRetention;
use crate::{Error, Result};
use std::collections::BTreeSet;

/// The rule: of each of this number of periods that have any, the newest is kept.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Rule {
    spans: [(Span, u32); 4],
    /// Younger ones are kept.
    young_s: i64,
}

/// A backup or snapshot of today may still be needed.
const DAY_S: i64 = 86_400;
/// For hours the last one covers the whole hour.
const HOUR_S: i64 = 3600;

impl From<&BackupRetention> for Rule {
    fn from(keep: &BackupRetention) -> Rule {
        Rule::new([0, keep.days, keep.weeks, keep.months])
    }
}
impl From<&SnapshotRetention> for Rule {
    fn from(keep: &SnapshotRetention) -> Rule {
        Rule::new([keep.hours, keep.days, keep.weeks, keep.months])
    }
}

impl Rule {
    fn new([hours, days, weeks, months]: [u32; 4]) -> Rule {
        let spans = [(Span::Hour, hours), (Span::Day, days), (Span::Week, weeks), (Span::Month, months)];
        Rule { spans, young_s: if hours > 0 { HOUR_S } else { DAY_S } }
    }
    /// The largest number that is kept, if one is made every `every_s` seconds.
    pub fn count_max(&self, every_s: u32) -> u64 {
        let young = self.young_s as u64 / u64::from(every_s.max(1)) + 1;
        self.spans.iter().map(|(_, count)| u64::from(*count)).sum::<u64>() + young
    }
}

/// The dates to remove.
pub fn expired(dates: &BTreeSet<Date>, now: Date, rule: &Rule) -> Vec<Date> {
    let mut kept: BTreeSet<Date> = dates.iter().rev().take(1).copied().collect();
    kept.extend(dates.iter().filter(|date| now.0.saturating_sub(date.0) < rule.young_s));
    for (span, count) in rule.spans {
        let (mut last, mut left) = (None, count);
        for date in dates.iter().rev() {
            if left > 0 && last != Some(date.span(span)) {
                (last, left) = (Some(date.span(span)), left - 1);
                kept.insert(*date);
            }
        }
    }
    dates.difference(&kept).copied().collect()
}

/// `7d,4w,6m`; periods that are not named keep none.
pub fn parse_backup_retention(text: &str) -> Result<BackupRetention> {
    let bad =
        || Error::invalid(format!("{text:?} is not a retention: write days, weeks and months like 7d,4w,6m"));
    let [0, days, weeks, months] = parse(text).ok_or_else(bad)? else { return Err(bad()) };
    let keep = BackupRetention { days, weeks, months };
    keep.check()?;
    Ok(keep)
}
/// `24h,7d,4w`, in the same form.
pub fn parse_snapshot_retention(text: &str) -> Result<SnapshotRetention> {
    let [hours, days, weeks, months] = parse(text).ok_or_else(|| {
        Error::invalid(format!(
            "{text:?} is not a retention: write hours, days, weeks and months like 24h,7d,4w"
        ))
    })?;
    let keep = SnapshotRetention { hours, days, weeks, months };
    keep.check()?;
    Ok(keep)
}
/// Hours, days, weeks, months.
fn parse(text: &str) -> Option<[u32; 4]> {
    let mut counts = [0; 4];
    for part in text.split(',').map(str::trim) {
        let digits = part.find(|c: char| !c.is_ascii_digit()).unwrap_or(part.len());
        let (number, unit) = part.split_at(digits);
        counts[UNITS.iter().position(|u| *u == unit)?] = number.parse().ok()?;
    }
    Some(counts)
}

const UNITS: [&str; 4] = ["h", "d", "w", "m"];

pub fn show_backup_retention(keep: &BackupRetention) -> String {
    show([0, keep.days, keep.weeks, keep.months])
}
pub fn show_snapshot_retention(keep: &SnapshotRetention) -> String {
    show([keep.hours, keep.days, keep.weeks, keep.months])
}
fn show(counts: [u32; 4]) -> String {
    let parts = counts.iter().zip(UNITS).filter(|(n, _)| **n > 0);
    parts.map(|(n, unit)| format!("{n}{unit}")).collect::<Vec<_>>().join(",")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn days(range: impl Iterator<Item = i64>) -> BTreeSet<Date> {
        range.map(|day| Date(day * 86_400 + 3 * 3600)).collect()
    }

    #[test]
    fn a_daily_backup_is_kept_as_the_schedule_says() {
        // 2026-11-22, a Sunday; one on each day of the previous year.
        let today = Date::parse("2026-11-22T03:00:00Z").unwrap().0 / 86_400;
        let all = days(today - 365..=today);
        let gone = expired(&all, Date(today * 86_400 + 4 * 3600), &(&BackupRetention::default()).into());
        let left: Vec<String> = all
            .iter()
            .filter(|date| !gone.contains(date))
            .map(|date| date.to_string()[..10].to_owned())
            .collect();
        assert_eq!(
            left,
            [
                "2026-06-30",
                "2026-07-31",
                "2026-08-31",
                "2026-09-30",
                "2026-10-31",
                "2026-11-01",
                "2026-11-08",
                "2026-11-15",
                "2026-11-16",
                "2026-11-17",
                "2026-11-18",
                "2026-11-19",
                "2026-11-20",
                "2026-11-21",
                "2026-11-22",
            ]
        );
    }

    #[test]
    fn backups_of_today_and_the_last_one_stay() {
        let now = Date(100 * 86_400);
        let minutes: BTreeSet<Date> = (0..5).map(|n| Date(now.0 - n * 60)).collect();
        assert_eq!(expired(&minutes, now, &(&BackupRetention { days: 1, weeks: 0, months: 0 }).into()), []);
        let old = BTreeSet::from([Date(5), Date(6)]);
        assert_eq!(
            expired(&old, now, &(&BackupRetention { days: 0, weeks: 0, months: 1 }).into()),
            [Date(5)]
        );
        assert_eq!(expired(&BTreeSet::new(), now, &(&BackupRetention::default()).into()), []);
    }

    #[test]
    fn keeps_are_read_and_written() {
        let keep = BackupRetention { days: 7, weeks: 4, months: 6 };
        assert_eq!(parse_backup_retention("7d,4w,6m").unwrap(), keep);
        assert_eq!(show_backup_retention(&keep), "7d,4w,6m");
        assert_eq!(parse_backup_retention("30d").unwrap(), BackupRetention { days: 30, weeks: 0, months: 0 });
        for text in ["", "d", "7", "7y", "7d,", "-1d", "0d", "7d;4w", "7ä"] {
            assert!(
                parse_backup_retention(text).is_err() && parse_snapshot_retention(text).is_err(),
                "{text:?}"
            );
        }
        let keep = SnapshotRetention { hours: 24, days: 7, weeks: 4, months: 0 };
        assert_eq!(parse_snapshot_retention("24h,7d,4w").unwrap(), keep);
        assert_eq!(show_snapshot_retention(&keep), "24h,7d,4w");
        assert!(parse_backup_retention("24h,7d").is_err(), "backups are no shorter than a day");
    }

    #[test]
    fn of_hourly_snapshots_hours_days_and_weeks_are_kept() {
        // Every twenty minutes for thirty days, up to 12:40.
        let now = Date::parse("2026-11-22T12:50:00Z").unwrap();
        let all: BTreeSet<Date> = (0..30 * 72).map(|n| Date(now.0 - 600 - n * 1200)).collect();
        let rule = Rule::from(&SnapshotRetention { hours: 3, days: 2, weeks: 2, months: 0 });
        let gone: BTreeSet<Date> = expired(&all, now, &rule).into_iter().collect();
        let left: Vec<String> =
            all.difference(&gone).map(|date| date.to_string()[5..16].to_owned()).collect();
        let expected = [
            "11-15T23:40",
            "11-21T23:40",
            "11-22T10:40",
            "11-22T11:40",
            "11-22T12:00",
            "11-22T12:20",
            "11-22T12:40",
        ];
        assert_eq!(left, expected);
        assert!(left.len() as u64 <= rule.count_max(1200));
    }

    proptest! {
        /// A second run, at the same time or on the remaining dates, removes nothing more.
        #[test]
        fn a_second_run_removes_nothing_more(
            dates in proptest::collection::btree_set(0i64..400 * 86_400, 0..80),
            days in 0u32..9, weeks in 0u32..5, months in 0u32..7,
        ) {
            let (all, keep) = (dates.into_iter().map(Date).collect::<BTreeSet<_>>(), BackupRetention { days, weeks, months });
            let now = Date(400 * 86_400);
            let rule = Rule::from(&keep);
            let gone: BTreeSet<Date> = expired(&all, now, &rule).into_iter().collect();
            let left: BTreeSet<Date> = all.difference(&gone).copied().collect();
            prop_assert_eq!(expired(&left, now, &rule), vec![]);
            prop_assert_eq!(left.last(), all.last());
        }
    }
}
