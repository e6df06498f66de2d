// A user of NVTX version 3, as NVIDIA's headers make one: a table of function pointers whose first call loads the
// library that NVTX_INJECTION64_PATH names, and lets it put its own functions in. Names, numbers and layouts are those of
// the public headers (nvToolsExt.h, nvtxDetail/nvtxTypes.h); only the functions that the stand-in and the tests call are
// there.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <cwchar>
#include <dlfcn.h>
#include <sched.h>

namespace nvtx {

using Function = void (*)();

struct EventAttributes {
    uint16_t version;
    uint16_t size;
    uint32_t category;
    int32_t colorType;
    uint32_t color;
    int32_t payloadType;
    int32_t reserved0;
    union {
        uint64_t ullValue;
    } payload;
    int32_t messageType;
    union {
        char const *ascii;
        void *registered;
    } message;
};
static_assert(sizeof(EventAttributes) == 48, "as nvtxEventAttributes_t");

struct Callbacks {
    size_t size;
    int (*getModuleFunctionTable)(int module, Function ***table, unsigned *size);
};
struct VersionInfo {
    size_t size;
    uint32_t version;
    uint32_t reserved;
    void (*setInjectionVersion)(uint32_t version);
};

enum { FRESH, STARTED, COMPLETE };
inline std::atomic<unsigned> state{FRESH};

// By their numbers in NvtxCallbackIdCore and NvtxCallbackIdCore2; null: nobody listens.
constexpr unsigned FUNCTIONS = 16;
inline Function core[FUNCTIONS], core2[FUNCTIONS];

inline int getModuleFunctionTable(int module, Function ***table, unsigned *size) {
    static Function *places[2][FUNCTIONS + 1];
    if (module != 1 && module != 5) {
        return 0;
    }
    unsigned const which = module == 5;
    for (unsigned id = 1; id < FUNCTIONS; ++id) {
        places[which][id] = (which ? core2 : core) + id;
    }
    *table = places[which];
    *size = FUNCTIONS;
    return 1;
}

inline void const *getExportTable(uint32_t id) {
    static Callbacks const callbacks{sizeof(Callbacks), getModuleFunctionTable};
    static VersionInfo const version{sizeof(VersionInfo), 3, 0, [](uint32_t) {}};
    return id == 1 ? static_cast<void const *>(&callbacks) : id == 3 ? static_cast<void const *>(&version) : nullptr;
}

// As nvtxInitOnce.
inline void initialise() {
    unsigned expected = FRESH;
    if (!state.compare_exchange_strong(expected, STARTED)) {
        while (state != COMPLETE) {
            sched_yield();
        }
        return;
    }
    char const *path = getenv("NVTX_INJECTION64_PATH");
    void *library = path != nullptr ? dlopen(path, RTLD_LAZY) : nullptr;
    if (library != nullptr) {
        using Initialise = int (*)(void const *(*)(uint32_t));
        auto initialise = reinterpret_cast<Initialise>(dlsym(library, "InitializeInjectionNvtx2"));
        if (initialise == nullptr || initialise(getExportTable) == 0) {
            dlclose(library);
        }
    }
    state = COMPLETE;
}

// Calls a function of a table, if somebody has put one there; `nothing` otherwise.
template <class Result, class... A> Result call(Function const *table, unsigned id, Result nothing, A... arguments) {
    if (state != COMPLETE) {
        initialise();
    }
    auto function = reinterpret_cast<Result (*)(A...)>(table[id]);
    return function != nullptr ? function(arguments...) : nothing;
}

inline void *domainCreateA(char const *name) { return call<void *>(core2, 12, nullptr, name); }

// A range of the calling thread in a domain, while it lives.
class Range {
public:
    Range(void *domain, char const *name) : domain(domain) {
        EventAttributes attributes{};
        attributes.version = 3;
        attributes.size = sizeof attributes;
        attributes.messageType = 1; // NVTX_MESSAGE_TYPE_ASCII
        attributes.message.ascii = name;
        call<int>(core2, 4, 0, domain, static_cast<EventAttributes const *>(&attributes));
    }
    ~Range() { call<int>(core2, 5, 0, domain); }
    Range(Range const &) = delete;
    Range &operator=(Range const &) = delete;

private:
    void *domain;
};

} // namespace nvtx
