//! Rooms that this side expects (decode): grants out, coverage in, pages back under the contract.

mod checks;
mod ending;
mod packed;

use super::coverage::{CoverError, Coverage};
use super::parts::Progress;
use super::sources::SourceRank;
use super::types::{Delivery, DeliveryEnd, DeliveryId, EventKind, Expect, Mover, Source, Stage};
use super::{Action, DeliveryFor, Node, PeerKey, Timer, enough_pages, patience};
use crate::error::{Reason, ReasonKind};
use crate::ids::{PushId, Room, Seq, Time};
use crate::msg::{Copied, Done, Grant, Msg, Owed, Ready, Retract, Verify};
use crate::plan::Request;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;

/// Pieces that one rank may deliver a room in: a bound on memory and time, far above layers times chunks.
const BOX_LIMIT: usize = 1 << 16;

fn too_many(room: Room) -> Reason {
    Reason::new(ReasonKind::ProtocolError, format!("room {room}: more than {BOX_LIMIT} pieces from one rank"))
}

/// What one prefill rank was granted.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct InGrant {
    seq: Seq,
    /// Link number of the grant message; zero once its link has started afresh.
    number: u64,
    /// Position of the rank in its source.
    rank: usize,
    /// `None` for a null grant.
    owed: Option<Owed>,
    coverage: Coverage,
    /// Copies under way (receiver copies), by the source's push.
    copies: BTreeMap<PushId, DeliveryId>,
    /// Copies of pushes that were taken back, which have not stopped yet.
    stopping: BTreeSet<DeliveryId>,
    /// Pushes that wait for those to stop: an old copy must not land on a new one.
    deferred: Vec<Ready>,
    /// What we copied and have not yet been told stands (receiver copies).
    copied: BTreeMap<PushId, Owed>,
    /// What was said to be done and is not summed yet, in the order in which it came; the first of them under way.
    checks: VecDeque<Done>,
    checking: Option<DeliveryId>,
    /// Pushes that come, or came, packed and are not counted yet.
    packed: BTreeMap<PushId, packed::Packing>,
    /// Everything came, and the rank said that it was all.
    complete: bool,
    /// No write of this rank for this room can land any more.
    over: bool,
    meta: Option<Arc<[u8]>>,
}

impl InGrant {
    /// Whether a copy of ours may still write into the room's pages.
    fn is_copying(&self) -> bool {
        !self.copies.is_empty() || !self.stopping.is_empty()
    }

    /// Whether nothing writes into the room's pages for this rank any more: neither the rank nor a copy of ours.
    fn is_settled(&self) -> bool {
        self.owed.is_none() || (self.over && !self.is_copying())
    }

    /// Whether the rank has said that nothing more comes: what it offers after that would be copied into a room that
    /// may be over.
    fn has_said_last(&self) -> bool {
        self.complete || self.checks.iter().any(|d| d.last)
    }

    /// Pieces that are delivered, summed or not.
    fn boxes(&self) -> usize {
        self.coverage.boxes() + self.checks.len()
    }
}

/// A room that waits for its pages to be filled.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(super) struct Inbound {
    pub(super) pages: Vec<Arc<[u32]>>,
    tokens: (u64, u64),
    source: Source,
    verify: Verify,
    grants: BTreeMap<PeerKey, InGrant>,
    pub(super) progress: Progress,
    /// Set once the terminal event is out.
    failure: Option<Reason>,
}

impl Inbound {
    pub(super) fn depends_on(&self, key: PeerKey) -> bool {
        self.grants.get(&key).is_some_and(|g| !g.is_settled())
    }

    /// Whether the room goes on and this peer has a part in it, if only to hear of it.
    pub(super) fn goes_on_with(&self, key: PeerKey) -> bool {
        self.failure.is_none() && self.grants.contains_key(&key)
    }

    /// Peers whose answer is missing.
    pub(super) fn holders(&self) -> Vec<PeerKey> {
        self.grants.iter().filter(|(_, g)| !g.is_settled()).map(|(k, _)| *k).collect()
    }

    /// How long its ranks may wait with the room, in all.
    fn deadline_us(&self) -> u64 {
        let patience = &self.progress.patience;
        u64::try_from((patience.bootstrap + patience.waiting).as_micros()).unwrap_or(u64::MAX)
    }

    /// The highest number of a delivery that is known here, for checkers.
    pub(super) fn highest_delivery(&self) -> u64 {
        let of = |g: &InGrant| {
            let packed = g.packed.values().map(packed::Packing::id);
            let ids = g.copies.values().chain(&g.stopping).chain(&g.checking).copied().chain(packed);
            ids.map(|id| id.0).max().unwrap_or(0)
        };
        self.grants.values().map(of).max().unwrap_or(0)
    }

