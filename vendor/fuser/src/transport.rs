//! Another way for requests than reading the device: whoever implements it brings them, and takes the answers.

use std::fmt;
use std::io;
use std::io::IoSlice;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

/// Takes the answer of one request to the kernel.
pub trait Answer: Send + Sync + fmt::Debug {
    /// The first part is the kernel's `fuse_out_header`, the others are what follows it.
    fn send(&self, parts: &[IoSlice<'_>]) -> io::Result<()>;
}

/// Where requests are brought.
pub trait Requests {
    /// Dispatches one request on this thread; the answer may be sent from any thread, also before this returns.
    ///
    /// `header` is the kernel's `fuse_in_header`, `argument` what such a request has before its names and data, and
    /// `payload` these. The first two are to be aligned to 8 bytes.
    fn dispatch(
        &self,
        header: &[u8],
        argument: &[u8],
        payload: &[u8],
        answer: Arc<dyn Answer>,
    ) -> io::Result<()>;
}

/// Brings requests from the kernel, on a thread of its own.
pub trait Transport: Send {
    /// Returns when the connection has ended, or when it is told to stop.
    fn serve(self: Box<Self>, device: BorrowedFd<'_>, requests: &dyn Requests) -> io::Result<()>;
}

/// Transports of a session, beside its device.
pub struct Transports {
    /// Each has a thread.
    pub each: Vec<Box<dyn Transport>>,
    /// Tells all of them to return.
    pub stop: Box<dyn Fn() + Send>,
}

impl fmt::Debug for Transports {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} transports", self.each.len())
    }
}
