//! How a storage node reaches the cluster: the map, the coordinator, and the targets of other nodes.
//!
//! A seam of its own so that stores can be wired in one process. The cluster's channels are one
//! implementation.
use bytes::Bytes;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;
use weir_env::BoxFuture;
use weir_proto::coord::{PlaceCopied, RefillReport, Suspicion};
use weir_proto::data::*;
use weir_proto::map::ClusterMap;
use weir_proto::{Epoch, Error, PgId, Request, Result, TargetId};
use weir_rpc::Answered;

/// A call to another target, in flight.
pub type PeerReply<R> = BoxFuture<'static, Result<(<R as Request>::Reply, Bytes)>>;

/// A request that targets send each other.
pub trait PeerRequest: Request + Clone + Send + Sync + 'static {
    fn send(
        self,
        peers: &dyn Peers,
        target: TargetId,
        payload: Vec<Bytes>,
        patience: Duration,
    ) -> PeerReply<Self>;
}

macro_rules! peer_calls {
    ($($method:ident: $request:ty),* $(,)?) => {
        /// The calls of a storage node to the rest of the cluster.
        pub trait Peers: Send + Sync + 'static {
            fn map(&self) -> Arc<ClusterMap>;
            fn wait_newer(&self, version: u64, patience: Duration) -> BoxFuture<'static, Result<Arc<ClusterMap>>>;
            /// Reports to the coordinator that a target could not be used; the reply is the newest map after
            /// its decision.
            fn report(&self, target: TargetId, group: PgId, epoch: Epoch, why: String)
                -> BoxFuture<'static, Result<Arc<ClusterMap>>>;
            /// Reports to the coordinator that a target has not answered in time, or (`Slow`) long after
            /// other targets.
            fn suspect(&self, target: TargetId, group: PgId, epoch: Epoch, suspicion: Suspicion, why: String)
                -> BoxFuture<'static, Result<Arc<ClusterMap>>>;
            fn caught_up(&self, target: TargetId, group: PgId, epoch: Epoch)
                -> BoxFuture<'static, Result<Arc<ClusterMap>>>;
            /// Reports that a target has copied nearly all of a place that moves to it, or (`done`) all.
            fn place_copied(&self, _report: PlaceCopied) -> BoxFuture<'static, Result<Arc<ClusterMap>>> {
                Box::pin(async { Err(Error::unsupported("no place moves here")) })
            }
            /// Reports the refill progress of this node's targets.
            fn refill_reported(&self, _reports: Vec<RefillReport>) -> BoxFuture<'static, Result<()>> {
                Box::pin(async { Ok(()) })
            }
            /// Forwards a call to a target for another node that cannot reach it.
            fn pass_on(&self, request: PassOn, payload: Bytes, patience: Duration)
                -> BoxFuture<'static, Result<Answered<Bytes>>>;
            $(fn $method(&self, target: TargetId, request: $request, payload: Vec<Bytes>, patience: Duration)
                -> PeerReply<$request>;)*
        }
        $(impl PeerRequest for $request {
            fn send(self, peers: &dyn Peers, target: TargetId, payload: Vec<Bytes>, patience: Duration)
                -> PeerReply<Self> {
                peers.$method(target, self, payload, patience)
            }
        })*
    };
}
/// Passes `method: Request` of all requests between targets to a macro: the only list of them.
#[macro_export]
macro_rules! with_peer_requests {
    ($then:ident) => {
        $then!(
            write_fragment: WriteFragment,
            commit_stripe: CommitStripe,
            drop_prepared: DropPrepared,
            mirror_overlay: MirrorOverlay,
            mirror_overlays: MirrorOverlays,
            read_cell: ReadCell,
            read_overlays: ReadOverlays,
            stat_cell: StatCell,
            mark_missing: MarkMissing,
            seal_cell: SealCell,
            list_cells: ListCells,
            list_truncations: ListTruncations,
            list_fences: ListFences,
            list_place: ListPlace,
            copy_cell: CopyCell,
        );
    };
}
with_peer_requests!(peer_calls);

