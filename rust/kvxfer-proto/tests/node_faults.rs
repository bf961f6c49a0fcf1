//! The state machines under virtual time: what an agent promises, with sessions lost, data late, peers restarted.

mod sim;

use kvxfer_proto::msg::Verify;
use kvxfer_proto::node::{Config, EventKind, Expect, Mover, Push, Source};
use kvxfer_proto::{DType, Kind, Order, PageLayout, PushId, Reason, ReasonKind, Room, Shard, Side};
use sim::{Net, page_tag};
use std::sync::Arc;
use std::time::Duration;

const BOTH: [Mover; 2] = [Mover::Sender, Mover::Receiver];
const SECOND: u64 = 1_000_000;

fn side(tp_rank: u32, tp_size: u32) -> Side {
    let layout = PageLayout {
        layers: 2,
        kv_heads: 4,
        head_dim: 2,
        page_tokens: 4,
        dtype: DType::Uint8,
        order: Order::Hnd,
        kind: Kind::Kv,
    };
    Side { groups: vec![layout], shard: Shard { tp_rank, tp_size, pp_rank: 0, pp_size: 1 } }
}

fn room(n: u64) -> Room {
    Room::new(n).unwrap()
}

fn ids(v: &[u32]) -> Vec<Arc<[u32]>> {
    vec![Arc::from(v)]
}

fn expect(r: u64, pages: &[u32], tokens: (u64, u64)) -> Expect {
    Expect {
        room: room(r),
        pages: ids(pages),
        tokens,
        source: Source { address: "dir".into(), dp_rank: 0 },
        verify: Verify::Off,
        bootstrap_timeout: None,
        waiting_timeout: None,
    }
}

fn push(r: u64, id: u64, pages: &[u32], tokens: (u64, u64)) -> Push {
    Push {
        room: room(r),
        id: PushId(id),
        pages: ids(pages),
        tokens,
        layers: None,
        last: true,
        meta: None,
        ready: true,
        bootstrap_timeout: None,
        waiting_timeout: None,
    }
}

/// Prefill 0..tp_p, then decode: the net, and the index of the first decode rank.
fn net(seed: u64, mover: Mover, tp_p: u32, tp_d: u32) -> (Net, usize) {
    let mut net = Net::new(seed, mover);
    for r in 0..tp_p {
        net.add(&format!("prefill-{r}"), Config::default(), side(r, tp_p), 32);
    }
    for r in 0..tp_d {
        net.add(&format!("decode-{r}"), Config::default(), side(r, tp_d), 32);
    }
    net.directory.insert("dir".into(), (0..tp_p as usize).collect());
    (net, tp_p as usize)
}

/// Writes the room's tokens into pages of a node: the value depends on room, layer, part, head, token and element.
fn fill(net: &mut Net, node: usize, r: u64, pages: &[u32], first: u64, tokens: std::ops::Range<u64>) {
    each(net, node, pages, first, tokens, |byte, tag| *byte = page_tag(room(r), tag.0, tag.1));
}

fn each(
    net: &mut Net,
    node: usize,
    pages: &[u32],
    first: u64,
    tokens: std::ops::Range<u64>,
    mut f: impl FnMut(&mut u8, (u64, u64)),
) {
    let n = &mut net.nodes[node];
    let s = n.side.clone();
    let layout = s.groups[0];
    let heads = s.shard.heads(&layout).unwrap();
    let count = u64::from(heads.end - heads.start);
    let (pt, dim) = (u64::from(layout.page_tokens), u64::from(layout.head_dim));
    for (i, shape) in s.regions(&n.page_counts).unwrap().iter().enumerate() {
        for t in tokens.clone() {
            let page = u64::from(pages[(t / pt - first / pt) as usize]);
            for h in 0..count {
                for d in 0..dim {
                    let off = ((page * count + h) * pt + t % pt) * dim + d;
                    let tag = (u64::from(shape.layer) << 8)
                        | (u64::from(shape.part) << 4)
                        | (u64::from(heads.start) + h);
                    f(&mut n.memory[i][off as usize], (t, tag * 16 + d));
                }
            }
        }
    }
}

fn assert_arrived(
    net: &mut Net,
    node: usize,
    r: u64,
    pages: &[u32],
    first: u64,
    tokens: std::ops::Range<u64>,
) {
    let mut wrong = 0;
    each(net, node, pages, first, tokens, |byte, tag| {
        wrong += u32::from(*byte != page_tag(room(r), tag.0, tag.1))
    });
    assert_eq!(wrong, 0, "bytes of room {r} at node {node}");
}

/// Exactly one terminal event, exactly one release, and no write on a page that was not granted.
fn assert_contract(net: &Net, node: usize, r: u64) -> bool {
    assert_eq!(net.violations, Vec::<String>::new());
    let events: Vec<_> = net.nodes[node].events.iter().filter(|e| e.room == room(r)).collect();
    let terminal =
        events.iter().filter(|e| matches!(e.kind, EventKind::Success | EventKind::Failed(_))).count();
    let released = events.iter().filter(|e| e.released && !matches!(e.kind, EventKind::Retracted(_))).count();
    assert_eq!((terminal, released), (1, 1), "events of room {r} at {}: {events:?}", net.nodes[node].name);
    events.iter().any(|e| e.kind == EventKind::Success)
}

fn failure(net: &Net, node: usize, r: u64) -> Reason {
    let found = net.events_of(node, room(r)).into_iter().find_map(|e| match e {
        EventKind::Failed(reason) => Some(reason.clone()),
        _ => None,
    });
    found.expect("a failure")
}

// ---------------------------------------------------------------- review tests

use kvxfer_proto::msg::{Cancel, Done, Drained, Finished, Frame, Grant, Msg, Owed, Ready, Retract};
use kvxfer_proto::node::{
    Action, DeliveryEnd, DeliveryId, Direction, Event, Node, PeerKey, RankInfo, SessionUp,
};
use kvxfer_proto::{Incarnation, Seq, SessionNo, Time};

