//! Faults between real peers under virtual time: preemption at a bad moment, lost ranks, flaps, restarts, evictions.

mod sim;

use kvxfer_proto::node::{Config, Direction, EventKind, Mover, PeerKey};
use kvxfer_proto::{PushId, ReasonKind};
use sim::rooms::{
    BOTH, PAGES, SECOND, assert_arrived, assert_contract, assert_sound, early_push, endings, expect, failure,
    fill, net, net_of, push, room, why,
};
use std::time::Duration;

/// `Finished` is on its way to prefill when its engine takes the push back and delivers again: decode has released
/// the pages by then, and another room holds them.
#[test]
fn a_push_taken_back_after_success_is_not_delivered_again() {
    let (mut net, d) = net(1, Mover::Sender, 1, 1);
    net.data_us = (10, 20);
    net.control_us = (100, 100);
    fill(&mut net, 0, 1, &[1, 2, 3], 0, 0..12);
    net.order(d, |n, now| n.handle_expect(now, expect(1, &[4, 5, 6], (0, 12))));
    net.push(0, push(1, 1, &[1, 2, 3], (0, 12)));
    while net.nodes[d].events.is_empty() {
        assert!(net.now < SECOND);
        net.run_until(net.now + 1);
    }
    assert_eq!(net.nodes[d].node.gauges().granted_pages, 0);
    net.order(0, |n, now| n.handle_retract(now, room(1), PushId(1)));
    net.push(0, push(1, 2, &[7, 8, 9], (0, 12)));
    net.order(d, |n, now| n.handle_expect(now, expect(2, &[4, 5, 6], (0, 12))));
    net.run_until(SECOND);
    assert!(assert_contract(&net, d, 1));
    assert_contract(&net, 0, 1);
}

/// One source of two is complete, is preempted and delivers again: its first `Done` releases nothing any more.
#[test]
fn a_cancel_waits_for_a_source_that_took_its_last_push_back() {
    let (mut net, d) = net(3, Mover::Sender, 2, 1);
    net.data_us = (10, 20);
    net.control_us = (100, 100);
    net.order(d, |n, now| n.handle_expect(now, expect(1, &[4, 5, 6], (0, 12))));
    net.push(0, push(1, 1, &[1, 2, 3], (0, 12)));
    net.run_until(2000);
    net.data_us = (5000, 6000);
    net.order(0, |n, now| n.handle_retract(now, room(1), PushId(1)));
    net.push(0, push(1, 2, &[7, 8, 9], (0, 12)));
    net.order(d, |n, now| n.handle_cancel(now, room(1), why(ReasonKind::Cancelled)));
    net.run_until(SECOND);
    assert!(!assert_contract(&net, d, 1) && !assert_contract(&net, 0, 1));
}

/// The chunk brought nothing that decode wants, so that decode must not lose what it has.
#[test]
fn taking_back_a_chunk_that_nobody_wanted_changes_nothing() {
    for mover in BOTH {
        let (mut net, d) = net(3, mover, 2, 1);
        for i in 0..2 {
            fill(&mut net, i, 1, &[1, 2, 3], 0, 0..12);
        }
        net.order(d, |n, now| n.handle_expect(now, expect(1, &[4], (8, 12))));
        net.push(0, early_push(1, 1, &[1, 2], (0, 8)));
        net.push(0, push(1, 2, &[3], (8, 12)));
        net.run_until(SECOND);
        net.order(0, |n, now| n.handle_retract(now, room(1), PushId(1)));
        net.run_until(2 * SECOND);
        net.push(1, push(1, 2, &[1, 2, 3], (0, 12)));
        net.run_until(10 * SECOND);
        assert!(assert_contract(&net, d, 1), "{mover:?}");
        assert_arrived(&mut net, d, 1, &[4], 8, 8..12);
    }
}

/// Between the two retracts of a preemption the second push's delivery ends: that is no `last` with a gap.
#[test]
fn a_preemption_in_two_steps_fails_nothing() {
    for mover in BOTH {
        let (mut net, d) = net(3, mover, 1, 1);
        net.data_us = (500, 900);
        fill(&mut net, 0, 1, &[7, 8, 9], 0, 0..12);
        net.order(d, |n, now| n.handle_expect(now, expect(1, &[4, 5, 6], (0, 12))));
        net.run_until(SECOND);
        net.push(0, early_push(1, 1, &[1, 2], (0, 8)));
        net.push(0, push(1, 2, &[3], (8, 12)));
        net.order(0, |n, now| n.handle_retract(now, room(1), PushId(1)));
        net.run_until(2 * SECOND);
        net.order(0, |n, now| n.handle_retract(now, room(1), PushId(2)));
        net.push(0, push(1, 3, &[7, 8, 9], (0, 12)));
        net.run_until(3 * SECOND);
        assert!(assert_contract(&net, d, 1) && assert_contract(&net, 0, 1), "{mover:?}");
        assert_arrived(&mut net, d, 1, &[4, 5, 6], 0, 0..12);
    }
}

