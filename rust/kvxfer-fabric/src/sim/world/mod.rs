//! Everything there is in a simulated net, and what can happen to it.

mod faults;

use super::{FenceRule, Landed, NodeId, Pending, PendingKind, SimConfig, SplitMix64};
use crate::{Completion, EndRole, EpId, FabricError, Piece};
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// A node in one of its lives.
type Life = (NodeId, u32);
/// Order of events: time, then chance, then age.
type Key = (u64, u32, u64);

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Status {
    Runs,
    Stopped,
    Dead,
}

#[derive(Clone, Debug)]
struct Node {
    life: u32,
    status: Status,
    regions: Vec<Vec<u8>>,
    ends: BTreeMap<u32, End>,
    queue: VecDeque<Completion>,
}

#[derive(Clone, PartialEq, Debug)]
enum Phase {
    Connecting,
    Open,
    Broken(FabricError),
    Fencing,
}

#[derive(Clone, Debug)]
struct End {
    /// Tells this endpoint from a later one with the same number.
    uid: u64,
    role: EndRole,
    peer: Life,
    lens: Vec<u64>,
    phase: Phase,
    link: Option<u64>,
    flushes: Vec<Flush>,
}

#[derive(Clone, Copy, Debug)]
struct Flush {
    ticket: u64,
    /// Writes with smaller ids must be through.
    upto: u64,
    acking: bool,
}

/// Where an event goes: an endpoint, if it is still the same one.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Where {
    node: NodeId,
    ep: u32,
    uid: u64,
}

#[derive(Clone, Debug)]
struct Link {
    from: Life,
    to: Life,
    active: Where,
    passive: Where,
    /// A fence or an observed death closed it: nothing lands through it any more.
    closed: bool,
    outstanding: BTreeSet<u64>,
    lost: BTreeSet<u64>,
    last_land_us: u64,
}

#[derive(Clone, Debug)]
struct Write {
    link: u64,
    piece: Piece,
    /// What was read when the source died; until then it is read on landing.
    taken: Option<Vec<u8>>,
    /// When it lands; `None` while it is held.
    key: Option<Key>,
}

#[derive(Clone, Debug)]
enum Event {
    Land(u64),
    Connect(Where),
    FlushAck(Where, u64),
    Broken(Where, FabricError),
    FenceDone(Where, u64),
    Death(Where),
}

#[derive(Clone, Debug)]
pub(super) struct World {
    pub(super) config: SimConfig,
    pub(super) trace: Vec<Landed>,
    id: u64,
    rng: SplitMix64,
    now_us: u64,
    next_id: u64,
    nodes: Vec<Node>,
    links: BTreeMap<u64, Link>,
    writes: BTreeMap<u64, Write>,
    events: BTreeMap<Key, Event>,
}

fn index(n: u32) -> usize {
    usize::try_from(n).unwrap_or(usize::MAX)
}

fn span(region: &[u8], offset: u64, len: u64) -> Option<std::ops::Range<usize>> {
    let end = usize::try_from(offset.checked_add(len)?).ok()?;
    (end <= region.len()).then_some(usize::try_from(offset).ok()?..end)
}

fn bounds(
    side: &'static str,
    region: u32,
    size: Option<u64>,
    offset: u64,
    len: u64,
) -> Result<(), FabricError> {
    match (size, offset.checked_add(len)) {
        (Some(size), Some(end)) if end <= size => Ok(()),
        _ => Err(FabricError::OutOfBounds { side, region, offset, len, region_len: size.unwrap_or(0) }),
    }
}

impl World {
    pub(super) fn new(seed: u64, config: SimConfig) -> Self {
        let mut rng = SplitMix64::new(seed);
        Self {
            config,
            trace: Vec::new(),
            id: rng.next_u64(),
            rng,
            now_us: 0,
            next_id: 0,
            nodes: Vec::new(),
            links: BTreeMap::new(),
            writes: BTreeMap::new(),
            events: BTreeMap::new(),
        }
    }

    pub(super) fn id(&self) -> u64 {
        self.id
    }

    pub(super) fn now_us(&self) -> u64 {
        self.now_us
    }

    pub(super) fn in_flight(&self) -> usize {
        self.writes.len()
    }

    pub(super) fn knows(&self, net: u64, node: NodeId) -> bool {
        net == self.id && self.node(node).is_some()
    }

    pub(super) fn add_node(&mut self, lens: &[u64]) -> NodeId {
        let id = NodeId(u32::try_from(self.nodes.len()).unwrap_or(u32::MAX));
        let regions = lens.iter().map(|n| vec![0; usize::try_from(*n).unwrap_or(0)]).collect();
        self.nodes.push(Node {
            life: 0,
            status: Status::Runs,
            regions,
            ends: BTreeMap::new(),
            queue: VecDeque::new(),
        });
        id
    }

