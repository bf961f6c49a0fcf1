//! What strangers and misbehaving peers may use up, and that everybody else goes on; where an agent may listen.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stdout,
    clippy::cast_possible_truncation,
    clippy::redundant_clone
)]

#[path = "support/certs.rs"]
mod certs;
#[path = "support/raw.rs"]
mod raw;
mod support;

use kvxfer_engine::{Agent, AgentConfig, FabricChoice, Limits, StartError, Stats};
use kvxfer_proto::handshake::{Config, Handshake, Outcome};
use kvxfer_proto::msg::{Entry, Grant, Lookup, Msg, Owed, Purpose, Verify};
use kvxfer_proto::wire::{self, Decoder};
use kvxfer_proto::{Incarnation, Reason, ReasonKind, Room, Seq, SessionNo};
use raw::{Raw, decode_rank, dial, drive, established, lookup, nonce, transfer};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::sync::Arc;
use std::time::{Duration, Instant};
use support::{LIMIT, PAGES, Party, expect, party, push, side};

fn agent(name: &str, tune: impl FnOnce(&mut AgentConfig)) -> Party {
    party(name, side(0, 1), FabricChoice::Shm, true, tune)
}

/// An honest hand-off goes on as ever.
fn works(p: &mut Party, d: &mut Party, room: u64) {
    d.agent.expect(expect(room, &[1], 0, 16, p.agent.address())).unwrap();
    p.agent.push(push(room, &[1], 0, 16)).unwrap();
    d.succeeds(room);
    p.succeeds(room);
}

fn until(p: &Party, what: &str, f: impl Fn(&Stats) -> bool) {
    let end = Instant::now() + LIMIT;
    while !f(&p.agent.stats()) {
        assert!(Instant::now() < end, "never: {what}: {:?}", p.agent.stats());
        std::thread::yield_now();
    }
}

/// The agent closes this connection by itself.
fn is_closed(mut s: TcpStream) {
    s.set_read_timeout(Some(LIMIT)).unwrap();
    match s.read_to_end(&mut Vec::new()) {
        Ok(_) => {}
        Err(e) => assert_eq!(e.kind(), std::io::ErrorKind::ConnectionReset, "{e}"),
    }
}

/// A connection from another address of this host.
fn dial_from(address: &str, from: &str) -> TcpStream {
    use rustix::net::{AddressFamily, SocketType, bind, connect, socket};
    let s = socket(AddressFamily::INET, SocketType::STREAM, None).unwrap();
    bind(&s, &format!("{from}:0").parse::<SocketAddr>().unwrap()).unwrap();
    connect(&s, &address.parse::<SocketAddr>().unwrap()).unwrap();
    TcpStream::from(s)
}

fn friend(p: &Party, me: u64, purpose: Purpose) -> Raw<TcpStream> {
    let (raw, outcome) = Raw::initiate(dial(p.agent.address()), me, purpose, None, None);
    established(outcome);
    raw
}

/// A decode rank like ours that grants and does nothing else.
fn granter(p: &Party, me: u64) -> Raw<TcpStream> {
    transfer(p.agent.address(), me, || decode_rank(format!("granter-{me}"), &side(0, 1))).0
}

fn grant(room: u64, pages: usize) -> Msg {
    Msg::Grant(Grant {
        room: Room::new(room).unwrap(),
        seq: Seq(room),
        tokens: (0, 16),
        owed: Some(Owed { layers: (0, 3), tokens: (0, 16) }),
        pages: vec![Arc::from(vec![1; pages])],
        ranks: 1,
        verify: Verify::Off,
        deadline_us: 600_000_000,
        credits: 0,
    })
}

