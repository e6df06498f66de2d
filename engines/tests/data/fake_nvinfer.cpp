// Test double for libnvinfer.so, for the resolver's tests: same RTTI names, same single-inheritance-at-offset-0 layout, same slot numbers, same
// "API method passes its own name to a scope object" shape.  No NVIDIA code or header.  -DTRT=8|10|11, and the variants
// NO_SELFNAME, NO_VERSION, TWO_IMPL, WITH_DISPATCH.
#ifndef TRT
#define TRT 10
#endif
typedef struct CUstream_st* cudaStream_t;
namespace nvinfer1 {
template<int N> struct Fill;                                     // N unnamed virtual slots
class INoCopy { protected: virtual ~INoCopy() = default; };
namespace apiv {
class VRoot { public: virtual ~VRoot() noexcept = default; };    // slots 0,1
#define S(n) virtual long n() noexcept = 0;
#define S5(p) S(p##0) S(p##1) S(p##2) S(p##3) S(p##4)
class VExecutionContext : public VRoot { public:
  S5(a) S5(b) S(c0) S(c1)                                        // 2..13
#if TRT == 8
  S5(d) S(d5) S(d6) S(d7) S(d8)                                  // 14..22
#elif TRT == 10
  S(d0) S(d1)                                                    // 14..15
#else
  S(d0)                                                          // 14
#endif
  virtual bool executeV2(void* const*) noexcept = 0;             // 23 / 16 / 15
  S5(e) S5(f) S5(g) S(g5) S(g6) S(g7) S(g8)                      // 19 more
  virtual void* getTemporaryStorageAllocator() const noexcept = 0; // 43 / 36 / 35
  virtual bool enqueueV3(cudaStream_t) noexcept = 0;             // 44 / 37 / 36
  virtual void setPersistentCacheLimit(unsigned long) noexcept = 0;
  S5(h) S5(i) };
}
class IExecutionContext : public INoCopy { public:               // what the traced program sees
  bool enqueueV3(cudaStream_t s) noexcept { return mImpl->enqueueV3(s); }
  bool executeV2(void* const* b) noexcept { return mImpl->executeV2(b); }
 protected: apiv::VExecutionContext* mImpl; };
// What a step does; a test program may set it.
extern "C" { __attribute__((visibility("default"))) void (*fake_work)(cudaStream_t) = nullptr; }
inline void work(cudaStream_t s) { if (fake_work) fake_work(s); }
class APIDestructible { public: virtual void destroy() noexcept {} };
#ifdef NO_SELFNAME
#define SELF ApiScope scope("x", this)
#else
#define SELF ApiScope scope(__func__, this)
#endif
struct ApiScope { __attribute__((noinline)) ApiScope(char const* n, void const* t) { asm volatile("" :: "r"(n), "r"(t) : "memory"); } };
namespace rt {
class ExecutionContext : public apiv::VExecutionContext, public APIDestructible { public:
#undef S
#define S(n) long n() noexcept override { return 0; }
  S5(a) S5(b) S(c0) S(c1)
#if TRT == 8
  S5(d) S(d5) S(d6) S(d7) S(d8)
#elif TRT == 10
  S(d0) S(d1)
#else
  S(d0)
#endif
  S5(e) S5(f) S5(g) S(g5) S(g6) S(g7) S(g8) S5(h) S5(i)
  bool executeV2(void* const*) noexcept override { ApiScope s(__func__, this); work(nullptr); return true; }
  void* getTemporaryStorageAllocator() const noexcept override { ApiScope s(__func__, this); return nullptr; }
  bool enqueueV3(cudaStream_t st) noexcept override { SELF; ++n; work(st); return true; }
  void setPersistentCacheLimit(unsigned long) noexcept override { ApiScope s(__func__, this); }
  unsigned long n{}, pad[500]{}; };
#ifdef WITH_DISPATCH
struct ABIProps { virtual ~ABIProps() = default; };
class ExecutionContextDispatch : public ExecutionContext { public:   // forwarder: this->inner at +0x10 in the real one
  bool enqueueV3(cudaStream_t st) noexcept override { return inner->enqueueV3(st); } apiv::VExecutionContext* inner{}; };
#endif
}
template<class I, class T> class WrapCasts : public T, public I { public: WrapCasts() { this->I::mImpl = this; } };
template<class I, class T> class Wrapper : public WrapCasts<I, T> { public: virtual ~Wrapper() noexcept {} };
}
#pragma GCC visibility push(default)
extern "C" {
#ifdef NO_VERSION
#elif TRT == 8
int getInferLibVersion() { return 8601; }   char tensorrt_version_8_6_1_6;
#elif TRT == 10
int getInferLibVersion() { return 101303; } char tensorrt_version_10_13_3_9;
#else
int getInferLibVersion() { return 110400; } char tensorrt_version_11_4_0_106;
#endif
void* fake_create_context() { return static_cast<nvinfer1::IExecutionContext*>(new nvinfer1::Wrapper<nvinfer1::IExecutionContext, nvinfer1::rt::ExecutionContext>()); }
#ifdef TWO_IMPL
}
namespace nvinfer1 { namespace rt { class OtherContext : public ExecutionContext { public: bool enqueueV3(cudaStream_t) noexcept override { SELF; n += 2; return false; } }; } }
extern "C" {
void* fake_create_other() { return static_cast<nvinfer1::IExecutionContext*>(new nvinfer1::Wrapper<nvinfer1::IExecutionContext, nvinfer1::rt::OtherContext>()); }
#endif
#ifdef WITH_DISPATCH
void* fake_create_dispatch() { return static_cast<nvinfer1::IExecutionContext*>(new nvinfer1::Wrapper<nvinfer1::IExecutionContext, nvinfer1::rt::ExecutionContextDispatch>()); }
#endif
}
#pragma GCC visibility pop
