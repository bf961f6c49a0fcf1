//! One node and pushes that come or go packed: what counts when, which slots are whose, and what hostile words do.

#![allow(clippy::unwrap_used)]

mod sim;

use kvxfer_proto::msg::{Copied, Credit, Drained, Msg, Pack, Packed, Retract};
use kvxfer_proto::node::{Config, DeliveryEnd, Direction, EventKind, Mover, PeerKey};
use kvxfer_proto::{PushId, ReasonKind, Seq};
use sim::rooms::{expect, ids, push, room, why};
use sim::solo::{Solo, done, grant, owed};

/// Bytes of the room: two layers of K and V, four tokens.
const BYTES: u64 = 64;
const SLOT: u64 = 32;

fn pack(slots: u32) -> Pack {
    Pack {
        room: room(99),
        seq: Seq(1),
        push: PushId(7),
        span: owed((0, 4)),
        pages_start: 0,
        pages: ids(&[5]),
        pages_end: None,
        bytes: BYTES,
        slice_bytes: SLOT,
        slots,
    }
}

fn packed(slot: u32, bytes: u64, slice: u64) -> Msg {
    Msg::Packed(Packed { room: room(99), seq: Seq(1), push: PushId(7), slot, bytes, slice })
}

fn drained() -> Msg {
    Msg::Drained(Drained { room: room(99), seq: Seq(1), reason: why(ReasonKind::Cancelled) })
}

/// Decode with a ring of four slots, to which a push of room 99 comes packed.
fn decode() -> (Solo, PeerKey) {
    let mut s = Solo::decode(&[10]);
    let k = s.source_up(10, Mover::Sender);
    s.order(|n, _| n.handle_ring(SLOT, 4).unwrap());
    s.recv(k, Msg::Pack(pack(2))).unwrap();
    (s, k)
}

fn slots_taken(s: &Solo) -> (u64, u64) {
    let g = s.node.gauges();
    (g.staging_slots, g.quarantined_slots)
}

fn unpacked(s: &mut Solo, slot: u32) {
    let id = s.unpackings[0].delivery.id;
    s.order(|n, now| n.handle_unpacked(now, id, slot));
}

fn unpacking_ends(s: &mut Solo, end: DeliveryEnd) {
    let id = s.unpackings[0].delivery.id;
    s.order(|n, now| n.handle_delivery(now, id, end));
}

fn failure(s: &Solo, r: u64) -> Option<(ReasonKind, String)> {
    s.events.iter().filter(|e| e.room == room(r)).find_map(|e| match &e.kind {
        EventKind::Failed(reason) => Some((reason.kind, reason.text.clone())),
        _ => None,
    })
}

fn told<'a>(s: &'a Solo, name: &str) -> Vec<&'a Msg> {
    s.sent.iter().map(|(_, _, msg)| msg).filter(|msg| msg.name() == name).collect()
}

#[test]
fn a_room_succeeds_once_its_slices_are_unpacked_and_not_when_they_have_landed() {
    let (mut s, k) = decode();
    assert_eq!(told(&s, "Credit").len(), 1);
    assert_eq!(slots_taken(&s), (2, 0));
    s.recv(k, packed(0, SLOT, 0)).unwrap();
    s.recv(k, packed(1, SLOT, 1)).unwrap();
    s.recv(k, done(99, 1, 7, (0, 4), true)).unwrap();
    unpacked(&mut s, 0);
    assert_eq!((s.landed.clone(), s.endings(99)), (vec![0, 1], (0, 0)), "half of it is in the pages");
    assert_eq!(slots_taken(&s), (1, 0), "an empty slot can be lent again");
    unpacked(&mut s, 1);
    assert_eq!(s.endings(99), (0, 0), "the driver has not said that it is through");
    unpacking_ends(&mut s, DeliveryEnd::Complete { bytes: BYTES, writes: 1 });
    assert_eq!((s.endings(99), slots_taken(&s)), ((1, 1), (0, 0)));
    assert_eq!(told(&s, "Copied").len(), 1, "the source may write in its place, if it takes it back");
}

#[test]
fn a_push_that_needs_more_slots_than_it_asked_for_gets_them() {
    let (mut s, k) = decode();
    for (slice, slot) in [(0, 0), (1, 1)] {
        s.recv(k, packed(slot, 16, slice)).unwrap();
    }
    unpacked(&mut s, 0);
    let credits = told(&s, "Credit");
    assert!(credits.len() > 1, "32 of 64 bytes have come, and every slot that it had is used: {credits:?}");
}

