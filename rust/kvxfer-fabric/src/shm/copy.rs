//! The copying itself. Everything is checked before the first byte moves.

use super::{host, os_error, to_usize};
use crate::{FabricError, Piece, stream};

/// Pieces in one call of `process_vm_readv`: the kernel's `IOV_MAX`.
const IOV_MAX: usize = 1024;

/// A region of ours.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LocalRegion {
    pub(crate) addr: u64,
    pub(crate) len: u64,
}

/// Where this process finds a peer's region.
#[derive(Clone, Copy, Debug)]
pub(crate) enum RemotePlace {
    /// Mapped here, read-only.
    Mapped { addr: usize },
    /// In the peer's address space.
    Process { addr: u64 },
}

/// A region of a peer's.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RemoteRegion {
    pub(crate) len: u64,
    pub(crate) place: RemotePlace,
}

/// Checks that `len` bytes at `off` lie in a region of `region_len` bytes, if there is one.
pub(crate) fn check_bounds(
    side: &'static str,
    region: u32,
    region_len: Option<u64>,
    off: u64,
    len: u64,
) -> Result<(), FabricError> {
    match (region_len, off.checked_add(len)) {
        (Some(size), Some(end)) if end <= size => Ok(()),
        _ => Err(FabricError::OutOfBounds {
            side,
            region,
            offset: off,
            len,
            region_len: region_len.unwrap_or(0),
        }),
    }
}

/// The kernel's `struct iovec` with its address as a number, so that it may move between threads.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct Iov {
    base: usize,
    len: usize,
}

const _: () = assert!(
    size_of::<Iov>() == size_of::<libc::iovec>()
        && align_of::<Iov>() == align_of::<libc::iovec>()
        && std::mem::offset_of!(Iov, len) == std::mem::offset_of!(libc::iovec, iov_len)
);

/// Copies pieces, and keeps the arrays that it needs for it.
#[derive(Debug)]
pub(crate) struct Copier {
    local: Vec<Iov>,
    remote: Vec<Iov>,
    calls: u64,
}

impl Copier {
    pub(crate) fn new() -> Self {
        Self { local: Vec::with_capacity(IOV_MAX), remote: Vec::with_capacity(IOV_MAX), calls: 0 }
    }

    /// Calls of `process_vm_readv` so far.
    pub(crate) fn calls(&self) -> u64 {
        self.calls
    }

    /// Checks all pieces, then copies them from the peer's regions into ours. Returns whether the peer's address
    /// space was read.
    pub(crate) fn copy(
        &mut self,
        local: &[LocalRegion],
        remote: &[RemoteRegion],
        pid: u32,
        batch: &[Piece],
    ) -> Result<bool, FabricError> {
        for p in batch {
            let ours = region(local, p.dst_region);
            check_bounds("local", p.dst_region, ours.map(|r| r.len), p.dst_off, p.len)?;
            let theirs = region(remote, p.src_region);
            check_bounds("remote", p.src_region, theirs.map(|r| r.len), p.src_off, p.len)?;
        }
        self.local.clear();
        self.remote.clear();
        let mut used_process = false;
        for p in batch {
            let (Some(ours), Some(theirs)) = (region(local, p.dst_region), region(remote, p.src_region))
            else {
                continue;
            };
            let len = to_usize(p.len, "piece length")?;
            if len == 0 {
                continue;
            }
            let dst = to_usize(ours.addr, "region address")? + to_usize(p.dst_off, "offset")?;
            let src_off = to_usize(p.src_off, "offset")?;
            match theirs.place {
                // SAFETY: the piece lies in the peer's mapping, which is mapped for as long as its endpoint is
                // open and cannot shrink (seals), and in our region, which its owner keeps valid for the life
                // of the fabric. The mapping is the fabric's own and never registered as a region, so the two do
                // not overlap. The peer may write its bytes meanwhile; they are only moved, never interpreted,
                // and the hand-off protocol discards what was pushed and then taken back.
                RemotePlace::Mapped { addr } => unsafe {
                    stream::copy(
                        std::ptr::with_exposed_provenance::<u8>(addr + src_off),
                        std::ptr::with_exposed_provenance_mut::<u8>(dst),
                        len,
                    );
                },
                RemotePlace::Process { addr } => {
                    used_process = true;
                    self.local.push(Iov { base: dst, len });
                    self.remote.push(Iov { base: to_usize(addr, "peer address")? + src_off, len });
                    if self.local.len() == IOV_MAX {
                        // The call may fail, and then this ends here.
                        stream::fence();
                        self.read(pid)?;
                    }
                }
            }
        }
        // Before anybody is told.
        stream::fence();
        self.read(pid)?;
        Ok(used_process)
    }

