//! Locks: processes of every client count in files, each step under a lock, while faults come.
//!
//! Oracle: no process gets a lock that conflicts with another one's, unless the holder may have lost it: it
//! died, or was silent for longer than a lease. Under a lock the count is the result of the last step; a
//! client's step that was neither durable nor seen by another client may be lost with it. One file is counted
//! in under `fcntl` locks, another under `flock`.
use crate::calls::{close, read_all, read_whole, root_cred};
use crate::client_states::ClientStates;
use crate::context::Context;
use crate::model::Who;
use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::Duration,
};
use tokio::sync::Notify;
use weir_client::{Client, Handle, LockWish, Locked, OpenMode};
use weir_env::{Rng, sim::World};
use weir_proto::lock::{LockKind, LockOwner, LockRange, LockSpace};
use weir_proto::{Error, InodeId};

/// Longest time that a lock is held without faults.
const HOLD_MAX: Duration = Duration::from_millis(300);
/// Longest time after which some waits are interrupted.
const INTERRUPT_MAX: Duration = Duration::from_secs(2);
const DIGITS: usize = 10;

/// The operation under locks in the table of marks.
pub const COUNT: &str = "count";
pub const READ: &str = "read of a count";
pub const OPERATIONS: [&str; 2] = [COUNT, READ];

/// The files with the counts.
pub struct Counters {
    world: World,
    client_states: Arc<ClientStates>,
    counters: Vec<Counter>,
}

pub struct Counter {
    pub name: String,
    ino: InodeId,
    space: LockSpace,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    holds: Vec<Hold>,
    /// The count is at least this after the death of any client.
    safe: u64,
    /// The count after the last step.
    last: u64,
    /// The client of that step, if the step may be lost with it.
    by: Option<Caller>,
    /// A step began to write the next count, and has not ended.
    pending: bool,
}

struct Hold {
    op: u64,
    caller: Caller,
    kind: LockKind,
}

/// A client's state when it got a lock.
#[derive(Clone, Copy)]
struct Caller {
    who: Who,
    /// It was not cut off then: no silence had begun that could end its session.
    sure: bool,
}

impl Counters {
    /// Makes the files.
    pub async fn prepare(
        world: &World,
        client: &Client,
        client_states: &Arc<ClientStates>,
    ) -> Result<Counters, Error> {
        let mut counters = Vec::new();
        for (name, space) in [("fcntl", LockSpace::Fcntl), ("flock", LockSpace::Flock)] {
            let name = format!("counted-under-{name}");
            let cred = root_cred();
            let opened =
                client.create(&cred, InodeId::ROOT, name.as_bytes(), 0o644, true, OpenMode::WRITE).await?;
            client.write(opened.handle, 0, text_of(0).into()).await?;
            client.fsync(opened.handle).await?;
            close(client, opened.handle).await?;
            counters.push(Counter { name, ino: opened.stat.attr.ino, space, state: Mutex::default() });
        }
        Ok(Counters { world: world.clone(), client_states: client_states.clone(), counters })
    }

    pub fn all(&self) -> &[Counter] {
        &self.counters
    }

    fn caller(&self, me: usize) -> Caller {
        Caller { who: self.client_states.who(me), sure: !self.client_states.is_cut(me) }
    }
    /// The client may have lost its lock.
    fn may_have_lost(&self, caller: &Caller) -> bool {
        let who = caller.who;
        !caller.sure || !self.client_states.is_alive(who) || self.client_states.cuts(who.client) != who.cuts
    }

    /// One step of a process of client `me`.
    pub async fn step(&self, context: &Context, client: &Client, me: usize, rng: &Rng) {
        let counter = &self.counters[rng.below(self.counters.len() as u64) as usize];
        let kind = if rng.below(4) == 0 { LockKind::Shared } else { LockKind::Exclusive };
        let under_way = context.begin(me, if kind == LockKind::Exclusive { COUNT } else { READ });
        let op = under_way.op;
        let excused = self.client_states.excuses_all(me);
        let done = async {
            let handle = client.open(&root_cred(), counter.ino, OpenMode::BOTH).await?.handle;
            let done = self.step_under_lock(context, client, me, rng, op, counter, kind, handle).await;
            // Successful or not, it does not rely on the lock any more.
            counter.state().holds.retain(|hold| hold.op != op);
            let closed = close(client, handle).await;
            done.and(closed)
        };
        let done = done.await;
        under_way.check_time("a step under a lock");
        if let Err(e) = done {
            context.complain(me, excused, format!("operation {op}, c{me}: {}", counter.name), &e);
        }
    }

