//! Two processes move bytes over UCX: right, refused, cut off, fenced.
//!
//! Needs a UCX; without one each test says so and passes, unless `KVXFER_REQUIRE_UCX` is set. Run it once with
//! `KVXFER_UCX_LIBRARY` at the wheel's libucp.so.0 and once with the system's.
#![allow(
    missing_docs,
    unreachable_pub,
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::print_stdout,
    clippy::print_stderr,
    clippy::cast_possible_truncation
)]

mod ucx_common;

use kvxfer_fabric::ucx::{self, UcxFabric, UcxOptions};
use kvxfer_fabric::{
    Completion, EndRole, EpId, Fabric, FabricError, LocalMemory, MemKind, Piece, RegionSpan,
};
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};
use ucx_common::{
    BYTES, CANARY, EP, Node, PAGE, PAGES, Peer, Wire, options, peer_job, piece, spawn, ucx_present, write,
};

#[test]
fn peer_process() {
    let Some((job, tls, bytes, mut wire)) = peer_job() else {
        return;
    };
    let mut node = Node::new(&tls, bytes);
    match job.as_str() {
        "receive" => receive(&mut node, &mut wire),
        "write" => write(&mut node, &mut wire, 0),
        "both ways" => both_ways(),
        "lost connection" => lost_connection(),
        "no lane" => no_lane(),
        other => panic!("no job {other}"),
    }
}

/// The peer that is written to; says what its memory holds.
fn receive(node: &mut Node, wire: &mut Wire) {
    for region in [0, 1] {
        node.fill(region, |_| CANARY);
    }
    node.connect(wire, EP, EndRole::Passive);
    loop {
        node.progress();
        match wire.try_recv().as_deref() {
            Some(b"quit") => return,
            Some([region]) => wire.send(&node.dump(usize::from(*region))),
            Some(other) => panic!("{other:?}"),
            None => std::thread::yield_now(),
        }
    }
}

fn shuffled(n: usize, mut seed: u64) -> Vec<usize> {
    let mut order: Vec<usize> = (0..n).collect();
    for i in (1..n).rev() {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        order.swap(i, usize::try_from(seed >> 33).expect("31 bits") % (i + 1));
    }
    order
}

fn byte(i: usize) -> u8 {
    u8::try_from((i / PAGE * 31 + i) % 251).expect("below 251")
}

/// A receiver in its own process, connected; `None` (and a line that says why) without UCX.
fn receiver(tls: &str) -> Option<(Peer, Node)> {
    if !ucx_present() {
        return None;
    }
    let mut peer = spawn("receive", tls, BYTES, &[]);
    let mut node = Node::new(tls, BYTES);
    for region in [0, 1] {
        node.fill(region, byte);
    }
    node.connect(&mut peer.wire, EP, EndRole::Active);
    Some((peer, node))
}

fn remote(peer: &mut Peer, region: u8) -> Vec<u8> {
    peer.wire.send(&[region]);
    peer.wire.recv()
}

fn bytes_arrive_in_their_places(tls: &str) {
    let Some((mut peer, mut node)) = receiver(tls) else {
        return;
    };
    // Every third target page is left alone, and so is half of each last page.
    let (from, to) = (shuffled(PAGES, 5), shuffled(PAGES, 6));
    let mut want = [vec![CANARY; BYTES], vec![CANARY; BYTES]];
    let mut batch = Vec::new();
    for (i, (f, t)) in from.iter().zip(&to).enumerate().filter(|(_, (_, t))| *t % 3 != 0) {
        let (src, dst) = ((i % 2) as u32, (i / 2 % 2) as u32);
        let mut p = piece((src, *f), (dst, *t));
        if t % 7 == 0 {
            p.len = 1000 + *t as u64;
        }
        let (start, len) = (t * PAGE, usize::try_from(p.len).expect("small"));
        for k in 0..len {
            want[dst as usize][start + k] = byte(f * PAGE + k);
        }
        batch.push(p);
    }
    for (ticket, chunk) in batch.chunks(50).enumerate() {
        node.fabric.post(EP, chunk).expect("in bounds");
        node.flush(EP, ticket as u64, Duration::from_secs(10)).expect("flushed");
    }
    for region in [0u8, 1] {
        assert!(remote(&mut peer, region) == want[usize::from(region)], "region {region} differs over {tls}");
    }
    peer.wire.send(b"quit");
}

