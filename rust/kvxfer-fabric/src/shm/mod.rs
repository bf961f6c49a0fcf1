//! Shared memory on one host: the *receiver's* thread copies out of the source's memory.
//!
//! No other process ever writes ours, so a late write cannot exist and the fence is our own thread doing nothing.
//! The active endpoint is the reader's (decode), the passive one the source's (prefill).
//!
//! * Memory from [`ShmPool`] is a sealed memfd. The reader gets its descriptor over an abstract Unix socket and
//!   maps it read-only.
//! * Other memory is read with `process_vm_readv`, up to 1,024 pieces a call.
//!
//! # Attaching
//! `describe` puts a fresh one-time token into the blob, which only authenticated peers see. The reader connects to
//! the source's socket, checks by `SO_PEERCRED` that the right process listens, and shows the token; the source
//! checks the reader's user, uses the token up, lets it read (Yama) and answers with a region table and
//! descriptors. Each side holds a pidfd of the other, opened so that a recycled process id is not mistaken.
//!
//! # What is reported
//! * An active endpoint is `Connected` once all is mapped and, for engine memory, a probe showed that it can be
//!   read. After `ConnectFailed` the endpoint is closed and its number free.
//! * A passive endpoint watches the reader's process from [`Fabric::connect`] on, and is `Connected` when that
//!   reader has attached (before or after `connect`). It never gets `ConnectFailed`: a reader that never comes is
//!   the caller's timeout to judge.
//! * `Broken` says that the other side closed; the process is still watched, so `PeerDied` can follow. After
//!   `PeerDied` there is no `Broken`.
//! * From `Connected` on an active endpoint looks at the source's pages ([`warm`]), and the thread stays awake for it.
//! * Copies are done when [`Fabric::post`] returns, so a flush is answered by the next `progress`.

mod blob;
mod copy;
mod host;
mod poller;
mod pool;
mod process;
mod ptracer;
mod reader;
mod sock;
mod source;
mod warm;
mod wire;

pub(crate) use copy::check_bounds;
pub(crate) use host::{HostId, start_time};
pub use host::{HostReport, HugePages, host_report};
pub use pool::{PoolOptions, ShmPool};
pub(crate) use process::watch;

use crate::{Backing, Completion, EndRole, EpId, Fabric, FabricError, MemKind, Mover, Piece, RegionSpan};
use blob::{Blob, ProcessKey};
use copy::{Copier, LocalRegion, RemotePlace, RemoteRegion};
use poller::{EVENTS, Poller, Subject};
use pool::Mapping;
use reader::{Attach, Step};
use source::{Exports, Note, Source};
use std::collections::{BTreeMap, VecDeque};
use std::os::fd::{BorrowedFd, OwnedFd};
use std::sync::Arc;
use warm::Warmer;
use wire::{Entry, Place};

/// Settings of a [`ShmFabric`].
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct ShmOptions {
    /// Tokens that are given out and not used yet; past it the oldest is forgotten.
    pub max_tokens: usize,
    /// Connections that have not shown a token yet; past it the oldest is dropped.
    pub max_silent: usize,
    /// Attached readers that no endpoint of ours claims yet; past it the oldest is dropped.
    pub max_unclaimed: usize,
    /// Under Yama's `ptrace_scope=1` a process can let one other process read it, or all of the same user. With
    /// several reader processes and engine memory, `true` chooses all; `false` refuses the second reader.
    pub allow_any_ptracer: bool,
}

impl Default for ShmOptions {
    fn default() -> Self {
        Self { max_tokens: 4096, max_silent: 64, max_unclaimed: 1024, allow_any_ptracer: false }
    }
}

fn os_error(call: &'static str, why: &str) -> FabricError {
    FabricError::Os { call, why: why.to_owned() }
}

fn to_usize(n: u64, what: &'static str) -> Result<usize, FabricError> {
    usize::try_from(n).map_err(|_| os_error("address arithmetic", &format!("{what} {n} is too large")))
}

