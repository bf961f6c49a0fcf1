//! Which steps need not be walked in every order.
//!
//! Once no fault is left, a source that is *calm* has nothing to fear from the others. Calm means: it runs and is in
//! session with a destination that is alive, over one connection that is whole, and each holds the other's endpoint; a
//! message waits for it; none of its writes is in flight. Then its own steps alone are walked (all of them), and
//! everybody else's wait. That loses nothing (an ample set, in the words of partial-order reduction):
//!
//! * *Nothing that others do changes what the source can do.* They can only add to the end of its inbox, which is not
//!   empty. Only three things besides would: the landing of a write of its own, and there is none; the loss of its
//!   connection or endpoint, for which its destination would have to lose it, which without faults happens only when
//!   time passes, and none does while a step is left; the death of a process, which is a fault.
//! * *What the source does changes nothing that others can do*, but adds to the end of the destination's inbox, where
//!   order is kept, and to the writes in flight. What they read of a source beyond that is its link's state when they
//!   dial it, and they are connected; whether it has given its page back, when the destination copies, and if a step
//!   of the source has given a page back in that family the step is not taken alone; whether it takes calls.
//!   [`World::alone`] looks at the states after the steps, and refuses any set of which one step changes more.
//! * *No property tells the orders apart.* Each is a statement on one process's orders and events, or on the page and
//!   the writes that land on it, of which there are none of this source.
//! * *Nobody waits for ever.* Each of these steps takes a message or an order that waits for the source; only others
//!   bring new ones. So after finitely many steps everybody is walked again, and a cycle has such a state in it.
//!
//! The first condition is about the world's rules, so tests walk small worlds both ways: the same ends are reached, and
//! the same rules are broken in the broken variants.

use super::steps::Step;
use super::world::{D, EndState, Family, World};
use kvxfer_proto::node::{Direction, PeerKey};

impl World {
    /// The steps to walk from here, with the states after them where those are known already.
    pub(crate) fn steps_to_walk(&self) -> Vec<(Step, Option<Self>)> {
        let all = self.steps();
        if self.setup.reduced && self.faults_left == 0 {
            for at in self.setup.addresses().filter(|at| *at != D && self.is_calm(*at)) {
                if let Some(alone) = self.alone(at, &all) {
                    return alone;
                }
            }
        }
        all.into_iter().map(|s| (s, None)).collect()
    }

    /// Whether nothing that others do decides what this source can do.
    fn is_calm(&self, at: usize) -> bool {
        let (me, p) = (self.me(at), &self.procs[at]);
        if p.stopped || !p.fencing.is_empty() || self.writes.iter().any(|w| w.from == me && !w.loose) {
            return false;
        }
        let mut waits = false;
        let mut talks = false;
        for c in self.conns.iter().filter(|c| c.who[1] == me) {
            let Some(d) = self.alive(c.who[0]) else {
                // Its other side is gone for good: the rest is between this source and its own kernel.
                waits |= c.ends[1].state != EndState::Closed;
                continue;
            };
            let whole = c.is_whole() && c.ends.iter().all(|e| e.established);
            let key = PeerKey { incarnation: me, direction: Direction::WeGrant };
            let q = &self.procs[d];
            let theirs = q.eps.get(&key);
            if !whole || talks || q.fencing.contains_key(&key) || q.node.session_of(key) != Some(c.session) {
                return false;
            }
            let key = c.key(1);
            if p.node.session_of(key) != Some(c.session) || theirs.is_none() || p.eps.get(&key) != theirs {
                return false;
            }
            talks = true;
            waits |= !c.ends[1].inbox.is_empty();
        }
        waits && talks
    }

    /// The steps of this source and what they lead to, if all of them touch nothing but its own and the ends of queues.
    fn alone(&self, at: usize, all: &[Step]) -> Option<Vec<(Step, Option<Self>)>> {
        let mut out = Vec::new();
        for step in all.iter().filter(|s| s.actor() == Some(at)) {
            let next = self.after(step)?;
            let (before, after) = (&self.procs[at], &next.procs[at]);
            let gave_back =
                (0..before.rooms.len()).any(|r| before.rooms[r].released != after.rooms[r].released);
            let still = next.violation.is_none()
                && !(gave_back && self.setup.family == Family::Copies)
                && before.eps == after.eps
                && after.fencing.is_empty()
                && next.talks(at);
            if !still {
                return None;
            }
            out.push((step.clone(), Some(next)));
        }
        Some(out).filter(|out| !out.is_empty())
    }

    /// Whether the source still has its whole connection to the destination that lives.
    fn talks(&self, at: usize) -> bool {
        let (me, d) = (self.me(at), self.me(D));
        self.conns.iter().any(|c| c.who == [d, me] && c.is_whole())
    }
}
