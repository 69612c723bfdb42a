//! One target of a node, composed of its store and the parts that work with it. Each part owns its state, and
//! knows only parts that were made before it.
use crate::admission::{Admission, Admitted};
use crate::calls::Calls;
use crate::comparing::Comparing;
use crate::copies::Copies;
use crate::damage::Damage;
use crate::disk_threads::DiskThreads;
use crate::fences::Fences;
use crate::handed_over::HandedOver;
use crate::logs::{Agreement, Mirrors, Overlays};
use crate::membership::Membership;
use crate::moving::{MoveParts, Moves};
use crate::pace::Pace;
use crate::peers::Peers;
use crate::rebuild::Rebuilder;
use crate::recent::Recent;
use crate::refill::Refill;
use crate::repair::{Repair, RepairParts};
use crate::requests::Requests;
use crate::scrubbing::Scrubbing;
use crate::seal::Seals;
use crate::service::reads::Reads;
use crate::service::writes::Writes;
use crate::store::Store;
use crate::stripes::Stripes;
use crate::truncations::Truncations;
use crate::under_replicated::UnderReplicated;
use std::sync::Arc;
use weir_env::{Clock, Env};
use weir_proto::{Error, Result};
use weir_rpc::{Call, Handled};

pub(crate) struct Target {
    pub store: Arc<Store>,
    clock: Clock,
    /// Requests of clients in progress.
    admission: Arc<Admission>,
    /// Rate at which this target copies cells from other members.
    pace: Arc<Pace>,
    pub reads: Arc<Reads>,
    pub writes: Arc<Writes>,
    pub overlays: Arc<Overlays>,
    pub agreement: Arc<Agreement>,
    pub seals: Arc<Seals>,
    pub truncations: Arc<Truncations>,
    pub fences: Arc<Fences>,
    pub repair: Arc<Repair>,
    pub moves: Arc<Moves>,
    pub handed_over: Arc<HandedOver>,
    pub damage: Arc<Damage>,
    pub under_replicated: Arc<UnderReplicated>,
    pub scrubbing: Arc<Scrubbing>,
    pub comparing: Arc<Comparing>,
}

impl Target {
    pub fn new(env: &Env, peers: &Arc<dyn Peers>, calls: &Arc<Calls>, store: Store) -> Target {
        let (store, pace, recent) = (Arc::new(store), Arc::<Pace>::default(), Arc::<Recent>::default());
        let members = &Membership::new(env, peers, &store);
        let disk = &DiskThreads::new(env, &store);
        let requests = &Requests::new(members, disk);
        let rebuilder = &Rebuilder::new(env, calls);
        let mirrors = &Mirrors::new(env, members, calls);
        let agreement = &Agreement::new(env, members, calls, mirrors, rebuilder);
        let overlays = &Overlays::new(env, members, disk, mirrors, agreement, &recent);
        let stripes = &Stripes::new(env, calls, rebuilder);
        let damage = &Damage::new(env, members, rebuilder, stripes);
        let copies = &Copies::new(env, members, &pace);
        let truncations = &Truncations::new(env, members, calls, overlays);
        let fences = &Fences::new(env, members, calls);
        let handed_over = &HandedOver::new(env, members);
        let repair = RepairParts {
            agreement: agreement.clone(),
            rebuilder: rebuilder.clone(),
            stripes: stripes.clone(),
            refill: Refill::new(stripes, copies),
            truncations: truncations.clone(),
            fences: fences.clone(),
        };
        let moves = MoveParts {
            calls: calls.clone(),
            requests: requests.clone(),
            agreement: agreement.clone(),
            fences: fences.clone(),
            copies: copies.clone(),
            damage: damage.clone(),
            handed_over: handed_over.clone(),
        };
        Target {
            clock: env.clock.clone(),
            admission: Arc::default(),
            reads: Reads::new(members, requests, disk),
            writes: Writes::new(members, requests, disk, rebuilder, damage),
            overlays: overlays.clone(),
            agreement: agreement.clone(),
            seals: Seals::new(env, members, calls, rebuilder, &recent),
            truncations: truncations.clone(),
            fences: fences.clone(),
            repair: Repair::new(env, members, repair),
            moves: Moves::new(env, members, moves),
            handed_over: handed_over.clone(),
            damage: damage.clone(),
            under_replicated: UnderReplicated::new(env, members),
            scrubbing: Scrubbing::new(env, members),
            comparing: Comparing::new(env, members, rebuilder, stripes),
            pace,
            store,
        }
    }

    /// Admits a request of a client, or refuses it.
    pub fn admit(&self, call: &Call, bytes: u64) -> Result<Admitted> {
        let admitted = self.admission.admit(&self.clock, call.connection.id(), bytes, call.deadline);
        admitted.map_err(|(pause, inside)| {
            let id = self.store.target;
            Error::busy(pause, format!("{id} is busy: {inside} requests of clients are in progress there"))
        })
    }

    /// A client's write, by whose time copies to the target are limited; with its wait for the commit.
    pub fn timed(&self, written: Handled) -> Handled {
        let (clock, pace, came) = (self.clock.clone(), self.pace.clone(), self.clock.now());
        match written {
            Handled::Later(reply) => Handled::Later(Box::pin(async move {
                let reply = reply.await?;
                let now = clock.now();
                pace.note_latency(now, now.since(came));
                Ok(reply)
            })),
            now => now,
        }
    }
}
