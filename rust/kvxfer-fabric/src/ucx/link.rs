//! Endpoints: how they come to be, break and end.

use super::blob::{self, Blob};
use super::fence;
use super::near::Mappings;
use super::note::{self, Body, Note};
use super::safe;
use super::worker::{Closing, Endpoint, ErrorCell, Request, Rkey, need_descriptors};
use super::{Registered, UcxFabric};
use crate::{Completion, EndRole, EpId, FabricError};
use kvxfer_ucx_sys::bindings::UCS_OK;
use std::collections::{BTreeSet, VecDeque};
use std::time::{Duration, Instant};

/// How long a peer may take to answer the first write and the hello. Without a limit a connection that UCX paired
/// with one that is gone would wait for good.
const CONNECT_WAIT: Duration = Duration::from_secs(5);
/// Peers remembered for a failed connection.
const MAX_BEHIND: usize = 1024;
/// Bytes of the first write.
const WARM_BYTES: usize = 8;

/// A region of the peer.
struct Remote {
    base: u64,
    len: u64,
    key: usize,
    /// Where this process has it mapped, if it has and may write there by itself.
    near: Option<usize>,
}

/// The open half of a link.
pub(super) struct End {
    pub(super) endpoint: Endpoint,
    keys: Vec<Rkey>,
    remotes: Vec<Remote>,
    /// Whether a put may still be under way, and with it the use of a key.
    pub(super) dirty: bool,
    /// Whether anything was given to UCX since the last flush.
    unflushed: bool,
    /// Whether what is mapped here may be written by ourselves. Only once the peer has been told of transports for which
    /// its fence promises nothing: UCX finds mappings of transports too that are none of the endpoint's.
    copies: bool,
}

impl End {
    fn new(endpoint: Endpoint) -> Self {
        Self {
            endpoint,
            keys: Vec::new(),
            remotes: Vec::new(),
            dirty: false,
            unflushed: false,
            copies: false,
        }
    }

    /// Finds what is mapped here of the peer's memory, for an endpoint with these transports.
    fn find_mapped(&mut self, transports: &[String]) {
        self.copies = fence::tells_of_mappings(transports);
        if !self.copies {
            return;
        }
        let maps = Mappings::now();
        for remote in &mut self.remotes {
            let key = self.keys.get(remote.key);
            remote.near = key.and_then(|key| key.pointer(remote.base, remote.len, &maps));
        }
    }

    fn remote_at(&self, region: usize) -> Option<&Remote> {
        self.remotes.get(region)
    }

    /// One more region of the peer. Its number follows that of the last.
    pub(super) fn add_remote(&mut self, base: u64, len: u64, key: Rkey) -> Option<u32> {
        let region = u32::try_from(self.remotes.len()).ok()?;
        let near = if self.copies { key.pointer(base, len, &Mappings::now()) } else { None };
        self.remotes.push(Remote { base, len, key: self.keys.len(), near });
        self.keys.push(key);
        Some(region)
    }

    /// Where this process finds `len` bytes at `off` of a region of the peer's, if it has them mapped.
    pub(super) fn near(&self, region: u32, off: u64, len: u64) -> Option<usize> {
        let remote = usize::try_from(region).ok().and_then(|r| self.remote_at(r))?;
        off.checked_add(len).filter(|end| *end <= remote.len)?;
        remote.near?.checked_add(usize::try_from(off).ok()?)
    }

    /// What this process has mapped of the peer's: where, and how long.
    fn mapped(&self) -> impl Iterator<Item = (usize, u64)> {
        self.remotes.iter().filter_map(|r| Some((r.near?, r.len)))
    }

    pub(super) fn remote_len(&self, region: usize) -> Option<u64> {
        self.remote_at(region).map(|r| r.len)
    }

    pub(super) fn remote(&self, region: usize) -> Option<(u64, &Rkey)> {
        let remote = self.remote_at(region)?;
        Some((remote.base, self.keys.get(remote.key)?))
    }
}

