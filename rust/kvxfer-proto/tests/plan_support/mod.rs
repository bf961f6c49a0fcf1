//! The oracle: every byte of a source engine gets a tag of its own, the pieces of every source rank are applied,
//! and the destination is read back by its logical coordinates. Addresses are worked out here in the plainest way
//! and share nothing with the planner.
#![allow(dead_code)]

pub(crate) mod draw;

use kvxfer_proto::layout::{
    DType, Kind, LayoutError, Order, PageLayout, Shard, Side, State, StateBlock, page_bytes, part_page,
};
use kvxfer_proto::plan::{Cursor, Piece, Request, Template, plan_all, sources};
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

/// Never a tag.
const EMPTY: u64 = u64::MAX;

pub(crate) fn layout(kv_heads: u32, page_tokens: u32, order: Order, kind: Kind) -> PageLayout {
    PageLayout {
        layers: 2,
        kv_heads,
        head_dim: 4,
        page_tokens,
        dtype: DType::Int8,
        order,
        kind,
        ..PageLayout::PLAIN
    }
}

pub(crate) fn shard(tp_rank: u32, tp_size: u32) -> Shard {
    Shard { tp_rank, tp_size, pp_rank: 0, pp_size: 1 }
}

pub(crate) fn side(layout: PageLayout, tp_rank: u32, tp_size: u32) -> Side {
    Side { groups: vec![layout], shard: shard(tp_rank, tp_size) }
}

/// A rank's page list: for tokens `start..end`, `pages` a group, of regions of `count` pages.
#[derive(Clone, Debug)]
pub(crate) struct Table {
    pub(crate) start: u64,
    pub(crate) end: u64,
    pub(crate) pages: Vec<Vec<u32>>,
    pub(crate) count: Vec<u32>,
}

impl Table {
    pub(crate) fn one(start: u64, pages: &[u32], count: u32) -> Self {
        Self { start, end: u64::MAX, pages: vec![pages.to_vec()], count: vec![count] }
    }

    pub(crate) fn arcs(&self) -> Vec<Arc<[u32]>> {
        self.pages.iter().map(|p| p.as_slice().into()).collect()
    }
}

/// A whole hand-off to one destination rank.
#[derive(Clone, Debug)]
pub(crate) struct Handoff {
    pub(crate) src_groups: Vec<PageLayout>,
    pub(crate) src_tp: u32,
    pub(crate) src_pp: u32,
    pub(crate) dst: Side,
    pub(crate) src_table: Table,
    pub(crate) dst_table: Table,
    pub(crate) tokens: Range<u64>,
    pub(crate) layers: Range<u32>,
}

impl Handoff {
    pub(crate) fn source(&self, index: u32) -> Side {
        let shard = Shard {
            tp_rank: index % self.src_tp,
            tp_size: self.src_tp,
            pp_rank: index / self.src_tp,
            pp_size: self.src_pp,
        };
        Side { groups: self.src_groups.clone(), shard }
    }

    pub(crate) fn request(&self) -> Request {
        Request {
            src_pages: self.src_table.arcs(),
            src_tokens: self.src_table.start..self.src_table.end,
            dst_pages: self.dst_table.arcs(),
            dst_tokens: self.dst_table.start..self.dst_table.end,
            tokens: self.tokens.clone(),
            layers: self.layers.clone(),
        }
    }

    pub(crate) fn plan(&self, index: u32) -> Result<Vec<Piece>, LayoutError> {
        plan_all(&self.source(index), &self.dst, self.request(), &self.src_table.count, &self.dst_table.count)
    }

    /// Pieces of one source rank, in slices.
    fn sliced(&self, index: u32, max_bytes: u64, max_pieces: usize) -> Vec<Piece> {
        let template = Arc::new(Template::new(&self.source(index), &self.dst).expect("sides fit"));
        let mut cursor = Cursor::new(template, self.request(), &self.src_table.count, &self.dst_table.count)
            .expect("pages fit");
        let total = cursor.total_bytes();
        let mut all = Vec::new();
        loop {
            assert_eq!(cursor.is_done(), all.iter().map(|p: &Piece| p.len).sum::<u64>() == total);
            let mut slice = Vec::new();
            let more = cursor.clone().fill(&mut slice, max_bytes, max_pieces);
            let before = all.len();
            assert_eq!(
                cursor.fill(&mut all, max_bytes, max_pieces),
                more,
                "a clone goes on from the same place"
            );
            assert_eq!(all[before..], slice[..]);
            assert!(slice.len() <= max_pieces);
            assert!(slice.iter().map(|p| p.len).sum::<u64>() <= max_bytes);
            assert!(!more || !slice.is_empty(), "a slice that leaves something has a piece");
            assert_eq!(more, !cursor.is_done());
            if !more {
                break;
            }
        }
        assert_eq!(all.iter().map(|p| p.len).sum::<u64>(), total);
        all
    }

