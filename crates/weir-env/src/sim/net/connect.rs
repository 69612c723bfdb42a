//! Repeated attempts to connect, as in TCP.
use super::super::node::{Here, dead};
use super::SimStream;
use crate::Addr;
use std::io;
use std::time::Duration;

/// Like Linux: SYN again after 1, 2, 4 … s; 20 tries less than its default, to keep runs short.
const CONNECT_TRIES: u32 = 5;

/// Result of one attempt to connect.
enum Met {
    Stream(SimStream),
    Refusal,
    Silence,
}

pub async fn connect(here: &Here, addr: &Addr) -> io::Result<SimStream> {
    for attempt in 0..CONNECT_TRIES {
        let wait_ns = {
            let mut state = here.core.lock();
            let to = state.net.homes.get(addr).copied().unwrap_or(here.node);
            state.latency_ns(here.node, to, &here.core.config)
        };
        here.core.sleep(Duration::from_nanos(wait_ns)).await;
        let met = knock(here, addr)?;
        match met {
            Met::Silence => here.core.sleep(Duration::from_secs(1 << attempt)).await,
            Met::Stream(stream) => {
                here.core.sleep(Duration::from_nanos(wait_ns)).await;
                return Ok(stream);
            }
            Met::Refusal => {
                here.core.sleep(Duration::from_nanos(wait_ns)).await;
                let text = format!("no process listens on {addr}");
                return Err(io::Error::new(io::ErrorKind::ConnectionRefused, text));
            }
        }
    }
    Err(io::Error::new(io::ErrorKind::TimedOut, format!("{addr} does not answer")))
}

fn knock(here: &Here, addr: &Addr) -> io::Result<Met> {
    let mut state = here.core.lock();
    if !here.lives_in(&state) {
        return Err(dead());
    }
    let Some(&home) = state.net.homes.get(addr) else { return Ok(Met::Refusal) };
    let blocked = state.net.is_blocked(here.node, home) || state.net.is_blocked(home, here.node);
    if blocked || !state.nodes[home].powered {
        return Ok(Met::Silence);
    }
    if !state.net.listeners.contains_key(addr) {
        return Ok(Met::Refusal);
    }
    let (there, back) = (state.new_pipe(here.node, home), state.new_pipe(home, here.node));
    let peer = format!("{}#{there}", state.nodes[here.node].name);
    let listening = state.net.listeners.get_mut(addr).expect("looked up above");
    listening.queue.push_back((there, back, peer));
    let waker = listening.waker.take();
    state.trace("connect", &[here.node as u64, home as u64, there]);
    drop(state);
    if let Some(waker) = waker {
        waker.wake();
    }
    Ok(Met::Stream(SimStream::new(here, back, there)))
}
