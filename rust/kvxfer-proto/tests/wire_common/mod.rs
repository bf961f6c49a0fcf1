//! Frames for the codec's tests: one sample of each kind, any frame, and a walk over fields.
#![allow(dead_code, unreachable_pub)]
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::wildcard_imports)]

use kvxfer_proto::layout::{DType, Kind, Order, PageLayout, Shard};
use kvxfer_proto::msg::*;
use kvxfer_proto::wire::{self, HEADER_BYTES};
use kvxfer_proto::{Incarnation, PushId, Reason, ReasonKind, Room, Seq, SessionNo};
use proptest::collection::vec;
use proptest::prelude::*;
use std::ops::Range;
use std::sync::Arc;

pub fn encoded(frame: &Frame) -> Vec<u8> {
    let mut out = Vec::new();
    wire::encode(frame, &mut out).unwrap();
    out
}

/// Sets `len` to what follows the header.
pub fn fix_len(raw: &mut [u8]) {
    let len = u32::try_from(raw.len() - HEADER_BYTES).unwrap();
    raw[..4].copy_from_slice(&len.to_le_bytes());
}

/// The fields in `raw[at]`: tag, and where the whole field and its value lie.
pub fn fields(raw: &[u8], at: Range<usize>) -> Vec<(u16, Range<usize>, Range<usize>)> {
    let mut found = Vec::new();
    let mut i = at.start;
    while i < at.end {
        let tag = u16::from_le_bytes(raw[i..i + 2].try_into().unwrap());
        let len = u32::from_le_bytes(raw[i + 2..i + 6].try_into().unwrap()) as usize;
        found.push((tag, i..i + 6 + len, i + 6..i + 6 + len));
        i += 6 + len;
    }
    assert_eq!(i, at.end);
    found
}

/// Puts `value` in place of the field at `path`, and mends the lengths around it.
pub fn patch(raw: &[u8], path: &[u16], value: &[u8]) -> Vec<u8> {
    fn within(raw: &[u8], at: Range<usize>, path: &[u16], value: &[u8]) -> Vec<u8> {
        let (_, whole, inner) =
            fields(raw, at.clone()).into_iter().find(|(tag, ..)| *tag == path[0]).expect("no such field");
        let new = match &path[1..] {
            [] => value.to_vec(),
            rest => within(raw, inner, rest, value),
        };
        let mut out = raw[at.start..whole.start].to_vec();
        out.extend_from_slice(&path[0].to_le_bytes());
        out.extend_from_slice(&u32::try_from(new.len()).unwrap().to_le_bytes());
        out.extend_from_slice(&new);
        out.extend_from_slice(&raw[whole.end..at.end]);
        out
    }
    let mut out = raw[..HEADER_BYTES].to_vec();
    out.extend_from_slice(&within(raw, HEADER_BYTES..raw.len(), path, value));
    fix_len(&mut out);
    out
}

pub fn layout() -> PageLayout {
    PageLayout {
        layers: 64,
        kv_heads: 8,
        head_dim: 128,
        page_tokens: 16,
        dtype: DType::Bfloat16,
        order: Order::Hnd,
        kind: Kind::Kv,
        ..PageLayout::PLAIN
    }
}

pub fn shard() -> Shard {
    Shard { tp_rank: 3, tp_size: 8, pp_rank: 1, pp_size: 2 }
}

fn reason() -> Reason {
    Reason::new(ReasonKind::PageError, "page 70000 of group 0, which has 512")
}

fn entry() -> Entry {
    Entry {
        name: "prefill-3".into(),
        engine: "e".into(),
        dp_rank: 2,
        incarnation: Incarnation(0xabcd_ef01_2345_6789),
        groups: vec![layout()],
        shard: shard(),
        address: "[2001:db8::1]:30001".into(),
    }
}

pub fn describe() -> Describe {
    Describe {
        name: "decode-0".into(),
        engine: "e".into(),
        dp_rank: 1,
        role: Role::Decode,
        mode: "push".into(),
        groups: vec![layout(), PageLayout { order: Order::Nhd, kind: Kind::Fused, ..layout() }],
        shard: shard(),
        pages: vec![512, 40_000],
        model: "qwen3-32b".into(),
        regions: vec![
            RegionShape { group: 0, layer: 32, part: 0, len: 1 << 40, kind: MemKind::Host },
            RegionShape { group: 1, layer: 63, part: 1, len: 65_536, kind: MemKind::Device(7) },
        ],
        fabrics: vec![FabricOffer { name: "shm".into(), blob: vec![0, 255, 1] }],
        received: 41,
        link_generation: 2,
        staging: (1 << 20, 16),
        process: b"boot, pid".to_vec(),
    }
}

