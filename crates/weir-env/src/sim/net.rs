//! The simulated network: ordered byte streams with latency, partitions, resets and silence.
//!
//! A stream is two pipes. Sent bytes arrive in order, split at arbitrary places; a partition holds them back.
//! A killed process resets its connections; a machine without power sends nothing until it is back, then
//! resets.

mod connect;

use super::{
    config::SimConfig,
    core::{State, TimerKey},
    node::{Here, dead},
    rng::hash_bytes,
};
use crate::{Addr, BoxFuture, BoxReader, BoxStream, BoxWriter, Caller, Listener, Net, Stream};
use bytes::{Buf as _, Bytes};
use connect::connect;
use std::{
    collections::{BTreeMap, BTreeSet, VecDeque},
    future::poll_fn,
    io,
    net::{Ipv4Addr, SocketAddr},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, Waker},
    time::Duration,
};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// One arrival; larger writes are split.
const CHUNK_BYTES_MAX: usize = 256 << 10;

const FIRST_FREE_PORT: u16 = 20_000;

#[derive(Default)]
pub(super) struct NetState {
    pipes: BTreeMap<u64, Pipe>,
    listeners: BTreeMap<Addr, Listening>,
    /// The machine on which an address was last bound; it answers with refusals when no process listens.
    homes: BTreeMap<Addr, usize>,
    /// (from, to) pairs of nodes between which nothing arrives.
    blocked: BTreeSet<(usize, usize)>,
    slow: BTreeMap<(usize, usize), Duration>,
    ports_assigned: u16,
}

/// One direction of a stream.
struct Pipe {
    from: usize,
    to: usize,
    chunks: VecDeque<Chunk>,
    in_flight_bytes: usize,
    /// When the last byte (or the end) that was sent arrives.
    last_at_ns: u64,
    eof_at_ns: Option<u64>,
    reset_at_ns: Option<u64>,
    /// The reader is gone.
    reader_gone: bool,
    /// Until then the writer does not learn of the reader's state.
    silent_until_ns: u64,
    reader: Option<Waker>,
    /// Wakes the reader when the next bytes, or the end, arrive.
    arrival: Option<TimerKey>,
    writer: Option<Waker>,
    /// Remaining ends; the pipe is removed with the last one.
    ends: u8,
}

struct Chunk {
    at_ns: u64,
    bytes: Bytes,
    seen: bool,
}

struct Listening {
    id: u64,
    node: usize,
    queue: VecDeque<(u64, u64, String)>,
    waker: Option<Waker>,
}

impl Net for Here {
    fn listen(&self, addr: &Addr) -> BoxFuture<'_, io::Result<Box<dyn Listener>>> {
        let bound = bind(self, addr.clone());
        Box::pin(async move { Ok(Box::new(bound?) as Box<dyn Listener>) })
    }
    fn connect(&self, addr: &Addr) -> BoxFuture<'_, io::Result<BoxStream>> {
        let addr = addr.clone();
        Box::pin(async move { Ok(Box::new(connect(self, &addr).await?) as BoxStream) })
    }
}

fn bind(here: &Here, addr: Addr) -> io::Result<SimListener> {
    let mut state = here.core.lock();
    if !here.lives_in(&state) {
        return Err(dead());
    }
    let addr = state.net.with_port(addr);
    if state.net.listeners.contains_key(&addr) {
        return Err(io::Error::new(io::ErrorKind::AddrInUse, format!("{addr} is in use")));
    }
    let id = state.next_id();
    let listening = Listening { id, node: here.node, queue: VecDeque::new(), waker: None };
    state.net.listeners.insert(addr.clone(), listening);
    state.net.homes.insert(addr.clone(), here.node);
    Ok(SimListener { here: here.clone(), id, addr })
}

impl NetState {
    fn with_port(&mut self, addr: Addr) -> Addr {
        match addr {
            Addr::Tcp(at) if at.port() == 0 => {
                self.ports_assigned += 1;
                Addr::Tcp(SocketAddr::new(at.ip(), FIRST_FREE_PORT + self.ports_assigned))
            }
            addr => addr,
        }
    }

    pub fn is_blocked(&self, from: usize, to: usize) -> bool {
        self.blocked.contains(&(from, to))
    }

    /// Whether a link of the node is cut or slow.
    pub(super) fn is_impaired(&self, node: usize) -> bool {
        let of_node = |(from, to): &(usize, usize)| *from == node || *to == node;
        self.blocked.iter().chain(self.slow.keys()).any(of_node)
    }

    /// Wakes both ends of every pipe, so that they check what has changed.
    fn take_wakers(&mut self) -> Vec<Waker> {
        self.pipes.values_mut().flat_map(|p| [p.reader.take(), p.writer.take()]).flatten().collect()
    }

