//! The control messages. [`crate::wire`] gives their bytes.

use crate::error::Reason;
use crate::ids::{Incarnation, PushId, Room, Seq, SessionNo};
use crate::layout::{PageLayout, Shard};
use std::sync::Arc;

/// The only protocol version so far.
pub const VERSION: u8 = 1;

/// One frame: who sent it in which session, its number if it is to arrive exactly once, and what it says.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Frame {
    /// The sender's incarnation.
    pub incarnation: Incarnation,
    /// The session this frame belongs to; zero during the first two frames of a handshake.
    pub session: SessionNo,
    /// The link number, from 1; zero for frames that the link does not carry (handshake, ping, ack, directory).
    pub number: u64,
    /// What it says.
    pub msg: Msg,
}

/// Everything one agent can say to another.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum Msg {
    // -- handshake, in this order: initiator, acceptor, initiator, acceptor, then Describe both ways.
    /// First frame of an initiator.
    Hello(Hello),
    /// The acceptor's answer.
    Challenge(Challenge),
    /// The initiator proves that it knows the secret.
    Proof(Proof),
    /// The acceptor proves the same.
    Accept(Proof),
    /// What an authenticated peer may know.
    Describe(Box<Describe>),
    /// The peers do not fit; only `RoomFailed` may follow.
    Refuse(Reason),
    /// The initiator (decode) names the fabric of this session.
    Attach(Attach),
    /// The acceptor is attached to that fabric too, or says why not.
    Attached(Attached),

    // -- housekeeping, unnumbered
    /// Everything up to this link number has arrived.
    Ack(u64),
    /// Are you there?
    Ping(u64),
    /// Yes; repeats the ping's number.
    Pong(u64),
    /// The sender closes in an orderly way; no new session will come.
    Bye(Reason),

    // -- directory, unnumbered
    /// Put this rank into the directory until the connection ends.
    Register(Entry),
    /// Which ranks do you know?
    Lookup(Lookup),
    /// These.
    Entries(Entries),

    // -- hand-off, numbered: exactly once, in order
    /// Decode permits a prefill rank to deliver into pages.
    Grant(Grant),
    /// Decode voids every grant of the room up to a sequence number.
    Cancel(Cancel),
    /// Prefill: no write for this room and sequence number, or a lower one, can land any more.
    Drained(Drained),
    /// Prefill (receiver-copies fabrics): these pages are ready to be read.
    Ready(Ready),
    /// Prefill: that push is void, do not use its bytes.
    Retract(Retract),
    /// Decode: I have read that push; does it still stand?
    Copied(Copied),
    /// Prefill: every byte of this push's piece is visible at the destination.
    Done(Done),
    /// Decode: the room ended here, well or not.
    Finished(Finished),
    /// The room failed before there was a grant (peers do not fit, bad pages).
    RoomFailed(RoomFailed),
    /// Decode lends prefill staging slots for a push.
    Credit(Credit),
    /// Prefill: this push comes through staging slots; lend me some.
    Pack(Pack),
    /// Prefill: the next slice of that push lies in this slot.
    Packed(Packed),
}

/// First frame. Says nothing about layout, addresses or keys.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Hello {
    /// Lowest and highest protocol version that the initiator speaks.
    pub versions: (u8, u8),
    /// Feature bits that the initiator has.
    pub features: u64,
    /// Fresh random bytes.
    pub nonce: [u8; 32],
    /// What the connection is for.
    pub purpose: Purpose,
    /// The session number that the initiator gives; rises per pair of incarnations.
    pub session: SessionNo,
}

/// What a connection is for.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Purpose {
    /// Hand-offs: the initiator grants, the acceptor pushes.
    Transfer,
    /// Directory look-ups.
    Lookup,
    /// Directory registration.
    Register,
}

/// The acceptor's answer to [`Hello`].
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Challenge {
    /// The version that both will speak.
    pub version: u8,
    /// Features of the acceptor.
    pub features: u64,
    /// Fresh random bytes.
    pub nonce: [u8; 32],
}

