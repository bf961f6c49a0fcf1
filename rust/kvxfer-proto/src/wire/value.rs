//! How one field's value lies in bytes.

use super::error::WireError;
use super::{
    MAX_BLOB_BYTES, MAX_ENTRIES, MAX_FABRICS, MAX_GROUPS, MAX_META_BYTES, MAX_PAGES, MAX_REGIONS,
    MAX_STRING_BYTES,
};
use crate::error::ReasonKind;
use crate::ids::{Incarnation, PushId, Room, Seq, SessionNo};
use crate::layout::{DType, Kind, Order, PageLayout};
use crate::msg::{Entry, FabricOffer, MemKind, Purpose, RegionShape, Role, Verify};
use std::sync::Arc;

/// Where a value stands, for errors.
#[derive(Clone, Copy)]
pub(super) struct At {
    pub(super) message: &'static str,
    pub(super) field: &'static str,
}

impl At {
    fn length(self, len: usize, want: usize) -> WireError {
        WireError::Length { message: self.message, field: self.field, len, want }
    }

    pub(super) fn value(self, value: u64) -> WireError {
        WireError::Value { message: self.message, field: self.field, value }
    }

    fn limit(self, count: usize, max: usize, unit: &'static str) -> Result<(), WireError> {
        if count <= max {
            return Ok(());
        }
        Err(WireError::TooMany { message: self.message, field: self.field, count, max, unit })
    }
}

/// A type that can be a field.
pub(super) trait Value: Sized {
    fn put(&self, out: &mut Vec<u8>, at: At) -> Result<(), WireError>;
    fn get(bytes: &[u8], at: At) -> Result<Self, WireError>;
}

/// A type that can be an element of a list field.
pub(super) trait Item: Value {
    /// Most elements that a list of these may have.
    const MAX: usize;
}

impl Item for PageLayout {
    const MAX: usize = MAX_GROUPS;
}
impl Item for RegionShape {
    const MAX: usize = MAX_REGIONS;
}
impl Item for FabricOffer {
    const MAX: usize = MAX_FABRICS;
}
impl Item for Entry {
    const MAX: usize = MAX_ENTRIES;
}
impl Item for Arc<[u32]> {
    const MAX: usize = MAX_GROUPS;
}

/// Appends `tag`, a length and what `body` writes.
pub(super) fn put_field(
    out: &mut Vec<u8>,
    at: At,
    tag: u16,
    body: impl FnOnce(&mut Vec<u8>) -> Result<(), WireError>,
) -> Result<(), WireError> {
    out.extend_from_slice(&tag.to_le_bytes());
    let len_at = out.len();
    out.extend_from_slice(&[0; 4]);
    let start = out.len();
    body(out)?;
    let written = out.len() - start;
    let Ok(len) = u32::try_from(written) else {
        return Err(WireError::TooMany {
            message: at.message,
            field: at.field,
            count: written,
            max: super::MAX_FRAME_BYTES,
            unit: "bytes",
        });
    };
    if let Some(slot) = out.get_mut(len_at..start) {
        slot.copy_from_slice(&len.to_le_bytes());
    }
    Ok(())
}

/// Walks over fields.
pub(super) struct Fields<'a> {
    message: &'static str,
    rest: &'a [u8],
}

impl<'a> Fields<'a> {
    pub(super) fn new(message: &'static str, bytes: &'a [u8]) -> Self {
        Self { message, rest: bytes }
    }

    /// The next field's tag and bytes, or `None` exactly at the end.
    pub(super) fn step(&mut self) -> Result<Option<(u16, &'a [u8])>, WireError> {
        if self.rest.is_empty() {
            return Ok(None);
        }
        let stray = WireError::Stray { message: self.message, left: self.rest.len() };
        let Some((tag, rest)) = self.rest.split_first_chunk::<2>() else { return Err(stray) };
        let Some((len, rest)) = rest.split_first_chunk::<4>() else { return Err(stray) };
        let (tag, len) = (u16::from_le_bytes(*tag), u32::from_le_bytes(*len));
        let overrun = WireError::Overrun { message: self.message, tag, len: len.into(), left: rest.len() };
        let len = usize::try_from(len).map_err(|_| overrun.clone())?;
        let Some((value, rest)) = rest.split_at_checked(len) else { return Err(overrun) };
        self.rest = rest;
        Ok(Some((tag, value)))
    }
}

/// Puts a decoded field into its slot, which must be empty.
pub(super) fn set<T: Value>(slot: &mut Option<T>, bytes: &[u8], at: At) -> Result<(), WireError> {
    if slot.is_some() {
        return Err(WireError::Repeated { message: at.message, field: at.field });
    }
    *slot = Some(T::get(bytes, at)?);
    Ok(())
}

/// The value of a field that must be there.
pub(super) fn need<T>(slot: Option<T>, at: At) -> Result<T, WireError> {
    slot.ok_or(WireError::Missing { message: at.message, field: at.field })
}

