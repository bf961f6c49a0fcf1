//! Checksums (`verify=`): a byte that changed on its way fails the room on both sides, nothing else does, and no page
//! is given back while it is summed for somebody.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation)]

mod sim;

use kvxfer_proto::msg::{Copied, Done, Grant, Msg, Owed, Retract, Verify};
use kvxfer_proto::node::{Config, DeliveryEnd, EventKind, Expect, Mover, PeerKey};
use kvxfer_proto::plan::End;
use kvxfer_proto::{PushId, ReasonKind, Seq};
use sim::Net;
use sim::rooms::{
    BOTH, SECOND, assert_arrived, assert_contract, assert_sound, early_push, expect, failure, fill, ids, net,
    push, room, why, wrong_bytes,
};
use sim::solo::{Solo, done, grant, owed, ready};

const WANTED: [Verify; 2] = [Verify::Full, Verify::Sample];
const SRC: [u32; 3] = [3, 9, 1];
const DST: [u32; 3] = [7, 2, 30];

fn checked(verify: Verify, r: u64, pages: &[u32], tokens: (u64, u64)) -> Expect {
    Expect { verify, ..expect(r, pages, tokens) }
}

/// Tokens 1..12 of room 5, which is summed, from engine to engine; run for two seconds.
fn hand_off(net: &mut Net, d: usize, verify: Verify) {
    for i in 0..d {
        fill(net, i, 5, &SRC, 1, 1..12);
        net.push(i, push(5, 1, &SRC, (1, 12)));
    }
    for i in d..net.nodes.len() {
        net.order(i, |n, now| n.handle_expect(now, checked(verify, 5, &DST, (1, 12))));
    }
    net.run_until(net.now + 2 * SECOND);
}

#[test]
fn every_rank_sums_its_own_bytes_and_they_agree() {
    for mover in BOTH {
        for (p, dn) in [(1, 1), (2, 1), (1, 2), (4, 2), (2, 4)] {
            for verify in WANTED {
                let (mut net, d) = net(7, mover, p, dn);
                net.copy_us = (0, 50);
                hand_off(&mut net, d, verify);
                for i in 0..net.nodes.len() {
                    assert!(assert_contract(&net, i, 5), "{mover:?} {verify:?} {p}->{dn}: node {i}");
                }
                for i in d..net.nodes.len() {
                    assert_arrived(&mut net, i, 5, &DST, 1, 1..12);
                }
                // Both ends of each piece.
                assert_eq!(net.sums_ended, 2 * u64::from(p.max(dn)));
            }
        }
    }
}

#[test]
fn a_room_that_asks_for_no_checksum_is_not_summed() {
    for mover in BOTH {
        let (mut net, d) = net(7, mover, 2, 1);
        hand_off(&mut net, d, Verify::Off);
        assert!(assert_contract(&net, d, 5));
        assert_eq!(net.sums_ended, 0);
    }
}

#[test]
fn chunks_and_layers_are_summed_one_by_one() {
    for mover in BOTH {
        for verify in WANTED {
            let (mut net, d) = net(8, mover, 2, 1);
            net.copy_us = (0, 50);
            net.order(d, |n, now| n.handle_expect(now, checked(verify, 5, &DST, (0, 12))));
            for i in 0..2 {
                fill(&mut net, i, 5, &SRC, 0, 0..12);
                for layer in 0..2 {
                    let mut p = early_push(5, 1 + u64::from(layer), &SRC[..1], (0, 4));
                    p.layers = Some((layer, layer + 1));
                    net.push(i, p);
                }
                net.push(i, early_push(5, 3, &SRC[1..], (4, 12)));
                // The last one brings nothing: it must not overtake what is still being summed.
                net.push(i, push(5, 4, &[], (12, 12)));
            }
            net.run_until(2 * SECOND);
            for i in 0..3 {
                assert!(assert_contract(&net, i, 5), "{mover:?} {verify:?}: node {i}");
            }
            assert_arrived(&mut net, d, 5, &DST, 0, 0..12);
            assert_eq!(net.sums_ended, 2 * 2 * 3);
        }
    }
}

/// The two sums that a mismatch names.
fn sums_in(text: &str) -> Vec<u64> {
    text.split("0x").skip(1).map(|s| u64::from_str_radix(&s[..16], 16).unwrap()).collect()
}

