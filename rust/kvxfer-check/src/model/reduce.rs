//! Which steps need not be walked in every order.
//!
//! In some states only the steps of one *set* are walked, and all others wait (a persistent set, in the words of
//! partial-order reduction). It loses nothing if on every path from there the first step that is of the set, could have
//! come at once, with all others after it, and would have led to the same. There are three such sets. And a stop is
//! walked only where it matters. (What is done about two sources that share nothing any more is another thing: `apart.rs`.)
//!
//! # What is left of a dead destination
//!
//! A source's steps about a destination that is dead, and about rooms that only the dead one knew: reading what it had
//! sent, the end of its connection, the sight of its death, its writes to memory that is gone, the push of such a room,
//! and, as faults, the cancel or the timeout of such a room and the timers of that peer. Nothing else enables or stops
//! one of them, and no other process sees what they do. A stop of the source stops them, too. But what it does when it is
//! continued it could as well have done before, and of one that is never continued, or is killed, nothing is asked.
//!
//! # A calm source
//!
//! A source is calm if it runs, its one connection to the destination that is alive is whole, a message waits for it, and
//! none of its writes is in flight. The set is all its own steps, its faults, the cut of its connection, and an *oath*.
//!
//! * *Nothing that others do changes what it can do.* They only add to the end of its inbox, which is not empty. What
//!   else would: the landing of a write of its own, and there is none; its destination's death or loss of patience, and
//!   its own death, which are faults, below. Time does not pass while a step is left.
//! * *What it does changes nothing that others can do*, but adds to the end of the destination's inbox, where order is
//!   kept, and to the writes in flight. What they read of a source beyond that is its link's state when they dial it, and
//!   they are connected; whether it has given its page back, when the destination copies, and if a step of the source has
//!   given a page back in that family, the set is not taken; whether it takes calls. [`World::alone`] looks at the states
//!   after the steps, and refuses any set of which one step changes more.
//! * *Its connection is cut*, and only then does it take its next step. If that is to read, it could have read before:
//!   what it then sends may get lost with the cut. If it reads nothing more, the cut could have come at once: what the
//!   destination sent since then got lost.
//! * *Its destination dies or gives it up, or it is killed itself*, and it has taken no step before that. If it then
//!   reads, it could have read before. If it does not, nobody will know what waited for it. For this there is the oath:
//!   it does nothing, and its inbox is dropped, until one of the three has happened. A path on which none does is no path.
//! * *No property tells the orders apart.* Each is a statement on one process's orders and events, or on the page and the
//!   writes that land on it, of which there are none of this source.
//! * *Nobody waits for ever.* Each of these steps takes a message or an order that waits for the source; only others
//!   bring new ones. So after finitely many steps everybody is walked again, and a cycle has such a state in it.
//!
//! # A source, once the destination's work is over
//!
//! No fault is left, every room that the destination has or will have is over there and its page given back, and nothing
//! is copied: then what it and one source still say to each other has nothing to do with the other source. The set is all
//! steps of the one and with the one. A page that nobody holds makes every write that lands a violation, in any order. Slots
//! are shared beyond that, so this is not for pushes that go packed.
//!
//! # Stops
//!
//! Nobody sees that a process is stopped but by the time that passes: until then it is one that takes no step. So a stop
//! can wait until nothing else is left to happen, and then time passes or the path ends; and one that is continued before
//! time has passed was not stopped. A process that is continued takes its steps after time has passed and before it passes
//! again, so it may as well be continued at once ([`Step::Awake`]). A calm source is stopped at once: its other steps are
//! the set. Nothing is asked of a process that is never continued, so what it did last does not matter.
//!
//! All this is about the world's rules, so tests walk small worlds both ways: the same ends are reached, and the same
//! rules are broken in the broken variants.

use super::steps::Step;
use super::world::{D, EndState, Family, FaultKind, Reduction, World, index};
use kvxfer_proto::node::{Direction, PeerKey, Wait};
use kvxfer_proto::{Incarnation, Room};

/// Steps, with the states after them where those are known already.
pub(crate) type Walked = Vec<(Step, Option<World>)>;

