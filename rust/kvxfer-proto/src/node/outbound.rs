//! Rooms that this side pushes (prefill), or was granted before its engine pushed.

mod ending;
mod orders;
mod packed;
mod sums;

use super::coverage::intersect;
use super::parts::Progress;
use super::types::{Delivery, DeliveryEnd, DeliveryId, Flaw, Mover, Push, Stage};
use super::{Action, DeliveryFor, Node, PeerKey, Timer, pages_needed};
use crate::error::{Reason, ReasonKind};
use crate::ids::{PushId, Room, Seq, Time};
use crate::layout::PageLayout;
use crate::msg::{Copied, Done, Drained, Grant, Msg, Owed, Ready, Verify};
use crate::plan::Request;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::Duration;

/// One push's piece for one destination.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
enum Part {
    /// Our writes are under way.
    Writing(DeliveryId),
    /// It is delivered, and our bytes of it are being summed.
    Summing {
        id: DeliveryId,
        /// What the writes came to.
        bytes: u64,
        writes: u64,
        /// The destination was told that it may read.
        offered: bool,
    },
    /// The push was taken back while its writes, or its sum, were under way.
    Stopping,
    /// The destination was told that it may read.
    Offered,
    /// Delivered, and the destination was told.
    Done,
    /// Taken back.
    Void,
}

/// One destination rank.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(super) struct Dest {
    seq: Seq,
    tokens: (u64, u64),
    /// `None`: a null grant.
    owed: Option<Owed>,
    pages: Vec<Arc<[u32]>>,
    /// What it wants summed.
    verify: Verify,
    parts: BTreeMap<PushId, Part>,
    /// Pushes that the destination may still be reading: summing what was written, or unpacking what went packed.
    unread: BTreeSet<PushId>,
    /// `Done { last }` is out.
    last_sent: bool,
    /// The destination ended the room well, or wants nothing.
    finished: bool,
    /// The last sequence number that a cancel voided, and whether we have answered it.
    drained: bool,
    cancelled_upto: Seq,
}

impl Dest {
    /// Whether our writes, or a sum, may still read the source's pages.
    fn is_writing(&self) -> bool {
        self.parts.values().any(|p| matches!(p, Part::Writing(_) | Part::Summing { .. } | Part::Stopping))
    }
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct OutPush {
    order: Push,
    retracted: bool,
    /// Every destination has its last word on this push.
    reported: bool,
}

/// A room that is pushed from here.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(super) struct Outbound {
    /// The caller here knows the room.
    pub(super) local: bool,
    pushes: BTreeMap<PushId, OutPush>,
    last: Option<PushId>,
    pub(super) dests: BTreeMap<PeerKey, Dest>,
    /// How many destination ranks grant, null or not; known from the first grant.
    ranks: Option<u32>,
    pub(super) progress: Progress,
    failure: Option<Reason>,
    /// The caller knows that the sources' pages are free.
    pub(super) released: bool,
}

impl Outbound {
    /// For checkers: the sequence numbers that this room names of a peer's grant.
    pub(super) fn seqs_of(&self, key: PeerKey) -> Option<impl Iterator<Item = Seq> + use<>> {
        let named = self.dests.get(&key).map(|d| [d.seq, d.cancelled_upto])?;
        Some(named.into_iter().filter(|seq| seq.0 > 0))
    }

    /// For checkers: so much was taken off every sequence number with this peer.
    pub(super) fn renumber_seqs(&mut self, key: PeerKey, off: u64) {
        if let Some(d) = self.dests.get_mut(&key) {
            d.seq.0 = d.seq.0.saturating_sub(off);
            d.cancelled_upto.0 = d.cancelled_upto.0.saturating_sub(off);
        }
    }

    fn new(now: Time, bootstrap: Duration, waiting: Duration) -> Self {
        Self {
            local: false,
            pushes: BTreeMap::new(),
            last: None,
            dests: BTreeMap::new(),
            ranks: None,
            progress: Progress::new(now, bootstrap, waiting),
            failure: None,
            released: false,
        }
    }

