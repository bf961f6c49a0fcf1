//! An attacker who can reach the control port, or sits on the path, against agents that share a secret.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stdout,
    clippy::cast_possible_truncation,
    clippy::redundant_clone
)]

#[path = "support/raw.rs"]
mod raw;
mod support;

use kvxfer_engine::{AgentConfig, FabricChoice};
use kvxfer_proto::handshake::{Config, Handshake, Outcome, Secret};
use kvxfer_proto::msg::{Msg, Purpose};
use kvxfer_proto::wire::{self, Decoded, Decoder, HEADER_BYTES};
use kvxfer_proto::{Incarnation, ReasonKind, SessionNo};
use raw::{Proxy, Raw, Tamper, dial, drive, established, lookup, nonce};
use std::io::{Read, Write};
use std::net::{Shutdown, TcpListener};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};
use support::{LIMIT, Party, expect, party, push, side};

const SECRET: &[u8] = b"sesame, 32 random bytes in truth";

fn secret() -> Option<Secret> {
    Secret::new(SECRET)
}

fn agent(name: &str, tune: impl FnOnce(&mut AgentConfig)) -> Party {
    party(name, side(0, 1), FabricChoice::Shm, true, |c| {
        c.secret = Some(SECRET.to_vec());
        c.limits.handshake_timeout = Duration::from_millis(400);
        tune(c);
    })
}

fn works(p: &mut Party, d: &mut Party, room: u64, source: &str) {
    d.agent.expect(expect(room, &[1], 0, 16, source)).unwrap();
    p.agent.push(push(room, &[1], 0, 16)).unwrap();
    d.succeeds(room);
    p.succeeds(room);
}

/// A connection's bytes, by direction; `true` is towards the agent that was dialled.
type Tape = Arc<Mutex<Vec<(bool, Vec<u8>)>>>;

fn tap(tape: &Tape) -> Tamper {
    let tape = Arc::clone(tape);
    Box::new(move |there, bytes| {
        tape.lock().unwrap().push((there, bytes.clone()));
        Some(bytes)
    })
}

fn side_of(tape: &Tape, there: bool) -> Vec<u8> {
    tape.lock().unwrap().iter().filter(|(t, _)| *t == there).flat_map(|(_, b)| b.clone()).collect()
}

/// Where each frame of these bytes ends.
fn frame_ends(bytes: &[u8]) -> Vec<usize> {
    let mut ends = vec![];
    let mut at = 0;
    while let Some(len) = bytes.get(at..at + 4) {
        at += HEADER_BYTES + u32::from_le_bytes(len.try_into().unwrap()) as usize;
        if at > bytes.len() {
            break;
        }
        ends.push(at);
    }
    ends
}

/// Everything that the agent says to a connection that sends this and then nothing more.
fn answer_to(address: &str, bytes: &[u8]) -> Vec<u8> {
    let mut s = dial(address);
    let _ = s.write_all(bytes);
    let _ = s.shutdown(Shutdown::Write);
    let mut got = Vec::new();
    let _ = s.read_to_end(&mut got);
    got
}

fn names_of(bytes: &[u8]) -> Vec<&'static str> {
    let mut decoder = Decoder::new();
    decoder.set_cap(wire::MAX_FRAME_BYTES);
    decoder.feed(bytes);
    let mut names = vec![];
    while let Ok(Some(Decoded::Frame(frame))) = decoder.next_frame() {
        names.push(frame.msg.name());
    }
    names
}

#[test]
fn a_recorded_handshake_replayed_at_either_side_proves_nothing() {
    let (mut p, mut d) = (agent("prefill", |_| {}), agent("decode", |_| {}));
    let tape: Tape = Arc::default();
    let recorder = Arc::clone(&tape);
    let proxy = Proxy::start(p.agent.address(), move |_| tap(&recorder));
    works(&mut p, &mut d, 1, &proxy.address.clone());
    // The look-up's four frames, to prefill: it makes a challenge of its own, and the old proof does not fit.
    let recorded = side_of(&tape, true);
    assert_eq!(names_of(&recorded)[..2], ["Hello", "Proof"]);
    let before = p.agent.stats().auth_failures;
    assert_eq!(names_of(&answer_to(p.agent.address(), &recorded)), ["Challenge", "Refuse"]);
    let until = Instant::now() + LIMIT;
    while p.agent.stats().auth_failures == before {
        assert!(Instant::now() < until);
    }
    // The answers, to a decode that asks anew.
    let answers = side_of(&tape, false);
    assert_eq!(names_of(&answers)[..2], ["Challenge", "Accept"]);
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap().to_string();
    let player = std::thread::spawn(move || {
        let (mut s, _) = listener.accept().unwrap();
        s.set_read_timeout(Some(LIMIT)).unwrap();
        s.write_all(&answers).unwrap();
        let mut got = Vec::new();
        let _ = s.read_to_end(&mut got);
        got
    });
    d.agent.expect(expect(2, &[1], 0, 16, &address)).unwrap();
    let reason = d.fails(2);
    assert_eq!(reason.kind, ReasonKind::AuthError, "{}", reason.text);
    let said = player.join().unwrap();
    assert!(!names_of(&said).contains(&"Lookup"), "{:?}", names_of(&said));
    let address = p.agent.address().to_owned();
    works(&mut p, &mut d, 3, &address);
}

