//! Locks on files of the live tree, and the kernel's form of lock requests.
//!
//! Invariant: a lock that was granted to a program that is gone is released.
use crate::call::Call;
use crate::log;
use crate::replies::{refused, reply_locked};
use fuser::{Errno, ReplyEmpty, ReplyLock};
use weir_client::{Client, Handle, InTheWay, LockWish, Locked};
use weir_proto::Result;
use weir_proto::lock::{LOCK_END, LockKind, LockOwner, LockRange, LockSpace};

pub struct Locks {
    client: Client,
}

impl Locks {
    pub fn new(client: Client) -> Locks {
        Locks { client }
    }

    pub fn test(&self, call: Call<'_, ReplyLock>, file: Handle, asked: Asked) {
        let (client, wish) = (self.client.clone(), asked.wish);
        let work = async move { client.test_lock(file, wish).await };
        call.wait(work, move |reply, found| asked.reply(reply, found));
    }

    /// `sleep`: waits for it.
    pub fn set(&self, call: Call<'_, ReplyEmpty>, file: Handle, wish: LockWish, sleep: bool) {
        let (client, of) = (self.client.clone(), self.client.clone());
        let undo = move |locked: Result<Locked>| async move {
            let held = wish.kind.is_some() && locked.is_ok_and(|l| l == Locked::Granted);
            if held && let Err(e) = of.try_lock(file, LockWish { kind: None, ..wish }).await {
                let why = format_args!("the lock of a program that is gone was not released: {e}");
                log::warn("a lock was not released", why);
            }
        };
        if !sleep || wish.kind.is_none() {
            let work = async move { client.try_lock(file, wish).await };
            return call.wait_or_undo(work, reply_locked, undo);
        }
        let waiting = call.interruptible().begin();
        let work = async move { client.wait_lock(file, wish, waiting.signal()).await };
        call.wait_or_undo(work, reply_locked, undo);
    }
}

/// A lock as the kernel asks for it.
pub struct Asked {
    pub wish: LockWish,
    start: u64,
    end: u64,
}

impl Asked {
    /// `EINVAL` for values that the kernel never uses.
    pub fn new(
        owner: LockOwner,
        start: u64,
        end: u64,
        typ: i32,
        pid: u32,
    ) -> std::result::Result<Asked, Errno> {
        let kind = match typ {
            libc::F_RDLCK => Some(LockKind::Shared),
            libc::F_WRLCK => Some(LockKind::Exclusive),
            libc::F_UNLCK => None,
            _ => return Err(Errno::EINVAL),
        };
        let range = LockRange::new(start, end.min(LOCK_END)).map_err(|_| Errno::EINVAL)?;
        Ok(Asked { wish: LockWish { owner, range, kind, pid }, start, end })
    }

    /// The conflicting lock, or the range and the process of the request if none conflicts.
    pub fn reply(&self, reply: ReplyLock, found: Result<Option<InTheWay>>) {
        match found {
            Ok(None) => reply.locked(self.start, self.end, libc::F_UNLCK, self.wish.pid),
            // A process of another mount has no number here.
            Ok(Some(way)) => {
                reply.locked(way.range.start, way.range.end, kernel_type(way.kind), way.pid.unwrap_or(0))
            }
            Err(e) => reply.error(refused(&e)),
        }
    }
}

pub fn owner(owner: fuser::LockOwner, flock: bool) -> LockOwner {
    LockOwner { space: if flock { LockSpace::Flock } else { LockSpace::Fcntl }, id: owner.0 }
}

fn kernel_type(kind: LockKind) -> i32 {
    match kind {
        LockKind::Shared => libc::F_RDLCK,
        LockKind::Exclusive => libc::F_WRLCK,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lock_requests_of_the_kernel_are_decoded() {
        let wish = |who, start, end, typ| Asked::new(who, start, end, typ, 4).map(|asked| asked.wish);
        let who = owner(fuser::LockOwner(9), true);
        assert_eq!(who, LockOwner { space: LockSpace::Flock, id: 9 });
        let asked = wish(who, 0, u64::MAX, libc::F_WRLCK).unwrap();
        assert_eq!((asked.range, asked.kind, asked.pid), (LockRange::WHOLE, Some(LockKind::Exclusive), 4));
        assert_eq!(wish(who, 3, 5, libc::F_UNLCK).unwrap().kind, None);
        assert!(wish(who, 5, 3, libc::F_RDLCK).is_err() && wish(who, 0, 3, 77).is_err());
    }
}
