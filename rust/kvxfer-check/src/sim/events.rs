//! What the processes tell their engines, and what lands: held against the contract.

use super::engine::Ends;
use super::geometry::{Tokens, ix};
use super::sums::Sum;
use super::world::World;
use kvxfer_proto::msg::{Frame, Msg};
use kvxfer_proto::node::{Direction, Event, EventKind, PeerKey};
use kvxfer_proto::{PushId, Reason, ReasonKind, Room};

/// What was so before a frame was handled, where that matters.
#[derive(Clone, Copy)]
pub(super) enum Before {
    Nothing,
    /// A cancel, or word of a failure: the room is void from then on.
    Voids(Room),
    /// A grant of a room that is void here, and the rooms that were known before.
    VoidGrant(Room, u64),
}

impl World<'_> {
    pub(super) fn look_before(&self, i: usize, key: PeerKey, frame: &Frame) -> Before {
        let a = &self.agents[i];
        if key.direction != Direction::TheyGrant || a.node.session_of(key) != Some(frame.session) {
            return Before::Nothing;
        }
        match &frame.msg {
            Msg::Cancel(m) => Before::Voids(m.room),
            Msg::RoomFailed(m) => Before::Voids(m.room),
            Msg::Grant(m) if a.voided.contains(&m.room) => {
                Before::VoidGrant(m.room, a.node.gauges().outbound)
            }
            _ => Before::Nothing,
        }
    }

    /// What a cancel has voided is refused, also when it is read after the cancel.
    pub(super) fn look_after(&mut self, i: usize, before: Before) {
        match before {
            Before::Nothing => {}
            Before::Voids(room) => {
                self.agents[i].voided.insert(room);
            }
            Before::VoidGrant(room, known) => {
                if self.agents[i].node.gauges().outbound > known {
                    let name = &self.agents[i].name;
                    self.log.violation(
                        self.now,
                        format_args!(
                            "{name} takes a grant of room {room}, which had ended there, for a new room"
                        ),
                    );
                }
            }
        }
    }

    pub(super) fn on_event(&mut self, i: usize, event: &Event) {
        let name = self.agents[i].name.clone();
        let shown = match &event.kind {
            EventKind::Failed(reason) => format!("Failed({:?}: {})", reason.kind, reason.text),
            other => format!("{other:?}"),
        };
        self.log.line(
            self.now,
            format_args!("{name} tells of room {}: {shown} released={}", event.room, event.released),
        );
        if let EventKind::Failed(reason) = &event.kind {
            self.check_reason(&name, event.room, reason);
        }
        let life = self.agents[i].life;
        let Some(&r) = self.by_room.get(&event.room) else {
            self.log
                .violation(self.now, format_args!("{name} tells of room {}, which nobody began", event.room));
            return;
        };
        let here = |e: &Ends| e.agent == i && e.life == life;
        if let Some(side) = self.rooms[r].decode.iter().position(|s| here(&s.ends)) {
            self.decode_event(i, r, side, event);
        } else if let Some(side) = self.rooms[r].prefill.iter().position(|s| here(&s.ends)) {
            self.prefill_event(i, r, side, event);
        } else {
            self.log.violation(
                self.now,
                format_args!("{name} tells of room {}, which this process was never told of", event.room),
            );
        }
        self.settle_room(r);
    }

    /// Everybody here keeps the rules: no fault of the network makes one accuse another of breaking them.
    fn check_reason(&mut self, name: &str, room: Room, reason: &Reason) {
        let accuses = matches!(
            reason.kind,
            ReasonKind::ProtocolError
                | ReasonKind::Internal
                | ReasonKind::TokensMismatch
                | ReasonKind::PageError
                | ReasonKind::ChecksumMismatch
        );
        if accuses && self.options.flaw.is_none() {
            self.log.violation(
                self.now,
                format_args!("{name} says of room {room} what no fault can cause: {}", reason.text),
            );
        }
    }

    /// A source's pages are read by its sums, too: they are not to be given back before.
    fn check_sums(&mut self, i: usize, room: Room, push: Option<PushId>) {
        let reads = |s: &Sum| s.of_source && s.room == room && push.is_none_or(|p| p == s.push);
        if self.agents[i].sums.values().any(reads) {
            let name = &self.agents[i].name;
            self.log.violation(
                self.now,
                format_args!("{name} releases pages of room {room} under a sum that reads them"),
            );
        }
    }

    /// Counts an event of a side. Whether it is the release of its pages.
    fn count_event(&mut self, name: &str, room: Room, ends: &mut Ends, event: &Event) -> bool {
        let now = self.now;
        let mut wrong = |text: &str| {
            self.log.violation(now, format_args!("{name} tells of room {room}: {:?}: {text}", event.kind));
        };
        match &event.kind {
            EventKind::Success | EventKind::Failed(_) => {
                ends.terminal += 1;
                ends.succeeded = event.kind == EventKind::Success;
                if ends.terminal > 1 {
                    wrong("the room had ended already");
                }
                if ends.succeeded && !event.released {
                    wrong("a success must release");
                }
                if !event.released {
                    ends.failed_at = Some(now);
                }
            }
            EventKind::Released if ends.terminal == 0 || !event.released => {
                wrong("a release without an end");
            }
            EventKind::Released | EventKind::Retracted(_) => {}
        }
        let is_release = event.released && !matches!(event.kind, EventKind::Retracted(_));
        if is_release {
            ends.released += 1;
            if ends.released > 1 {
                wrong("its pages were released already");
                return false;
            }
        }
        if !ends.named {
            wrong("its engine had not named it");
        }
        is_release
    }

    fn decode_event(&mut self, i: usize, r: usize, side: usize, event: &Event) {
        let name = self.agents[i].name.clone();
        let room = event.room;
        let mut ends = self.rooms[r].decode[side].ends.clone();
        let release = self.count_event(&name, room, &mut ends, event);
        if let (EventKind::Released, Some(at), true) = (&event.kind, ends.failed_at, release) {
            self.tally.drains.push(self.now - at);
        }
        let success = event.kind == EventKind::Success;
        if matches!(event.kind, EventKind::Failed(_)) {
            self.agents[i].voided.insert(room);
        }
        self.rooms[r].decode[side].ends = ends;
        if success && event.meta != self.rooms[r].meta {
            self.log.violation(self.now, format_args!("room {room} succeeds at {name} with other metadata"));
        }
        if release {
            let pages = std::mem::take(&mut self.rooms[r].decode[side].pages);
            let tokens = if success { Tokens::Whole } else { self.begun() };
            let wrong = self.wrong_bytes(i, &pages, tokens);
            if wrong > 0 {
                self.tally.corrupt_bytes += wrong;
                let tokens = self.rooms[r].tokens;
                self.log.violation(
                    self.now,
                    format_args!(
                        "{wrong} bytes of room {room} (tokens {tokens:?}, success={success}) are wrong at {name} in {pages:?}"
                    ),
                );
            }
            self.free_pages(i, &pages);
        }
    }

    /// What an unfinished room's tokens may hold.
    fn begun(&self) -> Tokens {
        if self.sender_writes() { Tokens::Begun } else { Tokens::Any }
    }

    fn prefill_event(&mut self, i: usize, r: usize, side: usize, event: &Event) {
        let name = self.agents[i].name.clone();
        let mut ends = self.rooms[r].prefill[side].ends.clone();
        let release = self.count_event(&name, event.room, &mut ends, event);
        self.rooms[r].prefill[side].ends = ends;
        if matches!(event.kind, EventKind::Failed(_)) {
            self.agents[i].voided.insert(event.room);
        }
        if let EventKind::Retracted(push) = event.kind {
            self.check_sums(i, event.room, Some(push));
            let s = &mut self.rooms[r].prefill[side];
            if s.ends.released == 0
                && let Some(at) = s.old.iter().position(|o| o.stopping.contains(&push))
            {
                s.old[at].stopping.remove(&push);
                if s.old[at].stopping.is_empty() {
                    let pages = s.old.remove(at).pages;
                    self.free_pages(i, &pages);
                }
            }
        }
        if release {
            self.check_sums(i, event.room, None);
            let s = &mut self.rooms[r].prefill[side];
            let mut all: Vec<_> = std::mem::take(&mut s.old).into_iter().map(|o| o.pages).collect();
            all.extend(s.pages.take());
            for pages in all {
                self.free_pages(i, &pages);
            }
        }
    }

    /// Whether a side has nothing more to come.
    fn side_over(&self, e: &Ends) -> bool {
        let a = &self.agents[e.agent];
        let gone = !a.alive || a.life != e.life;
        gone || e.given_up || (e.named && e.terminal > 0 && e.released > 0)
    }

    /// Ends a room whose every side has ended.
    pub(super) fn settle_room(&mut self, r: usize) {
        let rec = &self.rooms[r];
        if !self.live.contains(&r) || !rec.sides().all(|e| self.side_over(e)) {
            return;
        }
        let told = |e: &&Ends| {
            let a = &self.agents[e.agent];
            e.named && a.alive && a.life == e.life
        };
        let mut decode: Vec<&Ends> = rec.decode.iter().map(|s| &s.ends).filter(told).collect();
        if decode.is_empty() {
            decode = rec.prefill.iter().map(|s| &s.ends).filter(told).collect();
        }
        let given_up = rec.sides().any(|e| e.given_up);
        let how = if !decode.is_empty() && !given_up && decode.iter().all(|e| e.succeeded) {
            self.tally.succeeded += 1;
            "success"
        } else if rec.was_cancelled {
            self.tally.cancelled += 1;
            "cancelled"
        } else {
            self.tally.failed += 1;
            "failed"
        };
        let room = rec.room;
        self.log.line(self.now, format_args!("room {room} is over: {how}"));
        self.room_over(r, how == "success");
    }

    /// A process is gone, and with it its part of every room.
    pub(super) fn settle_rooms(&mut self) {
        for r in self.live.clone() {
            self.settle_room(r);
        }
    }

    /// Holds a write that landed against whoever has the page.
    pub(super) fn check_landed(&mut self, from: usize, to: usize, region: u32, offset: u64, len: u64) {
        self.tally.writes_landed += 1;
        let a = &self.agents[to];
        let Some(shape) = a.geo.regions.get(ix(u64::from(region))) else {
            self.check_slot(from, to, offset, len);
            return;
        };
        let bytes = self.net.read(a.fabric.node(), region, offset, len).unwrap_or_default();
        let (mut at, end) = (offset, offset + len);
        let (mut foreign, mut free) = (0, None);
        let (mut pages, mut holder) = (Vec::new(), None);
        while at < end {
            let page = at / shape.page_bytes;
            let within = ix(at % shape.page_bytes);
            let n = (end - at).min(shape.page_bytes - at % shape.page_bytes);
            pages.push(page);
            match a.owner[shape.group][ix(page)] {
                None => free = Some((page, a.last[shape.group][ix(page)])),
                Some(owner) => {
                    holder = Some(owner.room);
                    let part = &bytes[ix(at - offset)..ix(at - offset + n)];
                    foreign += shape.foreign(&owner.held, within..within + ix(n), part, self.begun());
                }
            }
            at += n;
        }
        self.log.line(
            self.now,
            format_args!(
                "a write of {} lands at {}: region {region} offset {offset} length {len}, pages {pages:?} of room {holder:?}",
                self.agents[from].name, self.agents[to].name
            ),
        );
        if let Some((page, last)) = free {
            self.tally.late_writes += 1;
            self.log.violation(
                self.now,
                format_args!(
                    "late write: {} wrote {len} bytes at offset {offset} of region {region} of {}, page {page}, which no room holds (last held by (room, until) {last:?})",
                    self.agents[from].name, self.agents[to].name
                ),
            );
        } else if foreign > 0 {
            self.tally.late_writes += 1;
            self.log.violation(
                self.now,
                format_args!(
                    "foreign write: {} wrote {len} bytes at offset {offset} of region {region} of {}, pages {pages:?} of room {holder:?}, and {foreign} of them are not that room's",
                    self.agents[from].name, self.agents[to].name
                ),
            );
        }
    }

    /// Everything must have ended once, and nothing may be held.
    pub(super) fn conclude(&mut self) {
        for r in self.live.clone() {
            self.tally.unended += 1;
            let rec = &self.rooms[r];
            let sides: Vec<String> = rec
                .sides()
                .filter(|e| !self.side_over(e))
                .map(|e| {
                    let name = &self.agents[e.agent].name;
                    format!("{name}: named={} ends={} releases={}", e.named, e.terminal, e.released)
                })
                .collect();
            let room = rec.room;
            self.log.violation(self.now, format_args!("room {room} has not ended: {}", sides.join("; ")));
        }
        for i in 0..self.agents.len() {
            if !self.agents[i].alive {
                continue;
            }
            let (mut held, mut missing) = (self.agents[i].node.gauges(), 0);
            for g in 0..self.agents[i].free.len() {
                let all = ix(u64::from(self.agents[i].geo.counts[g]));
                missing += (all - self.agents[i].free[g].len()) as u64;
                for page in self.agents[i].free[g].clone() {
                    self.check_blank(i, g, page, "looked at in the end");
                }
            }
            let leaked = missing.max(held.granted_pages);
            self.tally.leaked_pages += leaked;
            // Sessions stay up, with their timers and with what is not acknowledged yet.
            held.peers = 0;
            held.tombstones = 0;
            held.timers = 0;
            held.unacknowledged = 0;
            let a = &self.agents[i];
            if leaked > 0
                || held != kvxfer_proto::node::Gauges::default()
                || !a.lane.is_empty()
                || !a.sums.is_empty()
            {
                let name = &a.name;
                self.log.violation(
                    self.now,
                    format_args!("{name} holds {missing} pages in the end, and its node {held:?}"),
                );
            }
            self.add_counters(i);
        }
    }

    /// Keeps what a process has counted, before it is gone.
    pub(super) fn add_counters(&mut self, i: usize) {
        let c = self.agents[i].node.counters();
        if c.protocol_errors > 0 && self.options.flaw.is_none() {
            let name = &self.agents[i].name;
            self.log.violation(
                self.now,
                format_args!("{name} saw {} messages that break the protocol", c.protocol_errors),
            );
        }
        self.tally.sessions += c.sessions;
        self.tally.fences += c.fences;
        self.tally.stale_refused += c.stale_refused;
    }
}
