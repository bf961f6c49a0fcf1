//! The state of the small world: processes, connections, writes in flight.

use super::fp::Fp;
use kvxfer_proto::msg::{Frame, Verify};
use kvxfer_proto::node::{
    Config, DeliveryId, Direction, Expect, Flaw, Mover, Node, PeerKey, Push, RankInfo, Source,
};
use kvxfer_proto::{
    DType, Incarnation, Kind, LayoutError, Order, PageLayout, PushId, Reason, ReasonKind, Room, SessionNo,
    Shard, Side, Time,
};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

/// The addresses: two sources and the destination.
pub const S0: usize = 0;
/// The second source.
pub const S1: usize = 1;
/// The destination.
pub const D: usize = 2;

/// The first room and the second, which gets the same page once the first has let go of it.
pub(crate) const ROOMS: usize = 2;

/// The one time that there is: later than any timeout.
pub(crate) const NOW: Time = Time(1 << 60);

/// Who moves the bytes, and what a fence is worth.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Family {
    /// Sources write; when the destination has closed its endpoint, nothing that came over it lands any more. Peers are
    /// on other hosts: no death is seen.
    WritesFenced,
    /// Sources write, and closing an endpoint stops nothing. Peers are on this host: a death is seen some time later.
    WritesUnfenced,
    /// The destination copies. Peers are on this host.
    Copies,
    /// As [`Family::WritesFenced`], but pushes go packed: into slots that the destination lends, and it unpacks them.
    PackedFenced,
    /// As [`Family::WritesUnfenced`], and packed.
    PackedUnfenced,
}

impl Family {
    /// All of them.
    pub const ALL: [Self; 5] =
        [Self::WritesFenced, Self::WritesUnfenced, Self::Copies, Self::PackedFenced, Self::PackedUnfenced];

    /// A word for tables and command lines.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::WritesFenced => "writes-fenced",
            Self::WritesUnfenced => "writes-unfenced",
            Self::Copies => "copies",
            Self::PackedFenced => "packed-fenced",
            Self::PackedUnfenced => "packed-unfenced",
        }
    }

    /// The family of this name.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|f| f.name() == name)
    }

    pub(crate) const fn mover(self) -> Mover {
        match self {
            Self::Copies => Mover::Receiver,
            _ => Mover::Sender,
        }
    }

    pub(crate) const fn sees_deaths(self) -> bool {
        !self.is_fenced()
    }

    /// Sources write, and closing an endpoint stops what was posted to it.
    pub(crate) const fn is_fenced(self) -> bool {
        matches!(self, Self::WritesFenced | Self::PackedFenced)
    }

    /// Sources write, and closing an endpoint stops nothing.
    pub(crate) const fn is_unfenced(self) -> bool {
        matches!(self, Self::WritesUnfenced | Self::PackedUnfenced)
    }

    /// Pushes go through slots.
    pub(crate) const fn is_packed(self) -> bool {
        matches!(self, Self::PackedFenced | Self::PackedUnfenced)
    }
}

/// The kinds of fault. Delayed data needs none: a write in flight may land as late as its fabric allows, always.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
#[repr(u8)]
pub enum FaultKind {
    /// The caller of either side gives a room up.
    Cancel,
    /// A timer of any process runs out at any moment: a room's, a drain's, a peer's.
    Timeout,
    /// A process is killed, and another starts at its address.
    Restart,
    /// A connection is cut.
    LostSession,
    /// A process is stopped; it may be continued later, or never.
    Stop,
}

impl FaultKind {
    /// All of them.
    pub const ALL: [Self; 5] = [Self::Cancel, Self::Timeout, Self::Restart, Self::LostSession, Self::Stop];

    /// A word for tables and command lines.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Cancel => "cancel",
            Self::Timeout => "timeout",
            Self::Restart => "restart",
            Self::LostSession => "lost-session",
            Self::Stop => "stop",
        }
    }
}

/// What is left out of a walk, since it leads to nothing new.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub enum Reduction {
    /// Nothing.
    None,
    /// States that have the future of another one (`canon.rs`).
    States,
    /// Orders of steps, too, that lead to the same (`reduce.rs`), and what two sources do that have nothing to do with
    /// each other is not walked together (`apart.rs`).
    Orders,
}