pub(super) enum State {
    /// The first write is under way.
    Warming(Option<Request>),
    /// The hello is out.
    Greeting,
    Open,
    Broken {
        error: FabricError,
        reported: bool,
    },
}

/// An endpoint as the caller knows it.
pub(super) struct Link {
    pub(super) role: EndRole,
    pub(super) peer: u128,
    pub(super) end: Option<End>,
    pub(super) state: State,
    pub(super) token: u64,
    pub(super) started: Instant,
    /// The peer's worker address, with padding.
    pub(super) address: Vec<u8>,
    /// Unanswered flushes; those without a request are done and wait for the ones before them.
    pub(super) flushes: VecDeque<(u64, Option<Request>)>,
}

impl Link {
    pub(super) fn transports(&self) -> Vec<String> {
        self.end.as_ref().map(|e| e.endpoint.transports()).unwrap_or_default()
    }

    /// The end to write through, if this side may write now.
    pub(super) fn writable(&self) -> Result<&End, FabricError> {
        match (&self.state, &self.end) {
            (State::Broken { error, .. }, _) => Err(error.clone()),
            (State::Open, Some(end)) if self.role == EndRole::Active => match end.endpoint.error() {
                Some(error) => Err(error),
                None => Ok(end),
            },
            (State::Open, _) => Err(FabricError::Closed("this side is the one that is written to".into())),
            _ => Err(FabricError::Closed("it is not connected yet".into())),
        }
    }

    pub(super) fn posted(&mut self) {
        if let Some(end) = &mut self.end {
            end.dirty = true;
            end.unflushed = true;
        }
    }

    pub(super) fn break_with(&mut self, error: FabricError) {
        self.posted();
        if !matches!(self.state, State::Broken { .. }) {
            self.state = State::Broken { error, reported: false };
        }
    }

    /// `Some` when the answer is known at once.
    pub(super) fn flush(&mut self, ticket: u64) -> Option<Result<(), FabricError>> {
        if let State::Broken { error, .. } = &self.state {
            return Some(Err(error.clone()));
        }
        let Some(end) = &mut self.end else {
            return Some(Err(FabricError::Closed("it has been closed".into())));
        };
        if !end.unflushed && self.flushes.is_empty() {
            // All of it was copied by ourselves.
            return Some(end.endpoint.error().map_or(Ok(()), Err));
        }
        match end.endpoint.flush() {
            Err(error) => Some(Err(error)),
            Ok(None) if self.flushes.is_empty() => {
                end.unflushed = false;
                Some(Ok(()))
            }
            Ok(request) => {
                end.unflushed = false;
                self.flushes.push_back((ticket, request));
                None
            }
        }
    }

    /// Connected, and with no flush unanswered.
    pub(super) fn is_quiet(&self) -> bool {
        matches!(self.state, State::Open) && self.flushes.is_empty()
    }

    /// Gives up on unanswered flushes and names them.
    pub(super) fn abandon_flushes(&mut self) -> Vec<u64> {
        self.flushes.drain(..).map(|(ticket, _)| ticket).collect()
    }

    fn fail(&mut self, ep: EpId, error: FabricError, out: &mut Vec<Completion>) {
        let connecting = matches!(self.state, State::Warming(_) | State::Greeting);
        self.state = State::Broken { error: error.clone(), reported: true };
        out.push(if connecting {
            Completion::ConnectFailed { ep, error }
        } else {
            Completion::Broken { ep, error }
        });
    }

    /// Whether it should have connected by now.
    fn is_late(&self) -> bool {
        matches!(self.state, State::Warming(_) | State::Greeting) && self.started.elapsed() > CONNECT_WAIT
    }

