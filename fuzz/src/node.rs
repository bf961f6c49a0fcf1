//! One node between an honest source, an honest destination and an authenticated peer that says anything: no panic,
//! nothing of an honest peer's rooms changes, and every bound holds.

use super::input::Input;
use kvxfer_proto::msg::{
    Cancel, Copied, Credit, Done, Drained, Finished, Frame, Grant, Msg, Owed, Pack, Packed, Ready, Retract,
    RoomFailed, Verify,
};
use kvxfer_proto::node::{
    Action, Config, Delivery, DeliveryEnd, DeliveryId, Direction, Event, EventKind, Expect, Mover, Node,
    PeerKey, Push, RankInfo, SessionUp, Source,
};
use kvxfer_proto::wire::{self, Decoded};
use kvxfer_proto::{
    DType, Incarnation, Kind, Order, PageLayout, PushId, Reason, ReasonKind, Room, Seq, SessionNo, Shard,
    Side, Time,
};
use std::collections::BTreeMap;
use std::sync::Arc;

const PAGES: u32 = 16;
const SLOT_BYTES: u64 = 32;
const SLOTS: u32 = 4;
/// Rooms that the honest source delivers to us, each with a page of its own; the hostile peer knows their numbers.
const OURS: std::ops::Range<u64> = 1..4;
/// A room that we push to the honest destination.
const PUSHED: u64 = 10;
/// Rooms that are expected of the hostile peer, which may do with them as it likes.
const ITS: std::ops::Range<u64> = 20..23;
const HONEST: Incarnation = Incarnation(1);
const HOSTILE: Incarnation = Incarnation(2);

fn side() -> Side {
    let layout = PageLayout {
        layers: 2,
        kv_heads: 1,
        head_dim: 4,
        page_tokens: 4,
        dtype: DType::Uint8,
        order: Order::Nhd,
        kind: Kind::Kv,
        ..PageLayout::PLAIN
    };
    Side { groups: vec![layout], shard: Shard { tp_rank: 0, tp_size: 1, pp_rank: 0, pp_size: 1 } }
}

fn key(incarnation: Incarnation, direction: Direction) -> PeerKey {
    PeerKey { incarnation, direction }
}

fn room(n: u64) -> Room {
    let Some(room) = Room::new(n & Room::MAX) else { panic!("63 bits are a room") };
    room
}

fn source(of: Incarnation) -> Source {
    Source { address: format!("{}", of.0).into(), dp_rank: 0 }
}

fn limits() -> Config {
    Config {
        early_grants: 6,
        early_grants_per_peer: 4,
        early_pages_per_peer: 64,
        tombstones: 12,
        tombstones_per_peer: 6,
        peers: 6,
        ..Config::default()
    }
}

struct World {
    node: Node,
    now: u64,
    /// Numbered frames that each peer has sent in its session.
    sent: BTreeMap<PeerKey, (SessionNo, u64)>,
    events: Vec<Event>,
    deliveries: BTreeMap<DeliveryId, Delivery>,
    /// Sequence numbers of grants that the honest source was sent.
    granted: BTreeMap<Room, Seq>,
    mover: Mover,
}

impl World {
    fn new(mover: Mover) -> Option<Self> {
        let mut node = Node::new(limits(), side(), &[PAGES]).ok()?;
        node.handle_ring(SLOT_BYTES, SLOTS).ok()?;
        Some(Self {
            node,
            now: 1,
            sent: BTreeMap::new(),
            events: Vec::new(),
            deliveries: BTreeMap::new(),
            granted: BTreeMap::new(),
            mover,
        })
    }

    fn time(&mut self) -> Time {
        self.now += 1;
        Time(self.now)
    }

