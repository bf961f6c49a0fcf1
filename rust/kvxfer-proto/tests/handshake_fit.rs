//! Peers that know each other and do not fit: both sides say which field and both its values.
#![allow(clippy::unwrap_used)]

mod handshake_common;

use handshake_common::*;
use kvxfer_proto::ReasonKind;
use kvxfer_proto::handshake::Outcome;
use kvxfer_proto::layout::{DType, PageLayout, Side};
use kvxfer_proto::msg::{Describe, Role};
use kvxfer_proto::wire::MAX_HANDSHAKE_BYTES;

/// Runs a pair whose descriptions are changed; the text that both sides have, if they do not fit.
fn run(change: impl FnOnce(&mut Describe, &mut Describe)) -> Option<String> {
    let mut pair = Pair::new(initiator(Some(b"s")), acceptor(Some(b"s")));
    change(&mut pair.a.describe, &mut pair.i.describe);
    pair.run();
    if pair.i.established() && pair.a.established() {
        return None;
    }
    for (end, peer) in [(&pair.i, ACCEPTOR), (&pair.a, INITIATOR)] {
        let Some(Outcome::Refused { reason, met }) = end.hs.outcome() else {
            panic!("{:?}", end.hs.outcome())
        };
        assert_eq!(reason.kind, ReasonKind::LayoutMismatch);
        assert_eq!((met.incarnation, met.session), (peer, SESSION));
        assert_eq!(end.hs.frame_cap(), MAX_HANDSHAKE_BYTES);
    }
    assert_eq!(pair.i.failure(), pair.a.failure());
    Some(pair.i.failure().text.clone())
}

#[track_caller]
fn refused(want: &[&str], change: impl FnOnce(&mut Describe, &mut Describe)) {
    let text = run(change).unwrap();
    for want in want {
        assert!(text.contains(want), "`{want}` not in: {text}");
    }
}

/// Makes the region table and pages follow the layout again.
fn settle(d: &mut Describe) {
    d.regions = Side { groups: d.groups.clone(), shard: d.shard }.regions(&d.pages).unwrap();
}

#[test]
fn roles() {
    for (src, dst) in [
        (Role::Both, Role::Both),
        (Role::Prefill, Role::Both),
        (Role::Both, Role::Decode),
        (Role::Prefill, Role::Decode),
    ] {
        assert_eq!(run(|s, d| (s.role, d.role) = (src, dst)), None);
    }
    refused(
        &["role", "prefill side \"prefill-0\" has role prefill", "\"decode-0\" has role prefill"],
        |_, d| {
            d.role = Role::Prefill;
        },
    );
    refused(&["role", "\"prefill-0\" has role decode", "\"decode-0\" has role decode"], |s, _| {
        s.role = Role::Decode;
    });
}

#[test]
fn case_18_mode_and_model() {
    refused(&["mode differs", "has \"push\"", "has \"pull\""], |_, d| d.mode = "pull".into());
    refused(&["model fingerprint differs", "has \"qwen\"", "has \"llama\""], |s, d| {
        s.model = "qwen".into();
        d.model = "llama".into();
    });
    assert_eq!(run(|s, _| s.model = "qwen".into()), None, "one side gives none");
    assert_eq!(run(|_, d| d.model = "llama".into()), None, "the other gives none");
}

#[test]
fn layouts() {
    refused(&["dtype", "bfloat16", "float16", "prefill-0", "decode-0"], |_, d| {
        d.groups[0].dtype = DType::Float16;
        settle(d);
    });
    refused(&["layers", "4", "5"], |_, d| {
        d.groups[0].layers = 5;
        settle(d);
    });
    refused(&["layout of decode side", "head_dim is 0"], |_, d| d.groups[0].head_dim = 0);
    refused(&["layout of prefill side", "0 groups"], |s, _| s.groups.clear());
}

#[test]
fn region_tables() {
    refused(&["pages of decode side", "2 counts for 1 groups"], |_, d| d.pages.push(1));
    refused(&["regions of prefill side", "7 sent, its layout and shard have 8"], |s, _| {
        s.regions.pop();
    });
    refused(&["region 7 of decode side", "2047 bytes, its pages take 16384"], |_, d| {
        d.regions[7].len = 2_047;
    });
    refused(
        &["region 2 of decode side", "is group 0, layer 3", "has group 0, layer 1, part 0 there"],
        |_, d| {
            d.regions[2].layer = 3;
        },
    );
    assert_eq!(run(|_, d| d.regions[7].len = 1 << 50), None, "more than its pages take");
    // A table that would be too large to make is refused by its count.
    refused(&["regions of decode side", "8 sent, its layout and shard have 524288"], |_, d| {
        d.groups = vec![PageLayout { layers: 4_096, ..d.groups[0] }; 64];
        d.pages = vec![1; 64];
    });
}

#[test]
fn long_and_odd_strings_keep_the_text_readable() {
    let text = run(|s, d| {
        s.name = format!("{}\u{1b}[31m", "x".repeat(60));
        s.mode = "m".repeat(2_000);
        d.mode = "\n".into();
    })
    .unwrap();
    assert!(text.len() < 500 && !text.chars().any(char::is_control), "{text:?}");
}
