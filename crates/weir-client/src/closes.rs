//! Closes of files, reported to the leader in batches, or not at all.
//!
//! The leader counts opens to know which clients an access by another one concerns. While this client holds a
//! lease the leader revokes it first, so a close that is reported before the answer to that is in time and
//! needs no message of its own. An unreported close of a reader serves as the next open for reading, which
//! needs no message either.
//!
//! Invariants: a close is reported once, on the connection on which its open is counted; a resume or a new
//! session on another connection lists the files that are open then, and drops earlier closes. Without a
//! lease no close is delayed. A file with unsaved or in-doubt bytes stays open for the leader, so that it is
//! recovered if this client dies.
mod noted;

pub use noted::Noted;

use crate::base::Base;
use crate::handles::OpenFile;
use crate::inode::Inode;
use crate::inodes::Inodes;
use crate::leader::Leader;
use crate::types::{OpenMode, Stat};
use noted::Alarm;
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;
use weir_env::Env;
use weir_proto::meta::{Close, HeldLease};
use weir_proto::{Error, ErrorKind, InodeId};

/// The delay of a close: long enough to collect those of a busy program, too short for a person to notice.
const PUT_OFF: Duration = Duration::from_millis(20);
/// Connections that may be lost while one message is being sent; messages of a caller that reports.
const TRIES_MAX: u32 = 8;

pub struct Closes {
    env: Env,
    leader: Arc<Leader>,
    inodes: Arc<Inodes>,
    noted: Mutex<Noted>,
}

