//! `weir volume snapshot` and `snapshots`: takes and lists snapshots of a volume.
use crate::commands::volume::{Cluster, explain, named, own_cred};
use crate::failure::{Failure, Outcome};
use crate::table;
use clap::Args;
use serde_json::{Value, json};
use weir_client::Client;
use weir_proto::ErrorKind;
use weir_proto::meta::Time;
use weir_proto::snapshot::Snapshot;

#[derive(Args)]
pub struct Take {
    /// The volume
    pub volume: String,
    /// The snapshot's name
    pub name: String,
    /// Delete it; space that only it uses is freed in the background
    #[arg(long)]
    pub delete: bool,
    #[command(flatten)]
    pub at: Cluster,
}

#[derive(Args)]
pub struct List {
    /// The volume
    pub volume: String,
    #[command(flatten)]
    pub at: Cluster,
}

pub async fn take(client: &Client, args: &Take) -> Outcome<Snapshot> {
    let (cred, volume) = (own_cred(), named(client, &args.volume).await?);
    let done = match args.delete {
        true => client.delete_snapshot(&cred, volume.id, &args.name).await,
        false => client.take_snapshot(&cred, volume.id, &args.name).await,
    };
    done.map_err(|e| match e.kind {
        ErrorKind::NotFound => Failure::new(e, format!("`weir volume snapshots {}` shows all", args.volume)),
        ErrorKind::Exists => Failure::new(
            e,
            format!(
                "choose another name; `weir volume snapshots {}` shows those that are taken",
                args.volume
            ),
        ),
        ErrorKind::Deadline => {
            Failure::new(e, "a client is still saving, or hangs: `weir status` shows it; try again")
        }
        ErrorKind::Denied => {
            Failure::new(e, "only a volume's owner and administrators take and delete its snapshots")
        }
        _ => explain(e),
    })
}

pub async fn list(client: &Client, args: &List) -> Outcome<Vec<Snapshot>> {
    let volume = named(client, &args.volume).await?;
    Ok(client.snapshots(volume.id).await?)
}

pub fn as_json(s: &Snapshot) -> Value {
    json!({
        "name": s.name, "number": s.number, "volume": s.volume.0, "created_ns": s.created.nanos,
        "scheduled": s.scheduled,
    })
}
pub fn as_table(all: &[Snapshot]) -> String {
    let by = |s: &Snapshot| if s.scheduled { "schedule" } else { "command" }.to_owned();
    let rows: Vec<Vec<String>> = all.iter().map(|s| vec![s.name.clone(), when(s.created), by(s)]).collect();
    table::render(&["SNAPSHOT", "TAKEN", "BY"], &rows)
}

/// `2026-03-01 12:00:05 UTC`.
pub fn when(t: Time) -> String {
    let seconds = t.nanos.div_euclid(1_000_000_000);
    let (days, of_day) = (seconds.div_euclid(86400), seconds.rem_euclid(86400));
    let (year, month, day) = civil(days);
    let (hour, minute, second) = (of_day / 3600, of_day / 60 % 60, of_day % 60);
    format!("{year}-{month:02}-{day:02} {hour:02}:{minute:02}:{second:02} UTC")
}
/// Days since 1970-01-01 as a date. Howard Hinnant, "chrono-compatible low-level date algorithms",
/// `civil_from_days`.
fn civil(days: i64) -> (i64, i64, i64) {
    let z = days + 719_468;
    let (era, of_era) = (z.div_euclid(146_097), z.rem_euclid(146_097));
    let year_of_era = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let from_march = (5 * of_year + 2) / 153;
    let month = if from_march < 10 { from_march + 3 } else { from_march - 9 };
    (year_of_era + era * 400 + i64::from(month <= 2), month, of_year - (153 * from_march + 2) / 5 + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_time_is_shown_as_a_date() {
        let shown = |seconds: i64| when(Time { nanos: seconds * 1_000_000_000 + 5 });
        assert_eq!(shown(0), "1970-01-01 00:00:00 UTC");
        assert_eq!(shown(951_782_400 + 3661), "2000-02-29 01:01:01 UTC");
        assert_eq!(shown(-1), "1969-12-31 23:59:59 UTC");
        assert_eq!(shown(1_772_366_405), "2026-03-01 12:00:05 UTC");
    }
}
