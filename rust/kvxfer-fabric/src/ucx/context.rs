//! The process's UCX contexts and the settings they are made with.

use super::safe::{Context, Mem};
use crate::{Backing, FabricError};
use kvxfer_ucx_sys::Library;
use std::any::Any;
use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

/// Transports unless the user or the caller names others. Not here: `cma` and `sysv`, which gain nothing over
/// `posix` and `tcp` (docs/ucx-notes.md has the figures) and have no fence. Names that a build of UCX lacks are
/// passed over.
pub const DEFAULT_TLS: &str = "self,posix,tcp,rc,dc,ud,cuda";

/// Settings over UCX's own defaults. A key that the user set in the environment (`UCX_` before it) is left alone.
/// The number is the first minor version of UCX 1 that knows the key: an older one warns about it.
const SETTINGS: [(&str, &str, u32); 6] = [
    // With peer error handling, any other threshold makes UCX emulate puts with active messages.
    ("RNDV_THRESH", "inf", 13),
    // Without these, shared memory is not used where peer error handling is asked for.
    ("POSIX_ERROR_HANDLING", "y", 14),
    ("SYSV_ERROR_HANDLING", "y", 14),
    // TCP's own put cannot be fenced, see fence::TCP_PUT.
    ("TCP_PUT_ENABLE", "n", 13),
    // A dead peer behind shared memory is only noticed by these probes; UCX's own default is 20 s.
    ("KEEPALIVE_INTERVAL", "1s", 13),
    // Names of transports in DEFAULT_TLS that this build lacks are no reason for a warning.
    ("WARN_INVALID_CONFIG", "n", 13),
];

/// How to set UCX up.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct UcxOptions {
    /// Transports to use, in UCX's words (`posix,tcp`, `rc`, `^cma`); over `UCX_TLS` and the default.
    pub tls: Option<String>,
    /// The folder of the `libucx` wheel that holds `libucp.so.0`, if one is installed.
    pub wheel_dir: Option<PathBuf>,
}

/// A context with what it was made from.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) context: Arc<Context>,
    /// `KEY=value` of each setting that was applied.
    pub(super) settings: Vec<String>,
}

impl Shared {
    /// Whether UCX may use TCP's own put (the user's setting stands).
    pub(super) fn tcp_puts(&self) -> bool {
        !self.settings.iter().any(|s| s == "TCP_PUT_ENABLE=n")
            && !std::env::var("UCX_TCP_PUT_ENABLE").is_ok_and(|v| matches!(v.as_str(), "n" | "no" | "0"))
    }
}

/// The process's context for these options, made on first use and kept until the process ends: pools and agents
/// come and go in any order, and UCX does not like to be torn down under its memory hooks.
pub(super) fn shared(options: &UcxOptions) -> Result<Arc<Shared>, FabricError> {
    static CONTEXTS: Mutex<BTreeMap<Option<String>, Arc<Shared>>> = Mutex::new(BTreeMap::new());
    // A panic in here leaves the map as it was, so poison has no meaning.
    let mut contexts = CONTEXTS.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(shared) = contexts.get(&options.tls) {
        return Ok(Arc::clone(shared));
    }
    let lib = Library::load(options.wheel_dir.as_deref())
        .map_err(|e| FabricError::Unavailable { fabric: "ucx", why: e.to_string() })?;
    let user_set = |key: &str| std::env::var_os(format!("UCX_{key}")).is_some();
    let settings = wanted(options.tls.as_deref(), lib.version().minor, user_set);
    let (context, settings) = Context::new(lib, &settings)?;
    tracing::debug!(library = ?lib, ?settings, "UCX context made");
    let shared = Arc::new(Shared { context: Arc::new(context), settings });
    contexts.insert(options.tls.clone(), Arc::clone(&shared));
    Ok(shared)
}

/// A context of its own with these transports, only to be looked at.
pub(super) fn quiet_context(lib: &'static Library, tls: &str) -> Result<Context, FabricError> {
    Context::new(lib, &[("TLS", tls), ("WARN_INVALID_CONFIG", "n")]).map(|(context, _)| context)
}

/// The settings to apply, less those that the user made.
fn wanted(tls: Option<&str>, minor: u32, user_set: impl Fn(&str) -> bool) -> Vec<(&str, &str)> {
    let mut out: Vec<(&str, &str)> = SETTINGS
        .iter()
        .filter(|(key, _, since)| *since <= minor && !user_set(key))
        .map(|(key, value, _)| (*key, *value))
        .collect();
    match tls {
        Some(tls) => out.push(("TLS", tls)),
        None if user_set("TLS") => {}
        None => out.push(("TLS", DEFAULT_TLS)),
    }
    out
}

/// Host memory that UCX allocated, so that its shared-memory transports can map it into a peer on the same host.
/// Lives until the last clone of its `Arc` is gone.
#[derive(Debug)]
pub struct UcxPool {
    mem: Mem,
}

impl UcxPool {
    /// Allocates `bytes` of memory. Use the options that the agent's fabric will have: a pool of another context is
    /// registered once more, and then as memory that only slower transports can reach.
    ///
    /// # Errors
    /// When UCX is not there or has no memory.
    pub fn alloc(bytes: u64, options: &UcxOptions) -> Result<Arc<dyn Backing>, FabricError> {
        if bytes == 0 {
            return Err(FabricError::Os { call: "ucp_mem_map", why: "a pool of zero bytes".into() });
        }
        let shared = shared(options)?;
        let mem = Mem::alloc(&shared.context, bytes)?;
        Ok(Arc::new(Self { mem }))
    }

    pub(super) fn mem(&self) -> &Mem {
        &self.mem
    }
}

impl Backing for UcxPool {
    fn addr(&self) -> u64 {
        self.mem.addr()
    }

    fn len(&self) -> u64 {
        self.mem.len()
    }

    fn as_any(&self) -> &dyn Any {
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_users_settings_stand() {
        let all = wanted(None, 22, |_| false);
        assert!(all.contains(&("RNDV_THRESH", "inf")) && all.contains(&("TLS", DEFAULT_TLS)));
        let some = wanted(None, 22, |key| key == "RNDV_THRESH" || key == "TLS");
        assert!(!some.iter().any(|(key, _)| *key == "RNDV_THRESH" || *key == "TLS"), "{some:?}");
        assert!(some.contains(&("POSIX_ERROR_HANDLING", "y")));
        assert!(!wanted(None, 13, |_| false).iter().any(|(key, _)| *key == "POSIX_ERROR_HANDLING"));
        assert!(wanted(Some("tcp"), 22, |_| true).contains(&("TLS", "tcp")));
    }
}
