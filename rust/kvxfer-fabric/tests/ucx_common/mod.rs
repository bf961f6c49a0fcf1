//! Two processes with a UCX fabric each: the test binary runs itself once more as the peer.
#![allow(dead_code)] // each test binary uses a part of it

use kvxfer_fabric::ucx::{UcxFabric, UcxOptions, UcxPool};
use kvxfer_fabric::{Backing, Completion, EndRole, EpId, Fabric, FabricError, MemKind, Piece, RegionSpan};
use std::io::{Read, Write};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::PathBuf;
use std::process::{Child, Command};
use std::sync::Arc;
use std::time::{Duration, Instant};

pub const EP: EpId = EpId(1);
pub const PAGE: usize = 4096;
pub const PAGES: usize = 256;
pub const BYTES: usize = PAGE * PAGES;
pub const CANARY: u8 = 0xC5;
const SOCKET: &str = "KVXFER_TEST_PEER_SOCKET";
const JOB: &str = "KVXFER_TEST_PEER_JOB";
const TLS: &str = "KVXFER_TEST_PEER_TLS";
const SIZE: &str = "KVXFER_TEST_PEER_BYTES";

/// Frames over a socket.
pub struct Wire(UnixStream);

impl Wire {
    pub fn send(&mut self, bytes: &[u8]) {
        self.0.write_all(&u32::try_from(bytes.len()).expect("small").to_le_bytes()).expect("peer reads");
        self.0.write_all(bytes).expect("peer reads");
    }

    pub fn recv(&mut self) -> Vec<u8> {
        self.hear().expect("peer writes")
    }

    /// A frame, or nothing if the peer has ended.
    pub fn hear(&mut self) -> Option<Vec<u8>> {
        let mut len = [0; 4];
        self.0.read_exact(&mut len).ok()?;
        let mut bytes = vec![0; u32::from_le_bytes(len) as usize];
        self.0.read_exact(&mut bytes).ok()?;
        Some(bytes)
    }

    /// A frame, if one has begun to arrive.
    pub fn try_recv(&mut self) -> Option<Vec<u8>> {
        self.0.set_nonblocking(true).expect("socket");
        let mut len = [0; 4];
        let got = self.0.read(&mut len[..1]);
        self.0.set_nonblocking(false).expect("socket");
        match got {
            Ok(1) => {
                self.0.read_exact(&mut len[1..]).expect("peer writes");
                let mut bytes = vec![0; u32::from_le_bytes(len) as usize];
                self.0.read_exact(&mut bytes).expect("peer writes");
                Some(bytes)
            }
            Ok(_) => panic!("the peer is gone"),
            Err(_) => None,
        }
    }
}

/// The peer process; killed when dropped.
pub struct Peer {
    pub child: Child,
    pub wire: Wire,
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Starts this binary again, to run only its test `peer_process`.
pub fn spawn(job: &str, tls: &str, bytes: usize, env: &[(&str, &str)]) -> Peer {
    let dir = tempfile::tempdir().expect("folder");
    let path = dir.path().join("s");
    let listener = UnixListener::bind(&path).expect("socket");
    let mut command = Command::new(std::env::current_exe().expect("own path"));
    command
        .args(["--exact", "peer_process", "--nocapture", "--include-ignored"])
        .env(SOCKET, &path)
        .env(JOB, job)
        .env(TLS, tls)
        .env(SIZE, bytes.to_string())
        .envs(env.iter().copied())
        .stdout(std::process::Stdio::null());
    let child = command.spawn().expect("own binary starts");
    let (stream, _) = listener.accept().expect("peer connects");
    Peer { child, wire: Wire(stream) }
}

/// In the peer process: what to do, and the socket to the parent.
pub fn peer_job() -> Option<(String, String, usize, Wire)> {
    let path = PathBuf::from(std::env::var_os(SOCKET)?);
    let stream = UnixStream::connect(path).expect("parent listens");
    let bytes = std::env::var(SIZE).expect("bytes").parse().expect("a number");
    Some((std::env::var(JOB).expect("job"), std::env::var(TLS).expect("tls"), bytes, Wire(stream)))
}

pub fn options(tls: &str) -> UcxOptions {
    UcxOptions { tls: (!tls.is_empty()).then(|| tls.to_owned()), ..UcxOptions::default() }
}

/// Whether there is a UCX to test; prints why not, or fails where one is required.
pub fn ucx_present() -> bool {
    match UcxPool::alloc(4096, &options("tcp")) {
        Ok(_) => true,
        Err(error) if std::env::var_os("KVXFER_REQUIRE_UCX").is_none() => {
            eprintln!("skipped: {error}");
            false
        }
        Err(error) => panic!("KVXFER_REQUIRE_UCX is set, and: {error}"),
    }
}

/// A fabric with two regions of the same size: 0 is a pool, 1 plain memory.
pub struct Node {
    pub fabric: UcxFabric,
    pub pool: Arc<dyn Backing>,
    pub plain: Vec<std::cell::UnsafeCell<u8>>,
    pub bytes: usize,
    pub seen: Vec<Completion>,
}

impl Node {
    pub fn new(tls: &str, bytes: usize) -> Self {
        let options = options(tls);
        let pool = UcxPool::alloc(bytes as u64, &options).expect("pool");
        let plain: Vec<_> = (0..bytes).map(|_| std::cell::UnsafeCell::new(0)).collect();
        let spans = [
            RegionSpan {
                addr: pool.addr(),
                len: bytes as u64,
                kind: MemKind::Host,
                backing: Some(Arc::clone(&pool)),
            },
            RegionSpan { addr: plain.as_ptr() as u64, len: bytes as u64, kind: MemKind::Host, backing: None },
        ];
        let fabric = UcxFabric::new(&spans, &options).expect("fabric");
        let node = Self { fabric, pool, plain, bytes, seen: Vec::new() };
        node.fill(0, |_| 0);
        node
    }