    fn page_count(&self) -> u64 {
        self.pages.iter().map(|l| l.len() as u64).sum()
    }

    fn is_over(&self) -> bool {
        self.grants.values().all(InGrant::is_settled)
    }

    fn is_complete(&self) -> bool {
        !self.grants.is_empty()
            && self.grants.values().all(|g| g.owed.is_none() || (g.complete && !g.is_copying()))
    }
}

impl Node {
    /// Decode expects a room: its pages are granted to the ranks of its source.
    pub fn handle_expect(&mut self, now: Time, e: Expect) {
        let room = e.room;
        if let Err(reason) = self.admit(&e) {
            self.count_failure(&reason);
            // Else the ranks would keep their pages until they run out of patience. A room in use is another's.
            if !matches!(reason.kind, ReasonKind::RoomInUse | ReasonKind::Closed) {
                self.tell_source(now, room, &e.source, &reason);
            }
            self.emit(room, EventKind::Failed(reason), true, super::RoomStats::default());
            return;
        }
        let progress = Progress::new(
            now,
            patience(e.bootstrap_timeout, self.cfg.bootstrap_timeout),
            patience(e.waiting_timeout, self.cfg.waiting_timeout),
        );
        self.timers.set(progress.patience.at, Timer::Inbound(room));
        self.inbound.insert(
            room,
            Inbound {
                pages: e.pages,
                tokens: e.tokens,
                source: e.source.clone(),
                verify: e.verify,
                grants: BTreeMap::new(),
                progress,
                failure: None,
            },
        );
        self.resolve_room(now, room, &e.source);
    }

    fn admit(&mut self, e: &Expect) -> Result<(), Reason> {
        let room = e.room;
        if self.closing {
            return Err(Reason::new(ReasonKind::Closed, "the agent was closed"));
        }
        if let Some(reason) = self.quarantine_full() {
            return Err(reason);
        }
        if self.inbound.contains_key(&room) || self.outbound.contains_key(&room) {
            return Err(Reason::new(ReasonKind::RoomInUse, format!("room {room} is in use on this agent")));
        }
        if let Some(reason) = self.tombs.get(room).map(|tomb| tomb.reason.clone()) {
            self.tombs.tell(self.tomb_limits(), room);
            return Err(reason);
        }
        for (g, (layout, list)) in self.side.groups.iter().zip(&e.pages).enumerate() {
            enough_pages(room, g, layout, list.len(), e.tokens)?;
        }
        self.check_odd_page(room, e.odd_page)?;
        self.book.grant(room, &e.pages)
    }

    /// One grant for every rank: a real one for each that owes something, a null grant for the others.
    pub(super) fn make_grants(&mut self, now: Time, room: Room, ranks: &[SourceRank]) {
        if let Some(reason) =
            ranks.iter().find_map(|r| self.peers.get(&r.key).and_then(super::peer::Peer::unusable))
        {
            self.tell_ranks(now, room, ranks, &reason);
            self.fail_inbound(now, room, reason);
            return;
        }
        let own_ranks = self.side.shard.tp_size.saturating_mul(self.side.shard.pp_size);
        let Some(r) = self.inbound.get(&room) else { return };
        let (tokens, pages, verify) = (r.tokens, r.pages.clone(), r.verify);
        let deadline_us = r.deadline_us();
        let mut grants = BTreeMap::new();
        for (rank, source_rank) in ranks.iter().enumerate() {
            let key = source_rank.key;
            let owed = source_rank.owes.map(|layers| Owed { layers, tokens });
            let seq = self.peer_mut(now, key).next_seq();
            let grant = Grant {
                room,
                seq,
                tokens,
                owed: owed.clone(),
                pages: if owed.is_some() { pages.clone() } else { Vec::new() },
                ranks: own_ranks,
                verify,
                deadline_us,
                credits: 0,
            };
            let number = self.queue(now, key, Msg::Grant(grant));
            grants.insert(
                key,
                InGrant {
                    seq,
                    number,
                    rank,
                    owed,
                    coverage: Coverage::default(),
                    copies: BTreeMap::new(),
                    stopping: BTreeSet::new(),
                    deferred: Vec::new(),
                    copied: BTreeMap::new(),
                    checks: VecDeque::new(),
                    checking: None,
                    packed: BTreeMap::new(),
                    complete: false,
                    over: false,
                    meta: None,
                },
            );
        }
        if let Some(r) = self.inbound.get_mut(&room) {
            r.grants = grants;
        }
        self.inbound_contact(now, room);
    }

