//! Ends of opens, told to the leader many at once.
//!
//! The leader counts opens to know whom a use by others concerns. As long as a lease is held here it asks anyway, so
//! what is told before the answer is told in time, and a file's close costs no message of its own.
//!
//! Invariants: an end is told once, on the connection on which its open is counted: a resume, or a new session,
//! on another one says what is open at that moment, and what was noted before it is dropped. Without a lease nothing is put off.
//! A file of which something is in doubt, or not saved yet, stays open for the leader, so that it is recovered if this client dies.
use crate::inner::{Inner, OpenFile};
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;
use weir_proto::meta::{CLOSED_MAX, Close, Closed, HeldLease, LeaseKind};
use weir_proto::{ErrorKind, InodeId};

/// How long they are put off: long enough to gather what a busy program closes, too short for a person to notice.
const PUT_OFF: Duration = Duration::from_millis(20);
/// With so many noted they are told without waiting.
const NOTED_MAX: usize = 64;
/// Connections that may come and go while one message is being sent.
const TRIES_MAX: u32 = 8;

#[derive(Default)]
pub struct Closes(Mutex<Noted>);

#[derive(Default)]
struct Noted {
    /// On which the leader counts what is noted.
    connection: u64,
    /// Reads and writes of each.
    files: BTreeMap<InodeId, (u32, u32)>,
    /// Somebody will tell soon.
    alarmed: bool,
}

impl Closes {
    fn lock(&self) -> MutexGuard<'_, Noted> {
        self.0.lock().expect("no holder panics")
    }
    fn has(&self, ino: InodeId) -> bool {
        self.lock().files.contains_key(&ino)
    }
}

impl Noted {
    fn take(&mut self, is_kept: impl Fn(InodeId) -> bool) -> Vec<Closed> {
        let noted = self.files.iter().filter(|(ino, _)| !is_kept(**ino)).take(CLOSED_MAX);
        let taken: Vec<Closed> = noted
            .map(|(ino, (reads, writes))| Closed { ino: *ino, reads: *reads, writes: *writes })
            .collect();
        for file in &taken {
            self.files.remove(&file.ino);
        }
        taken
    }
}

impl Inner {
    /// What the leader is told on a new connection. It counts from there.
    pub fn count_from(&self, connection: u64) -> Vec<HeldLease> {
        let mut noted = self.closes.lock();
        *noted = Noted { connection, ..Noted::default() };
        let stamp = self.stamp_naming();
        let held = self.all_nodes().into_iter().filter_map(|node| {
            let mut st = node.lock();
            st.stamp_naming(stamp);
            let useful = st.lease != LeaseKind::None || st.is_open() || st.turn;
            useful.then(|| HeldLease {
                ino: node.ino,
                kind: st.lease,
                token_epoch: st.token_epoch,
                open_read: st.open_read,
                open_write: st.open_write,
                turn: st.turn,
            })
        });
        held.collect()
    }

    /// An open ended: the leader hears of it now or soon.
    pub fn note_closed(&self, file: &OpenFile) {
        let (reads, writes) = (u32::from(file.mode.read), u32::from(file.mode.write));
        let (pressing, alarm) = {
            let mut noted = self.closes.lock();
            let mut st = file.node.lock();
            st.open_read -= reads;
            st.open_write -= writes;
            st.through &= st.open_write > 0;
            let nameless = st.attr.as_ref().is_some_and(|a| a.nlink == 0);
            let pressing = st.lease == LeaseKind::None || nameless;
            drop(st);
            let of_file = noted.files.entry(file.node.ino).or_default();
            *of_file = (of_file.0 + reads, of_file.1 + writes);
            let pressing = pressing || noted.files.len() >= NOTED_MAX;
            (pressing, !std::mem::replace(&mut noted.alarmed, true))
        };
        if pressing || alarm {
            let me = self.arc();
            self.env.tasks.spawn("tell closes", async move {
                if !pressing {
                    me.env.clock.sleep(PUT_OFF).await;
                }
                me.tell_closes().await;
            });
        }
    }

    /// Before a lease on the file is given back.
    pub async fn tell_close_of(&self, ino: InodeId) {
        if self.closes.has(ino) {
            self.tell_closes().await;
        }
    }

    /// Tells all that is noted. What cannot be told is told by the next resume.
    pub async fn tell_closes(&self) {
        let deadline = self.deadline();
        for _ in 0..TRIES_MAX {
            let Ok((connection, session)) = self.session.ready(deadline).await else {
                self.closes.lock().alarmed = false;
                return;
            };
            let files = {
                let mut noted = self.closes.lock();
                if noted.connection != connection.id() {
                    continue; // a newer one is being taken up
                }
                noted.alarmed = false;
                noted.take(|ino| self.known_node(ino).is_some_and(|node| node.lock().is_kept_open()))
            };
            if files.is_empty() {
                return;
            }
            let told = self.session.send(&connection, &Close { session, files }, deadline).await;
            if let Err(e) = told {
                match e.kind {
                    ErrorKind::Unavailable => tracing::debug!("closes were not told: {e}"),
                    _ => tracing::warn!("closes were not told: {e}"),
                }
            }
        }
    }
}
