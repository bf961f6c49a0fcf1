//! The driver's calls with `Result` instead of codes and out-pointers.

use crate::CudaError;
use crate::sys::{Api, Code, RawDevice};
use std::ffi::{CStr, c_char, c_int};

/// `CUDA_SUCCESS`.
const SUCCESS: Code = 0;
/// Longest device name that is asked for; the driver cuts longer ones.
const NAME_BYTES: usize = 256;

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
