/* A libcuda.so.1 for tests on hosts without a GPU. Host memory plays device memory, work on a stream ends when a test says
   so, any call fails on demand, and callers are held to the driver's rules: a call without the right current context fails with
   CUDA_ERROR_INVALID_CONTEXT, a handle that is not alive with CUDA_ERROR_INVALID_HANDLE, and each such call is a fault that
   a test reads with kvxstub_faults().

   Tests load this very file (by its path, so that it is the copy that kvxfer loaded) and steer it with the kvxstub_ functions
   at its end. A variant that lacks a call is built with -DcuThatCall=gone. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#ifndef VERSION
#define VERSION 13000
#endif
#ifndef DEVICES
#define DEVICES 2
#endif
/* A CUdevice is not the ordinal: who takes one for the other is found out. */
#ifndef FIRST_DEVICE
#define FIRST_DEVICE 40
#endif
/* What a device says of GPUDirect RDMA: supported, how writes are flushed (1: by the host), and how they are ordered. */
#ifndef RDMA
#define RDMA 1
#endif
#ifndef FLUSH_OPTIONS
#define FLUSH_OPTIONS 3
#endif
#ifndef WRITES_ORDERING
#define WRITES_ORDERING 0
#endif

enum { OK = 0, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, NOT_INITIALIZED = 3, INVALID_DEVICE = 101, INVALID_CONTEXT = 201,
       INVALID_HANDLE = 400, NOT_FOUND = 500, NOT_READY = 600, NOT_SUPPORTED = 801, CAPTURED = 900 };

/* ---- what there is ---- */

enum kind { STREAM = 1, EVENT, MODULE, FUNCTION };

struct op {
    struct op *next;
    uint64_t number;
    /* A copy of bytes, or of stripes if there are any. */
    unsigned char *to;
    const unsigned char *from;
    size_t bytes;
    uint64_t *stripes;
    uint64_t count;
};

struct object {
    uint64_t magic;
    enum kind kind;
    int alive, device;
    /* A stream's work, by number: queued last, and done last. */
    uint64_t queued, done;
    /* Being captured into a graph, since this thread began that, and whether somebody's call has spoilt the graph. */
    int capturing, spoilt;
    pthread_t capturer;
    struct object *next_capture;
    struct op *ops;
    /* An event's point: null stream if never recorded. */
    struct object *stream;
    uint64_t point;
};

struct context {
    uint64_t magic;
    int device, retained;
    struct object null_stream;
};

/* As tests name them. */
enum memory { DEVICE_MEMORY, MANAGED, PINNED, VMM, VMM_FILE, VMM_FABRIC, POOL };

struct range {
    struct range *next;
    unsigned char *start;
    size_t bytes;
    enum memory memory;
    int device;
    uint64_t id;
};

#define CONTEXT_MAGIC 0xc0117e87c0117e87ull
#define OBJECT_MAGIC 0x0b9ec70b9ec70b9eull
#define DEPTH 64

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int initialised;
static struct context contexts[DEVICES];
static struct range *ranges;
static uint64_t range_ids;
static __thread struct context *stack[DEPTH];
static __thread int depth;
/* Streams that are being captured: all in the mode that forbids calls of other threads too, as torch's are as a rule. */
static struct object *captures;
enum { GLOBAL = 0, THREAD_LOCAL = 1, RELAXED = 2 };
static __thread int capture_mode;

struct rule {
    struct rule *next;
    char call[64];
    int code;
    uint64_t after, times;
};
static struct rule *rules;

struct tally {
    struct tally *next;
    const char *call;
    uint64_t calls;
};
static struct tally *tallies;

static uint64_t faults;
static char fault_text[4096];

static void fault(const char *format, ...) {
    char line[256];
    va_list args;
    va_start(args, format);
    vsnprintf(line, sizeof line, format, args);
    va_end(args);
    faults++;
    size_t used = strlen(fault_text);
    snprintf(fault_text + used, sizeof fault_text - used, "%s\n", line);
}