/// An HMAC over the transcript so far and the prover's role.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Proof {
    /// HMAC-SHA256.
    pub mac: [u8; 32],
}

/// Kind of memory. On the wire, so that neither side guesses.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum MemKind {
    /// Host memory.
    Host,
    /// Memory of the device with this ordinal.
    Device(u32),
}

/// One region of the region table: one part of one layer of one group.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct RegionShape {
    /// Group index.
    pub group: u32,
    /// Layer number in the model (not in the rank).
    pub layer: u32,
    /// Part: 0 is K, fused or latent; 1 is V.
    pub part: u32,
    /// Length in bytes.
    pub len: u64,
    /// Host or device.
    pub kind: MemKind,
}

/// A fabric that an agent offers, with what a peer needs to use it.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct FabricOffer {
    /// `shm`, `ucx` or `sim`.
    pub name: String,
    /// The fabric's own encoding of addresses and keys; opaque here.
    pub blob: Vec<u8>,
}

/// Who may start what.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub enum Role {
    /// Expects and pushes.
    #[default]
    Both,
    /// Pushes only.
    Prefill,
    /// Expects only.
    Decode,
}

/// What an authenticated peer may know.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Describe {
    /// The agent's name.
    pub name: String,
    /// The engine it belongs to.
    pub engine: String,
    /// Data-parallel rank.
    pub dp_rank: u32,
    /// Role.
    pub role: Role,
    /// Mode: `push` for all that kvxfer does today.
    pub mode: String,
    /// Layout of each group.
    pub groups: Vec<PageLayout>,
    /// Heads and layers of this rank.
    pub shard: Shard,
    /// Pages in each group.
    pub pages: Vec<u32>,
    /// Model fingerprint, empty if none was given.
    pub model: String,
    /// Every region, in the order in which pieces name them.
    pub regions: Vec<RegionShape>,
    /// Fabrics, best first.
    pub fabrics: Vec<FabricOffer>,
    /// Highest link number received from this peer before this session.
    pub received: u64,
    /// How often this side has started its link with this peer afresh (after a fence).
    pub link_generation: u64,
    /// Bytes of staging slot and number of slots that this side has (zero: none).
    pub staging: (u64, u32),
    /// Names this process to a peer on the same host, which watches for its death; opaque here, empty if unknown.
    pub process: Vec<u8>,
}

/// The initiator's choice of fabric.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Attach {
    /// Name of the fabric.
    pub fabric: String,
    /// How the acceptor reaches the initiator's staging ring on that fabric, if there is one; the fabric's own encoding.
    pub ring: Option<Vec<u8>>,
}

/// The acceptor's answer to [`Attach`].
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Attached {
    /// Why not, if not.
    pub error: Option<Reason>,
    /// Transports in use, for people.
    pub info: String,
}

/// A rank in the directory.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Entry {
    /// The agent's name.
    pub name: String,
    /// The engine it belongs to.
    pub engine: String,
    /// Data-parallel rank.
    pub dp_rank: u32,
    /// Incarnation.
    pub incarnation: Incarnation,
    /// Layout of each group.
    pub groups: Vec<PageLayout>,
    /// Heads and layers.
    pub shard: Shard,
    /// Control address, `host:port`.
    pub address: String,
}

/// A question to the directory.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Lookup {
    /// Only this engine, if not empty.
    pub engine: String,
}

/// The directory's answer.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Entries {
    /// Every rank known now.
    pub entries: Vec<Entry>,
}

/// End-to-end checks of a room.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub enum Verify {
    /// None.
    #[default]
    Off,
    /// Some bytes of each piece.
    Sample,
    /// Every byte.
    Full,
}

/// What one prefill rank owes one decode rank: a box of (layers, tokens); heads follow from the shards.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Owed {
    /// Layers `first..end`, model numbering.
    pub layers: (u32, u32),
    /// Tokens `first..end` of the prompt.
    pub tokens: (u64, u64),
}

