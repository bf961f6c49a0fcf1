//! Two agents in one process: real threads, sockets and fabrics.

#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stdout,
    clippy::cast_possible_truncation,
    clippy::redundant_clone
)]

mod support;

use kvxfer_engine::{CallError, FabricChoice, StartError};
use kvxfer_proto::ReasonKind;
use kvxfer_proto::node::EventKind;
use std::sync::Arc;
use std::time::Duration;
use support::{expect, party, push, side};

#[test]
fn pages_cross_over_shared_memory_from_pools_and_plain_memory() {
    for pool in [true, false] {
        let mut p = party("prefill", side(0, 1), FabricChoice::Shm, pool, |_| {});
        let mut d = party("decode", side(0, 1), FabricChoice::Shm, pool, |_| {});
        p.memory.fill(|i| (i % 251) as u8);
        for round in 0..20u64 {
            let (src, dst) = ([5, 17, 40], [63, 0, 9]);
            let mut order = push(round, &src, 0, 40);
            order.meta = Some(Arc::from(&b"hello"[..]));
            if round % 2 == 0 {
                d.agent.expect(expect(round, &dst, 0, 40, p.agent.address())).unwrap();
                p.agent.push(order).unwrap();
            } else {
                p.agent.push(order).unwrap();
                d.agent.expect(expect(round, &dst, 0, 40, p.agent.address())).unwrap();
            }
            let e = d.succeeds(round);
            assert_eq!(e.meta.as_deref(), Some(&b"hello"[..]));
            assert!(e.first_write_at_us > 0);
            p.succeeds(round);
            for region in 0..6 {
                for (s, t) in src.iter().zip(&dst).take(2) {
                    assert!(p.memory.page(region, *s) == d.memory.page(region, *t));
                }
                // Of the last page only the first eight tokens of each head.
                let (a, b) = (p.memory.page(region, src[2]), d.memory.page(region, dst[2]));
                let head = a.len() / 4;
                for h in 0..4 {
                    let half = h * head..h * head + head / 2;
                    assert!(a[half.clone()] == b[half]);
                    assert!(b[h * head + head / 2..(h + 1) * head].iter().all(|x| *x == 0));
                }
            }
        }
        assert!(d.agent.close(Duration::from_secs(5)).is_empty());
        assert!(p.agent.close(Duration::from_secs(5)).is_empty());
    }
}

#[test]
fn tensor_parallel_ranks_find_each_other_through_the_directory() {
    let mut p0 = party("p0", side(0, 2), FabricChoice::Shm, true, |c| c.engine = "prefill".to_owned());
    let at = p0.agent.address().to_owned();
    let mut d = party("d", side(0, 1), FabricChoice::Shm, true, |_| {});
    // Decode asks before the second rank has registered: it waits for it.
    d.agent.expect(expect(7, &[1, 2], 0, 32, &at)).unwrap();
    let mut p1 = party("p1", side(1, 2), FabricChoice::Shm, true, |c| {
        c.engine = "prefill".to_owned();
        c.directory = Some(at.clone());
    });
    p0.memory.fill(|i| (i % 13) as u8);
    p1.memory.fill(|i| (i % 17) as u8 + 100);
    p0.agent.push(push(7, &[3, 4], 0, 32)).unwrap();
    p1.agent.push(push(7, &[3, 4], 0, 32)).unwrap();
    for party in [&mut d, &mut p0, &mut p1] {
        party.succeeds(7);
    }
    for region in 0..6 {
        let got = d.memory.page(region, 1);
        let (lower, upper) = got.split_at(got.len() / 2);
        assert!(lower == p0.memory.page(region, 3) && upper == p1.memory.page(region, 3));
    }
}

#[test]
fn a_cancel_ends_both_sides_and_gives_the_pages_back() {
    let mut p = party("prefill", side(0, 1), FabricChoice::Shm, true, |_| {});
    let mut d = party("decode", side(0, 1), FabricChoice::Shm, true, |_| {});
    d.agent.expect(expect(1, &[1], 0, 16, p.agent.address())).unwrap();
    p.agent.open(1, None, None).unwrap();
    d.agent.cancel(1).unwrap();
    assert_eq!(d.fails(1).kind, ReasonKind::Cancelled);
    assert_eq!(p.fails(1).kind, ReasonKind::Cancelled);
    assert!(matches!(p.agent.push(push(1, &[1], 0, 16)), Err(CallError::Failed { room: 1, .. })));
    d.agent.expect(expect(2, &[1], 0, 16, p.agent.address())).unwrap();
    p.agent.push(push(2, &[1], 0, 16)).unwrap();
    d.succeeds(2);
    p.succeeds(2);
}

