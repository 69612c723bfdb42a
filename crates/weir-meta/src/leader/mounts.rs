//! The rules for mounts, applied to requests that are not operations of the namespace: locks, recalls,
//! states.
use crate::access::Mount;
use crate::leader::{Leader, State};
use crate::namespace;
use crate::reach::Reaches;
use std::sync::Arc;
use weir_proto::{Result, SessionId};
use weir_rpc::{Call, Connection};

impl Leader {
    /// The mount at the other end of a connection, if the rules concern it.
    pub fn mount_at(&self, state: &mut State, connection: &Connection) -> Option<Arc<Mount>> {
        let version = (self.config.map_version)();
        state.mounts.follow(version, || (self.config.access)(), || (self.config.audits)());
        state.mounts.at(connection)
    }

    /// A request, as the user that the rules map its user to. An error: they refuse it.
    pub(crate) fn admitted<R: Reaches>(&self, call: &Call, session: fn(&R) -> SessionId) -> Result<R> {
        let request = call.decode::<R>()?;
        let leader = self;
        let mut state = leader.lock();
        let Some(mount) = leader.mount_at(&mut state, &call.connection) else { return Ok(request) };
        let live = |_: SessionId| true;
        let rules = leader.rules(&state, session(&request), Some(&mount), &live);
        let mut mapped = None;
        leader.kv.read(&mut |read| {
            mapped = namespace::admit::admit(read, &rules, &request)?;
            Ok(())
        })?;
        Ok(mapped.unwrap_or(request))
    }
}
