//! Man pages, from the declarations of the command line and of the configuration, with examples and exit
//! statuses.
use crate::cli::Cli;
use clap::{Command, CommandFactory};
use clap_mangen::Man;
use std::fmt::Write;
use std::path::Path;
use weir_admin::config::SECTIONS;
use weir_admin::failure::{Doing, Outcome};

/// One page per command, `weir.1`, `weir-up.1`, …, and `weir.toml.5`.
pub fn write_pages(dir: &Path) -> Outcome<()> {
    std::fs::create_dir_all(dir).doing(format_args!("make {}", dir.display()))?;
    for (file, text) in pages()? {
        let path = dir.join(file);
        std::fs::write(&path, text).doing(format_args!("write {}", path.display()))?;
    }
    Ok(())
}

/// Names of files and their texts.
pub fn pages() -> Outcome<Vec<(String, Vec<u8>)>> {
    fn walk(
        command: &Command,
        above: Option<&str>,
        pages: &mut Vec<(String, Vec<u8>)>,
    ) -> std::io::Result<()> {
        let name = command.get_display_name().unwrap_or_else(|| command.get_name());
        pages.push((format!("{name}.1"), page(command, name, above)?));
        command.get_subcommands().try_for_each(|sub| walk(sub, Some(name), pages))
    }
    let mut root = Cli::command();
    root.build();
    let mut pages = Vec::new();
    walk(&root, None, &mut pages).doing("make the man pages")?;
    pages.push(("weir.toml.5".to_owned(), config_page().into_bytes()));
    Ok(pages)
}

fn page(command: &Command, name: &str, above: Option<&str>) -> std::io::Result<Vec<u8>> {
    let (own_notes, exits) = notes(command);
    let man = Man::new(command.clone()).title(name).source(concat!("weir ", env!("CARGO_PKG_VERSION")));
    let mut page = Vec::new();
    man.render_title(&mut page)?;
    man.render_name_section(&mut page)?;
    man.render_synopsis_section(&mut page)?;
    man.render_description_section(&mut page)?;
    if command.get_arguments().any(|arg| !arg.is_hide_set()) {
        man.render_options_section(&mut page)?;
    }
    if command.has_subcommands() {
        man.render_subcommands_section(&mut page)?;
    }
    let mut more = String::new();
    if !own_notes.trim().is_empty() {
        let _ = writeln!(more, ".SH NOTES\n{}", paragraphs(&own_notes));
    }
    let examples: Vec<_> = EXAMPLES.iter().filter(|(of, ..)| *of == name).collect();
    if !examples.is_empty() {
        more += ".SH EXAMPLES\n";
        for (_, about, line) in examples {
            let _ = writeln!(more, ".PP\n{}\n.PP\n.RS 4\n.nf\n{}\n.fi\n.RE", escaped(about), escaped(line));
        }
    }
    more += ".SH \"EXIT STATUS\"\n";
    for (code, meaning) in exit_statuses(&exits) {
        let _ = writeln!(more, ".TP\n\\fB{}\\fR\n{}", escaped(&code), escaped(&meaning));
    }
    more += ENVIRONMENT;
    let related = above.into_iter().map(str::to_owned).chain(siblings(command)).collect::<Vec<_>>();
    if !related.is_empty() {
        let of = |name: &String| format!("\\fB{}\\fR(1)", escaped(name));
        let _ = writeln!(more, ".SH \"SEE ALSO\"\n{}", related.iter().map(of).collect::<Vec<_>>().join(", "));
    }
    page.extend(more.into_bytes());
    Ok(page)
}

