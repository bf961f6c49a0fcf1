//! Memory that can be shared by descriptor: a sealed memfd.

use super::{os_error, to_usize};
use crate::{Backing, FabricError};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, fcntl_get_seals, fstat, ftruncate, memfd_create};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, munmap};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;

/// The seals of a pool: nobody can shrink it under a reader (SIGBUS), and nobody but the owner, through the
/// mapping it made before sealing, can write it.
pub(crate) const SEALS: SealFlags =
    SealFlags::SHRINK.union(SealFlags::GROW).union(SealFlags::FUTURE_WRITE).union(SealFlags::SEAL);

/// A mapping of ours, undone when dropped.
#[derive(Debug)]
pub(crate) struct Mapping {
    addr: usize,
    len: usize,
    /// A forked child has no such mapping (DONTFORK), so it must not unmap what it may have there by then.
    owner: u32,
}

impl Mapping {
    /// Maps the first `len` bytes of a memfd.
    pub(crate) fn new(fd: BorrowedFd<'_>, len: usize, prot: ProtFlags) -> Result<Self, FabricError> {
        // SAFETY: the kernel chooses a free address, so no existing memory is replaced.
        let ptr = unsafe { mmap(std::ptr::null_mut(), len, prot, MapFlags::SHARED, fd, 0) }
            .map_err(|e| os_error("mmap", &format!("{len} bytes of a memfd: {e}")))?;
        let map = Self { addr: ptr.expose_provenance(), len, owner: std::process::id() };
        // SAFETY: advice on the mapping just made; DONTFORK changes nothing in this process.
        unsafe { madvise(ptr, len, Advice::LinuxDontFork) }
            .map_err(|e| os_error("madvise", &format!("MADV_DONTFORK: {e}")))?;
        Ok(map)
    }

    pub(crate) fn addr(&self) -> usize {
        self.addr
    }

    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// Has the system map these pages now, as reading them would; those of them that nobody has written are made.
    pub(crate) fn populate(&self, offset: u64, len: u64) -> Result<(), rustix::io::Errno> {
        let range = usize::try_from(offset).ok().zip(usize::try_from(len).ok());
        let (offset, len) = range
            .filter(|(offset, len)| offset.checked_add(*len).is_some_and(|end| end <= self.len))
            .ok_or(rustix::io::Errno::INVAL)?;
        let addr = std::ptr::with_exposed_provenance_mut(self.addr + offset);
        // SAFETY: a range of our own live mapping; the advice changes no contents.
        unsafe { madvise(addr, len, Advice::LinuxPopulateRead) }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        if self.owner == std::process::id() {
            // SAFETY: exactly the range that `new` mapped, in the process that mapped it; the owner of this
            // value hands out no reference that outlives it.
            let result = unsafe { munmap(std::ptr::with_exposed_provenance_mut(self.addr), self.len) };
            if let Err(error) = result {
                tracing::warn!(%error, addr = self.addr, len = self.len, "munmap failed");
            }
        }
    }
}

/// How to allocate a pool.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct PoolOptions {
    /// Name that `/proc/self/maps` and `/proc/self/fd` show; at most 200 bytes.
    pub name: String,
    /// Touch all pages now, so that the first hand-off pays no page faults.
    pub prefault: bool,
    /// Ask for transparent huge pages; the kernel may not grant it (`shmem_enabled`).
    pub transparent_huge: bool,
}

impl Default for PoolOptions {
    fn default() -> Self {
        Self { name: "kvxfer-pool".to_owned(), prefault: false, transparent_huge: false }
    }
}

/// Page-aligned memory in a sealed memfd, writable by this process only.
#[derive(Debug)]
pub struct ShmPool {
    map: Mapping,
    len: u64,
    file_len: u64,
    fd: OwnedFd,
}

impl ShmPool {
    /// Allocates `bytes` of zeroed memory.
    ///
    /// # Errors
    /// When `bytes` is zero, or the system has no memory, descriptor or sealing (Linux 5.1) for it.
    pub fn alloc(bytes: u64) -> Result<Arc<dyn Backing>, FabricError> {
        Ok(Self::alloc_with(bytes, &PoolOptions::default())?)
    }

