//! What the UCX of this host can do, found out by trying.

use super::UcxFabric;
use super::context::{UcxOptions, UcxPool, quiet_context};
use crate::{Backing, Completion, EndRole, EpId, Fabric, FabricError, MemKind, Piece, RegionSpan};
use kvxfer_ucx_sys::{Library, Version};
use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant};

/// Bytes of each probe write.
const BYTES: usize = 64 << 10;
const EP: EpId = EpId(0);
const CONNECT_WAIT: Duration = Duration::from_secs(5);
/// How long a write may take while the receiver does nothing. One that needs the receiver never ends.
const WRITE_WAIT: Duration = Duration::from_millis(300);

/// The UCX that was found.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct UcxReport {
    /// File of libucp.
    pub path: PathBuf,
    /// Where it was found: the variable, the system, the wheel, or in the process already.
    pub source: &'static str,
    /// Its version.
    pub version: Version,
    /// Transports that work on this host, by UCX's names.
    pub transports: Vec<String>,
    /// Whether one of them is RDMA.
    pub rdma: bool,
    /// Whether CUDA memory can be registered.
    pub cuda: bool,
}

/// What UCX is there, and which transports it finds on this host.
///
/// # Errors
/// No UCX, or a context that cannot be made.
pub fn probe(options: &UcxOptions) -> Result<UcxReport, FabricError> {
    let lib = Library::load(options.wheel_dir.as_deref())
        .map_err(|e| FabricError::Unavailable { fabric: "ucx", why: e.to_string() })?;
    let context = quiet_context(lib, "all")?;
    let transports: BTreeSet<String> =
        context.print_info().as_deref().map(resources).unwrap_or_default().into_iter().collect();
    let rdma = |t: &String| ["rc_", "dc_", "ud_", "gga_", "srd"].iter().any(|p| t.starts_with(p));
    Ok(UcxReport {
        path: lib.path().to_owned(),
        source: lib.source(),
        version: lib.version(),
        rdma: transports.iter().any(rdma),
        cuda: context.knows_cuda(),
        transports: transports.into_iter().collect(),
    })
}

/// Transports in what ucp_context_print_info prints: `#  resource 2  :  md 1  dev 1  flags -- tcp/eth0`.
fn resources(text: &str) -> Vec<String> {
    text.lines()
        .map(|line| line.trim_start_matches(['#', ' ']))
        .filter(|line| line.starts_with("resource "))
        .filter_map(|line| Some(line.rsplit_once(' ')?.1.split_once('/')?.0.to_owned()))
        .collect()
}

/// Whether writes of one transport are one-sided: the receiver did nothing, and the bytes were there when the
/// sender's flush was done.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct OneSided {
    /// Transports that the endpoint used.
    pub transports: Vec<String>,
    /// Into memory of a [`UcxPool`].
    pub pool: bool,
    /// Into memory that UCX did not allocate.
    pub plain: bool,
}

/// Memory for a probe that UCX did not allocate.
struct Plain(Box<[AtomicU8]>);

impl Plain {
    fn new() -> Self {
        Self((0..BYTES).map(|_| AtomicU8::new(0)).collect())
    }
}

fn regions(plain: &Plain, pool: &Arc<dyn Backing>) -> [RegionSpan; 2] {
    [
        RegionSpan {
            addr: pool.addr(),
            len: BYTES as u64,
            kind: MemKind::Host,
            backing: Some(Arc::clone(pool)),
        },
        RegionSpan {
            addr: plain.0.as_ptr().expose_provenance() as u64,
            len: BYTES as u64,
            kind: MemKind::Host,
            backing: None,
        },
    ]
}

fn with_tls(tls: &str, options: &UcxOptions) -> UcxOptions {
    UcxOptions { tls: Some(tls.to_owned()), ..options.clone() }
}

