//! Who comes when.

use super::*;
use kvxfer_proto::node::Direction;
use kvxfer_proto::plan::{Request, Template};
use kvxfer_proto::{DType, Incarnation, Kind, Order, PageLayout, Shard, Side};
use std::sync::Arc;

fn cursor(pages: u32) -> Cursor {
    let layout = PageLayout {
        layers: 4,
        kv_heads: 1,
        head_dim: 128,
        page_tokens: 16,
        dtype: DType::Bfloat16,
        order: Order::Hnd,
        kind: Kind::Kv,
        ..PageLayout::PLAIN
    };
    let side = Side { groups: vec![layout], shard: Shard { tp_rank: 0, tp_size: 1, pp_rank: 0, pp_size: 1 } };
    let list: Arc<[u32]> = (0..pages).map(|p| p * 2).collect();
    let request = Request {
        src_pages: vec![Arc::clone(&list)],
        src_tokens: 0..u64::from(pages) * 16,
        dst_pages: vec![list],
        dst_tokens: 0..u64::from(pages) * 16,
        tokens: 0..u64::from(pages) * 16,
        layers: 0..4,
    };
    let template = Arc::new(Template::new(&side, &side).unwrap());
    Cursor::new(template, request, &[100_000], &[100_000]).unwrap()
}

fn key(n: u64) -> PeerKey {
    PeerKey { incarnation: Incarnation(n), direction: Direction::TheyGrant }
}

fn digest(pages: u32, sample: bool) -> Digest {
    let cursor = cursor(pages);
    let extent = kvxfer_proto::plan::Extent {
        end: kvxfer_proto::plan::End::Source,
        pages: vec![(0..pages).collect()],
        list: 0..u64::from(pages) * 16,
        room: 0..u64::from(pages) * 16,
        tokens: 0..u64::from(pages) * 16,
        layers: 0..4,
        sample,
    };
    Digest::new(Arc::clone(cursor.template()), extent, &[100_000]).unwrap()
}

fn nothing(_: u32, _: u64, _: &mut [u8]) -> Result<(), ()> {
    Ok(())
}

/// Sums take turns with data work, a slice at a time, and need no credit of their peer.
#[test]
fn a_sum_shares_the_thread_with_other_rooms() {
    let mut s = Scheduler::new(64 << 10);
    s.add_sum(DeliveryId(1), key(1), Room::new(1).unwrap(), digest(1000, false));
    s.add(DeliveryId(2), key(2), Room::new(2).unwrap(), cursor(63));
    let (mut out, mut summed, mut moved) = (Vec::new(), 0, 0);
    while let Some(slice) = s.next_slice(&mut out, |k, _| k == key(2)) {
        if slice.sum.is_some() {
            assert_eq!(slice.id, DeliveryId(1));
            let (bytes, end) = s.sum(slice, nothing).unwrap();
            assert!(bytes <= 128 << 10, "a slice of {bytes} bytes");
            summed += bytes;
            assert_eq!(end.is_some(), summed == 1000 * 4096 * 8);
        } else {
            assert!(out.iter().map(|p| p.len).sum::<u64>() <= 128 << 10);
            moved += out.iter().map(|p| p.len).sum::<u64>();
            s.flushed(slice.id);
        }
        if moved < 63 * 4096 * 8 {
            assert!(summed <= moved + (256 << 10), "{summed} bytes were summed while {moved} moved");
        }
    }
    assert_eq!((summed, moved), (1000 * 4096 * 8, 63 * 4096 * 8));
    assert_eq!(s.len(), 0);
}

/// Rows that a sample skips take their time too.
#[test]
fn a_sample_of_a_long_room_comes_in_slices() {
    let mut s = Scheduler::new(u64::MAX / 4);
    s.add_sum(DeliveryId(1), key(1), Room::new(1).unwrap(), digest(4096, true));
    let (mut out, mut slices) = (Vec::new(), 0);
    while let Some(slice) = s.next_slice(&mut out, |_, _| false) {
        s.sum(slice, nothing).unwrap();
        slices += 1;
    }
    assert_eq!(slices, 4096 * 16 * 8 / SLICE_CELLS);
}

