//! Checks of the state machines that run in production, under virtual time.
//!
//! * [`model`] walks every interleaving of a small world with a bounded number of faults.
//! * [`sim`] runs a large world for long, with seeded faults, over the simulated fabric and byte-exact memory.
#![forbid(unsafe_code)]

pub mod model;
pub mod sim;
