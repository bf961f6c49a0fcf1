//! Owners of what the process's threads share, a UCX context and its registered memory: each call checked, each
//! object destroyed once and in the right order. What belongs to one thread is in `worker`.

use crate::FabricError;
use kvxfer_proto::msg::MemKind;
use kvxfer_ucx_sys::Library;
use kvxfer_ucx_sys::bindings as sys;
use std::ffi::{CStr, CString, c_void};
use std::mem::MaybeUninit;
use std::ptr;
use std::sync::Arc;

/// A status other than OK, as this crate's error.
pub(super) fn failed(lib: &Library, call: &'static str, status: sys::ucs_status_t) -> FabricError {
    FabricError::Os { call, why: format!("{} (UCX status {status})", lib.status_string(status)) }
}

pub(super) fn check(lib: &Library, call: &'static str, status: sys::ucs_status_t) -> Result<(), FabricError> {
    if status == sys::UCS_OK { Ok(()) } else { Err(failed(lib, call, status)) }
}

/// A parameter structure with every field zero and no field marked as set.
///
/// # Safety
/// All zeros must be a valid value of `T`.
pub(super) unsafe fn zeroed<T>() -> T {
    // SAFETY: by this function's contract.
    unsafe { MaybeUninit::zeroed().assume_init() }
}

/// What UCX prints about an object, as text.
pub(super) fn printed(print: impl FnOnce(*mut libc::FILE)) -> Option<String> {
    let mut buf: *mut libc::c_char = ptr::null_mut();
    let mut len: libc::size_t = 0;
    // SAFETY: two valid places that open_memstream fills in by the time of fclose.
    let stream = unsafe { libc::open_memstream(&raw mut buf, &raw mut len) };
    if stream.is_null() {
        return None;
    }
    print(stream);
    // SAFETY: the stream is open and used by nobody else; after this `buf` is a NUL-terminated allocation of ours.
    if unsafe { libc::fclose(stream) } != 0 || buf.is_null() {
        return None;
    }
    // SAFETY: see above.
    let text = unsafe { CStr::from_ptr(buf) }.to_string_lossy().into_owned();
    // SAFETY: open_memstream allocated it with malloc and gave it to us.
    unsafe { libc::free(buf.cast()) };
    Some(text)
}

/// A UCP context: what the process knows of its transports and registered memory.
#[derive(Debug)]
pub(super) struct Context {
    pub(super) lib: &'static Library,
    pub(super) raw: sys::ucp_context_h,
}

