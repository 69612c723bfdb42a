//! Where data is, as parity targets know it: the next stripe that may have some, and how much there is at
//! most.
use crate::data::Data;
use crate::group::StripeRef;
use crate::join::join_all;
use crate::targets::Pacing;
use weir_env::{BoxFuture, Instant};
use weir_proto::data::NextStripe;
use weir_proto::map::{Layout, MemberState};
use weir_proto::{InodeId, PgId};

/// Stripes, or groups, asked about at once.
pub const STRIPES_AT_ONCE: u64 = 16;
/// Stripes checked in one search; after that the rest is reported as data.
pub const STRIPES_MAX: u64 = 4096;

impl Data {
    /// Upper bound of the data in an object of `size` bytes: cells with data, whole. `None`: it takes too
    /// long to count.
    pub async fn data_bytes(
        &self,
        object: InodeId,
        layout: Layout,
        size: u64,
        deadline: Instant,
    ) -> Option<u64> {
        let (mut bytes, mut stripe) = (0, 0);
        for _ in 0..STRIPES_MAX / STRIPES_AT_ONCE {
            stripe = match self.next_stripe(self.stripe(object, layout, stripe, deadline)).await {
                Some(next) if layout.stripe_start(next) < size => next,
                _ => return Some(bytes),
            };
            let asked = (stripe..stripe + STRIPES_AT_ONCE).map(|s| {
                let s = self.stripe(object, layout, s, deadline);
                Box::pin(self.cells_with_data(s)) as BoxFuture<'_, Vec<bool>>
            });
            let cells = join_all(asked.collect()).await.concat();
            let cell_bytes = u64::from(layout.cell_bytes());
            let begins = |n: usize| layout.stripe_start(stripe) + n as u64 * cell_bytes;
            let with_data = cells.iter().enumerate().filter(|(_, has)| **has);
            bytes += with_data.map(|(n, _)| size.saturating_sub(begins(n)).min(cell_bytes)).sum::<u64>();
            stripe += STRIPES_AT_ONCE;
        }
        None
    }

    /// The first stripe of the file at or after this one that may have data: a parity target of each of its
    /// groups is asked. This one, if none answers.
    pub async fn next_stripe(&self, s: StripeRef) -> Option<u64> {
        if self.needed_map(&s).await.is_err() {
            return Some(s.stripe);
        }
        let (mut found, layout) = (None, s.layout);
        let groups: Vec<PgId> = (0..layout.pg_count).map(|n| PgId(layout.first_pg.0 + n)).collect();
        for some in groups.chunks(STRIPES_AT_ONCE as usize) {
            let asked = some
                .iter()
                .map(|group| Box::pin(self.next_stripe_in(&s, *group)) as BoxFuture<'_, Option<u64>>);
            found = join_all(asked.collect()).await.into_iter().chain([found]).flatten().min();
            if found == Some(s.stripe) {
                break;
            }
        }
        found
    }

    async fn next_stripe_in(&self, s: &StripeRef, group: PgId) -> Option<u64> {
        let scheme = s.layout.scheme;
        loop {
            let Ok(view) = self.view_of(group, scheme) else { return Some(s.stripe) };
            let parity = usize::from(scheme.data)..scheme.width();
            let mut failed = false;
            for at in parity.filter(|at| view.state(*at) == MemberState::Current) {
                let request = NextStripe { place: view.place(at), file: s.file, from_stripe: s.stripe };
                let call = self.targets.call_member(&view, at, &request, vec![], Pacing::Read, s.deadline);
                match call.await {
                    Ok(answer) => return answer.reply.stripe,
                    Err(_) => failed = true,
                }
            }
            if !failed || !self.is_regrouped(&view, s.deadline).await {
                return Some(s.stripe);
            }
        }
    }
}
