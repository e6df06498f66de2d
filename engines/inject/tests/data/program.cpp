// A program that runs steps of the made-up TensorRT on the stand-in driver, as a server would: several threads, each
// with its stream. Prints what it computed. The injected library must not change that.
//
// program MODE THREADS STEPS KERNEL_NS   MODE: run | capture | fork | bench | bare | flood (no waiting between steps) |
//   hammer (four streams a thread, and copies whose bytes are added up) | contexts (each thread with its own, again and
//   again) | streams (each destroyed after a few steps) | exec, exit (while steps run) | reload (of the engine) | late |
//   inner (each step launches a graph)
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

static Handle inner_graph;

static void launch_inner(Handle stream) { must("graph", cu("cuGraphLaunch", inner_graph, stream)); }

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
  // Whether the slot leads out of the engine.
  bool hooked() const {
    Dl_info info;
    return dladdr(reinterpret_cast<void*>(enqueue()), &info) && !strstr(info.dli_fname, "libnvinfer");
  }
  bool step(Handle stream) const { return enqueue()(object, stream); }
};

static Handle kernel() {
  Handle module, found;
  must("module", cu("cuModuleLoadData", &module, static_cast<const void*>(".visible .entry standin_busy (.param .u64 ns) { ret; }")));
  must("function", cu("cuModuleGetFunction", &found, module, "standin_busy"));
  return found;
}

