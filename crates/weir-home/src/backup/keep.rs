//! Which of what was kept may go: a pure function of dates, the same for backups and snapshots.
//!
//! Always holds: the newest stays, and whatever is younger than a day; dates ahead of the clock stay.
use super::date::{Date, Span};
use std::collections::BTreeSet;
use weir_proto::backup::Keep;
use weir_proto::{Error, Result};

/// Whoever made something today may still need it.
const YOUNG_S: i64 = 86_400;

/// Those that go. Of each of so many days, weeks and months that have any the newest stays.
pub fn expired(dates: &BTreeSet<Date>, now: Date, keep: &Keep) -> Vec<Date> {
    let mut kept: BTreeSet<Date> = dates.iter().rev().take(1).copied().collect();
    kept.extend(dates.iter().filter(|date| now.0.saturating_sub(date.0) < YOUNG_S));
    let spans = [(Span::Day, keep.days), (Span::Week, keep.weeks), (Span::Month, keep.months)];
    for (span, count) in spans {
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

/// `7d,4w,6m`; what is not named is not kept by that measure.
pub fn parse_keep(text: &str) -> Result<Keep> {
    let bad = || {
        Error::invalid(format!("{text:?} says not what to keep: write days, weeks and months like 7d,4w,6m"))
    };
    let mut keep = Keep { days: 0, weeks: 0, months: 0 };
    for part in text.split(',').map(str::trim) {
        let digits = part.find(|c: char| !c.is_ascii_digit()).unwrap_or(part.len());
        let (number, unit) = part.split_at(digits);
        let count: u32 = number.parse().map_err(|_| bad())?;
        let of = match unit {
            "d" => &mut keep.days,
            "w" => &mut keep.weeks,
            "m" => &mut keep.months,
            _ => return Err(bad()),
        };
        *of = count;
    }
    keep.check()?;
    Ok(keep)
}

pub fn show_keep(keep: &Keep) -> String {
    let parts = [(keep.days, 'd'), (keep.weeks, 'w'), (keep.months, 'm')];
    let shown: Vec<String> =
        parts.iter().filter(|(n, _)| *n > 0).map(|(n, unit)| format!("{n}{unit}")).collect();
    shown.join(",")
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
        // 2026-11-22, a Sunday; one each day of the year before.
        let today = Date::parse("2026-11-22T03:00:00Z").unwrap().0 / 86_400;
        let all = days(today - 365..=today);
        let gone = expired(&all, Date(today * 86_400 + 4 * 3600), &Keep::default());
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
    fn what_is_of_today_and_what_is_the_last_stays() {
        let now = Date(100 * 86_400);
        let minutes: BTreeSet<Date> = (0..5).map(|n| Date(now.0 - n * 60)).collect();
        assert_eq!(expired(&minutes, now, &Keep { days: 1, weeks: 0, months: 0 }), []);
        let old = BTreeSet::from([Date(5), Date(6)]);
        assert_eq!(expired(&old, now, &Keep { days: 0, weeks: 0, months: 1 }), [Date(5)]);
        assert_eq!(expired(&BTreeSet::new(), now, &Keep::default()), []);
    }

    #[test]
    fn keeps_are_read_and_written() {
        let keep = Keep { days: 7, weeks: 4, months: 6 };
        assert_eq!(parse_keep("7d,4w,6m").unwrap(), keep);
        assert_eq!(show_keep(&keep), "7d,4w,6m");
        assert_eq!(parse_keep("30d").unwrap(), Keep { days: 30, weeks: 0, months: 0 });
        for text in ["", "d", "7", "7y", "7d,", "-1d", "0d", "7d;4w", "7ä"] {
            assert!(parse_keep(text).is_err(), "{text:?}");
        }
    }

    proptest! {
        /// To expire again, at the same time or with what was left, takes nothing more.
        #[test]
        fn what_is_kept_is_kept_again(
            dates in proptest::collection::btree_set(0i64..400 * 86_400, 0..80),
            days in 0u32..9, weeks in 0u32..5, months in 0u32..7,
        ) {
            let (all, keep) = (dates.into_iter().map(Date).collect::<BTreeSet<_>>(), Keep { days, weeks, months });
            let now = Date(400 * 86_400);
            let gone: BTreeSet<Date> = expired(&all, now, &keep).into_iter().collect();
            let left: BTreeSet<Date> = all.difference(&gone).copied().collect();
            prop_assert_eq!(expired(&left, now, &keep), vec![]);
            prop_assert_eq!(left.last(), all.last());
        }
    }
}
