//! A connected local socket whose sender is woken only if it waits for room.
//!
//! The kernel reports to the sender of a local (Unix) socket each time when the receiver has read something.
//! A stream of the runtime is always registered for that, so each message woke its sender once more. This one
//! is registered for bytes to read, and for room only while a write waits for it. (TCP reports room only to a
//! sender that has met a full buffer.)
use crate::{BoxReader, BoxWriter, Stream};
use std::io::{self, IoSlice, Read, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use tokio::io::unix::AsyncFd;
use tokio::io::{AsyncRead, AsyncWrite, Interest, ReadBuf};
use tokio::runtime::Handle;

/// A fragment fits in whole, so that its sender need not wait for the receiver in between.
const SEND_BYTES: usize = 1 << 20;

pub(super) struct LocalSocket {
    reader: Reader,
    writer: Writer,
}

impl LocalSocket {
    /// Within a runtime.
    pub(super) fn new(stream: tokio::net::UnixStream) -> io::Result<LocalSocket> {
        // The kernel limits it (`net.core.wmem_max`); a smaller buffer only means more waits.
        let _ = rustix::net::sockopt::set_socket_send_buffer_size(&stream, SEND_BYTES);
        let socket = Arc::new(stream.into_std()?);
        let reader = Reader(register(socket.clone(), Interest::READABLE)?);
        Ok(LocalSocket { reader, writer: Writer { socket, writable: None, home: Handle::current() } })
    }
}

fn register(socket: Arc<UnixStream>, interest: Interest) -> io::Result<AsyncFd<Arc<UnixStream>>> {
    // SAFETY: the socket's descriptor is always the same one, and open as long as this reference, which the
    // result owns.
    let registered = unsafe { AsyncFd::register_with_interest(socket, interest) };
    registered.map_err(|refused| refused.into_parts().1)
}

impl Stream for LocalSocket {
    fn split(self: Box<Self>) -> (BoxReader, BoxWriter) {
        (Box::new(self.reader), Box::new(self.writer))
    }
}

impl AsyncRead for LocalSocket {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.reader).poll_read(cx, buffer)
    }
}

impl AsyncWrite for LocalSocket {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.writer).poll_write(cx, bytes)
    }
    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.writer).poll_flush(cx)
    }
    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.writer).poll_shutdown(cx)
    }
}

struct Reader(AsyncFd<Arc<UnixStream>>);

impl AsyncRead for Reader {
    fn poll_read(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        loop {
            let mut ready = ready!(self.0.poll_read_ready(cx))?;
            let free = buffer.initialize_unfilled();
            let wanted = free.len();
            match (&**self.0.get_ref()).read(free) {
                Ok(n) => {
                    // Everything was read: the next bytes are a new event.
                    if n > 0 && n < wanted {
                        ready.clear_ready();
                    }
                    buffer.advance(n);
                    return Poll::Ready(Ok(()));
                }
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => ready.clear_ready(),
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Poll::Ready(Err(e)),
            }
        }
    }
}

struct Writer {
    socket: Arc<UnixStream>,
    /// While a write waits: a second descriptor, as one cannot be registered twice.
    writable: Option<AsyncFd<Arc<UnixStream>>>,
    home: Handle,
}

impl Writer {
    fn poll_writable(&mut self, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.writable.is_none() {
            let _inside = self.home.enter(); // any thread may write
            self.writable = Some(register(Arc::new(self.socket.try_clone()?), Interest::WRITABLE)?);
        }
        let writable = self.writable.as_ref().expect("made above");
        let mut ready = ready!(writable.poll_write_ready(cx))?;
        ready.clear_ready();
        Poll::Ready(Ok(()))
    }

    fn poll_with(
        &mut self,
        cx: &mut Context<'_>,
        write: impl Fn(&mut &UnixStream) -> io::Result<usize>,
    ) -> Poll<io::Result<usize>> {
        loop {
            match write(&mut &*self.socket) {
                Ok(n) => {
                    self.writable = None;
                    return Poll::Ready(Ok(n));
                }
                // Events since it is watched for room are not lost: the write is tried after each.
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => ready!(self.poll_writable(cx))?,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Poll::Ready(Err(e)),
            }
        }
    }
}

impl AsyncWrite for Writer {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.poll_with(cx, |socket| socket.write(bytes))
    }
    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        parts: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.poll_with(cx, |socket| socket.write_vectored(parts))
    }
    fn is_write_vectored(&self) -> bool {
        true
    }
    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }
    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(self.socket.shutdown(Shutdown::Write))
    }
}

impl Drop for Writer {
    /// The peer sees the end although the reader may still be here.
    fn drop(&mut self) {
        let _ = self.socket.shutdown(Shutdown::Write); // it may have ended already
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    fn pair() -> (BoxReader, BoxWriter, BoxReader, BoxWriter) {
        let (one, other) = tokio::net::UnixStream::pair().unwrap();
        let split = |stream| Box::new(LocalSocket::new(stream).unwrap()).split();
        let ((r1, w1), (r2, w2)) = (split(one), split(other));
        (r1, w1, r2, w2)
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn bytes_beyond_the_buffer_wait_and_arrive_whole() {
        let (_r1, mut w1, mut r2, _w2) = pair();
        let sent: Vec<u8> = (0..9_000_000_u32).map(|n| (n / 7) as u8).collect();
        let expected = sent.clone();
        let sender = tokio::spawn(async move {
            for part in sent.chunks(1_100_003) {
                w1.write_all(part).await.unwrap();
            }
        });
        let mut came = Vec::new();
        let mut part = vec![0; 70_001];
        while came.len() < expected.len() {
            let n = r2.read(&mut part).await.unwrap();
            assert!(n > 0, "the end came after {} bytes", came.len());
            came.extend_from_slice(&part[..n]);
            if came.len() % 5 == 0 {
                tokio::task::yield_now().await;
            }
        }
        sender.await.unwrap();
        assert!(came == expected);
        assert_eq!(r2.read(&mut part).await.unwrap(), 0, "a dropped writer is the end");
    }

    #[tokio::test(flavor = "multi_thread", worker_threads = 2)]
    async fn messages_go_back_and_forth_and_ends_are_seen() {
        let (mut r1, mut w1, mut r2, mut w2) = pair();
        let echo = tokio::spawn(async move {
            let mut bytes = [0; 16];
            loop {
                match r2.read(&mut bytes).await.unwrap() {
                    0 => return,
                    n => w2.write_all(&bytes[..n]).await.unwrap(),
                }
            }
        });
        let mut back = [0; 5];
        for n in 0..2000_u32 {
            let message = [1, (n >> 8) as u8, n as u8, 9, 9];
            w1.write_all(&message).await.unwrap();
            r1.read_exact(&mut back).await.unwrap();
            assert_eq!(back, message);
        }
        drop(w1);
        assert_eq!(r1.read(&mut back).await.unwrap(), 0);
        echo.await.unwrap();
    }

    #[tokio::test]
    async fn a_write_to_a_peer_that_has_gone_is_an_error() {
        let (r1, mut w1, r2, w2) = pair();
        drop((r2, w2));
        assert!(w1.write_all(b"word").await.is_err());
        drop(r1);
    }
}