/// Which world is walked.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Setup {
    /// Who moves the bytes.
    pub family: Family,
    /// Faults on one path, at most.
    pub faults: u8,
    /// Which kinds.
    pub kinds: Vec<FaultKind>,
    /// Stops among them, at most.
    pub stops: u8,
    /// Writes of one push to one destination.
    pub pieces: u8,
    /// Sources, one or two.
    pub sources: usize,
    /// Rooms that the destination expects, of the two that each source pushes.
    pub expected: u8,
    /// Staging slots of the destination, where pushes go packed.
    pub slots: u8,
    /// Timers that run out because nothing else can happen do so as by their default lengths: peers' before rooms', the
    /// first room's before the second's. In any other order it is a fault.
    pub in_order: bool,
    /// A rule that the machines break.
    pub flaw: Option<Flaw>,
    /// A source that takes no part: what is left of a world once it has nothing to do with that source any more.
    pub left_out: Option<usize>,
    /// What need not be walked; only [`super::explore`] looks at it.
    pub reduced: Reduction,
    /// Only this property is checked; all if `None`.
    pub only: Option<super::Property>,
}

impl Setup {
    /// The whole world of this family with so many faults.
    #[must_use]
    pub fn new(family: Family, faults: u8) -> Self {
        Self {
            family,
            faults,
            kinds: FaultKind::ALL.to_vec(),
            stops: faults,
            pieces: 1,
            in_order: false,
            left_out: None,
            reduced: Reduction::Orders,
            sources: 2,
            expected: 2,
            slots: 1,
            flaw: None,
            only: None,
        }
    }

    pub(crate) fn checks(&self, property: super::Property) -> bool {
        self.only.is_none_or(|p| p == property)
    }

    /// Whether a flaw makes something of what was said in a session that is over.
    pub(crate) fn trusts_old_sessions(&self) -> bool {
        matches!(self.flaw, Some(Flaw::NoSessionCheck | Flaw::OldCreditsCount))
    }

    /// The addresses that have a process.
    pub(crate) fn addresses(&self) -> impl Iterator<Item = usize> + use<> {
        let (sources, left_out) = (self.sources, self.left_out);
        (0..=D).filter(move |i| *i == D || *i < sources && Some(*i) != left_out)
    }
}

/// What the engine of a process ordered, and was told.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
pub(crate) struct Seen {
    pub(crate) ordered: bool,
    pub(crate) success: u8,
    pub(crate) failed: u8,
    pub(crate) released: u8,
    /// The engine gave it up.
    pub(crate) cancelled: bool,
    /// The process knows that it is over: whatever comes for it has to fail at once.
    pub(crate) void: bool,
}

impl Seen {
    pub(crate) fn is_over(self) -> bool {
        self.success + self.failed > 0
    }
}

/// A delivery in the driver's hands.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Running {
    pub(crate) key: PeerKey,
    pub(crate) room: usize,
    pub(crate) push: PushId,
    /// Pieces that were posted (or copied).
    pub(crate) posted: u8,
    pub(crate) aborted: bool,
    /// It goes, or comes, through slots, a piece in each.
    pub(crate) packed: bool,
    /// Slots that were lent for it and not written yet; at the destination, those that it has not emptied.
    pub(crate) slots: VecDeque<u32>,
    /// Slots that were written, and of which the node does not know that yet.
    pub(crate) written: VecDeque<u32>,
}

/// What lies in a staging slot: a piece of a room of a source, by its address.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Packet {
    pub(crate) room: usize,
    pub(crate) source: usize,
    pub(crate) piece: u8,
}

