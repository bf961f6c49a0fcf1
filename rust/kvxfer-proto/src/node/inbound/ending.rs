//! How an expected room ends, and when its pages come back.

use super::Inbound;
use crate::error::{Reason, ReasonKind};
use crate::ids::{Room, Seq, Time};
use crate::msg::{Cancel, Drained, Finished, Grant, Msg, RoomFailed};
use crate::node::tomb::Tomb;
use crate::node::types::{Event, EventKind, Flaw, Mover, Stage};
use crate::node::{Action, DeliveryFor, Node, PeerKey, Timer};

impl Node {
    pub(in crate::node) fn inbound_timer(&mut self, now: Time, room: Room) {
        let Some(r) = self.inbound.get(&room) else { return };
        if r.failure.is_some() {
            self.drain_overdue(now, room);
            return;
        }
        let at = r.progress.patience.at;
        if now < at {
            self.timers.set(at, Timer::Inbound(room));
            return;
        }
        let p = r.progress.patience;
        let reason = if r.progress.stage == Stage::Bootstrapping {
            let missing: Vec<String> = r
                .grants
                .keys()
                .filter(|k| self.peers.get(k).is_none_or(|p| p.attached.is_none()))
                .map(|k| self.peer_name(*k))
                .collect();
            let whom = if missing.is_empty() { "its directory".to_owned() } else { missing.join(", ") };
            format!(
                "room {room}: no contact with {} ({whom}) within {} s",
                r.source.address,
                p.bootstrap.as_secs_f64()
            )
        } else {
            let late: Vec<String> = r
                .grants
                .iter()
                .filter(|(_, g)| g.owed.is_some() && !g.complete)
                .map(|(k, _)| self.peer_name(*k))
                .collect();
            let slots = self.slots_waited_for(room);
            format!(
                "room {room}: nothing came from {} for {} s{slots}",
                late.join(", "),
                p.waiting.as_secs_f64()
            )
        };
        self.fail_inbound(now, room, Reason::new(ReasonKind::TransferTimeout, reason));
    }

    /// Peers that have not answered a cancel are fenced: else the pages stay in quarantine as long as they are alive.
    pub(super) fn drain_overdue(&mut self, now: Time, room: Room) {
        let Some(r) = self.inbound.get_mut(&room) else { return };
        let at = r.progress.patience.at;
        if now < at {
            self.timers.set(at, Timer::Inbound(room));
            return;
        }
        for key in r.holders() {
            let text = format!(
                "peer {} did not answer the drain of room {room} for {} s",
                self.peer_name(key),
                self.cfg.drain_timeout.as_secs_f64()
            );
            self.lose_peer(now, key, &Reason::new(ReasonKind::PeerLost, text));
        }
    }

    pub(super) fn succeed_inbound(&mut self, now: Time, room: Room) {
        let Some(mut r) = self.inbound.remove(&room) else { return };
        self.timers.cancel(Timer::Inbound(room));
        r.progress.advance(now, Stage::Success);
        for (key, g) in &r.grants {
            self.slots_drained(now, *key, room, g.seq);
        }
        self.book.release(&r.pages);
        self.counters.succeeded += 1;
        for (key, g) in &r.grants {
            // A null grant has to go out still: its rank waits for it.
            if g.owed.is_some()
                && let Some(peer) = self.peers.get_mut(key)
            {
                peer.link.withdraw(g.number);
            }
            // A peer that died after its part was done is forgotten.
            if g.owed.is_some() && self.peers.get(key).is_some_and(|p| p.unusable().is_none()) {
                self.queue(now, *key, Msg::Finished(Finished { room, seq: g.seq, error: None }));
            }
        }
        let mut by_rank: Vec<_> = r.grants.into_values().collect();
        by_rank.sort_by_key(|g| g.rank);
        let meta = by_rank.into_iter().find_map(|g| g.meta);
        self.actions.push_back(Action::Stage(room, Stage::Success));
        self.actions.push_back(Action::Event(Event {
            room,
            kind: EventKind::Success,
            released: true,
            meta,
            stats: r.progress.stats(),
        }));
    }

    /// The source says that nothing of the room lands any more: the answer to a cancel, or word that it failed there.
    pub(in crate::node) fn drained_arrived(&mut self, now: Time, key: PeerKey, m: Drained) {
        let Some(r) = self.inbound.get_mut(&m.room) else {
            // The room is over, and did not wait for this rank, which had done its part: its slots do.
            self.slots_drained(now, key, m.room, m.seq);
            return;
        };
        let Some(g) = r.grants.get_mut(&key) else { return };
        if m.seq < g.seq {
            self.counters.stale_refused += 1;
            return;
        }
        // A copy of ours may still run; the room is not over before that has stopped.
        g.over = true;
        let failed = r.failure.is_some();
        if !failed {
            self.fail_inbound(now, m.room, m.reason);
        }
        self.slots_drained(now, key, m.room, m.seq);
        if failed {
            self.maybe_release_inbound(m.room);
        }
    }