#[test]
fn strangers_from_one_address_use_up_only_their_own_places() {
    let mut p = agent("prefill", |c| {
        (c.limits.handshakes, c.limits.handshakes_per_address) = (24, 8);
    });
    let mut d = agent("decode", |_| {});
    // One honest stranger that takes its time, and two addresses that flood.
    let mut slow = dial(p.agent.address());
    let floods: Vec<TcpStream> = (0..60)
        .map(|n| dial_from(p.agent.address(), if n % 2 == 0 { "127.0.0.2" } else { "127.0.0.3" }))
        .collect();
    until(&p, "the floods are cut", |s| s.limited_connections >= 60 - 16);
    works(&mut p, &mut d, 1);
    let mut h =
        Handshake::initiator(Config::new(Incarnation(5), nonce(5), None), Purpose::Lookup, SessionNo(1));
    let outcome = drive(&mut h, &mut slow, &mut Decoder::new());
    assert!(matches!(outcome, Some(Outcome::Established(_))), "the slow one was cut for them: {outcome:?}");
    drop(floods);
}

#[test]
fn connections_in_all_and_from_one_address_are_bounded() {
    let mut p = agent("prefill", |c| c.limits.connections_per_address = 12);
    let mut d = agent("decode", |_| {});
    let crowd: Vec<TcpStream> = (0..40).map(|_| dial_from(p.agent.address(), "127.0.0.2")).collect();
    until(&p, "the rest is turned away", |s| s.limited_connections >= 28);
    works(&mut p, &mut d, 1);
    assert!(p.agent.stats().connections <= 12 + 2);
    drop(crowd);
    let q = agent("full", |c| c.limits.connections = 4);
    let crowd: Vec<TcpStream> = (0..10).map(|_| dial(q.agent.address())).collect();
    until(&q, "the rest is turned away", |s| s.limited_connections >= 6 && s.connections <= 4);
    drop(crowd);
}

#[test]
fn one_peer_has_so_many_connections_and_another_its_own() {
    let mut p = agent("prefill", |c| c.limits.connections_per_peer = 3);
    let mut d = agent("decode", |_| {});
    let kept: Vec<_> = (0..3).map(|_| friend(&p, 66, Purpose::Register)).collect();
    let mut more = friend(&p, 66, Purpose::Lookup);
    let _ = more.send(Msg::Lookup(Lookup { engine: String::new() }), 0);
    assert!(more.until_closed().is_empty(), "the fourth is closed unanswered");
    until(&p, "it is counted", |s| s.limited_connections == 1);
    lookup(&mut friend(&p, 67, Purpose::Lookup));
    works(&mut p, &mut d, 1);
    drop(kept);
    // Its places come back.
    until(&p, "they are gone", |s| s.connections <= 2);
    lookup(&mut friend(&p, 66, Purpose::Lookup));
}

#[test]
fn slow_and_silent_connections_are_dropped_in_the_handshake_and_after() {
    let short = Duration::from_millis(250);
    let mut p = agent("prefill", |c| {
        (c.limits.handshake_timeout, c.limits.frame_timeout) = (short, short);
        (c.node.suspect_after, c.node.heartbeat) = (short, short / 4);
    });
    let mut d = agent("decode", |_| {});
    let h = Handshake::initiator(Config::new(Incarnation(5), nonce(5), None), Purpose::Lookup, SessionNo(1))
        .poll_frame()
        .unwrap();
    // In the handshake: silent, and at a byte in 20 ms.
    is_closed(dial(p.agent.address()));
    let drip = |s: &mut TcpStream, bytes: &[u8]| {
        for byte in bytes.iter().cycle() {
            if s.write_all(&[*byte]).is_err() {
                return;
            }
            std::thread::park_timeout(Duration::from_millis(20));
        }
    };
    drip(&mut dial(p.agent.address()), &h[..32]);
    until(&p, "both are counted", |s| s.slow_connections >= 2);
    // After it: who asks nothing, who registers nothing, who begins a frame and drips the rest.
    is_closed(friend(&p, 70, Purpose::Lookup).stream);
    is_closed(friend(&p, 71, Purpose::Register).stream);
    let mut pinging = friend(&p, 76, Purpose::Register);
    for n in 0.. {
        if pinging.send(Msg::Ping(n), 0).is_err() {
            break;
        }
        std::thread::park_timeout(short / 5);
    }
    pinging.until_closed();
    until(&p, "they are counted", |s| s.slow_connections >= 5);
    let mut s = friend(&p, 72, Purpose::Register);
    s.send(Msg::Register(entry(72)), 0).unwrap();
    let long = s.encode(Msg::Register(Entry { name: "x".repeat(2000), ..entry(72) }), 0);
    drip(&mut s.stream, &long);
    until(&p, "the dripping one is counted", |s| s.slow_connections >= 6);
    // A session that says nothing at all.
    is_closed(granter(&p, 73).stream);
    works(&mut p, &mut d, 1);
    // And one that registered and is silent since stays: that is what registered ranks are.
    let mut quiet = friend(&p, 74, Purpose::Register);
    quiet.send(Msg::Register(entry(74)), 0).unwrap();
    std::thread::park_timeout(short * 4);
    let entries = lookup(&mut friend(&p, 75, Purpose::Lookup));
    assert!(entries.entries.iter().any(|e| e.incarnation == Incarnation(74)));
}

