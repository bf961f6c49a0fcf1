//! The fabrics of one agent, and which endpoint leads to which peer over which of them.

use crate::config::{AgentConfig, FabricChoice, StartError};
use kvxfer_fabric::shm::{ShmFabric, ShmOptions};
use kvxfer_fabric::ucx::{UcxFabric, UcxOptions, Window};
use kvxfer_fabric::{Completion, EndRole, EpId, Fabric, FabricError, MemKind, Piece, RegionSpan};
use kvxfer_proto::msg::FabricOffer;
use kvxfer_proto::node::{Direction, Mover, PeerKey};
use rustix::fd::BorrowedFd;
use std::collections::HashMap;
use std::ops::Range;

/// One of the fabrics.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Which {
    Shm,
    Ucx,
}

/// Best first.
const PREFERENCE: [Which; 2] = [Which::Shm, Which::Ucx];

/// The fabrics that this agent has.
pub(crate) struct Carriers {
    shm: Option<ShmFabric>,
    ucx: Option<UcxFabric>,
    endpoints: HashMap<(Which, EpId), PeerKey>,
    next: u32,
    completions: Vec<Completion>,
}

/// Runs `$body` with `$f` bound to the fabric that `$which` names, if the agent has it.
macro_rules! with_fabric {
    ($self:ident, $which:expr, $f:ident => $body:expr) => {
        match $which {
            Which::Shm => $self.shm.as_mut().map(|$f| $body),
            Which::Ucx => $self.ucx.as_mut().map(|$f| $body),
        }
    };
}

impl Carriers {
    pub(crate) fn new(config: &AgentConfig) -> Result<Self, StartError> {
        let fail = |e: FabricError| StartError::Fabric(e.to_string());
        let on_device = config.regions.iter().any(|r| matches!(r.kind, MemKind::Device(_)));
        let shm = match config.fabric {
            FabricChoice::Ucx => None,
            // It carries host memory only.
            FabricChoice::Auto if on_device => None,
            FabricChoice::Shm | FabricChoice::Auto => {
                Some(ShmFabric::new(config.regions.clone(), ShmOptions::default()).map_err(fail)?)
            }
        };
        let options = UcxOptions {
            tls: config.ucx_tls.clone(),
            net_devices: config.ucx_devices.clone(),
            wheel_dir: config.ucx_wheel_dir.clone(),
        };
        let ucx = match config.fabric {
            FabricChoice::Shm => None,
            FabricChoice::Ucx => Some(UcxFabric::new(&config.regions, &options).map_err(fail)?),
            // Nothing else carries such memory.
            FabricChoice::Auto if on_device => Some(UcxFabric::new(&config.regions, &options).map_err(fail)?),
            // Near peers need no UCX: where it cannot be had, far ones are refused with the reason.
            FabricChoice::Auto => UcxFabric::new(&config.regions, &options)
                .inspect_err(|e| tracing::info!(error = %e, "no ucx: peers on other hosts cannot be reached"))
                .ok(),
        };
        Ok(Self { shm, ucx, endpoints: HashMap::new(), next: 0, completions: Vec::new() })
    }

    /// Endpoints that there are or that are being made or fenced.
    pub(crate) fn len(&self) -> usize {
        self.endpoints.len()
    }

    pub(crate) fn names(&self) -> String {
        PREFERENCE.into_iter().filter(|w| self.has(*w)).map(name).collect::<Vec<_>>().join(",")
    }

    fn has(&self, which: Which) -> bool {
        match which {
            Which::Shm => self.shm.is_some(),
            Which::Ucx => self.ucx.is_some(),
        }
    }

    /// What an authenticated peer needs for each fabric.
    pub(crate) fn offers(&mut self) -> Vec<FabricOffer> {
        let mut offers = Vec::new();
        for which in PREFERENCE {
            match with_fabric!(self, which, f => f.describe()) {
                Some(Ok(blob)) => offers.push(FabricOffer { name: name(which).to_owned(), blob }),
                Some(Err(e)) => {
                    tracing::warn!(fabric = name(which), error = %e, "a fabric cannot be offered");
                }
                None => {}
            }
        }
        offers
    }

    /// The fabrics that reach the peer who made these offers, best first.
    pub(crate) fn choices(&self, offers: &[FabricOffer]) -> Vec<Which> {
        PREFERENCE
            .into_iter()
            .filter(|which| {
                offers.iter().filter(|o| o.name == name(*which)).any(|o| match which {
                    Which::Shm => self.shm.as_ref().is_some_and(|f| f.reaches(&o.blob)),
                    Which::Ucx => self.ucx.as_ref().is_some_and(|f| f.reaches(&o.blob)),
                })
            })
            .collect()
    }

    /// Begins to connect; a `Connected` or `ConnectFailed` follows.
    pub(crate) fn connect(
        &mut self,
        which: Which,
        key: PeerKey,
        offers: &[FabricOffer],
        remote_lens: &[u64],
    ) -> Result<EpId, FabricError> {
        let unavailable =
            || FabricError::Unavailable { fabric: name(which), why: "this side does not have it".to_owned() };
        let offer = offers.iter().find(|o| o.name == name(which)).ok_or_else(|| {
            FabricError::Unavailable { fabric: name(which), why: "the peer does not offer it".to_owned() }
        })?;
        self.next = self.next.wrapping_add(1);
        let ep = EpId(self.next);
        let role = match (mover(which), key.direction) {
            (Mover::Receiver, Direction::WeGrant) | (Mover::Sender, Direction::TheyGrant) => EndRole::Active,
            _ => EndRole::Passive,
        };
        with_fabric!(self, which, f => f.connect(ep, role, &offer.blob, remote_lens))
            .ok_or_else(unavailable)??;
        self.endpoints.insert((which, ep), key);
        Ok(ep)
    }

