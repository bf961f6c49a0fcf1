//! What a peer that errs, lies or goes away may not do to rooms, pages and other peers.

mod sim;

use kvxfer_proto::msg::{Drained, Grant, Msg, Ready, Retract, RoomFailed, Verify};
use kvxfer_proto::node::{Config, DeliveryEnd, Direction, EventKind, Mover, PeerKey, RankInfo, SessionUp};
use kvxfer_proto::{Incarnation, PushId, ReasonKind, Seq, SessionNo};
use sim::rooms::{PAGES, SECOND, expect, ids, push, room, side, source, why};
use sim::solo::{Solo, done, grant, owed, ready};

const COPIED: DeliveryEnd = DeliveryEnd::Complete { bytes: 1, writes: 1 };

/// Room 99 at decode, of two ranks that are copied from; the first of them has said that it was all.
fn first_of_two_is_done() -> (Solo, PeerKey, PeerKey) {
    let mut s = Solo::decode(&[10, 11]);
    let a = s.source_up(10, Mover::Receiver);
    let b = s.source_up(11, Mover::Receiver);
    assert_eq!(s.recv(a, ready(99, 1, 1, &[1])), Ok(()));
    assert_eq!(s.recv(b, ready(99, 1, 1, &[1])), Ok(()));
    s.end(0, COPIED);
    s.end(1, COPIED);
    assert_eq!(s.recv(a, done(99, 1, 1, (0, 4), true)), Ok(()));
    assert_eq!((s.delivers.len(), s.endings(99)), (2, (0, 0)));
    (s, a, b)
}

fn failed(s: &Solo, r: u64) -> Option<ReasonKind> {
    s.events.iter().filter(|e| e.room == room(r)).find_map(|e| match &e.kind {
        EventKind::Failed(reason) => Some(reason.kind),
        _ => None,
    })
}

#[test]
fn nothing_is_copied_for_a_rank_that_has_said_that_it_was_all() {
    for (push, other_ends_well) in [(2, true), (7, false)] {
        let (mut s, a, b) = first_of_two_is_done();
        s.recv(a, ready(99, 1, push, &[1])).unwrap();
        assert_eq!(s.delivers.len(), 2, "a copy has begun that the room's end would not wait for");
        assert_eq!(failed(&s, 99), Some(ReasonKind::ProtocolError));
        let last = if other_ends_well {
            done(99, 1, 1, (0, 4), true)
        } else {
            let reason = why(ReasonKind::Cancelled);
            Msg::Drained(Drained { room: room(99), seq: Seq(1), reason })
        };
        s.recv(b, last).unwrap();
        assert_eq!((s.endings(99), s.node.gauges().deliveries), ((1, 1), 0));
    }
}

#[test]
fn a_piece_after_the_last_one_fails_the_room() {
    let (mut s, a, _) = first_of_two_is_done();
    s.recv(a, done(99, 1, 1, (0, 4), true)).unwrap();
    assert_eq!(failed(&s, 99), Some(ReasonKind::ProtocolError));
}

/// A push that waits for an old copy to stop is as good as being copied.
#[test]
fn a_rank_cannot_end_while_one_of_its_pushes_waits_to_be_copied() {
    let mut s = Solo::decode(&[10]);
    let a = s.source_up(10, Mover::Receiver);
    s.recv(a, ready(99, 1, 1, &[1])).unwrap();
    s.recv(a, Msg::Retract(Retract { room: room(99), seq: Seq(1), push: PushId(1) })).unwrap();
    s.recv(a, ready(99, 1, 2, &[1])).unwrap();
    assert_eq!(s.delivers.len(), 1, "the second waits for the first to stop");
    s.recv(a, done(99, 1, 3, (0, 0), true)).unwrap();
    assert_eq!((failed(&s, 99), s.released(99)), (Some(ReasonKind::ProtocolError), 0));
    s.end(0, DeliveryEnd::Aborted);
    assert_eq!((s.endings(99), s.delivers.len()), ((1, 1), 1));
}

/// `Drained` says that nothing of the room lands any more: also to a rank that granted it twice.
#[test]
fn a_second_grant_is_answered_once_the_writes_of_the_first_have_stopped() {
    let mut s = Solo::new(Config::default());
    let k = s.dest_up(1, Mover::Sender);
    s.order(|n, now| n.handle_push(now, push(5, 1, &[1], (0, 4))));
    s.recv(k, grant(5, 1, &[1])).unwrap();
    for seq in [2, 3] {
        s.recv(k, grant(5, seq, &[1])).unwrap();
        assert_eq!((s.drained(k, 5), s.aborts.len(), s.released(5)), (None, 1, 0));
    }
    s.end(0, DeliveryEnd::Aborted);
    let answers: Vec<Seq> = s
        .sent
        .iter()
        .filter_map(|(_, _, m)| if let Msg::Drained(d) = m { Some(d.seq) } else { None })
        .collect();
    assert_eq!((answers, s.endings(5)), (vec![Seq(3)], (1, 1)));
}

