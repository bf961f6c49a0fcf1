//! Owners of what belongs to one thread: a UCX worker and its endpoints, requests and keys. None of them is `Send`.
//! Each call is checked, and each object destroyed once and in the right order.

use super::near::Mappings;
use super::safe::{Context, Mem, check, failed, printed, zeroed};
use crate::FabricError;
use kvxfer_ucx_sys::bindings as sys;
use kvxfer_ucx_sys::status::{ptr_is_ptr, ptr_status};
use kvxfer_ucx_sys::{Library, bindings::Api};
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::ffi::{CStr, c_void};
use std::os::fd::RawFd;
use std::ptr::{self, NonNull};
use std::rc::Rc;
use std::sync::Arc;

/// Active messages larger than this are not ours.
const MAX_NOTE: usize = 1024;
/// Active messages kept unread at most; past it the newest are dropped, and their senders' connect fails.
const MAX_NOTES: usize = 4096;

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

/// More than a worker opens with the transports that kvxfer chooses.
const WORKER_DESCRIPTORS: u64 = 32;

/// UCX ends the *process* if it is refused a descriptor at the wrong moment of a worker's making, and its TCP listens no
/// more once it could not accept a connection: so they are counted first.
pub(super) fn need_descriptors(call: &'static str, count: u64) -> Result<(), FabricError> {
    let few = |e: rustix::io::Errno| FabricError::Os {
        call,
        why: format!("fewer than {count} descriptors are free ({e}): raise the limit (ulimit -n)"),
    };
    let first = rustix::event::eventfd(0, rustix::event::EventfdFlags::CLOEXEC).map_err(few)?;
    let mut held = Vec::new();
    for _ in 1..count {
        held.push(rustix::io::fcntl_dupfd_cloexec(&first, 0).map_err(few)?);
    }
    Ok(())
}

impl Worker {
    pub(super) fn new(context: &Arc<Context>, note_id: u16) -> Result<Rc<Self>, FabricError> {
        let (lib, api) = (context.lib, context.lib.api());
        need_descriptors("ucp_worker_create", WORKER_DESCRIPTORS)?;
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
        let status =
            unsafe { self.worker.api().ucp_ep_rkey_unpack(self.raw, key.as_ptr().cast(), &raw mut raw) };
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

impl Rkey {
    /// Where this process finds the `len` bytes at `remote` of the peer's, if a transport has mapped the peer's memory here
    /// and all of them are among these mappings.
    pub(super) fn pointer(&self, remote: u64, len: u64, maps: &Mappings) -> Option<usize> {
        let mut addr: *mut c_void = ptr::null_mut();
        // SAFETY: a live key and a valid place; UCX only computes an address.
        let status = unsafe { self.worker.api().ucp_rkey_ptr(self.raw, remote, &raw mut addr) };
        let addr = (status == sys::UCS_OK).then(|| addr.expose_provenance())?;
        maps.cover(addr, len).then_some(addr)
    }
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
