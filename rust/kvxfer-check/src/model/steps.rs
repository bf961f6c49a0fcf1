//! What can happen next, and what it does.

use super::Property;
use super::driver::NEVER;
use super::world::{
    D, EndState, Family, FaultKind, Item, NOW, ROOMS, S0, S1, World, Write, address, cancelled, push, room,
};
use kvxfer_proto::Incarnation;
use kvxfer_proto::node::{DeliveryId, Direction, PeerKey, Wait};
use std::sync::Arc;

/// Names a connection: the destination's incarnation, the source's, and which of theirs it is.
pub(crate) type ConnName = ([Incarnation; 2], u8);

/// One thing that happens. The first number is the address of the process that does it.
#[derive(Clone, PartialEq, Eq, Debug)]
#[allow(missing_docs)] // `World::describe` says what each is.
pub enum Step {
    Push(usize, usize),
    Resolve,
    Dial(PeerKey),
    Read(usize, ConnName),
    EndOfFile(usize, ConnName),
    Post(usize, DeliveryId),
    Land(Flight),
    Copy(DeliveryId),
    Complete(usize, DeliveryId),
    FenceDone(usize, PeerKey),
    Broken(usize, PeerKey),
    DeathSeen(usize, Incarnation),
    Settled(usize, Incarnation),
    Continue(usize),
    /// This source does nothing more until its connection is lost with all that it has not read, or it is killed.
    Doom(usize),
    /// Time passes, since nothing else can happen.
    Elapse(usize, Wait),
    /// Time passes, and then these processes are continued.
    Awake(usize, Wait, [bool; 3]),
    /// The source that is left out has brought all that it owes, or never will (`apart.rs`).
    Settle(bool),
    // Faults.
    Cancel(usize, usize),
    RunOut(usize, Wait),
    Restart(usize),
    Cut(ConnName),
    Stop(usize),
}

/// Names a write in flight.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Flight(pub(crate) Write);

impl Step {
    /// The kind of fault that it is, if it is one.
    #[must_use]
    pub fn fault(&self) -> Option<FaultKind> {
        Some(match self {
            Self::Cancel(..) => FaultKind::Cancel,
            Self::RunOut(..) => FaultKind::Timeout,
            Self::Restart(_) => FaultKind::Restart,
            Self::Cut(_) => FaultKind::LostSession,
            Self::Stop(_) => FaultKind::Stop,
            _ => return None,
        })
    }

    /// The same in the steps of a walk that leaves nothing out.
    pub(crate) fn plainly(self) -> Vec<Self> {
        match self {
            // An oath takes nothing away from what the others can do: the path is one without it, too.
            Self::Doom(_) | Self::Settle(_) => Vec::new(),
            Self::Awake(at, wait, continued) => {
                let them = (0..=D).filter(|who| continued[*who]).map(Self::Continue);
                std::iter::once(Self::Elapse(at, wait)).chain(them).collect()
            }
            step => vec![step],
        }
    }

    /// The process that takes this step.
    pub(crate) fn actor(&self) -> Option<usize> {
        match self {
            Self::Push(at, _)
            | Self::Read(at, _)
            | Self::EndOfFile(at, _)
            | Self::Post(at, _)
            | Self::Complete(at, _)
            | Self::FenceDone(at, _)
            | Self::Broken(at, _)
            | Self::DeathSeen(at, _)
            | Self::Settled(at, _) => Some(*at),
            _ => None,
        }
    }

    /// The source that takes this step, or with which the destination does. Faults and time have none.
    pub(crate) fn source(&self) -> Option<usize> {
        let named = |who: &Incarnation| Some(address(*who));
        match self {
            Self::Read(D, c) | Self::EndOfFile(D, c) => named(&c.0[1]),
            Self::Dial(key) | Self::FenceDone(D, key) | Self::Broken(D, key) => named(&key.incarnation),
            Self::DeathSeen(D, who) | Self::Settled(D, who) => named(who),
            Self::Land(w) => named(&w.0.from),
            step => step.actor().filter(|at| *at != D),
        }
    }

