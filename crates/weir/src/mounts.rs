//! What the mounts of a cluster's directory say of themselves: whether they answer, and what they lost.
//!
//! Invariant: looking never hangs. A mount whose process is stopped keeps whoever asks it; he is left behind.
use crate::file;
use crate::fuse;
use crate::place::{Place, RoleName};
use serde::Serialize;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::sync::mpsc::channel;
use std::time::Duration;

/// How long a mount may take to answer from its memory.
const PATIENCE: Duration = Duration::from_secs(2);

/// One mount.
#[derive(Clone, PartialEq, Debug, Serialize)]
pub struct MountState {
    pub name: String,
    pub path: PathBuf,
    /// "answers", "does not answer" or "not mounted".
    pub state: &'static str,
    /// How often changes or locks were lost since it started.
    pub losses: u64,
    /// The last of them.
    pub last_losses: Value,
}

pub fn of(place: &Place) -> Vec<MountState> {
    place.of_role(RoleName::Mount).map(|process| look(&process.name, &process.path)).collect()
}

fn look(name: &str, path: &Path) -> MountState {
    let said = |state, answer: Value| MountState {
        name: name.into(),
        path: path.into(),
        state,
        losses: answer["losses"].as_u64().unwrap_or(0),
        last_losses: answer["last_losses"].clone(),
    };
    if !fuse::is_mounted(path) {
        return said("not mounted", Value::Null);
    }
    let (tx, rx) = channel();
    let asked = path.to_path_buf();
    std::thread::spawn(move || {
        let _ = tx.send(file::ask(&asked, file::CLIENT)); // nobody waits any more
    });
    match rx.recv_timeout(PATIENCE) {
        Ok(Ok(answer)) => said("answers", answer),
        _ => said("does not answer", Value::Null),
    }
}

/// What a person should know, in words.
pub fn troubles(mounts: &[MountState]) -> Vec<String> {
    let mut lines = Vec::new();
    for mount in mounts {
        let (name, at) = (&mount.name, mount.path.display());
        match mount.state {
            "does not answer" => lines.push(format!(
                "{name} at {at} does not answer: `weir up` or `weir mount --recover` replaces a dead one"
            )),
            "not mounted" => lines.push(format!("{name} at {at} is not mounted")),
            _ => {}
        }
        if mount.losses > 0 {
            let last = mount.last_losses.as_array().and_then(|all| all.last());
            let what = last.and_then(|l| l["what"].as_str()).unwrap_or("see its log");
            lines.push(format!(
                "{name} at {at} lost changes or locks {} times; the last: {what}",
                mount.losses
            ));
        }
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn losses_and_silence_are_named() {
        let of = |state, losses, what: &str| MountState {
            name: "mount-1".into(),
            path: "/m".into(),
            state,
            losses,
            last_losses: json!([{ "what": what }]),
        };
        assert!(troubles(&[of("answers", 0, "")]).is_empty());
        let lines = troubles(&[of("answers", 2, "file i7: gone"), of("does not answer", 0, "")]);
        assert!(lines[0].contains("2 times") && lines[0].contains("file i7: gone"), "{lines:?}");
        assert!(lines[1].contains("does not answer"), "{lines:?}");
    }
}
