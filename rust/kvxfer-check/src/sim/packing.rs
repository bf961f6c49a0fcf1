//! Deliveries that go packed, as the staging part of the driver in `kvxfer-engine` carries them out.

use super::SimOptions;
use super::agent::Agent;
use super::geometry::ix;
use super::lane::{Slice, Slots, Work};
use super::world::World;
use kvxfer_fabric::sim::SplitMix64;
use kvxfer_fabric::{Fabric, Piece};
use kvxfer_proto::node::{DeliveryEnd, DeliveryId, Direction, Mover, PeerKey, Unpacking};
use kvxfer_proto::plan::Cursor;
use kvxfer_proto::staging::Slot;
use kvxfer_proto::{Reason, ReasonKind, Time};
use std::collections::BTreeMap;

/// Buffers to pack into.
const BUFFERS: u32 = 8;

/// Whether a seed's agents have rings: slots of how many bytes, and how many slots.
pub(super) fn draw(options: &SimOptions) -> Option<(u64, u32)> {
    // Of its own, so that a seed's other draws are what they are without rings.
    let mut rng = SplitMix64::new(options.seed ^ 0x7061_636B_696E_6773);
    let pick = |rng: &mut SplitMix64, from: [u64; 4]| from[ix(rng.between(0, 3))];
    let has = options.mover == Mover::Sender && rng.coin();
    has.then(|| (pick(&mut rng, [24, 48, 96, 96]), u32::try_from(pick(&mut rng, [1, 2, 4, 8])).unwrap_or(1)))
}

/// Regions beside those of the pages: the ring, and the buffers.
pub(super) fn region_lens(staging: Option<(u64, u32)>) -> impl Iterator<Item = u64> {
    staging.into_iter().flat_map(|(bytes, slots)| [bytes * u64::from(slots), bytes * u64::from(BUFFERS)])
}

/// A packed slice whose flush has not come back.
#[derive(Clone, Copy, Debug)]
struct Packed {
    peer: PeerKey,
    slot: u32,
    number: u64,
    buffer: usize,
    bytes: u64,
}

/// What an agent has packed.
#[derive(Debug)]
pub(super) struct Packing {
    buffers: Vec<Option<PeerKey>>,
    tickets: BTreeMap<u64, Packed>,
    /// Of each delivery, the slices that the node has heard of, and what is flushed and comes after one that is not.
    told: BTreeMap<DeliveryId, (u64, BTreeMap<u64, Packed>)>,
}

impl Default for Packing {
    fn default() -> Self {
        Self { buffers: vec![None; ix(u64::from(BUFFERS))], tickets: BTreeMap::new(), told: BTreeMap::new() }
    }
}

impl Packing {
    /// Nobody has more buffers than are left for the others.
    pub(super) fn has_buffer(&self, peer: PeerKey) -> bool {
        let count = |of| self.buffers.iter().filter(|user| **user == of).count();
        count(Some(peer)) < count(None)
    }

    fn take_buffer(&mut self, peer: PeerKey) -> Option<usize> {
        let free = self.buffers.iter().position(Option::is_none)?;
        self.buffers[free] = Some(peer);
        Some(free)
    }

    pub(super) fn forget_tickets_of(&mut self, peer: PeerKey) {
        self.tickets.retain(|_, p| p.peer != peer);
    }

    /// This delivery has ended.
    pub(super) fn over(&mut self, id: DeliveryId) {
        self.told.remove(&id);
    }

    /// The endpoint to this peer is closed: no write reads them any more.
    pub(super) fn free_buffers_of(&mut self, peer: PeerKey) {
        self.buffers.iter_mut().filter(|user| **user == Some(peer)).for_each(|user| *user = None);
    }
}

impl Agent {
    /// The number of the ring among this agent's regions; the buffers' is the next.
    fn ring_region(&self) -> u32 {
        u32::try_from(self.geo.regions.len()).unwrap_or(u32::MAX)
    }

