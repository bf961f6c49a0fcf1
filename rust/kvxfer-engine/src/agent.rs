//! The caller's end of an agent.

use crate::calls::{CALLS, Call, CallCosts, Calls, Timed};
use crate::clock::now;
use crate::config::{AgentConfig, StartError};
use crate::order::{CallError, ExpectOrder, PushOrder, WaitError};
use crate::primitive::{Signal, lock};
use crate::queue::Order;
use crate::rooms::{AgentEvent, RoomShared, forks};
use crate::shared::Shared;
use crate::stats::Stats;
use crate::table::Table;
use crate::thread;
use crate::waiter::Waiter;
use kvxfer_proto::node::{EventKind, Expect, Push, Source, Stage, Unreleased};
use kvxfer_proto::wire::MAX_META_BYTES;
use kvxfer_proto::{PageLayout, PushId, Room};
use rustix::fd::{AsFd, BorrowedFd};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// An agent: registered memory, a control port, and a transfer thread.
#[derive(Debug)]
pub struct Agent {
    shared: Arc<Shared>,
    table: Table,
    thread: Mutex<Option<std::thread::JoinHandle<()>>>,
    address: String,
    layouts: Vec<PageLayout>,
    next_push: AtomicU64,
    forks: usize,
    transports: String,
    calls: Calls,
}

impl Agent {
    /// Starts an agent. When this returns, its memory is registered and its port is open.
    ///
    /// # Errors
    /// See [`StartError`]; nothing of a failed agent is left.
    pub fn start(config: AgentConfig) -> Result<Self, StartError> {
        let os = |call| move |e: rustix::io::Errno| StartError::Os { call, why: e.to_string() };
        let shared = Arc::new(Shared::new(config.queue_capacity).map_err(os("eventfd"))?);
        let layouts = config.side.groups.clone();
        let started = thread::start(config, Arc::clone(&shared))?;
        Ok(Self {
            shared,
            table: Table::new(),
            thread: Mutex::new(Some(started.handle)),
            address: started.address,
            transports: started.fabrics,
            layouts,
            next_push: AtomicU64::new(1),
            forks: forks(),
            calls: Calls::default(),
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
        if self.shared.orders.is_closed() {
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
            let held = layout.held(start..end);
            let need =
                if tokens == 0 { 0 } else { (held.start % size + held.end - held.start).div_ceil(size) };
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
        self.table.begin(room, expected).map_err(|old| ended_or(&old, room, CallError::RoomInUse(room)))
    }

    fn submit(&self, order: Order) -> Result<(), CallError> {
        let capacity = self.shared.orders.capacity();
        self.shared.submit(order, || now().0).map_err(|_| CallError::QueueFull { capacity })
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
        self.submit(Order::Expect(Box::new(expect), Arc::clone(&shared)))
            .inspect_err(|_| self.table.refused(order.room, &shared))
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
        self.submit(Order::Open(number, bootstrap, timeout, Arc::clone(&shared)))
            .inspect_err(|_| self.table.refused(room, &shared))
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
        let shared = self.table.join(order.room, |old| match old.end() {
            Some(end) => Err(failed_or(end, order.room, CallError::RoomInUse(order.room))),
            None if old.expected => Err(CallError::RoomInUse(order.room)),
            None => Ok(()),
        })?;
        if shared.last_ordered.load(Ordering::Relaxed) {
            let text = format!(
                "room {}: push {} was the last one (last=True)",
                order.room,
                shared.last_push.load(Ordering::Relaxed)
            );
            self.table.refused(order.room, &shared);
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
        self.submit(Order::Push(Box::new(push), Arc::clone(&shared), order.ready))
            .inspect_err(|_| self.table.refused(order.room, &shared))?;
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
        self.submit(Order::Retract(number, push, Arc::clone(&shared)))?;
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
        let shared = self.known(room)?;
        if shared.end().is_some() {
            return Ok(());
        }
        self.submit(Order::Cancel(number, shared))
    }

    fn known(&self, room: u64) -> Result<Arc<RoomShared>, CallError> {
        self.table.get(room).ok_or(CallError::UnknownRoom(room))
    }

    /// Hands over everything that happened since the last call.
    pub fn poll(&self, mut f: impl FnMut(AgentEvent)) {
        self.shared.events.drain(|event| {
            let gone = event.released && !matches!(event.kind, EventKind::Retracted(_));
            if gone {
                self.table.over(&event);
            }
            f(event);
        });
    }

    /// Where a room stands, or nothing if it is unknown (or over and polled).
    #[must_use]
    pub fn state(&self, room: u64) -> Option<Stage> {
        self.table.get(room).map(|r| r.stage())
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
        shared.wait(timeout).cloned().ok_or_else(|| {
            if shared.is_withdrawn() {
                return CallError::UnknownRoom(room).into();
            }
            WaitError::Timeout {
                room,
                seconds: timeout.map_or(0.0, |t| t.as_secs_f64()),
                stage: stage_name(shared.stage()),
            }
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
        self.shared.waiters.add(Arc::clone(&signal));
        Ok(Waiter { signal, shared: Arc::clone(&self.shared) })
    }

    /// Counters and gauges, as the transfer thread last wrote them.
    #[must_use]
    pub fn stats(&self) -> Stats {
        let mut stats = self.shared.stats.get();
        stats.queue_depth = self.shared.orders.len() as u64;
        stats.queued_events = self.shared.events.len() as u64;
        stats.known_rooms = self.table.len() as u64;
        stats.rate = stats.link.rate(now(), stats.moved_bytes);
        stats
    }

    /// Counts a call, and times it until what is returned is dropped if it is one to be timed.
    pub fn begin_call(&self, call: Call) -> Timed<'_> {
        self.calls.begin(call)
    }

    /// What the calls have cost whoever made them, in the order of [`CALLS`].
    #[must_use]
    pub fn call_costs(&self) -> [CallCosts; CALLS.len()] {
        self.calls.costs()
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
            self.shared.orders.close();
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
