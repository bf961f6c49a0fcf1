//! Field case 11: an abort under a write, over both families of transport.
//!
//! Room A's write to pages 14 to 44 runs from t=0 to t=6 s; decode cancels at 2.4 s and wants to give pages 1 to 32 to
//! room B. No page of A is released before its last byte; and if the write was not yet posted at the cancel, it never
//! is, and the bytes do not change.

use super::SimOptions;
use super::engine::{Ends, Owner, RoomRec};
use super::geometry::Held;
use super::report::Log;
use super::setup::Plan;
use super::world::{Delays, World};
use kvxfer_fabric::sim::{SimConfig, SplitMix64};
use kvxfer_proto::msg::Verify;
use kvxfer_proto::node::{Config, Expect, Mover, Push, Source};
use kvxfer_proto::{DType, Kind, Order, PageLayout, PushId, Reason, ReasonKind, Room};
use std::sync::Arc;

const SECOND: u64 = 1_000_000;
const PREFILL: usize = 0;
const DECODE: usize = 1;

/// One prefill and one decode process; a write, or a receiver's copy, takes `data_us`.
fn world(mover: Mover, data_us: (u64, u64)) -> World<'static> {
    let layout = PageLayout {
        layers: 1,
        kv_heads: 1,
        head_dim: 2,
        page_tokens: 4,
        dtype: DType::Uint8,
        order: Order::Hnd,
        kind: Kind::Kv,
        ..PageLayout::PLAIN
    };
    let side = || (vec![layout], vec![(1, 1)]);
    let plan = Plan {
        prefill: side(),
        decode: side(),
        pages: 64,
        delays: Delays { control: (50, 200), copy: data_us, turn: (1, 15) },
        net: SimConfig { write_delay_us: data_us, ..SimConfig::default() },
        config: Config::default(),
        staging: None,
    };
    let options = SimOptions { mover, kill: 0, stop: 0, cut: 0, ..SimOptions::new(11) };
    let Ok(mut w) = World::of(options, &plan, SplitMix64::new(11), Log::new(None)) else { unreachable!() };
    for agent in [PREFILL, DECODE] {
        w.blank_all(agent);
    }
    w
}

fn room(n: u64) -> Room {
    Room::new(n).unwrap()
}

fn pages(range: std::ops::RangeInclusive<u32>) -> Vec<Arc<[u32]>> {
    vec![range.collect::<Vec<_>>().into()]
}

/// The books' entry of a room, made when its first side is ordered.
fn enter(w: &mut World<'_>, r: u64, tokens: (u64, u64)) -> usize {
    if let Some(index) = w.by_room.get(&room(r)) {
        return *index;
    }
    let ends = |agent| Ends { agent, ..Ends::default() };
    w.rooms.push(RoomRec::by_hand(room(r), tokens, ends(DECODE), ends(PREFILL)));
    w.by_room.insert(room(r), w.rooms.len() - 1);
    w.rooms.len() - 1
}

/// Takes these pages for a room; nobody else's, or the test is wrong.
fn take(w: &mut World<'_>, agent: usize, r: u64, tokens: (u64, u64), list: &[Arc<[u32]>]) {
    for (k, page) in list[0].iter().enumerate() {
        let base = w.agents[agent].geo.base(0, 0, k);
        let a = &mut w.agents[agent];
        let at = a.free[0].iter().position(|p| p == page).expect("a free page");
        a.free[0].remove(at);
        a.owner[0][*page as usize] = Some(Owner { room: room(r), held: Held { room: r, base, tokens } });
    }
}

/// How the decode or prefill side of a room stands.
fn ends(w: &World<'_>, agent: usize, r: u64) -> Ends {
    let rec = &w.rooms[w.by_room[&room(r)]];
    if agent == DECODE { rec.decode[0].ends.clone() } else { rec.prefill[0].ends.clone() }
}

/// How long a write, or a receiver's copy of a slice, takes from now on.
fn set_data_delay(w: &mut World<'_>, data_us: (u64, u64)) {
    w.delays.copy = data_us;
    w.net.configure(SimConfig { write_delay_us: data_us, ..w.net.config() });
}

