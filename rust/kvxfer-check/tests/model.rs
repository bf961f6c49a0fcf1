//! Every interleaving of worlds that are small enough for each test run; `make model` walks the larger ones.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout)]

use kvxfer_check::model::{Family, FaultKind, Setup, explore, explore_staging, walk};

/// All states are walked, nothing is found, and there are as many as a world with its choices has.
fn complete(setup: &Setup, at_least: u64) {
    let r = explore(setup, u64::MAX).unwrap();
    if let Some(c) = r.found {
        panic!("{setup:?}\n{}", c.shortened());
    }
    assert!(r.complete);
    assert!(r.states >= at_least, "only {} states: the world has lost choices", r.states);
    println!(
        "complete: {} states, {} transitions, deepest path {}, {:?}",
        r.states, r.transitions, r.deepest, r.took
    );
}

#[test]
fn two_sources_without_a_fault() {
    for family in Family::ALL {
        complete(&Setup::new(family, 0), 500);
    }
}

#[test]
fn one_source_and_any_fault_when_fences_complete() {
    complete(&Setup { sources: 1, ..Setup::new(Family::WritesFenced, 1) }, 8_000);
}

#[test]
fn one_source_and_any_fault_when_no_fence_is_possible() {
    complete(&Setup { sources: 1, ..Setup::new(Family::WritesUnfenced, 1) }, 8_000);
}

#[test]
fn one_source_and_any_fault_when_the_receiver_copies() {
    complete(&Setup { sources: 1, ..Setup::new(Family::Copies, 1) }, 8_000);
}

#[test]
fn one_source_and_any_fault_when_pushes_go_packed() {
    for family in [Family::PackedFenced, Family::PackedUnfenced] {
        complete(&Setup { sources: 1, ..Setup::new(family, 1) }, 10_000);
    }
}

/// Each push needs the one slot twice.
#[test]
fn packed_pieces_take_turns_in_one_slot() {
    let kinds = vec![FaultKind::Cancel];
    complete(&Setup { pieces: 2, kinds, sources: 1, ..Setup::new(Family::PackedUnfenced, 1) }, 400);
    complete(&Setup { pieces: 2, ..Setup::new(Family::PackedFenced, 0) }, 1_000);
}

#[test]
fn two_sources_and_a_cancel() {
    for family in Family::ALL {
        complete(&Setup { kinds: vec![FaultKind::Cancel], ..Setup::new(family, 1) }, 5_000);
    }
}

#[test]
fn random_walks_with_many_faults() {
    for family in Family::ALL {
        for faults in 2..=5 {
            let w = walk(&Setup { pieces: 2, slots: faults % 3 + 1, ..Setup::new(family, faults) }, 0..150)
                .unwrap();
            if let Some((seed, c)) = w.found {
                panic!("seed {seed}: {}", c.shortened());
            }
            assert!(w.walks == 150 && w.faults > 150, "{} faults in {} walks", w.faults, w.walks);
        }
    }
}

#[test]
fn a_seed_walks_the_same_path_again() {
    let setup = Setup::new(Family::WritesUnfenced, 3);
    let (a, b) = (walk(&setup, 7..8).unwrap(), walk(&setup, 7..8).unwrap());
    assert!(a.steps > 10);
    assert_eq!((a.steps, a.faults), (b.steps, b.faults));
}

#[test]
fn staging_slots_with_two_faults() {
    let r = explore_staging(None, 2).unwrap();
    assert!(r.complete, "{:#?}", r.found);
    assert!(r.states >= 10_000, "only {} states: the world has lost choices", r.states);
    println!("complete: {} states, {} transitions, {:?}", r.states, r.transitions, r.took);
}
