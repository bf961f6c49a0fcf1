//! Each rule of the contract, broken on purpose, is caught: else the checker would prove nothing.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout)]

use kvxfer_check::model::{
    Counterexample, Family, FaultKind, Property, Setup, Violation, explore, explore_staging, shortest,
};
use kvxfer_proto::node::Flaw;

/// States after which a search gives up: far above what each of these needs.
const LIMIT: u64 = 3_000_000;

fn broken(flaw: Flaw, family: Family, faults: &[FaultKind], only: Property) -> Setup {
    Setup {
        sources: 1,
        kinds: faults.to_vec(),
        flaw: Some(flaw),
        only: Some(only),
        ..Setup::new(family, u8::try_from(faults.len()).unwrap())
    }
}

/// The flaw is found on a shortest path, the trace names its last step, and the sound machine does not have it.
fn caught(setup: &Setup) -> String {
    let found = shortest(setup, LIMIT).unwrap().found.expect("the flaw is not caught");
    assert_eq!(Some(found.violation.property), setup.only);
    let (again, words) = found.replay().unwrap();
    assert_eq!(again, Some(found.violation.clone()), "a counterexample replays");
    let sound = Setup { flaw: None, ..setup.clone() };
    let mut same = found.clone();
    same.setup = sound;
    assert_eq!(same.replay().unwrap().0, None, "the same path is harmless without the flaw");
    println!("{found}");
    words.join("\n")
}

#[test]
fn release_on_timeout_lets_a_write_land_on_a_released_page() {
    for family in [Family::WritesFenced, Family::WritesUnfenced] {
        let trace =
            caught(&broken(Flaw::ReleaseOnTimeout, family, &[FaultKind::Timeout], Property::NoLateWrite));
        assert!(trace.contains("time runs out for expected room 1"), "{trace}");
        caught(&broken(Flaw::ReleaseOnTimeout, family, &[FaultKind::Cancel], Property::NoLateWrite));
    }
}

#[test]
fn release_at_eof_lets_a_write_land_on_a_released_page() {
    for family in [Family::WritesFenced, Family::WritesUnfenced] {
        let faults = [FaultKind::LostSession];
        let trace = caught(&broken(Flaw::ReleaseAtEof, family, &faults, Property::NoLateWrite));
        assert!(trace.contains("D: sees the end of session 1"), "{trace}");
    }
}

#[test]
fn success_before_flush_succeeds_without_the_bytes() {
    caught(&broken(Flaw::SuccessBeforeFlush, Family::WritesUnfenced, &[], Property::SuccessHasAllBytes));
    caught(&broken(Flaw::SuccessBeforeFlush, Family::WritesUnfenced, &[], Property::NoLateWrite));
}

#[test]
fn drained_while_writing_lets_a_write_land_on_a_released_page() {
    let trace = caught(&broken(
        Flaw::DrainedWhileWriting,
        Family::WritesUnfenced,
        &[FaultKind::Cancel],
        Property::NoLateWrite,
    ));
    assert!(trace.contains("Drained"), "{trace}");
}

#[test]
fn no_tombstone_takes_a_push_for_a_room_that_is_over() {
    for family in Family::ALL {
        caught(&broken(Flaw::NoTombstone, family, &[FaultKind::Cancel], Property::CancelledFailsAtOnce));
    }
}

/// Numbers of the link mask old frames, until a fence or another incarnation has started it afresh: then a frame of an
/// old session is taken for one of the new. If there is a gap in the numbers, the link itself notices.
#[test]
fn no_session_check_takes_a_frame_of_an_old_session_for_a_new_one() {
    let faults = [FaultKind::Restart];
    let setup =
        broken(Flaw::NoSessionCheck, Family::WritesUnfenced, &faults, Property::HonestPeersKeepTheProtocol);
    let found = explore(&setup, LIMIT).unwrap().found.expect("the flaw is not caught").shortened();
    assert_eq!(found.replay().unwrap().0, Some(found.violation.clone()));
    println!("{found}");
}

