//! One control connection.

use super::ControlEvent;
use super::limits::{Allowance, Limits, Origin};
use super::tls::{Fed, TlsIo};
use kvxfer_proto::handshake::{Handshake, Met, Outcome};
use kvxfer_proto::msg::{Describe, Frame, Msg, Purpose};
use kvxfer_proto::node::{PeerKey, Source};
use kvxfer_proto::wire::{self, Decoded, Decoder};
use kvxfer_proto::{Incarnation, Reason, ReasonKind, Time};
use rustix::event::epoll::EventFlags;
use rustix::fd::{AsFd, BorrowedFd};
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use std::io::{ErrorKind, Read, Write};
use std::net::{Shutdown, SocketAddr, TcpStream};
use std::time::Duration;

/// Names a connection of an agent.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub(crate) struct ConnId(pub(crate) u64);

/// What a connection is for.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) enum ConnKind {
    /// Somebody connected to us.
    Accepted,
    /// We grant to this peer.
    Transfer(PeerKey),
    /// We ask a directory.
    Lookup(Source),
    /// We register with a directory.
    Register,
}

/// Read from one connection in one turn, so that a talkative one cannot starve the rest.
const READ_PER_TURN: usize = 1 << 20;
/// Frames taken from one connection in one turn, for the same reason; one read may pass it.
const FRAMES_PER_TURN: u64 = 1024;
/// How long a stranger that was refused has to read why.
const LINGER: Duration = Duration::from_secs(1);

/// Whose fault the end of a connection was, for the statistics.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Fault {
    /// It was past a limit.
    Limit,
    /// It was silent or slow.
    Slow,
}

#[derive(Debug)]
enum Phase {
    Handshake(Box<Handshake>),
    Ready(Met),
    /// The peers do not fit; `RoomFailed` only.
    Refused(Met),
}

/// A connection and what is under way on it.
#[derive(Debug)]
pub(super) struct Conn {
    pub(super) id: ConnId,
    pub(super) kind: ConnKind,
    stream: Option<TcpStream>,
    /// Addresses still to be tried.
    candidates: Vec<SocketAddr>,
    connecting: bool,
    tls: Option<Box<TlsIo>>,
    limits: Limits,
    /// Whose share of the connections it takes.
    pub(super) origin: Option<Origin>,
    pub(super) counted: Option<Incarnation>,
    allowance: Option<Allowance>,
    phase: Option<Phase>,
    described: bool,
    /// It said what it came for.
    heard: bool,
    decoder: Decoder,
    out: Vec<u8>,
    written: usize,
    deadline: Time,
    /// By when the frame that has begun must be whole.
    partial: Option<Time>,
    /// Refused, and told so: only its end is awaited, since closing with bytes unread would take the word back.
    lingering: bool,
    pub(super) fault: Option<Fault>,
    /// What epoll knows of this stream, if it knows it.
    registered: Option<EventFlags>,
    /// Close once everything is written.
    finishing: Option<Reason>,
    failed: Option<Reason>,
}

