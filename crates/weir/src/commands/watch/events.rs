//! `weir events`: troubles with their begin and end, the known kinds, and the muted ones.
use super::args::{EventNamed, EventsArgs, EventsCommand};
use serde_json::{Value, json};
use std::time::Duration;
use weir_admin::failure::{Failure, Outcome};
use weir_admin::which::coordinators;
use weir_admin::{observe, table};
use weir_coord::Cluster;
use weir_diagnose::quantity::lasting;
use weir_diagnose::troubles::{kind, kinds_page, word};
use weir_proto::date::Date;
use weir_proto::event::{EventLog, EventMark, EventSeen, GetEvents, MarkEvents};
use weir_proto::{Error, Request};

/// The interval of queries of `--follow`.
const FOLLOW_EVERY: Duration = Duration::from_secs(1);

pub fn events(args: &EventsArgs) -> Outcome<()> {
    match &args.command {
        None if args.follow => follow(args),
        None => list(args),
        Some(EventsCommand::Kinds) => {
            print!("{}", kinds_page());
            Ok(())
        }
        Some(EventsCommand::Ack(event)) => mark(event, EventMark::Acknowledge, 0),
        Some(EventsCommand::Mute { until, event }) => {
            mark(event, EventMark::Mute, now_s() + u64::from(*until))
        }
        Some(EventsCommand::Unmute(event)) => mark(event, EventMark::Unmute, 0),
    }
}

fn now_s() -> u64 {
    u64::try_from(weir_env::real::env().clock.wall().0 / 1_000_000_000).unwrap_or(0)
}

fn ask<R: Request>(args: &weir_admin::cluster_args::Status, request: &R) -> Outcome<R::Reply> {
    let coordinators = coordinators(args)?;
    observe::block_on(async {
        let cluster = observe::observe(&weir_env::real::env(), &coordinators, "weir events").await?;
        Ok(cluster.administer(request).await?)
    })
}

fn mark(event: &EventNamed, mark: EventMark, until_s: u64) -> Outcome<()> {
    let EventNamed { code, about, cluster } = event;
    if kind(code).is_none() {
        let error = Error::not_found(format!("{code:?} is not a code of an event"));
        return Err(Failure::new(error, "`weir events kinds` lists them"));
    }
    let about = about.clone().unwrap_or_default();
    ask(cluster, &MarkEvents { code: code.clone(), about: about.clone(), mark, until_s })?;
    if cluster.json {
        let until = (until_s > 0).then_some(until_s);
        table::json(&json!({ "code": code, "about": about, "until_s": until }));
    } else {
        let of = if about.is_empty() { code.clone() } else { format!("{code} of {about}") };
        println!(
            "{}",
            match mark {
                EventMark::Acknowledge => format!("{of} is noted as known"),
                EventMark::Mute => format!("{of} is muted until {}", shown(until_s)),
                EventMark::Unmute => format!("{of} counts again"),
            }
        );
    }
    Ok(())
}

fn shown(at_s: u64) -> String {
    Date(i64::try_from(at_s).unwrap_or(i64::MAX)).to_string()
}

fn list(args: &EventsArgs) -> Outcome<()> {
    show(args, ask(&args.cluster, &GetEvents {})?);
    Ok(())
}

fn show(args: &EventsArgs, mut log: EventLog) {
    let now_s = now_s();
    if let Some(since) = args.since {
        let from = now_s.saturating_sub(u64::from(since));
        log.events.retain(|event| event.cleared_s == 0 || event.cleared_s >= from);
    }
    match (args.cluster.json, args.follow) {
        (true, true) => log.events.iter().for_each(|event| println!("{}", event_json(event))),
        (true, false) => table::json(&as_json(&log)),
        (false, _) => print!("{}", as_text(&log, now_s)),
    }
}

/// Prints the log, then what changes in it. A coordinator that does not answer is tried again.
fn follow(args: &EventsArgs) -> Outcome<()> {
    let coordinators = coordinators(&args.cluster)?;
    observe::block_on(async {
        let env = weir_env::real::env();
        let cluster: Cluster = observe::observe(&env, &coordinators, "weir events").await?;
        let mut known = cluster.administer(&GetEvents {}).await?;
        show(args, known.clone());
        let mut is_silent = false;
        loop {
            env.clock.sleep(FOLLOW_EVERY).await;
            let log = match cluster.administer(&GetEvents {}).await {
                Ok(log) => log,
                Err(e) => {
                    if !is_silent {
                        eprintln!("the coordinator does not answer, it is tried again: {e}");
                    }
                    is_silent = true;
                    continue;
                }
            };
            if std::mem::take(&mut is_silent) {
                eprintln!("the coordinator answers again");
            }
            for (change, event) in changes(&known, &log) {
                match args.cluster.json {
                    true => println!("{}", event_json(event)),
                    false => println!("{}", line(change, event, now_s())),
                }
            }
            known = log;
        }
    })
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Change {
    Raised,
    /// Within a minute of its end.
    Again,
    Acknowledged,
    Cleared,
}

/// What happened between two states of the log, in the order of its events.
fn changes<'a>(before: &EventLog, after: &'a EventLog) -> Vec<(Change, &'a EventSeen)> {
    let key = |event: &EventSeen| (event.raised_s, event.trouble.code.clone(), event.trouble.about.clone());
    let mut found = Vec::new();
    for event in &after.events {
        let known = before.events.iter().find(|known| key(known) == key(event));
        let (acknowledged, cleared) = known.map_or((0, 0), |known| (known.acknowledged_s, known.cleared_s));
        if known.is_none() {
            found.push((Change::Raised, event));
        }
        if cleared > 0 && event.cleared_s == 0 {
            found.push((Change::Again, event));
        }
        if event.acknowledged_s > 0 && acknowledged == 0 {
            found.push((Change::Acknowledged, event));
        }
        if event.cleared_s > 0 && cleared == 0 {
            found.push((Change::Cleared, event));
        }
    }
    found
}

