//! UCX: RDMA, CUDA IPC, TCP and shared memory, through a libucp that is loaded at run time.
//!
//! The sender writes: one `ucp_put_nbx` a piece, then a flush. Where UCX has the peer's memory mapped here (its shared
//! memory), the pieces are copied there by ourselves, which is what UCX would do, but around the cache. A fabric has one UCX worker and is used by the
//! thread that made it; the UCX context below is the process's, so that memory can be allocated before any agent
//! exists ([`UcxPool`]). `docs/ucx-notes.md` has the measurements behind the settings.

mod blob;
mod context;
mod extra;
mod fence;
mod greet;
mod link;
mod near;
mod note;
mod probe;
mod safe;
mod warm;
mod window;
mod worker;

pub use context::{DEFAULT_TLS, Devices, UcxOptions, UcxPool};
pub use probe::{OneSided, ProbeTarget, ProbeWriter, UcxReport, one_sided_probe, probe};
pub use window::Window;

use crate::{Completion, EndRole, EpId, Fabric, FabricError, MemKind, Mover, Piece, RegionSpan, stream};
use blob::{Blob, MemDesc, RegionDesc};
use context::Shared;
use link::{Ending, FenceJob, Link, Peer};
use safe::Mem;
use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::{BorrowedFd, RawFd};
use std::rc::Rc;
use std::sync::Arc;
use std::time::{Duration, Instant};
use warm::Warmer;
use worker::{ErrorCell, PutParams, Request, Rkey, Worker};

/// Puts between two looks at the worker, so that what waits in UCX stays bounded.
const PUTS_PER_PROGRESS: usize = 64;
/// The memory that peers write when they connect.
const SCRATCH_BYTES: u64 = 64;
/// How long a fabric's end waits for its endpoints to close.
const END_WAIT: Duration = Duration::from_secs(1);

/// Memory of ours that peers can write.
enum Registered {
    /// A pool's, registered when it was allocated.
    Pool(Arc<dyn crate::Backing>),
    Own(Mem),
}

impl Registered {
    fn mem(&self) -> Option<&Mem> {
        match self {
            Self::Own(mem) => Some(mem),
            Self::Pool(backing) => pool_mem(backing),
        }
    }
}

fn pool_mem(backing: &Arc<dyn crate::Backing>) -> Option<&Mem> {
    backing.as_any().downcast_ref::<UcxPool>().map(UcxPool::mem)
}

/// A region of ours: where it is, and in which registered memory.
struct Local {
    addr: u64,
    len: u64,
    mem: usize,
    /// The CPU's, which may read it.
    host: bool,
}

/// The fabric. Fields are dropped in this order, and the order matters: endpoints and keys, then the worker, then
/// what UCX could call back into, then the memory.
pub struct UcxFabric {
    links: BTreeMap<EpId, Link>,
    peers: BTreeMap<u128, Peer>,
    endings: Vec<Ending>,
    fences: Vec<FenceJob>,
    notes_out: Vec<(Request, Vec<u8>)>,
    /// Keys that a cancelled put may still name.
    old_keys: Vec<Rkey>,
    worker: Rc<Worker>,
    #[allow(clippy::vec_box)] // UCX holds the addresses of the boxes' insides
    old_cells: Vec<Box<ErrorCell>>,
    params: PutParams,
    warmer: Warmer,
    locals: Vec<Local>,
    mems: Vec<Registered>,
    /// Memory of ours that is in `mems` as an engine's would be: dropped after it.
    plain: Vec<Arc<dyn crate::Backing>>,
    /// Index in `mems` of the word that peers write when they connect.
    scratch: usize,
    id: u128,
    next_token: u64,
    blob: Vec<u8>,
    event_fd: Option<RawFd>,
    parked: Vec<link::Parked>,
    /// Peers to which a connection failed.
    behind: BTreeSet<u128>,
    out: Vec<Completion>,
    shared: Arc<Shared>,
}

