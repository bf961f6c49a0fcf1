//! `kvxfer._kvxfer.Agent`, the base of `kvxfer.Agent`.

use crate::args::{Count, Int, Layers, RoomArg, Seconds};
use crate::errors;
use crate::event::Event;
use crate::inner::Inner;
use crate::layout::side;
use crate::memory::Allocation;
use crate::pages::{PageLists, page_lists};
use crate::push::Push;
use crate::ready;
use crate::shard::Shard;
use crate::unreleased::Unreleased;
use crate::waiter::Waiter;
use crate::watch::Watch;
use kvxfer_engine::{
    AgentConfig, Call, ExpectOrder, FabricChoice, PushOrder, Staging, StagingMode, TlsConfig, stage_name,
};
use kvxfer_fabric::ucx::Devices as UcxDevices;
use kvxfer_fabric::{MemKind, ReadySignal, RegionSpan};
use kvxfer_proto::PushId;
use kvxfer_proto::msg::{Role, Verify};
use kvxfer_proto::node::Flaw;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::{PyDict, PyList, PyTuple};
use std::os::fd::AsRawFd as _;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

/// One region: address, bytes, and the memory of ours that it lies in.
type Region<'py> = (u64, u64, Option<Bound<'py, Allocation>>);

/// How long an agent that is dropped unclosed waits for its peers.
const DROP_WAIT: Duration = Duration::from_millis(500);

/// `Agent.expect` and its kin wait this long by default.
const DEFAULT: Option<Seconds> = Some(Seconds(Duration::from_secs(300)));

/// The compiled half of `kvxfer.Agent`, which prepares the arguments; use that one.
#[pyclass(frozen, subclass, module = "kvxfer._kvxfer")]
#[derive(Debug)]
pub(crate) struct Agent {
    inner: Arc<Inner>,
    name: String,
    groups: usize,
    pages: Vec<u32>,
    /// The device that its memory is on, if any of it is.
    device: Option<u32>,
}

