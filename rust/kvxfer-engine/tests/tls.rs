//! Mutual TLS on the control channel: who passes, who does not and what both sides are told, and that nothing hangs.

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

use certs::{Authority, HERE};
use kvxfer_engine::{Agent, AgentConfig, FabricChoice, StartError, TlsConfig};
use kvxfer_proto::handshake::Outcome;
use kvxfer_proto::msg::Purpose;
use kvxfer_proto::{Reason, ReasonKind};
use raw::{Proxy, Raw, Tamper, answer_lookup, dial, established, lookup};
use std::io::{Read, Write};
use std::net::TcpListener;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Instant;
use support::{LIMIT, Party, expect, party, push, side};

fn agent(name: &str, tls: Option<TlsConfig>) -> Party {
    party(name, side(0, 1), FabricChoice::Shm, true, |c| c.tls = tls)
}

fn works(p: &mut Party, d: &mut Party, rooms: std::ops::Range<u64>, source: &str) {
    p.memory.fill(|i| (i % 241) as u8);
    for room in rooms {
        d.agent.expect(expect(room, &[9, 1], 0, 32, source)).unwrap();
        p.agent.push(push(room, &[5, 17], 0, 32)).unwrap();
        d.succeeds(room);
        p.succeeds(room);
        for region in 0..6 {
            assert!(p.memory.page(region, 5) == d.memory.page(region, 9));
            assert!(p.memory.page(region, 17) == d.memory.page(region, 1));
        }
    }
}

/// Decode's room fails with an `AuthError`, and prefill counts one too.
fn refused(p: &Party, d: &mut Party) -> Reason {
    d.agent.expect(expect(1, &[1], 0, 16, p.agent.address())).unwrap();
    let reason = d.fails(1);
    assert_eq!(reason.kind, ReasonKind::AuthError, "{}", reason.text);
    let until = Instant::now() + LIMIT;
    while p.agent.stats().auth_failures == 0 {
        assert!(Instant::now() < until, "prefill says nothing: {:?}", p.agent.stats());
        std::thread::yield_now();
    }
    reason
}

#[test]
fn hand_offs_go_over_tls_with_and_without_a_secret_and_over_each_fabric() {
    let ca = Authority::new();
    for secret in [None, Some(b"sesame".to_vec())] {
        let make = |name: &str| {
            party(name, side(0, 1), FabricChoice::Shm, true, |c| {
                c.tls = Some(ca.issue(name, &[HERE]));
                c.secret.clone_from(&secret);
            })
        };
        let (mut p, mut d) = (make("prefill"), make("decode"));
        let address = p.agent.address().to_owned();
        works(&mut p, &mut d, 1..20, &address);
        assert_eq!(p.agent.stats().auth_failures, 0);
    }
    if let Err(e) = kvxfer_fabric::ucx::probe(&kvxfer_fabric::ucx::UcxOptions::default()) {
        assert!(std::env::var_os("KVXFER_REQUIRE_UCX").is_none(), "UCX is required: {e}");
        println!("without UCX: {e}");
        return;
    }
    let make = |name: &str| {
        party(name, side(0, 1), FabricChoice::Ucx, false, |c| {
            c.tls = Some(ca.issue(name, &[HERE]));
            c.ucx_tls = Some("tcp,self".to_owned());
        })
    };
    let (mut p, mut d) = (make("ucx-prefill"), make("ucx-decode"));
    let address = p.agent.address().to_owned();
    works(&mut p, &mut d, 1..10, &address);
}

#[test]
fn ranks_register_over_tls_and_a_common_name_may_stand_for_addresses() {
    let ca = Authority::new();
    let tls = |file: &str| TlsConfig {
        name: Some("kvxfer.internal".to_owned()),
        ..ca.issue(file, &["kvxfer.internal"])
    };
    let mut first = party("p0", side(0, 2), FabricChoice::Shm, true, |c| {
        (c.engine, c.tls) = ("p".to_owned(), Some(tls("p0")));
    });
    let at = first.agent.address().to_owned();
    let mut second = party("p1", side(1, 2), FabricChoice::Shm, true, |c| {
        (c.engine, c.tls, c.directory) = ("p".to_owned(), Some(tls("p1")), Some(at.clone()));
    });
    let mut d = agent("decode", Some(tls("d")));
    d.agent.expect(expect(1, &[1], 0, 16, &at)).unwrap();
    for p in [&mut first, &mut second] {
        p.agent.push(push(1, &[2], 0, 16)).unwrap();
    }
    d.succeeds(1);
    first.succeeds(1);
    second.succeeds(1);
}

