//! The first frames: both ends identify themselves and refuse peers that they must not talk to.
//!
//! Over a network a handshake precedes them if nodes have certificates; then the peer's hello must match its
//! certificate. Before its hello is accepted, a listener learns nothing else of a caller, and does nothing
//! for it.
use crate::connection::wire_error;
use crate::incoming::{Arriving, Begin, Incoming, lost};
use crate::outgoing::Outgoing;
use crate::passage::{Destinations, Passage, onward};
use crate::trust::{Live, Trust};
use crate::{Connection, Service};
use std::fmt;
use std::net::IpAddr;
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tokio::io::AsyncWriteExt;
use weir_env::{Addr, BoxReader, BoxStream, BoxWriter, Caller, Env};
use weir_proto::frame::{FrameKind, HEADER_BYTES, Header, Hello, Through, check_hello};
use weir_proto::map::Role;
use weir_proto::methods::Method;
use weir_proto::sender::Sender;
use weir_proto::version::Program;
use weir_proto::{ClusterId, Error, ErrorKind, Result, Wire};
use weir_trust::certificate::Certificate;
use weir_trust::frames::FrameKey;
use weir_trust::handshake::Agreed;

/// How long a peer may take to connect, and to send its hello.
pub const HELLO_PATIENCE: Duration = Duration::from_secs(5);

/// This node's identity towards peers. Clones share the cluster id: once known it holds for all of them.
#[derive(Clone)]
pub struct Identity {
    pub name: String,
    pub role: Role,
    /// Differs after each start of the process.
    pub instance: u64,
    cluster: Arc<OnceLock<ClusterId>>,
    program: Program,
    /// Absent in a cluster without certificates.
    trust: Option<Arc<Trust>>,
}

impl Identity {
    /// `cluster`: `None` while this node is not a member of one.
    pub fn new(env: &Env, name: impl Into<String>, role: Role, cluster: Option<ClusterId>) -> Identity {
        let identity = Identity {
            name: name.into(),
            role,
            instance: env.rng.next_u64(),
            cluster: Arc::default(),
            program: Program::this(),
            trust: None,
        };
        if let Some(cluster) = cluster {
            identity.join(cluster);
        }
        identity
    }
    /// The versions of its program.
    pub fn program(&self) -> Program {
        self.program.clone()
    }
    /// A node with another program, for tests.
    pub fn with(self, program: Program) -> Identity {
        Identity { program, ..self }
    }
    /// A node that has a certificate for networks, and requires one from peers.
    pub fn trusting(self, trust: Option<Arc<Trust>>) -> Identity {
        Identity { trust, ..self }
    }
    /// Ends the connection when its peer is removed from the cluster.
    pub(crate) fn watch(&self, connection: &Connection) {
        let (Some(trust), Some(certificate)) = (&self.trust, connection.certificate()) else { return };
        let (seen, ended) = (connection.downgrade(), connection.downgrade());
        trust.watch(Live {
            certificate: certificate.clone(),
            lives: Box::new(move || seen.upgrade().is_some()),
            close: Box::new(move |why| {
                if let Some(connection) = ended.upgrade() {
                    connection.close(why);
                }
            }),
        });
    }
    pub fn trust(&self) -> Option<&Arc<Trust>> {
        self.trust.as_ref()
    }
    pub fn cluster(&self) -> Option<ClusterId> {
        self.cluster.get().copied()
    }
    /// From now on this node refuses peers of other clusters. The first cluster stays; false if this is
    /// another one.
    pub fn join(&self, cluster: ClusterId) -> bool {
        *self.cluster.get_or_init(|| cluster) == cluster
    }
    pub(crate) fn hello(&self) -> Hello {
        Hello {
            version_min: self.program.version_min,
            version_max: self.program.version_max,
            level: self.program.level,
            cluster: self.cluster(),
            name: self.name.clone(),
            role: self.role,
            instance: self.instance,
        }
    }
}

