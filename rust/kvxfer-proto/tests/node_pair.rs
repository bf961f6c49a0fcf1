//! The state machines under virtual time: what an agent promises, with sessions lost, data late, peers restarted.

mod sim;

use kvxfer_proto::node::{Config, EventKind, Mover};
use kvxfer_proto::{PushId, Reason, ReasonKind};
use sim::rooms::{BOTH, SECOND, assert_arrived, assert_contract, expect, failure, fill, net, push, room};
use std::sync::Arc;
use std::time::Duration;

#[test]
fn hand_off_works_whichever_side_comes_first() {
    for mover in BOTH {
        for grant_first in [true, false] {
            let (mut net, d) = net(1, mover, 1, 1);
            let (src, dst) = ([3, 9, 1], [7, 2, 30]);
            fill(&mut net, 0, 5, &src, 0, 0..11);
            let mut p = push(5, 1, &src, (0, 11));
            p.meta = Some(Arc::from(&b"first token"[..]));
            if grant_first {
                net.order(d, |n, now| n.handle_expect(now, expect(5, &dst, (0, 11))));
                net.run_until(SECOND);
                net.push(0, p);
            } else {
                net.push(0, p);
                net.run_until(SECOND);
                net.order(d, |n, now| n.handle_expect(now, expect(5, &dst, (0, 11))));
            }
            net.run_until(2 * SECOND);
            assert!(assert_contract(&net, 0, 5));
            assert!(assert_contract(&net, d, 5));
            assert_arrived(&mut net, d, 5, &dst, 0, 0..11);
            let meta = net.nodes[d].events[0].meta.clone();
            assert_eq!(meta.as_deref(), Some(&b"first token"[..]));
        }
    }
}

#[test]
fn tensor_parallel_up_and_down_covers_each_rank_once() {
    for mover in BOTH {
        for (p, dn) in [(2, 1), (1, 2), (4, 2), (2, 4), (4, 1), (4, 4)] {
            let (mut net, d) = net(7, mover, p, dn);
            let (src, dst) = ([3, 9, 1], [7, 2, 30]);
            for i in 0..p as usize {
                fill(&mut net, i, 5, &src, 0, 0..12);
                net.push(i, push(5, 1, &src, (0, 12)));
            }
            for i in 0..dn as usize {
                net.order(d + i, |n, now| n.handle_expect(now, expect(5, &dst, (0, 12))));
            }
            net.run_until(2 * SECOND);
            for i in 0..p as usize {
                assert!(assert_contract(&net, i, 5), "prefill {i} of {p}->{dn}");
            }
            for i in 0..dn as usize {
                assert!(assert_contract(&net, d + i, 5), "decode {i} of {p}->{dn}");
                assert_arrived(&mut net, d + i, 5, &dst, 0, 0..12);
            }
        }
    }
}

#[test]
fn case_08_and_09_prefix_hits() {
    for mover in BOTH {
        let (mut net, d) = net(2, mover, 1, 1);
        let src = [10, 11, 12, 13, 14];
        fill(&mut net, 0, 1, &src, 0, 0..20);
        net.push(0, push(1, 1, &src, (0, 20)));
        net.order(d, |n, now| n.handle_expect(now, expect(1, &[7, 9], (12, 20))));
        net.run_until(SECOND);
        assert!(assert_contract(&net, d, 1) && assert_contract(&net, 0, 1));
        assert_arrived(&mut net, d, 1, &[7, 9], 12, 12..20);
        // A full hit: nothing to write, one completion on both sides.
        let before = net.writes_landed;
        net.push(0, push(2, 2, &src, (0, 20)));
        net.order(d, |n, now| n.handle_expect(now, expect(2, &[], (20, 20))));
        net.run_until(2 * SECOND);
        assert!(assert_contract(&net, d, 2) && assert_contract(&net, 0, 2));
        assert_eq!(net.writes_landed, before);
    }
}

