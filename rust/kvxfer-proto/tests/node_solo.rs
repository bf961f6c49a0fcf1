//! One node with odd, late or hostile peers: what it releases, answers and remembers.

mod sim;

use kvxfer_proto::link::OUTBOX_LIMIT;
use kvxfer_proto::msg::{Cancel, Finished, Msg, Retract};
use kvxfer_proto::node::{Config, DeliveryEnd, Direction, EventKind, Mover, PeerKey};
use kvxfer_proto::{PushId, Reason, ReasonKind, Seq};
use sim::rooms::{PAGES, SECOND, expect, push, room, why};
use sim::solo::{Solo, done, grant, ready};
use std::time::Duration;

fn cancel(s: &mut Solo, r: u64) {
    s.order(|n, now| n.handle_cancel(now, room(r), why(ReasonKind::Cancelled)));
}

/// The fabric to this peer breaks, and the fence that follows ends like this.
fn fence(s: &mut Solo, key: PeerKey, result: Result<(), Reason>) {
    s.order(|n, now| n.handle_fabric_broken(now, key, &why(ReasonKind::FabricError)));
    s.order(|n, now| n.handle_fenced(now, key, result));
}

fn failure(s: &Solo, r: u64) -> Option<ReasonKind> {
    s.events.iter().filter(|e| e.room == room(r)).find_map(|e| match &e.kind {
        EventKind::Failed(reason) => Some(reason.kind),
        _ => None,
    })
}

#[test]
fn finished_under_our_write_releases_nothing() {
    let mut s = Solo::new(Config::default());
    let k = s.dest_up(20, Mover::Sender);
    s.order(|n, now| n.handle_push(now, push(1, 1, &[1], (0, 4))));
    s.recv(k, grant(1, 1, &[1])).unwrap();
    assert_eq!(s.delivers.len(), 1);
    // Whether it is refused or not: our fabric still reads the pages.
    let _ = s.recv(k, Msg::Finished(Finished { room: room(1), seq: Seq(1), error: None }));
    assert_eq!(s.released(1), 0, "{:?}", s.events);
}

/// A source that is stopped before it attaches finds no grant among the bytes of a session that is over by the time it
/// reads them: it would open its endpoint then, after our fence of it.
#[test]
fn no_grant_is_sent_before_the_source_has_attached() {
    let granted = |s: &Solo| s.sent.iter().filter(|(_, _, msg)| matches!(msg, Msg::Grant(_))).count();
    for mover in [Mover::Sender, Mover::Receiver] {
        let mut s = Solo::decode(&[10]);
        let a = s.up(10, Direction::WeGrant, None, (0, 0));
        assert_eq!(granted(&s), 0);
        // So a cancel needs no answer of a peer that cannot know the room.
        cancel(&mut s, 99);
        assert_eq!(s.released(99), 1, "{:?}", s.events);
        s.order(|n, now| n.handle_expect(now, expect(1, &[1], (0, 4))));
        assert_eq!(granted(&s), 0);
        s.order(|n, now| n.handle_attached(now, a, mover));
        assert_eq!(granted(&s), 1);
        // A later session of the same endpoint goes on at once.
        s.order(|n, now| n.handle_expect(now, expect(2, &[2], (0, 4))));
        assert_eq!(granted(&s), 2);
    }
}

#[test]
fn done_under_our_copy_releases_nothing() {
    let mut s = Solo::decode(&[10]);
    let a = s.source_up(10, Mover::Receiver);
    s.recv(a, ready(99, 1, 1, &[1])).unwrap();
    assert_eq!(s.delivers.len(), 1);
    let _ = s.recv(a, done(99, 1, 2, (0, 4), true));
    assert_eq!(s.released(99), 0, "{:?}", s.events);
}

#[test]
fn a_retracted_copy_holds_its_pages_until_it_has_stopped() {
    let mut s = Solo::decode(&[10]);
    let a = s.source_up(10, Mover::Receiver);
    s.recv(a, ready(99, 1, 1, &[1])).unwrap();
    s.recv(a, Msg::Retract(Retract { room: room(99), seq: Seq(1), push: PushId(1) })).unwrap();
    assert_eq!(s.aborts.len(), 1);
    cancel(&mut s, 99);
    assert_eq!(s.released(99), 0, "{:?}", s.events);
    s.end(0, DeliveryEnd::Aborted);
    assert_eq!(s.endings(99), (1, 1));
}

