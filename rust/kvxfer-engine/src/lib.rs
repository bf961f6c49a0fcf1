//! The transfer thread and what it needs: queues to and from callers, the control channel, the directory,
//! the scheduler of slices, and the fabrics of one agent.
//!
//! [`Agent`] is the caller's end. Its calls check what needs no look at each page, put an order into a bounded
//! queue and return: they never block, do I/O, or take a lock that the transfer thread holds while it works.
//! Everything else happens on the transfer thread, which drives [`kvxfer_proto::node::Node`].
#![deny(unsafe_code)]

mod address;
mod agent;
mod carriers;
mod config;
mod control;
mod driver;
mod order;
mod queue;
mod rooms;
mod sched;
mod stats;
mod thread;
mod waiter;

pub use address::{DEFAULT_PORT, HostPort};
pub use agent::{Agent, new_room, stage_name};
pub use config::{AgentConfig, FabricChoice, StartError, TlsConfig};
pub use control::Limits;
pub use kvxfer_proto::wire::MAX_META_BYTES;
pub use order::{CallError, ExpectOrder, PushOrder, WaitError};
pub use rooms::{AgentEvent, after_fork_in_child};
pub use stats::Stats;
pub use waiter::Waiter;
