//! Copying around the cache.
//!
//! What lands is read later, by a model's kernels, so that a copy through the cache reads every line that it is about to
//! overwrite, and throws out what the process that receives is using.

/// Shorter pieces are copied as usual: they begin and end within a line more often than they gain.
#[cfg(target_arch = "x86_64")]
const LEAST: usize = 2048;

/// Copies `len` bytes. What was written is visible to other threads only after [`fence`].
///
/// # Safety
/// As [`std::ptr::copy_nonoverlapping`] for bytes.
pub(crate) unsafe fn copy(src: *const u8, dst: *mut u8, len: usize) {
    #[cfg(target_arch = "x86_64")]
    if len >= LEAST {
        // SAFETY: the caller's contract.
        unsafe { around(src, dst, len) };
        return;
    }
    // SAFETY: the caller's contract.
    unsafe { std::ptr::copy_nonoverlapping(src, dst, len) }
}

/// Orders what [`copy`] has written before whatever this thread writes next.
pub(crate) fn fence() {
    // For processors that do not keep stores in order; on x86-64 it says nothing of those around the cache.
    std::sync::atomic::fence(std::sync::atomic::Ordering::Release);
    #[cfg(target_arch = "x86_64")]
    // SAFETY: every x86-64 has it, and it touches no memory.
    unsafe {
        std::arch::x86_64::_mm_sfence();
    }
}

/// # Safety
/// As [`copy`].
#[cfg(target_arch = "x86_64")]
unsafe fn around(src: *const u8, dst: *mut u8, len: usize) {
    use std::arch::x86_64::{__m128i, _mm_loadu_si128, _mm_stream_si128};
    const LINE: usize = 64;
    let head = dst.align_offset(LINE).min(len);
    let lines = (len - head) / LINE;
    // SAFETY: `head` bytes, then `lines` whole lines, then the rest make up exactly `len` bytes of both ranges, which the caller
    // vouches for. Loads need no alignment; stores are at multiples of 64, which is more than their 16.
    unsafe {
        std::ptr::copy_nonoverlapping(src, dst, head);
        let (mut from, mut to) = (src.add(head), dst.add(head));
        for _ in 0..lines {
            let line = [0, 16, 32, 48].map(|at| _mm_loadu_si128(from.add(at).cast::<__m128i>()));
            for (at, part) in [0, 16, 32, 48].into_iter().zip(line) {
                _mm_stream_si128(to.add(at).cast::<__m128i>(), part);
            }
            (from, to) = (from.add(LINE), to.add(LINE));
        }
        let done = head + lines * LINE;
        std::ptr::copy_nonoverlapping(from, to, len - done);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_byte_arrives_and_no_other_changes(from in 0usize..200, to in 0usize..200, len in 0usize..9000) {
            let src: Vec<u8> = (0..9300u32).map(|i| (i * 31 % 253) as u8).collect();
            let mut dst = vec![0xEE; 9300];
            // SAFETY: both ranges lie in their vectors.
            unsafe { copy(src.as_ptr().add(from), dst.as_mut_ptr().add(to), len) };
            fence();
            prop_assert_eq!(&dst[to..to + len], &src[from..from + len]);
            prop_assert!(dst[..to].iter().chain(&dst[to + len..]).all(|b| *b == 0xEE));
        }
    }
}