impl std::fmt::Debug for UcxFabric {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("UcxFabric")
            .field("library", self.worker.lib())
            .field("settings", &self.shared.settings)
            .field("regions", &self.locals.len())
            .field("endpoints", &self.links.keys())
            .field("closing", &self.endings.len())
            .field("fences", &self.fences.len())
            .field("peers", &self.peers.len())
            .finish_non_exhaustive()
    }
}

impl UcxFabric {
    /// A fabric with these regions, for the calling thread. Regions that touch or overlap are registered as one.
    ///
    /// # Errors
    /// No UCX, no context, or memory that cannot be registered.
    pub fn new(regions: &[RegionSpan], options: &UcxOptions) -> Result<Self, FabricError> {
        let shared = context::shared(options)?;
        let worker = Worker::new(&shared.context, note::ID)?;
        let event_fd = worker.event_fd()?;
        let mut mems = Vec::new();
        let locals = register(&worker, regions, &mut mems)?;
        mems.push(Registered::Own(Mem::alloc(&shared.context, SCRATCH_BYTES)?));
        let scratch = mems.len() - 1;
        let mut id = [0; 16];
        getrandom::fill(&mut id).map_err(|e| FabricError::Os { call: "getrandom", why: e.to_string() })?;
        let id = u128::from_le_bytes(id);
        let blob = describe(&worker, id, &mems, &locals)?;
        Ok(Self {
            links: BTreeMap::new(),
            peers: BTreeMap::new(),
            endings: Vec::new(),
            fences: Vec::new(),
            notes_out: Vec::new(),
            old_keys: Vec::new(),
            worker,
            old_cells: Vec::new(),
            params: PutParams::new(),
            warmer: Warmer::default(),
            locals,
            mems,
            plain: Vec::new(),
            scratch,
            id,
            next_token: 0,
            blob,
            event_fd: Some(event_fd),
            parked: Vec::new(),
            behind: BTreeSet::new(),
            out: Vec::new(),
            shared,
        })
    }

    /// The transports that an endpoint uses, as far as UCX says.
    pub fn transports(&self, ep: EpId) -> Vec<String> {
        self.links.get(&ep).map(Link::transports).unwrap_or_default()
    }

    /// The settings that kvxfer changed from UCX's defaults, as `KEY=value`.
    pub fn settings(&self) -> &[String] {
        &self.shared.settings
    }

    /// Number of registrations made, without the pools' own.
    pub fn registrations(&self) -> usize {
        self.mems.iter().filter(|m| matches!(m, Registered::Own(_))).count()
    }

    /// Whether the peer's UCX speaks as ours does. UCX's messages change between minor versions: 1.13 crashes at what
    /// 1.22 sends.
    fn same_ucx(&self, peer: &Blob) -> bool {
        let ours = self.worker.lib().version();
        (peer.ucx.major, peer.ucx.minor) == (ours.major, ours.minor)
    }

    fn find(&mut self, ep: EpId) -> Result<&mut Link, FabricError> {
        self.links.get_mut(&ep).ok_or(FabricError::NoEndpoint(ep.0))
    }
}

