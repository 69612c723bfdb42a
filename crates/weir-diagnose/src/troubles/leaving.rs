//! Troubles of targets that leave the cluster: lost ones whose places no other target can take, drained ones
//! that cannot hand over theirs, and the remains of those whose data others have by now.
//!
//! A drained target still serves its data: it must never look like a lost one, whose disk may be thrown away.
use super::{Facts, Found};
use crate::health::InUse;
use crate::quantity;
use std::collections::BTreeSet;
use weir_proto::TargetId;
use weir_proto::coord::{RebuildStatus, RebuildWaiting};
use weir_proto::map::{Target, TargetState};

/// The coordinator's view of targets that leave.
#[derive(Default)]
pub struct Leaving {
    /// Given up, or away for too long.
    pub lost: BTreeSet<TargetId>,
    /// They serve their places until others have taken these.
    pub draining: BTreeSet<TargetId>,
    /// Places that no target can take. Those whose turn comes later are not among them.
    pub waiting: Vec<RebuildWaiting>,
}

impl Leaving {
    pub fn of(rebuild: RebuildStatus) -> Leaving {
        let needs_help = |waiting: &RebuildWaiting| !waiting.why.contains("first");
        Leaving {
            lost: rebuild.lost.into_iter().collect(),
            draining: rebuild.draining.into_iter().collect(),
            waiting: rebuild.waiting.into_iter().filter(needs_help).collect(),
        }
    }
}

/// Whether a target is lost and no file needs it any more: its places belong to others.
pub(super) fn is_unneeded(facts: &Facts, in_use: &InUse, target: &Target) -> bool {
    let groups = &facts.status.map.groups;
    let needs = |id| groups.iter().any(|g| in_use.has(g) && g.members.iter().any(|m| m.target == id));
    target.state != TargetState::Up
        && facts.leaving.lost.contains(&target.id)
        && !groups.is_empty()
        && !needs(target.id)
}

pub(super) fn check(facts: &Facts, in_use: &InUse, found: &mut Found) {
    for RebuildWaiting { target, why, places } in &facts.leaving.waiting {
        let (named, places) = (
            facts.named(*target),
            quantity::count(u64::from(*places), ["placement group", "placement groups"]),
        );
        if facts.leaving.draining.contains(target) && !facts.leaving.lost.contains(target) {
            let text = format!("the drain of {named} waits in {places}: {why}; it still serves its data");
            let action = format!(
                "leave its disk as it is, and add a target or free space on the others; `weir target undrain {target}` ends \
                 the drain"
            );
            found.warning(("drain-waits", target), text, action);
        } else {
            let text = format!("{target} is lost, and not replaced in {places}: {why}");
            let action =
                format!("add a target, or give it a new disk with `weir target replace {target} DIR`");
            found.degraded(("rebuild-waits", target), text, action);
        }
    }
    for target in facts.status.map.targets.iter().filter(|t| is_unneeded(facts, in_use, t)) {
        let (id, named) = (target.id, facts.named(target.id));
        let text = format!("{named} is given up, and other targets have all its data: nothing needs it");
        let action = format!(
            "`weir target remove {id}` forgets it; `weir target replace {id} DIR` uses it again with a new disk"
        );
        found.note(("target-unneeded", &id), text, action);
    }
}
