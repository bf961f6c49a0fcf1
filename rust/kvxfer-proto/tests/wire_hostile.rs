//! Bytes from a peer that is broken, newer or hostile.
#![allow(clippy::unwrap_used)]

mod wire_common;

use kvxfer_proto::msg::{Grant, Msg};
use kvxfer_proto::wire::{
    self, Decoded, Decoder, HEADER_BYTES, MAX_DESCRIBE_BYTES, MAX_FRAME_BYTES, MAX_HANDSHAKE_BYTES,
    WireError, kind,
};
use proptest::collection::vec;
use proptest::prelude::*;
use wire_common::{any_frame, encoded, fields, fix_len, patch, samples};

/// Everything that may be done to bytes that came. Returns nothing: it must not panic, and what it takes for a frame
/// must be one.
fn chew(bytes: &[u8]) {
    if let Ok(Decoded::Frame(frame)) = wire::decode_frame(bytes) {
        let again = wire::decode_frame(&encoded(&frame));
        assert_eq!(again, Ok(Decoded::Frame(frame)));
    }
    let mut decoder = Decoder::new();
    decoder.set_cap(MAX_FRAME_BYTES);
    decoder.feed(bytes);
    while let Ok(Some(_)) = decoder.next_frame() {}
    let twice = (decoder.next_frame(), decoder.next_frame());
    assert_eq!(twice.0, twice.1, "an error is final");
    assert!(decoder.capacity() <= bytes.len().max(8), "{} for {}", decoder.capacity(), bytes.len());
}

proptest! {
    #[test]
    fn random_bytes(bytes in vec(any::<u8>(), 0..600)) {
        chew(&bytes);
    }

    #[test]
    fn random_body(kind in any::<u8>(), body in vec(any::<u8>(), 0..300)) {
        let mut raw = vec![0, 0, 0, 0, 1, kind, 0, 0];
        raw.resize(HEADER_BYTES, 7);
        raw.extend_from_slice(&body);
        fix_len(&mut raw);
        chew(&raw);
    }

    #[test]
    fn changed_bytes(frame in any_frame(), changes in vec((any::<prop::sample::Index>(), any::<u8>()), 1..6)) {
        let mut raw = encoded(&frame);
        for (at, byte) in changes {
            let at = at.index(raw.len());
            raw[at] = byte;
        }
        chew(&raw);
    }
}

#[test]
fn cut_off_anywhere() {
    for frame in samples() {
        let raw = encoded(&frame);
        let mut decoder = Decoder::new();
        decoder.set_cap(MAX_FRAME_BYTES);
        for end in 0..raw.len() {
            let err = wire::decode_frame(&raw[..end]);
            assert!(matches!(err, Err(WireError::Truncated { have, .. }) if have == end), "{err:?}");
            assert_eq!(decoder.next_frame(), Ok(None), "{} at {end}", frame.msg.name());
            decoder.feed(&raw[end..=end]);
            // The same cut with a length that fits: a shorter body, which must not read past its end.
            if end >= HEADER_BYTES {
                let mut short = raw[..end].to_vec();
                fix_len(&mut short);
                chew(&short);
            }
        }
        assert_eq!(decoder.next_frame(), Ok(Some(Decoded::Frame(frame))));
    }
}

#[test]
fn bytes_after_the_frame_and_in_it() {
    for frame in samples() {
        let mut raw = encoded(&frame);
        raw.push(0);
        assert_eq!(wire::decode_frame(&raw), Err(WireError::TrailingBytes { extra: 1 }));
        fix_len(&mut raw);
        assert!(matches!(wire::decode_frame(&raw), Err(WireError::Stray { left: 1, .. })));
    }
}

#[test]
fn every_field_is_needed_once() {
    let mut optional = Vec::new();
    for frame in samples() {
        let raw = encoded(&frame);
        for (tag, whole, _) in fields(&raw, HEADER_BYTES..raw.len()) {
            let mut without = raw.clone();
            without.drain(whole.clone());
            fix_len(&mut without);
            match wire::decode_frame(&without) {
                Err(WireError::Missing { .. }) => {}
                Ok(Decoded::Frame(other)) => {
                    assert_ne!(other, frame);
                    optional.push((frame.msg.name(), tag));
                }
                other => panic!("{} without {tag}: {other:?}", frame.msg.name()),
            }
            let mut twice = raw.clone();
            twice.extend_from_slice(&raw[whole]);
            fix_len(&mut twice);
            let err = wire::decode_frame(&twice);
            assert!(
                matches!(err, Err(WireError::Repeated { .. })),
                "{} twice {tag}: {err:?}",
                frame.msg.name()
            );
        }
    }
    let known = [
        ("Attached", 1),
        ("Grant", 4),
        ("Copied", 4),
        ("Done", 7),
        ("Done", 8),
        ("Finished", 3),
        ("Credit", 1),
    ];
    assert_eq!(optional, known);
}

