//! Launching, on a stub driver that notes what it is asked.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod stub;

use kvxfer_cuda::{Context, CopyTable, CudaError, Driver, PackKernels, Stream};
use std::sync::Arc;
use stub::{compile, run};

const TABLE: CopyTable = CopyTable { stripes: 0xffff_8000_0000_0000, first: 0x5000, count: 3, tiles: 20 };

fn context() -> Arc<Context> {
    Context::primary(Driver::load().unwrap(), 1).unwrap()
}

#[test]
fn a_launch_asks_the_driver_for_this_and_gives_all_of_it_back() {
    let dir = tempfile::tempdir().unwrap();
    let log = run("case_launch", &compile(dir.path(), "launch.so", &["-DVERSION=12080"]));
    let expected = [
        "retain 41",
        "load PTX 1, kernel 1",
        "function of 30d, named right 1",
        "stream 1",
        "launch f in 57, blocks 3",
        "of 256",
        "with ffff800000000000 5000 3",
        "event 2",
        "record e in 57",
        "ask event e",
        "ask event e",
        "wait for stream 57",
        "destroy event e",
        "destroy stream 57",
        "unload 30d",
        "release 41, 0 left",
    ];
    assert_eq!(log.lines().collect::<Vec<_>>(), expected);
}

#[test]
#[ignore = "run by a_launch_asks_the_driver_for_this_and_gives_all_of_it_back"]
fn case_launch() {
    let context = context();
    let kernels = PackKernels::load(&context).unwrap();
    let stream = Stream::new(&context).unwrap();
    // From another thread than the one that made them: each call makes the context current by itself.
    let (kernels, stream, event) = std::thread::spawn(move || {
        let nothing = CopyTable { count: 0, tiles: 0, ..TABLE };
        // SAFETY: the stub copies nothing.
        unsafe {
            kernels.launch(&stream, &nothing, 8).unwrap();
            kernels.launch(&stream, &TABLE, 8).unwrap();
        }
        let event = stream.record().unwrap();
        (kernels, stream, event)
    })
    .join()
    .unwrap();
    assert_eq!(event.is_done(), Ok(false));
    assert_eq!(event.is_done(), Ok(true));
    stream.synchronize().unwrap();
    drop((event, stream, kernels, context));
}

#[test]
fn what_the_driver_refuses_leaves_nothing_behind() {
    let dir = tempfile::tempdir().unwrap();
    let stub = |name, define| compile(dir.path(), name, &["-DVERSION=13000", define]);
    let log = run("case_no_load", &stub("load.so", "-DLOAD=999"));
    assert_eq!(log.lines().collect::<Vec<_>>(), ["retain 41", "load PTX 1, kernel 1", "release 41, 0 left"]);
    let log = run("case_no_function", &stub("function.so", "-DFUNCTION=999"));
    assert_eq!(log.lines().rev().take(2).collect::<Vec<_>>(), ["release 41, 0 left", "unload 30d"]);
    let log = run("case_no_record", &stub("record.so", "-DRECORD=999"));
    assert!(
        log.ends_with("record e in 57\ndestroy event e\ndestroy stream 57\nrelease 41, 0 left\n"),
        "{log}"
    );
    run("case_no_launch", &stub("no-launch.so", "-DLAUNCH=999"));
}

#[test]
#[ignore = "run by what_the_driver_refuses_leaves_nothing_behind"]
fn case_no_load() {
    let error = PackKernels::load(&context()).unwrap_err();
    assert_eq!(error.to_string(), "cuModuleLoadData failed with CUDA_ERROR_UNKNOWN (999)");
}

#[test]
#[ignore = "run by what_the_driver_refuses_leaves_nothing_behind"]
fn case_no_function() {
    let error = PackKernels::load(&context()).unwrap_err();
    assert!(matches!(error, CudaError::Driver { call: "cuModuleGetFunction", code: 999, .. }));
}

#[test]
#[ignore = "run by what_the_driver_refuses_leaves_nothing_behind"]
fn case_no_record() {
    let stream = Stream::new(&context()).unwrap();
    assert!(matches!(stream.record(), Err(CudaError::Driver { call: "cuEventRecord", .. })));
}

#[test]
#[ignore = "run by what_the_driver_refuses_leaves_nothing_behind"]
fn case_no_launch() {
    let context = context();
    let (kernels, stream) = (PackKernels::load(&context).unwrap(), Stream::new(&context).unwrap());
    // SAFETY: the stub copies nothing.
    let error = unsafe { kernels.launch(&stream, &TABLE, 8) }.unwrap_err();
    assert!(matches!(error, CudaError::Driver { call: "cuLaunchKernel", .. }));
}

#[test]
fn drivers_that_cannot_launch_say_so_and_still_list_their_devices() {
    let dir = tempfile::tempdir().unwrap();
    run("case_old_driver", &compile(dir.path(), "old.so", &["-DVERSION=12070"]));
    run("case_lacking", &compile(dir.path(), "lacking.so", &["-DNO_LAUNCH"]));
}

#[test]
#[ignore = "run by drivers_that_cannot_launch_say_so_and_still_list_their_devices"]
fn case_old_driver() {
    let error = PackKernels::load(&context()).unwrap_err();
    assert_eq!(error, CudaError::OldDriver { knows: (12, 7), needs: (12, 8) });
    let text = error.to_string();
    assert_eq!(text, "the driver knows CUDA 12.7, and kvxfer's kernels need 12.8: update NVIDIA's driver");
}

#[test]
#[ignore = "run by drivers_that_cannot_launch_say_so_and_still_list_their_devices"]
fn case_lacking() {
    let driver = Driver::load().unwrap();
    assert_eq!(driver.devices().unwrap().len(), 2);
    let error = Context::primary(driver, 0).unwrap_err();
    assert!(matches!(error, CudaError::MissingSymbol { symbol: "cuDevicePrimaryCtxRetain", .. }));
}