    /// Whether something happened that has not been reported.
    fn has_news(&self) -> bool {
        let failed = match &self.state {
            State::Broken { reported, .. } => return !reported,
            State::Warming(Some(request)) if request.poll().is_some() => return true,
            State::Warming(None) => return true,
            _ => self.end.as_ref().is_some_and(|e| e.endpoint.error().is_some()),
        };
        failed || self.flushes.front().is_some_and(|(_, r)| r.as_ref().is_none_or(|r| r.poll().is_some()))
    }
}

/// What is known of a peer for as long as it has links.
#[derive(Default)]
pub(super) struct Peer {
    /// Transports that it said it writes through, and those of our own endpoints.
    pub(super) transports: BTreeSet<String>,
    /// It can write: a hello was answered.
    pub(super) writes: bool,
    /// Tokens of its hellos, each with the address of the endpoint of ours through which its writes come.
    pub(super) hellos: Vec<(u64, usize)>,
    /// Why our closing its endpoints would not stop it.
    pub(super) leak: Option<&'static str>,
}

impl Peer {
    fn verdict(&self) -> Result<(), FabricError> {
        match self.leak {
            Some(why) => Err(FabricError::NoFence { transport: "unknown".into(), why: why.into() }),
            // It was never told that it may write.
            None if !self.writes => Ok(()),
            None => fence::verdict(&self.transports),
        }
    }
}

/// A hello for which there is no endpoint yet.
pub(super) struct Parked {
    pub(super) note: Note,
    /// The reply endpoint, only ever compared.
    pub(super) reply: usize,
}

/// An endpoint that is being closed.
pub(super) struct Ending {
    pub(super) peer: u128,
    pub(super) closing: Closing,
    pub(super) keys: Vec<Rkey>,
    pub(super) dirty: bool,
    pub(super) flushes: Vec<(EpId, u64, Option<Request>)>,
}

impl Ending {
    /// What must outlive the worker's last use of the endpoint.
    pub(super) fn leftovers(self) -> (Box<ErrorCell>, Vec<Rkey>) {
        (self.closing.into_cell(), self.keys)
    }
}

/// A fence that waits for the peer's endpoints to be closed.
pub(super) struct FenceJob {
    pub(super) ep: EpId,
    ticket: u64,
    peer: u128,
}

impl UcxFabric {
    /// More descriptors than a link with one peer takes, in both directions and over the transports that kvxfer chooses.
    pub const LINK_DESCRIPTORS: u64 = 16;

    pub(super) fn open_link(
        &mut self,
        ep: EpId,
        role: EndRole,
        blob: &Blob,
        remote_lens: &[u64],
    ) -> Result<(), FabricError> {
        need_descriptors("ucp_ep_create", Self::LINK_DESCRIPTORS)?;
        let address = blob::padded(&blob.address);
        if role == EndRole::Active && self.behind.remove(&blob.fabric) {
            // The last connection failed, most likely paired with one that the peer has given up: catch up by one.
            let skipped = Endpoint::create(&self.worker, &address)?;
            self.close(blob.fabric, skipped);
        }
        let endpoint = Endpoint::create(&self.worker, &address)?;
        let mut link = Link {
            role,
            peer: blob.fabric,
            end: Some(End::new(endpoint)),
            state: State::Open,
            token: self.next_token,
            started: Instant::now(),
            address,
            flushes: VecDeque::new(),
        };
        self.next_token += 1;
        self.peers.entry(blob.fabric).or_default();
        let started = match role {
            EndRole::Active => {
                self.import(&mut link, blob, remote_lens).and_then(|()| self.warm(&mut link, blob))
            }
            EndRole::Passive => Ok(()),
        };
        if let Err(error) = started {
            self.end_link(ep, link, true);
            return Err(error);
        }
        if role == EndRole::Passive {
            self.out.push(Completion::Connected { ep, info: self.info(&link) });
        }
        self.links.insert(ep, link);
        let (mine, others) =
            std::mem::take(&mut self.parked).into_iter().partition(|p| p.note.from == blob.fabric);
        self.parked = others;
        for parked in mine {
            self.hello(parked.note, parked.reply);
        }
        Ok(())
    }

