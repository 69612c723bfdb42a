//! Folds troubles that follow from one cause: one dead target is one trouble, and not a line of each process
//! that notices it.
//!
//! Nothing that needs an action of its own is folded. A fold of troubles of one kind names all of them.
use super::{Facts, Found, Trouble};
use std::cmp::Reverse;
use std::collections::BTreeMap;
use weir_proto::map::{ClusterMap, TargetState};

/// More names than these are counted.
const NAMES_MAX: usize = 6;

pub(super) fn fold(facts: &Facts, found: &mut Found) {
    hung_disks(found);
    lacking_cells(facts, found);
    let lost: Vec<String> = facts.leaving.lost.iter().map(ToString::to_string).collect();
    let of_lost = match lost.is_empty() {
        true => String::new(),
        false => format!("; they take the places of {}", lost.join(", ")),
    };
    together(found, "target-behind", |all| {
        let text = format!("{} are being repaired or filled{of_lost}", names(all));
        (text, "wait; `weir rebuild --watch` shows how far it is".to_owned())
    });
    together(found, "unanswered", |all| {
        let first = all[0].text.split(" was not answered").next().unwrap_or_default();
        let text = format!(
            "{first} and {} more questions were not answered: troubles of these kinds are not shown",
            all.len() - 1
        );
        (text, all[0].action.clone())
    });
    waits(facts, found);
}

/// Troubles of one kind become one if there are several; the text is made of them.
fn together(found: &mut Found, code: &str, summary: impl FnOnce(&[Trouble]) -> (String, String)) {
    let mut all: Vec<Trouble> = found.0.iter().filter(|t| t.code == code).cloned().collect();
    if all.len() < 2 {
        return;
    }
    all.sort_by_key(|t| Reverse(t.severity));
    let (text, action) = summary(&all);
    let one = Trouble { text, action, ..all[0].clone() };
    let at = found.0.iter().position(|t| t.code == code).unwrap_or_default();
    found.0[at] = Trouble { about: "several".to_owned(), ..one };
    let mut seen = false;
    found.0.retain(|t| t.code != code || !std::mem::replace(&mut seen, true));
}

fn names(all: &[Trouble]) -> String {
    let shown: Vec<&str> = all.iter().take(NAMES_MAX).map(|t| t.about.as_str()).collect();
    match all.len().saturating_sub(NAMES_MAX) {
        0 => shown.join(", "),
        more => format!("{} and {more} more", shown.join(", ")),
    }
}

/// A target is out of service because its disk hangs: the disk is the cause.
fn hung_disks(found: &mut Found) {
    let down: BTreeMap<String, Trouble> =
        found.0.iter().filter(|t| t.code == "target-down").map(|t| (t.about.clone(), t.clone())).collect();
    let mut explained = Vec::new();
    for trouble in found.0.iter_mut().filter(|t| matches!(&*t.code, "target-stalled" | "disk-slow")) {
        let Some(down) = down.get(&trouble.about) else { continue };
        let (_, missing) = down.text.split_once("and is ").unwrap_or(("", "out of service"));
        trouble.severity = trouble.severity.max(down.severity);
        trouble.text = format!("{}; it is out of service, and {missing}", trouble.text);
        explained.push(trouble.about.clone());
    }
    found.0.retain(|t| t.code != "target-down" || !explained.contains(&t.about));
}

/// Writes continue without a target that is away: the others lack its part.
fn lacking_cells(facts: &Facts, found: &mut Found) {
    let away = facts.status.map.targets.iter().filter(|t| t.state != TargetState::Up);
    let away: Vec<String> = away.map(|t| facts.named(t.id)).collect();
    let is_named = |t: &Trouble| {
        matches!(&*t.code, "storage-down" | "target-failed" | "target-down" | "target-stalled" | "disk-slow")
    };
    if !away.is_empty() && found.0.iter().any(is_named) {
        return found.0.retain(|t| t.code != "cells-lack-redundancy");
    }
    together(found, "cells-lack-redundancy", |all| {
        let reports = facts.status.targets.iter();
        let cells: u64 = reports.map(|r| r.under_replicated_cells).sum();
        (
            format!("{cells} cells of stripes on {} lack redundancy: they are being repaired", names(all)),
            String::new(),
        )
    });
}

/// Clients that wait for a server of which a trouble is known: it is the one to see to.
fn waits(facts: &Facts, found: &mut Found) {
    let is_cause = |t: &&Trouble| !matches!(&*t.code, "client-waits" | "link-cut" | "mount-silent");
    let causes: Vec<String> = found.0.iter().filter(is_cause).map(|t| t.about.clone()).collect();
    for trouble in found.0.iter_mut().filter(|t| t.code == "client-waits") {
        let waits = trouble.text.split_once(" for ").map_or("", |(_, waits)| waits);
        let words: Vec<&str> = waits.split([' ', ',', '(', ')']).collect();
        let is_it =
            |about: &&String| words.contains(&about.as_str()) || is_pair(&facts.status.map, &words, about);
        if let Some(about) = causes.iter().find(is_it) {
            trouble.action = format!("it follows from the trouble of {about}");
        }
    }
}

/// Whether one of the words is a target of the node, or the node of the target.
fn is_pair(map: &ClusterMap, words: &[&str], about: &str) -> bool {
    let is_pair = |t: &weir_proto::map::Target| {
        let (id, node) = (t.id.to_string(), map.node(t.node).map_or("", |n| n.name.as_str()));
        (about == node && words.contains(&id.as_str())) || (about == id && words.contains(&node))
    };
    map.targets.iter().any(is_pair)
}
