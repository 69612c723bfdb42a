//! Changes of names at home: the leader assigns names that may be changed in parallel, and each is carried
//! out with the state that is expected there.
use super::assigned::{Done, reported};
use super::relations::Relation;
use crate::{Attrs, Expect, Fault, Fingerprint, Home, HomePath, Make, Outcome, Xattr};
use bytes::Bytes;
use weir_proto::Wire;
use weir_proto::meta::{FileKind, Time};
use weir_proto::relation::{HomeAttrs, NameAction, NameDone, NameWork, Outcome as Reported};

impl Relation {
    /// The leader assigns only names that may be changed in parallel.
    pub(super) async fn change_names(&self, names: Vec<NameWork>) {
        let calls: Vec<_> = names
            .iter()
            .map(|work| async {
                let _one = self.names.pass(1).await;
                act(&*self.home, &work.action).await
            })
            .collect();
        let outcomes = join_all(calls).await;
        assert_eq!(outcomes.len(), names.len(), "a change of a name at home has no outcome");
        let settled = self.home.settle().await;
        for (work, outcome) in names.iter().zip(outcomes) {
            let outcome = match (outcome, &settled) {
                (Ok(fingerprint), Ok(())) => Reported::Done { fingerprint },
                (Err(fault), _) => reported(&fault),
                (Ok(_), Err(fault)) => reported(fault),
            };
            self.report(Done::Name(NameDone { number: work.number, outcome }));
        }
    }
}

pub(super) fn attrs_of(attrs: &HomeAttrs) -> Attrs {
    let mut xattrs: Vec<Xattr> =
        attrs.xattrs.iter().map(|(name, value)| Xattr { name: name.clone(), value: value.clone() }).collect();
    xattrs.sort_by(|a, b| a.name.cmp(&b.name));
    let HomeAttrs { mode, uid, gid, atime, mtime, .. } = *attrs;
    Attrs { mode, uid, gid, atime, mtime, xattrs }
}

/// After a decision that our side counts, a missing entry at home is made; it gets its attributes when it is
/// complete.
pub(super) async fn make_again(home: &dyn Home, path: &HomePath) -> Outcome<()> {
    if home.stat(path).await?.is_some() {
        return Ok(());
    }
    let time = Time { nanos: 0 };
    let attrs = Attrs { mode: 0o600, uid: 0, gid: 0, atime: time, mtime: time, xattrs: Vec::new() };
    home.make(path, &Make::File, &attrs).await.map(drop)
}

/// The expected state. Without a fingerprint (home's root, or a decision that our side counts): the present
/// state.
pub(crate) async fn expect(
    home: &dyn Home,
    path: &HomePath,
    expected: &weir_proto::relation::Expected,
) -> Outcome<Expect> {
    if expected.fingerprint.is_empty() {
        let found = home.stat(path).await?;
        return match found {
            Some(found) => Ok(Expect::Ours(found.fingerprint)),
            None => Err(Fault::diverged(path, None, None)),
        };
    }
    let fingerprint = Fingerprint::from_bytes(&expected.fingerprint)
        .map_err(|e| Fault::new(crate::FaultKind::Broken, path, e))?;
    Ok(if expected.writing { Expect::Ours(fingerprint) } else { Expect::Unchanged(fingerprint) })
}

/// Carries out a change of names; returns the fingerprint of the result.
async fn act(home: &dyn Home, action: &NameAction) -> Outcome<Bytes> {
    let parse = |path: &Bytes| {
        HomePath::parse(path).map_err(|e| Fault::new(crate::FaultKind::Broken, &HomePath::root(), e))
    };
    let fingerprint = match action {
        NameAction::Make { path, kind, target, rdev, attrs } => {
            let what = match kind {
                FileKind::Directory => Make::Directory,
                FileKind::Regular => Make::File,
                FileKind::Symlink => Make::Symlink { target: target.clone() },
                kind => Make::Special { kind: *kind, rdev: *rdev },
            };
            home.make(&parse(path)?, &what, &attrs_of(attrs)).await?
        }
        NameAction::Link { from, path, expect: expected } => {
            let from = parse(from)?;
            let expected = expect(home, &from, expected).await?;
            home.link(&from, &expected, &parse(path)?).await?
        }
        NameAction::Remove { path, expect: expected, .. } => {
            let path = parse(path)?;
            if home.stat(&path).await?.is_none() {
                return Ok(Bytes::new());
            }
            let expected = expect(home, &path, expected).await?;
            home.remove(&path, &expected).await?;
            return Ok(Bytes::new());
        }
        NameAction::Rename { from, to, expect: expected, replaced, .. } => {
            let (from, to) = (parse(from)?, parse(to)?);
            let expected = expect(home, &from, expected).await?;
            let replaced = match replaced {
                Some(replaced) => Some(expect(home, &to, replaced).await?),
                None => None,
            };
            home.rename(&from, &expected, &to, replaced.as_ref()).await?
        }
        NameAction::Exchange { one, other, expect: expected, other_expect } => {
            let (one, other) = (parse(one)?, parse(other)?);
            let (a, b) = (expect(home, &one, expected).await?, expect(home, &other, other_expect).await?);
            home.exchange(&one, &a, &other, &b).await?.0
        }
        NameAction::Attributes { path, attrs, expect: expected, .. } => {
            let path = parse(path)?;
            let expected = expect(home, &path, expected).await?;
            home.set_attrs(&path, &expected, &attrs_of(attrs)).await?
        }
        NameAction::Resize { path, size, expect: expected } => {
            let path = parse(path)?;
            let expected = expect(home, &path, expected).await?;
            home.resize(&path, &expected, *size).await?
        }
    };
    Ok(Bytes::from(fingerprint.to_bytes()))
}

pub(crate) async fn join_all<T, F: Future<Output = T>>(calls: Vec<F>) -> Vec<T> {
    let mut calls: Vec<_> = calls.into_iter().map(|call| (Box::pin(call), None)).collect();
    std::future::poll_fn(move |cx| {
        let mut waits = false;
        for (call, out) in calls.iter_mut().filter(|(_, out)| out.is_none()) {
            match call.as_mut().poll(cx) {
                std::task::Poll::Ready(value) => *out = Some(value),
                std::task::Poll::Pending => waits = true,
            }
        }
        if waits {
            return std::task::Poll::Pending;
        }
        assert!(calls.iter().all(|(_, out)| out.is_some()), "a call has no result though all have ended");
        std::task::Poll::Ready(calls.iter_mut().filter_map(|(_, out)| out.take()).collect())
    })
    .await
}
