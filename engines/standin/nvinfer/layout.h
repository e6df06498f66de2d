// The layout of TensorRT's execution context and engine, as a tracer finds it in NVIDIA's stripped library: the names in
// its RTTI, single inheritance at offset 0, the number of virtual functions before those that matter. No NVIDIA code or
// header.
// TRT selects the major version: 8, 10 or 11.
#pragma once

#include <cstdint>

#ifndef TRT
#define TRT 10
#endif

typedef struct CUstream_st *cudaStream_t;

// Virtual functions that nobody here calls. The lists below name them; DEFINE is PURE or
// RETURN_ZERO.
#define PURE(name) virtual long name() noexcept = 0;
#define RETURN_ZERO(name) long name() noexcept override { return 0; }
#define FIVE(DEFINE, prefix) DEFINE(prefix##0) DEFINE(prefix##1) DEFINE(prefix##2) DEFINE(prefix##3) DEFINE(prefix##4)
#if TRT == 8
#define BY_VERSION(DEFINE) FIVE(DEFINE, d) DEFINE(d5) DEFINE(d6) DEFINE(d7) DEFINE(d8) // slots 14 to 22
#elif TRT == 10
#define BY_VERSION(DEFINE) DEFINE(d0) DEFINE(d1) // 14 to 15
#elif TRT == 11
#define BY_VERSION(DEFINE) DEFINE(d0) // 14
#else
#error "TRT must be 8, 10 or 11"
#endif
#define BEFORE_EXECUTE(DEFINE) FIVE(DEFINE, a) FIVE(DEFINE, b) DEFINE(c0) DEFINE(c1) BY_VERSION(DEFINE) // from slot 2
#if TRT == 8
#define BEFORE_SHAPE(DEFINE) FIVE(DEFINE, e) // 24 to 28
#define AFTER_SHAPE(DEFINE) DEFINE(f1) DEFINE(f2) DEFINE(f3) REST(DEFINE)
#else
#define BEFORE_SHAPE(DEFINE) DEFINE(e0) DEFINE(e1) DEFINE(e2) DEFINE(e3) // 17 | 16 to 20 | 19
#define AFTER_SHAPE(DEFINE) DEFINE(f0) DEFINE(f1) DEFINE(f2) DEFINE(f3) REST(DEFINE)
#endif
#define REST(DEFINE) FIVE(DEFINE, g) DEFINE(g5) DEFINE(g6) DEFINE(g7) DEFINE(g8)
#define AFTER(DEFINE) FIVE(DEFINE, h) FIVE(DEFINE, i)

// Of the engine: those before createExecutionContext, and those between it and getTensorDataType.
#if TRT == 8
#define BEFORE_CREATE(DEFINE) FIVE(DEFINE, j) DEFINE(k0) DEFINE(k1) DEFINE(k2) DEFINE(k3) // 2 to 10
#define BEFORE_TYPE(DEFINE) FIVE(DEFINE, l) FIVE(DEFINE, m) FIVE(DEFINE, n) FIVE(DEFINE, o) DEFINE(p0) DEFINE(p1) DEFINE(p2)
#else
#define BEFORE_CREATE(DEFINE) DEFINE(j0) DEFINE(j1) DEFINE(j2) // 2 to 4
#if TRT == 10
#define BEFORE_TYPE(DEFINE) FIVE(DEFINE, l) FIVE(DEFINE, m) DEFINE(n0) DEFINE(n1) DEFINE(n2) DEFINE(n3) // 6 to 19
#else
#define BEFORE_TYPE(DEFINE) FIVE(DEFINE, l) FIVE(DEFINE, m) // 6 to 15
#endif
#endif

namespace nvinfer1 {

// A tensor's shape: 64 bits a dimension from version 10 on.
struct Dims {
    int32_t nbDims;
#if TRT == 8
    int32_t d[8];
#else
    int64_t d[8];
#endif
};

enum class DataType : int32_t { kFLOAT = 0, kHALF = 1, kINT64 = 8 };

class IExecutionContext;

class INoCopy {
protected:
    virtual ~INoCopy() = default;
};

namespace apiv {

class VRoot {
public:
    virtual ~VRoot() noexcept = default; // slots 0 and 1
};

class VExecutionContext : public VRoot {
public:
    BEFORE_EXECUTE(PURE)
    virtual bool executeV2(void *const *) noexcept = 0; // slot 23 | 16 | 15
    BEFORE_SHAPE(PURE)
    virtual bool setInputShape(char const *, Dims const &) noexcept = 0; // slot 29 | 21 | 20
    virtual Dims getTensorShape(char const *) const noexcept = 0;
    AFTER_SHAPE(PURE)
    virtual void *getTemporaryStorageAllocator() const noexcept = 0;
    virtual bool enqueueV3(cudaStream_t) noexcept = 0; // slot 44 | 37 | 36
    virtual void setPersistentCacheLimit(unsigned long) noexcept = 0;
    AFTER(PURE)
};

class VCudaEngine : public VRoot {
public:
    BEFORE_CREATE(PURE)
    virtual IExecutionContext *createExecutionContext() noexcept = 0; // slot 11 | 5 | 5
    BEFORE_TYPE(PURE)
    virtual DataType getTensorDataType(char const *) const noexcept = 0; // slot 35 | 20 | 16
    AFTER(PURE)
};

} // namespace apiv

// What a program holds: calls go through mImpl, at offset 8. So with the engine.
class IExecutionContext : public INoCopy {
public:
    virtual ~IExecutionContext() noexcept = default;
    apiv::VExecutionContext *mImpl;
};

class ICudaEngine : public INoCopy {
public:
    virtual ~ICudaEngine() noexcept = default;
    apiv::VCudaEngine *mImpl;
};

template <class Interface, class Implementation> class WrapCasts : public Implementation, public Interface {
public:
    WrapCasts() { this->Interface::mImpl = this; }
};

template <class Interface, class Implementation> class Wrapper : public WrapCasts<Interface, Implementation> {
public:
    virtual ~Wrapper() noexcept {}
};

} // namespace nvinfer1
