//! Events and memory of others, on a stub that holds its callers to the driver's rules.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod stub;

use kvxfer_cuda::{Context, CudaError, Driver, ENV_LIBRARY, ForeignEvent, Memory, MemoryKind, WriteFlush};
use libloading::os::unix::Library;
use std::ffi::{CStr, CString, c_char, c_int};
use std::sync::Arc;
use stub::{compile_whole, run};

/// The stub's own functions. The library is the one that the driver was loaded from, since the path is.
struct Steer(Library);

impl Steer {
    fn new() -> Self {
        // SAFETY: the stub has no constructors.
        Self(unsafe { Library::new(std::env::var_os(ENV_LIBRARY).unwrap()) }.unwrap())
    }

    fn alloc(&self, bytes: usize, memory: c_int, device: c_int) -> u64 {
        // SAFETY: cuda_stub.c declares it so.
        unsafe {
            let f =
                self.0.get::<unsafe extern "C" fn(usize, c_int, c_int) -> u64>(b"kvxstub_alloc\0").unwrap();
            f(bytes, memory, device)
        }
    }

    fn make(&self, what: &str, device: c_int) -> u64 {
        let name = CString::new(format!("kvxstub_{what}")).unwrap();
        // SAFETY: as above, of both that are asked for.
        unsafe { self.0.get::<unsafe extern "C" fn(c_int) -> u64>(name.as_bytes_with_nul()).unwrap()(device) }
    }

    fn on(&self, what: &str, handle: u64) {
        let name = CString::new(format!("kvxstub_{what}")).unwrap();
        // SAFETY: as above.
        unsafe { self.0.get::<unsafe extern "C" fn(u64)>(name.as_bytes_with_nul()).unwrap()(handle) }
    }

    fn record(&self, event: u64, stream: u64) {
        // SAFETY: as above.
        unsafe { self.0.get::<unsafe extern "C" fn(u64, u64)>(b"kvxstub_record\0").unwrap()(event, stream) }
    }

    /// Whether the graph is whole.
    fn capture(&self, stream: u64, on: c_int) -> bool {
        // SAFETY: as above.
        unsafe {
            self.0.get::<unsafe extern "C" fn(u64, c_int) -> c_int>(b"kvxstub_capture\0").unwrap()(stream, on)
                == 1
        }
    }

    fn capture_mode(&self) -> c_int {
        // SAFETY: as above.
        unsafe { self.0.get::<unsafe extern "C" fn() -> c_int>(b"kvxstub_capture_mode\0").unwrap()() }
    }

    fn fail(&self, call: &str, code: c_int) {
        let name = CString::new(call).unwrap();
        type Fail = unsafe extern "C" fn(*const c_char, c_int, u64, u64);
        // SAFETY: as above.
        unsafe { self.0.get::<Fail>(b"kvxstub_fail\0").unwrap()(name.as_ptr(), code, 0, 1) }
    }

    fn calls(&self, call: &str) -> u64 {
        let name = CString::new(call).unwrap();
        // SAFETY: as above.
        unsafe {
            self.0.get::<unsafe extern "C" fn(*const c_char) -> u64>(b"kvxstub_calls\0").unwrap()(
                name.as_ptr(),
            )
        }
    }

    /// What the driver answers to who asks for memory as he is.
    fn allocates(&self) -> c_int {
        let mut at = 0;
        // SAFETY: cuda.h declares it so.
        unsafe {
            self.0.get::<unsafe extern "C" fn(*mut u64, usize) -> c_int>(b"cuMemAlloc_v2\0").unwrap()(
                &raw mut at,
                64,
            )
        }
    }

    fn depth(&self) -> c_int {
        // SAFETY: as above.
        unsafe { self.0.get::<unsafe extern "C" fn() -> c_int>(b"kvxstub_depth\0").unwrap()() }
    }

    fn retained(&self, device: c_int) -> c_int {
        // SAFETY: as above.
        unsafe { self.0.get::<unsafe extern "C" fn(c_int) -> c_int>(b"kvxstub_retained\0").unwrap()(device) }
    }

    /// Which rules of the driver were broken, a line each.
    fn faults(&self) -> String {
        let mut text: *const c_char = std::ptr::null();
        // SAFETY: as above; the text is static and ends in NUL.
        unsafe {
            self.0.get::<unsafe extern "C" fn(*mut *const c_char) -> u64>(b"kvxstub_faults\0").unwrap()(
                &raw mut text,
            );
            CStr::from_ptr(text).to_str().unwrap().to_owned()
        }
    }
}

