//! The waits of a cluster's processes: in order, and for programs.
use serde_json::{Value, json};
use weir_coord::Collected;
use weir_proto::watch::{WaitSeen, WaitsListed};

/// A wait and the process that waits.
#[derive(Clone, PartialEq, Debug)]
pub struct Seen {
    pub process: String,
    pub wait: WaitSeen,
}

/// Waits that last, the longest first, then ended ones, the newest first; and processes without an answer.
pub fn sorted(collected: Vec<Collected<WaitsListed>>) -> (Vec<Seen>, Vec<(String, String)>) {
    let (mut seen, mut silent) = (Vec::new(), Vec::new());
    for Collected { name, reply, .. } in collected {
        match reply {
            Ok(WaitsListed { now, ended }) => {
                let of = |wait| Seen { process: name.clone(), wait };
                seen.extend(now.into_iter().chain(ended).map(of));
            }
            Err(why) => silent.push((name, why)),
        }
    }
    seen.sort_by_key(|s| (s.wait.ended_ms, std::cmp::Reverse(s.wait.lasted_us)));
    (seen, silent)
}

/// `inode 17`, `target 3`; nothing for a wait without an object.
pub fn object(wait: &WaitSeen) -> String {
    match wait.object.as_str() {
        "" => String::new(),
        kind => format!("{kind} {}", wait.object_id),
    }
}

pub fn as_json(seen: &[Seen], silent: &[(String, String)]) -> Value {
    let wait = |s: &Seen| {
        let w = &s.wait;
        json!({
            "process": s.process, "reason": w.reason, "object": w.object, "object_id": w.object_id,
            "action": w.action, "holder": w.holder, "peer": w.peer, "uid": w.uid, "pid": w.pid,
            "lasted_us": w.lasted_us, "ended_ms_ago": (w.ended_ms > 0).then_some(w.ended_ms),
        })
    };
    let without_answer = |(name, why): &(String, String)| json!({ "process": name, "why": why });
    json!({
        "waits": seen.iter().map(wait).collect::<Vec<_>>(),
        "silent": silent.iter().map(without_answer).collect::<Vec<_>>(),
    })
}