    /// Both directions if `both`. Returns the wakers.
    pub(super) fn set_blocked(&mut self, from: usize, to: usize, blocked: bool) -> Vec<Waker> {
        if blocked {
            self.blocked.insert((from, to));
        } else {
            self.blocked.remove(&(from, to));
        }
        self.take_wakers()
    }

    pub(super) fn heal_all(&mut self) -> Vec<Waker> {
        self.blocked.clear();
        self.slow.clear();
        self.take_wakers()
    }

    pub(super) fn set_slow(&mut self, from: usize, to: usize, extra: Duration) {
        if extra.is_zero() {
            self.slow.remove(&(from, to));
        } else {
            self.slow.insert((from, to), extra);
        }
    }

    /// Resets the streams between two nodes, or all of one node (`other` None).
    pub(super) fn reset(&mut self, node: usize, other: Option<usize>, at_ns: u64) -> Vec<Waker> {
        let between = |p: &Pipe| match other {
            Some(other) => [(node, other), (other, node)].contains(&(p.from, p.to)),
            None => p.from == node || p.to == node,
        };
        for pipe in self.pipes.values_mut().filter(|p| between(p)) {
            pipe.reset_at_ns.get_or_insert(at_ns);
            pipe.reader_gone = true;
        }
        self.take_wakers()
    }

    /// The streams between two nodes end for `from` now; its earlier bytes arrive at `to` after `delay_ns`,
    /// then the end.
    pub(super) fn lose(&mut self, from: usize, to: usize, now_ns: u64, delay_ns: u64) -> Vec<Waker> {
        let late_ns = now_ns + delay_ns;
        for pipe in self.pipes.values_mut().filter(|p| p.reset_at_ns.is_none()) {
            if (pipe.from, pipe.to) == (from, to) {
                pipe.chunks.iter_mut().for_each(|c| c.at_ns = c.at_ns.max(late_ns));
                let end_ns = pipe.last_at_ns.max(late_ns) + 1;
                pipe.last_at_ns = end_ns;
                pipe.eof_at_ns.get_or_insert(end_ns);
                // Time for the reader to read the arrived bytes.
                pipe.reset_at_ns = Some(end_ns + 1_000_000);
            } else if (pipe.from, pipe.to) == (to, from) {
                pipe.reset_at_ns = Some(now_ns);
                pipe.silent_until_ns = late_ns + 1_000_000;
            }
        }
        self.take_wakers()
    }

    /// The node's process ended: removes its listeners, and connections that were not accepted.
    pub(super) fn close_listeners(&mut self, node: usize) {
        let gone: Vec<Addr> =
            self.listeners.iter().filter(|(_, l)| l.node == node).map(|(a, _)| a.clone()).collect();
        for addr in gone {
            let listening = self.listeners.remove(&addr).expect("just listed");
            for (rx, tx, _) in listening.queue {
                self.drop_end(rx);
                self.drop_end(tx);
            }
        }
    }

    fn drop_end(&mut self, pipe: u64) {
        if let Some(p) = self.pipes.get_mut(&pipe) {
            p.ends -= 1;
            if p.ends == 0 {
                self.pipes.remove(&pipe);
            }
        }
    }
}

impl State {
    pub fn latency_ns(&mut self, from: usize, to: usize, config: &SimConfig) -> u64 {
        let extra = self.net.slow.get(&(from, to)).copied().unwrap_or_default();
        (self.rng.duration(config.latency) + extra).as_nanos() as u64
    }

    pub fn new_pipe(&mut self, from: usize, to: usize) -> u64 {
        let id = self.next_id();
        let pipe = Pipe {
            from,
            to,
            chunks: VecDeque::new(),
            in_flight_bytes: 0,
            last_at_ns: 0,
            eof_at_ns: None,
            reset_at_ns: None,
            reader_gone: false,
            silent_until_ns: 0,
            reader: None,
            arrival: None,
            writer: None,
            ends: 2,
        };
        self.net.pipes.insert(id, pipe);
        id
    }
}

struct SimListener {
    here: Here,
    id: u64,
    addr: Addr,
}

impl Listener for SimListener {
    fn accept(&self) -> BoxFuture<'_, io::Result<(BoxStream, Caller)>> {
        Box::pin(poll_fn(|cx| {
            let mut state = self.here.core.lock();
            if !self.here.lives_in(&state) {
                return Poll::Ready(Err(dead()));
            }
            let listening =
                state.net.listeners.get_mut(&self.addr).expect("listens as long as its node lives");
            let Some((rx, tx, peer)) = listening.queue.pop_front() else {
                listening.waker = Some(cx.waker().clone());
                return Poll::Pending;
            };
            state.trace("accept", &[self.here.node as u64, rx]);
            drop(state);
            let caller = Caller { name: peer, guest: None, ip: Some(Ipv4Addr::LOCALHOST.into()) };
            Poll::Ready(Ok((Box::new(SimStream::new(&self.here, rx, tx)) as BoxStream, caller)))
        }))
    }
    fn local_addr(&self) -> Addr {
        self.addr.clone()
    }
}

