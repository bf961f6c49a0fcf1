//! Sessions and endpoints: from a connection that passed its handshake to a peer with whom bytes can move.

use super::staging::Lane;
use super::{Driver, Retry};
use crate::address::HostPort;
use crate::carriers::{self, Which, mover};
use crate::control::{ConnId, ConnKind, ControlEvent, WatchId};
use kvxfer_fabric::cuda::AgentDevice;
use kvxfer_fabric::process::ProcessWatch;
use kvxfer_fabric::{Completion, EpId, FabricError};
use kvxfer_proto::handshake::{Established, Met};
use kvxfer_proto::msg::{Attach, Attached, Describe, Frame, Msg, Purpose};
use kvxfer_proto::node::{Direction, PeerKey, SessionUp};
use kvxfer_proto::plan::Template;
use kvxfer_proto::{Reason, ReasonKind, SessionNo, Side, Time};
use std::sync::Arc;
use std::time::Duration;

/// How long the kernel of this host may take to hand over what a peer on it had sent: many times TCP's timers on loopback.
const SETTLE: Duration = Duration::from_secs(1);

/// An endpoint that can carry bytes, and the plan for the two shards.
pub(super) struct Endpoint {
    pub(super) which: Which,
    pub(super) ep: EpId,
    pub(super) template: Arc<Template>,
    /// What the fabric says of it, transports and all.
    pub(super) info: String,
    /// The peer's staging ring, if we may write to one.
    pub(super) lane: Option<Lane>,
}

/// What the driver knows of a peer.
#[derive(Default)]
pub(super) struct PeerIo {
    /// Where it listens, from the directory.
    pub(super) address: Option<HostPort>,
    dialling: Option<ConnId>,
    /// When it was dialled last, how often in quick succession, and before when it is not dialled again.
    dialled_at: Time,
    quick: u32,
    not_before: Time,
    /// The connection of the present session.
    pub(super) conn: Option<(ConnId, SessionNo)>,
    pub(super) describe: Option<Box<Describe>>,
    pub(super) endpoint: Option<Endpoint>,
    attaching: Option<(Which, EpId)>,
    /// Fabrics still to be tried.
    choices: Vec<Which>,
    /// Its process, if it is on this host.
    watch: Option<(ProcessWatch, WatchId)>,
    /// Its process is or was on this host and in our network: what it has sent over TCP is in our kernel.
    pub(super) near: bool,
    /// Bytes came or went over UCX: what the kernel still holds of them is applied by our own worker.
    ucx: bool,
    /// The last fence failed because of TCP, or for an unknown reason.
    pub(super) tcp: bool,
    /// When it first came back after a fence that was impossible.
    answered_at: Option<Time>,
    /// Slices whose flush has not come back.
    pub(super) in_flight: usize,
    /// How to reach its ring, until there is an endpoint.
    ring_offer: Option<Vec<u8>>,
    /// Its ring was looked at over the endpoint there is.
    pub(super) lane_tried: bool,
    /// A connection on which the peers did not fit; rooms are failed on it.
    refused: Option<ConnId>,
}

impl PeerIo {
    /// Gives up the endpoint, also one that is being made.
    pub(super) fn take_endpoint(&mut self) -> Option<(Which, EpId)> {
        // There is never one of each: a new one is begun only after the old one is closed.
        self.lane_tried = false;
        let made = self.endpoint.take().map(|e| (e.which, e.ep));
        made.or_else(|| self.attaching.take())
    }

    /// Whether there never was more than a directory's word of it.
    pub(super) fn is_address_only(&self) -> bool {
        self.dialling.is_none()
            && self.conn.is_none()
            && self.describe.is_none()
            && self.endpoint.is_none()
            && self.attaching.is_none()
            && self.watch.is_none()
            && self.refused.is_none()
            && self.in_flight == 0
    }

    pub(super) fn side(&self) -> Option<Side> {
        self.describe.as_ref().map(|d| Side { groups: d.groups.clone(), shard: d.shard })
    }
}