#[test]
fn a_directory_that_names_an_incarnation_twice_is_refused() {
    let mut s = Solo::new(Config::default());
    let twice = [0, 1].map(|rank| RankInfo { incarnation: Incarnation(10), side: side(rank, 2) }).to_vec();
    s.order(|n, now| {
        n.handle_expect(now, expect(99, &[31], (0, 4)));
        n.handle_resolved(now, &source(), Ok(twice));
    });
    assert_eq!((failed(&s, 99), s.endings(99)), (Some(ReasonKind::ProtocolError), (1, 1)));
    assert_eq!(s.node.gauges().peers, 0, "nothing was granted");
}

#[test]
fn no_peer_moves_the_generation_of_others() {
    let mut s = Solo::new(Config::default());
    let hostile = s.up(1, Direction::TheyGrant, Some(Mover::Sender), (0, 1 << 32));
    assert!(s.node.session_of(hostile).is_some());
    s.recv(hostile, Msg::Bye(why(ReasonKind::PeerLost))).unwrap();
    s.order(|node, now| node.handle_fenced(now, hostile, Ok(())));
    assert_eq!(s.node.gauges().peers, 0);
    let other = PeerKey { incarnation: Incarnation(2), direction: Direction::TheyGrant };
    let (_, generation) = s.node.link_state(other);
    let mut honest = Solo::decode(&[10]);
    let k = honest.up(10, Direction::WeGrant, Some(Mover::Sender), (0, generation));
    assert!(honest.node.session_of(k).is_some(), "an honest peer is told generation {generation}");
}

/// A peer whose own fences had taken the link further than ours is taken back in a few steps.
#[test]
fn a_forgotten_peer_of_a_later_generation_comes_back() {
    let mut s = Solo::new(Config::default());
    let k = s.up(1, Direction::TheyGrant, Some(Mover::Sender), (0, 7));
    s.recv(k, grant(5, 1, &[1])).unwrap();
    s.recv(k, Msg::Bye(why(ReasonKind::PeerLost))).unwrap();
    s.order(|node, now| node.handle_fenced(now, k, Ok(())));
    assert_eq!(s.node.gauges().peers, 0);
    s.up(1, Direction::TheyGrant, None, (1, 7));
    assert_eq!(s.node.session_of(k), None, "it says that it has received what was never sent");
    s.order(|node, now| node.handle_fenced(now, k, Ok(())));
    let (_, generation) = s.node.link_state(k);
    assert!(generation > 7, "the peer learns that the link began again");
    s.up(1, Direction::TheyGrant, Some(Mover::Sender), (0, generation));
    s.recv(k, grant(6, 2, &[2])).unwrap();
    s.order(|n, now| n.handle_push(now, push(6, 1, &[1], (0, 4))));
    assert_eq!(s.delivers.len(), 1);
}

#[test]
fn an_answer_to_a_fence_in_an_impossible_generation_is_none() {
    let mut s = Solo::decode(&[10]);
    let a = s.source_up(10, Mover::Sender);
    s.order(|n, now| n.handle_fabric_broken(now, a, &why(ReasonKind::FabricError)));
    s.order(|n, now| n.handle_fenced(now, a, Err(why(ReasonKind::FabricError))));
    s.up(10, Direction::WeGrant, None, (0, u64::MAX));
    assert_eq!((s.node.link_state(a).1, s.released(99)), (1, 0));
    s.up(10, Direction::WeGrant, None, (0, 1));
    assert_eq!(s.released(99), 1);
}

fn null_grant(r: u64, seq: u64) -> Msg {
    Msg::Grant(Grant {
        room: room(r),
        seq: Seq(seq),
        tokens: (0, 4),
        owed: None,
        pages: Vec::new(),
        ranks: 2,
        verify: Verify::Off,
        deadline_us: u64::MAX,
        credits: 0,
    })
}

#[test]
fn null_grants_end_with_their_peer_and_take_no_place_of_others() {
    let cfg = Config { early_grants: 16, early_grants_per_peer: 4, ..Config::default() };
    let mut s = Solo::new(cfg);
    for round in 0..10 {
        let hostile = s.dest_up(1, Mover::Sender);
        for n in 1..=4 {
            s.recv(hostile, null_grant(round * 4 + n, round * 4 + n)).unwrap();
        }
        assert_eq!(s.node.gauges().outbound, 4);
        s.recv(hostile, Msg::Bye(why(ReasonKind::PeerLost))).unwrap();
        s.order(|node, now| node.handle_fenced(now, hostile, Ok(())));
        assert_eq!(s.node.gauges().outbound, 0);
    }
    let honest = s.dest_up(2, Mover::Sender);
    s.recv(honest, grant(1000, 1, &[1])).unwrap();
    assert_eq!(s.drained(honest, 1000), None);
}

