//! The inference engines: rooms, pages, and what they order of their agents.

use super::geometry::{Blank, Held, Tokens, ix};
use super::setup::MAX_TOKENS;
use super::world::{Engine, Job, What, World};
use kvxfer_proto::msg::Verify;
use kvxfer_proto::node::{Expect, Push, Source};
use kvxfer_proto::{PushId, Reason, ReasonKind, Room};
use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

/// How long a rank tries again for pages that it lacks.
const PAGE_TRIES: u32 = 4000;

/// Page lists, one a group.
pub(super) type Pages = Vec<Arc<[u32]>>;

/// Who has a page, and which part of the room it holds.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Owner {
    pub(super) room: Room,
    pub(super) held: Held,
}

/// What a rank's engine does next with a room.
#[derive(Clone, Copy, Debug)]
pub(super) enum Order {
    /// Decode rank `side` expects.
    Expect { room: usize, side: usize, tries: u32 },
    /// Prefill rank `side` names the room without pushing.
    Open { room: usize, side: usize },
    /// Prefill rank `side` pushes its next chunk.
    Push { room: usize, side: usize, tries: u32 },
    /// Prefill rank `side` takes everything back and begins again.
    Retract { room: usize, side: usize },
    /// The agent's engine gives the room up.
    Cancel { room: usize },
}

/// What one rank has been told of a room.
#[derive(Clone, Debug, Default)]
pub(super) struct Ends {
    pub(super) agent: usize,
    pub(super) life: u32,
    /// Its engine has named the room.
    pub(super) named: bool,
    /// Its engine will not.
    pub(super) given_up: bool,
    pub(super) terminal: u32,
    pub(super) released: u32,
    pub(super) succeeded: bool,
    pub(super) failed_at: Option<u64>,
}

/// A chunk of a room at one source.
#[derive(Clone, Copy, Debug)]
pub(super) struct Chunk {
    pub(super) tokens: (u64, u64),
    pub(super) layers: Option<(u32, u32)>,
}

/// Source pages, and the retracted pushes that may still read them.
#[derive(Clone, Debug)]
pub(super) struct SourcePages {
    pub(super) pages: Pages,
    pub(super) stopping: BTreeSet<PushId>,
}

#[derive(Clone, Debug, Default)]
pub(super) struct DecodeSide {
    pub(super) ends: Ends,
    pub(super) pages: Pages,
}

#[derive(Clone, Debug, Default)]
pub(super) struct PrefillSide {
    pub(super) ends: Ends,
    chunks: Vec<Chunk>,
    next: usize,
    retracts: u32,
    /// Pages of the pushes that stand.
    pub(super) pages: Option<Pages>,
    pushes: Vec<PushId>,
    pub(super) old: Vec<SourcePages>,
}

/// One request's hand-off.
#[derive(Clone, Debug)]
pub(super) struct RoomRec {
    pub(super) room: Room,
    source: Source,
    pub(super) tokens: (u64, u64),
    /// First token that prefill pushes.
    first: u64,
    pub(super) meta: Option<Arc<[u8]>>,
    timeout: Option<Duration>,
    pub(super) decode: Vec<DecodeSide>,
    pub(super) prefill: Vec<PrefillSide>,
    pub(super) was_cancelled: bool,
}

impl RoomRec {
    /// A room that a test orders by hand.
    #[cfg(test)]
    pub(super) fn by_hand(room: Room, tokens: (u64, u64), decode: Ends, prefill: Ends) -> Self {
        Self {
            room,
            source: Source { address: "prefill-0".into(), dp_rank: 0 },
            tokens,
            first: 0,
            meta: None,
            timeout: None,
            decode: vec![DecodeSide { ends: decode, pages: Vec::new() }],
            prefill: vec![PrefillSide { ends: prefill, ..PrefillSide::default() }],
            was_cancelled: false,
        }
    }

    pub(super) fn sides(&self) -> impl Iterator<Item = &Ends> {
        self.decode.iter().map(|s| &s.ends).chain(self.prefill.iter().map(|s| &s.ends))
    }
}

