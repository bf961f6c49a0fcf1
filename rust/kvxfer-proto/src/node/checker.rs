//! What a model checker needs of a [`Node`]: its timers by name, and states without statistics.
//!
//! A checker has no use for a clock. Timeouts are settable, a room's even one by one, and clocks of processes that
//! stop jump: so any pending timer may run out before any other. A checker keeps `now` at one value and says which
//! timer has run out.

use super::inbound::Inbound;
use super::outbound::Outbound;
use super::peer::Fence;
use super::{Counters, Direction, Node, PeerKey, Timer};
use crate::ids::{Room, Seq, SessionNo, Time};
use crate::msg::Msg;
use crate::staging::Credits;

/// A timer that is set.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Wait {
    /// An expected room's: for contact, for progress, or for the answers to its cancel.
    Inbound(Room),
    /// A pushed or early granted room's.
    Outbound(Room),
    /// A peer's: for a sign of life, for a new session, or until it is forgotten.
    Peer(PeerKey),
}

impl Node {
    /// Every timer that is set.
    pub fn waits(&self) -> impl Iterator<Item = Wait> {
        self.timers.pending().map(|t| match t {
            Timer::Inbound(room) => Wait::Inbound(room),
            Timer::Outbound(room) => Wait::Outbound(room),
            Timer::Peer(key) => Wait::Peer(key),
        })
    }

    /// This timer runs out now, however much of its time was left, and no other does. Nothing happens if it is not
    /// set. `now` has to be later than the longest time of [`super::Config`].
    pub fn run_out(&mut self, now: Time, wait: Wait) {
        let timer = match wait {
            Wait::Inbound(room) => Timer::Inbound(room),
            Wait::Outbound(room) => Timer::Outbound(room),
            Wait::Peer(key) => Timer::Peer(key),
        };
        if !self.timers.pending().any(|t| t == timer) {
            return;
        }
        self.timers.cancel(timer);
        match timer {
            Timer::Inbound(room) => {
                if let Some(r) = self.inbound.get_mut(&room) {
                    r.progress.patience.at = now;
                }
                self.inbound_timer(now, room);
            }
            Timer::Outbound(room) => {
                if let Some(r) = self.outbound.get_mut(&room) {
                    r.progress.patience.at = now;
                }
                self.outbound_timer(now, room);
            }
            Timer::Peer(key) => {
                if let Some(peer) = self.peers.get_mut(&key) {
                    peer.last_heard = Time(0);
                    peer.lost_since = peer.lost_since.map(|_| Time(0));
                }
                self.peer_timer(now, key);
            }
        }
    }

    /// Forgets what this node will never decide by while a checker says which timer runs out and no limit is reached:
    /// statistics, every time and deadline ([`Node::run_out`] takes them for past), and which of the remembered rooms
    /// ended first. States that differ in nothing else are one.
    pub fn forget_statistics(&mut self) {
        self.counters = Counters::default();
        for progress in self
            .inbound
            .values_mut()
            .map(|r| &mut r.progress)
            .chain(self.outbound.values_mut().map(|r| &mut r.progress))
        {
            progress.forget_stats();
        }
        for (key, peer) in &mut self.peers {
            peer.last_heard = Time(0);
            peer.lost_since = peer.lost_since.map(|_| Time(0));
            if peer.session.is_none() {
                peer.link.forget_session();
            }
            if matches!(peer.fence, Fence::Running { .. }) {
                // No session is taken meanwhile, and its end sets these.
                peer.lost_since = Some(Time(0));
                if key.direction == Direction::TheyGrant {
                    peer.attached = None;
                }
            }
        }
        self.timers.forget_times();
        self.tombs.forget_order();
    }

    /// Numbers above both of these are given to deliveries anew: `elsewhere`, the highest that the driver still knows,
    /// and the highest that this node does. A number is nothing but a name.
    pub fn reuse_delivery_numbers(&mut self, elsewhere: u64) {
        let rooms = self.inbound.values().map(Inbound::highest_delivery);
        let rooms = rooms.chain(self.outbound.values().map(Outbound::highest_delivery));
        let known = self.deliveries.keys().map(|id| id.0).chain(rooms).max().unwrap_or(0);
        self.next_delivery = known.max(elsewhere);
    }

    /// The peer of this link has everything up to `received`, so no message up to there is looked at again: what each
    /// of them said is forgotten, and that it is unacknowledged is not. With `u64::MAX`, of a peer that is dead, nothing
    /// is delivered ever.
    ///
    /// Says whether there was anything to forget.
    pub fn forget_received(&mut self, key: PeerKey, received: u64) -> bool {
        self.peers.get_mut(&key).is_some_and(|p| p.link.forget_received(received))
    }

    /// Whether [`Node::forget_received`] would forget anything.
    #[must_use]
    pub fn remembers_received(&self, key: PeerKey, received: u64) -> bool {
        self.peers.get(&key).is_some_and(|p| p.link.remembers_received(received))
    }

    /// How many of the first numbers of the link to this peer nobody will name again, if the peer has received all up
    /// to `received`.
    #[must_use]
    pub fn settled_numbers(&self, key: PeerKey, received: u64) -> u64 {
        self.peers.get(&key).map_or(0, |p| p.link.settled(received))
    }