#[test]
fn bytes_arrive_over_tcp() {
    bytes_arrive_in_their_places("tcp");
}

#[test]
fn bytes_arrive_over_posix() {
    bytes_arrive_in_their_places("posix");
}

#[test]
fn bytes_arrive_over_the_default() {
    bytes_arrive_in_their_places("");
}

/// Where the peer's memory is mapped here, what is posted is there at once: nothing is left to a flush.
#[test]
fn pieces_into_mapped_memory_are_there_when_post_returns() {
    let Some((mut peer, mut node)) = receiver("posix") else {
        return;
    };
    let batch: Vec<Piece> = (0..PAGES).map(|p| piece((1, p), (0, PAGES - 1 - p))).collect();
    node.fabric.post(EP, &batch).expect("in bounds");
    let there = remote(&mut peer, 0);
    assert!((0..BYTES).all(|i| there[i] == byte((PAGES - 1 - i / PAGE) * PAGE + i % PAGE)));
    node.fabric.flush(EP, 1).expect("open");
    node.progress();
    assert!(node.seen.iter().any(|c| matches!(c, Completion::Flushed { ticket: 1, result: Ok(()), .. })));
    peer.wire.send(b"quit");
}

#[test]
fn a_window_is_what_is_mapped_and_no_more() {
    let Some((mut peer, mut node)) = receiver("posix") else {
        return;
    };
    let bytes = BYTES as u64;
    let mut own: Vec<u8> = (0..PAGE).map(|i| byte(i + 9)).collect();
    let span =
        RegionSpan { addr: own.as_mut_ptr() as u64, len: PAGE as u64, kind: MemKind::Host, backing: None };
    let memory = LocalMemory::new(&[span]).expect("ours");
    let half = |src_off, dst_off| Piece { src_off, dst_off, len: PAGE as u64 / 2, ..piece((0, 0), (0, 0)) };
    let halves = [half(PAGE as u64 / 2, 0), half(0, 0)];
    let window = node.fabric.window(EP, 0, bytes - PAGE as u64, PAGE as u64).expect("mapped");
    assert_eq!(memory.pack_into(&halves, &window), Ok(PAGE as u64));
    let more = [halves[0], halves[0], halves[0]];
    let error = memory.pack_into(&more, &window).expect_err("more than there is room for");
    assert!(matches!(error, FabricError::OutOfBounds { side: "remote", .. }), "{error}");
    let there = remote(&mut peer, 0);
    assert!(there[..BYTES - PAGE].iter().all(|b| *b == CANARY));
    assert_eq!(there[BYTES - PAGE..], [&own[PAGE / 2..], &own[..PAGE / 2]].concat());
    for (region, off, len) in [(0, bytes - 1, 2), (0, u64::MAX, 2), (2, 0, 1), (1, 0, 1)] {
        let found = node.fabric.window(EP, region, off, len);
        assert!(found.is_none(), "{off} of region {region}: UCX has not allocated region 1");
    }
    node.fabric.disconnect(EP);
    assert!(node.fabric.window(EP, 0, 0, 1).is_none());
    peer.wire.send(b"quit");
}

#[test]
fn there_is_no_window_over_tcp() {
    let Some((mut peer, mut node)) = receiver("tcp") else {
        return;
    };
    assert!(node.fabric.window(EP, 0, 0, 1).is_none());
    peer.wire.send(b"quit");
}

#[test]
fn what_is_mapped_of_a_peer_is_warmed_before_the_thread_sleeps() {
    let Some((mut peer, mut node)) = receiver("posix") else {
        return;
    };
    let first = node.fabric.window(EP, 0, 0, 1).is_some();
    let mut steps = 0;
    while !node.fabric.arm() {
        node.progress();
        steps += 1;
        assert!(steps < 100_000, "it never sleeps");
    }
    // 256 pages, 64 a step.
    assert!(first && steps >= 4, "{steps} steps");
    peer.wire.send(b"quit");
}