impl World<'_> {
    /// Begins rooms until as many are under way as there may be.
    pub(super) fn begin_rooms(&mut self) {
        while self.live.len() + self.pausing < ix(u64::from(self.options.concurrent.max(1)))
            && self.rooms.len() < ix(u64::from(self.options.rooms))
        {
            let (prefill, decode) = (self.choose(false), self.choose(true));
            match (prefill, decode) {
                (Some(p), Some(d)) => self.begin_room(p, d),
                _ => self.pause(1000),
            }
        }
    }

    /// The router sends no request to an engine of which a rank is known to be gone.
    fn choose(&mut self, decode: bool) -> Option<usize> {
        let engines = if decode { &self.decodes } else { &self.prefills };
        let whole = |e: &Engine| e.agents.iter().all(|a| self.agents[*a].alive);
        let all: Vec<usize> = (0..).zip(engines).filter(|(_, e)| whole(e)).map(|(i, _)| i).collect();
        let last = all.len().checked_sub(1)? as u64;
        Some(all[ix(self.draw((0, last)))])
    }

    /// Leaves a place for a room empty for a while.
    fn pause(&mut self, delay: u64) {
        self.pausing += 1;
        self.at(self.now + delay, What::Begin);
    }

    fn begin_room(&mut self, p: usize, d: usize) {
        let index = self.rooms.len();
        let room = loop {
            let Some(room) = Room::new(self.rng.next_u64() >> 1) else { continue };
            if !self.by_room.contains_key(&room) {
                break room;
            }
        };
        let end = self.draw((1, MAX_TOKENS));
        let start = match self.draw((0, 9)) {
            0 => end,
            1..=4 => self.draw((0, end - 1)),
            _ => 0,
        };
        let first = if self.rng.coin() { start } else { 0 };
        let meta = self.chance(2).then(|| room.get().to_le_bytes().repeat(1 + index % 9).into());
        // Few are short of time; an unpushed room must be.
        let unpushed = self.chance(100);
        let timeout = (unpushed || self.chance(40)).then(|| Duration::from_millis(self.rng.between(3, 60)));
        let ends = |w: &Self, agent: usize| Ends { agent, life: w.agents[agent].life, ..Ends::default() };
        let decode: Vec<DecodeSide> = self.decodes[d]
            .agents
            .iter()
            .map(|a| DecodeSide { ends: ends(self, *a), pages: Vec::new() })
            .collect();
        let mut prefill = Vec::new();
        for a in self.prefills[p].agents.clone() {
            let chunks = self.chunks((first, end));
            let retracts = u32::from(self.chance(12));
            prefill.push(PrefillSide { ends: ends(self, a), chunks, retracts, ..PrefillSide::default() });
        }
        let source = Source { address: self.prefills[p].name.as_str().into(), dp_rank: 0 };
        self.log.line(
            self.now,
            format_args!(
                "room {room} begins: {} to {}, tokens {start}..{end} (pushed from {first}), timeout {timeout:?}",
                self.prefills[p].name, self.decodes[d].name
            ),
        );
        self.plan_room(index, &decode, &prefill, unpushed);
        self.rooms.push(RoomRec {
            room,
            source,
            tokens: (start, end),
            first,
            meta,
            timeout,
            decode,
            prefill,
            was_cancelled: false,
        });
        self.by_room.insert(room, index);
        self.live.insert(index);
        self.due_faults();
    }

    /// How one source cuts a room up.
    fn chunks(&mut self, (first, end): (u64, u64)) -> Vec<Chunk> {
        let mut cuts = vec![first];
        if self.chance(2) {
            for _ in 0..self.draw((1, 3)) {
                let cut = self.draw((first, end));
                cuts.push(cut);
            }
        }
        cuts.push(end);
        cuts.sort_unstable();
        cuts.dedup();
        if cuts.len() < 2 {
            cuts.push(end);
        }
        let by_layer = self.chance(3);
        let split = u32::try_from(self.draw((1, 3))).unwrap_or(1);
        let mut chunks = Vec::new();
        for pair in cuts.windows(2) {
            let tokens = (pair[0], pair[1]);
            if by_layer {
                chunks.push(Chunk { tokens, layers: Some((0, split)) });
                chunks.push(Chunk { tokens, layers: Some((split, 4)) });
            } else {
                chunks.push(Chunk { tokens, layers: None });
            }
        }
        chunks
    }

    /// When each rank's engine names the room: decode first, or prefill first (the router chose decode late).
    fn plan_room(&mut self, room: usize, decode: &[DecodeSide], prefill: &[PrefillSide], unpushed: bool) {
        let late = if self.chance(3) { self.draw((0, 8000)) } else { 0 };
        let silent = if unpushed { self.draw((0, prefill.len() as u64 - 1)) } else { u64::MAX };
        for (side, s) in decode.iter().enumerate() {
            let delay = late + self.draw((0, 300));
            self.job(delay, s.ends.agent, Job::Order(Order::Expect { room, side, tries: 0 }));
        }
        let compute = self.draw((0, 6000));
        for (side, s) in prefill.iter().enumerate() {
            let delay = compute + self.draw((0, 500));
            let order = if side as u64 == silent {
                self.count("unpushed");
                Order::Open { room, side }
            } else {
                Order::Push { room, side, tries: 0 }
            };
            self.job(delay, s.ends.agent, Job::Order(order));
        }
        for (side, s) in prefill.iter().enumerate().filter(|(_, s)| s.retracts > 0) {
            let delay = compute + self.draw((0, 9000));
            self.job(delay, s.ends.agent, Job::Order(Order::Retract { room, side }));
        }
        let millionths = self.draw((1, 1_000_000));
        #[expect(clippy::cast_precision_loss, reason = "a million is exact")]
        if (millionths as f64) <= self.options.cancel * 1e6 {
            let agents: Vec<usize> =
                decode.iter().map(|s| s.ends.agent).chain(prefill.iter().map(|s| s.ends.agent)).collect();
            for _ in 0..self.draw((1, 2)) {
                let who = agents[ix(self.draw((0, agents.len() as u64 - 1)))];
                let delay = self.draw((0, 14_000));
                self.job(delay, who, Job::Order(Order::Cancel { room }));
            }
        }
    }

    pub(super) fn order(&mut self, i: usize, order: Order) {
        match order {
            Order::Expect { room, side, tries } => self.expect(i, room, side, tries),
            Order::Open { room, side } => self.open(i, room, side),
            Order::Push { room, side, tries } => self.push(i, room, side, tries),
            Order::Retract { room, side } => self.retract(i, room, side),
            Order::Cancel { room } => self.cancel(i, room),
        }
        self.carry_out(i);
        self.want_turn(i);
    }

    /// Takes pages off the free lists for tokens `tokens`, all or none; `extra` more than needed.
    fn take_pages(&mut self, i: usize, room: Room, tokens: (u64, u64), extra: usize) -> Option<Pages> {
        let a = &mut self.agents[i];
        let groups = 0..a.free.len();
        let need: Vec<usize> = groups.map(|g| a.geo.pages_for(g, tokens) + extra).collect();
        if a.free.iter().zip(&need).any(|(free, n)| free.len() < *n) {
            return None;
        }
        let mut out = Vec::new();
        for (g, n) in need.into_iter().enumerate() {
            let at = a.free[g].len() - n;
            let mut pages = a.free[g].split_off(at);
            // The last one released is the first one granted.
            pages.reverse();
            for (k, page) in pages.iter().enumerate() {
                let base = a.geo.base(g, tokens.0, k);
                let held = Held { room: room.get(), base, tokens };
                a.owner[g][ix(u64::from(*page))] = Some(Owner { room, held });
            }
            out.push(Arc::from(pages));
        }
        Some(out)
    }

    fn expect(&mut self, i: usize, r: usize, side: usize, tries: u32) {
        let rec = &self.rooms[r];
        let (room, tokens) = (rec.room, rec.tokens);
        let extra = usize::from(rec.meta.is_some() && tokens.1 % 5 == 0);
        let Some(pages) = self.take_pages(i, room, tokens, extra) else {
            if tries >= PAGE_TRIES {
                self.rooms[r].decode[side].ends.given_up = true;
                self.settle_room(r);
            } else {
                self.job(1000, i, Job::Order(Order::Expect { room: r, side, tries: tries + 1 }));
            }
            return;
        };
        for (g, list) in pages.iter().enumerate() {
            for page in list.iter() {
                self.check_blank(i, g, *page, "granted");
            }
        }
        let name = &self.agents[i].name;
        self.log.line(self.now, format_args!("{name} expects room {room} in {pages:?}"));
        let (source, timeout) = (self.rooms[r].source.clone(), self.rooms[r].timeout);
        let s = &mut self.rooms[r].decode[side];
        s.ends.named = true;
        s.pages.clone_from(&pages);
        let now = self.time();
        let order = Expect {
            room,
            pages,
            odd_page: None,
            tokens,
            source,
            verify: match room.get() % 4 {
                0 => Verify::Sample,
                1 => Verify::Full,
                _ => Verify::Off,
            },
            bootstrap_timeout: timeout,
            waiting_timeout: timeout,
        };
        self.agents[i].node.handle_expect(now, order);
    }

    fn open(&mut self, i: usize, r: usize, side: usize) {
        let (now, room, timeout) = (self.time(), self.rooms[r].room, self.rooms[r].timeout);
        self.rooms[r].prefill[side].ends.named = true;
        self.log.line(self.now, format_args!("{} opens room {room}", self.agents[i].name));
        self.agents[i].node.handle_anew(room);
        self.agents[i].node.handle_open(now, room, timeout, timeout);
    }

    fn push(&mut self, i: usize, r: usize, side: usize, tries: u32) {
        let (room, first, end) = (self.rooms[r].room, self.rooms[r].first, self.rooms[r].tokens.1);
        if self.rooms[r].prefill[side].ends.terminal > 0 {
            return;
        }
        if self.rooms[r].prefill[side].pages.is_none() {
            let Some(pages) = self.take_pages(i, room, (first, end), 0) else {
                if tries < PAGE_TRIES {
                    self.job(1000, i, Job::Order(Order::Push { room: r, side, tries: tries + 1 }));
                } else if self.rooms[r].prefill[side].ends.named {
                    let now = self.time();
                    let reason = Reason::new(ReasonKind::Cancelled, "prefill has no pages");
                    self.agents[i].node.handle_cancel(now, room, reason);
                } else {
                    self.rooms[r].prefill[side].ends.given_up = true;
                    self.settle_room(r);
                }
                return;
            };
            self.rooms[r].prefill[side].pages = Some(pages);
        }
        let s = &mut self.rooms[r].prefill[side];
        let Some(chunk) = s.chunks.get(s.next).copied() else { return };
        s.next += 1;
        let last = s.next == s.chunks.len();
        let anew = !std::mem::replace(&mut s.ends.named, true);
        let whole = s.pages.clone().unwrap_or_default();
        self.fill(i, room, &whole, first, chunk.tokens);
        let pages = self.part_of(i, &whole, first, chunk.tokens);
        let a = &mut self.agents[i];
        let id = PushId(a.next_push);
        a.next_push += 1;
        self.rooms[r].prefill[side].pushes.push(id);
        let a = &self.agents[i];
        self.log.line(
            self.now,
            format_args!("{} pushes {} of room {room}: {chunk:?} last={last} from {pages:?}", a.name, id.0),
        );
        let rec = &self.rooms[r];
        let order = Push {
            room,
            id,
            pages,
            odd_page: None,
            tokens: chunk.tokens,
            layers: chunk.layers,
            last,
            meta: rec.meta.clone().filter(|_| last),
            ready: true,
            bootstrap_timeout: rec.timeout,
            waiting_timeout: rec.timeout,
        };
        let now = self.time();
        if anew {
            self.agents[i].node.handle_anew(room);
        }
        self.agents[i].node.handle_push(now, order);
        self.carry_out(i);
        if self.agents[i].voided.contains(&room) && self.rooms[r].prefill[side].ends.terminal == 0 {
            let name = &self.agents[i].name;
            self.log.violation(
                self.now,
                format_args!("{name} takes a push of room {room}, which a cancel had voided, for a new room"),
            );
        }
        if !last {
            let delay = self.draw((0, 2500));
            self.job(delay, i, Job::Order(Order::Push { room: r, side, tries: 0 }));
        }
    }

    /// The engine's kernels write a chunk's tokens.
    pub(super) fn fill(&mut self, i: usize, room: Room, pages: &Pages, first: u64, tokens: (u64, u64)) {
        let a = &self.agents[i];
        let node = a.fabric.node();
        for (n, region) in (0..).zip(&a.geo.regions) {
            for (k, page) in pages[region.group].iter().enumerate() {
                let held = Held { room: room.get(), base: a.geo.base(region.group, first, k), tokens };
                let at = u64::from(*page) * region.page_bytes;
                let mut bytes = self.net.read(node, n, at, region.page_bytes).unwrap_or_default();
                region.fill(&held, &mut bytes);
                if let Err(e) = self.net.write(node, n, at, &bytes) {
                    self.log.violation(self.now, format_args!("the engine fills no memory of its own: {e}"));
                }
            }
        }
    }

    /// The pages of a list that hold these tokens.
    fn part_of(&self, i: usize, pages: &Pages, first: u64, tokens: (u64, u64)) -> Pages {
        let geo = &self.agents[i].geo;
        let of_group = |(g, list): (usize, &Arc<[u32]>)| {
            let from = ix(tokens.0 / geo.page_tokens[g] - first / geo.page_tokens[g]);
            let n = geo.pages_for(g, tokens);
            Arc::from(list.get(from..from + n).unwrap_or_default())
        };
        pages.iter().enumerate().map(of_group).collect()
    }

    /// Preemption: the engine takes its pushes back, the last one first, and delivers again from other pages.
    fn retract(&mut self, i: usize, r: usize, side: usize) {
        let (now, room) = (self.time(), self.rooms[r].room);
        let s = &mut self.rooms[r].prefill[side];
        if s.ends.terminal > 0 || s.pushes.is_empty() || s.retracts == 0 {
            return;
        }
        s.retracts -= 1;
        let was_last = s.next == s.chunks.len();
        s.next = 0;
        let pushes = std::mem::take(&mut s.pushes);
        let pages = s.pages.take().unwrap_or_default();
        s.old.push(SourcePages { pages, stopping: pushes.iter().copied().collect() });
        self.count("retract");
        self.log.line(self.now, format_args!("{} retracts {pushes:?} of room {room}", self.agents[i].name));
        for id in pushes.into_iter().rev() {
            self.agents[i].node.handle_retract(now, room, id);
        }
        // Otherwise the next chunk's order is on its way already.
        if was_last {
            let delay = self.draw((0, 2000));
            self.job(delay, i, Job::Order(Order::Push { room: r, side, tries: 0 }));
        }
    }

    fn cancel(&mut self, i: usize, r: usize) {
        let room = self.rooms[r].room;
        let mine = |e: &&Ends| e.agent == i && e.named && e.terminal == 0;
        if self.rooms[r].sides().find(mine).is_none() {
            return;
        }
        let now = self.time();
        let writing = self.agents.iter().any(|a| a.alive && a.lane.is_writing(room));
        self.tally.cancelled_mid_write += u64::from(writing);
        self.count(if self.agents[i].decode { "cancel_by_decode" } else { "cancel_by_prefill" });
        self.rooms[r].was_cancelled = true;
        self.log.line(
            self.now,
            format_args!("{} cancels room {room} (writes in flight: {writing})", self.agents[i].name),
        );
        let reason = Reason::new(ReasonKind::Cancelled, format!("room {room} was cancelled"));
        self.agents[i].node.handle_cancel(now, room, reason);
    }

    // ---- pages that no room holds ----

    fn blank_of(&self, i: usize, g: usize, page: u32) -> Blank {
        let epoch = self.agents[i].epoch[g][ix(u64::from(page))];
        Blank { agent: i as u64, page: u64::from(page), epoch }
    }

    /// Fills a page that nobody holds with its next pattern.
    fn blank(&mut self, i: usize, g: usize, page: u32) {
        self.agents[i].epoch[g][ix(u64::from(page))] += 1;
        let blank = self.blank_of(i, g, page);
        let a = &self.agents[i];
        for (n, region) in a.geo.regions.iter().enumerate().filter(|(_, region)| region.group == g) {
            let at = u64::from(page) * region.page_bytes;
            let number = u32::try_from(n).unwrap_or(u32::MAX);
            if let Err(e) = self.net.write(a.fabric.node(), number, at, &region.blank(blank, n)) {
                self.log.violation(self.now, format_args!("the engine blanks no memory of its own: {e}"));
            }
        }
    }

    /// A new process's pages.
    pub(super) fn blank_all(&mut self, i: usize) {
        for g in 0..self.agents[i].free.len() {
            for page in 0..self.agents[i].geo.counts[g] {
                self.blank(i, g, page);
            }
        }
    }

    /// Gives pages back: they hold another pattern at once.
    pub(super) fn free_pages(&mut self, i: usize, pages: &Pages) {
        for (g, list) in pages.iter().enumerate() {
            for page in list.iter().rev() {
                let at = ix(u64::from(*page));
                let a = &mut self.agents[i];
                let Some(owner) = a.owner[g][at].take() else {
                    let name = &a.name;
                    self.log.violation(self.now, format_args!("page {page} of {name} is released twice"));
                    continue;
                };
                a.last[g][at] = Some((owner.room, self.now));
                a.free[g].push(*page);
                self.blank(i, g, *page);
            }
        }
    }

    /// A page that nobody held must be as the engine left it.
    pub(super) fn check_blank(&mut self, i: usize, g: usize, page: u32, when: &str) {
        let blank = self.blank_of(i, g, page);
        let a = &self.agents[i];
        let mut wrong = 0;
        for (n, region) in a.geo.regions.iter().enumerate().filter(|(_, region)| region.group == g) {
            let at = u64::from(page) * region.page_bytes;
            let number = u32::try_from(n).unwrap_or(u32::MAX);
            let bytes = self.net.read(a.fabric.node(), number, at, region.page_bytes).unwrap_or_default();
            let want = region.blank(blank, n);
            wrong += want.iter().zip(&bytes).filter(|(a, b)| a != b).count() as u64;
        }
        if wrong > 0 {
            self.tally.corrupt_bytes += wrong;
            let last = a.last[g][ix(u64::from(page))];
            let name = &a.name;
            self.log.violation(
                self.now,
                format_args!(
                    "{wrong} bytes of free page {page} of group {g} of {name} had changed when it was {when} (last held by (room, until) {last:?})"
                ),
            );
        }
    }

    /// How many bytes of a room's pages are wrong.
    pub(super) fn wrong_bytes(&self, i: usize, pages: &Pages, tokens: Tokens) -> u64 {
        let a = &self.agents[i];
        let mut wrong = 0;
        for (n, region) in a.geo.regions.iter().enumerate() {
            for page in pages[region.group].iter() {
                let Some(owner) = a.owner[region.group][ix(u64::from(*page))] else { continue };
                let at = u64::from(*page) * region.page_bytes;
                let number = u32::try_from(n).unwrap_or(u32::MAX);
                let bytes = self.net.read(a.fabric.node(), number, at, region.page_bytes).unwrap_or_default();
                let before = region.blank(self.blank_of(i, region.group, *page), n);
                wrong += region.wrong(&owner.held, &before, &bytes, tokens);
            }
        }
        wrong
    }

    /// The room's end makes place for the next; after a failure not at once, else a peer that is being fenced would
    /// use them all up.
    pub(super) fn room_over(&mut self, r: usize, succeeded: bool) {
        if self.live.remove(&r) {
            self.progress_at = self.now;
            let delay = if succeeded { 0 } else { self.draw((500, 40_000)) };
            self.pause(delay);
        }
    }
}
