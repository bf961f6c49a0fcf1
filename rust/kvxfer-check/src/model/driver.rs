//! What the driver in `kvxfer-engine` does, cut down to what decides right or wrong, and the engines on top.

use super::world::{
    Conn, D, EMPTY, End, EndState, Family, Item, JUNK, NOW, STRAY, World, Write, address, expect, index,
    room, source, tag,
};
use super::{Property, Violation};
use kvxfer_proto::msg::{Frame, Msg};
use kvxfer_proto::node::{Action, Direction, Event, EventKind, Node, PeerKey, SessionUp};
use kvxfer_proto::{Incarnation, Reason, ReasonKind, SessionNo};
use std::collections::VecDeque;
use std::sync::Arc;

/// Pieces of a delivery of which one has vanished: its end does not come.
pub(crate) const NEVER: u8 = u8::MAX;

fn lost(text: &str) -> Reason {
    Reason::new(ReasonKind::PeerLost, text)
}

impl World {
    pub(crate) fn violate(&mut self, property: Property, text: String) {
        if !self.setup.checks(property) {
            return;
        }
        self.violation.get_or_insert(Violation { property, text });
    }

    /// Calls a node and carries out what it wants.
    pub(crate) fn order(&mut self, at: usize, f: impl FnOnce(&mut Node)) {
        f(&mut self.proc(at).node);
        self.carry_out(at);
    }

    pub(crate) fn carry_out(&mut self, at: usize) {
        if self.procs[at].node.counters().protocol_errors > 0 {
            let text = format!("{} accuses its peer of breaking the protocol", self.name(at));
            self.violate(Property::HonestPeersKeepTheProtocol, text);
        }
        while let Some(action) = self.proc(at).node.poll_action() {
            match action {
                Action::Event(event) => self.event(at, &event),
                // No room here asks for a checksum.
                Action::Stage(..) | Action::TellRefused { .. } | Action::Sum(_) => {}
                Action::Lent { id, slot } | Action::Landed { id, slot, .. } => self.has_slot(at, id, slot),
                Action::Direct(id) => self.direct(at, id),
                Action::Unpack(u) => self.unpacking(at, &u.delivery),
                Action::Resolve(_) => self.proc(at).resolving = true,
                Action::Connect(key) => self.want_dial(at, key),
                Action::Send { peer, session, number, msg } => {
                    let frame = Frame { incarnation: self.me(at), session, number, msg };
                    self.send(at, peer, Some(session), Item::Frame(Arc::new(frame)));
                }
                Action::DropSession { peer, session, .. } => self.close(at, peer, session),
                Action::Deliver(delivery) => self.deliver(at, &delivery),
                Action::Abort(id) => self.abort(at, id),
                Action::Fence(key) => self.fence(at, key),
                Action::Forget(key) => {
                    let living = self.alive(key.incarnation).is_some();
                    let p = self.proc(at);
                    p.forgot_living |= living;
                    p.eps.remove(&key);
                    p.broken.remove(&key);
                    p.dialling.remove(&key);
                    p.watched.remove(&key.incarnation);
                    p.dying.remove(&key.incarnation);
                }
            }
        }
        if at == D && self.setup.family.is_packed() {
            self.empty_free_slots();
        }
    }

    fn want_dial(&mut self, at: usize, key: PeerKey) {
        if self.procs[at].node.wants_session(key) && self.current(at, key).is_none() {
            self.proc(at).dialling.insert(key);
        }
    }

    /// The connection over which this process talks to that peer.
    pub(crate) fn current(&self, at: usize, key: PeerKey) -> Option<usize> {
        let (who, end) = self.ends_of(at, key);
        // After a loss that only one side saw there may be two: the driver's is the last one.
        self.conns.iter().rposition(|c| {
            c.who == who && c.ends[end].state == EndState::Open && (c.ends[end].established || end == 0)
        })
    }

    fn ends_of(&self, at: usize, key: PeerKey) -> ([Incarnation; 2], usize) {
        match key.direction {
            Direction::WeGrant => ([self.me(at), key.incarnation], 0),
            Direction::TheyGrant => ([key.incarnation, self.me(at)], 1),
        }
    }

