//! Text for people: columns.
use comfy_table::presets::NOTHING;
use comfy_table::{CellAlignment, ContentArrangement, Table};
use serde_json::Value;
pub use weir_diagnose::quantity::{bytes, count};

/// Between columns.
const GAP: u16 = 2;

/// Columns as wide as their widest cell; numbers are right-aligned. On a terminal that is too narrow cells
/// are wrapped; elsewhere a row is a line, for programs.
pub fn render(header: &[&str], rows: &[Vec<String>]) -> String {
    let mut table = Table::new();
    table.load_style(NOTHING).set_content_arrangement(ContentArrangement::Disabled);
    if let Some(width) = terminal_width() {
        table.set_content_arrangement(ContentArrangement::Dynamic).set_width(width);
    }
    table.set_header(header.iter().copied());
    table.add_rows(rows.iter().map(|row| row.iter().map(|cell| plain(cell))));
    for (at, column) in table.column_iter_mut().enumerate() {
        column.set_padding((0, if at + 1 < header.len() { GAP } else { 0 }));
        let mut cells = rows.iter().filter_map(|row| row.get(at)).filter(|cell| !cell.is_empty()).peekable();
        if cells.peek().is_some() && cells.all(|cell| is_quantity(cell)) {
            column.set_cell_alignment(CellAlignment::Right);
        }
    }
    table.trim_fmt() + "\n"
}

/// Without control characters: a name that another user chose must not move a terminal's cursor, or begin
/// a line of its own.
pub fn plain(text: &str) -> String {
    text.replace(|c: char| c.is_control(), "?")
}

/// A number, possibly with a unit; or the sign for an unknown one.
fn is_quantity(cell: &str) -> bool {
    let mut words = cell.split(' ');
    let number = words.next().unwrap_or_default();
    let is_number = number.parse::<f64>().is_ok_and(f64::is_finite) || matches!(cell, "?" | "-");
    is_number && words.count() <= 1
}

fn terminal_width() -> Option<u16> {
    let out = console::Term::stdout();
    out.is_term().then(|| out.size_checked())?.map(|(_, columns)| columns)
}

/// A value on standard output. In one piece: formatted output is written line by line, a system call each,
/// and ten thousand volumes have many lines.
pub fn json(value: &Value) {
    let text = format!("{value:#}\n");
    print!("{text}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up_and_lines_do_not_end_in_spaces() {
        let rows = vec![vec!["a".to_string(), "bb".into()], vec!["ccc".into(), String::new()]];
        assert_eq!(render(&["x", "y"], &rows), "x    y\na    bb\nccc\n");
        assert_eq!(render(&["x", "y"], &[]), "x  y\n");
    }

    #[test]
    fn a_name_breaks_no_line_and_sends_nothing_to_a_terminal() {
        let rows = vec![vec!["a\nb\u{1b}[31m".to_string(), "1 B".into()]];
        assert_eq!(render(&["FILE", "USED"], &rows), "FILE      USED\na?b?[31m   1 B\n");
    }

    #[test]
    fn numbers_are_aligned_right() {
        let rows = vec![
            vec!["a".to_string(), "9 B".into(), "t3".into()],
            vec!["bb".into(), "1.25 MiB".into(), "x".into()],
        ];
        assert_eq!(
            render(&["N", "USED", "AT"], &rows),
            "N       USED  AT\na        9 B  t3\nbb  1.25 MiB  x\n"
        );
        for text in ["5", "5.96 MiB", "-3", "?", "-"] {
            assert!(is_quantity(text), "{text}");
        }
        for text in ["", "t3", "2026-11-22T03:00:00Z", "inf", "3 of 4 more", "r1"] {
            assert!(!is_quantity(text), "{text}");
        }
    }
}
