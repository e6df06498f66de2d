// A program that uses NVTX, and prints what its functions answer. With -DREAL it is NVIDIA's own header that loads the
// injected library; otherwise what the stand-in engine has in its place.
//
// With -DSHARED it uses a shared library of NVTX (libnvToolsExt.so.1 or libnvtx3interop.so.1, as the environment says in
// NVTX_LIBRARY), and loads no injected library itself.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <unistd.h>

#if defined(REAL)
#include <nvtx3/nvToolsExt.h>
#else
#include "../../../standin/nvinfer/nvtx.h"
using nvtxEventAttributes_t = nvtx::EventAttributes;
#define NVTX_VERSION 3
#define NVTX_MESSAGE_TYPE_ASCII 1
#define NVTX_MESSAGE_TYPE_REGISTERED 3
#define NVTX_PAYLOAD_TYPE_UNSIGNED_INT64 1
#if defined(SHARED)
template <class Result, class... A> static Result shared(char const *name, Result nothing, A... arguments) {
    static void *const library = dlopen(getenv("NVTX_LIBRARY"), RTLD_NOW);
    auto function = reinterpret_cast<Result (*)(A...)>(library ? dlsym(library, name) : nullptr);
    if (!function) {
        fprintf(stderr, "no %s\n", name);
        exit(3);
    }
    (void)nothing;
    return function(arguments...);
}
#define CALL(Result, table, id, name, ...) shared<Result>(name, {}, __VA_ARGS__)
static int nvtxRangePop() {
    static void *const library = dlopen(getenv("NVTX_LIBRARY"), RTLD_NOW);
    return reinterpret_cast<int (*)()>(dlsym(library, "nvtxRangePop"))();
}
#else
#define CALL(Result, table, id, name, ...) nvtx::call<Result>(nvtx::table, id, {}, __VA_ARGS__)
static int nvtxRangePop() { return nvtx::call<int>(nvtx::core, 11, 0); }
#endif
static void nvtxMarkA(char const *text) { CALL(int, core, 2, "nvtxMarkA", text); }
static uint64_t nvtxRangeStartA(char const *text) { return CALL(uint64_t, core, 5, "nvtxRangeStartA", text); }
static void nvtxRangeEnd(uint64_t id) { CALL(int, core, 7, "nvtxRangeEnd", id); }
static int nvtxRangePushEx(nvtxEventAttributes_t const *said) { return CALL(int, core, 8, "nvtxRangePushEx", said); }
static int nvtxRangePushA(char const *text) { return CALL(int, core, 9, "nvtxRangePushA", text); }
static int nvtxRangePushW(wchar_t const *text) { return CALL(int, core, 10, "nvtxRangePushW", text); }
static int nvtxDomainRangePushEx(void *domain, nvtxEventAttributes_t const *said) {
    return CALL(int, core2, 4, "nvtxDomainRangePushEx", domain, said);
}
static int nvtxDomainRangePop(void *domain) { return CALL(int, core2, 5, "nvtxDomainRangePop", domain); }
static void *nvtxDomainRegisterStringA(void *domain, char const *text) {
    return CALL(void *, core2, 10, "nvtxDomainRegisterStringA", domain, text);
}
static void *nvtxDomainCreateA(char const *name) { return CALL(void *, core2, 12, "nvtxDomainCreateA", name); }
#endif

static nvtxEventAttributes_t attributes(char const *text) {
    nvtxEventAttributes_t said;
    memset(&said, 0, sizeof said);
    said.version = NVTX_VERSION;
    said.size = sizeof said;
    said.messageType = NVTX_MESSAGE_TYPE_ASCII;
    said.message.ascii = text;
    return said;
}

int main(int argc, char **argv) {
    // The first call makes NVTX look for a tool; one that is being traced waits until the tracer listens.
    auto *domain = nvtxDomainCreateA("serving");
    auto *registered = nvtxDomainRegisterStringA(domain, "a registered name");
    while (char const *ready = getenv("WAIT_FILE")) {
        if (access(ready, F_OK) == 0) {
            break;
        }
        usleep(2000);
    }
    if (argc > 1 && !strcmp(argv[1], "idle")) {
        long const rounds = atol(argv[2]);
        for (long i = 0; i < rounds; ++i) {
            nvtxRangePushA("idle");
            nvtxRangePop();
        }
        return 0;
    }
    if (argc > 1 && !strcmp(argv[1], "flood")) {
        for (int i = 0; i < 50000; ++i) {
            nvtxRangePushA("flood");
            nvtxRangePop();
        }
        usleep(1500000);  // the state is reported each second
        return 0;
    }
    auto said = attributes("request");
    said.payloadType = NVTX_PAYLOAD_TYPE_UNSIGNED_INT64;
    said.payload.ullValue = 42;
    nvtxRangePushA("request:req-1");
    nvtxDomainRangePushEx(domain, &said);
    usleep(2000);
    nvtxDomainRangePop(domain);
#ifndef SHARED
    nvtxRangePushW(L"pr\u00e9fill");
#else
    nvtxRangePushA("prefill");
#endif
    nvtxMarkA("first token");
    usleep(2000);
    nvtxRangePop();
    auto by_handle = attributes(nullptr);
    by_handle.messageType = NVTX_MESSAGE_TYPE_REGISTERED;
    by_handle.message.registered = decltype(by_handle.message.registered)(registered);
    nvtxRangePushEx(&by_handle);
    usleep(2000);
    nvtxRangePop();
    auto const range = nvtxRangeStartA("request:req-2");
    auto const other = nvtxRangeStartA("background");
    usleep(2000);
    nvtxRangeEnd(range);
    nvtxRangeEnd(other);
    nvtxRangePop();
    printf("done\n");
    fflush(stdout);
    usleep(1500000);
}
