//! Identities of the directories of a metadata role and of a coordinator.
//!
//! Each is founded once, and only on request: a directory that is empty because its file system is not
//! mounted would otherwise become a new namespace, or a new cluster, in place of the existing one.
use super::text;
use std::path::Path;
use weir_env::Disk;
use weir_proto::map::ClusterMap;
use weir_proto::{ClusterId, Error, NamespaceUuid, Result};

/// The file's name within a namespace's directory.
pub const NAMESPACE_FILE: &str = "weir-namespace.toml";
/// The file's name within the coordinator's directory.
pub const COORDINATOR_FILE: &str = "weir-coordinator.toml";
/// The file never changes, so any backup of it is good; an old copy of the rest of the directory is not.
const DAMAGED_HINT: &str = "put back this one file from a backup, and nothing else of the directory";
/// The contents of the coordinator's directory after an interrupted founding.
const COORDINATOR_FOUNDING: [&str; 2] = ["lock", "coordinator.state"];

#[derive(Clone, PartialEq, Eq, Debug)]
pub struct NamespaceIdentity {
    pub cluster: ClusterId,
    pub name: String,
    /// Random, made when it was founded.
    pub uuid: NamespaceUuid,
    /// The namespace of the same name that it replaces.
    pub instead_of: Option<NamespaceUuid>,
}

/// Checks the directory of the namespace `own.name` of a cluster before anything in it is changed. `new`: an
/// empty one becomes that of `own`; the coordinator learns of it when the node takes the lead, even if that
/// is only after a restart.
pub fn open_namespace(
    disk: &dyn Disk,
    dir: &Path,
    map: &ClusterMap,
    own: &NamespaceIdentity,
    new: bool,
) -> Result<NamespaceIdentity> {
    let (at, path, name) = (dir.display(), dir.join(NAMESPACE_FILE), &own.name);
    let found = text::bytes(disk, &path)?.map(|bytes| {
        let read = NamespaceIdentity::from_text(&bytes);
        read.map_err(|e| text::if_damaged(e.doing(format!("read {}", path.display())), DAMAGED_HINT))
    });
    let found = match (found.transpose()?, new) {
        (Some(found), false) => found,
        (Some(found), true) => {
            return Err(
                Error::exists(format!("{at} holds namespace {:?} already", found.name)).hint("omit --new")
            );
        }
        (None, true) => {
            crate::decide::may_found(map, name, own.instead_of, None)?;
            text::make_vacant(disk, dir, &[])?;
            text::store(disk, &path, &own.to_text())?;
            return Ok(own.clone());
        }
        (None, false) if !disk.exists(dir) => return Err(absent(dir, "meta")),
        (None, false) => {
            return Err(Error::not_found(format!(
                "{at} is not the directory of namespace {name:?}: there is no {NAMESPACE_FILE} in it"
            ))
            .hint(format!(
                "its file system may not be mounted; `weir meta --new` founds a new namespace in an empty \
                 directory; a node whose copy of the namespace is lost takes another one after `weir \
                 namespace copies {name} N --without NODE`"
            )));
        }
    };
    if found.cluster != map.cluster {
        return Err(Error::denied(format!(
            "{at} holds namespace {:?} of cluster {}, this is cluster {}",
            found.name, found.cluster, map.cluster
        ))
        .hint("correct the directory, or the coordinator's address"));
    }
    if found.name != *name {
        return Err(Error::denied(format!("{at} holds namespace {:?}, not {name:?}", found.name))
            .hint("correct the directory, or --namespace"));
    }
    Ok(found)
}

/// Makes an empty directory one for a copy, on a node that keeps nothing of the namespace. All other cases
/// are left to [`open_namespace`].
pub fn begin_copy(
    disk: &dyn Disk,
    dir: &Path,
    map: &ClusterMap,
    own: &NamespaceIdentity,
    node: &str,
) -> Result<()> {
    let path = dir.join(NAMESPACE_FILE);
    let Some(entry) = map.namespace_named(&own.name) else { return Ok(()) };
    let members = map.copies_of(entry.id).into_iter().flat_map(|c| &c.members).map(|m| m.node);
    let mut keepers = entry.leader.into_iter().chain(members).filter_map(|id| map.node(id));
    if text::bytes(disk, &path)?.is_some() || keepers.any(|keeper| keeper.name == node) {
        return Ok(());
    }
    text::make_vacant(disk, dir, &[])?;
    text::store(
        disk,
        &path,
        &NamespaceIdentity { uuid: entry.uuid, instead_of: None, ..own.clone() }.to_text(),
    )
}