/// Registers each distinct span once; appends to `mems`.
fn register(
    worker: &Rc<Worker>,
    regions: &[RegionSpan],
    mems: &mut Vec<Registered>,
) -> Result<Vec<Local>, FabricError> {
    let mut locals = Vec::with_capacity(regions.len());
    let mut spans: Vec<(u64, u64, MemKind, usize)> = Vec::new();
    let mut pools: BTreeMap<u64, usize> = BTreeMap::new();
    for (i, region) in regions.iter().enumerate() {
        let end = region.addr.checked_add(region.len).ok_or_else(|| FabricError::Os {
            call: "ucp_mem_map",
            why: format!("region {i} of {} bytes at {:#x} passes the end of memory", region.len, region.addr),
        })?;
        if matches!(region.kind, MemKind::Device(_)) && !worker.context().knows_cuda() {
            return Err(FabricError::Unavailable {
                fabric: "ucx",
                why: format!("region {i} is CUDA memory, and {:?} has no CUDA transport", worker.lib()),
            });
        }
        let host = matches!(region.kind, MemKind::Host);
        locals.push(Local { addr: region.addr, len: region.len, mem: usize::MAX, host });
        let pool = region.backing.as_ref().filter(|b| {
            pool_mem(b).is_some_and(|mem| {
                Arc::ptr_eq(mem.context(), worker.context())
                    && mem.addr() <= region.addr
                    && mem.addr().checked_add(mem.len()).is_some_and(|pool_end| end <= pool_end)
            })
        });
        if let Some(pool) = pool {
            let index = *pools.entry(pool.addr()).or_insert_with(|| {
                mems.push(Registered::Pool(Arc::clone(pool)));
                mems.len() - 1
            });
            locals[i].mem = index;
        } else if region.len > 0 {
            spans.push((region.addr, end, region.kind, i));
        }
    }
    spans.sort_unstable_by_key(|(start, end, _, _)| (*start, *end));
    let mut rest = spans.as_slice();
    while let Some(((start, first_end, kind, _), _)) = rest.split_first() {
        let mut end = *first_end;
        // Device allocations that merely touch are separate ones to CUDA.
        let touching = matches!(kind, MemKind::Host);
        let n = rest
            .iter()
            .take_while(|(s, e, k, _)| {
                let joins = k == kind && (*s < end || (touching && *s == end));
                if joins || *s == *start {
                    end = end.max(*e);
                }
                joins || *s == *start
            })
            .count();
        let (group, others) = rest.split_at(n.max(1));
        // SAFETY: the owner of the regions keeps them alive for as long as the fabric lives (RegionSpan's contract).
        let mem = unsafe { Mem::register(worker.context(), *start, end - *start, *kind)? };
        mems.push(Registered::Own(mem));
        for (_, _, _, region) in group {
            locals[*region].mem = mems.len() - 1;
        }
        rest = others;
    }
    // Empty regions lie in no memory; any will do, because no piece fits in them.
    for local in locals.iter_mut().filter(|l| l.mem == usize::MAX) {
        local.mem = 0;
    }
    Ok(locals)
}

fn describe(
    worker: &Worker,
    id: u128,
    mems: &[Registered],
    locals: &[Local],
) -> Result<Vec<u8>, FabricError> {
    let mut descs = Vec::with_capacity(mems.len());
    for mem in mems {
        let mem = mem.mem().ok_or(FabricError::Unavailable {
            fabric: "ucx",
            why: "a pool of another fabric was taken for one of UCX's".into(),
        })?;
        descs.push(MemDesc { base: mem.addr(), len: mem.len(), key: mem.pack_rkey()? });
    }
    let regions = locals
        .iter()
        .map(|l| RegionDesc {
            mem: u32::try_from(l.mem).unwrap_or(u32::MAX),
            off: if l.len == 0 { 0 } else { l.addr - descs.get(l.mem).map_or(l.addr, |d| d.base) },
            len: l.len,
        })
        .collect();
    let blob = Blob {
        ucx: worker.lib().version(),
        fabric: id,
        host: boot_id(),
        address: worker.address()?,
        mems: descs,
        regions,
    };
    Ok(blob.encode())
}

/// Names this boot of this host; zero if the kernel does not say.
fn boot_id() -> u128 {
    std::fs::read_to_string("/proc/sys/kernel/random/boot_id")
        .ok()
        .and_then(|text| u128::from_str_radix(&text.trim().replace('-', ""), 16).ok())
        .unwrap_or(0)
}

