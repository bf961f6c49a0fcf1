//! Checksums of an agent's own bytes, a few rows at a time while other things happen.

use super::agent::Agent;
use super::world::{Job, World};
use kvxfer_fabric::FabricError;
use kvxfer_proto::node::{DeliveryEnd, DeliveryId, Flaw, PeerKey, Summing};
use kvxfer_proto::plan::{Digest, End, Extent, Rows};
use kvxfer_proto::{PushId, Reason, ReasonKind, Room};
use std::collections::BTreeMap;

/// Bytes that are summed in one turn.
const SUM_BYTES: u64 = super::lane::SLICE_BYTES;

/// A sum under way.
#[derive(Debug)]
pub(super) struct Sum {
    pub(super) peer: PeerKey,
    pub(super) room: Room,
    pub(super) push: PushId,
    /// Whether it reads what this agent pushes, and not what it received.
    pub(super) of_source: bool,
    digest: Digest,
}

/// All sums of an agent.
pub(super) type Sums = BTreeMap<DeliveryId, Sum>;

impl Agent {
    /// Stops a sum; false if there is none of this number.
    pub(super) fn stop_sum(&mut self, id: DeliveryId) -> bool {
        self.sums.remove(&id).is_some()
    }
}

impl World<'_> {
    pub(super) fn begin_sum(&mut self, i: usize, sum: Summing) {
        let now = self.time();
        let Summing { id, peer, room, push, extent } = sum;
        let of_source = extent.end == End::Source;
        let a = &mut self.agents[i];
        let template = a.peers.get(&peer).and_then(|io| io.endpoint.as_ref()).map(|e| e.template.clone());
        let Some(template) = template else {
            a.node.handle_delivery(now, id, DeliveryEnd::Aborted);
            return;
        };
        if self.options.flaw == Some(Flaw::FlipAByte) && extent.end == End::Destination {
            let whole = Extent { sample: false, ..extent.clone() };
            if let Ok(mut rows) = Rows::new(template.clone(), whole, &a.geo.counts) {
                let mut runs = Vec::new();
                while rows.fill(&mut runs, u64::MAX, u64::MAX) {}
                if let Some(run) = runs.get(runs.len() / 2) {
                    let (node, off) = (a.fabric.node(), run.off + run.len() / 2);
                    let flipped = self.net.read(node, run.region, off, 1).unwrap_or_default();
                    let flipped: Vec<u8> = flipped.iter().map(|b| b ^ 1).collect();
                    if let Err(e) = self.net.write(node, run.region, off, &flipped) {
                        self.log.violation(self.now, format_args!("a byte out of bounds: {e}"));
                    }
                }
            }
        }
        let a = &mut self.agents[i];
        match Digest::new(template, extent, &a.geo.counts) {
            Ok(digest) => {
                a.sums.insert(id, Sum { peer, room, push, of_source, digest });
                let delay = self.draw(self.delays.turn);
                self.job(delay, i, Job::Sum(id));
            }
            Err(e) => {
                let name = &a.name;
                self.log.violation(self.now, format_args!("{name} cannot sum room {room}: {e}"));
                let reason = Reason::new(ReasonKind::PageError, e.to_string());
                a.node.handle_delivery(now, id, DeliveryEnd::Failed(reason));
            }
        }
    }

    /// Sums the next rows.
    pub(super) fn sum(&mut self, i: usize, id: DeliveryId) {
        let now = self.time();
        let net = &self.net;
        let a = &mut self.agents[i];
        let node = a.fabric.node();
        let Some(sum) = a.sums.get_mut(&id) else { return };
        let read = |region: u32, off: u64, out: &mut [u8]| {
            let bytes = net.read(node, region, off, out.len() as u64);
            let bytes = bytes.ok_or_else(|| FabricError::Closed("no such bytes".to_owned()))?;
            out.copy_from_slice(&bytes);
            Ok::<(), FabricError>(())
        };
        let taken = sum.digest.step(SUM_BYTES, u64::MAX, read);
        let (done, value) = (sum.digest.is_done(), sum.digest.value());
        if let Err(e) = taken {
            let name = &a.name;
            self.log.violation(self.now, format_args!("{name} sums out of bounds: {e}"));
            a.sums.remove(&id);
            let reason = Reason::new(ReasonKind::PageError, e.to_string());
            a.node.handle_delivery(now, id, DeliveryEnd::Failed(reason));
        } else if done {
            a.sums.remove(&id);
            a.node.handle_delivery(now, id, DeliveryEnd::Summed(value));
        } else {
            let delay = self.draw(self.delays.turn);
            self.job(delay, i, Job::Sum(id));
            return;
        }
        self.carry_out(i);
    }
}