    fn node(&self, node: NodeId) -> Option<&Node> {
        self.nodes.get(index(node.0))
    }

    fn node_mut(&mut self, node: NodeId) -> Option<&mut Node> {
        self.nodes.get_mut(index(node.0))
    }

    pub(super) fn life(&self, node: NodeId) -> u32 {
        self.node(node).map_or(u32::MAX, |n| n.life)
    }

    /// The node, if it still lives this life.
    fn alive(&mut self, (node, life): Life) -> Option<&mut Node> {
        self.node_mut(node).filter(|n| n.life == life && n.status != Status::Dead)
    }

    fn alive_or_closed(&mut self, who: Life) -> Result<&mut Node, FabricError> {
        self.alive(who).ok_or_else(|| FabricError::Closed(format!("node {} life {} is over", who.0.0, who.1)))
    }

    fn end(&mut self, who: Life, ep: u32) -> Result<&mut End, FabricError> {
        self.alive_or_closed(who)?.ends.get_mut(&ep).ok_or(FabricError::NoEndpoint(ep))
    }

    fn end_at(&mut self, at: Where) -> Option<&mut End> {
        self.node_mut(at.node)?.ends.get_mut(&at.ep).filter(|e| e.uid == at.uid)
    }

    pub(super) fn slice(&self, node: NodeId, region: u32, offset: u64, len: u64) -> Option<&[u8]> {
        let region = self.node(node)?.regions.get(index(region))?;
        region.get(span(region, offset, len)?)
    }

    pub(super) fn store(
        &mut self,
        node: NodeId,
        region: u32,
        offset: u64,
        bytes: &[u8],
    ) -> Result<(), FabricError> {
        let len = bytes.len() as u64;
        let target = self.node_mut(node).and_then(|n| n.regions.get_mut(index(region)));
        let region_len = target.as_ref().map_or(0, |t| t.len() as u64);
        let target = target.and_then(|t| {
            let range = span(t, offset, len)?;
            t.get_mut(range)
        });
        match target {
            Some(t) => {
                t.copy_from_slice(bytes);
                Ok(())
            }
            None => Err(FabricError::OutOfBounds { side: "local", region, offset, len, region_len }),
        }
    }

    // ---- time ----

    fn fresh_id(&mut self) -> u64 {
        self.next_id += 1;
        self.next_id
    }

    fn key_in(&mut self, delay: (u64, u64), id: u64) -> Key {
        let at = self.now_us.saturating_add(self.rng.between(delay.0, delay.1));
        let tie = u32::try_from(self.rng.next_u64() >> 32).unwrap_or(0);
        (at, tie, id)
    }

    fn schedule(&mut self, delay: (u64, u64), event: Event) {
        let id = self.fresh_id();
        let key = self.key_in(delay, id);
        self.events.insert(key, event);
    }

    pub(super) fn run_until(&mut self, until: u64) {
        while self.events.first_key_value().is_some_and(|(k, _)| k.0 <= until) {
            self.step();
        }
        self.now_us = self.now_us.max(until);
    }

    pub(super) fn step(&mut self) -> bool {
        let Some((key, event)) = self.events.pop_first() else { return false };
        self.now_us = self.now_us.max(key.0);
        self.happen(event);
        true
    }

    pub(super) fn next_at_us(&self) -> Option<u64> {
        self.events.first_key_value().map(|(key, _)| key.0)
    }

    pub(super) fn pending(&self) -> Vec<Pending> {
        let may = |event: &Event| match event {
            Event::Land(id) if !self.config.reorder => self
                .writes
                .get(id)
                .and_then(|w| self.links.get(&w.link))
                .is_none_or(|l| l.outstanding.first() == Some(id)),
            _ => true,
        };
        let list = self.events.iter().filter(|(_, e)| may(e)).map(|(key, event)| {
            let (kind, node) = match event {
                Event::Land(id) => {
                    let to = self.writes.get(id).and_then(|w| self.links.get(&w.link)).map(|l| l.to.0);
                    (PendingKind::Land, to.unwrap_or(NodeId(u32::MAX)))
                }
                Event::Connect(at) => (PendingKind::Connect, at.node),
                Event::FlushAck(at, _) => (PendingKind::Flush, at.node),
                Event::Broken(at, _) => (PendingKind::Broken, at.node),
                Event::FenceDone(at, _) => (PendingKind::Fence, at.node),
                Event::Death(at) => (PendingKind::Death, at.node),
            };
            Pending { at_us: key.0, id: key.2, kind, node }
        });
        list.collect()
    }

