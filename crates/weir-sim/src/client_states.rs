//! State of the clients: which process each one is, how often it was cut off, and which errors are excused
//! because of that.
//!
//! A client that died or was silent for long may lose data that was neither durable nor seen by another
//! client, and may get errors. Any other error is a broken promise.

use crate::model::Who;
use std::{
    sync::{Mutex, MutexGuard, PoisonError},
    time::Duration,
};
use weir_client::Client;
use weir_env::{Instant, sim::World};
use weir_proto::{Error, ErrorKind};

/// How long after a cut errors are excused: twice an operation's patience.
const EXCUSED: Duration = Duration::from_secs(60);

/// After this the session of a client that died has ended: two lease terms, see `Settings`.
pub const LEAVES: Duration = Duration::from_secs(10);

pub fn client_name(me: usize) -> String {
    format!("c{me}")
}

pub struct ClientStates {
    world: World,
    state: Mutex<State>,
}

struct State {
    client_states: Vec<ClientState>,
    /// Errors for lack of space are excused until then.
    full_until: Instant,
    /// Too many targets are dead, or were and have not compared their logs yet; any client's errors are
    /// excused until then.
    is_broken: bool,
    broken_until: Instant,
    /// Evictions by clients that are gone.
    own_evictions: u64,
}

#[derive(Clone)]
struct ClientState {
    client: Option<Client>,
    life: u64,
    cuts: u64,
    /// End of the excuse for the last cut; for ever while it lasts.
    excused_until: Instant,
    died: Instant,
}

impl ClientStates {
    pub fn new(world: &World, clients: usize) -> ClientStates {
        let client_state =
            ClientState { client: None, life: 0, cuts: 0, excused_until: Instant(0), died: Instant(0) };
        let state = State {
            client_states: vec![client_state; clients],
            full_until: Instant(0),
            is_broken: false,
            broken_until: Instant(0),
            own_evictions: 0,
        };
        ClientStates { world: world.clone(), state: Mutex::new(state) }
    }

    pub fn who(&self, me: usize) -> Who {
        let client_state = &self.state().client_states[me];
        // Changes made while it is cut off may be lost, like earlier ones.
        let is_cut = client_state.excused_until == Instant(u64::MAX);
        Who { client: me, life: client_state.life, cuts: client_state.cuts - u64::from(is_cut) }
    }
    /// The identity of no client: for readers that change nothing.
    pub fn no_client() -> Who {
        Who { client: usize::MAX, life: 0, cuts: 0 }
    }
    /// How often any client was cut off, or died.
    pub fn all_cuts(&self) -> u64 {
        self.state().client_states.iter().map(|s| s.cuts).sum()
    }
    pub fn cuts(&self, client: usize) -> u64 {
        self.state().client_states.get(client).map_or(0, |s| s.cuts)
    }
    pub fn is_alive(&self, who: Who) -> bool {
        self.state().client_states.get(who.client).is_some_and(|s| s.life == who.life)
    }
    pub fn client(&self, me: usize) -> Option<Client> {
        self.state().client_states[me].client.clone()
    }

    /// A new process takes over the client.
    pub fn begins(&self, me: usize) {
        self.state().client_states[me].life += 1;
    }
    pub fn set_client(&self, me: usize, client: Client) {
        self.state().client_states[me].client = Some(client);
    }
    /// The client died: errors of its handles no longer matter.
    pub fn died(&self, me: usize) {
        self.cut(me);
        let client = {
            let client_state = &mut self.state().client_states[me];
            client_state.life += 1;
            client_state.died = self.world.now();
            client_state.client.take()
        };
        if let Some(client) = client {
            self.state().own_evictions += client.status().own_evictions;
        } // and it is dropped outside of the lock
    }
    /// The client died, and its session may not have ended: its requests in flight may still reach a target
    /// that was stalled, and bytes that it wrote past the end of a file become part of it when another client
    /// extends the file.
    pub fn is_leaving(&self, who: Who) -> bool {
        let client_state = &self.state().client_states[who.client];
        client_state.life != who.life && self.world.now() < client_state.died + LEAVES
    }
    /// How often parts of files were evicted by the client that was writing them.
    pub fn own_evictions(&self) -> u64 {
        let state = self.state();
        let living = state.client_states.iter().filter_map(|client_state| client_state.client.as_ref());
        state.own_evictions + living.map(|client| client.status().own_evictions).sum::<u64>()
    }
    /// Its silence begins, longer than its lease.
    pub fn cut(&self, me: usize) {
        let client_state = &mut self.state().client_states[me];
        client_state.cuts += 1;
        client_state.excused_until = Instant(u64::MAX);
    }
    /// The last cut ended.
    pub fn joined(&self, me: usize) {
        let until = self.world.now() + EXCUSED;
        let client_state = &mut self.state().client_states[me];
        client_state.excused_until = client_state.excused_until.min(until);
    }
    /// A disk is full, or was until now.
    pub fn no_space(&self) {
        self.state().full_until = self.world.now() + EXCUSED;
    }

    /// More targets are dead than parity allows, or all are whole again. In between the data of a failed
    /// write may be on some members only, and may be visible or not.
    pub fn set_broken(&self, is_broken: bool) {
        let until = self.world.now() + EXCUSED;
        let mut state = self.state();
        (state.is_broken, state.broken_until) = (is_broken, until);
    }
    /// Also for a client that is never cut off.
    pub fn excuses_any(&self) -> bool {
        let state = self.state();
        state.is_broken || self.world.now() < state.broken_until
    }
    pub fn is_broken(&self) -> bool {
        self.state().is_broken
    }

    pub fn is_full(&self) -> bool {
        self.world.now() < self.state().full_until
    }
    /// Whether errors for lack of space are excused since `at`.
    pub fn was_full_since(&self, at: Instant) -> bool {
        at < self.state().full_until
    }
    /// It is silent now, or dead.
    pub fn is_cut(&self, me: usize) -> bool {
        self.state().client_states[me].excused_until == Instant(u64::MAX)
    }
    pub fn excuses_all(&self, me: usize) -> bool {
        self.world.now() < self.state().client_states[me].excused_until
    }
    pub fn excuses(&self, me: usize, e: &Error) -> bool {
        (e.kind == ErrorKind::NoSpace && self.is_full()) || self.excuses_all(me)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
