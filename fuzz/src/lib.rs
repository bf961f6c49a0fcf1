//! What the fuzzers run, and the property tests of kvxfer-proto too: each takes any bytes and panics when a promise
//! does not hold.

mod handshake;
mod input;
mod node;
mod wire;

pub use handshake::handshake;
pub use node::node;
pub use wire::wire;
