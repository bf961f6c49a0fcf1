/* In the place of libcuda, for tests. What it is asked to do with contexts, modules, streams and events goes into the file
   that KVXFER_STUB_LOG names, a line each. */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#ifndef INIT
#define INIT 0
#endif
#ifndef COUNT
#define COUNT 2
#endif
#ifndef VERSION
#define VERSION 12040
#endif
/* What these calls answer. */
#ifndef LOAD
#define LOAD 0
#endif
#ifndef FUNCTION
#define FUNCTION 0
#endif
#ifndef RECORD
#define RECORD 0
#endif
#ifndef LAUNCH
#define LAUNCH 0
#endif
int cuInit(unsigned flags) { return flags == 0 ? INIT : 1; }
int cuGetErrorName(int code, const char **name) {
    *name = code == 100 ? "CUDA_ERROR_NO_DEVICE" : code == 999 ? "CUDA_ERROR_UNKNOWN" : code == 201 ? "CUDA_ERROR_INVALID_CONTEXT" : NULL;
    return *name ? 0 : 1;
}
int cuDriverGetVersion(int *version) { *version = VERSION; return 0; }
int cuDeviceGetCount(int *count) { *count = COUNT; return 0; }
int cuDeviceGet(int *device, int ordinal) { *device = ordinal + 40; return ordinal < 2 ? 0 : 101; }
int cuDeviceGetName(char *name, int len, int device) {
    /* As long as it may be, and without the NUL that the driver promises. */
    if (device == 41) memset(name, 'x', (size_t)len); else strncpy(name, "Stub GPU", (size_t)len);
    return 0;
}
#ifndef OLD
int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = (size_t)80 << 30; return device >= 40 ? 0 : 101; }
#endif
int cuDeviceGetAttribute(int *value, int attribute, int device) {
    *value = attribute == 75 ? 9 : attribute == 76 ? 0 : -1;
    return device >= 40 ? 0 : 101;
}

#ifndef NO_LAUNCH
static int depth; /* contexts on the stack */
static int asked; /* how often an event was asked */

static int say(int code, const char *format, uint64_t a, uint64_t b, uint64_t c) {
    const char *name = getenv("KVXFER_STUB_LOG");
    FILE *log = name ? fopen(name, "a") : NULL;
    if (!log) return 999;
    fprintf(log, format, (unsigned long long)a, (unsigned long long)b, (unsigned long long)c);
    fputc('\n', log);
    fclose(log);
    return code;
}
static int in_context(int code, const char *format, uint64_t a, uint64_t b) {
    return depth > 0 ? say(code, format, a, b, 0) : 201;
}

int cuDevicePrimaryCtxRetain(uint64_t *context, int device) {
    *context = 0xc000 + (uint64_t)device;
    return say(0, "retain %llu", device, 0, 0);
}
int cuDevicePrimaryCtxRelease_v2(int device) { return say(0, "release %llu, %llu left", device, depth, 0); }
int cuCtxPushCurrent_v2(uint64_t context) { return context == 0xc029 ? (depth++, 0) : 201; }
int cuCtxPopCurrent_v2(uint64_t *context) { *context = 0xc029; return depth > 0 ? (depth--, 0) : 201; }
int cuThreadExchangeStreamCaptureMode(int *mode) {
    static __thread int own;
    int before = own;
    own = *mode;
    *mode = before;
    return 0;
}
int cuModuleLoadData(uint64_t *module, const void *image) {
    *module = 0x30d;
    return in_context(LOAD, "load PTX %llu, kernel %llu", strstr(image, ".version 8.") != NULL,
                      strstr(image, ".entry kvxfer_copy_stripes(") != NULL);
}
int cuModuleUnload(uint64_t module) { return in_context(0, "unload %llx", module, 0); }
int cuModuleGetFunction(uint64_t *function, uint64_t module, const char *name) {
    *function = 0xf;
    return in_context(FUNCTION, "function of %llx, named right %llu", module, strcmp(name, "kvxfer_copy_stripes") == 0);
}
int cuStreamCreate(uint64_t *stream, unsigned flags) {
    *stream = 0x57;
    return in_context(0, "stream %llu", flags, 0);
}
int cuStreamDestroy_v2(uint64_t stream) { return in_context(0, "destroy stream %llx", stream, 0); }
int cuStreamSynchronize(uint64_t stream) { return in_context(0, "wait for stream %llx", stream, 0); }
int cuEventCreate(uint64_t *event, unsigned flags) {
    *event = 0xe;
    return in_context(0, "event %llu", flags, 0);
}
int cuEventDestroy_v2(uint64_t event) { return in_context(0, "destroy event %llx", event, 0); }
int cuEventRecord(uint64_t event, uint64_t stream) { return in_context(RECORD, "record %llx in %llx", event, stream); }
int cuEventQuery(uint64_t event) { return in_context(asked++ == 0 ? 600 : 0, "ask event %llx", event, 0); }
int cuLaunchKernel(uint64_t function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                   unsigned shared, uint64_t stream, void **parameters, void **extra) {
    int plain = gy == 1 && gz == 1 && by == 1 && bz == 1 && shared == 0 && extra == NULL;
    if (depth == 0 || !plain) return 201;
    say(0, "launch %llx in %llx, blocks %llu", function, stream, gx);
    say(0, "of %llu", bx, 0, 0);
    return say(LAUNCH, "with %llx %llx %llu", *(uint64_t *)parameters[0], *(uint64_t *)parameters[1],
               *(uint64_t *)parameters[2]);
}
#endif
