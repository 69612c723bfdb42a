//! The state of a place for backups, in words.
use crate::quantity::{show_seconds, when};
use weir_proto::backup::{Backup, BackupOutcome};
use weir_proto::retention::show_backup_retention;

/// The state of a place, as text.
pub fn state(b: &Backup) -> String {
    let mut parts = vec![match b.every_s {
        0 => "made when asked for".to_owned(),
        every_s => format!("every {}", show_seconds(every_s)),
    }];
    parts.push(format!("kept {}", show_backup_retention(&b.keep)));
    if let Some(run) = &b.running {
        parts.push(format!("being made since {}", when(run.began)));
    }
    parts.push(match &b.last {
        None => "none yet".to_owned(),
        Some(last) => match &last.outcome {
            BackupOutcome::Made { date, missing: 0, .. } => format!("last {date}"),
            BackupOutcome::Made { date, missing, .. } => {
                format!("last {date}, INCOMPLETE: {missing} missing")
            }
            BackupOutcome::Failed { why } => {
                format!("the last one FAILED ({}): {why}", when(last.ended))
            }
        },
    });
    if b.late {
        parts.push("LATE".to_owned());
    }
    parts.join(", ")
}

/// A fault that needs an administrator.
pub fn complaint(b: &Backup) -> Option<String> {
    let failed = match b.last.as_ref().map(|last| &last.outcome) {
        None | Some(BackupOutcome::Made { missing: 0, .. }) => false,
        Some(BackupOutcome::Made { .. } | BackupOutcome::Failed { .. }) => true,
    };
    (failed || b.late).then(|| format!("backup of {} to {}: {}", b.volume_name, b.url, state(b)))
}

#[cfg(test)]
mod tests {
    use super::*;
    use weir_proto::VolumeId;
    use weir_proto::backup::{BackupEnd, BackupRetention};
    use weir_proto::meta::Time;

    fn place(outcome: Option<BackupOutcome>, late: bool) -> Backup {
        let at = Time { nanos: 0 };
        Backup {
            volume: VolumeId(2),
            volume_name: "ada".into(),
            url: "file:///b".into(),
            by: 0,
            every_s: 86400,
            keep: BackupRetention::default(),
            since: at,
            running: None,
            last: outcome.map(|outcome| BackupEnd { began: at, ended: at, outcome }),
            good: None,
            due: None,
            late,
        }
    }

    #[test]
    fn late_failed_and_incomplete_backups_are_reported() {
        let made = |missing| BackupOutcome::Made { date: "D".into(), missing, files: 1, linked: 0, bytes: 5 };
        assert_eq!(complaint(&place(None, false)), None);
        assert_eq!(complaint(&place(Some(made(0)), false)), None);
        assert!(complaint(&place(Some(made(2)), false)).unwrap().contains("INCOMPLETE: 2 missing"));
        assert!(complaint(&place(Some(made(0)), true)).unwrap().contains("LATE"));
        let failed = BackupOutcome::Failed { why: "no space".into() };
        assert!(
            complaint(&place(Some(failed), false))
                .unwrap()
                .contains("FAILED (1970-01-01 00:00:00 UTC): no space")
        );
        assert_eq!(state(&place(None, false)), "every 1d, kept 7d,4w,6m, none yet");
    }
}
