//! What can happen next, and what it does.
//!
//! Each step is one message that arrives, one sync, one decision of a member or one change of the map. A
//! message may be late, and it never has to arrive.
use super::state::{NOW, Node, State};
use std::rc::Rc;
use weir_kv::CommitSeq;
use weir_meta::copies::decide::{self, Lead, Promise, Start};
use weir_proto::Epoch;
use weir_proto::map::MemberState;

/// How much is searched.
#[derive(Clone, Copy, Debug)]
pub struct Rules {
    pub copies: u8,
    pub writes: u8,
    /// The map changes until this epoch.
    pub epochs: u64,
    pub crashes: u8,
    /// A member takes all that it lacks at once and syncs it.
    pub at_once: bool,
    pub shortcut: Option<Shortcut>,
}

/// A tempting simplification. Each loses records or shows an old state.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Shortcut {
    /// R1: a record is durable when most members keep it.
    Majority,
    /// R1: a member acknowledges records that it has not synced yet.
    KeptBeforeSync,
    /// R2: a member takes records of an older leader.
    AcceptOlder,
    /// R2: a member that restarts does not know which epoch it knew.
    ForgetEpoch,
    /// R2: a new leader's records are put behind what the member has.
    NoTruncation,
    /// R3: a member that returns is current at once.
    ReturnAsCurrent,
    /// R4: a leader that restarted continues under its epoch.
    SameEpochAfterRestart,
    /// R5: the leader does not wait for a member that it reported as caught up until the map has it.
    CaughtUpEarly,
    /// R6: a new leader acknowledges at once.
    NoWait,
    /// R6: a member that restarts has forgotten its promise.
    ForgetPromise,
    /// R6: the leader answers without the promise of a member that it reported as caught up. (Found here.)
    RightOfCurrentOnly,
    /// R7: records that a member has synced are folded into the tree at once.
    FoldSynced,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Step {
    /// A leader makes a record.
    Write {
        at: u8,
    },
    /// A follower compares its records with the leader's, and cuts its own back.
    Compare {
        from: u8,
        to: u8,
    },
    /// A follower takes the leader's next record.
    Take {
        from: u8,
        to: u8,
    },
    Sync {
        at: u8,
    },
    /// The leader learns what a follower has synced.
    Kept {
        from: u8,
        to: u8,
    },
    /// The leader learns that a member knows no newer epoch.
    Answered {
        from: u8,
        to: u8,
    },
    RightEnds {
        from: u8,
        to: u8,
    },
    PromiseEnds {
        at: u8,
    },
    Acknowledge {
        at: u8,
    },
    ReportCaughtUp {
        at: u8,
        of: u8,
    },
    /// A member gets the newest map.
    Learn {
        at: u8,
    },
    /// It loses what it has not synced, or none of it.
    Crash {
        at: u8,
        loses: bool,
    },
    /// The coordinator takes a member for dead; another one leads if it was the leader.
    Down {
        id: u8,
        leader: Option<u8>,
    },
    Back {
        id: u8,
    },
    Current {
        epoch: Epoch,
        id: u8,
    },
    /// A member asks to lead, under a new epoch: after a restart, or because there is no leader.
    AskToLead {
        id: u8,
    },
}

impl Rules {
    fn is(&self, shortcut: Shortcut) -> bool {
        self.shortcut == Some(shortcut)
    }
}

