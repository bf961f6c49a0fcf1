//! The shared-memory fabric between two real processes. The test binary starts itself again for the other one.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, clippy::cast_possible_wrap)]

use kvxfer_fabric::shm::{PoolOptions, ShmFabric, ShmOptions, ShmPool};
use kvxfer_fabric::{Backing, Completion, EndRole, EpId, Fabric, MemKind, Piece, RegionSpan};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Signal, WaitOptions, kill_process, waitpid};
use std::io::{Read, Write};
use std::os::fd::AsFd;
use std::os::unix::net::{UnixListener, UnixStream};
use std::process::{Child, Command};
use std::sync::Arc;
use std::time::{Duration, Instant};

const PAGE: u64 = 4096;
/// Pages of each region; region 0 is a pool, region 1 is a plain vector.
const PAGES: u64 = 512;
const LENS: [u64; 2] = [PAGES * PAGE, PAGES * PAGE];

fn pattern(region: u64, offset: u64) -> u8 {
    let x = (region << 40 | offset).wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    (x >> 56) as u8
}

/// Two regions, one pooled and one not, and the fabric over them.
struct Side {
    fabric: ShmFabric,
    events: Vec<Completion>,
    pool: Arc<ShmPool>,
    plain: Vec<u8>,
}

impl Side {
    fn new(name: &str, fill: impl Fn(u64, u64) -> u8) -> Self {
        let options = PoolOptions { name: name.to_owned(), ..PoolOptions::default() };
        let pool = ShmPool::alloc_with(LENS[0], &options).unwrap();
        let mut plain = vec![0u8; LENS[1] as usize];
        let host = MemKind::Host;
        let spans = vec![
            RegionSpan { addr: pool.addr(), len: LENS[0], kind: host, backing: Some(pool.clone()) },
            RegionSpan {
                addr: plain.as_mut_ptr().expose_provenance() as u64,
                len: LENS[1],
                kind: host,
                backing: None,
            },
        ];
        let fabric = ShmFabric::new(spans, ShmOptions::default()).unwrap();
        let mut side = Self { fabric, events: Vec::new(), pool, plain };
        for region in 0..2 {
            for (i, b) in side.bytes(region).iter_mut().enumerate() {
                *b = fill(region as u64, i as u64);
            }
        }
        side
    }

    fn bytes(&mut self, region: usize) -> &mut [u8] {
        let addr =
            if region == 0 { self.pool.addr() as usize } else { self.plain.as_mut_ptr().expose_provenance() };
        // SAFETY: this side keeps both memories, and the borrow is exclusive.
        unsafe {
            std::slice::from_raw_parts_mut(std::ptr::with_exposed_provenance_mut(addr), LENS[region] as usize)
        }
    }

    /// Moves along until an event is `wanted`; sleeps on the descriptor meanwhile.
    fn until(&mut self, what: &str, wanted: impl Fn(&Completion) -> bool) -> Completion {
        let deadline = Instant::now() + Duration::from_secs(20);
        loop {
            self.fabric.progress(&mut self.events);
            if let Some(c) = self.events.iter().find(|c| wanted(c)) {
                return c.clone();
            }
            assert!(Instant::now() < deadline, "{what}: {:?}", self.events);
            self.sleep(None);
        }
    }

    fn sleep(&mut self, control: Option<&UnixStream>) {
        if !self.fabric.arm() {
            return;
        }
        let mut fds = vec![PollFd::from_borrowed_fd(self.fabric.event_fd().unwrap(), PollFlags::IN)];
        if let Some(c) = control {
            fds.push(PollFd::from_borrowed_fd(c.as_fd(), PollFlags::IN));
        }
        poll(&mut fds, Some(&Timespec { tv_sec: 5, tv_nsec: 0 })).unwrap();
    }
}

fn send(s: &mut UnixStream, bytes: &[u8]) {
    s.write_all(&(bytes.len() as u32).to_le_bytes()).unwrap();
    s.write_all(bytes).unwrap();
}

