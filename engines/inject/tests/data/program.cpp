// A program that runs steps of the made-up TensorRT on the stand-in driver, as a server would: several threads, each
// with its stream. Prints what it computed. The injected library must not change that.
//
// program MODE THREADS STEPS KERNEL_NS   MODE: run | capture | fork | bench | bare
// With WAIT_HOOK=1 in the environment it begins when its vtable slot has been replaced.
#include <dlfcn.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

using Handle = void*;
using Enqueue = bool (*)(void*, Handle);

static void* cuda;
static long kernel_ns;
static Handle function;

template <class... A> static int cu(const char* name, A... a) {
  auto f = reinterpret_cast<int (*)(A...)>(dlsym(cuda, name));
  if (!f) { fprintf(stderr, "no %s\n", name); exit(3); }
  return f(a...);
}

static void must(const char* what, int result) {
  if (result) { fprintf(stderr, "%s: error %d\n", what, result); exit(4); }
}

// What a step does on its stream: one kernel.
static void launch(Handle stream) {
  void* parameters[] = {&kernel_ns};
  must("launch", cu("cuLaunchKernel", function, 1u, 1u, 1u, 1u, 1u, 1u, 0u, stream, static_cast<void**>(parameters),
                    static_cast<void**>(nullptr)));
}

static long now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec * 1000000000l + t.tv_nsec;
}

struct Context {
  void* object;   // what the engine's virtual functions get as `this`
  void** vtable;
  Context() {
    void* engine = dlopen("libnvinfer.so.10", RTLD_NOW);
    if (!engine) { fprintf(stderr, "%s\n", dlerror()); exit(3); }
    *static_cast<void (**)(Handle)>(dlsym(engine, "fake_work")) = launch;
    auto create = reinterpret_cast<void* (*)()>(dlsym(engine, "fake_create_context"));
    object = static_cast<void**>(create())[1];
    vtable = *static_cast<void***>(object);
  }
  Enqueue enqueue() const { return reinterpret_cast<Enqueue>(__atomic_load_n(&vtable[37], __ATOMIC_RELAXED)); }
  bool step(Handle stream) const { return enqueue()(object, stream); }
};

static Handle device() {
  Handle context;
  must("init", cu("cuInit", 0u));
  must("retain", cu("cuDevicePrimaryCtxRetain", &context, 0));
  must("current", cu("cuCtxSetCurrent", context));
  Handle module;
  must("module", cu("cuModuleLoadData", &module, static_cast<const void*>(".visible .entry standin_busy (.param .u64 ns) { ret; }")));
  must("function", cu("cuModuleGetFunction", &function, module, "standin_busy"));
  return context;
}

static void work(Handle cuda_context, const Context* context, int steps, std::atomic<long>* done) {
  must("current", cu("cuCtxSetCurrent", cuda_context));
  Handle stream, before, after;
  must("stream", cu("cuStreamCreate", &stream, 1u));
  for (int i = 0; i < steps; ++i) {
    must("get", cu("cuCtxGetCurrent", &before));
    *done += context->step(stream);
    must("get", cu("cuCtxGetCurrent", &after));
    if (before != after) { fprintf(stderr, "the current context has changed\n"); exit(5); }
    must("synchronize", cu("cuStreamSynchronize", stream));
  }
}

static int run(Handle cuda_context, const Context& context, int threads, int steps) {
  std::atomic<long> done{0};
  std::vector<std::thread> all;
  for (int i = 0; i < threads; ++i) all.emplace_back(work, cuda_context, &context, steps, &done);
  for (auto& thread : all) thread.join();
  printf("steps %ld\n", done.load());
  return 0;
}

// Two steps into a graph, and outside of it again.
static int capture(const Context& context) {
  Handle stream, graph, exec;
  must("stream", cu("cuStreamCreate", &stream, 1u));
  context.step(stream);
  must("begin", cu("cuStreamBeginCapture_v2", stream, 0));
  bool ok = context.step(stream) && context.step(stream);
  must("end", cu("cuStreamEndCapture", stream, &graph));
  must("instantiate", cu("cuGraphInstantiateWithFlags", &exec, graph, 0ull));
  must("launch", cu("cuGraphLaunch", exec, stream));
  must("synchronize", cu("cuStreamSynchronize", stream));
  printf("captured %d\n", ok);
  usleep(1500000);  // the library reports each second
  return 0;
}

// ns per step of the calling thread, without waiting for the device.
static int bench(const Context& context, int steps) {
  Handle stream;
  must("stream", cu("cuStreamCreate", &stream, 1u));
  std::vector<long> took(steps);
  for (int i = 0; i < steps; ++i) {
    long begin = now();
    context.step(stream);
    took[i] = now() - begin;
    if (i % 64 == 63) { must("synchronize", cu("cuStreamSynchronize", stream)); usleep(3000); }
  }
  std::vector<long> late(took.begin() + steps / 5, took.end());  // the first steps find no events yet
  std::sort(late.begin(), late.end());
  printf("{\"p50\":%ld,\"p99\":%ld,\"max\":%ld}\n", late[late.size() / 2], late[late.size() * 99 / 100], late.back());
  return 0;
}

// ns per step of an engine that does nothing: the best of several rounds.
static int bare(const Context& context, int steps) {
  *static_cast<void (**)(Handle)>(dlsym(dlopen("libnvinfer.so.10", RTLD_NOW), "fake_work")) = nullptr;
  double best = 1e9;
  for (int round = 0; round < 9; ++round) {
    long begin = now();
    for (int i = 0; i < steps; ++i) context.step(nullptr);
    best = std::min(best, double(now() - begin) / steps);
  }
  printf("{\"best\":%.2f}\n", best);
  return 0;
}

int main(int argc, char** argv) {
  if (argc != 5) return 2;
  const char* mode = argv[1];
  int threads = atoi(argv[2]), steps = atoi(argv[3]);
  kernel_ns = atol(argv[4]);
  cuda = dlopen("libcuda.so.1", RTLD_NOW);
  if (!cuda) { fprintf(stderr, "%s\n", dlerror()); return 3; }
  Context context;
  Enqueue original = context.enqueue();
  Handle cuda_context = strcmp(mode, "fork") ? device() : nullptr;
  if (getenv("WAIT_HOOK")) {
    for (int i = 0; context.enqueue() == original; ++i) {
      if (i == 20000) { fprintf(stderr, "not hooked\n"); return 6; }
      usleep(1000);
    }
  }
  if (!strcmp(mode, "capture")) return capture(context);
  if (!strcmp(mode, "bare")) return bare(context, steps);
  if (!strcmp(mode, "bench")) return bench(context, steps);
  if (!strcmp(mode, "fork")) {
    // The child is the one that uses the device, as in servers that fork their workers.
    pid_t child = fork();
    if (child == 0) _exit(run(device(), context, threads, steps) || fflush(stdout));
    int status;
    waitpid(child, &status, 0);
    if (status) { fprintf(stderr, "child: status %d\n", status); return 7; }
    return 0;
  }
  return run(cuda_context, context, threads, steps);
}
