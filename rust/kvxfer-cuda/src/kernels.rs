//! The pack kernel: loaded from PTX that is part of this library, and launched.
//!
//! What a launch copies is a table that `kvxfer_proto::plan::pack` makes; `cuda/README.md` says how. Every call makes the
//! context current for its own length and leaves the thread as it was, so any thread may call.

use crate::result::{Calls, RELAXED};
use crate::sys::{Handle, RawDevice};
use crate::{CudaError, Driver};
use std::ffi::{CStr, c_int};
use std::sync::Arc;

/// Threads of a block: `cuda/pack.cu` says so too.
pub const THREADS: u32 = 256;
/// The CUDA that a driver must know for the PTX: the release of the compiler that made it.
pub const PTX_CUDA: (u32, u32) = (12, 8);

const PTX: &str = concat!(include_str!("../../../cuda/ptx/pack.ptx"), "\0");
const KERNEL: &CStr = c"kvxfer_copy_stripes";
/// A tile is what a warp copies at once.
const WARPS: u64 = THREADS as u64 / 32;
/// The most blocks that a grid may have in its first dimension.
const MAX_BLOCKS: u32 = i32::MAX as u32;

/// A device's primary context: the one that PyTorch and the CUDA runtime use in this process.
pub struct Context {
    pub(crate) driver: &'static Driver,
    pub(crate) calls: Calls,
    pub(crate) ordinal: u32,
    pub(crate) device: RawDevice,
    raw: Handle,
}

impl std::fmt::Debug for Context {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Context").field("device", &self.device).finish_non_exhaustive()
    }
}

impl Context {
    /// The primary context of a device, by its number in this process.
    ///
    /// # Errors
    /// What the driver answers; [`CudaError::MissingSymbol`] when it cannot launch.
    pub fn primary(driver: &'static Driver, ordinal: u32) -> Result<Arc<Self>, CudaError> {
        let calls = Calls { api: &driver.api, launch: driver.api.launch_api(&driver.library)? };
        let device = driver.raw_device(ordinal)?;
        let raw = {
            let _relaxed = Relaxed::new(&calls)?;
            calls.retain(device)?
        };
        Ok(Arc::new(Self { driver, calls, ordinal, device, raw }))
    }

    /// Number of its device in this process.
    #[must_use]
    pub fn ordinal(&self) -> u32 {
        self.ordinal
    }

    pub(crate) fn enter(&self) -> Result<Entered<'_>, CudaError> {
        let relaxed = Relaxed::new(&self.calls)?;
        // SAFETY: retained for as long as `self` lives.
        unsafe { self.calls.push(self.raw) }?;
        Ok(Entered(&self.calls, relaxed))
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: the one release of `primary`'s retain. Whatever was made in the context holds an `Arc` of it, so is
        // gone. An error has nobody to go to: at worst the context stays until the process ends.
        let _ = unsafe { self.calls.release(self.device) };
    }
}

/// The thread's calls do not disturb a capture until this is dropped. An engine captures its decode step into a CUDA graph, as a
/// rule in the mode in which a question to an event, or an allocation, by any thread of the process fails and spoils the graph;
/// a thread whose own mode is relaxed is let through. What is asked here is never of the graph: a stream that is being captured is
/// refused first.
pub(crate) struct Relaxed<'a> {
    calls: &'a Calls,
    before: c_int,
}

impl<'a> Relaxed<'a> {
    pub(crate) fn new(calls: &'a Calls) -> Result<Self, CudaError> {
        Ok(Self { calls, before: calls.exchange_capture_mode(RELAXED)? })
    }
}

impl Drop for Relaxed<'_> {
    fn drop(&mut self) {
        // Into the mode that it had, which is one.
        let _ = self.calls.exchange_capture_mode(self.before);
    }
}

/// The context is current until this is dropped.
pub(crate) struct Entered<'a>(pub(crate) &'a Calls, Relaxed<'a>);

impl Entered<'_> {
    /// The mode of stream capture that the thread had.
    pub(crate) fn mode_before(&self) -> c_int {
        self.1.before
    }
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        // It fails only if somebody else has popped what we pushed; then nothing of ours is left there.
        let _ = self.0.pop();
    }
}

/// A queue of the device. It does not wait for the process's default stream.
#[derive(Debug)]
pub struct Stream {
    context: Arc<Context>,
    raw: Handle,
}

impl Stream {
    /// A new one.
    ///
    /// # Errors
    /// What the driver answers.
    pub fn new(context: &Arc<Context>) -> Result<Self, CudaError> {
        let raw = context.enter()?.0.stream_create()?;
        Ok(Self { context: Arc::clone(context), raw })
    }

    /// Waits until everything queued so far is done. Blocks: not for the transfer thread, which asks an [`Event`].
    ///
    /// # Errors
    /// What the driver answers, errors of earlier launches among it.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        let entered = self.context.enter()?;
        // SAFETY: the stream lives as long as `self`.
        unsafe { entered.0.stream_synchronize(self.raw) }
    }

    /// An event that happens when everything queued so far is done.
    ///
    /// # Errors
    /// What the driver answers.
    pub fn record(&self) -> Result<Event, CudaError> {
        let entered = self.context.enter()?;
        let event = Event { context: Arc::clone(&self.context), raw: entered.0.event_create()? };
        // SAFETY: both live, and are of this context.
        unsafe { entered.0.event_record(event.raw, self.raw) }?;
        Ok(event)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if let Ok(entered) = self.context.enter() {
            // SAFETY: ours, and used by nobody afterwards. What is still queued is run first.
            let _ = unsafe { entered.0.stream_destroy(self.raw) };
        }
    }
}

/// A point in a [`Stream`].
#[derive(Debug)]
pub struct Event {
    pub(crate) context: Arc<Context>,
    pub(crate) raw: Handle,
}

