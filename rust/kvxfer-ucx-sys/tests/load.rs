//! Loads the UCX that this machine has.
#![allow(clippy::print_stderr)]

use kvxfer_ucx_sys::{Library, LoadError, Version};
use std::path::Path;

#[test]
fn the_process_gets_one_ucx() {
    let library = match Library::load(None) {
        Ok(library) => library,
        Err(LoadError::NotFound { tried }) if std::env::var_os("KVXFER_REQUIRE_UCX").is_none() => {
            eprintln!("skipped: no UCX on this machine ({tried:?})");
            return;
        }
        Err(error) => panic!("{error}"),
    };
    assert!(library.version() >= Version { major: 1, minor: 13, release: 0 }, "{library:?}");
    assert!(library.path().is_absolute(), "{library:?}");
    assert_eq!(library.status_string(0), "Success");
    // Loaded once: a wheel that is named later changes nothing.
    let again = Library::load(Some(Path::new("/nonexistent"))).expect("loaded already");
    assert!(std::ptr::eq(library, again));
}
