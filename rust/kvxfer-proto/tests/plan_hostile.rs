//! Layouts, shards and requests with any numbers in them: refused or planned, but nothing overflows or takes for ever.
#![allow(missing_docs, clippy::expect_used, clippy::unwrap_used)]

use kvxfer_proto::layout::{
    CrossLayer, DType, Factors, Kind, LayerSplit, Order, PageLayout, Scales, Shard, Side, State, StateBlock,
};
use kvxfer_proto::plan::{Cursor, End, Extent, Request, Rows, Template, compatible, sources};
use proptest::prelude::*;
use proptest::sample::select;
use std::sync::Arc;

fn number() -> impl Strategy<Value = u32> {
    prop_oneof![
        12 => 1..5_u32,
        1 => Just(0),
        1 => select(vec![16, 128, 1 << 12, 1 << 16, (1 << 16) + 1, 1 << 20, 1 << 31, u32::MAX - 1, u32::MAX]),
    ]
}

fn long() -> impl Strategy<Value = u64> {
    prop_oneof![
        9 => 0..9_u64,
        1 => select(vec![1 << 16, 1 << 31, (1 << 31) + 1, 1 << 48, u64::MAX - 1, u64::MAX]),
    ]
}

fn layout() -> impl Strategy<Value = PageLayout> {
    let dtype = || select((0..=255).filter_map(DType::from_wire).collect::<Vec<_>>());
    let block = (number(), number(), number(), number())
        .prop_map(|(part, units, unit_bytes, rows)| StateBlock { part, units, unit_bytes, rows });
    let state = prop::collection::vec(block, 1..4).prop_map(|blocks| State::new(&blocks));
    let scales = (number(), dtype(), prop::option::of(long())).prop_map(|(dim, dtype, page_stride)| Scales {
        dim,
        dtype,
        page_stride,
    });
    let cross = prop::option::of(long()).prop_map(|layer_stride| CrossLayer { layer_stride });
    let split = prop::collection::vec(0..1000_u32, 1..4).prop_map(|counts| LayerSplit::new(&counts));
    let rare = |s: BoxedStrategy<u64>| prop::option::weighted(0.3, s);
    let plain = (number(), number(), number(), number(), dtype());
    let kind = select(vec![Kind::Kv, Kind::Fused, Kind::Latent, Kind::Packed, Kind::State]);
    let more = (
        rare(long().boxed()),
        prop::option::weighted(0.3, cross),
        rare(long().boxed()),
        prop_oneof![3 => Just(None), 1 => split],
        prop::option::weighted(0.3, scales),
        prop_oneof![2 => Just(None), 1 => state],
        any::<(f32, f32)>(),
    );
    (plain, kind, any::<(bool, bool)>(), more).prop_map(
        |((layers, kv_heads, head_dim, page_tokens, dtype), kind, (nhd, factors), more)| {
            let (page_stride, cross, window, split, scales, state, (k, v)) = more;
            PageLayout {
                layers,
                kv_heads,
                head_dim,
                page_tokens: if state.is_some() { 1 } else { page_tokens },
                dtype,
                order: if nhd { Order::Nhd } else { Order::Hnd },
                kind: if state.is_some() { Kind::State } else { kind },
                page_stride,
                cross,
                window: window.filter(|_| state.is_none()),
                split,
                scales: scales.filter(|_| state.is_none()),
                factors: (factors && state.is_none()).then(|| Factors::new(k, v)),
                state,
            }
        },
    )
}

fn shard() -> impl Strategy<Value = Shard> {
    (number(), number(), number(), number()).prop_map(|(tp_rank, tp_size, pp_rank, pp_size)| Shard {
        tp_rank: tp_rank % tp_size.max(1),
        tp_size,
        pp_rank: pp_rank % pp_size.max(1),
        pp_size,
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2048, ..ProptestConfig::default() })]

    #[test]
    fn nothing_overflows(
        groups in prop::collection::vec((layout(), layout(), any::<bool>()), 1..3),
        shards in (shard(), shard()),
        pages in prop::collection::vec(number(), 0..4),
        tokens in (long(), long(), long(), long()),
        layers in (number(), number()),
    ) {
        // Alike more often than not, or nothing would ever fit.
        let (src, dst): (Vec<_>, Vec<_>) = groups.into_iter().map(|(a, b, same)| (a, if same { a } else { b })).unzip();
        let (src, dst) = (Side { groups: src, shard: shards.0 }, Side { groups: dst, shard: shards.1 });
        let _ = (src.region_count(), src.region_index(0, layers.0, layers.1), src.validate());
        let fits = compatible(&src, &dst);
        let template = Template::new(&src, &dst);
        prop_assert_eq!(fits.is_ok(), template.is_ok());
        if src.shard.tp_size < 64 && src.shard.pp_size < 64 {
            let _ = sources(&src.groups, src.shard.tp_size, src.shard.pp_size, &dst);
        }
        let Ok(template) = template else { return Ok(()) };
        let template = Arc::new(template);
        let counts = vec![u32::MAX; src.groups.len()];
        let lists = vec![Arc::from(pages.as_slice()); src.groups.len()];
        let (a, b, c, d) = tokens;
        let request = Request {
            src_pages: lists.clone(),
            src_tokens: a..c,
            dst_pages: lists.clone(),
            dst_tokens: b..d,
            tokens: a.min(c)..c,
            layers: layers.0.min(layers.1)..layers.1,
        };
        if let Ok(mut cursor) = Cursor::new(Arc::clone(&template), request, &counts, &counts) {
            let mut out = Vec::new();
            let _ = (cursor.runs(), cursor.total_bytes(), cursor.fill(&mut out, u64::MAX, 100));
            for p in &out {
                prop_assert!(p.src_off.checked_add(p.len).is_some_and(|end| end < 1 << 63));
                prop_assert!(p.dst_off.checked_add(p.len).is_some_and(|end| end < 1 << 63));
            }
        }
        for end in [End::Source, End::Destination] {
            let extent = Extent {
                end,
                pages: lists.clone(),
                list: a..c,
                room: b..d,
                tokens: a.min(c)..c,
                layers: layers.0.min(layers.1)..layers.1,
                sample: false,
            };
            if let Ok(mut rows) = Rows::new(Arc::clone(&template), extent, &counts) {
                rows.fill(&mut Vec::new(), 1 << 20, 100);
            }
        }
    }
}
