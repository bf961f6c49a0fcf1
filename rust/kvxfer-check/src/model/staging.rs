//! The ring of staging slots, in every interleaving: one receiver, two senders, two rooms, two slots.
//!
//! Both ends are the machines of [`kvxfer_proto::staging`]; here are the messages between them (in order, as a link
//! brings them), the writes, which land as late as they like, and the cancels, stopped writes and fences. A sender that
//! was fenced can land nothing more, and is not lent anything again.

use super::fp::{Fp, Prints};
use super::{Property, Violation};
use kvxfer_proto::node::{Direction, Flaw, PeerKey};
use kvxfer_proto::staging::{Credits, Landing, Lease, Slot, Slots, StagingError};
use kvxfer_proto::{Incarnation, Seq};
use std::collections::VecDeque;
use std::time::{Duration, Instant};

const PEERS: usize = 2;
const ROOMS: usize = 2;
const SLOTS: u32 = 2;
const BYTES: u64 = 8;

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
enum Message {
    Credit(usize, (u32, u32)),
    Cancel(usize),
    Filled(usize, u32),
    Returned(usize, u32),
    Drained(usize),
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct InFlight {
    peer: usize,
    room: usize,
    slot: u32,
}

/// What one sender still does for one room.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug, Default)]
struct Part {
    /// Writes to make.
    left: u8,
    /// Of those, credits that the receiver has not sent yet.
    uncredited: u8,
    /// Pieces that the receiver has unpacked.
    unpacked: u8,
    /// The sender knows that the room is over.
    void: bool,
    /// The receiver has the sender's last word on the room.
    answered: bool,
}

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
struct State {
    ring: Slots,
    credits: [Credits; PEERS],
    to_sender: [VecDeque<Message>; PEERS],
    to_receiver: [VecDeque<Message>; PEERS],
    writes: Vec<InFlight>,
    /// Whose bytes a slot holds.
    content: [Option<(usize, usize)>; SLOTS as usize],
    parts: [[Part; ROOMS]; PEERS],
    failed: [bool; ROOMS],
    fenced: [bool; PEERS],
    faults_left: u8,
}

/// One thing that happens.
#[derive(Clone, PartialEq, Eq, Debug)]
enum Move {
    Lend(usize, usize),
    Post(usize, usize),
    GiveBack(usize, usize),
    Land(usize),
    Flush(usize, usize, u32),
    ReadBySender(usize),
    ReadByReceiver(usize),
    Unpack(u32),
    Unpacked(u32),
    Cancel(usize),
    StopWrite(usize, usize, u32),
    Fence(usize),
}

/// What the walk found.
#[derive(Clone, Debug)]
pub struct StagingReport {
    /// Every state was visited, and nothing was found.
    pub complete: bool,
    /// States.
    pub states: u64,
    /// Steps between states.
    pub transitions: u64,
    /// States in which nothing happens any more.
    pub ends: u64,
    /// How long it took.
    pub took: Duration,
    /// The first thing found, and a shortest way there.
    pub found: Option<(Violation, Vec<String>)>,
}

fn room(r: usize) -> kvxfer_proto::Room {
    super::world::room(r)
}

fn key(p: usize) -> PeerKey {
    PeerKey { incarnation: Incarnation(p as u64 + 1), direction: Direction::WeGrant }
}

fn lease(p: usize, r: usize) -> Lease {
    Lease { peer: key(p), room: room(r), seq: Seq(1) }
}

fn wrong(property: Property, text: impl Into<String>) -> Violation {
    Violation { property, text: text.into() }
}

/// Honest machines never take each other's words for errors.
fn honest<T>(what: Result<T, StagingError>) -> Result<T, Violation> {
    what.map_err(|e| wrong(Property::HonestPeersKeepTheProtocol, e.to_string()))
}

impl State {
    fn new(flaw: Option<Flaw>, faults: u8) -> Result<Self, StagingError> {
        let part = Part { left: 1, uncredited: 1, ..Part::default() };
        // One sender has two pieces for the first room: it needs a slot that comes back. It gets one more than it needs.
        let first = Part { left: 2, uncredited: 3, ..Part::default() };
        Ok(Self {
            ring: Slots::new(BYTES, SLOTS, flaw)?,
            credits: [Credits::new(BYTES, SLOTS)?, Credits::new(BYTES, SLOTS)?],
            to_sender: Default::default(),
            to_receiver: Default::default(),
            writes: Vec::new(),
            content: [None; SLOTS as usize],
            parts: [[first, part], [part, part]],
            failed: [false; ROOMS],
            fenced: [false; PEERS],
            faults_left: faults,
        })
    }

    fn is_whole(&self, r: usize) -> bool {
        (0..PEERS).all(|p| self.parts[p][r].unpacked == if (p, r) == (0, 0) { 2 } else { 1 })
    }

