//! Staging: our ring, the buffers that we pack into, and which pushes go packed.

mod measure;
mod ring;

use self::measure::{Likeness, PROBE_PIECES, PROBE_WAIT, Probe};
use self::ring::{Offer, RingMemory};
use super::{Driver, PeerKey, Retry};
use crate::carriers::Which;
use crate::clock;
use crate::config::{AgentConfig, Staging, StagingMode};
use crate::sched::Slice;
use kvxfer_fabric::{EpId, FabricError, Piece};
use kvxfer_proto::msg::MemKind;
use kvxfer_proto::node::{Delivery, DeliveryEnd, DeliveryId, Direction, Unpacking};
use kvxfer_proto::plan::{Cost, Cursor, Load, sample};
use kvxfer_proto::staging::MAX_SLOTS;
use kvxfer_proto::{Reason, ReasonKind, Time};
use std::collections::HashMap;

/// Buffers to pack into: twice what may be in flight to one peer.
const BUFFERS: usize = 16;
/// More of them, for measurements.
const SCRATCH: usize = 2;
/// Bytes of a slice at most, which is packed or unpacked in one go of the thread.
const MOST_BYTES: u64 = 16 << 20;
/// Kinds of peers whose costs are kept.
const COSTS: usize = 32;

/// A slice whose flush has not come back.
#[derive(Clone, Copy, Debug)]
pub(super) struct Ticket {
    pub(super) id: DeliveryId,
    pub(super) peer: PeerKey,
    pub(super) packed: Option<PackedSlice>,
}

/// What of it was packed.
#[derive(Clone, Copy, Debug)]
pub(super) struct PackedSlice {
    pub(super) slot: u32,
    /// Which slice of its delivery.
    pub(super) number: u64,
    pub(super) buffer: usize,
    pub(super) bytes: u64,
}

/// Buffers that we pack into, and write from.
#[derive(Debug)]
struct Buffers {
    local: u32,
    /// By which number pieces name it.
    fabric: u32,
    /// Which peer's write, over which endpoint, may still read each.
    users: Vec<Option<(PeerKey, EpId)>>,
}

/// The staging part of the driver.
#[derive(Debug)]
pub(super) struct Packer {
    config: Staging,
    /// Bytes of a buffer, and of a slice that we pack at most.
    slice_bytes: u64,
    /// There may be peers that can use a ring: by UCX, and what is to be packed and unpacked is the CPU's.
    may_offer: bool,
    ring: Option<RingMemory>,
    buffers: Option<Buffers>,
    probes: HashMap<u64, PeerKey>,
    /// What was measured, the latest first.
    costs: Vec<(Likeness, Cost)>,
    /// There is no memory for a ring.
    no_ring: bool,
}

/// A peer's ring, as we write to it.
#[derive(Debug)]
pub(super) struct Lane {
    /// By which number pieces name it.
    region: u32,
    /// Memory like the peer's pages, if those are not like the ring: for measurements.
    plain: Option<u32>,
    slot_bytes: u64,
    slots: u32,
    like: Likeness,
    /// Once it is measured.
    cost: Option<Cost>,
    probe: Option<Box<Probe>>,
    /// It could not be measured: it is not tried again.
    given_up: bool,
}

impl Packer {
    pub(super) fn new(config: &AgentConfig) -> Result<Self, String> {
        let Staging { mode, slots, slot_bytes } = config.staging;
        // One more than there are: the last is what peers measure with.
        let total = slot_bytes.checked_mul(u64::from(slots) + 1).filter(|t| *t < 1 << 40);
        let right = (1..=MAX_SLOTS).contains(&slots) && (4096..=MOST_BYTES).contains(&slot_bytes);
        if mode != StagingMode::Never && (!right || total.is_none()) {
            return Err(format!(
                "staging: {slots} slots of {slot_bytes} bytes: there may be 1 to {MAX_SLOTS} slots of 4096 to {MOST_BYTES} \
                 bytes, and less than 2^40 bytes in all"
            ));
        }
        let on_host = config.regions.iter().all(|r| r.kind == MemKind::Host);
        Ok(Self {
            config: config.staging,
            slice_bytes: config.slice_bytes.clamp(4096, MOST_BYTES),
            may_offer: config.fabric != crate::config::FabricChoice::Shm && on_host,
            ring: None,
            buffers: None,
            probes: HashMap::new(),
            costs: Vec::new(),
            no_ring: false,
        })
    }

