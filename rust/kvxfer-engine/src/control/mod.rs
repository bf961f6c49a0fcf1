//! The control channel: TCP connections, their handshakes, and frames in and out. No state of rooms here.

mod conn;
mod limits;
mod names;
#[cfg(test)]
mod tests;
mod tls;

pub(crate) use conn::{ConnId, ConnKind};
pub use limits::Limits;
pub(crate) use tls::TlsSetup;

use crate::address::HostPort;
use crate::config::StartError;
use conn::{Conn, Fault};
use kvxfer_fabric::process::ProcessWatch;
use kvxfer_proto::handshake::{self, Established, Met, Secret};
use kvxfer_proto::msg::{Describe, Frame, Purpose};
use kvxfer_proto::{Incarnation, Reason, ReasonKind, SessionNo, Time};
use limits::{Origin, Usage};
use names::Names;
use rustix::event::epoll;
use rustix::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::collections::HashMap;
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::time::Duration;

/// Tokens of the descriptors that are not connections.
pub(crate) const TOKEN_WAKE: u64 = 0;
const TOKEN_LISTENER: u64 = 1;
const TOKEN_NAMES: u64 = 2;
/// First token that fabrics may use.
pub(crate) const TOKEN_FABRIC: u64 = 8;
const TOKEN_CONN: u64 = 64;
/// From here on: processes that are watched.
const TOKEN_WATCH: u64 = 1 << 62;

/// Bytes of one read from a connection at most.
const READ_BYTES: usize = 64 << 10;
/// Connections in a TLS handshake that are served in one turn: a step costs some hundred microseconds of signatures, and a
/// flood of strangers must not make the data wait for all of theirs.
const TLS_HANDSHAKES_PER_TURN: usize = 4;
/// Connections that are turned away in one turn when no descriptor is left.
const SHED_PER_TURN: usize = 64;

/// Names a watched process.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct WatchId(u64);

/// What happened on the control channel.
#[derive(Debug)]
pub(crate) enum ControlEvent {
    /// The peer is authenticated; answer with [`Control::supply_describe`].
    NeedDescribe(ConnId, ConnKind, Met),
    Established(ConnId, ConnKind, Box<Established>),
    /// The peers do not fit.
    Refused(ConnId, ConnKind, Met, Reason),
    Frame(ConnId, ConnKind, Frame),
    /// A watched process has ended.
    ProcessEnded(WatchId),
    /// The connection is gone. `established`: it had passed its handshake.
    Closed {
        conn: ConnId,
        kind: ConnKind,
        established: bool,
        reason: Reason,
    },
}

/// All connections of an agent.
pub(crate) struct Control {
    epoll: OwnedFd,
    /// Given up to turn connections away when no other descriptor is left.
    spare: Option<OwnedFd>,
    /// With fewer free than this, connections are turned away.
    pub(crate) spare_descriptors: u64,
    listener: TcpListener,
    address: SocketAddr,
    conns: HashMap<ConnId, Conn>,
    next: u64,
    watches: u64,
    names: Names,
    incarnation: Incarnation,
    secret: Option<Secret>,
    tls: Option<TlsSetup>,
    insecure: bool,
    limits: Limits,
    usage: Usage,
    /// Ready connections in a TLS handshake, and which was served last.
    shaking: Vec<(ConnId, epoll::EventFlags)>,
    shaken: ConnId,
    ready: Vec<epoll::Event>,
    /// Bytes on their way in.
    read: Vec<u8>,
    /// Connections with something to write or to report.
    touched: Vec<ConnId>,
    pub(crate) frames_sent: u64,
    pub(crate) frames_received: u64,
    pub(crate) bad_connections: u64,
    pub(crate) limited_connections: u64,
    pub(crate) slow_connections: u64,
    pub(crate) auth_failures: u64,
}

/// Who may speak to an agent, and how much.
pub(crate) struct Guard {
    pub(crate) secret: Option<Secret>,
    pub(crate) tls: Option<TlsSetup>,
    /// An agent that checks nobody may speak to other hosts.
    pub(crate) insecure: bool,
    pub(crate) limits: Limits,
}

fn os(call: &'static str) -> impl Fn(rustix::io::Errno) -> StartError {
    move |e| StartError::Os { call, why: e.to_string() }
}

