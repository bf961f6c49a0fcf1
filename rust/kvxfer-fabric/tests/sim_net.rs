//! The simulated fabric: what it promises under faults, for many seeds.
#![allow(clippy::unwrap_used, clippy::cast_possible_truncation, clippy::cast_possible_wrap)]

use kvxfer_fabric::sim::{FenceRule, Landed, NodeId, SimConfig, SimFabric, SimNet};
use kvxfer_fabric::{Completion, EndRole, EpId, Fabric, FabricError, Mover, Piece};
use proptest::prelude::*;

const LEN: u64 = 4096;
const SENDER: EpId = EpId(1);
const RECEIVER: EpId = EpId(2);

struct Pair {
    net: SimNet,
    p: SimFabric,
    d: SimFabric,
    p_events: Vec<Completion>,
    d_events: Vec<Completion>,
}

impl Pair {
    /// Two connected nodes; the sender's region holds a pattern.
    fn new(seed: u64, config: SimConfig) -> Self {
        let net = SimNet::new(seed, config);
        let (p, d) = (net.add_node(&[LEN]), net.add_node(&[LEN]));
        let pattern: Vec<u8> = (0..LEN).map(|i| (i % 255) as u8 + 1).collect();
        net.write(p, 0, 0, &pattern).unwrap();
        let (p, d) = (net.fabric(p), net.fabric(d));
        let mut pair = Self { net, p, d, p_events: vec![], d_events: vec![] };
        pair.connect();
        pair
    }

    fn connect(&mut self) {
        let (pb, db) = (self.p.describe().unwrap(), self.d.describe().unwrap());
        assert!(self.p.reaches(&db) && self.d.reaches(&pb));
        self.p.connect(SENDER, EndRole::Active, &db, &[LEN]).unwrap();
        self.d.connect(RECEIVER, EndRole::Passive, &pb, &[LEN]).unwrap();
        while self.net.step() {}
        self.poll();
        assert!(self.p_events.iter().any(|c| matches!(c, Completion::Connected { ep: SENDER, .. })));
        assert!(self.d_events.iter().any(|c| matches!(c, Completion::Connected { ep: RECEIVER, .. })));
        self.p_events.clear();
        self.d_events.clear();
    }

    fn poll(&mut self) {
        self.p.progress(&mut self.p_events);
        self.d.progress(&mut self.d_events);
    }

    fn post(&mut self, pieces: &[(u64, u64, u64)]) {
        let batch: Vec<Piece> = pieces.iter().map(|&(s, d, n)| piece(s, d, n)).collect();
        self.p.post(SENDER, &batch).unwrap();
    }

    fn memory(&self) -> Vec<u8> {
        self.net.read(self.d.node(), 0, 0, LEN).unwrap()
    }

    /// Lets everything happen, and sees every event the moment it is there.
    fn settle(&mut self) {
        while self.net.step() {
            self.poll();
        }
        self.poll();
    }
}

fn piece(src: u64, dst: u64, len: u64) -> Piece {
    Piece { src_region: 0, src_off: src, dst_region: 0, dst_off: dst, len }
}

fn flushed(events: &[Completion], want: u64) -> Vec<Result<(), FabricError>> {
    let mine = events.iter().filter_map(|c| match c {
        Completion::Flushed { ticket, result, .. } if *ticket == want => Some(result.clone()),
        _ => None,
    });
    mine.collect()
}

fn fenced(events: &[Completion]) -> Vec<Result<(), FabricError>> {
    let mine = events.iter().filter_map(|c| match c {
        Completion::Fenced { result, .. } => Some(result.clone()),
        _ => None,
    });
    mine.collect()
}

fn broke(events: &[Completion], ep: EpId) -> bool {
    events.iter().any(|c| matches!(c, Completion::Broken { ep: e, .. } if *e == ep))
}

fn died(events: &[Completion], ep: EpId) -> bool {
    events.iter().any(|c| matches!(c, Completion::PeerDied { ep: e } if *e == ep))
}

