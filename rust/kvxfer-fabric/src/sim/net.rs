//! The handle on a simulated world.

use super::world::World;
use super::{Landed, NodeId, Pending, SimConfig, SimFabric};
use crate::{EpId, FabricError};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// A simulated network; clones are handles on the same one.
#[derive(Clone, Debug)]
pub struct SimNet(Arc<Mutex<World>>);

impl SimNet {
    /// An empty net. The same seed, configuration and calls give the same events.
    #[must_use]
    pub fn new(seed: u64, config: SimConfig) -> Self {
        Self(Arc::new(Mutex::new(World::new(seed, config))))
    }

    pub(super) fn world(&self) -> MutexGuard<'_, World> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A copy of everything, from which it goes on by itself. Its fabrics come from [`SimNet::fabric`].
    #[must_use]
    pub fn fork(&self) -> Self {
        Self(Arc::new(Mutex::new(self.world().clone())))
    }

    /// A node with zeroed regions of these lengths.
    pub fn add_node(&self, region_lens: &[u64]) -> NodeId {
        self.world().add_node(region_lens)
    }

    /// The fabric of this node's present life.
    #[must_use]
    pub fn fabric(&self, node: NodeId) -> SimFabric {
        let life = self.world().life(node);
        SimFabric::new(self.clone(), node, life)
    }

    /// Bytes of a node's memory; `None` where it has none.
    #[must_use]
    pub fn read(&self, node: NodeId, region: u32, offset: u64, len: u64) -> Option<Vec<u8>> {
        self.world().slice(node, region, offset, len).map(<[u8]>::to_vec)
    }

    /// Writes a node's memory as its own process would.
    ///
    /// # Errors
    /// When the bytes leave the region.
    pub fn write(&self, node: NodeId, region: u32, offset: u64, bytes: &[u8]) -> Result<(), FabricError> {
        self.world().store(node, region, offset, bytes)
    }

    /// Virtual time since the net began.
    #[must_use]
    pub fn now_us(&self) -> u64 {
        self.world().now_us()
    }

    /// Lets time pass; what is due happens in order.
    pub fn advance(&self, us: u64) {
        let mut world = self.world();
        let until = world.now_us().saturating_add(us);
        world.run_until(until);
    }

    /// Goes to the next event and lets it happen; `false` when nothing is pending.
    pub fn step(&self) -> bool {
        self.world().step()
    }

    /// When the next event is due; `None` when nothing is pending.
    #[must_use]
    pub fn next_at_us(&self) -> Option<u64> {
        self.world().next_at_us()
    }

    /// Events that may happen next, soonest first. Without reordering only the oldest write of an endpoint may.
    #[must_use]
    pub fn pending(&self) -> Vec<Pending> {
        self.world().pending()
    }

    /// Lets this event happen now, ahead of all others; `false` if it is not one of [`SimNet::pending`].
    pub fn fire(&self, id: u64) -> bool {
        self.world().fire(id)
    }

    /// Changes the behaviour for what is posted from now on.
    pub fn configure(&self, config: SimConfig) {
        self.world().config = config;
    }

    /// The configuration.
    #[must_use]
    pub fn config(&self) -> SimConfig {
        self.world().config
    }

    /// Writes in flight, held ones too.
    #[must_use]
    pub fn in_flight(&self) -> usize {
        self.world().in_flight()
    }

    /// Takes the list of writes that landed since the last call.
    #[must_use]
    pub fn take_trace(&self) -> Vec<Landed> {
        std::mem::take(&mut self.world().trace)
    }

    /// Breaks an endpoint's connection. Both sides see it after a while; some of its writes are lost, others land.
    pub fn break_endpoint(&self, node: NodeId, ep: EpId) {
        self.world().break_endpoint(node, ep.0);
    }

    /// Stops a node's process (SIGSTOP): its `progress` does nothing, its writes stay in flight.
    pub fn stop(&self, node: NodeId) {
        self.world().stop(node);
    }

    /// Lets a stopped node go on.
    pub fn resume(&self, node: NodeId) {
        self.world().resume(node);
    }

    /// Kills a node's process. Its writes can land until its death is observed.
    pub fn kill(&self, node: NodeId) {
        self.world().kill(node);
    }

    /// Starts the node's process again, after killing it if it lives: zeroed regions of the same lengths and
    /// addresses, no endpoints. Fabrics of the former life are dead.
    pub fn restart(&self, node: NodeId) {
        self.world().restart(node);
    }
}
