//! How an agent is set up.

use crate::control::Limits;
use kvxfer_fabric::RegionSpan;
use kvxfer_fabric::ucx::Devices as UcxDevices;
use kvxfer_proto::Side;
use kvxfer_proto::msg::Role;
use kvxfer_proto::node;
use std::fmt;
use std::path::PathBuf;
use std::time::Duration;
use thiserror::Error;

/// Which fabric an agent may use.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
pub enum FabricChoice {
    /// Per peer: shared memory on one host, else UCX.
    #[default]
    Auto,
    /// Shared memory only.
    Shm,
    /// UCX only.
    Ucx,
}

impl FabricChoice {
    /// `auto`, `shm` or `ucx`.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        match name {
            "auto" => Some(Self::Auto),
            "shm" => Some(Self::Shm),
            "ucx" => Some(Self::Ucx),
            _ => None,
        }
    }
}

/// Whether pushes go through staging slots: packed by the sender, unpacked by the receiver.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug, Default)]
pub enum StagingMode {
    /// Where it is faster, by what was measured when the peers connected.
    #[default]
    Auto,
    /// Wherever the peer lends slots, and lends some to every peer.
    Always,
    /// Never, and lends none.
    Never,
}

impl StagingMode {
    /// `auto`, `always` or `never`.
    #[must_use]
    pub fn from_name(name: &str) -> Option<Self> {
        match name {
            "auto" => Some(Self::Auto),
            "always" => Some(Self::Always),
            "never" => Some(Self::Never),
            _ => None,
        }
    }
}

/// The ring of staging slots that an agent lends to peers which write to it. Its memory is allocated when the first peer
/// connects whose pushes may use it.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Staging {
    /// Whether.
    pub mode: StagingMode,
    /// Slots of the ring.
    pub slots: u32,
    /// Bytes of a slot.
    pub slot_bytes: u64,
}

impl Default for Staging {
    fn default() -> Self {
        Self { mode: StagingMode::Auto, slots: 32, slot_bytes: 256 << 10 }
    }
}

/// Files of an agent's TLS, all PEM. Both sides of every connection show a certificate and check the other's.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TlsConfig {
    /// This agent's certificate, with the intermediate ones after it.
    pub cert: PathBuf,
    /// Its private key.
    pub key: PathBuf,
    /// The authorities whose certificates are taken.
    pub ca: PathBuf,
    /// The DNS name or address that every peer's certificate must carry. Without one, who is dialled must carry the
    /// host that was dialled, and who dials need only be signed by the authority.
    pub name: Option<String>,
}

/// Everything an agent needs to start. Its `Debug` does not show the secret.
#[derive(Clone)]
pub struct AgentConfig {
    /// Name, for people.
    pub name: String,
    /// The engine that this rank belongs to.
    pub engine: String,
    /// Data-parallel rank.
    pub dp_rank: u32,
    /// What it may do.
    pub role: Role,
    /// Model fingerprint, empty for none.
    pub model: String,
    /// Layouts and shard.
    pub side: Side,
    /// Pages in each group.
    pub pages: Vec<u32>,
    /// Memory of each region, in the order of [`Side::regions`].
    pub regions: Vec<RegionSpan>,
    /// Where to listen.
    pub listen: String,
    /// Directory to register with, besides being one.
    pub directory: Option<String>,
    /// Fabrics.
    pub fabric: FabricChoice,
    /// Shared secret.
    pub secret: Option<Vec<u8>>,
    /// TLS on the control channel, also beside a secret.
    pub tls: Option<TlsConfig>,
    /// Listen where other hosts reach it, and speak to them, with neither a secret nor TLS.
    pub insecure: bool,
    /// What others may use up.
    pub limits: Limits,
    /// Core for the transfer thread.
    pub cpu: Option<usize>,
    /// Orders that may wait for the thread.
    pub queue_capacity: usize,
    /// How long the thread spins before it sleeps. `None`: for 50 us, but not at all once the last room's end is told.
    pub spin: Option<Duration>,
    /// Bytes of one slice of data work.
    pub slice_bytes: u64,
    /// Staging slots.
    pub staging: Staging,
    /// UCX transports, instead of the defaults.
    pub ucx_tls: Option<String>,
    /// UCX's network devices, instead of all.
    pub ucx_devices: Option<UcxDevices>,
    /// Folder of the `libucx` wheel's libraries, if it is installed.
    pub ucx_wheel_dir: Option<PathBuf>,
    /// Timeouts and limits of the state machine.
    pub node: node::Config,
}

