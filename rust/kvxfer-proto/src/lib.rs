//! Everything about a KV hand-off that can be decided without I/O.
//!
//! * [`layout`]: how pages lie in regions and which heads and layers a rank holds.
//! * [`plan`]: which bytes go where for a pair of shards.
//! * [`msg`] and [`wire`]: the control messages and their encoding.
//! * [`handshake`]: how two agents meet and authenticate.
//! * [`link`]: exactly-once, in-order delivery of messages between two incarnations, across sessions.
//! * [`node`]: the state machine of an agent: rooms, grants, pushes, drains, fences, releases.
//! * [`staging`]: slots through which pieces of many small runs travel; not a part of [`node`] yet.
//!
//! Inputs are `handle_*`, outputs are `poll_*`, and time is an argument ([`Time`]).
#![forbid(unsafe_code)]

pub mod error;
pub mod handshake;
pub mod ids;
pub mod layout;
pub mod link;
pub mod msg;
pub mod node;
pub mod plan;
pub mod staging;
pub mod wire;

pub use error::{Reason, ReasonKind};
pub use ids::{Incarnation, PushId, Room, Seq, SessionNo, Time};
pub use layout::{DType, Kind, LayoutError, Order, PageLayout, Shard, Side};
