//! Finds libucp and makes sure that the process has one copy of UCX.
//!
//! UCX is four libraries that share state by file name. When another package has loaded its own copy (a wheel
//! that carries one, say), half of the calls of one copy end in the other, and the process hangs or worse. So:
//! a copy that is in the process already is used, never a second one loaded beside it; and what was loaded is
//! checked to come from one folder.

use crate::bindings::{Api, UCP_API_MAJOR, UCP_API_MINOR};
use libloading::os::unix::{Library as Dl, RTLD_LOCAL, RTLD_NOW};
use std::ffi::{CStr, OsStr};
use std::fmt;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};
use thiserror::Error;

/// Names the libucp to load: a path, or a name that the dynamic linker searches for.
pub const ENV_LIBRARY: &str = "KVXFER_UCX_LIBRARY";

const SONAME: &str = "libucp.so.0";

/// One symbol of each library of UCX, in the order ucp, uct, ucs, ucm.
const PARTS: [(&str, &CStr); 4] = [
    ("libucp", c"ucp_get_version"),
    ("libuct", c"uct_query_components"),
    ("libucs", c"ucs_status_string"),
    ("libucm", c"ucm_set_event_handler"),
];

/// Functions that newer versions of UCX have and kvxfer can do without.
const OPTIONAL: [&str; 1] = ["ucp_ep_query"];

/// A place where libucp was looked for, and why it was not taken.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct Tried {
    /// What was opened: a path or a name.
    pub what: PathBuf,
    /// Why that place: the variable, the system, the wheel.
    pub source: &'static str,
    /// The dynamic linker's words.
    pub why: String,
}

impl fmt::Display for Tried {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ({}): {}", self.what.display(), self.source, self.why)
    }
}

/// Why there is no UCX to be used.
#[derive(Clone, PartialEq, Eq, Debug, Error)]
pub enum LoadError {
    /// No libucp was found, or none could be opened.
    #[error(
        "no UCX found; install Debian's libucx0 or the wheel libucx-cu12, or set {ENV_LIBRARY} to a libucp.so.0; \
         tried: {}", list(.tried)
    )]
    NotFound {
        /// Every place, in the order in which it was tried.
        tried: Vec<Tried>,
    },
    /// Another copy of UCX is in the process already.
    #[error(
        "{ENV_LIBRARY} names {}, but this process has loaded {} already, and two copies of UCX in one process can \
         hang; set {ENV_LIBRARY} to the loaded one, or load kvxfer's UCX first", .wanted.display(), .loaded.display()
    )]
    OtherCopyLoaded {
        /// The libucp that the variable names.
        wanted: PathBuf,
        /// The one that is in the process.
        loaded: PathBuf,
    },
    /// The four libraries of UCX come from more than one folder.
    #[error(
        "this process has parts of more than one copy of UCX, which can hang: {}; set {ENV_LIBRARY} to the libucp of \
         the copy that was loaded first", paths(.parts)
    )]
    Mixed {
        /// Files of UCX in the process.
        parts: Vec<PathBuf>,
    },
    /// The library lacks functions that kvxfer needs.
    #[error("{} lacks {}; UCX 1.13 or later is needed", .path.display(), .symbols.join(", "))]
    MissingSymbols {
        /// The library.
        path: PathBuf,
        /// What it lacks.
        symbols: Vec<String>,
    },
    /// The library speaks another major version of the interface, or one that is too old.
    #[error("{} is UCX {found}; kvxfer needs 1.13 or a later 1.x", .path.display())]
    Version {
        /// The library.
        path: PathBuf,
        /// Its version.
        found: Version,
    },
}

fn list(tried: &[Tried]) -> String {
    tried.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}

fn paths(parts: &[PathBuf]) -> String {
    parts.iter().map(|p| p.display().to_string()).collect::<Vec<_>>().join(", ")
}

/// UCX's version.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct Version {
    /// Major.
    pub major: u32,
    /// Minor.
    pub minor: u32,
    /// Release.
    pub release: u32,
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.release)
    }
}

/// libucp, loaded for good: UCX hooks the process's memory calls, so it is never unloaded.
pub struct Library {
    api: Api,
    path: PathBuf,
    version: Version,
    source: &'static str,
}

impl fmt::Debug for Library {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "UCX {} at {} ({})", self.version, self.path.display(), self.source)
    }
}