    pub(super) fn depends_on(&self, key: PeerKey) -> bool {
        self.dests.get(&key).is_some_and(|d| d.owed.is_some() && !d.finished && !d.drained)
    }

    /// Whether this room was granted early by these peers and no other.
    pub(super) fn is_early_of(&self, of: impl Fn(&PeerKey) -> bool) -> bool {
        !self.local && self.dests.keys().all(of)
    }

    pub(super) fn pages(&self) -> Vec<Arc<[u32]>> {
        self.pushes.values().flat_map(|p| p.order.pages.iter().cloned()).collect()
    }

    /// The highest number of a delivery that is known here, for checkers.
    pub(super) fn highest_delivery(&self) -> u64 {
        let ids = self.dests.values().flat_map(|d| d.parts.values()).filter_map(|p| match p {
            Part::Writing(id) | Part::Summing { id, .. } => Some(id.0),
            _ => None,
        });
        ids.max().unwrap_or(0)
    }

    fn end_token(&self) -> u64 {
        self.pushes.values().filter(|p| !p.retracted).map(|p| p.order.tokens.1).max().unwrap_or(0)
    }

    fn is_writing(&self) -> bool {
        self.dests.values().any(Dest::is_writing)
    }

    fn is_finished(&self) -> bool {
        self.last.is_some()
            && self.ranks.is_some_and(|n| self.dests.len() as u64 == u64::from(n))
            && self.dests.values().all(|d| d.finished)
    }
}

/// The first so many pages.
fn cut(list: &Arc<[u32]>, need: u64) -> Arc<[u32]> {
    match usize::try_from(need).ok().and_then(|need| list.get(..need)) {
        Some(head) if head.len() < list.len() => Arc::from(head),
        _ => list.clone(),
    }
}

/// What a destination has to know of a push's page lists to make the same plan: the lists, which may be longer than the
/// piece needs, and the end of their tokens where a group holds only the last ones.
fn offered_pages(
    groups: &[PageLayout],
    pages: &[Arc<[u32]>],
    pushed: (u64, u64),
    span: &Owed,
) -> (Vec<Arc<[u32]>>, Option<u64>) {
    let pages = pages.iter().zip(groups).map(|(list, layout)| {
        let first = layout.held(pushed.0..pushed.1).start;
        cut(list, pages_needed(layout.page_tokens.into(), first, span.tokens.1))
    });
    let partial = groups.iter().any(|g| g.last_tokens().is_some());
    (pages.collect(), partial.then_some(pushed.1))
}

fn page_count(lists: &[Arc<[u32]>]) -> u64 {
    lists.iter().map(|list| list.len() as u64).sum()
}