fn entry(me: u64) -> Entry {
    let side = side(0, 1);
    Entry {
        name: format!("rank-{me}"),
        engine: "other".to_owned(),
        dp_rank: me as u32,
        incarnation: Incarnation(me),
        groups: side.groups.clone(),
        shard: side.shard,
        address: "127.0.0.1:1".to_owned(),
    }
}

#[test]
fn frames_over_the_limit_close_the_connection_before_and_after_authentication() {
    let mut p = agent("prefill", |c| c.limits.frame_bytes = Limits::LEAST_FRAME_BYTES);
    let mut d = agent("decode", |_| {});
    // Before: 4 KiB, whatever the setting. Refused by the length alone.
    let mut s = dial(p.agent.address());
    s.write_all(&5000u32.to_le_bytes()).unwrap();
    is_closed(s);
    let mut s = granter(&p, 80);
    s.send(grant(1, 16_000), 1).unwrap();
    s.send(Msg::Ping(1), 0).unwrap();
    assert!(std::iter::from_fn(|| s.next()).any(|f| f.msg == Msg::Pong(1)), "64,000 bytes are allowed");
    let above = u32::try_from(Limits::LEAST_FRAME_BYTES).unwrap() + 1;
    s.stream.write_all(&above.to_le_bytes()).unwrap();
    s.until_closed();
    works(&mut p, &mut d, 2);
    // Below the floor an honest grant could be one frame too long, and would be sent again for ever.
    for bytes in [0, 1, Limits::LEAST_FRAME_BYTES - 1] {
        let e = start("127.0.0.1:0", |c| c.limits.frame_bytes = bytes).unwrap_err();
        assert!(matches!(&e, StartError::BadArgument(text) if text.contains("frame_bytes=")), "{e}");
    }
}

