//! Mapping a peer's pages before the first hand-off has to.
//!
//! The first write of a page through a mapping is a page fault, and costs several times what copying the page does. So the
//! sender's thread goes through what UCX has mapped of the peer's memory, a step each time it is about to sleep. Only pages that
//! are there: those that nobody has written would have to be made, and the peer may never use them.

use crate::EpId;
use rustix::io::Errno;
use rustix::mm::{Advice, madvise};
use std::collections::{BTreeMap, VecDeque};
use std::ptr;

/// Pages of a step: some 30 microseconds.
const STEP_PAGES: usize = 64;
/// Bytes of one peer's memory that are gone through, which takes half a second of a core in all: of a larger pool a hand-off may
/// meet the rest.
const MOST: u64 = 4 << 30;

/// A mapping to go through.
#[derive(Debug)]
struct Job {
    ep: EpId,
    /// The first page, and behind the last.
    at: usize,
    end: usize,
}

/// What is still to be mapped.
#[derive(Debug, Default)]
pub(super) struct Warmer {
    jobs: VecDeque<Job>,
    /// Bytes of each endpoint's that were added.
    added: BTreeMap<EpId, u64>,
    page: usize,
}

impl Warmer {
    /// Memory that stays mapped until [`Warmer::forget`].
    pub(super) fn add(&mut self, ep: EpId, addr: usize, len: u64) {
        self.page = rustix::param::page_size();
        let added = self.added.entry(ep).or_default();
        let len = len.min(MOST.saturating_sub(*added));
        *added = added.saturating_add(len);
        if len == 0 {
            return;
        }
        let end = usize::try_from(len).ok().and_then(|len| addr.checked_add(len)).unwrap_or(addr);
        self.jobs.push_back(Job { ep, at: addr / self.page * self.page, end });
    }

    /// The endpoint is closed, and its mappings go.
    pub(super) fn forget(&mut self, ep: EpId) {
        self.jobs.retain(|job| job.ep != ep);
        self.added.remove(&ep);
    }

    /// Maps a few pages more. Returns whether there were any.
    pub(super) fn step(&mut self) -> bool {
        let page = self.page;
        let Some(job) = self.jobs.front_mut() else { return false };
        let pages = job.end.saturating_sub(job.at).div_ceil(page).min(STEP_PAGES);
        if let Err(error) = populate(job.at, pages, page) {
            // Linux before 5.14 cannot do it. The first hand-off pays then, as it would without this.
            tracing::debug!(%error, "a peer's pages are not mapped beforehand");
            job.at = job.end;
        }
        job.at = job.at.saturating_add(pages * page);
        if job.at >= job.end {
            self.jobs.pop_front();
        }
        true
    }
}

