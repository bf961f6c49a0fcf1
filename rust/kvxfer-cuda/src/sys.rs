//! The driver's functions, looked up by name in a library that is opened at run time.

use crate::CudaError;
use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use std::error::Error;
use std::ffi::{OsStr, c_char, c_int, c_uint};
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
type DeviceTotalMem = unsafe extern "C" fn(bytes: *mut usize, device: RawDevice) -> Code;
type DeviceAttribute = unsafe extern "C" fn(value: *mut c_int, attribute: c_int, device: RawDevice) -> Code;

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
    _library: Library,
}

impl Api {
    /// Opens a library by path, or by a name that the dynamic linker searches for.
    pub(crate) fn open(name: &OsStr) -> Result<Self, CudaError> {
        // SAFETY: runs the constructors of the driver's library, which expect nothing of the process. The name is the
        // driver's own or comes from the user's environment.
        let library = unsafe { Library::open(Some(name), RTLD_NOW | RTLD_LOCAL) }
            .map_err(|e| CudaError::NoLibrary { tried: PathBuf::from(name), why: words(&e) })?;
        let missing =
            |symbol: &'static str| CudaError::MissingSymbol { library: PathBuf::from(name), symbol };
        macro_rules! find {
            ($name:literal as $kind:ty) => {
                // SAFETY: cuda.h declares this symbol with exactly this type, and has since CUDA 3.2.
                *unsafe { library.get::<$kind>(concat!($name, "\0").as_bytes()) }
                    .map_err(|_| missing($name))?
            };
        }
        Ok(Self {
            init: find!("cuInit" as Init),
            error_name: find!("cuGetErrorName" as ErrorName),
            driver_version: find!("cuDriverGetVersion" as DriverVersion),
            device_count: find!("cuDeviceGetCount" as DeviceCount),
            device_get: find!("cuDeviceGet" as DeviceGet),
            device_name: find!("cuDeviceGetName" as DeviceName),
            device_total_mem: find!("cuDeviceTotalMem_v2" as DeviceTotalMem),
            device_attribute: find!("cuDeviceGetAttribute" as DeviceAttribute),
            _library: library,
        })
    }
}

/// The linker's own words, which libloading keeps as the source of its error.
fn words(error: &libloading::Error) -> String {
    error.source().map_or_else(|| error.to_string(), ToString::to_string)
}
