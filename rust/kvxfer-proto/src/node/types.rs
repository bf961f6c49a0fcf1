//! What goes into a [`Node`](super::Node) and what comes out.

use crate::error::Reason;
use crate::ids::{Incarnation, PushId, Room, SessionNo, Time};
use crate::layout::Side;
use crate::msg::{Msg, Verify};
use crate::plan::{Extent, Request};
use std::sync::Arc;
use std::time::Duration;

/// Settings of a node. Times are relative.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Config {
    /// A ping goes out this often on each session.
    pub heartbeat: Duration,
    /// A session that was silent for this long is suspect: it is dropped and made anew.
    pub suspect_after: Duration,
    /// A peer with which no session could be had for this long is fenced.
    pub fence_after: Duration,
    /// A peer that leaves the cancel of a room unanswered for this long is fenced, however alive its session.
    pub drain_timeout: Duration,
    /// A peer with which there was no session and no room for this long is forgotten.
    pub forget_after: Duration,
    /// Default for a room's time until its peers are in contact.
    pub bootstrap_timeout: Duration,
    /// Default for a room's time without progress after that.
    pub waiting_timeout: Duration,
    /// Pages in quarantine past which no new room is taken.
    pub quarantine_limit: u64,
    /// Rooms that may wait here, granted and not yet pushed, in all.
    pub early_grants: usize,
    /// Of those, granted by one peer.
    pub early_grants_per_peer: usize,
    /// Pages in their lists, of one peer.
    pub early_pages_per_peer: u64,
    /// Ended rooms that are remembered because a grant or a push for them may still come.
    pub tombstones: usize,
    /// Of those, at one peer's word; past it the peer's own oldest is forgotten.
    pub tombstones_per_peer: usize,
    /// Ended rooms that are remembered although everybody knows of their end.
    pub settled_tombstones: usize,
    /// Peers that may be known; past it one that is idle is forgotten, or the new one refused.
    pub peers: usize,
    /// A rule to break on purpose. Never set it where bytes matter.
    pub flaw: Option<Flaw>,
}

impl Default for Config {
    fn default() -> Self {
        Self {
            heartbeat: Duration::from_secs(1),
            suspect_after: Duration::from_secs(5),
            fence_after: Duration::from_secs(10),
            drain_timeout: Duration::from_secs(30),
            forget_after: Duration::from_secs(3600),
            bootstrap_timeout: Duration::from_secs(300),
            waiting_timeout: Duration::from_secs(300),
            quarantine_limit: u64::MAX,
            early_grants: 65_536,
            early_grants_per_peer: 16_384,
            early_pages_per_peer: 16 << 20,
            tombstones: 65_536,
            tombstones_per_peer: 16_384,
            settled_tombstones: 1024,
            peers: 16_384,
            flaw: None,
        }
    }
}

/// A rule of the safety contract, broken on purpose: a check that does not catch it proves nothing.
///
/// It exists for the model checker, the simulator and `kvxfer stress --break`.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Flaw {
    /// A room that fails, by a timeout or otherwise, gives its pages back without waiting for an answer.
    ReleaseOnTimeout,
    /// The end of a connection gives back the pages that its peer was granted.
    ReleaseAtEof,
    /// The sender says that a piece is delivered when it has posted it.
    SuccessBeforeFlush,
    /// The sender answers a cancel while its writes are still in flight.
    DrainedWhileWriting,
    /// A cancelled room is not remembered: a grant or push that comes later is taken for a new one.
    NoTombstone,
    /// Frames of an older session count.
    NoSessionCheck,
    /// A staging slot is given to another when its room fails, without waiting for an answer.
    StagingSlotFreedEarly,
    /// A room that fails does not wait until its packed pieces are taken out of their slots, and does not stop that.
    UnpackAfterRelease,
    /// Staging slots that were lent in an older session, or for another grant, count for what is packed now.
    OldCreditsCount,
    /// A byte of what was received is changed before it is summed, as a broken memory or network would. The node knows
    /// nothing of it: the driver does it.
    FlipAByte,
    /// A grant that comes after the push of its room does not begin its delivery.
    GrantWakesNobody,
}

