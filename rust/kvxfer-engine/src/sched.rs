//! Which room's bytes move next.
//!
//! Rooms take turns, and a turn is worth the same number of bytes to each (deficit round robin), so a short
//! hand-off never waits for a long one to end. Within a room, deliveries go in the order in which they came.
//!
//! A room's first bytes are its *head start*: rooms that have some left share every other turn, so that a short room beside
//! many long ones takes about twice its time alone, and a flood of short ones leaves the long ones half.

use kvxfer_proto::Room;
use kvxfer_proto::node::{DeliveryId, PeerKey};
use kvxfer_proto::plan::{Cursor, Digest, PACKED_PIECES, Piece};
use std::collections::{HashMap, VecDeque};

/// What a flow does, a slice at a time.
#[derive(Debug)]
enum Work {
    Move(Cursor),
    /// Moves through slots that the peer lends, a slice of at most so many bytes each.
    Pack {
        cursor: Box<Cursor>,
        slice_bytes: u64,
        slots: VecDeque<u32>,
        cut: u64,
    },
    /// Takes such slices apart again, as they land: slots of ours, and bytes in each.
    Unpack {
        cursor: Box<Cursor>,
        slice_bytes: u64,
        landed: VecDeque<(u32, u64)>,
    },
    Sum(Box<Digest>),
}

/// A delivery, or a sum of our own bytes, under way.
#[derive(Debug)]
pub(crate) struct Flow {
    pub(crate) id: DeliveryId,
    pub(crate) peer: PeerKey,
    work: Work,
    exhausted: bool,
    aborted: bool,
    /// Slices posted whose flush has not come back.
    in_flight: u32,
    pub(crate) bytes: u64,
    pub(crate) writes: u64,
}

/// How a flow ended: nothing of it is in flight.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum FlowEnd {
    Complete { bytes: u64, writes: u64 },
    Summed(u64),
    Aborted,
}

/// One room's turn.
#[derive(Debug, Default)]
struct Turn {
    flows: VecDeque<DeliveryId>,
    deficit: u64,
}

/// All flows, and the order of rooms.
#[derive(Debug, Default)]
pub(crate) struct Scheduler {
    flows: HashMap<DeliveryId, Flow>,
    turns: HashMap<Room, Turn>,
    /// Rooms that have used up their head start.
    ring: VecDeque<Room>,
    /// Rooms that have not.
    fresh: VecDeque<Room>,
    /// Whose slice was the last: the other kind comes first now.
    fresh_was_last: bool,
    /// What is left of each room's head start, for as long as the room lives: a room that is pushed in parts has one only.
    heads: HashMap<Room, u64>,
    quantum: u64,
}

/// A slice to post, or to sum.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Slice {
    pub(crate) id: DeliveryId,
    pub(crate) peer: PeerKey,
    pub(crate) room: Room,
    /// It is to be summed by [`Scheduler::sum`], at most so many bytes.
    pub(crate) sum: Option<u64>,
    /// It goes into, or comes out of, this slot.
    pub(crate) slot: Option<InSlot>,
}

/// What a slice has to do with a slot.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum InSlot {
    /// It is to be packed, and written to this slot of the peer's; and which slice of its delivery it is.
    Pack(u32, u64),
    /// It is to be unpacked from this slot of ours, which has so many bytes of it.
    Unpack(u32, u64),
}

/// Pieces a slice may have at most: bounds the time between two looks at the control channel when pieces are tiny.
const SLICE_PIECES: usize = 1024;
/// A room's head start, in turns' worth of bytes: 8 MiB by default, in which 1,000 tokens of eight layers fit twice.
const HEAD_START_TURNS: u64 = 32;
/// Rows that a slice may look at: the same for sums of small rows, and for samples, which skip most of them.
const SLICE_CELLS: u64 = 16_384;

impl Scheduler {
    pub(crate) fn new(quantum: u64) -> Self {
        Self { quantum: quantum.max(4096), ..Self::default() }
    }

    pub(crate) fn add(&mut self, id: DeliveryId, peer: PeerKey, room: Room, cursor: Cursor) {
        let exhausted = cursor.total_bytes() == 0;
        self.begin(id, peer, room, Work::Move(cursor), exhausted);
    }

    /// A delivery that goes packed, once slots are lent for it.
    pub(crate) fn add_packed(
        &mut self,
        id: DeliveryId,
        peer: PeerKey,
        room: Room,
        cursor: Cursor,
        slice_bytes: u64,
    ) {
        let work = Work::Pack { cursor: Box::new(cursor), slice_bytes, slots: VecDeque::new(), cut: 0 };
        self.begin(id, peer, room, work, false);
    }

    /// A push that comes packed.
    pub(crate) fn add_unpacking(
        &mut self,
        id: DeliveryId,
        peer: PeerKey,
        room: Room,
        cursor: Cursor,
        slice_bytes: u64,
    ) {
        let work = Work::Unpack { cursor: Box::new(cursor), slice_bytes, landed: VecDeque::new() };
        self.begin(id, peer, room, work, false);
    }

