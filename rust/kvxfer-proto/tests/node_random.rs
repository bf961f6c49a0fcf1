//! Random rooms over random faults: engines of several sizes, every page given away again as soon as it is free.
//!
//! A failure names its seeds. `KVXFER_SEED=17 cargo test -p kvxfer-proto --test node_random NAME` runs one of them
//! again; the same seed and faults give the same run.

#![allow(clippy::cast_possible_truncation)]

mod sim;

use kvxfer_proto::msg::Verify;
use kvxfer_proto::node::{Config, Direction, EventKind, Expect, Flaw, Mover, PeerKey};
use kvxfer_proto::{PushId, ReasonKind};
use sim::Net;
use sim::rooms::{BOTH, PAGES, SECOND, endings, expect, fill, net_of, push, room, why, wrong_bytes};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// Seeds of each test.
const SEEDS: u64 = 200;
/// Ranks of prefill and decode.
const SHAPES: [(u32, u32); 5] = [(2, 1), (2, 2), (1, 2), (4, 2), (1, 1)];
/// Enough for sources to be taken once only.
const PREFILL_PAGES: u32 = 2048;
/// Tokens of every room, and the pages that they need.
const TOKENS: u64 = 12;
const ROOM_PAGES: u32 = 3;

/// What goes wrong besides lost sessions, cancels and stopped processes.
#[derive(Clone, Copy, Default, Debug)]
struct Faults {
    /// Prefill's engine takes pushes back and delivers again.
    preempt: bool,
    /// Processes restart.
    restart: bool,
    /// Endpoints break.
    fabric: bool,
    /// Some sources are opened and never pushed.
    unpushed: bool,
    /// The receiver's own copies take their time.
    slow_copies: bool,
    /// Deliveries go through staging slots of so many bytes, of which there are so many.
    packed: Option<(u64, u32)>,
    /// A rule that decode breaks.
    flaw: Option<Flaw>,
}

const EVERYTHING: Faults = Faults {
    preempt: true,
    restart: true,
    fabric: true,
    unpushed: true,
    slow_copies: false,
    packed: None,
    flaw: None,
};

/// One push of a room, or none of the layers named: all of them.
type Chunk = ((u64, u64), Option<(u32, u32)>);

/// What one source has to do with a room.
#[derive(Clone, Default)]
struct Part {
    /// Restarts of the source before the room began.
    life: u32,
    pushes: Vec<PushId>,
    /// Whether its engine has named the room at all.
    named: bool,
}

#[derive(Clone)]
struct Wanted {
    r: u64,
    /// By decode rank.
    pages: Vec<Vec<u32>>,
    lives: Vec<u32>,
    /// By prefill rank.
    parts: Vec<Part>,
}

struct World {
    net: Net,
    faults: Faults,
    prefills: usize,
    decodes: usize,
    /// Restarts, by node.
    lives: Vec<u32>,
    /// Events that were looked at, by node.
    seen: Vec<usize>,
    /// By decode rank.
    free: Vec<Vec<u32>>,
    wanted: Vec<Wanted>,
    next_push: u64,
    next_source_page: u32,
    wrong: Vec<String>,
}

impl World {
    fn new(seed: u64, faults: Faults) -> Self {
        let mover = if faults.packed.is_some() { Mover::Sender } else { BOTH[(seed % 2) as usize] };
        let (p, d) = SHAPES[(seed / 2 % 5) as usize];
        let config = Config { flaw: faults.flaw, ..Config::default() };
        let (mut net, _) = net_of(seed, mover, (p, PREFILL_PAGES), (d, PAGES), &config);
        net.data_us = (50, 5000);
        net.ring = faults.packed;
        if faults.slow_copies {
            net.copy_us = (0, 800);
        }
        let (prefills, decodes) = (p as usize, d as usize);
        Self {
            net,
            faults,
            prefills,
            decodes,
            lives: vec![0; prefills + decodes],
            seen: vec![0; prefills + decodes],
            free: vec![(0..PAGES).collect(); decodes],
            wanted: Vec::new(),
            next_push: 1,
            next_source_page: 0,
            wrong: Vec::new(),
        }
    }

    fn run_for(&mut self, us: u64) {
        self.net.run_until(self.net.now + us);
        self.take_events();
    }

