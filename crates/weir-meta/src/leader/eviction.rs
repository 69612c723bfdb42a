//! Eviction as administrators see it: fill levels and watermarks.
use super::base::Base;
use super::levels::Evictor;
use crate::keys;
use crate::namespace;
use std::sync::Arc;
use weir_proto::recall::{GetEviction, Levels, SetMarks};
use weir_proto::{Error, NameRule, Result, VolumeId};

/// Fill levels, and the watermarks that administrators set.
pub struct Eviction {
    base: Arc<Base>,
    pub levels: Evictor,
}

impl Eviction {
    pub fn new(base: &Arc<Base>) -> Eviction {
        Eviction { base: base.clone(), levels: Evictor::default() }
    }

    /// A watched place, for people.
    pub fn watched_name(&self, of: Option<VolumeId>) -> String {
        of.map_or_else(
            || "the targets".to_owned(),
            |volume| format!("volume {}", namespace::volume::shown_name(self.base.commits.store(), volume)),
        )
    }

    /// The levels; sets the watermarks of a volume before, if the request has some.
    pub fn levels_of(&self, r: &GetEviction) -> Result<Levels> {
        self.base.note_contact(&mut self.base.lock(), r.session)?;
        if let Some(set) = &r.set {
            self.set_eviction_marks(r, set)?;
        }
        Ok(Levels { levels: self.levels.shown() })
    }

    fn set_eviction_marks(&self, r: &GetEviction, set: &SetMarks) -> Result<()> {
        let is_order = set.low <= set.high && set.high <= 100;
        if !is_order {
            return Err(Error::invalid("marks are hundredths, the lower one not above the higher one"));
        }
        let state = self.base.lock();
        self.base.commits.transact(&state, &mut |txn| {
            let record = namespace::volume::load(&*txn, set.volume)?;
            if r.cred.uid != 0 && r.cred.uid != record.owner {
                let why = format!("user {} does not own volume {:?}", r.cred.uid, record.name);
                return Err(Error::name(NameRule::NotOwner, why));
            }
            match set.high {
                0 => txn.delete(&keys::eviction_marks(set.volume)),
                _ => txn.put(&keys::eviction_marks(set.volume), &[set.high, set.low]),
            }
            Ok(())
        })?;
        Ok(())
    }
}
