//! Who may pass: secrets, replays, reflections, downgrades, other versions, other protocols.
#![allow(clippy::unwrap_used)]

mod handshake_common;

use handshake_common::*;
use kvxfer_proto::handshake::{Config, Established, Handshake, Outcome};
use kvxfer_proto::msg::{Frame, Msg, Proof, Purpose, Role};
use kvxfer_proto::wire::{self, Decoded, Decoder, MAX_HANDSHAKE_BYTES};
use kvxfer_proto::{Incarnation, Reason, ReasonKind, SessionNo};
use proptest::prelude::*;

const SECRET: Option<&[u8]> = Some(b"correct horse battery staple");

fn established(hs: &Handshake) -> &Established {
    match hs.outcome() {
        Some(Outcome::Established(e)) => e,
        other => panic!("{other:?}"),
    }
}

#[test]
fn two_agents_meet() {
    for (secret, authenticated) in [(SECRET, true), (None, false)] {
        let mut pair = Pair::new(initiator(secret), acceptor(secret));
        pair.run();
        for (end, peer, name) in [(&pair.i, ACCEPTOR, "prefill-0"), (&pair.a, INITIATOR, "decode-0")] {
            let met = established(&end.hs).met;
            assert_eq!((met.incarnation, met.session, met.version), (peer, SESSION, 1));
            assert_eq!((met.features, met.purpose), (0b110, Purpose::Transfer));
            assert_eq!(met.authenticated, authenticated);
            assert_eq!(established(&end.hs).describe.as_ref().unwrap().name, name);
        }
        let order: Vec<_> = pair
            .sent
            .iter()
            .map(|(_, raw)| match wire::decode_frame(raw) {
                Ok(Decoded::Frame(frame)) => frame.msg.name(),
                other => panic!("{other:?}"),
            })
            .collect();
        assert_eq!(order, ["Hello", "Challenge", "Proof", "Accept", "Describe", "Describe"]);
    }
}

#[test]
fn nothing_about_the_agent_is_said_before_the_proof() {
    let mut pair = Pair::new(initiator(SECRET), acceptor(SECRET));
    pair.run();
    for (_, raw) in &pair.sent[..4] {
        for word in ["decode-0", "prefill-0", "one-time token", "correct horse"] {
            assert!(!raw.windows(word.len()).any(|w| w == word.as_bytes()), "{word}");
        }
    }
}

#[test]
fn directory_connections_need_no_describe() {
    for purpose in [Purpose::Lookup, Purpose::Register] {
        let hello = Handshake::initiator(config(INITIATOR, SECRET), purpose, SESSION);
        let mut pair = Pair::new(hello, acceptor(SECRET));
        pair.run();
        assert_eq!(pair.sent.len(), 4);
        assert_eq!(established(&pair.a.hs).met.purpose, purpose);
        assert_eq!(established(&pair.i.hs).describe, None);
    }
}

#[test]
fn features_are_what_both_have() {
    let hello = Config { features: 0b011, ..config(INITIATOR, SECRET) };
    let mut pair = Pair::new(Handshake::initiator(hello, Purpose::Transfer, SESSION), acceptor(SECRET));
    pair.run();
    assert_eq!(established(&pair.i.hs).met.features, 0b010);
    assert_eq!(established(&pair.a.hs).met.features, 0b010);
}

#[test]
fn secrets_must_be_the_same() {
    let other: Option<&[u8]> = Some(b"another secret");
    let cases = [
        (SECRET, other, "the initiator's proof does not match the acceptor's secret"),
        (None, SECRET, "the acceptor has a secret and the initiator has none"),
        (SECRET, None, "the acceptor has no secret, and the initiator's proof does not verify without one"),
    ];
    for (ours, theirs, want) in cases {
        let mut pair = Pair::new(initiator(ours), acceptor(theirs));
        pair.run();
        for reason in [pair.i.failure(), pair.a.failure()] {
            assert_eq!(reason.kind, ReasonKind::AuthError);
            assert!(reason.text.contains(want), "{reason}");
            assert!(reason.text.contains("KVXFER_SECRET_FILE"), "{reason}");
            assert!(!reason.text.contains("horse") && !reason.text.contains("another"), "{reason}");
        }
        assert!(pair.i.failure().text.starts_with("refused by the peer: "));
    }
}

