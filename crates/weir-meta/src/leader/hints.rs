//! Hints to clients that wait for a file lock: it is theirs now.
use super::admission::Admission;
use crate::lock::Woken;
use crate::session::Sessions;
use std::time::Duration;
use weir_env::Env;
use weir_proto::lock::LockFree;

/// How long a hint is retried. Without it the client asks by itself.
const HINT_PATIENCE: Duration = Duration::from_secs(5);

/// Notifies clients whose wait ended.
pub fn hint((env, admission): (&Env, &Admission), sessions: &Sessions, woken: Vec<Woken>) {
    for Woken { session, ticket } in woken {
        let Some(connection) = sessions.get(&session).and_then(|s| s.connection.clone()) else {
            continue;
        };
        let Some(taken) = admission.hint() else { return };
        env.tasks.spawn("lock hint", async move {
            let _taken = taken;
            if let Err(e) = connection.call(&LockFree { ticket }, Vec::new(), HINT_PATIENCE).await {
                tracing::debug!("the hint that a lock is free was lost: {e}");
            }
        });
    }
}
