//! The walk that leaves out what it need not look at finds what the whole walk finds.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout)]

use kvxfer_check::model::{Family, FaultKind, Property, Reduction, Setup, explore};
use kvxfer_proto::node::Flaw;

const LIMIT: u64 = 400_000;

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
fn two_sources_and_a_cancel_end_the_same_ways() {
    for family in Family::ALL {
        same_ends(&Setup { kinds: vec![FaultKind::Cancel], ..Setup::new(family, 1) });
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
    let mut setups: Vec<Setup> = Family::ALL.map(|f| Setup { sources: 1, ..stop(f) }).to_vec();
    setups.push(Setup { in_order: true, ..stop(Family::WritesUnfenced) });
    for setup in setups {
        let more = explore(&Setup { reduced: Reduction::States, ..setup.clone() }, LIMIT).unwrap();
        let less = explore(&setup, LIMIT).unwrap();
        assert!(more.complete && less.complete, "{setup:?}: {:?} {:?}", more.found, less.found);
        assert_eq!(more.outcomes, less.outcomes, "{setup:?}");
        assert!(less.states < more.states && less.outcomes.len() > 3);
        println!("{} states of {}, {} outcomes", less.states, more.states, less.outcomes.len());
    }
}

/// A broken rule is found both ways or neither way, property by property.
#[test]
fn broken_variants_are_caught_either_way() {
    let properties = [
        Property::NoLateWrite,
        Property::NoReadAfterRelease,
        Property::SuccessHasAllBytes,
        Property::OneEnd,
        Property::EveryPageComesBack,
        Property::CancelledFailsAtOnce,
        Property::NothingIsLeft,
        Property::HonestPeersKeepTheProtocol,
    ];
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
                for only in properties {
                    let setup = Setup {
                        sources: 1,
                        kinds: vec![kind],
                        flaw: Some(flaw),
                        only: Some(only),
                        ..Setup::new(family, 1)
                    };
                    let whole = explore(&Setup { reduced: Reduction::None, ..setup.clone() }, LIMIT).unwrap();
                    let less = explore(&setup, LIMIT).unwrap();
                    let found =
                        |r: &kvxfer_check::model::Report| r.found.as_ref().map(|c| c.violation.property);
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
