//! What can happen next, and what it does.
use super::state::{
    CLIENTS, Client, Flight, Id, KeptChange, Kind, Leader, Pending, Record, Reply, State, session,
};
use std::rc::Rc;
use weir_client::kept::Commit;
use weir_kv::CommitSeq;
use weir_meta::unsettled::{Changed, Unsettled};

/// How much is searched.
#[derive(Clone, Copy, Debug)]
pub struct Rules {
    pub keys: u8,
    /// Requests of each client.
    pub requests: [u8; CLIENTS as usize],
    /// Crashes of the leader. Another leader beside a deposed one counts as one.
    pub crashes: u8,
    /// Connections that break.
    pub breaks: u8,
    /// Requests of a client at the same time.
    pub slots: u8,
    pub shortcut: Option<Shortcut>,
}

/// A tempting simplification. Each breaks a promise.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Shortcut {
    /// Answers wait for no changes of other sessions.
    NoShare,
    /// A change waits for what it reads, and not for what it overwrites.
    BlindOverwrite,
    /// A session never waits for its own changes, not even for those whose answers wait.
    OwnAtOnce,
    /// Answers to a session leave in any order.
    AnswersOvertake,
    /// A broken connection changes nothing at the leader.
    ForgetMoved,
    /// A new leader does not wait for sessions that have not returned.
    NoGrace,
    /// New requests of a session may go before what it kept.
    NewBeforeKept,
    /// A change that is made again gets the next number.
    NewNumber,
    /// A new leader continues with the numbers that follow the durable ones.
    NumbersOfTheTail,
    /// A change that was lost is sent again as a new one, and the old one, too.
    NumberReused,
    /// A sync does not wait for what is kept.
    SyncForgets,
    /// Clients take the commit numbers of all leaders for the same.
    TermsConfused,
    /// A leader that was deposed answers on.
    DeposedAnswers,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Step {
    /// A request reaches the leader, which carries it out at once.
    Do {
        client: u8,
        slot: u8,
        kind: Kind,
        key: u8,
    },
    /// A request whose answer is lost is sent again.
    Resend {
        client: u8,
        slot: u8,
    },
    Answer {
        client: u8,
        slot: u8,
    },
    /// The connection breaks, and answers in flight get lost.
    Break {
        client: u8,
    },
    /// The journal's next record is durable.
    Flush,
    Crash,
    /// Another leader, while the former one lives.
    Depose,
    /// A client connects to the leader.
    Connect {
        client: u8,
    },
    MakeAgain {
        client: u8,
    },
    /// The leader waits no more.
    Expire {
        client: u8,
    },
    Sync {
        client: u8,
    },
    Die {
        client: u8,
    },
}

impl Rules {
    fn is(&self, shortcut: Shortcut) -> bool {
        self.shortcut == Some(shortcut)
    }
    /// A leader's term as clients understand it.
    fn term(&self, leader: &Leader) -> u64 {
        if self.is(Shortcut::TermsConfused) { 1 } else { leader.term }
    }
}

/// Every step that may be possible.
pub fn steps(rules: &Rules, state: &State) -> Vec<Step> {
    let mut all = vec![Step::Flush];
    for client in 0..CLIENTS {
        for slot in 0..rules.slots {
            for key in 0..rules.keys {
                all.extend([Kind::Set, Kind::Read].map(|kind| Step::Do { client, slot, kind, key }));
            }
            all.extend([Step::Resend { client, slot }, Step::Answer { client, slot }]);
        }
        all.extend([Step::Connect { client }, Step::MakeAgain { client }]);
        all.push(Step::Sync { client });
        if state.breaks < rules.breaks {
            all.push(Step::Break { client });
        }
    }
    // One client is enough: they are alike.
    all.extend([Step::Expire { client: 0 }, Step::Die { client: 0 }]);
    if state.crashes < rules.crashes {
        all.extend([Step::Crash, Step::Depose]);
    }
    all
}

