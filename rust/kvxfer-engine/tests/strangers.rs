//! Peers that are not kvxfer, or speak another version: typed errors, and everybody else goes on.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stdout,
    clippy::cast_possible_truncation,
    clippy::redundant_clone
)]

mod support;

use kvxfer_engine::FabricChoice;
use kvxfer_proto::handshake::{Config, Handshake, Outcome};
use kvxfer_proto::msg::{Describe, Frame, Msg, Purpose, Role};
use kvxfer_proto::wire::Decoder;
use kvxfer_proto::{Incarnation, Reason, ReasonKind, SessionNo};
use std::io::{Read, Write};
use std::net::{TcpListener, TcpStream};
use support::{LIMIT, PAGES, Party, expect, party, push, side};

fn decode() -> Party {
    party("decode", side(0, 1), FabricChoice::Shm, true, |_| {})
}

fn prefill() -> Party {
    party("prefill", side(0, 1), FabricChoice::Shm, true, |_| {})
}

/// A hand-off between two good peers still works.
fn assert_well(p: &mut Party, d: &mut Party, room: u64) {
    d.agent.expect(expect(room, &[1], 0, 16, p.agent.address())).unwrap();
    p.agent.push(push(room, &[1], 0, 16)).unwrap();
    d.succeeds(room);
    p.succeeds(room);
}

/// Serves one connection with `f` and then closes it.
fn serve(f: impl FnOnce(TcpStream) + Send + 'static) -> (String, std::thread::JoinHandle<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let thread = std::thread::spawn(move || {
        let (stream, _) = listener.accept().unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        f(stream);
    });
    (address, thread)
}

/// A decode agent that fits.
fn described() -> Describe {
    let side = side(0, 1);
    Describe {
        name: "stranger".to_owned(),
        engine: String::new(),
        dp_rank: 0,
        role: Role::Both,
        mode: "push".to_owned(),
        regions: side.regions(&[PAGES]).unwrap(),
        groups: side.groups,
        shard: side.shard,
        pages: vec![PAGES],
        model: String::new(),
        fabrics: Vec::new(),
        received: 0,
        link_generation: 0,
        staging: (0, 0),
        process: Vec::new(),
    }
}

fn drive(mut h: Handshake, mut stream: &TcpStream) -> Option<Outcome> {
    let mut decoder = Decoder::new();
    let mut buf = [0u8; 4096];
    loop {
        while let Some(bytes) = h.poll_frame() {
            stream.write_all(&bytes).ok()?;
        }
        if h.need_describe().is_some() {
            h.supply_describe(described());
            continue;
        }
        if let Some(outcome) = h.outcome() {
            return Some(outcome.clone());
        }
        match stream.read(&mut buf) {
            Ok(n) if n > 0 => {
                decoder.feed(&buf[..n]);
                h.handle_input(&mut decoder);
            }
            _ => {
                h.handle_eof();
                return h.outcome().cloned();
            }
        }
    }
}