impl Closes {
    pub fn new(base: &Base) -> Closes {
        let Base { env, leader, inodes, .. } = base.clone();
        Closes { env, leader, inodes, noted: Mutex::default() }
    }
    /// Locked before an inode's state.
    fn noted(&self) -> MutexGuard<'_, Noted> {
        self.noted.lock().expect("no holder panics")
    }
    /// Panics where an invariant of the noted closes does not hold.
    pub fn check(&self) {
        self.noted().check();
    }

    /// The open files to report on a new connection. The counts start from these.
    pub fn count_from(&self, connection: u64) -> Vec<HeldLease> {
        let mut noted = self.noted();
        noted.check();
        noted.begin(connection);
        let revoke_clock = self.inodes.mark_named();
        let held = self.inodes.all().into_iter().filter_map(|inode| {
            let mut st = inode.lock();
            st.lease.mark_named(revoke_clock);
            if !st.local.state().is_counted() {
                return None; // the leader has no count of it
            }
            st.report_again(None);
            let useful = st.lease.is_held() || st.opens.is_open() || st.lease.has_append_token();
            useful.then(|| HeldLease {
                ino: inode.ino,
                kind: st.lease.kind(),
                token_epoch: st.lease.token_epoch(),
                open_read: st.opens.for_reading(),
                open_write: st.opens.for_writing(),
                append_token: st.lease.has_append_token(),
            })
        });
        held.collect()
    }

    /// An open ended: it is reported to the leader now or soon.
    pub fn note(self: &Arc<Self>, file: &OpenFile) {
        let (reads, writes) = (u32::from(file.mode.read), u32::from(file.mode.write));
        let alarm = {
            let mut noted = self.noted();
            let mut st = file.inode.lock();
            st.end_opens(reads, writes);
            if st.local.state().is_unreported() {
                return; // it is reported with the create, or after it
            }
            let nameless = st.attr.as_ref().is_some_and(|a| a.nlink == 0);
            let pressing = !st.lease.is_held() || nameless;
            drop(st);
            if !pressing && file.mode == OpenMode::READ {
                if !noted.keep_read(file.inode.ino, self.env.clock.now()) {
                    return;
                }
            } else {
                noted.add(file.inode.ino, reads, writes);
            }
            noted.alarm(pressing)
        };
        self.report_soon(alarm);
    }

    /// An open for reading under a lease, of a file that the leader still counts as open: it needs no
    /// message, and is counted here.
    pub fn reopen(&self, inode: &Inode) -> Option<Stat> {
        if !self.leader.leases_hold() {
            return None;
        }
        let mut noted = self.noted();
        let mut st = inode.lock();
        let stat = st
            .stat()
            .filter(|stat| stat.attr.nlink > 0 && !st.local.is_removed() && !st.lease.needs_recovery())?;
        if !noted.take_read(inode.ino) {
            return None;
        }
        st.opens.begin(true, false);
        Some(stat)
    }

    /// Notes closes of several files in one step: a resume on another connection counts all of them, or none.
    pub fn note_several(self: &Arc<Self>, note: impl FnOnce(&mut Noted)) {
        let alarm = {
            let mut noted = self.noted();
            note(&mut noted);
            noted.alarm(false)
        };
        self.report_soon(alarm);
    }

    /// The file may have lost its last name, and is deleted with its last close: a delayed close is reported
    /// soon.
    pub fn let_go(self: &Arc<Self>, ino: InodeId) {
        let alarm = {
            let mut noted = self.noted();
            noted.let_go(ino);
            if !noted.has_file(ino) {
                return;
            }
            noted.alarm(false)
        };
        self.report_soon(alarm);
    }

    fn report_soon(self: &Arc<Self>, alarm: Option<Alarm>) {
        let Some(Alarm { pressing }) = alarm else { return };
        let me = self.clone();
        self.env.tasks.spawn("report closes", async move {
            if !pressing {
                me.env.clock.sleep(PUT_OFF).await;
            }
            me.report_as(Reporter::Task).await;
        });
    }

    /// Called before a lease on the file is returned.
    pub async fn report_of(&self, ino: InodeId) {
        if self.noted().has(ino) {
            self.noted().let_go(ino);
            self.report().await;
        }
    }

    /// Reports closes that were delayed for long.
    pub async fn report_old(&self) {
        let due = self.noted().let_old_go(self.env.clock.now());
        if due {
            self.report().await;
        }
    }

    /// Reports delayed closes, too: this client opens no more files.
    pub async fn report_all(&self) {
        for _ in 0..2 {
            self.noted().let_older_go();
        }
        self.report().await;
    }

    /// Reports all noted closes. The next resume covers those that cannot be reported.
    pub async fn report(&self) {
        self.report_as(Reporter::Caller).await;
    }

    async fn report_as(&self, reporter: Reporter) {
        let (deadline, mut tries) = (self.leader.deadline(), 0);
        while tries < TRIES_MAX {
            let Ok((connection, session)) = self.leader.ready(deadline).await else { break };
            let files = {
                let mut noted = self.noted();
                if !noted.is_of(connection.id()) {
                    tries += 1;
                    continue; // a newer connection is being set up
                }
                noted.end_alarm();
                let files =
                    noted.take(|ino| self.inodes.known(ino).is_some_and(|inode| inode.lock().is_kept_open()));
                if files.is_empty() {
                    // Under the same lock: a close that is noted now has its own alarm.
                    return reporter.ends(&mut noted);
                }
                files
            };
            let reported = self.leader.send(&connection, &Close { session, files }, deadline).await;
            // A task continues until all are reported; a caller reports what was noted before, not for ever.
            tries += u32::from(reported.is_err() || matches!(reporter, Reporter::Caller));
            if let Err(e) = reported {
                self.log_unreported(&e);
            }
        }
        let mut noted = self.noted();
        noted.end_alarm();
        reporter.ends(&mut noted);
    }

    fn log_unreported(&self, e: &Error) {
        if e.kind == ErrorKind::Unavailable {
            tracing::debug!("closes were not reported: {e}");
        } else if let Some(more) = self.env.watch.line("closes were not reported") {
            tracing::warn!("closes were not reported: {e}{more}");
        }
    }
}

/// The reporter of closes.
#[derive(Clone, Copy)]
enum Reporter {
    /// A task that an alarm has begun.
    Task,
    Caller,
}

impl Reporter {
    fn ends(self, noted: &mut Noted) {
        if matches!(self, Reporter::Task) {
            noted.end_reporter();
        }
    }
}