    /// What `Describe` says of our ring.
    pub(super) fn offers(&self) -> (u64, u32) {
        match self.config.mode {
            StagingMode::Never => (0, 0),
            _ if !self.may_offer || self.no_ring => (0, 0),
            _ => (self.config.slot_bytes, self.config.slots),
        }
    }

    /// Whether there is a buffer for a slice to this peer.
    pub(super) fn has_buffer(&self, peer: PeerKey) -> bool {
        self.buffers.as_ref().is_some_and(|b| has_share(&b.users, peer))
    }

    fn take_buffer(&mut self, peer: PeerKey, ep: EpId) -> Option<usize> {
        let users = &mut self.buffers.as_mut()?.users;
        let free = users.iter().position(Option::is_none).filter(|_| has_share(users, peer))?;
        users[free] = Some((peer, ep));
        Some(free)
    }

    /// What writing to such a peer was found to take.
    fn known_cost(&self, like: &Likeness) -> Option<Cost> {
        self.costs.iter().find(|(known, _)| known == like).map(|(_, cost)| *cost)
    }

    /// Whether a peer of this kind is measured before it is answered. Only one is at a time: side by side they would measure
    /// each other.
    fn measures(&self, like: &Likeness) -> bool {
        self.config.mode == StagingMode::Auto && !self.is_probing() && self.known_cost(like).is_none()
    }

    fn learn_cost(&mut self, like: Likeness, cost: Cost) {
        self.costs.retain(|(known, _)| *known != like);
        self.costs.truncate(COSTS - 1);
        self.costs.insert(0, (like, cost));
    }

    pub(super) fn free_buffer(&mut self, buffer: usize) {
        if let Some(user) = self.buffers.as_mut().and_then(|b| b.users.get_mut(buffer)) {
            *user = None;
        }
    }

    /// No write to this peer is in flight any more.
    pub(super) fn free_buffers_of(&mut self, peer: PeerKey) {
        self.free_buffers(|user| user.0 == peer);
    }

    /// This endpoint is closed, whoever it led to.
    pub(super) fn free_buffers_at(&mut self, ep: EpId) {
        self.free_buffers(|user| user.1 == ep);
    }

    fn free_buffers(&mut self, of: impl Fn((PeerKey, EpId)) -> bool) {
        for user in self.buffers.iter_mut().flat_map(|b| &mut b.users).filter(|u| u.is_some_and(&of)) {
            *user = None;
        }
    }

    pub(super) fn drop_probe(&mut self, peer: PeerKey) {
        self.probes.retain(|_, key| *key != peer);
    }

    /// Peers may still write to the ring: its memory stays for ever, as pages do that were not released.
    pub(super) fn keep_ring(&mut self) {
        std::mem::forget(self.ring.take().map(|ring| (ring.span, ring.plain)));
    }

    pub(super) fn is_probing(&self) -> bool {
        !self.probes.is_empty()
    }

    pub(super) fn entries(&self) -> usize {
        let used = self.buffers.as_ref().map_or(0, |b| b.users.iter().flatten().count());
        self.probes.len() + used
    }
}

/// Whether a peer may have one more buffer: nobody has more than are left for the others, so that receivers that stall
/// leave some.
fn has_share(users: &[Option<(PeerKey, EpId)>], peer: PeerKey) -> bool {
    let free = users.iter().filter(|u| u.is_none()).count();
    users.iter().flatten().filter(|u| u.0 == peer).count() < free
}