impl Driver {
    /// Opens a connection for a session, if one is wanted and none is under way.
    pub(super) fn connect(&mut self, now: Time, key: PeerKey) {
        if !self.node.wants_session(key) {
            self.attempts.remove(&Retry::Connect(key));
            return;
        }
        let io = self.peers.entry(key).or_default();
        let Some(address) = io.address.clone().filter(|_| io.dialling.is_none() && io.conn.is_none()) else {
            return;
        };
        if now < io.not_before {
            self.retries.insert((io.not_before, Retry::Connect(key)));
            return;
        }
        // Sessions that end as soon as they are up must not be dialled for in a tight loop.
        io.quick = if now.since_us(io.dialled_at) < 1_000_000 { (io.quick + 1).min(8) } else { 0 };
        io.dialled_at = now;
        io.not_before = now.after(Duration::from_millis((1u64 << io.quick).min(1000)));
        // Never a number twice: the peer remembers one whose session was not taken here, and goes on remembering it when
        // this side has forgotten the peer.
        let session = SessionNo(self.dialled.0.saturating_add(1)).max(self.node.next_session(key));
        self.dialled = session;
        io.dialling = Some(self.control.dial(now, &address, ConnKind::Transfer(key), session));
    }

    pub(super) fn control_event(&mut self, now: Time, event: ControlEvent) {
        match event {
            ControlEvent::NeedDescribe(conn, kind, met) => self.describe(now, conn, &kind, met),
            ControlEvent::Established(conn, _, e) if !self.control.admit(conn, e.met.incarnation) => {}
            ControlEvent::Established(conn, kind, e) => match e.met.purpose {
                Purpose::Transfer => self.session_up(now, conn, &kind, *e),
                Purpose::Lookup | Purpose::Register => self.directory_up(conn, &kind, e.met.purpose),
            },
            ControlEvent::Refused(conn, kind, met, reason) => self.refused(now, conn, &kind, met, &reason),
            ControlEvent::ProcessEnded(watch) => {
                if let Some(key) = self.watches.remove(&watch) {
                    if let Some(io) = self.peers.get_mut(&key) {
                        // Closes the descriptor, which would stay readable.
                        io.watch = None;
                    }
                    self.process_ended(now, key);
                }
            }
            ControlEvent::Frame(conn, kind, frame) => self.frame(now, conn, kind, frame),
            ControlEvent::Closed { conn, kind, established, reason } => {
                self.closed(now, conn, kind, established, reason);
            }
        }
    }

    fn describe(&mut self, now: Time, conn: ConnId, kind: &ConnKind, met: Met) {
        if let ConnKind::Transfer(key) = kind
            && key.incarnation != met.incarnation
        {
            // Another process answers at this address: the one that was meant has restarted.
            let text = format!("incarnation {} answers where {} was", met.incarnation, key.incarnation);
            self.control.close(conn, Reason::new(ReasonKind::PeerLost, text));
            if let Some(io) = self.peers.get_mut(key) {
                io.dialling = None;
                io.address = None;
            }
            self.node.handle_replaced(now, *key);
            return;
        }
        let direction = match kind {
            ConnKind::Transfer(_) => Direction::WeGrant,
            _ => Direction::TheyGrant,
        };
        let key = PeerKey { incarnation: met.incarnation, direction };
        let (received, link_generation) = self.node.link_state(key);
        self.handshakes.insert(conn, link_generation);
        let side = self.node.side();
        let describe = Describe {
            name: self.me.name.clone(),
            engine: self.me.engine.clone(),
            dp_rank: self.me.dp_rank,
            role: self.me.role,
            mode: "push".to_owned(),
            groups: side.groups.clone(),
            shard: side.shard,
            pages: self.me.pages.clone(),
            model: self.me.model.clone(),
            regions: self.me.regions.clone(),
            fabrics: self.carriers.offers(),
            received,
            link_generation,
            staging: self.staging.offers(),
            process: self.me.process.clone(),
        };
        let mut events = Vec::new();
        self.control.supply_describe(conn, describe, &mut events);
        for event in events {
            self.control_event(now, event);
        }
    }

