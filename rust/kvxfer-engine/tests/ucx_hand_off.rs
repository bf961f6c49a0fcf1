//! The same over UCX: TCP, and UCX's own shared memory. Run once for each UCX library.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stdout,
    clippy::cast_possible_truncation,
    clippy::redundant_clone
)]

mod support;

use kvxfer_engine::FabricChoice;
use kvxfer_proto::ReasonKind;
use std::time::Duration;
use support::{Memory, Party, expect, party_with, push, side};

/// Whether there is a UCX to test with; where one is required, its absence is a failure.
fn ucx_is_here() -> bool {
    let options = kvxfer_fabric::ucx::UcxOptions::default();
    match kvxfer_fabric::ucx::probe(&options) {
        Ok(_) => true,
        Err(e) if std::env::var_os("KVXFER_REQUIRE_UCX").is_some() => panic!("UCX is required: {e}"),
        Err(e) => {
            println!("skipped: {e}");
            false
        }
    }
}

fn pair(tls: &str, ucx_memory: bool) -> (Party, Party) {
    let make = |name: &str| {
        let side = side(0, 1);
        let memory = if ucx_memory { Memory::of_ucx(&side) } else { Memory::new(&side, false) };
        party_with(name, side, FabricChoice::Ucx, memory, |c| c.ucx_tls = Some(tls.to_owned()))
    };
    (make("prefill"), make("decode"))
}

#[test]
fn ucx_pages_cross_over_tcp_and_posix() {
    if !ucx_is_here() {
        return;
    }
    for (tls, ucx_memory) in [("tcp,self", false), ("posix,self,tcp", true)] {
        let (mut p, mut d) = pair(tls, ucx_memory);
        p.memory.fill(|i| (i % 251) as u8);
        for round in 0..20u64 {
            let (src, dst) = ([5, 17, 40], [63, 0, 9]);
            d.agent.expect(expect(round, &dst, 0, 48, p.agent.address())).unwrap();
            p.agent.push(push(round, &src, 0, 48)).unwrap();
            d.succeeds(round);
            p.succeeds(round);
            for region in 0..6 {
                for (s, t) in src.iter().zip(&dst) {
                    assert!(p.memory.page(region, *s) == d.memory.page(region, *t), "{tls}");
                }
            }
        }
        assert!(d.agent.close(Duration::from_secs(5)).is_empty(), "{tls}");
        assert!(p.agent.close(Duration::from_secs(5)).is_empty(), "{tls}");
    }
}

#[test]
fn ucx_cancel_gives_the_pages_back_after_the_drain() {
    if !ucx_is_here() {
        return;
    }
    let (mut p, mut d) = pair("tcp,self", false);
    for room in 0..10u64 {
        d.agent.expect(expect(room, &[1, 2, 3], 0, 48, p.agent.address())).unwrap();
        p.agent.push(push(room, &[4, 5, 6], 0, 48)).unwrap();
        d.agent.cancel(room).unwrap();
        // Whichever was first: one end on each side, and the pages are free.
        let e = d.next_event();
        assert_eq!(e.room.get(), room);
        if let Some(reason) = e.error() {
            assert_eq!(reason.kind, ReasonKind::Cancelled);
            if !e.released {
                assert!(d.next_event().released);
            }
            assert_eq!(p.fails(room).kind, ReasonKind::Cancelled);
        } else {
            p.succeeds(room);
        }
    }
    // Statistics are published every few milliseconds.
    let until = std::time::Instant::now() + support::LIMIT;
    while d.agent.stats().gauges.granted_pages != 0 {
        assert!(std::time::Instant::now() < until, "{:?}", d.agent.stats());
        std::thread::yield_now();
    }
}