/// The state after a step; `None`: it is not possible, or changes nothing.
pub fn take(rules: &Rules, before: &State, step: Step) -> Option<State> {
    let mut state = before.clone();
    match step {
        Step::Do { client, slot, kind, key } => ask(rules, &mut state, client, slot, kind, key),
        Step::Resend { client, slot } => resend(rules, &mut state, client, slot),
        Step::Answer { client, slot } => answer(rules, &mut state, client, slot),
        Step::Break { client } => lose_connection(rules, &mut state, client),
        Step::Flush => flush(&mut state),
        Step::Crash => next_leader(rules, &mut state, false),
        Step::Depose => next_leader(rules, &mut state, true),
        Step::Connect { client } => connect(rules, &mut state, client),
        Step::MakeAgain { client } => make_again(rules, &mut state, client),
        Step::Expire { client } => {
            let term = state.leader.term;
            let client = alive(&mut state, client)?;
            let is_awaited = term > 1 && !(client.returned && client.at == term);
            (is_awaited && client.has_something()).then(|| client.expired = true)
        }
        Step::Sync { client } => sync(rules, &mut state, client),
        Step::Die { client } => {
            let client = alive(&mut state, client).filter(|client| client.has_something())?;
            client.is_alive = false;
            client.flights.fill(None);
            client.kept.take_all();
            Some(())
        }
    }?;
    (state != *before).then_some(state)
}

fn alive(state: &mut State, client: u8) -> Option<&mut Client> {
    let client = Rc::make_mut(&mut state.clients[usize::from(client)]);
    client.is_alive.then_some(client)
}

/// A living client that is connected to the leader.
fn connected(state: &mut State, client: u8) -> Option<&mut Client> {
    let term = state.leader.term;
    alive(state, client).filter(|client| client.at == term && !client.expired)
}

fn durable(rules: &Rules, leader: &Leader) -> Commit {
    Commit { term: rules.term(leader), seq: leader.durable as u64 }
}

/// Whether the leader may carry out new requests of a client about a key: the client has returned, and so have
/// all others that may have kept a change of it.
fn may_ask(rules: &Rules, state: &State, client: u8, key: u8) -> bool {
    let term = state.leader.term;
    let is_here = |c: &Client| c.returned && c.at == term;
    let me = &state.clients[usize::from(client)];
    let others_are_here =
        state.clients.iter().all(|c| !c.is_alive || c.expired || is_here(c) || !c.used[usize::from(key)]);
    me.is_alive && !me.expired && is_here(me) && (others_are_here || rules.is(Shortcut::NoGrace))
}

fn ask(rules: &Rules, state: &mut State, client: u8, slot: u8, kind: Kind, key: u8) -> Option<()> {
    if !may_ask(rules, state, client, key) {
        return None;
    }
    let me = alive(state, client)?;
    let place = usize::from(slot);
    if me.flights[place].is_some() || me.requests_left == 0 {
        return None;
    }
    me.requests_left -= 1;
    me.used[usize::from(key)] |= kind == Kind::Set;
    me.numbers[place] += 1;
    let flight = Flight { kind, key, number: me.numbers[place], after: me.answered.len(), pending: None };
    me.flights[place] = Some(flight);
    resend(rules, state, client, slot)
}