/// The log has no time for an event that lasts again.
fn line(change: Change, event: &EventSeen, now_s: u64) -> String {
    let (at_s, word_of_change) = match change {
        Change::Raised => (event.raised_s, "raised"),
        Change::Again => (now_s, "again"),
        Change::Acknowledged => (event.acknowledged_s, "known"),
        Change::Cleared => (event.cleared_s, "cleared"),
    };
    let trouble = &event.trouble;
    format!(
        "{}  {word_of_change:7}  {:8}  {}  {}",
        shown(at_s),
        word(trouble.severity),
        trouble.code,
        trouble.text
    )
}

fn event_json(e: &EventSeen) -> Value {
    let time = |s: u64| (s > 0).then_some(s);
    json!({
        "code": e.trouble.code, "severity": word(e.trouble.severity), "about": e.trouble.about,
        "text": e.trouble.text, "action": e.trouble.action, "raised_s": e.raised_s,
        "cleared_s": time(e.cleared_s), "acknowledged_s": time(e.acknowledged_s),
    })
}

pub fn as_json(log: &EventLog) -> Value {
    let mutes = log.mutes.iter().map(|m| json!({ "code": m.code, "about": m.about, "until_s": m.until_s }));
    json!({ "events": log.events.iter().map(event_json).collect::<Vec<_>>(), "mutes": mutes.collect::<Vec<_>>() })
}

fn as_text(log: &EventLog, now_s: u64) -> String {
    let row = |e: &EventSeen| {
        let end = if e.cleared_s > 0 { e.cleared_s } else { now_s };
        let state = match (e.cleared_s, e.acknowledged_s) {
            (0, 0) => "lasts",
            (0, _) => "lasts, known",
            _ => "cleared",
        };
        let lasted = lasting(end.saturating_sub(e.raised_s));
        let (severity, code) = (word(e.trouble.severity), e.trouble.code.clone());
        vec![shown(e.raised_s), lasted, state.into(), severity.into(), code, e.trouble.text.clone()]
    };
    let mut out = match log.events.as_slice() {
        [] => "no events: no trouble was found within the last 30 days\n".to_owned(),
        events => {
            let rows: Vec<Vec<String>> = events.iter().map(row).collect();
            table::render(&["RAISED", "LASTED", "STATE", "SEVERITY", "CODE", "WHAT"], &rows)
        }
    };
    for mute in &log.mutes {
        let about = if mute.about.is_empty() { String::new() } else { format!(" of {}", mute.about) };
        out += &format!("{}{about} is muted until {}\n", mute.code, shown(mute.until_s));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;
    use weir_proto::condition::{NodeTrouble, Severity};
    use weir_proto::event::Mute;

    #[test]
    fn events_are_listed_with_their_length_and_mutes() {
        let trouble = NodeTrouble {
            code: "mover-down".into(),
            severity: Severity::Warning,
            about: "mover-1".into(),
            text: "mover-1 is not running".into(),
            action: String::new(),
        };
        let event = |raised_s, cleared_s, acknowledged_s| EventSeen {
            trouble: trouble.clone(),
            raised_s,
            cleared_s,
            acknowledged_s,
        };
        let mute = Mute { code: "clock-off".into(), about: String::new(), until_s: 86_400 };
        let log = EventLog { events: vec![event(60, 180, 0), event(600, 0, 700)], mutes: vec![mute] };
        let text = as_text(&log, 660);
        let lines: Vec<String> =
            text.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" ")).collect();
        assert_eq!(lines[1], "1970-01-01T00:01:00Z 2 min cleared warning mover-down mover-1 is not running");
        assert_eq!(
            lines[2],
            "1970-01-01T00:10:00Z 60 s lasts, known warning mover-down mover-1 is not running"
        );
        assert_eq!(lines[3], "clock-off is muted until 1970-01-02T00:00:00Z");
        assert_eq!(as_json(&log)["events"][1]["cleared_s"], Value::Null);
        assert!(as_text(&EventLog::default(), 1).contains("no events"));
    }
    #[test]
    fn each_change_of_an_event_is_followed_once() {
        let event = |about: &str, cleared_s, acknowledged_s| EventSeen {
            trouble: NodeTrouble {
                code: "mover-down".into(),
                severity: Severity::Warning,
                about: about.into(),
                text: format!("{about} is not running"),
                action: String::new(),
            },
            raised_s: 60,
            cleared_s,
            acknowledged_s,
        };
        let log = |events| EventLog { events, mutes: vec![] };
        let before = log(vec![event("a", 0, 0), event("b", 90, 0), event("c", 0, 70), event("e", 90, 0)]);
        assert_eq!(changes(&before, &before), []);
        let after = log(vec![
            event("b", 90, 0),
            event("c", 120, 70),
            event("a", 0, 80),
            event("d", 100, 0),
            event("e", 0, 0),
        ]);
        let lines: Vec<String> =
            changes(&before, &after).iter().map(|(c, event)| line(*c, event, 200)).collect();
        assert_eq!(
            lines,
            [
                "1970-01-01T00:02:00Z  cleared  warning   mover-down  c is not running",
                "1970-01-01T00:01:20Z  known    warning   mover-down  a is not running",
                "1970-01-01T00:01:00Z  raised   warning   mover-down  d is not running",
                "1970-01-01T00:01:40Z  cleared  warning   mover-down  d is not running",
                "1970-01-01T00:03:20Z  again    warning   mover-down  e is not running",
            ]
        );
    }
}
