//! CUDA, for agents with pages in a device's memory and for pushes that wait for a device's work.
//!
//! Nothing here is used, and no driver is loaded, by an agent on host memory whose pushes have no events.

use crate::{FabricError, MemKind, ReadySignal, RegionSpan};
use kvxfer_cuda::{Context, CudaError, CurrentContext, Driver, Event, ForeignEvent, WriteFlush};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};

/// A CUDA error as a fabric's.
#[must_use]
pub fn error(e: CudaError) -> FabricError {
    match e {
        CudaError::Driver { call, code, name } => FabricError::Os { call, why: format!("{name} ({code})") },
        CudaError::Capturing => FabricError::Os { call: "cuEventRecord", why: e.to_string() },
        other => FabricError::Unavailable { fabric: "cuda", why: other.to_string() },
    }
}

/// The device on which an agent has pages, whose primary context is current on the thread that made this until it is dropped:
/// UCX's CUDA transports use the context that they find.
#[derive(Debug)]
pub struct AgentDevice {
    current: CurrentContext,
    flush: bool,
}

impl AgentDevice {
    /// Nothing for an agent on host memory. `receives` says whether peers may write into the memory.
    ///
    /// # Errors
    /// Memory of several devices, a driver that is missing or refuses, or a device whose kernels cannot be made to see what a
    /// network card wrote.
    pub fn of(regions: &[RegionSpan], receives: bool) -> Result<Option<Self>, FabricError> {
        let mut devices = regions.iter().filter_map(|r| match r.kind {
            MemKind::Device(n) => Some(n),
            MemKind::Host => None,
        });
        let Some(device) = devices.next() else { return Ok(None) };
        if let Some(other) = devices.find(|n| *n != device) {
            return Err(FabricError::Unavailable {
                fabric: "cuda",
                why: format!(
                    "memory of devices {device} and {other}: an agent has pages on one device, make one for each"
                ),
            });
        }
        let context = Driver::load().and_then(|d| Context::primary(d, device)).map_err(error)?;
        let flush = match context.write_flush().map_err(error)? {
            WriteFlush::NotNeeded => false,
            WriteFlush::ByHost => receives,
            WriteFlush::Impossible if !receives => false,
            WriteFlush::Impossible => {
                return Err(FabricError::Unavailable {
                    fabric: "cuda",
                    why: format!(
                        "device {device} neither orders a network card's writes nor lets the host flush them, so that \
                         nobody could say when its kernels see them: receive into host memory"
                    ),
                });
            }
        };
        let current = context.make_current().map_err(error)?;
        tracing::info!(device, flush, "pages are in a device's memory");
        Ok(Some(Self { current, flush }))
    }

    /// Its number.
    #[must_use]
    pub fn ordinal(&self) -> u32 {
        self.current.context().ordinal()
    }

    /// Makes what network cards have written so far visible to kernels that are launched from now on, where it takes that.
    ///
    /// # Errors
    /// What the driver answers: then it may not be visible.
    pub fn flush_writes(&self) -> Result<(), FabricError> {
        if self.flush { self.current.context().flush_writes().map_err(error) } else { Ok(()) }
    }
}

/// A stream or an event of an engine's.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Work {
    /// A `CUevent`: what was queued before it was last recorded.
    Event(u64),
    /// A `CUstream`: what has been queued on it so far.
    Stream(u64),
}

/// Devices whose work pushes wait for; kept for as long as an agent, so that only the first push pays for a context.
#[derive(Debug, Default)]
pub struct Devices {
    /// Locked by callers only.
    contexts: Mutex<BTreeMap<u32, Arc<Context>>>,
}

impl Devices {
    fn context(&self, device: u32) -> Result<Arc<Context>, CudaError> {
        let mut contexts = self.contexts.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(context) = contexts.get(&device) {
            return Ok(Arc::clone(context));
        }
        let context = Context::primary(Driver::load()?, device)?;
        contexts.insert(device, Arc::clone(&context));
        Ok(context)
    }

    /// The device whose context is current on the calling thread.
    ///
    /// # Errors
    /// What the driver answers, or that there is none.
    pub fn current() -> Result<Option<u32>, FabricError> {
        Driver::load().and_then(Driver::current_device).map_err(error)
    }

    /// What a push waits for until this work is done; nothing if it is done already. Does not wait.
    ///
    /// The handle is the caller's promise, as addresses in [`RegionSpan`] are: a stream is one that exists (or 0, 1 or 2), and
    /// an event exists for as long as the signal does, and is not recorded again.
    ///
    /// # Errors
    /// What the driver answers, for instance to a handle of another device.
    pub fn signal(&self, device: u32, work: Work) -> Result<Option<CudaSignal>, FabricError> {
        let context = self.context(device).map_err(error)?;
        let signal = match work {
            // SAFETY: the caller's promise, see above.
            Work::Event(event) => CudaSignal::Foreign(unsafe { ForeignEvent::new(context, event) }),
            // SAFETY: as above.
            Work::Stream(stream) => CudaSignal::Own(unsafe { context.record(stream) }.map_err(error)?),
        };
        Ok(if signal.is_ready()? { None } else { Some(signal) })
    }
}

/// An event that the transfer thread asks.
#[derive(Debug)]
pub enum CudaSignal {
    /// Recorded by us.
    Own(Event),
    /// The engine's.
    Foreign(ForeignEvent),
}

impl ReadySignal for CudaSignal {
    fn is_ready(&self) -> Result<bool, FabricError> {
        match self {
            Self::Own(event) => event.is_done(),
            Self::Foreign(event) => event.is_done(),
        }
        .map_err(error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn span(kind: MemKind) -> RegionSpan {
        RegionSpan { addr: 4096, len: 4096, kind, backing: None }
    }

    #[test]
    fn host_memory_needs_no_driver() {
        assert!(AgentDevice::of(&[span(MemKind::Host)], true).unwrap().is_none());
    }

    #[test]
    fn an_agent_has_memory_of_one_device() {
        let regions = [MemKind::Device(1), MemKind::Host, MemKind::Device(1), MemKind::Device(3)].map(span);
        let e = AgentDevice::of(&regions, false).unwrap_err().to_string();
        assert!(e.contains("devices 1 and 3"), "{e}");
    }

    #[test]
    fn errors_keep_the_drivers_words() {
        let e = error(CudaError::Driver {
            call: "cuEventQuery",
            code: 719,
            name: "CUDA_ERROR_LAUNCH_FAILED".into(),
        });
        assert_eq!(e.to_string(), "cuEventQuery failed: CUDA_ERROR_LAUNCH_FAILED (719)");
        assert!(
            error(CudaError::Capturing)
                .to_string()
                .starts_with("cuEventRecord failed: the stream is being captured")
        );
    }
}
