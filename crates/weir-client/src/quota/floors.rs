//! Write floors: the fewest current members of a placement group with which a volume takes writes.
//!
//! A write is sent under an epoch of its group that has enough of them. Targets refuse other epochs than
//! their own, so no write is acknowledged that began with too few, even if this client's map is old.
//! Knows nothing of groups: `data` compares.
use super::Quota;
use crate::inode::Inode;
use std::time::Duration;
use weir_env::Instant;
use weir_proto::volume::GetWriteFloors;
use weir_proto::{Error, ErrorKind, Result, VolumeId};

/// A change of a floor is known after this time. Only writers of volumes with floors or limits ask.
const FRESH: Duration = Duration::from_secs(5);
/// While the leader does not answer the last known floors apply.
const ASK_PATIENCE: Duration = Duration::from_secs(1);

impl Quota {
    /// The write floor of a file's volume; 0: none.
    pub async fn write_floor(&self, inode: &Inode) -> Result<u8> {
        let volume = inode.lock().quota.ruled_by();
        if volume == VolumeId(0) {
            return Ok(0);
        }
        let floors = &self.floors;
        let is_fresh = |at: Instant| self.env.clock.now().since(at) < FRESH;
        if let Some((_, floor)) = floors.of(volume).filter(|(at, _)| is_fresh(*at)) {
            return Ok(floor);
        }
        let _one = floors.asking.lock().await;
        let known = floors.of(volume);
        if let Some((_, floor)) = known.filter(|(at, _)| is_fresh(*at)) {
            return Ok(floor);
        }
        let ask = self.leader.ask(|session| GetWriteFloors { session });
        let answered = match known {
            Some(_) => self.env.clock.timeout(ASK_PATIENCE, ask).await.unwrap_or_else(|_| Err(silent())),
            None => ask.await,
        };
        let now = self.env.clock.now();
        match (answered, known) {
            (Ok(answer), _) => floors.note(now, answer.floors),
            // A leader of an older release knows none.
            (Err(e), _) if e.kind == ErrorKind::Unsupported => floors.note(now, Vec::new()),
            (Err(e), None) => return Err(e),
            (Err(_), Some((_, floor))) => return Ok(floor),
        }
        Ok(floors.of(volume).map_or(0, |(_, floor)| floor))
    }
}

fn silent() -> Error {
    Error::unavailable("the metadata leader does not answer")
}
