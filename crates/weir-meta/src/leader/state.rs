//! The leader's state in memory, under one lock: leases, locks, sessions, quotas, and waiting operations.
use super::config::MetaConfig;
use super::holds::AbsentHoldings;
use super::rounds::{Groups, Place};
use crate::access::{Mounts, Refusals};
use crate::holds::Absent;
use crate::lease::{ByInode, LeaseTable, Raised};
use crate::lock::LockTable;
use crate::namespace::{Snapshots, snapshot, volume};
use crate::obstacle::{Obstacle, Obstacles};
use crate::quotas::Quotas;
use crate::recalls::Recalls;
use crate::relation::changelog;
use crate::session::{self, SPARED_FOR, Session, Sessions, no_session};
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::futures::OwnedNotified;
use weir_env::Instant;
use weir_kv::SharedKv;
use weir_proto::meta::{LeaseKind, Op};
use weir_proto::{InodeId, Result, SessionId, VolumeId};

/// After a revoke of a directory no client gets a lease on it for this time: clients that create files in it
/// by turns would wait for a revoke each time. A revoke takes about 1 ms, so it costs them 2 % at most.
const CONTENDED: Duration = Duration::from_millis(50);

/// A getattr or lookup takes the Write lease of a file from its writer at most this often: otherwise a client
/// that polls leaves the writer no time in which it writes alone, and nothing of its file could be evicted. A
/// revoke and the grant after it take about 1 ms.
const POLLS_APART: Duration = Duration::from_millis(5);

/// A client that did not answer a revoke gets no leases for this time: it reads and writes directly, and
/// others wait for it no more.
const MISTRUSTED_FOR: Duration = Duration::from_secs(60);

/// Such clients that are remembered.
const MISTRUSTED_MAX: usize = 4096;

/// Contended inodes that are remembered.
const CONTENDED_MAX: usize = 4096;

pub struct State {
    pub leases: LeaseTable,
    pub locks: LockTable,
    pub quotas: Quotas,
    pub recalls: Recalls,
    pub sessions: Sessions,
    pub mounts: Mounts,
    pub grace: Grace,
    /// Empty; kept for its room.
    pub(super) raised: Vec<Raised>,
    pub stalls: Stalls,
    /// Clients that did not answer a revoke, with the time until which they get no leases.
    mistrusted: BTreeMap<String, Instant>,
    pub(super) deaths: Deaths,
    /// Volumes with a changelog.
    pub logged: BTreeSet<VolumeId>,
    /// Volumes that mirror a home.
    pub mirrored: BTreeSet<VolumeId>,
    pub snapshots: Snapshots,
    /// The volume of which a snapshot is being taken, and its topmost directory.
    pub snapshotting: Option<(VolumeId, InodeId)>,
    /// Operations wait here for leases on an inode. An entry exists while one does.
    waiters: ByInode<Groups<Wanted>>,
    /// Directories that clients change by turns, with the time until which no client gets a lease on them.
    pub(super) contended: ByInode<Instant>,
    /// Files whose writer was revoked by a getattr or lookup, with the last time of that.
    polled: ByInode<Instant>,
    pub(super) obstacles: Obstacles,
}

/// Where an operation waits. No lease is granted on these inodes meanwhile.
#[derive(Default, Debug)]
pub struct Parked {
    pub inodes: Vec<InodeId>,
    place: Option<(On, Place)>,
}

/// The group in which an operation waits.
#[derive(Debug)]
enum On {
    Inode(InodeId, Wanted),
    /// Of this session.
    Absent(SessionId),
}

/// The need of a group's operations on an inode: this session must be the only one with a lease above this
/// kind. `None`: they do not wait for a lease.
type Wanted = Option<(SessionId, LeaseKind)>;

/// The grace period after a restart.
pub struct Grace {
    /// When this leader started.
    pub began: Instant,
    /// Until then sessions from before the restart may return.
    pub until: Option<Instant>,
    /// The holdings of sessions that have not returned, while there are such; `None`: to be computed.
    pub(super) absent: Option<Arc<AbsentHoldings>>,
    /// Until this one, sessions have been checked for volumes that they use no more.
    pub(super) checked: SessionId,
    /// Operations that wait for these sessions, by their own.
    pub(super) over: Groups<SessionId>,
    /// What those sessions may hold, when operations were last woken.
    held: Option<Absent>,
    /// Nothing is kept any more for sessions that had not returned.
    pub is_finished: bool,
    /// Sessions with holdings that a full disk could not record: they get no answer that shows these.
    pub(super) unrecorded: BTreeSet<SessionId>,
}

/// Ends of sessions.
pub struct Deaths {
    /// Sessions that have ended while they may have been writing.
    pub(super) count: u64,
    /// Ends that a full disk could not record, and whether they count.
    pub(super) unrecorded: Vec<(SessionId, bool)>,
}