    /// A slot for a delivery that goes packed.
    pub(crate) fn lent(&mut self, id: DeliveryId, slot: u32) {
        if let Some(Work::Pack { slots, .. }) = self.flows.get_mut(&id).map(|f| &mut f.work) {
            slots.push_back(slot);
        }
    }

    /// A delivery that was to go packed goes as any other, from its start.
    pub(crate) fn direct(&mut self, id: DeliveryId) {
        if let Some(mut flow) = self.flows.remove(&id) {
            flow.work = match flow.work {
                Work::Pack { cursor, .. } => Work::Move(*cursor),
                work => work,
            };
            self.flows.insert(id, flow);
        }
    }

    /// A slice of a push that comes packed.
    pub(crate) fn landed(&mut self, id: DeliveryId, slot: u32, bytes: u64) {
        if let Some(Work::Unpack { landed, .. }) = self.flows.get_mut(&id).map(|f| &mut f.work) {
            landed.push_back((slot, bytes));
        }
    }

    /// A sum takes its turns as a delivery does.
    pub(crate) fn add_sum(&mut self, id: DeliveryId, peer: PeerKey, room: Room, digest: Digest) {
        let exhausted = digest.is_done();
        self.begin(id, peer, room, Work::Sum(Box::new(digest)), exhausted);
    }

    fn begin(&mut self, id: DeliveryId, peer: PeerKey, room: Room, work: Work, exhausted: bool) {
        let flow = Flow { id, peer, work, exhausted, aborted: false, in_flight: 0, bytes: 0, writes: 0 };
        self.flows.insert(id, flow);
        let head = *self.heads.entry(room).or_insert(HEAD_START_TURNS.saturating_mul(self.quantum));
        let turn = self.turns.entry(room).or_insert_with(|| {
            let queue = if head > 0 { &mut self.fresh } else { &mut self.ring };
            queue.push_back(room);
            Turn::default()
        });
        turn.flows.push_back(id);
    }

    pub(crate) fn has_work(&self) -> bool {
        !self.ring.is_empty() || !self.fresh.is_empty()
    }

    pub(crate) fn len(&self) -> usize {
        self.flows.len()
    }

    /// A room is over: its number may be another's.
    pub(crate) fn forget(&mut self, room: Room) {
        self.heads.remove(&room);
    }

    /// Rooms of which something is remembered.
    pub(crate) fn rooms(&self) -> usize {
        self.heads.len()
    }

    /// Fills `out` with the next slice, of a room for whose peer `may_post` holds, which is also told whether it would be
    /// packed. `None`: nothing can be posted now.
    pub(crate) fn next_slice(
        &mut self,
        out: &mut Vec<Piece>,
        mut may_post: impl FnMut(PeerKey, bool) -> bool,
    ) -> Option<Slice> {
        out.clear();
        let fresh = !self.fresh_was_last;
        let slice = match self.slice_of(fresh, out, &mut may_post) {
            Some(slice) => {
                self.fresh_was_last = fresh;
                slice
            }
            None => {
                let slice = self.slice_of(!fresh, out, &mut may_post)?;
                self.fresh_was_last = !fresh;
                slice
            }
        };
        Some(slice)
    }

