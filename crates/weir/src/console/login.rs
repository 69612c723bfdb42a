//! Access control: browsers that opened a link, each link once. The first is printed at the start; if links
//! are kept in a file, users who may read that file get the next one from there.
use std::fmt::Write as _;
use std::fs::OpenOptions;
use std::io::Write as _;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, MutexGuard, PoisonError};
use weir_admin::failure::{Doing, Outcome};
use weir_env::{Env, Rng};

/// Browsers that are logged in at the same time; beyond that the first one has to log in again.
const SESSIONS_MAX: usize = 16;

pub struct Login {
    rng: Rng,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Absent: it was used, and there is no other one.
    link: Option<String>,
    sessions: Vec<String>,
}

impl Login {
    pub fn new(env: &Env) -> Login {
        let login = Login { rng: env.rng.clone(), state: Mutex::default() };
        login.renew();
        login
    }
    fn secret(&self) -> String {
        let mut text = String::new();
        for byte in self.rng.id_128() {
            let _ = write!(text, "{byte:02x}"); // writing to a String cannot fail
        }
        text
    }
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
    /// From now on another link works, once.
    pub fn renew(&self) -> String {
        let link = self.secret();
        self.lock().link = Some(link.clone());
        link
    }
    /// The session of the link; none: it is another one, or was used.
    pub fn use_link(&self, key: &str) -> Option<String> {
        let session = self.secret();
        let mut state = self.lock();
        if !state.link.as_deref().is_some_and(|link| is_same(key, link)) {
            return None;
        }
        state.link = None;
        if state.sessions.len() >= SESSIONS_MAX {
            state.sessions.remove(0);
        }
        state.sessions.push(session.clone());
        Some(session)
    }
    pub fn knows(&self, session: &str) -> bool {
        self.lock().sessions.iter().any(|known| is_same(session, known))
    }
}

/// The file with the next link, for users who may read it.
pub struct LinkFile(pub PathBuf);

impl LinkFile {
    /// Replaces the file, so that the permissions of an old one do not apply.
    pub fn put(&self, url: &str) -> Outcome<()> {
        let new = self.0.with_extension("new");
        let _ = std::fs::remove_file(&new); // of a process that died here
        let doing = |path: &Path| format!("write {}", path.display());
        let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(&new);
        file.and_then(|mut file| writeln!(file, "{url}")).doing(doing(&new))?;
        std::fs::rename(&new, &self.0).doing(doing(&self.0))
    }
}

/// Constant time, independent of the first difference.
fn is_same(a: &str, b: &str) -> bool {
    let differing = a.bytes().zip(b.bytes()).fold(0, |sum, (a, b)| sum | (a ^ b));
    a.len() == b.len() && differing == 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_link_works_once_and_its_session_from_then_on() {
        let login = Login::new(&weir_env::real::env());
        assert!(!login.knows("") && login.use_link("").is_none() && login.use_link("no").is_none());
        let link = login.renew();
        let session = login.use_link(&link).unwrap();
        assert_eq!((session.len(), link.len()), (32, 32));
        assert!(login.knows(&session) && !login.knows(&session[1..]) && !login.knows(&link));
        assert_eq!(login.use_link(&link), None);
        assert!(login.knows(&session));
        let sessions: Vec<String> =
            (0..SESSIONS_MAX).map(|_| login.use_link(&login.renew()).unwrap()).collect();
        assert!(!login.knows(&session) && sessions.iter().all(|session| login.knows(session)));
    }

    #[test]
    fn a_file_with_a_link_is_its_owners_only() {
        let dir = tempfile::tempdir().unwrap();
        let file = LinkFile(dir.path().join("link"));
        std::fs::write(&file.0, "old").unwrap();
        file.put("http://x/1").unwrap();
        file.put("http://x/2").unwrap();
        assert_eq!(std::fs::read_to_string(&file.0).unwrap(), "http://x/2\n");
        assert_eq!(std::fs::metadata(&file.0).unwrap().permissions().mode() & 0o777, 0o600);
    }
}