/// Pieces to disjoint targets.
fn pieces() -> impl Strategy<Value = Vec<(u64, u64, u64)>> {
    proptest::collection::vec((0u64..LEN - 64, 1u64..=64), 1..60)
        .prop_map(|v| v.iter().enumerate().map(|(i, &(s, n))| (s, i as u64 * 64, n)).collect())
}

fn trace_of(seed: u64, reorder: bool) -> (Vec<Landed>, Vec<u8>) {
    let mut pair = Pair::new(seed, SimConfig { reorder, ..SimConfig::default() });
    for i in 0..20 {
        pair.post(&[(i * 3, i * 100, 50), (i, i * 100 + 50, 50)]);
        pair.net.advance(7);
    }
    pair.net.stop(pair.p.node());
    pair.net.advance(2_000);
    pair.net.kill(pair.p.node());
    pair.settle();
    (pair.net.take_trace(), pair.memory())
}

proptest! {
    #[test]
    fn the_seed_decides_everything(seed in any::<u64>(), reorder in any::<bool>()) {
        prop_assert_eq!(trace_of(seed, reorder), trace_of(seed, reorder));
    }

    #[test]
    fn all_bytes_are_there_when_flushed(seed in any::<u64>(), reorder in any::<bool>(), pieces in pieces()) {
        let mut pair = Pair::new(seed, SimConfig { reorder, ..SimConfig::default() });
        let half = pieces.len() / 2;
        pair.post(&pieces[..half]);
        pair.p.flush(SENDER, 1).unwrap();
        pair.post(&pieces[half..]);
        pair.p.flush(SENDER, 2).unwrap();
        let source = pair.net.read(pair.p.node(), 0, 0, LEN).unwrap();
        for (ticket, until) in [(1, half), (2, pieces.len())] {
            while flushed(&pair.p_events, ticket).is_empty() {
                prop_assert!(pair.net.step());
                pair.poll();
            }
            let memory = pair.memory();
            for &(s, d, n) in &pieces[..until] {
                let (s, d, n) = (s as usize, d as usize, n as usize);
                prop_assert_eq!(&memory[d..d + n], &source[s..s + n]);
            }
        }
        pair.settle();
        prop_assert_eq!(flushed(&pair.p_events, 1), vec![Ok(())]);
        prop_assert_eq!(flushed(&pair.p_events, 2), vec![Ok(())]);
        prop_assert_eq!(pair.net.in_flight(), 0);
    }

    #[test]
    fn nothing_lands_after_fenced(seed in any::<u64>(), reorder in any::<bool>(), pieces in pieces(), wait in 0u64..6_000) {
        let mut pair = Pair::new(seed, SimConfig { reorder, ..SimConfig::default() });
        pair.post(&pieces);
        pair.p.flush(SENDER, 1).unwrap();
        pair.net.advance(wait);
        pair.d.fence(RECEIVER, 9).unwrap();
        // The sender does not know, and goes on posting for as long as it can.
        let mut more = 0;
        while fenced(&pair.d_events).is_empty() {
            if more < 50 && pair.p.post(SENDER, &[piece(0, 0, 64)]).is_ok() {
                more += 1;
            }
            prop_assert!(pair.net.step());
            pair.poll();
        }
        prop_assert_eq!(fenced(&pair.d_events), vec![Ok(())]);
        let before = pair.memory();
        let _ = pair.net.take_trace();
        let _ = pair.p.post(SENDER, &[piece(64, 0, 64)]);
        pair.settle();
        prop_assert!(pair.net.take_trace().is_empty());
        prop_assert_eq!(pair.memory(), before);
        prop_assert_eq!(flushed(&pair.p_events, 1).len(), 1);
        prop_assert!(broke(&pair.p_events, SENDER));
        prop_assert!(pair.d.post(RECEIVER, &[]).is_err());
    }

    #[test]
    fn nothing_lands_after_an_observed_death(seed in any::<u64>(), pieces in pieces(), stopped in any::<bool>(), wait in 0u64..4_000) {
        let mut pair = Pair::new(seed, SimConfig::default());
        pair.post(&pieces);
        if stopped {
            pair.net.stop(pair.p.node());
        }
        pair.net.advance(wait);
        pair.net.restart(pair.p.node());
        while !died(&pair.d_events, RECEIVER) {
            prop_assert!(pair.net.step());
            pair.poll();
        }
        let _ = pair.net.take_trace();
        pair.settle();
        prop_assert!(pair.net.take_trace().is_empty());
        let posted = pair.p.post(SENDER, &[]);
        prop_assert!(matches!(posted, Err(FabricError::Closed(_))));
        prop_assert!(!pair.p.progress(&mut Vec::new()));
    }

    /// What a model checker does: any order at all, and still both promises hold.
    #[test]
    fn any_order_of_events_keeps_the_promises(seed in any::<u64>(), order in proptest::collection::vec(any::<usize>(), 40), reorder in any::<bool>()) {
        let mut pair = Pair::new(seed, SimConfig { reorder, ..SimConfig::default() });
        pair.post(&(0..8).map(|i| (i, i * 8, 8)).collect::<Vec<_>>());
        pair.p.flush(SENDER, 1).unwrap();
        pair.d.fence(RECEIVER, 2).unwrap();
        let mut last = None;
        let mut done = false;
        for pick in order {
            let pending = pair.net.pending();
            let Some(event) = pending.get(pick % pending.len().max(1)) else { break };
            prop_assert!(pair.net.fire(event.id));
            prop_assert!(!pair.net.fire(event.id), "twice");
            pair.poll();
            for l in pair.net.take_trace() {
                prop_assert!(reorder || last < Some(l.offset));
                last = Some(l.offset);
            }
            done = !fenced(&pair.d_events).is_empty();
            if done {
                break;
            }
        }
        pair.settle();
        prop_assert!(!done || pair.net.take_trace().is_empty());
        prop_assert_eq!(flushed(&pair.p_events, 1).len(), 1);
        prop_assert_eq!(fenced(&pair.d_events).len(), 1);
    }
}

