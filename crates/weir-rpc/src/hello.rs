//! The first frames: both ends say who they are and refuse whom they must not talk to.
//!
//! A listener learns nothing else of a caller, and does nothing for it, before its hello was accepted.
use crate::connection::wire_error;
use crate::incoming::{Arriving, Incoming, lost};
use crate::outgoing::Outgoing;
use crate::{Connection, Service};
use std::fmt;
use std::net::IpAddr;
use std::sync::{Arc, OnceLock};
use std::time::Duration;
use tokio::io::AsyncWriteExt;
use weir_env::{Addr, BoxStream, BoxWriter, Env};
use weir_proto::frame::{FrameKind, Header, Hello, check_hello};
use weir_proto::map::Role;
use weir_proto::methods::Method;
use weir_proto::sender::Sender;
use weir_proto::version::Program;
use weir_proto::{ClusterId, Error, ErrorKind, Result, Wire};

/// How long a peer may take to connect, and to say hello.
pub const HELLO_PATIENCE: Duration = Duration::from_secs(5);

/// Who this node is, to its peers. Clones share the cluster id: once known it holds for all of them.
#[derive(Clone, Debug)]
pub struct Identity {
    pub name: String,
    pub role: Role,
    /// Differs after each start of the process.
    pub instance: u64,
    cluster: Arc<OnceLock<ClusterId>>,
    program: Program,
}

impl Identity {
    /// `cluster`: `None` as long as this node is not a member of one.
    pub fn new(env: &Env, name: impl Into<String>, role: Role, cluster: Option<ClusterId>) -> Identity {
        let identity = Identity {
            name: name.into(),
            role,
            instance: env.rng.next_u64(),
            cluster: Arc::default(),
            program: Program::this(),
        };
        if let Some(cluster) = cluster {
            identity.join(cluster);
        }
        identity
    }
    /// What its program can.
    pub fn program(&self) -> Program {
        self.program.clone()
    }
    /// As a node with another program, for tests.
    pub fn with(self, program: Program) -> Identity {
        Identity { program, ..self }
    }
    pub fn cluster(&self) -> Option<ClusterId> {
        self.cluster.get().copied()
    }
    /// From now on this node refuses peers of other clusters. The first cluster stays; false if that is another one.
    pub fn join(&self, cluster: ClusterId) -> bool {
        *self.cluster.get_or_init(|| cluster) == cluster
    }
    fn hello(&self) -> Hello {
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

/// Who the other end is, as far as that is known: what services decide by. Today a role is what the peer
/// claims.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Proved {
    /// A node of the cluster, or whoever may act as any: root and the user that this process runs as, by a
    /// Unix socket.
    Node(Role),
    /// Another user of this machine, who connected by a Unix socket, as the kernel says: has the rights of
    /// that user and no other, whatever its requests say.
    User(u32),
}

impl Proved {
    /// By `guest` see [`weir_env::Caller`].
    pub(crate) fn of(claimed: &Hello, guest: Option<u32>) -> Proved {
        guest.map_or(Proved::Node(claimed.role), Proved::User)
    }
    pub fn role(self) -> Option<Role> {
        match self {
            Proved::Node(role) => Some(role),
            Proved::User(_) => None,
        }
    }
    pub fn sender(self) -> Sender {
        match self {
            Proved::Node(role) => role.into(),
            Proved::User(_) => Sender::User,
        }
    }
    /// Refuses a method that is not for this sender. `peer`: for the words.
    pub fn check(self, method: &Method, peer: &dyn fmt::Display) -> Result<()> {
        if method.by.has(self.sender()) {
            return Ok(());
        }
        let what = format!("{}, method {}", method.name, method.number);
        Err(Error::denied(match self {
            Proved::Node(_) => format!("{peer} is a {}, which may not send {what}", self.sender()),
            Proved::User(uid) => format!(
                "user {uid} may not do that here ({what}): use a mount, or ask root or the user who runs the servers"
            ),
        }))
    }
}

/// The other end.
pub(crate) struct Peer {
    /// What it said.
    pub claimed: Hello,
    pub proved: Proved,
    /// Of the protocol, which was agreed on.
    pub version: u16,
    /// Where it is.
    pub addr: String,
    /// By which address of this machine it is reached, or reaches it; `None`: not by one.
    pub local_ip: Option<IpAddr>,
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at {}", self.claimed.name, self.addr)
    }
}

/// Connects and says hello; `service` answers the peer's calls back. `Denied` or `Unsupported` when one of the two
/// refuses the other, else `Unavailable`.
pub async fn connect(
    env: &Env,
    addr: &Addr,
    identity: &Identity,
    service: Arc<dyn Service>,
) -> Result<Connection> {
    let connected = env.clock.timeout(HELLO_PATIENCE, dial(env, addr, identity)).await;
    let (Greeted { hello, version, incoming, writer }, local_ip) = connected
        .map_err(|_| Error::unavailable(format!("no answer within {} s", HELLO_PATIENCE.as_secs())))
        .flatten()
        .map_err(|e| e.doing(format_args!("connect to {addr}")))?;
    let (proved, claimed) = (Proved::of(&hello, None), hello);
    let peer = Peer { claimed, proved, version, addr: addr.to_string(), local_ip };
    Ok(Connection::start(env, peer, incoming, Outgoing::new(writer, version), service, None, |_| {}))
}

