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

/// A setting over UCX's own default, unless the user set the variable in the environment.
struct Setting {
    /// The user's variable, without `UCX_`.
    variable: &'static str,
    /// The name that ucp_config_modify takes, and the first minor version of UCX 1 with which it does.
    keys: &'static [(u32, &'static str)],
    value: &'static str,
    /// The transports that read it (none: UCX itself does). UCX 1.13 warns when none of them is in use.
    readers: &'static [&'static str],
}

impl Setting {
    const fn new(
        variable: &'static str,
        keys: &'static [(u32, &'static str)],
        value: &'static str,
        readers: &'static [&'static str],
    ) -> Self {
        Self { variable, keys, value, readers }
    }

    fn is_read(&self, tls: &str) -> bool {
        let any = |t: &str| t.starts_with('^') || t == "all" || self.readers.contains(&t);
        self.readers.is_empty() || tls.split(',').any(any)
    }
}

/// The first minor version of UCX 1 whose default protocols can use TCP's own put.
const PUTS_OVER_TCP: u32 = 16;

/// UCX 1.13 names a transport's settings without the transport; later versions refuse that.
const RENAMED: u32 = 14;

// TCP's own put is left on, although it cannot be fenced (fence::TCP_PUT): without it UCX makes puts of active
// messages, and aborts the receiver's process when it cannot answer one because the sender has died.
const SETTINGS: [Setting; 6] = [
    // With peer error handling, any other threshold makes UCX emulate puts with active messages.
    Setting::new("RNDV_THRESH", &[(0, "RNDV_THRESH")], "inf", &[]),
    // Without these, shared memory is not used where peer error handling is asked for.
    Setting::new(
        "POSIX_ERROR_HANDLING",
        &[(0, "MM_ERROR_HANDLING"), (RENAMED, "POSIX_ERROR_HANDLING")],
        "y",
        &["posix", "sysv", "shm", "sm", "mm"],
    ),
    Setting::new(
        "SYSV_ERROR_HANDLING",
        &[(RENAMED, "SYSV_ERROR_HANDLING")],
        "y",
        &["sysv", "shm", "sm", "mm"],
    ),
    // A dead peer behind shared memory is only noticed by these probes; UCX's own default is 20 s.
    Setting::new("KEEPALIVE_INTERVAL", &[(0, "KEEPALIVE_INTERVAL")], "1s", &[]),
    // Else UCX takes the bounds of a device's memory from what it has seen allocated since it was loaded, although it is told
    // both type and bounds: an engine allocates its pages before that, and their registration fails.
    Setting::new("MEMTYPE_REG_WHOLE_ALLOC_TYPES", &[(0, "MEMTYPE_REG_WHOLE_ALLOC_TYPES")], "", &[]),
    // Names of transports in DEFAULT_TLS that this build lacks are no reason for a warning.
    Setting::new("WARN_INVALID_CONFIG", &[(0, "WARN_INVALID_CONFIG")], "n", &[]),
];

/// The network devices of a context.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Debug, Default)]
pub struct Devices {
    /// Their names.
    pub names: Vec<String>,
    /// How many of them are cards that one write may be spread over.
    pub rails: u32,
}

/// How to set UCX up.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct UcxOptions {
    /// Transports to use, in UCX's words (`posix,tcp`, `rc`, `^cma`); over `UCX_TLS` and the default.
    pub tls: Option<String>,
    /// Network devices to use, in UCX's words (`mlx5_0:1`, `eth0`); over `UCX_NET_DEVICES`. None for all.
    pub net_devices: Option<Devices>,
    /// The folder of the `libucx` wheel that holds `libucp.so.0`, if one is installed.
    pub wheel_dir: Option<PathBuf>,
}

/// A context with what it was made from.
#[derive(Debug)]
pub(super) struct Shared {
    pub(super) context: Arc<Context>,
    /// `KEY=value` of each setting that was applied.
    pub(super) settings: Vec<String>,
    /// Whether UCX may use TCP's own put, by what the environment said when it read its settings.
    pub(super) tcp_puts: bool,
}

/// UCX's default is to use TCP's own put, unless the user said no in words that kvxfer knows.
fn puts_by(user: Option<&str>) -> bool {
    !user.is_some_and(|v| matches!(v.to_ascii_lowercase().as_str(), "n" | "no" | "0"))
}