#[test]
fn a_certificate_of_another_authority_is_refused_on_both_sides() {
    let (ours, theirs) = (Authority::new(), Authority::new());
    let p = agent("prefill", Some(ours.issue("p", &[HERE])));
    // Neither trusts the other.
    let reason = refused(&p, &mut agent("decode", Some(theirs.issue("d", &[HERE]))));
    assert!(reason.text.contains("`ca`"), "{}", reason.text);
    // Decode trusts prefill, and not the other way round.
    let p = agent("prefill", Some(ours.issue("p", &[HERE])));
    let tls = TlsConfig { ca: ours.ca(), ..theirs.issue("d", &[HERE]) };
    let reason = refused(&p, &mut agent("decode", Some(tls)));
    assert!(reason.text.contains("`ca`") && reason.text.contains("acceptor"), "{}", reason.text);
}

#[test]
fn an_expired_certificate_is_refused_on_both_sides() {
    let ca = Authority::new();
    let p = agent("prefill", Some(ca.expired("p", &[HERE])));
    let reason = refused(&p, &mut agent("decode", Some(ca.issue("d", &[HERE]))));
    assert!(reason.text.contains("`cert`") && reason.text.contains("expired"), "{}", reason.text);
    let p = agent("prefill", Some(ca.issue("p", &[HERE])));
    let reason = refused(&p, &mut agent("decode", Some(ca.expired("d", &[HERE]))));
    assert!(reason.text.contains("`cert`") && reason.text.contains("expired"), "{}", reason.text);
}

#[test]
fn a_certificate_without_the_name_is_refused_on_both_sides() {
    let ca = Authority::new();
    let p = agent("prefill", Some(ca.issue("p", &["elsewhere.example", "10.9.8.7"])));
    let reason = refused(&p, &mut agent("decode", Some(ca.issue("d", &[HERE]))));
    assert!(reason.text.contains("`name`") && reason.text.contains(HERE), "{}", reason.text);
    // The common name is asked of who dials, too.
    let named = |file: &str, carries: &str| TlsConfig {
        name: Some("kvxfer.internal".to_owned()),
        ..ca.issue(file, &[carries])
    };
    let p = agent("prefill", Some(named("p", "kvxfer.internal")));
    let reason = refused(&p, &mut agent("decode", Some(named("d", "other.internal"))));
    assert!(reason.text.contains("`cert`") && reason.text.contains("name"), "{}", reason.text);
}

#[test]
fn a_peer_without_a_certificate_learns_nothing_but_that() {
    let ca = Authority::new();
    let tls = ca.issue("p", &[HERE]);
    let p = agent("prefill", Some(tls.clone()));
    let mut c = certs::client(&tls, false, dial(p.agent.address()));
    // A client of TLS 1.3 is done before the server has looked at its certificate.
    let _ = c.write_all(b"anything");
    let mut got = Vec::new();
    let error = c.read_to_end(&mut got).unwrap_err();
    assert!(error.to_string().contains("CertificateRequired"), "{error}");
    assert!(got.is_empty());
}

#[test]
fn where_one_side_has_tls_and_the_other_none_both_are_told_so() {
    let ca = Authority::new();
    let p = agent("prefill", Some(ca.issue("p", &[HERE])));
    let reason = refused(&p, &mut agent("decode", None));
    assert!(reason.text.contains("tls differs: the acceptor has TLS"), "{}", reason.text);
    let p = agent("prefill", None);
    let reason = refused(&p, &mut agent("decode", Some(ca.issue("d", &[HERE]))));
    assert!(reason.text.contains("tls differs: the initiator has TLS"), "{}", reason.text);
}

#[test]
fn a_wrong_secret_is_refused_over_tls_too() {
    let ca = Authority::new();
    let make = |name: &str, secret: Option<&[u8]>| {
        party(name, side(0, 1), FabricChoice::Shm, true, |c| {
            c.tls = Some(ca.issue(name, &[HERE]));
            c.secret = secret.map(<[u8]>::to_vec);
        })
    };
    for theirs in [None, Some(b"guess".as_slice())] {
        let p = make("prefill", Some(b"sesame"));
        let reason = refused(&p, &mut make("decode", theirs));
        assert!(reason.text.contains("secret"), "{}", reason.text);
    }
}

