//! Long seeded runs over the simulated fabric.
//!
//! Engines of several shapes hand rooms off to each other under virtual time: production [`Node`]s, whose frames go
//! through the production codec and whose sessions begin with the production handshake. Pages come from a free list
//! that gives the last one released first, so a page is granted again at once; until then it holds another pattern and
//! is watched. Every byte that lands is held against the room that has its page. Faults come at moments that the seed
//! decides: cancels, kills, stops, lost sessions, cut networks, broken endpoints, time running out.
//!
//! Two families of transport ([`Mover`]): the sender writes, over [`kvxfer_fabric::sim::SimNet`]; or the receiver
//! copies in a step of its own. Where the sender writes, half of the seeds have staging rings of few slots, and some of
//! their deliveries go packed.
//!
//! [`Node`]: kvxfer_proto::node::Node

mod agent;
#[cfg(test)]
mod case_11;
mod conn;
mod engine;
mod events;
mod faults;
mod geometry;
mod lane;
mod packing;
mod report;
mod sessions;
mod setup;
mod sums;
mod world;

pub use report::SimReport;

use kvxfer_fabric::sim::FenceRule;
use kvxfer_proto::node::{Flaw, Mover};
use report::Log;
use std::io::{self, Write};
use world::World;

/// What to run. The same options give the same run.
#[derive(Clone, Copy, PartialEq, Debug)]
pub struct SimOptions {
    /// Decides everything that is left to chance: the engines' shapes, the rooms, the faults and every delay.
    pub seed: u64,
    /// Rooms in all.
    pub rooms: u32,
    /// Rooms at a time.
    pub concurrent: u32,
    /// Share of the rooms that an engine cancels, 0 to 1.
    pub cancel: f64,
    /// Processes that are killed and started again at their address.
    pub kill: u32,
    /// Processes that are stopped and go on later.
    pub stop: u32,
    /// Sessions that are lost, networks that are cut and endpoints that break, in all.
    pub cut: u32,
    /// Who moves the bytes.
    pub mover: Mover,
    /// Whether the transport can fence; only where the sender writes.
    pub fence: FenceRule,
    /// A rule of the safety contract to break on purpose.
    pub flaw: Option<Flaw>,
}

impl SimOptions {
    /// A run of this seed with everything else as `kvxfer stress` has it.
    #[must_use]
    pub const fn new(seed: u64) -> Self {
        Self {
            seed,
            rooms: 1000,
            concurrent: 256,
            cancel: 0.2,
            kill: 3,
            stop: 3,
            cut: 6,
            mover: Mover::Sender,
            fence: FenceRule::Completes,
            flaw: None,
        }
    }
}

/// Runs it.
#[must_use]
pub fn run(options: &SimOptions) -> SimReport {
    go(options, None).0
}

/// Runs it and writes what happens to `out`, a line each, with the virtual time in microseconds.
///
/// # Errors
/// When `out` cannot be written.
pub fn run_logged(options: &SimOptions, out: &mut dyn Write) -> io::Result<SimReport> {
    let (report, written) = go(options, Some(out));
    written.map(|()| report)
}

fn go(options: &SimOptions, out: Option<&mut dyn Write>) -> (SimReport, io::Result<()>) {
    let mut log = Log::new(out);
    log.line(0, format_args!("{options:?}"));
    match World::new(*options, log) {
        Ok(mut world) => {
            world.run();
            (world.report(), world.log.finish())
        }
        Err((e, mut log)) => {
            log.violation(0, format_args!("the engines' layouts: {e}"));
            let report = SimReport {
                seed: options.seed,
                violation_count: log.violation_count,
                violations: std::mem::take(&mut log.violations),
                digest: log.digest,
                ..SimReport::default()
            };
            (report, log.finish())
        }
    }
}
