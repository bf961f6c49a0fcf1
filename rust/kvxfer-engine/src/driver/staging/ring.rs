//! Our ring, and what is said of it to those who may write to it.

use super::{Driver, PeerKey};
use crate::carriers::Which;
use crate::config::StagingMode;
use kvxfer_fabric::{FabricError, RegionSpan};
use kvxfer_proto::plan::{Load, ORDER};

/// Runs of at least so many bytes are not worth packing where writes go to our pages at once: no ring is offered to peers whose
/// pushes have such, unless our pages are memory that UCX has not allocated, which its shared memory does not reach.
const LARGE_RUN: u64 = 4096;

/// Our ring, which peers write.
#[derive(Debug)]
pub(super) struct RingMemory {
    /// Its number among our own regions.
    pub(super) local: u32,
    /// What peers need to reach it.
    pub(super) offer: Vec<u8>,
    pub(super) span: RegionSpan,
    /// Memory like our pages, which peers write to measure with.
    pub(super) plain: Option<RegionSpan>,
}

/// What `Attach` carries: how to reach a ring, and memory like the pages if those are of another kind.
pub(super) struct Offer<'a> {
    pub(super) ring: &'a [u8],
    pub(super) plain: &'a [u8],
}

impl<'a> Offer<'a> {
    fn encode(&self) -> Vec<u8> {
        // What lies in a slot depends on the order of the plan: the peer has to have the same.
        let len = u32::try_from(self.ring.len()).unwrap_or(u32::MAX);
        let heads = ORDER.to_le_bytes().into_iter().chain(len.to_le_bytes());
        heads.chain(self.ring.iter().copied()).chain(self.plain.iter().copied()).collect()
    }

    /// `None` if the peer plans in another order.
    pub(super) fn decode(bytes: &'a [u8]) -> Result<Option<Self>, &'static str> {
        let (order, rest) = bytes.split_first_chunk().ok_or("it names no order")?;
        if u32::from_le_bytes(*order) != ORDER {
            return Ok(None);
        }
        let (len, rest) = rest.split_first_chunk().ok_or("it does not say how long it is")?;
        let len = usize::try_from(u32::from_le_bytes(*len)).map_err(|_| "it is too long")?;
        let (ring, plain) = rest.split_at_checked(len).ok_or("it is cut short")?;
        Ok(Some(Self { ring, plain }))
    }
}

impl Driver {
    /// Decode's side: what the peer needs to write to our ring, if its pushes may use it.
    pub(in crate::driver) fn offer_ring(&mut self, key: PeerKey) -> Option<Vec<u8>> {
        let which = self.peers.get(&key)?.endpoint.as_ref()?.which;
        let (slot_bytes, slots) = self.staging.offers();
        if which != Which::Ucx || slots == 0 {
            return None;
        }
        let run = Load::of(&self.sample_of(key)?).run_bytes();
        let large = run >= LARGE_RUN && !self.carriers.has_plain_memory();
        if self.staging.config.mode == StagingMode::Auto && large {
            return None;
        }
        if self.staging.ring.is_none() {
            match self.make_ring(slot_bytes, slots) {
                Ok(ring) => self.staging.ring = Some(ring),
                Err(e) => {
                    tracing::warn!(error = %e, "no staging ring: pushes of small runs go as single writes");
                    self.staging.no_ring = true;
                    return None;
                }
            }
        }
        Some(self.staging.ring.as_ref()?.offer.clone())
    }

    fn make_ring(&mut self, slot_bytes: u64, slots: u32) -> Result<RingMemory, FabricError> {
        let plain = self.carriers.has_plain_memory();
        let (region, span) = self.carriers.add_memory(slot_bytes * (u64::from(slots) + 1))?;
        let (local, ring) = (self.memory.add(&span)?, self.carriers.export_memory(region)?);
        let (plain_offer, plain) = match plain.then(|| self.plain_memory(slot_bytes)) {
            Some(Ok((offer, span))) => (offer, Some(span)),
            Some(Err(e)) => {
                // A ring without it is one whose writes are measured in its own memory.
                tracing::warn!(error = %e, "memory to measure writes in cannot be had");
                (Vec::new(), None)
            }
            None => (Vec::new(), None),
        };
        let offer = Offer { ring: &ring, plain: &plain_offer }.encode();
        let ring = RingMemory { local, offer, span, plain };
        self.node
            .handle_ring(slot_bytes, slots)
            .map_err(|e| FabricError::Os { call: "ring", why: e.to_string() })?;
        Ok(ring)
    }

    fn plain_memory(&mut self, bytes: u64) -> Result<(Vec<u8>, RegionSpan), FabricError> {
        let (region, span) = self.carriers.add_plain_memory(bytes)?;
        Ok((self.carriers.export_memory(region)?, span))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_offer_is_read_as_it_was_written_and_not_past_its_end() {
        for plain in [&[][..], &[9, 8][..]] {
            let bytes = Offer { ring: &[1, 2, 3], plain }.encode();
            let back = Offer::decode(&bytes).unwrap().unwrap();
            assert_eq!((back.ring, back.plain), (&[1, 2, 3][..], plain));
            for n in 0..11 {
                assert!(Offer::decode(&bytes[..n]).is_err(), "{n} bytes of it");
            }
        }
        let mut other = Offer { ring: &[1], plain: &[] }.encode();
        other[0] ^= 1;
        assert!(Offer::decode(&other).unwrap().is_none());
    }
}