impl Fabric for UcxFabric {
    fn name(&self) -> &'static str {
        "ucx"
    }

    fn mover(&self) -> Mover {
        Mover::Sender
    }

    fn describe(&mut self) -> Result<Vec<u8>, FabricError> {
        Ok(self.blob.clone())
    }

    fn reaches(&self, blob: &[u8]) -> bool {
        let Ok(peer) = Blob::decode(blob) else {
            return false;
        };
        // Transports that end at the host reach no other; everything else finds out when it connects.
        let local_only = self.shared.settings.iter().any(|s| {
            s.strip_prefix("TLS=").is_some_and(|tls| {
                tls.split(',').all(|t| matches!(t, "self" | "posix" | "sysv" | "cma" | "shm" | "sm"))
            })
        });
        self.same_ucx(&peer) && (!local_only || peer.host == boot_id()) && peer.fabric != self.id
    }

    fn connect(
        &mut self,
        ep: EpId,
        role: EndRole,
        blob: &[u8],
        remote_lens: &[u64],
    ) -> Result<(), FabricError> {
        if self.links.contains_key(&ep) || self.fences.iter().any(|job| job.ep == ep) {
            return Err(FabricError::Os { call: "connect", why: format!("endpoint {} is taken", ep.0) });
        }
        let blob = Blob::decode(blob)?;
        if !self.same_ucx(&blob) {
            return Err(FabricError::BadBlob {
                what: "ucx address",
                why: format!(
                    "the peer has UCX {} and this side {}, and these two may not understand each other; install the \
                     same minor version on both",
                    blob.ucx,
                    self.worker.lib().version()
                ),
            });
        }
        if blob.regions.len() != remote_lens.len() {
            return Err(FabricError::BadBlob {
                what: "ucx address",
                why: format!(
                    "it has {} regions, and the peer's description has {}",
                    blob.regions.len(),
                    remote_lens.len()
                ),
            });
        }
        self.open_link(ep, role, &blob, remote_lens)
    }

    fn post(&mut self, ep: EpId, batch: &[Piece]) -> Result<(), FabricError> {
        let link = self.links.get_mut(&ep).ok_or(FabricError::NoEndpoint(ep.0))?;
        let end = link.writable()?;
        for piece in batch {
            check_bounds("local", piece.src_region, piece.src_off, piece.len, |r| {
                self.locals.get(r).map(|l| l.len)
            })?;
            check_bounds("remote", piece.dst_region, piece.dst_off, piece.len, |r| end.remote_len(r))?;
        }
        let mut put = false;
        for (n, piece) in batch.iter().enumerate() {
            // All of this was checked above; a miss cannot happen, and would be an error and not a panic.
            let target = usize::try_from(piece.dst_region).ok().and_then(|r| end.remote(r));
            let local = usize::try_from(piece.src_region).ok().and_then(|r| self.locals.get(r));
            let (Some((base, key)), Some(local)) = (target, local) else {
                return Err(FabricError::NoEndpoint(ep.0));
            };
            let Some(mem) = self.mems.get(local.mem).and_then(Registered::mem) else {
                return Err(FabricError::NoEndpoint(ep.0));
            };
            let from = usize::try_from(local.addr + piece.src_off).unwrap_or(usize::MAX);
            let len = usize::try_from(piece.len).unwrap_or(usize::MAX);
            if len == 0 {
                continue;
            }
            let near = end.near(piece.dst_region, piece.dst_off, piece.len).filter(|_| local.host);
            if let Some(to) = near.filter(|to| to.abs_diff(from) >= len) {
                // SAFETY: the source lies in a region, whose memory its owner keeps (RegionSpan's contract); the target in
                // what UCX has mapped of the peer's memory, which stays for as long as this endpoint's key, and both were
                // seen not to overlap. The peer may read or write its bytes meanwhile; they are only moved, never interpreted.
                unsafe {
                    stream::copy(
                        std::ptr::with_exposed_provenance::<u8>(from),
                        std::ptr::with_exposed_provenance_mut::<u8>(to),
                        len,
                    );
                }
                continue;
            }
            put = true;
            // SAFETY: the piece lies in a region, whose memory its owner keeps (RegionSpan's contract) and which lies
            // in `mem`; the key is this endpoint's and is kept until nothing can use it.
            let posted =
                unsafe { end.endpoint.put(mem, from, len, base + piece.dst_off, key, &mut self.params) };
            if let Err(error) = posted {
                stream::fence();
                link.break_with(error.clone());
                return Err(error);
            }
            if n % PUTS_PER_PROGRESS == PUTS_PER_PROGRESS - 1 {
                self.worker.progress();
            }
        }
        // Before anybody is told.
        stream::fence();
        if put {
            link.posted();
        }
        Ok(())
    }

    fn flush(&mut self, ep: EpId, ticket: u64) -> Result<(), FabricError> {
        let link = self.find(ep)?;
        if let Some(result) = link.flush(ticket) {
            self.out.push(Completion::Flushed { ep, ticket, result });
        }
        Ok(())
    }

    fn fence(&mut self, ep: EpId, ticket: u64) -> Result<(), FabricError> {
        self.start_fence(ep, ticket)
    }

    fn disconnect(&mut self, ep: EpId) {
        if let Some(mut link) = self.links.remove(&ep) {
            // What was never answered may never be: only when all is quiet can UCX be asked to flush first.
            let force = !link.is_quiet();
            for ticket in link.abandon_flushes() {
                let result = Err(FabricError::Closed("disconnected".into()));
                self.out.push(Completion::Flushed { ep, ticket, result });
            }
            self.end_link(ep, link, force);
        }
    }

    fn progress(&mut self, out: &mut Vec<Completion>) -> bool {
        let mut moved = self.worker.progress();
        moved |= self.read_notes();
        self.move_links();
        self.move_endings();
        moved |= !self.out.is_empty();
        out.append(&mut self.out);
        moved
    }

    fn event_fd(&self) -> Option<BorrowedFd<'_>> {
        // SAFETY: the descriptor belongs to the worker, which this fabric owns and drops last; the borrow cannot outlive
        // the fabric.
        self.event_fd.map(|fd| unsafe { BorrowedFd::borrow_raw(fd) })
    }

    fn arm(&mut self) -> bool {
        // On an error: not armed, so the caller stays awake, which is slow and safe.
        self.out.is_empty()
            && !self.has_finished_work()
            // Who is about to sleep has time.
            && !self.warmer.step()
            && self.worker.arm().unwrap_or(false)
    }
}

