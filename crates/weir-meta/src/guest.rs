//! Requests that another user of this machine may send through a Unix socket, or a user of a mount's machine
//! through that mount: those of commands about volumes (`Sender::User` in the table of methods), and only as
//! that user, whom the kernel names (`weir_rpc::Proved::User`).
//!
//! Invariant: a request that names another user than the caller, or another connection's session, is refused;
//! so is one that is not listed here, and root of a mount's machine where it would act as root. Files are not
//! reached this way: mounts do that, which check permissions.
use crate::session::no_session;
use weir_proto::backup::{BackupList, BackupSet};
use weir_proto::condition::TroubleList;
use weir_proto::meta::{KeepAlive, SessionClose, SessionOpen, SessionResume, StatFs};
use weir_proto::quota::{OwnerLimit, OwnerUsageList};
use weir_proto::recall::GetEviction;
use weir_proto::relation::{
    AckChanges, DropCursor, ReadChanges, RelationAdd, RelationAddWith, RelationDo, RelationList,
    RelationResolve, RelationRulesList, RelationSet,
};
use weir_proto::snapshot::{SnapshotDelete, SnapshotList, SnapshotTake};
use weir_proto::volume::{
    GetWriteFloors, ScanInodes, SetWriteFloor, VolumeAt, VolumeChange, VolumeCreate, VolumeDelete, VolumeGet,
    VolumeList,
};
use weir_proto::{Error, Request, Result, SessionId};
use weir_rpc::Call;

/// The session and the user that a request names.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Claim {
    session: Option<SessionId>,
    user: Option<u32>,
}

macro_rules! claims {
    (open: $($open:ident)*; reads: $($reads:ident)*; asks: $($asks:ident)*; acts: $($acts:ident)*) => {
        /// `Denied`: it is not known which session and user such a request names.
        fn claim(call: &Call) -> Result<Claim> {
            Ok(match call.method {
                $( $open::METHOD => Claim { session: None, user: None }, )*
                $( $reads::METHOD => Claim { session: Some(call.decode::<$reads>()?.session), user: None }, )*
                $( $asks::METHOD => {
                    let r = call.decode::<$asks>()?;
                    Claim { session: Some(r.session), user: Some(r.cred.uid) }
                } )*
                $( $acts::METHOD => {
                    let r = call.decode::<$acts>()?;
                    Claim { session: Some(r.op.session), user: Some(r.cred.uid) }
                } )*
                method => return Err(Error::denied(format!("method {method} is for nodes of the cluster"))),
            })
        }
        /// The methods of these requests.
        #[cfg(test)]
        const LISTED: &[u16] =
            &[$($open::METHOD,)* $($reads::METHOD,)* $($asks::METHOD,)* $($acts::METHOD,)*];
    };
}
claims! {
    open: SessionOpen TroubleList;
    reads: SessionResume SessionClose KeepAlive StatFs VolumeList VolumeGet VolumeAt GetWriteFloors RelationList
        RelationRulesList BackupList SnapshotList;
    asks: ScanInodes OwnerUsageList GetEviction ReadChanges;
    acts: VolumeCreate VolumeChange SetWriteFloor VolumeDelete OwnerLimit RelationAdd RelationAddWith RelationSet
        RelationDo RelationResolve AckChanges DropCursor
        BackupSet SnapshotTake SnapshotDelete
}

/// Refuses requests that this guest may not send. `own`: whether a session was opened on its connection.
pub(crate) fn check(call: &Call, guest: u32, own: impl FnOnce(SessionId) -> bool) -> Result<()> {
    let claim = claim(call)?;
    check_claim(claim, guest, own)?;
    match claim.user {
        Some(0) if call.connection.is_for_user() => {
            Err(Error::denied("root of a machine with a mount is no administrator of the cluster")
                .hint("name the cluster's directory (--dir) or show a certificate (--certificate)"))
        }
        _ => Ok(()),
    }
}

fn check_claim(claim: Claim, guest: u32, own: impl FnOnce(SessionId) -> bool) -> Result<()> {
    let Claim { session, user } = claim;
    if let Some(session) = session.filter(|session| !own(*session)) {
        return Err(no_session(session));
    }
    match user {
        Some(user) if user != guest => {
            Err(Error::denied(format!("user {guest} of this machine may not act as user {user}")))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use weir_proto::ErrorKind;
    use weir_proto::methods;
    use weir_proto::sender::Sender;

    #[test]
    fn a_guest_has_the_kernels_user_and_only_its_own_session() {
        let claim = |session: Option<u64>, user| Claim { session: session.map(SessionId), user };
        let kind = |claim| check_claim(claim, 1000, |session| session == SessionId(7)).map_err(|e| e.kind);
        for allowed in [claim(None, None), claim(Some(7), None), claim(Some(7), Some(1000))] {
            assert_eq!(kind(allowed), Ok(()), "{allowed:?}");
        }
        for user in [0, 1, 1001, u32::MAX] {
            assert_eq!(kind(claim(Some(7), Some(user))), Err(ErrorKind::Denied), "{user}");
        }
        assert_eq!(kind(claim(Some(8), Some(1000))), Err(ErrorKind::Stale));
    }

    /// A request that the table opens to users names a session and a user that are checked, or can be.
    #[test]
    fn every_request_open_to_users_is_checked() {
        let numbers = |n: u16| (100..200).contains(&n) || (420..440).contains(&n);
        let to_leader = methods::all().filter(|method| numbers(method.number));
        let open: Vec<u16> = to_leader.filter(|m| m.by.has(Sender::User)).map(|m| m.number).collect();
        let mut listed = LISTED.to_vec();
        listed.sort_unstable();
        assert_eq!(open, listed);
    }
}