#[test]
fn case_10_chunks_layers_and_preemption() {
    for mover in BOTH {
        let (mut net, d) = net(3, mover, 1, 1);
        let dst = [20, 21, 22, 23];
        net.order(d, |n, now| n.handle_expect(now, expect(1, &dst, (0, 16))));
        // First chunk by layers, from pages that the engine then takes back.
        fill(&mut net, 0, 1, &[3, 4], 0, 0..8);
        for layer in 0..2u32 {
            let mut p = push(1, 1 + u64::from(layer), &[3, 4], (0, 8));
            p.layers = Some((layer, layer + 1));
            p.last = false;
            net.push(0, p);
        }
        net.run_until(150);
        for id in [1, 2] {
            net.order(0, |n, now| n.handle_retract(now, room(1), PushId(id)));
        }
        net.run_until(SECOND);
        for id in [1, 2] {
            let told =
                net.events_of(0, room(1)).iter().filter(|e| ***e == EventKind::Retracted(PushId(id))).count();
            assert_eq!(told, 1, "push {id} comes back once");
        }
        // Its old pages hold something else now.
        fill(&mut net, 0, 99, &[3, 4], 0, 0..8);
        fill(&mut net, 0, 1, &[9, 10, 11, 12], 0, 0..16);
        let mut p = push(1, 3, &[9, 10], (0, 8));
        p.last = false;
        net.push(0, p);
        net.push(0, push(1, 4, &[11, 12], (8, 16)));
        net.run_until(2 * SECOND);
        assert!(assert_contract(&net, d, 1) && assert_contract(&net, 0, 1));
        assert_arrived(&mut net, d, 1, &dst, 0, 0..16);
    }
}

#[test]
fn last_with_a_gap_and_disagreement_on_tokens_fail_both_sides() {
    for mover in BOTH {
        for (pushed, words) in
            [((4, 12), "delivered only"), ((0, 8), "tokens up to"), ((0, 16), "tokens up to")]
        {
            let (mut net, d) = net(4, mover, 1, 1);
            net.order(d, |n, now| n.handle_expect(now, expect(1, &[1, 2, 3], (0, 12))));
            net.push(0, push(1, 1, &[1, 2, 3, 4], pushed));
            net.run_until(SECOND);
            assert!(!assert_contract(&net, d, 1) && !assert_contract(&net, 0, 1));
            for node in [0, d] {
                let reason = failure(&net, node, 1);
                assert_eq!(reason.kind, ReasonKind::TokensMismatch);
                assert!(reason.text.contains(words), "{}", reason.text);
            }
        }
    }
}

#[test]
fn case_11_cancel_under_a_write_releases_after_its_last_byte() {
    for mover in BOTH {
        for cancel_at in [1, 60, 120, 200, 300, 500, 900] {
            let (mut net, d) = net(cancel_at, mover, 1, 1);
            net.data_us = (200, 2000);
            let pages: Vec<u32> = (10..22).collect();
            fill(&mut net, 0, 1, &pages, 0, 0..48);
            net.push(0, push(1, 1, &pages, (0, 48)));
            net.order(d, |n, now| n.handle_expect(now, expect(1, &pages, (0, 48))));
            net.run_until(cancel_at);
            net.order(d, |n, now| {
                n.handle_cancel(now, room(1), Reason::new(ReasonKind::Cancelled, "by hand"));
            });
            // Whenever the pages are free they are granted to another room at once.
            let mut granted = false;
            while net.now < SECOND {
                let t = net.now;
                net.run_until(t + 50);
                let free = net.nodes[d].events.iter().any(|e| e.room == room(1) && e.released);
                if free && !granted {
                    granted = true;
                    net.order(d, |n, now| n.handle_expect(now, expect(2, &pages, (0, 48))));
                }
            }
            assert!(granted);
            // Copies of our own are over before the later cancels; a write of 48 tokens is not.
            let (at_decode, at_prefill) = (assert_contract(&net, d, 1), assert_contract(&net, 0, 1));
            assert_eq!(at_decode, at_prefill);
            assert!(!at_decode || (mover == Mover::Receiver && cancel_at >= 500), "{mover:?} {cancel_at}");
            if !at_decode {
                assert_eq!(failure(&net, 0, 1).kind, ReasonKind::Cancelled);
            }
        }
    }
}

#[test]
fn case_13_one_piece_of_four_fails_once_and_releases_after_the_rest() {
    for mover in BOTH {
        let (mut net, d) = net(9, mover, 4, 1);
        net.data_us = (500, 3000);
        for i in 0..4 {
            // One source's engine says that it has fewer tokens than the others.
            let tokens = if i == 2 { (0, 8) } else { (0, 12) };
            net.push(i, push(1, 1, &[1, 2, 3], tokens));
        }
        net.order(d, |n, now| n.handle_expect(now, expect(1, &[1, 2, 3], (0, 12))));
        net.run_until(SECOND);
        assert!(!assert_contract(&net, d, 1));
        for i in 0..4 {
            assert!(!assert_contract(&net, i, 1), "source {i}");
        }
    }
}

