//! Pushes whose pages may not be read yet: a device's work that fills them is not done.
//!
//! Events of CUDA have no descriptor, so the thread asks them between slices, and while it has nothing else to do, on a timer;
//! only while any is waited for.

use kvxfer_fabric::ReadySignal;
use kvxfer_proto::node::Node;
use kvxfer_proto::{PushId, Reason, ReasonKind, Room, Time};
use std::collections::VecDeque;
use std::sync::Arc;

/// Signals that are asked in one turn: a question takes the driver about a microsecond, and slices and control messages of
/// others wait for it.
const ASKS_PER_TURN: usize = 64;
/// A thread that turns faster than this asks only so often.
const ASK_EVERY_US: u64 = 5;

struct Waiting {
    room: Room,
    push: PushId,
    signal: Arc<dyn ReadySignal>,
}

/// In front of the state machine, which plans and posts nothing of a push that is not ready.
#[derive(Default)]
pub(super) struct Gate {
    waiting: VecDeque<Waiting>,
    asked_at: Time,
}

impl Gate {
    pub(super) fn add(&mut self, room: Room, push: PushId, signal: Arc<dyn ReadySignal>) {
        self.waiting.push_back(Waiting { room, push, signal });
    }

    pub(super) fn is_waiting(&self) -> bool {
        !self.waiting.is_empty()
    }

    pub(super) fn len(&self) -> usize {
        self.waiting.len()
    }

    /// Asks, in turn, what is still wanted, and lets go of the rest. Returns whether anything changed.
    ///
    /// A push that was taken back or whose room has failed is not asked: its caller may have been told so, and may have destroyed
    /// the event since.
    pub(super) fn check(&mut self, now: Time, node: &mut Node) -> bool {
        if self.waiting.is_empty() || now.since_us(self.asked_at) < ASK_EVERY_US {
            return false;
        }
        self.asked_at = now;
        let before = self.waiting.len();
        for _ in 0..before.min(ASKS_PER_TURN) {
            let Some(one) = self.waiting.pop_front() else { break };
            if !node.is_awaiting(one.room, one.push) {
                continue;
            }
            match one.signal.is_ready() {
                Ok(false) => self.waiting.push_back(one),
                Ok(true) => node.handle_push_ready(now, one.room, one.push),
                Err(e) => {
                    let text =
                        format!("room {}: push {}: its pages never became ready: {e}", one.room, one.push.0);
                    node.handle_cancel(now, one.room, Reason::new(ReasonKind::FabricError, text));
                }
            }
        }
        self.waiting.len() != before
    }
}