fn recv(s: &mut UnixStream) -> Option<Vec<u8>> {
    let mut len = [0u8; 4];
    s.read_exact(&mut len).ok()?;
    let mut bytes = vec![0; u32::from_le_bytes(len) as usize];
    s.read_exact(&mut bytes).unwrap();
    Some(bytes)
}

/// The other process and the stream to it. Killed when dropped.
struct Peer {
    child: Child,
    control: UnixStream,
    _dir: tempfile::TempDir,
}

impl Peer {
    fn start(role: &str) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("control");
        let listener = UnixListener::bind(&path).unwrap();
        let child = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", "other_process", "--nocapture"])
            .env("KVXFER_SHM_ROLE", role)
            .env("KVXFER_SHM_CONTROL", &path)
            .spawn()
            .unwrap();
        let (control, _) = listener.accept().unwrap();
        Self { child, control, _dir: dir }
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_raw(self.child.id() as i32).unwrap(), signal).unwrap();
    }
}

impl Drop for Peer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Not a test by itself: what the second process runs.
#[test]
fn other_process() {
    let Some(role) = std::env::var_os("KVXFER_SHM_ROLE") else { return };
    let mut control = UnixStream::connect(std::env::var_os("KVXFER_SHM_CONTROL").unwrap()).unwrap();
    if role == "private source" || role == "private reader" {
        become_private();
    }
    let mut side = Side::new(&format!("kvxfer-src-{}", std::process::id()), pattern);
    if role == "private reader" {
        let blob = recv(&mut control).unwrap();
        side.fabric.connect(EpId(1), EndRole::Active, &blob, &LENS).unwrap();
        let end = side.until("refusal", |c| {
            matches!(c, Completion::Connected { .. } | Completion::ConnectFailed { .. })
        });
        send(&mut control, format!("{end:?}").as_bytes());
        return;
    }
    if role == "reader" {
        let blob = recv(&mut control).unwrap();
        let mine = side.fabric.describe().unwrap();
        side.fabric.connect(EpId(1), EndRole::Active, &blob, &LENS).unwrap();
        send(&mut control, &mine);
        side.until("attach", |c| matches!(c, Completion::Connected { .. }));
    }
    let mut next_ep = 10;
    loop {
        side.fabric.progress(&mut side.events);
        side.sleep(Some(&control));
        let ready = {
            let mut fds = [PollFd::from_borrowed_fd(control.as_fd(), PollFlags::IN)];
            poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).unwrap() > 0
        };
        if !ready {
            continue;
        }
        let Some(order) = recv(&mut control) else { return };
        match order.split_first() {
            Some((b'd', _)) => {
                let blob = side.fabric.describe().unwrap();
                send(&mut control, &blob);
            }
            Some((b'p', blob)) => {
                side.fabric.connect(EpId(next_ep), EndRole::Passive, blob, &LENS).unwrap();
                next_ep += 1;
            }
            Some((b'c', _)) => {
                let whole = (0..2).all(|r| {
                    side.bytes(r).iter().enumerate().all(|(i, b)| *b == pattern(r as u64, i as u64))
                });
                send(&mut control, &[u8::from(whole)]);
            }
            other => panic!("{other:?}"),
        }
    }
}

/// Gives up root's right to read every process, and forbids others of the same user to read this one.
fn become_private() {
    const NOBODY: libc::uid_t = 65534;
    // SAFETY: both calls take numbers only.
    unsafe {
        if libc::geteuid() == 0 {
            assert_eq!(libc::setresuid(NOBODY, NOBODY, NOBODY), 0);
        }
        assert_eq!(libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0), 0);
    }
}

fn ask(peer: &mut Peer, order: &[u8]) -> Vec<u8> {
    send(&mut peer.control, order);
    recv(&mut peer.control).unwrap()
}

