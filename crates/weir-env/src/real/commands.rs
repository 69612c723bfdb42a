//! Commands to a device by an io_uring: each gives the kernel a header and a payload buffer, and ends when
//! the kernel has written to them.
//!
//! Invariant: an [`Exchange`] belongs to the kernel or to the program, never to both: a command hands it to
//! the kernel, and its completion returns it. Knows nothing of the meaning of the commands.
use io_uring::squeue::Entry128;
use io_uring::{IoUring, cqueue, opcode, types};
use std::fmt;
use std::io::{Error, ErrorKind, Result};
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::ptr::NonNull;
use std::sync::Arc;
use std::time::Duration;

/// Bytes of a command, in the second half of its submission entry and a part of the first.
pub const COMMAND_BYTES: usize = 80;
/// The header's page: the header from its start, the two `iovec`s at its end.
const HEADER_PAGE_BYTES: usize = 4096;
const IOVECS_AT: usize = HEADER_PAGE_BYTES - 2 * size_of::<libc::iovec>();
/// Submission entries; a command more than that submits those before it.
const SUBMISSIONS: u32 = 64;
/// Completions that wait to be handled; the kernel keeps more of them itself. The memory counts as locked.
const COMPLETIONS: u32 = 512;
/// Where `struct io_uring_sqe` has its `len`.
const LEN_AT: usize = 24;
/// Of the event that wakes the thread; commands have the number of their place.
const WAKE: u64 = u64::MAX;

/// A header and a payload buffer that go to the kernel and return. The payload takes memory where it has
/// been written to.
pub struct Exchange {
    map: NonNull<u8>,
    header_bytes: usize,
    payload_bytes: usize,
}

// SAFETY: the mapping is this value's alone, and is read and written through it only.
unsafe impl Send for Exchange {}
// SAFETY: nothing is changed through a shared reference.
unsafe impl Sync for Exchange {}

impl fmt::Debug for Exchange {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "exchange of {} and {} bytes", self.header_bytes, self.payload_bytes)
    }
}

impl Exchange {
    pub fn new(header_bytes: usize, payload_bytes: usize) -> Result<Exchange> {
        assert!(header_bytes <= IOVECS_AT, "a header fits into its page");
        let bytes = HEADER_PAGE_BYTES + payload_bytes;
        let access = rustix::mm::ProtFlags::READ | rustix::mm::ProtFlags::WRITE;
        let kind = rustix::mm::MapFlags::PRIVATE | rustix::mm::MapFlags::NORESERVE;
        // SAFETY: asks for new memory at an address of the kernel's choice.
        let map = unsafe { rustix::mm::mmap_anonymous(std::ptr::null_mut(), bytes, access, kind)? };
        let map = NonNull::new(map.cast::<u8>()).ok_or_else(|| Error::from(ErrorKind::OutOfMemory))?;
        let exchange = Exchange { map, header_bytes, payload_bytes };
        let iovecs = [
            libc::iovec { iov_base: map.as_ptr().cast(), iov_len: header_bytes },
            libc::iovec { iov_base: exchange.payload_start().cast(), iov_len: payload_bytes },
        ];
        // SAFETY: the place is inside the mapping, aligned as the page is, and not part of the header.
        unsafe { map.as_ptr().add(IOVECS_AT).cast::<[libc::iovec; 2]>().write(iovecs) };
        Ok(exchange)
    }

    fn payload_start(&self) -> *mut u8 {
        // SAFETY: the mapping has the header's page and the payload.
        unsafe { self.map.as_ptr().add(HEADER_PAGE_BYTES) }
    }
    pub fn header(&self) -> &[u8] {
        // SAFETY: the mapping is zeroed memory of at least this length, and the kernel does not have it.
        unsafe { std::slice::from_raw_parts(self.map.as_ptr(), self.header_bytes) }
    }
    /// The header and the payload.
    pub fn both_mut(&mut self) -> (&mut [u8], &mut [u8]) {
        // SAFETY: as above; the two do not overlap, and there are no other references to them.
        unsafe {
            (
                std::slice::from_raw_parts_mut(self.map.as_ptr(), self.header_bytes),
                std::slice::from_raw_parts_mut(self.payload_start(), self.payload_bytes),
            )
        }
    }
    pub fn payload(&self) -> &[u8] {
        // SAFETY: as for the header.
        unsafe { std::slice::from_raw_parts(self.payload_start(), self.payload_bytes) }
    }
}

impl Drop for Exchange {
    fn drop(&mut self) {
        // SAFETY: the mapping was made with this length and ends with its owner.
        let _ =
            unsafe { rustix::mm::munmap(self.map.as_ptr().cast(), HEADER_PAGE_BYTES + self.payload_bytes) };
    }
}

/// Wakes the thread that waits at a ring.
#[derive(Clone, Debug)]
pub struct RingWaker(Arc<OwnedFd>);

impl RingWaker {
    pub fn wake(&self) {
        // A full counter wakes as well.
        let _ = rustix::io::write(&*self.0, &1_u64.to_ne_bytes());
    }
}