    fn take_actions(&mut self) {
        while let Some(action) = self.node.poll_action() {
            match action {
                Action::Send { peer, msg: Msg::Grant(g), .. } if peer.incarnation == HONEST => {
                    self.granted.insert(g.room, g.seq);
                }
                Action::Event(event) => self.events.push(event),
                Action::Deliver(delivery) => {
                    let (now, id) = (self.time(), delivery.id);
                    self.check_delivery(delivery);
                    // Where the peer has a ring; what it says of it is to be believed least of all.
                    self.node.handle_pack(now, id, 64, SLOT_BYTES, 2);
                }
                Action::Lent { id, slot } => {
                    assert!(slot < SLOTS && self.deliveries.contains_key(&id), "slot {slot} for {id:?}");
                    let now = self.time();
                    self.node.handle_packed(now, id, slot, 8, 0);
                }
                Action::Direct(id) => {
                    assert!(self.deliveries.contains_key(&id), "no delivery is {id:?}");
                }
                Action::Unpack(unpacking) => self.check_delivery(unpacking.delivery),
                Action::Landed { id, slot, bytes } => {
                    assert!(slot < SLOTS && bytes <= SLOT_BYTES, "{bytes} bytes in slot {slot}");
                    assert!(self.deliveries.contains_key(&id), "nobody unpacks {id:?}");
                    let now = self.time();
                    self.node.handle_unpacked(now, id, slot);
                }
                Action::Sum(sum) => {
                    let now = self.time();
                    self.node.handle_delivery(now, sum.id, DeliveryEnd::Summed(sum.room.get()));
                }
                Action::Abort(id) => {
                    if self.deliveries.remove(&id).is_some() {
                        let now = self.time();
                        self.node.handle_delivery(now, id, DeliveryEnd::Aborted);
                    }
                }
                Action::Fence(peer) => {
                    assert_ne!(peer.incarnation, HONEST, "an honest peer is fenced for what another said");
                    self.deliveries.retain(|_, d| d.peer != peer);
                    let now = self.time();
                    self.node.handle_fenced(now, peer, Ok(()));
                }
                Action::DropSession { peer, .. } | Action::Forget(peer) => {
                    assert_ne!(
                        peer.incarnation, HONEST,
                        "an honest peer's session ends for what another said"
                    );
                }
                Action::Resolve(from) => {
                    let rank = if from == source(HONEST) { HONEST } else { HOSTILE };
                    let ranks = vec![RankInfo { incarnation: rank, side: side() }];
                    let now = self.time();
                    self.node.handle_resolved(now, &from, Ok(ranks));
                }
                Action::Send { .. } | Action::Connect(_) | Action::Stage(..) | Action::TellRefused { .. } => {
                }
            }
        }
    }

    /// Bytes may move into pages of ours only for the peer that was granted them.
    fn check_delivery(&mut self, d: Delivery) {
        if d.peer.incarnation == HOSTILE && d.peer.direction == Direction::WeGrant {
            assert!(ITS.contains(&d.room.get()), "a copy for the hostile peer into room {}", d.room);
            for page in d.request.dst_pages.iter().flat_map(|list| list.iter()) {
                assert_eq!(self.node.page_owner(0, *page), Some(d.room), "page {page} is another room's");
            }
        }
        assert!(self.deliveries.len() < 4096, "deliveries without end");
        self.deliveries.insert(d.id, d);
    }

    fn up(&mut self, peer: PeerKey) {
        let (received, generation) =
            self.sent.get(&peer).map_or((0, 0), |_| (0, self.node.link_state(peer).1));
        let session = match peer.direction {
            Direction::WeGrant => self.node.next_session(peer),
            Direction::TheyGrant => SessionNo(self.sent.get(&peer).map_or(1, |(s, _)| s.0 + 1)),
        };
        let now = self.time();
        let up = SessionUp {
            peer,
            session,
            received,
            generation,
            own_generation: self.node.link_state(peer).1,
            side: side(),
            pages: vec![PAGES],
            name: format!("{}", peer.incarnation),
        };
        self.node.handle_session_up(now, up);
        self.take_actions();
        if peer.direction == Direction::TheyGrant {
            let _ = self.node.handle_peer_ring(peer, SLOT_BYTES, SLOTS);
        }
        if self.node.session_of(peer) == Some(session) {
            let now = self.time();
            self.node.handle_attached(now, peer, self.mover);
            self.sent.insert(peer, (session, self.node.link_state(peer).0));
        }
        self.take_actions();
    }

