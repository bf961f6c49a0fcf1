//! When what writes to a peer take is measured: once a kind of peer, one at a time, and not for ever. Over UCX, from decode
//! ranks whose fabric moves only when the test has it move.

#![allow(clippy::unwrap_used, clippy::expect_used, clippy::print_stdout, clippy::cast_possible_truncation)]

#[path = "support/raw.rs"]
mod raw;
mod support;

use kvxfer_engine::FabricChoice;
use kvxfer_fabric::ucx::{UcxFabric, UcxOptions};
use kvxfer_fabric::{EndRole, EpId, Fabric, RegionSpan};
use kvxfer_proto::msg::{Attach, Attached, FabricOffer, Frame, Grant, Msg, Owed, Verify};
use kvxfer_proto::plan::ORDER;
use kvxfer_proto::wire::Decoded;
use kvxfer_proto::{Order, Room, Seq, Side};
use raw::{Raw, decode_rank, transfer};
use std::fs::File;
use std::io::Read;
use std::net::TcpStream;
use std::os::unix::fs::FileExt;
use std::sync::Arc;
use std::time::{Duration, Instant};
use support::{LIMIT, Memory, Party, party_with, push, side};

/// After so long a measurement is given up.
const WAIT: Duration = Duration::from_secs(2);
const SLOT_BYTES: u64 = 64 << 10;
const SLOTS: u32 = 4;
const EP: EpId = EpId(1);
const TOKENS: u64 = 48;

/// Whether there is a UCX to test with; where one is required, its absence is a failure.
fn ucx_is_here() -> bool {
    match kvxfer_fabric::ucx::probe(&UcxOptions::default()) {
        Ok(_) => true,
        Err(e) if std::env::var_os("KVXFER_REQUIRE_UCX").is_some() => panic!("UCX is required: {e}"),
        Err(e) => {
            println!("skipped: {e}");
            false
        }
    }
}

/// One of two ranks: pushes to a rank with all heads are rows of 256 bytes.
fn rank(tp_rank: u32, tp_size: u32) -> Side {
    let mut side = side(tp_rank, tp_size);
    side.groups[0].order = Order::Nhd;
    side
}

fn prefill() -> Party {
    let side = rank(0, 2);
    let mut memory = Memory::new(&side, false);
    memory.fill(|_| 7);
    party_with("prefill", side, FabricChoice::Ucx, memory, |c| {
        c.ucx_tls = Some("tcp,self".to_owned());
        // Ranks that do not answer are not what this is about.
        c.node.suspect_after = LIMIT;
    })
}

/// What a ring begins with where measurements write: neither what pages hold nor what fresh memory does.
const UNTOUCHED: [u8; 8] = [0xa5; 8];

/// Where that is.
fn probed_at(ring: &RegionSpan) -> u64 {
    ring.addr + SLOT_BYTES * u64::from(SLOTS)
}

/// A decode rank with a ring.
struct Decode {
    raw: Raw<TcpStream>,
    fabric: UcxFabric,
    ring: RegionSpan,
    offer: Vec<u8>,
    /// Keeps its place: peers write to it.
    _memory: Memory,
    /// Whether its fabric answers, and whether it answers pings.
    moves: bool,
    answers: bool,
    attached: Option<Attached>,
    others: Vec<Msg>,
}

impl Decode {
    fn new(p: &Party, me: u64) -> Self {
        let memory = Memory::new(&rank(0, 1), false);
        let options = UcxOptions { tls: Some("tcp,self".to_owned()), ..UcxOptions::default() };
        let mut fabric = UcxFabric::new(&memory.spans, &options).unwrap();
        let (region, ring) = fabric.add_memory(SLOT_BYTES * u64::from(SLOTS + 1)).unwrap();
        let memory_file = File::options().write(true).open("/proc/self/mem").unwrap();
        memory_file.write_all_at(&UNTOUCHED, probed_at(&ring)).unwrap();
        let key = fabric.export_memory(region).unwrap();
        let len = u32::try_from(key.len()).unwrap();
        let offer = [ORDER.to_le_bytes().as_slice(), &len.to_le_bytes(), &key].concat();
        let (raw, theirs) = transfer(p.agent.address(), me, || {
            let mut ours = decode_rank(format!("decode-{me}"), &rank(0, 1));
            ours.staging = (SLOT_BYTES, SLOTS);
            ours.fabrics = vec![FabricOffer { name: "ucx".to_owned(), blob: fabric.describe().unwrap() }];
            ours
        });
        let lens: Vec<u64> = theirs.regions.iter().map(|r| r.len).collect();
        fabric.connect(EP, EndRole::Passive, &theirs.fabrics[0].blob, &lens).unwrap();
        raw.stream.set_nonblocking(true).unwrap();
        Self {
            raw,
            fabric,
            ring,
            offer,
            _memory: memory,
            moves: true,
            answers: true,
            attached: None,
            others: Vec::new(),
        }
    }

    fn attach(&mut self, with_ring: bool) {
        self.attached = None;
        let ring = with_ring.then(|| self.offer.clone());
        self.raw.send(Msg::Attach(Attach { fabric: "ucx".to_owned(), ring }), 0).unwrap();
    }

    /// Whether anything was written to the part of the ring that is for measurements.
    fn was_measured(&self) -> bool {
        let mut word = UNTOUCHED;
        File::open("/proc/self/mem").unwrap().read_exact_at(&mut word, probed_at(&self.ring)).unwrap();
        word != UNTOUCHED
    }

