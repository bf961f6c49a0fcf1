//! How a pushed room ends: finished everywhere, cancelled, failed, fenced.

use super::Part;
use crate::error::{Reason, ReasonKind};
use crate::ids::{Room, Time};
use crate::msg::{Cancel, Drained, Finished, Msg};
use crate::node::tomb::Tomb;
use crate::node::types::{EventKind, Flaw, Stage};
use crate::node::{Action, DeliveryFor, Node, PeerKey, Timer};

impl Node {
    pub(in crate::node) fn finished_arrived(
        &mut self,
        now: Time,
        key: PeerKey,
        m: Finished,
    ) -> Result<(), Reason> {
        let Some(r) = self.outbound.get_mut(&m.room) else { return Ok(()) };
        let Some(dest) = r.dests.get_mut(&key).filter(|d| d.seq == m.seq) else {
            self.counters.stale_refused += 1;
            return Ok(());
        };
        match m.error {
            // Our writes may still read the source's pages, which a success would release.
            None if dest.owed.is_some() && !dest.last_sent => {
                let text = format!("room {}: Finished came before Done for the last of its pieces", m.room);
                return Err(Reason::new(ReasonKind::ProtocolError, text));
            }
            None => {
                dest.finished = true;
                self.maybe_succeed_outbound(now, m.room);
            }
            Some(reason) => self.fail_outbound_by(now, m.room, reason, Some(key)),
        }
        Ok(())
    }

    pub(super) fn maybe_succeed_outbound(&mut self, now: Time, room: Room) {
        if !self.outbound.get(&room).is_some_and(|r| r.local && r.failure.is_none() && r.is_finished()) {
            return;
        }
        let Some(mut r) = self.outbound.remove(&room) else { return };
        self.timers.cancel(Timer::Outbound(room));
        r.progress.advance(now, Stage::Success);
        self.counters.succeeded += 1;
        self.actions.push_back(Action::Stage(room, Stage::Success));
        self.emit(room, EventKind::Success, true, r.progress.stats());
    }

    pub(in crate::node) fn cancel_arrived(&mut self, now: Time, key: PeerKey, m: Cancel) {
        let room = m.room;
        let Some(r) = self.outbound.get_mut(&room) else {
            // The grant came before it, so the room is over here: our caller knows, or a tombstone does. (A grant that no
            // session carried is withdrawn, and its end told by `RoomFailed`.)
            self.queue(now, key, Msg::Drained(Drained { room, seq: m.upto, reason: m.reason }));
            return;
        };
        match r.dests.get_mut(&key) {
            Some(dest) if dest.seq > m.upto => {
                self.counters.stale_refused += 1;
                return;
            }
            Some(dest) => {
                dest.cancelled_upto = m.upto;
                // It wants an answer, also if it had finished before.
                dest.finished = false;
                dest.drained = false;
            }
            None => {
                self.queue(now, key, Msg::Drained(Drained { room, seq: m.upto, reason: m.reason.clone() }));
            }
        }
        self.fail_outbound_by(now, room, m.reason, Some(key));
        self.settle_outbound(now, room);
        self.heard_of(room, key, None);
    }

    /// Word from a peer that a room failed before a grant for it was made.
    pub fn handle_room_failed(&mut self, now: Time, key: PeerKey, room: Room, reason: Reason) {
        if self.outbound.contains_key(&room) {
            self.fail_outbound_by(now, room, reason, Some(key));
        } else {
            self.bury(room, Tomb::new(reason, false).at_word_of(Some(key)));
        }
    }

    pub(in crate::node) fn outbound_timer(&mut self, now: Time, room: Room) {
        let Some(r) = self.outbound.get(&room) else { return };
        if r.failure.is_some() {
            return;
        }
        let p = r.progress.patience;
        if now < p.at {
            self.timers.set(p.at, Timer::Outbound(room));
            return;
        }
        let text = if !r.local {
            format!("room {room}: nothing was pushed for it within {} s", p.waiting.as_secs_f64())
        } else if r.progress.stage == Stage::Bootstrapping {
            format!("room {room}: no decode rank granted it within {} s", p.bootstrap.as_secs_f64())
        } else {
            let seen = r.dests.len();
            format!(
                "room {room}: no progress for {} s ({seen} of {} decode ranks granted, {} pushes, the last one {})",
                p.waiting.as_secs_f64(),
                r.ranks.unwrap_or(0),
                r.pushes.len(),
                if r.last.is_some() { "made" } else { "not made" }
            )
        };
        // One that was granted and never pushed exists, and is remembered, at its peer's word.
        let by = r.dests.keys().next().copied();
        self.fail_outbound_by(now, room, Reason::new(ReasonKind::TransferTimeout, text), by);
    }

