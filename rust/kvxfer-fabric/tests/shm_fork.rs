//! A fork leaves the parent's fabric as it was, and gives the child none of its mappings. Alone in its file: the
//! process has no other test's threads.
#![allow(clippy::unwrap_used)]

use kvxfer_fabric::shm::{PoolOptions, ShmFabric, ShmOptions, ShmPool};
use kvxfer_fabric::{Backing, Completion, EndRole, EpId, Fabric, MemKind, Piece, RegionSpan};
use std::sync::Arc;

const LEN: u64 = 64 * 4096;

fn side(name: &str) -> (ShmFabric, Arc<ShmPool>) {
    let options = PoolOptions { name: name.to_owned(), prefault: true, ..PoolOptions::default() };
    let pool = ShmPool::alloc_with(LEN, &options).unwrap();
    let span = RegionSpan {
        addr: pool.addr(),
        len: LEN,
        kind: MemKind::Host,
        backing: Some(Arc::clone(&pool) as Arc<dyn Backing>),
    };
    (ShmFabric::new(vec![span], ShmOptions::default()).unwrap(), pool)
}

fn connect(reader: &mut ShmFabric, source: &mut ShmFabric, ep: u32) -> Vec<Completion> {
    let blob = source.describe().unwrap();
    reader.connect(EpId(ep), EndRole::Active, &blob, &[LEN]).unwrap();
    let mut events = Vec::new();
    for _ in 0..100 {
        source.progress(&mut Vec::new());
        reader.progress(&mut events);
    }
    events
}

fn byte(pool: &ShmPool) -> *mut u8 {
    std::ptr::with_exposed_provenance_mut(usize::try_from(pool.addr()).unwrap())
}

fn mapped() -> usize {
    std::fs::read_to_string("/proc/self/maps").unwrap().matches("memfd:kvxfer-fork").count()
}

#[test]
fn forking_harms_neither_side() {
    let (mut reader, dst) = side("kvxfer-fork-dst");
    let (mut source, src) = side("kvxfer-fork-src");
    let events = connect(&mut reader, &mut source, 1);
    assert!(matches!(events[..], [Completion::Connected { ep: EpId(1), .. }]), "{events:?}");
    assert_eq!(mapped(), 3, "two pools and the reader's view of one");
    // SAFETY: the child touches only its own copies and leaves by `_exit`.
    let child = unsafe { libc::fork() };
    if child == 0 {
        let none = mapped() == 0;
        drop((reader, source, dst, src));
        // SAFETY: ends the child without running the test harness's exit code.
        unsafe { libc::_exit(i32::from(!none)) };
    }
    let mut status = -1;
    // SAFETY: waits for the child just made; the pointer is to a live integer.
    assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
    assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0, "status {status:#x}");

    // The first endpoint still works, and so does all that a new one needs.
    // SAFETY: this process's own pool, which nobody reads at the moment.
    unsafe { byte(&src).write(77) };
    let piece = Piece { src_region: 0, src_off: 0, dst_region: 0, dst_off: 0, len: 4096 };
    reader.post(EpId(1), &[piece]).unwrap();
    // SAFETY: as above.
    assert_eq!(unsafe { byte(&dst).read() }, 77);
    let events = connect(&mut reader, &mut source, 2);
    assert!(matches!(events[..], [Completion::Connected { ep: EpId(2), .. }]), "{events:?}");
    reader.disconnect(EpId(1));
    reader.disconnect(EpId(2));
    assert_eq!(mapped(), 2);
}
