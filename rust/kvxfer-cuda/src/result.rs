//! The driver's calls with `Result` instead of codes and out-pointers.

use crate::CudaError;
use crate::sys::{Api, Code, Handle, LaunchApi, RawDevice};
use std::ffi::{CStr, OsStr, c_char, c_int, c_uint, c_void};

/// `CUDA_SUCCESS`.
const SUCCESS: Code = 0;
/// `CUDA_ERROR_NOT_READY`.
const NOT_READY: Code = 600;
/// `CU_STREAM_NON_BLOCKING`: it does not wait for the process's default stream, nor that for it.
const NON_BLOCKING: c_uint = 1;
/// `CU_EVENT_DISABLE_TIMING`.
const DISABLE_TIMING: c_uint = 2;
/// `CU_STREAM_CAPTURE_MODE_RELAXED`: what this thread calls is let through, and spoils nothing, while an engine captures a graph.
pub(crate) const RELAXED: c_int = 2;
/// Longest device name that is asked for; the driver cuts longer ones.
const NAME_BYTES: usize = 256;

/// `CUDA_ERROR_INVALID_CONTEXT`: also the answer to who asks for a context where none is current.
const INVALID_CONTEXT: Code = 201;
/// `CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TARGET_CURRENT_CTX`.
const FLUSH_CURRENT_CONTEXT: c_int = 0;
/// `CU_FLUSH_GPU_DIRECT_RDMA_WRITES_TO_OWNER`.
const FLUSH_TO_OWNER: c_int = 100;

/// `CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_SUPPORTED`.
pub(crate) const RDMA_SUPPORTED: c_int = 116;
/// `CU_DEVICE_ATTRIBUTE_DMA_BUF_SUPPORTED`.
pub(crate) const DMA_BUF_SUPPORTED: c_int = 124;
/// `CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_FLUSH_WRITES_OPTIONS`.
pub(crate) const RDMA_FLUSH_OPTIONS: c_int = 117;
/// `CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WRITES_ORDERING`.
pub(crate) const RDMA_WRITES_ORDERING: c_int = 118;

/// `CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR`.
pub(crate) const CAPABILITY_MAJOR: c_int = 75;
/// `CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR`.
pub(crate) const CAPABILITY_MINOR: c_int = 76;

impl Api {
    fn check(&self, call: &'static str, code: Code) -> Result<(), CudaError> {
        if code == SUCCESS {
            return Ok(());
        }
        Err(CudaError::Driver { call, code, name: self.name_of(code) })
    }

    /// `CUDA_ERROR_...`, or words where the driver does not know the code.
    fn name_of(&self, code: Code) -> String {
        let mut name: *const c_char = std::ptr::null();
        // SAFETY: takes any code and writes a pointer to a static string, or null for codes it does not know; it may
        // be called before cuInit.
        let answer = unsafe { (self.error_name)(code, &raw mut name) };
        if answer != SUCCESS || name.is_null() {
            return "an error that this driver has no name for".to_owned();
        }
        // SAFETY: the driver's static, NUL-terminated string.
        unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned()
    }

    pub(crate) fn init(&self) -> Result<(), CudaError> {
        // SAFETY: the flags must be 0; calling it again is allowed.
        self.check("cuInit", unsafe { (self.init)(0) })
    }

    pub(crate) fn driver_version(&self) -> Result<c_int, CudaError> {
        let mut version = 0;
        // SAFETY: a valid place to write to; may be called before cuInit.
        self.check("cuDriverGetVersion", unsafe { (self.driver_version)(&raw mut version) })?;
        Ok(version)
    }

    pub(crate) fn device_count(&self) -> Result<c_int, CudaError> {
        let mut count = 0;
        // SAFETY: a valid place to write to; the driver answers with an error if cuInit has not been called.
        self.check("cuDeviceGetCount", unsafe { (self.device_count)(&raw mut count) })?;
        Ok(count)
    }