impl Control {
    pub(crate) fn new(
        listen: &HostPort,
        wake: BorrowedFd<'_>,
        incarnation: Incarnation,
        guard: Guard,
    ) -> Result<Self, StartError> {
        let fail = |why: String| StartError::Listen { address: listen.to_string(), why };
        let addresses: Vec<SocketAddr> = (listen.host.as_str(), listen.port)
            .to_socket_addrs()
            .map_err(|e| fail(format!("{e}; listen on an address of this host")))?
            .collect();
        let first = *addresses.first().ok_or_else(|| fail("the host has no address".to_owned()))?;
        if !first.ip().to_canonical().is_loopback() && guard.secret.is_none() && guard.tls.is_none() {
            if !guard.insecure {
                return Err(StartError::Auth(format!(
                    "listening on {listen}, which other hosts reach, needs a shared secret or TLS: pass secret=, or set \
                     KVXFER_SECRET_FILE or KVXFER_SECRET, or pass tls=; insecure=True lets whoever reaches the port read \
                     and write the KV pages"
                )));
            }
            tracing::warn!(%listen, "insecure: whoever reaches this port can read and write the KV pages");
        }
        let listener = TcpListener::bind(first).map_err(|e| {
            fail(if e.kind() == std::io::ErrorKind::AddrInUse {
                format!(
                    "port {} is taken by another process; choose another, or port 0 to let the system choose",
                    first.port()
                )
            } else {
                e.to_string()
            })
        })?;
        listener.set_nonblocking(true).map_err(|e| fail(e.to_string()))?;
        let address = listener.local_addr().map_err(|e| fail(e.to_string()))?;
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC).map_err(os("epoll_create"))?;
        let names = Names::new().map_err(os("eventfd"))?;
        let spare = rustix::io::fcntl_dupfd_cloexec(&epoll, 0).ok();
        let this = Self {
            epoll,
            spare,
            spare_descriptors: 0,
            listener,
            address,
            conns: HashMap::new(),
            next: TOKEN_CONN,
            watches: 0,
            names,
            incarnation,
            secret: guard.secret,
            tls: guard.tls,
            insecure: guard.insecure,
            limits: guard.limits,
            usage: Usage::default(),
            shaking: Vec::new(),
            shaken: ConnId(0),
            ready: Vec::with_capacity(256),
            read: vec![0; READ_BYTES],
            touched: Vec::new(),
            frames_sent: 0,
            frames_received: 0,
            bad_connections: 0,
            limited_connections: 0,
            slow_connections: 0,
            auth_failures: 0,
        };
        this.watch(wake, TOKEN_WAKE)?;
        this.watch(this.listener.as_fd(), TOKEN_LISTENER)?;
        this.watch(this.names.fd(), TOKEN_NAMES)?;
        Ok(this)
    }

    /// Watches a descriptor for reading.
    pub(crate) fn watch(&self, fd: BorrowedFd<'_>, token: u64) -> Result<(), StartError> {
        epoll::add(&self.epoll, fd, epoll::EventData::new_u64(token), epoll::EventFlags::IN)
            .map_err(os("epoll_ctl"))
    }

    /// Watches a process until `watch` is dropped; its end is reported at least once.
    pub(crate) fn watch_process(&mut self, watch: &ProcessWatch) -> Option<WatchId> {
        self.watches += 1;
        let id = TOKEN_WATCH + self.watches;
        self.watch(watch.as_fd(), id).is_ok().then_some(WatchId(id))
    }

    /// Where this agent listens.
    pub(crate) fn address(&self) -> SocketAddr {
        self.address
    }

    pub(crate) fn len(&self) -> usize {
        self.conns.len()
    }

    /// Waits up to `timeout` for anything, and does what I/O there is. Returns whether there was any.
    pub(crate) fn turn(&mut self, timeout: Option<Duration>, out: &mut Vec<ControlEvent>) -> bool {
        let limit = timeout.map(|t| rustix::event::Timespec {
            tv_sec: i64::try_from(t.as_secs()).unwrap_or(i64::MAX),
            tv_nsec: i64::from(t.subsec_nanos()),
        });
        let mut ready = std::mem::take(&mut self.ready);
        ready.clear();
        // Interrupted or not, whatever is ready now is ready the next time too.
        let _ = epoll::wait(&self.epoll, rustix::buffer::spare_capacity(&mut ready), limit.as_ref());
        // The other descriptors only wake a sleeper: they may stay readable while there is nothing to do.
        let mut any = ready.iter().any(|e| matches!(e.data.u64(), TOKEN_NAMES | TOKEN_CONN..));
        for event in &ready {
            let flags = event.flags;
            match event.data.u64() {
                // Not the time at which a sleep began: the handshake's limit counts from here. A listener that stays readable
                // because no descriptor is left must not keep the thread awake.
                TOKEN_LISTENER => any |= self.accept(crate::clock::now()),
                TOKEN_NAMES => self.named(),
                token if token >= TOKEN_WATCH => out.push(ControlEvent::ProcessEnded(WatchId(token))),
                token if token >= TOKEN_CONN => {
                    let id = ConnId(token);
                    match self.conns.get_mut(&id) {
                        Some(conn) if conn.is_in_tls_handshake() => self.shaking.push((id, flags)),
                        Some(_) => self.serve(id, flags, out),
                        None => {}
                    }
                }
                _ => {}
            }
        }
        self.ready = ready;
        self.shake(out);
        any
    }

    /// Serves some of the connections in a TLS handshake, in turn; the others are ready the next time too.
    fn shake(&mut self, out: &mut Vec<ControlEvent>) {
        let mut shaking = std::mem::take(&mut self.shaking);
        if !shaking.is_empty() {
            shaking.sort_unstable_by_key(|(id, _)| *id);
            let next = shaking.partition_point(|(id, _)| *id <= self.shaken);
            shaking.rotate_left(next);
        }
        for (id, flags) in shaking.drain(..).take(TLS_HANDSHAKES_PER_TURN) {
            self.serve(id, flags, out);
            self.shaken = id;
        }
        self.shaking = shaking;
    }

    /// Does what I/O there is on a connection.
    fn serve(&mut self, id: ConnId, flags: epoll::EventFlags, out: &mut Vec<ControlEvent>) {
        let Some(conn) = self.conns.get_mut(&id) else { return };
        conn.io(flags, out, &mut self.frames_received, &mut self.read);
        self.touched.push(id);
        if conn.established() {
            // At once, and not when the turn is settled: whoever is accepted later in this turn would have it closed as the
            // oldest stranger.
            self.usage.no_stranger(id);
        }
    }

    /// Sends what was queued, reports what ended, and gives up handshakes that take too long.
    pub(crate) fn settle(&mut self, out: &mut Vec<ControlEvent>) {
        let mut touched = std::mem::take(&mut self.touched);
        touched.sort_unstable();
        touched.dedup();
        for id in touched.drain(..) {
            let Some(conn) = self.conns.get_mut(&id) else { continue };
            conn.write();
            if let Some(reason) = conn.over() {
                let (kind, established) = (conn.kind.clone(), conn.established());
                self.bad_connections += u64::from(!established || conn.fault.is_some());
                self.limited_connections += u64::from(conn.fault == Some(Fault::Limit));
                self.slow_connections += u64::from(conn.fault == Some(Fault::Slow));
                self.auth_failures += u64::from(reason.kind == ReasonKind::AuthError);
                self.usage.gone(id, conn.origin, conn.counted);
                self.conns.remove(&id);
                out.push(ControlEvent::Closed { conn: id, kind, established, reason });
            } else if let Some((flags, new)) = conn.interest_changed() {
                let data = epoll::EventData::new_u64(id.0);
                let changed = conn.fd().map(|fd| match new {
                    true => epoll::add(&self.epoll, fd, data, flags),
                    false => epoll::modify(&self.epoll, fd, data, flags),
                });
                if let Some(Err(e)) = changed {
                    conn.fail(Reason::new(ReasonKind::Internal, format!("epoll_ctl failed: {e}")));
                    self.touched.push(id);
                }
            }
        }
        if self.touched.is_empty() {
            self.touched = touched;
        }
    }

    /// Ends handshakes whose time is up. Returns when the next one's is.
    pub(crate) fn expire(&mut self, now: Time) -> Option<Time> {
        let mut next = None;
        for (id, conn) in &mut self.conns {
            let Some(deadline) = conn.deadline() else { continue };
            if deadline <= now {
                conn.time_is_up(now);
                self.touched.push(*id);
            } else {
                next = Some(next.map_or(deadline, |n: Time| n.min(deadline)));
            }
        }
        next
    }

    /// Whether [`Control::settle`] has something to do.
    pub(crate) fn is_unsettled(&self) -> bool {
        !self.touched.is_empty()
    }

    fn accept(&mut self, now: Time) -> bool {
        let mut any = false;
        // Bounded, so that a flood of connections cannot starve the data; the rest is accepted on the next turn.
        for _ in 0..64 {
            let (stream, from) = match self.listener.accept() {
                Ok(accepted) => accepted,
                Err(e) => {
                    let errno = rustix::io::Errno::from_io_error(&e);
                    if matches!(errno, Some(rustix::io::Errno::MFILE | rustix::io::Errno::NFILE)) {
                        self.shed();
                    }
                    return any;
                }
            };
            any = true;
            if self.is_short_of_descriptors(&stream) {
                // A peer that is taken in here goes on to connect to UCX, which gives up its listener for good, or the
                // process, when it is refused a descriptor.
                self.bad_connections += 1;
                self.limited_connections += 1;
                continue;
            }
            let origin = Origin::of(from.ip());
            if self.conns.len() >= self.limits.connections
                || self.usage.of_origin(origin) >= self.limits.connections_per_address
            {
                self.bad_connections += 1;
                self.limited_connections += 1;
                continue;
            }
            let Some(config) = self.handshake_config() else { continue };
            let Ok(tls) = self.tls.as_ref().map(TlsSetup::acceptor).transpose() else { continue };
            let id = self.new_id();
            let conn = Conn::accepted(
                id,
                stream,
                handshake::Handshake::acceptor(config),
                tls,
                self.limits,
                now.after(self.limits.handshake_timeout),
            );
            match conn {
                Ok(mut conn) => {
                    conn.origin = Some(origin);
                    self.add(conn);
                    // Strangers must not use up the engine's descriptors, nor one of them another's share.
                    if let Some((id, text)) = self.usage.accepted(&self.limits, id, origin)
                        && let Some(conn) = self.conns.get_mut(&id)
                    {
                        conn.limit(Reason::new(ReasonKind::PeerLost, text));
                        self.touched.push(id);
                    }
                }
                Err(_) => self.bad_connections += 1,
            }
        }
        any
    }

    /// Counts an accepted connection to its peer. One too many is closed, and is nobody's.
    pub(crate) fn admit(&mut self, id: ConnId, peer: Incarnation) -> bool {
        let Some(conn) = self.conns.get_mut(&id).filter(|c| c.kind == ConnKind::Accepted) else {
            return true;
        };
        if self.usage.admit(&self.limits, peer) {
            conn.counted = Some(peer);
            return true;
        }
        let most = self.limits.connections_per_peer;
        let text = format!("peer {peer} has {most} connections here already");
        conn.turn_away(Reason::new(ReasonKind::Unhealthy, text));
        self.touched.push(id);
        false
    }

    /// Closes a connection that asked for more than a limit allows.
    pub(crate) fn limit(&mut self, id: ConnId, reason: Reason) {
        if let Some(conn) = self.conns.get_mut(&id) {
            conn.limit(reason);
            self.touched.push(id);
        }
    }

    pub(crate) fn limits(&self) -> &Limits {
        &self.limits
    }

    /// No descriptor is left: whoever waits is turned away with the one that was kept for that, or the listener would stay
    /// readable for ever and the thread awake.
    fn shed(&mut self) {
        self.spare = None;
        // Bounded like `accept`: whoever connects faster than this loop must not keep the thread in it.
        for _ in 0..SHED_PER_TURN {
            let Ok((stream, _)) = self.listener.accept() else { break };
            self.bad_connections += 1;
            drop(stream);
        }
        self.spare = rustix::io::fcntl_dupfd_cloexec(&self.epoll, 0).ok();
    }

    /// Whether fewer descriptors than the data path of another peer may need are free. The system gives the lowest free
    /// number, so at most those between this one and the limit are.
    fn is_short_of_descriptors(&self, newest: &TcpStream) -> bool {
        let number = u64::try_from(newest.as_raw_fd()).unwrap_or(0);
        let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
        limit.is_some_and(|limit| number.saturating_add(self.spare_descriptors) >= limit)
    }

    fn handshake_config(&self) -> Option<handshake::Config> {
        let mut nonce = [0u8; 32];
        getrandom::fill(&mut nonce).ok()?;
        Some(handshake::Config::new(self.incarnation, nonce, self.secret.clone()))
    }

    fn new_id(&mut self) -> ConnId {
        self.next += 1;
        ConnId(self.next)
    }

    fn add(&mut self, conn: Conn) {
        // `settle` watches it.
        let id = conn.id;
        self.touched.push(id);
        self.conns.insert(id, conn);
    }

    /// Opens a connection. A `Closed` tells of every failure, also of the first step's.
    pub(crate) fn dial(
        &mut self,
        now: Time,
        address: &HostPort,
        kind: ConnKind,
        session: SessionNo,
    ) -> ConnId {
        let purpose = match kind {
            ConnKind::Lookup(_) => Purpose::Lookup,
            ConnKind::Register => Purpose::Register,
            ConnKind::Accepted | ConnKind::Transfer(_) => Purpose::Transfer,
        };
        let id = self.new_id();
        let deadline = now.after(self.limits.handshake_timeout);
        let mut conn = Conn::dialled(id, kind, self.limits, deadline);
        let tls = self.tls.as_ref().map(|tls| tls.initiator(&address.host)).transpose();
        let handshake = match (self.handshake_config(), tls) {
            (Some(config), Ok(tls)) => Ok((handshake::Handshake::initiator(config, purpose, session), tls)),
            (_, Err(reason)) => Err(reason),
            (None, _) => Err(Reason::new(ReasonKind::Internal, "the system has no randomness")),
        };
        match handshake {
            Ok((handshake, tls)) => {
                conn.set_handshake(handshake, tls);
                match address.literal().map(|socket| self.may_dial(vec![socket])) {
                    Some(Ok(sockets)) => conn.connect(&sockets),
                    Some(Err(reason)) => conn.fail(reason),
                    None => self.names.ask(id, address.clone()),
                }
            }
            Err(reason) => conn.fail(reason),
        }
        self.add(conn);
        id
    }

    /// Those of a host's addresses that this agent may speak to. One that asks nobody for a proof would tell whoever
    /// answers there where its memory is, and how to write it.
    fn may_dial(&self, mut addresses: Vec<SocketAddr>) -> Result<Vec<SocketAddr>, Reason> {
        let Some(first) = addresses.first().copied() else { return Ok(addresses) };
        if self.insecure || self.secret.is_some() || self.tls.is_some() {
            return Ok(addresses);
        }
        addresses.retain(|a| a.ip().to_canonical().is_loopback());
        if addresses.is_empty() {
            let text = format!(
                "speaking to {first}, which is not this host's loopback, needs a shared secret or TLS: pass secret=, or \
                 set KVXFER_SECRET_FILE or KVXFER_SECRET, or pass tls=; insecure=True lets whoever answers there read \
                 and write the KV pages"
            );
            return Err(Reason::new(ReasonKind::AuthError, text));
        }
        Ok(addresses)
    }

    fn named(&mut self) {
        for (id, answer) in self.names.answers() {
            let answer = answer.map_err(|why| Reason::new(ReasonKind::PeerLost, why));
            let allowed = answer.and_then(|addresses| self.may_dial(addresses));
            let Some(conn) = self.conns.get_mut(&id) else { continue };
            match allowed {
                Ok(addresses) => conn.connect(&addresses),
                Err(reason) => conn.fail(reason),
            }
            self.touched.push(id);
        }
    }

    /// Answers [`ControlEvent::NeedDescribe`].
    pub(crate) fn supply_describe(&mut self, id: ConnId, describe: Describe, out: &mut Vec<ControlEvent>) {
        if let Some(conn) = self.conns.get_mut(&id) {
            conn.supply_describe(describe, out, &mut self.frames_received);
            self.touched.push(id);
            if conn.established() {
                self.usage.no_stranger(id);
            }
        }
    }

    /// Queues a frame. A frame that cannot be encoded closes the connection: that is a bug, and it is logged.
    pub(crate) fn send(&mut self, id: ConnId, frame: &Frame) {
        if let Some(conn) = self.conns.get_mut(&id) {
            conn.send(frame);
            self.frames_sent += 1;
            self.touched.push(id);
        }
    }

    /// Closes a connection once what was queued is out.
    pub(crate) fn close(&mut self, id: ConnId, reason: Reason) {
        if let Some(conn) = self.conns.get_mut(&id) {
            conn.finish(reason);
            self.touched.push(id);
        }
    }

    /// The local address of a connection, as its peer sees it.
    pub(crate) fn local_address(&self, id: ConnId) -> Option<SocketAddr> {
        self.conns.get(&id)?.local_address()
    }
}
