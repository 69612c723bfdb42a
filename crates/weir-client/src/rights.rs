//! What must be had of a file before its bytes are used: the lease, the bytes themselves, and the end of a
//! dead writer's work.
use crate::base::Base;
use crate::leases::Leases;
use crate::objects::Objects;
use crate::recovery::Recovery;
use crate::reports::Reports;
use crate::tiering::Tiering;
use std::sync::Arc;

#[derive(Clone)]
pub struct Rights {
    pub leases: Arc<Leases>,
    pub tiering: Arc<Tiering>,
    pub objects: Arc<Objects>,
    pub recovery: Arc<Recovery>,
}

impl Rights {
    pub fn new(base: &Base, reports: &Reports) -> Rights {
        let leases = Arc::new(Leases::new(base, reports));
        let tiering = Arc::new(Tiering::new(base, leases.clone()));
        let objects = Arc::new(Objects::new(base, leases.clone()));
        let recovery = Arc::new(Recovery::new(base, leases.clone(), tiering.clone(), objects.clone()));
        Rights { leases, tiering, objects, recovery }
    }
}
