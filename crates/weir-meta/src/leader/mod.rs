//! The leader of one namespace: its parts, each with what it owns, made from those below it.
//!
//! From the ground up: `commits` numbers changes and keeps replies until these are durable; `base` has the
//! state in memory under one lock; `transactions` runs changes and lets that state follow; `missing_names`
//! are names that operations wait for; `holds` records where sessions hold something; `ends` ends sessions;
//! `revoke` asks for leases; `operations` tries operations and lets them wait. On these stand calls that are
//! more than one transaction. Knows nothing of the wire except the messages' types, and names no job.
mod admission;
mod base;
mod changes;
pub mod clones;
mod commits;
pub mod config;
mod ends;
mod eviction;
mod full_disk;
mod hints;
pub mod holds;
mod levels;
mod locks;
mod missing_names;
mod movers;
mod operations;
pub mod outcome;
mod paced;
pub mod recall;
mod relations;
mod reports;
mod revoke;
mod rounds;
mod sessions;
pub mod snapshots;
pub mod state;
mod transactions;

pub use base::Base;
pub use config::MetaConfig;
pub use state::State;

use crate::namespace;
use crate::owners;
use crate::relation::queues::Relations;
use crate::tables;
use changes::Changelogs;
use clones::Clones;
use commits::Commits;
use ends::SessionEnds;
use eviction::Eviction;
use holds::HoldRecords;
use locks::LockCalls;
use missing_names::MissingNames;
use movers::MoverCalls;
use operations::Operations;
use recall::RecallCalls;
use relations::RelationReports;
use reports::Reports;
use revoke::Revoker;
use sessions::SessionCalls;
use snapshots::SnapshotCalls;
use std::sync::Arc;
use transactions::{Bells, Transactions};
use weir_env::Env;
use weir_kv::SharedKv;
use weir_proto::meta::Time;
use weir_proto::{InodeId, Result, SessionId, VolumeId};

/// Not a client's session.
pub const NO_SESSION: SessionId = SessionId(0);

/// The leader of one namespace.
pub(crate) struct Leader {
    pub base: Arc<Base>,
    pub bells: Arc<Bells>,
    pub relations: Arc<Relations>,
    pub clones: Arc<Clones>,
    pub tx: Arc<Transactions>,
    pub holds: Arc<HoldRecords>,
    pub ends: Arc<SessionEnds>,
    pub revoker: Arc<Revoker>,
    pub operations: Arc<Operations>,
    pub sessions: Arc<SessionCalls>,
    pub locks: Arc<LockCalls>,
    pub recalls: Arc<RecallCalls>,
    pub movers: Arc<MoverCalls>,
    pub changelogs: Arc<Changelogs>,
    pub snapshots: Arc<SnapshotCalls>,
    pub eviction: Eviction,
    pub relation_reports: RelationReports,
    pub reports: Reports,
}

impl Leader {
    pub fn open(env: &Env, kv: SharedKv, config: MetaConfig) -> Result<Arc<Leader>> {
        let now = env.clock.now();
        let wall = Time { nanos: env.clock.wall().0 };
        let newest = kv.transact(&mut |txn| {
            if !tables::ACCESS.has(txn, InodeId::ROOT)? {
                namespace::create::make_root(txn, wall);
            } else if !tables::VOLUMES.has(txn, VolumeId::ROOT)? {
                namespace::volume::make_root(txn, wall);
            }
            Ok(())
        })?;
        let newest = owners::repair(&kv, namespace::volume_usage)?.unwrap_or(newest);
        let (newest, lost_serials) = commits::leave_out_serials(&kv, newest)?;
        let state = State::load(&kv, &config, now)?;
        let mut relations = Relations::default();
        kv.read(&mut |read| {
            relations = Relations::load(read, env.rng.next_u64() | 1)?;
            Ok(())
        })?;
        let commits = Commits::new(env, kv, config.right.clone(), newest, lost_serials);
        Ok(Leader::new(Base::new(env, config, commits, state), relations))
    }

    fn new(base: Base, relations: Relations) -> Arc<Leader> {
        let (base, relations) = (&Arc::new(base), &Arc::new(relations));
        let (bells, clones) = (&Arc::<Bells>::default(), &Arc::<Clones>::default());
        let tx = &Transactions::new(base, bells, relations, clones);
        let names = &MissingNames::new(base, relations, clones);
        let holds = &HoldRecords::new(base);
        let ends = &SessionEnds::new(base, tx, relations);
        let revoker = &Revoker::new(base, ends);
        let operations = &Operations::new(base, tx, holds, names, revoker);
        let recalls = &RecallCalls::new(base, tx, names);
        Arc::new(Leader {
            sessions: SessionCalls::new(base, tx, holds, ends, relations),
            locks: LockCalls::new(base, holds, ends),
            recalls: recalls.clone(),
            movers: MoverCalls::new(base, relations, names, recalls),
            changelogs: Changelogs::new(base, relations),
            snapshots: SnapshotCalls::new(base, operations, revoker),
            eviction: Eviction::new(base),
            relation_reports: RelationReports::new(base, relations),
            reports: Reports::new(base),
            base: base.clone(),
            bells: bells.clone(),
            relations: relations.clone(),
            clones: clones.clone(),
            tx: tx.clone(),
            holds: holds.clone(),
            ends: ends.clone(),
            revoker: revoker.clone(),
            operations: operations.clone(),
        })
    }
}
