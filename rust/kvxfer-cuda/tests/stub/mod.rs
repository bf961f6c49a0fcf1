//! A stub driver, compiled here, in the place of libcuda. Each case is a process of its own: a process keeps the driver
//! that it has loaded.

use kvxfer_cuda::ENV_LIBRARY;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Names the file into which the stub writes what it is asked to do.
pub(crate) const ENV_LOG: &str = "KVXFER_STUB_LOG";

/// Builds the stub with these macros.
#[allow(
    dead_code,
    reason = "each file of tests has its own copy of this module, and some want the other stub"
)]
pub(crate) fn compile(dir: &Path, name: &str, defines: &[&str]) -> PathBuf {
    build("tests/stub/driver.c", dir, name, defines)
}

/// Builds the stub that plays a whole driver, with these macros.
#[allow(dead_code, reason = "as above")]
pub(crate) fn compile_whole(dir: &Path, name: &str, defines: &[&str]) -> PathBuf {
    build("../../cuda/stub/cuda_stub.c", dir, name, defines)
}

fn build(source: &str, dir: &Path, name: &str, defines: &[&str]) -> PathBuf {
    let library = dir.join(name);
    let status = Command::new("cc")
        .args(["-shared", "-fPIC", "-pthread", "-o"])
        .arg(&library)
        .args(defines)
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join(source))
        .status()
        .expect("these tests need a C compiler named cc");
    assert!(status.success());
    library
}

/// Runs one ignored test of the caller's file in a process that has the stub for its driver, and gives the stub's log.
pub(crate) fn run(case: &str, library: &Path) -> String {
    let log = library.with_extension("log");
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", case, "--ignored", "--nocapture"])
        .env(ENV_LIBRARY, library)
        .env(ENV_LOG, &log)
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success() && text.contains("1 passed"),
        "{text}{}",
        String::from_utf8_lossy(&output.stderr)
    );
    std::fs::read_to_string(log).unwrap_or_default()
}
