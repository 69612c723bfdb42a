//! `weir waits`: the waits of all processes of the cluster, the longest first.
use super::PATIENCE;
use super::args::WaitsArgs;
use weir_admin::failure::Outcome;
use weir_admin::which::coordinators;
use weir_admin::{observe, table, users};
use weir_coord::Collected;
use weir_diagnose::quantity::time;
use weir_diagnose::waits::{Seen, as_json, object, sorted};
use weir_proto::watch::{ListWaits, WaitsListed};

pub fn waits(args: &WaitsArgs) -> Outcome<()> {
    let coordinators = coordinators(&args.cluster)?;
    let asked = ListWaits { min_ms: args.min, since_s: args.since.map_or(0, |ms| ms.div_ceil(1000)) };
    let collected: Vec<Collected<WaitsListed>> = observe::block_on(async {
        let env = weir_env::real::env();
        let cluster = observe::observe(&env, &coordinators, "weir waits").await?;
        Ok(cluster.collect(&asked, PATIENCE).await?)
    })?;
    let (seen, silent) = sorted(collected);
    match args.cluster.json {
        true => table::json(&as_json(&seen, &silent)),
        false => print!("{}", as_text(&seen, &silent)),
    }
    Ok(())
}

fn as_text(seen: &[Seen], silent: &[(String, String)]) -> String {
    let users = users::of(seen.iter().filter(|s| (s.wait.uid, s.wait.pid) != (0, 0)).map(|s| s.wait.uid));
    let row = |s: &Seen| {
        let wait = &s.wait;
        let whom = [&wait.holder, &wait.peer].into_iter().find(|name| !name.is_empty());
        let program = match (wait.uid, wait.pid) {
            (0, 0) => String::new(),
            (uid, 0) => users.name(uid),
            (uid, pid) => format!("{} {pid}", users.name(uid)),
        };
        let ended = match wait.ended_ms {
            0 => "waits".to_owned(),
            ms => format!("{} ago", time(ms * 1000)),
        };
        let (lasted, what) = (time(wait.lasted_us), wait.action.clone());
        let whom = whom.cloned().unwrap_or_default();
        vec![lasted, ended, s.process.clone(), wait.reason.clone(), object(wait), what, whom, program]
    };
    let mut out = match seen {
        [] => "no waits\n".to_owned(),
        some => {
            let header = ["TIME", "ENDED", "PROCESS", "REASON", "OBJECT", "DOING", "FOR", "PROGRAM"];
            table::render(&header, &some.iter().map(row).collect::<Vec<_>>())
        }
    };
    for (name, why) in silent {
        out += &format!("{name} does not answer: {why}\n");
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;
    use weir_proto::map::Role;
    use weir_proto::watch::WaitSeen;

    fn wait(lasted_us: u64, ended_ms: u64) -> WaitSeen {
        WaitSeen {
            reason: "lock".into(),
            object: "inode".into(),
            object_id: 7,
            action: "SETLKW".into(),
            holder: "n1:/data".into(),
            peer: String::new(),
            uid: 0,
            pid: 4711,
            lasted_us,
            ended_ms,
        }
    }

    #[test]
    fn the_longest_wait_is_first_and_ended_ones_follow() {
        let of = |name: &str, now, ended| Collected {
            name: name.into(),
            role: Role::Mount,
            reply: Ok(WaitsListed { now, ended }),
        };
        let silent = Collected { name: "c".into(), role: Role::Storage, reply: Err("no answer".into()) };
        let collected = vec![
            of("a", vec![wait(20_000, 0)], vec![wait(500_000, 90_000)]),
            of("b", vec![wait(4_200_000, 0)], vec![wait(300_000, 1000)]),
            silent,
        ];
        let (seen, silent) = sorted(collected);
        let times: Vec<_> = seen.iter().map(|s| (s.process.as_str(), s.wait.lasted_us / 1000)).collect();
        assert_eq!(times, [("b", 4200), ("a", 20), ("b", 300), ("a", 500)]);
        let text = as_text(&seen, &silent);
        let first = text.lines().nth(1).unwrap().split_whitespace().collect::<Vec<_>>().join(" ");
        assert_eq!(first, "4.2 s waits b lock inode 7 SETLKW n1:/data root 4711");
        assert!(text.contains("1.0 s ago") && text.contains("90.0 s ago"), "{text}");
        assert!(text.ends_with("c does not answer: no answer\n"), "{text}");
        assert_eq!(as_json(&seen, &silent)["waits"][0]["ended_ms_ago"], Value::Null);
    }
}
