//! Two sources that share nothing but the last room's end are walked apart.
//!
//! Once no fault is left and no room is yet to be expected, what the destination and one source still do is nobody else's
//! business: they close, fence, meet again, hand off their part of the last room, and tell each other how rooms ended. No
//! step of the one pair enables, stops or changes one of the other, but for what follows. So instead of every state of the
//! one pair with every state of the other, each pair is walked alone, in the world that the other source has left
//! ([`World::without`]): if no rule is broken in either, none is in the whole.
//!
//! *What the pairs share*, and what stands for it in the world of one:
//!
//! * *The last room, while it goes on.* To one pair the other's part in it is done at some moment, or the room fails
//!   because of the other at some moment, or neither ever happens: [`Step::Settle`](super::Step::Settle) does either at any
//!   moment at which the destination runs. Which of these the other pair really can bring about is not asked.
//! * *A failed room's page* is given back when both sources have answered or were fenced. Here the source that has left is
//!   taken to have done so at once. So the page is given back as soon as the other source has answered, never later than
//!   in the whole, and a write of that source that would land after that does so here. Nobody gets the page after that, and
//!   nothing that the two still say depends on it.
//! * *Time* passes in the whole when nothing is left to happen in either pair, and of timers that run out by default
//!   lengths the shortest of both pairs is first. Here it passes once nothing is left to happen in this one. And as the
//!   time that a stopped process waited for may be the other pair's, it may be continued at any moment.
//! * *The destination's table of peers.* Its limit is far away. Where links of new peers start is common to all, so a pair
//!   in which the destination meets its source as a new peer is not walked alone.
//! * *Who a source is.* Word that a source was replaced by another takes grants back from both. So as long as the last room
//!   goes on, no process may have been restarted.
//!
//! Each of these only adds paths, so each path of the whole has in it a path of either pair, with its end, and each property
//! is a statement on one process, one source's writes, or the page. A pair that goes on for ever makes the whole do so. What
//! only a pair alone can do might be taken for a fault of the machines: if a pair is found to break a rule, that state is
//! walked whole, and what is reported has happened there. Of the ends of both, all those are counted that agree on the
//! destination; some of them may be ends that the whole never comes to.

use super::fp::{PrintMap, Prints};
use super::world::{D, EMPTY, NOW, Proc, Reduction, S0, S1, Setup, World, address, tag};
use kvxfer_proto::node::PeerKey;
use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;

impl World {
    /// Whether all that the two sources still share is the last room's end.
    pub(crate) fn is_apart(&self) -> bool {
        let s = &self.setup;
        let d = &self.procs[D];
        let rooms = || 0..d.rooms.len();
        let same_lives = self.procs.iter().all(|p| p.life == 0);
        s.reduced == Reduction::Orders
            && s.sources == 2
            && s.left_out.is_none()
            && !s.family.is_packed()
            && self.faults_left == 0
            && s.faults > 0
            && !d.resolving
            && rooms().all(|r| self.is_gone(r) || d.rooms[r].ordered)
            && (same_lives || rooms().all(|r| self.is_gone(r) || d.rooms[r].is_over()))
    }

    /// The world that this source has left.
    pub(crate) fn without(&self, left: usize, setup: &Arc<Setup>, blank: &Arc<Proc>) -> Self {
        let mut w = self.clone();
        w.setup = setup.clone();
        w.alike = false;
        w.conns.retain(|c| address(c.who[1]) != left);
        w.writes.retain(|x| address(x.from) != left);
        w.procs[left] = blank.clone();
        let p = w.proc(D);
        let of = |k: &PeerKey| address(k.incarnation) == left;
        for key in p.node.peer_keys().filter(of).collect::<Vec<_>>() {
            p.node.leave_out(key);
        }
        p.running.retain(|_, r| !of(&r.key));
        p.dialling.retain(|k| !of(k));
        p.eps.retain(|k, _| !of(k));
        p.fencing.retain(|k, _| !of(k));
        p.broken.retain(|k| !of(k));
        for set in [&mut p.watched, &mut p.dying, &mut p.settling] {
            set.retain(|who| address(*who) != left);
        }
        p.cells[left] = [EMPTY; 2];
        w.settle_what_is_over();
        w.tidy([true; 3]);
        w
    }

