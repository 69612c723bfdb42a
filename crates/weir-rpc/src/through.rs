//! The dialer's side of a connection through another node, while the direct link is cut: the node between
//! passes bytes on ([`crate::passage`]), and the two ends make a connection of their own over them.
//!
//! Invariant: where nodes have certificates, the two ends agree on keys of their own and always encrypt, so
//! the node between reads nothing.
use crate::hello::{First, Greeted, HELLO_PATIENCE, Identity, Line, Peer, introduce, network, start};
use crate::{Connection, Service};
use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use weir_env::{Addr, Env};
use weir_proto::frame::{FrameKind, Through};
use weir_proto::{Error, ErrorKind, Result, Wire};

/// No network is trusted: the ends encrypt.
const ANY_NETWORK: IpAddr = IpAddr::V4(Ipv4Addr::UNSPECIFIED);

/// A node that may pass bytes on to others.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Via {
    pub name: String,
    pub addr: Addr,
}

/// Connects to `node` through another one. Errors as of [`crate::connect`].
pub(crate) async fn connect_through(
    env: &Env,
    via: &Via,
    node: &str,
    identity: &Identity,
    service: Arc<dyn Service>,
) -> Result<Connection> {
    let connected = env.clock.timeout(HELLO_PATIENCE, dial(env, via, node, identity)).await;
    let greeted = connected
        .map_err(|_| Error::unavailable(format!("no answer within {} s", HELLO_PATIENCE.as_secs())))
        .flatten()
        .map_err(|e| e.doing(format_args!("reach {node} through {} at {}", via.name, via.addr)))?;
    Ok(start(env, identity, greeted, service))
}

async fn dial(env: &Env, via: &Via, node: &str, identity: &Identity) -> Result<Greeted> {
    let stream = env.net.connect(&via.addr).await.map_err(|e| Error::unavailable(e.to_string()))?;
    let local_ip = stream.local_ip();
    let mut line = Line::dialed(env, stream.split(), identity, network(&via.addr)).await?;
    line.send(FrameKind::Through, &Through { hello: identity.hello(), node: node.to_owned() }).await?;
    match line.first_frame().await? {
        First { kind: FrameKind::Through, .. } => {}
        First { kind: FrameKind::ErrorResponse, body } => {
            // Another node, or a direct connection, may be possible: no refusal for good.
            return Err(Error::from_bytes(&body)?.of_kind(ErrorKind::Unavailable));
        }
        First { kind, .. } => return Err(Error::invalid(format!("{kind:?} instead of a passage"))),
    }
    let line = Line::dialed(env, line.into_stream()?, identity, Some(ANY_NETWORK)).await?;
    let greeted = introduce(env, line, identity).await?;
    let peer = Peer { addr: via.addr.to_string(), local_ip, via: Some(via.name.clone()), ..greeted.peer };
    Ok(Greeted { peer, ..greeted })
}
