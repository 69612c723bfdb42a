//! Sessions and troubles as administrators see them: the registered clients, their last message, and their
//! holdings; failing jobs, and the wait after a start.

use crate::leader::Leader;
use weir_proto::Result;
use weir_proto::condition::{NodeTrouble, STARTS, Severity};
use weir_proto::meta::{SessionList, SessionShown, Sessions};

/// Sessions of one answer: the size of a message is limited, and no cluster has more.
const SHOWN_MAX: usize = 20_000;

/// Clients that are named.
const NAMED_MAX: usize = 3;

impl Leader {
    pub(crate) fn troubles(&self) -> Vec<NodeTrouble> {
        let failing = self.failing.list(self.env.clock.now());
        self.starting().into_iter().chain(failing).collect()
    }

    /// After a start: the clients that have not returned, and for how long operations on their files wait.
    fn starting(&self) -> Option<NodeTrouble> {
        let (now, state) = (self.env.clock.now(), self.lock());
        let until = state.grace.until?;
        let is_waited_for = state.sessions.values().any(|s| s.connection.is_some());
        if !is_waited_for && now.since(state.grace.began) > 2 * self.term() {
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

    pub(crate) fn session_list(&self, _: &SessionList) -> Result<Sessions> {
        self.sessions_shown.get(|| self.env.clock.now(), || Ok(self.list_sessions()))
    }

    fn list_sessions(&self) -> Sessions {
        let now = self.env.clock.now();
        let state = self.lock();
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