    /// Reads what is queued, in as many calls as the kernel wants.
    fn read(&mut self, pid: u32) -> Result<(), FabricError> {
        let mut done = 0;
        while done < self.local.len() {
            let (local, remote) = (&self.local[done..], &self.remote[done..]);
            self.calls += 1;
            let mut got = vm_readv(pid, local, remote)?;
            // A call may stop anywhere: skip what came, and shorten the piece that it stopped in.
            while let Some(iov) = self.local.get_mut(done) {
                if got < iov.len {
                    iov.base += got;
                    iov.len -= got;
                    if let Some(r) = self.remote.get_mut(done) {
                        r.base += got;
                        r.len -= got;
                    }
                    break;
                }
                got -= iov.len;
                done += 1;
            }
        }
        self.local.clear();
        self.remote.clear();
        Ok(())
    }

    /// Reads the first byte of each of these addresses of the peer, to learn whether it may be read at all.
    pub(crate) fn probe(&mut self, pid: u32, addrs: impl Iterator<Item = u64>) -> Result<(), FabricError> {
        let mut sink = [0u8; IOV_MAX];
        let base = sink.as_mut_ptr().expose_provenance();
        self.local.clear();
        self.remote.clear();
        for addr in addrs {
            self.local.push(Iov { base: base + self.local.len(), len: 1 });
            self.remote.push(Iov { base: to_usize(addr, "peer address")?, len: 1 });
            if self.local.len() == IOV_MAX {
                self.read(pid)?;
            }
        }
        self.read(pid)
    }
}

fn region<T: Copy>(regions: &[T], index: u32) -> Option<T> {
    regions.get(usize::try_from(index).ok()?).copied()
}

/// One call. Never `Ok(0)`.
fn vm_readv(pid: u32, local: &[Iov], remote: &[Iov]) -> Result<usize, FabricError> {
    let (Ok(raw_pid), Ok(n_local), Ok(n_remote)) = (
        libc::pid_t::try_from(pid),
        libc::c_ulong::try_from(local.len()),
        libc::c_ulong::try_from(remote.len()),
    ) else {
        return Err(os_error("process_vm_readv", "an argument is too large"));
    };
    // SAFETY: `Iov` has the layout of `iovec` (asserted above) and both arrays live through the call. The kernel
    // writes only to the local ranges, which the caller has checked to lie in our own regions; a bad remote
    // range gives EFAULT.
    let got = unsafe {
        libc::process_vm_readv(
            raw_pid,
            local.as_ptr().cast::<libc::iovec>(),
            n_local,
            remote.as_ptr().cast::<libc::iovec>(),
            n_remote,
            0,
        )
    };
    match usize::try_from(got) {
        Ok(0) => Err(os_error("process_vm_readv", &format!("nothing could be read from process {pid}"))),
        Ok(n) => Ok(n),
        Err(_) => Err(readv_error(pid, &std::io::Error::last_os_error(), host::ptrace_scope())),
    }
}

fn readv_error(pid: u32, error: &std::io::Error, scope: Option<u8>) -> FabricError {
    let why = match error.raw_os_error() {
        Some(libc::EPERM) => {
            let scope = scope.map_or_else(|| "not present".to_owned(), |s| s.to_string());
            format!(
                "this process may not read the memory of process {pid} (EPERM). Causes: Yama's \
                 kernel.yama.ptrace_scope (here {scope}; 2 and 3 forbid it, 1 needs the peer's leave), a container \
                 without CAP_SYS_PTRACE or with a seccomp filter, or another user. Allocate with kvxfer.alloc, \
                 or use the ucx fabric over TCP (UCX_TLS=tcp)"
            )
        }
        Some(libc::ESRCH) => format!("process {pid} has ended (ESRCH)"),
        Some(libc::EFAULT) => format!("process {pid} has freed memory that it registered (EFAULT)"),
        Some(libc::ENOSYS) => {
            "this kernel or container does not have it (ENOSYS); allocate with kvxfer.alloc, or \
                               use the ucx fabric over TCP"
                .to_owned()
        }
        _ => format!("reading from process {pid}: {error}"),
    };
    FabricError::Os { call: "process_vm_readv", why }
}

