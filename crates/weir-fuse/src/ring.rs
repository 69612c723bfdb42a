//! Requests by io_uring: a ring for each processor, so that a request is handled on the processor of its
//! program, and the answer and the next request are one system call.
//!
//! Invariant: a ring's thread waits only for its ring: a request that cannot be answered at once continues as
//! a task, and keeps its slot until the answer. A ring gets more slots before all of them wait, so that
//! waiting calls (for locks, for recalls) do not stop the others. Forgets, interrupts and notices have no
//! slot: the kernel sends them by the device. Knows nothing of the requests' meaning.
use crate::ring_header::{Arrived, HEADER_BYTES, answer_bytes, numbers, write_error};
use crate::ring_slot::{Answers, Slot};
use fuser::{Requests, Transport, Transports};
use std::io::{Error, ErrorKind, Result};
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::Duration;
use weir_env::real::{COMMAND_BYTES, CommandEnd, CommandRing, Exchange, stay_on};

/// `FUSE_IO_URING_CMD_REGISTER`: provides buffers for a request.
const REGISTER: u32 = 1;
/// `FUSE_IO_URING_CMD_COMMIT_AND_FETCH`: delivers an answer, and provides its buffers for the next request.
const COMMIT_AND_FETCH: u32 = 2;
/// The initial number of slots of a ring, added again before half of them wait. A request that finds no slot
/// is sent only after another request of its ring is answered, so some must always be free.
const PLACES_FIRST: u32 = 64;
/// The limit of concurrently waiting calls of one processor's programs. A slot that was never used takes a
/// page.
const PLACES_MAX: u32 = 2048;

/// After an answer or a request of this size an idle ring frees memory.
const LARGE_BYTES: usize = 64 << 10;
const RESTED_AFTER: Duration = Duration::from_secs(1);

/// The rings of one mount, and the result of their start.
pub struct Rings {
    pub transports: Transports,
    started: Receiver<Result<()>>,
    count: usize,
}

/// The result of each ring's registration.
pub struct Started {
    outcomes: Receiver<Result<()>>,
    count: usize,
}

impl Rings {
    /// `payload_bytes`: of the largest request or answer.
    pub fn new(payload_bytes: usize) -> Result<Rings> {
        let count = possible_processors()?;
        let (outcome, started) = channel();
        let mut each: Vec<Box<dyn Transport>> = Vec::with_capacity(count);
        let mut all = Vec::with_capacity(count);
        for processor in 0..count {
            let ring = CommandRing::new()?;
            let answers = Arc::new(Answers::new(ring.waker()));
            all.push(answers.clone());
            each.push(Box::new(Queue {
                processor,
                ring,
                answers,
                slots: Vec::new(),
                commit_ids: Vec::new(),
                places_max: PLACES_MAX,
                payload_bytes,
                large: false,
                outcome: outcome.clone(),
            }));
        }
        let stop = Box::new(move || all.iter().for_each(|answers| answers.stop()));
        Ok(Rings { transports: Transports { each, stop }, started, count })
    }

    pub fn split(self) -> (Transports, Started) {
        (self.transports, Started { outcomes: self.started, count: self.count })
    }
}

impl Started {
    /// Returns when the kernel has accepted all rings, or refused one: then the mount must end.
    pub fn wait(self, patience: Duration) -> Result<()> {
        for _ in 0..self.count {
            match self.outcomes.recv_timeout(patience) {
                Ok(outcome) => outcome?,
                Err(_) => return Err(Error::new(ErrorKind::TimedOut, "a ring's thread did not start")),
            }
        }
        Ok(())
    }
}

/// The kernel requires a ring for each possible processor.
fn possible_processors() -> Result<usize> {
    let path = "/sys/devices/system/cpu/possible";
    let text = std::fs::read_to_string(path)?;
    count_processors(text.trim())
        .ok_or_else(|| Error::new(ErrorKind::InvalidData, format!("{path} contains {text:?}")))
}

/// `0-3,8`: five.
fn count_processors(list: &str) -> Option<usize> {
    let mut count = 0_usize;
    for range in list.split(',') {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last) = (first.parse::<u16>().ok()?, last.parse::<u16>().ok()?);
        count += usize::from(last.checked_sub(first)?) + 1;
    }
    Some(count)
}

/// One processor's ring.
struct Queue {
    processor: usize,
    ring: CommandRing,
    answers: Arc<Answers>,
    slots: Vec<Arc<Slot>>,
    /// The commit id for the answer in each slot; 0 before the first request.
    commit_ids: Vec<u64>,
    places_max: u32,
    payload_bytes: usize,
    /// Buffers may have grown large.
    large: bool,
    outcome: Sender<Result<()>>,
}

/// Whether the connection is alive.
type Alive = bool;

impl Transport for Queue {
    fn serve(mut self: Box<Self>, device: BorrowedFd<'_>, requests: &dyn Requests) -> Result<()> {
        let mut early = Vec::new();
        let started = self.start(device, &mut early);
        let failed = started.as_ref().err().map(|e| Error::new(e.kind(), e.to_string()));
        let _ = self.outcome.send(started); // the caller is gone if the mount has ended
        if let Some(e) = failed {
            return Err(e);
        }
        for (place, exchange) in early {
            self.arrived(device, requests, place, exchange)?;
        }
        let mut ready = Vec::new();
        while !self.answers.stopped() && self.handle_completed(device, requests)? {
            self.answers.take(&mut ready);
            for place in &ready {
                if let Some(exchange) = self.slots[*place as usize].take_answered() {
                    self.commit(device, *place, exchange)?;
                }
            }
            self.wait(device)?;
        }
        Ok(())
    }
}

