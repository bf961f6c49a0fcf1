//! `kvxfer._kvxfer.simulate`: a seeded run of whole clusters under virtual time.

use crate::args::Int;
use crate::errors;
use kvxfer_check::sim::{SimOptions, SimReport, run, run_logged};
use kvxfer_fabric::sim::FenceRule;
use kvxfer_proto::node::{Flaw, Mover};
use pyo3::prelude::*;
use pyo3::types::PyDict;
use std::fs::File;
use std::io::{self, BufWriter};
use std::path::PathBuf;

/// Rooms and rooms at a time that a run may have: bounds on its memory.
const MOST_ROOMS: u32 = 1_000_000;
const MOST_CONCURRENT: u32 = 4096;

/// Runs engines of several shapes against each other under virtual time, with production's state machines, codec and
/// handshake, faults at moments that `seed` decides, and a check of every byte. The same arguments give the same result.
///
/// `rooms` hand-offs, `concurrent` at a time; `cancel` is the share (0 to 1) that an engine cancels, `kill` the number
/// of processes killed and started again, `stop` of those stopped for a while, `cut` of lost sessions, cut networks and
/// broken endpoints. `mover` is `"sender"` (the sender writes, as over UCX) or `"receiver"` (the receiver copies, as over
/// shared memory); `fence` says whether the sender's transport can be fenced, `"completes"` or `"impossible"`. `flaw`
/// names a rule of the safety contract to break on purpose, for instance `"release-on-timeout"`. `log` is a file for
/// everything that happens, a line each, with the virtual time in microseconds.
///
/// Returns counts (each room is one of `succeeded`, `failed`, `cancelled` and `unended`), times in virtual milliseconds,
/// `faults` by kind, and `violations`: the first 20 of `violation_count` breaches of the contract, in words.
///
/// Raises `BadArgument`, and `OSError` if the log cannot be written.
#[pyfunction]
#[pyo3(signature = (seed, *, rooms=Int(1000), concurrent=Int(256), cancel=0.2, kill=Int(3), stop=Int(3), cut=Int(6),
                    flaw=None, mover="sender", fence="completes", log=None),
       text_signature = "(seed, *, rooms=1000, concurrent=256, cancel=0.2, kill=3, stop=3, cut=6, flaw=None, \
                         mover='sender', fence='completes', log=None)")]
#[expect(clippy::too_many_arguments, reason = "they are keywords in Python")]
pub(crate) fn simulate<'py>(
    py: Python<'py>,
    seed: Int<u64>,
    rooms: Int<u32>,
    concurrent: Int<u32>,
    cancel: f64,
    kill: Int<u32>,
    stop: Int<u32>,
    cut: Int<u32>,
    flaw: Option<&str>,
    mover: &str,
    fence: &str,
    log: Option<PathBuf>,
) -> PyResult<Bound<'py, PyDict>> {
    for (name, n, most) in [("rooms", rooms.0, MOST_ROOMS), ("concurrent", concurrent.0, MOST_CONCURRENT)] {
        if !(1..=most).contains(&n) {
            return Err(errors::bad(py, format!("{name} is 1 to {most}, not {n}")));
        }
    }
    for (name, n) in [("kill", kill.0), ("stop", stop.0), ("cut", cut.0)] {
        if n > rooms.0 {
            return Err(errors::bad(
                py,
                format!("{name} is {n}, more than the {} rooms: give at most one a room", rooms.0),
            ));
        }
    }
    if !(0.0..=1.0).contains(&cancel) {
        return Err(errors::bad(py, format!("cancel is a share of the rooms, 0 to 1, not {cancel}")));
    }
    let flaw = match flaw.map(|name| Flaw::from_name(name).ok_or(name)).transpose() {
        Ok(flaw) => flaw,
        Err(name) => {
            let known = Flaw::ALL.map(Flaw::name).join(", ");
            return Err(errors::bad(py, format!("flaw {name:?} is not known: it is one of {known}")));
        }
    };
    let mover = match mover {
        "sender" => Mover::Sender,
        "receiver" => Mover::Receiver,
        other => {
            return Err(errors::bad(py, format!("mover is \"sender\" or \"receiver\", not {other:?}")));
        }
    };
    let fence = match fence {
        "completes" => FenceRule::Completes,
        "impossible" => FenceRule::Impossible,
        other => {
            return Err(errors::bad(py, format!("fence is \"completes\" or \"impossible\", not {other:?}")));
        }
    };
    let options = SimOptions {
        seed: seed.0,
        rooms: rooms.0,
        concurrent: concurrent.0,
        cancel,
        kill: kill.0,
        stop: stop.0,
        cut: cut.0,
        mover,
        fence,
        flaw,
    };
    let report = py.detach(move || go(&options, log))?;
    dict(py, &report)
}

fn go(options: &SimOptions, log: Option<PathBuf>) -> io::Result<SimReport> {
    match log {
        Some(path) => run_logged(options, &mut BufWriter::new(File::create(path)?)),
        None => Ok(run(options)),
    }
}

fn dict<'py>(py: Python<'py>, r: &SimReport) -> PyResult<Bound<'py, PyDict>> {
    let out = PyDict::new(py);
    for (name, n) in [
        ("seed", r.seed),
        ("rooms", r.rooms),
        ("succeeded", r.succeeded),
        ("failed", r.failed),
        ("cancelled", r.cancelled),
        ("unended", r.unended),
        ("corrupt_bytes", r.corrupt_bytes),
        ("leaked_pages", r.leaked_pages),
        ("late_writes", r.late_writes),
        ("cancelled_mid_write", r.cancelled_mid_write),
        ("kills_mid_write", r.kills_mid_write),
        ("writes_landed", r.writes_landed),
        ("frames", r.frames),
        ("sessions", r.sessions),
        ("fences", r.fences),
        ("stale_refused", r.stale_refused),
        ("violation_count", r.violation_count),
    ] {
        out.set_item(name, n)?;
    }
    out.set_item("drain_ms_p50", r.drain_ms_p50())?;
    out.set_item("drain_ms_p99", r.drain_ms_p99())?;
    out.set_item("virtual_ms", r.virtual_ms())?;
    out.set_item("faults", &r.faults)?;
    out.set_item("violations", &r.violations)?;
    out.set_item("digest", format!("{:016x}", r.digest))?;
    Ok(out)
}
