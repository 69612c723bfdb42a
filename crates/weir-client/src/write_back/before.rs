//! The conditions of a send, met in order before its first byte leaves: one list.
use super::WriteBack;
use super::send::Send;
use crate::data::{STRIPE_PARTS, StripeRef};
use crate::inode::Unresolved;
use crate::plan::SendAs;
use tokio::sync::SemaphorePermit;
use weir_proto::Result;

/// The parts of a stripe's permits that this number of bytes needs; at least one.
fn parts_of(len: u32, stripe_bytes: u64) -> u32 {
    (u64::from(len) * u64::from(STRIPE_PARTS)).div_ceil(stripe_bytes).clamp(1, STRIPE_PARTS.into()) as u32
}

impl WriteBack {
    /// Returns the stripe, with the deadline of this try, and its place among those in flight.
    pub(super) async fn before_first_byte(&self, send: &Send) -> Result<(StripeRef, SemaphorePermit<'_>)> {
        // The leader knows of the file: a local create is reported.
        self.local_names.await_known(&send.inode).await?;
        // The write floor of its volume is known.
        let floor = self.quota.write_floor(&send.inode).await?;
        // The group takes writes. Without a place: stripes of other groups proceed meanwhile.
        if !send.parts.is_empty() {
            self.data.writable_view(&self.stripe_of(send, floor)).await?;
        }
        let place = self.data.flight.enter(parts_in_flight(send)).await;
        let s = self.stripe_of(send, floor);
        // The leader expects uncommitted bytes on targets.
        self.leases.mark(&send.inode).await?;
        // The right to write is the one under which the bytes were written.
        send.inode.check_generation(send.write_generation)?;
        self.settle_leftovers(send, s).await?;
        Ok((s, place))
    }

    fn stripe_of(&self, send: &Send, floor: u8) -> StripeRef {
        let deadline = self.env.clock.now() + send.patience;
        StripeRef { floor, ..self.data.stripe(send.object, send.layout, send.stripe, deadline) }
    }

    /// A failed send has left parts of the stripe at some targets: they are everywhere or nowhere now.
    async fn settle_leftovers(&self, send: &Send, s: StripeRef) -> Result<()> {
        match send.unresolved {
            Some(Unresolved::Fresh) => self.take_back_fresh(send).await?,
            Some(Unresolved::InDoubt(version)) => {
                self.recovery.decide(s, version, self.token_epoch_of(send)).await?;
                self.note_whole(send);
            }
            None => {}
        }
        Ok(())
    }
}

/// Its part of the places in flight.
fn parts_in_flight(send: &Send) -> u32 {
    match send.how {
        SendAs::Fresh { len } => parts_of(len, send.layout.stripe_bytes()),
        SendAs::Empty => 1,
        SendAs::Prepared | SendAs::Merged | SendAs::Overlays => STRIPE_PARTS,
    }
}
