// Stand-in for libnvinfer, for demo and tests: an engine that says the data types of its tensors and makes contexts, whose enqueueV3 does some work on the host and
// launches kernels of the stand-in driver that take as long as they are told.
//
// It names its layers by NVTX ranges, as TensorRT does: one for the whole enqueue, and in it one for each kernel.
//
// Fault variants: TWO_IMPL adds a second class that implements enqueueV3; compiled with -fno-rtti there is no RTTI.
#include "layout.h"
#include "nvtx.h"

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <ctime>
#include <dlfcn.h>

#define EXPORT extern "C" __attribute__((visibility("default")))

namespace {

// The driver's functions, as a statically linked runtime finds them: from the library by name.
struct Driver {
    int (*moduleLoadData)(void **module, void const *image);
    int (*moduleGetFunction)(void **function, void *module, char const *name);
    int (*moduleUnload)(void *module);
    int (*launchKernel)(void *function, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                        unsigned sharedBytes, cudaStream_t stream, void **parameters, void **extra);
    int (*streamSynchronize)(cudaStream_t stream);
    bool found;

    template <class F> void find(void *library, char const *name, F &function) {
        function = reinterpret_cast<F>(dlsym(library, name));
        if (function == nullptr) {
            fprintf(stderr, "standin libnvinfer: libcuda.so.1 has no %s\n", name);
            found = false;
        }
    }

    Driver() : found(true) {
        void *library = dlopen("libcuda.so.1", RTLD_NOW);
        if (library == nullptr) {
            fprintf(stderr, "standin libnvinfer: %s\n", dlerror());
            found = false;
            return;
        }
        find(library, "cuModuleLoadData", moduleLoadData);
        find(library, "cuModuleGetFunction", moduleGetFunction);
        find(library, "cuModuleUnload", moduleUnload);
        find(library, "cuLaunchKernel", launchKernel);
        find(library, "cuStreamSynchronize", streamSynchronize);
    }
};

Driver const &driver() {
    static Driver const instance;
    return instance;
}

char const kernelImage[] = ".version 7.0\n.target sm_80\n.address_size 64\n"
                           ".visible .entry standin_busy(.param .u64 ns)\n{\n ret;\n}\n";

// Work of the CPU that takes its time from the thread: preempted, it takes longer.
__attribute__((noinline)) uint64_t hostWork(uint64_t rounds) {
    uint64_t x = rounds | 1;
    for (uint64_t i = 0; i < rounds; ++i) {
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        asm volatile("" : "+r"(x));
    }
    return x;
}

uint64_t nowNs() {
    timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return static_cast<uint64_t>(time.tv_sec) * 1000000000u + static_cast<uint64_t>(time.tv_nsec);
}

// Rounds of hostWork in a microsecond of undisturbed running: the fastest of some trials.
uint64_t roundsPerUs() {
    static uint64_t const rounds = [] {
        uint64_t const trial = 20000;
        uint64_t best = ~0ull;
        for (int i = 0; i < 20; ++i) {
            uint64_t const begin = nowNs();
            hostWork(trial);
            uint64_t const took = nowNs() - begin;
            best = took < best ? took : best;
        }
        return trial * 1000u / (best == 0 ? 1 : best) + 1;
    }();
    return rounds;
}

void *nvtxDomain() {
    static void *const domain = nvtx::domainCreateA("TensorRT");
    return domain;
}

// Names of the first kernels of a step; those after them come round again, with the next number.
char const *const layerParts[] = {"input_layernorm", "self_attn/qkv_proj", "self_attn/attention", "self_attn/o_proj",
                                  "post_attention_layernorm", "mlp/gate_up_proj", "mlp/down_proj", "residual"};

void nameLayer(char *name, size_t size, uint32_t kernel) {
    uint32_t const parts = sizeof layerParts / sizeof *layerParts;
    snprintf(name, size, "/model/layers.%u/%s", kernel / parts, layerParts[kernel % parts]);
}

// Every function of the real API names itself to an object like this.
struct ApiScope {
    __attribute__((noinline)) ApiScope(char const *name, void const *self) {
        asm volatile("" : : "r"(name), "r"(self) : "memory");
    }
};

} // namespace

