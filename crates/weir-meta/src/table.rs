//! Typed tables of the store: the keys of one letter, with the types of their parts and of their values.
//!
//! Invariants: a key is a letter and its parts. Numbers are big-endian, so keys sort as the numbers do; bytes
//! come last and have no end of their own. Records that cannot be read are damage in the store, and become an
//! error that names the table. Knows nothing of the meaning of a table: `keys` lists them.
use crate::keys::{Counter, Letter, after, owner_letter};
use crate::record::Record;
use std::fmt;
use std::marker::PhantomData;
use std::ops::Deref;
use weir_kv::{Read, Scan, Txn};
use weir_proto::quota::{Holder, OwnerKind};
use weir_proto::relation::RelationId;
use weir_proto::{Error, InodeId, Result, SessionId, VolumeId};

/// Bytes of a key that need no allocation: all keys without a name, and those with a short one.
const SHORT_KEY: usize = 40;

/// The bytes of a key.
#[derive(Clone)]
pub struct Key {
    short: [u8; SHORT_KEY],
    len: usize,
    /// All of it, if it is longer.
    long: Vec<u8>,
}

impl Key {
    fn new(letter: Letter) -> Key {
        let mut key = Key { short: [0; SHORT_KEY], len: 0, long: Vec::new() };
        key.push(&[letter as u8]);
        key
    }
    fn push(&mut self, bytes: &[u8]) {
        let end = self.len + bytes.len();
        if end <= SHORT_KEY {
            self.short[self.len..end].copy_from_slice(bytes);
        } else {
            if self.long.is_empty() {
                self.long.reserve(end);
                self.long.extend_from_slice(&self.short[..self.len]);
            }
            self.long.extend_from_slice(bytes);
        }
        self.len = end;
    }
}

impl Deref for Key {
    type Target = [u8];
    fn deref(&self) -> &[u8] {
        if self.len <= SHORT_KEY { &self.short[..self.len] } else { &self.long }
    }
}

/// The parts of a key, as they are read from its bytes.
pub trait Parts<'a>: Copy + fmt::Debug {
    fn write(&self, key: &mut Key);
    /// Takes them from the front of `bytes`.
    fn read(bytes: &mut &'a [u8]) -> Option<Self>;
}

/// The type of a table's keys.
pub trait KeyType: 'static {
    type At<'a>: Parts<'a>;
}

/// Bytes to the end of the key: a name.
pub struct Name;

impl KeyType for Name {
    type At<'a> = &'a [u8];
}
impl<'a> Parts<'a> for &'a [u8] {
    fn write(&self, key: &mut Key) {
        key.push(self);
    }
    fn read(bytes: &mut &'a [u8]) -> Option<&'a [u8]> {
        Some(std::mem::take(bytes))
    }
}

macro_rules! numbers {
    ($($name:ty: $number:ty, |$value:ident| $from:expr, |$read:ident| $to:expr;)*) => {
        $(impl KeyType for $name {
            type At<'a> = $name;
        }
        impl<'a> Parts<'a> for $name {
            fn write(&self, key: &mut Key) {
                let $value = *self;
                key.push(&<$number>::to_be_bytes($from));
            }
            fn read(bytes: &mut &'a [u8]) -> Option<$name> {
                let (number, rest) = bytes.split_first_chunk::<{ size_of::<$number>() }>()?;
                *bytes = rest;
                let $read = <$number>::from_be_bytes(*number);
                Some($to)
            }
        })*
    };
}
numbers! {
    u32: u32, |n| n, |n| n;
    u64: u64, |n| n, |n| n;
    InodeId: u64, |ino| ino.0, |n| InodeId(n);
    SessionId: u64, |session| session.0, |n| SessionId(n);
    VolumeId: u32, |volume| volume.0, |n| VolumeId(n);
    RelationId: u32, |relation| relation.0, |n| RelationId(n);
}