/// Attaches endpoint `ep` to the source process.
fn attach(me: &mut Side, peer: &mut Peer, ep: u32) {
    let blob = ask(peer, b"d");
    assert!(me.fabric.reaches(&blob));
    let mine = [b"p".to_vec(), me.fabric.describe().unwrap()].concat();
    send(&mut peer.control, &mine);
    me.fabric.connect(EpId(ep), EndRole::Active, &blob, &LENS).unwrap();
    me.until("attach", |c| {
        assert!(!matches!(c, Completion::ConnectFailed { .. }), "{c:?}");
        matches!(c, Completion::Connected { ep: e, .. } if e.0 == ep)
    });
}

fn shuffled(n: u64, seed: u64) -> Vec<u64> {
    let mut v: Vec<u64> = (0..n).collect();
    let mut x = seed | 1;
    for i in (1..v.len()).rev() {
        x = x.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        v.swap(i, (x >> 33) as usize % (i + 1));
    }
    v
}

#[test]
fn shuffled_pages_arrive_byte_for_byte() {
    let mut peer = Peer::start("source");
    let mut me = Side::new("kvxfer-dst", |_, _| 0xC3);
    // Only the mapping of that process's pool has this name here; other tests have other processes.
    let name = format!("memfd:kvxfer-src-{} ", peer.child.id());
    let mapped = || {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        maps.lines().filter(|l| l.contains(&name)).map(str::to_owned).collect::<Vec<_>>()
    };
    for round in 0..3u64 {
        attach(&mut me, &mut peer, round as u32);
        let lines = mapped();
        assert_eq!(lines.len(), 1);
        assert!(lines[0].contains(" r--s "), "{lines:?}");
        let addr = usize::from_str_radix(lines[0].split('-').next().unwrap(), 16).unwrap();
        // SAFETY: only asks for more rights on a mapping that nobody uses meanwhile.
        let more = unsafe {
            rustix::mm::mprotect(
                std::ptr::with_exposed_provenance_mut(addr),
                4096,
                rustix::mm::MprotectFlags::READ | rustix::mm::MprotectFlags::WRITE,
            )
        };
        assert!(more.is_err(), "the source's memory can be made writable here");

        // Every page but the last of each region, the last stays as a canary.
        let (from, to) = (shuffled(PAGES, round + 1), shuffled(PAGES - 1, round + 100));
        let mut want = vec![vec![0xC3u8; LENS[0] as usize]; 2];
        for dst in 0..2 {
            me.bytes(dst).fill(0xC3);
        }
        let mut batch = Vec::new();
        for dst in 0..2u32 {
            let src = 1 - dst;
            for (s, d) in from.iter().zip(&to) {
                batch.push(Piece {
                    src_region: src,
                    src_off: s * PAGE,
                    dst_region: dst,
                    dst_off: d * PAGE,
                    len: PAGE,
                });
                for i in 0..PAGE {
                    want[dst as usize][(d * PAGE + i) as usize] = pattern(u64::from(src), s * PAGE + i);
                }
            }
        }
        let before = me.fabric.data_syscalls();
        me.fabric.post(EpId(round as u32), &batch).unwrap();
        me.fabric.flush(EpId(round as u32), round).unwrap();
        me.until(
            "flush",
            |c| matches!(c, Completion::Flushed { ticket, result: Ok(()), .. } if *ticket == round),
        );
        assert_eq!(me.fabric.data_syscalls() - before, 1, "511 pieces of engine memory are one call");
        for (region, bytes) in want.iter().enumerate() {
            assert!(me.bytes(region) == &bytes[..], "region {region} differs");
        }
        me.fabric.disconnect(EpId(round as u32));
        assert!(mapped().is_empty(), "still mapped");
        assert_eq!(ask(&mut peer, b"c"), [1], "the source's memory changed");
    }
}

