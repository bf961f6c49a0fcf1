//! What a peer that errs, lies or goes away may not do to rooms, pages and other peers.

mod sim;

use kvxfer_proto::ReasonKind;
use kvxfer_proto::Seq;
use kvxfer_proto::msg::{Drained, Msg};
use kvxfer_proto::node::{DeliveryEnd, EventKind, Mover, PeerKey};
use sim::rooms::{room, why};
use sim::solo::{Solo, done, ready};

const COPIED: DeliveryEnd = DeliveryEnd::Complete { bytes: 1, writes: 1 };

/// Room 99 at decode, of two ranks that are copied from; the first of them has said that it was all.
fn first_of_two_is_done() -> (Solo, PeerKey, PeerKey) {
    let mut s = Solo::decode(&[10, 11]);
    let a = s.source_up(10, Mover::Receiver);
    let b = s.source_up(11, Mover::Receiver);
    s.recv(a, ready(99, 1, 1, &[1])).unwrap();
    s.recv(b, ready(99, 1, 1, &[1])).unwrap();
    s.end(0, COPIED);
    s.end(1, COPIED);
    s.recv(a, done(99, 1, 1, (0, 4), true)).unwrap();
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

/// A push may wait for the fabric, or for an old copy to stop: it is as good as being copied.
#[test]
fn a_rank_cannot_end_while_one_of_its_pushes_waits_to_be_copied() {
    let mut s = Solo::decode(&[10]);
    let a = s.source_up(10, Mover::Receiver);
    s.recv(a, ready(99, 1, 1, &[1])).unwrap();
    s.recv(
        a,
        Msg::Retract(kvxfer_proto::msg::Retract {
            room: room(99),
            seq: Seq(1),
            push: kvxfer_proto::PushId(1),
        }),
    )
    .unwrap();
    s.recv(a, ready(99, 1, 2, &[1])).unwrap();
    assert_eq!(s.delivers.len(), 1, "the second waits for the first to stop");
    s.end(0, DeliveryEnd::Aborted);
    assert_eq!(s.delivers.len(), 2);
    s.recv(a, done(99, 1, 3, (0, 0), true)).unwrap();
    assert_eq!((failed(&s, 99), s.released(99)), (Some(ReasonKind::ProtocolError), 0));
    s.end(1, DeliveryEnd::Aborted);
    assert_eq!(s.endings(99), (1, 1));
}