/// A flow that waits for a slot is passed over; what its slots bring is cut alike on both sides.
#[test]
fn a_push_without_slots_holds_up_nobody() {
    let mut s = Scheduler::new(64 << 10);
    let room = Room::new(1).unwrap();
    s.add_packed(DeliveryId(1), key(1), room, cursor(100), 64 << 10);
    s.add_unpacking(DeliveryId(2), key(1), room, cursor(100), 64 << 10);
    s.add(DeliveryId(3), key(1), room, cursor(1));
    let mut out = Vec::new();
    let slice = s.next_slice(&mut out, |_, _| true).unwrap();
    assert_eq!((slice.id, slice.slot), (DeliveryId(3), None));
    s.flushed(slice.id);
    assert!(s.next_slice(&mut out, |_, _| true).is_none(), "neither has a slot");
    s.lent(DeliveryId(1), 7);
    assert!(s.next_slice(&mut out, |_, packed| !packed).is_none(), "there is no buffer for its peer");
    let slice = s.next_slice(&mut out, |_, packed| packed).unwrap();
    assert_eq!((slice.id, slice.slot), (DeliveryId(1), Some(InSlot::Pack(7, 0))));
    s.landed(DeliveryId(2), 3, 1000);
    let slice = s.next_slice(&mut out, |_, _| false).unwrap();
    assert_eq!((slice.id, slice.slot), (DeliveryId(2), Some(InSlot::Unpack(3, 1000))));
}

#[test]
fn both_sides_cut_a_push_alike_and_no_slice_is_too_large() {
    let all = |s: &mut Scheduler, give: fn(&mut Scheduler)| {
        let (mut out, mut cuts, mut pieces) = (Vec::new(), Vec::new(), Vec::new());
        loop {
            give(s);
            let Some(slice) = s.next_slice(&mut out, |_, _| true) else { return (cuts, pieces) };
            cuts.push(out.len());
            pieces.extend_from_slice(&out);
            s.flushed(slice.id);
        }
    };
    let room = Room::new(1).unwrap();
    for (slice_bytes, most) in [(64u64 << 10, 16), (1 << 30, PACKED_PIECES)] {
        let mut s = Scheduler::new(64 << 10);
        s.add_packed(DeliveryId(1), key(1), room, cursor(1000), slice_bytes);
        let sent = all(&mut s, |s| s.lent(DeliveryId(1), 0));
        s.add_unpacking(DeliveryId(1), key(1), room, cursor(1000), slice_bytes);
        let taken = all(&mut s, |s| s.landed(DeliveryId(1), 0, 0));
        assert_eq!(sent, taken);
        assert_eq!((sent.0[0], sent.1.len()), (most, 8000));
        assert!(sent.0.iter().all(|n| *n <= most), "{:?}", sent.0);
    }
}

#[test]
fn a_push_that_gets_no_slots_moves_from_its_start() {
    let mut s = Scheduler::new(64 << 10);
    s.add_packed(DeliveryId(1), key(1), Room::new(1).unwrap(), cursor(2), 64 << 10);
    let mut out = Vec::new();
    assert!(s.next_slice(&mut out, |_, _| true).is_none());
    s.direct(DeliveryId(1));
    let slice = s.next_slice(&mut out, |_, packed| !packed).unwrap();
    assert_eq!((slice.slot, out.len()), (None, 16));
    assert_eq!(s.flushed(slice.id), Some(FlowEnd::Complete { bytes: 16 * 4096, writes: 16 }));
}

