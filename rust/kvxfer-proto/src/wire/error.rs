//! What can be wrong with bytes, or with a frame that does not fit into them.

use crate::error::{Reason, ReasonKind};
use thiserror::Error;

/// Why bytes are no frame, or a frame cannot be put into bytes. After one of these a stream has no meaning any
/// more: close the connection.
#[derive(Clone, PartialEq, Eq, Hash, Debug, Error)]
pub enum WireError {
    /// The frame announces more bytes than this phase of the connection allows.
    #[error("frame of {len} bytes after the header, at most {cap} allowed here")]
    FrameTooLarge {
        /// Announced (or encoded) length after the header.
        len: u64,
        /// The cap that applied.
        cap: usize,
    },
    /// A complete frame was promised and bytes are missing.
    #[error("frame cut off: {have} of {need} bytes")]
    Truncated {
        /// Bytes there.
        have: usize,
        /// Bytes needed.
        need: usize,
    },
    /// Bytes follow the frame that should be the only one.
    #[error("{extra} bytes after the end of the frame")]
    TrailingBytes {
        /// How many.
        extra: usize,
    },
    /// A version that this codec does not read.
    #[error("frame kind {kind} in wire version {got}, this side reads version {want}")]
    Version {
        /// The frame's kind.
        kind: u8,
        /// The version in its header.
        got: u8,
        /// The version read here.
        want: u8,
    },
    /// Header flags, of which version 1 has none.
    #[error("unknown header flags {flags:#06x}")]
    Flags {
        /// The flags.
        flags: u16,
    },
    /// A field claims more bytes than its message has left.
    #[error("{message}: field tag {tag} claims {len} bytes, {left} left")]
    Overrun {
        /// The message or struct.
        message: &'static str,
        /// The field's tag.
        tag: u16,
        /// What it claims.
        len: u64,
        /// What there is.
        left: usize,
    },
    /// Too few bytes are left for the head of a field.
    #[error("{message}: {left} stray bytes after the last field")]
    Stray {
        /// The message or struct.
        message: &'static str,
        /// How many.
        left: usize,
    },
    /// A field that must be there is not.
    #[error("{message}: field `{field}` is missing")]
    Missing {
        /// The message or struct.
        message: &'static str,
        /// The field.
        field: &'static str,
    },
    /// A field is there twice.
    #[error("{message}: field `{field}` appears twice")]
    Repeated {
        /// The message or struct.
        message: &'static str,
        /// The field.
        field: &'static str,
    },
    /// A field has a length that its type does not.
    #[error("{message}: field `{field}` has {len} bytes, its type takes {want}")]
    Length {
        /// The message or struct.
        message: &'static str,
        /// The field.
        field: &'static str,
        /// Bytes there.
        len: usize,
        /// What the type takes (for lists: the size of which it must be a multiple).
        want: usize,
    },
    /// A number that means nothing for this field.
    #[error("{message}: field `{field}` cannot be {value}")]
    Value {
        /// The message or struct.
        message: &'static str,
        /// The field.
        field: &'static str,
        /// The number.
        value: u64,
    },
    /// Text that is not UTF-8.
    #[error("{message}: field `{field}` is not UTF-8")]
    NotUtf8 {
        /// The message or struct.
        message: &'static str,
        /// The field.
        field: &'static str,
    },
    /// More bytes or elements than this field may have.
    #[error("{message}: field `{field}` has {count} {unit}, at most {max} allowed")]
    TooMany {
        /// The message or struct.
        message: &'static str,
        /// The field.
        field: &'static str,
        /// How many.
        count: usize,
        /// How many may be.
        max: usize,
        /// Of what: `bytes`, `elements`.
        unit: &'static str,
    },
}

impl From<WireError> for Reason {
    fn from(e: WireError) -> Self {
        Self::new(ReasonKind::ProtocolError, format!("control channel: {e}"))
    }
}
