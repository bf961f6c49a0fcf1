//! What callers say, and why they are refused.

use kvxfer_fabric::ReadySignal;
use kvxfer_proto::Reason;
use kvxfer_proto::msg::Verify;
use std::sync::Arc;
use std::time::Duration;
use thiserror::Error;

/// Why a call was refused, at once and with nothing done.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub enum CallError {
    /// The order queue is full.
    #[error(
        "the order queue is full ({capacity} orders wait for the transfer thread): poll, and call again; a larger queue is Agent(queue_capacity=)"
    )]
    QueueFull {
        /// Orders it holds.
        capacity: usize,
    },
    /// The room is in use.
    #[error("room {0} is in use on this agent: draw a new one with new_room()")]
    RoomInUse(u64),
    /// No such room.
    #[error("room {0} is not known to this agent")]
    UnknownRoom(u64),
    /// The room has ended.
    #[error("room {room} has failed: {reason}")]
    Failed {
        /// Which.
        room: u64,
        /// Why it failed.
        reason: Reason,
    },
    /// The agent is closed.
    #[error("the agent is closed")]
    Closed,
    /// The agent belongs to the parent process.
    #[error("this agent was made before a fork: make one in the child, after the fork")]
    Forked,
    /// An argument is wrong.
    #[error("{0}")]
    BadArgument(String),
}

/// Why a wait gave nothing.
#[derive(Clone, PartialEq, Debug, Error)]
pub enum WaitError {
    /// Not yet.
    #[error("room {room} has not ended within {seconds} s (it is {stage})")]
    Timeout {
        /// Which.
        room: u64,
        /// How long we waited.
        seconds: f64,
        /// Where it stands.
        stage: &'static str,
    },
    /// It cannot be waited for.
    #[error(transparent)]
    Call(#[from] CallError),
}

/// What `expect` is told.
#[derive(Clone, Debug)]
pub struct ExpectOrder {
    /// Room number.
    pub room: u64,
    /// One page list a group.
    pub pages: Vec<Arc<[u32]>>,
    /// The first id that is negative or past 32 bits, and its group; the lists have [`u32::MAX`] in its place, which
    /// is no page. An id past 64 bits is given as the nearest `i64`.
    pub odd_page: Option<(usize, i64)>,
    /// First token to receive.
    pub start: u64,
    /// How many tokens.
    pub tokens: u64,
    /// Directory of the prefill engine.
    pub source: String,
    /// Its data-parallel rank.
    pub source_dp_rank: u32,
    /// Checksums.
    pub verify: Verify,
    /// Until the peers are in contact.
    pub bootstrap_timeout: Option<Duration>,
    /// Without progress after that.
    pub timeout: Option<Duration>,
}

/// What `push` is told.
#[derive(Clone, Debug)]
pub struct PushOrder {
    /// Room number.
    pub room: u64,
    /// One page list a group.
    pub pages: Vec<Arc<[u32]>>,
    /// The first id that is negative or past 32 bits, and its group; the lists have [`u32::MAX`] in its place, which
    /// is no page. An id past 64 bits is given as the nearest `i64`.
    pub odd_page: Option<(usize, i64)>,
    /// First token of the page lists.
    pub start: u64,
    /// How many tokens.
    pub tokens: u64,
    /// Layers, or all.
    pub layers: Option<(u32, u32)>,
    /// Whether that is all.
    pub last: bool,
    /// For decode.
    pub meta: Option<Arc<[u8]>>,
    /// What has to happen before the pages may be read; nothing if they hold their bytes already.
    pub ready: Option<Arc<dyn ReadySignal>>,
    /// Until decode is in contact.
    pub bootstrap_timeout: Option<Duration>,
    /// Without progress after that.
    pub timeout: Option<Duration>,
}