/// Times at which clients may be silent without a fault of theirs.
pub struct Stalls {
    /// When this node started, or last resumed after a stall.
    pub until: Instant,
    /// When this node last checked for silent sessions.
    pub checked: Instant,
    /// The last time at which clients may have been unable to save.
    pub no_data_taken: Instant,
}

/// A lease term after the former leader's last possible answer. If it took long until a leader was chosen,
/// former clients have a whole term to find it: the time without a leader is not their silence.
fn end_of_grace(led_until: Option<Instant>, now: Instant, term: Duration) -> Instant {
    match led_until {
        Some(led) if now.since(led) <= term / 2 => led.min(now) + term,
        Some(_) | None => now + term,
    }
}

impl State {
    /// The state of a leader that starts now.
    pub fn load(kv: &SharedKv, config: &MetaConfig, now: Instant) -> Result<State> {
        let (mut sessions, mut deaths, mut quotas) = (Sessions::new(), 0, Quotas::default());
        let (mut logged, mut mirrored) = (BTreeSet::new(), BTreeSet::new());
        let mut snapshots = Snapshots::new();
        kv.read(&mut |read| {
            sessions = session::load(read, now)?;
            quotas = volume::load_quotas(read)?;
            deaths = session::deaths(read)?;
            logged = changelog::logged(read)?;
            mirrored = changelog::mirrored(read)?;
            snapshots = snapshot::load_all(read)?;
            Ok(())
        })?;
        Ok(State {
            leases: LeaseTable::new((config.map_version)()),
            locks: LockTable::default(),
            quotas,
            recalls: Recalls::default(),
            mounts: Mounts::new(Refusals::new(config.refused.clone())),
            grace: Grace {
                began: now,
                until: (!sessions.is_empty()).then(|| {
                    end_of_grace(config.led_until, now, Duration::from_millis(config.lease_ms.into()))
                }),
                absent: None,
                checked: SessionId(0),
                over: Groups::default(),
                held: None,
                is_finished: false,
                unrecorded: BTreeSet::new(),
            },
            raised: Vec::new(),
            stalls: Stalls { until: now, checked: now, no_data_taken: now },
            mistrusted: BTreeMap::new(),
            sessions,
            deaths: Deaths { count: deaths, unrecorded: Vec::new() },
            logged,
            mirrored,
            snapshots,
            snapshotting: None,
            waiters: ByInode::default(),
            contended: ByInode::default(),
            polled: ByInode::default(),
            obstacles: Obstacles::default(),
        })
    }

    /// Ends a wait: the operation tries, or is given up.
    pub fn unpark(&mut self, parked: &mut Parked) {
        for ino in parked.inodes.drain(..) {
            self.leases.unpark(ino);
        }
        match parked.place.take() {
            Some((On::Absent(session), place)) => self.grace.over.leave(&session, place),
            Some((On::Inode(ino, wanted), place)) => {
                let Some(groups) = self.waiters.get_mut(&ino) else { return };
                groups.leave(&wanted, place);
                if groups.is_empty() {
                    self.waiters.remove(&ino);
                }
            }
            None => {}
        }
    }

    /// An operation of this session begins to wait.
    pub fn park(&mut self, session: SessionId, obstacles: &Obstacles, parked: &mut Parked) -> OwnedNotified {
        for ino in obstacles.iter().map(Obstacle::ino) {
            if !parked.inodes.contains(&ino) {
                parked.inodes.push(ino);
                self.leases.park(ino);
            }
        }
        // One of them is enough: when it is gone the others are checked again.
        let first = obstacles.first().expect("an operation waits for something");
        let wanted = match first {
            Obstacle::Lease(conflict) if conflict.ask => Some((session, conflict.keep)),
            _ => None,
        };
        let (place, wait) = self.waiters.entry(first.ino()).or_default().wait(wanted);
        parked.place = Some((On::Inode(first.ino(), wanted), place));
        wait
    }

    /// Parks an operation until a session has returned that has been absent since a restart.
    pub(super) fn park_for_absent(&mut self, session: SessionId, parked: &mut Parked) -> OwnedNotified {
        let (place, wait) = self.grace.over.wait(session);
        parked.place = Some((On::Absent(session), place));
        wait
    }

    pub(super) fn note_contended(&mut self, obstacles: &Obstacles, now: Instant) {
        if self.contended.len() >= CONTENDED_MAX {
            self.contended.clear();
        }
        for conflict in obstacles.leases().filter(|c| c.ask && c.keep == LeaseKind::None) {
            self.contended.insert(conflict.ino, now + CONTENDED);
        }
    }

    /// The delay of a revoke for a getattr or lookup. It counts as made then.
    pub fn pause_before_poll(&mut self, ino: InodeId, now: Instant) -> Duration {
        if self.polled.len() >= CONTENDED_MAX {
            self.polled.clear();
        }
        let at = self.polled.get(&ino).map_or(now, |last| now.max(*last + POLLS_APART));
        self.polled.insert(ino, at);
        at.since(now)
    }