    /// Released pages are free for the next room; those of a success must hold its bytes.
    fn take_events(&mut self) {
        for j in 0..self.decodes {
            let node = self.prefills + j;
            let events = self.net.nodes[node].events[self.seen[node]..].to_vec();
            self.seen[node] += events.len();
            // No byte is changed here on its way.
            let changed =
                |k: &EventKind| matches!(k, EventKind::Failed(r) if r.kind == ReasonKind::ChecksumMismatch);
            for e in events.iter().filter(|e| changed(&e.kind)) {
                self.wrong.push(format!("t={}: {:?}", self.net.now, e.kind));
            }
            for e in events.iter().filter(|e| e.released) {
                let Some(w) = self.wanted.iter().find(|w| room(w.r) == e.room) else { continue };
                if w.lives[j] != self.lives[node] {
                    continue;
                }
                let pages = &w.pages[j];
                self.free[j].extend(pages);
                if e.kind == EventKind::Success {
                    let bad = wrong_bytes(&mut self.net, node, w.r, pages, 0, 0..TOKENS);
                    if bad > 0 {
                        let now = self.net.now;
                        self.wrong.push(format!("t={now}: {bad} wrong bytes in room {} at decode-{j}", w.r));
                    }
                }
            }
        }
    }

    fn begin_room(&mut self) {
        if self.free.iter().any(|f| f.len() < ROOM_PAGES as usize) {
            return;
        }
        let pages: Vec<Vec<u32>> =
            self.free.iter_mut().map(|f| f.split_off(f.len() - ROOM_PAGES as usize)).collect();
        let mut w = Wanted {
            r: self.wanted.len() as u64 + 1,
            pages,
            lives: self.lives[self.prefills..].to_vec(),
            parts: self.lives[..self.prefills]
                .iter()
                .map(|life| Part { life: *life, ..Part::default() })
                .collect(),
        };
        if self.net.rng.below(2) == 0 {
            self.expect_all(&w);
            self.push_all(&mut w);
        } else {
            self.push_all(&mut w);
            self.expect_all(&w);
        }
        self.wanted.push(w);
    }

    fn expect_all(&mut self, w: &Wanted) {
        for (j, pages) in w.pages.iter().enumerate() {
            // Two rooms of three are summed, whatever befalls them.
            let verify = [Verify::Off, Verify::Full, Verify::Sample][(w.r % 3) as usize];
            let order = Expect { verify, ..expect(w.r, pages, (0, TOKENS)) };
            self.net.order(self.prefills + j, |n, now| n.handle_expect(now, order));
        }
    }

    fn push_all(&mut self, w: &mut Wanted) {
        for i in 0..self.prefills {
            let style = self.net.rng.next();
            if self.faults.unpushed && self.net.rng.below(40) == 0 {
                w.parts[i].named = true;
                self.net.order(i, |n, now| n.handle_open(now, room(w.r), None, None));
            } else {
                self.push_whole(i, w, style);
            }
        }
    }

    /// All of a room from one source, at once or in pieces.
    fn push_whole(&mut self, i: usize, w: &mut Wanted, style: u64) {
        let pages: Vec<u32> = (0..ROOM_PAGES).map(|k| (self.next_source_page + k) % PREFILL_PAGES).collect();
        self.next_source_page += ROOM_PAGES;
        fill(&mut self.net, i, w.r, &pages, 0, 0..TOKENS);
        let (lower, upper) = (Some((0, 1)), Some((1, 2)));
        let chunks: &[Chunk] = match style % 4 {
            0 => &[((0, 12), None)],
            1 => &[((0, 4), None), ((4, 12), None)],
            2 => &[((0, 12), lower), ((0, 12), upper)],
            _ => &[((0, 8), lower), ((0, 8), upper), ((8, 12), lower), ((8, 12), upper)],
        };
        for (k, (tokens, layers)) in chunks.iter().enumerate() {
            let mut p = push(w.r, self.next_push, &pages[(tokens.0 / 4) as usize..], *tokens);
            self.next_push += 1;
            p.layers = *layers;
            p.last = k + 1 == chunks.len();
            w.parts[i].pushes.push(p.id);
            w.parts[i].named = true;
            self.net.push(i, p);
        }
    }

    fn cancel(&mut self, node: usize, r: u64) {
        self.net.order(node, |n, now| n.handle_cancel(now, room(r), why(ReasonKind::Cancelled)));
    }