#[test]
fn floods_of_requests_end_the_connection_that_they_come_on() {
    let mut p = agent("prefill", |c| (c.limits.requests_per_second, c.limits.registrations) = (5, 4));
    let mut d = agent("decode", |_| {});
    // Pings: a burst of fifty is answered, the next are not.
    let mut s = granter(&p, 90);
    for n in 0..200 {
        if s.send(Msg::Ping(n), 0).is_err() {
            break;
        }
    }
    let pongs = s.until_closed().iter().filter(|f| matches!(f.msg, Msg::Pong(_))).count();
    assert!(pongs <= 60, "{pongs} answers");
    // Look-ups: one question each.
    let mut s = friend(&p, 91, Purpose::Lookup);
    lookup(&mut s);
    let _ = s.send(Msg::Lookup(Lookup { engine: String::new() }), 0);
    assert!(!s.until_closed().iter().any(|f| matches!(f.msg, Msg::Entries(_))));
    // Neither on a connection that is for something else.
    let mut s = friend(&p, 92, Purpose::Register);
    let _ = s.send(Msg::Lookup(Lookup { engine: String::new() }), 0);
    assert!(s.until_closed().is_empty());
    // Registrations: many on one connection are a flood; one each fills the directory, which then takes no more.
    let mut s = friend(&p, 93, Purpose::Register);
    while s.send(Msg::Register(entry(93)), 0).is_ok() {}
    let kept: Vec<_> = (0..4)
        .map(|n| {
            let mut s = friend(&p, 100 + n, Purpose::Register);
            s.send(Msg::Register(entry(100 + n)), 0).unwrap();
            s
        })
        .collect();
    let listed = |n: usize| {
        let end = Instant::now() + LIMIT;
        while lookup(&mut friend(&p, 110, Purpose::Lookup)).entries.len() != n {
            assert!(Instant::now() < end);
        }
    };
    listed(1 + 4);
    let mut s = friend(&p, 105, Purpose::Register);
    s.send(Msg::Register(entry(105)), 0).unwrap();
    s.until_closed();
    listed(1 + 4);
    // Somebody else's incarnation is nobody's to register, and takes nobody's place: neither by it nor by the rank.
    for theirs in [entry(107), entry(100), Entry { incarnation: Incarnation(108), ..entry(101) }] {
        let mut s = friend(&p, 106, Purpose::Register);
        s.send(Msg::Register(theirs), 0).unwrap();
        s.until_closed();
    }
    listed(1 + 4);
    drop(kept);
    listed(1);
    until(&p, "they are counted", |s| s.limited_connections >= 3);
    works(&mut p, &mut d, 1);
}

/// A number names one session: whoever brings it again is refused, and the one that bears it goes on.
#[test]
fn a_second_connection_with_a_sessions_number_does_not_take_its_place() {
    let mut p = agent("prefill", |_| {});
    let mut first = granter(&p, 140);
    first.send(Msg::Ping(1), 0).unwrap();
    assert!(std::iter::from_fn(|| first.next()).any(|f| f.msg == Msg::Pong(1)));
    for _ in 0..8 {
        // Closed, whichever of the two a look by number would find.
        granter(&p, 140).until_closed();
        first.send(Msg::Ping(2), 0).unwrap();
        assert!(std::iter::from_fn(|| first.next()).any(|f| f.msg == Msg::Pong(2)), "the first is still up");
    }
    until(&p, "one session is counted, and no other", |s| s.counters.sessions == 1);
    works(&mut p, &mut agent("decode", |_| {}), 1);
}

/// Closing takes as long as the peer needs to read the rest, within the time of a handshake; it is nobody's fault.
#[test]
fn a_session_that_is_closed_with_much_to_say_is_not_called_slow() {
    let time = Duration::from_secs(3);
    let p = agent("prefill", |c| {
        (c.limits.handshake_timeout, c.limits.requests_per_second) = (time, 1_000_000);
        c.node.suspect_after = Duration::from_secs(60);
    });
    let mut old = granter(&p, 141);
    // Its handshake's deadline has passed long ago.
    std::thread::park_timeout(time + Duration::from_millis(500));
    let count = 300_000u64;
    for n in 0..count / 1000 {
        let ping: Vec<u8> = (0..1000).flat_map(|k| old.encode(Msg::Ping(n * 1000 + k), 0)).collect();
        old.stream.write_all(&ping).unwrap();
    }
    old.send(Msg::Refuse(Reason::new(ReasonKind::PeerLost, "enough")), 0).unwrap();
    // Time in which the agent finds the socket full and the old deadline past.
    std::thread::park_timeout(Duration::from_millis(400));
    let pongs = old.until_closed().iter().filter(|f| matches!(f.msg, Msg::Pong(_))).count() as u64;
    // The last turn's answers come behind the close; all that was queued before it arrives.
    assert!(pongs > count / 2, "cut off after {pongs} of {count}");
    until(&p, "it is gone", |s| s.connections == 0);
    let stats = p.agent.stats();
    assert_eq!((stats.slow_connections, stats.bad_connections), (0, 0), "{stats:?}");
}

