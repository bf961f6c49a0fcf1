//! Peers: sessions, liveness, fences.

use super::outbound::Outbound;
use super::types::{Flaw, Mover};
use super::{Action, Direction, Node, PeerKey, SessionUp, Timer};
use crate::error::{Reason, ReasonKind};
use crate::ids::{Room, Seq, SessionNo, Time};
use crate::link::{GENERATIONS_AHEAD, Link, Resume};
use crate::msg::{Cancel, Msg, RoomFailed};
use crate::staging::Credits;
use std::collections::{BTreeMap, BTreeSet};

/// Rooms that a peer which was given up is to hear of later; what is beyond that ends there by its own timeout.
const UNTOLD_LIMIT: usize = 4096;

/// Where a fence stands.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub(super) enum Fence {
    /// None is needed.
    #[default]
    Open,
    /// Under way; then the link starts afresh in this generation.
    Running { generation: u64 },
    /// This transport cannot promise it: only the death of the peer's process or the operator ends the quarantine.
    Impossible { generation: u64, reason: Reason },
}

/// One peer incarnation, in one direction.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Default)]
pub(super) struct Peer {
    pub(super) link: Link,
    pub(super) session: Option<SessionNo>,
    pub(super) last_session: SessionNo,
    pub(super) attached: Option<Mover>,
    pub(super) name: String,
    pub(super) last_heard: Time,
    /// Since when there is no session.
    pub(super) lost_since: Option<Time>,
    /// There has been a session since the link began: it may hold what it was granted.
    met: bool,
    /// What our own fences alone have made of the link's generation.
    pub(super) own_generation: u64,
    pub(super) fence: Fence,
    pub(super) dead: bool,
    /// Messages to it were thrown away: it is to be lost.
    overflow: Option<Reason>,
    /// Rooms that failed here while it was given up: it hears of them when it is of use again.
    pub(super) untold: Vec<(Room, Reason)>,
    /// Rooms of which its null grant was lost with the link.
    pub(super) ungranted: Vec<Room>,
    /// It said goodbye, or another incarnation took its place: it will not come back.
    gone: bool,
    pub(super) next_seq: u64,
    /// Ranks of its engine, once it has said.
    pub(super) ranks: Option<u32>,
    /// Rooms that it granted and that nothing was pushed for yet, and the pages in their lists.
    pub(super) early: (usize, u64),
    /// Slots of its ring that it has lent to us, if it has one.
    pub(super) credits: Option<Credits>,
}

impl Peer {
    pub(super) fn next_seq(&mut self) -> Seq {
        self.next_seq += 1;
        Seq(self.next_seq)
    }

    /// Why no room can be had with this peer now, if so.
    pub(super) fn unusable(&self) -> Option<Reason> {
        let text = match (&self.fence, self.dead) {
            (_, true) => format!("the process of peer {} has died", self.name),
            (Fence::Open, _) => return None,
            (Fence::Running { .. }, _) => format!("peer {} is being fenced", self.name),
            (Fence::Impossible { reason, .. }, _) => format!(
                "peer {} does not answer and cannot be fenced ({reason}): evict it when it is known to be dead",
                self.name
            ),
        };
        Some(Reason::new(ReasonKind::PeerLost, text))
    }
}

impl Node {
    /// The peer, made if it is new.
    pub(super) fn peer_mut(&mut self, now: Time, key: PeerKey) -> &mut Peer {
        let floor = self.generation_floor;
        if !self.peers.contains_key(&key) {
            self.timers.set(now.after(self.cfg.forget_after), Timer::Peer(key));
        }
        self.peers.entry(key).or_insert_with(|| {
            let mut peer = Peer { lost_since: Some(now), own_generation: floor, ..Peer::default() };
            peer.link.restart(floor);
            peer
        })
    }