    fn session_up(&mut self, now: Time, conn: ConnId, kind: &ConnKind, e: Established) {
        let direction = match kind {
            ConnKind::Transfer(_) => Direction::WeGrant,
            _ => Direction::TheyGrant,
        };
        let key = PeerKey { incarnation: e.met.incarnation, direction };
        let own_generation = self.handshakes.remove(&conn).unwrap_or(0);
        let Some(describe) = e.describe else { return };
        let io = self.peers.entry(key).or_default();
        if io.dialling == Some(conn) {
            io.dialling = None;
        }
        if self.node.session_of(key) == Some(e.met.session) {
            // Not entered among the sessions: its end would be taken for that of the one which bears the number.
            let text = format!("session {} is there already", e.met.session.0);
            self.control.close(conn, Reason::new(ReasonKind::ProtocolError, text));
            return;
        }
        self.sessions.insert(conn, (key, e.met.session));
        if !self.answer_has_settled(now, key, describe.link_generation) {
            let reason = Reason::new(ReasonKind::PeerLost, "what was in flight may still arrive");
            self.control.close(conn, reason);
            return;
        }
        self.attempts.remove(&Retry::Connect(key));
        self.node.handle_session_up(
            now,
            SessionUp {
                peer: key,
                session: e.met.session,
                received: describe.received,
                generation: describe.link_generation,
                own_generation,
                side: Side { groups: describe.groups.clone(), shard: describe.shard },
                pages: describe.pages.clone(),
                name: describe.name.clone(),
            },
        );
        if self.node.session_of(key) != Some(e.met.session) {
            // The node said why in a `DropSession`.
            return;
        }
        tracing::debug!(peer = %describe.name, session = e.met.session.0, "session up");
        if let Some(io) = self.peers.get_mut(&key) {
            if io.watch.is_none()
                && let Some(watch) = ProcessWatch::open(&describe.process)
                && let Some(id) = self.control.watch_process(&watch)
            {
                io.near = watch.same_network();
                io.watch = Some((watch, id));
                self.watches.insert(id, key);
            }
            io.conn = Some((conn, e.met.session));
            io.choices = self.carriers.choices(&describe.fabrics);
            io.describe = Some(describe);
        }
        if direction == Direction::WeGrant {
            self.attach(now, key);
        }
    }

    /// Decode's side: uses the endpoint there is, or makes one over the best fabric that reaches the peer.
    fn attach(&mut self, now: Time, key: PeerKey) {
        if let Some(e) = self.peers.get(&key).and_then(|io| io.endpoint.as_ref()) {
            let which = e.which;
            let ring = self.offer_ring(key);
            self.send_session(key, Msg::Attach(Attach { fabric: carriers::name(which).to_owned(), ring }));
            return;
        }
        let mut why = "no fabric in common reaches it".to_owned();
        loop {
            let Some(io) = self.peers.get_mut(&key) else { return };
            if io.attaching.is_some() {
                return;
            }
            if io.choices.is_empty() {
                let name = io.describe.as_ref().map_or("?", |d| d.name.as_str());
                let text = format!("peer {name} cannot be reached: {why}");
                self.unattachable(now, key, Reason::new(ReasonKind::FabricError, text));
                return;
            }
            let which = io.choices.remove(0);
            match self.open_endpoint(key, which) {
                Ok(()) => return,
                Err(e) => why = e.to_string(),
            }
        }
    }

    /// No fabric is left to try. The peer is told which rooms failed of it before the session ends: the next room tries
    /// again in a new one.
    fn unattachable(&mut self, now: Time, key: PeerKey, reason: Reason) {
        self.node.handle_unattachable(now, key, &reason);
        self.carry_out(now);
        if let Some((conn, _)) = self.peers.get(&key).and_then(|io| io.conn) {
            self.control.close(conn, reason);
        }
    }

    fn open_endpoint(&mut self, key: PeerKey, which: Which) -> Result<(), FabricError> {
        let Some(io) = self.peers.get_mut(&key) else { return Err(FabricError::NoEndpoint(0)) };
        let Some(describe) = &io.describe else { return Err(FabricError::NoEndpoint(0)) };
        let lens: Vec<u64> = describe.regions.iter().map(|r| r.len).collect();
        let ep = self.carriers.connect(which, key, &describe.fabrics, &lens)?;
        io.attaching = Some((which, ep));
        io.ucx |= which == Which::Ucx;
        Ok(())
    }