impl Drop for SimListener {
    fn drop(&mut self) {
        let mut state = self.here.core.lock();
        let now_ns = state.now_ns;
        if state.net.listeners.get(&self.addr).is_some_and(|l| l.id == self.id) {
            let listening = state.net.listeners.remove(&self.addr).expect("just seen");
            let mut wakers = Vec::new();
            for (rx, tx, _) in listening.queue {
                for pipe in [rx, tx] {
                    if let Some(p) = state.net.pipes.get_mut(&pipe) {
                        p.reset_at_ns.get_or_insert(now_ns);
                        p.reader_gone = true;
                        wakers.extend([p.reader.take(), p.writer.take()].into_iter().flatten());
                    }
                    state.net.drop_end(pipe);
                }
            }
            drop(state);
            wakers.into_iter().for_each(Waker::wake);
        }
    }
}

pub struct SimStream {
    reader: SimReader,
    writer: SimWriter,
}

struct SimReader(Arc<Ends>);

/// Its drop ends this direction.
struct SimWriter(Arc<Ends>);

/// One side of a stream; its drop closes it.
struct Ends {
    here: Here,
    rx: u64,
    tx: u64,
}

impl SimStream {
    pub fn new(here: &Here, rx: u64, tx: u64) -> SimStream {
        let ends = Arc::new(Ends { here: here.clone(), rx, tx });
        SimStream { reader: SimReader(ends.clone()), writer: SimWriter(ends) }
    }
}

impl Stream for SimStream {
    fn split(self: Box<Self>) -> (BoxReader, BoxWriter) {
        (Box::new(self.reader), Box::new(self.writer))
    }
}

impl AsyncRead for SimStream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().reader).poll_read(cx, buf)
    }
}

impl AsyncWrite for SimStream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, data: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.get_mut().writer).poll_write(cx, data)
    }
    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().writer).poll_flush(cx)
    }
    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.get_mut().writer).poll_shutdown(cx)
    }
}

fn reset() -> io::Error {
    io::Error::new(io::ErrorKind::ConnectionReset, "connection reset by the peer")
}

impl AsyncRead for SimReader {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let this = &self.get_mut().0;
        let mut guard = this.here.core.lock();
        let state = &mut *guard;
        if !this.here.lives_in(state) {
            return Poll::Ready(Err(dead()));
        }
        let now_ns = state.now_ns;
        let pipe = state.net.pipes.get_mut(&this.rx).expect("a pipe lives as long as its ends");
        let held_back = state.net.blocked.contains(&(pipe.from, pipe.to));
        if !held_back && pipe.reset_at_ns.is_some_and(|at| at <= now_ns) {
            return Poll::Ready(Err(reset()));
        }
        let before = buf.filled().len();
        while !held_back && buf.remaining() > 0 {
            let Some(chunk) = pipe.chunks.front_mut().filter(|c| c.at_ns <= now_ns) else { break };
            if !std::mem::replace(&mut chunk.seen, true) {
                let what = [this.rx, chunk.bytes.len() as u64, hash_bytes(&chunk.bytes)];
                state.trace.event(now_ns, "arrive", &what);
            }
            let n = chunk.bytes.len().min(buf.remaining());
            buf.put_slice(&chunk.bytes[..n]);
            chunk.bytes.advance(n);
            pipe.in_flight_bytes -= n;
            if chunk.bytes.is_empty() {
                pipe.chunks.pop_front();
            }
        }
        let at_end = !held_back && pipe.chunks.is_empty() && pipe.eof_at_ns.is_some_and(|at| at <= now_ns);
        if buf.filled().len() > before || at_end || buf.remaining() == 0 {
            pipe.reader = None;
            state.timers.clear(&mut pipe.arrival);
            let writer = pipe.writer.take();
            state.nodes[this.here.node].call(buf.filled().len() - before);
            drop(guard);
            if let Some(writer) = writer {
                writer.wake();
            }
            return Poll::Ready(Ok(()));
        }
        match &mut pipe.reader {
            Some(reader) => reader.clone_from(cx.waker()),
            none => *none = Some(cx.waker().clone()),
        }
        let next = [pipe.chunks.front().map(|c| c.at_ns), pipe.eof_at_ns, pipe.reset_at_ns];
        match next.into_iter().flatten().filter(|at| *at > now_ns).min() {
            Some(at_ns) if !held_back => state.timers.set(&mut pipe.arrival, at_ns, cx.waker()),
            _ => state.timers.clear(&mut pipe.arrival),
        }
        Poll::Pending
    }
}

