//! The driver's functions, looked up by name in a library that is opened at run time.

use crate::CudaError;
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use std::error::Error;
use std::ffi::{OsStr, c_char, c_int, c_uint, c_void};
use std::path::PathBuf;

/// `CUresult`.
pub(crate) type Code = c_int;
/// `CUdevice`.
pub(crate) type RawDevice = c_int;

type Init = unsafe extern "C" fn(flags: c_uint) -> Code;
type ErrorName = unsafe extern "C" fn(code: Code, name: *mut *const c_char) -> Code;
type DriverVersion = unsafe extern "C" fn(version: *mut c_int) -> Code;
type DeviceCount = unsafe extern "C" fn(count: *mut c_int) -> Code;
type DeviceGet = unsafe extern "C" fn(device: *mut RawDevice, ordinal: c_int) -> Code;
type DeviceName = unsafe extern "C" fn(name: *mut c_char, len: c_int, device: RawDevice) -> Code;
type DevicePciAddress = unsafe extern "C" fn(text: *mut c_char, len: c_int, device: RawDevice) -> Code;
type DeviceTotalMem = unsafe extern "C" fn(bytes: *mut usize, device: RawDevice) -> Code;
type DeviceAttribute = unsafe extern "C" fn(value: *mut c_int, attribute: c_int, device: RawDevice) -> Code;

/// What the driver knows a context, module, function, stream or event by.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[repr(transparent)]
pub(crate) struct Handle(pub(crate) *mut c_void);

impl Handle {
    pub(crate) const NULL: Self = Self(std::ptr::null_mut());
}

// SAFETY: only the driver looks behind it, and the driver may be called from any thread.
unsafe impl Send for Handle {}
// SAFETY: as above.
unsafe impl Sync for Handle {}

type Retain = unsafe extern "C" fn(context: *mut Handle, device: RawDevice) -> Code;
type Release = unsafe extern "C" fn(device: RawDevice) -> Code;
/// Destroys, pushes, waits for: whatever has one handle.
type OnHandle = unsafe extern "C" fn(handle: Handle) -> Code;
type Pop = unsafe extern "C" fn(context: *mut Handle) -> Code;
/// Puts a thread's mode in the place of the one that is there, and that one into its place.
type CaptureMode = unsafe extern "C" fn(mode: *mut c_int) -> Code;
type ModuleLoad = unsafe extern "C" fn(module: *mut Handle, image: *const c_void) -> Code;
type ModuleFunction =
    unsafe extern "C" fn(function: *mut Handle, module: Handle, name: *const c_char) -> Code;
/// Streams and events.
type Create = unsafe extern "C" fn(handle: *mut Handle, flags: c_uint) -> Code;
type EventRecord = unsafe extern "C" fn(event: Handle, stream: Handle) -> Code;
type LaunchKernel = unsafe extern "C" fn(
    function: Handle,
    grid_x: c_uint,
    grid_y: c_uint,
    grid_z: c_uint,
    block_x: c_uint,
    block_y: c_uint,
    block_z: c_uint,
    shared_bytes: c_uint,
    stream: Handle,
    parameters: *mut *mut c_void,
    extra: *mut *mut c_void,
) -> Code;

type PointerAttributes =
    unsafe extern "C" fn(count: c_uint, which: *const c_int, values: *mut *mut c_void, pointer: u64) -> Code;
type ContextDevice = unsafe extern "C" fn(device: *mut RawDevice) -> Code;
type IsCapturing = unsafe extern "C" fn(stream: Handle, status: *mut c_int) -> Code;
type FlushWrites = unsafe extern "C" fn(target: c_int, scope: c_int) -> Code;

/// What launching takes. Looked up only for that, so that a driver that lacks one of them can still be asked for its
/// devices.
#[derive(Clone, Copy)]
pub(crate) struct LaunchApi {
    pub(crate) retain: Retain,
    pub(crate) release: Release,
    pub(crate) push: OnHandle,
    pub(crate) pop: Pop,
    pub(crate) capture_mode: CaptureMode,
    pub(crate) module_load: ModuleLoad,
    pub(crate) module_unload: OnHandle,
    pub(crate) module_function: ModuleFunction,
    pub(crate) stream_create: Create,
    pub(crate) stream_destroy: OnHandle,
    pub(crate) stream_synchronize: OnHandle,
    pub(crate) event_create: Create,
    pub(crate) event_destroy: OnHandle,
    pub(crate) event_record: EventRecord,
    pub(crate) event_query: OnHandle,
    pub(crate) launch: LaunchKernel,
}

/// Function pointers; the library stays open for as long as they live.
pub(crate) struct Api {
    pub(crate) init: Init,
    pub(crate) error_name: ErrorName,
    pub(crate) driver_version: DriverVersion,
    pub(crate) device_count: DeviceCount,
    pub(crate) device_get: DeviceGet,
    pub(crate) device_name: DeviceName,
    pub(crate) device_total_mem: DeviceTotalMem,
    pub(crate) device_attribute: DeviceAttribute,
    library: Library,
}

