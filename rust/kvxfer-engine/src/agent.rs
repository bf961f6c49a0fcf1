//! The caller's end of an agent.

use crate::config::{AgentConfig, StartError};
use crate::order::{CallError, ExpectOrder, PushOrder, WaitError};
use crate::queue::{Events, Order, Orders, Signal};
use crate::rooms::{AgentEvent, RoomShared, forks};
use crate::stats::Stats;
use crate::thread;
use crate::waiter::Waiter;
use kvxfer_proto::node::{EventKind, Expect, Push, Source, Stage, Unreleased};
use kvxfer_proto::wire::MAX_META_BYTES;
use kvxfer_proto::{PageLayout, PushId, Reason, Room};
use rustix::fd::{AsFd, BorrowedFd};
use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// Failed rooms that the caller has polled, remembered so that a late call on one says why.
const ENDED_ROOMS: usize = 4096;

/// State that callers and the transfer thread share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) orders: Orders,
    pub(crate) events: Events,
    pub(crate) stats: crate::stats::StatsCell,
    /// Raised at each terminal event, for event loops; see [`Agent::new_waiter`].
    pub(crate) waiters: Mutex<Vec<Arc<Signal>>>,
    pub(crate) has_waiters: AtomicBool,
    pub(crate) unreleased: Mutex<Vec<Unreleased>>,
    pub(crate) closed: AtomicBool,
    /// Nobody takes orders any more.
    pub(crate) over: AtomicBool,
}

impl Shared {
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
            stats: kvxfer_proto::node::RoomStats::default(),
            first_write_at_us: 0,
            at_us,
        };
        if shared.finish(event.clone()) {
            self.events.push(event);
            shared.publish();
            for signal in lock(&self.waiters).iter() {
                signal.raise();
            }
        }
    }

    /// The thread has ended: whoever queued an order that it did not take, or still queues one, is answered here.
    pub(crate) fn end_orders(&self) {
        self.closed.store(true, Ordering::SeqCst);
        self.over.store(true, Ordering::SeqCst);
        std::sync::atomic::fence(Ordering::SeqCst);
        let reason = Reason::new(kvxfer_proto::ReasonKind::Closed, "the agent was closed");
        while let Some(order) = self.orders.take() {
            let (room, shared) = match order {
                Order::Expect(e, shared) => (e.room, shared),
                Order::Open(room, _, _, shared) => (room, shared),
                Order::Push(p, shared, _) => (p.room, shared),
                Order::Retract(..) | Order::Cancel(_) | Order::Evict(_) | Order::Close => continue,
            };
            self.fail_room(room, &shared, &reason, true, crate::driver::now().0);
        }
    }
}

#[derive(Debug, Default)]
struct Table {
    rooms: HashMap<u64, Arc<RoomShared>>,
    /// Failed rooms that were polled, oldest first.
    ended: VecDeque<u64>,
}

/// An agent: registered memory, a control port, and a transfer thread.
#[derive(Debug)]
pub struct Agent {
    shared: Arc<Shared>,
    /// Only callers take this lock, and only for a look-up.
    table: Mutex<Table>,
    thread: Mutex<Option<std::thread::JoinHandle<()>>>,
    address: String,
    layouts: Vec<PageLayout>,
    next_push: AtomicU64,
    forks: u64,
    transports: String,
}

