//! Owners of UCX's objects: each call checked, each object destroyed once and in the right order. A worker and
//! what hangs from it belong to one thread (they are not `Send`); a context and its memory are shared.

use crate::FabricError;
use kvxfer_proto::msg::MemKind;
use kvxfer_ucx_sys::bindings as sys;
use kvxfer_ucx_sys::status::{ptr_is_ptr, ptr_status};
use kvxfer_ucx_sys::{Library, bindings::Api};
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::ffi::{CStr, CString, c_void};
use std::mem::MaybeUninit;
use std::os::fd::RawFd;
use std::ptr::{self, NonNull};
use std::rc::Rc;
use std::sync::Arc;

/// Active messages larger than this are not ours.
const MAX_NOTE: usize = 1024;
/// Active messages kept unread at most; past it the newest are dropped, and their senders' connect fails.
const MAX_NOTES: usize = 4096;

/// A status other than OK, as this crate's error.
pub(super) fn failed(lib: &Library, call: &'static str, status: sys::ucs_status_t) -> FabricError {
    FabricError::Os { call, why: format!("{} (UCX status {status})", lib.status_string(status)) }
}

fn check(lib: &Library, call: &'static str, status: sys::ucs_status_t) -> Result<(), FabricError> {
    if status == sys::UCS_OK { Ok(()) } else { Err(failed(lib, call, status)) }
}

/// A parameter structure with every field zero and no field marked as set.
///
/// # Safety
/// All zeros must be a valid value of `T`.
unsafe fn zeroed<T>() -> T {
    // SAFETY: by this function's contract.
    unsafe { MaybeUninit::zeroed().assume_init() }
}

/// What UCX prints about an object, as text.
fn printed(print: impl FnOnce(*mut libc::FILE)) -> Option<String> {
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
    lib: &'static Library,
    raw: sys::ucp_context_h,
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
        params.field_mask =
            u64::from(sys::UCP_PARAM_FIELD_FEATURES | sys::UCP_PARAM_FIELD_MT_WORKERS_SHARED);
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
    raw: sys::ucp_mem_h,
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
        let status =
            unsafe { api.ucp_rkey_pack(self.context.raw, self.raw, &raw mut buf, &raw mut len) };
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
    usize::try_from(n)
        .map_err(|_| FabricError::Os { call: "ucp_mem_map", why: format!("{n:#x} is past this machine's addresses") })
}

/// An active message as it came, with the endpoint that leads back to its sender.
pub(super) struct Note {
    pub(super) bytes: Vec<u8>,
    pub(super) reply: sys::ucp_ep_h,
}

type Notes = RefCell<VecDeque<Note>>;

/// A worker and what hangs from it, for one thread.
pub(super) struct Worker {
    context: Arc<Context>,
    raw: sys::ucp_worker_h,
    notes: Box<Notes>,
}

impl Worker {
    pub(super) fn new(context: &Arc<Context>, note_id: u16) -> Result<Rc<Self>, FabricError> {
        let (lib, api) = (context.lib, context.lib.api());
        // SAFETY: numbers and null pointers.
        let mut params: sys::ucp_worker_params_t = unsafe { zeroed() };
        params.field_mask = u64::from(sys::UCP_WORKER_PARAM_FIELD_THREAD_MODE);
        params.thread_mode = sys::UCS_THREAD_MODE_SINGLE;
        let mut raw: sys::ucp_worker_h = ptr::null_mut();
        // SAFETY: a live context, valid parameters, a valid place.
        let status = unsafe { api.ucp_worker_create(context.raw, &raw const params, &raw mut raw) };
        check(lib, "ucp_worker_create", status)?;
        let worker = Rc::new(Self { context: Arc::clone(context), raw, notes: Box::default() });
        // SAFETY: numbers, null pointers and an empty callback.
        let mut handler: sys::ucp_am_handler_param_t = unsafe { zeroed() };
        handler.field_mask = u64::from(
            sys::UCP_AM_HANDLER_PARAM_FIELD_ID
                | sys::UCP_AM_HANDLER_PARAM_FIELD_CB
                | sys::UCP_AM_HANDLER_PARAM_FIELD_ARG,
        );
        handler.id = u32::from(note_id);
        handler.cb = Some(on_note);
        handler.arg = ptr::from_ref::<Notes>(&worker.notes).cast_mut().cast();
        // SAFETY: `arg` is boxed and outlives the worker, which is destroyed in our drop before the box is freed.
        let status = unsafe { api.ucp_worker_set_am_recv_handler(raw, &raw const handler) };
        check(lib, "ucp_worker_set_am_recv_handler", status)?;
        Ok(worker)
    }

