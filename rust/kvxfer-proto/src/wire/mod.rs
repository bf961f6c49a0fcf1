//! The bytes of a frame, wire version 1.
//!
//! A frame is a header of [`HEADER_BYTES`] bytes and a body; every number is little-endian:
//!
//! | bytes | field | |
//! |---|---|---|
//! | 0..4 | `len` | bytes after the header |
//! | 4 | `version` | 1 |
//! | 5 | `kind` | which [`Msg`] |
//! | 6..8 | `flags` | 0 |
//! | 8..16 | `incarnation` | the sender's |
//! | 16..24 | `session` | |
//! | 24..32 | `number` | the link number, or 0 |
//!
//! The body is a row of fields `tag: u16, len: u32, bytes`. Fields with unknown tags are skipped, so a newer minor
//! peer can add some; a field twice, a required field missing, a length that its type does not have, a number that
//! an enum does not know, and stray bytes are errors. Structs inside a message are rows of fields too; lists are
//! rows of fields with tag 1; page lists are raw `u32` arrays. A layout whose kind has its highest bit set is not plain: then
//! no field of it may be skipped, and one that is not known is an error, as the bit is to a reader that does not know it.
//! `Hello`, `Challenge` and `Refuse` keep their bytes
//! in every version, so that two versions can tell each other that they do not fit.
//!
//! Counts are never read from the wire: what decoding allocates is bounded by the bytes that are there. The codec
//! checks form, not sense: whether ranges are in order or pages exist is for the state machines to say.

mod decoder;
mod error;
mod fields;
mod layout;
mod value;

pub use decoder::Decoder;
pub use error::WireError;

use crate::error::Reason;
use crate::ids::{Incarnation, SessionNo};
use crate::msg::{
    Attach, Attached, Cancel, Challenge, Copied, Credit, Describe, Done, Drained, Entries, Entry, Finished,
    Frame, Grant, Hello, Lookup, Msg, Proof, Ready, Retract, RoomFailed, VERSION,
};
use value::{At, Fields, Value, need, put_field, set};

/// Bytes of the header.
pub const HEADER_BYTES: usize = 32;
/// Most bytes after the header of any frame. A page list of [`MAX_PAGES`] takes a quarter of it.
pub const MAX_FRAME_BYTES: usize = 64 << 20;
/// Most bytes after the header of `Describe`.
pub const MAX_DESCRIBE_BYTES: usize = 16 << 20;
/// Most bytes after the header of everything that may come from a peer that is not authenticated.
pub const MAX_HANDSHAKE_BYTES: usize = 4 << 10;
/// Most bytes of an engine's meta.
pub const MAX_META_BYTES: usize = 64 << 10;
/// Most bytes of a string. The text of a longer reason is cut when it is encoded.
pub const MAX_STRING_BYTES: usize = 2 << 10;
/// Most bytes of a fabric's blob.
pub const MAX_BLOB_BYTES: usize = 8 << 20;
/// Most groups of an agent, and so page lists of a grant.
pub const MAX_GROUPS: usize = crate::layout::MAX_GROUPS;
/// Most regions of an agent.
pub const MAX_REGIONS: usize = 64 << 10;
/// Most fabrics that an agent offers.
pub const MAX_FABRICS: usize = 16;
/// Most ranks in one answer of the directory.
pub const MAX_ENTRIES: usize = 16 << 10;
/// Most pages in one page list.
pub const MAX_PAGES: usize = 4 << 20;

/// Whether the first bytes of a connection are a TLS record; `None` if there are too few to tell. No frame that opens
/// a handshake looks like one: its length would be above [`MAX_HANDSHAKE_BYTES`].
#[must_use]
pub fn looks_like_tls(head: &[u8]) -> Option<bool> {
    // Content type (alert or handshake), and the legacy version of a record.
    let like = [(0x15u8, 0x16u8), (3, 3), (1, 4)];
    if head.iter().zip(like).any(|(byte, (low, high))| !(low..=high).contains(byte)) {
        return Some(false);
    }
    (head.len() >= 3).then_some(true)
}

/// A frame, or one of a kind that only a newer peer knows.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum Decoded {
    /// A frame that this version knows.
    Frame(Frame),
    /// A well-formed frame of a kind that this version does not know. A numbered one still takes its place in the
    /// link: count it as arrived and do nothing else.
    Unknown(Header),
}