#[test]
fn case_14_success_only_after_the_last_byte_however_late_the_data() {
    let (mut net, d) = net(11, Mover::Sender, 1, 1);
    net.control_us = (1, 1);
    net.data_us = (5000, 9000);
    fill(&mut net, 0, 1, &[1, 2, 3], 0, 0..12);
    net.push(0, push(1, 1, &[1, 2, 3], (0, 12)));
    net.order(d, |n, now| n.handle_expect(now, expect(1, &[4, 5, 6], (0, 12))));
    while net.nodes[d].events.is_empty() {
        let t = net.now;
        net.run_until(t + 100);
        assert!(t < 10 * SECOND);
    }
    // At the moment of the event, not later.
    assert_arrived(&mut net, d, 1, &[4, 5, 6], 0, 0..12);
    assert!(assert_contract(&net, d, 1));
}

#[test]
fn lost_sessions_change_nothing_but_the_time() {
    for mover in BOTH {
        for late in [false, true] {
            for seed in 0..40 {
                let (mut net, d) = net(seed, mover, 2, 1);
                let dst = [7, 2, 30];
                for i in 0..2 {
                    fill(&mut net, i, 5, &[3, 9, 1], 0, 0..12);
                    net.push(i, push(5, 1, &[3, 9, 1], (0, 12)));
                }
                net.order(d, |n, now| n.handle_expect(now, expect(5, &dst, (0, 12))));
                for _ in 0..4 {
                    let t = net.now + 20 + net.rng.below(400);
                    net.run_until(t);
                    let i = usize::from(net.rng.below(2) == 1);
                    net.cut_session(i, d, late);
                }
                net.run_until(5 * SECOND);
                assert!(assert_contract(&net, d, 5), "seed {seed}");
                assert!(assert_contract(&net, 0, 5) && assert_contract(&net, 1, 5), "seed {seed}");
                assert_arrived(&mut net, d, 5, &dst, 0, 0..12);
            }
        }
    }
}

#[test]
fn case_17_a_restarted_peer_is_another_and_the_next_room_works() {
    for mover in BOTH {
        for at in [50, 150, 300, 600, 2000] {
            let (mut net, d) = net(at, mover, 1, 1);
            net.data_us = (100, 1000);
            net.push(0, push(1, 1, &[1, 2, 3], (0, 12)));
            net.order(d, |n, now| n.handle_expect(now, expect(1, &[4, 5, 6], (0, 12))));
            net.run_until(at);
            net.restart(0, Config::default());
            net.run_until(net.now + 30 * SECOND);
            // Either it had succeeded, or it failed (or waits for the successor, which never pushes it).
            if net.nodes[d].events.is_empty() {
                net.order(d, |n, now| {
                    n.handle_cancel(now, room(1), Reason::new(ReasonKind::Cancelled, "given up"));
                });
                net.run_until(net.now + SECOND);
            }
            assert_contract(&net, d, 1);
            fill(&mut net, 0, 2, &[1, 2, 3], 0, 0..12);
            net.push(0, push(2, 1, &[1, 2, 3], (0, 12)));
            net.order(d, |n, now| n.handle_expect(now, expect(2, &[4, 5, 6], (0, 12))));
            net.run_until(net.now + SECOND);
            assert!(assert_contract(&net, d, 2), "restart at {at}: {:?}", net.events_of(d, room(2)));
            assert_arrived(&mut net, d, 2, &[4, 5, 6], 0, 0..12);
        }
    }
}