#[test]
fn a_copy_waits_until_the_retracted_one_has_stopped() {
    let mut s = Solo::decode(&[10]);
    let a = s.source_up(10, Mover::Receiver);
    s.recv(a, ready(99, 1, 1, &[1])).unwrap();
    s.recv(a, Msg::Retract(Retract { room: room(99), seq: Seq(1), push: PushId(1) })).unwrap();
    s.recv(a, ready(99, 1, 2, &[2])).unwrap();
    assert_eq!(s.delivers.len(), 1, "two copies into the same pages");
    s.end(0, DeliveryEnd::Aborted);
    assert_eq!(s.delivers.len(), 2);
    assert_eq!(s.delivers[1].push, PushId(2));
}

/// As in the engine, a fence drops the flow and reports no end of its own.
#[test]
fn a_fence_ends_the_copies_from_its_peer() {
    let mut s = Solo::decode(&[10]);
    let a = s.source_up(10, Mover::Receiver);
    s.recv(a, ready(99, 1, 1, &[1])).unwrap();
    assert_eq!(s.node.gauges().deliveries, 1);
    fence(&mut s, a, Ok(()));
    assert_eq!(s.node.gauges().deliveries, 0);
    assert_eq!(s.endings(99), (1, 1));
    assert!(s.node.is_quiet());
}

#[test]
fn a_live_peer_that_leaves_a_cancel_unanswered_is_fenced() {
    let mut s = Solo::decode(&[10]);
    let a = s.source_up(10, Mover::Sender);
    cancel(&mut s, 99);
    for i in 1..600 {
        s.run_until(i * SECOND);
        s.recv(a, Msg::Ping(i)).unwrap();
        if !s.fences.is_empty() {
            break;
        }
    }
    assert_eq!(s.fences, [a]);
    assert_eq!(s.released(99), 0, "the fence has not ended yet");
}

#[test]
fn evict_ends_a_fence_that_hangs() {
    let mut s = Solo::decode(&[10]);
    let a = s.source_up(10, Mover::Sender);
    s.order(|n, now| n.handle_fabric_broken(now, a, &why(ReasonKind::FabricError)));
    assert_eq!(s.released(99), 0);
    s.order(|n, now| n.handle_evict(now, a));
    assert_eq!(s.endings(99), (1, 1));
}

/// The peer fences itself when it sees our new generation, and answers by coming back in it.
#[test]
fn an_answer_ends_the_quarantine_of_a_peer_that_cannot_be_fenced() {
    let mut s = Solo::decode(&[10]);
    let a = s.source_up(10, Mover::Sender);
    fence(&mut s, a, Err(why(ReasonKind::FabricError)));
    assert_eq!(s.node.link_state(a), (0, 1), "the link starts afresh at once");
    s.up(10, Direction::WeGrant, None, (1, 0));
    assert_eq!((s.node.session_of(a), s.released(99)), (None, 0), "it has not heard of our fence yet");
    s.up(10, Direction::WeGrant, None, (0, 1));
    assert!(s.node.session_of(a).is_some());
    assert_eq!(s.endings(99), (1, 1));
}

#[test]
fn a_generation_far_ahead_is_refused_and_moves_nobodys() {
    let mut s = Solo::new(Config::default());
    let k = s.up(20, Direction::TheyGrant, None, (0, u64::MAX));
    assert_eq!((s.node.session_of(k), &s.fences), (None, &vec![k]));
    s.order(|n, now| n.handle_fenced(now, k, Ok(())));
    assert_eq!(s.node.link_state(k), (0, 1), "our own next one");
    let other = s.up(21, Direction::TheyGrant, None, (0, 0));
    assert!(s.node.session_of(other).is_some());
    assert_eq!(s.node.link_state(other), (0, 0));
}

