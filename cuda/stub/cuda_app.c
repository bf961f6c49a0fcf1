/* The stub driver with the calls that an engine, a test or a benchmark makes and kvxfer does not: memory of every kind, host
   functions on streams, graphs, timing, CUDA IPC. So tests/gpu and benches/gpu run here as they do on a GPU.

   What is timed is not: cuEventElapsedTime answers a millisecond. Memory that is opened by an IPC handle is new memory. */
#include "cuda_stub.c"

int cuMemAllocManaged(uint64_t *address, size_t bytes, unsigned flags) {
    ENTER("cuMemAllocManaged");
    if (flags != 1) LEAVE(INVALID_VALUE);
    struct context *c = here("cuMemAllocManaged");
    LEAVE(c ? add_range(address, bytes, MANAGED, c->device) : INVALID_CONTEXT);
}

int cuMemAllocAsync(uint64_t *address, size_t bytes, uint64_t stream) {
    ENTER("cuMemAllocAsync");
    struct object *s = object("cuMemAllocAsync", stream, STREAM, &code);
    LEAVE(s ? add_range(address, bytes, POOL, s->device) : code);
}

/* Virtual memory: a handle of an allocation, a range of addresses, and one mapped to the other. */
int cuMemCreate(uint64_t *handle, size_t bytes, const void *properties, uint64_t flags) {
    ENTER("cuMemCreate");
    /* CUmemAllocationProp: pinned, and no handle to export it by. */
    const int *words = properties;
    if (flags != 0 || words[0] != 1 || words[1] != 0 || bytes % 4096 != 0) LEAVE(INVALID_VALUE);
    *handle = 77;
    LEAVE(OK);
}

int cuMemAddressReserve(uint64_t *address, size_t bytes, size_t alignment, uint64_t wanted, uint64_t flags) {
    ENTER("cuMemAddressReserve");
    (void)alignment;
    if (wanted != 0 || flags != 0) LEAVE(INVALID_VALUE);
    struct context *c = here("cuMemAddressReserve");
    LEAVE(c ? add_range(address, bytes, VMM, c->device) : INVALID_CONTEXT);
}

int cuMemMap(uint64_t address, size_t bytes, size_t offset, uint64_t handle, uint64_t flags) {
    ENTER("cuMemMap");
    struct range *r = range_at(address);
    LEAVE(r && r->memory == VMM && bytes <= r->bytes && offset == 0 && handle == 77 && flags == 0 ? OK : INVALID_VALUE);
}

int cuMemSetAccess(uint64_t address, size_t bytes, const void *access, size_t count) {
    ENTER("cuMemSetAccess");
    struct range *r = range_at(address);
    /* CUmemAccessDesc: a device's location, its number, and both reading and writing. */
    const int *words = access;
    LEAVE(r && bytes <= r->bytes && count == 1 && words[0] == 1 && words[2] == 3 ? OK : INVALID_VALUE);
}

int cuMemcpyDtoH_v2(void *to, uint64_t from, size_t bytes) { return copy("cuMemcpyDtoH", (uint64_t)to, from, bytes, 0); }

int cuMemsetD8_v2(uint64_t address, unsigned char value, size_t bytes) {
    ENTER("cuMemsetD8");
    if (!here("cuMemsetD8")) LEAVE(INVALID_CONTEXT);
    struct range *r = range_at(address);
    if (!r || address + bytes > (uint64_t)r->start + r->bytes) LEAVE(INVALID_VALUE);
    memset((void *)address, value, bytes);
    LEAVE(OK);
}

/* What a stream's host function is called with, on a thread of its own as the driver's are. One at a time on a stream. */
struct host_call {
    void (*function)(void *);
    void *data;
    uint64_t stream;
};

static void *call_host(void *argument) {
    struct host_call call = *(struct host_call *)argument;
    free(argument);
    call.function(call.data);
    kvxstub_finish(call.stream);
    return NULL;
}

int cuLaunchHostFunc(uint64_t stream, void (*function)(void *), void *data) {
    ENTER("cuLaunchHostFunc");
    struct object *s = object("cuLaunchHostFunc", stream, STREAM, &code);
    if (!s) LEAVE(code);
    s->queued++;
    struct host_call *call = malloc(sizeof *call);
    *call = (struct host_call){function, data, (uint64_t)s};
    pthread_t thread;
    if (pthread_create(&thread, NULL, call_host, call) != 0) abort();
    pthread_detach(thread);
    LEAVE(OK);
}

int cuEventElapsedTime(float *milliseconds, uint64_t from, uint64_t to) {
    ENTER("cuEventElapsedTime");
    if (!object("cuEventElapsedTime", from, EVENT, &code) || !object("cuEventElapsedTime", to, EVENT, &code)) LEAVE(code);
    *milliseconds = 1;
    LEAVE(OK);
}

int cuEventSynchronize(uint64_t handle) {
    ENTER("cuEventSynchronize");
    struct object *e = object("cuEventSynchronize", handle, EVENT, &code);
    if (!e) LEAVE(code);
    uint64_t stream = (uint64_t)e->stream;
    pthread_mutex_unlock(&lock);
    return stream ? cuStreamSynchronize(stream) : OK;
}

int cuStreamBeginCapture_v2(uint64_t stream, int mode) {
    pthread_mutex_lock(&lock);
    int code = begin("cuStreamBeginCapture");
    if (code == OK && !object("cuStreamBeginCapture", stream, STREAM, &code)) { /* its code */ }
    pthread_mutex_unlock(&lock);
    if (code != OK) return code;
    if (mode != 0) return INVALID_VALUE;
    kvxstub_capture(stream, 1);
    return OK;
}

/* Graphs have no nodes: what was queued on the stream is done. */
int cuStreamEndCapture(uint64_t stream, uint64_t *graph) {
    kvxstub_capture(stream, 0);
    *graph = 88;
    return OK;
}

int cuGraphInstantiateWithFlags(uint64_t *executable, uint64_t graph, uint64_t flags) {
    ENTER("cuGraphInstantiateWithFlags");
    *executable = 99;
    LEAVE(graph == 88 && flags == 0 ? OK : INVALID_VALUE);
}

int cuGraphLaunch(uint64_t executable, uint64_t stream) {
    ENTER("cuGraphLaunch");
    if (executable != 99) LEAVE(INVALID_HANDLE);
    LEAVE(object("cuGraphLaunch", stream, STREAM, &code) ? OK : code);
}

int cuIpcGetMemHandle(unsigned char *handle, uint64_t address) {
    ENTER("cuIpcGetMemHandle");
    struct range *r = range_at(address);
    if (!r || r->memory != DEVICE_MEMORY) LEAVE(INVALID_VALUE);
    memset(handle, 0, 64);
    memcpy(handle, &r->bytes, sizeof r->bytes);
    LEAVE(OK);
}

struct ipc_handle {
    unsigned char bytes[64];
};

int cuIpcOpenMemHandle_v2(uint64_t *address, struct ipc_handle handle, unsigned flags) {
    ENTER("cuIpcOpenMemHandle");
    size_t bytes;
    memcpy(&bytes, handle.bytes, sizeof bytes);
    struct context *c = here("cuIpcOpenMemHandle");
    if (flags != 1 || !c) LEAVE(c ? INVALID_VALUE : INVALID_CONTEXT);
    LEAVE(add_range(address, bytes, DEVICE_MEMORY, c->device));
}

int cuIpcCloseMemHandle(uint64_t address) {
    ENTER("cuIpcCloseMemHandle");
    LEAVE(drop_range(address));
}