    pub(super) fn fire(&mut self, id: u64) -> bool {
        if !self.pending().iter().any(|p| p.id == id) {
            return false;
        }
        let key = self.events.keys().find(|k| k.2 == id).copied();
        let Some(event) = key.and_then(|k| self.events.remove(&k)) else { return false };
        self.happen(event);
        true
    }

    fn happen(&mut self, event: Event) {
        match event {
            Event::Land(id) => self.finish(id, true),
            Event::Connect(at) => self.try_connect(at),
            Event::FlushAck(at, ticket) => self.flush_ack(at, ticket),
            Event::Broken(at, error) => self.broken(at, error),
            Event::FenceDone(at, ticket) => self.fence_done(at, ticket),
            Event::Death(at) => self.death(at),
        }
    }

    fn say(&mut self, node: NodeId, what: Completion) {
        if let Some(n) = self.node_mut(node) {
            n.queue.push_back(what);
        }
    }

    // ---- the fabric's calls ----

    pub(super) fn progress(&mut self, who: Life, out: &mut Vec<Completion>) -> bool {
        let Some(n) = self.alive(who).filter(|n| n.status == Status::Runs) else { return false };
        let moved = !n.queue.is_empty();
        out.extend(n.queue.drain(..));
        moved
    }

    pub(super) fn idle(&mut self, who: Life) -> bool {
        self.alive(who).is_none_or(|n| n.status != Status::Runs || n.queue.is_empty())
    }

    pub(super) fn connect(
        &mut self,
        who: Life,
        ep: u32,
        role: EndRole,
        peer: Life,
        lens: &[u64],
    ) -> Result<(), FabricError> {
        let uid = self.fresh_id();
        let n = self.alive_or_closed(who)?;
        if n.ends.contains_key(&ep) {
            return Err(FabricError::Closed(format!("endpoint {ep} is open already")));
        }
        let end = End {
            uid,
            role,
            peer,
            lens: lens.to_vec(),
            phase: Phase::Connecting,
            link: None,
            flushes: Vec::new(),
        };
        n.ends.insert(ep, end);
        let at = Where { node: who.0, ep, uid };
        match role {
            EndRole::Active => self.schedule(self.config.notice_delay_us, Event::Connect(at)),
            EndRole::Passive => {
                if self.alive(peer).is_some() {
                    self.wake_active(who);
                } else if self.config.observe_death {
                    self.schedule(self.config.death_delay_us, Event::Death(at));
                }
            }
        }
        Ok(())
    }

    /// Lets active endpoints that wait for this node try again.
    fn wake_active(&mut self, peer: Life) {
        let mut waiting = Vec::new();
        for (i, n) in self.nodes.iter().enumerate() {
            let node = NodeId(u32::try_from(i).unwrap_or(u32::MAX));
            for (ep, e) in &n.ends {
                if e.role == EndRole::Active && e.phase == Phase::Connecting && e.peer == peer {
                    waiting.push(Where { node, ep: *ep, uid: e.uid });
                }
            }
        }
        for at in waiting {
            self.schedule(self.config.notice_delay_us, Event::Connect(at));
        }
    }

    fn try_connect(&mut self, at: Where) {
        let Some(end) = self.end_at(at).filter(|e| e.phase == Phase::Connecting) else { return };
        let (peer, lens) = (end.peer, end.lens.clone());
        let from = (at.node, self.life(at.node));
        let Some(target) = self.alive(peer) else {
            let error = FabricError::Closed(format!("node {} life {} is over", peer.0.0, peer.1));
            return self.connect_failed(at, error);
        };
        let real: Vec<u64> = target.regions.iter().map(|r| r.len() as u64).collect();
        if real != lens {
            let why = format!("regions of {real:?} bytes, but {lens:?} were announced");
            return self.connect_failed(at, FabricError::BadBlob { what: "sim region table", why });
        }
        if target.status != Status::Runs {
            return;
        }
        let other = target.ends.iter_mut().find(|(_, e)| {
            e.role == EndRole::Passive && e.peer == from && e.phase == Phase::Connecting && e.link.is_none()
        });
        let Some((&ep, passive)) = other else { return };
        let there = Where { node: peer.0, ep, uid: passive.uid };
        let link = self.fresh_id();
        for place in [at, there] {
            if let Some(e) = self.end_at(place) {
                e.phase = Phase::Open;
                e.link = Some(link);
            }
            let info = format!("sim: node {} writes to node {}", at.node.0, peer.0.0);
            self.say(place.node, Completion::Connected { ep: EpId(place.ep), info });
        }
        self.links.insert(
            link,
            Link {
                from,
                to: peer,
                active: at,
                passive: there,
                closed: false,
                outstanding: BTreeSet::new(),
                lost: BTreeSet::new(),
                last_land_us: 0,
            },
        );
    }

