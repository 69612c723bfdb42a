//! The cause that an operation waits for, as it is shown: another client's lease, a token, names at home,
//! space, or a restart.
use super::Operations;
use crate::leader::State;
use crate::lease::Conflict;
use crate::obstacle::{Obstacle, Obstacles};
use crate::ops::Operation;
use weir_proto::InodeId;
use weir_watch::{Object, Reason, WaitGuard, WaitRecord};

impl Operations {
    /// The wait of an operation that is parked on these inodes because of these obstacles.
    pub(super) fn waits<R: Operation>(
        &self,
        request: &R,
        parked: &[InodeId],
        obstacles: &Obstacles,
    ) -> WaitGuard {
        let object = parked.first().map_or(Object::NONE, |ino| Object::new("inode", ino.0));
        let (reason, holder) = reason(&self.base.lock(), obstacles);
        let uid = request.cred().map_or(0, |cred| cred.uid);
        let record = WaitRecord::new(reason, object).doing(R::NAME).of(uid, 0).held_by(&holder);
        self.base.env.watch.wait_since(self.base.now().0, record)
    }
}

/// The reason of a wait, and its holder.
fn reason(state: &State, obstacles: &Obstacles) -> (Reason, String) {
    let client = |c: &Conflict| state.sessions.get(&c.session).map(|s| s.client.as_str());
    let named = |ask: bool| {
        let mut names: Vec<&str> = obstacles.leases().filter(|c| c.ask == ask).filter_map(client).collect();
        names.dedup();
        names.join(", ")
    };
    let any = |is: fn(&Obstacle) -> bool| obstacles.iter().any(is);
    if any(|o| matches!(o, Obstacle::Full { .. })) {
        (Reason::Quota, "a volume's trash is being emptied".to_owned())
    } else if any(|o| matches!(o, Obstacle::NotEnumerated { .. })) {
        (Reason::Home, "names that home has are being listed".to_owned())
    } else if obstacles.leases().any(|c| c.ask) {
        (Reason::LeaseRecall, named(true))
    } else if any(|o| matches!(o, Obstacle::Snapshot { .. })) {
        (Reason::Parked, "a snapshot is being taken".to_owned())
    } else if obstacles.is_empty() && state.grace.until.is_some() {
        (Reason::Servers, "clients that may return after a restart".to_owned())
    } else {
        (Reason::Parked, named(false))
    }
}