    /// Whether the destination knows this source.
    fn knows(&self, of: usize) -> bool {
        let me = self.me(of);
        self.procs[D].node.peer_keys().any(|k| k.incarnation == me)
    }

    /// The parts of rooms that the source that is left out still has.
    fn left_out_parts(&self) -> Vec<PeerKey> {
        let Some(left) = self.setup.left_out else { return Vec::new() };
        self.procs[D].node.awaited().filter(|k| address(k.incarnation) == left).collect()
    }

    /// Whether the source that is left out still has a part in a room.
    pub(crate) fn awaits_left_out(&self) -> bool {
        !self.left_out_parts().is_empty()
    }

    /// The source that is left out has done its part, or never will.
    pub(crate) fn settle(&mut self, delivered: bool) {
        let (parts, left) = (self.left_out_parts(), self.setup.left_out.unwrap_or(S1));
        if delivered && let Some(r) = self.procs[D].rooms.iter().position(|s| s.ordered && !s.is_over()) {
            self.proc(D).cells[left] = [tag(r); 2];
        }
        for key in parts {
            self.order(D, |n| n.settle_left_out(NOW, key, delivered));
        }
    }

    /// A room that is over waits no longer for the source that is left out.
    pub(crate) fn settle_what_is_over(&mut self) -> bool {
        let over = self.setup.left_out.is_some()
            && self.awaits_left_out()
            && self.procs[D].rooms.iter().all(|s| !s.ordered || s.is_over());
        if over {
            self.settle(false);
        }
        over
    }

    /// How a pair ended.
    fn ending(&self, of: usize) -> Ending {
        let d = &self.procs[D];
        Ending {
            source: self.outcome_at(of),
            stopped: d.stopped.then(|| self.outcome_at(D)),
            ends: d.rooms.map(|s| (s.success, s.failed)),
            released: d.rooms.map(|s| s.released),
        }
    }
}

/// How a pair ended: its source, and the destination as far as this pair decides that.
#[derive(Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
struct Ending {
    source: String,
    stopped: Option<String>,
    ends: [(u8, u8); 2],
    released: [u8; 2],
}

/// Ways to end, by number.
type Ways = BTreeSet<u32>;

/// What was found of pairs that were walked alone.
pub(crate) struct Apart {
    setups: [Arc<Setup>; 2],
    blanks: [Arc<Proc>; 2],
    /// For each state the number of its set of ways to end; none if a rule was broken after it.
    known: PrintMap<Option<u32>>,
    ways: Vec<Ways>,
    numbers: HashMap<Ways, u32>,
    endings: Vec<Ending>,
    /// States of pairs.
    pub(crate) states: u64,
    pub(crate) transitions: u64,
    pub(crate) ends: u64,
}

struct Level {
    world: World,
    print: u128,
    steps: super::reduce::Walked,
    next: usize,
    ways: Ways,
}

impl Apart {
    pub(crate) fn new(root: &World) -> Self {
        let without = |left| Arc::new(Setup { left_out: Some(left), ..(*root.setup).clone() });
        let blank = |at: usize| {
            let mut p = (*root.procs[at]).clone();
            p.to_push = 0;
            Arc::new(p)
        };
        Self {
            setups: [without(S0), without(S1)],
            blanks: [blank(S0), blank(S1)],
            known: PrintMap::default(),
            ways: Vec::new(),
            numbers: HashMap::new(),
            endings: Vec::new(),
            states: 0,
            transitions: 0,
            ends: 0,
        }
    }

