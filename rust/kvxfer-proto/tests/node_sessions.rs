//! Sessions that come to nothing, and what the next one may not take for its own.

mod sim;

use kvxfer_proto::node::{Direction, Mover, SessionUp};
use kvxfer_proto::{Reason, ReasonKind, SessionNo};
use sim::rooms::{PAGES, side};
use sim::solo::{Solo, ready};

/// No grant leaves before the fabric is there, so a source that answers one speaks of what it cannot know.
#[test]
fn a_ready_for_a_grant_that_was_never_sent_is_a_breach_and_copies_nothing() {
    let mut s = Solo::decode(&[10]);
    let key = s.up(10, Direction::WeGrant, None, (0, 0));
    assert_eq!(s.last_number(key), 0, "no grant before the fabric is there");
    let refused = s.recv(key, ready(99, 1, 1, &[3])).unwrap_err();
    assert_eq!(refused.kind, ReasonKind::ProtocolError);
    assert!(s.delivers.is_empty(), "nothing is read");
    assert_eq!(s.endings(99), (0, 0), "and nothing has failed: the next session goes on");
}

/// A session that was refused has used its number up: the end of its connection, which comes later, is not that of
/// the next session.
#[test]
fn a_refused_session_uses_its_number_up() {
    let mut s = Solo::decode(&[10]);
    let key = s.source_up(10, Mover::Sender);
    let broken = Reason::new(ReasonKind::FabricError, "by hand");
    let stale = s.node.link_state(key).1;
    // The peer is fenced while a handshake is under way: what that described of the link is not so any more.
    s.order(|n, now| n.handle_fabric_broken(now, key, &broken));
    let refused = s.node.next_session(key);
    s.order(|n, now| n.handle_fenced(now, key, Ok(())));
    assert_ne!(s.node.link_state(key).1, stale, "the fence has started the link afresh");
    let up = |session: SessionNo, own_generation: u64, generation: u64| SessionUp {
        peer: key,
        session,
        received: 0,
        generation,
        own_generation,
        side: side(0, 1),
        pages: vec![PAGES],
        name: "peer-10".to_owned(),
    };
    s.order(|n, now| n.handle_session_up(now, up(refused, stale, stale)));
    assert_eq!(s.node.session_of(key), None, "refused");
    let next = s.node.next_session(key);
    assert!(next > refused, "{next:?} after {refused:?}");
    let generation = s.node.link_state(key).1;
    s.order(|n, now| n.handle_session_up(now, up(next, generation, generation)));
    assert_eq!(s.node.session_of(key), Some(next));
    s.order(|n, now| n.handle_session_down(now, key, refused));
    assert_eq!(
        s.node.session_of(key),
        Some(next),
        "the end of the refused one says nothing of its successor"
    );
}
