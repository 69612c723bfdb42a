//! Answers that tests give in place of a node's service.
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use weir_proto::sender::Sender;
use weir_proto::{Error, Method};
use weir_rpc::{Call, Connection, Defer, Handled, Service};

/// A node's answer instead of its service's. `None`: the service answers.
pub type Answer = Arc<dyn Fn(&Call) -> Option<Handled> + Send + Sync>;

/// By name of the node.
#[derive(Clone, Default)]
pub(crate) struct Answers(Arc<Mutex<BTreeMap<String, Answer>>>);

impl Answers {
    fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Answer>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
    /// `None`: the node's service answers all calls again.
    pub fn set(&self, node: &str, answer: Option<Answer>) {
        match answer {
            Some(answer) => drop(self.lock().insert(node.to_owned(), answer)),
            None => drop(self.lock().remove(node)),
        }
    }
    /// The node's service, behind these answers.
    pub fn before(&self, node: &str, service: Arc<dyn Service>) -> Arc<dyn Service> {
        Arc::new(Answered { node: node.to_owned(), answers: self.clone(), service })
    }
    fn to(&self, node: &str, call: &Call) -> Option<Handled> {
        let answer = self.lock().get(node).cloned();
        answer.and_then(|answer| answer(call))
    }
}

struct Answered {
    node: String,
    answers: Answers,
    service: Arc<dyn Service>,
}

impl Service for Answered {
    fn handle(&self, call: Call) -> Handled {
        self.answers.to(&self.node, &call).unwrap_or_else(|| self.service.handle(call))
    }
    fn handle_or_defer(&self, call: Call, defer: Defer<'_>) -> Option<Handled> {
        match self.answers.to(&self.node, &call) {
            Some(answer) => Some(answer),
            None => self.service.handle_or_defer(call, defer),
        }
    }
    fn method(&self, number: u16) -> Option<&'static Method> {
        self.service.method(number)
    }
    fn refused(&self, method: &Method, by: &Connection, why: &Error) {
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