/// Somebody with a good certificate, who does not know the secret, stands between two agents and passes on what they
/// say. The proofs hold for the TLS connection that they were made on, so none of them serves on another.
#[test]
fn a_certificate_is_not_enough_to_pass_proofs_of_the_secret_on() {
    let ca = Authority::new();
    let make = |name: &str| {
        party(name, side(0, 1), FabricChoice::Shm, true, |c| {
            (c.tls, c.secret) = (Some(ca.issue(name, &[HERE])), Some(b"sesame".to_vec()));
        })
    };
    let (mut p, mut d) = (make("prefill"), make("decode"));
    let (tls, target) = (ca.issue("mallory", &[HERE]), p.agent.address().to_owned());
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let middle = listener.local_addr().unwrap().to_string();
    let relay = std::thread::spawn(move || {
        let (stream, _) = listener.accept().unwrap();
        stream.set_read_timeout(Some(LIMIT)).unwrap();
        let (mut from, mut to) = (certs::server(&tls, stream), certs::client(&tls, true, dial(&target)));
        let mut buf = [0u8; 4096];
        // Hello there, Challenge back, Proof there, and whatever comes of it back.
        let mut last = 0;
        for _ in 0..2 {
            let n = from.read(&mut buf).unwrap_or(0);
            to.write_all(&buf[..n]).unwrap();
            last = to.read(&mut buf).unwrap_or(0);
            from.write_all(&buf[..last]).unwrap();
        }
        from.conn.send_close_notify();
        let _ = from.flush();
        last
    });
    d.agent.expect(expect(1, &[1], 0, 16, &middle)).unwrap();
    let reason = d.fails(1);
    assert_eq!(reason.kind, ReasonKind::AuthError, "{}", reason.text);
    assert!(relay.join().unwrap() > 0, "prefill answers with a refusal");
    let address = p.agent.address().to_owned();
    works(&mut p, &mut d, 2..3, &address);
}

#[test]
fn files_that_cannot_be_used_are_named() {
    let (ca, other) = (Authority::new(), Authority::new());
    let good = ca.issue("good", &[HERE]);
    let junk = ca.path("junk");
    std::fs::write(&junk, "not PEM").unwrap();
    let missing = ca.path("missing");
    let with = |f: &dyn Fn(&mut TlsConfig)| {
        let mut tls = good.clone();
        f(&mut tls);
        tls
    };
    let cases = [
        (with(&|t| t.cert.clone_from(&missing)), "cert=", "missing"),
        (with(&|t| t.key.clone_from(&missing)), "key=", "missing"),
        (with(&|t| t.ca.clone_from(&missing)), "ca=", "missing"),
        (with(&|t| t.cert.clone_from(&junk)), "cert=", "junk"),
        (with(&|t| t.key.clone_from(&junk)), "key=", "junk"),
        (with(&|t| t.ca.clone_from(&junk)), "ca=", "junk"),
        (with(&|t| t.key = other.issue("x", &[HERE]).key), "key=", "not the key"),
        (with(&|t| t.name = Some("not a name".to_owned())), "name=", "not a name"),
    ];
    for (tls, field, word) in cases {
        let memory = support::Memory::new(&side(0, 1), true);
        let mut c = AgentConfig::new("x", side(0, 1), vec![support::PAGES], memory.spans.clone());
        (c.fabric, c.tls) = (FabricChoice::Shm, Some(tls));
        let e = Agent::start(c).unwrap_err();
        assert!(matches!(e, StartError::Auth(_)), "{e}");
        let text = e.to_string();
        assert!(text.contains(field) && text.contains(word), "{text}");
    }
}

#[test]
fn a_source_that_restarts_on_its_port_is_met_again() {
    let ca = Authority::new();
    let tls = ca.issue("p", &[HERE]);
    let mut d = agent("decode", Some(ca.issue("d", &[HERE])));
    let mut p = agent("prefill", Some(tls.clone()));
    let address = p.agent.address().to_owned();
    for life in 0..3 {
        works(&mut p, &mut d, life * 10..life * 10 + 3, &address);
        drop(p);
        p = party("prefill", side(0, 1), FabricChoice::Shm, true, |c| {
            (c.tls, c.listen) = (Some(tls.clone()), address.clone());
        });
    }
    works(&mut p, &mut d, 100..103, &address);
}