/// The bytes at an address, one volatile read each: another process may be writing them.
fn all_are(addr: u64, value: u8) -> bool {
    let first = std::ptr::with_exposed_provenance::<u8>(usize::try_from(addr).unwrap_or(0));
    // SAFETY: `addr` is the start of BYTES bytes that the probe owns.
    (0..BYTES).all(|i| unsafe { first.add(i).read_volatile() } == value)
}

fn fill(addr: u64, value: u8) {
    let first = std::ptr::with_exposed_provenance_mut::<u8>(usize::try_from(addr).unwrap_or(0));
    for i in 0..BYTES {
        // SAFETY: as in `all_are`.
        unsafe { first.add(i).write_volatile(value) };
    }
}

fn lens() -> [u64; 2] {
    [BYTES as u64; 2]
}

/// The receiver of a probe, for one process of two.
pub struct ProbeTarget {
    // Before the memory that it has registered.
    fabric: UcxFabric,
    plain: Plain,
    pool: Arc<dyn Backing>,
}

impl ProbeTarget {
    /// A receiver with these transports only.
    ///
    /// # Errors
    /// When UCX cannot be set up with them.
    pub fn new(tls: &str, options: &UcxOptions) -> Result<Self, FabricError> {
        let options = with_tls(tls, options);
        let pool = UcxPool::alloc(BYTES as u64, &options)?;
        fill(pool.addr(), 0);
        let plain = Plain::new();
        let fabric = UcxFabric::new(&regions(&plain, &pool), &options)?;
        Ok(Self { fabric, plain, pool })
    }

    /// What the writer needs.
    ///
    /// # Errors
    /// When the memory cannot be described.
    pub fn address(&mut self) -> Result<Vec<u8>, FabricError> {
        self.fabric.describe()
    }

    /// Accepts the writer with this address.
    ///
    /// # Errors
    /// When the address is not one, or names transports that this side lacks.
    pub fn connect(&mut self, writer: &[u8]) -> Result<(), FabricError> {
        self.fabric.connect(EP, EndRole::Passive, writer, &lens())
    }

    /// Lets UCX work; to be called until the writer is connected, and not while it writes.
    pub fn progress(&mut self) {
        self.fabric.progress(&mut Vec::new());
    }

    /// Whether the bytes of [`ProbeWriter::write`] are in the pool's and in the plain memory.
    pub fn arrived(&self, value: u8) -> (bool, bool) {
        (all_are(self.pool.addr(), value), self.plain.0.iter().all(|b| b.load(Ordering::Relaxed) == value))
    }
}

/// The sender of a probe, for one process of two.
pub struct ProbeWriter {
    fabric: UcxFabric,
    plain: Plain,
    _pool: Arc<dyn Backing>,
    connected: bool,
    next_ticket: u64,
}

impl ProbeWriter {
    /// A sender with these transports only.
    ///
    /// # Errors
    /// When UCX cannot be set up with them.
    pub fn new(tls: &str, options: &UcxOptions) -> Result<Self, FabricError> {
        let options = with_tls(tls, options);
        let pool = UcxPool::alloc(BYTES as u64, &options)?;
        let plain = Plain::new();
        let fabric = UcxFabric::new(&regions(&plain, &pool), &options)?;
        Ok(Self { fabric, plain, _pool: pool, connected: false, next_ticket: 0 })
    }

    /// What the receiver needs.
    ///
    /// # Errors
    /// When the memory cannot be described.
    pub fn address(&mut self) -> Result<Vec<u8>, FabricError> {
        self.fabric.describe()
    }

    /// Connects to the receiver with this address.
    ///
    /// # Errors
    /// When the address is not one, or names transports that this side lacks.
    pub fn connect(&mut self, target: &[u8]) -> Result<(), FabricError> {
        self.fabric.connect(EP, EndRole::Active, target, &lens())
    }

    /// Lets UCX work; returns whether the endpoint is connected.
    ///
    /// # Errors
    /// When it will not be.
    pub fn progress(&mut self) -> Result<bool, FabricError> {
        let mut out = Vec::new();
        self.fabric.progress(&mut out);
        for completion in out {
            match completion {
                Completion::Connected { .. } => self.connected = true,
                Completion::ConnectFailed { error, .. } | Completion::Broken { error, .. } => {
                    return Err(error);
                }
                _ => {}
            }
        }
        Ok(self.connected)
    }