/// An event of the ring.
#[derive(Debug)]
pub enum CommandEnd {
    /// Another thread woke this one.
    Woken,
    /// A command: its place, the device's result (negative: an error number), and its buffers.
    Command(u32, i32, Exchange),
}

/// One io_uring of one thread.
pub struct CommandRing {
    ring: IoUring<Entry128>,
    /// With the kernel, by place.
    exchanges: Vec<Option<Exchange>>,
    held: usize,
    event: RingWaker,
    /// Where the kernel puts the event's count.
    count: Box<[u8; 8]>,
}

impl CommandRing {
    /// Any thread may make it; the one that starts it then has it.
    pub fn new() -> Result<CommandRing> {
        let ring = IoUring::<Entry128>::builder()
            .setup_r_disabled()
            .setup_single_issuer()
            .setup_defer_taskrun()
            .setup_cqsize(COMPLETIONS)
            .build(SUBMISSIONS)?;
        let flags = rustix::event::EventfdFlags::CLOEXEC;
        let event = RingWaker(Arc::new(rustix::event::eventfd(0, flags)?));
        Ok(CommandRing { ring, exchanges: Vec::new(), held: 0, event, count: Box::default() })
    }

    pub fn waker(&self) -> RingWaker {
        self.event.clone()
    }

    /// From now on, this thread has it.
    pub fn start(&mut self) -> Result<()> {
        self.ring.submitter().register_enable_rings()?;
        self.await_wake()
    }

    /// Has to be called after each [`CommandEnd::Woken`].
    pub fn await_wake(&mut self) -> Result<()> {
        let read = opcode::Read::new(types::Fd(self.event.0.as_raw_fd()), self.count.as_mut_ptr(), 8);
        self.push(Entry128::from(read.build().user_data(WAKE)))
    }

    /// Frees the memory of payloads that the kernel holds and that are empty. To be called after a wait in
    /// which nothing ended.
    pub fn trim(&mut self) {
        // The kernel writes to a payload only while this thread waits (`DEFER_TASKRUN`), and a completion
        // follows: without one, all of them are empty.
        if !self.ring.completion().is_empty() {
            return;
        }
        for exchange in self.exchanges.iter().flatten() {
            let (start, bytes) = (exchange.payload_start().cast(), exchange.payload_bytes);
            // SAFETY: the range belongs to the exchange, and there are no references into it.
            let _ = unsafe { rustix::mm::madvise(start, bytes, rustix::mm::Advice::LinuxDontNeed) };
        }
    }

    /// How many commands are with the kernel.
    pub fn held(&self) -> usize {
        self.held
    }

    /// Begins a command that shows the device where the exchange's buffers are.
    pub fn begin_showing(
        &mut self,
        device: BorrowedFd<'_>,
        operation: u32,
        command: [u8; COMMAND_BYTES],
        place: u32,
        exchange: Exchange,
    ) -> Result<()> {
        // SAFETY: a place inside the mapping.
        let iovecs = unsafe { exchange.map.as_ptr().add(IOVECS_AT) };
        let command = opcode::UringCmd80::new(types::Fd(device.as_raw_fd()), operation).cmd(command);
        let mut entry = command.addr(Some(iovecs as u64)).build().user_data(place.into());
        // The crate cannot set the number of buffers.
        // SAFETY: the entry is `struct io_uring_sqe`, whose `len` is at this place and as large.
        unsafe { (&raw mut entry).cast::<u8>().add(LEN_AT).cast::<u32>().write(2) };
        self.begin_entry(entry, place, exchange)
    }

    /// Begins a command of which the device knows where its buffers are.
    pub fn begin(
        &mut self,
        device: BorrowedFd<'_>,
        operation: u32,
        command: [u8; COMMAND_BYTES],
        place: u32,
        exchange: Exchange,
    ) -> Result<()> {
        let command = opcode::UringCmd80::new(types::Fd(device.as_raw_fd()), operation).cmd(command);
        self.begin_entry(command.build().user_data(place.into()), place, exchange)
    }

    fn begin_entry(&mut self, entry: Entry128, place: u32, exchange: Exchange) -> Result<()> {
        let at = place as usize;
        if self.exchanges.len() <= at {
            self.exchanges.resize_with(at + 1, || None);
        }
        assert!(self.exchanges[at].is_none(), "one command at a time has a place");
        self.exchanges[at] = Some(exchange);
        self.held += 1;
        self.push(entry)
    }

    fn push(&mut self, entry: Entry128) -> Result<()> {
        // SAFETY: the entry refers to buffers in `exchanges` and in `self`, which live until its completion.
        if unsafe { self.ring.submission().push(&entry) }.is_ok() {
            return Ok(());
        }
        self.submit()?;
        // SAFETY: as above.
        let pushed = unsafe { self.ring.submission().push(&entry) };
        pushed.map_err(|_| Error::other("the kernel takes no more commands"))
    }