#[test]
fn case_11_slots_of_a_cancelled_room_wait_for_the_drain() {
    let (mut s, k) = decode();
    s.recv(k, packed(0, SLOT, 0)).unwrap();
    s.order(|n, now| n.handle_cancel(now, room(99), why(ReasonKind::Cancelled)));
    assert_eq!(slots_taken(&s), (2, 1), "one may still be written, and one is being read");
    s.recv(k, drained()).unwrap();
    assert_eq!((slots_taken(&s), s.released(99)), ((1, 0), 0), "we still copy into its pages");
    unpacking_ends(&mut s, DeliveryEnd::Aborted);
    assert_eq!((slots_taken(&s), s.released(99)), ((0, 0), 1));
}

/// A rank that has done its part is not waited for when another one fails the room: its slots are, all the same.
#[test]
fn slots_of_a_rank_that_was_done_come_back_after_the_room_is_gone() {
    for ends in ["drain", "death", "new session"] {
        let mut s = Solo::decode(&[10, 11]);
        let (k, other) = (s.source_up(10, Mover::Sender), s.source_up(11, Mover::Sender));
        s.order(|n, _| n.handle_ring(SLOT, 4).unwrap());
        // It asks for more than it uses, and says that it is done.
        let bytes = 2 * SLOT;
        s.recv(k, Msg::Pack(Pack { bytes, ..pack(4) })).unwrap();
        let lent = slots_taken(&s).0;
        assert!(lent >= 2, "{lent} slots");
        for slot in [0u32, 1] {
            if u64::from(slot) < lent {
                s.recv(k, packed(slot, SLOT, slot.into())).unwrap();
                unpacked(&mut s, slot);
            }
        }
        unpacking_ends(&mut s, DeliveryEnd::Complete { bytes, writes: 1 });
        s.recv(k, done(99, 1, 7, (0, 4), true)).unwrap();
        let left = slots_taken(&s).0;
        s.recv(other, drained()).unwrap();
        assert_eq!(s.released(99), 1, "nothing is written any more");
        assert_eq!(slots_taken(&s), (left, left));
        if ends == "drain" {
            s.recv(k, drained()).unwrap();
            assert_eq!(slots_taken(&s), (0, 0));
            continue;
        }
        // A fence that did not happen frees nothing.
        s.order(|n, now| n.handle_fabric_broken(now, k, &why(ReasonKind::FabricError)));
        s.order(|n, now| n.handle_fenced(now, k, Err(why(ReasonKind::FabricError))));
        assert_eq!(slots_taken(&s), (left, left));
        assert!(s.node.wants_session(k), "its answer would come in one");
        if ends == "death" {
            s.order(|n, now| n.handle_peer_died(now, k));
        } else {
            s.up(10, Direction::WeGrant, None, (0, 1));
        }
        assert_eq!(slots_taken(&s), (0, 0));
        assert!(!s.node.wants_session(k));
    }
}

/// Every slot waits for a peer that may never answer: what comes now comes unpacked.
#[test]
fn a_push_for_which_all_slots_are_in_quarantine_comes_unpacked() {
    let mut s = Solo::decode(&[10]);
    let k = s.source_up(10, Mover::Sender);
    s.order(|n, _| n.handle_ring(SLOT, 1).unwrap());
    s.recv(k, Msg::Pack(pack(2))).unwrap();
    assert_eq!(slots_taken(&s), (1, 0));
    s.order(|n, now| n.handle_expect(now, expect(98, &[30], (0, 4))));
    s.recv(k, Msg::Pack(Pack { room: room(98), seq: Seq(2), push: PushId(8), ..pack(2) })).unwrap();
    assert_eq!(told(&s, "Credit").len(), 1, "it waits: the one slot may come back");
    s.order(|n, now| n.handle_cancel(now, room(99), why(ReasonKind::Cancelled)));
    assert_eq!(slots_taken(&s), (1, 1));
    let none = Credit { room: room(98), seq: Seq(2), slots: (0, 0), push: PushId(8) };
    assert_eq!(told(&s, "Credit").last(), Some(&&Msg::Credit(none)));
    let id = s.unpackings[1].delivery.id;
    assert!(s.aborts.contains(&id));
    s.order(|n, now| n.handle_delivery(now, id, DeliveryEnd::Aborted));
    s.recv(k, done(98, 2, 8, (0, 4), true)).unwrap();
    assert_eq!(s.endings(98), (1, 1));
}

