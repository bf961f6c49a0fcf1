//! Checksums of what came: a piece counts once our sum of it equals the source's.
//!
//! Pieces of one rank are summed one after the other, in the order in which they were said to be done, so that the
//! last one is counted last. A sum only reads: it holds no pages, and what it gives after a retract is not looked at.

use super::InGrant;
use crate::error::{Reason, ReasonKind};
use crate::ids::{PushId, Room, Seq, Time};
use crate::msg::{Copied, Done, Msg, Verify};
use crate::node::types::{DeliveryEnd, DeliveryId, Mover, Summing};
use crate::node::{Action, DeliveryFor, Node, PeerKey, area, intersect};
use crate::plan::{End, Extent};

impl InGrant {
    /// Forgets what was to be summed; gives the sum that is under way, which has to be stopped.
    pub(super) fn drop_checks(&mut self) -> impl Iterator<Item = DeliveryId> + use<> {
        self.checks.clear();
        self.checking.take().into_iter()
    }
}

impl Node {
    /// Whether a piece that is said to be done has to wait: for its own sum, or for those of earlier ones.
    pub(super) fn check_first(&mut self, now: Time, key: PeerKey, m: &Done) -> bool {
        let room = m.room;
        let Some(r) = self.inbound.get_mut(&room) else { return false };
        let Some(g) = r.grants.get_mut(&key) else { return false };
        // A piece that was not granted is refused by the count, and has no rows of ours.
        let inside = g.owed.as_ref().is_some_and(|o| intersect(o, &m.span).as_ref() == Some(&m.span));
        let wanted = r.verify != Verify::Off && area(&m.span) > 0 && inside;
        if wanted && m.checksum.is_none() {
            let text = format!(
                "room {room}: push {} is said to be done without the checksum that was asked for",
                m.push.0
            );
            self.fail_inbound(now, room, Reason::new(ReasonKind::ProtocolError, text));
            return true;
        }
        if !wanted && g.checks.is_empty() {
            return false;
        }
        g.checks.push_back(m.clone());
        r.progress.touch(now);
        self.next_check(now, room, key);
        true
    }

    /// Counts what needs no sum, and begins the next one unless one is under way.
    fn next_check(&mut self, now: Time, room: Room, key: PeerKey) {
        loop {
            let Some(r) = self.inbound.get_mut(&room) else { return };
            let Some(g) = r.grants.get_mut(&key) else { return };
            if g.checking.is_some() {
                return;
            }
            let Some(first) = g.checks.front() else { return };
            if area(&first.span) == 0 {
                if let Some(done) = g.checks.pop_front() {
                    self.count_done(now, key, done);
                }
                continue;
            }
            let push = first.push;
            let extent = Extent {
                end: End::Destination,
                pages: r.pages.clone(),
                list: r.tokens.0..r.tokens.1,
                room: r.tokens.0..r.tokens.1,
                tokens: first.span.tokens.0..first.span.tokens.1,
                layers: first.span.layers.0..first.span.layers.1,
                sample: r.verify == Verify::Sample,
            };
            let id = self.next_delivery(DeliveryFor::Check(room, key));
            if let Some(g) = self.inbound.get_mut(&room).and_then(|r| r.grants.get_mut(&key)) {
                g.checking = Some(id);
            }
            self.actions.push_back(Action::Sum(Summing { id, peer: key, room, push, extent }));
            return;
        }
    }

    /// A sum of ours came to an end.
    pub(in crate::node) fn check_over(
        &mut self,
        now: Time,
        id: DeliveryId,
        room: Room,
        key: PeerKey,
        end: DeliveryEnd,
    ) {
        let name = self.peer_name(key);
        let Some(r) = self.inbound.get_mut(&room) else { return };
        let verify = r.verify;
        let Some(g) = r.grants.get_mut(&key).filter(|g| g.checking == Some(id)) else { return };
        g.checking = None;
        let seq = g.seq;
        let Some(done) = g.checks.pop_front() else { return };
        let push = done.push.0;
        let reason = match end {
            DeliveryEnd::Summed(sum) if Some(sum) == done.checksum => {
                self.tell_read(now, room, key, seq, done.push);
                self.count_done(now, key, done);
                self.next_check(now, room, key);
                return;
            }
            DeliveryEnd::Summed(sum) => Reason::new(
                ReasonKind::ChecksumMismatch,
                format!(
                    "room {room}: push {push}, layers {:?} and tokens {:?}: checksum ({}) is {sum:#018x} here and \
                     {:#018x} at {name}: bytes were changed on their way, or in the source's pages before their release",
                    done.span.layers,
                    done.span.tokens,
                    if verify == Verify::Sample { "sample" } else { "full" },
                    done.checksum.unwrap_or(0),
                ),
            ),
            DeliveryEnd::Failed(reason) => reason,
            DeliveryEnd::Aborted | DeliveryEnd::Complete { .. } => Reason::new(
                ReasonKind::FabricError,
                format!("room {room}: the sum of push {push} was stopped"),
            ),
        };
        self.fail_inbound(now, room, reason);
    }

    /// A push was taken back: it needs no sum any more.
    pub(super) fn drop_check(&mut self, now: Time, room: Room, key: PeerKey, push: PushId) {
        let Some(g) = self.inbound.get_mut(&room).and_then(|r| r.grants.get_mut(&key)) else { return };
        let (seq, before) = (g.seq, g.checks.len());
        if g.checking.is_some() && g.checks.front().is_some_and(|d| d.push == push) {
            self.actions.extend(g.checking.take().map(Action::Abort));
        }
        g.checks.retain(|d| d.push != push);
        if g.checks.len() < before {
            self.tell_read(now, room, key, seq, push);
            self.next_check(now, room, key);
        }
    }

    /// Where the sender writes, it may write in place of a push that it took back once we do not read it any more.
    fn tell_read(&mut self, now: Time, room: Room, key: PeerKey, seq: Seq, push: PushId) {
        if self.peers.get(&key).and_then(|p| p.attached) == Some(Mover::Sender) {
            self.queue(now, key, Msg::Copied(Copied { room, seq, push, error: None }));
        }
    }
}