#[pymethods]
impl Agent {
    #[new]
    #[pyo3(signature = (name, layout, shard, regions, pages, owner, *, listen="127.0.0.1:0", directory=None,
                        engine=None, dp_rank=Int(0), role="both", model=None, fabric="auto", secret=None,
                        tls=None, insecure=false, limits=None, cpu=None, queue_capacity=Int(4096),
                        spin_us=None, ucx_tls=None, ucx_wheel_dir=None, heartbeat=None, suspect_after=None, fence_after=None,
                        quarantine_limit=None, slice_bytes=None, staging="auto", staging_slots=Int(32),
                        staging_slot_bytes=Int(262_144), devices=None, ucx_devices=None, flaw=None),
           text_signature = "(name, layout, shard, regions, pages, owner, *, listen='127.0.0.1:0', \
                             directory=None, engine=None, dp_rank=0, role='both', model=None, fabric='auto', \
                             secret=None, tls=None, insecure=False, limits=None, cpu=None, \
                             queue_capacity=4096, spin_us=None, ucx_tls=None, ucx_wheel_dir=None, heartbeat=None, suspect_after=None, fence_after=None, \
                             quarantine_limit=None, slice_bytes=None, staging='auto', staging_slots=32, \
                             staging_slot_bytes=262144, devices=None, ucx_devices=None, flaw=None)")]
    #[expect(clippy::too_many_arguments, reason = "they are keywords in Python")]
    fn new(
        py: Python<'_>,
        name: String,
        layout: &Bound<'_, PyAny>,
        shard: &Bound<'_, Shard>,
        regions: Vec<Region<'_>>,
        pages: Vec<u32>,
        owner: Py<PyAny>,
        listen: &str,
        directory: Option<String>,
        engine: Option<String>,
        dp_rank: Int<u32>,
        role: &str,
        model: Option<String>,
        fabric: &str,
        secret: Option<Vec<u8>>,
        tls: Option<(PathBuf, PathBuf, PathBuf, Option<String>)>,
        insecure: bool,
        limits: Option<&Bound<'_, PyDict>>,
        cpu: Option<Int<usize>>,
        queue_capacity: Int<usize>,
        spin_us: Option<Int<u64>>,
        ucx_tls: Option<String>,
        ucx_wheel_dir: Option<PathBuf>,
        heartbeat: Option<Seconds>,
        suspect_after: Option<Seconds>,
        fence_after: Option<Seconds>,
        quarantine_limit: Option<Int<u64>>,
        slice_bytes: Option<Int<u64>>,
        staging: &str,
        staging_slots: Int<u32>,
        staging_slot_bytes: Int<u64>,
        devices: Option<Vec<Option<u32>>>,
        ucx_devices: Option<(Vec<String>, u32)>,
        flaw: Option<&str>,
    ) -> PyResult<Self> {
        let side = side(layout, shard)?;
        let groups = side.groups.len();
        // One a region; without any, all of them are the host's.
        let devices = devices.unwrap_or_else(|| vec![None; regions.len()]);
        if devices.len() != regions.len() {
            return Err(errors::bad(py, format!("{} devices for {} regions", devices.len(), regions.len())));
        }
        let device = devices.iter().flatten().next().copied();
        let regions = regions.into_iter().zip(devices).map(|((addr, len, ours), device)| RegionSpan {
            addr,
            len,
            kind: device.map_or(MemKind::Host, MemKind::Device),
            backing: ours.map(|a| Arc::clone(a.get().backing())),
        });
        let mut config = AgentConfig::new(name.clone(), side, pages.clone(), regions.collect());
        config.role = match role {
            "both" => Role::Both,
            "prefill" => Role::Prefill,
            "decode" => Role::Decode,
            other => {
                return Err(errors::bad(
                    py,
                    format!("role {other:?} is not known: both, prefill and decode are"),
                ));
            }
        };
        config.fabric = FabricChoice::from_name(fabric).ok_or_else(|| {
            errors::bad(py, format!("fabric {fabric:?} is not known: auto, shm and ucx are"))
        })?;
        if queue_capacity.0 == 0 {
            return Err(errors::bad(py, "queue_capacity is 0; it must be at least 1"));
        }
        listen.clone_into(&mut config.listen);
        config.directory = directory;
        config.engine = engine.unwrap_or_else(|| name.clone());
        config.dp_rank = dp_rank.0;
        config.model = model.unwrap_or_default();
        config.secret = secret;
        config.tls = tls.map(|(cert, key, ca, name)| TlsConfig { cert, key, ca, name });
        config.insecure = insecure;
        if let Some(limits) = limits {
            crate::limits::apply(limits, &mut config)?;
        }
        config.cpu = cpu.map(|n| n.0);
        config.queue_capacity = queue_capacity.0;
        config.spin = spin_us.map(|us| Duration::from_micros(us.0));
        config.ucx_tls = ucx_tls;
        config.ucx_devices = ucx_devices.map(|(names, rails)| UcxDevices { names, rails });
        config.ucx_wheel_dir = ucx_wheel_dir;
        config.slice_bytes = slice_bytes.map_or(config.slice_bytes, |n| n.0);
        let mode = StagingMode::from_name(staging).ok_or_else(|| {
            errors::bad(py, format!("staging {staging:?} is not known: auto, always and never are"))
        })?;
        config.staging = Staging { mode, slots: staging_slots.0, slot_bytes: staging_slot_bytes.0 };
        let node = &mut config.node;
        node.heartbeat = heartbeat.map_or(node.heartbeat, |s| s.0);
        node.suspect_after = suspect_after.map_or(node.suspect_after, |s| s.0);
        node.fence_after = fence_after.map_or(node.fence_after, |s| s.0);
        node.quarantine_limit = quarantine_limit.map_or(node.quarantine_limit, |n| n.0);
        node.flaw = match flaw {
            None => None,
            Some(name) => Some(Flaw::from_name(name).ok_or_else(|| {
                let known = Flaw::ALL.map(Flaw::name).join(", ");
                errors::bad(py, format!("flaw {name:?} is not known: {known} are"))
            })?),
        };
        let engine = py.detach(|| kvxfer_engine::Agent::start(config)).map_err(|e| errors::start(py, &e))?;
        Ok(Self { inner: Arc::new(Inner::new(engine, owner)), name, groups, pages, device })
    }

    /// Name, for people.
    #[getter]
    fn name(&self) -> &str {
        &self.name
    }

    /// Control address, `"host:port"`.
    #[getter]
    fn address(&self) -> &str {
        self.inner.engine.address()
    }

    /// Names of the fabrics that it offers, best first.
    #[getter]
    fn fabrics<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        let names = self.inner.engine.fabrics().split(',').map(str::trim).filter(|name| !name.is_empty());
        PyTuple::new(py, names.collect::<Vec<_>>())
    }

    /// Registered pages of each group.
    #[getter]
    fn pages<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyTuple>> {
        PyTuple::new(py, &self.pages)
    }

    /// Whether `close` was called.
    #[getter]
    fn closed(&self) -> bool {
        self.inner.closed()
    }

    /// Grants pages to the prefill engine at `source`, which may write them until the room's released event.
    ///
    /// `pages` are page ids (numpy int32, int64 or uint32 arrays cost least; torch CPU tensors and lists are
    /// taken too; with several groups a list of one page list each); the first holds token `start`, which
    /// need not be a multiple of the page size. `tokens` is how many are expected from `start` on; 0 asks for
    /// a completion only. `source` is `"host:port"` of the prefill engine's directory (port 8998 if left
    /// out). `bootstrap_timeout` (seconds) runs until the peers are in contact, `timeout` (seconds) runs
    /// without progress after that; None for the agent's default.
    ///
    /// `verify` asks for a checksum of what arrives, which both sides compute over their own bytes: `"full"` of
    /// every byte; `"sample"` of the first and the last token of each push and of one row (a token of a head) in
    /// 64 of the others, which finds what breaks many rows, and not one wrong byte elsewhere. Where the sums
    /// differ the room fails with `ChecksumMismatch` on both sides.
    ///
    /// Returns at once. Raises `BadArgument` (a room that is not 63 bits, too few pages for the tokens, no
    /// address, an unknown `verify`), `RoomInUse`, `QueueFull`, `AgentClosed`, `Forked`, and TypeError for pages that are not
    /// integers. Ids that are out of range, repeated or granted already fail the room with `PageError`.
    #[pyo3(signature = (room, pages, *, tokens, start=Count(0), source, source_dp_rank=Int(0),
                        timeout=DEFAULT, bootstrap_timeout=DEFAULT, verify=None),
           text_signature = "($self, room, pages, *, tokens, start=0, source, source_dp_rank=0, \
                             timeout=300.0, bootstrap_timeout=300.0, verify=None)")]
    #[expect(clippy::too_many_arguments, reason = "they are keywords in Python")]
    fn expect(
        &self,
        py: Python<'_>,
        room: RoomArg,
        pages: &Bound<'_, PyAny>,
        tokens: Count,
        start: Count,
        source: String,
        source_dp_rank: Int<u32>,
        timeout: Option<Seconds>,
        bootstrap_timeout: Option<Seconds>,
        verify: Option<&str>,
    ) -> PyResult<()> {
        let _timed = self.inner.engine.begin_call(Call::Expect);
        let verify = match verify {
            None => Verify::Off,
            Some("full") => Verify::Full,
            Some("sample") => Verify::Sample,
            Some(other) => {
                return Err(errors::bad(
                    py,
                    format!("verify {other:?} is not known: \"full\", \"sample\" and None are"),
                ));
            }
        };
        if let (Some(device), true) = (self.device, verify != Verify::Off) {
            return Err(errors::unsupported(
                py,
                format!(
                    "verify: the pages are on device {device}, and sums of a device's memory are not built yet"
                ),
            ));
        }
        let PageLists { lists, odd_page } = page_lists(pages, self.groups)?;
        let order = ExpectOrder {
            room: room.0,
            pages: lists,
            odd_page,
            start: start.0,
            tokens: tokens.0,
            source,
            source_dp_rank: source_dp_rank.0,
            verify,
            bootstrap_timeout: bootstrap_timeout.map(|s| s.0),
            timeout: timeout.map(|s| s.0),
        };
        self.inner.engine.expect(order).map_err(|e| errors::call(py, &e))
    }

    /// Gets a room's peers in contact before there is anything to push. Optional; timeouts as for `push`.
    ///
    /// Raises what `push` raises, and `RoomInUse` if the room was opened or pushed already.
    #[pyo3(signature = (room, *, timeout=DEFAULT, bootstrap_timeout=DEFAULT),
           text_signature = "($self, room, *, timeout=300.0, bootstrap_timeout=300.0)")]
    fn open(
        &self,
        py: Python<'_>,
        room: RoomArg,
        timeout: Option<Seconds>,
        bootstrap_timeout: Option<Seconds>,
    ) -> PyResult<()> {
        let engine = &self.inner.engine;
        engine
            .open(room.0, bootstrap_timeout.map(|s| s.0), timeout.map(|s| s.0))
            .map_err(|e| errors::call(py, &e))
    }

    /// Orders tokens `start` to `start + tokens` of a room to be delivered out of `pages`, before or after
    /// decode's grant.
    ///
    /// `pages` as for `expect`; the first holds token `start`. `layers` is a range or a pair `(first, end)`
    /// in the model's numbering, None for all that this rank holds. A room may have many pushes, by tokens
    /// and by layers; the one with `last=True` says that nothing more comes. `meta` (bytes, at most 64 KiB,
    /// only with `last`) reaches decode with `"Success"`. The pages must not change until the room's released
    /// event, or the push's retraction.
    ///
    /// `event` is what has to be done on a GPU before the pages may be read: the transfer thread asks it, and
    /// sends nothing of this push earlier. It is a stream (torch's, cupy's, or anything with
    /// `__cuda_stream__`), which stands for all that has been queued on it so far; an event (torch's or
    /// cupy's) that was recorded; or an int, a raw `CUevent` of the device that the agent's memory is on, or,
    /// with memory of the host, whose context is current on this thread. An event must neither be recorded
    /// again nor destroyed until the push's pages are released or retracted: an object is kept alive, an int
    /// is the caller's to keep. Nothing waits for the GPU here. If the driver fails later, the room fails
    /// with `FabricError` and its words.
    ///
    /// Returns at once, with a handle for `retract`. Raises `BadArgument`, `QueueFull`, `AgentClosed`,
    /// `Forked`, the error of a room that has failed, TypeError for pages that are not integers or an `event`
    /// of another type, and `FabricError` if there is no CUDA driver or it refuses the event.
    #[pyo3(signature = (room, pages, *, start=Count(0), tokens, layers=None, event=None, last=true, meta=None,
                        timeout=DEFAULT, bootstrap_timeout=DEFAULT),
           text_signature = "($self, room, pages, *, start=0, tokens, layers=None, event=None, last=True, \
                             meta=None, timeout=300.0, bootstrap_timeout=300.0)")]
    #[expect(clippy::too_many_arguments, reason = "they are keywords in Python")]
    fn push(
        &self,
        py: Python<'_>,
        room: RoomArg,
        pages: &Bound<'_, PyAny>,
        start: Count,
        tokens: Count,
        layers: Option<Layers>,
        event: Option<&Bound<'_, PyAny>>,
        last: bool,
        meta: Option<PyBackedBytes>,
        timeout: Option<Seconds>,
        bootstrap_timeout: Option<Seconds>,
    ) -> PyResult<Push> {
        let _timed = self.inner.engine.begin_call(Call::Push);
        let ready = match event {
            None => None,
            Some(event) => ready::signal(event, &self.inner, self.device)?,
        };
        let PageLists { lists, odd_page } = page_lists(pages, self.groups)?;
        let order = PushOrder {
            room: room.0,
            pages: lists,
            odd_page,
            start: start.0,
            tokens: tokens.0,
            layers: layers.map(|Layers(first, end)| (first, end)),
            last,
            meta: meta.map(|meta| Arc::from(&*meta)),
            ready: ready.map(|signal| signal as Arc<dyn ReadySignal>),
            bootstrap_timeout: bootstrap_timeout.map(|s| s.0),
            timeout: timeout.map(|s| s.0),
        };
        let id = self.inner.engine.push(order).map_err(|e| errors::call(py, &e))?;
        Ok(Push { id: id.0, room: room.0 })
    }

    /// Takes a push's pages back, for instance because the engine preempts the request. A `"Retracted"` event
    /// says when they are free.
    ///
    /// Raises `UnknownRoom`, `QueueFull`, `AgentClosed`, `Forked`.
    fn retract(&self, py: Python<'_>, push: &Bound<'_, Push>) -> PyResult<()> {
        let push = push.get();
        self.inner.engine.retract(push.room, PushId(push.id)).map_err(|e| errors::call(py, &e))
    }

    /// Gives a room up on both sides. `"Failed"` with `Cancelled` comes at once, the released event when no
    /// write can land any more.
    ///
    /// Raises `UnknownRoom`, `QueueFull`, `AgentClosed`, `Forked`.
    fn cancel(&self, py: Python<'_>, room: RoomArg) -> PyResult<()> {
        self.inner.engine.cancel(room.0).map_err(|e| errors::call(py, &e))
    }

    /// Everything that happened since the last call, oldest first. Never blocks.
    fn poll<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        self.inner.check(py)?;
        let _timed = self.inner.engine.begin_call(Call::Poll);
        PyList::new(py, self.inner.poll().into_iter().map(Event::new))
    }

    /// `"Bootstrapping"`, `"Waiting"`, `"Transferring"`, `"Success"` or `"Failed"`; None for a room that is
    /// not known, or that ended well and was polled.
    fn state(&self, py: Python<'_>, room: RoomArg) -> PyResult<Option<&'static str>> {
        self.inner.check(py)?;
        Ok(self.inner.engine.state(room.0).map(stage_name))
    }

    /// Sleeps until the room has ended (other Python threads run meanwhile) and returns its `"Success"`;
    /// takes nothing away from `poll`. `timeout` is in seconds, None for no limit.
    ///
    /// Raises the room's error if it failed, `WaitTimeout` when the time is up, `UnknownRoom`.
    #[pyo3(signature = (room, timeout=None))]
    fn wait(&self, py: Python<'_>, room: RoomArg, timeout: Option<Seconds>) -> PyResult<Event> {
        let watch = Watch::new(&self.inner, room.0);
        Event::new(watch.wait(py, timeout.map(|s| s.0))?).or_raise(py)
    }

    /// A watch on a room, for `wait_async`.
    fn _watch(&self, py: Python<'_>, room: RoomArg) -> PyResult<Watch> {
        self.inner.check(py)?;
        Ok(Watch::new(&self.inner, room.0))
    }

    /// A descriptor for one event loop, for `wait_async`.
    fn _new_waiter(&self, py: Python<'_>) -> PyResult<Waiter> {
        self.inner.check(py)?;
        self.inner.engine.new_waiter().map(Waiter).map_err(|e| errors::start(py, &e))
    }

    /// A descriptor that is readable while `poll` has something to say; for select, epoll or an event loop.
    /// It belongs to the agent: do not read or close it.
    fn fileno(&self, py: Python<'_>) -> PyResult<i32> {
        self.inner.check(py)?;
        Ok(self.inner.engine.event_fd().as_raw_fd())
    }

    /// Counters (since the start) and gauges (now), by name; a few milliseconds old at most.
    ///
    /// Counters: `succeeded`, `failed`, `cancelled`, `timed_out` (rooms), `stale_refused`, `protocol_errors`,
    /// `fences`, `sessions`, `moved_bytes`, `summed_bytes`, `packed_bytes` (into staging slots), `unpacked_bytes`,
    /// `packed_deliveries` and `direct_deliveries` (of those that could go either way), `packed_fallbacks` (of
    /// `packed_deliveries`, those that got no slot and went direct), `link_busy_us` (time with anything of ours in
    /// flight; what overlaps counts once), `writes`, `data_syscalls`, `slices`, `sleeps`, `frames_sent`,
    /// `frames_received`; `bad_connections` (refused or dropped for what came on them), of those
    /// `limited_connections` (past a limit) and `slow_connections` (silent or slow); `auth_failures` (no or a
    /// wrong secret or certificate), `limited` (grants and sessions past a limit). Gauges: `inbound`, `outbound`
    /// (rooms), `granted_pages`, `quarantined_pages`, `peers`, `tombstones` (ended rooms that are remembered),
    /// `deliveries`, `queue_depth`, `queued_events` (not polled yet), `known_rooms` (that calls can name),
    /// `unacknowledged` (control messages), `timers`, `driver_entries` (of the transfer thread's own tables),
    /// `connections`, `staging_slots` (of our ring, not free), `quarantined_slots`, `link_bytes_per_s` and
    /// `link_busy_ppm` (bytes a second, and millionths of the time with anything in flight, over the last second or
    /// so).
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        self.inner.check(py)?;
        let s = self.inner.engine.stats();
        let out = PyDict::new(py);
        for (name, value) in [
            ("succeeded", s.counters.succeeded),
            ("failed", s.counters.failed),
            ("cancelled", s.counters.cancelled),
            ("timed_out", s.counters.timed_out),
            ("stale_refused", s.counters.stale_refused),
            ("protocol_errors", s.counters.protocol_errors),
            ("fences", s.counters.fences),
            ("sessions", s.counters.sessions),
            ("moved_bytes", s.moved_bytes),
            ("summed_bytes", s.summed_bytes),
            ("packed_bytes", s.packed_bytes),
            ("unpacked_bytes", s.unpacked_bytes),
            ("packed_deliveries", s.packed_deliveries),
            ("direct_deliveries", s.direct_deliveries),
            ("packed_fallbacks", s.packed_fallbacks),
            ("link_busy_us", s.link.busy_us),
            ("writes", s.writes),
            ("data_syscalls", s.data_syscalls),
            ("slices", s.slices),
            ("sleeps", s.sleeps),
            ("frames_sent", s.frames_sent),
            ("frames_received", s.frames_received),
            ("bad_connections", s.bad_connections),
            ("limited_connections", s.limited_connections),
            ("slow_connections", s.slow_connections),
            ("auth_failures", s.auth_failures),
            ("limited", s.counters.limited),
            ("inbound", s.gauges.inbound),
            ("outbound", s.gauges.outbound),
            ("granted_pages", s.gauges.granted_pages),
            ("quarantined_pages", s.gauges.quarantined_pages),
            ("peers", s.gauges.peers),
            ("tombstones", s.gauges.tombstones),
            ("deliveries", s.gauges.deliveries),
            ("queue_depth", s.queue_depth),
            ("timers", s.gauges.timers),
            ("unacknowledged", s.gauges.unacknowledged),
            ("known_rooms", s.known_rooms),
            ("queued_events", s.queued_events),
            ("driver_entries", s.driver_entries),
            ("connections", s.connections),
            ("staging_slots", s.gauges.staging_slots),
            ("quarantined_slots", s.gauges.quarantined_slots),
            ("link_bytes_per_s", s.rate.bytes_per_s),
            ("link_busy_ppm", s.rate.busy_ppm),
        ] {
            out.set_item(name, value)?;
        }
        Ok(out)
    }

    /// What `stats` has no plain number for, since the start unless it says now.
    ///
    /// `rooms` (now): how many are where, by side (`"decode"` expects, `"prefill"` pushes) and state:
    /// `"bootstrapping"`, `"waiting"`, `"transferring"`, and `"draining"` for those that failed and whose pages
    /// are not free. `failed`: by the stage that they were in, and by reason. Histograms, each a dict of
    /// `bounds_s` (upper bounds in seconds), `counts` (one more than bounds) and `sum_s`: `stages` of rooms that
    /// ended well, `drains` from a room's failure until its pages were free, and `calls` (`"expect"`, `"push"`,
    /// `"poll"`), which have the number of `calls` too and time one in 16 of them.
    fn metrics<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        self.inner.check(py)?;
        crate::metrics::to_dict(py, &self.inner.engine.stats(), &self.inner.engine.call_costs())
    }

    /// The operator says that a peer (its name, or its incarnation in hex) is gone for good: its pages leave
    /// quarantine.
    ///
    /// Raises `QueueFull`, `AgentClosed`, `Forked`.
    fn evict(&self, py: Python<'_>, peer: &str) -> PyResult<()> {
        self.inner.engine.evict(peer).map_err(|e| errors::call(py, &e))
    }

    /// Cancels every room, waits up to `timeout` seconds until no peer can touch the memory, and stops.
    /// Returns the rooms whose pages are still not free: then the memory is kept for as long as the process
    /// lives. May be called again.
    #[pyo3(signature = (timeout=Seconds(Duration::from_secs(5))), text_signature = "($self, timeout=5.0)")]
    fn close(&self, py: Python<'_>, timeout: Seconds) -> Vec<Unreleased> {
        self.inner.close(py, timeout.0).into_iter().map(Unreleased::from).collect()
    }

    fn __repr__(&self) -> String {
        let closed = if self.inner.closed() { ", closed" } else { "" };
        format!("<Agent {:?} at {}{closed}>", self.name, self.inner.engine.address())
    }
}

impl Drop for Agent {
    fn drop(&mut self) {
        // Without an interpreter (it has ended) the engine closes itself, and the memory stays.
        let _ = Python::try_attach(|py| self.inner.close(py, DROP_WAIT));
    }
}