fn random<const N: usize>() -> Result<[u8; N], FabricError> {
    let mut out = [0u8; N];
    getrandom::fill(&mut out).map_err(|e| os_error("getrandom", &e.to_string()))?;
    Ok(out)
}

#[derive(Debug)]
struct Active {
    process: ProcessKey,
    sock: Option<OwnedFd>,
    pidfd: Option<OwnedFd>,
    attach: Option<Box<Attach>>,
    regions: Vec<RemoteRegion>,
    /// Keeps the peer's memory mapped.
    _maps: Vec<Arc<Mapping>>,
    /// Set once nothing more can be posted.
    broken: Option<FabricError>,
}

#[derive(Debug)]
struct Passive {
    process: ProcessKey,
    pidfd: Option<OwnedFd>,
    conn: Option<u32>,
}

#[derive(Debug)]
enum End {
    Active(Active),
    Passive(Passive),
}

impl End {
    fn pidfd(&mut self) -> &mut Option<OwnedFd> {
        match self {
            Self::Active(a) => &mut a.pidfd,
            Self::Passive(p) => &mut p.pidfd,
        }
    }
}

/// The shared-memory fabric.
#[derive(Debug)]
pub struct ShmFabric {
    host: HostId,
    process: ProcessKey,
    local: Vec<LocalRegion>,
    source: Source,
    ends: BTreeMap<u32, End>,
    poller: Poller,
    copier: Copier,
    ready: VecDeque<Completion>,
    notes: Vec<Note>,
    buf: Vec<u8>,
    /// Active endpoints that found the source's queue full.
    redial: Vec<u32>,
    warmer: Warmer,
}

impl ShmFabric {
    /// A fabric over these regions, which their owner keeps valid for as long as the fabric lives.
    ///
    /// # Errors
    /// A region in device memory, one that leaves its pool or the address space, or a system without sockets,
    /// epoll, pidfd or `/proc`.
    pub fn new(regions: Vec<RegionSpan>, options: ShmOptions) -> Result<Self, FabricError> {
        let host = HostId::of_this_process()?;
        let pid = std::process::id();
        let start = start_time(pid)
            .ok_or_else(|| os_error("read", &format!("/proc/{pid}/stat; is /proc mounted?")))?;
        let process = ProcessKey { pid, start, instance: random()? };
        let (local, exports) = register(regions)?;
        let poller = Poller::new()?;
        let source = Source::new(exports, host.uid, options, &poller)?;
        Ok(Self {
            host,
            process,
            local,
            source,
            ends: BTreeMap::new(),
            poller,
            copier: Copier::new(),
            ready: VecDeque::new(),
            notes: Vec::new(),
            buf: reader::packet_buffer(),
            redial: Vec::new(),
            warmer: Warmer::default(),
        })
    }

    fn check_peer(&self, blob: &Blob) -> Result<(), FabricError> {
        if blob.host == self.host {
            return Ok(());
        }
        Err(FabricError::BadBlob {
            what: "shm address",
            why: format!(
                "it is of another boot, namespace or user (theirs: pid namespace {}, net namespace {}, user {}; \
                 ours: {}, {}, {}); use the ucx fabric",
                blob.host.pid_ns,
                blob.host.net_ns,
                blob.host.uid,
                self.host.pid_ns,
                self.host.net_ns,
                self.host.uid
            ),
        })
    }

    /// Lets go of everything that an endpoint holds.
    fn close(&mut self, ep: u32) -> bool {
        let Some(end) = self.ends.remove(&ep) else { return false };
        self.warmer.forget(ep);
        match end {
            End::Active(a) => {
                for fd in [&a.sock, &a.pidfd].into_iter().flatten() {
                    self.poller.remove(fd);
                }
                self.redial.retain(|e| *e != ep);
            }
            End::Passive(p) => {
                if let Some(fd) = &p.pidfd {
                    self.poller.remove(fd);
                }
                if let Some(conn) = p.conn {
                    self.source.close(conn, &self.poller);
                }
            }
        }
        true
    }

