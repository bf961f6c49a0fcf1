//! What writing to a peer takes, and copying: measured before it is answered.

use super::{BUFFERS, Driver, PeerKey};
use crate::carriers::Which;
use crate::driver::peers::Endpoint;
use kvxfer_fabric::{EpId, FabricError, LocalMemory, Piece};
use kvxfer_proto::Time;
use kvxfer_proto::msg::Msg;
use kvxfer_proto::plan::{Cost, Load};
use std::time::{Duration, Instant};

/// Pieces of a probe, and how often each kind is measured; the best counts, since all else is somebody else's work.
pub(super) const PROBE_PIECES: usize = 512;
const PROBE_ROUNDS: u32 = 4;
/// Parts of them that are timed by themselves.
const FIRST_PARTS: usize = 16;
/// Large writes of a probe.
const PROBE_LARGE: u64 = 4;
/// What takes longer than this is dear whatever another round of it says.
const PROBE_SLOW: Duration = Duration::from_millis(20);
/// The kinds of writes that are measured, in this order: one of a word, a push's runs, large ones to slots, large ones to pages.
const TRIP: u32 = 0;
const SMALL: u32 = 1;
const TO_SLOTS: u32 = 2;
const TO_PAGES: u32 = 3;
/// And messages on the control channel.
const WORDS: u32 = 4;
/// A measurement that takes longer is given up: pushes go as single writes then.
pub(super) const PROBE_WAIT: Duration = Duration::from_secs(2);

/// What makes writing to two peers take the same: the transports, the same host or not, the size of runs and of slices.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Likeness {
    pub(super) transports: String,
    pub(super) near: bool,
    pub(super) run_bytes: u64,
    pub(super) slice_bytes: u64,
    /// Its pages are memory that UCX has not allocated.
    pub(super) plain: bool,
    /// Its ring is mapped here.
    pub(super) mapped: bool,
}

/// A measurement under way.
#[derive(Debug)]
pub(super) struct Probe {
    pieces: Vec<Piece>,
    /// Bytes of all pieces.
    bytes: u64,
    /// What packing them took when they were first read: later they are in a cache, as pages of a push are not.
    first: Duration,
    step: u32,
    started: Instant,
    trip: Duration,
    small: Duration,
    to_slots: Duration,
    to_pages: Duration,
    /// Of messages to the peer and back, on the control channel.
    words: Vec<Duration>,
    /// The peer waits for it to be over.
    answers: bool,
}

impl Probe {
    pub(super) fn new(pieces: Vec<Piece>, first: Duration, answers: bool) -> Self {
        Self {
            bytes: pieces.iter().map(|p| p.len).sum(),
            pieces,
            first,
            step: 0,
            started: Instant::now(),
            trip: Duration::MAX,
            small: Duration::MAX,
            to_slots: Duration::MAX,
            to_pages: Duration::MAX,
            words: Vec::new(),
            answers,
        }
    }
}

fn ns(d: Duration) -> f64 {
    d.as_secs_f64() * 1e9
}

#[expect(clippy::cast_precision_loss, reason = "an estimate")]
fn float(n: u64) -> f64 {
    n as f64
}

fn median(times: &mut [Duration]) -> Duration {
    times.sort_unstable();
    times.get(times.len() / 2).copied().unwrap_or_default()
}

/// The best of a few goes.
fn best(mut go: impl FnMut() -> Result<u64, FabricError>) -> Result<Duration, FabricError> {
    let mut best = Duration::MAX;
    for _ in 0..PROBE_ROUNDS {
        let began = Instant::now();
        go()?;
        best = best.min(began.elapsed());
    }
    Ok(best)
}

impl Driver {
    /// What packing these pieces takes while they are in no cache. Each can be read for the first time only once, so that
    /// parts of them are timed, and the median taken: one at which the thread was not running says nothing.
    pub(super) fn first_pack(&self, pieces: &[Piece]) -> Result<Duration, FabricError> {
        let Some(local) = self.staging.buffers.as_ref().map(|b| b.local) else { return Ok(Duration::ZERO) };
        let scratch = self.staging.slice_bytes * BUFFERS as u64;
        // The buffer's own first touch is not what is asked for.
        let slice = self.staging.slice_bytes;
        let whole =
            Piece { src_region: local, src_off: scratch + slice, dst_region: local, dst_off: 0, len: slice };
        self.memory.pack(&[whole], local, scratch..scratch + slice)?;
        let size = pieces.len().div_ceil(FIRST_PARTS).max(1);
        let mut took = Vec::new();
        for part in pieces.chunks(size) {
            let began = Instant::now();
            self.memory.pack(part, local, scratch..scratch + self.staging.slice_bytes)?;
            took.push(began.elapsed());
        }
        let parts = u32::try_from(took.len()).unwrap_or(1);
        Ok(median(&mut took) * parts)
    }