    /// Gives the kernel what was begun, without a wait.
    pub fn submit(&mut self) -> Result<()> {
        loop {
            match self.ring.submit() {
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                submitted => return submitted.map(drop),
            }
        }
    }

    /// Gives the kernel what was begun, and waits until something has ended. False: nothing did in that time.
    pub fn wait(&mut self, at_most: Option<Duration>) -> Result<bool> {
        let waited = match at_most {
            None => self.ring.submit_and_wait(1),
            Some(at_most) => {
                let time = types::Timespec::from(at_most);
                let submitter = self.ring.submitter();
                submitter.submit_with_args(1, &types::SubmitArgs::new().timespec(&time))
            }
        };
        match waited {
            // It reports no time-out if something was submitted as well.
            Ok(_) => Ok(!self.ring.completion().is_empty()),
            Err(e) if e.raw_os_error() == Some(libc::ETIME) => Ok(false),
            // A signal, or completions that have to be taken first.
            Err(e) if matches!(e.raw_os_error(), Some(libc::EINTR | libc::EBUSY)) => Ok(true),
            Err(e) => Err(e),
        }
    }

    /// The next event, without a wait. An error: the kernel completed a command that it does not have.
    pub fn next_end(&mut self) -> Option<Result<CommandEnd>> {
        let end: cqueue::Entry = self.ring.completion().next()?;
        if end.user_data() == WAKE {
            return Some(Ok(CommandEnd::Woken));
        }
        let (place, result) = (end.user_data(), end.result());
        let exchange = usize::try_from(place).ok().and_then(|at| self.exchanges.get_mut(at)?.take());
        Some(match exchange {
            Some(exchange) => {
                self.held -= 1;
                Ok(CommandEnd::Command(place as u32, result, exchange))
            }
            None => Err(Error::new(
                ErrorKind::InvalidData,
                format!("the kernel ended command {place}, which was never given to it"),
            )),
        })
    }
}

impl Drop for CommandRing {
    fn drop(&mut self) {
        // The kernel may have these buffers for as long as it takes to end the ring: their memory stays.
        self.exchanges.drain(..).flatten().for_each(std::mem::forget);
        // The read of the event, too.
        std::mem::forget(std::mem::take(&mut self.count));
    }
}

impl fmt::Debug for CommandRing {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ring {} with {} commands", self.ring.as_raw_fd(), self.held)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::fd::AsFd;

    /// A machine may forbid io_uring altogether; then there is nothing to test.
    fn ring() -> Option<CommandRing> {
        let made = CommandRing::new();
        let forbidden =
            made.as_ref().is_err_and(|e| matches!(e.raw_os_error(), Some(libc::EPERM | libc::ENOSYS)));
        (!forbidden).then(|| made.unwrap())
    }

    #[test]
    fn a_ring_is_woken_by_another_thread() {
        let Some(mut ring) = ring() else { return };
        ring.start().unwrap();
        assert!(!ring.wait(Some(Duration::from_millis(1))).unwrap(), "nothing woke it");
        for _ in 0..3 {
            let waker = ring.waker();
            let other = std::thread::spawn(move || waker.wake());
            while ring.next_end().is_none_or(|end| !matches!(end, Ok(CommandEnd::Woken))) {
                ring.wait(None).unwrap();
            }
            ring.await_wake().unwrap();
            other.join().unwrap();
        }
    }

    #[test]
    fn a_refused_command_brings_its_buffers_back() {
        let Some(mut ring) = ring() else { return };
        ring.start().unwrap();
        let device = tempfile::tempfile().unwrap();
        let mut exchange = Exchange::new(288, 8192).unwrap();
        let (header, payload) = exchange.both_mut();
        header.fill(7);
        payload[8191] = 9;
        ring.begin_showing(device.as_fd(), 1, [0; COMMAND_BYTES], 3, exchange).unwrap();
        assert_eq!(ring.held(), 1);
        ring.wait(None).unwrap();
        let Some(Ok(CommandEnd::Command(3, result, exchange))) = ring.next_end() else { panic!("no end") };
        assert!(result < 0, "a file knows no commands");
        assert_eq!((exchange.header(), exchange.payload()[8191]), (&[7; 288][..], 9));
        assert_eq!(ring.held(), 0);
    }

    #[test]
    fn more_commands_than_the_ring_has_entries_are_begun() {
        let Some(mut ring) = ring() else { return };
        ring.start().unwrap();
        let device = tempfile::tempfile().unwrap();
        let places = SUBMISSIONS * 2 + 5;
        for place in 0..places {
            let exchange = Exchange::new(288, 4096).unwrap();
            ring.begin(device.as_fd(), 1, [0; COMMAND_BYTES], place, exchange).unwrap();
        }
        ring.submit().unwrap();
        let mut ended = 0;
        while ended < places {
            match ring.next_end() {
                Some(end) => {
                    assert!(matches!(end.unwrap(), CommandEnd::Command(_, result, _) if result < 0));
                    ended += 1;
                }
                None => assert!(ring.wait(Some(Duration::from_secs(20))).unwrap()),
            }
        }
    }
}