fn array<const N: usize>(bytes: &[u8], at: At) -> Result<[u8; N], WireError> {
    bytes.try_into().map_err(|_| at.length(bytes.len(), N))
}

macro_rules! numbers {
    ($($ty:ty),*) => { $(
        impl Value for $ty {
            fn put(&self, out: &mut Vec<u8>, _: At) -> Result<(), WireError> {
                out.extend_from_slice(&self.to_le_bytes());
                Ok(())
            }
            fn get(bytes: &[u8], at: At) -> Result<Self, WireError> {
                Ok(Self::from_le_bytes(array(bytes, at)?))
            }
        }
    )* };
}
numbers!(u8, u32, u64);

macro_rules! ids {
    ($($ty:ident),*) => { $(
        impl Value for $ty {
            fn put(&self, out: &mut Vec<u8>, at: At) -> Result<(), WireError> {
                self.0.put(out, at)
            }
            fn get(bytes: &[u8], at: At) -> Result<Self, WireError> {
                Ok(Self(u64::get(bytes, at)?))
            }
        }
    )* };
}
ids!(Incarnation, SessionNo, Seq, PushId);

macro_rules! enums {
    ($($ty:ident { $($name:ident = $n:literal),* })*) => { $(
        impl Value for $ty {
            fn put(&self, out: &mut Vec<u8>, _: At) -> Result<(), WireError> {
                out.push(match self { $(Self::$name => $n),* });
                Ok(())
            }
            fn get(bytes: &[u8], at: At) -> Result<Self, WireError> {
                match u8::get(bytes, at)? {
                    $($n => Ok(Self::$name),)*
                    other => Err(at.value(other.into())),
                }
            }
        }
    )* };
}
enums! {
    Purpose { Transfer = 1, Lookup = 2, Register = 3 }
    Role { Both = 1, Prefill = 2, Decode = 3 }
    Verify { Off = 1, Sample = 2, Full = 3 }
    Order { Nhd = 1, Hnd = 2 }
    Kind { Kv = 1, Fused = 2, Latent = 3, Packed = 4, State = 5 }
}

impl Value for bool {
    fn put(&self, out: &mut Vec<u8>, _: At) -> Result<(), WireError> {
        out.push(u8::from(*self));
        Ok(())
    }
    fn get(bytes: &[u8], at: At) -> Result<Self, WireError> {
        match u8::get(bytes, at)? {
            0 => Ok(false),
            1 => Ok(true),
            other => Err(at.value(other.into())),
        }
    }
}

impl Value for Room {
    fn put(&self, out: &mut Vec<u8>, at: At) -> Result<(), WireError> {
        self.get().put(out, at)
    }
    fn get(bytes: &[u8], at: At) -> Result<Self, WireError> {
        let raw = u64::get(bytes, at)?;
        Self::new(raw).ok_or_else(|| at.value(raw))
    }
}

impl Value for ReasonKind {
    fn put(&self, out: &mut Vec<u8>, _: At) -> Result<(), WireError> {
        out.push(*self as u8);
        Ok(())
    }
    // A newer peer's kind of failure is still a failure, so it is no error here.
    fn get(bytes: &[u8], at: At) -> Result<Self, WireError> {
        Ok(Self::from_wire(u8::get(bytes, at)?))
    }
}

impl Value for DType {
    fn put(&self, out: &mut Vec<u8>, _: At) -> Result<(), WireError> {
        out.push(*self as u8);
        Ok(())
    }
    fn get(bytes: &[u8], at: At) -> Result<Self, WireError> {
        let n = u8::get(bytes, at)?;
        Self::from_wire(n).ok_or_else(|| at.value(n.into()))
    }
}

impl Value for MemKind {
    fn put(&self, out: &mut Vec<u8>, at: At) -> Result<(), WireError> {
        match self {
            Self::Host => out.push(1),
            Self::Device(ordinal) => {
                out.push(2);
                ordinal.put(out, at)?;
            }
        }
        Ok(())
    }
    fn get(bytes: &[u8], at: At) -> Result<Self, WireError> {
        match bytes.split_first() {
            Some((1, [])) => Ok(Self::Host),
            Some((1, rest)) => Err(at.length(rest.len() + 1, 1)),
            Some((2, rest)) => Ok(Self::Device(u32::get(rest, at)?)),
            Some((other, _)) => Err(at.value((*other).into())),
            None => Err(at.length(0, 1)),
        }
    }
}

impl Value for String {
    fn put(&self, out: &mut Vec<u8>, at: At) -> Result<(), WireError> {
        at.limit(self.len(), MAX_STRING_BYTES, "bytes")?;
        out.extend_from_slice(self.as_bytes());
        Ok(())
    }
    fn get(bytes: &[u8], at: At) -> Result<Self, WireError> {
        at.limit(bytes.len(), MAX_STRING_BYTES, "bytes")?;
        match std::str::from_utf8(bytes) {
            Ok(text) => Ok(text.to_owned()),
            Err(_) => Err(WireError::NotUtf8 { message: at.message, field: at.field }),
        }
    }
}

