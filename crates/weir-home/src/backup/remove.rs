//! Removes a backup: only names, so files that other backups share stay there. It can be interrupted and
//! repeated.
use super::{LISTED_AT_ONCE, TreeName, at};
use crate::mover::join_all;
use crate::{Expect, Home, HomePath, ListEntry, Outcome};
use weir_proto::Result;
use weir_proto::meta::FileKind;

/// Names that are removed in parallel.
const AT_ONCE: usize = 16;

/// It is first renamed, so that a partly removed tree is never taken for a backup.
pub async fn remove(home: &dyn Home, name: TreeName) -> Result<()> {
    let path = match name.made() {
        Some(date) => {
            let to = at(TreeName::Removing(date))?;
            remove_all(home, &to).await?; // left by an interrupted removal
            if let Some(found) = home.stat(&at(name)?).await? {
                home.rename(&at(name)?, &Expect::Ours(found.fingerprint), &to, None).await?;
                home.settle().await?;
            }
            to
        }
        None => at(name)?,
    };
    remove_all(home, &path).await?;
    Ok(home.settle().await?)
}

/// Removes an entry that is not a directory, if it exists.
pub async fn remove_name(home: &dyn Home, path: &HomePath) -> Outcome<()> {
    match home.stat(path).await? {
        Some(found) => home.remove(path, &Expect::Ours(found.fingerprint)).await,
        None => Ok(()),
    }
}

/// Removes everything below and the directory itself, deepest first; memory is one part of each directory
/// above.
async fn remove_all(home: &dyn Home, top: &HomePath) -> Result<()> {
    let Some(found) = home.stat(top).await? else { return Ok(()) };
    if found.fingerprint.kind != FileKind::Directory {
        return Ok(home.remove(top, &Expect::Ours(found.fingerprint)).await?);
    }
    let mut above = vec![(top.clone(), found.fingerprint, Vec::<ListEntry>::new())];
    while let Some((dir, fingerprint, left)) = above.last_mut() {
        if let Some(entry) = left.pop() {
            let path = dir.join(&entry.name)?;
            above.push((path, entry.found.fingerprint, Vec::new()));
            continue;
        }
        let (directories, any) = remove_files(home, dir).await?;
        if any || !directories.is_empty() {
            *left = directories;
            continue;
        }
        home.remove(dir, &Expect::Ours(fingerprint.clone())).await?;
        above.pop();
    }
    Ok(())
}

/// Removes the files in one part of a directory; returns the remaining directories, and whether it had other
/// entries.
async fn remove_files(home: &dyn Home, dir: &HomePath) -> Result<(Vec<ListEntry>, bool)> {
    let entries = home.read_dir(dir).await?.next(LISTED_AT_ONCE).await?.entries;
    let (directories, files): (Vec<_>, Vec<_>) =
        entries.into_iter().partition(|entry| entry.found.fingerprint.kind == FileKind::Directory);
    for some in files.chunks(AT_ONCE) {
        let paths = some.iter().map(|e| dir.join(&e.name)).collect::<Result<Vec<_>>>()?;
        let expects: Vec<Expect> = some.iter().map(|e| Expect::Ours(e.found.fingerprint.clone())).collect();
        let calls = paths.iter().zip(&expects).map(|(path, expect)| home.remove(path, expect)).collect();
        join_all(calls).await.into_iter().collect::<Outcome<()>>()?;
    }
    Ok((directories, !files.is_empty()))
}
