//! How the bytes of a delivery travel, and what is checked of each write.

use super::{Net, What};
use kvxfer_proto::node::{Delivery, DeliveryEnd, DeliveryId, Direction, Event, EventKind, Mover, PeerKey};
use kvxfer_proto::plan::{Cursor, Piece, Template};
use kvxfer_proto::{Incarnation, PushId, Reason, ReasonKind, Room};
use std::sync::Arc;

/// A delivery under way.
pub struct Running {
    pub(super) delivery: Delivery,
    pub(super) pieces: Vec<Piece>,
    pub(super) next: usize,
    pub(super) in_flight: usize,
    pub(super) aborted: bool,
    /// Fences of ours when it began.
    pub(super) own_epoch: u64,
    /// If it goes, or comes, packed.
    pub(super) packed: Option<super::packed::Packed>,
}

/// Bytes on their way, read when they were posted.
#[derive(Clone)]
pub struct Write {
    node: usize,
    incarnation: Incarnation,
    id: DeliveryId,
    key: PeerKey,
    room: Room,
    push: PushId,
    /// The peer's fences when our endpoint was made.
    epoch: u64,
    bytes: Vec<(Piece, Vec<u8>)>,
}

impl Net {
    pub(super) fn start_delivery(&mut self, i: usize, delivery: Delivery) {
        let Some(peer) = self.find(delivery.peer.incarnation) else {
            let now = self.time();
            self.nodes[i].node.handle_delivery(now, delivery.id, DeliveryEnd::Aborted);
            return;
        };
        let (src, dst) = if self.mover == Mover::Sender { (i, peer) } else { (peer, i) };
        let template = Template::new(&self.nodes[src].side, &self.nodes[dst].side).expect("fits");
        let cursor = Cursor::new(
            Arc::new(template),
            delivery.request.clone(),
            &self.nodes[src].page_counts,
            &self.nodes[dst].page_counts,
        );
        let mut pieces = Vec::new();
        match cursor {
            Ok(mut c) => while c.fill(&mut pieces, 1 << 20, 64) {},
            Err(e) => {
                let reason = Reason::new(ReasonKind::PageError, e.to_string());
                self.order(i, |n, now| n.handle_delivery(now, delivery.id, DeliveryEnd::Failed(reason)));
                return;
            }
        }
        let id = delivery.id;
        let incarnation = self.nodes[i].incarnation;
        let own_epoch = self.fences_of(i, delivery.peer);
        let packed = self.goes_packed(i, &delivery, &mut pieces);
        let goes_packed = packed.is_some();
        let running = Running { delivery, pieces, next: 0, in_flight: 0, aborted: false, own_epoch, packed };
        self.nodes[i].running.insert(id, running);
        if goes_packed {
            return;
        }
        self.at(1, What::Post { node: i, incarnation, id });
    }

    pub(super) fn post(&mut self, i: usize, id: DeliveryId) {
        let slices = 1 + self.rng.below(4) as usize;
        let incarnation = self.nodes[i].incarnation;
        let Some(r) = self.nodes[i].running.get_mut(&id) else { return };
        if r.aborted {
            self.check_delivery(i, id);
            return;
        }
        let end = (r.next + slices).min(r.pieces.len());
        let batch: Vec<Piece> = r.pieces[r.next..end].to_vec();
        r.next = end;
        let more = end < r.pieces.len();
        let (key, room, push) = (r.delivery.peer, r.delivery.room, r.delivery.push);
        if !batch.is_empty() {
            r.in_flight += 1;
            let src = if self.mover == Mover::Sender { Some(i) } else { self.find(key.incarnation) };
            let bytes = batch.into_iter().map(|p| (p, self.read(src, &p))).collect();
            let epoch = self.nodes[i].attached_epoch.get(&key).copied().unwrap_or(0);
            // A copy of our own ends with our processor; a write lands when it lands, whatever happens to its process.
            let range = if self.mover == Mover::Sender { self.data_us } else { self.copy_us };
            let delay = self.draw(range);
            self.at(delay, What::Land(Write { node: i, incarnation, id, key, room, push, epoch, bytes }));
        }
        if more {
            let delay = self.draw(self.data_us);
            self.at(delay, What::Post { node: i, incarnation, id });
        } else {
            self.check_delivery(i, id);
        }
    }

    /// The source's bytes of a piece; none if its process is gone.
    pub(super) fn read(&self, src: Option<usize>, p: &Piece) -> Vec<u8> {
        src.map_or(Vec::new(), |s| {
            self.nodes[s].memory[p.src_region as usize][p.src_off as usize..(p.src_off + p.len) as usize]
                .to_vec()
        })
    }

