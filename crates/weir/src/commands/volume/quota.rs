//! `weir quota`, and `weir volume quota` for users and groups: usage and limits, exact with each commit.
use super::args::{SetQuota, ShowQuota};
use super::limits::{Limits, limits, shown_limit};
use serde_json::{Value, json};
use weir_admin::failure::{Failure, Outcome};
use weir_admin::namespace_client::{Cluster, connect, named, own_cred};
use weir_admin::which::coordinators;
use weir_admin::{observe, table, users};
use weir_client::Client;
use weir_proto::meta::Time;
use weir_proto::quota::{ALL_VOLUMES, DEFAULT_ID, Holder, ListOf, OwnerKind, OwnerUsage};
use weir_proto::volume::Quota;
use weir_proto::{Error, ErrorKind, VolumeId};

/// The output of a command.
struct Shown {
    rows: Vec<OwnerUsage>,
    /// A limit was changed.
    changed: bool,
}

/// `weir quota`.
pub fn show(args: &ShowQuota) -> Outcome<()> {
    with_client(&args.at, async |client| {
        let cred = own_cred();
        let list = match args.group {
            Some(id) => ListOf::Owner { kind: OwnerKind::Group, id },
            None => ListOf::Owner { kind: OwnerKind::User, id: args.user.unwrap_or(cred.uid) },
        };
        let rows = all_rows(client, &list).await?;
        Ok(Shown { rows, changed: false })
    })
}

/// `weir volume quota` for users and groups: sets a limit, or lists all.
pub fn of_owners(args: &SetQuota) -> Outcome<()> {
    with_client(&args.at, async |client| {
        let volume = match &args.name {
            Some(name) => named(client, name).await?.id,
            None => ALL_VOLUMES,
        };
        let Some(holder) = holder(args, volume) else {
            return Ok(Shown { rows: all_rows(client, &ListOf::Volume { volume }).await?, changed: false });
        };
        if args.limits.is_none() && !args.reset {
            let rows = all_rows(client, &ListOf::Volume { volume }).await?;
            return Ok(Shown {
                rows: rows.into_iter().filter(|r| r.holder == holder).collect(),
                changed: false,
            });
        }
        let quota = if args.reset { None } else { Some(new_quota(client, &args.limits, holder).await?) };
        let row = client.set_owner_limit(&own_cred(), holder, quota).await.map_err(explain)?;
        Ok(Shown { rows: vec![row], changed: true })
    })
}

fn with_client(at: &Cluster, body: impl AsyncFnOnce(&Client) -> Outcome<Shown>) -> Outcome<()> {
    let coordinators = coordinators(&at.cluster)?;
    let shown = observe::block_on(async {
        let client = connect(coordinators, &at.namespace).await?;
        let shown = body(&client).await;
        client.shutdown().await?;
        shown
    })?;
    let now = Time { nanos: weir_env::real::env().clock.wall().0 };
    match at.cluster.json {
        true => table::json(&Value::Array(shown.rows.iter().map(as_json).collect())),
        false => print!("{}", as_text(&shown, now)),
    }
    Ok(())
}

fn holder(args: &SetQuota, volume: VolumeId) -> Option<Holder> {
    let (kind, id) = match args {
        SetQuota { user: Some(id), .. } => (OwnerKind::User, *id),
        SetQuota { group: Some(id), .. } => (OwnerKind::Group, *id),
        SetQuota { default_user: true, .. } => (OwnerKind::User, DEFAULT_ID),
        SetQuota { default_group: true, .. } => (OwnerKind::Group, DEFAULT_ID),
        _ => return None,
    };
    Some(Holder { volume, kind, id })
}

/// Options that are not given keep their value.
async fn new_quota(client: &Client, given: &Limits, holder: Holder) -> Outcome<Quota> {
    let rows = all_rows(client, &ListOf::Volume { volume: holder.volume }).await?;
    let own = rows.into_iter().find(|row| row.holder == holder).filter(|row| row.own);
    Ok(limits(given, own.and_then(|row| row.quota).unwrap_or(Quota::NONE)))
}

async fn all_rows(client: &Client, list: &ListOf) -> Outcome<Vec<OwnerUsage>> {
    let (cred, mut rows, mut after) = (own_cred(), Vec::new(), None);
    loop {
        let page = client.owner_usage(&cred, list.clone(), after).await.map_err(explain)?;
        after = page.rows.last().map(|row| row.holder);
        rows.extend(page.rows);
        if page.end || after.is_none() {
            return Ok(rows);
        }
    }
}

fn explain(e: Error) -> Failure {
    match e.kind {
        ErrorKind::Denied => Failure::new(
            e,
            "the superuser sets limits for all volumes, a volume's owner and administrators those in it; `weir quota` shows your own",
        ),
        _ => e.into(),
    }
}

fn as_text(shown: &Shown, now: Time) -> String {
    let names = users::of_owners(shown.rows.iter());
    if let (true, [row]) = (shown.changed, &shown.rows[..]) {
        let whose = format!("{} in {}", names.shown(&row.holder), volume(row));
        let full = match state(row) {
            "" | "ok" => "",
            _ => "; its usage is at or above them: nothing can be added",
        };
        return match row.own {
            true => format!("limits of {whose}: {} and {}{full}\n", bytes_limit(row), inodes_limit(row)),
            false => format!("{whose} has no limits of its own any more\n"),
        };
    }
    let rows: Vec<Vec<String>> = shown
        .rows
        .iter()
        .map(|row| {
            vec![
                volume(row),
                names.shown(&row.holder),
                if row.holder.id == DEFAULT_ID { String::new() } else { table::bytes(row.bytes) },
                bytes_limit(row),
                if row.holder.id == DEFAULT_ID { String::new() } else { row.inodes.to_string() },
                inodes_limit(row),
                grace_left(row, now),
                state(row).into(),
            ]
        })
        .collect();
    let header = ["VOLUME", "WHO", "USED", "LIMIT", "FILES AND DIRECTORIES", "LIMIT", "GRACE LEFT", "STATE"];
    table::render(&header, &rows)
}

