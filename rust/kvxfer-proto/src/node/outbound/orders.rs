//! What prefill's engine orders: open, push, retract.

use super::{OutPush, Outbound, Part};
use crate::error::{Reason, ReasonKind};
use crate::ids::{PushId, Room, Time};
use crate::msg::{Msg, Retract};
use crate::node::parts::Progress;
use crate::node::types::{Event, EventKind, Push, Stage};
use crate::node::{Action, Node, RoomStats, Timer, enough_pages, patience};
use std::time::Duration;

impl Node {
    /// Prefill bootstraps a room before there is anything to push.
    pub fn handle_open(
        &mut self,
        now: Time,
        room: Room,
        bootstrap: Option<Duration>,
        waiting: Option<Duration>,
    ) {
        if self.inbound.contains_key(&room) {
            let text = format!("room {room} is expected on this agent: it cannot be pushed from it too");
            self.fail_inbound(now, room, Reason::new(ReasonKind::RoomInUse, text));
            return;
        }
        let _ = self.local_outbound(now, room, bootstrap, waiting);
    }

    /// The room as this side's caller knows it, or nothing if it is over.
    pub(super) fn local_outbound(
        &mut self,
        now: Time,
        room: Room,
        bootstrap: Option<Duration>,
        waiting: Option<Duration>,
    ) -> Option<&mut Outbound> {
        if !self.outbound.contains_key(&room) {
            let refusal = match self.tombs.get(room) {
                Some(tomb) if tomb.is_told() => return None,
                Some(tomb) => {
                    let reason = tomb.reason.clone();
                    self.tombs.tell(self.tomb_limits(), room);
                    Some(reason)
                }
                None if self.closing => Some(Reason::new(ReasonKind::Closed, "the agent was closed")),
                None => None,
            };
            if let Some(reason) = refusal {
                self.count_failure(&reason);
                self.actions.push_back(Action::Stage(room, Stage::Failed));
                self.emit(room, EventKind::Failed(reason), true, RoomStats::default());
                return None;
            }
        }
        let bootstrap = patience(bootstrap, self.cfg.bootstrap_timeout);
        let waiting = patience(waiting, self.cfg.waiting_timeout);
        let r = self.outbound.entry(room).or_insert_with(|| Outbound::new(now, bootstrap, waiting));
        if !std::mem::replace(&mut r.local, true) {
            let granted = !r.dests.is_empty();
            self.early_rooms = self.early_rooms.saturating_sub(usize::from(granted));
            self.not_early(room);
            let r = self.outbound.get_mut(&room)?;
            // The caller's time begins with the caller.
            r.progress = Progress::new(now, bootstrap, waiting);
            if granted && r.progress.advance(now, Stage::Waiting) {
                self.actions.push_back(Action::Stage(room, Stage::Waiting));
            }
            let at = r.progress.patience.at;
            self.timers.set(at, Timer::Outbound(room));
        }
        self.outbound.get_mut(&room)
    }

    /// Prefill delivers pages: now, or when the grants come.
    pub fn handle_push(&mut self, now: Time, push: Push) {
        let (room, id) = (push.room, push.id);
        if self.inbound.contains_key(&room) {
            let text = format!("room {room} is expected on this agent: it cannot be pushed from it too");
            self.fail_inbound(now, room, Reason::new(ReasonKind::RoomInUse, text));
            return;
        }
        if let Err(reason) = self.check_push(&push) {
            if self.local_outbound(now, room, push.bootstrap_timeout, push.waiting_timeout).is_some() {
                self.fail_outbound(now, room, reason);
            }
            return;
        }
        let Some(r) = self.local_outbound(now, room, push.bootstrap_timeout, push.waiting_timeout) else {
            return;
        };
        if r.failure.is_some() {
            return;
        }
        if let Some(last) = r.last {
            let text = format!("room {room}: push {} came after push {}, which was the last", id.0, last.0);
            self.fail_outbound(now, room, Reason::new(ReasonKind::TokensMismatch, text));
            return;
        }
        if push.last {
            r.last = Some(id);
        }
        r.pushes.insert(id, OutPush { order: push, retracted: false, reported: false });
        self.pump_room(now, room);
    }

