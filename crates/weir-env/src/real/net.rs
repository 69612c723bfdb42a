//! Sockets of the machine.

use super::local_socket::LocalSocket;
use crate::net::not_resolved;
use crate::{Addr, BoxFuture, BoxReader, BoxStream, BoxWriter, Caller, Listener, Net, Stream};
use rustix::fd::{AsRawFd, OwnedFd};
use rustix::fs::{Mode, OFlags};
use std::{
    io,
    net::{IpAddr, SocketAddr},
    path::{Path, PathBuf},
};
use tokio::net::{TcpListener, TcpSocket, TcpStream, UnixListener, UnixStream, unix::UCred};

/// Backlog of connections: every client of a large cluster may reconnect in the same second.
const BACKLOG: u32 = 4096;

pub(super) struct MachineNet;

impl Net for MachineNet {
    fn listen(&self, addr: &Addr) -> BoxFuture<'_, io::Result<Box<dyn Listener>>> {
        let addr = addr.clone();
        Box::pin(async move {
            Ok(match addr {
                Addr::Tcp(at) => Box::new(listen_tcp(at)?) as Box<dyn Listener>,
                Addr::Unix(path) => Box::new(listen_unix(path).await?),
                Addr::Host(host, _) => return Err(not_resolved(&host)),
            })
        })
    }
    fn connect(&self, addr: &Addr) -> BoxFuture<'_, io::Result<BoxStream>> {
        let addr = addr.clone();
        Box::pin(async move {
            Ok(match addr {
                Addr::Tcp(at) => {
                    let stream = TcpStream::connect(at).await?;
                    stream.set_nodelay(true)?;
                    Box::new(stream) as BoxStream
                }
                Addr::Unix(path) => Box::new(LocalSocket::new(connect_unix(&path).await?)?),
                Addr::Host(host, _) => return Err(not_resolved(&host)),
            })
        })
    }
    fn own_ips(&self) -> Vec<IpAddr> {
        OUTSIDE.iter().filter_map(|(any, outside)| way_out(any, outside).ok()).collect()
    }
    fn resolve(&self, host: &str, port: u16) -> BoxFuture<'_, io::Result<Vec<SocketAddr>>> {
        let host = host.to_owned();
        Box::pin(async move { Ok(tokio::net::lookup_host((host, port)).await?.collect()) })
    }
}

/// Addresses reserved for documentation, and local ones to bind to: nothing is sent.
const OUTSIDE: [(&str, &str); 2] = [("0.0.0.0:0", "192.0.2.1:9"), ("[::]:0", "[2001:db8::1]:9")];

/// The local address that the kernel would send from.
fn way_out(any: &str, outside: &str) -> io::Result<IpAddr> {
    let socket = std::net::UdpSocket::bind(any)?;
    socket.connect(outside)?;
    Ok(socket.local_addr()?.ip())
}

impl Stream for TcpStream {
    fn split(self: Box<Self>) -> (BoxReader, BoxWriter) {
        let (reader, writer) = self.into_split();
        (Box::new(reader), Box::new(writer))
    }
    fn local_ip(&self) -> Option<IpAddr> {
        self.local_addr().ok().map(|at| at.ip().to_canonical())
    }
}

struct Tcp {
    listener: TcpListener,
    addr: SocketAddr,
}

impl Listener for Tcp {
    fn accept(&self) -> BoxFuture<'_, io::Result<(BoxStream, Caller)>> {
        Box::pin(async move {
            let (stream, peer) = self.listener.accept().await?;
            stream.set_nodelay(true)?;
            let caller =
                Caller { name: format!("tcp:{peer}"), guest: None, ip: Some(peer.ip().to_canonical()) };
            Ok((Box::new(stream) as BoxStream, caller))
        })
    }
    fn local_addr(&self) -> Addr {
        Addr::Tcp(self.addr)
    }
}

fn listen_tcp(at: SocketAddr) -> io::Result<Tcp> {
    let socket = if at.is_ipv4() { TcpSocket::new_v4()? } else { TcpSocket::new_v6()? };
    socket.set_reuseaddr(true)?; // a restarted role binds its port again at once
    socket.bind(at)?;
    let listener = socket.listen(BACKLOG)?;
    let addr = listener.local_addr()?;
    Ok(Tcp { listener, addr })
}