/// One message of each kind, in the order of their numbers, with every optional field there.
pub fn samples() -> Vec<Frame> {
    let room = Room::new(0x1234_5678_9abc_def0).unwrap();
    let (seq, push) = (Seq(9), PushId(17));
    let span = Owed { layers: (32, 64), tokens: (16, 2_000) };
    let pages: Vec<Arc<[u32]>> = vec![vec![7, 9, 70_000].into(), Vec::new().into()];
    let msgs = vec![
        Msg::Hello(Hello {
            versions: (1, 3),
            features: 5,
            nonce: [0xa1; 32],
            purpose: Purpose::Transfer,
            session: SessionNo(6),
        }),
        Msg::Challenge(Challenge { version: 1, features: 4, nonce: [0xb2; 32] }),
        Msg::Proof(Proof { mac: [0xc3; 32] }),
        Msg::Accept(Proof { mac: [0xd4; 32] }),
        Msg::Describe(Box::new(describe())),
        Msg::Refuse(Reason::new(ReasonKind::LayoutMismatch, "dtype differs")),
        Msg::Attach(Attach { fabric: "shm".into() }),
        Msg::Attached(Attached { error: Some(reason()), info: "rc_x".into() }),
        Msg::Ack(77),
        Msg::Ping(78),
        Msg::Pong(79),
        Msg::Bye(Reason::new(ReasonKind::Closed, "closed")),
        Msg::Register(entry()),
        Msg::Lookup(Lookup { engine: "e".into() }),
        Msg::Entries(Entries { entries: vec![entry(), entry()] }),
        Msg::Grant(Grant {
            room,
            seq,
            tokens: (16, 2_000),
            owed: Some(span.clone()),
            pages: pages.clone(),
            ranks: 4,
            verify: Verify::Full,
            deadline_us: 300_000_000,
            credits: 2,
        }),
        Msg::Cancel(Cancel { room, upto: seq, reason: Reason::new(ReasonKind::Cancelled, "gone") }),
        Msg::Drained(Drained { room, seq, reason: Reason::new(ReasonKind::Cancelled, "gone") }),
        Msg::Ready(Ready { room, seq, push, span: span.clone(), pages_start: 16, pages, pages_end: None }),
        Msg::Retract(Retract { room, seq, push }),
        Msg::Copied(Copied { room, seq, push, error: Some(reason()) }),
        Msg::Done(Done {
            room,
            seq,
            push,
            span,
            last: true,
            end_token: 2_000,
            meta: Some(vec![1, 2, 3].into()),
            checksum: Some(0xfeed_face_cafe_beef),
            bytes: 1 << 33,
            writes: 18_880,
        }),
        Msg::Finished(Finished { room, seq, error: Some(reason()) }),
        Msg::RoomFailed(RoomFailed { room, reason: reason() }),
        Msg::Credit(Credit { room: Some(room), seq, slots: (3, 4) }),
    ];
    msgs.into_iter()
        .map(|msg| Frame {
            incarnation: Incarnation(0x1122_3344_5566_7788),
            session: SessionNo(6),
            number: if wire::kind_of(&msg) >= wire::kind::GRANT { 42 } else { 0 },
            msg,
        })
        .collect()
}

fn any_text() -> impl Strategy<Value = String> {
    prop_oneof![Just(String::new()), "[a-z0-9/.:-]{1,20}", "\\PC{0,40}"]
}

fn any_reason() -> impl Strategy<Value = Reason> {
    (0u8..16, any_text()).prop_map(|(kind, text)| Reason::new(ReasonKind::from_wire(kind), text))
}