// SAFETY: created with `mt_workers_shared`, and `Context::new` refuses a library that does not then report thread
// mode MULTI for the context, so UCX locks what the threads share.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    /// A context with these settings applied over UCX's own; returns which of them this version has.
    pub(super) fn new(
        lib: &'static Library,
        settings: &[(&str, &str)],
    ) -> Result<(Self, Vec<String>), FabricError> {
        let api = lib.api();
        let mut config: *mut sys::ucp_config_t = ptr::null_mut();
        // SAFETY: null prefix and file mean the defaults; `config` is a valid place.
        let status = unsafe { api.ucp_config_read(ptr::null(), ptr::null(), &raw mut config) };
        check(lib, "ucp_config_read", status)?;
        let mut applied = Vec::new();
        let mut refused = Ok(());
        for (key, value) in settings {
            let (Ok(name), Ok(text)) = (CString::new(*key), CString::new(*value)) else {
                refused = Err(FabricError::Os {
                    call: "ucp_config_modify",
                    why: format!("{key}={value} holds a zero byte"),
                });
                break;
            };
            // SAFETY: a configuration that was just read, and two NUL-terminated strings that UCX copies.
            match unsafe { api.ucp_config_modify(config, name.as_ptr(), text.as_ptr()) } {
                sys::UCS_OK => applied.push(format!("{key}={value}")),
                // Older versions do not know every key.
                sys::UCS_ERR_NO_ELEM => {}
                status => {
                    refused = Err(FabricError::Os {
                        call: "ucp_config_modify",
                        why: format!("UCX_{key}={value}: {}", lib.status_string(status)),
                    });
                    break;
                }
            }
        }
        let result = refused.and_then(|()| Self::with_config(lib, config));
        // SAFETY: read above, released once; ucp_init_version copied what it needs.
        unsafe { api.ucp_config_release(config) };
        Ok((result?, applied))
    }

    fn with_config(lib: &'static Library, config: *mut sys::ucp_config_t) -> Result<Self, FabricError> {
        let api = lib.api();
        // SAFETY: numbers, null pointers and empty callbacks.
        let mut params: sys::ucp_params_t = unsafe { zeroed() };
        params.field_mask = u64::from(sys::UCP_PARAM_FIELD_FEATURES | sys::UCP_PARAM_FIELD_MT_WORKERS_SHARED);
        params.features = u64::from(sys::UCP_FEATURE_RMA | sys::UCP_FEATURE_AM | sys::UCP_FEATURE_WAKEUP);
        params.mt_workers_shared = 1;
        let (major, minor) = lib.api_version();
        let mut raw: sys::ucp_context_h = ptr::null_mut();
        // SAFETY: valid parameters and configuration; `raw` is a valid place.
        let status = unsafe { api.ucp_init_version(major, minor, &raw const params, config, &raw mut raw) };
        check(lib, "ucp_init_version", status)?;
        let context = Self { lib, raw };
        // SAFETY: numbers only.
        let mut attr: sys::ucp_context_attr_t = unsafe { zeroed() };
        attr.field_mask = u64::from(sys::UCP_ATTR_FIELD_THREAD_MODE);
        // SAFETY: a live context and a valid structure.
        let status = unsafe { api.ucp_context_query(raw, &raw mut attr) };
        check(lib, "ucp_context_query", status)?;
        if attr.thread_mode != sys::UCS_THREAD_MODE_MULTI {
            return Err(FabricError::Unavailable {
                fabric: "ucx",
                why: format!(
                    "{} was built without --enable-mt, and agents share one UCX context; install one built with it",
                    lib.path().display()
                ),
            });
        }
        Ok(context)
    }

    /// Whether this UCX can register memory of CUDA devices.
    pub(super) fn knows_cuda(&self) -> bool {
        // SAFETY: numbers only.
        let mut attr: sys::ucp_context_attr_t = unsafe { zeroed() };
        attr.field_mask = u64::from(sys::UCP_ATTR_FIELD_MEMORY_TYPES);
        // SAFETY: a live context and a valid structure.
        let status = unsafe { self.lib.api().ucp_context_query(self.raw, &raw mut attr) };
        status == sys::UCS_OK && attr.memory_types & (1 << sys::UCS_MEMORY_TYPE_CUDA) != 0
    }

    /// Names of the transports' memory domains and transports, as UCX prints them.
    pub(super) fn print_info(&self) -> Option<String> {
        // SAFETY: a live context and an open stream.
        printed(|stream| unsafe { self.lib.api().ucp_context_print_info(self.raw, stream) })
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: made by ucp_init_version; workers and memory hold an Arc of us, so none is left.
        unsafe { self.lib.api().ucp_cleanup(self.raw) };
    }
}

/// Registered memory.
#[derive(Debug)]
pub(super) struct Mem {
    context: Arc<Context>,
    pub(super) raw: sys::ucp_mem_h,
    addr: u64,
    len: u64,
}

// SAFETY: a memory handle is only read after ucp_mem_map, and what UCX changes behind it is locked by the context,
// which is in thread mode MULTI.
unsafe impl Send for Mem {}
// SAFETY: as above.
unsafe impl Sync for Mem {}

impl Mem {
    /// Registers memory that somebody else owns.
    ///
    /// # Safety
    /// The memory must stay mapped for as long as this lives.
    pub(super) unsafe fn register(
        context: &Arc<Context>,
        addr: u64,
        len: u64,
        kind: MemKind,
    ) -> Result<Self, FabricError> {
        Self::map(context, addr, len, 0, kind)
    }