impl AsyncWrite for SimWriter {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, data: &[u8]) -> Poll<io::Result<usize>> {
        let this = &self.0;
        let mut guard = this.here.core.lock();
        let state = &mut *guard;
        if !this.here.lives_in(state) {
            return Poll::Ready(Err(dead()));
        }
        let config = &this.here.core.config;
        let (from, to) = {
            let pipe = &state.net.pipes[&this.tx];
            (pipe.from, pipe.to)
        };
        let now_ns = state.now_ns;
        let blocked = state.net.is_blocked(to, from); // the other end's state does not get through
        let pipe = state.net.pipes.get_mut(&this.tx).expect("a pipe lives as long as its ends");
        let unknown = blocked || now_ns < pipe.silent_until_ns;
        if pipe.eof_at_ns.is_some() || (pipe.reader_gone && !unknown) {
            return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        }
        let window = config.window_bytes.saturating_sub(pipe.in_flight_bytes);
        if window == 0 {
            pipe.writer = Some(cx.waker().clone());
            return Poll::Pending;
        }
        let mut n = data.len().min(window).min(CHUNK_BYTES_MAX);
        if n > 1 && state.rng.below(8) == 0 {
            n = 1 + state.rng.below(n as u64 - 1) as usize; // a stream keeps no boundaries
        }
        if n == 0 {
            return Poll::Ready(Ok(0));
        }
        state.nodes[this.here.node].call(n);
        let latency_ns = state.latency_ns(from, to, config);
        let on_wire_ns = n as u64 * 1_000_000_000 / config.bandwidth_bytes_per_s.max(1);
        let now_ns = state.now_ns;
        let pipe = state.net.pipes.get_mut(&this.tx).expect("seen above");
        let at_ns = (now_ns + latency_ns).max(pipe.last_at_ns) + on_wire_ns;
        pipe.last_at_ns = at_ns;
        pipe.in_flight_bytes += n;
        pipe.chunks.push_back(Chunk { at_ns, bytes: Bytes::copy_from_slice(&data[..n]), seen: false });
        // A waiting reader sleeps until the first bytes arrive; behind a partition, until it is healed.
        if let (Some(reader), None) = (&pipe.reader, pipe.arrival)
            && !state.net.blocked.contains(&(from, to))
        {
            state.timers.set(&mut pipe.arrival, at_ns, reader);
        }
        Poll::Ready(Ok(n))
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.end();
        Poll::Ready(Ok(()))
    }
}

impl SimWriter {
    fn end(&self) {
        let here = &self.0.here;
        let mut state = here.core.lock();
        if !here.lives_in(&state) {
            return;
        }
        let reader = state.end_pipe(self.0.tx, &here.core.config, false);
        drop(state);
        if let Some(reader) = reader {
            reader.wake();
        }
    }
}

impl Drop for SimWriter {
    fn drop(&mut self) {
        self.end();
    }
}

impl Drop for SimReader {
    /// Later arrivals wake no task: a timer that fires must lead to a task that can run.
    fn drop(&mut self) {
        let mut state = self.0.here.core.lock();
        let state = &mut *state;
        if let Some(pipe) = state.net.pipes.get_mut(&self.0.rx) {
            pipe.reader = None;
            state.timers.clear(&mut pipe.arrival);
        }
    }
}

impl State {
    /// The writer has ended; `abrupt` resets instead. Returns the waker.
    fn end_pipe(&mut self, tx: u64, config: &SimConfig, abrupt: bool) -> Option<Waker> {
        let (from, to) = self.net.pipes.get(&tx).map(|p| (p.from, p.to))?;
        let latency_ns = self.latency_ns(from, to, config);
        let now_ns = self.now_ns;
        let pipe = self.net.pipes.get_mut(&tx)?;
        let at_ns = (now_ns + latency_ns).max(pipe.last_at_ns);
        pipe.eof_at_ns.get_or_insert(at_ns);
        if abrupt {
            pipe.reset_at_ns.get_or_insert(now_ns + latency_ns);
        }
        pipe.reader.take()
    }
}

impl Drop for Ends {
    fn drop(&mut self) {
        let mut state = self.here.core.lock();
        let mut wakers = Vec::new();
        // The leftovers of a process were handled when it ended.
        if self.here.lives_in(&state) {
            let mut unread = false;
            if let Some(rx) = state.net.pipes.get_mut(&self.rx) {
                // As in TCP: closing with unread bytes is a reset.
                unread = !rx.chunks.is_empty();
                rx.chunks.clear();
                rx.reader_gone = true;
                wakers.extend(rx.writer.take());
            }
            wakers.extend(state.end_pipe(self.tx, &self.here.core.config, unread));
        }
        state.net.drop_end(self.rx);
        state.net.drop_end(self.tx);
        drop(state);
        wakers.into_iter().for_each(Waker::wake);
    }
}