/// Decode's look-ups go to prefill itself, and its session goes through somebody in the middle.
fn through(
    p: &Party,
    tls: Option<&TlsConfig>,
    rule: impl FnMut(usize) -> Tamper + Send + 'static,
) -> (String, Proxy, std::thread::JoinHandle<()>) {
    let proxy = Proxy::start(p.agent.address(), rule);
    let stream = dial(p.agent.address());
    let mut entries = match tls {
        None => {
            let (mut raw, outcome) = Raw::initiate(stream, 0xA5, Purpose::Lookup, None, None);
            established(outcome);
            lookup(&mut raw)
        }
        Some(tls) => {
            let mut stream = certs::client(tls, true, stream);
            stream.conn.complete_io(&mut stream.sock).unwrap();
            let binding = stream.conn.export_keying_material([0; 32], b"EXPORTER-kvxfer-1", None).unwrap();
            let (mut raw, outcome) = Raw::initiate(stream, 0xA5, Purpose::Lookup, None, Some(binding));
            established(outcome);
            lookup(&mut raw)
        }
    };
    entries.entries[0].address.clone_from(&proxy.address);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let tls = tls.cloned();
    // Serves look-ups until the test ends its last agent; a connection that says nothing ends it.
    let thread = std::thread::spawn(move || {
        for stream in listener.incoming().flatten() {
            stream.set_read_timeout(Some(LIMIT)).unwrap();
            if stream.peek(&mut [0]).unwrap_or(0) == 0 {
                return;
            }
            match &tls {
                None => answer_lookup(stream, None, entries.entries.clone()),
                Some(tls) => {
                    let mut stream = certs::server(tls, stream);
                    stream.conn.complete_io(&mut stream.sock).unwrap();
                    let binding =
                        stream.conn.export_keying_material([0; 32], b"EXPORTER-kvxfer-1", None).unwrap();
                    answer_lookup(stream, Some(binding), entries.entries.clone());
                }
            }
        }
    });
    (address, proxy, thread)
}

fn end(address: &str, directory: std::thread::JoinHandle<()>) {
    drop(dial(address));
    directory.join().unwrap();
}

/// The first session's bytes go through `rule`, the later ones' untouched: the room ends well all the same, and over a
/// second session once the rule has set its flag, which it must have.
fn survives(name: &str, rule: impl Fn(Arc<AtomicBool>) -> Tamper + Send + 'static) {
    let (fired, sessions) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let (flag, count) = (Arc::clone(&fired), Arc::clone(&sessions));
    let ca = Authority::new();
    let mut p = agent("prefill", Some(ca.issue("p", &[HERE])));
    let mut d = agent("decode", Some(ca.issue("d", &[HERE])));
    let (address, proxy, directory) = through(&p, Some(&ca.issue("x", &[HERE])), move |n| {
        count.fetch_add(1, Ordering::SeqCst);
        match n {
            0 => rule(Arc::clone(&flag)),
            _ => Box::new(|_, bytes| Some(bytes)),
        }
    });
    println!("{name}");
    let mut room = 1;
    while room < 4 || (!fired.load(Ordering::SeqCst) && room < 40) {
        works(&mut p, &mut d, room..room + 1, &address);
        room += 1;
    }
    assert!(fired.load(Ordering::SeqCst), "{name}: nothing was done to the session");
    // The hit may have come behind the last room's last word: the next one then needs the second session.
    works(&mut p, &mut d, room..room + 3, &address);
    assert!(sessions.load(Ordering::SeqCst) >= 2, "{name}: the session went on");
    drop((p, d, proxy));
    end(&address, directory);
}

#[test]
fn a_tls_stream_that_is_cut_anywhere_ends_no_room_wrongly() {
    // Within the client's first flight, the server's, the control handshake, and the session after it.
    for at in [1, 100, 700, 1500, 2500, 3500, 4200, 5000] {
        survives(&format!("cut after {at} bytes"), move |fired| {
            let mut left: i64 = at;
            Box::new(move |_, bytes| {
                left -= i64::try_from(bytes.len()).unwrap();
                fired.fetch_or(left <= 0, Ordering::SeqCst);
                (left > 0).then_some(bytes)
            })
        });
    }
}

#[test]
fn a_byte_changed_after_the_tls_handshake_ends_the_session_and_no_more() {
    for there in [true, false] {
        // Behind the hellos; in a handshake's proofs, in the description and in the session's own frames.
        for at in [1200usize, 1900, 2600, 3300] {
            survives(&format!("there: {there}, byte {at}"), move |fired| {
                let mut seen = 0;
                Box::new(move |way, mut bytes| {
                    if way == there {
                        if (seen..seen + bytes.len()).contains(&at) {
                            bytes[at - seen] ^= 1;
                            fired.store(true, Ordering::SeqCst);
                        }
                        seen += bytes.len();
                    }
                    Some(bytes)
                })
            });
        }
    }
}