impl Library {
    /// The process's UCX, loaded on the first call that finds one. Looks at `KVXFER_UCX_LIBRARY`, then for a copy
    /// that the process has loaded, then for the system's `libucp.so.0`, then in `wheel_dir`, the folder of the
    /// `libucx` wheel that holds `libucp.so.0`.
    ///
    /// # Errors
    /// [`LoadError`] says where it looked. A later call looks again.
    pub fn load(wheel_dir: Option<&Path>) -> Result<&'static Self, LoadError> {
        static LOADED: Mutex<Option<&'static Library>> = Mutex::new(None);
        // Nothing is left half done when a thread panics with the lock held, so poison has no meaning here.
        let mut loaded = LOADED.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(library) = *loaded {
            return Ok(library);
        }
        let wanted = std::env::var_os(ENV_LIBRARY).filter(|v| !v.is_empty()).map(PathBuf::from);
        let library = &*Box::leak(Box::new(Self::find(wanted.as_deref(), wheel_dir)?));
        *loaded = Some(library);
        Ok(library)
    }

    fn find(wanted: Option<&Path>, wheel_dir: Option<&Path>) -> Result<Self, LoadError> {
        let present = ucx_files_in_process();
        if let Some(loaded) = single_copy(&present)? {
            if let Some(wanted) = wanted
                && !same_file(wanted, &loaded)
            {
                return Err(LoadError::OtherCopyLoaded { wanted: wanted.to_owned(), loaded });
            }
            return match open(&loaded) {
                Ok(dl) => Self::check(dl, "already in the process"),
                Err(why) => Err(LoadError::NotFound {
                    tried: vec![Tried { what: loaded, source: "already in the process", why }],
                }),
            };
        }
        let candidates: Vec<(PathBuf, &'static str)> = match wanted {
            // What the user names is taken or refused, never replaced.
            Some(path) => vec![(path.to_owned(), ENV_LIBRARY)],
            None => std::iter::once((PathBuf::from(SONAME), "system"))
                .chain(wheel_dir.map(|dir| (dir.join(SONAME), "libucx wheel")))
                .collect(),
        };
        let mut tried = Vec::new();
        for (what, source) in candidates {
            match open(&what) {
                Ok(dl) => return Self::check(dl, source),
                Err(why) => tried.push(Tried { what, source, why }),
            }
        }
        if wheel_dir.is_none() && wanted.is_none() {
            tried.push(Tried {
                what: PathBuf::from("libucx"),
                source: "libucx wheel",
                why: "no folder of an installed wheel was given".into(),
            });
        }
        Err(LoadError::NotFound { tried })
    }

    fn check(dl: Dl, source: &'static str) -> Result<Self, LoadError> {
        let mut parts = Vec::new();
        let mut missing = Vec::new();
        for (part, symbol) in PARTS {
            match file_of(&dl, symbol) {
                Some(file) => parts.push(file),
                None => missing.push(format!("{part}'s {}", symbol.to_string_lossy())),
            }
        }
        let Some(path) = parts.first().cloned() else {
            return Err(LoadError::MissingSymbols { path: PathBuf::from(SONAME), symbols: missing });
        };
        // Also what this load brought in beside an older copy under other file names.
        parts.extend(ucx_files_in_process());
        parts.sort();
        parts.dedup();
        if parts.iter().any(|p| p.parent() != path.parent()) || repeated_part(&parts) {
            return Err(LoadError::Mixed { parts });
        }
        let dl: libloading::Library = dl.into();
        // SAFETY: the symbols are looked up by the names that UCX's headers give them, and the table keeps the
        // library open for as long as the function pointers can be used.
        let api = unsafe { Api::from_library(dl) }
            .map_err(|e| LoadError::MissingSymbols { path: path.clone(), symbols: vec![e.to_string()] })?;
        missing.extend(missing_symbols(&api));
        if !missing.is_empty() {
            return Err(LoadError::MissingSymbols { path, symbols: missing });
        }
        let version = version_of(&api);
        if version.major != UCP_API_MAJOR || version.minor < 13 {
            return Err(LoadError::Version { path, found: version });
        }
        Ok(Self { api, path, version, source })
    }

    /// The function pointers. Every one is present but `ucp_ep_query`, see [`Library::has_ep_query`].
    pub fn api(&self) -> &Api {
        &self.api
    }

    /// Whether endpoints can be asked for their transports.
    pub fn has_ep_query(&self) -> bool {
        // Present in 1.13 as a symbol, but without the field for transports, which came with 1.14.
        self.api.ucp_ep_query.is_ok() && self.version >= Version { major: 1, minor: 14, release: 0 }
    }

    /// The file that libucp was loaded from.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Which place it was found in.
    pub fn source(&self) -> &'static str {
        self.source
    }

    /// What the library says its version is.
    pub fn version(&self) -> Version {
        self.version
    }

    /// The version of the interface to ask for: ours, or the library's where it is older.
    pub fn api_version(&self) -> (u32, u32) {
        (UCP_API_MAJOR, self.version.minor.min(UCP_API_MINOR))
    }

    /// A status in words.
    pub fn status_string(&self, status: crate::bindings::ucs_status_t) -> String {
        // SAFETY: takes any number and returns a static string (for unknown numbers a thread-local buffer that
        // is copied before this returns).
        unsafe { CStr::from_ptr(self.api.ucs_status_string(status)) }.to_string_lossy().into_owned()
    }
}

