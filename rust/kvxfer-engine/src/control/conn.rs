//! One control connection.

use super::ControlEvent;
use kvxfer_proto::handshake::{Handshake, Met, Outcome};
use kvxfer_proto::msg::{Describe, Frame, Msg, Purpose};
use kvxfer_proto::node::{PeerKey, Source};
use kvxfer_proto::wire::{self, Decoded, Decoder, MAX_FRAME_BYTES};
use kvxfer_proto::{Reason, ReasonKind, Time};
use rustix::event::epoll::EventFlags;
use rustix::fd::{AsFd, BorrowedFd};
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use std::io::{ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};

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
/// Bytes that may wait to be written before the peer counts as gone.
const WRITE_LIMIT: usize = 256 << 20;

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
    phase: Option<Phase>,
    described: bool,
    decoder: Decoder,
    out: Vec<u8>,
    written: usize,
    deadline: Time,
    /// The time was up once already.
    last_call: bool,
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
        deadline: Time,
    ) -> std::io::Result<Self> {
        stream.set_nonblocking(true)?;
        stream.set_nodelay(true)?;
        keep_alive(&stream)?;
        let mut conn = Self::dialled(id, ConnKind::Accepted, deadline);
        conn.stream = Some(stream);
        conn.phase = Some(Phase::Handshake(Box::new(h)));
        Ok(conn)
    }

    pub(super) fn dialled(id: ConnId, kind: ConnKind, deadline: Time) -> Self {
        Self {
            id,
            kind,
            stream: None,
            candidates: Vec::new(),
            connecting: false,
            phase: None,
            described: false,
            decoder: Decoder::new(),
            out: Vec::new(),
            written: 0,
            deadline,
            last_call: false,
            registered: None,
            finishing: None,
            failed: None,
        }
    }

    pub(super) fn set_handshake(&mut self, h: Handshake) {
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

    pub(super) fn finish(&mut self, reason: Reason) {
        self.finishing.get_or_insert(reason);
    }

    /// The time is up: a handshake ends and the peer is told; a peer that does not take what was left to say is cut off.
    pub(super) fn time_is_up(&mut self, next: Time) {
        let reason = Reason::new(ReasonKind::TransferTimeout, "the peer does not answer");
        let last = std::mem::replace(&mut self.last_call, true);
        self.deadline = next;
        if last {
            self.fail(reason);
        } else if self.finishing.is_none() {
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
        // A look-up is one question and one answer.
        let stays = matches!(&self.phase, Some(Phase::Ready(met)) if met.purpose != Purpose::Lookup);
        (!stays || self.finishing.is_some()).then_some(self.deadline)
    }

    pub(super) fn established(&self) -> bool {
        matches!(self.phase, Some(Phase::Ready(_)))
    }

    /// Why the connection is over, if it is.
    pub(super) fn over(&self) -> Option<Reason> {
        if let Some(reason) = &self.failed {
            // A connection that breaks while it is being ended was ended for the first reason.
            return Some(self.finishing.as_ref().unwrap_or(reason).clone());
        }
        self.finishing.clone().filter(|_| self.written == self.out.len() && !self.connecting)
    }

    pub(super) fn fd(&self) -> Option<BorrowedFd<'_>> {
        self.stream.as_ref().map(AsFd::as_fd)
    }

    pub(super) fn local_address(&self) -> Option<SocketAddr> {
        self.stream.as_ref()?.local_addr().ok()
    }

    pub(super) fn interest(&self) -> EventFlags {
        if self.connecting || self.written < self.out.len() {
            EventFlags::IN | EventFlags::OUT
        } else {
            EventFlags::IN
        }
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
    pub(super) fn io(&mut self, flags: EventFlags, out: &mut Vec<ControlEvent>, received: &mut u64) {
        if self.connecting && !self.connected(flags) {
            return;
        }
        if flags.intersects(EventFlags::IN | EventFlags::HUP | EventFlags::ERR) {
            self.read(out, received);
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

    fn read(&mut self, out: &mut Vec<ControlEvent>, received: &mut u64) {
        let mut buf = [0u8; 64 << 10];
        let mut total = 0;
        while total < READ_PER_TURN && self.failed.is_none() {
            let Some(stream) = &mut self.stream else { return };
            match stream.read(&mut buf) {
                Ok(0) => {
                    self.take_input(out, received);
                    if let Some(Phase::Handshake(h)) = &mut self.phase {
                        h.handle_eof();
                        self.handshake_over(out);
                    }
                    self.fail(Reason::new(ReasonKind::PeerLost, "the peer closed the connection"));
                    return;
                }
                Ok(n) => {
                    total += n;
                    self.decoder.feed(&buf[..n]);
                    self.take_input(out, received);
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
                self.decoder.set_cap(MAX_FRAME_BYTES);
                self.phase = Some(Phase::Ready(e.met));
                out.push(ControlEvent::Established(self.id, self.kind.clone(), e));
            }
            Some(Outcome::Refused { reason, met }) => {
                self.phase = Some(Phase::Refused(met));
                out.push(ControlEvent::Refused(self.id, self.kind.clone(), met, reason));
            }
            Some(Outcome::Failed(reason)) => {
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
                    if let Err(reason) = met.check(&frame) {
                        self.fail(reason);
                    } else if !refused || matches!(frame.msg, Msg::RoomFailed(_)) {
                        out.push(ControlEvent::Frame(self.id, self.kind.clone(), frame));
                    }
                }
                Err(e) => self.fail(Reason::new(ReasonKind::ProtocolError, e.to_string())),
            }
        }
    }

    pub(super) fn supply_describe(
        &mut self,
        describe: Describe,
        out: &mut Vec<ControlEvent>,
        received: &mut u64,
    ) {
        if let Some(Phase::Handshake(h)) = &mut self.phase {
            h.supply_describe(describe);
            self.handshake_over(out);
            self.take_input(out, received);
        }
    }

    pub(super) fn send(&mut self, frame: &Frame) {
        if self.out.len() - self.written > WRITE_LIMIT {
            let text = format!(
                "the peer has left {} bytes of control messages unread",
                self.out.len() - self.written
            );
            self.fail(Reason::new(ReasonKind::PeerLost, text));
        } else if let Err(e) = wire::encode(frame, &mut self.out) {
            tracing::error!(error = %e, "a control frame could not be encoded");
            self.fail(Reason::new(ReasonKind::Internal, e.to_string()));
        }
    }

    pub(super) fn write(&mut self) {
        if self.connecting || self.failed.is_some() {
            return;
        }
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
        if self.written == self.out.len() {
            self.out.clear();
            self.written = 0;
            self.out.shrink_to(1 << 20);
        } else if self.written > 1 << 20 {
            self.out.drain(..self.written);
            self.written = 0;
        }
    }
}

/// A peer whose host has gone away says nothing more: the system asks it, so that registrations and look-ups end too.
fn keep_alive(stream: &TcpStream) -> std::io::Result<()> {
    use rustix::net::sockopt;
    sockopt::set_socket_keepalive(stream, true)?;
    sockopt::set_tcp_keepidle(stream, std::time::Duration::from_secs(5))?;
    sockopt::set_tcp_keepintvl(stream, std::time::Duration::from_secs(2))?;
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