    /// Transports that the endpoint uses.
    pub fn transports(&self) -> Vec<String> {
        self.fabric.transports(EP)
    }

    /// Writes `value` into all of the receiver's pool (`region` 0) or plain memory (1) and flushes; `false` if the
    /// flush was not done in time. A write that was not done goes on.
    ///
    /// # Errors
    /// When the endpoint breaks.
    pub fn write(&mut self, region: u32, value: u8) -> Result<bool, FabricError> {
        let done = self.write_once(region, value)?;
        if done { Ok(true) } else { self.flushed(WRITE_WAIT) }
    }

    fn write_once(&mut self, region: u32, value: u8) -> Result<bool, FabricError> {
        for byte in &self.plain.0 {
            byte.store(value, Ordering::Relaxed);
        }
        let piece = Piece { src_region: 1, src_off: 0, dst_region: region, dst_off: 0, len: BYTES as u64 };
        self.fabric.post(EP, &[piece])?;
        self.next_ticket += 1;
        self.fabric.flush(EP, self.next_ticket)?;
        self.flushed(Duration::ZERO)
    }

    /// Waits for the last flush.
    fn flushed(&mut self, wait: Duration) -> Result<bool, FabricError> {
        let start = Instant::now();
        loop {
            let mut out = Vec::new();
            self.fabric.progress(&mut out);
            for completion in out {
                match completion {
                    Completion::Flushed { ticket, result, .. } if ticket == self.next_ticket => {
                        return result.map(|()| true);
                    }
                    Completion::Broken { error, .. } => return Err(error),
                    _ => {}
                }
            }
            if start.elapsed() > wait {
                return Ok(false);
            }
            std::hint::spin_loop();
        }
    }
}

/// Tries one choice of transports with two workers in this process (UCX's shared-memory, CMA and TCP transports
/// work between two workers of one process as between two processes).
///
/// # Errors
/// When no endpoint can be made with these transports, or it breaks.
pub fn one_sided_probe(tls: &str, options: &UcxOptions) -> Result<OneSided, FabricError> {
    let mut target = ProbeTarget::new(tls, options)?;
    let mut writer = ProbeWriter::new(tls, options)?;
    target.connect(&writer.address()?)?;
    writer.connect(&target.address()?)?;
    let start = Instant::now();
    while !writer.progress()? {
        target.progress();
        if start.elapsed() > CONNECT_WAIT {
            return Err(FabricError::Os { call: "connect", why: format!("no connection over {tls} in 5 s") });
        }
    }
    let mut found = OneSided { transports: writer.transports(), pool: false, plain: false };
    for region in [0u32, 1] {
        // The first write may still set up what later ones use, and so may need the receiver; it is not judged.
        let mut done = writer.write_once(region, 1)?;
        let start = Instant::now();
        while !done && start.elapsed() < CONNECT_WAIT {
            target.progress();
            done = writer.flushed(Duration::ZERO)?;
        }
        let value = 0xA5;
        done &= writer.write(region, value)?;
        let (pool, plain) = target.arrived(value);
        if region == 0 {
            found.pool = done && pool;
        } else {
            found.plain = done && plain;
        }
        // Let a write that needed the receiver end, so that the next one is judged alone.
        let start = Instant::now();
        while !done && start.elapsed() < CONNECT_WAIT {
            target.progress();
            done = writer.flushed(Duration::ZERO)?;
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use super::resources;

    #[test]
    fn transports_are_read_from_what_ucx_prints() {
        let text = "#\n# UCP context\n#\n#     md 0  :  self\n#\n#      resource 0  :  md 0  dev 0  flags -- self/memory\n\
                    #      resource 1  :  md 1  dev 1  flags -- tcp/eth0\n#\n";
        assert_eq!(resources(text), ["self", "tcp"]);
    }
}
