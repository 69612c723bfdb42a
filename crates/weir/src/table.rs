//! Text for people: columns, sizes, how far something is.
use serde_json::Value;
use std::io::{IsTerminal, Write};

/// Columns as wide as their widest cell, two spaces between; the last one is not padded.
pub fn render(header: &[&str], rows: &[Vec<String>]) -> String {
    let width = |column: usize| {
        let cells = rows.iter().filter_map(|r| r.get(column)).map(|c| c.chars().count());
        cells.chain([header[column].chars().count()]).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..header.len()).map(width).collect();
    let line = |cells: &mut dyn Iterator<Item = &str>| {
        let padded: Vec<String> = cells.zip(&widths).map(|(c, w)| format!("{c:<w$}")).collect();
        padded.join("  ").trim_end().to_string() + "\n"
    };
    let mut out = line(&mut header.iter().copied());
    for row in rows {
        out += &line(&mut row.iter().map(String::as_str));
    }
    out
}

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

/// A value on standard output. In one piece: what formats itself is written line by line, a system call each, and ten
/// thousand volumes have many lines.
pub fn json(value: &Value) {
    let text = format!("{value:#}\n");
    print!("{text}");
}

/// How far something is, on one line of a terminal that the next call replaces; nowhere else.
pub fn progress(text: &str) {
    let mut out = std::io::stderr();
    if out.is_terminal() {
        let _ = write!(out, "\r\x1b[2K{text}"); // nobody may look
        let _ = out.flush();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up_and_lines_do_not_end_in_spaces() {
        let rows = vec![vec!["a".to_string(), "bb".into()], vec!["ccc".into(), String::new()]];
        assert_eq!(render(&["x", "y"], &rows), "x    y\na    bb\nccc\n");
    }

    #[test]
    fn bytes_have_three_digits() {
        for (n, text) in
            [(0, "0 B"), (1023, "1023 B"), (1024, "1.00 KiB"), (6_250_000, "5.96 MiB"), (1 << 40, "1.00 TiB")]
        {
            assert_eq!(bytes(n), text);
        }
    }
}
