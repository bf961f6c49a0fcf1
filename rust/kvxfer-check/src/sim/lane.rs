//! Deliveries under way on one agent, a slice at a time: what the transfer thread's scheduler does in production.

use kvxfer_proto::Room;
use kvxfer_proto::node::{DeliveryEnd, DeliveryId, PeerKey};
use kvxfer_proto::plan::{Cursor, Piece};
use std::collections::{BTreeMap, VecDeque};

/// Bytes a slice: 256 KiB scaled down as the pages are.
pub(super) const SLICE_BYTES: u64 = 96;
/// Slices in flight to one peer.
pub(super) const SLICES_IN_FLIGHT: usize = 8;

#[derive(Debug)]
struct Flow {
    peer: PeerKey,
    room: Room,
    cursor: Cursor,
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
    pub(super) fn add(&mut self, id: DeliveryId, peer: PeerKey, room: Room, cursor: Cursor) {
        let exhausted = cursor.total_bytes() == 0;
        let flow = Flow { peer, room, cursor, exhausted, aborted: false, in_flight: 0, bytes: 0, writes: 0 };
        self.flows.insert(id, flow);
        match self.ring.iter_mut().find(|(r, _)| *r == room) {
            Some((_, turn)) => turn.push_back(id),
            None => self.ring.push_back((room, VecDeque::from([id]))),
        }
    }

    pub(super) fn has_work(&self) -> bool {
        !self.ring.is_empty()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.flows.is_empty()
    }

    /// The next slice of a room for whose peer `may_post` holds.
    pub(super) fn next_slice(
        &mut self,
        mut may_post: impl FnMut(PeerKey) -> bool,
    ) -> Option<(DeliveryId, PeerKey, Room, Vec<Piece>)> {
        for _ in 0..self.ring.len() {
            let (room, mut turn) = self.ring.pop_front()?;
            turn.retain(|id| self.flows.get(id).is_some_and(|f| !f.exhausted && !f.aborted));
            let Some(id) = turn.front().copied() else { continue };
            self.ring.push_back((room, turn));
            let Some(flow) = self.flows.get_mut(&id).filter(|f| may_post(f.peer)) else { continue };
            let mut out = Vec::new();
            flow.exhausted = !flow.cursor.fill(&mut out, SLICE_BYTES, 1024);
            flow.bytes += out.iter().map(|p| p.len).sum::<u64>();
            flow.writes += out.len() as u64;
            flow.in_flight += 1;
            return Some((id, flow.peer, room, out));
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