/// Makes the directory for a namespace that is restored; its store may exist from an interrupted attempt.
pub fn check_vacant(disk: &dyn Disk, dir: &Path) -> Result<()> {
    text::make_vacant(disk, dir, &["kv"])
}

/// Makes the directory that of this namespace.
pub fn write_namespace(disk: &dyn Disk, dir: &Path, identity: &NamespaceIdentity) -> Result<()> {
    text::store(disk, &dir.join(NAMESPACE_FILE), &identity.to_text())
}

/// The cluster of the coordinator's directory; `None` if it may become a new one, as requested by `new`.
pub fn check_coordinator(disk: &dyn Disk, dir: &Path, new: bool) -> Result<Option<ClusterId>> {
    let (at, path) = (dir.display(), dir.join(COORDINATOR_FILE));
    let found = text::bytes(disk, &path)?.map(|bytes| text::read(&bytes)?.id("cluster"));
    let found: Option<ClusterId> = found
        .transpose()
        .map_err(|e: Error| text::if_damaged(e.doing(format!("read {}", path.display())), DAMAGED_HINT))?;
    match (found, new) {
        (Some(found), false) => Ok(Some(found)),
        (Some(found), true) => {
            Err(Error::exists(format!("{at} is the coordinator's directory of cluster {found} already"))
                .hint("omit --new"))
        }
        (None, true) => text::make_vacant(disk, dir, &COORDINATOR_FOUNDING).map(|()| None),
        (None, false) if !disk.exists(dir) => Err(absent(dir, "coord")),
        (None, false) => Err(Error::not_found(format!(
            "{at} is not the directory of a cluster's coordinator: there is no {COORDINATOR_FILE} in it"
        ))
        .hint(
            "its file system may not be mounted; `weir coord --new` founds another cluster there, which \
             can use nothing of this one",
        )),
    }
}

/// Makes the directory that of this cluster's coordinator.
pub fn write_coordinator(disk: &dyn Disk, dir: &Path, cluster: ClusterId) -> Result<()> {
    let text = text::write(
        "This is the directory of a Weir cluster's coordinator.",
        &[("cluster", &cluster.to_string())],
    );
    text::store(disk, &dir.join(COORDINATOR_FILE), &text)
}

fn absent(dir: &Path, role: &str) -> Error {
    Error::not_found(format!("{} does not exist", dir.display()))
        .hint(format!("mount its file system, or correct the path; `weir {role} --new` makes it"))
}

impl NamespaceIdentity {
    /// The file's text.
    pub fn to_text(&self) -> String {
        let ids = [self.cluster.to_string(), self.uuid.to_string()];
        let instead_of = self.instead_of.map(|uuid| uuid.to_string());
        let mut values = vec![("cluster", &*ids[0]), ("namespace", &self.name), ("uuid", &ids[1])];
        values.extend(instead_of.as_deref().map(|uuid| ("instead-of", uuid)));
        text::write("This directory holds a Weir namespace.", &values)
    }

