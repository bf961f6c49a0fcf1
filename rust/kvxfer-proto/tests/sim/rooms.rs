//! Rooms between small engines: their geometry, orders for them, the bytes that they carry and what must hold of them.

use super::{Net, page_tag};
use kvxfer_proto::msg::Verify;
use kvxfer_proto::node::{Config, EventKind, Expect, Mover, Push, Source};
use kvxfer_proto::{DType, Kind, Order, PageLayout, PushId, Reason, ReasonKind, Room, Shard, Side};
use std::ops::Range;
use std::sync::Arc;

/// Who may carry the bytes.
pub const BOTH: [Mover; 2] = [Mover::Sender, Mover::Receiver];
/// In microseconds.
pub const SECOND: u64 = 1_000_000;
/// Pages of every node of [`net`] and [`super::solo::Solo`].
pub const PAGES: u32 = 32;

/// One rank of an engine: two layers, four heads over all ranks, pages of four tokens.
pub fn side(tp_rank: u32, tp_size: u32) -> Side {
    let layout = PageLayout {
        layers: 2,
        kv_heads: 4,
        head_dim: 2,
        page_tokens: 4,
        dtype: DType::Uint8,
        order: Order::Hnd,
        kind: Kind::Kv,
        ..PageLayout::PLAIN
    };
    Side { groups: vec![layout], shard: Shard { tp_rank, tp_size, pp_rank: 0, pp_size: 1 } }
}

pub fn room(n: u64) -> Room {
    Room::new(n).unwrap()
}

pub fn ids(v: &[u32]) -> Vec<Arc<[u32]>> {
    vec![Arc::from(v)]
}

/// Where every room of these tests comes from.
pub fn source() -> Source {
    Source { address: "dir".into(), dp_rank: 0 }
}

pub fn why(kind: ReasonKind) -> Reason {
    Reason::new(kind, "by hand")
}

pub fn expect(r: u64, pages: &[u32], tokens: (u64, u64)) -> Expect {
    Expect {
        room: room(r),
        pages: ids(pages),
        odd_page: None,
        tokens,
        source: source(),
        verify: Verify::Off,
        bootstrap_timeout: None,
        waiting_timeout: None,
    }
}

/// The last push of a room.
pub fn push(r: u64, id: u64, pages: &[u32], tokens: (u64, u64)) -> Push {
    Push {
        room: room(r),
        id: PushId(id),
        pages: ids(pages),
        odd_page: None,
        tokens,
        layers: None,
        last: true,
        meta: None,
        ready: true,
        bootstrap_timeout: None,
        waiting_timeout: None,
    }
}

/// A push after which more follow.
pub fn early_push(r: u64, id: u64, pages: &[u32], tokens: (u64, u64)) -> Push {
    Push { last: false, ..push(r, id, pages, tokens) }
}

/// Prefill 0..`tp_p`, then decode: the net, and the index of the first decode rank.
pub fn net(seed: u64, mover: Mover, tp_p: u32, tp_d: u32) -> (Net, usize) {
    net_of(seed, mover, (tp_p, PAGES), (tp_d, PAGES), &Config::default())
}

/// The same with settings; an engine is its ranks and the pages of each.
pub fn net_of(
    seed: u64,
    mover: Mover,
    prefill: (u32, u32),
    decode: (u32, u32),
    cfg: &Config,
) -> (Net, usize) {
    let mut net = Net::new(seed, mover);
    for (name, (ranks, pages)) in [("prefill", prefill), ("decode", decode)] {
        for r in 0..ranks {
            net.add(&format!("{name}-{r}"), cfg.clone(), side(r, ranks), pages);
        }
    }
    net.directory.insert("dir".into(), (0..prefill.0 as usize).collect());
    (net, prefill.0 as usize)
}

/// Writes the room's tokens into pages of a node: the value depends on room, layer, part, head, token and element.
pub fn fill(net: &mut Net, node: usize, r: u64, pages: &[u32], first: u64, tokens: Range<u64>) {
    each(net, node, pages, first, tokens, |byte, tag| *byte = page_tag(room(r), tag.0, tag.1));
}

/// Visits every byte of these tokens at a node with its tag (token, and the rest of its coordinates).
pub fn each(
    net: &mut Net,
    node: usize,
    pages: &[u32],
    first: u64,
    tokens: Range<u64>,
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

/// How many bytes of these tokens at a node are not what the source wrote.
pub fn wrong_bytes(
    net: &mut Net,
    node: usize,
    r: u64,
    pages: &[u32],
    first: u64,
    tokens: Range<u64>,
) -> usize {
    let mut wrong = 0;
    each(net, node, pages, first, tokens, |byte, tag| {
        wrong += usize::from(*byte != page_tag(room(r), tag.0, tag.1));
    });
    wrong
}

pub fn assert_arrived(net: &mut Net, node: usize, r: u64, pages: &[u32], first: u64, tokens: Range<u64>) {
    assert_eq!(wrong_bytes(net, node, r, pages, first, tokens), 0, "bytes of room {r} at node {node}");
}

/// How many terminal and how many released events of a room (not of its pushes) this node has told.
pub fn endings(net: &Net, node: usize, r: u64) -> (usize, usize) {
    let events = || net.nodes[node].events.iter().filter(|e| e.room == room(r));
    let terminal = events().filter(|e| matches!(e.kind, EventKind::Success | EventKind::Failed(_))).count();
    let released = events().filter(|e| e.released && !matches!(e.kind, EventKind::Retracted(_))).count();
    (terminal, released)
}

/// Exactly one terminal event, exactly one release, and no write on a page that was not granted. Whether it succeeded.
pub fn assert_contract(net: &Net, node: usize, r: u64) -> bool {
    assert_sound(net);
    let kinds = net.events_of(node, room(r));
    assert_eq!(endings(net, node, r), (1, 1), "events of room {r} at {}: {kinds:?}", net.nodes[node].name);
    kinds.contains(&&EventKind::Success)
}

/// No write landed or was read where it must not, and nobody broke the protocol.
pub fn assert_sound(net: &Net) {
    assert_eq!(net.violations, Vec::<String>::new());
}

pub fn failure(net: &Net, node: usize, r: u64) -> Reason {
    let found = net.events_of(node, room(r)).into_iter().find_map(|e| match e {
        EventKind::Failed(reason) => Some(reason.clone()),
        _ => None,
    });
    found.expect("a failure")
}