impl Flaw {
    /// Every flaw, in the order of [`Flaw::name`]'s documentation.
    pub const ALL: [Self; 11] = [
        Self::ReleaseOnTimeout,
        Self::ReleaseAtEof,
        Self::SuccessBeforeFlush,
        Self::DrainedWhileWriting,
        Self::NoTombstone,
        Self::NoSessionCheck,
        Self::StagingSlotFreedEarly,
        Self::UnpackAfterRelease,
        Self::OldCreditsCount,
        Self::FlipAByte,
        Self::GrantWakesNobody,
    ];

    /// `release-on-timeout`, `release-at-eof`, `success-before-flush`, `drained-while-writing`, `no-tombstone`,
    /// `no-session-check`, `staging-slot-freed-early`, `unpack-after-release`, `old-credits-count`, `flip-a-byte`,
    /// `grant-wakes-nobody`.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::ReleaseOnTimeout => "release-on-timeout",
            Self::ReleaseAtEof => "release-at-eof",
            Self::SuccessBeforeFlush => "success-before-flush",
            Self::DrainedWhileWriting => "drained-while-writing",
            Self::NoTombstone => "no-tombstone",
            Self::NoSessionCheck => "no-session-check",
            Self::StagingSlotFreedEarly => "staging-slot-freed-early",
            Self::UnpackAfterRelease => "unpack-after-release",
            Self::OldCreditsCount => "old-credits-count",
            Self::FlipAByte => "flip-a-byte",
            Self::GrantWakesNobody => "grant-wakes-nobody",
        }
    }

    /// The flaw of this name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|f| f.name() == name)
    }
}

/// Which way a session grants. Two agents that serve each other have one of each.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Direction {
    /// We grant (decode) and opened the connection.
    WeGrant,
    /// They grant; we push (prefill).
    TheyGrant,
}

/// Names a peer: its incarnation, and which way the grants go.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct PeerKey {
    /// The peer's incarnation.
    pub incarnation: Incarnation,
    /// Which way.
    pub direction: Direction,
}

/// Where decode expects a room from: an address whose directory knows the prefill ranks.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Source {
    /// `host:port` of the directory.
    pub address: Arc<str>,
    /// Data-parallel rank.
    pub dp_rank: u32,
}

/// One prefill rank of a resolved source.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct RankInfo {
    /// Its incarnation.
    pub incarnation: Incarnation,
    /// Its geometry.
    pub side: Side,
}

/// A session that has passed its handshake.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct SessionUp {
    /// The peer.
    pub peer: PeerKey,
    /// Session number.
    pub session: SessionNo,
    /// `received` of the peer's `Describe`.
    pub received: u64,
    /// `link_generation` of the peer's `Describe`.
    pub generation: u64,
    /// `link_generation` of our own `Describe` in this handshake; the session is void if a fence changed it since.
    pub own_generation: u64,
    /// The peer's geometry.
    pub side: Side,
    /// The peer's page counts.
    pub pages: Vec<u32>,
    /// The peer's name, for messages.
    pub name: String,
}

/// Decode's order to have a room delivered.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Expect {
    /// The room.
    pub room: Room,
    /// One page list a group.
    pub pages: Vec<Arc<[u32]>>,
    /// The first id that is negative or past 32 bits, and its group; the lists have [`u32::MAX`] in its place, which
    /// is no page. An id past 64 bits is given as the nearest `i64`.
    pub odd_page: Option<(usize, i64)>,
    /// Tokens `first..end`.
    pub tokens: (u64, u64),
    /// From where.
    pub source: Source,
    /// Checksums.
    pub verify: Verify,
    /// Until the peers are in contact.
    pub bootstrap_timeout: Option<Duration>,
    /// Without progress after that.
    pub waiting_timeout: Option<Duration>,
}

/// Prefill's order to deliver pages.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Push {
    /// The room.
    pub room: Room,
    /// Number of the push on this agent.
    pub id: PushId,
    /// One page list a group; `pages[g][0]` holds token `tokens.0`.
    pub pages: Vec<Arc<[u32]>>,
    /// The first id that is negative or past 32 bits, and its group; the lists have [`u32::MAX`] in its place, which
    /// is no page. An id past 64 bits is given as the nearest `i64`.
    pub odd_page: Option<(usize, i64)>,
    /// Tokens `first..end`.
    pub tokens: (u64, u64),
    /// Layers `first..end` in the model's numbering; all of the rank's if `None`.
    pub layers: Option<(u32, u32)>,
    /// Whether nothing more comes for this room from this rank.
    pub last: bool,
    /// For decode, with `last`.
    pub meta: Option<Arc<[u8]>>,
    /// Whether the pages may be read now; if not, [`Node::handle_push_ready`](super::Node::handle_push_ready) says when.
    pub ready: bool,
    /// Until decode is in contact.
    pub bootstrap_timeout: Option<Duration>,
    /// Without progress after that.
    pub waiting_timeout: Option<Duration>,
}

