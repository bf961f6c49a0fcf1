//! Field cases of timeouts, pieces and stale grants, and peers that were given up while they live.

mod sim;

use kvxfer_proto::ReasonKind;
use kvxfer_proto::msg::{Cancel, Drained, Msg};
use kvxfer_proto::node::{Config, Direction, Mover, PeerKey};
use kvxfer_proto::{Reason, Seq, SessionNo};
use sim::rooms::{
    BOTH, SECOND, assert_arrived, assert_contract, early_push, expect, failure, fill, net, push, room, why,
};
use sim::solo::{Solo, done, grant};
use std::time::Duration;

const fn seconds(s: u64) -> Option<Duration> {
    Some(Duration::from_secs(s))
}

/// A and B may wait 30 s each, and only A makes progress; C, which was first, may wait 480 s.
#[test]
fn case_15_rooms_time_out_by_their_own_progress_alone() {
    for mover in BOTH {
        let (mut net, d) = net(15, mover, 1, 1);
        for (r, pages, wait) in [(3, [7, 8, 9], 480), (1, [1, 2, 3], 30), (2, [4, 5, 6], 30)] {
            let mut e = expect(r, &pages, (0, 12));
            e.waiting_timeout = seconds(wait);
            net.order(d, |n, now| n.handle_expect(now, e));
        }
        fill(&mut net, 0, 1, &[11, 12, 13], 0, 0..12);
        net.run_until(20 * SECOND);
        net.push(0, early_push(1, 1, &[11], (0, 4)));
        net.run_until(29 * SECOND);
        assert!(net.nodes[d].events.is_empty(), "{mover:?}: nobody's time is up");
        net.run_until(31 * SECOND);
        assert!(!assert_contract(&net, d, 2));
        assert_eq!(failure(&net, d, 2).kind, ReasonKind::TransferTimeout);
        assert_eq!(net.nodes[d].events.iter().filter(|e| e.room != room(2)).count(), 0, "B alone");
        // A's time runs from its last progress, each time anew.
        net.run_until(45 * SECOND);
        net.push(0, early_push(1, 2, &[12], (4, 8)));
        net.run_until(70 * SECOND);
        net.push(0, push(1, 3, &[13], (8, 12)));
        net.run_until(71 * SECOND);
        assert!(assert_contract(&net, d, 1) && assert_contract(&net, 0, 1));
        assert_arrived(&mut net, d, 1, &[1, 2, 3], 0, 0..12);
        // And so does C's, which nobody ever pushes.
        net.run_until(478 * SECOND);
        assert!(net.events_of(d, room(3)).is_empty());
        net.run_until(482 * SECOND);
        assert_eq!(failure(&net, d, 3).kind, ReasonKind::TransferTimeout);
        assert!(!assert_contract(&net, d, 3));
    }
}

/// The same for rooms that nobody has granted yet, with the long one put in first.
#[test]
fn case_15_a_long_wait_put_in_first_delays_no_short_one() {
    for (long_first, short) in [(true, 2), (false, 1)] {
        let (mut net, _) = net(15, Mover::Sender, 1, 1);
        let waits = if long_first { [480, 30] } else { [30, 480] };
        for ((r, page), wait) in [(1, 1), (2, 2)].into_iter().zip(waits) {
            let mut p = push(r, r, &[page], (0, 4));
            p.bootstrap_timeout = seconds(wait);
            net.push(0, p);
        }
        net.run_until(29 * SECOND);
        assert!(net.nodes[0].events.is_empty());
        net.run_until(31 * SECOND);
        assert!(!assert_contract(&net, 0, short));
        assert_eq!(failure(&net, 0, short).kind, ReasonKind::TransferTimeout);
        assert_eq!(net.nodes[0].events.len(), 1, "the long one stands");
        net.run_until(481 * SECOND);
        assert!(!assert_contract(&net, 0, 3 - short));
    }
}

/// Four pieces: one fails after a second, the others end after five.
#[test]
fn case_13_one_failure_of_four_and_a_release_when_the_last_piece_has_ended() {
    let mut s = Solo::decode(&[10, 11, 12, 13]);
    let peers: Vec<_> = [10, 11, 12, 13].iter().map(|n| s.source_up(*n, Mover::Sender)).collect();
    let drained =
        |kind| Msg::Drained(Drained { room: room(99), seq: Seq(1), reason: Reason::new(kind, "by hand") });
    s.run_until(SECOND);
    s.recv(peers[1], drained(ReasonKind::FabricError)).unwrap();
    assert_eq!(s.endings(99), (1, 0), "failed at once, and nothing released");
    for ms in 1000..5000 {
        // Else they are taken for dead.
        if ms % 500 == 0 {
            s.run_until(ms * 1000);
            for k in &peers {
                s.recv(*k, Msg::Ping(ms)).unwrap();
            }
        }
    }
    assert_eq!(s.endings(99), (1, 0));
    for (n, k) in [peers[0], peers[2], peers[3]].into_iter().enumerate() {
        s.run_until(5 * SECOND + n as u64 * 1000);
        // Its piece was complete before it heard of the cancel; that makes no success of three in four.
        s.recv(k, done(99, 1, 1, (0, 4), true)).unwrap();
        assert_eq!(s.endings(99), (1, 0), "after {n} of 3");
        s.recv(k, drained(ReasonKind::Cancelled)).unwrap();
    }
    assert_eq!(s.endings(99), (1, 1));
    assert!(s.node.is_quiet());
}

