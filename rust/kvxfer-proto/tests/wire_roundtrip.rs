//! What is encoded is decoded: every kind, in one piece and in pieces.
#![allow(clippy::unwrap_used)]

mod wire_common;

use kvxfer_proto::wire::{self, Decoded, Decoder, MAX_FRAME_BYTES, kind_of};
use proptest::collection::vec;
use proptest::prelude::*;
use std::collections::BTreeSet;
use wire_common::{any_frame, encoded, samples};

proptest! {
    #[test]
    fn every_frame_survives(frame in any_frame()) {
        let raw = encoded(&frame);
        prop_assert_eq!(wire::decode_frame(&raw), Ok(Decoded::Frame(frame)));
    }

    #[test]
    fn a_stream_in_pieces_gives_the_same_frames(
        frames in vec(any_frame(), 1..12),
        cuts in vec(1usize..700, 1..40),
    ) {
        let mut stream = Vec::new();
        for frame in &frames {
            wire::encode(frame, &mut stream).unwrap();
        }
        let mut decoder = Decoder::new();
        decoder.set_cap(MAX_FRAME_BYTES);
        let (mut got, mut rest) = (Vec::new(), stream.as_slice());
        for cut in cuts.iter().cycle() {
            let (piece, later) = rest.split_at((*cut).min(rest.len()));
            decoder.feed(piece);
            while let Some(decoded) = decoder.next_frame().unwrap() {
                got.push(decoded);
            }
            rest = later;
            if rest.is_empty() {
                break;
            }
        }
        let want: Vec<_> = frames.into_iter().map(Decoded::Frame).collect();
        prop_assert_eq!(got, want);
        prop_assert!(decoder.pending().is_empty());
    }
}

#[test]
fn samples_have_one_frame_of_each_kind() {
    let kinds: BTreeSet<u8> = samples().iter().map(|frame| kind_of(&frame.msg)).collect();
    assert_eq!(kinds.len(), samples().len());
    // Every number that decodes to a message is among them, so a new kind without a sample fails here.
    for kind in 0..=u8::MAX {
        let mut raw = encoded(&samples()[0]);
        raw[5] = kind;
        let known = !matches!(wire::decode_frame(&raw), Ok(Decoded::Unknown(_)));
        assert_eq!(known, kinds.contains(&kind), "kind {kind}");
    }
}

#[test]
fn a_large_page_list_fits_and_its_buffer_is_given_back() {
    let mut grant = samples().into_iter().find(|f| kind_of(&f.msg) == wire::kind::GRANT).unwrap();
    if let kvxfer_proto::msg::Msg::Grant(g) = &mut grant.msg {
        g.pages = vec![(0..3_000_000).collect(), (0..1_000_000).collect()];
    }
    let raw = encoded(&grant);
    let mut decoder = Decoder::new();
    decoder.set_cap(MAX_FRAME_BYTES);
    for piece in raw.chunks(1 << 16) {
        assert_eq!(decoder.next_frame(), Ok(None));
        decoder.feed(piece);
    }
    assert_eq!(decoder.next_frame(), Ok(Some(Decoded::Frame(grant))));
    decoder.feed(&raw[..10]);
    assert!(decoder.capacity() < 1 << 20, "{} bytes kept", decoder.capacity());
}

#[test]
fn a_failed_encode_leaves_the_buffer_as_it_was() {
    let mut frame = samples().pop().unwrap();
    frame.msg = kvxfer_proto::msg::Msg::Lookup(kvxfer_proto::msg::Lookup { engine: "x".repeat(3_000) });
    let mut out = vec![1, 2, 3];
    let e = wire::encode(&frame, &mut out).unwrap_err();
    assert_eq!(e.to_string(), "Lookup: field `engine` has 3000 bytes, at most 2048 allowed");
    assert_eq!(out, [1, 2, 3]);
}