struct Solo {
    node: Node,
    t: u64,
    peers: Vec<(PeerKey, SessionNo, u64)>,
    sent: Vec<(PeerKey, u64, Msg)>,
    delivers: Vec<kvxfer_proto::node::Delivery>,
    events: Vec<Event>,
    aborts: Vec<DeliveryId>,
    fences: Vec<PeerKey>,
    connects: Vec<PeerKey>,
}
impl Solo {
    fn new(cfg: Config) -> Self {
        Self {
            node: Node::new(cfg, side(0, 1), &[32]).unwrap(),
            t: 1,
            peers: vec![],
            sent: vec![],
            delivers: vec![],
            events: vec![],
            aborts: vec![],
            fences: vec![],
            connects: vec![],
        }
    }
    fn now(&self) -> Time {
        Time(self.t)
    }
    fn pump(&mut self) {
        while let Some(a) = self.node.poll_action() {
            match a {
                Action::Send { peer, number, msg, .. } => self.sent.push((peer, number, msg)),
                Action::Deliver(d) => self.delivers.push(d),
                Action::Event(e) => self.events.push(e),
                Action::Abort(i) => self.aborts.push(i),
                Action::Fence(k) => self.fences.push(k),
                Action::Connect(k) => self.connects.push(k),
                _ => {}
            }
        }
    }
    fn up(
        &mut self,
        inc: u64,
        dir: Direction,
        mover: Option<Mover>,
        received: u64,
        generation: u64,
    ) -> PeerKey {
        let key = PeerKey { incarnation: Incarnation(inc), direction: dir };
        let s = self.node.next_session(key);
        let own = self.node.link_state(key).1;
        self.node.handle_session_up(
            self.now(),
            SessionUp {
                peer: key,
                session: s,
                received,
                generation,
                own_generation: own,
                side: side(0, 1),
                pages: vec![32],
                name: format!("peer{inc}"),
            },
        );
        if let Some(m) = mover {
            if self.node.session_of(key) == Some(s) {
                self.node.handle_attached(self.now(), key, m);
            }
        }
        self.peers.retain(|p| p.0 != key);
        self.peers.push((key, s, received_of(&self.node, key)));
        self.pump();
        key
    }
    fn recv(&mut self, key: PeerKey, msg: Msg) -> Result<(), Reason> {
        let p = self.peers.iter_mut().find(|p| p.0 == key).unwrap();
        p.2 += 1;
        let f = Frame { incarnation: key.incarnation, session: p.1, number: p.2, msg };
        let r = self.node.handle_frame(Time(self.t), key, f);
        self.pump();
        r
    }
    fn at(&mut self, t: u64) {
        while let Some(n) = self.node.poll_timeout() {
            if n.0 > t {
                break;
            }
            self.t = self.t.max(n.0);
            let now = self.now();
            self.node.handle_timeout(now);
            self.pump();
        }
        self.t = self.t.max(t);
    }
    fn released(&self, r: u64) -> usize {
        self.events
            .iter()
            .filter(|e| e.room == room(r) && e.released && !matches!(e.kind, EventKind::Retracted(_)))
            .count()
    }
    fn terminal(&self, r: u64) -> usize {
        self.events
            .iter()
            .filter(|e| e.room == room(r) && matches!(e.kind, EventKind::Success | EventKind::Failed(_)))
            .count()
    }
}
fn received_of(n: &Node, k: PeerKey) -> u64 {
    n.link_state(k).0
}
const WG: Direction = Direction::WeGrant;
const TG: Direction = Direction::TheyGrant;
fn src() -> Source {
    Source { address: "dir".into(), dp_rank: 0 }
}
/// A decode node with sources of these incarnations (tp = count), resolved.
fn decode(incs: &[u64]) -> Solo {
    let mut s = Solo::new(Config::default());
    s.node.handle_expect(Time(1), expect(99, &[31], (0, 4)));
    let ranks = incs
        .iter()
        .enumerate()
        .map(|(i, n)| RankInfo { incarnation: Incarnation(*n), side: side(i as u32, incs.len() as u32) })
        .collect();
    s.node.handle_resolved(Time(1), &src(), Ok(ranks));
    s.pump();
    s
}
fn owed(t: (u64, u64)) -> Owed {
    Owed { layers: (0, 2), tokens: t }
}
fn done(r: u64, seq: u64, push: u64, t: (u64, u64), last: bool) -> Msg {
    Msg::Done(Done {
        room: room(r),
        seq: Seq(seq),
        push: PushId(push),
        span: owed(t),
        last,
        end_token: t.1,
        meta: None,
        checksum: None,
        bytes: 0,
        writes: 0,
    })
}
fn grant(r: u64, seq: u64, pages: &[u32], t: (u64, u64), ranks: u32) -> Msg {
    Msg::Grant(Grant {
        room: room(r),
        seq: Seq(seq),
        tokens: t,
        owed: Some(owed(t)),
        pages: ids(pages),
        ranks,
        verify: Verify::Off,
        deadline_us: 600_000_000,
        credits: 0,
    })
}
fn why(k: ReasonKind) -> Reason {
    Reason::new(k, "test")
}

// 1. Preemption after `Done{last}` is out, before `Finished` is back.
#[test]
fn r01_repush_after_done_last_writes_into_released_pages() {
    let (mut net, d) = net(1, Mover::Sender, 1, 1);
    net.data_us = (10, 20);
    net.control_us = (100, 100);
    fill(&mut net, 0, 1, &[1, 2, 3], 0, 0..12);
    net.order(d, |n, now| n.handle_expect(now, expect(1, &[4, 5, 6], (0, 12))));
    net.push(0, push(1, 1, &[1, 2, 3], (0, 12)));
    // Until decode has its success; `Finished` is on its way.
    while net.nodes[d].events.is_empty() {
        let t = net.now;
        net.run_until(t + 1);
    }
    assert_eq!(net.nodes[d].node.gauges().granted_pages, 0);
    net.order(0, |n, now| n.handle_retract(now, room(1), PushId(1)));
    net.push(0, push(1, 2, &[7, 8, 9], (0, 12)));
    net.order(d, |n, now| n.handle_expect(now, expect(2, &[4, 5, 6], (0, 12))));
    net.run_until(SECOND);
    assert_eq!(net.violations, Vec::<String>::new());
    assert_contract(&net, 0, 1);
    assert_contract(&net, d, 1);
}