impl Value for [u8; 32] {
    fn put(&self, out: &mut Vec<u8>, _: At) -> Result<(), WireError> {
        out.extend_from_slice(self);
        Ok(())
    }
    fn get(bytes: &[u8], at: At) -> Result<Self, WireError> {
        array(bytes, at)
    }
}

/// A fabric's blob.
impl Value for Vec<u8> {
    fn put(&self, out: &mut Vec<u8>, at: At) -> Result<(), WireError> {
        at.limit(self.len(), MAX_BLOB_BYTES, "bytes")?;
        out.extend_from_slice(self);
        Ok(())
    }
    fn get(bytes: &[u8], at: At) -> Result<Self, WireError> {
        at.limit(bytes.len(), MAX_BLOB_BYTES, "bytes")?;
        Ok(bytes.to_vec())
    }
}

/// The engine's bytes.
impl Value for Arc<[u8]> {
    fn put(&self, out: &mut Vec<u8>, at: At) -> Result<(), WireError> {
        at.limit(self.len(), MAX_META_BYTES, "bytes")?;
        out.extend_from_slice(self);
        Ok(())
    }
    fn get(bytes: &[u8], at: At) -> Result<Self, WireError> {
        at.limit(bytes.len(), MAX_META_BYTES, "bytes")?;
        Ok(bytes.into())
    }
}

macro_rules! pairs {
    ($($a:ty, $b:ty);*) => { $(
        impl Value for ($a, $b) {
            fn put(&self, out: &mut Vec<u8>, at: At) -> Result<(), WireError> {
                self.0.put(out, at)?;
                self.1.put(out, at)
            }
            fn get(bytes: &[u8], at: At) -> Result<Self, WireError> {
                const FIRST: usize = size_of::<$a>();
                let both: [u8; FIRST + size_of::<$b>()] = array(bytes, at)?;
                let (first, second) = both.split_at(FIRST);
                Ok((<$a>::get(first, at)?, <$b>::get(second, at)?))
            }
        }
    )* };
}
pairs!(u8, u8; u32, u32; u64, u64; u64, u32);

fn put_words(words: &[u32], out: &mut Vec<u8>) {
    let start = out.len();
    out.resize(start + words.len() * 4, 0);
    if let Some(room) = out.get_mut(start..) {
        for (slot, word) in room.chunks_exact_mut(4).zip(words) {
            slot.copy_from_slice(&word.to_le_bytes());
        }
    }
}

fn words(bytes: &[u8], max: usize, at: At) -> Result<impl Iterator<Item = u32>, WireError> {
    let (words, rest) = bytes.as_chunks::<4>();
    if !rest.is_empty() {
        return Err(at.length(bytes.len(), 4));
    }
    at.limit(words.len(), max, "elements")?;
    Ok(words.iter().map(|word| u32::from_le_bytes(*word)))
}

/// A page list.
impl Value for Arc<[u32]> {
    fn put(&self, out: &mut Vec<u8>, at: At) -> Result<(), WireError> {
        at.limit(self.len(), MAX_PAGES, "elements")?;
        put_words(self, out);
        Ok(())
    }
    fn get(bytes: &[u8], at: At) -> Result<Self, WireError> {
        Ok(words(bytes, MAX_PAGES, at)?.collect())
    }
}

/// One number a group.
impl Value for Vec<u32> {
    fn put(&self, out: &mut Vec<u8>, at: At) -> Result<(), WireError> {
        at.limit(self.len(), MAX_GROUPS, "elements")?;
        put_words(self, out);
        Ok(())
    }
    fn get(bytes: &[u8], at: At) -> Result<Self, WireError> {
        Ok(words(bytes, MAX_GROUPS, at)?.collect())
    }
}

/// Tag of every element of a list.
const ELEMENT: u16 = 1;

// There is no count to trust: the vector grows as elements are found.
impl<T: Item> Value for Vec<T> {
    fn put(&self, out: &mut Vec<u8>, at: At) -> Result<(), WireError> {
        at.limit(self.len(), T::MAX, "elements")?;
        for item in self {
            put_field(out, at, ELEMENT, |out| item.put(out, at))?;
        }
        Ok(())
    }
    fn get(bytes: &[u8], at: At) -> Result<Self, WireError> {
        let mut items = Self::new();
        let mut fields = Fields::new(at.message, bytes);
        while let Some((tag, value)) = fields.step()? {
            if tag == ELEMENT {
                at.limit(items.len() + 1, T::MAX, "elements")?;
                items.push(T::get(value, at)?);
            }
        }
        Ok(items)
    }
}
