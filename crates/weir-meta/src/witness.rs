//! Opens and changes in volumes that are audited: user, operation, place and result. Those of snapshots are
//! not audited.
//!
//! Invariants: in such a volume every open is sent to the leader, because clients have the same rules; a
//! record has the outcome of the operation, not only the request. Knows nothing of how records are stored.
use crate::reach::{Reach, Reaches};
use weir_kv::{Read, SharedKv};
use weir_proto::access::AuditRule;
use weir_proto::glob::fits;
use weir_proto::local_creates::CreateMany;
use weir_proto::meta::{Create, CreateNameless, Open};
use weir_proto::sender::Sender;
use weir_proto::{Error, Request, Result};
use weir_rpc::Connection;

/// An open or a change.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Witnessed {
    pub node: String,
    /// The mount's address.
    pub from: String,
    pub role: Sender,
    /// The user that it named.
    pub uid: Option<u32>,
    /// The request.
    pub what: &'static str,
    /// The volume, and the path in it.
    pub on: String,
    pub error: Option<Error>,
}

/// The sink of the records.
pub type Witness = dyn Fn(Witnessed) + Send + Sync;

/// The place of a request.
pub(crate) struct Found {
    /// The volume's name, and where it was created.
    pub volume: String,
    pub made_at: String,
    /// The path in the volume.
    pub path: String,
}

impl Found {
    fn is_named(&self, rule: &AuditRule) -> bool {
        fits(&rule.volumes, if rule.volumes.starts_with('/') { &self.made_at } else { &self.volume })
    }
}

/// Whether files are opened by this request.
fn opens<R: Request>() -> bool {
    [Open::METHOD, Create::METHOD, CreateNameless::METHOD, CreateMany::METHOD].contains(&R::METHOD)
}

/// Records the outcome of a request, if it was in a volume whose rules ask for that.
pub(crate) fn witness<R: Reaches>(
    kv: &SharedKv,
    (audits, record): (&[AuditRule], &Witness),
    request: &R,
    on: &Connection,
    error: Option<&Error>,
    find: impl Fn(&dyn Read, &Reach<'_>, Option<&[u8]>) -> Result<Option<Found>>,
) -> Result<()> {
    let reached = request.reach();
    let is_recorded = |reach: &&Reach<'_>| opens::<R>() || reach.changes;
    let mut places = Vec::new();
    kv.read(&mut |read| {
        places.clear();
        let many = request.many().into_iter().map(|name| (&reached[0], Some(name)));
        let named = reached.iter().zip(request.names()).filter(|_| many.len() == 0).chain(many.clone());
        let named = named.filter_map(|(reach, name)| Some((reach.as_ref()?, name)));
        for (reach, name) in named.filter(|(reach, _)| is_recorded(reach)) {
            let found = find(read, reach, name)?;
            let asks = |rule: &AuditRule| (rule.opens && opens::<R>()) || (rule.changes && reach.changes);
            places.extend(
                found.filter(|found| audits.iter().find(|rule| found.is_named(rule)).is_some_and(asks)),
            );
        }
        Ok(())
    })?;
    for place in places {
        let proved = on.certificate().map(|certificate| certificate.name.clone());
        record(Witnessed {
            node: proved.unwrap_or_else(|| on.peer().name.clone()),
            from: on.peer_addr().to_owned(),
            role: on.proved().sender(),
            uid: request.cred().map(|cred| cred.uid),
            what: R::NAME,
            on: format!("volume {}: {}", place.volume, place.path),
            error: error.cloned(),
        });
    }
    Ok(())
}
