//! An agent's own regions, read for checksums.

use crate::shm::check_bounds;
use crate::{Backing, FabricError, MemKind, RegionSpan};
use std::sync::Arc;

/// A region, and what keeps its bytes where they are.
#[derive(Clone, Debug)]
struct Local {
    addr: usize,
    len: u64,
    kind: MemKind,
    _backing: Option<Arc<dyn Backing>>,
}

/// The regions of this agent, numbered as in its layout.
#[derive(Clone, Debug)]
pub struct LocalMemory {
    regions: Vec<Local>,
}

impl LocalMemory {
    /// Over the spans that the agent's fabrics register too; see [`RegionSpan`] for what their owner promises.
    ///
    /// # Errors
    /// An address or an end of a region that this process cannot have.
    pub fn new(spans: &[RegionSpan]) -> Result<Self, FabricError> {
        let regions = spans.iter().map(|s| {
            let bad = || FabricError::Os {
                call: "register",
                why: format!("a region of {} bytes at {:#x} is not in this process", s.len, s.addr),
            };
            let addr = usize::try_from(s.addr).map_err(|_| bad())?;
            s.addr.checked_add(s.len).filter(|end| usize::try_from(*end).is_ok()).ok_or_else(bad)?;
            Ok(Local { addr, len: s.len, kind: s.kind, _backing: s.backing.clone() })
        });
        Ok(Self { regions: regions.collect::<Result<_, _>>()? })
    }

    /// The address of `len` bytes at `off` of a region, if they lie in it and are host memory.
    fn check(&self, region: u32, off: u64, len: usize) -> Result<usize, FabricError> {
        let found = usize::try_from(region).ok().and_then(|i| self.regions.get(i));
        // `usize` has at most 64 bits.
        let bytes = u64::try_from(len).unwrap_or(u64::MAX);
        check_bounds("local", region, found.map(|r| r.len), off, bytes)?;
        match (found, usize::try_from(off)) {
            (Some(Local { addr, kind: MemKind::Host, .. }), Ok(off)) => Ok(addr + off),
            _ => Err(FabricError::Unavailable {
                fabric: "verify",
                why: format!("region {region} is not host memory; leave verify= out"),
            }),
        }
    }

    /// Copies bytes of a region out.
    ///
    /// # Errors
    /// They leave the region, or it is not host memory; nothing was read.
    pub fn read(&self, region: u32, off: u64, out: &mut [u8]) -> Result<(), FabricError> {
        let from = self.check(region, off, out.len())?;
        // SAFETY: `check` says that the whole range lies in a region, which its owner keeps mapped for the life of
        // the agent. `out` is a buffer of Rust's own, so the two do not overlap. A peer (over RDMA or shared memory)
        // or a fabric's library may write the range meanwhile, which only a peer that breaks the protocol makes
        // happen: no reference to it is ever made, and whatever is copied are bytes of which each value is valid.
        unsafe {
            std::ptr::copy_nonoverlapping(
                std::ptr::with_exposed_provenance::<u8>(from),
                out.as_mut_ptr(),
                out.len(),
            );
        }
        Ok(())
    }

    /// Changes a bit of a byte, for tests of what checksums find: never use it where bytes matter.
    ///
    /// # Errors
    /// As [`LocalMemory::read`].
    pub fn flip(&self, region: u32, off: u64) -> Result<(), FabricError> {
        let mut byte = [0u8];
        self.read(region, off, &mut byte)?;
        let at = self.check(region, off, 1)?;
        // SAFETY: as in `read`; the region belongs to an agent that expects, and so is writable, and nobody else writes
        // pages whose piece has been delivered.
        unsafe { std::ptr::with_exposed_provenance_mut::<u8>(at).write_volatile(byte[0] ^ 0x10) };
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn over(bytes: &mut [u8], kind: MemKind) -> LocalMemory {
        let addr = bytes.as_mut_ptr().expose_provenance() as u64;
        let span = RegionSpan { addr, len: bytes.len() as u64, kind, backing: None };
        LocalMemory::new(&[span]).unwrap()
    }

    #[test]
    fn reads_what_is_there_and_nothing_beyond() {
        let mut bytes: Vec<u8> = (0..64).collect();
        let memory = over(&mut bytes, MemKind::Host);
        let mut out = [0u8; 8];
        for off in 0..=56u8 {
            memory.read(0, u64::from(off), &mut out).unwrap();
            assert!(out.iter().zip(off..).all(|(a, b)| *a == b));
        }
        for (region, off) in [(0, 57), (0, 64), (0, u64::MAX), (1, 0), (u32::MAX, 0)] {
            out.fill(0xEE);
            let e = memory.read(region, off, &mut out).unwrap_err();
            assert!(matches!(e, FabricError::OutOfBounds { side: "local", .. }), "{e}");
            assert_eq!(out, [0xEE; 8]);
        }
        memory.read(0, 64, &mut []).unwrap();
        assert!(matches!(memory.flip(0, 64), Err(FabricError::OutOfBounds { .. })));
    }

    #[test]
    fn memory_of_a_device_and_impossible_spans_are_refused() {
        let mut bytes = vec![1u8; 8];
        let e = over(&mut bytes, MemKind::Device(0)).read(0, 0, &mut [0]).unwrap_err();
        assert!(e.to_string().contains("verify="), "{e}");
        let span = RegionSpan { addr: u64::MAX - 2, len: 8, kind: MemKind::Host, backing: None };
        assert!(LocalMemory::new(&[span]).is_err());
    }

    #[test]
    fn a_flip_changes_one_bit_and_twice_is_never() {
        let mut bytes = vec![0x0Fu8; 16];
        let memory = over(&mut bytes, MemKind::Host);
        let mut out = [0u8; 16];
        memory.flip(0, 3).unwrap();
        memory.read(0, 0, &mut out).unwrap();
        assert_eq!(out.iter().filter(|b| **b != 0x0F).count(), 1);
        assert_eq!(out[3], 0x1F);
        memory.flip(0, 3).unwrap();
        memory.read(0, 0, &mut out).unwrap();
        assert_eq!(out, [0x0F; 16]);
    }
}
