//! Units of systemd for the roles of a node: one file for each role next to its configuration, and the
//! templates of the package.
//!
//! Both have the same text: a role gets the rights that it needs, and no more. A mount's process has the
//! machine's own view of the file systems, because its mount must be visible to all; so nothing of that is
//! restricted there.
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};
use weir_admin::failure::{Doing, Outcome};
use weir_env::Env;

/// Roles with a template in the package: `weir-storage@NAME.service` runs the configuration that `weir join
/// --dir /var/lib/weir/NAME` made.
const TEMPLATES: [&str; 5] = ["coord", "meta", "storage", "mover", "mount"];
const INSTALLED: &str = "/usr/bin/weir";
const STATE: &str = "/var/lib/weir/%i";
/// For files of any owner in the directories that root names; nothing for the machine itself.
const SERVER_RIGHTS: &str = "CAP_CHOWN CAP_DAC_OVERRIDE CAP_DAC_READ_SEARCH CAP_FOWNER";
/// Those that `weir mover` keeps: see rights.rs. SETPCAP is for dropping the others.
const MOVER_RIGHTS: &str = "CAP_CHOWN CAP_DAC_OVERRIDE CAP_DAC_READ_SEARCH CAP_FOWNER CAP_FSETID CAP_MKNOD \
                            CAP_SETFCAP CAP_SETUID CAP_SETGID CAP_SETPCAP";

/// For every role except the mount. Data may be in any directory, so only the system's own are read-only.
const CONFINED: &str = "NoNewPrivileges=yes
ProtectSystem=full
ReadWritePaths=-/etc/weir
ProtectKernelTunables=yes
ProtectKernelModules=yes
ProtectKernelLogs=yes
ProtectControlGroups=yes
ProtectClock=yes
ProtectHostname=yes
PrivateDevices=yes
RestrictNamespaces=yes
RestrictRealtime=yes
LockPersonality=yes
MemoryDenyWriteExecute=yes
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK
SystemCallArchitectures=native
SystemCallFilter=@system-service
SystemCallErrorNumber=EPERM
";

/// Writes the unit of a role; returns its path. The file has the name of the unit, so it differs for each
/// node of a machine.
pub fn write(env: &Env, config: &Path, node: &str, role: &str) -> Outcome<PathBuf> {
    let program = std::env::current_exe().doing("find this program")?;
    let file = config.with_file_name(format!("weir-{node}-{role}.service"));
    let owner = std::fs::metadata(config).doing(format_args!("stat {}", config.display()))?.uid();
    let run = Run { program: quoted(&program), config: quoted(config), node, role, owner };
    env.disk.write_atomic(&file, run.text().as_bytes()).doing(format_args!("write {}", file.display()))?;
    Ok(file)
}

/// The command that lets systemd start it, now and at boot.
pub fn enable(file: &Path) -> String {
    format!("systemctl enable --now {}", file.display())
}

/// The package's templates: names of files and their texts.
pub fn templates() -> Vec<(String, String)> {
    let template = |role: &&str| {
        let config = format!("\"{STATE}/{role}.toml\"");
        let run = Run { program: INSTALLED.to_owned(), config, node: "%i", role, owner: 0 };
        (format!("weir-{role}@.service"), run.text())
    };
    TEMPLATES.iter().map(template).chain([("weir-console.service".to_owned(), console())]).collect()
}

/// The console of the cluster in the machine's own configuration, with the certificate next to that.
fn console() -> String {
    format!(
        "[Unit]\nDescription=Weir console\nDocumentation=man:weir-console(1)\n\
         Wants=network-online.target\nAfter=network-online.target\nStartLimitIntervalSec=0\n\n\
         [Service]\nExecStart={INSTALLED} console --link-file /run/weir/console.link\n\
         EnvironmentFile=-/etc/weir/environment\nRestart=always\nRestartSec=2\n\
         CapabilityBoundingSet={SERVER_RIGHTS}\nRestrictSUIDSGID=yes\nUMask=0077\n{CONFINED}\n\
         [Install]\nWantedBy=multi-user.target\n"
    )
}