/// One process.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Proc {
    pub(crate) node: Node,
    pub(crate) life: u8,
    pub(crate) stopped: bool,
    pub(crate) rooms: [Seen; ROOMS],
    /// Rooms that the engine will still push, lowest first.
    pub(crate) to_push: u8,
    /// Rooms that the engine will still expect.
    pub(crate) to_expect: u8,
    /// Peers that the driver dials.
    pub(crate) dialling: BTreeSet<PeerKey>,
    pub(crate) resolving: bool,
    /// Endpoints; the number says which of the destination's endpoints it belongs to.
    pub(crate) eps: BTreeMap<PeerKey, u8>,
    /// Endpoints that are being closed.
    pub(crate) fencing: BTreeMap<PeerKey, u8>,
    /// Peers whose present endpoint is known to be broken.
    pub(crate) broken: BTreeSet<PeerKey>,
    pub(crate) running: BTreeMap<DeliveryId, Running>,
    /// Processes whose death would be seen.
    pub(crate) watched: BTreeSet<Incarnation>,
    /// Deaths that will be seen.
    pub(crate) dying: BTreeSet<Incarnation>,
    /// Deaths that were seen, of processes whose bytes may still be in our kernel.
    pub(crate) settling: BTreeSet<Incarnation>,
    /// It has forgotten a peer that is alive.
    pub(crate) forgot_living: bool,
    /// What is in the page, by source and piece: the room whose bytes they are, or [`EMPTY`] or [`JUNK`].
    pub(crate) cells: [[u8; 2]; 2],
    /// What is in its staging slots.
    pub(crate) ring: Vec<Option<Packet>>,
}

/// No byte was written yet.
pub(crate) const EMPTY: u8 = 0;
/// Bytes of a page that its owner had given to another use.
pub(crate) const JUNK: u8 = 255;
/// Bytes of a slot that are another piece's.
pub(crate) const STRAY: u8 = 254;

/// The bytes of a room.
#[allow(clippy::cast_possible_truncation)] // Two rooms.
pub(crate) fn tag(room: usize) -> u8 {
    room as u8 + 1
}

/// The incarnation of the `life`th process at an address.
pub(crate) fn incarnation(at: usize, life: u8) -> Incarnation {
    Incarnation((at as u64 + 1) * 100 + u64::from(life))
}

/// The address of an incarnation.
#[allow(clippy::cast_possible_truncation)] // Three addresses.
pub(crate) fn address(i: Incarnation) -> usize {
    (i.0 / 100).saturating_sub(1) as usize
}

const NUMBERS: [Room; ROOMS] = [number(1), number(2)];

const fn number(n: u64) -> Room {
    match Room::new(n) {
        Some(room) => room,
        None => panic!("past 63 bits"),
    }
}

pub(crate) fn room(r: usize) -> Room {
    NUMBERS[r.min(ROOMS - 1)]
}

#[allow(clippy::cast_possible_truncation)] // Two rooms.
pub(crate) fn index(room: Room) -> usize {
    room.get().saturating_sub(1) as usize
}

/// Something on a connection.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Item {
    Describe { received: u64, generation: u64 },
    Attach(u8),
    Attached,
    Frame(Arc<Frame>),
}

/// How one end of a connection stands.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum EndState {
    Open,
    /// Closed by its own side; what was read before may still be handled.
    Closing,
    /// Its side has been told that it is over.
    Closed,
}

/// One end of a connection.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(crate) struct End {
    pub(crate) state: EndState,
    pub(crate) inbox: VecDeque<Item>,
    /// The generation that this side described.
    pub(crate) own_generation: u64,
    /// The handshake is over on this side.
    pub(crate) established: bool,
    /// Its side does nothing more until the other side, or its own process, is gone (`reduce.rs`).
    pub(crate) doomed: bool,
}

/// A control connection.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Conn {
    /// The destination's incarnation, and the source's.
    pub(crate) who: [Incarnation; 2],
    pub(crate) session: SessionNo,
    /// Tells attempts with one session number apart: one that comes to nothing uses up no number.
    pub(crate) serial: u8,
    pub(crate) cut: bool,
    /// The destination's end, and the source's.
    pub(crate) ends: [End; 2],
}

impl Conn {
    /// Whether both sides can still talk.
    pub(crate) fn is_whole(&self) -> bool {
        !self.cut && self.ends.iter().all(|e| e.state == EndState::Open)
    }

    /// How the side at `end` names the other.
    pub(crate) fn key(&self, end: usize) -> PeerKey {
        if end == 0 {
            PeerKey { incarnation: self.who[1], direction: Direction::WeGrant }
        } else {
            PeerKey { incarnation: self.who[0], direction: Direction::TheyGrant }
        }
    }
}