    pub(super) fn lib(&self) -> &'static Library {
        self.context.lib
    }

    fn api(&self) -> &'static Api {
        self.context.lib.api()
    }

    pub(super) fn context(&self) -> &Arc<Context> {
        &self.context
    }

    pub(super) fn progress(&self) -> bool {
        // SAFETY: a live worker, used by the one thread that made it (Worker is not Send).
        unsafe { self.api().ucp_worker_progress(self.raw) != 0 }
    }

    pub(super) fn take_note(&self) -> Option<Note> {
        self.notes.borrow_mut().pop_front()
    }

    pub(super) fn address(&self) -> Result<Vec<u8>, FabricError> {
        let (mut buf, mut len): (*mut sys::ucp_address_t, usize) = (ptr::null_mut(), 0);
        // SAFETY: a live worker and two valid places.
        let status = unsafe { self.api().ucp_worker_get_address(self.raw, &raw mut buf, &raw mut len) };
        check(self.lib(), "ucp_worker_get_address", status)?;
        // SAFETY: UCX returned that many bytes at that address.
        let bytes = unsafe { std::slice::from_raw_parts(buf.cast::<u8>(), len) }.to_vec();
        // SAFETY: given by ucp_worker_get_address, released once.
        unsafe { self.api().ucp_worker_release_address(self.raw, buf) };
        Ok(bytes)
    }

    pub(super) fn event_fd(&self) -> Result<RawFd, FabricError> {
        let mut fd = -1;
        // SAFETY: a live worker of a context with the wake-up feature, and a valid place.
        let status = unsafe { self.api().ucp_worker_get_efd(self.raw, &raw mut fd) };
        check(self.lib(), "ucp_worker_get_efd", status)?;
        Ok(fd)
    }

    /// `false` when there is work already.
    pub(super) fn arm(&self) -> Result<bool, FabricError> {
        // SAFETY: a live worker of a context with the wake-up feature.
        match unsafe { self.api().ucp_worker_arm(self.raw) } {
            sys::UCS_OK => Ok(true),
            sys::UCS_ERR_BUSY => Ok(false),
            status => Err(failed(self.lib(), "ucp_worker_arm", status)),
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        // SAFETY: made by ucp_worker_create; endpoints and keys hold an Rc of us, so none is in use. Callbacks that
        // run in here find the notes, which are freed after.
        unsafe { self.api().ucp_worker_destroy(self.raw) };
    }
}

unsafe extern "C" fn on_note(
    arg: *mut c_void,
    _header: *const c_void,
    _header_length: usize,
    data: *mut c_void,
    length: usize,
    param: *const sys::ucp_am_recv_param_t,
) -> sys::ucs_status_t {
    // SAFETY: `arg` is the worker's boxed notes, see Worker::new; UCX calls this on the thread that progresses.
    let notes = unsafe { &*arg.cast::<Notes>() };
    // SAFETY: UCX hands in a valid structure.
    let param = unsafe { &*param };
    let whole = param.recv_attr & u64::from(sys::UCP_AM_RECV_ATTR_FLAG_RNDV) == 0;
    if whole
        && !data.is_null()
        && length <= MAX_NOTE
        && let Ok(mut notes) = notes.try_borrow_mut()
        && notes.len() < MAX_NOTES
    {
        let has_reply = param.recv_attr & u64::from(sys::UCP_AM_RECV_ATTR_FIELD_REPLY_EP) != 0;
        // SAFETY: UCX hands in that many bytes, valid for the length of this call.
        let bytes = unsafe { std::slice::from_raw_parts(data.cast::<u8>(), length) }.to_vec();
        notes.push_back(Note { bytes, reply: if has_reply { param.reply_ep } else { ptr::null_mut() } });
    }
    sys::UCS_OK
}

/// A request that UCX has not completed. Its owner polls it; dropping it lets UCX free it when it completes.
pub(super) struct Request {
    worker: Rc<Worker>,
    raw: NonNull<c_void>,
}

