//! The coordinator's state, and the files that identify directories.
use crate::Dice;
use weir_coord::identity::{NamespaceIdentity, TargetIdentity};
use weir_proto::checksum::crc32c;
use weir_proto::{ClusterId, DiskUuid, map, news};

pub fn coordinator(bytes: &[u8]) {
    let _ = weir_coord::store::read_state(bytes);
    let Some((head, body)) = bytes.split_at_checked(12) else { return };
    let mended = [&head[..8], &crc32c(body).to_le_bytes(), body].concat();
    let Ok(keys) = weir_coord::store::read_state(&mended) else { return };
    for versioned in keys.values() {
        if let Ok(map) = weir_coord::records::decode_map(&versioned.value) {
            assert_eq!(weir_coord::records::encode_map(&map), versioned.value);
        }
        if let Ok(step) = weir_coord::records::decode_step(&versioned.value) {
            assert_eq!(weir_coord::records::encode_step(&step), versioned.value);
        }
    }
}
pub fn coordinator_seeds() -> Vec<Vec<u8>> {
    let map = Dice::for_name("map").encoding::<map::ClusterMap>().unwrap_or_default();
    let record = [&[1, 0][..], &map].concat();
    let step = Dice::for_name("step").encoding::<news::MapNews>().unwrap_or_default();
    let step = [&[1, 0][..], &step].concat();
    [record, step, b"abc".to_vec()]
        .iter()
        .map(|value| {
            let mut body = b"\x01\0\x09\0\0\0\0\0\0\0\x01\0\0\0\x03\0\0\0map\x09\0\0\0\0\0\0\0".to_vec();
            body.extend_from_slice(&(value.len() as u32).to_le_bytes());
            body.extend_from_slice(value);
            [&b"WEIRCRD\0"[..], &crc32c(&body).to_le_bytes(), &body].concat()
        })
        .collect()
}

pub fn identity(bytes: &[u8]) {
    let same = |bytes: &[u8]| {
        if let Ok(found) = TargetIdentity::from_text(bytes) {
            let again = TargetIdentity::from_text(found.to_text().as_bytes());
            assert_eq!(again.expect("an identity that was read can be written"), found);
        }
        if let Ok(found) = NamespaceIdentity::from_text(bytes) {
            let again = NamespaceIdentity::from_text(found.to_text().as_bytes());
            assert_eq!(again.expect("an identity that was read can be written"), found);
        }
    };
    same(bytes);
    if let Some(at) = bytes.windows(9).position(|w| w == b"crc32c = ") {
        same(format_with_crc(&bytes[..at]).as_slice());
    }
}
fn format_with_crc(body: &[u8]) -> Vec<u8> {
    [body, format!("crc32c = \"{:08x}\"\n", crc32c(body)).as_bytes()].concat()
}
pub fn identity_seeds() -> Vec<Vec<u8>> {
    let identity =
        TargetIdentity { cluster: ClusterId([1; 16]), disk: DiskUuid([2; 16]), pool: "default".into() };
    vec![identity.to_text().into_bytes()]
}