    /// Unpacks the peer's keys and places its regions.
    fn import(&self, link: &mut Link, blob: &Blob, remote_lens: &[u64]) -> Result<(), FabricError> {
        let Some(end) = &mut link.end else {
            return Ok(());
        };
        for mem in &blob.mems {
            // SAFETY: the key is what the peer's fabric packed (peers are authenticated), with padding.
            end.keys.push(unsafe { end.endpoint.unpack_rkey(&blob::padded(&mem.key))? });
        }
        for (region, len) in blob.regions.iter().zip(remote_lens) {
            let key = usize::try_from(region.mem).unwrap_or(usize::MAX);
            // Blob::decode checked that the region lies in its memory, so this neither misses nor overflows.
            let base = blob.mems.get(key).map_or(0, |m| m.base.saturating_add(region.off));
            let len = region.len.min(*len);
            end.remotes.push(Remote { base, len, key, near: None });
        }
        Ok(())
    }

    /// The first write, to the peer's scratch word: makes UCX connect, and shows that it can.
    fn warm(&mut self, link: &mut Link, blob: &Blob) -> Result<(), FabricError> {
        let scratch = self.mems.get(self.scratch).and_then(Registered::mem);
        let (Some(end), Some(target), Some(scratch)) = (&mut link.end, blob.mems.last(), scratch) else {
            return Err(FabricError::Closed("there is no scratch word".into()));
        };
        let Some(key) = end.keys.last() else {
            return Err(FabricError::Closed("there is no key for the scratch word".into()));
        };
        end.dirty = true;
        let from = usize::try_from(scratch.addr()).unwrap_or(usize::MAX);
        // SAFETY: our scratch memory is larger and lives as long as the fabric; the key is this endpoint's.
        unsafe { end.endpoint.put(scratch, from, WARM_BYTES, target.base, key, &mut self.params)? };
        link.state = State::Warming(end.endpoint.flush()?);
        Ok(())
    }

    pub(super) fn info(&self, link: &Link) -> String {
        let names = link.transports();
        let names = if names.is_empty() { "transports unknown".to_owned() } else { names.join(", ") };
        format!("ucx {} over {names}", self.worker.lib().version())
    }

    /// Closes a link's endpoint and leaves it broken.
    pub(super) fn break_link(&mut self, ep: EpId, why: FabricError) {
        let Some(link) = self.links.get_mut(&ep) else {
            return;
        };
        let (peer, flushes) = (link.peer, std::mem::take(&mut link.flushes));
        if !matches!(link.state, State::Broken { reported: true, .. }) {
            link.fail(ep, why, &mut self.out);
        }
        if let Some(end) = link.end.take() {
            self.end_end(ep, peer, end, flushes, true);
        }
    }

    /// Moves every link along.
    pub(super) fn move_links(&mut self) {
        let before = self.out.len();
        self.move_each_link();
        for completion in self.out.iter().skip(before) {
            if let Completion::ConnectFailed { ep, .. } = completion
                && let Some(link) = self.links.get(ep)
                && self.behind.len() < MAX_BEHIND
            {
                self.behind.insert(link.peer);
            }
        }
    }