    /// As [`ShmPool::alloc`], with options.
    ///
    /// # Errors
    /// As [`ShmPool::alloc`].
    pub fn alloc_with(bytes: u64, options: &PoolOptions) -> Result<Arc<Self>, FabricError> {
        let page = u64::try_from(rustix::param::page_size()).unwrap_or(4096);
        let file_len =
            bytes.checked_next_multiple_of(page).filter(|n| *n > 0 && i64::try_from(*n).is_ok()).ok_or_else(
                || os_error("memfd_create", &format!("a pool of {bytes} bytes is not possible")),
            )?;
        let fd = create(&options.name)?;
        ftruncate(&fd, file_len).map_err(|e| os_error("ftruncate", &format!("{file_len} bytes: {e}")))?;
        let len = to_usize(file_len, "pool length")?;
        let map = Mapping::new(fd.as_fd(), len, ProtFlags::READ | ProtFlags::WRITE)?;
        fcntl_add_seals(&fd, SEALS).map_err(|e| {
            os_error("F_ADD_SEALS", &format!("{e}; the shm fabric's pools need Linux 5.1 or newer"))
        })?;
        let pool = Self { map, len: bytes, file_len, fd };
        if options.transparent_huge {
            pool.advise(Advice::LinuxHugepage, "MADV_HUGEPAGE")?;
        }
        if options.prefault {
            pool.prefault()?;
        }
        Ok(Arc::new(pool))
    }

    /// The memfd, for handing to a peer. It cannot be shrunk, grown, or written through.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }

    /// Length of the file: the pool's length rounded up to whole pages.
    #[must_use]
    pub fn file_len(&self) -> u64 {
        self.file_len
    }

    fn advise(&self, advice: Advice, name: &'static str) -> Result<(), FabricError> {
        let len = to_usize(self.file_len, "pool length")?;
        // SAFETY: our own live mapping; neither advice used here changes its contents.
        unsafe { madvise(std::ptr::with_exposed_provenance_mut(self.map.addr()), len, advice) }
            .map_err(|e| os_error("madvise", &format!("{name} on {len} bytes: {e}")))
    }

    fn prefault(&self) -> Result<(), FabricError> {
        if self.advise(Advice::LinuxPopulateWrite, "MADV_POPULATE_WRITE").is_ok() {
            return Ok(());
        }
        // Linux before 5.14, or no memory: allocating the file's blocks tells the two apart.
        rustix::fs::fallocate(&self.fd, rustix::fs::FallocateFlags::empty(), 0, self.file_len)
            .map_err(|e| os_error("fallocate", &format!("{} bytes of pool: {e}", self.file_len)))
    }
}

impl Backing for ShmPool {
    fn addr(&self) -> u64 {
        self.map.addr() as u64
    }

    fn len(&self) -> u64 {
        self.len
    }

    fn as_any(&self) -> &dyn std::any::Any {
        self
    }
}

fn create(name: &str) -> Result<OwnedFd, FabricError> {
    let flags = MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING;
    // Kernels before 6.3 do not know NOEXEC_SEAL.
    memfd_create(name, flags | MemfdFlags::NOEXEC_SEAL)
        .or_else(|e| if e == rustix::io::Errno::INVAL { memfd_create(name, flags) } else { Err(e) })
        .map_err(|e| os_error("memfd_create", &format!("{name:?}: {e}")))
}

