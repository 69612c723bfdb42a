//! Byte streams between nodes: TCP over IPv4 and IPv6, Unix sockets on one host, or the simulator's.
use crate::BoxFuture;
use std::{
    fmt, io,
    net::{IpAddr, SocketAddr},
    path::PathBuf,
    str::FromStr,
};
use tokio::io::{AsyncRead, AsyncWrite};

/// An address to listen on. Written `tcp:127.0.0.1:7000`, `tcp:[::1]:7000`, `tcp:host.example:7000`,
/// `unix:/run/weir/meta.sock`.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Addr {
    Tcp(SocketAddr),
    Unix(PathBuf),
    /// A host name and a port: resolved each time, as the host's addresses may change.
    Host(String, u16),
}

impl Addr {
    /// Names of the local machine itself, for any resolver.
    pub fn is_local_name(host: &str) -> bool {
        host.eq_ignore_ascii_case("localhost") || host.to_ascii_lowercase().ends_with(".localhost")
    }
}

impl fmt::Display for Addr {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Addr::Tcp(a) => write!(f, "tcp:{a}"),
            Addr::Unix(p) => write!(f, "unix:{}", p.display()),
            Addr::Host(host, port) => write!(f, "tcp:{host}:{port}"),
        }
    }
}

impl FromStr for Addr {
    type Err = String;
    fn from_str(s: &str) -> Result<Addr, String> {
        let expected = "expected tcp:HOST:PORT (a name, an IPv4 or an [IPv6] address) or unix:/PATH";
        match s.split_once(':') {
            Some(("tcp", rest)) => match (rest.parse(), rest.rsplit_once(':')) {
                (Ok(at), _) => Ok(Addr::Tcp(at)),
                (Err(_), Some((host, port))) if is_host(host) && port.parse::<u16>().is_ok() => {
                    Ok(Addr::Host(host.to_ascii_lowercase(), port.parse().unwrap_or_default()))
                }
                (Err(e), _) => Err(format!("address {s:?}: {e}; {expected}")),
            },
            Some(("unix", path)) if path.starts_with('/') => Ok(Addr::Unix(path.into())),
            _ => Err(format!("address {s:?}: {expected}")),
        }
    }
}

/// A host name: labels of letters, digits and `-`; one that ends in a number is a mistyped address.
fn is_host(host: &str) -> bool {
    let is_label = |label: &str| {
        let fine = |c: char| c.is_ascii_alphanumeric() || c == '-' || c == '_';
        (1..=63).contains(&label.len()) && label.chars().all(fine) && !label.starts_with('-')
    };
    let mut labels = host.trim_end_matches('.').split('.');
    let is_number = |label: &str| label.chars().all(|c| c.is_ascii_digit());
    host.len() <= 253
        && labels.clone().all(is_label)
        && labels.next_back().is_some_and(|last| !is_number(last))
}

/// A connected, ordered, reliable byte stream.
pub trait Stream: AsyncRead + AsyncWrite + Unpin + Send {
    /// The two directions, for use by different tasks in parallel: neither waits for a lock of the other.
    /// Dropping the writer ends the stream in that direction.
    fn split(self: Box<Self>) -> (BoxReader, BoxWriter);
    /// This machine's address on the stream; `None`: the stream is not between IP addresses.
    fn local_ip(&self) -> Option<IpAddr> {
        None
    }
}
pub type BoxStream = Box<dyn Stream>;
pub type BoxReader = Box<dyn AsyncRead + Unpin + Send>;
pub type BoxWriter = Box<dyn AsyncWrite + Unpin + Send>;

/// [`Stream::split`] for streams whose halves may share a lock (simulated ones do no work under it).
pub fn split_shared<T: AsyncRead + AsyncWrite + Send + 'static>(stream: T) -> (BoxReader, BoxWriter) {
    let (reader, writer) = tokio::io::split(stream);
    (Box::new(reader), Box::new(writer))
}
impl Stream for tokio::io::DuplexStream {
    fn split(self: Box<Self>) -> (BoxReader, BoxWriter) {
        split_shared(*self)
    }
}

/// The peer of an accepted connection, as reported by the machine.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Caller {
    /// For messages.
    pub name: String,
    /// The user of a process on this machine (Unix sockets), unless that is root or the user that this
    /// process runs as. For a process in its own user namespace, the user that started it.
    pub guest: Option<u32>,
    /// Its address, if it connected over a network.
    pub ip: Option<IpAddr>,
}

pub trait Listener: Send + Sync {
    /// The next connection and its peer.
    fn accept(&self) -> BoxFuture<'_, io::Result<(BoxStream, Caller)>>;
    /// The bound address (with the port that was chosen for port 0).
    fn local_addr(&self) -> Addr;
}

pub trait Net: Send + Sync + 'static {
    fn listen(&self, addr: &Addr) -> BoxFuture<'_, io::Result<Box<dyn Listener>>>;
    /// The address must not be a name: see [`Net::resolve`].
    fn connect(&self, addr: &Addr) -> BoxFuture<'_, io::Result<BoxStream>>;
    /// This machine's addresses towards other networks, one of each kind at most.
    fn own_ips(&self) -> Vec<IpAddr> {
        Vec::new()
    }
    /// The present addresses of a host, best first.
    fn resolve(&self, host: &str, port: u16) -> BoxFuture<'_, io::Result<Vec<SocketAddr>>> {
        let why = format!("the name {host:?} (port {port}) cannot be resolved here");
        Box::pin(async move { Err(io::Error::new(io::ErrorKind::Unsupported, why)) })
    }
}

/// The error for a name where an address is needed.
pub fn not_resolved(host: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidInput, format!("the name {host:?} is not resolved"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_as_they_are_written() {
        for text in
            ["tcp:127.0.0.1:7", "tcp:[::1]:7", "tcp:[::]:0", "tcp:node-1.example.org:7000", "unix:/a:b"]
        {
            assert_eq!(text.parse::<Addr>().unwrap().to_string(), text);
        }
        assert_eq!("tcp:Node1:70".parse(), Ok(Addr::Host("node1".into(), 70)));
        for bad in [
            "tcp:1.2.3:7",
            "tcp:1.2.3.4.5:7",
            "tcp:host",
            "tcp:host:",
            "tcp:host:99999",
            "tcp::7",
            "tcp:a b:7",
            "tcp:::1:7",
            "udp:h:7",
            "unix:s",
        ] {
            let e = bad.parse::<Addr>().unwrap_err();
            assert!(e.contains("expected tcp:HOST:PORT"), "{bad}: {e}");
        }
        assert!(Addr::is_local_name("LocalHost") && !Addr::is_local_name("localhost.example"));
    }
}