    /// Sends on the present connection, or on that of a session; lost if nobody can read it.
    fn send(&mut self, at: usize, key: PeerKey, session: Option<SessionNo>, item: Item) {
        let Some(i) = self.current(at, key) else { return };
        if session.is_some_and(|s| s != self.conns[i].session) || !self.conns[i].is_whole() {
            return;
        }
        let (_, end) = self.ends_of(at, key);
        if !self.conns[i].ends[1 - end].doomed {
            Arc::make_mut(&mut self.conns[i]).ends[1 - end].inbox.push_back(item);
        }
    }

    /// Closes this side's end of a session; what was read from it already may still be handled.
    fn close(&mut self, at: usize, key: PeerKey, session: SessionNo) {
        let (who, end) = self.ends_of(at, key);
        for c in &mut self.conns {
            if c.who == who && c.session == session && c.ends[end].state == EndState::Open {
                let c = Arc::make_mut(c);
                c.ends[end].state = EndState::Closing;
                // A socket that is closed with bytes unread resets the connection, and what we sent may be lost.
                c.cut |= !c.ends[end].inbox.is_empty();
            }
        }
    }

    // -- the engines

    fn event(&mut self, at: usize, event: &Event) {
        let r = index(event.room);
        let released = event.released && !matches!(event.kind, EventKind::Retracted(_));
        let seen = &mut self.proc(at).rooms[r];
        seen.released += u8::from(released);
        match &event.kind {
            EventKind::Success => seen.success += 1,
            EventKind::Failed(_) => seen.failed += 1,
            EventKind::Released | EventKind::Retracted(_) => {}
        }
        let seen = *seen;
        let who = self.name(at);
        if let EventKind::Failed(reason) = &event.kind
            && matches!(
                reason.kind,
                ReasonKind::ProtocolError
                    | ReasonKind::Internal
                    | ReasonKind::RoomInUse
                    | ReasonKind::TokensMismatch
                    | ReasonKind::PageError
                    | ReasonKind::ChecksumMismatch
            )
        {
            // Nobody here does anything that calls for one of these.
            let text = format!("room {} failed at {who}: {:?}: {reason}", event.room, reason.kind);
            self.violate(Property::HonestPeersKeepTheProtocol, text);
        }
        if seen.success + seen.failed > 1 {
            self.violate(Property::OneEnd, format!("room {} ended twice at {who}", event.room));
        }
        if seen.released > 1 {
            self.violate(Property::OneRelease, format!("room {} was released twice at {who}", event.room));
        }
        if seen.success > 0 && seen.released == 0 || seen.success + seen.failed == 0 && seen.released > 0 {
            let text =
                format!("room {} at {who}: {:?} without its release, or the reverse", event.room, event.kind);
            self.violate(Property::OneRelease, text);
        }
        if event.kind == EventKind::Success && seen.cancelled {
            let text = format!("room {} succeeded at {who}, whose engine had given it up before", event.room);
            self.violate(Property::CancelledFailsAtOnce, text);
        }
        if at != D {
            return;
        }
        if event.kind == EventKind::Success {
            self.check_bytes(r);
        }
        if released {
            // The engine gives the page away at once: the worst that it may do.
            self.expect_next();
        }
    }

    fn check_bytes(&mut self, r: usize) {
        let (sources, pieces) = (self.setup.sources, usize::from(self.setup.pieces));
        for (i, cells) in self.procs[D].cells.iter().take(sources).enumerate() {
            for (piece, cell) in cells.iter().take(pieces).enumerate() {
                if *cell != tag(r) {
                    let what = match *cell {
                        EMPTY => "nothing".to_owned(),
                        JUNK => "bytes of a page that its source had given away".to_owned(),
                        STRAY => "bytes that were packed for another place".to_owned(),
                        other => format!("bytes of room {other}"),
                    };
                    let text = format!(
                        "room {} succeeded, but where piece {piece} of source {i} belongs there is {what}",
                        room(r)
                    );
                    self.violate(Property::SuccessHasAllBytes, text);
                    return;
                }
            }
        }
    }