#[test]
fn an_acceptor_without_the_secret_is_found_out() {
    // It does not care about the initiator's proof, and answers with whatever proof it can make.
    for mac in [[0; 32], [7; 32]] {
        let mut pair = Pair::new(initiator(SECRET), acceptor(SECRET));
        pair.run_with(|n, raw| {
            if n == 3 {
                reencode(raw, |frame| frame.msg = Msg::Accept(Proof { mac }));
            }
        });
        assert_eq!(pair.i.failure().kind, ReasonKind::AuthError);
        assert_eq!(pair.a.failure().kind, ReasonKind::AuthError);
        assert!(
            !pair.sent.iter().any(|(from_initiator, raw)| *from_initiator && raw[5] == wire::kind::DESCRIBE)
        );
    }
}

#[test]
fn our_own_proof_is_not_the_peers() {
    let mut pair = Pair::new(initiator(SECRET), acceptor(SECRET));
    let mut proof = None;
    pair.run_with(|n, raw| {
        if n == 2 {
            let Ok(Decoded::Frame(Frame { msg: Msg::Proof(p), .. })) = wire::decode_frame(raw) else {
                panic!()
            };
            proof = Some(p);
        }
        if n == 3 {
            reencode(raw, |frame| frame.msg = Msg::Accept(proof.take().unwrap()));
        }
    });
    assert_eq!(pair.i.failure().kind, ReasonKind::AuthError);
    assert!(!pair.i.established() && !pair.a.established());
}

#[test]
fn an_agent_does_not_connect_to_itself() {
    let mut pair = Pair::new(initiator(SECRET), Handshake::acceptor(config(INITIATOR, SECRET)));
    pair.run();
    for reason in [pair.i.failure(), pair.a.failure()] {
        assert_eq!(reason.kind, ReasonKind::AuthError);
        assert!(reason.text.contains("own incarnation 0000000000001111"), "{reason}");
    }
    // Its own bytes, sent back.
    let mut end = Pair::new(initiator(SECRET), acceptor(SECRET)).i;
    let hello = end.hs.poll_frame().unwrap();
    end.feed(&hello);
    assert_eq!(end.failure().kind, ReasonKind::AuthError);
}

#[test]
fn an_echoed_nonce_is_refused_on_both_sides() {
    let nonce = config(INITIATOR, SECRET).nonce;
    for at in [0, 1] {
        let mut pair = Pair::new(initiator(SECRET), acceptor(SECRET));
        pair.run_with(|n, raw| {
            if n == at {
                reencode(raw, |frame| match &mut frame.msg {
                    Msg::Hello(m) => m.nonce = config(ACCEPTOR, SECRET).nonce,
                    Msg::Challenge(m) => m.nonce = nonce,
                    _ => panic!(),
                });
            }
        });
        for reason in [pair.i.failure(), pair.a.failure()] {
            assert_eq!(reason.kind, ReasonKind::AuthError);
            assert!(reason.text.contains("own nonce back"), "{reason}");
        }
    }
}

#[test]
fn replayed_frames_prove_nothing() {
    let mut pair = Pair::new(initiator(SECRET), acceptor(SECRET));
    pair.run();
    // The same initiator's frames, to the same acceptor, which has drawn another nonce.
    let again = Config { nonce: [99; 32], ..config(ACCEPTOR, SECRET) };
    let mut victim = Pair::new(initiator(SECRET), Handshake::acceptor(again)).a;
    for (from_initiator, raw) in &pair.sent {
        if *from_initiator {
            victim.feed(raw);
        }
    }
    assert_eq!(victim.failure().kind, ReasonKind::AuthError);
    // And the acceptor's, to the initiator.
    let again = Config { nonce: [98; 32], ..config(INITIATOR, SECRET) };
    let again = Handshake::initiator(again, Purpose::Transfer, SESSION);
    let mut victim = Pair::new(again, acceptor(SECRET)).i;
    for (from_initiator, raw) in &pair.sent {
        if !*from_initiator {
            victim.feed(raw);
        }
    }
    assert_eq!(victim.failure().kind, ReasonKind::AuthError);
}