// 1b. A cancel of the other rank's failure releases on a `Done{last}` that the source has taken back.
#[test]
fn r01b_done_last_is_taken_as_ground_although_the_source_writes_again() {
    let (mut net, d) = net(3, Mover::Sender, 2, 1);
    net.data_us = (10, 20);
    net.control_us = (100, 100);
    net.order(d, |n, now| n.handle_expect(now, expect(1, &[4, 5, 6], (0, 12))));
    net.push(0, push(1, 1, &[1, 2, 3], (0, 12)));
    net.run_until(2000);
    // rank 0 is complete; rank 1 has not pushed. Rank 0 is preempted and pushes again, slowly.
    net.data_us = (5000, 6000);
    net.order(0, |n, now| n.handle_retract(now, room(1), PushId(1)));
    net.push(0, push(1, 2, &[7, 8, 9], (0, 12)));
    net.order(d, |n, now| n.handle_cancel(now, room(1), why(ReasonKind::Cancelled)));
    net.run_until(SECOND);
    assert_eq!(net.violations, Vec::<String>::new());
}

// 2. `withdraw` with a number of an earlier link generation takes another room's grant away.
#[test]
fn r02_old_grant_number_withdraws_a_message_of_the_new_generation() {
    // Two sources; rank 0 completes room 1 (its grant is over), then rank 0 is fenced while rank 1 is still out.
    let mut s = decode(&[10, 11]);
    let a = s.up(10, WG, Some(Mover::Sender), 0, 0);
    let _b = s.up(11, WG, Some(Mover::Sender), 0, 0);
    s.recv(a, done(99, 1, 1, (0, 4), true)).unwrap();
    s.node.handle_fabric_broken(Time(5), a, &why(ReasonKind::FabricError));
    s.pump();
    s.node.handle_fenced(Time(6), a, Ok(()));
    s.pump();
    assert_eq!(s.terminal(99), 0, "rank 0 had delivered");
    s.sent.clear();
    // Another room, granted on the new link; not sent yet.
    s.node.handle_expect(Time(7), expect(2, &[1], (0, 4)));
    s.pump();
    s.node.handle_cancel(Time(8), room(99), why(ReasonKind::Cancelled));
    s.pump();
    s.sent.clear();
    s.up(10, WG, Some(Mover::Sender), 0, 1);
    assert!(
        s.sent.iter().any(|(k, _, m)| *k == a && matches!(m, Msg::Grant(g) if g.room == room(2))),
        "grant of room 2 lost: {:?}",
        s.sent.iter().filter(|x| x.0 == a).collect::<Vec<_>>()
    );
}

// 3. Each flap of a session adds a heartbeat chain.
#[test]
fn r03_flaps_multiply_heartbeats() {
    let (mut net, d) = net(1, Mover::Sender, 1, 1);
    net.order(d, |n, now| n.handle_expect(now, expect(1, &[1], (0, 4))));
    net.run_until(SECOND / 2);
    for _ in 0..50 {
        net.cut_session(0, d, false);
        let t = net.now;
        net.run_until(t + 20_000);
    }
    net.run_until(30 * SECOND);
    let before = net.pings;
    net.run_until(40 * SECOND);
    let per_s = (net.pings - before) / 10;
    assert!(per_s <= 3, "{per_s} pings a second");
}

// 4. Timer entries of a busy or finished room stay for the whole waiting timeout.
#[test]
fn r04_timers_do_not_pile_up() {
    let mut s = decode(&[10]);
    let a = s.up(10, WG, Some(Mover::Sender), 0, 0);
    for i in 0..10_000u64 {
        s.t += 10;
        s.node.handle_expect(s.now(), expect(100 + i, &[1], (0, 4)));
        s.pump();
        for t in 0..4 {
            s.t += 10;
            s.recv(a, done(100 + i, 2 + i, t, (t, t + 1), t == 3)).unwrap();
        }
        let n = s.sent.len() as u64;
        s.sent.clear();
        let _ = n;
    }
    assert_eq!(s.events.len(), 10_000);
    let n = format!("{:?}", s.node).matches("Inbound(").count();
    assert!(n < 100, "{n} timer entries (with rooms)");
}

// 5. A waiting timeout shorter than what is left of the bootstrap timeout is not kept at prefill.
#[test]
fn r05_outbound_waiting_timeout() {
    let mut s = Solo::new(Config::default());
    s.node.handle_open(Time(1), room(1), None, Some(Duration::from_secs(2)));
    s.pump();
    let k = s.up(20, TG, Some(Mover::Sender), 0, 0);
    s.recv(k, grant(1, 1, &[1], (0, 4), 1)).unwrap();
    // keep the session alive
    for i in 1..60 {
        s.at(i * SECOND);
        s.recv(k, Msg::Ping(i)).unwrap();
    }
    assert_eq!(s.terminal(1), 1, "no end {} s after the grant with a waiting timeout of 2 s", s.t / SECOND);
}

// 6. An early Finished frees source pages under our writes.
#[test]
fn r06_hostile_finished_under_a_write() {
    let mut s = Solo::new(Config::default());
    let k = s.up(20, TG, Some(Mover::Sender), 0, 0);
    s.node.handle_push(Time(2), push(1, 1, &[1], (0, 4)));
    s.pump();
    s.recv(k, grant(1, 1, &[1], (0, 4), 1)).unwrap();
    assert_eq!(s.delivers.len(), 1);
    let _ = s.recv(k, Msg::Finished(Finished { room: room(1), seq: Seq(1), error: None }));
    assert_eq!(s.released(1), 0, "source pages released while a write reads them: {:?}", s.events);
}

// 7. A hostile source says Done while our own copy runs.
#[test]
fn r07_hostile_done_under_a_copy() {
    let mut s = decode(&[10]);
    let a = s.up(10, WG, Some(Mover::Receiver), 0, 0);
    s.recv(
        a,
        Msg::Ready(Ready {
            room: room(99),
            seq: Seq(1),
            push: PushId(1),
            span: owed((0, 4)),
            pages_start: 0,
            pages: ids(&[1]),
        }),
    )
    .unwrap();
    assert_eq!(s.delivers.len(), 1);
    let _ = s.recv(a, done(99, 1, 2, (0, 4), true));
    assert_eq!(s.released(99), 0, "pages released while our copy writes them: {:?}", s.events);
}

