//! What callers and the transfer thread meet on: std's and crossbeam's primitives and an eventfd, or in a build with
//! `--cfg loom` loom's, so that `make test-loom` walks the interleavings of our own code.
//!
//! loom knows neither crossbeam's queues nor descriptors. Thin stand-ins keep what our code relies on, and no more:
//! whether a queue is empty is read without its lock, so it may be seen late, exactly as with crossbeam.

/// Deliberate faults: each takes one step out of a protocol, and a test shows that loom then finds the harm.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[cfg_attr(not(loom), allow(dead_code, reason = "only the model sets them"))]
pub(crate) enum Fault {
    /// `submit` does not look for a sleeper.
    SubmitWithoutWake,
    /// No fence between the order and the look for a sleeper.
    SubmitWithoutFence,
    /// No look at the queue once the thread has said that it sleeps.
    SleepWithoutLook,
    /// No fence between saying so and the look.
    SleepWithoutFence,
    /// The signal is cleared after that look.
    ClearAfterLook,
    /// Closing counts on a place in the queue.
    CloseWithoutWake,
    /// A sleeper does not look whether the agent was closed.
    SleepWithoutLookForClose,
    /// An event's descriptor is said to be readable before it is.
    ReadableTooEarly,
    /// A push calls the descriptor readable although a poll has cleared it meanwhile.
    RaiserIgnoresPoll,
    /// The descriptor is called unreadable before it is cleared.
    UnreadableTooEarly,
    /// Events are taken before the descriptor is cleared.
    ClearAfterTaking,
    /// A room's end is announced without the lock of those who are about to sleep.
    PublishWithoutLock,
    /// No fence between a room's end and the look for event loops.
    RaiseWithoutFence,
    /// An order is not followed by a look whether anybody still takes it.
    SubmitWithoutLookForEnd,
    /// The queue is emptied for the last time before the thread says that it has ended.
    EndAfterDrain,
    /// Whoever made a room's entry takes it back although another order names it.
    EntryTakenBack,
}

#[cfg(not(loom))]
mod real {
    pub(crate) use crossbeam_queue::{ArrayQueue, SegQueue};
    use rustix::event::EventfdFlags;
    use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
    pub(crate) use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering, fence};
    pub(crate) use std::sync::{Condvar, Mutex, MutexGuard, OnceLock};

    /// Never, outside the model.
    pub(crate) const fn broken(_: super::Fault) -> bool {
        false
    }

    /// A descriptor that can be made readable.
    #[derive(Debug)]
    pub(crate) struct Signal(OwnedFd);

    impl Signal {
        pub(crate) fn new() -> rustix::io::Result<Self> {
            rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map(Self)
        }

        pub(crate) fn raise(&self) {
            // The only failure is a counter that is full: then it is readable.
            let _ = rustix::io::write(&self.0, &1u64.to_ne_bytes());
        }

        pub(crate) fn clear(&self) {
            let mut buf = [0u8; 8];
            let _ = rustix::io::read(&self.0, &mut buf);
        }
    }

    impl AsFd for Signal {
        fn as_fd(&self) -> BorrowedFd<'_> {
            self.0.as_fd()
        }
    }
}

#[cfg(not(loom))]
pub(crate) use real::{
    ArrayQueue, AtomicBool, AtomicU8, AtomicU64, Condvar, Mutex, MutexGuard, OnceLock, Ordering, SegQueue,
    Signal, broken, fence,
};

#[cfg(loom)]
mod model;
#[cfg(loom)]
pub(crate) use model::{
    ArrayQueue, AtomicBool, AtomicU8, AtomicU64, Condvar, Mutex, MutexGuard, OnceLock, Ordering, SegQueue,
    Signal, broken, fence, with_fault,
};

/// A lock whose holder cannot leave anything half done.
pub(crate) fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}