/// The command of a unit. Program and configuration in systemd's syntax.
struct Run<'a> {
    program: String,
    config: String,
    node: &'a str,
    role: &'a str,
    /// The owner of the configuration: the role runs as this user.
    owner: u32,
}

impl Run<'_> {
    fn text(&self) -> String {
        let Run { program, config, node, role, owner } = self;
        let is_mount = *role == "mount";
        // A dead mount is detached first. An unmounted one stays so; other roles have no end of their own.
        let (more, restart) = if is_mount { (" --recover", "on-failure") } else { ("", "always") };
        let confined = match *role {
            "mount" => String::new(),
            "mover" => format!("CapabilityBoundingSet={MOVER_RIGHTS}\n{CONFINED}"),
            _ => {
                format!("CapabilityBoundingSet={SERVER_RIGHTS}\nRestrictSUIDSGID=yes\nUMask=0077\n{CONFINED}")
            }
        };
        let user = if *owner == 0 { String::new() } else { format!("User={owner}\n") };
        format!(
            "[Unit]\nDescription=Weir {role}, node {node}\nDocumentation=man:weir-{role}(1)\n\
             Wants=network-online.target\nAfter=network-online.target\nStartLimitIntervalSec=0\n\n\
             [Service]\nType=notify\nNotifyAccess=main\nExecStart={program} {role} --config {config}{more}\n\
             EnvironmentFile=-/etc/weir/environment\nRestart={restart}\nRestartSec=2\nTimeoutStartSec=15min\n\
             WatchdogSec=60\nLimitNOFILE=1048576\nKillMode=mixed\n{user}{confined}\n\
             [Install]\nWantedBy=multi-user.target\n"
        )
    }
}

/// In systemd's syntax: one word, without specifiers and variables.
fn quoted(path: &Path) -> String {
    let text = path.display().to_string().replace('\\', "\\\\").replace('"', "\\\"");
    format!("\"{}\"", text.replace('%', "%%").replace('$', "$$"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(role: &str, owner: u32) -> String {
        let (program, config) = (Path::new("/usr/bin/weir"), Path::new("/srv/a b/50%/$s.toml"));
        Run { program: quoted(program), config: quoted(config), node: "s1", role, owner }.text()
    }

    #[test]
    fn a_unit_names_program_and_configuration_as_one_word_each() {
        let text = of("storage", 0);
        let run = text.lines().find(|line| line.starts_with("ExecStart=")).unwrap();
        assert_eq!(run, r#"ExecStart="/usr/bin/weir" storage --config "/srv/a b/50%%/$$s.toml""#);
        assert!(text.contains("Description=Weir storage, node s1\n"), "{text}");
        assert!(!text.contains("User="), "root's configuration, root's role: {text}");
        assert!(of("storage", 1000).contains("\nUser=1000\n"));
    }

    #[test]
    fn a_mount_keeps_the_machines_view_and_other_roles_are_confined() {
        for role in TEMPLATES {
            let text = of(role, 0);
            let is_confined = text.contains("ProtectSystem=full") && text.contains("SystemCallFilter=");
            assert_eq!(is_confined, role != "mount", "{text}");
            assert!(text.contains("\nType=notify\n") && text.contains("\nWatchdogSec="), "{text}");
            assert_eq!(text.contains("\nRestart=always\n"), role != "mount", "{text}");
        }
        assert!(of("mover", 0).contains("CAP_MKNOD") && !of("mover", 0).contains("RestrictSUIDSGID"));
    }

    #[test]
    fn templates_run_what_join_wrote_for_the_instance() {
        let (name, text) = templates().into_iter().find(|(name, _)| name.contains("meta")).unwrap();
        assert_eq!(name, "weir-meta@.service");
        let run = "ExecStart=/usr/bin/weir meta --config \"/var/lib/weir/%i/meta.toml\"\n";
        assert!(text.contains(run), "{text}");
        let console = &templates().into_iter().find(|(name, _)| name == "weir-console.service").unwrap().1;
        assert!(console.contains("ExecStart=/usr/bin/weir console --link-file /run/weir/console.link\n"));
        assert!(
            console.contains("ProtectSystem=full") && console.contains("\nRestart=always\n"),
            "{console}"
        );
    }
}