    /// One thing that goes wrong, or nothing.
    fn mishap(&mut self, late: bool) {
        let newest = self.wanted.len() - 1;
        let v = self.net.rng.below(self.wanted.len() as u64) as usize;
        let v = if self.net.rng.below(2) == 0 { newest } else { v };
        let i = self.net.rng.below(self.prefills as u64) as usize;
        let j = self.net.rng.below(self.decodes as u64) as usize;
        let d = self.prefills + j;
        let r = self.wanted[v].r;
        match self.net.rng.below(20) {
            0 | 1 => self.net.cut_session(i, d, late),
            2 => self.cancel(d, r),
            3 => {
                let part = &self.wanted[v].parts[i];
                if part.named && part.life == self.lives[i] {
                    self.cancel(i, r);
                }
            }
            4 => self.net.stop(i),
            5 => self.net.cont(i),
            6 => self.net.stop(d),
            7 => self.net.cont(d),
            8..=11 if self.faults.preempt => self.preempt(v, i),
            12 if self.faults.restart => self.restart(i),
            13 if self.faults.restart => {
                self.restart(d);
                self.free[j] = (0..PAGES).collect();
            }
            14 if self.faults.fabric => self.break_fabric(d, i, Direction::WeGrant),
            15 if self.faults.fabric => self.break_fabric(i, d, Direction::TheyGrant),
            _ => {}
        }
    }

    fn is_over(&self, node: usize, r: u64) -> bool {
        let mut events = self.net.nodes[node].events.iter();
        events.any(|e| e.room == room(r) && !matches!(e.kind, EventKind::Retracted(_)))
    }

    /// The engine takes all pushes back, the last one first, and delivers the room again from other pages.
    fn preempt(&mut self, v: usize, i: usize) {
        let mut w = self.wanted[v].clone();
        let part = &mut w.parts[i];
        if part.life != self.lives[i]
            || part.pushes.is_empty()
            || self.net.nodes[i].stopped
            || self.is_over(i, w.r)
        {
            return;
        }
        for id in part.pushes.drain(..).rev() {
            self.net.order(i, |n, now| n.handle_retract(now, room(w.r), id));
        }
        let pause = self.net.rng.below(300);
        self.run_for(pause);
        if !self.is_over(i, w.r) {
            let style = self.net.rng.next();
            self.push_whole(i, &mut w, style);
        }
        self.wanted[v] = w;
    }

    fn restart(&mut self, node: usize) {
        self.net.restart(node, Config::default());
        self.lives[node] += 1;
        self.seen[node] = 0;
    }

    fn break_fabric(&mut self, at: usize, peer: usize, direction: Direction) {
        let key = PeerKey { incarnation: self.net.nodes[peer].incarnation, direction };
        self.net.order(at, |n, now| n.handle_fabric_broken(now, key, &why(ReasonKind::FabricError)));
    }

    /// Everybody runs again; what still waits for a source that will not push is given up, and the rest times out.
    fn wind_down(&mut self) {
        for node in 0..self.net.nodes.len() {
            self.net.cont(node);
        }
        self.run_for(60 * SECOND);
        for w in self.wanted.clone() {
            for j in 0..self.decodes {
                let node = self.prefills + j;
                if w.lives[j] == self.lives[node] && self.net.events_of(node, room(w.r)).is_empty() {
                    self.cancel(node, w.r);
                }
            }
        }
        self.run_for(700 * SECOND);
    }

    /// Every room that a living process was told of has ended once and is released once, and nothing is held.
    fn check(&mut self) {
        for w in &self.wanted {
            let decodes = w.lives.iter().enumerate().map(|(j, life)| (self.prefills + j, *life));
            let prefills = w.parts.iter().enumerate().filter(|(_, p)| p.named).map(|(i, p)| (i, p.life));
            for (node, _) in decodes.chain(prefills).filter(|(node, life)| self.lives[*node] == *life) {
                let (terminal, released) = endings(&self.net, node, w.r);
                if (terminal, released) != (1, 1) {
                    let (name, events) = (&self.net.nodes[node].name, self.net.events_of(node, room(w.r)));
                    self.wrong.push(format!(
                        "room {} ended {terminal} times and was released {released} times at {name}: {events:?}",
                        w.r
                    ));
                }
            }
        }
        self.wrong.append(&mut self.net.violations);
        for n in &self.net.nodes {
            let g = n.node.gauges();
            let rooms = (g.granted_pages, g.quarantined_pages, g.inbound, g.outbound, g.deliveries);
            if rooms != (0, 0, 0, 0, 0) || g.staging_slots != 0 {
                self.wrong.push(format!("{} holds {g:?} in the end", n.name));
            }
        }
    }
}