#[test]
fn a_byte_that_is_flipped_in_flight_fails_the_room_on_both_sides() {
    for mover in BOTH {
        // Every seventh byte of the 11 tokens, 2 layers, 2 tensors, 4 heads of 2 bytes.
        for byte in (0..352).step_by(7) {
            let (mut net, d) = net(9, mover, 1, 1);
            net.flip = Some(sim::Flip { byte, sampled: None });
            hand_off(&mut net, d, Verify::Full);
            for i in [0, d] {
                assert!(!assert_contract(&net, i, 5), "byte {byte}, node {i}: it passed");
                let reason = failure(&net, i, 5);
                assert_eq!(reason.kind, ReasonKind::ChecksumMismatch);
                let sums = sums_in(&reason.text);
                assert!(sums.len() == 2 && sums[0] != sums[1], "{}", reason.text);
            }
            assert_eq!(failure(&net, 0, 5).text, failure(&net, d, 5).text);
            assert_eq!(wrong_bytes(&mut net, d, 5, &DST, 1, 1..12), 1);
            // The pages are free for the next room, and the peer is as good as before.
            net.flip = None;
            fill(&mut net, 0, 6, &SRC, 0, 0..12);
            net.order(d, |n, now| n.handle_expect(now, checked(Verify::Full, 6, &DST, (0, 12))));
            net.push(0, push(6, 2, &SRC, (0, 12)));
            net.run_until(net.now + 2 * SECOND);
            assert!(assert_contract(&net, 0, 6) && assert_contract(&net, d, 6));
            assert_arrived(&mut net, d, 6, &DST, 0, 0..12);
        }
    }
}

/// What a sample finds, and what it does not: the documentation says so.
#[test]
fn a_sample_finds_a_flipped_byte_only_in_a_sampled_row() {
    for mover in BOTH {
        for byte in (0..80).step_by(9) {
            for sampled in [true, false] {
                let (mut net, d) = net(10, mover, 1, 1);
                net.flip = Some(sim::Flip { byte, sampled: Some(sampled) });
                hand_off(&mut net, d, Verify::Sample);
                assert_eq!(wrong_bytes(&mut net, d, 5, &DST, 1, 1..12), 1);
                assert_eq!(assert_contract(&net, d, 5), !sampled, "{mover:?}, byte {byte}");
                assert_eq!(assert_contract(&net, 0, 5), !sampled);
                if sampled {
                    assert_eq!(failure(&net, d, 5).kind, ReasonKind::ChecksumMismatch);
                }
            }
        }
    }
}

/// The engine takes a push back at any time, gives its pages away and pushes again from others.
#[test]
fn retracted_and_replaced_while_either_side_sums() {
    for mover in BOTH {
        for verify in WANTED {
            for pause in (0..2000).step_by(7) {
                let (mut net, d) = net(11 + pause, mover, 1, 1);
                net.copy_us = (5, 20);
                // Writes overtake messages: only what the sides say to each other keeps them apart.
                net.control_us = (20, 200);
                net.data_us = (1, 10);
                net.order(d, |n, now| n.handle_expect(now, checked(verify, 5, &DST, (0, 12))));
                fill(&mut net, 0, 5, &SRC, 0, 0..12);
                net.push(0, early_push(5, 1, &SRC, (0, 12)));
                net.run_until(pause);
                net.order(0, |n, now| n.handle_retract(now, room(5), PushId(1)));
                // The replacement differs from what it replaces: a sum of both is wrong.
                fill(&mut net, 0, 77, &[20, 21, 22], 0, 0..12);
                net.push(0, early_push(5, 2, &[20, 21, 22], (0, 12)));
                net.run_until(pause + 1000);
                let back = |net: &Net| net.events_of(0, room(5)).contains(&&EventKind::Retracted(PushId(1)));
                if back(&net) {
                    // What is released may be overwritten.
                    fill(&mut net, 0, 66, &SRC, 0, 0..12);
                }
                net.push(0, push(5, 3, &[], (12, 12)));
                net.run_until(SECOND);
                assert!(back(&net));
                assert!(assert_contract(&net, 0, 5), "{mover:?} {verify:?} after {pause} us");
                assert!(assert_contract(&net, d, 5), "{mover:?} {verify:?} after {pause} us");
                assert_eq!(wrong_bytes(&mut net, d, 77, &DST, 0, 0..12), 0);
            }
        }
    }
}

