//! Which room's bytes move next.
//!
//! Rooms take turns, and a turn is worth the same number of bytes to each (deficit round robin), so a short
//! hand-off never waits for a long one to end. Within a room, deliveries go in the order in which they came.
//!
//! A room's first bytes are its *head start*: rooms that have some left share every other turn, so that a short room beside
//! many long ones takes about twice its time alone, and no flood of short ones takes more than half from the long ones.

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
            if head > 0 {
                self.fresh.push_back(room)
            } else {
                self.ring.push_back(room)
            }
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
        let rooms = if fresh { self.fresh.len() } else { self.ring.len() };
        for _ in 0..rooms {
            let room = if fresh { self.fresh.pop_front() } else { self.ring.pop_front() }?;
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
                if fresh {
                    self.fresh.push_back(room)
                } else {
                    self.ring.push_back(room)
                }
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
            if fresh && left > 0 {
                self.fresh.push_back(room)
            } else {
                self.ring.push_back(room)
            }
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
mod tests {
    use super::*;
    use kvxfer_proto::node::Direction;
    use kvxfer_proto::plan::{Request, Template};
    use kvxfer_proto::{DType, Incarnation, Kind, Order, PageLayout, Shard, Side};
    use std::sync::Arc;

    fn cursor(pages: u32) -> Cursor {
        let layout = PageLayout {
            layers: 4,
            kv_heads: 1,
            head_dim: 128,
            page_tokens: 16,
            dtype: DType::Bfloat16,
            order: Order::Hnd,
            kind: Kind::Kv,
            ..PageLayout::PLAIN
        };
        let side =
            Side { groups: vec![layout], shard: Shard { tp_rank: 0, tp_size: 1, pp_rank: 0, pp_size: 1 } };
        let list: Arc<[u32]> = (0..pages).map(|p| p * 2).collect();
        let request = Request {
            src_pages: vec![Arc::clone(&list)],
            src_tokens: 0..u64::from(pages) * 16,
            dst_pages: vec![list],
            dst_tokens: 0..u64::from(pages) * 16,
            tokens: 0..u64::from(pages) * 16,
            layers: 0..4,
        };
        let template = Arc::new(Template::new(&side, &side).unwrap());
        Cursor::new(template, request, &[100_000], &[100_000]).unwrap()
    }

    fn key(n: u64) -> PeerKey {
        PeerKey { incarnation: Incarnation(n), direction: Direction::TheyGrant }
    }

    fn digest(pages: u32, sample: bool) -> Digest {
        let cursor = cursor(pages);
        let extent = kvxfer_proto::plan::Extent {
            end: kvxfer_proto::plan::End::Source,
            pages: vec![(0..pages).collect()],
            list: 0..u64::from(pages) * 16,
            room: 0..u64::from(pages) * 16,
            tokens: 0..u64::from(pages) * 16,
            layers: 0..4,
            sample,
        };
        Digest::new(Arc::clone(cursor.template()), extent, &[100_000]).unwrap()
    }

    fn nothing(_: u32, _: u64, _: &mut [u8]) -> Result<(), ()> {
        Ok(())
    }

    /// Sums take turns with data work, a slice at a time, and need no credit of their peer.
    #[test]
    fn a_sum_shares_the_thread_with_other_rooms() {
        let mut s = Scheduler::new(64 << 10);
        s.add_sum(DeliveryId(1), key(1), Room::new(1).unwrap(), digest(1000, false));
        s.add(DeliveryId(2), key(2), Room::new(2).unwrap(), cursor(63));
        let (mut out, mut summed, mut moved) = (Vec::new(), 0, 0);
        while let Some(slice) = s.next_slice(&mut out, |k, _| k == key(2)) {
            if slice.sum.is_some() {
                assert_eq!(slice.id, DeliveryId(1));
                let (bytes, end) = s.sum(slice, nothing).unwrap();
                assert!(bytes <= 128 << 10, "a slice of {bytes} bytes");
                summed += bytes;
                assert_eq!(end.is_some(), summed == 1000 * 4096 * 8);
            } else {
                assert!(out.iter().map(|p| p.len).sum::<u64>() <= 128 << 10);
                moved += out.iter().map(|p| p.len).sum::<u64>();
                s.flushed(slice.id);
            }
            if moved < 63 * 4096 * 8 {
                assert!(summed <= moved + (256 << 10), "{summed} bytes were summed while {moved} moved");
            }
        }
        assert_eq!((summed, moved), (1000 * 4096 * 8, 63 * 4096 * 8));
        assert_eq!(s.len(), 0);
    }

    /// Rows that a sample skips take their time too.
    #[test]
    fn a_sample_of_a_long_room_comes_in_slices() {
        let mut s = Scheduler::new(u64::MAX / 4);
        s.add_sum(DeliveryId(1), key(1), Room::new(1).unwrap(), digest(4096, true));
        let (mut out, mut slices) = (Vec::new(), 0);
        while let Some(slice) = s.next_slice(&mut out, |_, _| false) {
            s.sum(slice, nothing).unwrap();
            slices += 1;
        }
        assert_eq!(slices, 4096 * 16 * 8 / SLICE_CELLS);
    }

    /// A flow that waits for a slot is passed over; what its slots bring is cut alike on both sides.
    #[test]
    fn a_push_without_slots_holds_up_nobody() {
        let mut s = Scheduler::new(64 << 10);
        let room = Room::new(1).unwrap();
        s.add_packed(DeliveryId(1), key(1), room, cursor(100), 64 << 10);
        s.add_unpacking(DeliveryId(2), key(1), room, cursor(100), 64 << 10);
        s.add(DeliveryId(3), key(1), room, cursor(1));
        let mut out = Vec::new();
        let slice = s.next_slice(&mut out, |_, _| true).unwrap();
        assert_eq!((slice.id, slice.slot), (DeliveryId(3), None));
        s.flushed(slice.id);
        assert!(s.next_slice(&mut out, |_, _| true).is_none(), "neither has a slot");
        s.lent(DeliveryId(1), 7);
        assert!(s.next_slice(&mut out, |_, packed| !packed).is_none(), "there is no buffer for its peer");
        let slice = s.next_slice(&mut out, |_, packed| packed).unwrap();
        assert_eq!((slice.id, slice.slot), (DeliveryId(1), Some(InSlot::Pack(7, 0))));
        s.landed(DeliveryId(2), 3, 1000);
        let slice = s.next_slice(&mut out, |_, _| false).unwrap();
        assert_eq!((slice.id, slice.slot), (DeliveryId(2), Some(InSlot::Unpack(3, 1000))));
    }

    #[test]
    fn both_sides_cut_a_push_alike_and_no_slice_is_too_large() {
        let all = |s: &mut Scheduler, give: fn(&mut Scheduler)| {
            let (mut out, mut cuts, mut pieces) = (Vec::new(), Vec::new(), Vec::new());
            loop {
                give(s);
                let Some(slice) = s.next_slice(&mut out, |_, _| true) else { return (cuts, pieces) };
                cuts.push(out.len());
                pieces.extend_from_slice(&out);
                s.flushed(slice.id);
            }
        };
        let room = Room::new(1).unwrap();
        for (slice_bytes, most) in [(64u64 << 10, 16), (1 << 30, PACKED_PIECES)] {
            let mut s = Scheduler::new(64 << 10);
            s.add_packed(DeliveryId(1), key(1), room, cursor(1000), slice_bytes);
            let sent = all(&mut s, |s| s.lent(DeliveryId(1), 0));
            s.add_unpacking(DeliveryId(1), key(1), room, cursor(1000), slice_bytes);
            let taken = all(&mut s, |s| s.landed(DeliveryId(1), 0, 0));
            assert_eq!(sent, taken);
            assert_eq!((sent.0[0], sent.1.len()), (most, 8000));
            assert!(sent.0.iter().all(|n| *n <= most), "{:?}", sent.0);
        }
    }

    #[test]
    fn a_push_that_gets_no_slots_moves_from_its_start() {
        let mut s = Scheduler::new(64 << 10);
        s.add_packed(DeliveryId(1), key(1), Room::new(1).unwrap(), cursor(2), 64 << 10);
        let mut out = Vec::new();
        assert!(s.next_slice(&mut out, |_, _| true).is_none());
        s.direct(DeliveryId(1));
        let slice = s.next_slice(&mut out, |_, packed| !packed).unwrap();
        assert_eq!((slice.slot, out.len()), (None, 16));
        assert_eq!(s.flushed(slice.id), Some(FlowEnd::Complete { bytes: 16 * 4096, writes: 16 }));
    }

    #[test]
    fn a_sum_that_is_stopped_ends_at_once() {
        let mut s = Scheduler::new(64 << 10);
        s.add_sum(DeliveryId(1), key(1), Room::new(1).unwrap(), digest(1000, false));
        let mut out = Vec::new();
        let slice = s.next_slice(&mut out, |_, _| true).unwrap();
        assert_eq!(s.sum(slice, nothing).unwrap().1, None);
        assert_eq!(s.abort(DeliveryId(1)), Some(FlowEnd::Aborted));
        assert!(s.next_slice(&mut out, |_, _| true).is_none());
        s.add_sum(DeliveryId(2), key(1), Room::new(1).unwrap(), digest(1000, false));
        assert_eq!(s.drop_peer(key(1)), vec![DeliveryId(2)]);
        assert!(s.next_slice(&mut out, |_, _| true).is_none());
    }

    /// A short room behind long ones gets its share from its first turn on.
    #[test]
    fn a_short_room_waits_for_one_slice_of_each_other_room() {
        let mut s = Scheduler::new(64 << 10);
        for n in 0..4u64 {
            s.add(DeliveryId(n), key(1), Room::new(n).unwrap(), cursor(4000));
        }
        s.add(DeliveryId(9), key(1), Room::new(9).unwrap(), cursor(63));
        let (mut out, mut turns, mut others) = (Vec::new(), 0, 0u64);
        let short = 63 * 4096 * 8;
        loop {
            let slice = s.next_slice(&mut out, |_, _| true).unwrap();
            let bytes: u64 = out.iter().map(|p| p.len).sum();
            if slice.id == DeliveryId(9) {
                turns += 1;
                if let Some(end) = s.flushed(slice.id) {
                    assert_eq!(end, FlowEnd::Complete { bytes: short, writes: 63 * 8 });
                    break;
                }
            } else {
                others += bytes;
            }
        }
        assert!(
            others <= 4 * (short + (128 << 10)),
            "others moved {others} bytes meanwhile, in {turns} turns"
        );
    }

    /// Takes one slice and has it flushed; whose it was, and its bytes.
    fn step(s: &mut Scheduler) -> (DeliveryId, u64) {
        let mut out = Vec::new();
        let slice = s.next_slice(&mut out, |_, _| true).unwrap();
        s.flushed(slice.id);
        (slice.id, out.iter().map(|p| p.len).sum())
    }

    const PAGE_BYTES: u64 = 8 * 4096;
    const QUANTUM: u64 = 64 << 10;

    #[test]
    fn a_short_room_behind_long_ones_gets_every_other_slice() {
        let mut s = Scheduler::new(QUANTUM);
        for n in 0..4u64 {
            s.add(DeliveryId(n), key(1), Room::new(n).unwrap(), cursor(40_000));
        }
        // Long enough for them to have used up their own head starts.
        while s.heads.values().any(|head| *head > 0) {
            step(&mut s);
        }
        let short = 63 * PAGE_BYTES;
        assert!(short < HEAD_START_TURNS * QUANTUM);
        s.add(DeliveryId(9), key(1), Room::new(9).unwrap(), cursor(63));
        let (mut moved, mut others) = (0, 0);
        while moved < short {
            let (id, bytes) = step(&mut s);
            *(if id == DeliveryId(9) { &mut moved } else { &mut others }) += bytes;
        }
        assert!(others <= short + 2 * QUANTUM, "others moved {others} bytes meanwhile");
    }

    #[test]
    fn a_flood_of_short_rooms_leaves_a_long_one_half() {
        let mut s = Scheduler::new(QUANTUM);
        s.add(DeliveryId(0), key(1), Room::new(0).unwrap(), cursor(40_000));
        let (mut next, mut open, mut long, mut short) = (1u64, 0, 0u64, 0u64);
        while long < 20_000 * PAGE_BYTES {
            // There are always a hundred of them: one that ends is followed by another.
            while open < 100 {
                s.add(DeliveryId(next), key(1), Room::new(next).unwrap(), cursor(2));
                (next, open) = (next + 1, open + 1);
            }
            let (id, bytes) = step(&mut s);
            if id == DeliveryId(0) {
                long += bytes;
            } else {
                short += bytes;
                s.forget(Room::new(id.0).unwrap());
                open -= 1;
            }
            assert!(short <= long + 40 * QUANTUM, "{short} bytes of short rooms, {long} of the long one");
        }
        assert!(short > long / 2, "the short ones got their share as well");
        assert!(s.rooms() <= 101);
    }

    #[test]
    fn a_room_that_is_pushed_in_parts_has_one_head_start() {
        let mut s = Scheduler::new(QUANTUM);
        let (whole, parts) = (Room::new(1).unwrap(), Room::new(2).unwrap());
        s.add(DeliveryId(0), key(1), whole, cursor(40_000));
        let (mut next, mut moved) = (1u64, [0u64; 2]);
        let total = 20_000 * PAGE_BYTES;
        while moved[0] < total {
            if !s.flows.values().any(|f| f.id != DeliveryId(0)) {
                s.add(DeliveryId(next), key(1), parts, cursor(4));
                next += 1;
            }
            let (id, bytes) = step(&mut s);
            moved[usize::from(id != DeliveryId(0))] += bytes;
        }
        assert!(moved[1] <= total + 2 * HEAD_START_TURNS * QUANTUM, "{moved:?}");
        s.forget(parts);
        assert_eq!(s.rooms(), 1);
    }

    /// Whoever comes when: over a long time all move the same.
    #[test]
    fn long_rooms_share_alike_whenever_they_came() {
        let mut s = Scheduler::new(QUANTUM);
        let mut moved = [0u64; 5];
        for n in 0..5usize {
            s.add(DeliveryId(n as u64), key(1), Room::new(n as u64).unwrap(), cursor(60_000));
            for _ in 0..700 {
                let (id, bytes) = step(&mut s);
                moved[usize::try_from(id.0).unwrap()] += bytes;
            }
        }
        let before = moved;
        for _ in 0..5_000 {
            let (id, bytes) = step(&mut s);
            moved[usize::try_from(id.0).unwrap()] += bytes;
        }
        let gained: Vec<u64> = moved.iter().zip(before).map(|(m, b)| m - b).collect();
        let (least, most) = (gained.iter().min().unwrap(), gained.iter().max().unwrap());
        assert!(most - least <= 2 * QUANTUM, "{gained:?}");
    }

    #[test]
    fn an_abort_ends_once_nothing_is_in_flight() {
        let mut s = Scheduler::new(64 << 10);
        s.add(DeliveryId(1), key(1), Room::new(1).unwrap(), cursor(100));
        let mut out = Vec::new();
        s.next_slice(&mut out, |_, _| true).unwrap();
        s.next_slice(&mut out, |_, _| true).unwrap();
        assert_eq!(s.abort(DeliveryId(1)), None);
        assert!(s.next_slice(&mut out, |_, _| true).is_none(), "nothing more is posted");
        assert_eq!(s.flushed(DeliveryId(1)), None);
        assert_eq!(s.flushed(DeliveryId(1)), Some(FlowEnd::Aborted));
        assert!(!s.has_work());
    }

    #[test]
    fn a_peer_that_cannot_take_more_does_not_hold_up_the_others() {
        let mut s = Scheduler::new(64 << 10);
        s.add(DeliveryId(1), key(1), Room::new(1).unwrap(), cursor(100));
        s.add(DeliveryId(2), key(2), Room::new(2).unwrap(), cursor(100));
        let mut out = Vec::new();
        for _ in 0..10 {
            assert_eq!(s.next_slice(&mut out, |k, _| k == key(2)).unwrap().id, DeliveryId(2));
        }
        assert_eq!(s.drop_peer(key(2)), vec![DeliveryId(2)]);
        assert!(s.next_slice(&mut out, |k, _| k == key(2)).is_none());
        assert_eq!(s.next_slice(&mut out, |_, _| true).unwrap().id, DeliveryId(1));
    }
}