#[test]
fn a_killed_source_is_seen() {
    let mut peer = Peer::start("source");
    let mut me = Side::new("kvxfer-dst", |_, _| 0);
    attach(&mut me, &mut peer, 1);
    peer.signal(Signal::KILL);
    me.until("death", |c| matches!(c, Completion::PeerDied { ep: EpId(1) }));
    let piece = Piece { src_region: 1, src_off: 0, dst_region: 1, dst_off: 0, len: 8 };
    assert!(me.fabric.post(EpId(1), &[piece]).is_err());
    me.fabric.flush(EpId(1), 5).unwrap();
    me.until("flush", |c| matches!(c, Completion::Flushed { ticket: 5, result: Err(_), .. }));
    me.fabric.fence(EpId(1), 6).unwrap();
    me.until("fence", |c| matches!(c, Completion::Fenced { ticket: 6, result: Ok(()), .. }));
}

/// The death is found by the copy itself when it comes before the next `progress`.
#[test]
fn a_source_that_died_unnoticed_gives_no_bytes() {
    let mut peer = Peer::start("source");
    let mut me = Side::new("kvxfer-dst", |_, _| 0);
    attach(&mut me, &mut peer, 1);
    me.events.clear();
    peer.signal(Signal::KILL);
    peer.child.wait().unwrap();
    let piece = Piece { src_region: 1, src_off: 0, dst_region: 1, dst_off: 0, len: 8 };
    let error = me.fabric.post(EpId(1), &[piece]).unwrap_err().to_string();
    assert!(error.contains("ESRCH"), "{error}");
    assert!(me.plain.iter().all(|b| *b == 0));
    me.until("death", |c| matches!(c, Completion::PeerDied { ep: EpId(1) }));
}

#[test]
fn a_killed_reader_is_seen() {
    let mut peer = Peer::start("reader");
    let mut me = Side::new("kvxfer-dst", pattern);
    let blob = me.fabric.describe().unwrap();
    send(&mut peer.control, &blob);
    let theirs = recv(&mut peer.control).unwrap();
    me.fabric.connect(EpId(3), EndRole::Passive, &theirs, &LENS).unwrap();
    me.until("attach", |c| matches!(c, Completion::Connected { ep: EpId(3), .. }));
    peer.signal(Signal::KILL);
    me.until("death", |c| matches!(c, Completion::PeerDied { ep: EpId(3) }));
}

#[test]
fn a_stopped_source_holds_nobody_up() {
    let mut peer = Peer::start("source");
    let mut me = Side::new("kvxfer-dst", |_, _| 0);
    let blob = ask(&mut peer, b"d");
    attach(&mut me, &mut peer, 1);
    peer.signal(Signal::STOP);
    let pid = Pid::from_raw(peer.child.id() as i32);
    waitpid(pid, WaitOptions::UNTRACED).unwrap();
    // What is attached still can be read: only the reader's thread works.
    let piece = |region| Piece { src_region: region, src_off: 9, dst_region: 0, dst_off: 0, len: 8 };
    me.fabric.post(EpId(1), &[piece(0), piece(1)]).unwrap();
    assert_eq!(me.bytes(0)[0], pattern(1, 9));
    // What is not cannot, and giving up needs no answer.
    me.fabric.connect(EpId(2), EndRole::Active, &blob, &LENS).unwrap();
    me.events.clear();
    me.fabric.progress(&mut me.events);
    assert!(me.events.is_empty(), "{:?}", me.events);
    me.fabric.fence(EpId(2), 1).unwrap();
    me.until("fence", |c| matches!(c, Completion::Fenced { ep: EpId(2), ticket: 1, result: Ok(()) }));
    peer.signal(Signal::CONT);
    attach(&mut me, &mut peer, 3);
}

#[test]
fn ptrace_rules_are_named_when_connecting() {
    let mut source = Peer::start("private source");
    let mut reader = Peer::start("private reader");
    let blob = ask(&mut source, b"d");
    let end = String::from_utf8(ask(&mut reader, &blob)).unwrap();
    for word in ["ConnectFailed", "process_vm_readv", "ptrace_scope", "UCX_TLS=tcp"] {
        assert!(end.contains(word), "{word} is not in {end}");
    }
}
