//! What `kvxfer doctor` asks the compiled half: UCX, the host, the GPUs, and the probe of one UCX transport.

use crate::errors;
use kvxfer_cuda::{CudaError, Driver};
use kvxfer_fabric::shm::host_report;
use kvxfer_fabric::ucx::{self, ProbeTarget, ProbeWriter, UcxOptions};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyList};
use std::path::PathBuf;

/// Adds what this file has to the module.
pub(crate) fn register(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add_class::<UcxProbeTarget>()?;
    m.add_class::<UcxProbeWriter>()?;
    m.add_function(wrap_pyfunction!(doctor_ucx, m)?)?;
    m.add_function(wrap_pyfunction!(_device_pci, m)?)?;
    m.add_function(wrap_pyfunction!(doctor_host, m)?)?;
    m.add_function(wrap_pyfunction!(doctor_gpus, m)?)
}

/// The UCX that this process would use: `path`, `source`, `version` (three numbers), `transports`, `rdma`,
/// `cuda`.
///
/// Raises `FabricError` if there is none, or none that can be used.
#[pyfunction]
#[pyo3(name = "_doctor_ucx", signature = (wheel_dir=None))]
fn doctor_ucx(py: Python<'_>, wheel_dir: Option<PathBuf>) -> PyResult<Bound<'_, PyDict>> {
    let options = UcxOptions { wheel_dir, ..UcxOptions::default() };
    let report = py.detach(|| ucx::probe(&options)).map_err(|e| errors::fabric(py, &e))?;
    let out = PyDict::new(py);
    out.set_item("path", report.path.display().to_string())?;
    out.set_item("source", report.source)?;
    out.set_item("version", (report.version.major, report.version.minor, report.version.release))?;
    out.set_item("transports", report.transports)?;
    out.set_item("rdma", report.rdma)?;
    out.set_item("cuda", report.cuda)?;
    Ok(out)
}

/// What this host and this process are allowed; a value that cannot be read is None.
#[pyfunction]
#[pyo3(name = "_doctor_host")]
fn doctor_host(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let report = py.detach(host_report);
    let out = PyDict::new(py);
    out.set_item("ptrace_scope", report.ptrace_scope)?;
    out.set_item("memlock_bytes", report.memlock_bytes)?;
    out.set_item("memlock_hard_bytes", report.memlock_hard_bytes)?;
    out.set_item("dev_shm_bytes", report.dev_shm_bytes)?;
    out.set_item("dev_shm_free_bytes", report.dev_shm_free_bytes)?;
    let huge_pages = PyList::empty(py);
    for pool in report.huge_pages {
        let item = PyDict::new(py);
        item.set_item("page_bytes", pool.page_bytes)?;
        item.set_item("total", pool.total)?;
        item.set_item("free", pool.free)?;
        huge_pages.append(item)?;
    }
    out.set_item("huge_pages", huge_pages)?;
    out.set_item("shmem_huge", report.shmem_huge)?;
    out.set_item("descriptor_limit", report.descriptor_limit)?;
    Ok(out)
}

/// The GPUs: `version` of CUDA that the driver knows (two numbers, or None), `devices`, and `error`, which
/// says why there are none (None where all is well).
#[pyfunction]
#[pyo3(name = "_doctor_gpus")]
fn doctor_gpus(py: Python<'_>) -> PyResult<Bound<'_, PyDict>> {
    let (version, devices) = py.detach(|| (Driver::load().and_then(Driver::version), kvxfer_cuda::devices()));
    let out = PyDict::new(py);
    out.set_item("version", version.ok())?;
    let list = PyList::empty(py);
    let error = match devices {
        Ok(devices) => {
            for device in devices {
                let item = PyDict::new(py);
                item.set_item("ordinal", device.ordinal)?;
                item.set_item("name", device.name)?;
                item.set_item("total_bytes", device.total_bytes)?;
                item.set_item("compute_capability", device.compute_capability)?;
                item.set_item("pci", pci_address(device.ordinal).ok())?;
                item.set_item("rdma", Driver::load().and_then(|d| d.supports_rdma(device.ordinal)).ok())?;
                item.set_item("dmabuf", Driver::load().and_then(|d| d.supports_dmabuf(device.ordinal)).ok())?;
                list.append(item)?;
            }
            None
        }
        Err(error) => Some(error.to_string()),
    };
    out.set_item("devices", list)?;
    out.set_item("error", error)?;
    Ok(out)
}

/// Where a GPU is on the PCI bus (`"0000:1b:00.0"`).
///
/// Raises `FabricError` without a driver that can say.
#[pyfunction]
fn _device_pci(py: Python<'_>, device: u32) -> PyResult<String> {
    py.detach(|| pci_address(device)).map_err(|e| crate::device::failed(py, e))
}

fn pci_address(device: u32) -> Result<String, CudaError> {
    Driver::load()?.pci_address(device)
}

/// The receiver of a probe of one UCX transport. Used by the thread that made it only.
#[pyclass(unsendable, name = "_UcxProbeTarget", module = "kvxfer._kvxfer")]
pub(crate) struct UcxProbeTarget(ProbeTarget);

#[pymethods]
impl UcxProbeTarget {
    #[new]
    #[pyo3(signature = (tls, wheel_dir=None))]
    fn new(py: Python<'_>, tls: &str, wheel_dir: Option<PathBuf>) -> PyResult<Self> {
        let options = UcxOptions { wheel_dir, ..UcxOptions::default() };
        ProbeTarget::new(tls, &options).map(Self).map_err(|e| errors::fabric(py, &e))
    }

    /// What the writer needs.
    fn address<'py>(&mut self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let address = self.0.address().map_err(|e| errors::fabric(py, &e))?;
        Ok(PyBytes::new(py, &address))
    }

    /// Accepts the writer with this address.
    fn connect(&mut self, py: Python<'_>, writer: &[u8]) -> PyResult<()> {
        self.0.connect(writer).map_err(|e| errors::fabric(py, &e))
    }

    /// Lets UCX work; not to be called between a write and the look at what arrived.
    fn progress(&mut self) {
        self.0.progress();
    }

    /// Whether all bytes are `value`: in memory that UCX allocated, and in other memory.
    fn arrived(&self, value: u8) -> (bool, bool) {
        self.0.arrived(value)
    }
}

/// The sender of a probe of one UCX transport. Used by the thread that made it only.
#[pyclass(unsendable, name = "_UcxProbeWriter", module = "kvxfer._kvxfer")]
pub(crate) struct UcxProbeWriter(ProbeWriter);

#[pymethods]
impl UcxProbeWriter {
    #[new]
    #[pyo3(signature = (tls, wheel_dir=None))]
    fn new(py: Python<'_>, tls: &str, wheel_dir: Option<PathBuf>) -> PyResult<Self> {
        let options = UcxOptions { wheel_dir, ..UcxOptions::default() };
        ProbeWriter::new(tls, &options).map(Self).map_err(|e| errors::fabric(py, &e))
    }

    /// What the receiver needs.
    fn address<'py>(&mut self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let address = self.0.address().map_err(|e| errors::fabric(py, &e))?;
        Ok(PyBytes::new(py, &address))
    }

    /// Connects to the receiver with this address.
    fn connect(&mut self, py: Python<'_>, target: &[u8]) -> PyResult<()> {
        self.0.connect(target).map_err(|e| errors::fabric(py, &e))
    }

    /// Lets UCX work; whether the endpoint is connected. Raises `FabricError` if it never will be.
    fn progress(&mut self, py: Python<'_>) -> PyResult<bool> {
        self.0.progress().map_err(|e| errors::fabric(py, &e))
    }

    /// Transports that the endpoint uses.
    fn transports(&self) -> Vec<String> {
        self.0.transports()
    }

    /// Writes `value` into all of the receiver's UCX memory (`region` 0) or other memory (1) and flushes;
    /// False if the flush was not done within 0.3 s.
    fn write(&mut self, py: Python<'_>, region: u32, value: u8) -> PyResult<bool> {
        self.0.write(region, value).map_err(|e| errors::fabric(py, &e))
    }
}