#[test]
fn writes_overtake_each_other_only_if_allowed() {
    let offsets = |seed, reorder| -> Vec<u64> {
        let mut pair = Pair::new(seed, SimConfig { reorder, ..SimConfig::default() });
        pair.post(&(0..32).map(|i| (0, i * 8, 8)).collect::<Vec<_>>());
        pair.settle();
        pair.net.take_trace().iter().map(|l| l.offset).collect()
    };
    assert!((0..20).all(|seed| offsets(seed, false).is_sorted()));
    assert!((0..20).all(|seed| !offsets(seed, true).is_sorted()));
}

#[test]
fn bounds_are_checked_before_anything_is_posted() {
    let mut pair = Pair::new(5, SimConfig::default());
    let good = piece(0, 0, 8);
    for bad in [
        piece(LEN - 7, 0, 8),
        piece(0, LEN, 1),
        piece(u64::MAX, 0, 2),
        Piece { src_region: 1, ..good },
        Piece { dst_region: 1, ..good },
    ] {
        assert!(matches!(pair.p.post(SENDER, &[good, bad]), Err(FabricError::OutOfBounds { .. })));
    }
    pair.settle();
    assert!(pair.net.take_trace().is_empty());
    assert!(matches!(pair.d.post(RECEIVER, &[good]), Err(FabricError::Closed(_))));
    assert!(matches!(pair.p.post(EpId(77), &[good]), Err(FabricError::NoEndpoint(77))));
    assert_eq!((pair.p.mover(), pair.p.name()), (Mover::Sender, "sim"));
}

/// The field's worst bug: a broken or closed endpoint whose writes land later.
#[test]
fn writes_outlive_their_endpoint() {
    let survives = |seed, fault: fn(&mut Pair)| {
        let mut pair = Pair::new(seed, SimConfig::default());
        pair.post(&(0..16).map(|i| (0, i * 8, 8)).collect::<Vec<_>>());
        pair.p.flush(SENDER, 1).unwrap();
        fault(&mut pair);
        let mut late = 0;
        while pair.net.step() {
            pair.poll();
            let landed = pair.net.take_trace().len();
            if broke(&pair.d_events, RECEIVER) {
                late += landed;
            }
        }
        assert!(matches!(flushed(&pair.p_events, 1)[..], [Err(_)]));
        late
    };
    let broken: usize = (0..10).map(|s| survives(s, |p| p.net.break_endpoint(p.d.node(), RECEIVER))).sum();
    let closed: usize = (0..10).map(|s| survives(s, |p| p.p.disconnect(SENDER))).sum();
    assert!(broken > 0 && closed > 0, "{broken} {closed}");
}

