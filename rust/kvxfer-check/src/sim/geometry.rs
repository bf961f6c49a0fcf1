//! What every byte of an agent's memory is: which page of which group, and which element of which token.

use kvxfer_fabric::sim::SplitMix64;
use kvxfer_proto::{Kind, LayoutError, Order, Side};
use std::ops::Range;

/// A number that fits the address space, as all of them do here.
pub(super) fn ix(n: u64) -> usize {
    usize::try_from(n).unwrap_or(usize::MAX)
}

/// The element at one place in a page.
#[derive(Clone, Copy, Debug)]
struct Cell {
    /// Token of the page.
    slot: u64,
    /// Names group, layer, tensor, head and element; the same on every rank.
    coord: u64,
}

/// One region: pages of the same cells.
#[derive(Clone, Debug)]
pub(super) struct Region {
    pub(super) group: usize,
    pub(super) page_bytes: u64,
    cells: Vec<Cell>,
}

/// All regions of a side.
#[derive(Clone, Debug)]
pub(super) struct Geometry {
    pub(super) regions: Vec<Region>,
    /// Tokens a page, by group.
    pub(super) page_tokens: Vec<u64>,
    /// Pages, by group.
    pub(super) counts: Vec<u32>,
}

/// Spreads a number over all 64 bits.
pub(super) fn mix(n: u64) -> u64 {
    SplitMix64::new(n).next_u64()
}

/// The byte that a room's token has at this coordinate.
fn tag(room: u64, token: u64, coord: u64) -> u8 {
    let spread = room ^ token.wrapping_mul(0xD6E8_FEB8_6659_FD93) ^ coord;
    mix(spread).to_le_bytes()[7]
}

/// The byte that the engine puts at this coordinate of a page that no room holds.
fn poison(agent: u64, page: u64, epoch: u64, at: u64, coord: u64) -> u8 {
    mix(mix(agent << 48 ^ page << 24 ^ epoch) ^ at << 32 ^ coord).to_le_bytes()[7]
}

/// A page that no room holds, and how often that has been so.
#[derive(Clone, Copy, Debug)]
pub(super) struct Blank {
    pub(super) agent: u64,
    pub(super) page: u64,
    pub(super) epoch: u64,
}

/// A room's part of a page.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Held {
    /// The room's own number.
    pub(super) room: u64,
    /// Token that slot 0 would hold.
    pub(super) base: u64,
    /// Tokens of the room.
    pub(super) tokens: (u64, u64),
}

impl Held {
    /// The token at a slot, if it is one of the room's.
    fn token(&self, slot: u64) -> Option<u64> {
        let t = self.base + slot;
        (self.tokens.0 <= t && t < self.tokens.1).then_some(t)
    }
}

/// What must be where a room's tokens are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Tokens {
    /// The room's bytes.
    Whole,
    /// The room's bytes, or still what was there before.
    Begun,
    /// Anything: a copy of a push that was taken back reads whatever its source holds by then.
    Any,
}

impl Geometry {
    pub(super) fn new(side: &Side, counts: &[u32]) -> Result<Self, LayoutError> {
        let mut regions = Vec::new();
        for shape in side.regions(counts)? {
            let group = ix(u64::from(shape.group));
            let layout = side
                .groups
                .get(group)
                .ok_or_else(|| LayoutError(format!("region of group {group}, which there is not")))?;
            let heads = side.shard.heads(layout)?;
            let (pt, row) = (u64::from(layout.page_tokens), layout.row_bytes());
            let count = heads.len() as u64;
            let half = count * pt * row;
            let page_bytes = if layout.kind == Kind::Fused { 2 * half } else { half };
            let cells = (0..page_bytes)
                .map(|off| {
                    let within = off % half;
                    let (head, slot) = match layout.order {
                        Order::Hnd => (within / (pt * row), within % (pt * row) / row),
                        Order::Nhd => (within % (count * row) / row, within / (count * row)),
                    };
                    let tensor = if layout.kind == Kind::Fused { off / half } else { u64::from(shape.part) };
                    let fields = [
                        u64::from(shape.group),
                        u64::from(shape.layer),
                        tensor,
                        u64::from(heads.start) + head,
                        within % row,
                    ];
                    Cell { slot, coord: mix(fields.iter().fold(0, |a, f| a << 12 | f)) }
                })
                .collect();
            regions.push(Region { group, page_bytes, cells });
        }
        let page_tokens = side.groups.iter().map(|l| u64::from(l.page_tokens)).collect();
        Ok(Self { regions, page_tokens, counts: counts.to_vec() })
    }

    pub(super) fn region_lens(&self) -> Vec<u64> {
        self.regions
            .iter()
            .map(|r| r.page_bytes * u64::from(self.counts.get(r.group).copied().unwrap_or(0)))
            .collect()
    }

    /// Pages of a group that tokens `first..end` take when the first page holds `first`.
    pub(super) fn pages_for(&self, group: usize, tokens: (u64, u64)) -> usize {
        let pt = self.page_tokens[group];
        if tokens.1 <= tokens.0 { 0 } else { ix((tokens.0 % pt + tokens.1 - tokens.0).div_ceil(pt)) }
    }

    /// The token that slot 0 of page `index` of a list that begins with token `first` would hold.
    pub(super) fn base(&self, group: usize, first: u64, index: usize) -> u64 {
        (first / self.page_tokens[group] + index as u64) * self.page_tokens[group]
    }
}