    pub(super) fn send_session(&mut self, key: PeerKey, msg: Msg) {
        let Some((conn, session)) = self.peers.get(&key).and_then(|io| io.conn) else { return };
        let frame = Frame { incarnation: self.me.incarnation, session, number: 0, msg };
        self.control.send(conn, &frame);
    }

    fn frame(&mut self, now: Time, conn: ConnId, kind: ConnKind, frame: Frame) {
        let Some(&(key, _)) = self.sessions.get(&conn) else {
            if let Msg::RoomFailed(m) = frame.msg {
                let key = PeerKey { incarnation: frame.incarnation, direction: Direction::TheyGrant };
                self.node.handle_room_failed(now, key, m.room, m.reason);
            } else {
                self.directory_frame(now, conn, kind, frame);
            }
            return;
        };
        let present = self.peers.get(&key).and_then(|io| io.conn).is_some_and(|(c, _)| c == conn);
        match frame.msg {
            // On the connection of an older session: what was asked or answered there is void.
            Msg::Attach(_) | Msg::Attached(_) if !present => {}
            Msg::Attach(m) => self.attach_asked(now, key, m),
            Msg::Attached(m) => self.attach_answered(now, key, m),
            // The peer checks more than we do, and does not want us.
            Msg::Refuse(reason) if is_final(&reason) => self.node.handle_refused(now, key, &reason),
            // It gave up this connection and not us, for example because its own part took too long.
            Msg::Refuse(reason) => self.control.close(conn, reason),
            msg => {
                if let Msg::Pong(n) = msg {
                    self.ponged(now, key, n);
                }
                if let Msg::Done(done) = &msg {
                    self.make_visible(now, done.room);
                }
                let frame = Frame { msg, ..frame };
                if let Err(reason) = self.node.handle_frame(now, key, frame) {
                    tracing::warn!(%reason, "the peer broke the protocol");
                    self.control.close(conn, reason);
                }
            }
        }
    }

    /// What was delivered of a room is about to count: kernels that see its success see its bytes.
    fn make_visible(&mut self, now: Time, room: kvxfer_proto::Room) {
        if let Some(Err(e)) = self.device.as_ref().map(AgentDevice::flush_writes) {
            let text = format!("room {room}: what was written may not be visible to kernels: {e}");
            self.node.handle_cancel(now, room, Reason::new(ReasonKind::FabricError, text));
        }
    }

    /// Prefill's side: decode has chosen a fabric.
    fn attach_asked(&mut self, now: Time, key: PeerKey, m: Attach) {
        let Attach { fabric, ring } = m;
        let Some(which) = carriers::named(&fabric) else {
            let text = format!("fabric {fabric:?} is not known here");
            self.answer_attach(key, Some(Reason::new(ReasonKind::FabricError, text)), String::new());
            return;
        };
        let Some(io) = self.peers.get_mut(&key) else { return };
        if let Some(endpoint) = io.endpoint.as_ref().filter(|e| e.which == which) {
            let fresh = ring.filter(|_| endpoint.lane.is_none() && !io.lane_tried);
            if self.probe_again(now, key) {
                return;
            }
            self.attach_with(now, key, fresh);
            return;
        }
        io.ring_offer = ring;
        if let Some((old, ep)) = io.take_endpoint() {
            self.carriers.disconnect(old, ep);
        }
        if let Err(e) = self.open_endpoint(key, which) {
            self.answer_attach(key, Some(Reason::new(ReasonKind::FabricError, e.to_string())), String::new());
        }
    }

    /// Our endpoint is open: measures what writing to the peer takes if it has a ring, and tells it then.
    fn attach_with(&mut self, now: Time, key: PeerKey, ring: Option<Vec<u8>>) {
        if ring.is_some_and(|ring| self.open_lane(now, key, &ring)) {
            return;
        }
        self.attached(now, key);
    }

    pub(super) fn attached(&mut self, now: Time, key: PeerKey) {
        let endpoint = self.peers.get(&key).and_then(|io| io.endpoint.as_ref());
        if let Some((which, info)) = endpoint.map(|e| (e.which, e.info.clone())) {
            self.answer_attach(key, None, info);
            self.node.handle_attached(now, key, mover(which));
        }
    }

    fn answer_attach(&mut self, key: PeerKey, error: Option<Reason>, info: String) {
        self.send_session(key, Msg::Attached(Attached { error, info }));
    }