/* Counts a call, and gives the code that a test wants of it. */
static int begin(const char *call) {
    struct tally *t = tallies;
    while (t && strcmp(t->call, call) != 0) t = t->next;
    if (!t) {
        t = calloc(1, sizeof *t);
        t->call = call;
        t->next = tallies;
        tallies = t;
    }
    t->calls++;
    for (struct rule *r = rules; r; r = r->next) {
        if (strcmp(r->call, call) != 0 || r->times == 0) continue;
        if (r->after > 0) {
            r->after--;
            continue;
        }
        if (r->times != UINT64_MAX) r->times--;
        return r->code;
    }
    if (!initialised && strcmp(call, "cuInit") != 0) {
        fault("%s before cuInit", call);
        return NOT_INITIALIZED;
    }
    return OK;
}

#define ENTER(call)                      \
    pthread_mutex_lock(&lock);           \
    int code = begin(call);              \
    if (code != OK) {                    \
        pthread_mutex_unlock(&lock);     \
        return code;                     \
    }
#define LEAVE(value)                     \
    do {                                 \
        int leave_ = (value);            \
        pthread_mutex_unlock(&lock);     \
        return leave_;                   \
    } while (0)

/* Calls that the driver lets nobody make while a graph is captured, but threads whose own mode says that they know. A capture
   is spoilt by one that was made all the same. */
static int forbidden(const char *call) {
    int found = 0;
    for (struct object *s = captures; s; s = s->next_capture) {
        if (capture_mode == RELAXED) continue;
        if (capture_mode == THREAD_LOCAL && !pthread_equal(s->capturer, pthread_self())) continue;
        fault("%s while a graph is captured", call);
        s->spoilt = found = 1;
    }
    return found;
}
#define DISTURBS(call)                          \
    do {                                        \
        if (forbidden(call)) LEAVE(CAPTURED);   \
    } while (0)

static struct context *current(void) { return depth > 0 ? stack[depth - 1] : NULL; }

/* The current context, if it is alive. */
static struct context *here(const char *call) {
    struct context *c = current();
    if (!c) fault("%s without a current context", call);
    else if (c->retained == 0) fault("%s in a context that was released", call);
    return c && c->retained > 0 ? c : NULL;
}

static int ordinal_of(int device) {
    int n = device - FIRST_DEVICE;
    return n >= 0 && n < DEVICES ? n : -1;
}

/* A handle of this kind, alive, and of the current context; or null with a code. */
static struct object *object(const char *call, uint64_t handle, enum kind kind, int *code) {
    struct context *c = here(call);
    *code = INVALID_CONTEXT;
    if (!c) return NULL;
    if (kind == STREAM && handle <= 2) {
        *code = OK;
        return &c->null_stream;
    }
    struct object *o = (struct object *)handle;
    *code = INVALID_HANDLE;
    /* Never freed, so that one that was destroyed is known as such; what was never one is not read far. */
    unsigned char resident;
    if (handle % 16 != 0 || mincore((void *)(handle & ~4095ull), 1, &resident) != 0 || o->magic != OBJECT_MAGIC || o->kind != kind) {
        fault("%s of %#llx, which is no such handle", call, (unsigned long long)handle);
        return NULL;
    }
    if (!o->alive) {
        fault("%s of a handle that was destroyed", call);
        return NULL;
    }
    *code = INVALID_CONTEXT;
    if (o->device != c->device) {
        fault("%s of a handle of device %d in a context of device %d", call, o->device, c->device);
        return NULL;
    }
    *code = OK;
    return o;
}

static struct object *make(enum kind kind, int device) {
    struct object *o = NULL;
    if (posix_memalign((void **)&o, 16, sizeof *o) != 0) abort();
    memset(o, 0, sizeof *o);
    o->magic = OBJECT_MAGIC;
    o->kind = kind;
    o->alive = 1;
    o->device = device;
    return o;
}

static struct range *range_at(uint64_t address) {
    for (struct range *r = ranges; r; r = r->next) {
        if (address - (uint64_t)r->start < r->bytes) return r;
    }
    return NULL;
}

/* ---- work ---- */

static void run(struct op *op) {
    if (op->bytes) memmove(op->to, op->from, op->bytes);
    for (uint64_t i = 0; i < op->count; i++) {
        const uint64_t *s = op->stripes + 6 * i; /* src, dst, src_stride, dst_stride, row, rows */
        for (uint64_t r = 0; r < s[5]; r++) {
            memmove((void *)(s[1] + r * s[3]), (const void *)(s[0] + r * s[2]), s[4]);
        }
    }
    free(op->stripes);
    free(op);
}

