//! Descriptors for event loops.

use crate::primitive::Signal;
use crate::shared::Shared;
use rustix::fd::{AsFd, BorrowedFd};
use std::sync::Arc;

/// A descriptor for an event loop, see [`crate::Agent::new_waiter`].
#[derive(Debug)]
pub struct Waiter {
    pub(crate) signal: Arc<Signal>,
    pub(crate) shared: Arc<Shared>,
}

impl Waiter {
    /// The descriptor.
    #[must_use]
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.signal.as_fd()
    }

    /// Makes it unreadable until the next terminal event.
    pub fn clear(&self) {
        self.signal.clear();
    }
}

impl Drop for Waiter {
    fn drop(&mut self) {
        self.shared.waiters.remove(&self.signal);
    }
}
