//! What `describe` gives to an authenticated peer.

use super::host::HostId;
use crate::FabricError;

const MAGIC: [u8; 4] = *b"kvsm";
const VERSION: u16 = 1;
/// Longest abstract socket name that Linux takes.
const NAME_MAX: usize = 107;
/// Longest blob that is looked at.
pub(crate) const BLOB_MAX: usize = 512;

/// A one-time token: whoever shows it on the Unix socket gets the descriptors.
pub(crate) type Token = [u8; 32];

/// Names one fabric of one process for good.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct ProcessKey {
    pub(crate) pid: u32,
    /// Clock ticks since boot; tells a recycled process id.
    pub(crate) start: u64,
    /// Random, drawn by the fabric: two fabrics of one process are two peers.
    pub(crate) instance: [u8; 16],
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub(crate) struct Blob {
    pub(crate) host: HostId,
    pub(crate) process: ProcessKey,
    pub(crate) token: Token,
    /// Abstract name of the socket that the fabric listens on.
    pub(crate) name: Vec<u8>,
}

impl Blob {
    pub(crate) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(160);
        out.extend_from_slice(&MAGIC);
        out.extend_from_slice(&VERSION.to_le_bytes());
        out.extend_from_slice(&self.host.boot_id);
        out.extend_from_slice(&self.host.pid_ns.to_le_bytes());
        out.extend_from_slice(&self.host.net_ns.to_le_bytes());
        out.extend_from_slice(&self.host.uid.to_le_bytes());
        out.extend_from_slice(&self.process.pid.to_le_bytes());
        out.extend_from_slice(&self.process.start.to_le_bytes());
        out.extend_from_slice(&self.process.instance);
        out.extend_from_slice(&self.token);
        out.push(u8::try_from(self.name.len()).unwrap_or(u8::MAX));
        out.extend_from_slice(&self.name);
        out
    }

    pub(crate) fn decode(bytes: &[u8]) -> Result<Self, FabricError> {
        let bad = |why: String| FabricError::BadBlob { what: "shm address", why };
        if bytes.len() > BLOB_MAX {
            return Err(bad(format!("{} bytes, at most {BLOB_MAX} are possible", bytes.len())));
        }
        let mut r = Reader(bytes);
        if r.array::<4>() != Some(MAGIC) {
            return Err(bad("it does not start like one".to_owned()));
        }
        match r.array().map(u16::from_le_bytes) {
            Some(VERSION) => {}
            other => return Err(bad(format!("version {other:?}, this side knows {VERSION}"))),
        }
        let parse = |r: &mut Reader<'_>| {
            Some(Self {
                host: HostId { boot_id: r.array()?, pid_ns: r.u64()?, net_ns: r.u64()?, uid: r.u32()? },
                process: ProcessKey { pid: r.u32()?, start: r.u64()?, instance: r.array()? },
                token: r.array()?,
                name: {
                    let len = usize::from(r.u8()?);
                    r.take(len)?.to_vec()
                },
            })
        };
        let blob = parse(&mut r).ok_or_else(|| bad(format!("cut short at {} bytes", bytes.len())))?;
        if !r.0.is_empty() {
            return Err(bad(format!("{} bytes too many", r.0.len())));
        }
        if blob.name.is_empty() || blob.name.len() > NAME_MAX {
            return Err(bad(format!("a socket name of {} bytes", blob.name.len())));
        }
        if blob.process.pid == 0 || i32::try_from(blob.process.pid).is_err() {
            return Err(bad(format!("process id {}", blob.process.pid)));
        }
        Ok(blob)
    }
}

/// Takes bytes off the front; `None` once they run out.
pub(crate) struct Reader<'a>(pub(crate) &'a [u8]);

impl<'a> Reader<'a> {
    pub(crate) fn take(&mut self, n: usize) -> Option<&'a [u8]> {
        let (head, rest) = self.0.split_at_checked(n)?;
        self.0 = rest;
        Some(head)
    }

    pub(crate) fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.take(N)?.try_into().ok()
    }

    pub(crate) fn u8(&mut self) -> Option<u8> {
        self.array::<1>().map(|b| b[0])
    }

    pub(crate) fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    pub(crate) fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }
}

/// Compares in a time that does not tell where the first difference is.
pub(crate) fn same_token(a: &Token, b: &Token) -> bool {
    let diff = a.iter().zip(b).fold(0u8, |acc, (x, y)| std::hint::black_box(acc | (x ^ y)));
    std::hint::black_box(diff) == 0
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn blobs() -> impl Strategy<Value = Blob> {
        (
            any::<([u8; 16], u64, u64, u32)>(),
            (1u32..i32::MAX as u32, any::<u64>(), any::<[u8; 16]>()),
            any::<Token>(),
            proptest::collection::vec(any::<u8>(), 1..NAME_MAX),
        )
            .prop_map(|(h, p, token, name)| Blob {
                host: HostId { boot_id: h.0, pid_ns: h.1, net_ns: h.2, uid: h.3 },
                process: ProcessKey { pid: p.0, start: p.1, instance: p.2 },
                token,
                name,
            })
    }

    proptest! {
        #[test]
        fn round_trip(blob in blobs()) {
            prop_assert_eq!(Blob::decode(&blob.encode()).unwrap(), blob);
        }

        #[test]
        fn every_cut_and_every_extra_byte_is_refused(blob in blobs(), extra in any::<u8>()) {
            let mut bytes = blob.encode();
            for n in 0..bytes.len() {
                prop_assert!(Blob::decode(&bytes[..n]).is_err());
            }
            bytes.push(extra);
            prop_assert!(Blob::decode(&bytes).is_err());
        }

        #[test]
        fn hostile_bytes_never_panic(mut bytes in proptest::collection::vec(any::<u8>(), 0..600), valid in any::<bool>()) {
            if valid && bytes.len() > 6 {
                bytes[..4].copy_from_slice(&MAGIC);
                bytes[4..6].copy_from_slice(&VERSION.to_le_bytes());
            }
            if let Ok(blob) = Blob::decode(&bytes) {
                prop_assert_eq!(blob.encode(), bytes);
            }
        }

        #[test]
        fn tokens(a in any::<Token>(), at in 0usize..32, bit in 0u8..8) {
            let mut b = a;
            prop_assert!(same_token(&a, &b));
            b[at] ^= 1 << bit;
            prop_assert!(!same_token(&a, &b));
        }
    }

    #[test]
    fn other_versions_are_named() {
        let mut bytes = MAGIC.to_vec();
        bytes.extend_from_slice(&7u16.to_le_bytes());
        let error = Blob::decode(&bytes).unwrap_err().to_string();
        assert!(error.contains("Some(7)") && error.contains("knows 1"), "{error}");
    }
}
