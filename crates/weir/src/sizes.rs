//! Sizes as people write them.

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
