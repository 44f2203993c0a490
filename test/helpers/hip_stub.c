/* SPDX-License-Identifier: Apache-2.0
 *
 * Stand-in for libamdhip64: every call appends a line to $HIP_STUB_LOG and returns 0, or 2 when $HIP_STUB_FAIL names
 * it. "Device" memory is host memory. $HIP_STUB_PARAMS holds the byte sizes of a launched kernel's arguments.
 */
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static int call(const char *name, const char *format, ...)
{
    FILE *log = fopen(getenv("HIP_STUB_LOG"), "a");
    va_list args;
    va_start(args, format);
    fprintf(log, "%s ", name);
    vfprintf(log, format, args);
    fprintf(log, "\n");
    va_end(args);
    fclose(log);
    const char *fail = getenv("HIP_STUB_FAIL");
    return fail && !strcmp(fail, name) ? 2 : 0;
}

int hipDeviceSynchronize(void) { return call("hipDeviceSynchronize", ""); }
int hipEventCreateWithFlags(void **e, unsigned f) { *e = 0; return call("hipEventCreateWithFlags", "%u", f); }
int hipEventDestroy(void *e) { (void)e; return call("hipEventDestroy", ""); }
int hipEventRecord(void *e, void *s) { (void)e; (void)s; return call("hipEventRecord", ""); }
int hipEventSynchronize(void *e) { (void)e; return call("hipEventSynchronize", ""); }
int hipFree(void *p) { int r = call("hipFree", "%p", p); if (!r) free(p); return r; }
int hipGetDevice(int *d) { *d = 0; return call("hipGetDevice", ""); }
const char *hipGetErrorName(int e) { return e == 2 ? "hipErrorOutOfMemory" : "hipSuccess"; }
int hipGetLastError(void) { return 0; }
int hipHostGetDevicePointer(void **d, void *h, unsigned f) { *d = h; return call("hipHostGetDevicePointer", "%u", f); }
int hipHostRegister(void *p, size_t n, unsigned f) { return call("hipHostRegister", "%p %zu %u", p, n, f); }
int hipHostUnregister(void *p) { return call("hipHostUnregister", "%p", p); }
int hipMalloc(void **p, size_t n) { *p = malloc(n); return call("hipMalloc", "%zu", n); }
int hipMemcpy(void *d, const void *s, size_t n, int k)
{
    int r = call("hipMemcpy", "%zu %d", n, k);
    if (!r) memcpy(d, s, n);
    return r;
}
int hipMemcpyAsync(void *d, const void *s, size_t n, int k, void *t)
{
    int r = call("hipMemcpyAsync", "%zu %d stream %lld", n, k, (long long)(intptr_t)t);
    if (!r) memcpy(d, s, n);
    return r;
}
int hipMemset(void *p, int v, size_t n)
{
    int r = call("hipMemset", "%d %zu", v, n);
    if (!r) memset(p, v, n);
    return r;
}
int hipMemsetD16Async(void *p, unsigned short v, size_t n, void *s)
{
    (void)p;
    (void)v;
    (void)s;
    return call("hipMemsetD16Async", "%zu", n);
}
int hipMemsetD32Async(void *p, int v, size_t n, void *s)
{
    (void)p;
    (void)v;
    (void)s;
    return call("hipMemsetD32Async", "%zu", n);
}
int hipModuleGetFunction(void **f, void *m, const char *n) { *f = m; return call("hipModuleGetFunction", "%s", n); }
int hipModuleLaunchKernel(void *f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                          unsigned shared, void *stream, void **params, void **extra)
{
    char text[4096];
    size_t used = 0;
    const char *sizes = getenv("HIP_STUB_PARAMS");
    (void)f; (void)extra;
    for (int i = 0; sizes && *sizes; i++) {
        int size = *sizes == '8' ? 8 : 4;
        long long value = 0;
        memcpy(&value, params[i], (size_t)size);
        if (size == 4) value = (int32_t)value;
        used += (size_t)snprintf(text + used, sizeof text - used, " %lld", value);
        sizes += sizes[1] == ',' ? 2 : 1;
    }
    text[used] = 0;
    return call("hipModuleLaunchKernel", "grid %u %u %u block %u %u %u lds %u stream %lld args%s", gx, gy, gz, bx, by,
                bz, shared, (long long)(intptr_t)stream, text);
}
int hipModuleLoadData(void **m, const void *image) { *m = (void *)image; return call("hipModuleLoadData", ""); }
int hipModuleLoadDataEx(void **m, const void *image, unsigned n, void *o, void **v)
{
    (void)n;
    (void)o;
    (void)v;
    return hipModuleLoadData(m, image);
}
int hipModuleOccupancyMaxActiveBlocksPerMultiprocessor(int *n, void *f, int b, size_t l)
{
    (void)f;
    (void)b;
    (void)l;
    *n = 1;
    return 0;
}
int hipModuleUnload(void *m) { (void)m; return call("hipModuleUnload", ""); }
int hipSetDevice(int d) { return call("hipSetDevice", "%d", d); }
int hipStreamCreateWithFlags(void **s, unsigned f)
{
    *s = (void *)0x5555;
    return call("hipStreamCreateWithFlags", "%u", f);
}
int hipStreamCreate(void **s) { *s = 0; return call("hipStreamCreate", ""); }
int hipStreamDestroy(void *s) { (void)s; return call("hipStreamDestroy", ""); }
int hipStreamSynchronize(void *s) { return call("hipStreamSynchronize", "%lld", (long long)(intptr_t)s); }
int hipStreamWaitEvent(void *s, void *e, unsigned f) { (void)s; (void)e; return call("hipStreamWaitEvent", "%u", f); }

int hipExtMallocWithFlags(void **p, size_t n, unsigned f)
{
    int r = call("hipExtMallocWithFlags", "%zu %u", n, f);
    *p = r ? 0 : malloc(n);
    return r;
}

typedef struct { char reserved[64]; } handle_t;

int hipIpcGetMemHandle(handle_t *h, void *p)
{
    memset(h, 0, sizeof *h);
    memcpy(h->reserved + 20, &p, sizeof p); /* not at the start: bytes behind a zero must survive */
    return call("hipIpcGetMemHandle", "");
}
int hipIpcOpenMemHandle(void **p, handle_t h, unsigned f)
{
    memcpy(p, h.reserved + 20, sizeof *p);
    return call("hipIpcOpenMemHandle", "%u", f);
}
int hipIpcCloseMemHandle(void *p) { return call("hipIpcCloseMemHandle", "%p", p); }