// 8. A retracted copy that still runs is forgotten.
#[test]
fn r08_retracted_copy_still_running() {
    let mut s = decode(&[10]);
    let a = s.up(10, WG, Some(Mover::Receiver), 0, 0);
    s.recv(
        a,
        Msg::Ready(Ready {
            room: room(99),
            seq: Seq(1),
            push: PushId(1),
            span: owed((0, 4)),
            pages_start: 0,
            pages: ids(&[1]),
        }),
    )
    .unwrap();
    s.recv(a, Msg::Retract(Retract { room: room(99), seq: Seq(1), push: PushId(1) })).unwrap();
    assert_eq!(s.aborts.len(), 1, "asked to stop; it has not reported its end yet");
    s.node.handle_cancel(Time(9), room(99), why(ReasonKind::Cancelled));
    s.pump();
    assert_eq!(s.released(99), 0, "pages released while our copy may still write: {:?}", s.events);
    s.node.handle_delivery(Time(10), s.delivers[0].id, DeliveryEnd::Aborted);
    s.pump();
    assert_eq!(s.released(99), 1);
}
#[test]
fn r08b_new_copy_starts_over_a_stopping_one() {
    let mut s = decode(&[10]);
    let a = s.up(10, WG, Some(Mover::Receiver), 0, 0);
    s.recv(
        a,
        Msg::Ready(Ready {
            room: room(99),
            seq: Seq(1),
            push: PushId(1),
            span: owed((0, 4)),
            pages_start: 0,
            pages: ids(&[1]),
        }),
    )
    .unwrap();
    s.recv(a, Msg::Retract(Retract { room: room(99), seq: Seq(1), push: PushId(1) })).unwrap();
    s.recv(
        a,
        Msg::Ready(Ready {
            room: room(99),
            seq: Seq(1),
            push: PushId(2),
            span: owed((0, 4)),
            pages_start: 0,
            pages: ids(&[2]),
        }),
    )
    .unwrap();
    assert_eq!(s.delivers.len(), 1, "a second copy into the same pages before the first has stopped");
}

// 9. Hostile generation.
#[test]
fn r09_hostile_generation() {
    let mut s = Solo::new(Config::default());
    let k = s.up(20, TG, None, 0, u64::MAX);
    let _ = s.recv(k, Msg::Bye(why(ReasonKind::Closed)));
    s.node.handle_fenced(Time(3), k, Ok(()));
    s.pump();
}

// 10. A live peer that does not answer a drain is fenced.
#[test]
fn r10_unanswered_drain_is_fenced() {
    let mut s = decode(&[10]);
    let a = s.up(10, WG, Some(Mover::Sender), 0, 0);
    s.node.handle_cancel(Time(9), room(99), why(ReasonKind::Cancelled));
    s.pump();
    for i in 1..600 {
        s.at(i * SECOND);
        s.recv(a, Msg::Ping(i)).unwrap();
    }
    assert_eq!(s.fences, vec![a], "600 s without an answer to the cancel, pings all the time");
}

// 11. cancel, then push: the push has no end.
#[test]
fn r11_cancel_then_push_has_a_terminal_event() {
    let mut s = Solo::new(Config::default());
    s.node.handle_cancel(Time(1), room(1), why(ReasonKind::Cancelled));
    s.pump();
    s.node.handle_push(Time(2), push(1, 1, &[1], (0, 4)));
    s.pump();
    s.at(1000 * SECOND);
    assert_eq!((s.terminal(1), s.released(1)), (1, 1));
}

// 12. open of an expected room.
#[test]
fn r12_open_of_an_expected_room() {
    let mut s = decode(&[10]);
    s.node.handle_open(Time(2), room(99), None, None);
    s.pump();
    s.at(1000 * SECOND);
    assert_eq!(s.terminal(99), 1, "{:?}", s.events);
}

// 13. A decode rank that refuses an expect (bad pages) tells the source.
#[test]
fn r13_refused_expect_is_told_to_the_source() {
    let (mut net, d) = net(1, Mover::Sender, 1, 2);
    net.push(0, push(1, 1, &[1], (0, 4)));
    net.order(d, |n, now| n.handle_expect(now, expect(1, &[1], (0, 4))));
    net.order(d + 1, |n, now| n.handle_expect(now, expect(1, &[77], (0, 4))));
    net.run_until(10 * SECOND);
    assert_eq!(net.events_of(0, room(1)).len(), 1, "prefill was not told that decode-1 has failed");
}

// 14. Retract of a chunk that brought nothing to a rank, after `last`.
#[test]
fn r14_retract_of_an_empty_piece_after_last() {
    for mover in BOTH {
        let (mut net, d) = net(3, mover, 2, 1);
        net.order(d, |n, now| n.handle_expect(now, expect(1, &[4], (8, 12))));
        let mut p = push(1, 1, &[1, 2], (0, 8));
        p.last = false;
        net.push(0, p);
        net.push(0, push(1, 2, &[3], (8, 12)));
        net.run_until(SECOND);
        net.order(0, |n, now| n.handle_retract(now, room(1), PushId(1)));
        net.run_until(2 * SECOND);
        net.push(1, push(1, 2, &[1, 2, 3], (0, 12)));
        net.run_until(10 * SECOND);
        assert_eq!(
            net.events_of(d, room(1)),
            [&EventKind::Success],
            "{mover:?}: all was delivered, nothing that decode wants was taken back"
        );
    }
}

// 15. Preemption of a room with two pushes: between the two retracts the second's delivery ends.
#[test]
fn r15_retract_of_the_first_of_two_pushes_says_last_with_a_gap() {
    for mover in BOTH {
        let (mut net, d) = net(3, mover, 1, 1);
        net.data_us = (500, 900);
        net.order(d, |n, now| n.handle_expect(now, expect(1, &[4, 5, 6], (0, 12))));
        net.run_until(SECOND);
        let mut p = push(1, 1, &[1, 2], (0, 8));
        p.last = false;
        net.push(0, p);
        net.push(0, push(1, 2, &[3], (8, 12)));
        net.order(0, |n, now| n.handle_retract(now, room(1), PushId(1)));
        net.run_until(2 * SECOND);
        net.order(0, |n, now| n.handle_retract(now, room(1), PushId(2)));
        net.push(0, push(1, 3, &[7, 8, 9], (0, 12)));
        net.run_until(3 * SECOND);
        assert_eq!(net.events_of(d, room(1)), [&EventKind::Success], "{mover:?}");
    }
}

