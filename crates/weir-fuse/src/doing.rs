//! Failures of the operating system as errors that name the operation and a remedy.
use std::fmt;
use weir_proto::{Error, ErrorKind, Result};

pub trait Doing<T> {
    fn doing(self, what: impl fmt::Display) -> Result<T>;
}

impl<T> Doing<T> for std::io::Result<T> {
    fn doing(self, what: impl fmt::Display) -> Result<T> {
        self.map_err(|e| {
            let error = Error::from_io(&what, &e);
            match error.kind {
                ErrorKind::Denied => error.hint("run it as a user who may do that"),
                _ => error,
            }
        })
    }
}

impl<T> Doing<T> for rustix::io::Result<T> {
    fn doing(self, what: impl fmt::Display) -> Result<T> {
        Doing::doing(self.map_err(std::io::Error::from), what)
    }
}