    fn say(&mut self, peer: PeerKey, number: Option<u64>, msg: Msg) {
        let Some((session, sent)) = self.sent.get_mut(&peer) else { return };
        *sent += u64::from(number.is_none());
        let frame =
            Frame { incarnation: peer.incarnation, session: *session, number: number.unwrap_or(*sent), msg };
        let now = self.time();
        let result = self.node.handle_frame(now, peer, frame);
        assert!(result.is_ok() || peer.incarnation == HOSTILE, "{result:?}");
        self.take_actions();
    }

    fn expect(&mut self, n: u64, page: u32, of: Incarnation) {
        let now = self.time();
        self.node.handle_expect(
            now,
            Expect {
                room: room(n),
                pages: vec![Arc::from([page])],
                odd_page: None,
                tokens: (0, 4),
                source: source(of),
                verify: Verify::Off,
                bootstrap_timeout: None,
                waiting_timeout: None,
            },
        );
        self.take_actions();
    }

    fn check(&self) {
        let (gauges, limits) = (self.node.gauges(), limits());
        for n in OURS {
            let page = Some(room(n));
            assert_eq!(self.node.page_owner(0, page_of(n)), page, "room {n} has lost its page");
        }
        let honest = |e: &&Event| OURS.contains(&e.room.get());
        assert_eq!(self.events.iter().find(honest), None, "an honest room ended for what another said");
        assert!(gauges.tombstones <= limits.tombstones as u64);
        assert!(gauges.peers <= limits.peers as u64);
        assert!(gauges.outbound <= limits.early_grants as u64 + 1 + 16, "{gauges:?}");
    }
}

/// The page that a room of ours has.
fn page_of(n: u64) -> u32 {
    u32::try_from(n).unwrap_or(0)
}

/// Plays a hostile peer's choices.
pub fn node(bytes: &[u8]) {
    let mut input = Input::new(bytes);
    let mover = if input.flag() { Mover::Sender } else { Mover::Receiver };
    let Some(mut world) = World::new(mover) else { return };
    let (source, dest) = (key(HONEST, Direction::WeGrant), key(HONEST, Direction::TheyGrant));
    for n in OURS {
        world.expect(n, page_of(n), HONEST);
    }
    for n in ITS {
        world.expect(n, page_of(n - 10), HOSTILE);
    }
    let (theirs, back) = (key(HOSTILE, Direction::TheyGrant), key(HOSTILE, Direction::WeGrant));
    for peer in [source, dest, theirs, back] {
        world.up(peer);
    }
    let mut pushes = 0;
    while !input.is_empty() {
        match input.below(16) {
            0 => {
                let peer = if input.flag() { theirs } else { back };
                world.up(peer);
            }
            1 => {
                let peer = if input.flag() { theirs } else { back };
                let session = SessionNo(u64::from(input.byte() % 4));
                let now = world.time();
                world.node.handle_session_down(now, peer, session);
                world.take_actions();
            }
            // The honest order that comes between.
            2 => {
                pushes += 1;
                let now = world.time();
                let n = [PUSHED, PUSHED + 1, 30][input.below(3)];
                world.node.handle_push(now, push(n, pushes));
                world.take_actions();
            }
            3 => {
                // Bytes of a delivery were moved, or not.
                let nth = input.below(8);
                if let Some(id) = world.deliveries.keys().nth(nth).copied() {
                    world.deliveries.remove(&id);
                    let end = match input.below(3) {
                        0 => DeliveryEnd::Aborted,
                        1 => DeliveryEnd::Failed(Reason::new(ReasonKind::FabricError, "x")),
                        _ => DeliveryEnd::Complete { bytes: 8, writes: 1 },
                    };
                    let now = world.time();
                    world.node.handle_delivery(now, id, end);
                    world.take_actions();
                }
            }
            4 => {
                // A stranger of yet another name comes and goes.
                let peer = key(Incarnation(100 + u64::from(input.byte())), Direction::TheyGrant);
                come_and_go(&mut world, peer);
            }
            _ => {
                let peer = if input.flag() { theirs } else { back };
                let odd = input.byte();
                let number = (odd & 7 == 7).then(|| u64::from(odd >> 3));
                if let Some(msg) = message(&mut input) {
                    let unnumbered = matches!(msg, Msg::Ping(_) | Msg::Pong(_) | Msg::Ack(_) | Msg::Bye(_));
                    world.say(peer, if unnumbered { Some(0) } else { number }, msg);
                }
            }
        }
        world.check();
    }
    // After all of that the honest source still delivers.
    for n in OURS {
        let Some(seq) = world.granted.get(&room(n)).copied() else { panic!("room {n} was never granted") };
        let done = Done {
            room: room(n),
            seq,
            push: PushId(n),
            span: Owed { layers: (0, 2), tokens: (0, 4) },
            last: true,
            end_token: 4,
            meta: None,
            checksum: None,
            bytes: 1,
            writes: 1,
        };
        match mover {
            Mover::Sender => world.say(source, None, Msg::Done(done)),
            Mover::Receiver => deliver_by_copy(&mut world, source, n, seq, done),
        }
        let ended: Vec<&Event> = world.events.iter().filter(|e| e.room == room(n)).collect();
        assert!(matches!(ended[..], [Event { kind: EventKind::Success, released: true, .. }]), "{ended:?}");
    }
}