    pub(crate) fn device(&self, ordinal: c_int) -> Result<RawDevice, CudaError> {
        let mut device = 0;
        // SAFETY: a valid place to write to; a wrong ordinal is an error code.
        self.check("cuDeviceGet", unsafe { (self.device_get)(&raw mut device, ordinal) })?;
        Ok(device)
    }

    pub(crate) fn device_name(&self, device: RawDevice) -> Result<String, CudaError> {
        let mut buffer = [0u8; NAME_BYTES];
        let len = c_int::try_from(NAME_BYTES).unwrap_or(c_int::MAX);
        // SAFETY: the driver writes at most `len` bytes, NUL included, into the buffer, which has that many.
        let code = unsafe { (self.device_name)(buffer.as_mut_ptr().cast(), len, device) };
        self.check("cuDeviceGetName", code)?;
        let name = buffer.split(|b| *b == 0).next().unwrap_or_default();
        Ok(String::from_utf8_lossy(name).into_owned())
    }

    /// `0000:1b:00.0`.
    pub(crate) fn pci_address(&self, name: &OsStr, device: RawDevice) -> Result<String, CudaError> {
        let ask = self.pci_address_call(name)?;
        let mut buffer = [0u8; NAME_BYTES];
        let len = c_int::try_from(NAME_BYTES).unwrap_or(c_int::MAX);
        // SAFETY: the driver writes at most `len` bytes, NUL included, into the buffer, which has that many.
        self.check("cuDeviceGetPCIBusId", unsafe { ask(buffer.as_mut_ptr().cast(), len, device) })?;
        let text = buffer.split(|b| *b == 0).next().unwrap_or_default();
        Ok(String::from_utf8_lossy(text).to_ascii_lowercase())
    }

    pub(crate) fn total_bytes(&self, device: RawDevice) -> Result<usize, CudaError> {
        let mut bytes = 0;
        // SAFETY: a valid place to write to; the `_v2` symbol writes a size_t.
        self.check("cuDeviceTotalMem", unsafe { (self.device_total_mem)(&raw mut bytes, device) })?;
        Ok(bytes)
    }

    pub(crate) fn attribute(&self, device: RawDevice, attribute: c_int) -> Result<c_int, CudaError> {
        let mut value = 0;
        // SAFETY: a valid place to write to; an unknown attribute is an error code.
        let code = unsafe { (self.device_attribute)(&raw mut value, attribute, device) };
        self.check("cuDeviceGetAttribute", code)?;
        Ok(value)
    }
}

/// The widest value that an attribute of a pointer has: 16 bytes. The driver writes as many as cuda.h says, 1 to 16.
pub(crate) type PointerValue = [u64; 2];

impl Api {
    /// Attributes of what a pointer names, each in the first bytes of its value, the others zero. A pointer that CUDA does not
    /// know is no error.
    pub(crate) fn pointer_values<const N: usize>(
        &self,
        name: &OsStr,
        which: [c_int; N],
        pointer: u64,
    ) -> Result<[PointerValue; N], CudaError> {
        let ask = self.pointer_attributes(name)?;
        let count = c_uint::try_from(N).unwrap_or(c_uint::MAX);
        let mut values = [PointerValue::default(); N];
        let mut places = values.each_mut().map(|value| std::ptr::from_mut(value).cast::<c_void>());
        // SAFETY: `count` attributes, and as many places, each of 16 bytes and so aligned, which no attribute passes. The
        // pointer is only a number to the driver: it may name anything.
        let code = unsafe { ask(count, which.as_ptr(), places.as_mut_ptr(), pointer) };
        self.check("cuPointerGetAttributes", code)?;
        Ok(values)
    }

    /// The device of the calling thread's current context, if it has one.
    pub(crate) fn current_device(&self, name: &OsStr) -> Result<Option<RawDevice>, CudaError> {
        let ask = self.context_device(name)?;
        let mut device = 0;
        // SAFETY: a valid place to write to.
        match unsafe { ask(&raw mut device) } {
            INVALID_CONTEXT => Ok(None),
            code => self.check("cuCtxGetDevice", code).map(|()| Some(device)),
        }
    }

