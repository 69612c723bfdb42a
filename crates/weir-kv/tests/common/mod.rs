//! What every implementation of [`Kv`] must do. One suite; the files beside call it on each implementation.
#![allow(dead_code)] // each test binary uses its part

use std::collections::BTreeMap;
use weir_kv::{CommitSeq, Kv, Read, Scan, Txn};
use weir_proto::{Error, ErrorKind, Result};

pub type Model = BTreeMap<Vec<u8>, Vec<u8>>;

pub fn get(kv: &dyn Kv, key: &[u8]) -> Option<Vec<u8>> {
    let mut value = None;
    kv.read(&mut |r| {
        value = r.get(key)?;
        Ok(())
    })
    .unwrap();
    value
}

pub fn collect(r: &dyn Read, start: &[u8], end: &[u8], max: usize) -> Result<Vec<(Vec<u8>, Vec<u8>)>> {
    let mut found = Vec::new();
    r.scan(start, end, &mut |k, v| {
        found.push((k.to_vec(), v.to_vec()));
        if found.len() == max { Scan::Stop } else { Scan::More }
    })?;
    Ok(found)
}

pub fn dump(kv: &dyn Kv) -> (CommitSeq, Model) {
    let mut all = Model::new();
    let seq = kv
        .read(&mut |r| {
            all = collect(r, b"", &[0xff; 64], usize::MAX)?.into_iter().collect();
            Ok(())
        })
        .unwrap();
    (seq, all)
}

pub fn tx(kv: &dyn Kv, mut body: impl FnMut(&mut dyn Txn)) -> CommitSeq {
    kv.transact(&mut |t| {
        body(t);
        Ok(())
    })
    .unwrap()
}

/// One change of a random history.
#[derive(Clone, Debug)]
pub enum Op {
    Put(u8, Vec<u8>),
    Delete(u8),
    Add(u8, i64),
    Max(u8, u64),
}

/// Few keys, so that changes meet; long common prefixes, so that order matters.
pub fn key(n: u8) -> Vec<u8> {
    let mut key = b"E/".to_vec();
    key.extend(std::iter::repeat_n(b'x', usize::from(n % 3)));
    key.push(n);
    key
}

impl Op {
    pub fn run(&self, t: &mut dyn Txn) {
        match self {
            Op::Put(k, v) => t.put(&key(*k), v),
            Op::Delete(k) => t.delete(&key(*k)),
            Op::Add(k, d) => t.add(&key(*k), *d),
            Op::Max(k, m) => t.max(&key(*k), *m),
        }
    }

    /// The plain meaning, in a plain map.
    pub fn run_on(&self, model: &mut Model) {
        let number = |v: Option<&Vec<u8>>| {
            let mut bytes = [0; 8];
            for (to, from) in bytes.iter_mut().zip(v.map_or(&[][..], |v| v)) {
                *to = *from;
            }
            bytes
        };
        match self {
            Op::Put(k, v) => {
                model.insert(key(*k), v.clone());
            }
            Op::Delete(k) => {
                model.remove(&key(*k));
            }
            Op::Add(k, d) => {
                let n = i64::from_le_bytes(number(model.get(&key(*k)))).wrapping_add(*d);
                model.insert(key(*k), n.to_le_bytes().to_vec());
            }
            Op::Max(k, m) => {
                let n = u64::from_le_bytes(number(model.get(&key(*k)))).max(*m);
                model.insert(key(*k), n.to_le_bytes().to_vec());
            }
        }
    }

    pub fn random(mut below: impl FnMut(u64) -> u64) -> Op {
        let k = below(40) as u8;
        match below(6) {
            0 | 1 => {
                let n = below(200) as usize;
                let fill = below(256) as u8;
                Op::Put(k, vec![fill; n])
            }
            2 => Op::Delete(k),
            3 | 4 => Op::Add(k, below(1000) as i64 - 500),
            _ => Op::Max(k, below(1000)),
        }
    }
}

/// A small deterministic generator: tests print its seed, not a recording.
pub struct Lcg(pub u64);

impl Lcg {
    pub fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (self.0 >> 33) % bound
    }
}

/// The suite.
pub async fn contract(kv: &dyn Kv) {
    transactions_are_whole(kv);
    scans_are_ordered_and_bounded(kv);
    numbers_merge(kv);
    wrong_keys_are_refused(kv);
    kv.checkpoint().await.unwrap();
    assert_eq!(get(kv, b"a"), Some(b"1".to_vec()));
    numbers_merge(kv);
    kv.wait_durable(dump(kv).0).await.unwrap();
    assert_eq!(kv.durable(), dump(kv).0);
    histories_match_the_model(kv).await;
}

