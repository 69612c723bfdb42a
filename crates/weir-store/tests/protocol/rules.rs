//! A configuration of the search: the number of targets, writes, crashes and seals, and how the stripe is
//! written whole; and the wrong shortcuts.
use super::state::*;
use super::whole::{FIRST, Stage, Whole};
use std::sync::Arc;
use weir_proto::ec::Coder;
use weir_proto::map::{ClusterMap, Group, Member, MemberState, Scheme, Settings, TargetState};
use weir_proto::version::LEVEL_MAX;
use weir_proto::{ClusterId, DiskUuid, Epoch, NodeId};
use weir_store::cells;

/// One byte that a client writes.
#[derive(Clone, Copy, Debug)]
pub struct Planned {
    pub cell: usize,
    pub offset: usize,
    pub byte: u8,
    /// Written after the file was cut, under the cut's token epoch.
    pub after_truncation: bool,
}

/// A tempting simplification. Each loses bytes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Shortcut {
    /// An overlay is acknowledged when its sequencer has it.
    AcknowledgeBeforeMirrors,
    /// Data targets commit what they folded before all parity targets have prepared theirs.
    CommitBeforeParity,
    /// A mirror takes what comes under any epoch.
    EpochNotChecked,
    /// A member that returns is current at once.
    ReturnAsCurrent,
    /// A sequencer that was away meanwhile continues with the number that it assigned before. (Found here.)
    NumberKept,
    /// A member that returns catches up while a seal that it took no part in is in doubt. (Found here.)
    RepairInDoubt,
    /// A seal in doubt is committed although a current member does not answer. (Found here.)
    SilentIsGone,
    /// A member catches up with fewer current ones than k. (Found by the simulator.)
    CaughtUpWithFew,
    /// A member that returns does not ask for the cuts that it missed.
    TruncationsNotLearned,
    /// A member with a fragment of a stripe that is being written keeps it, as long as the same members are
    /// missing. (Found by the simulator.)
    SameMembersSameFragments,
    /// An overlay is acknowledged with fewer current members than k. (Found here.)
    AcknowledgedByFew,
    /// A stripe is committed member by member, also if the map changes meanwhile. (Found here.)
    CommittedUnderAnyEpoch,
    /// A member that returns keeps versions that a writer prepared there, though no other member has them any
    /// more. (Found here.)
    AbortedStays,
    /// A client that decides about a dead writer's stripe is not stopped when another one begins to. (Found
    /// here.)
    DecidedByTwo,
    /// Members that logged an overlay under an earlier epoch do not learn which members went
    /// missing since. (Found here.)
    MissingNotReported,
    /// A seal's version is above any that it sees, also a writer's. (Found here.)
    SealAboveWriters,
    /// A member that returns compares no log of a cell that was written since. (Found here.)
    LogsOfOlderCells,
    /// A member that gets the list of missing members again does not report that it has no fragment any more.
    /// (Found by the simulator.)
    ForgottenIsMarked,
    /// A newcomer is current as soon as it has all listed cells, as one that returns: but seals continued
    /// meanwhile. (Found here.)
    FilledIsCurrent,
    /// A newcomer reports that it has all before it has listed anything.
    FilledEarly,
    /// A newcomer does not take over the fences of its group's files.
    FencesNotTaken,
    /// A newcomer counts as current up to the epoch in which the member was whose place it took.
    NewcomerIsReturned,
    /// A client counts a member's commit for a later holder of its place. (Found here.)
    CommittedByPlace,
    /// Seals continue until a newcomer is current, also while it lists for the last time.
    SealsNeverWait,
    /// A target that takes a place copies it before the member has closed it.
    CopiedBeforeClose,
    /// The member continues to accept changes of a place that moves.
    NeverClosed,
    /// With an epoch that is closed, and the one after it, all members count as current since then. (Found
    /// here.)
    CurrentSinceClosed,
    /// Cells copied in one epoch count in a later one.
    CopyOfEarlierEpoch,
    /// A target that takes a place copies the cells, not the fences.
    FencesNotCopied,
    /// A target that takes a place copies the stripe's own cell, not the logs that the member keeps for
    /// others.
    LogsNotCopied,
    /// A member that has done its part of a seal takes any that is committed under that version for the same.
    /// (Found by the simulator.)
    LatePartCounts,
}

/// How a client writes the stripe whole, once.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mode {
    /// Where nothing is.
    Fresh,
    /// Over existing bytes.
    Over,
}
impl Mode {
    fn begins(self) -> Stage {
        match self {
            Mode::Fresh => Stage::Send,
            Mode::Over => Stage::Waiting,
        }
    }
}

#[derive(Clone)]
pub struct Rules {
    pub scheme: Scheme,
    pub planned: Vec<Planned>,
    pub crashes: u8,
    pub suspicions: u8,
    pub seals: u8,
    pub truncation: bool,
    pub whole: Option<Mode>,
    /// Its writer may die, and another client recovers the file.
    pub dies: bool,
    /// A dead writer sends its last messages again, under the newest map: it was stopped, not dead.
    pub wakes: bool,
    /// Lost targets whose places others take.
    pub replacements: u8,
    /// Places that move to another target.
    pub moves: u8,
    pub shortcut: Option<Shortcut>,
    pub coder: Coder,
}