    /// The destination's engine expects the next room, if its page is free.
    pub(crate) fn expect_next(&mut self) {
        let p = self.proc(D);
        if p.rooms.iter().any(|s| s.ordered && s.released == 0) || p.to_expect == 0 {
            return;
        }
        let r = p.to_expect.trailing_zeros() as usize;
        p.to_expect &= p.to_expect - 1;
        p.rooms[r].ordered = true;
        // Bytes of the last room are not this one's: to it they are as good as none.
        p.cells = [[EMPTY; 2]; 2];
        p.node.handle_expect(NOW, expect(r));
    }

    // -- sessions

    pub(crate) fn dial(&mut self, key: PeerKey) {
        let to = address(key.incarnation);
        if self.me(to) != key.incarnation {
            self.proc(D).dialling.remove(&key);
            self.order(D, |n| n.handle_replaced(NOW, key));
            return;
        }
        self.proc(D).dialling.remove(&key);
        let session = self.procs[D].node.next_session(key);
        let back = PeerKey { incarnation: self.me(D), direction: Direction::TheyGrant };
        let (received, generation) = self.procs[to].node.link_state(back);
        let end = |inbox: VecDeque<Item>, own_generation| End {
            state: EndState::Open,
            inbox,
            own_generation,
            established: false,
            doomed: false,
        };
        let who = [back.incarnation, key.incarnation];
        let taken = |n: u8| self.conns.iter().any(|c| c.who == who && c.serial == n);
        let serial = (0..=u8::MAX).find(|n| !taken(*n)).unwrap_or(u8::MAX);
        self.conns.push(Arc::new(Conn {
            who,
            session,
            serial,
            cut: false,
            ends: [
                end(VecDeque::from([Item::Describe { received, generation }]), 0),
                end(VecDeque::new(), generation),
            ],
        }));
    }

    /// Handles the next item at one end of a connection.
    pub(crate) fn read(&mut self, at: usize, i: usize, end: usize) {
        let conn = Arc::make_mut(&mut self.conns[i]);
        let Some(item) = conn.ends[end].inbox.pop_front() else { return };
        let key = conn.key(end);
        match item {
            Item::Describe { received, generation } => self.session_up(at, i, end, (received, generation)),
            Item::Attach(ep) => {
                let family = self.setup.family;
                let slots = self.setup.slots;
                let p = self.proc(at);
                p.eps.entry(key).or_insert(ep);
                if family.is_packed() {
                    // As many as there are can always be.
                    let _ = p.node.handle_peer_ring(key, 1, slots.into());
                }
                self.send(at, key, None, Item::Attached);
                self.order(at, |n| n.handle_attached(NOW, key, family.mover()));
            }
            Item::Attached => {
                let mover = self.setup.family.mover();
                if self.procs[at].eps.contains_key(&key) {
                    self.order(at, |n| n.handle_attached(NOW, key, mover));
                }
            }
            Item::Frame(frame) => self.frame(at, key, conn_session(&self.conns[i]), &frame),
        }
    }

    fn frame(&mut self, at: usize, key: PeerKey, session: SessionNo, frame: &Frame) {
        let current = self.procs[at].node.session_of(key) == Some(session);
        let fresh = self.procs[at].node.link_state(key).0 + 1 == frame.number;
        if let Msg::Cancel(m) = &frame.msg
            && current
            && fresh
        {
            self.proc(at).rooms[index(m.room)].void = true;
        }
        let result = self.proc(at).node.handle_frame(NOW, key, frame.clone());
        if let Err(reason) = result {
            let who = self.name(at);
            self.violate(Property::HonestPeersKeepTheProtocol, format!("{who}: {reason}"));
            self.close(at, key, session);
        }
        self.carry_out(at);
    }

