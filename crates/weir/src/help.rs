//! `weir --help`: the commands in groups, by the occasion on which a user needs them.
//!
//! The lines come from the declarations of the command line, and a test finds a command that no group has.
use clap::Command;
use std::fmt::Write;

/// Headings, with the commands below each in the order in which they are read.
const GROUPS: [(&str, &[&str]); 7] = [
    ("Day one", &["up", "down", "init", "join", "mount", "unmount", "status"]),
    ("Users", &["volume", "quota", "report", "access", "audit"]),
    ("Data", &["file", "relation", "home"]),
    ("Cluster", &["target", "rebuild", "namespace", "node", "token", "ca", "upgrade", "config"]),
    ("Troubles", &["why", "waits", "top", "iohist", "client", "events", "console", "support"]),
    ("Roles, in the foreground", &["coord", "meta", "storage", "mover"]),
    ("Developers", &["inspect", "completion", "man"]),
];
/// The columns if standard output is not a terminal, as those of clap.
const COLUMNS: usize = 100;
/// Fewer leave no room for a text beside the names.
const COLUMNS_MIN: usize = 50;

/// The command with a help that has its commands in groups.
pub fn grouped(command: Command) -> Command {
    let out = console::Term::stdout();
    let columns = out.is_term().then(|| out.size_checked()).flatten().map_or(COLUMNS, |(_, n)| n.into());
    let list = list(&command, columns.max(COLUMNS_MIN));
    let header = *command.get_styles().get_header();
    let start = "{about-with-newline}\n{usage-heading} {usage}\n";
    command.help_template(format!("{start}{list}\n{header}Options:{header:#}\n{{options}}{{after-help}}"))
}

fn list(command: &Command, columns: usize) -> String {
    let (header, literal) = (command.get_styles().get_header(), command.get_styles().get_literal());
    let names = GROUPS.iter().flat_map(|(_, names)| *names);
    let width = names.map(|name| name.len()).max().unwrap_or(0);
    let mut list = String::new();
    for (heading, names) in GROUPS {
        let _ = writeln!(list, "\n{header}{heading}:{header:#}");
        for sub in names.iter().filter_map(|name| command.find_subcommand(name)) {
            let about = sub.get_about().map(ToString::to_string).unwrap_or_default();
            let mut lines = wrapped(&about, columns - width - 4).into_iter();
            let (name, first) = (sub.get_name(), lines.next().unwrap_or_default());
            let _ = writeln!(list, "  {literal}{name:width$}{literal:#}  {first}");
            lines.for_each(|line| {
                let _ = writeln!(list, "  {:width$}  {line}", "");
            });
        }
    }
    list
}

/// Lines of this many characters at most.
fn wrapped(text: &str, columns: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        match lines.last_mut() {
            Some(line) if line.chars().count() + 1 + word.chars().count() <= columns => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cli::Cli;
    use clap::CommandFactory;
    use clap::builder::Styles;

    #[test]
    fn each_visible_command_is_in_one_group() {
        let command = Cli::command();
        let visible = command.get_subcommands().filter(|sub| !sub.is_hide_set());
        let mut visible: Vec<&str> = visible.map(Command::get_name).collect();
        let mut grouped: Vec<&str> = GROUPS.iter().flat_map(|(_, names)| *names).copied().collect();
        visible.sort_unstable();
        grouped.sort_unstable();
        assert_eq!(grouped, visible);
    }

    #[test]
    fn the_help_has_headings_commands_and_options() {
        let help = grouped(Cli::command()).render_help().to_string();
        let at = |text: &str| help.find(text).unwrap_or_else(|| panic!("no {text:?} in\n{help}"));
        let order = [
            "Usage: ",
            "\nDay one:\n  up ",
            "\nUsers:\n  volume ",
            "\nDevelopers:\n",
            "\nOptions:\n",
            "\nExit status:",
        ];
        assert!(order.map(at).is_sorted(), "{help}");
        assert!(!help.contains("package-files") && !help.contains('{'), "{help}");
    }

    #[test]
    fn a_narrow_terminal_gets_shorter_lines() {
        assert_eq!(wrapped("one two three", 7), ["one two", "three"]);
        assert_eq!(wrapped("unbreakable", 3), ["unbreakable"]);
        let list = list(&Cli::command().styles(Styles::plain()), COLUMNS_MIN);
        assert!(list.lines().all(|line| line.chars().count() <= COLUMNS_MIN), "{list}");
    }
}
