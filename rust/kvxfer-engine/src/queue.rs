//! Orders from callers to the transfer thread, and events back.
//!
//! Both queues are crossbeam's. What is ours is the waking: a caller writes to the thread's descriptor only when
//! the thread sleeps, and the thread writes to the caller's only when it is not readable already.

use crate::primitive::{ArrayQueue, AtomicBool, AtomicU8, Fault, Ordering, SegQueue, Signal, broken, fence};
use crate::rooms::{AgentEvent, RoomShared};
use kvxfer_fabric::ReadySignal;
use kvxfer_proto::node::{Expect, Push};
use kvxfer_proto::{PushId, Room};
use std::sync::Arc;
use std::sync::atomic::AtomicUsize;
use std::time::Duration;

/// What a caller wants of the transfer thread.
#[derive(Debug)]
pub(crate) enum Order {
    Expect(Box<Expect>, Arc<RoomShared>),
    Open(Room, Option<Duration>, Option<Duration>, Arc<RoomShared>),
    Push(Box<Push>, Arc<RoomShared>, Option<Arc<dyn ReadySignal>>),
    Retract(Room, PushId, Arc<RoomShared>),
    Cancel(Room, Arc<RoomShared>),
    Evict(String),
}

/// Orders, bounded.
#[derive(Debug)]
pub(crate) struct Orders {
    queue: ArrayQueue<Order>,
    sleeping: AtomicBool,
    /// No further order is wanted. Beside the queue, because closing must not need a place in it.
    closed: AtomicBool,
    pub(crate) signal: Signal,
    /// The core from which a caller last woke the thread. No part of the protocol: it says only where to be polite.
    woken_from: AtomicUsize,
}

/// No core.
const NOWHERE: usize = usize::MAX;

impl Orders {
    pub(crate) fn new(capacity: usize) -> rustix::io::Result<Self> {
        Ok(Self {
            queue: ArrayQueue::new(capacity.max(1)),
            sleeping: AtomicBool::new(false),
            closed: AtomicBool::new(false),
            signal: Signal::new()?,
            woken_from: AtomicUsize::new(NOWHERE),
        })
    }

    /// Queues an order and wakes the thread if it sleeps; gives the order back if the queue is full.
    pub(crate) fn submit(&self, order: Order) -> Result<(), Order> {
        self.queue.push(order)?;
        self.wake();
        Ok(())
    }