impl KeyType for Counter {
    type At<'a> = Counter;
}
impl<'a> Parts<'a> for Counter {
    fn write(&self, key: &mut Key) {
        key.push(&[*self as u8]);
    }
    fn read(bytes: &mut &'a [u8]) -> Option<Counter> {
        let (letter, rest) = bytes.split_first()?;
        *bytes = rest;
        let all = [Counter::Bytes, Counter::Files, Counter::Directories, Counter::Evicted, Counter::Inodes];
        all.into_iter().find(|counter| *counter as u8 == *letter)
    }
}

/// A user or a group of a volume.
impl KeyType for Holder {
    type At<'a> = Holder;
}
impl<'a> Parts<'a> for Holder {
    fn write(&self, key: &mut Key) {
        self.volume.write(key);
        key.push(&[owner_letter(self.kind)]);
        self.id.write(key);
    }
    fn read(bytes: &mut &'a [u8]) -> Option<Holder> {
        let volume = VolumeId::read(bytes)?;
        let (letter, rest) = bytes.split_first()?;
        *bytes = rest;
        let kind = OwnerKind::ALL.iter().copied().find(|kind| owner_letter(*kind) == *letter)?;
        Some(Holder { volume, kind, id: u32::read(bytes)? })
    }
}

macro_rules! tuples {
    ($($($part:ident $at:tt),+;)*) => {
        $(impl<$($part: KeyType),+> KeyType for ($($part,)+) {
            type At<'a> = ($($part::At<'a>,)+);
        }
        impl<'a, $($part: Parts<'a>),+> Parts<'a> for ($($part,)+) {
            fn write(&self, key: &mut Key) {
                $(self.$at.write(key);)+
            }
            fn read(bytes: &mut &'a [u8]) -> Option<Self> {
                Some(($($part::read(bytes)?,)+))
            }
        })*
    };
}
tuples! {
    A 0, B 1;
    A 0, B 1, C 2;
}

/// The front of a key: all keys that begin with it are one range.
pub trait Prefix<K: KeyType> {
    fn write_prefix(&self, key: &mut Key);
}

/// All keys of a table.
#[derive(Clone, Copy)]
pub struct All;

impl<K: KeyType> Prefix<K> for All {
    fn write_prefix(&self, _: &mut Key) {}
}
macro_rules! prefixes {
    ($($first:ty),*) => {
        $(impl<B: KeyType> Prefix<($first, B)> for $first {
            fn write_prefix(&self, key: &mut Key) {
                self.write(key);
            }
        }
        impl<B: KeyType, C: KeyType> Prefix<($first, B, C)> for $first {
            fn write_prefix(&self, key: &mut Key) {
                self.write(key);
            }
        })*
    };
}
prefixes!(u32, u64, InodeId, SessionId, VolumeId, RelationId);

impl<A: KeyType + for<'a> Parts<'a>, B: KeyType + for<'a> Parts<'a>, C: KeyType> Prefix<(A, B, C)>
    for (A, B)
{
    fn write_prefix(&self, key: &mut Key) {
        self.0.write(key);
        self.1.write(key);
    }
}

impl Prefix<Holder> for VolumeId {
    fn write_prefix(&self, key: &mut Key) {
        self.write(key);
    }
}

/// A value as the store has it.
pub trait Value: Sized + 'static {
    fn to_value(&self) -> Vec<u8>;
    /// `key`: the record's description, for the error if it is damaged.
    fn from_value(bytes: &[u8], key: impl FnOnce() -> String) -> Result<Self>;
}

impl<R: Record + 'static> Value for R {
    fn to_value(&self) -> Vec<u8> {
        Record::to_value(self)
    }
    fn from_value(bytes: &[u8], key: impl FnOnce() -> String) -> Result<R> {
        Record::from_value(bytes, key)
    }
}

/// The value of a key that is only present or absent.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Present;

impl Value for Present {
    fn to_value(&self) -> Vec<u8> {
        Vec::new()
    }
    fn from_value(_: &[u8], _: impl FnOnce() -> String) -> Result<Present> {
        Ok(Present)
    }
}

/// Bytes without a layout of their own: data of a file, an attribute.
impl Value for Vec<u8> {
    fn to_value(&self) -> Vec<u8> {
        self.clone()
    }
    fn from_value(bytes: &[u8], _: impl FnOnce() -> String) -> Result<Vec<u8>> {
        Ok(bytes.to_vec())
    }
}