#[test]
fn an_agents_own_challenge_and_proofs_reflected_at_it_prove_nothing() {
    let (mut p, mut d) = (agent("prefill", |_| {}), agent("decode", |_| {}));
    // Whatever decode says comes back to it: as the answer of the acceptor, or by way of its own port.
    for own_port in [false, true] {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let (address, at_home) = (listener.local_addr().unwrap().to_string(), d.agent.address().to_owned());
        let mirror = std::thread::spawn(move || {
            let (mut s, _) = listener.accept().unwrap();
            s.set_read_timeout(Some(LIMIT)).unwrap();
            let mut home = own_port.then(|| dial(&at_home));
            let mut buf = [0u8; 4096];
            while let Ok(n) = s.read(&mut buf) {
                let mut answer = buf[..n].to_vec();
                if let Some(home) = &mut home {
                    let _ = home.write_all(&answer);
                    answer.resize(4096, 0);
                    let n = home.read(&mut answer).unwrap_or(0);
                    answer.truncate(n);
                }
                if n == 0 || s.write_all(&answer).is_err() {
                    break;
                }
            }
        });
        let room = 10 + u64::from(own_port);
        d.agent.expect(expect(room, &[1], 0, 16, &address)).unwrap();
        let reason = d.fails(room);
        assert_eq!(reason.kind, ReasonKind::AuthError, "{}", reason.text);
        mirror.join().unwrap();
    }
    // The challenge of one connection answered with the proof that another connection makes of it: the second one is
    // asked as an acceptor, whose proofs have another label, and whose own challenge is in them.
    let mut one = dial(p.agent.address());
    let mut h =
        Handshake::initiator(Config::new(Incarnation(7), nonce(7), None), Purpose::Lookup, SessionNo(1));
    let hello = h.poll_frame().unwrap();
    one.write_all(&hello).unwrap();
    let mut buf = [0u8; 4096];
    let n = one.read(&mut buf).unwrap();
    let reflected = buf[..n].to_vec();
    assert_eq!(names_of(&reflected), ["Challenge"]);
    let said = answer_to(p.agent.address(), &reflected);
    assert!(names_of(&said).iter().all(|name| *name == "Refuse"), "{:?}", names_of(&said));
    one.write_all(&reflected).unwrap();
    let mut rest = Vec::new();
    let _ = one.read_to_end(&mut rest);
    assert_eq!(names_of(&rest), ["Refuse"]);
    let address = p.agent.address().to_owned();
    works(&mut p, &mut d, 3, &address);
}

/// A man in the middle of a look-up's connection; the later ones pass.
fn room_through(rule: impl Fn() -> Tamper + Send + 'static) {
    let (mut p, mut d) = (agent("prefill", |_| {}), agent("decode", |_| {}));
    let proxy = Proxy::start(p.agent.address(), move |n| match n {
        0 => rule(),
        _ => Box::new(|_, bytes| Some(bytes)),
    });
    works(&mut p, &mut d, 1, &proxy.address.clone());
}

#[test]
fn a_connection_cut_at_and_within_every_frame_is_made_anew() {
    let (mut p, mut d) = (agent("prefill", |_| {}), agent("decode", |_| {}));
    let tape: Tape = Arc::default();
    let recorder = Arc::clone(&tape);
    let proxy = Proxy::start(p.agent.address(), move |_| tap(&recorder));
    works(&mut p, &mut d, 1, &proxy.address.clone());
    for there in [true, false] {
        for end in frame_ends(&side_of(&tape, there)) {
            for at in [end.saturating_sub(1), end, end + 1, end + HEADER_BYTES - 1] {
                room_through(move || {
                    let mut left = at;
                    Box::new(move |way, mut bytes| {
                        if way != there {
                            return Some(bytes);
                        }
                        bytes.truncate(left);
                        left -= bytes.len();
                        (left > 0).then_some(bytes)
                    })
                });
            }
        }
    }
}

