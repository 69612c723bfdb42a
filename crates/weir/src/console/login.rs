//! Who may look: a browser that opened the link which was printed at the start, once.
use std::fmt::Write;
use std::sync::{Mutex, MutexGuard, PoisonError};
use weir_env::Env;

/// Browsers that are logged in; only the one link makes one, so there is one.
pub struct Login {
    link: String,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    used: bool,
    session: Option<String>,
    next: String,
}

impl Login {
    pub fn new(env: &Env) -> Login {
        let secret = || {
            let mut text = String::new();
            for byte in env.rng.id_128() {
                let _ = write!(text, "{byte:02x}"); // a String takes all
            }
            text
        };
        let state = State { used: false, session: None, next: secret() };
        Login { link: secret(), state: Mutex::new(state) }
    }
    pub fn link(&self) -> &str {
        &self.link
    }
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
    /// The session that the link stands for; none: it is another one, or was used.
    pub fn use_link(&self, key: &str) -> Option<String> {
        let mut state = self.lock();
        if state.used || !is_same(key, &self.link) {
            return None;
        }
        state.used = true;
        state.session = Some(std::mem::take(&mut state.next));
        state.session.clone()
    }
    pub fn knows(&self, session: &str) -> bool {
        self.lock().session.as_deref().is_some_and(|known| is_same(session, known))
    }
}

/// Takes as long wherever they differ.
fn is_same(a: &str, b: &str) -> bool {
    let differing = a.bytes().zip(b.bytes()).fold(0, |sum, (a, b)| sum | (a ^ b));
    a.len() == b.len() && differing == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_link_works_once_and_its_session_from_then_on() {
        let login = Login::new(&weir_env::real::env());
        assert!(!login.knows("") && login.use_link("").is_none() && login.use_link("no").is_none());
        let session = login.use_link(login.link()).unwrap();
        assert_eq!((session.len(), login.link().len()), (32, 32));
        assert!(login.knows(&session) && !login.knows(&session[1..]) && !login.knows(login.link()));
        assert_eq!(login.use_link(login.link()), None);
        assert!(login.knows(&session));
    }
}