#[test]
fn cancelled_at_any_time_of_a_sum() {
    for mover in BOTH {
        for who in 0..2 {
            for pause in (0..1600).step_by(25) {
                let (mut net, d) = net(12, mover, 1, 1);
                net.copy_us = (20, 60);
                net.data_us = (20, 60);
                net.order(d, |n, now| n.handle_expect(now, checked(Verify::Full, 5, &DST, (0, 12))));
                fill(&mut net, 0, 5, &SRC, 0, 0..12);
                net.push(0, push(5, 1, &SRC, (0, 12)));
                net.run_until(pause);
                let node = [0, d][who];
                net.order(node, |n, now| n.handle_cancel(now, room(5), why(ReasonKind::Cancelled)));
                net.run_until(60 * SECOND);
                let ends = (assert_contract(&net, 0, 5), assert_contract(&net, d, 5));
                if ends.1 {
                    assert_arrived(&mut net, d, 5, &DST, 0, 0..12);
                }
                for n in &net.nodes {
                    let g = n.node.gauges();
                    assert_eq!((g.granted_pages, g.quarantined_pages, g.deliveries), (0, 0, 0));
                }
            }
        }
    }
}

#[test]
fn lost_sessions_and_restarts_while_something_is_summed() {
    for mover in BOTH {
        for pause in (0..1600).step_by(40) {
            for restart in [None, Some(0), Some(1)] {
                let (mut net, d) = net(13, mover, 1, 1);
                net.copy_us = (20, 60);
                net.data_us = (20, 60);
                net.order(d, |n, now| n.handle_expect(now, checked(Verify::Full, 5, &DST, (0, 12))));
                fill(&mut net, 0, 5, &SRC, 0, 0..12);
                net.push(0, push(5, 1, &SRC, (0, 12)));
                net.run_until(pause);
                match restart {
                    None => net.cut_session(0, d, pause % 80 == 0),
                    Some(node) => net.restart(node, Config::default()),
                }
                net.run_until(700 * SECOND);
                assert_sound(&net);
                for (i, n) in net.nodes.iter().enumerate() {
                    let g = n.node.gauges();
                    assert_eq!((g.granted_pages, g.quarantined_pages, g.deliveries), (0, 0, 0), "node {i}");
                    if restart.is_none() {
                        assert!(assert_contract(&net, i, 5), "{mover:?} cut after {pause} us");
                    }
                }
            }
        }
    }
}

// One node by hand.

/// A source that was granted room 1 with checksums and has pushed tokens 0..4 of it.
fn source(mover: Mover) -> (Solo, PeerKey) {
    let mut s = Solo::new(Config::default());
    let k = s.dest_up(20, mover);
    s.order(|n, now| n.handle_push(now, early_push(1, 1, &[1], (0, 4))));
    let Msg::Grant(g) = grant(1, 1, &[1]) else { panic!() };
    s.recv(k, Msg::Grant(Grant { verify: Verify::Full, ..g })).unwrap();
    (s, k)
}

/// The same, delivered: it is being summed.
fn summing_source(mover: Mover) -> (Solo, PeerKey) {
    let (mut s, k) = source(mover);
    moved(&mut s, k, mover, 1);
    (s, k)
}

/// A push of the source is delivered.
fn moved(s: &mut Solo, k: PeerKey, mover: Mover, push: u64) {
    match mover {
        Mover::Sender => {
            s.end(s.delivers.len() - 1, DeliveryEnd::Complete { bytes: 64, writes: 2 });
        }
        Mover::Receiver => {
            let copied = Copied { room: room(1), seq: Seq(1), push: PushId(push), error: None };
            s.recv(k, Msg::Copied(copied)).unwrap();
        }
    }
}

fn dones(s: &Solo) -> Vec<Done> {
    let done = |msg: &Msg| if let Msg::Done(d) = msg { Some(d.clone()) } else { None };
    s.sent.iter().filter_map(|(_, _, msg)| done(msg)).collect()
}

#[test]
fn a_source_says_done_with_its_sum_and_not_before() {
    for mover in BOTH {
        let (mut s, _) = summing_source(mover);
        assert_eq!(s.sums.len(), 1);
        let extent = &s.sums[0].extent;
        assert_eq!((extent.end, &extent.pages, extent.list.start), (End::Source, &ids(&[1]), 0));
        assert_eq!((extent.tokens.clone(), extent.layers.clone(), extent.sample), (0..4, 0..2, false));
        assert_eq!(dones(&s), vec![]);
        s.summed(0, DeliveryEnd::Summed(77));
        let done = dones(&s);
        assert_eq!(done.len(), 1);
        assert_eq!(done[0].checksum, Some(77));
        assert_eq!(done[0].bytes, if mover == Mover::Sender { 64 } else { 0 });
    }
}

