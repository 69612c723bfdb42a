//! The byte layout of message bodies: little-endian, fixed field order, lengths before variable parts.
//!
//! Strings and byte strings carry a u32 length, lists a u32 count, options one byte 0/1, enums one byte
//! (their wire number). A decoder never trusts a length: it checks it against the remaining bytes before it
//! allocates.
use crate::{Error, Result};
use bytes::Bytes;
use std::sync::Arc;

/// Appends fields to a message body.
#[derive(Default, Debug)]
pub struct Writer {
    pub bytes: Vec<u8>,
}

/// Reads fields from a message body.
#[derive(Debug)]
pub struct Reader<'a> {
    rest: &'a [u8],
}

/// A value with a fixed wire layout.
pub trait Wire: Sized {
    fn encode(&self, w: &mut Writer);
    fn decode(r: &mut Reader<'_>) -> Result<Self>;

    fn to_bytes(&self) -> Vec<u8> {
        let mut w = Writer::default();
        self.encode(&mut w);
        w.bytes
    }
    /// Decodes the whole of `bytes`; left-over bytes are an error.
    fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let mut r = Reader::new(bytes);
        let value = Self::decode(&mut r)?;
        r.finish()?;
        Ok(value)
    }
}

impl<'a> Reader<'a> {
    pub fn new(bytes: &'a [u8]) -> Reader<'a> {
        Reader { rest: bytes }
    }
    pub fn remaining(&self) -> usize {
        self.rest.len()
    }
    pub fn take(&mut self, n: usize) -> Result<&'a [u8]> {
        if n > self.rest.len() {
            return Err(malformed(format!("{n} bytes wanted, {} left", self.rest.len())));
        }
        let (head, rest) = self.rest.split_at(n);
        self.rest = rest;
        Ok(head)
    }
    pub fn finish(self) -> Result<()> {
        match self.rest.len() {
            0 => Ok(()),
            n => Err(malformed(format!("{n} bytes too many"))),
        }
    }
    /// A count whose elements take at least `min_bytes` each on the wire.
    pub fn count(&mut self, min_bytes: usize) -> Result<usize> {
        let n = u32::decode(self)? as usize;
        if n.saturating_mul(min_bytes.max(1)) > self.rest.len() {
            return Err(malformed(format!("a list of {n} does not fit into {} bytes", self.rest.len())));
        }
        Ok(n)
    }
}

pub(crate) fn malformed(detail: String) -> Error {
    Error::invalid(format!("malformed message: {detail}"))
}

macro_rules! number {
    ($($t:ty),*) => {$(
        impl Wire for $t {
            fn encode(&self, w: &mut Writer) {
                w.bytes.extend_from_slice(&self.to_le_bytes());
            }
            fn decode(r: &mut Reader<'_>) -> Result<Self> {
                let bytes = r.take(size_of::<$t>())?;
                Ok(<$t>::from_le_bytes(bytes.try_into().expect("as many bytes as asked")))
            }
        }
    )*};
}
number!(u8, u16, u32, u64, i64);

impl Wire for bool {
    fn encode(&self, w: &mut Writer) {
        w.bytes.push(u8::from(*self));
    }
    fn decode(r: &mut Reader<'_>) -> Result<Self> {
        match u8::decode(r)? {
            0 => Ok(false),
            1 => Ok(true),
            n => Err(malformed(format!("{n} is not a truth value"))),
        }
    }
}
impl Wire for () {
    fn encode(&self, _: &mut Writer) {}
    fn decode(_: &mut Reader<'_>) -> Result<Self> {
        Ok(())
    }
}
impl<const N: usize> Wire for [u8; N] {
    fn encode(&self, w: &mut Writer) {
        w.bytes.extend_from_slice(self);
    }
    fn decode(r: &mut Reader<'_>) -> Result<Self> {
        Ok(r.take(N)?.try_into().expect("as many bytes as asked"))
    }
}
impl Wire for Bytes {
    fn encode(&self, w: &mut Writer) {
        (self.len() as u32).encode(w);
        w.bytes.extend_from_slice(self);
    }
    fn decode(r: &mut Reader<'_>) -> Result<Self> {
        let n = r.count(1)?;
        Ok(Bytes::copy_from_slice(r.take(n)?))
    }
}
impl Wire for String {
    fn encode(&self, w: &mut Writer) {
        (self.len() as u32).encode(w);
        w.bytes.extend_from_slice(self.as_bytes());
    }
    fn decode(r: &mut Reader<'_>) -> Result<Self> {
        let n = r.count(1)?;
        String::from_utf8(r.take(n)?.to_vec()).map_err(|_| malformed("a text is not UTF-8".into()))
    }
}
impl<T: Wire> Wire for Option<T> {
    fn encode(&self, w: &mut Writer) {
        self.is_some().encode(w);
        if let Some(value) = self {
            value.encode(w);
        }
    }
    fn decode(r: &mut Reader<'_>) -> Result<Self> {
        Ok(if bool::decode(r)? { Some(T::decode(r)?) } else { None })
    }
}
/// Has the bytes of the shared value.
impl<T: Wire> Wire for Arc<T> {
    fn encode(&self, w: &mut Writer) {
        T::encode(self, w);
    }
    fn decode(r: &mut Reader<'_>) -> Result<Self> {
        T::decode(r).map(Arc::new)
    }
}
/// Bytes of memory for elements of a list, for each remaining byte of the message.
const RESERVED_PER_BYTE: usize = 64;
impl<T: Wire> Wire for Vec<T> {
    fn encode(&self, w: &mut Writer) {
        (self.len() as u32).encode(w);
        for item in self {
            item.encode(w);
        }
    }
    fn decode(r: &mut Reader<'_>) -> Result<Self> {
        // Elements of zero bytes would let a count of four billion pass; none exist, and the check requires a
        // byte per element.
        let n = r.count(1)?;
        // Memory reserved before the first element is decoded is proportional to the received bytes,
        // regardless of an element's size.
        let fit = r.remaining() * RESERVED_PER_BYTE / size_of::<T>().max(1);
        let mut items = Vec::with_capacity(n.min(1024).min(fit));
        for _ in 0..n {
            items.push(T::decode(r)?);
        }
        Ok(items)
    }
}
impl<A: Wire, B: Wire> Wire for (A, B) {
    fn encode(&self, w: &mut Writer) {
        self.0.encode(w);
        self.1.encode(w);
    }
    fn decode(r: &mut Reader<'_>) -> Result<Self> {
        Ok((A::decode(r)?, B::decode(r)?))
    }
}