    fn session_up(&mut self, at: usize, i: usize, end: usize, (received, generation): (u64, u64)) {
        let key = self.conns[i].key(end);
        let session = self.conns[i].session;
        if end == 0 {
            // The initiator describes itself now.
            let (own_received, own) = self.procs[at].node.link_state(key);
            let whole = self.conns[i].is_whole();
            let conn = Arc::make_mut(&mut self.conns[i]);
            conn.ends[0].own_generation = own;
            if whole {
                conn.ends[1].inbox.push_back(Item::Describe { received: own_received, generation: own });
            }
        }
        let own_generation = self.conns[i].ends[end].own_generation;
        Arc::make_mut(&mut self.conns[i]).ends[end].established = true;
        let peer = address(key.incarnation);
        let up = SessionUp {
            peer: key,
            session,
            received,
            generation,
            own_generation,
            side: super::world::side_of(peer, &self.setup),
            pages: vec![super::world::pages_of(peer)],
            name: ["source 0", "source 1", "destination"][peer].to_owned(),
        };
        self.proc(at).node.handle_session_up(NOW, up);
        if self.procs[at].node.session_of(key) == Some(session) {
            if self.setup.family.sees_deaths() {
                let dead = self.alive(key.incarnation).is_none();
                let p = self.proc(at);
                if p.watched.insert(key.incarnation) && dead {
                    p.dying.insert(key.incarnation);
                }
            }
            if end == 0 {
                self.attach(at, key);
            }
        }
        self.carry_out(at);
    }

    /// The destination uses the endpoint there is, or makes one, and tells the source.
    fn attach(&mut self, at: usize, key: PeerKey) {
        let source = address(key.incarnation);
        let back = PeerKey { incarnation: self.me(at), direction: Direction::TheyGrant };
        let free = self.endpoints_named(source, key, back).max().map_or(1, |n| n.saturating_add(1));
        let ep = *self.proc(at).eps.entry(key).or_insert(free);
        self.send(at, key, None, Item::Attach(ep));
    }

    /// An end learns that its connection is over; what it had not read is lost.
    pub(crate) fn end_of_file(&mut self, at: usize, i: usize, end: usize) {
        let conn = Arc::make_mut(&mut self.conns[i]);
        conn.ends[end].state = EndState::Closed;
        conn.ends[end].inbox.clear();
        let (key, session, established) = (conn.key(end), conn.session, conn.ends[end].established);
        if established {
            self.order(at, |n| n.handle_session_down(NOW, key, session));
        }
        if end == 0 {
            self.want_dial(at, key);
        }
    }

    // -- fences and deaths

    fn fence(&mut self, at: usize, key: PeerKey) {
        let family = self.setup.family;
        let p = self.proc(at);
        p.running.retain(|_, r| r.key != key);
        p.broken.remove(&key);
        let Some(ep) = p.eps.remove(&key) else {
            p.node.handle_fenced(NOW, key, Ok(()));
            return;
        };
        match (family, key.direction) {
            (Family::Copies, _) => p.node.handle_fenced(NOW, key, Ok(())),
            (_, Direction::WeGrant) if family.is_unfenced() => {
                let reason = Reason::new(ReasonKind::FabricError, "no fence on this transport");
                p.node.handle_fenced(NOW, key, Err(reason));
            }
            _ => {
                p.fencing.insert(key, ep);
            }
        }
    }

    /// The closing of an endpoint has completed.
    pub(crate) fn fence_done(&mut self, at: usize, key: PeerKey) {
        let me = self.me(at);
        self.proc(at).fencing.remove(&key);
        match key.direction {
            Direction::WeGrant => {
                let (dead, live): (Vec<Write>, Vec<Write>) = std::mem::take(&mut self.writes)
                    .into_iter()
                    .partition(|w| w.from == key.incarnation && w.to == me && !self.is_live(w));
                self.writes = live;
                self.orphan(&dead);
            }
            Direction::TheyGrant => {
                for w in self.writes.iter_mut().filter(|w| w.from == me && w.to == key.incarnation) {
                    w.loose = true;
                }
            }
        }
        self.order(at, |n| n.handle_fenced(NOW, key, Ok(())));
    }

