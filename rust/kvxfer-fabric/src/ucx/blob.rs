//! What a peer needs to reach this fabric, in bytes.
//!
//! Everything is little-endian and counted; every count and length is checked against a cap and against what is
//! left before anything is allocated. The worker's address and the keys are UCX's own encodings, which UCX reads
//! without a length: they go to authenticated peers only, and are handed to UCX with zeros after them.

use crate::FabricError;
use kvxfer_ucx_sys::Version;

const MAGIC: [u8; 4] = *b"kxUC";
/// Format of this blob and of the notes that fabrics exchange.
pub(super) const FORMAT: u8 = 1;
const MAX_ADDRESS: usize = 64 << 10;
const MAX_KEY: usize = 16 << 10;
const MAX_MEMS: usize = 1 << 16;
const MAX_REGIONS: usize = 1 << 20;
/// Zeros after an address or a key, so that UCX's reading past a damaged one stays in our memory for a while.
const PADDING: usize = 4096;

/// One registered piece of memory of the peer.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct MemDesc {
    pub(super) base: u64,
    pub(super) len: u64,
    /// Packed key.
    pub(super) key: Vec<u8>,
}

/// Where a region lies.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct RegionDesc {
    pub(super) mem: u32,
    pub(super) off: u64,
    pub(super) len: u64,
}

/// The whole of it.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Blob {
    pub(super) ucx: Version,
    /// Names the fabric: random, drawn when it was made.
    pub(super) fabric: u128,
    /// Boot id of the host, zeros if it could not be read.
    pub(super) host: u128,
    pub(super) address: Vec<u8>,
    /// The last one is the scratch word.
    pub(super) mems: Vec<MemDesc>,
    pub(super) regions: Vec<RegionDesc>,
}

/// Bytes that UCX reads without a length, with zeros after them.
pub(super) fn padded(bytes: &[u8]) -> Vec<u8> {
    let mut out = Vec::with_capacity(bytes.len() + PADDING);
    out.extend_from_slice(bytes);
    out.resize(bytes.len() + PADDING, 0);
    out
}

fn bad(why: impl Into<String>) -> FabricError {
    FabricError::BadBlob { what: "ucx address", why: why.into() }
}

impl Blob {
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        out.extend_from_slice(&MAGIC);
        out.push(FORMAT);
        for n in [self.ucx.major, self.ucx.minor, self.ucx.release] {
            out.extend_from_slice(&n.to_le_bytes());
        }
        out.extend_from_slice(&self.fabric.to_le_bytes());
        out.extend_from_slice(&self.host.to_le_bytes());
        put_bytes(&mut out, &self.address);
        put_count(&mut out, self.mems.len());
        for mem in &self.mems {
            out.extend_from_slice(&mem.base.to_le_bytes());
            out.extend_from_slice(&mem.len.to_le_bytes());
            put_bytes(&mut out, &mem.key);
        }
        put_count(&mut out, self.regions.len());
        for region in &self.regions {
            out.extend_from_slice(&region.mem.to_le_bytes());
            out.extend_from_slice(&region.off.to_le_bytes());
            out.extend_from_slice(&region.len.to_le_bytes());
        }
        out
    }

    pub(super) fn decode(bytes: &[u8]) -> Result<Self, FabricError> {
        let mut r = Reader { rest: bytes };
        if r.array::<4>("magic")? != MAGIC {
            return Err(bad("it does not start as one"));
        }
        let [format] = r.array::<1>("format")?;
        if format != FORMAT {
            return Err(bad(format!("format {format}, and this side knows {FORMAT}")));
        }
        let ucx = Version { major: r.u32("version")?, minor: r.u32("version")?, release: r.u32("version")? };
        let fabric = u128::from_le_bytes(r.array("fabric id")?);
        let host = u128::from_le_bytes(r.array("host id")?);
        let address = r.bytes("worker address", MAX_ADDRESS)?;
        if address.is_empty() {
            return Err(bad("the worker address is empty"));
        }
        let count = r.count("memories", MAX_MEMS, 8 + 8 + 4)?;
        let mut mems = Vec::with_capacity(count);
        for i in 0..count {
            let (base, len) = (r.u64("memory base")?, r.u64("memory length")?);
            if base.checked_add(len).is_none() || len == 0 {
                return Err(bad(format!("memory {i} of {len} bytes at {base:#x} is impossible")));
            }
            let key = r.bytes("key", MAX_KEY)?;
            if key.is_empty() {
                return Err(bad(format!("the key of memory {i} is empty")));
            }
            mems.push(MemDesc { base, len, key });
        }
        if mems.last().is_none_or(|m| m.len < 8) {
            return Err(bad("there is no scratch word"));
        }
        let count = r.count("regions", MAX_REGIONS, 4 + 8 + 8)?;
        let mut regions = Vec::with_capacity(count);
        for i in 0..count {
            let region = RegionDesc { mem: r.u32("region")?, off: r.u64("region")?, len: r.u64("region")? };
            let Some(mem) = usize::try_from(region.mem).ok().and_then(|m| mems.get(m)) else {
                return Err(bad(format!("region {i} lies in memory {} of {}", region.mem, mems.len())));
            };
            if region.off.checked_add(region.len).is_none_or(|end| end > mem.len) {
                return Err(bad(format!(
                    "region {i} of {} bytes at {} leaves memory {} of {} bytes",
                    region.len, region.off, region.mem, mem.len
                )));
            }
            regions.push(region);
        }
        if !r.rest.is_empty() {
            return Err(bad(format!("{} bytes too many", r.rest.len())));
        }
        Ok(Self { ucx, fabric, host, address, mems, regions })
    }
}