    /// Takes so many numbers off the link with this peer, in either direction. The caller does the same on the other
    /// side, and to what is on its way.
    pub fn renumber(&mut self, key: PeerKey, sent: u64, received: u64) {
        if let Some(peer) = self.peers.get_mut(&key) {
            peer.link.renumber(sent, received);
            self.renumber_grants(key, sent);
        }
    }

    /// Takes so much off the number of every session with this peer. The caller does the same elsewhere, and no session
    /// that anybody still names has a number as low.
    pub fn renumber_sessions(&mut self, key: PeerKey, off: u64) {
        if let Some(peer) = self.peers.get_mut(&key) {
            peer.last_session.0 = peer.last_session.0.saturating_sub(off);
            peer.session = peer.session.map(|s| SessionNo(s.0.saturating_sub(off)));
        }
    }

    /// The number of the last session with this peer.
    #[must_use]
    pub fn last_session(&self, key: PeerKey) -> SessionNo {
        self.peers.get(&key).map_or(SessionNo(0), |p| p.last_session)
    }

    /// Takes so much off the generation of the link with this peer. The caller does the same on the other side and to
    /// what is on its way, and no fence is under way.
    pub fn renumber_generations(&mut self, key: PeerKey, off: u64) {
        if let Some(peer) = self.peers.get_mut(&key) {
            peer.link.renumber_generations(off);
        }
    }

    /// Every sequence number of a grant between this node and this peer that this node still names.
    pub fn seqs(&self, key: PeerKey) -> impl Iterator<Item = Seq> {
        let said = self.peers.get(&key).into_iter().flat_map(|p| p.link.pending()).filter_map(Msg::seq);
        let held = self.outbound.values().filter_map(move |r| r.seqs_of(key)).flatten();
        let credits = self.peers.get(&key).and_then(|p| p.credits.as_ref());
        let lent = credits.into_iter().flat_map(Credits::seqs);
        let slots = self.ring.iter().flat_map(move |r| r.seqs_lent(key));
        self.seqs_granted(key).chain(said).chain(held).chain(lent).chain(slots)
    }

    /// The sequence number of the last grant to this peer.
    #[must_use]
    pub fn last_seq(&self, key: PeerKey) -> Seq {
        Seq(self.peers.get(&key).map_or(0, |p| p.next_seq))
    }

    /// Takes so much off every sequence number of a grant between this node and this peer: only their order counts. The
    /// caller does the same on the other side and to what is on its way, and no number that anybody names is as low.
    pub fn renumber_seqs(&mut self, key: PeerKey, off: u64) {
        let lower = |seq: &mut Seq| seq.0 = seq.0.saturating_sub(off);
        if let Some(peer) = self.peers.get_mut(&key) {
            peer.next_seq = peer.next_seq.saturating_sub(off);
            peer.link.pending_mut().filter_map(Msg::seq_mut).for_each(lower);
            peer.credits.iter_mut().flat_map(Credits::seqs_mut).for_each(lower);
        }
        self.ring.iter_mut().for_each(|r| r.renumber_seqs(key, lower));
        for r in self.outbound.values_mut() {
            r.renumber_seqs(key, off);
        }
        self.renumber_seqs_granted(key, off);
    }

    /// How much of its links' generations is due to its own fences is forgotten. Only for a checker that will not let
    /// this node forget a peer that is alive.
    pub fn forget_own_generations(&mut self) {
        self.peers.values_mut().for_each(|p| p.own_generation = 0);
    }

    /// New links start where links started before any peer was forgotten. Only for a checker that knows that each peer
    /// that was forgotten is dead: of such a one nothing can come that a new link would take for its own.
    pub fn forget_generations(&mut self) {
        self.generation_floor = 0;
    }

    /// Whether anything was ever sent to this peer, or received from it, since its link last started afresh.
    #[must_use]
    pub fn was_used(&self, key: PeerKey) -> bool {
        self.peers.get(&key).is_some_and(|p| p.link.was_used())
    }

    /// Takes a peer out of this node's world. Its part of a room stays open until [`Node::settle_left_out`].
    pub fn leave_out(&mut self, key: PeerKey) {
        self.peers.remove(&key);
        self.dirty.remove(&key);
        self.timers.cancel(Timer::Peer(key));
        self.forget_copies(key);
        self.deliveries.retain(|_, d| d.peer() != key);
    }

    /// Every peer whose part of a room that is expected here is open, present or left out.
    pub fn awaited(&self) -> impl Iterator<Item = PeerKey> {
        self.granted_keys().filter(|key| self.inbound.values().any(|r| r.depends_on(*key)))
    }

    /// A peer that was left out has brought all that it owes, or never will and writes no more.
    pub fn settle_left_out(&mut self, now: Time, key: PeerKey, delivered: bool) {
        if delivered {
            self.count_as_delivered(now, key);
        } else {
            self.inbound_fenced(now, key);
        }
    }

    /// Every peer that is known.
    pub fn peer_keys(&self) -> impl Iterator<Item = PeerKey> {
        self.peers.keys().copied()
    }
}