fn a_killed_peer_is_an_error(tls: &str) {
    let Some((mut peer, mut node)) = receiver(tls) else {
        return;
    };
    let batch: Vec<Piece> = (0..PAGES).map(|p| piece((0, p), (0, p))).collect();
    node.fabric.post(EP, &batch).expect("connected");
    peer.child.kill().expect("running");
    peer.child.wait().expect("killed");
    let (start, mut ticket, mut answers) = (Instant::now(), 0u64, 0u64);
    let error = loop {
        let posted = node.fabric.post(EP, &batch[..8]);
        node.fabric.flush(EP, ticket).expect("the endpoint is known");
        ticket += 1;
        node.progress();
        answers += node.seen.iter().filter(|c| matches!(c, Completion::Flushed { .. })).count() as u64;
        node.seen.retain(|c| !matches!(c, Completion::Flushed { .. }));
        let broken = node.seen.iter().find_map(|c| match c {
            Completion::Broken { error, .. } => Some(error.clone()),
            _ => None,
        });
        if let Some(error) = broken.or(posted.err()) {
            break error;
        }
        assert!(start.elapsed() < Duration::from_secs(15), "no error over {tls}");
        std::thread::yield_now();
    };
    eprintln!("{tls}: {error} after {:?}", start.elapsed());
    // Each flush has one answer, also those that the death cut off.
    while answers < ticket {
        node.until(Duration::from_secs(10), |c| matches!(c, Completion::Flushed { .. }).then_some(()));
        answers += 1;
    }
    assert!(node.flush(EP, ticket, Duration::from_secs(1)).is_err(), "a broken endpoint flushed");
    assert!(node.fabric.post(EP, &batch).is_err(), "a broken endpoint took pieces");
    node.fabric.disconnect(EP);
    assert_eq!(node.fabric.post(EP, &batch), Err(FabricError::NoEndpoint(EP.0)));
}

#[test]
fn a_killed_peer_is_an_error_over_tcp() {
    a_killed_peer_is_an_error("tcp");
}

#[test]
fn a_killed_peer_is_an_error_over_posix() {
    a_killed_peer_is_an_error("posix");
}

#[test]
fn a_piece_out_of_bounds_posts_nothing() {
    let Some((mut peer, mut node)) = receiver("tcp") else {
        return;
    };
    let good = piece((0, 0), (0, 0));
    let past_end = Piece { dst_off: (BYTES - PAGE + 1) as u64, ..good };
    let no_region = Piece { dst_region: 2, ..good };
    let wraps = Piece { dst_off: u64::MAX - 100, ..good };
    let bad_source = Piece { src_off: BYTES as u64, ..good };
    for bad in [past_end, no_region, wraps, bad_source] {
        let err = node.fabric.post(EP, &[good, bad]).expect_err("out of bounds");
        assert!(matches!(err, FabricError::OutOfBounds { .. }), "{err}");
    }
    node.flush(EP, 1, Duration::from_secs(5)).expect("flushed");
    assert!(remote(&mut peer, 0).iter().all(|b| *b == CANARY), "something was posted");
    // The endpoint is as good as before.
    node.fabric.post(EP, &[good]).expect("in bounds");
    node.flush(EP, 2, Duration::from_secs(5)).expect("flushed");
    assert_eq!(remote(&mut peer, 0)[..PAGE], (0..PAGE).map(byte).collect::<Vec<_>>());
}

/// The setting with which TCP has a fence.
const EMULATED: (&str, &str) = ("UCX_TCP_PUT_ENABLE", "n");

/// Runs a test that needs that setting in a process of its own, because UCX reads it once.
fn with_emulated_puts(job: &str) {
    if !ucx_present() {
        return;
    }
    let status = spawn(job, "tcp", BYTES, &[EMULATED]).child.wait().expect("runs");
    assert!(status.success(), "{job}: {status}");
}

/// Waits for the peer's writes, fences in their midst, and then looks for late ones.
fn fence_round(node: &mut Node) -> Result<(), FabricError> {
    node.fill(0, |_| CANARY);
    let start = Instant::now();
    while node.dump(0)[..PAGE].iter().all(|b| *b == CANARY) {
        node.progress();
        assert!(start.elapsed() < Duration::from_secs(10), "the peer does not write");
    }
    node.fabric.fence(EP, 9).expect("the endpoint is known");
    node.until(Duration::from_secs(10), |c| match c {
        Completion::Fenced { ticket: 9, result, .. } => Some(result.clone()),
        _ => None,
    })
}