    fn moves(&self) -> Vec<Move> {
        let mut out = Vec::new();
        for p in 0..PEERS {
            for r in 0..ROOMS {
                let part = self.parts[p][r];
                if part.uncredited > 0 && !self.failed[r] && !self.fenced[p] && self.ring.free() > 0 {
                    out.push(Move::Lend(p, r));
                }
                if part.left > 0 && !part.void && self.credits[p].held(room(r), Seq(1)) > 0 {
                    out.push(Move::Post(p, r));
                }
                if part.left == 0 && !part.void && self.credits[p].held(room(r), Seq(1)) > 0 {
                    out.push(Move::GiveBack(p, r));
                }
            }
            if !self.to_sender[p].is_empty() {
                out.push(Move::ReadBySender(p));
            }
            if !self.to_receiver[p].is_empty() && !self.fenced[p] {
                out.push(Move::ReadByReceiver(p));
            }
        }
        out.extend((0..self.writes.len()).map(Move::Land));
        for (n, slot) in (0u32..).zip(self.ring.slots()) {
            match slot {
                Slot::Landed(..) => out.push(Move::Unpack(n)),
                Slot::Unpacking(_) | Slot::Stopping(_) => out.push(Move::Unpacked(n)),
                _ => {}
            }
            for p in 0..PEERS {
                for r in (0..ROOMS).filter(|r| self.is_under_way(p, *r, n)) {
                    if !self.writes.iter().any(|w| (w.peer, w.slot) == (p, n)) {
                        out.push(Move::Flush(p, r, n));
                        if self.faults_left > 0 {
                            out.push(Move::StopWrite(p, r, n));
                        }
                    }
                }
            }
        }
        if self.faults_left > 0 {
            out.extend((0..ROOMS).filter(|r| !self.failed[*r] && !self.is_whole(*r)).map(Move::Cancel));
            out.extend((0..PEERS).filter(|p| !self.fenced[*p]).map(Move::Fence));
        }
        out
    }

    /// Whether a write of this sender to this slot has not been reported to it as ended.
    fn is_under_way(&self, p: usize, r: usize, n: u32) -> bool {
        let mut probe = self.credits[p].clone();
        probe.written(room(r), n).is_ok()
    }

    fn apply(&mut self, m: &Move) -> Result<(), Violation> {
        match *m {
            Move::Lend(p, r) => {
                for run in self.ring.lend(lease(p, r), 1) {
                    self.parts[p][r].uncredited -= 1;
                    self.to_sender[p].push_back(Message::Credit(r, run));
                }
            }
            Move::Post(p, r) => {
                if let Some(slot) = honest(self.credits[p].take(room(r), Seq(1), BYTES))? {
                    self.parts[p][r].left -= 1;
                    self.writes.push(InFlight { peer: p, room: r, slot });
                }
            }
            Move::GiveBack(p, r) => {
                if let Some(slot) = honest(self.credits[p].take(room(r), Seq(1), 0))? {
                    honest(self.credits[p].release(room(r), slot))?;
                    self.to_receiver[p].push_back(Message::Returned(r, slot));
                }
            }
            Move::Land(i) => {
                let w = self.writes.remove(i);
                let owner = self.ring.slots()[w.slot as usize];
                let may = matches!(owner, Slot::Lent(l) | Slot::Quarantined(l) if l == lease(w.peer, w.room));
                if !may {
                    let text = format!(
                        "a write of sender {} for room {} landed in slot {}, which is {owner:?}",
                        w.peer,
                        room(w.room),
                        w.slot
                    );
                    return Err(wrong(Property::NoLateWrite, text));
                }
                self.content[w.slot as usize] = Some((w.peer, w.room));
            }
            Move::Flush(p, r, n) => {
                if honest(self.credits[p].written(room(r), n))? {
                    self.to_receiver[p].push_back(Message::Filled(r, n));
                }
                self.answer(p, r);
            }
            Move::StopWrite(p, r, n) => {
                self.faults_left -= 1;
                honest(self.credits[p].stopped(room(r), n))?;
                self.parts[p][r].left += 1;
                self.answer(p, r);
            }
            Move::ReadBySender(p) => self.read_by_sender(p)?,
            Move::ReadByReceiver(p) => self.read_by_receiver(p)?,
            Move::Unpack(n) => {
                if let Some(l) = self.ring.slots()[n as usize].lease() {
                    honest(self.ring.unpack(l, n))?;
                }
            }
            Move::Unpacked(n) => self.unpacked(n)?,
            Move::Cancel(r) => {
                self.faults_left -= 1;
                self.fail(r);
            }
            Move::Fence(p) => {
                // Whatever of it is in flight is gone, and so is what it had said.
                self.faults_left -= 1;
                self.fenced[p] = true;
                self.writes.retain(|w| w.peer != p);
                self.to_receiver[p].clear();
                self.to_sender[p].clear();
                self.credits[p].lost();
                for r in 0..ROOMS {
                    if !self.parts[p][r].answered && !self.is_whole(r) {
                        self.fail(r);
                    }
                    self.parts[p][r].void = true;
                    self.parts[p][r].answered = true;
                }
                self.ring.fenced(key(p));
            }
        }
        self.writes.sort_by_key(|w| (w.peer, w.room, w.slot));
        Ok(())
    }