/// Waits for all of them; the results are in the order of the calls. A wake polls only those that were woken.
pub async fn join_all<T>(calls: Vec<BoxFuture<'_, T>>) -> Vec<T> {
    let task = Arc::new(Mutex::new(Waker::noop().clone()));
    let place = |call| {
        let call_waker = Arc::new(CallWaker { woken: AtomicBool::new(true), task: task.clone() });
        (Some(call), Waker::from(call_waker.clone()), call_waker)
    };
    let mut running: Vec<(Option<BoxFuture<'_, T>>, Waker, Arc<CallWaker>)> =
        calls.into_iter().map(place).collect();
    let mut results: Vec<Option<T>> = running.iter().map(|_| None).collect();
    let mut left = running.len();
    std::future::poll_fn(|cx| {
        task.lock().unwrap_or_else(PoisonError::into_inner).clone_from(cx.waker());
        for ((call, waker, call_waker), result) in running.iter_mut().zip(&mut results) {
            if !call_waker.woken.swap(false, Ordering::AcqRel) {
                continue;
            }
            if let Some(Poll::Ready(value)) =
                call.as_mut().map(|c| c.as_mut().poll(&mut Context::from_waker(waker)))
            {
                (*result, *call) = (Some(value), None);
                left -= 1;
            }
        }
        if left > 0 { Poll::Pending } else { Poll::Ready(()) }
    })
    .await;
    assert!(results.iter().all(Option::is_some), "a call has no result though all have ended");
    results.into_iter().flatten().collect()
}

/// Wakes the task of one of several calls, and notes which.
struct CallWaker {
    woken: AtomicBool,
    task: Arc<Mutex<Waker>>,
}

impl Wake for CallWaker {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }
    fn wake_by_ref(self: &Arc<Self>) {
        self.woken.store(true, Ordering::Release);
        let task = self.task.lock().unwrap_or_else(PoisonError::into_inner).clone();
        task.wake();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;

    /// A call that the test ends, and how often it was polled.
    #[derive(Default)]
    struct Call {
        polls: AtomicUsize,
        done: AtomicBool,
        waker: Mutex<Option<Waker>>,
    }
    impl Call {
        fn future(self: &Arc<Call>, value: usize) -> BoxFuture<'static, usize> {
            let call = self.clone();
            Box::pin(std::future::poll_fn(move |cx| {
                call.polls.fetch_add(1, Ordering::SeqCst);
                *call.waker.lock().unwrap() = Some(cx.waker().clone());
                if call.done.load(Ordering::SeqCst) { Poll::Ready(value) } else { Poll::Pending }
            }))
        }
        fn wake(&self) {
            let waker = self.waker.lock().unwrap().clone();
            waker.unwrap().wake();
        }
        fn end(&self) {
            self.done.store(true, Ordering::SeqCst);
            self.wake();
        }
    }

    #[derive(Default)]
    struct Task(AtomicUsize);
    impl Wake for Task {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    #[test]
    fn only_the_call_that_was_woken_is_polled() {
        let calls: Vec<Arc<Call>> = (0..4).map(|_| Arc::default()).collect();
        let mut all = Box::pin(join_all(calls.iter().enumerate().map(|(i, c)| c.future(i)).collect()));
        let polls = || calls.iter().map(|c| c.polls.load(Ordering::SeqCst)).collect::<Vec<_>>();
        let (task, moved_to) = (Arc::new(Task::default()), Arc::new(Task::default()));
        let waker = Waker::from(task.clone());
        let mut cx = Context::from_waker(&waker);
        assert!(all.as_mut().poll(&mut cx).is_pending());
        assert_eq!(polls(), [1, 1, 1, 1]);
        calls[2].wake();
        assert_eq!(task.0.load(Ordering::SeqCst), 1);
        assert!(all.as_mut().poll(&mut cx).is_pending());
        assert_eq!(polls(), [1, 1, 2, 1]);
        // A spurious poll: no call was woken.
        assert!(all.as_mut().poll(&mut cx).is_pending());
        assert_eq!(polls(), [1, 1, 2, 1]);
        // Another task waits from now on; wakers of calls that are not polled must point to it too.
        let waker = Waker::from(moved_to.clone());
        let mut cx = Context::from_waker(&waker);
        assert!(all.as_mut().poll(&mut cx).is_pending());
        for i in [3, 0] {
            calls[i].end();
            assert!(all.as_mut().poll(&mut cx).is_pending());
            calls[i].wake(); // after its end: it is not polled again
        }
        [1, 2].into_iter().for_each(|i| calls[i].end());
        assert_eq!(task.0.load(Ordering::SeqCst), 1);
        assert_eq!(moved_to.0.load(Ordering::SeqCst), 6);
        assert_eq!(all.as_mut().poll(&mut cx), Poll::Ready(vec![0, 1, 2, 3]));
        assert_eq!(polls(), [2, 2, 3, 2]);
    }

    #[test]
    fn a_call_that_wakes_itself_while_it_is_polled_is_polled_again() {
        let mut left = 3;
        let yields = std::future::poll_fn(move |cx| {
            left -= 1;
            cx.waker().wake_by_ref();
            if left == 0 { Poll::Ready(7_usize) } else { Poll::Pending }
        });
        let other = Arc::new(Call::default());
        let mut all = Box::pin(join_all(vec![Box::pin(yields) as BoxFuture<'_, usize>, other.future(8)]));
        let task = Arc::new(Task::default());
        let waker = Waker::from(task.clone());
        let mut cx = Context::from_waker(&waker);
        for polls in 1..=3 {
            assert!(all.as_mut().poll(&mut cx).is_pending());
            assert_eq!(task.0.load(Ordering::SeqCst), polls);
        }
        other.end();
        assert_eq!(all.as_mut().poll(&mut cx), Poll::Ready(vec![7, 8]));
    }

    #[tokio::test]
    #[allow(clippy::disallowed_methods, reason = "a thread that no environment knows of")]
    async fn no_wake_from_another_thread_is_lost() {
        for _ in 0..200 {
            let (tx, rx): (Vec<_>, Vec<_>) = (0..8).map(|_| tokio::sync::oneshot::channel()).unzip();
            let answer = |rx: tokio::sync::oneshot::Receiver<usize>| {
                Box::pin(async move { rx.await.unwrap() }) as BoxFuture<'static, usize>
            };
            let reporters = std::thread::spawn(move || {
                tx.into_iter().enumerate().rev().for_each(|(i, tx)| tx.send(i).unwrap());
            });
            assert_eq!(join_all(rx.into_iter().map(answer).collect()).await, [0, 1, 2, 3, 4, 5, 6, 7]);
            reporters.join().unwrap();
        }
    }
}
