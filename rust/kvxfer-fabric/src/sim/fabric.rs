//! One node's view of the net.

use super::{NodeId, SimNet};
use crate::{Completion, EndRole, EpId, Fabric, FabricError, Mover, Piece};
use std::os::fd::BorrowedFd;

const MAGIC: [u8; 4] = *b"kvsi";
const VERSION: u8 = 1;

/// The fabric of one node in one life. It holds no state of its own.
#[derive(Clone, Debug)]
pub struct SimFabric {
    net: SimNet,
    node: NodeId,
    life: u32,
}

/// What a blob says.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Address {
    net: u64,
    node: NodeId,
    life: u32,
}

impl Address {
    fn encode(self) -> Vec<u8> {
        let mut out = MAGIC.to_vec();
        out.push(VERSION);
        out.extend_from_slice(&self.net.to_le_bytes());
        out.extend_from_slice(&self.node.0.to_le_bytes());
        out.extend_from_slice(&self.life.to_le_bytes());
        out
    }

    fn decode(blob: &[u8]) -> Option<Self> {
        let rest = blob.strip_prefix(&MAGIC)?.strip_prefix(&[VERSION])?;
        let (net, rest) = rest.split_first_chunk::<8>()?;
        let (node, rest) = rest.split_first_chunk::<4>()?;
        let life: &[u8; 4] = rest.try_into().ok()?;
        Some(Self {
            net: u64::from_le_bytes(*net),
            node: NodeId(u32::from_le_bytes(*node)),
            life: u32::from_le_bytes(*life),
        })
    }
}

impl SimFabric {
    pub(super) fn new(net: SimNet, node: NodeId, life: u32) -> Self {
        Self { net, node, life }
    }

    /// The node.
    #[must_use]
    pub fn node(&self) -> NodeId {
        self.node
    }

    /// The net.
    #[must_use]
    pub fn net(&self) -> &SimNet {
        &self.net
    }
}

impl Fabric for SimFabric {
    fn name(&self) -> &'static str {
        "sim"
    }

    fn mover(&self) -> Mover {
        Mover::Sender
    }

    fn describe(&mut self) -> Result<Vec<u8>, FabricError> {
        let net = self.net.world().id();
        Ok(Address { net, node: self.node, life: self.life }.encode())
    }

    fn reaches(&self, blob: &[u8]) -> bool {
        Address::decode(blob).is_some_and(|a| self.net.world().knows(a.net, a.node))
    }

    fn connect(
        &mut self,
        ep: EpId,
        role: EndRole,
        blob: &[u8],
        remote_lens: &[u64],
    ) -> Result<(), FabricError> {
        let bad = |why: String| FabricError::BadBlob { what: "sim address", why };
        let to =
            Address::decode(blob).ok_or_else(|| bad(format!("{} bytes of something else", blob.len())))?;
        let mut world = self.net.world();
        if !world.knows(to.net, to.node) {
            return Err(bad(format!("node {} of another net", to.node.0)));
        }
        world.connect((self.node, self.life), ep.0, role, (to.node, to.life), remote_lens)
    }

    fn post(&mut self, ep: EpId, batch: &[Piece]) -> Result<(), FabricError> {
        self.net.world().post((self.node, self.life), ep.0, batch)
    }

    fn flush(&mut self, ep: EpId, ticket: u64) -> Result<(), FabricError> {
        self.net.world().flush((self.node, self.life), ep.0, ticket)
    }

    fn fence(&mut self, ep: EpId, ticket: u64) -> Result<(), FabricError> {
        self.net.world().fence((self.node, self.life), ep.0, ticket)
    }

    fn disconnect(&mut self, ep: EpId) {
        self.net.world().disconnect((self.node, self.life), ep.0);
    }

    fn progress(&mut self, out: &mut Vec<Completion>) -> bool {
        self.net.world().progress((self.node, self.life), out)
    }

    fn event_fd(&self) -> Option<BorrowedFd<'_>> {
        None
    }

    fn arm(&mut self) -> bool {
        self.net.world().idle((self.node, self.life))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn addresses(net in any::<u64>(), node in any::<u32>(), life in any::<u32>(), noise in proptest::collection::vec(any::<u8>(), 0..40)) {
            let a = Address { net, node: NodeId(node), life };
            let bytes = a.encode();
            prop_assert_eq!(Address::decode(&bytes), Some(a));
            prop_assert_eq!(Address::decode(&bytes[..bytes.len() - 1]), None);
            if let Some(a) = Address::decode(&noise) {
                prop_assert_eq!(a.encode(), noise);
            }
        }
    }
}