/// Decode expects a room of 4 tokens a page in these pages.
fn expect(w: &mut World<'_>, r: u64, list: &[Arc<[u32]>]) {
    let tokens = (0, list[0].len() as u64 * 4);
    let source = Source { address: "prefill-0".into(), dp_rank: 0 };
    let now = w.time();
    let index = enter(w, r, tokens);
    take(w, DECODE, r, tokens, list);
    w.rooms[index].decode[0].ends.named = true;
    w.rooms[index].decode[0].pages = list.to_vec();
    let order = Expect {
        room: room(r),
        pages: list.to_vec(),
        odd_page: None,
        tokens,
        source,
        verify: Verify::Off,
        bootstrap_timeout: None,
        waiting_timeout: None,
    };
    w.agents[DECODE].node.handle_expect(now, order);
    w.carry_out(DECODE);
}

fn push(w: &mut World<'_>, r: u64, list: &[Arc<[u32]>]) {
    let tokens = (0, list[0].len() as u64 * 4);
    let index = enter(w, r, tokens);
    take(w, PREFILL, r, tokens, list);
    w.rooms[index].prefill[0].ends.named = true;
    w.rooms[index].prefill[0].pages = Some(list.to_vec());
    w.fill(PREFILL, room(r), &list.to_vec(), 0, tokens);
    let now = w.time();
    let order = Push {
        room: room(r),
        id: PushId(r),
        pages: list.to_vec(),
        odd_page: None,
        tokens,
        layers: None,
        last: true,
        meta: None,
        ready: true,
        bootstrap_timeout: None,
        waiting_timeout: None,
    };
    w.agents[PREFILL].node.handle_push(now, order);
    w.carry_out(PREFILL);
    w.want_turn(PREFILL);
}

fn cancel(w: &mut World<'_>, r: u64) {
    let now = w.time();
    let reason = Reason::new(ReasonKind::Cancelled, "by hand");
    w.agents[DECODE].node.handle_cancel(now, room(r), reason);
    w.carry_out(DECODE);
}

fn run_until(w: &mut World<'_>, at: u64) {
    while w.step(at) {}
    w.now = w.now.max(at);
}

/// Everything that decode's memory holds.
fn memory(w: &World<'_>) -> Vec<Vec<u8>> {
    let a = &w.agents[DECODE];
    let node = kvxfer_fabric::sim::SimFabric::node(&a.fabric);
    let lens = a.geo.region_lens();
    (0..).zip(&lens).map(|(n, len)| w.net.read(node, n, 0, *len).unwrap()).collect()
}

#[test]
fn case_11_no_page_is_released_before_the_last_byte_of_a_write_under_way() {
    for mover in [Mover::Sender, Mover::Receiver] {
        // The first hand-off brings the two into contact, fast; then every write or copy of a slice takes long.
        let mut w = world(mover, (1, 10));
        expect(&mut w, 1, &pages(50..=50));
        push(&mut w, 1, &pages(50..=50));
        run_until(&mut w, SECOND);
        assert!(ends(&w, DECODE, 1).succeeded, "{mover:?}");

        let start = w.now;
        // All slices of A are in the network at once; copies come one after the other, and K and V are three slices each.
        let each = if mover == Mover::Sender { (SECOND, 6 * SECOND) } else { (SECOND, SECOND) };
        set_data_delay(&mut w, each);
        let a = pages(14..=44);
        expect(&mut w, 2, &a);
        push(&mut w, 2, &a);
        run_until(&mut w, start + 2_400_000);
        assert!(
            w.agents.iter().any(|agent| agent.lane.is_writing(room(2))),
            "{mover:?}: a write is under way"
        );
        let landed = w.tally.writes_landed;
        cancel(&mut w, 2);
        let e = ends(&w, DECODE, 2);
        assert_eq!((e.terminal, e.released), (1, 0), "{mover:?}: failed at once, and not released");
        // Pages 1 to 32 are wanted for B: those of A among them are refused for as long as A holds them.
        let mut released_at = None;
        let mut last_byte = (landed, w.now);
        while w.now < start + 20 * SECOND {
            let at = w.now + 5000;
            run_until(&mut w, at);
            if w.tally.writes_landed > last_byte.0 {
                last_byte = (w.tally.writes_landed, w.now);
            }
            if ends(&w, DECODE, 2).released > 0 {
                released_at.get_or_insert(w.now);
            }
            let held = w.agents[DECODE].node.page_owner(0, 14) == Some(room(2));
            assert_eq!(held, released_at.is_none(), "{mover:?}");
        }
        assert!(last_byte.0 > landed, "{mover:?}: bytes landed after the cancel");
        let released_at = released_at.unwrap();
        assert!(
            released_at >= last_byte.1,
            "{mover:?}: released at {released_at}, last byte at {}",
            last_byte.1
        );
        // Now B can have them, and gets its own bytes.
        set_data_delay(&mut w, (1, 10));
        let b = pages(1..=32);
        expect(&mut w, 3, &b);
        push(&mut w, 3, &b);
        let at = w.now + 5 * SECOND;
        run_until(&mut w, at);
        assert!(ends(&w, DECODE, 3).succeeded, "{mover:?}");
        assert_eq!(w.log.violations, Vec::<String>::new(), "{mover:?}");
        assert_eq!((w.tally.late_writes, w.tally.corrupt_bytes), (0, 0), "{mover:?}");
    }
}

