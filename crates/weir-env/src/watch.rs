//! A value that many tasks watch: as `tokio::sync::watch`, but waiters wake in the order in which they began
//! to wait.
//!
//! Tokio distributes its waiters over lists at random (with a generator that no seed controls), so a
//! simulated run with it is not repeatable. The part of its interface that is used here has the same names
//! and meanings.
use std::ops::Deref;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};
use tokio::sync::Notify;

/// Changes the value and notifies all receivers.
pub struct Sender<T>(Arc<Shared<T>>);

/// Reads the newest value, and knows whether it has seen it.
pub struct Receiver<T> {
    shared: Arc<Shared<T>>,
    seen: u64,
}

/// The value, locked against changes: drop it before the next `.await`.
pub struct Ref<'a, T>(RwLockReadGuard<'a, State<T>>);

/// The last sender is gone: the value does not change any more.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Closed;

struct Shared<T> {
    state: RwLock<State<T>>,
    changed: Notify,
    senders: AtomicUsize,
}

struct State<T> {
    value: T,
    version: u64,
    closed: bool,
}

pub fn channel<T>(value: T) -> (Sender<T>, Receiver<T>) {
    let sender = Sender::new(value);
    let receiver = sender.subscribe();
    (sender, receiver)
}

impl<T> Sender<T> {
    pub fn new(value: T) -> Sender<T> {
        let state = RwLock::new(State { value, version: 0, closed: false });
        Sender(Arc::new(Shared { state, changed: Notify::new(), senders: AtomicUsize::new(1) }))
    }
    /// A receiver that has seen the present value.
    pub fn subscribe(&self) -> Receiver<T> {
        let seen = self.0.read().version;
        Receiver { shared: self.0.clone(), seen }
    }
    pub fn borrow(&self) -> Ref<'_, T> {
        Ref(self.0.read())
    }
    /// Sets the value, notifies all receivers, and returns the old one.
    pub fn send_replace(&self, value: T) -> T {
        let mut value = value;
        self.send_modify(|present| std::mem::swap(present, &mut value));
        value
    }
    pub fn send_modify(&self, modify: impl FnOnce(&mut T)) {
        self.send_if_modified(|value| {
            modify(value);
            true
        });
    }
    /// Notifies all receivers if `modify` returns that it changed the value. Returns the same.
    pub fn send_if_modified(&self, modify: impl FnOnce(&mut T) -> bool) -> bool {
        let modified = {
            let mut state = self.0.write();
            let modified = modify(&mut state.value);
            state.version += u64::from(modified);
            modified
        };
        if modified {
            self.0.changed.notify_waiters();
        }
        modified
    }
}

impl<T> Clone for Sender<T> {
    fn clone(&self) -> Sender<T> {
        self.0.senders.fetch_add(1, Ordering::Relaxed);
        Sender(self.0.clone())
    }
}
impl<T> Drop for Sender<T> {
    fn drop(&mut self) {
        if self.0.senders.fetch_sub(1, Ordering::AcqRel) == 1 {
            self.0.write().closed = true;
            self.0.changed.notify_waiters();
        }
    }
}

impl<T> Receiver<T> {
    pub fn borrow(&self) -> Ref<'_, T> {
        Ref(self.shared.read())
    }
    pub fn borrow_and_update(&mut self) -> Ref<'_, T> {
        let state = self.shared.read();
        self.seen = state.version;
        Ref(state)
    }
    /// Whether there is a new value.
    pub fn has_changed(&self) -> bool {
        self.shared.read().version != self.seen
    }
    /// Waits for a new value, and marks it as seen.
    pub async fn changed(&mut self) -> Result<(), Closed> {
        let seen = self.seen;
        let version = self.shared.wait(|state| (state.version != seen).then_some(state.version)).await?;
        self.seen = version;
        Ok(())
    }
    /// Waits until the value satisfies the condition (possibly at once), and marks it as seen.
    pub async fn wait_for(&mut self, mut fits: impl FnMut(&T) -> bool) -> Result<Ref<'_, T>, Closed> {
        loop {
            self.shared.wait(|state| fits(&state.value).then_some(())).await?;
            // Another change may have happened in between.
            let state = self.shared.read();
            if fits(&state.value) {
                self.seen = state.version;
                return Ok(Ref(state));
            }
        }
    }
}

impl<T> Clone for Receiver<T> {
    fn clone(&self) -> Receiver<T> {
        Receiver { shared: self.shared.clone(), seen: self.seen }
    }
}
impl<T> Deref for Ref<'_, T> {
    type Target = T;
    fn deref(&self) -> &T {
        &self.0.value
    }
}

impl<T> Shared<T> {
    fn read(&self) -> RwLockReadGuard<'_, State<T>> {
        self.state.read().unwrap_or_else(PoisonError::into_inner)
    }
    fn write(&self) -> RwLockWriteGuard<'_, State<T>> {
        self.state.write().unwrap_or_else(PoisonError::into_inner)
    }
    async fn wait<R>(&self, mut ready: impl FnMut(&State<T>) -> Option<R>) -> Result<R, Closed> {
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            changed.as_mut().enable(); // from here on no change is missed
            {
                let state = self.read();
                if let Some(found) = ready(&state) {
                    return Ok(found);
                }
                if state.closed {
                    return Err(Closed);
                }
            }
            changed.await;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn waiters_wake_in_their_order_and_see_the_value() {
        let (sender, receiver) = channel(0);
        let order = Arc::new(std::sync::Mutex::new(Vec::new()));
        let wait = |n: u32| {
            let (mut receiver, order) = (receiver.clone(), order.clone());
            async move {
                let value = *receiver.wait_for(|v| *v == 7).await.unwrap();
                order.lock().unwrap().push((n, value));
            }
        };
        let set = tokio::task::LocalSet::new();
        for n in 0..40 {
            set.spawn_local(wait(n));
        }
        set.run_until(async {
            tokio::task::yield_now().await;
            sender.send_replace(5);
            tokio::task::yield_now().await;
            assert_eq!(sender.send_replace(7), 5);
        })
        .await;
        set.await;
        assert_eq!(*order.lock().unwrap(), (0..40).map(|n| (n, 7)).collect::<Vec<_>>());
    }

    #[tokio::test]
    async fn the_last_value_is_seen_and_the_end_is_reported() {
        let (sender, mut receiver) = channel("a");
        assert!(!receiver.has_changed());
        assert!(!sender.send_if_modified(|_| false));
        sender.send_modify(|v| *v = "b");
        assert!(receiver.has_changed());
        receiver.changed().await.unwrap();
        assert_eq!(*receiver.borrow_and_update(), "b");
        let second = sender.clone();
        drop(sender);
        second.send_replace("c");
        drop(second);
        assert_eq!(receiver.changed().await, Ok(()));
        assert_eq!(receiver.changed().await, Err(Closed));
        assert_eq!(*receiver.wait_for(|v| *v == "c").await.unwrap(), "c");
        assert!(receiver.wait_for(|v| *v == "d").await.is_err());
    }
}