#[test]
fn a_source_that_is_not_kvxfer_fails_the_room_and_no_other() {
    let (address, server) = serve(|mut s| {
        let mut buf = [0u8; 512];
        let _ = s.read(&mut buf);
        let _ = s.write_all(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
    });
    let (mut p, mut d) = (prefill(), decode());
    d.agent.expect(expect(1, &[2], 0, 16, &address)).unwrap();
    let reason = d.fails(1);
    assert_eq!(reason.kind, ReasonKind::ProtocolError, "{}", reason.text);
    assert!(reason.text.contains("not kvxfer"), "{}", reason.text);
    server.join().unwrap();
    assert_well(&mut p, &mut d, 2);
}

#[test]
fn clients_that_are_not_kvxfer_are_dropped_and_counted() {
    let (mut p, mut d) = (prefill(), decode());
    let junk: [&[u8]; 4] = [b"GET / HTTP/1.1\r\n\r\n", &[0xff; 4096], &[0; 64], b"\x16\x03\x01\x02\x00\x01"];
    for bytes in junk {
        let mut s = TcpStream::connect(p.agent.address()).unwrap();
        s.set_read_timeout(Some(LIMIT)).unwrap();
        s.write_all(bytes).unwrap();
        s.shutdown(std::net::Shutdown::Write).unwrap();
        // The agent closes; a reset is as good.
        let mut rest = Vec::new();
        let _ = s.read_to_end(&mut rest);
        assert!(rest.len() < 4096, "a stranger is told next to nothing: {} bytes", rest.len());
    }
    assert_well(&mut p, &mut d, 1);
    while p.agent.stats().bad_connections < junk.len() as u64 {
        std::thread::yield_now();
    }
}

#[test]
fn another_protocol_version_is_refused_by_name_on_both_sides() {
    // As a server.
    let (address, server) = serve(|s| {
        let mut config = Config::new(Incarnation(99), [7; 32], None);
        config.versions = (9, 9);
        let outcome = drive(Handshake::acceptor(config), &s);
        let Some(Outcome::Failed(reason)) = outcome else { panic!("{outcome:?}") };
        assert_eq!(reason.kind, ReasonKind::VersionMismatch, "{}", reason.text);
    });
    let (mut p, mut d) = (prefill(), decode());
    d.agent.expect(expect(1, &[2], 0, 16, &address)).unwrap();
    let reason = d.fails(1);
    assert_eq!(reason.kind, ReasonKind::VersionMismatch, "{}", reason.text);
    assert!(reason.text.contains('9') && reason.text.contains('1'), "{}", reason.text);
    server.join().unwrap();
    // As a client.
    let s = TcpStream::connect(p.agent.address()).unwrap();
    s.set_read_timeout(Some(LIMIT)).unwrap();
    let mut config = Config::new(Incarnation(98), [8; 32], None);
    config.versions = (9, 9);
    let outcome = drive(Handshake::initiator(config, Purpose::Transfer, SessionNo(1)), &s);
    let Some(Outcome::Failed(reason)) = outcome else { panic!("{outcome:?}") };
    assert_eq!(reason.kind, ReasonKind::VersionMismatch, "{}", reason.text);
    assert_well(&mut p, &mut d, 2);
}

#[test]
fn a_replayed_hello_gets_nothing_without_the_secret() {
    let secret = |c: &mut kvxfer_engine::AgentConfig| c.secret = Some(b"sesame".to_vec());
    let mut p = party("prefill", side(0, 1), FabricChoice::Shm, true, secret);
    let mut d = party("decode", side(0, 1), FabricChoice::Shm, true, secret);
    let s = TcpStream::connect(p.agent.address()).unwrap();
    s.set_read_timeout(Some(LIMIT)).unwrap();
    let config = Config::new(Incarnation(5), [1; 32], None);
    let outcome = drive(Handshake::initiator(config, Purpose::Transfer, SessionNo(1)), &s);
    let Some(Outcome::Failed(reason)) = outcome else { panic!("{outcome:?}") };
    assert_eq!(reason.kind, ReasonKind::AuthError, "{}", reason.text);
    assert_well(&mut p, &mut d, 1);
}

/// The peer's part of the handshake was late, and it says so when ours is over: that is no word about rooms, and the
/// next connection is as good as any.
#[test]
fn a_refusal_for_lateness_ends_the_connection_and_nothing_else() {
    let mut p = prefill();
    for session in 1..=3 {
        let mut s = TcpStream::connect(p.agent.address()).unwrap();
        s.set_read_timeout(Some(LIMIT)).unwrap();
        let me = Incarnation(97);
        let config = Config::new(me, [session as u8; 32], None);
        let h = Handshake::initiator(config, Purpose::Transfer, SessionNo(session));
        let outcome = drive(h, &s);
        assert!(matches!(outcome, Some(Outcome::Established(_))), "{outcome:?}");
        let late = Reason::new(ReasonKind::TransferTimeout, "the peer does not answer");
        let frame = Frame { incarnation: me, session: SessionNo(session), number: 0, msg: Msg::Refuse(late) };
        let mut bytes = Vec::new();
        kvxfer_proto::wire::encode(&frame, &mut bytes).unwrap();
        s.write_all(&bytes).unwrap();
        let mut rest = Vec::new();
        assert!(s.read_to_end(&mut rest).is_ok(), "the connection is closed");
    }
    assert_well(&mut p, &mut decode(), 1);
}