    fn move_each_link(&mut self) {
        self.notes_out.retain(|(request, _)| request.poll().is_none());
        let lib = self.worker.lib();
        for (ep, link) in &mut self.links {
            let ep = *ep;
            while let Some((ticket, request)) = link.flushes.front() {
                let ticket = *ticket;
                let status = match request {
                    None => UCS_OK,
                    Some(request) => match request.poll() {
                        None => break,
                        Some(status) => status,
                    },
                };
                link.flushes.pop_front();
                let result = if status == UCS_OK {
                    Ok(())
                } else {
                    Err(safe::failed(lib, "ucp_ep_flush_nbx", status))
                };
                self.out.push(Completion::Flushed { ep, ticket, result });
            }
            if let State::Broken { error, reported: reported @ false } = &mut link.state {
                *reported = true;
                self.out.push(Completion::Broken { ep, error: error.clone() });
            }
            if matches!(link.state, State::Broken { .. }) {
                continue;
            }
            if let Some(error) = link.end.as_ref().and_then(|e| e.endpoint.error()) {
                link.fail(ep, error, &mut self.out);
                continue;
            }
            if link.is_late() {
                let error = FabricError::Os {
                    call: "connect",
                    why: format!(
                        "the peer's fabric did not answer in {} s; connect again",
                        CONNECT_WAIT.as_secs()
                    ),
                };
                link.fail(ep, error, &mut self.out);
                continue;
            }
            let warmed = match &link.state {
                State::Warming(None) => Some(UCS_OK),
                State::Warming(Some(request)) => request.poll(),
                _ => None,
            };
            match (warmed, &mut link.end) {
                (Some(UCS_OK), Some(end)) => {
                    let mut names = end.endpoint.transports();
                    end.find_mapped(&names);
                    for (addr, len) in end.mapped() {
                        self.warmer.add(ep, addr, len);
                    }
                    if !names.is_empty() && self.shared.tcp_puts && names.iter().any(|n| n == "tcp") {
                        names.push(fence::TCP_PUT.to_owned());
                    }
                    let hello =
                        Note { from: self.id, to: link.peer, token: link.token, body: Body::Hello(names) };
                    match send(&mut self.notes_out, &end.endpoint, &hello) {
                        Ok(()) => link.state = State::Greeting,
                        Err(error) => link.fail(ep, error, &mut self.out),
                    }
                }
                (Some(status), _) => {
                    link.fail(ep, safe::failed(lib, "ucp_ep_flush_nbx", status), &mut self.out);
                }
                (None, _) => {}
            }
        }
    }

    pub(super) fn has_finished_work(&self) -> bool {
        self.links.values().any(Link::has_news)
    }

    /// Starts to close a link's endpoint, if it has one.
    pub(super) fn end_link(&mut self, ep: EpId, mut link: Link, force: bool) {
        if let Some(end) = link.end.take() {
            self.end_end(ep, link.peer, end, link.flushes, force);
        } else {
            self.forget_peers();
        }
    }

    fn end_end(
        &mut self,
        ep: EpId,
        peer: u128,
        end: End,
        flushes: VecDeque<(u64, Option<Request>)>,
        force: bool,
    ) {
        self.warmer.forget(ep);
        let raw = end.endpoint.raw().addr();
        if let Some(p) = self.peers.get_mut(&peer) {
            p.transports.extend(end.endpoint.transports());
            let (gone, kept) =
                std::mem::take(&mut p.hellos).into_iter().partition(|(_, reply)| *reply == raw);
            p.hellos = kept;
            let gone: Vec<(u64, usize)> = gone;
            for (token, _) in gone {
                let bye = Note { from: self.id, to: peer, token, body: Body::Bye };
                if let Err(error) = send(&mut self.notes_out, &end.endpoint, &bye) {
                    tracing::debug!(%error, "the peer is not told that its endpoint was closed");
                }
            }
        }
        let flushes = flushes.into_iter().map(|(ticket, request)| (ep, ticket, request)).collect();
        self.endings.push(Ending {
            peer,
            closing: end.endpoint.close(force),
            keys: end.keys,
            dirty: end.dirty,
            flushes,
        });
    }

