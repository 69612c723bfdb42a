//! The shared state of one mount's requests, and how a request is answered: at once, or as a task.
use crate::callers::{Callers, Fails};
use crate::kernel::Notices;
use crate::pending_request::PendingRequest;
use crate::streams::Streams;
use crate::work::Work;
use crate::{locks, snapshots};
use fuser::Request;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::Poll;
use std::time::Instant;
use tokio::runtime::Handle as Runtime;
use weir_client::Client;
use weir_env::BufferPool;
use weir_proto::meta::Cred;
use weir_proto::{InodeId, Result};

/// Answers for attributes of ours (`weir.layout`, …): inode, name → text.
pub type OwnAttributes = Arc<dyn Fn(&Client, InodeId, &str) -> OwnAnswer + Send + Sync>;

pub type OwnAnswer = Pin<Box<dyn Future<Output = Result<String>> + Send>>;

/// The action when a program sets one of our attributes: by whom, inode, name, value.
pub type OwnActs = Arc<dyn Fn(&Client, Cred, InodeId, String, Vec<u8>) -> OwnAct + Send + Sync>;

pub type OwnAct = Pin<Box<dyn Future<Output = Result<()>> + Send>>;

pub struct Mounted {
    pub client: Client,
    pub buffers: BufferPool,
    pub runtime: Runtime,
    pub own_attributes: OwnAttributes,
    pub own_acts: OwnActs,
    pub lock_waits: Arc<locks::Waits>,
    pub callers: Arc<Callers>,
    /// Accounting of requests.
    pub work: Arc<Work>,
    /// The kernel's caches.
    pub kernel: Arc<Notices>,
    /// The mount point, and the time when the options were last read.
    pub path: PathBuf,
    pub options_seen: Mutex<Option<Instant>>,
    /// The kernel's references to snapshots.
    pub snapshots: Arc<snapshots::Table>,
    /// Directories that the kernel is reading.
    pub streams: Arc<Streams>,
    /// The kernel can map files that are read directly.
    pub maps_direct: bool,
    /// The kernel is to send requests by rings.
    pub by_ring: bool,
}

impl Mounted {
    /// Polls once here, then continues as a task when it is woken. Their number is bounded by the kernel's
    /// requests.
    pub fn answer(&self, work: impl Future<Output = ()> + Send + 'static) {
        PendingRequest::begin(&self.runtime, work);
    }

    /// Answers a request with the result of its work. The wait ends early if the program is being ended; the
    /// work continues.
    pub fn wait<R: Fails, T: Send + 'static>(
        &self,
        request: &Request,
        reply: R,
        work: impl Future<Output = T> + Send + 'static,
        then: impl FnOnce(R, T) + Send + 'static,
    ) {
        self.wait_or_undo(request, reply, work, then, |_| std::future::ready(()));
    }

    /// Answers a request like [`Mounted::wait`]; `undo` releases the result if the program is gone.
    pub fn wait_or_undo<R: Fails, T: Send + 'static, U: Future<Output = ()> + Send + 'static>(
        &self,
        request: &Request,
        reply: R,
        work: impl Future<Output = T> + Send + 'static,
        then: impl FnOnce(R, T) + Send + 'static,
        undo: impl FnOnce(T) -> U + Send + 'static,
    ) {
        let (callers, runtime) = (self.callers.clone(), self.runtime.clone());
        let (unique, pid, running) = (request.unique().0, request.pid(), self.work.waits(request));
        self.answer(async move {
            let mut work = Box::pin(work);
            if let Poll::Ready(brought) = std::future::poll_fn(|cx| Poll::Ready(work.as_mut().poll(cx))).await
            {
                return then(reply, brought);
            }
            let _running = running;
            let waiting = callers.begin(&runtime, unique, pid);
            tokio::select! {
                biased;
                brought = &mut work => then(reply, brought),
                errno = waiting.ended() => {
                    reply.fail(errno);
                    runtime.spawn(async move { undo(work.await).await });
                }
            }
        });
    }
}