/// Maps a descriptor from a peer for reading, after checks that no later act of the peer can undo: a file that
/// can shrink, or is shorter than said, would kill the reader with SIGBUS.
pub(crate) fn map_peer(fd: BorrowedFd<'_>, need: u64) -> Result<Mapping, FabricError> {
    let bad = |why: String| FabricError::BadBlob { what: "memory descriptor", why };
    let seals = fcntl_get_seals(fd).map_err(|e| bad(format!("it has no seals ({e}); not a memfd?")))?;
    if !seals.contains(SEALS) {
        return Err(bad(format!("its seals are {seals:?}, but {SEALS:?} are needed")));
    }
    // Huge-page files can fail a read fault for want of a page, which is a SIGBUS too.
    let fs = rustix::fs::fstatfs(fd).map_err(|e| os_error("fstatfs", &e.to_string()))?;
    if i128::from(fs.f_type) == i128::from(libc::HUGETLBFS_MAGIC) {
        return Err(bad("it is made of reserved huge pages, which a reader cannot map safely".to_owned()));
    }
    let stat = fstat(fd).map_err(|e| os_error("fstat", &e.to_string()))?;
    let size = u64::try_from(stat.st_size).unwrap_or(0);
    if size < need {
        return Err(bad(format!("it has {size} bytes, but the peer's table needs {need}")));
    }
    Mapping::new(fd, to_usize(need, "region length")?, ProtFlags::READ)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::slice;

    #[test]
    fn aligned_zeroed_sealed_and_named() {
        let pool = ShmPool::alloc_with(
            5000,
            &PoolOptions { name: "kvxfer-test-abc".into(), prefault: true, transparent_huge: true },
        )
        .unwrap();
        assert_eq!(pool.len(), 5000);
        assert_eq!(pool.file_len(), 8192);
        assert_eq!(pool.addr() % 4096, 0);
        // SAFETY: the pool's own bytes, not written meanwhile.
        let bytes =
            unsafe { slice::from_raw_parts(std::ptr::with_exposed_provenance::<u8>(pool.map.addr()), 5000) };
        assert!(bytes.iter().all(|b| *b == 0));
        assert!(fcntl_get_seals(pool.fd()).unwrap().contains(SEALS));
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        assert!(maps.contains("/memfd:kvxfer-test-abc"), "{maps}");
    }

    #[test]
    fn nobody_else_can_write_shrink_or_grow() {
        let pool = ShmPool::alloc_with(8192, &PoolOptions::default()).unwrap();
        assert!(rustix::io::write(pool.fd(), b"x").is_err());
        assert!(ftruncate(pool.fd(), 4096).is_err());
        assert!(ftruncate(pool.fd(), 16384).is_err());
        assert!(Mapping::new(pool.fd(), 8192, ProtFlags::READ | ProtFlags::WRITE).is_err());
        let map = map_peer(pool.fd(), 8192).unwrap();
        // SAFETY: only asks for other rights on a mapping of this test.
        let made_writable = unsafe {
            rustix::mm::mprotect(
                std::ptr::with_exposed_provenance_mut(map.addr()),
                8192,
                rustix::mm::MprotectFlags::READ | rustix::mm::MprotectFlags::WRITE,
            )
        };
        assert!(made_writable.is_err(), "a read-only mapping can be made writable");
    }

    #[test]
    fn bad_sizes() {
        for bytes in [0, u64::MAX, 1 << 63] {
            assert!(matches!(ShmPool::alloc(bytes), Err(FabricError::Os { .. })), "{bytes}");
        }
    }

    #[test]
    fn peers_that_could_sigbus_us_are_refused() {
        let bad = |fd: BorrowedFd<'_>, need| match map_peer(fd, need) {
            Err(FabricError::BadBlob { why, .. }) => why,
            other => panic!("{other:?}"),
        };
        let unsealed = create("x").unwrap();
        ftruncate(&unsealed, 8192).unwrap();
        assert!(bad(unsealed.as_fd(), 8192).contains("seals"));
        fcntl_add_seals(&unsealed, SealFlags::SHRINK).unwrap();
        assert!(bad(unsealed.as_fd(), 8192).contains("seals"));
        fcntl_add_seals(&unsealed, SEALS).unwrap();
        assert!(bad(unsealed.as_fd(), 8193).contains("8193"));
        assert!(map_peer(unsealed.as_fd(), 8192).is_ok());
        let file = tempfile::tempfile().unwrap();
        file.set_len(8192).unwrap();
        assert!(bad(file.as_fd(), 8192).contains("seals"));
    }
}