    /// Goes from `Bootstrapping` to `Waiting` once every rank that owes something is in contact.
    fn inbound_contact(&mut self, now: Time, room: Room) {
        let Some(r) = self.inbound.get_mut(&room) else { return };
        let contact = !r.grants.is_empty()
            && r.grants
                .iter()
                .filter(|(_, g)| g.owed.is_some())
                .all(|(key, _)| self.peers.get(key).is_some_and(|p| p.attached.is_some()));
        if contact && r.failure.is_none() {
            self.inbound_stage(now, room, Stage::Waiting);
        }
    }

    fn inbound_stage(&mut self, now: Time, room: Room, stage: Stage) {
        if let Some(r) = self.inbound.get_mut(&room) {
            if r.progress.advance(now, stage) {
                self.actions.push_back(Action::Stage(room, stage));
            }
            r.progress.touch(now);
            let at = r.progress.patience.at;
            self.timers.set(at, Timer::Inbound(room));
        }
    }

    pub(super) fn inbound_attached(&mut self, now: Time, key: PeerKey) {
        for room in
            self.inbound.iter().filter(|(_, r)| r.depends_on(key)).map(|(room, _)| *room).collect::<Vec<_>>()
        {
            self.inbound_contact(now, room);
            self.take_deferred(now, room, key);
        }
    }

    /// Pushes that could not be copied when word of them came.
    fn take_deferred(&mut self, now: Time, room: Room, key: PeerKey) {
        let Some(g) = self.inbound.get_mut(&room).and_then(|r| r.grants.get_mut(&key)) else { return };
        if !g.stopping.is_empty() {
            return;
        }
        for ready in std::mem::take(&mut g.deferred) {
            if let Err(reason) = self.ready_arrived(now, key, ready) {
                self.fail_inbound(now, room, reason);
            }
        }
    }

    /// The grant that a message names, if it still stands.
    ///
    /// # Errors
    /// When no session has carried it: the peer cannot know it.
    fn live_grant(
        &mut self,
        room: Room,
        key: PeerKey,
        seq: Seq,
    ) -> Result<Option<(&mut InGrant, bool)>, Reason> {
        match self.inbound.get_mut(&room) {
            Some(r) if r.grants.get(&key).is_some_and(|g| g.seq == seq && g.owed.is_some()) => {
                let failed = r.failure.is_some();
                let g = r.grants.get_mut(&key);
                let link = self.peers.get(&key).map(|p| &p.link);
                if g.as_ref().zip(link).is_some_and(|(g, link)| link.is_unheard(g.number)) {
                    let text = format!("room {room}: grant {} is answered before it was sent", seq.0);
                    return Err(Reason::new(ReasonKind::ProtocolError, text));
                }
                Ok(g.map(|g| (g, failed)))
            }
            _ => {
                self.counters.stale_refused += 1;
                Ok(None)
            }
        }
    }

