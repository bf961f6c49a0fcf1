//! The codec: whatever it decodes it encodes to bytes that mean the same, and it never holds more than it was fed.

use kvxfer_proto::wire::{self, Decoded, Decoder, HEADER_BYTES, MAX_FRAME_BYTES};

/// Decodes these bytes as a stream, whole and in pieces.
pub fn wire(bytes: &[u8]) {
    let whole = decode(bytes, bytes.len().max(1));
    let piece = 1 + bytes.len() % 7;
    assert_eq!(whole, decode(bytes, piece), "the pieces in which bytes come make a difference");
    // Reading one frame out of a slice says the same as reading it out of a stream.
    if let Ok(one) = wire::decode_frame(bytes) {
        assert_eq!(whole.0.first(), Some(&one));
    }
}

fn decode(bytes: &[u8], piece: usize) -> (Vec<Decoded>, bool) {
    let mut decoder = Decoder::new();
    decoder.set_cap(MAX_FRAME_BYTES);
    let mut out = Vec::new();
    for part in bytes.chunks(piece) {
        decoder.feed(part);
        loop {
            match decoder.next_frame() {
                Ok(Some(decoded)) => {
                    round_trip(&decoded);
                    out.push(decoded);
                }
                Ok(None) => break,
                Err(e) => {
                    assert_eq!(decoder.next_frame(), Err(e), "an error is final");
                    return (out, true);
                }
            }
        }
    }
    assert!(
        decoder.capacity() <= 2 * bytes.len() + 64,
        "{} bytes held for {}",
        decoder.capacity(),
        bytes.len()
    );
    (out, false)
}

fn round_trip(decoded: &Decoded) {
    let Decoded::Frame(frame) = decoded else { return };
    let mut raw = Vec::new();
    if let Err(e) = wire::encode(frame, &mut raw) {
        panic!("decoded and cannot be encoded: {e}: {frame:?}");
    }
    assert!(raw.len() >= HEADER_BYTES);
    assert_eq!(wire::decode_frame(&raw).as_ref(), Ok(decoded));
}