#[test]
fn case_11_a_write_that_was_not_posted_at_the_cancel_never_is() {
    for mover in [Mover::Sender, Mover::Receiver] {
        // Before the push, and with the push on its way to the transfer thread or the word of it on its way to decode.
        for push_first in [false, true] {
            let mut w = world(mover, (1, 10));
            let a = pages(14..=44);
            let before = memory(&w);
            if push_first {
                push(&mut w, 2, &a);
            }
            expect(&mut w, 2, &a);
            if !push_first {
                run_until(&mut w, 2_400_000);
            }
            assert!(w.agents.iter().all(|agent| !agent.lane.is_writing(room(2))));
            cancel(&mut w, 2);
            if !push_first {
                // Once the cancel is there.
                let at = w.now + SECOND / 10;
                run_until(&mut w, at);
                push(&mut w, 2, &a);
            }
            // Its engine fills them anew once they are released.
            while ends(&w, DECODE, 2).released == 0 {
                assert!(memory(&w) == before, "{mover:?}: the bytes have changed");
                assert!(w.step(20 * SECOND), "{mover:?}: never released");
            }
            run_until(&mut w, 20 * SECOND);
            let e = ends(&w, DECODE, 2);
            assert_eq!((e.terminal, e.released, e.succeeded), (1, 1, false), "{mover:?}");
            let e = ends(&w, PREFILL, 2);
            assert_eq!((e.terminal, e.released, e.succeeded), (1, 1, false), "{mover:?}");
            assert_eq!(w.tally.writes_landed, 0, "{mover:?}: nothing was written");
            assert_eq!(w.log.violations, Vec::<String>::new(), "{mover:?}");
        }
    }
}

/// The transfer thread has posted some slices of A when the cancel reaches it: the others stay where they are.
#[test]
fn case_11_no_more_of_a_write_is_posted_once_the_cancel_is_there() {
    for mover in [Mover::Sender, Mover::Receiver] {
        let mut w = world(mover, (1, 10));
        w.delays.turn = (SECOND, SECOND);
        let a = pages(14..=44);
        push(&mut w, 2, &a);
        expect(&mut w, 2, &a);
        while w.tally.writes_landed < 2 {
            assert!(w.step(10 * SECOND), "{mover:?}");
        }
        cancel(&mut w, 2);
        run_until(&mut w, 20 * SECOND);
        assert_eq!(w.tally.writes_landed, 2, "{mover:?}: of six slices");
        for agent in [PREFILL, DECODE] {
            let e = ends(&w, agent, 2);
            assert_eq!((e.terminal, e.released, e.succeeded), (1, 1, false), "{mover:?}");
        }
        assert_eq!(w.log.violations, Vec::<String>::new(), "{mover:?}");
    }
}