    /// Queues a numbered message. A peer that lets its outbox overflow is lost.
    pub(super) fn queue(&mut self, now: Time, key: PeerKey, msg: Msg) -> u64 {
        let peer = self.peer_mut(now, key);
        match peer.link.enqueue(msg) {
            Ok(number) => {
                self.dirty.insert(key);
                self.want_session(key);
                number
            }
            Err(reason) => {
                // Not at once: the caller is in the middle of a change of its own.
                peer.overflow.get_or_insert(reason);
                self.timers.set(now, Timer::Peer(key));
                0
            }
        }
    }

    /// Keeps for later that a room has failed, since this peer cannot be told now.
    pub(super) fn tell_later(&mut self, key: PeerKey, room: Room, reason: &Reason) {
        if let Some(peer) = self.peers.get_mut(&key)
            && !peer.dead
            && !peer.gone
            && peer.untold.len() < UNTOLD_LIMIT
        {
            peer.untold.push((room, reason.clone()));
        }
    }

    pub(super) fn send_unnumbered(&mut self, key: PeerKey, msg: Msg) {
        if let Some(session) = self.peers.get(&key).and_then(|p| p.session) {
            self.actions.push_back(Action::Send { peer: key, session, number: 0, msg });
        }
    }

    /// Asks the driver for a session if there is none and we are the side that opens them.
    pub(super) fn want_session(&mut self, key: PeerKey) {
        let up = self.peers.get(&key).is_some_and(|p| p.session.is_some());
        if !up && key.direction == Direction::WeGrant {
            self.actions.push_back(Action::Connect(key));
        }
    }

    /// Whether a session with this peer is of use now; the driver keeps trying while it is.
    #[must_use]
    pub fn wants_session(&self, key: PeerKey) -> bool {
        let open = |p: &Peer| !matches!(p.fence, Fence::Running { .. }) && !p.dead;
        self.peers.get(&key).is_some_and(|p| p.session.is_none() && open(p)) && self.is_busy(key)
    }

    /// Whether any room or message depends on this peer, or what is held because it cannot be fenced: its answer comes in
    /// a session, also if only slots are held.
    fn is_busy(&self, key: PeerKey) -> bool {
        let waits = |p: &Peer| !p.link.is_idle() || matches!(p.fence, Fence::Impossible { .. });
        self.peers.get(&key).is_some_and(waits) || self.has_rooms(key)
    }

    /// Whether any room depends on this peer.
    fn has_rooms(&self, key: PeerKey) -> bool {
        self.inbound.values().any(|r| r.depends_on(key)) || self.outbound.values().any(|r| r.depends_on(key))
    }

    pub(super) fn flush_peer(&mut self, key: PeerKey) {
        let Some(peer) = self.peers.get_mut(&key) else { return };
        let Some(session) = peer.session else { return };
        // A peer that has not attached in answer to us gets no pages: a grant that it reads later, out of a session that is
        // over, would make it open its endpoint and write after our fence. Which rooms have failed it may know.
        let all = key.direction == Direction::TheyGrant || peer.attached.is_some();
        while all || !peer.link.next_is(|msg| matches!(msg, Msg::Grant(g) if g.owed.is_some())) {
            let Some((number, msg)) = peer.link.poll() else { break };
            self.actions.push_back(Action::Send { peer: key, session, number, msg });
        }
        if let Some(n) = peer.link.poll_ack(false) {
            self.actions.push_back(Action::Send { peer: key, session, number: 0, msg: Msg::Ack(n) });
        }
    }

