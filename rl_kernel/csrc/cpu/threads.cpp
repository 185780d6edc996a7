#include "threads.h"

#include <cstdlib>
#include <new>
#include <utility>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

#include "thread_pool.h"

namespace cpu {
namespace {

// A library loaded with -ffast-math, or torch.set_flush_denormal, leaves FTZ and DAZ on in a thread.
struct DefaultFloats {
#if defined(__x86_64__)
  unsigned saved = _mm_getcsr();
  DefaultFloats() { _mm_setcsr(0x1f80); }
  ~DefaultFloats() { _mm_setcsr(saved); }
#endif
};

struct Buffer {
  void* data = nullptr;
  size_t bytes = 0;
  ~Buffer() { std::free(data); }
};

}  // namespace

void run_tasks(int64_t tasks, int threads, void (*task)(void*, int64_t), void* context) {
  // Every task runs under its thread's own guard: helpers of the pool belong to nobody.
  struct Call {
    void (*task)(void*, int64_t);
    void* context;
  } call{task, context};
  const auto guarded = [](void* c, int64_t i) {
    DefaultFloats guard;
    static_cast<Call*>(c)->task(static_cast<Call*>(c)->context, i);
  };
  const int helpers = int(threads < tasks ? threads : tasks) - 1;
  if (helpers > 0 && ThreadPool::instance().run(tasks, helpers, guarded, &call)) return;
  for (int64_t i = 0; i < tasks; ++i) guarded(&call, i);
}

void* scratch(int slot, size_t bytes) {
  thread_local Buffer buffers[8];
  Buffer& buffer = buffers[slot];
  if (buffer.bytes < bytes) {
    std::free(std::exchange(buffer.data, nullptr));
    buffer.bytes = 0;
    const size_t pages = (bytes + 4095) / 4096 * 4096;
    buffer.data = std::aligned_alloc(4096, pages);
    if (!buffer.data) throw std::bad_alloc();
    buffer.bytes = pages;
  }
  return buffer.data;
}

}  // namespace cpu
