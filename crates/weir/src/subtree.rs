//! A directory of the file system as the top of a mount.
use weir_admin::failure::{Failure, Outcome};
use weir_client::Client;
use weir_proto::meta::{Cred, FileKind};
use weir_proto::{Error, InodeId};

/// The directory at an absolute path; `/` is the whole namespace. The mount's rules apply: directories that
/// its root may not search cannot be named.
pub async fn find(client: &Client, path: &str) -> Outcome<InodeId> {
    let hint = "name a directory from the top of the file system, like / or /volume";
    if !path.starts_with('/') {
        return Err(Failure::new(Error::invalid(format!("{path:?} is not an absolute path")), hint));
    }
    let cred = Cred { uid: 0, gid: 0, groups: vec![] };
    let (mut dir, mut walked) = (InodeId::ROOT, String::new());
    for name in path.split('/').filter(|name| !name.is_empty() && *name != ".") {
        walked = format!("{walked}/{name}");
        if name == ".." {
            return Err(Failure::new(Error::invalid(format!("{path:?} has .. in it")), hint));
        }
        let found = client.lookup(&cred, dir, name.as_bytes()).await;
        let found = found.map_err(|e| Failure::from(e).doing(format_args!("find {walked}")))?;
        let Some(found) = found else {
            return Err(Failure::new(Error::not_found(format!("the file system has no {walked}")), hint));
        };
        if found.attr.kind != FileKind::Directory {
            return Err(Failure::new(Error::invalid(format!("{walked} is not a directory")), hint));
        }
        dir = found.attr.ino;
    }
    Ok(dir)
}