// 16. Evict of a peer that lives on.
#[test]
fn r16_evicted_peer_that_lives_is_usable_again_within_seconds() {
    for mover in BOTH {
        let (mut net, d) = net(3, mover, 1, 1);
        for r in 1..4 {
            net.push(0, push(r, r, &[1, 2, 3], (0, 12)));
            net.order(d, |n, now| n.handle_expect(now, expect(r, &[4, 5, 6], (0, 12))));
            net.run_until(r * SECOND);
        }
        let key = PeerKey { incarnation: net.nodes[0].incarnation, direction: WG };
        net.order(d, |n, now| n.handle_evict(now, key));
        net.run_until(4 * SECOND);
        let mut ok = 0;
        for r in 4..12 {
            net.push(0, push(r, r, &[1, 2, 3], (0, 12)));
            net.order(d, |n, now| n.handle_expect(now, expect(r, &[4, 5, 6], (0, 12))));
            net.run_until(r * SECOND);
            ok += u32::from(net.events_of(d, room(r)).contains(&&EventKind::Success));
            net.order(d, |n, now| n.handle_cancel(now, room(r), why(ReasonKind::Cancelled)));
            net.run_until(r * SECOND + SECOND / 2);
        }
        println!("{mover:?}: {ok} of 8 succeeded; violations {:?}", net.violations);
        assert!(net.violations.is_empty(), "{:?}", net.violations);
        assert!(ok >= 7, "{ok} of 8");
    }
}

// 17. Peers of restarted processes are kept for ever.
#[test]
fn r17_peers_table_is_flat_over_restarts() {
    let (mut net, d) = net(3, Mover::Sender, 1, 1);
    for r in 1..20 {
        net.push(0, push(r, r, &[1, 2, 3], (0, 12)));
        net.order(d, |n, now| n.handle_expect(now, expect(r, &[4, 5, 6], (0, 12))));
        net.run_until(net.now + SECOND);
        net.restart(0, Config::default());
        net.run_until(net.now + 20 * SECOND);
    }
    let n = net.nodes[d].node.gauges().peers;
    assert!(n <= 2, "{n} peers known at decode after 19 restarts of the one it has");
}
#[test]
fn r17b_peers_table_is_flat_over_restarts_of_decode() {
    let (mut net, d) = net(3, Mover::Sender, 1, 1);
    for r in 1..20 {
        net.push(0, push(r, r, &[1, 2, 3], (0, 12)));
        net.order(d, |n, now| n.handle_expect(now, expect(r, &[4, 5, 6], (0, 12))));
        net.run_until(net.now + SECOND);
        net.restart(d, Config::default());
        net.run_until(net.now + 400 * SECOND);
    }
    let n = net.nodes[0].node.gauges().peers;
    assert!(n <= 2, "{n} peers known at prefill after 19 restarts of decode");
}

// 18. Outbox overflow with a session up.
#[test]
fn r18_overflow_with_a_session_up_loses_the_peer() {
    let mut s = decode(&[10]);
    let a = s.up(10, WG, Some(Mover::Sender), 0, 0);
    // Never acknowledges.
    for i in 0..(kvxfer_proto::link::OUTBOX_LIMIT as u64 / 2 + 2) {
        s.t += 1;
        s.node.handle_expect(s.now(), expect(1000 + i, &[], (0, 0)));
        s.pump();
        s.node.handle_cancel(s.now(), room(1000 + i), why(ReasonKind::Cancelled));
        s.pump();
        s.sent.clear();
        s.events.clear();
    }
    for _ in 0..5 {
        let t = s.t + SECOND / 2;
        s.at(t);
    }
    let _ = s.recv(a, Msg::Ping(1));
    for _ in 0..5 {
        let t = s.t + SECOND / 2;
        s.at(t);
    }
    assert_eq!(s.fences, vec![a], "messages were thrown away and the peer was not lost");
}

// 19. Idle disconnect at the wrong moment: prefill fences, and the next room of decode fails.
#[test]
fn r19_an_idle_disconnect_costs_no_room() {
    let mut failed = vec![];
    for cut_at in (0..3000).step_by(10) {
        let (mut net, d) = net(3, Mover::Sender, 1, 1);
        net.push(0, push(1, 1, &[1, 2, 3], (0, 12)));
        net.order(d, |n, now| n.handle_expect(now, expect(1, &[4, 5, 6], (0, 12))));
        net.run_until(cut_at * 1000 + 5000);
        net.cut_session(0, d, false);
        net.run_until(60 * SECOND);
        assert_contract(&net, d, 1);
        net.push(0, push(2, 2, &[1, 2, 3], (0, 12)));
        net.order(d, |n, now| n.handle_expect(now, expect(2, &[4, 5, 6], (0, 12))));
        net.run_until(90 * SECOND);
        if net.events_of(d, room(2)) != [&EventKind::Success] {
            failed.push(cut_at);
        }
    }
    assert!(failed.is_empty(), "cut at (ms): {failed:?}");
}

// 20. Finished to a rank that completed and then died makes a peer entry that is connected to for ever.
#[test]
fn r20_finished_to_a_dead_rank() {
    let mut s = decode(&[10, 11]);
    let a = s.up(10, WG, Some(Mover::Sender), 0, 0);
    let b = s.up(11, WG, Some(Mover::Sender), 0, 0);
    s.recv(a, done(99, 1, 1, (0, 4), true)).unwrap();
    s.node.handle_peer_died(Time(5), a);
    s.pump();
    s.node.handle_fenced(Time(6), a, Ok(()));
    s.pump();
    s.recv(b, done(99, 1, 1, (0, 4), true)).unwrap();
    assert_eq!(s.terminal(99), 1);
    assert!(!s.node.wants_session(a), "wants a session with a dead process for ever");
}

// 21. A rank that cannot be used fails the room here; the other ranks are told.
#[test]
fn r21_other_ranks_are_told_when_one_is_unusable() {
    let mut s = decode(&[10, 11]);
    let a = s.up(10, WG, Some(Mover::Sender), 0, 0);
    let b = s.up(11, WG, Some(Mover::Sender), 0, 0);
    s.node.handle_fabric_broken(Time(5), a, &why(ReasonKind::FabricError));
    s.pump();
    s.sent.clear();
    s.node.handle_expect(Time(6), expect(2, &[1], (0, 4)));
    s.pump();
    assert_eq!(s.terminal(2), 1);
    assert!(s.sent.iter().any(|(k, _, _)| *k == b), "rank 1 waits its 300 s for room 2: {:?}", s.sent);
}

