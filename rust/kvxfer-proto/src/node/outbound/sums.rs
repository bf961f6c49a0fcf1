//! Checksums of what was pushed: our own bytes are summed after a piece is delivered and before it is said to be.

use super::Part;
use crate::ids::{PushId, Room, Time};
use crate::msg::{Owed, Verify};
use crate::node::coverage::intersect;
use crate::node::types::Summing;
use crate::node::{Action, DeliveryFor, Node, PeerKey};
use crate::plan::{End, Extent};

impl Node {
    /// Every byte of a part is at the destination. If it wants a checksum, our rows are summed first; until then the
    /// source's pages are held.
    pub(super) fn part_moved(
        &mut self,
        now: Time,
        room: Room,
        key: PeerKey,
        push: PushId,
        bytes: u64,
        writes: u64,
    ) {
        let wanted = self.outbound.get(&room).and_then(|r| r.dests.get(&key)).map(|d| d.verify);
        if matches!(wanted, None | Some(Verify::Off)) {
            self.part_done(now, (room, key, push), (bytes, writes), None);
            return;
        }
        let all_layers = self.own_layers();
        let id = self.next_delivery(DeliveryFor::Outbound(room, key, push));
        let Some(r) = self.outbound.get_mut(&room) else { return };
        r.progress.touch(now);
        let (Some(p), Some(dest)) = (r.pushes.get(&push), r.dests.get_mut(&key)) else { return };
        let pushed = Owed { layers: p.order.layers.unwrap_or(all_layers), tokens: p.order.tokens };
        let Some(span) = dest.owed.as_ref().and_then(|o| intersect(o, &pushed)) else { return };
        // Before a copy is confirmed its part is `Offered`; the end of our own writes has made it void.
        let offered = dest.parts.get(&push) == Some(&Part::Offered);
        dest.parts.insert(push, Part::Summing { id, bytes, writes, offered });
        self.actions.push_back(Action::Sum(Summing {
            id,
            peer: key,
            room,
            push,
            extent: Extent {
                end: End::Source,
                pages: p.order.pages.clone(),
                list: p.order.tokens.0..p.order.tokens.1,
                room: dest.tokens.0..dest.tokens.1,
                tokens: span.tokens.0..span.tokens.1,
                layers: span.layers.0..span.layers.1,
                sample: dest.verify == Verify::Sample,
            },
        }));
    }
}