impl Node {
    pub(super) fn grant_arrived(&mut self, now: Time, key: PeerKey, g: Grant) {
        let room = g.room;
        if self.granted_again(now, key, &g) {
            return;
        }
        let dead = self.tombs.get(room).map(|tomb| tomb.reason.clone());
        self.heard_of(room, key, Some(g.ranks));
        let refusal = if let Some(reason) = dead {
            self.counters.stale_refused += 1;
            Some(reason)
        } else if self.inbound.contains_key(&room) {
            Some(Reason::new(
                ReasonKind::RoomInUse,
                format!("room {room} is expected by the agent that it was granted to"),
            ))
        } else if self.closing {
            Some(Reason::new(ReasonKind::Closed, "the prefill agent was closed"))
        } else if !self.outbound.contains_key(&room) && self.early_rooms >= self.cfg.early_grants {
            let text =
                format!("{} granted rooms already wait for a push on this prefill agent", self.early_rooms);
            self.counters.limited += 1;
            Some(Reason::new(ReasonKind::Unhealthy, text))
        } else if let Some(text) = self.too_early(key, &g) {
            self.counters.limited += 1;
            Some(Reason::new(ReasonKind::Unhealthy, text))
        } else {
            self.bad_grant(&g)
        };
        if let Some(reason) = refusal {
            if g.owed.is_some() {
                self.queue(now, key, Msg::Drained(Drained { room, seq: g.seq, reason }));
            }
            return;
        }
        if !self.outbound.contains_key(&room) {
            // A room that only a peer knows waits no longer than one of our caller's would.
            let longest = self.cfg.bootstrap_timeout.saturating_add(self.cfg.waiting_timeout);
            let longest = super::patience(Some(longest), longest);
            let waiting = Duration::from_micros(g.deadline_us).min(longest);
            let r = Outbound::new(now, waiting, waiting);
            self.timers.set(r.progress.patience.at, Timer::Outbound(room));
            self.early_rooms += 1;
            self.outbound.insert(room, r);
        }
        let Some(r) = self.outbound.get_mut(&room) else { return };
        if r.failure.is_some() || r.ranks.is_some_and(|n| n != g.ranks) {
            let reason = r.failure.clone().unwrap_or_else(|| {
                Reason::new(
                    ReasonKind::RoomInUse,
                    format!("room {room} was granted by an engine of another size"),
                )
            });
            if g.owed.is_some() {
                self.queue(now, key, Msg::Drained(Drained { room, seq: g.seq, reason }));
            }
            return;
        }
        r.ranks = Some(g.ranks);
        if !r.local
            && let Some(peer) = self.peers.get_mut(&key)
        {
            let (rooms, pages) = peer.early;
            peer.early = (rooms + 1, pages.saturating_add(page_count(&g.pages)));
        }
        r.dests.insert(
            key,
            Dest {
                seq: g.seq,
                tokens: g.tokens,
                finished: g.owed.is_none(),
                owed: g.owed,
                pages: g.pages,
                verify: g.verify,
                unread: BTreeSet::new(),
                parts: BTreeMap::new(),
                last_sent: false,
                drained: false,
                cancelled_upto: Seq(0),
            },
        );
        if r.local {
            if r.progress.advance(now, Stage::Waiting) {
                self.actions.push_back(Action::Stage(room, Stage::Waiting));
            }
            r.progress.touch(now);
            self.timers.set(r.progress.patience.at, Timer::Outbound(room));
        }
        if self.cfg.flaw != Some(Flaw::GrantWakesNobody) {
            self.pump_room(now, room);
        }
    }

    /// A grant of a rank that has granted this room before; whether it was one. The room fails, and the answer to the
    /// new grant waits for the writes of the old one: it says that none of this rank's pages is written any more.
    fn granted_again(&mut self, now: Time, key: PeerKey, g: &Grant) -> bool {
        let room = g.room;
        let Some(dest) = self.outbound.get_mut(&room).and_then(|r| r.dests.get_mut(&key)) else {
            return false;
        };
        if dest.owed.is_none() && g.owed.is_none() {
            // Said again, since a fence may have swallowed it.
            dest.seq = g.seq;
            return true;
        }
        dest.cancelled_upto = dest.cancelled_upto.max(g.seq);
        dest.finished = false;
        dest.drained = false;
        if dest.owed.is_none() {
            dest.owed.clone_from(&g.owed);
        }
        let text = format!("room {room} was granted by this rank already");
        self.fail_outbound_by(now, room, Reason::new(ReasonKind::RoomInUse, text), Some(key));
        self.settle_outbound(now, room);
        self.heard_of(room, key, Some(g.ranks));
        true
    }

    /// Why this peer may not grant one more room that nothing was pushed for yet: nobody may use up another's share.
    fn too_early(&self, key: PeerKey, g: &Grant) -> Option<String> {
        if self.outbound.get(&g.room).is_some_and(|r| r.local) {
            return None;
        }
        let (rooms, pages) = self.peers.get(&key)?.early;
        let (most, most_pages) = (self.cfg.early_grants_per_peer, self.cfg.early_pages_per_peer);
        (rooms >= most || pages.saturating_add(page_count(&g.pages)) > most_pages).then(|| {
            format!(
                "room {}: {rooms} rooms with {pages} pages that this peer granted wait for a push already; {most} rooms \
                 and {most_pages} pages may (early_grants_per_peer, early_pages_per_peer)",
                g.room
            )
        })
    }

