//! What watching costs on this machine: nanoseconds of a count, of a wait that ends at once, and of an
//! accounted request.
//!
//! `cargo run --release -p weir-watch --example cost`
use std::sync::Arc;
use weir_watch::{Object, Reason, Shared, WaitRecord, Watch, Work};

fn main() {
    // The clock is the caller's; one that stands still shows what this crate costs itself.
    let watch = Watch::new(Shared::new(1), Arc::new(|| 7));
    let histogram = watch.histogram("weir_example_seconds", ("method", "Create"));
    let peer: Arc<str> = "storage-1".into();
    let record = || WaitRecord::new(Reason::Answer, Object::new("inode", 7)).doing("Create").at(&peer);
    let work = Work { volume: 1, uid: 1000, job: "4711", kind: "write", requests: 1, bytes: 4096, ns: 100 };
    measure("a value of a histogram", || histogram.add(1234));
    measure("a wait that ends at once", || drop(watch.wait_since(7, record())));
    measure("an accounted request", || watch.account(7, &work));
}

/// The best of several rounds: the machine may be busy.
fn measure(what: &str, act: impl Fn()) {
    const COUNT: u32 = 1_000_000;
    let round = || {
        #[allow(clippy::disallowed_methods)] // an example measures the machine, not a node
        let begun = std::time::Instant::now();
        (0..COUNT).for_each(|_| act());
        begun.elapsed().as_nanos() as f64 / f64::from(COUNT)
    };
    let best = (0..10).map(|_| round()).fold(f64::MAX, f64::min);
    println!("{best:6.1} ns  {what}");
}