#[test]
fn a_peer_that_floods_with_grants_is_refused_and_others_are_served() {
    let mut p = agent("prefill", |c| (c.node.early_grants, c.node.early_grants_per_peer) = (64, 8));
    let mut d = agent("decode", |_| {});
    let mut hostile = granter(&p, 120);
    for n in 0..500u64 {
        hostile.send(grant(1_000_000 + n, 1), n + 1).unwrap();
    }
    until(&p, "the rest is refused", |s| (s.counters.limited, s.gauges.outbound) == (492, 8));
    let refused = std::iter::from_fn(|| hostile.next())
        .filter_map(|f| match f.msg {
            Msg::Drained(m) => Some(m.reason),
            _ => None,
        })
        .take(492);
    assert!(refused.into_iter().all(|r| r.kind == ReasonKind::Unhealthy));
    for room in 1..20 {
        works(&mut p, &mut d, room);
    }
}

#[test]
fn a_peer_that_reads_nothing_is_cut_off() {
    let mut p = agent("prefill", |c| {
        (c.limits.unread_bytes, c.limits.requests_per_second) = (100_000, 1_000_000);
    });
    let mut d = agent("decode", |_| {});
    let mut deaf = granter(&p, 130);
    let ping: Vec<u8> = (0..1000).flat_map(|n| deaf.encode(Msg::Ping(n), 0)).collect();
    // The system's buffers fill first; then the agent's own share does.
    while deaf.stream.write_all(&ping).is_ok() {}
    until(&p, "it is cut off", |s| s.limited_connections == 1);
    works(&mut p, &mut d, 1);
}

fn start(listen: &str, tune: impl FnOnce(&mut AgentConfig)) -> Result<Agent, StartError> {
    let memory = support::Memory::new(&side(0, 1), true);
    let mut c = AgentConfig::new("x", side(0, 1), vec![PAGES], memory.spans.clone());
    (c.fabric, c.listen) = (FabricChoice::Shm, listen.to_owned());
    tune(&mut c);
    Agent::start(c)
}

#[test]
fn an_address_that_others_reach_needs_a_secret_or_tls_or_an_explicit_word() {
    let ca = certs::Authority::new();
    let tls = ca.issue("x", &["x.example"]);
    // 192.0.2.7 belongs to no host: the check comes before the system's.
    for listen in [
        "0.0.0.0:0",
        "[::]:0",
        "192.0.2.7:0",
        "[::ffff:0.0.0.0]:0",
        "[::ffff:192.0.2.7]:0",
        "[2001:db8::7]:0",
    ] {
        let e = start(listen, |_| {}).unwrap_err();
        let StartError::Auth(text) = &e else { panic!("{listen}: {e}") };
        for word in ["secret=", "tls=", "insecure=True", "other hosts"] {
            assert!(text.contains(word), "{text}");
        }
        let given: [&dyn Fn(&mut AgentConfig); 3] =
            [&|c| c.insecure = true, &|c| c.secret = Some(b"s".to_vec()), &|c| c.tls = Some(tls.clone())];
        for tune in given {
            match start(listen, tune) {
                Ok(_) => {}
                // Past the check; the address is not ours, or the host has no IPv6.
                Err(StartError::Listen { .. }) => assert!(listen != "0.0.0.0:0"),
                Err(e) => panic!("{listen}: {e}"),
            }
        }
    }
    for listen in ["127.0.0.1:0", "127.9.9.9:0", "localhost:0"] {
        start(listen, |_| {}).unwrap();
    }
    for listen in ["[::1]:0", "[::ffff:127.0.0.1]:0"] {
        match start(listen, |_| {}) {
            Ok(_) | Err(StartError::Listen { .. }) => {}
            Err(e) => panic!("{listen}: {e}"),
        }
    }
}