impl MemDesc {
    /// Alone: memory that is offered after the fabric was described.
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut out = Vec::new();
        out.extend_from_slice(&MAGIC);
        out.push(FORMAT);
        out.extend_from_slice(&self.base.to_le_bytes());
        out.extend_from_slice(&self.len.to_le_bytes());
        put_bytes(&mut out, &self.key);
        out
    }

    pub(super) fn decode(bytes: &[u8]) -> Result<Self, FabricError> {
        let mut r = Reader { rest: bytes };
        if r.array::<4>("magic")? != MAGIC || r.array::<1>("format")? != [FORMAT] {
            return Err(bad("it does not start as one, or is of another format"));
        }
        let (base, len) = (r.u64("memory base")?, r.u64("memory length")?);
        let key = r.bytes("key", MAX_KEY)?;
        if base.checked_add(len).is_none() || len == 0 || key.is_empty() || !r.rest.is_empty() {
            return Err(bad(format!(
                "memory of {len} bytes at {base:#x}: impossible, or without a key, or too long"
            )));
        }
        Ok(Self { base, len, key })
    }
}

fn put_count(out: &mut Vec<u8>, n: usize) {
    // Counts of things in memory that were capped when the fabric was made.
    out.extend_from_slice(&u32::try_from(n).unwrap_or(u32::MAX).to_le_bytes());
}

fn put_bytes(out: &mut Vec<u8>, bytes: &[u8]) {
    put_count(out, bytes.len());
    out.extend_from_slice(bytes);
}

struct Reader<'a> {
    rest: &'a [u8],
}

