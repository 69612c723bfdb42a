//! A service whose requests of administration are audited: request, sender and outcome.
//!
//! `weir_proto::administration` lists these, so all others pass with one look-up. A request is recorded
//! when its outcome is known. Knows nothing of the service's work.
use crate::audit::Audit;
use std::sync::Arc;
use weir_proto::administration::{self, Subject};
use weir_proto::coord::GetAudit;
use weir_proto::methods;
use weir_proto::sender::Sender;
use weir_proto::{Error, ErrorKind, Method, NameRule, Request, Result};
use weir_rpc::{Call, Connection, Defer, Handled, Proved, Reply, Service};
use weir_trust::audit::{Outcome, Record};

pub(crate) struct Audited {
    pub service: Arc<dyn Service>,
    pub audit: Audit,
}

impl Audited {
    /// Serves a request of administration. It is rare, so a task for its answer does not matter.
    fn witness(&self, method: &Method, call: Call) -> Handled {
        let Subject { on, uid, changes } = subject_of(&call);
        let audit = self.audit.clone();
        let record = self.record(method, &call.connection, on, uid);
        let note = move |result: &Result<Reply>| {
            let result = outcome(result.as_ref().err());
            if changes || matches!(result, Outcome::Refused(_)) {
                audit.record(Record { result, ..record });
            }
        };
        match self.service.handle(call) {
            Handled::Now(result) => {
                note(&result);
                Handled::Now(result)
            }
            Handled::Later(work) => Handled::Later(Box::pin(async move {
                let result = work.await;
                note(&result);
                result
            })),
        }
    }

    fn record(&self, method: &Method, by: &Connection, on: String, uid: Option<u32>) -> Record {
        let proved = by.proved();
        let uid = match proved {
            Proved::User(uid) => Some(uid),
            Proved::Node(_) | Proved::Stranger => uid,
        };
        Record {
            time_ns: self.audit.now_ns(),
            node: by.peer().name.clone(),
            from: by.peer_addr().to_owned(),
            role: proved.sender().to_string(),
            uid,
            what: method.name.to_owned(),
            on,
            result: Outcome::Done,
            again: 0,
        }
    }
}

impl Service for Audited {
    fn handle(&self, call: Call) -> Handled {
        if call.method == GetAudit::METHOD {
            return Handled::Now(call.decode::<GetAudit>().map(|_| Reply::new(&self.audit.state())));
        }
        match audited(call.method) {
            Some(method) => self.witness(method, call),
            None => self.service.handle(call),
        }
    }
    fn handle_or_defer(&self, call: Call, defer: Defer<'_>) -> Option<Handled> {
        match call.method == GetAudit::METHOD || audited(call.method).is_some() {
            true => Some(self.handle(call)),
            false => self.service.handle_or_defer(call, defer),
        }
    }
    fn method(&self, number: u16) -> Option<&'static Method> {
        self.service.method(number)
    }
    fn refused(&self, method: &Method, by: &Connection, why: &Error) {
        let record = self.record(method, by, String::new(), None);
        self.audit.record(Record { result: outcome(Some(why)), ..record });
        self.service.refused(method, by, why);
    }
    fn admits_guests(&self) -> bool {
        self.service.admits_guests()
    }
    fn admits_strangers(&self) -> bool {
        self.service.admits_strangers()
    }
    fn payload_max(&self, from: Sender) -> u32 {
        self.service.payload_max(from)
    }
    fn caught_up(&self) {
        self.service.caught_up();
    }
    fn disconnected(&self, connection: &Connection) {
        self.service.disconnected(connection);
    }
}

/// The record of a refusal by the rules for mounts.
pub(crate) fn refused_by_rule(audit: &Audit, refusal: weir_meta::Refusal) -> Record {
    Record {
        time_ns: audit.now_ns(),
        node: refusal.node,
        from: refusal.from,
        role: Sender::Mount.to_string(),
        uid: refusal.uid,
        what: refusal.what.to_owned(),
        on: format!("volume {}", refusal.volume),
        result: Outcome::Refused(refusal.why),
        again: 0,
    }
}

/// An open or a change in a volume that is audited.
pub(crate) fn of_volume(audit: &Audit, seen: weir_meta::Witnessed) -> Record {
    Record {
        time_ns: audit.now_ns(),
        node: seen.node,
        from: seen.from,
        role: seen.role.to_string(),
        uid: seen.uid,
        what: seen.what.to_owned(),
        on: seen.on,
        result: outcome(seen.error.as_ref()),
        again: 0,
    }
}

fn audited(number: u16) -> Option<&'static Method> {
    methods::find(number).filter(|method| method.is_administration)
}

fn outcome(error: Option<&Error>) -> Outcome {
    match error {
        None => Outcome::Done,
        Some(e) => match e.kind {
            ErrorKind::Denied | ErrorKind::Name(NameRule::NotOwner) => Outcome::Refused(e.to_string()),
            _ => Outcome::Failed(e.to_string()),
        },
    }
}

/// A request that cannot be decoded is recorded with the service's error.
fn subject_of(call: &Call) -> Subject {
    let found = administration::subject(call.method, &call.body);
    found.and_then(Result::ok).unwrap_or(Subject { on: String::new(), uid: None, changes: true })
}