type Call<'a> = &'a dyn Fn() -> Result<(), CudaError>;

fn context(ordinal: u32) -> Arc<Context> {
    Context::primary(Driver::load().unwrap(), ordinal).unwrap()
}

#[test]
fn whole_driver() {
    let dir = tempfile::tempdir().unwrap();
    let stub = |name, defines: &[&str]| compile_whole(dir.path(), name, defines);
    let whole = stub("whole.so", &[]);
    for case in [
        "case_memory",
        "case_events",
        "case_streams",
        "case_current",
        "case_capture",
        "case_wrong_context",
        "case_failing_calls",
        "case_flush",
    ] {
        run(case, &whole);
    }
    run("case_ordered", &stub("ordered.so", &["-DWRITES_ORDERING=100"]));
    run("case_ordered", &stub("no-rdma.so", &["-DRDMA=0"]));
    run("case_no_flush", &stub("no-flush.so", &["-DFLUSH_OPTIONS=2"]));
    let lacking =
        ["cuPointerGetAttributes", "cuStreamIsCapturing", "cuFlushGPUDirectRDMAWrites", "cuCtxGetDevice"];
    let gone: Vec<String> = lacking.iter().map(|call| format!("-D{call}=gone_{call}")).collect();
    run("case_lacking_calls", &stub("lacking.so", &gone.iter().map(String::as_str).collect::<Vec<_>>()));
    run("case_no_query", &stub("no-query.so", &["-DcuEventQuery=gone"]));
    run("case_no_mode", &stub("no-mode.so", &["-DcuThreadExchangeStreamCaptureMode=gone"]));
}

#[test]
#[ignore = "run by whole_driver"]
fn case_memory() {
    let (steer, driver) = (Steer::new(), Driver::load().unwrap());
    let at = |memory| {
        let address = steer.alloc(70_000, memory, 1);
        (address, driver.memory_at(address + 4096).unwrap())
    };
    let (address, device) = at(0);
    let expected = Memory {
        kind: MemoryKind::Device,
        device: Some(1),
        buffer_id: device.buffer_id,
        range_start: address,
        range_bytes: 70_000,
        ipc: true,
        fabric_handles: false,
        rdma: true,
    };
    assert_eq!(device, expected);
    assert!(device.is_exportable() && device.holds(address, 70_000) && !device.holds(address, 70_001));
    let (_, managed) = at(1);
    assert_eq!((managed.kind, managed.ipc), (MemoryKind::Managed, false));
    let (_, pinned) = at(2);
    assert_eq!((pinned.kind, pinned.device), (MemoryKind::Pinned, Some(1)));
    for (memory, exportable) in [(3, false), (4, false), (5, true), (6, false)] {
        let (_, found) = at(memory);
        assert_eq!((found.kind, found.is_exportable()), (MemoryKind::Device, exportable), "{memory}");
        assert_ne!(found.buffer_id, device.buffer_id);
    }
    let plain = [0u8; 8];
    let unknown = driver.memory_at(plain.as_ptr() as u64).unwrap();
    assert_eq!((unknown.kind, unknown.device, unknown.is_exportable()), (MemoryKind::Unknown, None, false));
    assert_eq!(steer.faults(), "");
}

#[test]
#[ignore = "run by whole_driver"]
fn case_events() {
    let (steer, context) = (Steer::new(), context(0));
    let (stream, raw) = (steer.make("stream", 0), steer.make("event", 0));
    // SAFETY: the stub's event lives until it is destroyed below.
    let event = unsafe { ForeignEvent::new(Arc::clone(&context), raw) };
    assert_eq!(event.is_done(), Ok(true), "never recorded");
    steer.on("start", stream);
    steer.record(raw, stream);
    assert_eq!(event.is_done(), Ok(false));
    steer.on("start", stream);
    steer.on("finish", stream);
    assert_eq!(event.is_done(), Ok(true), "what was queued after it does not matter");
    // From a thread without any context.
    let event = std::thread::spawn(move || {
        assert_eq!(event.is_done(), Ok(true));
        event
    })
    .join()
    .unwrap();
    assert_eq!((steer.depth(), steer.faults().as_str()), (0, ""));
    steer.on("destroy", raw);
    assert!(matches!(event.is_done(), Err(CudaError::Driver { call: "cuEventQuery", code: 400, .. })));
    assert_eq!(steer.faults(), "cuEventQuery of a handle that was destroyed\n");
    drop((event, context));
    assert_eq!(steer.retained(0), 0);
}

