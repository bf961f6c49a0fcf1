//! The few CUDA driver calls that kvxfer needs, from a `libcuda.so.1` that is opened at run time.
//!
//! Three layers: `sys` finds the functions, `result` turns codes into [`CudaError`], and this module, `memory`, `order` and
//! `kernels` are the safe one. A host without a driver, with an old one or with a broken one gives a typed error, never a panic and never a
//! failed start.
#![deny(unsafe_op_in_unsafe_fn)]

mod kernels;
mod memory;
mod order;
mod result;
mod sys;

pub use kernels::{Context, CopyTable, Event, LaunchShape, PTX_CUDA, PackKernels, Stream, THREADS};
pub use memory::{Memory, MemoryKind};
pub use order::{CurrentContext, ForeignEvent, WriteFlush};

use std::ffi::{OsStr, OsString, c_int};
use std::path::PathBuf;
use std::sync::{Mutex, PoisonError};
use sys::{Api, RawDevice};
use thiserror::Error;

/// Names the libcuda to open: a path, or a name that the dynamic linker searches for.
pub const ENV_LIBRARY: &str = "KVXFER_CUDA_LIBRARY";

const SONAME: &str = "libcuda.so.1";
/// `CUDA_ERROR_NO_DEVICE`.
const NO_DEVICE: c_int = 100;

/// Why the driver cannot be used, or what it answered.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub enum CudaError {
    /// There is no libcuda, or it cannot be opened.
    #[error(
        "no CUDA driver, {} cannot be opened: {why}; it comes with NVIDIA's driver, or set {ENV_LIBRARY}",
        .tried.display()
    )]
    NoLibrary {
        /// What was opened.
        tried: PathBuf,
        /// The dynamic linker's words.
        why: String,
    },
    /// The library is no CUDA driver, or one too old.
    #[error("{} lacks {symbol}: it is no libcuda, or one too old", .library.display())]
    MissingSymbol {
        /// The library.
        library: PathBuf,
        /// What it lacks.
        symbol: &'static str,
    },
    /// The driver refused a call.
    #[error("{call} failed with {name} ({code})")]
    Driver {
        /// Which call.
        call: &'static str,
        /// Its `CUresult`.
        code: i32,
        /// The code's name, `CUDA_ERROR_...`.
        name: String,
    },
    /// The driver does not know the kernels' PTX.
    #[error(
        "the driver knows CUDA {}.{}, and kvxfer's kernels need {}.{}: update NVIDIA's driver",
        .knows.0, .knows.1, .needs.0, .needs.1
    )]
    OldDriver {
        /// What the driver knows, major and minor.
        knows: (u32, u32),
        /// What it takes.
        needs: (u32, u32),
    },
    /// The stream cannot be waited for now.
    #[error(
        "the stream is being captured into a CUDA graph, and an event that is recorded on it now would belong to the graph: \
         give an event that the graph records, or call outside the capture"
    )]
    Capturing,
    /// The driver's answer makes no sense.
    #[error("{call} answered {value}, which cannot be")]
    BadAnswer {
        /// Which call.
        call: &'static str,
        /// What it answered.
        value: i64,
    },
}

/// One GPU.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Device {
    /// Its number in this process (`CUDA_VISIBLE_DEVICES` changes it).
    pub ordinal: u32,
    /// Its name.
    pub name: String,
    /// Its memory.
    pub total_bytes: u64,
    /// Compute capability, major and minor.
    pub compute_capability: (u32, u32),
}

/// The driver: opened and initialised.
pub struct Driver {
    api: Api,
    library: OsString,
}

impl std::fmt::Debug for Driver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Driver").field("library", &self.library).finish_non_exhaustive()
    }
}

