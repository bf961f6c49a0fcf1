//! Why a fabric failed.

use thiserror::Error;

/// A fabric's failure, with the values that matter.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub enum FabricError {
    /// The fabric is not to be had on this host.
    #[error("{fabric} is not available: {why}")]
    Unavailable {
        /// Which fabric.
        fabric: &'static str,
        /// Why, and what to do.
        why: String,
    },
    /// A piece leaves its region.
    #[error(
        "piece of {len} bytes at offset {offset} of {side} region {region} leaves the region of {region_len} bytes"
    )]
    OutOfBounds {
        /// `local` or `remote`.
        side: &'static str,
        /// Region index.
        region: u32,
        /// Offset in it.
        offset: u64,
        /// Length of the piece.
        len: u64,
        /// Length of the region (zero if there is none with this index).
        region_len: u64,
    },
    /// No endpoint has this number, or it is closed.
    #[error("no open endpoint {0}")]
    NoEndpoint(u32),
    /// Bytes from the peer cannot be understood.
    #[error("the peer's {what} cannot be used: {why}")]
    BadBlob {
        /// Which bytes.
        what: &'static str,
        /// Why.
        why: String,
    },
    /// The operating system or the transport said no.
    #[error("{call} failed: {why}")]
    Os {
        /// Which call.
        call: &'static str,
        /// Its error and what to do.
        why: String,
    },
    /// The endpoint broke or was closed under the operation.
    #[error("the endpoint is closed: {0}")]
    Closed(String),
    /// This fence cannot be promised on this transport.
    #[error("no fence on {transport}: {why}")]
    NoFence {
        /// Transport.
        transport: String,
        /// Why.
        why: String,
    },
}