impl Request {
    /// What an `_nbx` call returned: done, failed or under way.
    fn from_ptr(
        worker: &Rc<Worker>,
        call: &'static str,
        raw: sys::ucs_status_ptr_t,
    ) -> Result<Option<Self>, FabricError> {
        match ptr_status(raw) {
            Some(sys::UCS_OK) => Ok(None),
            Some(status) => Err(failed(worker.lib(), call, status)),
            None => Ok(NonNull::new(raw).map(|raw| Self { worker: Rc::clone(worker), raw })),
        }
    }

    /// `None` while it is under way.
    pub(super) fn poll(&self) -> Option<sys::ucs_status_t> {
        // SAFETY: a request that was not freed yet; it is freed in drop.
        let status = unsafe { self.worker.api().ucp_request_check_status(self.raw.as_ptr()) };
        (status != sys::UCS_INPROGRESS).then_some(status)
    }
}

impl Drop for Request {
    fn drop(&mut self) {
        // SAFETY: a request of ours, freed once; one that is under way is freed by UCX when it completes.
        unsafe { self.worker.api().ucp_request_free(self.raw.as_ptr()) };
    }
}

/// An endpoint's error, set by UCX's callback.
pub(super) type ErrorCell = Cell<sys::ucs_status_t>;

/// An open endpoint. [`Endpoint::close`] must be used: dropping it leaves the endpoint to the worker's end.
pub(super) struct Endpoint {
    worker: Rc<Worker>,
    raw: sys::ucp_ep_h,
    error: Box<ErrorCell>,
}

unsafe extern "C" fn on_error(arg: *mut c_void, _ep: sys::ucp_ep_h, status: sys::ucs_status_t) {
    // SAFETY: `arg` is the endpoint's boxed cell, which lives until the endpoint's close has completed or the
    // worker is gone; UCX calls this on the thread that progresses.
    unsafe { &*arg.cast::<ErrorCell>() }.set(status);
}

impl Endpoint {
    pub(super) fn create(worker: &Rc<Worker>, address: &[u8]) -> Result<Self, FabricError> {
        let error = Box::new(Cell::new(sys::UCS_OK));
        // SAFETY: numbers, null pointers and empty callbacks.
        let mut params: sys::ucp_ep_params_t = unsafe { zeroed() };
        params.field_mask = u64::from(
            sys::UCP_EP_PARAM_FIELD_REMOTE_ADDRESS
                | sys::UCP_EP_PARAM_FIELD_ERR_HANDLING_MODE
                | sys::UCP_EP_PARAM_FIELD_ERR_HANDLER,
        );
        params.address = address.as_ptr().cast();
        params.err_mode = sys::UCP_ERR_HANDLING_MODE_PEER;
        params.err_handler.cb = Some(on_error);
        params.err_handler.arg = ptr::from_ref::<ErrorCell>(&error).cast_mut().cast();
        let mut raw: sys::ucp_ep_h = ptr::null_mut();
        // SAFETY: a live worker, valid parameters, a valid place. The address came from an authenticated peer; UCX
        // has no length for it, so `blob` demands that it be followed by padding.
        let status = unsafe { worker.api().ucp_ep_create(worker.raw, &raw const params, &raw mut raw) };
        check(worker.lib(), "ucp_ep_create", status)?;
        Ok(Self { worker: Rc::clone(worker), raw, error })
    }

    pub(super) fn raw(&self) -> sys::ucp_ep_h {
        self.raw
    }

    /// The failure that UCX reported, if it did.
    pub(super) fn error(&self) -> Option<FabricError> {
        let status = self.error.get();
        (status != sys::UCS_OK).then(|| FabricError::Closed(self.worker.lib().status_string(status)))
    }

    /// # Safety
    /// `key` has the bytes that a peer's ucp_rkey_pack gave, with padding after them.
    pub(super) unsafe fn unpack_rkey(&self, key: &[u8]) -> Result<Rkey, FabricError> {
        let mut raw: sys::ucp_rkey_h = ptr::null_mut();
        // SAFETY: a live endpoint, a valid place, and a key by this function's contract.
        let status = unsafe {
            self.worker.api().ucp_ep_rkey_unpack(self.raw, key.as_ptr().cast(), &raw mut raw)
        };
        check(self.worker.lib(), "ucp_ep_rkey_unpack", status)?;
        Ok(Rkey { worker: Rc::clone(&self.worker), raw })
    }