#[test]
#[ignore = "run by whole_driver"]
fn case_streams() {
    let (steer, context) = (Steer::new(), context(1));
    let stream = steer.make("stream", 1);
    // SAFETY: streams of the stub that live, and the default ones.
    let record = |stream| unsafe { context.record(stream) };
    assert_eq!(record(stream).unwrap().is_done(), Ok(true));
    steer.on("start", stream);
    let event = record(stream).unwrap();
    assert_eq!(event.is_done(), Ok(false));
    steer.on("start", stream);
    steer.on("finish", stream);
    assert_eq!(event.is_done(), Ok(true));
    for default in [0, 1, 2] {
        assert_eq!(record(default).unwrap().is_done(), Ok(true));
    }
    steer.capture(stream, 1);
    assert_eq!(record(stream).map(drop), Err(CudaError::Capturing));
    assert!(CudaError::Capturing.to_string().contains("CUDA graph"));
    assert_eq!(steer.faults(), "");
    // Each event of ours was given back, in its context.
    drop(event);
    assert_eq!(steer.calls("cuEventCreate"), steer.calls("cuEventDestroy"));
    assert_eq!((steer.depth(), steer.calls("cuStreamSynchronize")), (0, 0), "nothing waits");
}

#[test]
#[ignore = "run by whole_driver"]
fn case_current() {
    let (steer, driver) = (Steer::new(), Driver::load().unwrap());
    assert_eq!(driver.current_device(), Ok(None));
    let one = context(1);
    let current = one.make_current().unwrap();
    assert_eq!((driver.current_device(), current.context().ordinal()), (Ok(Some(1)), 1));
    let zero = context(0).make_current().unwrap();
    assert_eq!(driver.current_device(), Ok(Some(0)));
    assert_eq!(std::thread::spawn(|| driver.current_device()).join().unwrap(), Ok(None));
    drop(zero);
    assert_eq!((driver.current_device(), steer.depth()), (Ok(Some(1)), 1));
    drop(current);
    assert_eq!((driver.current_device(), steer.faults().as_str()), (Ok(None), ""));
    drop(one);
    assert_eq!((steer.retained(0), steer.retained(1)), (0, 0));
}

/// An engine captures its decode step on its own thread, in the mode that forbids others' calls; whoever records or asks meanwhile, on
/// that thread or another, spoils nothing and is not refused.
#[test]
#[ignore = "run by whole_driver"]
fn case_capture() {
    let (steer, context) = (Steer::new(), context(0));
    let (captured, other) = (steer.make("stream", 0), steer.make("stream", 0));
    steer.on("start", other);
    steer.capture(captured, 1);
    // SAFETY: the stub's streams live.
    let record = |stream| unsafe { context.record(stream) };
    let event = record(other).unwrap();
    assert_eq!(event.is_done(), Ok(false));
    assert_eq!(record(captured).map(drop), Err(CudaError::Capturing));
    std::thread::scope(|s| {
        s.spawn(|| {
            let current = context.make_current().unwrap();
            assert_eq!(event.is_done(), Ok(false));
            assert_eq!(steer.capture_mode(), 2, "what others call on this thread is let through too");
            drop(current);
            assert_eq!((steer.capture_mode(), steer.depth()), (0, 0));
            assert_eq!(event.is_done(), Ok(false));
            drop((record(other).unwrap(), self::context(1)));
        });
    });
    drop(event);
    assert_eq!(steer.faults(), "");
    assert!(steer.capture(captured, 0), "the graph is whole");
    assert_eq!(steer.capture_mode(), 0);
    // The stub does find it out.
    steer.capture(captured, 1);
    assert!(steer.allocates() == 900 && !steer.capture(captured, 0));
    assert_eq!(steer.faults(), "cuMemAlloc while a graph is captured\n");
}

#[test]
#[ignore = "run by whole_driver"]
fn case_wrong_context() {
    let (steer, context) = (Steer::new(), context(0));
    let (stream, raw) = (steer.make("stream", 1), steer.make("event", 1));
    // SAFETY: they live; that they are of another device is what this is about, and the stub finds out.
    let (event, recorded) = unsafe { (ForeignEvent::new(Arc::clone(&context), raw), context.record(stream)) };
    for (error, call) in
        [(event.is_done().map(drop), "cuEventQuery"), (recorded.map(drop), "cuStreamIsCapturing")]
    {
        let error = error.unwrap_err();
        assert_eq!(error.to_string(), format!("{call} failed with CUDA_ERROR_INVALID_CONTEXT (201)"));
    }
    assert_eq!(steer.faults().lines().count(), 2, "{}", steer.faults());
    // SAFETY: no event at all, which a driver may take amiss; the stub only refuses it.
    let null = unsafe { ForeignEvent::new(Arc::clone(&context), 0) };
    assert!(matches!(null.is_done(), Err(CudaError::Driver { code: 400, .. })));
}