    /// # Safety
    /// The stream exists, or is one of the default ones (0, 1, 2), and its context is current.
    pub(crate) unsafe fn stream_is_capturing(&self, name: &OsStr, stream: Handle) -> Result<bool, CudaError> {
        let ask = self.is_capturing(name)?;
        let mut status = 0;
        // SAFETY: a valid place to write to; the stream is the caller's.
        self.check("cuStreamIsCapturing", unsafe { ask(stream, &raw mut status) })?;
        Ok(status != 0)
    }

    /// Waits until the device of the current context sees what was written to its memory over PCIe.
    pub(crate) fn flush_rdma_writes(&self, name: &OsStr) -> Result<(), CudaError> {
        let flush = self.flush_writes(name)?;
        // SAFETY: two constants of cuda.h; without a current context the driver answers with an error.
        self.check("cuFlushGPUDirectRDMAWrites", unsafe { flush(FLUSH_CURRENT_CONTEXT, FLUSH_TO_OWNER) })
    }
}

/// The calls that launching takes. All but those on the primary context expect that context to be current.
#[derive(Clone, Copy)]
pub(crate) struct Calls {
    pub(crate) api: &'static Api,
    pub(crate) launch: LaunchApi,
}

impl Calls {
    /// The device's primary context, the one that the CUDA runtime uses in this process too. To be released.
    pub(crate) fn retain(&self, device: RawDevice) -> Result<Handle, CudaError> {
        let mut context = Handle::NULL;
        // SAFETY: a valid place to write to; a wrong device is an error code.
        let code = unsafe { (self.launch.retain)(&raw mut context, device) };
        self.api.check("cuDevicePrimaryCtxRetain", code)?;
        Ok(context)
    }

    /// # Safety
    /// One release for each retain, and nothing of the context is used afterwards.
    pub(crate) unsafe fn release(&self, device: RawDevice) -> Result<(), CudaError> {
        // SAFETY: the caller's.
        self.api.check("cuDevicePrimaryCtxRelease", unsafe { (self.launch.release)(device) })
    }

    /// Makes the context this thread's current one, on top of the one that was.
    ///
    /// # Safety
    /// The context is retained.
    pub(crate) unsafe fn push(&self, context: Handle) -> Result<(), CudaError> {
        // SAFETY: the caller's.
        self.api.check("cuCtxPushCurrent", unsafe { (self.launch.push)(context) })
    }

    pub(crate) fn pop(&self) -> Result<(), CudaError> {
        let mut popped = Handle::NULL;
        // SAFETY: a valid place to write to; an empty stack is an error code.
        self.api.check("cuCtxPopCurrent", unsafe { (self.launch.pop)(&raw mut popped) })
    }

    /// Gives the calling thread another mode of stream capture. Returns the one that it had.
    pub(crate) fn exchange_capture_mode(&self, mode: c_int) -> Result<c_int, CudaError> {
        let mut mode = mode;
        // SAFETY: a valid place to read from and to write to; what is no mode is an error code.
        let code = unsafe { (self.launch.capture_mode)(&raw mut mode) };
        self.api.check("cuThreadExchangeStreamCaptureMode", code)?;
        Ok(mode)
    }

    /// Loads PTX.
    pub(crate) fn module_load(&self, ptx: &CStr) -> Result<Handle, CudaError> {
        let mut module = Handle::NULL;
        // SAFETY: a valid place to write to; PTX is read up to its NUL.
        let code = unsafe { (self.launch.module_load)(&raw mut module, ptx.as_ptr().cast()) };
        self.api.check("cuModuleLoadData", code)?;
        Ok(module)
    }

    /// # Safety
    /// The module is loaded, and neither it nor its functions are used afterwards.
    pub(crate) unsafe fn module_unload(&self, module: Handle) -> Result<(), CudaError> {
        // SAFETY: the caller's.
        self.api.check("cuModuleUnload", unsafe { (self.launch.module_unload)(module) })
    }

