#include "attention.h"

#include <algorithm>
#include <limits>
#include <vector>

#include "pack.h"
#include "threads.h"

namespace cpu {

bool any_nonfinite(const bf16* x, int64_t n) {
  bool found = false;
  for (int64_t i = 0; i < n; ++i) found |= (x[i] & 0x7f80) == 0x7f80;
  return found;
}

namespace {

// Rows (query x head) of one task: enough to pay for packing a key block, few enough to stay in the L2 cache.
constexpr int64_t kTaskRows = 128;
// Up to here the values are used where they lie: packing them would cost more than widening them anew.
constexpr int64_t kFewRows = 12;
constexpr float kNone = -std::numeric_limits<float>::infinity();

struct Span {
  int64_t sequence, first, count;  // queries [first, first + count) of the sequence
};

// The sums of a set of rows over one partial, or over all partials so far.
struct Sums {
  float *m, *l, *acc;
};

// All query heads of one kv head against the keys of one sequence, for a span of queries. Rows are ordered by
// position, then head, so the rows that see a key block are the last ones.
class Rows {
 public:
  Rows(const Attention& args, const Span& span, int64_t kv_head)
      : args_(args), span_(span), kv_head_(kv_head), group_(args.heads / args.kv_heads),
        wide_((args.dim + kLanes - 1) / kLanes * kLanes), rows_(span.count * group_) {
    const int64_t r = span.sequence;
    queries_ = args.cu_q[r + 1] - args.cu_q[r];
    keys_ = args.seq_lens ? args.seq_lens[r] : args.cu_k[r + 1] - args.cu_k[r];
    position_ = keys_ - queries_ + span.first;
    k_ = sequence_rows(args.k), v_ = sequence_rows(args.v);
  }

  // Asks for the first keys; a short sequence would spend most of its time waiting for them.
  void expect() const { prefetch(k_, 0), prefetch(v_, 0); }

  void run() {
    allocate();
    load_queries();
    const int64_t end = position_ + span_.count;  // keys that the last row sees
    for (int64_t first = 0; first < end; first += args_.kv_partial) {
      const Sums sums = first == 0 ? total_ : part_;
      const int64_t from = first_row(first);
      std::fill(sums.m + from, sums.m + rows_, kNone);
      std::fill(sums.l + from, sums.l + rows_, 0.0f);
      for (int64_t k0 = first; k0 < std::min(end, first + args_.kv_partial); k0 += kBlock)
        block(sums, k0, std::min<int64_t>(kBlock, end - k0), k0 > first);
      if (first > 0) merge(from);
    }
    store();
  }

 private:
  KvRows sequence_rows(KvRows all) const {
    all.base += kv_head_ * args_.dim;
    if (all.table)
      all.table += span_.sequence * args_.table_row;
    else
      all.base += args_.cu_k[span_.sequence] * all.token;
    return all;
  }

  void allocate() {
    q_ = scratch_of<float>(0, rows_ * args_.dim);
    s_ = scratch_of<float>(1, rows_ * kBlock);
    total_.acc = scratch_of<float>(2, 2 * rows_ * wide_);
    part_.acc = total_.acc + rows_ * wide_;
    total_.m = scratch_of<float>(3, 5 * rows_);
    total_.l = total_.m + rows_, part_.m = total_.l + rows_, part_.l = part_.m + rows_, alpha_ = part_.l + rows_;
    k_words_ = scratch_of<uint32_t>(4, pairs_of(args_.dim) * kBlock);
    v_words_ = scratch_of<uint32_t>(5, kBlock / 2 * wide_);
  }

  void load_queries() {
    for (int64_t i = 0; i < span_.count; ++i)
      kernels().widen(q_ + i * group_ * args_.dim,
                      args_.q + token(i) * args_.q_token + kv_head_ * group_ * args_.dim, group_ * args_.dim);
  }

  int64_t token(int64_t i) const { return args_.cu_q[span_.sequence] + span_.first + i; }
  // The first row that sees key `key`.
  int64_t first_row(int64_t key) const { return std::clamp<int64_t>(key - position_, 0, span_.count) * group_; }

  // Keys [k0, k0 + n), the block at an absolute position, for the rows that see any of them.
  void block(const Sums& sums, int64_t k0, int64_t n, bool resume) {
    const bf16 *k_rows[kBlock], *v_rows[kBlock];
    k_.rows(k_rows, k0, n), v_.rows(v_rows, k0, n);
    prefetch(k_, k0 + kBlock), prefetch(v_, k0 + kBlock);
    kernels().pack_rows(k_words_, k_rows, n, kBlock, args_.dim);
    const int64_t from = first_row(k0), rows = rows_ - from;
    float* s = s_ + from * kBlock;
    kernels().tile(rows, kBlock / kLanes, 0, args_.dim, q_ + from * args_.dim, args_.dim, 1, k_words_, kBlock, s, kBlock,
                   false);
    for (int64_t r = from; r < rows_; ++r)
      alpha_[r] = kernels().softmax_block(s_ + r * kBlock, visible(r, k0), args_.scale, sums.m + r);
    kernels().row_sums(sums.l + from, alpha_ + from, s, rows);
    if (resume)
      for (int64_t r = from; r < rows_; ++r)
        if (alpha_[r] != 1.0f) kernels().scale(sums.acc + r * wide_, alpha_[r], wide_);
    product_with_v(sums, from, k0, v_rows, n, resume);
  }

