//! What goes wrong, and when.

use super::agent::Agent;
use super::geometry::ix;
use super::world::{Job, What, World};
use kvxfer_fabric::sim::FenceRule;
use kvxfer_proto::Incarnation;
use std::mem;

/// A fault that comes once so many rooms have begun.
#[derive(Clone, Copy, Debug)]
pub(super) struct Planned {
    after: u64,
    kind: Kind,
}

#[derive(Clone, Copy, Debug)]
enum Kind {
    Kill,
    Stop,
    Cut,
}

/// A fault that is due.
#[derive(Clone, Copy, Debug)]
pub(super) enum Fault {
    Kill,
    Restart(usize),
    Stop,
    Resume(usize, u32),
    LoseSession,
    Wall,
    WallEnds,
    BreakEndpoint,
    /// The operator knows that this incarnation is gone for good.
    Evict(Incarnation),
}

impl World<'_> {
    pub(super) fn plan_faults(&mut self) {
        let o = self.options;
        let mut planned = Vec::new();
        for (n, kind) in [(o.kill, Kind::Kill), (o.stop, Kind::Stop), (o.cut, Kind::Cut)] {
            for _ in 0..n {
                let after = self.draw((1, u64::from(o.rooms.max(1))));
                planned.push(Planned { after, kind });
            }
        }
        self.planned = planned;
    }

    /// Makes the faults due whose room has begun.
    pub(super) fn due_faults(&mut self) {
        let begun = self.rooms.len() as u64 + u64::from(self.live.is_empty());
        let planned = mem::take(&mut self.planned);
        for p in planned {
            if p.after > begun {
                self.planned.push(p);
                continue;
            }
            self.open_faults += 1;
            let delay = self.draw((0, 9000));
            let fault = match p.kind {
                Kind::Kill => Fault::Kill,
                Kind::Stop => Fault::Stop,
                Kind::Cut => match self.draw((0, 7)) {
                    0..=3 => Fault::LoseSession,
                    4 | 5 => Fault::Wall,
                    _ if self.sender_writes() => Fault::BreakEndpoint,
                    _ => Fault::LoseSession,
                },
            };
            self.at(self.now + delay, What::Fault(fault));
        }
    }

    pub(super) fn make_fault(&mut self, fault: Fault) {
        match fault {
            Fault::Kill => self.kill(),
            Fault::Restart(i) => self.restart(i),
            Fault::Stop => self.stop(),
            Fault::Resume(i, life) => self.resume(i, life),
            Fault::LoseSession => self.lose_session(),
            Fault::Wall => self.build_wall(),
            Fault::WallEnds => self.open_faults -= 1,
            Fault::BreakEndpoint => self.break_endpoint(),
            Fault::Evict(incarnation) => self.evict(incarnation),
        }
    }

    /// Whether a write from or to this process is in flight.
    fn is_writing(&self, i: usize) -> bool {
        let mine = &self.agents[i];
        let to_me = |a: &Agent| {
            let keys = a.node.keys_of(mine.incarnation);
            keys.into_iter().any(|key| a.lane.is_busy(Some(key)))
        };
        mine.lane.is_busy(None) || self.agents.iter().any(|a| a.alive && to_me(a))
    }

    /// A process to hurt: mostly one with writes in flight.
    fn victim(&mut self) -> Option<usize> {
        let all: Vec<usize> = (0..self.agents.len()).filter(|i| self.agents[*i].alive).collect();
        let busy: Vec<usize> = all.iter().copied().filter(|i| self.is_writing(*i)).collect();
        let from = if busy.is_empty() || self.chance(4) { all } else { busy };
        let last = from.len().checked_sub(1)? as u64;
        Some(from[ix(self.draw((0, last)))])
    }

    fn kill(&mut self) {
        let Some(i) = self.victim() else {
            self.open_faults -= 1;
            return;
        };
        let writing = self.is_writing(i);
        self.tally.kills_mid_write += u64::from(writing);
        self.count("kill");
        let incarnation = self.agents[i].incarnation;
        self.log.line(self.now, format_args!("KILL {} (writes in flight: {writing})", self.agents[i].name));
        self.add_counters(i);
        let a = &mut self.agents[i];
        a.alive = false;
        if mem::replace(&mut a.stopped, false) {
            // Its going on was due and will not be.
            self.open_faults -= 1;
        }
        self.agents[i].held.clear();
        self.net.kill(self.agents[i].fabric.node());
        self.close_all_of(i);
        for j in 0..self.agents.len() {
            let a = &self.agents[j];
            let watched = a.alive && a.peers.iter().any(|(k, io)| k.incarnation == incarnation && io.watched);
            if watched {
                let delay = self.draw((10, 8000));
                self.job(delay, j, Job::ProcessEnded(incarnation));
            }
        }
        let far = !self.near && self.sender_writes() && self.options.fence == FenceRule::Impossible;
        if far {
            // Nobody sees it, and no fence holds: only the operator knows.
            self.open_faults += 1;
            let delay = self.draw((500_000, 2_000_000));
            self.at(self.now + delay, What::Fault(Fault::Evict(incarnation)));
        }
        let delay = if self.rng.coin() { self.draw((200, 5000)) } else { self.draw((5000, 500_000)) };
        self.at(self.now + delay, What::Fault(Fault::Restart(i)));
        self.settle_rooms();
    }

    /// Another process at the same address.
    fn restart(&mut self, i: usize) {
        self.open_faults -= 1;
        self.net.restart(self.agents[i].fabric.node());
        let fabric = self.net.fabric(self.agents[i].fabric.node());
        let incarnation = Incarnation(self.rng.next_u64());
        let a = &self.agents[i];
        let shape = (a.side.clone(), a.geo.clone());
        let made = Agent::new(a.name.clone(), shape, a.decode, a.engine, &self.config, incarnation, fabric);
        match made {
            Ok(mut fresh) => {
                fresh.life = self.agents[i].life + 1;
                fresh.past = mem::take(&mut self.agents[i].past);
                fresh.past.push(self.agents[i].incarnation);
                self.agents[i] = fresh;
                self.blank_all(i);
                self.log.line(
                    self.now,
                    format_args!("RESTART {} as incarnation {incarnation}", self.agents[i].name),
                );
            }
            Err(e) => self.log.violation(self.now, format_args!("a process does not start again: {e}")),
        }
    }

    fn stop(&mut self) {
        let Some(i) = self.victim().filter(|i| !self.agents[*i].stopped) else {
            self.open_faults -= 1;
            return;
        };
        self.count("stop");
        self.log.line(self.now, format_args!("STOP {}", self.agents[i].name));
        self.agents[i].stopped = true;
        self.net.stop(self.agents[i].fabric.node());
        let delay = if self.rng.coin() { self.draw((500, 50_000)) } else { self.draw((50_000, 1_200_000)) };
        let life = self.agents[i].life;
        self.at(self.now + delay, What::Fault(Fault::Resume(i, life)));
    }

    fn resume(&mut self, i: usize, life: u32) {
        let a = &mut self.agents[i];
        if a.life != life || !mem::replace(&mut a.stopped, false) {
            return;
        }
        self.open_faults -= 1;
        self.log.line(self.now, format_args!("CONTINUE {}", self.agents[i].name));
        self.net.resume(self.agents[i].fabric.node());
        // In the order in which it came, before whatever is still on its way.
        for what in mem::take(&mut self.agents[i].held) {
            self.happen(what);
        }
        self.poll_fabrics();
    }

    fn lose_session(&mut self) {
        self.open_faults -= 1;
        let all: Vec<u64> = self.conns.keys().copied().collect();
        let Some(last) = all.len().checked_sub(1) else { return };
        let conn = all[ix(self.draw((0, last as u64)))];
        self.count("lose_session");
        let ends = self.conns.get(&conn).map(|c| [c.ends[0].agent, c.ends[1].agent]);
        let names = ends.map(|e| e.map(|i| self.agents[i].name.clone()));
        self.log.line(self.now, format_args!("LOSE the connection of {names:?}"));
        self.cut_conn(conn);
    }

    /// The control network between two processes, or round one, is cut for a while; data flows.
    fn build_wall(&mut self) {
        let n = self.agents.len() as u64;
        let a = ix(self.draw((0, n - 1)));
        let until =
            self.now + if self.rng.coin() { self.draw((500, 20_000)) } else { self.draw((20_000, 700_000)) };
        let others: Vec<usize> =
            if self.rng.coin() { (0..self.agents.len()).collect() } else { vec![ix(self.draw((0, n - 1)))] };
        self.count("cut_network");
        self.log.line(
            self.now,
            format_args!(
                "CUT the network of {} to {} processes until {until}",
                self.agents[a].name,
                others.len()
            ),
        );
        for b in others.into_iter().filter(|b| *b != a) {
            let wall = self.walls.entry((a.min(b), a.max(b))).or_insert(0);
            *wall = until.max(*wall);
        }
        self.at(until, What::Fault(Fault::WallEnds));
    }

    fn break_endpoint(&mut self) {
        self.open_faults -= 1;
        let all: Vec<_> = (0..)
            .zip(&self.agents)
            .filter(|(_, a)| a.alive)
            .flat_map(|(i, a): (usize, &Agent)| a.endpoints.keys().map(move |ep| (i, *ep)))
            .collect();
        let Some(last) = all.len().checked_sub(1) else { return };
        let (i, ep) = all[ix(self.draw((0, last as u64)))];
        self.count("break_endpoint");
        self.log.line(self.now, format_args!("BREAK endpoint {} of {}", ep.0, self.agents[i].name));
        self.net.break_endpoint(self.agents[i].fabric.node(), ep);
    }

    fn evict(&mut self, incarnation: Incarnation) {
        self.open_faults -= 1;
        self.count("evict");
        self.log.line(self.now, format_args!("EVICT {incarnation} everywhere"));
        for i in 0..self.agents.len() {
            self.job(0, i, Job::Evict(incarnation));
        }
    }

    pub(super) fn evict_at(&mut self, i: usize, incarnation: Incarnation) {
        let now = self.time();
        for key in self.agents[i].node.keys_of(incarnation).collect::<Vec<_>>() {
            self.agents[i].node.handle_evict(now, key);
        }
        self.carry_out(i);
    }
}
