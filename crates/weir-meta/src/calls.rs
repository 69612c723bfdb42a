//! Requests that are not operations of the namespace: one row each, with its reply. Some are about a session
//! and its holdings in memory, some are more than one transaction.
//!
//! Kinds: `now` replies at once, `admitted` does so after the rules for mounts, `committed` when its commit
//! is durable. `waits` and `waits_admitted` run in a task of their own. `call` decides that by itself.
//!
//! Invariant: with the rows of `registry` these are all requests that a leader takes. A store that fails ends
//! the leader in each of them.
use crate::leader::Leader;
use crate::leader::outcome::{Outcome, waits};
use crate::registry;
use std::sync::Arc;
use weir_proto::Request;
use weir_proto::condition::{TroubleList, Troubles};
use weir_proto::early::{AwaitDurable, ChangeEarly, MakeAgain};
use weir_proto::lock::{CancelLock, ListLocks, ReclaimLocks, SetLock, TestLock};
use weir_proto::meta::{
    KeepAlive, NoteMap, ReleaseAppendToken, ReleaseLease, SessionClose, SessionList, SessionOpen,
    SessionResume,
};
use weir_proto::quota::{OwnersNearLimit, ReclaimSpace};
use weir_proto::recall::{AwaitRecall, GetEviction, GetTierState, RecallFailed, TakeRecalls, WantRecall};
use weir_proto::relation::{CompleteWork, LeaseWork, ReadChanges, RelationList, RelationRulesList};
use weir_proto::snapshot::SnapshotTake;
use weir_proto::volume::ReclaimReservations;
use weir_rpc::Call;

macro_rules! outcome {
    (now, $name:ident, $leader:ident, $call:ident, $r:pat, $serve:expr) => {
        Outcome::plain($call.decode::<$name>().and_then(|$r| $serve))
    };
    (admitted, $name:ident, $leader:ident, $call:ident, $r:pat, $serve:expr) => {
        Outcome::plain($leader.tx.admitted::<$name>($call, |r| r.session).and_then(|$r| $serve))
    };
    (committed, $name:ident, $leader:ident, $call:ident, $r:pat, $serve:expr) => {
        Outcome::committed($call.decode::<$name>().and_then(|$r| $serve))
    };
    (waits, $name:ident, $leader:ident, $call:ident, $r:pat, $serve:expr) => {
        waits($leader, $call.decode::<$name>(), |$leader, $r| $serve)
    };
    (waits_admitted, $name:ident, $leader:ident, $call:ident, $r:pat, $serve:expr) => {
        waits($leader, $leader.tx.admitted::<$name>($call, |r| r.session), |$leader, $r| $serve)
    };
    (call, $name:ident, $leader:ident, $call:ident, $r:pat, $serve:expr) => {
        match $call.decode::<$name>() {
            Ok($r) => $serve,
            Err(e) => Outcome::refused(e),
        }
    };
}

macro_rules! calls {
    ($($name:ident: $kind:ident |$leader:ident, $r:pat_param, $call:pat_param| $serve:expr;)*) => {
        /// Serves a call. One that has no row is refused.
        pub fn serve(leader: &Arc<Leader>, call: &Call) -> Outcome {
            match call.method {
                $($name::METHOD => {
                    let ($leader, $call) = (leader, call);
                    outcome!($kind, $name, $leader, call, $r, $serve)
                })*
                _ => Outcome::refused(call.unknown()),
            }
        }
    };
}

calls! {
    SessionOpen: committed |leader, r, call| leader.sessions.open(&r, &call.connection);
    SessionResume: committed |leader, r, call| leader.sessions.resume(&r, &call.connection);
    SessionClose: committed |leader, r, _| leader.sessions.close(&r).map(|seq| ((), seq));
    SessionList: now |leader, r, _| leader.reports.session_list(&r);
    KeepAlive: now |leader, r, call| leader.sessions.keep_alive(&r, &call.connection);
    NoteMap: call |leader, r, _| leader.sessions.note_map(r);
    ReleaseLease: now |leader, r, _| leader.sessions.release(&r);
    ReleaseAppendToken: now |leader, r, _| leader.sessions.release_append_token(&r);
    ReclaimReservations: now |leader, r, _| leader.sessions.reclaim_reservations(&r);
    ReclaimSpace: now |leader, r, _| leader.sessions.reclaim_space(&r);
    ChangeEarly: call |leader, r, call| registry::operate_early(leader, &r, call);
    MakeAgain: call |leader, r, call| leader.operations.make_all_again(&r, |state, change| {
        registry::make_again(leader, state, r.session, change, &call.connection)
    });
    AwaitDurable: committed |leader, r, _| leader.operations.await_durable(&r);
    OwnersNearLimit: now |leader, _, _| leader.reports.owners_near();
    TroubleList: now |leader, _, _| Ok(Troubles { troubles: leader.reports.troubles() });

    // The journal has no locks: their answers wait for no commit.
    SetLock: admitted |leader, r, call| leader.locks.set(&r, &call.connection);
    TestLock: admitted |leader, r, _| leader.locks.test(&r);
    ListLocks: admitted |leader, r, _| leader.locks.list(&r);
    CancelLock: now |leader, r, call| leader.locks.cancel(&r, &call.connection);
    ReclaimLocks: now |leader, r, call| leader.locks.reclaim(&r, &call.connection);

    RelationList: now |leader, r, _| leader.relation_reports.list(&r);
    RelationRulesList: now |leader, r, _| leader.relation_reports.rules(&r);
    LeaseWork: waits |leader, r, _| leader.movers.clone().lease_work(r);
    CompleteWork: committed |leader, r, _| leader.movers.complete_work(&r).map(|seq| ((), seq));
    ReadChanges: waits |leader, r, _| leader.changelogs.clone().read_changes(r);

    AwaitRecall: waits_admitted |leader, r, call| leader.recalls.clone().wait_for(r, call.deadline);
    WantRecall: admitted |leader, r, _| leader.recalls.want_recall(&r);
    TakeRecalls: waits |leader, r, call| leader.recalls.clone().take(r, call.deadline);
    RecallFailed: now |leader, r, _| leader.recalls.recall_failed(&r);
    GetTierState: admitted |leader, r, _| leader.recalls.tier_state(&r);
    GetEviction: admitted |leader, r, _| leader.eviction.levels_of(&r);

    // Its operation is a row of `registry`, too.
    SnapshotTake: call |leader, r, call| leader.snapshots.take(r, call);
}