#[test]
fn a_downgrade_is_found_out() {
    type Change = fn(&mut Frame);
    let changes: [(usize, Change); 6] = [
        (0, |f| {
            if let Msg::Hello(m) = &mut f.msg {
                m.versions = (1, 1);
            }
        }),
        (0, |f| {
            if let Msg::Hello(m) = &mut f.msg {
                m.features = 0;
            }
        }),
        (0, |f| {
            if let Msg::Hello(m) = &mut f.msg {
                m.purpose = Purpose::Lookup;
            }
        }),
        (0, |f| {
            if let Msg::Hello(m) = &mut f.msg {
                m.session = SessionNo(1);
            }
        }),
        (1, |f| {
            if let Msg::Challenge(m) = &mut f.msg {
                m.version = 1;
            }
        }),
        (1, |f| {
            if let Msg::Challenge(m) = &mut f.msg {
                m.features = 0;
            }
        }),
    ];
    let newer = |incarnation| Config { versions: (1, 2), ..config(incarnation, SECRET) };
    let pair = || {
        Pair::new(
            Handshake::initiator(newer(INITIATOR), Purpose::Transfer, SESSION),
            Handshake::acceptor(newer(ACCEPTOR)),
        )
    };
    let mut honest = pair();
    honest.run();
    assert_eq!(established(&honest.i.hs).met.version, 2);
    for (at, change) in changes {
        let mut pair = pair();
        pair.run_with(|n, raw| {
            if n == at {
                reencode(raw, change);
            }
        });
        for reason in [pair.i.failure(), pair.a.failure()] {
            assert_eq!(reason.kind, ReasonKind::AuthError, "{reason}");
        }
    }
}

#[test]
fn frames_left_out_are_found_out() {
    for lost in 0..4 {
        let mut pair = Pair::new(initiator(SECRET), acceptor(SECRET));
        pair.run_with(|n, raw| {
            if n == lost {
                raw.clear();
            }
        });
        pair.eof();
        assert!(!pair.i.established() && !pair.a.established(), "without frame {lost}");
    }
    // Describe where the proof belongs.
    let mut pair = Pair::new(initiator(SECRET), acceptor(SECRET));
    pair.run_with(|n, raw| {
        if n == 3 {
            let msg = Msg::Describe(Box::new(describe("prefill-0", Role::Prefill)));
            reencode(raw, |frame| frame.msg = msg);
        }
    });
    assert_eq!(pair.i.failure().kind, ReasonKind::AuthError);
    assert!(pair.i.failure().text.contains("Describe where Accept belongs"));
}

#[test]
fn case_18_versions_that_do_not_meet_are_named_on_both_sides() {
    for (ours, theirs) in [((1, 2), (3, 4)), ((5, 6), (1, 1))] {
        let hello = Config { versions: ours, ..config(INITIATOR, SECRET) };
        let answer = Config { versions: theirs, ..config(ACCEPTOR, SECRET) };
        let hello = Handshake::initiator(hello, Purpose::Transfer, SESSION);
        let mut pair = Pair::new(hello, Handshake::acceptor(answer));
        pair.run();
        let want = format!(
            "the initiator speaks {} to {}, the acceptor {} to {}",
            ours.0, ours.1, theirs.0, theirs.1
        );
        for reason in [pair.i.failure(), pair.a.failure()] {
            assert_eq!(reason.kind, ReasonKind::VersionMismatch);
            assert!(reason.text.contains(&want), "{reason}");
        }
    }
    // An acceptor that chooses what was not offered.
    let mut pair = Pair::new(initiator(SECRET), acceptor(SECRET));
    pair.run_with(|n, raw| {
        if n == 1 {
            reencode(raw, |f| {
                if let Msg::Challenge(m) = &mut f.msg {
                    m.version = 7;
                }
            });
        }
    });
    assert_eq!(pair.i.failure().kind, ReasonKind::VersionMismatch);
    assert!(pair.a.failure().text.contains("chose wire version 7, the initiator speaks 1 to 1"));
}