#[test]
fn a_fence_on_tcp_stops_the_writer() {
    if !ucx_present() {
        return;
    }
    let mut peer = spawn("write", "tcp", BYTES, &[EMULATED]);
    let mut node = Node::new("tcp", BYTES);
    for round in 0..5 {
        node.connect(&mut peer.wire, EP, EndRole::Passive);
        fence_round(&mut node).expect("tcp has a fence");
        node.fill(0, |_| CANARY);
        // The writer goes on; our worker takes in whatever comes.
        let start = Instant::now();
        while start.elapsed() < Duration::from_millis(200) {
            node.progress();
        }
        let late = node.dump(0).iter().filter(|b| **b != CANARY).count();
        assert_eq!(late, 0, "round {round}: {late} bytes landed after the fence");
        peer.wire.send(if round < 4 { b"again" } else { b"quit" });
    }
}

#[test]
fn tcps_own_put_has_no_fence() {
    if !ucx_present() {
        return;
    }
    let mut peer = spawn("write", "tcp", BYTES, &[]);
    let mut node = Node::new("tcp", BYTES);
    for round in 0..3 {
        node.connect(&mut peer.wire, EP, EndRole::Passive);
        let err = fence_round(&mut node).expect_err("UCX's TCP put passes a closed endpoint by");
        assert!(matches!(&err, FabricError::NoFence { transport, .. } if transport == "tcp_put"), "{err}");
        // All the same the endpoint is closed, and the fence is answered once.
        assert_eq!(node.fabric.fence(EP, 10), Err(FabricError::NoEndpoint(EP.0)));
        let start = Instant::now();
        while start.elapsed() < Duration::from_millis(50) {
            node.progress();
        }
        assert!(node.seen.iter().all(|c| !matches!(c, Completion::Fenced { .. })), "{:?}", node.seen);
        let left = format!("{:?}", node.fabric);
        assert!(left.contains("endpoints: [], closing: 0, fences: 0, peers: 0"), "{left}");
        peer.wire.send(if round < 2 { b"again" } else { b"quit" });
    }
    assert!(peer.child.wait().expect("ends").success(), "the writer did not hear of the close");
}

fn a_peer_that_is_gone_is_no_connection(tls: &str) {
    let Some((mut peer, mut node)) = receiver(tls) else {
        return;
    };
    // An address that was good until its process died.
    let mut other = spawn("receive", tls, BYTES, &[]);
    let blob = other.wire.recv();
    for p in [&mut other, &mut peer] {
        p.child.kill().expect("running");
        p.child.wait().expect("killed");
    }
    let late = EpId(2);
    let lens = node.lens();
    // Shared memory of a dead process is refused at once, a dead port by the connection.
    if node.fabric.connect(late, EndRole::Active, &blob, &lens).is_ok() {
        node.until(Duration::from_secs(20), |c| match c {
            Completion::ConnectFailed { ep, error } if *ep == late => Some(error.clone()),
            Completion::Connected { ep, .. } if *ep == late => panic!("connected to a dead process"),
            _ => None,
        });
    }
}

#[test]
fn a_peer_that_is_gone_is_no_connection_over_tcp() {
    a_peer_that_is_gone_is_no_connection("tcp");
}

#[test]
fn a_peer_that_is_gone_is_no_connection_over_posix() {
    a_peer_that_is_gone_is_no_connection("posix");
}

#[test]
fn posix_has_no_fence() {
    if !ucx_present() {
        return;
    }
    let mut peer = spawn("write", "posix", BYTES, &[]);
    let mut node = Node::new("posix", BYTES);
    node.connect(&mut peer.wire, EP, EndRole::Passive);
    let err = fence_round(&mut node).expect_err("posix cannot promise that");
    assert!(matches!(&err, FabricError::NoFence { transport, .. } if transport == "posix"), "{err}");
}

/// With these UCX takes shared memory for no endpoint that handles errors, and yet finds what is mapped by it.
const SHARED_MEMORY_NO_LANE: [(&str, &str); 3] =
    [EMULATED, ("UCX_POSIX_ERROR_HANDLING", "n"), ("UCX_MM_ERROR_HANDLING", "n")];

#[test]
fn what_is_mapped_but_is_no_transport_of_the_endpoint_is_left_to_ucx() {
    if !ucx_present() {
        return;
    }
    let mut parent = spawn("no lane", "posix,tcp", BYTES, &SHARED_MEMORY_NO_LANE);
    assert!(parent.child.wait().expect("runs").success());
}