static void run_due(struct object *stream) {
    while (stream->ops && stream->ops->number <= stream->done) {
        struct op *op = stream->ops;
        stream->ops = op->next;
        run(op);
    }
}

/* Queues work; it is done at once unless something before it is not. */
static void queue(struct object *stream, struct op *op) {
    int idle = stream->done == stream->queued;
    op->number = ++stream->queued;
    struct op **end = &stream->ops;
    while (*end) end = &(*end)->next;
    *end = op;
    if (idle) {
        stream->done = stream->queued;
        run_due(stream);
    }
}

/* ---- the driver ---- */

int cuInit(unsigned flags) {
    ENTER("cuInit");
    initialised = 1;
    for (int i = 0; i < DEVICES; i++) {
        contexts[i].magic = CONTEXT_MAGIC;
        contexts[i].device = i;
        contexts[i].null_stream = (struct object){.magic = OBJECT_MAGIC, .kind = STREAM, .alive = 1, .device = i};
    }
    LEAVE(flags == 0 ? OK : INVALID_VALUE);
}

int cuGetErrorName(int code, const char **name) {
    *name = code == INVALID_VALUE     ? "CUDA_ERROR_INVALID_VALUE"
            : code == INVALID_CONTEXT ? "CUDA_ERROR_INVALID_CONTEXT"
            : code == INVALID_HANDLE  ? "CUDA_ERROR_INVALID_HANDLE"
            : code == NOT_READY       ? "CUDA_ERROR_NOT_READY"
            : code == 700             ? "CUDA_ERROR_ILLEGAL_ADDRESS"
            : code == 719             ? "CUDA_ERROR_LAUNCH_FAILED"
            : code == 999             ? "CUDA_ERROR_UNKNOWN"
                                      : NULL;
    return *name ? OK : INVALID_VALUE;
}

int cuGetErrorString(int code, const char **text) {
    *text = code == OK ? "no error" : "an error of the stub driver";
    return OK;
}

int cuDriverGetVersion(int *version) {
    *version = VERSION;
    return OK;
}

int cuDeviceGetCount(int *count) {
    ENTER("cuDeviceGetCount");
    *count = DEVICES;
    LEAVE(OK);
}

int cuDeviceGet(int *device, int ordinal) {
    ENTER("cuDeviceGet");
    *device = ordinal + FIRST_DEVICE;
    LEAVE(ordinal >= 0 && ordinal < DEVICES ? OK : INVALID_DEVICE);
}

int cuDeviceGetName(char *name, int len, int device) {
    ENTER("cuDeviceGetName");
    snprintf(name, (size_t)len, "Stub GPU %d", ordinal_of(device));
    LEAVE(ordinal_of(device) >= 0 ? OK : INVALID_DEVICE);
}

int cuDeviceGetUuid(unsigned char *uuid, int device) {
    ENTER("cuDeviceGetUuid");
    memset(uuid, device, 16);
    LEAVE(ordinal_of(device) >= 0 ? OK : INVALID_DEVICE);
}

/* Capital letters, as NVIDIA's driver has them. */
int cuDeviceGetPCIBusId(char *text, int len, int device) {
    ENTER("cuDeviceGetPCIBusId");
    snprintf(text, (size_t)len, "0000:%02X:00.0", 0x1a + ordinal_of(device));
    LEAVE(ordinal_of(device) >= 0 ? OK : INVALID_DEVICE);
}

int cuDeviceTotalMem_v2(size_t *bytes, int device) {
    ENTER("cuDeviceTotalMem");
    *bytes = (size_t)80 << 30;
    LEAVE(ordinal_of(device) >= 0 ? OK : INVALID_DEVICE);
}

int cuDeviceGetAttribute(int *value, int attribute, int device) {
    ENTER("cuDeviceGetAttribute");
    switch (attribute) {
    case 75: *value = 9; break;
    case 76: *value = 0; break;
    case 116: *value = RDMA; break;
    case 117: *value = FLUSH_OPTIONS; break;
    case 118: *value = WRITES_ORDERING; break;
    case 124: *value = RDMA; break;
    default: *value = 0;
    }
    LEAVE(ordinal_of(device) >= 0 ? OK : INVALID_DEVICE);
}