#[test]
fn a_stopped_node_does_nothing_and_its_writes_land_later() {
    let mut later = 0;
    for seed in 0..10 {
        let mut pair = Pair::new(seed, SimConfig::default());
        pair.post(&(0..16).map(|i| (0, i * 8, 8)).collect::<Vec<_>>());
        pair.p.flush(SENDER, 1).unwrap();
        pair.net.stop(pair.p.node());
        pair.net.advance(1_000_000);
        pair.poll();
        assert!(pair.p_events.is_empty() && pair.p.arm());
        let held = pair.net.in_flight();
        assert_eq!(pair.net.take_trace().len() + held, 16);
        pair.net.resume(pair.p.node());
        pair.settle();
        later += held;
        assert_eq!(pair.net.take_trace().len(), held);
        assert_eq!(flushed(&pair.p_events, 1), vec![Ok(())]);
    }
    assert!(later > 0);
}

#[test]
fn a_killed_nodes_writes_land_until_the_death_is_seen() {
    let mut late = 0;
    for seed in 0..20 {
        let mut pair = Pair::new(seed, SimConfig::default());
        pair.post(&(0..16).map(|i| (i, i * 8, 8)).collect::<Vec<_>>());
        pair.net.kill(pair.p.node());
        pair.settle();
        for l in pair.net.take_trace() {
            late += 1;
            let want: Vec<u8> = (0..8).map(|i| ((l.offset / 8 + i) % 255) as u8 + 1).collect();
            assert_eq!(pair.net.read(l.to, 0, l.offset, 8).unwrap(), want);
        }
        assert!(died(&pair.d_events, RECEIVER));
    }
    assert!(late > 0);
    let mut far = Pair::new(1, SimConfig { observe_death: false, ..SimConfig::default() });
    far.net.kill(far.p.node());
    far.settle();
    assert!(matches!(far.d_events[..], [Completion::Broken { ep: RECEIVER, .. }]), "{:?}", far.d_events);
}

#[test]
fn a_restarted_receiver_is_another_peer() {
    let mut pair = Pair::new(3, SimConfig::default());
    let stale = pair.d.describe().unwrap();
    pair.post(&[(0, 0, 64)]);
    pair.p.flush(SENDER, 1).unwrap();
    pair.net.restart(pair.d.node());
    pair.settle();
    assert!(pair.net.take_trace().is_empty());
    assert!(pair.memory().iter().all(|b| *b == 0), "landed in the new process");
    assert!(matches!(flushed(&pair.p_events, 1)[..], [Err(_)]));
    pair.p.disconnect(SENDER);
    pair.p.connect(SENDER, EndRole::Active, &stale, &[LEN]).unwrap();
    pair.p_events.clear();
    pair.settle();
    assert!(matches!(pair.p_events[..], [Completion::ConnectFailed { ep: SENDER, .. }]));
    pair.d = pair.net.fabric(pair.d.node());
    pair.connect();
    pair.post(&[(0, 0, 64)]);
    pair.settle();
    assert_eq!(pair.net.take_trace().len(), 1);
}

#[test]
fn fences_that_cannot_be_promised_say_so() {
    let mut late = 0;
    for seed in 0..20 {
        let config = SimConfig { fence: FenceRule::Impossible, ..SimConfig::default() };
        let mut pair = Pair::new(seed, SimConfig { fence_delay_us: (1, 10), ..config });
        pair.post(&(0..16).map(|i| (0, i * 8, 8)).collect::<Vec<_>>());
        pair.d.fence(RECEIVER, 1).unwrap();
        while fenced(&pair.d_events).is_empty() {
            assert!(pair.net.step());
            pair.poll();
        }
        assert!(matches!(fenced(&pair.d_events)[..], [Err(FabricError::NoFence { .. })]));
        let _ = pair.net.take_trace();
        pair.settle();
        late += pair.net.take_trace().len();
    }
    assert!(late > 0);
}