/// The page of the configuration: every key with its default.
fn config_page() -> String {
    let mut page = format!(
        ".TH weir.toml 5 \"\" \"weir {}\"\n.SH NAME\nweir.toml \\- configuration of a role of Weir\n",
        env!("CARGO_PKG_VERSION")
    );
    page += CONFIG_DESCRIPTION;
    for (section, about, keys) in SECTIONS {
        let about: String = about.iter().map(|line| format!("{}\n", escaped(line.trim()))).collect();
        let _ = write!(page, ".SH \"[{section}]\"\n{about}");
        for key in *keys {
            let doc: String = key.doc.iter().map(|line| format!("{}\n", escaped(line.trim()))).collect();
            let (name, default) = (escaped(key.name), escaped(key.default));
            let _ = write!(page, ".TP\n\\fB{name}\\fR = {default}\n{doc}");
        }
    }
    page + ".SH \"SEE ALSO\"\n\\fBweir\\fR(1), \\fBweir\\-config\\-reference\\fR(1), \\fBweir\\-config\\-check\\fR(1)\n"
}

const CONFIG_DESCRIPTION: &str = ".SH DESCRIPTION
The file that \\fBweir coord\\fR, \\fBmeta\\fR, \\fBstorage\\fR, \\fBmover\\fR and \\fBmount\\fR read with \\fB\\-\\-config\\fR,
in TOML. \\fBweir init\\fR and \\fBweir join\\fR write it. A role reads only its own sections; a key that is left
out has the value shown here.
.SH FILES
.TP
\\fI/etc/weir/mount.toml\\fR
The configuration of mounts of this machine in fstab(5), unless they name another one.
";

/// The pages of a command's own commands.
fn siblings(command: &Command) -> Vec<String> {
    let visible = command.get_subcommands().filter(|sub| !sub.is_hide_set());
    visible.map(|sub| sub.get_display_name().unwrap_or_else(|| sub.get_name()).to_owned()).collect()
}

const EXIT_HEADING: &str = "Exit status:";

/// The sections after the help of a command: notes, and exit statuses: its own, or those of all.
fn notes(command: &Command) -> (String, String) {
    let text = |command: &Command| command.get_after_help().map(ToString::to_string).unwrap_or_default();
    let own = text(command);
    let common = text(&Cli::command());
    let (_, common) = common.split_once(EXIT_HEADING).unwrap_or_default();
    match own.split_once(EXIT_HEADING) {
        Some((notes, exits)) => (notes.to_owned(), exits.to_owned()),
        None => (own, common.to_owned()),
    }
}

/// Lines like ` 3  not found`.
fn exit_statuses(text: &str) -> Vec<(String, String)> {
    let lines = text.lines().map(str::trim).filter(|line| !line.is_empty());
    let split = |line: &str| line.split_once("  ").or_else(|| line.split_once(": ")).map(owned);
    lines.filter_map(split).collect()
}
fn owned((a, b): (&str, &str)) -> (String, String) {
    (a.trim().to_owned(), b.trim().to_owned())
}

fn paragraphs(text: &str) -> String {
    text.trim().split("\n\n").map(|part| format!(".PP\n{}", escaped(part))).collect::<Vec<_>>().join("\n")
}

/// Escapes text for roff: dashes that can be copied, no line that is a request.
fn escaped(text: &str) -> String {
    let text = text.replace('\\', "\\e").replace('-', "\\-");
    let line = |line: &str| match line.starts_with(['.', '\'']) {
        true => format!("\\&{line}"),
        false => line.to_owned(),
    };
    text.lines().map(line).collect::<Vec<_>>().join("\n")
}

const ENVIRONMENT: &str = ".SH ENVIRONMENT
.TP
\\fBWEIR_DIR\\fR
The directory of a cluster, in place of \\fB\\-\\-dir\\fR.
.TP
\\fBWEIR_CERTIFICATE\\fR
A certificate, in place of \\fB\\-\\-certificate\\fR.
.TP
\\fBWEIR_LOG\\fR
How much a role logs: error, warn, info, debug or trace, also for each module.
";