    /// Allocates memory that every transport of the context can share, and registers it.
    pub(super) fn alloc(context: &Arc<Context>, len: u64) -> Result<Self, FabricError> {
        Self::map(context, 0, len, sys::UCP_MEM_MAP_ALLOCATE, MemKind::Host)
    }

    fn map(
        context: &Arc<Context>,
        addr: u64,
        len: u64,
        flags: u32,
        kind: MemKind,
    ) -> Result<Self, FabricError> {
        let lib = context.lib;
        let (address, length) = (native(addr)?, native(len)?);
        // SAFETY: numbers and null pointers.
        let mut params: sys::ucp_mem_map_params_t = unsafe { zeroed() };
        params.field_mask = u64::from(
            sys::UCP_MEM_MAP_PARAM_FIELD_ADDRESS
                | sys::UCP_MEM_MAP_PARAM_FIELD_LENGTH
                | sys::UCP_MEM_MAP_PARAM_FIELD_FLAGS
                | sys::UCP_MEM_MAP_PARAM_FIELD_MEMORY_TYPE,
        );
        params.address = ptr::with_exposed_provenance_mut(address);
        params.length = length;
        params.flags = flags;
        params.memory_type = match kind {
            MemKind::Host => sys::UCS_MEMORY_TYPE_HOST,
            MemKind::Device(_) => sys::UCS_MEMORY_TYPE_CUDA,
        };
        let mut raw: sys::ucp_mem_h = ptr::null_mut();
        // SAFETY: a live context and valid parameters; the caller of `register` vouches for the memory.
        let status = unsafe { lib.api().ucp_mem_map(context.raw, &raw const params, &raw mut raw) };
        check(lib, "ucp_mem_map", status)?;
        let mut mem = Self { context: Arc::clone(context), raw, addr, len };
        // SAFETY: numbers and null pointers.
        let mut attr: sys::ucp_mem_attr_t = unsafe { zeroed() };
        attr.field_mask = u64::from(sys::UCP_MEM_ATTR_FIELD_ADDRESS | sys::UCP_MEM_ATTR_FIELD_LENGTH);
        // SAFETY: a live handle and a valid structure.
        let status = unsafe { lib.api().ucp_mem_query(raw, &raw mut attr) };
        check(lib, "ucp_mem_query", status)?;
        if addr == 0 {
            mem.addr = attr.address.expose_provenance() as u64;
        }
        Ok(mem)
    }

    pub(super) fn addr(&self) -> u64 {
        self.addr
    }

    pub(super) fn len(&self) -> u64 {
        self.len
    }

    pub(super) fn context(&self) -> &Arc<Context> {
        &self.context
    }

    /// The key with which a peer may write here.
    pub(super) fn pack_rkey(&self) -> Result<Vec<u8>, FabricError> {
        let (lib, api) = (self.context.lib, self.context.lib.api());
        let (mut buf, mut len): (*mut c_void, usize) = (ptr::null_mut(), 0);
        // SAFETY: a live context and handle; two valid places.
        let status = unsafe { api.ucp_rkey_pack(self.context.raw, self.raw, &raw mut buf, &raw mut len) };
        check(lib, "ucp_rkey_pack", status)?;
        // SAFETY: UCX returned that many bytes at that address.
        let bytes = unsafe { std::slice::from_raw_parts(buf.cast::<u8>(), len) }.to_vec();
        // SAFETY: given by ucp_rkey_pack, released once.
        unsafe { api.ucp_rkey_buffer_release(buf) };
        Ok(bytes)
    }
}

impl Drop for Mem {
    fn drop(&mut self) {
        // SAFETY: made by ucp_mem_map; the context is alive through our Arc. A failure leaves the memory registered,
        // about which nothing can be done here.
        unsafe { self.context.lib.api().ucp_mem_unmap(self.context.raw, self.raw) };
    }
}

/// An address or length of this process.
fn native(n: u64) -> Result<usize, FabricError> {
    usize::try_from(n).map_err(|_| FabricError::Os {
        call: "ucp_mem_map",
        why: format!("{n:#x} is past this machine's addresses"),
    })
}
