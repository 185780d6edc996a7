// A pool of threads that help whoever calls, and for whom nobody waits.
//
// OpenMP would do, and torch's own runtime could be shared. But its regions end when every thread has come: where
// something else runs on the cores (an auditor, Ray, the other engine) each of a decode step's two hundred regions may
// wait for a thread that has lost its core. Here the caller works through the tasks itself; threads that are awake take
// tasks too, and at the end only those inside one are waited for. Measured in docs/results/cpu-ops.md.
#pragma once
#include <atomic>
#include <cstdint>
#include <exception>
#include <mutex>

namespace cpu {

class ThreadPool {
 public:
  using Task = void (*)(void* context, int64_t index);

  explicit ThreadPool(bool forked) : forked_(forked) {}

  // The process's pool. A forked child gets one of its own: threads do not survive a fork.
  static ThreadPool& instance();

  // Runs task(context, i) for i in [0, tasks) here and on up to `helpers` threads. False, with nothing done, if another
  // caller has the pool: the tasks are then better done by the caller alone. What a task throws, this throws when no
  // thread is at the job any more; of several the first.
  bool run(int64_t tasks, int helpers, Task task, void* context);

 private:
  void grow(int helpers);
  void work();
  bool enter();
  [[noreturn]] void help();

  const bool forked_;
  std::mutex callers_;
  std::atomic<uint32_t> epoch_{0};  // counts jobs; helpers sleep on it
  std::atomic<uint32_t> gate_{0};   // open or not, how many may enter, how many are inside; the caller sleeps on it
  std::atomic<int64_t> next_{0};
  int64_t tasks_ = 0;
  Task task_ = nullptr;
  void* context_ = nullptr;
  int size_ = 0;
  std::atomic<bool> failed_{false};
  std::exception_ptr failure_;
};

}  // namespace cpu