impl Driver {
    /// The process's driver, opened on the first call that finds one: what `KVXFER_CUDA_LIBRARY` names, else
    /// `libcuda.so.1`. It stays open until the process ends, as the driver's own threads need it.
    ///
    /// # Errors
    /// See [`CudaError`]. A later call tries again.
    pub fn load() -> Result<&'static Self, CudaError> {
        static LOADED: Mutex<Option<&'static Driver>> = Mutex::new(None);
        // Nothing is left half done by a thread that panics with the lock held, so poison has no meaning here.
        let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(driver) = *loaded {
            return Ok(driver);
        }
        let named = std::env::var_os(ENV_LIBRARY).filter(|name| !name.is_empty());
        let driver = &*Box::leak(Box::new(Self::open(named.as_deref().unwrap_or(OsStr::new(SONAME)))?));
        *loaded = Some(driver);
        Ok(driver)
    }

    fn open(name: &OsStr) -> Result<Self, CudaError> {
        let api = Api::open(name)?;
        api.init()?;
        Ok(Self { api, library: name.to_owned() })
    }

    /// What was opened: a path or a name.
    #[must_use]
    pub fn library(&self) -> &OsStr {
        &self.library
    }

    /// The version of CUDA that the driver knows, major and minor.
    ///
    /// # Errors
    /// What the driver answers.
    pub fn version(&self) -> Result<(u32, u32), CudaError> {
        version(&self.api)
    }

    /// The GPUs that this process may see.
    ///
    /// # Errors
    /// What the driver answers.
    pub fn devices(&self) -> Result<Vec<Device>, CudaError> {
        let count = unsigned("cuDeviceGetCount", self.api.device_count()?)?;
        (0..count).map(|ordinal| self.device(ordinal)).collect()
    }

    /// Where a GPU is on the PCI bus, as Linux writes it: `0000:1b:00.0`.
    ///
    /// # Errors
    /// What the driver answers; [`CudaError::MissingSymbol`] from one that cannot say.
    pub fn pci_address(&self, ordinal: u32) -> Result<String, CudaError> {
        self.api.pci_address(&self.library, self.raw_device(ordinal)?)
    }

    fn raw_device(&self, ordinal: u32) -> Result<RawDevice, CudaError> {
        let number = c_int::try_from(ordinal)
            .map_err(|_| CudaError::BadAnswer { call: "cuDeviceGetCount", value: i64::from(ordinal) })?;
        self.api.device(number)
    }

    fn device(&self, ordinal: u32) -> Result<Device, CudaError> {
        let device = self.raw_device(ordinal)?;
        let attribute = |which| unsigned("cuDeviceGetAttribute", self.api.attribute(device, which)?);
        Ok(Device {
            ordinal,
            name: self.api.device_name(device)?,
            total_bytes: u64::try_from(self.api.total_bytes(device)?).unwrap_or(u64::MAX),
            compute_capability: (attribute(result::CAPABILITY_MAJOR)?, attribute(result::CAPABILITY_MINOR)?),
        })
    }
}

fn version(api: &Api) -> Result<(u32, u32), CudaError> {
    // 12040 is 12.4.
    let version = unsigned("cuDriverGetVersion", api.driver_version()?)?;
    Ok((version / 1000, version % 1000 / 10))
}

fn unsigned(call: &'static str, value: c_int) -> Result<u32, CudaError> {
    u32::try_from(value).map_err(|_| CudaError::BadAnswer { call, value: i64::from(value) })
}

/// The GPUs that this process may see; none where a driver is installed but no GPU.
///
/// # Errors
/// See [`CudaError`]; a host without a driver is [`CudaError::NoLibrary`].
pub fn devices() -> Result<Vec<Device>, CudaError> {
    match Driver::load().and_then(Driver::devices) {
        Err(CudaError::Driver { code: NO_DEVICE, .. }) => Ok(Vec::new()),
        other => other,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_that_is_not_there() {
        let error = Driver::open(OsStr::new("/nonexistent/libcuda.so.1")).expect_err("it was opened");
        assert!(
            matches!(&error, CudaError::NoLibrary { tried, .. } if tried.as_os_str() == "/nonexistent/libcuda.so.1"),
            "{error:?}"
        );
        let text = error.to_string();
        assert!(text.contains("/nonexistent/libcuda.so.1") && text.contains(ENV_LIBRARY), "{text}");
        assert!(text.contains("No such file"), "{text}");
    }

    #[test]
    fn a_library_that_is_no_driver() {
        let error = Driver::open(OsStr::new("libc.so.6")).expect_err("libc is no driver");
        assert_eq!(error, CudaError::MissingSymbol { library: "libc.so.6".into(), symbol: "cuInit" });
    }

    #[test]
    fn a_negative_answer_is_an_error() {
        assert_eq!(unsigned("cuX", 7), Ok(7));
        assert_eq!(unsigned("cuX", -1), Err(CudaError::BadAnswer { call: "cuX", value: -1 }));
    }
}
