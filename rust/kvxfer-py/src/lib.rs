//! Python bindings: extract the arguments, let the interpreter go where a call blocks, call, convert. What
//! needs no speed is in Python, in `python/kvxfer`.
#![forbid(unsafe_code)]

mod agent;
mod args;
mod bench;
mod bench_copy;
mod bench_pack;
mod device;
mod doctor;
mod errors;
mod event;
mod inner;
mod layout;
mod limits;
mod memory;
mod metrics;
mod pages;
mod plan;
mod push;
mod ready;
mod room_stats;
mod shard;
mod simulate;
mod span;
mod unreleased;
mod waiter;
mod watch;

use pyo3::prelude::*;

/// A random room: 63 bits, one for each request's hand-off.
#[pyfunction]
fn new_room(py: Python<'_>) -> PyResult<u64> {
    kvxfer_engine::new_room().map_err(|e| errors::start(py, &e))
}

/// Makes the agents of the parent process answer with `Forked`; `os.register_at_fork` calls it.
#[pyfunction]
fn _after_fork_in_child() {
    inner::after_fork_in_child();
}

/// The compiled half of kvxfer. Import `kvxfer`, not this.
#[pymodule]
fn _kvxfer(m: &Bound<'_, PyModule>) -> PyResult<()> {
    m.add("__version__", env!("CARGO_PKG_VERSION"))?;
    m.add_class::<agent::Agent>()?;
    m.add_class::<event::Event>()?;
    m.add_class::<layout::PageLayout>()?;
    m.add_class::<memory::Allocation>()?;
    m.add_class::<plan::Plan>()?;
    m.add_class::<push::Push>()?;
    m.add_class::<room_stats::RoomStats>()?;
    m.add_class::<shard::Shard>()?;
    m.add_class::<span::Span>()?;
    m.add_class::<unreleased::Unreleased>()?;
    m.add_class::<waiter::Waiter>()?;
    m.add_class::<watch::Watch>()?;
    m.add_function(wrap_pyfunction!(new_room, m)?)?;
    m.add_function(wrap_pyfunction!(plan::plan_transfer, m)?)?;
    m.add_function(wrap_pyfunction!(simulate::simulate, m)?)?;
    m.add_function(wrap_pyfunction!(bench::_bench_plan, m)?)?;
    m.add_function(wrap_pyfunction!(bench_copy::_bench_copy, m)?)?;
    m.add_function(wrap_pyfunction!(bench_pack::_pack_table, m)?)?;
    m.add_function(wrap_pyfunction!(_after_fork_in_child, m)?)?;
    m.add_function(wrap_pyfunction!(device::_memory_at, m)?)?;
    doctor::register(m)?;
    Ok(())
}