int cuDevicePrimaryCtxRetain(struct context **context, int device) {
    ENTER("cuDevicePrimaryCtxRetain");
    DISTURBS("cuDevicePrimaryCtxRetain");
    int n = ordinal_of(device);
    if (n < 0) LEAVE(INVALID_DEVICE);
    contexts[n].retained++;
    *context = &contexts[n];
    LEAVE(OK);
}

int cuDevicePrimaryCtxRelease_v2(int device) {
    ENTER("cuDevicePrimaryCtxRelease");
    int n = ordinal_of(device);
    if (n < 0) LEAVE(INVALID_DEVICE);
    if (contexts[n].retained == 0) {
        fault("a context is released that nobody retains");
        LEAVE(INVALID_CONTEXT);
    }
    contexts[n].retained--;
    LEAVE(OK);
}

int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *active) {
    ENTER("cuDevicePrimaryCtxGetState");
    int n = ordinal_of(device);
    *flags = 0;
    *active = n >= 0 && contexts[n].retained > 0;
    LEAVE(n >= 0 ? OK : INVALID_DEVICE);
}

int cuCtxPushCurrent_v2(struct context *context) {
    ENTER("cuCtxPushCurrent");
    if (context < contexts || context >= contexts + DEVICES || context->retained == 0 || depth == DEPTH) {
        fault("a context is pushed that is none, or was released");
        LEAVE(INVALID_CONTEXT);
    }
    stack[depth++] = context;
    LEAVE(OK);
}

int cuCtxPopCurrent_v2(struct context **context) {
    ENTER("cuCtxPopCurrent");
    if (depth == 0) {
        fault("a context is popped where none is");
        LEAVE(INVALID_CONTEXT);
    }
    depth--;
    if (context) *context = stack[depth];
    LEAVE(OK);
}

int cuThreadExchangeStreamCaptureMode(int *mode) {
    ENTER("cuThreadExchangeStreamCaptureMode");
    if (*mode < GLOBAL || *mode > RELAXED) LEAVE(INVALID_VALUE);
    int before = capture_mode;
    capture_mode = *mode;
    *mode = before;
    LEAVE(OK);
}

int cuCtxGetCurrent(struct context **context) {
    ENTER("cuCtxGetCurrent");
    *context = current();
    LEAVE(OK);
}

/* Not a fault: this is how one asks whether there is a context. */
int cuCtxGetDevice(int *device) {
    ENTER("cuCtxGetDevice");
    if (!current()) LEAVE(INVALID_CONTEXT);
    *device = current()->device + FIRST_DEVICE;
    LEAVE(OK);
}

int cuCtxGetId(struct context *context, unsigned long long *id) {
    ENTER("cuCtxGetId");
    if (!context) context = current();
    *id = context ? (unsigned long long)(1 + context->device) : 0;
    LEAVE(context ? OK : INVALID_CONTEXT);
}

int cuCtxGetStreamPriorityRange(int *least, int *greatest) {
    ENTER("cuCtxGetStreamPriorityRange");
    *least = 0;
    *greatest = -5;
    LEAVE(here("cuCtxGetStreamPriorityRange") ? OK : INVALID_CONTEXT);
}

int cuStreamCreateWithPriority(struct object **stream, unsigned flags, int priority) {
    ENTER("cuStreamCreateWithPriority");
    DISTURBS("cuStreamCreateWithPriority");
    struct context *c = here("cuStreamCreateWithPriority");
    if (!c) LEAVE(INVALID_CONTEXT);
    if (flags > 1 || priority > 0 || priority < -5) LEAVE(INVALID_VALUE);
    *stream = make(STREAM, c->device);
    LEAVE(OK);
}

int cuStreamCreate(struct object **stream, unsigned flags) {
    ENTER("cuStreamCreate");
    DISTURBS("cuStreamCreate");
    struct context *c = here("cuStreamCreate");
    if (!c) LEAVE(INVALID_CONTEXT);
    if (flags > 1) LEAVE(INVALID_VALUE);
    *stream = make(STREAM, c->device);
    LEAVE(OK);
}

int cuStreamDestroy_v2(uint64_t handle) {
    ENTER("cuStreamDestroy");
    DISTURBS("cuStreamDestroy");
    struct object *s = object("cuStreamDestroy", handle, STREAM, &code);
    if (s) s->alive = 0;
    LEAVE(code);
}