impl Driver {
    /// A flow's slice is on its way.
    pub(super) fn in_flight(&mut self, ticket: u64, slice: Slice, packed: Option<PackedSlice>) {
        self.tickets.insert(ticket, Ticket { id: slice.id, peer: slice.peer, packed });
        if let Some(io) = self.peers.get_mut(&slice.peer) {
            io.in_flight += 1;
        }
    }

    /// A few pages of what moves with this peer.
    fn sample_of(&self, key: PeerKey) -> Option<Cursor> {
        let io = self.peers.get(&key)?;
        let (describe, endpoint) = (io.describe.as_ref()?, io.endpoint.as_ref()?);
        let (theirs, own) = (io.side()?, self.node.side());
        match key.direction {
            Direction::WeGrant => {
                sample(&endpoint.template, (&theirs, &describe.pages), (own, &self.me.pages))
            }
            Direction::TheyGrant => {
                sample(&endpoint.template, (own, &self.me.pages), (&theirs, &describe.pages))
            }
        }
    }

    fn need_buffers(&mut self) -> Result<(), FabricError> {
        if self.staging.buffers.is_none() {
            let (fabric, span) =
                self.carriers.add_memory(self.staging.slice_bytes * (BUFFERS + SCRATCH) as u64)?;
            let local = self.memory.add(&span)?;
            self.staging.buffers = Some(Buffers { local, fabric, users: vec![None; BUFFERS] });
        }
        Ok(())
    }

    /// Prefill's side: the peer has a ring. Begins to measure what writing to it takes; [`Driver::attached`] follows when
    /// that is done. False if nothing of the kind comes.
    pub(super) fn open_lane(&mut self, now: Time, key: PeerKey, offer: &[u8]) -> bool {
        // Nor can memory on a device be packed here.
        if self.staging.config.mode == StagingMode::Never || !self.staging.may_offer {
            return false;
        }
        match self.make_lane(key, offer) {
            Ok(opened) => opened && self.begin_probe(now, key),
            Err(e) => {
                tracing::warn!(error = %e, "a staging ring cannot be used: pushes of small runs go as single writes");
                false
            }
        }
    }

    fn make_lane(&mut self, key: PeerKey, offer: &[u8]) -> Result<bool, FabricError> {
        let io = self.peers.get(&key);
        let dims = io.and_then(|io| io.describe.as_ref()).map(|d| d.staging);
        let endpoint = io.and_then(|io| io.endpoint.as_ref()).filter(|e| e.which == Which::Ucx);
        let (Some((slot_bytes, slots)), Some(ep)) = (dims, endpoint.map(|e| e.ep)) else { return Ok(false) };
        let bad = |why: String| FabricError::BadBlob { what: "staging ring", why };
        let Some(offer) = Offer::decode(offer).map_err(|why| bad(why.to_owned()))? else {
            tracing::debug!("the peer plans in another order: nothing goes packed to it");
            return Ok(false);
        };
        let whole = u64::from(slots).checked_add(1).and_then(|n| n.checked_mul(slot_bytes));
        let Some(whole) = whole.filter(|_| slots > 0 && slot_bytes > 0) else {
            return Err(bad(format!("there is no ring of {slots} slots of {slot_bytes} bytes")));
        };
        self.need_buffers()?;
        let (region, len) = self.carriers.import_memory(ep, offer.ring)?;
        // Even if it is of no use: the key is taken in once for each endpoint.
        if let Some(io) = self.peers.get_mut(&key) {
            io.lane_tried = true;
        }
        let plain = if offer.plain.is_empty() {
            None
        } else {
            let (region, len) = self.carriers.import_memory(ep, offer.plain)?;
            if len < slot_bytes {
                return Err(bad(format!("{len} bytes to measure with, and slots of {slot_bytes}")));
            }
            Some(region)
        };
        if whole > len {
            let why = format!("{slots} slots of {slot_bytes} bytes and one more do not fit into {len} bytes");
            return Err(bad(why));
        }
        self.node.handle_peer_ring(key, slot_bytes, slots).map_err(|e| bad(e.to_string()))?;
        let mapped = self.carriers.window(Which::Ucx, ep, region, 0..slot_bytes).is_some();
        let like = self.likeness(key, slot_bytes, plain.is_some(), mapped);
        let cost = self.staging.known_cost(&like);
        let probe =
            if self.staging.measures(&like) { Some(self.new_probe(key, slot_bytes, true)?) } else { None };
        let measures = probe.is_some();
        if let Some(e) = self.peers.get_mut(&key).and_then(|io| io.endpoint.as_mut()) {
            e.lane = Some(Lane { region, plain, slot_bytes, slots, like, cost, probe, given_up: false });
        }
        Ok(measures)
    }

