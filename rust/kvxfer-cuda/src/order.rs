//! Order with work of others on the device: events and streams that somebody else made, and writes of a network card.

use crate::kernels::Event;
use crate::result::{DMA_BUF_SUPPORTED, RDMA_FLUSH_OPTIONS, RDMA_SUPPORTED, RDMA_WRITES_ORDERING};
use crate::sys::Handle;
use crate::{Context, CudaError, Driver, unsigned};
use std::ffi::c_int;
use std::marker::PhantomData;
use std::sync::Arc;

/// `CU_GPU_DIRECT_RDMA_WRITES_ORDERING_OWNER`: from here on the device orders such writes by itself.
const ORDERED_FOR_OWNER: u32 = 100;
/// `CU_FLUSH_GPU_DIRECT_RDMA_WRITES_OPTION_HOST`.
const FLUSHED_BY_HOST: u32 = 1;

/// What it takes until a kernel sees what a network card has written to the device's memory.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum WriteFlush {
    /// Nothing: the device orders such writes, or cannot be written so.
    NotNeeded,
    /// [`Context::flush_writes`].
    ByHost,
    /// The device neither orders them nor lets the host flush them.
    Impossible,
}

impl Driver {
    /// Whether a device's memory can be let at network cards (GPUDirect RDMA), by the driver's word.
    ///
    /// # Errors
    /// What the driver answers.
    pub fn supports_rdma(&self, ordinal: u32) -> Result<bool, CudaError> {
        Ok(self.api.attribute(self.raw_device(ordinal)?, RDMA_SUPPORTED)? != 0)
    }

    /// Whether a device's memory can be exported as a dma-buf, by the driver's word (NVIDIA's open kernel modules).
    ///
    /// # Errors
    /// What the driver answers, also one that does not know the question.
    pub fn supports_dmabuf(&self, ordinal: u32) -> Result<bool, CudaError> {
        Ok(self.api.attribute(self.raw_device(ordinal)?, DMA_BUF_SUPPORTED)? != 0)
    }

    /// The device whose context is current on the calling thread, if one is.
    ///
    /// # Errors
    /// What the driver answers.
    pub fn current_device(&self) -> Result<Option<u32>, CudaError> {
        let Some(device) = self.api.current_device(&self.library)? else { return Ok(None) };
        let count = unsigned("cuDeviceGetCount", self.api.device_count()?)?;
        for ordinal in 0..count {
            if self.raw_device(ordinal)? == device {
                return Ok(Some(ordinal));
            }
        }
        Err(CudaError::BadAnswer { call: "cuCtxGetDevice", value: i64::from(device) })
    }
}

impl Context {
    /// Makes the context the calling thread's current one until the guard is dropped, for libraries that expect that of
    /// who calls them. Their calls do not disturb other threads' captures of graphs meanwhile.
    ///
    /// # Errors
    /// What the driver answers.
    pub fn make_current(self: &Arc<Self>) -> Result<CurrentContext, CudaError> {
        let entered = self.enter()?;
        let mode_before = entered.mode_before();
        // The guard pops instead.
        std::mem::forget(entered);
        Ok(CurrentContext { context: Arc::clone(self), mode_before, thread: PhantomData })
    }

    /// An event that happens when everything is done that was queued on a stream of somebody else's so far. Does not wait.
    ///
    /// # Errors
    /// [`CudaError::Capturing`] where the stream is being captured into a graph, which an event would become part of; else
    /// what the driver answers, also to a stream of another device.
    ///
    /// # Safety
    /// `stream` is a `CUstream` of this context that exists, or one of the default streams: 0 and 1, or 2, the calling
    /// thread's own.
    pub unsafe fn record(self: &Arc<Self>, stream: u64) -> Result<Event, CudaError> {
        let stream = handle(stream);
        let entered = self.enter()?;
        // SAFETY: the caller's, and the context is current.
        if unsafe { self.calls.api.stream_is_capturing(self.driver.library(), stream) }? {
            return Err(CudaError::Capturing);
        }
        let event = Event { context: Arc::clone(self), raw: entered.0.event_create()? };
        // SAFETY: the event was made just now, and the stream is the caller's, of the same context.
        unsafe { entered.0.event_record(event.raw, stream) }?;
        Ok(event)
    }

    /// What it takes until a kernel sees a network card's writes.
    ///
    /// # Errors
    /// What the driver answers.
    pub fn write_flush(&self) -> Result<WriteFlush, CudaError> {
        let ask = |which| unsigned("cuDeviceGetAttribute", self.driver.api.attribute(self.device, which)?);
        if ask(RDMA_SUPPORTED)? == 0 || ask(RDMA_WRITES_ORDERING)? >= ORDERED_FOR_OWNER {
            return Ok(WriteFlush::NotNeeded);
        }
        Ok(if ask(RDMA_FLUSH_OPTIONS)? & FLUSHED_BY_HOST != 0 {
            WriteFlush::ByHost
        } else {
            WriteFlush::Impossible
        })
    }

    /// Waits, a few microseconds, until kernels that are launched from now on see what a network card has written to the
    /// device's memory.
    ///
    /// # Errors
    /// What the driver answers.
    pub fn flush_writes(&self) -> Result<(), CudaError> {
        let _entered = self.enter()?;
        self.calls.api.flush_rdma_writes(self.driver.library())
    }
}

/// A context is current on this thread until this is dropped; then the one from before is again.
#[derive(Debug)]
pub struct CurrentContext {
    context: Arc<Context>,
    /// The thread's mode of stream capture.
    mode_before: c_int,
    /// A thread's stack of contexts is its own.
    thread: PhantomData<*const ()>,
}

impl CurrentContext {
    /// Which.
    #[must_use]
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }
}

impl Drop for CurrentContext {
    fn drop(&mut self) {
        // It fails only if somebody else has popped what we pushed; then nothing of ours is left there.
        let _ = self.context.calls.pop();
        let _ = self.context.calls.exchange_capture_mode(self.mode_before);
    }
}

/// An event that somebody else made and destroys.
#[derive(Debug)]
pub struct ForeignEvent {
    context: Arc<Context>,
    raw: Handle,
}

impl ForeignEvent {
    /// # Safety
    /// `event` is a `CUevent` of that context, which exists until this is dropped.
    #[must_use]
    pub unsafe fn new(context: Arc<Context>, event: u64) -> Self {
        Self { context, raw: handle(event) }
    }

    /// Whether everything that was queued before it was last recorded is done; also so for one that never was. Does not block.
    ///
    /// # Errors
    /// What the driver answers: it will never happen then.
    pub fn is_done(&self) -> Result<bool, CudaError> {
        let entered = self.context.enter()?;
        // SAFETY: `new`'s promise.
        unsafe { entered.0.event_query(self.raw) }
    }
}

/// A handle that came as a number, as Python has them.
fn handle(number: u64) -> Handle {
    // What does not fit is no pointer of this process; null is refused by the driver.
    Handle(std::ptr::with_exposed_provenance_mut(usize::try_from(number).unwrap_or(0)))
}
