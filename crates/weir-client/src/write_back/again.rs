//! A send that has failed: again after a pause, or its data is lost. The decision is [`crate::patience`]'s.
use super::WriteBack;
use super::send::Send;
use crate::data::StripeRef;
use crate::inode::Inode;
use crate::patience::{self, Failed, Then};
use bytes::Bytes;
use std::time::Duration;
use weir_env::{Backoff, Retry};
use weir_proto::Result;
use weir_proto::map::Layout;

/// Pauses between tries to send changed data whose servers live. Each try has retried its calls for the whole
/// patience of the mount, or was refused: the longest pause is the time after which the servers are idle
/// again.
const SEND_RETRY: Backoff = Backoff { first: Duration::from_millis(100), max: Duration::from_secs(5) };

impl WriteBack {
    /// Until it is done, or its data is lost: see [`patience::after`]. The data stays dirty meanwhile.
    pub(super) async fn send_patiently(&self, send: &mut Send) -> Result<()> {
        let begun = self.env.clock.now();
        let mut retry = Retry::jittered(&self.env, SEND_RETRY, begun);
        loop {
            let Err(e) = self.send_until_not_fenced(send).await else { return Ok(()) };
            let s = self.data.stripe(send.object, send.layout, send.stripe, self.leader.deadline());
            let s = StripeRef { floor: self.quota.write_floor(&send.inode).await.unwrap_or(0), ..s };
            self.data.ask_silent_members(&s).await;
            let failed = Failed {
                kind: e.kind,
                is_lost: self.data.is_lost_for_good(&s),
                silent: self.data.silent_for(&s, begun).max(self.leader.silent_for(begun)),
                since: self.env.clock.now().since(begun),
                patience: self.config.patience,
            };
            let is_mine = send.inode.check_generation(send.write_generation).is_ok();
            if !is_mine || patience::after(&failed) == Then::Lost {
                return Err(e);
            }
            send.patience = patience::of_next_try(&failed);
            tracing::debug!("{s}: not written yet, it is tried again: {e}");
            let what = format!("targets of {}, to write changed data", s.layout.pg_of_stripe(s.stripe));
            let _waiting = self.data.waits.begin(what);
            let version = self.data.cluster.map().version;
            let _ = self.data.cluster.wait_newer(version, retry.next_pause()).await; // it is tried again either way
            send.unresolved = send.inode.lock().write.unresolved_of(send.stripe);
        }
    }
}

/// The changed bytes of a send, for messages.
pub(super) fn lost_part(inode: &Inode, layout: Layout, stripe: u64, parts: &[(u32, Bytes)]) -> String {
    let start = layout.stripe_start(stripe);
    let first = parts.first().map_or(0, |(at, _)| *at);
    let end = parts.last().map_or(0, |(at, bytes)| at + bytes.len() as u32);
    let (first, end) = (start + u64::from(first), start + u64::from(end));
    let parts = if parts.len() > 1 { format!(", in {} parts", parts.len()) } else { String::new() };
    format!("file {}, bytes {first} to {end}{parts}", inode.ino)
}