#[test]
fn a_sum_that_is_stopped_ends_at_once() {
    let mut s = Scheduler::new(64 << 10);
    s.add_sum(DeliveryId(1), key(1), Room::new(1).unwrap(), digest(1000, false));
    let mut out = Vec::new();
    let slice = s.next_slice(&mut out, |_, _| true).unwrap();
    assert_eq!(s.sum(slice, nothing).unwrap().1, None);
    assert_eq!(s.abort(DeliveryId(1)), Some(FlowEnd::Aborted));
    assert!(s.next_slice(&mut out, |_, _| true).is_none());
    s.add_sum(DeliveryId(2), key(1), Room::new(1).unwrap(), digest(1000, false));
    assert_eq!(s.drop_peer(key(1)), vec![DeliveryId(2)]);
    assert!(s.next_slice(&mut out, |_, _| true).is_none());
}

/// A short room behind long ones gets its share from its first turn on.
#[test]
fn a_short_room_waits_for_one_slice_of_each_other_room() {
    let mut s = Scheduler::new(64 << 10);
    for n in 0..4u64 {
        s.add(DeliveryId(n), key(1), Room::new(n).unwrap(), cursor(4000));
    }
    s.add(DeliveryId(9), key(1), Room::new(9).unwrap(), cursor(63));
    let (mut out, mut turns, mut others) = (Vec::new(), 0, 0u64);
    let short = 63 * 4096 * 8;
    loop {
        let slice = s.next_slice(&mut out, |_, _| true).unwrap();
        let bytes: u64 = out.iter().map(|p| p.len).sum();
        if slice.id == DeliveryId(9) {
            turns += 1;
            if let Some(end) = s.flushed(slice.id) {
                assert_eq!(end, FlowEnd::Complete { bytes: short, writes: 63 * 8 });
                break;
            }
        } else {
            others += bytes;
        }
    }
    assert!(others <= 4 * (short + (128 << 10)), "others moved {others} bytes meanwhile, in {turns} turns");
}

/// Takes one slice and has it flushed; whose it was, and its bytes.
fn step(s: &mut Scheduler) -> (DeliveryId, u64) {
    let mut out = Vec::new();
    let slice = s.next_slice(&mut out, |_, _| true).unwrap();
    s.flushed(slice.id);
    (slice.id, out.iter().map(|p| p.len).sum())
}

const PAGE_BYTES: u64 = 8 * 4096;
const QUANTUM: u64 = 64 << 10;

#[test]
fn a_short_room_behind_long_ones_gets_every_other_slice() {
    let mut s = Scheduler::new(QUANTUM);
    for n in 0..4u64 {
        s.add(DeliveryId(n), key(1), Room::new(n).unwrap(), cursor(40_000));
    }
    // Long enough for them to have used up their own head starts.
    while s.heads.values().any(|head| *head > 0) {
        step(&mut s);
    }
    let short = 63 * PAGE_BYTES;
    assert!(short < HEAD_START_TURNS * QUANTUM);
    s.add(DeliveryId(9), key(1), Room::new(9).unwrap(), cursor(63));
    let (mut moved, mut others) = (0, 0);
    while moved < short {
        let (id, bytes) = step(&mut s);
        *(if id == DeliveryId(9) { &mut moved } else { &mut others }) += bytes;
    }
    assert!(others <= short + 2 * QUANTUM, "others moved {others} bytes meanwhile");
}

#[test]
fn a_flood_of_short_rooms_leaves_a_long_one_half() {
    let mut s = Scheduler::new(QUANTUM);
    s.add(DeliveryId(0), key(1), Room::new(0).unwrap(), cursor(40_000));
    while s.heads.values().any(|head| *head > 0) {
        step(&mut s);
    }
    let (mut next, mut open, mut long, mut short) = (1u64, 0, 0u64, 0u64);
    while long < 20_000 * PAGE_BYTES {
        // There are always a hundred of them: one that ends is followed by another.
        while open < 100 {
            s.add(DeliveryId(next), key(1), Room::new(next).unwrap(), cursor(2));
            (next, open) = (next + 1, open + 1);
        }
        let (id, bytes) = step(&mut s);
        if id == DeliveryId(0) {
            long += bytes;
        } else {
            short += bytes;
            s.forget(Room::new(id.0).unwrap());
            open -= 1;
        }
        assert!(short <= long + 4 * QUANTUM, "{short} bytes of short rooms, {long} of the long one");
    }
    assert!(short > long / 2, "the short ones got their share as well");
    assert!(s.rooms() <= 101);
}

