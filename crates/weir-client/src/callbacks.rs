//! Calls of the metadata leader to this client: revokes, hints, evictions and recoveries.
use crate::parts::Parts;
use std::sync::{Arc, Mutex, Weak};
use weir_proto::Request;
use weir_proto::lock::LockFree;
use weir_proto::meta::{Cred, RecoverFile, Revoke};
use weir_proto::recall::EvictOwn;
use weir_rpc::{Call, Handled, Reply, Service};

/// Serves the leader's callbacks.
#[derive(Default)]
pub struct Callbacks(Mutex<Option<Weak<Parts>>>);

impl Callbacks {
    pub fn set(&self, client: Weak<Parts>) {
        *self.0.lock().expect("no holder panics") = Some(client);
    }
    pub fn client(&self) -> Option<Arc<Parts>> {
        self.0.lock().expect("no holder panics").as_ref().and_then(Weak::upgrade)
    }
}

impl Callbacks {
    fn evict_own(&self, call: &Call) -> Handled {
        let asked = match call.decode::<EvictOwn>() {
            Ok(asked) => asked,
            Err(e) => return Handled::Now(Err(e)),
        };
        let Some(client) = self.client() else { return Handled::Now(Ok(Reply::new(&()))) };
        Handled::Later(Box::pin(async move {
            if let Some(inode) =
                client.base.inodes.known(asked.ino).filter(|inode| inode.lock().opens.is_for_writing())
            {
                let root = Cred { uid: 0, gid: 0, groups: vec![0] };
                client.rights.tiering.evict_own(&root, &inode, asked.from, asked.to).await?;
            }
            Ok(Reply::new(&()))
        }))
    }

    fn recover_file(&self, call: &Call) -> Handled {
        let ino = match call.decode::<RecoverFile>() {
            Ok(asked) => asked.ino,
            Err(e) => return Handled::Now(Err(e)),
        };
        let Some(client) = self.client() else { return Handled::Now(Ok(Reply::new(&()))) };
        Handled::Later(Box::pin(async move {
            client.rights.recovery.settle_left(ino).await?;
            Ok(Reply::new(&()))
        }))
    }
}

impl Service for Callbacks {
    fn handle(&self, call: Call) -> Handled {
        if call.method == LockFree::METHOD {
            let hint = call.decode::<LockFree>();
            if let (Ok(hint), Some(client)) = (&hint, self.client()) {
                client.locks.wake(hint.ticket);
            }
            return Handled::Now(hint.map(|_| Reply::new(&())));
        }
        if call.method == EvictOwn::METHOD {
            return self.evict_own(&call);
        }
        if call.method == RecoverFile::METHOD {
            return self.recover_file(&call);
        }
        if call.method != Revoke::METHOD {
            return Handled::Now(Err(call.unknown()));
        }
        let revoke = match call.decode::<Revoke>() {
            Ok(revoke) => revoke,
            Err(e) => return Handled::Now(Err(e)),
        };
        let Some(client) = self.client() else { return Handled::Now(Ok(Reply::new(&()))) };
        // The clock orders this revoke among the replies around it: its tick is taken here, in the order of
        // arrival.
        let inode = client.base.inodes.get(revoke.ino);
        let revoke_clock = client.base.inodes.tick_revoke_clock();
        inode.lock().mark_revoked(revoke_clock, revoke.keep);
        Handled::Later(Box::pin(async move {
            client.revocation.revoke(&inode, revoke.keep).await;
            Ok(Reply::new(&()))
        }))
    }
}