    /// A peer that came while another was measured is measured at its first push since.
    fn measure_now(&mut self, now: Time, key: PeerKey) {
        let lane = self.peers.get(&key).and_then(|io| io.endpoint.as_ref()?.lane.as_ref());
        let Some(lane) = lane.filter(|l| l.cost.is_none() && l.probe.is_none() && !l.given_up) else {
            return;
        };
        if !self.staging.measures(&lane.like) {
            return;
        }
        let probe = self.new_probe(key, lane.slot_bytes, false);
        let Some(lane) = self.lane_mut(key) else { return };
        match probe {
            Ok(probe) => {
                lane.probe = Some(probe);
                self.begin_probe(now, key);
            }
            Err(e) => {
                lane.given_up = true;
                tracing::warn!(error = %e, "what writing to a peer takes cannot be measured");
            }
        }
    }

    pub(super) fn lane_mut(&mut self, key: PeerKey) -> Option<&mut Lane> {
        self.peers.get_mut(&key)?.endpoint.as_mut()?.lane.as_mut()
    }

    fn begin_probe(&mut self, now: Time, key: PeerKey) -> bool {
        let measures = self.probe(now, key);
        if measures {
            self.retries.insert((now.after(PROBE_WAIT), Retry::Measure(key)));
        }
        measures
    }

    fn new_probe(&self, key: PeerKey, slot_bytes: u64, answers: bool) -> Result<Box<Probe>, FabricError> {
        let mut pieces = Vec::new();
        if let Some(mut cursor) = self.sample_of(key) {
            cursor.fill(&mut pieces, self.staging.slice_bytes.min(slot_bytes) / 2, PROBE_PIECES);
        }
        let first = self.first_pack(&pieces)?;
        Ok(Box::new(Probe::new(pieces, first, answers)))
    }

    /// Prefill's side: whether this delivery goes packed, and in slices of how many bytes at most.
    pub(super) fn packs(&mut self, now: Time, id: DeliveryId, key: PeerKey, cursor: &Cursor) -> Option<u64> {
        if key.direction != Direction::TheyGrant || cursor.total_bytes() == 0 {
            return None;
        }
        self.measure_now(now, key);
        let io = self.peers.get(&key)?;
        let lane = io.endpoint.as_ref()?.lane.as_ref()?;
        let slice_bytes = self.staging.slice_bytes.min(lane.slot_bytes);
        let load = Load::of(cursor);
        let (own, theirs) = (self.node.side().shard, io.describe.as_ref()?.shard);
        let ratio = |ours: u32, theirs: u32| ours.div_ceil(theirs.max(1)).max(1);
        let sources = ratio(own.tp_size, theirs.tp_size).saturating_mul(ratio(own.pp_size, theirs.pp_size));
        let wanted = match self.staging.config.mode {
            StagingMode::Never => false,
            StagingMode::Always => true,
            StagingMode::Auto => {
                // Another peer of its kind may have been measured meanwhile.
                let cost = lane.cost.or_else(|| self.staging.known_cost(&lane.like));
                cost.is_some_and(|c| c.prefers_packed(load, slice_bytes, sources))
            }
        };
        let slices = u32::try_from(load.bytes.div_ceil(slice_bytes)).unwrap_or(u32::MAX);
        let goes = wanted && self.node.handle_pack(now, id, load.bytes, slice_bytes, slices);
        if goes {
            self.stats.packed_deliveries += 1;
        } else {
            self.stats.direct_deliveries += 1;
        }
        goes.then_some(slice_bytes)
    }

