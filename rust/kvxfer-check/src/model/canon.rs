//! States that have the same future are made one.
//!
//! Each of these takes something out of a state that no step ahead looks at, or takes a step at once that changes
//! nothing and that nobody sees. [`super::Setup::reduced`] turns them off, with the orders that `reduce.rs` leaves out;
//! tests walk small worlds both ways.

use super::world::{D, EMPTY, EndState, FaultKind, Item, World, back};
use kvxfer_proto::Incarnation;
use kvxfer_proto::msg::Msg;
use kvxfer_proto::node::{DeliveryId, Direction, PeerKey};
use std::cmp::Ordering;
use std::sync::Arc;

impl World {
    pub(crate) fn canonicalise(&mut self, touched: &mut [bool; 3]) {
        for i in 0..self.conns.len() {
            for end in 0..2 {
                if let Some(at) = self.alive(self.conns[i].who[end])
                    && self.is_over_for(at, i, end)
                {
                    self.end_of_file(at, i, end);
                    touched[at] = true;
                }
            }
        }
        self.conns.retain(|c| c.ends.iter().any(|e| e.state != EndState::Closed));
        self.conns.sort_by_key(|c| (c.who, c.session, c.serial));
        self.rename_conns();
        for (at, touched) in touched.iter_mut().enumerate() {
            *touched |= self.forget_received(at);
        }
        if self.setup.flaw.is_none() {
            self.forget_unread();
        }
        if !self.setup.trusts_old_sessions() {
            for at in self.setup.clone().addresses().filter(|at| *at != D) {
                let d = PeerKey { incarnation: self.me(D), direction: Direction::TheyGrant };
                let s = PeerKey { incarnation: self.me(at), direction: Direction::WeGrant };
                let changed =
                    self.renumber((D, s), (at, d)) | self.renumber((at, d), (D, s)) | self.renumber_pair(at);
                touched[at] |= changed;
                touched[D] |= changed;
            }
        }
        // Nobody waits for the end of these.
        for w in self.writes.iter_mut().filter(|w| w.loose) {
            w.id = DeliveryId(0);
        }
    }

    /// Sessions, generations and endpoints of a source and the destination are numbered by the order of those that
    /// anybody can still name. Says whether anything changed.
    fn renumber_pair(&mut self, at: usize) -> bool {
        let (me, d) = (self.me(at), self.me(D));
        let s = PeerKey { incarnation: me, direction: Direction::WeGrant };
        let d_key = PeerKey { incarnation: d, direction: Direction::TheyGrant };
        self.renumber_sessions(at, s, d_key)
            | self.renumber_generations(at, s, d_key)
            | self.rename_endpoints(at, s, d_key)
            | self.renumber_seqs(at, s, d_key)
    }

    fn renumber_seqs(&mut self, at: usize, s: PeerKey, d: PeerKey) -> bool {
        let who = [d.incarnation, s.incarnation];
        let (ours, theirs) = (&self.procs[D].node, &self.procs[at].node);
        let on_its_way =
            self.conns.iter().filter(|c| c.who == who).flat_map(|c| &c.ends).flat_map(|e| &e.inbox);
        let said = on_its_way.filter_map(|item| if let Item::Frame(f) = item { f.msg.seq() } else { None });
        let named = said.chain(ours.seqs(s)).chain(theirs.seqs(d)).map(|seq| seq.0).min();
        let off = named.unwrap_or(ours.last_seq(s).0 + 1).saturating_sub(1);
        if off == 0 {
            return false;
        }
        for c in self.conns.iter_mut().filter(|c| c.who == who) {
            for item in Arc::make_mut(c).ends.iter_mut().flat_map(|e| &mut e.inbox) {
                if let Item::Frame(f) = item
                    && f.msg.seq().is_some()
                    && let Some(seq) = Arc::make_mut(f).msg.seq_mut()
                {
                    seq.0 = seq.0.saturating_sub(off);
                }
            }
        }
        self.proc(D).node.renumber_seqs(s, off);
        self.proc(at).node.renumber_seqs(d, off);
        true
    }

