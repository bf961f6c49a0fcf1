//! Proving that one knows the secret, without showing it.

use hmac::{Hmac, KeyInit, Mac};
use sha2::{Digest, Sha256};
use std::fmt;

/// What the initiator's proof is bound to, so that no proof can serve for another purpose.
pub(super) const INITIATOR: &[u8] = b"kvxfer-1 initiator";
/// The same for the acceptor's.
pub(super) const ACCEPTOR: &[u8] = b"kvxfer-1 acceptor";

/// Bytes of an HMAC-SHA256 key.
const BLOCK: usize = 64;

/// A shared secret. It is never shown or sent; the proofs made with it could be tried against guesses, so it
/// should be random: 32 bytes, not a word.
#[derive(Clone, PartialEq, Eq, Hash)]
pub struct Secret([u8; BLOCK]);

impl Secret {
    /// A secret of these bytes; `None` if there are none, since the empty secret is no secret.
    #[must_use]
    pub fn new(bytes: &[u8]) -> Option<Self> {
        if bytes.is_empty() {
            return None;
        }
        // What HMAC itself does to a key.
        let hash = Sha256::digest(bytes);
        let key: &[u8] = if bytes.len() > BLOCK { hash.as_slice() } else { bytes };
        let mut block = [0; BLOCK];
        for (slot, byte) in block.iter_mut().zip(key) {
            *slot = *byte;
        }
        Some(Self(block))
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(..)")
    }
}

fn mac(secret: Option<&Secret>, label: &[u8], transcript: &[u8], channel: Option<&[u8; 32]>) -> Hmac<Sha256> {
    let key = secret.map_or([0; BLOCK], |secret| secret.0);
    let mut mac = Hmac::<Sha256>::new(&key.into());
    // Each part with its length, so that no two rows of parts have the same bytes.
    for part in [label, transcript].into_iter().chain(channel.map(<[u8; 32]>::as_slice)) {
        mac.update(&(part.len() as u64).to_le_bytes());
        mac.update(part);
    }
    mac
}

/// The proof of knowing `secret` in this transcript.
pub(super) fn prove(
    secret: Option<&Secret>,
    label: &[u8],
    transcript: &[u8],
    channel: Option<&[u8; 32]>,
) -> [u8; 32] {
    mac(secret, label, transcript, channel).finalize().into_bytes().into()
}

/// Whether the proof is right, in time that does not depend on where it is wrong.
pub(super) fn verify(
    secret: Option<&Secret>,
    label: &[u8],
    transcript: &[u8],
    channel: Option<&[u8; 32]>,
    proof: &[u8; 32],
) -> bool {
    mac(secret, label, transcript, channel).verify_slice(proof).is_ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mac_is_hmac_sha256() {
        for len in [1, 20, 63, 64, 65, 131] {
            let key: Vec<u8> = (0..len).map(|i| u8::try_from(i + 1).unwrap()).collect();
            let mut want = <Hmac<Sha256> as KeyInit>::new_from_slice(&key).unwrap();
            want.update(&3u64.to_le_bytes());
            want.update(b"who");
            want.update(&4u64.to_le_bytes());
            want.update(b"said");
            let got = prove(Secret::new(&key).as_ref(), b"who", b"said", None);
            assert_eq!(got.as_slice(), want.finalize().into_bytes().as_slice(), "key of {len} bytes");
        }
    }

    #[test]
    fn secret_is_never_printed() {
        let secret = Secret::new(b"hunter2").unwrap();
        assert_eq!(format!("{secret:?}"), "Secret(..)");
        assert_eq!(Secret::new(b""), None);
    }
}
