//! Claims about a client, on a whole simulated cluster: any client reads the bytes that were written, after
//! any loss that the scheme allows.
mod caches;
mod clones;
mod contents;
mod crowded;
mod drains;
mod early;
mod floors;
mod founding;
mod full;
mod latency;
mod lengths;
mod links;
mod lives;
mod local_creates;
mod locks;
mod overload;
mod patience;
mod quota;
mod random;
mod recall;
mod reports;
mod returned;
mod scattered;
mod small;
mod snapshots;
mod trees;

use bytes::Bytes;
use std::time::Duration;
use weir_client::{Client, Handle, OpenMode};
use weir_lab::*;
use weir_proto::InodeId;
use weir_store::crash_points;

const ROOT: InodeId = InodeId::ROOT;

async fn create(c: &Client, name: &str) -> Handle {
    c.create(&root(), ROOT, name.as_bytes(), 0o644, true, OpenMode::BOTH).await.unwrap().handle
}
async fn open(c: &Client, name: &str, mode: OpenMode) -> Handle {
    let found = c.lookup(&root(), ROOT, name.as_bytes()).await.unwrap().expect("the name exists");
    c.open(&root(), found.attr.ino, mode).await.unwrap().handle
}
async fn write(c: &Client, h: Handle, offset: usize, data: &[u8]) {
    if let Some(done) = c.try_write(h, offset as u64, data) {
        assert_eq!(done.unwrap(), data.len());
        return;
    }
    assert_eq!(c.write(h, offset as u64, Bytes::copy_from_slice(data)).await.unwrap(), data.len());
}
async fn read(c: &Client, h: Handle, offset: usize, len: usize) -> Vec<u8> {
    if let Some(parts) = c.try_read(h, offset as u64, len) {
        return parts.unwrap().concat();
    }
    c.read(h, offset as u64, len).await.unwrap().concat()
}
async fn close(c: &Client, h: Handle) {
    c.flush(h).await.unwrap();
    c.release(h).await.unwrap();
}
/// The whole file as a client that knows nothing of it sees it.
async fn content(c: &Client, name: &str) -> Vec<u8> {
    try_content(c, name).await.unwrap()
}
async fn try_content(c: &Client, name: &str) -> weir_proto::Result<Vec<u8>> {
    let found = c.lookup(&root(), ROOT, name.as_bytes()).await?.expect("the name exists");
    let h = c.open(&root(), found.attr.ino, OpenMode::READ).await?.handle;
    let bytes = c.read(h, 0, 1 << 30).await.map(|parts| parts.concat());
    c.release(h).await?;
    bytes
}
/// After this time `a` is cut off from the leader, which restarts, until it has given up waiting for `a`.
async fn lose_session(lab: &Lab, after_us: u64) {
    lab.world().sleep(Duration::from_micros(after_us)).await;
    lab.cut_off("a");
    lab.kill_meta();
    lab.meta().await;
    lab.world().sleep(Duration::from_secs(10)).await;
    lab.let_back("a");
}
#[track_caller]
fn same(got: &[u8], expected: &[u8]) {
    if got == expected {
        return;
    }
    let at = got.iter().zip(expected).position(|(a, b)| a != b).unwrap_or(got.len().min(expected.len()));
    panic!("{} bytes, expected {}; the first difference is at {at}", got.len(), expected.len());
}
