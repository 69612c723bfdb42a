//! Closes of files, reported to the leader together, or not at all.
//!
//! The leader counts opens to know which clients a use by another one concerns. While this client holds a
//! lease the leader asks it first, so a close that is reported before that answer is in time and costs no
//! message of its own. A close after reading that was not reported yet serves as the next open for reading,
//! which costs no message either.
//!
//! Invariants: a close is reported once, on the connection on which its open is counted; a resume or a new
//! session on another connection lists the files that are open then, and drops earlier closes. Without a lease
//! no close is delayed. A file with unsaved or uncertain bytes stays open for the leader, so that it is
//! recovered if this client dies.
use crate::api::{OpenMode, Stat};
use crate::inner::{Inner, OpenFile};
use crate::inode::Inode;
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard};
use std::time::Duration;
use weir_env::Instant;
use weir_proto::meta::{CLOSED_MAX, Close, Closed, HeldLease, LeaseKind};
use weir_proto::{ErrorKind, InodeId};

/// How long closes are delayed: enough to gather those of a busy program, too short for a person to notice.
const PUT_OFF: Duration = Duration::from_millis(20);
/// From this number on they are reported without waiting.
const NOTED_MAX: usize = 64;
/// A close after reading is kept for the next open for one to two of these. So the leader does not count a
/// file as open for ever that a program read once.
const KEPT: Duration = Duration::from_secs(30);
/// Most closes that are kept: each takes some 40 bytes here, and at the leader no more than its file's lease.
const KEPT_MAX: usize = 16 * 1024;
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
    /// Reads that are kept for the next opens, and those of the time before.
    kept: BTreeMap<InodeId, u32>,
    older: BTreeMap<InodeId, u32>,
    /// When `kept` was begun.
    kept_since: Option<Instant>,
    /// Somebody will tell soon.
    alarmed: bool,
}

impl Closes {
    fn lock(&self) -> MutexGuard<'_, Noted> {
        self.0.lock().expect("no holder panics")
    }
    pub fn has(&self, ino: InodeId) -> bool {
        let noted = self.lock();
        [&noted.kept, &noted.older].iter().any(|kept| kept.contains_key(&ino))
            || noted.files.contains_key(&ino)
    }
}