    fn renumber_sessions(&mut self, at: usize, s: PeerKey, d: PeerKey) -> bool {
        let who = [d.incarnation, s.incarnation];
        let (ours, theirs) = (&self.procs[D].node, &self.procs[at].node);
        let named = self.conns.iter().filter(|c| c.who == who).map(|c| c.session);
        let named = named.chain(ours.session_of(s)).chain(theirs.session_of(d)).map(|n| n.0).min();
        let off = named.unwrap_or(ours.last_session(s).0 + 1).saturating_sub(1);
        if off == 0 {
            return false;
        }
        for c in self.conns.iter_mut().filter(|c| c.who == who) {
            let c = Arc::make_mut(c);
            c.session.0 -= off;
            for item in c.ends.iter_mut().flat_map(|e| &mut e.inbox) {
                if let Item::Frame(f) = item {
                    let f = Arc::make_mut(f);
                    f.session.0 = f.session.0.saturating_sub(off);
                }
            }
        }
        self.proc(D).node.renumber_sessions(s, off);
        self.proc(at).node.renumber_sessions(d, off);
        true
    }

    /// Whether a process may still forget a peer that is alive, and by the number of its own fences know it again. That
    /// takes time without a session, and who runs and is dialled has one before time passes.
    fn may_forget(&self) -> bool {
        let later = |k: &FaultKind| match k {
            FaultKind::Timeout => self.faults_left > 0,
            FaultKind::Stop => self.stops_left > 0,
            _ => false,
        };
        self.setup.kinds.iter().any(later) || self.procs.iter().any(|p| p.stopped)
    }

    fn renumber_generations(&mut self, at: usize, s: PeerKey, d: PeerKey) -> bool {
        if self.may_forget() {
            return false;
        }
        let who = [d.incarnation, s.incarnation];
        let (ours, theirs) = (&self.procs[D].node, &self.procs[at].node);
        if [ours.is_fencing(s), ours.is_unfenceable(s), theirs.is_fencing(d), theirs.is_unfenceable(d)]
            != [false; 4]
        {
            return false;
        }
        let mut off = ours.link_state(s).1.min(theirs.link_state(d).1);
        for c in self.conns.iter().filter(|c| c.who == who) {
            // The destination describes itself when it takes the session up.
            if !c.ends[1].established {
                off = off.min(c.ends[1].own_generation);
            }
            for e in &c.ends {
                for item in &e.inbox {
                    if let Item::Describe { generation, .. } = item {
                        off = off.min(*generation);
                    }
                }
            }
        }
        if off == 0 {
            return false;
        }
        for c in self.conns.iter_mut().filter(|c| c.who == who) {
            for e in &mut Arc::make_mut(c).ends {
                e.own_generation = e.own_generation.saturating_sub(off);
                for item in &mut e.inbox {
                    if let Item::Describe { generation, .. } = item {
                        *generation -= off;
                    }
                }
            }
        }
        self.proc(D).node.renumber_generations(s, off);
        self.proc(at).node.renumber_generations(d, off);
        true
    }

    fn rename_endpoints(&mut self, at: usize, s: PeerKey, d: PeerKey) -> bool {
        let mut named: Vec<u8> = self.endpoints_named(at, s, d).collect();
        named.sort_unstable();
        named.dedup();
        if named.iter().zip(1..).all(|(n, i)| *n == i) {
            return false;
        }
        let name = |n: &mut u8| {
            if let Some(i) = named.iter().position(|m| m == n) {
                *n = u8::try_from(i + 1).unwrap_or(u8::MAX);
            }
        };
        let who = [d.incarnation, s.incarnation];
        for c in self.conns.iter_mut().filter(|c| c.who == who) {
            for item in Arc::make_mut(c).ends.iter_mut().flat_map(|e| &mut e.inbox) {
                if let Item::Attach(n) = item {
                    name(n);
                }
            }
        }
        self.writes
            .iter_mut()
            .filter(|w| (w.from, w.to) == (s.incarnation, d.incarnation))
            .for_each(|w| name(&mut w.ep));
        for (at, key) in [(D, s), (at, d)] {
            let p = self.proc(at);
            p.eps.get_mut(&key).into_iter().chain(p.fencing.get_mut(&key)).for_each(name);
        }
        true
    }

