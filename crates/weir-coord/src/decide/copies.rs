//! Transitions of a journal group: the nodes that keep copies of one journal, and which of them leads.
//!
//! The transitions are those of a placement group whose every member holds everything (k = 1).
//! Invariants:
//! - each change of members or leader raises the epoch by one, so an epoch has one leader for ever;
//! - the leader is current;
//! - a member that returns is current only if nothing can have been written without it.
//!
//! A record counts as durable when every current member keeps it, so any current member may become the
//! leader. Knows nothing of journals, nor of which nodes are alive.
use super::groups::{Place, catch_up, rejoin, set_place};
use std::fmt;
use weir_proto::map::MemberState;
use weir_proto::{Epoch, Error, Result};

/// A node that keeps a copy of the journal.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct JournalMember<I> {
    pub id: I,
    pub state: MemberState,
    /// The group's epoch when it was last current; the present epoch for a current one.
    pub since: Epoch,
}

/// The nodes that keep copies of one journal.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct JournalGroup<I> {
    pub epoch: Epoch,
    /// `None` while no member is current.
    pub leader: Option<I>,
    pub members: Vec<JournalMember<I>>,
}

impl<I: Copy + Eq + fmt::Display> Place for JournalMember<I> {
    type Id = I;
    fn id(&self) -> I {
        self.id
    }
    fn state(&self) -> MemberState {
        self.state
    }
    fn set_state(&mut self, state: MemberState) {
        self.state = state;
    }
    fn is_current_in(&mut self, epoch: Epoch) {
        self.since = epoch;
    }
}

impl<I: Copy + Eq + fmt::Display> JournalGroup<I> {
    /// A new group: all members are empty, so all are current.
    pub fn found(ids: &[I], leader: I) -> JournalGroup<I> {
        let epoch = Epoch(1);
        let member = |id: &I| JournalMember { id: *id, state: MemberState::Current, since: epoch };
        JournalGroup { epoch, leader: Some(leader), members: ids.iter().map(member).collect() }
    }

    pub fn state(&self, id: I) -> Option<MemberState> {
        self.members.iter().find(|m| m.id == id).map(|m| m.state)
    }

    pub fn is_current(&self, id: I) -> bool {
        self.state(id) == Some(MemberState::Current)
    }

    pub fn current(&self) -> impl Iterator<Item = I> {
        self.members.iter().filter(|m| m.state == MemberState::Current).map(|m| m.id)
    }

    /// The member cannot be reached. `leader` leads from now on; it must be current afterwards, and may be
    /// the present leader. Returns whether the group changed.
    pub fn down(&mut self, id: I, leader: Option<I>) -> Result<bool> {
        match self.state(id) {
            None => return Err(Error::invalid(format!("{id} keeps no copy of this journal"))),
            Some(MemberState::Down) => return Ok(false),
            Some(MemberState::Current | MemberState::Behind) => {}
        }
        let stays = self.leader.filter(|l| *l != id);
        let next = stays.or(leader);
        if let Some(next) = next.filter(|next| *next == id || !self.is_current(*next)) {
            return Err(Error::invalid(format!("{next} cannot lead: it does not hold every record")));
        }
        set_place(&mut self.members, &mut self.epoch, id, MemberState::Down);
        self.leader = next;
        Ok(true)
    }

    /// The member is reachable again. Returns whether the group changed.
    pub fn back(&mut self, id: I) -> bool {
        // Nothing can have been written in an epoch in which no member was current.
        let newest = self.members.iter().map(|m| m.since).max();
        let missed_nothing = self.members.iter().any(|m| m.id == id && Some(m.since) == newest);
        rejoin(&mut self.members, &mut self.epoch, id, missed_nothing)
    }

    /// The leader reports that a member which was behind holds everything, as of `epoch`. Returns whether it
    /// is new.
    pub fn caught_up(&mut self, id: I, epoch: Epoch) -> Result<bool> {
        let lacks = self.leader.is_none().then(|| "the journal has no leader".to_owned());
        catch_up(&mut self.members, &mut self.epoch, &"the journal's group", id, epoch, lacks)
    }

    /// A current member becomes the leader under a new epoch: the present leader after a restart, or another
    /// one.
    pub fn lead(&mut self, id: I) -> Result<Epoch> {
        if !self.is_current(id) {
            return Err(Error::denied(format!("{id} cannot lead: it may lack records of the journal")));
        }
        set_place(&mut self.members, &mut self.epoch, id, MemberState::Current);
        self.leader = Some(id);
        Ok(self.epoch)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use weir_proto::ErrorKind;
    use weir_proto::map::MemberState::{Behind, Current, Down};

    fn states(group: &JournalGroup<u8>) -> Vec<MemberState> {
        group.members.iter().map(|m| m.state).collect()
    }

    #[test]
    fn a_copy_that_led_alone_is_required_again() {
        let mut group = JournalGroup::found(&[0, 1, 2], 0);
        assert_eq!(group.down(0, Some(1)), Ok(true));
        assert_eq!((group.leader, group.epoch), (Some(1), Epoch(2)));
        assert_eq!(group.down(2, None), Ok(true));
        assert_eq!(group.down(1, None), Ok(true));
        assert_eq!((group.leader, states(&group)), (None, vec![Down, Down, Down]));
        assert!(group.back(0) && group.back(2));
        assert_eq!(states(&group), [Behind, Down, Behind], "1 may have continued alone");
        assert_eq!(group.lead(0).unwrap_err().kind, ErrorKind::Denied);
        assert_eq!(group.caught_up(0, group.epoch).unwrap_err().kind, ErrorKind::Unavailable);
        assert!(group.back(1));
        assert_eq!(group.lead(1), Ok(group.epoch));
        assert_eq!(group.caught_up(0, Epoch(3)).unwrap_err().kind, ErrorKind::Stale);
        assert_eq!(group.caught_up(0, group.epoch), Ok(true));
        assert_eq!(states(&group), [Current, Current, Behind]);
    }

    #[test]
    fn all_that_left_together_return_together() {
        let mut group = JournalGroup::found(&[0, 1], 0);
        assert_eq!(group.down(0, Some(1)), Ok(true));
        assert_eq!(group.down(0, None), Ok(false), "no news");
        assert!(group.back(0));
        assert_eq!(states(&group), [Behind, Current]);
        assert_eq!(group.down(1, Some(0)).unwrap_err().kind, ErrorKind::Invalid, "0 lacks records");
        assert_eq!(group.down(7, None).unwrap_err().kind, ErrorKind::Invalid);
    }

    #[test]
    fn an_epoch_has_one_leader() {
        let mut group = JournalGroup::found(&[0, 1], 0);
        let mut led = vec![(group.epoch, group.leader)];
        let mut note = |group: &JournalGroup<u8>| led.push((group.epoch, group.leader));
        group.lead(1).unwrap();
        note(&group);
        group.lead(1).unwrap();
        note(&group);
        group.down(1, Some(0)).unwrap();
        note(&group);
        group.back(1);
        note(&group);
        group.caught_up(1, group.epoch).unwrap();
        note(&group);
        assert_eq!(led.iter().map(|(e, _)| e.0).collect::<Vec<_>>(), [1, 2, 3, 4, 5, 6]);
    }
}