    /// Writes that vanish leave deliveries whose end never comes: only a broken endpoint ends those.
    pub(super) fn orphan(&mut self, dead: &[Write]) {
        for w in dead.iter().filter(|w| !w.loose) {
            if let Some(from) = self.alive(w.from)
                && let Some(r) = self.proc(from).running.get_mut(&w.id)
            {
                r.posted = NEVER;
            }
        }
    }

    /// A source finds that its endpoint does not work.
    pub(crate) fn broken(&mut self, at: usize, key: PeerKey) {
        let reason = Reason::new(ReasonKind::FabricError, "the endpoint broke");
        self.proc(at).broken.insert(key);
        self.order(at, |n| n.handle_fabric_broken(NOW, key, &reason));
    }

    fn key_of(at: usize, who: Incarnation) -> PeerKey {
        let direction = if at == D { Direction::WeGrant } else { Direction::TheyGrant };
        PeerKey { incarnation: who, direction }
    }

    pub(crate) fn death_seen(&mut self, at: usize, who: Incarnation) {
        let key = Self::key_of(at, who);
        self.proc(at).dying.remove(&who);
        if self.setup.family == Family::Copies {
            self.order(at, |n| n.handle_peer_died(NOW, key));
            return;
        }
        // Our own worker may still have to take in what the kernel holds of it.
        self.proc(at).settling.insert(who);
        self.order(at, |n| {
            n.handle_unreachable(NOW, key);
            n.handle_fabric_broken(NOW, key, &lost("its process has died"));
        });
    }

    /// Nothing of a dead process is in our sockets any more.
    pub(crate) fn settled(&mut self, at: usize, who: Incarnation) {
        let me = self.me(at);
        self.proc(at).settling.remove(&who);
        self.writes.retain(|w| w.from != who || w.to != me);
        self.order(at, |n| n.handle_peer_died(NOW, Self::key_of(at, who)));
    }

    /// Kills the process at an address and starts another there.
    pub(crate) fn restart(&mut self, at: usize) {
        let old = self.me(at);
        let life = self.procs[at].life + 1;
        let before = self.procs[D].rooms;
        let Ok(mut fresh) = super::world::Proc::new(&self.setup, at, life) else { return };
        if at == D {
            // The engine that takes over does not know the rooms of the ones that died.
            fresh.to_expect = self.procs[D].to_expect;
        } else {
            // Its engine prefills again what is still wanted.
            fresh.to_push = (0..super::world::ROOMS).filter(|r| !before[*r].is_over()).map(|r| 1 << r).sum();
        }
        self.procs[at] = Arc::new(fresh);
        for c in &mut self.conns {
            if let Some(end) = c.who.iter().position(|w| *w == old) {
                let c = Arc::make_mut(c);
                c.cut = true;
                c.ends[end].state = EndState::Closed;
                c.ends[end].inbox.clear();
            }
        }
        for w in self.writes.iter_mut().filter(|w| w.from == old) {
            w.loose = true;
        }
        // Memory that is gone cannot be written; whoever waits for such a write finds its endpoint broken.
        if self.setup.family.is_fenced() {
            let (dead, live): (Vec<Write>, Vec<Write>) =
                std::mem::take(&mut self.writes).into_iter().partition(|w| w.to == old);
            self.writes = live;
            self.orphan(&dead);
        } else {
            self.writes.retain(|w| w.to != old || !w.loose);
        }
        for other in self.setup.clone().addresses().filter(|o| *o != at) {
            if self.procs[other].watched.contains(&old) {
                self.proc(other).dying.insert(old);
            }
        }
        if at == D {
            self.expect_next();
            self.carry_out(D);
        }
    }

    pub(crate) fn resolved(&mut self) {
        self.proc(D).resolving = false;
        let ranks = self.ranks();
        self.order(D, |n| n.handle_resolved(NOW, &source(), Ok(ranks)));
    }

    /// How traces name the process at an address.
    pub(crate) fn name(&self, at: usize) -> String {
        let life = self.procs[at].life;
        let base = ["S0", "S1", "D"][at];
        if life == 0 { base.to_owned() } else { format!("{base}{}", "'".repeat(usize::from(life))) }
    }
}

fn conn_session(c: &Conn) -> SessionNo {
    c.session
}
