//! A session's holdings, for administrators.
use super::{LeaseTable, Opens};
use weir_proto::SessionId;
use weir_proto::meta::LeaseKind;

/// Counts of files and directories.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub struct Holdings {
    pub open: u32,
    pub open_to_write: u32,
    pub leases: u32,
    pub write_leases: u32,
    /// Leases of it that other clients wait for.
    pub awaited: u32,
}

impl LeaseTable {
    pub fn holdings_of(&self, session: SessionId) -> Holdings {
        let mut all = Holdings::default();
        for ino in self.of_session.get(&session).into_iter().flatten() {
            let Some((state, mine)) = self.states.get(ino).and_then(|s| Some((s, s.get(session)?))) else {
                continue;
            };
            all.open += u32::from(mine.opens != Opens::default());
            all.open_to_write += u32::from(mine.opens.write > 0);
            all.leases += u32::from(mine.kind != LeaseKind::None);
            all.write_leases += u32::from(mine.kind == LeaseKind::Write);
            all.awaited += u32::from(mine.revoking || (state.parked > 0 && mine.kind != LeaseKind::None));
        }
        all
    }
}