    /// Decode's side: prefill has attached, or cannot.
    fn attach_answered(&mut self, now: Time, key: PeerKey, m: Attached) {
        let Some(io) = self.peers.get_mut(&key) else { return };
        let Some(endpoint) = io.endpoint.take() else { return };
        match m.error {
            None => {
                let which = endpoint.which;
                io.endpoint = Some(endpoint);
                self.node.handle_attached(now, key, mover(which));
            }
            Some(reason) => {
                tracing::info!(%reason, fabric = carriers::name(endpoint.which), "the peer could not attach");
                self.carriers.disconnect(endpoint.which, endpoint.ep);
                self.attach(now, key);
            }
        }
    }

    /// Something that a fabric reports of an endpoint.
    pub(super) fn completion(&mut self, now: Time, which: Which, key: Option<PeerKey>, c: Completion) {
        match c {
            Completion::Flushed { ticket, result, .. } => self.flushed(now, ticket, result),
            Completion::Fenced { ep, ticket, result } => {
                self.staging.free_buffers_at(ep);
                self.fenced(now, ticket, result);
            }
            Completion::Connected { ep, info } => {
                if let Some(key) = key {
                    self.endpoint_up(now, key, which, ep, info);
                }
            }
            Completion::ConnectFailed { ep, error } => {
                let Some(key) = key else { return };
                let Some(io) = self.peers.get_mut(&key) else { return };
                if io.attaching != Some((which, ep)) {
                    return;
                }
                io.attaching = None;
                tracing::info!(%error, fabric = carriers::name(which), "cannot attach");
                if key.direction == Direction::WeGrant {
                    if io.choices.is_empty() {
                        let name = io.describe.as_ref().map_or("?", |d| d.name.as_str());
                        let text =
                            format!("peer {name} cannot be reached over {}: {error}", carriers::name(which));
                        self.unattachable(now, key, Reason::new(ReasonKind::FabricError, text));
                    } else {
                        self.attach(now, key);
                    }
                } else {
                    self.answer_attach(
                        key,
                        Some(Reason::new(ReasonKind::FabricError, error.to_string())),
                        String::new(),
                    );
                }
            }
            Completion::PeerDied { .. } => {
                if let Some(key) = key {
                    self.process_ended(now, key);
                }
            }
            Completion::Broken { error, .. } => {
                if let Some(key) = key {
                    self.endpoint_broke(now, key, &error);
                }
            }
        }
    }

    /// A peer's process has died: it is the same process in both directions.
    fn process_ended(&mut self, now: Time, key: PeerKey) {
        for key in self.node.keys_of(key.incarnation).collect::<Vec<_>>() {
            if !self.peers.get(&key).is_some_and(|io| io.ucx) {
                self.node.handle_peer_died(now, key);
                continue;
            }
            // Its rooms fail now. Its pages come back once our worker has taken what the kernel still held of it.
            self.node.handle_unreachable(now, key);
            let text = format!("the process of peer {} has died", self.peer_name(key));
            self.node.handle_fabric_broken(now, key, &Reason::new(ReasonKind::PeerLost, text));
            self.settling.push((now.after(SETTLE), key));
        }
    }

    /// Lets go of dead peers of which nothing can arrive any more: everything that they sent on this host and network was in
    /// our sockets by then, and the worker has found them empty since.
    pub(super) fn settle_dead(&mut self, now: Time) {
        let idle_at = self.fabrics_idle_at;
        let settled = |at: &Time| *at <= now && idle_at >= *at;
        let (done, left) = std::mem::take(&mut self.settling).into_iter().partition(|(at, _)| settled(at));
        self.settling = left;
        let done: Vec<(Time, PeerKey)> = done;
        for (_, key) in done {
            if self.peers.get(&key).is_some_and(|io| io.ucx && !io.near) {
                if self.node.is_fencing(key) {
                    // Only its end says whether TCP is among what the pages came over.
                    self.settling.push((now.after(SETTLE / 16), key));
                    continue;
                }
                if self.node.is_unfenceable(key) && self.peers.get(&key).is_some_and(|io| io.tcp) {
                    // A network that is not ours alone may hold its bytes for as long as it likes: the operator's word.
                    continue;
                }
            }
            self.node.handle_peer_died(now, key);
        }
    }

