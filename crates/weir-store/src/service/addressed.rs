//! Which target of a node a request is for, and what a client's request costs there.
use weir_proto::data::*;
use weir_proto::{Reader, Request, TargetId, Wire};
use weir_rpc::Call;

/// A request to one target.
pub trait Addressed: Request {
    fn target(&self) -> TargetId;
}

macro_rules! addressed {
    ($field:tt: $($request:ident),+ $(,)?) => {$(
        impl Addressed for $request {
            fn target(&self) -> TargetId {
                addressed!(@ self $field)
            }
        }
    )+};
    (@ $self:ident place) => { $self.place.target };
    (@ $self:ident target) => { $self.target };
}
addressed!(
    place: WriteFragment, HoldStripe, CommitStripe, DropPrepared, WriteOverlay, WriteOverlays, MirrorOverlay,
    MirrorOverlays, ReadCell, ReadOverlays, StatCell, MarkMissing, SealCell, ListPlace, CopyCell, NextStripe,
);
addressed!(
    target: DropFile, ListCells, ListTruncations, ListFences, SealFile, HasSpace, StatTarget, ScrubTarget,
    CompareTarget,
);

/// The target of a client's request that costs its disk, and the bytes that it holds in memory meanwhile.
/// Other requests are short, or end what was begun.
pub fn costs(call: &Call) -> Option<(TargetId, u64)> {
    let target = |r: &mut Reader<'_>| Place::decode(r).ok().map(|place| place.target);
    match call.method {
        WriteFragment::METHOD | WriteOverlay::METHOD | WriteOverlays::METHOD | ReadOverlays::METHOD => {
            target(&mut Reader::new(&call.body)).map(|target| (target, call.payload.len() as u64))
        }
        ReadCell::METHOD => ReadCell::from_bytes(&call.body)
            .ok()
            .map(|r| (r.place.target, u64::from(r.len).min(PAYLOAD_MAX.into()))),
        _ => None,
    }
}
