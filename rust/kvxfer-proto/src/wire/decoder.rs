//! Frames out of a stream of bytes.

use super::error::WireError;
use super::{Decoded, HEADER_BYTES, Header, MAX_FRAME_BYTES, MAX_HANDSHAKE_BYTES, body_len};

/// A buffer that has grown past this for one large frame is given back once it is empty.
const KEEP_BYTES: usize = 1 << 20;

/// Takes bytes as they come and gives frames. Starts with the cap for peers that are not authenticated.
///
/// An error is final: the same one comes back for every later call, since nobody knows where a frame begins.
#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub struct Decoder {
    buf: Vec<u8>,
    /// Bytes at the front of `buf` that are used up.
    start: usize,
    cap: usize,
    failed: Option<WireError>,
}

impl Default for Decoder {
    fn default() -> Self {
        Self { buf: Vec::new(), start: 0, cap: MAX_HANDSHAKE_BYTES, failed: None }
    }
}

impl Decoder {
    /// An empty one with the cap for peers that are not authenticated.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Most bytes after the header from now on; also for a frame whose start is here already.
    pub fn set_cap(&mut self, cap: usize) {
        self.cap = cap.min(MAX_FRAME_BYTES);
    }

    /// Adds bytes that came. Take all frames out before feeding more: the buffer holds whatever it is fed.
    pub fn feed(&mut self, bytes: &[u8]) {
        if self.failed.is_some() {
            return;
        }
        // Moving only once half is used up makes each byte move at most once on average.
        if self.start > 0 && self.start >= self.buf.len() - self.start {
            self.buf.drain(..self.start);
            self.start = 0;
            if self.buf.is_empty() && self.buf.capacity() > KEEP_BYTES {
                self.buf = Vec::new();
            }
        }
        self.buf.extend_from_slice(bytes);
    }

    /// Bytes that are here and not used up.
    #[must_use]
    pub fn pending(&self) -> &[u8] {
        self.buf.get(self.start..).unwrap_or_default()
    }

    /// Bytes that the buffer takes up.
    #[must_use]
    pub fn capacity(&self) -> usize {
        self.buf.capacity()
    }

    /// The next whole frame's bytes, header included, or `None` if more must be fed first.
    ///
    /// # Errors
    /// The bytes are not a frame, or the frame is over the cap; said as soon as the bytes that show it are here.
    pub fn next_raw(&mut self) -> Result<Option<&[u8]>, WireError> {
        if let Some(e) = &self.failed {
            return Err(e.clone());
        }
        match Self::frame_len(self.pending(), self.cap) {
            Ok(Some(len)) => {
                let start = self.start;
                self.start += len;
                Ok(self.buf.get(start..self.start))
            }
            Ok(None) => Ok(None),
            Err(e) => Err(self.fail(e)),
        }
    }

    /// The next whole frame, or `None` if more must be fed first.
    ///
    /// # Errors
    /// As [`Decoder::next_raw`], and for a body that is not what its kind says.
    pub fn next_frame(&mut self) -> Result<Option<Decoded>, WireError> {
        let decoded = match self.next_raw()? {
            Some(raw) => super::decode_frame(raw),
            None => return Ok(None),
        };
        decoded.map(Some).map_err(|e| self.fail(e))
    }

    fn fail(&mut self, e: WireError) -> WireError {
        self.failed = Some(e.clone());
        e
    }

    /// Length of the frame at the start of `bytes`, header included, if all of it is here.
    fn frame_len(bytes: &[u8], cap: usize) -> Result<Option<usize>, WireError> {
        // Four bytes are enough to refuse a peer that is not kvxfer and would never send thirty-two.
        if let Some((len, _)) = bytes.split_first_chunk::<4>() {
            let len = u32::from_le_bytes(*len);
            if usize::try_from(len).map_or(true, |len| len > cap) {
                return Err(WireError::FrameTooLarge { len: len.into(), cap });
            }
        }
        let Some(header) = Header::read(bytes)? else { return Ok(None) };
        let whole = body_len(header, cap)?.saturating_add(HEADER_BYTES);
        Ok((bytes.len() >= whole).then_some(whole))
    }
}
