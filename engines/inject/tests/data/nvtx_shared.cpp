// A shared library of NVTX, as libnvToolsExt is one: it passes calls on to whoever is injected, and does nothing else.
#include "../../../standin/nvinfer/nvtx.h"

#define EXPORT extern "C" __attribute__((visibility("default")))
using nvtx::call, nvtx::core, nvtx::core2;
using Said = nvtx::EventAttributes const *;

EXPORT void nvtxMarkEx(Said said) { call<int>(core, 1, 0, said); }
EXPORT void nvtxMarkA(char const *text) { call<int>(core, 2, 0, text); }
EXPORT uint64_t nvtxRangeStartEx(Said said) { return call<uint64_t>(core, 4, 0, said); }
EXPORT uint64_t nvtxRangeStartA(char const *text) {
    // Numbers of ranges, as a tool would give them out.
    static uint64_t last = 0;
    return ++last + 0 * call<uint64_t>(core, 5, 0, text);
}
EXPORT void nvtxRangeEnd(uint64_t id) { call<int>(core, 7, 0, id); }
EXPORT int nvtxRangePushEx(Said said) { return call<int>(core, 8, -2, said); }
EXPORT int nvtxRangePushA(char const *text) { return call<int>(core, 9, -2, text); }
EXPORT int nvtxRangePop() { return call<int>(core, 11, -2); }
EXPORT void nvtxDomainMarkEx(void *domain, Said said) { call<int>(core2, 1, 0, domain, said); }
EXPORT uint64_t nvtxDomainRangeStartEx(void *domain, Said said) { return call<uint64_t>(core2, 2, 0, domain, said); }
EXPORT void nvtxDomainRangeEnd(void *domain, uint64_t id) { call<int>(core2, 3, 0, domain, id); }
EXPORT int nvtxDomainRangePushEx(void *domain, Said said) { return call<int>(core2, 4, -2, domain, said); }
EXPORT int nvtxDomainRangePop(void *domain) { return call<int>(core2, 5, -2, domain); }
EXPORT void *nvtxDomainRegisterStringA(void *domain, char const *text) {
    return call<void *>(core2, 10, nullptr, domain, text);
}
EXPORT void *nvtxDomainCreateA(char const *name) { return call<void *>(core2, 12, nullptr, name); }
