//! Dates of backups and snapshots: seconds in UTC, in a form that sorts by time. Pure.
use crate::meta::Time;
use crate::{Error, Result};
use jiff::Timestamp;
use jiff::civil;
use jiff::tz::TimeZone;
use std::fmt;

/// Seconds since 1970.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Date(pub i64);

/// A period of which one backup or snapshot is kept.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Span {
    Hour,
    Day,
    /// Starts on Monday.
    Week,
    Month,
}

impl Date {
    pub fn of(time: Time) -> Date {
        Date(time.nanos.div_euclid(1_000_000_000))
    }
    fn civil(self) -> civil::DateTime {
        let last = civil::DateTime::MAX;
        Timestamp::from_second(self.0).map_or(last, |t| t.to_zoned(TimeZone::UTC).datetime())
    }
    /// `20261122T030000Z`: for names without colons.
    pub fn compact(self) -> String {
        self.to_string().replace([':', '-'], "")
    }
    /// Reads what [`Date`] and [`Date::compact`] write.
    pub fn parse(text: &str) -> Option<Date> {
        let bare = text.strip_suffix('Z')?;
        let at = civil::DateTime::strptime("%Y-%m-%dT%H:%M:%S", bare)
            .or_else(|_| civil::DateTime::strptime("%Y%m%dT%H%M%S", bare))
            .ok()?;
        let date = Date(at.to_zoned(TimeZone::UTC).ok()?.timestamp().as_second());
        // In exactly our form; otherwise it is not ours.
        (date.to_string() == text || date.compact() == text).then_some(date)
    }
    /// A date in the form that users enter: a day is meant to its end, a minute too.
    pub fn parse_until(text: &str) -> Result<Date> {
        let bare = text.trim().trim_end_matches('Z').replacen('T', " ", 1);
        let forms = [("%Y-%m-%d %H:%M:%S", 0), ("%Y-%m-%d %H:%M", 59)];
        let time = |(form, rest): (&str, i64)| {
            let at = civil::DateTime::strptime(form, &bare).ok()?;
            Some(Date(at.to_zoned(TimeZone::UTC).ok()?.timestamp().as_second() + rest))
        };
        let day = || {
            let day = civil::Date::strptime("%Y-%m-%d", &bare).ok()?;
            Some(Date(day.to_zoned(TimeZone::UTC).ok()?.timestamp().as_second() + 86_399))
        };
        forms.into_iter().find_map(time).or_else(day).ok_or_else(|| {
            Error::invalid(format!(
                "{text:?} is not a date: write 2026-11-22, 2026-11-22 03:00 or 2026-11-22T03:00:00Z (all in UTC)"
            ))
        })
    }
    /// Equal for dates in the same period.
    pub fn span(self, span: Span) -> i64 {
        let days = self.0.div_euclid(86_400);
        match span {
            Span::Hour => self.0.div_euclid(3600),
            Span::Day => days,
            Span::Week => (days + 3).div_euclid(7), // 1970 began on a Thursday
            Span::Month => {
                let at = self.civil();
                i64::from(at.year()) * 12 + i64::from(at.month())
            }
        }
    }
}

impl fmt::Display for Date {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let at = self.civil();
        let (year, month, day) = (at.year(), at.month(), at.day());
        write!(f, "{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}Z", at.hour(), at.minute(), at.second())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dates_are_read_as_they_are_written() {
        for (seconds, text, compact) in [
            (0, "1970-01-01T00:00:00Z", "19700101T000000Z"),
            (951_786_061, "2000-02-29T01:01:01Z", "20000229T010101Z"),
            (1_795_316_400, "2026-11-22T03:00:00Z", "20261122T030000Z"),
        ] {
            assert_eq!((Date(seconds).to_string(), Date(seconds).compact()), (text.into(), compact.into()));
            assert_eq!((Date::parse(text), Date::parse(compact)), (Some(Date(seconds)), Some(Date(seconds))));
        }
        for text in ["", "Z", "2026-11-22", "2026-11-22T03:00Z", "2026-1-22T03:00:00Z", "2026-11-22T03:00:00"]
        {
            assert_eq!(Date::parse(text), None, "{text:?}");
        }
    }

    #[test]
    fn a_named_day_means_its_end() {
        let at = |text: &str| Date::parse_until(text).unwrap().to_string();
        assert_eq!(at("2026-11-22"), "2026-11-22T23:59:59Z");
        assert_eq!(at("2026-11-22 03:00"), "2026-11-22T03:00:59Z");
        assert_eq!(at("2026-11-22T03:00:07Z"), "2026-11-22T03:00:07Z");
        for text in ["", "yesterday", "2026-13-01", "22.11.2026"] {
            assert!(Date::parse_until(text).unwrap_err().context.contains("UTC"), "{text:?}");
        }
    }

    #[test]
    fn weeks_begin_on_monday_and_months_with_their_first() {
        let at = |text: &str| Date::parse(text).unwrap();
        let (sunday, monday) = (at("2026-11-22T23:59:59Z"), at("2026-11-23T00:00:00Z"));
        assert_eq!(sunday.span(Span::Week) + 1, monday.span(Span::Week));
        assert_eq!(at("2026-11-16T00:00:00Z").span(Span::Week), sunday.span(Span::Week));
        let (old, new) = (at("2026-12-31T23:59:59Z"), at("2027-01-01T00:00:00Z"));
        assert_eq!(old.span(Span::Month) + 1, new.span(Span::Month));
        assert_eq!(old.span(Span::Day) + 1, new.span(Span::Day));
    }
}