    /// Every name of an endpoint between a source and the destination that is still to be found.
    pub(crate) fn endpoints_named(&self, at: usize, s: PeerKey, d: PeerKey) -> impl Iterator<Item = u8> {
        let who = [d.incarnation, s.incarnation];
        let told =
            self.conns.iter().filter(move |c| c.who == who).flat_map(|c| &c.ends).flat_map(|e| &e.inbox);
        let told = told.filter_map(|item| if let Item::Attach(n) = item { Some(*n) } else { None });
        let written = self
            .writes
            .iter()
            .filter(move |w| (w.from, w.to) == (s.incarnation, d.incarnation))
            .map(|w| w.ep);
        let (ours, theirs) = (&self.procs[D], &self.procs[at]);
        let held = [ours.eps.get(&s), ours.fencing.get(&s), theirs.eps.get(&d), theirs.fencing.get(&d)];
        told.chain(written).chain(held.into_iter().flatten().copied())
    }

    pub(crate) fn canonicalise_proc(&mut self, at: usize) {
        let me = self.me(at);
        let written = self.writes.iter().filter(|w| w.from == me).map(|w| w.id.0).max();
        let forgets = self.may_forget();
        // Of a dead peer that was forgotten nothing can come any more.
        let ghosts =
            self.conns.iter().any(|c| c.who.contains(&me) && c.who.iter().any(|w| self.alive(*w).is_none()));
        // No fault is left by which it could forget anybody again, and it knows everybody who is alive.
        let settled = self.faults_left == 0 && !forgets && self.knows_all(at);
        let p = self.proc(at);
        p.forgot_living &= !settled;
        let known = p.running.keys().next_back().map(|id| id.0).max(written).unwrap_or(0);
        p.node.reuse_delivery_numbers(known);
        if !p.forgot_living && !ghosts {
            p.node.forget_generations();
            if !forgets {
                p.node.forget_own_generations();
            }
        }
        if !p.rooms.iter().any(|s| s.ordered && s.released == 0) {
            // The next room's bytes have to come anew.
            p.cells = [[EMPTY; 2]; 2];
        }
    }

    /// Whether this process knows every other one that it has to do with.
    fn knows_all(&self, at: usize) -> bool {
        let knows = |other: usize| {
            let direction = if at == D { Direction::WeGrant } else { Direction::TheyGrant };
            let key = PeerKey { incarnation: self.me(other), direction };
            self.procs[at].node.peer_keys().any(|k| k == key)
        };
        self.setup.addresses().filter(|other| (*other == D) != (at == D)).all(knows)
    }

    /// Serial numbers tell connections apart that are there together, and the generation that a side described is
    /// looked at once, when the session comes up.
    fn rename_conns(&mut self) {
        let mut last: Option<([Incarnation; 2], u8)> = None;
        for c in &mut self.conns {
            let serial = last.filter(|(who, _)| *who == c.who).map_or(0, |(_, n)| n.saturating_add(1));
            last = Some((c.who, serial));
            let described = c.ends.iter().any(|e| e.established && e.own_generation != 0);
            if c.serial != serial || described {
                let c = Arc::make_mut(c);
                c.serial = serial;
                c.ends.iter_mut().filter(|e| e.established).for_each(|e| e.own_generation = 0);
            }
        }
    }

    /// Takes the numbers off a link that neither side will name again: only differences of numbers mean anything, and
    /// that any was used. One received number stays, for a link on which nothing was said can be taken afresh.
    fn renumber(&mut self, (from, to): (usize, PeerKey), (receiver, sender): (usize, PeerKey)) -> bool {
        let (received, generation) = self.procs[receiver].node.link_state(sender);
        if received < 2 || generation != self.procs[from].node.link_state(to).1 {
            return false;
        }
        let mut off = self.procs[from].node.settled_numbers(to, received);
        let end = usize::from(from != D);
        let who = [self.me(D), if from == D { to.incarnation } else { self.me(from) }];
        for c in self.conns.iter().filter(|c| c.who == who) {
            for item in &c.ends[end].inbox {
                if let Item::Describe { received, generation: g } = item {
                    off = if *g == generation { off.min(*received) } else { 0 };
                }
            }
        }
        if off == 0 {
            return false;
        }
        for c in self.conns.iter_mut().filter(|c| c.who == who) {
            let c = Arc::make_mut(c);
            for item in &mut c.ends[end].inbox {
                match item {
                    Item::Describe { received, .. } => *received -= off,
                    Item::Frame(f) => {
                        if let Msg::Ack(n) = f.msg
                            && f.number == 0
                        {
                            Arc::make_mut(f).msg = Msg::Ack(n.saturating_sub(off));
                        }
                    }
                    _ => {}
                }
            }
            for item in &mut c.ends[1 - end].inbox {
                if let Item::Frame(f) = item
                    && f.number > 0
                {
                    // Whatever was received before is a duplicate, by any number.
                    let f = Arc::make_mut(f);
                    f.number = f.number.saturating_sub(off).max(1);
                }
            }
        }
        self.proc(from).node.renumber(to, off, 0);
        self.proc(receiver).node.renumber(sender, 0, off);
        true
    }