    /// One turn: a bit of time for the fabric, and what has come on the control channel.
    fn turn(&mut self) {
        if self.moves {
            self.fabric.progress(&mut Vec::new());
        }
        let mut buf = [0u8; 4096];
        match self.raw.stream.read(&mut buf) {
            Ok(n) => {
                assert!(n > 0, "the agent has closed: {:?}", self.others);
                self.raw.decoder.feed(&buf[..n]);
            }
            Err(e) => {
                assert_eq!(e.kind(), std::io::ErrorKind::WouldBlock, "{e}");
                std::thread::yield_now();
            }
        }
        while let Some(Decoded::Frame(Frame { msg, .. })) = self.raw.decoder.next_frame().unwrap() {
            match msg {
                Msg::Ping(n) if self.answers => self.raw.send(Msg::Pong(n), 0).unwrap(),
                Msg::Ping(_) => {}
                Msg::Attached(m) => self.attached = Some(m),
                msg => self.others.push(msg),
            }
        }
    }

    fn until(&mut self, what: &str, done: impl Fn(&Self) -> bool) {
        let end = Instant::now() + LIMIT;
        while !done(self) {
            assert!(Instant::now() < end, "never: {what}: {:?}, {:?}", self.attached, self.others);
            self.turn();
        }
    }

    fn until_attached(&mut self) {
        self.until("attached", |d| d.attached.is_some());
        let attached = self.attached.as_ref().unwrap();
        assert!(attached.error.is_none(), "{attached:?}");
    }
}

/// Grants a room to the only source, which pushes it. Returns how many deliveries went packed and direct so far.
fn hand_off(p: &Party, d: &mut Decode, room: u64) -> (u64, u64) {
    let grant = Grant {
        room: Room::new(room).unwrap(),
        seq: Seq(room),
        tokens: (0, TOKENS),
        owed: Some(Owed { layers: (0, 3), tokens: (0, TOKENS) }),
        pages: vec![Arc::from([3, 1, 2].as_slice())],
        ranks: 1,
        verify: Verify::Off,
        deadline_us: 600_000_000,
        credits: 0,
    };
    d.raw.send(Msg::Grant(grant), room).unwrap();
    p.agent.push(push(room, &[4, 8, 6], 0, TOKENS)).unwrap();
    let chosen = |p: &Party| {
        let stats = p.agent.stats();
        (stats.packed_deliveries, stats.direct_deliveries)
    };
    d.until("a delivery", |_| chosen(p) != (0, 0));
    chosen(p)
}

#[test]
fn ucx_a_measurement_that_is_not_answered_is_given_up_and_its_peer_gets_single_writes() {
    if !ucx_is_here() {
        return;
    }
    for fabric_stops in [true, false] {
        let p = prefill();
        let mut d = Decode::new(&p, 100);
        (d.moves, d.answers) = (true, fabric_stops);
        let began = Instant::now();
        d.attach(true);
        d.until("a measurement", Decode::was_measured);
        d.moves = !fabric_stops;
        d.until_attached();
        let took = began.elapsed();
        assert!(took >= WAIT, "given up after {took:?}");
        d.moves = true;
        assert_eq!(hand_off(&p, &mut d, 1), (0, 1), "without a cost nothing is packed");
        d.until("the end of the push", |d| d.others.iter().any(|m| matches!(m, Msg::Done(_))));
        // Nothing was learnt, so the next one is measured.
        let mut next = Decode::new(&p, 101);
        next.attach(true);
        next.until_attached();
        assert!(next.was_measured());
    }
}

#[test]
fn ucx_a_kind_of_peer_is_measured_once_and_one_peer_at_a_time() {
    if !ucx_is_here() {
        return;
    }
    let p = prefill();
    let (mut d, mut beside) = (Decode::new(&p, 100), Decode::new(&p, 101));
    beside.attach(false);
    beside.until_attached();
    let began = Instant::now();
    d.attach(true);
    d.until("a measurement", Decode::was_measured);
    // Its fabric rests, so that the measurement is under way when the other one asks.
    beside.attach(true);
    beside.until_attached();
    if began.elapsed() < WAIT {
        assert!(!beside.was_measured() && d.attached.is_none(), "two at a time");
    }
    d.until_attached();
    if began.elapsed() >= WAIT {
        return;
    }
    // Its kind is known, also if the ring comes after the endpoint.
    for (me, first_without) in [(102, false), (103, true)] {
        let mut after = Decode::new(&p, me);
        if first_without {
            after.attach(false);
            after.until_attached();
        }
        after.attach(true);
        after.until_attached();
        assert!(!after.was_measured(), "its kind is known");
    }
}

#[test]
fn ucx_a_peer_that_came_while_another_was_measured_is_measured_at_its_first_push_since() {
    if !ucx_is_here() {
        return;
    }
    let p = prefill();
    let (mut d, mut beside) = (Decode::new(&p, 100), Decode::new(&p, 101));
    beside.attach(false);
    beside.until_attached();
    d.answers = false;
    let began = Instant::now();
    d.attach(true);
    d.until("a measurement", Decode::was_measured);
    beside.attach(true);
    beside.until_attached();
    let at_once = began.elapsed() < WAIT;
    assert!(!at_once || !beside.was_measured());
    d.until_attached();
    let (_, direct) = hand_off(&p, &mut beside, 1);
    assert!(!at_once || direct == 1, "nothing was known yet");
    beside.until("a measurement", Decode::was_measured);
}
