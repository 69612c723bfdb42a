//! Sizes and counts in the notation of people, like `10GiB` or `100k`.

/// `10GB` is 10^10 bytes, `10GiB` and `10G` are 10 × 2^30.
pub fn parse_size(text: &str) -> Result<u64, String> {
    let bad = || format!("{text:?} is not a size: expected a number with B, kB, MB, GB, TB, PB or KiB … PiB");
    let digits = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = (text[..digits].parse::<f64>().map_err(|_| bad())?, text[digits..].trim());
    let power = |letter: char| "kmgtpe".find(letter.to_ascii_lowercase()).map(|at| at as i32 + 1);
    let mut letters = unit.chars();
    let factor = match (letters.next(), letters.as_str()) {
        (None, _) | (Some('B' | 'b'), "") => 1.0,
        (Some(letter), "B" | "b") => 1000f64.powi(power(letter).ok_or_else(bad)?),
        (Some(letter), "" | "iB" | "ib" | "i") => 1024f64.powi(power(letter).ok_or_else(bad)?),
        _ => return Err(bad()),
    };
    let bytes = number * factor;
    // Half of the number range is more than any volume has.
    (bytes.is_finite() && bytes < i64::MAX as f64).then_some(bytes as u64).ok_or_else(bad)
}

/// `100k` is 100,000 files.
pub fn parse_count(text: &str) -> Result<u64, String> {
    let bad = || format!("{text:?} is not a number of files: expected one like 100000, 100k or 10M");
    let (digits, factor) = match text.char_indices().last() {
        Some((at, 'k' | 'K')) => (&text[..at], 1000),
        Some((at, 'm' | 'M')) => (&text[..at], 1_000_000),
        _ => (text, 1),
    };
    let count: u64 = digits.parse().map_err(|_| bad())?;
    count.checked_mul(factor).ok_or_else(bad)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_read_as_people_write_them() {
        for (text, bytes) in [
            ("0", 0),
            ("512", 512),
            ("10GB", 10_000_000_000),
            ("10GiB", 10 << 30),
            ("10G", 10 << 30),
            ("1.5kB", 1500),
            ("1 MiB", 1 << 20),
            ("2TB", 2_000_000_000_000),
        ] {
            assert_eq!(parse_size(text), Ok(bytes), "{text:?}");
        }
        for text in ["", "x", "10XB", "-1", "10GBB", "1e30", "9999999EB", "B"] {
            assert!(parse_size(text).is_err(), "{text:?}");
        }
    }

    #[test]
    fn counts_are_read_as_people_write_them() {
        assert_eq!((parse_count("100k"), parse_count("0")), (Ok(100_000), Ok(0)));
        for text in ["", "k", "-1", "1.5", "99999999999999999999"] {
            assert!(parse_count(text).is_err(), "{text:?}");
        }
    }
}
