//! Deliveries under way on one agent, a slice at a time: what the transfer thread's scheduler does in production.

use kvxfer_proto::Room;
use kvxfer_proto::node::{DeliveryEnd, DeliveryId, PeerKey};
use kvxfer_proto::plan::{Cursor, Piece};
use std::collections::{BTreeMap, VecDeque};

/// Bytes a slice: 256 KiB scaled down as the pages are.
pub(super) const SLICE_BYTES: u64 = 96;
/// Pieces of a packed slice at most: few, so that not each is full.
const PACKED_PIECES: usize = 6;
/// Slices in flight to one peer.
pub(super) const SLICES_IN_FLIGHT: usize = 8;

/// How a delivery moves.
#[derive(Debug)]
pub(super) enum Work {
    /// Each piece by itself.
    Move,
    /// Packed, through slots that were lent.
    Pack(Slots),
    /// Out of slots of ours.
    Unpack(Slots),
}

/// Slots at hand, with the bytes in each if something has landed there.
#[derive(Debug)]
pub(super) struct Slots {
    slice_bytes: u64,
    at_hand: VecDeque<(u32, u64)>,
    cut: u64,
}

impl Slots {
    pub(super) fn none(slice_bytes: u64) -> Self {
        Self { slice_bytes, at_hand: VecDeque::new(), cut: 0 }
    }
}

/// Where a slice goes, or comes from, if it is packed.
#[derive(Clone, Copy, Debug)]
pub(super) enum InSlot {
    /// This slot of the peer's, and which slice of its delivery it is.
    Pack(u32, u64),
    /// This slot of ours, and the bytes in it.
    Unpack(u32, u64),
}

/// What to do next.
pub(super) struct Slice {
    pub(super) id: DeliveryId,
    pub(super) peer: PeerKey,
    pub(super) room: Room,
    pub(super) pieces: Vec<Piece>,
    pub(super) slot: Option<InSlot>,
}

#[derive(Debug)]
struct Flow {
    peer: PeerKey,
    room: Room,
    cursor: Cursor,
    work: Work,
    exhausted: bool,
    aborted: bool,
    in_flight: u32,
    bytes: u64,
    writes: u64,
}

/// All flows of an agent; rooms take turns.
#[derive(Debug, Default)]
pub(super) struct Lane {
    flows: BTreeMap<DeliveryId, Flow>,
    ring: VecDeque<(Room, VecDeque<DeliveryId>)>,
}

impl Lane {
    pub(super) fn add(&mut self, id: DeliveryId, peer: PeerKey, room: Room, cursor: Cursor, work: Work) {
        let exhausted = cursor.total_bytes() == 0;
        let flow =
            Flow { peer, room, cursor, work, exhausted, aborted: false, in_flight: 0, bytes: 0, writes: 0 };
        self.flows.insert(id, flow);
        match self.ring.iter_mut().find(|(r, _)| *r == room) {
            Some((_, turn)) => turn.push_back(id),
            None => self.ring.push_back((room, VecDeque::from([id]))),
        }
    }

    /// A flow that was to be packed is not.
    pub(super) fn direct(&mut self, id: DeliveryId) {
        if let Some(flow) = self.flows.get_mut(&id) {
            flow.work = Work::Move;
        }
    }

    /// A slot for a flow, or a slice of it with so many bytes.
    pub(super) fn has_slot(&mut self, id: DeliveryId, slot: u32, bytes: u64) {
        if let Some(Work::Pack(slots) | Work::Unpack(slots)) = self.flows.get_mut(&id).map(|f| &mut f.work) {
            slots.at_hand.push_back((slot, bytes));
        }
    }

    pub(super) fn has_work(&self) -> bool {
        !self.ring.is_empty()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.flows.is_empty()
    }