    /// Whether all is well with both pairs of this state; then also how the whole can end.
    pub(crate) fn walk(&mut self, w: &World, outcomes: &mut BTreeSet<String>) -> bool {
        let mut both = [0; 2];
        for (of, left) in [(S0, S1), (S1, S0)] {
            let alone = w.without(left, &self.setups[left], &self.blanks[left]);
            if alone.violation.is_some() {
                return false;
            }
            match self.walk_pair(alone, of) {
                Some(ways) => both[of] = ways,
                None => return false,
            }
        }
        let [a, b] = both.map(|n| &self.ways[n as usize]);
        for a in a.iter().map(|n| &self.endings[*n as usize]) {
            for b in b.iter().map(|n| &self.endings[*n as usize]) {
                if (&a.stopped, a.ends) == (&b.stopped, b.ends) {
                    outcomes.insert(w.outcome_of_both(a, b));
                }
            }
        }
        true
    }

    /// The ways in which a pair can end; `None` if it breaks a rule.
    fn walk_pair(&mut self, root: World, of: usize) -> Option<u32> {
        let print = root.fingerprint();
        if let Some(known) = self.known.get(&print) {
            return *known;
        }
        let mut on_path = Prints::default();
        let mut path: Vec<Level> = Vec::new();
        let mut new = Some((root, print));
        loop {
            if let Some((world, print)) = new.take() {
                self.states += 1;
                on_path.insert(print);
                let steps = world.steps_to_walk();
                let mut ways = Ways::new();
                let mut wrong = path.len() > super::explore::LONGEST;
                if world.is_end(steps.iter().map(|(s, _)| s)) {
                    self.ends += 1;
                    ways.insert(self.number_of(world.ending(of)));
                    wrong |= world.check_end().is_some();
                }
                path.push(Level { world, print, steps, next: 0, ways });
                if wrong {
                    return self.wrong(&path);
                }
            }
            let level = path.last_mut()?;
            let Some((step, ready)) = level.steps.get_mut(level.next) else {
                on_path.remove(&level.print);
                let done = path.pop()?;
                let number = self.set_number(done.ways);
                self.known.insert(done.print, Some(number));
                let Some(above) = path.last_mut() else { return Some(number) };
                above.ways.extend(&self.ways[number as usize]);
                continue;
            };
            level.next += 1;
            let Some(next) = ready.take().or_else(|| level.world.after(step)) else { continue };
            self.transitions += 1;
            if next.violation.is_some() || next.knows(of) && !level.world.knows(of) {
                return self.wrong(&path);
            }
            let print = next.fingerprint();
            match self.known.get(&print) {
                Some(Some(number)) => level.ways.extend(&self.ways[*number as usize]),
                Some(None) => return self.wrong(&path),
                None if on_path.contains(&print) => return self.wrong(&path),
                None => new = Some((next, print)),
            }
        }
    }

    /// After every state of this path a rule is broken.
    fn wrong(&mut self, path: &[Level]) -> Option<u32> {
        self.known.extend(path.iter().map(|l| (l.print, None)));
        None
    }

    fn number_of(&mut self, ending: Ending) -> u32 {
        let known = self.endings.iter().position(|e| *e == ending);
        let at = known.unwrap_or_else(|| {
            self.endings.push(ending);
            self.endings.len() - 1
        });
        u32::try_from(at).unwrap_or(u32::MAX)
    }

    fn set_number(&mut self, ways: Ways) -> u32 {
        if let Some(n) = self.numbers.get(&ways) {
            return *n;
        }
        let n = u32::try_from(self.ways.len()).unwrap_or(u32::MAX);
        self.ways.push(ways.clone());
        self.numbers.insert(ways, n);
        n
    }
}

impl World {
    /// The outcome of this world, if its pairs end so.
    fn outcome_of_both(&self, a: &Ending, b: &Ending) -> String {
        let d = a.stopped.clone().unwrap_or_else(|| {
            let mut end = self.clone();
            let p = end.proc(D);
            p.stopped = false;
            for (r, s) in p.rooms.iter_mut().enumerate() {
                (s.success, s.failed) = a.ends[r];
                s.released = a.released[r].min(b.released[r]);
            }
            end.outcome_at(D)
        });
        [&a.source, &b.source, &d].map(String::as_str).join(", ")
    }
}