/// What a frame's header says.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Header {
    /// Bytes after the header.
    pub len: u32,
    /// Wire version.
    pub version: u8,
    /// Which message.
    pub kind: u8,
    /// The sender's incarnation.
    pub incarnation: Incarnation,
    /// The session.
    pub session: SessionNo,
    /// The link number, or zero.
    pub number: u64,
}

impl Header {
    /// Reads the header at the start of `bytes`; `None` if there are too few. Does not look at `len`.
    pub(crate) fn read(bytes: &[u8]) -> Result<Option<Self>, WireError> {
        let Some((head, _)) = bytes.split_first_chunk::<HEADER_BYTES>() else { return Ok(None) };
        let [l0, l1, l2, l3, version, kind, f0, f1, ids @ ..] = *head;
        let mut words = ids.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word));
        let mut word = || words.next().unwrap_or_default();
        let flags = u16::from_le_bytes([f0, f1]);
        if flags != 0 {
            return Err(WireError::Flags { flags });
        }
        if version != VERSION && !matches!(kind, kind::HELLO | kind::CHALLENGE | kind::REFUSE) {
            return Err(WireError::Version { kind, got: version, want: VERSION });
        }
        Ok(Some(Self {
            len: u32::from_le_bytes([l0, l1, l2, l3]),
            version,
            kind,
            incarnation: Incarnation(word()),
            session: SessionNo(word()),
            number: word(),
        }))
    }
}

/// Numbers of the kinds. Never reused or renumbered; a kind from `GRANT` on is numbered by the link.
pub mod kind {
    #[cfg(doc)]
    use crate::msg::Msg;

    /// [`Msg::Hello`].
    pub const HELLO: u8 = 1;
    /// [`Msg::Challenge`].
    pub const CHALLENGE: u8 = 2;
    /// [`Msg::Proof`].
    pub const PROOF: u8 = 3;
    /// [`Msg::Accept`].
    pub const ACCEPT: u8 = 4;
    /// [`Msg::Describe`].
    pub const DESCRIBE: u8 = 5;
    /// [`Msg::Refuse`].
    pub const REFUSE: u8 = 6;
    /// [`Msg::Attach`].
    pub const ATTACH: u8 = 7;
    /// [`Msg::Attached`].
    pub const ATTACHED: u8 = 8;
    /// [`Msg::Ack`].
    pub const ACK: u8 = 16;
    /// [`Msg::Ping`].
    pub const PING: u8 = 17;
    /// [`Msg::Pong`].
    pub const PONG: u8 = 18;
    /// [`Msg::Bye`].
    pub const BYE: u8 = 19;
    /// [`Msg::Register`].
    pub const REGISTER: u8 = 32;
    /// [`Msg::Lookup`].
    pub const LOOKUP: u8 = 33;
    /// [`Msg::Entries`].
    pub const ENTRIES: u8 = 34;
    /// [`Msg::Grant`].
    pub const GRANT: u8 = 64;
    /// [`Msg::Cancel`].
    pub const CANCEL: u8 = 65;
    /// [`Msg::Drained`].
    pub const DRAINED: u8 = 66;
    /// [`Msg::Ready`].
    pub const READY: u8 = 67;
    /// [`Msg::Retract`].
    pub const RETRACT: u8 = 68;
    /// [`Msg::Copied`].
    pub const COPIED: u8 = 69;
    /// [`Msg::Done`].
    pub const DONE: u8 = 70;
    /// [`Msg::Finished`].
    pub const FINISHED: u8 = 71;
    /// [`Msg::RoomFailed`].
    pub const ROOM_FAILED: u8 = 72;
    /// [`Msg::Credit`].
    pub const CREDIT: u8 = 73;
}