#[test]
fn a_delivery_that_gets_no_slots_goes_unpacked() {
    let mut s = Solo::new(Config::default());
    let k = s.dest_up(20, Mover::Sender);
    s.order(|n, _| n.handle_peer_ring(k, SLOT, 4).unwrap());
    s.order(|n, now| n.handle_push(now, push(1, 7, &[1], (0, 4))));
    s.recv(k, grant(1, 1, &[1])).unwrap();
    let id = s.delivers[0].id;
    s.order(|n, now| assert!(n.handle_pack(now, id, BYTES, SLOT, 2)));
    s.recv(k, credit(7, (0, 0))).unwrap();
    assert_eq!((s.directs.clone(), s.aborts.len()), (vec![id], 0));
    s.recv(k, Msg::Copied(Copied { room: room(1), seq: Seq(1), push: PushId(7), error: None })).unwrap();
    s.end(0, DeliveryEnd::Complete { bytes: BYTES, writes: 4 });
    assert_eq!(told(&s, "Done").len(), 1);
    // Said again, it says nothing.
    s.recv(k, credit(7, (0, 0))).unwrap();
    assert_eq!(s.directs.len(), 1);
}

#[test]
fn what_is_done_is_what_came_packed() {
    let (mut s, k) = decode();
    s.recv(k, Msg::Pack(Pack { push: PushId(8), span: owed((0, 4)), ..pack(2) })).unwrap();
    let (kind, text) = failure(&s, 99).unwrap();
    assert_eq!(kind, ReasonKind::ProtocolError);
    assert!(text.contains("is there in part already"), "{text}");

    let mut s = Solo::decode(&[10]);
    let k = s.source_up(10, Mover::Sender);
    s.order(|n, _| n.handle_ring(SLOT, 4).unwrap());
    s.recv(k, Msg::Pack(Pack { span: owed((0, 1)), bytes: SLOT, ..pack(1) })).unwrap();
    s.recv(k, packed(0, SLOT, 0)).unwrap();
    unpacked(&mut s, 0);
    unpacking_ends(&mut s, DeliveryEnd::Complete { bytes: SLOT, writes: 1 });
    s.recv(k, done(99, 1, 7, (0, 4), true)).unwrap();
    let (kind, text) = failure(&s, 99).unwrap();
    assert_eq!(kind, ReasonKind::ProtocolError, "all is said to be done, and one token came");
    assert!(text.contains("came packed"), "{text}");
}

/// Slices that are not full are more than the sender asked slots for: as many as are left are out at once.
#[test]
fn slots_keep_coming_for_slices_that_are_not_full() {
    let mut s = Solo::decode(&[10]);
    let k = s.source_up(10, Mover::Sender);
    s.order(|n, _| n.handle_ring(SLOT, 16).unwrap());
    s.recv(k, Msg::Pack(pack(2))).unwrap();
    s.recv(k, packed(0, 4, 0)).unwrap();
    s.recv(k, packed(1, 4, 1)).unwrap();
    let out = slots_taken(&s).0 - 2;
    assert_eq!(out, 2, "56 bytes are left: two slices at the least, and a slot for each");
}

#[test]
fn pushes_of_one_room_that_need_more_slots_than_they_asked_for_all_get_them() {
    for order in [[7, 8], [8, 7]] {
        let (mut s, k) = {
            let mut s = Solo::decode(&[10]);
            let k = s.source_up(10, Mover::Sender);
            s.order(|n, _| n.handle_ring(SLOT, 4).unwrap());
            (s, k)
        };
        // Eight slices of 4 bytes each: a slot holds 32, so one slot is asked for.
        for (push, tokens) in [(7, (0, 2)), (8, (2, 4))] {
            let span = owed(tokens);
            let pack = Pack { push: PushId(push), span, bytes: BYTES / 2, pages_start: tokens.0, ..pack(1) };
            s.recv(k, Msg::Pack(pack)).unwrap();
        }
        let mut seen = 0;
        let mut free: Vec<(u64, u32)> = Vec::new();
        let mut slices = std::collections::BTreeMap::from([(7, 0u64), (8, 0)]);
        while slices.values().any(|n| *n < 8) {
            for msg in told(&s, "Credit").split_off(seen) {
                let Msg::Credit(c) = msg else { panic!("{msg:?}") };
                free.extend((c.slots.0..c.slots.0 + c.slots.1).map(|slot| (c.push.0, slot)));
                seen += 1;
            }
            // One push is always the faster one.
            let next = order.iter().find_map(|push| free.iter().position(|(p, _)| p == push));
            let (push, slot) = free.remove(next.expect("a push waits for ever for its slot"));
            let slice = slices[&push];
            *slices.get_mut(&push).unwrap() += 1;
            let msg = Packed { room: room(99), seq: Seq(1), push: PushId(push), slot, bytes: 4, slice };
            s.recv(k, Msg::Packed(msg)).unwrap();
            let id = s.unpackings.iter().find(|u| u.delivery.push == PushId(push)).unwrap().delivery.id;
            s.order(|n, now| n.handle_unpacked(now, id, slot));
        }
        assert_eq!(failure(&s, 99), None);
        assert!(slots_taken(&s).0 <= 1, "none is lent for slices that do not come");
    }
}