    /// Closes every endpoint towards the peer of `ep`: UCX may have paired its writes with any of them.
    pub(super) fn start_fence(&mut self, ep: EpId, ticket: u64) -> Result<(), FabricError> {
        let link = self.links.remove(&ep).ok_or(FabricError::NoEndpoint(ep.0))?;
        let peer = link.peer;
        if let (Some(end), Some(p)) = (&link.end, self.peers.get_mut(&peer)) {
            // Those of the peer's endpoints that none of ours is paired with are told by way of this one.
            let held: Vec<usize> = self
                .links
                .values()
                .filter(|l| l.peer == peer)
                .filter_map(|l| Some(l.end.as_ref()?.endpoint.raw().addr()))
                .collect();
            let raw = end.endpoint.raw().addr();
            p.hellos
                .iter_mut()
                .filter(|(_, reply)| !held.contains(reply))
                .for_each(|(_, reply)| *reply = raw);
        }
        self.end_link(ep, link, true);
        let siblings: Vec<EpId> =
            self.links.iter().filter(|(_, l)| l.peer == peer && l.end.is_some()).map(|(ep, _)| *ep).collect();
        for sibling in siblings {
            self.break_link(
                sibling,
                FabricError::Closed(format!("endpoint {} to the same peer was fenced", ep.0)),
            );
        }
        self.parked.retain(|p| p.note.from != peer);
        self.fences.push(FenceJob { ep, ticket, peer });
        Ok(())
    }

    /// Moves what is being closed along, and answers fences.
    pub(super) fn move_endings(&mut self) {
        let lib = self.worker.lib();
        let mut still = Vec::with_capacity(self.endings.len());
        for mut ending in std::mem::take(&mut self.endings) {
            let out = &mut self.out;
            ending.flushes.retain(|(ep, ticket, request)| {
                let status = request.as_ref().map_or(Some(UCS_OK), Request::poll);
                let Some(status) = status else {
                    return true;
                };
                let result = if status == UCS_OK {
                    Ok(())
                } else {
                    Err(safe::failed(lib, "ucp_ep_flush_nbx", status))
                };
                out.push(Completion::Flushed { ep: *ep, ticket: *ticket, result });
                false
            });
            let Some(result) = ending.closing.poll() else {
                still.push(ending);
                continue;
            };
            for (ep, ticket, _) in ending.flushes.drain(..) {
                let result = Err(FabricError::Closed("it was closed under the flush".into()));
                self.out.push(Completion::Flushed { ep, ticket, result });
            }
            if let Err(error) = result {
                tracing::warn!(%error, "an endpoint could not be closed");
                self.peers.entry(ending.peer).or_default().leak = Some("UCX refused to close the endpoint");
            }
            let dirty = ending.dirty;
            let (cell, keys) = ending.leftovers();
            if dirty {
                self.old_keys.extend(keys);
            }
            drop(cell);
        }
        self.endings = still;
        let (open, done): (Vec<FenceJob>, Vec<FenceJob>) = std::mem::take(&mut self.fences)
            .into_iter()
            .partition(|job| self.endings.iter().any(|e| e.peer == job.peer));
        self.fences = open;
        for job in done {
            let result = self.peers.get(&job.peer).map_or(Ok(()), Peer::verdict);
            self.out.push(Completion::Fenced { ep: job.ep, ticket: job.ticket, result });
        }
        self.forget_peers();
    }

    /// Forgets peers that have no endpoint, none that is being closed, and no fence.
    fn forget_peers(&mut self) {
        if self.peers.is_empty() {
            return;
        }
        let (links, endings, fences) = (&self.links, &self.endings, &self.fences);
        self.peers.retain(|id, _| {
            links.values().any(|l| l.peer == *id)
                || endings.iter().any(|e| e.peer == *id)
                || fences.iter().any(|f| f.peer == *id)
        });
    }
}

pub(super) fn send(
    out: &mut Vec<(Request, Vec<u8>)>,
    endpoint: &Endpoint,
    note: &Note,
) -> Result<(), FabricError> {
    let bytes = note.encode();
    // SAFETY: the bytes are kept beside the request until it is done; moving the vector does not move them.
    if let Some(request) = unsafe { endpoint.note(note::ID, &bytes)? } {
        out.push((request, bytes));
    }
    Ok(())
}