impl Noted {
    /// What is kept of a file is to be told.
    fn let_go(&mut self, ino: InodeId) {
        let reads = self.kept.remove(&ino).unwrap_or(0) + self.older.remove(&ino).unwrap_or(0);
        if reads > 0 {
            self.files.entry(ino).or_default().0 += reads;
        }
    }
    fn let_older_go(&mut self) {
        for (ino, reads) in std::mem::take(&mut self.older) {
            self.files.entry(ino).or_default().0 += reads;
        }
        self.older = std::mem::take(&mut self.kept);
    }
    /// One read of those that are not told yet.
    fn take_read(&mut self, ino: InodeId) -> bool {
        for kept in [&mut self.kept, &mut self.older] {
            if let Some(reads) = kept.get_mut(&ino) {
                *reads -= 1;
                if *reads == 0 {
                    kept.remove(&ino);
                }
                return true;
            }
        }
        false
    }

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
        let revoke_clock = self.mark_named();
        let held = self.all_inodes().into_iter().filter_map(|inode| {
            let mut st = inode.lock();
            st.mark_named(revoke_clock);
            let useful = st.lease != LeaseKind::None || st.is_open() || st.append_token;
            useful.then(|| HeldLease {
                ino: inode.ino,
                kind: st.lease,
                token_epoch: st.token_epoch,
                open_read: st.open_read,
                open_write: st.open_write,
                append_token: st.append_token,
            })
        });
        held.collect()
    }

    /// An open ended: the leader hears of it now or soon.
    pub fn note_closed(&self, file: &OpenFile) {
        let (reads, writes) = (u32::from(file.mode.read), u32::from(file.mode.write));
        let (pressing, alarm) = {
            let mut noted = self.closes.lock();
            let mut st = file.inode.lock();
            st.open_read -= reads;
            st.open_write -= writes;
            st.direct &= st.open_write > 0;
            let nameless = st.attr.as_ref().is_some_and(|a| a.nlink == 0);
            let pressing = st.lease == LeaseKind::None || nameless;
            drop(st);
            if !pressing && file.mode == OpenMode::READ {
                *noted.kept.entry(file.inode.ino).or_default() += 1;
                let now = self.env.clock.now();
                let since = *noted.kept_since.get_or_insert(now);
                if noted.kept.len() < KEPT_MAX / 2 && now.since(since) < KEPT {
                    return;
                }
                noted.kept_since = Some(now);
                noted.let_older_go();
            } else {
                let of_file = noted.files.entry(file.inode.ino).or_default();
                *of_file = (of_file.0 + reads, of_file.1 + writes);
            }
            if noted.files.is_empty() {
                return;
            }
            let pressing = pressing || noted.files.len() >= NOTED_MAX;
            (pressing, !std::mem::replace(&mut noted.alarmed, true))
        };
        self.report_closes_soon(pressing, alarm);
    }

    /// An open for reading of a file that the leader counts as open still, and of which a lease is held: it needs no message, and is
    /// counted here.
    pub fn reopen(&self, inode: &Inode) -> Option<Stat> {
        if !self.leases_hold() {
            return None;
        }
        let mut noted = self.closes.lock();
        let mut st = inode.lock();
        let stat = st.stat().filter(|stat| stat.attr.nlink > 0 && !st.recover)?;
        if !noted.take_read(inode.ino) {
            return None;
        }
        st.open_read += 1;
        Some(stat)
    }

    /// The file may have lost its last name, and is deleted with its last close: a kept close is reported soon.
    pub fn keep_no_closes(&self, ino: InodeId) {
        let (pressing, alarm) = {
            let mut noted = self.closes.lock();
            noted.let_go(ino);
            if !noted.files.contains_key(&ino) {
                return;
            }
            (noted.files.len() >= NOTED_MAX, !std::mem::replace(&mut noted.alarmed, true))
        };
        self.report_closes_soon(pressing, alarm);
    }

    fn report_closes_soon(&self, pressing: bool, alarm: bool) {
        if pressing || alarm {
            let me = self.arc();
            self.env.tasks.spawn("tell closes", async move {
                if !pressing {
                    me.env.clock.sleep(PUT_OFF).await;
                }
                me.report_closes().await;
            });
        }
    }

    /// Before a lease on the file is given back.
    pub async fn report_close_of(&self, ino: InodeId) {
        if self.closes.has(ino) {
            self.closes.lock().let_go(ino);
            self.report_closes().await;
        }
    }

    /// Tells what was kept for long.
    pub async fn report_old_closes(&self) {
        let due = {
            let mut noted = self.closes.lock();
            let now = self.env.clock.now();
            let due = noted.kept_since.is_some_and(|since| now.since(since) >= KEPT);
            if due {
                noted.let_older_go();
                noted.kept_since = (!noted.older.is_empty()).then_some(now);
            }
            due && !noted.files.is_empty()
        };
        if due {
            self.report_closes().await;
        }
    }

    /// Also reports kept closes: this client opens no more files.
    pub async fn report_all_closes(&self) {
        for _ in 0..2 {
            self.closes.lock().let_older_go();
        }
        self.report_closes().await;
    }

    /// Tells all that is noted. What cannot be told is told by the next resume.
    pub async fn report_closes(&self) {
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
                noted.take(|ino| self.known_inode(ino).is_some_and(|inode| inode.lock().is_kept_open()))
            };
            if files.is_empty() {
                return;
            }
            let reported = self.session.send(&connection, &Close { session, files }, deadline).await;
            if let Err(e) = reported {
                match e.kind {
                    ErrorKind::Unavailable => tracing::debug!("closes were not told: {e}"),
                    _ => tracing::warn!("closes were not told: {e}"),
                }
            }
        }
    }
}
