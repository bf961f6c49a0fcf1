//! A simulated fabric: in one process, in virtual time, and wholly decided by a seed.
//!
//! A [`SimNet`] owns time, the nodes' memory and everything in flight; [`SimNet::fabric`] gives a node's [`Fabric`].
//! The *sender writes*: each posted piece lands after a delay of its own, pieces can overtake each other, and a
//! piece reads its source only when it lands, so that reusing source pages too early shows.
//!
//! The net is unfriendly wherever a real one may be:
//! * An endpoint that breaks or is disconnected does not take back its writes: they can land later.
//! * A stopped node's ([`SimNet::stop`]) writes stay in flight: some land meanwhile, some after it goes on.
//! * A killed node's writes can land until its death is observed; its connections may be seen to close before.
//! * A fence at the receiver lands or cancels what is in flight on its endpoint, and only then is `Fenced`. It
//!   covers that endpoint: one that was disconnected before was not fenced, and its writes are still under way.
//! * A fence at the sender ends its own part only: its memory is read no more, and what was read can still land.
//! * A write to a node that restarted is lost, whatever its address.
//!
//! Every write that lands is in the trace ([`SimNet::take_trace`]), for a checker to hold against released pages.
//! [`SimNet::fork`] copies the whole world, and [`SimNet::pending`] with [`SimNet::fire`] let a model checker choose the
//! order of events in place of the clock.
//!
//! [`Fabric`]: crate::Fabric

mod fabric;
mod net;
mod rng;
mod world;

pub use fabric::SimFabric;
pub use net::SimNet;
pub use rng::SplitMix64;

/// Names a node of a [`SimNet`].
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct NodeId(pub u32);

/// A range of delays in microseconds, both ends included.
pub type DelayUs = (u64, u64);

/// Whether this net's transport can fence.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub enum FenceRule {
    /// A fence completes, as on rc and tcp.
    Completes,
    /// A fence cannot be promised, as on dc: it ends in `NoFence`, and writes go on landing.
    Impossible,
}

/// How a net behaves.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct SimConfig {
    /// From posting to landing.
    pub write_delay_us: DelayUs,
    /// Until a node learns something: connected, flushed, broken.
    pub notice_delay_us: DelayUs,
    /// Until a fence is complete.
    pub fence_delay_us: DelayUs,
    /// Until the death of a process is observed.
    pub death_delay_us: DelayUs,
    /// Whether writes of one endpoint can overtake each other.
    pub reorder: bool,
    /// Whether the death of a peer can be observed (same host).
    pub observe_death: bool,
    /// Whether fences work.
    pub fence: FenceRule,
}

impl Default for SimConfig {
    fn default() -> Self {
        Self {
            write_delay_us: (1, 5_000),
            notice_delay_us: (1, 1_000),
            fence_delay_us: (10, 10_000),
            death_delay_us: (10, 20_000),
            reorder: true,
            observe_death: true,
            fence: FenceRule::Completes,
        }
    }
}

/// A write that landed.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub struct Landed {
    /// When, in virtual time.
    pub at_us: u64,
    /// Who posted it.
    pub from: NodeId,
    /// Which life of that node: it rises with each restart.
    pub from_life: u32,
    /// In whose memory it is.
    pub to: NodeId,
    /// Which life of that node.
    pub to_life: u32,
    /// Region of the target.
    pub region: u32,
    /// Offset in it.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
}

/// What an event that has not happened yet is.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum PendingKind {
    /// A write lands.
    Land,
    /// An active endpoint tries to connect.
    Connect,
    /// A flush is answered.
    Flush,
    /// An endpoint is seen to be broken.
    Broken,
    /// A fence completes.
    Fence,
    /// A death is observed.
    Death,
}

/// An event that has not happened yet.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Pending {
    /// When the clock would bring it.
    pub at_us: u64,
    /// Names it for [`SimNet::fire`].
    pub id: u64,
    /// What it is.
    pub kind: PendingKind,
    /// The node that it happens to.
    pub node: NodeId,
}
