//! Whether a namespace's leader may answer now. A single one always may; one with copies may as long as no
//! other can have acknowledged anything.
//!
//! Replies pass here after their changes are durable. Knows nothing of their content.
use super::lead::Leader;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use weir_env::Env;
use weir_proto::{Error, Result};

/// The right returns with the next promises of the other copies, or the coordinator decides otherwise.
const PATIENCE: Duration = Duration::from_secs(5);
const POLL: Duration = Duration::from_millis(5);

enum Leadership {
    /// There is no other copy.
    Alone,
    Leads(Arc<Leader>),
    /// Another copy leads, or may lead.
    Over,
}

/// A leader's right to answer, through all the epochs in which it leads without a break.
pub struct Right(Mutex<Leadership>);

impl Right {
    pub fn alone() -> Arc<Right> {
        Arc::new(Right(Mutex::new(Leadership::Alone)))
    }
    pub fn of(leader: Arc<Leader>) -> Arc<Right> {
        Arc::new(Right(Mutex::new(Leadership::Leads(leader))))
    }

    /// The same node leads under another epoch.
    pub fn renew(&self, leader: Arc<Leader>) {
        *self.leadership() = Leadership::Leads(leader);
    }

    /// Nothing is answered from now on.
    pub fn end(&self) {
        *self.leadership() = Leadership::Over;
    }

    fn leadership(&self) -> MutexGuard<'_, Leadership> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether this leadership has ended for ever.
    pub fn is_over(&self) -> bool {
        matches!(&*self.leadership(), Leadership::Over)
    }

    /// Whether durable changes may be reported now.
    pub fn answers(&self) -> bool {
        match &*self.leadership() {
            Leadership::Alone => true,
            Leadership::Leads(leader) => leader.may_acknowledge() && leader.may_answer(),
            Leadership::Over => false,
        }
    }

    /// Returns when durable changes may be reported.
    pub async fn wait(&self, env: &Env) -> Result<()> {
        let until = env.clock.now() + PATIENCE;
        while !self.answers() {
            let why = match &*self.leadership() {
                Leadership::Over => Some("this node does not lead the namespace any more"),
                _ if env.clock.now() < until => None,
                Leadership::Leads(leader) if !leader.may_acknowledge() => {
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