/// The verified identity of the other end: services decide by it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Proved {
    /// A node of the cluster, by its certificate; or, by a Unix socket, root or the user that this process
    /// runs as, which may act as any node. In a cluster without certificates the role is the one that the
    /// peer claims.
    Node(Role),
    /// Another user of this machine, connected by a Unix socket, as reported by the kernel; or a user of a
    /// mount's machine, as reported by the mount. Has the rights of that user and no other, regardless of the
    /// credentials in requests.
    User(u32),
    /// A machine without a certificate, over a network that requires one.
    Stranger,
}

impl Proved {
    /// For `guest` see [`weir_env::Caller`].
    fn of(claimed: &Hello, guest: Option<u32>, way: &Way) -> Result<Proved> {
        match (guest, way) {
            (Some(uid), _) => Ok(Proved::User(uid)),
            (None, Way::Open) => Ok(Proved::Node(claimed.role)),
            (None, Way::Protected(None)) => Ok(Proved::Stranger),
            (None, Way::Protected(Some(certificate))) => {
                certificate.check_claims(claimed.cluster, &claimed.name, claimed.role)?;
                Ok(Proved::Node(claimed.role))
            }
        }
    }
    pub fn role(self) -> Option<Role> {
        match self {
            Proved::Node(role) => Some(role),
            Proved::User(_) | Proved::Stranger => None,
        }
    }
    pub fn sender(self) -> Sender {
        match self {
            Proved::Node(role) => role.into(),
            Proved::User(_) => Sender::User,
            Proved::Stranger => Sender::Stranger,
        }
    }
    /// Refuses a method that this sender may not use. `peer`: for the message.
    pub fn check(self, method: &Method, peer: &dyn fmt::Display) -> Result<()> {
        if method.by.has(self.sender()) {
            return Ok(());
        }
        let what = format!("{}, method {}", method.name, method.number);
        Err(match self {
            Proved::Node(_) => {
                let who = self.sender().to_string();
                let article = if who.starts_with(['a', 'o']) { "an" } else { "a" };
                Error::denied(format!("{peer} is {article} {who}, which may not send {what}"))
            }
            Proved::Stranger => Error::denied(format!("a machine without a certificate may not send {what}"))
                .hint("join it to the cluster (`weir join`)"),
            Proved::User(uid) => Error::denied(format!(
                "user {uid} may not do that here: files are used through a mount, and the rest is for root \
                 or the user who runs the servers"
            )),
        })
    }
}

/// The other end.
pub(crate) struct Peer {
    /// Its hello.
    pub claimed: Hello,
    pub proved: Proved,
    /// Its certificate.
    pub certificate: Option<Certificate>,
    /// The agreed protocol version.
    pub version: u16,
    /// Its address.
    pub addr: String,
    /// Its IP address, if it is connected over a network.
    pub ip: Option<IpAddr>,
    /// This machine's address on the connection; `None`: there is none.
    pub local_ip: Option<IpAddr>,
    /// The node that passes the bytes on, if the connection is not a direct one.
    pub via: Option<String>,
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at {}", self.claimed.name, self.addr)?;
        self.via.iter().try_for_each(|via| write!(f, " through {via}"))
    }
}

/// Connects and exchanges hellos; `service` answers the peer's calls back. `Denied` or `Unsupported` when one
/// of the two refuses the other, else `Unavailable`.
pub async fn connect(
    env: &Env,
    addr: &Addr,
    identity: &Identity,
    service: Arc<dyn Service>,
) -> Result<Connection> {
    let connected = env.clock.timeout(HELLO_PATIENCE, dial(env, addr, identity)).await;
    let (greeted, local_ip) = connected
        .map_err(|_| Error::unavailable(format!("no answer within {} s", HELLO_PATIENCE.as_secs())))
        .flatten()
        .map_err(|e| e.doing(format_args!("connect to {addr}")))?;
    let ip = match addr {
        Addr::Tcp(at) => Some(at.ip().to_canonical()),
        Addr::Unix(_) | Addr::Host(..) => None,
    };
    let peer = Peer { addr: addr.to_string(), ip, local_ip, ..greeted.peer };
    Ok(start(env, identity, Greeted { peer, ..greeted }, service))
}