impl Conn {
    pub(super) fn accepted(
        id: ConnId,
        stream: TcpStream,
        h: Handshake,
        tls: Option<TlsIo>,
        limits: Limits,
        deadline: Time,
    ) -> std::io::Result<Self> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        keep_alive(&stream)?;
        let mut conn = Self::dialled(id, ConnKind::Accepted, limits, deadline);
        conn.tls = tls.map(Box::new);
        conn.stream = Some(stream);
        conn.phase = Some(Phase::Handshake(Box::new(h)));
        Ok(conn)
    }

    pub(super) fn dialled(id: ConnId, kind: ConnKind, limits: Limits, deadline: Time) -> Self {
        Self {
            id,
            kind,
            stream: None,
            candidates: Vec::new(),
            connecting: false,
            tls: None,
            limits,
            origin: None,
            counted: None,
            allowance: None,
            phase: None,
            described: false,
            heard: false,
            decoder: Decoder::new(),
            out: Vec::new(),
            written: 0,
            deadline,
            partial: None,
            lingering: false,
            fault: None,
            registered: None,
            finishing: None,
            failed: None,
        }
    }

    pub(super) fn set_handshake(&mut self, h: Handshake, tls: Option<TlsIo>) {
        self.tls = tls.map(Box::new);
        self.phase = Some(Phase::Handshake(Box::new(h)));
        self.take_handshake_frames();
    }

    /// Starts to connect to the first of these addresses that lets us begin.
    pub(super) fn connect(&mut self, addresses: &[SocketAddr]) {
        self.candidates = addresses.iter().rev().copied().collect();
        self.connect_next("the host has no address");
    }

    fn connect_next(&mut self, last: &str) {
        let mut why = last.to_owned();
        while let Some(address) = self.candidates.pop() {
            match begin_connect(address) {
                Ok(stream) => {
                    self.stream = Some(stream);
                    self.connecting = true;
                    self.registered = None;
                    return;
                }
                Err(e) => why = format!("cannot connect to {address}: {e}"),
            }
        }
        self.fail(Reason::new(ReasonKind::PeerLost, why));
    }

    pub(super) fn fail(&mut self, reason: Reason) {
        self.failed.get_or_insert(reason);
    }

    /// Ends a connection that is past a limit.
    pub(super) fn limit(&mut self, reason: Reason) {
        self.fault = Some(Fault::Limit);
        self.fail(reason);
    }

    /// The same for one that has just passed its handshake, whose last word is still to go out.
    pub(super) fn turn_away(&mut self, reason: Reason) {
        self.fault = Some(Fault::Limit);
        self.finish(reason);
    }

    pub(super) fn finish(&mut self, reason: Reason) {
        if self.finishing.is_none() {
            // The peer has time to take what is left to say, however long ago its handshake was.
            self.deadline = crate::clock::now().after(self.limits.handshake_timeout);
            self.finishing = Some(reason);
        }
    }

    /// The time is up: a handshake ends and the peer is told; a peer that does not take what was left to say is cut off.
    pub(super) fn time_is_up(&mut self, now: Time) {
        if self.lingering {
            self.fail(Reason::new(ReasonKind::PeerLost, "the peer was refused"));
            return;
        }
        // Whatever it is ended for from here on.
        self.fault.get_or_insert(Fault::Slow);
        if self.established() && self.partial.is_some_and(|at| at <= now) {
            let text = "a frame of the peer was not whole in time";
            self.fail(Reason::new(ReasonKind::PeerLost, text));
            return;
        }
        let reason = Reason::new(ReasonKind::TransferTimeout, "the peer does not answer");
        if self.finishing.is_some() {
            self.fail(reason);
        } else {
            self.abort(reason);
        }
    }

    fn abort(&mut self, reason: Reason) {
        if let Some(Phase::Handshake(h)) = &mut self.phase {
            h.abort(reason.clone());
            self.take_handshake_frames();
        }
        self.finish(reason);
        if self.connecting || self.stream.is_none() {
            let reason =
                self.finishing.clone().unwrap_or_else(|| Reason::new(ReasonKind::PeerLost, "closed"));
            self.fail(reason);
        }
    }

    pub(super) fn deadline(&self) -> Option<Time> {
        // A look-up is one question and one answer, and who comes to register says so.
        let stays = match &self.phase {
            Some(Phase::Ready(met)) => match met.purpose {
                Purpose::Transfer => true,
                Purpose::Lookup => false,
                Purpose::Register => self.kind != ConnKind::Accepted || self.heard,
            },
            _ => false,
        };
        let end = (!stays || self.finishing.is_some()).then_some(self.deadline);
        end.into_iter().chain(self.partial.filter(|_| stays)).min()
    }

    pub(super) fn established(&self) -> bool {
        matches!(self.phase, Some(Phase::Ready(_)))
    }

    /// Whether what comes next may cost signatures.
    pub(super) fn is_in_tls_handshake(&self) -> bool {
        self.tls.is_some() && matches!(self.phase, Some(Phase::Handshake(_)))
    }

    /// Why the connection is over, if it is.
    pub(super) fn over(&self) -> Option<Reason> {
        if let Some(reason) = &self.failed {
            // A connection that breaks while it is being ended was ended for the first reason.
            return Some(self.finishing.as_ref().unwrap_or(reason).clone());
        }
        self.finishing.clone().filter(|_| self.is_flushed() && !self.connecting && !self.lingering)
    }

    /// Whether everything that can still be said is with the system.
    fn is_flushed(&self) -> bool {
        match &self.tls {
            None => self.written == self.out.len(),
            Some(tls) => !tls.wants_write() && (self.written == self.out.len() || !tls.is_up()),
        }
    }

    pub(super) fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.stream.as_ref().map(AsFd::as_fd)
    }

    pub(super) fn local_address(&self) -> Option<SocketAddr> {
        self.stream.as_ref()?.local_addr().ok()
    }

    pub(super) fn interest(&self) -> EventFlags {
        if self.connecting || !self.is_flushed() { EventFlags::IN | EventFlags::OUT } else { EventFlags::IN }
    }

    /// New interest, if it differs from what is registered, and whether nothing is.
    pub(super) fn interest_changed(&mut self) -> Option<(EventFlags, bool)> {
        let want = self.interest();
        if self.stream.is_none() || Some(want) == self.registered {
            return None;
        }
        let new = self.registered.replace(want).is_none();
        Some((want, new))
    }

    /// The descriptor is ready for something.
    ///
    /// `buf` is for bytes on their way in: to make one here would cost more than all else that a short frame takes.
    pub(super) fn io(
        &mut self,
        flags: EventFlags,
        out: &mut Vec<ControlEvent>,
        received: &mut u64,
        buf: &mut [u8],
    ) {
        if self.connecting && !self.connected(flags) {
            return;
        }
        if flags.intersects(EventFlags::IN | EventFlags::HUP | EventFlags::ERR) {
            self.read(out, received, buf);
        }
    }

    fn connected(&mut self, flags: EventFlags) -> bool {
        if !flags.intersects(EventFlags::OUT | EventFlags::HUP | EventFlags::ERR) {
            return false;
        }
        let Some(stream) = &self.stream else { return false };
        match stream.take_error() {
            Ok(None) => {
                self.connecting = false;
                let _ = stream.set_nodelay(true);
                let _ = keep_alive(stream);
                true
            }
            Ok(Some(e)) | Err(e) => {
                let text = match stream.peer_addr() {
                    Ok(a) => format!("cannot connect to {a}: {e}"),
                    Err(_) => format!("cannot connect: {e}"),
                };
                self.stream = None;
                self.connecting = false;
                self.connect_next(&text);
                false
            }
        }
    }

    fn read(&mut self, out: &mut Vec<ControlEvent>, received: &mut u64, buf: &mut [u8]) {
        let mut total = 0;
        let enough = received.saturating_add(FRAMES_PER_TURN);
        while total < READ_PER_TURN && *received < enough && self.failed.is_none() {
            let Some(stream) = &mut self.stream else { return };
            match stream.read(buf) {
                Ok(0) => {
                    self.take_input(out, received);
                    return self.ended(out);
                }
                Ok(n) => {
                    total += n;
                    self.arrived(&buf[..n], out, received);
                    if n < buf.len() {
                        return;
                    }
                }
                Err(e) if e.kind() == ErrorKind::WouldBlock => return,
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => {
                    let text = format!("the connection broke: {e}");
                    if let Some(Phase::Handshake(h)) = &mut self.phase {
                        h.abort(Reason::new(ReasonKind::PeerLost, text.clone()));
                        self.handshake_over(out);
                    }
                    self.fail(Reason::new(ReasonKind::PeerLost, text));
                    return;
                }
            }
        }
    }

    /// The peer has closed its end, and all that it said was taken.
    fn ended(&mut self, out: &mut Vec<ControlEvent>) {
        if let Some(Phase::Handshake(h)) = &mut self.phase {
            h.handle_eof();
            self.handshake_over(out);
        }
        // It may still read: a peer that is refused, and has said all it wanted, is to learn why.
        self.write();
        let cut = self.tls.as_mut().is_some_and(|tls| tls.was_cut_off());
        let text = if cut { "the TLS stream was cut off" } else { "the peer closed the connection" };
        self.fail(Reason::new(ReasonKind::PeerLost, text));
    }

    /// Bytes came from the socket.
    fn arrived(&mut self, bytes: &[u8], out: &mut Vec<ControlEvent>, received: &mut u64) {
        if self.lingering {
            return;
        }
        let before = *received;
        match &mut self.tls {
            None => self.decoder.feed(bytes),
            Some(tls) => match tls.feed(bytes, &mut self.decoder) {
                Fed::Taken => {}
                Fed::Up(binding) => {
                    if let Some(Phase::Handshake(h)) = &mut self.phase {
                        h.bind(binding);
                    }
                }
                Fed::Plain => return self.peer_is_plain(out),
                Fed::Broken(reason) => return self.tls_broke(reason),
            },
        }
        self.take_input(out, received);
        self.note_partial(before != *received);
        // Its end within TLS is its end: the socket's may never come.
        if self.tls.as_ref().is_some_and(|tls| tls.has_ended()) {
            self.ended(out);
        }
    }

    /// The peer does not speak TLS. One that is kvxfer is told so in its own way, and nothing else.
    fn peer_is_plain(&mut self, out: &mut Vec<ControlEvent>) {
        let head = self.tls.take().map(|tls| tls.head().to_vec()).unwrap_or_default();
        let dialled = self.kind != ConnKind::Accepted;
        self.out.clear();
        self.written = 0;
        if let Some(Phase::Handshake(h)) = &mut self.phase {
            let text = h.tls_differs(true);
            // What answers a connection of ours may be anything; what it said helps to find out.
            let shown = head.get(..16).unwrap_or(&head).escape_ascii();
            let text = if dialled { format!("{text} (its first bytes are \"{shown}\")") } else { text };
            h.abort(Reason::new(ReasonKind::AuthError, text));
        }
        self.handshake_over(out);
        if dialled {
            self.out.clear();
        }
    }

    /// TLS ended the connection. Its alert goes out, nothing else does.
    fn tls_broke(&mut self, reason: Reason) {
        self.out.clear();
        self.written = 0;
        if let Some(Phase::Handshake(_)) = self.phase {
            tracing::warn!(%reason, "a TLS handshake failed");
            self.phase = None;
        }
        self.finish(reason);
    }

    /// A frame that has begun must be whole in time, or a peer could hold memory for ever at a byte a second.
    fn note_partial(&mut self, whole_ones: bool) {
        if self.decoder.pending().is_empty() {
            self.partial = None;
        } else if whole_ones || self.partial.is_none() {
            let head = self.decoder.pending().first_chunk::<4>().copied().unwrap_or_default();
            let announced = u64::from(u32::from_le_bytes(head)) >> 20;
            let limit = self.limits.frame_timeout.saturating_add(Duration::from_secs(announced));
            self.partial = Some(crate::clock::now().after(limit));
        }
    }

    fn take_input(&mut self, out: &mut Vec<ControlEvent>, received: &mut u64) {
        if let Some(Phase::Handshake(h)) = &mut self.phase {
            h.handle_input(&mut self.decoder);
            let need = h.need_describe().copied();
            self.take_handshake_frames();
            if let Some(met) = need
                && !std::mem::replace(&mut self.described, true)
            {
                out.push(ControlEvent::NeedDescribe(self.id, self.kind.clone(), met));
            }
            self.handshake_over(out);
        }
        self.take_frames(out, received);
    }

    fn take_handshake_frames(&mut self) {
        if let Some(Phase::Handshake(h)) = &mut self.phase {
            while let Some(bytes) = h.poll_frame() {
                self.out.extend_from_slice(&bytes);
            }
        }
    }

    fn handshake_over(&mut self, out: &mut Vec<ControlEvent>) {
        self.take_handshake_frames();
        let Some(Phase::Handshake(h)) = &self.phase else { return };
        match h.outcome().cloned() {
            None => {}
            Some(Outcome::Established(e)) => {
                self.decoder.set_cap(self.limits.frame_bytes);
                self.phase = Some(Phase::Ready(e.met));
                out.push(ControlEvent::Established(self.id, self.kind.clone(), e));
            }
            Some(Outcome::Refused { reason, met }) => {
                self.phase = Some(Phase::Refused(met));
                out.push(ControlEvent::Refused(self.id, self.kind.clone(), met, reason));
            }
            Some(Outcome::Failed(reason)) => {
                if reason.kind == ReasonKind::AuthError {
                    tracing::warn!(%reason, "a handshake failed");
                }
                self.finish(reason);
                self.phase = None;
            }
        }
    }

    fn take_frames(&mut self, out: &mut Vec<ControlEvent>, received: &mut u64) {
        let (met, refused) = match &self.phase {
            Some(Phase::Ready(met)) => (*met, false),
            Some(Phase::Refused(met)) => (*met, true),
            _ => return,
        };
        while self.failed.is_none() {
            match self.decoder.next_frame() {
                Ok(None) => return,
                Ok(Some(decoded)) => {
                    *received += 1;
                    let frame = match decoded {
                        Decoded::Frame(frame) => frame,
                        // A kind of a newer peer says nothing to us, but it has a place in the order of the link.
                        Decoded::Unknown(h) => Frame {
                            incarnation: h.incarnation,
                            session: h.session,
                            number: h.number,
                            msg: Msg::Pong(0),
                        },
                    };
                    // Not by any frame: one that only pings would stay for ever.
                    self.heard |= matches!(frame.msg, Msg::Register(_));
                    if let Err(reason) = met.check(&frame) {
                        self.fail(reason);
                    } else if !self.may_ask(&frame.msg) {
                        let text = format!(
                            "more than {} requests a second ({}): the peer floods this agent",
                            self.limits.requests_per_second,
                            frame.msg.name()
                        );
                        self.limit(Reason::new(ReasonKind::ProtocolError, text));
                    } else if !refused || matches!(frame.msg, Msg::RoomFailed(_)) {
                        out.push(ControlEvent::Frame(self.id, self.kind.clone(), frame));
                    }
                }
                Err(e) => self.fail(Reason::new(ReasonKind::ProtocolError, e.to_string())),
            }
        }
    }

    /// Whether the peer keeps within the limit on what costs us an answer or more.
    fn may_ask(&mut self, msg: &Msg) -> bool {
        if !matches!(
            msg,
            Msg::Ping(_)
                | Msg::Lookup(_)
                | Msg::Register(_)
                | Msg::Entries(_)
                | Msg::Attach(_)
                | Msg::Attached(_)
                | Msg::Refuse(_)
        ) {
            return true;
        }
        let (now, rate) = (crate::clock::now().0, self.limits.requests_per_second);
        self.allowance.get_or_insert_with(|| Allowance::new(now, rate)).take(now, rate)
    }

    pub(super) fn supply_describe(
        &mut self,
        describe: Describe,
        out: &mut Vec<ControlEvent>,
        received: &mut u64,
    ) {
        if self.failed.is_some() {
            // It was given up between the question and the answer: no session comes of it.
            return;
        }
        if let Some(Phase::Handshake(h)) = &mut self.phase {
            h.supply_describe(describe);
            self.handshake_over(out);
            self.take_input(out, received);
            self.note_partial(true);
        }
    }

    pub(super) fn send(&mut self, frame: &Frame) {
        if self.finishing.is_some() || self.failed.is_some() {
            // Nothing follows the last word: over TLS it would be sealed behind our own end.
        } else if self.out.len() - self.written > self.limits.unread_bytes {
            let text = format!(
                "the peer has left {} bytes of control messages unread",
                self.out.len() - self.written
            );
            self.limit(Reason::new(ReasonKind::PeerLost, text));
        } else if let Err(e) = wire::encode(frame, &mut self.out) {
            tracing::error!(error = %e, "a control frame could not be encoded");
            self.fail(Reason::new(ReasonKind::Internal, e.to_string()));
        }
    }

    pub(super) fn write(&mut self) {
        if self.connecting || self.failed.is_some() {
            return;
        }
        if self.tls.is_some() {
            self.write_sealed();
        } else {
            self.write_plain();
        }
        if self.failed.is_some() {
            return;
        }
        if self.written == self.out.len() {
            self.out.clear();
            self.written = 0;
            self.out.shrink_to(1 << 20);
        } else if self.written > 1 << 20 && self.written >= self.out.len() - self.written {
            // Moving only once half is out makes each byte move at most once on average, and the buffer at most twice as
            // large as what waits.
            self.out.drain(..self.written);
            self.written = 0;
        }
        if self.finishing.is_some()
            && self.phase.is_none()
            && self.kind == ConnKind::Accepted
            && self.is_flushed()
        {
            self.linger();
        }
    }

    /// A stranger has been told why it is refused: it is to read that before the connection goes.
    fn linger(&mut self) {
        if let Some(stream) = self.stream.as_ref().filter(|_| !self.lingering) {
            let _ = stream.shutdown(Shutdown::Write);
            self.lingering = true;
            self.deadline = crate::clock::now().after(LINGER.min(self.limits.handshake_timeout));
        }
    }

    fn write_sealed(&mut self) {
        loop {
            let (Some(stream), Some(tls)) = (&mut self.stream, &mut self.tls) else { return };
            self.written += tls.seal(&self.out[self.written..]);
            if self.finishing.is_some() && self.written == self.out.len() {
                tls.close();
            }
            if !tls.wants_write() {
                return;
            }
            match tls.write(stream) {
                Ok(n) if n > 0 => {}
                Ok(_) => return,
                Err(e) if e.kind() == ErrorKind::WouldBlock => return,
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => {
                    self.fail(Reason::new(ReasonKind::PeerLost, format!("the connection broke: {e}")));
                    return;
                }
            }
        }
    }

    fn write_plain(&mut self) {
        while self.written < self.out.len() {
            let Some(stream) = &mut self.stream else { return };
            match stream.write(&self.out[self.written..]) {
                Ok(n) if n > 0 => self.written += n,
                Ok(_) => return,
                Err(e) if e.kind() == ErrorKind::WouldBlock => break,
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => {
                    self.fail(Reason::new(ReasonKind::PeerLost, format!("the connection broke: {e}")));
                    return;
                }
            }
        }
    }
}

/// A peer whose host has gone away says nothing more: the system asks it, so that registrations and look-ups end too.
fn keep_alive(stream: &TcpStream) -> std::io::Result<()> {
    use rustix::net::sockopt;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, Duration::from_secs(5))?;
    sockopt::set_tcp_keepintvl(stream, Duration::from_secs(2))?;
    sockopt::set_tcp_keepcnt(stream, 3)?;
    Ok(sockopt::set_tcp_user_timeout(stream, 15_000)?)
}

fn begin_connect(address: SocketAddr) -> rustix::io::Result<TcpStream> {
    let family = if address.is_ipv4() { AddressFamily::INET } else { AddressFamily::INET6 };
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = rustix::net::socket_with(family, SocketType::STREAM, flags, None)?;
    match rustix::net::connect(&socket, &address) {
        Ok(()) | Err(rustix::io::Errno::INPROGRESS) => Ok(TcpStream::from(socket)),
        Err(e) => Err(e),
    }
}
