//! A service whose address is announced before the service is ready.
//!
//! A node serves before it joins, and the metadata role must have joined before it may lead.
use std::sync::{Arc, OnceLock};
use tokio::sync::{Notify, Semaphore};
use weir_proto::Error;
use weir_proto::data::PAYLOAD_MAX;
use weir_proto::sender::Sender;
use weir_rpc::{Call, Connection, Defer, Handled, Service};

/// Calls that wait for a gate that is about to open: their senders have got the newest map earlier than this
/// node.
const HELD_CALLS_MAX: usize = 4096;

/// A service that is announced before it is ready: until then callers must retry, or wait for a moment.
#[derive(Clone)]
pub struct Gate {
    behind: Arc<OnceLock<Arc<dyn Service>>>,
    opened: Arc<Notify>,
    /// Permits for waiting calls.
    waiting_slots: Arc<Semaphore>,
    /// It belongs to the metadata service.
    to_metadata: bool,
}

impl Default for Gate {
    fn default() -> Gate {
        let waiting_slots = Arc::new(Semaphore::new(0));
        Gate { behind: Arc::default(), opened: Arc::default(), waiting_slots, to_metadata: false }
    }
}

impl Gate {
    pub fn to_metadata() -> Gate {
        Gate { to_metadata: true, ..Gate::default() }
    }
    /// It opens as soon as this node is a member.
    pub fn hold(&self) {
        self.waiting_slots.add_permits(HELD_CALLS_MAX);
    }
    pub fn open(&self, service: Arc<dyn Service>) {
        assert!(self.behind.set(service).is_ok(), "a gate opens once");
        self.opened.notify_waiters();
    }
    fn wait(&self, call: Call) -> Handled {
        let starting = || Error::unavailable("this node is starting");
        let Ok(place) = self.waiting_slots.clone().try_acquire_owned() else {
            return Handled::Now(Err(starting()));
        };
        let gate = self.clone();
        Handled::Later(Box::pin(async move {
            let opened = gate.opened.notified();
            tokio::pin!(opened);
            opened.as_mut().enable();
            if gate.behind.get().is_none() {
                opened.await;
            }
            drop(place);
            match gate.behind.get().ok_or_else(starting)?.handle(call) {
                Handled::Now(reply) => reply,
                Handled::Later(reply) => reply.await,
            }
        }))
    }
}

impl Service for Gate {
    fn handle(&self, call: Call) -> Handled {
        match self.behind.get() {
            Some(service) => service.handle(call),
            None => self.wait(call),
        }
    }
    fn handle_or_defer(&self, call: Call, defer: Defer<'_>) -> Option<Handled> {
        match self.behind.get() {
            Some(service) => service.handle_or_defer(call, defer),
            None => Some(self.handle(call)),
        }
    }
    fn admits_guests(&self) -> bool {
        self.to_metadata
    }
    fn payload_max(&self, from: Sender) -> u32 {
        // The copies of a namespace send each other journal records.
        if self.to_metadata && from != Sender::Meta { 0 } else { PAYLOAD_MAX }
    }
    fn caught_up(&self) {
        if let Some(service) = self.behind.get() {
            service.caught_up();
        }
    }
    fn disconnected(&self, connection: &Connection) {
        if let Some(service) = self.behind.get() {
            service.disconnected(connection);
        }
    }
}
