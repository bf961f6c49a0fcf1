//! An agent's own memory, read for checksums, packed and unpacked.

use crate::shm::check_bounds;
use crate::ucx::Window;
use crate::{Backing, FabricError, MemKind, Piece, RegionSpan, stream};
use std::ops::Range;
use std::sync::Arc;

/// A region, and what keeps its bytes where they are.
#[derive(Clone, Debug)]
struct Local {
    addr: usize,
    len: u64,
    kind: MemKind,
    _backing: Option<Arc<dyn Backing>>,
}

/// The regions of this agent, numbered as in its layout, and after them what was added.
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
        Ok(Self { regions: spans.iter().map(local).collect::<Result<_, _>>()? })
    }

    /// One more region, for staging. Returns its number.
    ///
    /// # Errors
    /// As [`LocalMemory::new`].
    pub fn add(&mut self, span: &RegionSpan) -> Result<u32, FabricError> {
        let region = u32::try_from(self.regions.len()).unwrap_or(u32::MAX);
        self.regions.push(local(span)?);
        Ok(region)
    }

    /// Copies the sources of these pieces, one after the other, to `off` of region `to`. Returns how many bytes that
    /// were.
    ///
    /// # Errors
    /// A piece leaves its region, all of them leave `off..end` of `to`, or it is not host memory; nothing was copied.
    pub fn pack(&self, pieces: &[Piece], to: u32, span: Range<u64>) -> Result<u64, FabricError> {
        self.gather(pieces, to, span, |p| (p.src_region, p.src_off), false)
    }

    /// Copies bytes from `off` of region `from` on to the destinations of these pieces, one after the other.
    ///
    /// # Errors
    /// As [`LocalMemory::pack`].
    pub fn unpack(&self, pieces: &[Piece], from: u32, span: Range<u64>) -> Result<u64, FabricError> {
        self.gather(pieces, from, span, |p| (p.dst_region, p.dst_off), true)
    }

    /// As [`LocalMemory::pack`], into memory of a peer's.
    ///
    /// # Errors
    /// As [`LocalMemory::pack`].
    pub fn pack_into(&self, pieces: &[Piece], window: &Window<'_>) -> Result<u64, FabricError> {
        let place = |p: &Piece| (p.src_region, p.src_off);
        let total = self.total(pieces, place)?;
        check_bounds("remote", 0, Some(window.len()), 0, total)?;
        self.move_all(pieces, window.addr(), place, false);
        Ok(total)
    }

    fn gather(
        &self,
        pieces: &[Piece],
        packed: u32,
        span: Range<u64>,
        place: impl Fn(&Piece) -> (u32, u64),
        unpack: bool,
    ) -> Result<u64, FabricError> {
        let total = self.total(pieces, &place)?;
        let room = span.end.saturating_sub(span.start);
        check_bounds("local", packed, Some(room), 0, total)?;
        let at = self.check(packed, span.start, usize::try_from(total).unwrap_or(usize::MAX))?;
        self.move_all(pieces, at, place, unpack);
        Ok(total)
    }

    /// Checks that all pieces lie in their regions, and returns how many bytes they have.
    fn total(&self, pieces: &[Piece], place: impl Fn(&Piece) -> (u32, u64)) -> Result<u64, FabricError> {
        let mut total = 0u64;
        for piece in pieces {
            let (region, off) = place(piece);
            let len = usize::try_from(piece.len).unwrap_or(usize::MAX);
            self.check(region, off, len)?;
            total = total.saturating_add(piece.len);
        }
        Ok(total)
    }

    /// Copies pieces that were checked to `at` on, where there is room for all of them, or from there.
    fn move_all(&self, pieces: &[Piece], mut at: usize, place: impl Fn(&Piece) -> (u32, u64), unpack: bool) {
        for piece in pieces {
            let (region, off) = place(piece);
            // Both fit: they were checked above.
            let (Some(r), Ok(off), Ok(len)) = (
                usize::try_from(region).ok().and_then(|r| self.regions.get(r)),
                usize::try_from(off),
                usize::try_from(piece.len),
            ) else {
                continue;
            };
            let (from, to) = if unpack { (at, r.addr + off) } else { (r.addr + off, at) };
            // SAFETY: `check` says that both ranges lie in regions, which their owners keep mapped for the life of the
            // agent; or one of them in a window, which stays mapped for as long as it is borrowed. What is written is a slot
            // or a buffer of ours, or a slot that a peer has lent us, that nobody else writes now (a slot is unpacked
            // after its one write has landed and before it is lent again), or pages that were granted to the room being
            // unpacked: the caller's plan is of that grant, and the node gives no page back before its unpacking has ended.
            // A caller that breaks this loses bytes of the engine's, as any write to registered memory would, but not
            // memory safety: no reference to a region is made anywhere, and each value of a byte is valid, also if a peer that
            // breaks the protocol writes the source meanwhile. `copy` allows for an overlap, and where there is none `stream`
            // is told to copy.
            unsafe {
                let src = std::ptr::with_exposed_provenance::<u8>(from);
                let dst = std::ptr::with_exposed_provenance_mut::<u8>(to);
                // A buffer is written out at once, and stays in the cache for it.
                if unpack && from.abs_diff(to) >= len {
                    stream::copy(src, dst, len);
                } else {
                    std::ptr::copy(src, dst, len);
                }
            }
            at += len;
        }
        stream::fence();
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
                fabric: "host memory",
                why: format!("region {region} is not host memory: leave verify= out, and staging=\"never\""),
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

fn local(s: &RegionSpan) -> Result<Local, FabricError> {
    let bad = || FabricError::Os {
        call: "register",
        why: format!("a region of {} bytes at {:#x} is not in this process", s.len, s.addr),
    };
    let addr = usize::try_from(s.addr).map_err(|_| bad())?;
    s.addr.checked_add(s.len).filter(|end| usize::try_from(*end).is_ok()).ok_or_else(bad)?;
    Ok(Local { addr, len: s.len, kind: s.kind, _backing: s.backing.clone() })
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
    fn what_is_packed_comes_out_again_and_nothing_else_changes() {
        let mut from: Vec<u8> = (0..64).collect();
        let mut slot = vec![0xAAu8; 32];
        let mut memory = over(&mut from, MemKind::Host);
        let addr = slot.as_mut_ptr().expose_provenance() as u64;
        let slot_region =
            memory.add(&RegionSpan { addr, len: 32, kind: MemKind::Host, backing: None }).unwrap();
        let piece = |src_off, dst_off, len| Piece { src_region: 0, src_off, dst_region: 0, dst_off, len };
        let pieces = [piece(0, 32, 4), piece(16, 40, 4), piece(20, 48, 2)];
        assert_eq!(memory.pack(&pieces, slot_region, 8..24).unwrap(), 10);
        assert_eq!(slot[8..18], [0, 1, 2, 3, 16, 17, 18, 19, 20, 21]);
        assert!(slot[..8].iter().chain(&slot[18..]).all(|b| *b == 0xAA));
        assert_eq!(memory.unpack(&pieces, slot_region, 8..24).unwrap(), 10);
        assert_eq!((from[32..36].to_vec(), from[40..44].to_vec()), (vec![0, 1, 2, 3], vec![16, 17, 18, 19]));
        assert_eq!((from[36], from[44], from[48..51].to_vec()), (36, 44, vec![20, 21, 50]));
        let before = (from.clone(), slot.clone());
        for (bad, span) in [
            (vec![piece(0, 0, 4), piece(61, 0, 4)], 0..32),
            (vec![piece(0, 0, 9)], 0..8),
            (vec![piece(0, 0, 9)], 24..64),
            (vec![piece(0, 0, u64::MAX), piece(0, 0, 2)], 0..32),
            (vec![Piece { src_region: 9, ..piece(0, 0, 1) }], 0..32),
        ] {
            assert!(memory.pack(&bad, slot_region, span).is_err());
        }
        assert!(memory.unpack(&[piece(0, 62, 4)], slot_region, 0..32).is_err());
        assert_eq!((from, slot), before);
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