fn any_layout() -> impl Strategy<Value = PageLayout> {
    let kinds = prop_oneof![Just(Kind::Kv), Just(Kind::Fused), Just(Kind::Latent)];
    let orders = prop_oneof![Just(Order::Nhd), Just(Order::Hnd)];
    (any::<[u32; 4]>(), 1u8..=7, orders, kinds).prop_map(|(n, dtype, order, kind)| PageLayout {
        layers: n[0],
        kv_heads: n[1],
        head_dim: n[2],
        page_tokens: n[3],
        dtype: DType::from_wire(dtype).unwrap(),
        order,
        kind,
        ..PageLayout::PLAIN
    })
}

fn any_shard() -> impl Strategy<Value = Shard> {
    any::<[u32; 4]>().prop_map(|n| Shard { tp_rank: n[0], tp_size: n[1], pp_rank: n[2], pp_size: n[3] })
}

fn any_region() -> impl Strategy<Value = RegionShape> {
    let kinds = prop_oneof![Just(MemKind::Host), any::<u32>().prop_map(MemKind::Device)];
    (any::<[u32; 3]>(), any::<u64>(), kinds).prop_map(|(n, len, kind)| RegionShape {
        group: n[0],
        layer: n[1],
        part: n[2],
        len,
        kind,
    })
}

fn any_offer() -> impl Strategy<Value = FabricOffer> {
    (any_text(), vec(any::<u8>(), 0..100)).prop_map(|(name, blob)| FabricOffer { name, blob })
}

fn any_describe() -> impl Strategy<Value = Describe> {
    let roles = prop_oneof![Just(Role::Both), Just(Role::Prefill), Just(Role::Decode)];
    (
        (any_text(), any_text(), any::<u32>(), roles, any_text(), vec(any_layout(), 0..4), any_shard()),
        (vec(any::<u32>(), 0..4), any_text(), vec(any_region(), 0..20), vec(any_offer(), 0..3)),
        (any::<u64>(), any::<u64>(), any::<(u64, u32)>(), vec(any::<u8>(), 0..50)),
    )
        .prop_map(|(a, b, c)| Describe {
            name: a.0,
            engine: a.1,
            dp_rank: a.2,
            role: a.3,
            mode: a.4,
            groups: a.5,
            shard: a.6,
            pages: b.0,
            model: b.1,
            regions: b.2,
            fabrics: b.3,
            received: c.0,
            link_generation: c.1,
            staging: c.2,
            process: c.3,
        })
}

fn any_entry() -> impl Strategy<Value = Entry> {
    let ids = (any::<u32>(), any::<u64>());
    (any_text(), any_text(), ids, vec(any_layout(), 0..3), any_shard(), any_text()).prop_map(
        |(name, engine, (dp_rank, incarnation), groups, shard, address)| Entry {
            name,
            engine,
            dp_rank,
            incarnation: Incarnation(incarnation),
            groups,
            shard,
            address,
        },
    )
}

fn any_room() -> impl Strategy<Value = Room> {
    (0..=Room::MAX).prop_map(|raw| Room::new(raw).unwrap())
}

fn any_owed() -> impl Strategy<Value = Owed> {
    (any::<(u32, u32)>(), any::<(u64, u64)>()).prop_map(|(layers, tokens)| Owed { layers, tokens })
}

fn any_pages() -> impl Strategy<Value = Vec<Arc<[u32]>>> {
    vec(vec(any::<u32>(), 0..50).prop_map(Arc::from), 0..4)
}

fn any_handshake() -> impl Strategy<Value = Msg> {
    let purposes = prop_oneof![Just(Purpose::Transfer), Just(Purpose::Lookup), Just(Purpose::Register)];
    prop_oneof![
        (any::<(u8, u8)>(), any::<u64>(), any::<[u8; 32]>(), purposes, any::<u64>()).prop_map(
            |(versions, features, nonce, purpose, session)| Msg::Hello(Hello {
                versions,
                features,
                nonce,
                purpose,
                session: SessionNo(session)
            })
        ),
        (any::<u8>(), any::<u64>(), any::<[u8; 32]>())
            .prop_map(|(version, features, nonce)| Msg::Challenge(Challenge { version, features, nonce })),
        any::<[u8; 32]>().prop_map(|mac| Msg::Proof(Proof { mac })),
        any::<[u8; 32]>().prop_map(|mac| Msg::Accept(Proof { mac })),
        any_describe().prop_map(|d| Msg::Describe(Box::new(d))),
        any_reason().prop_map(Msg::Refuse),
        any_text().prop_map(|fabric| Msg::Attach(Attach { fabric })),
        (proptest::option::of(any_reason()), any_text())
            .prop_map(|(error, info)| Msg::Attached(Attached { error, info })),
    ]
}