    /// Applies the pieces of every source rank and checks every byte of the destination. Gives how many ranks
    /// wrote.
    pub(crate) fn check(&self, max_bytes: u64, max_pieces: usize) -> usize {
        let owed = sources(&self.src_groups, self.src_tp, self.src_pp, &self.dst).expect("sides fit");
        assert_eq!(owed.len(), (self.src_tp * self.src_pp) as usize);
        let mut memory = Memory::new(&self.dst, &self.dst_table);
        let mut writers = 0;
        for (index, owed) in (0..).zip(owed) {
            let source = self.source(index);
            let template = Template::new(&source, &self.dst).expect("sides fit");
            assert_eq!(template.layers(), owed);
            assert_eq!(template.is_empty(), owed.is_none());
            let mut from = Memory::new(&source, &self.src_table);
            from.tag(&source, &self.src_table);
            let pieces = self.sliced(index, max_bytes, max_pieces);
            assert!(owed.is_some() || pieces.is_empty());
            writers += usize::from(!pieces.is_empty());
            for p in &pieces {
                assert!(p.len > 0);
                memory.write(p, &from);
            }
        }
        memory.verify(self);
        writers
    }

    /// The fewest pieces with which a source rank can do its share: breaks of its byte-by-byte map in destination order.
    pub(crate) fn fewest(&self, index: u32) -> usize {
        let mut map: Vec<[u64; 4]> = Vec::new();
        for p in self.plan(index).expect("fits") {
            for n in 0..p.len {
                map.push([p.dst_region.into(), p.dst_off + n, p.src_region.into(), p.src_off + n]);
            }
        }
        map.sort_unstable();
        let breaks = map.windows(2).filter(|w| {
            let ([ra, a, sa, x], [rb, b, sb, y]) = (w[0], w[1]);
            !(ra == rb && sa == sb && a + 1 == b && x + 1 == y)
        });
        breaks.count() + usize::from(!map.is_empty())
    }

    fn asked(&self, at: &Coordinate) -> bool {
        let layout = &self.dst.groups[at.group];
        let last = if layout.kind == Kind::State { Some(1) } else { layout.window };
        let first = last.map_or(0, |n| self.dst_table.end.saturating_sub(n));
        self.tokens.contains(&at.token) && at.token >= first && self.layers.contains(&at.layer)
    }
}

#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
struct Coordinate {
    group: usize,
    layer: u32,
    tensor: u32,
    head: u32,
    token: u64,
    byte: u64,
}

impl Coordinate {
    fn tag(&self) -> u64 {
        let fields = [
            (self.group as u64, 8),
            (self.layer.into(), 8),
            (self.tensor.into(), 8),
            (self.head.into(), 8),
            (self.token, 16),
            (self.byte, 8),
        ];
        fields.iter().fold(0, |n, (f, bits)| {
            assert!(*f < 1 << bits);
            n << bits | f
        })
    }
}

/// Where each coordinate that a rank's page list covers lies: region and offset.
fn places(side: &Side, table: &Table) -> HashMap<Coordinate, (usize, u64)> {
    let mut out = HashMap::new();
    let mut region = 0;
    for (group, l) in side.groups.iter().enumerate() {
        let layers: Vec<u32> = side.shard.layers(l).collect();
        let data_parts = if l.kind == Kind::Kv { 2 } else { 1 };
        for (i, &layer) in layers.iter().enumerate() {
            let first_region = if l.cross.is_some() { region } else { region + i * l.parts() as usize };
            let mut add = |part: usize, bytes: u64, scale: bool, at: Coordinate, page: u32, off: u64| {
                let between = l.cross.map(|c| c.layer_stride.filter(|_| !scale).unwrap_or(bytes));
                let dense = between.map_or(bytes, |n| n * layers.len() as u64);
                let stride = if scale { l.scales.and_then(|s| s.page_stride) } else { l.page_stride };
                let off = u64::from(page) * stride.unwrap_or(dense) + between.unwrap_or(0) * i as u64 + off;
                assert!(out.insert(at, (first_region + part, off)).is_none());
            };
            if let Some(state) = &l.state {
                let Some(token) = table.end.checked_sub(1) else { continue };
                let Some(&page) = table.pages[group].first() else { continue };
                for part in 0..state.parts() {
                    for (at, off, bytes) in state_bytes(side, state, part) {
                        let at = Coordinate { group, layer, token, ..at };
                        add(part as usize, bytes, false, at, page, off);
                    }
                }
                continue;
            }
            let heads: Vec<u32> = side.shard.heads(l).expect("heads").collect();
            let (n, each) = (heads.len() as u64, u64::from(l.page_tokens));
            let start = l.window.map_or(table.start, |w| table.start.max(table.end.saturating_sub(w)));
            let sets = [Some((l.row_bytes(), false)), l.scales.map(|s| (s.dtype.bytes_of(s.dim), true))];
            for (row, scale) in sets.into_iter().flatten() {
                let first_part = if scale { data_parts } else { 0 };
                for (p, &page) in table.pages[group].iter().enumerate() {
                    for (slot, tensor, (h, &head), byte) in (0..each)
                        .flat_map(|slot| (0..l.kind.tensors()).map(move |t| (slot, t)))
                        .flat_map(|(slot, t)| (0..).zip(&heads).map(move |h| (slot, t, h)))
                        .flat_map(|(slot, t, h)| (0..row).map(move |b| (slot, t, h, b)))
                    {
                        let cell = match l.order {
                            Order::Nhd => slot * n + h,
                            Order::Hnd => h * each + slot,
                        };
                        let t = u64::from(tensor);
                        let (part, off) = match l.kind {
                            Kind::Kv => (tensor as usize, cell * row),
                            Kind::Fused => (0, (t * each * n + cell) * row),
                            Kind::Packed => (0, (2 * cell + t) * row),
                            Kind::Latent => (0, cell * row),
                            Kind::State => unreachable!(),
                        };
                        let bytes = row * each * n * u64::from(l.kind.tensors()) / data_parts as u64;
                        let token = (start / each + p as u64) * each + slot;
                        let tensor = tensor + if scale { 128 } else { 0 };
                        let at = Coordinate { group, layer, tensor, head, token, byte };
                        add(first_part + part, bytes, scale, at, page, off + byte);
                    }
                }
            }
        }
        let rows = if l.cross.is_some() { usize::from(!layers.is_empty()) } else { layers.len() };
        region += rows * l.parts() as usize;
    }
    out
}