    /// Whether a peer that could not be fenced, and comes back having ended its writes, may be believed already. Over TCP
    /// from another host it never may: the network can hold bytes for as long as it likes.
    fn answer_has_settled(&mut self, now: Time, key: PeerKey, its_generation: u64) -> bool {
        let idle_at = self.fabrics_idle_at;
        let answers = self.node.is_unfenceable(key) && its_generation >= self.node.link_state(key).1;
        let Some(io) = self.peers.get_mut(&key).filter(|io| io.ucx && answers) else { return true };
        if io.tcp && !(io.near && io.watch.is_some()) {
            return false;
        }
        let settled_at = io.answered_at.get_or_insert(now).after(SETTLE);
        if now < settled_at || idle_at < settled_at {
            return false;
        }
        io.answered_at = None;
        true
    }

    fn peer_name(&self, key: PeerKey) -> &str {
        self.peers.get(&key).and_then(|io| io.describe.as_ref()).map_or("?", |d| d.name.as_str())
    }

    /// The endpoint to a peer does not work any more: with a sentence that names the peer, since the fabric's cannot.
    pub(super) fn endpoint_broke(&mut self, now: Time, key: PeerKey, error: &FabricError) {
        let text = format!("peer {} is lost: {error}", self.peer_name(key));
        let reason = Reason::new(ReasonKind::PeerLost, text);
        self.node.handle_fabric_broken(now, key, &reason);
    }

    fn endpoint_up(&mut self, now: Time, key: PeerKey, which: Which, ep: EpId, info: String) {
        let own = self.node.side().clone();
        let Some(io) = self.peers.get_mut(&key) else { return };
        if io.attaching != Some((which, ep)) {
            self.carriers.disconnect(which, ep);
            return;
        }
        io.attaching = None;
        let Some(theirs) = io.side() else { return };
        tracing::debug!(fabric = carriers::name(which), %info, "attached");
        let template = match key.direction {
            Direction::WeGrant => Template::new(&theirs, &own),
            Direction::TheyGrant => Template::new(&own, &theirs),
        };
        match template {
            Ok(t) => io.endpoint = Some(Endpoint { which, ep, template: Arc::new(t), info, lane: None }),
            Err(e) => {
                // The handshake checks that the layouts fit, so this is a bug of ours.
                let reason = Reason::new(ReasonKind::LayoutMismatch, e.to_string());
                self.carriers.disconnect(which, ep);
                self.node.handle_refused(now, key, &reason);
                return;
            }
        }
        if key.direction == Direction::WeGrant {
            let ring = self.offer_ring(key);
            self.send_session(key, Msg::Attach(Attach { fabric: carriers::name(which).to_owned(), ring }));
        } else {
            let ring = self.peers.get_mut(&key).and_then(|io| io.ring_offer.take());
            self.attach_with(now, key, ring);
        }
    }

    fn refused(&mut self, now: Time, conn: ConnId, kind: &ConnKind, met: Met, reason: &Reason) {
        self.handshakes.remove(&conn);
        tracing::warn!(%reason, "a peer does not fit");
        if matches!(kind, ConnKind::Transfer(_)) {
            let key = PeerKey { incarnation: met.incarnation, direction: Direction::WeGrant };
            if let Some(io) = self.peers.get_mut(&key) {
                io.dialling = None;
                io.refused = Some(conn);
            }
            self.refused_sessions.insert(conn, met.session);
            self.node.handle_refused(now, key, reason);
        }
    }

    /// On a refused connection, the peer learns which rooms failed for it.
    pub(super) fn tell_refused(&mut self, key: PeerKey, rooms: Vec<(kvxfer_proto::Room, Reason)>) {
        let Some(conn) = self.peers.get_mut(&key).and_then(|io| io.refused.take()) else { return };
        let session = self.refused_sessions.remove(&conn).unwrap_or_default();
        for (room, reason) in rooms {
            let msg = Msg::RoomFailed(kvxfer_proto::msg::RoomFailed { room, reason });
            self.control.send(conn, &Frame { incarnation: self.me.incarnation, session, number: 0, msg });
        }
        self.control.close(conn, Reason::new(ReasonKind::LayoutMismatch, "the peers do not fit"));
    }