    /// Receiver copies: a push's pages can be read.
    pub(super) fn ready_arrived(&mut self, now: Time, key: PeerKey, m: Ready) -> Result<(), Reason> {
        let attached = self.peers.get(&key).and_then(|p| p.attached);
        if attached == Some(Mover::Sender) {
            return Err(Reason::new(
                ReasonKind::ProtocolError,
                "Ready on a fabric on which the sender writes",
            ));
        }
        // Its pages may be smaller than ours: of one token at the least.
        let most = m.span.tokens.1.saturating_sub(m.pages_start).saturating_add(1);
        let bad_lists =
            m.pages.len() != self.side.groups.len() || m.pages.iter().any(|list| list.len() as u64 > most);
        let Some((grant, failed)) = self.live_grant(m.room, key, m.seq)? else { return Ok(()) };
        if failed || grant.copies.contains_key(&m.push) {
            return Ok(());
        }
        let inside =
            grant.owed.as_ref().is_some_and(|o| super::intersect(o, &m.span).as_ref() == Some(&m.span));
        if !inside {
            let text =
                format!("room {}: push {} offers {:?}, which was not granted", m.room, m.push.0, m.span);
            self.fail_inbound(now, m.room, Reason::new(ReasonKind::ProtocolError, text));
            return Ok(());
        }
        if bad_lists {
            let text = format!(
                "room {}: push {} offers {:?} with {} page lists, or more pages than that has tokens",
                m.room,
                m.push.0,
                m.span,
                m.pages.len()
            );
            self.fail_inbound(now, m.room, Reason::new(ReasonKind::ProtocolError, text));
            return Ok(());
        }
        if grant.has_said_last() {
            let text = format!("room {}: push {} is offered after the last piece was done", m.room, m.push.0);
            self.fail_inbound(now, m.room, Reason::new(ReasonKind::ProtocolError, text));
            return Ok(());
        }
        if grant.boxes() + grant.copied.len() + grant.deferred.len() >= BOX_LIMIT {
            let reason = too_many(m.room);
            self.fail_inbound(now, m.room, reason);
            return Ok(());
        }
        // A session that was lost before its `Attached` came leaves a source that is attached, and a message of it that
        // the next session brings ahead of the answer to its own `Attach`.
        if !grant.stopping.is_empty() || attached.is_none() {
            grant.deferred.push(m);
            return Ok(());
        }
        let id = self.next_delivery(DeliveryFor::Inbound(m.room, key, m.push));
        if let Some(r) = self.inbound.get_mut(&m.room)
            && let Some(g) = r.grants.get_mut(&key)
        {
            g.copies.insert(m.push, id);
            g.copied.insert(m.push, m.span.clone());
            self.actions.push_back(Action::Deliver(Delivery {
                id,
                peer: key,
                room: m.room,
                push: m.push,
                request: Request {
                    src_pages: m.pages,
                    src_tokens: m.pages_start..m.pages_end.unwrap_or(m.span.tokens.1),
                    dst_pages: r.pages.clone(),
                    dst_tokens: r.tokens.0..r.tokens.1,
                    tokens: m.span.tokens.0..m.span.tokens.1,
                    layers: m.span.layers.0..m.span.layers.1,
                },
            }));
        }
        self.inbound_stage(now, m.room, Stage::Transferring);
        Ok(())
    }

    pub(super) fn inbound_delivery(
        &mut self,
        now: Time,
        id: DeliveryId,
        (room, key, push): (Room, PeerKey, PushId),
        end: DeliveryEnd,
    ) {
        let Some(r) = self.inbound.get_mut(&room) else { return };
        let failed = r.failure.is_some();
        let Some(g) = r.grants.get_mut(&key) else { return };
        // The copy of a retracted push counts for nothing.
        let retracted = g.stopping.remove(&id);
        let stands = !retracted && g.copies.remove(&push).is_some();
        let seq = g.seq;
        if failed {
            if self.peers.get(&key).and_then(|p| p.attached) == Some(Mover::Receiver) && !g.is_copying() {
                g.over = true;
            }
            self.maybe_release_inbound(room);
            return;
        }
        if !stands {
            if retracted {
                self.unpack_stopped(now, room, key, seq, push);
                self.take_deferred(now, room, key);
            }
            return;
        }
        let packed = g.packed.contains_key(&push);
        match end {
            DeliveryEnd::Complete { .. } if packed => self.unpacked_whole(now, room, key),
            DeliveryEnd::Failed(reason) if packed => self.fail_inbound(now, room, reason),
            DeliveryEnd::Complete { bytes, writes } => {
                r.progress.count(bytes, writes);
                self.queue(now, key, Msg::Copied(Copied { room, seq, push, error: None }));
                self.inbound_stage(now, room, Stage::Transferring);
            }
            DeliveryEnd::Aborted => {
                let reason = Reason::new(
                    ReasonKind::FabricError,
                    format!("room {room}: the copy of push {} was stopped", push.0),
                );
                self.fail_inbound(now, room, reason);
            }
            DeliveryEnd::Summed(_) => self.fail_inbound(now, room, super::unasked_sum(room)),
            DeliveryEnd::Failed(reason) => {
                self.queue(now, key, Msg::Copied(Copied { room, seq, push, error: Some(reason.clone()) }));
                self.fail_inbound(now, room, reason);
            }
        }
    }

    pub(super) fn retract_arrived(&mut self, now: Time, key: PeerKey, m: &Retract) -> Result<(), Reason> {
        let Some((g, failed)) = self.live_grant(m.room, key, m.seq)? else { return Ok(()) };
        if failed {
            return Ok(());
        }
        let seq = g.seq;
        let packed = g.packed.remove(&m.push).is_some();
        let copy = g.copies.remove(&m.push);
        g.stopping.extend(copy);
        g.copied.remove(&m.push);
        g.deferred.retain(|r| r.push != m.push);
        g.coverage.retract(m.push);
        // What the source had called complete is not; it says so again after the next push.
        g.complete = false;
        g.over = false;
        g.meta = None;
        if let Some(id) = copy {
            self.actions.push_back(Action::Abort(id));
        }
        if packed {
            // What replaces it may be written once we neither unpack nor sum it.
            self.stop_wanting(m.room, key, Some(m.push));
            if copy.is_some() {
                self.drop_check_quietly(m.room, key, m.push);
            } else if !self.drop_check(now, m.room, key, m.push) {
                self.tell_read(now, m.room, key, seq, m.push);
            }
            return Ok(());
        }
        self.drop_check(now, m.room, key, m.push);
        Ok(())
    }