static Handle device() {
  Handle context;
  must("init", cu("cuInit", 0u));
  must("retain", cu("cuDevicePrimaryCtxRetain", &context, 0));
  must("current", cu("cuCtxSetCurrent", context));
  function = kernel();
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

// From now on a step launches a graph of one kernel.
static void make_inner_graph() {
  Handle stream, graph;
  must("stream", cu("cuStreamCreate", &stream, 1u));
  must("begin", cu("cuStreamBeginCapture_v2", stream, 0));
  launch(stream);
  must("end", cu("cuStreamEndCapture", stream, &graph));
  must("instantiate", cu("cuGraphInstantiateWithFlags", &inner_graph, graph, 0ull));
  *static_cast<void (**)(Handle)>(dlsym(dlopen("libnvinfer.so.10", RTLD_NOW), "fake_work")) = launch_inner;
}

// What a step does is launched, and waited for once at the end; but for the first tenth, during which the library makes
// its events.
static int flood(const Context& context, int steps) {
  Handle stream;
  must("stream", cu("cuStreamCreate", &stream, 1u));
  long done = 0;
  for (int i = 0; i < steps; ++i) {
    done += context.step(stream);
    if (i < steps / 10) must("synchronize", cu("cuStreamSynchronize", stream));
  }
  must("synchronize", cu("cuStreamSynchronize", stream));
  printf("steps %ld\n", done);
  return 0;
}

// Steps on four streams in turn, each with a copy there and back of bytes that depend on all steps before.
static void hammer(Handle cuda_context, const Context* context, int steps, unsigned long* sum) {
  must("current", cu("cuCtxSetCurrent", cuda_context));
  Handle streams[4];
  for (auto& stream : streams) must("stream", cu("cuStreamCreate", &stream, 1u));
  unsigned long memory, value = 1;
  must("memory", cu("cuMemAlloc_v2", &memory, sizeof value));
  for (int i = 0; i < steps; ++i) {
    Handle stream = streams[i % 4];
    value = value * 6364136223846793005ul + i + context->step(stream);
    must("to", cu("cuMemcpyHtoDAsync_v2", memory, static_cast<const void*>(&value), sizeof value, stream));
    unsigned long back = 0;
    must("from", cu("cuMemcpyDtoHAsync_v2", static_cast<void*>(&back), memory, sizeof back, stream));
    if (i % 64 == 63) must("synchronize", cu("cuStreamSynchronize", stream));
    if (back != value) { fprintf(stderr, "bytes changed\n"); exit(5); }
  }
  for (auto& stream : streams) must("destroy", cu("cuStreamDestroy_v2", stream));
  *sum = value;
}

static int hammer_all(Handle cuda_context, const Context& context, int threads, int steps) {
  std::vector<unsigned long> sums(threads);
  std::vector<std::thread> all;
  for (auto& sum : sums) all.emplace_back(hammer, cuda_context, &context, steps, &sum);
  for (auto& thread : all) thread.join();
  for (auto sum : sums) printf("%016lx\n", sum);
  return 0;
}

// Contexts that come and go: a few steps each, and then it is destroyed.
static void contexts(const Context* context, int steps, std::atomic<long>* done) {
  for (int i = 0; i < steps; i += 150) {
    Handle own, stream, on_top;
    must("create", cu("cuCtxCreate_v2", &own, 0u, 0));
    must("stream", cu("cuStreamCreate", &stream, 1u));
    for (int k = 0; k < 150; ++k) {
      *done += context->step(stream);
      must("synchronize", cu("cuStreamSynchronize", stream));
    }
    must("get", cu("cuCtxGetCurrent", &on_top));
    if (on_top != own) { fprintf(stderr, "the current context has changed\n"); exit(5); }
    must("destroy", cu("cuCtxDestroy_v2", own));
  }
}

static void streams(Handle cuda_context, const Context* context, int steps, std::atomic<long>* done) {
  must("current", cu("cuCtxSetCurrent", cuda_context));
  for (int i = 0; i < steps; i += 4) {
    Handle stream;
    must("stream", cu("cuStreamCreate", &stream, 1u));
    for (int k = 0; k < 4; ++k) *done += context->step(stream);
    must("synchronize", cu("cuStreamSynchronize", stream));
    must("destroy", cu("cuStreamDestroy_v2", stream));
  }
}

// Two steps into a graph, and outside of it again.
static int capture(const Context& context) {
  Handle stream, graph, exec;
  must("stream", cu("cuStreamCreate", &stream, 1u));
  context.step(stream);
  usleep(300000);  // the library finds the driver
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
  if (!strcmp(mode, "late")) usleep(700000);
  Context context;
  Handle cuda_context = strcmp(mode, "fork") ? device() : nullptr;
  if (getenv("WAIT_HOOK")) {
    for (int i = 0; !context.hooked(); ++i) {
      if (i == 20000) { fprintf(stderr, "not hooked\n"); return 6; }
      usleep(1000);
    }
  }
  if (!strcmp(mode, "capture")) return capture(context);
  if (!strcmp(mode, "inner")) make_inner_graph();
  if (!strcmp(mode, "flood")) return flood(context, steps);
  if (!strcmp(mode, "hammer")) return hammer_all(cuda_context, context, threads, steps);
  if (!strcmp(mode, "contexts") || !strcmp(mode, "streams")) {
    std::atomic<long> done{0};
    std::vector<std::thread> all;
    for (int i = 0; i < threads; ++i) {
      if (*mode == 'c') all.emplace_back(contexts, &context, steps, &done);
      else all.emplace_back(streams, cuda_context, &context, steps, &done);
    }
    for (auto& thread : all) thread.join();
    printf("steps %ld\n", done.load());
    return 0;
  }
  if (!strcmp(mode, "exec") || !strcmp(mode, "exit")) {
    static std::atomic<long> done{0};
    for (int i = 0; i < threads; ++i) std::thread(work, cuda_context, &context, 1 << 30, &done).detach();
    while (done < steps) usleep(1000);
    printf("enough\n");
    fflush(stdout);
    if (mode[2] == 'i') exit(0);
    execl(argv[0], argv[0], "run", argv[2], argv[3], argv[4], static_cast<char*>(nullptr));
    return 8;
  }
  if (!strcmp(mode, "reload")) {
    // Twice: the program's reference, and that of Context.
    run(cuda_context, context, threads, steps);
    void* engine = dlopen("libnvinfer.so.10", RTLD_NOW | RTLD_NOLOAD);
    dlclose(engine);
    dlclose(engine);
    Context again;
    return run(cuda_context, again, threads, steps);
  }
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
