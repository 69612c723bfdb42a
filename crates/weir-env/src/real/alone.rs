//! A thread with a runtime of its own, for work that must continue while the other threads of the process are
//! busy or wait.
//!
//! It runs as soon as it has something to do, before threads of usual priority, if the process may raise
//! that. The thread ends with the last handle on it. Knows nothing of the work.
use super::processors::stay_nowhere;
use crate::Instant;
use crate::pressure::{Figures, Pressure, Recent};
use std::io;
use tokio::runtime::{Builder, Handle};
use tokio::sync::oneshot;

/// The nice value of such a thread. It works for less than a millisecond in a second, so it takes nothing
/// from others.
const NICE: i32 = -15;

/// The thread ends when this is dropped.
pub(super) struct Thread {
    _ends: oneshot::Sender<()>,
}

pub(super) fn start(name: &str) -> io::Result<(Handle, Thread)> {
    let runtime = Builder::new_current_thread().enable_all().build()?;
    let home = runtime.handle().clone();
    let (ends, ended) = oneshot::channel::<()>();
    std::thread::Builder::new().name(format!("weir-{name}")).spawn(move || {
        stay_nowhere();
        // Process 0 is the calling thread. Without the right to do this it has the priority of the others.
        let _ = rustix::process::setpriority_process(None, NICE);
        let _ = runtime.block_on(ended);
    })?;
    Ok((home, Thread { _ends: ends }))
}

/// The machine's pressure. The kernel has it in memory: this waits for no disk.
pub(super) fn pressure(recent: &Recent, now: Instant) -> Option<Pressure> {
    let of = |what: &str| Figures::of_file(&std::fs::read_to_string(format!("/proc/pressure/{what}")).ok()?);
    Some(recent.pressure(now, [of("cpu")?, of("io")?, of("memory")?]))
}

#[cfg(test)]
mod tests {
    use crate::real::env;
    use std::sync::mpsc;
    use std::time::Duration;

    const PATIENCE: Duration = Duration::from_secs(30);

    fn name() -> String {
        std::thread::current().name().unwrap_or_default().to_owned()
    }

    /// The only thread of the runtime waits here for the work that it must not delay.
    #[tokio::test]
    async fn work_goes_on_while_all_other_threads_are_blocked() {
        let env = env();
        let alone = env.alone("life");
        let (tx, rx) = mpsc::channel();
        let clock = alone.clock.clone();
        alone.tasks.spawn("alive", async move {
            for _ in 0..3 {
                clock.sleep(Duration::from_millis(5)).await;
                tx.send(name()).unwrap();
            }
        });
        for _ in 0..3 {
            assert_eq!(rx.recv_timeout(PATIENCE).as_deref(), Ok("weir-life"));
        }
    }

    #[tokio::test]
    async fn its_sockets_are_served_there_until_the_last_handle_goes() {
        let env = env();
        let alone = env.alone("life");
        let dir = tempfile::tempdir().unwrap();
        let addr = crate::Addr::Unix(dir.path().join("s"));
        let listener = env.net.listen(&addr).await.unwrap();
        let (tx, rx) = tokio::sync::oneshot::channel();
        let (net, at) = (alone.net.clone(), addr.clone());
        alone.tasks.spawn("connect", async move {
            let mut stream = net.connect(&at).await.unwrap();
            tokio::io::AsyncWriteExt::write_all(&mut stream, b"x").await.unwrap();
            let _ = tx.send(name());
        });
        let (mut accepted, _) = listener.accept().await.unwrap();
        let mut byte = [0];
        tokio::io::AsyncReadExt::read_exact(&mut accepted, &mut byte).await.unwrap();
        assert_eq!(rx.await.as_deref(), Ok("weir-life"));
        // A task that waits for ever is dropped with the thread.
        let (held, dropped) = tokio::sync::oneshot::channel::<()>();
        alone.tasks.spawn("waits", async move {
            let _held = held;
            std::future::pending::<()>().await
        });
        drop(alone);
        assert!(env.clock.timeout(PATIENCE, dropped).await.unwrap().is_err());
    }
}