/// The initial bytes of each data cell.
pub const INITIAL: Content = [101, 102];
/// The bytes with which the stripe is written over.
pub const OVER: Content = [111, 112];
pub const TOKEN: u32 = 1;
pub const TRUNCATION_TOKEN: u32 = 2;

impl Rules {
    /// `planned`: cell, offset and byte of each write.
    pub fn new(data: u8, parity: u8, planned: &[(usize, usize, u8)]) -> Rules {
        let scheme = Scheme { data, parity };
        let planned = planned
            .iter()
            .map(|&(cell, offset, byte)| Planned { cell, offset, byte, after_truncation: false })
            .collect();
        let coder = Coder::new(scheme).expect("a scheme");
        Rules {
            scheme,
            planned,
            crashes: 0,
            suspicions: 0,
            seals: 0,
            truncation: false,
            whole: None,
            dies: false,
            wakes: false,
            replacements: 0,
            moves: 0,
            shortcut: None,
            coder,
        }
    }
    pub fn has(&self, shortcut: Shortcut) -> bool {
        self.shortcut == Some(shortcut)
    }
    pub fn data(&self) -> usize {
        usize::from(self.scheme.data)
    }
    pub fn width(&self) -> usize {
        self.scheme.width()
    }
    /// The parity cells of these data cells.
    pub fn encode(&self, data: &[Content]) -> Vec<Content> {
        let mut parity = vec![[0; 2]; usize::from(self.scheme.parity)];
        let inputs: Vec<&[u8]> = data.iter().map(|d| &d[..]).collect();
        let mut outputs: Vec<&mut [u8]> = parity.iter_mut().map(|p| &mut p[..]).collect();
        self.coder.encode(&inputs, &mut outputs).expect("cells of one length");
        parity
    }

    /// All cells of a stripe whose data cells hold this.
    pub fn stripe_of(&self, content: Content) -> Vec<Content> {
        let data = vec![content; self.data()];
        data.iter().copied().chain(self.encode(&data)).collect()
    }

    /// All members are up, and the stripe was written whole, or is about to be.
    pub fn start(&self) -> State {
        let width = self.width();
        let view = View(Arc::new(self.map()));
        let bytes = self.stripe_of(INITIAL);
        let target = |position: usize| {
            let empty = Arc::new(Index::default());
            let mut target = Target {
                up: true,
                index: empty.clone(),
                durable: empty,
                view: view.clone(),
                repair: Repair::No,
                replaced: Epoch(0),
                moved: false,
            };
            let first = fragment(FIRST, Epoch(1), false, 0, bytes[position]);
            let made = target.change(|txn, delta| {
                cells::check_epoch(txn, GROUP, Epoch(1))?;
                if self.whole == Some(Mode::Fresh) {
                    return Ok(());
                }
                cells::fresh(txn, &view.scope(), cell(position), first.clone(), delta)
            });
            assert!(made);
            target
        };
        let waiting = Write {
            progress: Progress::Waiting,
            after: 0,
            after_truncation: false,
            acting: Vec::new(),
            reported: 0,
        };
        State {
            targets: (0..width).map(target).collect(),
            writes: vec![waiting; self.planned.len()],
            seals: Vec::new(),
            whole: self.whole.map(|mode| Whole::new(view.clone(), width, mode.begins())),
            truncation: TruncationState::No,
            truncation_reported: 0,
            truncation_acting: None,
            crashes_left: self.crashes,
            suspicions_left: self.suspicions,
            seals_left: self.seals,
            replacements_left: self.replacements,
            moves_left: self.moves,
            image: None,
            map: view,
        }
    }

    fn map(&self) -> ClusterMap {
        let ids = 0..self.width();
        let member = |p: usize| Member {
            target: target_id(p),
            state: MemberState::Current,
            since: Epoch(1),
            lost_at: Epoch(0),
        };
        let target = |p: usize| weir_proto::map::Target {
            id: target_id(p),
            uuid: DiskUuid([p as u8; 16]),
            node: NodeId(p as u32),
            pool: "all".into(),
            state: TargetState::Up,
            capacity: 1 << 30,
            last: Default::default(),
            whole: Default::default(),
        };
        ClusterMap {
            cluster: ClusterId([1; 16]),
            version: 1,
            level: LEVEL_MAX,
            settings: Settings {
                scheme: self.scheme,
                cell_shift: 16,
                lease_ms: 1000,
                target_silence_ms: 1000,
            },
            targets: (0..self.width() + usize::from(self.replacements + self.moves)).map(target).collect(),
            groups: vec![Group {
                id: GROUP,
                pool: "all".into(),
                scheme: self.scheme,
                epoch: Epoch(1),
                members: ids.map(member).collect(),
            }],
            ..ClusterMap::absent()
        }
    }
}
