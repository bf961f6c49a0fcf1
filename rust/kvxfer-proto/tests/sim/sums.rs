//! Sums of a node's own bytes, a few rows at a time while other things happen.

use super::{Net, What};
use kvxfer_proto::node::{DeliveryEnd, DeliveryId, Direction, EventKind, PeerKey, Summing};
use kvxfer_proto::plan::{Digest, End, Rows, Template};
use kvxfer_proto::{Reason, ReasonKind};
use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::Arc;

pub type Sums = BTreeMap<DeliveryId, Sum>;

/// A sum under way.
pub struct Sum {
    order: Summing,
    digest: Digest,
}

impl Sum {
    pub fn peer(&self) -> PeerKey {
        self.order.peer
    }
}

/// A byte that is changed at a destination before it is summed.
#[derive(Clone, Copy, Debug)]
pub struct Flip {
    /// Which byte of the piece, in the order of its rows; only of the sampled ones, or only of the others, if that is
    /// given.
    pub byte: u64,
    pub sampled: Option<bool>,
}

impl Net {
    pub(super) fn start_sum(&mut self, i: usize, order: Summing) {
        let peer = self.find(order.peer.incarnation);
        let sides = peer.map(|p| match order.extent.end {
            End::Source => (i, p),
            End::Destination => (p, i),
        });
        // The plan is that of the session, which may outlive the peer.
        let Some((src, dst)) = sides else {
            self.end_sum(i, order.id, DeliveryEnd::Aborted);
            return;
        };
        assert_eq!(order.extent.end == End::Source, order.peer.direction == Direction::TheyGrant);
        let template = Template::new(&self.nodes[src].side, &self.nodes[dst].side).expect("fits");
        let template = Arc::new(template);
        if order.extent.end == End::Destination && self.flip.is_some() {
            self.flip_byte(i, &order, &template);
        }
        match Digest::new(template, order.extent.clone(), &self.nodes[i].page_counts) {
            Ok(digest) => {
                let (id, incarnation) = (order.id, self.nodes[i].incarnation);
                self.nodes[i].sums.insert(id, Sum { order, digest });
                let delay = self.draw(self.copy_us);
                self.at(delay, What::Sum { node: i, incarnation, id });
            }
            Err(e) => {
                let reason = Reason::new(ReasonKind::PageError, e.to_string());
                self.end_sum(i, order.id, DeliveryEnd::Failed(reason));
            }
        }
    }

    fn end_sum(&mut self, i: usize, id: DeliveryId, end: DeliveryEnd) {
        self.order(i, |n, now| n.handle_delivery(now, id, end));
    }

    pub(super) fn stop_sum(&mut self, i: usize, id: DeliveryId) -> bool {
        let stopped = self.nodes[i].sums.remove(&id).is_some();
        if stopped {
            self.end_sum(i, id, DeliveryEnd::Aborted);
        }
        stopped
    }

    pub(super) fn step_sum(&mut self, i: usize, id: DeliveryId) {
        let cells = 1 + self.rng.below(40);
        let n = &mut self.nodes[i];
        let Some(sum) = n.sums.get_mut(&id) else { return };
        let memory = &n.memory;
        let Ok(_) = sum.digest.step(64, cells, |region, off, buf| {
            buf.copy_from_slice(&memory[region as usize][off as usize..][..buf.len()]);
            Ok::<(), Infallible>(())
        });
        let (room, push, end) = (sum.order.room, sum.order.push, sum.order.extent.end);
        let (done, value) = (sum.digest.is_done(), sum.digest.value());
        let frees = |kind: &EventKind| match kind {
            EventKind::Retracted(p) => *p == push,
            _ => true,
        };
        // A source's pages are its engine's once they are released; a destination's may be summed for nothing.
        if end == End::Source
            && let Some(e) = n.events.iter().find(|e| e.room == room && e.released && frees(&e.kind))
        {
            let text = format!(
                "t={}: push {} of room {room} is summed at {} after {:?} released its source",
                self.now, push.0, n.name, e.kind
            );
            self.violations.push(text);
        }
        if done {
            self.nodes[i].sums.remove(&id);
            self.sums_ended += 1;
            self.end_sum(i, id, DeliveryEnd::Summed(value));
        } else {
            let (incarnation, delay) = (self.nodes[i].incarnation, self.draw(self.copy_us));
            self.at(delay, What::Sum { node: i, incarnation, id });
        }
    }

    /// Changes the byte that [`Net::flip`] names, if the piece has it.
    fn flip_byte(&mut self, i: usize, order: &Summing, template: &Arc<Template>) {
        let Some(flip) = self.flip else { return };
        let places = |sample| {
            let extent = kvxfer_proto::plan::Extent { sample, ..order.extent.clone() };
            let mut rows = Rows::new(Arc::clone(template), extent, &self.nodes[i].page_counts).unwrap();
            let mut runs = Vec::new();
            rows.fill(&mut runs, u64::MAX, u64::MAX);
            let bytes = runs.into_iter().flat_map(|r| (0..r.len()).map(move |n| (r.region, r.off + n)));
            bytes.collect::<Vec<_>>()
        };
        let mut bytes = places(false);
        if let Some(sampled) = flip.sampled {
            let of_sample = places(true);
            bytes.retain(|b| of_sample.contains(b) == sampled);
        }
        if let Some((region, off)) = bytes.get(flip.byte as usize % bytes.len().max(1)) {
            self.nodes[i].memory[*region as usize][*off as usize] ^= 0x10;
        }
    }
}