fn deliver_by_copy(world: &mut World, source: PeerKey, n: u64, seq: Seq, done: Done) {
    let ready = Ready {
        room: room(n),
        seq,
        push: PushId(n),
        span: Owed { layers: (0, 2), tokens: (0, 4) },
        pages_start: 0,
        pages: vec![Arc::from([0])],
        pages_end: None,
    };
    world.say(source, None, Msg::Ready(ready));
    let Some(id) = world.deliveries.iter().find(|(_, d)| d.room == room(n)).map(|(id, _)| *id) else {
        panic!("room {n}: no copy was ordered");
    };
    world.deliveries.remove(&id);
    let now = world.time();
    world.node.handle_delivery(now, id, DeliveryEnd::Complete { bytes: 8, writes: 1 });
    world.take_actions();
    world.say(source, None, Msg::Done(done));
}

fn come_and_go(world: &mut World, peer: PeerKey) {
    let session = SessionNo(1 + world.now);
    let now = world.time();
    let up = SessionUp {
        peer,
        session,
        received: 0,
        generation: world.node.link_state(peer).1,
        own_generation: world.node.link_state(peer).1,
        side: side(),
        pages: vec![PAGES],
        name: "stranger".to_owned(),
    };
    world.node.handle_session_up(now, up);
    // Its session may be dropped or it may be forgotten: it is nobody's honest peer.
    while let Some(action) = world.node.poll_action() {
        match action {
            Action::DropSession { peer: p, .. } | Action::Forget(p) | Action::Fence(p) => {
                assert_ne!(p.incarnation, HONEST, "an honest peer pays for a stranger");
            }
            _ => {}
        }
    }
    let now = world.time();
    world.node.handle_session_down(now, peer, session);
    world.take_actions();
}

fn push(n: u64, id: u64) -> Push {
    Push {
        room: room(n),
        id: PushId(id),
        pages: vec![Arc::from([15])],
        odd_page: None,
        tokens: (0, 4),
        layers: None,
        last: id.is_multiple_of(2),
        meta: None,
        ready: true,
        bootstrap_timeout: None,
        waiting_timeout: None,
    }
}

