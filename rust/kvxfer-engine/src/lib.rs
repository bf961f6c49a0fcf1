//! The transfer thread and what it needs: queues to and from callers, the control channel, the directory,
//! the scheduler of slices, and the fabrics of one agent.
//!
//! [`Agent`] is the caller's end. Its calls check what needs no look at each page, put an order into a bounded
//! queue and return: they never block, do I/O, or take a lock that the transfer thread holds while it works.
//! Everything else happens on the transfer thread, which drives [`kvxfer_proto::node::Node`].
#![deny(unsafe_code)]
// The model has only what several threads share; what uses it is not there to be modelled.
#![cfg_attr(loom, allow(dead_code))]

#[cfg(not(loom))]
mod address;
#[cfg(not(loom))]
mod agent;
#[cfg(not(loom))]
mod calls;
#[cfg(not(loom))]
mod carriers;
#[cfg(not(loom))]
mod clock;
#[cfg(not(loom))]
mod config;
#[cfg(not(loom))]
mod control;
#[cfg(not(loom))]
mod driver;
mod metrics;
#[cfg(not(loom))]
mod order;
mod primitive;
mod queue;
mod rooms;
#[cfg(not(loom))]
mod sched;
mod shared;
mod stats;
mod table;
#[cfg(not(loom))]
mod thread;
#[cfg(not(loom))]
mod waiter;

#[cfg(test)]
#[cfg(loom)]
mod loom_tests;

#[cfg(not(loom))]
pub use address::{DEFAULT_PORT, HostPort};
#[cfg(not(loom))]
pub use agent::{Agent, new_room, stage_name};
#[cfg(not(loom))]
pub use calls::{CALL_BOUNDS_NS, CALLS, Call, CallCosts, Timed};
#[cfg(not(loom))]
pub use config::{AgentConfig, FabricChoice, Staging, StagingMode, StartError, TlsConfig};
#[cfg(not(loom))]
pub use control::Limits;
#[cfg(not(loom))]
pub use kvxfer_proto::wire::MAX_META_BYTES;
pub use metrics::{
    DURATION_BOUNDS_US, Durations, LinkUse, Outcomes, REASONS, ROOM_SIDES, ROOM_STATES, Rate, STAGES,
};
#[cfg(not(loom))]
pub use order::{CallError, ExpectOrder, PushOrder, WaitError};
pub use rooms::{AgentEvent, after_fork_in_child};
pub use stats::Stats;
#[cfg(not(loom))]
pub use waiter::Waiter;