    /// The next slice of the rooms that have some of their head start left, or of those that have not.
    fn slice_of(
        &mut self,
        fresh: bool,
        out: &mut Vec<Piece>,
        mut may_post: impl FnMut(PeerKey, bool) -> bool,
    ) -> Option<Slice> {
        let (queue, other) =
            if fresh { (&mut self.fresh, &mut self.ring) } else { (&mut self.ring, &mut self.fresh) };
        for _ in 0..queue.len() {
            let room = queue.pop_front()?;
            let Some(turn) = self.turns.get_mut(&room) else { continue };
            turn.flows.retain(|id| self.flows.get(id).is_some_and(|f| !f.exhausted && !f.aborted));
            if turn.flows.is_empty() {
                self.turns.remove(&room);
                continue;
            }
            let goes = |flow: &Flow| match &flow.work {
                // A sum needs nothing of its peer.
                Work::Sum(_) => true,
                Work::Unpack { landed, .. } => !landed.is_empty(),
                _ => false,
            };
            let mut ready = |flow: &Flow| {
                goes(flow)
                    || match &flow.work {
                        Work::Move(_) => may_post(flow.peer, false),
                        Work::Pack { slots, .. } => !slots.is_empty() && may_post(flow.peer, true),
                        _ => false,
                    }
            };
            // One that waits for its peer, or for a slot, holds up none behind it, which may have what others wait for.
            let id = turn.flows.iter().find(|id| self.flows.get(id).is_some_and(&mut ready)).copied();
            let Some(flow) = id.and_then(|id| self.flows.get_mut(&id)) else {
                // It keeps its place and gains nothing by waiting.
                queue.push_back(room);
                continue;
            };
            turn.deficit = turn.deficit.saturating_add(self.quantum).min(2 * self.quantum);
            let mut slice = Slice { id: flow.id, peer: flow.peer, room, sum: None, slot: None };
            match &mut flow.work {
                // What it takes is known, and taken off, once it is summed.
                Work::Sum(_) => slice.sum = Some(turn.deficit),
                Work::Move(cursor) => flow.exhausted = !cursor.fill(out, turn.deficit, SLICE_PIECES),
                Work::Pack { cursor, slice_bytes, slots, cut } => {
                    slice.slot = slots.pop_front().map(|slot| InSlot::Pack(slot, *cut));
                    *cut += 1;
                    flow.exhausted = !cursor.fill(out, *slice_bytes, PACKED_PIECES);
                }
                Work::Unpack { cursor, slice_bytes, landed } => {
                    slice.slot = landed.pop_front().map(|(slot, bytes)| InSlot::Unpack(slot, bytes));
                    flow.exhausted = !cursor.fill(out, *slice_bytes, PACKED_PIECES);
                }
            }
            let bytes: u64 = out.iter().map(|p| p.len).sum();
            turn.deficit = turn.deficit.saturating_sub(bytes);
            if slice.sum.is_none() {
                flow.bytes += bytes;
                flow.writes += if matches!(flow.work, Work::Pack { .. }) { 1 } else { out.len() as u64 };
                flow.in_flight += 1;
            }
            // A slice counts as a turn's worth at the least: tiny pieces, and sums of which little is looked at, take their time.
            let used = bytes.max(self.quantum);
            let left = self.heads.get_mut(&room).map_or(0, |head| {
                *head = head.saturating_sub(used);
                *head
            });
            let next = if fresh && left == 0 { other } else { queue };
            next.push_back(room);
            return Some(slice);
        }
        None
    }

    /// Sums a slice. Returns its bytes, and the sum's end if that was the last of it.
    pub(crate) fn sum<E>(
        &mut self,
        slice: Slice,
        read: impl FnMut(u32, u64, &mut [u8]) -> Result<(), E>,
    ) -> Result<(u64, Option<FlowEnd>), E> {
        let Some(flow) = self.flows.get_mut(&slice.id) else { return Ok((0, None)) };
        let (Work::Sum(digest), Some(budget)) = (&mut flow.work, slice.sum) else { return Ok((0, None)) };
        let bytes = digest.step(budget, SLICE_CELLS, read)?;
        flow.exhausted = digest.is_done();
        if let Some(turn) = self.turns.get_mut(&slice.room) {
            turn.deficit = turn.deficit.saturating_sub(bytes);
        }
        Ok((bytes, self.take_end(slice.id)))
    }

    /// A slice's flush came back. Returns the flow's end if that was the last of it.
    pub(crate) fn flushed(&mut self, id: DeliveryId) -> Option<FlowEnd> {
        if let Some(flow) = self.flows.get_mut(&id) {
            flow.in_flight = flow.in_flight.saturating_sub(1);
        }
        self.take_end(id)
    }

    /// Nothing more of this flow is posted. Returns its end if nothing is in flight.
    pub(crate) fn abort(&mut self, id: DeliveryId) -> Option<FlowEnd> {
        if let Some(flow) = self.flows.get_mut(&id) {
            flow.aborted = true;
        }
        self.take_end(id)
    }

    /// The end of a flow that has nothing to move.
    pub(crate) fn take_end(&mut self, id: DeliveryId) -> Option<FlowEnd> {
        let flow = self.flows.get(&id)?;
        if flow.in_flight > 0 || (!flow.exhausted && !flow.aborted) {
            return None;
        }
        let flow = self.flows.remove(&id)?;
        Some(match flow.work {
            _ if flow.aborted => FlowEnd::Aborted,
            Work::Move(_) | Work::Pack { .. } | Work::Unpack { .. } => {
                FlowEnd::Complete { bytes: flow.bytes, writes: flow.writes }
            }
            Work::Sum(digest) => FlowEnd::Summed(digest.value()),
        })
    }

    /// Drops every flow with a peer whose endpoint is gone, and says which.
    pub(crate) fn drop_peer(&mut self, peer: PeerKey) -> Vec<DeliveryId> {
        let ids: Vec<_> = self.flows.values().filter(|f| f.peer == peer).map(|f| f.id).collect();
        for id in &ids {
            self.flows.remove(id);
        }
        ids
    }

    /// Drops one flow whatever is in flight, because its slice could not be posted.
    pub(crate) fn drop_flow(&mut self, id: DeliveryId) {
        self.flows.remove(&id);
    }
}

#[cfg(test)]
mod tests;