    /// Packs a slice into a buffer of ours, writes it to the slot and asks for its flush.
    pub(super) fn pack_slice(
        &mut self,
        now: Time,
        slice: Slice,
        (slot, number): (u32, u64),
        pieces: &[Piece],
    ) {
        let lane = self.peers.get(&slice.peer).and_then(|io| io.endpoint.as_ref());
        let lane = lane.and_then(|e| Some((e.which, e.ep, e.lane.as_ref()?)));
        let place = lane.map(|(which, ep, l)| (which, ep, l.region, u64::from(slot) * l.slot_bytes));
        if let Some(bytes) = self.pack_near(lane.map(|(.., l)| l.slot_bytes), place, pieces) {
            self.stats.slices += 1;
            self.stats.writes += 1;
            self.stats.moved_bytes += bytes;
            self.stats.packed_bytes += bytes;
            self.node.handle_packed(now, slice.id, slot, bytes, number);
            let end = self.sched.flushed(slice.id);
            self.flow_over(now, slice.id, end);
            return;
        }
        let buffer = place.and_then(|(_, ep, ..)| self.staging.take_buffer(slice.peer, ep));
        let buffers = self.staging.buffers.as_ref().map(|b| (b.local, b.fabric));
        let (Some((which, ep, dst_region, dst_off)), Some(buffer), Some((local, fabric))) =
            (place, buffer, buffers)
        else {
            // No slice is made without an endpoint that has a lane, and a buffer.
            buffer.into_iter().for_each(|b| self.staging.free_buffer(b));
            self.sched.drop_flow(slice.id);
            self.node.handle_delivery(now, slice.id, DeliveryEnd::Aborted);
            return;
        };
        let src_off = buffer as u64 * self.staging.slice_bytes;
        let packed = match self.memory.pack(pieces, local, src_off..src_off + self.staging.slice_bytes) {
            Ok(bytes) => bytes,
            Err(e) => {
                self.staging.free_buffer(buffer);
                self.slice_failed(now, slice, which, &e);
                return;
            }
        };
        self.next_ticket += 1;
        let ticket = self.next_ticket;
        let write = Piece { src_region: fabric, src_off, dst_region, dst_off, len: packed };
        let posted = self.carriers.post(which, ep, &[write]);
        match posted.and_then(|()| self.carriers.flush(which, ep, ticket)) {
            Ok(()) => {
                self.stats.slices += 1;
                self.stats.writes += 1;
                self.stats.moved_bytes += packed;
                self.stats.packed_bytes += packed;
                self.in_flight(ticket, slice, Some(PackedSlice { slot, number, buffer, bytes: packed }));
            }
            Err(e) => {
                // Else the buffer stays in use until the endpoint is closed: the write may be under way.
                if matches!(e, FabricError::OutOfBounds { .. }) {
                    self.staging.free_buffer(buffer);
                }
                self.slice_failed(now, slice, which, &e);
            }
        }
    }

    /// Packs a slice into the slot itself, if the ring is mapped here: that is one copy less. `None` if it is not, or if the
    /// pieces cannot be packed, of which the other way tells.
    fn pack_near(
        &mut self,
        slot_bytes: Option<u64>,
        place: Option<(Which, EpId, u32, u64)>,
        pieces: &[Piece],
    ) -> Option<u64> {
        let ((which, ep, region, off), slot_bytes) = place.zip(slot_bytes)?;
        let end = off.checked_add(slot_bytes)?;
        // It counts as in flight for as long as it takes.
        self.stats.link.tick(clock::now(), true);
        let window = self.carriers.window(which, ep, region, off..end);
        let packed = window.and_then(|window| self.memory.pack_into(pieces, &window).ok());
        self.stats.link.tick(clock::now(), !self.tickets.is_empty());
        packed
    }