/// The writer has a fence, as its transports say; so it must not write past them.
fn no_lane() {
    let mut peer = spawn("receive", "posix,tcp", BYTES, &SHARED_MEMORY_NO_LANE);
    let mut node = Node::new("posix,tcp", BYTES);
    node.fill(1, byte);
    node.connect(&mut peer.wire, EP, EndRole::Active);
    assert!(node.fabric.window(EP, 0, 0, 1).is_none(), "the peer's fence knows of tcp only");
    let batch: Vec<Piece> = (0..PAGES).map(|p| piece((1, p), (0, p))).collect();
    node.fabric.post(EP, &batch).expect("in bounds");
    node.flush(EP, 1, Duration::from_secs(10)).expect("flushed");
    assert!(remote(&mut peer, 0).iter().enumerate().all(|(i, b)| *b == byte(i)));
    peer.wire.send(b"quit");

    let mut peer = spawn("write", "posix,tcp", BYTES, &SHARED_MEMORY_NO_LANE);
    let mut node = Node::new("posix,tcp", BYTES);
    node.connect(&mut peer.wire, EP, EndRole::Passive);
    fence_round(&mut node).expect("tcp has a fence");
    node.fill(0, |_| CANARY);
    let start = Instant::now();
    while start.elapsed() < Duration::from_millis(200) {
        node.progress();
    }
    assert!(node.dump(0).iter().all(|b| *b == CANARY), "bytes landed after the fence");
    peer.wire.send(b"quit");
}

#[test]
fn endpoints_both_ways_between_two_fabrics_are_fenced_together() {
    with_emulated_puts("both ways");
}

fn both_ways() {
    // Two fabrics of this process, moved by one thread, so that the order of everything is known.
    let (mut a, mut b) = (Node::new("tcp", BYTES), Node::new("tcp", BYTES));
    let (blob_a, blob_b) = (a.fabric.describe().expect("blob"), b.fabric.describe().expect("blob"));
    let lens = a.lens();
    let (forth, back) = (EpId(10), EpId(20));
    a.fabric.connect(forth, EndRole::Active, &blob_b, &lens).expect("connect");
    b.fabric.connect(back, EndRole::Active, &blob_a, &lens).expect("connect");
    a.fabric.connect(back, EndRole::Passive, &blob_b, &lens).expect("connect");
    b.fabric.connect(forth, EndRole::Passive, &blob_a, &lens).expect("connect");
    let both_open =
        |n: &Node| n.seen.iter().filter(|c| matches!(c, Completion::Connected { .. })).count() == 2;
    let start = Instant::now();
    while !(both_open(&a) && both_open(&b)) {
        a.progress();
        b.progress();
        assert!(start.elapsed() < Duration::from_secs(10), "{:?} {:?}", a.seen, b.seen);
    }
    a.fill(1, |_| 7);
    let batch: Vec<Piece> = (0..PAGES).map(|p| piece((1, p), (0, p))).collect();
    b.fill(0, |_| CANARY);
    for _ in 0..20 {
        a.fabric.post(forth, &batch).expect("connected");
    }
    a.fabric.flush(forth, 1).expect("known");
    b.progress();
    // B fences the endpoint that A writes through; the other one to the same peer goes with it.
    b.fabric.fence(forth, 2).expect("known");
    let result = loop {
        b.progress();
        let fenced = b.seen.iter().find_map(|c| match c {
            Completion::Fenced { result, .. } => Some(result.clone()),
            _ => None,
        });
        if let Some(result) = fenced {
            break result;
        }
        assert!(start.elapsed() < Duration::from_secs(10), "no fence");
    };
    assert_eq!(result, Ok(()));
    assert!(b.seen.iter().any(|c| matches!(c, Completion::Broken { ep, .. } if *ep == back)), "{:?}", b.seen);
    b.fill(0, |_| CANARY);
    let start = Instant::now();
    while start.elapsed() < Duration::from_millis(300) {
        let _ = a.fabric.post(forth, &batch);
        a.progress();
        b.progress();
    }
    assert!(b.dump(0).iter().all(|x| *x == CANARY), "a write landed after the fence");
    a.until(Duration::from_secs(5), |c| match c {
        Completion::Flushed { ticket: 1, result, .. } => Some(result.clone()),
        _ => None,
    })
    .expect_err("the flush was cut off");
    // The other direction's endpoint is still known, broken, and can be fenced too.
    b.fabric.fence(back, 3).expect("known");
    b.until(Duration::from_secs(5), |c| matches!(c, Completion::Fenced { ticket: 3, .. }).then_some(()));
}

