//! The fuzz targets on stable Rust: over the kept corpus, its neighbours, and bytes of proptest's. `make fuzz` runs the
//! same code under libFuzzer.

#![allow(clippy::unwrap_used, clippy::panic, unreachable_pub, missing_docs)]

#[path = "../../../fuzz/src/lib.rs"]
mod fuzz;

use proptest::collection::vec;
use proptest::prelude::*;
use std::path::Path;

type Target = fn(&[u8]);

const TARGETS: [(&str, Target); 3] =
    [("wire", fuzz::wire), ("handshake", fuzz::handshake), ("node", fuzz::node)];

fn corpus(name: &str) -> Vec<Vec<u8>> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../fuzz/corpus").join(name);
    let mut paths: Vec<_> = std::fs::read_dir(&folder).unwrap().map(|e| e.unwrap().path()).collect();
    paths.sort();
    paths.into_iter().map(|path| std::fs::read(path).unwrap()).collect()
}

#[test]
fn the_corpus_and_its_neighbours_keep_every_promise() {
    for (name, target) in TARGETS {
        let corpus = corpus(name);
        assert!(corpus.len() >= 8, "{name}: {} files", corpus.len());
        for bytes in &corpus {
            target(bytes);
            for at in 0..bytes.len() {
                let mut near = bytes.clone();
                near[at] ^= 1 << (at % 8);
                target(&near);
                target(&bytes[..at]);
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn wire_decodes_and_encodes_any_bytes_alike(bytes in vec(any::<u8>(), 0..300)) {
        fuzz::wire(&bytes);
    }

    #[test]
    fn handshakes_let_nobody_in_who_did_not_prove_himself(bytes in vec(any::<u8>(), 0..400)) {
        fuzz::handshake(&bytes);
    }

    #[test]
    fn a_node_keeps_honest_rooms_from_a_hostile_peer(bytes in vec(any::<u8>(), 0..1000)) {
        fuzz::node(&bytes);
    }

    /// Corpus files cut and joined, which get further than random bytes.
    #[test]
    fn spliced_corpus_files_keep_every_promise(
        which in 0usize..3,
        parts in vec((any::<prop::sample::Index>(), any::<prop::sample::Index>()), 1..6),
    ) {
        let (name, target) = TARGETS[which];
        let corpus = corpus(name);
        let mut bytes = Vec::new();
        for (file, cut) in parts {
            let file = &corpus[file.index(corpus.len())];
            bytes.extend_from_slice(&file[..cut.index(file.len() + 1)]);
        }
        target(&bytes);
    }
}