/// The leader carries a request out, if it has not done so before.
fn resend(rules: &Rules, state: &mut State, client: u8, slot: u8) -> Option<()> {
    let flight = state.clients[usize::from(client)].flights[usize::from(slot)].clone()?;
    if flight.pending.is_some() || !may_ask(rules, state, client, flight.key) {
        return None;
    }
    let id = Id { client, slot, number: flight.number };
    let leader = &mut state.leader;
    let mut pending = match flight.kind {
        Kind::Read => {
            let wait = wait(rules, &leader.unsettled, client, flight.key);
            let reply = Reply { before: leader.last_of(flight.key), given: 0 };
            Pending { seq: 0, wait, order: 0, reply }
        }
        Kind::Set => match leader.position(id).filter(|_| !rules.is(Shortcut::NumberReused)) {
            // The changes that it depended on are not known any more.
            Some(at) => {
                let newest = leader.log.len() as u64;
                Pending { seq: at as u64 + 1, wait: newest, order: 0, reply: leader.log[at].reply }
            }
            None => change(rules, leader, id, flight.key, flight.after, None),
        },
    };
    let me = alive(state, client)?;
    let earlier = me.flights.iter().flatten().filter_map(|flight| flight.pending.as_ref());
    pending.order = earlier.map(|pending| pending.order + 1).max().unwrap_or(0);
    me.flights[usize::from(slot)].as_mut()?.pending = Some(pending);
    Some(())
}

fn wait(rules: &Rules, unsettled: &Unsettled, client: u8, key: u8) -> u64 {
    if rules.is(Shortcut::NoShare) {
        return 0;
    }
    let wait = unsettled.wait_for_key(session(client), &[key]);
    let at_once = Unsettled::default().wait_for_key(session(client), &[key]);
    let is_own = unsettled.is_of(session(client), &[key]);
    if rules.is(Shortcut::OwnAtOnce) && is_own { at_once.0 } else { wait.0 }
}

/// A change, with the given number if it is made again.
fn change(rules: &Rules, leader: &mut Leader, id: Id, key: u8, after: usize, again: Option<u64>) -> Pending {
    let wait = match rules.is(Shortcut::BlindOverwrite) {
        true => 0,
        false => wait(rules, &leader.unsettled, id.client, key),
    };
    let given = again.filter(|_| !rules.is(Shortcut::NewNumber)).unwrap_or(leader.next);
    leader.next = leader.next.max(given + 1);
    let reply = Reply { before: leader.last_of(key), given };
    leader.log.push(Record { key, id, reply, after });
    let seq = leader.log.len() as u64;
    let keys = [(vec![key], Changed::Set)];
    leader.unsettled.note(session(id.client), CommitSeq(seq), CommitSeq(wait), keys);
    Pending { seq, wait, order: 0, reply }
}

fn answer(rules: &Rules, state: &mut State, client: u8, slot: u8) -> Option<()> {
    let me = state.clients[usize::from(client)].clone();
    let Flight { kind, key, number, after, pending } = me.flights[usize::from(slot)].clone()?;
    let Pending { seq, wait, order, reply } = pending?;
    // The leader sends in the order of the commits that answers wait for, and a connection keeps the order.
    let mut others = me.flights.iter().flatten().filter_map(|flight| flight.pending.as_ref());
    if others.any(|p| (p.wait, p.order) < (wait, order)) && !rules.is(Shortcut::AnswersOvertake) {
        return None;
    }
    let deposed = state.deposed.clone().filter(|old| old.term == me.at);
    let leader = match &deposed {
        Some(old) if rules.is(Shortcut::DeposedAnswers) => &**old,
        Some(_) => return None,
        None => &state.leader,
    };
    if leader.term != me.at || (leader.durable as u64) < wait {
        return None;
    }
    let (durable, commit) = (durable(rules, leader), Commit { term: rules.term(leader), seq });
    if me.expired {
        state.broken = Some("W6: it is answered, although its session is over");
    }
    let others = reply.before.filter(|before| before.client != client);
    state.seen.extend(others);
    let id = Id { client, slot, number };
    let me = alive(state, client)?;
    me.flights[usize::from(slot)] = None;
    if kind == Kind::Set {
        me.answered.push(id);
        me.kept.keep(commit, KeptChange { key, id, reply, after });
    }
    me.kept.durable(durable);
    Some(())
}

