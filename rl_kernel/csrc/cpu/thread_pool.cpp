#include "thread_pool.h"

#include <pthread.h>

#include <algorithm>
#include <chrono>
#include <thread>
#include <utility>
#include <vector>
#if defined(__x86_64__)
#include <xmmintrin.h>
#endif

namespace cpu {
namespace {

constexpr uint32_t kOpen = 1u << 31, kByte = 0xff;
constexpr int kMostHelpers = 255;
uint32_t inside(uint32_t gate) { return gate & kByte; }
uint32_t room(uint32_t gate) { return gate >> 8 & kByte; }

// A decode step comes back within microseconds, so helpers stay awake that long; an idle engine costs nothing. A caller
// that waits for a helper without a core had better leave it this one.
constexpr std::chrono::microseconds kHelperSpins{100}, kCallerSpins{20};

// Spins for a while, then sleeps on `word`, until ready(value of word).
template <class Ready>
void wait_until(std::atomic<uint32_t>& word, std::chrono::microseconds spins, Ready ready) {
  using Clock = std::chrono::steady_clock;
  for (const auto end = Clock::now() + spins; Clock::now() < end;)
    for (int i = 0; i < 32; ++i) {
      if (ready(word.load(std::memory_order_acquire))) return;
#if defined(__x86_64__)
      _mm_pause();
#endif
    }
  for (uint32_t seen; !ready(seen = word.load(std::memory_order_acquire));) word.wait(seen);
}

std::atomic<ThreadPool*> the_pool{nullptr};

#if defined(__linux__)
// Where the OpenMP threads may run, by number. Engines pin those (vLLM: one to a core, the caller included), and a
// thread made by a pinned caller would be pinned to the caller's own core.
std::vector<cpu_set_t> openmp_affinities(int threads) {
  std::vector<cpu_set_t> sets(size_t(threads), cpu_set_t{});
#pragma omp parallel for num_threads(threads) schedule(static, 1)
  for (int i = 0; i < threads; ++i) sched_getaffinity(0, sizeof sets[size_t(i)], &sets[size_t(i)]);
  return sets;
}
#endif

}  // namespace

ThreadPool& ThreadPool::instance() {
  static const int registered = [] {
    the_pool = new ThreadPool(false);
    return pthread_atfork(nullptr, nullptr, [] { the_pool = new ThreadPool(true); });
  }();
  (void)registered;
  return *the_pool.load(std::memory_order_acquire);
}

void ThreadPool::grow(int helpers) {
  if (size_ >= helpers) return;
#if defined(__linux__)
  // After a fork OpenMP would wait for threads that only the parent has.
  const std::vector<cpu_set_t> sets = forked_ ? std::vector<cpu_set_t>() : openmp_affinities(helpers + 1);
#endif
  for (; size_ < helpers; ++size_) {
    std::thread helper([this] { help(); });
#if defined(__linux__)
    if (!forked_) pthread_setaffinity_np(helper.native_handle(), sizeof(cpu_set_t), &sets[size_t(size_) + 1]);
#endif
    helper.detach();
  }
}

bool ThreadPool::run(int64_t tasks, int helpers, Task task, void* context) {
  std::unique_lock lock(callers_, std::try_to_lock);
  if (!lock) return false;
  helpers = std::min(helpers, kMostHelpers);
  grow(helpers);
  tasks_ = tasks, task_ = task, context_ = context;
  next_.store(0, std::memory_order_relaxed);
  gate_.store(kOpen | uint32_t(helpers) << 8, std::memory_order_release);
  epoch_.fetch_add(1, std::memory_order_release);
  epoch_.notify_all();
  work();
  gate_.fetch_and(~kOpen, std::memory_order_acq_rel);
  wait_until(gate_, kCallerSpins, [](uint32_t gate) { return inside(gate) == 0; });
  if (failed_.exchange(false)) std::rethrow_exception(std::exchange(failure_, nullptr));
  return true;
}

// A task may run out of memory. The caller is told once nobody works on its job any more.
void ThreadPool::work() {
  try {
    for (int64_t i; (i = next_.fetch_add(1, std::memory_order_relaxed)) < tasks_;) task_(context_, i);
  } catch (...) {
    next_.store(tasks_, std::memory_order_relaxed);
    if (!failed_.exchange(true)) failure_ = std::current_exception();
  }
}

// A helper that is inside keeps the job alive: the caller returns, and another may come, only when all have left.
bool ThreadPool::enter() {
  uint32_t gate = gate_.load(std::memory_order_acquire);
  while ((gate & kOpen) && inside(gate) < room(gate))
    if (gate_.compare_exchange_weak(gate, gate + 1, std::memory_order_acq_rel)) return true;
  return false;
}

void ThreadPool::help() {
  for (uint32_t seen = 0;;) {
    wait_until(epoch_, kHelperSpins, [&](uint32_t epoch) { return epoch != seen; });
    seen = epoch_.load(std::memory_order_acquire);
    if (!enter()) continue;
    work();
    const uint32_t before = gate_.fetch_sub(1, std::memory_order_acq_rel);
    if (!(before & kOpen) && inside(before) == 1) gate_.notify_all();
  }
}

}  // namespace cpu
