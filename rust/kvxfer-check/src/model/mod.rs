//! Every interleaving of a small world.
//!
//! The machines are those of production, [`kvxfer_proto::node::Node`] with its links; `driver.rs` carries out their
//! actions as the driver of `kvxfer-engine` does. Two sources (or one) hand two rooms to one destination. Both rooms use
//! its one page: the second is expected the moment the first lets go of it, and each source pushes both, at any moment.
//!
//! **What interleaves.** Reading one message, the end of a connection, a dial, the directory's answer, a push, posting a
//! piece, its landing, the end of a delivery, a fence's end, the sight of a death and of empty sockets. What a node
//! orders in answer to one of these is carried out at once.
//!
//! **Packed** families go through staging slots (`packed.rs`): a source writes a piece to a slot that it was lent, by a step
//! of its own, and the destination takes it out by another.
//!
//! **Faults** are counted: a cancel of either side, any timer of any process running out, a kill with a successor at the
//! same address, a cut connection, a stopped process, which is continued later or never. Two things cost nothing:
//! unread bytes of an old session may be read at any time until its end is, and a posted write may land as late as its
//! fabric allows, also after its endpoint or its process is gone ([`Family`]).
//!
//! **Time** does not pass. A timer may run out as a fault at any moment, and for free when nothing else can happen: any
//! of those that are set, since a room's timeouts are its caller's choice and clocks jump. What is not modelled: pings
//! that are answered, acknowledgements between sessions, `retract`, forgetting a peer for free.
//!
//! **Assumptions.** An endpoint of a source is of use only while the endpoint of the destination that answered it is
//! open. Death is seen only after the last of the process's own instructions. A dropped attempt to connect is taken in
//! before the next one is made, and a source that closes its endpoint is not dialled meanwhile.
//!
//! **Reduction.** While no fault has told the sources apart, the first one that does hits the first source: every other
//! path is one of these with the sources exchanged. States with one future are made one (`canon.rs`), steps of a source
//! that nobody else can see or disturb are walked in one order (`reduce.rs`), and two sources that share nothing but the
//! last room's end are walked apart (`apart.rs`); [`Setup::reduced`] turns these off, and `tests/model_reduction.rs` walks
//! small worlds both ways. [`Setup::in_order`] is not a reduction but a smaller set of
//! paths.
//!
//! States are remembered as 128-bit fingerprints. [`explore`] walks depth first without a bound; a path that comes back
//! to itself, or counts up for ever, is reported ([`Property::EveryPathEnds`]). [`shortest`] walks breadth first, for
//! short counterexamples; [`walk`] walks random paths with more faults, by seed.

mod apart;
mod canon;
mod data;
mod driver;
mod ends;
mod explore;
mod fp;
mod packed;
mod reduce;
mod staging;
mod steps;
mod words;
mod world;

pub use explore::{Counterexample, Report, Walks, explore, explore_and_tell, shortest, walk};
pub use staging::{StagingReport, explore_staging};
pub use steps::Step;
pub use world::{D, Family, FaultKind, Reduction, S0, S1, Setup, World};

use std::fmt;

/// What is checked.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub enum Property {
    /// No write lands on a page that is released, or granted to another room.
    NoLateWrite,
    /// No write reads a page of its source that the source has given back.
    NoReadAfterRelease,
    /// Success means that every byte is there.
    SuccessHasAllBytes,
    /// Every room ends once, well or not, on each side whose engine ordered it.
    OneEnd,
    /// Its pages come back once, and not before its end.
    OneRelease,
    /// They do come back, or wait for a peer that is neither dead nor answering.
    EveryPageComesBack,
    /// What was given up fails at once, also if the order for it comes later.
    CancelledFailsAtOnce,
    /// Nothing is left of rooms that are over.
    NothingIsLeft,
    /// No path goes on for ever.
    EveryPathEnds,
    /// Two machines that keep the protocol never accuse each other of breaking it.
    HonestPeersKeepTheProtocol,
    /// Without a fault every room succeeds, at every process.
    FaultFreeRoomsSucceed,
}

impl fmt::Display for Property {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self:?}")
    }
}

/// A property that does not hold.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Violation {
    /// Which.
    pub property: Property,
    /// What happened.
    pub text: String,
}
