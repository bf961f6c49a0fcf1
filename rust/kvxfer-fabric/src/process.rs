//! Peers on this host: who they are, and when they die.
//!
//! The death of a process is one of the three grounds for releasing pages. It is seen through a pidfd, which belongs to the
//! process for good; an id alone can be given to another one.

use crate::shm::{HostId, start_time, watch};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};

const MAGIC: [u8; 4] = *b"kxP2";
const BYTES: usize = 4 + 16 + 8 + 4 + 8 + 8;

/// What a peer on the same host needs to watch this process: boot, process-id namespace, id, start time, and the network
/// namespace. Empty if it cannot be found out.
#[must_use]
pub fn identity() -> Vec<u8> {
    let pid = std::process::id();
    let (Ok(host), Some(start)) = (HostId::of_this_process(), start_time(pid)) else { return Vec::new() };
    let mut out = Vec::with_capacity(BYTES);
    out.extend_from_slice(&MAGIC);
    out.extend_from_slice(&host.boot_id);
    out.extend_from_slice(&host.pid_ns.to_le_bytes());
    out.extend_from_slice(&pid.to_le_bytes());
    out.extend_from_slice(&start.to_le_bytes());
    out.extend_from_slice(&host.net_ns.to_le_bytes());
    out
}

/// A descriptor that becomes readable when the process ends.
#[derive(Debug)]
pub struct ProcessWatch {
    fd: OwnedFd,
    same_network: bool,
}

impl ProcessWatch {
    /// Watches the process that gave this identity, if it is another one of this host and alive.
    #[must_use]
    pub fn open(identity: &[u8]) -> Option<Self> {
        let (magic, rest) = identity.split_first_chunk::<4>()?;
        let (boot_id, rest) = rest.split_first_chunk::<16>()?;
        let (pid_ns, rest) = rest.split_first_chunk::<8>()?;
        let (pid, rest) = rest.split_first_chunk::<4>()?;
        let (start, rest) = rest.split_first_chunk::<8>()?;
        let (net_ns, rest) = rest.split_first_chunk::<8>()?;
        let here = HostId::of_this_process().ok()?;
        let same = *magic == MAGIC && *boot_id == here.boot_id && u64::from_le_bytes(*pid_ns) == here.pid_ns;
        let pid = u32::from_le_bytes(*pid);
        if !same || !rest.is_empty() || pid == std::process::id() {
            return None;
        }
        let same_network = u64::from_le_bytes(*net_ns) == here.net_ns;
        watch(pid, u64::from_le_bytes(*start)).ok().flatten().map(|fd| Self { fd, same_network })
    }

    /// Whether its connections to this process are the kernel's own loopback. Between network namespaces of one host there
    /// can be anything, also what holds bytes for as long as it likes.
    #[must_use]
    pub fn same_network(&self) -> bool {
        self.same_network
    }
}

impl AsFd for ProcessWatch {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::event::{PollFd, PollFlags, Timespec, poll};

    fn of(pid: u32, start: u64) -> Vec<u8> {
        let mut id = identity();
        id[28..32].copy_from_slice(&pid.to_le_bytes());
        id[32..40].copy_from_slice(&start.to_le_bytes());
        id
    }

    #[test]
    fn a_childs_death_is_seen_and_nobody_elses_is_taken_for_it() {
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let start = start_time(child.id()).unwrap();
        assert!(ProcessWatch::open(&of(child.id(), start + 1)).is_none(), "a recycled id");
        let mut elsewhere = of(child.id(), start);
        elsewhere[40] ^= 1;
        assert!(!ProcessWatch::open(&elsewhere).unwrap().same_network(), "another network namespace");
        let watch = ProcessWatch::open(&of(child.id(), start)).unwrap();
        assert!(watch.same_network());
        let readable = |secs| {
            let mut fds = [PollFd::from_borrowed_fd(watch.as_fd(), PollFlags::IN)];
            poll(&mut fds, Some(&Timespec { tv_sec: secs, tv_nsec: 0 })).unwrap() == 1
        };
        assert!(!readable(0));
        child.kill().unwrap();
        assert!(readable(10));
        child.wait().unwrap();
        assert!(ProcessWatch::open(&of(child.id(), start)).is_none());
    }

    #[test]
    fn what_is_no_identity_of_this_host_is_not_watched() {
        assert!(ProcessWatch::open(&identity()).is_none(), "this process itself");
        let other = of(1, start_time(1).unwrap_or(1));
        for cut in 0..other.len() {
            assert!(ProcessWatch::open(&other[..cut]).is_none());
        }
        let mut elsewhere = other;
        elsewhere[5] ^= 1;
        assert!(ProcessWatch::open(&elsewhere).is_none(), "another boot");
    }
}