fn lose_connection(rules: &Rules, state: &mut State, client: u8) -> Option<()> {
    state.breaks += 1;
    let me = connected(state, client)?;
    if me.flights.iter().flatten().all(|flight| flight.pending.is_none()) {
        return None;
    }
    me.flights.iter_mut().flatten().for_each(|flight| flight.pending = None);
    if !rules.is(Shortcut::ForgetMoved) {
        state.leader.unsettled.moved(session(client));
    }
    Some(())
}

fn flush(state: &mut State) -> Option<()> {
    let leader = &mut state.leader;
    if leader.durable == leader.log.len() {
        return None;
    }
    leader.durable += 1;
    leader.unsettled.forget_to(CommitSeq(leader.durable as u64));
    Some(())
}

/// Numbers that a new leader leaves out: more than the lost tail can have given.
const LEFT_OUT: u64 = 100;

/// A leader that starts with what is durable, after a crash of the former one or beside it.
fn next_leader(rules: &Rules, state: &mut State, lives: bool) -> Option<()> {
    state.crashes += 1;
    let old = state.leader.clone();
    let leader = &mut state.leader;
    leader.term += 1;
    leader.log.truncate(leader.durable);
    leader.unsettled = Unsettled::default();
    let given = leader.log.iter().map(|record| record.reply.given).max().unwrap_or(0);
    let left_out = if rules.is(Shortcut::NumbersOfTheTail) { 0 } else { LEFT_OUT * (leader.term - 1) };
    leader.next = given % LEFT_OUT + 1 + left_out;
    state.deposed = lives.then(|| Rc::new(old));
    for client in &mut state.clients {
        let client = Rc::make_mut(client);
        client.returned = false;
        if !lives {
            client.flights.iter_mut().flatten().for_each(|flight| flight.pending = None);
        }
    }
    Some(())
}

fn connect(rules: &Rules, state: &mut State, client: u8) -> Option<()> {
    let (term, shown) = (state.leader.term, rules.term(&state.leader));
    let me = alive(state, client)?;
    if me.at == term {
        return None;
    }
    me.at = term;
    me.flights.iter_mut().flatten().for_each(|flight| flight.pending = None);
    if me.expired {
        // It learns that, and names what is lost.
        me.kept.take_all();
        me.flights.fill(None);
        return Some(());
    }
    me.kept.led_by(shown);
    me.return_if_complete(rules);
    Some(())
}

impl Client {
    /// A client that has nothing can be left out: nothing changes without it.
    fn has_something(&self) -> bool {
        !self.kept.is_empty() || self.flights.iter().any(Option::is_some)
    }

    /// The leader knows that this was all that the client kept.
    fn return_if_complete(&mut self, rules: &Rules) {
        self.returned |= self.kept.to_make_again().is_none() || rules.is(Shortcut::NewBeforeKept);
    }
}

fn make_again(rules: &Rules, state: &mut State, client: u8) -> Option<()> {
    let KeptChange { key, id, reply, after } = connected(state, client)?.kept.to_make_again()?.clone();
    let leader = &mut state.leader;
    let seq = match leader.position(id) {
        Some(_) => leader.log.len() as u64,
        None => {
            let made = change(rules, leader, id, key, after, Some(reply.given));
            if made.reply != reply {
                state.broken = Some("W4: it is made again with another result");
            } else if made.wait > leader.durable as u64 {
                state.broken = Some("W4: it depends on a change of another session");
            }
            made.seq
        }
    };
    let commit = Commit { term: rules.term(&state.leader), seq };
    let me = connected(state, client)?;
    me.kept.made_again(commit);
    me.return_if_complete(rules);
    Some(())
}

fn sync(rules: &Rules, state: &mut State, client: u8) -> Option<()> {
    let durable = durable(rules, &state.leader);
    let me = connected(state, client)?;
    me.kept.durable(durable);
    if !me.returned || (!me.kept.is_empty() && !rules.is(Shortcut::SyncForgets)) {
        return None;
    }
    let answered = me.answered.clone();
    state.synced.extend(answered);
    Some(())
}
