//! Looking at a peer's pages before the first hand-off has to.
//!
//! The first read of a page through a mapping is a page fault, and costs about half of what copying the page does. So the
//! reader's thread goes through the mapping once it is attached, a step each time it is about to sleep. Only pages that
//! the peer has written by then: to look at one that nobody has touched would have the system allocate it.
//!
//! Where pages are is asked page by page. To ask for the end of what is there (`SEEK_HOLE`) would be one call, but one that
//! goes through all pages up to it: a second for 64 GiB.

use super::pool::Mapping;
use rustix::fs::{SeekFrom, seek};
use rustix::io::Errno;
use std::collections::VecDeque;
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// Bytes of a step: some 30 microseconds, as long as a slice takes to copy.
const STEP: u64 = 256 << 10;
/// Mappings that wait at most: each keeps a descriptor open. One more stays as it is, and its first hand-off pays.
const JOBS: usize = 64;

/// A mapping to go through.
#[derive(Debug)]
struct Job {
    ep: u32,
    map: Arc<Mapping>,
    /// The memory's descriptor, to ask where its pages are.
    fd: OwnedFd,
    len: u64,
    at: u64,
}

/// What is still to be looked at.
#[derive(Debug, Default)]
pub(crate) struct Warmer {
    jobs: VecDeque<Job>,
}

impl Warmer {
    pub(crate) fn add(&mut self, ep: u32, map: Arc<Mapping>, fd: OwnedFd) {
        if self.jobs.len() < JOBS {
            let len = map.len() as u64;
            self.jobs.push_back(Job { ep, map, fd, len, at: 0 });
        }
    }

    /// The endpoint is closed, and its mappings go.
    pub(crate) fn forget(&mut self, ep: u32) {
        self.jobs.retain(|job| job.ep != ep);
    }

    #[cfg(test)]
    fn is_done(&self) -> bool {
        self.jobs.is_empty()
    }

    /// Looks at a few pages more. Returns whether there were any.
    pub(crate) fn step(&mut self) -> bool {
        let Some(job) = self.jobs.front_mut() else { return false };
        match job.step() {
            Ok(true) => {}
            Ok(false) => {
                self.jobs.pop_front();
            }
            Err(error) => {
                // Linux before 5.14 cannot do it. The first hand-off pays then, as it would without this.
                tracing::debug!(%error, "a peer's pages are not looked at beforehand");
                self.jobs.pop_front();
            }
        }
        true
    }
}

impl Job {
    /// Returns whether something is left.
    fn step(&mut self) -> Result<bool, Errno> {
        let Some(at) = self.next_page(self.at)? else { return Ok(false) };
        let end = at.saturating_add(STEP).min(self.len);
        let page = rustix::param::page_size() as u64;
        let mut run = at.saturating_add(page);
        while run < end && self.next_page(run)? == Some(run) {
            run = run.saturating_add(page);
        }
        let run = run.min(end);
        self.map.populate(at, run - at)?;
        self.at = run;
        Ok(run < self.len)
    }