    async fn step_under_lock(
        &self,
        context: &Context,
        client: &Client,
        me: usize,
        rng: &Rng,
        op: u64,
        counter: &Counter,
        kind: LockKind,
        handle: Handle,
    ) -> Result<(), Error> {
        let wish = |kind| LockWish {
            owner: LockOwner { space: counter.space, id: op },
            range: LockRange::new(0, 0).expect("a range of one byte"),
            kind,
            pid: op as u32,
        };
        // The state at the time of its request: a silence that begins while it waits may end its session
        // before it receives the grant.
        let caller = self.caller(me);
        if self.wait(client, handle, wish(Some(kind)), rng).await? == Locked::Interrupted {
            return Ok(());
        }
        context.log(op, format_args!("c{me} has {kind:?} on {}", counter.name));
        self.note_granted(counter, Hold { op, caller, kind });
        let found = self.read(client, counter, handle, &caller).await?;
        self.world.sleep(Duration::from_nanos(rng.below(HOLD_MAX.as_nanos() as u64))).await;
        if kind == LockKind::Exclusive {
            counter.state().pending = true;
            client.write(handle, 0, text_of(found + 1).into()).await?;
            self.note_counted(counter, found + 1, caller);
            if rng.below(2) == 0 {
                client.fsync(handle).await?;
                self.note_safe(counter, found + 1);
            }
        }
        if rng.below(3) > 0 {
            counter.state().holds.retain(|hold| hold.op != op);
            let unlocked = client.try_lock(handle, wish(None)).await?;
            assert_eq!(unlocked, Locked::Granted, "operation {op}: an unlock does not wait");
        } // or the close releases it
        Ok(())
    }

    async fn wait(
        &self,
        client: &Client,
        handle: Handle,
        wish: LockWish,
        rng: &Rng,
    ) -> Result<Locked, Error> {
        let interrupt = Notify::new();
        let waits = client.wait_lock(handle, wish, &interrupt);
        let signal = async {
            self.world.sleep(Duration::from_nanos(rng.below(INTERRUPT_MAX.as_nanos() as u64))).await;
            interrupt.notify_one();
            std::future::pending::<()>().await;
        };
        let locked = if rng.below(3) == 0 {
            tokio::select! {
                biased;
                locked = waits => locked?,
                () = signal => unreachable!("it only signals"),
            }
        } else {
            waits.await?
        };
        assert!(matches!(locked, Locked::Granted | Locked::Interrupted), "one lock only: {locked:?}");
        Ok(locked)
    }

    fn note_granted(&self, counter: &Counter, hold: Hold) {
        let mut state = counter.state();
        state.holds.retain(|other| !self.may_have_lost(&other.caller));
        let excludes = |other: &&Hold| LockKind::Exclusive == other.kind || LockKind::Exclusive == hold.kind;
        if let Some(other) = state.holds.iter().find(excludes)
            && !self.may_have_lost(&hold.caller)
        {
            panic!(
                "{}: operation {} of c{} was granted {:?} while operation {} of c{} has {:?}",
                counter.name,
                hold.op,
                hold.caller.who.client,
                hold.kind,
                other.op,
                other.caller.who.client,
                other.kind
            );
        }
        state.holds.push(hold);
    }

    /// Reads the count under a lock.
    async fn read(
        &self,
        client: &Client,
        counter: &Counter,
        handle: Handle,
        caller: &Caller,
    ) -> Result<u64, Error> {
        let got = read_all(client, handle, 0, 2 * DIGITS).await?;
        if self.may_have_lost(caller) {
            // The lock may belong to another process by now, which continues to count.
            return Ok(count_in(counter, &got));
        }
        Ok(self.check(counter, &got, Some(caller.who)))
    }

    /// Checks that the count found is a possible one; from now on the others know it.
    fn check(&self, counter: &Counter, got: &[u8], by: Option<Who>) -> u64 {
        let found = count_in(counter, got);
        let mut state = counter.state();
        let lost = state.by.as_ref().is_some_and(|by| self.may_have_lost(by));
        let least = if lost { state.safe } else { state.last };
        let most = state.last + u64::from(state.pending);
        assert!(
            (least..=most).contains(&found),
            "{}: {found} is counted, and {least} to {most} were",
            counter.name
        );
        (state.last, state.pending) = (found, false);
        let same =
            |caller: Caller| by.is_some_and(|w| (w.client, w.life) == (caller.who.client, caller.who.life));
        if !state.by.is_some_and(same) {
            (state.safe, state.by) = (found, None);
        }
        found
    }

    fn note_counted(&self, counter: &Counter, count: u64, caller: Caller) {
        let mut state = counter.state();
        // A process that may have lost its lock may have counted concurrently with others.
        if !self.may_have_lost(&caller) || state.last + 1 == count {
            (state.last, state.by, state.pending) = (count, Some(caller), false);
        }
    }

    fn note_safe(&self, counter: &Counter, count: u64) {
        let mut state = counter.state();
        if state.last == count {
            (state.safe, state.by) = (count, None);
        }
    }

    /// Checks every count, as seen by `client`.
    pub async fn verify(&self, client: &Client, when: &str) -> Result<(), Error> {
        for counter in &self.counters {
            let got = read_whole(client, counter.ino).await.map_err(|e| e.doing(when))?;
            self.check(counter, &got, None);
        }
        Ok(())
    }
}

impl Counter {
    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn text_of(count: u64) -> Vec<u8> {
    format!("{count:0DIGITS$}").into_bytes()
}

fn count_in(counter: &Counter, got: &[u8]) -> u64 {
    let text = std::str::from_utf8(got).ok().filter(|text| text.len() == DIGITS);
    let count = text.and_then(|text| text.parse().ok());
    count.unwrap_or_else(|| panic!("{}: {got:?} is not a count", counter.name))
}