#[test]
fn a_fence_frees_the_slots_of_its_peer() {
    let (mut s, k) = decode();
    s.recv(k, packed(0, SLOT, 0)).unwrap();
    s.order(|n, now| n.handle_fabric_broken(now, k, &why(ReasonKind::FabricError)));
    assert_eq!(s.released(99), 0);
    assert!(slots_taken(&s).0 >= 1, "nothing says that no write lands any more");
    s.order(|n, now| n.handle_fenced(now, k, Ok(())));
    assert_eq!((slots_taken(&s), s.released(99)), ((0, 0), 1));
}

#[test]
fn a_push_that_is_taken_back_is_answered_once_nobody_unpacks_it() {
    let (mut s, k) = decode();
    s.recv(k, packed(0, SLOT, 0)).unwrap();
    s.recv(k, Msg::Retract(Retract { room: room(99), seq: Seq(1), push: PushId(7) })).unwrap();
    assert_eq!((s.aborts.len(), told(&s, "Copied").len()), (1, 0));
    unpacking_ends(&mut s, DeliveryEnd::Aborted);
    assert_eq!(told(&s, "Copied").len(), 1);
    s.recv(k, packed(1, 0, 0)).unwrap();
    assert_eq!((slots_taken(&s), s.endings(99)), ((0, 0), (0, 0)), "the room goes on");
}

#[test]
fn hostile_words_of_slots_end_the_room_or_the_session_and_move_nothing() {
    let bad_pack = |change: fn(&mut Pack)| {
        let mut m = pack(2);
        (m.push, m.room) = (PushId(8), room(99));
        change(&mut m);
        Msg::Pack(m)
    };
    let cases: [(Msg, &str); 11] = [
        (bad_pack(|m| m.slice_bytes = SLOT + 1), "slices of 33 bytes"),
        (bad_pack(|m| m.slice_bytes = 0), "slices of 0 bytes"),
        (bad_pack(|m| m.bytes = 0), "not granted"),
        (bad_pack(|m| m.span.tokens.1 = 5), "not granted"),
        (bad_pack(|m| m.pages = ids(&[1, 2, 3, 4, 5, 6, 7])), "more pages than tokens"),
        (bad_pack(|m| m.push = PushId(7)), "there already"),
        (packed(2, SLOT, 0), "slot 2 is free"),
        (packed(9, SLOT, 0), "slots 0 to 3"),
        (packed(0, SLOT + 1, 0), "do not fit"),
        (packed(0, SLOT, 1), "slice 0 was due"),
        (done(99, 1, 7, (0, 4), true), "0 of its 64 packed bytes"),
    ];
    for (msg, text) in cases {
        let (mut s, k) = decode();
        let said = format!("{msg:?}");
        let (landed, unpackings) = (s.landed.len(), s.unpackings.len());
        let answer = s.recv(k, msg).err().map(|r| r.text).or_else(|| failure(&s, 99).map(|f| f.1));
        assert!(answer.as_ref().is_some_and(|a| a.contains(text)), "{said}: {answer:?}");
        assert_eq!((s.landed.len(), s.unpackings.len()), (landed, unpackings), "{said}");
    }
    let mut s = Solo::decode(&[10]);
    let k = s.source_up(10, Mover::Sender);
    assert!(s.recv(k, Msg::Pack(pack(2))).is_err(), "there is no ring");
    let mut s = Solo::decode(&[10]);
    let k = s.source_up(10, Mover::Receiver);
    s.order(|n, _| n.handle_ring(SLOT, 4).unwrap());
    assert!(s.recv(k, Msg::Pack(pack(2))).is_err(), "here the receiver copies");
}