    /// Decode's side: a push comes packed.
    pub(super) fn begin_unpacking(&mut self, now: Time, unpacking: Unpacking) {
        let Unpacking { delivery, bytes, slice_bytes } = unpacking;
        let Delivery { id, peer: key, room, push, request } = delivery;
        let io = self.peers.get(&key);
        let known = io.and_then(|io| Some((io.endpoint.as_ref()?, io.describe.as_ref()?)));
        let Some((endpoint, describe)) = known else {
            self.node.handle_delivery(now, id, DeliveryEnd::Aborted);
            return;
        };
        match Cursor::new(endpoint.template.clone(), request, &describe.pages, &self.me.pages) {
            Ok(cursor) if cursor.total_bytes() == bytes => {
                self.sched.add_unpacking(id, key, room, cursor, slice_bytes);
            }
            Ok(cursor) => {
                let text = format!(
                    "room {room}: push {} comes packed with {bytes} bytes, but has {}",
                    push.0,
                    cursor.total_bytes()
                );
                let reason = Reason::new(ReasonKind::ProtocolError, text);
                self.node.handle_delivery(now, id, DeliveryEnd::Failed(reason));
            }
            Err(e) => {
                let reason = Reason::new(ReasonKind::PageError, format!("room {room}: push {}: {e}", push.0));
                self.node.handle_delivery(now, id, DeliveryEnd::Failed(reason));
            }
        }
    }