/// A grant whose number a cancel has voided, read after the cancel: nothing is delivered, and it is answered.
#[test]
fn case_16_a_grant_that_a_cancel_has_voided_is_refused_also_afterwards() {
    let mut s = Solo::new(Config::default());
    let k = s.dest_up(20, Mover::Sender);
    s.order(|n, now| n.handle_push(now, push(1, 1, &[1], (0, 4))));
    s.recv(k, Msg::Cancel(Cancel { room: room(1), upto: Seq(5), reason: why(ReasonKind::Cancelled) }))
        .unwrap();
    s.recv(k, grant(1, 4, &[1])).unwrap();
    s.recv(k, grant(1, 5, &[1])).unwrap();
    assert!(s.delivers.is_empty(), "{:?}", s.delivers);
    assert_eq!(s.endings(1), (1, 1));
    // Nor does a push that knows nothing of it bring the room back.
    s.order(|n, now| n.handle_push(now, push(1, 2, &[1], (0, 4))));
    assert!(s.delivers.is_empty());
    assert!(s.node.counters().stale_refused >= 1, "counted");
}

/// Nothing is held because of this peer, so that there is nothing to wait for: it is of use again at once.
#[test]
fn a_peer_that_holds_nothing_is_not_given_up_for_want_of_a_fence() {
    let mut s = Solo::decode(&[10]);
    let a = s.source_up(10, Mover::Sender);
    s.recv(a, done(99, 1, 1, (0, 4), true)).unwrap();
    assert_eq!(s.endings(99), (1, 1));
    s.order(|n, now| n.handle_fabric_broken(now, a, &why(ReasonKind::FabricError)));
    s.order(|n, now| n.handle_fenced(now, a, Err(why(ReasonKind::FabricError))));
    s.order(|n, now| n.handle_expect(now, expect(2, &[1], (0, 4))));
    assert_eq!(s.endings(2), (0, 0), "{:?}", s.events);
    assert!(s.node.wants_session(a));
    s.up(10, Direction::WeGrant, Some(Mover::Sender), (0, 1));
    assert_eq!(s.granted_to(a), [99, 2]);
    s.recv(a, done(2, 2, 1, (0, 4), true)).unwrap();
    assert_eq!(s.endings(2), (1, 1));
}

/// While pages are held the peer takes no room; when it is back it hears which ones failed meanwhile, and need not wait for
/// their timeouts.
#[test]
fn a_peer_that_was_given_up_hears_later_which_rooms_failed() {
    let mut s = Solo::decode(&[10]);
    let a = s.source_up(10, Mover::Sender);
    s.order(|n, now| n.handle_fabric_broken(now, a, &why(ReasonKind::FabricError)));
    s.order(|n, now| n.handle_expect(now, expect(2, &[1], (0, 4))));
    s.order(|n, now| n.handle_fenced(now, a, Err(why(ReasonKind::FabricError))));
    s.order(|n, now| n.handle_expect(now, expect(3, &[2], (0, 4))));
    assert_eq!((s.endings(99), s.endings(2), s.endings(3)), ((1, 0), (1, 1), (1, 1)));
    s.up(10, Direction::WeGrant, Some(Mover::Sender), (0, 1));
    assert_eq!(s.endings(99), (1, 1), "its answer");
    assert_eq!(told(&s, a), [2, 3, 99], "before the fabric reaches it again");
}

/// A source that no fabric reaches, or not yet, hears of every room that fails here: it need not wait for its own timeouts.
#[test]
fn a_source_that_is_not_attached_hears_which_rooms_failed() {
    let mut s = Solo::decode(&[10]);
    let a = s.up(10, Direction::WeGrant, None, (0, 0));
    s.order(|n, now| n.handle_unattachable(now, a, &why(ReasonKind::FabricError)));
    assert_eq!((s.endings(99), told(&s, a)), ((1, 1), vec![99]));
    assert!(s.fences.is_empty() && s.granted_to(a).is_empty(), "it has nothing to give back");
    // It missed that, and the session it is told in anew is one in which it attaches.
    s.order(|n, now| n.handle_session_down(now, a, SessionNo(1)));
    assert!(s.node.wants_session(a));
    s.up(10, Direction::WeGrant, None, (0, 0));
    assert_eq!(told(&s, a), [99, 99]);
    // Cancelled before its turn. Behind a grant that must wait, so does the word of another room's end.
    s.order(|n, now| n.handle_expect(now, expect(2, &[1], (0, 4))));
    s.order(|n, now| n.handle_cancel(now, room(2), why(ReasonKind::Cancelled)));
    assert_eq!((s.endings(2), told(&s, a)), ((1, 1), vec![2, 99, 99]));
    s.order(|n, now| n.handle_expect(now, expect(3, &[1], (0, 4))));
    s.order(|n, now| n.handle_expect(now, expect(4, &[2], (0, 4))));
    s.order(|n, now| n.handle_cancel(now, room(4), why(ReasonKind::Cancelled)));
    assert_eq!((s.granted_to(a), told(&s, a)), (vec![], vec![2, 99, 99]));
    s.order(|n, now| n.handle_attached(now, a, Mover::Sender));
    assert_eq!((s.granted_to(a), told(&s, a)), (vec![3], vec![2, 4, 99, 99]));
    // What had reached it once may hold pages: only a fence ends that.
    s.order(|n, now| n.handle_unattachable(now, a, &why(ReasonKind::FabricError)));
    assert_eq!((s.endings(3), s.fences.as_slice()), ((1, 0), [a].as_slice()));
}

/// The rooms of which this peer was told that they failed before they were granted.
fn told(s: &Solo, peer: PeerKey) -> Vec<u64> {
    let rooms = s.sent.iter().filter(|(to, ..)| *to == peer).filter_map(|(_, _, msg)| match msg {
        Msg::RoomFailed(m) => Some(m.room.get()),
        _ => None,
    });
    let mut rooms: Vec<u64> = rooms.collect();
    rooms.sort_unstable();
    rooms
}