    fn first(&self, region: usize) -> *mut u8 {
        if region == 0 { self.pool.addr() as *mut u8 } else { self.plain.as_ptr() as *mut u8 }
    }

    pub fn pool_addr(&self) -> u64 {
        self.pool.addr()
    }

    pub fn fill(&self, region: usize, byte: impl Fn(usize) -> u8) {
        for i in 0..self.bytes {
            // SAFETY: within the region, which this node owns.
            unsafe { self.first(region).add(i).write_volatile(byte(i)) };
        }
    }

    pub fn dump(&self, region: usize) -> Vec<u8> {
        // SAFETY: as above.
        (0..self.bytes).map(|i| unsafe { self.first(region).add(i).read_volatile() }).collect()
    }

    pub fn lens(&self) -> [u64; 2] {
        [self.bytes as u64; 2]
    }

    /// Swaps addresses with the peer and connects; both sides have the same regions.
    pub fn connect(&mut self, wire: &mut Wire, ep: EpId, role: EndRole) {
        wire.send(&self.fabric.describe().expect("blob"));
        let blob = wire.recv();
        assert!(self.fabric.reaches(&blob));
        self.fabric.connect(ep, role, &blob, &self.lens()).expect("connect starts");
        self.connected(ep);
    }

    pub fn connected(&mut self, ep: EpId) {
        self.until(Duration::from_secs(20), |c| match c {
            Completion::Connected { ep: e, info } if *e == ep => Some(info.clone()),
            Completion::ConnectFailed { error, .. } => panic!("{error}"),
            _ => None,
        });
    }

    pub fn progress(&mut self) {
        let mut out = Vec::new();
        self.fabric.progress(&mut out);
        self.seen.extend(out);
    }

    /// Progresses until a completion is wanted.
    pub fn until<T>(&mut self, limit: Duration, mut want: impl FnMut(&Completion) -> Option<T>) -> T {
        let start = Instant::now();
        loop {
            self.progress();
            if let Some(i) = self.seen.iter().position(|c| want(c).is_some()) {
                let found = want(&self.seen[i]).expect("found above");
                self.seen.drain(..=i);
                return found;
            }
            assert!(start.elapsed() < limit, "nothing in {limit:?}: {:?}", self.seen);
            if start.elapsed() > Duration::from_millis(2) {
                std::thread::yield_now();
            }
        }
    }

    pub fn flush(&mut self, ep: EpId, ticket: u64, limit: Duration) -> Result<(), FabricError> {
        self.fabric.flush(ep, ticket)?;
        self.until(limit, |c| match c {
            Completion::Flushed { ep: e, ticket: t, result } if *e == ep && *t == ticket => {
                Some(result.clone())
            }
            _ => None,
        })
    }
}

/// The peer that writes without end, into a new connection whenever the old one breaks.
pub fn write(node: &mut Node, wire: &mut Wire, region: u32) {
    node.fill(1, |_| 0xEE);
    loop {
        node.connect(wire, EP, EndRole::Active);
        let batch: Vec<Piece> = (0..PAGES).map(|p| piece((1, p), (region, p))).collect();
        let mut flushes = 0;
        loop {
            let posted = node.fabric.post(EP, &batch);
            node.fabric.flush(EP, flushes).expect("the endpoint is known");
            flushes += 1;
            // Do not wait for the flush: there is always more in UCX than it has sent.
            node.progress();
            if node.seen.len() > 1000 {
                node.seen.retain(|c| matches!(c, Completion::Broken { .. }));
            }
            if let Some(order) = wire.try_recv() {
                node.fabric.disconnect(EP);
                if order == b"quit" {
                    return;
                }
                break;
            }
            if posted.is_err() || node.seen.iter().any(|c| matches!(c, Completion::Broken { .. })) {
                // It heard of the fence; the order comes all the same.
                node.fabric.disconnect(EP);
                if wire.recv() == b"quit" {
                    return;
                }
                break;
            }
        }
        node.seen.clear();
    }
}

pub fn piece(src: (u32, usize), dst: (u32, usize)) -> Piece {
    Piece {
        src_region: src.0,
        src_off: (src.1 * PAGE) as u64,
        dst_region: dst.0,
        dst_off: (dst.1 * PAGE) as u64,
        len: PAGE as u64,
    }
}