/// Every step that may be possible.
pub fn steps(rules: &Rules, state: &State) -> Vec<Step> {
    let ids = 0..rules.copies;
    let mut all = Vec::new();
    for at in ids.clone() {
        let node = state.node(at);
        if let Some(lead) = &node.lead {
            all.extend([Step::Write { at }, Step::Acknowledge { at }]);
            for to in lead.others() {
                all.extend([Step::Compare { from: at, to }, Step::Take { from: at, to }]);
                all.extend([Step::Kept { from: to, to: at }, Step::Answered { from: to, to: at }]);
                all.extend([Step::RightEnds { from: to, to: at }, Step::ReportCaughtUp { at, of: to }]);
            }
        }
        all.extend([Step::Sync { at }, Step::Learn { at }, Step::PromiseEnds { at }]);
        if state.crashes < rules.crashes {
            all.extend([Step::Crash { at, loses: true }, Step::Crash { at, loses: false }]);
        }
    }
    if state.group.epoch.0 < rules.epochs {
        for id in ids.clone() {
            all.extend([Step::Back { id }, Step::AskToLead { id }]);
            let is_leader = state.group.leader == Some(id);
            let next: Vec<Option<u8>> = ids.clone().filter(|o| *o != id && is_leader).map(Some).collect();
            all.extend(next.into_iter().chain([None]).map(|leader| Step::Down { id, leader }));
        }
        all.extend(state.reported.iter().map(|(epoch, id)| Step::Current { epoch: *epoch, id: *id }));
    }
    all
}

/// The state after a step; none: it is not possible, or changes nothing.
pub fn take(rules: &Rules, before: &State, step: Step) -> Option<State> {
    let mut state = before.clone();
    let done = match step {
        Step::Write { at } => write(rules, &mut state, at),
        Step::Compare { from, to } => compare(rules, &mut state, from, to),
        Step::Take { from, to } => take_record(rules, &mut state, from, to),
        Step::Sync { at } => sync(&mut state, at),
        Step::Kept { from, to } => kept(rules, &mut state, from, to),
        Step::Answered { from, to } => note_answer(rules, &mut state, from, to),
        Step::RightEnds { from, to } => state.node_mut(to).lead.as_mut().map(|lead| lead.forget_answer(from)),
        Step::PromiseEnds { at } => promise_ends(&mut state, at),
        Step::Acknowledge { at } => acknowledge(rules, &mut state, at),
        Step::ReportCaughtUp { at, of } => report_caught_up(rules, &mut state, at, of),
        Step::Learn { at } => learn(rules, &mut state, at),
        Step::Crash { at, loses } => crash(rules, &mut state, at, loses),
        Step::Down { id, leader } => {
            Rc::make_mut(&mut state.group).down(id, leader).is_ok_and(|news| news).then_some(())
        }
        Step::Back { id } => back(rules, &mut state, id),
        Step::Current { epoch, id } => {
            state.reported.remove(&(epoch, id));
            Rc::make_mut(&mut state.group).caught_up(id, epoch).is_ok_and(|news| news).then_some(())
        }
        Step::AskToLead { id } => ask_to_lead(&mut state, id),
    };
    done.filter(|()| state != *before)?;
    let newest = state.group.epoch;
    state.reported.retain(|(epoch, _)| *epoch == newest); // the coordinator refuses the others
    Some(state)
}

fn write(rules: &Rules, state: &mut State, at: u8) -> Option<()> {
    if state.writes == rules.writes {
        return None;
    }
    state.writes += 1;
    let write = state.writes;
    let node = state.node_mut(at);
    let epoch = node.lead.as_ref()?.epoch();
    node.push(epoch, write);
    if rules.at_once {
        node.synced = node.last();
    }
    Some(())
}

/// A leader's message arrives: the follower knows its epoch from then on, and leads no more under an older
/// one.
fn reached(rules: &Rules, state: &mut State, from: u8, to: u8) -> Option<Node> {
    let leader = state.node(from).clone();
    let epoch = leader.lead.as_ref()?.epoch();
    let node = state.node_mut(to);
    if !decide::accepts(node.known, epoch) && !rules.is(Shortcut::AcceptOlder) {
        return None;
    }
    if epoch > node.known {
        (node.known, node.lead) = (epoch, None);
    }
    Some(leader)
}