#[test]
fn an_expect_that_a_decode_rank_refuses_fails_its_room_at_prefill() {
    let (mut net, d) = net(1, Mover::Sender, 1, 2);
    net.push(0, push(1, 1, &[1], (0, 4)));
    net.order(d, |n, now| n.handle_expect(now, expect(1, &[1], (0, 4))));
    net.order(d + 1, |n, now| n.handle_expect(now, expect(1, &[PAGES], (0, 4))));
    net.run_until(10 * SECOND);
    assert!(!assert_contract(&net, 0, 1), "long before any timeout");
    assert_eq!(failure(&net, 0, 1).kind, ReasonKind::PageError);
    assert!(!assert_contract(&net, d + 1, 1));
}

#[test]
fn a_session_has_one_heartbeat_however_often_it_was_made_anew() {
    let (mut net, d) = net(1, Mover::Sender, 1, 1);
    net.order(d, |n, now| n.handle_expect(now, expect(1, &[1], (0, 4))));
    net.run_until(SECOND / 2);
    for _ in 0..50 {
        net.cut_session(0, d, false);
        net.run_until(net.now + SECOND / 50);
    }
    net.run_until(30 * SECOND);
    let before = net.pings;
    net.run_until(40 * SECOND);
    let pings = net.pings - before;
    assert!((18..=22).contains(&pings), "{pings} pings of two nodes in 10 s");
}

/// A session ends while nothing needs it: neither side may take the silence for a loss later.
#[test]
fn an_idle_disconnect_costs_no_room() {
    for cut_ms in (0..3000).step_by(10) {
        let (mut net, d) = net(3, Mover::Sender, 1, 1);
        net.push(0, push(1, 1, &[1, 2, 3], (0, 12)));
        net.order(d, |n, now| n.handle_expect(now, expect(1, &[4, 5, 6], (0, 12))));
        net.run_until(cut_ms * 1000 + 5000);
        net.cut_session(0, d, false);
        net.run_until(60 * SECOND);
        assert!(assert_contract(&net, d, 1));
        net.push(0, push(2, 2, &[1, 2, 3], (0, 12)));
        net.order(d, |n, now| n.handle_expect(now, expect(2, &[4, 5, 6], (0, 12))));
        net.run_until(90 * SECOND);
        assert_eq!(net.events_of(d, room(2)), [&EventKind::Success], "cut after {cut_ms} ms");
    }
}

/// The operator was wrong: the peer lives, and one room may be lost while it learns that it was given up.
#[test]
fn an_evicted_peer_that_lives_is_of_use_again_within_seconds() {
    for mover in BOTH {
        let (mut net, d) = net(3, mover, 1, 1);
        let hand_off = |net: &mut sim::Net, r: u64| {
            net.push(0, push(r, r, &[1, 2, 3], (0, 12)));
            net.order(d, |n, now| n.handle_expect(now, expect(r, &[4, 5, 6], (0, 12))));
            net.run_until(net.now + SECOND / 2);
            let ok = net.events_of(d, room(r)).contains(&&EventKind::Success);
            net.order(d, |n, now| n.handle_cancel(now, room(r), why(ReasonKind::Cancelled)));
            net.run_until(net.now + SECOND / 2);
            assert_eq!(endings(net, d, r), (1, 1), "room {r}");
            ok
        };
        assert!((1..4).all(|r| hand_off(&mut net, r)));
        let key = PeerKey { incarnation: net.nodes[0].incarnation, direction: Direction::WeGrant };
        net.order(d, |n, now| n.handle_evict(now, key));
        net.run_until(net.now + SECOND);
        let ok = (4..12).filter(|r| hand_off(&mut net, *r)).count();
        assert!(ok >= 7, "{mover:?}: {ok} of 8");
        assert_sound(&net);
    }
}

#[test]
fn restarted_prefills_are_forgotten() {
    let (mut net, d) = net(3, Mover::Sender, 1, 1);
    for r in 1..20 {
        net.push(0, push(r, r, &[1, 2, 3], (0, 12)));
        net.order(d, |n, now| n.handle_expect(now, expect(r, &[4, 5, 6], (0, 12))));
        net.run_until(net.now + SECOND);
        net.restart(0, Config::default());
        net.run_until(net.now + 20 * SECOND);
    }
    let known = net.nodes[d].node.gauges().peers;
    assert!(known <= 2, "decode knows {known} peers after 19 restarts of the one it has");
}

/// Nobody tells prefill that a decode rank has another incarnation now: time has to.
#[test]
fn restarted_decodes_are_forgotten_after_a_while() {
    let cfg = Config { forget_after: Duration::from_secs(60), ..Config::default() };
    let (mut net, d) = net_of(3, Mover::Sender, (1, PAGES), (1, PAGES), &cfg);
    for r in 1..20 {
        net.push(0, push(r, r, &[1, 2, 3], (0, 12)));
        net.order(d, |n, now| n.handle_expect(now, expect(r, &[4, 5, 6], (0, 12))));
        net.run_until(net.now + SECOND);
        assert!(assert_contract(&net, d, r));
        net.restart(d, cfg.clone());
        net.run_until(net.now + 30 * SECOND);
        let known = net.nodes[0].node.gauges().peers;
        assert!(known <= 4, "prefill knows {known} peers after {r} restarts");
    }
    net.run_until(net.now + 120 * SECOND);
    assert_eq!(net.nodes[0].node.gauges().peers, 0);
}
