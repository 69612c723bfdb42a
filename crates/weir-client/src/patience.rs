//! What follows when changed data could not be sent: it stays dirty and is tried again, or it is lost. The
//! decision alone.
//!
//! Invariant: data is given up only if the right to write it is gone, its targets are lost or full for good,
//! or a server that it needs has been silent for the mount's whole patience. A server that answers late, or
//! that it is busy, is not silent. Pure. Knows neither stripes nor servers.
use std::time::Duration;
use weir_proto::ErrorKind;

/// The shortest try.
const TRY_MIN: Duration = Duration::from_millis(100);

/// The facts about a send that has failed.
#[derive(Clone, Copy, Debug)]
pub struct Failed {
    pub kind: ErrorKind,
    /// More targets of the stripe's group are lost than it can lose, and none of them may return.
    pub is_lost: bool,
    /// Since the send began, for how long a server that it needs has not answered.
    pub silent: Duration,
    /// Since the send began.
    pub since: Duration,
    /// Of the mount.
    pub patience: Duration,
}

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Then {
    /// The data stays dirty, and is sent again after a pause.
    Again,
    Lost,
}

pub fn after(f: &Failed) -> Then {
    let lasts = match f.kind {
        // Fenced: another client writes the file now. Full: the wait for room is over.
        ErrorKind::Stale | ErrorKind::NoSpace | ErrorKind::OverQuota => return Then::Lost,
        // The request itself is refused: it would be refused again.
        ErrorKind::Invalid | ErrorKind::Denied | ErrorKind::Name(_) | ErrorKind::Unsupported => {
            return Then::Lost;
        }
        ErrorKind::Unavailable
        | ErrorKind::Deadline
        | ErrorKind::Busy { .. }
        | ErrorKind::Io
        // The number of an overlay is void, or a seal took the version: the next try gets another one.
        | ErrorKind::Exists => f.silent,
        // Bytes that were damaged on the way arrive with another try, unless the memory here is broken.
        ErrorKind::Damaged | ErrorKind::NotFound => f.since,
    };
    if f.is_lost || lasts >= f.patience { Then::Lost } else { Then::Again }
}

/// How long the next try waits for servers that do not answer: with those that are silent already the rest.
pub fn of_next_try(f: &Failed) -> Duration {
    f.patience.saturating_sub(f.silent).max(TRY_MIN)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_next_try_has_the_rest_of_the_patience() {
        let s = Duration::from_secs;
        let kind = ErrorKind::Deadline;
        let failed = Failed { kind, is_lost: false, silent: s(599), since: s(600), patience: s(600) };
        assert_eq!(of_next_try(&failed), s(1));
        assert_eq!(of_next_try(&Failed { silent: s(0), ..failed }), s(600));
        assert_eq!(of_next_try(&Failed { silent: s(700), ..failed }), TRY_MIN);
    }

    #[test]
    fn data_waits_as_long_as_its_servers_live() {
        let s = Duration::from_secs;
        let failed = Failed {
            kind: ErrorKind::Deadline,
            is_lost: false,
            silent: s(1),
            since: s(100_000),
            patience: s(600),
        };
        let busy = ErrorKind::Busy { wait_ms: 10 };
        for kind in [ErrorKind::Deadline, ErrorKind::Unavailable, busy, ErrorKind::Exists, ErrorKind::Io] {
            let failed = Failed { kind, ..failed };
            assert_eq!(after(&failed), Then::Again, "{kind:?}");
            assert_eq!(after(&Failed { silent: s(600), ..failed }), Then::Lost, "{kind:?}");
            assert_eq!(after(&Failed { is_lost: true, ..failed }), Then::Lost, "{kind:?}");
            assert_eq!(after(&Failed { silent: s(600), patience: Duration::MAX, ..failed }), Then::Again);
        }
        for kind in [ErrorKind::Damaged, ErrorKind::NotFound] {
            assert_eq!(after(&Failed { kind, since: s(599), ..failed }), Then::Again, "{kind:?}");
            assert_eq!(after(&Failed { kind, ..failed }), Then::Lost, "{kind:?}: it would not end");
        }
        for kind in [ErrorKind::Stale, ErrorKind::NoSpace, ErrorKind::OverQuota, ErrorKind::Denied] {
            assert_eq!(after(&Failed { kind, since: s(0), ..failed }), Then::Lost, "{kind:?}");
        }
    }
}