/// One seed; returns what went wrong, and how many slices came through slots.
fn run_seed(seed: u64, faults: Faults) -> (Vec<String>, u64) {
    let mut w = World::new(seed, faults);
    for _ in 0..40 {
        let pause = w.net.rng.below(3000);
        w.run_for(pause);
        w.begin_room();
        if !w.wanted.is_empty() {
            w.mishap(seed.is_multiple_of(3));
        }
    }
    w.wind_down();
    w.check();
    (w.wrong, w.net.unpacked)
}

fn run(faults: Faults) {
    let only: Option<u64> = std::env::var("KVXFER_SEED")
        .ok()
        .map(|s| s.parse().unwrap_or_else(|e| panic!("KVXFER_SEED={s}: {e}")));
    let seeds = only.map_or(0..SEEDS, |seed| seed..seed + 1);
    let (mut broken, mut unpacked) = (Vec::new(), 0);
    for seed in seeds {
        // A panic inside a node names no seed by itself.
        let (wrong, slices) = catch_unwind(AssertUnwindSafe(|| run_seed(seed, faults)))
            .unwrap_or_else(|_| (vec!["panic, see above".to_owned()], 0));
        unpacked += slices;
        if !wrong.is_empty() {
            broken.push((seed, wrong));
        }
    }
    assert!(faults.packed.is_none() || only.is_some() || unpacked > 0, "nothing went packed");
    let mut report = String::new();
    for (seed, wrong) in broken.iter().take(5) {
        report += &format!(
            "\nKVXFER_SEED={seed}: {} things, first of all\n  {}",
            wrong.len(),
            wrong[..wrong.len().min(3)].join("\n  ")
        );
    }
    let all: Vec<u64> = broken.iter().map(|(seed, _)| *seed).collect();
    assert!(broken.is_empty(), "{faults:?}: {} seeds break: {all:?}{report}", all.len());
}

#[test]
fn lost_sessions_cancels_and_stopped_processes() {
    run(Faults::default());
}

#[test]
fn rooms_that_one_source_never_pushes() {
    run(Faults { unpushed: true, ..Faults::default() });
}

#[test]
fn preemptions() {
    run(Faults { preempt: true, ..Faults::default() });
}

#[test]
fn restarts() {
    run(Faults { restart: true, ..Faults::default() });
}

#[test]
fn broken_endpoints() {
    run(Faults { fabric: true, ..Faults::default() });
}

#[test]
fn slow_copies() {
    run(Faults { slow_copies: true, ..Faults::default() });
}

#[test]
fn everything_at_once() {
    run(EVERYTHING);
}

#[test]
fn everything_at_once_with_slow_copies() {
    run(Faults { slow_copies: true, ..EVERYTHING });
}

#[test]
fn pushes_that_go_packed() {
    run(Faults { packed: Some((16, 6)), ..Faults::default() });
}

#[test]
fn pushes_that_go_packed_are_taken_back() {
    run(Faults { preempt: true, packed: Some((16, 3)), ..Faults::default() });
}

#[test]
fn everything_at_once_through_a_ring_of_few_slots() {
    run(Faults { packed: Some((8, 2)), ..EVERYTHING });
}

#[test]
fn everything_at_once_through_a_ring_of_many_slots() {
    run(Faults { packed: Some((64, 32)), ..EVERYTHING });
}

#[test]
fn a_slot_that_is_freed_early_is_caught() {
    let faults =
        Faults { packed: Some((16, 3)), flaw: Some(Flaw::StagingSlotFreedEarly), ..Faults::default() };
    let caught = (0..SEEDS).any(|seed| {
        let (wrong, _) = run_seed(seed, faults);
        wrong.iter().any(|w| w.contains("landed in slot"))
    });
    assert!(caught, "a slice landed in a slot that was another's, or free, and nobody saw it");
}