#[test]
fn a_room_that_is_pushed_in_parts_has_one_head_start() {
    let mut s = Scheduler::new(QUANTUM);
    let (whole, parts) = (Room::new(1).unwrap(), Room::new(2).unwrap());
    s.add(DeliveryId(0), key(1), whole, cursor(40_000));
    let (mut next, mut moved) = (1u64, [0u64; 2]);
    let total = 20_000 * PAGE_BYTES;
    while moved[0] < total {
        if !s.flows.values().any(|f| f.id != DeliveryId(0)) {
            s.add(DeliveryId(next), key(1), parts, cursor(4));
            next += 1;
        }
        let (id, bytes) = step(&mut s);
        moved[usize::from(id != DeliveryId(0))] += bytes;
    }
    assert!(moved[1] <= total + 2 * HEAD_START_TURNS * QUANTUM, "{moved:?}");
    s.forget(parts);
    assert_eq!(s.rooms(), 1);
}

/// Whoever comes when: over a long time all move the same.
#[test]
fn long_rooms_share_alike_whenever_they_came() {
    let mut s = Scheduler::new(QUANTUM);
    let mut moved = [0u64; 5];
    for n in 0..5usize {
        s.add(DeliveryId(n as u64), key(1), Room::new(n as u64).unwrap(), cursor(45_000));
        for _ in 0..700 {
            let (id, bytes) = step(&mut s);
            moved[usize::try_from(id.0).unwrap()] += bytes;
        }
    }
    let before = moved;
    for _ in 0..5_000 {
        let (id, bytes) = step(&mut s);
        moved[usize::try_from(id.0).unwrap()] += bytes;
    }
    let gained: Vec<u64> = moved.iter().zip(before).map(|(m, b)| m - b).collect();
    let (least, most) = (gained.iter().min().unwrap(), gained.iter().max().unwrap());
    assert!(most - least <= 2 * QUANTUM, "{gained:?}");
}

#[test]
fn an_abort_ends_once_nothing_is_in_flight() {
    let mut s = Scheduler::new(64 << 10);
    s.add(DeliveryId(1), key(1), Room::new(1).unwrap(), cursor(100));
    let mut out = Vec::new();
    s.next_slice(&mut out, |_, _| true).unwrap();
    s.next_slice(&mut out, |_, _| true).unwrap();
    assert_eq!(s.abort(DeliveryId(1)), None);
    assert!(s.next_slice(&mut out, |_, _| true).is_none(), "nothing more is posted");
    assert_eq!(s.flushed(DeliveryId(1)), None);
    assert_eq!(s.flushed(DeliveryId(1)), Some(FlowEnd::Aborted));
    assert!(!s.has_work());
}

#[test]
fn a_peer_that_cannot_take_more_does_not_hold_up_the_others() {
    let mut s = Scheduler::new(64 << 10);
    s.add(DeliveryId(1), key(1), Room::new(1).unwrap(), cursor(100));
    s.add(DeliveryId(2), key(2), Room::new(2).unwrap(), cursor(100));
    let mut out = Vec::new();
    for _ in 0..10 {
        assert_eq!(s.next_slice(&mut out, |k, _| k == key(2)).unwrap().id, DeliveryId(2));
    }
    assert_eq!(s.drop_peer(key(2)), vec![DeliveryId(2)]);
    assert!(s.next_slice(&mut out, |k, _| k == key(2)).is_none());
    assert_eq!(s.next_slice(&mut out, |_, _| true).unwrap().id, DeliveryId(1));
}