#[test]
fn a_room_that_only_a_peer_knows_waits_no_longer_than_ours() {
    let mut s = Solo::new(Config::default());
    let k = s.dest_up(1, Mover::Sender);
    s.recv(k, null_grant(1, 1)).unwrap();
    for _ in 0..601 {
        s.run_until(s.now + SECOND);
        s.recv(k, Msg::Ping(0)).unwrap();
    }
    assert_eq!(s.node.gauges().outbound, 0);
}

/// Eight ranks, of which half owe nothing to this one: theirs is a null grant.
#[test]
fn a_null_grant_that_a_fence_swallowed_is_made_again() {
    let ranks: Vec<u64> = (10..18).collect();
    let mut s = Solo::decode_half(&ranks);
    for r in &ranks {
        s.source_up(*r, Mover::Sender);
    }
    let null = |s: &Solo| -> Vec<(PeerKey, Seq)> {
        let grants = s.sent.iter().filter_map(|(k, _, m)| match m {
            Msg::Grant(g) if g.owed.is_none() => Some((*k, g.seq)),
            _ => None,
        });
        grants.collect()
    };
    let (k, seq) = null(&s)[0];
    s.sent.clear();
    s.order(|n, now| n.handle_fabric_broken(now, k, &why(ReasonKind::FabricError)));
    s.order(|n, now| n.handle_fenced(now, k, Ok(())));
    assert_eq!(s.endings(99), (0, 0));
    assert!(s.node.wants_session(k));
    s.up(k.incarnation.0, Direction::WeGrant, Some(Mover::Sender), (0, s.node.link_state(k).1));
    assert_eq!(null(&s), [(k, Seq(seq.0 + 1))]);
}

/// The other end of it: what was said twice is one grant.
#[test]
fn a_null_grant_may_come_twice() {
    let mut s = Solo::new(Config::default());
    let k = s.dest_up(1, Mover::Sender);
    s.order(|n, now| n.handle_push(now, push(5, 1, &[1], (0, 4))));
    s.recv(k, null_grant(5, 1)).unwrap();
    s.recv(k, null_grant(5, 2)).unwrap();
    assert_eq!((s.endings(5), s.node.gauges().outbound), ((0, 0), 1));
}

#[test]
fn a_peer_that_was_never_reached_is_forgotten() {
    for refused in [false, true] {
        let mut s = Solo::decode(&[10]);
        let a = PeerKey { incarnation: Incarnation(10), direction: Direction::WeGrant };
        if refused {
            s.order(|n, now| n.handle_refused(now, a, &why(ReasonKind::LayoutMismatch)));
        } else {
            s.order(|n, now| n.handle_cancel(now, room(99), why(ReasonKind::Cancelled)));
            assert!(s.node.wants_session(a), "it may want to hear of that");
        }
        assert_eq!(s.endings(99), (1, 1));
        s.run_until(s.now + 2 * 3600 * SECOND);
        let gauges = s.node.gauges();
        assert_eq!((gauges.peers, gauges.timers, gauges.unacknowledged), (0, 0, 0));
        assert!(!s.node.wants_session(a));
    }
}

/// A session number that is never new leaves nothing behind.
#[test]
fn peers_without_a_session_take_no_place_for_ever() {
    let mut s = Solo::new(Config { peers: 4, ..Config::default() });
    for n in 100..104 {
        let key = PeerKey { incarnation: Incarnation(n), direction: Direction::TheyGrant };
        let up = SessionUp {
            peer: key,
            session: SessionNo(0),
            received: 0,
            generation: 0,
            own_generation: s.node.link_state(key).1,
            side: side(0, 1),
            pages: vec![PAGES],
            name: "x".into(),
        };
        s.order(|node, now| node.handle_session_up(now, up));
    }
    let honest = s.dest_up(2, Mover::Sender);
    assert!(s.node.session_of(honest).is_some());
}

fn told(s: &Solo, r: u64) -> bool {
    s.sent.iter().any(|(_, _, m)| matches!(m, Msg::RoomFailed(f) if f.room == room(r)))
}

#[test]
fn a_cancel_that_a_fence_swallowed_is_told_later() {
    let mut s = Solo::decode(&[10]);
    let a = s.source_up(10, Mover::Sender);
    s.order(|n, now| n.handle_cancel(now, room(99), why(ReasonKind::Cancelled)));
    s.order(|n, now| n.handle_fabric_broken(now, a, &why(ReasonKind::FabricError)));
    s.order(|n, now| n.handle_fenced(now, a, Ok(())));
    assert_eq!((s.endings(99), told(&s, 99)), ((1, 1), false));
    s.source_up(10, Mover::Sender);
    assert!(told(&s, 99));
}