/// An address of this host that is not loopback, if it has one: what the system would send from.
fn reachable() -> std::net::IpAddr {
    let from = std::net::UdpSocket::bind("0.0.0.0:0").and_then(|s| {
        s.connect("192.0.2.9:9")?;
        s.local_addr()
    });
    from.map(|a| a.ip()).ok().filter(|ip| !ip.is_loopback()).unwrap_or([192, 0, 2, 9].into())
}

#[test]
fn an_agent_that_checks_nobody_speaks_to_no_other_host() {
    let ip = reachable();
    let name = rustix::system::uname().nodename().to_string_lossy().into_owned();
    // Whoever is there hears nothing: not even a connection comes.
    let listener = std::net::TcpListener::bind((ip, 0)).or_else(|_| std::net::TcpListener::bind("[::]:0"));
    let listener = listener.or_else(|_| std::net::TcpListener::bind("0.0.0.0:0")).unwrap();
    listener.set_nonblocking(true).unwrap();
    let port = listener.local_addr().unwrap().port();
    let d = &mut agent("decode", |_| {});
    let mut sources =
        vec![format!("{ip}:{port}"), format!("[::ffff:{ip}]:{port}"), "[2001:db8::9]:9".to_owned()];
    // A name goes another way: the check is of what it stands for.
    let is_outside = |a: &SocketAddr| !a.ip().to_canonical().is_loopback();
    if std::net::ToSocketAddrs::to_socket_addrs(&(name.as_str(), port))
        .is_ok_and(|mut a| a.all(|a| is_outside(&a)))
    {
        sources.push(format!("{name}:{port}"));
    }
    for (room, source) in (1..).zip(sources) {
        d.agent.expect(expect(room, &[1], 0, 16, &source)).unwrap();
        let reason = d.fails(room);
        assert_eq!(reason.kind, ReasonKind::AuthError, "{source}: {}", reason.text);
        for word in ["secret=", "tls=", "insecure=True"] {
            assert!(reason.text.contains(word), "{source}: {}", reason.text);
        }
    }
    let heard = listener.accept().map(|(_, from)| from);
    assert_eq!(heard.unwrap_err().kind(), std::io::ErrorKind::WouldBlock);
    // A rank that a directory on loopback names is no better.
    let directory = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let at = directory.local_addr().unwrap().to_string();
    let named = Entry { address: format!("{ip}:{port}"), dp_rank: 0, ..entry(77) };
    let served = std::thread::spawn(move || {
        raw::answer_lookup(directory.accept().unwrap().0, None, vec![named]);
    });
    d.agent.expect(expect(50, &[1], 0, 16, &at)).unwrap();
    assert_eq!(d.fails(50).kind, ReasonKind::AuthError);
    served.join().unwrap();
    assert!(listener.accept().is_err());
    // An explicit word lets it through: to an agent, where this host has such an address.
    let Ok(_) = std::net::TcpListener::bind((ip, 0)) else { return };
    let open = |name: &str| {
        agent(name, |c| {
            c.insecure = true;
            if name == "open-prefill" {
                c.listen = SocketAddr::new(ip, 0).to_string();
            }
        })
    };
    works(&mut open("open-prefill"), &mut open("open-decode"), 60);
}

#[test]
fn a_frame_is_as_long_as_it_says() {
    // What the other tests build by hand is what the codec makes.
    let mut out = Vec::new();
    let frame = kvxfer_proto::msg::Frame {
        incarnation: Incarnation(1),
        session: SessionNo(1),
        number: 1,
        msg: grant(1, 16_000),
    };
    wire::encode(&frame, &mut out).unwrap();
    assert!(out.len() > 64_000 && out.len() < Limits::LEAST_FRAME_BYTES, "{}", out.len());
}
