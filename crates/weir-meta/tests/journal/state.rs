//! A state of the model: the map's journal group in all its versions, what each member holds and knows, and
//! what has been acknowledged. Journals are real [`Epochs`]; a record is its number and the write it holds.
use super::steps::{Rules, Shortcut, Step};
use std::collections::BTreeSet;
use std::rc::Rc;
use weir_coord::decide::JournalGroup;
use weir_env::Instant;
use weir_kv::CommitSeq;
use weir_kv::epochs::Epochs;
use weir_meta::copies::decide::{Lead, Promise};
use weir_proto::Epoch;

/// Time stands still in the model: that a word runs out is a step.
pub const NOW: Instant = Instant(0);

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Node {
    /// The newest epoch it knows, durably.
    pub known: Epoch,
    pub lead: Option<Lead<u8>>,
    /// Which write each record holds, and the epoch of each.
    pub writes: Vec<u8>,
    pub epochs: Epochs,
    /// The number of records on its disk.
    pub synced: u64,
    /// The newest record that it knows to be durable everywhere: it may be folded into the tree.
    pub durable: u64,
    /// Under this epoch it compared its records with the leader's.
    pub compared: Epoch,
    pub promise: Promise,
}

impl Node {
    pub fn last(&self) -> u64 {
        self.writes.len() as u64
    }

    pub fn push(&mut self, epoch: Epoch, write: u8) {
        self.epochs.push(epoch);
        self.writes.push(write);
    }

    pub fn truncate_to(&mut self, to: u64) {
        self.epochs.truncate_to(CommitSeq(to));
        self.writes.truncate(to as usize);
        self.synced = self.synced.min(to);
    }

    pub fn holds(&self, acknowledged: &BTreeSet<u8>) -> bool {
        acknowledged.iter().all(|w| self.writes.contains(w))
    }

    pub fn has_synced(&self, acknowledged: &BTreeSet<u8>) -> bool {
        acknowledged.iter().all(|w| self.writes[..self.synced as usize].contains(w))
    }
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct State {
    /// The map's group in its newest version. Members know older ones by what they made of them.
    pub group: Rc<JournalGroup<u8>>,
    pub nodes: Vec<Rc<Node>>,
    /// The leader of an epoch reported to the coordinator that a member caught up.
    pub reported: BTreeSet<(Epoch, u8)>,
    pub acknowledged: BTreeSet<u8>,
    /// The number of writes that were made.
    pub writes: u8,
    pub crashes: u8,
    /// A step did what must never happen.
    pub broken: Option<&'static str>,
}

impl super::search::Model for State {
    type Step = Step;
    type Rules = Rules;
    type Shortcut = Shortcut;

    fn start(rules: &Rules) -> State {
        let ids: Vec<u8> = (0..rules.copies).collect();
        let node = Node {
            known: Epoch(0),
            lead: None,
            writes: vec![],
            epochs: Epochs::default(),
            synced: 0,
            durable: 0,
            compared: Epoch(0),
            promise: Promise::default(),
        };
        State {
            group: Rc::new(JournalGroup::found(&ids, 0)),
            nodes: ids.iter().map(|_| Rc::new(node.clone())).collect(),
            reported: BTreeSet::new(),
            acknowledged: BTreeSet::new(),
            writes: 0,
            crashes: 0,
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
        let acknowledged = &self.acknowledged;
        if let Some(id) = self.group.current().find(|id| !self.node(*id).has_synced(acknowledged)) {
            return Some(format!(
                "{acknowledged:?} are acknowledged, and {id}, which is current, lacks some"
            ));
        }
        let answers = |n: &&Rc<Node>| n.lead.as_ref().is_some_and(|lead| lead.may_answer(NOW));
        let stale = self.nodes.iter().filter(answers).find(|n| !n.holds(acknowledged));
        stale.map(|n| {
            format!("{acknowledged:?} are acknowledged, and the leader of {} answers without", n.known)
        })
    }
}

impl State {
    pub fn node(&self, id: u8) -> &Node {
        &self.nodes[usize::from(id)]
    }

    pub fn node_mut(&mut self, id: u8) -> &mut Node {
        Rc::make_mut(&mut self.nodes[usize::from(id)])
    }
}
