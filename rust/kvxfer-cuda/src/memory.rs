//! What memory an address names, by the driver's own word.

use crate::result::PointerValue;
use crate::{CudaError, Driver};
use std::ffi::c_int;

/// `CU_POINTER_ATTRIBUTE_...`, in the order in which they are asked for.
const ATTRIBUTES: [c_int; 9] = [
    2,  // MEMORY_TYPE
    8,  // IS_MANAGED
    9,  // DEVICE_ORDINAL
    7,  // BUFFER_ID
    11, // RANGE_START_ADDR
    12, // RANGE_SIZE
    10, // IS_LEGACY_CUDA_IPC_CAPABLE
    14, // ALLOWED_HANDLE_TYPES
    15, // IS_GPU_DIRECT_RDMA_CAPABLE
];
/// `CU_MEMORYTYPE_HOST`.
const HOST: u32 = 1;
/// `CU_MEMORYTYPE_DEVICE`.
const DEVICE: u32 = 2;
/// `CU_MEM_HANDLE_TYPE_FABRIC`.
const FABRIC_HANDLE: u64 = 8;

/// Where memory is.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum MemoryKind {
    /// CUDA does not know it: plain memory of the host, or none at all.
    Unknown,
    /// The host's, pinned for CUDA.
    Pinned,
    /// The device's.
    Device,
    /// Managed: CUDA moves it between host and device.
    Managed,
}

/// What the driver says of an address.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Memory {
    /// Where it is.
    pub kind: MemoryKind,
    /// Number of the device on which it was allocated, in this process; none for memory that CUDA does not know.
    pub device: Option<u32>,
    /// The driver's number of the allocation, unique in the process.
    pub buffer_id: u64,
    /// First address of the allocation, or of the reserved range that the address lies in.
    pub range_start: u64,
    /// Bytes of it.
    pub range_bytes: u64,
    /// Whether another process can open it by the handles of `cudaIpcGetMemHandle`: so for what `cudaMalloc` gives, and not
    /// for virtual memory (PyTorch's expandable segments) and memory pools (`cudaMallocAsync`).
    pub ipc: bool,
    /// Whether it was made to be exported by fabric handles.
    pub fabric_handles: bool,
    /// Whether it can be used with GPUDirect RDMA.
    pub rdma: bool,
}

impl Memory {
    /// Whether another process can be let at it at all.
    #[must_use]
    pub fn is_exportable(&self) -> bool {
        self.ipc || self.fabric_handles
    }

    /// Whether `len` bytes from `address` on lie in its allocation.
    #[must_use]
    pub fn holds(&self, address: u64, len: u64) -> bool {
        address
            .checked_sub(self.range_start)
            .and_then(|off| off.checked_add(len))
            .is_some_and(|end| end <= self.range_bytes)
    }
}

impl Driver {
    /// What memory this address names. Memory that CUDA does not know is no error.
    ///
    /// # Errors
    /// What the driver answers; [`CudaError::BadAnswer`] for a kind of memory that there was not when this was written.
    pub fn memory_at(&self, address: u64) -> Result<Memory, CudaError> {
        let [kind, managed, ordinal, buffer, start, bytes, ipc, handles, rdma] =
            self.api.pointer_values(&self.library, ATTRIBUTES, address)?;
        let is_set = |value: PointerValue| low(value) != 0;
        let kind = match low(kind) {
            0 => MemoryKind::Unknown,
            HOST => MemoryKind::Pinned,
            DEVICE if is_set(managed) => MemoryKind::Managed,
            DEVICE => MemoryKind::Device,
            other => {
                return Err(CudaError::BadAnswer { call: "cuPointerGetAttributes", value: i64::from(other) });
            }
        };
        let device = match kind {
            MemoryKind::Unknown => None,
            _ => Some(crate::unsigned("cuPointerGetAttributes", low(ordinal).cast_signed())?),
        };
        Ok(Memory {
            kind,
            device,
            buffer_id: buffer[0],
            range_start: start[0],
            range_bytes: bytes[0],
            ipc: is_set(ipc),
            fabric_handles: handles[0] & FABRIC_HANDLE != 0,
            rdma: is_set(rdma),
        })
    }
}

/// The first four bytes, in which the driver leaves values of one to four bytes.
fn low(value: PointerValue) -> u32 {
    let [a, b, c, d, ..] = value[0].to_ne_bytes();
    u32::from_ne_bytes([a, b, c, d])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_range_holds_what_lies_in_it_and_no_more() {
        let memory = Memory {
            kind: MemoryKind::Device,
            device: Some(0),
            buffer_id: 1,
            range_start: 0xffff_8000_0000_0000,
            range_bytes: 4096,
            ipc: true,
            fabric_handles: false,
            rdma: true,
        };
        let at = memory.range_start;
        assert!(memory.holds(at, 4096) && memory.holds(at + 4096, 0) && memory.holds(at + 4095, 1));
        assert!(!memory.holds(at - 1, 1) && !memory.holds(at, 4097) && !memory.holds(at + 1, u64::MAX));
    }
}
