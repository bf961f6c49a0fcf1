//! `Agent.metrics()`.

use kvxfer_engine::{
    CALL_BOUNDS_NS, CALLS, CallCosts, DURATION_BOUNDS_US, Durations, REASONS, ROOM_SIDES, ROOM_STATES,
    STAGES, Stats,
};
use pyo3::prelude::*;
use pyo3::types::PyDict;

const US_PER_S: f64 = 1e6;
const NS_PER_S: f64 = 1e9;

/// A histogram: upper bounds in seconds, one count more than bounds, and the sum in seconds.
fn histogram<'py>(
    py: Python<'py>,
    bounds: &[u64],
    counts: &[u64],
    sum: u64,
    per_s: f64,
) -> PyResult<Bound<'py, PyDict>> {
    let out = PyDict::new(py);
    let bounds_s: Vec<f64> = bounds.iter().map(|bound| *bound as f64 / per_s).collect();
    out.set_item("bounds_s", bounds_s)?;
    out.set_item("counts", counts)?;
    out.set_item("sum_s", sum as f64 / per_s)?;
    Ok(out)
}

fn durations<'py>(py: Python<'py>, d: &Durations) -> PyResult<Bound<'py, PyDict>> {
    histogram(py, &DURATION_BOUNDS_US, &d.counts, d.sum_us, US_PER_S)
}

/// Names to numbers.
fn named<'py>(py: Python<'py>, names: &[&str], numbers: &[u64]) -> PyResult<Bound<'py, PyDict>> {
    let out = PyDict::new(py);
    for (name, number) in names.iter().zip(numbers) {
        out.set_item(name, number)?;
    }
    Ok(out)
}

/// What is no plain number.
pub(crate) fn to_dict<'py>(
    py: Python<'py>,
    stats: &Stats,
    calls: &[CallCosts; CALLS.len()],
) -> PyResult<Bound<'py, PyDict>> {
    let (rooms, failed, stages, costs) = (PyDict::new(py), PyDict::new(py), PyDict::new(py), PyDict::new(py));
    for (side, counts) in ROOM_SIDES.iter().zip(&stats.rooms) {
        rooms.set_item(side, named(py, &ROOM_STATES, counts)?)?;
    }
    for (stage, counts) in STAGES.iter().zip(&stats.outcomes.failures) {
        failed.set_item(stage, named(py, &REASONS, counts)?)?;
    }
    for (stage, d) in STAGES.iter().zip(&stats.outcomes.stages) {
        stages.set_item(stage, durations(py, d)?)?;
    }
    for (name, cost) in CALLS.iter().zip(calls) {
        let one = histogram(py, &CALL_BOUNDS_NS, &cost.counts, cost.sum_ns, NS_PER_S)?;
        one.set_item("calls", cost.calls)?;
        costs.set_item(name, one)?;
    }
    let out = PyDict::new(py);
    out.set_item("rooms", rooms)?;
    out.set_item("failed", failed)?;
    out.set_item("stages", stages)?;
    out.set_item("drains", durations(py, &stats.outcomes.drains)?)?;
    out.set_item("calls", costs)?;
    Ok(out)
}