/// Decode's permission to deliver.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Grant {
    /// The room.
    pub room: Room,
    /// Sequence number.
    pub seq: Seq,
    /// The whole room's tokens `first..end`, for the check that both sides agree.
    pub tokens: (u64, u64),
    /// What this prefill rank owes; `None` is a null grant.
    pub owed: Option<Owed>,
    /// One page list a group; `pages[g][0]` holds token `tokens.0`.
    pub pages: Vec<Arc<[u32]>>,
    /// Decode ranks that grant for this room in all (null or not).
    pub ranks: u32,
    /// Checksums wanted.
    pub verify: Verify,
    /// Microseconds for which decode will wait, counted from arrival. Saves work; nothing is released by it.
    pub deadline_us: u64,
    /// Staging slots lent with it: none today, since a grant may wait long for its push; [`Credit`] lends them.
    pub credits: u32,
}

/// Decode voids grants.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Cancel {
    /// The room.
    pub room: Room,
    /// Every grant up to this one is void, seen or not.
    pub upto: Seq,
    /// Why.
    pub reason: Reason,
}

/// Nothing of the room lands any more.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Drained {
    /// The room.
    pub room: Room,
    /// Up to this sequence number.
    pub seq: Seq,
    /// Why the room ended at the source; for a cancel, the cancel's own reason.
    pub reason: Reason,
}

/// A push's pages can be read.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Ready {
    /// The room.
    pub room: Room,
    /// The grant it answers.
    pub seq: Seq,
    /// The push, in the source's numbering.
    pub push: PushId,
    /// Layers and tokens of this piece.
    pub span: Owed,
    /// First token of the page lists.
    pub pages_start: u64,
    /// One source page list a group.
    pub pages: Vec<Arc<[u32]>>,
    /// The end of the tokens that the push names: where a group holds only the last tokens, its list begins so many
    /// before it. Only there is it needed.
    pub pages_end: Option<u64>,
}

/// A push is void.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Retract {
    /// The room.
    pub room: Room,
    /// The grant.
    pub seq: Seq,
    /// The push.
    pub push: PushId,
}

/// A push's pages were read.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Copied {
    /// The room.
    pub room: Room,
    /// The grant.
    pub seq: Seq,
    /// The push.
    pub push: PushId,
    /// Why the copy failed, if it did.
    pub error: Option<Reason>,
}

/// A push's piece has been delivered, and is visible.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Done {
    /// The room.
    pub room: Room,
    /// The grant.
    pub seq: Seq,
    /// The push.
    pub push: PushId,
    /// Layers and tokens covered; may be empty.
    pub span: Owed,
    /// Whether nothing more comes from this rank.
    pub last: bool,
    /// End of the tokens that prefill pushed in this room, set with `last`.
    pub end_token: u64,
    /// The engine's bytes, up to 64 KiB, set with `last`.
    pub meta: Option<Arc<[u8]>>,
    /// Checksum of the destination bytes, if verify asks for one.
    pub checksum: Option<u64>,
    /// Bytes and writes, for statistics.
    pub bytes: u64,
    /// Writes made.
    pub writes: u64,
}

/// The room ended at decode.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Finished {
    /// The room.
    pub room: Room,
    /// The grant.
    pub seq: Seq,
    /// `None` is success.
    pub error: Option<Reason>,
}

/// The room failed before a grant could be made.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct RoomFailed {
    /// The room.
    pub room: Room,
    /// Why.
    pub reason: Reason,
}

/// Staging slots.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Credit {
    /// The room.
    pub room: Room,
    /// The grant the slots belong to.
    pub seq: Seq,
    /// First slot and how many.
    pub slots: (u32, u32),
    /// The push that asked for them. With slots `(0, 0)`: there are none to be had, it is to go unpacked.
    pub push: PushId,
}

