//! What carries bytes between two agents.
//!
//! A [`Fabric`] is driven by one thread, the agent's transfer thread; nothing in it blocks. It registers the
//! agent's regions once, and moves [`Piece`]s between its own regions and those of connected peers. Two
//! families: the *sender writes* into the receiver's memory (`ucx`, `sim`), or the *receiver copies* out of the
//! sender's (`shm`); [`Fabric::mover`] says which.
#![deny(unsafe_op_in_unsafe_fn)]

pub mod cuda;
pub mod error;
pub mod local;
pub mod memory;
pub mod process;
pub mod shm;
pub mod sim;
mod stream;
pub mod ucx;

pub use error::FabricError;
pub use kvxfer_proto::msg::MemKind;
pub use kvxfer_proto::plan::Piece;
pub use local::LocalMemory;
pub use memory::{Backing, ReadySignal, RegionSpan};

use std::os::fd::BorrowedFd;

/// Who moves the bytes of a hand-off.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Mover {
    /// Prefill writes into decode's memory; decode's pages need a fence.
    Sender,
    /// Decode reads from prefill's memory; no other process ever writes ours.
    Receiver,
}

/// This side's part in an endpoint.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum EndRole {
    /// We move the bytes: the writer of a sender-writes fabric, the reader of a receiver-copies one.
    Active,
    /// The peer moves them.
    Passive,
}

/// Names an endpoint; chosen by the caller, unique within a fabric while it is open.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct EpId(pub u32);

/// Something that a fabric finished, found out or gave up.
#[derive(Clone, Debug)]
pub enum Completion {
    /// The endpoint can carry pieces.
    Connected {
        /// Which endpoint.
        ep: EpId,
        /// The transports, for people.
        info: String,
    },
    /// It never will.
    ConnectFailed {
        /// Which endpoint.
        ep: EpId,
        /// Why.
        error: FabricError,
    },
    /// Every piece posted on `ep` before this flush is visible at the target (sender writes) or copied
    /// (receiver copies), or the error says why not.
    Flushed {
        /// Which endpoint.
        ep: EpId,
        /// The flush's ticket.
        ticket: u64,
        /// Whether it is so.
        result: Result<(), FabricError>,
    },
    /// No write from that peer can land in our memory any more, or the error says why that cannot be promised.
    Fenced {
        /// Which endpoint.
        ep: EpId,
        /// The fence's ticket.
        ticket: u64,
        /// Whether it is so.
        result: Result<(), FabricError>,
    },
    /// The peer's process was seen to die (pidfd).
    PeerDied {
        /// Which endpoint.
        ep: EpId,
    },
    /// The endpoint broke; nothing more can be posted on it.
    Broken {
        /// Which endpoint.
        ep: EpId,
        /// Why.
        error: FabricError,
    },
}

/// A way to carry bytes.
pub trait Fabric {
    /// `shm`, `ucx`, `sim`.
    fn name(&self) -> &'static str;

    /// Who moves the bytes.
    fn mover(&self) -> Mover;

    /// What a peer needs to reach this fabric and its registered regions. Given to authenticated peers only;
    /// it may hold a one-time token, so ask afresh for each session.
    ///
    /// # Errors
    /// When a region cannot be exported.
    fn describe(&mut self) -> Result<Vec<u8>, FabricError>;

    /// Whether the peer that gave `blob` can be reached by this fabric at all (same host, known version);
    /// cheap, no side effects.
    fn reaches(&self, blob: &[u8]) -> bool;

    /// Starts to connect. `remote_lens` are the lengths of the peer's regions, in the order in which pieces name
    /// them. `Connected` or `ConnectFailed` follows from [`Fabric::progress`].
    ///
    /// # Errors
    /// When the blob is malformed or the endpoint's number is taken.
    fn connect(
        &mut self,
        ep: EpId,
        role: EndRole,
        blob: &[u8],
        remote_lens: &[u64],
    ) -> Result<(), FabricError>;

    /// Posts pieces on an endpoint whose role is [`EndRole::Active`]. Every offset is checked against both
    /// regions first: either all pieces are within bounds or none is posted.
    ///
    /// # Errors
    /// Out of bounds, unknown or broken endpoint.
    fn post(&mut self, ep: EpId, batch: &[Piece]) -> Result<(), FabricError>;

    /// Asks for a `Flushed` with this ticket once all earlier posts of the endpoint are through. Always followed by
    /// exactly one `Flushed`, also when the endpoint breaks. Where slices go packed (UCX), those of one endpoint come back in
    /// the order in which they were asked for.
    ///
    /// # Errors
    /// Unknown endpoint.
    fn flush(&mut self, ep: EpId, ticket: u64) -> Result<(), FabricError>;

    /// Makes sure that nothing more from that peer lands here, and closes the endpoint. Exactly one `Fenced` follows.
    ///
    /// # Errors
    /// Unknown endpoint.
    fn fence(&mut self, ep: EpId, ticket: u64) -> Result<(), FabricError>;

    /// Closes an endpoint in an orderly way and forgets it; unanswered flushes are answered with an error first.
    fn disconnect(&mut self, ep: EpId);

    /// Moves everything along, and appends what happened. Never blocks. Returns whether anything moved.
    fn progress(&mut self, out: &mut Vec<Completion>) -> bool;

    /// A descriptor that becomes readable when [`Fabric::progress`] has work, if the fabric needs one.
    fn event_fd(&self) -> Option<BorrowedFd<'_>>;

    /// Called before sleeping on [`Fabric::event_fd`]; `false` means that there is work already: do not sleep.
    fn arm(&mut self) -> bool;

    /// System calls made for data so far, for statistics (zero where it does not apply).
    fn data_syscalls(&self) -> u64 {
        0
    }
}