/// If there is none, a source that was stopped and fenced takes a grant out of the old session, attaches again, and writes
/// to a page that has been given to another room since.
#[test]
fn no_session_check_lets_a_grant_of_an_old_session_write_a_page_that_is_anothers() {
    let setup = broken(Flaw::NoSessionCheck, Family::WritesFenced, &[FaultKind::Stop], Property::NoLateWrite);
    let setup = Setup { in_order: true, ..setup };
    let found = explore(&setup, LIMIT).unwrap().found.expect("the flaw is not caught").shortened();
    assert_eq!(found.replay().unwrap().0, Some(found.violation.clone()));
    let sound = Setup { flaw: None, ..setup };
    assert_eq!(Counterexample { setup: sound, ..found.clone() }.replay().unwrap().0, None);
    println!("{found}");
}

/// Nothing late is written and every room ends: only that none of them had to fail shows it.
#[test]
fn a_grant_that_wakes_nobody_fails_rooms_without_a_fault() {
    for family in Family::ALL {
        let setup = broken(Flaw::GrantWakesNobody, family, &[], Property::FaultFreeRoomsSucceed);
        let trace = caught(&setup);
        assert!(trace.contains("time runs out for"), "{trace}");
        let all = explore(&Setup { only: None, ..setup }, LIMIT).unwrap().found.unwrap();
        assert_eq!(all.violation.property, Property::FaultFreeRoomsSucceed);
    }
}

#[test]
fn a_staging_slot_freed_early_is_written_by_one_who_has_it_no_more() {
    for family in [Family::PackedFenced, Family::PackedUnfenced] {
        let faults = [FaultKind::Cancel];
        let trace = caught(&broken(Flaw::StagingSlotFreedEarly, family, &faults, Property::NoLateWrite));
        assert!(trace.contains("lands in slot 0"), "{trace}");
    }
}

/// The second source gets the slot while the first one's write to it is in flight.
#[test]
fn a_staging_slot_freed_early_is_lent_to_another_source() {
    let setup = Setup {
        sources: 2,
        ..broken(
            Flaw::StagingSlotFreedEarly,
            Family::PackedUnfenced,
            &[FaultKind::Cancel],
            Property::HonestPeersKeepTheProtocol,
        )
    };
    let found = explore(&setup, LIMIT).unwrap().found.expect("the flaw is not caught").shortened();
    assert_eq!(found.replay().unwrap().0, Some(found.violation.clone()));
    println!("{found}");
}

#[test]
fn unpacking_that_is_not_waited_for_writes_a_released_page() {
    for family in [Family::PackedFenced, Family::PackedUnfenced] {
        let faults = [FaultKind::Cancel];
        let trace = caught(&broken(Flaw::UnpackAfterRelease, family, &faults, Property::NoLateWrite));
        assert!(trace.contains("takes the next piece"), "{trace}");
    }
}

#[test]
fn credit_of_an_old_session_writes_a_slot_that_is_not_lent() {
    for family in [Family::PackedFenced, Family::PackedUnfenced] {
        let faults = [FaultKind::LostSession];
        let trace = caught(&broken(Flaw::OldCreditsCount, family, &faults, Property::NoLateWrite));
        assert!(trace.contains("Credit"), "{trace}");
    }
}

#[test]
fn drained_while_writing_lets_a_write_land_in_a_slot_that_is_free() {
    for family in [Family::PackedFenced, Family::PackedUnfenced] {
        let faults = [FaultKind::Cancel];
        caught(&broken(Flaw::DrainedWhileWriting, family, &faults, Property::NoLateWrite));
    }
}

#[test]
fn a_staging_slot_freed_early_is_written_for_another_room() {
    let r = explore_staging(Some(Flaw::StagingSlotFreedEarly), 1).unwrap();
    let (Violation { property, text }, way) = r.found.expect("the flaw is not caught");
    assert_eq!(property, Property::NoLateWrite, "{text}\n{}", way.join("\n"));
}
