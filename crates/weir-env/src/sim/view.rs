//! Questions of a test about a node of the world, and the speed of the node's processor.
//!
//! Nothing here adds an event: a run with these questions is the same run.
use super::{
    World,
    core::State,
    node::{Here, Node},
};
use crate::{Instant, Tasks};
use std::sync::{Arc, PoisonError};

const MILLION: u64 = 1_000_000;

impl World {
    /// The node's processor has this speed from now on, in millionths of the configured one. No effect
    /// without a processor ([`super::SimConfig::processor`]).
    pub fn set_speed(&self, name: &str, ppm: u64) {
        let index = self.index_or_add(name);
        let mut state = self.0.lock();
        let now_ns = state.now_ns;
        state.trace("speed", &[index as u64, ppm]);
        let node = &mut state.nodes[index];
        node.speed_ppm = ppm;
        let wakers = node.processor.as_mut().map(|processor| processor.set_speed(ppm, now_ns));
        drop(state);
        wakers.into_iter().flatten().for_each(std::task::Waker::wake);
    }

    /// Starts tasks of the node's present process that do not wait behind its others for the processor: they
    /// run as on a thread of their own.
    pub fn lane(&self, name: &str, lane: &'static str) -> Tasks {
        let node = self.index_or_add(name);
        let life = self.0.lock().nodes[node].life;
        Tasks(Arc::new(Here { core: self.0.clone(), node, life, lane: None }.alone(lane)))
    }

    /// How often a task of the node's present process has waited for the processor for longer than a time
    /// slice.
    pub fn late_turns(&self, name: &str) -> u64 {
        let index = self.index_or_add(name);
        self.0.lock().nodes[index].processor.as_ref().map_or(0, |processor| processor.late())
    }

    /// The meters of the node's present or last process.
    pub fn meters(&self, name: &str) -> Arc<weir_watch::Shared> {
        let index = self.index_or_add(name);
        self.0.lock().nodes[index].watch.clone()
    }

    /// When the node was last without its process, a link or its disk: it was dead or paused, a link of it
    /// was cut or slow, or its disk had faults. A slow processor takes nothing away. `None`: never since its
    /// first start.
    pub fn last_away(&self, name: &str) -> Option<Instant> {
        let index = self.index_or_add(name);
        let mut state = self.0.lock();
        state.note_away(index);
        state.nodes[index].away_ns.map(Instant)
    }
}

impl State {
    /// Keeps the time for [`World::last_away`], before something that may end the absence.
    pub(super) fn note_away(&mut self, index: usize) {
        if self.nodes[index].is_away() || self.net.is_impaired(index) {
            self.nodes[index].away_ns = Some(self.now_ns);
        }
    }
}

impl Node {
    fn is_away(&self) -> bool {
        let disk_is_bad = || self.disk.lock().unwrap_or_else(PoisonError::into_inner).faults.is_any();
        self.life > 0 && (!self.up || self.paused || disk_is_bad())
    }
    /// The configured speed.
    pub(super) const FULL_SPEED_PPM: u64 = MILLION;
}