    /// The source that this step tells apart from the other one.
    fn singles_out(&self) -> Option<usize> {
        let at = match self {
            Self::RunOut(D, Wait::Peer(key)) => address(key.incarnation),
            Self::Cancel(at, _) | Self::Restart(at) | Self::Stop(at) | Self::RunOut(at, _) => *at,
            Self::Cut((who, _)) => address(who[1]),
            _ => return None,
        };
        (at != D).then_some(at)
    }
}

impl World {
    /// Everything that can happen now.
    ///
    /// Sources are alike until a fault singles one out, so the first fault that does hits the first source: for each
    /// path on which it hits the second there is one with the sources' parts exchanged.
    #[must_use]
    pub fn steps(&self) -> Vec<Step> {
        let mut out = Vec::with_capacity(16);
        let doomed = [S0, S1, D].map(|at| at != D && self.is_doomed(at));
        for at in self.setup.addresses().filter(|at| !self.procs[*at].stopped && !doomed[*at]) {
            self.steps_of(at, &mut out);
        }
        self.steps_of_conns(&mut out);
        out.retain(|s| s.actor().is_none_or(|at| !doomed[at]));
        for w in self.writes.iter().filter(|w| self.can_land(w)) {
            out.push(Step::Land(Flight(w.clone())));
        }
        // One that only waits to lose its connection has steps that it does not take.
        let quiet = !doomed.contains(&true) && out.iter().all(|s| self.is_optional(s));
        for at in self.setup.addresses().filter(|at| self.procs[*at].stopped) {
            out.push(Step::Continue(at));
        }
        if quiet {
            self.passing_time(&mut out);
        }
        if self.awaits_left_out() && !self.procs[D].stopped {
            out.extend([true, false].map(Step::Settle));
        }
        if self.faults_left > 0 {
            let first = out.len();
            self.faults(&mut out);
            if doomed.contains(&true) {
                let faults = out.split_off(first);
                out.extend(faults.into_iter().filter(|s| match s {
                    Step::Cancel(at, _) | Step::RunOut(at, _) | Step::Stop(at) => !doomed[*at],
                    Step::Cut((who, _)) => !doomed[address(who[1])],
                    _ => true,
                }));
            }
        }
        out
    }

    /// Whether a path may end without this step.
    pub(crate) fn is_optional(&self, step: &Step) -> bool {
        match step {
            Step::Continue(_) | Step::Settle(_) => true,
            // Memory that is mapped or registered goes on taking writes; a sender need never learn of the close.
            Step::Broken(..) => self.setup.family.is_unfenced(),
            _ => false,
        }
    }