/// The number of a message's kind.
#[must_use]
pub fn kind_of(msg: &Msg) -> u8 {
    match msg {
        Msg::Hello(_) => kind::HELLO,
        Msg::Challenge(_) => kind::CHALLENGE,
        Msg::Proof(_) => kind::PROOF,
        Msg::Accept(_) => kind::ACCEPT,
        Msg::Describe(_) => kind::DESCRIBE,
        Msg::Refuse(_) => kind::REFUSE,
        Msg::Attach(_) => kind::ATTACH,
        Msg::Attached(_) => kind::ATTACHED,
        Msg::Ack(_) => kind::ACK,
        Msg::Ping(_) => kind::PING,
        Msg::Pong(_) => kind::PONG,
        Msg::Bye(_) => kind::BYE,
        Msg::Register(_) => kind::REGISTER,
        Msg::Lookup(_) => kind::LOOKUP,
        Msg::Entries(_) => kind::ENTRIES,
        Msg::Grant(_) => kind::GRANT,
        Msg::Cancel(_) => kind::CANCEL,
        Msg::Drained(_) => kind::DRAINED,
        Msg::Ready(_) => kind::READY,
        Msg::Retract(_) => kind::RETRACT,
        Msg::Copied(_) => kind::COPIED,
        Msg::Done(_) => kind::DONE,
        Msg::Finished(_) => kind::FINISHED,
        Msg::RoomFailed(_) => kind::ROOM_FAILED,
        Msg::Credit(_) => kind::CREDIT,
    }
}

/// Most bytes after the header of a frame of this kind.
#[must_use]
pub const fn cap_of(kind: u8) -> usize {
    match kind {
        kind::HELLO | kind::CHALLENGE | kind::PROOF | kind::ACCEPT | kind::REFUSE => MAX_HANDSHAKE_BYTES,
        kind::DESCRIBE => MAX_DESCRIBE_BYTES,
        _ => MAX_FRAME_BYTES,
    }
}

/// Appends the frame's bytes to `out`, which is as it was if that fails.
///
/// # Errors
/// A list, string, blob or the whole frame is over its limit.
pub fn encode(frame: &Frame, out: &mut Vec<u8>) -> Result<(), WireError> {
    let start = out.len();
    let done = append(frame, out, start);
    if done.is_err() {
        out.truncate(start);
    }
    done
}

fn append(frame: &Frame, out: &mut Vec<u8>, start: usize) -> Result<(), WireError> {
    let kind = kind_of(&frame.msg);
    out.extend_from_slice(&[0, 0, 0, 0, VERSION, kind, 0, 0]);
    for word in [frame.incarnation.0, frame.session.0, frame.number] {
        out.extend_from_slice(&word.to_le_bytes());
    }
    put_msg(&frame.msg, out)?;
    let (len, cap) = (out.len() - start - HEADER_BYTES, cap_of(kind));
    let too_large = WireError::FrameTooLarge { len: len as u64, cap };
    if len > cap {
        return Err(too_large);
    }
    let len = u32::try_from(len).map_err(|_| too_large)?;
    if let Some(slot) = out.get_mut(start..start + 4) {
        slot.copy_from_slice(&len.to_le_bytes());
    }
    Ok(())
}

/// Reads exactly one frame.
///
/// # Errors
/// `bytes` are too few, too many, or not a frame.
pub fn decode_frame(bytes: &[u8]) -> Result<Decoded, WireError> {
    let Some(header) = Header::read(bytes)? else {
        return Err(WireError::Truncated { have: bytes.len(), need: HEADER_BYTES });
    };
    let need = body_len(header, MAX_FRAME_BYTES)?.saturating_add(HEADER_BYTES);
    let body = bytes.get(HEADER_BYTES..need).ok_or(WireError::Truncated { have: bytes.len(), need })?;
    if bytes.len() > need {
        return Err(WireError::TrailingBytes { extra: bytes.len() - need });
    }
    get_msg(header, body)
}

/// The length that a header announces, if it is within `cap` and the kind's own cap.
fn body_len(header: Header, cap: usize) -> Result<usize, WireError> {
    let cap = cap.min(cap_of(header.kind));
    match usize::try_from(header.len) {
        Ok(len) if len <= cap => Ok(len),
        _ => Err(WireError::FrameTooLarge { len: header.len.into(), cap }),
    }
}

const ACK: At = At { message: "Ack", field: "upto" };
const PING: At = At { message: "Ping", field: "n" };
const PONG: At = At { message: "Pong", field: "n" };
/// Messages that are one struct carry its fields as their own; errors name the struct.
const WHOLE: At = At { message: "frame", field: "body" };

