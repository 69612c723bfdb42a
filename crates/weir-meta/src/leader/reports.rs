//! Sessions and troubles as administrators see them: the registered clients, their last message, and their
//! holdings; failing jobs, and the wait after a start.

use super::base::Base;
use super::paced::Paced;
use crate::near_limits::{self, LastReport};
use std::sync::Arc;
use weir_proto::Result;
use weir_proto::condition::{NodeTrouble, STARTS, Severity};
use weir_proto::meta::{SessionList, SessionShown, Sessions};
use weir_proto::quota::OwnersNear;

/// Sessions of one answer: the size of a message is limited, and no cluster has more.
const SHOWN_MAX: usize = 20_000;

/// Clients that are named.
const NAMED_MAX: usize = 3;

/// Reports for administrators.
pub struct Reports {
    base: Arc<Base>,
    /// Long to count.
    sessions: Paced<Sessions>,
    near_limits: LastReport,
}

impl Reports {
    pub fn new(base: &Arc<Base>) -> Reports {
        Reports { base: base.clone(), sessions: Paced::default(), near_limits: LastReport::default() }
    }

    /// Users and groups near their limits, for `weir status`.
    pub fn owners_near(&self) -> Result<OwnersNear> {
        self.near_limits.or_new(self.base.now(), || {
            let (state, mut report) = (self.base.lock(), OwnersNear::default());
            self.base.read(&mut |read| {
                report = near_limits::near(read, &state.quotas, self.base.wall())?;
                Ok(())
            })?;
            Ok(report)
        })
    }

    pub fn troubles(&self) -> Vec<NodeTrouble> {
        let failing = self.base.failing.list(self.base.now());
        self.starting().into_iter().chain(failing).collect()
    }

    /// After a start: the clients that have not returned, and for how long operations on their files wait.
    fn starting(&self) -> Option<NodeTrouble> {
        let (now, state) = (self.base.now(), self.base.lock());
        let until = state.grace.until?;
        let is_waited_for = state.sessions.values().any(|s| s.connection.is_some());
        if !is_waited_for && now.since(state.grace.began) > 2 * self.base.term() {
            return None; // no client comes, and none waits
        }
        let away: Vec<&str> =
            state.sessions.values().filter(|s| !s.resumed).map(|s| s.client.as_str()).collect();
        let (count, left) = (away.len(), until.since(now).as_secs() + 1);
        let more = if count > NAMED_MAX { ", …" } else { "" };
        let clients =
            if count == 1 { "1 earlier client".to_owned() } else { format!("{count} earlier clients") };
        let names = away.into_iter().take(NAMED_MAX).collect::<Vec<_>>().join(", ");
        let text = format!(
            "its metadata server has started and waits for {clients} ({names}{more}), {left} s at most"
        );
        let action = "wait: it continues by itself".to_owned();
        let (code, about) = (STARTS.to_owned(), String::new());
        Some(NodeTrouble { code, severity: Severity::Warning, about, text, action })
    }

    pub fn session_list(&self, _: &SessionList) -> Result<Sessions> {
        self.sessions.get(|| self.base.now(), || Ok(self.list_sessions()))
    }

    fn list_sessions(&self) -> Sessions {
        let now = self.base.now();
        let state = self.base.lock();
        let shown = state.sessions.iter().take(SHOWN_MAX).map(|(id, session)| {
            let connection = session.connection.as_ref();
            let holdings = state.leases.holdings_of(*id);
            let (locks, lock_waits) = state.locks.counts_of(*id);
            SessionShown {
                session: *id,
                client: session.client.clone(),
                node: connection.map_or_else(String::new, |c| c.peer().name.clone()),
                role: connection.map(|c| c.peer().role),
                addr: connection.map_or_else(String::new, |c| c.peer_addr().to_owned()),
                last_contact_ms: now.since(session.last_contact).as_millis() as u64,
                resumed: session.resumed,
                open: holdings.open,
                open_to_write: holdings.open_to_write,
                leases: holdings.leases,
                write_leases: holdings.write_leases,
                awaited: holdings.awaited,
                locks,
                lock_waits,
            }
        });
        Sessions { sessions: shown.collect() }
    }
}