fn open(what: &Path) -> Result<Dl, String> {
    // NODELETE: UCX patches the process's memory functions and must never be unmapped.
    // SAFETY: runs UCX's constructors, which read the environment and install memory hooks; nothing else in the
    // process depends on these. The name comes from this file or from the user's own environment.
    unsafe { Dl::open(Some(what), RTLD_NOW | RTLD_LOCAL | libc::RTLD_NODELETE) }.map_err(|e| e.to_string())
}

/// The file that holds the code of a symbol.
fn file_of(dl: &Dl, symbol: &CStr) -> Option<PathBuf> {
    // SAFETY: the symbol is only used as an address.
    let address = unsafe { dl.get::<*mut libc::c_void>(symbol.to_bytes_with_nul()) }.ok()?.into_raw();
    let mut info = libc::Dl_info {
        dli_fname: std::ptr::null(),
        dli_fbase: std::ptr::null_mut(),
        dli_sname: std::ptr::null(),
        dli_saddr: std::ptr::null_mut(),
    };
    // SAFETY: `info` is a valid structure to be filled in; any address may be asked for.
    if unsafe { libc::dladdr(address, &raw mut info) } == 0 || info.dli_fname.is_null() {
        return None;
    }
    // SAFETY: dladdr returned a NUL-terminated name that lives as long as the library, which is never unloaded.
    let name = unsafe { CStr::from_ptr(info.dli_fname) };
    Some(canonical(Path::new(OsStr::from_bytes(name.to_bytes()))))
}

/// Every libucp, libuct, libucs and libucm that is mapped into the process (also under the mangled names that
/// repaired wheels use), in the order of loading.
fn ucx_files_in_process() -> Vec<PathBuf> {
    unsafe extern "C" fn visit(
        info: *mut libc::dl_phdr_info,
        _size: libc::size_t,
        data: *mut libc::c_void,
    ) -> libc::c_int {
        // SAFETY: `data` is the vector that dl_iterate_phdr was called with just below; nobody else uses it.
        let files = unsafe { &mut *data.cast::<Vec<PathBuf>>() };
        // SAFETY: the linker hands in a valid structure; its name is null or NUL-terminated.
        let name = unsafe { (*info).dlpi_name };
        if !name.is_null() {
            // SAFETY: as above.
            let path = Path::new(OsStr::from_bytes(unsafe { CStr::from_ptr(name) }.to_bytes()));
            if part_of(path).is_some() {
                files.push(canonical(path));
            }
        }
        0
    }
    let mut files: Vec<PathBuf> = Vec::new();
    // SAFETY: `visit` has the type that is asked for and gets the vector that outlives the call.
    unsafe { libc::dl_iterate_phdr(Some(visit), (&raw mut files).cast()) };
    files
}

/// Which of the four libraries a file is, by its name: `libucp.so.0`, `libucp.so.0.0.0`, `libucp-a1b2c3.so.0`.
fn part_of(path: &Path) -> Option<&'static str> {
    let name = path.file_name()?.to_str()?;
    PARTS.iter().map(|(part, _)| *part).find(|part| {
        name.strip_prefix(part).is_some_and(|rest| rest.starts_with(".so") || rest.starts_with('-'))
    })
}

/// The libucp among the loaded files, if there is one copy of UCX and it has one.
fn single_copy(files: &[PathBuf]) -> Result<Option<PathBuf>, LoadError> {
    let mixed = files.iter().any(|f| f.parent() != files.first().and_then(|f| f.parent()));
    if mixed || repeated_part(files) {
        return Err(LoadError::Mixed { parts: files.to_vec() });
    }
    Ok(files.iter().find(|f| part_of(f) == Some("libucp")).cloned())
}

fn repeated_part(files: &[PathBuf]) -> bool {
    PARTS.iter().any(|(part, _)| files.iter().filter(|f| part_of(f) == Some(part)).count() > 1)
}

fn canonical(path: &Path) -> PathBuf {
    path.canonicalize().unwrap_or_else(|_| path.to_owned())
}

