//! Times in the notation of people: durations like `1h30m` or `2 weeks`, and moments like `yesterday` or `2h
//! ago`.
use jiff::{Span, SpanRelativeTo, Timestamp, Unit};
use weir_proto::date::Date;
use weir_proto::{Error, Result};

const DAY_S: i64 = 86_400;

/// A duration in seconds; a number alone is seconds. Days have 24 hours.
pub fn parse_seconds(text: &str) -> std::result::Result<u32, String> {
    let bad = || format!("{text:?} is not a time: expected one like 7d, 12h, 1h30m, 2 weeks or 60s");
    if let Ok(seconds) = text.parse() {
        return Ok(seconds);
    }
    let span: Span = text.parse().map_err(|_| bad())?;
    // Months and years have no fixed duration.
    let days = SpanRelativeTo::days_are_24_hours();
    let seconds = span.total((Unit::Second, days)).map_err(|_| bad())?;
    let is_whole = seconds >= 0.0 && seconds <= f64::from(u32::MAX) && seconds.fract() == 0.0;
    is_whole.then_some(seconds as u32).ok_or_else(bad)
}

/// An interval or duration; not 0, which would mean the opposite.
pub fn parse_every(text: &str) -> std::result::Result<u32, String> {
    match parse_seconds(text)? {
        0 => Err(format!("{text:?} is not an interval: expected one like 7d, 12h, 1h30m or 60s")),
        seconds => Ok(seconds),
    }
}

/// An interval or duration, or `none`: 0.
pub fn parse_interval(text: &str) -> std::result::Result<u32, String> {
    if text.eq_ignore_ascii_case("none") {
        return Ok(0);
    }
    parse_every(text).map_err(|why| format!("{why}, or none"))
}

/// A moment in the past, in UTC: a date, `today`, `yesterday` (a day counts to its end), or a duration and
/// `ago`.
pub fn parse_moment(text: &str, now: Date) -> Result<Date> {
    let today = now.0.div_euclid(DAY_S) * DAY_S;
    match text.trim() {
        "now" => return Ok(now),
        "today" => return Ok(Date(today + DAY_S - 1)),
        "yesterday" => return Ok(Date(today - 1)),
        _ => {}
    }
    match text.trim().strip_suffix("ago") {
        Some(length) => {
            let seconds = parse_seconds(length.trim()).map_err(Error::invalid)?;
            Ok(Date(now.0.saturating_sub(i64::from(seconds))))
        }
        None => Date::parse_until(text).or_else(|e| {
            // With an offset: `2026-11-22T03:00:00+02:00`.
            let at = text.trim().parse::<Timestamp>();
            at.map(|at| Date(at.as_second()))
                .map_err(|_| Error::invalid(format!("{e}; also yesterday, or 2h ago")))
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lengths_are_read_as_people_write_them() {
        for (text, seconds) in [
            ("60", 60),
            ("0", 0),
            ("60s", 60),
            ("30m", 1800),
            ("12h", 43_200),
            ("7d", 604_800),
            ("1h30m", 5400),
            ("1h 30m", 5400),
            ("2 weeks", 1_209_600),
            ("1 day 2 hours", 93_600),
        ] {
            assert_eq!(parse_seconds(text), Ok(seconds), "{text}");
        }
        for text in ["", "x", "1.5", "-1", "-1h", "1 month", "1y", "0.5s", "200000d", "5000000000"] {
            let refused = parse_seconds(text).unwrap_err();
            assert!(refused.contains("is not a time: expected one like"), "{text}: {refused}");
        }
    }

    #[test]
    fn intervals_are_not_0() {
        for text in ["0", "0s", "0d"] {
            assert!(parse_every(text).is_err() && parse_interval(text).unwrap_err().ends_with("or none"));
        }
        assert_eq!((parse_interval("none"), parse_interval("1h")), (Ok(0), Ok(3600)));
    }

    #[test]
    fn moments_are_dates_or_words() {
        let now = Date::parse("2026-11-28T08:30:00Z").unwrap();
        let at = |text: &str| parse_moment(text, now).unwrap().to_string();
        for (text, date) in [
            ("now", "2026-11-28T08:30:00Z"),
            ("today", "2026-11-28T23:59:59Z"),
            ("yesterday", "2026-11-27T23:59:59Z"),
            ("2h ago", "2026-11-28T06:30:00Z"),
            ("1 week ago", "2026-11-21T08:30:00Z"),
            ("2026-11-22", "2026-11-22T23:59:59Z"),
            ("2026-11-22 03:00", "2026-11-22T03:00:59Z"),
            ("2026-11-22T03:00:00+02:00", "2026-11-22T01:00:00Z"),
        ] {
            assert_eq!(at(text), date, "{text}");
        }
        for text in ["tomorrow", "ago", "a while ago", "2026-13-01", ""] {
            assert!(parse_moment(text, now).is_err(), "{text}");
        }
    }
}