fn compare(rules: &Rules, state: &mut State, from: u8, to: u8) -> Option<()> {
    let leader = reached(rules, state, from, to)?;
    let epoch = leader.lead.as_ref()?.epoch();
    let acknowledged = state.acknowledged.clone();
    let node = state.node_mut(to);
    if node.compared == epoch {
        return None;
    }
    node.compared = epoch;
    let mut broken = None;
    match decide::start(&node.epochs, &leader.epochs, CommitSeq(node.durable)) {
        Ok(Start::After(_)) if rules.is(Shortcut::NoTruncation) => {}
        Ok(Start::After(seq)) => {
            let dropped = &node.writes[seq.0 as usize..];
            broken = dropped
                .iter()
                .any(|w| acknowledged.contains(w) && leader.holds(&[*w].into()))
                .then_some("a record is cut that the leader holds");
            node.truncate_to(seq.0);
        }
        Ok(Start::Fetch) => broken = Some("nothing was given up, and the whole state is to be fetched"),
        Err(_) => broken = Some("a record is to be cut that is folded"),
    }
    state.broken = broken;
    take_at_once(rules, state, &leader, to)
}

fn take_at_once(rules: &Rules, state: &mut State, leader: &Node, to: u8) -> Option<()> {
    if rules.at_once {
        while take_next(rules, state, leader, to) {}
        let node = state.node_mut(to);
        node.synced = node.last();
    }
    Some(())
}

fn take_record(rules: &Rules, state: &mut State, from: u8, to: u8) -> Option<()> {
    let leader = reached(rules, state, from, to)?;
    let epoch = leader.lead.as_ref()?.epoch();
    if state.node(to).compared != epoch || !take_next(rules, state, &leader, to) {
        return None;
    }
    take_at_once(rules, state, &leader, to)
}

/// The record behind those that it has, and the leader's durable position.
fn take_next(rules: &Rules, state: &mut State, leader: &Node, to: u8) -> bool {
    let node = state.node_mut(to);
    let at = node.last();
    let next = leader.epochs.of(CommitSeq(at + 1)).filter(|epoch| *epoch >= node.epochs.last_epoch());
    if let Some(epoch) = next {
        node.push(epoch, leader.writes[at as usize]);
    }
    let durable = if rules.is(Shortcut::FoldSynced) { node.synced } else { leader.durable.min(node.synced) };
    let is_unreported = durable > node.durable;
    node.durable = durable.max(node.durable);
    next.is_some() || is_unreported
}

fn sync(state: &mut State, at: u8) -> Option<()> {
    let node = state.node_mut(at);
    node.synced = node.last();
    Some(())
}

fn kept(rules: &Rules, state: &mut State, from: u8, to: u8) -> Option<()> {
    let follower = state.node(from).clone();
    let lead = state.node_mut(to).lead.as_mut()?;
    let epoch = lead.epoch();
    let answers = follower.compared == epoch
        && (decide::accepts(epoch, follower.known) && follower.known == epoch
            || rules.is(Shortcut::AcceptOlder));
    let synced = if rules.is(Shortcut::KeptBeforeSync) { follower.last() } else { follower.synced };
    answers.then(|| lead.kept(from, epoch, CommitSeq(synced)).expect("it is the leader's own epoch"))
}

fn note_answer(rules: &Rules, state: &mut State, from: u8, to: u8) -> Option<()> {
    let epoch = state.node(to).lead.as_ref()?.epoch();
    if rules.is(Shortcut::AcceptOlder) || state.node(from).known != epoch {
        return None;
    }
    if !state.node(to).lead.as_ref()?.must_keep().any(|id| id == from) {
        return None; // no node waits for its promise
    }
    state.node_mut(from).promise.renew(NOW);
    state.node_mut(to).lead.as_mut()?.note_answer(from, epoch, NOW).ok()
}

/// Not before the right that it gave.
fn promise_ends(state: &mut State, at: u8) -> Option<()> {
    let relies = |lead: &Lead<u8>| lead.right_of(at).is_some_and(|until| NOW < until);
    if state.nodes.iter().filter_map(|n| n.lead.as_ref()).any(relies) {
        return None;
    }
    state.node_mut(at).promise = Promise::default();
    Some(())
}