    /// Fails a room of our caller's, or at our caller's word.
    pub(in crate::node) fn fail_outbound(&mut self, now: Time, room: Room, reason: Reason) {
        self.fail_outbound_by(now, room, reason, None);
    }

    /// Fails a room: no write is begun any more, and each destination is told once none is in flight. Its tombstone is
    /// in the share of the peer `by` whom it fails, unless our caller knows the room.
    pub(in crate::node) fn fail_outbound_by(
        &mut self,
        now: Time,
        room: Room,
        reason: Reason,
        by: Option<PeerKey>,
    ) {
        let Some(r) = self.outbound.get_mut(&room) else { return };
        if r.failure.is_some() {
            return;
        }
        self.timers.cancel(Timer::Outbound(room));
        r.failure = Some(reason.clone());
        r.progress.advance(now, Stage::Failed);
        for dest in r.dests.values() {
            for part in dest.parts.values() {
                if let Part::Writing(id) | Part::Summing { id, .. } = part {
                    self.actions.push_back(Action::Abort(*id));
                }
            }
        }
        let local = r.local;
        let (heard, ranks) = (r.dests.keys().copied().collect(), r.ranks);
        if local {
            let (released, stats) = (!r.is_writing(), r.progress.stats());
            r.released = released;
            self.count_failure(&reason);
            self.actions.push_back(Action::Stage(room, Stage::Failed));
            self.emit(room, EventKind::Failed(reason.clone()), released, stats);
        } else {
            self.early_rooms = self.early_rooms.saturating_sub(1);
            self.not_early(room);
        }
        self.bury(room, Tomb::new(reason, local).with_ranks(heard, ranks).at_word_of(by.filter(|_| !local)));
        self.settle_outbound(now, room);
    }

    /// Of a failed room: answers destinations whose writes have stopped, frees the sources, forgets the room.
    pub(super) fn settle_outbound(&mut self, now: Time, room: Room) {
        let Some(r) = self.outbound.get_mut(&room) else { return };
        let Some(reason) = r.failure.clone() else { return };
        let mut answers = Vec::new();
        let too_early = self.cfg.flaw == Some(Flaw::DrainedWhileWriting);
        for (key, dest) in &mut r.dests {
            if dest.owed.is_some() && !dest.finished && !dest.drained && (too_early || !dest.is_writing()) {
                dest.drained = true;
                answers.push((*key, dest.seq.max(dest.cancelled_upto)));
            }
        }
        let idle = !r.is_writing();
        let report = idle && r.local && !r.released;
        r.released |= idle;
        let stats = r.progress.stats();
        for (key, seq) in answers {
            self.queue(now, key, Msg::Drained(Drained { room, seq, reason: reason.clone() }));
        }
        if report {
            self.emit(room, EventKind::Released, true, stats);
        }
        if idle {
            self.outbound.remove(&room);
        }
    }

    /// Nothing of ours is in flight to that peer any more.
    pub(in crate::node) fn outbound_fenced(&mut self, now: Time, key: PeerKey) {
        for room in self
            .outbound
            .iter()
            .filter(|(_, r)| r.dests.contains_key(&key))
            .map(|(room, _)| *room)
            .collect::<Vec<_>>()
        {
            if let Some(d) = self.outbound.get_mut(&room).and_then(|r| r.dests.get_mut(&key)) {
                for part in d
                    .parts
                    .values_mut()
                    .filter(|p| matches!(p, Part::Writing(_) | Part::Summing { .. } | Part::Stopping))
                {
                    *part = Part::Void;
                }
                if !d.finished {
                    d.drained = true;
                }
            }
            self.settle_outbound(now, room);
        }
        self.deliveries.retain(|_, d| !matches!(d, DeliveryFor::Outbound(_, k, _) if *k == key));
    }
}