fn transactions_are_whole(kv: &dyn Kv) {
    let before = dump(kv).0;
    let seq = tx(kv, |t| {
        t.put(b"a", b"1");
        t.put(b"b", b"2");
        assert_eq!(t.get(b"a").unwrap(), Some(b"1".to_vec()), "a transaction sees its own changes");
        t.delete(b"b");
        assert_eq!(t.get(b"b").unwrap(), None);
    });
    assert_eq!(seq.0, before.0 + 1);
    let refused = kv.transact(&mut |t| {
        t.put(b"a", b"other");
        t.delete(b"a");
        Err(Error::exists("the body does not want this"))
    });
    assert_eq!(refused.unwrap_err().kind, ErrorKind::Exists);
    assert_eq!(get(kv, b"a"), Some(b"1".to_vec()));
    let nothing = tx(kv, |t| assert!(t.get(b"b").unwrap().is_none()));
    assert_eq!(nothing, seq, "a body that changes nothing commits nothing");
    assert_eq!(dump(kv).0, seq);
}

fn scans_are_ordered_and_bounded(kv: &dyn Kv) {
    tx(kv, |t| (0..100u8).rev().for_each(|n| t.put(&[b's', n], &[n])));
    tx(kv, |t| {
        t.delete(&[b's', 3]);
        t.put(&[b's', 4], b"new");
        let own = collect(t, &[b's', 2], &[b's', 6], usize::MAX).unwrap();
        assert_eq!(own.iter().map(|(k, _)| k[1]).collect::<Vec<_>>(), [2, 4, 5]);
        assert_eq!(own[1].1, b"new");
    });
    kv.read(&mut |r| {
        assert_eq!(collect(r, b"s", b"t", usize::MAX)?.len(), 99);
        assert_eq!(collect(r, b"s", b"t", 7)?.len(), 7, "the visitor says stop");
        assert_eq!(collect(r, b"t", b"s", usize::MAX)?.len(), 0, "an empty range");
        assert_eq!(collect(r, b"s", b"s", usize::MAX)?.len(), 0, "an empty range");
        Ok(())
    })
    .unwrap();
    tx(kv, |t| (0..100u8).for_each(|n| t.delete(&[b's', n])));
    kv.read(&mut |r| {
        assert_eq!(collect(r, b"s", b"t", usize::MAX)?.len(), 0);
        Ok(())
    })
    .unwrap();
}

fn numbers_merge(kv: &dyn Kv) {
    tx(kv, |t| [&b"n"[..], b"m", b"x"].iter().for_each(|k| t.delete(k)));
    tx(kv, |t| {
        t.add(b"n", 5);
        t.max(b"m", 7);
        t.add(b"n", -8);
        assert_eq!(t.get(b"n").unwrap(), Some((-3i64).to_le_bytes().to_vec()));
    });
    tx(kv, |t| {
        t.add(b"n", 1);
        t.max(b"m", 6);
        t.max(b"x", 10);
        t.add(b"x", 1); // a mixture in one transaction
    });
    tx(kv, |t| t.max(b"n", 3)); // and between two: read as unsigned, -2 is large
    assert_eq!(get(kv, b"n"), Some((-2i64).to_le_bytes().to_vec()));
    assert_eq!(get(kv, b"m"), Some(7u64.to_le_bytes().to_vec()));
    assert_eq!(get(kv, b"x"), Some(11u64.to_le_bytes().to_vec()));
}

fn wrong_keys_are_refused(kv: &dyn Kv) {
    let before = dump(kv);
    for key in [vec![], vec![7; 5000]] {
        let refused = kv.transact(&mut |t| {
            t.put(b"a", b"other");
            t.put(&key, b"v");
            Ok(())
        });
        assert_eq!(refused.unwrap_err().kind, ErrorKind::Invalid);
    }
    assert_eq!(dump(kv), before);
}

async fn histories_match_the_model(kv: &dyn Kv) {
    let mut lcg = Lcg(11);
    let (_, mut model) = dump(kv);
    for round in 0..400 {
        let ops: Vec<Op> = (0..1 + lcg.below(6)).map(|_| Op::random(|n| lcg.below(n))).collect();
        let refuse = lcg.below(8) == 0;
        let result = kv.transact(&mut |t| {
            ops.iter().for_each(|op| op.run(t));
            if refuse { Err(Error::stale("refused")) } else { Ok(()) }
        });
        assert_eq!(result.is_err(), refuse);
        if !refuse {
            ops.iter().for_each(|op| op.run_on(&mut model));
        }
        if lcg.below(40) == 0 {
            kv.checkpoint().await.unwrap();
        }
        if round % 10 == 0 {
            assert_eq!(dump(kv).1, model, "after {round} transactions");
        }
        let probe = key(lcg.below(40) as u8);
        assert_eq!(get(kv, &probe), model.get(&probe).cloned());
    }
    assert_eq!(dump(kv).1, model);
}