    pub(super) fn land(&mut self, w: &Write) {
        let alive = self.nodes[w.node].incarnation == w.incarnation;
        match self.mover {
            Mover::Sender => self.land_write(w, alive),
            Mover::Receiver => self.land_copy(w, alive),
        }
        if alive {
            if let Some(r) = self.nodes[w.node].running.get_mut(&w.id) {
                r.in_flight -= 1;
            }
            self.check_delivery(w.node, w.id);
        }
    }

    fn land_write(&mut self, w: &Write, alive: bool) {
        if alive {
            self.check_source(w);
        }
        let Some(dst) = self.find(w.key.incarnation) else { return };
        let back = PeerKey { incarnation: w.incarnation, direction: Direction::WeGrant };
        if self.fences_of(dst, back) == w.epoch {
            self.store(dst, w);
        } else if alive {
            let reason = Reason::new(ReasonKind::FabricError, "the peer closed its endpoint");
            self.order(w.node, |n, now| n.handle_fabric_broken(now, w.key, &reason));
        }
    }

    fn land_copy(&mut self, w: &Write, alive: bool) {
        if !alive || !self.nodes[w.node].running.contains_key(&w.id) || self.is_fenced(w) {
            return;
        }
        if w.bytes.iter().all(|(p, data)| p.len as usize == data.len()) {
            self.store(w.node, w);
        } else if let Some(r) = self.nodes[w.node].running.get_mut(&w.id) {
            // The source's process is gone: the copy fails.
            r.aborted = true;
        }
    }

    fn store(&mut self, dst: usize, w: &Write) {
        for (p, data) in &w.bytes {
            self.check_page(dst, w.room, p);
            let to = &mut self.nodes[dst].memory[p.dst_region as usize];
            to[p.dst_off as usize..(p.dst_off + p.len) as usize].copy_from_slice(data);
            self.writes_landed += 1;
        }
    }

    /// How often a node has fenced a peer.
    pub(super) fn fences_of(&self, i: usize, key: PeerKey) -> u64 {
        self.nodes[i].endpoint_epoch.get(&key).copied().unwrap_or(0)
    }

    /// Whether the node that moves these bytes has fenced the peer since the delivery began.
    fn is_fenced(&self, w: &Write) -> bool {
        let running = self.nodes[w.node].running.get(&w.id);
        running.is_some_and(|r| r.own_epoch != self.fences_of(w.node, w.key))
    }

    /// A write in flight reads its source's pages: they must not have been given back.
    fn check_source(&mut self, w: &Write) {
        if !self.nodes[w.node].running.contains_key(&w.id) || self.is_fenced(w) {
            return;
        }
        self.check_released(w.node, w.room, w.push);
    }

    /// The source's pages of this push are still held.
    pub(super) fn check_released(&mut self, node: usize, room: Room, push: PushId) {
        let n = &self.nodes[node];
        let frees = |e: &&Event| match &e.kind {
            EventKind::Retracted(of) => *of == push,
            _ => true,
        };
        if let Some(e) = n.events.iter().filter(|e| e.room == room && e.released).find(frees) {
            self.violations.push(format!(
                "t={}: a write of room {room}, push {} of {} is in flight after {:?} released its source",
                self.now, push.0, n.name, e.kind
            ));
        }
    }

    /// A write must land on pages that its room holds.
    pub(super) fn check_page(&mut self, dst: usize, room: Room, p: &Piece) {
        let n = &self.nodes[dst];
        let shape = n.side.regions(&n.page_counts).unwrap()[p.dst_region as usize];
        let page = (p.dst_off / (shape.len / u64::from(n.page_counts[shape.group as usize]))) as u32;
        let owner = n.node.page_owner(shape.group as usize, page);
        if owner != Some(room) {
            self.violations.push(format!(
                "t={}: a write of room {room} landed on page {page} of {}, which {owner:?} holds",
                self.now, n.name
            ));
        }
    }

    /// Reports the end of a delivery once nothing of it is in flight.
    pub(super) fn check_delivery(&mut self, i: usize, id: DeliveryId) {
        let Some(r) = self.nodes[i].running.get(&id) else { return };
        if r.in_flight > 0 || (!r.aborted && r.next < r.pieces.len()) {
            return;
        }
        let end = if r.aborted {
            DeliveryEnd::Aborted
        } else {
            DeliveryEnd::Complete {
                bytes: r.pieces.iter().map(|p| p.len).sum(),
                writes: r.pieces.len() as u64,
            }
        };
        self.nodes[i].running.remove(&id);
        self.order(i, |n, now| n.handle_delivery(now, id, end));
    }
}
