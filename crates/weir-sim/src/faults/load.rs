//! Load: nodes whose processor has little time for them, and bursts of requests.

use super::{Fault, Faults};
use crate::burst::Complain;
use crate::client_states::client_name;
use crate::kinds::FaultKind::*;
use std::sync::Arc;
use std::time::Duration;

const FULL_SPEED_PPM: u64 = 1_000_000;
/// A starved node has between a twentieth and a hundredth of its processor.
const STARVED: (u64, u64) = (20, 100);
/// A burst has ended by then: all its requests, served one after the other by servers that starve.
const BURST_PATIENCE: Duration = Duration::from_secs(900);
const BURST_POLL: Duration = Duration::from_millis(50);

impl Faults {
    pub(super) fn begin_load(&self, fault: &Fault) {
        self.work.context.load.begins(self.world.now());
        if fault.kind == Burst {
            return self.begin_burst();
        }
        let speed_ppm = FULL_SPEED_PPM / (STARVED.0 + self.rng.below(STARVED.1 - STARVED.0 + 1));
        fault.victims.iter().for_each(|victim| self.world.set_speed(victim, speed_ppm));
    }

    fn begin_burst(&self) {
        let Some(bursts) = &self.work.bursts else { return };
        let work = self.work.clone();
        let complain: Complain =
            Arc::new(move |me, is_excused, what, e| work.context.complain(me, is_excused, what, e));
        for me in (0..self.options.clients).filter(|me| self.world.is_up(&client_name(*me))) {
            if let Some(client) = self.work.context.client_states.client(me) {
                bursts.begin(&client, me, &complain);
            }
        }
    }

    pub(super) async fn end_load(&self, fault: &Fault) {
        match fault.kind {
            Burst => self.wait_for_burst().await,
            _ => fault.victims.iter().for_each(|victim| self.world.set_speed(victim, FULL_SPEED_PPM)),
        }
        self.work.context.load.ends(self.world.now());
    }

    async fn wait_for_burst(&self) {
        let Some(bursts) = &self.work.bursts else { return };
        let begun = self.world.now();
        while bursts.is_under_way() {
            let waited = self.world.now().since(begun);
            assert!(waited < BURST_PATIENCE, "a burst has not ended after {BURST_PATIENCE:?}");
            self.world.sleep(BURST_POLL).await;
        }
    }

    /// Its effect so far: faults of a disk, late turns on a processor, requests of a burst.
    pub(super) fn hits(&self, fault: &Fault) -> u64 {
        match fault.kind {
            StarvedNode => fault.victims.iter().map(|victim| self.world.late_turns(victim)).sum(),
            Burst => self.work.bursts.as_ref().map_or(0, |bursts| bursts.done()),
            _ => self.world.disk_hits(fault.victim()),
        }
    }
}
