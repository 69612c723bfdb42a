//! The coordinator's durable state: a few small keys with compare-and-swap, watch and leases.
//!
//! The trait is small because etcd implements it too ([`crate::etcd::Etcd`]). Here: [`Embedded`], one file,
//! for a cluster with one coordinator process.
//!
//! Invariants: a write that returned is durable; the revision of a key grows with each of its writes and is
//! never 0; a key that was put under a lease is gone once the lease ended; a handle that has claimed a key
//! writes nothing once that claim has ended. Knows nothing of maps: values are bytes.
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;
use weir_env::watch;
use weir_env::{BoxFuture, Env, Instant, OpenMode};
use weir_proto::checksum::crc32c;
use weir_proto::{Error, Reader, Result, Wire, Writer};

/// Grows with each write of the store; 0 stands for "no such key".
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub struct Revision(pub u64);

/// A value and the revision of its last write.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Versioned {
    pub value: Vec<u8>,
    pub revision: Revision,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct LeaseId(pub u64);

/// How a compare-and-swap ended.
#[derive(Clone, PartialEq, Eq, Debug)]
pub enum Swap {
    Done(Revision),
    /// Another handle wrote first; the present entry (`None`: no such key).
    Conflict(Option<Versioned>),
}

/// The trait that the embedded store and etcd share.
pub trait Store: Send + Sync + 'static {
    fn get<'a>(&'a self, key: &'a str) -> BoxFuture<'a, Result<Option<Versioned>>>;
    /// With a lease, the key is deleted when the lease ends. `NotFound`: there is no such lease (any more).
    fn put<'a>(
        &'a self,
        key: &'a str,
        value: Vec<u8>,
        lease: Option<LeaseId>,
    ) -> BoxFuture<'a, Result<Revision>>;
    /// Writes if the key's revision is still `expected` (`Revision(0)`: if there is no such key).
    fn compare_and_swap<'a>(
        &'a self,
        key: &'a str,
        expected: Revision,
        value: Vec<u8>,
    ) -> BoxFuture<'a, Result<Swap>>;
    /// Puts a key under a lease if there is no such key. From then on this handle writes only while the claim
    /// lasts: other writes end in `Stale`, without a change, once the key is gone or belongs to another
    /// handle.
    fn claim<'a>(&'a self, key: &'a str, value: Vec<u8>, lease: LeaseId) -> BoxFuture<'a, Result<Swap>>;
    /// Waits until the key's revision differs from `known`, and returns the present entry.
    fn watch<'a>(&'a self, key: &'a str, known: Revision) -> BoxFuture<'a, Result<Option<Versioned>>>;
    /// A lease ends `ttl` after it was granted or last kept.
    fn grant_lease(&self, ttl: Duration) -> BoxFuture<'_, Result<LeaseId>>;
    fn keep_lease(&self, lease: LeaseId) -> BoxFuture<'_, Result<()>>;
    /// Ends a lease now.
    fn end_lease(&self, lease: LeaseId) -> BoxFuture<'_, Result<()>>;
}

/// One small file, replaced as a whole with each write. Leases and their keys are not stored: they end with
/// the process, and no other process can use the file meanwhile.
pub struct Embedded {
    env: Env,
    path: PathBuf,
    state: Mutex<State>,
    /// One write at a time; held during disk writes, unlike `state`.
    writing: tokio::sync::Mutex<()>,
    changed: watch::Sender<u64>,
    /// Locked while open: no second coordinator on the same directory.
    _lock: Arc<dyn weir_env::File>,
}

#[derive(Clone, Default)]
struct State {
    last: u64,
    keys: BTreeMap<String, Versioned>,
    leased: BTreeMap<String, (LeaseId, Versioned)>,
    leases: BTreeMap<LeaseId, LeaseTerm>,
    claimed: Option<(String, Revision)>,
}
#[derive(Clone, Copy)]
struct LeaseTerm {
    ttl: Duration,
    ends: Instant,
}

impl Embedded {
    /// Opens the store in `dir` (made if absent), and takes its lock.
    pub fn open(env: Env, dir: &Path) -> Result<Arc<Embedded>> {
        let io = |doing: &str, e: &std::io::Error| Error::from_io(format!("{doing} in {}", dir.display()), e);
        env.disk.create_dir_durable(dir).map_err(|e| io("create the coordinator's directory", &e))?;
        let lock = env
            .disk
            .open(&dir.join("lock"), OpenMode::WRITE)
            .map_err(|e| io("open the coordinator's lock", &e))?;
        lock.try_lock().map_err(|e| match e.kind() {
            std::io::ErrorKind::WouldBlock => {
                Error::exists(format!("another coordinator runs on {}", dir.display()))
                    .hint("stop it first, or choose another directory")
            }
            _ => io("lock the coordinator's directory", &e),
        })?;
        let path = dir.join("coordinator.state");
        let state = if env.disk.exists(&path) {
            let bytes = env.disk.read(&path).map_err(|e| io("read coordinator.state", &e))?;
            format::decode(&bytes).map_err(|e| e.doing(format!("read {}", path.display())))?
        } else {
            State::default()
        };
        let (changed, _) = watch::channel(0);
        Ok(Arc::new(Embedded {
            env,
            path,
            state: Mutex::new(state),
            writing: tokio::sync::Mutex::new(()),
            changed,
            _lock: lock,
        }))
    }