namespace nvinfer1 {

class APIDestructible {
public:
    virtual void destroy() noexcept {}
};

namespace rt {

class ExecutionContext : public apiv::VExecutionContext, public APIDestructible {
public:
    ~ExecutionContext() noexcept override {
        if (module != nullptr) {
            driver().moduleUnload(module);
        }
    }

    BEFORE_EXECUTE(RETURN_ZERO)
    BEFORE_SHAPE(RETURN_ZERO)
    AFTER_SHAPE(RETURN_ZERO)
    AFTER(RETURN_ZERO)

    bool executeV2(void *const *) noexcept override {
        ApiScope scope(__func__, this);
        return run(nullptr) && driver().streamSynchronize(nullptr) == 0;
    }
    // Not inlined into its only caller, as no method of the real library is into a program.
    __attribute__((noinline)) bool setInputShape(char const *, Dims const &dims) noexcept override {
        ApiScope scope(__func__, this);
        inputs = dims;
        return true;
    }
    // Of its output: as many rows as the input, and a column for each word that the model knows.
    __attribute__((noinline)) Dims getTensorShape(char const *) const noexcept override {
        ApiScope scope(__func__, this);
        Dims dims{};
        dims.nbDims = 2;
        dims.d[0] = inputs.d[0];
        dims.d[1] = 32000;
        return dims;
    }
    void *getTemporaryStorageAllocator() const noexcept override {
        ApiScope scope(__func__, this);
        return nullptr;
    }
    bool enqueueV3(cudaStream_t stream) noexcept override {
        ApiScope scope(__func__, this);
        return run(stream);
    }
    void setPersistentCacheLimit(unsigned long) noexcept override { ApiScope scope(__func__, this); }

    // Loads the kernel into the current context.
    bool load() noexcept {
        for (uint32_t i = 0; i < maxNames; ++i) {
            nameLayer(layerNames[i], sizeof layerNames[i], i);
        }
        return driver().found && driver().moduleLoadData(&module, kernelImage) == 0 &&
               driver().moduleGetFunction(&kernel, module, "standin_busy") == 0;
    }

    uint64_t gpuNs{};
    uint64_t hostNs{};
    uint32_t kernels{1};

protected:
    __attribute__((noinline)) bool run(cudaStream_t stream) noexcept {
        // The host prepares each kernel and launches it, as an engine does.
        uint64_t const rounds = hostNs * roundsPerUs() / (1000u * kernels);
        uint64_t left = gpuNs;
        void *const domain = nvtxDomain();
        nvtx::Range const whole(domain, "ExecutionContext::enqueue");
        for (uint32_t i = 0; i < kernels; ++i) {
            nvtx::Range const layer(domain, layerNames[i % maxNames]);
            hostWork(rounds);
            uint64_t ns = left / (kernels - i);
            left -= ns;
            void *parameters[] = {&ns};
            if (driver().launchKernel(kernel, 1, 1, 1, 32, 1, 1, 0, stream, parameters, nullptr) != 0) {
                return false;
            }
        }
        return true;
    }

private:
    static uint32_t const maxNames = 512;

    void *module{};
    void *kernel{};
    Dims inputs{};
    // Made once: an engine knows its layers' names, too.
    char layerNames[maxNames][64];
};

// Makes contexts, and knows its tensors.
class Engine : public apiv::VCudaEngine, public APIDestructible {
public:
    BEFORE_CREATE(RETURN_ZERO)
    BEFORE_TYPE(RETURN_ZERO)
    AFTER(RETURN_ZERO)

    __attribute__((noinline)) IExecutionContext *createExecutionContext() noexcept override;
    __attribute__((noinline)) DataType getTensorDataType(char const *name) const noexcept override {
        ApiScope scope(__func__, this);
        return strcmp(name, "input_ids") == 0 ? DataType::kINT64 : DataType::kHALF;
    }
};

#ifdef TWO_IMPL
class OtherContext : public ExecutionContext {
public:
    bool enqueueV3(cudaStream_t stream) noexcept override {
        ApiScope scope(__func__, this);
        return !run(stream);
    }
};
#endif

} // namespace rt
} // namespace nvinfer1