/// Anything that a peer may say: with numbers that mean something here, or decoded from any bytes.
fn message(input: &mut Input<'_>) -> Option<Msg> {
    let reason = || Reason::new(ReasonKind::Cancelled, "hostile");
    let choice = input.byte();
    if choice & 15 == 15 {
        let len = input.below(200);
        return match wire::decode_frame(input.take(len)) {
            Ok(Decoded::Frame(frame)) => Some(frame.msg),
            _ => None,
        };
    }
    let n = [1, 2, 3, PUSHED, PUSHED + 1, 20, 21, 22, 30, 31, 32, 33, 34, 35, 36, u64::MAX][input.below(16)];
    let room = room(n);
    let seq = Seq(if input.flag() { u64::from(input.byte() % 8) } else { input.word() });
    let push = PushId(u64::from(input.byte() % 4));
    let span = Owed {
        layers: (u32::from(input.byte() % 4), u32::from(input.byte() % 4)),
        tokens: (u64::from(input.byte() % 8), if input.flag() { input.word() } else { 4 }),
    };
    let mut pages = || -> Vec<Arc<[u32]>> {
        let lists = [1, 1, 1, 0, 2][input.below(5)];
        (0..lists)
            .map(|_| (0..input.below(9)).map(|_| u32::from(input.byte() % 20)).collect::<Vec<u32>>().into())
            .collect()
    };
    Some(match choice & 15 {
        0 | 1 => Msg::Grant(Grant {
            room,
            seq,
            tokens: (0, 4),
            owed: (choice & 16 == 0).then_some(span),
            pages: pages(),
            ranks: u32::from(choice >> 5),
            verify: Verify::Off,
            deadline_us: if choice & 16 == 0 { 1_000_000 } else { u64::MAX },
            credits: 0,
        }),
        2 => Msg::Cancel(Cancel { room, upto: seq, reason: reason() }),
        3 => Msg::Drained(Drained { room, seq, reason: reason() }),
        4 | 5 => Msg::Ready(Ready {
            room,
            seq,
            push,
            span,
            pages_start: u64::from(choice >> 4),
            pages: pages(),
            pages_end: None,
        }),
        6 => Msg::Retract(Retract { room, seq, push }),
        7 => Msg::Copied(Copied { room, seq, push, error: (choice & 16 == 0).then(reason) }),
        8 | 9 => Msg::Done(Done {
            room,
            seq,
            push,
            span,
            last: choice & 16 == 0,
            end_token: if choice & 32 == 0 { 4 } else { u64::MAX },
            meta: None,
            checksum: None,
            bytes: u64::MAX,
            writes: u64::MAX,
        }),
        10 => Msg::Finished(Finished { room, seq, error: (choice & 16 == 0).then(reason) }),
        // A room that we push may be failed by any destination of it: that is what the message is for.
        11 => Msg::RoomFailed(RoomFailed { room, reason: reason() }),
        12 => {
            let slots = [(0, u32::MAX), (0, 1), (1, 2), (3, 1)][usize::from(choice >> 4) % 4];
            Msg::Credit(Credit { room, seq, slots, push })
        }
        14 if choice & 64 == 0 => Msg::Pack(Pack {
            room,
            seq,
            push,
            span,
            pages_start: 0,
            pages: pages(),
            pages_end: None,
            bytes: [64, 0, u64::MAX, 8][usize::from(choice >> 4) % 4],
            slice_bytes: if choice & 128 == 0 { 8 } else { u64::MAX },
            slots: if choice & 16 == 0 { 3 } else { u32::MAX },
        }),
        14 => {
            let bytes = [8, 0, u64::MAX][usize::from(choice >> 4) % 3];
            Msg::Packed(Packed {
                room,
                seq,
                push,
                slot: u32::from(choice >> 5),
                bytes,
                slice: u64::from(input.byte() % 3),
            })
        }
        13 => Msg::Ack(u64::from(choice >> 4)),
        _ => Msg::Bye(reason()),
    })
}