#[test]
fn peers_that_do_not_fit_fail_the_room_on_both_sides_and_nothing_else() {
    let mut p = party("prefill", side(0, 1), FabricChoice::Shm, true, |c| c.model = "model-a".to_owned());
    let mut d = party("decode", side(0, 1), FabricChoice::Shm, true, |c| c.model = "model-b".to_owned());
    let mut good = party("other", side(0, 1), FabricChoice::Shm, true, |c| c.model = "model-a".to_owned());
    p.agent.push(push(1, &[1], 0, 16)).unwrap();
    d.agent.expect(expect(1, &[1], 0, 16, p.agent.address())).unwrap();
    for party in [&mut d, &mut p] {
        let reason = party.fails(1);
        assert_eq!(reason.kind, ReasonKind::LayoutMismatch);
        assert!(reason.text.contains("model-a") && reason.text.contains("model-b"), "{}", reason.text);
    }
    p.agent.push(push(2, &[1], 0, 16)).unwrap();
    good.agent.expect(expect(2, &[1], 0, 16, p.agent.address())).unwrap();
    good.succeeds(2);
    p.succeeds(2);
}

#[test]
fn a_wrong_secret_is_an_authentication_error_at_decode() {
    let p = party("prefill", side(0, 1), FabricChoice::Shm, true, |c| c.secret = Some(b"right".to_vec()));
    for secret in [Some(b"wrong".to_vec()), None] {
        let mut d = party("decode", side(0, 1), FabricChoice::Shm, true, |c| c.secret = secret);
        d.agent.expect(expect(1, &[1], 0, 16, p.agent.address())).unwrap();
        let reason = d.fails(1);
        assert_eq!(reason.kind, ReasonKind::AuthError, "{}", reason.text);
        assert!(reason.text.contains("KVXFER_SECRET"), "{}", reason.text);
    }
    let mut d = party("decode", side(0, 1), FabricChoice::Shm, true, |c| c.secret = Some(b"right".to_vec()));
    d.agent.expect(expect(2, &[1], 0, 16, p.agent.address())).unwrap();
    p.agent.push(push(2, &[1], 0, 16)).unwrap();
    d.succeeds(2);
}

#[test]
fn case_19_a_taken_port_fails_at_start_with_the_port_in_the_message() {
    let p = party("prefill", side(0, 1), FabricChoice::Shm, true, |_| {});
    let memory = support::Memory::new(&side(0, 1), true);
    let mut config =
        kvxfer_engine::AgentConfig::new("second", side(0, 1), vec![support::PAGES], memory.spans.clone());
    config.fabric = FabricChoice::Shm;
    config.listen = p.agent.address().to_owned();
    let port = p.agent.address().rsplit(':').next().unwrap().to_owned();
    let err = kvxfer_engine::Agent::start(config).unwrap_err();
    assert!(matches!(err, StartError::Listen { .. }));
    assert!(err.to_string().contains(&port), "{err}");
}

#[test]
fn off_loopback_needs_a_secret() {
    let memory = support::Memory::new(&side(0, 1), true);
    let mut config =
        kvxfer_engine::AgentConfig::new("open", side(0, 1), vec![support::PAGES], memory.spans.clone());
    config.fabric = FabricChoice::Shm;
    config.listen = "0.0.0.0:0".to_owned();
    let err = kvxfer_engine::Agent::start(config).unwrap_err();
    assert!(matches!(err, StartError::Auth(_)), "{err}");
    assert!(err.to_string().contains("KVXFER_SECRET_FILE"), "{err}");
}

#[test]
fn retracted_pushes_come_back_and_their_successors_count() {
    let mut p = party("prefill", side(0, 1), FabricChoice::Shm, true, |_| {});
    let mut d = party("decode", side(0, 1), FabricChoice::Shm, true, |_| {});
    p.memory.fill(|i| (i % 97) as u8);
    let mut first = push(1, &[3, 4], 0, 32);
    first.last = false;
    let id = p.agent.push(first).unwrap();
    p.agent.retract(1, id).unwrap();
    let e = p.next_event();
    assert_eq!(e.kind, EventKind::Retracted(id));
    p.agent.push(push(1, &[9, 10], 0, 32)).unwrap();
    d.agent.expect(expect(1, &[1, 2], 0, 32, p.agent.address())).unwrap();
    d.succeeds(1);
    p.succeeds(1);
    assert!(d.memory.page(0, 1) == p.memory.page(0, 9));
}

#[test]
fn closing_with_work_in_flight_ends_everybodys_rooms() {
    let mut p = party("prefill", side(0, 1), FabricChoice::Shm, true, |_| {});
    let mut d = party("decode", side(0, 1), FabricChoice::Shm, true, |_| {});
    d.agent.expect(expect(1, &[1], 0, 16, p.agent.address())).unwrap();
    p.agent.open(1, None, None).unwrap();
    // In contact, so that the goodbye has a way to go.
    while p.agent.state(1) == Some(kvxfer_proto::node::Stage::Bootstrapping) {
        std::thread::yield_now();
    }
    assert!(p.agent.close(Duration::from_secs(5)).is_empty());
    assert_eq!(d.fails(1).kind, ReasonKind::Closed);
    assert!(matches!(p.agent.open(2, None, None), Err(CallError::Closed)));
    assert_eq!(p.fails(1).kind, ReasonKind::Closed);
}
