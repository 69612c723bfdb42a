//! Links that tests cut in one direction of calls: a node cannot connect, its peer still can.
use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use weir_env::{Addr, BoxFuture, BoxStream, Env, Listener, Net};

/// Addresses to which no node with these links can connect.
#[derive(Clone, Default)]
pub(crate) struct CutLinks(Arc<Mutex<Vec<Addr>>>);

impl CutLinks {
    pub fn set(&self, unreachable: Vec<Addr>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = unreachable;
    }
    /// The node's environment with these links.
    pub fn within(&self, env: Env) -> Env {
        Env { net: Arc::new(CutNet { net: env.net, cut: self.clone() }), ..env }
    }
    fn has(&self, addr: &Addr) -> bool {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).contains(addr)
    }
}

struct CutNet {
    net: Arc<dyn Net>,
    cut: CutLinks,
}

impl Net for CutNet {
    fn listen(&self, addr: &Addr) -> BoxFuture<'_, io::Result<Box<dyn Listener>>> {
        self.net.listen(addr)
    }
    fn connect(&self, addr: &Addr) -> BoxFuture<'_, io::Result<BoxStream>> {
        match self.cut.has(addr) {
            true => Box::pin(async { Err(io::ErrorKind::HostUnreachable.into()) }),
            false => self.net.connect(addr),
        }
    }
}