namespace {

template <class Implementation> using Wrapped = nvinfer1::Wrapper<nvinfer1::IExecutionContext, Implementation>;

template <class Implementation> void *create() {
    auto *context = new Wrapped<Implementation>();
    if (!context->load()) {
        delete context;
        return nullptr;
    }
    roundsPerUs();
    return static_cast<nvinfer1::IExecutionContext *>(context);
}

} // namespace

nvinfer1::IExecutionContext *nvinfer1::rt::Engine::createExecutionContext() noexcept {
    ApiScope scope(__func__, this);
    return static_cast<nvinfer1::IExecutionContext *>(create<nvinfer1::rt::ExecutionContext>());
}

// The value is the version of what this library offers to tools that know it; real ones have no such symbol.
EXPORT uint32_t const tracer_standin = 1;

#if TRT == 8
EXPORT int32_t getInferLibVersion() { return 8601; }
EXPORT char const tensorrt_version_8_6_1_6 = 0;
#elif TRT == 10
EXPORT int32_t getInferLibVersion() { return 101303; }
EXPORT char const tensorrt_version_10_13_3_9 = 0;
#else
EXPORT int32_t getInferLibVersion() { return 110400; }
EXPORT char const tensorrt_version_11_4_0_106 = 0;
#endif

// A context (nvinfer1::IExecutionContext*) in the current CUDA context; null if the driver refuses.
EXPORT void *standin_create_context() { return create<nvinfer1::rt::ExecutionContext>(); }
#ifdef TWO_IMPL
EXPORT void *standin_create_other_context() { return create<nvinfer1::rt::OtherContext>(); }
#endif

// An engine (nvinfer1::ICudaEngine*).
EXPORT void *standin_create_engine() {
    return static_cast<nvinfer1::ICudaEngine *>(new nvinfer1::Wrapper<nvinfer1::ICudaEngine, nvinfer1::rt::Engine>());
}

// As programs call it: through the vtable.
EXPORT void *standin_engine_create_context(void *engine) {
    return static_cast<nvinfer1::ICudaEngine *>(engine)->mImpl->createExecutionContext();
}
EXPORT int32_t standin_engine_data_type(void *engine, char const *name) {
    return static_cast<int32_t>(static_cast<nvinfer1::ICudaEngine *>(engine)->mImpl->getTensorDataType(name));
}
EXPORT int64_t standin_tensor_rows(void *context, char const *name) {
    return static_cast<nvinfer1::IExecutionContext *>(context)->mImpl->getTensorShape(name).d[0];
}

// What the next enqueueV3 calls do: `kernels` kernels (at least one) of gpuNs together, and hostNs of the CPU's time.
EXPORT void standin_set_step(void *context, uint64_t gpuNs, uint32_t kernels, uint64_t hostNs) {
    auto *implementation =
        static_cast<nvinfer1::rt::ExecutionContext *>(static_cast<nvinfer1::IExecutionContext *>(context)->mImpl);
    implementation->gpuNs = gpuNs;
    implementation->kernels = kernels == 0 ? 1 : kernels;
    implementation->hostNs = hostNs;
}

EXPORT void standin_destroy_context(void *context) { delete static_cast<nvinfer1::IExecutionContext *>(context); }

// As a program sets the shape of an input: through the vtable.
EXPORT bool standin_set_input_shape(void *context, char const *name, int64_t const *dims, int32_t count) {
    nvinfer1::Dims shape{};
    shape.nbDims = count < 8 ? count : 8;
    for (int32_t i = 0; i < shape.nbDims; ++i) {
        shape.d[i] = static_cast<decltype(+shape.d[i])>(dims[i]);
    }
    return static_cast<nvinfer1::IExecutionContext *>(context)->mImpl->setInputShape(name, shape);
}