/// Finds a function of a library, which was opened by the given name.
macro_rules! find {
    ($library:expr, $opened:expr, $name:literal as $kind:ty) => {
        // SAFETY: cuda.h declares this symbol with exactly this type, and has since CUDA 3.2, or since the release that
        // gave it its suffix.
        *unsafe { $library.get::<$kind>(concat!($name, "\0").as_bytes()) }
            .map_err(|_| CudaError::MissingSymbol { library: PathBuf::from($opened), symbol: $name })?
    };
}

impl Api {
    /// Opens a library by path, or by a name that the dynamic linker searches for.
    pub(crate) fn open(name: &OsStr) -> Result<Self, CudaError> {
        // SAFETY: runs the constructors of the driver's library, which expect nothing of the process. The name is the
        // driver's own or comes from the user's environment.
        let library = unsafe { Library::open(Some(name), RTLD_NOW | RTLD_LOCAL) }
            .map_err(|e| CudaError::NoLibrary { tried: PathBuf::from(name), why: words(&e) })?;
        Ok(Self {
            init: find!(library, name, "cuInit" as Init),
            error_name: find!(library, name, "cuGetErrorName" as ErrorName),
            driver_version: find!(library, name, "cuDriverGetVersion" as DriverVersion),
            device_count: find!(library, name, "cuDeviceGetCount" as DeviceCount),
            device_get: find!(library, name, "cuDeviceGet" as DeviceGet),
            device_name: find!(library, name, "cuDeviceGetName" as DeviceName),
            device_total_mem: find!(library, name, "cuDeviceTotalMem_v2" as DeviceTotalMem),
            device_attribute: find!(library, name, "cuDeviceGetAttribute" as DeviceAttribute),
            library,
        })
    }

    /// What launching takes; `name` is what was opened.
    pub(crate) fn launch_api(&self, name: &OsStr) -> Result<LaunchApi, CudaError> {
        let library = &self.library;
        Ok(LaunchApi {
            retain: find!(library, name, "cuDevicePrimaryCtxRetain" as Retain),
            release: find!(library, name, "cuDevicePrimaryCtxRelease_v2" as Release),
            push: find!(library, name, "cuCtxPushCurrent_v2" as OnHandle),
            pop: find!(library, name, "cuCtxPopCurrent_v2" as Pop),
            capture_mode: find!(library, name, "cuThreadExchangeStreamCaptureMode" as CaptureMode),
            module_load: find!(library, name, "cuModuleLoadData" as ModuleLoad),
            module_unload: find!(library, name, "cuModuleUnload" as OnHandle),
            module_function: find!(library, name, "cuModuleGetFunction" as ModuleFunction),
            stream_create: find!(library, name, "cuStreamCreate" as Create),
            stream_destroy: find!(library, name, "cuStreamDestroy_v2" as OnHandle),
            stream_synchronize: find!(library, name, "cuStreamSynchronize" as OnHandle),
            event_create: find!(library, name, "cuEventCreate" as Create),
            event_destroy: find!(library, name, "cuEventDestroy_v2" as OnHandle),
            event_record: find!(library, name, "cuEventRecord" as EventRecord),
            event_query: find!(library, name, "cuEventQuery" as OnHandle),
            launch: find!(library, name, "cuLaunchKernel" as LaunchKernel),
        })
    }
}

impl Api {
    /// Asks what memory a pointer names; `name` is what was opened.
    pub(crate) fn pointer_attributes(&self, name: &OsStr) -> Result<PointerAttributes, CudaError> {
        let library = &self.library;
        Ok(find!(library, name, "cuPointerGetAttributes" as PointerAttributes))
    }

    /// Asks for the device of the current context.
    pub(crate) fn context_device(&self, name: &OsStr) -> Result<ContextDevice, CudaError> {
        let library = &self.library;
        Ok(find!(library, name, "cuCtxGetDevice" as ContextDevice))
    }

    /// Asks whether a stream is being captured into a graph.
    pub(crate) fn is_capturing(&self, name: &OsStr) -> Result<IsCapturing, CudaError> {
        let library = &self.library;
        Ok(find!(library, name, "cuStreamIsCapturing" as IsCapturing))
    }

    /// Asks where a device is on the PCI bus.
    pub(crate) fn pci_address_call(&self, name: &OsStr) -> Result<DevicePciAddress, CudaError> {
        let library = &self.library;
        Ok(find!(library, name, "cuDeviceGetPCIBusId" as DevicePciAddress))
    }

    /// Waits until what a network card wrote into the device's memory is visible to it.
    pub(crate) fn flush_writes(&self, name: &OsStr) -> Result<FlushWrites, CudaError> {
        let library = &self.library;
        Ok(find!(library, name, "cuFlushGPUDirectRDMAWrites" as FlushWrites))
    }
}

/// The linker's own words, which libloading keeps as the source of its error.
fn words(error: &libloading::Error) -> String {
    error.source().map_or_else(|| error.to_string(), ToString::to_string)
}
