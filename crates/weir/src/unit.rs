//! Units of systemd for the roles of a node, one file for each role beside its configuration.
use crate::failure::{Doing, Outcome};
use std::path::{Path, PathBuf};
use weir_env::Env;

/// Writes the unit of a role; its path. The file is called as the unit, so its name differs for each node of
/// a machine.
pub fn write(env: &Env, config: &Path, node: &str, role: &str) -> Outcome<PathBuf> {
    let program = std::env::current_exe().doing("find this program")?;
    let file = config.with_file_name(format!("weir-{node}-{role}.service"));
    let text = text(&program, config, node, role);
    env.disk.write_atomic(&file, text.as_bytes()).doing(format_args!("write {}", file.display()))?;
    Ok(file)
}

/// What to run so that systemd starts it, now and at boot.
pub fn enable(file: &Path) -> String {
    format!("systemctl enable --now {}", file.display())
}

fn text(program: &Path, config: &Path, node: &str, role: &str) -> String {
    // A mount that died is taken off first.
    let more = if role == "mount" { " --recover" } else { "" };
    let run = format!("{} {role} --config {}{more}", quoted(program), quoted(config));
    format!(
        "[Unit]\nDescription=Weir {role}, node {node}\nWants=network-online.target\nAfter=network-online.target\n\
         StartLimitIntervalSec=0\n\n[Service]\nExecStart={run}\nRestart=on-failure\nRestartSec=2\n\
         LimitNOFILE=1048576\nKillMode=mixed\n\n[Install]\nWantedBy=multi-user.target\n"
    )
}

/// As systemd reads it: one word, without specifiers and variables.
fn quoted(path: &Path) -> String {
    let text = path.display().to_string().replace('\\', "\\\\").replace('"', "\\\"");
    format!("\"{}\"", text.replace('%', "%%").replace('$', "$$"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_unit_names_program_and_configuration_as_one_word_each() {
        let (program, config) = (Path::new("/usr/bin/weir"), Path::new("/srv/a b/50%/$s.toml"));
        let text = text(program, config, "s1", "storage");
        let run = text.lines().find(|line| line.starts_with("ExecStart=")).unwrap();
        assert_eq!(run, r#"ExecStart="/usr/bin/weir" storage --config "/srv/a b/50%%/$$s.toml""#);
        assert!(text.contains("Description=Weir storage, node s1\n"), "{text}");
    }
}