/* What was held is done: nothing here can be waited for. */
int cuStreamSynchronize(uint64_t handle) {
    ENTER("cuStreamSynchronize");
    DISTURBS("cuStreamSynchronize");
    struct object *s = object("cuStreamSynchronize", handle, STREAM, &code);
    if (s) {
        s->done = s->queued;
        run_due(s);
    }
    LEAVE(code);
}

int cuStreamIsCapturing(uint64_t handle, int *status) {
    ENTER("cuStreamIsCapturing");
    struct object *s = object("cuStreamIsCapturing", handle, STREAM, &code);
    if (s) *status = s->capturing;
    LEAVE(code);
}

int cuEventCreate(struct object **event, unsigned flags) {
    ENTER("cuEventCreate");
    DISTURBS("cuEventCreate");
    struct context *c = here("cuEventCreate");
    if (!c) LEAVE(INVALID_CONTEXT);
    if (flags & ~7u) LEAVE(INVALID_VALUE);
    *event = make(EVENT, c->device);
    LEAVE(OK);
}

int cuEventDestroy_v2(uint64_t handle) {
    ENTER("cuEventDestroy");
    DISTURBS("cuEventDestroy");
    struct object *e = object("cuEventDestroy", handle, EVENT, &code);
    if (e) e->alive = 0;
    LEAVE(code);
}

int cuEventRecord(uint64_t handle, uint64_t stream) {
    ENTER("cuEventRecord");
    struct object *e = object("cuEventRecord", handle, EVENT, &code);
    if (!e) LEAVE(code);
    struct object *s = object("cuEventRecord", stream, STREAM, &code);
    if (!s) LEAVE(code);
    if (s->capturing) LEAVE(CAPTURED);
    e->stream = s;
    e->point = s->queued;
    LEAVE(OK);
}

int cuEventQuery(uint64_t handle) {
    ENTER("cuEventQuery");
    DISTURBS("cuEventQuery");
    struct object *e = object("cuEventQuery", handle, EVENT, &code);
    if (!e) LEAVE(code);
    LEAVE(!e->stream || e->stream->done >= e->point ? OK : NOT_READY);
}

int cuModuleLoadData(struct object **module, const void *image) {
    ENTER("cuModuleLoadData");
    DISTURBS("cuModuleLoadData");
    struct context *c = here("cuModuleLoadData");
    if (!c) LEAVE(INVALID_CONTEXT);
    if (!strstr(image, ".entry kvxfer_copy_stripes(")) LEAVE(INVALID_VALUE);
    *module = make(MODULE, c->device);
    LEAVE(OK);
}

int cuModuleUnload(uint64_t handle) {
    ENTER("cuModuleUnload");
    DISTURBS("cuModuleUnload");
    struct object *m = object("cuModuleUnload", handle, MODULE, &code);
    if (m) m->alive = 0;
    LEAVE(code);
}

int cuModuleGetFunction(struct object **function, uint64_t module, const char *name) {
    ENTER("cuModuleGetFunction");
    struct object *m = object("cuModuleGetFunction", module, MODULE, &code);
    if (!m) LEAVE(code);
    if (strcmp(name, "kvxfer_copy_stripes") != 0) LEAVE(NOT_FOUND);
    *function = make(FUNCTION, m->device);
    LEAVE(OK);
}

/* kvxfer_copy_stripes, row by row. The table is read now: the real kernel may read it any time before it is done, so that
   who changes it too early is not found out here. */
int cuLaunchKernel(uint64_t function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, uint64_t stream, void **parameters, void **extra) {
    ENTER("cuLaunchKernel");
    if (!object("cuLaunchKernel", function, FUNCTION, &code)) LEAVE(code);
    struct object *s = object("cuLaunchKernel", stream, STREAM, &code);
    if (!s) LEAVE(code);
    if (gx == 0 || gy != 1 || gz != 1 || bx != 256 || by != 1 || bz != 1 || shared != 0 || extra) LEAVE(INVALID_VALUE);
    struct op *op = calloc(1, sizeof *op);
    uint64_t stripes = *(uint64_t *)parameters[0];
    op->count = *(uint64_t *)parameters[2];
    op->stripes = malloc(op->count * 48);
    memcpy(op->stripes, (void *)stripes, op->count * 48);
    queue(s, op);
    LEAVE(OK);
}