    /// Whether what this end can still read, and its end of file, do nothing to its node: then they are taken at once.
    ///
    /// A session that a node has taken or refused and does not hold any more never comes back, for a later one has a
    /// higher number: frames of it are stale, and so is its end. One that the node was never told of has no end for it.
    fn is_over_for(&self, at: usize, i: usize, end: usize) -> bool {
        let c = &self.conns[i];
        let (e, other) = (&c.ends[end], &c.ends[1 - end]);
        let over =
            e.state == EndState::Closing || c.cut || other.state != EndState::Open && e.inbox.is_empty();
        if e.state == EndState::Closed || !over {
            return false;
        }
        let stale = e.established && self.procs[at].node.session_of(c.key(end)) != Some(c.session);
        let frames = e.inbox.iter().all(|item| matches!(item, Item::Frame(_)));
        let checked = !self.setup.trusts_old_sessions();
        if e.inbox.is_empty() { stale || !e.established } else { stale && frames && checked }
    }

    /// Frames that will not be looked at: of a session that is over for good, or with a number that was received.
    fn forget_unread(&mut self) {
        let settled = !self.may_forget();
        for i in 0..self.conns.len() {
            for end in 0..2 {
                let c = &self.conns[i];
                let e = &c.ends[end];
                let Some(at) = self.alive(c.who[end]).filter(|_| !e.inbox.is_empty()) else { continue };
                let node = &self.procs[at].node;
                let key = c.key(end);
                let (received, generation) = node.link_state(key);
                let current = node.session_of(key) == Some(c.session);
                let resumes =
                    matches!(e.inbox.front(), Some(Item::Describe { generation: g, .. }) if *g == generation);
                let known = match e.established {
                    true if current => received,
                    true => u64::MAX,
                    // Taken up, it resumes where the last one ended, or is refused.
                    false if settled && resumes => received,
                    false => 0,
                };
                let unread = |item: &Item| {
                    let Item::Frame(f) = item else { return false };
                    let read_before = if f.number > 0 { f.number <= known } else { known == u64::MAX };
                    read_before && f.msg != Msg::Ack(0)
                };
                if e.inbox.iter().any(unread) {
                    let inbox = &mut Arc::make_mut(&mut self.conns[i]).ends[end].inbox;
                    for item in inbox.iter_mut().filter(|item| unread(item)) {
                        if let Item::Frame(f) = item {
                            Arc::make_mut(f).msg = Msg::Ack(0);
                        }
                    }
                }
            }
        }
    }

    /// What a process has sent and the other side has taken in. Says whether anything changed.
    fn forget_received(&mut self, at: usize) -> bool {
        let mut changed = false;
        let me = self.me(at);
        for key in self.procs[at].node.peer_keys().collect::<Vec<_>>() {
            let from_there = PeerKey { incarnation: me, direction: back(key.direction) };
            let received = match self.alive(key.incarnation) {
                None => u64::MAX,
                Some(peer) => {
                    let (received, generation) = self.procs[peer].node.link_state(from_there);
                    let own = self.procs[at].node.link_state(key).1;
                    // A peer that has started afresh voids what was said to it; of one that is yet to, all is said again.
                    match generation.cmp(&own) {
                        Ordering::Equal => received,
                        Ordering::Greater if self.procs[at].node.was_used(key) => u64::MAX,
                        Ordering::Less | Ordering::Greater => continue,
                    }
                }
            };
            if self.procs[at].node.remembers_received(key, received) {
                changed |= self.proc(at).node.forget_received(key, received);
            }
        }
        changed
    }
}