    fn with_state<T>(&self, read: impl FnOnce(&mut State) -> T) -> T {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if state.expire(self.env.clock.now()) {
            self.notify();
        }
        read(&mut state)
    }

    fn notify(&self) {
        self.changed.send_modify(|n| *n += 1);
    }

    /// Makes a change durable, then visible.
    async fn write(&self, key: &str, value: Vec<u8>) -> Result<Revision> {
        let mut next = self.with_state(|s| s.clone());
        next.check_claim()?;
        let revision = next.put(key, value);
        let (disk, path, bytes) = (self.env.disk.clone(), self.path.clone(), format::encode(&next));
        self.env
            .tasks
            .blocking(move || disk.write_atomic(&path, &bytes))
            .await
            .map_err(|e| Error::from_io(format!("write {}", self.path.display()), &e))?;
        self.with_state(|s| {
            s.leased.remove(key);
            s.last = s.last.max(next.last);
            s.keys = next.keys;
        });
        self.notify();
        Ok(revision)
    }
}

impl State {
    fn get(&self, key: &str) -> Option<&Versioned> {
        self.keys.get(key).or_else(|| self.leased.get(key).map(|(_, v)| v))
    }
    fn put(&mut self, key: &str, value: Vec<u8>) -> Revision {
        let revision = self.next_revision();
        self.keys.insert(key.to_owned(), Versioned { value, revision });
        revision
    }
    fn next_revision(&mut self) -> Revision {
        self.last += 1;
        Revision(self.last)
    }
    fn check_claim(&self) -> Result<()> {
        let Some((key, revision)) = &self.claimed else { return Ok(()) };
        match self.get(key) {
            Some(present) if present.revision == *revision => Ok(()),
            _ => Err(claim_ended(key)),
        }
    }
    /// A key under a lease.
    fn lend(&mut self, key: &str, value: Vec<u8>, lease: LeaseId) -> Result<Revision> {
        self.check_claim()?;
        if !self.leases.contains_key(&lease) {
            return Err(no_lease(lease));
        }
        let revision = self.next_revision();
        self.leased.insert(key.to_owned(), (lease, Versioned { value, revision }));
        Ok(revision)
    }
    fn end(&mut self, lease: LeaseId) -> bool {
        self.leased.retain(|_, (l, _)| *l != lease);
        self.leases.remove(&lease).is_some()
    }
    fn expire(&mut self, now: Instant) -> bool {
        let ended: Vec<LeaseId> =
            self.leases.iter().filter(|(_, t)| t.ends <= now).map(|(id, _)| *id).collect();
        ended.iter().for_each(|id| {
            self.end(*id);
        });
        !ended.is_empty()
    }
}

pub(crate) fn no_lease(lease: LeaseId) -> Error {
    Error::not_found(format!("lease {} has ended", lease.0))
}

pub(crate) fn claim_ended(key: &str) -> Error {
    Error::stale(format!("the claim on {key:?} has ended: another process may write now"))
}

impl Store for Embedded {
    fn get<'a>(&'a self, key: &'a str) -> BoxFuture<'a, Result<Option<Versioned>>> {
        Box::pin(async move { Ok(self.with_state(|s| s.get(key).cloned())) })
    }

