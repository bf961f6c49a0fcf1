//! Deliveries through staging slots: slices on their way, and what is checked of each.

use super::data::Running;
use super::{Net, What};
use kvxfer_proto::node::{Delivery, DeliveryEnd, DeliveryId, Direction, Mover, PeerKey, Unpacking};
use kvxfer_proto::plan::{Cursor, Piece, Template};
use kvxfer_proto::staging::Slot;
use kvxfer_proto::{Incarnation, PushId, Reason, ReasonKind, Room};
use std::collections::VecDeque;
use std::sync::Arc;

/// How a delivery is cut into slices.
pub struct Packed {
    /// Pieces of each slice.
    cuts: VecDeque<usize>,
    /// Of the sender, slots lent; of the receiver, slots filled and their bytes.
    slots: VecDeque<(u32, u64)>,
    /// Slices posted, and when the last of them lands: an endpoint's writes are flushed in order.
    posted: u64,
    lands_at: u64,
}

impl Packed {
    fn new(cuts: VecDeque<usize>) -> Self {
        Self { cuts, slots: VecDeque::new(), posted: 0, lands_at: 0 }
    }
}

/// A slice on its way, packed when it was posted.
#[derive(Clone)]
pub struct Slice {
    node: usize,
    incarnation: Incarnation,
    id: DeliveryId,
    key: PeerKey,
    room: Room,
    push: PushId,
    slot: u32,
    number: u64,
    epoch: u64,
    bytes: Vec<u8>,
}

fn sliced(mut cursor: Cursor, slice_bytes: u64) -> (Vec<Piece>, VecDeque<usize>) {
    let (mut pieces, mut cuts) = (Vec::new(), VecDeque::new());
    loop {
        let before = pieces.len();
        let more = cursor.fill(&mut pieces, slice_bytes, 3);
        cuts.push_back(pieces.len() - before);
        if !more {
            return (pieces, cuts);
        }
    }
}

impl Net {
    /// At a session's start: decode has a ring, and prefill may write to it.
    pub(super) fn have_rings(&mut self, i: usize, key: PeerKey) {
        let Some((bytes, slots)) = self.ring.filter(|_| self.mover == Mover::Sender) else { return };
        let n = &mut self.nodes[i];
        if key.direction == Direction::TheyGrant {
            n.node.handle_peer_ring(key, bytes, slots).unwrap();
            return;
        }
        n.node.handle_ring(bytes, slots).unwrap();
        n.ring.resize(slots as usize, vec![0; bytes as usize]);
    }

    fn cursor_of(&self, src: usize, dst: usize, d: &Delivery) -> Cursor {
        let (s, t) = (&self.nodes[src], &self.nodes[dst]);
        let template = Arc::new(Template::new(&s.side, &t.side).expect("fits"));
        Cursor::new(template, d.request.clone(), &s.page_counts, &t.page_counts).expect("fits")
    }

    /// Whether a delivery goes packed, and in which pieces and slices: `pieces` are cut anew.
    pub(super) fn goes_packed(&mut self, i: usize, d: &Delivery, pieces: &mut Vec<Piece>) -> Option<Packed> {
        let (slot_bytes, _) = self.ring.filter(|_| self.mover == Mover::Sender && !pieces.is_empty())?;
        if self.rng.below(3) == 0 {
            return None;
        }
        let slice_bytes = 1 + self.rng.below(slot_bytes);
        let dst = self.find(d.peer.incarnation)?;
        let (again, cuts) = sliced(self.cursor_of(i, dst, d), slice_bytes);
        let bytes = again.iter().map(|p| p.len).sum();
        let (now, id) = (self.time(), d.id);
        // What is asked for may be too few, as where pieces do not fill slices.
        let asked = 1 + self.rng.below(cuts.len() as u64) as u32;
        if !self.nodes[i].node.handle_pack(now, id, bytes, slice_bytes, asked) {
            return None;
        }
        *pieces = again;
        Some(Packed::new(cuts))
    }

    pub(super) fn lent(&mut self, i: usize, id: DeliveryId, slot: u32) {
        let incarnation = self.nodes[i].incarnation;
        if let Some(p) = self.nodes[i].running.get_mut(&id).and_then(|r| r.packed.as_mut()) {
            p.slots.push_back((slot, 0));
            let delay = self.draw(self.data_us);
            self.at(delay, What::PostSlice { node: i, incarnation, id });
        }
    }

    /// No slots are to be had: as any other delivery.
    pub(super) fn go_direct(&mut self, i: usize, id: DeliveryId) {
        let incarnation = self.nodes[i].incarnation;
        if let Some(r) = self.nodes[i].running.get_mut(&id) {
            assert_eq!(r.next, 0, "nothing of it was written");
            r.packed = None;
            self.at(1, What::Post { node: i, incarnation, id });
        }
    }