#[test]
fn case_12_a_stopped_sender_holds_pages_until_a_fence_and_not_longer() {
    let (mut net, d) = net(5, Mover::Sender, 1, 1);
    net.data_us = (1000, 3000);
    net.push(0, push(1, 1, &[1, 2, 3], (0, 12)));
    net.order(d, |n, now| n.handle_expect(now, expect(1, &[4, 5, 6], (0, 12))));
    net.run_until(1500);
    net.stop(0);
    net.order(d, |n, now| n.handle_cancel(now, room(1), Reason::new(ReasonKind::Cancelled, "by hand")));
    net.run_until(4 * SECOND);
    assert_eq!(net.nodes[d].node.gauges().quarantined_pages, 3, "not released by a cancel alone");
    net.run_until(30 * SECOND);
    assert_eq!(net.nodes[d].node.gauges().quarantined_pages, 0, "the fence released them");
    assert!(!assert_contract(&net, d, 1));
    // It wakes up, learns that it was fenced, and works again.
    net.cont(0);
    net.run_until(40 * SECOND);
    fill(&mut net, 0, 2, &[1, 2, 3], 0, 0..12);
    net.push(0, push(2, 2, &[1, 2, 3], (0, 12)));
    net.order(d, |n, now| n.handle_expect(now, expect(2, &[4, 5, 6], (0, 12))));
    net.run_until(60 * SECOND);
    assert!(assert_contract(&net, d, 2), "{:?}", net.events_of(d, room(2)));
    assert_arrived(&mut net, d, 2, &[4, 5, 6], 0, 0..12);
}

#[test]
fn timeouts_end_rooms_that_nobody_else_ends() {
    for mover in BOTH {
        let (mut net, d) = net(6, mover, 1, 1);
        let mut e = expect(1, &[1], (0, 4));
        e.waiting_timeout = Some(Duration::from_secs(2));
        net.order(d, |n, now| n.handle_expect(now, e));
        let mut p = push(2, 1, &[1], (0, 4));
        p.bootstrap_timeout = Some(Duration::from_secs(3));
        net.push(0, p);
        let mut e = expect(3, &[2], (0, 4));
        e.source.address = "nobody".into();
        e.bootstrap_timeout = Some(Duration::from_secs(1));
        net.order(d, |n, now| n.handle_expect(now, e));
        net.run_until(20 * SECOND);
        for (node, r) in [(d, 1), (0, 2), (d, 3)] {
            assert!(!assert_contract(&net, node, r));
        }
        assert_eq!(failure(&net, d, 1).kind, ReasonKind::TransferTimeout);
        assert_eq!(failure(&net, 0, 2).kind, ReasonKind::TransferTimeout);
        // The directory that answers with nobody ends its room at once.
        assert_eq!(failure(&net, d, 3).kind, ReasonKind::PeerLost);
        assert_eq!(net.nodes[d].node.gauges().granted_pages, 0);
    }
}

#[test]
fn case_16_a_cancel_leaves_a_tombstone_for_later_pushes_and_grants() {
    for mover in BOTH {
        let (mut net, d) = net(8, mover, 1, 1);
        net.order(d, |n, now| n.handle_expect(now, expect(1, &[1], (0, 4))));
        net.run_until(SECOND);
        net.order(d, |n, now| n.handle_cancel(now, room(1), Reason::new(ReasonKind::Cancelled, "user left")));
        net.run_until(2 * SECOND);
        net.push(0, push(1, 1, &[1], (0, 4)));
        net.push(0, push(1, 2, &[1], (0, 4)));
        net.run_until(3 * SECOND);
        assert!(!assert_contract(&net, 0, 1) && !assert_contract(&net, d, 1));
        assert_eq!(failure(&net, 0, 1).text, "user left");
        // The other way: prefill gave up before the grant came.
        net.push(0, push(2, 3, &[1], (0, 4)));
        net.order(0, |n, now| n.handle_cancel(now, room(2), Reason::new(ReasonKind::Cancelled, "preempted")));
        net.order(d, |n, now| n.handle_expect(now, expect(2, &[1], (0, 4))));
        net.run_until(4 * SECOND);
        assert_eq!(failure(&net, d, 2).text, "preempted");
        assert!(!assert_contract(&net, 0, 2) && !assert_contract(&net, d, 2));
    }
}

#[test]
fn bad_pages_fail_their_room_alone() {
    let (mut net, d) = net(12, Mover::Sender, 1, 1);
    net.order(d, |n, now| n.handle_expect(now, expect(1, &[1, 2], (0, 8))));
    for (r, pages) in [(2, [3, 3]), (3, [3, 99]), (4, [2, 3])] {
        net.order(d, |n, now| n.handle_expect(now, expect(r, &pages, (0, 8))));
        assert_eq!(failure(&net, d, r).kind, ReasonKind::PageError);
    }
    net.push(0, push(1, 1, &[1, 2], (0, 8)));
    net.run_until(SECOND);
    assert!(assert_contract(&net, d, 1));
    net.push(0, push(5, 2, &[1, 77], (0, 8)));
    assert_eq!(failure(&net, 0, 5).kind, ReasonKind::PageError);
}