/// A posted write.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct Write {
    pub(crate) from: Incarnation,
    pub(crate) to: Incarnation,
    pub(crate) id: DeliveryId,
    pub(crate) room: usize,
    pub(crate) push: PushId,
    pub(crate) piece: u8,
    /// The slot that it goes to; else it goes to the page.
    pub(crate) slot: Option<u32>,
    /// The destination's endpoint that it goes to.
    pub(crate) ep: u8,
    /// Its endpoint is closed or its process is gone: the bytes are on the wire, and nobody waits for them.
    pub(crate) loose: bool,
}

/// One state of the world.
#[derive(Clone, Debug)]
pub struct World {
    pub(crate) setup: Arc<Setup>,
    pub(crate) procs: [Arc<Proc>; 3],
    pub(crate) prints: [u128; 3],
    pub(crate) conns: Vec<Arc<Conn>>,
    pub(crate) writes: Vec<Write>,
    pub(crate) faults_left: u8,
    /// Of these, stops.
    pub(crate) stops_left: u8,
    /// No fault has told the sources apart yet.
    pub(crate) alike: bool,
    /// What must never happen and did.
    pub(crate) violation: Option<super::Violation>,
}

/// Layers are split over the sources, so that each owes a half of every page.
fn side(rank: u32, ranks: usize) -> Side {
    let layers = u32::try_from(ranks).unwrap_or(2);
    let layout = PageLayout {
        layers,
        kv_heads: 1,
        head_dim: 1,
        page_tokens: 1,
        dtype: DType::Uint8,
        order: Order::Hnd,
        kind: Kind::Latent,
        ..PageLayout::PLAIN
    };
    let pp_size = if rank == u32::MAX { 1 } else { layers };
    let pp_rank = if rank == u32::MAX { 0 } else { rank };
    Side { groups: vec![layout], shard: Shard { tp_rank: 0, tp_size: 1, pp_rank, pp_size } }
}

pub(crate) fn side_of(at: usize, setup: &Setup) -> Side {
    let rank = if at == D { u32::MAX } else { u32::try_from(at).unwrap_or(0) };
    side(rank, setup.sources)
}

/// Pages of the process at an address: a source has one a room, the destination has one.
pub(crate) fn pages_of(at: usize) -> u32 {
    if at == D { 1 } else { 2 }
}

pub(crate) fn source() -> Source {
    Source { address: Arc::from("directory"), dp_rank: 0 }
}

pub(crate) fn expect(r: usize) -> Expect {
    Expect {
        room: room(r),
        pages: vec![Arc::from([0u32])],
        odd_page: None,
        tokens: (0, 1),
        source: source(),
        verify: Verify::Off,
        bootstrap_timeout: None,
        waiting_timeout: None,
    }
}

pub(crate) fn push(r: usize) -> Push {
    Push {
        room: room(r),
        id: PushId(r as u64 + 1),
        pages: vec![Arc::from([u32::from(tag(r)) - 1])],
        odd_page: None,
        tokens: (0, 1),
        layers: None,
        last: true,
        meta: None,
        ready: true,
        bootstrap_timeout: None,
        waiting_timeout: None,
    }
}

pub(crate) fn cancelled() -> Reason {
    Reason::new(ReasonKind::Cancelled, "given up")
}

/// The way that the other side grants.
pub(crate) fn back(direction: Direction) -> Direction {
    match direction {
        Direction::WeGrant => Direction::TheyGrant,
        Direction::TheyGrant => Direction::WeGrant,
    }
}

impl Proc {
    pub(crate) fn new(setup: &Setup, at: usize, life: u8) -> Result<Self, LayoutError> {
        let cfg = Config { flaw: setup.flaw, ..Config::default() };
        let mut node = Node::new(cfg, side_of(at, setup), &[pages_of(at)])?;
        let slots = if at == D && setup.family.is_packed() { setup.slots } else { 0 };
        if slots > 0 {
            // A few slots of one byte can always be.
            let _ = node.handle_ring(1, slots.into());
        }
        Ok(Self {
            node,
            ring: vec![None; slots.into()],
            life,
            stopped: false,
            rooms: [Seen::default(); ROOMS],
            to_push: if at == D { 0 } else { 0b11 },
            to_expect: if at != D { 0 } else { 0b11 >> 2u8.saturating_sub(setup.expected) },
            dialling: BTreeSet::new(),
            resolving: false,
            eps: BTreeMap::new(),
            fencing: BTreeMap::new(),
            broken: BTreeSet::new(),
            running: BTreeMap::new(),
            watched: BTreeSet::new(),
            dying: BTreeSet::new(),
            settling: BTreeSet::new(),
            forgot_living: false,
            cells: [[EMPTY; 2]; 2],
        })
    }
}

