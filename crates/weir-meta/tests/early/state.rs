//! A state of the model: the leader's journal, what each client waits for and keeps, and what was promised.
use super::steps::{Rules, Shortcut, Step};
use std::collections::BTreeSet;
use std::rc::Rc;
use weir_client::kept::Kept;
use weir_meta::unsettled::Unsettled;
use weir_proto::SessionId;

/// Two, so that a change of one is seen by the other.
pub const CLIENTS: u8 = 2;

/// The identity of a change: it must happen once.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Id {
    pub client: u8,
    pub slot: u8,
    pub number: u8,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Reply {
    /// The change that the key had before.
    pub before: Option<Id>,
    /// A number that the leader gave, like that of a new inode.
    pub given: u64,
}

/// A record of the journal.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Record {
    pub key: u8,
    pub id: Id,
    pub reply: Reply,
    /// The number of answers that its client had when it sent the change.
    pub after: usize,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Leader {
    pub term: u64,
    pub log: Vec<Record>,
    pub durable: usize,
    pub next: u64,
    pub unsettled: Unsettled,
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum Kind {
    Set,
    Read,
}

/// An answer that the leader has, and has not sent.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Pending {
    pub seq: u64,
    pub wait: u64,
    /// Among the answers to its session that have not been sent.
    pub order: u8,
    pub reply: Reply,
}

/// A request without an answer.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Flight {
    pub kind: Kind,
    pub key: u8,
    pub number: u8,
    pub after: usize,
    pub pending: Option<Pending>,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct KeptChange {
    pub key: u8,
    pub id: Id,
    pub reply: Reply,
    pub after: usize,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Client {
    pub is_alive: bool,
    /// The leader that it is connected to.
    pub at: u64,
    /// That leader has all that it kept.
    pub returned: bool,
    /// A leader waits for it no more.
    pub expired: bool,
    pub kept: Kept<KeptChange>,
    pub flights: Vec<Option<Flight>>,
    pub numbers: Vec<u8>,
    pub requests_left: u8,
    /// Keys that it may have changed: a new leader finds that recorded.
    pub used: Vec<bool>,
    /// Changes that were answered, in that order.
    pub answered: Vec<Id>,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct State {
    pub leader: Leader,
    /// A deposed one that does not know it.
    pub deposed: Option<Rc<Leader>>,
    pub clients: Vec<Rc<Client>>,
    pub crashes: u8,
    pub breaks: u8,
    /// By their own sessions.
    pub synced: BTreeSet<Id>,
    /// By others.
    pub seen: BTreeSet<Id>,
    pub broken: Option<&'static str>,
}

pub fn session(client: u8) -> SessionId {
    SessionId(u64::from(client) + 1)
}

impl Leader {
    pub fn position(&self, id: Id) -> Option<usize> {
        self.log.iter().position(|record| record.id == id)
    }
    pub fn last_of(&self, key: u8) -> Option<Id> {
        self.log.iter().rev().find(|record| record.key == key).map(|record| record.id)
    }
}

impl super::search::Model for State {
    type Step = Step;
    type Rules = Rules;
    type Shortcut = Shortcut;

    fn start(rules: &Rules) -> State {
        let mut kept = Kept::default();
        kept.led_by(1);
        let client = Client {
            is_alive: true,
            at: 1,
            returned: true,
            expired: false,
            kept,
            flights: vec![None; rules.slots.into()],
            numbers: vec![0; rules.slots.into()],
            requests_left: 0,
            used: vec![false; rules.keys.into()],
            answered: vec![],
        };
        State {
            leader: Leader { term: 1, log: vec![], durable: 0, next: 1, unsettled: Unsettled::default() },
            deposed: None,
            clients: rules
                .requests
                .map(|requests_left| Rc::new(Client { requests_left, ..client.clone() }))
                .into(),
            crashes: 0,
            breaks: 0,
            synced: BTreeSet::new(),
            seen: BTreeSet::new(),
            broken: None,
        }
    }

    fn steps(&self, rules: &Rules) -> Vec<Step> {
        super::steps::steps(rules, self)
    }
    fn take(&self, rules: &Rules, step: Step) -> Option<State> {
        super::steps::take(rules, self, step)
    }
    fn shortened(rules: &Rules, shortcut: Shortcut) -> Rules {
        Rules { shortcut: Some(shortcut), ..*rules }
    }

    fn problem(&self) -> Option<String> {
        if let Some(what) = self.broken {
            return Some(what.to_owned());
        }
        let leader = &self.leader;
        let is_durable = |id: &Id| leader.position(*id).is_some_and(|at| at < leader.durable);
        if let Some(id) = self.seen.iter().find(|id| !is_durable(id)) {
            return Some(format!("W1: another session has seen {id:?}, which is not durable"));
        }
        if let Some(id) = self.synced.iter().find(|id| !is_durable(id)) {
            return Some(format!("W2: {id:?} is synced, and not durable"));
        }
        for (at, record) in leader.log.iter().enumerate() {
            let earlier = &leader.log[..at];
            if earlier.iter().any(|other| other.id == record.id) {
                return Some(format!("W3: {:?} is made twice", record.id));
            }
            if earlier.iter().any(|other| other.reply.given == record.reply.given) {
                return Some(format!("W3: the number {} is given twice", record.reply.given));
            }
        }
        self.clients.iter().find_map(|client| self.problem_of(client))
    }
}

impl State {
    fn problem_of(&self, client: &Client) -> Option<String> {
        if !client.is_alive || client.expired {
            return None;
        }
        let kept = client.kept.all().map(|change| change.id).collect::<BTreeSet<_>>();
        for (at, id) in client.answered.iter().enumerate() {
            let position = self.leader.position(*id);
            if position.is_none() && !kept.contains(id) {
                return Some(format!("W5: {id:?} is answered, and neither at the leader nor kept"));
            }
            let mine = |record: &&Record| record.id.client == id.client && record.after > at;
            let mut later = self.leader.log.iter().enumerate().filter(|(_, record)| mine(record));
            if let Some((_, record)) = later.find(|(n, _)| position.is_none_or(|position| *n < position)) {
                return Some(format!("W5: {:?} is made before {id:?}, which was answered first", record.id));
            }
        }
        None
    }
}
