//! A look into a peer's memory that UCX has mapped here.

use super::UcxFabric;
use crate::EpId;
use std::marker::PhantomData;

/// A range of a peer's memory that this process has mapped and may write. It borrows the fabric, so that the endpoint whose key
/// keeps the mapping is not closed meanwhile.
#[derive(Debug)]
pub struct Window<'a> {
    addr: usize,
    len: u64,
    _fabric: PhantomData<&'a mut UcxFabric>,
}

impl Window<'_> {
    pub(crate) fn addr(&self) -> usize {
        self.addr
    }

    pub(crate) fn len(&self) -> u64 {
        self.len
    }
}

impl UcxFabric {
    /// `len` bytes at `off` of a region of the peer's, if they are mapped here and we may write over this endpoint now.
    pub fn window(&mut self, ep: EpId, region: u32, off: u64, len: u64) -> Option<Window<'_>> {
        let addr = self.links.get(&ep)?.writable().ok()?.near(region, off, len)?;
        Some(Window { addr, len, _fabric: PhantomData })
    }
}