    fn fail(&mut self, r: usize) {
        if std::mem::replace(&mut self.failed[r], true) {
            return;
        }
        self.ring.fail(room(r));
        for p in (0..PEERS).filter(|p| !self.fenced[*p]) {
            self.to_sender[p].push_back(Message::Cancel(r));
        }
    }

    fn answer(&mut self, p: usize, r: usize) {
        if self.parts[p][r].void && !self.credits[p].is_writing(room(r)) {
            self.to_receiver[p].push_back(Message::Drained(r));
        }
    }

    fn read_by_sender(&mut self, p: usize) -> Result<(), Violation> {
        match self.to_sender[p].pop_front() {
            Some(Message::Credit(r, run)) => honest(self.credits[p].grant(room(r), Seq(1), run))?,
            Some(Message::Cancel(r)) => {
                self.credits[p].cancel(room(r), Seq(1));
                self.parts[p][r].void = true;
                self.answer(p, r);
            }
            _ => {}
        }
        Ok(())
    }

    fn read_by_receiver(&mut self, p: usize) -> Result<(), Violation> {
        match self.to_receiver[p].pop_front() {
            Some(Message::Filled(r, n)) => {
                let landing = honest(self.ring.landed(lease(p, r), n, BYTES))?;
                if landing == Landing::Unpack && self.failed[r] {
                    return Err(wrong(
                        Property::CancelledFailsAtOnce,
                        "a failed room's slot is to be unpacked",
                    ));
                }
            }
            Some(Message::Returned(r, n)) => honest(self.ring.returned(lease(p, r), n))?,
            Some(Message::Drained(r)) => {
                self.ring.drained(key(p), room(r), Seq(1));
                self.parts[p][r].answered = true;
            }
            _ => {}
        }
        Ok(())
    }

    fn unpacked(&mut self, n: u32) -> Result<(), Violation> {
        let Some(l) = self.ring.slots()[n as usize].lease() else { return Ok(()) };
        if !honest(self.ring.unpacked(l, n))? {
            return Ok(());
        }
        let r = super::world::index(l.room);
        let p = usize::from(l.peer == key(1));
        if self.content[n as usize] != Some((p, r)) {
            let text = format!(
                "slot {n} was unpacked for room {}, but holds {:?}",
                l.room, self.content[n as usize]
            );
            return Err(wrong(Property::SuccessHasAllBytes, text));
        }
        self.parts[p][r].unpacked += 1;
        Ok(())
    }

    fn check_end(&self) -> Option<Violation> {
        if self.ring.free() != SLOTS || !self.writes.is_empty() {
            return Some(wrong(
                Property::EveryPageComesBack,
                format!("in the end the slots are {:?}", self.ring.slots()),
            ));
        }
        let stuck = (0..ROOMS).find(|r| !self.failed[*r] && !self.is_whole(*r));
        stuck.map(|r| wrong(Property::OneEnd, format!("room {} never ends", room(r))))
    }
}

/// Walks every state breadth first, with so many faults on a path at most.
///
/// # Errors
/// When the ring cannot be.
pub fn explore_staging(flaw: Option<Flaw>, faults: u8) -> Result<StagingReport, StagingError> {
    let began = Instant::now();
    let root = State::new(flaw, faults)?;
    let mut visited = Prints::default();
    visited.insert(Fp::of(&root));
    let mut parents: Vec<(usize, Option<Move>)> = vec![(0, None)];
    let mut queue = VecDeque::from([(root, 0usize)]);
    let mut report = StagingReport {
        complete: false,
        states: 1,
        transitions: 0,
        ends: 0,
        took: Duration::ZERO,
        found: None,
    };
    'walk: while let Some((state, me)) = queue.pop_front() {
        let moves = state.moves();
        let mut at = (me, None);
        let mut found = None;
        if moves.iter().all(|m| matches!(m, Move::Cancel(_) | Move::Fence(_) | Move::StopWrite(..))) {
            report.ends += 1;
            found = state.check_end();
        }
        for m in moves {
            if found.is_some() {
                break;
            }
            let mut next = state.clone();
            report.transitions += 1;
            if let Err(v) = next.apply(&m) {
                found = Some(v);
                at = (me, Some(m));
                break;
            }
            if visited.insert(Fp::of(&next)) {
                report.states += 1;
                parents.push((me, Some(m)));
                queue.push_back((next, parents.len() - 1));
            }
        }
        if let Some(v) = found {
            let mut way: Vec<String> = at.1.iter().map(|m| format!("{m:?}")).collect();
            let mut node = at.0;
            while let Some((parent, Some(m))) = parents.get(node) {
                way.push(format!("{m:?}"));
                node = *parent;
            }
            way.reverse();
            report.found = Some((v, way));
            break 'walk;
        }
    }
    report.complete = report.found.is_none();
    report.took = began.elapsed();
    Ok(report)
}