    /// Moves an attachment along.
    fn attach(&mut self, ep: u32) {
        let Some(End::Active(a)) = self.ends.get_mut(&ep) else { return };
        let Some(attach) = &mut a.attach else { return };
        let result = attach.step(&mut a.sock, &mut self.buf).and_then(|step| match step {
            Step::Pending => Ok(None),
            Step::Again => {
                self.redial.push(ep);
                self.poller.retry_soon();
                Ok(None)
            }
            Step::Dialled => {
                if let Some(fd) = &a.sock {
                    self.poller.add(fd, Subject::Sock(ep))?;
                }
                Ok(None)
            }
            Step::Done(done) => {
                let addrs = done.regions.iter().filter(|r| r.len > 0).filter_map(|r| match r.place {
                    RemotePlace::Process { addr } => Some(addr),
                    RemotePlace::Mapped { .. } => None,
                });
                self.copier.probe(a.process.pid, addrs)?;
                Ok(Some(done))
            }
        });
        match result {
            Ok(None) => {}
            Ok(Some(done)) => {
                let by_process =
                    done.regions.iter().filter(|r| matches!(r.place, RemotePlace::Process { .. })).count();
                let info = format!(
                    "shm: {} regions mapped in {} memfds, {by_process} read from process {}",
                    done.regions.len() - by_process,
                    done.maps.len(),
                    a.process.pid
                );
                a.attach = None;
                a.regions = done.regions;
                for (map, fd) in done.maps {
                    let map = Arc::new(map);
                    self.warmer.add(ep, Arc::clone(&map), fd);
                    a._maps.push(map);
                }
                self.ready.push_back(Completion::Connected { ep: EpId(ep), info });
            }
            Err(error) => self.connect_failed(ep, error),
        }
    }

    fn connect_failed(&mut self, ep: u32, error: FabricError) {
        if self.ends.get_mut(&ep).and_then(|e| e.pidfd().as_ref()).is_some_and(|fd| sock::any_ended(fd, None))
        {
            self.ready.push_back(Completion::PeerDied { ep: EpId(ep) });
        }
        self.close(ep);
        self.ready.push_back(Completion::ConnectFailed { ep: EpId(ep), error });
    }

    /// The process behind an endpoint ended.
    fn died(&mut self, ep: u32) {
        let Some(end) = self.ends.get_mut(&ep) else { return };
        let Some(fd) = end.pidfd().take() else { return };
        self.poller.remove(&fd);
        self.ready.push_back(Completion::PeerDied { ep: EpId(ep) });
        match end {
            End::Active(a) => {
                let pid = a.process.pid;
                let error = FabricError::Closed(format!("process {pid} has ended"));
                if a.attach.is_some() {
                    self.close(ep);
                    self.ready.push_back(Completion::ConnectFailed { ep: EpId(ep), error });
                } else {
                    if let Some(sock) = a.sock.take() {
                        self.poller.remove(&sock);
                    }
                    a.broken = Some(error);
                }
            }
            End::Passive(p) => {
                if let Some(conn) = p.conn.take() {
                    self.source.close(conn, &self.poller);
                }
            }
        }
    }

    /// Nothing more can be posted on an active endpoint. Says so once.
    fn break_active(&mut self, ep: u32, error: FabricError) {
        let Some(End::Active(a)) = self.ends.get_mut(&ep) else { return };
        if let Some(sock) = a.sock.take() {
            self.poller.remove(&sock);
        }
        if a.broken.is_some() {
            return;
        }
        a.broken = Some(error.clone());
        if a.pidfd.as_ref().is_some_and(|fd| sock::any_ended(fd, None)) {
            self.died(ep);
        } else {
            self.ready.push_back(Completion::Broken { ep: EpId(ep), error });
        }
    }

