//! Checksums between agents, over shared memory; `ucx_hand_off.rs` and the Python tests have UCX.

#![allow(clippy::unwrap_used, clippy::cast_possible_truncation)]

mod support;

use kvxfer_engine::FabricChoice;
use kvxfer_proto::ReasonKind;
use kvxfer_proto::msg::Verify;
use kvxfer_proto::node::Flaw;
use support::{Party, expect, party, push, side};

fn prefill(pool: bool) -> Party {
    let mut p = party("prefill", side(0, 1), FabricChoice::Shm, pool, |_| {});
    p.memory.fill(|i| (i % 251) as u8);
    p
}

#[test]
fn rooms_that_are_summed_succeed_whoever_owns_the_memory() {
    for pool in [true, false] {
        let mut p = prefill(pool);
        let mut d = party("decode", side(0, 1), FabricChoice::Shm, pool, |_| {});
        for (r, verify) in (1..).zip([Verify::Full, Verify::Sample, Verify::Off]) {
            let mut order = expect(r, &[63, 0, 9], 0, 40, p.agent.address());
            order.verify = verify;
            d.agent.expect(order).unwrap();
            p.agent.push(push(r, &[5, 17, 40], 0, 40)).unwrap();
            d.succeeds(r);
            p.succeeds(r);
            assert!(p.memory.page(0, 5) == d.memory.page(0, 63));
        }
        assert!(d.agent.close(support::LIMIT).is_empty());
    }
}

#[test]
fn a_flipped_byte_fails_the_room_on_both_sides_and_its_pages_come_back() {
    let mut p = prefill(true);
    let flaw = |c: &mut kvxfer_engine::AgentConfig| c.node.flaw = Some(Flaw::FlipAByte);
    let mut d = party("decode", side(0, 1), FabricChoice::Shm, true, flaw);
    let mut sound = party("sound", side(0, 1), FabricChoice::Shm, true, |_| {});
    for r in 1..5 {
        let mut order = expect(r, &[63, 0, 9], 0, 30 + r, p.agent.address());
        order.verify = Verify::Full;
        d.agent.expect(order).unwrap();
        p.agent.push(push(r, &[5, 17, 40], 0, 30 + r)).unwrap();
        let (ours, theirs) = (d.fails(r), p.fails(r));
        assert_eq!(ours.kind, ReasonKind::ChecksumMismatch, "{}", ours.text);
        assert_eq!(ours, theirs);
        assert_eq!(ours.text.matches("0x").count(), 2, "{}", ours.text);
    }
    let mut order = expect(9, &[63, 0, 9], 0, 40, p.agent.address());
    order.verify = Verify::Full;
    sound.agent.expect(order).unwrap();
    p.agent.push(push(9, &[5, 17, 40], 0, 40)).unwrap();
    sound.succeeds(9);
    p.succeeds(9);
}
