//! Every interleaving of a small world.

mod driver;
mod explore;
mod fp;
mod staging;
mod steps;
mod world;

pub use explore::{Counterexample, Report, Walks, explore, shortest, walk};
pub use staging::{StagingReport, explore_staging};
pub use steps::Step;
pub use world::{D, Family, FaultKind, S0, S1, Setup, World};

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
