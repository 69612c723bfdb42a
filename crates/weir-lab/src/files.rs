//! Files of the root directory, written and read through a client.
use super::root;
use bytes::Bytes;
use weir_client::{Client, Handle, OpenMode};
use weir_proto::InodeId;

pub async fn create(c: &Client, name: &str) -> (InodeId, Handle) {
    let opened =
        c.create(&root(), InodeId::ROOT, name.as_bytes(), 0o644, true, OpenMode::BOTH).await.unwrap();
    (opened.stat.attr.ino, opened.handle)
}
/// Also where a part of it is taken at a time.
pub async fn write(c: &Client, h: Handle, at: usize, data: &[u8]) {
    let mut done = 0;
    while done < data.len() {
        done += c.write(h, (at + done) as u64, Bytes::copy_from_slice(&data[done..])).await.unwrap();
    }
}
pub async fn read(c: &Client, h: Handle, len: usize) -> Vec<u8> {
    c.read(h, 0, len).await.unwrap().concat()
}
/// Where the first difference is.
pub fn differs(a: &[u8], b: &[u8]) -> Option<usize> {
    if a.len() != b.len() {
        return Some(a.len().min(b.len()));
    }
    a.iter().zip(b).position(|(a, b)| a != b)
}