    pub(super) fn check_push(&self, push: &Push) -> Result<(), Reason> {
        let room = push.room;
        if push.pages.len() != self.side.groups.len() {
            let text =
                format!("room {room}: {} page lists for {} groups", push.pages.len(), self.side.groups.len());
            return Err(Reason::new(ReasonKind::PageError, text));
        }
        for (g, ((layout, list), count)) in
            self.side.groups.iter().zip(&push.pages).zip(&self.page_counts).enumerate()
        {
            enough_pages(room, g, layout, list.len(), push.tokens)?;
            self.check_odd_page(room, push.odd_page.filter(|(group, _)| *group == g))?;
            if let Some(page) = list.iter().find(|p| *p >= count) {
                let text = format!(
                    "room {room}: page {page} of group {g} is out of range: the group has pages 0 to {}",
                    count.saturating_sub(1)
                );
                return Err(Reason::new(ReasonKind::PageError, text));
            }
        }
        Ok(())
    }

    /// Refuses an id that no `u32` holds, by its own value.
    pub(in crate::node) fn check_odd_page(
        &self,
        room: Room,
        odd_page: Option<(usize, i64)>,
    ) -> Result<(), Reason> {
        let Some((group, page)) = odd_page else { return Ok(()) };
        let beyond = match page {
            i64::MIN => " or less",
            i64::MAX => " or more",
            _ => "",
        };
        let text = format!(
            "room {room}: page {page}{beyond} of group {group} is out of range: the group has pages 0 to {}",
            self.page_counts.get(group).map_or(0, |count| count.saturating_sub(1))
        );
        Err(Reason::new(ReasonKind::PageError, text))
    }

    /// Whether this push still stands and its pages are not ready: what waits on its behalf may be dropped otherwise.
    #[must_use]
    pub fn is_awaiting(&self, room: Room, push: PushId) -> bool {
        let live = self.outbound.get(&room).filter(|r| r.failure.is_none());
        live.and_then(|r| r.pushes.get(&push)).is_some_and(|p| !p.retracted && !p.order.ready)
    }

    /// The event of a push has completed: its pages may be read.
    pub fn handle_push_ready(&mut self, now: Time, room: Room, push: PushId) {
        if let Some(p) = self.outbound.get_mut(&room).and_then(|r| r.pushes.get_mut(&push)) {
            p.order.ready = true;
            self.pump_room(now, room);
        }
    }

    /// The engine takes a push's pages back (preemption).
    pub fn handle_retract(&mut self, now: Time, room: Room, push: PushId) {
        let Some(r) = self.outbound.get_mut(&room) else {
            self.emit(room, EventKind::Retracted(push), true, RoomStats::default());
            return;
        };
        let known = r.failure.is_none() && r.pushes.get(&push).is_some_and(|p| !p.retracted);
        if !known {
            // Already taken back, or the room's own released event covers it.
            return;
        }
        if let Some(p) = r.pushes.get_mut(&push) {
            p.retracted = true;
        }
        // Whatever replaces it comes with a new `last`: what is left of the old order is no longer all.
        r.last = None;
        let mut tell = Vec::new();
        for (key, dest) in &mut r.dests {
            // A destination that has our `Done { last }` may have given its pages away: what it got stands, and
            // nothing is written to it again.
            if dest.finished || dest.last_sent {
                continue;
            }
            match dest.parts.insert(push, Part::Void) {
                Some(Part::Writing(id)) => {
                    dest.parts.insert(push, Part::Stopping);
                    self.actions.push_back(Action::Abort(id));
                    if dest.unread.contains(&push) {
                        tell.push((*key, dest.seq));
                    }
                }
                Some(Part::Summing { id, offered, .. }) => {
                    dest.parts.insert(push, Part::Stopping);
                    self.actions.push_back(Action::Abort(id));
                    if offered || dest.unread.contains(&push) {
                        tell.push((*key, dest.seq));
                    }
                }
                Some(Part::Stopping) => {
                    dest.parts.insert(push, Part::Stopping);
                }
                Some(Part::Offered | Part::Done) => tell.push((*key, dest.seq)),
                Some(Part::Void) | None => {}
            }
        }
        for (key, seq) in tell {
            self.queue(now, key, Msg::Retract(Retract { room, seq, push }));
        }
        self.report_retracted(room);
    }

    /// Tells the caller of retracted pushes from whose pages nothing is read any more.
    pub(super) fn report_retracted(&mut self, room: Room) {
        let Some(r) = self.outbound.get_mut(&room) else { return };
        for (id, p) in &mut r.pushes {
            let stopping = r.dests.values().any(|d| d.parts.get(id) == Some(&Part::Stopping));
            if p.retracted && !p.reported && !stopping && r.failure.is_none() {
                p.reported = true;
                self.actions.push_back(Action::Event(Event {
                    room,
                    kind: EventKind::Retracted(*id),
                    released: true,
                    meta: None,
                    stats: r.progress.stats(),
                }));
            }
        }
    }
}