    /// Starts a put and forgets its request: errors come from the flush and the error handler.
    ///
    /// # Safety
    /// `local` is valid for `len` bytes until a later flush of this endpoint completes or its close does, lies in
    /// `mem`; `key` belongs to this endpoint and outlives the put, too.
    pub(super) unsafe fn put(
        &self,
        mem: &Mem,
        local: usize,
        len: usize,
        remote: u64,
        key: &Rkey,
        params: &mut PutParams,
    ) -> Result<(), FabricError> {
        params.0.memh = mem.raw;
        let api = self.worker.api();
        // SAFETY: by this function's contract.
        let req = unsafe {
            api.ucp_put_nbx(
                self.raw,
                ptr::with_exposed_provenance(local),
                len,
                remote,
                key.raw,
                &raw const params.0,
            )
        };
        if ptr_is_ptr(req) {
            // SAFETY: a request that was just returned; UCX frees it when it completes.
            unsafe { api.ucp_request_free(req) };
            return Ok(());
        }
        match ptr_status(req) {
            Some(sys::UCS_OK) | None => Ok(()),
            Some(status) => Err(failed(self.worker.lib(), "ucp_put_nbx", status)),
        }
    }

    /// A flush of all that was posted; `None` when there is nothing to wait for.
    pub(super) fn flush(&self) -> Result<Option<Request>, FabricError> {
        // SAFETY: numbers, null pointers and an empty callback.
        let params: sys::ucp_request_param_t = unsafe { zeroed() };
        // SAFETY: a live endpoint and valid parameters.
        let req = unsafe { self.worker.api().ucp_ep_flush_nbx(self.raw, &raw const params) };
        Request::from_ptr(&self.worker, "ucp_ep_flush_nbx", req)
    }

    /// Sends an active message. The bytes must stay where they are until the request is done.
    ///
    /// # Safety
    /// `bytes` outlives the request.
    pub(super) unsafe fn note(&self, id: u16, bytes: &[u8]) -> Result<Option<Request>, FabricError> {
        // SAFETY: numbers, null pointers and an empty callback.
        let mut params: sys::ucp_request_param_t = unsafe { zeroed() };
        params.op_attr_mask = sys::UCP_OP_ATTR_FIELD_FLAGS;
        params.flags = sys::UCP_AM_SEND_FLAG_REPLY | sys::UCP_AM_SEND_FLAG_EAGER;
        // SAFETY: a live endpoint, no header, bytes that stay by this function's contract.
        let req = unsafe {
            self.worker.api().ucp_am_send_nbx(
                self.raw,
                u32::from(id),
                ptr::null(),
                0,
                bytes.as_ptr().cast(),
                bytes.len(),
                &raw const params,
            )
        };
        Request::from_ptr(&self.worker, "ucp_am_send_nbx", req)
    }

    /// The transports that the endpoint uses, each once; empty if UCX does not say.
    pub(super) fn transports(&self) -> Vec<String> {
        let mut names = if self.worker.lib().has_ep_query() { self.queried() } else { self.parsed() };
        names.sort();
        names.dedup();
        names
    }

    fn queried(&self) -> Vec<String> {
        const MAX: usize = 64;
        let mut entries =
            [sys::ucp_transport_entry_t { transport_name: ptr::null(), device_name: ptr::null() }; MAX];
        // SAFETY: numbers and null pointers.
        let mut attr: sys::ucp_ep_attr_t = unsafe { zeroed() };
        attr.field_mask = u64::from(sys::UCP_EP_ATTR_FIELD_TRANSPORTS);
        attr.transports.entries = entries.as_mut_ptr();
        attr.transports.num_entries = 64;
        attr.transports.entry_size = size_of::<sys::ucp_transport_entry_t>();
        // SAFETY: a live endpoint and a structure whose array has the number of entries that it says.
        let status = unsafe { self.worker.api().ucp_ep_query(self.raw, &raw mut attr) };
        if status != sys::UCS_OK {
            return Vec::new();
        }
        let count = usize::try_from(attr.transports.num_entries).unwrap_or(0).min(MAX);
        entries
            .iter()
            .take(count)
            .filter(|e| !e.transport_name.is_null())
            // SAFETY: UCX's names are NUL-terminated and live as long as the endpoint.
            .map(|e| unsafe { CStr::from_ptr(e.transport_name) }.to_string_lossy().into_owned())
            .collect()
    }

