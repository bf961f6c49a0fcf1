//! Two fabrics in one process; `tests/shm_*.rs` has two processes.

use super::*;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::os::fd::BorrowedFd;
use std::time::{Duration, Instant};

const PAGE: u64 = 4096;

struct Node {
    fabric: ShmFabric,
    events: Vec<Completion>,
    /// Keeps the memory.
    _memory: Vec<Vec<u8>>,
    addrs: Vec<u64>,
    lens: Vec<u64>,
}

/// A node with one region of each length, in a pool or not, filled with `fill`.
fn node(lens: &[(u64, bool)], fill: u8, options: ShmOptions) -> Node {
    let mut memory = Vec::new();
    let mut spans = Vec::new();
    for &(len, pooled) in lens {
        let (addr, backing) = if pooled {
            let pool = ShmPool::alloc(len).unwrap();
            (pool.addr(), Some(pool))
        } else {
            memory.push(vec![0u8; usize::try_from(len).unwrap()]);
            (memory.last_mut().unwrap().as_mut_ptr().expose_provenance() as u64, None)
        };
        spans.push(RegionSpan { addr, len, kind: MemKind::Host, backing });
    }
    let addrs: Vec<u64> = spans.iter().map(|s| s.addr).collect();
    let mut n = Node {
        fabric: ShmFabric::new(spans, options).unwrap(),
        events: Vec::new(),
        _memory: memory,
        addrs,
        lens: lens.iter().map(|l| l.0).collect(),
    };
    for i in 0..lens.len() {
        n.bytes(i).fill(fill);
    }
    n
}

impl Node {
    fn bytes(&mut self, region: usize) -> &mut [u8] {
        // SAFETY: the node keeps the memory, and the borrow is exclusive.
        unsafe {
            std::slice::from_raw_parts_mut(
                std::ptr::with_exposed_provenance_mut(usize::try_from(self.addrs[region]).unwrap()),
                usize::try_from(self.lens[region]).unwrap(),
            )
        }
    }

    fn step(&mut self) {
        self.fabric.progress(&mut self.events);
    }
}

/// Drives all until `done`, sleeping on the descriptors in between.
fn drive(nodes: &mut [&mut Node], done: impl Fn(&[&mut Node]) -> bool) {
    let deadline = Instant::now() + Duration::from_secs(10);
    loop {
        for n in nodes.iter_mut() {
            n.step();
        }
        if done(nodes) {
            return;
        }
        assert!(
            Instant::now() < deadline,
            "stuck: {:?}",
            nodes.iter().map(|n| n.events.clone()).collect::<Vec<_>>()
        );
        if nodes.iter_mut().all(|n| n.fabric.arm()) {
            let mut fds: Vec<PollFd<'_>> = nodes
                .iter()
                .map(|n| PollFd::from_borrowed_fd(n.fabric.event_fd().unwrap(), PollFlags::IN))
                .collect();
            poll(&mut fds, Some(&Timespec { tv_sec: 5, tv_nsec: 0 })).unwrap();
        }
    }
}

fn connected(n: &Node, ep: u32) -> bool {
    n.events.iter().any(|c| matches!(c, Completion::Connected { ep: e, .. } if e.0 == ep))
}

fn failure(n: &Node, ep: u32) -> Option<String> {
    n.events.iter().find_map(|c| match c {
        Completion::ConnectFailed { ep: e, error } if e.0 == ep => Some(error.to_string()),
        _ => None,
    })
}

fn broken(n: &Node, ep: u32) -> bool {
    n.events.iter().any(|c| matches!(c, Completion::Broken { ep: e, .. } if e.0 == ep))
}

/// Connects reader endpoint 1 to source endpoint 9.
fn connect(reader: &mut Node, source: &mut Node) {
    let (sb, rb) = (source.fabric.describe().unwrap(), reader.fabric.describe().unwrap());
    assert!(reader.fabric.reaches(&sb) && source.fabric.reaches(&rb));
    let lens = source.lens.clone();
    reader.fabric.connect(EpId(1), EndRole::Active, &sb, &lens).unwrap();
    let lens = reader.lens.clone();
    source.fabric.connect(EpId(9), EndRole::Passive, &rb, &lens).unwrap();
    drive(&mut [reader, source], |n| connected(n[0], 1) && connected(n[1], 9));
}