/// The bytes of one part of a state on a rank, row by row as they lie: coordinate, offset, and the page's bytes.
fn state_bytes(side: &Side, state: &State, part: u32) -> Vec<(Coordinate, u64, u64)> {
    let blocks: Vec<(usize, StateBlock)> =
        state.blocks().iter().copied().enumerate().filter(|(_, b)| b.part == part).collect();
    let (tp, rank) = (side.shard.tp_size, side.shard.tp_rank);
    let mut out = Vec::new();
    let mut off = 0;
    for band in blocks.chunk_by(|a, b| a.1.rows == b.1.rows) {
        for row in 0..band[0].1.rows {
            for (index, b) in band {
                let held: Vec<u32> = (0..b.units)
                    .filter(|u| {
                        if b.units >= tp { u / (b.units / tp) == rank } else { rank / (tp / b.units) == *u }
                    })
                    .collect();
                for head in held {
                    for byte in 0..u64::from(b.unit_bytes) {
                        let tensor = *index as u32 * 16 + row;
                        let at = Coordinate { group: 0, layer: 0, tensor, head, token: 0, byte };
                        out.push((at, off));
                        off += 1;
                    }
                }
            }
        }
    }
    out.into_iter().map(|(at, o)| (at, o, off)).collect()
}

/// A rank's regions, one tag a byte.
struct Memory {
    regions: Vec<Vec<u64>>,
}

impl Memory {
    fn new(side: &Side, table: &Table) -> Self {
        let shapes = side.regions(&table.count).expect("regions");
        for (i, s) in (0..).zip(&shapes) {
            assert_eq!(side.region_index(s.group, s.layer, s.part), Some(i));
            let l = &side.groups[s.group as usize];
            let page = part_page(l, &side.shard, s.part).expect("page");
            let pages = u64::from(table.count[s.group as usize]);
            assert_eq!(s.len, if pages == 0 { 0 } else { (pages - 1) * page.stride + page.bytes });
            assert!(page.bytes <= page.stride);
            if l.page_stride.is_none() && l.cross.is_none() && l.scales.is_none() && s.part == 0 {
                assert_eq!(page_bytes(l, &side.shard), Ok(page.stride));
            }
        }
        assert_eq!(side.region_count() as usize, shapes.len());
        Self { regions: shapes.iter().map(|s| vec![EMPTY; s.len as usize]).collect() }
    }

    fn tag(&mut self, side: &Side, table: &Table) {
        for (at, (region, off)) in places(side, table) {
            self.regions[region][off as usize] = at.tag();
        }
    }

    fn write(&mut self, p: &Piece, from: &Self) {
        let src = &from.regions[p.src_region as usize][p.src_off as usize..(p.src_off + p.len) as usize];
        let dst = &mut self.regions[p.dst_region as usize][p.dst_off as usize..(p.dst_off + p.len) as usize];
        for (d, s) in dst.iter_mut().zip(src) {
            assert_eq!(*d, EMPTY, "a byte is written twice: {p:?}");
            assert_ne!(*s, EMPTY, "a byte that no token has is sent: {p:?}");
            *d = *s;
        }
    }

    fn verify(&mut self, handoff: &Handoff) {
        for (at, (region, off)) in places(&handoff.dst, &handoff.dst_table) {
            let byte = &mut self.regions[region][off as usize];
            assert_eq!(*byte, if handoff.asked(&at) { at.tag() } else { EMPTY }, "{at:?}");
            *byte = EMPTY;
        }
        assert!(self.regions.iter().flatten().all(|&b| b == EMPTY), "a byte of no granted page is written");
    }
}