#[test]
fn where_no_fabric_is_found_the_other_side_is_told_and_nothing_is_granted() {
    let mut s = Solo::decode(&[10]);
    let a = s.up(10, Direction::WeGrant, None, (0, 0));
    s.order(|n, now| n.handle_fabric_broken(now, a, &why(ReasonKind::FabricError)));
    s.order(|n, now| n.handle_fenced(now, a, Ok(())));
    s.up(10, Direction::WeGrant, None, (0, s.node.link_state(a).1));
    assert!(told(&s, 99));
    assert_eq!(s.granted_to(a), [0; 0]);
}

#[test]
fn our_own_cancel_is_forgotten_at_no_peers_word() {
    for peer_first in [false, true] {
        let mut s = Solo::new(Config { tombstones: 100, tombstones_per_peer: 4, ..Config::default() });
        let p = s.dest_up(1, Mover::Sender);
        let fails = |r| Msg::RoomFailed(RoomFailed { room: room(r), reason: why(ReasonKind::PageError) });
        if peer_first {
            s.recv(p, fails(7)).unwrap();
        } else {
            s.recv(p, grant(7, 1, &[1])).unwrap();
        }
        s.order(|n, now| n.handle_cancel(now, room(7), why(ReasonKind::Cancelled)));
        for r in 1000..1010 {
            s.recv(p, fails(r)).unwrap();
        }
        s.order(|n, now| n.handle_push(now, push(7, 1, &[1], (0, 4))));
        assert_eq!(s.endings(7), (1, 1));
    }
}

#[test]
fn a_source_cannot_offer_more_pages_than_its_piece_has() {
    // Four tokens: pages of one token each, and one more.
    for (lists, fits) in
        [(ids(&[1, 2, 3, 4, 5]), true), (ids(&[1, 2, 3, 4, 5, 6]), false), (Vec::new(), false)]
    {
        let mut s = Solo::decode(&[10]);
        let a = s.source_up(10, Mover::Receiver);
        let offer = Ready {
            room: room(99),
            seq: Seq(1),
            push: PushId(1),
            span: owed((0, 4)),
            pages_start: 0,
            pages: lists,
            pages_end: None,
        };
        s.recv(a, Msg::Ready(offer)).unwrap();
        assert_eq!((s.delivers.len(), failed(&s, 99).is_none()), (usize::from(fits), fits));
    }
}

#[test]
fn an_engine_that_gives_more_pages_than_tokens_offers_those_that_hold_them() {
    let mut s = Solo::new(Config::default());
    let k = s.dest_up(1, Mover::Receiver);
    s.recv(k, grant(5, 1, &[1])).unwrap();
    s.order(|n, now| n.handle_push(now, push(5, 1, &[3, 4, 5], (0, 4))));
    let offered =
        s.sent.iter().find_map(|(_, _, m)| if let Msg::Ready(r) = m { Some(&r.pages) } else { None });
    assert_eq!(offered, Some(&ids(&[3])));
}

#[test]
fn metadata_comes_with_the_last_piece_only() {
    let mut s = Solo::decode(&[10]);
    let a = s.source_up(10, Mover::Sender);
    let Msg::Done(mut early) = done(99, 1, 1, (0, 2), false) else { unreachable!() };
    early.meta = Some([1].into());
    s.recv(a, Msg::Done(early)).unwrap();
    assert_eq!(failed(&s, 99), Some(ReasonKind::ProtocolError));
}

#[test]
fn nothing_is_done_for_a_grant_that_was_not_sent() {
    let mut s = Solo::decode(&[10]);
    let a = s.up(10, Direction::WeGrant, None, (0, 0));
    s.recv(a, done(99, 1, 1, (0, 4), true)).unwrap_err();
    assert_eq!((s.endings(99), s.node.session_of(a)), ((0, 0), None));
}

#[test]
fn an_answer_that_ends_a_peer_leaves_no_session() {
    let mut s = Solo::decode(&[10]);
    let a = s.source_up(10, Mover::Sender);
    s.order(|n, now| n.handle_fabric_broken(now, a, &why(ReasonKind::FabricError)));
    s.order(|n, now| n.handle_fenced(now, a, Err(why(ReasonKind::FabricError))));
    // It restarts while it is in quarantine, and its old incarnation answers once more.
    s.order(|n, now| n.handle_replaced(now, a));
    s.drops.clear();
    s.up(10, Direction::WeGrant, None, (0, 1));
    assert_eq!((s.released(99), s.node.gauges().peers), (1, 0));
    assert_eq!(s.drops, [a]);
}
