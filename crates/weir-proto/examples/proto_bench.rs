//! How fast one core computes checksums and parity over memory that is not in its cache.
#![allow(clippy::disallowed_methods)] // a program of its own

use std::hint::black_box;
use weir_proto::MIB;
use weir_proto::checksum::{block_crcs, crc_of_blocks, crc32c};
use weir_proto::data::CHECKSUM_BLOCK;
use weir_proto::ec::Coder;

const MEMORY: usize = 512 * MIB as usize;
const CELL: usize = 512 << 10;

fn main() {
    let mut memory = vec![0u8; MEMORY];
    memory.iter_mut().enumerate().for_each(|(i, b)| *b = (i * 31 + (i >> 12)) as u8);
    report("crc32c of 1 MiB", MEMORY, || {
        memory.chunks(MIB as usize).for_each(|c| _ = black_box(crc32c(c)));
    });
    report("crc32c of 256 KiB in the cache", MEMORY, || {
        (0..MEMORY / (256 << 10)).for_each(|_| _ = black_box(crc32c(black_box(&memory[..256 << 10]))));
    });
    report("block_crcs, 1 MiB in blocks of 16 KiB", MEMORY, || {
        memory.chunks(MIB as usize).for_each(|c| _ = black_box(block_crcs(c, CHECKSUM_BLOCK as usize)));
    });
    let crcs = block_crcs(&memory[..MIB as usize], CHECKSUM_BLOCK as usize);
    report("crc_of_blocks (bytes covered)", 100_000 * MIB as usize, || {
        (0..100_000).for_each(|_| _ = black_box(crc_of_blocks(black_box(&crcs), MIB)));
    });
    for scheme in ["ec:4+2", "ec:8+2", "replica:3"] {
        encode_and_reconstruct(scheme, &memory);
    }
}

fn encode_and_reconstruct(scheme: &str, memory: &[u8]) {
    let coder = Coder::new(scheme.parse().expect("a scheme")).expect("a scheme");
    let (k, m) = (usize::from(coder.scheme().data), usize::from(coder.scheme().parity));
    let mut parity = vec![vec![1u8; CELL]; m];
    let stripes = memory.len() / (k * CELL);
    report(&format!("encode {scheme} (data)"), stripes * k * CELL, || {
        for stripe in memory.chunks_exact(k * CELL) {
            let data: Vec<&[u8]> = stripe.chunks(CELL).collect();
            let mut out: Vec<&mut [u8]> = parity.iter_mut().map(|p| &mut p[..]).collect();
            coder.encode(&data, &mut out).expect("encode");
        }
    });
    let parity_cells: Vec<Vec<u8>> = parity.clone();
    report(&format!("reconstruct a cell of {scheme} (cell)"), stripes * CELL, || {
        for stripe in memory.chunks_exact(k * CELL) {
            let mut present: Vec<(usize, &[u8])> = stripe.chunks(CELL).enumerate().skip(1).collect();
            present.push((k, &parity_cells[0]));
            coder.reconstruct(&present, &[0], &mut [&mut parity[0][..]]).expect("reconstruct");
        }
    });
}

/// Per second of this thread on a processor, so that a busy machine gives the same figure; best of several.
fn report(what: &str, bytes: usize, mut work: impl FnMut()) {
    let mut best = f64::MAX;
    for _ in 0..6 {
        let begun = cpu_seconds();
        work();
        best = best.min(cpu_seconds() - begun);
    }
    println!("{what}: {:.1} GB/s", bytes as f64 / best / 1e9);
}

fn cpu_seconds() -> f64 {
    let stat =
        std::fs::read_to_string("/proc/thread-self/schedstat").expect("Linux tells how long a thread ran");
    stat.split(' ').next().and_then(|ns| ns.parse::<f64>().ok()).expect("nanoseconds on a processor") / 1e9
}