fn piece(src: (u32, u64), dst: (u32, u64), len: u64) -> Piece {
    Piece { src_region: src.0, src_off: src.1, dst_region: dst.0, dst_off: dst.1, len }
}

fn fd_count() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

fn pair() -> (Node, Node) {
    let source = node(&[(8 * PAGE, true), (8 * PAGE, false)], 7, ShmOptions::default());
    let reader = node(&[(16 * PAGE, true)], 0, ShmOptions::default());
    (reader, source)
}

#[test]
fn pool_and_engine_memory_arrive() {
    let (mut reader, mut source) = pair();
    connect(&mut reader, &mut source);
    for r in 0..2 {
        for (i, b) in source.bytes(r).iter_mut().enumerate() {
            *b = ((i * 31 + r * 7) % 251) as u8;
        }
    }
    let batch: Vec<Piece> = (0..16u64)
        .map(|i| piece(((i % 2) as u32, (7 - i / 2) * PAGE + 1), (0, i * PAGE), PAGE - 1))
        .filter(|p| p.src_off + p.len <= 8 * PAGE)
        .collect();
    reader.fabric.post(EpId(1), &batch).unwrap();
    reader.fabric.flush(EpId(1), 77).unwrap();
    reader.events.clear();
    reader.step();
    assert!(
        matches!(reader.events[..], [Completion::Flushed { ep: EpId(1), ticket: 77, result: Ok(()) }]),
        "{:?}",
        reader.events
    );
    let want: Vec<Vec<u8>> = (0..2).map(|r| source.bytes(r).to_vec()).collect();
    let got = reader.bytes(0);
    for p in &batch {
        let (s, d, n) = (p.src_off as usize, p.dst_off as usize, p.len as usize);
        assert_eq!(got[d..d + n], want[p.src_region as usize][s..s + n]);
        assert_eq!(got[d + n], 0, "canary");
    }
    assert_eq!(reader.fabric.data_syscalls(), 2, "one probe and one copy");
}

#[test]
fn out_of_bounds_copies_nothing() {
    let (mut reader, mut source) = pair();
    connect(&mut reader, &mut source);
    let good = piece((0, 0), (0, 0), PAGE);
    for bad in [
        piece((0, 8 * PAGE - 1), (0, 0), 2),
        piece((1, u64::MAX), (0, 0), 2),
        piece((0, 0), (0, 16 * PAGE), 1),
        piece((2, 0), (0, 0), 1),
        piece((0, 0), (1, 0), 1),
        piece((0, 0), (0, 0), u64::MAX),
    ] {
        let error = reader.fabric.post(EpId(1), &[good, bad]).unwrap_err();
        assert!(matches!(error, FabricError::OutOfBounds { .. }), "{error}");
    }
    assert!(reader.bytes(0).iter().all(|b| *b == 0));
    reader.fabric.post(EpId(1), &[good]).unwrap();
    assert_eq!(reader.bytes(0)[0], 7);
    assert!(matches!(source.fabric.post(EpId(9), &[good]), Err(FabricError::Closed(_))));
    assert!(matches!(reader.fabric.post(EpId(5), &[good]), Err(FabricError::NoEndpoint(5))));
}