#[test]
fn sources_are_read_late() {
    let mut pair = Pair::new(8, SimConfig::default());
    pair.post(&[(0, 0, 8)]);
    pair.net.write(pair.p.node(), 0, 0, &[0xAB; 8]).unwrap();
    pair.settle();
    assert_eq!(pair.memory()[..8], [0xAB; 8]);
}

/// After a sender's own fence its pages are another's; what it had posted can land, with the bytes of before.
#[test]
fn a_senders_fence_ends_the_reading_of_its_memory() {
    let mut landed = 0;
    for seed in 0..40 {
        let rule =
            SimConfig { fence: FenceRule::Impossible, fence_delay_us: (1, 500), ..SimConfig::default() };
        let mut pair = Pair::new(seed, rule);
        pair.post(&(0..40).map(|i| (i * 8, i * 8, 8)).collect::<Vec<_>>());
        pair.p.fence(SENDER, 1).unwrap();
        while fenced(&pair.p_events).is_empty() {
            assert!(pair.net.step());
            pair.poll();
        }
        assert_eq!(fenced(&pair.p_events), [Ok(())]);
        let before = pair.net.take_trace().len();
        pair.net.write(pair.p.node(), 0, 0, &[0; LEN as usize]).unwrap();
        pair.settle();
        let after = pair.net.take_trace();
        landed += after.len();
        assert!(before < 40);
        for write in after {
            let got = pair.net.read(pair.d.node(), 0, write.offset, write.len).unwrap();
            assert!(got.iter().all(|b| *b != 0), "seed {seed}: {write:?} brought bytes of after the fence");
        }
    }
    assert!(landed > 0);
}

#[test]
fn forks_go_their_own_ways() {
    let mut pair = Pair::new(8, SimConfig::default());
    pair.post(&(0..16).map(|i| (0, i * 8, 8)).collect::<Vec<_>>());
    let fork = pair.net.fork();
    pair.settle();
    let here = pair.net.take_trace();
    assert_eq!((here.len(), fork.in_flight()), (16, 16));
    assert!(fork.read(NodeId(1), 0, 0, LEN).unwrap().iter().all(|b| *b == 0));
    let mut p = fork.fabric(NodeId(0));
    p.flush(SENDER, 4).unwrap();
    while fork.step() {}
    assert_eq!(fork.take_trace(), here);
    let mut events = vec![];
    p.progress(&mut events);
    assert_eq!(flushed(&events, 4), vec![Ok(())]);
    assert!(flushed(&pair.p_events, 4).is_empty());
}

#[test]
fn connecting_needs_both_sides_and_the_right_lengths() {
    let net = SimNet::new(1, SimConfig::default());
    let (a, b) = (net.add_node(&[64]), net.add_node(&[64, 32]));
    let (mut a, mut b) = (net.fabric(a), net.fabric(b));
    let (ab, bb) = (a.describe().unwrap(), b.describe().unwrap());
    let mut events = vec![];
    a.connect(EpId(1), EndRole::Active, &bb, &[64]).unwrap();
    a.connect(EpId(2), EndRole::Active, &bb, &[64, 32]).unwrap();
    assert!(a.connect(EpId(2), EndRole::Active, &bb, &[64, 32]).is_err(), "the number is taken");
    assert!(matches!(a.connect(EpId(3), EndRole::Active, b"xx", &[]), Err(FabricError::BadBlob { .. })));
    while net.step() {}
    a.progress(&mut events);
    assert!(matches!(
        events[..],
        [Completion::ConnectFailed { ep: EpId(1), error: FabricError::BadBlob { .. } }]
    ));
    events.clear();
    net.stop(b.node());
    net.resume(b.node());
    b.connect(EpId(7), EndRole::Passive, &ab, &[64]).unwrap();
    while net.step() {}
    a.progress(&mut events);
    assert!(matches!(events[..], [Completion::Connected { ep: EpId(2), .. }]), "{events:?}");
    let other = SimNet::new(2, SimConfig::default());
    other.add_node(&[]);
    assert!(!other.fabric(NodeId(0)).reaches(&bb));
}
