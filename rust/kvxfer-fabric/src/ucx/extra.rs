//! Memory that a fabric gets after it was made, and that peers hear of one by one: staging rings and the buffers behind them.

use super::blob::{self, MemDesc};
use super::{Registered, UcxFabric, UcxPool, register};
use crate::shm::ShmPool;
use crate::{Backing, EpId, FabricError, MemKind, RegionSpan};
use std::sync::Arc;

impl UcxFabric {
    /// Allocates registered memory and makes it one more region of ours. Returns its number, which follows those of the
    /// regions that there are, and where it is. It lives as long as the fabric or the span.
    ///
    /// # Errors
    /// When there is no memory, or it cannot be registered.
    pub fn add_memory(&mut self, bytes: u64) -> Result<(u32, RegionSpan), FabricError> {
        if bytes == 0 {
            return Err(FabricError::Os { call: "ucp_mem_map", why: "memory of zero bytes".into() });
        }
        let backing = UcxPool::alloc_in(self.worker.context(), bytes)?;
        self.add_backing(backing, bytes)
    }

    /// As [`UcxFabric::add_memory`], but of memory that UCX has not allocated, as an engine's is.
    ///
    /// # Errors
    /// As [`UcxFabric::add_memory`].
    pub fn add_plain_memory(&mut self, bytes: u64) -> Result<(u32, RegionSpan), FabricError> {
        let (region, span) = self.add_backing(ShmPool::alloc(bytes)?, bytes)?;
        self.plain.extend(span.backing.clone());
        Ok((region, span))
    }

    /// Whether there are regions in memory that UCX has not allocated: to those its shared memory does not reach.
    #[must_use]
    pub fn has_plain_memory(&self) -> bool {
        self.locals.iter().any(|l| l.len > 0 && matches!(self.mems.get(l.mem), Some(Registered::Own(_))))
    }

    fn add_backing(
        &mut self,
        backing: Arc<dyn Backing>,
        bytes: u64,
    ) -> Result<(u32, RegionSpan), FabricError> {
        let span =
            RegionSpan { addr: backing.addr(), len: bytes, kind: MemKind::Host, backing: Some(backing) };
        let region = u32::try_from(self.locals.len()).map_err(|_| FabricError::Os {
            call: "ucp_mem_map",
            why: format!("{} regions are too many", self.locals.len()),
        })?;
        let added = register(&self.worker, std::slice::from_ref(&span), &mut self.mems)?;
        self.locals.extend(added);
        Ok((region, span))
    }

    /// What a peer needs to write to such a region of ours. For authenticated peers only.
    ///
    /// # Errors
    /// When there is no such region.
    pub fn export_memory(&self, region: u32) -> Result<Vec<u8>, FabricError> {
        let local = usize::try_from(region).ok().and_then(|r| self.locals.get(r));
        let mem = local.and_then(|l| self.mems.get(l.mem)?.mem());
        let (Some(local), Some(mem)) = (local, mem) else {
            return Err(FabricError::OutOfBounds { side: "local", region, offset: 0, len: 0, region_len: 0 });
        };
        Ok(MemDesc { base: local.addr, len: local.len, key: mem.pack_rkey()? }.encode())
    }

    /// Makes memory that a peer exported one more of its regions on this endpoint, over which we write. Returns the
    /// number by which pieces name it, and its length.
    ///
    /// # Errors
    /// When the blob is malformed, or we do not write on that endpoint.
    pub fn import_memory(&mut self, ep: EpId, blob: &[u8]) -> Result<(u32, u64), FabricError> {
        let desc = MemDesc::decode(blob)?;
        let link = self.find(ep)?;
        link.writable()?;
        let end = link.end.as_mut().ok_or(FabricError::NoEndpoint(ep.0))?;
        // SAFETY: the key is what the peer's fabric packed (peers are authenticated), with padding.
        let key = unsafe { end.endpoint.unpack_rkey(&blob::padded(&desc.key))? };
        let region = end.add_remote(desc.base, desc.len, key).ok_or(FabricError::NoEndpoint(ep.0))?;
        if let Some(addr) = end.near(region, 0, desc.len) {
            self.warmer.add(ep, addr, desc.len);
        }
        Ok((region, desc.len))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn damaged_descriptions_of_memory_are_refused() {
        let good = MemDesc { base: 1 << 40, len: 4096, key: vec![7; 40] };
        let bytes = good.encode();
        assert_eq!(MemDesc::decode(&bytes).unwrap(), good);
        for n in 0..bytes.len() {
            assert!(MemDesc::decode(&bytes[..n]).is_err(), "{n} bytes of it");
        }
        assert!(MemDesc::decode(&[bytes.as_slice(), &[0]].concat()).is_err());
        for bad in [
            MemDesc { len: 0, ..good.clone() },
            MemDesc { base: u64::MAX - 9, ..good.clone() },
            MemDesc { key: Vec::new(), ..good },
        ] {
            assert!(MemDesc::decode(&bad.encode()).is_err(), "{bad:?}");
        }
    }
}