fn any_unnumbered() -> impl Strategy<Value = Msg> {
    prop_oneof![
        any::<u64>().prop_map(Msg::Ack),
        any::<u64>().prop_map(Msg::Ping),
        any::<u64>().prop_map(Msg::Pong),
        any_reason().prop_map(Msg::Bye),
        any_entry().prop_map(Msg::Register),
        any_text().prop_map(|engine| Msg::Lookup(Lookup { engine })),
        vec(any_entry(), 0..5).prop_map(|entries| Msg::Entries(Entries { entries })),
    ]
}

fn any_grant() -> impl Strategy<Value = Msg> {
    let verify = prop_oneof![Just(Verify::Off), Just(Verify::Sample), Just(Verify::Full)];
    let head = (any_room(), any::<u64>(), any::<(u64, u64)>(), proptest::option::of(any_owed()));
    (head, any_pages(), verify, any::<(u32, u64, u32)>()).prop_map(
        |((room, seq, tokens, owed), pages, verify, (ranks, deadline_us, credits))| {
            Msg::Grant(Grant {
                room,
                seq: Seq(seq),
                tokens,
                owed,
                pages,
                ranks,
                verify,
                deadline_us,
                credits,
            })
        },
    )
}

fn any_done() -> impl Strategy<Value = Msg> {
    let meta = proptest::option::of(vec(any::<u8>(), 0..200).prop_map(Arc::from));
    let head = (any_room(), any::<(u64, u64)>(), any_owed());
    (head, any::<(bool, u64, u64, u64)>(), meta, any::<Option<u64>>()).prop_map(
        |((room, (seq, push), span), (last, end_token, bytes, writes), meta, checksum)| {
            Msg::Done(Done {
                room,
                seq: Seq(seq),
                push: PushId(push),
                span,
                last,
                end_token,
                meta,
                checksum,
                bytes,
                writes,
            })
        },
    )
}

fn any_numbered() -> impl Strategy<Value = Msg> {
    let room = || (any_room(), any::<u64>().prop_map(Seq));
    let push = || (any_room(), any::<u64>().prop_map(Seq), any::<u64>().prop_map(PushId));
    let error = || proptest::option::of(any_reason());
    prop_oneof![
        any_grant(),
        (room(), any_reason()).prop_map(|((room, upto), reason)| Msg::Cancel(Cancel { room, upto, reason })),
        (room(), any_reason()).prop_map(|((room, seq), reason)| Msg::Drained(Drained { room, seq, reason })),
        (push(), any_owed(), any::<u64>(), any_pages()).prop_map(
            |((room, seq, push), span, pages_start, pages)| Msg::Ready(Ready {
                room,
                seq,
                push,
                span,
                pages_start,
                pages,
                pages_end: (pages_start % 2 == 1).then_some(pages_start + 7),
            })
        ),
        push().prop_map(|(room, seq, push)| Msg::Retract(Retract { room, seq, push })),
        (push(), error()).prop_map(|((room, seq, push), error)| Msg::Copied(Copied {
            room,
            seq,
            push,
            error
        })),
        any_done(),
        (room(), error()).prop_map(|((room, seq), error)| Msg::Finished(Finished { room, seq, error })),
        (any_room(), any_reason()).prop_map(|(room, reason)| Msg::RoomFailed(RoomFailed { room, reason })),
        (proptest::option::of(any_room()), any::<u64>(), any::<(u32, u32)>())
            .prop_map(|(room, seq, slots)| Msg::Credit(Credit { room, seq: Seq(seq), slots })),
    ]
}

/// Any frame of any kind.
pub fn any_frame() -> impl Strategy<Value = Frame> {
    let msg = prop_oneof![8 => any_handshake(), 7 => any_unnumbered(), 10 => any_numbered()];
    (any::<(u64, u64, u64)>(), msg).prop_map(|((incarnation, session, number), msg)| Frame {
        incarnation: Incarnation(incarnation),
        session: SessionNo(session),
        number,
        msg,
    })
}
