#include "gemm.h"

#include <algorithm>

#include "pack.h"
#include "threads.h"

namespace cpu {
namespace {

// Sizes of the blocks, in elements; they change speed only. A block of `a` (rows x depth, fp32) and the fp32 sums of
// a task (rows x panels x 48) share the L2 cache; a panel's depth x 48 words of `b` stay in L1.
constexpr int64_t kRows = 96;
constexpr int64_t kDepth = 640;
constexpr int64_t kSumBytes = 256 << 10;

struct Blocking {
  int64_t rows, panels, depth, row_tasks, panel_tasks;
};

Blocking blocking(const Product& p, int threads) {
  Blocking b;
  b.row_tasks = (p.m + kRows - 1) / kRows;
  b.rows = ((p.m + b.row_tasks - 1) / b.row_tasks + 7) / 8 * 8;
  b.row_tasks = (p.m + b.rows - 1) / b.rows;
  b.rows = std::min(b.rows, p.m);
  // Few rows: the weights stream past once, so leave the stream whole.
  const int64_t most = p.m <= 2 ? p.k : p.m <= 8 ? 4 * kDepth : kDepth, length = p.k / p.segments;
  // Equal blocks: a short last one would spend its time on loading and storing the sums.
  const int64_t blocks = std::max<int64_t>(1, (length + most - 1) / most);
  b.depth = std::max<int64_t>(2, (length / blocks + 2) / 2 * 2);
  const int64_t panels = panels_of(p.n),
                sum = b.rows * kPanel * int64_t(sizeof(float)) * TreeStack::buffers(p.segments);
  // Tasks, for balance against whatever else runs on the machine. Each widens its rows of `a` for itself, which one
  // row task alone would pay for in every task.
  const int64_t wanted = (b.row_tasks > 1 ? 8 : 4) * threads;
  const int64_t for_balance = std::max<int64_t>(1, panels * b.row_tasks / wanted);
  b.panels = std::clamp<int64_t>(std::min(for_balance, kSumBytes / sum), 1, 16);
  b.panel_tasks = (panels + b.panels - 1) / b.panels;
  b.panels = (panels + b.panel_tasks - 1) / b.panel_tasks;  // tasks as equal as can be: 20 panels as 10 and 10
  b.panel_tasks = (panels + b.panels - 1) / b.panels;
  return b;
}

class Task {
 public:
  Task(const Product& p, const Blocking& b, int64_t index)
      : p_(p),
        depth_(b.depth),
        m0_(index % b.row_tasks * b.rows),
        rows_(std::min(b.rows, p.m - m0_)),
        panel0_(index / b.row_tasks * b.panels),
        panels_(std::min(b.panels, panels_of(p.n) - panel0_)),
        size_(panels_ * rows_ * kPanel) {}

  void run() {
    float* sums = scratch_of<float>(0, size_ * TreeStack::buffers(p_.segments));
    TreeStack tree;
    const int64_t length = p_.k / p_.segments;
    for (int64_t s = 0; s < p_.segments; ++s) {
      chain(tree.leaf(sums, size_), s * length, (s + 1) * length);
      tree.push(sums, size_);
    }
    tree.finish(sums, size_);
    store(sums);
  }

 private:
  void chain(float* sums, int64_t k0, int64_t k1) {
    if (p_.resume) load(sums);
    if (!p_.resume && k0 == k1) std::fill(sums, sums + size_, 0.0f);
    // Blocks end on even k, so that only a segment's ends can split a pair.
    for (int64_t from = k0, to; from < k1; from = to) {
      to = std::min(k1, from / 2 * 2 + depth_);
      step(sums, from, to, p_.resume || from > k0);
    }
  }

  void step(float* sums, int64_t k0, int64_t k1, bool resume) {
    // Row strides that are a power of two would put eight rows in the same cache sets.
    const int64_t ld = (p_.a_is_k_major ? rows_ : k1 - k0) + kLanes;
    float* a = scratch_of<float>(1, ld * (p_.a_is_k_major ? k1 - k0 : rows_));
    if (p_.a_is_k_major)
      for (int64_t k = k0; k < k1; ++k) kernels().widen(a + (k - k0) * ld, p_.a + k * p_.lda + m0_, rows_);
    else
      for (int64_t r = 0; r < rows_; ++r) kernels().widen(a + r * ld, p_.a + (m0_ + r) * p_.lda + k0, k1 - k0);
    const int64_t row = p_.a_is_k_major ? 1 : ld, along_k = p_.a_is_k_major ? ld : 1, pairs = pairs_of(p_.k);
    const uint32_t* first = p_.panels + panel0_ * pairs * kPanel;
    for (int64_t i = 0; i < panels_; ++i) {
      const uint32_t* b = first + i * pairs * kPanel;
      const bool last = i + 1 == panels_;
      const uint32_t* next = last && k1 < p_.k ? first + k1 / 2 * kPanel : b + (pairs + (last ? 0 : k0 / 2)) * kPanel;
      kernels().tile(rows_, kPanel / kLanes,
                     {k0, k1, a, row, along_k, b, kPanel, sums + i * rows_ * kPanel, kPanel, resume, next});
    }
  }

  template <class F>
  void each_row(F f) {
    for (int64_t i = 0; i < panels_; ++i) {
      const int64_t n0 = (panel0_ + i) * kPanel, columns = std::min<int64_t>(kPanel, p_.n - n0);
      for (int64_t r = 0; r < rows_; ++r) f((m0_ + r) * p_.ldo + n0, (i * rows_ + r) * kPanel, columns);
    }
  }
  void load(float* sums) {
    each_row([&](int64_t out, int64_t at, int64_t n) { std::copy_n(p_.out32 + out, n, sums + at); });
  }
  void store(const float* sums) {
    each_row([&](int64_t out, int64_t at, int64_t n) {
      if (p_.out16)
        kernels().narrow(p_.out16 + out, sums + at, n);
      else
        kernels().canonical(p_.out32 + out, sums + at, n);
    });
  }

  const Product& p_;
  const int64_t depth_, m0_, rows_, panel0_, panels_, size_;
};

}  // namespace

void multiply(const Product& p, int threads) {
  if (p.m == 0 || p.n == 0) return;
  const Blocking b = blocking(p, threads);
  parallel_for(b.row_tasks * b.panel_tasks, threads, [&](int64_t i) { Task(p, b, i).run(); });
}

}  // namespace cpu
