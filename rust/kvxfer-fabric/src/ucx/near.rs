//! What this process has mapped of other processes' memory.

use std::ops::Range;

/// The shared memory that is mapped here for writing, in ascending order. A look at one moment.
///
/// UCX's word for where a peer's memory is mapped (`ucp_rkey_ptr`) is held against it: a key may name more than was
/// mapped, and a wrong address would end the process. Devices' files are left out: the pages behind `/dev/xpmem` go when
/// the peer's process ends, and those of a GPU are not the processor's to copy.
#[derive(Debug, Default)]
pub(super) struct Mappings(Vec<Range<usize>>);

impl Mappings {
    /// What there is now; nothing where `/proc` is not there.
    pub(super) fn now() -> Self {
        std::fs::read_to_string("/proc/self/maps").map(|text| Self::parse(&text)).unwrap_or_default()
    }

    /// From the kernel's text: `from-to rights offset device inode path`, see proc_pid_maps(5).
    fn parse(text: &str) -> Self {
        let mut found: Vec<Range<usize>> = Vec::new();
        for line in text.lines() {
            let mut words = line.split_ascii_whitespace();
            let (Some(range), Some(rights)) = (words.next(), words.next()) else { continue };
            let path = words.nth(3).unwrap_or_default();
            let device = path.starts_with("/dev/")
                && !path.starts_with("/dev/shm/")
                && !path.starts_with("/dev/hugepages/");
            if !rights.starts_with("rw") || !rights.ends_with('s') || device {
                continue;
            }
            let number = |s: &str| usize::from_str_radix(s, 16).ok();
            let Some((from, to)) = range.split_once('-').and_then(|(a, b)| number(a).zip(number(b))) else {
                continue;
            };
            match found.last_mut() {
                Some(last) if last.end == from => last.end = to,
                _ => found.push(from..to),
            }
        }
        Self(found)
    }

    /// Whether all of `len` bytes at `addr` are in it.
    pub(super) fn cover(&self, addr: usize, len: u64) -> bool {
        let end = usize::try_from(len).ok().and_then(|len| addr.checked_add(len));
        let after = self.0.partition_point(|r| r.end <= addr);
        end.zip(self.0.get(after)).is_some_and(|(end, r)| r.start <= addr && end <= r.end)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAPS: &str = "\
1000-3000 rw-s 00000000 00:01 7    /dev/shm/ucx_shm_posix_1a (deleted)
3000-5000 rw-s 00002000 00:01 7    /dev/shm/ucx_shm_posix_1a (deleted)
5000-6000 r--s 00000000 00:01 8    /dev/shm/read_only
6000-7000 rw-p 00000000 00:00 0
7000-8000 rw-s 00000000 00:06 9    /dev/xpmem
8000-9000 rw-s 00000000 00:06 10   /dev/nvidia-uvm
9000-a000 rw-s 00000000 00:01 11   /memfd:pages (deleted)
nonsense
ffffffff60000000-ffffffff60001000 rw-s 00000000 00:01 12   /SYSV00000000 (deleted)
";

    #[test]
    fn only_shared_writable_memory_that_is_no_device_counts() {
        let maps = Mappings::parse(MAPS);
        for (addr, len) in [(0x1000, 0x4000), (0x2fff, 2), (0x1000, 1), (0x4fff, 1), (0x9000, 0x1000)] {
            assert!(maps.cover(addr, len), "{addr:x} {len:x}");
        }
        assert!(maps.cover(0xffff_ffff_6000_0ff0, 0x10));
        for (addr, len) in [
            (0xfff, 2),
            (0x1000, 0x4001),
            (0x4fff, 2),
            (0x5000, 1),
            (0x6000, 1),
            (0x7000, 1),
            (0x8000, 1),
            (0x9fff, 2),
            (0xb000, 1),
            (usize::MAX, 1),
            (0xffff_ffff_6000_0ff0, u64::MAX),
        ] {
            assert!(!maps.cover(addr, len), "{addr:x} {len:x}");
        }
    }

    #[test]
    fn what_is_mapped_now_is_found() {
        use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
        use rustix::mm::{MapFlags, ProtFlags, mmap, munmap};
        let fd = memfd_create("kvxfer-test", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&fd, 1 << 20).unwrap();
        let rights = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping, at no address of our choice.
        let at = unsafe { mmap(std::ptr::null_mut(), 1 << 20, rights, MapFlags::SHARED, &fd, 0) }.unwrap();
        let found = Mappings::now().cover(at.addr(), 1 << 20);
        // SAFETY: that mapping, which nobody has used.
        unsafe { munmap(at, 1 << 20) }.unwrap();
        assert!(found);
        let own = Box::new(7u8);
        assert!(!Mappings::now().cover(std::ptr::from_ref(&*own).addr(), 1), "private memory");
    }
}
