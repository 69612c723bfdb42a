//! Standby coordinators: each shows in the store that it waits, so that the leading one can name those that
//! are away before they are needed.
//!
//! ```text
//! coordinators         the names of all that have ever waited or led, and when each was last there
//! coordinator/NAME     there while NAME waits: under a lease
//! ```
//!
//! Nothing depends on it: a store that does not answer, or an older coordinator, shows nothing. Knows nothing
//! of the right to lead.
use crate::store::{Revision, Store, Swap};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;
use weir_env::{Env, Instant};
use weir_proto::{Error, Result};

const NAMES_KEY: &str = "coordinators";
/// How long a key stays without a sign of its coordinator.
const PRESENT_FOR: Duration = Duration::from_secs(15);
const SHOW_EVERY: Duration = Duration::from_secs(5);
/// Longer than a restart of the process, and than the lease of one that has begun to lead.
const MISSED_AFTER: Duration = Duration::from_secs(20);
/// One that is away for longer was removed.
const FORGOTTEN_AFTER_S: u64 = 7 * 86_400;
/// How exactly the store knows when a coordinator was last there.
const SEEN_EVERY_S: u64 = 3600;
/// Several coordinators may change the list at the same moment.
const TRIES: usize = 5;

fn key(name: &str) -> String {
    format!("coordinator/{name}")
}

/// Shows that this coordinator waits, for as long as this runs.
pub async fn attend(env: &Env, store: &Arc<dyn Store>, name: &str) -> std::convert::Infallible {
    loop {
        if let Err(e) = show(env, store, name).await {
            tracing::debug!("a standby coordinator is not shown in the store: {e}");
        }
        env.clock.sleep(SHOW_EVERY).await;
    }
}

/// Until an error: the lease has ended, or the store does not answer.
async fn show(env: &Env, store: &Arc<dyn Store>, name: &str) -> Result<()> {
    note(env, store, |names, now_s| names.see(name, now_s)).await?;
    let lease = store.grant_lease(PRESENT_FOR).await?;
    store.put(&key(name), b"waits".to_vec(), Some(lease)).await?;
    loop {
        env.clock.sleep(SHOW_EVERY).await;
        store.keep_lease(lease).await?;
    }
}

/// The leading coordinator's view of the others.
#[derive(Default)]
pub struct Standbys {
    absent_since: BTreeMap<String, Instant>,
}

impl Standbys {
    /// The coordinators that are away, and for how long this one has missed them.
    pub async fn missing(
        &mut self,
        env: &Env,
        store: &Arc<dyn Store>,
        own: &str,
    ) -> Result<Vec<(String, Duration)>> {
        let (names, now) = (read(store).await?.0, env.clock.now());
        let mut present = vec![own.to_owned()];
        for name in names.0.keys().filter(|name| *name != own) {
            if store.get(&key(name)).await?.is_some() {
                present.push(name.clone());
            }
        }
        note(env, store, |names, now_s| {
            let seen = present.iter().fold(false, |changed, name| names.see(name, now_s) | changed);
            names.forget(now_s) | seen
        })
        .await?;
        self.absent_since.retain(|name, _| names.0.contains_key(name) && !present.contains(name));
        let absent = names.0.keys().filter(|name| !present.contains(name));
        let away = absent.map(|name| {
            let since = *self.absent_since.entry(name.clone()).or_insert(now);
            (name.clone(), now.since(since))
        });
        Ok(away.filter(|(_, away)| *away >= MISSED_AFTER).collect())
    }
}

/// When each coordinator was last there, in seconds since 1970.
#[derive(Default, Clone, PartialEq, Eq, Debug)]
struct Names(BTreeMap<String, u64>);

impl Names {
    /// Returns whether that changes anything worth a write.
    fn see(&mut self, name: &str, now_s: u64) -> bool {
        let is_known = self.0.get(name).is_some_and(|seen| seen + SEEN_EVERY_S > now_s);
        if !is_known {
            self.0.insert(name.to_owned(), now_s);
        }
        !is_known
    }
    fn forget(&mut self, now_s: u64) -> bool {
        let before = self.0.len();
        self.0.retain(|_, seen| *seen + FORGOTTEN_AFTER_S > now_s);
        self.0.len() < before
    }
    /// `1790000000 coord-a`, a line for each. Other lines are ignored.
    fn parse(bytes: &[u8]) -> Names {
        let text = String::from_utf8_lossy(bytes);
        let line = |line: &str| {
            let (seen, name) = line.split_once(' ')?;
            Some((name.to_owned(), seen.parse().ok()?))
        };
        Names(text.lines().filter_map(line).collect())
    }
    fn bytes(&self) -> Vec<u8> {
        let line = |(name, seen): (&String, &u64)| format!("{seen} {name}\n");
        self.0.iter().map(line).collect::<String>().into_bytes()
    }
}

async fn read(store: &Arc<dyn Store>) -> Result<(Names, Revision)> {
    let kept = store.get(NAMES_KEY).await?;
    Ok(kept.map_or((Names::default(), Revision(0)), |kept| (Names::parse(&kept.value), kept.revision)))
}

/// Changes the list of names, if `change` returns that it did.
async fn note(env: &Env, store: &Arc<dyn Store>, change: impl Fn(&mut Names, u64) -> bool) -> Result<()> {
    let now_s = u64::try_from(env.clock.wall().0 / 1_000_000_000).unwrap_or(0);
    for _ in 0..TRIES {
        let (mut names, revision) = read(store).await?;
        if !change(&mut names, now_s) {
            return Ok(());
        }
        if let Swap::Done(_) = store.compare_and_swap(NAMES_KEY, revision, names.bytes()).await? {
            return Ok(());
        }
    }
    Err(Error::stale("the list of coordinators changes all the time"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_as_they_are_written() {
        let mut names = Names::default();
        assert!(names.see("coord-a", 100) && names.see("coord b", 200));
        assert!(!names.see("coord-a", 100 + SEEN_EVERY_S - 1), "it is known well enough");
        assert!(names.see("coord-a", 100 + SEEN_EVERY_S));
        assert_eq!(Names::parse(&names.bytes()), names);
        assert_eq!(Names::parse(b"garbage\nx y\n\n"), Names::default());
        assert!(!names.forget(100 + FORGOTTEN_AFTER_S));
        assert!(names.forget(200 + FORGOTTEN_AFTER_S));
        assert_eq!(names.0.keys().collect::<Vec<_>>(), ["coord-a"]);
    }
}