/// A connection that is through its hello.
pub(crate) struct Greeted {
    pub hello: Hello,
    pub version: u16,
    pub incoming: Incoming,
    pub writer: BoxWriter,
}

async fn dial(env: &Env, addr: &Addr, identity: &Identity) -> Result<(Greeted, Option<IpAddr>)> {
    let stream = env.net.connect(addr).await.map_err(|e| Error::unavailable(e.to_string()))?;
    let local_ip = stream.local_ip();
    let (reader, mut writer) = stream.split();
    let mut incoming = Incoming::new(env, reader, Arriving::new());
    send(&mut writer, FrameKind::Hello, &identity.hello()).await?;
    let answer = first_frame(&mut incoming).await?;
    let hello = match answer {
        First { kind: FrameKind::HelloAck, body } => Hello::read(&body)?,
        First { kind: FrameKind::ErrorResponse, body } => {
            return Err(Error::from_bytes(&body)?.doing("refused by the peer"));
        }
        First { kind, .. } => return Err(Error::invalid(format!("{kind:?} instead of a hello"))),
    };
    match check_hello(&identity.hello(), &hello) {
        Ok(version) => {
            incoming.agree(version);
            Ok((Greeted { hello, version, incoming, writer }, local_ip))
        }
        Err(e) => {
            let _ = send(&mut writer, FrameKind::Goodbye, &wire_error(&e)).await; // it is refused either way
            Err(e.doing("refused by this node"))
        }
    }
}

/// The listener's side. On an error the peer has been told the reason as far as possible.
pub(crate) async fn welcome(
    env: &Env,
    stream: BoxStream,
    identity: &Identity,
    arriving: Arriving,
    guest: Option<u32>,
) -> Result<Greeted> {
    let (reader, mut writer) = stream.split();
    let mut incoming = Incoming::new(env, reader, arriving);
    let greeting = async {
        let (hello, version) = caller_hello(&mut incoming, identity).await?;
        if let Some(uid) = guest {
            return Err(Error::denied(format!(
                "user {uid} of this machine may not connect to {}: only root and the user who runs it may",
                identity.name
            )));
        }
        send(&mut writer, FrameKind::HelloAck, &identity.hello()).await?;
        Ok((hello, version))
    };
    let greeted = env.clock.timeout(HELLO_PATIENCE, greeting).await;
    match greeted.unwrap_or_else(|_| {
        Err(Error::unavailable(format!("no hello within {} s", HELLO_PATIENCE.as_secs())))
    }) {
        Ok((hello, version)) => {
            incoming.agree(version);
            Ok(Greeted { hello, version, incoming, writer })
        }
        Err(e) => {
            let words = wire_error(&e);
            let goodbye = send(&mut writer, FrameKind::ErrorResponse, &words);
            let _ = env.clock.timeout(HELLO_PATIENCE, goodbye).await; // it is refused either way
            Err(e)
        }
    }
}

async fn caller_hello(incoming: &mut Incoming, identity: &Identity) -> Result<(Hello, u16)> {
    match first_frame(incoming).await? {
        First { kind: FrameKind::Hello, body } => {
            let hello = Hello::read(&body)?;
            let version = check_hello(&identity.hello(), &hello)?;
            Ok((hello, version))
        }
        First { kind, .. } => Err(Error::invalid(format!("{kind:?} instead of a hello"))),
    }
}

struct First {
    kind: FrameKind,
    body: bytes::Bytes,
}

/// A frame of a kind that has no bulk: a stranger gets no large buffer.
async fn first_frame(incoming: &mut Incoming) -> Result<First> {
    let Some((header, bytes)) = incoming.header().await? else {
        return Err(Error::unavailable("the peer closed the connection before its hello"));
    };
    if matches!(header.kind, FrameKind::Request | FrameKind::Response) {
        return Err(Error::invalid(format!("{:?} before a hello", header.kind)));
    }
    let frame = incoming.rest(header, &bytes).await?;
    Ok(First { kind: header.kind, body: frame.body })
}

async fn send(writer: &mut BoxWriter, kind: FrameKind, body: &impl Wire) -> Result<()> {
    let body = body.to_bytes();
    let header = Header { body_len: body.len() as u32, ..Header::new(kind, 0) };
    let mut frame = header.encode(&body).to_vec();
    frame.extend_from_slice(&body);
    header.check_sizes()?;
    writer.write_all(&frame).await.map_err(|e| lost(&e))?;
    writer.flush().await.map_err(|e| lost(&e))
}

/// Whether a refusal will not be different at the next try, unless somebody changes something.
pub(crate) fn is_refusal(e: &Error) -> bool {
    matches!(e.kind, ErrorKind::Denied | ErrorKind::Unsupported)
}

#[cfg(test)]
mod tests {
    use super::*;
    use weir_proto::methods;

    #[test]
    fn a_user_of_the_machine_is_that_user_whatever_it_claims() {
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
            let (user, node) = (Proved::of(&claimed, Some(1000)), Proved::of(&claimed, None));
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
        assert!(claimed_nothing.context.contains("user 1000 may not do that here (ClearTarget, method 9)"));
    }
}