fn put_msg(msg: &Msg, out: &mut Vec<u8>) -> Result<(), WireError> {
    match msg {
        Msg::Hello(m) => m.put(out, WHOLE),
        Msg::Challenge(m) => m.put(out, WHOLE),
        Msg::Proof(m) | Msg::Accept(m) => m.put(out, WHOLE),
        Msg::Describe(m) => m.put(out, WHOLE),
        Msg::Refuse(m) | Msg::Bye(m) => m.put(out, WHOLE),
        Msg::Attach(m) => m.put(out, WHOLE),
        Msg::Attached(m) => m.put(out, WHOLE),
        Msg::Ack(n) => put_field(out, ACK, 1, |out| n.put(out, ACK)),
        Msg::Ping(n) => put_field(out, PING, 1, |out| n.put(out, PING)),
        Msg::Pong(n) => put_field(out, PONG, 1, |out| n.put(out, PONG)),
        Msg::Register(m) => m.put(out, WHOLE),
        Msg::Lookup(m) => m.put(out, WHOLE),
        Msg::Entries(m) => m.put(out, WHOLE),
        Msg::Grant(m) => m.put(out, WHOLE),
        Msg::Cancel(m) => m.put(out, WHOLE),
        Msg::Drained(m) => m.put(out, WHOLE),
        Msg::Ready(m) => m.put(out, WHOLE),
        Msg::Retract(m) => m.put(out, WHOLE),
        Msg::Copied(m) => m.put(out, WHOLE),
        Msg::Done(m) => m.put(out, WHOLE),
        Msg::Finished(m) => m.put(out, WHOLE),
        Msg::RoomFailed(m) => m.put(out, WHOLE),
        Msg::Credit(m) => m.put(out, WHOLE),
    }
}

fn one_number(bytes: &[u8], at: At) -> Result<u64, WireError> {
    let mut n = None;
    let mut fields = Fields::new(at.message, bytes);
    while let Some((tag, value)) = fields.step()? {
        if tag == 1 {
            set(&mut n, value, at)?;
        }
    }
    need(n, at)
}

fn get_msg(header: Header, body: &[u8]) -> Result<Decoded, WireError> {
    let msg = match header.kind {
        kind::HELLO => Msg::Hello(Hello::get(body, WHOLE)?),
        kind::CHALLENGE => Msg::Challenge(Challenge::get(body, WHOLE)?),
        kind::PROOF => Msg::Proof(Proof::get(body, WHOLE)?),
        kind::ACCEPT => Msg::Accept(Proof::get(body, WHOLE)?),
        kind::DESCRIBE => Msg::Describe(Box::new(Describe::get(body, WHOLE)?)),
        kind::REFUSE => Msg::Refuse(Reason::get(body, WHOLE)?),
        kind::ATTACH => Msg::Attach(Attach::get(body, WHOLE)?),
        kind::ATTACHED => Msg::Attached(Attached::get(body, WHOLE)?),
        kind::ACK => Msg::Ack(one_number(body, ACK)?),
        kind::PING => Msg::Ping(one_number(body, PING)?),
        kind::PONG => Msg::Pong(one_number(body, PONG)?),
        kind::BYE => Msg::Bye(Reason::get(body, WHOLE)?),
        kind::REGISTER => Msg::Register(Entry::get(body, WHOLE)?),
        kind::LOOKUP => Msg::Lookup(Lookup::get(body, WHOLE)?),
        kind::ENTRIES => Msg::Entries(Entries::get(body, WHOLE)?),
        kind::GRANT => Msg::Grant(Grant::get(body, WHOLE)?),
        kind::CANCEL => Msg::Cancel(Cancel::get(body, WHOLE)?),
        kind::DRAINED => Msg::Drained(Drained::get(body, WHOLE)?),
        kind::READY => Msg::Ready(Ready::get(body, WHOLE)?),
        kind::RETRACT => Msg::Retract(Retract::get(body, WHOLE)?),
        kind::COPIED => Msg::Copied(Copied::get(body, WHOLE)?),
        kind::DONE => Msg::Done(Done::get(body, WHOLE)?),
        kind::FINISHED => Msg::Finished(Finished::get(body, WHOLE)?),
        kind::ROOM_FAILED => Msg::RoomFailed(RoomFailed::get(body, WHOLE)?),
        kind::CREDIT => Msg::Credit(Credit::get(body, WHOLE)?),
        _ => return Ok(Decoded::Unknown(header)),
    };
    let Header { incarnation, session, number, .. } = header;
    Ok(Decoded::Frame(Frame { incarnation, session, number, msg }))
}