    /// Fails a room: the caller learns it now, and its pages come back when every rank has answered.
    pub(in crate::node) fn fail_inbound(&mut self, now: Time, room: Room, reason: Reason) {
        let Some(r) = self.inbound.get_mut(&room) else { return };
        if r.failure.is_some() {
            return;
        }
        self.timers.cancel(Timer::Inbound(room));
        r.failure = Some(reason.clone());
        r.progress.advance(now, Stage::Failed);
        let source = r.source.clone();
        let mut orders = Vec::new();
        let too_early = self.cfg.flaw == Some(Flaw::ReleaseOnTimeout);
        for (key, g) in &mut r.grants {
            let peer = self.peers.get_mut(key);
            let receiver_copies = peer.as_ref().is_some_and(|p| p.attached == Some(Mover::Receiver));
            let unheard = peer.is_some_and(|p| p.link.withdraw(g.number));
            if unheard {
                // The number may be another message's from now on.
                g.number = 0;
            }
            if self.cfg.flaw == Some(Flaw::UnpackAfterRelease) {
                let packed = &g.packed;
                g.copies.retain(|push, _| !packed.contains_key(push));
            }
            self.actions.extend(g.copies.values().map(|id| Action::Abort(*id)));
            self.actions.extend(g.drop_checks().map(Action::Abort));
            g.packed.clear();
            if too_early {
                g.copies.clear();
                g.stopping.clear();
            }
            if g.owed.is_some() && (too_early || unheard || (receiver_copies && !g.is_copying())) {
                // Either no session ever carried the grant, or only our own thread writes, and it has stopped.
                g.over = true;
            }
            orders.push((*key, g.seq, unheard));
        }
        self.quarantine_slots(now, room);
        self.count_failure(&reason);
        self.unresolve_room(room, &source, &reason);
        for (key, seq, unheard) in orders {
            if self.peers.get(&key).is_some_and(|p| p.unusable().is_none()) {
                let reason = reason.clone();
                // What was withdrawn the peer cannot know: to it the room failed before it was granted.
                let msg = if unheard {
                    Msg::RoomFailed(RoomFailed { room, reason })
                } else {
                    Msg::Cancel(Cancel { room, upto: seq, reason })
                };
                self.queue(now, key, msg);
            } else {
                self.tell_later(key, room, &reason);
            }
        }
        let Some(r) = self.inbound.get(&room) else { return };
        let (released, stats, pages) = (r.is_over(), r.progress.stats(), r.page_count());
        self.actions.push_back(Action::Stage(room, Stage::Failed));
        self.emit(room, EventKind::Failed(reason.clone()), released, stats);
        self.bury(room, Tomb::new(reason, true).without_ranks());
        if released {
            self.drop_inbound(room);
        } else {
            self.quarantined += pages;
            let at = now.after(self.cfg.drain_timeout);
            if let Some(r) = self.inbound.get_mut(&room) {
                r.progress.patience.at = at;
            }
            self.timers.set(at, Timer::Inbound(room));
        }
    }

    pub(super) fn maybe_release_inbound(&mut self, room: Room) {
        let Some(r) = self.inbound.get(&room) else { return };
        if r.failure.is_some() && r.is_over() {
            let (stats, pages) = (r.progress.stats(), r.page_count());
            self.quarantined = self.quarantined.saturating_sub(pages);
            self.emit(room, EventKind::Released, true, stats);
            self.drop_inbound(room);
        }
    }

    pub(super) fn drop_inbound(&mut self, room: Room) {
        self.timers.cancel(Timer::Inbound(room));
        if let Some(r) = self.inbound.remove(&room) {
            self.book.release(&r.pages);
        }
    }

    /// The fence of a peer is complete, or its process is dead: nothing it was granted can be written any more.
    pub(in crate::node) fn inbound_fenced(&mut self, now: Time, key: PeerKey) {
        for room in
            self.inbound.iter().filter(|(_, r)| r.depends_on(key)).map(|(room, _)| *room).collect::<Vec<_>>()
        {
            let name = self.peer_name(key);
            if let Some(g) = self.inbound.get_mut(&room).and_then(|r| r.grants.get_mut(&key)) {
                g.over = true;
                g.copies.clear();
                g.stopping.clear();
                let _ = g.drop_checks();
            }
            let reason = Reason::new(ReasonKind::PeerLost, format!("room {room}: peer {name} was fenced"));
            self.fail_inbound(now, room, reason);
            self.maybe_release_inbound(room);
        }
        // A fence has stopped our copies too; the driver need not report their ends.
        self.deliveries.retain(|_, d| d.peer() != key || matches!(d, DeliveryFor::Outbound(..)));
    }

    /// What [`Flaw::ReleaseAtEof`] does with the rooms of a peer whose connection ended.
    pub(in crate::node) fn release_at_eof(&mut self, now: Time, key: PeerKey) {
        for room in
            self.inbound.iter().filter(|(_, r)| r.depends_on(key)).map(|(room, _)| *room).collect::<Vec<_>>()
        {
            if let Some(g) = self.inbound.get_mut(&room).and_then(|r| r.grants.get_mut(&key)) {
                g.over = true;
            }
            self.fail_inbound(now, room, Reason::new(ReasonKind::PeerLost, "the connection ended"));
            if let Some(g) = self.inbound.get_mut(&room).and_then(|r| r.grants.get_mut(&key)) {
                g.copies.clear();
                g.stopping.clear();
            }
            self.maybe_release_inbound(room);
        }
    }