/// Sends a handshake's frames to the agent after `change` had its way with what both sides say. Returns how it ended
/// here, and whether the agent took it.
fn meddled(p: &Party, me: u64, mut change: impl FnMut(bool, &mut Vec<u8>)) -> (Option<Outcome>, bool) {
    let mut s = dial(p.agent.address());
    let mut h = Handshake::initiator(
        Config::new(Incarnation(me), nonce(me), secret()),
        Purpose::Lookup,
        SessionNo(1),
    );
    let mut decoder = Decoder::new();
    let mut buf = [0u8; 4096];
    loop {
        while let Some(mut bytes) = h.poll_frame() {
            change(true, &mut bytes);
            if s.write_all(&bytes).is_err() {
                return (h.outcome().cloned(), false);
            }
        }
        if h.outcome().is_some() {
            break;
        }
        match s.read(&mut buf) {
            Ok(n) if n > 0 => {
                let mut bytes = buf[..n].to_vec();
                change(false, &mut bytes);
                decoder.feed(&bytes);
                h.handle_input(&mut decoder);
            }
            _ => h.handle_eof(),
        }
    }
    let outcome = h.outcome().cloned();
    // An agent that was taken in would answer this.
    let mut raw = Raw { stream: s, decoder: Decoder::new(), me: Incarnation(me), session: SessionNo(1) };
    raw.decoder.set_cap(wire::MAX_FRAME_BYTES);
    let asked = raw.send(Msg::Lookup(kvxfer_proto::msg::Lookup { engine: String::new() }), 0);
    let answered = asked.is_ok() && raw.until_closed().iter().any(|f| matches!(f.msg, Msg::Entries(_)));
    (outcome, answered)
}

#[test]
fn a_man_in_the_middle_who_changes_any_byte_of_the_handshake_is_found_out() {
    let p = agent("prefill", |c| c.limits.handshake_timeout = Duration::from_millis(150));
    let mut me = 1000;
    let (outcome, answered) = meddled(&p, me, |_, _| {});
    assert!(
        matches!(outcome, Some(Outcome::Established(_))) && answered,
        "unchanged, it passes: {outcome:?}"
    );
    // Hello and Proof there, Challenge and Accept back; one bit of every byte.
    for there in [true, false] {
        let mut total = 0;
        meddled(&p, me + 1, |way, bytes| total += if way == there { bytes.len() } else { 0 });
        me += 1;
        for at in 0..total {
            me += 1;
            let mut seen = 0;
            let (outcome, answered) = meddled(&p, me, |way, bytes| {
                if way == there {
                    if let Some(byte) = at.checked_sub(seen).and_then(|i| bytes.get_mut(i)) {
                        *byte ^= 1 << (at % 8);
                    }
                    seen += bytes.len();
                }
            });
            let passed = matches!(outcome, Some(Outcome::Established(_)));
            // Prefill's last word may be changed after it has taken us for who we are: then we do not take it.
            assert!(!passed, "there: {there}, byte {at}: {outcome:?}");
            assert!(!answered || !there, "there: {there}, byte {at}: the agent took a changed handshake");
        }
    }
}

#[test]
fn versions_and_features_changed_on_the_way_are_found_out() {
    let p = agent("prefill", |_| {});
    // Wherever the frame has them: the whole frame is decoded, changed, and encoded again.
    let edits: [fn(&mut Msg); 6] = [
        |m| {
            if let Msg::Hello(h) = m {
                h.versions = (1, 9);
            }
        },
        |m| {
            if let Msg::Hello(h) = m {
                h.versions = (0, 1);
            }
        },
        |m| {
            if let Msg::Hello(h) = m {
                h.features = !h.features;
            }
        },
        |m| {
            if let Msg::Hello(h) = m {
                h.purpose = Purpose::Register;
            }
        },
        |m| {
            if let Msg::Challenge(c) = m {
                c.features = !c.features;
            }
        },
        |m| {
            if let Msg::Challenge(c) = m {
                c.version = 2;
            }
        },
    ];
    for (n, edit) in edits.into_iter().enumerate() {
        let (outcome, answered) = meddled(&p, 50 + n as u64, |_, bytes| {
            let Ok(Decoded::Frame(mut frame)) = wire::decode_frame(bytes) else { return };
            edit(&mut frame.msg);
            bytes.clear();
            wire::encode(&frame, bytes).unwrap();
        });
        let Some(Outcome::Failed(reason)) = outcome else { panic!("edit {n}: {outcome:?}") };
        assert!(
            matches!(reason.kind, ReasonKind::AuthError | ReasonKind::VersionMismatch),
            "edit {n}: {}",
            reason.text
        );
        assert!(!answered, "edit {n}");
    }
}