impl World {
    /// The steps to walk from here.
    pub(crate) fn steps_to_walk(&self) -> Walked {
        let all = self.steps();
        if self.setup.reduced == Reduction::Orders {
            let sources = || self.setup.addresses().filter(|at| *at != D && !self.procs[*at].stopped);
            let found = sources()
                .find_map(|at| self.leftovers(at, &all))
                .or_else(|| sources().filter(|at| self.is_calm(*at)).find_map(|at| self.alone(at, &all)))
                .or_else(|| self.after_work(&all));
            return found.unwrap_or_else(|| self.stops_in_time(all));
        }
        all.into_iter().map(|s| (s, None)).collect()
    }

    /// Whether nothing will ever be written for the destination again, and no fault is left.
    fn is_work_over(&self) -> bool {
        let d = &self.procs[D];
        let over = |r: usize| self.is_gone(r) || d.rooms[r].is_over() && d.rooms[r].released > 0;
        self.faults_left == 0 && !d.resolving && d.running.is_empty() && (0..d.rooms.len()).all(over)
    }

    /// The steps between the destination and one source, once no room is left that it shares with another.
    fn after_work(&self, all: &[Step]) -> Option<Walked> {
        if self.setup.family.is_packed() || !self.is_work_over() {
            return None;
        }
        let of = |at: usize| all.iter().filter(move |s| s.source() == Some(at));
        let at = self.setup.addresses().find(|at| of(*at).any(|s| !self.is_optional(s)))?;
        (at != D).then(|| of(at).map(|s| (s.clone(), None)).collect())
    }

    /// Of these steps, stops only where they matter, and continuations only with the time that they waited for.
    fn stops_in_time(&self, all: Vec<Step>) -> Walked {
        let stopped = [0, 1, 2].map(|at| self.procs[at].stopped);
        let mut out = Walked::new();
        for step in all {
            match step {
                // Time that passes for a source that is left out is not seen here.
                Step::Continue(_) if self.setup.left_out.is_some() => out.push((step, None)),
                Step::Continue(_) => {}
                Step::Stop(at) => {
                    if self.lets_time_pass(at) {
                        out.push((step, None));
                    }
                }
                Step::Elapse(at, wait) => {
                    out.push((step, None));
                    let continued = (1..8).map(|set: u8| [0, 1, 2].map(|who| set & (1 << who) != 0));
                    let continued = continued.filter(|set| (0..=D).all(|who| stopped[who] || !set[who]));
                    out.extend(continued.map(|set| (Step::Awake(at, wait, set), None)));
                }
                step => out.push((step, None)),
            }
        }
        out
    }

    /// Whether all that can happen once this process is stopped is that time passes, or that others are stopped and it
    /// does.
    fn lets_time_pass(&self, at: usize) -> bool {
        let Some(next) = self.after(&Step::Stop(at)) else { return false };
        let steps = next.steps();
        let passes = steps.iter().any(|s| matches!(s, Step::Elapse(..)));
        passes
            || next.is_end(&steps)
            || steps.iter().any(|s| matches!(s, Step::Stop(other) if next.lets_time_pass(*other)))
    }

    /// Whether the destination that is alive knows nothing of this room, and never will.
    pub(crate) fn is_gone(&self, r: usize) -> bool {
        let d = &self.procs[D];
        !d.rooms[r].ordered && d.to_expect & (1 << r) == 0
    }

    /// The steps of a source about what is dead, if nobody else sees them.
    fn leftovers(&self, at: usize, all: &[Step]) -> Option<Walked> {
        let (me, p) = (self.me(at), &self.procs[at]);
        let dead = |who: Incarnation| self.alive(who).is_none();
        let delivery =
            |id: &kvxfer_proto::node::DeliveryId| p.running.get(id).is_some_and(|r| dead(r.key.incarnation));
        let gone = |room: Room| self.is_gone(index(room));
        let mine = |s: &&Step| match s {
            Step::Push(who, r) | Step::Cancel(who, r) => *who == at && self.is_gone(*r),
            Step::Read(who, c) | Step::EndOfFile(who, c) => *who == at && dead(c.0[0]),
            Step::Post(who, id) | Step::Complete(who, id) => *who == at && delivery(id),
            Step::FenceDone(who, key) | Step::Broken(who, key) | Step::RunOut(who, Wait::Peer(key)) => {
                *who == at && dead(key.incarnation)
            }
            Step::DeathSeen(who, of) | Step::Settled(who, of) => *who == at && dead(*of),
            Step::Land(w) => w.0.from == me && dead(w.0.to),
            Step::RunOut(who, Wait::Outbound(room)) => *who == at && gone(*room),
            _ => false,
        };
        let steps: Vec<&Step> = all.iter().filter(mine).collect();
        if steps.iter().all(|s| s.fault().is_some() || self.is_optional(s)) {
            return None;
        }
        let mut out = Walked::new();
        for step in steps {
            let next = self.after(step)?;
            if next.violation.is_none() && !self.looks_the_same(&next, at) {
                return None;
            }
            out.push((step.clone(), Some(next)));
        }
        Some(out)
    }