    fn sock_event(&mut self, ep: u32) {
        let Some(End::Active(a)) = self.ends.get_mut(&ep) else { return };
        if a.attach.is_some() {
            self.attach(ep);
            return;
        }
        let Some(fd) = &a.sock else { return };
        let pid = a.process.pid;
        let why = match sock::recv_plain(fd, &mut self.buf) {
            Ok(sock::Received::Nothing) => return,
            Ok(sock::Received::End) => format!("process {pid} closed the shm socket"),
            Ok(sock::Received::Packet(_)) => format!("process {pid} sent what does not belong there"),
            Err(e) => format!("the shm socket to process {pid}: {e}"),
        };
        self.break_active(ep, FabricError::Closed(why));
    }

    fn take_notes(&mut self) {
        let mut notes = std::mem::take(&mut self.notes);
        for note in notes.drain(..) {
            match note {
                Note::Attached { conn, key } => {
                    let waiting = self.ends.iter_mut().find_map(|(ep, end)| match end {
                        End::Passive(p) if p.process == key && p.conn.is_none() && p.pidfd.is_some() => {
                            Some((*ep, p))
                        }
                        _ => None,
                    });
                    if let Some((ep, p)) = waiting
                        && self.source.bind(conn, ep)
                    {
                        p.conn = Some(conn);
                        self.ready.push_back(passive_connected(ep, &key));
                    }
                }
                Note::Left { ep } => self.reader_left(ep),
            }
        }
        self.notes = notes;
    }

    fn reader_left(&mut self, ep: u32) {
        let Some(End::Passive(p)) = self.ends.get_mut(&ep) else { return };
        p.conn = None;
        let pid = p.process.pid;
        match &p.pidfd {
            Some(fd) if sock::any_ended(fd, None) => self.died(ep),
            Some(_) => {
                let error = FabricError::Closed(format!("process {pid} closed the shm socket"));
                self.ready.push_back(Completion::Broken { ep: EpId(ep), error });
            }
            None => {}
        }
    }

    fn handle(&mut self, subject: Subject) {
        match subject {
            Subject::Listener => self.source.accept(&mut self.poller, &mut self.notes),
            Subject::Timer => {
                self.poller.timer_fired();
                self.source.resume(&mut self.poller);
                for ep in std::mem::take(&mut self.redial) {
                    self.attach(ep);
                }
            }
            Subject::Conn(id) => self.source.conn_event(id, &self.poller, &mut self.notes),
            Subject::Sock(ep) => self.sock_event(ep),
            Subject::Process(ep) => self.died(ep),
        }
        self.take_notes();
    }
}

fn passive_connected(ep: u32, key: &ProcessKey) -> Completion {
    Completion::Connected { ep: EpId(ep), info: format!("shm: process {} reads", key.pid) }
}

/// Checks the regions and says how each is exported.
fn register(regions: Vec<RegionSpan>) -> Result<(Vec<LocalRegion>, Exports), FabricError> {
    let mut local = Vec::with_capacity(regions.len());
    let mut exports = Exports { entries: Vec::with_capacity(regions.len()), pools: Vec::new() };
    for (i, span) in regions.into_iter().enumerate() {
        let index = u32::try_from(i).map_err(|_| os_error("registration", "too many regions"))?;
        if let MemKind::Device(n) = span.kind {
            return Err(FabricError::Unavailable {
                fabric: "shm",
                why: format!(
                    "region {index} is in the memory of device {n}; shm carries host memory, use ucx"
                ),
            });
        }
        let end = span.addr.checked_add(span.len);
        if end.is_none() || isize::try_from(span.len).is_err() || (span.addr == 0 && span.len > 0) {
            return Err(os_error(
                "registration",
                &format!("region {index}: {} bytes at {:#x} cannot be", span.len, span.addr),
            ));
        }
        let place = match &span.backing {
            Some(b) if b.as_any().is::<ShmPool>() => Place::File {
                fd: pool_number(&mut exports.pools, b)?,
                offset: offset_in(index, &span, b.as_ref())?,
            },
            _ => Place::Process { addr: span.addr },
        };
        exports.entries.push(Entry { len: span.len, place });
        local.push(LocalRegion { addr: span.addr, len: span.len });
    }
    Ok((local, exports))
}

