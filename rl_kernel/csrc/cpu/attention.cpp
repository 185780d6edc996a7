#include "attention.h"

#include <algorithm>
#include <memory>
#include <new>
#include <vector>

#include "attention_rows.h"
#include "threads.h"

namespace cpu {
namespace {

// Rows (query x head) of one task: enough to pay for packing a key block, few enough to stay in the L2 cache.
constexpr int64_t kTaskRows = 128;

// Queries [first, first + count) of a sequence under kv heads [head, head + heads).
struct Span {
  int64_t sequence, first, count, head, heads;
};

class Task {
 public:
  Task(const Attention& args, const Span& span) : args_(args), span_(span) {
    const int64_t r = span.sequence, queries = args.cu_q[r + 1] - args.cu_q[r];
    const int64_t keys = args.seq_lens ? args.seq_lens[r] : args.cu_k[r + 1] - args.cu_k[r];
    shape_ = {args.heads / args.kv_heads, args.dim, span.count, keys - queries + span.first, args.scale};
    end_ = shape_.position + span.count;
    k_ = sequence_rows(args.k), v_ = sequence_rows(args.v);
  }

  void run(const Task* after) {
    const int64_t floats = shape_.floats();
    float* memory = scratch_of<float>(0, floats * span_.heads);
    uint32_t* words = scratch_of<uint32_t>(1, shape_.words());
    HeadRows* heads = scratch_of<HeadRows>(2, span_.heads);
    for (int64_t h = 0; h < span_.heads; ++h)
      load_queries(*new (heads + h) HeadRows(shape_, memory + h * floats, words), h);
    for (int64_t first = 0; first < end_; first += args_.kv_partial) {
      for (int64_t h = 0; h < span_.heads; ++h) heads[h].start_partial(first);
      for (int64_t k0 = first; k0 < std::min(end_, first + args_.kv_partial); k0 += kBlock) block(heads, k0, after);
      for (int64_t h = 0; h < span_.heads; ++h) heads[h].end_partial(first);
    }
    for (int64_t h = 0; h < span_.heads; ++h) store(heads[h], h);
  }

 private:
  static_assert(std::is_trivially_destructible_v<HeadRows>, "they live in scratch memory");

  KvRows sequence_rows(KvRows all) const {
    all.base += span_.head * args_.dim;
    if (all.table)
      all.table += span_.sequence * args_.table_row;
    else
      all.base += args_.cu_k[span_.sequence] * all.token;
    return all;
  }

  int64_t token(int64_t i) const { return args_.cu_q[span_.sequence] + span_.first + i; }

  void load_queries(HeadRows& rows, int64_t h) const {
    const int64_t width = shape_.group * args_.dim;
    for (int64_t i = 0; i < span_.count; ++i)
      kernels().widen(rows.query(i), args_.q + token(i) * args_.q_token + (span_.head + h) * width, width);
  }

  void block(HeadRows* heads, int64_t k0, const Task* after) const {
    const bf16 *k[kBlock], *v[kBlock];
    const int64_t n = rows_at(k0, k, v), row_bytes = span_.heads * args_.dim * int64_t(sizeof(bf16));
    Expected next;
    const bf16 *next_k[kBlock], *next_v[kBlock];
    const bool more = k0 + kBlock < end_;
    if (more || after) {
      const int64_t rows = more ? rows_at(k0 + kBlock, next_k, next_v) : after->rows_at(0, next_k, next_v);
      next.expect(next_k, next_v, rows, row_bytes, Expected::kPulls * span_.heads);
    }
    for (int64_t h = 0; h < span_.heads; ++h) {
      heads[h].block(k, v, k0, n, next);
      for (int64_t j = 0; j < n; ++j) k[j] += args_.dim, v[j] += args_.dim;
    }
  }

  // The rows of the block at key k0, for the first head of the span; returns how many there are.
  int64_t rows_at(int64_t k0, const bf16** k, const bf16** v) const {
    const int64_t n = std::min<int64_t>(kBlock, end_ - k0);
    k_.rows(k, k0, n), v_.rows(v, k0, n);
    return n;
  }

  void store(const HeadRows& rows, int64_t h) const {
    for (int64_t r = 0; r < shape_.rows(); ++r) {
      const int64_t at = token(r / shape_.group) * args_.heads + (span_.head + h) * shape_.group + r % shape_.group;
      rows.store(r, args_.out + at * args_.dim, args_.m ? args_.m + at : nullptr, args_.m ? args_.l + at : nullptr);
    }
  }

  const Attention& args_;
  const Span span_;
  HeadRows::Shape shape_;
  int64_t end_;  // keys that the last query sees
  KvRows k_, v_;
};

// Cuts the work into spans. All kv heads of a decoding sequence go together, so that its cache is read in one stream,
// unless there would be too few tasks for the threads.
std::vector<Span> spans_of(const Attention& args, int threads) {
  const int64_t group = args.heads / args.kv_heads, per_task = std::max<int64_t>(1, kTaskRows / group);
  const bool alone = args.sequences < 2 * threads;
  std::vector<Span> spans;
  for (int64_t r = 0; r < args.sequences; ++r) {
    const int64_t queries = args.cu_q[r + 1] - args.cu_q[r];
    // Last queries first: they see the most keys, and a long task at the end would leave the other threads idle.
    for (int64_t end = queries; end > 0; end -= per_task) {
      const int64_t first = std::max<int64_t>(0, end - per_task), count = end - first;
      const int64_t heads = alone ? 1 : std::clamp<int64_t>(kTaskRows / (count * group), 1, args.kv_heads);
      for (int64_t head = 0; head < args.kv_heads; head += heads)
        spans.push_back({r, first, count, head, std::min(heads, args.kv_heads - head)});
    }
  }
  return spans;
}

}  // namespace

void attention(const Attention& args, int threads) {
  const std::vector<Span> spans = spans_of(args, threads);
  parallel_for(int64_t(spans.size()), threads, [&](int64_t i) {
    // Most likely this thread's next task: its first keys are asked for while this one ends.
    const bool more = i + threads < int64_t(spans.size());
    const Task after(args, spans[more ? i + threads : i]);
    Task(args, spans[i]).run(more ? &after : nullptr);
  });
}

}  // namespace cpu
