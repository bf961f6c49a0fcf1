//! Memory that is registered with fabrics.

use kvxfer_proto::msg::MemKind;
use std::sync::Arc;

/// Memory that kvxfer allocated itself and that knows how fabrics can share it. Implemented by the pools of
/// `shm` (a sealed memfd) and `ucx` (memory that UCX allocated).
pub trait Backing: Send + Sync + std::fmt::Debug + 'static {
    /// First address.
    fn addr(&self) -> u64;
    /// Bytes.
    fn len(&self) -> u64;
    /// Whether it has no bytes.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }
    /// For downcasts by the fabric that made it.
    fn as_any(&self) -> &dyn std::any::Any;
}

/// One region as its owner hands it in: contiguous, and valid for as long as the fabric lives (the owner, for
/// instance the Python agent, keeps it alive).
#[derive(Clone, Debug)]
pub struct RegionSpan {
    /// First address.
    pub addr: u64,
    /// Bytes.
    pub len: u64,
    /// Host or device.
    pub kind: MemKind,
    /// The allocation of ours that the region lies in, if it does.
    pub backing: Option<Arc<dyn Backing>>,
}

/// What has to happen before a push's pages may be read: on GPUs an event that the engine recorded after the kernel that
/// fills them. The transfer thread asks between slices, and posts nothing of the push before the answer is yes.
pub trait ReadySignal: Send + Sync + std::fmt::Debug {
    /// Whether it has happened. Must not block.
    ///
    /// # Errors
    /// It never will; the push's room fails.
    fn is_ready(&self) -> Result<bool, crate::FabricError>;
}