    /// # Safety
    /// The module is loaded.
    pub(crate) unsafe fn module_function(&self, module: Handle, name: &CStr) -> Result<Handle, CudaError> {
        let mut function = Handle::NULL;
        // SAFETY: a valid place to write to and a NUL-terminated name; the module is the caller's.
        let code = unsafe { (self.launch.module_function)(&raw mut function, module, name.as_ptr()) };
        self.api.check("cuModuleGetFunction", code)?;
        Ok(function)
    }

    pub(crate) fn stream_create(&self) -> Result<Handle, CudaError> {
        let mut stream = Handle::NULL;
        // SAFETY: a valid place to write to.
        let code = unsafe { (self.launch.stream_create)(&raw mut stream, NON_BLOCKING) };
        self.api.check("cuStreamCreate", code)?;
        Ok(stream)
    }

    /// The driver frees it once what it has been given is done.
    ///
    /// # Safety
    /// The stream exists, and is not used afterwards.
    pub(crate) unsafe fn stream_destroy(&self, stream: Handle) -> Result<(), CudaError> {
        // SAFETY: the caller's.
        self.api.check("cuStreamDestroy", unsafe { (self.launch.stream_destroy)(stream) })
    }

    /// # Safety
    /// The stream exists.
    pub(crate) unsafe fn stream_synchronize(&self, stream: Handle) -> Result<(), CudaError> {
        // SAFETY: the caller's.
        self.api.check("cuStreamSynchronize", unsafe { (self.launch.stream_synchronize)(stream) })
    }

    pub(crate) fn event_create(&self) -> Result<Handle, CudaError> {
        let mut event = Handle::NULL;
        // SAFETY: a valid place to write to.
        let code = unsafe { (self.launch.event_create)(&raw mut event, DISABLE_TIMING) };
        self.api.check("cuEventCreate", code)?;
        Ok(event)
    }

    /// # Safety
    /// The event exists, and is not used afterwards.
    pub(crate) unsafe fn event_destroy(&self, event: Handle) -> Result<(), CudaError> {
        // SAFETY: the caller's.
        self.api.check("cuEventDestroy", unsafe { (self.launch.event_destroy)(event) })
    }

    /// # Safety
    /// Event and stream exist, and are of one context.
    pub(crate) unsafe fn event_record(&self, event: Handle, stream: Handle) -> Result<(), CudaError> {
        // SAFETY: the caller's.
        self.api.check("cuEventRecord", unsafe { (self.launch.event_record)(event, stream) })
    }

    /// Whether what was recorded is done. Does not block.
    ///
    /// # Safety
    /// The event exists.
    pub(crate) unsafe fn event_query(&self, event: Handle) -> Result<bool, CudaError> {
        // SAFETY: the caller's.
        match unsafe { (self.launch.event_query)(event) } {
            NOT_READY => Ok(false),
            code => self.api.check("cuEventQuery", code).map(|()| true),
        }
    }

    /// A grid and blocks of one dimension.
    ///
    /// # Safety
    /// Function and stream exist and are of one context; the function takes exactly these words, and may be run with
    /// them.
    pub(crate) unsafe fn launch<const N: usize>(
        &self,
        function: Handle,
        (blocks, threads): (u32, u32),
        stream: Handle,
        mut words: [u64; N],
    ) -> Result<(), CudaError> {
        let mut parameters = words.each_mut().map(|word| std::ptr::from_mut(word).cast::<c_void>());
        // SAFETY: the driver reads each parameter before it returns, by the function's own sizes: 8 bytes each, by the
        // caller's word, which also answers for what the function does.
        let code = unsafe {
            (self.launch.launch)(
                function,
                blocks,
                1,
                1,
                threads,
                1,
                1,
                0,
                stream,
                parameters.as_mut_ptr(),
                std::ptr::null_mut(),
            )
        };
        self.api.check("cuLaunchKernel", code)
    }
}