// Local sockets get no buffers of 4 MiB: with these one stream of 1 MiB messages fell from 10 to 7.5 GB/s,
// and four took 1.7 times the CPU for 10 % more (smaller buffers stay in the cache).
struct Unix {
    listener: UnixListener,
    path: PathBuf,
}

impl Listener for Unix {
    fn accept(&self) -> BoxFuture<'_, io::Result<(BoxStream, Caller)>> {
        Box::pin(async move {
            let (stream, _) = self.listener.accept().await?;
            // The kernel recorded it when the peer connected, so it is also known for one that has gone.
            let caller = caller(&self.path, stream.peer_cred().ok());
            Ok((Box::new(LocalSocket::new(stream)?) as BoxStream, caller))
        })
    }
    fn local_addr(&self) -> Addr {
        Addr::Unix(self.path.clone())
    }
}

fn caller(path: &Path, peer: Option<UCred>) -> Caller {
    let uid = peer.map_or(u32::MAX, |peer| peer.uid());
    let pid = peer.and_then(|peer| peer.pid()).unwrap_or(0);
    let is_known = uid == 0 || uid == rustix::process::geteuid().as_raw();
    Caller {
        name: format!("unix:{} (uid {uid}, pid {pid})", path.display()),
        guest: (!is_known).then_some(uid),
        ip: None,
    }
}

/// Takes over the name of a process that died, never of one that answers.
async fn listen_unix(path: PathBuf) -> io::Result<Unix> {
    let way = Way::to(&path)?;
    let listener = match UnixListener::bind(&way.path) {
        Err(e) if e.kind() == io::ErrorKind::AddrInUse && is_stale(&path).await => {
            std::fs::remove_file(&path)?;
            UnixListener::bind(&way.path)?
        }
        bound => bound?,
    };
    Ok(Unix { listener, path })
}

async fn connect_unix(path: &Path) -> io::Result<UnixStream> {
    let way = Way::to(path)?;
    UnixStream::connect(&way.path).await
}

async fn is_stale(path: &Path) -> bool {
    matches!(connect_unix(path).await, Err(e) if e.kind() == io::ErrorKind::ConnectionRefused)
}

/// Longest path of a Unix socket, in bytes (the kernel's limit of 108 with its end).
const SOCKET_PATH_MAX: usize = 107;

/// A path to a socket that the kernel accepts. A longer one starts at its directory, which is open meanwhile.
struct Way {
    path: PathBuf,
    _dir: Option<OwnedFd>,
}

impl Way {
    fn to(path: &Path) -> io::Result<Way> {
        let (true, Some(dir), Some(name)) =
            (path.as_os_str().len() > SOCKET_PATH_MAX, path.parent(), path.file_name())
        else {
            return Ok(Way { path: path.to_path_buf(), _dir: None });
        };
        let dir = rustix::fs::open(dir, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
        let path = PathBuf::from(format!("/proc/self/fd/{}", dir.as_raw_fd())).join(name);
        Ok(Way { path, _dir: Some(dir) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    #[tokio::test]
    async fn a_socket_path_may_be_longer_than_the_kernel_allows() {
        let top = tempfile::tempdir().unwrap();
        let dir = top.path().join("d".repeat(150));
        std::fs::create_dir(&dir).unwrap();
        let addr = Addr::Unix(dir.join("socket"));
        for _ in 0..2 {
            // The second time the name exists already, and no process answers.
            let listener = MachineNet.listen(&addr).await.unwrap();
            assert_eq!(listener.local_addr(), addr);
            let (mut ours, accepted) = tokio::join!(MachineNet.connect(&addr), listener.accept());
            let (mut theirs, caller) = accepted.unwrap();
            assert_eq!(caller.guest, None, "{}", caller.name);
            ours.as_mut().unwrap().write_all(b"word").await.unwrap();
            let mut word = [0; 4];
            theirs.read_exact(&mut word).await.unwrap();
            assert_eq!(&word, b"word");
        }
    }
}