    /// Whether a step of a source left alone whatever has to do with the destination that is alive.
    fn looks_the_same(&self, next: &Self, at: usize) -> bool {
        let d = PeerKey { incarnation: self.me(D), direction: Direction::TheyGrant };
        let (before, after) = (&self.procs[at], &next.procs[at]);
        let living = |w: &Self| {
            let of = |c: &&std::sync::Arc<super::world::Conn>| c.who[0] == d.incarnation;
            w.conns.iter().filter(of).cloned().collect::<Vec<_>>()
        };
        let rooms = (0..before.rooms.len()).all(|r| self.is_gone(r) || before.rooms[r] == after.rooms[r]);
        let others = (0..=D).all(|o| o == at || self.prints[o] == next.prints[o]);
        rooms
            && others
            && before.eps.get(&d) == after.eps.get(&d)
            && before.fencing.contains_key(&d) == after.fencing.contains_key(&d)
            && before.node.link_state(d) == after.node.link_state(d)
            && living(self) == living(next)
    }

    /// Whether nothing that others do decides what this source can do.
    fn is_calm(&self, at: usize) -> bool {
        let (me, p) = (self.me(at), &self.procs[at]);
        if !p.fencing.is_empty() || self.is_doomed(at) || self.writes.iter().any(|w| w.from == me && !w.loose)
        {
            return false;
        }
        let mut talks = false;
        let mut waits = false;
        for c in self.conns.iter().filter(|c| c.who[1] == me) {
            let Some(d) = self.alive(c.who[0]) else {
                // Its other side is gone for good: the rest is between this source and its own kernel.
                waits |= c.ends[1].state != EndState::Closed;
                continue;
            };
            let key = PeerKey { incarnation: me, direction: Direction::WeGrant };
            let q = &self.procs[d];
            let theirs = q.eps.get(&key);
            let whole = c.is_whole() && c.ends[0].established;
            if !whole || talks || q.fencing.contains_key(&key) || q.node.session_of(key) != Some(c.session) {
                return false;
            }
            let key = c.key(1);
            let ours = p.eps.get(&key);
            let current = !c.ends[1].established || p.node.session_of(key) == Some(c.session);
            if !current || theirs.is_none() || ours.is_some() && ours != theirs {
                return false;
            }
            talks = true;
            waits |= !c.ends[1].inbox.is_empty();
        }
        waits && talks
    }

    /// The steps of this source and what they lead to, if all of them touch nothing but its own and the ends of queues.
    fn alone(&self, at: usize, all: &[Step]) -> Option<Walked> {
        let me = self.me(at);
        let mine = |s: &&Step| match s {
            Step::Cancel(who, _) | Step::RunOut(who, _) | Step::Stop(who) => *who == at,
            Step::Cut(c) => c.0[1] == me,
            s => s.actor() == Some(at),
        };
        let mut out = Walked::new();
        let mut moves = false;
        for step in all.iter().filter(mine) {
            let next = self.after(step)?;
            let (before, after) = (&self.procs[at], &next.procs[at]);
            let gave_back =
                (0..before.rooms.len()).any(|r| before.rooms[r].released != after.rooms[r].released);
            let still = step.fault().is_some() || after.fencing.is_empty() && next.talks(at);
            if next.violation.is_none() && (!still || gave_back && self.setup.family == Family::Copies) {
                return None;
            }
            moves |= step.fault().is_none();
            out.push((step.clone(), Some(next)));
        }
        let lethal = |k: &FaultKind| matches!(k, FaultKind::Restart | FaultKind::Timeout);
        if moves && self.faults_left > 0 && self.setup.kinds.iter().any(lethal) {
            out.push((Step::Doom(at), None));
        }
        Some(out).filter(|_| moves)
    }

    /// Whether the source still has its whole connection to the destination that lives.
    fn talks(&self, at: usize) -> bool {
        let (me, d) = (self.me(at), self.me(D));
        self.conns.iter().any(|c| c.who == [d, me] && c.is_whole())
    }
}
