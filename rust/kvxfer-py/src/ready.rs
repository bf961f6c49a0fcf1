//! What `push(event=)` may be: streams and events of other libraries.

use crate::errors;
use crate::inner::Inner;
use kvxfer_fabric::cuda::{CudaSignal, Devices, Work};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyInt};
use std::sync::Arc;

/// The work that an object stands for, and its device if the object knows that.
struct Found {
    work: Work,
    device: Option<u32>,
}

/// What the transfer thread asks before it reads the pages; nothing if the work is done already. `device` is the agent's.
pub(crate) fn signal(
    event: &Bound<'_, PyAny>,
    inner: &Inner,
    device: Option<u32>,
) -> PyResult<Option<Arc<CudaSignal>>> {
    let py = event.py();
    inner.check(py)?;
    let found = look(event)?;
    let current = || Devices::current().map_err(|e| errors::fabric(py, &e));
    let device = match found.device.or(device) {
        Some(device) => device,
        None => current()?.ok_or_else(|| {
            errors::bad(
                py,
                "event: of which device it is cannot be told: the agent's memory is the host's, and no CUDA context is \
                 current on this thread; make the device current, or give a torch or cupy object, which knows its device",
            )
        })?,
    };
    // The first call loads the driver, and a full queue of the device's makes it wait: other threads go on meanwhile.
    let work = found.work;
    let signal = py.detach(|| inner.devices.signal(device, work)).map_err(|e| errors::fabric(py, &e))?;
    let Some(signal) = signal.map(Arc::new) else { return Ok(None) };
    if matches!(found.work, Work::Event(_)) {
        inner.let_go();
        inner.keep(Arc::downgrade(&signal), event.clone().unbind());
    }
    Ok(Some(signal))
}

fn look(event: &Bound<'_, PyAny>) -> PyResult<Found> {
    let py = event.py();
    if event.is_instance_of::<PyInt>() && !event.is_instance_of::<PyBool>() {
        return Ok(Found { work: raw_event(event, event)?, device: None });
    }
    // torch.cuda.Event: null until it is first recorded.
    if let Some(raw) = event.getattr_opt("cuda_event")? {
        return Ok(Found { work: raw_event(&raw, event)?, device: device_of(event)? });
    }
    // torch.cuda.Stream.
    if let Some(raw) = event.getattr_opt("cuda_stream")? {
        return Ok(Found { work: Work::Stream(raw.extract()?), device: device_of(event)? });
    }
    // cupy's streams and events have the handle under one name.
    if let Some(raw) = event.getattr_opt("ptr")? {
        let class = event.get_type();
        if class.hasattr("launch_host_func")? || class.hasattr("use")? {
            return Ok(Found { work: Work::Stream(raw.extract()?), device: device_of(event)? });
        }
        if class.hasattr("record")? && class.hasattr("done")? {
            return Ok(Found { work: raw_event(&raw, event)?, device: None });
        }
    }
    // The protocol of NVIDIA's Python libraries: (version, handle).
    if event.hasattr("__cuda_stream__")? {
        let (version, raw): (u64, u64) = event.call_method0("__cuda_stream__")?.extract()?;
        if version != 0 {
            return Err(errors::unsupported(
                py,
                format!("event: version {version} of __cuda_stream__ is not known"),
            ));
        }
        return Ok(Found { work: Work::Stream(raw), device: None });
    }
    Err(PyTypeError::new_err(format!(
        "event is a stream or an event of torch or cupy, anything with __cuda_stream__, or an int (a CUevent), not {}",
        event.get_type().name()?
    )))
}

fn raw_event(raw: &Bound<'_, PyAny>, event: &Bound<'_, PyAny>) -> PyResult<Work> {
    match raw.extract::<u64>() {
        Ok(raw) if raw != 0 => Ok(Work::Event(raw)),
        _ => Err(errors::bad(
            event.py(),
            format!("event: {} is no CUevent: record the event on a stream first", event.repr()?),
        )),
    }
}

/// `device_index` or `device.index` (torch), or `device_id` (cupy, -1 for whatever is current).
fn device_of(event: &Bound<'_, PyAny>) -> PyResult<Option<u32>> {
    for name in ["device_index", "device_id"] {
        if let Some(index) = event.getattr_opt(name)? {
            return Ok(index.extract::<u32>().ok());
        }
    }
    match event.getattr_opt("device")? {
        Some(device) if !device.is_none() => {
            Ok(device.getattr_opt("index")?.and_then(|index| index.extract::<u32>().ok()))
        }
        _ => Ok(None),
    }
}