#[test]
fn a_source_that_is_summed_holds_its_pages_until_the_sum_has_stopped() {
    for mover in BOTH {
        // A cancel of its own, of the other side, a lost peer, and the end of the agent.
        for how in 0..4 {
            let (mut s, k) = summing_source(mover);
            match how {
                0 => s.order(|n, now| n.handle_cancel(now, room(1), why(ReasonKind::Cancelled))),
                1 => {
                    let reason = why(ReasonKind::Cancelled);
                    let cancel = kvxfer_proto::msg::Cancel { room: room(1), upto: Seq(1), reason };
                    s.recv(k, Msg::Cancel(cancel)).unwrap();
                }
                2 => s.order(|n, now| n.handle_fabric_broken(now, k, &why(ReasonKind::FabricError))),
                _ => s.order(|n, now| n.handle_close(now)),
            }
            assert!(s.aborts.contains(&s.sums[0].id), "how {how}");
            assert_eq!(s.endings(1), (1, 0), "how {how}: {:?}", s.events);
            assert!(how == 2 || s.drained(k, 1).is_none());
            s.summed(0, DeliveryEnd::Aborted);
            assert_eq!(s.endings(1), (1, 1), "how {how}: {:?}", s.events);
            assert_eq!(dones(&s), vec![]);
            assert_eq!(s.drained(k, 1).is_some(), how != 2);
        }
    }
}

#[test]
fn a_fence_ends_the_sums_with_its_peer() {
    for mover in BOTH {
        let (mut s, k) = summing_source(mover);
        s.order(|n, now| n.handle_fabric_broken(now, k, &why(ReasonKind::FabricError)));
        // As in the engine, a fence drops the sum and reports no end of its own.
        s.order(|n, now| n.handle_fenced(now, k, Ok(())));
        assert_eq!(s.endings(1), (1, 1), "{:?}", s.events);
        assert_eq!(s.node.gauges().deliveries, 0);

        let (mut s, a) = summing_decode(mover);
        s.order(|n, now| n.handle_fabric_broken(now, a, &why(ReasonKind::FabricError)));
        assert!(s.aborts.contains(&s.sums[0].id));
        s.order(|n, now| n.handle_fenced(now, a, Ok(())));
        assert_eq!(s.endings(99), (1, 1), "{:?}", s.events);
        assert_eq!(s.node.gauges().deliveries, 0);
    }
}

#[test]
fn a_push_that_is_taken_back_is_released_when_its_sum_has_stopped() {
    for mover in BOTH {
        let (mut s, k) = summing_source(mover);
        s.order(|n, now| n.handle_retract(now, room(1), PushId(1)));
        s.order(|n, now| n.handle_push(now, push(1, 2, &[2], (0, 4))));
        assert_eq!(s.aborts, vec![s.sums[0].id]);
        assert_eq!(s.events, vec![]);
        let retracts = s.sent.iter().filter(|(_, _, m)| matches!(m, Msg::Retract(_))).count();
        // Where we write, the destination has not heard of the push.
        assert_eq!(retracts, usize::from(mover == Mover::Receiver));
        // A sum that was finished before the stop counts for nothing.
        s.summed(0, DeliveryEnd::Summed(77));
        assert!(matches!(s.events[..], [ref e] if e.kind == EventKind::Retracted(PushId(1))));
        assert_eq!(dones(&s), vec![]);
        moved(&mut s, k, mover, 2);
        s.summed(1, DeliveryEnd::Summed(78));
        assert_eq!(dones(&s)[0].checksum, Some(78));
    }
}