    /// Copies a slice out of its slot into the room's pages.
    pub(super) fn unpack_slice(&mut self, now: Time, slice: Slice, slot: u32, bytes: u64, pieces: &[Piece]) {
        let from = u64::from(slot) * self.staging.config.slot_bytes;
        let total: u64 = pieces.iter().map(|p| p.len).sum();
        let ring = self.staging.ring.as_ref().map(|r| r.local);
        let done = match ring {
            Some(local) if total == bytes => self
                .memory
                .unpack(pieces, local, from..from + bytes)
                .map_err(|e| Reason::new(ReasonKind::FabricError, format!("room {}: {e}", slice.room))),
            _ => Err(Reason::new(
                ReasonKind::ProtocolError,
                format!("room {}: slot {slot} has {bytes} bytes of a slice of {total}", slice.room),
            )),
        };
        match done {
            Ok(bytes) => {
                self.stats.slices += 1;
                self.stats.unpacked_bytes += bytes;
            }
            Err(reason) => {
                self.failures.insert(slice.id, reason);
                self.sched.abort(slice.id);
            }
        }
        self.node.handle_unpacked(now, slice.id, slot);
        let end = self.sched.flushed(slice.id);
        self.flow_over(now, slice.id, end);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvxfer_fabric::RegionSpan;
    use kvxfer_proto::Incarnation;

    fn key(n: u64) -> PeerKey {
        PeerKey { incarnation: Incarnation(n), direction: Direction::TheyGrant }
    }

    /// As many as may be in flight to each, whether they come back or not.
    fn fill(users: &mut [Option<(PeerKey, EpId)>], peer: PeerKey) -> usize {
        let mut taken = 0;
        while has_share(users, peer)
            && let Some(free) = users.iter_mut().find(|u| u.is_none())
        {
            *free = Some((peer, EpId(1)));
            taken += 1;
        }
        taken
    }

    #[test]
    fn receivers_that_stall_leave_buffers_for_the_others() {
        let mut users = vec![None; BUFFERS];
        let taken: Vec<usize> = (0..5).map(|n| fill(&mut users, key(n))).collect();
        assert_eq!(taken, [8, 4, 2, 1, 1]);
        assert!(!has_share(&users, key(9)));
        users[0] = None;
        assert!(has_share(&users, key(9)) && !has_share(&users, key(0)), "who has fewest comes first");
    }

    fn packer(mode: StagingMode) -> Packer {
        let shard = kvxfer_proto::Shard { tp_rank: 0, tp_size: 1, pp_rank: 0, pp_size: 1 };
        let side = kvxfer_proto::Side { groups: Vec::new(), shard };
        let mut config = AgentConfig::new("prefill", side, Vec::new(), Vec::new());
        config.staging.mode = mode;
        Packer::new(&config).unwrap()
    }

    fn like(transports: &str, run_bytes: u64) -> Likeness {
        Likeness {
            transports: transports.to_owned(),
            near: true,
            run_bytes,
            slice_bytes: 1 << 18,
            plain: false,
            mapped: false,
        }
    }

    fn cost(put_ns: f64) -> Cost {
        Cost {
            put_ns,
            put_byte_ns: 0.0,
            slot_ns: 0.0,
            slot_byte_ns: 0.0,
            pack_row_ns: 0.0,
            pack_byte_ns: 0.0,
            unpack_row_ns: 0.0,
            unpack_byte_ns: 0.0,
            trip_ns: 0.0,
        }
    }

    #[test]
    fn a_kind_of_peer_is_measured_once_and_one_peer_at_a_time() {
        let mut p = packer(StagingMode::Auto);
        let (tcp, posix) = (like("tcp", 256), like("posix", 256));
        let far = Likeness { near: false, ..like("tcp", 256) };
        let plain = Likeness { plain: true, ..like("tcp", 256) };
        let mapped = Likeness { mapped: true, ..like("tcp", 256) };
        assert!(p.measures(&tcp) && p.measures(&posix));
        p.probes.insert(1, key(1));
        assert!(!p.measures(&tcp) && !p.measures(&posix), "while another is");
        p.drop_probe(key(2));
        assert!(!p.measures(&posix), "somebody else's end");
        p.drop_probe(key(1));
        assert!(p.measures(&tcp), "given up, so nothing is known");
        p.learn_cost(tcp.clone(), cost(1.0));
        assert!(!p.measures(&tcp) && p.known_cost(&tcp).is_some());
        for other in [&posix, &like("tcp", 512), &far, &plain, &mapped] {
            assert!(p.measures(other) && p.known_cost(other).is_none(), "{other:?}");
        }
    }

    #[test]
    fn what_was_measured_first_is_forgotten_first() {
        let mut p = packer(StagingMode::Auto);
        for n in 0..=COSTS as u64 {
            p.learn_cost(like("tcp", n), cost(1.0));
        }
        assert!(p.known_cost(&like("tcp", 0)).is_none() && p.known_cost(&like("tcp", 1)).is_some());
        p.learn_cost(like("tcp", 1), cost(2.0));
        assert_eq!((p.costs.len(), p.known_cost(&like("tcp", 1))), (COSTS, Some(cost(2.0))));
    }

    #[test]
    fn a_ring_that_peers_may_still_write_outlives_the_agent() {
        for kept in [true, false] {
            let backing = kvxfer_fabric::shm::ShmPool::alloc(4096).unwrap();
            let memory = std::sync::Arc::downgrade(&backing);
            let span =
                RegionSpan { addr: backing.addr(), len: 4096, kind: MemKind::Host, backing: Some(backing) };
            let mut p = packer(StagingMode::Auto);
            p.ring = Some(RingMemory { local: 0, offer: Vec::new(), span, plain: None });
            if kept {
                p.keep_ring();
            }
            drop(p);
            assert_eq!(memory.upgrade().is_some(), kept);
        }
    }

    #[test]
    fn who_decides_for_itself_measures_nobody() {
        for mode in [StagingMode::Always, StagingMode::Never] {
            assert!(!packer(mode).measures(&like("tcp", 256)));
        }
    }
}