    fn put<'a>(
        &'a self,
        key: &'a str,
        value: Vec<u8>,
        lease: Option<LeaseId>,
    ) -> BoxFuture<'a, Result<Revision>> {
        Box::pin(async move {
            let _one = self.writing.lock().await;
            let Some(lease) = lease else { return self.write(key, value).await };
            if self.with_state(|s| s.keys.contains_key(key)) {
                return Err(Error::invalid(format!("key {key} is kept for good: it takes no lease")));
            }
            let revision = self.with_state(|s| s.lend(key, value, lease))?;
            self.notify();
            Ok(revision)
        })
    }

    fn claim<'a>(&'a self, key: &'a str, value: Vec<u8>, lease: LeaseId) -> BoxFuture<'a, Result<Swap>> {
        Box::pin(async move {
            let _one = self.writing.lock().await;
            let outcome = self.with_state(|s| {
                if let Some(present) = s.get(key) {
                    return Ok(Swap::Conflict(Some(present.clone())));
                }
                s.claimed = None;
                let revision = s.lend(key, value, lease)?;
                s.claimed = Some((key.to_owned(), revision));
                Ok(Swap::Done(revision))
            });
            self.notify();
            outcome
        })
    }

    fn compare_and_swap<'a>(
        &'a self,
        key: &'a str,
        expected: Revision,
        value: Vec<u8>,
    ) -> BoxFuture<'a, Result<Swap>> {
        Box::pin(async move {
            let _one = self.writing.lock().await;
            let present = self.with_state(|s| s.get(key).cloned());
            if present.as_ref().map_or(Revision(0), |v| v.revision) != expected {
                return Ok(Swap::Conflict(present));
            }
            self.write(key, value).await.map(Swap::Done)
        })
    }

    fn watch<'a>(&'a self, key: &'a str, known: Revision) -> BoxFuture<'a, Result<Option<Versioned>>> {
        Box::pin(async move {
            let mut changed = self.changed.subscribe();
            loop {
                changed.borrow_and_update();
                let (present, next_end) =
                    self.with_state(|s| (s.get(key).cloned(), s.leases.values().map(|t| t.ends).min()));
                if present.as_ref().map_or(Revision(0), |v| v.revision) != known {
                    return Ok(present);
                }
                // A lease that expires changes keys without a call.
                let lease_end = async {
                    match next_end {
                        Some(at) => self.env.clock.sleep_until(at).await,
                        None => std::future::pending().await,
                    }
                };
                tokio::select! {
                    biased;
                    _ = changed.changed() => {}
                    () = lease_end => {}
                }
            }
        })
    }

    fn grant_lease(&self, ttl: Duration) -> BoxFuture<'_, Result<LeaseId>> {
        Box::pin(async move {
            let ends = self.env.clock.now() + ttl;
            let id = LeaseId(self.env.rng.next_u64());
            self.with_state(|s| s.leases.insert(id, LeaseTerm { ttl, ends }));
            self.notify();
            Ok(id)
        })
    }

    fn keep_lease(&self, lease: LeaseId) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move {
            let now = self.env.clock.now();
            self.with_state(|s| {
                let term = s.leases.get_mut(&lease).ok_or_else(|| no_lease(lease))?;
                term.ends = now + term.ttl;
                Ok(())
            })
        })
    }

    fn end_lease(&self, lease: LeaseId) -> BoxFuture<'_, Result<()>> {
        Box::pin(async move {
            let existed = self.with_state(|s| s.end(lease));
            self.notify();
            if existed { Ok(()) } else { Err(no_lease(lease)) }
        })
    }
}

/// The keys in the bytes of a `coordinator.state`.
pub fn read_state(bytes: &[u8]) -> Result<BTreeMap<String, Versioned>> {
    Ok(format::decode(bytes)?.keys)
}

/// `coordinator.state`, little-endian: magic (8), CRC32C of all that follows (4), format version (2), last
/// revision (8), count of keys (4), then for each key: name (u32 length, UTF-8), revision (8), value (u32
/// length, bytes).
mod format {
    use super::*;

    const MAGIC: &[u8; 8] = b"WEIRCRD\0";
    const VERSION: u16 = 1;

    pub fn encode(state: &State) -> Vec<u8> {
        let mut body = Writer::default();
        VERSION.encode(&mut body);
        state.last.encode(&mut body);
        (state.keys.len() as u32).encode(&mut body);
        for (key, versioned) in &state.keys {
            key.clone().encode(&mut body);
            versioned.revision.0.encode(&mut body);
            bytes::Bytes::copy_from_slice(&versioned.value).encode(&mut body);
        }
        let mut file = MAGIC.to_vec();
        file.extend_from_slice(&crc32c(&body.bytes).to_le_bytes());
        file.extend_from_slice(&body.bytes);
        file
    }

    pub fn decode(file: &[u8]) -> Result<State> {
        let damaged = |what: &str| Error::damaged(what).hint("restore the file from a copy");
        if file.get(..8) != Some(MAGIC.as_slice()) {
            return Err(damaged("this is not a coordinator state"));
        }
        let body = file.get(12..).ok_or_else(|| damaged("the state is cut short"))?;
        if file[8..12] != crc32c(body).to_le_bytes() {
            return Err(damaged("the state fails its checksum"));
        }
        let mut r = Reader::new(body);
        let version = u16::decode(&mut r)?;
        if version != VERSION {
            return Err(Error::unsupported(format!(
                "format version {version}, this program knows {VERSION}"
            )));
        }
        let mut state = State { last: u64::decode(&mut r)?, ..State::default() };
        for _ in 0..r.count(16)? {
            let key = String::decode(&mut r)?;
            let revision = Revision(u64::decode(&mut r)?);
            let value = bytes::Bytes::decode(&mut r)?.to_vec();
            state.keys.insert(key, Versioned { value, revision });
        }
        r.finish()?;
        Ok(state)
    }

    #[cfg(test)]
    mod tests {
        use super::*;

        fn golden() -> Vec<u8> {
            let mut state = State { last: 8, ..State::default() };
            state.put("map", b"abc".to_vec());
            encode(&state)
        }

        #[test]
        fn the_bytes_on_disk_stay_as_they_are() {
            let hex: String = golden()[12..].iter().map(|b| format!("{b:02x}")).collect();
            assert_eq!(hex, "0100090000000000000001000000030000006d6170090000000000000003000000616263");
        }

        #[test]
        fn damage_is_reported_and_never_believed() {
            let good = golden();
            assert_eq!(decode(&good).unwrap().keys["map"].value, b"abc");
            for i in 0..good.len() {
                let mut bad = good.clone();
                bad[i] ^= 0x10;
                assert!(decode(&bad).is_err(), "byte {i}");
                assert!(decode(&good[..i]).is_err(), "cut at {i}");
            }
        }
    }
}