fn acknowledge(rules: &Rules, state: &mut State, at: u8) -> Option<()> {
    let node = state.node(at);
    let lead = node.lead.as_ref()?;
    let promise = if rules.is(Shortcut::NoWait) { Promise::default() } else { node.promise };
    if !lead.may_acknowledge(&promise, NOW) {
        return None;
    }
    let mut upto = lead.kept_by_all().0.min(node.synced);
    if rules.is(Shortcut::Majority) {
        let mut kept: Vec<u64> = lead.must_keep().filter_map(|id| Some(lead.kept_by(id)?.0)).collect();
        kept.push(node.synced);
        kept.sort_unstable();
        upto = kept[(kept.len() - 1) / 2];
    }
    let new: Vec<u8> = node.writes[..upto as usize].to_vec();
    let folded = if rules.is(Shortcut::FoldSynced) { node.synced } else { upto };
    state.acknowledged.extend(new);
    let node = state.node_mut(at);
    node.durable = node.durable.max(folded);
    Some(())
}

fn report_caught_up(rules: &Rules, state: &mut State, at: u8, of: u8) -> Option<()> {
    let newest = state.group.epoch;
    let node = state.node_mut(at);
    let last = CommitSeq(node.last());
    let lead = node.lead.as_mut()?;
    if lead.epoch() != newest || lead.must_keep().any(|id| id == of) {
        return None;
    }
    let compared = lead.kept_by(of).is_some_and(|kept| kept >= last);
    let mut early = lead.clone();
    if rules.is(Shortcut::CaughtUpEarly) && compared {
        state.reported.insert((newest, of));
        return Some(());
    }
    let reported = early.report_caught_up(of, last);
    if rules.is(Shortcut::RightOfCurrentOnly) && reported {
        early.note_answer(of, newest, NOW).ok()?;
    }
    *lead = early;
    reported.then(|| {
        state.reported.insert((newest, of));
    })
}

fn learn(rules: &Rules, state: &mut State, at: u8) -> Option<()> {
    let group = state.group.clone();
    let node = state.node_mut(at);
    let again = rules.is(Shortcut::SameEpochAfterRestart) && node.lead.is_none();
    let known = if again { Epoch(node.known.0.saturating_sub(1)) } else { node.known };
    if group.epoch <= known {
        return None;
    }
    node.known = group.epoch;
    node.lead = decide::may_lead(&group, at, known).then(|| Lead::new(&group, at));
    Some(())
}

fn crash(rules: &Rules, state: &mut State, at: u8, loses: bool) -> Option<()> {
    state.crashes += 1;
    let node = state.node_mut(at);
    if loses {
        node.truncate_to(node.synced);
    } else if node.synced == node.last() {
        return None; // the same as to lose nothing
    }
    node.synced = node.last();
    node.lead = None;
    node.compared = Epoch(0);
    let forgets = rules.is(Shortcut::ForgetPromise);
    node.promise = if forgets { Promise::default() } else { Promise::at_start(NOW) };
    if rules.is(Shortcut::ForgetEpoch) {
        node.known = node.epochs.last_epoch();
    }
    Some(())
}

fn back(rules: &Rules, state: &mut State, id: u8) -> Option<()> {
    let group = Rc::make_mut(&mut state.group);
    if !group.back(id) {
        return None;
    }
    if rules.is(Shortcut::ReturnAsCurrent) && group.state(id) == Some(MemberState::Behind) {
        let member = group.members.iter_mut().find(|m| m.id == id)?;
        member.state = MemberState::Current;
    }
    Some(())
}

/// The leader after a restart, or any member that is current while there is no leader.
fn ask_to_lead(state: &mut State, id: u8) -> Option<()> {
    let node = state.node(id);
    let restarted = state.group.leader == Some(id) && node.lead.is_none() && node.known >= state.group.epoch;
    if !restarted && state.group.leader.is_some() {
        return None;
    }
    Rc::make_mut(&mut state.group).lead(id).is_ok().then_some(())
}