    /// A session passed its handshake. From its first frame on, nothing of an older session counts.
    pub fn handle_session_up(&mut self, now: Time, up: SessionUp) {
        let key = up.peer;
        if !self.peers.contains_key(&key) && self.peers.len() >= self.cfg.peers && !self.forget_idle_peer(now)
        {
            self.counters.limited += 1;
            let text = format!("{} peers are known here already, and none of them is idle", self.peers.len());
            let reason = Reason::new(ReasonKind::Unhealthy, text);
            self.actions.push_back(Action::DropSession { peer: key, session: up.session, reason });
            self.actions.push_back(Action::Forget(key));
            return;
        }
        let shard = up.side.shard;
        let peer = self.peer_mut(now, key);
        peer.name = up.name;
        peer.ranks = Some(shard.tp_size.saturating_mul(shard.pp_size));
        self.take_answer(now, key, up.generation);
        let drop = |reason: Reason| Action::DropSession { peer: key, session: up.session, reason };
        let Some(peer) = self.peers.get_mut(&key) else {
            let text = "this peer has said goodbye, and its rooms have just come to an end";
            self.actions.push_back(drop(Reason::new(ReasonKind::PeerLost, text)));
            return;
        };
        if up.session <= peer.last_session {
            self.counters.stale_refused += 1;
            let text = format!("session {} is not newer than session {}", up.session.0, peer.last_session.0);
            self.actions.push_back(drop(Reason::new(ReasonKind::ProtocolError, text)));
            return;
        }
        // Before anything can refuse it: the end of a refused session must not be taken for that of its successor.
        peer.last_session = up.session;
        if let Some(reason) = peer.unusable() {
            self.actions.push_back(drop(reason));
            return;
        }
        if up.own_generation != peer.link.generation() {
            let text = format!("peer {} was fenced during the handshake", peer.name);
            self.actions.push_back(drop(Reason::new(ReasonKind::PeerLost, text)));
            return;
        }
        if let Some(old) = peer.session.take() {
            let reason = Reason::new(ReasonKind::ProtocolError, "a newer session took its place");
            self.actions.push_back(Action::DropSession { peer: key, session: old, reason });
        }
        match peer.link.session_up(up.received, up.generation) {
            Ok(Resume::Resumed) => {}
            Ok(Resume::PeerStartedAfresh) => {
                let reason = Reason::new(
                    ReasonKind::PeerLost,
                    format!("peer {} lost contact, fenced this agent and started afresh", peer.name),
                );
                if peer.attached.is_none() && !self.is_busy(key) {
                    // Nothing to fence and nothing to fail.
                    self.restart_link(key, up.generation);
                } else {
                    self.actions.push_back(drop(reason.clone()));
                    self.lose_peer_in(now, key, &reason, up.generation);
                    return;
                }
            }
            Err(reason) => {
                self.counters.protocol_errors += 1;
                self.actions.push_back(drop(reason.clone()));
                self.lose_peer(now, key, &reason);
                return;
            }
        }
        self.counters.sessions += 1;
        let heartbeat = self.cfg.heartbeat;
        if let Some(peer) = self.peers.get_mut(&key) {
            peer.session = Some(up.session);
            peer.met = true;
            peer.last_heard = now;
            peer.lost_since = None;
            self.timers.set(now.after(heartbeat), Timer::Peer(key));
        }
        self.dirty.insert(key);
    }

    /// Whether this peer's pages are held because no fence of it is possible.
    #[must_use]
    pub fn is_unfenceable(&self, key: PeerKey) -> bool {
        self.peers.get(&key).is_some_and(|p| matches!(p.fence, Fence::Impossible { .. }))
    }

    /// Whether a fence of this peer is under way.
    #[must_use]
    pub fn is_fencing(&self, key: PeerKey) -> bool {
        self.peers.get(&key).is_some_and(|p| matches!(p.fence, Fence::Running { .. }))
    }

    /// A peer that could not be fenced comes back in our new generation: it has ended all that it did before.
    fn take_answer(&mut self, now: Time, key: PeerKey, its_generation: u64) {
        if let Some(Fence::Impossible { generation, .. }) = self.peers.get(&key).map(|p| &p.fence)
            && (*generation..=generation.saturating_add(GENERATIONS_AHEAD)).contains(&its_generation)
        {
            self.fence_done(now, key, its_generation);
        }
    }