/// One rank of two has delivered and is fenced then. Its grant's number is another message's on the new link, which a
/// cancel of the first room must not withdraw.
#[test]
fn a_number_of_an_earlier_generation_withdraws_no_grant() {
    let mut s = Solo::decode(&[10, 11]);
    let a = s.source_up(10, Mover::Sender);
    s.source_up(11, Mover::Sender);
    s.recv(a, done(99, 1, 1, (0, 4), true)).unwrap();
    fence(&mut s, a, Ok(()));
    assert_eq!(s.endings(99), (0, 0), "the fenced rank had delivered");
    s.order(|n, now| n.handle_expect(now, expect(2, &[1], (0, 4))));
    cancel(&mut s, 99);
    s.sent.clear();
    s.up(10, Direction::WeGrant, Some(Mover::Sender), (0, 1));
    assert_eq!(s.granted_to(a), [2]);
}

/// The operator repairs the secret later, and the peer still counts the messages of the first session.
#[test]
fn grants_after_a_refusal_are_not_taken_for_those_before_it() {
    let mut s = Solo::decode(&[10]);
    let a = s.source_up(10, Mover::Sender);
    let heard = s.last_number(a);
    assert!(heard > 0);
    s.recv(a, done(99, 1, 1, (0, 4), true)).unwrap();
    let session = s.node.session_of(a).unwrap();
    s.order(|n, now| n.handle_session_down(now, a, session));
    s.order(|n, now| n.handle_refused(now, a, &why(ReasonKind::AuthError)));
    for (r, page) in [(2, 1), (3, 2)] {
        s.order(|n, now| n.handle_expect(now, expect(r, &[page], (0, 4))));
    }
    s.sent.clear();
    s.up(10, Direction::WeGrant, Some(Mover::Sender), (heard, 0));
    assert_eq!(s.granted_to(a), [2, 3]);
}

#[test]
fn a_rank_that_died_after_its_part_is_not_connected_to_again() {
    let mut s = Solo::decode(&[10, 11]);
    let a = s.source_up(10, Mover::Sender);
    let b = s.source_up(11, Mover::Sender);
    s.recv(a, done(99, 1, 1, (0, 4), true)).unwrap();
    s.order(|n, now| n.handle_peer_died(now, a));
    s.order(|n, now| n.handle_fenced(now, a, Ok(())));
    s.recv(b, done(99, 1, 1, (0, 4), true)).unwrap();
    assert_eq!(s.endings(99), (1, 1));
    assert!(!s.node.wants_session(a), "to tell it that the room is finished");
}

#[test]
fn the_other_ranks_hear_of_a_room_that_one_unusable_rank_failed() {
    let mut s = Solo::decode(&[10, 11]);
    let a = s.source_up(10, Mover::Sender);
    let b = s.source_up(11, Mover::Sender);
    s.order(|n, now| n.handle_fabric_broken(now, a, &why(ReasonKind::FabricError)));
    s.sent.clear();
    s.order(|n, now| n.handle_expect(now, expect(2, &[1], (0, 4))));
    assert_eq!(s.endings(2), (1, 1));
    let told = |m: &Msg| matches!(m, Msg::RoomFailed(f) if f.room == room(2));
    assert!(s.sent.iter().any(|(to, _, m)| *to == b && told(m)), "{:?}", s.sent);
}

/// Any rank of decode may have failed, also one whose grant has not come: who knows the room may end it.
#[test]
fn a_cancel_without_a_grant_ends_the_room_and_is_answered() {
    let mut s = Solo::new(Config::default());
    s.dest_up(20, Mover::Sender);
    let b = s.dest_up(21, Mover::Sender);
    s.order(|n, now| n.handle_push(now, push(1, 1, &[1], (0, 4))));
    let reason = why(ReasonKind::PageError);
    s.recv(b, Msg::Cancel(Cancel { room: room(1), upto: Seq(u64::MAX), reason })).unwrap();
    assert_eq!(s.endings(1), (1, 1));
    assert_eq!(failure(&s, 1), Some(ReasonKind::PageError));
    assert!(s.drained(b, 1).is_some());
    // And a grant that comes after all is refused.
    s.sent.clear();
    s.recv(b, grant(1, 1, &[1])).unwrap();
    assert_eq!(s.drained(b, 1).unwrap().kind, ReasonKind::PageError);
    assert!(s.delivers.is_empty());
}

#[test]
fn a_push_after_its_cancel_fails_and_releases() {
    let mut s = Solo::new(Config::default());
    cancel(&mut s, 1);
    s.order(|n, now| n.handle_push(now, push(1, 1, &[1], (0, 4))));
    assert_eq!(s.endings(1), (1, 1));
    s.run_until(1000 * SECOND);
    assert_eq!(s.endings(1), (1, 1), "and not again");
}