static int copy(const char *call, uint64_t to, uint64_t from, size_t bytes, uint64_t stream) {
    ENTER(call);
    struct object *s = object(call, stream, STREAM, &code);
    if (!s) LEAVE(code);
    struct op *op = calloc(1, sizeof *op);
    op->to = (unsigned char *)to;
    op->from = (const unsigned char *)from;
    op->bytes = bytes;
    queue(s, op);
    LEAVE(OK);
}

int cuMemcpyAsync(uint64_t to, uint64_t from, size_t bytes, uint64_t stream) {
    return copy("cuMemcpyAsync", to, from, bytes, stream);
}
int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t bytes, uint64_t stream) {
    return copy("cuMemcpyDtoDAsync", to, from, bytes, stream);
}
int cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t bytes, uint64_t stream) {
    return copy("cuMemcpyHtoDAsync", to, (uint64_t)from, bytes, stream);
}
int cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t bytes, uint64_t stream) {
    return copy("cuMemcpyDtoHAsync", (uint64_t)to, from, bytes, stream);
}
int cuMemcpyHtoD_v2(uint64_t to, const void *from, size_t bytes) {
    return copy("cuMemcpyHtoD", to, (uint64_t)from, bytes, 0);
}

static int add_range(uint64_t *address, size_t bytes, enum memory memory, int device) {
    size_t whole = (bytes + 65535) & ~(size_t)65535;
    void *p = mmap(NULL, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED || bytes == 0) return bytes == 0 ? INVALID_VALUE : OUT_OF_MEMORY;
    struct range *r = calloc(1, sizeof *r);
    *r = (struct range){ranges, p, bytes, memory, device, ++range_ids};
    ranges = r;
    *address = (uint64_t)p;
    return OK;
}

static int drop_range(uint64_t address) {
    for (struct range **at = &ranges; *at; at = &(*at)->next) {
        struct range *r = *at;
        if ((uint64_t)r->start != address) continue;
        *at = r->next;
        munmap(r->start, (r->bytes + 65535) & ~(size_t)65535);
        free(r);
        return OK;
    }
    fault("memory is freed that is not there");
    return INVALID_VALUE;
}

int cuMemAlloc_v2(uint64_t *address, size_t bytes) {
    ENTER("cuMemAlloc");
    DISTURBS("cuMemAlloc");
    struct context *c = here("cuMemAlloc");
    LEAVE(c ? add_range(address, bytes, DEVICE_MEMORY, c->device) : INVALID_CONTEXT);
}

int cuMemFree_v2(uint64_t address) {
    ENTER("cuMemFree");
    DISTURBS("cuMemFree");
    LEAVE(here("cuMemFree") ? drop_range(address) : INVALID_CONTEXT);
}

int cuMemHostAlloc(void **address, size_t bytes, unsigned flags) {
    ENTER("cuMemHostAlloc");
    DISTURBS("cuMemHostAlloc");
    (void)flags;
    struct context *c = here("cuMemHostAlloc");
    LEAVE(c ? add_range((uint64_t *)address, bytes, PINNED, c->device) : INVALID_CONTEXT);
}

int cuMemFreeHost(void *address) {
    ENTER("cuMemFreeHost");
    DISTURBS("cuMemFreeHost");
    LEAVE(here("cuMemFreeHost") ? drop_range((uint64_t)address) : INVALID_CONTEXT);
}

int cuMemHostRegister_v2(void *address, size_t bytes, unsigned flags) {
    ENTER("cuMemHostRegister");
    DISTURBS("cuMemHostRegister");
    (void)address, (void)flags;
    LEAVE(!here("cuMemHostRegister") ? INVALID_CONTEXT : bytes ? OK : INVALID_VALUE);
}

int cuMemHostUnregister(void *address) {
    ENTER("cuMemHostUnregister");
    DISTURBS("cuMemHostUnregister");
    (void)address;
    LEAVE(OK);
}

/* Virtual memory here has no handle that anybody could ask for. */
int cuMemRetainAllocationHandle(uint64_t *handle, void *address) {
    ENTER("cuMemRetainAllocationHandle");
    (void)handle, (void)address;
    LEAVE(INVALID_VALUE);
}