/// Whatever follows the end that a peer announced within TLS must neither be taken nor keep the thread busy.
#[test]
fn bytes_behind_the_end_of_a_tls_stream_are_nobodys_and_the_connection_closes() {
    let ca = Authority::new();
    let mut p = agent("prefill", Some(ca.issue("p", &[HERE])));
    let mut d = agent("decode", Some(ca.issue("d", &[HERE])));
    let address = p.agent.address().to_owned();
    let tls = ca.issue("x", &[HERE]);
    // The end comes in the TLS handshake's last flight, or after the control handshake.
    for (n, late) in [(0, false), (1, true)] {
        let mut stream = certs::client(&tls, true, dial(&address));
        stream.conn.complete_io(&mut stream.sock).unwrap();
        if late {
            let binding = stream.conn.export_keying_material([0; 32], b"EXPORTER-kvxfer-1", None).unwrap();
            let (raw, outcome) = Raw::initiate(stream, 0xA7, Purpose::Register, None, Some(binding));
            established(outcome);
            stream = raw.stream;
        }
        stream.conn.send_close_notify();
        let mut last = Vec::new();
        stream.conn.write_tls(&mut last).unwrap();
        last.extend_from_slice(&[0x17; 4096]);
        stream.sock.write_all(&last).unwrap();
        // The socket stays open on this side: the agent has to close by itself.
        let mut rest = Vec::new();
        match stream.sock.read_to_end(&mut rest) {
            Ok(_) => {}
            Err(e) => assert_eq!(e.kind(), std::io::ErrorKind::ConnectionReset, "{e}"),
        }
        works(&mut p, &mut d, n * 10 + 1..n * 10 + 4, &address);
    }
}

/// Strangers that keep their handshakes going are served a few in a turn: all of them still get through, and so do agents.
#[test]
fn a_flood_of_tls_handshakes_delays_others_and_ends_none() {
    let ca = Authority::new();
    let mut p = agent("prefill", Some(ca.issue("p", &[HERE])));
    let mut d = agent("decode", Some(ca.issue("d", &[HERE])));
    let address = p.agent.address().to_owned();
    let tls = ca.issue("x", &[HERE]);
    // Half a handshake each, all at once: the agent has their hellos to answer in one turn.
    let mut flood: Vec<_> = (0..60).map(|_| certs::client(&tls, true, dial(&address))).collect();
    for stream in &mut flood {
        stream.conn.write_tls(&mut stream.sock).unwrap();
    }
    works(&mut p, &mut d, 1..4, &address);
    for mut stream in flood {
        stream.conn.complete_io(&mut stream.sock).unwrap();
        let binding = stream.conn.export_keying_material([0; 32], b"EXPORTER-kvxfer-1", None).unwrap();
        let (mut raw, outcome) = Raw::initiate(stream, 0xA8, Purpose::Lookup, None, Some(binding));
        established(outcome);
        lookup(&mut raw);
    }
    works(&mut p, &mut d, 4..7, &address);
}

#[test]
fn whoever_listens_on_the_path_reads_names_without_tls_and_none_with_it() {
    for secure in [false, true] {
        let ca = Authority::new();
        let make = |name: &str| agent(name, secure.then(|| ca.issue(name, &[HERE])));
        let (mut p, mut d) = (make("hush-prefill"), make("hush-decode"));
        let heard = Arc::new(Mutex::new(Vec::new()));
        let tap = Arc::clone(&heard);
        let x = ca.issue("x", &[HERE]);
        let (address, proxy, directory) = through(&p, secure.then_some(&x), move |_| {
            let tap = Arc::clone(&tap);
            Box::new(move |_, bytes| {
                tap.lock().unwrap().extend_from_slice(&bytes);
                Some(bytes)
            })
        });
        works(&mut p, &mut d, 1..3, &address);
        let heard = heard.lock().unwrap().clone();
        for name in ["hush-prefill", "hush-decode"] {
            let read = heard.windows(name.len()).any(|w| w == name.as_bytes());
            assert_eq!(read, !secure, "{name} in {} bytes, TLS: {secure}", heard.len());
        }
        drop((p, d, proxy));
        end(&address, directory);
    }
}

#[test]
fn a_handshake_that_nobody_bound_does_not_pass_over_tls() {
    let ca = Authority::new();
    let tls = ca.issue("p", &[HERE]);
    let p = agent("prefill", Some(tls.clone()));
    let stream = certs::client(&tls, true, dial(p.agent.address()));
    let (_, outcome) = Raw::initiate(stream, 0xA6, Purpose::Lookup, None, None);
    let Outcome::Failed(reason) = outcome else { panic!("{outcome:?}") };
    assert_eq!(reason.kind, ReasonKind::AuthError, "{}", reason.text);
}