#[test]
fn other_protocols_are_named_as_such() {
    let cases: [(&[u8], &str); 4] = [
        (b"GET / HTTP/1.1\r\nHost: x\r\n\r\n", "GET / HTTP/1.1\\r\\n"),
        (b"SSH-2.0-OpenSSH_9.2\r\n", "SSH-2.0-OpenSSH_"),
        (&[0; 40], "\\x00\\x00"),
        (
            b"\x4a\0\0\0\x0a8.0.36\0aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa",
            "J\\x00\\x00\\x00\\n8.0",
        ),
    ];
    for (bytes, want) in cases {
        let pair = Pair::new(initiator(SECRET), acceptor(SECRET));
        for mut end in [pair.i, pair.a] {
            end.feed(bytes);
            let reason = end.failure();
            assert_eq!(reason.kind, ReasonKind::ProtocolError);
            assert!(reason.text.contains("the peer is not kvxfer"), "{reason}");
            assert!(reason.text.contains(want), "{reason}");
        }
    }
    // TLS, from either end: most likely kvxfer with other settings.
    for bytes in [b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03".as_slice(), b"\x15\x03\x03\x00\x02\x02\x28"]
    {
        let pair = Pair::new(initiator(SECRET), acceptor(SECRET));
        for (mut end, peer) in [(pair.i, "acceptor"), (pair.a, "initiator")] {
            end.feed(bytes);
            let reason = end.failure();
            assert_eq!(reason.kind, ReasonKind::AuthError);
            assert!(reason.text.contains(&format!("tls differs: the {peer} has TLS")), "{reason}");
        }
    }
    // kvxfer, but not where a connection starts.
    let mut pair = Pair::new(initiator(SECRET), acceptor(SECRET));
    let frame = Frame { incarnation: INITIATOR, session: SessionNo(0), number: 0, msg: Msg::Ping(1) };
    let mut raw = Vec::new();
    wire::encode(&frame, &mut raw).unwrap();
    pair.a.feed(&raw);
    assert_eq!(pair.a.failure().text, "Ping where Hello belongs");
}

#[test]
fn a_refusal_before_the_proof_is_no_mismatch() {
    // Anybody can write this, so the caller must not take it for the peer's layout.
    let mut end = Pair::new(initiator(SECRET), acceptor(SECRET)).i;
    let frame = Frame {
        incarnation: ACCEPTOR,
        session: SessionNo(0),
        number: 0,
        msg: Msg::Refuse(Reason::new(ReasonKind::LayoutMismatch, "red\u{1b}[31m\nline")),
    };
    let mut raw = Vec::new();
    wire::encode(&frame, &mut raw).unwrap();
    end.feed(&raw);
    assert!(matches!(end.hs.outcome(), Some(Outcome::Failed(_))));
    assert_eq!(end.failure().text, "refused by the peer: red [31m line");
    assert!(end.hs.poll_frame().is_some(), "its Hello");
    assert_eq!(end.hs.poll_frame(), None, "a refusal is not answered");
}

#[test]
fn stale_frames_are_told_from_fresh_ones() {
    let mut pair = Pair::new(initiator(SECRET), acceptor(SECRET));
    pair.run();
    let peer = established(&pair.i.hs);
    let fresh = Frame { incarnation: ACCEPTOR, session: SESSION, number: 1, msg: Msg::Ack(1) };
    assert_eq!(peer.check(&fresh), Ok(()));
    let reason = peer.check(&Frame { session: SessionNo(4), ..fresh.clone() }).unwrap_err();
    assert_eq!(
        reason.text,
        "stale frame: incarnation 0000000000002222 session 4, this connection is incarnation 0000000000002222 session 5"
    );
    assert!(peer.check(&Frame { incarnation: Incarnation(1), ..fresh }).is_err());
}

#[test]
fn what_follows_the_handshake_stays_in_the_decoder() {
    let mut pair = Pair::new(initiator(SECRET), acceptor(SECRET));
    let after = Frame { incarnation: INITIATOR, session: SESSION, number: 0, msg: Msg::Ping(9) };
    pair.run_with(|n, raw| {
        if n == 4 {
            wire::encode(&after, raw).unwrap();
        }
    });
    assert!(pair.i.established() && pair.a.established());
    let left: Vec<_> =
        [&mut pair.i, &mut pair.a].into_iter().filter_map(|end| end.decoder.next_frame().unwrap()).collect();
    assert_eq!(left.len(), 1);
    assert_eq!(left[0], Decoded::Frame(after));
}

#[test]
fn aborting_tells_the_peer() {
    let mut pair = Pair::new(initiator(SECRET), acceptor(SECRET));
    pair.a.hs.abort(Reason::new(ReasonKind::Unhealthy, "quarantine is full"));
    pair.run();
    assert_eq!(pair.i.failure().kind, ReasonKind::Unhealthy);
    assert_eq!(pair.i.failure().text, "refused by the peer: quarantine is full");
    let mut silent = initiator(SECRET);
    silent.handle_eof();
    let Some(Outcome::Failed(reason)) = silent.outcome() else { panic!() };
    assert_eq!(reason.kind, ReasonKind::PeerLost);
    assert!(reason.text.contains("before its Challenge"), "{reason}");
}

#[test]
fn a_describe_that_does_not_fit_fails_both_sides() {
    let mut pair = Pair::new(initiator(SECRET), acceptor(SECRET));
    pair.a.describe.name = "n".repeat(5_000);
    pair.run();
    for reason in [pair.i.failure(), pair.a.failure()] {
        assert_eq!(reason.kind, ReasonKind::Internal);
        assert!(reason.text.contains("field `name` has 5000 bytes"), "{reason}");
    }
}

fn secrets() -> impl Strategy<Value = Option<&'static [u8]>> {
    prop_oneof![Just(SECRET), Just(None)]
}