    fn parsed(&self) -> Vec<String> {
        // SAFETY: a live endpoint and an open stream.
        printed(|stream| unsafe { self.worker.api().ucp_ep_print_info(self.raw, stream) })
            .map(|text| lanes(&text))
            .unwrap_or_default()
    }

    /// Starts to close: in force (at once, pending operations are cancelled) or after a flush. The endpoint is
    /// closed when the request is done.
    pub(super) fn close(self, force: bool) -> Closing {
        // SAFETY: numbers, null pointers and an empty callback.
        let mut params: sys::ucp_request_param_t = unsafe { zeroed() };
        params.op_attr_mask = sys::UCP_OP_ATTR_FIELD_FLAGS;
        params.flags = if force { sys::UCP_EP_CLOSE_FLAG_FORCE } else { 0 };
        // SAFETY: a live endpoint, closed once because this takes it.
        let req = unsafe { self.worker.api().ucp_ep_close_nbx(self.raw, &raw const params) };
        let request = Request::from_ptr(&self.worker, "ucp_ep_close_nbx", req);
        Closing { request, error: self.error }
    }
}

/// An endpoint that is being closed; keeps what UCX may still call back into.
pub(super) struct Closing {
    request: Result<Option<Request>, FabricError>,
    error: Box<ErrorCell>,
}

impl Closing {
    /// `None` while it is under way.
    pub(super) fn poll(&mut self) -> Option<Result<(), FabricError>> {
        match &self.request {
            Ok(None) => Some(Ok(())),
            // The endpoint is gone whatever the status says: it tells of operations that were cut off.
            Ok(Some(request)) => request.poll().map(|_| Ok(())),
            Err(error) => Some(Err(error.clone())),
        }
    }

    /// Keeps the error cell for as long as the worker lives, for an endpoint whose close did not end.
    pub(super) fn into_cell(self) -> Box<ErrorCell> {
        self.error
    }
}

/// A peer's key, unpacked for one endpoint.
pub(super) struct Rkey {
    worker: Rc<Worker>,
    raw: sys::ucp_rkey_h,
}

impl Drop for Rkey {
    fn drop(&mut self) {
        // SAFETY: unpacked by us, destroyed once, before the worker; the fabric keeps it until no put can use it.
        unsafe { self.worker.api().ucp_rkey_destroy(self.raw) };
    }
}

/// The parameters of a put, made once and used for many.
pub(super) struct PutParams(sys::ucp_request_param_t);

impl PutParams {
    pub(super) fn new() -> Self {
        // SAFETY: numbers, null pointers and an empty callback.
        let mut params: sys::ucp_request_param_t = unsafe { zeroed() };
        params.op_attr_mask = sys::UCP_OP_ATTR_FIELD_MEMH;
        Self(params)
    }
}

/// The transports in what ucp_ep_print_info prints: `#   lane[0]:  2:posix/memory.0 md[1] ...`.
fn lanes(text: &str) -> Vec<String> {
    text.lines()
        .filter_map(|line| line.trim_start_matches(['#', ' ']).strip_prefix("lane["))
        .filter_map(|rest| {
            let name = rest.split_once("]:")?.1.split_whitespace().next()?;
            let name = name.split_once(':').map_or(name, |(_, name)| name);
            Some(name.split_once('/')?.0.to_owned())
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::lanes;

    #[test]
    fn lanes_are_read_from_what_ucx_prints() {
        let text = "#\n# UCP endpoint 0x7f\n#\n#               peer: host:1\n\
                    #                 lane[0]:  2:posix/memory.0 md[1]           -> md[1]/posix/sysdev[255] am\n\
                    #                 lane[1]:  0:tcp/lo.0 md[0] -> addr[1].md[0]/tcp/sysdev[255] rma_bw#0\n#\n";
        assert_eq!(lanes(text), ["posix", "tcp"]);
        assert!(lanes("nothing").is_empty());
    }
}
