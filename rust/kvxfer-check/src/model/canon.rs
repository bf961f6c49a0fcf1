//! States that have the same future are made one.
//!
//! Each of these takes something out of a state that no step ahead looks at, or takes a step at once that changes
//! nothing and that nobody sees. [`super::Setup::reduced`] turns them off, with the orders that `reduce.rs` leaves out;
//! tests walk small worlds both ways.

use super::world::{D, EMPTY, EndState, Item, World, back};
use kvxfer_proto::Incarnation;
use kvxfer_proto::msg::Msg;
use kvxfer_proto::node::{DeliveryId, Direction, Flaw, PeerKey};
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
        if self.setup.flaw != Some(Flaw::NoSessionCheck) {
            for at in self.setup.clone().addresses().filter(|at| *at != D) {
                let d = PeerKey { incarnation: self.me(D), direction: Direction::TheyGrant };
                let s = PeerKey { incarnation: self.me(at), direction: Direction::WeGrant };
                let changed = self.renumber((D, s), (at, d)) | self.renumber((at, d), (D, s));
                touched[at] |= changed;
                touched[D] |= changed;
            }
        }
        // Nobody waits for the end of these.
        for w in self.writes.iter_mut().filter(|w| w.loose) {
            w.id = DeliveryId(0);
        }
    }

    pub(crate) fn canonicalise_proc(&mut self, at: usize) {
        let me = self.me(at);
        let written = self.writes.iter().filter(|w| w.from == me).map(|w| w.id.0).max();
        let p = self.proc(at);
        let known = p.running.keys().next_back().map(|id| id.0).max(written).unwrap_or(0);
        p.node.reuse_delivery_numbers(known);
        if !p.rooms.iter().any(|s| s.ordered && s.released == 0) {
            // The next room's bytes have to come anew.
            p.cells = [[EMPTY; 2]; 2];
        }
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
        let checked = self.setup.flaw != Some(Flaw::NoSessionCheck);
        if e.inbox.is_empty() { stale || !e.established } else { stale && frames && checked }
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