    /// The first page from here on that is there.
    fn next_page(&self, from: u64) -> Result<Option<u64>, Errno> {
        // The file's position is of no use to anybody else.
        match seek(&self.fd, SeekFrom::Data(from)) {
            Ok(at) => Ok((at < self.len).then_some(at)),
            // Only holes are left.
            Err(Errno::NXIO) => Ok(None),
            Err(e) => Err(e),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::pool::{PoolOptions, ShmPool, map_peer};
    use super::*;
    use crate::Backing as _;

    /// Bytes of a range that this process has mapped page by page, by `/proc/self/smaps`.
    fn mapped(addr: usize) -> u64 {
        let smaps = std::fs::read_to_string("/proc/self/smaps").unwrap();
        let mut lines = smaps.lines().skip_while(|l| !l.starts_with(&format!("{addr:x}-")));
        let rss = lines.find(|l| l.starts_with("Rss:")).unwrap();
        rss.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() << 10
    }

    #[test]
    fn pages_that_were_written_are_mapped_and_no_others_are_made() {
        let pool = ShmPool::alloc_with(8 << 20, &PoolOptions::default()).unwrap();
        let write = |at: u64, len: usize| {
            // SAFETY: the pool's own bytes, used by nobody else.
            unsafe {
                std::ptr::write_bytes(
                    std::ptr::with_exposed_provenance_mut::<u8>(usize::try_from(pool.addr() + at).unwrap()),
                    1,
                    len,
                );
            }
        };
        write(1 << 20, 1 << 20);
        write(5 << 20, 300 << 10);
        let map = Arc::new(map_peer(pool.fd(), 8 << 20).unwrap());
        let held = || rustix::fs::fstat(pool.fd()).unwrap().st_blocks * 512;
        let before = held();
        let mut warmer = Warmer::default();
        warmer.add(3, Arc::clone(&map), pool.fd().try_clone_to_owned().unwrap());
        let mut steps = 0;
        while warmer.step() {
            steps += 1;
        }
        assert!(warmer.is_done());
        assert!(steps >= 6, "{steps} steps: no step may take long");
        assert_eq!(held(), before, "pages were made that nobody had written");
        assert_eq!(mapped(map.addr()), (1 << 20) + (300 << 10));
    }

    #[test]
    fn memory_that_nobody_has_written_is_left_alone() {
        let pool = ShmPool::alloc_with(4 << 20, &PoolOptions::default()).unwrap();
        let map = Arc::new(map_peer(pool.fd(), 4 << 20).unwrap());
        let mut warmer = Warmer::default();
        warmer.add(1, Arc::clone(&map), pool.fd().try_clone_to_owned().unwrap());
        while warmer.step() {}
        assert_eq!(rustix::fs::fstat(pool.fd()).unwrap().st_blocks, 0);
        assert_eq!(mapped(map.addr()), 0);
    }

    #[test]
    fn a_step_takes_no_longer_where_more_is_there() {
        let pool = ShmPool::alloc_with(1 << 20, &PoolOptions::default()).unwrap();
        // SAFETY: the pool's own bytes, used by nobody else.
        unsafe {
            std::ptr::write_bytes(
                std::ptr::with_exposed_provenance_mut::<u8>(usize::try_from(pool.addr()).unwrap()),
                1,
                1 << 20,
            );
        }
        let map = Arc::new(map_peer(pool.fd(), 1 << 20).unwrap());
        let mut warmer = Warmer::default();
        warmer.add(1, Arc::clone(&map), pool.fd().try_clone_to_owned().unwrap());
        for steps in 1..=4 {
            assert!(warmer.step());
            // The kernel maps some neighbours of a page that is looked at.
            let there = mapped(map.addr());
            assert!(
                (steps * STEP..=(steps + 1) * STEP).contains(&there),
                "{there} bytes after {steps} steps"
            );
        }
        assert!(warmer.is_done());
    }

    #[test]
    fn so_many_mappings_wait_and_no_more_descriptors_are_kept() {
        let pool = ShmPool::alloc_with(4096, &PoolOptions::default()).unwrap();
        let map = Arc::new(map_peer(pool.fd(), 4096).unwrap());
        let mut warmer = Warmer::default();
        for ep in 0..80 {
            warmer.add(ep, Arc::clone(&map), pool.fd().try_clone_to_owned().unwrap());
        }
        assert_eq!(warmer.jobs.len(), JOBS);
    }

    #[test]
    fn a_closed_endpoint_is_forgotten() {
        let pool = ShmPool::alloc_with(4 << 20, &PoolOptions::default()).unwrap();
        let map = Arc::new(map_peer(pool.fd(), 4 << 20).unwrap());
        let mut warmer = Warmer::default();
        warmer.add(1, Arc::clone(&map), pool.fd().try_clone_to_owned().unwrap());
        warmer.forget(1);
        assert!(warmer.is_done() && !warmer.step());
        assert_eq!(Arc::strong_count(&map), 1);
    }
}