    /// A room that peers had granted early has been pushed, or has failed: it counts no more against them.
    fn not_early(&mut self, room: Room) {
        let Some(r) = self.outbound.get(&room) else { return };
        for (key, dest) in &r.dests {
            if let Some(peer) = self.peers.get_mut(key) {
                let (rooms, pages) = peer.early;
                peer.early = (rooms.saturating_sub(1), pages.saturating_sub(page_count(&dest.pages)));
            }
        }
    }

    fn bad_grant(&self, g: &Grant) -> Option<Reason> {
        let owed = g.owed.as_ref()?;
        let text = if g.pages.len() != self.side.groups.len() {
            format!("{} page lists for {} groups", g.pages.len(), self.side.groups.len())
        } else if owed.tokens.0 > owed.tokens.1 || owed.tokens.0 < g.tokens.0 || owed.tokens.1 > g.tokens.1 {
            format!("tokens {:?} are not within the room's {:?}", owed.tokens, g.tokens)
        } else if owed.layers.0 > owed.layers.1 {
            format!("layers {:?} end before they begin", owed.layers)
        } else {
            return None;
        };
        Some(Reason::new(ReasonKind::ProtocolError, format!("room {}: bad grant: {text}", g.room)))
    }

    pub(super) fn outbound_attached(&mut self, now: Time, key: PeerKey) {
        for room in
            self.outbound.iter().filter(|(_, r)| r.depends_on(key)).map(|(room, _)| *room).collect::<Vec<_>>()
        {
            self.pump_room(now, room);
        }
    }

    /// Starts whatever pushes and grants of the room have met; ends the room if all is done.
    fn pump_room(&mut self, now: Time, room: Room) {
        let Some(r) = self.outbound.get(&room) else { return };
        if r.failure.is_some() {
            return;
        }
        if r.last.is_some() {
            let end = r.end_token();
            let clash = r.dests.iter().find(|(_, d)| d.owed.is_some() && d.tokens.1 != end);
            if let Some((key, d)) = clash {
                let text = format!(
                    "room {room}: {} expects tokens up to {}, but prefill pushed tokens up to {end}: give both sides the same end",
                    self.peer_name(*key),
                    d.tokens.1
                );
                self.fail_outbound(now, room, Reason::new(ReasonKind::TokensMismatch, text));
                return;
            }
        }
        for key in r.dests.keys().copied().collect::<Vec<_>>() {
            self.pump_dest(now, room, key);
        }
        self.maybe_succeed_outbound(now, room);
    }