/// The page, what the command does, the command.
const EXAMPLES: &[(&str, &str, &str)] = &[
    ("weir", "Start a cluster on this machine and mount it:", "weir up --dir /weir --mount /mnt/weir"),
    ("weir", "See whether everything is all right:", "weir status --dir /weir"),
    ("weir-up", "Four targets, two of which may fail:", "weir up --dir /weir --targets 4 --scheme ec:2+2"),
    ("weir-up", "Everything in memory, for a try:", "weir up --dir /tmp/w --memory --mount /tmp/mnt"),
    ("weir-down", "Stop everything; data stays:", "weir down --dir /weir"),
    (
        "weir-init",
        "Found a cluster of several machines:",
        "weir init --dir /var/lib/weir/coord --listen tcp:10.1.0.1:7000",
    ),
    (
        "weir-join",
        "Join as a storage node with two disks:",
        "weir join TOKEN --dir /var/lib/weir/s1 --name s1 --target /disks/1 --target /disks/2",
    ),
    (
        "weir-token-create",
        "A token for forty nodes of a batch farm:",
        "weir token create --role mount --uses 40 --ttl 7d --name 'node-*' --from 10.1.0.0/16",
    ),
    ("weir-node-remove", "Cut a lost machine off:", "weir node remove s3 --dir /weir"),
    ("weir-status", "For monitoring:", "weir status --dir /weir --json"),
    ("weir-file-layout", "Where a file's bytes are:", "weir file layout /mnt/weir/run1.h5"),
    (
        "weir-file-evict",
        "Free the local space of files that are at home:",
        "weir file evict /mnt/weir/old/run1.h5",
    ),
    ("weir-file-recall", "Recall them before a job starts:", "weir file recall /mnt/weir/old/run1.h5"),
    ("weir-top", "Volumes by their work of the last ten seconds:", "weir top --by volume --once"),
    ("weir-waits", "What waits, and what waited within the last hour:", "weir waits --since 1h"),
    ("weir-why", "Why a file is slow:", "weir why /mnt/weir/work/frames"),
    ("weir-why", "Why the cluster is slow:", "weir why slow"),
    ("weir-iohist", "How slow a storage node's disks are from now on:", "weir iohist storage-1 --seconds 10"),
    ("weir-events", "Troubles of the last two days:", "weir events --since 2d"),
    ("weir-events", "Troubles as they begin and end, for a program:", "weir events --follow --json"),
    ("weir-events-mute", "A clock that is known to be wrong:", "weir events mute clock-off n7 --until 12h"),
    ("weir-support", "An archive for support:", "weir support --output /tmp/weir.tar.gz"),
    ("weir-console", "A page and metrics at another port:", "weir console --listen 127.0.0.1:8080"),
    ("weir-target-clear", "After a disk was repaired:", "weir target clear t3 --dir /weir"),
    ("weir-target-replace", "A new disk for a lost one:", "weir target replace t3 /disks/new --dir /weir"),
    (
        "weir-volume-create",
        "A home area with limits:",
        "weir volume create ada --owner 1000 --bytes 2TB --soft-bytes 1TB --grace 7d",
    ),
    (
        "weir-volume-quota",
        "A limit for one user of a volume:",
        "weir volume quota work --user 1000 --bytes 10GB",
    ),
    ("weir-volume-quota", "One for each other user:", "weir volume quota work --default-user --bytes 1GB"),
    ("weir-volume-quota", "Usage and limits of all users and groups there:", "weir volume quota work"),
    ("weir-quota", "What you use and may use:", "weir quota"),
    ("weir-quota", "The same for a group:", "weir quota --group 100"),
    (
        "weir-volume-policy",
        "A trash of a week, and hourly snapshots:",
        "weir volume policy ada --trash 7d --snapshots 1h --keep 24h,7d,4w",
    ),
    ("weir-volume-snapshot", "Take a snapshot:", "weir volume snapshot ada monday"),
    (
        "weir-volume-backup",
        "A dated copy each day:",
        "weir volume backup ada --to file:///backup/ada --every 1d",
    ),
    (
        "weir-volume-restore",
        "A file as it was on Monday:",
        "weir volume restore /mnt/weir/ada/thesis.tex --from monday",
    ),
    ("weir-volume-changes", "Follow what changes:", "weir volume changes ada --cursor index --follow"),
    (
        "weir-relation-add",
        "Copy a volume home, and evict copied data:",
        "weir relation add work file:///archive/work --evict",
    ),
    (
        "weir-relation-set",
        "Exclude a directory, and limit the bandwidth:",
        "weir relation set work --exclude scratch/ --bandwidth 500MB/s",
    ),
    ("weir-relation-show", "Lag, backlog, conflicts:", "weir relation show r1"),
    ("weir-relation-verify", "Compare each byte at home with what was shipped:", "weir relation verify r1"),
    ("weir-home-allow", "Let users have homes in a directory:", "weir home allow file:///archive"),
    (
        "weir-access-add",
        "A beamline's machines see their volume only:",
        "weir access add beamline --who 'b1-*' --volumes 'b1*'",
    ),
    ("weir-audit-show", "Refusals and administration:", "weir audit show --dir /weir"),
    ("weir-report", "Usage of a volume:", "weir report ada"),
    ("weir-mount", "Mount in the foreground:", "weir mount /mnt/weir --coordinator tcp:10.1.0.1:7000"),
    ("weir-unmount", "Remove a mount whose process died:", "weir unmount /mnt/weir"),
    (
        "weir-storage",
        "With the configuration of weir join:",
        "weir storage --config /var/lib/weir/s1/storage.toml",
    ),
    (
        "weir-meta",
        "Found the namespace, the first time:",
        "weir meta --config /var/lib/weir/m1/meta.toml --new",
    ),
    (
        "weir-coord",
        "With the configuration of weir init:",
        "weir coord --config /var/lib/weir/coord/coord.toml",
    ),
    ("weir-mover", "With the configuration of weir join:", "weir mover --config /var/lib/weir/v1/mover.toml"),
    ("weir-inspect", "Verify each checksum of a stopped target:", "weir inspect --check /weir/t1"),
    (
        "weir-config-check",
        "Before a role is started with it:",
        "weir config check /var/lib/weir/s1/storage.toml",
    ),
    ("weir-completion", "For the shells of this user:", "weir completion bash"),
];

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;
    use std::collections::BTreeSet;

    #[test]
    fn every_example_is_a_command_and_has_a_page() {
        let pages: BTreeSet<String> = pages().unwrap().into_iter().map(|(name, _)| name).collect();
        for (page, about, line) in EXAMPLES {
            assert!(pages.contains(&format!("{page}.1")), "{page}: {pages:?}");
            assert!(about.ends_with(':'), "{about}");
            let words: Vec<String> = line.split(' ').map(|word| word.trim_matches('\'').to_owned()).collect();
            if let Err(e) = Cli::try_parse_from(&words) {
                panic!("{line}: {e}");
            }
            let named = page.split('-').collect::<Vec<_>>();
            assert!(
                *page == "weir" || words.iter().map(String::as_str).take(named.len()).eq(named),
                "{page}: {line}"
            );
        }
    }

    #[test]
    fn the_page_of_the_configuration_has_every_key() {
        let page = config_page();
        for (section, _, keys) in SECTIONS {
            assert!(page.contains(&format!(".SH \"[{section}]\"\n")), "{section}");
            let has =
                |key: &weir_admin::config::Key| page.contains(&format!("\\fB{}\\fR = ", escaped(key.name)));
            assert!(keys.iter().all(has), "{page}");
        }
    }

    #[test]
    fn pages_have_exit_statuses_and_literal_dashes() {
        let all = pages().unwrap();
        let page = |name: &str| {
            let found = all.iter().find(|(file, _)| file == name);
            String::from_utf8(found.unwrap_or_else(|| panic!("no {name}")).1.clone()).unwrap()
        };
        let create = page("weir-volume-create.1");
        assert!(create.contains("\\fB13\\fR\na limit of a volume, a user or a group is reached"), "{create}");
        assert!(create.contains("weir volume create ada \\-\\-owner 1000"), "{create}");
        assert!(create.contains("\\fBweir\\-volume\\fR(1)"), "{create}");
        let status = page("weir-status.1");
        assert!(status.contains("\\fB2\\fR\ncritical") && !status.contains("\\fB13\\fR"), "{status}");
        assert_eq!(escaped(".x\n'y\\-"), "\\&.x\n\\&'y\\e\\-");
    }
}
