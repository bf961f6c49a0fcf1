//! Bindings of the part of libucp that kvxfer needs, loaded at run time.
//!
//! * [`bindings`]: types, constants and [`bindings::Api`], a struct of function pointers; generated once from
//!   UCX 1.22's headers and committed.
//! * [`load`]: finds libucp, checks that the process has one copy of UCX, and hands out the [`Library`].
//! * [`status`]: what UCX's headers do with macros.
//!
//! The crate builds and loads with no UCX present; UCX is looked for when [`Library::load`] is called.

pub mod load;
pub mod status;

/// Generated; see `regenerate.sh`.
#[rustfmt::skip]
#[allow(
    missing_docs,
    non_camel_case_types,
    non_upper_case_globals,
    unreachable_pub,
    unused_qualifications,
    unnecessary_transmutes,
    clippy::all,
    clippy::pedantic,
    clippy::expect_used,
    clippy::undocumented_unsafe_blocks
)]
pub mod bindings;

pub use load::{Library, LoadError, Version};
