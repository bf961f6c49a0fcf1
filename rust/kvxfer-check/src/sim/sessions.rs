//! Sessions and endpoints: from a connection to a peer with whom bytes can move. The same order of steps as in
//! production's `driver/peers.rs` and `driver/directory.rs`.

use super::agent::Endpoint;
use super::world::{Job, World};
use kvxfer_fabric::{EpId, Fabric, FabricError};
use kvxfer_proto::handshake::{Established, Met};
use kvxfer_proto::msg::{Attach, Attached, Describe, FabricOffer, Frame, Msg, Role};
use kvxfer_proto::node::{Direction, Mover, PeerKey, RankInfo, Resolving, SessionUp, Source};
use kvxfer_proto::plan::Template;
use kvxfer_proto::{Incarnation, Reason, ReasonKind, SessionNo, Side, Time};
use std::sync::Arc;

/// How long what a peer had sent may take to land: many times the longest delay of a write.
pub(super) const SETTLE_US: u64 = 20_000;
/// Times that a directory is asked only to tell its ranks of rooms that have ended.
const TRIES_TO_TELL: u32 = 12;

/// Production's pauses between tries, divided by 50.
fn pause(tries: u32) -> u64 {
    (100_u64 << tries.min(8)).min(20_000)
}

impl World<'_> {
    /// Asks a source's directory for its ranks.
    pub(super) fn resolve(&mut self, i: usize, source: &Source) {
        let now = self.time();
        let tries = self.agents[i].resolve_tries.get(source).copied().unwrap_or(0);
        let go_on = match self.agents[i].node.resolving(source) {
            Some(Resolving::RoomsWait) => true,
            Some(Resolving::OnlyToTell) => tries < TRIES_TO_TELL,
            None => false,
        };
        if !go_on {
            self.agents[i].node.handle_resolve_stopped(source);
            self.agents[i].resolve_tries.remove(source);
            self.carry_out(i);
            return;
        }
        let engine = self.prefills.iter().find(|e| *e.name == *source.address);
        let ranks: Vec<usize> = engine.map(|e| e.agents.clone()).unwrap_or_default();
        // The first rank is the directory; the others register with it, and a dead one's entry goes with its connection.
        if !self.agents[ranks[0]].runs() || ranks.iter().any(|r| !self.agents[*r].alive) {
            self.agents[i].resolve_tries.insert(source.clone(), tries + 1);
            self.job(pause(tries), i, Job::Resolve(source.clone()));
            return;
        }
        self.agents[i].resolve_tries.remove(source);
        let mut infos = Vec::new();
        for r in ranks {
            let incarnation = self.agents[r].incarnation;
            let key = PeerKey { incarnation, direction: Direction::WeGrant };
            self.agents[i].peers.entry(key).or_default().address = Some(r);
            infos.push(RankInfo { incarnation, side: self.agents[r].side.clone() });
        }
        self.agents[i].node.handle_resolved(now, source, Ok(infos));
        self.carry_out(i);
    }

    /// Opens a connection for a session, if one is wanted and none is under way.
    pub(super) fn connect(&mut self, i: usize, key: PeerKey) {
        let a = &mut self.agents[i];
        if !a.node.wants_session(key) {
            if let Some(io) = a.peers.get_mut(&key) {
                io.tries = 0;
            }
            return;
        }
        let session = a.node.next_session(key);
        let io = a.peers.entry(key).or_default();
        let Some(to) = io.address.filter(|_| io.dialling.is_none() && io.conn.is_none()) else { return };
        if self.now < io.not_before {
            let delay = io.not_before - self.now;
            self.job(delay, i, Job::Connect(key));
            return;
        }
        io.quick = if self.now.saturating_sub(io.dialled_at) < 20_000 { (io.quick + 1).min(8) } else { 0 };
        io.dialled_at = self.now;
        io.not_before = self.now + (20_u64 << io.quick);
        if self.walls.get(&(i.min(to), i.max(to))).is_some_and(|until| *until > self.now)
            || !self.agents[to].alive
        {
            self.dial_failed(i, key);
            return;
        }
        let conn = self.open_conn(i, to, key, session);
        if let Some(io) = self.agents[i].peers.get_mut(&key) {
            io.dialling = Some(conn);
        }
    }

    fn dial_failed(&mut self, i: usize, key: PeerKey) {
        let now = self.time();
        let a = &mut self.agents[i];
        let Some(io) = a.peers.get_mut(&key) else { return };
        let tries = io.tries;
        io.tries += 1;
        if tries % 4 == 3 {
            // It may have restarted elsewhere; the directory knows.
            a.node.handle_unreachable(now, key);
        }
        self.job(pause(tries), i, Job::Connect(key));
    }

    /// What this end says of itself; nothing if another process than the one that was meant answers.
    pub(super) fn describe(&mut self, c: u64, e: usize, met: Met) -> Option<Describe> {
        let now = self.time();
        let end = &self.conns.get(&c)?.ends[e];
        let (i, meant) = (end.agent, end.key);
        if let Some(key) = meant.filter(|key| key.incarnation != met.incarnation) {
            if let Some(io) = self.agents[i].peers.get_mut(&key) {
                io.dialling = None;
                io.address = None;
            }
            if let Some(conn) = self.conns.get_mut(&c) {
                conn.ends[e].key = None;
            }
            self.close_end(c, e);
            self.agents[i].node.handle_replaced(now, key);
            self.carry_out(i);
            return None;
        }
        let direction = if e == 0 { Direction::WeGrant } else { Direction::TheyGrant };
        let key = PeerKey { incarnation: met.incarnation, direction };
        let mover = self.options.mover;
        let a = &mut self.agents[i];
        let (received, link_generation) = a.node.link_state(key);
        let regions = a.side.regions(&a.geo.counts).unwrap_or_default();
        let name = if mover == Mover::Sender { "sim" } else { "copy" };
        let describe = Describe {
            name: a.name.clone(),
            engine: format!("{}-{}", if a.decode { "decode" } else { "prefill" }, a.engine),
            dp_rank: 0,
            role: Role::Both,
            mode: "push".to_owned(),
            groups: a.side.groups.clone(),
            shard: a.side.shard,
            pages: a.geo.counts.clone(),
            model: "simulated".to_owned(),
            regions,
            fabrics: vec![FabricOffer {
                name: name.to_owned(),
                blob: a.fabric.describe().unwrap_or_default(),
            }],
            received,
            link_generation,
            staging: self.staging.unwrap_or_default(),
            process: Vec::new(),
        };
        if let Some(conn) = self.conns.get_mut(&c) {
            conn.ends[e].own_generation = link_generation;
        }
        Some(describe)
    }

    pub(super) fn session_up(&mut self, c: u64, e: usize, established: Established) {
        let now = self.time();
        let direction = if e == 0 { Direction::WeGrant } else { Direction::TheyGrant };
        let key = PeerKey { incarnation: established.met.incarnation, direction };
        let session = established.met.session;
        let Some(describe) = established.describe else { return };
        let Some(end) = self.conns.get_mut(&c).map(|conn| &mut conn.ends[e]) else { return };
        let (i, own_generation) = (end.agent, end.own_generation);
        end.session = Some((key, session));
        let io = self.agents[i].peers.entry(key).or_default();
        if io.dialling == Some(c) {
            io.dialling = None;
        }
        self.agents[i].sessions.insert((key, session), (c, e));
        if !self.answer_has_settled(i, key, describe.link_generation) {
            self.close_end(c, e);
            return;
        }
        let up = SessionUp {
            peer: key,
            session,
            received: describe.received,
            generation: describe.link_generation,
            own_generation,
            side: Side { groups: describe.groups.clone(), shard: describe.shard },
            pages: describe.pages.clone(),
            name: describe.name.clone(),
        };
        let a = &mut self.agents[i];
        a.node.handle_session_up(now, up);
        if a.node.session_of(key) != Some(session) {
            self.carry_out(i);
            return;
        }
        self.log.line(
            self.now,
            format_args!("{} has session {} with {} ({direction:?})", a.name, session.0, describe.name),
        );
        if let Some(io) = a.peers.get_mut(&key) {
            io.tries = 0;
            io.watched = self.near;
            io.conn = Some((c, session));
            io.describe = Some(describe);
        }
        if direction == Direction::WeGrant {
            self.attach(i, key);
        }
        self.carry_out(i);
    }

    /// Decode's side: uses the endpoint there is, or makes one.
    fn attach(&mut self, i: usize, key: PeerKey) {
        let now = self.time();
        if self.agents[i].peers.get(&key).is_some_and(|io| io.endpoint.is_none()) {
            let made = self.open_endpoint(i, key).and_then(|ep| self.endpoint(i, key, ep));
            if let Err(e) = made {
                let reason = Reason::new(ReasonKind::FabricError, format!("cannot be reached: {e}"));
                self.agents[i].node.handle_fabric_broken(now, key, &reason);
                return;
            }
        }
        let ring = self.offer_ring(i);
        let fabric = if self.sender_writes() { "sim" } else { "copy" };
        self.send_session(i, key, Msg::Attach(Attach { fabric: fabric.to_owned(), ring }));
    }

    /// Keeps an endpoint with the plan for the two shards.
    fn endpoint(&mut self, i: usize, key: PeerKey, ep: EpId) -> Result<(), FabricError> {
        let a = &mut self.agents[i];
        let Some(io) = a.peers.get_mut(&key) else { return Err(FabricError::NoEndpoint(ep.0)) };
        let Some(d) = &io.describe else { return Err(FabricError::NoEndpoint(ep.0)) };
        let theirs = Side { groups: d.groups.clone(), shard: d.shard };
        let template = match key.direction {
            Direction::WeGrant => Template::new(&theirs, &a.side),
            Direction::TheyGrant => Template::new(&a.side, &theirs),
        };
        let template = Arc::new(template.map_err(|e| FabricError::Closed(e.to_string()))?);
        io.attaching = None;
        io.endpoint = Some(Endpoint { ep, template });
        Ok(())
    }

    fn send_session(&mut self, i: usize, key: PeerKey, msg: Msg) {
        let a = &self.agents[i];
        let Some((conn, session)) = a.peers.get(&key).and_then(|io| io.conn) else { return };
        let frame = Frame { incarnation: a.incarnation, session, number: 0, msg };
        self.send_frame(i, conn, &frame);
    }

    pub(super) fn frame(&mut self, c: u64, e: usize, frame: Frame) {
        let now = self.time();
        let Some(end) = self.conns.get(&c).map(|conn| &conn.ends[e]) else { return };
        let (i, Some((key, session))) = (end.agent, end.session) else { return };
        self.log.line(
            self.now,
            format_args!(
                "{} gets {} {} of session {}",
                self.agents[i].name,
                frame.msg.name(),
                frame.number,
                session.0
            ),
        );
        match frame.msg {
            Msg::Attach(m) => {
                self.take_ring(i, key, m.ring.is_some());
                self.attach_asked(i, key);
            }
            Msg::Attached(m) => self.attach_answered(i, key, m),
            // Its part of the handshake took too long.
            Msg::Refuse(reason) if reason.kind == ReasonKind::TransferTimeout => self.close_end(c, e),
            _ => {
                let before = self.look_before(i, key, &frame);
                let result = self.agents[i].node.handle_frame(now, key, frame);
                self.look_after(i, before);
                if let Err(reason) = result {
                    let name = &self.agents[i].name;
                    self.log
                        .violation(self.now, format_args!("{name}: the peer broke the protocol: {reason}"));
                    self.close_end(c, e);
                }
            }
        }
        self.carry_out(i);
        self.want_turn(i);
    }

    /// Prefill's side: decode wants to attach.
    fn attach_asked(&mut self, i: usize, key: PeerKey) {
        let (now, mover) = (self.time(), self.options.mover);
        let a = &mut self.agents[i];
        let Some(io) = a.peers.get_mut(&key) else { return };
        if io.endpoint.is_some() {
            self.send_session(i, key, Msg::Attached(Attached { error: None, info: String::new() }));
            self.agents[i].node.handle_attached(now, key, mover);
            return;
        }
        if let Some(old) = io.take_endpoint() {
            self.disconnect(i, old);
        }
        match self.open_endpoint(i, key) {
            Ok(ep) if mover == Mover::Receiver => self.endpoint_up(i, key, ep),
            Ok(ep) => {
                if let Some(io) = self.agents[i].peers.get_mut(&key) {
                    io.attaching = Some(ep);
                }
            }
            Err(e) => self.refuse_attach(i, key, &e),
        }
    }

    fn refuse_attach(&mut self, i: usize, key: PeerKey, error: &FabricError) {
        let error = Some(Reason::new(ReasonKind::FabricError, error.to_string()));
        self.send_session(i, key, Msg::Attached(Attached { error, info: String::new() }));
    }

    /// Prefill's side: the endpoint can carry bytes.
    pub(super) fn endpoint_up(&mut self, i: usize, key: PeerKey, ep: EpId) {
        let (now, mover) = (self.time(), self.options.mover);
        let asked = self.agents[i].peers.get(&key).is_some_and(|io| io.attaching == Some(ep));
        if !asked && mover == Mover::Sender {
            self.disconnect(i, ep);
            return;
        }
        if let Err(e) = self.endpoint(i, key, ep) {
            self.refuse_attach(i, key, &e);
            return;
        }
        self.send_session(i, key, Msg::Attached(Attached { error: None, info: String::new() }));
        self.agents[i].node.handle_attached(now, key, mover);
    }

    pub(super) fn connect_failed(&mut self, i: usize, key: PeerKey, ep: EpId, error: &FabricError) {
        let Some(io) = self.agents[i].peers.get_mut(&key) else { return };
        if key.direction == Direction::TheyGrant {
            if io.attaching == Some(ep) {
                io.attaching = None;
                self.refuse_attach(i, key, error);
            }
        } else if io.endpoint.as_ref().is_some_and(|e| e.ep == ep) {
            io.endpoint = None;
            self.endpoint_broke(i, key, error);
        }
    }

    /// Decode's side: prefill has attached, or cannot.
    fn attach_answered(&mut self, i: usize, key: PeerKey, m: Attached) {
        let (now, mover) = (self.time(), self.options.mover);
        let Some(io) = self.agents[i].peers.get_mut(&key).filter(|io| io.endpoint.is_some()) else { return };
        match m.error {
            None => self.agents[i].node.handle_attached(now, key, mover),
            Some(reason) => {
                if let Some(ep) = io.take_endpoint() {
                    self.disconnect(i, ep);
                }
                self.agents[i].node.handle_fabric_broken(now, key, &reason);
            }
        }
    }

    /// A peer's process was seen to die: it is the same process in both directions.
    pub(super) fn process_ended(&mut self, i: usize, incarnation: Incarnation) {
        let now = self.time();
        let settles = self.sender_writes();
        for key in self.agents[i].node.keys_of(incarnation).collect::<Vec<_>>() {
            if !self.agents[i].peers.contains_key(&key) {
                continue;
            }
            if !settles {
                self.agents[i].node.handle_peer_died(now, key);
                continue;
            }
            // Its rooms fail now. Its pages come back once what it had sent has landed.
            self.agents[i].node.handle_unreachable(now, key);
            let reason = Reason::new(ReasonKind::PeerLost, "the peer's process has died");
            self.agents[i].node.handle_fabric_broken(now, key, &reason);
            self.job(SETTLE_US, i, Job::Settled(key));
        }
        self.carry_out(i);
    }

    /// Whether a peer that could not be fenced, and comes back having ended its writes, may be believed already.
    fn answer_has_settled(&mut self, i: usize, key: PeerKey, its_generation: u64) -> bool {
        let now = self.now;
        let a = &mut self.agents[i];
        let answers = a.node.is_unfenceable(key) && its_generation >= a.node.link_state(key).1;
        let Some(io) = a.peers.get_mut(&key).filter(|_| answers) else { return true };
        if now < *io.answered_at.get_or_insert(now) + SETTLE_US {
            return false;
        }
        io.answered_at = None;
        true
    }

    pub(super) fn drop_session(&mut self, i: usize, key: PeerKey, session: SessionNo, reason: &Reason) {
        let a = &mut self.agents[i];
        self.log
            .line(self.now, format_args!("{} drops session {} with {key:?}: {reason}", a.name, session.0));
        if let Some(io) = a.peers.get_mut(&key)
            && io.conn.is_some_and(|(_, s)| s == session)
        {
            io.conn = None;
        }
        if let Some((conn, end)) = a.sessions.get(&(key, session)).copied() {
            // What the thread had read before it closes the socket still reaches the node.
            let delay = self.draw((0, 200));
            self.job(delay, i, Job::CloseEnd { conn, end });
        }
    }

    /// A connection has ended at this end.
    pub(super) fn closed(&mut self, c: u64, e: usize) {
        let Some(end) = self.conns.get_mut(&c).map(|conn| &mut conn.ends[e]) else { return };
        let (i, session, meant, now) = (end.agent, end.session.take(), end.key, Time(self.now));
        if !self.agents[i].alive {
            return;
        }
        if let Some((key, session)) = session {
            let a = &mut self.agents[i];
            a.sessions.remove(&(key, session));
            if let Some(io) = a.peers.get_mut(&key)
                && io.conn.is_some_and(|(conn, _)| conn == c)
            {
                io.conn = None;
            }
            a.node.handle_session_down(now, key, session);
            if key.direction == Direction::WeGrant {
                // A session that the node refused leaves nobody who would ask for the next.
                self.connect(i, key);
            }
        } else if let Some(key) = meant
            && let Some(io) = self.agents[i].peers.get_mut(&key)
            && io.dialling == Some(c)
        {
            io.dialling = None;
            self.dial_failed(i, key);
        }
        self.carry_out(i);
    }
}
