//! Checksums of our own bytes, a slice at a time, between other rooms' slices.

use super::Driver;
use super::peers::Endpoint;
use crate::sched::Slice;
use kvxfer_proto::node::{DeliveryEnd, Summing};
use kvxfer_proto::plan::{Digest, End, Rows, Run, Template};
use kvxfer_proto::{LayoutError, Reason, ReasonKind, Time};
use std::sync::Arc;

impl Driver {
    pub(super) fn begin_sum(&mut self, now: Time, sum: Summing) {
        let endpoint = self.peers.get(&sum.peer).and_then(|io| io.endpoint.as_ref());
        let Some(template) = endpoint.map(|Endpoint { template, .. }| Arc::clone(template)) else {
            self.node.handle_delivery(now, sum.id, DeliveryEnd::Aborted);
            return;
        };
        if self.flip_a_byte && sum.extent.end == End::Destination {
            self.flip_a_byte(&sum, &template);
        }
        let Summing { id, peer, room, push, extent } = sum;
        match Digest::new(template, extent, &self.me.pages) {
            Ok(digest) => {
                self.sched.add_sum(id, peer, room, digest);
                // Of a piece of which our shards share nothing there is nothing to sum.
                let end = self.sched.take_end(id);
                self.flow_over(now, id, end);
            }
            Err(LayoutError(e)) => {
                let reason = Reason::new(ReasonKind::PageError, format!("room {room}: push {}: {e}", push.0));
                self.node.handle_delivery(now, id, DeliveryEnd::Failed(reason));
            }
        }
    }

    pub(super) fn sum_slice(&mut self, now: Time, slice: Slice) {
        let memory = &self.memory;
        match self.sched.sum(slice, |region, off, out| memory.read(region, off, out)) {
            Ok((bytes, end)) => {
                self.stats.summed_bytes += bytes;
                self.flow_over(now, slice.id, end);
            }
            Err(e) => {
                let reason = Reason::new(ReasonKind::FabricError, format!("room {}: {e}", slice.room));
                self.failures.insert(slice.id, reason);
                let end = self.sched.abort(slice.id);
                self.flow_over(now, slice.id, end);
            }
        }
    }

    /// Stands for corruption in flight ([`Flaw::FlipAByte`](kvxfer_proto::node::Flaw::FlipAByte)): changes a byte in the
    /// middle of what came, before it is summed.
    fn flip_a_byte(&self, sum: &Summing, template: &Arc<Template>) {
        let extent = kvxfer_proto::plan::Extent { sample: false, ..sum.extent.clone() };
        let Ok(mut rows) = Rows::new(Arc::clone(template), extent, &self.me.pages) else { return };
        let mut runs: Vec<Run> = Vec::new();
        while rows.fill(&mut runs, u64::MAX, u64::MAX) {}
        // The middle of a run is not, as its ends often are, a row that every sample has.
        let Some(run) = runs.get(runs.len() / 2) else { return };
        if let Err(e) = self.memory.flip(run.region, run.off + run.len() / 2) {
            tracing::warn!(error = %e, "no byte was flipped");
        }
    }
}
