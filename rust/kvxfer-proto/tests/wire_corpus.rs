//! The kept corpus of the fuzzers, and each of its files with every byte changed in a few ways.
#![allow(clippy::unwrap_used)]

mod wire_common;

use kvxfer_proto::handshake::{Config, Handshake};
use kvxfer_proto::wire::{self, Decoded, Decoder, MAX_FRAME_BYTES};
use kvxfer_proto::{Incarnation, SessionNo};
use std::path::Path;
use wire_common::{encoded, samples};

fn corpus() -> Vec<(String, Vec<u8>)> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus/wire");
    let mut files: Vec<_> = std::fs::read_dir(&folder)
        .unwrap()
        .map(|entry| entry.unwrap().path())
        .map(|path| (path.file_name().unwrap().to_string_lossy().into_owned(), std::fs::read(path).unwrap()))
        .collect();
    files.sort();
    files
}

fn chew(bytes: &[u8]) {
    let mut decoder = Decoder::new();
    decoder.set_cap(MAX_FRAME_BYTES);
    decoder.feed(bytes);
    while let Ok(Some(decoded)) = decoder.next_frame() {
        if let Decoded::Frame(frame) = decoded {
            assert_eq!(wire::decode_frame(&encoded(&frame)), Ok(Decoded::Frame(frame)));
        }
    }
    let config = || Config::new(Incarnation(1), [1; 32], None);
    let purpose = kvxfer_proto::msg::Purpose::Transfer;
    for mut handshake in
        [Handshake::acceptor(config()), Handshake::initiator(config(), purpose, SessionNo(1))]
    {
        let mut decoder = Decoder::new();
        decoder.feed(bytes);
        handshake.handle_input(&mut decoder);
        handshake.handle_eof();
        assert!(handshake.outcome().is_some());
    }
}

#[test]
fn corpus_holds_and_its_neighbours_do_no_harm() {
    let corpus = corpus();
    assert!(corpus.len() >= samples().len(), "{} files", corpus.len());
    for (_, bytes) in &corpus {
        chew(bytes);
        for at in 0..bytes.len() {
            for change in [0x01, 0x80, 0xff] {
                let mut bytes = bytes.clone();
                bytes[at] ^= change;
                chew(&bytes);
            }
        }
    }
}

#[test]
fn corpus_has_every_kind_as_it_is_now() {
    let corpus = corpus();
    for frame in samples() {
        let name = format!("{}.bin", frame.msg.name());
        let (_, bytes) = corpus.iter().find(|(file, _)| *file == name).unwrap();
        assert_eq!(*bytes, encoded(&frame), "{name}");
    }
}
