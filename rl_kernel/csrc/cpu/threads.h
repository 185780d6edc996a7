// Work handed to threads in tasks. Which thread runs a task, and how many threads there are, changes no bit.
#pragma once
#include <cstddef>
#include <cstdint>
#include <memory>
#include <type_traits>

namespace cpu {

// Runs task(i) for i in [0, tasks) on up to `threads` threads, each under default floating-point control: round to
// nearest even, subnormals kept, whatever the caller's thread had set. `task` must not throw.
void run_tasks(int64_t tasks, int threads, void (*task)(void*, int64_t), void* context);

template <class F>
void parallel_for(int64_t tasks, int threads, F&& f) {
  using Task = std::remove_reference_t<F>;
  run_tasks(
      tasks, threads, [](void* context, int64_t i) { (*static_cast<Task*>(context))(i); },
      const_cast<void*>(static_cast<const void*>(std::addressof(f))));
}

// 64-byte aligned memory of the calling thread, kept for its next task; `slot` names one of a few live buffers.
void* scratch(int slot, size_t bytes);
template <class T>
T* scratch_of(int slot, int64_t count) {
  return static_cast<T*>(scratch(slot, size_t(count) * sizeof(T)));
}

}  // namespace cpu