// 22. Refused after a session that carried grants.
#[test]
fn r22_refusal_after_a_session_keeps_link_numbers_sound() {
    let mut s = decode(&[10]);
    let a = s.up(10, WG, Some(Mover::Sender), 0, 0);
    let heard = s.sent.iter().filter(|x| x.0 == a && x.1 > 0).map(|x| x.1).max().unwrap();
    s.recv(a, done(99, 1, 1, (0, 4), true)).unwrap();
    let sess = s.node.session_of(a).unwrap();
    s.node.handle_session_down(Time(5), a, sess);
    s.pump();
    s.node.handle_refused(Time(6), a, &why(ReasonKind::AuthError));
    s.pump();
    // The operator repairs the secret; the peer remembers what it had.
    s.node.handle_expect(Time(7), expect(2, &[1], (0, 4)));
    s.pump();
    s.node.handle_expect(Time(7), expect(3, &[2], (0, 4)));
    s.pump();
    s.sent.clear();
    s.up(10, WG, Some(Mover::Sender), heard, 0);
    let rooms: Vec<u64> = s
        .sent
        .iter()
        .filter_map(|(_, _, m)| if let Msg::Grant(g) = m { Some(g.room.get()) } else { None })
        .collect();
    let ok = rooms == [2, 3] || s.fences == vec![a];
    assert!(ok, "the grant of room 2 was swallowed (the peer is thought to have it): sent {rooms:?}");
}

// 23. A hostile peer cancels a room in which it has no part, or fills the tomb table.
#[test]
fn r23_cancel_by_a_stranger() {
    let mut s = Solo::new(Config::default());
    let _k = s.up(20, TG, Some(Mover::Sender), 0, 0);
    let m = s.up(66, TG, Some(Mover::Sender), 0, 0);
    s.node.handle_push(Time(2), push(1, 1, &[1], (0, 4)));
    s.pump();
    let _ = s.recv(
        m,
        Msg::Cancel(Cancel { room: room(1), upto: Seq(u64::MAX), reason: why(ReasonKind::Cancelled) }),
    );
    println!("by design (room numbers are secret): {:?}", s.events);
}

// 24. Evict while a fence does not end.
#[test]
fn r24_evict_ends_a_hung_fence() {
    let mut s = decode(&[10]);
    let a = s.up(10, WG, Some(Mover::Sender), 0, 0);
    s.node.handle_fabric_broken(Time(5), a, &why(ReasonKind::FabricError));
    s.pump();
    assert_eq!(s.released(99), 0);
    s.node.handle_evict(Time(6), a);
    s.pump();
    assert_eq!(s.released(99), 1, "the operator's word does not end a fence that hangs");
}

// 25. An answer ends the quarantine of a peer that could not be fenced.
#[test]
fn r25_answer_after_an_impossible_fence() {
    let mut s = decode(&[10]);
    let a = s.up(10, WG, Some(Mover::Sender), 0, 0);
    s.node.handle_fabric_broken(Time(5), a, &why(ReasonKind::FabricError));
    s.pump();
    s.node.handle_fenced(Time(6), a, Err(why(ReasonKind::FabricError)));
    s.pump();
    s.up(10, WG, None, 1, 0);
    assert!(
        s.node.session_of(a).is_some(),
        "the peer is back and could answer, but no session is taken from it"
    );
}

// 26. Early grants: the limit is said to be per peer.
#[test]
fn r26_early_grants_per_peer() {
    let mut s = Solo::new(Config { early_grants: 4, ..Config::default() });
    let a = s.up(20, TG, Some(Mover::Sender), 0, 0);
    let b = s.up(21, TG, Some(Mover::Sender), 0, 0);
    for i in 1..6 {
        s.recv(a, grant(i, i, &[1], (0, 4), 1)).unwrap();
    }
    s.sent.clear();
    s.recv(b, grant(50, 1, &[1], (0, 4), 1)).unwrap();
    assert!(
        !s.sent.iter().any(|x| matches!(&x.2, Msg::Drained(d) if d.room == room(50))),
        "another peer's grants took all the room"
    );
}

// 27. Cost per push of a room pushed by layers and chunks.
#[test]
fn r27_cost_of_many_pushes() {
    for n in [500u64, 1000, 2000, 4000] {
        let mut s = Solo::new(Config::default());
        let k = s.up(20, TG, Some(Mover::Sender), 0, 0);
        s.recv(k, grant(1, 1, &(0..32).collect::<Vec<_>>(), (0, n), 1)).unwrap();
        let t = std::time::Instant::now();
        for i in 0..n {
            let mut p = push(1, i, &[1], (i, i + 1));
            p.last = i + 1 == n;
            s.node.handle_push(Time(3), p);
            s.pump();
        }
        let a = t.elapsed();
        let ids: Vec<_> = s.delivers.iter().map(|d| d.id).collect();
        for id in ids {
            s.node.handle_delivery(Time(4), id, DeliveryEnd::Complete { bytes: 1, writes: 1 });
            s.pump();
        }
        println!(
            "{n} pushes: {} us a push, {} us a completion",
            a.as_micros() as f64 / n as f64,
            (t.elapsed() - a).as_micros() as f64 / n as f64
        );
    }
}
#[test]
fn r27b_cost_of_hostile_done() {
    let mut s = decode(&[10]);
    let a = s.up(10, WG, Some(Mover::Sender), 0, 0);
    s.node.handle_expect(Time(2), expect(1, &(0..30).collect::<Vec<_>>(), (0, 120)));
    s.pump();
    let _ = a;
    let mut c = kvxfer_proto::node::Coverage::default();
    let all = Owed { layers: (0, 1), tokens: (0, 1 << 20) };
    for n in [10_000u64, 20_000] {
        let t = std::time::Instant::now();
        let base = u64::try_from(c.area()).unwrap();
        for i in base..base + n {
            c.add(&all, PushId(i), &Owed { layers: (0, 1), tokens: (i, i + 1) }).unwrap();
        }
        println!("coverage with {base}+{n}: {} us a box", t.elapsed().as_micros() as f64 / n as f64);
    }
}