impl<'a> Reader<'a> {
    fn take(&mut self, n: usize, what: &str) -> Result<&'a [u8], FabricError> {
        let (head, rest) = self.rest.split_at_checked(n).ok_or_else(|| {
            bad(format!("it ends in its {what}: {n} bytes wanted, {} left", self.rest.len()))
        })?;
        self.rest = rest;
        Ok(head)
    }

    fn array<const N: usize>(&mut self, what: &str) -> Result<[u8; N], FabricError> {
        let mut out = [0; N];
        out.copy_from_slice(self.take(N, what)?);
        Ok(out)
    }

    fn u32(&mut self, what: &str) -> Result<u32, FabricError> {
        self.array(what).map(u32::from_le_bytes)
    }

    fn u64(&mut self, what: &str) -> Result<u64, FabricError> {
        self.array(what).map(u64::from_le_bytes)
    }

    fn len(&mut self, what: &str, max: usize) -> Result<usize, FabricError> {
        let n = self.u32(what)?;
        usize::try_from(n)
            .ok()
            .filter(|n| *n <= max)
            .ok_or_else(|| bad(format!("{n} {what} are more than the {max} allowed")))
    }

    /// A count of things that take at least `each` bytes.
    fn count(&mut self, what: &str, max: usize, each: usize) -> Result<usize, FabricError> {
        let n = self.len(what, max)?;
        if n.checked_mul(each).is_none_or(|bytes| bytes > self.rest.len()) {
            return Err(bad(format!("{n} {what} do not fit in {} bytes", self.rest.len())));
        }
        Ok(n)
    }

    fn bytes(&mut self, what: &str, max: usize) -> Result<Vec<u8>, FabricError> {
        let n = self.len(what, max)?;
        self.take(n, what).map(<[u8]>::to_vec)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn sample() -> Blob {
        Blob {
            ucx: Version { major: 1, minor: 22, release: 0 },
            fabric: 7,
            host: 9,
            address: vec![1, 2, 3],
            mems: vec![
                MemDesc { base: 1 << 63, len: 4096, key: vec![4, 5] },
                MemDesc { base: 0x1000, len: 8, key: vec![6] },
            ],
            regions: vec![RegionDesc { mem: 0, off: 96, len: 4000 }, RegionDesc { mem: 0, off: 0, len: 0 }],
        }
    }

    #[test]
    fn what_goes_in_comes_out() {
        assert_eq!(Blob::decode(&sample().encode()), Ok(sample()));
    }

    #[test]
    fn every_cut_is_an_error() {
        let bytes = sample().encode();
        for n in 0..bytes.len() {
            assert!(Blob::decode(&bytes[..n]).is_err(), "{n} of {} bytes were taken", bytes.len());
        }
        let longer = [bytes, vec![0]].concat();
        assert!(Blob::decode(&longer).is_err());
    }

    #[test]
    fn impossible_values_are_refused() {
        let change = |f: fn(&mut Blob)| {
            let mut blob = sample();
            f(&mut blob);
            Blob::decode(&blob.encode())
        };
        assert!(change(|b| b.mems[0].base = u64::MAX).is_err());
        assert!(change(|b| b.mems[0].key.clear()).is_err());
        assert!(change(|b| b.mems[0].len = 0).is_err());
        assert!(change(|b| b.mems.clear()).is_err());
        assert!(change(|b| b.mems[1].len = 7).is_err());
        assert!(change(|b| b.regions[0].mem = 2).is_err());
        assert!(change(|b| b.regions[1].mem = 2).is_err());
        assert!(change(|b| b.regions[0].off = 97).is_err());
        assert!(change(|b| b.regions[0].len = u64::MAX).is_err());
        assert!(change(|b| b.address.clear()).is_err());
        assert!(change(|b| b.address = vec![0; MAX_ADDRESS + 1]).is_err());
        assert!(change(|b| b.mems[0].key = vec![0; MAX_KEY + 1]).is_err());
    }

    proptest! {
        #[test]
        fn random_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            let _ = Blob::decode(&bytes);
            let mut framed = MAGIC.to_vec();
            framed.push(FORMAT);
            framed.extend(bytes);
            let _ = Blob::decode(&framed);
        }

        #[test]
        fn a_damaged_blob_is_an_error_or_stays_within_its_memory(at in 0usize..1000, byte in any::<u8>()) {
            let mut bytes = sample().encode();
            let at = at % bytes.len();
            bytes[at] = byte;
            if let Ok(blob) = Blob::decode(&bytes) {
                for r in &blob.regions {
                    let mem = &blob.mems[r.mem as usize];
                    prop_assert!(r.off + r.len <= mem.len && mem.base.checked_add(mem.len).is_some());
                }
                prop_assert_eq!(blob.encode(), bytes);
            }
        }
    }
}