    fn pump_dest(&mut self, now: Time, room: Room, key: PeerKey) {
        let Some(mover) = self.peers.get(&key).and_then(|p| p.attached) else { return };
        let all_layers = self.own_layers();
        let Some(r) = self.outbound.get_mut(&room) else { return };
        let Some(dest) = r.dests.get_mut(&key) else { return };
        let Some(owed) = dest.owed.clone() else { return };
        // Writes of a push that was taken back may still land, or the destination may be summing them: what replaces
        // them has to wait for that.
        if dest.finished
            || dest.last_sent
            || dest.drained
            || dest.parts.values().any(|p| *p == Part::Stopping)
            || dest.unread.iter().any(|id| r.pushes.get(id).is_some_and(|p| p.retracted))
        {
            return;
        }
        let mut begun = Vec::new();
        for (id, p) in r.pushes.iter().filter(|(_, p)| !p.retracted && p.order.ready) {
            if dest.parts.contains_key(id) {
                continue;
            }
            let pushed = Owed { layers: p.order.layers.unwrap_or(all_layers), tokens: p.order.tokens };
            let Some(span) = intersect(&owed, &pushed) else {
                dest.parts.insert(*id, Part::Done);
                continue;
            };
            begun.push((*id, span, p.order.pages.clone(), p.order.tokens));
        }
        let moving = !begun.is_empty();
        let (seq, dst_pages, dst_tokens) = (dest.seq, dest.pages.clone(), dest.tokens.0..dest.tokens.1);
        let mut too_early = Vec::new();
        let groups = self.side.groups.clone();
        for (push, span, pages, pushed) in begun {
            let part = match mover {
                Mover::Sender => {
                    let id = self.next_delivery(DeliveryFor::Outbound(room, key, push));
                    self.actions.push_back(Action::Deliver(Delivery {
                        id,
                        peer: key,
                        room,
                        push,
                        request: Request {
                            src_pages: pages,
                            src_tokens: pushed.0..pushed.1,
                            dst_pages: dst_pages.clone(),
                            dst_tokens: dst_tokens.clone(),
                            tokens: span.tokens.0..span.tokens.1,
                            layers: span.layers.0..span.layers.1,
                        },
                    }));
                    if self.cfg.flaw == Some(Flaw::SuccessBeforeFlush) {
                        too_early.push((push, id));
                    }
                    Part::Writing(id)
                }
                Mover::Receiver => {
                    let (pages, pages_end) = offered_pages(&groups, &pages, pushed, &span);
                    let pages_start = pushed.0;
                    let ready = Ready { room, seq, push, span, pages_start, pages, pages_end };
                    self.queue(now, key, Msg::Ready(ready));
                    Part::Offered
                }
            };
            if let Some(d) = self.outbound.get_mut(&room).and_then(|r| r.dests.get_mut(&key)) {
                d.parts.insert(push, part);
            }
        }
        let Some(r) = self.outbound.get_mut(&room) else { return };
        if moving && r.local {
            if r.progress.advance(now, Stage::Transferring) {
                self.actions.push_back(Action::Stage(room, Stage::Transferring));
            }
            r.progress.touch(now);
            self.timers.set(r.progress.patience.at, Timer::Outbound(room));
        }
        for (push, id) in too_early {
            self.deliveries.remove(&id);
            self.part_moved(now, room, key, push, 0, 0);
        }
        self.send_empty_last(now, room, key);
    }

    /// The last push brought nothing for this destination, and all before it is delivered: say so.
    fn send_empty_last(&mut self, now: Time, room: Room, key: PeerKey) {
        let Some(r) = self.outbound.get_mut(&room) else { return };
        let (Some(last), end_token) = (r.last, r.end_token()) else { return };
        let meta = r.pushes.get(&last).and_then(|p| p.order.meta.clone());
        let pushes: Vec<PushId> = r.pushes.iter().filter(|(_, p)| !p.retracted).map(|(id, _)| *id).collect();
        let Some(dest) = r.dests.get_mut(&key) else { return };
        let done = pushes.iter().all(|id| dest.parts.get(id) == Some(&Part::Done));
        let Some(owed) = dest.owed.as_ref().filter(|_| done && !dest.last_sent && !dest.finished) else {
            return;
        };
        let span = Owed { layers: (owed.layers.0, owed.layers.0), tokens: (owed.tokens.0, owed.tokens.0) };
        dest.last_sent = true;
        let done = Done {
            room,
            seq: dest.seq,
            push: last,
            span,
            last: true,
            end_token,
            meta,
            checksum: None,
            bytes: 0,
            writes: 0,
        };
        self.queue(now, key, Msg::Done(done));
    }

    fn own_layers(&self) -> (u32, u32) {
        let shard = self.side.shard;
        let ranges = self.side.groups.iter().map(|g| shard.layers(g)).filter(|r| !r.is_empty());
        ranges.fold((u32::MAX, 0), |(a, b), r| (a.min(r.start), b.max(r.end)))
    }