    pub(super) fn drop_session(&mut self, key: PeerKey, session: SessionNo, reason: &Reason) {
        // The present one's number is its own; those of refused ones may be anything, also each other's.
        let found = self.sessions.iter().filter(|(_, s)| **s == (key, session)).map(|(conn, _)| *conn);
        for conn in found.collect::<Vec<_>>() {
            self.control.close(conn, reason.clone());
        }
        if let Some(io) = self.peers.get_mut(&key)
            && io.conn.is_some_and(|(_, s)| s == session)
        {
            io.conn = None;
        }
    }

    fn closed(&mut self, now: Time, conn: ConnId, kind: ConnKind, established: bool, reason: Reason) {
        self.handshakes.remove(&conn);
        self.refused_sessions.remove(&conn);
        if let Some((key, session)) = self.sessions.remove(&conn) {
            if let Some(io) = self.peers.get_mut(&key)
                && io.conn.is_some_and(|(c, _)| c == conn)
            {
                io.conn = None;
            }
            self.node.handle_session_down(now, key, session);
            self.staging.drop_probe(key);
            if key.direction == Direction::WeGrant {
                // A session that the node refused leaves nobody who would ask for the next; nothing if none is wanted.
                self.connect(now, key);
            }
            return;
        }
        match kind {
            ConnKind::Transfer(key) => {
                let Some(io) = self.peers.get_mut(&key) else { return };
                if io.refused == Some(conn) {
                    io.refused = None;
                }
                if io.dialling != Some(conn) {
                    return;
                }
                io.dialling = None;
                if is_final(&reason) {
                    self.node.handle_refused(now, key, &reason);
                } else if !established {
                    let tries = self.attempts.get(&Retry::Connect(key)).copied().unwrap_or(0);
                    if tries % 4 == 3 {
                        // It may have restarted elsewhere; the directory knows.
                        self.node.handle_unreachable(now, key);
                    }
                    self.retry(now, Retry::Connect(key));
                }
            }
            other => self.directory_closed(now, conn, other, reason),
        }
    }

    /// What a forgotten peer leaves behind.
    pub(super) fn drop_watch(&mut self, io: &mut PeerIo) {
        if let Some((_, id)) = io.watch.take() {
            self.watches.remove(&id);
        }
    }

    pub(super) fn evict(&mut self, now: Time, name: &str) {
        let keys: Vec<PeerKey> = self
            .peers
            .iter()
            .filter(|(key, io)| {
                key.incarnation.to_string() == name || io.describe.as_ref().is_some_and(|d| d.name == name)
            })
            .map(|(key, _)| *key)
            .collect();
        for key in keys {
            self.node.handle_evict(now, key);
        }
    }

    /// Says goodbye on every session, so that no peer waits for us.
    pub(super) fn end_sessions(&mut self) {
        let reason = Reason::new(ReasonKind::PeerLost, format!("agent {} was closed", self.me.name));
        let open: Vec<(ConnId, SessionNo)> = self.sessions.iter().map(|(conn, (_, s))| (*conn, *s)).collect();
        for (conn, session) in &open {
            let msg = Msg::Bye(reason.clone());
            self.control
                .send(*conn, &Frame { incarnation: self.me.incarnation, session: *session, number: 0, msg });
        }
        // A socket that is closed with bytes unread resets the connection, and the goodbye could be lost with it: the
        // peers close first, or the time is up.
        let until = super::now().after(Duration::from_millis(200));
        let mut events = Vec::new();
        let mut left = open.len();
        while left > 0 && super::now() < until {
            self.control.settle(&mut events);
            self.control.turn(Some(Duration::from_millis(5)), &mut events);
            self.control.settle(&mut events);
            for event in events.drain(..) {
                if let ControlEvent::Closed { conn, .. } = event
                    && self.sessions.remove(&conn).is_some()
                {
                    left -= 1;
                }
            }
        }
    }
}

/// Whether trying again cannot help.
pub(super) fn is_final(reason: &Reason) -> bool {
    matches!(
        reason.kind,
        ReasonKind::AuthError
            | ReasonKind::VersionMismatch
            | ReasonKind::ProtocolError
            | ReasonKind::LayoutMismatch
    )
}
