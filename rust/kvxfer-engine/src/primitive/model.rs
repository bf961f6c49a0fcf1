//! loom's primitives, and stand-ins for what loom does not know.

use super::Fault;
pub(crate) use loom::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, AtomicUsize, Ordering, fence};
pub(crate) use loom::sync::{Condvar, Mutex, MutexGuard};
use std::cell::Cell;
use std::collections::VecDeque;

std::thread_local! {
    // loom runs all threads of a model on the thread that called it.
    static FAULT: Cell<Option<Fault>> = const { Cell::new(None) };
}

/// Whether this step is to be left out.
pub(crate) fn broken(fault: Fault) -> bool {
    FAULT.get() == Some(fault)
}

/// Runs something with a fault in place.
pub(crate) fn with_fault(fault: Option<Fault>, run: impl FnOnce()) {
    FAULT.set(fault);
    run();
    FAULT.set(None);
}

/// First in, first out. Its ends are counted outside the lock, as crossbeam's are: they may be seen late.
#[derive(Debug)]
struct Queue<T> {
    items: Mutex<VecDeque<T>>,
    head: AtomicUsize,
    tail: AtomicUsize,
    capacity: usize,
}

impl<T> Queue<T> {
    fn new(capacity: usize) -> Self {
        Self {
            items: Mutex::new(VecDeque::new()),
            head: AtomicUsize::new(0),
            tail: AtomicUsize::new(0),
            capacity,
        }
    }

    fn push(&self, item: T) -> Result<(), T> {
        let mut items = super::lock(&self.items);
        if items.len() >= self.capacity {
            return Err(item);
        }
        items.push_back(item);
        self.tail.fetch_add(1, Ordering::SeqCst);
        Ok(())
    }

    fn pop(&self) -> Option<T> {
        if self.is_empty() {
            return None;
        }
        let item = super::lock(&self.items).pop_front()?;
        self.head.fetch_add(1, Ordering::SeqCst);
        Some(item)
    }

    fn is_empty(&self) -> bool {
        self.head.load(Ordering::SeqCst) == self.tail.load(Ordering::SeqCst)
    }

    fn len(&self) -> usize {
        super::lock(&self.items).len()
    }
}

/// Stands in for crossbeam's bounded queue.
#[derive(Debug)]
pub(crate) struct ArrayQueue<T>(Queue<T>);

impl<T> ArrayQueue<T> {
    pub(crate) fn new(capacity: usize) -> Self {
        Self(Queue::new(capacity))
    }

    pub(crate) fn push(&self, item: T) -> Result<(), T> {
        self.0.push(item)
    }

    pub(crate) fn pop(&self) -> Option<T> {
        self.0.pop()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }

    pub(crate) fn capacity(&self) -> usize {
        self.0.capacity
    }
}

/// Stands in for crossbeam's unbounded queue.
#[derive(Debug)]
pub(crate) struct SegQueue<T>(Queue<T>);

impl<T> SegQueue<T> {
    pub(crate) fn new() -> Self {
        Self(Queue::new(usize::MAX))
    }

    pub(crate) fn push(&self, item: T) {
        let _ = self.0.push(item);
    }

    pub(crate) fn pop(&self) -> Option<T> {
        self.0.pop()
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(crate) fn len(&self) -> usize {
        self.0.len()
    }
}

/// Stands in for std's cell of that name.
#[derive(Debug)]
pub(crate) struct OnceLock<T> {
    begun: AtomicBool,
    set: AtomicBool,
    value: std::sync::OnceLock<T>,
}

impl<T> OnceLock<T> {
    pub(crate) fn new() -> Self {
        Self { begun: AtomicBool::new(false), set: AtomicBool::new(false), value: std::sync::OnceLock::new() }
    }

    pub(crate) fn set(&self, value: T) -> Result<(), T> {
        if self.begun.swap(true, Ordering::AcqRel) {
            return Err(value);
        }
        self.value.set(value)?;
        self.set.store(true, Ordering::Release);
        Ok(())
    }

    pub(crate) fn get(&self) -> Option<&T> {
        self.value.get().filter(|_| self.set.load(Ordering::Acquire))
    }
}

/// Stands in for an eventfd.
#[derive(Debug)]
pub(crate) struct Signal {
    raised: Mutex<bool>,
    changed: Condvar,
}

impl Signal {
    pub(crate) fn new() -> rustix::io::Result<Self> {
        Ok(Self { raised: Mutex::new(false), changed: Condvar::new() })
    }

    pub(crate) fn raise(&self) {
        *super::lock(&self.raised) = true;
        self.changed.notify_all();
    }

    pub(crate) fn clear(&self) {
        *super::lock(&self.raised) = false;
    }

    pub(crate) fn is_readable(&self) -> bool {
        *super::lock(&self.raised)
    }

    /// What `epoll_wait` does without a time limit.
    pub(crate) fn wait(&self) {
        let mut raised = super::lock(&self.raised);
        while !*raised {
            raised = self.changed.wait(raised).unwrap_or_else(std::sync::PoisonError::into_inner);
        }
    }
}