    /// The fabric to this peer can carry bytes, and who moves them.
    pub fn handle_attached(&mut self, now: Time, key: PeerKey, mover: Mover) {
        if let Some(peer) = self.peers.get_mut(&key) {
            if peer.session.is_none() && peer.fence != Fence::Open {
                return;
            }
            peer.attached = Some(mover);
            self.dirty.insert(key);
            match key.direction {
                Direction::WeGrant => self.inbound_attached(now, key),
                Direction::TheyGrant => self.outbound_attached(now, key),
            }
        }
    }

    /// A connection ended. Nothing is failed or released by that: a new session resumes.
    pub fn handle_session_down(&mut self, now: Time, key: PeerKey, session: SessionNo) {
        let Some(peer) = self.peers.get_mut(&key) else { return };
        if peer.session != Some(session) {
            return;
        }
        peer.session = None;
        peer.lost_since = Some(now);
        if self.cfg.flaw == Some(Flaw::ReleaseAtEof) {
            self.release_at_eof(now, key);
        }
        if self.is_busy(key) {
            self.want_session(key);
        }
        self.timers.set(now.after(self.cfg.fence_after), Timer::Peer(key));
    }

    /// The peer and we do not fit; no session will come of it. Its pending rooms fail on both sides.
    pub fn handle_refused(&mut self, now: Time, key: PeerKey, reason: &Reason) {
        let Some(peer) = self.peers.get(&key) else { return };
        let mut rooms: Vec<(Room, Reason)> = peer
            .link
            .pending()
            .filter_map(|msg| match msg {
                Msg::Cancel(c) => Some((c.room, c.reason.clone())),
                Msg::RoomFailed(f) => Some((f.room, f.reason.clone())),
                Msg::Grant(g) => Some((g.room, reason.clone())),
                _ => None,
            })
            .collect();
        rooms.sort();
        rooms.dedup_by_key(|(room, _)| *room);
        for room in
            self.inbound.iter().filter(|(_, r)| r.depends_on(key)).map(|(room, _)| *room).collect::<Vec<_>>()
        {
            self.fail_inbound(now, room, reason.clone());
        }
        self.actions.push_back(Action::TellRefused { peer: key, rooms });
        if self.inbound.values().any(|r| r.depends_on(key)) {
            // An earlier session carried grants, and no answer to their cancel will come.
            self.lose_peer(now, key, reason);
        } else {
            // Everything in the outbox was about these rooms. A peer that has seen numbers of this link learns that
            // they begin again.
            let generation = self.peers.get(&key).map_or(0, |p| p.link.generation().saturating_add(1));
            self.count_own_generation(key);
            self.restart_link(key, generation);
        }
    }

    /// Another incarnation answers at this peer's address: it restarted. Its rooms fail and it is fenced; rooms of
    /// which it had not heard are expected of its successor.
    pub fn handle_replaced(&mut self, now: Time, key: PeerKey) {
        self.forget_sources_of(key);
        self.retry_unheard_rooms(now, key);
        let reason = Reason::new(ReasonKind::PeerLost, format!("peer {} restarted", self.peer_name(key)));
        self.goodbye(now, key, &reason);
    }

    /// Nobody answers at this peer's address. What was known of its source is void, and rooms of which it had not heard
    /// are expected of whoever the directory names now.
    pub fn handle_unreachable(&mut self, now: Time, key: PeerKey) {
        self.forget_sources_of(key);
        self.retry_unheard_rooms(now, key);
    }

    /// The fabric endpoint of this peer broke.
    pub fn handle_fabric_broken(&mut self, now: Time, key: PeerKey, reason: &Reason) {
        self.lose_peer(now, key, reason);
    }

    /// No fabric reaches this peer. Its rooms fail, and it hears of that; nothing was granted to it that a fence would
    /// have to end, unless a fabric did reach it before.
    pub fn handle_unattachable(&mut self, now: Time, key: PeerKey, reason: &Reason) {
        if self.peers.get(&key).is_some_and(|p| p.attached.is_none() && p.fence == Fence::Open) {
            let rooms = self.inbound.iter().filter(|(_, r)| r.depends_on(key)).map(|(room, _)| *room);
            for room in rooms.collect::<Vec<_>>() {
                self.fail_inbound(now, room, reason.clone());
            }
            if !self.inbound.values().any(|r| r.depends_on(key)) {
                return;
            }
        }
        self.lose_peer(now, key, reason);
    }

