//! The history of a process: a sample of its meters every second.
use std::time::Duration;
use weir_env::Env;

const EVERY: Duration = Duration::from_secs(1);

/// Samples the meters for as long as the process lives.
pub fn keep_history(env: &Env) {
    let sampled = env.clone();
    env.tasks.spawn("history", async move {
        loop {
            sampled.clock.sleep(EVERY).await;
            sampled.watch.sample();
        }
    });
}
