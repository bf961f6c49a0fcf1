//! Every drawn pair of layouts, shards, page tables, token and layer ranges against the oracle.
#![allow(missing_docs, clippy::expect_used, clippy::cast_possible_truncation)]

mod plan_support;

use plan_support::draw::handoff;
use proptest::prelude::*;

proptest! {
    #![proptest_config(ProptestConfig { cases: 3072, ..ProptestConfig::default() })]

    #[test]
    fn every_destination_byte_is_written_once_and_right(
        handoff in handoff(false),
        max_bytes in prop_oneof![1..100_u64, Just(u64::MAX)],
        max_pieces in prop_oneof![1..6_usize, Just(usize::MAX)],
    ) {
        handoff.check(max_bytes, max_pieces);
    }

    #[test]
    fn ascending_pages_take_the_fewest_pieces(handoff in handoff(true)) {
        for index in 0..handoff.src_tp * handoff.src_pp {
            let (pieces, fewest) = (handoff.plan(index).expect("fits").len(), handoff.fewest(index));
            // The blocks of a state are joined all or none.
            let state = handoff.src_groups.iter().any(|g| g.state.is_some());
            prop_assert!(pieces == fewest || state && pieces > fewest, "{pieces} pieces, {fewest} would do");
        }
    }

    #[test]
    fn page_lists_that_are_too_short_or_out_of_range_are_refused(handoff in handoff(false), drop in 0..3_usize) {
        let mut bad = handoff.clone();
        let table = if drop == 0 { &mut bad.src_table } else { &mut bad.dst_table };
        if drop == 2 {
            table.count.fill(0);
        } else {
            table.pages.iter_mut().for_each(Vec::clear);
        }
        for index in 0..handoff.src_tp * handoff.src_pp {
            let moves = !handoff.plan(index).expect("fits").is_empty();
            prop_assert_eq!(bad.plan(index).is_err(), moves);
        }
    }
}