    /// When a client under revoke last made progress; `None`: the session is over.
    pub fn got_on(&self, session: SessionId, began: Instant) -> Option<Instant> {
        let progress = self.sessions.get(&session)?.progress;
        Some(began.max(progress).max(self.stalls.until).max(self.stalls.no_data_taken))
    }

    /// A client did not answer a revoke: others must not wait for it again, inode by inode.
    pub fn mistrust(&mut self, client: &str, now: Instant) {
        self.mistrusted.retain(|_, until| *until > now);
        if self.mistrusted.len() < MISTRUSTED_MAX {
            self.mistrusted.insert(client.to_owned(), now + MISTRUSTED_FOR);
        }
    }
    /// Grants a new session of such a client no leases for now.
    pub fn withhold_leases(&mut self, id: SessionId, now: Instant) {
        let of = self.sessions.get(&id).map(|s| s.client.as_str()).unwrap_or_default();
        if self.mistrusted.get(of).is_some_and(|until| *until > now) {
            self.leases.withhold(id, true);
        }
    }
    /// Ends that when its time is over.
    pub fn trust_again(&mut self, now: Instant) {
        self.mistrusted.retain(|_, until| *until > now);
        for (id, session) in &self.sessions {
            if !self.mistrusted.contains_key(&session.client) {
                self.leases.withhold(*id, false);
            }
        }
    }

    /// A lease was returned that operations may wait for.
    pub fn wake(&mut self, ino: InodeId) {
        let Some(groups) = self.waiters.get_mut(&ino) else { return };
        let leases = &self.leases;
        // Another revoke that they wait for wakes them, too: a retry before it meets the same lease.
        let is_blocked = |(session, keep): &(SessionId, LeaseKind)| leases.is_revoking(*session, ino, *keep);
        groups.wake(|wanted| !wanted.as_ref().is_some_and(is_blocked));
    }

    /// Whether this is the first time since the session's last resume that the change takes effect here.
    pub(super) fn note_applied(&mut self, op: &Op) -> bool {
        let Some(session) = self.sessions.get_mut(&op.session) else { return false };
        let applied = &mut session.applied[op.slot as usize];
        std::mem::replace(applied, op.seq) != op.seq
    }

    /// This node stalled until now: silence was not the clients' fault.
    pub fn note_stall(&mut self, now: Instant, term: Duration) {
        self.stalls.until = now;
        self.sessions.values_mut().for_each(|s| s.last_contact = now);
        if let Some(until) = &mut self.grace.until {
            *until = now + term;
        }
    }

    /// While no client is connected, none may be able to come: earlier sessions keep what they
    /// have, and their wait begins with the first one.
    pub fn wait_for_first_client(&mut self, now: Instant, term: Duration) {
        let none_is_connected = self.sessions.values().all(|s| s.connection.is_none());
        if let Some(until) = &mut self.grace.until
            && none_is_connected
            && now.since(self.grace.began) < SPARED_FOR
        {
            *until = (*until).max(now + term);
        }
    }

    /// Whether a session was silent for a lease term, for another reason than a stall of this node.
    pub fn is_silent(&self, id: SessionId, now: Instant, term: Duration) -> bool {
        let awake = now.since(self.stalls.checked) <= term / 2;
        awake && self.sessions.get(&id).is_some_and(|s| s.resumed && now.since(s.last_contact) > term)
    }

    /// A session has returned, or has ended: operations wait for the others only. Those of other sessions try
    /// again if these hold less than before: most often, with the last one.
    pub fn end_grace_if_complete(&mut self, session: SessionId) {
        if self.grace.until.is_none() {
            return;
        }
        self.grace.absent = None;
        let held = Absent::of(self.sessions.values().filter(|s| !s.resumed).map(|s| &s.holds));
        let is_over = self.sessions.values().all(|s| s.resumed);
        if is_over {
            self.grace.until = None;
        }
        let concerns_all = is_over || self.grace.held.as_ref() != Some(&held);
        self.grace.held = Some(held);
        self.grace.over.wake(|of| concerns_all || *of == session);
    }

    pub fn session(&mut self, id: SessionId) -> Result<&mut Session> {
        self.sessions.get_mut(&id).ok_or_else(|| no_session(id))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn grace_counts_from_the_former_leader_and_leaves_time() {
        let (term, s) = (Duration::from_secs(10), |n: u64| Instant(n * 1_000_000_000));
        assert_eq!(end_of_grace(None, s(100), term), s(110));
        assert_eq!(end_of_grace(Some(s(97)), s(100), term), s(107));
        assert_eq!(end_of_grace(Some(s(101)), s(100), term), s(110), "a promise for the future");
        assert_eq!(end_of_grace(Some(s(80)), s(100), term), s(110), "there was no leader for long");
        assert_eq!(end_of_grace(Some(s(95)), s(100), term), s(105));
    }
}
