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
use crate::leader::recall::{await_recall, take_recalls};
use std::sync::Arc;
use weir_proto::Request;
use weir_proto::condition::{TroubleList, Troubles};
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
        Outcome::plain($leader.admitted::<$name>($call, |r| r.session).and_then(|$r| $serve))
    };
    (committed, $name:ident, $leader:ident, $call:ident, $r:pat, $serve:expr) => {
        Outcome::committed($call.decode::<$name>().and_then(|$r| $serve))
    };
    (waits, $name:ident, $leader:ident, $call:ident, $r:pat, $serve:expr) => {
        waits($leader, $call.decode::<$name>(), |$leader, $r| $serve)
    };
    (waits_admitted, $name:ident, $leader:ident, $call:ident, $r:pat, $serve:expr) => {
        waits($leader, $leader.admitted::<$name>($call, |r| r.session), |$leader, $r| $serve)
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
    SessionOpen: committed |leader, r, call| leader.session_open(&r, &call.connection);
    SessionResume: committed |leader, r, call| leader.session_resume(&r, &call.connection);
    SessionClose: committed |leader, r, _| leader.session_close(&r).map(|seq| ((), seq));
    SessionList: now |leader, r, _| leader.session_list(&r);
    KeepAlive: now |leader, r, call| leader.keep_alive(&r, &call.connection);
    NoteMap: call |leader, r, _| leader.note_map(r);
    ReleaseLease: now |leader, r, _| leader.release(&r);
    ReleaseAppendToken: now |leader, r, _| leader.release_append_token(&r);
    ReclaimReservations: now |leader, r, _| leader.reclaim_reservations(&r);
    ReclaimSpace: now |leader, r, _| leader.reclaim_space(&r);
    OwnersNearLimit: now |leader, _, _| leader.owners_near();
    TroubleList: now |leader, _, _| Ok(Troubles { troubles: leader.troubles() });

    // The journal has no locks: their answers wait for no commit.
    SetLock: admitted |leader, r, call| leader.set_lock(&r, &call.connection);
    TestLock: admitted |leader, r, _| leader.test_lock(&r);
    ListLocks: admitted |leader, r, _| leader.list_locks(&r);
    CancelLock: now |leader, r, call| leader.cancel_lock(&r, &call.connection);
    ReclaimLocks: now |leader, r, call| leader.reclaim_locks(&r, &call.connection);

    RelationList: now |leader, r, _| leader.relation_list(&r);
    RelationRulesList: now |leader, r, _| leader.relation_rules(&r);
    LeaseWork: waits |leader, r, _| leader.lease_work(r);
    CompleteWork: committed |leader, r, _| leader.complete_work(&r).map(|seq| ((), seq));
    ReadChanges: waits |leader, r, _| leader.read_changes(r);

    AwaitRecall: waits_admitted |leader, r, call| await_recall(leader, r, call.deadline);
    WantRecall: admitted |leader, r, _| leader.want_recall(&r);
    TakeRecalls: waits |leader, r, call| take_recalls(leader, r, call.deadline);
    RecallFailed: now |leader, r, _| leader.recall_failed(&r);
    GetTierState: admitted |leader, r, _| leader.tier_state(&r);
    GetEviction: admitted |leader, r, _| leader.eviction(&r);

    // Its operation is a row of `registry`, too.
    SnapshotTake: call |leader, r, call| leader.take_snapshot(r, call);
}