impl Region {
    /// The page's bytes while no room holds it.
    pub(super) fn blank(&self, blank: Blank, region: usize) -> Vec<u8> {
        let Blank { agent, page, epoch } = blank;
        (0..)
            .zip(&self.cells)
            .map(|(at, c)| poison(agent, page, epoch, (region as u64) << 20 | at, c.coord))
            .collect()
    }

    /// Writes a room's tokens into a page's bytes.
    pub(super) fn fill(&self, held: &Held, bytes: &mut [u8]) {
        for (c, b) in self.cells.iter().zip(bytes) {
            if let Some(t) = held.token(c.slot) {
                *b = tag(held.room, t, c.coord);
            }
        }
    }

    /// How many bytes of a page are wrong. Around its room's tokens everything must be as `before`.
    pub(super) fn wrong(&self, held: &Held, before: &[u8], bytes: &[u8], tokens: Tokens) -> u64 {
        let mut wrong = 0;
        for ((c, was), is) in self.cells.iter().zip(before).zip(bytes) {
            let right = match (held.token(c.slot), tokens) {
                (None, _) => is == was,
                (Some(t), Tokens::Whole) => *is == tag(held.room, t, c.coord),
                (Some(t), Tokens::Begun) => is == was || *is == tag(held.room, t, c.coord),
                (Some(_), Tokens::Any) => true,
            };
            wrong += u64::from(!right);
        }
        wrong
    }

    /// How many bytes of a write at these places of one page the room must not have there.
    pub(super) fn foreign(&self, held: &Held, places: Range<usize>, bytes: &[u8], tokens: Tokens) -> u64 {
        let cells = self.cells.get(places).unwrap_or_default();
        let is_right = |(c, b): &(&Cell, &u8)| {
            held.token(c.slot).is_some_and(|t| tokens == Tokens::Any || **b == tag(held.room, t, c.coord))
        };
        (cells.len() - cells.iter().zip(bytes).filter(is_right).count()) as u64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use kvxfer_proto::plan::{Cursor, Request, Template};
    use kvxfer_proto::{DType, PageLayout, Shard};

    /// What the planner moves between two geometries is what this file says that the bytes are.
    #[test]
    fn the_planner_and_the_shadow_agree_on_every_byte() {
        for (from, to) in [(Kind::Kv, Kind::Fused), (Kind::Fused, Kind::Kv), (Kind::Latent, Kind::Latent)] {
            let layout = |kind, order, page_tokens| PageLayout {
                layers: 3,
                kv_heads: 2,
                head_dim: 2,
                page_tokens,
                dtype: DType::Uint8,
                order,
                kind,
                ..PageLayout::PLAIN
            };
            let one = Shard { tp_rank: 0, tp_size: 1, pp_rank: 0, pp_size: 1 };
            let src = Side { groups: vec![layout(from, Order::Nhd, 8)], shard: one };
            let dst = Side { groups: vec![layout(to, Order::Hnd, 4)], shard: one };
            let (sg, dg) = (Geometry::new(&src, &[4]).unwrap(), Geometry::new(&dst, &[8]).unwrap());
            let tokens = (3, 13);
            let (s_pages, d_pages) = ([2u32, 0], [7u32, 1, 4, 3]);
            let mut s_mem: Vec<Vec<u8>> = sg.region_lens().iter().map(|n| vec![0; ix(*n)]).collect();
            let mut d_mem: Vec<Vec<u8>> = dg.region_lens().iter().map(|n| vec![0; ix(*n)]).collect();
            for (r, region) in sg.regions.iter().enumerate() {
                for (i, p) in s_pages.iter().enumerate() {
                    let at = ix(u64::from(*p) * region.page_bytes);
                    let held = Held { room: 9, base: sg.base(0, 3, i), tokens };
                    region.fill(&held, &mut s_mem[r][at..at + ix(region.page_bytes)]);
                }
            }
            let request = Request {
                src_pages: vec![s_pages[..].into()],
                src_tokens: 3..13,
                dst_pages: vec![d_pages[..].into()],
                dst_tokens: 3..13,
                tokens: 3..13,
                layers: 0..3,
            };
            let template = std::sync::Arc::new(Template::new(&src, &dst).unwrap());
            let mut pieces = Vec::new();
            let mut cursor = Cursor::new(template, request, &[4], &[8]).unwrap();
            while cursor.fill(&mut pieces, 64, 5) {}
            for p in pieces {
                let bytes = s_mem[p.src_region as usize][ix(p.src_off)..ix(p.src_off + p.len)].to_vec();
                d_mem[p.dst_region as usize][ix(p.dst_off)..ix(p.dst_off + p.len)].copy_from_slice(&bytes);
            }
            for (r, region) in dg.regions.iter().enumerate() {
                for (i, p) in d_pages.iter().enumerate() {
                    let at = ix(u64::from(*p) * region.page_bytes);
                    let held = Held { room: 9, base: dg.base(0, 3, i), tokens };
                    let zero = vec![0; ix(region.page_bytes)];
                    let bytes = &d_mem[r][at..at + ix(region.page_bytes)];
                    assert_eq!(
                        region.wrong(&held, &zero, bytes, Tokens::Whole),
                        0,
                        "{from:?} {to:?} page {p}"
                    );
                    let other = Held { room: 8, ..held };
                    assert!(region.wrong(&other, &zero, bytes, Tokens::Whole) > 0);
                }
            }
        }
    }
}