#[test]
#[ignore = "run by whole_driver"]
fn case_failing_calls() {
    let (steer, driver, context) = (Steer::new(), Driver::load().unwrap(), context(0));
    // SAFETY: these live.
    let event = unsafe { ForeignEvent::new(Arc::clone(&context), steer.make("event", 0)) };
    let stream = steer.make("stream", 0);
    // SAFETY: as above.
    let record = || unsafe { context.record(stream) }.map(drop);
    let cases: [(&str, Call<'_>); 13] = [
        ("cuThreadExchangeStreamCaptureMode", &|| event.is_done().map(drop)),
        ("cuThreadExchangeStreamCaptureMode", &|| Context::primary(driver, 0).map(drop)),
        ("cuPointerGetAttributes", &|| driver.memory_at(4096).map(drop)),
        ("cuCtxGetDevice", &|| driver.current_device().map(drop)),
        ("cuEventQuery", &|| event.is_done().map(drop)),
        ("cuCtxPushCurrent", &|| event.is_done().map(drop)),
        ("cuStreamIsCapturing", &record),
        ("cuEventCreate", &record),
        ("cuEventRecord", &record),
        ("cuDeviceGetAttribute", &|| context.write_flush().map(drop)),
        ("cuFlushGPUDirectRDMAWrites", &|| context.flush_writes()),
        ("cuCtxPushCurrent", &|| context.make_current().map(drop)),
        ("cuDevicePrimaryCtxRetain", &|| Context::primary(driver, 1).map(drop)),
    ];
    for (name, call) in cases {
        steer.fail(name, 719);
        let error = call().expect_err(name);
        assert!(
            matches!(&error, CudaError::Driver { call, code: 719, .. } if *call == name),
            "{name}: {error}"
        );
        assert_eq!(call(), Ok(()), "{name}: once only");
        assert_eq!(steer.depth(), 0, "{name} left a context");
    }
    assert_eq!(steer.faults(), "");
    drop((event, context));
    assert_eq!(steer.calls("cuEventCreate") - 1, steer.calls("cuEventDestroy"));
    assert_eq!((steer.retained(0), steer.retained(1)), (0, 0));
}

#[test]
#[ignore = "run by whole_driver"]
fn case_flush() {
    let (steer, context) = (Steer::new(), context(0));
    assert_eq!(context.write_flush(), Ok(WriteFlush::ByHost));
    context.flush_writes().unwrap();
    assert_eq!((steer.calls("cuFlushGPUDirectRDMAWrites"), steer.faults().as_str()), (1, ""));
}

#[test]
#[ignore = "run by whole_driver"]
fn case_ordered() {
    assert_eq!(context(0).write_flush(), Ok(WriteFlush::NotNeeded));
}

#[test]
#[ignore = "run by whole_driver"]
fn case_no_flush() {
    assert_eq!(context(0).write_flush(), Ok(WriteFlush::Impossible));
}

#[test]
#[ignore = "run by whole_driver"]
fn case_lacking_calls() {
    let (driver, context) = (Driver::load().unwrap(), context(0));
    // SAFETY: the default stream.
    let recorded = unsafe { context.record(0) };
    let found = [
        driver.memory_at(0).map(drop),
        recorded.map(drop),
        context.flush_writes(),
        driver.current_device().map(drop),
    ];
    let expected =
        ["cuPointerGetAttributes", "cuStreamIsCapturing", "cuFlushGPUDirectRDMAWrites", "cuCtxGetDevice"];
    for (error, call) in found.into_iter().zip(expected) {
        assert!(matches!(error, Err(CudaError::MissingSymbol { symbol, .. }) if symbol == call), "{call}");
    }
    // What there is works.
    assert_eq!(driver.devices().unwrap().len(), 2);
}

#[test]
#[ignore = "run by whole_driver"]
fn case_no_query() {
    let error = Context::primary(Driver::load().unwrap(), 0).unwrap_err();
    assert!(matches!(error, CudaError::MissingSymbol { symbol: "cuEventQuery", .. }));
}

#[test]
#[ignore = "run by whole_driver"]
fn case_no_mode() {
    let error = Context::primary(Driver::load().unwrap(), 0).unwrap_err();
    assert!(matches!(error, CudaError::MissingSymbol { symbol: "cuThreadExchangeStreamCaptureMode", .. }));
}