/// Gives a struct its wire layout: the fields in the order named.
#[macro_export]
macro_rules! wire_struct {
    ($name:ident { $($field:ident : $ty:ty),* $(,)? }) => {
        impl $crate::Wire for $name {
            fn encode(&self, w: &mut $crate::Writer) {
                let _ = &w;
                $($crate::Wire::encode(&self.$field, w);)*
            }
            fn decode(r: &mut $crate::Reader<'_>) -> $crate::Result<Self> {
                let _ = &r;
                Ok($name { $($field: <$ty as $crate::Wire>::decode(r)?),* })
            }
        }
    };
}

/// Declares a message struct together with its wire layout; for a request also its number, its permitted
/// senders, and the reply.
#[macro_export]
macro_rules! message {
    ($(#[$doc:meta])* $name:ident { $($(#[$fdoc:meta])* $field:ident : $ty:ty),* $(,)? }) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, Debug)]
        pub struct $name { $($(#[$fdoc])* pub $field: $ty),* }
        $crate::wire_struct!($name { $($field: $ty),* });
    };
    ($(#[$doc:meta])* $name:ident = $method:literal by [$($sender:ident),*] -> $reply:ty { $($(#[$fdoc:meta])* $field:ident : $ty:ty),* $(,)? }) => {
        $crate::message!($(#[$doc])* $name { $($(#[$fdoc])* $field: $ty),* });
        impl $crate::Request for $name {
            const METHOD: u16 = $method;
            const NAME: &'static str = stringify!($name);
            const BY: $crate::sender::Senders =
                $crate::sender::Senders::of(&[$($crate::sender::Sender::$sender),*]);
            type Reply = $reply;
        }
    };
}

/// Declares an enum of plain cases with their wire numbers.
#[macro_export]
macro_rules! wire_enum {
    ($(#[$doc:meta])* $name:ident { $($(#[$cdoc:meta])* $case:ident = $number:literal),* $(,)? }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
        pub enum $name { $($(#[$cdoc])* $case = $number),* }
        impl $name {
            pub const ALL: &'static [$name] = &[$($name::$case),*];
        }
        impl $crate::Wire for $name {
            fn encode(&self, w: &mut $crate::Writer) {
                w.bytes.push(*self as u8);
            }
            fn decode(r: &mut $crate::Reader<'_>) -> $crate::Result<Self> {
                match u8::decode(r)? {
                    $($number => Ok($name::$case),)*
                    n => Err($crate::Error::invalid(format!(
                        "malformed message: {n} is not a {}", stringify!($name)))),
                }
            }
        }
    };
}

/// Declares an enum whose cases carry fields, with their wire numbers.
#[macro_export]
macro_rules! wire_union {
    ($(#[$doc:meta])* $name:ident { $($(#[$cdoc:meta])* $case:ident = $number:literal {
        $($(#[$fdoc:meta])* $field:ident : $ty:ty),* $(,)?
    }),* $(,)? }) => {
        $(#[$doc])*
        #[derive(Clone, PartialEq, Eq, Debug)]
        pub enum $name { $($(#[$cdoc])* $case { $($(#[$fdoc])* $field: $ty),* }),* }
        impl $crate::Wire for $name {
            fn encode(&self, w: &mut $crate::Writer) {
                match self {
                    $($name::$case { $($field),* } => {
                        w.bytes.push($number);
                        $($crate::Wire::encode($field, w);)*
                    })*
                }
            }
            fn decode(r: &mut $crate::Reader<'_>) -> $crate::Result<Self> {
                match <u8 as $crate::Wire>::decode(r)? {
                    $($number => Ok($name::$case { $($field: <$ty as $crate::Wire>::decode(r)?),* }),)*
                    n => Err($crate::Error::invalid(format!(
                        "malformed message: {n} is not a {}", stringify!($name)))),
                }
            }
        }
    };
}

/// Gives a number in a type of its own the wire layout of the number.
#[macro_export]
macro_rules! wire_newtype {
    ($name:ident($inner:ty)) => {
        impl $crate::Wire for $name {
            fn encode(&self, w: &mut $crate::Writer) {
                $crate::Wire::encode(&self.0, w);
            }
            fn decode(r: &mut $crate::Reader<'_>) -> $crate::Result<Self> {
                Ok($name(<$inner as $crate::Wire>::decode(r)?))
            }
        }
    };
}