/// Names a delivery: one push's piece for one destination.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub struct DeliveryId(pub u64);

/// Bytes to move, in the driver's hands until it reports a [`DeliveryEnd`].
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Delivery {
    /// Its number.
    pub id: DeliveryId,
    /// With whom.
    pub peer: PeerKey,
    /// For which room.
    pub room: Room,
    /// Which push (the source's numbering).
    pub push: PushId,
    /// Pages, tokens and layers.
    pub request: Request,
}

/// A push that comes packed, in the driver's hands until it reports a [`DeliveryEnd`]: it makes the same plan as the
/// sender, and unpacks each slice that [`Action::Landed`] names.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Unpacking {
    /// What it would be if it were copied.
    pub delivery: Delivery,
    /// Bytes of all slices, as the sender says.
    pub bytes: u64,
    /// Most bytes of a slice.
    pub slice_bytes: u64,
}

/// Bytes to sum, in the driver's hands until it reports a [`DeliveryEnd`]: our own, of one piece that was moved.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Summing {
    /// Its number; deliveries and sums share their numbers.
    pub id: DeliveryId,
    /// With whom the piece was moved: the plan is that of our shard and this peer's.
    pub peer: PeerKey,
    /// For which room.
    pub room: Room,
    /// Which push (the source's numbering).
    pub push: PushId,
    /// Which of our rows; for [`Digest`](crate::plan::Digest).
    pub extent: Extent,
}

/// How a delivery or a sum ended. In each case none of its writes is in flight any more, and nothing reads for it.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum DeliveryEnd {
    /// Every byte is visible at the destination.
    Complete {
        /// Bytes moved.
        bytes: u64,
        /// Writes made.
        writes: u64,
    },
    /// Every row is summed (only of a [`Summing`]).
    Summed(u64),
    /// It was stopped by [`Action::Abort`] or by the loss of its endpoint.
    Aborted,
    /// It could not be carried out.
    Failed(Reason),
}

/// Where a room stands, in the words that users of SGLang know.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[repr(u8)]
pub enum Stage {
    /// The peers are not yet in contact.
    Bootstrapping = 0,
    /// In contact; no byte has moved.
    Waiting = 1,
    /// Bytes move.
    Transferring = 2,
    /// Every byte is there.
    Success = 3,
    /// It ended otherwise.
    Failed = 4,
}

/// What a room cost, by stage.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct RoomStats {
    /// From the order until the peers were in contact, microseconds.
    pub bootstrap_us: u64,
    /// From contact until the first byte was ready to move, microseconds.
    pub waiting_us: u64,
    /// From then until the end, microseconds.
    pub transfer_us: u64,
    /// Bytes that this side saw delivered.
    pub bytes: u64,
    /// Writes (or copies) they took.
    pub writes: u64,
}

/// Something for the caller's completion queue.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Event {
    /// The room.
    pub room: Room,
    /// What happened.
    pub kind: EventKind,
    /// Whether pages may be reused from now on: the room's, or for a retracted push that push's.
    pub released: bool,
    /// The metadata that came with `Success`.
    pub meta: Option<Arc<[u8]>>,
    /// What it cost.
    pub stats: RoomStats,
}

/// What happened to a room.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum EventKind {
    /// The room ended well.
    Success,
    /// The room failed.
    Failed(Reason),
    /// A failed room's pages became free.
    Released,
    /// A retracted push's pages became free.
    Retracted(PushId),
}