#[test]
fn a_fence_after_a_lost_connection_never_lies() {
    with_emulated_puts("lost connection");
}

fn lost_connection() {
    // One side's connection was lost before the other had made its own: UCX's two counts are now apart.
    for lost_by_writer in [false, true] {
        let (mut a, mut b) = (Node::new("tcp", BYTES), Node::new("tcp", BYTES));
        let (blob_a, blob_b) = (a.fabric.describe().expect("blob"), b.fabric.describe().expect("blob"));
        let lens = a.lens();
        if lost_by_writer {
            a.fabric.connect(EpId(1), EndRole::Active, &blob_b, &lens).expect("connect");
            a.progress();
            a.fabric.disconnect(EpId(1));
        } else {
            b.fabric.connect(EpId(1), EndRole::Passive, &blob_a, &lens).expect("connect");
            b.progress();
            b.fabric.disconnect(EpId(1));
        }
        // UCX may pair the next connection with the lost one, and it fails; then both try again.
        let ep = (2..6)
            .map(EpId)
            .find(|ep| {
                a.fabric.connect(*ep, EndRole::Active, &blob_b, &lens).expect("connect");
                b.fabric.connect(*ep, EndRole::Passive, &blob_a, &lens).expect("connect");
                let start = Instant::now();
                loop {
                    a.progress();
                    b.progress();
                    for completion in a.seen.drain(..) {
                        match completion {
                            Completion::Connected { ep: e, .. } if e == *ep => return true,
                            Completion::ConnectFailed { ep: e, error } if e == *ep => {
                                eprintln!("lost by writer {lost_by_writer}: {error}");
                                a.fabric.disconnect(*ep);
                                b.fabric.disconnect(*ep);
                                return false;
                            }
                            _ => {}
                        }
                    }
                    assert!(start.elapsed() < Duration::from_secs(10), "neither connected nor failed");
                }
            })
            .expect("one of four tries connects");
        let batch: Vec<Piece> = (0..PAGES).map(|p| piece((0, p), (0, p))).collect();
        a.fill(0, byte);
        for _ in 0..20 {
            a.fabric.post(ep, &batch).expect("connected");
        }
        b.fabric.fence(ep, 1).expect("known");
        let result = b.until(Duration::from_secs(5), |c| match c {
            Completion::Fenced { result, .. } => Some(result.clone()),
            _ => None,
        });
        eprintln!("lost by writer {lost_by_writer}: {result:?}");
        b.fill(0, |_| CANARY);
        let start = Instant::now();
        while start.elapsed() < Duration::from_millis(200) {
            let _ = a.fabric.post(ep, &batch);
            a.progress();
            b.progress();
        }
        let late = b.dump(0).iter().any(|x| *x != CANARY);
        assert!(result.is_err() || !late, "the fence promised, and a write landed");
    }
}

#[test]
fn a_disconnect_answers_what_is_open() {
    let Some((_peer, mut node)) = receiver("tcp") else {
        return;
    };
    let batch: Vec<Piece> = (0..PAGES).map(|p| piece((0, p), (0, p))).collect();
    node.fabric.post(EP, &batch).expect("connected");
    node.fabric.flush(EP, 1).expect("known");
    node.fabric.disconnect(EP);
    node.until(Duration::from_secs(1), |c| match c {
        Completion::Flushed { ticket: 1, result, .. } => Some(result.clone()),
        _ => None,
    })
    .expect_err("it was closed under the flush");
    assert_eq!(node.fabric.flush(EP, 2), Err(FabricError::NoEndpoint(EP.0)));
    assert!(node.seen.iter().all(|c| !matches!(c, Completion::Flushed { .. })), "answered twice");
}

