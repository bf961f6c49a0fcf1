//! `kvxfer._kvxfer.Watch`: one wait for one room.

use crate::errors;
use crate::event::Event;
use crate::inner::Inner;
use kvxfer_engine::{AgentEvent, CallError, WaitError};
use pyo3::prelude::*;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long the interpreter's signals wait while a caller does.
const SLICE: Duration = Duration::from_millis(50);

/// Sees one room's end, even if `poll` takes it. Made by `Agent._watch`.
#[pyclass(frozen, module = "kvxfer._kvxfer")]
#[derive(Debug)]
pub(crate) struct Watch {
    inner: Arc<Inner>,
    room: u64,
}

impl Watch {
    pub(crate) fn new(inner: &Arc<Inner>, room: u64) -> Self {
        inner.watch(room);
        Self { inner: Arc::clone(inner), room }
    }

    /// An engine's answer, or what `poll` took.
    fn or_polled<E>(&self, answer: Result<Option<AgentEvent>, E>) -> Result<Option<AgentEvent>, E> {
        answer.or_else(|e| self.inner.polled(self.room).map(Some).ok_or(e))
    }

    pub(crate) fn ended(&self, py: Python<'_>) -> PyResult<Option<AgentEvent>> {
        self.inner.check(py)?;
        let ended = self.or_polled(self.inner.engine.ended(self.room)).map_err(|e| errors::call(py, &e))?;
        if ended.is_none() && self.inner.closed() {
            return Err(errors::call(py, &CallError::Closed));
        }
        Ok(ended)
    }

    /// Sleeps until the room has ended, without the interpreter, a slice at a time.
    pub(crate) fn wait(&self, py: Python<'_>, timeout: Option<Duration>) -> PyResult<AgentEvent> {
        let began = Instant::now();
        loop {
            if let Some(event) = self.ended(py)? {
                return Ok(event);
            }
            let left = timeout.map(|t| t.saturating_sub(began.elapsed()));
            let slice = left.map_or(SLICE, |left| left.min(SLICE));
            match py.detach(|| self.inner.engine.wait(self.room, Some(slice))) {
                Ok(event) => return Ok(event),
                Err(WaitError::Timeout { room, stage, .. }) => {
                    py.check_signals()?;
                    if let Some(timeout) = timeout.filter(|t| began.elapsed() >= *t) {
                        let error = WaitError::Timeout { room, seconds: timeout.as_secs_f64(), stage };
                        return Err(errors::wait(py, &error));
                    }
                }
                // `ended` knows whether `poll` took it.
                Err(WaitError::Call(CallError::UnknownRoom(_))) => {}
                Err(e) => return Err(errors::wait(py, &e)),
            }
        }
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        if !self.inner.forked() {
            self.inner.unwatch(self.room);
        }
    }
}

#[pymethods]
impl Watch {
    /// The room.
    #[getter]
    fn room(&self) -> u64 {
        self.room
    }

    /// The room's `"Success"` or `"Failed"`, or None while it has not ended.
    ///
    /// Raises `UnknownRoom` if the agent does not know the room, `AgentClosed` if it will never end.
    fn event(&self, py: Python<'_>) -> PyResult<Option<Event>> {
        Ok(self.ended(py)?.map(Event::new))
    }
}