/* Nobody makes virtual memory here: UCX then falls back to plain allocations. */
int cuMemGetAllocationGranularity(size_t *bytes, const void *properties, int option) {
    ENTER("cuMemGetAllocationGranularity");
    (void)bytes, (void)properties, (void)option;
    LEAVE(NOT_SUPPORTED);
}

int cuMemGetAddressRange_v2(uint64_t *start, size_t *bytes, uint64_t address) {
    ENTER("cuMemGetAddressRange");
    struct range *r = range_at(address);
    if (!r) LEAVE(INVALID_VALUE);
    if (start) *start = (uint64_t)r->start;
    if (bytes) *bytes = r->bytes;
    LEAVE(OK);
}

/* Each attribute is as wide as cuda.h says. */
static int attribute(void *out, int which, const struct range *r, uint64_t address) {
    int vmm = r->memory == VMM || r->memory == VMM_FILE || r->memory == VMM_FABRIC;
    switch (which) {
    case 1: /* context: virtual memory is of none */
        *(struct context **)out = vmm ? NULL : &contexts[r->device];
        return OK;
    case 2: *(unsigned *)out = r->memory == PINNED ? 1 : 2; return OK;
    case 3: *(uint64_t *)out = address; return OK;
    case 7: *(unsigned long long *)out = r->id; return OK;
    case 8: *(unsigned char *)out = r->memory == MANAGED; return OK;
    case 9: *(int *)out = r->device; return OK;
    case 10: *(unsigned char *)out = r->memory == DEVICE_MEMORY; return OK;
    case 11: *(uint64_t *)out = (uint64_t)r->start; return OK;
    case 12: *(size_t *)out = r->bytes; return OK;
    case 13: *(unsigned char *)out = 1; return OK;
    case 14: *(uint64_t *)out = r->memory == VMM_FILE ? 1 : r->memory == VMM_FABRIC ? 8 : 0; return OK;
    case 15: *(unsigned char *)out = r->memory == DEVICE_MEMORY; return OK;
    case 17: *(void **)out = r->memory == POOL ? (void *)r : NULL; return OK;
    default: return INVALID_VALUE;
    }
}

/* Memory that CUDA does not know is no error: each attribute is zero, and the type too. */
int cuPointerGetAttributes(unsigned count, const int *attributes, void **out, uint64_t address) {
    ENTER("cuPointerGetAttributes");
    struct range *r = range_at(address);
    for (unsigned i = 0; i < count; i++) {
        static const unsigned char widths[22] = {0, 8, 4, 8, 8, 16, 1, 8, 1, 4, 1, 8, 8, 1, 8, 1, 4, 8, 8, 8, 8, 1};
        if (attributes[i] < 1 || attributes[i] > 21) LEAVE(INVALID_VALUE);
        memset(out[i], 0, widths[attributes[i]]);
        if (attributes[i] == 9) *(int *)out[i] = -2;
        if (r) attribute(out[i], attributes[i], r, address);
    }
    LEAVE(OK);
}

int cuPointerGetAttribute(void *out, int which, uint64_t address) {
    ENTER("cuPointerGetAttribute");
    struct range *r = range_at(address);
    LEAVE(r ? attribute(out, which, r, address) : INVALID_VALUE);
}

int cuPointerSetAttribute(const void *value, int which, uint64_t address) {
    ENTER("cuPointerSetAttribute");
    (void)value;
    LEAVE(which == 6 && range_at(address) ? OK : INVALID_VALUE);
}

int cuFlushGPUDirectRDMAWrites(int target, int scope) {
    ENTER("cuFlushGPUDirectRDMAWrites");
    if (!here("cuFlushGPUDirectRDMAWrites")) LEAVE(INVALID_CONTEXT);
    LEAVE(target == 0 && (scope == 100 || scope == 200) ? OK : INVALID_VALUE);
}

/* UCX asks for some calls in this way; those that there are have one version. */
int cuGetProcAddress_v2(const char *name, void **function, int version, uint64_t flags, int *status) {
    (void)version, (void)flags;
    char suffixed[128];
    snprintf(suffixed, sizeof suffixed, "%s_v2", name);
    *function = dlsym(RTLD_DEFAULT, name);
    if (!*function) *function = dlsym(RTLD_DEFAULT, suffixed);
    if (status) *status = *function ? 0 : 1;
    return *function ? OK : NOT_FOUND;
}

/* ---- what tests steer ---- */