#[test]
fn tokens_are_single_use_and_unguessable() {
    let (mut reader, mut source) = pair();
    let blob = source.fabric.describe().unwrap();
    let lens = source.lens.clone();
    let mut forged = Blob::decode(&blob).unwrap();
    forged.token[31] ^= 1;
    reader.fabric.connect(EpId(2), EndRole::Active, &forged.encode(), &lens).unwrap();
    drive(&mut [&mut reader, &mut source], |n| failure(n[0], 2).is_some());
    assert!(failure(&reader, 2).unwrap().contains("token"), "{:?}", reader.events);

    reader.fabric.connect(EpId(3), EndRole::Active, &blob, &lens).unwrap();
    drive(&mut [&mut reader, &mut source], |n| connected(n[0], 3));
    reader.fabric.connect(EpId(4), EndRole::Active, &blob, &lens).unwrap();
    drive(&mut [&mut reader, &mut source], |n| failure(n[0], 4).is_some());
    assert!(failure(&reader, 4).unwrap().contains("used already"));
    assert!(!connected(&source, 9), "no endpoint of the source was ever asked for");
}

#[test]
fn the_oldest_token_goes_first() {
    let mut source = node(&[(PAGE, true)], 1, ShmOptions { max_tokens: 2, ..ShmOptions::default() });
    let mut reader = node(&[(PAGE, true)], 0, ShmOptions::default());
    let blobs: Vec<Vec<u8>> = (0..3).map(|_| source.fabric.describe().unwrap()).collect();
    for (i, blob) in blobs.iter().enumerate() {
        reader.fabric.connect(EpId(i as u32), EndRole::Active, blob, &[PAGE]).unwrap();
    }
    drive(&mut [&mut reader, &mut source], |n| {
        failure(n[0], 0).is_some() && connected(n[0], 1) && connected(n[0], 2)
    });
}

#[test]
fn a_table_that_differs_from_the_announcement_is_refused() {
    let (mut reader, mut source) = pair();
    for (ep, lens) in [(1, vec![8 * PAGE]), (2, vec![8 * PAGE, 8 * PAGE + 1]), (3, vec![])] {
        let blob = source.fabric.describe().unwrap();
        reader.fabric.connect(EpId(ep), EndRole::Active, &blob, &lens).unwrap();
        drive(&mut [&mut reader, &mut source], |n| failure(n[0], ep).is_some());
        assert!(failure(&reader, ep).unwrap().contains("announced"));
    }
    connect(&mut reader, &mut source);
}

#[test]
fn attaching_before_the_source_knows_of_it() {
    let (mut reader, mut source) = pair();
    let blob = source.fabric.describe().unwrap();
    let lens = source.lens.clone();
    reader.fabric.connect(EpId(1), EndRole::Active, &blob, &lens).unwrap();
    drive(&mut [&mut reader, &mut source], |n| connected(n[0], 1));
    let rb = reader.fabric.describe().unwrap();
    source.fabric.connect(EpId(9), EndRole::Passive, &rb, &[]).unwrap();
    source.step();
    assert!(connected(&source, 9));

    // Another fabric of the same process is another peer: it is not taken for the first.
    let mut other = node(&[(PAGE, true)], 0, ShmOptions::default());
    let ob = other.fabric.describe().unwrap();
    source.fabric.connect(EpId(10), EndRole::Passive, &ob, &[]).unwrap();
    source.step();
    assert!(!connected(&source, 10));
}

