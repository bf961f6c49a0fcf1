//! Devices, and drivers that are missing, old or broken, on a stub.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod stub;

use kvxfer_cuda::{CudaError, Device, Driver, ENV_LIBRARY, devices};
use stub::{compile, run};

#[test]
fn every_case() {
    let dir = tempfile::tempdir().unwrap();
    run("case_two_devices", &compile(dir.path(), "two.so", &[]));
    run("case_no_device", &compile(dir.path(), "none.so", &["-DINIT=100"]));
    run("case_unknown", &compile(dir.path(), "unknown.so", &["-DINIT=999"]));
    run("case_no_name", &compile(dir.path(), "noname.so", &["-DINIT=7"]));
    run("case_negative", &compile(dir.path(), "negative.so", &["-DCOUNT=-3"]));
    run("case_bad_ordinal", &compile(dir.path(), "ordinal.so", &["-DCOUNT=3"]));
    run("case_old", &compile(dir.path(), "old.so", &["-DOLD"]));
    run("case_missing", &dir.path().join("not-there.so"));
}

#[test]
#[ignore = "run by every_case"]
fn case_two_devices() {
    let found = devices().unwrap();
    let expected =
        Device { ordinal: 0, name: "Stub GPU".to_owned(), total_bytes: 80 << 30, compute_capability: (9, 0) };
    assert_eq!(found.len(), 2);
    assert_eq!(found[0], expected);
    assert_eq!((found[1].ordinal, found[1].name.as_str()), (1, "x".repeat(256).as_str()));
    let driver = Driver::load().unwrap();
    assert_eq!(driver.version(), Ok((12, 4)));
    assert_eq!(Some(driver.library()), std::env::var_os(ENV_LIBRARY).as_deref());
}

#[test]
#[ignore = "run by every_case"]
fn case_no_device() {
    assert_eq!(devices(), Ok(Vec::new()));
    assert!(matches!(Driver::load(), Err(CudaError::Driver { call: "cuInit", code: 100, .. })));
}

#[test]
#[ignore = "run by every_case"]
fn case_unknown() {
    let error = devices().unwrap_err();
    assert_eq!(error.to_string(), "cuInit failed with CUDA_ERROR_UNKNOWN (999)");
}

#[test]
#[ignore = "run by every_case"]
fn case_no_name() {
    let error = devices().unwrap_err();
    assert_eq!(error.to_string(), "cuInit failed with an error that this driver has no name for (7)");
}

#[test]
#[ignore = "run by every_case"]
fn case_negative() {
    assert_eq!(devices(), Err(CudaError::BadAnswer { call: "cuDeviceGetCount", value: -3 }));
}

#[test]
#[ignore = "run by every_case"]
fn case_bad_ordinal() {
    assert!(matches!(devices(), Err(CudaError::Driver { call: "cuDeviceGet", code: 101, .. })));
}

#[test]
#[ignore = "run by every_case"]
fn case_old() {
    assert!(matches!(devices(), Err(CudaError::MissingSymbol { symbol: "cuDeviceTotalMem_v2", .. })));
}

#[test]
#[ignore = "run by every_case"]
fn case_missing() {
    assert!(matches!(devices(), Err(CudaError::NoLibrary { .. })));
}