    /// The peer's process was seen to die.
    pub fn handle_peer_died(&mut self, now: Time, key: PeerKey) {
        let Some(peer) = self.peers.get_mut(&key) else { return };
        if std::mem::replace(&mut peer.dead, true) {
            return;
        }
        let reason = Reason::new(ReasonKind::PeerLost, format!("the process of peer {} has died", peer.name));
        let fence = peer.fence.clone();
        self.forget_sources_of(key);
        self.retry_unheard_rooms(now, key);
        match fence {
            Fence::Open => self.lose_peer(now, key, &reason),
            Fence::Running { .. } => {}
            Fence::Impossible { generation, .. } => self.fence_done(now, key, generation),
        }
    }

    /// The operator says that this peer is gone and can write no more: its quarantine ends.
    pub fn handle_evict(&mut self, now: Time, key: PeerKey) {
        let Some(peer) = self.peers.get_mut(&key) else { return };
        let reason = Reason::new(ReasonKind::PeerLost, format!("peer {} was evicted", peer.name));
        peer.dead = true;
        match peer.fence {
            Fence::Running { generation } | Fence::Impossible { generation, .. } => {
                self.fence_done(now, key, generation);
            }
            Fence::Open => self.lose_peer(now, key, &reason),
        }
    }

    /// Fails every room with this peer and fences it. Pages stay in quarantine until [`Node::handle_fenced`].
    pub(super) fn lose_peer(&mut self, now: Time, key: PeerKey, reason: &Reason) {
        let generation = self.peers.get(&key).map_or(0, |p| p.link.generation().saturating_add(1));
        self.lose_peer_in(now, key, reason, generation);
    }

    fn lose_peer_in(&mut self, now: Time, key: PeerKey, reason: &Reason, generation: u64) {
        let Some(peer) = self.peers.get_mut(&key) else { return };
        if peer.fence != Fence::Open {
            return;
        }
        peer.fence = Fence::Running { generation };
        if let Some(session) = peer.session.take() {
            self.actions.push_back(Action::DropSession { peer: key, session, reason: reason.clone() });
        }
        self.counters.fences += 1;
        self.count_own_generation(key);
        for room in
            self.inbound.iter().filter(|(_, r)| r.depends_on(key)).map(|(room, _)| *room).collect::<Vec<_>>()
        {
            self.fail_inbound(now, room, reason.clone());
        }
        for room in
            self.outbound.iter().filter(|(_, r)| r.depends_on(key)).map(|(room, _)| *room).collect::<Vec<_>>()
        {
            self.fail_outbound_by(now, room, reason.clone(), Some(key));
        }
        self.fail_early_rooms(now, key, reason);
        let stop: Vec<_> =
            self.deliveries.iter().filter(|(_, d)| d.peer() == key).map(|(id, _)| *id).collect();
        self.actions.extend(stop.into_iter().map(Action::Abort));
        self.actions.push_back(Action::Fence(key));
    }

    /// The fence of this peer came to an end: nothing from it lands any more, or its transport cannot promise that.
    pub fn handle_fenced(&mut self, now: Time, key: PeerKey, result: Result<(), Reason>) {
        let holds = self.inbound.values().any(|r| r.depends_on(key)) || self.has_slots_of_ours(key);
        let Some(peer) = self.peers.get_mut(&key) else { return };
        let Fence::Running { generation } = peer.fence else { return };
        peer.attached = None;
        match result {
            // If no page or slot is held because of it, there is nothing that an answer could set free.
            Err(reason) if !peer.dead && holds => {
                peer.fence = Fence::Impossible { generation, reason };
                self.keep_news(key);
                // A peer that is still alive learns from the new generation that it has been given up, ends its own
                // writes, and comes back in that generation: that is its answer.
                self.restart_link(key, generation);
                self.want_session(key);
            }
            _ => self.fence_done(now, key, generation),
        }
    }

