//! Server-sent events: every new state of the cluster goes to all open pages, without further requests.
//!
//! Invariant: the number of pages does not change the number of queries to the cluster: all share the
//! snapshots of the source.
use super::{Console, Shared, api};
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::sse::{Event, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures_util::stream;
use serde_json::json;
use std::convert::Infallible;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use weir_diagnose::troubles::Trouble;

/// Open streams: each costs a connection and a serialized state in two seconds.
const STREAMS_MAX: usize = 64;
/// The interval of states. A snapshot is kept for less.
const EVERY: Duration = Duration::from_secs(2);
/// A proxy closes connections that are silent for a minute; a state is late if servers do not answer.
const KEEP_ALIVE: Duration = Duration::from_secs(15);

/// One of the places for streams, until this goes.
struct Place(Arc<Console>);

impl Place {
    fn take(console: &Arc<Console>) -> Option<Place> {
        let taken = |n: usize| (n < STREAMS_MAX).then_some(n + 1);
        let count: &AtomicUsize = &console.streams;
        count.fetch_update(Ordering::AcqRel, Ordering::Acquire, taken).ok()?;
        Some(Place(console.clone()))
    }
}

impl Drop for Place {
    fn drop(&mut self) {
        self.0.streams.fetch_sub(1, Ordering::AcqRel);
    }
}

pub async fn states(State(console): Shared) -> Response {
    let Some(place) = Place::take(&console) else {
        let why = format!("{STREAMS_MAX} pages are open already: close some\n");
        return (StatusCode::SERVICE_UNAVAILABLE, why).into_response();
    };
    let states = stream::unfold((place, 0_u64), async |(place, number)| {
        let source = &place.0.source;
        if number > 0 {
            source.asker.env.clock.sleep(EVERY).await;
        }
        let snapshot = source.snapshot().await;
        let troubles = snapshot.facts.as_ref().map(|_| snapshot.troubles.iter().map(Trouble::as_json));
        let state = json!({
            "status": api::status(&snapshot), "troubles": troubles.map(Iterator::collect::<Vec<_>>),
        });
        let event = Event::default().event("state").id(number.to_string()).data(state.to_string());
        Some((Ok::<Event, Infallible>(event), (place, number + 1)))
    });
    Sse::new(states).keep_alive(KeepAlive::new().interval(KEEP_ALIVE)).into_response()
}