#[test]
fn errors_name_message_and_field() {
    let raw = encoded(&samples()[4]);
    let (_, whole, _) = fields(&raw, HEADER_BYTES..raw.len())[6].clone();
    let mut without = raw.clone();
    without.drain(whole);
    fix_len(&mut without);
    assert_eq!(wire::decode_frame(&without).unwrap_err().to_string(), "Describe: field `shard` is missing");
    let bad = patch(&raw, &[7, 2], &[1, 2, 3]);
    assert_eq!(
        wire::decode_frame(&bad).unwrap_err().to_string(),
        "Shard: field `tp_size` has 3 bytes, its type takes 4"
    );
}

#[test]
fn unknown_fields_are_skipped_everywhere() {
    let unknown = [0xf0, 0xff, 3, 0, 0, 0, 9, 9, 9];
    for frame in samples() {
        let raw = encoded(&frame);
        let mut ends = vec![HEADER_BYTES];
        ends.extend(fields(&raw, HEADER_BYTES..raw.len()).into_iter().map(|(_, whole, _)| whole.end));
        for at in ends {
            let mut more = raw.clone();
            more.splice(at..at, unknown);
            fix_len(&mut more);
            assert_eq!(wire::decode_frame(&more), Ok(Decoded::Frame(frame.clone())), "{}", frame.msg.name());
        }
    }
    // In structs within a message, and in lists.
    let describe = &samples()[4];
    let raw = encoded(describe);
    for path in [&[7][..], &[6], &[6, 1], &[10], &[10, 1], &[11, 1]] {
        let mut at = HEADER_BYTES..raw.len();
        for tag in path {
            at = fields(&raw, at).into_iter().find(|(t, ..)| t == tag).unwrap().2;
        }
        let value = [&raw[at], &unknown].concat();
        let more = patch(&raw, path, &value);
        assert_eq!(wire::decode_frame(&more), Ok(Decoded::Frame(describe.clone())), "{path:?}");
    }
}

#[test]
fn unknown_kinds_keep_their_number() {
    let mut raw = encoded(&samples()[15]);
    raw[5] = 200;
    let Ok(Decoded::Unknown(header)) = wire::decode_frame(&raw) else { panic!() };
    assert_eq!((header.kind, header.number, header.session.0), (200, 42, 6));
    assert_eq!(header.incarnation.0, 0x1122_3344_5566_7788);
    // Its neighbours in a stream are read all the same.
    let mut decoder = Decoder::new();
    decoder.set_cap(MAX_FRAME_BYTES);
    decoder.feed(&raw);
    decoder.feed(&encoded(&samples()[8]));
    assert_eq!(decoder.next_frame(), Ok(Some(Decoded::Unknown(header))));
    assert_eq!(decoder.next_frame(), Ok(Some(Decoded::Frame(samples()[8].clone()))));
}

#[test]
fn unknown_numbers_of_enums_are_refused() {
    let samples = samples();
    let cases: [(usize, &[u16], &[u8], &str); 12] = [
        (0, &[4], &[0], "Hello: field `purpose` cannot be 0"),
        (0, &[4], &[4], "Hello: field `purpose` cannot be 4"),
        (4, &[4], &[9], "Describe: field `role` cannot be 9"),
        (4, &[6, 1, 5], &[12], "PageLayout: field `dtype` cannot be 12"),
        (4, &[6, 1, 6], &[3], "PageLayout: field `order` cannot be 3"),
        (4, &[6, 1, 7], &[6], "PageLayout: field `kind` cannot be 6"),
        (4, &[10, 1, 5], &[3], "RegionShape: field `kind` cannot be 3"),
        (4, &[10, 1, 5], &[1, 0, 0, 0, 0], "RegionShape: field `kind` has 5 bytes, its type takes 1"),
        (15, &[7], &[4], "Grant: field `verify` cannot be 4"),
        (21, &[5], &[2], "Done: field `last` cannot be 2"),
        (15, &[1], &[0, 0, 0, 0, 0, 0, 0, 128], "Grant: field `room` cannot be 9223372036854775808"),
        (6, &[1], &[0xff], "Attach: field `fabric` is not UTF-8"),
    ];
    for (sample, path, value, want) in cases {
        let bad = patch(&encoded(&samples[sample]), path, value);
        assert_eq!(wire::decode_frame(&bad).unwrap_err().to_string(), want);
    }
    // A newer peer's kind of failure is still a failure.
    let newer = patch(&encoded(&samples[5]), &[1], &[250]);
    let Ok(Decoded::Frame(frame)) = wire::decode_frame(&newer) else { panic!() };
    let Msg::Refuse(reason) = frame.msg else { panic!() };
    assert_eq!(reason.kind, kvxfer_proto::ReasonKind::Internal);
}

