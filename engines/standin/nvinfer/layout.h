// The layout of TensorRT's execution context, as a tracer finds it in NVIDIA's stripped library: the names in its RTTI,
// single inheritance at offset 0, the number of virtual functions before enqueueV3. No NVIDIA code or header.
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
#define AFTER_SHAPE(DEFINE) DEFINE(f1) DEFINE(f2) DEFINE(f3) DEFINE(f4) REST(DEFINE)
#else
#define BEFORE_SHAPE(DEFINE) DEFINE(e0) DEFINE(e1) DEFINE(e2) DEFINE(e3) // 17 | 16 to 20 | 19
#define AFTER_SHAPE(DEFINE) FIVE(DEFINE, f) REST(DEFINE)
#endif
#define REST(DEFINE) FIVE(DEFINE, g) DEFINE(g5) DEFINE(g6) DEFINE(g7) DEFINE(g8)
#define AFTER(DEFINE) FIVE(DEFINE, h) FIVE(DEFINE, i)

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
    AFTER_SHAPE(PURE)
    virtual void *getTemporaryStorageAllocator() const noexcept = 0;
    virtual bool enqueueV3(cudaStream_t) noexcept = 0; // slot 44 | 37 | 36
    virtual void setPersistentCacheLimit(unsigned long) noexcept = 0;
    AFTER(PURE)
};

} // namespace apiv

// What a program holds: calls go through mImpl, at offset 8.
class IExecutionContext : public INoCopy {
public:
    virtual ~IExecutionContext() noexcept = default;
    apiv::VExecutionContext *mImpl;
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