    /// The next writes of a measurement, into the part of the ring that is for that. False if there are none.
    pub(super) fn probe(&mut self, now: Time, key: PeerKey) -> bool {
        let Some(buffers) = self.staging.buffers.as_ref().map(|b| b.fabric) else { return false };
        let slice = self.staging.slice_bytes;
        let scratch = slice * BUFFERS as u64;
        let Some(endpoint) = self.peers.get_mut(&key).and_then(|io| io.endpoint.as_mut()) else {
            return false;
        };
        let Endpoint { which, ep, lane: Some(lane), .. } = endpoint else { return false };
        let (which, ep): (Which, EpId) = (*which, *ep);
        let Some(probe) = &mut lane.probe else { return false };
        let slots = (lane.region, u64::from(lane.slots) * lane.slot_bytes);
        let pages = lane.plain.map_or(slots, |region| (region, 0));
        let most = slice.min(lane.slot_bytes);
        let piece = |src_off, (dst_region, dst_off), len| Piece {
            src_region: buffers,
            src_off,
            dst_region,
            dst_off,
            len,
        };
        let large = |to| (0..PROBE_LARGE).map(|n| piece(scratch + n % 2 * slice, to, most)).collect();
        let batch: Vec<Piece> = match probe.step / PROBE_ROUNDS {
            TRIP => vec![piece(scratch, slots, 8)],
            SMALL => {
                // As far apart as their own length: pages hold other heads between.
                let (dst_region, mut at) = pages;
                let place = |p: &Piece| {
                    let dst_off = at;
                    at += 2 * p.len;
                    Piece { dst_region, dst_off, ..*p }
                };
                probe.pieces.iter().map(place).collect()
            }
            TO_SLOTS => large(slots),
            TO_PAGES => large(pages),
            WORDS => Vec::new(),
            _ => {
                self.probe_over(now, key);
                return true;
            }
        };
        probe.started = Instant::now();
        self.next_ticket += 1;
        let ticket = self.next_ticket;
        if batch.is_empty() {
            self.staging.probes.insert(ticket, key);
            self.send_session(key, Msg::Ping(ticket));
            return true;
        }
        let posted = self.carriers.post(which, ep, &batch);
        match posted.and_then(|()| self.carriers.flush(which, ep, ticket)) {
            Ok(()) => {
                self.staging.probes.insert(ticket, key);
            }
            Err(e) => self.endpoint_broke(now, key, &e),
        }
        true
    }

    /// The peer has answered a ping: ours, or the node's.
    pub(in crate::driver) fn ponged(&mut self, now: Time, key: PeerKey, n: u64) {
        if self.staging.probes.get(&n) == Some(&key) {
            self.probed(now, n, &Ok(()));
        }
    }

    /// A new session asks for what the last one did not live to see: a measurement under way goes on. False if none is.
    pub(in crate::driver) fn probe_again(&mut self, now: Time, key: PeerKey) -> bool {
        let probe = self.peers.get(&key).and_then(|io| io.endpoint.as_ref()?.lane.as_ref()?.probe.as_ref());
        let Some(step) = probe.map(|p| p.step / PROBE_ROUNDS) else { return false };
        // The end of a write comes whatever becomes of the session; only a word was lost with it.
        if step < WORDS && self.staging.probes.values().any(|k| *k == key) {
            return true;
        }
        self.staging.drop_probe(key);
        self.probe(now, key)
    }

    /// A measurement whose end does not come is given up, and the peer answered without it.
    pub(in crate::driver) fn stop_measuring(&mut self, now: Time, key: PeerKey) {
        let Some(lane) = self.lane_mut(key) else { return };
        let Some(probe) = lane.probe.take() else { return };
        lane.given_up = true;
        tracing::warn!("measuring what writes to a peer take was given up: its pushes go as single writes");
        self.staging.drop_probe(key);
        if probe.answers {
            self.attached(now, key);
        }
    }

    /// What peers this one is like.
    pub(super) fn likeness(&self, key: PeerKey, slot_bytes: u64, plain: bool, mapped: bool) -> Likeness {
        let run_bytes = self.sample_of(key).map_or(0, |c| Load::of(&c).run_bytes());
        let io = self.peers.get(&key);
        Likeness {
            transports: io.and_then(|io| io.endpoint.as_ref()).map_or_else(String::new, |e| e.info.clone()),
            near: io.is_some_and(|io| io.near),
            run_bytes,
            slice_bytes: self.staging.slice_bytes.min(slot_bytes),
            plain,
            mapped,
        }
    }

