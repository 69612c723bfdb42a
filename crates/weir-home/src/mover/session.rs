//! One session of a mover with the leader: its client, and the tasks that end with the session.
//!
//! Invariant: after the end nothing of the session runs, also not what is started later.
use super::PAUSES;
use std::sync::Arc;
use weir_client::Client;
use weir_env::{Env, Pauses, watch};

pub(super) struct Session {
    pub(super) env: Env,
    pub(super) client: Client,
    over: watch::Sender<bool>,
}

impl Session {
    pub(super) fn begin(env: &Env, client: &Client) -> Arc<Session> {
        Arc::new(Session { env: env.clone(), client: client.clone(), over: watch::Sender::new(false) })
    }

    /// A task that ends with this session.
    pub(super) fn spawn(&self, name: &'static str, work: impl Future<Output = ()> + Send + 'static) {
        let over = self.over.subscribe();
        self.env.tasks.spawn(name, async move {
            tokio::select! {
                biased;
                () = until_over(over) => {}
                () = work => {}
            }
        });
    }

    /// Others get this mover's work.
    pub(super) fn end(&self) {
        self.over.send_replace(true);
    }

    pub(super) fn ends_on_drop(self: &Arc<Self>) -> EndsOnDrop {
        EndsOnDrop(self.clone())
    }

    pub(super) fn ended(&self) -> impl Future<Output = ()> + use<> {
        until_over(self.over.subscribe())
    }

    /// Another try follows: not of all movers in the same moment.
    pub(super) async fn pause(&self) {
        let pause = Pauses::new(&self.env.rng, PAUSES).next_pause();
        self.env.clock.sleep(pause).await;
    }
}

async fn until_over(mut over: watch::Receiver<bool>) {
    let _ = over.wait_for(|over| *over).await; // closed: all of that session is gone
}

pub(super) struct EndsOnDrop(Arc<Session>);
impl Drop for EndsOnDrop {
    fn drop(&mut self) {
        self.0.end();
    }
}