/// Starts to serve a connection of the dialer.
pub(crate) fn start(
    env: &Env,
    identity: &Identity,
    greeted: Greeted,
    service: Arc<dyn Service>,
) -> Connection {
    let Greeted { peer, incoming, outgoing } = greeted;
    let keep = |connection: &Connection| identity.watch(connection);
    Connection::start(env, peer, incoming, outgoing, service, None, keep)
}

/// A connection after its hello.
pub(crate) struct Greeted {
    pub peer: Peer,
    pub incoming: Incoming,
    pub outgoing: Outgoing,
}

/// How the two ends are connected.
enum Way {
    /// By a Unix socket, or without certificates.
    Open,
    /// Over a network, with keys known only to the two ends. None: the dialer presented no certificate.
    Protected(Option<Certificate>),
}

/// Both directions of a connection before its frames have users.
pub(crate) struct Line {
    incoming: Incoming,
    writer: BoxWriter,
    way: Way,
    key: Option<FrameKey>,
}

impl Line {
    fn new(incoming: Incoming, writer: BoxWriter) -> Line {
        Line { incoming, writer, way: Way::Open, key: None }
    }
    /// The dialer's end of a stream; with a handshake if it leads over a network, where its keys depend on
    /// the peer's address.
    pub async fn dialed(
        env: &Env,
        (reader, writer): (BoxReader, BoxWriter),
        identity: &Identity,
        network: Option<IpAddr>,
    ) -> Result<Line> {
        let mut line = Line::new(Incoming::new(env, reader, Arriving::new()), writer);
        if let (Some(trust), Some(ip)) = (&identity.trust, network) {
            let agreed = trust.dial(ip, &mut line.incoming, &mut line.writer).await?;
            line.protect(agreed)?;
        }
        Ok(line)
    }
    /// The stream for other users, when nothing is on the way.
    pub fn into_stream(self) -> Result<(BoxReader, BoxWriter)> {
        Ok((self.incoming.into_reader()?, self.writer))
    }
    /// From now on frames are protected; a refusal is already sent in a protected frame.
    fn protect(&mut self, agreed: Agreed) -> Result<()> {
        self.incoming.protect(agreed.keys.receive);
        self.key = Some(agreed.keys.send);
        self.way = Way::Protected(agreed.peer?);
        Ok(())
    }
    fn greeted(self, env: &Env, claimed: Hello, guest: Option<u32>, version: u16) -> Result<Greeted> {
        let Line { mut incoming, writer, way, key } = self;
        incoming.agree(version);
        let proved = Proved::of(&claimed, guest, &way)?;
        let certificate = match way {
            Way::Protected(certificate) => certificate,
            Way::Open => None,
        };
        let peer = Peer {
            claimed,
            proved,
            certificate,
            version,
            addr: String::new(),
            ip: None,
            local_ip: None,
            via: None,
        };
        Ok(Greeted { peer, incoming, outgoing: Outgoing::new(env, writer, version, key) })
    }

    /// A frame of a kind without bulk data: an unknown peer gets no large buffer.
    pub async fn first_frame(&mut self) -> Result<First> {
        let Some((header, bytes)) = self.incoming.header().await? else {
            return Err(Error::unavailable("the peer closed the connection before its hello"));
        };
        if matches!(header.kind, FrameKind::Request | FrameKind::Response) {
            return Err(Error::invalid(format!("{:?} before a hello", header.kind)));
        }
        let frame = self.incoming.rest(header, &bytes).await?;
        Ok(First { kind: header.kind, body: frame.body })
    }