    /// Early rooms that this peer granted end with it, unless another peer has granted them too: a null grant waits for
    /// no answer, and nothing else would end them.
    fn fail_early_rooms(&mut self, now: Time, key: PeerKey, reason: &Reason) {
        let lost = |k: &PeerKey| *k == key || self.peers.get(k).is_none_or(|p| p.fence != Fence::Open);
        let early = |r: &Outbound| r.dests.contains_key(&key) && r.is_early_of(lost);
        let rooms: Vec<Room> =
            self.outbound.iter().filter(|(_, r)| early(r)).map(|(room, _)| *room).collect();
        for room in rooms {
            self.fail_outbound_by(now, room, reason.clone(), Some(key));
        }
    }

    /// Our link with this peer starts afresh at our own wish.
    fn count_own_generation(&mut self, key: PeerKey) {
        if let Some(peer) = self.peers.get_mut(&key) {
            peer.own_generation = peer.own_generation.saturating_add(1);
        }
    }

    /// The link is about to be thrown away: what the peer has to hear all the same is kept.
    fn keep_news(&mut self, key: PeerKey) {
        let Some(peer) = self.peers.get_mut(&key) else { return };
        let known: BTreeSet<Room> = peer.untold.iter().map(|(room, _)| *room).collect();
        let mut untold = BTreeMap::new();
        for msg in peer.link.pending() {
            match msg {
                Msg::Cancel(Cancel { room, reason, .. }) | Msg::RoomFailed(RoomFailed { room, reason })
                    if !known.contains(room) =>
                {
                    untold.entry(*room).or_insert_with(|| reason.clone());
                }
                Msg::Grant(g) if g.owed.is_none() => peer.ungranted.push(g.room),
                _ => {}
            }
        }
        let place = UNTOLD_LIMIT.saturating_sub(peer.untold.len());
        peer.untold.extend(untold.into_iter().take(place));
    }

    /// Starts the link afresh. Numbers of grants that it carried before name other messages from now on.
    fn restart_link(&mut self, key: PeerKey, generation: u64) {
        if let Some(peer) = self.peers.get_mut(&key) {
            peer.link.restart(generation);
        }
        self.forget_grant_numbers(key);
    }

    fn fence_done(&mut self, now: Time, key: PeerKey, generation: u64) {
        self.keep_news(key);
        if let Some(peer) = self.peers.get_mut(&key) {
            peer.met = false;
            peer.fence = Fence::Open;
            peer.attached = None;
            peer.lost_since = Some(now);
            self.timers.set(now.after(self.cfg.forget_after), Timer::Peer(key));
        }
        self.restart_link(key, generation);
        let (untold, ungranted) = self
            .peers
            .get_mut(&key)
            .map(|p| (std::mem::take(&mut p.untold), std::mem::take(&mut p.ungranted)))
            .unwrap_or_default();
        if self.peers.get(&key).is_some_and(|p| !p.dead && !p.gone) {
            for (room, reason) in untold {
                self.queue(now, key, Msg::RoomFailed(RoomFailed { room, reason }));
            }
            for room in ungranted {
                self.grant_nothing_again(now, room, key);
            }
        }
        self.inbound_fenced(now, key);
        self.outbound_fenced(now, key);
        self.slots_fenced(now, key);
        if self.peers.get(&key).is_some_and(|p| p.dead || p.gone) {
            self.forget_peer(now, key);
        }
    }

