//! The fields of every message and nested struct, with their tags. Tags are never reused or renumbered.

use super::MAX_STRING_BYTES;
use super::error::WireError;
use super::value::{At, Fields, Value, need, put_field, set};
use crate::error::{Reason, ReasonKind};
use crate::layout::Shard;
use crate::msg::{
    Attach, Attached, Cancel, Challenge, Copied, Credit, Describe, Done, Drained, Entries, Entry,
    FabricOffer, Finished, Grant, Hello, Lookup, Owed, Proof, Ready, RegionShape, Retract, RoomFailed,
};

/// `tag field` is a required field, `tag field?` may be absent.
macro_rules! fields {
    ($($ty:ident { $($tag:literal $field:ident $(($optional:tt))?),* $(,)? })*) => { $(
        impl Value for $ty {
            fn put(&self, out: &mut Vec<u8>, _: At) -> Result<(), WireError> {
                $({
                    let at = At { message: stringify!($ty), field: stringify!($field) };
                    fields!(@put out, at, $tag, &self.$field $(, $optional)?);
                })*
                Ok(())
            }
            fn get(bytes: &[u8], _: At) -> Result<Self, WireError> {
                $(let mut $field = None;)*
                let mut fields = Fields::new(stringify!($ty), bytes);
                while let Some((tag, value)) = fields.step()? {
                    match tag {
                        $($tag => {
                            set(&mut $field, value, At { message: stringify!($ty), field: stringify!($field) })?;
                        })*
                        _ => {}
                    }
                }
                Ok(Self { $($field: fields!(@take $ty, $field $(, $optional)?)),* })
            }
        }
    )* };
    (@put $out:ident, $at:ident, $tag:literal, $value:expr) => {
        put_field($out, $at, $tag, |out| $value.put(out, $at))?;
    };
    (@put $out:ident, $at:ident, $tag:literal, $value:expr, ?) => {
        if let Some(value) = $value {
            put_field($out, $at, $tag, |out| value.put(out, $at))?;
        }
    };
    (@take $ty:ident, $field:ident) => {
        need($field, At { message: stringify!($ty), field: stringify!($field) })?
    };
    (@take $ty:ident, $field:ident, ?) => { $field };
}

fields! {
    Hello { 1 versions, 2 features, 3 nonce, 4 purpose, 5 session }
    Challenge { 1 version, 2 features, 3 nonce }
    Proof { 1 mac }
    Describe {
        1 name, 2 engine, 3 dp_rank, 4 role, 5 mode, 6 groups, 7 shard, 8 pages, 9 model, 10 regions,
        11 fabrics, 12 received, 13 link_generation, 14 staging, 15 process,
    }
    Attach { 1 fabric }
    Attached { 1 error (?), 2 info }
    Entry { 1 name, 2 engine, 3 dp_rank, 4 incarnation, 5 groups, 6 shard, 7 address }
    Lookup { 1 engine }
    Entries { 1 entries }
    Grant {
        1 room, 2 seq, 3 tokens, 4 owed (?), 5 pages, 6 ranks, 7 verify, 8 deadline_us, 9 credits,
    }
    Cancel { 1 room, 2 upto, 3 reason }
    Drained { 1 room, 2 seq, 3 reason }
    Ready { 1 room, 2 seq, 3 push, 4 span, 5 pages_start, 6 pages, 7 pages_end (?) }
    Retract { 1 room, 2 seq, 3 push }
    Copied { 1 room, 2 seq, 3 push, 4 error (?) }
    Done {
        1 room, 2 seq, 3 push, 4 span, 5 last, 6 end_token, 7 meta (?), 8 checksum (?), 9 bytes, 10 writes,
    }
    Finished { 1 room, 2 seq, 3 error (?) }
    RoomFailed { 1 room, 2 reason }
    Credit { 1 room (?), 2 seq, 3 slots }
    Shard { 1 tp_rank, 2 tp_size, 3 pp_rank, 4 pp_size }
    RegionShape { 1 group, 2 layer, 3 part, 4 len, 5 kind }
    FabricOffer { 1 name, 2 blob }
    Owed { 1 layers, 2 tokens }
}

const REASON_KIND: At = At { message: "Reason", field: "kind" };
const REASON_TEXT: At = At { message: "Reason", field: "text" };

impl Value for Reason {
    fn put(&self, out: &mut Vec<u8>, _: At) -> Result<(), WireError> {
        put_field(out, REASON_KIND, 1, |out| self.kind.put(out, REASON_KIND))?;
        put_field(out, REASON_TEXT, 2, |out| {
            out.extend_from_slice(cut(&self.text, MAX_STRING_BYTES).as_bytes());
            Ok(())
        })
    }
    fn get(bytes: &[u8], _: At) -> Result<Self, WireError> {
        let (mut kind, mut text) = (None::<ReasonKind>, None::<String>);
        let mut fields = Fields::new("Reason", bytes);
        while let Some((tag, value)) = fields.step()? {
            match tag {
                1 => set(&mut kind, value, REASON_KIND)?,
                2 => set(&mut text, value, REASON_TEXT)?,
                _ => {}
            }
        }
        Ok(Self { kind: need(kind, REASON_KIND)?, text: need(text, REASON_TEXT)? })
    }
}

/// `text`, or as much of its start as fits in `max` bytes: to report a failure must not fail for a long text.
fn cut(text: &str, max: usize) -> &str {
    let mut end = max.min(text.len());
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    text.get(..end).unwrap_or_default()
}
