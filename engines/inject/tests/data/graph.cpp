// A program that launches CUDA graphs on the stand-in driver, and checks that looking functions up means what it means
// without the injected library. Prints what it computed, which that library must not change.
//
// graph HOW THREADS LAUNCHES KERNEL_NS   HOW: how it gets cuGraphLaunch:
//   dlsym | getproc (cuGetProcAddress_v2) | getproc1 (cuGetProcAddress) | ptsz (for per-thread default streams)
//   hidden (past this library: dlsym of the C library itself) | mixed (every third launch hidden)
//   linked (needs -DLINKED and libcuda at link time) | lookups (checks only)
// With WAIT_FILE=FILE in the environment it begins when that file is there.
#include <dlfcn.h>
#include <unistd.h>

#include <atomic>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>
#include <vector>

using Handle = void*;
using Launch = int (*)(Handle, Handle);

static void* cuda;
static std::string how;

static void* must_find(void* library, const char* name) {
  void* f = dlsym(library, name);
  if (!f) { fprintf(stderr, "no %s: %s\n", name, dlerror()); exit(3); }
  return f;
}

template <class... A> static int cu(const char* name, A... a) {
  return reinterpret_cast<int (*)(A...)>(must_find(cuda, name))(a...);
}

static void must(const char* what, int result) {
  if (result) { fprintf(stderr, "%s: error %d\n", what, result); exit(4); }
}

#ifdef LINKED
extern "C" int cuGraphLaunch(Handle, Handle);
#endif

static void* hidden(const char* name) {
  auto real = reinterpret_cast<void* (*)(void*, const char*)>(dlvsym(RTLD_DEFAULT, "dlsym", "GLIBC_2.2.5"));
  return real(cuda, name);
}

static void* by_lookup(const char* lookup, const char* name, unsigned long flags) {
  void* f = nullptr;
  int status = -1, version = 12000;
  void* get = nullptr;
  // As libcudart does: cuGetProcAddress finds itself.
  auto first = reinterpret_cast<int (*)(const char*, void**, int, unsigned long, int*)>(must_find(cuda, lookup));
  if (!strcmp(lookup, "cuGetProcAddress")) {
    auto old = reinterpret_cast<int (*)(const char*, void**, int, unsigned long)>(first);
    must(lookup, old(name, &f, version, flags));
    return f;
  }
  must(lookup, first("cuGetProcAddress", &get, version, 0, &status));
  must(lookup, reinterpret_cast<decltype(first)>(get)(name, &f, version, flags, &status));
  if (status) { fprintf(stderr, "status %d\n", status); exit(4); }
  void* nothing = f;
  if (first("cuNoSuchFunction", &nothing, version, 0, &status) != 500 || nothing || status != 1) {
    fprintf(stderr, "a function that is not there was found\n");
    exit(4);
  }
  return f;
}

static Launch find() {
  void* f = nullptr;
#ifdef LINKED
  if (how == "linked") return cuGraphLaunch;
#endif
  if (how == "dlsym" || how == "mixed") f = must_find(cuda, "cuGraphLaunch");
  if (how == "hidden") f = hidden("cuGraphLaunch");
  if (how == "getproc") f = by_lookup("cuGetProcAddress_v2", "cuGraphLaunch", 0);
  if (how == "getproc1") f = by_lookup("cuGetProcAddress", "cuGraphLaunch", 0);
  if (how == "ptsz") f = by_lookup("cuGetProcAddress_v2", "cuGraphLaunch", 2);
  if (!f) { fprintf(stderr, "how?\n"); exit(2); }
  return reinterpret_cast<Launch>(f);
}

static int lookups() {
  // RTLD_NEXT and RTLD_DEFAULT mean the caller: libfirst.so's own who() and the one behind it.
  void* first = dlopen("libfirst.so", RTLD_NOW | RTLD_NOLOAD);
  if (!first) { fprintf(stderr, "%s\n", dlerror()); return 3; }
  auto next = reinterpret_cast<const char* (*)()>(must_find(first, "next_who"));
  printf("next %s, default %s\n", next(), reinterpret_cast<const char* (*)()>(dlsym(RTLD_DEFAULT, "who"))());
  printf("error after success: %s\n", dlerror() ? "yes" : "no");
  bool null = !dlsym(cuda, "cuNoSuchFunction");
  const char* error = dlerror();
  printf("missing: %d, named in the error: %d\n", null, error && strstr(error, "cuNoSuchFunction"));
  null = !dlsym(first, "cuGraphLaunch");
  error = dlerror();
  printf("elsewhere: %d, named in the error: %d, ", null, error && strstr(error, "cuGraphLaunch"));
  printf("once: %d\n", !dlerror());
  return 0;
}

static void work(Handle context, Launch launch, long kernel_ns, int launches, std::atomic<long>* sum) {
  must("current", cu("cuCtxSetCurrent", context));
  Handle module, function, stream, graph, exec;
  must("module", cu("cuModuleLoadData", &module, static_cast<const void*>(".visible .entry standin_busy (.param .u64 ns) { ret; }")));
  must("function", cu("cuModuleGetFunction", &function, module, "standin_busy"));
  must("stream", cu("cuStreamCreate", &stream, 1u));
  must("begin", cu("cuStreamBeginCapture_v2", stream, 0));
  void* parameters[] = {&kernel_ns};
  must("kernel", cu("cuLaunchKernel", function, 1u, 1u, 1u, 1u, 1u, 1u, 0u, stream, static_cast<void**>(parameters),
                    static_cast<void**>(nullptr)));
  must("end", cu("cuStreamEndCapture", stream, &graph));
  must("instantiate", cu("cuGraphInstantiateWithFlags", &exec, graph, 0ull));
  auto past = reinterpret_cast<Launch>(hidden("cuGraphLaunch"));
  Handle on = how == "ptsz" ? nullptr : stream;
  for (int i = 0; i < launches; ++i) {
    must("launch", (how == "mixed" && i % 3 == 2 ? past : launch)(exec, on));
    must("synchronize", how == "ptsz" ? cu("cuCtxSynchronize") : cu("cuStreamSynchronize", stream));
    ++*sum;
  }
  // A bad handle is the driver's to refuse.
  if (launch(nullptr, on) != 400) { fprintf(stderr, "a bad graph was launched\n"); exit(5); }
}

int main(int argc, char** argv) {
  if (argc != 5) return 2;
  how = argv[1];
  int threads = atoi(argv[2]), launches = atoi(argv[3]);
  cuda = dlopen("libcuda.so.1", RTLD_NOW);
  if (!cuda) { fprintf(stderr, "%s\n", dlerror()); return 3; }
  if (how == "lookups") return lookups();
  Launch launch = find();
  Handle context;
  must("init", cu("cuInit", 0u));
  must("retain", cu("cuDevicePrimaryCtxRetain", &context, 0));
  const char* file = getenv("WAIT_FILE");
  for (int i = 0; file && access(file, F_OK); ++i) {
    if (i == 30000) { fprintf(stderr, "no %s\n", file); return 6; }
    usleep(1000);
  }
  std::atomic<long> sum{0};
  std::vector<std::thread> all;
  for (int i = 0; i < threads; ++i) all.emplace_back(work, context, launch, atol(argv[4]), launches, &sum);
  for (auto& thread : all) thread.join();
  printf("launches %ld\n", sum.load());
  return 0;
}