#[test]
fn r28_fenced_copies_leave_the_table() {
    let mut s = decode(&[10]);
    let a = s.up(10, WG, Some(Mover::Receiver), 0, 0);
    s.recv(
        a,
        Msg::Ready(Ready {
            room: room(99),
            seq: Seq(1),
            push: PushId(1),
            span: owed((0, 4)),
            pages_start: 0,
            pages: ids(&[1]),
        }),
    )
    .unwrap();
    s.node.handle_fabric_broken(Time(5), a, &why(ReasonKind::FabricError));
    s.pump();
    // As the engine does: the fence drops the flow, and its end is not reported.
    s.node.handle_fenced(Time(6), a, Ok(()));
    s.pump();
    assert_eq!(s.node.gauges().deliveries, 0);
    assert!(s.node.is_quiet());
}

#[derive(Clone)]
struct Want {
    r: u64,
    pages: Vec<Vec<u32>>,
    dec_epoch: Vec<u32>,
    pre: Vec<(u32, Vec<u64>, bool)>,
}

/// One seed of the wide random test; returns what went wrong.
fn wide(seed: u64, faults: u64) -> Vec<String> {
    let mover = BOTH[(seed % 2) as usize];
    let shapes = [(2u32, 1u32), (2, 2), (1, 2), (4, 2), (1, 1)];
    let (tp, td) = shapes[(seed / 2 % 5) as usize];
    let mut net = Net::new(seed, mover);
    net.data_us = (50, 5000);
    if faults & 16 != 0 {
        net.copy_us = (0, 800);
    }
    for r in 0..tp {
        net.add(&format!("prefill-{r}"), Config::default(), side(r, tp), 2048);
    }
    for r in 0..td {
        net.add(&format!("decode-{r}"), Config::default(), side(r, td), 32);
    }
    net.directory.insert("dir".into(), (0..tp as usize).collect());
    let (np, nd) = (tp as usize, td as usize);
    let n = np + nd;
    let mut epoch = vec![0u32; n];
    let mut free: Vec<Vec<u32>> = vec![(0..32).collect(); nd];
    let mut seen = vec![0usize; n];
    let mut wants: Vec<Want> = Vec::new();
    let (mut next_room, mut next_push, mut next_src) = (1u64, 1u64, 0u32);
    let mut bad: Vec<String> = Vec::new();
    let cancel = |net: &mut Net, i: usize, r: u64| {
        net.order(i, |n, now| n.handle_cancel(now, room(r), why(ReasonKind::Cancelled)))
    };
    let mut collect = |net: &mut Net,
                       wants: &[Want],
                       free: &mut Vec<Vec<u32>>,
                       seen: &mut Vec<usize>,
                       epoch: &[u32],
                       bad: &mut Vec<String>| {
        for j in 0..nd {
            let events: Vec<_> = net.nodes[np + j].events[seen[np + j]..].to_vec();
            seen[np + j] = net.nodes[np + j].events.len();
            for e in events.iter().filter(|e| e.released) {
                let Some(w) = wants.iter().find(|w| room(w.r) == e.room) else { continue };
                if w.dec_epoch[j] != epoch[np + j] {
                    continue;
                }
                free[j].extend(w.pages[j].iter().copied());
                if e.kind == EventKind::Success {
                    let (mut wrong, r) = (0, w.r);
                    each(net, np + j, &w.pages[j].clone(), 0, 0..12, |b, t| {
                        wrong += u32::from(*b != page_tag(room(r), t.0, t.1))
                    });
                    if wrong > 0 {
                        bad.push(format!(
                            "seed {seed}: {wrong} wrong bytes in room {r} at decode {j}, t={}",
                            net.now
                        ));
                    }
                }
            }
        }
    };
    // A full push of a room from prefill i, cut into pieces.
    fn push_all(net: &mut Net, i: usize, w: &mut Want, style: u64, next_push: &mut u64, next_src: &mut u32) {
        let pages: Vec<u32> = (0..3).map(|k| (*next_src + k) % 2048).collect();
        *next_src += 3;
        fill(net, i, w.r, &pages, 0, 0..12);
        let mut parts: Vec<((u64, u64), Option<(u32, u32)>)> = match style % 4 {
            0 => vec![((0, 12), None)],
            1 => vec![((0, 4), None), ((4, 12), None)],
            2 => vec![((0, 12), Some((0, 1))), ((0, 12), Some((1, 2)))],
            _ => vec![
                ((0, 8), Some((0, 1))),
                ((0, 8), Some((1, 2))),
                ((8, 12), Some((0, 1))),
                ((8, 12), Some((1, 2))),
            ],
        };
        let last = parts.pop().unwrap();
        for (t, l, is_last) in parts.into_iter().map(|(t, l)| (t, l, false)).chain([(last.0, last.1, true)]) {
            let id = *next_push;
            *next_push += 1;
            let mut p = push(w.r, id, &pages[(t.0 / 4) as usize..], t);
            p.layers = l;
            p.last = is_last;
            w.pre[i].1.push(id);
            w.pre[i].2 = true;
            net.push(i, p);
        }
    }
    for _ in 0..40 {
        let t = net.now + net.rng.below(3000);
        net.run_until(t);
        collect(&mut net, &wants, &mut free, &mut seen, &epoch, &mut bad);
        if free.iter().all(|f| f.len() >= 3) {
            let pages: Vec<Vec<u32>> = free.iter_mut().map(|f| f.split_off(f.len() - 3)).collect();
            let mut w = Want {
                r: next_room,
                pages: pages.clone(),
                dec_epoch: (0..nd).map(|j| epoch[np + j]).collect(),
                pre: (0..np).map(|i| (epoch[i], vec![], false)).collect(),
            };
            next_room += 1;
            let order = net.rng.below(2);
            for phase in 0..2 {
                if phase == order {
                    for j in 0..nd {
                        let r = w.r;
                        net.order(np + j, |n, now| n.handle_expect(now, expect(r, &pages[j], (0, 12))));
                    }
                } else {
                    for i in 0..np {
                        let style = net.rng.next();
                        if faults & 8 != 0 && net.rng.below(40) == 0 {
                            let r = w.r;
                            w.pre[i].2 = true;
                            net.order(i, |n, now| n.handle_open(now, room(r), None, None));
                        } else {
                            push_all(&mut net, i, &mut w, style, &mut next_push, &mut next_src);
                        }
                    }
                }
            }
            wants.push(w);
        }
        if wants.is_empty() {
            continue;
        }
        let v = net.rng.below(wants.len() as u64) as usize;
        let v = if net.rng.below(2) == 0 { wants.len() - 1 } else { v };
        let (i, j) = (net.rng.below(np as u64) as usize, net.rng.below(nd as u64) as usize);
        match net.rng.below(20) {
            0 | 1 => net.cut_session(i, np + j, seed % 3 == 0),
            2 => {
                let r = wants[v].r;
                cancel(&mut net, np + j, r)
            }
            3 => {
                let r = wants[v].r;
                if wants[v].pre[i].2 && wants[v].pre[i].0 == epoch[i] {
                    cancel(&mut net, i, r)
                }
            }
            4 => net.stop(i),
            5 => net.cont(i),
            6 => net.stop(np + j),
            7 => net.cont(np + j),
            8..=11 if faults & 1 != 0 => {
                // Preemption: all pushes back (last first), then again.
                let mut w = wants[v].clone();
                if w.pre[i].0 == epoch[i]
                    && !w.pre[i].1.is_empty()
                    && !net.nodes[i].stopped
                    && !net.nodes[i]
                        .events
                        .iter()
                        .any(|e| e.room == room(w.r) && !matches!(e.kind, EventKind::Retracted(_)))
                {
                    for id in w.pre[i].1.drain(..).rev().collect::<Vec<_>>() {
                        let r = w.r;
                        net.order(i, |n, now| n.handle_retract(now, room(r), PushId(id)));
                    }
                    let t = net.now + net.rng.below(300);
                    net.run_until(t);
                    collect(&mut net, &wants, &mut free, &mut seen, &epoch, &mut bad);
                    if !net.nodes[i]
                        .events
                        .iter()
                        .any(|e| e.room == room(w.r) && !matches!(e.kind, EventKind::Retracted(_)))
                    {
                        let style = net.rng.next();
                        push_all(&mut net, i, &mut w, style, &mut next_push, &mut next_src);
                    }
                    wants[v] = w;
                }
            }
            12 if faults & 2 != 0 => {
                net.restart(i, Config::default());
                epoch[i] += 1;
                seen[i] = 0;
            }
            13 if faults & 2 != 0 => {
                net.restart(np + j, Config::default());
                epoch[np + j] += 1;
                seen[np + j] = 0;
                free[j] = (0..32).collect();
            }
            14 if faults & 4 != 0 => {
                let key = PeerKey { incarnation: net.nodes[i].incarnation, direction: WG };
                net.order(np + j, |n, now| n.handle_fabric_broken(now, key, &why(ReasonKind::FabricError)));
            }
            15 if faults & 4 != 0 => {
                let key = PeerKey { incarnation: net.nodes[np + j].incarnation, direction: TG };
                net.order(i, |n, now| n.handle_fabric_broken(now, key, &why(ReasonKind::FabricError)));
            }
            _ => {}
        }
    }
    for i in 0..n {
        net.cont(i);
    }
    net.run_until(net.now + 60 * SECOND);
    collect(&mut net, &wants, &mut free, &mut seen, &epoch, &mut bad);
    let mut hung = 0;
    for w in &wants {
        for j in 0..nd {
            if w.dec_epoch[j] == epoch[np + j] && net.events_of(np + j, room(w.r)).is_empty() {
                hung += 1;
                let r = w.r;
                cancel(&mut net, np + j, r);
            }
        }
    }
    net.run_until(net.now + 700 * SECOND);
    collect(&mut net, &wants, &mut free, &mut seen, &epoch, &mut bad);
    for w in &wants {
        let mut check = |net: &Net, i: usize| {
            let ev: Vec<_> = net.nodes[i]
                .events
                .iter()
                .filter(|e| e.room == room(w.r) && !matches!(e.kind, EventKind::Retracted(_)))
                .collect();
            let term = ev.iter().filter(|e| e.kind != EventKind::Released).count();
            let rel = ev.iter().filter(|e| e.released).count();
            if (term, rel) != (1, 1) {
                bad.push(format!(
                    "seed {seed}: room {} at {}: {term} terminal {rel} released: {ev:?}",
                    w.r, net.nodes[i].name
                ));
            }
        };
        for j in 0..nd {
            if w.dec_epoch[j] == epoch[np + j] {
                check(&net, np + j);
            }
        }
        for i in 0..np {
            if w.pre[i].2 && w.pre[i].0 == epoch[i] {
                check(&net, i);
            }
        }
    }
    bad.extend(net.violations.iter().map(|v| format!("seed {seed} {mover:?} {tp}->{td}: {v}")));
    for i in 0..n {
        let g = net.nodes[i].node.gauges();
        if (g.granted_pages, g.quarantined_pages, g.inbound, g.outbound, g.deliveries) != (0, 0, 0, 0, 0) {
            bad.push(format!("seed {seed}: {} holds {g:?}", net.nodes[i].name));
        }
    }
    let _ = hung;
    bad
}

#[test]
fn r30_wide_random() {
    let seeds: u64 = std::env::var("SEEDS").ok().and_then(|s| s.parse().ok()).unwrap_or(200);
    let only: Option<u64> = std::env::var("ONLY").ok().and_then(|s| s.parse().ok());
    for faults in [0u64, 8, 1, 2, 4, 16, 15, 31] {
        let (mut broken, mut first) = (vec![], vec![]);
        for seed in 0..seeds {
            if only.is_some_and(|o| o != seed) {
                continue;
            }
            let r = std::panic::catch_unwind(|| wide(seed, faults))
                .unwrap_or_else(|_| vec![format!("seed {seed}: panic")]);
            if !r.is_empty() {
                broken.push(seed);
                if first.len() < 6 {
                    first.push(r[0].clone());
                }
            }
        }
        println!(
            "faults {faults:05b}: {} of {seeds} seeds break: {:?}",
            broken.len(),
            &broken[..broken.len().min(12)]
        );
        for f in first {
            println!("    {}", &f[..f.len().min(420)]);
        }
    }
}