    /// Whether nothing will happen any more, unless a stopped process is continued.
    #[must_use]
    pub fn is_end<'a>(&self, steps: impl IntoIterator<Item = &'a Step>) -> bool {
        let none = steps.into_iter().all(|s| s.fault().is_some() || self.is_optional(s));
        none && !self.setup.addresses().any(|at| at != D && self.is_doomed(at))
    }

    fn can_land(&self, w: &Write) -> bool {
        // A write to memory that is gone ends like any other, where no endpoint notices.
        self.is_live(w) || (self.setup.family.is_unfenced() && !w.loose)
    }

    fn steps_of(&self, at: usize, out: &mut Vec<Step>) {
        let p = &self.procs[at];
        if p.to_push != 0 {
            out.push(Step::Push(at, p.to_push.trailing_zeros() as usize));
        }
        if p.resolving {
            out.push(Step::Resolve);
        }
        for key in &p.dialling {
            // The kernel of a stopped process accepts, and then nobody answers.
            // A source that is closing its endpoint refuses: dialling again and again until it has leads nowhere.
            let to = &self.procs[address(key.incarnation)];
            let back = PeerKey { incarnation: self.me(at), direction: Direction::TheyGrant };
            // So does dialling before it has taken in the attempt that we have dropped ourselves.
            let who = [back.incarnation, key.incarnation];
            let dropped = self.conns.iter().any(|c| {
                let [ours, theirs] = &c.ends;
                let waits = theirs.state != EndState::Closed && !theirs.established;
                c.who == who && !c.cut && ours.state != EndState::Open && waits
            });
            let answers = !to.stopped && !to.fencing.contains_key(&back) && !dropped;
            if answers && p.node.wants_session(*key) && self.current(at, *key).is_none() {
                out.push(Step::Dial(*key));
            }
        }
        for (id, r) in &p.running {
            let pieces = self.setup.pieces;
            if r.posted == NEVER {
                continue;
            }
            if r.packed {
                self.steps_of_packed(at, *id, out);
                continue;
            }
            if at == D {
                let done = r.posted >= pieces || r.aborted;
                out.push(if done { Step::Complete(at, *id) } else { Step::Copy(*id) });
                continue;
            }
            if r.posted < pieces && !r.aborted {
                out.push(Step::Post(at, *id));
            } else if self.is_flushed(at, *id) {
                out.push(Step::Complete(at, *id));
            }
        }
        out.extend(p.fencing.keys().map(|key| Step::FenceDone(at, *key)));
        out.extend(p.dying.iter().map(|who| Step::DeathSeen(at, *who)));
        out.extend(p.settling.iter().map(|who| Step::Settled(at, *who)));
        if at != D && self.setup.family != Family::Copies {
            for (key, ep) in &p.eps {
                let theirs = PeerKey { incarnation: self.me(at), direction: Direction::WeGrant };
                let whole =
                    self.alive(key.incarnation).is_some_and(|d| self.procs[d].eps.get(&theirs) == Some(ep));
                // Each slice that is posted to it finds that again.
                let news =
                    !p.broken.contains(key) || p.running.values().any(|r| r.key == *key && r.posted == NEVER);
                if !whole && news {
                    out.push(Step::Broken(at, *key));
                }
            }
        }
    }

    fn steps_of_packed(&self, at: usize, id: DeliveryId, out: &mut Vec<Step>) {
        let Some(r) = self.procs[at].running.get(&id) else { return };
        if !r.slots.is_empty() && !r.aborted {
            out.push(if at == D { Step::Copy(id) } else { Step::Post(at, id) });
        }
        if self.has_flushed(at, id) {
            out.push(Step::Complete(at, id));
        }
    }

    fn steps_of_conns(&self, out: &mut Vec<Step>) {
        for c in &self.conns {
            for end in 0..2 {
                let Some(at) = self.alive(c.who[end]).filter(|at| !self.procs[*at].stopped) else { continue };
                let e = &c.ends[end];
                if e.state == EndState::Closed {
                    continue;
                }
                if let Some(item) = e.inbox.front()
                    && !self.must_settle(at, c.key(end), item)
                {
                    out.push(Step::Read(at, (c.who, c.serial)));
                }
                // An orderly close brings all that was sent before it; a cut loses what it likes.
                let orderly = c.ends[1 - end].state != EndState::Open && e.inbox.is_empty();
                if e.state == EndState::Closing || c.cut || orderly {
                    out.push(Step::EndOfFile(at, (c.who, c.serial)));
                }
            }
        }
    }

    /// The driver turns a peer away that could not be fenced, until what is in its sockets has been taken in.
    fn must_settle(&self, at: usize, key: PeerKey, item: &Item) -> bool {
        let Item::Describe { generation, .. } = item else { return false };
        let node = &self.procs[at].node;
        self.setup.family.is_unfenced()
            && node.is_unfenceable(key)
            && *generation >= node.link_state(key).1
            && self.writes.iter().any(|w| w.from == key.incarnation && w.to == self.me(at) && w.loose)
    }

    /// The timers that run out when nothing else can happen. Which one is first, nobody knows.
    fn passing_time(&self, out: &mut Vec<Step>) {
        let first = out.len();
        for at in self.setup.addresses().filter(|at| !self.procs[*at].stopped) {
            let node = &self.procs[at].node;
            for wait in node.waits() {
                let runs_out = match wait {
                    Wait::Inbound(_) | Wait::Outbound(_) => true,
                    // A peer that runs and is connected answers its pings. Who is not missed is not waited for.
                    Wait::Peer(key) if node.session_of(key).is_some() => {
                        self.alive(key.incarnation).is_none_or(|p| self.procs[p].stopped)
                    }
                    Wait::Peer(key) => node.wants_session(key),
                };
                let step = Step::Elapse(at, wait);
                // A look at the clock that finds nothing to do is set again, and that is all: time passes for others.
                let changes = |next: Self| next.fingerprint() != self.fingerprint();
                if runs_out && self.after(&step).is_some_and(changes) {
                    out.push(step);
                }
            }
        }
        if self.setup.in_order {
            let rank = |s: &Step| match s {
                Step::Elapse(_, Wait::Peer(_)) => 0,
                Step::Elapse(_, Wait::Inbound(r) | Wait::Outbound(r)) => r.get(),
                _ => u64::MAX,
            };
            let least = out[first..].iter().map(rank).min().unwrap_or(0);
            let timers = out.split_off(first);
            out.extend(timers.into_iter().filter(|s| rank(s) == least));
        }
    }

    fn faults(&self, out: &mut Vec<Step>) {
        let first = out.len();
        for &kind in &self.setup.kinds {
            match kind {
                FaultKind::Cancel => {
                    for at in self.setup.addresses().filter(|at| !self.procs[*at].stopped) {
                        for (r, seen) in self.procs[at].rooms.iter().enumerate().take(ROOMS) {
                            if !seen.is_over() && !seen.cancelled && (at != D || seen.ordered) {
                                out.push(Step::Cancel(at, r));
                            }
                        }
                    }
                }
                FaultKind::Timeout => {
                    for at in self.setup.addresses().filter(|at| !self.procs[*at].stopped) {
                        out.extend(self.procs[at].node.waits().map(|w| Step::RunOut(at, w)));
                    }
                }
                FaultKind::Restart => out.extend(self.setup.addresses().map(Step::Restart)),
                FaultKind::LostSession => {
                    out.extend(
                        self.conns.iter().filter(|c| c.is_whole()).map(|c| Step::Cut((c.who, c.serial))),
                    );
                }
                FaultKind::Stop if self.stops_left == 0 => {}
                FaultKind::Stop => {
                    out.extend(self.setup.addresses().filter(|at| !self.procs[*at].stopped).map(Step::Stop));
                }
            }
        }
        if self.alike && self.setup.sources > 1 {
            let mut i = first;
            while i < out.len() {
                if out[i].singles_out() == Some(1) {
                    out.swap_remove(i);
                } else {
                    i += 1;
                }
            }
        }
    }

    /// The world after this step; `None` if it cannot happen now.
    #[must_use]
    pub fn after(&self, step: &Step) -> Option<Self> {
        let mut w = self.clone();
        let mut touched = w.apply(step)?;
        touched[D] |= w.settle_what_is_over();
        if !w.settle_oaths() {
            return None;
        }
        w.tidy(touched);
        w.check_reads();
        Some(w)
    }

    pub(super) fn find(&self, name: &ConnName) -> Option<usize> {
        self.conns.iter().position(|c| c.who == name.0 && c.serial == name.1)
    }

    fn apply(&mut self, step: &Step) -> Option<[bool; 3]> {
        if step.fault().is_some() {
            self.faults_left = self.faults_left.checked_sub(1)?;
            if matches!(step, Step::Stop(_)) {
                self.stops_left = self.stops_left.checked_sub(1)?;
            }
            self.stops_left = self.stops_left.min(self.faults_left);
            if step.singles_out().is_some() {
                self.alike = false;
            }
        }
        let mut touched = [false; 3];
        match step {
            Step::Push(at, r) => {
                self.proc(*at).to_push &= !(1 << r);
                self.proc(*at).rooms[*r].ordered = true;
                let void = self.procs[*at].rooms[*r].void;
                self.order(*at, |n| n.handle_push(NOW, push(*r)));
                if void && !self.procs[*at].rooms[*r].is_over() {
                    let text = format!(
                        "room {} is over, and a push for it at {} was taken",
                        room(*r),
                        self.name(*at)
                    );
                    self.violate(Property::CancelledFailsAtOnce, text);
                }
                touched[*at] = true;
            }
            Step::Resolve => {
                self.resolved();
                touched[D] = true;
            }
            Step::Dial(key) => {
                self.dial(*key);
                touched[D] = true;
            }
            Step::Read(at, name) | Step::EndOfFile(at, name) => {
                let i = self.find(name)?;
                let end = usize::from(*at != D);
                if matches!(step, Step::Read(..)) {
                    self.read(*at, i, end);
                } else {
                    self.end_of_file(*at, i, end);
                }
                touched[*at] = true;
            }
            Step::Post(at, id) => {
                let key = self.procs[*at].running.get(id)?.key;
                let ep = *self.procs[*at].eps.get(&key)?;
                self.post(*at, *id, ep);
                touched[*at] = true;
            }
            Step::Land(flight) => {
                let i = self.writes.iter().position(|w| *w == flight.0)?;
                self.land(i);
                touched[D] = true;
                touched[address(flight.0.from)] = true;
            }
            Step::Copy(id) => {
                if self.procs[D].running.get(id)?.packed {
                    self.unpack(*id);
                } else {
                    self.copy(*id);
                }
                touched[D] = true;
            }
            Step::Complete(at, id) => {
                self.complete(*at, *id);
                touched[*at] = true;
            }
            Step::FenceDone(at, key) => {
                self.fence_done(*at, *key);
                touched = [true; 3];
            }
            Step::Broken(at, key) => {
                self.broken(*at, *key);
                touched[*at] = true;
            }
            Step::DeathSeen(at, who) => {
                self.death_seen(*at, *who);
                touched[*at] = true;
            }
            Step::Settled(at, who) => {
                self.settled(*at, *who);
                touched[*at] = true;
            }
            Step::Continue(at) => {
                self.proc(*at).stopped = false;
                touched[*at] = true;
            }
            Step::Elapse(at, wait) | Step::RunOut(at, wait) => {
                self.order(*at, |n| n.run_out(NOW, *wait));
                touched[*at] = true;
            }
            Step::Awake(at, wait, continued) => {
                self.order(*at, |n| n.run_out(NOW, *wait));
                touched = [true; 3];
                for who in self.setup.clone().addresses().filter(|who| continued[*who]) {
                    self.proc(who).stopped = false;
                }
            }
            Step::Settle(delivered) => {
                self.settle(*delivered);
                touched[D] = true;
            }
            Step::Cancel(at, r) => {
                let seen = &mut self.proc(*at).rooms[*r];
                seen.cancelled = true;
                seen.void = true;
                self.order(*at, |n| n.handle_cancel(NOW, room(*r), cancelled()));
                touched[*at] = true;
            }
            Step::Restart(at) => {
                self.restart(*at);
                touched = [true; 3];
            }
            Step::Cut(name) => {
                let i = self.find(name)?;
                Arc::make_mut(&mut self.conns[i]).cut = true;
            }
            Step::Stop(at) => {
                self.proc(*at).stopped = true;
                touched[*at] = true;
            }
            Step::Doom(at) => {
                let who = [self.me(D), self.me(*at)];
                let c = self.conns.iter_mut().find(|c| c.who == who && c.is_whole())?;
                let end = &mut Arc::make_mut(c).ends[1];
                end.doomed = true;
                end.inbox.clear();
            }
        }
        Some(touched)
    }

    /// No write in flight may read a page that its source has given back.
    fn check_reads(&mut self) {
        let bad = self.writes.iter().find(|w| {
            let reads = !w.loose && w.slot.is_none();
            reads && self.alive(w.from).is_some_and(|at| self.procs[at].rooms[w.room].released > 0)
        });
        if let Some(w) = bad {
            let text = format!(
                "a write of room {} is in flight out of a page that source {} has released",
                room(w.room),
                address(w.from)
            );
            self.violate(Property::NoReadAfterRelease, text);
        }
    }
}