    fn connect_failed(&mut self, at: Where, error: FabricError) {
        self.fail_flushes(at, &error);
        self.remove_end(at);
        self.say(at.node, Completion::ConnectFailed { ep: EpId(at.ep), error });
    }

    pub(super) fn post(&mut self, who: Life, ep: u32, batch: &[Piece]) -> Result<(), FabricError> {
        let end = self.end(who, ep)?;
        match &end.phase {
            Phase::Open => {}
            Phase::Broken(error) => return Err(error.clone()),
            other => return Err(FabricError::Closed(format!("endpoint {ep} is not open ({other:?})"))),
        }
        if end.role == EndRole::Passive {
            return Err(FabricError::Closed(format!("endpoint {ep} is passive: the peer writes")));
        }
        let Some(link) = end.link else { return Err(FabricError::NoEndpoint(ep)) };
        let lens = end.lens.clone();
        let local: Vec<u64> = self.alive_or_closed(who)?.regions.iter().map(|r| r.len() as u64).collect();
        for p in batch {
            let ours = local.get(index(p.src_region)).copied();
            bounds("local", p.src_region, ours, p.src_off, p.len)?;
            let theirs = lens.get(index(p.dst_region)).copied();
            bounds("remote", p.dst_region, theirs, p.dst_off, p.len)?;
        }
        for piece in batch.iter().filter(|p| p.len > 0) {
            let id = self.fresh_id();
            let (taken, key) = (None, None);
            self.writes.insert(id, Write { link, piece: *piece, taken, key });
            if let Some(l) = self.links.get_mut(&link) {
                l.outstanding.insert(id);
                // The sender does not know yet that the receiver closed its side.
                if l.closed {
                    self.finish(id, false);
                    continue;
                }
            }
            self.fly(id);
        }
        Ok(())
    }

    /// Gives a write its time to land.
    fn fly(&mut self, id: u64) {
        let mut key = self.key_in(self.config.write_delay_us, id);
        let Some(write) = self.writes.get_mut(&id) else { return };
        let Some(link) = self.links.get_mut(&write.link) else { return };
        if !self.config.reorder {
            key = (key.0.max(link.last_land_us), 0, id);
        }
        link.last_land_us = link.last_land_us.max(key.0);
        write.key = Some(key);
        self.events.insert(key, Event::Land(id));
    }

    pub(super) fn flush(&mut self, who: Life, ep: u32, ticket: u64) -> Result<(), FabricError> {
        let upto = self.fresh_id();
        let end = self.end(who, ep)?;
        if let Phase::Broken(error) = &end.phase {
            let result = Err(error.clone());
            self.say(who.0, Completion::Flushed { ep: EpId(ep), ticket, result });
            return Ok(());
        }
        if end.phase == Phase::Fencing {
            return Err(FabricError::NoEndpoint(ep));
        }
        end.flushes.push(Flush { ticket, upto, acking: false });
        let at = Where { node: who.0, ep, uid: end.uid };
        self.check_flushes(at);
        Ok(())
    }

    /// Lets the flushes whose writes are all through be answered.
    fn check_flushes(&mut self, at: Where) {
        let Some(link) = self.end_at(at).map(|e| e.link) else { return };
        let oldest = link.and_then(|l| self.links.get(&l)).and_then(|l| l.outstanding.first().copied());
        let Some(end) = self.end_at(at) else { return };
        let mut through = Vec::new();
        for f in &mut end.flushes {
            if !f.acking && oldest.is_none_or(|o| o > f.upto) {
                f.acking = true;
                through.push(f.ticket);
            }
        }
        for ticket in through {
            self.schedule(self.config.notice_delay_us, Event::FlushAck(at, ticket));
        }
    }

    fn flush_ack(&mut self, at: Where, ticket: u64) {
        let Some(end) = self.end_at(at) else { return };
        let Some(i) = end.flushes.iter().position(|f| f.ticket == ticket && f.acking) else { return };
        let (flush, link) = (end.flushes.remove(i), end.link);
        let lost = link
            .and_then(|l| self.links.get(&l))
            .is_some_and(|l| l.lost.first().is_some_and(|first| *first < flush.upto));
        let result = if lost {
            Err(FabricError::Closed("writes before this flush were lost".to_owned()))
        } else {
            Ok(())
        };
        self.say(at.node, Completion::Flushed { ep: EpId(at.ep), ticket, result });
    }

