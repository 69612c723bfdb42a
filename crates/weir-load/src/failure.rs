//! Errors of the workloads.
use std::path::Path;
use weir_proto::Error;

pub(crate) fn failed(doing: &str, path: &Path, e: &std::io::Error) -> Error {
    Error::from_io(format!("{doing} {}", path.display()), e)
}