/// Else decode could see bytes of both under one sum, and fail a room of which nothing is wrong.
#[test]
fn where_we_write_a_replacement_waits_until_decode_has_read_what_it_replaces() {
    let (mut s, k) = summing_source(Mover::Sender);
    s.summed(0, DeliveryEnd::Summed(77));
    s.order(|n, now| n.handle_retract(now, room(1), PushId(1)));
    // The pages are the engine's at once; it is the writing that waits.
    assert!(matches!(s.events[..], [ref e] if e.kind == EventKind::Retracted(PushId(1)) && e.released));
    s.order(|n, now| n.handle_push(now, push(1, 2, &[2], (0, 4))));
    assert_eq!(s.delivers.len(), 1);
    let copied = |push| Msg::Copied(Copied { room: room(1), seq: Seq(1), push: PushId(push), error: None });
    s.recv(k, copied(5)).unwrap();
    assert_eq!(s.delivers.len(), 1, "another push");
    s.recv(k, copied(1)).unwrap();
    assert_eq!(s.delivers.len(), 2);

    // Without checksums nobody reads, and nothing waits.
    let mut s = Solo::new(Config::default());
    let k = s.dest_up(20, Mover::Sender);
    s.order(|n, now| n.handle_push(now, early_push(1, 1, &[1], (0, 4))));
    s.recv(k, grant(1, 1, &[1])).unwrap();
    s.end(0, DeliveryEnd::Complete { bytes: 64, writes: 2 });
    s.order(|n, now| n.handle_retract(now, room(1), PushId(1)));
    s.order(|n, now| n.handle_push(now, push(1, 2, &[2], (0, 4))));
    assert_eq!((s.delivers.len(), s.sums.len()), (2, 0));
}

#[test]
fn a_sum_that_cannot_be_made_fails_the_room() {
    for mover in BOTH {
        for end in [DeliveryEnd::Failed(why(ReasonKind::PageError)), DeliveryEnd::Aborted] {
            let (mut s, k) = summing_source(mover);
            s.summed(0, end.clone());
            assert_eq!(s.endings(1), (1, 1), "{:?}", s.events);
            assert!(s.drained(k, 1).is_some());
            let (mut s, _) = summing_decode(mover);
            s.summed(0, end);
            assert_eq!(s.endings(99).0, 1, "{:?}", s.events);
        }
    }
}

/// Decode that expects room 99 with checksums.
fn decode(mover: Mover) -> (Solo, PeerKey) {
    let mut s = Solo::decode_of(&[10], checked(Verify::Full, 99, &[31], (0, 4)));
    let a = s.source_up(10, mover);
    (s, a)
}

fn done_with(push: u64, tokens: (u64, u64), last: bool, checksum: Option<u64>) -> Msg {
    let Msg::Done(d) = done(99, 1, push, tokens, last) else { panic!() };
    Msg::Done(Done { checksum, end_token: 4, ..d })
}

/// The same, told that tokens 0..4 are there and sum to 77.
fn summing_decode(mover: Mover) -> (Solo, PeerKey) {
    let (mut s, a) = decode(mover);
    if mover == Mover::Receiver {
        s.recv(a, ready(99, 1, 1, &[1])).unwrap();
        s.end(0, DeliveryEnd::Complete { bytes: 64, writes: 2 });
    }
    s.recv(a, done_with(1, (0, 4), true, Some(77))).unwrap();
    assert_eq!(s.sums.len(), 1);
    let extent = &s.sums[0].extent;
    assert_eq!((extent.end, &extent.pages, extent.list.start), (End::Destination, &ids(&[31]), 0));
    assert_eq!((extent.tokens.clone(), extent.layers.clone(), extent.sample), (0..4, 0..2, false));
    (s, a)
}

fn failed_as(s: &Solo, r: u64) -> Option<ReasonKind> {
    s.events.iter().filter(|e| e.room == room(r)).find_map(|e| match &e.kind {
        EventKind::Failed(reason) => Some(reason.kind),
        _ => None,
    })
}

#[test]
fn decode_succeeds_after_its_own_sum_and_only_if_it_is_equal() {
    for mover in BOTH {
        let (mut s, _) = summing_decode(mover);
        assert_eq!(s.endings(99), (0, 0));
        s.summed(0, DeliveryEnd::Summed(77));
        assert_eq!(s.endings(99), (1, 1));
        assert_eq!(failed_as(&s, 99), None);

        let (mut s, _) = summing_decode(mover);
        s.summed(0, DeliveryEnd::Summed(78));
        assert_eq!(failed_as(&s, 99), Some(ReasonKind::ChecksumMismatch));
    }
}

