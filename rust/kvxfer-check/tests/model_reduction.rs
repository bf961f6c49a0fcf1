//! The walk that leaves out what it need not look at finds what the whole walk finds.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout)]

use kvxfer_check::model::{Family, FaultKind, Property, Reduction, Report, Setup, explore};
use kvxfer_proto::node::Flaw;

const LIMIT: u64 = 400_000;

const PROPERTIES: [Property; 8] = [
    Property::NoLateWrite,
    Property::NoReadAfterRelease,
    Property::SuccessHasAllBytes,
    Property::OneEnd,
    Property::EveryPageComesBack,
    Property::CancelledFailsAtOnce,
    Property::NothingIsLeft,
    Property::HonestPeersKeepTheProtocol,
];

/// Every end of the whole walk is one of the other's, and nothing is found either way. Pairs that are walked alone may
/// end in ways in which the two together do not.
fn no_end_is_lost(setup: &Setup) {
    let more = explore(&Setup { reduced: Reduction::States, ..setup.clone() }, LIMIT).unwrap();
    let less = explore(setup, LIMIT).unwrap();
    assert!(more.complete && less.complete, "{setup:?}: {:?} {:?}", more.found, less.found);
    assert!(more.outcomes.is_subset(&less.outcomes) && !more.outcomes.is_empty(), "{setup:?}");
    assert!(less.apart > 0 && less.states < more.states, "{setup:?}");
    println!("{} states ({} apart) of {}", less.states, less.apart, more.states);
}

/// Both ways reach the same ends, and nothing is found either way.
fn same_ends(setup: &Setup) {
    let whole = explore(&Setup { reduced: Reduction::None, ..setup.clone() }, LIMIT).unwrap();
    let less = explore(setup, LIMIT).unwrap();
    assert!(whole.complete && less.complete, "{setup:?}: {:?} {:?}", whole.found, less.found);
    assert_eq!(whole.outcomes, less.outcomes, "{setup:?}");
    assert!(less.states < whole.states && !less.outcomes.is_empty());
    println!("{} states of {}, {} outcomes", less.states, whole.states, less.outcomes.len());
}

#[test]
fn one_source_and_any_fault_ends_the_same_ways() {
    // Without a stop. After one, the two sides can fence each other by turns for as long as everything that is sent is read
    // only after its session has ended: the whole walk reports that path, whose end no clock there brings about.
    let kinds: Vec<FaultKind> = FaultKind::ALL.into_iter().filter(|k| *k != FaultKind::Stop).collect();
    for family in [Family::WritesFenced, Family::Copies] {
        same_ends(&Setup { sources: 1, kinds: kinds.clone(), ..Setup::new(family, 1) });
    }
    for kind in kinds {
        same_ends(&Setup { sources: 1, kinds: vec![kind], ..Setup::new(Family::WritesUnfenced, 1) });
    }
}

#[test]
fn two_sources_and_a_cancel_lose_no_end() {
    let cancel = |family| Setup { kinds: vec![FaultKind::Cancel], ..Setup::new(family, 1) };
    for family in [Family::WritesFenced, Family::WritesUnfenced, Family::Copies] {
        no_end_is_lost(&cancel(family));
    }
    for family in [Family::PackedFenced, Family::PackedUnfenced] {
        same_ends(&cancel(family));
    }
}

#[test]
fn pairs_that_are_walked_alone_lose_no_end() {
    for family in [Family::WritesFenced, Family::WritesUnfenced, Family::Copies] {
        for kind in FaultKind::ALL {
            no_end_is_lost(&Setup {
                expected: 1,
                in_order: true,
                kinds: vec![kind],
                ..Setup::new(family, 1)
            });
        }
    }
}

