//! Orders from callers to the transfer thread, and events back.
//!
//! Both queues are crossbeam's. What is ours is the waking: a caller writes to the thread's descriptor only when
//! the thread sleeps, and the thread writes to the caller's only when it is not readable already.

use crate::rooms::{AgentEvent, RoomShared};
use crossbeam_queue::{ArrayQueue, SegQueue};
use kvxfer_fabric::ReadySignal;
use kvxfer_proto::node::{Expect, Push};
use kvxfer_proto::{PushId, Room};
use rustix::event::EventfdFlags;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering, fence};
use std::time::Duration;

/// What a caller wants of the transfer thread.
#[derive(Debug)]
pub(crate) enum Order {
    Expect(Box<Expect>, Arc<RoomShared>),
    Open(Room, Option<Duration>, Option<Duration>, Arc<RoomShared>),
    Push(Box<Push>, Arc<RoomShared>, Option<Arc<dyn ReadySignal>>),
    Retract(Room, PushId),
    Cancel(Room),
    Evict(String),
    Close,
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

/// Orders, bounded.
#[derive(Debug)]
pub(crate) struct Orders {
    queue: ArrayQueue<Order>,
    sleeping: AtomicBool,
    pub(crate) signal: Signal,
}

impl Orders {
    pub(crate) fn new(capacity: usize) -> rustix::io::Result<Self> {
        Ok(Self {
            queue: ArrayQueue::new(capacity.max(1)),
            sleeping: AtomicBool::new(false),
            signal: Signal::new()?,
        })
    }

    /// Queues an order and wakes the thread if it sleeps; gives the order back if the queue is full.
    pub(crate) fn submit(&self, order: Order) -> Result<(), Order> {
        self.queue.push(order)?;
        // Pairs with the fence in `about_to_sleep`: either the thread sees the order, or we see that it sleeps.
        fence(Ordering::SeqCst);
        if self.sleeping.load(Ordering::Relaxed) && self.sleeping.swap(false, Ordering::AcqRel) {
            self.signal.raise();
        }
        Ok(())
    }

    pub(crate) fn take(&self) -> Option<Order> {
        self.queue.pop()
    }

    pub(crate) fn len(&self) -> usize {
        self.queue.len()
    }

    pub(crate) fn capacity(&self) -> usize {
        self.queue.capacity()
    }

    /// Called by the thread before it sleeps; `false` means that there is an order: do not sleep.
    pub(crate) fn about_to_sleep(&self) -> bool {
        self.sleeping.store(true, Ordering::Relaxed);
        fence(Ordering::SeqCst);
        if self.queue.is_empty() {
            return true;
        }
        self.sleeping.store(false, Ordering::Relaxed);
        false
    }

    pub(crate) fn awake(&self) {
        self.sleeping.store(false, Ordering::Relaxed);
    }
}

/// Events, for `poll`.
#[derive(Debug)]
pub(crate) struct Events {
    queue: SegQueue<AgentEvent>,
    raised: AtomicBool,
    pub(crate) signal: Signal,
}

impl Events {
    pub(crate) fn new() -> rustix::io::Result<Self> {
        Ok(Self { queue: SegQueue::new(), raised: AtomicBool::new(false), signal: Signal::new()? })
    }

    pub(crate) fn push(&self, event: AgentEvent) {
        self.queue.push(event);
        if !self.raised.swap(true, Ordering::SeqCst) {
            self.signal.raise();
        }
    }

    /// Takes everything; the descriptor is readable again only for what comes after.
    pub(crate) fn drain(&self, mut f: impl FnMut(AgentEvent)) {
        if self.queue.is_empty() && !self.raised.load(Ordering::Relaxed) {
            return;
        }
        if self.raised.load(Ordering::SeqCst) {
            // In this order: an event that comes between the two lines is taken below, one that comes after them
            // raises the signal anew.
            self.signal.clear();
            self.raised.store(false, Ordering::SeqCst);
        }
        while let Some(event) = self.queue.pop() {
            f(event);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn readable(fd: BorrowedFd<'_>) -> bool {
        let mut fds = [rustix::event::PollFd::from_borrowed_fd(fd, rustix::event::PollFlags::IN)];
        let zero = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        rustix::event::poll(&mut fds, Some(&zero)).unwrap() == 1
    }

    #[test]
    fn a_full_queue_gives_the_order_back_and_loses_nothing() {
        let orders = Orders::new(2).unwrap();
        let room = Room::new(1).unwrap();
        orders.submit(Order::Cancel(room)).unwrap();
        orders.submit(Order::Cancel(room)).unwrap();
        assert!(matches!(orders.submit(Order::Close), Err(Order::Close)));
        assert!(matches!(orders.take(), Some(Order::Cancel(_))));
        orders.submit(Order::Close).unwrap();
        assert_eq!(orders.len(), 2);
    }

    #[test]
    fn a_sleeping_thread_is_woken_once() {
        let orders = Orders::new(8).unwrap();
        orders.submit(Order::Close).unwrap();
        assert!(!orders.about_to_sleep(), "there is work");
        orders.take();
        assert!(orders.about_to_sleep());
        assert!(!readable(orders.signal.as_fd()));
        orders.submit(Order::Close).unwrap();
        assert!(readable(orders.signal.as_fd()));
    }

    /// One thread pushes, one drains and waits on the descriptor: every event is seen.
    #[test]
    fn no_event_is_lost_between_the_queue_and_its_descriptor() {
        let events = Arc::new(Events::new().unwrap());
        let total = 20_000u64;
        let pusher = {
            let events = Arc::clone(&events);
            std::thread::spawn(move || {
                for n in 0..total {
                    events.push(AgentEvent::released(Room::new(n).unwrap()));
                }
            })
        };
        let mut seen = 0;
        while seen < total {
            let mut fds = [rustix::event::PollFd::from_borrowed_fd(
                events.signal.as_fd(),
                rustix::event::PollFlags::IN,
            )];
            let limit = rustix::event::Timespec { tv_sec: 10, tv_nsec: 0 };
            assert_eq!(
                rustix::event::poll(&mut fds, Some(&limit)).unwrap(),
                1,
                "lost a wake-up after {seen}"
            );
            events.drain(|e| {
                assert_eq!(e.room.get(), seen);
                seen += 1;
            });
        }
        pusher.join().unwrap();
    }
}