    /// The next slice of a room for whose peer `may_post` holds, which is also told whether it would be packed.
    pub(super) fn next_slice(&mut self, mut may_post: impl FnMut(PeerKey, bool) -> bool) -> Option<Slice> {
        for _ in 0..self.ring.len() {
            let (room, mut turn) = self.ring.pop_front()?;
            turn.retain(|id| self.flows.get(id).is_some_and(|f| !f.exhausted && !f.aborted));
            if turn.is_empty() {
                continue;
            }
            let mut ready = |f: &Flow| match &f.work {
                Work::Move => may_post(f.peer, false),
                Work::Pack(slots) => !slots.at_hand.is_empty() && may_post(f.peer, true),
                Work::Unpack(slots) => !slots.at_hand.is_empty(),
            };
            // One that waits for a slot holds up none behind it.
            let id = turn.iter().find(|id| self.flows.get(id).is_some_and(&mut ready)).copied();
            self.ring.push_back((room, turn));
            let Some((id, flow)) = id.and_then(|id| Some((id, self.flows.get_mut(&id)?))) else { continue };
            let (slot, (bytes, most)) = match &mut flow.work {
                Work::Move => (None, (SLICE_BYTES, 1024)),
                Work::Pack(s) => {
                    let number = s.cut;
                    s.cut += 1;
                    let slot = s.at_hand.pop_front().map(|(slot, _)| InSlot::Pack(slot, number));
                    (slot, (s.slice_bytes, PACKED_PIECES))
                }
                Work::Unpack(s) => {
                    let slot = s.at_hand.pop_front().map(|(slot, bytes)| InSlot::Unpack(slot, bytes));
                    (slot, (s.slice_bytes, PACKED_PIECES))
                }
            };
            let mut pieces = Vec::new();
            flow.exhausted = !flow.cursor.fill(&mut pieces, bytes, most);
            flow.bytes += pieces.iter().map(|p| p.len).sum::<u64>();
            flow.writes += pieces.len() as u64;
            flow.in_flight += 1;
            return Some(Slice { id, peer: flow.peer, room, pieces, slot });
        }
        None
    }

    /// A slice's flush came back, or the slice could not be posted. The flow's end if that was the last of it.
    pub(super) fn flushed(&mut self, id: DeliveryId) -> Option<DeliveryEnd> {
        if let Some(flow) = self.flows.get_mut(&id) {
            flow.in_flight = flow.in_flight.saturating_sub(1);
        }
        self.take_end(id)
    }

    /// Nothing more of it is posted.
    pub(super) fn abort(&mut self, id: DeliveryId) -> Option<DeliveryEnd> {
        if let Some(flow) = self.flows.get_mut(&id) {
            flow.aborted = true;
        }
        self.take_end(id)
    }

    /// The end of a flow of which nothing is left to post and nothing in flight.
    pub(super) fn take_end(&mut self, id: DeliveryId) -> Option<DeliveryEnd> {
        let f = self.flows.get(&id)?;
        if f.in_flight > 0 || (!f.exhausted && !f.aborted) {
            return None;
        }
        let f = self.flows.remove(&id)?;
        Some(if f.aborted {
            DeliveryEnd::Aborted
        } else {
            DeliveryEnd::Complete { bytes: f.bytes, writes: f.writes }
        })
    }

    /// Forgets every flow with a peer.
    pub(super) fn drop_peer(&mut self, peer: PeerKey) {
        self.flows.retain(|_, f| f.peer != peer);
    }

    /// Forgets one flow.
    pub(super) fn drop_flow(&mut self, id: DeliveryId) {
        self.flows.remove(&id);
    }

    /// Whether a write of this room is in flight.
    pub(super) fn is_writing(&self, room: Room) -> bool {
        self.flows.values().any(|f| f.room == room && f.in_flight > 0)
    }

    /// Whether anything is in flight, to this peer if one is named.
    pub(super) fn is_busy(&self, peer: Option<PeerKey>) -> bool {
        self.flows.values().any(|f| f.in_flight > 0 && peer.is_none_or(|p| p == f.peer))
    }
}
