//! Version 1's bytes: if one of these fails, the format has changed, and old peers cannot read it.
#![allow(clippy::unwrap_used)]

mod wire_common;

use kvxfer_proto::wire::{self, Decoded};
use std::fmt::Write as _;
use wire_common::{encoded, samples};

/// A name and the frame's bytes in hex on each line. To add a kind, add a line; never change one.
const GOLDEN: &str = include_str!("wire_golden.txt");

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut out, byte| {
        write!(out, "{byte:02x}").unwrap();
        out
    })
}

fn unhex(text: &str) -> Vec<u8> {
    (0..text.len()).step_by(2).map(|i| u8::from_str_radix(&text[i..i + 2], 16).unwrap()).collect()
}

#[test]
fn bytes_of_every_kind_are_those_of_version_1() {
    let samples = samples();
    assert_eq!(GOLDEN.lines().count(), samples.len());
    for (line, frame) in GOLDEN.lines().zip(&samples) {
        let (name, want) = line.split_once(' ').unwrap();
        assert_eq!(name, frame.msg.name());
        assert_eq!(hex(&encoded(frame)), want, "{name} has other bytes now");
        assert_eq!(wire::decode_frame(&unhex(want)), Ok(Decoded::Frame(frame.clone())), "{name}");
    }
}

#[test]
fn header_is_as_documented() {
    let raw = encoded(&samples()[15]);
    assert_eq!(raw[0..4], u32::try_from(raw.len() - 32).unwrap().to_le_bytes());
    assert_eq!(raw[4..8], [1, 64, 0, 0]);
    assert_eq!(raw[8..16], 0x1122_3344_5566_7788u64.to_le_bytes());
    assert_eq!(raw[16..24], 6u64.to_le_bytes());
    assert_eq!(raw[24..32], 42u64.to_le_bytes());
}