    /// Tells the thread that the agent is closed.
    pub(crate) fn close(&self) {
        self.closed.store(true, Ordering::Release);
        if !broken(Fault::CloseWithoutWake) {
            self.wake();
        }
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    fn wake(&self) {
        if broken(Fault::SubmitWithoutWake) {
            return;
        }
        // Pairs with the fence in `sleep`: either the thread sees what we did, or we see that it sleeps.
        if !broken(Fault::SubmitWithoutFence) {
            fence(Ordering::SeqCst);
        }
        // Of several callers one raises the signal. The others must not write here: the thread may sleep again already.
        if self.sleeping.load(Ordering::Relaxed)
            && self.sleeping.compare_exchange(true, false, Ordering::AcqRel, Ordering::Relaxed).is_ok()
        {
            self.woken_from.store(rustix::thread::sched_getcpu(), Ordering::Relaxed);
            self.signal.raise();
        }
    }

    /// Called by the thread after a sleep: whether a caller has woken it, on the core on which it runs now.
    pub(crate) fn was_woken_here(&self) -> bool {
        let from = self.woken_from.swap(NOWHERE, Ordering::Relaxed);
        from != NOWHERE && from == rustix::thread::sched_getcpu()
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

    /// Called by the thread: sleeps in `sleep`, which the signal ends, unless there is an order, or a close of which it
    /// does not know yet (`!closing`). Returns whether it slept.
    pub(crate) fn sleep(&self, closing: bool, sleep: impl FnOnce()) -> bool {
        // Before the look: what comes after the look raises the signal anew.
        if !broken(Fault::ClearAfterLook) {
            self.signal.clear();
        }
        self.sleeping.store(true, Ordering::Relaxed);
        if !broken(Fault::SleepWithoutFence) {
            fence(Ordering::SeqCst);
        }
        let called = !self.queue.is_empty() && !broken(Fault::SleepWithoutLook);
        let closed = !closing && self.is_closed() && !broken(Fault::SleepWithoutLookForClose);
        if broken(Fault::ClearAfterLook) {
            self.signal.clear();
        }
        let slept = !called && !closed;
        if slept {
            sleep();
        }
        self.sleeping.store(false, Ordering::Relaxed);
        slept
    }
}

// Where the descriptor of the events stands. Its system calls take time, and whoever is woken by one of them may run before
// whoever made it: so each step says what is under way, and who finds it can go on from there.

/// Not readable.
const DOWN: u8 = 0;
/// A push makes it readable, or clears up after itself.
const RAISING: u8 = 1;
/// Readable.
const UP: u8 = 2;
/// It is being cleared, and nobody else touches it.
const CLEARING: u8 = 3;
/// A poll clears it although the push that raises it is not over.
const STOLEN: u8 = 4;
/// That poll is done; the push has to clear up after itself.
const HANDED_BACK: u8 = 5;
/// The push is done; that poll has to clear up.
const LEFT_BEHIND: u8 = 6;

/// Events, for `poll`. Several threads may push and several may poll.
#[derive(Debug)]
pub(crate) struct Events {
    queue: SegQueue<AgentEvent>,
    state: AtomicU8,
    pub(crate) signal: Signal,
}

impl Events {
    pub(crate) fn new() -> rustix::io::Result<Self> {
        Ok(Self { queue: SegQueue::new(), state: AtomicU8::new(DOWN), signal: Signal::new()? })
    }

    pub(crate) fn push(&self, event: AgentEvent) {
        self.queue.push(event);
        loop {
            // Pairs with the fence in `drain`: either a poll that is under way takes the event, or we see what it left.
            fence(Ordering::SeqCst);
            if broken(Fault::ReadableTooEarly) {
                if self.step(DOWN, UP) {
                    self.signal.raise();
                }
                return;
            }
            // In every other state the descriptor is readable for our event too, or whoever changes the state next looks
            // at the queue after that.
            if !self.step(DOWN, RAISING) {
                return;
            }
            self.signal.raise();
            if broken(Fault::RaiserIgnoresPoll) {
                self.state.store(UP, Ordering::Release);
                return;
            }
            let mut readable = true;
            while !self.step(RAISING, if readable { UP } else { DOWN }) {
                if self.step(STOLEN, LEFT_BEHIND) {
                    return;
                }
                if self.step(HANDED_BACK, RAISING) {
                    self.signal.clear();
                    readable = false;
                }
            }
            if readable {
                return;
            }
            fence(Ordering::SeqCst);
            if self.queue.is_empty() {
                return;
            }
        }
    }

    fn step(&self, from: u8, to: u8) -> bool {
        self.state.compare_exchange(from, to, Ordering::AcqRel, Ordering::Relaxed).is_ok()
    }

    pub(crate) fn len(&self) -> usize {
        self.queue.len()
    }

    /// Takes everything; the descriptor is readable again only for what comes after. It may be so once for an event that
    /// this poll has taken; the next one finds nothing and clears it.
    pub(crate) fn drain(&self, mut f: impl FnMut(AgentEvent)) {
        if self.state.load(Ordering::Relaxed) == DOWN && self.queue.is_empty() {
            return;
        }
        if broken(Fault::ClearAfterTaking) {
            while let Some(event) = self.queue.pop() {
                f(event);
            }
            self.lower();
            return;
        }
        self.lower();
        fence(Ordering::SeqCst);
        while let Some(event) = self.queue.pop() {
            f(event);
        }
    }

    /// Makes the descriptor unreadable. Before events are taken: one that comes between is taken too, and one that comes
    /// later makes it readable again.
    fn lower(&self) {
        if self.step(UP, CLEARING) {
            if broken(Fault::UnreadableTooEarly) {
                self.state.store(DOWN, Ordering::Release);
            }
            self.signal.clear();
            self.state.store(DOWN, Ordering::Release);
        } else if self.step(RAISING, STOLEN) || self.step(HANDED_BACK, STOLEN) {
            // The system call has woken us before it returned to the push. To leave the descriptor as it is would have our
            // caller's event loop spin until that goes on.
            self.signal.clear();
            if !self.step(STOLEN, HANDED_BACK) {
                self.signal.clear();
                self.state.store(DOWN, Ordering::Release);
            }
        }
    }
}

#[cfg(test)]
#[cfg(not(loom))]
mod tests {
    use super::*;
    use rustix::fd::{AsFd as _, BorrowedFd};

    fn readable(fd: BorrowedFd<'_>) -> bool {
        let mut fds = [rustix::event::PollFd::from_borrowed_fd(fd, rustix::event::PollFlags::IN)];
        let zero = rustix::event::Timespec { tv_sec: 0, tv_nsec: 0 };
        rustix::event::poll(&mut fds, Some(&zero)).unwrap() == 1
    }

    fn cancel() -> Order {
        Order::Cancel(Room::new(1).unwrap(), Arc::new(RoomShared::new(true)))
    }

    #[test]
    fn a_full_queue_gives_the_order_back_and_loses_nothing() {
        let orders = Orders::new(2).unwrap();
        orders.submit(cancel()).unwrap();
        orders.submit(cancel()).unwrap();
        let evict = || Order::Evict("decode-0".to_owned());
        assert!(matches!(orders.submit(evict()), Err(Order::Evict(_))));
        assert!(matches!(orders.take(), Some(Order::Cancel(..))));
        orders.submit(evict()).unwrap();
        assert_eq!(orders.len(), 2);
    }

    #[test]
    fn a_sleeping_thread_is_woken_once() {
        let orders = Orders::new(8).unwrap();
        orders.submit(cancel()).unwrap();
        assert!(!orders.sleep(false, || panic!("there is work")));
        orders.take();
        let slept = orders.sleep(false, || {
            assert!(!readable(orders.signal.as_fd()));
            orders.submit(cancel()).unwrap();
            assert!(readable(orders.signal.as_fd()));
            orders.signal.clear();
            orders.submit(cancel()).unwrap();
            assert!(!readable(orders.signal.as_fd()), "it is awake already");
        });
        assert!(slept);
    }

    #[test]
    fn closing_wakes_the_thread_also_when_the_queue_is_full() {
        let orders = Orders::new(1).unwrap();
        assert!(orders.sleep(false, || {
            orders.close();
            assert!(readable(orders.signal.as_fd()));
        }));
        assert!(!orders.sleep(false, || panic!("the thread does not know yet")));
        assert!(orders.sleep(true, || {}));
        orders.submit(cancel()).unwrap();
        orders.close();
        assert!(orders.is_closed());
    }

    #[test]
    fn the_descriptor_is_down_once_nothing_is_left() {
        let events = Events::new().unwrap();
        let mut taken = 0;
        events.drain(|_| taken += 1);
        for n in 0..3 {
            events.push(AgentEvent::released(Room::new(n).unwrap()));
        }
        assert!(readable(events.signal.as_fd()));
        events.drain(|_| taken += 1);
        assert_eq!(taken, 3);
        assert!(!readable(events.signal.as_fd()));
        events.push(AgentEvent::released(Room::new(9).unwrap()));
        assert!(readable(events.signal.as_fd()));
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