macro_rules! plain_numbers {
    ($($name:ty: $number:ty, |$value:ident| $from:expr, |$read:ident| $to:expr;)*) => {
        $(impl Value for $name {
            fn to_value(&self) -> Vec<u8> {
                let $value = *self;
                <$number>::to_le_bytes($from).to_vec()
            }
            fn from_value(bytes: &[u8], key: impl FnOnce() -> String) -> Result<$name> {
                let number = <[u8; size_of::<$number>()]>::try_from(bytes);
                let number = number.map_err(|_| Error::damaged(format!("{} is not a number", key())))?;
                let $read = <$number>::from_le_bytes(number);
                Ok($to)
            }
        })*
    };
}
plain_numbers! {
    u64: u64, |n| n, |n| n;
    i64: i64, |n| n, |n| n;
    InodeId: u64, |ino| ino.0, |n| InodeId(n);
    VolumeId: u32, |volume| volume.0, |n| VolumeId(n);
}

/// The keys of one letter.
pub struct Table<K, V> {
    letter: Letter,
    /// Its records, for errors.
    what: &'static str,
    types: PhantomData<fn() -> (K, V)>,
}

impl<K: KeyType, V: Value> Table<K, V> {
    pub const fn new(letter: Letter, what: &'static str) -> Table<K, V> {
        Table { letter, what, types: PhantomData }
    }

    pub fn key(&self, at: K::At<'_>) -> Key {
        let mut key = Key::new(self.letter);
        at.write(&mut key);
        key
    }
    /// The parts of a key of this table.
    pub fn parts<'a>(&self, key: &'a [u8]) -> Result<K::At<'a>> {
        let parts = key.strip_prefix(&[self.letter as u8]).and_then(|mut rest| {
            let parts = K::At::read(&mut rest)?;
            rest.is_empty().then_some(parts)
        });
        parts.ok_or_else(|| Error::damaged(format!("a key of {} is damaged: {key:?}", self.what)))
    }
    fn value(&self, at: K::At<'_>, bytes: &[u8]) -> Result<V> {
        V::from_value(bytes, || format!("{} {at:?}", self.what))
    }

    /// An entry that was read without this table.
    pub fn entry<'a>(&self, key: &'a [u8], value: &[u8]) -> Result<(K::At<'a>, V)> {
        let at = self.parts(key)?;
        Ok((at, self.value(at, value)?))
    }

    pub fn get(&self, read: &dyn Read, at: K::At<'_>) -> Result<Option<V>> {
        read.get(&self.key(at))?.map(|bytes| self.value(at, &bytes)).transpose()
    }
    pub fn has(&self, read: &dyn Read, at: K::At<'_>) -> Result<bool> {
        Ok(read.get(&self.key(at))?.is_some())
    }
    pub fn put(&self, txn: &mut dyn Txn, at: K::At<'_>, value: &V) {
        txn.put(&self.key(at), &value.to_value());
    }
    pub fn delete(&self, txn: &mut dyn Txn, at: K::At<'_>) {
        txn.delete(&self.key(at));
    }

    fn span(&self, start: Key, end: Vec<u8>) -> Span<K, V> {
        Span { letter: self.letter, what: self.what, start, end, types: PhantomData }
    }
    /// The entries under a prefix.
    pub fn under(&self, prefix: impl Prefix<K>) -> Span<K, V> {
        let mut start = Key::new(self.letter);
        prefix.write_prefix(&mut start);
        let end = after(&start);
        self.span(start, end)
    }
    pub fn all(&self) -> Span<K, V> {
        self.under(All)
    }
    /// The entries under a prefix from a key on, which need not exist.
    pub fn from(&self, prefix: impl Prefix<K>, from: K::At<'_>) -> Span<K, V> {
        let Span { start, end, .. } = self.under(prefix);
        let from = self.key(from);
        assert!(from.starts_with(&start), "{}: a span begins outside of its prefix", self.what);
        self.span(from, end)
    }
    /// The entries from a key to before another one.
    pub fn between(&self, from: K::At<'_>, to: K::At<'_>) -> Span<K, V> {
        let (start, end) = (self.key(from), self.key(to));
        assert!(*start <= *end, "{}: a span ends before it begins", self.what);
        self.span(start, end.to_vec())
    }
}