#[test]
fn an_event_holds_a_push_back_and_others_pass_it() {
    for mover in BOTH {
        let (mut net, d) = net(13, mover, 1, 1);
        fill(&mut net, 0, 1, &[1, 2], 0, 0..8);
        let mut late = push(1, 1, &[1], (0, 4));
        late.ready = false;
        late.last = false;
        net.push(0, late);
        net.push(0, push(1, 2, &[2], (4, 8)));
        net.order(d, |n, now| n.handle_expect(now, expect(1, &[5, 6], (0, 8))));
        net.run_until(SECOND);
        assert!(net.events_of(d, room(1)).is_empty(), "nothing is complete before the event");
        let awaited = |net: &sim::Net| [1, 2, 3].map(|n| net.nodes[0].node.is_awaiting(room(1), PushId(n)));
        assert_eq!(awaited(&net), [true, false, false]);
        net.order(0, |n, now| n.handle_push_ready(now, room(1), PushId(1)));
        assert_eq!(awaited(&net), [false; 3]);
        net.run_until(2 * SECOND);
        assert!(assert_contract(&net, d, 1) && assert_contract(&net, 0, 1));
        assert_arrived(&mut net, d, 1, &[5, 6], 0, 0..8);
    }
}

/// Random rooms over random faults, with every page given away again as soon as it is free.
#[test]
fn random_faults_never_break_the_contract() {
    for seed in 0..300u64 {
        let mover = BOTH[(seed % 2) as usize];
        let (mut net, d) = net(seed, mover, 2, 1);
        net.data_us = (50, 5000);
        let mut rooms: Vec<(u64, Vec<u32>)> = Vec::new();
        let mut free: Vec<u32> = (0..32).collect();
        let mut next_room = 1;
        let mut seen = 0;
        for _ in 0..40 {
            let t = net.now + net.rng.below(3000);
            net.run_until(t);
            let events: Vec<_> = net.nodes[d].events[seen..].to_vec();
            seen = net.nodes[d].events.len();
            for e in events.iter().filter(|e| e.released) {
                let (_, pages) = rooms.iter().find(|(r, _)| room(*r) == e.room).unwrap();
                free.extend(pages.iter().copied());
                if e.kind == EventKind::Success {
                    let (r, pages) = (e.room.get(), pages.clone());
                    assert_arrived(&mut net, d, r, &pages, 0, 0..12);
                }
            }
            if free.len() >= 3 {
                let pages = free.split_off(free.len() - 3);
                net.order(d, |n, now| n.handle_expect(now, expect(next_room, &pages, (0, 12))));
                for i in 0..2 {
                    fill(&mut net, i, next_room, &pages, 0, 0..12);
                    net.push(i, push(next_room, next_room * 4, &pages, (0, 12)));
                }
                rooms.push((next_room, pages));
                next_room += 1;
            }
            let victim = room(1 + net.rng.below(next_room));
            match net.rng.below(12) {
                0 | 1 => {
                    let i = usize::from(net.rng.below(2) == 1);
                    net.cut_session(i, d, seed % 3 == 0);
                }
                2 => net.order(d, |n, now| {
                    n.handle_cancel(now, victim, Reason::new(ReasonKind::Cancelled, "random"));
                }),
                3 => {
                    let i = usize::from(net.rng.below(2) == 1);
                    net.order(i, |n, now| {
                        n.handle_cancel(now, victim, Reason::new(ReasonKind::Cancelled, "random"));
                    });
                }
                4 => net.stop(0),
                5 => net.cont(0),
                _ => {}
            }
        }
        net.cont(0);
        net.run_until(net.now + 60 * SECOND);
        for (r, _) in &rooms {
            if net.nodes[d].events.iter().all(|e| e.room != room(*r)) {
                // A cancel that came before its push at one source leaves a room waiting: give it up.
                net.order(d, |n, now| {
                    n.handle_cancel(now, room(*r), Reason::new(ReasonKind::Cancelled, "end"));
                });
            }
        }
        net.run_until(net.now + 60 * SECOND);
        for (r, _) in &rooms {
            assert_contract(&net, d, *r);
        }
        let g = net.nodes[d].node.gauges();
        assert_eq!((g.granted_pages, g.quarantined_pages, g.inbound), (0, 0, 0), "seed {seed}");
    }
}
