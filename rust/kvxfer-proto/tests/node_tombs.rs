//! How long ended rooms are remembered: as long as something may come for them, and else a little.

#![allow(clippy::cast_possible_truncation)]

mod sim;

use kvxfer_proto::node::{Config, EventKind, Mover};
use kvxfer_proto::{Reason, ReasonKind};
use sim::Net;
use sim::rooms::{BOTH, PAGES, SECOND, expect, net_of, push, room};

const SETTLED: usize = 8;
const OPEN: usize = 64;

fn small(mover: Mover, decodes: u32) -> (Net, usize) {
    let cfg = Config { tombstones: OPEN, settled_tombstones: SETTLED, ..Config::default() };
    net_of(21, mover, (1, PAGES), (decodes, PAGES), &cfg)
}

fn left() -> Reason {
    Reason::new(ReasonKind::Cancelled, "user left")
}

fn tombs(net: &Net, node: usize) -> usize {
    net.nodes[node].node.gauges().tombstones as usize
}

fn text(net: &Net, node: usize, r: u64) -> String {
    match net.events_of(node, room(r)).as_slice() {
        [EventKind::Failed(reason), ..] => reason.text.clone(),
        other => panic!("room {r} at {node}: {other:?}"),
    }
}

/// Either side cancels, at once or later, before or after the other has begun: all of them are told, and forgotten.
#[test]
fn rooms_of_whose_end_everybody_knows_take_a_bounded_place() {
    for mover in BOTH {
        for decodes in [1, 2] {
            let (mut net, d) = small(mover, decodes);
            let mut at = SECOND;
            for r in 1..=300u64 {
                let kind = r % 6;
                let page = (r % 8) as u32;
                let canceller = if kind % 2 == 0 { 0 } else { d };
                let pushes = |net: &mut Net| net.push(0, push(r, r, &[page], (0, 4)));
                let expects = |net: &mut Net| {
                    for n in d..d + decodes as usize {
                        net.order(n, |node, now| node.handle_expect(now, expect(r, &[page], (0, 4))));
                    }
                };
                let cancels = |net: &mut Net| {
                    net.order(canceller, |node, now| node.handle_cancel(now, room(r), left()));
                };
                let first: [&dyn Fn(&mut Net); 2] =
                    if canceller == 0 { [&pushes, &expects] } else { [&expects, &pushes] };
                first[0](&mut net);
                if kind < 2 {
                    cancels(&mut net);
                }
                if kind < 4 {
                    at += SECOND / 10;
                    net.run_until(at);
                }
                if (2..4).contains(&kind) {
                    cancels(&mut net);
                }
                first[1](&mut net);
                if kind >= 4 {
                    cancels(&mut net);
                }
                at += SECOND / 10;
                net.run_until(at);
            }
            net.run_until(at + 5 * SECOND);
            for n in 0..=d + decodes as usize - 1 {
                assert!(tombs(&net, n) <= SETTLED, "node {n} remembers {} rooms", tombs(&net, n));
                let gauges = net.nodes[n].node.gauges();
                assert_eq!((gauges.inbound, gauges.outbound, gauges.granted_pages), (0, 0, 0));
            }
            assert!(tombs(&net, 0) > 0);
        }
    }
}

/// However many rooms end meanwhile of which everybody knows.
#[test]
fn a_room_for_which_a_push_may_still_come_is_remembered() {
    for mover in BOTH {
        let (mut net, d) = small(mover, 1);
        net.order(d, |n, now| n.handle_expect(now, expect(1, &[1], (0, 4))));
        net.run_until(SECOND);
        net.order(d, |n, now| n.handle_cancel(now, room(1), left()));
        for r in 2..=200u64 {
            net.order(d, |n, now| n.handle_expect(now, expect(r, &[2], (0, 4))));
            net.push(0, push(r, r, &[2], (0, 4)));
            net.order(0, |n, now| n.handle_cancel(now, room(r), left()));
            net.run_until(SECOND + r * SECOND / 10);
        }
        net.push(0, push(1, 1, &[1], (0, 4)));
        assert_eq!(text(&net, 0, 1), "user left", "at once");
    }
}

/// A grant that is withdrawn before it left takes its room's number with it: prefill learns of the end all the same, although
/// it has seen later grants of that peer.
#[test]
fn case_16_a_room_cancelled_in_the_turn_of_its_expect_fails_a_later_push() {
    for mover in BOTH {
        let (mut net, d) = small(mover, 1);
        net.order(d, |n, now| n.handle_expect(now, expect(1, &[1], (0, 4))));
        net.run_until(SECOND);
        net.order(d, |n, now| {
            n.handle_expect(now, expect(2, &[2], (0, 4)));
            n.handle_expect(now, expect(3, &[3], (0, 4)));
            n.handle_cancel(now, room(2), left());
        });
        net.run_until(2 * SECOND);
        assert_eq!(tombs(&net, 0), 1);
        net.push(0, push(2, 2, &[2], (0, 4)));
        assert_eq!(text(&net, 0, 2), "user left", "at once");
        // Everybody knows now, so that it is one of the few.
        for r in 4..=20u64 {
            net.push(0, push(r, r, &[2], (0, 4)));
            net.order(0, |n, now| n.handle_cancel(now, room(r), left()));
            net.order(d, |n, now| n.handle_expect(now, expect(r, &[4], (0, 4))));
            net.run_until((2 + r) * SECOND);
        }
        assert_eq!(tombs(&net, 0), SETTLED);
    }
}

/// Each decode rank grants once: the dead room is remembered until the last of them has.
#[test]
fn a_dead_room_refuses_the_grants_of_every_rank() {
    for mover in BOTH {
        let (mut net, d) = small(mover, 2);
        net.push(0, push(1, 1, &[1], (0, 4)));
        net.order(0, |n, now| n.handle_cancel(now, room(1), Reason::new(ReasonKind::Cancelled, "preempted")));
        net.order(d, |n, now| n.handle_expect(now, expect(1, &[1], (0, 4))));
        net.run_until(2 * SECOND);
        assert_eq!(text(&net, d, 1), "preempted");
        for r in 2..=40u64 {
            net.push(0, push(r, r, &[2], (0, 4)));
            net.order(0, |n, now| n.handle_cancel(now, room(r), left()));
            for n in [d, d + 1] {
                net.order(n, |node, now| node.handle_expect(now, expect(r, &[4], (0, 4))));
            }
            net.run_until((2 + r) * SECOND);
        }
        assert_eq!(tombs(&net, 0), SETTLED + 1, "the second rank has not granted the first room");
        net.order(d + 1, |n, now| n.handle_expect(now, expect(1, &[1], (0, 4))));
        net.run_until(60 * SECOND);
        assert_eq!(text(&net, d + 1, 1), "preempted");
        assert_eq!(tombs(&net, 0), SETTLED);
    }
}