#[test]
fn an_idle_fabric_can_sleep() {
    let Some((mut peer, mut node)) = receiver("tcp") else {
        return;
    };
    let fd = node.fabric.event_fd().expect("UCX has one").as_raw_fd();
    let mut poll = libc::pollfd { fd, events: libc::POLLIN, revents: 0 };
    let start = Instant::now();
    loop {
        node.progress();
        if node.fabric.arm() {
            // SAFETY: one valid structure.
            let ready = unsafe { libc::poll(&raw mut poll, 1, 100) };
            if ready == 0 {
                break;
            }
        }
        assert!(start.elapsed() < Duration::from_secs(10), "it never sleeps");
    }
    // Work wakes it: the answer to a flush comes over the socket.
    node.fabric.post(EP, &[piece((0, 0), (0, 0))]).expect("connected");
    node.fabric.flush(EP, 1).expect("known");
    let start = Instant::now();
    loop {
        node.progress();
        if node.seen.iter().any(|c| matches!(c, Completion::Flushed { ticket: 1, result: Ok(()), .. })) {
            break;
        }
        if node.fabric.arm() {
            // SAFETY: one valid structure.
            unsafe { libc::poll(&raw mut poll, 1, 5000) };
        }
        assert!(start.elapsed() < Duration::from_secs(4), "the descriptor did not wake it");
    }
    peer.wire.send(b"quit");
}

#[test]
fn hostile_addresses_are_errors() {
    if !ucx_present() {
        return;
    }
    let mut node = Node::new("tcp", BYTES);
    let mut blob = Node::new("tcp", BYTES).fabric.describe().expect("blob");
    let lens = node.lens();
    assert!(node.fabric.reaches(&blob));
    let own = node.fabric.describe().expect("blob");
    assert!(!node.fabric.reaches(&own), "a fabric does not reach itself");
    for n in [0, 1, 5, 30, blob.len() - 1] {
        assert!(!node.fabric.reaches(&blob[..n]));
        let err = node.fabric.connect(EP, EndRole::Active, &blob[..n], &lens).expect_err("cut off");
        assert!(matches!(err, FabricError::BadBlob { .. }), "{err}");
    }
    let err = node.fabric.connect(EP, EndRole::Active, &blob, &[1]).expect_err("one region of two");
    assert!(err.to_string().contains("2 regions") && err.to_string().contains("has 1"), "{err}");
    // Magic and format, then the UCX version's three numbers.
    let mut other = blob.clone();
    other[9] ^= 1;
    assert!(!node.fabric.reaches(&other), "another minor version of UCX");
    let err = node.fabric.connect(EP, EndRole::Active, &other, &lens).expect_err("another version");
    assert!(err.to_string().contains("install the same minor version"), "{err}");
    blob[4] = 99;
    assert!(node.fabric.connect(EP, EndRole::Passive, &blob, &lens).is_err(), "another format");
}

#[test]
fn regions_that_touch_are_registered_once() {
    if !ucx_present() {
        return;
    }
    let memory = vec![0u8; 64 * PAGE];
    let far = vec![0u8; PAGE];
    let span = |addr: *const u8, len: usize| RegionSpan {
        addr: addr as u64,
        len: len as u64,
        kind: MemKind::Host,
        backing: None,
    };
    let mut spans: Vec<RegionSpan> = (0..64).map(|i| span(memory[i * PAGE..].as_ptr(), PAGE)).collect();
    spans.push(span(memory[100..].as_ptr(), 10 * PAGE));
    spans.push(span(far.as_ptr(), PAGE));
    spans.push(span(far.as_ptr(), 0));
    let fabric = UcxFabric::new(&spans, &options("tcp")).expect("registers");
    // One for the big one, one for the far one unless the allocator put it right behind, one scratch word.
    assert!((2..=3).contains(&fabric.registrations()), "{}", fabric.registrations());
}

#[test]
fn what_ucx_can_do_is_reported() {
    if !ucx_present() {
        return;
    }
    let report = ucx::probe(&UcxOptions::default()).expect("UCX is there");
    assert!(report.transports.iter().any(|t| t == "tcp"), "{report:?}");
    let tcp = ucx::one_sided_probe("tcp", &UcxOptions::default()).expect("tcp works");
    assert!(tcp.transports.iter().all(|t| t == "tcp"), "{tcp:?}");
    // Over TCP the receiver's process has to take the bytes in.
    assert!(!tcp.pool && !tcp.plain, "{tcp:?}");
    let posix = ucx::one_sided_probe("posix", &UcxOptions::default()).expect("posix works");
    assert!(posix.pool, "{posix:?}");
}