#[test]
fn closing_is_seen_and_everything_goes_back() {
    // Other tests of this process open descriptors too, so this one counts in a process of its own.
    if std::env::var_os("KVXFER_TEST_ALONE").is_none() {
        let status = std::process::Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "shm::tests::closing_is_seen_and_everything_goes_back"])
            .env("KVXFER_TEST_ALONE", "1")
            .status()
            .unwrap();
        assert!(status.success());
        return;
    }
    let (mut reader, mut source) = pair();
    let before = fd_count();
    let maps = || std::fs::read_to_string("/proc/self/maps").unwrap().matches("memfd:kvxfer-pool").count();
    let maps_before = maps();
    for round in 0..20 {
        connect(&mut reader, &mut source);
        assert!(fd_count() > before && maps() > maps_before);
        match round % 4 {
            0 => reader.fabric.disconnect(EpId(1)),
            1 => reader.fabric.fence(EpId(1), 5).unwrap(),
            2 => source.fabric.disconnect(EpId(9)),
            _ => source.fabric.fence(EpId(9), 6).unwrap(),
        }
        if round % 4 < 2 {
            drive(&mut [&mut reader, &mut source], |n| broken(n[1], 9));
            assert!(matches!(reader.fabric.post(EpId(1), &[]), Err(FabricError::NoEndpoint(1))));
        } else {
            drive(&mut [&mut reader, &mut source], |n| broken(n[0], 1));
            assert!(matches!(reader.fabric.post(EpId(1), &[]), Err(FabricError::Closed(_))));
            reader.fabric.flush(EpId(1), 8).unwrap();
            reader.step();
            assert!(matches!(reader.events.last(), Some(Completion::Flushed { result: Err(_), .. })));
        }
        let fenced = reader
            .events
            .iter()
            .chain(&source.events)
            .any(|c| matches!(c, Completion::Fenced { result: Ok(()), .. }));
        assert_eq!(fenced, round % 2 == 1);
        reader.fabric.disconnect(EpId(1));
        source.fabric.disconnect(EpId(9));
        drive(&mut [&mut reader, &mut source], |_| true);
        reader.events.clear();
        source.events.clear();
        assert_eq!(fd_count(), before, "round {round}");
        assert_eq!(maps(), maps_before, "round {round}");
    }
    drop(reader);
    drop(source);
    assert!(fd_count() < before);
}

#[test]
fn unanswered_flushes_fail_at_disconnect() {
    let (mut reader, mut source) = pair();
    connect(&mut reader, &mut source);
    reader.events.clear();
    reader.fabric.flush(EpId(1), 4).unwrap();
    reader.fabric.disconnect(EpId(1));
    reader.step();
    assert!(
        matches!(reader.events[..], [Completion::Flushed { ticket: 4, result: Err(_), .. }]),
        "{:?}",
        reader.events
    );
    assert!(matches!(reader.fabric.flush(EpId(1), 4), Err(FabricError::NoEndpoint(1))));
    assert!(matches!(reader.fabric.fence(EpId(1), 4), Err(FabricError::NoEndpoint(1))));
}

#[test]
fn many_pools_and_regions_cross_in_several_packets() {
    let lens: Vec<(u64, bool)> = (0..600).map(|i| (PAGE, i % 2 == 0)).collect();
    let mut source = node(&lens, 3, ShmOptions::default());
    let mut reader = node(&[(600 * PAGE, false)], 0, ShmOptions::default());
    for i in 0..600 {
        source.bytes(i)[5] = (i % 256) as u8;
    }
    connect(&mut reader, &mut source);
    let batch: Vec<Piece> =
        (0..600u32).map(|i| piece((i, 0), (0, u64::from(599 - i) * PAGE), PAGE)).collect();
    reader.fabric.post(EpId(1), &batch).unwrap();
    for (i, page) in reader.bytes(0).chunks(PAGE as usize).enumerate() {
        assert_eq!(usize::from(page[5]), (599 - i) % 256);
        assert_eq!(page[6], 3);
    }
    let info = reader.events.iter().find_map(|c| match c {
        Completion::Connected { info, .. } => Some(info.clone()),
        _ => None,
    });
    assert!(info.unwrap().contains("300 regions mapped in 300 memfds, 300 read"));
}

#[test]
fn silent_and_rude_connections_are_bounded() {
    let options = ShmOptions { max_silent: 4, max_unclaimed: 2, ..ShmOptions::default() };
    let mut source = node(&[(PAGE, true)], 1, options);
    let mut reader = node(&[(PAGE, true)], 0, ShmOptions::default());
    let name = source.fabric.source.name().to_vec();
    let silent: Vec<OwnedFd> = (0..40).map(|_| sock::connect(&name).unwrap().unwrap()).collect();
    let rude = sock::connect(&name).unwrap().unwrap();
    sock::send(&rude, &[9; 2000], &[]).unwrap();
    drive(&mut [&mut source], |_| sock::hung_up(&rude));
    assert!(silent.iter().filter(|fd| !sock::hung_up(fd)).count() <= 4);
    // They do not keep an honest reader out, nor do attached readers that nobody claims pile up.
    for ep in 0..6 {
        let blob = source.fabric.describe().unwrap();
        reader.fabric.connect(EpId(ep), EndRole::Active, &blob, &[PAGE]).unwrap();
        drive(&mut [&mut reader, &mut source], |n| connected(n[0], ep));
    }
    drive(&mut [&mut reader, &mut source], |n| (0..4).all(|ep| broken(n[0], ep)));
    assert!(!broken(&reader, 4) && !broken(&reader, 5));
}