    pub async fn send(&mut self, kind: FrameKind, body: &impl Wire) -> Result<()> {
        let body = body.to_bytes();
        let header = Header { body_len: body.len() as u32, ..Header::new(kind, 0) };
        header.check_sizes()?;
        let mut frame = Vec::with_capacity(HEADER_BYTES + body.len());
        frame.extend_from_slice(&header.encode(&body));
        frame.extend_from_slice(&body);
        if let Some(key) = &mut self.key {
            let tag = key.seal(&mut frame);
            frame.extend_from_slice(&tag);
        }
        self.writer.write_all(&frame).await.map_err(|e| lost(&e))?;
        self.writer.flush().await.map_err(|e| lost(&e))
    }
}

async fn dial(env: &Env, addr: &Addr, identity: &Identity) -> Result<(Greeted, Option<IpAddr>)> {
    let stream = env.net.connect(addr).await.map_err(|e| Error::unavailable(e.to_string()))?;
    let local_ip = stream.local_ip();
    let line = Line::dialed(env, stream.split(), identity, network(addr)).await?;
    introduce(env, line, identity).await.map(|greeted| (greeted, local_ip))
}

/// The peer's address if a network leads there.
pub(crate) fn network(addr: &Addr) -> Option<IpAddr> {
    match addr {
        Addr::Tcp(at) => Some(at.ip()),
        Addr::Unix(_) | Addr::Host(..) => None,
    }
}

/// The dialer's hello, and the peer's.
pub(crate) async fn introduce(env: &Env, mut line: Line, identity: &Identity) -> Result<Greeted> {
    line.send(FrameKind::Hello, &identity.hello()).await?;
    let hello = match line.first_frame().await? {
        First { kind: FrameKind::HelloAck, body } => Hello::read(&body)?,
        First { kind: FrameKind::ErrorResponse, body } => {
            return Err(Error::from_bytes(&body)?.doing("refused by the peer"));
        }
        First { kind, .. } => return Err(Error::invalid(format!("{kind:?} instead of a hello"))),
    };
    let checked = check_hello(&identity.hello(), &hello)
        .and_then(|version| Proved::of(&hello, None, &line.way).map(|_| version));
    match checked {
        Ok(version) => line.greeted(env, hello, None, version),
        Err(e) => {
            let _ = line.send(FrameKind::Goodbye, &wire_error(&e)).await; // it is refused either way
            Err(e.doing("refused by this node"))
        }
    }
}

/// The node that a caller meant.
pub(crate) enum Welcomed {
    This(Greeted),
    /// Another node: the two streams.
    Another(Passage),
}

/// The listener's side. On an error the peer has been sent the reason if possible.
pub(crate) async fn welcome(
    env: &Env,
    stream: BoxStream,
    (identity, destinations): (&Identity, Option<&Destinations>),
    arriving: Arriving,
    caller: &Caller,
    service: &dyn Service,
) -> Result<Welcomed> {
    let (reader, writer) = stream.split();
    let mut line = Line::new(Incoming::new(env, reader, arriving), writer);
    let greeting = async {
        if let (Some(trust), Some(ip)) = (&identity.trust, caller.ip) {
            accept(&mut line, trust, ip).await?;
        }
        let Introduced { hello, version, meant } = caller_hello(&mut line, identity).await?;
        let proved = Proved::of(&hello, caller.guest, &line.way)?;
        if let Some(node) = meant {
            let Proved::Node(_) = proved else {
                return Err(Error::denied("bytes are passed on for nodes of the cluster only"));
            };
            let far = onward(env, destinations, &node).await?;
            line.send(FrameKind::Through, &()).await?;
            return Ok((hello, version, Some(far)));
        }
        match proved {
            Proved::User(uid) if !service.admits_guests() => Err(Error::denied(format!(
                "user {uid} of this machine may not connect to {}: only root and the user who runs it may",
                identity.name
            ))),
            Proved::Stranger if !service.admits_strangers() => Err(no_certificate(&identity.name)),
            _ => line.send(FrameKind::HelloAck, &identity.hello()).await.map(|()| (hello, version, None)),
        }
    };
    let greeted = env.clock.timeout(HELLO_PATIENCE, greeting).await;
    let greeted = greeted.unwrap_or_else(|_| {
        Err(Error::unavailable(format!("no hello within {} s", HELLO_PATIENCE.as_secs())))
    });
    match greeted {
        Ok((hello, version, None)) => line.greeted(env, hello, caller.guest, version).map(Welcomed::This),
        Ok((_, _, Some(far))) => line.into_stream().map(|near| Welcomed::Another(Passage { near, far })),
        Err(e) => {
            let words = wire_error(&e);
            let goodbye = line.send(FrameKind::ErrorResponse, &words);
            let _ = env.clock.timeout(HELLO_PATIENCE, goodbye).await; // it is refused either way
            Err(e)
        }
    }
}

