//! Descriptors for event loops.

use crate::agent::{Shared, lock};
use crate::queue::Signal;
use rustix::fd::{AsFd, BorrowedFd};
use std::sync::Arc;
use std::sync::atomic::Ordering;

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
        let mut waiters = lock(&self.shared.waiters);
        waiters.retain(|w| !Arc::ptr_eq(w, &self.signal));
        self.shared.has_waiters.store(!waiters.is_empty(), Ordering::SeqCst);
    }
}