    /// The link of this peer started afresh: no grant that it carried can be withdrawn.
    pub(in crate::node) fn forget_grant_numbers(&mut self, key: PeerKey) {
        for g in self.inbound.values_mut().filter_map(|r| r.grants.get_mut(&key)) {
            g.number = 0;
        }
    }

    /// A null grant was lost with its link: the rank would wait for it.
    pub(in crate::node) fn grant_nothing_again(&mut self, now: Time, room: Room, key: PeerKey) {
        let ranks = self.side.shard.tp_size.saturating_mul(self.side.shard.pp_size);
        let live = |r: &&Inbound| r.failure.is_none() && r.grants.get(&key).is_some_and(|g| g.owed.is_none());
        let Some(r) = self.inbound.get(&room).filter(live) else { return };
        let (tokens, verify, deadline_us) = (r.tokens, r.verify, r.deadline_us());
        let seq = self.peer_mut(now, key).next_seq();
        let grant = Grant {
            room,
            seq,
            tokens,
            owed: None,
            pages: Vec::new(),
            ranks,
            verify,
            deadline_us,
            credits: 0,
        };
        let number = self.queue(now, key, Msg::Grant(grant));
        if let Some(g) = self.inbound.get_mut(&room).and_then(|r| r.grants.get_mut(&key)) {
            g.seq = seq;
            g.number = number;
        }
    }

    /// For checkers: a rank has brought all that it owes.
    pub(in crate::node) fn count_as_delivered(&mut self, now: Time, key: PeerKey) {
        let live = |r: &&mut Inbound| r.failure.is_none() && r.depends_on(key);
        for g in self.inbound.values_mut().filter(live).filter_map(|r| r.grants.get_mut(&key)) {
            g.complete = true;
            g.over = true;
        }
        let complete =
            |(room, r): (&Room, &Inbound)| (r.failure.is_none() && r.is_complete()).then_some(*room);
        for room in self.inbound.iter().filter_map(complete).collect::<Vec<_>>() {
            self.succeed_inbound(now, room);
        }
    }

    /// For checkers: nothing is copied from this rank, and nothing was.
    pub(in crate::node) fn forget_copies(&mut self, key: PeerKey) {
        for g in self.inbound.values_mut().filter_map(|r| r.grants.get_mut(&key)) {
            g.copies.clear();
            g.stopping.clear();
            g.deferred.clear();
            g.copied.clear();
        }
    }

    /// For checkers: every rank that was granted something.
    pub(in crate::node) fn granted_keys(&self) -> impl Iterator<Item = PeerKey> {
        self.inbound.values().flat_map(|r| r.grants.keys().copied())
    }

    /// For checkers: so many numbers were taken off what the link of this peer sends.
    pub(in crate::node) fn renumber_grants(&mut self, key: PeerKey, sent: u64) {
        for g in self.inbound.values_mut().filter_map(|r| r.grants.get_mut(&key)) {
            g.number = g.number.saturating_sub(sent);
        }
    }

    /// For checkers: the sequence numbers of what was granted to this peer.
    pub(in crate::node) fn seqs_granted(&self, key: PeerKey) -> impl Iterator<Item = Seq> {
        self.inbound.values().filter_map(move |r| r.grants.get(&key)).map(|g| g.seq)
    }

    /// For checkers: so much was taken off every sequence number with this peer.
    pub(in crate::node) fn renumber_seqs_granted(&mut self, key: PeerKey, off: u64) {
        for g in self.inbound.values_mut().filter_map(|r| r.grants.get_mut(&key)) {
            g.seq.0 = g.seq.0.saturating_sub(off);
        }
    }

    /// Rooms of which the peer never heard are expected of whoever answers in its place.
    pub(in crate::node) fn retry_unheard_rooms(&mut self, now: Time, key: PeerKey) {
        let rooms: Vec<Room> = self
            .inbound
            .iter()
            .filter(|(_, r)| r.failure.is_none() && r.grants.contains_key(&key))
            .map(|(room, _)| *room)
            .collect();
        for room in rooms {
            let Some(r) = self.inbound.get(&room) else { continue };
            let source = r.source.clone();
            // All of the room's grants or none: a rank that has one would refuse a second.
            let unheard =
                r.grants.iter().all(|(k, g)| self.peers.get(k).is_some_and(|p| p.link.is_unheard(g.number)));
            if !unheard {
                continue;
            }
            if let Some(r) = self.inbound.get_mut(&room) {
                for (k, g) in std::mem::take(&mut r.grants) {
                    if let Some(p) = self.peers.get_mut(&k) {
                        p.link.withdraw(g.number);
                    }
                }
            }
            self.resolve_room(now, room, &source);
        }
    }
}