/// Why puts over TCP are active messages here, with which a writer that is killed can abort the receiver's process.
fn emulated(tls: &str, minor: u32, user: impl Fn(&str) -> Option<String>) -> Option<&'static str> {
    let used = match tls.strip_prefix('^') {
        Some(not) => not.split(',').all(|t| t != "tcp"),
        None => tls.split(',').any(|t| matches!(t, "tcp" | "all")),
    };
    if !used {
        None
    } else if minor < PUTS_OVER_TCP {
        Some("UCX before 1.16 knows no other way")
    } else if !puts_by(user("PROTO_ENABLE").as_deref()) {
        Some("UCX_PROTO_ENABLE is off")
    } else if !puts_by(user("TCP_PUT_ENABLE").as_deref()) {
        Some("UCX_TCP_PUT_ENABLE is off")
    } else {
        None
    }
}

/// The process's context for these options, made on first use and kept until the process ends: pools and agents
/// come and go in any order, and UCX does not like to be torn down under its memory hooks.
pub(super) fn shared(options: &UcxOptions) -> Result<Arc<Shared>, FabricError> {
    type Key = (Option<String>, Option<Devices>);
    static CONTEXTS: Mutex<BTreeMap<Key, Arc<Shared>>> = Mutex::new(BTreeMap::new());
    // A panic in here leaves the map as it was, so poison has no meaning.
    let mut contexts = CONTEXTS.lock().unwrap_or_else(PoisonError::into_inner);
    let key = (options.tls.clone(), options.net_devices.clone());
    if let Some(shared) = contexts.get(&key) {
        return Ok(Arc::clone(shared));
    }
    let lib = Library::load(options.wheel_dir.as_deref())
        .map_err(|e| FabricError::Unavailable { fabric: "ucx", why: e.to_string() })?;
    let user = |key: &str| std::env::var(format!("UCX_{key}")).ok();
    let settings = wanted(options.tls.as_deref(), options.net_devices.as_ref(), lib.version().minor, user);
    let settings: Vec<(&str, &str)> = settings.iter().map(|(key, value)| (*key, value.as_str())).collect();
    let tcp_puts = puts_by(user("TCP_PUT_ENABLE").as_deref());
    let (context, settings) = Context::new(lib, &settings)?;
    tracing::debug!(library = ?lib, ?settings, "UCX context made");
    let users_tls = user("TLS");
    let tls = options.tls.as_deref().or(users_tls.as_deref()).unwrap_or(DEFAULT_TLS);
    if let Some(why) = emulated(tls, lib.version().minor, user) {
        tracing::warn!(
            why,
            "writes over TCP are active messages of UCX: a peer that is killed while it writes to this process can \
             make UCX abort it; use UCX 1.16 or later with its defaults, or transports without tcp"
        );
    }
    let shared = Arc::new(Shared { context: Arc::new(context), settings, tcp_puts });
    contexts.insert(key, Arc::clone(&shared));
    Ok(shared)
}

/// A context of its own with these transports, only to be looked at.
pub(super) fn quiet_context(lib: &'static Library, tls: &str) -> Result<Context, FabricError> {
    Context::new(lib, &[("TLS", tls), ("WARN_INVALID_CONFIG", "n")]).map(|(context, _)| context)
}