#[test]
fn done_without_the_checksum_that_was_asked_for_breaks_the_protocol() {
    for mover in BOTH {
        let (mut s, a) = decode(mover);
        if mover == Mover::Receiver {
            s.recv(a, ready(99, 1, 1, &[1])).unwrap();
            s.end(0, DeliveryEnd::Complete { bytes: 64, writes: 2 });
        }
        s.recv(a, done_with(1, (0, 4), true, None)).unwrap();
        assert_eq!(failed_as(&s, 99), Some(ReasonKind::ProtocolError));
        assert_eq!(s.sums.len(), 0);
    }
    // A piece that was not granted is refused as ever, and not summed.
    let (mut s, a) = decode(Mover::Sender);
    s.recv(a, done_with(1, (0, 8), true, Some(1))).unwrap();
    assert_eq!((failed_as(&s, 99), s.sums.len()), (Some(ReasonKind::TokensMismatch), 0));
}

/// Pieces are summed one at a time, and the last one is counted last whichever sum is shorter.
#[test]
fn pieces_count_in_the_order_in_which_they_were_said_to_be_done() {
    let (mut s, a) = decode(Mover::Sender);
    s.recv(a, done_with(1, (0, 2), false, Some(1))).unwrap();
    s.recv(a, done_with(2, (2, 4), false, Some(2))).unwrap();
    let nothing = Done {
        span: Owed { layers: (0, 0), tokens: (0, 0) },
        last: true,
        ..dones_of(&done_with(3, (4, 4), true, None))
    };
    s.recv(a, Msg::Done(nothing)).unwrap();
    assert_eq!(s.sums.len(), 1);
    s.summed(0, DeliveryEnd::Summed(1));
    assert_eq!(s.sums.len(), 2);
    assert_eq!(s.endings(99), (0, 0), "the last one waits for the second sum");
    s.summed(1, DeliveryEnd::Summed(2));
    assert_eq!(s.endings(99), (1, 1));
    assert_eq!(failed_as(&s, 99), None);
}

fn dones_of(msg: &Msg) -> Done {
    let Msg::Done(d) = msg else { panic!("{msg:?}") };
    d.clone()
}

#[test]
fn a_retract_ends_the_sum_of_its_push_and_no_other() {
    for mover in BOTH {
        let (mut s, a) = decode(mover);
        for push in [1, 2] {
            if mover == Mover::Receiver {
                let Msg::Ready(mut m) = ready(99, 1, push, &[1]) else { panic!() };
                m.span = owed(((push - 1) * 2, push * 2));
                s.recv(a, Msg::Ready(m)).unwrap();
                s.end(push as usize - 1, DeliveryEnd::Complete { bytes: 64, writes: 2 });
            }
            s.recv(a, done_with(push, ((push - 1) * 2, push * 2), false, Some(push))).unwrap();
        }
        let retract = |push| Msg::Retract(Retract { room: room(99), seq: Seq(1), push: PushId(push) });
        s.recv(a, retract(1)).unwrap();
        assert_eq!(s.aborts, vec![s.sums[0].id]);
        assert_eq!(s.sums.len(), 2, "the next one begins");
        // Whatever the stopped one gives is not looked at.
        s.summed(0, DeliveryEnd::Summed(999));
        assert_eq!(s.events, vec![]);
        let read: Vec<u64> = s
            .sent
            .iter()
            .filter_map(|(_, _, m)| if let Msg::Copied(c) = m { Some(c.push.0) } else { None })
            .collect();
        // Where the sender writes it must know that nobody reads push 1 any more; else these are the copies.
        assert_eq!(read, if mover == Mover::Sender { vec![1] } else { vec![1, 2] });
        s.summed(1, DeliveryEnd::Summed(2));
        assert_eq!(s.events, vec![], "half of it is missing");
    }
}

#[test]
fn a_room_that_fails_stops_its_sum_and_waits_for_nobody_to_read() {
    for mover in BOTH {
        let (mut s, a) = summing_decode(mover);
        s.order(|n, now| n.handle_cancel(now, room(99), why(ReasonKind::Cancelled)));
        assert_eq!(s.aborts, vec![s.sums[0].id]);
        // A sum only reads: what holds the pages is who may still write them.
        assert_eq!(s.endings(99), (1, usize::from(mover == Mover::Receiver)));
        let reason = why(ReasonKind::Cancelled);
        let drained = kvxfer_proto::msg::Drained { room: room(99), seq: Seq(1), reason };
        s.recv(a, Msg::Drained(drained)).unwrap();
        assert_eq!(s.endings(99), (1, 1));
        s.summed(0, DeliveryEnd::Aborted);
        assert_eq!(s.endings(99), (1, 1));
        assert!(s.node.is_quiet());
    }
}
