//! What callers and the transfer thread share, and how an agent ends without losing anybody's order or wait.

use crate::primitive::{AtomicBool, Fault, Mutex, Ordering, Signal, broken, fence, lock};
use crate::queue::{Events, Order, Orders};
use crate::rooms::{AgentEvent, RoomShared};
use crate::stats::StatsCell;
use kvxfer_proto::node::{EventKind, RoomStats, Unreleased};
use kvxfer_proto::{Reason, ReasonKind, Room};
use std::sync::Arc;

/// State that callers and the transfer thread share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) orders: Orders,
    pub(crate) events: Events,
    pub(crate) stats: StatsCell,
    pub(crate) waiters: Waiters,
    pub(crate) unreleased: Mutex<Vec<Unreleased>>,
    /// Nobody takes orders any more.
    over: AtomicBool,
    /// Because the thread panicked.
    died: AtomicBool,
}

/// Why everything of an agent has failed whose thread panicked.
pub(crate) fn panicked() -> Reason {
    Reason::new(ReasonKind::Internal, "the transfer thread panicked: a bug; close this agent")
}

impl Shared {
    pub(crate) fn new(queue_capacity: usize) -> rustix::io::Result<Self> {
        Ok(Self {
            orders: Orders::new(queue_capacity)?,
            events: Events::new()?,
            stats: StatsCell::default(),
            waiters: Waiters::new(),
            unreleased: Mutex::new(Vec::new()),
            over: AtomicBool::new(false),
            died: AtomicBool::new(false),
        })
    }

    /// Queues an order; gives it back if the queue is full. An order that is taken is carried out or answered, also if
    /// the thread ends meanwhile.
    pub(crate) fn submit(&self, order: Order, at_us: impl FnOnce() -> u64) -> Result<(), Order> {
        self.orders.submit(order)?;
        // The fence in `Orders::submit` pairs with that in `end_orders` too: the thread may have looked for the last time
        // before the order was there, and then nobody else answers it.
        if self.over.load(Ordering::Acquire) && !broken(Fault::SubmitWithoutLookForEnd) {
            self.answer_orders(at_us());
        }
        Ok(())
    }

    /// Gives `poll` an event, and ends its room with it if it is terminal and the room has not ended.
    ///
    /// In this order: whoever polls the event finds the room ended, and whoever wakes from a wait finds the event.
    pub(crate) fn tell(&self, event: AgentEvent, room: Option<&RoomShared>) {
        let terminal = event.is_terminal();
        let room = room.filter(|_| terminal);
        if let Some(room) = room {
            room.finish(event.clone());
        }
        self.events.push(event);
        if let Some(room) = room {
            room.publish();
        }
        if terminal {
            self.waiters.raise();
        }
    }

    /// Ends a room from outside the state machine, unless it has ended.
    pub(crate) fn fail_room(
        &self,
        room: Room,
        shared: &RoomShared,
        reason: &Reason,
        released: bool,
        at_us: u64,
    ) {
        let event = AgentEvent {
            room,
            kind: EventKind::Failed(reason.clone()),
            released,
            meta: None,
            stats: RoomStats::default(),
            first_write_at_us: 0,
            at_us,
        };
        if shared.finish(event.clone()) {
            self.events.push(event);
            shared.publish();
            self.waiters.raise();
        }
    }

    /// The thread panicked: what it had in flight may still land, also in pages that orders in the queue name again.
    pub(crate) fn thread_died(&self) {
        // Before `over`, whose store and load make it visible.
        self.died.store(true, Ordering::Relaxed);
    }

    /// The thread has ended: whoever queued an order that it did not take, or still queues one, is answered here.
    pub(crate) fn end_orders(&self, at_us: u64) {
        if broken(Fault::EndAfterDrain) {
            self.answer_orders(at_us);
        }
        self.orders.close();
        self.over.store(true, Ordering::Release);
        fence(Ordering::SeqCst);
        if !broken(Fault::EndAfterDrain) {
            self.answer_orders(at_us);
        }
    }

    fn answer_orders(&self, at_us: u64) {
        let died = self.died.load(Ordering::Relaxed);
        let reason = if died { panicked() } else { Reason::new(ReasonKind::Closed, "the agent was closed") };
        while let Some(order) = self.orders.take() {
            let (room, shared) = match order {
                Order::Expect(e, shared) => (e.room, shared),
                Order::Open(room, _, _, shared) => (room, shared),
                Order::Push(p, shared, _) => (p.room, shared),
                // Their rooms have ended, or end with one of the others.
                Order::Retract(..) | Order::Cancel(..) | Order::Evict(_) => continue,
            };
            self.fail_room(room, &shared, &reason, !died, at_us);
        }
    }
}

/// Descriptors that are raised at each terminal event, for event loops; see [`crate::Agent::new_waiter`].
#[derive(Debug)]
pub(crate) struct Waiters {
    any: AtomicBool,
    list: Mutex<Vec<Arc<Signal>>>,
}

impl Waiters {
    fn new() -> Self {
        Self { any: AtomicBool::new(false), list: Mutex::new(Vec::new()) }
    }

    /// From now on `signal` is raised. What has ended before shows in a look that the caller takes after this.
    pub(crate) fn add(&self, signal: Arc<Signal>) {
        let mut list = lock(&self.list);
        list.push(signal);
        self.any.store(true, Ordering::Relaxed);
        drop(list);
        // Pairs with the fence in `raise`: either the caller sees that a room has ended, or the thread sees the signal.
        fence(Ordering::SeqCst);
    }

    pub(crate) fn remove(&self, signal: &Arc<Signal>) {
        let mut list = lock(&self.list);
        list.retain(|s| !Arc::ptr_eq(s, signal));
        self.any.store(!list.is_empty(), Ordering::Relaxed);
    }

    fn raise(&self) {
        if !broken(Fault::RaiseWithoutFence) {
            fence(Ordering::SeqCst);
        }
        if self.any.load(Ordering::Relaxed) {
            for signal in lock(&self.list).iter() {
                signal.raise();
            }
        }
    }
}