impl World {
    /// The beginning: every process runs, and the destination's engine has expected the first room.
    ///
    /// # Errors
    /// When the geometry is not valid.
    pub fn new(setup: Setup) -> Result<Self, LayoutError> {
        let procs = [
            Arc::new(Proc::new(&setup, S0, 0)?),
            Arc::new(Proc::new(&setup, S1.min(setup.sources.saturating_sub(1)), 0)?),
            Arc::new(Proc::new(&setup, D, 0)?),
        ];
        let mut world = Self {
            faults_left: setup.faults,
            stops_left: setup.stops.min(setup.faults),
            setup: Arc::new(setup),
            procs,
            prints: [0; 3],
            conns: Vec::new(),
            writes: Vec::new(),
            alike: true,
            violation: None,
        };
        world.expect_next();
        world.carry_out(D);
        world.tidy([true; 3]);
        Ok(world)
    }

    /// Faults that may still happen.
    #[must_use]
    pub fn faults_left(&self) -> u8 {
        self.faults_left
    }

    pub(crate) fn me(&self, at: usize) -> Incarnation {
        incarnation(at, self.procs[at].life)
    }

    /// Where this incarnation runs, if it does.
    pub(crate) fn alive(&self, who: Incarnation) -> Option<usize> {
        let at = address(who);
        (at <= D && self.me(at) == who).then_some(at)
    }

    pub(crate) fn proc(&mut self, at: usize) -> &mut Proc {
        Arc::make_mut(&mut self.procs[at])
    }

    pub(crate) fn ranks(&self) -> Vec<RankInfo> {
        (0..self.setup.sources)
            .map(|i| RankInfo { incarnation: self.me(i), side: side_of(i, &self.setup) })
            .collect()
    }

    /// A source that has sworn to do nothing until its connection is lost has kept its word, or cannot any more.
    pub(crate) fn settle_oaths(&mut self) -> bool {
        let d = self.me(D);
        for c in &mut self.conns {
            if !c.ends[1].doomed {
                continue;
            }
            if c.cut || c.who[0] != d {
                Arc::make_mut(c).ends[1].doomed = false;
            } else if c.ends[0].state != EndState::Open {
                // An orderly close: all that was sent would be read before it.
                return false;
            }
        }
        true
    }

    /// Whether this source does nothing until its connection is lost.
    pub(crate) fn is_doomed(&self, at: usize) -> bool {
        let me = self.me(at);
        self.conns.iter().any(|c| c.who[1] == me && c.ends[1].doomed)
    }

    /// What takes no part in the future is removed, and processes that may have changed get new fingerprints.
    pub(crate) fn tidy(&mut self, mut touched: [bool; 3]) {
        if self.setup.reduced >= Reduction::States {
            self.canonicalise(&mut touched);
        }
        self.conns.retain(|c| c.ends.iter().any(|e| e.state != EndState::Closed));
        self.conns.sort_by_key(|c| (c.who, c.session, c.serial));
        // Nobody waits for these, and they land nowhere.
        let mut writes = std::mem::take(&mut self.writes);
        writes.retain(|w| !w.loose || self.alive(w.to).is_some());
        writes.sort_unstable();
        self.writes = writes;
        for (at, touched) in touched.into_iter().enumerate() {
            if touched {
                self.proc(at).node.forget_statistics();
                if self.setup.reduced >= Reduction::States {
                    self.canonicalise_proc(at);
                }
                self.prints[at] = Fp::of(&*self.procs[at]);
            }
        }
    }

    /// A number that states share only if they are the same.
    #[must_use]
    pub fn fingerprint(&self) -> u128 {
        Fp::of(&(self.prints, &self.conns, &self.writes, self.faults_left, self.stops_left, self.alike))
    }
}