    fn fail_flushes(&mut self, at: Where, error: &FabricError) {
        let Some(end) = self.end_at(at) else { return };
        for f in std::mem::take(&mut end.flushes) {
            let result = Err(error.clone());
            self.say(at.node, Completion::Flushed { ep: EpId(at.ep), ticket: f.ticket, result });
        }
    }

    pub(super) fn fence(&mut self, who: Life, ep: u32, ticket: u64) -> Result<(), FabricError> {
        let end = self.end(who, ep)?;
        if end.phase == Phase::Fencing {
            return Err(FabricError::NoEndpoint(ep));
        }
        end.phase = Phase::Fencing;
        let at = Where { node: who.0, ep, uid: end.uid };
        self.fail_flushes(at, &FabricError::Closed(format!("endpoint {ep} is being fenced")));
        self.schedule(self.config.fence_delay_us, Event::FenceDone(at, ticket));
        Ok(())
    }

    fn fence_done(&mut self, at: Where, ticket: u64) {
        let Some(end) = self.end_at(at) else { return };
        let (link, role) = (end.link, end.role);
        let possible = self.config.fence == FenceRule::Completes || role == EndRole::Active;
        if let (true, EndRole::Passive, Some(link)) = (possible, role, link) {
            self.close_link(link);
        }
        if let (EndRole::Active, Some(l)) = (role, link.and_then(|l| self.links.get(&l))) {
            // What left this side can land; its memory is read no more.
            let ids: Vec<u64> = l.outstanding.iter().copied().collect();
            self.take_bytes(at.node, &ids);
        }
        self.remove_end(at);
        self.tell_other(link, at, "the peer fenced it");
        let result = if possible {
            Ok(())
        } else {
            let why = "this net's transport cannot promise one; destroy the worker, or wait for the death of the peer";
            Err(FabricError::NoFence { transport: "sim".to_owned(), why: why.to_owned() })
        };
        self.say(at.node, Completion::Fenced { ep: EpId(at.ep), ticket, result });
    }

    pub(super) fn disconnect(&mut self, who: Life, ep: u32) {
        let Ok(end) = self.end(who, ep) else { return };
        // A fence that is under way still owes its answer.
        if end.phase == Phase::Fencing {
            return;
        }
        let (link, at) = (end.link, Where { node: who.0, ep, uid: end.uid });
        self.fail_flushes(at, &FabricError::Closed(format!("endpoint {ep} was closed by this side")));
        self.remove_end(at);
        self.tell_other(link, at, "the peer closed it");
        // Nothing is said any more of an endpoint that its owner has forgotten.
        if let Some(n) = self.node_mut(who.0) {
            n.queue.retain(|c| match c {
                Completion::Connected { ep: e, .. }
                | Completion::ConnectFailed { ep: e, .. }
                | Completion::PeerDied { ep: e }
                | Completion::Broken { ep: e, .. } => e.0 != ep,
                Completion::Flushed { .. } | Completion::Fenced { .. } => true,
            });
        }
    }

    fn remove_end(&mut self, at: Where) {
        if let Some(n) = self.node_mut(at.node)
            && n.ends.get(&at.ep).is_some_and(|e| e.uid == at.uid)
        {
            n.ends.remove(&at.ep);
        }
        self.forget_links();
    }

    /// Drops links that neither an endpoint nor a write needs any more.
    fn forget_links(&mut self) {
        let nodes = &self.nodes;
        let there = |at: Where| {
            nodes.get(index(at.node.0)).and_then(|n| n.ends.get(&at.ep)).is_some_and(|e| e.uid == at.uid)
        };
        self.links.retain(|_, l| !l.outstanding.is_empty() || there(l.active) || there(l.passive));
    }

    /// The other end of a link sees after a while that this one closed.
    fn tell_other(&mut self, link: Option<u64>, at: Where, why: &str) {
        let Some(l) = link.and_then(|l| self.links.get(&l)) else { return };
        let other = if l.active == at { l.passive } else { l.active };
        let error = FabricError::Closed(why.to_owned());
        self.schedule(self.config.notice_delay_us, Event::Broken(other, error));
    }

    fn broken(&mut self, at: Where, error: FabricError) {
        let Some(end) = self.end_at(at) else { return };
        if !matches!(end.phase, Phase::Open | Phase::Connecting) {
            return;
        }
        end.phase = Phase::Broken(error.clone());
        self.fail_flushes(at, &error);
        self.say(at.node, Completion::Broken { ep: EpId(at.ep), error });
    }
}