pub(crate) fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Agent {
    /// Starts an agent. When this returns, its memory is registered and its port is open.
    ///
    /// # Errors
    /// See [`StartError`]; nothing of a failed agent is left.
    pub fn start(config: AgentConfig) -> Result<Self, StartError> {
        let os = |call| move |e: rustix::io::Errno| StartError::Os { call, why: e.to_string() };
        let shared = Arc::new(Shared {
            orders: Orders::new(config.queue_capacity).map_err(os("eventfd"))?,
            events: Events::new().map_err(os("eventfd"))?,
            stats: crate::stats::StatsCell::default(),
            waiters: Mutex::new(Vec::new()),
            has_waiters: AtomicBool::new(false),
            unreleased: Mutex::new(Vec::new()),
            closed: AtomicBool::new(false),
            over: AtomicBool::new(false),
        });
        let layouts = config.side.groups.clone();
        let started = thread::start(config, Arc::clone(&shared))?;
        Ok(Self {
            shared,
            table: Mutex::new(Table::default()),
            thread: Mutex::new(Some(started.handle)),
            address: started.address,
            transports: started.fabrics,
            layouts,
            next_push: AtomicU64::new(1),
            forks: forks(),
        })
    }

    /// Control address, `host:port`.
    #[must_use]
    pub fn address(&self) -> &str {
        &self.address
    }

    /// Names of the fabrics that this agent offers, comma-separated.
    #[must_use]
    pub fn fabrics(&self) -> &str {
        &self.transports
    }

    fn check(&self, room: u64) -> Result<Room, CallError> {
        if self.forks != forks() {
            return Err(CallError::Forked);
        }
        if self.shared.closed.load(Ordering::Relaxed) {
            return Err(CallError::Closed);
        }
        Room::new(room).ok_or_else(|| {
            CallError::BadArgument(format!(
                "room {room} is out of range: a room has 63 bits, 0 to {}",
                Room::MAX
            ))
        })
    }

    fn check_pages(&self, pages: &[Arc<[u32]>], start: u64, tokens: u64) -> Result<(u64, u64), CallError> {
        let bad = |text: String| Err(CallError::BadArgument(text));
        if pages.len() != self.layouts.len() {
            return bad(format!("{} page lists for {} groups", pages.len(), self.layouts.len()));
        }
        let Some(end) = start.checked_add(tokens).filter(|e| *e <= 1 << 48) else {
            return bad(format!("start {start} and tokens {tokens} are too large"));
        };
        for (g, (list, layout)) in pages.iter().zip(&self.layouts).enumerate() {
            let size = u64::from(layout.page_tokens);
            let need = if tokens == 0 { 0 } else { (start % size + tokens).div_ceil(size) };
            if (list.len() as u64) < need {
                return bad(format!(
                    "{tokens} tokens from token {start} need {need} pages of {size} tokens in group {g}, but {} were given",
                    list.len()
                ));
            }
        }
        Ok((start, end))
    }

    /// A new entry for a room that this call begins.
    fn begin(&self, room: u64, expected: bool) -> Result<Arc<RoomShared>, CallError> {
        let mut table = lock(&self.table);
        match table.rooms.get(&room) {
            Some(old) => Err(ended_or(old, room, CallError::RoomInUse(room))),
            None => {
                let shared = Arc::new(RoomShared::new(expected));
                table.rooms.insert(room, Arc::clone(&shared));
                Ok(shared)
            }
        }
    }

    fn submit(&self, order: Order) -> Result<(), CallError> {
        self.shared
            .orders
            .submit(order)
            .map_err(|_| CallError::QueueFull { capacity: self.shared.orders.capacity() })?;
        // The thread may have looked for the last time before the order was there: then nobody else answers it.
        if self.shared.over.load(Ordering::SeqCst) {
            self.shared.end_orders();
        }
        Ok(())
    }

    /// Grants pages to the prefill ranks of a source, for one room.
    ///
    /// # Errors
    /// See [`CallError`]; nothing was done then.
    pub fn expect(&self, order: ExpectOrder) -> Result<(), CallError> {
        let room = self.check(order.room)?;
        let tokens = self.check_pages(&order.pages, order.start, order.tokens)?;
        let source = crate::address::HostPort::parse(&order.source, crate::address::DEFAULT_PORT)
            .map_err(CallError::BadArgument)?;
        let shared = self.begin(order.room, true)?;
        let expect = Expect {
            room,
            pages: order.pages,
            odd_page: order.odd_page,
            tokens,
            source: Source { address: source.to_string().into(), dp_rank: order.source_dp_rank },
            verify: order.verify,
            bootstrap_timeout: order.bootstrap_timeout,
            waiting_timeout: order.timeout,
        };
        self.submit(Order::Expect(Box::new(expect), shared)).inspect_err(|_| {
            lock(&self.table).rooms.remove(&order.room);
        })
    }

    /// Bootstraps a room on the prefill side before there is anything to push.
    ///
    /// # Errors
    /// See [`CallError`]; nothing was done then.
    pub fn open(
        &self,
        room: u64,
        bootstrap: Option<Duration>,
        timeout: Option<Duration>,
    ) -> Result<(), CallError> {
        let number = self.check(room)?;
        let shared = self.begin(room, false)?;
        self.submit(Order::Open(number, bootstrap, timeout, shared)).inspect_err(|_| {
            lock(&self.table).rooms.remove(&room);
        })
    }

    /// Orders some of a room's pages to be delivered. Returns the push's number.
    ///
    /// # Errors
    /// See [`CallError`]; nothing was done then.
    pub fn push(&self, order: PushOrder) -> Result<PushId, CallError> {
        let room = self.check(order.room)?;
        let tokens = self.check_pages(&order.pages, order.start, order.tokens)?;
        if let Some((a, b)) = order.layers
            && a >= b
        {
            return Err(CallError::BadArgument(format!("layers {a} to {b} are none")));
        }
        if let Some(meta) = order.meta.as_ref().filter(|m| m.len() > MAX_META_BYTES) {
            let text = format!("meta has {} bytes, more than {MAX_META_BYTES}", meta.len());
            return Err(CallError::BadArgument(text));
        }
        if order.meta.is_some() && !order.last {
            return Err(CallError::BadArgument(
                "meta goes with the last push of a room (last=True)".to_owned(),
            ));
        }
        let (shared, new) = {
            let mut table = lock(&self.table);
            match table.rooms.get(&order.room) {
                Some(old) => {
                    if let Some(end) = old.end() {
                        return Err(failed_or(end, order.room, CallError::RoomInUse(order.room)));
                    }
                    if old.expected {
                        return Err(CallError::RoomInUse(order.room));
                    }
                    (Arc::clone(old), false)
                }
                None => {
                    let shared = Arc::new(RoomShared::new(false));
                    table.rooms.insert(order.room, Arc::clone(&shared));
                    (shared, true)
                }
            }
        };
        if shared.last_ordered.load(Ordering::Relaxed) {
            let text = format!(
                "room {}: push {} was the last one (last=True)",
                order.room,
                shared.last_push.load(Ordering::Relaxed)
            );
            return Err(CallError::BadArgument(text));
        }
        let id = PushId(self.next_push.fetch_add(1, Ordering::Relaxed));
        let last = order.last;
        let push = Push {
            room,
            id,
            pages: order.pages,
            odd_page: order.odd_page,
            tokens,
            layers: order.layers,
            last,
            meta: order.meta,
            ready: order.ready.is_none(),
            bootstrap_timeout: order.bootstrap_timeout,
            waiting_timeout: order.timeout,
        };
        if let Err(e) = self.submit(Order::Push(Box::new(push), Arc::clone(&shared), order.ready)) {
            let mut table = lock(&self.table);
            // Another push may have found the entry meanwhile, and its order gone through.
            if new && Arc::strong_count(&shared) == 2 {
                table.rooms.remove(&order.room);
            }
            return Err(e);
        }
        if last {
            shared.last_push.store(id.0, Ordering::Relaxed);
            shared.last_ordered.store(true, Ordering::Relaxed);
        }
        Ok(id)
    }

    /// Takes a push's pages back; a `Retracted` event says when they are free. The room then needs a new last push.
    ///
    /// # Errors
    /// See [`CallError`]; nothing was done then.
    pub fn retract(&self, room: u64, push: PushId) -> Result<(), CallError> {
        let number = self.check(room)?;
        let shared = self.known(room)?;
        self.submit(Order::Retract(number, push))?;
        // Whatever replaces it comes with a new `last`.
        shared.last_ordered.store(false, Ordering::Relaxed);
        Ok(())
    }

    /// Gives a room up: `Failed` comes at once, its pages when no write can land any more.
    ///
    /// # Errors
    /// See [`CallError`]; nothing was done then.
    pub fn cancel(&self, room: u64) -> Result<(), CallError> {
        let number = self.check(room)?;
        let _ = self.known(room)?;
        self.submit(Order::Cancel(number))
    }

    fn known(&self, room: u64) -> Result<Arc<RoomShared>, CallError> {
        lock(&self.table).rooms.get(&room).cloned().ok_or(CallError::UnknownRoom(room))
    }

    /// Hands over everything that happened since the last call.
    pub fn poll(&self, mut f: impl FnMut(AgentEvent)) {
        self.shared.events.drain(|event| {
            let gone = event.released && !matches!(event.kind, EventKind::Retracted(_));
            if gone {
                self.forget(&event);
            }
            f(event);
        });
    }

    /// A room is over and its caller knows: a good one is forgotten, a bad one is kept for a while.
    fn forget(&self, event: &AgentEvent) {
        let mut table = lock(&self.table);
        let room = event.room.get();
        if matches!(event.kind, EventKind::Success) {
            table.rooms.remove(&room);
            return;
        }
        table.ended.push_back(room);
        while table.ended.len() > ENDED_ROOMS {
            if let Some(old) = table.ended.pop_front() {
                table.rooms.remove(&old);
            }
        }
    }

    /// Where a room stands, or nothing if it is unknown (or over and polled).
    #[must_use]
    pub fn state(&self, room: u64) -> Option<Stage> {
        lock(&self.table).rooms.get(&room).map(|r| r.stage())
    }

    /// Sleeps until the room has ended; takes nothing away from `poll`.
    ///
    /// # Errors
    /// The time is up, or the room is unknown.
    pub fn wait(&self, room: u64, timeout: Option<Duration>) -> Result<AgentEvent, WaitError> {
        if self.forks != forks() {
            return Err(CallError::Forked.into());
        }
        let shared = self.known(room)?;
        shared.wait(timeout).cloned().ok_or_else(|| WaitError::Timeout {
            room,
            seconds: timeout.map_or(0.0, |t| t.as_secs_f64()),
            stage: stage_name(shared.stage()),
        })
    }

    /// The room's terminal event, if it has ended.
    ///
    /// # Errors
    /// The room is unknown.
    pub fn ended(&self, room: u64) -> Result<Option<AgentEvent>, CallError> {
        Ok(self.known(room)?.published().cloned())
    }

    /// A descriptor that is readable while `poll` has something.
    #[must_use]
    pub fn event_fd(&self) -> BorrowedFd<'_> {
        self.shared.events.signal.as_fd()
    }

    /// A descriptor of its own for an event loop: readable after each terminal event until
    /// [`Waiter::clear`]; it takes nothing away from `poll`.
    ///
    /// # Errors
    /// No descriptor is left.
    pub fn new_waiter(&self) -> Result<Waiter, StartError> {
        let signal =
            Arc::new(Signal::new().map_err(|e| StartError::Os { call: "eventfd", why: e.to_string() })?);
        lock(&self.shared.waiters).push(Arc::clone(&signal));
        self.shared.has_waiters.store(true, Ordering::SeqCst);
        Ok(Waiter { signal, shared: Arc::clone(&self.shared) })
    }

    /// Counters and gauges, as the transfer thread last wrote them.
    #[must_use]
    pub fn stats(&self) -> Stats {
        let mut stats = self.shared.stats.get();
        stats.queue_depth = self.shared.orders.len() as u64;
        stats
    }

    /// The operator says that a peer (by name or incarnation) is gone for good.
    ///
    /// # Errors
    /// See [`CallError`]; nothing was done then.
    pub fn evict(&self, peer: &str) -> Result<(), CallError> {
        let _ = self.check(0)?;
        self.submit(Order::Evict(peer.to_owned()))
    }

    /// Cancels every room, waits for drains and fences up to `timeout`, and stops the thread. Returns what is still
    /// not released: that memory must stay.
    pub fn close(&self, timeout: Duration) -> Vec<Unreleased> {
        if self.forks != forks() {
            return Vec::new();
        }
        // Held until the thread has ended: a second closer waits, and gets the same answer.
        let mut thread = lock(&self.thread);
        if let Some(handle) = thread.take() {
            self.shared.stats.set_close_deadline(timeout);
            self.shared.closed.store(true, Ordering::SeqCst);
            // The flag alone suffices; the order only wakes the thread.
            if self.shared.orders.submit(Order::Close).is_err() {
                self.shared.orders.signal.raise();
            }
            let _ = handle.join();
        }
        drop(thread);
        lock(&self.shared.unreleased).clone()
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        let _ = self.close(Duration::from_millis(500));
    }
}

fn failed_or(end: &AgentEvent, room: u64, other: CallError) -> CallError {
    end.error().map_or(other, |reason| CallError::Failed { room, reason: reason.clone() })
}

fn ended_or(old: &RoomShared, room: u64, other: CallError) -> CallError {
    match old.end() {
        Some(end) => failed_or(end, room, other),
        None => other,
    }
}

/// The stage in the words that users know.
#[must_use]
pub const fn stage_name(stage: Stage) -> &'static str {
    match stage {
        Stage::Bootstrapping => "Bootstrapping",
        Stage::Waiting => "Waiting",
        Stage::Transferring => "Transferring",
        Stage::Success => "Success",
        Stage::Failed => "Failed",
    }
}

/// A random room.
///
/// # Errors
/// The system has no randomness.
pub fn new_room() -> Result<u64, StartError> {
    let mut bytes = [0u8; 8];
    getrandom::fill(&mut bytes).map_err(|e| StartError::Os { call: "getrandom", why: e.to_string() })?;
    Ok(u64::from_ne_bytes(bytes) & Room::MAX)
}
