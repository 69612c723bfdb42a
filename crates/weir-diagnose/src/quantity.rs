//! Quantities as text for people: counts, bytes, durations and moments.
use weir_proto::meta::Time;

/// `1 file`, `5 files`.
pub fn count(n: u64, [one, several]: [&str; 2]) -> String {
    format!("{n} {}", if n == 1 { one } else { several })
}

/// Bytes with a binary unit and three digits: `5.96 MiB`.
pub fn bytes(n: u64) -> String {
    let units = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let mut value = n as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < units.len() {
        value /= 1024.0;
        unit += 1;
    }
    match (unit, value) {
        (0, _) => format!("{n} B"),
        (_, v) if v >= 100.0 => format!("{v:.0} {}", units[unit]),
        (_, v) if v >= 10.0 => format!("{v:.1} {}", units[unit]),
        (_, v) => format!("{v:.2} {}", units[unit]),
    }
}

/// `350 ms`, `4.2 s`, `12 min`.
pub fn time(us: u64) -> String {
    match us {
        0..1000 => format!("{us} µs"),
        1000..1_000_000 => format!("{} ms", us / 1000),
        1_000_000..120_000_000 => format!("{:.1} s", us as f64 / 1e6),
        _ => format!("{} min", us / 60_000_000),
    }
}

/// `90 s`, `12 min`, `5 h`, `3 d`.
pub fn lasting(seconds: u64) -> String {
    match seconds {
        0..120 => format!("{seconds} s"),
        120..7200 => format!("{} min", seconds / 60),
        7200..172_800 => format!("{} h", seconds / 3600),
        _ => format!("{} d", seconds / 86_400),
    }
}

/// `3600` is `1h`.
pub fn show_seconds(seconds: u32) -> String {
    let units = [(86400, "d"), (3600, "h"), (60, "m")];
    let fits = units.iter().find(|(unit, _)| seconds > 0 && seconds.is_multiple_of(*unit));
    fits.map_or_else(|| format!("{seconds}s"), |(unit, letter)| format!("{}{letter}", seconds / unit))
}

/// `2026-03-01 12:00:05 UTC`.
pub fn when(t: Time) -> String {
    let seconds = t.nanos.div_euclid(1_000_000_000);
    let (days, of_day) = (seconds.div_euclid(86400), seconds.rem_euclid(86400));
    let (year, month, day) = civil(days);
    let (hour, minute, second) = (of_day / 3600, of_day / 60 % 60, of_day % 60);
    format!("{year}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02} UTC")
}

/// Days since 1970-01-01 as a date. Howard Hinnant, "chrono-compatible low-level date algorithms",
/// `civil_from_days`.
fn civil(days: i64) -> (i64, i64, i64) {
    let z = days + 719_468;
    let (era, of_era) = (z.div_euclid(146_097), z.rem_euclid(146_097));
    let year_of_era = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let from_march = (5 * of_year + 2) / 153;
    let month = if from_march < 10 { from_march + 3 } else { from_march - 9 };
    (year_of_era + era * 400 + i64::from(month <= 2), month, of_year - (153 * from_march + 2) / 5 + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_have_three_digits() {
        for (n, text) in
            [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (6_250_000, "5.96 MiB"), (1 << 40, "1.00 TiB")]
        {
            assert_eq!(bytes(n), text);
        }
    }

    #[test]
    fn times_have_the_unit_that_reads_best() {
        let shown = [999, 1000, 999_999, 4_250_000, 119_000_000, 600_000_000].map(time);
        assert_eq!(shown, ["999 µs", "1 ms", "999 ms", "4.2 s", "119.0 s", "10 min"]);
    }

    #[test]
    fn lengths_are_shown_in_their_largest_whole_unit() {
        assert_eq!([7 * 86400, 7200, 90, 0].map(show_seconds), ["7d", "2h", "90s", "0s"]);
    }

    #[test]
    fn a_time_is_shown_as_a_date() {
        let shown = |seconds: i64| when(Time { nanos: seconds * 1_000_000_000 + 5 });
        assert_eq!(shown(0), "1970-01-01 00:00:00 UTC");
        assert_eq!(shown(951_782_400 + 3661), "2000-02-29 01:01:01 UTC");
        assert_eq!(shown(-1), "1969-12-31 23:59:59 UTC");
        assert_eq!(shown(1_772_366_405), "2026-03-01 12:00:05 UTC");
    }
}
