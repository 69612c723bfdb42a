//! What this client owes the leader a report of: closes, quota that it has spent, and local changes of names.
use crate::base::Base;
use crate::closes::Closes;
use crate::local_names::LocalNames;
use crate::quota::Quota;
use std::sync::Arc;

#[derive(Clone)]
pub struct Reports {
    pub closes: Arc<Closes>,
    pub quota: Arc<Quota>,
    pub local_names: Arc<LocalNames>,
}

impl Reports {
    pub fn new(base: &Base) -> Reports {
        let (closes, quota) = (Arc::new(Closes::new(base)), Arc::new(Quota::new(base)));
        let local_names = Arc::new(LocalNames::new(base, closes.clone(), quota.clone()));
        Reports { closes, quota, local_names }
    }
}