/// The settings to apply, less those that the user made.
fn wanted(
    tls: Option<&str>,
    devices: Option<&Devices>,
    minor: u32,
    user: impl Fn(&str) -> Option<String>,
) -> Vec<(&'static str, String)> {
    let users_tls = user("TLS");
    let in_use = tls.or(users_tls.as_deref()).unwrap_or(DEFAULT_TLS);
    let mut out: Vec<(&'static str, String)> = SETTINGS
        .iter()
        .filter(|s| s.is_read(in_use) && user(s.variable).is_none())
        .filter_map(|s| {
            let key = s.keys.iter().rev().find(|(since, _)| *since <= minor)?;
            Some((key.1, s.value.to_owned()))
        })
        .collect();
    if tls.is_some() || users_tls.is_none() {
        out.push(("TLS", in_use.to_owned()));
    }
    if let Some(devices) = devices.filter(|d| !d.names.is_empty()) {
        out.push(("NET_DEVICES", devices.names.join(",")));
        // By itself UCX writes over one card, however many there are. 1.13 knows no such key, and no way.
        if devices.rails > 1 && user("MAX_RMA_RAILS").is_none() {
            out.push(("MAX_RMA_RAILS", devices.rails.to_string()));
        }
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

    /// The same for a fabric's own use, in its own context.
    pub(super) fn alloc_in(context: &Arc<Context>, bytes: u64) -> Result<Arc<dyn Backing>, FabricError> {
        Ok(Arc::new(Self { mem: Mem::alloc(context, bytes)? }))
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

    fn has(settings: &[(&'static str, String)], key: &str, value: &str) -> bool {
        settings.iter().any(|(k, v)| *k == key && v == value)
    }

    #[test]
    fn the_users_settings_stand() {
        let all = wanted(None, None, 22, |_| None);
        assert!(has(&all, "RNDV_THRESH", "inf") && has(&all, "TLS", DEFAULT_TLS), "{all:?}");
        let user = |key: &str| match key {
            "RNDV_THRESH" => Some("8k".to_owned()),
            "TLS" => Some("posix".to_owned()),
            _ => None,
        };
        let some = wanted(None, None, 22, user);
        assert!(!some.iter().any(|(key, _)| *key == "RNDV_THRESH" || *key == "TLS"), "{some:?}");
        assert!(has(&some, "POSIX_ERROR_HANDLING", "y"), "{some:?}");
        // What the caller asks for goes over what the environment says.
        assert!(has(&wanted(Some("tcp"), None, 22, user), "TLS", "tcp"));
    }

    #[test]
    fn network_devices_are_named_and_several_cards_are_written_over() {
        let names =
            |rails, names: &[&str]| Devices { names: names.iter().map(|n| (*n).to_owned()).collect(), rails };
        let one = wanted(None, Some(&names(1, &["mlx5_3:1", "eth0"])), 22, |_| None);
        assert!(has(&one, "NET_DEVICES", "mlx5_3:1,eth0"), "{one:?}");
        assert!(!one.iter().any(|(key, _)| *key == "MAX_RMA_RAILS"), "{one:?}");
        let two = names(2, &["mlx5_3:1", "mlx5_4:1"]);
        assert!(has(&wanted(None, Some(&two), 22, |_| None), "MAX_RMA_RAILS", "2"));
        let user = |key: &str| (key == "MAX_RMA_RAILS").then(|| "1".to_owned());
        assert!(!wanted(None, Some(&two), 22, user).iter().any(|(key, _)| *key == "MAX_RMA_RAILS"));
        for none in [None, Some(&Devices::default())] {
            assert!(!wanted(None, none, 22, |_| None).iter().any(|(key, _)| *key == "NET_DEVICES"));
        }
    }

    #[test]
    fn old_versions_get_the_names_they_know() {
        let old = wanted(None, None, 13, |_| None);
        assert!(has(&old, "MM_ERROR_HANDLING", "y"), "{old:?}");
        assert!(!old.iter().any(|(key, _)| key.starts_with("POSIX") || key.starts_with("SYSV")), "{old:?}");
        let tcp = wanted(Some("tcp"), None, 13, |_| None);
        assert!(!has(&tcp, "MM_ERROR_HANDLING", "y"), "{tcp:?}");
    }

    #[test]
    fn tcps_own_put_is_the_users_to_turn_off() {
        for minor in [13, 22] {
            let all = wanted(None, None, minor, |_| None);
            assert!(!all.iter().any(|(key, _)| key.ends_with("PUT_ENABLE")), "{all:?}");
        }
        // What is not understood counts as on, and then there is no fence.
        assert!([None, Some("y"), Some("1"), Some(""), Some("maybe")].into_iter().all(puts_by));
        assert!(![Some("n"), Some("no"), Some("NO"), Some("0")].into_iter().any(puts_by));
    }

    #[test]
    fn emulated_puts_are_named() {
        let off = |name: &'static str| move |key: &str| (key == name).then(|| "n".to_owned());
        assert_eq!(emulated(DEFAULT_TLS, 22, |_| None), None);
        for tls in [DEFAULT_TLS, "all", "^cma", "tcp"] {
            assert!(emulated(tls, 13, |_| None).is_some(), "{tls}");
            assert!(emulated(tls, 22, off("TCP_PUT_ENABLE")).is_some(), "{tls}");
            assert!(emulated(tls, 22, off("PROTO_ENABLE")).is_some(), "{tls}");
        }
        assert_eq!(emulated("posix,rc", 13, |_| None), None);
        assert_eq!(emulated("^cma,tcp", 13, |_| None), None);
    }
}
