//! Whether a namespace's leader may answer now. A single one always may; one with copies may as long as no
//! other can have acknowledged anything.
//!
//! Replies pass here after their changes are durable. Knows nothing of their content.
use super::copier::Copier;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use weir_env::Env;
use weir_proto::{Error, Result};

/// The right returns with the next promises of the other copies, or the coordinator decides otherwise.
const PATIENCE: Duration = Duration::from_secs(5);
const POLL: Duration = Duration::from_millis(5);

enum State {
    /// There is no other copy.
    Alone,
    Leads(Arc<Copier>),
    /// Another copy leads, or may lead.
    Over,
}

/// A leader's right to answer, through all the epochs in which it leads without a break.
pub struct Right(Mutex<State>);

impl Right {
    pub fn alone() -> Arc<Right> {
        Arc::new(Right(Mutex::new(State::Alone)))
    }
    pub fn of(copier: Arc<Copier>) -> Arc<Right> {
        Arc::new(Right(Mutex::new(State::Leads(copier))))
    }

    /// This node leads without a break, under another epoch.
    pub fn renew(&self, copier: Arc<Copier>) {
        *self.state() = State::Leads(copier);
    }

    /// Nothing is answered from now on.
    pub fn end(&self) {
        *self.state() = State::Over;
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether this leadership has ended for ever.
    pub fn is_over(&self) -> bool {
        matches!(&*self.state(), State::Over)
    }

    /// Whether durable changes may be reported now.
    pub fn answers(&self) -> bool {
        match &*self.state() {
            State::Alone => true,
            State::Leads(copier) => copier.may_acknowledge() && copier.may_answer(),
            State::Over => false,
        }
    }

    /// Returns when durable changes may be reported.
    pub async fn wait(&self, env: &Env) -> Result<()> {
        let until = env.clock.now() + PATIENCE;
        while !self.answers() {
            let why = match &*self.state() {
                State::Over => Some("this node does not lead the namespace any more"),
                _ if env.clock.now() < until => None,
                State::Leads(copier) if !copier.may_acknowledge() => {
                    Some("too few copies of the namespace are current")
                }
                _ => Some("the other copies of the namespace do not answer"),
            };
            if let Some(why) = why {
                return Err(Error::unavailable(why));
            }
            env.clock.sleep(POLL).await;
        }
        Ok(())
    }
}
