//! The failure of a command: its cause, and a remedy.
//!
//! Printed once, in `main`, as `error: …` and `hint: …`; the exit code follows from the error's kind.
use serde_json::{Value, json};
use std::borrow::Cow;
use std::fmt;
use strsim::levenshtein;
use weir_proto::{Error, ErrorKind};

pub type Outcome<T> = Result<T, Failure>;

/// An error, printed with the user's remedy.
#[derive(Debug)]
pub struct Failure {
    pub error: Error,
}

impl Failure {
    /// With the command's hint, unless the error has its own: that one knows more.
    pub fn new(error: Error, hint: impl Into<Cow<'static, str>>) -> Failure {
        let hint = Some(error.hint.unwrap_or_else(|| hint.into()));
        Failure { error: Error { hint, ..error } }
    }
    pub fn kind(&self) -> ErrorKind {
        self.error.kind
    }
    pub fn doing(mut self, what: impl fmt::Display) -> Failure {
        self.error = self.error.doing(what);
        self
    }
    /// For programs: `error`, `hint` (or null) and the exit status.
    pub fn as_json(&self) -> Value {
        let (error, hint) = self.parts();
        json!({ "error": error, "hint": hint, "exit_status": self.kind().exit_code() })
    }
    /// The two parts as they are printed.
    pub fn parts(&self) -> (&str, Option<&str>) {
        (self.error.context.trim(), self.error.hint.as_deref())
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Failure {
        Failure { error }
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (error, hint) = self.parts();
        write!(f, "error: {error}")?;
        hint.map_or(Ok(()), |hint| write!(f, "\nhint: {hint}"))
    }
}

/// Adds the operation to a failure of the operating system.
pub trait Doing<T> {
    fn doing(self, what: impl fmt::Display) -> Outcome<T>;
}
impl<T> Doing<T> for std::io::Result<T> {
    fn doing(self, what: impl fmt::Display) -> Outcome<T> {
        self.map_err(|e| {
            let error = Error::from_io(&what, &e);
            match (error.kind, e.kind()) {
                (ErrorKind::NoSpace, _) => {
                    Failure::new(error, "free some space there, or use another directory")
                }
                (ErrorKind::Denied, _) => Failure::new(error, "run it as a user who may do that"),
                (_, std::io::ErrorKind::AlreadyExists) => {
                    Failure::new(error.of_kind(ErrorKind::Exists), "choose another path")
                }
                // The kernel's answer for a mount without a process.
                (_, std::io::ErrorKind::NotConnected) => Failure::new(
                    error.of_kind(ErrorKind::Unavailable),
                    "the mount's process has ended: `weir unmount MOUNTPOINT`, then mount again",
                ),
                _ => error.into(),
            }
        })
    }
}
impl<T> Doing<T> for rustix::io::Result<T> {
    fn doing(self, what: impl fmt::Display) -> Outcome<T> {
        Doing::doing(self.map_err(std::io::Error::from), what)
    }
}

/// Sorts words, the most similar to `word` first.
pub fn nearest_first(word: &str, known: &mut [String]) {
    known.sort_by_key(|k| levenshtein(word, k));
}

/// The most similar entry of `known` to `word`.
pub fn did_you_mean<'a>(word: &str, known: impl IntoIterator<Item = &'a str>) -> Option<&'a str> {
    let near = known.into_iter().map(|k| (levenshtein(word, k), k)).min()?;
    // A third of the word may be wrong: more is a guess.
    (near.0 * 3 <= word.len().max(3)).then_some(near.1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use weir_proto::wire::Wire;

    #[test]
    fn the_nearest_word_is_suggested_and_a_far_one_is_not() {
        let known = ["memory_mib", "threads", "listen"];
        assert_eq!(did_you_mean("memroy_mib", known), Some("memory_mib"));
        assert_eq!(did_you_mean("thread", known), Some("threads"));
        assert_eq!(did_you_mean("colour", known), None);
        let mut words = ["target", "status"].map(String::from);
        nearest_first("statu", &mut words);
        assert_eq!(words, ["status", "target"]);
    }

    #[test]
    fn a_failure_is_an_object_for_programs() {
        let failure =
            Failure::new(Error::not_found("there is no volume \"x\""), "`weir volume list` shows all");
        let expected = json!({
            "error": "there is no volume \"x\"", "hint": "`weir volume list` shows all", "exit_status": 3,
        });
        assert_eq!(failure.as_json(), expected);
        assert_eq!(Failure::from(Error::io("no")).as_json()["hint"], Value::Null);
    }

    #[test]
    fn the_hint_of_an_error_is_printed_instead_of_the_commands() {
        let error = Error::denied("the target is of another cluster").hint("check it");
        let printed = "error: the target is of another cluster\nhint: check it";
        assert_eq!(Failure::from(error.clone()).to_string(), printed);
        let sent = Error::from_bytes(&error.to_bytes()).unwrap();
        assert_eq!(Failure::new(sent, "try another").to_string(), printed);
        let failure = Failure::new(Error::not_found("no pool"), "try another").doing("add it");
        assert_eq!(failure.to_string(), "error: add it: no pool\nhint: try another");
    }

    #[test]
    fn a_dead_mount_is_named_with_its_remedy() {
        let dead = std::io::Error::from_raw_os_error(rustix::io::Errno::NOTCONN.raw_os_error());
        let failure = Doing::doing(Err::<(), _>(dead), "stat /mnt/f").unwrap_err();
        assert_eq!(failure.kind(), ErrorKind::Unavailable);
        assert!(failure.to_string().contains("weir unmount"), "{failure}");
    }
}
