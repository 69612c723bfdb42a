//! Several calls at once, in one task: the answers as they arrive, and abandoned calls.
//!
//! Small on purpose: a stripe has a dozen members, so each wake polls all outstanding calls.
use std::future::poll_fn;
use std::task::Poll;
use weir_env::BoxFuture;

/// Calls in flight, each with a number.
pub struct Join<'a, T> {
    calls: Vec<(usize, BoxFuture<'a, T>)>,
}

impl<'a, T> Join<'a, T> {
    pub fn new() -> Join<'a, T> {
        Join { calls: Vec::new() }
    }
    pub fn push(&mut self, number: usize, call: impl Future<Output = T> + Send + 'a) {
        self.calls.push((number, Box::pin(call)));
    }
    pub fn is_empty(&self) -> bool {
        self.calls.is_empty()
    }
    pub fn len(&self) -> usize {
        self.calls.len()
    }
    /// The numbers of outstanding calls.
    pub fn numbers(&self) -> Vec<usize> {
        self.calls.iter().map(|(n, _)| *n).collect()
    }
    /// Abandons the calls that `keep` refuses; returns their numbers.
    pub fn give_up(&mut self, mut keep: impl FnMut(usize) -> bool) -> Vec<usize> {
        let lost = self.calls.iter().map(|(n, _)| *n).filter(|n| !keep(*n)).collect::<Vec<_>>();
        self.calls.retain(|(n, _)| !lost.contains(n));
        lost
    }
    /// The next answer; `None` when no call is out. May be dropped and called again.
    pub async fn next(&mut self) -> Option<(usize, T)> {
        if self.calls.is_empty() {
            return None;
        }
        poll_fn(|cx| {
            for i in 0..self.calls.len() {
                if let Poll::Ready(answer) = self.calls[i].1.as_mut().poll(cx) {
                    let (number, _) = self.calls.remove(i);
                    return Poll::Ready(Some((number, answer)));
                }
            }
            Poll::Pending
        })
        .await
    }
}

/// All answers, in the order of the calls.
pub async fn join_all<'a, T>(calls: Vec<BoxFuture<'a, T>>) -> Vec<T> {
    let mut answers: Vec<Option<T>> = calls.iter().map(|_| None).collect();
    let mut join = Join { calls: calls.into_iter().enumerate().collect() };
    while let Some((i, answer)) = join.next().await {
        answers[i] = Some(answer);
    }
    answers.into_iter().map(|a| a.expect("every call answered")).collect()
}