#[test]
fn headers_of_other_versions() {
    for frame in samples() {
        let mut raw = encoded(&frame);
        raw[4] = 2;
        let got = wire::decode_frame(&raw);
        if matches!(raw[5], kind::HELLO | kind::CHALLENGE | kind::REFUSE) {
            assert_eq!(got, Ok(Decoded::Frame(frame)));
        } else {
            assert_eq!(got, Err(WireError::Version { kind: raw[5], got: 2, want: 1 }));
        }
        (raw[4], raw[7]) = (1, 1);
        assert_eq!(wire::decode_frame(&raw), Err(WireError::Flags { flags: 256 }));
    }
}

#[test]
fn oversize_is_refused_before_anything_is_allocated() {
    let announce = |kind: u8, len: usize, cap: usize| {
        let mut decoder = Decoder::new();
        decoder.set_cap(cap);
        let mut raw = u32::try_from(len).unwrap().to_le_bytes().to_vec();
        raw.extend_from_slice(&[1, kind]);
        raw.resize(HEADER_BYTES, 0);
        decoder.feed(&raw);
        let got = decoder.next_frame();
        assert!(decoder.capacity() <= 64);
        got
    };
    let refused = |len: usize, cap| Err(WireError::FrameTooLarge { len: len as u64, cap });
    let too_long = MAX_HANDSHAKE_BYTES + 1;
    assert_eq!(announce(kind::HELLO, too_long, MAX_FRAME_BYTES), refused(too_long, MAX_HANDSHAKE_BYTES));
    assert_eq!(announce(kind::GRANT, too_long, MAX_HANDSHAKE_BYTES), refused(too_long, MAX_HANDSHAKE_BYTES));
    let too_long = MAX_DESCRIBE_BYTES + 1;
    assert_eq!(announce(kind::DESCRIBE, too_long, MAX_FRAME_BYTES), refused(too_long, MAX_DESCRIBE_BYTES));
    assert_eq!(announce(kind::DESCRIBE, too_long - 1, MAX_FRAME_BYTES), Ok(None));
    let too_long = MAX_FRAME_BYTES + 1;
    assert_eq!(announce(kind::GRANT, too_long, usize::MAX), refused(too_long, MAX_FRAME_BYTES));
    assert_eq!(announce(kind::GRANT, too_long - 1, usize::MAX), Ok(None));
    // Four bytes are enough to know.
    let mut decoder = Decoder::new();
    decoder.feed(b"GET ");
    assert_eq!(decoder.next_frame(), refused(0x2054_4547, MAX_HANDSHAKE_BYTES));
}

#[test]
fn lists_and_bytes_have_limits_both_ways() {
    let samples = samples();
    let element = [1, 0, 0, 0, 0, 0];
    let cases: [(usize, &[u16], Vec<u8>, &str); 6] = [
        (15, &[5], element.repeat(65), "Grant: field `pages` has 65 elements, at most 64 allowed"),
        (4, &[8], [0; 4].repeat(65), "Describe: field `pages` has 65 elements, at most 64 allowed"),
        (15, &[5, 1], vec![0; 7], "Grant: field `pages` has 7 bytes, its type takes 4"),
        (
            15,
            &[5, 1],
            vec![0; (4 << 22) + 4],
            "Grant: field `pages` has 4194305 elements, at most 4194304 allowed",
        ),
        (21, &[7], vec![0; (64 << 10) + 1], "Done: field `meta` has 65537 bytes, at most 65536 allowed"),
        (6, &[1], vec![b'x'; 2_049], "Attach: field `fabric` has 2049 bytes, at most 2048 allowed"),
    ];
    for (sample, path, value, want) in cases {
        let bad = patch(&encoded(&samples[sample]), path, &value);
        assert_eq!(wire::decode_frame(&bad).unwrap_err().to_string(), want);
    }
    let mut frame = samples[15].clone();
    let Msg::Grant(Grant { pages, .. }) = &mut frame.msg else { panic!() };
    *pages = vec![Vec::new().into(); 65];
    let err = wire::encode(&frame, &mut Vec::new()).unwrap_err();
    assert_eq!(err.to_string(), "Grant: field `pages` has 65 elements, at most 64 allowed");
    // Five lists of the most pages are over the frame's limit together.
    let Msg::Grant(Grant { pages, .. }) = &mut frame.msg else { panic!() };
    *pages = vec![vec![0; 4 << 20].into(); 5];
    let err = wire::encode(&frame, &mut Vec::new()).unwrap_err();
    assert!(matches!(err, WireError::FrameTooLarge { cap: MAX_FRAME_BYTES, .. }), "{err}");
}

#[test]
fn a_long_reason_is_cut_at_a_character() {
    let mut frame = samples()[5].clone();
    frame.msg = Msg::Refuse(kvxfer_proto::Reason::new(kvxfer_proto::ReasonKind::Internal, "é".repeat(2_000)));
    let Ok(Decoded::Frame(back)) = wire::decode_frame(&encoded(&frame)) else { panic!() };
    let Msg::Refuse(reason) = back.msg else { panic!() };
    assert_eq!(reason.text, "é".repeat(1_024));
}