impl Event {
    /// Whether everything that was queued before it is done. Does not block.
    ///
    /// # Errors
    /// What the driver answers: it will never happen then.
    pub fn is_done(&self) -> Result<bool, CudaError> {
        let entered = self.context.enter()?;
        // SAFETY: the event lives as long as `self`.
        unsafe { entered.0.event_query(self.raw) }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        if let Ok(entered) = self.context.enter() {
            // SAFETY: ours, and used by nobody afterwards.
            let _ = unsafe { entered.0.event_destroy(self.raw) };
        }
    }
}

/// How many blocks a launch takes.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct LaunchShape {
    /// Blocks of [`THREADS`] threads.
    pub blocks: u32,
}

impl LaunchShape {
    /// A warp a tile, but at most so many blocks: then each warp takes several tiles. Nothing if there is nothing to
    /// copy.
    ///
    /// The device is shared with a model that computes, and a few blocks are enough to keep a network card busy, so the
    /// caller says how many it may have.
    #[must_use]
    pub fn new(tiles: u64, max_blocks: u32) -> Option<Self> {
        if tiles == 0 {
            return None;
        }
        let most = max_blocks.clamp(1, MAX_BLOCKS);
        Some(Self { blocks: u32::try_from(tiles.div_ceil(WARPS)).unwrap_or(most).min(most) })
    }
}

/// A table in memory that the device can read: its own, or pinned memory of the host.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct CopyTable {
    /// Device address of the stripes.
    pub stripes: u64,
    /// Device address of the tiles before each stripe, and of all: one word more than there are stripes.
    pub first: u64,
    /// Stripes.
    pub count: u64,
    /// Tiles of all stripes.
    pub tiles: u64,
}

/// The kernel, loaded for one device.
#[derive(Debug)]
pub struct PackKernels {
    context: Arc<Context>,
    module: Handle,
    function: Handle,
}

impl PackKernels {
    /// Has the driver compile the PTX for the device.
    ///
    /// # Errors
    /// [`CudaError::OldDriver`] when it does not know such PTX, else what it answers.
    pub fn load(context: &Arc<Context>) -> Result<Self, CudaError> {
        let knows = crate::version(context.calls.api)?;
        if knows < PTX_CUDA {
            return Err(CudaError::OldDriver { knows, needs: PTX_CUDA });
        }
        let ptx = CStr::from_bytes_with_nul(PTX.as_bytes())
            .map_err(|_| CudaError::BadAnswer { call: "the PTX in this library", value: 0 })?;
        let entered = context.enter()?;
        let calls = entered.0;
        let module = calls.module_load(ptx)?;
        // SAFETY: loaded just now.
        match unsafe { calls.module_function(module, KERNEL) } {
            Ok(function) => Ok(Self { context: Arc::clone(context), module, function }),
            Err(error) => {
                // SAFETY: ours, and nothing of it was given out.
                let _ = unsafe { calls.module_unload(module) };
                Err(error)
            }
        }
    }

    /// Queues the copies of a table, on at most `max_blocks` blocks. Returns at once; a launch cannot be taken back.
    ///
    /// # Errors
    /// What the driver answers. Nothing is queued then.
    ///
    /// # Safety
    /// Until the stream has passed it: `table` tells of a table as `kvxfer_proto::plan::pack::Table::encode` writes it,
    /// which stays as it is; every address in it can be read or written by the device for the whole row; nobody else
    /// writes what is read or touches what is written; no destination overlaps another or a source; and `self` and
    /// `stream` live. `self` and `stream` are of the same context.
    pub unsafe fn launch(
        &self,
        stream: &Stream,
        table: &CopyTable,
        max_blocks: u32,
    ) -> Result<(), CudaError> {
        let CopyTable { stripes, first, count, tiles } = *table;
        let Some(LaunchShape { blocks }) = LaunchShape::new(tiles, max_blocks) else { return Ok(()) };
        let entered = self.context.enter()?;
        // SAFETY: `kvxfer_copy_stripes` takes these three words; what it does with them is the caller's promise.
        unsafe { entered.0.launch(self.function, (blocks, THREADS), stream.raw, [stripes, first, count]) }
    }
}

impl Drop for PackKernels {
    fn drop(&mut self) {
        if let Ok(entered) = self.context.enter() {
            // SAFETY: ours; whoever launched has promised that it is over.
            let _ = unsafe { entered.0.module_unload(self.module) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_warp_a_tile_up_to_the_limit() {
        let blocks = |tiles, most| LaunchShape::new(tiles, most).map(|shape| shape.blocks);
        assert_eq!(blocks(0, 8), None);
        assert_eq!((blocks(1, 8), blocks(8, 8), blocks(9, 8), blocks(64, 8), blocks(65, 8)), {
            (Some(1), Some(1), Some(2), Some(8), Some(8))
        });
        assert_eq!((blocks(u64::MAX, 16), blocks(100, 0)), (Some(16), Some(1)));
        assert_eq!(blocks(u64::MAX, u32::MAX), Some(i32::MAX as u32), "no grid has more");
    }

    #[test]
    fn the_ptx_is_of_the_release_that_it_is_said_to_need() {
        assert!(PTX.contains(&format!("Cuda compilation tools, release {}.{},", PTX_CUDA.0, PTX_CUDA.1)));
        assert!(PTX.contains(".target sm_80\n") && PTX.contains(&format!(".maxntid {THREADS}, 1, 1")));
        assert_eq!(PTX.matches(".param .u64 kvxfer_copy_stripes_param_").count(), 3);
        assert!(PTX.contains(&format!(".visible .entry {}(", KERNEL.to_str().unwrap())));
        assert_eq!(PTX.find('\0'), Some(PTX.len() - 1));
    }
}