#[test]
fn a_full_queue_is_tried_again() {
    let mut source = node(&[(PAGE, true)], 1, ShmOptions { max_unclaimed: 4000, ..ShmOptions::default() });
    let mut reader = node(&[(PAGE, true)], 0, ShmOptions::default());
    for ep in 0..700 {
        let blob = source.fabric.describe().unwrap();
        reader.fabric.connect(EpId(ep), EndRole::Active, &blob, &[PAGE]).unwrap();
    }
    assert!(!reader.fabric.redial.is_empty(), "the queue is longer than this test thinks");
    drive(&mut [&mut reader, &mut source], |n| {
        n[0].events.iter().filter(|c| matches!(c, Completion::Connected { .. })).count() == 700
    });
}

#[test]
fn bad_blobs_and_registrations() {
    let (mut reader, mut source) = pair();
    let blob = source.fabric.describe().unwrap();
    let good = Blob::decode(&blob).unwrap();
    let mut elsewhere = good.clone();
    elsewhere.host.boot_id[3] ^= 1;
    assert!(!reader.fabric.reaches(&elsewhere.encode()));
    assert!(!reader.fabric.reaches(b"tcp://somewhere"));
    for bytes in [elsewhere.encode(), b"xx".to_vec()] {
        let result = reader.fabric.connect(EpId(1), EndRole::Active, &bytes, &[]);
        assert!(matches!(result, Err(FabricError::BadBlob { .. })));
    }
    // A recycled process id is a process that has ended.
    let mut recycled = good;
    recycled.process.start += 1;
    reader.fabric.connect(EpId(1), EndRole::Active, &recycled.encode(), &[]).unwrap();
    reader.fabric.connect(EpId(2), EndRole::Passive, &recycled.encode(), &[]).unwrap();
    reader.step();
    let died = |ep| reader.events.iter().any(|c| matches!(c, Completion::PeerDied { ep: e } if e.0 == ep));
    assert!(died(1) && died(2) && failure(&reader, 1).is_some());

    let span = |addr, len, kind, backing| RegionSpan { addr, len, kind, backing };
    let pool = ShmPool::alloc(PAGE).unwrap();
    let host = MemKind::Host;
    for (span, text) in [
        (span(pool.addr(), 8, MemKind::Device(3), None), "device 3"),
        (span(u64::MAX, 8, host, None), "cannot be"),
        (span(0, 8, host, None), "cannot be"),
        (span(pool.addr() + 1, PAGE, host, Some(Arc::clone(&pool))), "leaves the region of 4096"),
        (span(pool.addr() - 1, 8, host, Some(Arc::clone(&pool))), "leaves the region of 4096"),
    ] {
        let error = ShmFabric::new(vec![span], ShmOptions::default()).unwrap_err().to_string();
        assert!(error.contains(text), "{error}");
    }
}

#[test]
fn a_fabric_moves_to_its_thread() {
    fn is_send<T: Send>() {}
    is_send::<ShmFabric>();
}

/// A source that answers as it likes, on a real socket of this process.
struct Hostile {
    listener: OwnedFd,
    blob: Blob,
}

impl Hostile {
    fn new() -> Self {
        let pid = std::process::id();
        let name = format!("kvxfer-hostile-{:x}", u128::from_le_bytes(random().unwrap())).into_bytes();
        let listener = sock::listen(&name).unwrap();
        let process = ProcessKey { pid, start: start_time(pid).unwrap(), instance: [1; 16] };
        let blob = Blob { host: HostId::of_this_process().unwrap(), process, token: [2; 32], name };
        Self { listener, blob }
    }