    /// A measurement's flush has come back.
    pub(in crate::driver) fn probed(&mut self, now: Time, ticket: u64, result: &Result<(), FabricError>) {
        let Some(key) = self.staging.probes.remove(&ticket) else { return };
        if let Err(e) = result {
            self.endpoint_broke(now, key, e);
            return;
        }
        let endpoint = self.peers.get_mut(&key).and_then(|io| io.endpoint.as_mut());
        let Some(probe) = endpoint.and_then(|e| e.lane.as_mut()).and_then(|l| l.probe.as_mut()) else {
            return;
        };
        let took = probe.started.elapsed();
        let kind = probe.step / PROBE_ROUNDS;
        match kind {
            TRIP => probe.trip = probe.trip.min(took),
            SMALL => probe.small = probe.small.min(took),
            TO_SLOTS => probe.to_slots = probe.to_slots.min(took),
            TO_PAGES => probe.to_pages = probe.to_pages.min(took),
            _ => probe.words.push(took),
        }
        probe.step =
            if took > PROBE_SLOW && kind < WORDS { (kind + 1) * PROBE_ROUNDS } else { probe.step + 1 };
        self.probe(now, key);
    }

    /// Everything about writing is measured: what copying takes, too, and then the peer may be answered.
    fn probe_over(&mut self, now: Time, key: PeerKey) {
        let slice = self.staging.slice_bytes;
        let Some(local) = self.staging.buffers.as_ref().map(|b| b.local) else { return };
        let endpoint = self.peers.get_mut(&key).and_then(|io| io.endpoint.as_mut());
        let Some(lane) = endpoint.and_then(|e| e.lane.as_mut()) else { return };
        let Some(mut probe) = lane.probe.take() else { return };
        let most = slice.min(lane.slot_bytes);
        // Rows are packed into the slot itself then.
        let near = lane.like.mapped;
        match copies(&self.memory, &probe.pieces, local, slice) {
            Ok((pack, unpack, plain)) if !probe.pieces.is_empty() && probe.bytes > 0 => {
                let (runs, bytes) = (float(probe.pieces.len() as u64), float(probe.bytes));
                let of_large =
                    |took: Duration| ns(took.saturating_sub(probe.trip)) / float(most * PROBE_LARGE);
                let put_byte_ns = of_large(probe.to_pages);
                let byte_ns = ns(plain) / float(slice);
                let row = |took: Duration, byte_ns: f64| ((ns(took) - bytes * byte_ns) / runs).max(0.0);
                // Of memory that is in no cache, at either end: a single write has to wait for both.
                let cold = ns(probe.first.saturating_sub(pack)) / runs;
                let put_ns = row(probe.small.saturating_sub(probe.trip), put_byte_ns) + 2.0 * cold;
                let cost = Cost {
                    put_ns,
                    put_byte_ns,
                    // A write of a word, and the wait for its end, take longer than a write by itself.
                    slot_ns: if near { 0.0 } else { put_ns.min(ns(probe.trip)) },
                    slot_byte_ns: if near { 0.0 } else { of_large(probe.to_slots) },
                    pack_row_ns: row(pack, byte_ns) + cold,
                    pack_byte_ns: byte_ns,
                    unpack_row_ns: row(unpack, byte_ns) + cold,
                    unpack_byte_ns: byte_ns,
                    // Not the best: what wakes a thread, or keeps it from running, is part of it.
                    trip_ns: ns(median(&mut probe.words)),
                };
                tracing::debug!(?cost, "measured");
                lane.cost = Some(cost);
                self.staging.learn_cost(lane.like.clone(), cost);
            }
            Ok(_) => lane.given_up = true,
            Err(e) => {
                lane.given_up = true;
                tracing::warn!(error = %e, "what copying takes cannot be measured");
            }
        }
        if probe.answers {
            self.attached(now, key);
        }
    }
}

/// What it takes to pack these pieces, to unpack as many, and to copy a slice as it is: the best of a few goes each.
fn copies(
    memory: &LocalMemory,
    pieces: &[Piece],
    local: u32,
    slice: u64,
) -> Result<(Duration, Duration, Duration), FabricError> {
    let first = slice * BUFFERS as u64;
    let scratch = first..first + slice;
    let pack = best(|| memory.pack(pieces, local, scratch.clone()))?;
    // Our own pages are not to be written: to the same distances in the buffers.
    let mut at = scratch.end;
    let place = |p: &Piece| {
        let dst_off = at;
        at += 2 * p.len;
        Piece { dst_region: local, dst_off, ..*p }
    };
    let apart: Vec<Piece> = pieces.iter().map(place).collect();
    let unpack = best(|| memory.unpack(&apart, local, scratch.clone()))?;
    let whole = Piece {
        src_region: local,
        src_off: scratch.end,
        dst_region: local,
        dst_off: scratch.end,
        len: slice,
    };
    let plain = best(|| memory.pack(&[whole], local, scratch.clone()))?;
    Ok((pack, unpack, plain))
}