/// Whether `offset..offset + len` lies in the region.
fn check_bounds(
    side: &'static str,
    region: u32,
    offset: u64,
    len: u64,
    region_len: impl Fn(usize) -> Option<u64>,
) -> Result<(), FabricError> {
    let have = usize::try_from(region).ok().and_then(region_len);
    let fits = have.is_some_and(|have| offset.checked_add(len).is_some_and(|end| end <= have));
    if fits {
        Ok(())
    } else {
        Err(FabricError::OutOfBounds { side, region, offset, len, region_len: have.unwrap_or(0) })
    }
}

impl Drop for UcxFabric {
    fn drop(&mut self) {
        for (ep, link) in std::mem::take(&mut self.links) {
            self.end_link(ep, link, true);
        }
        let start = Instant::now();
        while !self.endings.is_empty() && start.elapsed() < END_WAIT {
            self.worker.progress();
            self.move_endings();
        }
        for ending in self.endings.drain(..) {
            let (cell, keys) = ending.leftovers();
            self.old_cells.push(cell);
            self.old_keys.extend(keys);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_hold_at_the_edges() {
        let lens = |r: usize| [4096u64, 0].get(r).copied();
        let ok = |region, offset, len| check_bounds("local", region, offset, len, lens).is_ok();
        assert!(ok(0, 0, 4096) && ok(0, 4096, 0) && ok(0, 4095, 1) && ok(1, 0, 0));
        assert!(!ok(0, 0, 4097) && !ok(0, 4096, 1) && !ok(0, u64::MAX, 1) && !ok(0, 1, u64::MAX));
        assert!(!ok(1, 0, 1) && !ok(2, 0, 0) && !ok(u32::MAX, 0, 1));
        assert_eq!(
            check_bounds("remote", 0, 4000, 100, lens),
            Err(FabricError::OutOfBounds {
                side: "remote",
                region: 0,
                offset: 4000,
                len: 100,
                region_len: 4096
            })
        );
    }
}