impl AgentConfig {
    /// Defaults for this name, geometry and memory.
    #[must_use]
    pub fn new(name: impl Into<String>, side: Side, pages: Vec<u32>, regions: Vec<RegionSpan>) -> Self {
        let name = name.into();
        Self {
            engine: name.clone(),
            name,
            dp_rank: 0,
            role: Role::Both,
            model: String::new(),
            side,
            pages,
            regions,
            listen: "127.0.0.1:0".to_owned(),
            directory: None,
            fabric: FabricChoice::Auto,
            secret: None,
            tls: None,
            insecure: false,
            limits: Limits::default(),
            cpu: None,
            queue_capacity: 4096,
            spin: None,
            slice_bytes: 256 << 10,
            staging: Staging::default(),
            ucx_tls: None,
            ucx_devices: None,
            ucx_wheel_dir: None,
            node: node::Config::default(),
        }
    }
}

impl fmt::Debug for AgentConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        // Taken apart, so that no new field is forgotten here.
        let Self {
            name,
            engine,
            dp_rank,
            role,
            model,
            side,
            pages,
            regions,
            listen,
            directory,
            fabric,
            secret,
            tls,
            insecure,
            limits,
            cpu,
            queue_capacity,
            spin,
            slice_bytes,
            staging,
            ucx_tls,
            ucx_devices,
            ucx_wheel_dir,
            node,
        } = self;
        f.debug_struct("AgentConfig")
            .field("name", name)
            .field("engine", engine)
            .field("dp_rank", dp_rank)
            .field("role", role)
            .field("model", model)
            .field("side", side)
            .field("pages", pages)
            .field("regions", regions)
            .field("listen", listen)
            .field("directory", directory)
            .field("fabric", fabric)
            .field("secret", &secret.as_ref().map(|_| "***"))
            .field("tls", tls)
            .field("insecure", insecure)
            .field("limits", limits)
            .field("cpu", cpu)
            .field("queue_capacity", queue_capacity)
            .field("spin", spin)
            .field("slice_bytes", slice_bytes)
            .field("staging", staging)
            .field("ucx_tls", ucx_tls)
            .field("ucx_devices", ucx_devices)
            .field("ucx_wheel_dir", ucx_wheel_dir)
            .field("node", node)
            .finish()
    }
}

/// Why an agent did not start. Nothing of it is left.
#[derive(Debug, Error)]
pub enum StartError {
    /// An argument is wrong.
    #[error("{0}")]
    BadArgument(String),
    /// The geometry or the memory is wrong.
    #[error("{0}")]
    Layout(String),
    /// Listening failed.
    #[error("cannot listen on {address}: {why}")]
    Listen {
        /// Where.
        address: String,
        /// The system's error, and what to do.
        why: String,
    },
    /// Neither a secret nor TLS on an address that others reach, or files of TLS that cannot be used.
    #[error("{0}")]
    Auth(String),
    /// No fabric can be had.
    #[error("{0}")]
    Fabric(String),
    /// The system refused something else.
    #[error("{call} failed: {why}")]
    Os {
        /// Which call.
        call: &'static str,
        /// Its error.
        why: String,
    },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_configuration_does_not_show_its_secret() {
        let side = Side {
            groups: Vec::new(),
            shard: kvxfer_proto::Shard { tp_rank: 0, tp_size: 1, pp_rank: 0, pp_size: 1 },
        };
        let mut config = AgentConfig::new("prefill", side, Vec::new(), Vec::new());
        config.secret = Some(b"sesame".to_vec());
        for shown in [format!("{config:?}"), format!("{config:#?}")] {
            assert!(shown.contains("prefill") && shown.contains("slice_bytes"), "{shown}");
            assert!(!shown.contains("sesame") && !shown.contains("115"), "{shown}");
        }
    }
}