    /// If this ticket was of a packed slice, the node hears of it: in order, as flushes of one endpoint come back over UCX.
    /// Here they are noticed in any.
    pub(super) fn packed(&mut self, now: Time, id: DeliveryId, ticket: u64) {
        let Some(p) = self.packing.tickets.remove(&ticket) else { return };
        self.packing.buffers[p.buffer] = None;
        let (next, early) = self.packing.told.entry(id).or_default();
        early.insert(p.number, p);
        while let Some(p) = early.remove(next) {
            *next += 1;
            self.node.handle_packed(now, id, p.slot, p.bytes, p.number);
        }
    }
}

impl World<'_> {
    /// Decode's side: whether peers may write to slots.
    pub(super) fn offer_ring(&mut self, i: usize) -> Option<Vec<u8>> {
        let (bytes, slots) = self.staging?;
        self.agents[i].node.handle_ring(bytes, slots).ok()?;
        Some(Vec::new())
    }

    /// Prefill's side: the peer has a ring.
    pub(super) fn take_ring(&mut self, i: usize, key: PeerKey, offered: bool) {
        if let Some((bytes, slots)) = self.staging.filter(|_| offered)
            && let Err(e) = self.agents[i].node.handle_peer_ring(key, bytes, slots)
        {
            self.log.violation(self.now, format_args!("a ring cannot be used: {e}"));
        }
    }

    /// Whether a delivery goes packed: most do, where there are rings.
    pub(super) fn packs(&mut self, i: usize, id: DeliveryId, key: PeerKey, cursor: &Cursor) -> Option<Slots> {
        let (slot_bytes, _) = self.staging?;
        let bytes = cursor.total_bytes();
        if key.direction != Direction::TheyGrant || bytes == 0 || self.chance(4) {
            return None;
        }
        let slices = u32::try_from(bytes.div_ceil(slot_bytes)).unwrap_or(u32::MAX);
        let now = self.time();
        let goes = self.agents[i].node.handle_pack(now, id, bytes, slot_bytes, slices);
        goes.then(|| Slots::none(slot_bytes))
    }

    /// Decode's side: a push comes packed.
    pub(super) fn begin_unpacking(&mut self, i: usize, unpacking: Unpacking) {
        let Unpacking { delivery: d, bytes, slice_bytes } = unpacking;
        let now = self.time();
        let a = &mut self.agents[i];
        let io = a.peers.get(&d.peer);
        let known = io.and_then(|io| Some((io.endpoint.as_ref()?.template.clone(), io.describe.as_ref()?)));
        let Some((template, describe)) = known else {
            a.node.handle_delivery(now, d.id, DeliveryEnd::Aborted);
            return;
        };
        let cursor = Cursor::new(template, d.request, &describe.pages, &a.geo.counts);
        let why = match cursor {
            Ok(cursor) if cursor.total_bytes() == bytes => {
                a.lane.add(d.id, d.peer, d.room, cursor, Work::Unpack(Slots::none(slice_bytes)));
                return;
            }
            Ok(cursor) => format!("it has {} bytes, and {bytes} are to come", cursor.total_bytes()),
            Err(e) => e.to_string(),
        };
        let text = format!("{} cannot unpack room {}: {why}", a.name, d.room);
        self.log.violation(self.now, format_args!("{text}"));
        let reason = Reason::new(ReasonKind::ProtocolError, text);
        self.agents[i].node.handle_delivery(now, d.id, DeliveryEnd::Failed(reason));
    }

    /// Packs a slice into a buffer and writes it to its slot.
    pub(super) fn pack(&mut self, i: usize, slice: &Slice, slot: u32, number: u64) {
        let (now, key) = (self.time(), slice.peer);
        let Some((slot_bytes, _)) = self.staging else { return };
        let a = &mut self.agents[i];
        let ep = a.peers.get(&key).and_then(|io| io.endpoint.as_ref()).map(|e| e.ep);
        let describe = a.peers.get(&key).and_then(|io| io.describe.as_ref());
        let dst_region = describe.map(|d| u32::try_from(d.regions.len()).unwrap_or(u32::MAX));
        let (Some(ep), Some(dst_region), Some(buffer)) = (ep, dst_region, a.packing.take_buffer(key)) else {
            a.lane.drop_flow(slice.id);
            a.node.handle_delivery(now, slice.id, DeliveryEnd::Aborted);
            return;
        };
        let node = a.fabric.node();
        let read = |p: &Piece| self.net.read(node, p.src_region, p.src_off, p.len).unwrap_or_default();
        let packed: Vec<u8> = slice.pieces.iter().flat_map(read).collect();
        let (bytes, src_off) = (packed.len() as u64, buffer as u64 * slot_bytes);
        let src_region = a.ring_region() + 1;
        let stored = self.net.write(node, src_region, src_off, &packed);
        let piece =
            Piece { src_region, src_off, dst_region, dst_off: u64::from(slot) * slot_bytes, len: bytes };
        let ticket = a.fresh_ticket();
        self.log.line(
            self.now,
            format_args!(
                "{} packs {bytes} bytes of room {} into slot {slot} (ticket {ticket})",
                a.name, slice.room
            ),
        );
        match stored.and_then(|()| a.fabric.post(ep, &[piece])).and_then(|()| a.fabric.flush(ep, ticket)) {
            Ok(()) => {
                a.tickets.insert(ticket, (slice.id, key));
                a.packing.tickets.insert(ticket, Packed { peer: key, slot, number, buffer, bytes });
                if let Some(io) = a.peers.get_mut(&key) {
                    io.in_flight += 1;
                }
            }
            Err(e) => self.endpoint_broke(i, key, &e),
        }
    }

    /// Takes a slice out of its slot into the room's pages.
    pub(super) fn unpack(&mut self, i: usize, slice: &Slice, slot: u32, bytes: u64) {
        let now = self.time();
        let Some((slot_bytes, _)) = self.staging else { return };
        let a = &self.agents[i];
        let (node, ring) = (a.fabric.node(), a.ring_region());
        let total: u64 = slice.pieces.iter().map(|p| p.len).sum();
        if total != bytes {
            let text = format!("{}: slot {slot} has {bytes} bytes of a slice of {total}", a.name);
            self.log.violation(self.now, format_args!("{text}"));
        }
        let of = slice.peer.incarnation;
        let from = self.agents.iter().position(|a| a.incarnation == of || a.past.contains(&of)).unwrap_or(i);
        let mut at = u64::from(slot) * slot_bytes;
        for p in &slice.pieces {
            let part = self.net.read(node, ring, at, p.len).unwrap_or_default();
            if let Err(e) = self.net.write(node, p.dst_region, p.dst_off, &part) {
                self.log.violation(self.now, format_args!("unpacked out of bounds: {e}"));
            }
            at += p.len;
        }
        for p in &slice.pieces {
            self.check_landed(from, i, p.dst_region, p.dst_off, p.len);
        }
        self.tally.slices_unpacked += 1;
        let a = &mut self.agents[i];
        a.node.handle_unpacked(now, slice.id, slot);
        let end = a.lane.flushed(slice.id);
        self.flow_over(i, slice.id, end);
    }

    /// A packed slice has landed: in a slot that its sender was lent, and that nobody reads yet.
    pub(super) fn check_slot(&mut self, from: usize, to: usize, offset: u64, len: u64) {
        let Some((slot_bytes, _)) = self.staging else { return };
        let slot = offset / slot_bytes;
        let is = self.agents[to].node.ring_slots().and_then(|r| r.slots().get(ix(slot)).copied());
        let sender = &self.agents[from];
        let by = |who| sender.incarnation == who || sender.past.contains(&who);
        let may = matches!(is, Some(Slot::Lent(l) | Slot::Quarantined(l)) if by(l.peer.incarnation));
        let (here, there) = (self.agents[to].name.clone(), sender.name.clone());
        self.log.line(
            self.now,
            format_args!("a slice of {there} lands at {here}: slot {slot}, {len} bytes, {is:?}"),
        );
        if !may {
            self.tally.late_writes += 1;
            self.log.violation(
                self.now,
                format_args!(
                    "late write: {there} wrote {len} bytes into slot {slot} of {here}, which is {is:?}"
                ),
            );
        }
    }
}
