//! A stub driver, compiled here, in the place of libcuda. Each case is a process of its own: a process keeps the
//! driver that it has loaded.
#![allow(clippy::unwrap_used, clippy::expect_used)]

use kvxfer_cuda::{CudaError, Device, Driver, ENV_LIBRARY, devices};
use std::path::{Path, PathBuf};
use std::process::Command;

const STUB: &str = r#"
#include <stddef.h>
#include <string.h>
#ifndef INIT
#define INIT 0
#endif
#ifndef COUNT
#define COUNT 2
#endif
int cuInit(unsigned flags) { return flags == 0 ? INIT : 1; }
int cuGetErrorName(int code, const char **name) {
    *name = code == 100 ? "CUDA_ERROR_NO_DEVICE" : code == 999 ? "CUDA_ERROR_UNKNOWN" : NULL;
    return *name ? 0 : 1;
}
int cuDriverGetVersion(int *version) { *version = 12040; return 0; }
int cuDeviceGetCount(int *count) { *count = COUNT; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal + 40; return ordinal < 2 ? 0 : 101; }
int cuDeviceGetName(char *name, int len, int device) {
    /* As long as it may be, and without the NUL that the driver promises. */
    if (device == 41) memset(name, 'x', (size_t)len); else strncpy(name, "Stub GPU", (size_t)len);
    return 0;
}
#ifndef OLD
int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = (size_t)80 << 30; return device >= 40 ? 0 : 101; }
#endif
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    *value = attribute == 75 ? 9 : attribute == 76 ? 0 : -1;
    return device >= 40 ? 0 : 101;
}
"#;

fn compile(dir: &Path, name: &str, defines: &[&str]) -> PathBuf {
    let source = dir.join("stub.c");
    std::fs::write(&source, STUB).unwrap();
    let library = dir.join(name);
    let status = Command::new("cc")
        .args(["-shared", "-fPIC", "-o"])
        .arg(&library)
        .args(defines)
        .arg(&source)
        .status()
        .expect("these tests need a C compiler named cc");
    assert!(status.success());
    library
}

/// Runs one ignored test of this file in a process that has the variable set.
fn run(case: &str, library: &Path) {
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", case, "--ignored", "--nocapture"])
        .env(ENV_LIBRARY, library)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
}

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