    pub(super) fn done_arrived(&mut self, now: Time, key: PeerKey, m: Done) -> Result<(), Reason> {
        let room = m.room;
        let mover = self.peers.get(&key).and_then(|p| p.attached);
        let Some((g, failed)) = self.live_grant(room, key, m.seq)? else { return Ok(()) };
        if failed {
            return Ok(());
        }
        if m.meta.is_some() && !m.last {
            let text = format!("room {room}: push {} brings metadata and is not the last one", m.push.0);
            self.fail_inbound(now, room, Reason::new(ReasonKind::ProtocolError, text));
            return Ok(());
        }
        let receiver_copies = mover == Some(Mover::Receiver);
        if receiver_copies
            && super::area(&m.span) > 0
            && (g.copies.contains_key(&m.push) || g.copied.remove(&m.push).as_ref() != Some(&m.span))
        {
            let text =
                format!("room {room}: push {} is said to be done, but {:?} was not copied", m.push.0, m.span);
            self.fail_inbound(now, room, Reason::new(ReasonKind::ProtocolError, text));
            return Ok(());
        }
        if g.has_said_last() && super::area(&m.span) > 0 {
            let text = format!("room {room}: push {} is said to be done after the last piece was", m.push.0);
            self.fail_inbound(now, room, Reason::new(ReasonKind::ProtocolError, text));
            return Ok(());
        }
        if m.last && receiver_copies && (g.is_copying() || !g.deferred.is_empty()) {
            let text = format!(
                "room {room}: push {} is said to be the last one, but others are still being copied",
                m.push.0
            );
            self.fail_inbound(now, room, Reason::new(ReasonKind::ProtocolError, text));
            return Ok(());
        }
        if g.boxes() >= BOX_LIMIT {
            self.fail_inbound(now, room, too_many(room));
            return Ok(());
        }
        if self.check_first(now, key, &m) {
            return Ok(());
        }
        self.count_done(now, key, m);
        Ok(())
    }

    /// A piece is delivered, and its bytes are right as far as anybody asked.
    fn count_done(&mut self, now: Time, key: PeerKey, m: Done) {
        let room = m.room;
        let Some(g) = self.inbound.get_mut(&room).and_then(|r| r.grants.get_mut(&key)) else { return };
        let Some(owed) = g.owed.clone() else { return };
        let taken = g.coverage.add(&owed, m.push, &m.span);
        let complete = m.last && g.coverage.covers(&owed);
        let delivered = g.coverage.area();
        if let Err(why) = taken {
            let text = match why {
                CoverError::Outside => {
                    format!("push {} delivered {:?}, which was not granted", m.push.0, m.span)
                }
                CoverError::Twice(p, span) => {
                    format!(
                        "push {} delivered {:?} again: push {} had delivered {span:?}",
                        m.push.0, m.span, p.0
                    )
                }
            };
            let reason = Reason::new(ReasonKind::TokensMismatch, format!("room {room}: {text}"));
            self.fail_inbound(now, room, reason);
            return;
        }
        if complete {
            g.complete = true;
            g.over = true;
            g.meta = m.meta;
        }
        let Some(r) = self.inbound.get_mut(&room) else { return };
        if self.peers.get(&key).and_then(|p| p.attached) == Some(Mover::Sender) {
            r.progress.count(m.bytes, m.writes);
        }
        let (want, name) = (r.tokens.1, self.peer_name(key));
        self.inbound_stage(now, room, Stage::Transferring);
        if m.last && m.end_token != want {
            let text = format!(
                "room {room}: decode expects tokens up to {want}, but {name} pushed tokens up to {}: give both sides the same end",
                m.end_token
            );
            self.fail_inbound(now, room, Reason::new(ReasonKind::TokensMismatch, text));
        } else if m.last && !complete {
            let text = format!(
                "room {room}: {name} made its last push, but delivered only {delivered} of {} (layer, token) pairs that it owes: {owed:?}",
                super::area(&owed)
            );
            self.fail_inbound(now, room, Reason::new(ReasonKind::TokensMismatch, text));
        } else if self.inbound.get(&room).is_some_and(Inbound::is_complete) {
            self.succeed_inbound(now, room);
        }
    }
}