/// HMAC's own `verify_slice` compares in constant time. A clock could not see the difference of a few nanoseconds that
/// another compare would make beside the two hashes before it, so this looks at the source: there is one place that
/// compares proofs, and it is that call.
#[test]
fn proofs_are_compared_in_constant_time() {
    let auth = include_str!("../../kvxfer-proto/src/handshake/auth.rs");
    let code = auth.split("#[cfg(test)]").next().unwrap();
    let verify = code.split("pub(super) fn verify(").nth(1).unwrap();
    let body = verify.split("\n}").next().unwrap();
    assert!(body.contains(".verify_slice(proof).is_ok()"), "{body}");
    assert!(!body.contains("==") && !body.contains("!="), "{body}");
    for source in [code, include_str!("../../kvxfer-proto/src/handshake/mod.rs")] {
        for line in source.lines().filter(|l| l.contains(".mac")) {
            assert!(!line.contains("==") && !line.contains("!="), "a proof is compared by hand: {line}");
        }
    }
}

/// Everything that somebody without the secret can get out of an agent, and what must not be in it.
#[test]
fn strangers_are_told_nothing_of_names_layout_addresses_or_keys() {
    let p = agent("zanzibar-prefill", |c| {
        c.engine = "quagga-engine".to_owned();
        c.model = "okapi-model".to_owned();
    });
    let hello = |me: u64, secret: Option<Secret>| {
        Handshake::initiator(Config::new(Incarnation(me), nonce(me), secret), Purpose::Transfer, SessionNo(1))
    };
    let mut heard: Vec<u8> = Vec::new();
    for junk in
        [b"".as_slice(), b"GET / HTTP/1.1\r\n\r\n", &[0xff; 5000], &[0; 64], b"\x16\x03\x01\x02\x00\x01\x00"]
    {
        heard.extend(answer_to(p.agent.address(), junk));
    }
    // A good Hello, and then: nothing, a wrong proof, a proof of no secret, each frame that only friends may send.
    heard.extend(answer_to(p.agent.address(), &hello(1, None).poll_frame().unwrap()));
    for (me, secret) in [(2, None), (3, Secret::new(b"guess"))] {
        let mut s = dial(p.agent.address());
        let mut h = hello(me, secret);
        let tape: Mutex<Vec<u8>> = Mutex::default();
        let mut decoder = Decoder::new();
        let outcome = drive(&mut h, &mut Listen(&mut s, &tape), &mut decoder);
        assert!(matches!(outcome, Some(Outcome::Failed(_))), "{outcome:?}");
        heard.extend(tape.into_inner().unwrap());
    }
    for msg in [
        Msg::Lookup(kvxfer_proto::msg::Lookup { engine: String::new() }),
        Msg::Ping(1),
        Msg::Attach(kvxfer_proto::msg::Attach { fabric: "shm".to_owned(), ring: None }),
        Msg::RoomFailed(kvxfer_proto::msg::RoomFailed {
            room: kvxfer_proto::Room::new(1).unwrap(),
            reason: kvxfer_proto::Reason::new(ReasonKind::Cancelled, "x"),
        }),
    ] {
        let mut bytes = hello(9, None).poll_frame().unwrap();
        let frame =
            kvxfer_proto::msg::Frame { incarnation: Incarnation(9), session: SessionNo(1), number: 0, msg };
        wire::encode(&frame, &mut bytes).unwrap();
        heard.extend(answer_to(p.agent.address(), &bytes));
    }
    let names = names_of(&heard);
    assert!(names.len() >= 8, "{names:?}");
    assert!(names.iter().all(|n| ["Challenge", "Refuse"].contains(n)), "{names:?}");
    let tells = |bytes: &[u8], what: &[u8]| bytes.windows(what.len()).any(|w| w == what);
    let mut secrets: Vec<Vec<u8>> =
        ["zanzibar", "quagga", "okapi", "sesame", "shm"].iter().map(|s| s.as_bytes().to_vec()).collect();
    secrets.extend(p.memory.spans.iter().map(|s| s.addr.to_le_bytes().to_vec()));
    secrets.extend(p.memory.spans.iter().map(|s| s.len.to_le_bytes().to_vec()));
    for what in &secrets {
        assert!(!tells(&heard, what), "a stranger is told {:?}", what.escape_ascii().to_string());
    }
    // A friend is told names: the search does find them.
    let (mut friend, outcome) = Raw::initiate(dial(p.agent.address()), 77, Purpose::Lookup, secret(), None);
    established(outcome);
    let entries = lookup(&mut friend);
    assert!(tells(format!("{entries:?}").as_bytes(), b"quagga"));
}

/// Keeps what was read.
struct Listen<'a, S>(&'a mut S, &'a Mutex<Vec<u8>>);

impl<S: Read> Read for Listen<'_, S> {
    fn read(&mut self, buf: &mut [u8]) -> std::io::Result<usize> {
        let n = self.0.read(buf)?;
        self.1.lock().unwrap().extend_from_slice(&buf[..n]);
        Ok(n)
    }
}

impl<S: Write> Write for Listen<'_, S> {
    fn write(&mut self, buf: &[u8]) -> std::io::Result<usize> {
        self.0.write(buf)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        self.0.flush()
    }
}
