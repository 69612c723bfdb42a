//! Opens and changes in volumes that are audited: who did what where, with which result. Snapshots are not
//! among them.
//!
//! Invariants: in such a volume every open comes to the leader, as clients see the same rules; what is told is
//! what came of the operation, not what was asked. Knows nothing of how it is kept.
use crate::executor::Leader;
use crate::namespace::path::Paths;
use crate::namespace::{admit, volume};
use crate::ops::Operation;
use crate::reach::Reach;
use std::sync::Arc;
use weir_kv::Read;
use weir_proto::access::AuditRule;
use weir_proto::glob::fits;
use weir_proto::meta::{Create, CreateNameless, Open};
use weir_proto::sender::Sender;
use weir_proto::{Error, Request, Result};
use weir_rpc::Connection;

/// An open or a change.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Witnessed {
    pub node: String,
    /// Where it connects from.
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

/// What is done with them.
pub type Witness = dyn Fn(Witnessed) + Send + Sync;

/// Whether files are opened by this request.
fn opens<R: Request>() -> bool {
    [Open::METHOD, Create::METHOD, CreateNameless::METHOD].contains(&R::METHOD)
}

/// Tells what came of a request, if it was in a volume whose rules ask for that.
pub(crate) fn witness<R: Operation>(
    leader: &Leader,
    audits: &[AuditRule],
    request: &R,
    on: &Connection,
    error: Option<&Error>,
) {
    let reached = request.reach();
    let is_told = |reach: &&Reach<'_>| opens::<R>() || reach.changes;
    let mut places = Vec::new();
    let looked = leader.kv.read(&mut |read| {
        places.clear();
        for reach in reached.iter().flatten().filter(is_told) {
            places.extend(place_in(read, audits, reach, opens::<R>(), request.name())?);
        }
        Ok(())
    });
    if let Err(e) = looked {
        return leader.fail(&e.doing("look at what is audited"));
    }
    for place in places {
        (leader.config.witness)(Witnessed {
            node: on
                .certificate()
                .map_or_else(|| on.peer().name.clone(), |certificate| certificate.name.clone()),
            from: on.peer_addr().to_owned(),
            role: on.proved().sender(),
            uid: request.cred().map(|cred| cred.uid),
            what: R::NAME,
            on: place,
            error: error.cloned(),
        });
    }
}

/// The volume and the path of a place, if the rules ask for it.
fn place_in(
    read: &dyn Read,
    audits: &[AuditRule],
    reach: &Reach<'_>,
    is_open: bool,
    name: Option<&[u8]>,
) -> Result<Option<String>> {
    let Some((id, ino)) = admit::volume_and_inode(read, reach.place)? else { return Ok(None) };
    let Some(volume) = volume::find(read, id)? else { return Ok(None) };
    let path = String::from_utf8_lossy(&volume.path);
    let names = |rule: &&AuditRule| {
        fits(&rule.volumes, if rule.volumes.starts_with('/') { &path } else { &volume.name })
    };
    let asks = |rule: &AuditRule| (rule.opens && is_open) || (rule.changes && reach.changes);
    if !audits.iter().find(names).is_some_and(asks) {
        return Ok(None);
    }
    let below = Paths::new(read, volume.root).of(ino)?;
    let below =
        below.map_or_else(|| format!("inode {ino}"), |path| String::from_utf8_lossy(&path).into_owned());
    let name = name.map(|name| format!("/{}", String::from_utf8_lossy(name))).unwrap_or_default();
    Ok(Some(format!("volume {}: {}", volume.name, format!("{below}{name}").trim_start_matches('/'))))
}

/// The rules of the cluster map, and who hears of what they ask for.
pub(crate) type Audits = Arc<Vec<AuditRule>>;