/// A push comes packed, through the staging slots of the receiver. Both sides make the same plan of what this says, and
/// cut it into the same slices, so that a slice needs no more words than its slot.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Pack {
    /// The room.
    pub room: Room,
    /// The grant it answers.
    pub seq: Seq,
    /// The push, in the source's numbering.
    pub push: PushId,
    /// Layers and tokens of this piece.
    pub span: Owed,
    /// First token of the page lists.
    pub pages_start: u64,
    /// One source page list a group.
    pub pages: Vec<Arc<[u32]>>,
    /// As in [`Ready::pages_end`].
    pub pages_end: Option<u64>,
    /// Bytes of all its slices.
    pub bytes: u64,
    /// Most bytes of a slice.
    pub slice_bytes: u64,
    /// Slots that it can use.
    pub slots: u32,
}

/// A slot is the receiver's again: the push's next slice lies in it, or it was not used.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Packed {
    /// The room.
    pub room: Room,
    /// The grant.
    pub seq: Seq,
    /// The push.
    pub push: PushId,
    /// Which slot.
    pub slot: u32,
    /// Bytes of the slice, or zero if the slot was not used.
    pub bytes: u64,
    /// Which slice: they come in order, from zero. Of no meaning if the slot was not used.
    pub slice: u64,
}

impl Msg {
    /// The grant that this names, or up to which it voids them.
    pub fn seq_mut(&mut self) -> Option<&mut Seq> {
        match self {
            Self::Grant(m) => Some(&mut m.seq),
            Self::Cancel(m) => Some(&mut m.upto),
            Self::Drained(m) => Some(&mut m.seq),
            Self::Ready(m) => Some(&mut m.seq),
            Self::Retract(m) => Some(&mut m.seq),
            Self::Copied(m) => Some(&mut m.seq),
            Self::Done(m) => Some(&mut m.seq),
            Self::Finished(m) => Some(&mut m.seq),
            Self::Credit(m) => Some(&mut m.seq),
            Self::Pack(m) => Some(&mut m.seq),
            Self::Packed(m) => Some(&mut m.seq),
            _ => None,
        }
    }

    /// The grant that this names, or up to which it voids them.
    #[must_use]
    pub fn seq(&self) -> Option<Seq> {
        Some(match self {
            Self::Grant(m) => m.seq,
            Self::Cancel(m) => m.upto,
            Self::Drained(m) => m.seq,
            Self::Ready(m) => m.seq,
            Self::Retract(m) => m.seq,
            Self::Copied(m) => m.seq,
            Self::Done(m) => m.seq,
            Self::Finished(m) => m.seq,
            Self::Credit(m) => m.seq,
            Self::Pack(m) => m.seq,
            Self::Packed(m) => m.seq,
            _ => return None,
        })
    }

    /// The message's name, for errors and logs.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Hello(_) => "Hello",
            Self::Challenge(_) => "Challenge",
            Self::Proof(_) => "Proof",
            Self::Accept(_) => "Accept",
            Self::Describe(_) => "Describe",
            Self::Refuse(_) => "Refuse",
            Self::Attach(_) => "Attach",
            Self::Attached(_) => "Attached",
            Self::Ack(_) => "Ack",
            Self::Ping(_) => "Ping",
            Self::Pong(_) => "Pong",
            Self::Bye(_) => "Bye",
            Self::Register(_) => "Register",
            Self::Lookup(_) => "Lookup",
            Self::Entries(_) => "Entries",
            Self::Grant(_) => "Grant",
            Self::Cancel(_) => "Cancel",
            Self::Drained(_) => "Drained",
            Self::Ready(_) => "Ready",
            Self::Retract(_) => "Retract",
            Self::Copied(_) => "Copied",
            Self::Done(_) => "Done",
            Self::Finished(_) => "Finished",
            Self::RoomFailed(_) => "RoomFailed",
            Self::Credit(_) => "Credit",
            Self::Pack(_) => "Pack",
            Self::Packed(_) => "Packed",
        }
    }
}
