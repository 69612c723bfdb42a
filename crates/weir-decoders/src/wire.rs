//! Messages and frames.
use crate::{Check, Dice, for_every_message};
use weir_proto::frame::{FrameKind, HEADER_BYTES, Header, Hello, verify};
use weir_proto::map::{Layout, Role, Scheme};
use weir_proto::{CellId, ClusterId, Error, FileId, TargetId, Wire};

/// Finds bytes that a type accepts.
type Find = fn(&mut Dice) -> Option<Vec<u8>>;

fn one_to_one<T: Wire>(bytes: &[u8]) {
    if let Ok(value) = T::from_bytes(bytes) {
        assert_eq!(value.to_bytes(), bytes, "{}", std::any::type_name::<T>());
    }
}

/// Every message type with its check, in the order of the list.
fn messages() -> Vec<(Check, Find)> {
    let mut all: Vec<(Check, Find)> = Vec::new();
    macro_rules! add {
        ($($type:ty),*) => { $(all.push((one_to_one::<$type>, Dice::encoding::<$type>));)* };
    }
    add!(Error, Layout, Scheme, FileId, CellId, TargetId);
    fn push<T: Wire>(_: &str) {
        FOUND.with_borrow_mut(|found| found.push((one_to_one::<T>, Dice::encoding::<T>)));
    }
    for_every_message!(push);
    all.append(&mut FOUND.take());
    all
}
thread_local!(static FOUND: std::cell::RefCell<Vec<(Check, Find)>> = Default::default());
thread_local!(static MESSAGES: Vec<(Check, Find)> = messages());

/// The first byte chooses the type.
pub fn message(bytes: &[u8]) {
    let Some((which, body)) = bytes.split_first() else { return };
    MESSAGES.with(|all| all[usize::from(*which) % all.len()].0(body));
}
pub fn message_seeds() -> Vec<Vec<u8>> {
    let mut dice = Dice::for_name("seeds");
    let one = |(which, (_, encoding)): (usize, &(Check, Find))| {
        let mut bytes = vec![which as u8];
        bytes.extend(encoding(&mut dice)?);
        Some(bytes)
    };
    MESSAGES.with(|all| all.iter().enumerate().filter_map(one).collect())
}

/// A header, then its body: as they are, and with the checksum put right.
pub fn frame(bytes: &[u8]) {
    let Some((head, body)) = bytes.split_first_chunk::<HEADER_BYTES>() else { return };
    let Ok(header) = Header::decode(head) else { return };
    let _ = verify(head, body);
    assert!(header.check_sizes().is_ok());
    let Some(body) = body.get(..header.body_len as usize) else { return };
    let again = header.encode(body);
    verify(&again, body).expect("a header holds its own checksum");
    assert_eq!(Header::decode(&again).expect("it was decoded before"), header);
    match header.kind {
        FrameKind::Hello | FrameKind::HelloAck => one_to_one::<Hello>(body),
        FrameKind::ErrorResponse | FrameKind::Goodbye => one_to_one::<Error>(body),
        _ => {}
    }
}
pub fn frame_seeds() -> Vec<Vec<u8>> {
    let hello = Hello {
        version_min: 1,
        version_max: 1,
        level: 1,
        cluster: Some(ClusterId([3; 16])),
        name: "node".into(),
        role: Role::Storage,
        instance: 7,
    };
    let bodies = [hello.to_bytes(), Error::stale("an old map").to_bytes(), Vec::new()];
    let frames = FrameKind::ALL.iter().flat_map(|kind| bodies.iter().map(move |body| (*kind, body)));
    frames
        .map(|(kind, body)| {
            let header = Header { body_len: body.len() as u32, method: 200, ..Header::new(kind, 9) };
            [&header.encode(body)[..], body].concat()
        })
        .collect()
}