fn pair_for(purpose: Purpose, secret: Option<&[u8]>) -> Pair {
    Pair::new(Handshake::initiator(config(INITIATOR, secret), purpose, SESSION), acceptor(secret))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    /// One changed bit in what the proofs cover, or in a proof: nobody passes.
    #[test]
    fn no_changed_transcript_passes(frame in 0usize..4, at: prop::sample::Index, bit in 0u8..8) {
        let mut pair = pair_for(Purpose::Transfer, SECRET);
        pair.run_with(|n, raw| {
            if n == frame {
                let at = at.index(raw.len());
                raw[at] ^= 1 << bit;
            }
        });
        pair.eof();
        prop_assert!(!pair.i.established() && !pair.a.established());
        prop_assert!(pair.i.hs.outcome().is_some() && pair.a.hs.outcome().is_some());
    }

    /// Whatever happens to the bytes, both ends come to an end, and what is queued is a frame.
    #[test]
    fn damage_ends_in_an_outcome(
        secret in secrets(),
        purpose in prop_oneof![Just(Purpose::Transfer), Just(Purpose::Lookup)],
        damage in prop::collection::vec((0usize..7, any::<prop::sample::Index>(), any::<Option<u8>>()), 0..4),
    ) {
        let mut pair = pair_for(purpose, secret);
        pair.run_with(|n, raw| {
            for (frame, at, byte) in &damage {
                if n == *frame && !raw.is_empty() {
                    let at = at.index(raw.len());
                    match byte {
                        Some(byte) => raw[at] = *byte,
                        None => raw.truncate(at),
                    }
                }
            }
        });
        for (_, raw) in &pair.sent {
            prop_assert!(matches!(wire::decode_frame(raw), Ok(Decoded::Frame(_))));
        }
        if damage.is_empty() {
            prop_assert!(pair.i.established() && pair.a.established());
        }
        pair.eof();
        prop_assert!(pair.i.hs.outcome().is_some() && pair.a.hs.outcome().is_some());
    }

    /// Any bytes at all, at any point of the handshake.
    #[test]
    fn garbage_never_passes(
        good in 0usize..4,
        bytes in prop::collection::vec(any::<u8>(), 1..200),
        to_initiator: bool,
    ) {
        let mut pair = pair_for(Purpose::Transfer, SECRET);
        pair.run_with(|n, raw| {
            if n >= good {
                raw.clear();
            }
        });
        let end = if to_initiator { &mut pair.i } else { &mut pair.a };
        end.feed(&bytes);
        end.hs.handle_eof();
        prop_assert!(!end.established());
        prop_assert!(end.hs.outcome().is_some());
        prop_assert!(end.decoder.capacity() <= 4 * MAX_HANDSHAKE_BYTES);
    }
}

#[test]
fn every_bit_of_the_first_four_frames_counts() {
    let mut pair = pair_for(Purpose::Transfer, SECRET);
    pair.run();
    let lengths: Vec<usize> = pair.sent[..4].iter().map(|(_, raw)| raw.len()).collect();
    for (frame, len) in lengths.into_iter().enumerate() {
        for bit in 0..len * 8 {
            let mut pair = pair_for(Purpose::Transfer, SECRET);
            pair.run_with(|n, raw| {
                if n == frame {
                    raw[bit / 8] ^= 1 << (bit % 8);
                }
            });
            assert!(!pair.i.established() && !pair.a.established(), "frame {frame} bit {bit}");
        }
    }
}

#[test]
fn states_can_be_stored_and_compared() {
    fn state<T: Clone + Eq + std::hash::Hash>(_: &T) {}
    state(&initiator(SECRET));
    state(&Decoder::new());
    assert_eq!(initiator(SECRET), initiator(SECRET));
    assert_ne!(initiator(SECRET), initiator(None));
    assert!(!format!("{:?}", initiator(SECRET)).contains("horse"));
}

#[test]
fn proofs_hold_for_the_channel_that_they_were_made_on() {
    let channels = [None, Some([1; 32]), Some([2; 32])];
    for a in channels {
        for b in channels {
            let mut pair = Pair::new(initiator(SECRET), acceptor(SECRET));
            for (end, channel) in [(&mut pair.i, a), (&mut pair.a, b)] {
                if let Some(channel) = channel {
                    end.hs.bind(channel);
                }
            }
            pair.run();
            if a == b {
                established(&pair.i.hs);
                established(&pair.a.hs);
            } else {
                assert_eq!(pair.a.failure().kind, ReasonKind::AuthError, "{a:?} {b:?}");
                assert_eq!(pair.i.failure().kind, ReasonKind::AuthError, "{a:?} {b:?}");
            }
        }
    }
}