impl Queue {
    /// Registers the first slots, on their processor.
    fn start(&mut self, device: BorrowedFd<'_>, early: &mut Vec<(u32, Exchange)>) -> Result<()> {
        // A processor that is offline, or not allowed to this process, mostly has no programs with requests.
        if let Err(e) = stay_on(self.processor) {
            tracing::debug!("the ring of processor {} is not bound to it: {e}", self.processor);
        }
        self.ring.start()?;
        self.add_places(device, PLACES_FIRST)?;
        // Refused commands have completed when this returns.
        self.ring.submit()?;
        while let Some(end) = self.ring.next_end() {
            match end? {
                CommandEnd::Woken => self.ring.await_wake()?,
                CommandEnd::Command(place, 0, exchange) => early.push((place, exchange)),
                CommandEnd::Command(_, error, _) => return Err(Error::from_raw_os_error(-error)),
            }
        }
        Ok(())
    }

    fn add_places(&mut self, device: BorrowedFd<'_>, count: u32) -> Result<()> {
        for _ in 0..count {
            let place = self.slots.len() as u32; // at most PLACES_MAX
            let exchange = Exchange::new(HEADER_BYTES, self.payload_bytes)?;
            let command = self.command(0);
            self.ring.begin_showing(device, REGISTER, command, place, exchange)?;
            self.slots.push(Arc::new(Slot::new(place, self.answers.clone())));
            self.commit_ids.push(0);
        }
        Ok(())
    }

    /// `struct fuse_uring_cmd_req`: flags, the commit id, the ring.
    fn command(&self, commit_id: u64) -> [u8; COMMAND_BYTES] {
        let mut command = [0; COMMAND_BYTES];
        command[8..16].copy_from_slice(&commit_id.to_le_bytes());
        command[16..18].copy_from_slice(&(self.processor as u16).to_le_bytes());
        command
    }

    fn commit(&mut self, device: BorrowedFd<'_>, place: u32, exchange: Exchange) -> Result<()> {
        self.large |= answer_bytes(exchange.header()) >= LARGE_BYTES;
        let command = self.command(self.commit_ids[place as usize]);
        self.ring.begin(device, COMMIT_AND_FETCH, command, place, exchange)
    }

    /// Handles completed commands.
    fn handle_completed(&mut self, device: BorrowedFd<'_>, requests: &dyn Requests) -> Result<Alive> {
        while let Some(end) = self.ring.next_end() {
            let (place, error, exchange) = match end? {
                CommandEnd::Woken => {
                    self.ring.await_wake()?;
                    continue;
                }
                CommandEnd::Command(place, result, exchange) => (place, -result, exchange),
            };
            match error {
                0 => self.arrived(device, requests, place, exchange)?,
                libc::ENOTCONN | libc::ECONNABORTED | libc::ENODEV => return Ok(false),
                _ if self.commit_ids[place as usize] == 0 => {
                    let error = Error::from_raw_os_error(error);
                    let places = self.slots.len();
                    tracing::warn!(
                        "ring {}: the kernel accepts no more than {places} places: {error}",
                        self.processor
                    );
                    self.places_max = 0;
                }
                // Abandoned by the kernel; its slot is lost.
                libc::ENOENT => tracing::debug!("ring {}: the kernel gave a request up", self.processor),
                _ => return Err(Error::from_raw_os_error(error)),
            }
        }
        Ok(true)
    }

    /// Handles a request, and answers it if that is possible at once.
    fn arrived(
        &mut self,
        device: BorrowedFd<'_>,
        requests: &dyn Requests,
        place: u32,
        mut exchange: Exchange,
    ) -> Result<()> {
        let arrived = match Arrived::read(exchange.header(), self.payload_bytes) {
            Ok(arrived) => arrived,
            Err(e) => {
                let Some((unique, commit_id)) = numbers(exchange.header()) else { return Err(e) };
                tracing::error!("ring {}: {e}", self.processor);
                write_error(unique, exchange.both_mut().0);
                self.commit_ids[place as usize] = commit_id;
                return self.commit(device, place, exchange);
            }
        };
        self.commit_ids[place as usize] = arrived.commit_id;
        let slot = self.slots[place as usize].clone();
        let (header, argument) = (arrived.in_header(), arrived.argument());
        if arrived.payload_bytes == 0 {
            slot.waits(arrived.unique, exchange);
            return requests.dispatch(header, argument, &[], slot);
        }
        self.large |= arrived.payload_bytes >= LARGE_BYTES;
        slot.begin(arrived.unique);
        let payload = &exchange.payload()[..arrived.payload_bytes];
        requests.dispatch(header, argument, payload, slot.clone())?;
        match slot.end(exchange) {
            Some(exchange) => self.commit(device, place, exchange),
            None => Ok(()),
        }
    }

    /// Waits for requests and answers.
    fn wait(&mut self, device: BorrowedFd<'_>) -> Result<()> {
        let places = self.slots.len() as u32;
        if self.ring.held() < self.slots.len() / 2 && places < self.places_max {
            self.add_places(device, places.min(self.places_max - places))?;
        }
        if !self.answers.fall_asleep() {
            return Ok(());
        }
        let ended = self.ring.wait(self.large.then_some(RESTED_AFTER))?;
        self.answers.wake_up();
        if !ended {
            self.ring.trim();
            self.large = false;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_list_of_processors_is_counted() {
        assert_eq!(count_processors("0"), Some(1));
        assert_eq!(count_processors("0-127"), Some(128));
        assert_eq!(count_processors("0-3,8"), Some(5));
        for bad in ["", "a", "3-1", "0-", "0,,1", "70000"] {
            assert_eq!(count_processors(bad), None, "{bad}");
        }
    }
}