/// A bare name means whatever the linker finds, and that is the loaded copy if its name matches.
fn same_file(wanted: &Path, loaded: &Path) -> bool {
    if wanted.components().count() == 1 {
        return wanted == Path::new(SONAME) || loaded.file_name() == wanted.file_name();
    }
    canonical(wanted) == *loaded
}

fn missing_symbols(api: &Api) -> Vec<String> {
    macro_rules! absent {
        ($($name:ident),* $(,)?) => {
            [$((stringify!($name), api.$name.is_err())),*]
        };
    }
    absent![
        ucp_get_version,
        ucp_get_version_string,
        ucp_config_read,
        ucp_config_modify,
        ucp_config_release,
        ucp_init_version,
        ucp_cleanup,
        ucp_context_query,
        ucp_context_print_info,
        ucp_worker_create,
        ucp_worker_destroy,
        ucp_worker_query,
        ucp_worker_progress,
        ucp_worker_get_efd,
        ucp_worker_arm,
        ucp_worker_get_address,
        ucp_worker_release_address,
        ucp_worker_set_am_recv_handler,
        ucp_am_send_nbx,
        ucp_mem_map,
        ucp_mem_unmap,
        ucp_mem_query,
        ucp_rkey_pack,
        ucp_rkey_buffer_release,
        ucp_ep_rkey_unpack,
        ucp_rkey_ptr,
        ucp_rkey_destroy,
        ucp_ep_create,
        ucp_ep_close_nbx,
        ucp_ep_flush_nbx,
        ucp_ep_query,
        ucp_ep_print_info,
        ucp_put_nbx,
        ucp_request_check_status,
        ucp_request_free,
        ucs_status_string,
    ]
    .into_iter()
    .filter(|(name, absent)| *absent && !OPTIONAL.contains(name))
    .map(|(name, _)| name.to_owned())
    .collect()
}

fn version_of(api: &Api) -> Version {
    let (mut major, mut minor, mut release) = (0, 0, 0);
    // SAFETY: three valid places to write to.
    unsafe { api.ucp_get_version(&raw mut major, &raw mut minor, &raw mut release) };
    Version { major, minor, release }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_no_ucx_is_refused_with_the_places_tried() {
        // One test, in this order: once a UCX is in the process, other names are refused for that reason.
        let missing = Path::new("/nonexistent/libucp.so.0");
        let err = Library::find(Some(missing), None).expect_err("a library that is not there was found");
        assert!(
            matches!(&err, LoadError::NotFound { tried } if tried.len() == 1 && tried[0].what == missing)
        );
        let text = err.to_string();
        assert!(text.contains("/nonexistent/libucp.so.0") && text.contains(ENV_LIBRARY), "{text}");
        let err = Library::find(Some(Path::new("libm.so.6")), None).expect_err("libm is not UCX");
        assert!(matches!(err, LoadError::MissingSymbols { .. }), "{err}");
    }

    #[test]
    fn names_of_the_four_libraries() {
        assert_eq!(part_of(Path::new("/a/libucp.so.0")), Some("libucp"));
        assert_eq!(part_of(Path::new("/a/libucs-1f2e3d.so.0.0.0")), Some("libucs"));
        assert_eq!(part_of(Path::new("/a/libuct_cma.so.0")), None);
        assert_eq!(part_of(Path::new("/a/libucs_signal.so.0")), None);
    }

    #[test]
    fn two_copies_are_told_from_one() {
        let p = |s: &str| PathBuf::from(s);
        let one = [p("/a/libucp.so.0"), p("/a/libuct.so.0"), p("/a/libucs.so.0"), p("/a/libucm.so.0")];
        assert_eq!(single_copy(&one), Ok(Some(p("/a/libucp.so.0"))));
        assert_eq!(single_copy(&[]), Ok(None));
        let two = [p("/a/libucp.so.0"), p("/a/libucs.so.0"), p("/b/libucs.so.0")];
        assert!(matches!(single_copy(&two), Err(LoadError::Mixed { .. })));
        let mangled = [p("/a/libucs.so.0"), p("/a/libucs-12.so.0")];
        assert!(matches!(single_copy(&mangled), Err(LoadError::Mixed { .. })));
    }

    #[test]
    fn the_loaded_copy_is_recognised() {
        assert!(same_file(Path::new("libucp.so.0"), Path::new("/usr/lib/libucp.so.0.0.0")));
        assert!(!same_file(Path::new("/opt/ucx/lib/libucp.so.0"), Path::new("/usr/lib/libucp.so.0.0.0")));
    }
}