/// Prefill whose push goes packed, with two slots lent for it.
fn prefill() -> (Solo, PeerKey) {
    let mut s = Solo::new(Config::default());
    let k = s.dest_up(20, Mover::Sender);
    s.order(|n, _| n.handle_peer_ring(k, SLOT, 4).unwrap());
    s.order(|n, now| n.handle_push(now, push(1, 7, &[1], (0, 4))));
    s.recv(k, grant(1, 1, &[1])).unwrap();
    let id = s.delivers[0].id;
    s.order(|n, now| assert!(n.handle_pack(now, id, BYTES, SLOT, 2)));
    s.recv(k, credit(7, (0, 2))).unwrap();
    assert_eq!(s.lent, [0, 1]);
    (s, k)
}

fn credit(push: u64, slots: (u32, u32)) -> Msg {
    Msg::Credit(Credit { room: room(1), seq: Seq(1), slots, push: PushId(push) })
}

fn written(s: &mut Solo, slot: u32, slice: u64) {
    let id = s.delivers[0].id;
    s.order(|n, now| n.handle_packed(now, id, slot, SLOT, slice));
}

/// Slots that decode was told of, and the bytes in each.
fn given_back(s: &Solo) -> Vec<(u32, u64)> {
    let packed = told(s, "Packed").into_iter();
    packed.map(|m| if let Msg::Packed(p) = m { (p.slot, p.bytes) } else { (9, 9) }).collect()
}

#[test]
fn every_slot_goes_back_filled_or_not_before_done_is_said() {
    let (mut s, k) = prefill();
    written(&mut s, 0, 0);
    s.recv(k, credit(7, (2, 2))).unwrap();
    s.end(0, DeliveryEnd::Complete { bytes: BYTES, writes: 1 });
    assert_eq!(given_back(&s), [(0, SLOT), (1, 0), (2, 0), (3, 0)]);
    let names: Vec<&str> = s.sent.iter().map(|(_, _, m)| m.name()).filter(|n| *n != "Ack").collect();
    assert_eq!(names.last(), Some(&"Done"), "{names:?}");
    // What is lent too late goes back as it came.
    s.recv(k, credit(7, (0, 1))).unwrap();
    assert_eq!(given_back(&s).last(), Some(&(0, 0)));
}

#[test]
fn case_11_a_cancel_in_mid_slice_is_answered_once_nothing_is_in_flight() {
    let (mut s, k) = prefill();
    written(&mut s, 0, 0);
    let reason = why(ReasonKind::Cancelled);
    s.recv(k, Msg::Cancel(kvxfer_proto::msg::Cancel { room: room(1), upto: Seq(1), reason })).unwrap();
    assert_eq!((s.aborts.len(), s.drained(k, 1)), (1, None));
    written(&mut s, 1, 1);
    s.end(0, DeliveryEnd::Aborted);
    assert!(s.drained(k, 1).is_some());
    assert_eq!(given_back(&s), [(0, SLOT)], "the drain answers for the others");
    // Lent before our answer was read: it answers for these too.
    s.recv(k, credit(7, (2, 2))).unwrap();
    assert_eq!((given_back(&s).len(), s.lent.len()), (1, 2));
}

#[test]
fn what_replaces_a_packed_push_waits_for_decodes_word() {
    let (mut s, k) = prefill();
    written(&mut s, 0, 0);
    s.order(|n, now| n.handle_retract(now, room(1), PushId(7)));
    assert_eq!(told(&s, "Retract").len(), 1);
    written(&mut s, 1, 1);
    s.end(0, DeliveryEnd::Aborted);
    assert_eq!(given_back(&s), [(0, SLOT), (1, 0)], "its bytes count for nothing now");
    s.order(|n, now| n.handle_push(now, push(1, 8, &[2], (0, 4))));
    assert_eq!(s.delivers.len(), 1, "decode may be unpacking into the same pages");
    s.recv(k, Msg::Copied(Copied { room: room(1), seq: Seq(1), push: PushId(7), error: None })).unwrap();
    assert_eq!(s.delivers.len(), 2);
}

#[test]
fn hostile_credits_are_refused() {
    for slots in [(0, 1), (3, 2), (4, 1), (2, u32::MAX), (2, 0)] {
        let (mut s, k) = prefill();
        assert!(s.recv(k, credit(7, slots)).is_err(), "{slots:?}");
        assert_eq!(s.lent, [0, 1]);
    }
    let mut s = Solo::new(Config::default());
    let k = s.dest_up(20, Mover::Sender);
    s.order(|n, now| n.handle_push(now, push(1, 7, &[1], (0, 4))));
    s.recv(k, grant(1, 1, &[1])).unwrap();
    assert!(s.recv(k, credit(7, (0, 1))).is_err(), "it has no ring");
}