fn pool_number(pools: &mut Vec<Arc<dyn Backing>>, pool: &Arc<dyn Backing>) -> Result<u32, FabricError> {
    let known = pools.iter().position(|p| p.addr() == pool.addr());
    let n = known.unwrap_or_else(|| {
        pools.push(Arc::clone(pool));
        pools.len() - 1
    });
    u32::try_from(n).map_err(|_| os_error("registration", "too many pools"))
}

fn offset_in(region: u32, span: &RegionSpan, pool: &dyn Backing) -> Result<u64, FabricError> {
    let offset = span.addr.checked_sub(pool.addr());
    match offset {
        Some(o) if o.checked_add(span.len).is_some_and(|end| end <= pool.len()) => Ok(o),
        _ => Err(FabricError::OutOfBounds {
            side: "local",
            region,
            offset: offset.unwrap_or(0),
            len: span.len,
            region_len: pool.len(),
        }),
    }
}

impl Fabric for ShmFabric {
    fn name(&self) -> &'static str {
        "shm"
    }

    fn mover(&self) -> Mover {
        Mover::Receiver
    }

    fn describe(&mut self) -> Result<Vec<u8>, FabricError> {
        let token = self.source.new_token()?;
        let name = self.source.name().to_vec();
        Ok(Blob { host: self.host, process: self.process, token, name }.encode())
    }

    fn reaches(&self, blob: &[u8]) -> bool {
        Blob::decode(blob).is_ok_and(|b| b.host == self.host)
    }

    fn connect(
        &mut self,
        ep: EpId,
        role: EndRole,
        blob: &[u8],
        remote_lens: &[u64],
    ) -> Result<(), FabricError> {
        let blob = Blob::decode(blob)?;
        self.check_peer(&blob)?;
        if self.ends.contains_key(&ep.0) {
            return Err(FabricError::Closed(format!("endpoint {} is open already", ep.0)));
        }
        let process = blob.process;
        let pidfd = watch(process.pid, process.start)?;
        if let Some(fd) = &pidfd {
            self.poller.add(fd, Subject::Process(ep.0))?;
        } else {
            self.ready.push_back(Completion::PeerDied { ep });
        }
        match (role, pidfd) {
            (EndRole::Active, None) => {
                let error = FabricError::Closed(format!("process {} has ended", process.pid));
                self.ready.push_back(Completion::ConnectFailed { ep, error });
            }
            (EndRole::Active, pidfd) => {
                let attach = Attach::new(blob, self.process.instance, self.host.uid, remote_lens);
                self.ends.insert(
                    ep.0,
                    End::Active(Active {
                        process,
                        sock: None,
                        pidfd,
                        attach: Some(Box::new(attach)),
                        regions: Vec::new(),
                        _maps: Vec::new(),
                        broken: None,
                    }),
                );
                self.attach(ep.0);
            }
            (EndRole::Passive, pidfd) => {
                let unbound = pidfd.as_ref().and_then(|_| self.source.unbound(&process));
                let conn = unbound.filter(|conn| self.source.bind(*conn, ep.0));
                if conn.is_some() {
                    self.ready.push_back(passive_connected(ep.0, &process));
                }
                self.ends.insert(ep.0, End::Passive(Passive { process, pidfd, conn }));
            }
        }
        Ok(())
    }

    fn post(&mut self, ep: EpId, batch: &[Piece]) -> Result<(), FabricError> {
        let a = match self.ends.get(&ep.0) {
            Some(End::Active(a)) => a,
            Some(End::Passive(_)) => {
                return Err(FabricError::Closed(format!("endpoint {} is passive: the peer copies", ep.0)));
            }
            None => return Err(FabricError::NoEndpoint(ep.0)),
        };
        if let Some(error) = &a.broken {
            return Err(error.clone());
        }
        if a.attach.is_some() {
            return Err(FabricError::Closed(format!("endpoint {} is not connected yet", ep.0)));
        }
        let pid = a.process.pid;
        let copied = self.copier.copy(&self.local, &a.regions, pid, batch).and_then(|read_process| {
            // The process id could have gone to another process, or the process could have started another
            // program, so the bytes count only if the peer is still there now that they have been read. A mapping is the
            // peer's whatever becomes of it.
            let there = || match (&a.pidfd, &a.sock) {
                (Some(pidfd), Some(sock)) => !sock::any_ended(pidfd, Some(sock)),
                _ => false,
            };
            if read_process && !there() {
                return Err(FabricError::Closed(format!("process {pid} went away while it was read")));
            }
            Ok(())
        });
        match copied {
            Ok(()) => Ok(()),
            // Nothing was copied, and the endpoint is as good as before.
            Err(error @ FabricError::OutOfBounds { .. }) => Err(error),
            Err(error) => {
                self.break_active(ep.0, error.clone());
                Err(error)
            }
        }
    }

    fn flush(&mut self, ep: EpId, ticket: u64) -> Result<(), FabricError> {
        let result = match self.ends.get(&ep.0) {
            Some(End::Active(Active { broken: Some(error), .. })) => Err(error.clone()),
            Some(_) => Ok(()),
            None => return Err(FabricError::NoEndpoint(ep.0)),
        };
        self.ready.push_back(Completion::Flushed { ep, ticket, result });
        Ok(())
    }

    fn fence(&mut self, ep: EpId, ticket: u64) -> Result<(), FabricError> {
        // Only this thread ever writes this process's regions, and it is here.
        if !self.close(ep.0) {
            return Err(FabricError::NoEndpoint(ep.0));
        }
        self.ready.push_back(Completion::Fenced { ep, ticket, result: Ok(()) });
        Ok(())
    }

    fn disconnect(&mut self, ep: EpId) {
        if !self.close(ep.0) {
            return;
        }
        for c in &mut self.ready {
            if let Completion::Flushed { ep: e, result, .. } = c
                && *e == ep
                && result.is_ok()
            {
                *result = Err(FabricError::Closed(format!("endpoint {} was closed by this side", ep.0)));
            }
        }
        // What else was about to be said concerns an endpoint that the caller has forgotten.
        self.ready.retain(|c| match c {
            Completion::Connected { ep: e, .. }
            | Completion::ConnectFailed { ep: e, .. }
            | Completion::PeerDied { ep: e }
            | Completion::Broken { ep: e, .. } => *e != ep,
            Completion::Flushed { .. } | Completion::Fenced { .. } => true,
        });
    }

    fn progress(&mut self, out: &mut Vec<Completion>) -> bool {
        let mut events = [None; EVENTS];
        let n = self.poller.poll(&mut events);
        for subject in events.into_iter().take(n).flatten() {
            self.handle(subject);
        }
        let moved = n > 0 || !self.ready.is_empty();
        out.extend(self.ready.drain(..));
        moved
    }

    fn event_fd(&self) -> Option<BorrowedFd<'_>> {
        Some(self.poller.fd())
    }

    fn arm(&mut self) -> bool {
        // The descriptor is level-triggered: what is not handled yet keeps it readable. Who is about to sleep has time.
        self.ready.is_empty() && !self.warmer.step()
    }

    fn data_syscalls(&self) -> u64 {
        self.copier.calls()
    }
}

#[cfg(test)]
#[allow(clippy::cast_possible_truncation)]
mod tests;
