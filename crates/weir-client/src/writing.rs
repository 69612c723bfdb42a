//! What changes a file's bytes and size: writes, what carries them to targets, and their commits at the
//! leader.
use crate::base::Base;
use crate::commit::Commits;
use crate::reports::Reports;
use crate::resize::Resize;
use crate::rights::Rights;
use crate::write_back::WriteBack;
use crate::writer::Writer;
use std::sync::Arc;

#[derive(Clone)]
pub struct Writing {
    pub commits: Arc<Commits>,
    pub write_back: Arc<WriteBack>,
    pub writer: Arc<Writer>,
    pub resize: Arc<Resize>,
}

impl Writing {
    pub fn new(base: &Base, reports: &Reports, rights: &Rights) -> Writing {
        let commits = Arc::new(Commits::new(base, reports, rights));
        let write_back = Arc::new(WriteBack::new(base, reports, rights, commits.clone()));
        let writer = Arc::new(Writer::new(base, reports, rights, commits.clone(), write_back.clone()));
        let resize = Arc::new(Resize::new(base, reports, rights, write_back.clone(), writer.clone()));
        Writing { commits, write_back, writer, resize }
    }
}