    /// What an honest reader of one region of `len` bytes says to this answer.
    fn answer(&self, len: u64, packets: &[(Vec<u8>, Vec<BorrowedFd<'_>>)]) -> String {
        let mut reader = node(&[(len, true)], 0, ShmOptions::default());
        reader.fabric.connect(EpId(1), EndRole::Active, &self.blob.encode(), &[len]).unwrap();
        let conn = sock::accept(&self.listener).unwrap().unwrap();
        // Closing with the greeting unread would discard the answer.
        assert!(matches!(sock::recv_plain(&conn, &mut [0u8; 64]), Ok(sock::Received::Packet(_))));
        for (bytes, fds) in packets {
            assert!(sock::send(&conn, bytes, fds).unwrap());
        }
        drop(conn);
        drive(&mut [&mut reader], |n| failure(n[0], 1).is_some());
        assert!(!connected(&reader, 1));
        failure(&reader, 1).unwrap()
    }
}

#[test]
fn memory_that_could_kill_the_reader_is_refused() {
    use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, ftruncate, memfd_create};
    use std::os::fd::AsFd;
    let hostile = Hostile::new();
    let head = (wire::Packet::Head { regions: 1, fds: 1 }.encode(), vec![]);
    let entry = Entry { len: 2 * PAGE, place: Place::File { fd: 0, offset: 0 } };
    let table = (wire::Packet::Table(vec![entry]).encode(), vec![]);
    let memfd = |bytes: u64, seals: SealFlags| {
        let fd = memfd_create("h", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING).unwrap();
        ftruncate(&fd, bytes).unwrap();
        fcntl_add_seals(&fd, seals).unwrap();
        fd
    };
    for (fd, text) in [
        (memfd(2 * PAGE, SealFlags::empty()), "seals"),
        (memfd(2 * PAGE, SealFlags::SHRINK | SealFlags::GROW), "seals"),
        (memfd(PAGE, pool::SEALS), "has 4096 bytes, but the peer's table needs 8192"),
        (OwnedFd::from(tempfile::tempfile().unwrap()), "seals"),
    ] {
        let fds = (wire::Packet::Fds(1).encode(), vec![fd.as_fd()]);
        let error = hostile.answer(2 * PAGE, &[head.clone(), table.clone(), fds]);
        assert!(error.contains(text), "{error}");
    }
    let garbage = hostile.answer(PAGE, &[(vec![7; 9000], vec![])]);
    assert!(garbage.contains("another program or version"), "{garbage}");
    let oversized = hostile.answer(PAGE, &[(vec![7; 100_000], vec![])]);
    assert!(oversized.contains("recvmsg"), "{oversized}");
    let silent = hostile.answer(PAGE, &[]);
    assert!(silent.contains("before it had answered"), "{silent}");
    let unmapped = Entry { len: PAGE, place: Place::Process { addr: 4096 } };
    let lie = hostile.answer(
        PAGE,
        &[
            (wire::Packet::Head { regions: 1, fds: 0 }.encode(), vec![]),
            (wire::Packet::Table(vec![unmapped]).encode(), vec![]),
        ],
    );
    assert!(lie.contains("EFAULT"), "{lie}");
}

#[test]
fn an_impostor_on_the_socket_is_refused() {
    let Hostile { listener: _listener, mut blob } = Hostile::new();
    let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
    blob.process.pid = child.id();
    blob.process.start = start_time(child.id()).unwrap();
    let mut reader = node(&[(PAGE, true)], 0, ShmOptions::default());
    reader.fabric.connect(EpId(1), EndRole::Active, &blob.encode(), &[PAGE]).unwrap();
    reader.step();
    child.kill().unwrap();
    child.wait().unwrap();
    assert!(failure(&reader, 1).unwrap().contains("was expected"), "{:?}", reader.events);
}
