//! What every room of the client stands on: the outside, the leader, the targets, the inodes, and the memory.
//!
//! A room takes from here what it needs when it is made, and keeps it. Nothing here decides anything.
use crate::accesses::Accesses;
use crate::data::Data;
use crate::handles::Handles;
use crate::inodes::Inodes;
use crate::kernel::Kernel;
use crate::leader::Leader;
use crate::lent_names::LentNames;
use crate::losses::Losses;
use crate::maps::MapsSeen;
use crate::memory::Memory;
use crate::status::Counters;
use crate::types::{ClientConfig, KernelCache};
use std::sync::Arc;
use weir_env::Env;

#[derive(Clone)]
pub struct Base {
    pub env: Env,
    pub config: Arc<ClientConfig>,
    pub counters: Arc<Counters>,
    pub leader: Arc<Leader>,
    pub data: Arc<Data>,
    pub kernel: Arc<Kernel>,
    pub memory: Arc<Memory>,
    pub inodes: Arc<Inodes>,
    pub accesses: Arc<Accesses>,
    pub handles: Arc<Handles>,
    pub lent_names: Arc<LentNames>,
    pub losses: Arc<Losses>,
}

impl Base {
    pub fn new(
        env: Env,
        config: ClientConfig,
        cache: Arc<dyn KernelCache>,
        maps: Arc<MapsSeen>,
        leader: Leader,
        data: Data,
    ) -> Base {
        let (leader, data) = (Arc::new(leader), Arc::new(data));
        let kernel = Arc::new(Kernel::new(env.clone(), cache));
        let inodes = Arc::new(Inodes::new(kernel.clone(), maps));
        let accesses = Arc::new(Accesses::new(env.clone(), leader.clone(), inodes.clone()));
        let lent_names = LentNames::new(env.clone(), leader.clone(), inodes.clone(), kernel.clone());
        Base {
            lent_names: Arc::new(lent_names),
            counters: data.counters.clone(),
            memory: Arc::new(Memory::new(config.memory_bytes, env.buffers.clone())),
            handles: Arc::new(Handles::new(accesses.clone())),
            losses: Arc::new(Losses::new(env.clone())),
            config: Arc::new(config),
            env,
            leader,
            data,
            kernel,
            inodes,
            accesses,
        }
    }
}