/// What a node wants done.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub enum Action {
    /// Ask the source's directory; answer with `handle_resolved`.
    Resolve(Source),
    /// Have a session with this peer (of a resolved source); answer with `handle_session_up`, `handle_refused` or
    /// `handle_replaced`. Keep trying until then.
    Connect(PeerKey),
    /// Send this frame on that session.
    Send {
        /// To whom.
        peer: PeerKey,
        /// On which session; dropped if it is no longer the present one.
        session: SessionNo,
        /// Link number, zero for unnumbered.
        number: u64,
        /// What.
        msg: Msg,
    },
    /// Close this session's connection.
    DropSession {
        /// Whose.
        peer: PeerKey,
        /// Which.
        session: SessionNo,
        /// Why; told to the peer if it can be.
        reason: Reason,
    },
    /// Move these bytes.
    Deliver(Delivery),
    /// A delivery that goes packed ([`Node::handle_pack`](super::Node::handle_pack)) may write one slice to this slot of
    /// the peer's ring; answer with `handle_packed` once that is flushed.
    Lent {
        /// Which delivery.
        id: DeliveryId,
        /// Slot of the peer's ring.
        slot: u32,
    },
    /// Such a delivery gets no slots: it goes as any other. Nothing of it was written.
    Direct(DeliveryId),
    /// A push comes packed.
    Unpack(Unpacking),
    /// The next slice of such a push lies in this slot of ours; answer with `handle_unpacked` once it is read.
    Landed {
        /// Which push.
        id: DeliveryId,
        /// Slot of our ring.
        slot: u32,
        /// Bytes.
        bytes: u64,
    },
    /// Sum these bytes of ours; answer with `handle_delivery`.
    Sum(Summing),
    /// Post nothing more of this delivery, and report its end once nothing is in flight. Of a sum: read nothing more.
    Abort(DeliveryId),
    /// Make sure that nothing from this peer lands any more; answer with `handle_fenced`.
    Fence(PeerKey),
    /// Nothing more will be wanted of this peer: drop what is kept for it.
    Forget(PeerKey),
    /// A room's stage changed.
    Stage(Room, Stage),
    /// Tell the caller.
    Event(Event),
    /// On a refused connection: tell the peer that these rooms failed.
    TellRefused {
        /// Whom.
        peer: PeerKey,
        /// Which rooms, and why.
        rooms: Vec<(Room, Reason)>,
    },
}

/// What was counted since the start.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Counters {
    /// Rooms that ended well.
    pub succeeded: u64,
    /// Rooms that failed for any reason.
    pub failed: u64,
    /// Of those, cancelled.
    pub cancelled: u64,
    /// Of those, timed out.
    pub timed_out: u64,
    /// Messages that named a voided or unknown grant or session.
    pub stale_refused: u64,
    /// Messages that broke the protocol.
    pub protocol_errors: u64,
    /// Grants and sessions that were refused because a limit was reached.
    pub limited: u64,
    /// Fences begun.
    pub fences: u64,
    /// Sessions that came up.
    pub sessions: u64,
}

/// Gauges of a node.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub struct Gauges {
    /// Rooms that this node expects.
    pub inbound: u64,
    /// Rooms that this node pushes or that were granted to it.
    pub outbound: u64,
    /// Pages that are granted now.
    pub granted_pages: u64,
    /// Of those, pages of ended rooms: in quarantine.
    pub quarantined_pages: u64,
    /// Peers known.
    pub peers: u64,
    /// Remembered ended rooms.
    pub tombstones: u64,
    /// Deliveries in the driver's hands.
    pub deliveries: u64,
    /// Pending timers.
    pub timers: u64,
    /// Control messages that wait to be sent or acknowledged.
    pub unacknowledged: u64,
    /// Slots of our staging ring that are not free.
    pub staging_slots: u64,
    /// Of those, slots of ended rooms that a peer may still write: in quarantine.
    pub quarantined_slots: u64,
}

/// A room whose pages are still not free when the node is asked.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Unreleased {
    /// The room.
    pub room: Room,
    /// Its pages, a list a group.
    pub pages: Vec<Arc<[u32]>>,
    /// The peers that have not answered.
    pub peers: Vec<PeerKey>,
    /// Their names, or incarnations of those that never said one.
    pub names: Vec<String>,
}

/// When the timers of a room run out.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(super) struct Patience {
    pub(super) bootstrap: Duration,
    pub(super) waiting: Duration,
    /// The next deadline.
    pub(super) at: Time,
}

/// Who moves the bytes with a peer.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Mover {
    /// Prefill writes into decode's pages.
    Sender,
    /// Decode copies out of prefill's pages.
    Receiver,
}