    pub(super) fn post_slice(&mut self, i: usize, id: DeliveryId) {
        let incarnation = self.nodes[i].incarnation;
        let Some(r) = self.nodes[i].running.get_mut(&id).filter(|r| !r.aborted) else { return };
        let Some(p) = &mut r.packed else { return };
        let Some(count) = p.cuts.pop_front() else { return };
        let (slot, _) = p.slots.pop_front().expect("a slot for each post");
        if p.cuts.is_empty() {
            // Slots that are over are the node's to give back.
            p.slots.clear();
        }
        let number = p.posted;
        p.posted += 1;
        let after = p.lands_at;
        let batch: Vec<Piece> = r.pieces[r.next..r.next + count].to_vec();
        r.next += count;
        r.in_flight += 1;
        let (key, room, push) = (r.delivery.peer, r.delivery.room, r.delivery.push);
        let bytes = batch.iter().flat_map(|p| self.read(Some(i), p)).collect();
        let epoch = self.nodes[i].attached_epoch.get(&key).copied().unwrap_or(0);
        let lands_at = (self.now + self.draw(self.data_us)).max(after + 1);
        if let Some(p) = self.nodes[i].running.get_mut(&id).and_then(|r| r.packed.as_mut()) {
            p.lands_at = lands_at;
        }
        let slice = Slice { node: i, incarnation, id, key, room, push, slot, number, epoch, bytes };
        self.at(lands_at - self.now, What::LandSlice(slice));
    }

    pub(super) fn land_slice(&mut self, s: &Slice) {
        let alive = self.nodes[s.node].incarnation == s.incarnation;
        let own = self.nodes[s.node].running.get(&s.id).map(|r| r.own_epoch);
        if alive && own == Some(self.fences_of(s.node, s.key)) {
            self.check_released(s.node, s.room, s.push);
        }
        let back = PeerKey { incarnation: s.incarnation, direction: Direction::WeGrant };
        let dst = self.find(s.key.incarnation);
        let lands = dst.is_some_and(|dst| self.fences_of(dst, back) == s.epoch);
        if let Some(dst) = dst.filter(|_| lands) {
            self.check_slot(dst, back, s);
            self.nodes[dst].ring[s.slot as usize][..s.bytes.len()].copy_from_slice(&s.bytes);
        } else if alive && dst.is_some() {
            let reason = Reason::new(ReasonKind::FabricError, "the peer closed its endpoint");
            self.order(s.node, |n, now| n.handle_fabric_broken(now, s.key, &reason));
        }
        if alive {
            if let Some(r) = self.nodes[s.node].running.get_mut(&s.id) {
                r.in_flight -= 1;
                if lands {
                    let (id, slot, bytes, number) = (s.id, s.slot, s.bytes.len() as u64, s.number);
                    self.order(s.node, |n, now| n.handle_packed(now, id, slot, bytes, number));
                }
            }
            self.check_delivery(s.node, s.id);
        }
    }

    /// A slice must land in a slot that its sender was lent for its room, and that nobody reads.
    fn check_slot(&mut self, dst: usize, sender: PeerKey, s: &Slice) {
        let n = &self.nodes[dst];
        let slot = n.node.ring_slots().and_then(|ring| ring.slots().get(s.slot as usize).copied());
        let fine = matches!(slot, Some(Slot::Lent(l) | Slot::Quarantined(l))
            if l.peer == sender && l.room == s.room);
        if !fine {
            self.violations.push(format!(
                "t={}: a slice of room {} landed in slot {} of {}, which is {slot:?}",
                self.now, s.room, s.slot, n.name
            ));
        }
    }

    pub(super) fn start_unpacking(&mut self, i: usize, u: Unpacking) {
        let Unpacking { delivery, bytes, slice_bytes } = u;
        let Some(src) = self.find(delivery.peer.incarnation) else {
            let now = self.time();
            self.nodes[i].node.handle_delivery(now, delivery.id, DeliveryEnd::Aborted);
            return;
        };
        let (pieces, cuts) = sliced(self.cursor_of(src, i, &delivery), slice_bytes);
        assert_eq!(pieces.iter().map(|p| p.len).sum::<u64>(), bytes, "both sides make the same plan");
        let own_epoch = self.fences_of(i, delivery.peer);
        let packed = Some(Packed::new(cuts));
        let id = delivery.id;
        let running = Running { delivery, pieces, next: 0, in_flight: 0, aborted: false, own_epoch, packed };
        self.nodes[i].running.insert(id, running);
    }

    pub(super) fn landed(&mut self, i: usize, id: DeliveryId, slot: u32, bytes: u64) {
        let incarnation = self.nodes[i].incarnation;
        if let Some(p) = self.nodes[i].running.get_mut(&id).and_then(|r| r.packed.as_mut()) {
            p.slots.push_back((slot, bytes));
            let delay = self.draw((0, 400));
            self.at(delay, What::Unpack { node: i, incarnation, id });
        }
    }

    pub(super) fn unpack_slice(&mut self, i: usize, id: DeliveryId) {
        let Some(r) = self.nodes[i].running.get_mut(&id).filter(|r| !r.aborted) else { return };
        let Some(p) = &mut r.packed else { return };
        let (Some((slot, bytes)), Some(count)) = (p.slots.pop_front(), p.cuts.pop_front()) else { return };
        let batch: Vec<Piece> = r.pieces[r.next..r.next + count].to_vec();
        r.next += count;
        let room = r.delivery.room;
        assert_eq!(batch.iter().map(|p| p.len).sum::<u64>(), bytes, "both sides cut it alike");
        let mut at = 0;
        for p in &batch {
            self.check_page(i, room, p);
            let n = &mut self.nodes[i];
            let to = p.dst_off as usize..(p.dst_off + p.len) as usize;
            n.memory[p.dst_region as usize][to]
                .copy_from_slice(&n.ring[slot as usize][at..at + p.len as usize]);
            at += p.len as usize;
        }
        self.unpacked += 1;
        self.order(i, |n, now| n.handle_unpacked(now, id, slot));
        self.check_delivery(i, id);
    }
}
