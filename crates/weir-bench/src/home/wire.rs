//! A network with a delay: traffic to a far cluster goes through a proxy of this process that delays each
//! byte.
//!
//! Always holds: bytes keep their order, and none is early. The rate is not limited; the bytes in flight are,
//! so a peer that does not read stops the other one, as on a wire.
//!
//! Plain threads: timers of the runtime know whole milliseconds only.
use std::collections::BTreeMap;
use std::io::{self, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};
use weir_env::{Addr, BoxFuture, BoxStream, Listener, Net};

/// Parts in flight in one direction of one connection: 64 MiB, more than 100 ms of a 5 Gb/s line.
const PARTS_MAX: usize = 1024;
const PART_BYTES: usize = 64 << 10;

/// Connections that use this network take the detour.
pub struct Wire {
    net: Arc<dyn Net>,
    one_way_us: Arc<AtomicU64>,
    /// Proxies by their destination.
    proxies: Mutex<BTreeMap<Addr, SocketAddr>>,
}

impl Wire {
    pub fn new(net: Arc<dyn Net>) -> Wire {
        Wire { net, one_way_us: Arc::default(), proxies: Mutex::default() }
    }

    /// The additional delay of an answer.
    pub fn set_delay(&self, round_trip: Duration) {
        self.one_way_us.store(round_trip.as_micros() as u64 / 2, Relaxed);
    }

    fn proxy_to(&self, to: &Addr) -> io::Result<SocketAddr> {
        let mut proxies = self.proxies.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(at) = proxies.get(to) {
            return Ok(*at);
        }
        let listener = TcpListener::bind(("127.0.0.1", 0))?;
        let at = listener.local_addr()?;
        proxies.insert(to.clone(), at);
        let (to, delay) = (to.clone(), self.one_way_us.clone());
        std::thread::spawn(move || {
            for near in listener.incoming().flatten() {
                // A peer that cannot be reached looks like one that hangs up.
                let _ = join(near, &to, &delay);
            }
        });
        Ok(at)
    }
}

impl Net for Wire {
    fn listen(&self, addr: &Addr) -> BoxFuture<'_, io::Result<Box<dyn Listener>>> {
        self.net.listen(addr)
    }
    fn connect(&self, addr: &Addr) -> BoxFuture<'_, io::Result<BoxStream>> {
        let proxy = self.proxy_to(addr);
        Box::pin(async move { self.net.connect(&Addr::Tcp(proxy?)).await })
    }
}

/// One end of a connection, for one direction.
enum End {
    Tcp(TcpStream),
    Unix(UnixStream),
}

impl End {
    fn connect(to: &Addr) -> io::Result<End> {
        Ok(match to {
            Addr::Tcp(at) => {
                let stream = TcpStream::connect(at)?;
                stream.set_nodelay(true)?;
                End::Tcp(stream)
            }
            Addr::Unix(path) => End::Unix(UnixStream::connect(path)?),
            Addr::Host(host, port) => End::Tcp(TcpStream::connect((host.as_str(), *port))?),
        })
    }
    fn again(&self) -> io::Result<End> {
        Ok(match self {
            End::Tcp(stream) => End::Tcp(stream.try_clone()?),
            End::Unix(stream) => End::Unix(stream.try_clone()?),
        })
    }
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self {
            End::Tcp(stream) => stream.read(into),
            End::Unix(stream) => stream.read(into),
        }
    }
    fn write_all(&mut self, bytes: &[u8]) -> io::Result<()> {
        match self {
            End::Tcp(stream) => stream.write_all(bytes),
            End::Unix(stream) => stream.write_all(bytes),
        }
    }
    /// The other side learns that no more data comes; or that the reader is gone.
    fn end(&self, how: Shutdown) {
        // It is gone already if this fails.
        let _ = match self {
            End::Tcp(stream) => stream.shutdown(how),
            End::Unix(stream) => stream.shutdown(how),
        };
    }
}

fn join(near: TcpStream, to: &Addr, delay: &Arc<AtomicU64>) -> io::Result<()> {
    near.set_nodelay(true)?;
    let (near, far) = (End::Tcp(near), End::connect(to)?);
    carry(near.again()?, far.again()?, delay.clone());
    carry(far, near, delay.clone());
    Ok(())
}

type Part = (Instant, Vec<u8>);

/// Copies data from one end to the other one, delayed.
fn carry(from: End, to: End, delay: Arc<AtomicU64>) {
    let (sender, receiver) = sync_channel(PARTS_MAX);
    std::thread::spawn(move || take(from, &delay, &sender));
    std::thread::spawn(move || deliver(to, &receiver));
}

fn take(mut from: End, delay: &AtomicU64, sender: &SyncSender<Part>) {
    let mut buffer = vec![0; PART_BYTES];
    while let Ok(n @ 1..) = from.read(&mut buffer) {
        let due = Instant::now() + Duration::from_micros(delay.load(Relaxed));
        if sender.send((due, buffer[..n].to_vec())).is_err() {
            return from.end(Shutdown::Read);
        }
    }
}

fn deliver(mut to: End, receiver: &Receiver<Part>) {
    while let Ok((due, bytes)) = receiver.recv() {
        std::thread::sleep(due.saturating_duration_since(Instant::now()));
        if to.write_all(&bytes).is_err() {
            return;
        }
    }
    to.end(Shutdown::Write);
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    #[test]
    fn bytes_arrive_in_order_and_none_is_early() {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let at = Addr::Tcp(listener.local_addr().unwrap());
        std::thread::spawn(move || {
            let (mut peer, _) = listener.accept().unwrap();
            let mut got = Vec::new();
            peer.read_to_end(&mut got).unwrap();
            peer.write_all(&got).unwrap();
        });
        let delay = Duration::from_millis(30);
        let sent: Vec<u8> = (0..1_000_000_u32).map(|n| (n % 251) as u8).collect();
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
        let (got, took) = runtime.block_on(async {
            let wire = Wire::new(weir_env::real::env().net);
            wire.set_delay(delay);
            let (mut reader, mut writer) = wire.connect(&at).await.unwrap().split();
            let begun = Instant::now();
            writer.write_all(&sent).await.unwrap();
            drop(writer);
            let mut got = Vec::new();
            reader.read_to_end(&mut got).await.unwrap();
            (got, begun.elapsed())
        });
        assert!(got == sent);
        assert!(took >= delay, "{took:?}");
    }
}