fn volume(row: &OwnerUsage) -> String {
    if row.holder.volume == ALL_VOLUMES { "all volumes".into() } else { row.volume_name.clone() }
}
fn quota(row: &OwnerUsage) -> Quota {
    row.quota.unwrap_or(Quota::NONE)
}
fn bytes_limit(row: &OwnerUsage) -> String {
    shown_limit(quota(row).bytes_hard, quota(row).bytes_soft, table::bytes)
}
fn inodes_limit(row: &OwnerUsage) -> String {
    shown_limit(quota(row).inodes_hard, quota(row).inodes_soft, |n| table::count(n, ["file", "files"]))
}

/// Seconds until the first soft limit that is exceeded becomes a hard one.
fn grace_left_s(row: &OwnerUsage, now: Time) -> Option<i64> {
    let since = row.bytes_over_since.into_iter().chain(row.inodes_over_since).min_by_key(|t| t.nanos)?;
    let over_s = now.nanos.saturating_sub(since.nanos) / 1_000_000_000;
    Some((i64::from(quota(row).grace_s) - over_s).max(0))
}
fn grace_left(row: &OwnerUsage, now: Time) -> String {
    match grace_left_s(row, now) {
        None => String::new(),
        Some(0) => "over".into(),
        Some(s) if s >= 2 * 86400 => format!("{} days", s / 86400),
        Some(s) if s >= 2 * 3600 => format!("{} h", s / 3600),
        Some(s) => format!("{} min", (s + 59) / 60),
    }
}

fn state(row: &OwnerUsage) -> &'static str {
    let is_at = |used: u64, hard: Option<u64>| hard.is_some_and(|hard| used >= hard);
    match row.holder.id {
        DEFAULT_ID => "",
        0 if row.holder.kind == OwnerKind::User => "ok",
        _ if is_at(row.bytes, quota(row).bytes_hard) || is_at(row.inodes, quota(row).inodes_hard) => "full",
        _ if row.bytes_over_since.or(row.inodes_over_since).is_some() => "over the soft limit",
        _ => "ok",
    }
}

fn as_json(row: &OwnerUsage) -> Value {
    let seconds = |t: Option<Time>| t.map(|t| t.nanos / 1_000_000_000);
    let in_volume = row.holder.volume != ALL_VOLUMES;
    json!({
        "volume": in_volume.then_some(&row.volume_name), "volume_id": in_volume.then_some(row.holder.volume.0),
        "kind": if row.holder.kind == OwnerKind::User { "user" } else { "group" },
        "id": (row.holder.id != DEFAULT_ID).then_some(row.holder.id), "default": row.holder.id == DEFAULT_ID,
        "used_bytes": row.bytes, "files_and_directories": row.inodes, "own_limits": row.own,
        "bytes_hard": quota(row).bytes_hard, "bytes_soft": quota(row).bytes_soft,
        "inodes_hard": quota(row).inodes_hard, "inodes_soft": quota(row).inodes_soft,
        "grace_seconds": row.quota.map(|quota| quota.grace_s),
        "bytes_over_since": seconds(row.bytes_over_since), "inodes_over_since": seconds(row.inodes_over_since),
        "state": state(row),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(id: u32, bytes: u64, over: Option<i64>) -> OwnerUsage {
        let quota =
            Quota { bytes_hard: Some(1000), bytes_soft: Some(500), grace_s: 3 * 86400, ..Quota::NONE };
        OwnerUsage {
            holder: Holder { volume: VolumeId(3), kind: OwnerKind::User, id },
            volume_name: "work".into(),
            bytes,
            inodes: 2,
            quota: Some(quota),
            own: true,
            bytes_over_since: over.map(|s| Time { nanos: s * 1_000_000_000 }),
            inodes_over_since: None,
        }
    }

    #[test]
    fn a_row_says_how_long_the_grace_lasts() {
        let now = Time { nanos: 500_000 * 1_000_000_000 };
        for (over, left) in [
            (None, ""),
            (Some(500_000), "3 days"),
            (Some(500_000 - 2 * 86400), "24 h"),
            (Some(500_000 - 3 * 86400 + 61), "2 min"),
            (Some(500_000 - 4 * 86400), "over"),
        ] {
            assert_eq!(grace_left(&row(5, 600, over), now), left, "{over:?}");
        }
    }

    #[test]
    fn a_table_names_users_limits_and_states() {
        let rows = vec![row(0, 1000, None), row(4_294_967_294, 1000, None), row(DEFAULT_ID, 0, None)];
        let text = as_text(&Shown { rows, changed: false }, Time { nanos: 0 });
        let lines: Vec<String> =
            text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
        assert_eq!(lines[0], "VOLUME WHO USED LIMIT FILES AND DIRECTORIES LIMIT GRACE LEFT STATE");
        assert_eq!(lines[1], "work user root 1000 B 1000 B (soft 500 B) 2 none ok", "user 0 has no limit");
        assert!(lines[2].starts_with("work user 4294967294") && lines[2].ends_with("full"), "{text}");
        assert!(lines[3].starts_with("work each other user 1000 B (soft 500 B)"), "{text}");
    }

    #[test]
    fn a_change_is_reported_in_one_line() {
        let one = Shown { rows: vec![row(4_294_967_294, 1, None)], changed: true };
        assert_eq!(
            as_text(&one, Time { nanos: 0 }),
            "limits of user 4294967294 in work: 1000 B (soft 500 B) and none\n"
        );
    }
}
