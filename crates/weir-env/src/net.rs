//! Byte streams between nodes: TCP over IPv4 and IPv6, Unix sockets on one host, or the simulator's.
use crate::BoxFuture;
use std::{
    fmt, io,
    net::{IpAddr, SocketAddr},
    path::PathBuf,
    str::FromStr,
};
use tokio::io::{AsyncRead, AsyncWrite};

/// Where a node listens. Written `tcp:127.0.0.1:7000`, `tcp:[::1]:7000`, `unix:/run/weir/meta.sock`.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Addr {
    Tcp(SocketAddr),
    Unix(PathBuf),
}

impl fmt::Display for Addr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Addr::Tcp(a) => write!(f, "tcp:{a}"),
            Addr::Unix(p) => write!(f, "unix:{}", p.display()),
        }
    }
}

impl FromStr for Addr {
    type Err = String;
    fn from_str(s: &str) -> Result<Addr, String> {
        let expected = "expected tcp:HOST:PORT (an IPv4 or [IPv6] address) or unix:/PATH";
        match s.split_once(':') {
            Some(("tcp", rest)) => {
                rest.parse().map(Addr::Tcp).map_err(|e| format!("address {s:?}: {e}; {expected}"))
            }
            Some(("unix", path)) if path.starts_with('/') => Ok(Addr::Unix(path.into())),
            _ => Err(format!("address {s:?}: {expected}")),
        }
    }
}

/// A connected, ordered, reliable byte stream.
pub trait Stream: AsyncRead + AsyncWrite + Unpin + Send {
    /// The two directions, to be used by different tasks at the same moment: neither waits for a lock of the other.
    /// Dropping the writer ends the stream in that direction.
    fn split(self: Box<Self>) -> (BoxReader, BoxWriter);
    /// The address of this machine that the stream goes out from; `None`: it is no stream between addresses.
    fn local_ip(&self) -> Option<IpAddr> {
        None
    }
}
pub type BoxStream = Box<dyn Stream>;
pub type BoxReader = Box<dyn AsyncRead + Unpin + Send>;
pub type BoxWriter = Box<dyn AsyncWrite + Unpin + Send>;

/// [`Stream::split`] for streams whose halves may share a lock (a simulated one's do no work under it).
pub fn split_shared<T: AsyncRead + AsyncWrite + Send + 'static>(stream: T) -> (BoxReader, BoxWriter) {
    let (reader, writer) = tokio::io::split(stream);
    (Box::new(reader), Box::new(writer))
}
impl Stream for tokio::io::DuplexStream {
    fn split(self: Box<Self>) -> (BoxReader, BoxWriter) {
        split_shared(*self)
    }
}

/// Who connected, as far as the machine says.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Caller {
    /// For people.
    pub name: String,
    /// The user of a process on this machine (Unix sockets), unless that is root or the user that this process runs as. In a
    /// user namespace of its own a process is still the user that started it.
    pub guest: Option<u32>,
    /// Its address, if it came over a network.
    pub ip: Option<IpAddr>,
}

pub trait Listener: Send + Sync {
    /// The next connection and its peer.
    fn accept(&self) -> BoxFuture<'_, io::Result<(BoxStream, Caller)>>;
    /// The address really bound (with the port that was chosen for port 0).
    fn local_addr(&self) -> Addr;
}

pub trait Net: Send + Sync + 'static {
    fn listen(&self, addr: &Addr) -> BoxFuture<'_, io::Result<Box<dyn Listener>>>;
    fn connect(&self, addr: &Addr) -> BoxFuture<'_, io::Result<BoxStream>>;
}
