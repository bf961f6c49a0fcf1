//! Why a room, a session or a call failed. One kind here is one Python exception.

use std::fmt;
use std::hash::{Hash, Hasher};

/// The kinds of failure. The numbers are on the wire: never renumber, only add.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[repr(u8)]
pub enum ReasonKind {
    /// Something broke that no other kind names.
    Internal = 0,
    /// The two sides' layouts, shards, roles, modes, models or versions clash.
    LayoutMismatch = 1,
    /// A peer is gone: fenced, dead, restarted or unreachable.
    PeerLost = 2,
    /// A stage took longer than its timeout.
    TransferTimeout = 3,
    /// Somebody cancelled the room.
    Cancelled = 4,
    /// A message named a sequence number that a cancel has voided.
    StaleGrant = 5,
    /// The secret is wrong or missing.
    AuthError = 6,
    /// Page ids out of range, repeated, or overlapping live grants.
    PageError = 7,
    /// The room is in use already.
    RoomInUse = 8,
    /// The sides disagree on the tokens, or the last push left a gap.
    TokensMismatch = 9,
    /// The fabric could not carry the bytes.
    FabricError = 10,
    /// The checksum of the bytes that arrived differs.
    ChecksumMismatch = 11,
    /// The peer speaks no version that we speak.
    VersionMismatch = 12,
    /// The peer broke the protocol, or is not kvxfer.
    ProtocolError = 13,
    /// The agent was closed.
    Closed = 14,
    /// The agent holds more quarantined pages than its limit and takes no new rooms.
    Unhealthy = 15,
}

impl ReasonKind {
    /// The kind with this number on the wire; unknown numbers (a newer peer's) are `Internal`.
    #[must_use]
    pub const fn from_wire(n: u8) -> Self {
        match n {
            1 => Self::LayoutMismatch,
            2 => Self::PeerLost,
            3 => Self::TransferTimeout,
            4 => Self::Cancelled,
            5 => Self::StaleGrant,
            6 => Self::AuthError,
            7 => Self::PageError,
            8 => Self::RoomInUse,
            9 => Self::TokensMismatch,
            10 => Self::FabricError,
            11 => Self::ChecksumMismatch,
            12 => Self::VersionMismatch,
            13 => Self::ProtocolError,
            14 => Self::Closed,
            15 => Self::Unhealthy,
            _ => Self::Internal,
        }
    }
}

/// A failure with words for a person: the values that clash and what to do.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Reason {
    /// What kind.
    pub kind: ReasonKind,
    /// The values that clash, and what to do.
    pub text: String,
}

impl Reason {
    /// A reason of this kind with this text.
    pub fn new(kind: ReasonKind, text: impl Into<String>) -> Self {
        Self { kind, text: text.into() }
    }
}

/// A reason is for people: no machine here decides by one that it keeps. So machines that differ in nothing but the
/// words of a reason hash alike, and a model checker takes them for one state.
impl Hash for Reason {
    fn hash<H: Hasher>(&self, _: &mut H) {}
}

impl fmt::Display for Reason {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl std::error::Error for Reason {}