/// What breaks a rule in the only room breaks it in a pair that is walked alone, and is found in the whole.
#[test]
fn broken_variants_are_caught_in_pairs_that_are_walked_alone() {
    for (flaw, kind, only) in [
        (Flaw::ReleaseOnTimeout, FaultKind::Cancel, Property::NoLateWrite),
        (Flaw::ReleaseAtEof, FaultKind::LostSession, Property::NoLateWrite),
        (Flaw::DrainedWhileWriting, FaultKind::Cancel, Property::NoLateWrite),
        (Flaw::NoTombstone, FaultKind::Cancel, Property::CancelledFailsAtOnce),
    ] {
        for family in [Family::WritesFenced, Family::WritesUnfenced] {
            let setup = Setup {
                expected: 1,
                in_order: true,
                kinds: vec![kind],
                flaw: Some(flaw),
                only: Some(only),
                ..Setup::new(family, 1)
            };
            let r = explore(&setup, LIMIT).unwrap();
            let found = r.found.expect("the flaw is not caught");
            assert_eq!(found.replay().unwrap().0.map(|v| v.property), Some(only), "it happened in the whole");
            assert!(r.apart > 0, "{setup:?}");
        }
    }
}

#[test]
fn one_source_and_two_faults_end_the_same_ways() {
    for family in Family::ALL {
        let kinds = vec![FaultKind::Cancel, FaultKind::LostSession];
        same_ends(&Setup { sources: 1, kinds, ..Setup::new(family, 2) });
    }
}

/// Stops wait for time to pass: the walk in which they do not, nor leaves out any other order, ends the same ways. (The
/// walk that makes no states one cannot have a stop: see above.)
#[test]
fn stops_end_the_same_ways() {
    let stop = |family| Setup { kinds: vec![FaultKind::Stop], ..Setup::new(family, 1) };
    let setups = Family::ALL.map(|f| Setup { sources: 1, ..stop(f) });
    for setup in setups {
        let more = explore(&Setup { reduced: Reduction::States, ..setup.clone() }, LIMIT).unwrap();
        let less = explore(&setup, LIMIT).unwrap();
        assert!(more.complete && less.complete, "{setup:?}: {:?} {:?}", more.found, less.found);
        assert_eq!(more.outcomes, less.outcomes, "{setup:?}");
        assert!(less.states < more.states && less.outcomes.len() > 3);
        println!("{} states of {}, {} outcomes", less.states, more.states, less.outcomes.len());
    }
    no_end_is_lost(&Setup { in_order: true, ..stop(Family::WritesUnfenced) });
}

/// A broken rule is found both ways or neither way, property by property.
#[test]
fn broken_variants_are_caught_either_way() {
    let mut caught = 0;
    for flaw in [
        Flaw::ReleaseOnTimeout,
        Flaw::ReleaseAtEof,
        Flaw::SuccessBeforeFlush,
        Flaw::DrainedWhileWriting,
        Flaw::NoTombstone,
    ] {
        for family in Family::ALL {
            for kind in [FaultKind::Cancel, FaultKind::LostSession] {
                for only in PROPERTIES {
                    let setup = Setup {
                        sources: 1,
                        kinds: vec![kind],
                        flaw: Some(flaw),
                        only: Some(only),
                        ..Setup::new(family, 1)
                    };
                    let whole = explore(&Setup { reduced: Reduction::None, ..setup.clone() }, LIMIT).unwrap();
                    let less = explore(&setup, LIMIT).unwrap();
                    let found = |r: &Report| r.found.as_ref().map(|c| c.violation.property);
                    assert_eq!(found(&whole), found(&less), "{setup:?}");
                    if let Some(c) = less.found {
                        caught += 1;
                        assert_eq!(
                            c.replay().unwrap().0.map(|v| v.property),
                            Some(only),
                            "it replays: {setup:?}"
                        );
                    } else {
                        assert_eq!(whole.outcomes, less.outcomes, "{setup:?}");
                    }
                }
            }
        }
    }
    assert!(caught >= 10, "only {caught} broken variants were caught");
}