/* Memory of a kind (enum memory) on a device. */
uint64_t kvxstub_alloc(size_t bytes, int memory, int device) {
    uint64_t address = 0;
    pthread_mutex_lock(&lock);
    int code = add_range(&address, bytes, (enum memory)memory, device);
    pthread_mutex_unlock(&lock);
    return code == OK ? address : 0;
}

int kvxstub_free(uint64_t address) {
    pthread_mutex_lock(&lock);
    LEAVE(drop_range(address));
}

/* What an engine has of its own. */
uint64_t kvxstub_stream(int device) {
    pthread_mutex_lock(&lock);
    uint64_t handle = (uint64_t)make(STREAM, device);
    pthread_mutex_unlock(&lock);
    return handle;
}

uint64_t kvxstub_event(int device) {
    pthread_mutex_lock(&lock);
    uint64_t handle = (uint64_t)make(EVENT, device);
    pthread_mutex_unlock(&lock);
    return handle;
}

void kvxstub_record(uint64_t event, uint64_t stream) {
    pthread_mutex_lock(&lock);
    struct object *e = (struct object *)event, *s = (struct object *)stream;
    e->stream = s;
    e->point = s->queued;
    pthread_mutex_unlock(&lock);
}

void kvxstub_destroy(uint64_t handle) {
    pthread_mutex_lock(&lock);
    ((struct object *)handle)->alive = 0;
    pthread_mutex_unlock(&lock);
}

/* This thread begins to capture a stream into a graph, or ends that. Whether the graph is whole. */
int kvxstub_capture(uint64_t stream, int on) {
    pthread_mutex_lock(&lock);
    struct object *s = (struct object *)stream;
    int whole = !s->spoilt;
    for (struct object **at = &captures; *at; at = &(*at)->next_capture) {
        if (*at != s) continue;
        *at = s->next_capture;
        break;
    }
    s->capturing = on;
    s->spoilt = 0;
    if (on) {
        s->capturer = pthread_self();
        s->next_capture = captures;
        captures = s;
    }
    LEAVE(whole);
}

/* The calling thread's mode of capture: 0, unless somebody has left another. */
int kvxstub_capture_mode(void) { return capture_mode; }

/* A kernel begins that goes on until kvxstub_finish. */
void kvxstub_start(uint64_t stream) {
    pthread_mutex_lock(&lock);
    ((struct object *)stream)->queued++;
    pthread_mutex_unlock(&lock);
}

/* The oldest kernel that goes on ends, and what was queued behind it is done, up to the next kernel. */
void kvxstub_finish(uint64_t stream) {
    pthread_mutex_lock(&lock);
    struct object *s = (struct object *)stream;
    if (s->done < s->queued) s->done++;
    for (struct op *op = s->ops; op; op = op->next) {
        if (op->number == s->done + 1) s->done++;
    }
    run_due(s);
    pthread_mutex_unlock(&lock);
}

/* The call of this name answers with `code` after `after` more calls, `times` times. */
void kvxstub_fail(const char *call, int code, uint64_t after, uint64_t times) {
    pthread_mutex_lock(&lock);
    struct rule *r = calloc(1, sizeof *r);
    snprintf(r->call, sizeof r->call, "%s", call);
    r->code = code;
    r->after = after;
    r->times = times;
    r->next = rules;
    rules = r;
    pthread_mutex_unlock(&lock);
}

void kvxstub_heal(void) {
    pthread_mutex_lock(&lock);
    rules = NULL;
    pthread_mutex_unlock(&lock);
}

uint64_t kvxstub_calls(const char *call) {
    uint64_t calls = 0;
    pthread_mutex_lock(&lock);
    for (struct tally *t = tallies; t; t = t->next) calls += strcmp(t->call, call) == 0 ? t->calls : 0;
    pthread_mutex_unlock(&lock);
    return calls;
}

int kvxstub_retained(int device) {
    pthread_mutex_lock(&lock);
    LEAVE(contexts[device].retained);
}

/* How many contexts are on this thread's stack. */
int kvxstub_depth(void) { return depth; }

/* Breaches of the driver's rules, and what they were, a line each. */
uint64_t kvxstub_faults(const char **text) {
    pthread_mutex_lock(&lock);
    if (text) *text = fault_text;
    uint64_t n = faults;
    pthread_mutex_unlock(&lock);
    return n;
}