  // A token's row is a line or two and then comes a gap, so the hardware does not see what is next.
  void prefetch(const KvRows& all, int64_t k0) const {
    const bf16* rows[kBlock];
    const int64_t n = std::clamp<int64_t>(position_ + span_.count - k0, 0, kBlock);
    all.rows(rows, k0, n);
    for (int64_t j = 0; j < n; ++j)
      for (int64_t i = 0; i < args_.dim; i += 32) __builtin_prefetch(rows[j] + i);
  }

  void product_with_v(const Sums& sums, int64_t from, int64_t k0, const bf16* const* v_rows, int64_t n, bool resume) {
    const int64_t rows = rows_ - from;
    const int vectors = int(wide_ / kLanes);
    // A masked key is worth p = +0 and v = +0; multiplying +0 by what stands in v is the same unless that is
    // infinite or NaN, and then each row must stop at its own last key.
    const bool masked = visible(from, k0) < n;
    if (rows <= kFewRows && !masked && args_.dim == wide_) {
      kernels().tile_unpacked(rows, vectors, n, s_ + from * kBlock, kBlock, v_rows, sums.acc + from * wide_, wide_, resume);
      return;
    }
    kernels().pack_columns(v_words_, v_rows, args_.dim, wide_, n);
    auto tile = [&](int64_t row, int64_t count, int64_t keys) {
      kernels().tile(count, vectors, 0, keys, s_ + row * kBlock, kBlock, 1, v_words_, wide_, sums.acc + row * wide_, wide_,
                     resume);
    };
    if (masked && std::any_of(v_rows, v_rows + n, [&](const bf16* v) { return any_nonfinite(v, args_.dim); }))
      for (int64_t r = from; r < rows_; ++r) tile(r, 1, visible(r, k0));
    else
      tile(from, rows, n);
  }

  int visible(int64_t row, int64_t k0) const {
    return int(std::min<int64_t>(kBlock, position_ + row / group_ + 1 - k0));
  }

  void merge(int64_t from) {
    for (int64_t r = from; r < rows_; ++r) {
      const float m1 = total_.m[r], m2 = part_.m[r], m = m2 > m1 ? m2 : m1;
      const float a = kernels().exp2(m1 - m), b = kernels().exp2(m2 - m);
      total_.l[r] = total_.l[r] * a + part_.l[r] * b;
      kernels().merge(total_.acc + r * wide_, part_.acc + r * wide_, a, b, wide_);
      total_.m[r] = m;
    }
  }

  void store() {
    for (int64_t r = 0; r < rows_; ++r) {
      const int64_t row = token(r / group_) * args_.heads + kv_head_ * group_ + r % group_;
      kernels().divide(args_.out + row * args_.dim, total_.acc + r * wide_, total_.l[r], args_.dim);
      if (!args_.m) continue;
      kernels().canonical(args_.m + row, total_.m + r, 1);
      kernels().canonical(args_.l + row, total_.l + r, 1);
    }
  }

  const Attention& args_;
  const Span span_;
  const int64_t kv_head_, group_, wide_, rows_;
  int64_t queries_, keys_, position_;  // position_: of the span's first query
  KvRows k_, v_;
  float *q_, *s_, *alpha_;
  Sums total_, part_;
  uint32_t *k_words_, *v_words_;
};

}  // namespace

void attention(const Attention& args, int threads) {
  const int64_t per_task = std::max<int64_t>(1, kTaskRows / (args.heads / args.kv_heads));
  std::vector<Span> spans;
  for (int64_t r = 0; r < args.sequences; ++r) {
    const int64_t queries = args.cu_q[r + 1] - args.cu_q[r];
    // Last queries first: they see the most keys, and a long task at the end would leave the other threads idle.
    for (int64_t end = queries; end > 0; end -= per_task) {
      const int64_t first = std::max<int64_t>(0, end - per_task);
      spans.push_back({r, first, end - first});
    }
  }
  const int64_t n = int64_t(spans.size());
  auto rows = [&](int64_t i) { return Rows(args, spans[i / args.kv_heads], i % args.kv_heads); };
  parallel_for(n * args.kv_heads, threads, [&](int64_t i) {
    if (i + threads < n * args.kv_heads) rows(i + threads).expect();
    rows(i).run();
  });
}

}  // namespace cpu