    /// Makes room for a new peer: the one that has been away longest goes, if nothing depends on it.
    fn forget_idle_peer(&mut self, now: Time) -> bool {
        let away = |(key, p): (&PeerKey, &Peer)| {
            let idle = p.session.is_none() && p.fence == Fence::Open && !p.dead;
            p.lost_since.filter(|_| idle).map(|since| (since, *key))
        };
        let mut idle: Vec<(Time, PeerKey)> = self.peers.iter().filter_map(away).collect();
        idle.sort_unstable();
        let found = idle.into_iter().map(|(_, key)| key).find(|key| !self.is_busy(*key));
        if let Some(key) = found {
            self.forget_peer(now, key);
        }
        found.is_some()
    }

    fn forget_peer(&mut self, now: Time, key: PeerKey) {
        let reason =
            Reason::new(ReasonKind::PeerLost, format!("peer {} has been forgotten", self.peer_name(key)));
        self.fail_early_rooms(now, key, &reason);
        if let Some(peer) = self.peers.remove(&key) {
            // If it comes back after all, it must not take a new link for the old one. Only our own fences count: no
            // peer's number carries over to others. One that was further ahead is healed by an error and a fence.
            let next = peer.own_generation.saturating_add(u64::from(peer.link.was_used()));
            self.generation_floor = self.generation_floor.max(next);
        }
        self.dirty.remove(&key);
        self.timers.cancel(Timer::Peer(key));
        self.forget_sources_of(key);
        self.actions.push_back(Action::Forget(key));
    }

    /// The peer ends its side in an orderly way.
    pub(super) fn goodbye(&mut self, now: Time, key: PeerKey, reason: &Reason) {
        if let Some(peer) = self.peers.get_mut(&key) {
            peer.gone = true;
        }
        self.lose_peer(now, key, reason);
    }

    pub(super) fn peer_timer(&mut self, now: Time, key: PeerKey) {
        let (heartbeat, suspect_after, fence_after) =
            (self.cfg.heartbeat, self.cfg.suspect_after, self.cfg.fence_after);
        let Some(peer) = self.peers.get_mut(&key) else { return };
        if let Some(reason) = peer.overflow.take() {
            self.lose_peer(now, key, &reason);
            return;
        }
        if let Some(session) = peer.session {
            if now >= peer.last_heard.after(suspect_after) {
                let text =
                    format!("peer {} was silent for {} ms", peer.name, now.since_us(peer.last_heard) / 1000);
                let reason = Reason::new(ReasonKind::PeerLost, text);
                self.actions.push_back(Action::DropSession { peer: key, session, reason });
                self.handle_session_down(now, key, session);
                return;
            }
            let ack = peer.link.poll_ack(true);
            self.send_unnumbered(key, Msg::Ping(now.0));
            if let Some(n) = ack {
                self.send_unnumbered(key, Msg::Ack(n));
            }
            self.timers.set(now.after(heartbeat), Timer::Peer(key));
            return;
        }
        let Some(since) = peer.lost_since else { return };
        if peer.fence != Fence::Open {
            return;
        }
        if now < since.after(fence_after) {
            self.timers.set(since.after(fence_after), Timer::Peer(key));
        } else if peer.met && self.is_busy(key) {
            let text = format!(
                "no contact with peer {} for {} s: every room with it failed, and its pages are held until it is fenced",
                self.peer_name(key),
                fence_after.as_secs_f64()
            );
            self.lose_peer(now, key, &Reason::new(ReasonKind::PeerLost, text));
        } else if now >= since.after(self.cfg.forget_after) {
            // Messages alone keep no peer that was never met: they are word of rooms that failed.
            if self.has_rooms(key) || self.inbound.values().any(|r| r.goes_on_with(key)) {
                self.timers.set(now.after(self.cfg.forget_after), Timer::Peer(key));
            } else {
                self.forget_peer(now, key);
            }
        } else {
            self.timers.set(since.after(self.cfg.forget_after), Timer::Peer(key));
        }
    }

    pub(super) fn peer_name(&self, key: PeerKey) -> String {
        let known = self.peers.get(&key).map(|p| &p.name).filter(|name| !name.is_empty());
        known.map_or_else(|| key.incarnation.to_string(), String::clone)
    }
}
