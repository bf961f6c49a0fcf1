//! The oracle: every byte of a source engine gets a tag of its own, the pieces of every source rank are applied,
//! and the destination is read back by its logical coordinates. Addresses are worked out here in the plainest way
//! and share nothing with the planner.
#![allow(dead_code)]

pub(crate) mod draw;

use kvxfer_proto::layout::{DType, Kind, LayoutError, Order, PageLayout, Shard, Side, page_bytes};
use kvxfer_proto::plan::{Cursor, Piece, Request, Template, plan_all, sources};
use std::collections::HashMap;
use std::ops::Range;
use std::sync::Arc;

/// Never a tag.
const EMPTY: u64 = u64::MAX;

pub(crate) fn layout(kv_heads: u32, page_tokens: u32, order: Order, kind: Kind) -> PageLayout {
    PageLayout { layers: 2, kv_heads, head_dim: 4, page_tokens, dtype: DType::Int8, order, kind }
}

pub(crate) fn shard(tp_rank: u32, tp_size: u32) -> Shard {
    Shard { tp_rank, tp_size, pp_rank: 0, pp_size: 1 }
}

pub(crate) fn side(layout: PageLayout, tp_rank: u32, tp_size: u32) -> Side {
    Side { groups: vec![layout], shard: shard(tp_rank, tp_size) }
}

/// A rank's page list: from token `start`, `pages` a group, of regions of `count` pages.
#[derive(Clone, Debug)]
pub(crate) struct Table {
    pub(crate) start: u64,
    pub(crate) pages: Vec<Vec<u32>>,
    pub(crate) count: Vec<u32>,
}

impl Table {
    pub(crate) fn one(start: u64, pages: &[u32], count: u32) -> Self {
        Self { start, pages: vec![pages.to_vec()], count: vec![count] }
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
            src_start: self.src_table.start,
            dst_pages: self.dst_table.arcs(),
            dst_start: self.dst_table.start,
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

    /// The fewest pieces with which a source rank can do its share: breaks of the byte-by-byte map in destination
    /// order.
    pub(crate) fn fewest(&self, index: u32) -> usize {
        let source = self.source(index);
        let mut map: Vec<[u64; 4]> = Vec::new();
        if Template::new(&source, &self.dst).expect("sides fit").is_empty() {
            return 0;
        }
        let (from, to) = (places(&source, &self.src_table), places(&self.dst, &self.dst_table));
        for (tag, (region, off)) in to {
            if let Some(&(src_region, src_off)) = from.get(&tag)
                && self.asked(&tag)
                && self.writes(index, &tag)
            {
                map.push([region as u64, off, src_region as u64, src_off]);
            }
        }
        map.sort_unstable();
        let breaks = map.windows(2).filter(|w| {
            let ([ra, a, sa, x], [rb, b, sb, y]) = (w[0], w[1]);
            !(ra == rb && sa == sb && a + 1 == b && x + 1 == y)
        });
        breaks.count() + usize::from(!map.is_empty())
    }

    /// Whether this source rank wrote this coordinate, from the template's view of its groups.
    fn writes(&self, index: u32, at: &Coordinate) -> bool {
        let mut one = self.clone();
        one.src_groups = vec![self.src_groups[at.group]];
        one.dst.groups = vec![self.dst.groups[at.group]];
        !Template::new(&one.source(index), &one.dst).expect("sides fit").is_empty()
    }

    fn asked(&self, at: &Coordinate) -> bool {
        self.tokens.contains(&at.token) && self.layers.contains(&at.layer)
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
            self.group as u64,
            u64::from(self.layer),
            u64::from(self.tensor),
            u64::from(self.head),
            self.token,
            self.byte,
        ];
        fields.iter().fold(0, |n, f| {
            assert!(*f < 256);
            n << 8 | f
        })
    }
}

/// Where each coordinate that a rank's page list covers lies: region and offset.
fn places(side: &Side, table: &Table) -> HashMap<Coordinate, (usize, u64)> {
    let mut out = HashMap::new();
    let mut region = 0;
    for (group, l) in side.groups.iter().enumerate() {
        let heads: Vec<u32> = side.shard.heads(l).expect("heads").collect();
        let (row, n, each) = (l.row_bytes(), heads.len() as u64, u64::from(l.page_tokens));
        for layer in side.shard.layers(l) {
            for tensor in 0..l.kind.tensors() {
                let (part, half) = if l.kind == Kind::Kv { (tensor, 0) } else { (0, u64::from(tensor)) };
                let halves = if l.kind == Kind::Fused { 2 } else { 1 };
                for (i, &page) in table.pages[group].iter().enumerate() {
                    for slot in 0..each {
                        let token = (table.start / each + i as u64) * each + slot;
                        for (h, &head) in (0..).zip(&heads) {
                            for byte in 0..row {
                                let half_page = u64::from(page) * halves + half;
                                let off = match l.order {
                                    Order::Nhd => ((half_page * each + slot) * n + h) * row + byte,
                                    Order::Hnd => ((half_page * n + h) * each + slot) * row + byte,
                                };
                                let at = Coordinate { group, layer, tensor, head, token, byte };
                                out.insert(at, (region + part as usize, off));
                            }
                        }
                    }
                }
            }
            region += l.parts() as usize;
        }
    }
    out
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
            let bytes = page_bytes(l, &side.shard).expect("page");
            assert_eq!(s.len, bytes * u64::from(table.count[s.group as usize]));
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
