//! What an agent, its watches and its waiters share.

use crate::errors;
use kvxfer_engine::{Agent, AgentEvent, CallError};
use kvxfer_fabric::cuda::{CudaSignal, Devices};
use kvxfer_proto::node::{EventKind, Unreleased};
use pyo3::prelude::*;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

static FORKS: AtomicU64 = AtomicU64::new(0);

/// Agents made before this call answer with `Forked` from now on.
pub(crate) fn after_fork_in_child() {
    FORKS.fetch_add(1, Ordering::Relaxed);
    kvxfer_engine::after_fork_in_child();
}

/// A room that somebody waits for.
#[derive(Debug, Default)]
struct Watched {
    watches: usize,
    /// Its terminal event, if `poll` took it meanwhile: the engine may have forgotten the room by then.
    polled: Option<AgentEvent>,
}

#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) engine: Agent,
    /// Held only while attached to the interpreter, and by `poll` for its whole length: whoever finds a room
    /// gone sees, once it has this lock, the event that went with it.
    watched: Mutex<HashMap<u64, Watched>>,
    /// Devices whose work pushes wait for.
    pub(crate) devices: Devices,
    /// Events of the caller's that the transfer thread may ask, and by whose going one knows that it does so no more.
    /// Held only while attached.
    events: Mutex<Vec<(Weak<CudaSignal>, Py<PyAny>)>>,
    /// Whatever owns the registered memory.
    owner: Mutex<Option<Py<PyAny>>>,
    closing: Mutex<()>,
    closed: AtomicBool,
    forks: u64,
}

fn lock<T>(m: &Mutex<T>) -> MutexGuard<'_, T> {
    m.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Inner {
    pub(crate) fn new(engine: Agent, owner: Py<PyAny>) -> Self {
        Self {
            engine,
            watched: Mutex::default(),
            devices: Devices::default(),
            events: Mutex::default(),
            owner: Mutex::new(Some(owner)),
            closing: Mutex::default(),
            closed: AtomicBool::new(false),
            forks: FORKS.load(Ordering::Relaxed),
        }
    }

    pub(crate) fn forked(&self) -> bool {
        self.forks != FORKS.load(Ordering::Relaxed)
    }

    /// The locks of an agent of the parent process may be held by threads that do not exist here.
    pub(crate) fn check(&self, py: Python<'_>) -> PyResult<()> {
        if self.forked() { Err(errors::call(py, &CallError::Forked)) } else { Ok(()) }
    }

    pub(crate) fn closed(&self) -> bool {
        self.closed.load(Ordering::Acquire)
    }

    /// Keeps an event's object for as long as the transfer thread may ask it. The thread itself never touches Python, so
    /// what it has let go of is dropped by callers.
    pub(crate) fn keep(&self, signal: Weak<CudaSignal>, object: Py<PyAny>) {
        lock(&self.events).push((signal, object));
    }

    /// Lets go of objects that nobody asks any more.
    pub(crate) fn let_go(&self) {
        let mut events = lock(&self.events);
        if events.is_empty() {
            return;
        }
        let gone: Vec<_> = events.extract_if(.., |(signal, _)| signal.strong_count() == 0).collect();
        // Its finaliser may call us.
        drop(events);
        drop(gone);
    }

    pub(crate) fn poll(&self) -> Vec<AgentEvent> {
        self.let_go();
        let mut out = Vec::new();
        let mut watched = lock(&self.watched);
        self.engine.poll(|event| {
            if matches!(event.kind, EventKind::Success | EventKind::Failed(_))
                && let Some(entry) = watched.get_mut(&event.room.get())
            {
                entry.polled = Some(event.clone());
            }
            out.push(event);
        });
        out
    }

    pub(crate) fn watch(&self, room: u64) {
        lock(&self.watched).entry(room).or_default().watches += 1;
    }

    pub(crate) fn unwatch(&self, room: u64) {
        if let Entry::Occupied(mut entry) = lock(&self.watched).entry(room) {
            entry.get_mut().watches -= 1;
            if entry.get().watches == 0 {
                entry.remove();
            }
        }
    }

    /// The terminal event of a watched room, if `poll` took it.
    pub(crate) fn polled(&self, room: u64) -> Option<AgentEvent> {
        lock(&self.watched).get(&room).and_then(|w| w.polled.clone())
    }

    /// Stops the thread and lets the memory go, unless some of it may still be used by a peer.
    pub(crate) fn close(&self, py: Python<'_>, timeout: Duration) -> Vec<Unreleased> {
        if self.forked() {
            return Vec::new();
        }
        let unreleased = py.detach(|| {
            // A second closer must not let the memory go before the first one's thread has ended.
            let _only = lock(&self.closing);
            let unreleased = self.engine.close(timeout);
            self.closed.store(true, Ordering::Release);
            unreleased
        });
        // The thread, and all that it asked, is gone.
        self.let_go();
        let owner = lock(&self.owner).take();
        if unreleased.is_empty() {
            drop(owner);
        } else {
            // For ever: nobody can say when the last byte lands.
            std::mem::forget(owner);
        }
        unreleased
    }
}