    pub(crate) fn post(&mut self, which: Which, ep: EpId, pieces: &[Piece]) -> Result<(), FabricError> {
        with_fabric!(self, which, f => f.post(ep, pieces)).unwrap_or(Err(FabricError::NoEndpoint(ep.0)))
    }

    fn ucx(&mut self) -> Result<&mut UcxFabric, FabricError> {
        let why = || "only ucx takes memory later".to_owned();
        self.ucx.as_mut().ok_or_else(|| FabricError::Unavailable { fabric: "ucx", why: why() })
    }

    /// Memory for staging, registered with ucx, the one fabric over which the sender writes. Returns the number by which
    /// its pieces name it.
    pub(crate) fn add_memory(&mut self, bytes: u64) -> Result<(u32, RegionSpan), FabricError> {
        self.ucx()?.add_memory(bytes)
    }

    /// Memory like that which ucx was given and did not allocate, for measurements.
    pub(crate) fn add_plain_memory(&mut self, bytes: u64) -> Result<(u32, RegionSpan), FabricError> {
        self.ucx()?.add_plain_memory(bytes)
    }

    /// Whether there are regions that ucx has not allocated.
    pub(crate) fn has_plain_memory(&self) -> bool {
        self.ucx.as_ref().is_some_and(UcxFabric::has_plain_memory)
    }

    /// What a peer needs to write to such memory.
    pub(crate) fn export_memory(&mut self, region: u32) -> Result<Vec<u8>, FabricError> {
        self.ucx()?.export_memory(region)
    }

    /// Such memory of a peer's, which we write to: the number by which pieces name it, and its length.
    pub(crate) fn import_memory(&mut self, ep: EpId, blob: &[u8]) -> Result<(u32, u64), FabricError> {
        self.ucx()?.import_memory(ep, blob)
    }

    /// A range of a peer's memory, if this process has it mapped and may write it.
    pub(crate) fn window(
        &mut self,
        which: Which,
        ep: EpId,
        region: u32,
        range: Range<u64>,
    ) -> Option<Window<'_>> {
        let ucx = self.ucx.as_mut().filter(|_| which == Which::Ucx)?;
        ucx.window(ep, region, range.start, range.end.checked_sub(range.start)?)
    }

    pub(crate) fn flush(&mut self, which: Which, ep: EpId, ticket: u64) -> Result<(), FabricError> {
        with_fabric!(self, which, f => f.flush(ep, ticket)).unwrap_or(Err(FabricError::NoEndpoint(ep.0)))
    }

    pub(crate) fn fence(&mut self, which: Which, ep: EpId, ticket: u64) -> Result<(), FabricError> {
        with_fabric!(self, which, f => f.fence(ep, ticket)).unwrap_or(Err(FabricError::NoEndpoint(ep.0)))
    }

    pub(crate) fn disconnect(&mut self, which: Which, ep: EpId) {
        with_fabric!(self, which, f => f.disconnect(ep));
        self.endpoints.remove(&(which, ep));
    }

    /// Moves every fabric along; calls back with what happened, and with whose endpoint. Returns whether anything moved.
    pub(crate) fn progress(&mut self, out: &mut Vec<(Which, Option<PeerKey>, Completion)>) -> bool {
        let mut moved = false;
        for which in PREFERENCE {
            let mut completions = std::mem::take(&mut self.completions);
            moved |= with_fabric!(self, which, f => f.progress(&mut completions)).unwrap_or(false);
            for c in completions.drain(..) {
                let ep = endpoint_of(&c);
                let key = self.endpoints.get(&(which, ep)).copied();
                if matches!(c, Completion::Fenced { .. } | Completion::ConnectFailed { .. }) {
                    self.endpoints.remove(&(which, ep));
                }
                out.push((which, key, c));
            }
            self.completions = completions;
        }
        moved
    }

    /// Descriptors to watch while the thread sleeps.
    pub(crate) fn fds(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        [self.shm.as_ref().and_then(Fabric::event_fd), self.ucx.as_ref().and_then(Fabric::event_fd)]
            .into_iter()
            .flatten()
    }

    /// Descriptors that must be free before another peer may come.
    pub(crate) fn spare_descriptors(&self) -> u64 {
        if self.ucx.is_some() { UcxFabric::LINK_DESCRIPTORS } else { 0 }
    }

    /// Before sleeping: whether every fabric will wake us.
    pub(crate) fn arm(&mut self) -> bool {
        self.shm.as_mut().is_none_or(Fabric::arm) && self.ucx.as_mut().is_none_or(Fabric::arm)
    }

    pub(crate) fn data_syscalls(&self) -> u64 {
        self.shm.as_ref().map_or(0, Fabric::data_syscalls)
            + self.ucx.as_ref().map_or(0, Fabric::data_syscalls)
    }
}

fn endpoint_of(c: &Completion) -> EpId {
    match c {
        Completion::Connected { ep, .. }
        | Completion::ConnectFailed { ep, .. }
        | Completion::Flushed { ep, .. }
        | Completion::Fenced { ep, .. }
        | Completion::PeerDied { ep }
        | Completion::Broken { ep, .. } => *ep,
    }
}

/// The name that goes over the wire.
pub(crate) const fn name(which: Which) -> &'static str {
    match which {
        Which::Shm => "shm",
        Which::Ucx => "ucx",
    }
}

/// The fabric with this name.
pub(crate) fn named(text: &str) -> Option<Which> {
    PREFERENCE.into_iter().find(|w| name(*w) == text)
}

/// Who moves the bytes.
pub(crate) const fn mover(which: Which) -> Mover {
    match which {
        Which::Shm => Mover::Receiver,
        Which::Ucx => Mover::Sender,
    }
}
