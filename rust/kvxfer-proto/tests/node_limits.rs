//! A peer that passed its handshake and asks for more than its share: refused, counted, and nobody else pays.

mod sim;

use kvxfer_proto::ReasonKind;
use kvxfer_proto::Seq;
use kvxfer_proto::msg::{Cancel, Msg, RoomFailed};
use kvxfer_proto::node::{Config, Direction, EventKind, Mover};
use sim::rooms::{SECOND, push, room, why};
use sim::solo::{Solo, grant};
use std::time::Duration;

#[test]
fn a_peer_that_grants_more_than_its_share_is_refused_and_others_are_not() {
    let cfg = Config { early_grants: 100, early_grants_per_peer: 4, ..Config::default() };
    let mut s = Solo::new(cfg);
    let (hostile, honest) = (s.dest_up(1, Mover::Sender), s.dest_up(2, Mover::Sender));
    for r in 1..=50 {
        s.recv(hostile, grant(r, r, &[1])).unwrap();
    }
    assert_eq!(s.node.gauges().outbound, 4);
    assert_eq!(s.node.counters().limited, 46);
    let reason = s.drained(hostile, 5).unwrap();
    assert_eq!(reason.kind, ReasonKind::Unhealthy);
    assert!(reason.text.contains("early_grants_per_peer"), "{}", reason.text);
    for r in 100..104 {
        s.recv(honest, grant(r, r, &[1])).unwrap();
    }
    assert_eq!(s.node.gauges().outbound, 8, "the other peer has its own share");
    // What is pushed waits no more, and gives its place back; so does what fails.
    s.order(|n, now| n.handle_push(now, push(1, 1, &[1], (0, 4))));
    s.recv(hostile, Msg::Cancel(Cancel { room: room(2), upto: Seq(2), reason: why(ReasonKind::Cancelled) }))
        .unwrap();
    for r in 60..70 {
        s.recv(hostile, grant(r, r, &[1])).unwrap();
    }
    assert_eq!(s.node.counters().limited, 46 + 8);
    // A room that our engine has pushed is no early one: its grant is never refused for the share.
    s.order(|n, now| n.handle_push(now, push(80, 2, &[2], (0, 4))));
    s.recv(hostile, grant(80, 80, &[1])).unwrap();
    assert!(s.drained(hostile, 80).is_none());
}

#[test]
fn page_lists_of_one_peer_are_bounded_too() {
    let cfg = Config { early_pages_per_peer: 10, ..Config::default() };
    let mut s = Solo::new(cfg);
    let hostile = s.dest_up(1, Mover::Sender);
    s.recv(hostile, grant(1, 1, &[0; 6])).unwrap();
    s.recv(hostile, grant(2, 2, &[0; 6])).unwrap();
    s.recv(hostile, grant(3, 3, &[0; 4])).unwrap();
    assert!(s.drained(hostile, 1).is_none() && s.drained(hostile, 3).is_none());
    assert!(s.drained(hostile, 2).unwrap().text.contains("early_pages_per_peer"));
}

#[test]
fn a_peer_cannot_make_us_forget_another_peers_failed_rooms() {
    let cfg = Config { tombstones: 100, tombstones_per_peer: 10, ..Config::default() };
    let mut s = Solo::new(cfg);
    let (hostile, honest) = (s.dest_up(1, Mover::Sender), s.dest_up(2, Mover::Sender));
    let failed = |r| Msg::RoomFailed(RoomFailed { room: room(r), reason: why(ReasonKind::PageError) });
    s.recv(honest, failed(7)).unwrap();
    for r in 1000..3000 {
        // Every way to leave one.
        match r % 3 {
            0 => s.recv(hostile, failed(r)).unwrap(),
            1 => {
                let reason = why(ReasonKind::Cancelled);
                s.recv(hostile, Msg::Cancel(Cancel { room: room(r), upto: Seq(r), reason })).unwrap();
            }
            _ => {
                s.recv(hostile, grant(r, r, &[1])).unwrap();
                let reason = why(ReasonKind::Cancelled);
                s.recv(hostile, Msg::Cancel(Cancel { room: room(r), upto: Seq(r), reason })).unwrap();
            }
        }
    }
    assert_eq!(s.node.gauges().tombstones, 11);
    s.order(|n, now| n.handle_push(now, push(7, 1, &[1], (0, 4))));
    assert!(s.events.iter().any(|e| e.room == room(7) && matches!(e.kind, EventKind::Failed(_))));
}

#[test]
fn peers_that_come_under_ever_new_names_push_out_idle_ones_only() {
    let cfg = Config { peers: 4, forget_after: Duration::from_secs(3600), ..Config::default() };
    let mut s = Solo::new(cfg);
    let honest = s.dest_up(1, Mover::Sender);
    s.order(|n, now| n.handle_push(now, push(9, 1, &[1], (0, 4))));
    s.recv(honest, grant(9, 1, &[1])).unwrap();
    for n in 100..150 {
        let key = s.up(n, Direction::TheyGrant, None, (0, 0));
        if let Some(session) = s.node.session_of(key) {
            s.order(|node, now| node.handle_session_down(now, key, session));
        }
        s.now += SECOND / 100;
    }
    assert_eq!(s.node.gauges().peers, 4);
    assert!(s.node.session_of(honest).is_some(), "who is here stays");
    // All places taken by peers that are here: the next one is told so, and leaves nothing.
    for n in 200..206 {
        s.up(n, Direction::TheyGrant, None, (0, 0));
    }
    assert_eq!(s.node.gauges().peers, 4);
    assert!(s.node.counters().limited >= 3, "{:?}", s.node.counters());
}
