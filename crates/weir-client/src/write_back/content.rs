//! The fragments of a stripe that is sent whole: its changed bytes, and for a merge the present ones around
//! them.
use super::WriteBack;
use super::send::Send;
use crate::data::{Fragment, StripeRef, encode};
use crate::plan;
use bytes::Bytes;
use weir_proto::Result;

impl WriteBack {
    pub(super) fn fragments(&self, send: &Send, len: u32) -> Result<Vec<Fragment>> {
        let coder = self.data.coder(send.layout.scheme)?;
        let cells = (0..send.layout.scheme.data)
            .map(|i| {
                let start = u32::from(i) * send.layout.cell_bytes();
                let cell_len = send.layout.fragment_bytes(u64::from(len), i);
                self.cell_of(&send.parts, start, cell_len)
            })
            .collect();
        encode(&coder, &self.env, cells)
    }

    /// The stripe as it will be: bytes that the changed ones do not cover are read from the targets.
    pub(super) async fn merged_fragments(&self, send: &Send, s: StripeRef) -> Result<Vec<Fragment>> {
        let cell_bytes = send.layout.cell_bytes();
        let ranges = plan::ranges_to_read(&send.parts, cell_bytes, send.layout.scheme.data);
        let present = self.data.read_cells(s, &ranges).await.map_err(|e| e.doing(format!("merge {s}")))?;
        let below = ranges.iter().zip(&present).map(|(range, part)| {
            let start = range.index as u32 * cell_bytes;
            (start + range.start, part.bytes.clone())
        });
        let parts: Vec<(u32, Bytes)> = below.chain(send.parts.iter().cloned()).collect();
        let cells = (0..u32::from(send.layout.scheme.data)).map(|index| {
            let (start, next) = (index * cell_bytes, (index + 1) * cell_bytes);
            let in_cell = parts.iter().filter(|(at, _)| (start..next).contains(at));
            let end = in_cell.map(|(at, bytes)| at + bytes.len() as u32).max().unwrap_or(start);
            self.cell_of(&parts, start, end - start)
        });
        encode(&*self.data.coder(send.layout.scheme)?, &self.env, cells.collect())
    }

    /// `start..start + len` of the stripe in one piece: shared if one part holds it, otherwise copied, later
    /// parts over earlier ones, gaps zero.
    fn cell_of(&self, parts: &[(u32, Bytes)], start: u32, len: u32) -> Bytes {
        let end = start + len;
        let mut within = parts.iter().filter(|(at, b)| *at < end && at + b.len() as u32 > start);
        if let (Some((at, bytes)), None) = (within.next(), within.next())
            && *at == start
            && bytes.len() >= len as usize
        {
            return bytes.slice(..len as usize);
        }
        let mut cell = self.env.buffers.zeroed(len as usize);
        for (at, bytes) in parts {
            let (a, b) = (start.max(*at), end.min(at + bytes.len() as u32));
            if a < b {
                cell[(a - start) as usize..(b - start) as usize]
                    .copy_from_slice(&bytes[(a - at) as usize..(b - at) as usize]);
            }
        }
        cell.freeze()
    }
}