#[cfg(test)]
#[allow(clippy::cast_possible_truncation)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn me() -> u32 {
        std::process::id()
    }

    fn addr(v: &mut [u8]) -> u64 {
        v.as_mut_ptr().expose_provenance() as u64
    }

    proptest! {
        #[test]
        fn bounds(len in any::<u64>(), off in any::<u64>(), n in any::<u64>()) {
            let inside = u128::from(off) + u128::from(n) <= u128::from(len);
            prop_assert_eq!(check_bounds("local", 1, Some(len), off, n).is_ok(), inside);
            prop_assert!(check_bounds("local", 1, None, off, n).is_err());
        }

        #[test]
        fn reads_land_where_they_should(pieces in proptest::collection::vec((0u64..4000, 0u64..97), 0..1500)) {
            let mut src: Vec<u8> = (0..4096u32).map(|i| (i * 7 % 251) as u8).collect();
            let expect_src = src.clone();
            let total: u64 = pieces.iter().map(|p| p.1).sum();
            let mut dst = vec![0xEEu8; usize::try_from(total).unwrap() + 1];
            let local = [LocalRegion { addr: addr(&mut dst), len: total }];
            let remote = [RemoteRegion { len: 4096, place: RemotePlace::Process { addr: addr(&mut src) } }];
            let mut at = 0;
            let mut want = Vec::new();
            let batch: Vec<Piece> = pieces
                .iter()
                .filter(|(off, n)| off + n <= 4096)
                .map(|&(off, n)| {
                    let p = Piece { src_region: 0, src_off: off, dst_region: 0, dst_off: at, len: n };
                    at += n;
                    want.extend_from_slice(&expect_src[off as usize..(off + n) as usize]);
                    p
                })
                .collect();
            let mut copier = Copier::new();
            copier.copy(&local, &remote, me(), &batch).unwrap();
            prop_assert_eq!(&dst[..want.len()], &want[..]);
            prop_assert!(dst[want.len()..].iter().all(|b| *b == 0xEE));
            let nonempty = batch.iter().filter(|p| p.len > 0).count();
            prop_assert_eq!(copier.calls(), nonempty.div_ceil(IOV_MAX) as u64);
        }
    }

    #[test]
    fn one_bad_piece_stops_all() {
        let mut src = vec![1u8; 64];
        let mut dst = vec![0u8; 64];
        let local = [LocalRegion { addr: addr(&mut dst), len: 64 }];
        let remote = [RemoteRegion { len: 64, place: RemotePlace::Process { addr: addr(&mut src) } }];
        let good = Piece { src_region: 0, src_off: 0, dst_region: 0, dst_off: 0, len: 8 };
        for bad in [
            Piece { len: 65, ..good },
            Piece { src_off: 60, ..good },
            Piece { dst_off: u64::MAX, ..good },
            Piece { src_region: 1, ..good },
            Piece { dst_region: u32::MAX, ..good },
        ] {
            let error = Copier::new().copy(&local, &remote, me(), &[good, bad]).unwrap_err();
            assert!(matches!(error, FabricError::OutOfBounds { .. }), "{error}");
            assert!(dst.iter().all(|b| *b == 0), "copied before the check");
        }
    }

    #[test]
    fn freed_memory_is_an_error() {
        let mut dst = vec![0u8; 64];
        let local = [LocalRegion { addr: addr(&mut dst), len: 64 }];
        let remote = [RemoteRegion { len: 64, place: RemotePlace::Process { addr: 4096 } }];
        let piece = Piece { src_region: 0, src_off: 0, dst_region: 0, dst_off: 0, len: 8 };
        let error = Copier::new().copy(&local, &remote, me(), &[piece]).unwrap_err().to_string();
        assert!(error.contains("EFAULT"), "{error}");
        let gone = Copier::new().copy(&local, &remote, 0x7fff_fff0, &[piece]).unwrap_err().to_string();
        assert!(gone.contains("ESRCH"), "{gone}");
    }

    #[test]
    fn ptrace_rules_name_the_way_out() {
        let text = readv_error(9, &std::io::Error::from_raw_os_error(libc::EPERM), Some(2)).to_string();
        for word in ["ptrace_scope (here 2", "container", "UCX_TLS=tcp", "kvxfer.alloc"] {
            assert!(text.contains(word), "{word} is not in {text}");
        }
    }
}