/// Maps those of these pages that are there for writing.
fn populate(at: usize, pages: usize, page: usize) -> Result<(), Errno> {
    let mut there = [0u8; STEP_PAGES];
    // SAFETY: asks about pages of a mapping that its owner keeps (`Warmer::add`), touches none of them, and writes a byte for
    // each, of which there are `STEP_PAGES` at most.
    let asked =
        unsafe { libc::mincore(ptr::with_exposed_provenance_mut(at), pages * page, there.as_mut_ptr()) };
    if asked != 0 {
        return Err(Errno::from_io_error(&std::io::Error::last_os_error()).unwrap_or(Errno::IO));
    }
    let mut first = 0;
    while first < pages {
        let run = there[first..pages].iter().take_while(|p| **p & 1 == 1).count();
        if run > 0 {
            let from = ptr::with_exposed_provenance_mut(at + first * page);
            // SAFETY: whole pages of that mapping; the advice changes no contents.
            unsafe { madvise(from, run * page, Advice::LinuxPopulateWrite)? };
        }
        first += run.max(1);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use rustix::fs::{MemfdFlags, ftruncate, memfd_create};
    use rustix::mm::{MapFlags, ProtFlags, mmap};
    use std::os::fd::OwnedFd;

    const EP: EpId = EpId(7);

    /// Shared memory, as UCX allocates it.
    fn memory(bytes: u64) -> OwnedFd {
        let fd = memfd_create("kvxfer-test", MemfdFlags::CLOEXEC).unwrap();
        ftruncate(&fd, bytes).unwrap();
        fd
    }

    /// A mapping of it; the second one is as the peer's.
    fn map(fd: &OwnedFd, len: usize) -> usize {
        let rights = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping, at no address of our choice.
        unsafe { mmap(ptr::null_mut(), len, rights, MapFlags::SHARED, fd, 0) }.unwrap().expose_provenance()
    }

    /// Bytes of a range that this process has mapped page by page, by `/proc/self/smaps`.
    fn mapped(addr: usize) -> u64 {
        let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let mut lines = smaps.lines().skip_while(|l| !l.starts_with(&format!("{addr:x}-")));
        let rss = lines.find(|l| l.starts_with("Rss:")).unwrap();
        rss.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() << 10
    }

    #[test]
    fn pages_that_were_written_are_mapped_and_no_others_are_made() {
        const LEN: usize = 8 << 20;
        let fd = memory(LEN as u64);
        let (theirs, ours) = (map(&fd, LEN), map(&fd, LEN));
        let write = |at: usize, len: usize| {
            // SAFETY: the mapping's own bytes, used by nobody else.
            unsafe { ptr::write_bytes(ptr::with_exposed_provenance_mut::<u8>(theirs + at), 1, len) };
        };
        write(1 << 20, 1 << 20);
        write(5 << 20, 300 << 10);
        let held = || rustix::fs::fstat(&fd).unwrap().st_blocks * 512;
        let before = held();
        let mut warmer = Warmer::default();
        warmer.add(EP, ours, LEN as u64);
        let mut steps = 0;
        while warmer.step() {
            steps += 1;
        }
        assert_eq!(steps, LEN / (STEP_PAGES * rustix::param::page_size()), "no step may take long");
        assert_eq!(held(), before, "pages were made that nobody had written");
        assert_eq!(mapped(ours), (1 << 20) + (300 << 10));
        // SAFETY: the same bytes by way of the other mapping: warming has changed none.
        let byte = |at: usize| unsafe { ptr::with_exposed_provenance::<u8>(ours + at).read() };
        assert_eq!((byte(1 << 20), byte(0)), (1, 0));
    }

    #[test]
    fn a_closed_endpoint_is_forgotten() {
        let fd = memory(1 << 20);
        let map = map(&fd, 1 << 20);
        let mut warmer = Warmer::default();
        warmer.add(EP, map, 1 << 20);
        warmer.add(EpId(8), map, 4096);
        warmer.forget(EP);
        assert!(warmer.step() && !warmer.step(), "the other's one page");
    }

    #[test]
    fn no_more_than_a_few_gigabytes_of_a_peer_are_gone_through() {
        let mut warmer = Warmer::default();
        let page = rustix::param::page_size();
        let bytes = |w: &Warmer| w.jobs.iter().map(|j| (j.end - j.at) as u64).sum::<u64>();
        warmer.add(EP, page, MOST - 1);
        warmer.add(EP, page, 1 << 40);
        warmer.add(EP, page, 1 << 40);
        assert_eq!((warmer.jobs.len(), bytes(&warmer)), (2, MOST));
        warmer.add(EpId(8), page, 1 << 40);
        assert_eq!(bytes(&warmer), 2 * MOST, "another peer's are its own");
        warmer.forget(EP);
        warmer.add(EP, page, 1 << 40);
        assert_eq!(bytes(&warmer), 2 * MOST, "and so are a new endpoint's");
    }

    #[test]
    fn memory_that_is_not_there_is_given_up() {
        let mut warmer = Warmer::default();
        warmer.add(EP, rustix::param::page_size(), 1 << 30);
        assert!(warmer.step() && !warmer.step());
    }
}