#[test]
fn opening_a_room_that_is_expected_here_fails_it_once() {
    let mut s = Solo::decode(&[10]);
    s.order(|n, now| n.handle_open(now, room(99), None, None));
    assert_eq!(failure(&s, 99), Some(ReasonKind::RoomInUse));
    s.run_until(1000 * SECOND);
    assert_eq!(s.endings(99), (1, 1), "{:?}", s.events);
}

/// Although the bootstrap timeout, in which the grant came, has much longer to run.
#[test]
fn the_waiting_timeout_counts_from_the_grant() {
    let mut s = Solo::new(Config::default());
    s.order(|n, now| n.handle_open(now, room(1), None, Some(Duration::from_secs(2))));
    let k = s.dest_up(20, Mover::Sender);
    s.run_until(SECOND);
    s.recv(k, grant(1, 1, &[1])).unwrap();
    s.run_until(5 * SECOND / 2);
    assert_eq!(s.endings(1), (0, 0));
    s.run_until(7 * SECOND / 2);
    assert_eq!(s.endings(1), (1, 1));
    assert_eq!(failure(&s, 1), Some(ReasonKind::TransferTimeout));
}

#[test]
fn early_grants_are_limited_over_all_peers_together() {
    let mut s = Solo::new(Config { early_grants: 4, ..Config::default() });
    let (a, b) = (s.dest_up(20, Mover::Sender), s.dest_up(21, Mover::Sender));
    for r in 1..=4 {
        s.recv(a, grant(r, r, &[1])).unwrap();
    }
    assert!((1..=4).all(|r| s.drained(a, r).is_none()));
    s.recv(b, grant(50, 1, &[1])).unwrap();
    assert_eq!(s.drained(b, 50).unwrap().kind, ReasonKind::Unhealthy);
    // One ends, and one is pushed and so no longer early: room for two.
    let reason = why(ReasonKind::Cancelled);
    s.recv(a, Msg::Cancel(Cancel { room: room(1), upto: Seq(1), reason })).unwrap();
    s.order(|n, now| n.handle_push(now, push(2, 1, &[1], (0, 4))));
    for r in [51, 52, 53] {
        s.recv(b, grant(r, r, &[1])).unwrap();
    }
    let refused: Vec<u64> = (51..=53).filter(|r| s.drained(b, *r).is_some()).collect();
    assert_eq!(refused, [53]);
}

/// The peer reads nothing: what waits for it is bounded, and messages are never dropped without losing the peer.
#[test]
fn a_peer_that_acknowledges_nothing_is_lost() {
    let mut s = Solo::decode(&[10]);
    let a = s.source_up(10, Mover::Sender);
    // Rooms with a page that does not exist: each makes one message, and no other state.
    let limit = OUTBOX_LIMIT as u64;
    for batch in 0..=limit / 1000 {
        assert_eq!(s.fences, []);
        s.order(|n, now| {
            (0..1000).for_each(|r| n.handle_expect(now, expect(1000 * (batch + 1) + r, &[PAGES], (0, 4))));
        });
        s.sent.clear();
        s.events.clear();
    }
    s.run_until(s.now + SECOND);
    assert_eq!(s.fences, [a]);
}

/// The whole of its state, timers too, as its `Debug` tells it.
#[test]
fn rooms_that_succeeded_leave_nothing_behind() {
    let mut s = Solo::decode(&[10]);
    let a = s.source_up(10, Mover::Sender);
    let mut size = Vec::new();
    for i in 0..4000 {
        let r = 100 + i;
        s.order(|n, now| n.handle_expect(now, expect(r, &[1], (0, 4))));
        for t in 0..4 {
            s.recv(a, done(r, 2 + i, t, (t, t + 1), t == 3)).unwrap();
        }
        assert_eq!(s.endings(r), (1, 1), "room {r}");
        let number = s.last_number(a);
        s.recv(a, Msg::Ack(number)).unwrap();
        s.sent.clear();
        s.events.clear();
        if i % 1000 == 999 {
            size.push(format!("{:?}", s.node).len());
        }
    }
    assert!(size[3] < size[0] + 100, "only numbers grow by a digit or two: {size:?}");
}