    pub fn from_text(bytes: &[u8]) -> Result<NamespaceIdentity> {
        let lines = text::read(bytes)?;
        Ok(NamespaceIdentity {
            cluster: lines.id("cluster")?,
            name: lines.value("namespace")?.to_owned(),
            uuid: lines.id("uuid")?,
            instead_of: lines.id_if_any("instead-of")?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{CoordConfig, Coordinator};
    use weir_env::Env;
    use weir_proto::ErrorKind;
    use weir_proto::map::NamespaceEntry;

    fn place() -> (Env, tempfile::TempDir) {
        (weir_env::real::env(), tempfile::tempdir().unwrap())
    }
    fn config(new: bool) -> CoordConfig {
        CoordConfig { new, ..CoordConfig::new("single".parse().unwrap(), 1) }
    }
    async fn map_of(env: &Env, dir: &Path) -> ClusterMap {
        ClusterMap::clone(&Coordinator::open(env.clone(), dir, config(true)).await.unwrap().map())
    }
    fn own(map: &ClusterMap, name: &str) -> NamespaceIdentity {
        NamespaceIdentity {
            cluster: map.cluster,
            name: name.into(),
            uuid: NamespaceUuid([5; 16]),
            instead_of: None,
        }
    }
    fn is_refused<T: std::fmt::Debug>(refused: Result<T>, kind: ErrorKind, text: &str, dir: &Path) {
        let e = refused.unwrap_err();
        assert!(e.kind == kind && e.to_string().contains(text), "{e:?}");
        assert!(e.context.contains(&dir.display().to_string()), "{e:?}");
    }

    #[tokio::test]
    async fn a_namespaces_directory_is_founded_once_and_known_again() {
        let (env, dir) = place();
        let map = map_of(&env, &dir.path().join("coord")).await;
        let [at, other, full] = ["meta", "other", "full"].map(|name| dir.path().join(name));
        let open = |at: &Path, name: &str, new| open_namespace(&*env.disk, at, &map, &own(&map, name), new);
        is_refused(open(&at, "root", false), ErrorKind::NotFound, "does not exist", &at);
        assert!(!env.disk.exists(&at), "nothing was made");
        env.disk.create_dir_all(&at).unwrap();
        is_refused(open(&at, "root", false), ErrorKind::NotFound, "may not be mounted", &at);
        assert!(env.disk.read_dir(&at).unwrap().is_empty(), "nothing was touched");

        let odd = NamespaceIdentity { name: "a \"crc32c = \"".into(), ..own(&map, "") };
        let odd = NamespaceIdentity { instead_of: Some(NamespaceUuid([6; 16])), ..odd };
        assert_eq!(NamespaceIdentity::from_text(odd.to_text().as_bytes()).unwrap(), odd);

        assert_eq!(open(&at, "root", true).unwrap(), own(&map, "root"));
        let fresh = NamespaceIdentity { uuid: NamespaceUuid([9; 16]), ..own(&map, "root") };
        let again = open_namespace(&*env.disk, &at, &map, &fresh, false).unwrap();
        assert_eq!(again, own(&map, "root"), "the directory says which one it is");
        is_refused(open(&at, "root", true), ErrorKind::Exists, "omit --new", &at);
        is_refused(open(&at, "second", false), ErrorKind::Denied, "not \"second\"", &at);
        let mut elsewhere = map.clone();
        elsewhere.cluster = ClusterId([8; 16]);
        let stranger = open_namespace(&*env.disk, &at, &elsewhere, &own(&elsewhere, "root"), false);
        is_refused(stranger, ErrorKind::Denied, "of cluster", &at);

        env.disk.create_dir_all(&full).unwrap();
        env.disk.write_atomic(&full.join("thesis.tex"), b"x").unwrap();
        is_refused(open(&full, "root", true), ErrorKind::Exists, "thesis.tex", &full);
        // The coordinator has one of that name: nothing is made.
        let mut known = map.clone();
        known.namespaces.push(NamespaceEntry {
            id: map.last_namespace,
            name: "root".into(),
            uuid: NamespaceUuid([1; 16]),
            leader: None,
            leader_epoch: Default::default(),
        });
        let over = open_namespace(&*env.disk, &other, &known, &own(&map, "root"), true).unwrap_err();
        assert!(over.context.contains("exists already"), "{over:?}");
        assert!(!env.disk.exists(&other));
    }

    #[tokio::test]
    async fn a_coordinators_directory_is_founded_once_and_known_again() {
        let (env, dir) = place();
        let [at, other] = ["coord", "other"].map(|name| dir.path().join(name));
        let open = async |at: &Path, new| {
            loop {
                match Coordinator::open(env.clone(), at, config(new)).await {
                    // The previous one releases the directory when its task ends.
                    Err(e) if e.context.contains("another coordinator runs") => {
                        tokio::task::yield_now().await
                    }
                    opened => return opened.map(|c| c.cluster()),
                }
            }
        };
        is_refused(open(&at, false).await, ErrorKind::NotFound, "does not exist", &at);
        env.disk.create_dir_all(&at).unwrap();
        is_refused(open(&at, false).await, ErrorKind::NotFound, "may not be mounted", &at);
        assert!(env.disk.read_dir(&at).unwrap().is_empty(), "nothing was touched");
        let cluster = open(&at, true).await.unwrap();
        is_refused(open(&at, true).await, ErrorKind::Exists, "omit --new", &at);
        assert_eq!(open(&at, false).await.unwrap(), cluster);

        // The founding was interrupted before the directory got its identity: a retry gives the same cluster.
        env.disk.remove_file(&at.join(COORDINATOR_FILE)).unwrap();
        is_refused(open(&at, false).await, ErrorKind::NotFound, "--new", &at);
        assert_eq!(open(&at, true).await.unwrap(), cluster);

        // The state is gone, or of another cluster.
        let state = at.join("coordinator.state");
        let kept = env.disk.read(&state).unwrap();
        env.disk.remove_file(&state).unwrap();
        assert_eq!(open(&at, false).await.unwrap_err().kind, ErrorKind::Damaged);
        open(&other, true).await.unwrap();
        env.disk.write_atomic(&state, &env.disk.read(&other.join("coordinator.state")).unwrap()).unwrap();
        is_refused(open(&at, false).await, ErrorKind::Damaged, "as a whole", &at);
        env.disk.write_atomic(&state, &kept).unwrap();
        assert_eq!(open(&at, false).await.unwrap(), cluster);
    }
}