impl<K: KeyType> Table<K, Vec<u8>> {
    pub fn put_bytes(&self, txn: &mut dyn Txn, at: K::At<'_>, bytes: &[u8]) {
        txn.put(&self.key(at), bytes);
    }
}

impl<K: KeyType> Table<K, i64> {
    /// Adds to a number without reading it; an absent one is 0.
    pub fn add(&self, txn: &mut dyn Txn, at: K::At<'_>, delta: i64) {
        txn.add(&self.key(at), delta);
    }
}

/// A range of a table's entries, in the order of their keys.
pub struct Span<K, V> {
    letter: Letter,
    what: &'static str,
    start: Key,
    /// Exclusive.
    end: Vec<u8>,
    types: PhantomData<fn() -> (K, V)>,
}

impl<K: KeyType, V: Value> Span<K, V> {
    /// Calls `visit` for each entry until it returns stop.
    pub fn scan(&self, read: &dyn Read, visit: &mut dyn FnMut(K::At<'_>, V) -> Scan) -> Result<()> {
        let (table, mut bad) = (Table::<K, V>::new(self.letter, self.what), None);
        read.scan(&self.start, &self.end, &mut |key, bytes| match table.entry(key, bytes) {
            Ok((at, value)) => visit(at, value),
            Err(e) => {
                bad = Some(e);
                Scan::Stop
            }
        })?;
        bad.map_or(Ok(()), Err)
    }

    /// The first `limit` entries.
    pub fn collect<T>(
        &self,
        read: &dyn Read,
        limit: usize,
        mut item: impl FnMut(K::At<'_>, V) -> T,
    ) -> Result<Vec<T>> {
        let mut items = Vec::new();
        if limit == 0 {
            return Ok(items);
        }
        self.scan(read, &mut |at, value| {
            items.push(item(at, value));
            if items.len() < limit { Scan::More } else { Scan::Stop }
        })?;
        Ok(items)
    }

    /// The keys of the first `limit` entries.
    pub fn keys<T>(
        &self,
        read: &dyn Read,
        limit: usize,
        mut item: impl FnMut(K::At<'_>) -> T,
    ) -> Result<Vec<T>> {
        let table = Table::<K, V>::new(self.letter, self.what);
        let (mut items, mut bad) = (Vec::new(), None);
        if limit == 0 {
            return Ok(items);
        }
        read.scan(&self.start, &self.end, &mut |key, _| {
            match table.parts(key) {
                Ok(at) => items.push(item(at)),
                Err(e) => bad = Some(e),
            }
            if bad.is_none() && items.len() < limit { Scan::More } else { Scan::Stop }
        })?;
        bad.map_or(Ok(items), Err)
    }

    /// Whether there is an entry.
    pub fn has_any(&self, read: &dyn Read) -> Result<bool> {
        let mut found = false;
        read.scan(&self.start, &self.end, &mut |_, _| {
            found = true;
            Scan::Stop
        })?;
        Ok(found)
    }

    /// The number of entries.
    pub fn count(&self, read: &dyn Read) -> Result<usize> {
        let mut count = 0;
        read.scan(&self.start, &self.end, &mut |_, _| {
            count += 1;
            Scan::More
        })?;
        Ok(count)
    }

    /// Deletes the first `limit` entries; returns their number.
    pub fn delete_some(&self, txn: &mut dyn Txn, limit: usize) -> Result<usize> {
        let mut found = Vec::new();
        txn.scan(&self.start, &self.end, &mut |key, _| {
            if found.len() < limit {
                found.push(key.to_vec());
            }
            if found.len() < limit { Scan::More } else { Scan::Stop }
        })?;
        found.iter().for_each(|key| txn.delete(key));
        Ok(found.len())
    }
    pub fn delete_all(&self, txn: &mut dyn Txn) -> Result<()> {
        self.delete_some(txn, usize::MAX).map(drop)
    }
}