    /// A part has arrived: the destination is told what, and whether that was all.
    fn part_done(
        &mut self,
        now: Time,
        (room, key, push): (Room, PeerKey, PushId),
        (bytes, writes): (u64, u64),
        checksum: Option<u64>,
    ) {
        let all_layers = self.own_layers();
        let Some(r) = self.outbound.get_mut(&room) else { return };
        r.progress.count(bytes, writes);
        r.progress.touch(now);
        let end_token = r.end_token();
        let Some(p) = r.pushes.get(&push) else { return };
        let pushed = Owed { layers: p.order.layers.unwrap_or(all_layers), tokens: p.order.tokens };
        let standing: Vec<PushId> =
            r.pushes.iter().filter(|(_, p)| !p.retracted).map(|(id, _)| *id).collect();
        let meta = r.last.and_then(|l| r.pushes.get(&l)).and_then(|p| p.order.meta.clone());
        let last_known = r.last.is_some();
        let Some(dest) = r.dests.get_mut(&key) else { return };
        let Some(span) = dest.owed.as_ref().and_then(|o| intersect(o, &pushed)) else { return };
        dest.parts.insert(push, Part::Done);
        let last = last_known && standing.iter().all(|id| dest.parts.get(id) == Some(&Part::Done));
        dest.last_sent |= last;
        let done = Done {
            room,
            seq: dest.seq,
            push,
            span,
            last,
            end_token: if last { end_token } else { 0 },
            meta: meta.filter(|_| last),
            checksum,
            bytes,
            writes,
        };
        self.queue(now, key, Msg::Done(done));
    }

    pub(super) fn outbound_delivery(
        &mut self,
        now: Time,
        room: Room,
        key: PeerKey,
        push: PushId,
        end: DeliveryEnd,
    ) {
        let Some(r) = self.outbound.get_mut(&room) else { return };
        let failed = r.failure.is_some();
        let Some(dest) = r.dests.get_mut(&key) else { return };
        let was = dest.parts.insert(push, Part::Void);
        if failed {
            self.settle_outbound(now, room);
            return;
        }
        match (was, end) {
            (Some(Part::Stopping), _) => {
                // It may have been delivered whole before the stop; the destination was not told, so it does not count.
                self.report_retracted(room);
                self.pump_room(now, room);
            }
            (_, DeliveryEnd::Complete { bytes, writes }) => {
                self.part_moved(now, room, key, push, bytes, writes);
            }
            (Some(Part::Summing { bytes, writes, offered, .. }), DeliveryEnd::Summed(sum)) => {
                if !offered && let Some(d) = self.outbound.get_mut(&room).and_then(|r| r.dests.get_mut(&key))
                {
                    d.unread.insert(push);
                }
                self.part_done(now, (room, key, push), (bytes, writes), Some(sum));
            }
            (_, DeliveryEnd::Summed(_)) => self.fail_outbound(now, room, super::unasked_sum(room)),
            (_, DeliveryEnd::Failed(reason)) => self.fail_outbound(now, room, reason),
            (_, DeliveryEnd::Aborted) => {
                let text = format!("room {room}: the writes of push {} were stopped", push.0);
                self.fail_outbound(now, room, Reason::new(ReasonKind::FabricError, text));
            }
        }
    }

    pub(super) fn copied_arrived(&mut self, now: Time, key: PeerKey, m: Copied) {
        let dest = self
            .outbound
            .get_mut(&m.room)
            .filter(|r| r.failure.is_none())
            .and_then(|r| r.dests.get_mut(&key))
            .filter(|d| d.seq == m.seq && !d.drained);
        let Some(dest) = dest else {
            self.counters.stale_refused += 1;
            return;
        };
        if dest.unread.remove(&m.push) {
            // What replaces it, if it was taken back, may be written now.
            self.pump_room(now, m.room);
            return;
        }
        let part = dest.parts.get(&m.push);
        if part != Some(&Part::Offered) {
            // A push that was taken back no longer stands: its bytes are not confirmed.
            self.counters.stale_refused += 1;
            return;
        }
        match m.error {
            Some(reason) => self.fail_outbound_by(now, m.room, reason, Some(key)),
            None => self.part_moved(now, m.room, key, m.push, 0, 0),
        }
    }
}