/// The handshake, for a listener that accepts nothing else.
async fn accept(line: &mut Line, trust: &Trust, ip: IpAddr) -> Result<()> {
    match line.incoming.begin().await? {
        Begin::Handshake(first) => {
            let agreed = trust.accept(ip, &first, &mut line.incoming, &mut line.writer).await?;
            line.protect(agreed)
        }
        Begin::Frame => Err(no_certificate("this node")),
    }
}

fn no_certificate(node: &str) -> Error {
    Error::denied(format!("{node} takes only nodes that have a certificate of the cluster"))
        .hint("join this machine to it (`weir join`)")
}

struct Introduced {
    hello: Hello,
    version: u16,
    /// The name of the node that it means, if that is another one.
    meant: Option<String>,
}

async fn caller_hello(line: &mut Line, identity: &Identity) -> Result<Introduced> {
    let (hello, meant) = match line.first_frame().await? {
        First { kind: FrameKind::Hello, body } => (Hello::read(&body)?, None),
        First { kind: FrameKind::Through, body } => {
            let Through { hello, node } = Through::from_bytes(&body)?;
            (hello, Some(node))
        }
        First { kind, .. } => return Err(Error::invalid(format!("{kind:?} instead of a hello"))),
    };
    let version = check_hello(&identity.hello(), &hello)?;
    Ok(Introduced { hello, version, meant })
}

pub(crate) struct First {
    pub kind: FrameKind,
    pub body: bytes::Bytes,
}

/// Whether a refusal is permanent until an administrator changes something.
pub(crate) fn is_refusal(e: &Error) -> bool {
    matches!(e.kind, ErrorKind::Denied | ErrorKind::Unsupported)
}

#[cfg(test)]
mod tests {
    use super::*;
    use weir_proto::methods;

    #[test]
    fn a_user_of_the_machine_cannot_claim_another_id() {
        for role in Role::ALL {
            let name = "n".to_owned();
            let claimed = Hello {
                version_min: 1,
                version_max: 1,
                level: 1,
                cluster: None,
                name,
                role: *role,
                instance: 1,
            };
            let of = |guest| Proved::of(&claimed, guest, &Way::Open).unwrap();
            let (user, node) = (of(Some(1000)), of(None));
            assert_eq!(Proved::of(&claimed, None, &Way::Protected(None)), Ok(Proved::Stranger));
            assert_eq!((user.role(), node.role()), (None, Some(*role)));
            for method in methods::all() {
                assert_eq!(user.check(method, &"n").is_ok(), method.by.has(Sender::User), "{}", method.name);
                assert_eq!(
                    node.check(method, &"n").is_ok(),
                    method.by.has((*role).into()),
                    "{}",
                    method.name
                );
            }
        }
        let clear = methods::find(9).unwrap();
        let claimed_nothing = Proved::User(1000).check(clear, &"n").unwrap_err();
        assert_eq!(claimed_nothing.kind, ErrorKind::Denied);
        assert!(claimed_nothing.context.contains("user 1000 may not do that here"));
    }
}
